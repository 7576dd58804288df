// Package gnn trains graph neural networks on sampled mini-batches: GraphSAGE with mean
// aggregation (Hamilton et al., NeurIPS 2017) and GCN (Kipf and Welling, ICLR 2017), with ReLU and dropout between
// layers, softmax cross-entropy and Adam.
//
// A step is a sequence of named kernels on one stream (DESIGN section 5). This package has their host
// versions and says which ones a GPU needs in their place (files *_cuda.go). Every sum has a fixed order, so results do not
// depend on workers or SMs.
package gnn

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
)

// ModelConfig shapes a model. Layer l maps InDim (l = 0) or Hidden features to Hidden or, in the
// last layer, Classes.
type ModelConfig struct {
	Kind                           string // "sage" or "gcn"
	InDim, Hidden, Classes, Layers int
	Dropout                        float32 // of hidden activations: probability, 0 to below 1
	FeatureDropout                 float32 // of the model's input; Train then changes x in place
	Seed                           uint64  // of the initial parameters

	// Of devices that are no host device. They change how products are computed, not what a checkpoint holds.
	Precision cuda.Precision
	BLAS      cuda.BLAS // nil: our own kernels. The model does not close it.
}

// Step says how one training step is done. Zero Beta1, Beta2 and Eps mean 0.9, 0.999 and 1e-8.
// The dropout masks depend on Seed, Epoch and Batch only.
type Step struct {
	Seed              uint64
	Epoch, Batch      int
	LR                float32
	Beta1, Beta2, Eps float32
	WeightDecay       float32
	Decoupled         bool // AdamW (Loshchilov and Hutter, ICLR 2019) in place of an L2 term
}

// Param is one parameter tensor with Adam's two moments, float32, row-major. The buffers are
// parts of one allocation of the model: freeing them does nothing.
type Param struct {
	Name        string
	Rows, Cols  int
	Value, M, V cuda.Buffer
}

// Model is a network with its optimiser on a device. Steps must be enqueued one at a time and
// on one stream, or on streams that wait for each other.
type Model struct {
	dev    cuda.Device
	cfg    ModelConfig
	dims   []int64 // input width of layer l; dims[Layers] = Classes
	layers []layer
	params []Param
	n      int64       // floats of all parameters with padding
	store  cuda.Buffer // values, gradients, m, v: 4 × n float32
	result cuda.Buffer // pinned outcome
	work   cuda.Buffer
	stage  cuda.Buffer // pinned, of downloads
	old    []cuda.Buffer
	step   int64
	gpu    bool // no host device: kernels of its own, steps enqueued as a whole
	grid   int  // most blocks of a launch on the host
	steps  cuda.Steps
	k      kernels
	named  map[string]cuda.Kernel // see gpuKernel

	last lastRun
}

// layer holds offsets in floats into the parameters; neigh is -1 for GCN.
type layer struct{ self, neigh, bias int64 }

// lastRun is where the last Train or Infer left its results.
type lastRun struct {
	seeds     int64
	pred      cuda.DevicePtr
	embedding cuda.DevicePtr // float32[seeds, embDim], 0 after Train
}

type kernels struct {
	gemmNN, gemmNT, gemmTN, agg, aggBwd     cuda.Kernel
	weights, transpose                      cuda.Kernel // weights: GCN only
	aggWeighted, aggWeights                 cuda.Kernel // of blocks with weights
	colSum, xentCount, xent, xentSum, adamK cuda.Kernel
	dropInput                               cuda.Kernel
}

// alignFloats starts every tensor on a 256-byte boundary.
const alignFloats = 64

func align(n int64) int64 { return (n + alignFloats - 1) &^ (alignFloats - 1) }

