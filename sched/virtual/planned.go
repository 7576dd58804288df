package virtual

import (
	"context"
	"errors"
	"fmt"

	"helios/cache/superbatch"
	"helios/cuda"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
)

// Planned tiers on the virtual clock. A superbatch is sampled and inspected for real, so its hits,
// moves and reads are those of a run; nothing is kept in any tier. Its times:
//
//   - Sampling has a stream of its own. Each mini-batch then goes over the link to the CPU, which
//     writes it to a file at the rate at which one core copies rows (cpu.gather_gbs), and later
//     reads it back at that rate: the files stay in the page cache. A disk that is slower, or busy,
//     is not modelled.
//   - Before the first mini-batch trains all cores look when each row is accessed next. Each of
//     them reads all accesses, cpu.inspect_scan_ns for one, and they share cpu.inspect_ns an access.
//   - Then one core finds the changes, cpu.change_ns an access, mini-batch after mini-batch beside
//     their training. A mini-batch whose changes are not found waits for them.
//   - First rows are read as tiers are filled, before the first mini-batch.
//   - Rows are placed by the CPU in two passes over lists (placeBytes).
//   - Moves are gathers behind those of their mini-batch; what goes to the CPU tier leaves the GPU
//     over a link of its own, as PCIe has one for each direction, at pcie.uva_gbs.
//
// Under --superbatch-overlap the next superbatch is sampled and inspected while one trains. Its
// kernels share the GPU with the others; its CPU time takes nothing from other threads.
//
// A superbatch without a given length is as long as it may be: how much memory and disk there is
// does not bound it. It ends with the last mini-batch that is played, and of it only those that are
// played take time to be sampled and inspected (cost.Hardware.Warm, Batches).

// placeBytes is what placing a row reads and writes: its number, its slot, and an entry of the
// lists.
const placeBytes = 2*(8+4) + 8 + 5*4

// planned are the planned tiers of a run.
type planned struct {
	tiers plan.TierSizes
	after *superbatch.State // what the tiers hold; nil: nothing
	held  map[*vsuper]bool  // superbatches whose files are open
	info  report.SuperbatchInfo
	rows  []int64 // scratch
	adj   []byte
	misses, striped,
	off []int64
	// made has mini-batches that nobody has to sample; nil: they are.
	made func(x *vsuper) error
}

// vsuper is a superbatch: mini-batches first to end-1 of a pass. Those from from on are played.
type vsuper struct {
	first, from, end int
	shapes           []*cost.Shape
	files            *samples.Files
	changes          *superbatch.Changes
	// fill has the rows of each tier that are read first, where nobody has sampled (planned.made).
	fill  [2][]int64
	kept  int64   // slots, the first ones, whose rows it finds there
	there []int64 // when the changes of each mini-batch that is played are found
}

// found returns when the changes of a mini-batch are.
func (x *vsuper) found(index int) int64 { return x.there[index-x.from] }

// openPlanned makes planned tiers of b's sizes, which nothing has to fill.
func (v *run) openPlanned(b plan.TierSizes) error {
	v.planned = &planned{tiers: b, held: map[*vsuper]bool{},
		off: make([]int64, v.layout.SSDs+1)}
	v.OnClose(func() (err error) {
		for x := range v.planned.held {
			err = errors.Join(err, v.planned.drop(x))
		}
		return err
	})
	v.m.planned = true
	v.m.gpu.egress = des.NewLink(v.m.sim, v.hw.Profile.PCIe.UVAGBs.Value*1e9, 0)
	return v.openStack()
}

// drop lets go of a superbatch.
func (t *planned) drop(x *vsuper) error {
	delete(t.held, x)
	if x.files == nil {
		return nil
	}
	return x.files.Close()
}

// superbatches plays a pass, one superbatch after the other.
func (v *run) superbatches(ctx context.Context, p *vpass, sum *report.Partial) error {
	t := v.planned
	from, end, size := p.first, p.n, v.Config.SuperbatchMost(p.n)
	next := func(first int) (*vsuper, error) {
		x := &vsuper{first: first, end: min(first+size, end)}
		x.from = min(max(first, from), x.end)
		return x, v.makeSuper(ctx, x, p.name)
	}
	p.begin()
	var coming, last *vsuper
	for first := 0; first < end; {
		idle, x := p.end, coming
		if coming = nil; x == nil {
			var err error
			if x, err = next(first); err != nil {
				return err
			}
			v.playSuper(x, last)
			v.m.sim.Run()
		}
		if x.changes != nil {
			t.after = &x.changes.After
		}
		if t.made == nil {
			if err := v.rec.super(x); err != nil {
				return err
			}
		}
		if x.from == x.first {
			begin := v.m.sim.Now()
			v.fillPlanned(ctx, x, sum)
			p.completes = append(p.completes, [2]int64{begin, v.m.sim.Now()})
		}
		if v.Config.SuperbatchOverlap && x.end < end {
			var err error
			if coming, err = next(x.end); err != nil {
				return err
			}
			v.playSuper(coming, x)
		}
		p.waited += v.m.sim.Now() - idle
		p.first, p.n, p.changes = x.from, x.end, x
		p.shape = func(i int) (*cost.Shape, error) { return v.plannedShape(x, i) }
		if x.from < x.end {
			if err := p.walk(ctx); err != nil {
				return err
			}
		}
		first, last = x.end, x
		p.changes = nil
		if err := t.drop(x); err != nil {
			return err
		}
	}
	return nil
}

