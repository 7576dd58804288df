package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// instruction is one access, fence or barrier of a litmus thread.
type instruction struct {
	operation
	red     bool   // a reduction: nothing is read
	barrier string // its number
	text    string
}

var (
	memory = regexp.MustCompile(`^(ld|st)\.(weak|(relaxed|acquire|release)\.(gpu|sys))` +
		` (?:(r\d+), )?([a-z][a-z0-9]*)(?:, \S+)?$`)
	atomic = regexp.MustCompile(`^(atom|red)\.(relaxed|acquire|release|acq_rel)\.(gpu|sys)\.` +
		`(add|or|and|cas|exch) (?:(r\d+), )?([a-z][a-z0-9]*), \S+(?:, \S+)?$`)
	fence   = regexp.MustCompile(`^fence\.(acq_rel)\.(gpu|sys)$`)
	barrier = regexp.MustCompile(`^bar\.cta\.sync (\d+)$`)
	jumps   = regexp.MustCompile(`^(?:(?:beq|bne|blt|bgt|ble|bge) r\d+, \S+, LC\d+|goto LC\d+|` +
		`LC\d+:|(?:add|sub) r\d+, \S+, \S+|ld\.weak r\d+, (?:r?\d+))$`)
)

// instructions are a thread's accesses, fences and barriers; jumps and arithmetic are left out.
func instructions(rows []string) ([]instruction, error) {
	var out []instruction
	for _, row := range rows {
		in := instruction{text: row}
		if m := memory.FindStringSubmatch(row); m != nil {
			in.kind, in.order, in.scope, in.name = m[1], m[2], m[4], m[6]
			if m[3] != "" {
				in.order = m[3]
			}
		} else if m := atomic.FindStringSubmatch(row); m != nil {
			in.red, in.order, in.scope, in.kind, in.name = m[1] == "red", m[2], m[3], m[4], m[6]
		} else if m := fence.FindStringSubmatch(row); m != nil {
			in.kind, in.order, in.scope = "fence", m[1], m[2]
		} else if m := barrier.FindStringSubmatch(row); m != nil {
			in.kind, in.barrier = "bar", m[1]
		} else if jumps.MatchString(row) {
			continue
		} else {
			return nil, fmt.Errorf("%q is no instruction that the check knows", row)
		}
		out = append(out, in)
	}
	return out, nil
}

// checkAll compares all tests with the source, both ways.
func checkAll(tests []*test, src *source) error {
	var all []error
	used := map[string]bool{}
	for _, t := range tests {
		for _, parts := range t.parts {
			for _, p := range parts {
				used[p.place] = true
			}
		}
		if err := t.check(src); err != nil {
			all = append(all, fmt.Errorf("%s/%s: %w", folder, t.file, err))
		}
	}
	for _, place := range slices.Sorted(maps.Keys(src.places)) {
		if !used[place] {
			all = append(all, fmt.Errorf("%s: no litmus test in %s models the place %q",
				src.files[place], folder, place))
		}
	}
	return errors.Join(all...)
}

// step is an operation of the source that a thread may do next.
type step struct {
	operation
	variable string
	barrier  string // which one, of which place
}

// check reports where a test's threads differ from the source: the accesses to its variables,
// one by one, and in their order. Fences and barriers of the source may lack in the test, which
// then has more behaviours; what the test has must be in the source.
func (t *test) check(src *source) error {
	return t.checkFrom(0, src, map[string]string{})
}

// checkFrom checks the threads from one on. same maps each number of a block's
// barriers to a barrier of the source; where a thread leaves a choice, those after it decide.
func (t *test) checkFrom(i int, src *source, same map[string]string) error {
	if i == len(t.threads) {
		return nil
	}
	th := t.threads[i]
	got, err := instructions(th.rows)
	if err != nil {
		return fmt.Errorf("thread P%d: %w", i, err)
	}
	if t.foreign[i] {
		return t.checkFrom(i+1, src, same)
	}
	got = slices.DeleteFunc(got, func(in instruction) bool { return t.assumed[in.name] != "" })
	want, host, err := t.steps(i, src)
	if err != nil {
		return fmt.Errorf("thread P%d: %w", i, err)
	}
	if host { // what the host reads and writes plainly is not told apart in Go's source
		got = slices.DeleteFunc(got, func(in instruction) bool { return in.order == "weak" })
	}
	for k := range got {
		if got[k].kind == "bar" {
			got[k].barrier = th.scope + " barrier " + got[k].barrier
		}
	}
	var later error
	err = follow(got, want, same, func() error {
		later = t.checkFrom(i+1, src, same)
		return later
	})
	if err != nil && later == nil {
		err = fmt.Errorf("thread P%d: %w", i, err)
	}
	return err
}

