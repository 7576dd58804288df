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
	"helios/graph"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/report"
)

// modelOptions decide what is computed.
func modelOptions() hcli.Options[plan.Config] {
	return append(hcli.Options[plan.Config]{
		hcli.Text(oneOf("model", "model", "", gnn.Archs(), nil),
			func(c *plan.Config) *string { return &c.Model }).Setting(),
		fanoutOption("10,10",
			"neighbours sampled per hop `F1,F2,…`, the seeds' first; -1 takes all; one layer per hop"),
		hcli.Int(&cli.IntFlag{Name: "batch-size", Usage: "seed nodes in a mini-batch"},
			func(c *plan.Config) *int { return &c.Batch }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "shards", DefaultText: "as --replicas, 1",
			Usage: "mini-batches that a step of Adam covers `V`: its gradient is the mean over all their labelled seeds; changes results"},
			func(c *plan.Config) *int { return &c.Shards }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "hidden", Usage: "width of the hidden layers"},
			func(c *plan.Config) *int { return &c.Hidden }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "epochs", Usage: "passes over the training nodes"},
			func(c *plan.Config) *int { return &c.Epochs }).Positive(),
		hcli.Float(&cli.Float64Flag{Name: "lr", Usage: "Adam's learning rate"},
			func(c *plan.Config) *float64 { return &c.LR }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "dropout",
			Usage: "share of the hidden activations that training drops"},
			func(c *plan.Config) *float64 { return &c.Dropout }),
		hcli.Share(&cli.StringFlag{Name: "feature-dropout",
			Usage: "share of the input features that training drops"},
			func(c *plan.Config) *float64 { return &c.FeatureDropout }),
		hcli.Text(oneOf("optimizer", "optimiser; adamw decays weights apart from the gradient", "",
			gnn.Optimizers(), nil),
			func(c *plan.Config) *string { return &c.Optimizer }).Setting(),
		hcli.Float(&cli.Float64Flag{Name: "weight-decay",
			Usage: "L2 penalty; with --optimizer adamw the share that a step takes from each weight, times --lr"},
			func(c *plan.Config) *float64 { return &c.WeightDecay }),
		hcli.Text(oneOf("activation", "function between layers", "", gnn.Activations(), nil),
			func(c *plan.Config) *string { return &c.Activation }).Setting(),
		hcli.Text(oneOf("norm", "normalisation before it", "", gnn.Norms(), nil),
			func(c *plan.Config) *string { return &c.Norm }).Setting(),
		hcli.Bool(&cli.BoolFlag{Name: "residual",
			Usage: "add a layer's input to its sums, through a matrix where the widths differ"},
			func(c *plan.Config) *bool { return &c.Residual }).Setting(),
		hcli.Int(&cli.IntFlag{Name: "heads", DefaultText: "8",
			Usage: "attention heads of each layer (model gat), which share --hidden; the last layer takes their mean"},
			func(c *plan.Config) *int { return &c.Heads }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "heads-out", DefaultText: "as --heads",
			Usage: "attention heads of the last layer (model gat)"},
			func(c *plan.Config) *int { return &c.OutHeads }).Positive(),
		hcli.Share(&cli.StringFlag{Name: "attention-dropout",
			Usage: "share of the attention that training drops (model gat)"},
			func(c *plan.Config) *float64 { return &c.AttentionDropout }),
		hcli.Bool(&cli.BoolFlag{Name: "learn-eps",
			Usage: "learn the weight of a node in its own sum (model gin), else 1"},
			func(c *plan.Config) *bool { return &c.LearnEps }).Setting(),
		hcli.Seed(&cli.Uint64Flag{Name: "seed",
			Usage: "seed of all random choices; equal seeds give equal parameters in every mode"}),
		samplerOption(graph.Neighbor), dependencyOption(),
	}, epochOptions()...)
}

// fanoutOption is of verbs that sample; text says what a run without it takes.
func fanoutOption(text, usage string) hcli.Option[plan.Config] {
	return hcli.Parsed(&cli.StringFlag{Name: "fanout", DefaultText: text, Usage: usage},
		func(c *plan.Config) *[]int { return &c.Fanouts }, parseFanouts)
}

func parseFanouts(text string) ([]int, error) {
	out, err := units.ParseInts(text, -1)
	if err != nil {
		return nil, errs.New(errs.Usage, "--fanout: %w", err)
	}
	return out, nil
}

