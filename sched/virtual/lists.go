package virtual

import (
	"time"

	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/sched/cost"
)

// A topology on storage on the virtual clock. Mini-batches are sampled for real over the dataset's
// own file, so what is drawn, what the neighbour cache has and what is read are a run's. Its times:
//
//   - All cores draw a hop's neighbours, cpu.stored_ns for an edge.
//   - Then its reads go to the modelled SSDs, striped over them, by one thread and io_uring
//     (cpu.uring_ns), as many in flight as a run has. The SSDs serve them beside the rows' reads.
//   - Then frontier and block are copied to the GPU.
//
// The CPU time takes nothing from other threads. Checking the file and filling the neighbour cache
// at a run's beginning take none.

// readSlots is the most reads of lists in flight.
const readSlots = 256

// lists are the neighbour lists on storage of a run.
type lists struct {
	stack  *iosim.Stack
	hops   map[*graph.MiniBatch][]cost.Stored // what was sampled last
	before graph.StorageStats
	turn   int64 // SSD that the next set of reads begins at
	waited int64 // ns in which hops waited for reads
}

// openLists makes what plays reads of neighbour lists, beside the rows' stack where there is one.
func (m *Machine) openLists(seed uint64) (err error) {
	if m.lists == nil {
		return nil
	}
	m.lists.stack, err = iosim.New(m.Model, iosim.Config{Stack: gpuio.StackCPU, Threads: 1,
		Depth: max(readSlots/m.Model.SSDs(), 1), ToHost: true, Seed: seed, Beside: m.Stack})
	return err
}

// watchLists notes what each hop reads of a topology on storage.
func watchLists(v *Player) {
	if !v.Topology.OnStorage() {
		return
	}
	l := &lists{hops: map[*graph.MiniBatch][]cost.Stored{}, before: v.Topology.Storage()}
	v.Machine.lists = l
	v.EachHop = func(mb *graph.MiniBatch, hop int) {
		now := v.Topology.Storage()
		d := now.Sub(l.before)
		l.before = now
		l.hops[mb] = append(l.hops[mb][:hop:hop], cost.Stored{Edges: d.Edges, Reads: d.Reads,
			Bytes: d.Bytes})
	}
}

// shapeOf is the shape of a mini-batch that was sampled just now, or since the last of it.
func (m *Machine) shapeOf(mb *graph.MiniBatch) cost.Shape {
	s := cost.ShapeOf(mb)
	if m.lists != nil {
		s.Stored = m.lists.hops[mb]
	}
	return s
}

// listReads returns the reads of sampling since an earlier time, with their modelled time beyond
// waited; nil for a topology in memory.
func listReads(v *Player, before *graph.StorageStats, waited int64) *graph.StorageStats {
	r := v.TopologyReads(before)
	if r != nil {
		r.Wait = time.Duration(v.Machine.listWait() - waited)
		r.Retries = 0 // this machine's
	}
	return r
}

// listWait is the time in which hops have waited for reads, in ns.
func (m *Machine) listWait() int64 {
	if m.lists == nil {
		return 0
	}
	return m.lists.waited
}

// listInfo describes lists on storage, without this machine's way to read them; nil for a topology
// in memory.
func listInfo(v *Player) *graph.StorageInfo {
	i := v.TopologyInfo()
	if i != nil {
		i.Direct, i.IOUring, i.OpenSeconds = true, true, 0
	}
	return i
}

// sampleHop samples hop h of a mini-batch: kernels do, or the CPU where lists are on storage.
func (m *Machine) sampleHop(on *vstream, s *cost.Shape, h int, done func(now int64)) {
	if s.Stored == nil {
		on.launch(m.Work.Hop(s, h), nil, done)
		return
	}
	x, cpu := s.Stored[h], &m.Model.Profile.CPU
	drawing := int64(float64(x.Edges) * cpu.StoredNS.Value / max(cpu.Cores.Value, 1))
	m.Sim.After(drawing, func() {
		on.busy += float64(drawing)
		begin := m.Sim.Now()
		m.readLists(x, func() {
			from := m.Sim.Now()
			m.lists.waited += from - begin
			m.Model.Copy(m.Work.HopBytes(s, h), func() {
				now := m.Sim.Now()
				on.busy += float64(now - from)
				done(now)
			})
		})
	})
}

// beginSampling hands the seeds of a mini-batch to who samples it.
func (m *Machine) beginSampling(on *vstream, s *cost.Shape, done func()) {
	if s.Stored == nil {
		on.launch(m.Work.Begin(s), nil, func(int64) { done() })
		return
	}
	m.Sim.After(0, done)
}

// SampleWhole samples a mini-batch, hop after hop.
func (m *Machine) SampleWhole(on *vstream, s *cost.Shape, done func()) {
	if s.Stored == nil {
		m.chain(on, m.Work.Sampling(s), done)
		return
	}
	var hop func(h int)
	hop = func(h int) {
		if h == len(s.Blocks) {
			done()
			return
		}
		m.sampleHop(on, s, h, func(int64) { hop(h + 1) })
	}
	hop(0)
}

// readLists plays the reads of a hop.
func (m *Machine) readLists(x cost.Stored, done func()) {
	if x.Reads == 0 {
		m.Sim.After(0, done)
		return
	}
	l, n := m.lists, int64(m.Model.SSDs())
	per := make([]int64, n)
	for i := range per {
		per[i] = x.Reads / n
	}
	for range x.Reads % n {
		per[l.turn]++
		l.turn = (l.turn + 1) % n
	}
	l.stack.SubmitSized(per, (x.Bytes+x.Reads/2)/x.Reads, func(iosim.Times) { done() })
}