// steps are the operations of a thread's places that concern its variables.
func (t *test) steps(i int, src *source) (out []step, host bool, err error) {
	for k, p := range t.parts[i] {
		ops, ok := src.places[p.place]
		if !ok {
			return nil, false, fmt.Errorf("no line of the source has the tag \"litmus: %s\"", p.place)
		}
		host = host || strings.HasSuffix(src.files[p.place], ".go")
		accesses, barriers := 0, 0
		for _, o := range ops {
			s := step{operation: o}
			switch o.kind {
			case "bar":
				barriers++
				s.barrier = fmt.Sprintf("%s (%d.) barrier %d", p.place, k, barriers)
			case "fence":
			default:
				if s.variable = t.variable(p, o.name); s.variable == "" {
					continue
				}
				accesses++
				if !p.has(accesses) {
					continue
				}
			}
			out = append(out, s)
		}
		last := 0
		for _, r := range p.takes {
			last = max(last, r[1])
		}
		if accesses < last || accesses == 0 && (p.vars == nil || len(p.vars) > 0) {
			return nil, false, fmt.Errorf("place %s has %d accesses to %s", p.place, accesses,
				t.namesOf(p))
		}
	}
	return out, host, nil
}

// variable returns what models that name of the source in a part; none: it is not modelled.
func (t *test) variable(p part, name string) string {
	for _, v := range slices.Sorted(maps.Keys(t.where)) {
		if slices.Contains(t.where[v], name) && (p.vars == nil || slices.Contains(p.vars, v)) {
			return v
		}
	}
	return ""
}

func (t *test) namesOf(p part) string {
	var all []string
	for _, v := range slices.Sorted(maps.Keys(t.where)) {
		if p.vars == nil || slices.Contains(p.vars, v) {
			all = append(all, strings.Join(t.where[v], "|"))
		}
	}
	return strings.Join(all, ", ")
}

// follow goes through a thread's instructions and the source's operations together, then does next.
func follow(got []instruction, want []step, same map[string]string, next func() error) error {
	var deepest error // of a barrier that was tried and was not the one
	fail := func(err error) error { return cmp.Or(deepest, err) }
	for len(want) > 0 {
		w := want[0]
		if w.kind != "bar" && w.kind != "fence" {
			if len(got) == 0 {
				return fail(fmt.Errorf("the source continues with %v (%s), and the test ends",
					w.operation, w.at))
			}
			if why := differs(got[0], w); why != "" {
				return fail(fmt.Errorf("%q: the source has %v (%s): %s", got[0].text,
					w.operation, w.at, why))
			}
			got, want = got[1:], want[1:]
			continue
		}
		want = want[1:]
		if len(got) == 0 || got[0].kind != w.kind || got[0].scope != w.scope {
			continue
		}
		// It is this one, or this one is left out.
		known := same[got[0].barrier]
		if w.kind == "fence" || known == w.barrier {
			return follow(got[1:], want, same, next)
		}
		if known == "" {
			same[got[0].barrier] = w.barrier
			err := follow(got[1:], want, same, next)
			if err == nil {
				return nil
			}
			deepest = cmp.Or(deepest, err)
			delete(same, got[0].barrier)
		}
	}
	if len(got) > 0 {
		return fail(fmt.Errorf("%q is not in the source at its place", got[0].text))
	}
	if err := next(); err != nil {
		return fail(err)
	}
	return nil
}

// differs returns the reason why an instruction does not model an operation.
func differs(in instruction, w step) string {
	order := w.order
	// A driver's compiler makes a reduction of a read-modify-write whose result is dropped, and a
	// reduction acquires nothing.
	if reduces := w.dropped && w.kind != "cas" && w.kind != "exch"; reduces {
		if !in.red {
			return "its result is dropped, so it is a red"
		}
		switch order {
		case "acquire":
			order = "relaxed"
		case "acq_rel":
			order = "release"
		}
	} else if in.red {
		return "its result is used, so it is an atom"
	}
	switch {
	case in.name != w.variable:
		return "another variable"
	case in.kind != w.kind:
		return "another kind"
	case in.order != order || in.scope != w.scope:
		return "another order or scope"
	}
	return ""
}
