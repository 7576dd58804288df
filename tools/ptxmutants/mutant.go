package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"helios/tools/ptxrun"
)

// Classes of changes.
const (
	Operation  = "operation"  // add for sub, and for or, any for all
	Comparison = "comparison" // less for less or equal, equal for different
	Operand    = "operand"    // another register that is read nearby
	Constant   = "constant"   // an immediate or an offset, by one item
	Predicate  = "predicate"  // the guard's opposite
	Store      = "store"      // a write that is not made
	Barrier    = "barrier"    // a barrier, a wait or a fence that is not there
	Order      = "order"      // a weaker memory order or a smaller scope
)

// Classes lists them.
func Classes() []string {
	return []string{Operation, Comparison, Operand, Constant, Predicate, Store, Barrier, Order}
}

// Mutant is one change.
type Mutant struct {
	Kernel   string
	Index    int // of the instruction
	Line     int // of the PTX
	Class    string
	Was      string
	Mutation ptxrun.Mutation
	// OrderOnly: what is lost is order between threads, which an interpreter whose accesses are
	// sequentially consistent cannot show.
	OrderOnly bool
}

func (m Mutant) String() string {
	return fmt.Sprintf("%s ptx line %d: %s: %s", m.Kernel, m.Line, m.Was, m.Mutation)
}

// All lists every change of a kernel that this package knows. Some of them may not parse.
func All(k *ptxrun.Kernel) []Mutant {
	var out []Mutant
	reads := map[byte][]string{} // the last registers that were read, by kind
	for i := range k.Instructions() {
		in := k.Instr(i)
		add := func(class string, orderOnly bool, m ptxrun.Mutation) {
			out = append(out, Mutant{k.Name, i, in.Line, class, in.String(), m, orderOnly})
		}
		words := strings.Split(in.Opcode, ".")
		if in.Guard != "" && words[0] != "nop" {
			add(Predicate, false, ptxrun.Mutation{NegateGuard: true})
		}
		for _, op := range otherOperations(words) {
			add(Operation, false, ptxrun.Mutation{Opcode: op})
		}
		if words[0] == "setp" {
			for _, c := range comparisons[words[1]] {
				add(Comparison, false, ptxrun.Mutation{Opcode: with(words, 1, c)})
			}
		}
		switch kind := words[0]; {
		case kind == "bar" || kind == "barrier":
			// Lanes of a warp run in step here, so only others' order is lost with bar.warp.
			add(Barrier, words[1] == "warp", ptxrun.Mutation{Drop: true})
		case kind == "membar" || kind == "fence":
			add(Barrier, true, ptxrun.Mutation{Drop: true})
		case kind == "cp" && slices.Contains(words, "wait_group"),
			kind == "cp" && slices.Contains(words, "commit_group"):
			add(Barrier, false, ptxrun.Mutation{Drop: true})
		case kind == "st" || kind == "red" || kind == "cp":
			add(Store, false, ptxrun.Mutation{Drop: true})
		}
		for _, op := range weaker(words) {
			add(Order, true, ptxrun.Mutation{Opcode: op})
		}
		if words[0] == "bra" || words[0] == "ret" || words[0] == "bar" {
			continue
		}
		for o, text := range in.Operands {
			if o == 0 && writes(words[0]) {
				continue
			}
			for _, c := range constants(text, words[len(words)-1]) {
				add(Constant, false, ptxrun.Mutation{Operand: o, Text: c})
			}
			if reg := register(text); reg != "" {
				of := reads[kindOf(reg)]
				for n, others := len(of)-1, 0; n >= 0 && others < 2; n-- {
					if of[n] != reg {
						others++
						add(Operand, false, ptxrun.Mutation{Operand: o,
							Text: strings.Replace(text, reg, of[n], 1)})
					}
				}
			}
		}
		for o, text := range in.Operands {
			if reg := register(text); reg != "" && (o > 0 || !writes(words[0])) {
				k := kindOf(reg)
				reads[k] = append(slices.DeleteFunc(reads[k],
					func(r string) bool { return r == reg }), reg)
			}
		}
	}
	return out
}

