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

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/htmlreport"
	figures "helios/internal/metrics"
	"helios/internal/units"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

func trainCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "train",
		Usage:     "train a model, its features read from the SSDs",
		ArgsUsage: "[DATASET]",
	}, 1, trainOptions(), runTrain)
}

// trainerArgs holds the options of train.
type trainerArgs struct {
	runArgs
	clockArgs
	ranks   rankArgs `options:"in"`
	seeds   []uint64 `option:"seeds" group:"Run" use:"setting" shown:"one run, with {seed}" arg:"S,A..B" usage:"train once with each seed of S,A..B, the last from A to B, and give mean and deviation of their figures; each has its checkpoint in a folder of {checkpoint}"`
	explain bool     `option:"explain" group:"Run" use:"aside" usage:"print the steps of a mini-batch before training: what each does, waits for and runs on; and afterwards the processor time of each"`
	live    bool     `option:"live" group:"Run" use:"aside" usage:"show stages, tiers, SSDs and loss while it runs, drawn over on a terminal"`
	serve   string   `option:"serve" also:"metrics" group:"Run" use:"aside" shown:"none" arg:"ADDR" usage:"serve a page that follows the run, and /metrics for Prometheus, on ADDR while it runs, such as :9100; without a host on this machine only"`
}

// SetOption reads seeds.
func (a *trainerArgs) SetOption(name, text string) (done bool, err error) {
	if name != "seeds" {
		return false, nil
	}
	a.seeds, err = parseSeeds(text)
	return true, err
}

func trainOptions() hcli.Options[trainerArgs] {
	return hcli.Of[trainerArgs]().Without("other-dataset")
}

// trainer trains a model.
type trainer struct {
	*env
	*trainerArgs
}

// check completes the configuration and refuses what cannot be, before anything is opened.
func (a *trainerArgs) check() error {
	a.cfg.Overwrite = a.overwrite
	a.orAuto()
	if a.cfg.CheckpointEvery > 0 && a.cfg.CheckpointDir == "" {
		return errs.New(errs.Usage,
			"{checkpoint-every} needs {checkpoint} DIR, the folder to write to")
	}
	return sched.Check(a.cfg)
}

func runTrain(ctx context.Context, e *env, a *trainerArgs) error {
	if err := a.check(); err != nil {
		return err
	}
	hw, virtual, err := a.hardware(e, append(notVirtual(&a.runArgs), &a.faults,
		&a.cfg.CheckpointDir, &a.cfg.CheckpointEvery, &a.cfg.Resume, &a.cfg.Reduce,
		&a.cfg.Metric, &a.cfg.Patience, &a.cfg.MinDelta,
		&a.serve, &a.live, &a.ranks.wait, &a.ranks.library, &a.ranks.secretFile,
		&a.ranks.insecure, &a.ranks.listen))
	if err != nil {
		return err
	}
	t := &trainer{e, a}
	switch {
	case len(a.seeds) > 0:
		return t.trainSeeds(ctx)
	case !virtual:
		return t.train(ctx)
	}
	if a.cfg.VerifyRows {
		return errs.New(errs.Usage,
			"{verify-rows}: no row is gathered on the virtual clock; leave one of the two out")
	}
	if err := e.oneProcess(); err != nil {
		return err
	}
	return t.trainVirtual(ctx, hw)
}

// train trains in wall time.
func (t *trainer) train(ctx context.Context) (err error) {
	e, a := t.env, t.trainerArgs
	group, err := t.joinRanks(ctx)
	if err != nil {
		return err
	}
	if group != nil {
		defer func() { leaveRanks(group, &err) }()
	}
	m, err := t.openPage()
	if err != nil {
		return err
	}
	defer closing(&err, m.close)
	out, held, err := t.openRun()
	if err != nil {
		return err
	}
	out.follow(m)
	defer out.end(&err)
	s, err := openSession(ctx, e, &a.runArgs)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	s.Group = group
	if a.cfg, err = sched.Choose(ctx, a.cfg, s.Inputs, e.observer()); err != nil {
		return err
	}
	if err := out.start(held); err != nil {
		return err
	}

	target := prepare.TargetOf(s.Dataset)
	if a.cfg, err = a.cfg.ForTarget(target); err != nil {
		return err
	}
	w := newWatch(t)
	w.numbers = target == figures.Numbers
	obs := w.observer()
	obs.Epoch = func(r report.EpochResult) {
		w.ended(r)
		out.event("epoch", r)
		t.showEpoch(&r)
	}
	obs.Plan = t.showPlan(out)
	if m != nil {
		m.about(map[string]string{"run": out.run, "mode": cmp.Or(a.cfg.Mode, plan.DefaultMode),
			"dataset": s.Inputs.Dataset.Meta.Name, "version": programVersion()})
		m.numbers, w.page = w.numbers, m.page
		obs = m.watch(obs)
	}
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
	showCPU(e, res.Epochs, w.fastest)
	out.event("result", res)
	return nil
}