// makeSuper samples a superbatch for real and finds its changes.
func (v *run) makeSuper(ctx context.Context, x *vsuper, pass string) (err error) {
	t, s := v.planned, &v.src
	if t.made != nil {
		return t.made(x)
	}
	dir := v.Config.SuperbatchFolder(v.In.Dataset.Dir())
	if x.files, err = samples.Create(dir, v.Rows, 0); err != nil {
		return err
	}
	t.held[x] = true
	mb, bytes := v.mbs[0], int64(0)
	for i := x.first; i < x.end; i++ {
		if err := prepare.Interrupted(ctx); err != nil {
			return err
		}
		if err := v.SampleWhole(ctx, mb, s.key, i, s.order.Seeds(i)); err != nil {
			return fmt.Errorf("batch %d: %w", i, err)
		}
		shape, err := v.keep(mb, x.files)
		if err != nil {
			return fmt.Errorf("batch %d: %w", i, err)
		}
		shape.Index, shape.At = i, i
		x.shapes = append(x.shapes, shape)
		bytes += shape.Saved
		v.Observer.TellStep("sample superbatch of "+pass, i-x.first+1, x.end-x.first)
	}
	if t.after != nil {
		x.kept = t.tiers.GPURows + t.tiers.CPURows
	}
	if x.changes, err = superbatch.Inspect(ctx, x.files, superbatch.Config{
		Slots: t.tiers.GPURows + t.tiers.CPURows, GPU: t.tiers.GPURows, Before: t.after,
		Fill: v.Config.SuperbatchFill, Keep: !v.Config.SuperbatchFill,
		Workers: hostcpu.Count(),
	}); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	st, i := x.changes.Stats, &t.info
	i.Superbatches++
	i.Batches = max(i.Batches, x.end-x.first)
	i.FileBytes, i.InspectBytes = max(i.FileBytes, bytes), max(i.InspectBytes, st.Bytes)
	i.Accesses += st.Accesses
	i.RowsLoaded += st.Loaded
	return nil
}

// keep adds the frontier of a sampled batch to a superbatch's files; of its blocks only the size is
// needed.
func (v *run) keep(mb *graph.MiniBatch, to *samples.Files) (*cost.Shape, error) {
	t := v.planned
	adj, n, err := mb.Save(t.adj[:0], func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return b.Bytes()[:bytes], nil
	})
	if err != nil {
		return nil, err
	}
	t.adj = adj
	s, was := v.m.shapeOf(mb), to.Bytes()
	nodes := hostmem.View[int64](mb.Nodes.Bytes())
	if v.Config.Method().WholeLists {
		s.CountLists(v.Topology.Indptr, nodes)
	}
	err = to.Append(nodes[:n], nil)
	s.Saved = to.Bytes() - was + int64(len(adj))
	return &s, err
}

// playSuper begins the sampling of a superbatch and its inspection behind it, which needs to know
// what the one before it leaves.
func (v *run) playSuper(x, before *vsuper) {
	m, t := v.m, v.planned
	free := int64(0)
	if before != nil && len(before.there) > 0 {
		free = before.there[len(before.there)-1]
	}
	begin := m.sim.Now()
	p, accesses := m.m.Profile, int64(0)
	shapes := x.shapes[x.from-x.first:]
	var batch func()
	batch = func() {
		if len(shapes) == 0 {
			t.info.SampleSeconds += float64(m.sim.Now()-begin) / 1e9
			v.draw(report.TrackSuper, "sample superbatch", begin, m.sim.Now())
			m.sim.At(max(m.sim.Now(), free), func() { v.inspect(x, accesses) })
			return
		}
		s := shapes[0]
		shapes = shapes[1:]
		accesses += s.HopEnd[len(s.HopEnd)-1]
		m.sampleWhole(m.superS, s, func() {
			bytes := float64(s.Saved)
			took := p.PCIe.CopyNS.NS() + int64(bytes/p.PCIe.CopyGBs.Value) +
				int64(bytes/p.CPU.GatherGBs.Value)
			m.filed += took
			m.sim.After(took, batch)
		})
	}
	batch()
}

