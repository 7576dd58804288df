// Package cost counts the work of each operator of a mini-batch: the kernels that it
// launches, with their bytes, items and operations, from the shapes of a batch that was sampled for
// real.
package cost

import (
	"helios/cache"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/hardware"
	"helios/internal/rowtype"
	"helios/internal/shardtree"
	"helios/sched/plan"
)

// Each operator's work for the GPU, from a real batch's shapes. Launches are those of packages
// graph, cache and gnn; bytes are float32.

// Shape holds what the virtual clock needs to know of a mini-batch: everything but its contents.
type Shape struct {
	Index  int
	Seeds  int64
	HopEnd []int64
	Blocks []Block // by hop
	Parts  []Part
	At     int  // batch of the pass
	Closes bool // it is the last of a group of batches whose reads are merged
	// Joined is the number of mini-batches that are read as one set; 0: each hop is one.
	Joined int
	// Announced: a window buffer has heard of it before it is looked up.
	Announced bool
	// Of one that was sampled with its superbatch: the bytes that keep it until it trains, and how
	// it changes the tiers.
	Saved  int64
	Change Change
	// Stored has by hop what sampling it took of neighbour lists on storage; nil: they are in
	// memory.
	Stored []Stored
}

// Stored counts the draws and reads of a hop over a topology on storage.
type Stored struct{ Edges, Reads, Bytes int64 }

// Change counts the changes of planned tiers once a mini-batch is gathered: its rows that go to
// each, and others that go from the GPU tier to the CPU tier.
type Change struct{ ToGPU, ToCPU, Demoted int64 }

// Block is a hop. listed is how many in-neighbours its destinations have: layer-wise sampling reads
// them all.
type Block struct {
	dst, src, edges, listed int64
	relations               []gnn.BlockShape // of a typed graph
}

// Typed has what the work of a typed graph's mini-batches needs beside their shapes.
type Typed struct {
	Schema  *graph.Schema
	Fanouts [][]int // by relation and hop
}

// Part is a part of a frontier, looked up in the real caches.
type Part struct {
	Count, NGPU, NCPU, NMiss int64
	Reads                    []gpuio.Planned // by SSD
	Waits                    []int64         // rows whose reads are planned with those of others
	// Lines that a dynamic tier takes from what was read, those it lets go for them, and those it
	// takes not.
	Fills, Evicted, Bypassed int64
	// Of a dynamic tier: its lines that were accessed, and those that were not there.
	Lines, Missed int64
	// Of packed mini-batches: rows that are gathered from where their pages were read to, and those
	// of them that are of the mini-batch's own chunk.
	Staged, Chunk int64
}

// ShapeOf is the shape of a sampled batch. Nothing has been looked up yet.
func ShapeOf(mb *graph.MiniBatch) Shape {
	s := Shape{Index: mb.Index, Seeds: int64(mb.NumSeeds), HopEnd: append([]int64(nil),
		mb.HopEnd...)}
	for _, b := range mb.Blocks {
		s.Blocks = append(s.Blocks, Block{dst: b.NumDst, src: b.NumSrc, edges: b.NumEdges})
	}
	return s
}

// HopEdges returns the edges of each hop.
func (s *Shape) HopEdges() (edges []int64) {
	for _, b := range s.Blocks {
		edges = append(edges, b.edges)
	}
	return edges
}

// MadeUp is the shape of a mini-batch that nobody sampled: the nodes up to each hop, those of the
// seeds first, and the edges of each hop.
func MadeUp(hopEnd, edges []int64) Shape {
	s := Shape{Seeds: hopEnd[0], HopEnd: hopEnd}
	for h, n := range edges {
		s.Blocks = append(s.Blocks, Block{dst: hopEnd[h], src: hopEnd[h+1], edges: n})
	}
	return s
}

// SplitRelations gives the hops of a typed graph's mini-batch what each relation has in them.
func (s *Shape) SplitRelations(hops [][]gnn.BlockShape) {
	for h, list := range hops {
		b := &s.Blocks[h]
		b.relations, b.edges = list, 0
		for _, x := range list {
			b.edges += x.Edges
		}
	}
}

// RelationsOf counts what each relation has in the hops of a sampled mini-batch.
func RelationsOf(mb *graph.MiniBatch, schema *graph.Schema) (hops [][]gnn.BlockShape) {
	nodes := make([]int64, len(schema.Types)) // so far
	count := func(h int) {
		for t := range nodes {
			lo, hi := mb.TypeRange(h, t)
			nodes[t] += hi - lo
		}
	}
	count(0)
	for h := range mb.Blocks {
		count(h + 1)
		list := make([]gnn.BlockShape, len(schema.Relations))
		for r, x := range mb.Blocks[h].Lists {
			list[r] = gnn.BlockShape{Dst: x.N, Src: nodes[schema.Relations[r].Src], Edges: x.Edges}
		}
		hops = append(hops, list)
	}
	return hops
}

