// Package vec has what the generators of loops over rows share: vector widths, memory accesses that
// stop before a vector's end, and arguments in a struct.
package vec

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Level is a vector width and the stripes of a row that its registers hold.
type Level struct {
	Name    string
	Lanes   int
	Stripes []int // in vectors, widest first; 0 is the masked rest
	Vec     func() reg.VecVirtual
}

// AVX2 is vectors of 8 elements.
func AVX2(stripes ...int) Level {
	return Level{"AVX2", 8, stripes, func() reg.VecVirtual { return YMM() }}
}

// AVX512 is vectors of 16 elements.
func AVX512(stripes ...int) Level {
	return Level{"AVX512", 16, stripes, func() reg.VecVirtual { return ZMM() }}
}

// Bytes is the length of a vector.
func (l Level) Bytes() int { return 4 * l.Lanes }

var masks Mem

// TailMasks makes 8 times all ones and 8 times 0 by this name: a window of it masks the last
// elements at AVX2. It comes before the first Rest.
func TailMasks(name string) {
	masks = GLOBL(name, RODATA|NOPTR)
	for i := range 16 {
		v := uint32(0)
		if i < 8 {
			v = 0xffffffff
		}
		DATA(4*i, U32(v))
	}
}

// Rest is a vector's worth of memory access that stops after some elements.
type Rest struct {
	l Level
	k reg.Register // AVX512
	m reg.VecVirtual
}

// Rest stops after n elements, up to Lanes.
func (l Level) Rest(n reg.Register) Rest {
	r := Rest{l: l}
	pos := GP64()
	if l.Lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), pos)
		BZHIQ(n, pos, pos)
		KMOVW(pos.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	MOVQ(U32(8), pos)
	SUBQ(n, pos)
	VMOVDQU(Mem{Base: base, Index: pos, Scale: 4}, r.m)
	return r
}

// Clamped stops after n elements, of which there may be more than Lanes, or fewer than 0.
func (l Level) Clamped(n reg.Register) Rest {
	r := Rest{l: l}
	pos, limit := GP64(), GP64()
	MOVQ(n, pos)
	XORQ(limit, limit)
	TESTQ(pos, pos)
	CMOVQLT(limit, pos)
	MOVQ(U32(uint32(l.Lanes)), limit)
	CMPQ(pos, limit)
	CMOVQGT(limit, pos)
	if l.Lanes == 16 {
		r.k = K()
		MOVQ(I32(-1), limit)
		BZHIQ(pos, limit, limit)
		KMOVW(limit.As32(), r.k)
		return r
	}
	r.m = YMM()
	base := GP64()
	LEAQ(masks, base)
	SUBQ(pos, limit)
	VMOVDQU(Mem{Base: base, Index: limit, Scale: 4}, r.m)
	return r
}

// Load sets the other elements to 0.
func (r Rest) Load(m Mem, v reg.VecVirtual) {
	if r.l.Lanes == 16 {
		VMOVUPS_Z(m, r.k, v)
	} else {
		VMASKMOVPS(m, r.m, v)
	}
}

// Store leaves the other elements as they are.
func (r Rest) Store(v reg.VecVirtual, m Mem) {
	if r.l.Lanes == 16 {
		VMOVUPS(v, r.k, m)
	} else {
		VMASKMOVPS(v, r.m, m)
	}
}

// Stripe is a part of a row: Count vectors, or the masked rest where Vectors is 0.
type Stripe struct {
	Name                  string // of its label; others begin with it
	Vectors, Count, Width int    // Width: elements
}

// Each writes a loop for each stripe of l, over todo elements: body ends with Next, but for the
// masked rest. done is the label behind the loops.
func (l Level) Each(todo reg.Register, name func(vectors int) string, done string,
	body func(s Stripe)) {
	for i, vectors := range l.Stripes {
		s := Stripe{name(vectors), vectors, max(vectors, 1), max(vectors, 1) * l.Lanes}
		next := done
		if i+1 < len(l.Stripes) {
			next = name(l.Stripes[i+1])
		}
		Label(s.Name)
		if vectors > 0 {
			CMPQ(todo, U32(uint32(s.Width)))
			JL(LabelRef(next))
		} else {
			TESTQ(todo, todo)
			JE(LabelRef(next))
		}
		body(s)
	}
}

// ByWidth is the usual name of a stripe.
func ByWidth(vectors int) string { return fmt.Sprintf("stripe%d", vectors) }

// Get loads a vector, or the rest.
func (s Stripe) Get(tail Rest, m Mem, v reg.VecVirtual) {
	if s.Vectors > 0 {
		VMOVUPS(m, v)
	} else {
		tail.Load(m, v)
	}
}

// Times sets t to a vector, or the rest, times w.
func (s Stripe) Times(tail Rest, m Mem, w, t reg.VecVirtual) {
	if s.Vectors > 0 {
		VMULPS(m, w, t)
	} else {
		tail.Load(m, t)
		VMULPS(t, w, t)
	}
}

// Store stores whole vectors: around the caches unless streams, which sets the flags, finds 0.
func (s Stripe) Store(sums []reg.VecVirtual, to func(v int) Mem, streams func()) {
	streams()
	JE(LabelRef(s.Name + "plain"))
	for v := range s.Count {
		VMOVNTPS(sums[v], to(v))
	}
	JMP(LabelRef(s.Name + "stored"))
	Label(s.Name + "plain")
	for v := range s.Count {
		VMOVUPS(sums[v], to(v))
	}
	Label(s.Name + "stored")
}

// Next repeats the loop for the next elements; the byte offsets of places grow with them.
func (s Stripe) Next(todo reg.Register, places ...reg.Register) {
	for _, p := range places {
		ADDQ(U32(uint32(s.Width*4)), p)
	}
	SUBQ(U32(uint32(s.Width)), todo)
	JMP(LabelRef(s.Name))
}

// End is that of a loop over what may not be there: label bad returns false, done true.
func End() {
	ok := GP8()
	Label("bad")
	XORB(ok, ok)
	JMP(LabelRef("end"))
	Label("done")
	MOVB(U8(1), ok)
	Label("end")
	VZEROUPPER()
	Store(ok, ReturnIndex(0))
	RET()
}

// Field is a field of the struct of arguments.
func Field(args reg.Register, offset int) Mem { return Mem{Base: args, Disp: offset} }

// Arg is a field in a register.
func Arg(args reg.Register, offset int) reg.GPVirtual {
	r := GP64()
	MOVQ(Field(args, offset), r)
	return r
}

// Own is a copy of a pointer among the arguments, in the function's frame, for one that moves on.
// Behind an array another object begins, and the garbage collector may read the arguments, but not
// this frame: it stops no goroutine inside assembly.
func Own(args reg.Register, offset int) Mem {
	m := AllocLocal(8)
	MOVQ(Arg(args, offset), m)
	return m
}

// Zero sets a vector to 0.
func (l Level) Zero(v reg.VecVirtual) {
	if l.Lanes == 16 {
		VPXORD(v, v, v)
	} else {
		VXORPS(v, v, v)
	}
}
