package sched

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/ssdmodel"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/static"
)

// The machine chooses by memory, device and SSDs. It gives the reason, and the others' times where
// these matter.
func TestChooseBySituation(t *testing.T) {
	d := large.generate(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: []*gpuio.SSD{{}, {}}}
	roomy := facts{Auto: true, Files: true, Rows: 1 << 20, Free: 1 << 30}
	tight := roomy
	tight.Free = 1 << 20
	gpu, computed := tight, tight
	gpu.GPU, gpu.Files, computed.Files = true, false, false
	lists := roomy
	lists.Lists = roomy.Free
	// Row by row, as the rows of a mini-batch of a larger graph lie.
	packs := func(c *plan.Config) {
		c.SampleEpochs, c.Fanouts, c.CoalesceBytes = 1, []int{3, 2}, -1
	}
	slow, fast, middling := [3]float64{5000, 300, 20}, [3]float64{20, 1e6, 6000},
		[3]float64{20, 50000, 40}
	for _, x := range []struct {
		name      string
		of        facts
		ssd       [3]float64
		epochs    int
		set       func(c *plan.Config)
		mode      string
		reason    string
		predicted bool
	}{
		{"fits", roomy, slow, 1, nil, static.ModeInmem, "fit into the 1 GiB of memory", false},
		{"fits, but not beside the topology", lists, fast, 1, nil, static.ModeCPU, "predicted", true},
		{"fits, but a tier has a size", roomy, fast, 1, func(c *plan.Config) {
			c.CPUCache = percent(10)
		}, static.ModeCPU, "predicted", true},
		{"GPU", gpu, slow, 1, nil, static.ModeHelios, "the GPU reads the SSDs itself", false},
		{"no files", computed, slow, 1, nil, static.ModeHelios, "no files", false},
		{"evaluation", roomy, slow, 1, func(c *plan.Config) { c.Unpacked = true }, static.ModeCPU,
			"there is no GPU", false},
		{"fast SSDs", tight, fast, 1, nil, static.ModeCPU, "predicted", true},
		{"slow SSDs", tight, slow, 1, nil, static.ModeCPU, "diskgnn would pack", true},
		{"one epoch", tight, middling, 1, packs, readsRows, "diskgnn ", true},
		{"fifty epochs", tight, middling, 50, packs, diskgnn.ModeDiskGNN, "cpu ", true},
		{"an option of one mode", roomy, fast, 1, func(c *plan.Config) {
			c.PackedDir = t.TempDir()
		}, diskgnn.ModeDiskGNN, "the options are of no other", false},
	} {
		cfg := largeConfig("")
		cfg.Mode, cfg.Epochs = plan.ModeAuto, x.epochs
		cfg.CPUCache, cfg.GPUCache = units.Budget{}, units.Budget{}
		if x.set != nil {
			x.set(&cfg)
		}
		c, err := chooseOf(t.Context(), cfg, x.of, in, func(context.Context, []*gpuio.SSD,
			int64, int64) (*ssdmodel.Model, error) {
			require.True(t, x.predicted, x.name)
			return ssdOf(x.ssd[0], x.ssd[1], x.ssd[2], int64(d.Meta.RowBytes()))
		}, report.Observer{})
		require.NoError(t, err, x.name)
		t.Logf("%s: %s, as %s; %v", x.name, c.Mode, c.Reason, c.Seconds)
		requireMode(t, x.mode, c)
		require.Contains(t, c.Reason, x.reason, x.name)
		require.Equal(t, x.predicted, c.Seconds != nil, x.name)
		for mode, s := range c.Seconds {
			require.GreaterOrEqual(t, s, c.Seconds[c.Mode]*(1-equallyLong), mode)
		}
	}
}

// readsRows stands for cpu or helios, whichever is faster by a little: neither packs.
const readsRows = "cpu or helios"

func requireMode(t *testing.T, want string, c *plan.Choice) {
	t.Helper()
	if want == readsRows {
		require.Contains(t, []string{static.ModeCPU, static.ModeHelios}, c.Mode, c.Reason)
		return
	}
	require.Equal(t, want, c.Mode, c.Reason)
}

