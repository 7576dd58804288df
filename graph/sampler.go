package graph

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
)

// SamplerConfig sets the options of a Sampler.
type SamplerConfig struct {
	Method string // name of a Method; "" = Neighbor
	// of each hop, the hop next to the seeds first; the Method defines the meaning of a fanout
	Fanouts []int
	// Of a typed graph: those of each relation, in the schema's order, where they differ from
	// Fanouts; 0 draws none. nil: Fanouts for all.
	RelationFanouts [][]int
	// Together: Fanouts count over the edges of all relations into a node of a typed graph.
	Together bool
	Seed     uint64 // of the run
	Degrees  bool   // fill MiniBatch.Degrees (gnn.Arch.Degrees)
	// Loopless leaves out edges of a node to itself in these degrees. Draws have them all the same.
	Loopless bool
	// κ: a draw serves so many batches of an epoch in turn, and each batch has one in κ anew; 0 and
	// 1: each batch draws for itself. For methods with Method.Dependent.
	Dependency int
}

// MostDependency bounds SamplerConfig.Dependency.
const MostDependency = 1 << 20

// hopper draws the hops of mini-batches: one Method on one kind of device and topology. A Sampler
// calls it with its lock held, so a hopper keeps scratch and tables for one hop at a time.
type hopper interface {
	// prepare takes the buffers of a new mini-batch whose sizes do not depend on what is drawn.
	prepare(mb *MiniBatch) error
	// begin makes the frontier of mb the seeds, in the stream's order. Epoch, Index, NumSeeds and
	// HopEnd are set.
	begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, seeds []int64) error
	// hop draws one hop: it fills mb.Blocks[hop], appends the new nodes to the frontier and their
	// count to HopEnd, and returns when the counts are valid.
	hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error
	// forget empties the tables after a step that failed half-way.
	forget()
	close() error
}

// sampling has the fields that a Sampler and its hopper share.
type sampling struct {
	dev         cuda.Device
	topo        *DeviceTopology
	cfg         SamplerConfig
	directLimit int64 // largest graph whose position table has an entry for every node
}

// Sampler draws mini-batches by the Method of its configuration. It checks what it is given and
// keys the draws; its hopper draws.
//
// Hops of different mini-batches may alternate and come from several goroutines: calls take turns.
// Batches that strictly follow one another are cheapest.
type Sampler struct {
	sampling
	key    [2]uint32
	mu     sync.Mutex
	hopper hopper
	// Of Loopless: the kernel that fills degrees in and the degrees of all nodes; nil: no edge is
	// one of a node to itself.
	kLoopless cuda.Kernel
	loopless  cuda.Buffer
}

// NewSampler makes a sampler over topo, which must stay attached until Close.
func NewSampler(dev cuda.Device, topo *DeviceTopology, cfg SamplerConfig) (*Sampler, error) {
	return newSampler(dev, topo, cfg, directNodes)
}

func newSampler(dev cuda.Device, topo *DeviceTopology, cfg SamplerConfig,
	directLimit int64) (*Sampler, error) {
	if len(cfg.Fanouts) == 0 || len(cfg.Fanouts) > 255 {
		return nil, errs.New(errs.Usage, "sampler: %d fanouts; give 1 to 255, one for each hop",
			len(cfg.Fanouts))
	}
	m, err := FindMethod(cfg.Method)
	if err != nil {
		return nil, err
	}
	for i, f := range cfg.Fanouts {
		if f == 0 || f < -1 || f > m.MostFanout {
			return nil, errs.New(errs.Usage,
				"fanout %d of hop %d: must be 1 to %d %s, or -1 for all", f, i, m.MostFanout,
				m.Fanout)
		}
	}
	if d := cfg.Dependency; d < 0 || d > MostDependency || d > 1 && !m.Dependent {
		return nil, errs.New(errs.Usage,
			"batch dependency %d of sampler %s: must be 1 to %d, and 1 unless the sampler is %s", d,
			m.Name, MostDependency, strings.Join(DependentNames(), " or "))
	}
	if err := cfg.checkTyped(m, topo.Host.Schema); err != nil {
		return nil, err
	}
	s := &Sampler{
		sampling: sampling{dev: dev, topo: topo, cfg: cfg, directLimit: directLimit},
		key:      philox.Key(cfg.Seed, philox.StreamSample),
	}
	if topo.inner != nil {
		s.hopper, err = newRelay(s.sampling, s.key)
	} else {
		s.hopper, err = m.open(s.sampling)
	}
	if err != nil {
		return nil, err
	}
	if cfg.Degrees && cfg.Loopless && topo.inner == nil { // else the inner sampler does it
		if s.loopless, err = topo.looplessDegrees(dev); err == nil {
			err = s.findKernels(kernelName{&s.kLoopless, "sample_loopless"})
		}
		if err != nil {
			return nil, errors.Join(err, s.hopper.close())
		}
	}
	return s, nil
}

