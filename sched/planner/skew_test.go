package planner

import (
	"helios/internal/errs"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// Whatever a file of degrees holds, it is refused, or gives a graph whose nodes that have edges are
// drawn, and no other.
func FuzzDegrees(f *testing.F) {
	f.Add([]byte("# degree nodes\n1 900\n91,100\n0 5\n"), 0.5)
	f.Add([]byte("1 1"), 0.999999999)
	f.Add([]byte("1099511627776 64\n0 1099511627000\n"), 0.0)
	f.Add([]byte("3;4\n3\t4\n\n"), 0.3)
	f.Add([]byte("-1 1\n"), 0.1)
	f.Fuzz(func(t *testing.T, text []byte, u float64) {
		p, err := parseDegrees("d", text)
		if err != nil {
			require.Equal(t, errs.Usage, errs.ClassOf(err))
			return
		}
		n, m, ok := p.Totals()
		require.True(t, ok && n >= 1 && n <= maxNodes && m >= 1 && m <= 64*maxNodes, "%d, %d", n, m)
		if !(u >= 0 && u < 1) {
			return
		}
		r := p.Rank(u, n)
		require.True(t, r >= 0 && r < n)
		require.Positive(t, p.chance(float64(r), n), "rank %d of %d has no edge", r, n)
		mean := float64(m) / float64(n)
		for _, fanout := range []int{-1, 1, 10, 1 << 20} {
			d := p.drawn(fanout, mean)
			require.True(t, d >= 0 && d <= mean*(1+1e-9), "%v of %v at fanout %d", d, mean, fanout)
		}
	})
}

// Ranks go to rows one to one.
func TestPlaces(t *testing.T) {
	for _, n := range []int64{1, 2, 3, 1000, 4097} {
		seen := map[int64]bool{}
		pos := newPlaces(n, 7)
		for r := range n {
			row := pos.row(r)
			require.True(t, row >= 0 && row < n && !seen[row])
			seen[row] = true
		}
	}
	s := NewSet(1)
	for i := range int64(5000) {
		require.True(t, s.Add(i*i))
		require.False(t, s.Add(i*i))
	}
}

// The pace of the middle continues, whatever the end does.
func TestEpochSeconds(t *testing.T) {
	require.Equal(t, 3.0, epochSeconds([]float64{1, 2, 3}, 3, 0, 2))
	require.Equal(t, 12.0, epochSeconds([]float64{3, 4, 5, 5.5, 6}, 11, 0, 2))
	require.Equal(t, 9.0, epochSeconds([]float64{1, 2, 3}, 9, -1, 2))
	require.False(t, math.IsNaN(epochSeconds([]float64{1}, 5, -1, 0)))
}
