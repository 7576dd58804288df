package sched

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/checkpoint"
)

// EvalResult is the line that "eval --json" prints.
type EvalResult struct {
	Event           string       `json:"event"` // "result"
	Mode            string       `json:"mode"`
	Model           string       `json:"model"`
	Dataset         string       `json:"dataset"`
	Checkpoint      string       `json:"checkpoint"`
	Epoch           int          `json:"epoch"` // whose parameters were used, from 1
	Split           string       `json:"split"`
	Fanouts         []int        `json:"fanout"`
	Nodes           int64        `json:"nodes"`
	Accuracy        float64      `json:"accuracy"`
	Loss            float64      `json:"loss"`
	Seconds         float64      `json:"seconds"`
	Device          string       `json:"device"`
	Kernels         string       `json:"kernels"`
	IOStack         string       `json:"io_stack"`
	RowDType        string       `json:"row_dtype"`
	RowsVerified    *int64       `json:"rows_verified,omitempty"`
	RowBytes        int64        `json:"row_bytes"`
	RowsGPU         int64        `json:"rows_gpu"`
	RowsCPU         int64        `json:"rows_cpu"`
	RowsSSD         int64        `json:"rows_ssd"`
	BytesSSD        int64        `json:"bytes_ssd"`
	SSDCommands     int64        `json:"ssd_commands"`
	StageSeconds    StageSeconds `json:"stage_seconds"`
	PeakMemoryBytes int64        `json:"peak_memory_bytes"`
	ParamsSHA256    string       `json:"params_sha256"`
	RunInfo
	IO IOResult `json:"io"`
}

// PredictResult is what Predict leaves beside the predictions.
type PredictResult struct {
	RunInfo
	IO IOResult `json:"io"`
}

// Prediction is one batch of Predict's output. The slices are valid during the call.
type Prediction struct {
	Nodes      []int64
	Classes    []int32   // the most likely class of each node
	Embeddings []float32 // len(Nodes) × Dim: activations of the last hidden layer (logits, if there is none)
	Dim        int
}

// opened is a checkpoint on an engine: the parameters of its best epoch where it has one, else
// those it stopped with.
type opened struct {
	e    *engine
	st   state
	path string
	from int // epoch, from 1
}

// open reads a checkpoint file, or the one in a folder. The model, batch size and fanouts are
// the checkpoint's; cfg.Fanouts and cfg.Batch, where set, replace the latter two. cfg's other
// fields say how the rows get to the device. What comes with an error, where the engine failed to open,
// is closed and says only what was read.
func open(ctx context.Context, cfg Config, in Inputs, path string, obs Observer) (*opened, error) {
	file, ok, err := findCheckpoint(path)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errs.New(errs.Usage, "checkpoint %s does not exist; train with --checkpoint DIR first", path)
	}
	f, err := checkpoint.Load(file)
	if err != nil {
		return nil, err
	}
	st, err := decodeState(file, f)
	if err != nil {
		return nil, err
	}
	fp := st.Print
	m := in.Dataset.Meta
	if fp.InDim != m.Dim || fp.Classes != m.Classes {
		return nil, errs.New(errs.Usage, "checkpoint %s is for %d features and %d classes, dataset %s has %d and %d; give the dataset it was trained on",
			file, fp.InDim, fp.Classes, m.Name, m.Dim, m.Classes)
	}
	if err := otherDataset(file, st, m.UUID, m.Name); err != nil {
		if !cfg.OtherDataset {
			return nil, err
		}
		obs.note(err.Error())
	}
	unsealed(file, f, obs)
	if len(cfg.Fanouts) > 0 && len(cfg.Fanouts) != len(fp.Fanouts) {
		return nil, errs.New(errs.Usage, "--fanout %v names %d hops, the model in %s has %d layers; give as many, -1 for every neighbour",
			cfg.Fanouts, len(cfg.Fanouts), file, len(fp.Fanouts))
	}
	if len(cfg.Fanouts) == 0 {
		cfg.Fanouts = fp.Fanouts
	}
	if cfg.Batch == 0 {
		cfg.Batch = fp.Batch
	}
	cfg.FeatureDropout, cfg.LearnEps = fp.FeatureDropout, fp.LearnEps
	cfg.Heads, cfg.AttentionDropout = fp.Heads, fp.AttentionDropout
	cfg.Model, cfg.Hidden, cfg.LR, cfg.Dropout, cfg.WeightDecay, cfg.Seed = fp.Model, fp.Hidden, fp.LR, fp.Dropout, fp.WeightDecay, fp.Seed
	if cfg.Sampler == "" {
		cfg.Sampler = fp.sampler()
	}
	cfg.CheckpointDir, cfg.Resume, cfg.CheckpointEvery, cfg.Trace = "", false, 0, ""
	cfg = cfg.withDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg, err = cfg.onDevice(in.Dev.Info()); err != nil {
		return nil, err
	}
	e, err := newEngine(ctx, cfg, in, obs, modelConfig(fp))
	if err != nil {
		return &opened{e: e}, err
	}
	if was := fp.rowType(); was != e.rowType.String() {
		obs.note(fmt.Sprintf("checkpoint %s was trained on rows of %s, these are of %s: results need not be those of training", file, was, e.rowType))
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
		op, cancel := e.opCtx(ctx)
		err = e.copier.setValues(op, e.model, t)
		cancel()
	}
	if err != nil {
		return nil, errors.Join(err, e.close())
	}
	return o, nil
}

