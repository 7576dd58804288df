package sched

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/ssdmodel"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/static"
)

// The choice of a mode. All candidates give the same parameters, to the bit, so only time matters:
//
//  1. Rows that fit into memory are there before the first mini-batch (inmem), unless an option
//     sizes a tier or names a part of the way that rows take.
//  2. A GPU reads the SSDs itself (helios). So does the host device where SSDs have no files.
//  3. Else the planner predicts the whole run of each other candidate, preparation included, on
//     this machine: its cores, and its SSDs' rate, which is measured in a tenth of a second. Packed
//     mini-batches (diskgnn) are chosen only where that repays their packing within the run.
//
// A candidate that refuses the options is none. So an option of one mode alone chooses that mode,
// and one of a mode that is no candidate is refused as the default mode refuses it.

// candidates are the modes that may be chosen. Of those that take equally long the first is.
var candidates = []string{static.ModeInmem, static.ModeCPU, static.ModeHelios, diskgnn.ModeDiskGNN}

// equallyLong is the share by which times may differ that count as equal.
const equallyLong = 0.02

// memoryPart is the share of the free memory that all rows may take: the rest is for mini-batches,
// the topology and other programs.
const memoryPart = 0.75

// facts decide the choice. Those of ranks are joined, as the choice is for all.
type facts struct {
	Auto  bool  // the mode is to be chosen
	GPU   bool  // the device is one
	Files bool  // the CPU can read each SSD
	Rows  int64 // bytes of all rows
	Lists int64 // bytes of the neighbour lists, which stay in memory beside the rows
	Free  int64 // memory for this process
	// Boot is the identity of the running kernel: ranks that share it share its memory.
	Boot string
}

// factsOf finds the facts of this process.
func factsOf(cfg *plan.Config, in *prepare.Inputs) (f facts, err error) {
	m := in.Dataset.Meta
	f = facts{Auto: cfg.Mode == plan.ModeAuto, GPU: in.Dev.Info().Backend != "host",
		Files: len(in.SSDs) > 0 && !slices.ContainsFunc(in.SSDs,
			func(d *gpuio.SSD) bool { return d.BackingPath == "" }),
		Rows: m.Rows() * int64(m.RowBytes())}
	g := m.Graph()
	for _, r := range g.Relations {
		f.Lists += (g.NodeTypes[g.TypeOf(r.Dst)].Nodes+1)*8 + r.Edges*4
	}
	if boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		f.Boot = strings.TrimSpace(string(boot))
	}
	f.Free, err = hostmem.AvailableBytes()
	return f, err
}

// Choose gives cfg the mode that is fastest here, where its mode is plan.ModeAuto. All ranks get
// the same.
func Choose(ctx context.Context, cfg plan.Config, in prepare.Inputs, obs report.Observer) (
	plan.Config, error) {
	f, err := factsOf(&cfg, &in)
	if err != nil || !f.Auto && in.Group == nil {
		return cfg, err
	}
	if f, err = joined(ctx, f, &in); err != nil || !f.Auto {
		return cfg, err
	}
	var c *plan.Choice
	if in.Group == nil || in.Group.Rank() == 0 {
		c, err = chooseOf(ctx, cfg, f, in, measureSSDs, obs)
	}
	if err == nil && in.Group != nil {
		c, err = ofRank0(ctx, c, &in)
	}
	if err != nil {
		return cfg, err
	}
	cfg.Mode, cfg.Chosen = c.Mode, c
	return cfg, nil
}

// Check refuses options that the mode does not take; where the mode is plan.ModeAuto, those that no
// mode takes that may be chosen.
func Check(cfg plan.Config) error {
	if cfg.Mode != plan.ModeAuto {
		return cfg.Check()
	}
	_, err := accepting(cfg)
	return err
}

// settled chooses the mode and fills the configuration in, for a device.
func settled(ctx context.Context, cfg plan.Config, in prepare.Inputs, obs report.Observer) (
	plan.Config, error) {
	cfg, err := Choose(ctx, cfg, in, obs)
	if err == nil {
		cfg, err = cfg.Filled()
	}
	if err != nil {
		return cfg, err
	}
	return cfg.OnDevice(in.Dev.Info())
}