// inspect plays the look ahead over so many accesses, and finds out when the changes of each
// mini-batch are found behind it.
func (v *run) inspect(x *vsuper, accesses int64) {
	m, t := v.m, v.planned
	cpu, begin := &m.m.Profile.CPU, m.sim.Now()
	looked := int64(float64(accesses) * (cpu.InspectScanNS.Value +
		cpu.InspectNS.Value/max(cpu.Cores.Value, 1)))
	at := begin + looked
	for _, s := range x.shapes[x.from-x.first:] {
		at += int64(float64(s.HopEnd[len(s.HopEnd)-1]) * cpu.ChangeNS.Value)
		x.there = append(x.there, at)
	}
	t.info.InspectSeconds += float64(looked) / 1e9
	t.info.ChangeSeconds += float64(at-begin-looked) / 1e9
	m.inspected += at - begin
	v.draw(report.TrackInspect, "look ahead", begin, begin+looked)
	v.draw(report.TrackInspect, "find changes", begin+looked, at)
	m.sim.After(looked, func() {})
}

// firstRows takes the rows that a superbatch begins with, by tier.
func (t *planned) firstRows(x *vsuper) [2][]int64 {
	rows := x.fill
	if x.changes != nil {
		for _, m := range x.changes.Fill {
			tier := 0
			if int64(m.Slot) >= t.tiers.GPURows {
				tier = 1
			}
			rows[tier] = append(rows[tier], x.changes.First[m.At])
		}
		x.changes.Fill, x.changes.First = nil, nil
	}
	return rows
}

// fillPlanned plays the reads of the rows that a superbatch begins with.
func (v *run) fillPlanned(ctx context.Context, x *vsuper, sum *report.Partial) {
	t, start := v.planned, v.m.sim.Now()
	rows := t.firstRows(x)
	sum.RowsLoaded += int64(len(rows[0]) + len(rows[1]))
	commands, bytes := v.readSets(ctx, rows[:])
	sum.Commands += commands
	sum.BytesSSD += bytes
	t.info.FillSeconds += float64(v.m.sim.Now()-start) / 1e9
	v.span("fill tiers", start)
}

// plannedShape says where the rows of a batch of a superbatch are.
func (v *run) plannedShape(x *vsuper, i int) (*cost.Shape, error) {
	t, index := v.planned, i-x.first
	s := x.shapes[index]
	if t.made != nil {
		return s, nil
	}
	var err error
	if t.rows, err = x.files.Read(index, t.rows); err != nil {
		return nil, err
	}
	if err := v.rec.Begin(v.src.kind, v.src.epoch, i); err != nil {
		return nil, err
	}
	slots := x.changes.Slots(index)
	err = v.parts(s, func(from int64, part *cost.Part) error {
		if err := v.rec.Rows(t.rows[from : from+part.Count]); err != nil {
			return err
		}
		t.misses = t.misses[:0]
		for k, slot := range slots[from : from+part.Count] {
			switch {
			case slot == superbatch.Miss:
				t.misses = append(t.misses, t.rows[from+int64(k)])
			case int64(slot) < t.tiers.GPURows:
				part.NGPU++
			default:
				part.NCPU++
			}
		}
		if part.NMiss = int64(len(t.misses)); part.NMiss > 0 {
			if cap(t.striped) < len(t.misses) {
				t.striped = make([]int64, len(t.misses)+len(t.misses)/4)
			}
			out := t.striped[:len(t.misses)]
			stripe(t.misses, out, t.off)
			part.Reads, _, _ = v.commands(out, t.off)
		}
		return nil
	})
	s.Change.Demoted = int64(len(x.changes.Demotions(index)))
	for _, m := range x.changes.Moves(index) {
		if int64(m.Slot) < t.tiers.GPURows {
			s.Change.ToGPU++
		} else {
			s.Change.ToCPU++
		}
	}
	return s, err
}

// vdelivery is what a pass over planned tiers keeps of batches that are not gathered, in order.
type vdelivery struct {
	line      []*vbatch
	gathering bool
}

// restore brings a batch back that was sampled with its superbatch.
func (p *vpass) restore(b *vbatch, begin int64) {
	b.open++ // for deliver
	p.line = append(p.line, b)
	read := int64(float64(b.Saved) / p.m.Profile.CPU.GatherGBs.Value)
	p.filed += read
	p.sim.After(read, func() {
		from := p.sim.Now()
		p.m.Copy(b.Saved, func() {
			now := p.sim.Now()
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
func (p *vpass) fetch(w vpending) {
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
func (p *vpass) deliver() {
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
		p.gatherS.launch(p.work.Gather(part), func(now int64) { from = now }, func(now int64) {
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
		p.gatherS.launch(p.work.Gather(&cost.Part{NGPU: part.Staged}),
			func(now int64) { from = now }, func(now int64) {
				p.span(report.TrackGather, p.op("G", vpending{b: b, part: i}), from, now, b,
					part.Staged)
				end()
			})
	}
	if k := p.work.Changes(b.Change); len(k) > 0 {
		open++
		p.gatherS.launch(k, nil, func(now int64) {
			bytes := p.work.Leaving(b.Change)
			p.m.HostMem.Send(bytes)
			at := p.gpu.egress.Send(bytes)
			p.gatherS.busy += float64(at - now)
			p.sim.At(at, end)
		})
	}
	end()
}
