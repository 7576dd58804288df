package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/state"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched"
)

var datasetFlag = &cli.StringFlag{Name: "dataset", Usage: "dataset `DIR`; may also be given as an argument"}

// modelFlags decide what is computed.
func modelFlags() []cli.Flag {
	return []cli.Flag{
		oneOf("model", "model", gnn.DefaultArch, gnn.Archs(), nil),
		&cli.StringFlag{Name: "fanout", Value: "10,10", Usage: "neighbours sampled per hop `F1,F2,…`, the seeds' first; -1 takes all; one layer per hop"},
		&cli.IntFlag{Name: "batch-size", Value: 1024, Usage: "seed nodes in a mini-batch"},
		&cli.IntFlag{Name: "hidden", Value: 128, Usage: "width of the hidden layers"},
		&cli.IntFlag{Name: "epochs", Value: 1, Usage: "passes over the training nodes"},
		&cli.Float64Flag{Name: "lr", Value: 0.003, Usage: "Adam's learning rate"},
		&cli.Float64Flag{Name: "dropout", Usage: "share of the hidden activations that training drops"},
		&cli.Float64Flag{Name: "feature-dropout", Usage: "share of the input features that training drops"},
		&cli.Float64Flag{Name: "weight-decay", Usage: "L2 penalty"},
		&cli.IntFlag{Name: "heads", DefaultText: "8", Usage: "attention heads of each layer (model gat), which share --hidden; the last layer takes their mean"},
		&cli.Float64Flag{Name: "attention-dropout", Usage: "share of the attention that training drops (model gat)"},
		&cli.BoolFlag{Name: "learn-eps", Usage: "learn the weight of a node in its own sum (model gin), else 1"},
		&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of all random choices; equal seeds give equal parameters in every mode"},
		&cli.BoolFlag{Name: "no-edges", Usage: "drop the graph's edges: what the model learns from a node's own features"},
		samplerFlag(sched.SamplerNeighbor),
	}
}

