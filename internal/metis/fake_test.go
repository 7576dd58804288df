package metis

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/dl"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// fake compiles a METIS whose idx_t is of a type; tests skip without a C compiler.
func fake(t *testing.T, idx string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil || !dl.Have {
		t.Skip("no C compiler (cc), or a build that opens no libraries")
	}
	path := filepath.Join(t.TempDir(), "libfakemetis.so")
	out, err := exec.CommandContext(t.Context(), cc, "-shared", "-fPIC", "-DIDX="+idx, "-o", path,
		"testdata/fake.c").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// list is memory outside Go's heap with some numbers.
func list[T Number](t *testing.T, v ...T) []T {
	t.Helper()
	mem, err := hostmem.Alloc(max(8*int64(len(v)), 8), "test of METIS")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hostmem.Free(mem)) })
	l := hostmem.View[T](mem)[:len(v)]
	copy(l, v)
	return l
}

// with partitions a path of four nodes by a METIS whose numbers are T's, and looks at its errors.
func with[T Number](t *testing.T, idx string, wide bool) {
	l, err := Open(fake(t, idx))
	require.NoError(t, err)
	require.Equal(t, wide, l.Wide)
	g := Graph[T]{Start: list[T](t, 0, 1, 3, 5, 6), Adj: list[T](t, 1, 0, 2, 1, 3, 2)}
	part := list[T](t, 9, 9, 9, 9)
	ended := 0
	run := func(o Options) error {
		return Partition(t.Context(), l, g, o, part, func() { ended++ })
	}
	require.NoError(t, run(Options{Parts: 3, Seed: 77, Imbalance: 50}))
	require.Equal(t, []T{0, 1, 2, 0}, part)
	err = run(Options{Parts: 13, Seed: 77, Imbalance: 50})
	require.ErrorContains(t, err, "out of memory for 4 nodes with 6 neighbours")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, run(Options{Parts: 14, Seed: 77, Imbalance: 50}), "returned -4")
	require.ErrorContains(t, run(Options{Parts: 3, Seed: 78, Imbalance: 50}), "refuses 4 nodes")
	// Seeds above METIS's numbers lose their upper bits.
	require.NoError(t, run(Options{Parts: 3, Seed: 1<<63 + 77, Imbalance: 50}))
	require.Equal(t, 5, ended)
}

// The way that cuts fewer edges has the parts, unless they are less even than both the bound and
// the other way, or it failed.
func TestFewerCuts(t *testing.T) {
	l, err := Open(fake(t, "int32_t"))
	require.NoError(t, err)
	const nodes = 80
	g := Graph[int32]{Start: list[int32](t, make([]int32, nodes+1)...)}
	for parts, first := range map[int]int32{2: 1, 10: 9, 3: 0, 4: 0, 6: 0, 8: 0, 12: 0} {
		part := list[int32](t, make([]int32, nodes)...)
		require.NoError(t, Partition(t.Context(), l, g,
			Options{Parts: parts, Seed: 77, Imbalance: 50}, part, func() {}))
		for v, p := range part {
			want := int32(v % parts)
			if first > 0 {
				want = first - want
			}
			require.Equal(t, want, p, "%d parts, node %d", parts, v)
		}
	}
	// Nobody waits for a second way after a stop.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	part := list[int32](t, make([]int32, nodes)...)
	ended := make(chan struct{})
	_ = Partition(ctx, l, g, Options{Parts: 2, Seed: 77, Imbalance: 50}, part,
		func() { close(ended) })
	<-ended
	require.Equal(t, int32(0), part[0])
}

func TestBothWidths(t *testing.T) {
	t.Run("32", func(t *testing.T) { with[int32](t, "int32_t", false) })
	t.Run("64", func(t *testing.T) { with[int64](t, "int64_t", true) })
	l, err := Open(fake(t, "int16_t"))
	require.Nil(t, l)
	require.ErrorContains(t, err, "it sets 80 bytes of options, METIS 5 sets 160 or 320")
	require.Equal(t, errs.Capability, errs.ClassOf(err))

	l, err = Open(fake(t, "int64_t"))
	require.NoError(t, err)
	err = Partition(t.Context(), l, Graph[int32]{Start: list[int32](t, 0, 0)},
		Options{Parts: 1}, list[int32](t, 0), func() {})
	require.ErrorContains(t, err, "numbers of 4 bytes for a library of 8")
}
