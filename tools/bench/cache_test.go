package main

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
)

// Every row passes its audit, on the host device.
func TestMeasureCache(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	c := cacheConfig{rows: 500, directory: policy.InQueues, length: time.Millisecond}
	for _, name := range []string{staticIndex, "lru"} {
		r, err := measureCache(t.Context(), dev, c, 10_000, name)
		require.NoError(t, err)
		require.True(t, r.Audited, r.Why)
		require.GreaterOrEqual(t, r.Turns, leastTurns)
		require.Positive(t, r.Lookups.Min)
		require.GreaterOrEqual(t, r.Checked, c.rows)
	}
}

// measured looks b.asked up in an index of b's placement and audits the answer with another seed's.
func (b *cacheRun) measured(t *testing.T, auditSeed uint64) {
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
	h, err := cache.NewLookup(b.dev, index, cacheSSDs)
	require.NoError(t, err)
	defer func() { require.NoError(t, h.Close()) }()
	k, err := h.NewBuckets()
	require.NoError(t, err)
	defer func() { require.NoError(t, k.Close()) }()
	require.NoError(t, h.Lookup(t.Context(), b.stream, b.buf.Ptr(), 0, b.rows, k))
	b.seed = auditSeed
	require.NoError(t, b.auditStatic(t.Context(), k, ranks))
}

// The audit passes answers of the placement that was asked, and tells those of another.
func TestAuditStatic(t *testing.T) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	for _, seed := range []uint64{3, 4} {
		b := &cacheRun{cacheConfig: cacheConfig{rows: 200}, dev: dev, total: 1000, seed: 3}
		b.stream, err = dev.NewStream(cuda.StreamOptions{})
		require.NoError(t, err)
		b.buf, err = dev.Alloc(cuda.MemPinned, 8*b.rows, "test")
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
	b := &cacheRun{total: 1000}
	all := make([]int64, b.total)
	b.set(7, all)
	slices.Sort(all)
	for i, v := range all {
		require.EqualValues(t, i, v)
	}
}
