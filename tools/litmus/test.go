package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// test is one litmus file: a program whose condition must not be reachable, and what its header
// says of it:
//
//	where: own = Own, cqe = word|last   variables and the source's names of what they model
//	assumed: done = …                   variables that stand for what no source here does
//	P0: submit-push(units tail) take    the tagged places that a thread runs, and the variables of
//	                                    each that are its part; #1-2,4: only these of a place's
//	                                    accesses to them
//	P2: assumed …                       a thread that is not ours: an SSD
//	reach: …                            a condition that must be reachable, or the test is empty
//	control NAME: P0:2 release -> relaxed; P1:3 drop; P1:4 swap 5
//	                                    a planted fault, by rows of a thread's instructions, with
//	                                    which the condition must be reachable
type test struct {
	name, file string
	title      string // first paragraph of the header
	where      map[string][]string
	assumed    map[string]string
	parts      [][]part // by thread
	foreign    []bool   // by thread: assumed
	reach      string
	controls   []control

	initial   string
	threads   []thread
	condition string
}

type thread struct {
	scope string // @cta 0,gpu 0
	rows  []string
}

// part holds what a thread runs of a tagged place.
type part struct {
	place string
	vars  []string // nil: all
	takes [][2]int // accesses, first and last of each range, from 1; nil: all
}

// has reports whether the part has the place's n-th access to its variables.
func (p part) has(n int) bool {
	return p.takes == nil || slices.ContainsFunc(p.takes, func(r [2]int) bool {
		return r[0] <= n && n <= r[1]
	})
}

type control struct {
	name  string
	edits []edit
}

type edit struct {
	thread, row int // from 0
	old, new    string
	drop        bool
	swap        int // with this row; -1: none
}

// variant is one program for Dartagnan.
type variant struct {
	test      *test
	name      string // safe, reach, or the control's
	reachable bool   // expected
	text      string
}

var (
	partText = regexp.MustCompile(`^([a-z0-9-]+)(\([a-z0-9 ]*\))?(?:#([0-9,-]+))?`)
	editText = regexp.MustCompile(`^P(\d+):(\d+) (?:(drop)|swap (\d+)|(\S+) -> (\S+))$`)
	scopes   = regexp.MustCompile(`^P(\d+)(@cta (\d+),gpu (\d+))$`)
)

func readTests(dir string) ([]*test, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.litmus"))
	if err != nil {
		return nil, err
	}
	var tests []*test
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		t, err := parseTest(filepath.Base(f), string(text))
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", folder, filepath.Base(f), err)
		}
		tests = append(tests, t)
	}
	if len(tests) == 0 {
		return nil, fmt.Errorf("no litmus files in %s", dir)
	}
	return tests, nil
}

func parseTest(file, text string) (*test, error) {
	t := &test{file: file, where: map[string][]string{}, assumed: map[string]string{}}
	first, rest, _ := strings.Cut(text, "\n")
	name, ok := strings.CutPrefix(first, "PTX ")
	if !ok || name+".litmus" != file {
		return nil, fmt.Errorf("line 1: %q: want PTX and the file's name", first)
	}
	t.name = name
	rest, ok = strings.CutPrefix(rest, "(*\n")
	head, rest, closed := strings.Cut(rest, "\n*)\n")
	if !ok || !closed {
		return nil, fmt.Errorf("no header between (* and *)")
	}
	init, rest, closed := strings.Cut(rest, "\n}\n")
	if !closed || !strings.HasPrefix(init, "{\n") {
		return nil, fmt.Errorf("no initial state between { and }")
	}
	t.initial = init[2:]
	body, cond, found := strings.Cut(rest, "exists\n")
	if !found {
		return nil, fmt.Errorf("no condition after exists")
	}
	t.condition = strings.TrimSpace(cond)
	if err := t.parseProgram(body); err != nil {
		return nil, err
	}
	return t, t.parseHeader(head)
}

func (t *test) parseProgram(body string) error {
	for i, line := range strings.Split(strings.TrimSpace(body), "\n") {
		cells := strings.Split(strings.TrimSuffix(strings.TrimSpace(line), ";"), "|")
		for k, c := range cells {
			c = strings.TrimSpace(c)
			if i == 0 {
				m := scopes.FindStringSubmatch(c)
				if m == nil || m[1] != strconv.Itoa(k) {
					return fmt.Errorf("thread %q: want P%d@cta N,gpu N", c, k)
				}
				t.threads = append(t.threads, thread{scope: m[2]})
				continue
			}
			if k >= len(t.threads) {
				return fmt.Errorf("row %q has more columns than threads", line)
			}
			if c != "" {
				t.threads[k].rows = append(t.threads[k].rows, c)
			}
		}
	}
	return nil
}

func (t *test) parseHeader(head string) error {
	t.parts = make([][]part, len(t.threads))
	t.foreign = make([]bool, len(t.threads))
	lines := joined(head)
	t.title = lines[0]
	for _, line := range lines[1:] {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		var err error
		switch {
		case key == "where":
			for w := range strings.SplitSeq(value, ",") {
				v, names, ok := strings.Cut(w, "=")
				if !ok {
					return fmt.Errorf("where: %q: want variable = name", w)
				}
				t.where[strings.TrimSpace(v)] = strings.Split(strings.TrimSpace(names), "|")
			}
		case key == "assumed":
			v, why, ok := strings.Cut(value, "=")
			if !ok || strings.TrimSpace(why) == "" {
				return fmt.Errorf("assumed: %q: want variable = what it stands for", value)
			}
			t.assumed[strings.TrimSpace(v)] = strings.TrimSpace(why)
		case key == "reach":
			t.reach = "(" + value + ")"
		case strings.HasPrefix(key, "control "):
			err = t.parseControl(strings.TrimPrefix(key, "control "), value)
		case len(key) > 1 && key[0] == 'P':
			err = t.parsePlaces(key, value)
		case line != "":
			err = fmt.Errorf("header: %q is no line that the header has", line)
		}
		if err != nil {
			return err
		}
	}
	if t.reach == "" || len(t.controls) == 0 {
		return fmt.Errorf("header: a test has a reach line and at least one control")
	}
	for i := range t.threads {
		if !t.foreign[i] && t.parts[i] == nil {
			return fmt.Errorf("header: P%d names no place", i)
		}
	}
	return nil
}

