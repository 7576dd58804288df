package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/simd"
)

func TestParseShapes(t *testing.T) {
	got, err := parseShapes("4096x1024x256,tn:1x2x3")
	require.NoError(t, err)
	require.Equal(t, []shape{{"nn", 4096, 1024, 256}, {"tn", 1, 2, 3}}, got)
	_, err = parseShapes(hostShapes)
	require.NoError(t, err)
	for _, bad := range []string{"", "1x2", "1x2x3x4", "tt:1x2x3", "0x2x3", "ax2x3", "1x2x-3",
		"1000000x1000000x1", "1x2x3,"} {
		_, err := parseShapes(bad)
		require.ErrorContains(t, err, "-shapes", bad)
	}
}

// Every group of kernels passes its own check at every level, and a check sees one wrong element.
func TestBenchmarks(t *testing.T) {
	shapes, err := parseShapes("nn:50x47x100,nt:50x33x602,tn:31x1x700,nn:1x200x9")
	require.NoError(t, err)
	cfg := &kernelConfig{shapes: shapes, rows: 2000, precisions: gnn.HostPrecisions(),
		step: stepShape{model: gnn.DefaultArch, nodes: 2000, batch: 40, fanouts: []int{4, 3},
			dim: 20, hidden: 16, classes: 5}}
	defer func() { require.NoError(t, cfg.close()) }()
	for _, l := range simd.Levels() {
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: l})
		require.NoError(t, err)
		defer func() { require.NoError(t, dev.Close()) }()
		steps, err := stepCases(cfg)
		require.NoError(t, err)
		for _, c := range slices.Concat(gemmCases(cfg), rowCases(cfg), steps) {
			r, err := c.measure(t.Context(), dev, cfg, machine{Peak: [3]float64{1e9, 1e9, 1e9}},
				time.Millisecond)
			require.NoError(t, err)
			require.True(t, r.OK, "%s at %v: error %g, bound %g, inexact %d: %s", c.Name, l,
				r.Error, r.Bound, r.Inexact, r.Where)
			require.Positive(t, r.Seconds.Min)
			require.Positive(t, r.Elements)
			require.Equal(t, l.String(), r.Kernels)
			// without a measured copy the floor is that of the operations, where there are some
			require.Equal(t, c.Kernel == "copy" || strings.HasSuffix(c.Kernel, "_transpose"),
				r.Floor == 0, c.Name)
			require.InDelta(t, r.PeakShare, r.FloorShare, 1e-9*r.PeakShare, c.Name)
		}
		for _, model := range gnn.Archs()[1:] {
			other := *cfg
			other.step.model = model
			cases, err := stepCases(&other)
			require.NoError(t, err)
			r, err := cases[0].measure(t.Context(), dev, &other, machine{Peak: [3]float64{1e9},
				Copy: 1e9}, time.Millisecond)
			require.NoError(t, err)
			require.True(t, r.OK, "%s at %v: %s", r.Case, l, r.Where)
			require.Contains(t, r.Case, "step:"+model)
			require.Positive(t, r.Elements)
			require.Greater(t, r.FloorShare, r.PeakShare, "the bytes count too")
			require.InDelta(t, r.FloorShare, r.PeakShare+r.CopyShare, 1e-9*r.FloorShare)
			r, err = cases[0].measure(t.Context(), dev, &other, machine{Copy: 1e9},
				time.Millisecond)
			require.NoError(t, err)
			require.Zero(t, r.Floor, "the peak is not known")
		}
		lost := gemmCases(cfg)[0]
		lost.Open = func(dev cuda.Device) (*kernelRun, error) {
			run, err := shapes[0].open(dev, cfg, cuda.FP32)
			if err == nil {
				run.Launch = func(cuda.Stream) error { return nil }
			}
			return run, err
		}
		r, err := lost.measure(t.Context(), dev, cfg, machine{}, time.Millisecond)
		require.NoError(t, err)
		require.False(t, r.OK, "a kernel that did nothing passed")
		require.Contains(t, r.Where, "C[")
	}
}
