package virtual

import (
	"context"
	"errors"
	"slices"

	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/timeline"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/walk"
)

// Machine is the modelled machine with the operators' streams on it. It lives as long as a run, so
// that passes follow each other on its clock.
type Machine struct {
	Sim   *des.Sim
	Model *iosim.Machine
	Gpu   *GPU
	Stack *iosim.Stack // nil when no batch reads
	Work  *cost.Kernels
	rec   *timeline.Recorder

	sampleS, lookupS, gatherS, trainS *vstream
	SuperS                            *vstream // samples superbatches
	replicas                          []*vreplica
	sumS                              *vstream // adds their gradients
	// Directory is the CPU's where it looks rows of a dynamic tier up, in directoryNS each; nil:
	// kernels do.
	Directory   *des.Pool
	DirectoryNS float64
	Restored    bool // mini-batches were sampled before, with the places of their rows
	// Filed is the time of mini-batches' way to their superbatch's files and back, Inspected that
	// of finding the changes, in ns.
	Filed, Inspected int64

	lists *lists // neighbour lists on storage; nil: they are in memory

	credits, reads int64 // in use, in flight: for the timeline
}

// Pass is a walk over an order of seed nodes on the virtual clock.
type Pass struct {
	*Machine
	Name  string
	Epoch int // of the run
	First int // batch
	End   int // end
	// shard is a mini-batch's number in its step of the optimiser, and how many the step has; nil:
	// this is no training.
	shard func(index int) (at, of int)
	// staged: rows are read beside their places, and all of a part are put there once its reads are
	// whole, part after part.
	staged bool
	config *plan.Config
	plan   *plan.Schedule
	reads  func(rows []int64) []gpuio.Planned // of a set, by SSD
	graph  *plan.OpGraph
	// Shape samples batch i and looks its rows up, for real.
	Shape func(i int) (*cost.Shape, error)
	After func(b *Batch)
	Found func(index int) int64 // when the changes of a batch are; nil: there are none

	run     *walk.Processes
	walk    walk.Walk[*Batch]
	groups  int // sets that were merged
	grouped int // mini-batches in them

	Began     int64
	Waited    int64
	Submit    int64
	Completes [][2]int64
	before    report.StageSeconds
	Ended     int64
}

// Batch is a mini-batch in flight.
type Batch struct {
	*cost.Shape
	began int64 // its operator of sampling
	open  int   // gathers that have not ended
}

// Steps makes the pass one of training, whose mini-batches are shards of steps of so many.
func (p *Pass) Steps(shards, batches int) {
	p.shard = func(i int) (at, of int) { return i % shards, min(shards, batches-i+i%shards) }
}

// Begin begins the pass.
func (p *Pass) Begin() {
	p.Began = p.Sim.Now()
	p.before = p.streams()
	p.Ended = p.Began
}

// Walk plays batches p.First to p.End-1. It returns with nothing in flight.
func (p *Pass) Walk(ctx context.Context) error {
	p.run = walk.NewProcesses(p.Sim)
	defer p.run.Close()
	c := *p.config
	c.Unpacked = !p.Restored
	p.graph = c.Operators(true)
	p.walk = walk.Walk[*Batch]{Executor: p.run, Operators: operators{p, ctx}, Graph: p.graph,
		From: p.First, To: p.End, First: p.First, End: p.End, Restored: p.Restored,
		Samples: p.plan.Samples}
	if p.graph.Accumulate > 0 { // so that a group can fill
		p.walk.Samples += plan.MaxGroup
	}
	p.walk.Start()
	if p.shard != nil && len(p.replicas) > 1 {
		p.startReplicas()
	} else {
		p.run.Go(p.walk.Train)
	}
	p.Sim.Run()
	if err := p.walk.Failure(); err != nil {
		return err
	}
	if p.walk.Passed() < p.End {
		return errors.New("the modelled pipeline came to a halt with batches in flight")
	}
	return nil
}

// tell draws the pass in the timeline.
func (p *Pass) tell() {
	if p.rec.On() {
		p.rec.Span(report.TrackRun, p.Name, p.Began, p.Ended-p.Began, nil)
	}
}

