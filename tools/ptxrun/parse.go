package ptxrun

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// space is a state space of the PTX ISA.
type space uint8

const (
	generic space = iota
	global
	constant
	shared
	local
	parameter
)

var spaces = map[string]space{".global": global, ".const": constant, ".shared": shared,
	".local": local, ".param": parameter}

// variable is a declared name of a state space.
type variable struct {
	name        string
	space       space
	size, align int
	extern      bool
	offset      int    // in its space
	init        []byte // of .global and .const; may be shorter than size
}

// register is one declared register.
type register struct {
	bits int // 1 is a predicate
}

// limits of what Parse takes: far above any kernel, and low enough for hostile text.
const (
	maxRegisters = 1 << 20 // of a kernel
	maxVariable  = 1 << 26 // bytes
	maxAlign     = 1 << 12
)

// source is a kernel as it was written, which mutations change and compile reads.
type source struct {
	name     string
	line     int
	params   []variable
	vars     map[string]variable // .shared and .local of the kernel, by name
	families map[string]family   // %r<10>
	regs     map[string]register // declared one by one; scoped ones as name@scope
	labels   map[string]int      // to the index of the next instruction
	tables   map[string][]string // .branchtargets
	instrs   []Instr
	maxBlock int // threads by .maxntid; 0 where it does not say
	shadow   *shadow
}

// family is a parameterised register declaration, .reg .b32 %r<10>.
type family struct {
	register
	count int
}

type parser struct {
	lexer
	tok     token
	version string
	target  string
	vars    map[string]variable // of the module
	bytes   int                 // of .global and .const
	kernels []*source
	scopes  int
}

func (p *parser) errorf(format string, a ...any) error {
	return fmt.Errorf("ptx line %d: %s", p.tok.line, fmt.Sprintf(format, a...))
}

func (p *parser) advance() (err error) {
	p.tok, err = p.next()
	return err
}

// expect takes one token that must read so.
func (p *parser) expect(text string) error {
	if p.tok.text != text {
		return p.errorf("want %q, not %q", text, p.tok.text)
	}
	return p.advance()
}

// word takes a name.
func (p *parser) word() (string, error) {
	w := p.tok.text
	if w == "" || !wordStart(w[0]) {
		return "", p.errorf("want a name, not %q", w)
	}
	return w, p.advance()
}

// number takes a number of 0 to most.
func (p *parser) number(most int) (int, error) {
	n, err := strconv.ParseInt(strings.TrimSuffix(p.tok.text, "U"), 0, 64)
	if err != nil || n < 0 || n > int64(most) {
		return 0, p.errorf("want a number of 0 to %d, not %q", most, p.tok.text)
	}
	return int(n), p.advance()
}

func (p *parser) module() error {
	if err := p.advance(); err != nil {
		return err
	}
	linkage := ""
	for p.tok.text != "" {
		switch t := p.tok.text; t {
		case ".version", ".target", ".address_size":
			if err := p.header(t); err != nil {
				return err
			}
		case ".visible", ".weak", ".extern", ".common":
			linkage = t
			if err := p.advance(); err != nil {
				return err
			}
			continue
		case ".global", ".const", ".shared":
			v, err := p.variable(linkage == ".extern")
			if err != nil {
				return err
			}
			if err := p.declare(v); err != nil {
				return err
			}
		case ".entry":
			if err := p.entry(); err != nil {
				return err
			}
		case ".pragma":
			if err := p.pragma(); err != nil {
				return err
			}
		default:
			return p.errorf("%q is not run; a module has .version, .target, .address_size, .entry, .global, .const and .shared", t)
		}
		linkage = ""
	}
	if p.version == "" || p.target == "" {
		return p.errorf("no .version or no .target")
	}
	return nil
}

func (p *parser) header(directive string) error {
	if err := p.advance(); err != nil {
		return err
	}
	w, err := p.word()
	if err != nil {
		return err
	}
	switch directive {
	case ".version":
		p.version = w
	case ".target":
		p.target = w
		for p.tok.text == "," {
			if err := p.advance(); err != nil {
				return err
			}
			if _, err := p.word(); err != nil {
				return err
			}
		}
	case ".address_size":
		if w != "64" {
			return p.errorf(".address_size %s: only 64 is run", w)
		}
	}
	return nil
}

func (p *parser) pragma() error {
	for p.tok.text != ";" {
		if p.tok.text == "" {
			return p.errorf(".pragma does not end")
		}
		if err := p.advance(); err != nil {
			return err
		}
	}
	return p.advance()
}

// declare gives a module's variable its place.
func (p *parser) declare(v variable) error {
	if _, there := p.vars[v.name]; there {
		return p.errorf("%s is declared twice", v.name)
	}
	if v.space != shared {
		v.offset = alignUp(p.bytes, v.align)
		if p.bytes = v.offset + v.size; p.bytes > maxVariable {
			return p.errorf("variables of more than %d bytes", maxVariable)
		}
	}
	p.vars[v.name] = v
	return nil
}