// failed is what there is to say of an evaluation whose engine did not open; nil when there was none.
func (o *opened) failed() *EvalResult {
	if o == nil {
		return nil
	}
	return &EvalResult{IO: o.e.io()}
}

// Evaluate classifies a split with a checkpoint's parameters. With the checkpoint's own fanouts
// it samples as Train did, so that "test" gives the same test_acc and "val" the best epoch's
// val_acc. When reading failed, the result holds what the SSDs did and nothing else.
func Evaluate(ctx context.Context, cfg Config, in Inputs, path, split string, obs Observer) (res *EvalResult, err error) {
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
	defer func() { err = errors.Join(err, e.close()) }()
	key := testEpoch
	switch split {
	case "val":
		key = valEpoch + o.from - 1
	case "train":
		key = predictEpoch
	}
	r, err := e.infer(ctx, split, key, nodes, nil)
	if err != nil {
		return &EvalResult{IO: e.io()}, err
	}
	sha, err := e.model.ParamsSHA256()
	if err != nil {
		return nil, err
	}
	return &EvalResult{
		Event: "result", Mode: e.cfg.Mode, Model: e.cfg.Model, Dataset: in.Dataset.Meta.Name,
		Checkpoint: o.path, Epoch: o.from, Split: split, Fanouts: e.cfg.Fanouts, Nodes: r.Seeds,
		Accuracy: r.TrainAcc, Loss: r.Loss, Seconds: r.Seconds, Device: e.dev.Info().Name, Kernels: e.dev.Info().Kernels, IOStack: e.stack(),
		RowDType: e.rowType.String(), RowBytes: e.rowBytes, RowsVerified: e.verified(), RowsGPU: r.RowsGPU, RowsCPU: r.RowsCPU, RowsSSD: r.RowsSSD, BytesSSD: r.BytesSSD, SSDCommands: r.SSDCommands,
		StageSeconds: r.StageSeconds, PeakMemoryBytes: peak.Peak(), ParamsSHA256: sha, RunInfo: e.info(), IO: e.io(),
	}, nil
}

// Predict classifies nodes, in their order, with a checkpoint's parameters and hands the results
// to emit batch by batch. embeddings asks for the logits too. It returns what the SSDs did, also after
// a failure.
func Predict(ctx context.Context, cfg Config, in Inputs, path string, nodes []int64, embeddings bool, emit func(Prediction) error, obs Observer) (r PredictResult, err error) {
	for _, v := range nodes {
		if v < 0 || v >= in.Dataset.Meta.Nodes {
			return r, errs.New(errs.Usage, "node %d is not in dataset %s, whose nodes are 0 to %d", v, in.Dataset.Meta.Name, in.Dataset.Meta.Nodes-1)
		}
	}
	o, err := open(ctx, cfg, in, path, obs)
	if err != nil {
		if o != nil {
			r.IO = o.e.io()
		}
		return r, err
	}
	e := o.e
	defer func() { err = errors.Join(err, e.close()) }()
	if err := checkSeeds(nodes, e.cfg.Batch); err != nil {
		return r, err
	}
	classes := make([]int32, e.cfg.Batch)
	dim := e.model.EmbeddingDim()
	var emb []float32
	if embeddings {
		emb = make([]float32, e.cfg.Batch*dim)
	}
	_, err = e.infer(ctx, "predict", predictEpoch, nodes, func(op context.Context, s *slot) error {
		n := len(s.seeds)
		if err := e.model.Predictions(op, e.trainS, classes[:n]); err != nil {
			return err
		}
		p := Prediction{Nodes: s.seeds, Classes: classes[:n], Dim: dim}
		if embeddings {
			if err := e.model.Embeddings(op, e.trainS, emb[:n*dim]); err != nil {
				return err
			}
			p.Embeddings = emb[:n*dim]
		}
		if err := emit(p); err != nil {
			return fmt.Errorf("writing predictions: %w", err)
		}
		return nil
	})
	return PredictResult{e.info(), e.io()}, err
}

// checkSeeds refuses a batch with the same node twice, which the frontier could not tell apart.
func checkSeeds(nodes []int64, batch int) error {
	for i := 0; i < batches(len(nodes), batch); i++ {
		part := slices.Clone(seedsOf(nodes, i, batch))
		slices.Sort(part)
		for k := 1; k < len(part); k++ {
			if part[k] == part[k-1] {
				return errs.New(errs.Usage, "node %d is asked for twice; name each node once", part[k])
			}
		}
	}
	return nil
}
