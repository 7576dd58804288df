package iobench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
)

func profile(t testing.TB, name string) *hardware.Profile {
	t.Helper()
	p, err := hardware.Load(name)
	require.NoError(t, err)
	return p
}

// TestVirtual: the same seed gives the same row, whose figures hold together.
func TestVirtual(t *testing.T) {
	for _, stack := range []string{"async", "sync", "cpu", "mmap"} {
		cfg := Config{Hardware: profile(t, "a100-p5510x12"), SSDCount: 2, Stack: stack, Depth: 64,
			Duration: 4 * time.Millisecond, Seed: 7}
		row, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.True(t, row.Audited, row.AuditError)
		require.True(t, row.Modelled)
		require.Equal(t, ClockVirtual, row.Clock)
		require.Equal(t, "p5510", row.SSDModel)
		require.Equal(t, "a100-p5510x12", row.Hardware)
		require.Contains(t, row.Device, "modelled")
		require.Positive(t, row.IOPS)
		require.LessOrEqual(t, row.IOPS, row.BoundIOPS*1.05)
		require.Equal(t, row.BoundIOPS, row.SSDBoundIOPS) // two SSDs do not fill the link
		require.InDelta(t, 5.2e6, row.LinkBoundIOPS, 0.1e6)
		require.LessOrEqual(t, row.IOPS, row.DepthBoundIOPS*1.05)
		require.LessOrEqual(t, row.P50, row.P95)
		require.LessOrEqual(t, row.P99, row.P999)
		require.LessOrEqual(t, row.P999, row.Max)
		require.Len(t, row.PerSSD, 2)
		require.InDelta(t, 1, row.MostShare, 0.05)
		require.NotEmpty(t, row.Histogram)
		again, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.Equal(t, row, again)
		cfg.Seed++
		other, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		require.NotEqual(t, row, other)
	}
}

// TestVirtualRowSizes: rows of a part of an LBA are read as one, large ones by several commands.
func TestVirtualRowSizes(t *testing.T) {
	for rowBytes, want := range map[int]struct{ lba, perRow, amplification float64 }{
		512:  {512, 1, 1},
		4096: {512, 1, 1},
		400:  {512, 1, 512. / 400},
		128:  {4096, 1, 32},
	} {
		row, err := Run(t.Context(), Config{Hardware: profile(t, "a100-p5510x12"), SSDCount: 1,
			RowBytes: rowBytes, LBABytes: int(want.lba), Depth: 64, Duration: 2 * time.Millisecond})
		require.NoError(t, err)
		require.True(t, row.Audited, row.AuditError)
		require.InDelta(t, want.perRow, row.CommandsPerRow, 1e-9, rowBytes)
		require.InDelta(t, want.amplification, row.ReadAmplification, 1e-9, rowBytes)
		require.InDelta(t, row.RowsPerSecond*float64(rowBytes), row.BytesPerSecond, 1)
	}
}

// TestVirtualModel: another SSD model, and what cannot be.
func TestVirtualModel(t *testing.T) {
	m, err := ssdmodel.Load("slow")
	require.NoError(t, err)
	cfg := Config{Hardware: profile(t, "a100-p5510x12"), SSDCount: 1, Model: m}
	row, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, "slow", row.SSDModel)
	require.InEpsilon(t, 50e3, row.IOPS, 0.05)
	cfg.LBABytes = 1024
	_, err = Run(t.Context(), cfg)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// Limits of wall time: those of the models, of the links, and of the reads in flight; none where an
// SSD has no model or a link is not known.
func TestLimit(t *testing.T) {
	slow, err := ssdmodel.Load("slow")
	require.NoError(t, err)
	idle := slow.MeanLatency(ssdmodel.Read).Seconds()
	r := Row{SSDs: 2, Depth: 16}
	r.Limit([]Stripe{{slow, 8e9, 1}, {slow, 4e9, 1}}, 4096)
	require.InDelta(t, 100e3, r.SSDBoundIOPS, 1)
	require.InDelta(t, 8e9/4096, r.LinkBoundIOPS, 1e-3)
	require.InDelta(t, 32/idle, r.DepthBoundIOPS, 1)
	r = Row{SSDs: 2, Depth: 16}
	r.Limit([]Stripe{{slow, 8e9, 1}, {nil, 0, 1}}, 4096)
	require.Equal(t, Row{SSDs: 2, Depth: 16}, r)
	r.Limit([]Stripe{{slow, 9e9, 1}, {slow, 9e9, 2}, {slow, 9e9, 2}}, 4096)
	require.InDelta(t, 75e3, r.SSDBoundIOPS, 1, "the SSD of two stripes has two thirds")
	require.InDelta(t, 27e9/2/4096, r.LinkBoundIOPS, 1e-3)
	require.InDelta(t, 48/idle, r.DepthBoundIOPS, 1)
	fixed, err := ssdmodel.Fixed(time.Millisecond)
	require.NoError(t, err)
	r = Row{SSDs: 1, Depth: 1}
	r.Limit([]Stripe{{fixed, 0, 1}}, 512)
	require.Zero(t, r.SSDBoundIOPS, "nothing but the latency bounds it")
	require.InDelta(t, 1000, r.DepthBoundIOPS, 0.1)
}
