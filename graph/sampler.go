package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
)

// DeviceTopology is a topology that kernels can read in place: its slices are registered with
// the device as pinned memory (read over UVA, DESIGN section 6) and never copied.
type DeviceTopology struct {
	Host            *Topology
	indptr, indices cuda.Buffer

	// Of a topology on storage: its cache's lines, starts and lists where they are not empty, and on a GPU the host device
	// that samples in its place (outofcore_relay.go).
	cache [3]cuda.Buffer
	inner *innerHost
}

// Attach registers the slices of t, which must be outside Go's heap and stay until Close.
func Attach(dev cuda.Device, t *Topology) (*DeviceTopology, error) {
	if t.OnStorage() {
		return attachStorage(dev, t)
	}
	if int64(len(t.Indptr)) != t.NumNodes+1 || int64(len(t.Indices32)+len(t.Indices64)) != t.NumEdges {
		return nil, errs.New(errs.Usage, "topology: %d offsets and %d ids for %d nodes and %d edges; run Validate on it first",
			len(t.Indptr), len(t.Indices32)+len(t.Indices64), t.NumNodes, t.NumEdges)
	}
	d := &DeviceTopology{Host: t}
	var err error
	if d.indptr, err = dev.Register(bytesOf(t.Indptr), "topology offsets"); err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	ids := bytesOf(t.Indices32)
	if t.Wide() {
		ids = bytesOf(t.Indices64)
	}
	if len(ids) > 0 {
		if d.indices, err = dev.Register(ids, "topology ids"); err != nil {
			_ = d.indptr.Free()
			return nil, fmt.Errorf("attach topology: %w", err)
		}
	}
	return d, nil
}

// Close ends the registrations; the topology's memory stays.
func (d *DeviceTopology) Close() error {
	err := free(&d.indptr, &d.indices, &d.cache[0], &d.cache[1], &d.cache[2])
	if d.inner != nil {
		err = errors.Join(err, d.inner.close())
	}
	return err
}

// SamplerConfig says what to sample.
type SamplerConfig struct {
	Fanouts []int  // neighbours per node and hop, the hop next to the seeds first; -1 = all
	Seed    uint64 // of the run
	Degrees bool   // fill MiniBatch.Degrees (gnn.Arch.Degrees)
	// Layerwise samples nodes per layer (LADIES, ladies.go): Fanouts are how many nodes each layer adds at most, and blocks
	// have Weights.
	Layerwise bool
}

// Block is the bipartite graph of one hop. Its destinations are the first NumDst nodes of the frontier,
// its sources the first NumSrc (so every destination is also a source). The sampled in-neighbours
// of destination i are Src[Indptr[i]:Indptr[i+1]].
type Block struct {
	NumDst, NumSrc, NumEdges int64
	Indptr                   cuda.Buffer // int64[NumDst+1]
	Src                      cuda.Buffer // uint32[NumEdges], index into the frontier
	// Weights is float32[NumSrc], each above 0, or nil: destination i aggregates sum(Weights[j]·x_j) / sum(Weights[j]) over
	// its sampled in-neighbours j (layer-wise sampling), in place of their mean.
	Weights cuda.Buffer
}

// MiniBatch is what sampling makes from a batch of seed nodes. Its buffers grow as needed and
// are used again by the next batch; only the first so many elements are valid. A buffer that is
// outgrown is kept until the next Begin, so that kernels of other streams that were launched
// between two hops stay correct.
type MiniBatch struct {
	Epoch, Index int
	NumSeeds     int
	Nodes        cuda.Buffer // int64[HopEnd[last]], the frontier in order of first appearance, seeds first
	HopEnd       []int64     // frontier size after hop h; HopEnd[0] = NumSeeds
	Blocks       []Block     // Blocks[h] made by hop h
	Degrees      cuda.Buffer // uint32[HopEnd[last]] in-degree of each frontier node, when asked for

	key      [2]uint32 // of the batch's draws
	distinct bool      // no seed stands twice
	seen     []int64   // scratch of that question

	dev     cuda.Device
	stage   cuda.Buffer // pinned int64[NumSeeds], the seeds on their way to the device
	sums    cuda.Buffer // pinned int64[blocks]: per-block totals between the phases of a scan
	totals  cuda.Buffer // pinned: sampleParams.Totals or hopParams.Totals of the hop
	retired []cuda.Buffer

	inner *MiniBatch // of the host device that samples in a GPU's place
}