// openPage begins to serve what --serve asks for; nil: nothing.
func (t *trainer) openPage() (*metrics, error) {
	if t.serve == "" {
		return nil, nil
	}
	m, err := serveMetrics("serve", t.serve, htmlreport.NewLive(t.env.c.Args().First(), programVersion()))
	if err == nil {
		t.env.ui.Note("this run: http://%s/; for Prometheus: http://%s/metrics", m.addr, m.addr)
	}
	return m, err
}

// showEpoch shows what an epoch came to.
func (t *trainer) showEpoch(r *report.EpochResult) {
	val := ""
	if r.ValAcc != nil {
		val = fmt.Sprintf(", val %.2f%%", 100**r.ValAcc)
	}
	if m := figures.Find(t.cfg.Metric); r.ValMetrics != nil {
		val += fmt.Sprintf(", %s %s", m.Name, figures.Text(m.Of(r.ValMetrics)))
	}
	if usual := (plan.Config{}).WithDefaults().ScheduleSettings; r.GradNorm != nil &&
		t.cfg.WithDefaults().ScheduleSettings != usual {
		val += fmt.Sprintf(", lr %.3g, gradient norm %.3g", r.LR, *r.GradNorm)
	}
	train := ""
	if r.TrainAcc != nil {
		train = fmt.Sprintf(", train %.2f%%", 100**r.TrainAcc)
	}
	t.env.ui.Printf("epoch %d: loss %.4f%s%s, %.2f s; %s", r.Epoch, r.Loss, train, val, r.Seconds,
		tierLine(*r))
}

// openRun looks after what the run leaves before any work is done: its checkpoint folder and
// the results. held is what the folder holds that the run goes on from, nil where there is nothing.
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
				"{checkpoint}: folder %s %s, in %s alone, which no run can go on from; {overwrite} replaces it, or name another folder",
				cfg.CheckpointDir, held, filepath.Base(held.Path))
		}
		held = nil
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

// orResume adds the ways out to the refusal of a folder that holds a checkpoint.
func orResume(err error) error {
	if held := (*sched.HeldError)(nil); errors.As(err, &held) {
		return errs.Errorf(
			"{checkpoint} %w; {resume} goes on from it, {overwrite} replaces it, or name another folder",
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

// tierLine has the sources of an epoch's rows and the overlap of its stages.
func tierLine(r report.EpochResult) string {
	gpu, cpu, ssd := r.RowsGPU, r.RowsCPU, r.RowsSSD
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
	gpu, cpu, ssd := sum.RowsGPU, sum.RowsCPU, sum.RowsSSD
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

// runInfoRows are the lines of a summary on devices, sampling, tiers and what was checked; none
// where there is nothing to say.
func runInfoRows(r report.RunInfo) [][]string {
	return slices.Concat(computeRows(r), samplingRows(r), tierRows(r), dataRows(r), layoutRows(r),
		tunedRows(r))
}

// computeRows are the lines on the device's memory, the products and the devices that train.
func computeRows(r report.RunInfo) (rows [][]string) {
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
	return rows
}

// samplingRows are the lines on what mini-batches hold.
func samplingRows(r report.RunInfo) (rows [][]string) {
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
	return rows
}

// tierRows are the lines on what changes the tiers.
func tierRows(r report.RunInfo) [][]string {
	if r.CacheLineBytes == 0 {
		return nil
	}
	return [][]string{{"GPU tier",
		fmt.Sprintf("policy %s, lines of %s, window %d; the policy keeps %s of them",
			r.Policy, units.FormatBytes(r.CacheLineBytes), r.Window,
			units.FormatBytes(r.PolicyBytes))}}
}

// dataRows are the lines on checks of what was read.
func dataRows(r report.RunInfo) (rows [][]string) {
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
	return rows
}

// layoutRows are the lines on what lies where.
func layoutRows(r report.RunInfo) (rows [][]string) {
	rows = r.SystemRows()
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
	return rows
}

// tunedRows are the lines on what a run changed in its own settings.
func tunedRows(r report.RunInfo) (rows [][]string) {
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

// memoryText lists the memory that a run holds to its end.
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
			[]string{"test accuracy", fmt.Sprintf("%.2f%% (at epoch %d, the best in validation%s)",
				100**r.TestAcc, r.BestEpoch, byMetric(r.Metric))})
	}
	if r.TestAcc == nil && r.TestMetrics != nil {
		rows = append(rows, []string{"test",
			fmt.Sprintf("%d nodes (at epoch %d, the best in validation%s)", r.TestMetrics.Nodes,
				r.BestEpoch, byMetric(r.Metric))})
	}
	rows = append(rows, metricRows(r.TestMetrics, nil)...)
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