// tellChoice reports the chosen mode and its reason.
func tellChoice(cfg *plan.Config, obs report.Observer) {
	if c := cfg.Chosen; c != nil {
		obs.TellNote("{mode} auto: %s, as %s", c.Mode, c.Reason)
	}
}

// joined joins the facts of all ranks.
func joined(ctx context.Context, f facts, in *prepare.Inputs) (facts, error) {
	if in.Group == nil {
		return f, nil
	}
	b, err := json.Marshal(f)
	if err != nil {
		return f, err
	}
	all, err := in.Group.AllGather(ctx, b)
	if err != nil {
		return f, err
	}
	of := make([]facts, len(all))
	for r, b := range all {
		if err := json.Unmarshal(b, &of[r]); err != nil {
			return f, fmt.Errorf("rank %d: facts: %w", r, err)
		}
	}
	return joinFacts(f, in.Group.Rank(), of)
}

// joinFacts joins the facts of all ranks to those of rank own, f. Each rank keeps rows of its own,
// so ranks on one machine share its memory.
func joinFacts(f facts, own int, all []facts) (facts, error) {
	together := map[string]int64{}
	for _, x := range all {
		together[x.Boot]++
	}
	f.GPU, f.Files, f.Free = true, true, math.MaxInt64
	for r, x := range all {
		if x.Auto != f.Auto {
			return f, errs.New(errs.Usage,
				"{mode} is auto on some ranks, but rank %d and rank %d differ; give all ranks the same options",
				r, own)
		}
		f.GPU, f.Files = f.GPU && x.GPU, f.Files && x.Files
		f.Free = min(f.Free, x.Free/together[x.Boot])
	}
	return f, nil
}

// ofRank0 gives all ranks the choice of rank 0.
func ofRank0(ctx context.Context, c *plan.Choice, in *prepare.Inputs) (*plan.Choice, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	all, err := in.Group.AllGather(ctx, b)
	if err != nil {
		return nil, err
	}
	c = new(plan.Choice)
	return c, json.Unmarshal(all[0], c)
}

// ssdMeter finds the model of the slowest of SSDs that hold so many rows of so many bytes.
type ssdMeter func(ctx context.Context, ssds []*gpuio.SSD, rows, rowBytes int64) (*ssdmodel.Model,
	error)

// chooseOf chooses by facts; measure finds the model of the slowest SSD where that matters.
func chooseOf(ctx context.Context, cfg plan.Config, f facts, in prepare.Inputs,
	measure ssdMeter, obs report.Observer) (*plan.Choice, error) {
	all, err := accepting(cfg)
	if err != nil {
		return nil, err
	}
	if !f.Files {
		by := all
		if all = readingNoFiles(all); len(all) == 0 {
			return nil, errs.New(errs.Capability,
				"the options are for {mode} %s, where the CPU reads files, and the SSDs have none; leave these options out, or bind files with {proxy}",
				strings.Join(by, " or "))
		}
	}
	has := func(mode string) bool { return slices.Contains(all, mode) }
	switch fits := float64(f.Rows+f.Lists) <= memoryPart*float64(f.Free); {
	case len(all) == 1:
		return &plan.Choice{Mode: all[0], Reason: "the options are of no other"}, nil
	case has(static.ModeInmem) && fits && !cfg.Unpacked && !namesParts(&cfg):
		return &plan.Choice{Mode: static.ModeInmem, Reason: fmt.Sprintf(
			"all rows, %s, fit into the %s of memory that are free", units.FormatBytes(f.Rows),
			units.FormatBytes(f.Free))}, nil
	case has(static.ModeHelios) && f.GPU:
		return &plan.Choice{Mode: static.ModeHelios, Reason: "the GPU reads the SSDs itself"}, nil
	case has(static.ModeHelios) && !f.Files:
		return &plan.Choice{Mode: static.ModeHelios,
			Reason: "there are no files through which the CPU could read the SSDs"}, nil
	case has(static.ModeCPU) && cfg.Unpacked:
		return &plan.Choice{Mode: static.ModeCPU,
			Reason: "there is no GPU that could read the SSDs"}, nil
	case has(static.ModeCPU) && in.Dataset != nil && !in.Dataset.Meta.Homogeneous():
		return &plan.Choice{Mode: static.ModeCPU,
			Reason: "there is no GPU, and no model of runs over typed graphs"}, nil
	}
	all = slices.DeleteFunc(all, func(m string) bool { return m == static.ModeInmem })
	seconds, why, err := predict(ctx, cfg, in, all, measure, obs)
	if err != nil {
		return nil, err
	}
	return fastest(all, seconds, why), nil
}

