package iobench

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/philox"
	"helios/internal/timeline"
)

// TestArrivals: a Poisson process of the rate, the same for the same seed, whose rows are of the
// SSD that they are listed under.
func TestArrivals(t *testing.T) {
	l, err := gpuio.NewLayout(1001, 512, 3, 512)
	require.NoError(t, err)
	make := func(seed uint64) *arrivals {
		return newArrivals(&draw{key: philox.Key(seed, philox.StreamBench)}, &l,
			&Config{Rate: 1e6, WarmUp: time.Millisecond, Duration: 100 * time.Millisecond})
	}
	a, again := make(5), make(5)
	offsets := []int64{0, 0, 0, 0}
	var n, gaps, squares float64
	var last time.Duration
	for now := time.Duration(0); now < 101*time.Millisecond; now += 100 * time.Microsecond {
		rows, due := a.take(now, 1<<20, nil, offsets, nil)
		require.Len(t, due, len(rows))
		require.EqualValues(t, len(rows), offsets[3])
		for s := range 3 {
			for i := offsets[s]; i < offsets[s+1]; i++ {
				require.EqualValues(t, s, rows[i]%3)
				require.Less(t, rows[i], int64(1001))
				require.LessOrEqual(t, due[i], now)
				require.Greater(t, due[i], now-100*time.Microsecond-1)
			}
		}
		same, _ := again.take(now, 1<<20, nil, offsets, nil)
		require.Equal(t, rows, same)
	}
	require.InEpsilon(t, 100e3, float64(a.inTime), 0.02)
	b := make(6)
	for range 100000 {
		gap := float64(b.next - last)
		last = b.next
		n, gaps, squares = n+1, gaps+gap, squares+gap*gap
		b.step()
	}
	mean := gaps / n
	require.InEpsilon(t, 1000, mean, 0.02)
	require.InEpsilon(t, 1000, math.Sqrt(squares/n-mean*mean), 0.03, "exponential: as wide as long")
}

// TestUnservedCount: rows that nobody had time for are in the latencies, with what they waited so
// far.
func TestUnservedCount(t *testing.T) {
	l, err := gpuio.NewLayout(1000, 512, 1, 512)
	require.NoError(t, err)
	a := newArrivals(&draw{key: philox.Key(1, philox.StreamBench)}, &l,
		&Config{Rate: 1e5, Duration: 10 * time.Millisecond})
	var row Row
	a.result(&row, &gpuio.Histogram{})
	require.EqualValues(t, a.inTime, row.Open.Unserved)
	require.InDelta(t, 1000, row.Open.Unserved, 150)
	require.Zero(t, row.Open.Achieved)
	require.False(t, row.Open.KeptUp)
	require.InDelta(t, 5000, row.P50, 700, "they waited half of the time in the middle")
}

// TestOpenLoop: in wall time, with its trace.
func TestOpenLoop(t *testing.T) {
	dev, disks := ssds(t, 2, 1<<20, true, "")
	for _, stack := range []string{"async", "cpu"} {
		var trace bytes.Buffer
		var row Row
		for d := 300 * time.Millisecond; d < 30*time.Second; d *= 3 {
			trace.Reset()
			tl := timeline.New(&trace, timeline.Wall)
			var err error
			row, err = Run(t.Context(), Config{Dev: dev, SSDs: disks, Stack: stack, RowBytes: 512,
				Depth: 16, Rate: 2000, Duration: d, Timeline: tl, Track: "open"})
			require.NoError(t, err)
			require.NoError(t, tl.Close())
			if !strings.Contains(row.AuditError, "too busy to keep time") {
				break // else as it says: measure longer
			}
		}
		require.True(t, row.Audited, row.AuditError)
		require.InDelta(t, 2000, row.Open.Offered, 800)
		require.Positive(t, row.Open.Achieved)
		require.Equal(t, row.Open.Achieved, row.RowsPerSecond)
		require.GreaterOrEqual(t, row.Open.SetRows, 1.)
		require.Equal(t, 16, row.Sets)
		require.True(t, json.Valid(trace.Bytes()))
		require.Contains(t, trace.String(), `"set 15"`)
	}
}

// TestOpenLoopFails: a read that fails ends the run, and the row says so.
func TestOpenLoopFails(t *testing.T) {
	dev, disks := ssds(t, 1, 1<<20, true, "error(op=read,sct=2,sc=0x81,dnr=1,after=20)")
	row, err := Run(t.Context(), Config{Dev: dev, SSDs: disks, RowBytes: 512, Depth: 16, Rate: 5000,
		Duration: 100 * time.Millisecond, Coalesce: -1})
	require.NoError(t, err)
	require.False(t, row.Audited)
	require.Contains(t, row.AuditError, "unrecovered read error")
}
