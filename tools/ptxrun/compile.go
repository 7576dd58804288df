package ptxrun

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// kind says who handles an instruction: a function for each lane's registers, or the warp itself,
// because it moves lanes, makes them wait or ends them.
type kind uint8

const (
	plain kind = iota
	branch
	branchTable
	exit
	trap
	collective // waits for the lanes of a member mask
	barrier    // waits for threads of the block
	sleep
)

// inst is a compiled instruction. Slots name rows of the warp's register file, 32 lanes each;
// predicates are in a file of their own, a bit for each lane.
type inst struct {
	exec func(w *warp, in *inst, lanes uint32)
	kind kind
	join bool // a divergent branch may wait here for all its lanes
	not  bool // of guard
	// observes says that it may see what another thread has done meanwhile.
	observes bool
	line     int32
	// guard is a predicate slot. predTrue where there is none.
	guard         int32
	d, a, b, c, e int32   // slots
	list          []int32 // slots of a vector
	p, q          int32   // predicate slots: p is written (setp), or read (selp)
	notQ          bool
	f1            func(a uint64) uint64
	f2            func(a, b uint64) uint64
	f3            func(a, b, c uint64) uint64
	cmp           func(a, b uint64) bool
	mem           *access
	imm           int64
	target        int32   // of a branch
	targets       []int32 // of a branchTable
	meet          int32   // where the paths of a branch come together again; -1 for nowhere
	group         func(w *warp, parts []part, member uint32)
	key           string  // of a collective: lanes meet at instructions with the same
	uses, defs    []int32 // register slots
}

// Predicate slots that never change, and the register slot that nobody reads.
const (
	predFalse int32 = iota
	predTrue
	predSink
	firstPred
)

const (
	sink int32 = iota
	firstSlot
)

// fill is a register slot that has its value before the first instruction.
type fill struct {
	slot  int32
	value uint64
	of    func(w *warp, lane int) uint64 // instead of value
}

// program is a compiled kernel.
type program struct {
	insts        []inst
	slots, preds int32
	fills        []fill
	shadow       *inst // of a mutation
}

// compiler makes a program of a source.
type compiler struct {
	module *Module
	src    *source
	prog   *program
	regs   map[string]int32
	preds  map[string]int32
	consts map[string]int32
	in     *inst
	uses   []int32 // register slots that the instruction reads
	defs   []int32
}

// compile also finds the begin of dynamic shared memory and the size of the static one.
func compile(m *Module, s *source) (*program, error) {
	c := &compiler{module: m, src: s, regs: map[string]int32{}, preds: map[string]int32{},
		consts: map[string]int32{}}
	c.prog = &program{insts: make([]inst, len(s.instrs)), slots: firstSlot, preds: firstPred}
	flow := make([]flowOf, len(s.instrs))
	for i := range s.instrs {
		c.uses, c.defs = nil, nil
		if err := c.one(&c.prog.insts[i], s.instrs[i]); err != nil {
			return nil, err
		}
		uses, defs := c.uses, c.defs
		if w := s.shadow; w != nil && w.index == i {
			if err := c.one(&w.in, w.text); err != nil {
				return nil, err
			}
			c.prog.shadow = &w.in
		}
		c.prog.insts[i].uses, c.prog.insts[i].defs = uses, defs
		flow[i] = flowOf{uses: uses, defs: defs}
	}
	if len(s.instrs) == 0 {
		return nil, fmt.Errorf("ptx line %d: kernel %s has no instruction", s.line, s.name)
	}
	if last := c.prog.insts[len(s.instrs)-1]; last.kind != exit && last.kind != trap &&
		last.kind != branch || last.guard != predTrue {
		return nil, fmt.Errorf("ptx line %d: kernel %s runs over its end",
			s.instrs[len(s.instrs)-1].Line, s.name)
	}
	c.prog.reconverge()
	c.prog.shareSlots(flow)
	if s.shadow != nil {
		s.shadow.watch(c.prog)
	}
	return c.prog, nil
}

// one compiles an instruction.
func (c *compiler) one(in *inst, text Instr) error {
	c.in = in
	*c.in = inst{line: int32(text.Line), guard: predTrue, meet: -1, target: -1,
		d: sink, a: sink, b: sink, c: sink, e: sink, p: predSink, q: predTrue}
	if err := c.instruction(text); err != nil {
		return fmt.Errorf("ptx line %d: kernel %s: %s: %w", text.Line, c.src.name, text, err)
	}
	return nil
}

