// Package gnn trains graph neural networks on sampled mini-batches, with ReLU and dropout between layers, softmax
// cross-entropy and Adam. Each kind of network is a file that registers an Arch.
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
	Kind                           string // one of Archs
	InDim, Hidden, Classes, Layers int
	Dropout                        float32 // of hidden activations: probability, 0 to below 1
	FeatureDropout                 float32 // of the model's input; Train then changes x in place
	LearnEps                       bool    // of gin: ε is learned, else 0
	Heads                          int     // of gat; 0: 1
	AttentionDropout               float32 // of gat
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
	arch   Arch
	dims   []int64   // input width of layer l; dims[Layers] = Classes
	layers [][]int64 // places in floats of each layer's parameters, as the Arch declared them
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
	named  map[string]cuda.Kernel // see kernel

	last lastRun
}

// lastRun is where the last Train or Infer left its results.
type lastRun struct {
	seeds     int64
	pred      cuda.DevicePtr
	embedding cuda.DevicePtr // float32[seeds, embDim], 0 after Train
}

type kernels struct {
	gemmNN, gemmNT, gemmTN                  cuda.Kernel
	colSum, xentCount, xent, xentSum, adamK cuda.Kernel
	dropInput                               cuda.Kernel
}

// alignFloats starts every tensor on a 256-byte boundary.
const alignFloats = 64

func align(n int64) int64 { return (n + alignFloats - 1) &^ (alignFloats - 1) }

