package virtual

import (
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/report"
)

// vdelivery has the batches of a pass that were sampled before it and are not gathered, in order.
type vdelivery struct {
	line      []*Batch
	gathering bool
}

// restore brings a batch back that was sampled with its superbatch.
func (p *Pass) restore(b *Batch, begin int64) {
	b.open++ // for deliver
	p.line = append(p.line, b)
	read := int64(float64(b.Saved) / p.Model.Profile.CPU.GatherGBs.Value)
	p.Filed += read
	p.Sim.After(read, func() {
		from := p.Sim.Now()
		p.Model.Copy(b.Saved, func() {
			now := p.Sim.Now()
			p.sampleS.busy += float64(now - from)
			p.span(report.TrackSample, plan.NameRestore, begin, now, b, b.HopEnd[len(b.Blocks)])
			p.sampling = false
			p.sampled++
			for i := range b.Parts {
				p.hand(b, i, i == len(b.Parts)-1)
			}
			p.sample()
		})
	})
}

// fetch reads the misses of a part that is placed.
func (p *Pass) fetch(w vpending) {
	if w.b.Parts[w.part].NMiss == 0 {
		p.placed(w.b)
		p.lookup()
		return
	}
	p.read([]vpending{w}, func() {
		p.placed(w.b)
		if p.plan.Serial {
			p.lookup()
		}
	})
	if !p.plan.Serial {
		p.lookup()
	}
}

// deliver gathers the next batch whose reads are whole, and makes its changes.
func (p *Pass) deliver() {
	if p.gathering || len(p.line) == 0 || !p.line[0].whole || p.line[0].open > 1 {
		return
	}
	b := p.line[0]
	p.line, p.gathering = p.line[1:], true
	open := 1
	end := func() {
		if open--; open == 0 {
			p.gathering = false
			p.placed(b)
		}
	}
	for i := range b.Parts {
		part := &b.Parts[i]
		if part.NGPU+part.NCPU == 0 {
			continue
		}
		open++
		var from int64
		p.gatherS.launch(p.Work.Gather(part), func(now int64) { from = now }, func(now int64) {
			p.span(report.TrackGather, p.op("G", vpending{b: b, part: i}), from, now, b,
				part.NGPU+part.NCPU)
			end()
		})
	}
	for i := range b.Parts { // packed rows leave the staging buffer
		part := &b.Parts[i]
		if part.Staged == 0 {
			continue
		}
		open++
		var from int64
		p.gatherS.launch(p.Work.Gather(&cost.Part{NGPU: part.Staged}),
			func(now int64) { from = now }, func(now int64) {
				p.span(report.TrackGather, p.op("G", vpending{b: b, part: i}), from, now, b,
					part.Staged)
				end()
			})
	}
	if k := p.Work.Changes(b.Change); len(k) > 0 {
		open++
		p.gatherS.launch(k, nil, func(now int64) {
			bytes := p.Work.Leaving(b.Change)
			p.Model.HostMem.Send(bytes)
			at := p.Gpu.Egress.Send(bytes)
			p.gatherS.busy += float64(at - now)
			p.Sim.At(at, end)
		})
	}
	end()
}