// Sampler draws neighbours uniformly without replacement and numbers the frontier. It owns the
// position table that makes ids unique: for graphs of up to directNodes nodes a table with an entry per node
// (8 bytes on a GPU, at most 32 MiB; 4 on the host), for larger ones a hash table. On a GPU that has 4/3 to 8/3 slots of
// 16 bytes per sampled edge of the largest hop, on the host 2 to 4 of 8 bytes per node of the largest mini-batch.
// MemUsage shows it as "sampler position table".
//
// Hops of different mini-batches may alternate and come from several goroutines: calls take turns.
// Batches that strictly follow one another are cheapest.
type Sampler struct {
	dev  cuda.Device
	topo *DeviceTopology
	cfg  SamplerConfig
	key  [2]uint32

	kBegin, kCount, kFill, kUniqueCount, kAssign, kRelabel cuda.Kernel
	kHostBegin, kHostHop, kHostDegrees                     cuda.Kernel
	layers                                                 layerSampler

	mu     sync.Mutex
	owner  *MiniBatch // whose frontier the table holds
	stamp  uint32     // of that frontier; counts down, because the table keeps minima
	direct bool
	slots  int64       // a power of two when hashed
	vals   cuda.Buffer // uint64[slots]: stamp<<32 | position
	keys   cuda.Buffer // hashed: uint64[slots]: stamp<<48 | node
	blocks int         // grid of the largest launches
	grain  int64       // items that make another block worth its launch

	// The host's way (hop.go): vals is uint32[slots], or, hashed, uint64[slots], keys is not used, and stamps
	// count up.
	host          bool
	workers       int
	posBits       uint32
	ring, control cuda.Buffer

	far   *far      // of a topology on storage, on the host device
	lists *farLists // of one that is sampled by layer
	relay *relay    // of one on a GPU
}

// directNodes is the largest graph whose position table has an entry for every node.
const directNodes = 4 << 20

const tablePurpose = "sampler position table"

// NewSampler makes a sampler over topo, which must stay attached until Close.
func NewSampler(dev cuda.Device, topo *DeviceTopology, cfg SamplerConfig) (*Sampler, error) {
	return newSampler(dev, topo, cfg, directNodes)
}

