package memory

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
)

func host(t *testing.T) cuda.Device {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	return dev
}

// Both tiers give rows that pass their audit.
func TestMeasure(t *testing.T) {
	testrig.CheckLeaks(t)
	rows, err := Measure(t.Context(), host(t), Config{Tier: 64 << 10, Set: 32 << 10,
		Length: time.Millisecond, Seed: 1}, 100)
	require.NoError(t, err)
	require.Len(t, rows, 2)
	for _, r := range rows {
		require.True(t, r.Audited, r.Why)
		require.Equal(t, 2*r.Rows, r.Checked, "of the gather and of the copy")
		require.Positive(t, r.Ratio.Min)
	}
}

// The audit finds a single byte that is not the row's.
func TestAuditTells(t *testing.T) {
	c := &Config{Tier: 8 << 10, Set: 8 << 10}
	r, err := openRig(t.Context(), host(t), c, 64)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.close()) }()
	all := r.hetero.TierRows(cache.GPU)
	require.NoError(t, r.stream.Copy(r.dst.Ptr(), r.hetero.TierBuffer(cache.GPU).Ptr(), c.Set))
	n, wrong, err := r.compare(t.Context(), all)
	require.NoError(t, err)
	require.Empty(t, wrong)
	require.EqualValues(t, len(all), n)
	r.dst.Bytes()[3*64+8] ^= 1
	_, wrong, err = r.compare(t.Context(), all)
	require.NoError(t, err)
	require.Contains(t, wrong, "row 3, byte 8")
}

func TestCheck(t *testing.T) {
	c := Config{Tier: 1 << 20, Set: 1 << 20}
	require.NoError(t, c.Check(4096))
	require.ErrorContains(t, c.Check(6), "option row-bytes 6")
	require.ErrorContains(t, (&Config{Tier: 1 << 10, Set: 1 << 10}).Check(4096), "option tier")
	require.ErrorContains(t, (&Config{Tier: 1 << 20, Set: 2 << 20}).Check(4), "option set")
	require.Equal(t, errs.Usage, errs.ClassOf(c.Check(0)))
}
