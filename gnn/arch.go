package gnn

import (
	"cmp"
	"slices"
	"strings"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
)

// Arch is a kind of model. Each one has a file of its own, which alone knows its name, and stands
// in the list of this one: flags, help and checks take the names from Archs, and everybody else
// asks the Arch.
type Arch interface {
	// Name is the value of --model.
	Name() string
	// Summary is a line of help.
	Summary() string
	// Degrees reports whether mini-batches must carry the in-degrees of their nodes.
	Degrees() bool
	// Default fills in the options of this kind that are not set, and Check refuses a configuration
	// that it cannot have.
	Default(c *ModelSettings)
	Check(c *ModelConfig) error
	// Forward and Backward list the kernels of layer l over a block, for models of time; Floats
	// counts the layer's parameters. Of c they read the shape only.
	Forward(c *ModelConfig, l int, b BlockShape) []Work
	Backward(c *ModelConfig, l int, b BlockShape) []Work
	Floats(c *ModelConfig, l int) int64

	// kernels are those that a step launches by name, beside the ones of every model.
	kernels(gpu bool) []string
	// declare adds the parameters of a layer; forward and backward find them in s.layers[l] in this
	// order.
	declare(n *network, l int, t *tensors)
	// layout places a step's memory beside outputs, loss and scratch memory.
	layout(n *network, blocks []graph.Block, train bool, p *plan)
	// forward enqueues layer l, from its input rows to plan.layers[l].h, with what activation says
	// is done to the sums.
	forward(s *step, l int, in cuda.DevicePtr) error
	// backward enqueues the gradients of the layer's parameters and, above the first layer, of its
	// input h, which takes h's place (see gate and aggregateBwd). dz, the gradient by the layer's
	// sums, stays as it is.
	backward(s *step, l int, h, dz cuda.DevicePtr) error
}

// archs are the kinds of models of graphs without types in the order of lists, the default first;
// typedArchs are those of typed graphs.
var (
	archs      = []Arch{sage{}, gat{}, gcn{}, gin{}}
	typedArchs = []Arch{rsage{}, rgcn{}, rgat{}}
)

// Archs lists the names of the kinds of models of graphs without types, DefaultArch first.
func Archs() []string { return archNames(archs) }

// TypedArchs lists the names of the kinds of models of typed graphs.
func TypedArchs() []string { return archNames(typedArchs) }

func archNames(list []Arch) (names []string) {
	for _, a := range list {
		names = append(names, a.Name())
	}
	return names
}

// Models lists the names of all kinds of models.
func Models() []string { return append(Archs(), TypedArchs()...) }

// CheckSchema refuses a kind of model on a graph that it is not for.
func (c *ModelConfig) CheckSchema(typed bool) error {
	arch, err := ArchOf(c.Model)
	if err != nil {
		return err
	}
	if slices.Contains(typedArchs, arch) == typed {
		return nil
	}
	if typed {
		return errs.New(errs.Capability,
			"model %s is for graphs without types, and this graph has types; use {model} %s",
			arch.Name(), strings.Join(TypedArchs(), ", "))
	}
	return errs.New(errs.Capability,
		"model %s is for typed graphs, and this graph has no types; use {model} %s", arch.Name(),
		strings.Join(Archs(), ", "))
}

// ArchOf finds a kind of model; an empty name is DefaultArch.
func ArchOf(name string) (Arch, error) {
	if name == "" {
		name = DefaultArch
	}
	for _, a := range append(slices.Clone(archs), typedArchs...) {
		if a.Name() == name {
			return a, nil
		}
	}
	return nil, errs.New(errs.Usage, "model %q is unknown; choose one of %s", name,
		strings.Join(Models(), ", "))
}

// rounder is a kind of model whose kernels rounded otherwise in older programs. Its answer changes
// with each such change.
type rounder interface{ rounding() string }

// Rounding names how the kernels of a kind of model round; empty: as they always have.
func Rounding(model string) string {
	if a, err := ArchOf(model); err == nil {
		if r, ok := a.(rounder); ok {
			return r.rounding()
		}
	}
	return ""
}

