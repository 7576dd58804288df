// Package helios trains graph neural networks on datasets whose features lie on SSDs, and hands out
// their mini-batches. It is the short way through the packages below it: Load lays features out,
// Open opens a dataset, Batches and Train read from it.
//
//	data, err := helios.Open("g", "a.img", "b.img")
//	for batch, err := range data.Batches(ctx, helios.BatchOptions{}) { … }
//	model, result, err := helios.Train(ctx, data, helios.TrainOptions{})
//
// Errors carry a class, which is heliosctl's exit code (internal/errs).
package helios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/bound"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/rowtype"
	"helios/internal/simd"
	"helios/internal/state"
	"helios/nvme/proxy"
	"helios/sched"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// The settings and results of a run are those of the packages that run it.
type (
	ModelSettings = gnn.ModelSettings   // of a Config: kind of model, hidden units, dropout, …
	Config        = plan.Config         // its zero value is GraphSAGE with fanout 10,10
	LoaderOptions = sched.LoaderOptions // the seeds of mini-batches
	Block         = sched.LoadedBlock   // the edges of a hop
	Observer      = report.Observer
	EpochResult   = report.EpochResult
	Result        = report.Result
	EvalResult    = report.EvalResult
)

// Load lays the features of a dataset folder out on files that play SSDs, an equal share on each.
// A file that does not exist is created as large as its share. Where the files hold the dataset
// already nothing is written; files that hold anything else are refused, and so are disks.
func Load(ctx context.Context, dir string, files ...string) (err error) {
	if len(files) == 0 {
		return errs.New(errs.Usage, "no SSDs to load onto; name at least one file")
	}
	data, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	bytes, err := stripe.SSDBytes(data, len(files))
	if err != nil {
		return err
	}
	for _, f := range files {
		fi, err := os.Stat(f)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if err := proxy.Create(f, bytes); err != nil {
				return err
			}
		case err != nil:
			return errs.New(errs.Usage, "SSD file: %v", err)
		case !fi.Mode().IsRegular():
			return errs.New(errs.Refused, "SSD file %s is not a regular file; bind and load a disk with"+
				" heliosctl, which finds out whether it is in use", f)
		}
	}
	ssds, err := openSSDs(ctx, nil, files, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ssds.Close()) }()
	if a, err := stripe.Find(ctx, data, ssds.SSDs, stripe.AttachOptions{}); err == nil &&
		len(gpuio.Distinct(a.SSDs)) == len(files) {
		return nil
	}
	if _, err := dataset.VerifyAllButRows(ctx, data, nil); err != nil {
		return err
	}
	_, err = stripe.Load(ctx, data, ssds.SSDs, stripe.LoadOptions{})
	return err
}

// openSSDs opens files that play SSDs, or those that this user's heliosctl has bound, or the files
// of data where none is.
func openSSDs(ctx context.Context, data *dataset.Dataset, files []string, poll bool) (*bound.Set,
	error) {
	store, err := state.Open("")
	if err != nil {
		return nil, err
	}
	machine := bound.MachineOf(pci.Sys{})
	o := bound.Opener{Store: store, User: filepath.Base(os.Args[0]), Note: func(string) {},
		PollDoorbells: poll, Machine: &machine}
	if len(files) > 0 {
		return o.OpenFiles(ctx, files)
	}
	st, err := store.Load()
	if err != nil {
		return nil, err
	}
	if len(st.SSDs) == 0 {
		return o.OpenDataset(ctx, data)
	}
	return o.Open(ctx, o.Permitted(st.SSDs))
}

// Dataset is a dataset folder with the SSDs that hold its features, and the device that computes.
type Dataset struct {
	in   prepare.Inputs
	ssds *bound.Set

	mu   sync.Mutex
	late error // of loops that were left: their loaders' ends
}

// Open opens a dataset folder whose features lie on SSDs: the files that play them, in any order,
// or without files the SSDs that "heliosctl bind-ssds" has bound; where none is, the features are
// read from the folder. A GPU computes where there is one that can, else the CPU.
func Open(dir string, files ...string) (_ *Dataset, err error) {
	d := &Dataset{}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if d.in.Dataset, err = dataset.Open(dir); err != nil {
		return nil, err
	}
	if d.in.Dev, err = openDevice(); err != nil {
		return nil, err
	}
	onGPU := d.in.Dev.Info().Backend != "host"
	if d.ssds, err = openSSDs(context.Background(), d.in.Dataset, files, onGPU); err != nil {
		return nil, err
	}
	d.in.SSDs = d.ssds.SSDs
	return d, nil
}

func openDevice() (cuda.Device, error) {
	gpu, err := driver.Open(driver.Options{})
	if err == nil {
		return gpu, nil
	}
	if errs.ClassOf(err) != errs.Capability {
		return nil, err
	}
	return cuda.NewHost(cuda.HostOptions{})
}

// Close closes SSDs, device and folder. No loop over Batches and no Train may be under way.
func (d *Dataset) Close() error {
	err := d.late
	if d.ssds != nil {
		err = errors.Join(err, d.ssds.Close())
	}
	if d.in.Dev != nil {
		err = errors.Join(err, d.in.Dev.Close())
	}
	if d.in.Dataset != nil {
		err = errors.Join(err, d.in.Dataset.Close())
	}
	d.ssds, d.in, d.late = nil, prepare.Inputs{}, nil
	return err
}

// Dim returns the number of features of a node.
func (d *Dataset) Dim() int { return d.in.Dataset.Meta.Dim }

// BatchOptions choose mini-batches and the way that their features take. Without a split and
// without nodes the seeds are the training nodes, in the order and with the neighbours that Train
// has.
type BatchOptions struct {
	Config
	LoaderOptions
}