// Relations counts what each relation has in hop h; nil: the graph has no types.
func (s *Shape) Relations(h int) []gnn.BlockShape { return s.Blocks[h].relations }

// SavedBytes is about the size of a sample in a superbatch's files: two bytes a row as differences,
// an offset for each destination, and a number of four bytes an edge.
func (s *Shape) SavedBytes() int64 {
	last := len(s.HopEnd) - 1
	n := 2*s.HopEnd[last] + 4*s.Edges()
	for _, end := range s.HopEnd[:last] {
		n += 8 * end
	}
	return n
}

// Edges is the number of edges of all hops.
func (s *Shape) Edges() (n int64) {
	for _, b := range s.Blocks {
		n += b.edges
	}
	return n
}

// CountLists fills in how many in-neighbours each hop's destinations have.
func (s *Shape) CountLists(indptr, nodes []int64) {
	var sum, index int64
	for h := range s.Blocks {
		for ; index < s.Blocks[h].dst; index++ {
			v := nodes[index]
			sum += indptr[v+1] - indptr[v]
		}
		s.Blocks[h].listed = sum
	}
}

// Kernels turns shapes into kernels.
type Kernels struct {
	ops        *hardware.Ops
	fanouts    []int
	typed      *Typed
	idBytes    int64 // of a neighbour in the topology
	arch       gnn.Arch
	shape      gnn.ModelConfig
	wholeLists bool  // of graph.Method
	LineBytes  int64 // bytes of a line of a dynamic tier
	// Directory of it that kernels keep; nil: none.
	Directory *cache.GPUSets
	rowBytes  int64
	widen     bool // rows become float32 before they are trained on
	scaled    bool // each by its scale
	params    int64
}

// sector is the size on the link of a kernel's read of a few bytes of the CPU's memory.
const sector = 32

// NewKernels settles what all batches of a run share: its model, the rows' type and the width of a
// neighbour's number. typed is nil where the graph has no types.
func NewKernels(ops *hardware.Ops, cfg plan.Config, dim int, t rowtype.Type, classes int,
	wideIDs bool, typed *Typed) *Kernels {
	w := &Kernels{ops: ops, fanouts: cfg.Fanouts, typed: typed, idBytes: 4, arch: cfg.Arch(),
		wholeLists: cfg.Method().WholeLists, rowBytes: int64(t.RowBytes(dim)),
		widen: t != rowtype.Float32, scaled: t.Scaled()}
	if wideIDs {
		w.idBytes = 8
	}
	w.shape = cfg.ModelConfig()
	w.shape.InDim, w.shape.Classes = dim, classes
	if typed != nil {
		w.shape.Schema = typed.Schema
	}
	for l := range cfg.Fanouts {
		w.params += w.shape.LayerFloats(l)
	}
	return w
}

// Begin copies the seeds and enters them in the position table.
func (w *Kernels) Begin(s *Shape) []Kernel { return []Kernel{{UVA: s.Seeds * 8}} }

// Hop samples hop h. The topology is in the CPU's memory: two offsets of each destination, and of
// its neighbours those that were drawn, which lie anywhere in its list, or the whole list. In a
// typed graph relations come one after the other.
func (w *Kernels) Hop(s *Shape, h int) (k []Kernel) {
	b := s.Blocks[h]
	if b.relations == nil {
		return w.hop(b, w.fanouts[h])
	}
	for r, x := range b.relations {
		if x.Dst > 0 {
			k = append(k, w.hop(Block{dst: x.Dst, src: x.Src, edges: x.Edges},
				w.typed.Fanouts[r][h])...)
		}
	}
	return k
}

// hop samples a block.
func (w *Kernels) hop(b Block, fanout int) []Kernel {
	offsets, ids := b.dst*sector, b.edges*sector
	if fanout < 0 {
		ids = b.edges * w.idBytes
	}
	items := b.edges
	// whole lists, once for the probabilities and once for the edges between the layers
	if w.wholeLists {
		ids, items = 2*b.listed*w.idBytes, 2*b.listed
	}
	assign := Kernel{}
	if w.arch.Degrees() { // the new nodes' degrees
		assign.UVA = (b.src - b.dst) * sector
	}
	return []Kernel{
		{UVA: offsets}, // sample_count
		{Op: &w.ops.Sample, Work: hardware.Work{Items: items}, UVA: ids}, // sample_fill
		// unique_count, unique_assign, unique_relabel: their time is in sample's item
		{}, assign, {},
	}
}

