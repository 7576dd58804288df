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

	"helios/cache/trace"
	"helios/gnn"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
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
// with the best validation accuracy, while params_sha256 is of the parameters after the last.
//
// When ctx ends, the current step is finished, a checkpoint is saved where a folder was given,
// and the error has class errs.Interrupted; the Result then holds the epochs that were whole.
// After a failed read the error has class errs.Device, nothing was trained on the rows, the
// last checkpoint stays as it was, and the Result has the figures of each SSD.
func Train(ctx context.Context, cfg plan.Config, in prepare.Inputs,
	obs report.Observer) (res *report.Result, err error) {
	if in.Group != nil {
		cfg.Rank, cfg.Ranks = in.Group.Rank(), in.Group.Size()
	}
	if cfg, err = cfg.Filled(); err != nil {
		return nil, err
	}
	if cfg, err = cfg.OnDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	peak := hostmem.StartPeakMeter(peakEvery)
	defer peak.Stop()

	meta := in.Dataset.Meta
	t := &trainer{cfg: cfg, obs: obs, bestSaved: -1, state: state{
		Print: fingerprintOf(cfg, in), BestEpoch: -1,
	}}
	if cfg.CheckpointDir != "" && cfg.Rank == 0 {
		t.path = filepath.Join(cfg.CheckpointDir, checkpointName)
		lock, err := checkpoint.LockDir(cfg.CheckpointDir)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, lock.Unlock()) }()
	}
	if err := t.agree(ctx, in); err != nil {
		return nil, err
	}
	var from *checkpoint.File
	if cfg.Resume {
		if cfg.Rank == 0 {
			if from, err = t.find(in); err != nil {
				return nil, err
			}
		}
		if from, err = t.share(ctx, in, from); err != nil {
			return nil, err
		}
		cfg = t.cfg
	} else if t.path != "" && !cfg.Overwrite {
		held, err := HeldIn(cfg.CheckpointDir)
		if err != nil {
			return nil, err
		}
		if held != nil {
			return nil, errs.With(errs.Refused, &HeldError{cfg.CheckpointDir, held})
		}
	}
	t.state.Run, t.state.Name = cmp.Or(t.state.Run, cfg.Run), meta.Name
	e, err := newRunner(ctx, cfg.ForTuning(), in, obs, t.state.Print.modelConfig())
	if err != nil {
		return &report.Result{IO: e.Store.IO()}, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	t.e = e
	e.Config.Depth = cfg.Depth
	e.Plan = e.Config.Schedule()
	if from != nil {
		if was := t.state.Print.rowType(); was != e.RowType.String() {
			return nil, errs.New(errs.Usage,
				"checkpoint %s was made with row-dtype %s, the SSDs hold rows of %s; run \"heliosctl load --dataset %s --row-dtype %s\", or give another folder for {checkpoint}",
				t.path, was, e.RowType, in.Dataset.Dir(), was)
		}
		if s := t.state.Print.rounding(e.arithmetic()); s != "" {
			obs.TellNote("checkpoint %s %v", t.path, s)
		}
	}
	if err := t.settleParts(from != nil); err != nil {
		return nil, err
	}
	t.state.Print.setRowType(e.RowType)
	t.state.Print.Kernels = e.arithmetic()
	if err := t.agree(ctx, in); err != nil {
		return nil, err
	}
	if from != nil {
		if t.best, err = restore(ctx, t.path, from, t.state, e.copier, e.model); err != nil {
			return nil, err
		}
		if err := e.restoreReplicas(ctx); err != nil {
			return nil, err
		}
		// A kill may have come between the checkpoint and the best epoch's own file.
		if err := t.saveBest(); err != nil {
			return nil, err
		}
	}
	res = &report.Result{
		Mode: cfg.Mode, Model: cfg.Model, Dataset: meta.Name, Seed: cfg.Seed,
		Device: e.Device.Info().Name, Kernels: e.Device.Info().Loaded(), IOStack: e.Store.Stack(),
		RunInfo: e.info(), Pipeline: cfg.Pipeline,
		RowDType: e.RowType.String(), RowBytes: e.RowBytes,
		GPUCacheBytes: e.Tiers.GPUBytes(),
		CPUCacheBytes: e.Tiers.CPUBytes(),
		TopologyBytes: e.Topology.Bytes(), ScaleBytes: e.ScaleBytes(),
		PresampleSecs: e.PresampleTime.Seconds(),
		FillSeconds:   e.Fill.Seconds(),
		Checkpoint:    t.path,
	}
	if from != nil {
		res.ResumedAt = fmt.Sprintf("epoch %d batch %d", t.state.Epoch+1, t.state.Batch)
	}
	if cfg.InMemory() && (cfg.CPUCache.Bytes > 0 || cfg.CPUCache.Percent > 0) {
		obs.TellNote("%s keeps every row in memory: {cpu-cache} has no effect", cfg.Mode)
	}
	obs.TellPlan(e.Config.Operators(e.Store.Reader != nil))
	err = e.Recording.End(t.train(ctx, in))
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
	res.BestEpoch, res.TestAcc = t.state.BestEpoch+1, t.testAcc
	res.ParamsSHA256 = t.sha
	res.PeakMemoryBytes = peak.Peak()
	return res, nil
}