// pathFlags decide how the rows come, which never changes a result, and by which instructions is computed (--kernels),
// which rounds otherwise where it is generic.
func pathFlags() []cli.Flag {
	return append([]cli.Flag{
		oneOf("mode", "data path", sched.ModeHelios, sched.Modes, laterModes),
		oneOf("io-stack", "who reads the SSDs (default: by mode)", "", sched.Stacks, nil),
		oneOf("pipeline", "what overlaps (default: by mode)", "", sched.Pipelines, nil),
		&cli.StringFlag{Name: "gpu-cache", DefaultText: "auto in helios, inmem, bam and gids, else 0", Usage: "`BUDGET` of the device memory tier, as 256MiB or as a share of the features; auto: on a GPU what is free there less what the run needs, measured; 5% on the host device"},
		&cli.StringFlag{Name: "cpu-cache", DefaultText: "10% in helios, cpu and gids, else 0", Usage: "`BUDGET` of the CPU memory tier"},
		&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "worker slots of the host device, and threads of the cpu stack"},
		&cli.IntFlag{Name: "io-blocks", DefaultText: "32; sync: a full grid", Usage: "thread blocks of each I/O kernel"},
		&cli.IntFlag{Name: "depth", DefaultText: "256", Usage: "reads in flight per SSD"},
		&cli.IntFlag{Name: "prefetch-depth", DefaultText: "2", Usage: "mini-batches prepared ahead"},
		&cli.IntFlag{Name: "presample-epochs", DefaultText: "4", Usage: "epochs sampled beforehand to find the hottest rows (--hotness presample)"},
		&cli.DurationFlag{Name: "read-timeout", DefaultText: "the stack's", Usage: "`TIME` after which a read is aborted and tried again"},
		&cli.IntFlag{Name: "read-retries", DefaultText: "the stack's", Usage: "how often a failed read is tried again; -1 for never"},
		&cli.StringFlag{Name: "on-ssd-failure", Value: "retry=3", Usage: "when an SSD hangs or fails and new queues did not help: \"stop\", or \"retry=N\": reset its controller up to N times in the run, then stop"},
		&cli.StringFlag{Name: "coalesce", Value: "auto", Usage: "one command for rows on equal and adjacent LBAs (async and cpu stacks): auto, off, or up to `SIZE` a command"},
		&cli.BoolFlag{Name: "check-reads", Usage: "hold every row that is read against the checksum that load has written; read it again, then stop, where they differ"},
		&cli.BoolFlag{Name: "verify-rows", Usage: "hold every row that a mini-batch has gathered, from wherever, against the dataset's feature function (generate --feature-fn); stop at the first wrong one"},
		&cli.StringFlag{Name: "row-dtype", DefaultText: "whatever is there", Usage: "stop unless the SSDs hold rows of `TYPE` (" + strings.Join(rowtype.Names(), ", ") + "; load --row-dtype makes them); with --clock virtual, the type they are taken to have"},
		&cli.StringFlag{Name: "timeline", Usage: "write what each operator of each mini-batch did when to `FILE`, a Chrome trace (open it in ui.perfetto.dev)"},
		oneOf("cpu-engine", "how the cpu stack reads (default: the best there is)", "", []string{"io_uring", "pread"}, nil),
		&cli.StringFlag{Name: "sm-budget", DefaultText: "all; on a GPU io has as many SMs as hold the blocks of --io-blocks", Usage: "most thread blocks at once per operator `OP=N,…` (sample, lookup, io, gather, train); on a GPU SMs, in steps of its green contexts, where the driver has them"},
		oneOf("memory-rung", "where the I/O kernels' queues and data are on a GPU; auto takes the best that a pattern read both ways proves", gpuio.RungAuto, append([]string{gpuio.RungAuto}, gpuio.Rungs()...), nil),
		oneOf("precision", "of the model's products on a GPU (tf32 and bf16 round their factors, on tensor cores)", cuda.FP32.String(), cuda.Precisions(), nil),
		&cli.StringFlag{Name: "blas", Value: sched.BLASOff, Usage: "who computes products on a GPU: off (our kernels), auto (cuBLAS where it is installed) or the `PATH` of libcublas"},
		deviceFlag(), kernelsFlag(),
	}, append(tierFlags(), ssdFlags()...)...)
}

// laterModes are those of DESIGN section 10 that this version does not have.
var laterModes = func() map[string]error {
	m := map[string]error{}
	for _, name := range []string{"ginex", "diskgnn", "hier", "marius"} {
		m[name] = errs.New(errs.Capability, "--mode %s is not in this version yet; choose one of %s", name, strings.Join(sched.Modes, ", "))
	}
	return m
}()

func trainCommand() *cli.Command {
	c := &cli.Command{
		Name:      "train",
		Usage:     "train a model, its features read from the SSDs",
		ArgsUsage: "[DATASET]",
		Flags:     append([]cli.Flag{datasetFlag}, modelFlags()...),
		Action:    action(1, runTrain),
	}
	c.Flags = append(c.Flags, pathFlags()...)
	c.Flags = append(c.Flags, clockFlags()...)
	c.Flags = append(c.Flags,
		&cli.StringFlag{Name: "checkpoint", Usage: "`DIR` for the checkpoint, written after each epoch and on Ctrl-C"},
		&cli.IntFlag{Name: "checkpoint-every", Usage: "also write it after every `N` mini-batches"},
		&cli.BoolFlag{Name: "resume", Usage: "go on from the checkpoint in --checkpoint, to the bit where --kernels is as it was; start where there is none"},
		&cli.BoolFlag{Name: "no-eval", Usage: "skip validation and test"},
		oneOf("tune", "measure the first mini-batches under other depths, SM budgets and accumulator targets, and keep the best: it never changes a result", sched.TuneOff, sched.Tunes, nil),
		&cli.StringFlag{Name: "trace", Usage: "record which rows each mini-batch needs in `FILE`, for \"cache replay\" and \"cache plan\""},
		&cli.BoolFlag{Name: "explain", Usage: "print the operators, what each waits for, their streams, budgets and credits, before training"},
		resultsFlag(), overwriteFlag(),
	)
	return c
}

