package lint

import (
	"fmt"
	"go/scanner"
	"go/token"
	"strings"
	"testing"
)

// lineWidth is the most columns of a line of Go, with a tab as four. Tables in comments and what C
// has in them may be wider. What stands in quotes does not count: a message in one piece is found
// by searching for it.
const lineWidth = 100

// TestLinesAreNarrow holds the sources to lineWidth; generated files are as their generators write
// them.
func TestLinesAreNarrow(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		if strings.Contains(string(s.text[:min(len(s.text), 300)]), "DO NOT EDIT") {
			continue
		}
		for i, l := range strings.Split(withoutQuotes(s.text), "\n") {
			if c, ok := strings.CutPrefix(strings.TrimSpace(l), "//"); ok &&
				(strings.HasPrefix(c, "go:") || strings.HasPrefix(c, "\t") ||
					strings.HasPrefix(c, "  ")) {
				continue // a directive, a drawing or a table
			}
			if w := width(l); w > lineWidth {
				found = append(found, fmt.Sprintf("%s:%d has %d columns", s.path, i+1, w))
			}
		}
	}
	report(t, found, fmt.Sprintf("a line has up to %d columns, strings aside", lineWidth))
}

// withoutQuotes returns a source with its string literals empty and its lines in place.
func withoutQuotes(text []byte) string {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	var out strings.Builder
	done := 0
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			out.Write(text[done:])
			return out.String()
		}
		if tok != token.STRING && !strings.HasPrefix(lit, "/*") { // as C has it, for cgo
			continue
		}
		from := file.Offset(pos)
		out.Write(text[done:from])
		end := from + len(lit) + strings.Count(string(text[from:min(len(text), from+len(lit))]),
			"\r")
		out.WriteString(`""` + strings.Repeat("\n", strings.Count(lit, "\n")))
		done = end
	}
}

func width(l string) int {
	n := 0
	for _, r := range l {
		if r == '\t' {
			n += 3
		}
		n++
	}
	return n
}
