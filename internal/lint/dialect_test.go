package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// dialect matches phrases that a stranger reads twice.
var dialect = []*regexp.Regexp{
	regexp.MustCompile(`^\W*(\w+|The \w+|Its \w+)( of \w+)? ` +
		`(is|are) (what|whether|how|where|who|when|of)\b`),
	regexp.MustCompile(`\b(tells?|says|told) (whether|if|how|what|which|where|why)\b`),
	regexp.MustCompile(`(^|[.:] )(What|Whether|Who) [a-z][^?]*([.:]|$)`),
	regexp.MustCompile(`\b(gone on with|goes on with|let go of|lets go of|barren|of itself|by turn)\b`),
}

// vague are variables whose names say nothing of their value.
var vague = []string{"at", "most", "told"}

// dialectLeft counts the findings in rooms that are not rewritten yet. Numbers here only fall.
var dialectLeft = map[string]int{
	".":        7,
	".ci":      1,
	"cmd":      0,
	"cuda":     0,
	"dataset":  0,
	"docs":     21,
	"gpuio":    13,
	"graph":    0,
	"internal": 6,
	"python":   0,
	"sched":    0,
	"tools":    0,
}

// TestPlainProse finds the dialect in comments, strings and documents, and variables of vague
// names.
func TestPlainProse(t *testing.T) {
	found := map[string][]string{}
	look := func(file string, line int, text string) {
		for _, r := range dialect {
			if m := r.FindString(text); m != "" {
				found[room(file)] = append(found[room(file)], fmt.Sprintf("%s:%d: %q", file, line, m))
			}
		}
	}
	for _, s := range sources(t) {
		if s.dir == "internal/lint" ||
			strings.Contains(string(s.text[:min(len(s.text), 300)]), "DO NOT EDIT") {
			continue
		}
		for _, g := range s.file.Comments {
			look(s.path, s.fset.Position(g.Pos()).Line, strings.ReplaceAll(g.Text(), "\n", " "))
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.BasicLit:
				text, err := strconv.Unquote(n.Value)
				if n.Kind == token.STRING && err == nil && !s.test {
					look(s.path, s.fset.Position(n.Pos()).Line, text)
				}
			case *ast.AssignStmt:
				for _, l := range n.Lhs {
					id, ok := l.(*ast.Ident)
					if ok && n.Tok == token.DEFINE && slices.Contains(vague, id.Name) {
						r := room(s.path)
						found[r] = append(found[r], s.at(n.Pos())+": "+id.Name)
					}
				}
			}
			return true
		})
	}
	for file, text := range texts(t) {
		for line, paragraph := range paragraphs(file, string(text)) {
			look(file, line, paragraph)
		}
	}
	for _, r := range slices.Sorted(maps.Keys(found)) {
		if n := len(found[r]); n > dialectLeft[r] {
			report(t, found[r], fmt.Sprintf("plain prose; %s has %d such places, and %d are allowed", r, n,
				dialectLeft[r]))
		}
	}
}

// room returns the top folder of a file, "." for a file of none.
func room(file string) string {
	top, _, below := strings.Cut(file, "/")
	if !below {
		return "."
	}
	return top
}

// paragraphs returns the prose of a document, or the comments of another text, by line.
func paragraphs(file, text string) map[int]string {
	out := map[int]string{}
	begin := 0
	code := false
	for i, l := range strings.Split(text, "\n") {
		l = strings.TrimSpace(l)
		switch path.Ext(file) {
		case ".md":
			if strings.HasPrefix(l, "```") {
				code = !code
			}
			if code || strings.HasPrefix(l, "#") {
				l = ""
			}
		case ".ptx", ".txt":
			return nil
		default:
			mark := regexp.MustCompile(`^(//|#|\*|/\*) ?`).FindString(l)
			if mark == "" {
				l = ""
			}
			l = strings.TrimSpace(strings.TrimPrefix(l, mark))
		}
		if l == "" {
			begin = i + 1
			continue
		}
		out[begin+1] = strings.TrimSpace(out[begin+1] + " " + l)
	}
	return out
}

func TestDialectItself(t *testing.T) {
	for text, want := range map[string]bool{
		"Config is of a plan.": true, "peek tells whether a row follows": true,
		"What is free is not used.": true, "What is DiskGNN?": false,
		"reports whether a row follows": false, "Lines maps rows to cache lines.": false,
		"A stream that is barren": true,
	} {
		got := slices.ContainsFunc(dialect, func(r *regexp.Regexp) bool {
			return r.MatchString(text)
		})
		if got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