// trainConfig reads the flags of train.
func (e *env) trainConfig() (sched.Config, error) {
	c := e.c
	cfg, err := e.dataPath()
	if err != nil {
		return cfg, err
	}
	if err := e.notZero("batch-size", "hidden", "epochs", "lr", "heads"); err != nil {
		return cfg, err
	}
	cfg.Model, cfg.Batch, cfg.Hidden, cfg.Epochs = c.String("model"), c.Int("batch-size"), c.Int("hidden"), c.Int("epochs")
	cfg.LR, cfg.Dropout, cfg.WeightDecay, cfg.Seed = c.Float64("lr"), c.Float64("dropout"), c.Float64("weight-decay"), c.Uint64("seed")
	cfg.FeatureDropout, cfg.LearnEps = c.Float64("feature-dropout"), c.Bool("learn-eps")
	cfg.Heads, cfg.AttentionDropout = c.Int("heads"), c.Float64("attention-dropout")
	cfg.CheckpointDir, cfg.CheckpointEvery = c.String("checkpoint"), c.Int("checkpoint-every")
	cfg.Resume, cfg.NoEval = c.Bool("resume"), c.Bool("no-eval")
	cfg.Tune, cfg.Trace, cfg.Overwrite = c.String("tune"), c.String("trace"), c.Bool("overwrite")
	if cfg.CheckpointEvery > 0 && cfg.CheckpointDir == "" {
		return cfg, errs.New(errs.Usage, "--checkpoint-every needs --checkpoint DIR, the folder to write to")
	}
	if cfg.Fanouts, err = units.ParseInts(c.String("fanout"), -1); err != nil {
		return cfg, errs.New(errs.Usage, "--fanout: %w", err)
	}
	return cfg, nil
}

// dataPath reads pathFlags.
func (e *env) dataPath() (sched.Config, error) {
	c := e.c
	cfg := sched.Config{
		Mode: c.String("mode"), IOStack: c.String("io-stack"), Pipeline: c.String("pipeline"),
		Depth: c.Int("prefetch-depth"), Presample: c.Int("presample-epochs"), Workers: c.Int("workers"),
		Blocks: c.Int("io-blocks"), QueueDepth: c.Int("depth"),
		ReadTimeout: c.Duration("read-timeout"), ReadRetries: c.Int("read-retries"), CPUEngine: c.String("cpu-engine"), CheckReads: c.Bool("check-reads"),
		VerifyRows: c.Bool("verify-rows"),
	}
	if err := e.notZero("prefetch-depth", "presample-epochs", "workers", "io-blocks", "depth"); err != nil {
		return cfg, err
	}
	if cfg.QueueDepth < 0 || cfg.QueueDepth > 65535 {
		return cfg, errs.New(errs.Usage, "--depth %d is not between 1 and 65535", cfg.QueueDepth)
	}
	if c.IsSet("read-timeout") && cfg.ReadTimeout < time.Millisecond {
		return cfg, errs.New(errs.Usage, "--read-timeout %s is below 1ms", cfg.ReadTimeout)
	}
	if cfg.ReadRetries < -1 {
		return cfg, errs.New(errs.Usage, "--read-retries %d is below -1 (never)", cfg.ReadRetries)
	}
	if c.IsSet("read-retries") && cfg.ReadRetries == 0 {
		cfg.ReadRetries = -1 // the library takes 0 for its default
	}
	cfg.RowType = c.String("row-dtype")
	var err error
	if cfg.ReadResets, err = resetsFlag(c.String("on-ssd-failure")); err != nil {
		return cfg, err
	}
	if cfg.CoalesceBytes, err = coalesceFlag(c.String("coalesce")); err != nil {
		return cfg, err
	}
	tiered := slices.Contains([]string{sched.ModeHelios, sched.ModeInmem, sched.ModeBaM, sched.ModeGIDS}, cfg.Mode)
	if v := c.String("gpu-cache"); v == "auto" || tiered && !c.IsSet("gpu-cache") {
		cfg.GPUCacheAuto = true
	} else if cfg.GPUCache, err = cacheBudget(c, "gpu-cache", ""); err != nil {
		return cfg, err
	}
	cfg.MemoryRung, cfg.Precision = c.String("memory-rung"), c.String("precision")
	if cfg.BLAS = c.String("blas"); cfg.BLAS == "" {
		return cfg, errs.New(errs.Usage, "--blas: empty; give off, auto or the path of libcublas")
	}
	if cfg.CPUCache, err = cacheBudget(c, "cpu-cache", map[string]string{sched.ModeHelios: "10%", sched.ModeCPU: "10%", sched.ModeGIDS: "10%"}[cfg.Mode]); err != nil {
		return cfg, err
	}
	if cfg.SMs, err = smBudget(c.String("sm-budget")); err != nil {
		return cfg, err
	}
	return cfg, e.tierConfig(&cfg)
}