// pathOptions decide how the rows come, which never changes a result.
func pathOptions() hcli.Options[plan.Config] {
	return hcli.Options[plan.Config]{
		hcli.Text(oneOf("mode", "data path", "", plan.ModeNames(), nil),
			func(c *plan.Config) *string { return &c.Mode }).Setting().
			Default(plan.DefaultMode),
		hcli.Text(oneOf("io-stack", "who reads the SSDs", "", plan.Stacks, nil),
			func(c *plan.Config) *string { return &c.IOStack }).Setting(),
		hcli.Text(oneOf("pipeline", "what overlaps ("+pipelineSummaries()+")", "",
			plan.PipelineNames(nil), nil),
			func(c *plan.Config) *string { return &c.Pipeline }).Setting(),
		hcli.Int(&cli.IntFlag{Name: "workers", DefaultText: "one per CPU",
			Usage: "worker slots of the host device, and threads of the cpu stack"},
			func(c *plan.Config) *int { return &c.Workers }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "io-blocks", DefaultText: "32; sync: a full grid",
			Usage: "thread blocks of each I/O kernel"},
			func(c *plan.Config) *int { return &c.Blocks }).Positive(),
		hcli.Int(&cli.IntFlag{Name: "depth", DefaultText: "256", Usage: "reads in flight per SSD"},
			func(c *plan.Config) *int { return &c.QueueDepth }).Positive().Checked(func(
			c *plan.Config, _ string) error {
			if c.QueueDepth < 0 || c.QueueDepth > 65535 {
				return errs.New(errs.Usage, "--depth %d is not between 1 and 65535", c.QueueDepth)
			}
			return nil
		}),
		hcli.Int(&cli.IntFlag{Name: "prefetch-depth", Usage: "mini-batches prepared ahead"},
			func(c *plan.Config) *int { return &c.Depth }).Positive(),
		hcli.Duration(&cli.DurationFlag{Name: "read-timeout", DefaultText: "the stack's",
			Usage: "`TIME` after which a read is aborted and tried again"},
			func(c *plan.Config) *time.Duration { return &c.ReadTimeout }).Checked(func(
			c *plan.Config, _ string) error {
			if c.ReadTimeout < time.Millisecond {
				return errs.New(errs.Usage, "--read-timeout %s is below 1ms", c.ReadTimeout)
			}
			return nil
		}),
		hcli.Int(&cli.IntFlag{Name: "read-retries", DefaultText: "the stack's",
			Usage: "how often a failed read is tried again; -1 for never"},
			func(c *plan.Config) *int { return &c.ReadRetries }).Checked(func(c *plan.Config,
			_ string) error {
			switch {
			case c.ReadRetries < -1:
				return errs.New(errs.Usage, "--read-retries %d is below -1 (never)", c.ReadRetries)
			case c.ReadRetries == 0:
				c.ReadRetries = -1 // the library takes 0 for its default
			}
			return nil
		}),
		hcli.Parsed(&cli.StringFlag{Name: "on-ssd-failure", DefaultText: "retry=3",
			Usage: "when an SSD hangs or fails and new queues did not help: \"stop\", or \"retry=N\": reset its controller up to N times in the run, then stop"},
			func(c *plan.Config) *int { return &c.ReadResets }, resetsFlag),
		hcli.Parsed(&cli.StringFlag{Name: "coalesce", DefaultText: "auto",
			Usage: "one command for rows on equal and adjacent LBAs (async and cpu stacks): auto, off, or up to `SIZE` a command"},
			func(c *plan.Config) *int { return &c.CoalesceBytes }, coalesceFlag),
		hcli.Switch(&cli.BoolFlag{Name: "check-reads",
			DefaultText: "on, where load has written checksums",
			Usage:       "hold every row and page that is read from SSDs against its checksum; read it again, then stop, where they differ; --no-check-reads does not"},
			func(c *plan.Config) *plan.Checks { return &c.CheckReads }, plan.ChecksOn,
			plan.ChecksOff).Setting(),
		hcli.Bool(&cli.BoolFlag{Name: "verify-rows",
			Usage: "hold every row that a mini-batch has gathered, from wherever, against the dataset's feature function (generate --feature-fn); stop at the first wrong one"},
			func(c *plan.Config) *bool { return &c.VerifyRows }).Setting(),
		hcli.Text(&cli.StringFlag{Name: "row-dtype", DefaultText: "whatever is there",
			Usage: "stop unless the SSDs hold rows of `TYPE` (" + strings.Join(rowtype.Names(),
				", ") +
				"; load --row-dtype makes them); with --clock virtual, the type they are taken to have"},
			func(c *plan.Config) *string { return &c.RowType }).Setting().
			Offers(rowtype.Names()...),
		hcli.Text(oneOf("cpu-engine", "how the cpu stack reads", "", []string{"io_uring", "pread"},
			nil), func(c *plan.Config) *string { return &c.CPUEngine }).Setting().
			Default("the best there is"),
		hcli.Parsed(&cli.StringFlag{Name: "sm-budget",
			DefaultText: "all; on a GPU io has as many SMs as hold the blocks of --io-blocks",
			Usage:       "most thread blocks at once per operator `OP=N,…` (sample, lookup, io, gather, train); on a GPU SMs, in steps of its green contexts, where the driver has them"},
			func(c *plan.Config) *plan.SMBudget { return &c.SMs }, smBudget),
		hcli.Text(oneOf("memory-rung",
			"where the I/O kernels' queues and data are on a GPU; auto takes the best that a pattern read both ways proves",
			"", append([]string{gpuio.RungAuto}, gpuio.Rungs()...), nil),
			func(c *plan.Config) *string { return &c.MemoryRung }).Setting(),
		hcli.Text(oneOf("precision",
			"of the model's products; bf16 rounds their factors, tf32 too, on a GPU only",
			"", cuda.Precisions(), nil),
			func(c *plan.Config) *string { return &c.Precision }).Setting(),
		hcli.Text(&cli.StringFlag{Name: "blas",
			Usage: "who computes products on a GPU: off (our kernels), auto (cuBLAS where it is installed) or the `PATH` of libcublas"},
			func(c *plan.Config) *string { return &c.BLAS }).
			Setting(plan.BLASOff, plan.BLASAuto).Checked(func(c *plan.Config, _ string) error {
			if c.BLAS == "" {
				return errs.New(errs.Usage,
					"--blas: empty; give off, auto or the path of libcublas")
			}
			return nil
		}),
	}
}