// Sample picks n different changes that parse: one half by an instruction at random, so frequent
// instructions are frequent, and the other by a class at random, so barriers are there. Fewer where
// there are no more.
func Sample(m *ptxrun.Module, kernel string, n int, seed uint64) ([]Mutant, error) {
	k, ok := m.Kernel(kernel)
	if !ok {
		return nil, fmt.Errorf("no kernel %s; the module has %s", kernel,
			strings.Join(m.Kernels(), ", "))
	}
	h := seed
	for _, c := range kernel {
		h = h*1099511628211 + uint64(c)
	}
	r := rand.New(rand.NewPCG(seed, h))
	left := All(k)
	var out []Mutant
	for len(out) < n && len(left) > 0 {
		class := ""
		if r.IntN(2) == 0 {
			class = Classes()[r.IntN(len(Classes()))]
		}
		var of []int
		if class == "" {
			instr := left[r.IntN(len(left))].Index
			for i, x := range left {
				if x.Index == instr {
					of = append(of, i)
				}
			}
			class = left[of[r.IntN(len(of))]].Class
			of = slices.DeleteFunc(of, func(i int) bool { return left[i].Class != class })
		} else {
			for i, x := range left {
				if x.Class == class {
					of = append(of, i)
				}
			}
		}
		if len(of) == 0 {
			continue
		}
		pos := of[r.IntN(len(of))]
		x := left[pos]
		left = slices.Delete(left, pos, pos+1)
		if _, err := m.WithMutation(kernel, x.Index, x.Mutation); err == nil {
			out = append(out, x)
		}
	}
	return out, nil
}

// with is an opcode with another word in one place, or without it.
func with(words []string, at int, word string) string {
	changed := slices.Clone(words)
	if word == "" {
		return strings.Join(slices.Delete(changed, at, at+1), ".")
	}
	changed[at] = word
	return strings.Join(changed, ".")
}

// comparisons are the neighbours of a comparison.
var comparisons = map[string][]string{
	"lt": {"le", "ge"}, "le": {"lt", "gt"}, "gt": {"ge", "le"}, "ge": {"gt", "lt"}, "eq": {"ne"},
	"ne": {"eq"}, "ltu": {"leu"}, "leu": {"ltu"}, "gtu": {"geu"}, "geu": {"gtu"}, "equ": {"neu"},
	"neu": {"equ"}, "num": {"nan"}, "nan": {"num"},
}

// operations are the replacements of an instruction, by its first word.
var operations = map[string][]string{
	"add": {"sub"}, "sub": {"add"}, "and": {"or"}, "or": {"and", "xor"}, "xor": {"or"},
	"shl": {"shr"}, "shr": {"shl"}, "min": {"max"}, "max": {"min"}, "div": {"rem"},
	"rem": {"div"}, "clz": {"popc"}, "popc": {"clz"}, "neg": {"mov"}, "not": {"mov"},
	"abs": {"mov"}, "sqrt": {"rcp"}, "rcp": {"sqrt"},
}

// later are the replacements of a word behind the first one: of atomics, shuffles and votes.
var later = map[string]map[string]string{
	"atom": {"add": "max", "exch": "add", "or": "and", "and": "or", "min": "max", "max": "min"},
	"red":  {"add": "max", "or": "and", "and": "or", "min": "max", "max": "min"},
	"shfl": {"idx": "bfly", "up": "down", "down": "up", "bfly": "idx"},
	"vote": {"any": "all", "all": "any"},
	"mul":  {"lo": "hi", "hi": "lo"},
	"bfe":  {"u32": "s32", "s32": "u32"},
}

// floating is the type of a float, where remainders and shifts are none.
func floating(words []string) bool { return strings.HasPrefix(words[len(words)-1], "f") }

