//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache/policy"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/dataset"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/testing/difftest"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/dynamic"
	dynamicspec "helios/sched/tiers/dynamic/spec"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
)

// small enough for kernels whose every thread is a fiber.
var fibers = graphSpec{nodes: 300, dim: 16, degree: 5, train: 0.25}

// lossTolerance is the largest distance of a GPU's losses from the host device's: sums in float32
// may be taken in another order.
const lossTolerance = 1e-4

// gpu is a device of the driver: the machine's with HELIOS_GPU=1, else the fake, with these knobs.
func gpu(t testing.TB, knobs string) (dev cuda.Device, library string) {
	t.Helper()
	library = difftest.Library(t)
	if library == "" && knobs != "" {
		t.Skip("needs the fake libcuda")
	}
	if library != "" {
		fakecuda.Control(t, library, "reset,sms=2,"+knobs)
	}
	dev, err := driver.Open(driver.Options{Library: library, CloseTimeout: 3 * time.Second})
	require.NoError(t, err)
	return dev, library
}

// onFibers is a configuration for them.
func onFibers() plan.Config {
	return plan.Config{
		ModelSettings: gnn.ModelSettings{Hidden: 8, Dropout: 0.1},
		Mode:          static.ModeHelios,
		Fanouts:       []int{4, 3},
		Batch:         32,
		LR:            0.01,
		Seed:          3,
		Epochs:        2,
		Blocks:        2,
		QueueDepth:    32,
		OpTimeout:     time.Minute,
		Depth:         1,
	}
}

// fiberRig is the dataset on SSDs that kernels of a GPU can drive.
func fiberRig(t testing.TB) (*dataset.Dataset, []byte, *ssdSet) {
	t.Helper()
	d, feat := fibers.open(t)
	s := bind(t, d, 2, "")
	s.off(t)
	s.poll = true
	s.power(t, "")
	return d, feat, s
}

// near holds a run on a GPU against the same one on the host device and returns the largest
// difference of losses.
func near(t testing.TB, host, gpu record) float64 {
	t.Helper()
	require.NoError(t, host.err)
	require.NoError(t, gpu.err)
	require.Equal(t, host.blocks, gpu.blocks, "blocks")
	require.Equal(t, host.seen, gpu.seen, "rows")
	require.Len(t, gpu.res.Epochs, len(host.res.Epochs))
	limit := 0.0
	for i, h := range host.res.Epochs {
		g := gpu.res.Epochs[i]
		limit = max(limit, math.Abs(h.Loss-g.Loss))
		require.Equal(t, h.Batches, g.Batches)
		require.Equal(t, h.Seeds, g.Seeds)
		require.Equal(t, h.RowsGPU+h.RowsCPU+h.RowsSSD, g.RowsGPU+g.RowsCPU+g.RowsSSD)
	}
	require.LessOrEqual(t, limit, lossTolerance, "losses")
	if limit == 0 && host.res.ParamsSHA256 != gpu.res.ParamsSHA256 {
		t.Logf("equal losses, other parameters")
	}
	return limit
}

