package main

import (
	"fmt"
	"slices"
	"strings"
)

// instr is one instruction of PTX text and what it does with registers.
type instr struct {
	op     string // with its modifiers
	line   int
	writes []string
	reads  []string // the predicate's and those of an address, too
	to     string   // label of a branch
	guard  bool     // it has a predicate: it may do nothing
}

// entry is a kernel: its instructions, and where each label stands in them.
type entry struct {
	name   string
	code   []instr
	labels map[string]int
}

// noResult are the instructions without a destination; those of the opcode table besides have one,
// or several in braces or joined by "|".
var noResult = map[string]bool{"st": true, "red": true, "bar": true, "bra": true, "brx": true,
	"call": true, "ret": true, "exit": true, "trap": true, "fence": true, "membar": true,
	"nanosleep": true, "cp": true}

// base is an opcode without its modifiers.
func base(op string) string {
	b, _, _ := strings.Cut(op, ".")
	return b
}

// entries splits a module into its kernels. Functions that are no kernels, calls and jumps by
// table, which no module has, are errors.
func entries(text string) ([]*entry, error) {
	text = comment.ReplaceAllString(text, "")
	var out []*entry
	rest, line := text, 1
	for {
		pos := strings.Index(rest, ".entry ")
		if f := strings.Index(rest, ".func "); f >= 0 && (pos < 0 || f < pos) {
			return nil, fmt.Errorf("line %d: a function that is no kernel",
				line+strings.Count(rest[:f], "\n"))
		}
		if pos < 0 {
			return out, nil
		}
		name, _, _ := strings.Cut(rest[pos+len(".entry "):], "(")
		open := strings.IndexByte(rest[pos:], '{')
		if open < 0 {
			return nil, fmt.Errorf("kernel %s has no body", name)
		}
		open += pos
		end, depth := open, 0
		for ; end < len(rest); end++ {
			if rest[end] == '{' {
				depth++
			} else if rest[end] == '}' {
				if depth--; depth == 0 {
					break
				}
			}
		}
		if depth != 0 {
			return nil, fmt.Errorf("kernel %s does not end", name)
		}
		e := &entry{name: strings.TrimSpace(name), labels: map[string]int{}}
		if err := e.parse(rest[open+1:end], line+strings.Count(rest[:open+1], "\n")); err != nil {
			return nil, fmt.Errorf("kernel %s: %w", e.name, err)
		}
		out = append(out, e)
		line += strings.Count(rest[:end+1], "\n")
		rest = rest[end+1:]
	}
}

// parse reads the statements of a body that begins on a line. A brace that opens or closes a block
// of inline assembly ends a statement; those of vectors stand within one.
func (e *entry) parse(body string, line int) error {
	begin, pos := 0, line
	scope := 0 // blocks of inline assembly so far, which have registers of their own
	deep := false
	for i := 0; i < len(body); i++ {
		blank := strings.TrimSpace(body[begin:i]) == ""
		switch c := body[i]; {
		case c == '\n':
			line++
			continue
		case c == ':' && !strings.ContainsAny(strings.TrimSpace(body[begin:i]), " \t[."):
			e.labels[strings.TrimSpace(body[begin:i])] = len(e.code)
		case c == '{' && blank:
			scope++
			deep = true
		case c == '}' && blank:
			deep = false
		case c == ';':
			s := strings.TrimSpace(body[begin:i])
			pos = line - strings.Count(strings.TrimLeft(body[begin:i], " \t\r\n"), "\n")
			own := 0
			if deep {
				own = scope
			}
			if err := e.add(s, pos, own); err != nil {
				return err
			}
		default:
			continue
		}
		begin = i + 1
	}
	return nil
}

