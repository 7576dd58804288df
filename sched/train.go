package sched

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"helios/gnn"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/metrics"
	"helios/internal/options"
	"helios/sched/checkpoint"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Adam's constants (Kingma and Ba, ICLR 2015), which every framework defaults to.
const (
	beta1   = 0.9
	beta2   = 0.999
	epsilon = 1e-8
)

// Train runs cfg.Epochs epochs. After each, the validation nodes are classified with sampled
// neighbours; the result's test accuracy is that of the parameters after the earliest epoch
// with the best figure of validation (cfg.Metric), while params_sha256 is of the parameters after
// the last. Training ends earlier where cfg.Patience says so.
//
// When ctx ends, the current step is finished, a checkpoint is saved where a folder was given,
// and the error has class errs.Interrupted; the Result then holds the epochs that were whole.
// After a failed read the error has class errs.Device, nothing was trained on the rows, the
// last checkpoint stays as it was, and the Result has the figures of each SSD.
func Train(ctx context.Context, cfg plan.Config, in prepare.Inputs,
	obs report.Observer) (res *report.Result, err error) {
	if cfg, err = Choose(ctx, cfg, in, obs); err != nil {
		return nil, err
	}
	peak := hostmem.StartPeakMeter(peakEvery)
	defer peak.Stop()
	t, err := newTrainer(cfg, in, obs)
	if err != nil {
		return nil, err
	}
	if t.path != "" {
		lock, locked := checkpoint.LockDir(t.cfg.CheckpointDir)
		if locked != nil {
			return nil, locked
		}
		defer func() { err = errors.Join(err, lock.Unlock()) }()
	}
	from, err := t.findState(ctx, in)
	if err != nil {
		return nil, err
	}
	e, err := newRunner(ctx, t.cfg.ForTuning(), in, obs, t.state.Print.modelConfig())
	if err != nil {
		return &report.Result{IO: e.Store.IO()}, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	t.e = e
	e.Targets.Fit = t.state.Print.Fit
	e.Config.Depth = t.cfg.Depth
	e.Replan()
	if err := t.takeUp(ctx, in, from); err != nil {
		return nil, err
	}
	tellChoice(&t.cfg, obs)
	res = t.describe(from != nil)
	if t.cfg.InMemory() && (t.cfg.CPUCache.Bytes > 0 || t.cfg.CPUCache.Percent > 0) {
		obs.TellNote("%s keeps every row in memory: {cpu-cache} has no effect", t.cfg.Mode)
	}
	obs.TellPlan(e.Operators(e.Store.Reader != nil))
	err = t.run(ctx, in)
	if err == nil {
		err = t.agreeOnEnd(ctx, in)
	}
	res.Epochs, res.IO, res.RowsVerified, res.RunInfo = t.state.Epochs, e.Store.IO(),
		e.Verify.Verified(), e.info()
	res.GPUCacheBytes, res.CPUCacheBytes = e.Tiers.GPUBytes(), e.Tiers.CPUBytes()
	res.Kernels = e.Device.Info().Loaded() // a cubin that did not load shows with its first kernel
	res.PeakMemoryBytes = peak.Peak()
	if err != nil {
		return res, err
	}
	if res.Memory, err = hostmem.Uses(); err != nil {
		return res, err
	}
	res.BestEpoch, res.TestAcc, res.TestMetrics = t.state.BestEpoch+1, t.testAcc, t.testMetrics
	res.ParamsSHA256 = t.sha
	return res, nil
}

// newTrainer settles a run's configuration.
func newTrainer(cfg plan.Config, in prepare.Inputs, obs report.Observer) (*trainer, error) {
	if in.Group != nil {
		cfg.Rank, cfg.Ranks = in.Group.Rank(), in.Group.Size()
	}
	cfg, err := cfg.Filled()
	if err != nil {
		return nil, err
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	if cfg, err = cfg.ForTarget(prepare.TargetOf(in.Dataset)); err != nil {
		return nil, err
	}
	print, err := fingerprintOf(cfg, in, obs)
	if err != nil {
		return nil, err
	}
	t := &trainer{cfg: cfg, obs: obs, bestSaved: -1, metric: metrics.Find(cfg.Metric), state: state{
		Print: print, BestEpoch: -1,
	}}
	if cfg.CheckpointDir != "" && cfg.Rank == 0 {
		t.path = filepath.Join(cfg.CheckpointDir, checkpointName)
	}
	return t, nil
}

// findState has all ranks begin at one position: that of the checkpoint to resume from, which is
// returned, or a run's begin in a folder that holds nothing.
func (t *trainer) findState(ctx context.Context, in prepare.Inputs) (from *checkpoint.File,
	err error) {
	if err := t.agree(ctx, in); err != nil {
		return nil, err
	}
	if t.cfg.Resume {
		if t.cfg.Rank == 0 {
			if from, err = t.find(in); err != nil {
				return nil, err
			}
		}
		if from, err = t.share(ctx, in, from); err != nil {
			return nil, err
		}
	} else if t.path != "" && !t.cfg.Overwrite {
		held, err := HeldIn(t.cfg.CheckpointDir)
		if err != nil {
			return nil, err
		}
		if held != nil {
			return nil, errs.With(errs.Refused, &HeldError{t.cfg.CheckpointDir, held})
		}
	}
	t.state.Run = cmp.Or(t.state.Run, t.cfg.Run)
	t.state.Name = in.Dataset.Meta.Name
	return from, nil
}

// takeUp settles what the rows and the device decide, and restores the checkpoint from, if any.
func (t *trainer) takeUp(ctx context.Context, in prepare.Inputs,
	from *checkpoint.File) (err error) {
	e := t.e
	if from != nil {
		if was := t.state.Print.rowType(); was != e.RowType.String() {
			return errs.New(errs.Usage,
				"checkpoint %s was made with row-dtype %s, the SSDs hold rows of %s; run \"heliosctl load --dataset %s --row-dtype %s\", or give another folder for {checkpoint}",
				t.path, was, e.RowType, in.Dataset.Dir(), was)
		}
		if s := t.state.Print.rounding(e.arithmetic()); s != "" {
			t.obs.TellNote("checkpoint %s %v", t.path, s)
		}
	}
	if err := t.settleParts(from != nil); err != nil {
		return err
	}
	t.state.Print.setRowType(e.RowType)
	t.state.Print.Kernels = e.arithmetic()
	t.state.Print.Rounding = gnn.Rounding(t.cfg.Model)
	if err := t.agree(ctx, in); err != nil || from == nil {
		return err
	}
	if t.best, err = restore(ctx, t.path, from, t.state, e.copier, e.model); err != nil {
		return err
	}
	if err := e.restoreReplicas(ctx); err != nil {
		return err
	}
	// A kill may have come between the checkpoint and the best epoch's own file.
	return t.saveBest()
}

// describe begins a run's result.
func (t *trainer) describe(resumed bool) *report.Result {
	e := t.e
	res := &report.Result{
		Mode: t.cfg.Mode, Model: t.cfg.Model, Dataset: t.state.Name, Seed: t.cfg.Seed,
		Metric: t.metric.Name,
		Device: e.Device.Info().Name, Kernels: e.Device.Info().Loaded(), IOStack: e.Store.Stack(),
		RunInfo: e.info(), Pipeline: t.cfg.Pipeline,
		RowDType: e.RowType.String(), RowBytes: e.RowBytes,
		GPUCacheBytes: e.Tiers.GPUBytes(),
		CPUCacheBytes: e.Tiers.CPUBytes(),
		TopologyBytes: e.Topology.Bytes(), ScaleBytes: e.ScaleBytes(),
		PresampleSecs: e.PresampleTime.Seconds(),
		FillSeconds:   e.Fill.Seconds(),
		Checkpoint:    t.path,
	}
	if resumed {
		res.ResumedAt = fmt.Sprintf("epoch %d batch %d", t.state.Epoch+1, t.state.Batch)
	}
	return res
}

const peakEvery = 20 * time.Millisecond

// fingerprintOf is that of a configuration for the dataset's target (plan.Config.ForTarget).
func fingerprintOf(c plan.Config, in prepare.Inputs, obs report.Observer) (f fingerprint,
	err error) {
	m := in.Dataset.Meta
	f.printedFacts = printedFacts{Dataset: m.UUID, Edges: m.Edges, InDim: m.Dim,
		Classes: m.Classes, Draws: drawsByBatch}
	options.CopyPrinted(&f.Config, &c)
	if c.RateSchedule().Ends() {
		f.Horizon = c.Epochs
	}
	f.Fit, err = prepare.FitOf(c, in.Dataset, obs.TellNote)
	return f, err
}

// modelConfig is the model of a run.
func (f *fingerprint) modelConfig() gnn.ModelConfig {
	m := f.ModelConfig()
	m.InDim, m.Classes, m.Seed = f.InDim, f.Classes, f.Seed
	m.Weights = f.Weights
	if m.Loss == "" && f.Target != "" {
		m.Loss, _ = gnn.LossFor(f.Target, "") // each target has one
	}
	return m
}

// trainer is a run of Train: the engine and the position.
type trainer struct {
	cfg   plan.Config
	obs   report.Observer
	e     *runner
	path  string // checkpoint, "" for none
	saves bool   // rank 0 has one
	state state
	best  tensors // parameters of the best epoch so far
	// bestSaved is the best epoch, counted from 1, whose parameters bestName holds; -1 before this
	// run has looked after it.
	bestSaved int

	// train are the nodes that an epoch trains on, val and test those that are classified behind
	// one and behind the last one; none: nothing is.
	train, val, test []int64

	metric      metrics.Metric // that chooses the best epoch
	testAcc     *float64
	testMetrics *metrics.Report
	sha         string
}

// find reads the checkpoint to resume from and checks that it is of this run.
func (t *trainer) find(in prepare.Inputs) (*checkpoint.File, error) {
	path, ok, err := findCheckpoint(t.cfg.CheckpointDir)
	if err != nil {
		return nil, err
	}
	if !ok {
		if held, err := HeldIn(t.cfg.CheckpointDir); err != nil {
			return nil, err
		} else if held != nil && !t.cfg.Overwrite {
			return nil, errs.With(errs.Refused, &HeldError{Dir: t.cfg.CheckpointDir, Held: held})
		}
		t.obs.TellNote("no checkpoint in %s yet: starting at epoch 1", t.cfg.CheckpointDir)
		return nil, nil
	}
	f, err := checkpoint.Load(path)
	if err != nil {
		return nil, err
	}
	st, err := decodeState(path, f)
	if err != nil {
		return nil, err
	}
	t.keepLoops(path, &st.Print)
	if field, is, was, ok := t.state.Print.differs(st.Print); ok && field == "draws" {
		return nil, errs.New(errs.Usage,
			"checkpoint %s was made with neighbours drawn by %v, this program draws them by %v: the run would be another from here on; start anew in another folder for {checkpoint}, or finish it with the heliosctl that began it (eval and predict read it as it is)",
			path, was, is)
	} else if ok {
		return nil, errs.New(errs.Usage,
			"checkpoint %s was made with %s %v, this run has %v; give the same, or another folder for {checkpoint}",
			path, field, was, is)
	}
	if err := resumeWithin(&t.cfg, path, st.Print.Mega); err != nil {
		return nil, err
	}
	if st.Epoch > t.cfg.Epochs {
		return nil, errs.New(errs.Usage,
			"checkpoint %s has %d epochs behind it, {epochs} asks for %d; give at least as many",
			path, st.Epoch, t.cfg.Epochs)
	}
	if why := st.misplaced(int(in.Dataset.Meta.Train)); why != "" {
		return nil, errs.New(errs.Device, "checkpoint %s: %s; give an intact one, or train anew",
			path, why)
	}
	unsealed(path, f, t.obs)
	t.state = st
	return f, nil
}

// keepLoops lets the run of a program that knew no remaining self loops go on as it began, where
// nothing else was asked for.
func (t *trainer) keepLoops(path string, was *fingerprint) {
	if t.cfg.LoopsGiven || was.Model != t.cfg.Model || was.SelfLoops != gnn.LoopsAlways ||
		t.cfg.SelfLoops != gnn.LoopsRemaining {
		return
	}
	t.cfg.SelfLoops, t.state.Print.SelfLoops = gnn.LoopsAlways, gnn.LoopsAlways
	t.obs.TellNote("checkpoint %s was made with {self-loops} %s, and so it goes on", path,
		gnn.LoopsAlways)
}

// unsealed notes that an older checkpoint has no checksum.
func unsealed(path string, f *checkpoint.File, obs report.Observer) {
	if !f.Sealed {
		obs.TellNote(
			"checkpoint %s is of an older version: its header has no checksum, so damage there may go unnoticed; a resumed run writes it anew with one",
			path)
	}
}

// run goes from the state's position to the end.
func (t *trainer) run(ctx context.Context, in prepare.Inputs) (err error) {
	if t.train, err = prepare.TrainSplit(in); err != nil {
		return err
	}
	val, err := in.Dataset.Split("val")
	if err != nil {
		return err
	}
	if t.cfg.Patience > 0 && len(val) == 0 {
		return errs.New(errs.Usage,
			"{patience} looks at validation, and dataset %s has no validation nodes; leave it out",
			in.Dataset.Meta.Name)
	}
	if t.cfg.RateSchedule().Plateau() > 0 && len(val) == 0 {
		return errs.New(errs.Usage,
			"{lr-schedule} %s looks at validation, and dataset %s has no validation nodes; choose another",
			t.cfg.LRSchedule, in.Dataset.Meta.Name)
	}
	if !t.cfg.NoEval {
		t.val = val
		if t.test, err = in.Dataset.Split("test"); err != nil {
			return err
		}
	}
	if t.metric.Name != t.e.Targets.Kind.Default() {
		if err := undefined(t.metric, in.Dataset.Meta.Name, t.e.Targets, val); err != nil {
			return err
		}
	}
	// An epoch that was begun comes to its end, also where patience has become less.
	for t.state.Epoch < t.cfg.Epochs && (t.state.Batch > 0 || !t.impatient()) {
		ep := t.state.Epoch
		order := t.e.Tiers.Shuffled(t.train, t.cfg.SampleEpoch(ep))
		if err := t.epoch(ctx, ep, order); err != nil {
			return err
		}
	}
	op, cancel := t.e.OperatorContext(ctx)
	defer cancel()
	if t.sha, err = t.e.model.ParamsSHA256(); err != nil {
		return err
	}
	if len(t.test) == 0 || t.best == nil {
		return nil
	}
	if err := t.e.copier.setValues(op, t.e.model, t.best); err != nil {
		return err
	}
	r, figures, err := t.e.scored(ctx, t.e.evaluation("test", prepare.TestEpoch, t.test), t.test)
	if errs.ClassOf(err) == errs.Interrupted && t.path != "" {
		// The last epoch's checkpoint is there, and the model now holds the best epoch's
		// parameters: saving again would be wrong.
		return errs.New(errs.Interrupted,
			"stopped in the final test, all %d epochs are saved in %s; {resume} goes on from there (%w)",
			t.state.Epoch, t.path, err)
	}
	if err != nil {
		return err
	}
	t.testAcc, t.testMetrics = r.TrainAcc, figures
	return nil
}

// epoch trains what is left of epoch ep, validates and saves.
func (t *trainer) epoch(ctx context.Context, ep int, order prepare.Order) error {
	e, asked := t.e, ctx
	if e.others != nil { // a signal ends all ranks behind the same step
		var release func()
		ctx, release = e.others.together(ctx)
		defer release()
	}
	x, err := t.newTraining(ctx, ep, order)
	if err != nil {
		return err
	}
	begun := x.First
	e.others.begin()
	err = x.run(ctx)
	if x.Clock == nil { // before the first walk
		return err
	}
	cpu := report.CPUSince(x.Clock.CPU, hostcpu.Now(), hostcpu.Count(), x.First-begun)
	if err := x.count(err == nil || errs.ClassOf(err) == errs.Interrupted); err != nil {
		return err
	}
	if err != nil {
		return t.stopped(ctx, err)
	}
	r := e.result(t.state.Partial, ep)
	r.CPU = cpu
	if len(t.val) > 0 {
		if err := t.validate(asked, &r); err != nil {
			return t.stopped(ctx, err)
		}
	}
	if err := t.keepBest(ctx, &r); err != nil {
		return err
	}
	// Garbage of an epoch on Go's heap (a few hundred bytes a launch) must not add up over epochs
	// until the collector runs by itself. The heap is small, so this takes a few milliseconds.
	runtime.GC()
	rss, err := hostmem.ReadRSS()
	if err != nil {
		return err
	}
	r.MemoryBytes = rss.Counted()
	t.state.Epochs = append(t.state.Epochs, r)
	t.state.Epoch, t.state.Batch, t.state.Partial = ep+1, 0, report.Partial{}
	if err := t.save(ctx); err != nil {
		return err
	}
	t.obs.TellEpoch(r)
	return nil
}

// validate classifies the validation nodes behind an epoch.
func (t *trainer) validate(ctx context.Context, r *report.EpochResult) error {
	p := t.validation(r.Epoch - 1)
	p.Next = func() *engine.Pass { return t.next(r.Epoch-1, true) }
	if t.plain() {
		v, err := t.e.infer(ctx, p, nil)
		if err != nil {
			return err
		}
		r.ValAcc, r.ValLoss, r.ValSeconds = v.TrainAcc, &v.Loss, v.Seconds
		return nil
	}
	v, figures, err := t.e.scored(ctx, p, t.val)
	if err != nil {
		return err
	}
	r.ValAcc, r.ValLoss, r.ValSeconds = v.TrainAcc, &v.Loss, v.Seconds
	if figures != nil {
		r.ValMetrics = &figures.Summary
	}
	return nil
}

// next returns the mini-batches of the pass behind an epoch's training, or behind its validation;
// nil: none follows.
func (t *trainer) next(epoch int, validated bool) *engine.Pass {
	e := t.e
	switch {
	case !validated && len(t.val) > 0:
		return t.validation(epoch)
	case epoch+1 < t.cfg.Epochs:
		key := t.cfg.SampleEpoch(epoch + 1)
		return &engine.Pass{Epoch: key, Order: e.Tiers.Shuffled(t.train, key)}
	case len(t.test) > 0:
		return e.evaluation("test", prepare.TestEpoch, t.test)
	}
	return nil
}

// validation is the pass over the validation nodes behind an epoch.
func (t *trainer) validation(epoch int) *engine.Pass {
	return t.e.evaluation(validateStage, prepare.ValEpoch+epoch, t.val)
}

// plain reports whether the accuracy of classes chooses the best epoch: a pass counts it, without a
// judge.
func (t *trainer) plain() bool {
	return t.metric.Name == metrics.All[0].Name && !t.e.Targets.Dense()
}

// plateaus counts how often, in the epochs behind, validation was not better for as many epochs as
// the schedule says.
func (t *trainer) plateaus() (n int) {
	after := t.cfg.RateSchedule().Plateau()
	if after == 0 {
		return 0
	}
	t.waits(0, func(waited int) {
		if waited > 0 && waited%after == 0 {
			n++
		}
	})
	return n
}

// waits calls each behind every epoch, with the number of epochs since validation was better than
// before by more than margin.
func (t *trainer) waits(margin float64, each func(waited int)) {
	var best *float64
	waited := 0
	for i := range t.state.Epochs {
		score := t.state.Epochs[i].Score(t.metric)
		switch {
		case score == nil: // {no-eval} skipped its validation
			continue
		case best == nil || t.metric.Better(*score, *best, margin):
			best, waited = score, 0
		default:
			waited++
		}
		each(waited)
	}
}

// impatient reports whether the epochs behind are enough: the last ones, as many as patience asks
// for, were not better than those before.
func (t *trainer) impatient() bool {
	last := 0
	t.waits(t.cfg.MinDelta, func(waited int) { last = waited })
	return t.cfg.Patience > 0 && last >= t.cfg.Patience
}

// keepBest keeps the parameters of the epoch that has just ended, if it is the best so far. Without
// validation every epoch is as good as the one before it, so the last one counts.
func (t *trainer) keepBest(ctx context.Context, r *report.EpochResult) (err error) {
	score := r.Score(t.metric)
	if t.state.BestEpoch >= 0 && score != nil {
		was := t.state.Epochs[t.state.BestEpoch].Score(t.metric) // nil: of an epoch without
		if was != nil && !t.metric.Better(*score, *was, 0) {
			return nil
		}
	}
	op, cancel := t.e.OperatorContext(ctx)
	defer cancel()
	if t.best, err = t.e.copier.values(op, t.e.model); err != nil {
		return err
	}
	t.state.BestEpoch = t.state.Epoch
	if score != nil {
		t.state.BestAcc = *score
	}
	return nil
}

// training is an epoch's pass of training.
type training struct {
	*engine.Pass
	t     *trainer
	steps *steps
	base  report.Partial // as of the begin of this run
	edge  report.Partial // as of the last step's end
	whole int            // mini-batches of the pass whose steps have ended
}

// newTraining makes the pass over what is left of epoch ep.
func (t *trainer) newTraining(ctx context.Context, ep int, order prepare.Order) (*training, error) {
	e := t.e
	decoupled, err := gnn.Decoupled(t.cfg.Optimizer)
	if err != nil {
		return nil, err
	}
	p := &engine.Pass{Name: fmt.Sprintf("epoch %d", ep+1), Epoch: t.cfg.SampleEpoch(ep),
		Training: true, Number: ep, Order: order, First: order.Before(t.state.Batch),
		Sampler: e.Sampler, Together: e.others != nil,
		Stats: t.state.Partial}
	if f := t.cfg.OnBatch; f != nil {
		p.OnBatch = func(index int, mb *graph.MiniBatch) { f(ep, index, mb) }
	}
	x := &training{Pass: p, t: t, base: p.Stats, edge: p.Stats, whole: p.First}
	plateaus := t.plateaus()
	x.steps = e.newSteps(order, func(batch int) gnn.Step {
		return gnn.Step{
			Seed: t.cfg.Seed, Epoch: ep, Batch: batch,
			LR: x.rate(batch, plateaus), Beta1: beta1, Beta2: beta2, Eps: epsilon,
			WeightDecay: float32(t.cfg.WeightDecay),
			Decoupled:   decoupled, ClipNorm: float32(t.cfg.ClipNorm),
		}
	}, &p.Stats.StepFigures)
	p.Start = x.start
	p.Step = p.Start.Step
	// Whoever else asks for a batch's rows takes them together.
	p.InPlace = e.model.ReadsInPlace() && t.cfg.Shards <= 1 && len(e.replicas) <= 1 &&
		e.Wide == nil && e.Verify == nil && t.cfg.OnRows == nil
	if t.cfg.Shards > 1 {
		p.Step = x.steps.step
	}
	if t.cfg.Shards > 1 || t.cfg.CheckpointEvery > 0 { // for which no step may be under way
		p.Start = nil
	}
	if len(e.replicas) > 1 {
		p.Train = func(ctx context.Context, w *engine.Walk) { e.trainReplicas(ctx, w, x.steps) }
	}
	p.After = func(index int) error { return x.after(ctx, index) }
	p.Next = func() *engine.Pass { return t.next(ep, false) }
	return x, nil
}

// start trains with a mini-batch that is a step by itself.
func (x *training) start(_ context.Context, s *engine.Slot) (func(context.Context) (engine.Outcome,
	error), error) {
	e, set := x.t.e, x.steps.set(x.steps.mine.Index(s.Index))
	set.Rows = gnn.NodeRows{At: s.Rows, N: e.Rows}
	if err := e.model.Train(e.TrainStream, s.Batch, e.Wide.Of(s.Features).Ptr(), s.Labels.Ptr(),
		set); err != nil {
		return nil, err
	}
	mark, err := e.model.Mark(e.TrainStream)
	if err != nil {
		return nil, engine.Applied(err)
	}
	return func(op context.Context) (engine.Outcome, error) {
		out, err := outcomeOf(op, mark, e.Targets, s.Seeds)
		if err != nil {
			return out, engine.Applied(err)
		}
		if !out.Finite() {
			return out, nil // who counts it says so
		}
		return out, x.steps.note(set, mark.GradientNorm())
	}, nil
}

// rate is the learning rate of the step that a mini-batch is of. Plateaus are those of the epochs
// before.
func (x *training) rate(batch int, plateaus int) float32 {
	t := x.t
	of := t.cfg.Shards
	steps := func(batches int) int64 { return int64((batches + of - 1) / of) }
	before, own := int64(0), steps(x.steps.all.Len())
	for i := range t.state.Epochs {
		before += steps(t.state.Epochs[i].Batches)
	}
	step := int64(batch / of)
	place := gnn.Position{Epoch: x.Number, Plateaus: plateaus,
		Done: float64(int64(x.Number)*own+step) / float64(int64(t.cfg.Epochs)*own)}
	return float32(t.cfg.LR * t.cfg.RateSchedule().Factor(place) *
		gnn.Warm(before+step, t.cfg.Warmup))
}

// after notes the end of a step behind mini-batch index, and saves where that is due.
func (x *training) after(ctx context.Context, index int) (err error) {
	t, e := x.t, x.t.e
	t.obs.TellStep(x.Name, index+1, x.Order.Len())
	e.tellLive(x.Pass)
	if !x.steps.ends(index) {
		return nil
	}
	was, done := t.state.Batch, x.steps.done(index)
	t.state.Batch, x.whole = done, index+1
	e.others.take(&x.Stats)
	if t.cfg.Shards > 1 {
		x.edge = e.Snapshot(x.Pass, x.base)
	}
	if every := t.cfg.CheckpointEvery; every == 0 || done/every == was/every ||
		done >= x.steps.all.Len() {
		return nil
	}
	if t.state.Partial, err = e.others.combine(e.Snapshot(x.Pass, x.base)); err != nil {
		return err
	}
	return t.save(ctx)
}

// run tunes, where that is asked for, and trains to the end of the epoch.
func (x *training) run(ctx context.Context) (err error) {
	t, e := x.t, x.t.e
	if t.cfg.Tuning() && e.tuned == nil {
		if e.tuned, err = e.tune(ctx, x.Pass, t.cfg); err != nil {
			return err
		}
		t.obs.TellPlan(e.Operators(e.Store.Reader != nil))
		x.End = 0
	}
	if err := t.choosePasses(ctx, x.Pass, func() {
		*x.steps = *e.newSteps(x.Order, x.steps.set, x.steps.figures)
	}); err != nil {
		return err
	}
	if err := e.Run(ctx, x.Pass); err != nil {
		return err
	}
	// The last step may have no mini-batch of this rank.
	all := x.steps.all.Len()
	if e.others == nil || t.state.Batch == all {
		return nil
	}
	if err := x.steps.rest(ctx, t.state.Batch); err != nil {
		return err
	}
	t.state.Batch, x.whole = all, x.First
	e.others.take(&x.Stats)
	return prepare.Interrupted(ctx)
}

// count gives the state the figures of the pass, with those of other ranks if all ended together.
func (x *training) count(together bool) (err error) {
	t, e := x.t, x.t.e
	t.state.Partial = e.Snapshot(x.Pass, x.base)
	if x.whole != x.First { // a checkpoint holds whole steps
		t.state.Partial = x.edge
	}
	if together {
		t.state.Partial, err = e.others.combine(t.state.Partial)
	}
	return err
}

// stopped saves an interrupted run. Any other failure leaves the last checkpoint alone.
func (t *trainer) stopped(ctx context.Context, err error) error {
	if errs.ClassOf(err) != errs.Interrupted {
		return err
	}
	position := fmt.Sprintf("epoch %d, %d batches done", t.state.Epoch+1, t.state.Batch)
	if t.cfg.Rank > 0 && t.saves {
		return errs.New(errs.Interrupted, "stopped in %s; rank 0 saves (%w)", position, err)
	}
	if t.path == "" {
		return errs.New(errs.Interrupted,
			"stopped in %s; nothing is saved without {checkpoint} DIR (%w)", position, err)
	}
	if serr := t.save(ctx); serr != nil {
		return fmt.Errorf("stopped in %s, and saving failed: %w", position, serr)
	}
	return errs.New(errs.Interrupted,
		"stopped in %s and saved in %s; {resume} goes on from there (%w)", position, t.path, err)
}

// save writes the checkpoint, where one was asked for.
func (t *trainer) save(ctx context.Context) error {
	if t.path == "" {
		return nil
	}
	op, cancel := t.e.OperatorContext(ctx)
	defer cancel()
	begin := t.e.Trace.Now()
	defer func() { t.e.Trace.Run("checkpoint", begin) }()
	t.state.AdamStep = t.e.model.AdamStep()
	t.state.Written = time.Now().UTC().Format(time.RFC3339)
	f, err := encodeState(op, t.e.copier, t.e.model, t.state, t.best)
	if err != nil {
		return err
	}
	if err := checkpoint.Save(t.path, f); err != nil {
		return err
	}
	return t.saveBest()
}

// saveBest writes the best epoch's parameters to their own file where that is not there yet. It
// comes after the checkpoint, which holds them too: what a run goes on from is never of two times.
// A file of the run before, which is overwritten, goes.
func (t *trainer) saveBest() error {
	best := t.state.BestEpoch + 1
	if t.bestSaved == best || t.path == "" {
		return nil
	}
	path := filepath.Join(t.cfg.CheckpointDir, bestName)
	if t.best == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("checkpoint %s of another run: %w", path, err)
		}
	} else {
		st := t.state
		st.Written = time.Now().UTC().Format(time.RFC3339)
		f, err := encodeBest(t.e.model, st, t.best)
		if err == nil {
			err = checkpoint.Save(path, f)
		}
		if err != nil {
			return err
		}
	}
	t.bestSaved = best
	return nil
}