// Batch is a mini-batch.
type Batch struct {
	Epoch, Index int
	Seeds        int       // the first so many of Nodes
	Nodes        []int64   // the seeds, and then the new nodes of each hop
	Features     []float32 // [len(Nodes)][Dim]
	Labels       []int32   // of the seeds; -1 where a node has none; nil where Targets are
	Targets      []float32 // of several labels (0, 1) or numbers, a row a seed; NaN: none
	Blocks       []Block   // the edges of each hop, the seeds' first
}

// Batches iterates over the mini-batches of o.Epochs epochs. Each is the caller's own. Those that
// follow are made meanwhile; when the loop ends, in whatever way, so does their making.
func (d *Dataset) Batches(ctx context.Context, o BatchOptions) iter.Seq2[*Batch, error] {
	if o.Split == "" && o.Nodes == nil {
		o.Split, o.Shuffle = "train", true
	}
	return func(yield func(*Batch, error) bool) {
		ctx, stop := context.WithCancel(ctx)
		made, ended := make(chan *Batch), make(chan error, 1)
		go func() {
			defer close(made)
			ended <- d.makeBatches(ctx, o, func(b *Batch) error {
				select {
				case made <- b:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
		}()
		left := true
		defer func() { // also of a loop that panics
			stop()
			if !left {
				return
			}
			if err := <-ended; errs.ClassOf(err) != errs.Interrupted {
				d.mu.Lock()
				d.late = errors.Join(d.late, err)
				d.mu.Unlock()
			}
		}()
		for b := range made {
			if !yield(b, nil) {
				return
			}
		}
		left = false
		if err := <-ended; err != nil {
			yield(nil, err)
		}
	}
}

// makeBatches hands the mini-batches of all epochs to emit.
func (d *Dataset) makeBatches(ctx context.Context, o BatchOptions,
	emit func(*Batch) error) (err error) {
	l, err := sched.OpenLoader(ctx, o.Config, d.in, o.LoaderOptions, report.Observer{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	stored, err := rowtype.Parse(l.RowType())
	if err != nil {
		return err
	}
	all := make([]int, l.Batches())
	for i := range all {
		all[i] = i
	}
	for epoch := range max(o.Epochs, 1) {
		err := l.Epoch(ctx, epoch, all, func(b *sched.Loaded) error {
			return emit(copyBatch(b, stored, d.Dim(), l.Scales()))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// copyBatch brings a mini-batch into Go's memory. The loader uses its own again, and unmaps it.
func copyBatch(b *sched.Loaded, stored rowtype.Type, dim int, scales []float32) *Batch {
	out := &Batch{Epoch: b.Epoch, Index: b.Index, Seeds: b.Seeds, Nodes: slices.Clone(b.Nodes),
		Labels: slices.Clone(b.Labels), Targets: slices.Clone(b.Targets),
		Features: make([]float32, len(b.Nodes)*dim)}
	rowBytes := stored.RowBytes(dim)
	for i, node := range b.Nodes {
		scale := float32(1)
		if scales != nil {
			scale = scales[node]
		}
		stored.Decode(simd.Auto, out.Features[i*dim:(i+1)*dim], b.Rows[i*rowBytes:(i+1)*rowBytes],
			scale)
	}
	for _, k := range b.Blocks {
		k.Indptr, k.Src, k.Weights = slices.Clone(k.Indptr), slices.Clone(k.Src),
			slices.Clone(k.Weights)
		out.Blocks = append(out.Blocks, k)
	}
	return out
}

// TrainOptions choose the model, the data path and who hears of the run.
type TrainOptions struct {
	Config
	Observer
}

// Model is a trained model: a checkpoint of a dataset.
type Model struct {
	data   *Dataset
	dir    string
	remove bool
}

// Train trains o.Epochs epochs. The model lies in o.CheckpointDir, or else in a temporary folder
// until it is closed. After an error there is no model; the result may say how far the run came.
func Train(ctx context.Context, d *Dataset, o TrainOptions) (*Model, *Result, error) {
	m := &Model{data: d, dir: o.CheckpointDir}
	if m.dir == "" {
		dir, err := os.MkdirTemp("", "helios-model-")
		if err != nil {
			return nil, nil, err
		}
		m.dir, m.remove, o.CheckpointDir = dir, true, dir
	}
	o.Mode = cmp.Or(o.Mode, plan.ModeAuto)
	result, err := sched.Train(ctx, o.Config, d.in, o.Observer)
	if err != nil {
		return nil, result, errors.Join(err, m.Close())
	}
	return m, result, nil
}

// OpenModel returns the model in the checkpoint folder of an earlier run.
func OpenModel(d *Dataset, checkpoint string) *Model { return &Model{data: d, dir: checkpoint} }

// Close removes the folder of a model that has none of its own.
func (m *Model) Close() error {
	if !m.remove {
		return nil
	}
	return os.RemoveAll(m.dir)
}

// Predict returns the most likely class of each node, with the best epoch's parameters.
func (m *Model) Predict(ctx context.Context, nodes []int64) ([]int32, error) {
	classes := make([]int32, 0, len(nodes))
	_, err := sched.Predict(ctx, Config{Mode: plan.ModeAuto}, m.data.in, m.dir, nodes,
		report.Outputs{},
		func(p report.Prediction) error {
			classes = append(classes, p.Classes...)
			return nil
		}, Observer{})
	if err != nil {
		return nil, fmt.Errorf("predict: %w", err)
	}
	return classes, nil
}

// Evaluate classifies a split, one of dataset.Splits, with the best epoch's parameters.
func (m *Model) Evaluate(ctx context.Context, split string) (*EvalResult, error) {
	return sched.Evaluate(ctx, Config{Mode: plan.ModeAuto}, m.data.in, m.dir, split, Observer{})
}