// TestTrainOnGPU: sampling, reads, caches, gathers and the model on a device of the driver do what
// the host device does: the same blocks and rows to the byte, losses within the tolerance.
func TestTrainOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	cached := func(c *plan.Config) { c.GPUCache, c.CPUCache = percent(10), percent(20) }
	for i, v := range []struct {
		name string
		row  rowtype.Type
		set  func(*plan.Config)
	}{
		{"helios sage", rowtype.Float32, cached},
		{"gcn inmem", rowtype.Float32,
			func(
				c *plan.Config) {
				c.Mode, c.Model, c.GPUCache = static.ModeInmem, "gcn", percent(30)
			}},
		{"gat", rowtype.Float32,
			func(
				c *plan.Config) {
				cached(c)
				c.Model, c.AttentionDropout, c.Epochs = "gat", 0.3, 1
			}},
		{"gat as in the paper", rowtype.Float32,
			func(
				c *plan.Config) {
				cached(c)
				c.Model, c.Activation, c.OutHeads, c.Epochs = "gat", "elu", 1, 1
			}},
		{"between the layers", rowtype.Float32,
			func(c *plan.Config) { cached(c); between(c); c.Epochs = 1 }},
		{"gin", rowtype.Float32,
			func(c *plan.Config) { cached(c); c.Model, c.LearnEps, c.Epochs = "gin", true, 1 }},
		{"diskgnn", rowtype.Float32, func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Epochs = diskgnn.ModeDiskGNN, percent(10), percent(
				10), 1
		}},
		{"cpu", rowtype.Float32,
			func(c *plan.Config) { c.Mode, c.CPUCache = static.ModeCPU, percent(10) }},
		{"mmap", rowtype.Float32, func(c *plan.Config) { c.Mode, c.Epochs = static.ModeMmap, 1 }},
		{"gcn in one hop, sync, serial", rowtype.Float32, func(c *plan.Config) {
			c.Model, c.Fanouts, c.IOStack, c.Pipeline, c.Epochs, c.CheckReads = "gcn", []int{-1},
				gpuio.StackSync, plan.PipelineNone, 1, plan.ChecksOn
		}},
		{"float16 rows, features dropped", rowtype.Float16,
			func(c *plan.Config) { cached(c); c.FeatureDropout, c.Epochs = 0.2, 1 }},
		{"int8 rows", rowtype.Int8, cached},
		{"int8 rows of mega-batches", rowtype.Int8, func(c *plan.Config) {
			c.Mode, c.Epochs, c.CPUCache, c.PartedDir = hier.ModeHier, 1, percent(60), t.TempDir()
		}},
		{"diskgnn by kernels, pages beside rows", rowtype.Float16, func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Epochs = diskgnn.ModeDiskGNN, percent(10), percent(
				10), 1
			c.IOStack, c.Pipeline, c.CheckReads = gpuio.StackAsync, plan.PipelineNone, plan.ChecksOn
			c.PagesOn = plan.PagesSSDs
		}},
	} {
		if wide.Lean() && i > 1 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			stored := feat
			if v.row != rowtype.Float32 {
				stored = s.as(t, d, feat, v.row)
			}
			cfg := onFibers()
			v.set(&cfg)
			host := train(t, context.Background(), cfg, d, stored, s, 2, report.Observer{})
			dev, _ := gpu(t, "")
			g := trainOn(t, context.Background(), dev, cfg, d, stored, s, report.Observer{})
			diff := near(t, host, g)
			t.Logf("largest difference of losses %.2g; parameters equal: %v", diff,
				host.res.ParamsSHA256 == g.res.ParamsSHA256)
			require.Equal(t, dev.Info().Code, g.res.Kernels)
			require.Equal(t, "fp32", g.res.Precision)
			require.Zero(t, g.res.GPUCacheShrunkBytes)
			if cfg.Mode == static.ModeHelios {
				require.NotEqual(t, "", g.res.MemoryRung)
			}
		})
	}
}

// TestPrecisions: products with rounded factors, and by a BLAS, learn nearly the same.
func TestPrecisions(t *testing.T) {
	if wide.Lean() {
		t.Skip("the products have tests of their own")
	}
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.NoEval = true
	host := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	blas := plan.BLASAuto
	if os.Getenv("HELIOS_GPU") != "1" {
		blas = fakecuda.BuildBLAS(t)
	}
	for _, c := range []struct {
		precision, blas string
		tolerance       float64
	}{{"tf32", "", 1e-2}, {"bf16", "", 5e-2}, {"fp32", blas, lossTolerance}} {
		cfg.Precision, cfg.BLAS = c.precision, c.blas
		dev, _ := gpu(t, "")
		g := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
		require.NoError(t, g.err)
		require.Equal(t, host.blocks, g.blocks)
		for i := range host.res.Epochs {
			require.InDelta(t, host.res.Epochs[i].Loss, g.res.Epochs[i].Loss, c.tolerance,
				c.precision)
		}
		t.Logf("%s, %s: last loss %v, on the host %v", g.res.Precision, g.res.BLAS,
			g.res.Epochs[1].Loss, host.res.Epochs[1].Loss)
		require.Equal(t, c.precision, g.res.Precision)
		require.Equal(t, c.blas == "", g.res.BLAS == plan.BLASOff)
	}
}

