package prepare

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Orders are equal where walkers of them have the same seeds in the same mini-batches.
func TestOrdersEqual(t *testing.T) {
	seeds := []int64{5, 3, 8, 1, 9, 2}
	o := NewOrder(seeds, 2)
	sections, _ := NewSections(seeds, []int{3, 6}, 2)
	all := []Order{o, NewOrder(seeds[:5], 2), NewOrder([]int64{5, 3, 8, 1, 2, 9}, 2),
		NewOrder(seeds, 3), sections, o.Share(2, 0, 2), o.Share(2, 1, 2), o.Pick([]int{1, 0}), {}}
	for i, a := range all {
		for k, b := range all {
			require.Equal(t, i == k, a.Equal(b), "%d and %d", i, k)
		}
	}
	require.True(t, o.Equal(NewOrder(append([]int64{}, seeds...), 2)))
	require.True(t, o.Equal(o.Share(2, 1, 2).Whole()))
}