// operators do the work of a pass on the virtual clock.
type operators struct {
	*Pass
	ctx context.Context
}

// Begin implements walk.Operators.
func (p operators) Begin(i int) (*Batch, error) {
	if err := prepare.Interrupted(p.ctx); err != nil {
		return nil, err
	}
	s, err := p.Shape(i)
	if err != nil {
		return nil, err
	}
	p.credit(1)
	b := &Batch{Shape: s, began: p.Sim.Now()}
	if !p.Restored {
		p.run.Run(func(done func()) { p.beginSampling(p.sampleS, s, done) })
		return b, nil
	}
	read := int64(float64(b.Saved) / p.Model.Profile.CPU.GatherGBs.Value)
	p.Filed += read
	p.run.Sleep(p.Sim.Now() + read)
	from := p.Sim.Now()
	p.run.Run(func(done func()) { p.Model.Copy(b.Saved, done) })
	now := p.Sim.Now()
	p.sampleS.busy += float64(now - from)
	p.span(report.TrackSample, plan.NameRestore, b.began, now, b, b.HopEnd[len(b.Blocks)])
	return b, nil
}

// Sample implements walk.Operators.
func (p operators) Sample(b *Batch, h int) error {
	p.run.Run(func(done func()) {
		p.sampleHop(p.sampleS, b.Shape, h-1, func(int64) { done() })
	})
	now := p.Sim.Now()
	p.span(report.TrackSample, plan.OperatorName("S", h), b.began, now, b, b.HopEnd[h])
	b.began = now
	return nil
}

// Reach implements walk.Operators.
func (p operators) Reach(*Batch, int) error { return nil }

// Announce implements walk.Operators.
func (p operators) Announce(b *Batch) error {
	p.run.Run(func(done func()) { p.announce(b.Shape, done) })
	return nil
}

// part is the rows that a hop has added to a batch.
func (p *Pass) part(b *Batch, h int) *cost.Part {
	if !p.graph.PerHop {
		h = 0
	}
	return &b.Parts[h]
}

// Lookup implements walk.Operators.
func (p operators) Lookup(b *Batch, h int) error {
	part := p.part(b, h)
	if part.Count == 0 { // a hop that found no new node
		return nil
	}
	if p.Found != nil {
		p.run.Sleep(p.Found(b.Index))
	}
	begin := p.Sim.Now()
	p.run.Run(func(done func()) { p.find(part, func(int64) { done() }) })
	p.span(report.TrackLookup, plan.OperatorName("L", h), begin, p.Sim.Now(), b, part.Count)
	return nil
}

// Closes implements walk.Operators.
func (p operators) Closes(s *walk.Set[*Batch]) bool {
	b := s.Newest().Batch
	if p.graph.Accumulate > 0 {
		return s.Newest().Last && b.Closes
	}
	return s.Whole(b.Joined, b.At+1 >= p.End)
}

// Submit implements walk.Operators: the misses of parts are read as one set.
func (p operators) Submit(set *walk.Set[*Batch]) error {
	if p.graph.Accumulate > 0 || set.Batches > 1 {
		p.groups, p.grouped = p.groups+1, p.grouped+set.Batches
	}
	p.planWaiting(set)
	var per []int64
	var commands, bytes, rows int64
	hop := 0 // the first that reads
	for _, x := range set.Parts {
		part := p.part(x.Batch, x.Hop)
		if rows == 0 {
			hop = x.Hop
		}
		rows += part.NMiss
		if per == nil && part.Reads != nil {
			per = make([]int64, len(part.Reads))
		}
		for s, r := range part.Reads {
			per[s] += r.Commands
			commands += r.Commands
			bytes += r.Bytes
		}
	}
	if set.Arrived = commands == 0; set.Arrived {
		return nil
	}
	first := set.Parts[0].Batch.Index
	p.flight(rows)
	p.Stack.SubmitSized(per, (bytes+commands/2)/commands, func(t iosim.Times) {
		p.Gpu.Changed()
		p.flight(-rows)
		p.Pass.Submit += t.SubmitEndNS - t.SubmitNS
		p.Completes = append(p.Completes, [2]int64{t.SubmitEndNS, t.DoneNS})
		if p.rec.On() {
			args := report.SetArgs(p.Name, first, set.Batches, rows)
			p.rec.Span(report.TrackSubmit, plan.OperatorName("I", hop), t.SubmitNS,
				t.SubmitEndNS-t.SubmitNS, args)
			p.rec.Span(report.TrackComplete, plan.OperatorName("C", hop), t.SubmitEndNS,
				t.DoneNS-t.SubmitEndNS, args)
		}
		p.run.Do(func() { set.Arrived = true })
	})
	p.Gpu.Changed()
	return nil
}

