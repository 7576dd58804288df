package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/internal/testing/testrig"
)

func host(t *testing.T) cuda.Device {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

// Both tiers give rows that pass their audit.
func TestMeasureMemory(t *testing.T) {
	testrig.CheckLeaks(t)
	rows, err := measureMemory(t.Context(), host(t), memoryConfig{tier: 64 << 10, set: 32 << 10,
		length: time.Millisecond}, 100)
	require.NoError(t, err)
	require.Len(t, rows, 2)
	for _, r := range rows {
		require.True(t, r.Audited, r.Why)
		require.Equal(t, 2*r.Rows, r.Checked, "of the gather and of the copy")
		require.Positive(t, r.Ratio.Min)
	}
}

// The audit finds a single byte that is not the row's.
func TestMemoryAuditTells(t *testing.T) {
	c := &memoryConfig{tier: 8 << 10, set: 8 << 10}
	r, err := openMemoryRig(t.Context(), host(t), c, 64)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.close()) }()
	all := r.hetero.TierRows(cache.GPU)
	require.NoError(t, r.stream.Copy(r.dst.Ptr(), r.hetero.TierBuffer(cache.GPU).Ptr(), c.set))
	n, wrong, err := r.compare(t.Context(), all)
	require.NoError(t, err)
	require.Empty(t, wrong)
	require.EqualValues(t, len(all), n)
	r.dst.Bytes()[3*64+8] ^= 1
	_, wrong, err = r.compare(t.Context(), all)
	require.NoError(t, err)
	require.Contains(t, wrong, "row 3, byte 8")
}
