package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/testing/testrig"
)

// sources are host devices with one and two workers, over topologies made from seeds.
func sources(t *testing.T, seeds ...uint64) (out []source) {
	for i, seed := range seeds {
		topo, err := graph.Synthetic(2000, 6, false, seed)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, topo.Close()) })
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1 + i})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, dev.Close()) })
		out = append(out, source{dev, topo})
	}
	return out
}

// Sources with the same topology pass and give the same mini-batches; one with another fails its
// audit.
func TestMeasureSampling(t *testing.T) {
	testrig.CheckLeaks(t)
	seeds := []int64{1, 5, 9, 13, 17, 21, 25, 29}
	c := sampleConfig{sampler: graph.SamplerConfig{Fanouts: []int{3, 2}, Seed: 2},
		batch: 4, batches: 2, turns: 2}
	all := sources(t, 1, 1, 7)
	rows, err := measureSampling(t.Context(), c, all, seeds, all[0].topology)
	require.NoError(t, err)
	require.Len(t, rows, 3)
	for i, r := range rows {
		require.Equal(t, i < 2, r.Audited, r.AuditError)
		require.Equal(t, i < 2, r.Digest == rows[0].Digest)
		require.Equal(t, 1+i, r.Workers)
	}
	require.Positive(t, rows[0].Checked)
}
