package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/plan"
	"helios/sched/report"
)

// Where files play the SSDs, two mini-batches are read as one set, with the same result.
func TestMergedReads(t *testing.T) {
	d, feat := graphSpec{nodes: 20_000, dim: 256, degree: 6, train: 0.05}.open(t)
	s := bindIn(t, d, 1, t.TempDir(), true, "")
	cfg := small()
	cfg.Batch, cfg.NoEval, cfg.GPUCache, cfg.CPUCache = 100, true, percent(5), percent(5)
	cfg.CheckReads = plan.ChecksOn
	var sums [2]string
	for i := range sums {
		cfg.Depth = 1 + i // mini-batches prepared ahead: two credits are too few to merge any
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		sums[i] = r.res.ParamsSHA256
	}
	require.Equal(t, sums[0], sums[1])
}