func newSampler(dev cuda.Device, topo *DeviceTopology, cfg SamplerConfig, directLimit int64) (*Sampler, error) {
	if len(cfg.Fanouts) == 0 || len(cfg.Fanouts) > 255 {
		return nil, errs.New(errs.Usage, "fanout: %d hops; give 1 to 255 numbers, as in --fanout 10,10", len(cfg.Fanouts))
	}
	for i, f := range cfg.Fanouts {
		if cfg.Layerwise {
			if f == 0 || f < -1 || f > MostLayer {
				return nil, errs.New(errs.Usage, "%d nodes for layer %d: must be 1 to %d, or -1 for all that the layer needs", f, i, MostLayer)
			}
			continue
		}
		if f == 0 || f < -1 || f > 1<<20 {
			return nil, errs.New(errs.Usage, "fanout %d of hop %d: must be 1 to %d, or -1 for all neighbours", f, i, 1<<20)
		}
	}
	if topo.inner != nil {
		return newRelay(dev, topo, cfg)
	}
	s := &Sampler{
		dev: dev, topo: topo, cfg: cfg, key: philox.Key(cfg.Seed, philox.StreamSample),
		direct: topo.Host.NumNodes <= directLimit,
		blocks: max(1, 4*dev.Info().SMs),
		grain:  threads,
	}
	if g, ok := dev.(interface{ Grain(usual int64) int64 }); ok { // a device with a mind of its own
		s.grain = max(g.Grain(s.grain), 1)
	}
	kernels := []struct {
		dst  *cuda.Kernel
		name string
	}{
		{&s.kBegin, "sample_begin"}, {&s.kCount, "sample_count"}, {&s.kFill, "sample_fill"},
		{&s.kUniqueCount, "unique_count"}, {&s.kAssign, "unique_assign"}, {&s.kRelabel, "unique_relabel"},
	}
	s.workers = dev.Info().SMs
	// Layers are sampled in one way on all devices, that of a GPU.
	s.host = dev.Info().Backend == "host" && topo.Host.NumNodes <= 1<<32 && !cfg.Layerwise
	if s.host {
		kernels = append(kernels[:0], []struct {
			dst  *cuda.Kernel
			name string
		}{{&s.kHostBegin, "host_sample_begin"}, {&s.kHostHop, "host_sample_hop"}, {&s.kHostDegrees, "host_sample_degrees"}}...)
	}
	for _, k := range kernels {
		var err error
		if *k.dst, err = dev.Kernel(k.name); err != nil {
			return nil, fmt.Errorf("sampler: %w", err)
		}
	}
	if cfg.Layerwise {
		if err := s.newLayers(); err != nil {
			return nil, fmt.Errorf("sampler: %w", err)
		}
	}
	if s.direct {
		s.slots = max(topo.Host.NumNodes, 1)
		if err := s.allocTable(); err != nil {
			return nil, errors.Join(err, free(s.layers.buffers()...))
		}
	}
	if s.host {
		var err error
		if s.ring, err = dev.Alloc(cuda.MemDevice, hostRing(s.workers)*slotBytes, ringPurpose); err == nil {
			s.control, err = dev.Alloc(cuda.MemDevice, int64(unsafe.Sizeof(hopControl{})), ringPurpose)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("sampler: %w", err), s.freeTable())
		}
	}
	if topo.Host.OnStorage() {
		open := s.newFar
		if cfg.Layerwise {
			open = s.newFarLists
		}
		if err := open(); err != nil {
			return nil, errors.Join(err, s.freeTable(), free(&s.ring, &s.control), free(s.layers.buffers()...))
		}
	}
	return s, nil
}

// Close frees the position table.
func (s *Sampler) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errors.Join(s.freeTable(), free(&s.ring, &s.control), free(s.layers.buffers()...))
	if s.far != nil {
		err = errors.Join(err, s.far.close())
	}
	if s.lists != nil {
		err = errors.Join(err, s.lists.close())
	}
	if s.relay != nil {
		err = errors.Join(err, s.relay.close())
	}
	return err
}

// Busy is how long a host device has sampled in a GPU's place, where it did (a topology on storage): the time is on none of
// the GPU's streams.
func (s *Sampler) Busy() time.Duration {
	if s.relay == nil {
		return 0
	}
	return s.relay.stream.Busy()
}

func (s *Sampler) freeTable() error { return free(&s.vals, &s.keys) }

func free(bufs ...*cuda.Buffer) error {
	var err error
	for _, b := range bufs {
		if *b != nil {
			if e := (*b).Free(); err == nil {
				err = e
			}
			*b = nil
		}
	}
	return err
}

// allocTable replaces the table by an empty one of s.slots entries.
func (s *Sampler) allocTable() error {
	if err := s.freeTable(); err != nil {
		return err
	}
	s.owner, s.stamp, s.posBits = nil, 0, 0
	width := int64(8)
	if s.host && s.direct {
		width = 4
	}
	var err error
	if s.vals, err = s.dev.Alloc(cuda.MemDevice, s.slots*width, tablePurpose); err == nil && !s.direct && !s.host {
		s.keys, err = s.dev.Alloc(cuda.MemDevice, s.slots*8, tablePurpose)
	}
	if err != nil {
		s.slots = 0 // there is no table: the next batch asks again
		return errors.Join(fmt.Errorf("sampler: %w", err), s.freeTable())
	}
	return nil
}