// NewModel makes a model with weights from the uniform distribution of Glorot and Bengio
// (AISTATS 2010), ±sqrt(6/(in+out)), drawn by Philox from cfg.Seed, and biases of 0.
func NewModel(dev cuda.Device, cfg ModelConfig) (*Model, error) {
	switch {
	case cfg.Kind != "sage" && cfg.Kind != "gcn":
		return nil, errs.New(errs.Usage, "model %q is unknown; choose sage or gcn", cfg.Kind)
	case cfg.Layers < 1 || cfg.Layers > 255:
		return nil, errs.New(errs.Usage, "model: %d layers; give a fanout for each of 1 to 255 layers", cfg.Layers)
	case cfg.InDim < 1 || cfg.Classes < 1 || cfg.Layers > 1 && cfg.Hidden < 1:
		return nil, errs.New(errs.Usage, "model: %d features, %d hidden, %d classes: all must be at least 1", cfg.InDim, cfg.Hidden, cfg.Classes)
	case max(cfg.InDim, cfg.Hidden, cfg.Classes) > 1<<20:
		return nil, errs.New(errs.Usage, "model: %d features, %d hidden, %d classes: the limit is %d", cfg.InDim, cfg.Hidden, cfg.Classes, 1<<20)
	case !(cfg.Dropout >= 0 && cfg.Dropout < 1):
		return nil, errs.New(errs.Usage, "dropout %v: must be at least 0 and below 1", cfg.Dropout)
	case !(cfg.FeatureDropout >= 0 && cfg.FeatureDropout < 1):
		return nil, errs.New(errs.Usage, "feature dropout %v: must be at least 0 and below 1", cfg.FeatureDropout)
	case cfg.Precision > cuda.BF16:
		return nil, errs.New(errs.Usage, "precision %v is unknown; choose %s", cfg.Precision, strings.Join(cuda.Precisions(), ", "))
	}
	m := newModel(dev)
	m.cfg = cfg
	if !m.gpu && (cfg.Precision != cuda.FP32 || cfg.BLAS != nil) {
		return nil, errs.New(errs.Usage, "device %s computes products in fp32 by its own kernels; precision %v and a BLAS are for --device cuda",
			dev.Info().Name, cfg.Precision)
	}
	for l := range cfg.Layers + 1 {
		switch l {
		case cfg.Layers:
			m.dims = append(m.dims, int64(cfg.Classes))
		case 0:
			m.dims = append(m.dims, int64(cfg.InDim))
		default:
			m.dims = append(m.dims, int64(cfg.Hidden))
		}
	}
	if err := m.findKernels(); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if err := m.init(); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("model: %w", err)
	}
	return m, nil
}

// newModel is what launches need of a model.
func newModel(dev cuda.Device) *Model {
	info := dev.Info()
	return &Model{dev: dev, gpu: info.Backend != "host", grid: max(1, 4*info.SMs)}
}

func (m *Model) findKernels() error {
	if m.gpu {
		return m.findGPUKernels()
	}
	if err := m.findProducts(); err != nil {
		return err
	}
	agg, weighted, bwd, transpose := "sage_mean", "sage_weighted", "sage_mean_bwd", "sage_transpose"
	if m.cfg.Kind == "gcn" {
		agg, weighted, bwd, transpose = "gcn_agg", "gcn_agg", "gcn_agg_bwd", "gcn_transpose"
		var err error
		if m.k.weights, err = m.dev.Kernel("gcn_weights"); err != nil {
			return err
		}
	}
	for _, k := range []struct {
		dst  *cuda.Kernel
		name string
	}{
		{&m.k.agg, agg}, {&m.k.aggWeighted, weighted}, {&m.k.aggWeights, "agg_weights"}, {&m.k.aggBwd, bwd}, {&m.k.transpose, transpose},
		{&m.k.colSum, "col_sum"}, {&m.k.xentCount, "xent_count"}, {&m.k.xent, "softmax_xent"}, {&m.k.xentSum, "xent_sum"},
		{&m.k.adamK, "adam"}, {&m.k.dropInput, "drop_input"},
	} {
		var err error
		if *k.dst, err = m.dev.Kernel(k.name); err != nil {
			return err
		}
	}
	return nil
}

// findProducts finds the host's kernels of products.
func (m *Model) findProducts() (err error) {
	for _, k := range []struct {
		dst *cuda.Kernel
		op  gemmOp
	}{{&m.k.gemmNN, opNN}, {&m.k.gemmNT, opNT}, {&m.k.gemmTN, opTN}} {
		if *k.dst, err = m.dev.Kernel(k.op.String()); err != nil {
			return err
		}
	}
	return nil
}