// dataOptions are pathOptions and tierOptions.
func dataOptions() hcli.Options[plan.Config] {
	return slices.Concat(pathOptions(), tierOptions(), megaOptions())
}

// dataPath are the options of the data path, the tiers and the machine. (Of these --kernels alone
// may change a result: generic rounds otherwise.)
func dataPath() hcli.Options[runArgs] {
	return slices.Concat(
		withConfig(pathOptions()).Group("Data path"), withConfig(tierOptions()).Group("Tiers"),
		withConfig(megaOptions()).Group("Mega-batches"),
		hcli.Options[runArgs]{hcli.Text(&cli.StringFlag{Name: "timeline",
			Usage: "write what each operator of each mini-batch did when to `FILE`, a Chrome trace (open it in ui.perfetto.dev)"},
			func(a *runArgs) *string { return &a.timeline }).Aside()},
		withDevice(deviceOptions()), withSSDs(ssdOptions()))
}

// replicaOptions say on how many devices a run trains, which never changes a result at equal
// --shards.
func replicaOptions() hcli.Options[plan.Config] {
	return hcli.Options[plan.Config]{
		hcli.Int(&cli.IntFlag{Name: "replicas", DefaultText: "1",
			Usage: "devices that train with copies of the model `Q`: GPUs from --device on, or host devices that share --workers; at equal --shards (without it: as many) the parameters are the same"},
			func(c *plan.Config) *int { return &c.Replicas }).Positive(),
		hcli.Text(&cli.StringFlag{Name: "reduce", DefaultText: plan.ReduceTree,
			Usage: "who adds the gradients of --replicas: tree (ours, to the bit as one device does), nccl (NVIDIA's NCCL where it is installed, GPUs only, not bit-exact) or the `PATH` of libnccl"},
			func(c *plan.Config) *string { return &c.Reduce }).Setting(plan.ReduceTree),
	}
}

// leftOptions decide what a run leaves behind.
func leftOptions() hcli.Options[plan.Config] {
	return hcli.Options[plan.Config]{
		hcli.Text(&cli.StringFlag{Name: "checkpoint",
			Usage: "`DIR` for the checkpoint, written after each epoch and on Ctrl-C"},
			func(c *plan.Config) *string { return &c.CheckpointDir }).Aside(),
		hcli.Int(&cli.IntFlag{Name: "checkpoint-every",
			Usage: "also write it after every `N` mini-batches, at the end of their step of --shards"},
			func(c *plan.Config) *int { return &c.CheckpointEvery }).Aside(),
		hcli.Bool(&cli.BoolFlag{Name: "resume",
			Usage: "go on from the checkpoint in --checkpoint, to the bit where --kernels is as it was; start where there is none"},
			func(c *plan.Config) *bool { return &c.Resume }).Aside(),
		hcli.Bool(&cli.BoolFlag{Name: "no-eval", Usage: "skip validation and test"},
			func(c *plan.Config) *bool { return &c.NoEval }).Setting(),
		hcli.Text(oneOf("tune",
			"measure the first mini-batches under other depths, SM budgets and accumulator targets, and keep the best: it never changes a result",
			"", plan.Tunes, nil),
			func(c *plan.Config) *string { return &c.Tune }).Setting(),
		hcli.Text(&cli.StringFlag{Name: "trace",
			Usage: "record which rows each mini-batch needs in `FILE`, for \"cache replay\" and \"cache plan\""},
			func(c *plan.Config) *string { return &c.Trace }).Aside(),
	}
}