const peakEvery = 20 * time.Millisecond

func fingerprintOf(c plan.Config, in prepare.Inputs) (f fingerprint) {
	m := in.Dataset.Meta
	f.printedFacts = printedFacts{Dataset: m.UUID, Edges: m.Edges, InDim: m.Dim,
		Classes: m.Classes, Draws: drawsByBatch}
	options.CopyPrinted(&f.Config, &c)
	return f
}

// modelConfig is the model of a run.
func (f *fingerprint) modelConfig() gnn.ModelConfig {
	m := f.ModelConfig()
	m.InDim, m.Classes, m.Seed = f.InDim, f.Classes, f.Seed
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

	testAcc *float64
	sha     string
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

// unsealed notes that an older checkpoint has no checksum.
func unsealed(path string, f *checkpoint.File, obs report.Observer) {
	if !f.Sealed {
		obs.TellNote(
			"checkpoint %s is of an older version: its header has no checksum, so damage there may go unnoticed; a resumed run writes it anew with one",
			path)
	}
}

// train goes from the state's position to the end.
func (t *trainer) train(ctx context.Context, in prepare.Inputs) error {
	train, err := in.Dataset.Split("train")
	if err != nil {
		return err
	}
	if len(train) == 0 {
		return errs.New(errs.Usage,
			"dataset %s has no training nodes; import or generate it with a training split",
			in.Dataset.Meta.Name)
	}
	val, err := in.Dataset.Split("val")
	if err != nil {
		return err
	}
	for t.state.Epoch < t.cfg.Epochs {
		ep := t.state.Epoch
		order := t.e.Tiers.Shuffled(train, t.cfg.SampleEpoch(ep))
		if err := t.epoch(ctx, ep, order, val); err != nil {
			return err
		}
	}
	op, cancel := t.e.OperatorContext(ctx)
	defer cancel()
	if t.sha, err = t.e.model.ParamsSHA256(); err != nil {
		return err
	}
	test, err := in.Dataset.Split("test")
	if err != nil {
		return err
	}
	if t.cfg.NoEval || len(test) == 0 || t.best == nil {
		return nil
	}
	if err := t.e.copier.setValues(op, t.e.model, t.best); err != nil {
		return err
	}
	r, err := t.e.infer(ctx, "test", prepare.TestEpoch, test, nil)
	if errs.ClassOf(err) == errs.Interrupted && t.path != "" {
		// The last epoch's checkpoint is there, and the model now holds the best epoch's
		// parameters: saving again would be wrong.
		return errs.New(errs.Interrupted,
			"stopped in the final test, all %d epochs are saved in %s; {resume} goes on from there (%w)",
			t.cfg.Epochs, t.path, err)
	}
	if err != nil {
		return err
	}
	t.testAcc = &r.TrainAcc
	return nil
}

// epoch trains what is left of epoch ep, validates and saves.
func (t *trainer) epoch(ctx context.Context, ep int, order prepare.Order,
	val []int64) error {
	e := t.e
	base := t.state.Partial
	n := order.Len()
	asked := ctx
	if e.others != nil { // a signal ends all ranks behind the same step
		var release func()
		ctx, release = e.others.together(ctx)
		defer release()
	}
	p := &engine.Pass{Name: fmt.Sprintf("epoch %d", ep+1), Epoch: t.cfg.SampleEpoch(ep),
		Kind: trace.Train, Number: ep, Order: order, First: order.Before(t.state.Batch),
		Sampler: e.Sampler, Together: e.others != nil,
		Stats: base}
	if f := t.cfg.OnBatch; f != nil {
		p.OnBatch = func(index int, mb *graph.MiniBatch) { f(ep, index, mb) }
	}
	decoupled, err := gnn.Decoupled(t.cfg.Optimizer)
	if err != nil {
		return err
	}
	set := func(batch int) gnn.Step {
		return gnn.Step{
			Seed: t.cfg.Seed, Epoch: ep, Batch: batch,
			LR: float32(t.cfg.LR), Beta1: beta1, Beta2: beta2, Eps: epsilon,
			WeightDecay: float32(t.cfg.WeightDecay),
			Decoupled:   decoupled,
		}
	}
	p.Step = func(op context.Context, s *engine.Slot) (engine.Outcome, error) {
		err := e.model.Train(e.TrainStream, s.Batch, e.Wide.Of(s.Features).Ptr(), s.Labels.Ptr(),
			set(order.Index(s.Index)))
		if err != nil {
			return engine.Outcome{}, err
		}
		out, err := e.outcome(op)
		if err != nil {
			err = engine.Applied(err)
		}
		return out, err
	}
	steps := e.newSteps(order, set)
	if t.cfg.Shards > 1 {
		p.Step = steps.step
	}
	if len(e.replicas) > 1 {
		p.Train = func(ctx context.Context, w *engine.Walk, ready <-chan *engine.Slot) {
			e.trainReplicas(ctx, w, steps, ready)
		}
	}
	begun, whole := p.First, p.First
	e.others.begin()
	edge := base // as of the last step's end
	p.After = func(index int) error {
		t.obs.TellStep(p.Name, index+1, n)
		e.tellLive(p)
		if !steps.ends(index) {
			return nil
		}
		was := t.state.Batch
		done := steps.done(index)
		t.state.Batch, whole = done, index+1
		e.others.take(&p.Stats)
		if t.cfg.Shards > 1 {
			edge = e.Snapshot(p, base)
		}
		if every := t.cfg.CheckpointEvery; every > 0 && done/every > was/every &&
			done < steps.all.Len() {
			var err error
			if t.state.Partial, err = e.others.combine(e.Snapshot(p, base)); err != nil {
				return err
			}
			return t.save(ctx)
		}
		return nil
	}
	if t.cfg.Tuning() && e.tuned == nil {
		e.tuned, err = e.tune(ctx, p, t.cfg)
		if err == nil {
			t.obs.TellPlan(e.Config.Operators(e.Store.Reader != nil))
		}
		p.End = 0
	}
	if err == nil {
		err = t.choosePasses(ctx, p, func() {
			order = p.Order
			n = order.Len()
			*steps = *e.newSteps(order, set)
		})
	}
	if err != nil && p.Clock == nil { // before the first walk
		return err
	}
	if err == nil {
		err = e.Run(ctx, p)
	}
	// The last step may have no mini-batch of this rank.
	if all := steps.all.Len(); e.others != nil && err == nil && t.state.Batch < all {
		if err = steps.rest(ctx, t.state.Batch); err == nil {
			t.state.Batch, whole = all, p.First
			e.others.take(&p.Stats)
			err = prepare.Interrupted(ctx)
		}
	}
	cpu := report.CPUSince(p.Clock.CPU, hostcpu.Now(), hostcpu.Count(), p.First-begun)
	t.state.Partial = e.Snapshot(p, base)
	if whole != p.First { // a checkpoint holds whole steps
		t.state.Partial = edge
	}
	if e.others != nil && (err == nil || errs.ClassOf(err) == errs.Interrupted) {
		sum, serr := e.others.combine(t.state.Partial)
		if serr != nil {
			return serr
		}
		t.state.Partial = sum
	}
	if err != nil {
		return t.stopped(ctx, err)
	}
	r := t.state.Partial.Result(ep, e.RowBytes)
	r.CPU = cpu
	if len(val) > 0 && !t.cfg.NoEval {
		v, err := e.infer(asked, "validate", prepare.ValEpoch+ep, val, nil)
		if err != nil {
			return t.stopped(ctx, err)
		}
		r.ValAcc, r.ValSeconds = &v.TrainAcc, v.Seconds
	}
	// Without validation every epoch is as good as the one before it, so the last one counts.
	if t.state.BestEpoch < 0 || r.ValAcc == nil || *r.ValAcc > t.state.BestAcc {
		op, cancel := e.OperatorContext(ctx)
		b, err := e.copier.values(op, e.model)
		cancel()
		if err != nil {
			return err
		}
		t.best, t.state.BestEpoch = b, ep
		if r.ValAcc != nil {
			t.state.BestAcc = *r.ValAcc
		}
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

// outcome waits for the training stream and reads the last step's figures.
func (e *runner) outcome(op context.Context) (engine.Outcome, error) {
	loss, correct, counted, err := e.model.Outcome(op, e.TrainStream)
	return engine.Outcome{Loss: loss, Correct: correct, Counted: counted}, err
}

// infer runs a forward pass over nodes through the pipeline; the result's TrainAcc is their
// accuracy and Loss their mean loss. each, when given, is called after every batch.
func (e *runner) infer(ctx context.Context, stage string, key int, nodes []int64,
	each func(op context.Context, s *engine.Slot) error) (report.EpochResult, error) {
	whole := prepare.NewOrder(nodes, e.Config.Batch)
	order := e.others.part(whole)
	n := order.Len()
	e.others.begin()
	p := &engine.Pass{Name: stage, Epoch: key, Kind: trace.Test, Order: order, Sampler: e.Sampler,
		Together: e.others != nil}
	if key >= prepare.ValEpoch && key < prepare.ValEpoch+plan.MaxEpochs {
		p.Kind, p.Number = trace.Validate, key-prepare.ValEpoch
	}
	p.Step = func(op context.Context, s *engine.Slot) (engine.Outcome, error) {
		if err := e.model.Infer(e.TrainStream, s.Batch, e.Wide.Of(s.Features).Ptr(),
			s.Labels.Ptr()); err != nil {
			return engine.Outcome{}, err
		}
		out, err := e.outcome(op)
		e.others.add(order.Index(s.Index), len(s.Seeds), out)
		if err == nil && each != nil {
			err = each(op, s)
		}
		return out, err
	}
	p.After = func(index int) error {
		e.Observer.TellStep(stage, index+1, n)
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
	return e.Snapshot(p, report.Partial{}).Result(0, e.RowBytes), nil
}
