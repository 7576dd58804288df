package ptxrun

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Module is parsed PTX, ready to run. It does not change; WithMutation makes another one.
type Module struct {
	Version string // of .version: 8.2
	Target  string // the first of .target: sm_70
	vars    map[string]variable
	kernels []*Kernel // in the order of the text
	data    []byte    // .global and .const variables
}

// Kernel is one .entry.
type Kernel struct {
	Name        string
	Params      []Param
	SharedBytes int // of the kernel's own .shared variables, without what a launch adds
	LocalBytes  int // of .local variables, for each thread
	MaxBlock    int // threads by .maxntid or .reqntid; 0 where the text does not say
	src         *source
	module      *Module
	prog        *program
}

// Param is one parameter of a kernel and its place in Launch.Params, in bytes.
type Param struct {
	Name                string
	Offset, Size, Align int
}

// Instr is one instruction as it was written. Names that an inner scope declares have the scope's
// number behind an @.
type Instr struct {
	Kernel   string
	Index    int    // from 0, in the order of the text
	Line     int    // from 1
	Guard    string // "%p1", "!%p1" or ""
	Opcode   string // with its modifiers
	Operands []string
}

func (i Instr) String() string {
	s := i.Opcode
	if i.Guard != "" {
		s = "@" + i.Guard + " " + s
	}
	if len(i.Operands) > 0 {
		s += " " + strings.Join(i.Operands, ", ")
	}
	return s
}

// Mutation is a planted change of one instruction. Fields that are zero change nothing.
type Mutation struct {
	Drop        bool   // the instruction does nothing
	NegateGuard bool   // runs where it did not, and the other way round; needs a guard
	Opcode      string // instead of the one that is there
	Operand     int    // the index of the operand that Text replaces
	Text        string // a register, an immediate, an address or a label, as in Instr.Operands
}

func (m Mutation) String() string {
	var parts []string
	if m.Drop {
		parts = append(parts, "drop")
	}
	if m.NegateGuard {
		parts = append(parts, "negate the guard")
	}
	if m.Opcode != "" {
		parts = append(parts, "opcode "+m.Opcode)
	}
	if m.Text != "" {
		parts = append(parts, fmt.Sprintf("operand %d is %s", m.Operand, m.Text))
	}
	return strings.Join(parts, ", ")
}

// Parse reads a module. It refuses text that Run could not execute; errors name line and token.
func Parse(src []byte) (*Module, error) {
	p := &parser{lexer: lexer{src: src, line: 1}, vars: map[string]variable{}}
	if err := p.module(); err != nil {
		return nil, err
	}
	m := &Module{Version: p.version, Target: p.target, vars: p.vars}
	if p.bytes > 0 {
		m.data = make([]byte, p.bytes+maxAlign)
	}
	for _, v := range p.vars {
		if v.space != shared && v.size > 0 {
			copy(alignedTo(m.data, maxAlign)[v.offset:], v.init)
		}
	}
	for _, s := range p.kernels {
		k, err := m.build(s)
		if err != nil {
			return nil, err
		}
		m.kernels = append(m.kernels, k)
	}
	return m, nil
}

// build makes a kernel from its source.
func (m *Module) build(s *source) (*Kernel, error) {
	k := &Kernel{Name: s.name, MaxBlock: s.maxBlock, src: s, module: m}
	for _, v := range s.params {
		k.Params = append(k.Params, Param{v.name, v.offset, v.size, v.align})
	}
	var err error
	if k.SharedBytes, k.LocalBytes, err = m.place(s); err != nil {
		return nil, err
	}
	if k.prog, err = compile(m, s); err != nil {
		return nil, err
	}
	return k, nil
}

// place lays out the .shared and .local variables of a kernel: its own ones, and the module's that
// it names. Dynamic shared memory begins behind them.
func (m *Module) place(s *source) (sharedBytes, localBytes int, err error) {
	names := map[string]bool{}
	for _, in := range s.instrs {
		for _, o := range in.Operands {
			for _, w := range strings.FieldsFunc(o, func(r rune) bool {
				return strings.ContainsRune("[]{}, +-", r)
			}) {
				names[w] = true
			}
		}
	}
	for n, v := range m.vars {
		if _, there := s.vars[n]; v.space == shared && names[n] && !there {
			s.vars[n] = v
		}
	}
	var dynamic []string
	for _, n := range slices.Sorted(maps.Keys(s.vars)) {
		v := s.vars[n]
		end := &sharedBytes
		switch {
		case v.space == local:
			end = &localBytes
		case v.space != shared:
			continue
		case v.extern:
			dynamic = append(dynamic, n)
			continue
		}
		v.offset = alignUp(*end, v.align)
		*end = v.offset + v.size
		s.vars[n] = v
		if *end > maxVariable {
			return 0, 0, fmt.Errorf("ptx line %d: kernel %s has more than %d bytes of variables",
				s.line, s.name, maxVariable)
		}
	}
	for _, n := range dynamic {
		sharedBytes = alignUp(sharedBytes, s.vars[n].align)
	}
	for _, n := range dynamic { // all of them begin at the same place
		v := s.vars[n]
		v.offset = sharedBytes
		s.vars[n] = v
	}
	localBytes = alignUp(localBytes, 16)
	return sharedBytes, localBytes, nil
}

