package sched

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/options"
	"helios/sched/checkpoint"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// opened is a checkpoint on an engine: the parameters of its best epoch where it has one, else
// those it stopped with.
type opened struct {
	e    *runner
	st   state
	path string
	from int // epoch, from 1
}

// open reads a checkpoint file, or the one in a folder. The model, batch size and fanouts are the
// checkpoint's; cfg.Fanouts and cfg.Batch, where set, replace the latter two. cfg's other fields
// choose the way of the rows to the device. Where the engine fails to open, a closed one comes with
// the error, for the figures of its reads.
func open(ctx context.Context, cfg plan.Config, in prepare.Inputs, path string,
	obs report.Observer) (*opened, error) {
	file, ok, err := findCheckpoint(path)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errs.New(errs.Usage,
			"checkpoint %s does not exist; train with {checkpoint} DIR first", path)
	}
	f, err := checkpoint.Load(file)
	if err != nil {
		return nil, err
	}
	st, err := decodeState(file, f)
	if err != nil {
		return nil, err
	}
	if cfg.LastParameters && holds(f, groupBest) && !holds(f, groupModel) {
		return nil, errs.New(errs.Usage,
			"checkpoint %s has the best epoch's parameters alone; for %v last give the run's folder or its %s",
			file, errs.Key("parameters"), checkpointName)
	}
	fp := st.Print
	m := in.Dataset.Meta
	if is, was := prepare.TargetOf(in.Dataset), fp.target(); is != was {
		return nil, errs.New(errs.Usage,
			"checkpoint %s has learnt %s, dataset %s has %s; give the dataset it was trained on",
			file, was.Plural(), m.Name, is.Plural())
	}
	if fp.InDim != m.Dim || fp.Classes != m.Classes {
		return nil, errs.New(errs.Usage,
			"checkpoint %s is for %d features and %d %s, dataset %s has %d and %d; give the dataset it was trained on",
			file, fp.InDim, fp.Classes, fp.target().Plural(), m.Name, m.Dim, m.Classes)
	}
	if err := otherDataset(file, st, &m); err != nil {
		if !cfg.OtherDataset {
			return nil, err
		}
		obs.TellNote("%v", err)
	}
	unsealed(file, f, obs)
	if len(cfg.Fanouts) > 0 && len(cfg.Fanouts) != len(fp.Fanouts) {
		return nil, errs.New(errs.Usage,
			"{fanout} %v names %d hops, the model in %s has %d layers; give as many, -1 for every neighbour",
			cfg.Fanouts, len(cfg.Fanouts), file, len(fp.Fanouts))
	}
	asked := cfg
	options.CopyPrinted(&cfg, &fp.Config)
	cfg.EpochSettings, cfg.Shards, cfg.BatchDependency = asked.EpochSettings, asked.Shards,
		asked.BatchDependency
	if len(asked.Fanouts) > 0 {
		cfg.Fanouts = asked.Fanouts
	}
	cfg.Batch = cmp.Or(asked.Batch, cfg.Batch)
	cfg.Sampler = cmp.Or(asked.Sampler, cfg.Sampler)
	cfg.SeedZero = cfg.Seed == 0
	cfg.EmbedMemory = math.MaxInt64 // train has bounded them
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery = "", false, 0
	cfg.Unpacked = true // its mini-batches are its own
	if cfg, err = settled(ctx, cfg, in, obs); err != nil {
		return nil, err
	}
	e, err := newRunner(ctx, cfg, in, obs, fp.modelConfig())
	if err != nil {
		return &opened{e: e}, err
	}
	e.Targets.Fit = fp.Fit
	if was := fp.rowType(); was != e.RowType.String() {
		obs.TellNote(
			"checkpoint %s was trained on rows of %s, these are of %s: results need not be those of training",
			file, was, e.RowType)
	}
	o := &opened{e: e, st: st, path: file, from: st.Epoch + 1}
	if st.Batch == 0 && st.Epoch > 0 {
		o.from = st.Epoch // whole
	}
	prefix := groupModel
	if st.BestEpoch >= 0 && !cfg.LastParameters {
		prefix, o.from = groupBest, st.BestEpoch+1
	}
	t, err := group(file, f, e.model, prefix)
	if err == nil {
		op, cancel := e.OperatorContext(ctx)
		err = e.copier.setValues(op, e.model, t)
		cancel()
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	tellChoice(&cfg, obs)
	return o, nil
}

// holds reports whether a checkpoint file has tensors of a group.
func holds(f *checkpoint.File, prefix string) bool {
	return slices.ContainsFunc(f.Tensors,
		func(t checkpoint.Tensor) bool { return strings.HasPrefix(t.Name, prefix) })
}

// failed returns what there is to say of an evaluation whose engine did not open; nil when there
// was none.
func (o *opened) failed() *report.EvalResult {
	if o == nil {
		return nil
	}
	return &report.EvalResult{IO: o.e.Store.IO()}
}