// notZero refuses a 0 that was typed where the library takes 0 for its default.
func (e *env) notZero(flags ...string) error {
	for _, f := range flags {
		if e.c.IsSet(f) && e.c.Int(f) == 0 && e.c.Float64(f) == 0 {
			return errs.New(errs.Usage, "--%s 0 is not a positive number", f)
		}
	}
	return nil
}

func cacheBudget(c *cli.Context, flag, def string) (units.Budget, error) {
	s := c.String(flag)
	if !c.IsSet(flag) {
		if s = def; s == "" {
			return units.Budget{}, nil
		}
	}
	b, err := units.ParseBudget(s)
	if err != nil {
		return b, errs.New(errs.Usage, "--%s: %w", flag, err)
	}
	return b, nil
}

func smBudget(s string) (b sched.SMBudget, err error) {
	parts, err := list("sm-budget", s)
	if err != nil {
		return b, err
	}
	fields := map[string]*int{"sample": &b.Sample, "lookup": &b.Lookup, "io": &b.IO, "gather": &b.Gather, "train": &b.Train}
	for _, p := range parts {
		op, n, _ := strings.Cut(p, "=")
		f, ok := fields[op]
		if !ok {
			return b, errs.New(errs.Usage, "--sm-budget: unknown operator %q; choose one of sample, lookup, io, gather, train", op)
		}
		if *f, err = strconv.Atoi(n); err != nil || *f < 1 {
			return b, errs.New(errs.Usage, "--sm-budget %q is not OP=N with N at least 1", p)
		}
	}
	return b, nil
}

// graphInputs opens what a run works on without the SSDs; done closes it all. hostOnly is as for openDevice.
func (e *env) graphInputs(hostOnly string) (in sched.Inputs, done func() error, err error) {
	var closers []func() error
	done = func() error {
		var err error
		for i := len(closers) - 1; i >= 0; i-- {
			err = errors.Join(err, closers[i]())
		}
		closers = nil
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, done())
		}
	}()
	d, err := e.openDataset()
	if err != nil {
		return in, done, err
	}
	closers = append(closers, d.Close)
	if d.Meta.Classes < 1 {
		return in, done, errs.New(errs.Usage, "dataset %s has no labels, which a model needs; import it again with --labels FILE", d.Meta.Name)
	}
	if e.c.Bool("no-edges") {
		d = d.WithoutEdges()
		closers = append(closers, d.Close)
	}
	dev, err := e.openDevice(hostOnly)
	if err != nil {
		return in, done, err
	}
	closers = append(closers, dev.Close)
	return sched.Inputs{Dev: dev, Dataset: d}, done, nil
}