// add appends a statement. scope is not 0 within a block of inline assembly.
func (e *entry) add(s string, line, scope int) error {
	if s == "" || s[0] == '.' {
		return nil
	}
	in := instr{line: line}
	named := func(operand string) []string {
		var regs []string
		for _, w := range strings.FieldsFunc(operand, func(r rune) bool {
			return strings.ContainsRune("[]{}|!,+-() \t\r\n", r)
		}) {
			switch {
			case w[0] == '%' && virtual.MatchString(w):
				regs = append(regs, w)
			case scope != 0 && w[0] >= 'a' && w[0] <= 'z':
				regs = append(regs, fmt.Sprintf("%s@%d", w, scope))
			}
		}
		return regs
	}
	if s[0] == '@' {
		p, rest, _ := strings.Cut(s[1:], " ")
		if i := strings.IndexByte(p, '\t'); i >= 0 {
			p, rest = p[:i], p[i+1:]+" "+rest
		}
		in.guard, in.reads, s = true, named(p), strings.TrimSpace(rest)
	}
	f := strings.Fields(s)
	in.op = f[0]
	operands := splitOperands(strings.TrimSpace(s[len(f[0]):]))
	switch b := base(in.op); {
	case b == "brx" || b == "call":
		return fmt.Errorf("line %d: %s, which this check cannot follow", line, in.op)
	case b == "bra":
		if len(operands) != 1 {
			return fmt.Errorf("line %d: %s with %d operands", line, in.op, len(operands))
		}
		in.to = operands[0]
		operands = nil
	case !noResult[b] && len(operands) > 0:
		in.writes = named(operands[0])
		operands = operands[1:]
	}
	for _, o := range operands {
		in.reads = append(in.reads, named(o)...)
	}
	e.code = append(e.code, in)
	return nil
}

// splitOperands cuts at the commas that stand in no braces or brackets.
func splitOperands(s string) []string {
	var out []string
	depth, begin := 0, 0
	for i, c := range s {
		switch c {
		case '{', '[', '(':
			depth++
		case '}', ']', ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, strings.TrimSpace(s[begin:i]))
				begin = i + 1
			}
		}
	}
	if last := strings.TrimSpace(s[begin:]); last != "" {
		out = append(out, last)
	}
	return out
}

// next are the instructions that may follow one.
func (e *entry) next(i int) ([]int, error) {
	in := &e.code[i]
	var to []int
	switch base(in.op) {
	case "bra":
		pos, ok := e.labels[in.to]
		if !ok {
			return nil, fmt.Errorf("line %d: no label %s", in.line, in.to)
		}
		to = append(to, pos)
		if !in.guard {
			return to, nil
		}
	case "ret", "exit", "trap":
		if !in.guard {
			return nil, nil
		}
	}
	if i+1 < len(e.code) {
		to = append(to, i+1)
	}
	return to, nil
}

// effect reports whether an instruction does something besides its result: a compiler keeps it, and
// what it is computed from.
func effect(op string) bool { return noResult[base(op)] || base(op) == "atom" }

// bitset is a set of an entry's registers, by number.
type bitset []uint64

func (b bitset) has(i int) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b bitset) set(i int)      { b[i/64] |= 1 << (i % 64) }
func (b bitset) clear(i int)    { b[i/64] &^= 1 << (i % 64) }

// unneeded are the instructions that keep says, none of whose results anybody needs: not only
// reads, but reads for something that has an effect. It is the live variables of a compiler's book,
// by rounds until nothing changes.
func (e *entry) unneeded(keep func(op string) bool) ([]instr, error) {
	numbers := map[string]int{}
	number := func(regs []string) []int {
		var out []int
		for _, r := range regs {
			if _, ok := numbers[r]; !ok {
				numbers[r] = len(numbers)
			}
			out = append(out, numbers[r])
		}
		return out
	}
	n := len(e.code)
	writes, reads, follow := make([][]int, n), make([][]int, n), make([][]int, n)
	for i, in := range e.code {
		writes[i], reads[i] = number(in.writes), number(in.reads)
		var err error
		if follow[i], err = e.next(i); err != nil {
			return nil, err
		}
	}
	words := len(numbers)/64 + 1
	before := make([]bitset, n+1) // needed before each instruction, and after the last
	for i := range before {
		before[i] = make(bitset, words)
	}
	after := func(i int, out bitset) {
		clear(out)
		for _, j := range follow[i] {
			for w, v := range before[j] {
				out[w] |= v
			}
		}
	}
	need := make(bitset, words)
	for changed := true; changed; {
		changed = false
		for i := n - 1; i >= 0; i-- {
			after(i, need)
			used := effect(e.code[i].op) || slices.ContainsFunc(writes[i], need.has)
			if !e.code[i].guard {
				for _, r := range writes[i] {
					need.clear(r)
				}
			}
			if used {
				for _, r := range reads[i] {
					need.set(r)
				}
			}
			if !slices.Equal(need, before[i]) {
				copy(before[i], need)
				changed = true
			}
		}
	}
	var out []instr
	for i, in := range e.code {
		if after(i, need); keep(in.op) && !slices.ContainsFunc(writes[i], need.has) {
			out = append(out, in)
		}
	}
	return out, nil
}