// Close frees the hopper's tables and scratch.
func (s *Sampler) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hopper.close()
}

// Busy returns how long a host device has sampled in a GPU's place (a topology on storage): that
// time is on none of the GPU's streams. It is 0 where the device samples itself.
func (s *Sampler) Busy() time.Duration {
	if r, ok := s.hopper.(*relay); ok {
		return r.stream.Busy()
	}
	return 0
}

// NewMiniBatch makes an empty mini-batch for this sampler.
func (s *Sampler) NewMiniBatch() (*MiniBatch, error) {
	mb := &MiniBatch{
		dev:    s.dev,
		HopEnd: make([]int64, 0, len(s.cfg.Fanouts)+1),
		Blocks: make([]Block, 0, len(s.cfg.Fanouts)),
	}
	if err := s.hopper.prepare(mb); err != nil {
		_ = mb.Close()
		return nil, fmt.Errorf("mini-batch: %w", err)
	}
	return mb, nil
}

// SharedDraws returns the index to give Begin where a node shall draw the same neighbours in every
// batch of the epoch: evaluation and prediction use it, so that a node's result does not depend on
// the batch that it is in.
func SharedDraws(index int) int { return ^index }

// batchKey returns the key of batch index's draws. Batches of an epoch draw for themselves, as in
// DGL and PyG, or they would all meet the same few neighbours of a node for a whole epoch. The
// run's own key is that of SharedDraws.
func (s *Sampler) batchKey(index int) [2]uint32 {
	if index < 0 {
		return s.key
	}
	w := philox.Block(philox.Key(s.cfg.Seed, philox.StreamBatch),
		[4]uint32{uint32(index), uint32(uint64(index) >> 32)})
	return [2]uint32{w[0], w[1]}
}

