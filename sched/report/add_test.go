package report

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The part after a checkpoint is the whole less the checkpoint's, figure by figure.
func TestSince(t *testing.T) {
	part := func(k int64) (p Partial) {
		for i, n := range p.counts() {
			*n = k * int64(i+1)
		}
		p.Batches, p.Seeds, p.LossSum, p.Correct, p.Counted = int(k), 10*k, 0.5*float64(k), 2*k, 4*k
		return p
	}
	whole := part(5)
	whole.Seconds = 7
	want := part(3)
	want.Seconds = 7
	require.Equal(t, want, whole.Since(part(2)))
}