// readingNoFiles returns those of modes that need no files behind the SSDs.
func readingNoFiles(modes []string) (all []string) {
	for _, m := range modes {
		if m != static.ModeCPU && m != diskgnn.ModeDiskGNN {
			all = append(all, m)
		}
	}
	return all
}

// namesParts reports whether options size a tier or name a part of the way that rows take.
func namesParts(c *plan.Config) bool {
	none := units.Budget{}
	return c.GPUCache != none || c.GPUCacheAuto || c.CPUCache != none || c.Policy != "" ||
		c.IOStack != "" || c.HotnessAsked() || c.Topology == plan.TopologySSD
}

// accepting returns the candidates that accept the options, or the default mode's refusal.
func accepting(cfg plan.Config) (all []string, err error) {
	for _, mode := range candidates {
		c := cfg
		c.Mode = mode
		if refused := c.Check(); refused == nil {
			all = append(all, mode)
		} else if mode == plan.DefaultMode {
			err = refused
		}
	}
	if len(all) > 0 {
		err = nil
	}
	return all, err
}

// predict returns the seconds of the whole run in each mode that can be predicted; why has the
// reasons of the others.
func predict(ctx context.Context, cfg plan.Config, in prepare.Inputs, modes []string,
	measure ssdMeter, obs report.Observer) (seconds map[string]float64, why []string, err error) {
	m := in.Dataset.Meta
	profile, err := profileHere(in.Dev.Info().Kernels)
	if err != nil {
		return nil, nil, err
	}
	ssds := in.SSDs // by stripe, where the dataset is found: each is a part of the reads
	if !slices.ContainsFunc(ssds, func(d *gpuio.SSD) bool { return d.Ctrl == nil }) {
		if _, stripes, err := stripe.Attach(ctx, in.Dataset, ssds); err == nil {
			ssds = stripes
		}
	}
	if profile.SSDs.Measured, err = measure(ctx, ssds, m.Nodes,
		int64(m.RowBytes())); err != nil {
		return nil, nil, err
	}
	train, err := in.Dataset.Split("train")
	if err != nil {
		return nil, nil, err
	}
	cfg.Timeline, cfg.OnBatch, cfg.OnRows = nil, nil, nil
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery, cfg.Tune = "", false, 0, ""
	p, err := planner.New(planner.Options{Config: cfg, Inputs: in, RowType: m.RowType(),
		Hardware: cost.Hardware{Profile: profile, SSDs: max(len(ssds), 1)},
		Graph: planner.Graph{Name: m.Name, Nodes: m.Nodes, Edges: m.Edges, Dim: m.Dim,
			Classes: max(m.Classes, 1), Train: float64(len(train)) / float64(max(m.Nodes, 1))},
		Find: tiers.Prediction}, obs)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		err = errors.Join(err, p.Close())
		p = nil
		debug.FreeOSMemory() // the run needs it
	}()
	seconds = map[string]float64{}
	for _, mode := range modes {
		o, missing, err := packsInto(ctx, profile, cfg, mode, &in, measure)
		if err != nil {
			return nil, nil, err
		}
		if missing != "" {
			why = append(why, missing)
			continue
		}
		x, err := p.Plan(ctx, func(to *planner.Options) {
			to.Config.Mode, to.Hardware.Profile = mode, o
		})
		if class := errs.ClassOf(err); class == errs.Usage || class == errs.Capability {
			why = append(why, mode+" can't be predicted with these options")
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if missing := lacksDisk(x, cfg, mode, &in); missing != "" {
			why = append(why, missing)
			continue
		}
		before := x.Preparation.Sum() - x.Preparation.Load // the rows are there
		seconds[mode] = before + float64(max(cfg.Epochs, 1))*x.Seconds
	}
	return seconds, why, nil
}