// Kernels lists the names of the kernels, in the order of the text.
func (m *Module) Kernels() []string {
	var out []string
	for _, k := range m.kernels {
		out = append(out, k.Name)
	}
	return out
}

// Kernel finds a kernel by name.
func (m *Module) Kernel(name string) (*Kernel, bool) {
	i := slices.IndexFunc(m.kernels, func(k *Kernel) bool { return k.Name == name })
	if i < 0 {
		return nil, false
	}
	return m.kernels[i], true
}

// Instructions counts the instructions of the text.
func (k *Kernel) Instructions() int { return len(k.src.instrs) }

// Instr returns one instruction, of 0 to Instructions()-1.
func (k *Kernel) Instr(index int) Instr {
	in := k.src.instrs[index]
	in.Operands = slices.Clone(in.Operands)
	return in
}

// WithMutation returns a module in which one instruction is changed, or why the change makes no
// kernel: an opcode that is not known, an operand that does not fit. The other kernels are shared.
func (m *Module) WithMutation(kernel string, index int, mut Mutation) (*Module, error) {
	pos := slices.IndexFunc(m.kernels, func(k *Kernel) bool { return k.Name == kernel })
	if pos < 0 {
		return nil, fmt.Errorf("no kernel %s; the module has %s", kernel,
			strings.Join(m.Kernels(), ", "))
	}
	old := m.kernels[pos].src
	if index < 0 || index >= len(old.instrs) {
		return nil, fmt.Errorf("kernel %s has no instruction %d, but 0 to %d", kernel, index,
			len(old.instrs)-1)
	}
	in := m.kernels[pos].Instr(index)
	if mut.Drop {
		in.Guard, in.Opcode, in.Operands = "", "nop", nil
	}
	if mut.NegateGuard {
		if in.Guard == "" {
			return nil, fmt.Errorf("%s has no guard to negate", in)
		}
		if bare, ok := strings.CutPrefix(in.Guard, "!"); ok {
			in.Guard = bare
		} else {
			in.Guard = "!" + in.Guard
		}
	}
	if mut.Opcode != "" {
		in.Opcode = mut.Opcode
	}
	if mut.Text != "" {
		if mut.Operand < 0 || mut.Operand >= len(in.Operands) {
			return nil, fmt.Errorf("%s has no operand %d", in, mut.Operand)
		}
		in.Operands[mut.Operand] = mut.Text
	}
	s := *old
	s.instrs = slices.Clone(old.instrs)
	s.shadow = &shadow{index: index, text: old.instrs[index]}
	s.instrs[index] = in
	s.vars = maps.Clone(old.vars)
	changed := *m
	if len(m.data) > 0 {
		changed.data = make([]byte, len(m.data))
		copy(alignedTo(changed.data, maxAlign), alignedTo(m.data, maxAlign))
	}
	changed.kernels = slices.Clone(m.kernels)
	for i, k := range m.kernels {
		copied := *k
		copied.module = &changed
		changed.kernels[i] = &copied
	}
	k, err := changed.build(&s)
	if err != nil {
		return nil, err
	}
	changed.kernels[pos] = k
	return &changed, nil
}

// Region is memory that a launch may use.
type Region struct {
	Base, Size uint64
	ReadOnly   bool
	Far        bool // in the CPU's memory, for Traffic
}

// Memory lists what a launch may use of the global space, whose addresses are the process's own:
// any other address is an error. Without a list all of the process's memory is open, and only an
// address that is not mapped is an error. Regions may overlap and come in any order.
type Memory []Region

// Launch is one launch of a kernel.
type Launch struct {
	Grid, Block [3]int // zeros are ones
	SharedBytes int    // dynamic, behind the kernel's own
	Params      []byte // by Kernel.Params; copied
	Memory      Memory
	// Seed orders warps and sizes their turns; 0 takes them in order. With one worker and no other
	// thread at work on the memory, a seed gives the same run again.
	Seed uint64
	// Resident is the number of blocks under way at a time, as the SMs of a GPU bound it; further
	// ones start in the order of their index as others end. 0 is 16.
	Resident int
	// Workers is the number of goroutines that share the resident blocks. 0 is 1.
	Workers int
	// MaxInstructions ends a launch with an error after so many instructions of warps. 0 is no end.
	MaxInstructions int64
	// Traffic also counts what goes to the global space (Stats.Traffic).
	Traffic bool
	// Clock is %globaltimer in ns; nil is the system's clock.
	Clock func() uint64
}

// Stats holds what a launch did.
type Stats struct {
	Instructions int64   // of warps: one for any number of lanes
	Lanes        int64   // instructions times the lanes that ran them
	Executed     []int64 // by index of the instruction: how many warps ran it
	// Compared counts the runs of a mutation's instruction that could be held against the one that
	// was there: both only write registers, and read nothing that other threads change. Differed is
	// 0 where they always wrote the same; they are compared until they do not.
	Compared, Differed int64
	Traffic            Traffic
}