// otherOperations lists opcodes that take the same operands.
func otherOperations(words []string) []string {
	var out []string
	last := words[len(words)-1]
	for _, op := range operations[words[0]] {
		if words[0] == "div" && floating(words) {
			op = "mul"
		}
		changed := []string{op}
		switch op {
		case "mov", "and", "or", "xor", "shl", "shr":
			if changed = append(changed, last); op == "shr" && strings.HasPrefix(last, "b") {
				changed[1] = "u" + last[1:]
			} else if op == "shl" && last != "pred" {
				changed[1] = "b" + last[1:]
			}
		default:
			changed = append(changed, words[1:]...)
		}
		out = append(out, strings.Join(changed, "."))
	}
	for i := 1; i < len(words); i++ {
		if op := later[words[0]][words[i]]; op != "" {
			out = append(out, with(words, i, op))
		}
	}
	// a product as a sum
	if words[0] == "mul" && floating(words) {
		out = append(out, with(words, 0, "add"))
	}
	return out
}

// weaker lists opcodes of a weaker order or a smaller scope.
func weaker(words []string) []string {
	var out []string
	for i, w := range words[1:] {
		pos := i + 1
		switch {
		case w == "acq_rel" && words[0] == "fence", w == "mmio":
		case w == "acquire" || w == "release" || w == "acq_rel":
			out = append(out, with(words, pos, "relaxed"))
		case w == "sys":
			out = append(out, with(words, pos, "gpu"))
		case w == "gpu":
			out = append(out, with(words, pos, "cta"))
		case w == "volatile":
			out = append(out, with(words, pos, ""))
		}
	}
	return out
}

// writes reports whether operand 0 is a register that the instruction writes.
func writes(kind string) bool {
	switch kind {
	case "st", "red", "cp", "bar", "barrier", "fence", "membar", "nanosleep", "trap", "prefetch":
		return false
	}
	return true
}

// constants are the immediates near the one of an operand: a number, or the offset of an address.
func constants(text, kind string) []string {
	if n, err := strconv.ParseInt(text, 0, 64); err == nil {
		if n == 0 {
			return []string{"1"}
		}
		return []string{strconv.FormatInt(n+1, 10), strconv.FormatInt(n-1, 10)}
	}
	if hex, ok := strings.CutPrefix(text, "0f"); ok {
		if bits, err := strconv.ParseUint(hex, 16, 32); err == nil { // half or twice as much, or 1
			if bits<<1 == 0 {
				return []string{"0f3F800000"}
			}
			return []string{fmt.Sprintf("0f%08X", bits^0x00800000)}
		}
	}
	inner, ok := strings.CutPrefix(text, "[")
	if !ok {
		return nil
	}
	inner = strings.TrimSuffix(inner, "]")
	bits, err := strconv.Atoi(strings.TrimLeft(kind, "bsuf"))
	if err != nil || bits%8 != 0 {
		return nil
	}
	base, offset := inner, 0
	if pos := strings.LastIndexAny(inner, "+-"); pos > 0 {
		if n, err := strconv.Atoi(strings.ReplaceAll(inner[pos:], "+", "")); err == nil {
			base, offset = strings.TrimSpace(inner[:pos]), n
		}
	}
	offset += bits / 8
	return []string{fmt.Sprintf("[%s%+d]", base, offset)}
}

// register is the register of an operand, alone or in an address; "" where there is none or where
// it is special.
func register(text string) string {
	t := strings.TrimLeft(text, "[!-")
	if !strings.HasPrefix(t, "%") || strings.Contains(t, "%tid") || strings.Contains(t, ",") {
		return ""
	}
	end := strings.IndexAny(t, "]+- ")
	if end < 0 {
		end = len(t)
	}
	t = t[:end]
	if len(t) < 3 || strings.Contains(t, ".") || t[len(t)-1] < '0' || t[len(t)-1] > '9' &&
		!strings.Contains(t, "@") {
		return ""
	}
	return t
}

// kindOf tells registers of one kind from others: their names are %r1, %rd1, %rs1, %f1, %fd1, %p1.
func kindOf(reg string) byte {
	switch {
	case strings.HasPrefix(reg, "%rd"):
		return 'd'
	case strings.HasPrefix(reg, "%rs"):
		return 's'
	case strings.HasPrefix(reg, "%fd"):
		return 'g'
	}
	return reg[1]
}