func trainCommand() *cli.Command {
	return verb(&cli.Command{
		Name:        "train",
		Usage:       "train a model, its features read from the SSDs",
		ArgsUsage:   "[DATASET]",
		Description: "Example: heliosctl train g --model sage --fanout 10,10 --epochs 5 --gpu-cache 5% --checkpoint runs/g",
	}, 1, trainOptions(), runTrain)
}

// trainerArgs holds the options of train.
type trainerArgs struct {
	runArgs
	clockArgs
	ranks   rankArgs
	explain bool
	live    bool
	metrics string
}

func trainOptions() hcli.Options[trainerArgs] {
	run := func(a *trainerArgs) *runArgs { return &a.runArgs }
	return slices.Concat(
		hcli.In(run, slices.Concat(withDataset(datasetOptions(datasetUsage)),
			withConfig(modelOptions()).Group("Model"),
			hcli.Options[runArgs]{edgesOption()}.Group("Model"), dataPath(),
			withConfig(replicaOptions()).Group("Replicas"))),
		hcli.In(func(a *trainerArgs) *rankArgs { return &a.ranks }, rankOptions()).Group("Ranks"),
		hcli.In(func(a *trainerArgs) *clockArgs { return &a.clockArgs }, clockOptions()),
		hcli.In(run, withConfig(leftOptions()).Group("Run")),
		hcli.Options[trainerArgs]{hcli.Bool(&cli.BoolFlag{Name: "explain",
			Usage: "print the steps of a mini-batch before training: what each does, waits for and runs on; and afterwards the processor time of each"},
			func(a *trainerArgs) *bool { return &a.explain }).Aside(),
			hcli.Bool(&cli.BoolFlag{Name: "live",
				Usage: "show stages, tiers, SSDs and loss while it runs, drawn over on a terminal"},
				func(a *trainerArgs) *bool { return &a.live }).Aside(),
			metricsOption(func(a *trainerArgs) *string { return &a.metrics })}.Group("Run"),
		hcli.In(run, withOutputs(outputOptions())))
}

// trainer trains a model.
type trainer struct {
	*env
	*trainerArgs
}

// check completes the configuration and refuses what cannot be, before anything is opened.
func (a *trainerArgs) check() error {
	a.cfg.Overwrite = a.overwrite
	if a.cfg.CheckpointEvery > 0 && a.cfg.CheckpointDir == "" {
		return errs.New(errs.Usage,
			"--checkpoint-every needs --checkpoint DIR, the folder to write to")
	}
	return a.cfg.Check()
}

func smBudget(s string) (b plan.SMBudget, err error) {
	parts, err := list("sm-budget", s)
	if err != nil {
		return b, err
	}
	fields := map[string]*int{"sample": &b.Sample, "lookup": &b.Lookup, "io": &b.IO,
		"gather": &b.Gather, "train": &b.Train}
	for _, p := range parts {
		op, n, _ := strings.Cut(p, "=")
		f, ok := fields[op]
		if !ok {
			return b, errs.New(errs.Usage,
				"--sm-budget: unknown operator %q; choose one of sample, lookup, io, gather, train",
				op)
		}
		if *f, err = strconv.Atoi(n); err != nil || *f < 1 {
			return b, errs.New(errs.Usage, "--sm-budget %q is not OP=N with N at least 1", p)
		}
	}
	return b, nil
}