// tellLive tells observers how far the pass has come in this run.
func (e *runner) tellLive(p *engine.Pass) {
	e.Observer.TellLive(p.Name, func() report.Partial {
		return e.Snapshot(p, report.Partial{}).Since(p.Base)
	})
}

// outcomeOf waits for a step and reads its figures, of these seeds.
func outcomeOf(op context.Context, step gnn.Mark, t *prepare.Targets,
	seeds []int64) (o engine.Outcome, err error) {
	o.Loss, o.Correct, o.Counted, err = step.Outcome(op)
	if t.Weighs() {
		o.Mass = t.Mass(seeds)
	}
	return o, err
}

// result is an epoch's line.
func (e *runner) result(p report.Partial, epoch int) report.EpochResult {
	r := p.Result(epoch, e.RowBytes)
	if e.Targets.Kind == metrics.Numbers {
		r.TrainAcc = nil
	}
	return r
}

// evaluation is a pass over nodes in their order.
func (e *runner) evaluation(stage string, key int, nodes []int64) *engine.Pass {
	return &engine.Pass{Name: stage, Epoch: key, Sampler: e.Sampler, Together: e.others != nil,
		Order: e.others.part(prepare.NewOrder(nodes, e.Config.Batch))}
}

// infer runs a forward pass through the pipeline; the result's TrainAcc is the nodes' accuracy and
// Loss their mean loss. each, when given, is called after every batch.
func (e *runner) infer(ctx context.Context, p *engine.Pass,
	each func(op context.Context, s *engine.Slot) error) (report.EpochResult, error) {
	n := p.Order.Len()
	e.others.begin()
	p.Start = func(_ context.Context, s *engine.Slot) (func(context.Context) (engine.Outcome,
		error), error) {
		if err := e.model.Infer(e.TrainStream, s.Batch, e.Wide.Of(s.Features).Ptr(),
			s.Labels.Ptr()); err != nil {
			return nil, err
		}
		mark, err := e.model.Mark(e.TrainStream)
		return func(op context.Context) (engine.Outcome, error) {
			out, err := outcomeOf(op, mark, e.Targets, s.Seeds)
			e.others.add(p.Order.Index(s.Index), len(s.Seeds), out)
			if err == nil && each != nil {
				err = each(op, s)
			}
			return out, err
		}, err
	}
	p.Step = p.Start.Step
	if each != nil { // it looks at what the last step has left
		p.Start = nil
	}
	p.After = func(index int) error {
		e.Observer.TellStep(p.Name, index+1, n)
		e.tellLive(p)
		return nil
	}
	err := e.Run(ctx, p)
	if e.others != nil && (err == nil || errs.ClassOf(err) == errs.Interrupted) {
		if serr := e.others.gather(err); serr != nil {
			return report.EpochResult{}, serr
		}
		e.others.take(&p.Stats)
	}
	if err != nil {
		return report.EpochResult{}, err
	}
	return e.result(e.Snapshot(p, report.Partial{}), 0), nil
}
