package sched

import (
	"context"
	"errors"
	"slices"

	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/timeline"
)

// vmachine is the modelled machine with the operators' streams on it. It lives as long as a run, so
// that passes follow each other on its clock.
type vmachine struct {
	sim   *des.Sim
	m     *iosim.Machine
	gpu   *vgpu
	stack *iosim.Stack // nil when no batch reads
	work  *vwork
	plan  plan
	rec   *timeline.Recorder

	sampleS, lookupS, gatherS, trainS *vstream

	credits, reads int64 // in use, in flight: for the timeline
}

// vpass is a walk over an order of seed nodes on the virtual clock: run in pipeline.go, stage by stage,
// with events in the place of goroutines.
type vpass struct {
	*vmachine
	name  string
	first int
	n     int
	train bool
	// shape samples batch i and looks its rows up, for real.
	shape func(i int) (*vshape, error)
	after func(b *vbatch)

	err      error
	next     int // batch to sample
	sampling bool
	free     int // credits

	parts   []vpending // for lookup, in order
	looking bool

	flying   []*vbatch // sampled or being sampled, in order
	training bool
	idle     int64 // since when training waits
	waited   int64

	start     int64
	submit    int64
	completes [][2]int64
	before    StageSeconds
	end       int64
}

// vbatch is a mini-batch in flight.
type vbatch struct {
	*vshape
	open  int  // parts that are not in place
	whole bool // all its parts have been looked up
}

type vpending struct {
	b    *vbatch
	part int
	last bool
}

// run plays the pass to its end. It returns with nothing in flight.
func (p *vpass) run(ctx context.Context) error {
	p.start = p.sim.Now()
	p.idle = p.start
	p.before = p.streams()
	p.next, p.free = p.first, p.plan.credits
	shape := p.shape
	p.shape = func(i int) (*vshape, error) {
		if err := interrupted(ctx); err != nil {
			return nil, err
		}
		return shape(i)
	}
	p.sample()
	p.sim.Run()
	if p.err == nil && (len(p.flying) > 0 || p.next < p.n) {
		p.err = errors.New("the modelled pipeline came to a halt with batches in flight")
	}
	if p.rec.On() {
		p.rec.Span(trackRun, p.name, p.start, p.end-p.start, nil)
	}
	return p.err
}

// sample takes a credit and samples the next batch.
func (p *vpass) sample() {
	if p.sampling || p.err != nil || p.next == p.n || p.free == 0 {
		return
	}
	s, err := p.shape(p.next)
	if err != nil {
		p.err = err
		return
	}
	p.sampling = true
	p.free--
	p.next++
	p.credit(1)
	b := &vbatch{vshape: s, open: len(s.parts)}
	p.flying = append(p.flying, b)
	begin := p.sim.Now()
	p.sampleS.launch(p.work.begin(s), nil, func(int64) {
		if p.plan.perHop {
			p.hand(b, 0, false)
		}
		p.hop(b, 0, begin)
	})
}

// hop runs S_{h+1} and what follows it.
func (p *vpass) hop(b *vbatch, h int, begin int64) {
	p.sampleS.launch(p.work.hop(b.vshape, h), nil, func(now int64) {
		p.span(trackSample, hopNames[h+1], begin, now, b, b.hopEnd[h+1])
		last := h+1 == len(b.blocks)
		switch {
		case p.plan.perHop:
			p.hand(b, h+1, last)
		case last:
			p.hand(b, 0, true)
		}
		if !last {
			p.hop(b, h+1, now)
			return
		}
		p.sampling = false
		p.sample()
	})
}

// hand passes a part of a batch on to lookup.
func (p *vpass) hand(b *vbatch, part int, last bool) {
	p.parts = append(p.parts, vpending{b, part, last})
	if !p.looking {
		p.lookup()
	}
}