// TestHostBF16: products of the host device with factors in bfloat16 learn nearly the same as in
// float32, by any number of workers the same, and a checkpoint that changes over says so.
func TestHostBF16(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for seed := range uint64(5) {
		cfg := small()
		cfg.Seed, cfg.Epochs, cfg.NoEval = 1+seed, 3, true
		want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		cfg.Precision = "bf16"
		got := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, want.err)
		require.NoError(t, got.err)
		require.Equal(t, want.blocks, got.blocks)
		require.Equal(t, want.seen, got.seen)
		require.NotEqual(t, want.res.ParamsSHA256, got.res.ParamsSHA256)
		require.Equal(t, "bf16", got.res.Precision)
		for i, e := range want.res.Epochs {
			require.InEpsilon(t, e.Loss, got.res.Epochs[i].Loss, 1e-2)
			require.NotEqual(t, e.Loss, got.res.Epochs[i].Loss)
		}
		t.Logf("seed %d: last loss %v, in fp32 %v", cfg.Seed, got.res.Epochs[2].Loss,
			want.res.Epochs[2].Loss)
		if seed == 0 {
			again := train(t, context.Background(), cfg, d, feat, s, 3, report.Observer{})
			require.NoError(t, again.err)
			require.Equal(t, got.res.ParamsSHA256, again.res.ParamsSHA256, "with three workers")
		}
	}
	cfg := small()
	cfg.Precision = "tf32"
	refused := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Capability, errs.ClassOf(refused.err))
	require.ErrorContains(t, refused.err, "option precision tf32: the host device computes in fp32 or bf16")
}

// TestVerifyRowsOnGPU: rows in the GPU's memory are held against the feature function in chunks,
// and drawn in the timeline.
func TestVerifyRowsOnGPU(t *testing.T) {
	was := engine.VerifyChunk
	engine.VerifyChunk = 1000
	defer func() { engine.VerifyChunk = was }()
	dev, _ := gpu(t, "")
	in := computedOn(t, dev, 300, rowtype.Float16, "")
	cfg := onFibers()
	var trace bytes.Buffer
	cfg.Epochs, cfg.NoEval, cfg.VerifyRows, cfg.GPUCache, cfg.Timeline = 1, true, true, percent(20),
		timeline.New(&trace, timeline.Wall)
	res, err := Train(context.Background(), cfg, in, report.Observer{})
	require.NoError(t, err)
	e := res.Epochs[0]
	require.Equal(t, e.RowsGPU+e.RowsCPU+e.RowsSSD, *res.RowsVerified)
	require.Positive(t, e.RowsGPU)
	require.NoError(t, cfg.Timeline.Close())
	spans, _, _ := readTimeline(t, trace.Bytes())
	require.True(t,
		slices.ContainsFunc(spans, func(d drawn) bool { return d.track == report.TrackGather }))
	require.NoError(t, dev.Close())
}

// TestGPUTierIsMeasured: auto takes what the device has free and leaves what the run needs.
func TestGPUTierIsMeasured(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.Epochs, cfg.GPUCacheAuto, cfg.NoEval = 1, true, true
	dev, _ := gpu(t, "mem=268435456")
	r := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.NoError(t, r.err)
	require.EqualValues(t, fibers.nodes*64, r.res.GPUCacheBytes, "all rows fit")
	require.Zero(t, r.res.Epochs[0].RowsSSD)
	require.Equal(t, plan.StackNone, r.res.IOStack)
	require.Zero(t, r.res.GPUCacheShrunkBytes)

	// Others hold nearly all of it: no tier, and the run goes on.
	dev, _ = gpu(t, "mem=268435456,used=260046848")
	r = trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.NoError(t, r.err)
	require.Zero(t, r.res.GPUCacheBytes+r.res.GPUCacheShrunkBytes)
	require.Positive(t, r.res.Epochs[0].RowsSSD)

	cfg.GPUCacheAuto, cfg.GPUCache = false, units.Budget{Bytes: 1 << 40}
	dev, _ = gpu(t, "mem=268435456,used=134217728")
	r = trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.Equal(t, errs.Usage, errs.ClassOf(r.err), "%v", r.err)
	require.ErrorContains(t, r.err, "device memory has room for")
}