func runTrain(ctx context.Context, e *env, a *trainerArgs) (err error) {
	if err := a.check(); err != nil {
		return err
	}
	hw, virtual, err := a.hardware(e, append(notVirtual(&a.runArgs), &a.faults,
		&a.cfg.CheckpointDir, &a.cfg.CheckpointEvery, &a.cfg.Resume, &a.cfg.Reduce,
		&a.metrics, &a.live, &a.ranks.wait, &a.ranks.library, &a.ranks.secretFile,
		&a.ranks.insecure, &a.ranks.listen))
	if err != nil {
		return err
	}
	if virtual && a.cfg.VerifyRows {
		return errs.New(errs.Usage,
			"--verify-rows: no row is gathered on the virtual clock; leave one of the two out")
	}
	t := &trainer{e, a}
	if virtual {
		if err := e.oneProcess(); err != nil {
			return err
		}
		return t.trainVirtual(ctx, hw)
	}
	group, err := t.joinRanks(ctx)
	if err != nil {
		return err
	}
	if group != nil {
		defer func() { leaveRanks(group, &err) }()
	}
	out, held, err := t.openRun()
	if err != nil {
		return err
	}
	defer out.end(&err)
	s, err := openSession(ctx, e, &a.runArgs)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	if err := out.start(held); err != nil {
		return err
	}

	w := newWatch(t)
	obs := w.observer()
	obs.Epoch = func(r report.EpochResult) {
		w.ended(r)
		out.event("epoch", r)
		val := ""
		if r.ValAcc != nil {
			val = fmt.Sprintf(", val %.2f%%", 100**r.ValAcc)
		}
		e.ui.Printf("epoch %d: loss %.4f, train %.2f%%%s, %.2f s; %s", r.Epoch, r.Loss,
			100*r.TrainAcc, val, r.Seconds, tierLine(r))
	}
	obs.Plan = t.showPlan(out)
	if a.metrics != "" {
		m, err := serveMetrics(a.metrics, map[string]string{"run": out.run,
			"mode":    cmp.Or(a.cfg.Mode, plan.DefaultMode),
			"dataset": s.Inputs.Dataset.Meta.Name, "version": programVersion()})
		if err != nil {
			return err
		}
		defer closing(&err, m.close)
		e.ui.Note("metrics for Prometheus: http://%s/metrics", m.addr)
		obs = m.watch(obs)
	}
	s.Group = group
	defer t.meterCPU()()
	res, err := sched.Train(ctx, a.cfg, s.Inputs, obs)
	err = orResume(err)
	var io *report.IOResult
	if res != nil {
		io = &res.IO
	}
	s.ended(out, io, err)
	if err != nil {
		return err
	}
	showResult(e, res, w)
	showCPU(e, res.Epochs)
	out.event("result", res)
	return nil
}

// openRun looks after what the run leaves before any work is done: its checkpoint folder, the trace
// and the results. held is what the folder holds that the run goes on from, nil where there is
// nothing.
func (t *trainer) openRun() (out *results, held *sched.Held, err error) {
	cfg := &t.cfg
	if cfg.CheckpointDir != "" && cfg.Rank == 0 {
		if held, err = sched.HeldIn(cfg.CheckpointDir); err != nil {
			return nil, nil, err
		}
	}
	if held != nil && !cfg.Resume {
		if !cfg.Overwrite {
			return nil, nil,
				orResume(errs.With(errs.Refused, &sched.HeldError{Dir: cfg.CheckpointDir,
					Held: held}))
		}
		held = nil
	}
	if held != nil && !held.Resumable() {
		if !cfg.Overwrite {
			return nil, nil, errs.New(errs.Refused,
				"--checkpoint: folder %s %s, in %s alone, which no run can go on from; --overwrite replaces it, or name another folder",
				cfg.CheckpointDir, held, filepath.Base(held.Path))
		}
		held = nil
	}
	if err := t.claimTrace(); err != nil {
		return nil, nil, err
	}
	if !cfg.Resume {
		out, err = t.openResults(t.env)
	} else {
		out, err = t.resumeResults(t.env, held)
	}
	if err == nil {
		cfg.Run = out.run
	}
	return out, held, err
}

// claimTrace finds out before any work whether there may be a trace, which the run itself makes.
func (t *trainer) claimTrace() error {
	if t.cfg.Trace == "" {
		return nil
	}
	return orOverwrite(t.files().Claim("--trace", t.cfg.Trace))
}

// orResume adds the ways out to the refusal of a folder that holds a checkpoint.
func orResume(err error) error {
	if held := (*sched.HeldError)(nil); errors.As(err, &held) {
		return fmt.Errorf(
			"--checkpoint %w; --resume goes on from it, --overwrite replaces it, or name another folder",
			err)
	}
	return err
}

// observer shows how a run goes.
func (e *env) observer() report.Observer {
	return report.Observer{
		Step: func(stage string, done,
			total int) {
			e.ui.Progress(stage, int64(done), int64(total))
		},
		Note: e.note,
	}
}