// HopBytes is the size of a hop that the CPU samples and copies to the GPU: new nodes, and the
// block.
func (w *Kernels) HopBytes(s *Shape, h int) int64 {
	b := s.Blocks[h]
	return (b.src-b.dst)*8 + (b.dst+1)*8 + b.edges*4
}

// Sampling is the launches that sample a batch, one after the other.
func (w *Kernels) Sampling(s *Shape) [][]Kernel {
	jobs := [][]Kernel{w.Begin(s)}
	for h := range s.Blocks {
		jobs = append(jobs, w.Hop(s, h))
	}
	return jobs
}

// Hotness adds a sampled batch to the rows' hotness.
func (w *Kernels) Hotness(rows int64) []Kernel {
	return []Kernel{{Op: &w.ops.Elementwise, Work: hardware.Work{Bytes: rows * 16}}}
}

// Lookup finds a part's rows in the cache's index.
func (w *Kernels) Lookup(p *Part) []Kernel {
	k := []Kernel{{Op: &w.ops.Lookup, Work: hardware.Work{Items: p.Count}}}
	if p.Count >= 1024 { // more than one block: count, prefix, scatter
		k = append(k, Kernel{}, Kernel{})
	}
	return k
}

// sectorBytes is the size in memory of a load of a few bytes of GPU memory.
const sectorBytes = 32

func (w *Kernels) directory(l cache.GPULaunch) Kernel {
	return Kernel{Op: &w.ops.Directory, Work: hardware.Work{
		Items: int64(l.Instructions), Bytes: int64(l.Sectors+l.Atomics) * sectorBytes,
		Warps: l.Warps, Resident: l.Resident, Trips: l.Trips, Atomics: l.Atomics}}
}

// Admit looks a part up in the directory that kernels keep.
func (w *Kernels) Admit(p *Part) []Kernel {
	l := cache.GPULookup{Rows: p.Count, Lines: p.Lines, Missed: p.Missed}
	k := []Kernel{w.bytes(l.TableBytes())}
	for _, x := range w.Directory.Launches(l) {
		k = append(k, w.directory(x))
	}
	return k
}

// Announce tells that directory the rows of a batch to come.
func (w *Kernels) Announce(rows int64) []Kernel {
	return []Kernel{w.directory(w.Directory.Announcement(rows))}
}

// Gather copies a part's cached rows to their places.
func (w *Kernels) Gather(p *Part) []Kernel {
	return []Kernel{{
		Op:   &w.ops.Gather,
		Work: hardware.Work{Items: p.NGPU + p.NCPU, Bytes: (2*p.NGPU + p.NCPU) * w.rowBytes},
		UVA:  p.NCPU * w.rowBytes,
	}}
}

// Changes copies rows to planned tiers: within GPU memory, or from there. Leaving is what goes to
// the CPU's memory.
func (w *Kernels) Changes(c Change) (k []Kernel) {
	add := func(n, copies int64) {
		if n > 0 {
			k = append(k, Kernel{Op: &w.ops.Gather,
				Work: hardware.Work{Items: n, Bytes: copies * n * w.rowBytes}})
		}
	}
	add(c.Demoted, 1)
	add(c.ToGPU, 2)
	add(c.ToCPU, 1)
	return k
}

// Leaving is the number of bytes that a change writes to the CPU's memory.
func (w *Kernels) Leaving(c Change) int64 { return (c.Demoted + c.ToCPU) * w.rowBytes }

// Finish copies what a staged part needs to its places: cached rows, those that were read, and from
// there the lines that a dynamic tier takes.
func (w *Kernels) Finish(p *Part) []Kernel {
	k := Kernel{
		Op: &w.ops.Gather,
		Work: hardware.Work{Items: p.Count + p.Fills,
			Bytes: (2*(p.NGPU+p.NMiss)+p.NCPU)*w.rowBytes + 2*p.Fills*w.LineBytes},
		UVA: p.NCPU * w.rowBytes,
	}
	if p.Fills > 0 {
		return []Kernel{k, {}} // hits and rows, then fills
	}
	return []Kernel{k}
}

func (w *Kernels) bytes(n int64) Kernel {
	return Kernel{Op: &w.ops.Elementwise, Work: hardware.Work{Bytes: n}}
}

