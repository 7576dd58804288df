package sample

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/testing/testrig"
)

// sources are host devices with one and two workers, over topologies made from seeds.
func sources(t *testing.T, seeds ...uint64) (out []Source) {
	for i, seed := range seeds {
		topo, err := graph.Synthetic(2000, 6, false, seed)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) })
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1 + i})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, dev.Close()) })
		out = append(out, Source{Device: dev, Topology: topo, Place: "memory"})
	}
	return out
}

// Sources with the same topology pass and give the same mini-batches; one with another fails its
// audit.
func TestMeasure(t *testing.T) {
	testrig.CheckLeaks(t)
	seeds := []int64{1, 5, 9, 13, 17, 21, 25, 29}
	c := Config{Sampler: graph.SamplerConfig{Fanouts: []int{3, 2}, Seed: 2}, Graph: "even",
		Batch: 4, Batches: 2, Turns: 2}
	steps := 0
	c.Progress = func(done, of int) {
		require.Equal(t, steps, done)
		require.Equal(t, 6, of)
		steps++
	}
	all := sources(t, 1, 1, 7)
	rows, err := Measure(t.Context(), c, all, seeds, all[0].Topology)
	require.NoError(t, err)
	require.Equal(t, 6, steps)
	require.Len(t, rows, 3)
	for i, r := range rows {
		require.Equal(t, i < 2, r.Audited, r.AuditError)
		require.Equal(t, i < 2, r.Digest == rows[0].Digest)
		require.Equal(t, 1+i, r.Workers)
		require.EqualValues(t, 4, r.Sampled)
	}
	require.Positive(t, rows[0].Checked)
}

func TestCheck(t *testing.T) {
	for _, c := range []Config{{Batches: 1, Turns: 1}, {Batch: 1, Turns: 1}, {Batch: 1, Batches: 1},
		{Batch: 1, Batches: 1, Turns: 1, Seconds: 1e-9}} {
		require.ErrorContains(t, c.Check(), "option ")
	}
	require.NoError(t, (&Config{Batch: 1, Batches: 1, Turns: 1}).Check())
}