// lookup runs L, I and G for the next part in line.
func (p *vpass) lookup() {
	if p.looking = len(p.parts) > 0; !p.looking {
		return
	}
	w := p.parts[0]
	p.parts = p.parts[1:]
	part := &w.b.parts[w.part]
	if part.count == 0 { // a hop that found no new node
		p.lookedUp(w)
		p.placed(w.b)
		p.lookup()
		return
	}
	begin := p.sim.Now()
	p.lookupS.launch(p.work.lookup(part), nil, func(now int64) {
		p.span(trackLookup, "L", begin, now, w.b, part.count)
		p.lookedUp(w)
		waits := 1 // for the gather
		in := func() {
			if waits--; waits == 0 {
				p.placed(w.b)
			}
		}
		gather := func() {
			if part.ngpu+part.ncpu == 0 {
				in()
				return
			}
			var from int64
			p.gatherS.launch(p.work.gather(part), func(now int64) { from = now }, func(now int64) {
				p.span(trackGather, "G", from, now, w.b, part.ngpu+part.ncpu)
				in()
			})
		}
		if part.nmiss == 0 {
			gather()
			p.lookup()
			return
		}
		waits++
		p.read(w.b, part, func() {
			in()
			if p.plan.serial {
				gather()
				p.lookup()
			}
		})
		if !p.plan.serial {
			gather()
			p.lookup()
		}
	})
}

func (p *vpass) lookedUp(w vpending) {
	if w.last {
		w.b.whole = true
	}
}

// read reads a part's misses.
func (p *vpass) read(b *vbatch, part *vpart, done func()) {
	per := make([]int64, len(part.reads))
	var commands, bytes int64
	for s, r := range part.reads {
		per[s] = r.Commands
		commands += r.Commands
		bytes += r.Bytes
	}
	p.flight(part.nmiss)
	p.stack.SubmitSized(per, (bytes+commands/2)/commands, func(t iosim.Times) {
		p.gpu.changed()
		p.flight(-part.nmiss)
		p.submit += t.SubmitEndNS - t.SubmitNS
		p.completes = append(p.completes, [2]int64{t.SubmitEndNS, t.DoneNS})
		p.span(trackSubmit, "I", t.SubmitNS, t.SubmitEndNS, b, part.nmiss)
		p.span(trackComplete, "C", t.SubmitEndNS, t.DoneNS, b, part.nmiss)
		done()
	})
	p.gpu.changed()
}

// placed counts a part whose rows are all in place, and lets training begin.
func (p *vpass) placed(b *vbatch) {
	b.open--
	p.step()
}

// step runs T for the oldest batch in flight once it is whole.
func (p *vpass) step() {
	if p.training || len(p.flying) == 0 || p.err != nil {
		return
	}
	b := p.flying[0]
	if !b.whole || b.open > 0 {
		return
	}
	p.training = true
	begin := p.sim.Now()
	p.waited += begin - p.idle
	p.trainS.launch(p.work.model(b.vshape, p.train), nil, func(now int64) {
		p.span(trackTrain, "T", begin, now, b, b.hopEnd[len(b.hopEnd)-1])
		p.flying = p.flying[1:]
		p.training, p.idle, p.end = false, now, now
		p.free++
		p.credit(-1)
		p.after(b)
		p.sample()
		p.step()
	})
}

func (p *vpass) span(track, name string, from, to int64, b *vbatch, rows int64) {
	if p.rec.On() {
		p.rec.Span(track, name, from, to-from, map[string]any{"pass": p.name, "batch": b.index, "rows": rows})
	}
}

func (m *vmachine) credit(d int64) {
	m.credits += d
	m.rec.Counter(trackCredits, "in use", m.sim.Now(), float64(m.credits))
}

func (m *vmachine) flight(rows int64) {
	m.reads += rows
	m.rec.Counter(trackReads, "rows", m.sim.Now(), float64(m.reads))
}

// streams is how long the operators on streams have been busy since the run began.
func (m *vmachine) streams() StageSeconds {
	m.gpu.account()
	return StageSeconds{Sample: m.sampleS.busy / 1e9, Lookup: m.lookupS.busy / 1e9, Gather: m.gatherS.busy / 1e9, Train: m.trainS.busy / 1e9}
}

// stages is what the pass has kept busy.
func (p *vpass) stages() StageSeconds {
	s := p.streams()
	s.add(p.before, -1)
	s.Submit = float64(p.submit) / 1e9
	s.Complete = float64(union(p.completes)) / 1e9
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
