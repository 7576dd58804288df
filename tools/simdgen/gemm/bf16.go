package main

import (
	"encoding/binary"

	. "github.com/mmcloughlin/avo/build" //nolint:staticcheck // the generator's language
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// Products of factors in bfloat16 go by pairs of steps, the odd step before the even one, as
// VDPBF16PS adds them (Intel SDM, volume 2). With AVX512-BF16 a panel has 32 bits for a pair, the
// even step in the low half. Without it a panel has two float32, the odd step first, for the
// kernels of float32.

// Bits of a kernel's argument load; simd has the same.
const (
	loadC     = 1
	flushSums = 2
)

// bf is AVX512-BF16.
var bf = isa{"B", 16, []int{1, 2, 3, 4, 6, 8, 12}, zmm.vec, true, true}

// halves writes the kernels of AVX512-BF16.
func halves() {
	for _, m := range bf.rows {
		bf.kernel(m, 1)
		bf.kernel(m, 2)
	}
	bf.bf16()
	bf.peak()
}

// evex appends an instruction of three zmm registers, see encode.
func evex(prefix, opcode uint8, d, v, m reg.VecPhysical) {
	code := encode(prefix, opcode, uint8(d.PhysicalIndex()), uint8(v.PhysicalIndex()),
		uint8(m.PhysicalIndex()))
	Instruction(&ir.Instruction{Opcode: "LONG",
		Operands: []Op{U32(binary.LittleEndian.Uint32(code[:4]))}})
	Instruction(&ir.Instruction{Opcode: "WORD",
		Operands: []Op{U16(binary.LittleEndian.Uint16(code[4:]))}})
}

// encode is the bytes of an instruction of map 0F38 with zmm registers d, v (EVEX.vvvv) and m: Go's
// assembler lacks those of AVX512-BF16. The fields are those of Intel SDM volume 2, section 2.7.
func encode(prefix, opcode, d, v, m uint8) [6]byte {
	not := func(r uint8, bit, to uint) uint8 { return ^r >> bit & 1 << to }
	return [6]byte{
		0x62,
		not(d, 3, 7) | not(m, 4, 6) | not(m, 3, 5) | not(d, 4, 4) | 2,
		^v&15<<3 | 4 | prefix,
		2<<5 | not(v, 4, 3),
		opcode,
		0xc0 | d&7<<3 | m&7,
	}
}

// Prefixes and opcodes of encode.
const (
	prefixF3, prefixF2            = 2, 3
	opVDPBF16PS, opVCVTNE2PS2BF16 = 0x52, 0x72
)

// vdpbf16ps adds to d, in each lane, the products of a's and b's odd elements and then of their
// even ones: fused multiply-adds that round to nearest even and flush what is below normal.
func vdpbf16ps(a, b, d reg.VecPhysical) { evex(prefixF3, opVDPBF16PS, d, b, a) }

// vcvtne2ps2bf16 rounds to d's low half what low has, to its high half what high has.
func vcvtne2ps2bf16(low, high, d reg.VecPhysical) {
	evex(prefixF2, opVCVTNE2PS2BF16, d, high, low)
}

// flush has a kernel set MXCSR's flush to zero if its argument says so, and returns what undoes
// that. Go does not preempt assembly. A fault inside a kernel would leave the thread so, but its
// memory is the device's, which is there for as long as it runs. VDPBF16PS needs no MXCSR.
func (s *isa) flush() (end func(tag string)) {
	if s.pairs {
		return func(string) {}
	}
	saved := AllocLocal(8)
	whether := func(label string) {
		f := GP64()
		Load(Param("load"), f)
		TESTQ(U32(flushSums), f)
		JEQ(LabelRef(label))
	}
	whether("begin")
	csr := GP32()
	VSTMXCSR(saved)
	MOVL(saved, csr)
	ORL(U32(1<<15), csr)
	MOVL(csr, saved.Offset(4))
	VLDMXCSR(saved.Offset(4))
	Label("begin")
	return func(tag string) {
		whether("end" + tag)
		VLDMXCSR(saved)
		Label("end" + tag)
	}
}

// bf16 writes the packing of rounded factors.
func (s *isa) bf16() {
	s.round()
	s.zip("Y", 2*s.lanes, "panels of two vectors of columns")
	s.zip("X", s.rows[len(s.rows)-1], "panels of the tile's rows")
}

// rounder is the registers that rounding takes.
type rounder struct {
	*isa
	t, u, one, half, high, exponent, quiet, size, none reg.VecPhysical
}

// newRounder fills the constants, in the registers of from on. AVX512-BF16 has only the order of
// pairs.
func (s *isa) newRounder(from int) *rounder {
	v := s.vec[from:]
	r := &rounder{s, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8]}
	if s.pairs {
		VMOVDQU64(pairOrder(), r.t)
		return r
	}
	set := func(bits uint32, to reg.VecPhysical) {
		g := GP32()
		MOVL(U32(bits), g)
		VMOVD(g, xmm(to))
		VPBROADCASTD(xmm(to), to)
	}
	set(1, r.one)
	set(0x7fff, r.half)
	set(0xffff0000, r.high)
	set(0x7f800000, r.exponent)
	set(0x400000, r.quiet)
	set(0x7fffffff, r.size)
	s.zero(r.none)
	return r
}