// planWaiting plans the reads of parts that are read as one set; the first of them has them.
func (p operators) planWaiting(set *walk.Set[*Batch]) {
	var rows []int64
	var first *cost.Part
	for _, x := range set.Parts {
		if part := p.part(x.Batch, x.Hop); len(part.Waits) > 0 {
			if first == nil {
				first = part
			}
			rows, part.Waits = append(rows, part.Waits...), nil
		}
	}
	if first != nil {
		first.Reads = p.reads(rows)
	}
}

// Complete implements walk.Operators.
func (p operators) Complete(set *walk.Set[*Batch]) error {
	p.run.Await(func() bool { return set.Arrived })
	return nil
}

// Gather implements walk.Operators.
func (p operators) Gather(b *Batch, h int) error {
	part := p.part(b, h)
	if p.staged {
		p.gather(b, h, p.Work.Finish(part), part.Count)
		p.run.Await(func() bool { return b.open == 0 })
		return nil
	}
	p.gather(b, h, p.Work.Gather(part), part.NGPU+part.NCPU)
	// packed rows leave the staging buffer
	p.gather(b, h, p.Work.Gather(&cost.Part{NGPU: part.Staged}), part.Staged)
	return nil
}

// gather launches what brings rows of a batch to their places.
func (p *Pass) gather(b *Batch, h int, work []cost.Kernel, rows int64) {
	if rows == 0 {
		return
	}
	b.open++
	var from int64
	p.gatherS.launch(work, func(now int64) { from = now }, func(now int64) {
		p.span(report.TrackGather, plan.OperatorName("G", h), from, now, b, rows)
		p.run.Do(func() { b.open-- })
	})
}

// Place implements walk.Operators: behind the gathers the tiers change.
func (p operators) Place(b *Batch) error {
	if k := p.Work.Changes(b.Change); len(k) > 0 {
		b.open++
		p.gatherS.launch(k, nil, func(now int64) {
			bytes := p.Work.Leaving(b.Change)
			p.Model.HostMem.Send(bytes)
			gone := p.Gpu.Egress.Send(bytes)
			p.gatherS.busy += float64(gone - now)
			p.Sim.At(gone, func() { p.run.Do(func() { b.open-- }) })
		})
	}
	p.run.Await(func() bool { return b.open == 0 })
	return nil
}

// Waited implements walk.Operators.
func (p operators) Waited(ns int64) { p.Pass.Waited += ns }

// Train implements walk.Operators.
func (p operators) Train(b *Batch) (end func() error, err error) {
	begin := p.Sim.Now()
	work := p.Work.Model(b.Shape, p.shard != nil)
	if p.shard != nil {
		work = append(work, p.Work.Update(p.shard(b.Index))...)
	}
	p.run.Run(func(done func()) { p.trainS.launch(work, nil, func(int64) { done() }) })
	p.span(report.TrackTrain, "T", begin, p.Sim.Now(), b, b.HopEnd[len(b.HopEnd)-1])
	return nil, nil
}

// Release implements walk.Operators.
func (p operators) Release(b *Batch) {
	p.Ended = p.Sim.Now()
	p.credit(-1)
	p.After(b)
}

func (p *Pass) span(track, name string, from, to int64, b *Batch, rows int64) {
	if p.rec.On() {
		p.rec.Span(track, name, from, to-from, map[string]any{"pass": p.Name, "batch": b.Index,
			"rows": rows})
	}
}

// placeBytes is the bytes that placing a row reads and writes: its number, its slot, and an entry
// of the lists.
const placeBytes = 2*(8+4) + 8 + 5*4