// NewMiniBatch makes an empty mini-batch for this sampler.
func (s *Sampler) NewMiniBatch() (*MiniBatch, error) {
	mb := &MiniBatch{
		dev:    s.dev,
		HopEnd: make([]int64, 0, len(s.cfg.Fanouts)+1),
		Blocks: make([]Block, 0, len(s.cfg.Fanouts)),
	}
	var err error
	if s.relay != nil {
		if mb.inner, err = s.relay.sampler.NewMiniBatch(); err != nil {
			return nil, err
		}
		return mb, nil
	}
	if mb.sums, err = s.dev.Alloc(cuda.MemPinned, int64(s.blocks)*8, "sampler counts"); err == nil {
		mb.totals, err = s.dev.Alloc(cuda.MemPinned, 32, "sampler counts")
	}
	if err != nil {
		_ = mb.Close()
		return nil, fmt.Errorf("mini-batch: %w", err)
	}
	return mb, nil
}

// Close frees the buffers. No kernel may be using them.
func (mb *MiniBatch) Close() error {
	bufs := append(mb.retired, mb.Nodes, mb.Degrees, mb.stage, mb.sums, mb.totals)
	for _, b := range mb.Blocks[:cap(mb.Blocks)] {
		bufs = append(bufs, b.Indptr, b.Src, b.Weights)
	}
	var err error
	if mb.inner != nil {
		err = mb.inner.Close()
	}
	for _, b := range bufs {
		if b != nil {
			if e := b.Free(); err == nil {
				err = e
			}
		}
	}
	*mb = MiniBatch{dev: mb.dev}
	return err
}

// grow makes *b hold at least need bytes. The first keep bytes are copied on stream; the old
// buffer is retired, not freed. Growth is geometric, so a steady state allocates nothing.
func (mb *MiniBatch) grow(stream cuda.Stream, b *cuda.Buffer, kind cuda.MemKind, need, keep int64, purpose string) error {
	if *b != nil && (*b).Size() >= need {
		return nil
	}
	size := max(need, 4096)
	if *b != nil {
		size += size / 4
	}
	size = (size + 4095) &^ 4095
	nb, err := mb.dev.Alloc(kind, size, purpose)
	if err != nil {
		return err
	}
	if *b != nil {
		mb.retired = append(mb.retired, *b)
		if keep > 0 {
			if err := stream.Copy(nb.Ptr(), (*b).Ptr(), keep); err != nil {
				mb.retired = mb.retired[:len(mb.retired)-1]
				_ = nb.Free()
				return err
			}
		}
	}
	*b = nb
	return nil
}

func (mb *MiniBatch) freeRetired() error {
	var err error
	for i, b := range mb.retired {
		if e := b.Free(); err == nil {
			err = e
		}
		mb.retired[i] = nil
	}
	mb.retired = mb.retired[:0]
	return err
}

// SharedDraws is a batch's index for Begin where a node shall draw the same neighbours in every batch of the epoch: what is
// found out about a node by evaluation or prediction then does not depend on the batch that it is in.
func SharedDraws(index int) int { return ^index }

// batchKey is what batch index draws by: batches of an epoch draw for themselves, as in DGL and PyG, or they would all meet
// the same few neighbours of a node for a whole epoch. The run's own key is that of SharedDraws.
func (s *Sampler) batchKey(index int) [2]uint32 {
	if index < 0 {
		return s.key
	}
	w := philox.Block(philox.Key(s.cfg.Seed, philox.StreamBatch), [4]uint32{uint32(index), uint32(uint64(index) >> 32)})
	return [2]uint32{w[0], w[1]}
}