// showFaults reports how often each injected fault struck.
func showFaults(e *env, set *ssdSet, out *results) {
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
func tierLine(r report.EpochResult) string {
	gpu, cpu, ssd := r.Tiers()
	rows := gpu + cpu + ssd
	s := fmt.Sprintf("rows: GPU %s, CPU %s, SSD %s", share(gpu, rows), share(cpu, rows),
		share(ssd, rows))
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
func epochsOf(r *report.Result) (sum report.EpochResult, seconds float64) {
	var needed float64 // bytes of the rows that had to come from SSD
	for _, p := range r.Epochs {
		sum.RowsGPU += p.RowsGPU
		sum.RowsCPU += p.RowsCPU
		sum.RowsSSD += p.RowsSSD
		sum.RowsLoaded += p.RowsLoaded
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

// pathRows are the lines of a summary about where rows came from and how well the stages
// overlapped.
func pathRows(sum report.EpochResult, seconds float64) [][]string {
	gpu, cpu, ssd := sum.Tiers()
	all := gpu + cpu + ssd
	rows := [][]string{
		{"hit ratio", fmt.Sprintf("GPU tier %s, CPU tier %s; from SSD %s of %s rows",
			share(gpu, all), share(cpu, all), share(ssd, all),
			units.FormatCount(float64(all)))},
		{"SSDs in training", fmt.Sprintf("%s in %s commands: %s/s, %s IOPS over the training time",
			units.FormatBytes(sum.BytesSSD), units.FormatCount(float64(sum.SSDCommands)),
			units.FormatBytes(int64(float64(sum.BytesSSD)/seconds)),
			units.FormatCount(float64(sum.SSDCommands)/seconds))},
		{"overlap", fmt.Sprintf("%.2f; training waited %.0f%% of the time", sum.Overlap,
			100*sum.Stall)},
	}
	if n := sum.LinesInserted; n > 0 && sum.StageSeconds.Inspect > 0 {
		rows = append(rows, []string{"rows moved", fmt.Sprintf(
			"%s into a tier or between them, as the superbatches' changes have it",
			units.FormatCount(float64(n)))})
	} else if n += sum.LinesBypassed; n > 0 {
		rows = append(rows,
			[]string{"GPU tier's lines",
				fmt.Sprintf("%s taken in, %s let go for them, %s found no place",
					units.FormatCount(float64(sum.LinesInserted)),
					units.FormatCount(float64(sum.LinesEvicted)),
					units.FormatCount(float64(sum.LinesBypassed)))})
	}
	if sum.ReadGroups > 0 {
		rows = append(rows,
			[]string{"merged reads", fmt.Sprintf("%s sets of %.1f mini-batches in the mean",
				units.FormatCount(float64(sum.ReadGroups)), sum.GroupBatches)})
	}
	if t := sum.TopologyReads; t != nil {
		rows = append(rows,
			[]string{"topology",
				fmt.Sprintf(
					"%s of %s neighbours drawn from lists in memory; %s in %s reads from storage, sampling waited %.3g s for them",
					share(t.CachedEdges, t.Edges), units.FormatCount(float64(t.Edges)),
					units.FormatBytes(t.Bytes), units.FormatCount(float64(t.Reads)),
					t.Wait.Seconds())})
	}
	return rows
}

// runInfoRows are the lines of a summary about how a GPU got at its rows and computed; none where
// there is nothing to say.
func runInfoRows(r report.RunInfo) (rows [][]string) {
	for _, t := range gpuio.Together(r.MemoryRungTried) {
		rows = append(rows, []string{"not " + t.Rung, t.Why})
	}
	if r.Precision != cuda.FP32.String() || r.BLAS != plan.BLASOff {
		by := "our kernels"
		if r.BLAS != plan.BLASOff {
			by = r.BLAS
		}
		rows = append(rows, []string{"products", fmt.Sprintf("%s by %s", r.Precision, by)})
	}
	if r.Shards > 1 {
		rows = append(rows, []string{"steps", fmt.Sprintf("of %d mini-batches", r.Shards)})
	}
	if r.Replicas > 1 {
		rows = append(rows, []string{"replicas", fmt.Sprintf(
			"%d; beside the first on %s; gradients added by %s", r.Replicas,
			strings.Join(r.MoreDevices, ", "), r.Reduce)})
	}
	if m, err := graph.FindMethod(r.Sampler); err == nil && m.Title != "" {
		title := m.Title
		if r.BatchDependency > 1 {
			title += fmt.Sprintf(", %d batches share draws", r.BatchDependency)
		}
		rows = append(rows, []string{"sampler", title})
	}
	if r.SampleEpochs > 0 {
		s := fmt.Sprintf("of %d epochs, in turns", r.SampleEpochs)
		if r.Refresh > 0 {
			s += fmt.Sprintf("; %d sampled anew after every %d epochs", r.Refresh, r.RefreshEvery)
		}
		rows = append(rows, []string{"samples", s})
	}
	if s := r.Superbatch; s != nil {
		rows = append(rows, []string{"superbatches", superbatchText(s)})
	} else if r.Policy != "" && r.Policy != plan.PolicyStatic {
		rows = append(rows,
			[]string{"GPU tier",
				fmt.Sprintf("policy %s, lines of %s, window %d; the policy keeps %s of them",
					r.Policy, units.FormatBytes(r.CacheLineBytes), r.Window,
					units.FormatBytes(r.PolicyBytes))})
	}
	if c := r.Checks; c != nil {
		rows = append(rows, []string{"checked", strings.Join(c.Checked, "; ")})
		if len(c.NotChecked) > 0 {
			rows = append(rows, []string{"not checked", strings.Join(c.NotChecked, "; ")})
		}
	}
	if r.Accumulator != nil {
		rows = append(rows, []string{"accumulator", strings.TrimPrefix(r.Accumulator.String(),
			"accumulator: ")})
	}
	if s := r.Seal; s != nil {
		how := "held against the seal when they are opened"
		if r.Topology == plan.TopologySSD {
			how += ", neighbour lists page by page as they are read"
		}
		if !s.Sealed {
			how = "not sealed: what changed in them since the dataset was made is not found"
		} else if s.CheckedBytes > 0 {
			how += fmt.Sprintf(" (%s by now, %.3f s of all cores together)",
				units.FormatBytes(s.CheckedBytes), s.Seconds)
		}
		rows = append(rows, []string{"dataset files", how})
	}
	if p := r.Packed; p != nil {
		rows = append(rows, packedRows(p)...)
	}
	if m := r.Mega; m != nil {
		rows = append(rows, megaRows(m)...)
	}
	if r.Hotness != nil {
		rows = append(rows, []string{"hotness", r.Hotness.String()})
	}
	if t := r.TopologyStorage; t != nil {
		rows = append(rows,
			[]string{"topology",
				fmt.Sprintf("on storage; in memory offsets of %s and %s lists of hot nodes in %s",
					units.FormatBytes(t.OffsetBytes), units.FormatCount(float64(t.CacheLists)),
					units.FormatBytes(t.CacheBytes))})
	}
	if t := r.Tuned; t != nil {
		flags := t.Flags
		if flags == "" {
			flags = "nothing gained enough: all stays as it was"
		}
		rows = append(rows, []string{"tuned", fmt.Sprintf("%s (%s, %d mini-batches)", flags,
			t.Level, t.Batches)})
		if t.Skipped != "" {
			rows = append(rows, []string{"not tuned", t.Skipped})
		}
	}
	if r.GPUCacheShrunkBytes > 0 {
		rows = append(rows,
			[]string{"GPU tier", fmt.Sprintf("gave back %s when the device's memory ran out",
				units.FormatBytes(r.GPUCacheShrunkBytes))})
	}
	return rows
}

// superbatchText tells what sampling ahead took.
func superbatchText(s *report.SuperbatchInfo) string {
	text := fmt.Sprintf(
		"%d of up to %d mini-batches: sampled in %.3g s, inspected in %.3g s, %.3g s more beside training",
		s.Superbatches, s.Batches, s.SampleSeconds, s.InspectSeconds, s.ChangeSeconds)
	if s.FillSeconds > 0 {
		text += fmt.Sprintf(", first rows read in %.3g s", s.FillSeconds)
	}
	return text + fmt.Sprintf("; files of %s, inspection in %s", units.FormatBytes(s.FileBytes),
		units.FormatBytes(s.InspectBytes))
}

// packedRows say what was laid out before training, and what that took.
func packedRows(p *report.PackedInfo) [][]string {
	when := "prepared"
	if p.Reused {
		when = "reused; prepared once"
	}
	where := ""
	if p.Dir != "" {
		where = " in " + p.Dir
	}
	pages := ""
	if p.PagesOn == plan.PagesSSDs {
		pages = " (" + units.FormatBytes(p.PagesBytes) + " of them pages on the SSDs)"
	}
	return [][]string{
		{"packed", fmt.Sprintf("%d mini-batches of %d sample epochs%s, segments of %d; %s in %.3g s (sampling %.3g s, planning %.3g s, packing %.3g s)",
			p.Batches, p.SampleEpochs, where, p.Segment, when, p.Seconds, p.SampleSeconds,
			p.PlanSeconds, p.PackSeconds)},
		{"packed rows", fmt.Sprintf("%s stay in memory, %s in disk caches, %s in chunks; %s on disk%s, read at %.3f times what is needed, %s at a time",
			units.FormatCount(float64(p.RowsMemory)), units.FormatCount(float64(p.RowsDiskCache)),
			units.FormatCount(float64(p.RowsChunks)), units.FormatBytes(p.DiskBytes), pages,
			p.Amplification, units.FormatBytes(int64(p.RequestBytes)))},
	}
}

// partsRows say what parts there are on disk.
func partsRows(m *report.MegaInfo) [][]string {
	when := "reused"
	if !m.Reused {
		when = fmt.Sprintf("made in %.3g s", m.LayoutSeconds)
	}
	in := "in " + m.Dir
	if m.Dir == "" {
		in, when = "on the SSDs", "taken to be there"
	}
	return [][]string{{"parts", fmt.Sprintf("%d %s, %s: %s in pages of %s; up to %d at a time have room in %s",
		m.Parts, in, when, units.FormatBytes(m.DiskBytes), units.FormatBytes(m.PageBytes),
		m.Loaded, units.FormatBytes(m.Budget))}}
}

// megaRows say what a run trained on of its parts, and what loading them took.
func megaRows(m *report.MegaInfo) [][]string {
	passes := "1 pass"
	switch {
	case m.Passes == 0:
		passes = "passes not chosen yet"
	case m.Passes > 1:
		passes = fmt.Sprintf("%d passes", m.Passes)
	}
	if m.PassesAuto && m.Passes > 0 {
		passes += " (chosen)"
	}
	static := "no static nodes"
	if m.StaticRows > 0 {
		static = units.FormatCount(float64(m.StaticRows)) + " static nodes"
		if m.StaticOnGPU {
			static += " (rows in the GPU tier)"
		}
	}
	rows := append(partsRows(m), []string{"in memory", fmt.Sprintf("%d of %d parts, %s, %s over each",
		m.Loaded, m.Parts, static, passes)})
	if m.MegaBatches > 0 {
		rows = append(rows, []string{"mega-batches", fmt.Sprintf(
			"%d loaded in %.3g s, %.3g s of them to induce topologies (%d while others trained; training waited %d times, %.3g s): %s of rows, %s of edges, %s of static nodes, %s a request",
			m.MegaBatches, m.LoadSeconds, m.InduceSeconds, m.Ahead, m.Waits, m.WaitSeconds,
			units.FormatBytes(m.FeatureBytes), units.FormatBytes(m.EdgeBytes),
			units.FormatBytes(m.StaticBytes), units.FormatBytes(int64(m.RequestBytes)))})
	}
	return rows
}

// memoryText says what lies in memory for the whole run.
func memoryText(r *report.Result) string {
	text := fmt.Sprintf("GPU tier %s, CPU tier %s, topology %s",
		units.FormatBytes(r.GPUCacheBytes), units.FormatBytes(r.CPUCacheBytes),
		units.FormatBytes(r.TopologyBytes))
	if r.ScaleBytes > 0 {
		text += ", scales of rows " + units.FormatBytes(r.ScaleBytes)
	}
	return text
}

// showResult is the summary for people.
func showResult(e *env, r *report.Result, w *watch) {
	sum, seconds := epochsOf(r)
	rows := [][]string{
		{"mode", fmt.Sprintf("%s, %s on %s; I/O stack %s, pipeline %s, memory rung %s", r.Mode,
			r.Model, r.Device, r.IOStack, r.Pipeline, r.MemoryRung)},
	}
	rows = append(rows, runInfoRows(r.RunInfo)...)
	rows = append(rows,
		[]string{"rows", fmt.Sprintf("%s, stored as %s", units.FormatBytes(r.RowBytes),
			r.RowDType)})
	if r.TestAcc != nil {
		rows = append(rows,
			[]string{"test accuracy", fmt.Sprintf("%.2f%% (at epoch %d, the best in validation)",
				100**r.TestAcc, r.BestEpoch)})
	}
	if seconds > 0 {
		rows = append(append(rows, pathRows(sum, seconds)...), w.besideRows(r.IO)...)
	}
	if r.RowsVerified != nil {
		rows = append(rows,
			[]string{"verified",
				fmt.Sprintf("%d gathered rows, each equal to what the feature function says",
					*r.RowsVerified)})
	}
	rows = append(rows,
		[]string{"memory", fmt.Sprintf("peak %s; ", units.FormatBytes(r.PeakMemoryBytes)) +
			memoryText(r)},
		[]string{"parameters", "sha256 " + r.ParamsSHA256})
	if r.Checkpoint != "" {
		rows = append(rows, []string{"checkpoint", r.Checkpoint})
	}
	e.ui.Facts(append(rows, ioRows(r.IO)...))
	showSSDs(e, r.IO)
}