// Begin starts a batch: the frontier is the seeds. Work of mb's previous batch must be done. A seed
// that stands twice gets two rows, of which edges use the first. On return the seeds slice is free
// to change; the frontier has them once the stream comes there. Samples are a function of (seed,
// epoch, index, hop, node); see SharedDraws. The seeds of a typed graph count within Schema.Seeds.
func (s *Sampler) Begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch, epoch, index int,
	seeds []int64) error {
	mb.key, mb.nextKey, mb.turn = s.batchKey(index), s.key, 0
	if index < 0 {
		index = ^index
	} else if n := s.cfg.Dependency; n > 1 {
		mb.key, mb.nextKey, mb.turn = s.batchKey(index/n), s.batchKey(index/n+1), uint32(index%n)
	}
	if len(seeds) == 0 {
		return errs.New(errs.Usage, "batch %d of epoch %d has no seed nodes", index, epoch)
	}
	nodes := s.topo.Host.NumNodes
	if t := s.topo.Host.Schema; t != nil {
		nodes = t.Types[t.Seeds].Nodes
	}
	for i, v := range seeds {
		if uint64(v) >= uint64(nodes) {
			return errs.New(errs.Usage,
				"seed node %d (number %d of batch %d) is out of range, nodes are 0 to %d; check the split files",
				v, i, index, nodes-1)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err := mb.freeRetired()
	if err == nil {
		mb.Epoch, mb.Index, mb.NumSeeds = epoch, index, len(seeds)
		mb.HopEnd = append(mb.HopEnd[:0], int64(len(seeds)))
		mb.Blocks = mb.Blocks[:0]
		if err = s.hopper.begin(ctx, stream, mb, seeds); err == nil {
			err = s.leaveOutLoops(ctx, stream, mb)
		}
		if err == nil {
			err = s.takeRows(ctx, stream, mb, 0)
		}
	}
	if err != nil {
		s.hopper.forget()
		return fmt.Errorf("sample batch %d of epoch %d: %w", index, epoch, err)
	}
	return nil
}

// Hop samples in-neighbours of all frontier nodes (of the seeds and of all earlier hops, as DGL
// does; for a layer-wise sampler see ladies.go), makes mb.Blocks[hop] and appends the nodes not
// seen before to the frontier. Hops go in order from 0. On return all counts are valid and the
// buffers can be read.
func (s *Sampler) Hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	if hop != len(mb.Blocks) || hop >= len(s.cfg.Fanouts) || len(mb.HopEnd) != hop+1 {
		return errs.New(errs.Failed,
			"sample hop %d: the mini-batch has done %d of %d hops; call Begin, then the hops in order",
			hop, len(mb.Blocks), len(s.cfg.Fanouts))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.hopper.hop(ctx, stream, mb, hop)
	if err == nil {
		err = s.leaveOutLoops(ctx, stream, mb)
	}
	if err == nil {
		err = s.takeRows(ctx, stream, mb, hop+1)
	}
	if err != nil {
		if s.topo.Host.OnStorage() && s.topo.inner == nil {
			// Reads fail, or an interrupt ends them, with kernels under way: these must not use
			// what is let go next.
			after, cancel := context.WithTimeout(context.WithoutCancel(ctx), readLimit)
			err = errors.Join(err, stream.Synchronize(after))
			cancel()
		}
		s.hopper.forget()
		mb.HopEnd = mb.HopEnd[:0]
		mb.Blocks = mb.Blocks[:0]
		return fmt.Errorf("sample hop %d of batch %d, epoch %d: %w", hop, mb.Index, mb.Epoch, err)
	}
	return nil
}

// leaveOutLoops fills in the degrees of the frontier, which its hopper has with all edges.
func (s *Sampler) leaveOutLoops(ctx context.Context, stream cuda.Stream, mb *MiniBatch) error {
	if s.loopless == nil {
		return nil
	}
	n := mb.HopEnd[len(mb.HopEnd)-1]
	p := looplessParams{Nodes: mb.Nodes.Ptr(), Table: s.loopless.Ptr(), Degrees: mb.Degrees.Ptr(),
		NumNodes: s.topo.Host.NumNodes, Count: n}
	blocks := int(max(min((n+threads-1)/threads, int64(s.gridLimit())), 1))
	if err := cuda.Launch(stream, s.kLoopless, cuda.LaunchConfig{Blocks: blocks, Threads: threads},
		p); err != nil {
		return err
	}
	return stream.Synchronize(ctx)
}

// hostTables reports whether the CPU samples with its own kernels (hop_host.go), whose tables hold
// nodes of 32 bits.
func (c *sampling) hostTables() bool {
	return c.dev.Info().Backend == "host" && c.topo.Host.NumNodes <= 1<<32
}

// gridLimit is the grid of the largest launches on the device.
func (c *sampling) gridLimit() int { return max(1, 4*c.dev.Info().SMs) }

// prepare takes the pinned counts that kernels hand to the CPU.
func (c *sampling) prepare(mb *MiniBatch) error {
	var err error
	if mb.sums, err = c.dev.Alloc(cuda.MemPinned, int64(c.gridLimit())*8,
		"sampler counts"); err == nil {
		mb.totals, err = c.dev.Alloc(cuda.MemPinned, 32, "sampler counts")
	}
	return err
}

// stageSeeds copies the seeds to the frontier on the device and makes room for their degrees.
func (c *sampling) stageSeeds(stream cuda.Stream, mb *MiniBatch, seeds []int64) error {
	n := int64(len(seeds))
	if err := mb.grow(stream, &mb.stage, cuda.MemPinned, n*8, 0, "seed staging"); err != nil {
		return err
	}
	if err := mb.grow(stream, &mb.Nodes, cuda.MemDevice, n*8, 0, "frontier"); err != nil {
		return err
	}
	if c.cfg.Degrees {
		if err := mb.grow(stream, &mb.Degrees, cuda.MemDevice, n*4, 0,
			"frontier degrees"); err != nil {
			return err
		}
	}
	copy(unsafe.Slice((*int64)(unsafe.Pointer(&mb.stage.Bytes()[0])), n), seeds)
	return stream.Copy(mb.Nodes.Ptr(), mb.stage.Ptr(), n*8)
}

// checkTyped refuses what a typed graph cannot have, and other graphs what only it has.
func (c *SamplerConfig) checkTyped(m *Method, schema *Schema) error {
	switch {
	case schema == nil && (c.RelationFanouts != nil || c.Together):
		return errs.New(errs.Usage, "fanouts of relations are for graphs with types")
	case schema == nil:
		return nil
	case m.Untyped != "":
		return errs.New(errs.Capability,
			"sampler %s does not draw from graphs with types: %s; use %s or %s", m.Name, m.Untyped,
			Neighbor, Labor)
	case c.Degrees:
		return errs.New(errs.Capability, "in-degrees are not kept for graphs with types")
	case c.RelationFanouts != nil && len(c.RelationFanouts) != len(schema.Relations):
		return errs.New(errs.Usage, "fanouts of %d relations, the graph has %d",
			len(c.RelationFanouts), len(schema.Relations))
	}
	if err := c.checkTogether(m); err != nil {
		return err
	}
	for r, list := range c.RelationFanouts {
		if len(list) != len(c.Fanouts) {
			return errs.New(errs.Usage, "relation %s: %d fanouts; give %d, one for each hop",
				schema.RelationName(r), len(list), len(c.Fanouts))
		}
		for hop, f := range list {
			if f < -1 || f > m.MostFanout {
				return errs.New(errs.Usage,
					"relation %s: fanout %d of hop %d: must be 0 to %d, or -1 for all",
					schema.RelationName(r), f, hop, m.MostFanout)
			}
		}
	}
	return nil
}

// checkTogether refuses draws over all relations where they can't be had.
func (c *SamplerConfig) checkTogether(m *Method) error {
	switch {
	case !c.Together:
		return nil
	case c.RelationFanouts != nil:
		return errs.New(errs.Usage, "fanouts by relation and over all of them: give one")
	case m.Name != Neighbor:
		return errs.New(errs.Capability,
			"sampler %s draws by the in-degree in each relation; fanouts over all relations are for %s",
			m.Name, Neighbor)
	}
	for hop, f := range c.Fanouts {
		if f > tileDraws {
			return errs.New(errs.Usage,
				"fanout %d of hop %d over all relations: must be 1 to %d, or -1 for all", f, hop,
				tileDraws)
		}
	}
	return nil
}

// fanout returns how many neighbours relation r draws in a hop.
func (c *SamplerConfig) fanout(r, hop int) int {
	if c.RelationFanouts != nil {
		return c.RelationFanouts[r][hop]
	}
	return c.Fanouts[hop]
}

// kernelName is a kernel to look up, and where it goes.
type kernelName struct {
	dst  *cuda.Kernel
	name string
}

// findKernels looks kernels up on the device.
func (c *sampling) findKernels(list ...kernelName) error {
	for _, k := range list {
		var err error
		if *k.dst, err = c.dev.Kernel(k.name); err != nil {
			return fmt.Errorf("sampler: %w", err)
		}
	}
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
