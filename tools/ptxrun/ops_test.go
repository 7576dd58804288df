package ptxrun

import (
	"context"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// kept makes memory escape to the heap, where it does not move.
var kept []any

// words is memory for a kernel, with its address.
func words[T any](n int) ([]T, uint64) {
	b := make([]T, n)
	kept = append(kept, b)
	return b, uint64(uintptr(unsafe.Pointer(&b[0])))
}

// pack makes parameters of 8 bytes each.
func pack(values ...uint64) []byte {
	b := make([]byte, 0, 8*len(values))
	for _, v := range values {
		for i := range 8 {
			b = append(b, byte(v>>(8*i)))
		}
	}
	return b
}

func mustKernel(t testing.TB, src string) *Kernel {
	t.Helper()
	m, err := Parse([]byte(src))
	require.NoError(t, err, src)
	k, ok := m.Kernel(m.Kernels()[0])
	require.True(t, ok)
	return k
}

// shape is the widths of a register in bits: destination, then sources.
type shape []int

// evaluate runs an instruction on rows of operands, a thread for each. It names its registers %d,
// %a, %b, %c, %e; predicates p0 and p1 hold false and true.
func evaluate(t testing.TB, op string, s shape, rows [][]uint64) []uint64 {
	t.Helper()
	k := mustKernel(t, snippet(op, s))
	in, inAt := words[uint64](4 * len(rows))
	for i, r := range rows {
		copy(in[4*i:4*i+4], r)
	}
	out, outAt := words[uint64](len(rows))
	for i := range out {
		out[i] = 0x5555555555555555
	}
	_, err := k.Run(context.Background(), Launch{Grid: [3]int{(len(rows) + 31) / 32},
		Block: [3]int{32}, Params: pack(inAt, outAt, uint64(len(rows)))})
	require.NoError(t, err, op)
	for i := range out {
		out[i] = truncate(out[i], s[0])
	}
	return out
}

func snippet(op string, s shape) string {
	var b strings.Builder
	b.WriteString(head + ".entry f(.param .u64 in, .param .u64 out, .param .u64 n) {\n")
	b.WriteString(".reg .b32 %t, %ntid; .reg .b64 %i, %o, %n; .reg .pred %p, %q, p0, p1;\n")
	fmt.Fprintf(&b, ".reg .b%d %%d;\n", s[0])
	for i, bits := range s[1:] {
		fmt.Fprintf(&b, ".reg .b%d %%%c;\n", bits, "abce"[i])
	}
	b.WriteString(`mov.u32 %t, %ctaid.x; shl.b32 %t, %t, 5; mov.u32 %ntid, %tid.x;
	add.s32 %t, %t, %ntid; cvt.u64.u32 %n, %t; ld.param.u64 %i, [n]; setp.ge.u64 %p, %n, %i;
	@%p ret;
	setp.ne.u32 p0, 0, 0; setp.eq.u32 p1, 0, 0;
	ld.param.u64 %i, [in]; ld.param.u64 %o, [out];
	shl.b64 %n, %n, 3; add.s64 %o, %o, %n; shl.b64 %n, %n, 2; add.s64 %i, %i, %n;
	`)
	for i, bits := range s[1:] {
		fmt.Fprintf(&b, "ld.global.b%d %%%c, [%%i+%d];\n", bits, "abce"[i], 8*i)
	}
	fmt.Fprintf(&b, "%s;\nst.global.b%d [%%o], %%d;\nret; }", strings.TrimSuffix(op, ";"), s[0])
	return b.String()
}

func bf(f float32) uint64 { return uint64(math.Float32bits(f)) }
func bd(f float64) uint64 { return math.Float64bits(f) }

const minus = math.MaxUint64

func neg(n, bits int) uint64 { return truncate(uint64(-n), bits) }

var (
	inf32 = float32(math.Inf(1))
	inf   = math.Inf(1)
	qnan  = uint64(0x7fc12345)
)

// Values worked out by hand from the PTX ISA.
func TestInstructions(t *testing.T) {
	b16, b32, b64 := shape{16, 16, 16}, shape{32, 32, 32}, shape{64, 64, 64}
	u1, u2 := shape{32, 32}, shape{64, 64}
	for _, c := range []struct {
		op   string
		s    shape
		in   []uint64
		want uint64
	}{
		{"add.s32 %d, %a, %b", b32, []uint64{0xffffffff, 2}, 1},
		{"add.s16 %d, %a, %b", b16, []uint64{0xffff, 2}, 1},
		{"add.s64 %d, %a, %b", b64, []uint64{minus, 2}, 1},
		{"add.sat.s32 %d, %a, %b", b32, []uint64{0x7fffffff, 1}, 0x7fffffff},
		{"add.sat.s32 %d, %a, %b", b32, []uint64{0x80000000, 0xffffffff}, 0x80000000},
		{"sub.s32 %d, %a, %b", b32, []uint64{1, 2}, 0xffffffff},
		{"sub.u64 %d, %a, %b", b64, []uint64{1, 2}, minus},
		{"add.cc.u32 %d, %a, %b; addc.u32 %d, 5, 0", b32, []uint64{0xffffffff, 1}, 6},
		{"add.cc.u32 %d, %a, %b; addc.u32 %d, 5, 0", b32, []uint64{0xfffffffe, 1}, 5},
		{"sub.cc.u32 %d, %a, %b; subc.u32 %d, 5, 0", b32, []uint64{0, 1}, 4},
		{"add.cc.u64 %d, %a, %b; addc.u64 %d, 5, 0", b64, []uint64{minus, 1}, 6},
		{"sub.cc.u64 %d, %a, %b; subc.u64 %d, 5, 0", b64, []uint64{1, 1}, 5},
		{"mul.lo.s32 %d, %a, %b", b32, []uint64{0x10001, 0x10001}, 0x20001},
		{"mul.lo.s16 %d, %a, %b", b16, []uint64{0x101, 0x101}, 0x201},
		{"mul.hi.u32 %d, %a, %b", b32, []uint64{0xffffffff, 0xffffffff}, 0xfffffffe},
		{"mul.hi.s32 %d, %a, %b", b32, []uint64{0xffffffff, 2}, 0xffffffff},
		{"mul.hi.u64 %d, %a, %b", b64, []uint64{minus, minus}, minus - 1},
		{"mul.hi.s64 %d, %a, %b", b64, []uint64{minus, 2}, minus},
		{"mul.hi.s64 %d, %a, %b", b64, []uint64{1 << 63, 1 << 63}, 1 << 62},
		{"mul.wide.u32 %d, %a, %b", shape{64, 32, 32}, []uint64{0xffffffff, 2}, 0x1fffffffe},
		{"mul.wide.s32 %d, %a, %b", shape{64, 32, 32}, []uint64{0xffffffff, 2}, minus - 1},
		{"mul.wide.u16 %d, %a, %b", shape{32, 16, 16}, []uint64{0xffff, 0xffff}, 0xfffe0001},
		{"mul.wide.s16 %d, %a, %b", shape{32, 16, 16}, []uint64{0xffff, 3}, 0xfffffffd},
		{"mad.lo.s32 %d, %a, %b, 7", b32, []uint64{0xffffffff, 2}, 5},
		{"mad.lo.s64 %d, %a, %b, 7", b64, []uint64{minus, 2}, 5},
		{"mad.wide.u32 %d, %a, %b, 7", shape{64, 32, 32}, []uint64{0xffffffff, 2}, 0x200000005},
		{"mad.hi.u32 %d, %a, %b, 7", b32, []uint64{0x80000000, 4}, 9},
		{"div.u32 %d, %a, %b", b32, []uint64{0xffffffff, 2}, 0x7fffffff},
		{"div.s32 %d, %a, %b", b32, []uint64{neg(7, 32), 2}, neg(3, 32)},
		{"div.s32 %d, %a, %b", b32, []uint64{0x80000000, 0xffffffff}, 0x80000000},
		{"div.s64 %d, %a, %b", b64, []uint64{1 << 63, minus}, 1 << 63},
		{"div.u16 %d, %a, %b", b16, []uint64{0xffff, 0x10}, 0xfff},
		{"div.u32 %d, %a, %b", b32, []uint64{5, 0}, 0xffffffff},
		{"div.s64 %d, %a, %b", b64, []uint64{5, 0}, minus},
		{"rem.u32 %d, %a, %b", b32, []uint64{0xffffffff, 16}, 15},
		{"rem.s64 %d, %a, %b", b64, []uint64{neg(7, 64), 4}, neg(3, 64)},
		{"rem.u64 %d, %a, %b", b64, []uint64{7, 0}, 7},
		{"min.u32 %d, %a, %b", b32, []uint64{0xffffffff, 1}, 1},
		{"min.s32 %d, %a, %b", b32, []uint64{0xffffffff, 1}, 0xffffffff},
		{"max.s64 %d, %a, %b", b64, []uint64{minus, 1}, 1},
		{"max.u64 %d, %a, %b", b64, []uint64{minus, 1}, minus},
		{"abs.s32 %d, %a", u1, []uint64{0x80000000}, 0x80000000},
		{"abs.s64 %d, %a", u2, []uint64{minus}, 1},
		{"neg.s32 %d, %a", u1, []uint64{1}, 0xffffffff},
		{"and.b32 %d, %a, %b", b32, []uint64{0xff00, 0x0ff0}, 0x0f00},
		{"or.b64 %d, %a, %b", b64, []uint64{0xff00, 0x0ff0}, 0xfff0},
		{"xor.b16 %d, %a, %b", b16, []uint64{0xff00, 0x0ff0}, 0xf0f0},
		{"not.b32 %d, %a", u1, []uint64{1}, 0xfffffffe},
		{"cnot.b32 %d, %a", u1, []uint64{0}, 1},
		{"shl.b32 %d, %a, %b", b32, []uint64{1, 31}, 0x80000000},
		{"shl.b32 %d, %a, %b", b32, []uint64{1, 32}, 0},
		{"shl.b32 %d, %a, %b", b32, []uint64{1, 0xffffffff}, 0},
		{"shl.b64 %d, %a, %b", shape{64, 64, 32}, []uint64{3, 63}, 1 << 63},
		{"shl.b64 %d, %a, %b", shape{64, 64, 32}, []uint64{3, 64}, 0},
		{"shl.b16 %d, %a, %b", shape{16, 16, 32}, []uint64{0x8001, 1}, 2},
		{"shr.u32 %d, %a, %b", b32, []uint64{0x80000000, 31}, 1},
		{"shr.u32 %d, %a, %b", b32, []uint64{0x80000000, 32}, 0},
		{"shr.s32 %d, %a, %b", b32, []uint64{0x80000000, 40}, 0xffffffff},
		{"shr.s64 %d, %a, %b", shape{64, 64, 32}, []uint64{1 << 63, 64}, minus},
		{"shr.s16 %d, %a, %b", shape{16, 16, 32}, []uint64{0x8000, 3}, 0xf000},
		{"shf.l.wrap.b32 %d, %a, %b, 36", b32, []uint64{0xf0000000, 1}, 0x1f},
		{"shf.l.clamp.b32 %d, %a, %b, 36", b32, []uint64{0xf0000000, 1}, 0xf0000000},
		{"shf.r.wrap.b32 %d, %a, %b, 36", b32, []uint64{0xf0, 0xa}, 0xa000000f},
		{"shf.r.clamp.b32 %d, %a, %b, 36", b32, []uint64{0xf0, 0xa}, 0xa},
		{"lop3.b32 %d, %a, %b, %a, 0x3c", b32, []uint64{0xff00, 0x0ff0}, 0xf0f0},
		{"popc.b32 %d, %a", u1, []uint64{0xf0f0}, 8},
		{"popc.b64 %d, %a", shape{32, 64}, []uint64{minus}, 64},
		{"clz.b32 %d, %a", u1, []uint64{0}, 32},
		{"clz.b64 %d, %a", shape{32, 64}, []uint64{1}, 63},
		{"brev.b32 %d, %a", u1, []uint64{1}, 0x80000000},
		{"brev.b64 %d, %a", u2, []uint64{2}, 1 << 62},
		{"bfind.u32 %d, %a", u1, []uint64{0x8000}, 15},
		{"bfind.u32 %d, %a", u1, []uint64{0}, 0xffffffff},
		{"bfind.s32 %d, %a", u1, []uint64{0xfffffffe}, 0},
		{"bfind.shiftamt.u64 %d, %a", shape{32, 64}, []uint64{1}, 63},
		{"bfe.u32 %d, %a, 4, 8", u1, []uint64{0xabcd}, 0xbc},
		{"bfe.u32 %d, %a, 28, 8", u1, []uint64{0xa0000000}, 0xa},
		{"bfe.u32 %d, %a, 4, 0", u1, []uint64{0xabcd}, 0},
		{"bfe.u32 %d, %a, 40, 4", u1, []uint64{0xffffffff}, 0},
		{"bfe.s32 %d, %a, 4, 8", u1, []uint64{0xabcd}, 0xffffffbc},
		{"bfe.s32 %d, %a, 28, 8", u1, []uint64{0x80000000}, 0xfffffff8},
		{"bfe.s32 %d, %a, 40, 4", u1, []uint64{0x80000000}, 0xffffffff},
		{"bfe.s64 %d, %a, 60, 4", u2, []uint64{1 << 63}, neg(8, 64)},
		{"bfi.b32 %d, %a, %b, 8, 4", b32, []uint64{0xfa, 0x1234}, 0x1a34},
		{"bfi.b32 %d, %a, %b, 30, 8", b32, []uint64{7, 0}, 0xc0000000},
		{"bfi.b64 %d, %a, %b, 0, 64", b64, []uint64{5, minus}, 5},
		{"prmt.b32 %d, %a, %b, 0x7531", b32, []uint64{0x33221100, 0x77665544}, 0x77553311},
		{"prmt.b32 %d, %a, %b, 0x888c", b32, []uint64{0x80, 0x7f}, 0xffffff00},
		{"prmt.b32.f4e %d, %a, %b, 1", b32, []uint64{0x33221100, 0x77665544}, 0x44332211},
		{"prmt.b32.b4e %d, %a, %b, 1", b32, []uint64{0x33221100, 0x77665544}, 0x66770011},
		{"prmt.b32.rc8 %d, %a, %b, 2", b32, []uint64{0x33221100, 0}, 0x22222222},
		{"prmt.b32.rc16 %d, %a, %b, 1", b32, []uint64{0x33221100, 0}, 0x33223322},
		{"dp4a.s32.u32 %d, %a, %b, 10", b32, []uint64{0xff020304, 0x02010101}, 17},
		{"selp.b32 %d, %a, %b, p1", b32, []uint64{1, 2}, 1},
		{"selp.b32 %d, %a, %b, p0", b32, []uint64{1, 2}, 2},
		{"selp.f64 %d, %a, 0d3FF0000000000000, p0", u2, []uint64{1}, bd(1)},
		{"mov.u32 %d, %a", u1, []uint64{7}, 7},
		{"mov.b64 %d, {%a, %b}", shape{64, 32, 32}, []uint64{7, 8}, 8<<32 | 7},
		{"{ .reg .b32 x; mov.b64 {x, %d}, %a; }", shape{32, 64}, []uint64{8<<32 | 7}, 8},
		{"mov.b64 {%d, _}, %a", shape{32, 64}, []uint64{8<<32 | 7}, 7},
		{"mov.b32 %d, -1", u1, []uint64{0}, 0xffffffff},
		{"mov.f32 %d, 0f3F800000", u1, []uint64{0}, bf(1)},

		{"cvt.u64.u32 %d, %a", shape{64, 32}, []uint64{0xffffffff}, 0xffffffff},
		{"cvt.s64.s32 %d, %a", shape{64, 32}, []uint64{0xffffffff}, minus},
		{"cvt.u32.u64 %d, %a", shape{32, 64}, []uint64{0x123456789}, 0x23456789},
		{"cvt.s32.s8 %d, %a", u1, []uint64{0x180}, 0xffffff80},
		{"cvt.s64.s8 %d, %a", u2, []uint64{0x80}, neg(128, 64)},
		{"cvt.u16.u32 %d, %a", shape{16, 32}, []uint64{0x12345}, 0x2345},
		{"cvt.u32.u8 %d, %a", shape{32, 16}, []uint64{0x1ff}, 0xff},
		{"cvt.sat.u8.s32 %d, %a", u1, []uint64{neg(5, 32)}, 0},
		{"cvt.sat.s8.s32 %d, %a", u1, []uint64{neg(500, 32)}, neg(128, 32)},
		{"cvt.sat.u8.u32 %d, %a", u1, []uint64{500}, 255},
		{"cvt.rzi.u32.f32 %d, %a", u1, []uint64{bf(2.9)}, 2},
		{"cvt.rzi.u32.f32 %d, %a", u1, []uint64{bf(-2.9)}, 0},
		{"cvt.rzi.u32.f32 %d, %a", u1, []uint64{bf(inf32)}, 0xffffffff},
		{"cvt.rzi.u32.f32 %d, %a", u1, []uint64{qnan}, 0},
		{"cvt.rzi.s64.f32 %d, %a", shape{64, 32}, []uint64{qnan}, 1 << 63},
		{"cvt.rzi.s32.f64 %d, %a", shape{32, 64}, []uint64{bd(-inf)}, 0x80000000},
		{"cvt.rni.s32.f32 %d, %a", u1, []uint64{bf(2.5)}, 2},
		{"cvt.rmi.s32.f32 %d, %a", u1, []uint64{bf(-2.5)}, neg(3, 32)},
		{"cvt.rpi.s32.f32 %d, %a", u1, []uint64{bf(2.1)}, 3},
		{"cvt.rni.f32.f32 %d, %a", u1, []uint64{bf(3.5)}, bf(4)},
		{"cvt.rn.f32.u32 %d, %a", u1, []uint64{0xffffffff}, bf(4294967296)},
		{"cvt.rz.f32.u32 %d, %a", u1, []uint64{0xffffffff}, bf(4294967040)},
		{"cvt.rn.f32.s32 %d, %a", u1, []uint64{0xffffffff}, bf(-1)},
		{"cvt.rm.f32.s32 %d, %a", u1, []uint64{neg(16777217, 32)}, bf(-16777218)},
		{"cvt.rp.f32.s32 %d, %a", u1, []uint64{neg(16777217, 32)}, bf(-16777216)},
		{"cvt.rn.f32.u64 %d, %a", shape{32, 64}, []uint64{1<<40 + 1<<16 + 1}, bf(1<<40 + 1<<17)},
		{"cvt.rn.f64.u64 %d, %a", u2, []uint64{minus}, bd(math.Ldexp(1, 64))},
		{"cvt.rn.f32.f64 %d, %a", shape{32, 64}, []uint64{bd(1 + 1.0/(1<<24))}, bf(1)},
		{"cvt.rp.f32.f64 %d, %a", shape{32, 64}, []uint64{bd(1 + 1.0/(1<<40))},
			bf(math.Nextafter32(1, 2))},
		{"cvt.rz.f32.f64 %d, %a", shape{32, 64}, []uint64{bd(1e300)}, bf(math.MaxFloat32)},
		{"cvt.f64.f32 %d, %a", shape{64, 32}, []uint64{bf(1.5)}, bd(1.5)},
		{"cvt.sat.f32.f32 %d, %a", u1, []uint64{bf(1.5)}, bf(1)},
		{"cvt.ftz.f32.f32 %d, %a", u1, []uint64{0x80000001}, 0x80000000},
		{"cvt.rna.tf32.f32 %d, %a", u1, []uint64{0x3f801000}, 0x3f802000},
		{"cvt.rna.tf32.f32 %d, %a", u1, []uint64{0x3f800fff}, 0x3f800000},
		{"cvt.rna.tf32.f32 %d, %a", u1, []uint64{qnan}, nan32},
		{"cvt.rn.bf16x2.f32 %d, %a, %b", b32, []uint64{0x3f808000, 0x3f818000}, 0x3f803f82},
		{"cvt.rn.f16.f32 %d, %a", shape{16, 32}, []uint64{bf(65519)}, 0x7bff},
		{"cvt.rn.f16.f32 %d, %a", shape{16, 32}, []uint64{bf(65520)}, 0x7c00},
		{"cvt.rn.f16.f32 %d, %a", shape{16, 32}, []uint64{bf(1.0 / (1 << 24))}, 1},
		{"cvt.f32.f16 %d, %a", shape{32, 16}, []uint64{0x8001}, bf(-1.0 / (1 << 24))},

		{"add.rn.f32 %d, %a, %b", b32, []uint64{bf(inf32), bf(-inf32)}, nan32},
		{"add.f32 %d, %a, %b", b32, []uint64{1, 1}, 2}, // subnormals
		{"add.ftz.f32 %d, %a, %b", b32, []uint64{1, 1}, 0},
		{"add.sat.f32 %d, %a, %b", b32, []uint64{bf(1), bf(1)}, bf(1)},
		{"sub.f32 %d, %a, %b", b32, []uint64{bf(1), bf(0.25)}, bf(0.75)},
		{"mul.rn.f32 %d, %a, %b", b32, []uint64{bf(0), bf(inf32)}, nan32},
		{"mul.f32 %d, %a, %b", b32, []uint64{bf(-0.5), 1}, 0x80000000},
		{"div.rn.f32 %d, %a, %b", b32, []uint64{bf(1), bf(0)}, bf(inf32)},
		{"div.rn.f32 %d, %a, %b", b32, []uint64{bf(0), bf(0)}, nan32},
		{"div.rn.f64 %d, %a, %b", b64, []uint64{bd(1), bd(3)}, bd(1.0 / 3)},
		{"rcp.rn.f64 %d, %a", u2, []uint64{bd(3)}, bd(1.0 / 3)},
		{"sqrt.rn.f32 %d, %a", u1, []uint64{bf(2)}, bf(float32(math.Sqrt2))},
		{"sqrt.rn.f32 %d, %a", u1, []uint64{bf(-1)}, nan32},
		{"rsqrt.approx.f32 %d, %a", u1, []uint64{bf(4)}, bf(0.5)},
		{"ex2.approx.ftz.f32 %d, %a", u1, []uint64{bf(-127)}, 0},
		{"ex2.approx.f32 %d, %a", u1, []uint64{bf(-127)}, 1 << 22},
		{"lg2.approx.f32 %d, %a", u1, []uint64{bf(8)}, bf(3)},
		{"tanh.approx.f32 %d, %a", u1, []uint64{bf(inf32)}, bf(1)},
		{"neg.f32 %d, %a", u1, []uint64{0}, 0x80000000},
		{"abs.f32 %d, %a", u1, []uint64{0x80000000}, 0},
		{"neg.f64 %d, %a", u2, []uint64{bd(1)}, bd(-1)},
		{"min.f32 %d, %a, %b", b32, []uint64{qnan, bf(1)}, bf(1)},
		{"min.f32 %d, %a, %b", b32, []uint64{0, 0x80000000}, 0x80000000},
		{"max.f32 %d, %a, %b", b32, []uint64{0x80000000, 0}, 0},
		{"max.f32 %d, %a, %b", b32, []uint64{qnan, qnan}, nan32},
		{"max.NaN.f32 %d, %a, %b", b32, []uint64{qnan, bf(1)}, nan32},
		{"fma.rn.f32 %d, %a, %b, 0fBF800000", b32, []uint64{0x3f800001, 0x3f7ffffe},
			0xa8800000}, // (1+2^-23)(1-2^-23)-1 = -2^-46, which two roundings would lose
		{"fma.rn.f64 %d, %a, %b, %a", b64, []uint64{bd(3), bd(5)}, bd(18)},
		{"mov.pred %p, p1; selp.b32 %d, %a, %b, %p", b32, []uint64{1, 2}, 1},
		{"not.pred %p, p1; selp.b32 %d, %a, %b, %p", b32, []uint64{1, 2}, 2},
		{"and.pred %p, p1, p0; selp.b32 %d, %a, %b, %p", b32, []uint64{1, 2}, 2},
		{"xor.pred %p, p1, p0; selp.b32 %d, %a, %b, %p", b32, []uint64{1, 2}, 1},
		{"or.pred %p, p1, p0; selp.b32 %d, %a, %b, %p", b32, []uint64{1, 2}, 1},
		{"mov.u32 %d, %a; @p0 mov.u32 %d, %b; @!p1 mov.u32 %d, %b", b32, []uint64{1, 2}, 1},
		{"setp.lt.and.s32 %p|%q, %a, %b, !p0; selp.b32 %d, 1, 2, %q", b32, []uint64{1, 2}, 2},
		{"setp.lt.or.s32 %p|%q, %a, %b, p1; selp.b32 %d, 1, 2, %q", b32, []uint64{1, 2}, 1},
	} {
		got := evaluate(t, c.op, c.s, [][]uint64{c.in})
		require.Equal(t, fmt.Sprintf("%#x", c.want), fmt.Sprintf("%#x", got[0]), "%s of %#x", c.op,
			c.in)
	}
}

func TestComparisons(t *testing.T) {
	nan := qnan
	for _, c := range []struct {
		op   string
		in   []uint64
		want uint64
	}{
		{"eq.s32", []uint64{1, 1}, 1}, {"ne.u32", []uint64{1, 1}, 0},
		{"lt.s32", []uint64{0xffffffff, 1}, 1}, {"lt.u32", []uint64{0xffffffff, 1}, 0},
		{"gt.s32", []uint64{0xffffffff, 1}, 0}, {"gt.u32", []uint64{0xffffffff, 1}, 1},
		{"le.s32", []uint64{1, 1}, 1}, {"ge.s32", []uint64{0, 1}, 0},
		{"lo.u32", []uint64{1, 2}, 1}, {"ls.u32", []uint64{2, 2}, 1}, {"hi.u32", []uint64{2, 2}, 0},
		{"hs.u32", []uint64{2, 2}, 1}, {"eq.b32", []uint64{2, 2}, 1},
		{"eq.f32", []uint64{0, 0x80000000}, 1}, {"eq.f32", []uint64{nan, nan}, 0},
		{"ne.f32", []uint64{nan, nan}, 0}, {"neu.f32", []uint64{nan, nan}, 1},
		{"equ.f32", []uint64{nan, 0}, 1}, {"ltu.f32", []uint64{nan, 0}, 1},
		{"lt.f32", []uint64{nan, 0}, 0}, {"geu.f32", []uint64{bf(1), bf(2)}, 0},
		{"gtu.f32", []uint64{bf(3), bf(2)}, 1}, {"leu.f32", []uint64{bf(3), bf(2)}, 0},
		{"num.f32", []uint64{nan, 0}, 0}, {"num.f32", []uint64{0, 0}, 1},
		{"nan.f32", []uint64{0, nan}, 1}, {"lt.f32", []uint64{0, 1}, 1},
		{"lt.ftz.f32", []uint64{0, 1}, 0},
	} {
		got := evaluate(t, "setp."+c.op+" %p, %a, %b; selp.b32 %d, 1, 0, %p", shape{32, 32, 32},
			[][]uint64{c.in})
		require.Equal(t, c.want, got[0], "%s of %#x", c.op, c.in)
	}
}

// fma.rn.f32 against exact arithmetic, with operands near cancellation and near the subnormals.
func TestFusedMultiplyAdd(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	value := func() uint64 {
		v := uint64(rng.Uint32())
		switch rng.IntN(6) {
		case 0:
			v = v&0x807fffff | 127<<23
		case 1:
			v = v&0x80ffffff | 0x1f000000
		case 2:
			v &= 0x807fffff
		case 3:
			v = v&0x80000003 | 0x3f800000
		case 4:
			v = v&0x83ffffff | 0x3c000000
		}
		return v
	}
	var rows [][]uint64
	for range 30000 {
		r := []uint64{value(), value(), value()}
		if rng.IntN(2) == 0 { // c near -a·b
			r[2] = bits32(-f32(r[0])*f32(r[1])) + uint64(rng.IntN(3)) - 1
			r[2] &= 0xffffffff
		}
		rows = append(rows, r)
	}
	got := evaluate(t, "fma.rn.f32 %d, %a, %b, %c", shape{32, 32, 32, 32}, rows)
	checked := 0
	for i, r := range rows {
		a, b, c := f32(r[0]), f32(r[1]), f32(r[2])
		if a-a != 0 || b-b != 0 || c-c != 0 {
			continue
		}
		big := func(f float32) *big.Float {
			return new(big.Float).SetPrec(2000).SetFloat64(float64(f))
		}
		sum := big(a)
		sum.Mul(sum, big(b)).Add(sum, big(c))
		want, _ := sum.Float32()
		if want == 0 && got[i]&0x7fffffff == 0 {
			continue // the sign of zero is another matter
		}
		require.Equal(t, fmt.Sprintf("%#x", bf(want)), fmt.Sprintf("%#x", got[i]), "%#x", r)
		checked++
	}
	require.Greater(t, checked, 10000)
}

// Half precision: each value survives the way to float32 and back; rounding is to nearest even.
func TestHalfPrecision(t *testing.T) {
	for h := range uint32(1 << 16) {
		f := math.Float32frombits(ofF16(h))
		if f != f {
			continue
		}
		require.Equal(t, h, toF16(math.Float32bits(f)))
		if h&0x7fff < 0x7bff {
			next := math.Float32frombits(ofF16(h + 1))
			mid := (f + next) / 2 // exact
			require.Equal(t, h+h&1, toF16(math.Float32bits(mid)), "%#x", h)
		}
	}
}

func TestCompileErrors(t *testing.T) {
	for op, want := range map[string]string{
		"frob.s32 %d, %a, %b":                             "opcode frob.s32 is not run",
		"add.s32.s32 %d, %a, %b":                          "modifier s32 has no meaning here",
		"add.rz.f32 %d, %a, %b":                           "modifier rz",
		"add.s64 %d, %a, %b":                              "%d has 32 bits, not those of s64",
		"add.s32 %d, %a":                                  "2 operands",
		"add.s32 %d, %a, %zz":                             "%zz is no register",
		"add.s32 %d, %a, 0x1ffffffff0":                    "",
		"setp.up.s32 %p, %a, %b":                          "setp has no",
		"setp.lt.b32 %p, %a, %b":                          "setp has no .lt.b32",
		"bra nowhere":                                     "no label nowhere",
		"@%d mov.u32 %d, %a":                              "%d is no predicate",
		"ld.global.v2.u32 %d, [%i]":                       "is not 2 registers",
		"ld.global.u32 %d, %i":                            "%i is no address",
		"ld.global.gpu.u32 %d, [%i]":                      ".gpu without an order",
		"st.param.u32 [in], %a":                           "does not write",
		"atom.global.mul.u32 %d, [%i], 1":                 "atom has no",
		"cvt.f32.f64 %d, %i":                              "rounding does not fit",
		"cvt.u32.f32 %d, %a":                              "want .rni",
		"mov.u64 %i, %clock":                              "%clock has 32 bits",
		"fma.f32 %d, %a, %b, %a":                          "only .rn",
		"call foo":                                        "opcode call is not run",
		"fence.gpu":                                       "fence needs",
		"mul.s32 %d, %a, %b":                              "want .lo, .hi or .wide",
		"cp.async.cg.shared.global [%d], [%i], 4":         "does not copy 4 bytes",
		"shfl.sync.idx.b32 %d, %a, %b, 31":                "4 operands",
		"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32": "mma is run as",
	} {
		_, err := Parse([]byte(snippet(op, shape{32, 32, 32})))
		if want == "" {
			require.NoError(t, err, op)
			continue
		}
		require.ErrorContains(t, err, want, op)
		require.ErrorContains(t, err, "ptx line ", op)
	}
	_, err := Parse([]byte(head + ".entry f() { .reg .b32 %r<2>; mov.u32 %r1, 1; }"))
	require.ErrorContains(t, err, "runs over its end")
	_, err = Parse([]byte(head + ".entry f() { }"))
	require.ErrorContains(t, err, "no instruction")
	_, err = Parse([]byte(head + ".entry f() { bra L; L: }"))
	require.ErrorContains(t, err, "behind the last instruction")
}

// address returns the address of a slice.
func address[T any](b []T) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }

// alignedWords are 32 words at a multiple of 16 in a store of 20 double words.
func alignedWords(store []uint64) []uint32 {
	pos := address(store) & 15 / 8
	return unsafe.Slice((*uint32)(unsafe.Pointer(&store[pos])), 32)
}