// order is pairOrder's, once written.
var order Mem

// pairOrder is the places of VPERMW that make pairs of a vector's two halves.
func pairOrder() Mem {
	if order.Base == nil {
		order = GLOBL("gemmPairs", 8|16) // RODATA|NOPTR
		for i := range 16 {
			DATA(4*i, U32(uint32(i)|uint32(16+i)<<16))
		}
	}
	return order
}

// round rounds v to bfloat16, to nearest even, in place. A value below normal becomes 0 of the same
// sign before it is rounded, a NaN becomes quiet: as VCVTNE2PS2BF16 has it.
func (r *rounder) round(v reg.VecPhysical) {
	VPSRLD(U8(16), v, r.t)
	if r.wide {
		VPANDD(r.one, r.t, r.t)
		VPADDD(v, r.t, r.t)
		VPADDD(r.half, r.t, r.t)
		VCMPPS(U8(3), v, v, reg.K4) // unordered
		VPTESTNMD(r.exponent, v, reg.K5)
		VPORD(r.quiet, v, reg.K4, r.t)
		VPANDD(r.high, r.t, v)
		VPANDND(v, r.size, reg.K5, v)
		return
	}
	VPAND(r.one, r.t, r.t)
	VPADDD(v, r.t, r.t)
	VPADDD(r.half, r.t, r.t)
	VPOR(r.quiet, v, r.u)
	VPAND(r.high, r.u, r.u)
	VPAND(r.high, r.t, r.t)
	VCMPPS(U8(3), v, v, r.one8())
	VBLENDVPS(r.one8(), r.u, r.t, r.t)
	VPAND(r.exponent, v, r.u)
	VPCMPEQD(r.none, r.u, r.u)
	VPAND(r.size, r.u, r.u)
	VPANDN(r.t, r.u, v)
}

// one8 is a third temporary of AVX2.
func (r *rounder) one8() reg.VecPhysical { return r.vec[len(r.vec)-1] }

// round rounds n elements that follow each other, for a panel's transpose: to pairs, or to float32
// of which each two have changed places. Whole vectors are written, zeros behind the end.
func (s *isa) round() {
	TEXT("gemmRound"+s.tag, NOSPLIT, "func(dst, src *float32, n int)")
	Pragma("noescape")
	dst, src, n := Load(Param("dst"), GP64()), Load(Param("src"), GP64()),
		Load(Param("n"), GP64())
	v, w, mask := s.vec[0], s.vec[1], s.vec[2]
	r := s.newRounder(3)
	step := s.lanes
	if s.pairs {
		step *= 2
	}
	body := func() {
		if s.pairs { // the halves are in their order already
			vcvtne2ps2bf16(v, w, v)
		} else {
			r.round(v)
			VPSHUFD(U8(0xb1), v, v)
		}
		VMOVUPS(v, Mem{Base: dst})
	}
	SUBQ(U8(uint8(step)), n)
	JLT(LabelRef("tail"))
	Label("loop")
	VMOVUPS(Mem{Base: src}, v)
	if s.pairs {
		VMOVUPS(Mem{Base: src}.Offset(s.size()), w)
	}
	body()
	ADDQ(U32(uint32(step*4)), src)
	ADDQ(U8(uint8(s.size())), dst)
	SUBQ(U8(uint8(step)), n)
	JGE(LabelRef("loop"))
	Label("tail")
	ADDQ(U8(uint8(step)), n)
	JEQ(LabelRef("done"))
	s.loadPart(Mem{Base: src}, n.(reg.GPVirtual), 0, v, mask)
	if s.pairs {
		s.loadPart(Mem{Base: src}, n.(reg.GPVirtual), 1, w, mask)
	}
	body()
	Label("done")
	VZEROUPPER()
	RET()
}