// TestOutOfGPUMemory: when another process takes what is left, or an allocation fails, the run
// gives up some or all of its GPU tier and goes on at the same batch, to the same losses.
func TestOutOfGPUMemory(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.GPUCache, cfg.CPUCache, cfg.NoEval = percent(50), percent(20), true
	dev, lib := gpu(t, "mem=268435456")
	want := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.NoError(t, want.err)
	armed := "fill cpu cache"
	run := func(t *testing.T, cfg plan.Config, then string) (record, string) {
		t.Helper()
		dev, _ := gpu(t, "mem=268435456")
		var notes []string
		obs := report.Observer{Note: func(s errs.Text) { notes = append(notes, s.String()) },
			Step: func(stage string, done, total int) {
				if stage == armed && (done == total || stage != "fill cpu cache") && then != "" {
					fakecuda.Control(t, lib, then)
					then = ""
				}
			}}
		return trainOn(t, context.Background(), dev, cfg, d, feat, s, obs),
			strings.Join(notes, "\n")
	}
	for i, call := range []string{"cuMemAlloc_v2:1", "cuMemCreate:1", "cuMemAlloc_v2:3",
		"cuMemAlloc_v2:7", "cuMemAlloc_v2:12"} {
		if i > 0 && wide.Lean() {
			break
		}
		t.Run(call, func(t *testing.T) {
			got, notes := run(t, cfg, "fail="+call+":2")
			require.NoError(t, got.err)
			require.Equal(t, want.blocks, got.blocks)
			require.Equal(t, want.seen, got.seen)
			require.Equal(t, want.res.ParamsSHA256, got.res.ParamsSHA256)
			for i := range want.res.Epochs {
				require.Equal(t, want.res.Epochs[i].Loss, got.res.Epochs[i].Loss)
				require.Equal(t, want.res.Epochs[i].Batches, got.res.Epochs[i].Batches)
			}
			require.Positive(t, got.res.GPUCacheShrunkBytes)
			require.Equal(t, want.res.GPUCacheBytes-got.res.GPUCacheShrunkBytes,
				got.res.GPUCacheBytes)
			require.Contains(t, notes, "out of device memory")
		})
	}
	launches := func(t *testing.T, cfg plan.Config) {
		clean, _ := run(t, cfg, "")
		require.NoError(t, clean.err)
		armed = "epoch 1"
		defer func() { armed = "fill cpu cache" }()
		calls := []string{"cuMemAlloc_v2:2"}
		for n := 2; n < 150 && !wide.Lean(); n += 7 { // passes, sums of shards, Adam
			calls = append(calls, fmt.Sprintf("cuLaunchKernel:%d", n))
		}
		whole := 0
		for _, call := range calls {
			got, notes := run(t, cfg, "fail="+call+":2")
			if !strings.Contains(notes, "out of device memory") { // the run was over before
				require.NoError(t, got.err, call)
				calls = calls[:whole]
				break
			}
			if got.err != nil { // a stream of reads has no other try
				require.ErrorContains(t, got.err, "gpuio async: launch", call)
				continue
			}
			whole++
			require.Equal(t, clean.blocks, got.blocks, call)
			require.Equal(t, clean.res.ParamsSHA256, got.res.ParamsSHA256, call)
		}
		require.GreaterOrEqual(t, whole, min(8, len(calls)))
	}
	t.Run("shards", func(t *testing.T) {
		cfg := cfg
		cfg.Shards, cfg.Norm = 3, "batch"
		launches(t, cfg)
	})
	t.Run("steps behind each other", func(t *testing.T) {
		cfg := cfg
		cfg.Batch, cfg.Hidden = 8, 64
		launches(t, cfg)
	})
	t.Run("inmem", func(t *testing.T) {
		if wide.Lean() {
			t.Skip("the same way as above")
		}
		cfg := cfg
		cfg.Mode, cfg.Epochs = static.ModeInmem, 1
		read := func(r record) (n int64) {
			for _, s := range r.res.IO.SSDs {
				n += s.Bytes
			}
			return n
		}
		clean, _ := run(t, cfg, "")
		require.NoError(t, clean.err)
		got, notes := run(t, cfg, "fail=cuMemAlloc_v2:2:2")
		require.NoError(t, got.err)
		require.Contains(t, notes, "out of device memory")
		require.Equal(t, clean.res.ParamsSHA256, got.res.ParamsSHA256)
		require.Zero(t, got.res.Epochs[0].RowsSSD)
		require.Zero(t, got.res.GPUCacheBytes)
		require.Equal(t, int64(len(feat)), got.res.CPUCacheBytes)
		require.Greater(t, read(got), read(clean), "the tiers were filled twice")
	})
	t.Run("nothing left to give", func(t *testing.T) {
		got, notes := run(t, cfg, "used=268435456")
		require.Equal(t, errs.Capability, errs.ClassOf(got.err), "%v", got.err)
		require.ErrorContains(t, got.err, "lower option batch-size")
		require.Contains(t, notes, "the GPU tier shrinks from 9.4 KiB to 0 B")
	})
}