func (c *compiler) instruction(text Instr) error {
	if text.Guard != "" {
		bare, not := strings.CutPrefix(text.Guard, "!")
		slot, err := c.predDst(bare)
		if err != nil {
			return err
		}
		c.in.guard, c.in.not = slot, not
	}
	o := splitOpcode(text.Opcode)
	build, ok := builders[o.base]
	if !ok {
		return fmt.Errorf("opcode %s is not run", text.Opcode)
	}
	if err := build(c, o, text.Operands); err != nil {
		return err
	}
	if len(o.mods) > 0 || len(o.types) > 0 {
		return fmt.Errorf("%s: modifier %s has no meaning here", text.Opcode,
			append(o.mods, typeNames(o.types)...)[0])
	}
	return nil
}

func typeNames(ts []ptype) []string {
	var out []string
	for _, t := range ts {
		out = append(out, t.String())
	}
	return out
}

func (t ptype) String() string {
	if t.kind == 'p' {
		return "pred"
	}
	return string(t.kind) + strconv.Itoa(t.bits)
}

// opcode is an opcode in parts. Builders take what they know; what is left is an error.
type opcode struct {
	base  string
	mods  []string
	types []ptype
}

func splitOpcode(s string) *opcode {
	parts := strings.Split(s, ".")
	o := &opcode{base: parts[0]}
	if parts = parts[1:]; o.base == "cp" && len(parts) > 0 {
		o.base, parts = "cp."+parts[0], parts[1:]
	}
	for _, p := range parts {
		if t, ok := parseType(p); ok && !strings.HasSuffix(p, "x2") {
			o.types = append(o.types, t)
		} else {
			o.mods = append(o.mods, p)
		}
	}
	return o
}

// take removes one of the modifiers and returns it, "" where none is there.
func (o *opcode) take(any ...string) string {
	for i, m := range o.mods {
		if slices.Contains(any, m) {
			o.mods = slices.Delete(slices.Clone(o.mods), i, i+1)
			return m
		}
	}
	return ""
}

// typ takes the first type.
func (o *opcode) typ() (ptype, error) {
	if len(o.types) == 0 {
		return ptype{}, fmt.Errorf("no type")
	}
	t := o.types[0]
	o.types = o.types[1:]
	return t, nil
}

func count(ops []string, least, most int) error {
	if len(ops) < least || len(ops) > most {
		return fmt.Errorf("%d operands", len(ops))
	}
	return nil
}

// declared finds a register of the text.
func (c *compiler) declared(name string) (register, bool) {
	if r, ok := c.src.regs[name]; ok {
		return r, true
	}
	digits := len(name)
	for digits > 0 && name[digits-1] >= '0' && name[digits-1] <= '9' {
		digits--
	}
	// %r12 may be of family %r or, less likely, %r1.
	for i := digits; i < len(name); i++ {
		f, ok := c.src.families[name[:i]]
		if !ok || name[i] == '0' && i+1 < len(name) {
			continue
		}
		if n, err := strconv.Atoi(name[i:]); err == nil && n < f.count {
			return f.register, true
		}
	}
	return register{}, false
}

// pred is the slot of a predicate register, or of the constants 0, 1 and -1.
func (c *compiler) pred(name string) (int32, error) {
	switch name {
	case "0":
		return predFalse, nil
	case "1", "-1":
		return predTrue, nil
	}
	r, ok := c.declared(name)
	if !ok || r.bits != 1 {
		return 0, fmt.Errorf("%s is no predicate register", name)
	}
	slot, ok := c.preds[name]
	if !ok {
		slot = c.prog.preds
		c.prog.preds++
		c.preds[name] = slot
	}
	return slot, nil
}

func (c *compiler) predDst(name string) (int32, error) {
	if name == "_" {
		return predSink, nil
	}
	slot, err := c.pred(name)
	if err == nil && slot < firstPred {
		err = fmt.Errorf("%s is no predicate register", name)
	}
	return slot, err
}

// slot is the row of a register.
func (c *compiler) slot(name string) int32 {
	s, ok := c.regs[name]
	if !ok {
		s = c.prog.slots
		c.prog.slots++
		c.regs[name] = s
	}
	return s
}

// wider allows registers that have more bits than the type (ld, st, cvt).
type wider bool

// dst is the slot of a destination and the width of its register.
func (c *compiler) dst(name string, t ptype, w wider) (int32, int, error) {
	if name == "_" {
		return sink, t.bits, nil
	}
	r, ok := c.declared(name)
	if !ok || r.bits == 1 {
		return 0, 0, fmt.Errorf("%s is no register", name)
	}
	if r.bits < t.bits || r.bits > t.bits && !bool(w) {
		return 0, 0, fmt.Errorf("%s has %d bits, not those of %s", name, r.bits, t)
	}
	s := c.slot(name)
	c.defs = append(c.defs, s)
	return s, r.bits, nil
}