// joined makes one line of each paragraph, and of each line with its indented continuations.
func joined(head string) []string {
	var out []string
	for i, p := range strings.Split(strings.TrimSpace(head), "\n\n") {
		for k, l := range strings.Split(p, "\n") {
			if k > 0 && (i == 0 || strings.HasPrefix(l, " ")) {
				out[len(out)-1] += " " + strings.TrimSpace(l)
			} else {
				out = append(out, strings.TrimSpace(l))
			}
		}
	}
	return out
}

func (t *test) parsePlaces(key, value string) error {
	i, err := strconv.Atoi(key[1:])
	if err != nil || i >= len(t.threads) {
		return fmt.Errorf("header: no thread %s", key)
	}
	if strings.HasPrefix(value, "assumed ") {
		t.foreign[i] = true
		return nil
	}
	for value != "" {
		m := partText.FindStringSubmatch(value)
		if m == nil {
			return fmt.Errorf("header: %s: %q: want place(variables)#accesses", key, value)
		}
		p := part{place: m[1]}
		if m[2] != "" {
			p.vars = append([]string{}, strings.Fields(strings.Trim(m[2], "()"))...)
		}
		if m[3] != "" {
			for r := range strings.SplitSeq(m[3], ",") {
				from, to, _ := strings.Cut(r, "-")
				lo, err := strconv.Atoi(from)
				hi, err2 := strconv.Atoi(cmp.Or(to, from))
				if err != nil || err2 != nil || lo < 1 || hi < lo {
					return fmt.Errorf("header: %s: accesses %q: want such as 1-2,4", key, m[3])
				}
				p.takes = append(p.takes, [2]int{lo, hi})
			}
		}
		for _, v := range p.vars {
			if t.where[v] == nil {
				return fmt.Errorf("header: %s: variable %s is not under where", key, v)
			}
		}
		t.parts[i] = append(t.parts[i], p)
		value = strings.TrimSpace(value[len(m[0]):])
	}
	return nil
}

func (t *test) parseControl(name, value string) error {
	c := control{name: name}
	for e := range strings.SplitSeq(value, ";") {
		m := editText.FindStringSubmatch(strings.TrimSpace(e))
		if m == nil {
			return fmt.Errorf("control %s: %q: want P0:2 old -> new, P0:2 drop or P0:2 swap 3",
				name, e)
		}
		d := edit{old: m[5], new: m[6], drop: m[3] != "", swap: -1}
		d.thread, _ = strconv.Atoi(m[1])
		d.row, _ = strconv.Atoi(m[2])
		d.row--
		if m[4] != "" {
			d.swap, _ = strconv.Atoi(m[4])
			d.swap--
		}
		c.edits = append(c.edits, d)
	}
	t.controls = append(t.controls, c)
	_, err := t.edited(c)
	return err
}

// edited is the program with a control's fault.
func (t *test) edited(c control) ([]thread, error) {
	out := make([]thread, len(t.threads))
	for i, th := range t.threads {
		out[i] = thread{th.scope, slices.Clone(th.rows)}
	}
	for _, e := range c.edits {
		if e.thread >= len(out) || e.row < 0 || e.row >= len(out[e.thread].rows) ||
			e.swap >= len(out[e.thread].rows) {
			return nil, fmt.Errorf("control %s: P%d has no row %d", c.name, e.thread, e.row+1)
		}
		rows := out[e.thread].rows
		switch {
		case e.drop:
			rows[e.row] = ""
		case e.swap >= 0:
			rows[e.row], rows[e.swap] = rows[e.swap], rows[e.row]
		case !strings.Contains(rows[e.row], e.old):
			return nil, fmt.Errorf("control %s: %q does not have %q", c.name, rows[e.row], e.old)
		default:
			rows[e.row] = strings.Replace(rows[e.row], e.old, e.new, 1)
		}
	}
	return out, nil
}

// variants are the test itself, the proof that it is not empty, and its controls.
func (t *test) variants() []variant {
	out := []variant{
		{t, "safe", false, t.text(t.threads, t.condition)},
		{t, "reach", true, t.text(t.threads, t.reach)},
	}
	for _, c := range t.controls {
		threads, err := t.edited(c)
		if err != nil {
			continue // parseControl has tried it
		}
		out = append(out, variant{t, c.name, true, t.text(threads, t.condition)})
	}
	return out
}

// text is a litmus file without header.
func (t *test) text(threads []thread, condition string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "PTX %s\n{\n%s\n}\n", t.name, t.initial)
	rows := 0
	for i, th := range threads {
		if i > 0 {
			b.WriteString(" |")
		}
		fmt.Fprintf(&b, " P%d%s", i, th.scope)
		rows = max(rows, len(th.rows))
	}
	b.WriteString(" ;\n")
	for r := range rows {
		for i, th := range threads {
			if i > 0 {
				b.WriteString(" |")
			}
			if r < len(th.rows) {
				b.WriteString(" " + th.rows[r])
			}
		}
		b.WriteString(" ;\n")
	}
	fmt.Fprintf(&b, "exists\n%s\n", condition)
	return b.String()
}
