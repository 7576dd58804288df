package virtual

import (
	"context"
	"errors"
	"slices"

	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/timeline"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Machine is the modelled machine with the operators' streams on it. It lives as long as a run, so
// that passes follow each other on its clock.
type Machine struct {
	Sim   *des.Sim
	Model *iosim.Machine
	Gpu   *GPU
	Stack *iosim.Stack // nil when no batch reads
	Work  *cost.Kernels
	plan  plan.Schedule
	rec   *timeline.Recorder

	sampleS, lookupS, gatherS, trainS *vstream
	SuperS                            *vstream // samples superbatches
	replicas                          []*vreplica
	sumS                              *vstream // adds their gradients
	// Directory is the CPU's where it looks rows of a dynamic tier up, in directoryNS each; nil:
	// kernels do.
	Directory   *des.Pool
	DirectoryNS float64
	Restored    bool // rows are where a superbatch's changes say
	// Filed is what mini-batches took to their superbatch's files and back, inspected what the
	// changes took to be found, in ns.
	Filed, Inspected int64

	lists *lists // neighbour lists on storage; nil: they are in memory

	credits, reads int64 // in use, in flight: for the timeline
}

// Pass is a walk over an order of seed nodes on the virtual clock: what package sched's walk does,
// stage by stage, with events in the place of goroutines.
type Pass struct {
	*Machine
	Name  string
	Epoch int // of the run
	First int // batch
	End   int // end
	vtraining
	// window is how many batches after one that is looked up have been sampled by then. grouped:
	// the reads of several batches are merged, up to one whose shape closes the group. staged: rows
	// are read beside their places, and all of a part are put there once its reads are whole, part
	// after part.
	window          int
	grouped, staged bool
	// Shape samples batch i and looks its rows up, for real.
	Shape func(i int) (*cost.Shape, error)
	After func(b *Batch)

	err      error
	next     int // batch to sample
	sampled  int // batches that are
	sampling bool
	free     int // credits for samples

	Found   func(index int) int64 // when the changes of a batch are; nil: there are none
	parts   []vpending            // for lookup, in order
	looking bool
	looks   int // batches looked up

	vstaging
	vdelivery

	flying []*Batch // sampled or being sampled, in order

	Began     int64
	Submit    int64
	Completes [][2]int64
	before    report.StageSeconds
	Ended     int64
}

// vtraining is what a pass has of the last operator.
type vtraining struct {
	// shard is a mini-batch's number in its step of the optimiser, and how many the step has; nil:
	// this is no training.
	shard    func(index int) (at, of int)
	fleet    *vfleet // of several replicas; nil: one device trains
	training bool
	idle     int64 // since when training waits
	Waited   int64
}

// vstaging holds what a pass over dynamic tiers keeps of sets of reads.
type vstaging struct {
	group     *vgroup   // that is being gathered
	groups    []*vgroup // handed to the SSDs, in order
	finishing bool
	features  int // credits for rows, where they are not those for samples
	merged    int // groups that were handed to them
	out       int // batches handed to the SSDs, or past them, and not trained
}

// Batch is a mini-batch in flight.
type Batch struct {
	*cost.Shape
	open    int  // parts that are not in place
	whole   bool // all its parts have been looked up
	trained bool // by a replica
	hasRows bool // it has a credit for rows
}

type vpending struct {
	b    *Batch
	part int
	last bool
}

// vgroup is parts that are read as one set.
type vgroup struct {
	parts   []vpending
	arrived bool
	at      int // part that is next put in its place
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

// Walk plays batches p.first to p.n-1. It returns with nothing in flight.
func (p *Pass) Walk(ctx context.Context) error {
	p.idle = p.Sim.Now()
	p.next, p.sampled, p.looks = p.First, p.First, p.First
	p.free, p.features = p.plan.Samples, p.plan.Credits
	if p.grouped { // so that a group can fill
		p.free += plan.MaxGroup
	}
	shape := p.Shape
	p.Shape = func(i int) (*cost.Shape, error) {
		if err := prepare.Interrupted(ctx); err != nil {
			return nil, err
		}
		return shape(i)
	}
	p.sample()
	p.Sim.Run()
	if p.err == nil && (len(p.flying) > 0 || p.next < p.End) {
		p.err = errors.New("the modelled pipeline came to a halt with batches in flight")
	}
	return p.err
}

// tell draws the pass in the timeline.
func (p *Pass) tell() {
	if p.rec.On() {
		p.rec.Span(report.TrackRun, p.Name, p.Began, p.Ended-p.Began, nil)
	}
}

// sample takes a credit and samples the next batch.
func (p *Pass) sample() {
	if p.sampling || p.err != nil || p.next == p.End || p.free == 0 {
		return
	}
	// One operator at a time: a batch is sampled when what is looked up next needs it, and only
	// between groups.
	if p.plan.Serial && p.staged && (p.out > 0 || p.next > p.looks+p.window) {
		return
	}
	s, err := p.Shape(p.next)
	if err != nil {
		p.err = err
		return
	}
	p.sampling = true
	p.free--
	p.next++
	p.credit(1)
	b := &Batch{Shape: s, open: len(s.Parts)}
	p.flying = append(p.flying, b)
	begin := p.Sim.Now()
	if p.Restored {
		p.restore(b, begin)
		return
	}
	p.beginSampling(p.sampleS, s, func() {
		if p.plan.PerHop {
			p.hand(b, 0, false)
		}
		p.hop(b, 0, begin)
	})
}

// hop runs S_{h+1} and what follows it.
func (p *Pass) hop(b *Batch, h int, begin int64) {
	p.sampleHop(p.sampleS, b.Shape, h, func(now int64) {
		p.span(report.TrackSample, plan.OperatorName("S", h+1), begin, now, b, b.HopEnd[h+1])
		last := h+1 == len(b.Blocks)
		switch { // in the order of the batches, whenever they are announced
		case p.plan.PerHop:
			p.hand(b, h+1, last)
		case last:
			p.hand(b, 0, true)
		}
		if !last {
			p.hop(b, h+1, now)
			return
		}
		free := func() {
			p.sampling = false
			p.sample()
		}
		p.announce(b.Shape, func() {
			p.sampled++
			if p.plan.Serial {
				free()
			}
			p.lookNext()
		})
		if !p.plan.Serial {
			free()
		}
	})
}

// hand passes a part of a batch on to lookup.
func (p *Pass) hand(b *Batch, part int, last bool) {
	p.parts = append(p.parts, vpending{b, part, last})
	p.lookNext()
}

func (p *Pass) lookNext() {
	if !p.looking {
		p.lookup()
	}
}

// ready reports whether a part may be looked up now.
func (p *Pass) ready(w vpending) bool {
	if p.sampled <= min(w.b.At+p.window, p.End-1) && p.window > 0 {
		return false
	}
	return !p.plan.Serial || !p.staged || p.out == 0 && !p.sampling
}

// lookup runs L, I and G for the next part in line.
func (p *Pass) lookup() {
	if p.looking = len(p.parts) > 0 && p.ready(p.parts[0]); !p.looking {
		return
	}
	w := p.parts[0]
	p.parts = p.parts[1:]
	part := &w.b.Parts[w.part]
	if part.Count == 0 { // a hop that found no new node
		p.lookedUp(w)
		if p.staged {
			p.stage(w)
		} else {
			p.placed(w.b)
		}
		p.lookup()
		return
	}
	if p.Found != nil {
		if at := p.Found(w.b.Index); at > p.Sim.Now() {
			p.Sim.At(at, func() { p.lookUp(w) })
			return
		}
	}
	p.lookUp(w)
}

// lookUp runs L, I and G for a part that can be looked up.
func (p *Pass) lookUp(w vpending) {
	part, begin := &w.b.Parts[w.part], p.Sim.Now()
	p.find(part, func(now int64) {
		p.span(report.TrackLookup, p.op("L", w), begin, now, w.b, part.Count)
		p.lookedUp(w)
		if p.staged {
			p.stage(w)
			p.lookup()
			return
		}
		if p.Restored {
			p.fetch(w)
			return
		}
		waits := 1 // for the gather
		in := func() {
			if waits--; waits == 0 {
				p.placed(w.b)
			}
		}
		gather := func() {
			if part.NGPU+part.NCPU == 0 {
				in()
				return
			}
			var from int64
			p.gatherS.launch(p.Work.Gather(part), func(now int64) { from = now }, func(now int64) {
				p.span(report.TrackGather, p.op("G", w), from, now, w.b, part.NGPU+part.NCPU)
				in()
			})
		}
		if part.NMiss == 0 {
			gather()
			p.lookup()
			return
		}
		waits++
		p.read([]vpending{w}, func() {
			in()
			if p.plan.Serial {
				gather()
				p.lookup()
			}
		})
		if !p.plan.Serial {
			gather()
			p.lookup()
		}
	})
}

func (p *Pass) lookedUp(w vpending) {
	if w.last {
		w.b.whole = true
		p.looks++
		// the group goes on with a batch that may have to be sampled
		if p.plan.Serial && p.staged && !(p.grouped && w.b.Closes) {
			p.Sim.After(0, p.sample)
		}
	}
}

// stage adds a part to the group, and hands the group to the SSDs when it is whole.
func (p *Pass) stage(w vpending) {
	if p.group == nil {
		p.group = &vgroup{}
	}
	g := p.group
	g.parts = append(g.parts, w)
	if p.grouped && !(w.last && w.b.Closes) {
		return
	}
	p.group = nil
	p.merged++
	for _, w := range g.parts {
		if w.last {
			p.out++
		}
	}
	p.groups = append(p.groups, g)
	p.read(g.parts, func() {
		g.arrived = true
		p.finish()
	})
}

// finish puts the next part in its place: all of its rows at once, in the order of the lookups.
func (p *Pass) finish() {
	if p.finishing || len(p.groups) == 0 || !p.groups[0].arrived {
		return
	}
	g := p.groups[0]
	w := g.parts[g.at]
	if !w.b.hasRows {
		if p.features == 0 {
			return
		}
		p.features--
		w.b.hasRows = true
	}
	if g.at++; g.at == len(g.parts) {
		p.groups = p.groups[1:]
	}
	part := &w.b.Parts[w.part]
	if part.Count == 0 {
		p.placed(w.b)
		p.finish()
		return
	}
	p.finishing = true
	var from int64
	p.gatherS.launch(p.Work.Finish(part), func(now int64) { from = now }, func(now int64) {
		p.span(report.TrackGather, p.op("G", w), from, now, w.b, part.Count)
		p.finishing = false
		p.placed(w.b)
		p.finish()
	})
}

// read reads the misses of parts as one set.
func (p *Pass) read(parts []vpending, done func()) {
	var per []int64
	var commands, bytes, rows int64
	batches := 0
	for _, w := range parts {
		if w.last {
			batches++
		}
		part := &w.b.Parts[w.part]
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
	if commands == 0 {
		p.Sim.After(0, done)
		return
	}
	b := parts[0].b
	p.flight(rows)
	p.Stack.SubmitSized(per, (bytes+commands/2)/commands, func(t iosim.Times) {
		p.Gpu.Changed()
		p.flight(-rows)
		p.Submit += t.SubmitEndNS - t.SubmitNS
		p.Completes = append(p.Completes, [2]int64{t.SubmitEndNS, t.DoneNS})
		if p.rec.On() {
			args := report.SetArgs(p.Name, b.Index, batches, rows)
			p.rec.Span(report.TrackSubmit, p.op("I", parts[0]), t.SubmitNS,
				t.SubmitEndNS-t.SubmitNS, args)
			p.rec.Span(report.TrackComplete, p.op("C", parts[0]), t.SubmitEndNS,
				t.DoneNS-t.SubmitEndNS, args)
		}
		done()
	})
	p.Gpu.Changed()
}

// placed counts a part whose rows are all in place, and lets training begin.
func (p *Pass) placed(b *Batch) {
	b.open--
	p.deliver()
	p.step()
}

// step runs T for the oldest batch in flight once it is whole.
func (p *Pass) step() {
	if p.fleet != nil {
		p.fleet.send()
		return
	}
	if p.training || len(p.flying) == 0 || p.err != nil {
		return
	}
	b := p.flying[0]
	if !b.whole || b.open > 0 {
		return
	}
	p.training = true
	begin := p.Sim.Now()
	p.Waited += begin - p.idle
	work := p.Work.Model(b.Shape, p.shard != nil)
	if p.shard != nil {
		work = append(work, p.Work.Update(p.shard(b.Index))...)
	}
	p.trainS.launch(work, nil, func(now int64) {
		p.span(report.TrackTrain, "T", begin, now, b, b.HopEnd[len(b.HopEnd)-1])
		p.training, p.idle = false, now
		p.counted(b)
		p.step()
	})
}

// counted releases the oldest mini-batch in flight, which has trained.
func (p *Pass) counted(b *Batch) {
	p.flying, p.Ended = p.flying[1:], p.Sim.Now()
	p.free++
	p.credit(-1)
	if p.staged {
		p.out--
		p.features++
	}
	p.After(b)
	p.sample()
	p.lookNext()
	p.finish()
}

// op names an operator of a part.
func (p *Pass) op(letter string, w vpending) string {
	hop := w.part
	if !p.plan.PerHop { // one part, which the last hop completes
		hop = len(w.b.Blocks)
	}
	return plan.OperatorName(letter, hop)
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