func (m *Model) init() error {
	type tensor struct {
		name       string
		rows, cols int64
		at         int64
		bias       bool
	}
	var tensors []tensor
	add := func(name string, rows, cols int64, bias bool) int64 {
		at := m.n
		tensors = append(tensors, tensor{name, rows, cols, at, bias})
		m.n += align(rows * cols)
		return at
	}
	for l := range m.cfg.Layers {
		in, out := m.dims[l], m.dims[l+1]
		w := layer{neigh: -1}
		if m.cfg.Kind == "sage" {
			w.self = add(fmt.Sprintf("layer%d.self.weight", l), in, out, false)
			w.neigh = add(fmt.Sprintf("layer%d.neigh.weight", l), in, out, false)
		} else {
			w.self = add(fmt.Sprintf("layer%d.weight", l), in, out, false)
		}
		w.bias = add(fmt.Sprintf("layer%d.bias", l), 1, out, true)
		m.layers = append(m.layers, w)
	}
	var err error
	if m.store, err = m.dev.Alloc(cuda.MemDevice, 4*4*m.n, "model parameters"); err != nil {
		return err
	}
	if m.result, err = m.dev.Alloc(cuda.MemPinned, int64(unsafe.Sizeof(outcome{})), "training outcome"); err != nil {
		return err
	}
	values := make([]float32, m.n)
	key := philox.Key(m.cfg.Seed, philox.StreamInit)
	for i, t := range tensors {
		m.params = append(m.params, Param{t.name, int(t.rows), int(t.cols),
			m.part(t.at, t.rows*t.cols), m.part(2*m.n+t.at, t.rows*t.cols), m.part(3*m.n+t.at, t.rows*t.cols)})
		if t.bias {
			continue
		}
		limit := math.Sqrt(6 / float64(t.rows+t.cols))
		for e := range t.rows * t.cols {
			w := philox.Block(key, [4]uint32{uint32(e / 4), uint32(e / 4 >> 32), uint32(i), 0})
			values[t.at+e] = float32((2*float64(philox.Float32(w[e%4])) - 1) * limit)
		}
	}
	return m.upload(m.ptr(0), values)
}

// part is n floats of the parameter store as a buffer.
func (m *Model) part(at, n int64) cuda.Buffer { return &subBuffer{m.store, at * 4, n * 4} }

func (m *Model) ptr(at int64) cuda.DevicePtr  { return m.store.Ptr() + cuda.DevicePtr(at*4) }
func (m *Model) grad(at int64) cuda.DevicePtr { return m.ptr(m.n + at) }

// subBuffer is a part of another buffer, which owns the memory.
type subBuffer struct {
	cuda.Buffer
	at, size int64
}

func (b *subBuffer) Ptr() cuda.DevicePtr { return b.Buffer.Ptr() + cuda.DevicePtr(b.at) }
func (b *subBuffer) Size() int64         { return b.size }
func (b *subBuffer) Free() error         { return nil }
func (b *subBuffer) Bytes() []byte {
	all := b.Buffer.Bytes()
	if all == nil {
		return nil
	}
	return all[b.at : b.at+b.size : b.at+b.size]
}

// transferTimeout bounds the copies of start-up and of ParamsSHA256, which have no context.
const transferTimeout = 5 * time.Minute

// upload copies values to the device and waits.
func (m *Model) upload(dst cuda.DevicePtr, values []float32) error {
	return m.transfer(int64(len(values))*4, func(s cuda.Stream, stage cuda.Buffer) error {
		copy(unsafe.Slice((*float32)(unsafe.Pointer(&stage.Bytes()[0])), len(values)), values)
		return s.Copy(dst, stage.Ptr(), int64(len(values))*4)
	}, nil)
}

