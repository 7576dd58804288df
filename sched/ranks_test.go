package sched

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/ranks"
	"helios/internal/shardtree"
	"helios/internal/testing/testrig"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// groups brings n ranks together within this process.
func groups(t *testing.T, n int) []ranks.Group {
	t.Helper()
	master := "127.0.0.1:" + testrig.FreePort(t)
	all, failed := make([]ranks.Group, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			all[r], failed[r] = ranks.Join(t.Context(), ranks.Launch{Rank: r, Size: n, Local: -1,
				Master: master}, ranks.Options{Join: 20 * time.Second, Wait: time.Minute})
		})
	}
	wg.Wait()
	for _, err := range failed {
		require.NoError(t, err)
	}
	return all
}

// trainRanks runs a configuration in ranks of this process, one for each of cfgs.
func trainRanks(t *testing.T, ctx context.Context, d *dataset.Dataset,
	cfgs ...plan.Config) ([]*report.Result, []error) {
	t.Helper()
	res, failed := make([]*report.Result, len(cfgs)), make([]error, len(cfgs))
	all := groups(t, len(cfgs))
	var wg sync.WaitGroup
	for r, cfg := range cfgs {
		s := bind(t, d, 1, "")
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
		require.NoError(t, err)
		wg.Go(func() {
			res[r], failed[r] = Train(ctx, cfg, prepare.Inputs{Dev: dev,
				Dataset: d, SSDs: s.ssds, Group: all[r]}, report.Observer{})
			if failed[r] != nil {
				all[r].Abort(failed[r])
			}
			_ = all[r].Close() // what failed is known
		})
		defer func() { require.NoError(t, dev.Close()) }()
	}
	wg.Wait()
	return res, failed
}

// A rank whose share of a step begins anywhere has room for the sums that its shards make.
func TestRanksOfUnevenShares(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.Mode, cfg.Shards, cfg.Batch, cfg.Epochs, cfg.NoEval = static.ModeInmem, 25, 20, 1, true
	one := train(t, context.Background(), cfg, d, feat, bind(t, d, 1, ""), 1, report.Observer{})
	require.NoError(t, one.err)
	require.Greater(t, one.res.Epochs[0].Batches, 25, "a whole step")
	res, failed := trainRanks(t, context.Background(), d, cfg, cfg)
	for r, err := range failed {
		require.NoError(t, err, "rank %d", r)
		require.Equal(t, one.res.ParamsSHA256, res[r].ParamsSHA256)
	}
}

// One rank that resumes is told from one that does not before anything is sent for it.
func TestRanksAgreeOnResume(t *testing.T) {
	d, _ := tiny.open(t)
	cfg := small()
	cfg.Mode, cfg.Shards = static.ModeInmem, 2
	for _, resumes := range []int{0, 1} {
		cfgs := []plan.Config{cfg, cfg}
		cfgs[resumes].Resume, cfgs[resumes].CheckpointDir = true, t.TempDir()
		_, failed := trainRanks(t, context.Background(), d, cfgs...)
		for r, err := range failed {
			require.ErrorContains(t, err, fmt.Sprintf("rank 1 has resume %v, rank 0 has %v",
				resumes == 1, resumes == 0), "rank %d", r)
			require.Equal(t, errs.Usage, errs.ClassOf(err))
		}
	}
}

// A rank that is asked to stop ends all, and each names the checkpoint.
func TestRanksStop(t *testing.T) {
	d, _ := tiny.open(t)
	for _, dir := range []string{"", t.TempDir()} {
		cfg := small()
		cfg.Mode, cfg.Shards, cfg.Batch, cfg.Epochs, cfg.NoEval = static.ModeInmem, 2, 20, 100, true
		ctx, cancel := context.WithCancel(context.Background())
		second := cfg
		second.OnBatch = func(epoch, index int, _ *graph.MiniBatch) {
			if epoch == 1 {
				cancel()
			}
		}
		cfg.CheckpointDir = dir // of rank 0 alone
		_, failed := trainRanks(t, ctx, d, cfg, second)
		cancel()
		says := []string{"nothing is saved without", "nothing is saved without"}
		if dir != "" {
			says = []string{"and saved in " + dir, "rank 0 saves"}
		}
		for r, err := range failed {
			require.ErrorContains(t, err, says[r], "rank %d", r)
			require.Equal(t, errs.Interrupted, errs.ClassOf(err))
		}
	}
}

// A rank that is asked to stop while another one hangs ends by itself, and so do the others, with
// that for their cause.
func TestRanksStopWithoutTheOthers(t *testing.T) {
	all := groups(t, 2)
	ctx, cancel := context.WithCancel(t.Context())
	o := &others{group: all[0], shards: 2, asked: ctx, grace: 20 * time.Millisecond}
	calls := []func() error{
		func() error {
			return o.sum(2, []hostRoot{{shardtree.Node{Count: 1}, []float32{1, 2}}},
				make([]float32, 2))
		},
		func() error { _, err := o.combine(report.Partial{}); return err },
		func() error { return o.gather(nil) },
	}
	cancel()
	for _, call := range calls {
		err := call() // the second rank never comes
		require.ErrorContains(t, err, "did not come to the end of the step within 20ms")
		require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	}
	<-all[1].Failed()
	require.ErrorContains(t, all[1].Err(), "rank 0 on ")
	require.Equal(t, errs.Interrupted, errs.ClassOf(all[1].Err()))
	var wg sync.WaitGroup
	for _, g := range all {
		wg.Go(func() { _ = g.Close() }) // it has failed
	}
	wg.Wait()
}

// slowGroup is a group whose sums of gradients take longer than all else.
type slowGroup struct {
	ranks.Group
	took time.Duration
}

func (g *slowGroup) Exchange(ctx context.Context, out [][]byte) ([][]byte, error) {
	g.took += 100 * time.Millisecond
	time.Sleep(100 * time.Millisecond)
	return g.Group.Exchange(ctx, out)
}

// The time in which other ranks hold a step up is none in which it waits for workers.
func TestRanksDoNotStall(t *testing.T) {
	d, _ := tiny.open(t)
	cfg := small()
	cfg.Mode, cfg.Shards, cfg.Epochs, cfg.NoEval = static.ModeInmem, 2, 1, true
	s, slow := bind(t, d, 1, ""), &slowGroup{Group: groups(t, 1)[0]}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	res, err := Train(t.Context(), cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds,
		Group: slow}, report.Observer{})
	require.NoError(t, err)
	require.NoError(t, errors.Join(slow.Close(), dev.Close()))
	e := res.Epochs[0]
	require.GreaterOrEqual(t, e.Seconds, slow.took.Seconds())
	require.Less(t, e.Stall*e.Seconds, slow.took.Seconds()/2)
}