// A run whose mode is chosen has the parameters of the others, alone and in ranks, and goes on in
// another mode where the machine is another.
func TestChosenModesAgree(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	run := func(set func(*plan.Config)) record {
		cfg := small()
		cfg.Mode, cfg.GPUCache, cfg.CPUCache = plan.ModeAuto, units.Budget{}, units.Budget{}
		set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Equal(t, r.res.Mode, r.res.Choice.Mode)
		require.NotEmpty(t, r.res.Choice.Reason)
		return r
	}
	want := train(t, context.Background(), small(), d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	require.Nil(t, want.res.Choice)
	for mode, set := range map[string]func(*plan.Config){
		static.ModeInmem:    func(*plan.Config) {},
		diskgnn.ModeDiskGNN: func(c *plan.Config) { c.PackedDir = t.TempDir() + "/p" },
	} {
		r := run(set)
		require.Equal(t, mode, r.res.Mode)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
	}
	dir := t.TempDir()
	first := run(func(c *plan.Config) { c.Epochs, c.CheckpointDir = 1, dir })
	then := run(func(c *plan.Config) { // as on a machine without room
		c.CPUCache, c.CheckpointDir, c.Resume = percent(10), dir, true
	})
	require.NotEqual(t, first.res.Mode, then.res.Mode)
	require.Equal(t, want.res.ParamsSHA256, then.res.ParamsSHA256)

	cfg := small()
	cfg.Mode, cfg.GPUCache, cfg.CPUCache, cfg.Shards = plan.ModeAuto, units.Budget{},
		units.Budget{}, 2
	bounded := cfg // has another choice by itself
	bounded.CPUCache = percent(10)
	res, failed := trainRanks(t, context.Background(), d, bounded, cfg)
	for r, err := range failed {
		require.NoError(t, err, "rank %d", r)
		require.Contains(t, []string{static.ModeCPU, static.ModeHelios}, res[r].Mode)
		require.Equal(t, res[0].Choice, res[r].Choice)
		require.Equal(t, res[0].ParamsSHA256, res[r].ParamsSHA256)
	}
	given := cfg
	given.Mode = static.ModeCPU
	_, failed = trainRanks(t, context.Background(), d, given, cfg)
	for _, err := range failed {
		require.ErrorContains(t, err, "give all ranks the same options")
	}
}

// A GPU has the mode whose SSDs it reads itself.
func TestChooseOnGPU(t *testing.T) {
	d, _ := fibers.open(t)
	dev, _ := gpu(t, "")
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	cfg := plan.Config{Mode: plan.ModeAuto, Fanouts: []int{2}, CPUCache: percent(10)}
	cfg, err := Choose(t.Context(), cfg, prepare.Inputs{Dev: dev, Dataset: d}, report.Observer{})
	require.NoError(t, err)
	require.Equal(t, static.ModeHelios, cfg.Mode)
	require.Contains(t, cfg.Chosen.Reason, "GPU")
}

// A file is measured, and one that is not there is named.
func TestMeasureSSDs(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 2, "")
	m, err := measureSSDs(t.Context(), s.ssds, d.Meta.Nodes, 512)
	require.NoError(t, err)
	require.Positive(t, m.Read.Latency.Quantiles[0].US)
	_, err = measureSSDs(t.Context(), []*gpuio.SSD{{BackingPath: "/none"}}, 1, 512)
	require.ErrorContains(t, err, "/none")
	require.Equal(t, errs.Device, errs.ClassOf(err))
}

// Packed mini-batches go into the dataset's folder, so its disk counts where it is another than the
// SSDs'.
func TestChooseByTheFoldersDisk(t *testing.T) {
	d := large.generate(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	cfg := largeConfig("")
	cfg.Mode, cfg.Epochs, cfg.SampleEpochs, cfg.Fanouts = plan.ModeAuto, 50, 1, []int{3, 2}
	cfg.CPUCache, cfg.GPUCache = units.Budget{}, units.Budget{}
	tight := facts{Auto: true, Files: true, Rows: 1 << 20, Free: 1 << 20}
	for _, x := range []struct {
		ssd  string
		slow bool
		mode string
	}{
		{"/proc/self/stat", false, diskgnn.ModeDiskGNN},
		{"/proc/self/stat", true, readsRows},
		{d.Dir() + "/dataset.yaml", true, diskgnn.ModeDiskGNN},
	} {
		in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: []*gpuio.SSD{{BackingPath: x.ssd}}}
		c, err := chooseOf(t.Context(), cfg, tight, in, func(_ context.Context, s []*gpuio.SSD,
			_, row int64) (*ssdmodel.Model, error) {
			if x.slow && s[0] != in.SSDs[0] {
				return ssdOf(20000, 50, 0.5, row)
			}
			return ssdOf(20, 50000, 40, row)
		}, report.Observer{})
		require.NoError(t, err)
		requireMode(t, x.mode, c)
	}
	// Mini-batches that are there are of other settings, or in use: they would be refused.
	require.NoError(t, os.Mkdir(d.Dir()+"/packed", 0o755))
	require.NoError(t, os.WriteFile(d.Dir()+"/packed/packs.json", nil, 0o600))
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: []*gpuio.SSD{{}}}
	c, err := chooseOf(t.Context(), cfg, tight, in, func(context.Context, []*gpuio.SSD, int64,
		int64) (*ssdmodel.Model, error) {
		return ssdOf(20, 50000, 40, int64(d.Meta.RowBytes()))
	}, report.Observer{})
	require.NoError(t, err)
	requireMode(t, readsRows, c)
	require.Contains(t, c.Reason, "diskgnn is left out")
	require.NotContains(t, c.Seconds, diskgnn.ModeDiskGNN)
}

// Options of a mode whose CPU reads files are refused where there are none.
func TestChooseWithoutFiles(t *testing.T) {
	cfg := plan.Config{Mode: plan.ModeAuto, Fanouts: []int{2}}
	cfg.PackedDir = t.TempDir()
	_, err := chooseOf(t.Context(), cfg, facts{Auto: true}, prepare.Inputs{}, nil,
		report.Observer{})
	require.ErrorContains(t, err, "diskgnn, where the CPU reads files")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
}

// Ranks on one machine have a part of its memory each.
func TestFactsOfRanks(t *testing.T) {
	got, err := joinFacts(facts{Auto: true}, 0, []facts{
		{Auto: true, GPU: true, Files: true, Free: 100, Boot: "a"},
		{Auto: true, GPU: true, Files: true, Free: 90, Boot: "b"},
		{Auto: true, Files: true, Free: 120, Boot: "a"}})
	require.NoError(t, err)
	require.Equal(t, facts{Auto: true, Files: true, Free: 50}, got)
	_, err = joinFacts(facts{Auto: true}, 0, []facts{{Auto: true}, {}})
	require.ErrorContains(t, err, "rank 1 and rank 0")
}

// An option of a mode that is not chosen from is refused as the default mode refuses it.
func TestChooseRefuses(t *testing.T) {
	cfg := plan.Config{Mode: plan.ModeAuto, Fanouts: []int{2}}
	cfg.Superbatch = 3
	_, err := accepting(cfg)
	require.ErrorContains(t, err, "use option policy belady")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}
