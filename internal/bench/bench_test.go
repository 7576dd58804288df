package bench

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The median of an even number of values lies between the middle two, and the input keeps its
// order.
func TestSpreadOf(t *testing.T) {
	v := []float64{4, 1, 2, 8}
	require.Equal(t, Spread{3, 1, 8}, SpreadOf(v))
	require.Equal(t, []float64{4, 1, 2, 8}, v)
	require.Equal(t, Spread{4, 1, 4}, Spread{SpreadOf(v[:1]).Median, SpreadOf(v[:2]).Min,
		SpreadOf(v[:3]).Max})
	require.Equal(t, "3.00 (1.00-8.00)", SpreadOf(v).String())
}
