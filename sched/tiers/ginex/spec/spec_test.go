package spec

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Results show the times of superbatches.
func TestSuperbatchRows(t *testing.T) {
	s := SuperbatchInfo{Superbatches: 3, Batches: 40, SampleSeconds: 1.5,
		InspectSeconds: 0.25, ChangeSeconds: 0.5, FileBytes: 2 << 20, InspectBytes: 3 << 20}
	require.Equal(t, "3 of up to 40 mini-batches: sampled in 1.5 s, inspected in 0.25 s, 0.5 s "+
		"more beside training; files of 2 MiB, inspection in 3 MiB", s.Rows()[0][1])
	s.FillSeconds = 0.125
	require.Contains(t, s.Rows()[0][1], "first rows read in 0.125 s; files")
}