// inputs opens what a run works on; done closes it all.
func (e *env) inputs(ctx context.Context) (in sched.Inputs, set *ssdSet, done func() error, err error) {
	done = func() error { return nil }
	first, err := e.ssdsFirst()
	if err != nil {
		return in, nil, done, err
	}
	if first {
		if set, err = e.openSSDs(ctx, "ssds"); err != nil {
			return in, nil, done, err
		}
	}
	in, graph, err := e.graphInputs("")
	if err != nil {
		if first {
			err = errors.Join(err, set.close())
		}
		return in, nil, graph, err
	}
	if !first {
		if set, err = e.openSSDs(ctx, "ssds"); err != nil {
			return in, nil, graph, errors.Join(err, graph())
		}
	}
	in.SSDs = set.ssds
	return in, set, func() error { return errors.Join(set.close(), graph()) }, nil
}

// ssdsFirst tells whether SSDs are opened before the device: where vfio-pci holds one that a GPU may be told of. A process
// that dies has its files closed in the order of their numbers, and closing a VFIO device ends its DMA: that must come
// before the driver gives the GPU's memory to somebody else.
func (e *env) ssdsFirst() (bool, error) {
	if kind, _, err := parseDevice(cmp.Or(e.c.String("device"), "auto")); err != nil || kind == "host" {
		return false, err
	}
	st, err := e.store.Load()
	if err != nil {
		return false, err
	}
	first := slices.ContainsFunc(st.SSDs, func(d state.SSD) bool { return d.Kind == state.KindVFIO })
	if first {
		e.pollDoorbells = true // for software SSDs beside them: kernels of a GPU could not wake those
	}
	return first, nil
}

func runTrain(ctx context.Context, e *env) (err error) {
	cfg, err := e.trainConfig()
	if err != nil {
		return err
	}
	hw, virtual, err := e.hardware()
	if err != nil {
		return err
	}
	if virtual && cfg.VerifyRows {
		return errs.New(errs.Usage, "--verify-rows: no row is gathered on the virtual clock; leave one of the two out")
	}
	if virtual {
		return e.trainVirtual(ctx, cfg, hw)
	}
	out, held, err := e.openRun(&cfg)
	if err != nil {
		return err
	}
	defer out.end(&err)
	tl, err := e.openTimeline(timeline.Wall)
	if err != nil {
		return err
	}
	defer closing(&err, tl.close)
	cfg.Timeline = tl.rec
	in, set, done, err := e.inputs(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, done)
	if err := out.start(held); err != nil {
		return err
	}

	obs := e.observer()
	obs.Epoch = func(r sched.EpochResult) {
		out.event("epoch", r)
		val := ""
		if r.ValAcc != nil {
			val = fmt.Sprintf(", val %.2f%%", 100**r.ValAcc)
		}
		e.ui.Printf("epoch %d: loss %.4f, train %.2f%%%s, %.2f s; %s", r.Epoch, r.Loss, 100*r.TrainAcc, val, r.Seconds, tierLine(r))
	}
	obs.Plan = e.explain(out)
	res, err := sched.Train(ctx, cfg, in, obs)
	err = orResume(err)
	e.showFaults(set, out)
	if res != nil {
		set.markModelled(&res.IO, cfg)
	}
	if err != nil {
		if res != nil {
			e.showTrouble(res.IO, out)
		}
		return err
	}
	e.showResult(res)
	out.object(res)
	return nil
}

// openRun looks after what the run leaves before any work is done: its checkpoint folder, the trace and the results.
// held is what the folder holds that the run goes on from, nil where there is nothing.
func (e *env) openRun(cfg *sched.Config) (out *results, held *sched.Held, err error) {
	if cfg.CheckpointDir != "" {
		if held, err = sched.HeldIn(cfg.CheckpointDir); err != nil {
			return nil, nil, err
		}
	}
	if held != nil && !cfg.Resume {
		if !cfg.Overwrite {
			return nil, nil, orResume(errs.With(errs.Refused, &sched.HeldError{Dir: cfg.CheckpointDir, Held: held}))
		}
		held = nil
	}
	if held != nil && !held.Resumable() {
		if !cfg.Overwrite {
			return nil, nil, errs.New(errs.Refused, "--checkpoint: folder %s %s, in %s alone, which no run can go on from; --overwrite replaces it, or name another folder", cfg.CheckpointDir, held, filepath.Base(held.Path))
		}
		held = nil
	}
	if cfg.Trace != "" { // the run itself makes it
		if err := orOverwrite(e.outputs().Claim("--trace", cfg.Trace)); err != nil {
			return nil, nil, err
		}
	}
	if !cfg.Resume {
		out, err = e.openResults()
	} else {
		out, err = e.resumeResults(held)
	}
	if err == nil {
		cfg.Run = out.run
	}
	return out, held, err
}