// find looks a part's rows up: with kernels, or by the directory, to which the row numbers are
// copied and which leaves its answers in memory that the GPU reads. The CPU places rows of planned
// tiers.
func (m *Machine) find(part *cost.Part, done func(now int64)) {
	p := m.Model.Profile
	switch {
	case m.Restored:
		ns := int64(float64(part.Count*placeBytes) / p.CPU.GatherGBs.Value)
		m.Sim.After(ns, func() {
			m.lookupS.busy += float64(ns)
			done(m.Sim.Now())
		})
		return
	case m.Work.Directory != nil:
		m.lookupS.launch(m.Work.Admit(part), nil, done)
		return
	case m.Directory == nil:
		m.lookupS.launch(m.Work.Lookup(part), nil, done)
		return
	}
	copied := p.PCIe.CopyNS.NS() + int64(float64(part.Count*8)/p.PCIe.CopyGBs.Value)
	m.Sim.After(copied, func() {
		m.lookupS.busy += float64(copied)
		m.Directory.Do(1, int64(float64(part.Count)*m.DirectoryNS), func(start int64) {
			m.lookupS.busy += float64(m.Sim.Now() - start)
			done(m.Sim.Now())
		})
	})
}

// announce tells the directory of a coming batch's lines.
func (m *Machine) announce(s *cost.Shape, done func()) {
	rows := s.HopEnd[len(s.HopEnd)-1]
	switch {
	case s.Announced && m.Work.Directory != nil: // lookups are behind it on their stream
		m.lookupS.launch(m.Work.Announce(rows), nil, nil)
		done()
		return
	case m.Directory == nil || !s.Announced:
		done()
		return
	}
	m.Directory.Do(1, int64(float64(rows)*m.Model.Profile.CPU.AnnounceNS.Value), func(start int64) {
		m.lookupS.busy += float64(m.Sim.Now() - start)
		done()
	})
}

func (m *Machine) credit(d int64) {
	m.credits += d
	m.rec.Counter(report.TrackCredits, "in use", m.Sim.Now(), float64(m.credits))
}

func (m *Machine) flight(rows int64) {
	m.reads += rows
	m.rec.Counter(report.TrackReads, "rows", m.Sim.Now(), float64(m.reads))
}

// chain launches jobs on a stream, each when the one before has ended.
func (m *Machine) chain(on *vstream, jobs [][]cost.Kernel, done func()) {
	if len(jobs) == 0 {
		done()
		return
	}
	on.launch(jobs[0], nil, func(int64) { m.chain(on, jobs[1:], done) })
}

// streams returns how long the operators on streams have been busy since the run began.
func (m *Machine) streams() report.StageSeconds {
	m.Gpu.account()
	train := m.trainS.busy
	for _, r := range m.replicas[min(1, len(m.replicas)):] {
		r.train.gpu.account()
		train += r.train.busy
	}
	return report.StageSeconds{
		Sample:  (m.sampleS.busy + m.SuperS.busy + float64(m.Filed)) / 1e9,
		Inspect: float64(m.Inspected) / 1e9, Topology: float64(m.listWait()) / 1e9,
		Lookup: m.lookupS.busy / 1e9,
		Gather: m.gatherS.busy / 1e9, Train: train / 1e9}
}

// stages returns what the pass has kept busy.
func (p *Pass) stages() report.StageSeconds {
	s := p.streams()
	s.AddTimes(p.before, -1)
	s.Submit = float64(p.Submit) / 1e9
	s.Complete = float64(union(p.Completes)) / 1e9
	return s
}

// union is the time that at least one of some intervals covers.
func union(spans [][2]int64) (ns int64) {
	spans = slices.Clone(spans)
	slices.SortFunc(spans, func(a, b [2]int64) int {
		switch {
		case a[0] < b[0]:
			return -1
		case a[0] > b[0]:
			return 1
		}
		return 0
	})
	end := int64(0)
	for i, s := range spans {
		if i == 0 || s[0] > end {
			end = s[0]
		}
		if s[1] > end {
			ns += s[1] - end
			end = s[1]
		}
	}
	return ns
}