// TestResumeOnAnotherDevice: a checkpoint of the host device goes on on a GPU, with a word on
// rounding.
func TestResumeOnAnotherDevice(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.GPUCache = percent(10)
	whole := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, whole.err)
	cfg.CheckpointDir, cfg.Epochs = filepath.Join(t.TempDir(), "ck"), 1
	first := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, first.err)
	cfg.Resume, cfg.Epochs = true, 2
	var notes []string
	dev, _ := gpu(t, "")
	r := trainOn(t, context.Background(), dev, cfg, d, feat, s,
		report.Observer{Note: func(s errs.Text) { notes = append(notes, s.String()) }})
	require.NoError(t, r.err)
	require.Len(t, r.res.Epochs, 2)
	require.InDelta(t, whole.res.Epochs[1].Loss, r.res.Epochs[1].Loss, lossTolerance)
	require.Contains(t, strings.Join(notes, "\n"),
		"resumes with a GPU's kernels (ptx), which rounds otherwise")

	dev, _ = gpu(t, "")
	ev, err := Evaluate(context.Background(), plan.Config{}, prepare.Inputs{Dev: dev, Dataset: d,
		SSDs: s.ssds}, cfg.CheckpointDir, "test", report.Observer{})
	require.NoError(t, err)
	require.InDelta(t, *r.res.TestAcc, *ev.Accuracy, 1e-9)
	require.NoError(t, dev.Close())
	host, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	he, err := Evaluate(context.Background(), plan.Config{}, prepare.Inputs{Dev: host, Dataset: d,
		SSDs: s.ssds}, cfg.CheckpointDir, "test", report.Observer{})
	require.NoError(t, err)
	require.InDelta(t, he.Loss, ev.Loss, lossTolerance)
	require.NoError(t, host.Close())
}

// TestStopsBehindSteps: a run that is stopped while a step is under way, and another behind it,
// counts and saves both, and goes on to the same parameters.
func TestStopsBehindSteps(t *testing.T) {
	d, _, s := fiberRig(t)
	cfg := onFibers()
	cfg.GPUCache, cfg.NoEval, cfg.Batch, cfg.Hidden = percent(10), true, 8, 128
	run := func(steps int) (*report.Result, error) {
		dev, _ := gpu(t, "")
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		res, err := Train(ctx, cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds},
			report.Observer{Step: func(string, int, int) {
				if steps--; steps == 0 {
					cancel()
				}
			}})
		require.NoError(t, dev.Close())
		return res, err
	}
	whole, err := run(0)
	require.NoError(t, err)
	cfg.CheckpointDir = filepath.Join(t.TempDir(), "ck")
	for range 2 {
		_, err = run(6)
		require.Equal(t, errs.Interrupted, errs.ClassOf(err), "%v", err)
		cfg.Resume = true
	}
	res, err := run(0)
	require.NoError(t, err)
	require.NotEmpty(t, res.ResumedAt)
	require.Equal(t, whole.ParamsSHA256, res.ParamsSHA256)
	for i, e := range whole.Epochs {
		require.Equal(t, e.Batches, res.Epochs[i].Batches)
		require.Equal(t, e.Loss, res.Epochs[i].Loss)
	}
}

// TestLostContext: a GPU that is lost ends the run with class Device, and the last checkpoint
// stays.
func TestLostContext(t *testing.T) {
	d, _, s := fiberRig(t)
	cfg := onFibers()
	cfg.CheckpointDir, cfg.NoEval = filepath.Join(t.TempDir(), "ck"), true
	dev, lib := gpu(t, "mem=268435456")
	obs := report.Observer{Epoch: func(report.EpochResult) { fakecuda.Control(t, lib, "crash=2") }}
	res, err := Train(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds},
		obs)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "context is lost")
	require.Len(t, res.Epochs, 1)
	_ = dev.Close()
	s.off(t)
	s.power(t, "")
	st, err := os.Stat(filepath.Join(cfg.CheckpointDir, checkpointName))
	require.NoError(t, err)
	require.Positive(t, st.Size())
	dev, _ = gpu(t, "")
	cfg.Resume = true
	res, err = Train(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds},
		report.Observer{})
	require.NoError(t, err)
	require.Equal(t, "epoch 2 batch 0", res.ResumedAt)
	require.Len(t, res.Epochs, 2)
	require.NoError(t, dev.Close())
}