// NewModel makes a model with weights from the uniform distribution of Glorot and Bengio
// (AISTATS 2010), ±sqrt(6/(in+out)), drawn by Philox from cfg.Seed, and biases of 0.
func NewModel(dev cuda.Device, cfg ModelConfig) (*Model, error) {
	arch, err := ArchOf(cfg.Kind)
	if err != nil {
		return nil, err
	}
	switch {
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
	if err := arch.Check(&cfg); err != nil {
		return nil, err
	}
	m := newModel(dev)
	m.cfg, m.arch = cfg, arch
	if !m.gpu && (cfg.Precision != cuda.FP32 || cfg.BLAS != nil) {
		return nil, errs.New(errs.Usage, "device %s computes products in fp32 by its own kernels; precision %v and a BLAS are for --device cuda",
			dev.Info().Name, cfg.Precision)
	}
	for l := range cfg.Layers + 1 {
		m.dims = append(m.dims, cfg.width(l))
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
	for _, k := range []struct {
		dst  *cuda.Kernel
		name string
	}{
		{&m.k.colSum, "col_sum"}, {&m.k.xentCount, "xent_count"}, {&m.k.xent, "softmax_xent"}, {&m.k.xentSum, "xent_sum"},
		{&m.k.adamK, "adam"}, {&m.k.dropInput, "drop_input"},
	} {
		var err error
		if *k.dst, err = m.dev.Kernel(k.name); err != nil {
			return err
		}
	}
	return m.findNamed(m.arch.kernels(false))
}

// findNamed loads kernels beforehand.
func (m *Model) findNamed(names []string) error {
	for _, name := range names {
		if _, err := m.kernel(name); err != nil {
			return err
		}
	}
	return nil
}

// glorot is the limit of the uniform distribution of Glorot and Bengio (AISTATS 2010).
func glorot(in, out int64) float64 { return math.Sqrt(6 / float64(in+out)) }

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
	var all tensors
	m.layers = make([][]int64, m.cfg.Layers)
	for l := range m.cfg.Layers {
		m.arch.declare(m, l, &all)
	}
	m.n = all.n
	var err error
	if m.store, err = m.dev.Alloc(cuda.MemDevice, 4*4*m.n, "model parameters"); err != nil {
		return err
	}
	if m.result, err = m.dev.Alloc(cuda.MemPinned, int64(unsafe.Sizeof(outcome{})), "training outcome"); err != nil {
		return err
	}
	values := make([]float32, m.n)
	key := philox.Key(m.cfg.Seed, philox.StreamInit)
	for i, t := range all.list {
		m.params = append(m.params, Param{t.name, int(t.rows), int(t.cols),
			m.part(t.at, t.rows*t.cols), m.part(2*m.n+t.at, t.rows*t.cols), m.part(3*m.n+t.at, t.rows*t.cols)})
		if t.limit == 0 {
			continue
		}
		for e := range t.rows * t.cols {
			w := philox.Block(key, [4]uint32{uint32(e / 4), uint32(e / 4 >> 32), uint32(i), 0})
			values[t.at+e] = float32((2*float64(philox.Float32(w[e%4])) - 1) * t.limit)
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
	layers      []layerPlan
	logitGrad   int64
	dSelf, dAgg int64
	dMid        int64
	gat         gatPlan
	tEnd, tDst  int64
	weights     int64 // of edges, see aggParams
	dstWeights  int64 // of blocks with weights
	loss, pred  int64
	scratch     int64 // of kernels that only GPUs have, used by one launch after the other; -1: none
	size        int64
	base        cuda.DevicePtr
	fixed       [8]layerPlan // backing of layers for the usual depths
	embedAt     int64
}

// layerPlan is what a layer keeps until its backward pass: its output, and what its Arch makes of agg and mid.
type layerPlan struct{ h, agg, mid int64 }

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
func (m *Model) layout(mb *graph.MiniBatch, train bool, s *step) {
	L, blocks, p, seeds := m.cfg.Layers, mb.Blocks, &s.plan, int64(mb.NumSeeds)
	s.mb = mb
	p.layers = p.fixed[:0]
	for l := range L {
		p.layers = append(p.layers, layerPlan{h: p.take(blocks[L-1-l].NumDst * m.dims[l+1])})
	}
	m.arch.layout(m, blocks, train, p)
	p.loss = p.take(2 * seeds)
	p.pred = p.take(seeds)
	p.embedAt = p.layers[max(0, L-2)].h
	if train {
		p.logitGrad = p.take(seeds * m.dims[L])
	}
	p.scratch = -1
	if m.gpu {
		if n := m.scratchBytes(s, train); n > 0 {
			p.scratch = p.take((n + 3) / 4)
		}
	}
}

// scratchBytes is the most that a kernel of a step takes beside its operands: the step is written once without a stream.
func (m *Model) scratchBytes(s *step, train bool) (n int64) {
	dry := step{stepSink: stepSink{measure: &n}, mb: s.mb, plan: s.plan}
	if train {
		dry.set = &Step{}
	}
	for l := range m.cfg.Layers {
		if err := m.arch.forward(m, &dry, l, 0); err != nil {
			return n // the step itself will say it
		}
	}
	for l := m.cfg.Layers - 1; l >= 0 && train; l-- {
		if err := m.arch.backward(m, &dry, l, 0, 0); err != nil {
			return n
		}
	}
	return n
}

// WorkspaceBytes is how much device memory a step takes beside the parameters, whether it trains or infers, for a mini-batch
// with these numbers: hopEnd as in graph.MiniBatch (its first is that of the seeds), and edges[h] of Blocks[h].
func (m *Model) WorkspaceBytes(hopEnd, edges []int64) int64 {
	blocks := make([]graph.Block, m.cfg.Layers)
	for h := range min(len(blocks), len(edges), len(hopEnd)-1) {
		blocks[h] = graph.Block{NumDst: hopEnd[h], NumSrc: hopEnd[h+1], NumEdges: edges[h]}
	}
	mb := &graph.MiniBatch{Blocks: blocks, NumSeeds: int(blocks[0].NumDst)}
	var train, infer step
	m.layout(mb, true, &train)
	m.layout(mb, false, &infer)
	return workBytes(max(train.plan.size, infer.plan.size) * 4)
}

// workBytes rounds up to what the workspace is allocated in.
func workBytes(n int64) int64 { return (n + 4095) &^ 4095 }

// prepare checks the mini-batch against the model and lays the workspace out. All memory of a step is allocated here, before
// anything is launched.
func (m *Model) prepare(mb *graph.MiniBatch, train bool, s *step) error {
	L := m.cfg.Layers
	if len(mb.Blocks) != L || len(mb.HopEnd) != L+1 {
		return errs.New(errs.Usage, "the mini-batch has %d of %d hops; give as many fanouts as layers and sample all hops", len(mb.Blocks), L)
	}
	if m.arch.Degrees() && mb.Degrees == nil {
		return errs.New(errs.Failed, "%s needs in-degrees: make the sampler with Degrees set", m.arch.Name())
	}
	if train {
		for l := 1; l < L; l++ {
			if b := m.block(mb, l); b.NumEdges > math.MaxUint32 {
				return errs.New(errs.Usage, "a block of %d edges passes the limit of 2^32: lower the batch size or the fanouts", b.NumEdges)
			}
		}
	}
	p := &s.plan
	m.layout(mb, train, s)
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
	var s step
	if labels == 0 {
		return errs.New(errs.Failed, "train: no labels")
	}
	err := m.prepare(mb, true, &s)
	if err == nil {
		s.stepSink, s.set = m.sink(stream), &st
		var last lastRun
		if last, err = m.forward(&s, x, labels); err == nil {
			err = m.backward(&s, x)
		}
		if err == nil {
			err = m.adam(&s.stepSink, &st)
		}
		if err = s.end(err); err == nil {
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
	var s step
	err := m.prepare(mb, false, &s)
	if err == nil {
		s.stepSink = m.sink(stream)
		var last lastRun
		last, err = m.forward(&s, x, labels)
		if err = s.end(err); err == nil {
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
	if q.measure != nil {
		return m.measureProduct(q, op, p)
	}
	if m.gpu {
		return m.productGPU(q, op, p, scratch)
	}
	k := [...]cuda.Kernel{opNN: m.k.gemmNN, opNT: m.k.gemmNT, opTN: m.k.gemmTN}[op]
	p.MB, p.NB = gemmTiles(p.M, p.N, p.K+p.K2, int64(m.dev.Info().SMs))
	blocks := (p.M + p.MB - 1) / p.MB * ((p.N + p.NB - 1) / p.NB)
	return put(q, k, cuda.LaunchConfig{Blocks: int(blocks), Threads: 256}, *p)
}

// forward enqueues the layers and the loss.
func (m *Model) forward(s *step, x, labels cuda.DevicePtr) (last lastRun, err error) {
	L, p, q := m.cfg.Layers, &s.plan, &s.stepSink
	in := x
	if s.set != nil && m.cfg.FeatureDropout > 0 {
		if err := m.dropInput(q, x, m.block(s.mb, 0).NumSrc, s.set); err != nil {
			return last, err
		}
	}
	for l := range L {
		if err := m.arch.forward(m, s, l, in); err != nil {
			return last, err
		}
		in = p.at(p.layers[l].h)
	}
	seeds := int64(s.mb.NumSeeds)
	xp := xentParams{
		Logits: in, Labels: labels, Loss: p.at(p.loss), Pred: p.at(p.pred), Outcome: m.result.Ptr(),
		Rows: seeds, Classes: m.dims[L],
	}
	last = lastRun{seeds: seeds, pred: xp.Pred, embedding: p.at(p.embedAt)}
	if s.set != nil {
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
func (m *Model) backward(s *step, x cuda.DevicePtr) error {
	dz := s.plan.at(s.plan.logitGrad)
	for l := m.cfg.Layers - 1; l >= 0; l-- {
		h := x // the layer's input
		if l > 0 {
			h = s.plan.at(s.plan.layers[l-1].h)
		}
		if err := m.arch.backward(m, s, l, h, dz); err != nil {
			return err
		}
		dz = h
	}
	return nil
}

// transpose enqueues the lists of the backward pass; name is the host's kernel.
func (m *Model) transpose(q *stepSink, name string, a *aggParams, scratch cuda.DevicePtr) error {
	if q.need(func() int64 { return transposeScratch(a.NumSrc, a.Edges) }) {
		return nil
	}
	if m.gpu {
		return m.transposeGPU(q, a, scratch)
	}
	// A block reads all edges, so there are no more of them than run at one time.
	per := max(4096, (a.NumSrc+int64(m.grid)/4-1)/max(1, int64(m.grid)/4))
	return launch(m, q, name, m.blocksFor(a.NumSrc, per), *a)
}

func (m *Model) colSum(q *stepSink, p *sumParams, scratch cuda.DevicePtr) error {
	if q.need(func() int64 { return colSumScratch(p.Rows, p.Cols) }) {
		return nil
	}
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
