package gnn

import (
	"slices"
	"strings"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// Arch is a kind of model. Each one has a file of its own, registers itself there, and is the only place
// that knows its name: flags, help and checks take the list from Archs, and everybody else asks the Arch.
type Arch interface {
	// Name is the value of --model.
	Name() string
	// Summary is a line of help.
	Summary() string
	// Degrees tells whether mini-batches must carry the in-degrees of their nodes.
	Degrees() bool
	// Default fills in the options of this kind that are not set, and Check refuses a configuration that it cannot have.
	Default(c *ModelConfig)
	Check(c *ModelConfig) error
	// Forward and Backward list the kernels of layer l over a block, for models of time; Floats counts the
	// layer's parameters. Of c they read the shape only.
	Forward(c *ModelConfig, l int, b BlockShape) []Work
	Backward(c *ModelConfig, l int, b BlockShape) []Work
	Floats(c *ModelConfig, l int) int64

	// kernels are those that a step launches by name, beside the ones of every model.
	kernels(gpu bool) []string
	// declare adds the parameters of a layer; forward and backward find them in m.layers[l] in this order.
	declare(m *Model, l int, t *tensors)
	// layout places what a step needs beside outputs, loss and scratch memory.
	layout(m *Model, blocks []graph.Block, train bool, p *plan)
	// forward enqueues layer l, from its input rows to plan.layers[l].h.
	forward(m *Model, s *step, l int, in cuda.DevicePtr) error
	// backward enqueues the gradients of the layer's parameters and, below it, of the layer's input h, which
	// takes h's place (see aggregateBwd). dz is the gradient by the layer's output before its activation.
	backward(m *Model, s *step, l int, h, dz cuda.DevicePtr) error
}

// archs are the registered kinds, by name.
var archs = map[string]Arch{}

// registerArch makes a kind of model known. It is for init functions.
func registerArch(a Arch) {
	if archs[a.Name()] != nil {
		panic("model " + a.Name() + " is registered twice")
	}
	archs[a.Name()] = a
}

// Archs lists the names of all kinds of models, DefaultArch first and the others by name.
func Archs() []string {
	names := []string{DefaultArch}
	for name := range archs {
		if name != DefaultArch {
			names = append(names, name)
		}
	}
	slices.Sort(names[1:])
	return names
}

// ArchOf finds a kind of model; an empty name is DefaultArch.
func ArchOf(name string) (Arch, error) {
	if name == "" {
		name = DefaultArch
	}
	if a := archs[name]; a != nil {
		return a, nil
	}
	return nil, errs.New(errs.Usage, "model %q is unknown; choose one of %s", name, strings.Join(Archs(), ", "))
}

// width is the number of inputs of layer l; width(Layers) is the number of classes.
func (c *ModelConfig) width(l int) int64 {
	switch l {
	case c.Layers:
		return int64(c.Classes)
	case 0:
		return int64(c.InDim)
	}
	return int64(c.Hidden)
}

// BlockShape is the size of a sampled block: destinations, sources and edges.
type BlockShape struct{ Dst, Src, Edges int64 }

// WorkKind is the resource that bounds a kernel.
type WorkKind int

const (
	WorkLaunch      WorkKind = iota // nothing but the launch
	WorkGather                      // rows from all over memory
	WorkProduct                     // a product of matrices
	WorkElementwise                 // memory in order
)

// Work is what a kernel asks of a device.
type Work struct {
	Kind         WorkKind
	Items, Bytes int64
	Flops        float64
}

// gatherWork reads the rows at both ends of a block's edges.
func gatherWork(edges, rows, dim int64) Work {
	return Work{Kind: WorkGather, Items: edges, Bytes: 4 * dim * (edges + rows)}
}

// productWork multiplies m×k by k×n, pairs times into one result.
func productWork(m, n, k, pairs int64) Work {
	return Work{
		Kind: WorkProduct, Flops: 2 * float64(m) * float64(n) * float64(k) * float64(pairs),
		Bytes: 4 * ((m*k+k*n)*pairs + m*n),
	}
}

func bytesWork(n int64) Work { return Work{Kind: WorkElementwise, Bytes: n} }

// transposeWork turns a block round: fill, count, scan, fill.
func transposeWork(b BlockShape) []Work {
	return []Work{bytesWork(4 * b.Src), bytesWork(8 * b.Edges), {}, bytesWork(12 * b.Edges)}
}

// tensors collects the parameters of a model while it is made.
type tensors struct {
	list []tensor
	n    int64 // floats with padding
}

type tensor struct {
	name           string
	rows, cols, at int64
	limit          float64 // initial values are uniform in ±limit; 0: all are 0
}

// add appends a tensor and returns its place in floats.
func (t *tensors) add(name string, rows, cols int64, limit float64) int64 {
	at := t.n
	t.list = append(t.list, tensor{name, rows, cols, at, limit})
	t.n += align(rows * cols)
	return at
}

// step is a step on its way to a stream: forward and backward of every layer take it.
type step struct {
	stepSink
	mb   *graph.MiniBatch
	set  *Step // nil outside training
	plan plan
}

// launch puts a kernel by its name into a sink.
func launch[T any](m *Model, q *stepSink, name string, cfg cuda.LaunchConfig, p T) error {
	k, err := m.kernel(name)
	if err != nil {
		return err
	}
	return put(q, k, cfg, p)
}

// layerProduct is the product that ends layer l: bias, and ReLU and dropout in hidden layers. The caller adds
// the factors.
func (m *Model) layerProduct(s *step, l int, bias int64) gemmParams {
	b := m.block(s.mb, l)
	in, out := m.dims[l], m.dims[l+1]
	g := gemmParams{
		M: b.NumDst, N: out, K: in, LDA: in, LDB: out, LDC: out,
		C: s.plan.at(s.plan.layers[l].h), Bias: m.ptr(bias),
	}
	g.Flags, g.Drop = m.activation(s, l)
	return g
}

// activation is what follows a layer's sums, as flags of a product.
func (m *Model) activation(s *step, l int) (flags uint32, drop dropout) {
	if l == m.cfg.Layers-1 {
		return 0, dropout{}
	}
	flags = gemmReLU
	if s.set != nil && m.cfg.Dropout > 0 {
		flags |= gemmDropout
		drop = m.drop(s.set, m.cfg.Dropout, uint32(l))
	}
	return flags, drop
}

// keptScale is the factor that dropout gave to what it kept of the hidden activations.
func (m *Model) keptScale() float32 {
	if m.cfg.Dropout > 0 {
		return 1 / (1 - m.cfg.Dropout)
	}
	return 1
}

// aggParams describes the block of layer l.
func (m *Model) aggParams(s *step, l int) aggParams {
	b := m.block(s.mb, l)
	a := aggParams{
		Indptr: pointer(b.Indptr), Src: pointer(b.Src), NumDst: b.NumDst, NumSrc: b.NumSrc,
		Edges: b.NumEdges, Dim: m.dims[l], Scale: 1,
	}
	if m.arch.Degrees() {
		a.Degrees = pointer(s.mb.Degrees)
	}
	return a
}

// pointer is a buffer's address; 0 for none.
func pointer(b cuda.Buffer) cuda.DevicePtr {
	if b == nil {
		return 0
	}
	return b.Ptr()
}

// weigh enqueues what a block with weights needs before its aggregation or transpose.
func (m *Model) weigh(s *step, b *graph.Block, a *aggParams) error {
	if b.Weights == nil {
		return nil
	}
	a.SrcWeights, a.DstWeights = b.Weights.Ptr(), s.plan.at(s.plan.dstWeights)
	return launch(m, &s.stepSink, "agg_weights", m.blocks(b.NumDst, 256, b.NumDst/32), *a)
}

// layoutAggregates places the aggregates of models that aggregate rows of their layer's input.
func layoutAggregates(m *Model, blocks []graph.Block, train bool, p *plan) {
	L := m.cfg.Layers
	if train {
		for l := range L {
			p.layers[l].agg = p.take(blocks[L-1-l].NumDst * m.dims[l])
		}
		return
	}
	// Forward only, the aggregate of one layer is dead in the next.
	most := int64(0)
	for l := range L {
		most = max(most, blocks[L-1-l].NumDst*m.dims[l])
	}
	at := p.take(most)
	for l := range L {
		p.layers[l].agg = at
	}
}

// inputGradient is the largest of the layers above the first: rows of the gradient of their aggregates.
func inputGradient(m *Model, blocks []graph.Block) (floats int64) {
	L := m.cfg.Layers
	for l := 1; l < L; l++ {
		floats = max(floats, blocks[L-1-l].NumDst*m.dims[l])
	}
	return floats
}

// layoutTranspose places the lists of the backward pass of the layers from first on.
func layoutTranspose(m *Model, blocks []graph.Block, first int, p *plan) {
	L := m.cfg.Layers
	var src, edges int64
	for l := first; l < L; l++ {
		b := &blocks[L-1-l]
		src, edges = max(src, b.NumSrc), max(edges, b.NumEdges)
	}
	p.tEnd, p.tDst = p.take(src), p.take(edges)
}

// noOptions refuses the options of kinds of models that have some.
func (c *ModelConfig) noOptions() error {
	if c.LearnEps {
		return errs.New(errs.Usage, "a learned ε is an option of model gin")
	}
	return c.noAttention()
}

func (c *ModelConfig) noAttention() error {
	if c.Heads != 0 || c.AttentionDropout != 0 {
		return errs.New(errs.Usage, "heads and attention dropout are options of model gat")
	}
	return nil
}