// Begin starts a batch: the frontier is the seeds. Work of mb's previous batch must be done. A seed
// that stands twice gets two rows, of which edges use the first. On return the
// seeds slice is free to change. Samples are a function of (seed, epoch, index, hop, node); see SharedDraws.
func (s *Sampler) Begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, epoch, index int, seeds []int64) error {
	mb.key = s.batchKey(index)
	if index < 0 {
		index = ^index
	}
	if len(seeds) == 0 {
		return errs.New(errs.Usage, "batch %d of epoch %d has no seed nodes", index, epoch)
	}
	for i, v := range seeds {
		if uint64(v) >= uint64(s.topo.Host.NumNodes) {
			return errs.New(errs.Usage, "seed node %d (number %d of batch %d) is out of range, nodes are 0 to %d; check the split files",
				v, i, index, s.topo.Host.NumNodes-1)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.begin(ctx, stream, mb, epoch, index, seeds); err != nil {
		s.owner = nil
		return fmt.Errorf("sample batch %d of epoch %d: %w", index, epoch, err)
	}
	return nil
}

func (s *Sampler) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, epoch, index int, seeds []int64) error {
	if err := mb.freeRetired(); err != nil {
		return err
	}
	n := int64(len(seeds))
	mb.Epoch, mb.Index, mb.NumSeeds = epoch, index, len(seeds)
	mb.HopEnd = append(mb.HopEnd[:0], n)
	mb.Blocks = mb.Blocks[:0]
	if s.relay != nil {
		return s.relay.begin(ctx, stream, mb, epoch, index, seeds)
	}
	if !s.host {
		mb.distinct = mb.allDifferent(seeds)
	}
	if err := mb.grow(stream, &mb.stage, cuda.MemPinned, n*8, 0, "seed staging"); err != nil {
		return err
	}
	if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, n*8, 0, "frontier"); err != nil {
		return err
	}
	if s.cfg.Degrees {
		if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, n*4, 0, "frontier degrees"); err != nil {
			return err
		}
	}
	copy(unsafe.Slice((*int64)(unsafe.Pointer(&mb.stage.Bytes()[0])), n), seeds)
	if err := stream.Copy(mb.Nodes.Ptr(), mb.stage.Ptr(), n*8); err != nil {
		return err
	}
	own := s.own
	if s.host {
		own = s.hostOwn
	}
	if err := own(stream, mb, n); err != nil {
		return err
	}
	if s.host {
		if err := s.hostDegrees(stream, mb, 0, n); err != nil {
			return err
		}
	}
	return stream.Synchronize(ctx)
}

// allDifferent looks the seeds up in a small hash set, about 10 ns each.
func (mb *MiniBatch) allDifferent(seeds []int64) bool {
	slots := 1 << bits.Len(uint(2*len(seeds)))
	if cap(mb.seen) < slots {
		mb.seen = make([]int64, slots)
	}
	set := mb.seen[:slots]
	clear(set)
	shift := 64 - bits.TrailingZeros(uint(slots))
	for _, v := range seeds {
		at := int(uint64(v) * 0x9E3779B97F4A7C15 >> shift)
		for ; set[at] != 0; at = (at + 1) & (slots - 1) {
			if set[at] == v+1 {
				return false
			}
		}
		set[at] = v + 1 // 0 is an empty slot
	}
	return true
}

// own makes the table hold the n frontier nodes of mb under a new stamp.
func (s *Sampler) own(stream cuda.Stream, mb *MiniBatch, n int64) error {
	s.owner = nil
	if !s.direct && 3*s.slots/4 < n {
		if err := s.growHash(n); err != nil {
			return err
		}
	}
	// Hash keys carry only 16 bits of the stamp. A fresh or worn-out table is all ones, above
	// every stamp in use.
	if s.stamp <= 1 || (!s.direct && s.stamp&0xffff <= 1) {
		for _, b := range []cuda.Buffer{s.vals, s.keys} {
			if b != nil {
				if err := stream.Fill(b.Ptr(), 0xff, b.Size()); err != nil {
					return err
				}
			}
		}
		s.stamp = math.MaxUint32
	}
	s.stamp--
	p := s.params(mb, n)
	if s.cfg.Degrees {
		p.Degrees = mb.Degrees.Ptr()
	}
	if err := s.launch(stream, s.kBegin, &p, n); err != nil {
		return err
	}
	s.owner = mb
	return nil
}

// growHash makes room for n distinct nodes at a load of at most 3/4.
func (s *Sampler) growHash(n int64) error {
	slots := int64(1) << max(12, bits.Len64(uint64(n+n/3)))
	if slots > 1<<32 {
		return errs.New(errs.Usage, "a mini-batch of %d nodes and edges is too large: lower the batch size or the fanouts", n)
	}
	s.slots = slots
	return s.allocTable()
}