// Evaluate classifies a split with a checkpoint's parameters. With the checkpoint's own fanouts
// it samples as Train did, so that "test" gives the same test_acc and "val" the best epoch's
// val_acc. When reading failed, the result holds what the SSDs did and nothing else.
func Evaluate(ctx context.Context, cfg plan.Config, in prepare.Inputs, path, split string,
	obs report.Observer) (res *report.EvalResult, err error) {
	peak := hostmem.StartPeakMeter(peakEvery)
	defer peak.Stop()
	nodes, err := in.Dataset.Split(split)
	if err != nil {
		return nil, err
	}
	o, err := open(ctx, cfg, in, path, obs)
	if err != nil {
		return o.failed(), err
	}
	e := o.e
	defer func() { err = errors.Join(err, e.Close()) }()
	key := prepare.TestEpoch
	switch split {
	case "val":
		key = prepare.ValEpoch + o.from - 1
	case "train":
		key = prepare.PredictEpoch
	}
	r, figures, err := e.scored(ctx, e.evaluation(split, key, nodes), nodes)
	if err != nil {
		return &report.EvalResult{IO: e.Store.IO()}, err
	}
	sha, err := e.model.ParamsSHA256()
	if err != nil {
		return nil, err
	}
	return &report.EvalResult{
		Mode: e.Config.Mode, Model: e.Config.Model, Dataset: in.Dataset.Meta.Name,
		Checkpoint: o.path, Epoch: o.from, Split: split, Fanouts: e.Config.Fanouts, Nodes: r.Seeds,
		Accuracy: r.TrainAcc, Loss: r.Loss, Metrics: figures, Seconds: r.Seconds,
		Device:  e.Device.Info().Name,
		Kernels: e.Device.Info().Loaded(), IOStack: e.Store.Stack(),
		RowDType: e.RowType.String(), RowBytes: e.RowBytes, RowsVerified: e.Verify.Verified(),
		RowsGPU: r.RowsGPU, RowsCPU: r.RowsCPU, RowsSSD: r.RowsSSD, BytesSSD: r.BytesSSD,
		SSDCommands:  r.SSDCommands,
		StageSeconds: r.StageSeconds, PeakMemoryBytes: peak.Peak(), ParamsSHA256: sha,
		RunInfo: e.info(), IO: e.Store.IO(),
	}, nil
}

// Predict classifies nodes, in their order, with a checkpoint's parameters and hands the results to
// emit batch by batch, with the outputs that are asked for. It returns what the SSDs did, also
// after a failure.
func Predict(ctx context.Context, cfg plan.Config, in prepare.Inputs, path string, nodes []int64,
	ask report.Outputs, emit func(report.Prediction) error,
	obs report.Observer) (r report.PredictResult, err error) {
	count := prepare.TargetNodes(&in.Dataset.Meta)
	for _, v := range nodes {
		if v < 0 || v >= count {
			return r, errs.New(errs.Usage, "node %d is not in dataset %s, whose nodes are 0 to %d",
				v, in.Dataset.Meta.Name, count-1)
		}
	}
	o, err := open(ctx, cfg, in, path, obs)
	if err != nil {
		if o != nil {
			r.IO = o.e.Store.IO()
		}
		return r, err
	}
	e := o.e
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := checkSeeds(nodes, e.Config.Batch); err != nil {
		return r, err
	}
	classes := make([]int32, e.Config.Batch)
	ask.Logits = ask.Logits || e.Targets.Dense()
	dim := e.model.EmbeddingDim()
	var emb, out []float32
	if ask.Embeddings {
		emb = make([]float32, e.Config.Batch*dim)
	}
	if ask.Logits {
		out = make([]float32, e.Config.Batch*e.model.Classes())
	}
	_, err = e.infer(ctx, e.evaluation("predict", prepare.PredictEpoch, nodes),
		func(op context.Context, s *engine.Slot) error {
			n := len(s.Seeds)
			if err := e.model.Predictions(op, e.TrainStream, classes[:n]); err != nil {
				return err
			}
			p := report.Prediction{Nodes: s.Seeds, Classes: classes[:n], Dim: dim}
			if e.Targets.Dense() {
				p.Classes = nil
			}
			if ask.Embeddings {
				if err := e.model.Embeddings(op, e.TrainStream, emb[:n*dim]); err != nil {
					return err
				}
				p.Embeddings = emb[:n*dim]
			}
			if ask.Logits {
				p.Logits = out[:n*e.model.Classes()]
				if err := e.model.Logits(op, e.TrainStream, p.Logits); err != nil {
					return err
				}
				e.Targets.InUnit(p.Logits)
			}
			if err := emit(p); err != nil {
				return fmt.Errorf("writing predictions: %w", err)
			}
			return nil
		})
	return report.PredictResult{RunInfo: e.info(), IO: e.Store.IO()}, err
}

// checkSeeds refuses a batch with the same node twice, which the frontier could not tell apart.
func checkSeeds(nodes []int64, batch int) error {
	order := prepare.NewOrder(nodes, batch)
	for i := range order.Len() {
		part := slices.Clone(order.Seeds(i))
		slices.Sort(part)
		for k := 1; k < len(part); k++ {
			if part[k] == part[k-1] {
				return errs.New(errs.Usage, "node %d is asked for twice; name each node once",
					part[k])
			}
		}
	}
	return nil
}
