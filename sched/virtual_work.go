package sched

import (
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/hardware"
	"helios/internal/rowtype"
)

// What each operator asks of the GPU, from a real batch's shapes. Launches are those of packages
// graph, cache and gnn; bytes are float32.

// vshape is what the virtual clock needs to know of a mini-batch: everything but its contents.
type vshape struct {
	index  int
	seeds  int64
	hopEnd []int64
	blocks []vblock // by hop
	parts  []vpart
	at     int  // batch of the pass
	closes bool // it is the last of a group of batches whose reads are merged
	// announced: a window buffer has heard of it before it is looked up.
	announced bool
}

// vblock is a hop. listed is how many in-neighbours its destinations have: layer-wise sampling reads them all.
type vblock struct{ dst, src, edges, listed int64 }

// vpart is a part of a frontier, looked up in the real caches.
type vpart struct {
	count, ngpu, ncpu, nmiss int64
	reads                    []gpuio.Planned // by SSD
	// Lines that a dynamic tier takes from what was read, those it lets go for them, and those it takes not.
	fills, evicted, bypassed int64
}

func shapeOf(mb *graph.MiniBatch) vshape {
	s := vshape{index: mb.Index, seeds: int64(mb.NumSeeds), hopEnd: append([]int64(nil), mb.HopEnd...)}
	for _, b := range mb.Blocks {
		s.blocks = append(s.blocks, vblock{dst: b.NumDst, src: b.NumSrc, edges: b.NumEdges})
	}
	return s
}

// lists fills in how many in-neighbours each hop's destinations have.
func (s *vshape) lists(indptr, nodes []int64) {
	var sum, at int64
	for h := range s.blocks {
		for ; at < s.blocks[h].dst; at++ {
			v := nodes[at]
			sum += indptr[v+1] - indptr[v]
		}
		s.blocks[h].listed = sum
	}
}

// vwork turns shapes into kernels.
type vwork struct {
	ops      *hardware.Ops
	fanouts  []int
	idBytes  int64 // of a neighbour in the topology
	arch     gnn.Arch
	shape    gnn.ModelConfig
	ladies   bool
	lines    int64 // bytes of a line of a dynamic tier
	rowBytes int64
	widen    bool // rows become float32 before they are trained on
	params   int64
}

// sector is what a kernel's read of a few bytes of the CPU's memory moves over the link.
const sector = 32

func newVWork(ops *hardware.Ops, cfg Config, dim int, t rowtype.Type, classes int, wideIDs bool) *vwork {
	w := &vwork{ops: ops, fanouts: cfg.Fanouts, idBytes: 4, arch: cfg.arch(), ladies: cfg.Sampler == SamplerLadies, rowBytes: int64(t.RowBytes(dim)), widen: t != rowtype.Float32}
	if wideIDs {
		w.idBytes = 8
	}
	w.shape = gnn.ModelConfig{Kind: cfg.Model, InDim: dim, Hidden: cfg.Hidden, Classes: classes, Layers: len(cfg.Fanouts), Heads: cfg.Heads, LearnEps: cfg.LearnEps}
	for l := range cfg.Fanouts {
		w.params += w.arch.Floats(&w.shape, l)
	}
	return w
}

// begin copies the seeds and enters them in the position table.
func (w *vwork) begin(s *vshape) []vkernel { return []vkernel{{uva: s.seeds * 8}} }

// hop samples hop h. The topology is in the CPU's memory: two offsets of each destination, and of its
// neighbours those that were drawn, which lie anywhere in its list, or the whole list.
func (w *vwork) hop(s *vshape, h int) []vkernel {
	b := s.blocks[h]
	offsets, ids := b.dst*sector, b.edges*sector
	if w.fanouts[h] < 0 {
		ids = b.edges * w.idBytes
	}
	items := b.edges
	if w.ladies { // whole lists, once for the probabilities and once for the edges between the layers
		ids, items = 2*b.listed*w.idBytes, 2*b.listed
	}
	assign := vkernel{}
	if w.arch.Degrees() { // the new nodes' degrees
		assign.uva = (b.src - b.dst) * sector
	}
	return []vkernel{
		{uva: offsets}, // sample_count
		{op: &w.ops.Sample, work: hardware.Work{Items: items}, uva: ids}, // sample_fill
		{}, assign, {}, // unique_count, unique_assign, unique_relabel: their time is in sample's item
	}
}

