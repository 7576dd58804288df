package cache

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
)

// Every row passes its audit, on the host device.
func TestMeasure(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	c := Config{Rows: 500, GPUShare: 0.3, CPUShare: 0.2, LineRows: 2, Window: 1, SSDs: 3,
		Length: time.Millisecond, Seed: 4}
	for _, policy := range []string{Static, "lru"} {
		r, err := Measure(t.Context(), dev, c, 10_000, policy)
		require.NoError(t, err)
		require.True(t, r.Audited, r.Why)
		require.GreaterOrEqual(t, r.Turns, leastTurns)
		require.Positive(t, r.Lookups.Min)
		require.GreaterOrEqual(t, r.Checked, c.Rows)
	}
	_, err = Measure(t.Context(), dev, c, 499, Static)
	require.ErrorContains(t, err, "option rows 500")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// measured looks b.asked up in an index of b's placement and audits the answer with another seed's.
func (b *measurement) measured(t *testing.T, auditSeed uint64) {
	var ranks [][2]int64
	index, err := cache.BuildIndexOf(b.dev, b.total, func(yield func(int64, cache.Tier) bool) {
		ranks = append(ranks, [2]int64{})
		for row := range b.total {
			if tier := b.tierOf(row); tier != cache.SSD && !yield(row, tier) {
				return
			}
		}
	})
	require.NoError(t, err)
	h, err := cache.NewLookup(b.dev, index, b.SSDs)
	require.NoError(t, err)
	defer func() { require.NoError(t, h.Close()) }()
	k, err := h.NewBuckets()
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	require.NoError(t, h.Lookup(t.Context(), b.stream, b.buf.Ptr(), 0, b.Rows, k))
	b.Seed = auditSeed
	require.NoError(t, b.auditStatic(t.Context(), k, ranks))
}

// The audit passes answers of the placement that was asked, and tells those of another.
func TestAuditStatic(t *testing.T) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	for _, seed := range []uint64{3, 4} {
		b := &measurement{Config: Config{Rows: 200, GPUShare: 0.4, CPUShare: 0.3, SSDs: 2, Seed: 3},
			dev: dev, host: true, total: 1000}
		b.stream, err = dev.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		b.buf, err = dev.Alloc(cuda.MemPinned, 8*b.Rows, "test")
		require.NoError(t, err)
		b.asked = hostmem.View[int64](b.buf.Bytes())
		b.set(auditSet, b.asked)
		b.measured(t, seed)
		require.Equal(t, seed == 3, b.row.Why == "", b.row.Why)
		require.NoError(t, b.buf.Free())
		require.NoError(t, b.stream.Close())
	}
}

// A set has no row twice.
func TestSet(t *testing.T) {
	b := &measurement{total: 1000}
	all := make([]int64, b.total)
	b.set(7, all)
	slices.Sort(all)
	for i, v := range all {
		require.EqualValues(t, i, v)
	}
}

func TestCheck(t *testing.T) {
	good := Config{Rows: 1, LineRows: 1, SSDs: 1}
	require.NoError(t, good.Check())
	for key, spoil := range map[string]func(*Config){
		"rows":      func(c *Config) { c.Rows = 0 },
		"gpu-cache": func(c *Config) { c.GPUShare = 1.5 },
		"line-rows": func(c *Config) { c.LineRows = 0 },
		"window":    func(c *Config) { c.Window = 65 },
		"ssd-count": func(c *Config) { c.SSDs = 0 },
	} {
		c := good
		spoil(&c)
		require.ErrorContains(t, c.Check(), errs.Key(key).String())
	}
}