// CheckKind refuses names that are in no registry, and options that the kind of model does not
// have.
func (c *ModelConfig) CheckKind() error {
	arch, err := ArchOf(c.Model)
	if err != nil {
		return err
	}
	if _, err := ActivationOf(c.Activation); err != nil {
		return err
	}
	if _, err := NormOf(c.Norm); err != nil {
		return err
	}
	if c.ShareTypes {
		if !slices.Contains(typedArchs, arch) {
			return errs.New(errs.Usage, "{share-types} is for models of typed graphs: %s",
				strings.Join(TypedArchs(), ", "))
		}
		if err := c.equalWidths(errs.Key("share-types")); err != nil {
			return err
		}
	}
	return arch.Check(c)
}

// width is the number of inputs of layer l; width(Layers) is that of its output:
// the number of classes, or Hidden before a head.
func (c *ModelConfig) width(l int) int64 {
	switch {
	case l == c.Layers && !c.headed():
		return int64(c.Classes)
	case l == 0:
		return int64(c.InDim)
	}
	return int64(c.Hidden)
}

// layoutAggregates places the aggregates of models that aggregate rows of their layer's input.
func layoutAggregates(n *network, blocks []graph.Block, train bool, p *plan) {
	L := n.cfg.Layers
	if train {
		for l := range L {
			p.layers[l].agg = p.take(blocks[L-1-l].NumDst * n.dims[l])
		}
		return
	}
	// Forward only, the aggregate of one layer is dead in the next.
	largest := int64(0)
	for l := range L {
		largest = max(largest, blocks[L-1-l].NumDst*n.dims[l])
	}
	offset := p.take(largest)
	for l := range L {
		p.layers[l].agg = offset
	}
}

// inputGradient is the largest of the layers above the first: rows of the gradient of their
// aggregates.
func inputGradient(n *network, blocks []graph.Block) (floats int64) {
	L := n.cfg.Layers
	for l := 1; l < L; l++ {
		floats = max(floats, blocks[L-1-l].NumDst*n.dims[l])
	}
	return floats
}

// layoutTranspose places the lists of the backward pass of the layers from first on.
func layoutTranspose(n *network, blocks []graph.Block, first int, p *plan) {
	L := n.cfg.Layers
	var src, edges int64
	for l := first; l < L; l++ {
		b := &blocks[L-1-l]
		src, edges = max(src, b.NumSrc), max(edges, b.NumEdges)
	}
	p.tEnd, p.tDst = p.take(src), p.take(edges)
}

// noOptions refuses the options of kinds of models that have some.
func (c *ModelConfig) noOptions() error {
	return cmp.Or(c.noLoops(), c.noTyped(), c.noEps(), c.noAttention())
}

// noTyped refuses the options of models of typed graphs.
func (c *ModelConfig) noTyped() error {
	if c.Root != "" && c.Root != Roots()[0] {
		return errs.New(errs.Usage, "roots are an option of model rsage")
	}
	if c.Bases != 0 {
		return errs.New(errs.Usage, "bases are an option of model rgcn")
	}
	return nil
}

func (c *ModelConfig) noEps() error {
	if c.LearnEps {
		return errs.New(errs.Usage, "a learned ε is an option of model gin")
	}
	return nil
}

func (c *ModelConfig) noLoops() error {
	if c.remaining() {
		return errs.New(errs.Usage, "remaining self loops are an option of models gcn and gat")
	}
	return nil
}

// remaining reports whether a node is its own neighbour exactly once, whatever edges to itself the
// graph has.
func (c *ModelSettings) remaining() bool { return c.SelfLoops == LoopsRemaining }

// LooplessDegrees reports whether the in-degrees of mini-batches leave out edges of a node to
// itself.
func (c *ModelSettings) LooplessDegrees() bool {
	arch, err := ArchOf(c.Model)
	return err == nil && arch.Degrees() && c.remaining()
}

func (c *ModelConfig) noAttention() error {
	if c.Heads != 0 || c.OutHeads != 0 || c.AttentionDropout != 0 {
		return errs.New(errs.Usage, "heads and attention dropout are options of model gat and rgat")
	}
	return nil
}