func alignUp(n, align int) int { return (n + align - 1) / align * align }

// variable takes ".shared .align 4 .b8 name[16] = {…};" or the same as a parameter, without the
// semicolon.
func (p *parser) variable(extern bool) (variable, error) {
	v := variable{space: spaces[p.tok.text], extern: extern}
	unit, bits := 0, byte(0)
	for {
		if err := p.advance(); err != nil {
			return v, err
		}
		t := p.tok.text
		if t == ".align" {
			if err := p.advance(); err != nil {
				return v, err
			}
			n, err := strconv.Atoi(p.tok.text)
			if err != nil || n <= 0 || n > maxAlign || n&(n-1) != 0 {
				return v, p.errorf("alignment %q", p.tok.text)
			}
			v.align = n
			continue
		}
		if t == ".ptr" || spaces[t] != generic { // .param .u64 .ptr .global .align 8 name
			continue
		}
		k, ok := parseType(strings.TrimPrefix(t, "."))
		if !ok || t == "" || t[0] != '.' || k.kind == 'p' {
			break
		}
		unit, bits = k.bits/8, k.kind
	}
	if unit == 0 {
		return v, p.errorf("want a type, not %q", p.tok.text)
	}
	var err error
	if v.name, err = p.word(); err != nil {
		return v, err
	}
	v.size = unit
	v.align = max(v.align, 1)
	if v.align < unit {
		v.align = unit
	}
	for first := true; p.tok.text == "["; first = false {
		if err := p.advance(); err != nil {
			return v, err
		}
		n := 0
		if p.tok.text != "]" {
			if n, err = p.number(maxVariable); err != nil {
				return v, err
			}
		} else if !first || !extern {
			return v, p.errorf("%s has no size", v.name)
		}
		if v.size *= n; v.size > maxVariable {
			return v, p.errorf("%s has more than %d bytes", v.name, maxVariable)
		}
		if err := p.expect("]"); err != nil {
			return v, err
		}
	}
	if v.space == parameter {
		return v, nil
	}
	if p.tok.text == "=" {
		if v.space != global && v.space != constant {
			return v, p.errorf("%s may have no value at the start", v.name)
		}
		if v.init, err = p.initial(unit, bits); err != nil {
			return v, err
		}
		if len(v.init) > v.size {
			return v, p.errorf("%s has more values than bytes", v.name)
		}
	}
	return v, p.expect(";")
}

// initial takes "= 1" or "= {1, 2}".
func (p *parser) initial(unit int, kind byte) ([]byte, error) {
	var out []byte
	depth := 0
	for {
		if err := p.advance(); err != nil {
			return nil, err
		}
		switch p.tok.text {
		case "{":
			depth++
			continue
		case "}":
			depth--
		case ",":
			continue
		case ";", "":
			return nil, p.errorf("value at the start does not end")
		default:
			text := p.tok.text
			if text == "-" {
				if err := p.advance(); err != nil {
					return nil, err
				}
				text += p.tok.text
			}
			v, ok := parseNumber(text, ptype{kind, unit * 8})
			if !ok {
				return nil, p.errorf("%q is no number", text)
			}
			for i := range unit {
				out = append(out, byte(v>>(8*i)))
			}
			if len(out) > maxVariable {
				return nil, p.errorf("more than %d bytes of values", maxVariable)
			}
		}
		if depth == 0 {
			return out, p.advance()
		}
		if depth < 0 {
			return nil, p.errorf("} without {")
		}
	}
}

func (p *parser) entry() error {
	k := &source{line: p.tok.line, vars: map[string]variable{}, families: map[string]family{},
		regs: map[string]register{}, labels: map[string]int{}, tables: map[string][]string{}}
	if err := p.advance(); err != nil {
		return err
	}
	var err error
	if k.name, err = p.word(); err != nil {
		return err
	}
	if slices.ContainsFunc(p.kernels, func(o *source) bool { return o.name == k.name }) {
		return p.errorf("kernel %s stands twice", k.name)
	}
	if err := p.expect("("); err != nil {
		return err
	}
	offset := 0
	for p.tok.text != ")" {
		if p.tok.text != ".param" {
			return p.errorf("want .param, not %q", p.tok.text)
		}
		v, err := p.variable(false)
		if err != nil {
			return err
		}
		v.offset = alignUp(offset, v.align)
		if offset = v.offset + v.size; offset > maxVariable {
			return p.errorf("parameters of more than %d bytes", maxVariable)
		}
		k.params = append(k.params, v)
		if _, there := k.vars[v.name]; there {
			return p.errorf("%s is declared twice", v.name)
		}
		k.vars[v.name] = v
		if p.tok.text == "," {
			if err := p.advance(); err != nil {
				return err
			}
		} else if p.tok.text != ")" {
			return p.errorf("want , or ), not %q", p.tok.text)
		}
	}
	if err := p.advance(); err != nil {
		return err
	}
	if err := p.performance(k); err != nil {
		return err
	}
	if err := p.expect("{"); err != nil {
		return err
	}
	if err := p.body(k); err != nil {
		return err
	}
	p.kernels = append(p.kernels, k)
	return nil
}

