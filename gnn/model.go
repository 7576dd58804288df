// Package gnn trains graph neural networks on sampled mini-batches, with dropout between layers,
// a loss and Adam. Each kind of network is a file that registers an Arch; so is each Activation,
// each Norm and each Loss.
//
// A step is a sequence of named kernels on one stream. This package has their host versions and
// names those that a GPU needs in their place (files *_cuda.go). Every sum has a fixed order, so
// results do not depend on workers or SMs.
package gnn

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// ModelConfig shapes a model. Layer l maps InDim (l = 0) or Hidden features to Hidden or, in the
// last layer, Classes.
type ModelConfig struct {
	ModelSettings
	LossSettings
	// Classes is the number of outputs: one for each class, label or number.
	InDim, Classes, Layers int
	Seed                   uint64 // of the initial parameters
	// Of a typed graph; InDim is the distance between rows then, and types may use less of it.
	Schema *graph.Schema
	// Weights are those of classes, or of labels that are there; nil: 1 each.
	Weights []float32

	// They change how products are computed, not what a checkpoint holds.
	Precision cuda.Precision // a host device has fp32 and bf16
	// Of devices that are no host device; nil: our own kernels. The model does not close it.
	BLAS cuda.BLAS
}

// Model is a network with its optimiser on a device. Steps must be enqueued one at a time and
// on one stream, or on streams that wait for each other.
type Model struct {
	net    *network
	params parameters
	on     *launcher
	mem    workspace
	sums   shardSums
	turn   int               // of the last step's results
	ends   [marks]cuda.Event // of the steps that were marked; nil: none was
}

// NewModel makes a model with weights from the uniform distribution of Glorot and Bengio
// (AISTATS 2010), ±sqrt(6/(in+out)), drawn by Philox from cfg.Seed, and biases of 0.
func NewModel(dev cuda.Device, cfg ModelConfig) (*Model, error) {
	net, err := newNetwork(cfg)
	if err != nil {
		return nil, err
	}
	m := &Model{net: net, params: parameters{dev: dev}, on: newLauncher(dev),
		mem: workspace{dev: dev}}
	m.on.precision, m.on.blas = cfg.Precision, cfg.BLAS
	switch {
	case cfg.Precision > cuda.BF16:
		return nil, errs.New(errs.Usage, "precision %v is unknown; choose %s", cfg.Precision,
			strings.Join(cuda.Precisions(), ", "))
	case !m.on.gpu && cfg.BLAS != nil:
		return nil, errs.New(errs.Usage,
			"device %s computes products by its own kernels; a BLAS is for a GPU ({device} cuda)",
			dev.Info().Name)
	}
	if err := m.on.find(net.kernels(m.on.gpu)); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	var all tensors
	learns := net.declare(&all)
	err = m.params.allocate(&all, learns, cfg.Seed)
	if err == nil {
		err = m.mem.allocate(cfg.Weights)
	}
	if err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("model: %w", err)
	}
	return m, nil
}

// Params lists the parameters, input layer first. Their bytes may be read and written while no
// step is in flight.
func (m *Model) Params() []Param { return m.params.list }

// AdamStep is the number of optimiser steps done.
func (m *Model) AdamStep() int64 { return m.params.adamStep }

// SetAdamStep resumes from a checkpoint.
func (m *Model) SetAdamStep(n int64) { m.params.adamStep = n }

// ParamsSHA256 is the hex SHA-256 over every parameter's name, shape (two little-endian uint64)
// and value bytes. No step may be in flight.
func (m *Model) ParamsSHA256() (string, error) { return m.params.sum() }

// Close frees the model's memory. No step may be in flight.
func (m *Model) Close() error {
	err := m.mem.close()
	if e := m.params.close(); err == nil {
		err = e
	}
	if m.sums.buf != nil {
		if e := m.sums.buf.Free(); err == nil {
			err = e
		}
	}
	for _, end := range m.ends {
		if end != nil {
			err = errors.Join(err, end.Close())
		}
	}
	return err
}

// WorkspaceBytes returns how much device memory a step takes beside the parameters, whether it
// trains or infers, for a mini-batch with these numbers: hopEnd as in graph.MiniBatch (its first is
// that of the seeds), and edges[h] of Blocks[h].
func (m *Model) WorkspaceBytes(hopEnd, edges []int64) int64 {
	blocks := make([]graph.Block, m.net.cfg.Layers)
	for h := range min(len(blocks), len(edges), len(hopEnd)-1) {
		blocks[h] = graph.Block{NumDst: hopEnd[h], NumSrc: hopEnd[h+1], NumEdges: edges[h]}
	}
	mb := &graph.MiniBatch{Blocks: blocks, NumSeeds: int(blocks[0].NumDst)}
	if m.net.cfg.Schema != nil {
		m.net.cfg.guessTypes(mb, hopEnd)
	}
	train, infer := m.newStep(mb, &Step{}), m.newStep(mb, nil)
	return workBytes(max(train.plan.size, infer.plan.size) * 4)
}

// ReleaseWorkspace gives back the memory of activations, which the next step allocates anew at the
// size that it needs. It is for a device that has run out of memory. No step may be in flight;
// results of the last one are gone.
func (m *Model) ReleaseWorkspace() error { return m.mem.release() }