// transfer runs enqueue and then, when the stream is done, use, both with a pinned buffer.
func (m *Model) transfer(size int64, enqueue func(cuda.Stream, cuda.Buffer) error, use func([]byte)) (err error) {
	stage, err := m.dev.Alloc(cuda.MemPinned, size, "parameter transfer")
	if err != nil {
		return err
	}
	s, err := m.dev.NewStream(cuda.StreamOptions{Name: "parameters"})
	if err != nil {
		_ = stage.Free()
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	if err = enqueue(s, stage); err == nil {
		err = s.Synchronize(ctx)
	}
	if err == nil && use != nil {
		use(stage.Bytes())
	}
	if e := s.Close(); err == nil {
		err = e
	}
	if e := stage.Free(); err == nil {
		err = e
	}
	return err
}

// Config is the configuration that the model was made with.
func (m *Model) Config() ModelConfig { return m.cfg }

// Params lists the parameters, input layer first. Their bytes may be read and written while no
// step is in flight.
func (m *Model) Params() []Param { return m.params }

// AdamStep is the number of optimiser steps done.
func (m *Model) AdamStep() int64 { return m.step }

// SetAdamStep goes on from a checkpoint.
func (m *Model) SetAdamStep(n int64) { m.step = n }

// ParamsSHA256 is the hex SHA-256 over every parameter's name, shape (two little-endian uint64)
// and value bytes. No step may be in flight.
func (m *Model) ParamsSHA256() (string, error) {
	h := sha256.New()
	hash := func(all []byte) {
		at := int64(0)
		for _, p := range m.params {
			n := int64(p.Rows) * int64(p.Cols)
			h.Write([]byte(p.Name))
			h.Write(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(p.Rows)), uint64(p.Cols)))
			h.Write(all[at*4 : (at+n)*4])
			at += align(n)
		}
	}
	if all := m.store.Bytes(); all != nil {
		hash(all)
	} else if err := m.transfer(m.n*4, func(s cuda.Stream, stage cuda.Buffer) error {
		return s.Copy(stage.Ptr(), m.ptr(0), m.n*4)
	}, hash); err != nil {
		return "", fmt.Errorf("read parameters: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Close frees the model's memory. No step may be in flight.
func (m *Model) Close() error {
	err := m.freeOld()
	for _, b := range []cuda.Buffer{m.store, m.result, m.work, m.stage} {
		if b != nil {
			if e := b.Free(); err == nil {
				err = e
			}
		}
	}
	return err
}

func (m *Model) freeOld() error {
	var err error
	for _, b := range m.old {
		if e := b.Free(); err == nil {
			err = e
		}
	}
	m.old = m.old[:0]
	return err
}

// plan is the layout of a step's workspace, in floats from its start.
type plan struct {
	h, agg           []int64 // per layer: outputs, aggregates
	logitGrad        int64
	dSelf, dAgg      int64
	tEnd, tDst       int64
	weights          int64 // of edges, see aggParams
	dstWeights       int64 // of blocks with weights
	loss, pred       int64
	scratch          int64 // of kernels that only GPUs have, used by one launch after the other; -1: none
	size             int64
	base             cuda.DevicePtr
	fixedH, fixedAgg [8]int64 // backing of h and agg for the usual depths
	embedAt          int64
}

func (p *plan) take(n int64) int64 {
	at := p.size
	p.size += align(n)
	return at
}

func (p *plan) at(offset int64) cuda.DevicePtr { return p.base + cuda.DevicePtr(offset*4) }

// scratchAt is the scratch memory, or 0.
func (p *plan) scratchAt() cuda.DevicePtr {
	if p.scratch < 0 {
		return 0
	}
	return p.at(p.scratch)
}

// layout places what a step over blocks (hop 0 first, as in a mini-batch) needs.
func (m *Model) layout(blocks []graph.Block, seeds int64, train bool, p *plan) {
	L := m.cfg.Layers
	p.h, p.agg = p.fixedH[:0], p.fixedAgg[:0]
	// Forward only, the aggregate of one layer is dead in the next.
	shared := int64(0)
	for l := range L {
		shared = max(shared, blocks[L-1-l].NumDst*m.dims[l])
	}
	sharedAt := int64(-1)
	if !train {
		sharedAt = p.take(shared)
	}
	for l := range L {
		b := &blocks[L-1-l]
		p.h = append(p.h, p.take(b.NumDst*m.dims[l+1]))
		if train {
			p.agg = append(p.agg, p.take(b.NumDst*m.dims[l]))
		} else {
			p.agg = append(p.agg, sharedAt)
		}
	}
	if m.cfg.Kind == "gcn" {
		p.weights = p.take(blocks[L-1].NumSrc)
	} else if train {
		p.weights = p.take(blocks[L-1].NumDst)
	}
	p.dstWeights = p.take(blocks[L-1].NumDst) // for all blocks, so that nobody needs to know which they are
	p.loss = p.take(2 * seeds)
	p.pred = p.take(seeds)
	p.embedAt = p.h[max(0, L-2)]
	if train {
		p.logitGrad = p.take(seeds * m.dims[L])
		var dst, src, edges int64
		for l := 1; l < L; l++ {
			b := &blocks[L-1-l]
			dst, src, edges = max(dst, b.NumDst*m.dims[l]), max(src, b.NumSrc), max(edges, b.NumEdges)
		}
		p.dAgg = p.take(dst)
		if m.cfg.Kind == "sage" {
			p.dSelf = p.take(dst)
		}
		p.tEnd, p.tDst = p.take(src), p.take(edges)
	}
	p.scratch = -1
	if m.gpu {
		if n := m.scratchBytes(blocks, train); n > 0 {
			p.scratch = p.take((n + 3) / 4)
		}
	}
}

// WorkspaceBytes is how much device memory a step takes beside the parameters, whether it trains or infers, for a mini-batch
// with these numbers: hopEnd as in graph.MiniBatch (its first is that of the seeds), and edges[h] of Blocks[h].
func (m *Model) WorkspaceBytes(hopEnd, edges []int64) int64 {
	blocks := make([]graph.Block, m.cfg.Layers)
	for h := range min(len(blocks), len(edges), len(hopEnd)-1) {
		blocks[h] = graph.Block{NumDst: hopEnd[h], NumSrc: hopEnd[h+1], NumEdges: edges[h]}
	}
	var train, infer plan
	m.layout(blocks, blocks[0].NumDst, true, &train)
	m.layout(blocks, blocks[0].NumDst, false, &infer)
	return workBytes(max(train.size, infer.size) * 4)
}

// workBytes rounds up to what the workspace is allocated in.
func workBytes(n int64) int64 { return (n + 4095) &^ 4095 }

// prepare checks the mini-batch against the model and lays the workspace out. All memory of a step is allocated here, before
// anything is launched.
func (m *Model) prepare(mb *graph.MiniBatch, train bool, p *plan) error {
	L := m.cfg.Layers
	if len(mb.Blocks) != L || len(mb.HopEnd) != L+1 {
		return errs.New(errs.Usage, "the mini-batch has %d of %d hops; give as many fanouts as layers and sample all hops", len(mb.Blocks), L)
	}
	if m.cfg.Kind == "gcn" && mb.Degrees == nil {
		return errs.New(errs.Failed, "gcn needs in-degrees: make the sampler with Degrees set")
	}
	if train {
		for l := 1; l < L; l++ {
			if b := m.block(mb, l); b.NumEdges > math.MaxUint32 {
				return errs.New(errs.Usage, "a block of %d edges passes the limit of 2^32: lower the batch size or the fanouts", b.NumEdges)
			}
		}
	}
	m.layout(mb.Blocks, int64(mb.NumSeeds), train, p)
	if need := p.size * 4; m.work == nil || m.work.Size() < need {
		size := need
		if m.work != nil {
			size += size / 4
		}
		work, err := m.dev.Alloc(cuda.MemDevice, workBytes(size), "activations")
		if oom := (*cuda.OutOfMemoryError)(nil); errors.As(err, &oom) && size > need {
			work, err = m.dev.Alloc(cuda.MemDevice, workBytes(need), "activations")
		}
		if err != nil {
			return err
		}
		if m.work != nil {
			m.old = append(m.old, m.work) // launched steps may still use it
		}
		m.work = work
	}
	p.base = m.work.Ptr()
	return nil
}

// ReleaseWorkspace gives back the memory of activations, which the next step allocates anew at the size that it needs. It is
// for a device that has run out of memory. No step may be in flight; results of the last one are gone.
func (m *Model) ReleaseWorkspace() error {
	err := m.freeOld()
	if m.work != nil {
		if e := m.work.Free(); err == nil {
			err = e
		}
		m.work = nil
	}
	m.last = lastRun{}
	return err
}

// block is the sampled block of layer l.
func (m *Model) block(mb *graph.MiniBatch, l int) *graph.Block {
	return &mb.Blocks[m.cfg.Layers-1-l]
}

// Train enqueues forward pass, backward pass and an Adam step. x is float32[HopEnd[last], InDim]
// in frontier order, which FeatureDropout changes in place; labels is int32[NumSeeds] with -1 for
// seeds that do not count. The mini-batch, x and labels must stay until the stream has done the step.
//
// After an *cuda.OutOfMemoryError parameters and optimiser are as they were, and the step can be done again. A BLAS and launches may
// find memory missing in the middle of a step, too: what was enqueued until then changes activations, gradients and x, which
// must be filled once more if FeatureDropout is set.
func (m *Model) Train(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr, st Step) error {
	var p plan
	if labels == 0 {
		return errs.New(errs.Failed, "train: no labels")
	}
	err := m.prepare(mb, true, &p)
	if err == nil {
		q := m.sink(stream)
		var last lastRun
		if last, err = m.forward(&q, mb, x, labels, &p, &st); err == nil {
			err = m.backward(&q, mb, x, &p)
		}
		if err == nil {
			err = m.adam(&q, &st)
		}
		if err = q.end(err); err == nil {
			m.step++
			m.last = last
		}
	}
	if err != nil {
		return fmt.Errorf("train batch %d of epoch %d: %w", st.Batch, st.Epoch, err)
	}
	return nil
}

// Infer enqueues a forward pass without dropout. labels may be 0.
func (m *Model) Infer(stream cuda.Stream, mb *graph.MiniBatch, x, labels cuda.DevicePtr) error {
	var p plan
	err := m.prepare(mb, false, &p)
	if err == nil {
		q := m.sink(stream)
		var last lastRun
		last, err = m.forward(&q, mb, x, labels, &p, nil)
		if err = q.end(err); err == nil {
			m.last = last
		}
	}
	if err != nil {
		return fmt.Errorf("infer batch %d of epoch %d: %w", mb.Index, mb.Epoch, err)
	}
	return nil
}

// enqueue puts k into a sink with a grid that gives a block at least per of n items.
func enqueue[T any](m *Model, q *stepSink, k cuda.Kernel, n, per int64, p T) error {
	return put(q, k, m.blocksFor(n, per), p)
}

func (m *Model) blocksFor(n, per int64) cuda.LaunchConfig {
	blocks := min(int64(m.grid), (n+per-1)/per)
	return cuda.LaunchConfig{Blocks: int(max(blocks, 1)), Threads: aggThreads}
}

// blocks is the launch of a kernel over n items, of which a block of the host takes at least per, and which are work for so
// many warps on a GPU.
func (m *Model) blocks(n, per, warps int64) cuda.LaunchConfig {
	if m.gpu {
		return m.warpBlocks(warps)
	}
	return m.blocksFor(n, per)
}

// oneBlock is the launch of a kernel that makes one result of many.
func (m *Model) oneBlock() cuda.LaunchConfig {
	if m.gpu {
		return cuda.LaunchConfig{Blocks: 1, Threads: 1024}
	}
	return cuda.LaunchConfig{Blocks: 1, Threads: aggThreads}
}

// rowBlocks is the launch of an aggregate over rows, of which a block of the host takes at least per.
func (m *Model) rowBlocks(rows, per, dim int64) cuda.LaunchConfig {
	if m.gpu {
		return m.aggBlocks(rows, dim)
	}
	return m.blocksFor(rows, per)
}

// gemm enqueues a product.
func (m *Model) gemm(q *stepSink, op gemmOp, p *gemmParams, scratch cuda.DevicePtr) error {
	if p.M == 0 || p.N == 0 {
		return nil
	}
	if m.gpu {
		return m.productGPU(q, op, p, scratch)
	}
	k := [...]cuda.Kernel{opNN: m.k.gemmNN, opNT: m.k.gemmNT, opTN: m.k.gemmTN}[op]
	p.MB, p.NB = gemmTiles(p.M, p.N, p.K+p.K2, int64(m.dev.Info().SMs))
	blocks := (p.M + p.MB - 1) / p.MB * ((p.N + p.NB - 1) / p.NB)
	return put(q, k, cuda.LaunchConfig{Blocks: int(blocks), Threads: 256}, *p)
}

func (m *Model) aggParams(mb *graph.MiniBatch, l int) aggParams {
	b := m.block(mb, l)
	a := aggParams{Indptr: b.Indptr.Ptr(), Src: b.Src.Ptr(), NumDst: b.NumDst, NumSrc: b.NumSrc, Edges: b.NumEdges, Dim: m.dims[l]}
	if m.cfg.Kind == "gcn" {
		a.Degrees = mb.Degrees.Ptr()
	}
	return a
}

// weigh enqueues what a block with weights needs before its aggregation or transpose.
func (m *Model) weigh(q *stepSink, b *graph.Block, a *aggParams, p *plan) error {
	if b.Weights == nil {
		return nil
	}
	a.SrcWeights, a.DstWeights = b.Weights.Ptr(), p.at(p.dstWeights)
	return put(q, m.k.aggWeights, m.blocks(b.NumDst, 256, b.NumDst/32), *a)
}

// forward enqueues the layers and the loss; st is nil outside training.
func (m *Model) forward(q *stepSink, mb *graph.MiniBatch, x, labels cuda.DevicePtr, p *plan, st *Step) (last lastRun, err error) {
	L := m.cfg.Layers
	in := x
	if st != nil && m.cfg.FeatureDropout > 0 {
		if err := m.dropInput(q, x, m.block(mb, 0).NumSrc, st); err != nil {
			return last, err
		}
	}
	for l := range L {
		b := m.block(mb, l)
		a := m.aggParams(mb, l)
		a.X, a.Out, a.Weights = in, p.at(p.agg[l]), p.at(p.weights)
		if err := m.weigh(q, b, &a, p); err != nil {
			return last, err
		}
		if m.cfg.Kind == "gcn" {
			if err := put(q, m.k.weights, m.blocks(b.NumSrc, 4096, b.NumSrc/gpuItems), a); err != nil {
				return last, err
			}
		}
		k := m.k.agg
		if b.Weights != nil {
			k = m.k.aggWeighted
		}
		if err := put(q, k, m.rowBlocks(b.NumDst, 16, a.Dim), a); err != nil {
			return last, err
		}
		w := m.layers[l]
		g := gemmParams{
			M: b.NumDst, N: m.dims[l+1], K: m.dims[l], LDA: m.dims[l], LDB: m.dims[l+1], LDC: m.dims[l+1],
			B: m.ptr(w.self), C: p.at(p.h[l]), Bias: m.ptr(w.bias),
		}
		if w.neigh >= 0 {
			g.A = in // destinations are the first sources
			g.A2, g.B2, g.K2, g.LDA2, g.LDB2 = a.Out, m.ptr(w.neigh), g.K, g.LDA, g.LDB
		} else {
			g.A = a.Out
		}
		if l < L-1 {
			g.Flags = gemmReLU
			if st != nil && m.cfg.Dropout > 0 {
				g.Flags |= gemmDropout
				g.Drop = m.drop(st, m.cfg.Dropout, uint32(l))
			}
		}
		if err := m.gemm(q, opNN, &g, p.scratchAt()); err != nil {
			return last, err
		}
		in = p.at(p.h[l])
	}
	seeds := int64(mb.NumSeeds)
	xp := xentParams{
		Logits: in, Labels: labels, Loss: p.at(p.loss), Pred: p.at(p.pred), Outcome: m.result.Ptr(),
		Rows: seeds, Classes: m.dims[L],
	}
	last = lastRun{seeds: seeds, pred: xp.Pred, embedding: p.at(p.embedAt)}
	if st != nil {
		xp.Grad = p.at(p.logitGrad)
		last.embedding = 0
	}
	if err := put(q, m.k.xentCount, m.oneBlock(), xp); err != nil {
		return last, err
	}
	if err := put(q, m.k.xent, m.blocks(seeds, 64, seeds), xp); err != nil {
		return last, err
	}
	return last, put(q, m.k.xentSum, m.oneBlock(), xp)
}

// drop is the dropout of a step with probability p, for the given layer's counters.
func (m *Model) drop(st *Step, p float32, layer uint32) dropout {
	return dropout{
		Key: philox.Key(st.Seed, philox.StreamDropout), Epoch: uint32(st.Epoch), Batch: uint32(st.Batch), Layer: layer,
		P: p, Scale: 1 / (1 - p),
	}
}

// backward enqueues the gradients of all parameters. dz, the gradient by a layer's outputs
// before activation, takes the place of the layer's activations on its way down.
func (m *Model) backward(q *stepSink, mb *graph.MiniBatch, x cuda.DevicePtr, p *plan) error {
	L := m.cfg.Layers
	dz := p.at(p.logitGrad)
	for l := L - 1; l >= 0; l-- {
		b := m.block(mb, l)
		w := m.layers[l]
		in, out := m.dims[l], m.dims[l+1]
		h := x // the layer's input
		if l > 0 {
			h = p.at(p.h[l-1])
		}
		agg := p.at(p.agg[l])
		tn := gemmParams{M: in, N: out, K: b.NumDst, LDA: in, LDB: out, LDC: out, A: agg, B: dz, C: m.grad(w.self)}
		if w.neigh >= 0 {
			tn.C = m.grad(w.neigh)
			if err := m.gemm(q, opTN, &tn, p.scratchAt()); err != nil {
				return err
			}
			tn.A, tn.C = h, m.grad(w.self)
		}
		if err := m.gemm(q, opTN, &tn, p.scratchAt()); err != nil {
			return err
		}
		if err := m.colSum(q, &sumParams{X: dz, Out: m.grad(w.bias), Rows: b.NumDst, Cols: out}, p.scratchAt()); err != nil {
			return err
		}
		if l == 0 {
			break // nobody wants the gradient of the features
		}
		nt := gemmParams{M: b.NumDst, N: in, K: out, LDA: out, LDB: out, LDC: in, A: dz, B: m.ptr(w.self), C: p.at(p.dAgg)}
		if w.neigh >= 0 {
			nt.C = p.at(p.dSelf)
			if err := m.gemm(q, opNT, &nt, p.scratchAt()); err != nil {
				return err
			}
			nt.B, nt.C = m.ptr(w.neigh), p.at(p.dAgg)
		}
		if err := m.gemm(q, opNT, &nt, p.scratchAt()); err != nil {
			return err
		}
		a := m.aggParams(mb, l)
		a.Out, a.Grad, a.Self, a.Scale = h, p.at(p.dAgg), p.at(p.dSelf), 1
		if m.cfg.Dropout > 0 {
			a.Scale = 1 / (1 - m.cfg.Dropout)
		}
		a.TEnd, a.TDst, a.Weights = p.at(p.tEnd), p.at(p.tDst), p.at(p.weights)
		if err := m.weigh(q, b, &a, p); err != nil {
			return err
		}
		if err := m.transpose(q, &a, p.scratchAt()); err != nil {
			return err
		}
		if err := put(q, m.k.aggBwd, m.rowBlocks(b.NumSrc, 64, a.Dim), a); err != nil {
			return err
		}
		dz = h
	}
	return nil
}

// transpose enqueues the lists of the backward pass.
func (m *Model) transpose(q *stepSink, a *aggParams, scratch cuda.DevicePtr) error {
	if m.gpu {
		return m.transposeGPU(q, a, scratch)
	}
	// A block reads all edges, so there are no more of them than run at one time.
	per := max(4096, (a.NumSrc+int64(m.grid)/4-1)/max(1, int64(m.grid)/4))
	return enqueue(m, q, m.k.transpose, a.NumSrc, per, *a)
}

func (m *Model) colSum(q *stepSink, p *sumParams, scratch cuda.DevicePtr) error {
	if m.gpu {
		return m.colSumGPU(q, p, scratch)
	}
	return enqueue(m, q, m.k.colSum, p.Cols, colSumPer, *p)
}

// adam enqueues the optimiser's step number m.step+1.
func (m *Model) adam(q *stepSink, st *Step) error {
	b1, b2, eps := st.Beta1, st.Beta2, st.Eps
	if b1 == 0 {
		b1 = 0.9
	}
	if b2 == 0 {
		b2 = 0.999
	}
	if eps == 0 {
		eps = 1e-8
	}
	t := float64(m.step + 1)
	a := adamParams{
		P: m.ptr(0), G: m.grad(0), M: m.ptr(2 * m.n), V: m.ptr(3 * m.n), N: m.n,
		AdamStep: simd.AdamStep{
			B1: b1, C1: float32(1 - float64(b1)), B2: b2, C2: float32(1 - float64(b2)),
			StepSize: float32(float64(st.LR) / (1 - math.Pow(float64(b1), t))),
			RootC2:   float32(1 / math.Sqrt(1-math.Pow(float64(b2), t))),
			Eps:      eps,
		},
	}
	if st.Decoupled {
		a.Decay = st.LR * st.WeightDecay
	} else {
		a.L2 = st.WeightDecay
	}
	return put(q, m.k.adamK, m.blocks(m.n, 4096, m.n/gpuItems), a)
}

// Outcome waits for the last Train or Infer and returns its mean loss over the labelled seeds, how
// many of them were predicted correctly, and their number. Without labelled seeds the loss is 0.
func (m *Model) Outcome(ctx context.Context, stream cuda.Stream) (loss float64, correct, counted int64, err error) {
	if err := stream.Synchronize(ctx); err != nil {
		return 0, 0, 0, err
	}
	if err := m.freeOld(); err != nil {
		return 0, 0, 0, err
	}
	o := *(*outcome)(unsafe.Pointer(&m.result.Bytes()[0]))
	return o.Loss, o.Correct, o.Counted, nil
}

// Predictions waits for the last Train or Infer and copies the class of each seed to dst, which
// must have NumSeeds elements.
func (m *Model) Predictions(ctx context.Context, stream cuda.Stream, dst []int32) error {
	if int64(len(dst)) != m.last.seeds {
		return errs.New(errs.Failed, "predictions: room for %d seeds, the batch had %d", len(dst), m.last.seeds)
	}
	raw, err := m.download(ctx, stream, m.last.pred, m.last.seeds*4)
	if err == nil {
		copy(dst, unsafe.Slice((*int32)(unsafe.Pointer(&raw[0])), len(dst)))
	}
	return err
}

// EmbeddingDim is the width of Embeddings: Hidden, or Classes for one layer.
func (m *Model) EmbeddingDim() int { return int(m.dims[max(1, m.cfg.Layers-1)]) }

// Embeddings waits for the last Infer and copies the seeds' activations of the last hidden layer
// (of a model of one layer: the logits) to dst, NumSeeds × EmbeddingDim.
func (m *Model) Embeddings(ctx context.Context, stream cuda.Stream, dst []float32) error {
	if m.last.embedding == 0 {
		return errs.New(errs.Failed, "embeddings: the last step was no inference; call Infer first")
	}
	if n := m.last.seeds * int64(m.EmbeddingDim()); int64(len(dst)) != n {
		return errs.New(errs.Failed, "embeddings: room for %d floats, the batch has %d", len(dst), n)
	}
	raw, err := m.download(ctx, stream, m.last.embedding, int64(len(dst))*4)
	if err == nil {
		copy(dst, unsafe.Slice((*float32)(unsafe.Pointer(&raw[0])), len(dst)))
	}
	return err
}

// download copies device memory through a pinned buffer, whose bytes are good until the next one.
func (m *Model) download(ctx context.Context, stream cuda.Stream, src cuda.DevicePtr, size int64) ([]byte, error) {
	if size == 0 {
		return nil, errs.New(errs.Failed, "nothing was computed yet; call Train or Infer first")
	}
	if m.stage == nil || m.stage.Size() < size {
		if m.stage != nil {
			if err := m.stage.Free(); err != nil {
				return nil, err
			}
			m.stage = nil
		}
		var err error
		if m.stage, err = m.dev.Alloc(cuda.MemPinned, (size+4095)&^4095, "result staging"); err != nil {
			return nil, err
		}
	}
	if err := stream.Copy(m.stage.Ptr(), src, size); err != nil {
		return nil, err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return nil, err
	}
	return m.stage.Bytes()[:size], nil
}