// TestDynamicTiersOnGPU: a GPU tier whose lines come and go, on a device of the driver: the rows
// and counts of the host device.
func TestDynamicTiersOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	// Sums are those of the device: with static tiers it has the same parameters, to the bit.
	still := onFibers()
	still.NoEval, still.GPUCache, still.CPUCache = true, percent(10), percent(20)
	dev, _ := gpu(t, "")
	static := trainOn(t, context.Background(), dev, still, d, feat, s, report.Observer{})
	require.NoError(t, static.err)
	for i, v := range []variant{
		{name: "gids", set: func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Window = dynamic.ModeGIDS, percent(50), percent(10), 2
		}},
		{name: "gids queues", set: func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Window = dynamic.ModeGIDS, percent(50), percent(10), 2
			c.Directory = policy.InQueues
		}},
		{name: "sieve deep by rows",
			set: func(
				c *plan.Config) {
				c.Policy, c.GPUCache, c.CacheLine = "sieve", percent(10), dynamicspec.LineRow
			}},
		{name: "bam sets", set: func(c *plan.Config) {
			c.Mode, c.GPUCache, c.Directory = dynamic.ModeBaM, percent(60), policy.InSets
		}},
		{name: "s3fifo sets deep", set: func(c *plan.Config) {
			c.Policy, c.GPUCache, c.CacheLine = "s3fifo", percent(10), dynamicspec.LineRow
			c.Directory = policy.InSets
		}},
		{name: "lru lines prefetch", set: func(c *plan.Config) {
			c.Policy, c.GPUCache, c.CacheLine, c.Pipeline, c.Window = "lru", percent(20), 1024,
				plan.PipelinePrefetch, 1
		}},
	} {
		if wide.Lean() && i > 0 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			cfg := onFibers()
			cfg.NoEval = true
			v.set(&cfg)
			host := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			dev, _ := gpu(t, "")
			g := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
			near(t, host, g)
			require.Equal(t, static.res.ParamsSHA256, g.res.ParamsSHA256)
			require.Equal(t, static.seen, g.seen, "rows, batch by batch")
			for i, h := range host.res.Epochs {
				e := g.res.Epochs[i]
				require.Equal(t, []int64{h.RowsGPU, h.RowsCPU, h.RowsSSD, h.LinesInserted,
					h.LinesEvicted, h.LinesBypassed},
					[]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD, e.LinesInserted, e.LinesEvicted,
						e.LinesBypassed})
			}
			require.Positive(t, g.res.Epochs[1].RowsGPU)
		})
	}
}

// TestAnnouncementsStayOnGPU: a window takes no copy of a mini-batch's frontier to the CPU, where
// the directory is the GPU's.
func TestAnnouncementsStayOnGPU(t *testing.T) {
	if difftest.Library(t) == "" {
		t.Skip("counts calls of the fake libcuda")
	}
	d, feat, s := fiberRig(t)
	copies := func(window int, directory string) (calls, batches int) {
		cfg := onFibers()
		cfg.Mode, cfg.GPUCache, cfg.CPUCache, cfg.NoEval = dynamic.ModeGIDS, percent(50), percent(
			10),
			true
		cfg.Batch, cfg.Epochs, cfg.Accumulate, cfg.Window, cfg.Directory = 6, 1, plan.Off, window,
			directory
		dev, lib := gpu(t, "")
		r := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
		require.NoError(t, r.err)
		calls, err := strconv.Atoi(strings.TrimSpace(fakecuda.Control(t, lib,
			"calls=cuMemcpyAsync")))
		require.NoError(t, err)
		return calls, r.res.Epochs[0].Batches
	}
	without, n := copies(plan.Off, policy.InSets)
	with, _ := copies(2, policy.InSets)
	require.Less(t, with, without+n/2, "%d mini-batches", n)
	queues, _ := copies(plan.Off, policy.InQueues)
	more, _ := copies(2, policy.InQueues)
	require.GreaterOrEqual(t, more, queues+n, "and the count sees those of another directory")
}