// orResume adds the ways out to the refusal of a folder that holds a checkpoint.
func orResume(err error) error {
	if held := (*sched.HeldError)(nil); errors.As(err, &held) {
		return fmt.Errorf("--checkpoint %w; --resume goes on from it, --overwrite replaces it, or name another folder", err)
	}
	return err
}

// observer shows how a run goes.
func (e *env) observer() sched.Observer {
	return sched.Observer{
		Step: func(stage string, done, total int) { e.ui.Progress(stage, int64(done), int64(total)) },
		Note: func(s string) { e.ui.Note("%s", s) },
	}
}

// explain prints a run's operators, where that was asked for.
func (e *env) explain(out *results) func(*sched.OpGraph) {
	if !e.c.Bool("explain") {
		return nil
	}
	return func(g *sched.OpGraph) {
		out.event("plan", g)
		t := g.Table()
		e.ui.Table(t[0], t[1:])
		for _, b := range g.Bounds() {
			e.ui.Printf("%s", b)
		}
	}
}

// showFaults reports how often each injected fault struck.
func (e *env) showFaults(set *ssdSet, out *results) {
	counts := set.faultCounts()
	if counts == nil {
		return
	}
	out.event("faults", counts)
	for _, f := range slices.Sorted(maps.Keys(counts)) {
		e.ui.Printf("fault %s: struck %d times", f, counts[f])
	}
}

// share is n of total in percent.
func share(n, total int64) string {
	if total == 0 {
		return "0%"
	}
	return strconv.FormatFloat(100*float64(n)/float64(total), 'f', 1, 64) + "%"
}

// tierLine says where an epoch's rows came from and how well its stages overlapped.
func tierLine(r sched.EpochResult) string {
	rows := r.RowsGPU + r.RowsCPU + r.RowsSSD
	s := fmt.Sprintf("rows: GPU %s, CPU %s, SSD %s", share(r.RowsGPU, rows), share(r.RowsCPU, rows), share(r.RowsSSD, rows))
	if r.Seconds > 0 && r.BytesSSD > 0 {
		s += fmt.Sprintf(" (%s/s)", units.FormatBytes(int64(float64(r.BytesSSD)/r.Seconds)))
	}
	s += fmt.Sprintf("; overlap %.2f, stall %.2f", r.Overlap, r.Stall)
	if r.ReadGroups > 0 {
		s += fmt.Sprintf("; %.1f mini-batches read at a time", r.GroupBatches)
	}
	if r.Retries > 0 || r.Timeouts > 0 {
		s += fmt.Sprintf("; %d retries, %d timeouts", r.Retries, r.Timeouts)
	}
	return s
}