// performance takes the directives between the parameters and the body.
func (p *parser) performance(k *source) error {
	for p.tok.text != "{" {
		d := p.tok.text
		switch d {
		case ".maxntid", ".reqntid":
			k.maxBlock = 1
		case ".minnctapersm", ".maxnreg", ".maxnctapersm":
		case ".pragma":
			if err := p.pragma(); err != nil {
				return err
			}
			continue
		default:
			return p.errorf("%q is no performance directive that is known here", d)
		}
		for {
			if err := p.advance(); err != nil {
				return err
			}
			n, err := p.number(math.MaxInt32)
			if err != nil {
				return err
			}
			if d == ".maxntid" || d == ".reqntid" {
				if k.maxBlock *= n; k.maxBlock > 1<<20 {
					return p.errorf("%s of more than 2^20 threads", d)
				}
			}
			if p.tok.text != "," {
				break
			}
		}
	}
	return nil
}

// scope holds what "{ .reg .pred q; … }" declares.
type scope struct {
	id    int
	names map[string]bool
}

// body takes statements to the brace that closes the kernel.
func (p *parser) body(k *source) error {
	open := []scope{{names: map[string]bool{}}}
	for {
		switch t := p.tok.text; {
		case t == "":
			return p.errorf("kernel %s does not end", k.name)
		case t == ";":
			if err := p.advance(); err != nil {
				return err
			}
		case t == "{":
			p.scopes++
			open = append(open, scope{p.scopes, map[string]bool{}})
			if len(open) > 64 {
				return p.errorf("more than 64 scopes in one another")
			}
			if err := p.advance(); err != nil {
				return err
			}
		case t == "}":
			if err := p.advance(); err != nil {
				return err
			}
			if open = open[:len(open)-1]; len(open) == 0 {
				return nil
			}
		case t == ".reg":
			if err := p.registers(k, &open[len(open)-1]); err != nil {
				return err
			}
		case t == ".shared" || t == ".local":
			v, err := p.variable(false)
			if err != nil {
				return err
			}
			if _, there := k.vars[v.name]; there {
				return p.errorf("%s is declared twice", v.name)
			}
			k.vars[v.name] = v
		case t == ".pragma":
			if err := p.pragma(); err != nil {
				return err
			}
		case t == "@" || wordStart(t[0]) && t[0] != '.':
			if err := p.statement(k, open); err != nil {
				return err
			}
		default:
			return p.errorf("%q begins no statement that is known here", t)
		}
	}
}

// registers takes ".reg .b32 %r<10>, tmp;".
func (p *parser) registers(k *source, in *scope) error {
	if err := p.advance(); err != nil {
		return err
	}
	t, ok := parseType(strings.TrimPrefix(p.tok.text, "."))
	if !ok {
		return p.errorf("%q is no type of a register", p.tok.text)
	}
	r := register{t.bits}
	for {
		if err := p.advance(); err != nil {
			return err
		}
		name, err := p.word()
		if err != nil {
			return err
		}
		if p.tok.text == "<" {
			if err := p.advance(); err != nil {
				return err
			}
			n, err := p.number(maxRegisters)
			if err != nil {
				return err
			}
			if err := p.expect(">"); err != nil {
				return err
			}
			if in.id != 0 {
				return p.errorf("%s<%d> in an inner scope", name, n)
			}
			if _, there := k.families[name]; there {
				return p.errorf("registers %s are declared twice", name)
			}
			k.families[name] = family{r, n}
		} else {
			full := name
			if in.id != 0 {
				in.names[name] = true
				full = scoped(name, in.id)
			}
			if _, there := k.regs[full]; there {
				return p.errorf("register %s is declared twice", name)
			}
			k.regs[full] = r
		}
		if p.tok.text != "," {
			return p.expect(";")
		}
	}
}

func scoped(name string, id int) string { return name + "@" + strconv.Itoa(id) }

