package compute

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/simd"
)

func TestParseShapes(t *testing.T) {
	got, err := ParseShapes("4096x1024x256,tn:1x2x3")
	require.NoError(t, err)
	require.Equal(t, []Shape{{"nn", 4096, 1024, 256}, {"tn", 1, 2, 3}}, got)
	_, err = ParseShapes(DefaultShapes)
	require.NoError(t, err)
	for _, bad := range []string{"", "1x2", "1x2x3x4", "tt:1x2x3", "0x2x3", "ax2x3", "1x2x-3",
		"1000000x1000000x1", "1x2x3,"} {
		_, err := ParseShapes(bad)
		require.ErrorContains(t, err, "option shapes", bad)
		require.Equal(t, errs.Usage, errs.ClassOf(err), bad)
	}
}

// Every group of kernels passes its own check at every level, and a check sees one wrong element.
func TestBenchmarks(t *testing.T) {
	shapes, err := ParseShapes("nn:50x47x100,nt:50x33x602,tn:31x1x700,nn:1x200x9")
	require.NoError(t, err)
	cfg := &Config{Seed: 3, Shapes: shapes, Rows: 2000, Precisions: gnn.HostPrecisions(),
		Step: StepShape{Nodes: 2000, AvgDegree: 6, Batch: 40, Fanouts: []int{4, 3},
			Dim: 20, Hidden: 16, Classes: 5}}
	defer func() { require.NoError(t, cfg.Close()) }()
	for _, l := range simd.Levels() {
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: l})
		require.NoError(t, err)
		defer func() { require.NoError(t, dev.Close()) }()
		for _, b := range Groups {
			cases, err := b.Cases(cfg)
			require.NoError(t, err)
			require.NotEmpty(t, cases)
			for _, c := range cases {
				r, err := c.Measure(t.Context(), dev, cfg, Machine{Peak: [3]float64{1e9, 1e9, 1e9}},
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
		}
		for _, model := range gnn.Archs()[1:] {
			other := *cfg
			other.Step.Model = model
			cases, err := stepCases(&other)
			require.NoError(t, err)
			r, err := cases[0].Measure(t.Context(), dev, &other, Machine{Peak: [3]float64{1e9},
				Copy: 1e9}, time.Millisecond)
			require.NoError(t, err)
			require.True(t, r.OK, "%s at %v: %s", r.Case, l, r.Where)
			require.Contains(t, r.Case, "step:"+model)
			require.Positive(t, r.Elements)
			require.Greater(t, r.FloorShare, r.PeakShare, "the bytes count too")
			require.InDelta(t, r.FloorShare, r.PeakShare+r.CopyShare, 1e-9*r.FloorShare)
			r, err = cases[0].Measure(t.Context(), dev, &other, Machine{Copy: 1e9},
				time.Millisecond)
			require.NoError(t, err)
			require.Zero(t, r.Floor, "the peak is not known")
		}
		cases, err := gemmCases(cfg)
		require.NoError(t, err)
		lost := cases[0]
		lost.Open = func(dev cuda.Device) (*Run, error) {
			run, err := shapes[0].open(dev, cfg, cuda.FP32)
			if err == nil {
				run.Launch = func(cuda.Stream) error { return nil }
			}
			return run, err
		}
		r, err := lost.Measure(t.Context(), dev, cfg, Machine{}, time.Millisecond)
		require.NoError(t, err)
		require.False(t, r.OK, "a kernel that did nothing passed")
		require.Contains(t, r.Where, "C[")
	}
}