// newStep lays out a step over a mini-batch; set is nil outside training.
func (m *Model) newStep(mb *graph.MiniBatch, set *Step) *step {
	s := &step{network: m.net, parameters: &m.params, grid: m.on.grid, on: m.on, mb: mb, set: set}
	s.layout(mb, set != nil, &s.plan)
	s.layoutScratch()
	return s
}

// begin is a step whose memory is all there, before anything is launched.
func (m *Model) begin(stream cuda.Stream, mb *graph.MiniBatch, set *Step) (s *step, err error) {
	if err := m.net.check(mb, set != nil); err != nil {
		return nil, err
	}
	s = m.newStep(mb, set)
	s.weights = m.mem.weightsAt()
	m.turn = (m.turn + 1) % marks
	s.turn = m.turn
	if s.plan.base, err = m.mem.reserve(s.plan.size * 4); err != nil {
		return nil, err
	}
	s.stepSink = m.on.sink(stream)
	return s, nil
}

// Train enqueues forward pass, backward pass and an Adam step. x is float32[HopEnd[last], InDim] in
// frontier order, which FeatureDropout changes in place; labels is int32[NumSeeds] with -1 for
// seeds that do not count or, of a loss over labels or numbers, float32[NumSeeds, Classes] with NaN
// for targets that do not count. The mini-batch, x and labels must stay until the stream has done
// the step.
//
// After an *cuda.OutOfMemoryError parameters and optimiser are as they were, and the step can be
// done again. A BLAS and launches may find memory missing in the middle of a step, too: what was
// enqueued until then changes activations, gradients and x, which must be filled once more if
// FeatureDropout is set.
func (m *Model) Train(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr,
	st Step) error {
	if labels == 0 {
		return errs.New(errs.Failed, "train: no labels")
	}
	s, err := m.begin(stream, mb, &st)
	if err == nil {
		var last lastRun
		if last, err = s.forward(x, labels, m.outcomeAt()); err == nil {
			err = s.backward(x)
		}
		if err == nil {
			err = s.finishNorms(Norm.finish)
		}
		if err == nil {
			err = s.adam(s.grad(0))
		}
		if err = s.end(err); err == nil {
			m.params.adamStep++
			m.mem.last = last
		}
	}
	if err != nil {
		return fmt.Errorf("train batch %d of epoch %d: %w", st.Batch, st.Epoch, err)
	}
	return nil
}

// Infer enqueues a forward pass without dropout. labels may be 0.
func (m *Model) Infer(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr) error {
	s, err := m.begin(stream, mb, nil)
	if err == nil {
		var last lastRun
		last, err = s.forward(x, labels, m.outcomeAt())
		if err = s.end(err); err == nil {
			m.mem.last = last
		}
	}
	if err != nil {
		return fmt.Errorf("infer batch %d of epoch %d: %w", mb.Index, mb.Epoch, err)
	}
	return nil
}

// Predictions waits for the last Train or Infer and copies the class of each seed to dst, which
// must have NumSeeds elements. Models of labels or numbers have none.
func (m *Model) Predictions(ctx context.Context, stream cuda.Stream, dst []int32) error {
	last := &m.mem.last
	if int64(len(dst)) != last.seeds {
		return errs.New(errs.Failed, "predictions: room for %d seeds, the batch had %d", len(dst),
			last.seeds)
	}
	raw, err := m.mem.download(ctx, stream, last.pred, last.seeds*4)
	if err == nil {
		copy(dst, unsafe.Slice((*int32)(unsafe.Pointer(&raw[0])), len(dst)))
	}
	return err
}

// EmbeddingDim is the width of Embeddings: Hidden, or Classes for one layer.
func (m *Model) EmbeddingDim() int { return m.net.embeddingDim() }

// Embeddings waits for the last Infer and copies the seeds' activations of the last hidden layer
// (of a model of one layer: the logits) to dst, NumSeeds × EmbeddingDim.
func (m *Model) Embeddings(ctx context.Context, stream cuda.Stream, dst []float32) error {
	last := &m.mem.last
	if last.embedding == 0 {
		return errs.New(errs.Failed, "embeddings: the last step was no inference; call Infer first")
	}
	if n := last.seeds * int64(m.EmbeddingDim()); int64(len(dst)) != n {
		return errs.New(errs.Failed, "embeddings: room for %d floats, the batch has %d",
			len(dst), n)
	}
	raw, err := m.mem.download(ctx, stream, last.embedding, int64(len(dst))*4)
	if err == nil {
		copy(dst, unsafe.Slice((*float32)(unsafe.Pointer(&raw[0])), len(dst)))
	}
	return err
}

// Classes is the number of outputs.
func (m *Model) Classes() int { return m.net.cfg.Classes }

// Logits waits for the last Infer and copies the seeds' outputs, before the softmax, to dst:
// NumSeeds × Classes.
func (m *Model) Logits(ctx context.Context, stream cuda.Stream, dst []float32) error {
	last := &m.mem.last
	if n := last.seeds * int64(m.net.cfg.Classes); int64(len(dst)) != n {
		return errs.New(errs.Failed, "logits: room for %d floats, the batch has %d", len(dst), n)
	}
	raw, err := m.mem.download(ctx, stream, last.logits, int64(len(dst))*4)
	if err == nil {
		copy(dst, unsafe.Slice((*float32)(unsafe.Pointer(&raw[0])), len(dst)))
	}
	return err
}