// TestPlannedTiersOnGPU: tiers that know the future, on a device of the driver: the rows and counts
// of the host device.
func TestPlannedTiersOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	for i, v := range []variant{
		{name: "helios", set: func(c *plan.Config) {
			c.Policy, c.GPUCache, c.CPUCache = plan.PolicyBelady, percent(10), percent(10)
			c.Superbatch = 2
		}},
		{name: "ginex", set: func(c *plan.Config) {
			c.Mode, c.CPUCache, c.Topology = ginex.ModeGinex, percent(20), plan.TopologyMemory
		}},
		{name: "memory that moves", set: func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Superbatch = ginex.ModeGinex, percent(5), percent(20),
				2
		}},
		{name: "a static cache", set: func(c *plan.Config) {
			c.Mode, c.Policy, c.Hotness = ginex.ModeGinex, plan.PolicyStatic, plan.HotnessOutDegree
			c.GPUCache, c.CPUCache, c.Superbatch = percent(5), percent(20), 2
		}},
	} {
		if wide.Lean() && i == 1 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			cfg := onFibers()
			cfg.NoEval = true
			v.set(&cfg)
			host := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			dev, _ := gpu(t, "")
			g := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
			near(t, host, g)
			for i, h := range host.res.Epochs {
				e := g.res.Epochs[i]
				require.Equal(t, []int64{h.RowsGPU, h.RowsCPU, h.RowsSSD},
					[]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD})
			}
			require.Positive(t, g.res.Epochs[1].RowsGPU+g.res.Epochs[1].RowsCPU)
		})
	}
}

// TestOutOfGPUMemoryWithDynamicTiers: the tier is emptied, gets smaller, and the run goes on at the
// same batch.
func TestOutOfGPUMemoryWithDynamicTiers(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.Mode, cfg.GPUCache, cfg.CPUCache, cfg.Window, cfg.NoEval = dynamic.ModeGIDS, percent(50),
		percent(20), 2, true
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	for i, call := range []string{"cuMemAlloc_v2:2", "cuMemCreate:2", "cuMemAlloc_v2:5"} {
		if i > 0 && wide.Lean() {
			break
		}
		t.Run(call, func(t *testing.T) {
			dev, lib := gpu(t, "mem=268435456")
			var notes []string
			failed := false
			obs := report.Observer{Note: func(s errs.Text) { notes = append(notes, s.String()) },
				Step: func(stage string, done, total int) {
					if stage == "fill cpu cache" && done == total && !failed {
						failed = true
						fakecuda.Control(t, lib, "fail="+call+":2")
					}
				}}
			got := trainOn(t, context.Background(), dev, cfg, d, feat, s, obs)
			near(t, want, got)
			require.Contains(t, strings.Join(notes, "\n"), "out of device memory")
			require.Positive(t, got.res.GPUCacheShrunkBytes)
		})
	}
}

// TestDynamicTierIsMeasured: auto takes what the device has free and leaves what the run needs, its
// staging included.
func TestDynamicTierIsMeasured(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	cfg.Mode, cfg.Epochs, cfg.GPUCacheAuto, cfg.NoEval = dynamic.ModeBaM, 1, true, true
	dev, _ := gpu(t, "mem=268435456")
	r := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.NoError(t, r.err)
	require.EqualValues(t, 16384, r.res.GPUCacheBytes, "whole lines of the features' 19200 bytes")
	require.Zero(t, r.res.GPUCacheShrunkBytes)
	require.Positive(t, r.res.Epochs[0].RowsGPU)
	dev, _ = gpu(t, "mem=268435456,used=260046848")
	r = trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	require.NoError(t, r.err)
	require.Zero(t, r.res.GPUCacheBytes)
	require.Zero(t, r.res.Epochs[0].RowsGPU)
}