// srcOf is the slot of a source: a register, a number, the address of a variable or a special
// register.
func (c *compiler) srcOf(text string, t ptype, w wider) (int32, error) {
	if r, ok := c.declared(text); ok {
		if r.bits == 1 || r.bits < t.bits || r.bits > t.bits && !bool(w) {
			return 0, fmt.Errorf("%s has %d bits, not those of %s", text, r.bits, t)
		}
		s := c.slot(text)
		c.uses = append(c.uses, s)
		return s, nil
	}
	if of, bits, ok := specialFill(text); ok {
		if bits != t.bits {
			return 0, fmt.Errorf("%s has %d bits, not those of %s", text, bits, t)
		}
		return c.fixed("special "+text, fill{of: of}), nil
	}
	if v, ok := parseNumber(text, t); ok {
		return c.fixed(fmt.Sprintf("%#x", v), fill{value: v}), nil
	}
	name, off, err := splitOffset(text)
	if err != nil {
		return 0, err
	}
	v, ok := c.variable(name)
	if !ok {
		return 0, fmt.Errorf("%s is no register, number or variable", text)
	}
	if t.bits != 64 && (t.bits != 32 || v.space == global || v.space == constant) {
		return 0, fmt.Errorf("the address of %s does not fit %s", name, t)
	}
	pos := uint64(v.offset) + uint64(off)
	if v.space == global || v.space == constant {
		return c.fixed("data "+strconv.Itoa(v.offset)+text, fill{of: func(w *warp, _ int) uint64 {
			return w.block.run.data + pos
		}}), nil
	}
	return c.fixed(fmt.Sprintf("%#x", truncate(pos, t.bits)),
		fill{value: truncate(pos, t.bits)}), nil
}

func (c *compiler) variable(name string) (variable, bool) {
	if v, ok := c.src.vars[name]; ok {
		return v, true
	}
	v, ok := c.module.vars[name]
	return v, ok
}

// splitOffset reads name+12, name+-4, name-4.
func splitOffset(text string) (name string, off int64, err error) {
	i := strings.IndexAny(text, "+-")
	if i <= 0 {
		return text, 0, nil
	}
	digits := strings.TrimPrefix(text[i:], "+")
	off, err = strconv.ParseInt(digits, 0, 64)
	if err != nil {
		return "", 0, fmt.Errorf("%s has no plain offset", text)
	}
	return text[:i], off, nil
}

// fixed is a slot that is filled before the kernel begins.
func (c *compiler) fixed(key string, f fill) int32 {
	s, ok := c.consts[key]
	if !ok {
		s = c.prog.slots
		c.prog.slots++
		f.slot = s
		c.consts[key] = s
		c.prog.fills = append(c.prog.fills, f)
	}
	return s
}

// sources sets a, b, c and e from operands of one type.
func (c *compiler) sources(t ptype, ops ...string) error {
	for i, to := range []*int32{&c.in.a, &c.in.b, &c.in.c, &c.in.e} {
		if i == len(ops) {
			break
		}
		s, err := c.srcOf(ops[i], t, false)
		if err != nil {
			return err
		}
		*to = s
	}
	return nil
}

// address reads [name+offset]: the slot of its base, and the offset.
func (c *compiler) address(text string) (slot int32, off int64, err error) {
	inner, ok := strings.CutPrefix(text, "[")
	inner, ok2 := strings.CutSuffix(inner, "]")
	if !ok || !ok2 {
		return 0, 0, fmt.Errorf("%s is no address", text)
	}
	name, off, err := splitOffset(inner)
	if err != nil {
		return 0, 0, err
	}
	if r, ok := c.declared(name); ok {
		if r.bits != 64 && r.bits != 32 {
			return 0, 0, fmt.Errorf("%s has %d bits, and an address 32 or 64", name, r.bits)
		}
		s := c.slot(name)
		c.uses = append(c.uses, s)
		return s, off, nil
	}
	if v, ok := c.variable(name); ok && v.space == shared || v.space == parameter {
		s, err := c.srcOf(name, ptype{'u', 64}, false)
		return s, off, err
	}
	s, err := c.srcOf(inner, ptype{'u', 64}, false)
	return s, 0, err
}

// vector splits {a, b, c}.
func vector(text string) ([]string, bool) {
	inner, ok := strings.CutPrefix(text, "{")
	inner, ok2 := strings.CutSuffix(inner, "}")
	if !ok || !ok2 {
		return nil, false
	}
	return strings.Split(inner, ", "), true
}

func (c *compiler) label(name string) (int32, error) {
	pos, ok := c.src.labels[name]
	if !ok {
		return 0, fmt.Errorf("no label %s in this kernel", name)
	}
	if pos == len(c.src.instrs) {
		return 0, fmt.Errorf("label %s stands behind the last instruction", name)
	}
	return int32(pos), nil
}