// epochsOf sums a run's epochs; overlap, stall and read amplification are those of the whole.
func epochsOf(r *sched.Result) (sum sched.EpochResult, seconds float64) {
	var needed float64 // bytes of the rows that had to come from SSD
	for _, p := range r.Epochs {
		sum.RowsGPU += p.RowsGPU
		sum.RowsCPU += p.RowsCPU
		sum.RowsSSD += p.RowsSSD
		sum.BytesSSD += p.BytesSSD
		sum.SSDCommands += p.SSDCommands
		sum.Overlap += p.Overlap * p.Seconds
		sum.Stall += p.Stall * p.Seconds
		sum.StageSeconds.Add(p.StageSeconds)
		sum.LinesInserted += p.LinesInserted
		sum.LinesEvicted += p.LinesEvicted
		sum.LinesBypassed += p.LinesBypassed
		sum.GroupBatches += p.GroupBatches * float64(p.ReadGroups)
		sum.ReadGroups += p.ReadGroups
		if p.TopologyReads != nil {
			all := *p.TopologyReads
			if sum.TopologyReads != nil {
				all = all.Add(*sum.TopologyReads)
			}
			sum.TopologyReads = &all
		}
		seconds += p.Seconds
		if p.ReadAmplification > 0 {
			needed += float64(p.BytesSSD) / p.ReadAmplification
		}
	}
	if sum.ReadGroups > 0 {
		sum.GroupBatches /= float64(sum.ReadGroups)
	}
	if seconds > 0 {
		sum.Overlap /= seconds
		sum.Stall /= seconds
	}
	if needed > 0 {
		sum.ReadAmplification = float64(sum.BytesSSD) / needed
	}
	return sum, seconds
}

// pathRows are the lines of a summary about where rows came from and how well the stages overlapped.
func pathRows(sum sched.EpochResult, seconds float64) [][]string {
	all := sum.RowsGPU + sum.RowsCPU + sum.RowsSSD
	rows := [][]string{
		{"hit ratio", fmt.Sprintf("GPU tier %s, CPU tier %s; from SSD %s of %s rows", share(sum.RowsGPU, all), share(sum.RowsCPU, all), share(sum.RowsSSD, all), units.FormatCount(float64(all)))},
		{"SSD", fmt.Sprintf("%s in %s commands: %s/s, %s IOPS over the training time", units.FormatBytes(sum.BytesSSD), units.FormatCount(float64(sum.SSDCommands)),
			units.FormatBytes(int64(float64(sum.BytesSSD)/seconds)), units.FormatCount(float64(sum.SSDCommands)/seconds))},
		{"overlap", fmt.Sprintf("%.2f; training waited %.0f%% of the time", sum.Overlap, 100*sum.Stall)},
	}
	if n := sum.LinesInserted + sum.LinesBypassed; n > 0 {
		rows = append(rows, []string{"GPU tier's lines", fmt.Sprintf("%s taken in, %s let go for them, %s found no place", units.FormatCount(float64(sum.LinesInserted)),
			units.FormatCount(float64(sum.LinesEvicted)), units.FormatCount(float64(sum.LinesBypassed)))})
	}
	if sum.ReadGroups > 0 {
		rows = append(rows, []string{"merged reads", fmt.Sprintf("%s sets of %.1f mini-batches in the mean", units.FormatCount(float64(sum.ReadGroups)), sum.GroupBatches)})
	}
	if t := sum.TopologyReads; t != nil {
		rows = append(rows, []string{"topology", fmt.Sprintf("%s of %s neighbours drawn from lists in memory; %s in %s reads from storage, sampling waited %.3g s for them",
			share(t.CachedEdges, t.Edges), units.FormatCount(float64(t.Edges)), units.FormatBytes(t.Bytes), units.FormatCount(float64(t.Reads)), t.Wait.Seconds())})
	}
	return rows
}