func (s *Sampler) params(mb *MiniBatch, n int64) sampleParams {
	p := sampleParams{
		Indptr: s.topo.indptr.Ptr(), Nodes: mb.Nodes.Ptr(), NumDst: n,
		Vals: s.vals.Ptr(), Sums: mb.sums.Ptr(), Totals: mb.totals.Ptr(),
		Key: mb.key, Stamp: s.stamp,
		NumNodes: s.topo.Host.NumNodes, NumEdges: s.topo.Host.NumEdges, Slots: s.slots,
	}
	if s.topo.indices != nil {
		p.Indices = s.topo.indices.Ptr()
	}
	if s.lists != nil {
		p.Indices = s.lists.ptr()
	}
	if s.topo.Host.Wide() {
		p.Wide = 1
	}
	if !s.direct {
		p.Keys = s.keys.Ptr()
		p.HashShift = uint32(64 - bits.TrailingZeros64(uint64(s.slots)))
	}
	return p
}

const threads = 256 // of a block on a GPU

// grid is how many blocks n items get: one item for each thread of a GPU, as far as the limit goes.
// Results do not depend on it, but passes over one Sums must agree on it.
func (s *Sampler) grid(n int64) int64 { return max(min(int64(s.blocks), (n+s.grain-1)/s.grain), 1) }

func (s *Sampler) launch(stream cuda.Stream, k cuda.Kernel, p *sampleParams, n int64) error {
	return cuda.Launch(stream, k, cuda.LaunchConfig{Blocks: int(s.grid(n)), Threads: threads}, *p)
}

// Hop samples in-neighbours of all frontier nodes (of the seeds and of all earlier hops, as
// DGL does; for a layer-wise sampler see ladies.go), makes mb.Blocks[hop] and appends the nodes not seen before to the frontier. Hops go in order
// from 0. On return all counts are valid and the buffers can be read.
func (s *Sampler) Hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	if hop != len(mb.Blocks) || hop >= len(s.cfg.Fanouts) || len(mb.HopEnd) != hop+1 {
		return errs.New(errs.Failed, "sample hop %d: the mini-batch has done %d of %d hops; call Begin, then the hops in order",
			hop, len(mb.Blocks), len(s.cfg.Fanouts))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.hop(ctx, stream, mb, hop); err != nil {
		if s.far != nil || s.lists != nil {
			// Reads fail, or an interrupt ends them, with kernels under way: these must not use what is let go next.
			after, cancel := context.WithTimeout(context.WithoutCancel(ctx), readLimit)
			err = errors.Join(err, stream.Synchronize(after))
			cancel()
		}
		s.owner = nil // what the table holds now is unknown
		mb.HopEnd = mb.HopEnd[:0]
		mb.Blocks = mb.Blocks[:0]
		return fmt.Errorf("sample hop %d of batch %d, epoch %d: %w", hop, mb.Index, mb.Epoch, err)
	}
	return nil
}

