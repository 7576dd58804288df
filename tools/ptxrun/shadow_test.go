package ptxrun

import (
	"context"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// A mutation's results are held against those of the original: registers and predicates, with
// a guard and under divergence, until they differ; stores and orders are not.
func TestMutationIsCompared(t *testing.T) {
	m, err := Parse([]byte(`.version 8.2
.target sm_70
.address_size 64
.visible .entry f(.param .u64 f_param_0)
{
	.reg .pred %p<4>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<5>;
	ld.param.u64 %rd1, [f_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	setp.lt.u32 %p1, %r1, 40;
	@%p1 add.s32 %r1, %r1, 0;
	or.b32 %r2, %r1, 64;
	and.b32 %r3, %r1, 63;
	@!%p1 bra END;
	ld.global.u32 %r4, [%rd3];
	add.s32 %r5, %r4, %r3;
	st.global.u32 [%rd3], %r5;
END:
	ret;
}
`))
	require.NoError(t, err)
	for _, c := range []struct {
		index              int
		mut                Mutation
		compared, differed int64 // of 2 warps
	}{
		{0, Mutation{}, 2, 0},
		{4, Mutation{Opcode: "setp.le.u32"}, 2, 1}, // of thread 40
		{4, Mutation{Operand: 2, Text: "41"}, 2, 1},
		{5, Mutation{Opcode: "sub.s32"}, 2, 0},
		{5, Mutation{Operand: 2, Text: "1"}, 2, 1},
		{5, Mutation{NegateGuard: true}, 0, 0},
		{6, Mutation{Opcode: "xor.b32"}, 2, 0}, // 64 is never set
		{7, Mutation{Operand: 2, Text: "127"}, 2, 0},
		{7, Mutation{Operand: 2, Text: "31"}, 2, 1},
		{9, Mutation{Operand: 1, Text: "[%rd1]"}, 2, 1},
		{9, Mutation{Operand: 1, Text: "[%rd3+0]"}, 2, 0},
		{11, Mutation{Operand: 1, Text: "%r4"}, 0, 0},
		{11, Mutation{Drop: true}, 0, 0},
	} {
		changed, err := m.WithMutation("f", c.index, c.mut)
		require.NoError(t, err)
		k, _ := changed.Kernel("f")
		mem, pos := words[uint32](64)
		for i := range mem {
			mem[i] = uint32(i * i)
		}
		s, err := k.Run(context.Background(), Launch{Block: [3]int{64},
			Params: binary.LittleEndian.AppendUint64(nil, pos),
			Memory: Memory{{Base: pos, Size: 256}}})
		require.NoError(t, err)
		require.Equal(t, [2]int64{c.compared, c.differed}, [2]int64{s.Compared, s.Differed},
			"%s: %s", k.Instr(c.index), c.mut)
		if c.differed == 0 && c.compared > 0 { // and nothing is disturbed
			for i, v := range mem[:40] {
				require.Equal(t, uint32(i*i+i), v)
			}
			require.Equal(t, uint32(50*50), mem[50])
		}
	}
	k, _ := m.Kernel("f")
	mem, pos := words[uint32](64)
	s, err := k.Run(context.Background(), Launch{Block: [3]int{64},
		Params: binary.LittleEndian.AppendUint64(nil, pos), Memory: Memory{{Base: pos, Size: 256}}})
	require.NoError(t, err)
	require.Zero(t, s.Compared+s.Differed)
	require.Equal(t, uint32(39), mem[39])
}