// runInfoRows are the lines of a summary about how a GPU got at its rows and computed; none where there is nothing to say.
func runInfoRows(r sched.RunInfo) (rows [][]string) {
	for _, t := range gpuio.Together(r.MemoryRungTried) {
		rows = append(rows, []string{"not " + t.Rung, t.Why})
	}
	if r.Precision != cuda.FP32.String() || r.BLAS != sched.BLASOff {
		by := "our kernels"
		if r.BLAS != sched.BLASOff {
			by = r.BLAS
		}
		rows = append(rows, []string{"products", fmt.Sprintf("%s by %s", r.Precision, by)})
	}
	if r.Sampler == sched.SamplerLadies {
		rows = append(rows, []string{"sampler", "layer-wise (LADIES)"})
	}
	if r.Policy != "" && r.Policy != sched.PolicyStatic {
		rows = append(rows, []string{"GPU tier", fmt.Sprintf("policy %s, lines of %s, window %d; the policy keeps %s of them", r.Policy, units.FormatBytes(r.CacheLineBytes), r.Window, units.FormatBytes(r.PolicyBytes))})
	}
	if r.Accumulator != nil {
		rows = append(rows, []string{"accumulator", strings.TrimPrefix(r.Accumulator.String(), "accumulator: ")})
	}
	if s := r.Seal; s != nil {
		how := "each read is checked against the seal"
		if r.Topology == sched.TopologySSD {
			how += ", neighbour lists page by page"
		}
		if !s.Sealed {
			how = "not sealed: what changed in them since the dataset was made is not found"
		} else if s.CheckedBytes > 0 {
			how += fmt.Sprintf(" (%s by now, %.3f s of all cores together)", units.FormatBytes(s.CheckedBytes), s.Seconds)
		}
		rows = append(rows, []string{"dataset files", how})
	}
	if r.Hotness != nil {
		rows = append(rows, []string{"hotness", r.Hotness.String()})
	}
	if t := r.TopologyStorage; t != nil {
		rows = append(rows, []string{"topology", fmt.Sprintf("on storage; in memory offsets of %s and %s lists of hot nodes in %s", units.FormatBytes(t.OffsetBytes), units.FormatCount(float64(t.CacheLists)), units.FormatBytes(t.CacheBytes))})
	}
	if t := r.Tuned; t != nil {
		flags := t.Flags
		if flags == "" {
			flags = "nothing gained enough: all stays as it was"
		}
		rows = append(rows, []string{"tuned", fmt.Sprintf("%s (%s, %d mini-batches)", flags, t.Level, t.Batches)})
		if t.Skipped != "" {
			rows = append(rows, []string{"not tuned", t.Skipped})
		}
	}
	if r.GPUCacheShrunkBytes > 0 {
		rows = append(rows, []string{"GPU tier", fmt.Sprintf("gave back %s when the device's memory ran out", units.FormatBytes(r.GPUCacheShrunkBytes))})
	}
	return rows
}

// showResult is the summary for people.
func (e *env) showResult(r *sched.Result) {
	sum, seconds := epochsOf(r)
	rows := [][]string{
		{"mode", fmt.Sprintf("%s, %s on %s; I/O stack %s, pipeline %s, memory rung %s", r.Mode, r.Model, r.Device, r.IOStack, r.Pipeline, r.MemoryRung)},
	}
	rows = append(rows, runInfoRows(r.RunInfo)...)
	rows = append(rows, []string{"rows", fmt.Sprintf("%s, stored as %s", units.FormatBytes(r.RowBytes), r.RowDType)})
	if r.TestAcc != nil {
		rows = append(rows, []string{"test accuracy", fmt.Sprintf("%.2f%% (at epoch %d, the best in validation)", 100**r.TestAcc, r.BestEpoch)})
	}
	if seconds > 0 {
		rows = append(rows, pathRows(sum, seconds)...)
	}
	if r.RowsVerified != nil {
		rows = append(rows, []string{"verified", fmt.Sprintf("%d gathered rows, each equal to what the feature function says", *r.RowsVerified)})
	}
	rows = append(rows,
		[]string{"memory", fmt.Sprintf("peak %s; GPU tier %s, CPU tier %s, topology %s", units.FormatBytes(r.PeakMemoryBytes), units.FormatBytes(r.GPUCacheBytes), units.FormatBytes(r.CPUCacheBytes), units.FormatBytes(r.TopologyBytes))},
		[]string{"parameters", "sha256 " + r.ParamsSHA256})
	if r.Checkpoint != "" {
		rows = append(rows, []string{"checkpoint", r.Checkpoint})
	}
	e.ui.Table([]string{"", ""}, append(rows, ioRows(r.IO)...))
	e.showSSDs(r.IO)
}