func (s *Sampler) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	if s.relay != nil {
		return s.relay.hop(ctx, stream, mb, hop)
	}
	if s.cfg.Layerwise {
		return s.layerHop(ctx, stream, mb, hop)
	}
	if s.far != nil {
		return s.farHop(ctx, stream, mb, hop)
	}
	if s.host {
		return s.hostHop(ctx, stream, mb, hop)
	}
	n := mb.HopEnd[hop]
	fanout := s.cfg.Fanouts[hop]
	totals := unsafe.Slice((*int64)(unsafe.Pointer(&mb.totals.Bytes()[0])), 2)
	sums := unsafe.Slice((*int64)(unsafe.Pointer(&mb.sums.Bytes()[0])), s.blocks)

	mb.Blocks = mb.Blocks[:hop+1] // keeps the buffers of the last batch
	b := &mb.Blocks[hop]
	if err := mb.grow(stream, &b.Indptr, cuda.MemDevice, (n+1)*8, 0, "block offsets"); err != nil {
		return err
	}
	if s.owner != mb {
		if err := s.own(stream, mb, n); err != nil {
			return err
		}
	}
	p := s.params(mb, n)
	p.EdgeStart, p.Fanout = b.Indptr.Ptr(), int64(fanout)
	p.Epoch, p.Hop = uint32(mb.Epoch), uint32(hop)
	if err := s.launch(stream, s.kCount, &p, n); err != nil {
		return err
	}

	// The host needs the number of edges only where the bound n × fanout does not fit in what
	// is there; in a steady state the kernels run on without it.
	// (NumEdges bounds it too, unless a seed's edges may come several times.)
	edges := int64(math.MaxInt64 / 2)
	if mb.distinct {
		edges = s.topo.Host.NumEdges
	}
	if fanout > 0 && n < math.MaxInt64/2/int64(fanout) {
		edges = min(edges, n*int64(fanout))
	}
	srcCap := int64(0)
	if b.Src != nil {
		srcCap = b.Src.Size() / 4
	}
	if b.Src == nil || edges > srcCap || n+edges > math.MaxUint32 || (!s.direct && 3*s.slots/4 < n+edges) {
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		edges = 0
		for _, c := range sums[:s.grid(n)] {
			edges += c
		}
		if n+edges > math.MaxUint32 {
			return errs.New(errs.Usage, "%d nodes with %d sampled edges pass the limit of 2^32: lower the batch size or the fanouts", n, edges)
		}
		if err := mb.grow(stream, &b.Src, cuda.MemDevice, max(edges, 1)*4, 0, "block sources"); err != nil {
			return err
		}
		if !s.direct && 3*s.slots/4 < n+edges {
			if err := s.growHash(n + edges); err != nil {
				return err
			}
			if err := s.own(stream, mb, n); err != nil {
				return err
			}
			q := s.params(mb, n)
			p.Keys, p.Vals, p.Slots, p.HashShift, p.Stamp = q.Keys, q.Vals, q.Slots, q.HashShift, q.Stamp
		}
	}
	p.Src, p.SrcLen = b.Src.Ptr(), b.Src.Size()/4
	if err := s.launch(stream, s.kFill, &p, n); err != nil {
		return err
	}
	if err := s.launch(stream, s.kUniqueCount, &p, edges); err != nil {
		return err
	}

	bound := min(n+edges, max(n, s.topo.Host.NumNodes))
	if !mb.distinct {
		bound = n + min(edges, s.topo.Host.NumNodes)
	}
	if mb.Nodes.Size()/8 < bound || (s.cfg.Degrees && mb.Degrees.Size()/4 < bound) {
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		bound = n
		for _, c := range sums[:s.grid(edges)] {
			bound += c
		}
		if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, bound*8, n*8, "frontier"); err != nil {
			return err
		}
		if s.cfg.Degrees {
			if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, bound*4, n*4, "frontier degrees"); err != nil {
				return err
			}
		}
		p.Nodes = mb.Nodes.Ptr()
	}
	p.NodesLen = mb.Nodes.Size() / 8
	if s.cfg.Degrees {
		p.Degrees = mb.Degrees.Ptr()
		p.NodesLen = min(p.NodesLen, mb.Degrees.Size()/4)
	}
	if err := s.launch(stream, s.kAssign, &p, edges); err != nil {
		return err
	}
	if err := s.launch(stream, s.kRelabel, &p, edges); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	b.NumDst, b.NumEdges, b.NumSrc = n, totals[0], n+totals[1]
	mb.HopEnd = append(mb.HopEnd, b.NumSrc)
	return nil
}

// Shuffle writes a permutation of ids to dst (same length; may be the same slice) that depends on
// seed and epoch only: Fisher-Yates with one Philox draw per step.
func Shuffle(dst, ids []int64, seed uint64, epoch int) {
	key := philox.Key(seed, philox.StreamShuffle)
	copy(dst, ids)
	for i := len(dst) - 1; i > 0; i-- {
		w := philox.Block(key, [4]uint32{uint32(i), uint32(uint64(i) >> 32), uint32(epoch), 0})
		j := philox.Bounded(uint64(w[1])<<32|uint64(w[0]), uint64(i)+1)
		dst[i], dst[j] = dst[j], dst[i]
	}
}