// count adds a sampled batch to the rows' hotness.
func (w *vwork) hotness(rows int64) []vkernel {
	return []vkernel{{op: &w.ops.Elementwise, work: hardware.Work{Bytes: rows * 16}}}
}

// lookup finds a part's rows in the cache's index.
func (w *vwork) lookup(p *vpart) []vkernel {
	k := []vkernel{{op: &w.ops.Lookup, work: hardware.Work{Items: p.count}}}
	if p.count >= 1024 { // more than one block: count, prefix, scatter
		k = append(k, vkernel{}, vkernel{})
	}
	return k
}

// gather copies a part's cached rows to their places.
func (w *vwork) gather(p *vpart) []vkernel {
	return []vkernel{{
		op:   &w.ops.Gather,
		work: hardware.Work{Items: p.ngpu + p.ncpu, Bytes: (2*p.ngpu + p.ncpu) * w.rowBytes},
		uva:  p.ncpu * w.rowBytes,
	}}
}

// finish copies what a staged part needs to its places: cached rows, those that were read, and from there the lines that
// a dynamic tier takes.
func (w *vwork) finish(p *vpart) []vkernel {
	k := vkernel{
		op:   &w.ops.Gather,
		work: hardware.Work{Items: p.count + p.fills, Bytes: (2*(p.ngpu+p.nmiss)+p.ncpu)*w.rowBytes + 2*p.fills*w.lines},
		uva:  p.ncpu * w.rowBytes,
	}
	if p.fills > 0 {
		return []vkernel{k, {}} // hits and rows, then fills
	}
	return []vkernel{k}
}

func (w *vwork) bytes(n int64) vkernel {
	return vkernel{op: &w.ops.Elementwise, work: hardware.Work{Bytes: n}}
}

// layer turns the kernels of a model's layer into those of the clock.
func (w *vwork) layer(list []gnn.Work) []vkernel {
	ops := map[gnn.WorkKind]*hardware.Op{gnn.WorkGather: &w.ops.Gather, gnn.WorkProduct: &w.ops.GEMM, gnn.WorkElementwise: &w.ops.Elementwise}
	out := make([]vkernel, len(list))
	for i, k := range list {
		if op := ops[k.Kind]; op != nil {
			out[i] = vkernel{op: op, work: hardware.Work{Items: k.Items, Bytes: k.Bytes, Flops: k.Flops}}
		}
	}
	return out
}

// model is a step of training, or a forward pass.
func (w *vwork) model(s *vshape, train bool) []vkernel {
	L := len(w.fanouts)
	var out []vkernel
	add := func(k ...vkernel) { out = append(out, k...) }
	block := func(l int) gnn.BlockShape {
		b := s.blocks[L-1-l]
		return gnn.BlockShape{Dst: b.dst, Src: b.src, Edges: b.edges}
	}
	if w.widen { // convert_rows
		add(w.bytes(s.hopEnd[L] * (w.rowBytes + 4*int64(w.shape.InDim))))
	}
	for l := range L {
		add(w.layer(w.arch.Forward(&w.shape, l, block(l)))...)
	}
	classes := int64(w.shape.Classes)
	add(vkernel{}, w.bytes(4*s.seeds*classes*2), vkernel{}) // count, softmax cross-entropy, sum
	if !train {
		return out
	}
	for l := L - 1; l >= 0; l-- {
		add(w.layer(w.arch.Backward(&w.shape, l, block(l)))...)
	}
	return append(out, w.bytes(7*4*w.params)) // Adam: three read and written, the gradient read
}
