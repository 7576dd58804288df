package sched

import (
	"context"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
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
			var last report.Partial // of the live figures
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{
				Live: func(pass string, p report.Partial) {
					if p.Batches == 1 {
						last = report.Partial{}
					}
					require.Greater(t, p.Commands, last.Commands, "%s, mini-batch %d", pass, p.Batches)
					require.Greater(t, p.BytesSSD, last.BytesSSD)
					last = p
				}})
			require.NoError(t, r.err)
			require.Equal(t, apart.res.ParamsSHA256, r.res.ParamsSHA256)
			e := r.res.Epochs[1]
			require.Equal(t, e.SSDCommands, last.Commands)
			require.Equal(t, e.BytesSSD, last.BytesSSD)
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

// The virtual clock merges the reads of mini-batches as a run over files does, and a plan counts
// the memory that the run's mini-batches take.
func TestModelledMergedReads(t *testing.T) {
	d, feat := graphSpec{nodes: 20_000, dim: 256, degree: 6, train: 0.1}.open(t)
	s := bindIn(t, d, 1, t.TempDir(), true, "")
	hw := hardwareOf(t, "host")
	var err error
	hw.SSDs.Measured, err = ssdOf(80, 50_000, 2000, int64(d.Meta.RowBytes()))
	require.NoError(t, err)
	const row = 1024
	for _, depth := range []int{1, 2, 5} {
		largest := int64(0) // mini-batch, in rows
		cfg := small()
		cfg.Batch, cfg.NoEval, cfg.GPUCache, cfg.CPUCache = 220, true, percent(5), percent(5)
		cfg.CoalesceBytes, cfg.Depth = 4<<10, depth // as near as rows are at any measured speed
		cfg.OnBatch = func(_, _ int, mb *graph.MiniBatch) {
			largest = max(largest, mb.HopEnd[len(mb.HopEnd)-1])
		}
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		cfg.OnBatch = nil
		model := playOn(t, cfg, d, hw, 1)
		require.Len(t, model.Epochs, len(r.res.Epochs))
		for i, e := range r.res.Epochs {
			require.Equal(t, depth > 1, e.ReadGroups > 0)
			require.Equal(t, e.ReadGroups, model.Epochs[i].ReadGroups)
			require.Equal(t, e.GroupBatches, model.Epochs[i].GroupBatches)
			e, m := counts(e), counts(model.Epochs[i])
			e.Loss, e.TrainAcc, e.ValAcc = 0, nil, nil
			require.Equal(t, e, m, "depth %d", depth)
		}
		var held, tensors int64
		for _, u := range r.res.Memory {
			switch u.Purpose {
			case "mini-batch features": // of which only the rows of a mini-batch are touched
				slot := int64(220 * 5 * 4 * row)
				if depth > 1 { // one reservation of them all: tensors begin on pages and at rows
					slot = 8 << 20
				}
				tensors = u.Bytes / slot
				held += tensors * largest * row
			case "cache lookup", "frontier", "block offsets", "block sources", "merged reads":
				held += u.Resident
			}
		}
		require.EqualValues(t, map[int]int{1: 2, 2: 4, 5: 6}[depth], tensors)
		planned := planOn(t, cfg, d, hw).GPUMemory["mini-batches"]
		t.Logf("depth %d: planned %d bytes, held %d", depth, planned, held)
		require.InEpsilon(t, held, planned, 0.06, "depth %d", depth)
	}
}

// planOn plans a run on a machine.
func planOn(t *testing.T, cfg plan.Config, d *dataset.Dataset, hw *hardware.Profile) *planner.Plan {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	m := d.Meta
	p, err := planner.New(planner.Options{Config: cfg,
		Inputs: prepare.Inputs{Dev: dev, Dataset: d}, RowType: m.RowType(),
		Hardware: cost.Hardware{Profile: hw, SSDs: 1},
		Graph: planner.Graph{Name: m.Name, Nodes: m.Nodes, Edges: m.Edges, Dim: m.Dim,
			Classes: m.Classes, Train: 0.1},
		Find: tiers.Prediction}, report.Observer{})
	require.NoError(t, err)
	x, err := p.Plan(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	require.NoError(t, dev.Close())
	return x
}