// statement takes labels and one instruction.
func (p *parser) statement(k *source, open []scope) error {
	in := Instr{Kernel: k.name, Index: len(k.instrs), Line: p.tok.line}
	if p.tok.text == "@" {
		if err := p.advance(); err != nil {
			return err
		}
		if p.tok.text == "!" {
			in.Guard = "!"
			if err := p.advance(); err != nil {
				return err
			}
		}
		w, err := p.word()
		if err != nil {
			return err
		}
		in.Guard += resolve(w, open)
	}
	op, err := p.word()
	if err != nil {
		return err
	}
	if p.tok.text == ":" && in.Guard == "" {
		if err := p.advance(); err != nil {
			return err
		}
		return p.label(k, op)
	}
	in.Opcode = op
	var b strings.Builder
	depth := 0
	for {
		switch t := p.tok.text; {
		case t == "" || t == "@" || t == ":":
			return p.errorf("instruction %s does not end: %q", op, t)
		case t == ";" && depth != 0:
			return p.errorf("instruction %s has a bracket that does not close", op)
		case t == ";" || t == "," && depth == 0:
			if b.Len() == 0 && (t == "," || len(in.Operands) > 0) {
				return p.errorf("instruction %s has an empty operand", op)
			}
			if b.Len() > 0 {
				in.Operands = append(in.Operands, b.String())
			}
			b.Reset()
			if t == ";" {
				k.instrs = append(k.instrs, in)
				return p.advance()
			}
		case t == "," && depth > 0:
			b.WriteString(", ")
		case t == "[" || t == "{" || t == "(":
			depth++
			b.WriteString(t)
		case t == "]" || t == "}" || t == ")":
			if depth--; depth < 0 {
				return p.errorf("instruction %s closes a bracket that is not open", op)
			}
			b.WriteString(t)
		default:
			b.WriteString(resolve(t, open))
		}
		if err := p.advance(); err != nil {
			return err
		}
	}
}

// resolve gives a name of an inner scope its full name.
func resolve(name string, open []scope) string {
	for i := len(open) - 1; i > 0; i-- {
		if open[i].names[name] {
			return scoped(name, open[i].id)
		}
	}
	return name
}

// label takes what follows "name:".
func (p *parser) label(k *source, name string) error {
	_, there := k.labels[name]
	if _, table := k.tables[name]; there || table {
		return p.errorf("label %s stands twice", name)
	}
	if p.tok.text != ".branchtargets" {
		k.labels[name] = len(k.instrs)
		return nil
	}
	list := []string{}
	for {
		if err := p.advance(); err != nil {
			return err
		}
		w, err := p.word()
		if err != nil {
			return err
		}
		list = append(list, w)
		if p.tok.text != "," {
			k.tables[name] = list
			return p.expect(";")
		}
	}
}

// ptype is a fundamental type of the PTX ISA: kind u, s, b, f or p (predicate).
type ptype struct {
	kind byte
	bits int
}

// parseType reads "u32", "pred", "f16x2".
func parseType(s string) (ptype, bool) {
	switch s {
	case "pred":
		return ptype{'p', 1}, true
	case "f16x2", "bf16x2":
		return ptype{'b', 32}, true
	case "b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64",
		"f16", "f32", "f64":
		n, _ := strconv.Atoi(s[1:])
		return ptype{s[0], n}, true
	}
	return ptype{}, false
}

// parseNumber reads a literal as bits of a type.
func parseNumber(s string, t ptype) (uint64, bool) {
	neg := strings.HasPrefix(s, "-")
	body := strings.TrimPrefix(s, "-")
	if len(body) > 2 && body[0] == '0' && strings.ContainsRune("fFdD", rune(body[1])) {
		digits := 8
		if body[1] == 'd' || body[1] == 'D' {
			digits = 16
		}
		v, err := strconv.ParseUint(body[2:], 16, 64)
		if err != nil || len(body) != digits+2 {
			return 0, false
		}
		f := math.Float64frombits(v)
		if digits == 8 {
			f = float64(math.Float32frombits(uint32(v)))
		}
		switch {
		case t.bits == 32 && digits == 8:
		case t.bits == 64 && digits == 16:
		case t.kind == 'f' && t.bits == 64:
			v = math.Float64bits(f)
		case t.kind == 'f' && t.bits == 32:
			v = uint64(math.Float32bits(float32(f)))
		default:
			return 0, false
		}
		if neg {
			v ^= 1 << (t.bits - 1)
		}
		return v, true
	}
	if t.kind == 'f' {
		f, err := strconv.ParseFloat(s, t.bits)
		switch {
		case err != nil || t.bits < 32:
			return 0, false
		case t.bits == 32:
			return uint64(math.Float32bits(float32(f))), true
		}
		return math.Float64bits(f), true
	}
	v, err := strconv.ParseUint(strings.TrimSuffix(body, "U"), 0, 64)
	if err != nil || strings.Contains(body, "_") {
		return 0, false
	}
	if neg {
		v = -v
	}
	return truncate(v, t.bits), true
}

// truncate keeps the lowest bits.
func truncate(v uint64, bits int) uint64 {
	if bits >= 64 {
		return v
	}
	return v & (1<<bits - 1)
}