// packsInto returns the profile for a mode. One that packs into the dataset's folder reads that
// disk, which is measured where it is another than the SSDs'. missing is why it can't pack there.
func packsInto(ctx context.Context, profile *hardware.Profile, cfg plan.Config, mode string,
	in *prepare.Inputs, measure ssdMeter) (_ *hardware.Profile, missing string, err error) {
	cfg.Mode = mode
	c := cfg.WithDefaults()
	if !c.Traits().Writes || c.PagesOn != plan.PagesFolder || c.PackedDir != "" {
		return profile, "", nil
	}
	dir := in.Dataset.Dir()
	if err := unix.Access(dir, unix.W_OK); err != nil {
		return nil, fmt.Sprintf("%s can't pack into folder %s (%v)", mode, dir, err), nil
	}
	// Mini-batches of other settings would be refused, and those of another process.
	if packed := c.PackedFolder(dir); !emptyFolder(packed) {
		return nil, fmt.Sprintf("%s is left out, as folder %s holds something already", mode,
			packed), nil
	}
	var at unix.Stat_t
	if err := unix.Stat(dir, &at); err != nil {
		return nil, "", errs.New(errs.Device, "folder %s: %w", dir, err)
	}
	if !slices.ContainsFunc(in.SSDs, func(d *gpuio.SSD) bool {
		var s unix.Stat_t
		return unix.Stat(d.BackingPath, &s) != nil || s.Dev != at.Dev
	}) {
		return profile, "", nil
	}
	path, size := largestFile(dir)
	rowBytes := int64(in.Dataset.Meta.RowBytes())
	folder := *profile
	folder.SSDs.Measured, err = measure(ctx, []*gpuio.SSD{{BackingPath: path}}, size/rowBytes,
		rowBytes)
	return &folder, "", err
}

// emptyFolder reports whether a folder has nothing in it, or is not there.
func emptyFolder(dir string) bool {
	files, err := os.ReadDir(dir)
	return len(files) == 0 && (err == nil || errors.Is(err, fs.ErrNotExist))
}

// largestFile returns the largest file of a folder.
func largestFile(dir string) (path string, size int64) {
	files, _ := os.ReadDir(dir) // the file is measured, which fails where there is none
	for _, f := range files {
		if i, err := f.Info(); err == nil && i.Mode().IsRegular() && i.Size() > size {
			path, size = filepath.Join(dir, f.Name()), i.Size()
		}
	}
	return path, size
}

// lacksDisk gives the reason that a plan's packed mini-batches have no room; "": they have.
func lacksDisk(x *planner.Plan, cfg plan.Config, mode string, in *prepare.Inputs) string {
	packed := x.Disk["packed"]
	if packed == 0 {
		return ""
	}
	cfg.Mode = mode
	c := cfg.WithDefaults()
	room := c.DiskBudget.Of(in.Dataset.Meta.Nodes * int64(in.Dataset.Meta.RowBytes()))
	var s unix.Statfs_t
	if err := unix.Statfs(in.Dataset.Dir(), &s); err == nil && c.PagesOn == plan.PagesFolder {
		room = min(room, int64(s.Bavail)*int64(s.Bsize)/2)
	}
	if packed <= room {
		return ""
	}
	return fmt.Sprintf("%s would pack %s where it may take %s", mode, units.FormatBytes(packed),
		units.FormatBytes(room))
}

// fastest chooses the mode of the least time. Of modes that nothing is known of it is the first.
func fastest(modes []string, seconds map[string]float64, why []string) *plan.Choice {
	c := &plan.Choice{Mode: modes[0], Seconds: seconds}
	var known []string
	least := 0.0
	for _, m := range modes {
		if t, ok := seconds[m]; ok {
			known = append(known, fmt.Sprintf("%s %.3g s", m, t))
			if least == 0 || t < least*(1-equallyLong) {
				c.Mode, least = m, t
			}
		}
	}
	c.Reason = "the run is predicted to take " + strings.Join(known, ", ")
	if len(known) == 0 {
		c.Reason, c.Seconds = "no mode's time can be predicted", nil
	}
	c.Reason = strings.Join(append([]string{c.Reason}, why...), "; ")
	return c
}

// gflops are the billions of operations a second of a core in products, by level of the kernels,
// as measured on an EPYC. A prediction needs them within a factor, to compare modes.
var gflops = map[string]float64{"avx512": 90, "avx2": 50, "generic": 13}

