package packed

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/hostmem"
)

// held is the memory that is in use now, Go's and ours.
func held() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) + hostmem.Usage()["packing"]
}

// meter is a Source and Pages that keep nothing, and look at the memory now and then.
type meter struct {
	calls, peak int64
}

func (m *meter) look() {
	if m.calls++; m.calls%16 == 0 {
		m.peak = max(m.peak, held())
	}
}

func (m *meter) ReadRows(context.Context, int64, int64, []byte) error {
	m.look()
	return nil
}
func (m *meter) WriteAt(context.Context, int64, []byte) error { return nil }
func (m *meter) ReadAt(context.Context, int64, []byte) error  { return nil }
func (m *meter) Sync(context.Context) error                   { return nil }

// A pack takes no more memory than it may, whatever it packs.
func TestPackMemory(t *testing.T) {
	const rows, width, budget = 600_000, 512, 24 << 20
	m := random(rand.New(rand.NewPCG(4, 4)), 60, rows, 4000)
	p, _, _ := build(t, m, Config{Rows: rows, RowBytes: width, Segment: 2})
	x := &meter{}
	before := held()
	_, err := Pack(t.Context(), p, x, x, PackConfig{Memory: budget, Workers: 1})
	require.NoError(t, err)
	require.Positive(t, x.peak)
	t.Logf("%d bytes of %d", x.peak-before, budget)
	require.LessOrEqual(t, x.peak-before, int64(budget))
	require.Greater(t, x.peak-before, int64(budget/2), "the memory is used")
	require.Zero(t, hostmem.Usage()["packing"], "all is given back")
}
