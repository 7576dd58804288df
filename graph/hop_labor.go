package graph

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/units"
)

// laborLists makes a hop's variates, and brings the lists of a topology on storage in.
type laborLists struct {
	of    *Topology
	shift uint64 // of keys and phase: ids in the lists have the variates of the graph's nodes
	phase uint64
	span  uint32
	lists *farLists // of a topology on storage
	// whose first frontier nodes have their lists there, and how many
	listed   *MiniBatch
	listedTo int64
}

// newLaborLists is for lists whose id 0 has number base in the graph.
func newLaborLists(c sampling, of *Topology, base int64) (laborLists, error) {
	l := laborLists{of: of, shift: uint64(base) * golden, span: uint32(max(c.cfg.Dependency, 1))}
	l.phase = pair(philox.Key(c.cfg.Seed, philox.StreamPhase)) + l.shift
	var err error
	if l.of.OnStorage() {
		l.lists, err = newFarLists(l.of)
	}
	return l, err
}

func pair(k [2]uint32) uint64 { return uint64(k[1])<<32 | uint64(k[0]) }

func (l *laborLists) closeLists() error {
	if l.lists == nil {
		return nil
	}
	return l.lists.close()
}

// variates are those of a hop.
func (l *laborLists) variates(mb *MiniBatch, hop int) laborVariates {
	key := func(key [2]uint32) uint64 {
		w := philox.Block(key, [4]uint32{uint32(hop), uint32(mb.Epoch), 0, 0})
		return pair([2]uint32{w[0], w[1]}) + l.shift
	}
	return laborVariates{Keys: [2]uint64{key(mb.key), key(mb.nextKey)}, Phase: l.phase,
		Span: l.span, Turn: mb.turn}
}

// stage brings the lists of nodes of mb in from storage: those of its hops so far. Those of the hop
// before are there unless another mini-batch came in between.
func (l *laborLists) stage(ctx context.Context, mb *MiniBatch, nodes []int64) error {
	from := l.listedTo
	if l.listed != mb {
		if err := l.lists.drop(); err != nil {
			return err
		}
		from = 0
	}
	l.listed = nil
	all := int64(len(nodes))
	nodes = nodes[from:]
	var bytes int64 // in whole pages, of which neighbours' lists may share some
	page := int64(os.Getpagesize())
	for _, v := range nodes {
		bytes += (4*l.of.InDegree(v) + page - 1) &^ (page - 1)
	}
	bytes = min(bytes, 4*l.of.NumEdges+page)
	if bytes >= layerCheck {
		if left, err := availableBytes(); err == nil && bytes > left {
			return errs.New(errs.Usage,
				"sampler %s reads the whole lists of a hop's nodes: those of %d nodes take %s, and %s of memory are free; lower %v or %v, or give %v %s",
				Labor, len(nodes), units.FormatBytes(bytes), units.FormatBytes(left),
				errs.Key("batch-size"), errs.Key("fanout"), errs.Key("sampler"), Neighbor)
		}
	}
	if err := l.lists.stage(ctx, nodes); err != nil {
		return err
	}
	l.listed, l.listedTo = mb, all
	return nil
}

// laborHopper samples by variates of the sources (labor.go) with the kernels of a GPU: those of
// neighbour sampling, but for the two that draw.
type laborHopper struct {
	deviceHopper
	laborLists
	kLaborCount, kLaborFill cuda.Kernel
	limits                  cuda.Buffer
}

const laborPurpose = "sampler limits"

func newLaborHopper(c sampling) (*laborHopper, error) {
	d, err := newDeviceHopper(c)
	if err != nil {
		return nil, err
	}
	s := &laborHopper{deviceHopper: *d}
	err = s.findKernels(kernelName{&s.kLaborCount, "labor_count"},
		kernelName{&s.kLaborFill, "labor_fill"})
	if err == nil {
		s.laborLists, err = newLaborLists(c, c.topo.Host, 0)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	if s.lists != nil {
		s.indices = s.lists.ptr()
	}
	return s, nil
}

func (s *laborHopper) close() error {
	return errors.Join(s.deviceHopper.close(), free(&s.limits), s.closeLists())
}

func (s *laborHopper) forget() {
	s.deviceHopper.forget()
	s.listed = nil
}

func (s *laborHopper) begin(ctx context.Context, stream cuda.Stream, mb *MiniBatch,
	seeds []int64) error {
	s.listed = nil
	return s.deviceHopper.begin(ctx, stream, mb, seeds)
}

func (s *laborHopper) hop(ctx context.Context, stream cuda.Stream, mb *MiniBatch, hop int) error {
	n := mb.HopEnd[hop]
	if err := limitRoom(s.dev, &s.limits, n); err != nil {
		return err
	}
	if s.lists != nil {
		if err := s.stage(ctx, mb, view[int64](mb.Nodes, n)); err != nil {
			return err
		}
	}
	q := s.variates(mb, hop).params(s.limits.Ptr())
	launch := func(k *cuda.Kernel) func(*sampleParams) error {
		return func(p *sampleParams) error {
			q.Sample = *p
			return cuda.Launch(stream, *k,
				cuda.LaunchConfig{Blocks: int(s.grid(n)), Threads: threads}, q)
		}
	}
	return s.draw(ctx, stream, mb, hop, deviceDraws{
		// A destination may take all its neighbours.
		draws: func(int64, int64) int64 { return math.MaxInt64 / 2 },
		count: launch(&s.kLaborCount), fill: launch(&s.kLaborFill),
	})
}

// limitRoom makes room for the limits of n destinations. Hops wait for their kernels: none uses it.
func limitRoom(dev cuda.Device, b *cuda.Buffer, n int64) error {
	if *b != nil && (*b).Size() >= n*8 {
		return nil
	}
	if err := free(b); err != nil {
		return err
	}
	var err error
	if *b, err = dev.Alloc(cuda.MemDevice, (n*10+4095)&^4095, laborPurpose); err != nil {
		return fmt.Errorf("sampling of %d nodes: %w", n, err)
	}
	return nil
}
