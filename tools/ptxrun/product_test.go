package ptxrun

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda/kernels"
)

// committed finds a kernel of the PTX that the binary carries.
func committed(t testing.TB, name string) *Kernel {
	t.Helper()
	modules, err := kernels.Modules()
	require.NoError(t, err)
	for _, x := range modules {
		if !slices.ContainsFunc(x.Kernels, func(k kernels.Kernel) bool { return k.Name == name }) {
			continue
		}
		m, err := Parse([]byte(x.PTX))
		require.NoError(t, err)
		k, ok := m.Kernel(name)
		require.True(t, ok)
		return k
	}
	t.Fatalf("no kernel %s", name)
	return nil
}

// product is C = A·B by a committed kernel, with sizes that fill no tile.
type product struct {
	m, n, k int
	a, b, c []float32
	launch  Launch
}

// stride is a row's length in memory: a multiple of 4.
func stride(n int) int { return (n + 3) &^ 3 }

func newProduct(m, n, k int) *product {
	p := &product{m: m, n: n, k: k}
	var at [3]uint64
	p.a, at[0] = words[float32](m * stride(k))
	p.b, at[1] = words[float32](k * stride(n))
	p.c, at[2] = words[float32](m * stride(n))
	for i := range p.a {
		p.a[i] = float32(math.Sin(float64(i)))
	}
	for i := range p.b {
		p.b[i] = float32(math.Cos(float64(i)))
	}
	// GemmParams of abi_gemm.h, and hx_launch
	params := make([]byte, 176+kernels.LaunchBytes)
	for i, v := range []uint64{at[0], at[1], 0, 0, at[2], 0, uint64(m), uint64(n), uint64(k), 0,
		uint64(stride(k)), uint64(stride(n)), 0, 0, uint64(stride(n))} {
		binary.LittleEndian.PutUint64(params[8*i:], v)
	}
	p.launch = Launch{Grid: [3]int{2}, Block: [3]int{256}, Params: params, Memory: Memory{
		{Base: at[0], Size: uint64(4 * len(p.a)), ReadOnly: true},
		{Base: at[1], Size: uint64(4 * len(p.b)), ReadOnly: true},
		{Base: at[2], Size: uint64(4 * len(p.c))}}}
	return p
}

// Committed products of matrices against sums made here: fp32 is one chain of fused multiply-adds,
// to the bit; tf32 and bf16 are within the rounding of their factors. So fragments, shared memory,
// cp.async and barriers are as clang's kernels use them.
func TestCommittedProducts(t *testing.T) {
	for name, tolerance := range map[string]float64{"gemm_nn": 0, "gemm_nn_tf32": 1.0 / (1 << 10),
		"gemm_nn_bf16": 1.0 / (1 << 7)} {
		k := committed(t, name)
		for _, seed := range []uint64{0, 1} {
			p := newProduct(37, 29, 41)
			p.launch.Seed = seed
			_, err := k.Run(context.Background(), p.launch)
			require.NoError(t, err, name)
			for i := range p.m {
				for j := range p.n {
					chain, size := float32(0), 0.0
					for x := range p.k {
						a, b := p.a[i*stride(p.k)+x], p.b[x*stride(p.n)+j]
						chain = fma32(a, b, chain)
						size += math.Abs(float64(a) * float64(b))
					}
					require.InDelta(t, chain, p.c[i*stride(p.n)+j], 2*tolerance*size,
						"%s C[%d][%d]", name, i, j)
				}
			}
		}
	}
}

// A dropped barrier, a dropped wait and a fused multiply-add with another sign are noticed.
func TestMutantOfAProduct(t *testing.T) {
	k := committed(t, "gemm_nn_bf16")
	want := newProduct(130, 29, 65)
	stats, err := k.Run(context.Background(), want.launch)
	require.NoError(t, err)
	for _, opcode := range []string{"cp.async.wait_group", "cp.async.commit_group",
		"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"} {
		planted := false
		for i := range k.Instructions() {
			if planted || k.Instr(i).Opcode != opcode || stats.Executed[i] == 0 {
				continue
			}
			planted = true
			m, err := k.module.WithMutation(k.Name, i, Mutation{Drop: true})
			require.NoError(t, err)
			changed, _ := m.Kernel(k.Name)
			p := newProduct(130, 29, 65)
			p.launch.MaxInstructions = 10 * stats.Instructions
			_, err = changed.Run(context.Background(), p.launch)
			require.True(t, err != nil || !equalBits(want.c, p.c), "%s dropped", k.Instr(i))
		}
		require.True(t, planted, opcode)
	}
}

func equalBits(a, b []float32) bool {
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			return false
		}
	}
	return true
}

// BenchmarkProduct runs a committed product of tensor cores; lanes/s is instructions of lanes.
func BenchmarkProduct(b *testing.B) {
	for _, name := range []string{"gemm_nn", "gemm_nn_tf32"} {
		b.Run(name, func(b *testing.B) {
			k := committed(b, name)
			p := newProduct(128, 128, 256)
			var lanes int64
			for b.Loop() {
				s, err := k.Run(context.Background(), p.launch)
				require.NoError(b, err)
				lanes += s.Lanes
			}
			b.ReportMetric(float64(lanes)/b.Elapsed().Seconds(), "lanes/s")
		})
	}
}
