package sched

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
)

// trainSeveral trains on cfg.Replicas host devices and closes them. It fails the test when the run
// leaves something behind.
func trainSeveral(t testing.TB, ctx context.Context, cfg plan.Config, d *dataset.Dataset, s *ssdSet,
	obs report.Observer) record {
	t.Helper()
	devices := make([]cuda.Device, max(cfg.Replicas, 1))
	for i := range devices {
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1 + i%2})
		require.NoError(t, err)
		devices[i] = dev
	}
	return trainOnAll(t, ctx, devices, cfg, d, s, obs)
}

// trainOnAll is trainSeveral on devices.
func trainOnAll(t testing.TB, ctx context.Context, devices []cuda.Device, cfg plan.Config,
	d *dataset.Dataset, s *ssdSet, obs report.Observer) (r record) {
	t.Helper()
	before := hostmem.Usage()
	if runsOn(cfg, &hier.System) && cfg.PartedDir == "" {
		cfg.PartedDir = filepath.Join(t.TempDir(), "parted")
	}
	if runsOn(cfg, &diskgnn.System) && cfg.PackedDir == "" {
		cfg.PackedDir = filepath.Join(t.TempDir(), "packed")
	}
	r.res, r.err = Train(ctx, cfg, prepare.Inputs{Dev: devices[0], More: devices[1:], Dataset: d,
		SSDs: s.ssds}, obs)
	for _, dev := range devices {
		require.NoError(t, dev.Close(), "streams or buffers were left open")
	}
	for k, v := range hostmem.Usage() {
		if k != "topology" {
			require.LessOrEqual(t, v, before[k], "hostmem for %q", k)
		}
	}
	return r
}

// The number of replicas changes no bit of a run: in every mode, with any pipeline, running means
// of a normalisation included, whether or not they divide the shards.
func TestReplicasEveryWay(t *testing.T) {
	d := tiny.generate(t)
	s := bind(t, d, 2, "")
	for _, m := range tiers.Modes {
		t.Run(m.Name, func(t *testing.T) {
			cfg := small()
			cfg.Mode, cfg.Norm, cfg.Shards, cfg.Batch = m.Name, "batch", 4, 70
			if m.Name != static.ModeHelios && wide.Lean() {
				cfg.Epochs = 1
			}
			want := trainSeveral(t, context.Background(), cfg, d, s, report.Observer{})
			require.NoError(t, want.err)
			require.Equal(t, 1, want.res.Replicas)
			counts := []int{2, 4, 3}
			if m.Name != static.ModeHelios {
				counts = counts[:2]
				if wide.Lean() {
					counts = counts[:1]
				}
			}
			for i, q := range counts {
				c := cfg
				c.Replicas = q
				if m.Name == static.ModeHelios {
					c.Pipeline = []string{plan.PipelineNone, plan.DefaultPipeline,
						plan.PipelineIntra}[i]
				}
				r := trainSeveral(t, context.Background(), c, d, s, report.Observer{})
				require.NoError(t, r.err)
				require.Equal(t, q, r.res.Replicas)
				require.Len(t, r.res.MoreDevices, q-1)
				require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, "%d replicas", q)
				require.Equal(t, want.res.TestAcc, r.res.TestAcc)
				for e := range want.res.Epochs {
					require.Equal(t, want.res.Epochs[e].Loss, r.res.Epochs[e].Loss)
					require.Equal(t, want.res.Epochs[e].TrainAcc, r.res.Epochs[e].TrainAcc)
					require.Equal(t, want.res.Epochs[e].ValAcc, r.res.Epochs[e].ValAcc)
					require.Equal(t, want.res.Epochs[e].Seeds, r.res.Epochs[e].Seeds)
				}
			}
		})
	}
}

// Stopped at any mini-batch and resumed with other numbers of replicas, the run is the one that was
// never stopped.
func TestReplicasResume(t *testing.T) {
	d := tiny.generate(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Shards, cfg.Norm, cfg.Batch = 4, "batch", 50
	want := trainSeveral(t, context.Background(), cfg, d, s, report.Observer{})
	require.NoError(t, want.err)
	rng := rand.New(rand.NewPCG(21, 12))
	c := cfg
	c.CheckpointDir, c.Resume = t.TempDir(), true
	for stops := 0; ; stops++ {
		c.CheckpointEvery = rng.IntN(6)
		c.Replicas = 1 + rng.IntN(4)
		ctx, cancel := context.WithCancel(context.Background())
		left := 1 + rng.IntN(9)
		obs := report.Observer{Step: func(string, int, int) {
			if left--; left == 0 && stops < 6 {
				cancel()
			}
		}}
		r := trainSeveral(t, ctx, c, d, s, obs)
		cancel()
		if r.err == nil {
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			require.Greater(t, stops, 2)
			for i := range want.res.Epochs {
				require.Equal(t, want.res.Epochs[i].Loss, r.res.Epochs[i].Loss)
				require.Equal(t, want.res.Epochs[i].Batches, r.res.Epochs[i].Batches)
			}
			break
		}
		require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
		require.ErrorContains(t, r.err, "saved in")
	}
}

// A read that fails in the middle of a step ends the run with nothing left behind, and one that
// heals changes nothing.
func TestReplicasFaults(t *testing.T) {
	d := tiny.generate(t)
	cfg := small()
	cfg.Shards, cfg.Replicas, cfg.Batch = 4, 2, 50
	want := trainSeveral(t, context.Background(), cfg, d, bind(t, d, 1, ""), report.Observer{})
	require.NoError(t, want.err)
	for fault, heals := range map[string]bool{
		"error(op=read,sct=2,sc=0x81,times=3,after=150)":       true,
		"error(op=read,sct=2,sc=0x81,dnr=1,times=1,after=400)": false,
	} {
		s := bind(t, d, 1, fault)
		before := testrig.Held(t)
		r := trainSeveral(t, context.Background(), cfg, d, s, report.Observer{})
		before.Leaked(t, "topology")
		if heals {
			require.NoError(t, r.err, fault)
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
			continue
		}
		require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
	}
}

func TestReplicasRefused(t *testing.T) {
	d := tiny.generate(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Shards, cfg.Replicas = 2, 3
	r := trainSeveral(t, context.Background(), cfg, d, s, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "option replicas 3")
	require.ErrorContains(t, r.err, "option shards 2")
	cfg.Shards, cfg.Replicas = 4, 65
	require.ErrorContains(t, cfg.Check(), "option replicas 65 is not between 1 and 64")
	cfg.Shards, cfg.Replicas = 0, 3
	f, err := cfg.Filled()
	require.NoError(t, err)
	require.Equal(t, 3, f.Shards, "as many as replicas")
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	r = trainOnAll(t, context.Background(), []cuda.Device{dev}, cfg, d, s, report.Observer{})
	require.ErrorContains(t, r.err, "option replicas 3: 1 devices are open")
}