// profileHere is profile host with this machine's cores and kernels.
func profileHere(kernels string) (*hardware.Profile, error) {
	p, err := hardware.Load("host")
	if err != nil {
		return nil, err
	}
	cores := float64(hostcpu.Count())
	for _, f := range []*hardware.Figure{&p.GPU.SMs, &p.GPU.WarpSlots, &p.CPU.Cores} {
		f.Value = cores
	}
	rate := cores * cmp.Or(gflops[kernels], gflops["generic"]) / 1e3
	p.GPU.FP32TFLOPS.Value, p.GPU.TensorTFLOPS.Value = rate, rate
	return p, nil
}

// How SSDs are measured.
const (
	measureTime    = 30 * time.Millisecond // for each of three figures of an SSD
	measureThreads = 32
	measureLong    = 256 << 10 // bytes of a long read
	measureAlign   = 4096
)

// measureSSDs models the slowest of the stripes' SSDs by short measurements of the files behind
// them, where the rows are: holes of a file would be read in no time.
func measureSSDs(ctx context.Context, ssds []*gpuio.SSD, rows, rowBytes int64) (*ssdmodel.Model,
	error) {
	extent := rows / int64(len(ssds)) * rowBytes
	var slowest [3]float64 // rows a second by one thread and by many, long reads a second by many
	for i, d := range ssds {
		row := (rowBytes + measureAlign - 1) / measureAlign * measureAlign
		for k, way := range []struct {
			threads int
			bytes   int64
		}{{1, row}, {measureThreads, row}, {measureThreads, measureLong}} {
			rate, err := readRate(ctx, d.BackingPath, extent, way.threads, way.bytes)
			if err != nil {
				return nil, err
			}
			if k > 0 { // the SSD's stripes share them
				rate /= float64(gpuio.StripesOn(ssds, d))
			}
			if i == 0 || rate < slowest[k] {
				slowest[k] = rate
			}
		}
	}
	return ssdOf(1e6/slowest[0], slowest[1], slowest[2]*measureLong/1e6, rowBytes)
}

// ssdOf is an SSD that is as fast for rows of that size. It is taken to write as it reads.
func ssdOf(latencyUS, iops, mbs float64, rowBytes int64) (*ssdmodel.Model, error) {
	ops := fmt.Sprintf(`
  latency: {quantiles: [{q: 1, us: %g}], source: measured}
  iops: {caps: [{bytes: %d, iops: %g}], source: measured}
  bandwidth: {mb_s: %g, source: measured}`, latencyUS, rowBytes, iops, mbs)
	return ssdmodel.Parse([]byte("name: measured\ntitle: measured\nread:" + ops + "\nwrite:" + ops +
		"\nflush:\n  latency: {quantiles: [{q: 1, us: 500}], source: assumed}\n"))
}

// readRate returns the reads a second of random pieces of a file's first bytes, around the page
// cache where that is possible.
func readRate(ctx context.Context, path string, extent int64, threads int, bytes int64) (float64,
	error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) {
		f, err = os.Open(path)
	}
	if err != nil {
		return 0, errs.New(errs.Device, "measuring an SSD: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	size, err := f.Seek(0, 2)
	if err != nil {
		return 0, errs.New(errs.Device, "measuring an SSD: %w", err)
	}
	pieces := max((min(size, extent)-bytes)/measureAlign, 1)
	var n atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range threads {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), uint64(bytes))) //nolint:gosec // no secrets
			mem, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_PRIVATE|unix.MAP_ANON)
			for err == nil && ctx.Err() == nil && time.Since(begin) < measureTime {
				_, err = unix.Pread(int(f.Fd()), mem, r.Int64N(pieces)*measureAlign)
				n.Add(1)
			}
			if err != nil {
				failed.Store(&err)
			}
			if mem != nil {
				_ = unix.Munmap(mem)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return 0, errs.New(errs.Device, "measuring SSD file %s: %w", path, *err)
	}
	if stopped := prepare.Interrupted(ctx); stopped != nil {
		return 0, stopped
	}
	return float64(max(n.Load(), 1)) / time.Since(begin).Seconds(), nil
}
