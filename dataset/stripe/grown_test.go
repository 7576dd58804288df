package stripe

import (
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// TestLoadOfMoreRows: a load of a dataset that an import has added to writes new rows and tables
// only, and the SSDs hold what a first load writes; so they do when the power fails at any
// operation. Where another dataset lies behind the rows, they move, and it stays.
func TestLoadOfMoreRows(t *testing.T) {
	hashed := func(nodes int64) *dataset.Dataset {
		out := filepath.Join(t.TempDir(), "g")
		require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: nodes, Dim: 100,
			Classes: 3, AvgDegree: 3, Seed: 1, FeatureFn: "hash:7", Out: out}))
		return datasettest.Open(t, out)
	}
	// More than a chunk an SSD; the last one grows.
	old, more, other := hashed(6000), hashed(7501), small(t, 900, 100, 2)
	before := sims(2, 512)
	must(load(bg, old, targetsOf(before...), LoadOptions{}))
	before = clones(before)
	_, err := load(bg, more, targetsOf(before...), LoadOptions{})
	require.Equal(t, errs.Refused, errs.ClassOf(err), "nothing says that it was added to")
	more.Meta.Source.Appended = []dataset.Addition{{UUID: old.UUID().String()}}

	fresh := sims(2, 512)
	must(load(bg, more, targetsOf(fresh...), LoadOptions{}))
	whole := func(s []*simSSD) {
		t.Helper()
		r, err := verify(bg, more, targetsOf(s...), VerifyOptions{Source: true})
		require.NoError(t, err)
		require.Equal(t, more.Meta.Nodes, r.RowsCompared)
		for i := range s {
			a, err := targetsOf(s...)[i].readCopies(bg)
			require.NoError(t, err)
			b, err := targetsOf(fresh...)[i].readCopies(bg)
			require.NoError(t, err)
			a.sb[0].LoadID = b.sb[0].LoadID
			require.Equal(t, b.sb[0], a.sb[0])
		}
	}
	s := clones(before)
	for _, x := range s {
		x.onWrite = func(_ int, start int64, _, data []byte) ([]byte, error) {
			require.False(t, start >= headBytes && start < headBytes+chunkBytes, "an old row at %d", start)
			return data, nil
		}
	}
	r, err := load(bg, more, targetsOf(s...), LoadOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 2*chunkBytes, r.ResumedBytes)
	whole(s)
	for ops := 0; err == nil; ops += 3 {
		s, budget := clones(before), ops
		for _, x := range s {
			x.budget = &budget
		}
		_, lerr := load(bg, more, targetsOf(s...), often(LoadOptions{}).unforced())
		rng := rand.New(rand.NewPCG(uint64(ops), 7))
		for i := range s {
			s[i] = s[i].restart(rng)
		}
		must(load(bg, more, targetsOf(s...), LoadOptions{}))
		whole(s)
		if scrap(s...); lerr == nil {
			require.Greater(t, ops, 10)
			break
		}
		require.ErrorIs(t, lerr, errPowerLoss)
	}

	// Rows of another type are others, whatever their checksums are.
	s = clones(before)
	must(load(bg, more, targetsOf(s...), LoadOptions{RowType: "float16", Note: func(n string) {
		require.NotContains(t, n, "as it was before")
	}}))
	requireWhole(t, more, s...)

	// A row of the old ones has changed in the files, or on an SSD.
	s = clones(before)
	s[0].durable[headBytes] ^= 1
	must(load(bg, more, targetsOf(s...), LoadOptions{}))
	whole(s)

	s = clones(before)
	for i := range s {
		s[i].durable = append(s[i].durable, make([]byte, 4<<20)...) // resized: load it again
	}
	must(load(bg, old, targetsOf(s...), LoadOptions{Force: "SER0,SER1"}))
	must(load(bg, other, targetsOf(s...), LoadOptions{}))
	must(load(bg, more, targetsOf(s...), LoadOptions{}))
	requireWhole(t, more, s...)
	requireWhole(t, other, s...)
	_, err = attach(bg, old, targetsOf(s...), AttachOptions{})
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
}
