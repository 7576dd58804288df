package htmlreport

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/metrics"
)

// The figures of a class stand with its row of the matrix; a matrix that is not of the classes, as
// in a file that was changed, is left out.
func TestClassTable(t *testing.T) {
	for _, c := range []struct {
		matrix  [][]int64
		columns int
	}{{[][]int64{{3, 1}, {0, 2}}, 7 + 2}, {nil, 7}, {[][]int64{{3, 1}}, 7},
		{[][]int64{{3}, {1, 2}}, 7}, {[][]int64{{1}, {1}, {1}}, 7}} {
		x := classTable("t", &metrics.Report{Classes: make([]metrics.Class, 2), Confusion: c.matrix})
		require.Len(t, x.Head, c.columns, "%v", c.matrix)
		for _, row := range x.Rows {
			require.Len(t, row, c.columns, "%v", c.matrix)
		}
	}
}
