package main

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

const (
	tableBegins = "<!-- litmus results: bin/lab/litmus run --table -->\n"
	tableEnds   = "<!-- end of litmus results -->\n"
)

// writeTable puts the results into the chapter.
func writeTable(file string, tests []*test, src *source, results []result) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(old), tableBegins)
	_, after, closed := strings.Cut(rest, tableEnds)
	if !ok || !closed {
		return fmt.Errorf("%s has no place for the table: want the lines %q and %q", file,
			tableBegins, tableEnds)
	}
	text := before + tableBegins + "\n" + table(tests, src, results) + "\n" + tableEnds + after
	return os.WriteFile(file, []byte(text), 0o666)
}

// table has a line for each variant: what is expected, and what each model gives in how long.
func table(tests []*test, src *source, results []result) string {
	var b strings.Builder
	b.WriteString(digestLine(tests) + "\n\n" + handOvers(tests, src) + "\n")
	b.WriteString("| litmus test | program | expected |")
	for _, m := range models {
		fmt.Fprintf(&b, " PTX %s | s |", m)
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|---|", len(models)) + "\n")
	says := map[bool]string{true: "reachable", false: "unreachable"}
	for _, t := range tests {
		for _, v := range t.variants() {
			b.WriteString(rowStart(v))
			for _, m := range models {
				i := slices.IndexFunc(results, func(r result) bool {
					return r.test == t && r.name == v.name && r.model == m
				})
				fmt.Fprintf(&b, " %s | %.1f |", says[results[i].reachable], results[i].seconds)
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

// handOvers lists what the tests are of, and the tagged places that they model.
func handOvers(tests []*test, src *source) string {
	var b strings.Builder
	for _, t := range tests {
		byFile := map[string][]string{}
		for _, parts := range t.parts {
			for _, p := range parts {
				f := src.files[p.place]
				if !slices.Contains(byFile[f], p.place) {
					byFile[f] = append(byFile[f], p.place)
				}
			}
		}
		var where []string
		for _, f := range slices.Sorted(maps.Keys(byFile)) {
			where = append(where, "`"+f+"` ("+strings.Join(byFile[f], ", ")+")")
		}
		fmt.Fprintf(&b, "- **%s.** %s %s.\n", t.name, t.title, strings.Join(where, ", "))
	}
	return b.String()
}

// digestLine identifies the programs of the table.
func digestLine(tests []*test) string {
	h := sha256.New()
	for _, t := range tests {
		for _, v := range t.variants() {
			fmt.Fprintf(h, "%s\n%s\n", v.name, v.text)
		}
	}
	return fmt.Sprintf("<!-- programs: %x -->", h.Sum(nil)[:16])
}

// rowStart returns what a row of the table begins with, which does not depend on a run.
func rowStart(v variant) string {
	expected := "**unreachable**"
	program := "the source"
	switch {
	case v.name == "reach":
		expected, program = "reachable", "the source, its ordinary end"
	case v.reachable:
		expected, program = "reachable", "control: "+v.name
	}
	return fmt.Sprintf("| %s | %s | %s |", v.test.name, program, expected)
}
