package sched

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// Faults that a retry heals change nothing but the counters.
func TestFaultsThatHeal(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.Epochs = 1
	cfg.ReadTimeout, cfg.ReadRetries = 300*time.Millisecond, 4
	clean := train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2, report.Observer{})
	require.NoError(t, clean.err)
	for _, c := range []struct {
		fault   string
		retries bool
	}{
		{"error(op=read,sct=2,sc=0x81,times=3,after=50)", true},
		{"lost(op=read,times=1,after=50)", true},
		{"late(op=read,ms=20,times=5,after=50)", false},
		{"late(op=read,ms=700,times=1,after=80)", true},
	} {
		t.Run(c.fault, func(t *testing.T) {
			s := bind(t, d, 2, c.fault)
			before := testrig.Held(t)
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err)
			before.Leaked(t, "topology")
			require.Equal(t, clean.res.ParamsSHA256, r.res.ParamsSHA256)
			hits := int64(0)
			for _, f := range s.faults {
				for _, n := range f.Counts() {
					hits += n
				}
			}
			require.Positive(t, hits, "the fault struck")
			if c.retries {
				require.Positive(t, r.res.Epochs[0].Retries, "and the counters show it")
			}
		})
	}
}

// A read that can't be healed ends the step with a typed error: nothing trains on the batch,
// and everything is given back.
func TestFaultsThatDoNot(t *testing.T) {
	d, feat := tiny.open(t)
	for fault, want := range map[string]func(error) bool{
		"error(op=read,sct=2,sc=0x81,dnr=1,after=200)": func(err error) bool {
			var st *nvme.StatusError
			return errors.As(err, &st) && st.Status.DNR()
		},
		"lost(op=read,after=200)": func(err error) bool {
			var to *gpuio.TimeoutError
			return errors.As(err, &to)
		},
	} {
		for _, pipe := range []string{plan.DefaultPipeline, plan.PipelineNone} {
			t.Run(fault+" "+pipe, func(t *testing.T) {
				s := bind(t, d, 2, fault)
				before := testrig.Held(t)
				cfg := small()
				cfg.Pipeline = pipe
				cfg.ReadTimeout, cfg.ReadRetries = 150*time.Millisecond, 1
				cfg.CoalesceBytes = -1 // so that there are as many reads
				cfg.CheckpointDir, cfg.CheckpointEvery = t.TempDir(), 1
				trained := 0
				r := train(t, context.Background(), cfg, d, feat, s, 2,
					report.Observer{Step: func(string, int, int) { trained++ }})
				require.Error(t, r.err)
				require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
				require.True(t, want(r.err), "%v", r.err)
				before.Leaked(t, "topology")
				// The checkpoint has the training before the fault.
				path := filepath.Join(cfg.CheckpointDir, checkpointName)
				if _, err := os.Stat(path); trained == 0 {
					require.ErrorIs(t, err, os.ErrNotExist)
				} else {
					require.NoError(t, err)
				}
			})
		}
	}
}

// The stacks that read the backing file themselves find it cut short: a typed error as well.
func TestTruncatedBacking(t *testing.T) {
	d, feat := tiny.open(t)
	for _, mode := range []string{static.ModeCPU, static.ModeMmap} {
		t.Run(mode, func(t *testing.T) {
			s := bind(t, d, 2, "")
			before := testrig.Held(t)
			cfg := small()
			cfg.Mode = mode
			trained := 0
			cfg.OnBatch = func(int, int, *graph.MiniBatch) {
				if trained++; trained == 2 {
					require.NoError(t, os.Truncate(s.paths[1], 4096))
				}
			}
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.Error(t, r.err)
			require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
			require.ErrorContains(t, r.err, s.paths[1])
			before.Leaked(t, "topology")
			// The controller's own mapping of the file must find pages when it shuts down.
			st, err := os.Stat(s.paths[0])
			require.NoError(t, err)
			require.NoError(t, os.Truncate(s.paths[1], st.Size()))
		})
	}
}

// Budgets beyond the machine are refused before anything is allocated.
func TestBudgetBeyondMemory(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	for _, flag := range []string{"option gpu-cache", "option cpu-cache"} {
		cfg := small()
		b := &cfg.GPUCache
		if flag == "option cpu-cache" {
			b = &cfg.CPUCache
		}
		b.Bytes = 1 << 50
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.Equal(t, errs.Usage, errs.ClassOf(r.err))
		require.ErrorContains(t, r.err, flag)
	}
}

// An evaluation that fails, also while it fills the tiers, describes each SSD.
func TestEvaluateSaysWhatTheSSDsDid(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir = 1, t.TempDir()
	require.NoError(t, train(t, context.Background(), cfg, d, feat, bind(t, d, 2, ""), 2,
		report.Observer{}).err)
	for name, gpu := range map[string]float64{"filling": 30, "reading": 0} {
		s := bind(t, d, 2, "error(op=read,sct=2,sc=0x81,dnr=1,after=60)")
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
		r, err := Evaluate(context.Background(), plan.Config{GPUCache: percent(gpu),
			CoalesceBytes: -1}, in, cfg.CheckpointDir, "test", report.Observer{})
		require.Equal(t, errs.Device, errs.ClassOf(err), "%s: %v", name, err)
		failed := int64(0)
		for _, x := range r.IO.SSDs {
			failed += x.Errors
		}
		require.Positive(t, failed, name)
		require.NoError(t, dev.Close())
	}
}

// An interrupt does not wait until reads that never end are past their deadlines, and gives
// everything back all the same: while SSDs are attached, tiers filled, and in the middle of an
// epoch.
func TestInterruptWithLostReads(t *testing.T) {
	d, feat := tiny.open(t)
	cfg := small()
	cfg.ReadTimeout = time.Minute
	defer func(d time.Duration) { prepare.InterruptGrace = d }(prepare.InterruptGrace)
	prepare.InterruptGrace = 200 * time.Millisecond
	for name, fault := range map[string]string{"attach": "lost(op=read)",
		"fill": "lost(op=read,after=20)", "epoch": "lost(op=read,after=400)"} {
		if name == "attach" && wide.Lean() { // takes the 10 s of a read of the superblock
			continue
		}
		t.Run(name, func(t *testing.T) {
			cfg := cfg
			cfg.CPUCache, cfg.GPUCache = percent(5), percent(5)
			if name == "epoch" {
				cfg.CPUCache, cfg.GPUCache = percent(0), percent(0)
			}
			s := bind(t, d, 2, fault)
			before := testrig.Held(t)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			time.AfterFunc(time.Second, cancel)
			began := time.Now()
			r := train(t, ctx, cfg, d, feat, s, 2, report.Observer{})
			require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
			require.Less(t, time.Since(began), 30*time.Second,
				"the reads' own deadline is a minute away")
			before.Leaked(t, "topology")
		})
	}
}