// Several GPUs with copies of the model come to the parameters of one: mini-batches and gradients
// go through pinned memory, rows of any type are widened where they train, nothing is left behind.
func TestReplicasOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	open := func(t *testing.T, q int) (all []cuda.Device) {
		first, lib := gpu(t, "devices=4,mem=268435456")
		all = append(all, first)
		for i := 1; i < q; i++ {
			dev, err := driver.Open(driver.Options{Library: lib, Index: i,
				CloseTimeout: 3 * time.Second})
			require.NoError(t, err)
			all = append(all, dev)
		}
		return all
	}
	cfg := onFibers()
	cfg.GPUCache, cfg.CPUCache, cfg.Shards, cfg.Norm = percent(20), percent(20), 4, "batch"
	for _, model := range []string{"sage", "gcn"} {
		if wide.Lean() && model == "gcn" {
			continue
		}
		cfg := cfg
		cfg.Model = model
		want := trainOnAll(t, context.Background(), open(t, 1), cfg, d, s, report.Observer{})
		require.NoError(t, want.err)
		for _, q := range []int{2, 4} {
			if wide.Lean() && q == 2 {
				continue
			}
			c := cfg
			c.Replicas = q
			r := trainOnAll(t, context.Background(), open(t, q), c, d, s, report.Observer{})
			require.NoError(t, r.err)
			require.Len(t, r.res.MoreDevices, q-1)
			require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, "%s, %d GPUs", model, q)
			require.Equal(t, want.res.TestAcc, r.res.TestAcc)
			require.Equal(t, want.res.Epochs[0].Loss, r.res.Epochs[0].Loss)
		}
	}
	s.as(t, d, feat, rowtype.Int8)
	want := trainOnAll(t, context.Background(), open(t, 1), cfg, d, s, report.Observer{})
	require.NoError(t, want.err)
	cfg.Replicas = 2
	r := trainOnAll(t, context.Background(), open(t, 2), cfg, d, s, report.Observer{})
	require.NoError(t, r.err)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
}

// With NCCL in the tree's place parameters are those of the tree but for rounding, the result says
// so, and a library that fails ends the run.
func TestReplicasByNCCL(t *testing.T) {
	d, _, s := fiberRig(t)
	open := func(t *testing.T) (all []cuda.Device) {
		first, lib := gpu(t, "devices=3,mem=268435456")
		all = append(all, first)
		for i := 1; i < 3; i++ {
			dev, err := driver.Open(driver.Options{Library: lib, Index: i})
			require.NoError(t, err)
			all = append(all, dev)
		}
		return all
	}
	path := fakecuda.BuildNCCL(t)
	cfg := onFibers()
	cfg.GPUCache, cfg.CPUCache, cfg.Shards, cfg.Replicas = percent(20), percent(20), 5, 3
	cfg.Norm, cfg.Batch = "batch", 15
	want := trainOnAll(t, context.Background(), open(t), cfg, d, s, report.Observer{})
	require.NoError(t, want.err)
	require.Equal(t, "tree", want.res.Reduce)
	require.Equal(t, 1, want.res.Epochs[0].Batches%5%3, "replicas without a shard")
	cfg.Reduce = path
	devices := open(t)
	fakecuda.Control(t, path, "reset,libcuda="+difftest.Library(t))
	notes := ""
	r := trainOnAll(t, context.Background(), devices, cfg, d, s,
		report.Observer{Note: func(n errs.Text) { notes += n.String() + "\n.String()" }})
	require.NoError(t, r.err)
	require.Contains(t, notes, "gradients by NCCL 2.23.4: parameters may differ")
	require.Equal(t, "NCCL 2.23.4, not bit-exact", r.res.Reduce)
	require.NotEqual(t, "0", fakecuda.Control(t, path, "calls=ncclAllReduce"))
	require.Equal(t, "0", fakecuda.Control(t, path, "comms"))
	for e := range want.res.Epochs {
		require.InDelta(t, want.res.Epochs[e].Loss, r.res.Epochs[e].Loss, 1e-5)
	}
	devices = open(t)
	fakecuda.Control(t, path, "fail=ncclGroupEnd:2")
	r = trainOnAll(t, context.Background(), devices, cfg, d, s, report.Observer{})
	require.ErrorContains(t, r.err, "ncclGroupEnd: unhandled system error")
	cfg.Reduce = "/no/such/libnccl.so"
	r = trainOnAll(t, context.Background(), open(t), cfg, d, s, report.Observer{})
	require.Equal(t, errs.Capability, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "option reduce /no/such/libnccl.so")
}
