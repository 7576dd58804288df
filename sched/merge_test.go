package sched

import (
	"context"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/report"
)

// Where files play the SSDs, mini-batches are read as one set, with the same result: also of an odd
// number, in pieces, and by either stack. A row that is wrong ends the run by the set's name.
func TestMergedReads(t *testing.T) {
	d, feat := graphSpec{nodes: 20_000, dim: 256, degree: 6, train: 0.05}.open(t)
	s := bindIn(t, d, 1, t.TempDir(), true, "")
	cfg := small()
	cfg.Batch, cfg.NoEval, cfg.GPUCache, cfg.CPUCache = 110, true, percent(5), percent(5)
	cfg.CheckReads = plan.ChecksOn
	cfg.Depth = 1 // mini-batches prepared ahead: two credits are too few to merge any
	apart := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, apart.err)
	require.Zero(t, apart.res.Epochs[1].ReadGroups)
	for _, stack := range []string{gpuio.StackAsync, gpuio.StackCPU} {
		cfg.IOStack = stack
		for depth, sets := range map[int]int{2: 4, 5: 3} { // all batches but the first, by 2, by 3
			cfg.Depth = depth
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err)
			require.Equal(t, apart.res.ParamsSHA256, r.res.ParamsSHA256)
			e := r.res.Epochs[1]
			require.Equal(t, apart.res.Epochs[1].RowsSSD, e.RowsSSD)
			require.Equal(t, 10, e.Batches)
			require.Equal(t, sets, e.ReadGroups, "%s, depth %d", stack, depth)
		}
	}
	cfg.Depth, cfg.CheckpointDir, cfg.Resume = 2, t.TempDir(), true
	r, runs := trainInPieces(t, 4, 4, cfg, d, feat, s)
	require.Greater(t, runs, 2)
	require.Equal(t, apart.res.ParamsSHA256, r.res.ParamsSHA256)

	_, on, err := stripe.Attach(t.Context(), d, s.ssds)
	require.NoError(t, err)
	f, err := os.OpenFile(s.paths[0], os.O_RDWR, 0)
	require.NoError(t, err)
	const row = 1024
	cfg.CheckpointDir, cfg.Resume = "", false
	cfg.OnBatch = func(int, int, *graph.MiniBatch) { // of the first batch
		if f == nil {
			return
		}
		for i := int64(0); i < 20_000; i++ {
			_, err := f.WriteAt([]byte{1}, int64(on[0].DataStart)*512+i*row+77)
			require.NoError(t, err)
		}
		require.NoError(t, f.Close())
		f = nil
	}
	r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
	require.ErrorContains(t, r.err, "CRC32C")
	require.Regexp(t, regexp.MustCompile(`batches \d+ to \d+: `), r.err.Error())
}