// layer turns the kernels of a model's layer into those of the clock.
func (w *Kernels) layer(list []gnn.Work) []Kernel {
	ops := map[gnn.WorkKind]*hardware.Op{gnn.WorkGather: &w.ops.Gather,
		gnn.WorkProduct: &w.ops.GEMM, gnn.WorkElementwise: &w.ops.Elementwise}
	out := make([]Kernel, len(list))
	for i, k := range list {
		if op := ops[k.Kind]; op != nil {
			out[i] = Kernel{Op: op, Work: hardware.Work{Items: k.Items, Bytes: k.Bytes,
				Flops: k.Flops}}
		}
	}
	return out
}

// Model is a mini-batch's forward pass, and in training its backward pass.
func (w *Kernels) Model(s *Shape, train bool) []Kernel {
	L := len(w.fanouts)
	var out []Kernel
	add := func(k ...Kernel) { out = append(out, k...) }
	block := func(l int) gnn.BlockShape {
		b := s.Blocks[L-1-l]
		return gnn.BlockShape{Dst: b.dst, Src: b.src, Edges: b.edges, Relations: b.relations}
	}
	if w.widen { // convert_rows
		each := w.rowBytes + 4*int64(w.shape.InDim)
		if w.scaled { // a node's number, and the sector that its scale is in
			each += 8 + 32
		}
		add(w.bytes(s.HopEnd[L] * each))
	}
	for l := range L {
		add(w.layer(w.shape.LayerForward(l, block(l)))...)
	}
	classes := int64(w.shape.Classes)
	add(Kernel{}, w.bytes(4*s.Seeds*classes*2), Kernel{}) // count, softmax cross-entropy, sum
	if !train {
		return out
	}
	for l := L - 1; l >= 0; l-- {
		add(w.layer(w.shape.LayerBackward(l, block(l)))...)
	}
	return out
}

// Update is the work of the optimiser after the mini-batch that is shard number index of a step of
// n: with several, it keeps the weighted gradient, adds it to those of the shards before it, and
// Adam takes the sum after the last one.
func (w *Kernels) Update(index, n int) (out []Kernel) {
	if n > 1 {
		out = append(w.Weigh(), w.Joins(index, n)...)
	}
	if index == n-1 {
		out = append(out, w.Adam()...)
	}
	return out
}

// Weigh keeps a shard's weighted gradient.
func (w *Kernels) Weigh() []Kernel { return []Kernel{w.bytes(2 * 4 * w.params)} }

// Joins adds the gradient of shard number index of a step of n to the sums of those before it.
func (w *Kernels) Joins(index, n int) (out []Kernel) {
	nodes := append(shardtree.Roots(n, 0, index), shardtree.Node{First: index, Count: 1})
	for range shardtree.Joins(nodes, n) {
		out = append(out, w.bytes(3*4*w.params))
	}
	return out
}

// Adam reads and writes three numbers a parameter, and reads its gradient.
func (w *Kernels) Adam() []Kernel { return []Kernel{w.bytes(7 * 4 * w.params)} }

// GradientBytes is the size of a gradient.
func (w *Kernels) GradientBytes() int64 { return 4 * w.params }

// Buffers are the sizes of those in which a mini-batch and its rows go to another device.
func (w *Kernels) Buffers(s *Shape) (sizes []int64) {
	for _, b := range s.Blocks {
		sizes = append(sizes, (b.dst+1)*8, b.edges*4)
		if w.wholeLists { // the edges have weights
			sizes = append(sizes, b.src*4)
		}
	}
	rows := s.HopEnd[len(s.HopEnd)-1]
	if w.arch.Degrees() {
		sizes = append(sizes, rows*4)
	}
	return append(sizes, rows*w.rowBytes)
}

// Kernel is one launch on the modelled GPU: what it needs of an operator's resources, and what it
// reads of the CPU's memory in place (UVA).
type Kernel struct {
	Op   *hardware.Op
	Work hardware.Work
	UVA  int64 // bytes
}

// Hardware is the machine of a run on the virtual clock.
type Hardware struct {
	Profile *hardware.Profile
	SSDs    int // 0: as many as the profile has
	// Warm batches at the start of each epoch go through sampling and the caches in no time and are
	// counted nowhere, so that what follows meets caches that have filled; Batches after them are
	// played, 0: all that are left.
	Warm, Batches int
}

// Limit bounds the batches of n that are played: from first on, up to end.
func (h Hardware) Limit(n int) (first, end int) {
	first = min(max(h.Warm, 0), max(n-1, 0))
	end = n
	if h.Batches > 0 {
		end = min(n, first+h.Batches)
	}
	return first, end
}
