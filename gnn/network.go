package gnn

import (
	"math"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/options"
)

// network is the shape of a model: its kind, its layers, and where the parameters of each stand. It
// has no memory on any device.
type network struct {
	cfg    ModelConfig
	arch   Arch
	act    *Activation
	norm   Norm // nil: none
	loss   *Loss
	fused  bool      // ReLU and no more between layers, see between
	dims   []int64   // input width of layer l; dims[Layers] is that of the last layer's output
	layers [][]int64 // places in floats of each layer's parameters, as the Arch declared them
	skips  [][]skip  // each layer's residual connections
	norms  []normSite
	head   []denseLayer
	stride int64   // floats from a row that was read to the next
	tables []table // of the types without rows
}

// newNetwork checks a configuration.
func newNetwork(cfg ModelConfig) (*network, error) {
	arch, err := ArchOf(cfg.Model)
	if err != nil {
		return nil, err
	}
	n := &network{cfg: cfg, arch: arch}
	if err := n.resolveTables(); err != nil {
		return nil, err
	}
	cfg = n.cfg
	if err := cfg.checkShape(); err != nil {
		return nil, err
	}
	if err := options.Check(&cfg.ModelSettings); err != nil {
		return nil, err
	}
	if err := cfg.CheckKind(); err != nil {
		return nil, err
	}
	if err := cfg.CheckSchema(cfg.Schema != nil); err != nil {
		return nil, err
	}
	act, err := ActivationOf(cfg.Activation)
	if err != nil {
		return nil, err
	}
	norm, err := NormOf(cfg.Norm)
	if err != nil {
		return nil, err
	}
	if err := cfg.checkLoss(); err != nil {
		return nil, err
	}
	loss, err := lossOf(cfg.Loss)
	if err != nil {
		return nil, err
	}
	n.act, n.norm, n.loss = act, norm, loss
	n.fused = act.Name == DefaultActivation && norm == nil && !cfg.residual() &&
		(cfg.Schema == nil || cfg.fusesTypes() && !n.learnsInput()) &&
		cfg.Head != headMLP
	for l := range cfg.Layers + 1 {
		n.dims = append(n.dims, cfg.width(l))
	}
	return n, nil
}

func (c *ModelConfig) checkShape() error {
	switch {
	case c.Layers < 1 || c.Layers > 255:
		return errs.New(errs.Usage,
			"model: %d layers; give a fanout for each of 1 to 255 layers", c.Layers)
	case c.InDim < 1 || c.Classes < 1 || c.Layers > 1 && c.Hidden < 1:
		return errs.New(errs.Usage,
			"model: %d features, %d hidden, %d classes: all must be at least 1", c.InDim, c.Hidden,
			c.Classes)
	case max(c.InDim, c.Hidden, c.Classes) > 1<<20:
		return errs.New(errs.Usage, "model: %d features, %d hidden, %d classes: the limit is %d",
			c.InDim, c.Hidden, c.Classes, 1<<20)
	}
	return nil
}

// kernels are those that this network's Arch, Activation and Norm launch by name.
func (n *network) kernels(gpu bool) []string {
	loss := n.loss.kernels()
	names := append(n.arch.kernels(gpu), loss[:]...)
	if n.cfg.Schema != nil {
		names = append(names, "table_get", "table_put")
	}
	if n.fused && n.cfg.Schema == nil {
		return names
	}
	names = append(names, n.act.kernels()...)
	if n.norm != nil {
		names = append(names, n.norm.kernels()...)
	}
	if n.cfg.residual() {
		names = append(names, "add_rows")
	}
	if n.cfg.Head == headMLP {
		names = append(append(names, batchNorm{}.kernels()...), reluActivation.kernels()...)
	}
	return names
}

// declare lists the parameters; gradients change the first learns floats of them.
func (n *network) declare(all *tensors) (learns int64) {
	n.declareTables(all)
	n.layers = make([][]int64, n.cfg.Layers)
	for l := range n.cfg.Layers {
		n.arch.declare(n, l, all)
	}
	n.skips = make([][]skip, n.cfg.Layers)
	for l := range n.cfg.Layers {
		n.declareBetween(l, all)
	}
	n.declareHead(all)
	learns = all.n
	for i := range n.norms {
		n.norms[i].norm.state(&n.norms[i], all)
	}
	return learns
}

// check holds a mini-batch against the network.
func (n *network) check(mb *graph.MiniBatch, train bool) error {
	L := n.cfg.Layers
	if len(mb.Blocks) != L || len(mb.HopEnd) != L+1 {
		return errs.New(errs.Usage,
			"the mini-batch has %d of %d hops; give as many fanouts as layers and sample all hops",
			len(mb.Blocks), L)
	}
	if (n.cfg.Schema != nil) != (mb.TypeEnd != nil) {
		return errs.New(errs.Failed, "model %s: the mini-batch is of another kind of graph",
			n.arch.Name())
	}
	if (n.learnsInput() || n.cfg.Featureless) && mb.Nodes == nil {
		return errs.New(errs.Failed, "model %s: the mini-batch has no numbers of its nodes",
			n.arch.Name())
	}
	if n.arch.Degrees() && mb.Degrees == nil {
		return errs.New(errs.Failed, "%s needs in-degrees: make the sampler with Degrees set",
			n.arch.Name())
	}
	for l := 1; l < L && train; l++ {
		if b := &mb.Blocks[L-1-l]; b.NumEdges > math.MaxUint32 {
			return errs.New(errs.Usage,
				"a block of %d edges passes the limit of 2^32: lower the batch size or the fanouts",
				b.NumEdges)
		}
	}
	return nil
}

// layout places what a step over blocks (hop 0 first, as in a mini-batch) needs, scratch memory
// aside.
func (n *network) layout(mb *graph.MiniBatch, train bool, p *plan) {
	L, blocks, seeds := n.cfg.Layers, mb.Blocks, int64(mb.NumSeeds)
	p.layers = p.fixed[:0]
	for l := range L {
		p.layers = append(p.layers, layerPlan{h: p.take(blocks[L-1-l].NumDst * n.dims[l+1])})
	}
	for l := range L {
		n.layoutBetween(l, blocks[L-1-l].NumDst, mb, train, p)
	}
	n.layoutHead(seeds, p)
	n.layoutInput(blocks[L-1].NumSrc, p)
	n.layoutSkips(func(l int) int64 { return blocks[L-1-l].NumDst }, train, p)
	if t, ok := n.arch.(rgat); ok {
		t.layoutTyped(n, mb, train, p)
	} else {
		n.arch.layout(n, blocks, train, p)
	}
	p.loss = p.take(2 * seeds)
	p.pred = p.take(seeds)
	p.embedAt = p.layers[n.embeds()].out
	if train {
		p.logitGrad = p.take(seeds * int64(n.cfg.Classes))
	}
	p.scratch = -1
}

// embeds is the layer whose output is a node's embedding: the last hidden one, or the only one.
func (n *network) embeds() int {
	if n.cfg.headed() {
		return n.cfg.Layers - 1
	}
	return max(0, n.cfg.Layers-2)
}

// embeddingDim is the width of embeddings.
func (n *network) embeddingDim() int { return int(n.dims[n.embeds()+1]) }

// pointer is a buffer's address; 0 for none.
func pointer(b cuda.Buffer) cuda.DevicePtr {
	if b == nil {
		return 0
	}
	return b.Ptr()
}