// loadPart reads what n elements from m on have of vector j, with zeros behind them.
func (s *isa) loadPart(m Mem, n reg.GPVirtual, j int, v, mask reg.VecPhysical) {
	left, bound := GP64(), GP64()
	MOVQ(n, left)
	XORQ(bound, bound)
	SUBQ(U32(uint32(j*s.lanes)), left)
	CMOVQLT(bound, left)
	MOVQ(U32(uint32(s.lanes)), bound)
	CMPQ(left, bound)
	CMOVQGT(bound, left)
	s.setMask(left, mask)
	s.loadMasked(m.Offset(j*s.size()), v, mask)
}

// zip cuts k rows of n elements, ld bytes apart, into panels of w, ps bytes apart, two rows at a
// time: pairs, or the odd row before the even one. After an odd number of rows comes one at none,
// of zeros. Whole vectors are written; what they spill is overwritten by later rows.
func (s *isa) zip(side string, w int, what string) {
	TEXT("gemmZip"+side+s.tag, NOSPLIT,
		"func(dst *float32, ps int, src *float32, ld, k, n int, none *float32)")
	Doc("gemmZip" + side + s.tag + " makes " + what + ".")
	Pragma("noescape")
	dst, ps, src := Load(Param("dst"), GP64()), Load(Param("ps"), GP64()),
		Load(Param("src"), GP64())
	k, n := Load(Param("k"), GP64()), Load(Param("n"), GP64())
	nv := (w + s.lanes - 1) / s.lanes
	even, odd, mask := s.vec[:nv], s.vec[nv:2*nv], s.vec[2*nv]
	r := s.newRounder(2*nv + 1)
	d, e, o, m := GP64(), GP64(), GP64(), GP64()
	body := func() {
		for j := range nv {
			pos := Mem{Base: d}.Offset(j * s.size())
			if s.pairs {
				vcvtne2ps2bf16(even[j], odd[j], even[j])
				VPERMW(even[j], r.t, even[j])
				VMOVUPS(even[j], pos)
				continue
			}
			r.round(even[j])
			r.round(odd[j])
		}
		if s.pairs {
			return
		}
		for i, row := range [][]reg.VecPhysical{odd, even} {
			for j, v := range row {
				VMOVUPS(v, Mem{Base: d}.Offset(i*w*4+j*s.size()))
			}
		}
	}
	load := func(n reg.GPVirtual) {
		for j := range nv {
			s.loadPart(Mem{Base: e}, n, j, even[j], mask)
			s.loadPart(Mem{Base: o}, n, j, odd[j], mask)
		}
	}
	full := func(m Mem, v reg.VecPhysical) { VMOVUPS(m, v) }
	if w%s.lanes != 0 { // one vector, and not all of it
		whole := GP64()
		MOVQ(U32(uint32(w)), whole)
		keep := s.vec[len(s.vec)-2]
		s.setMask(whole, keep)
		if s.wide {
			KMOVW(reg.K1, reg.K2)
		}
		full = func(m Mem, v reg.VecPhysical) {
			if s.wide {
				VMOVUPS_Z(m, reg.K2, v)
			} else {
				VMASKMOVPS(m, keep, v)
			}
		}
	}
	Label("row")
	MOVQ(dst, d)
	MOVQ(src, e)
	Load(Param("ld"), o)
	LEAQ(Mem{Base: src, Index: o, Scale: 2}, src)
	ADDQ(e, o)
	CMPQ(k, U8(1))
	JNE(LabelRef("both"))
	Load(Param("none"), o)
	Label("both")
	MOVQ(n, m)
	SUBQ(U8(uint8(w)), m)
	JLT(LabelRef("tail"))
	Label("panel")
	for j := range nv {
		full(Mem{Base: e}.Offset(j*s.size()), even[j])
		full(Mem{Base: o}.Offset(j*s.size()), odd[j])
	}
	body()
	ADDQ(U32(uint32(4*w)), e)
	ADDQ(U32(uint32(4*w)), o)
	ADDQ(ps, d)
	SUBQ(U8(uint8(w)), m)
	JGE(LabelRef("panel"))
	Label("tail")
	ADDQ(U8(uint8(w)), m)
	JEQ(LabelRef("next"))
	load(m)
	body()
	Label("next")
	step := 8 * w
	if s.pairs {
		step = 4 * w
	}
	ADDQ(U32(uint32(step)), dst)
	SUBQ(U8(2), k)
	JGT(LabelRef("row"))
	VZEROUPPER()
	RET()
}
