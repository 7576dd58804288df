package ginex

import (
	"context"
	"errors"
	"fmt"
	"helios/sched/virtual"

	"helios/cache/superbatch"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
	"helios/sched/tiers/ginex/spec"
)

// Planned tiers on the virtual clock. A superbatch is sampled and inspected for real, so its hits,
// moves and reads are those of a run; nothing is kept in any tier. Its times:
//
//   - Sampling has a stream of its own. Each mini-batch then goes over the link to the CPU, which
//     writes it to a file at the rate at which one core copies rows (cpu.gather_gbs), and later
//     reads it back at that rate: the files stay in the page cache. A disk that is slower, or busy,
//     is not modelled.
//   - Before the first mini-batch trains all cores look when each row is accessed next. Each of
//     them reads all accesses, cpu.inspect_scan_ns for one, and they share cpu.inspect_ns an
// access.
//   - Then one core finds the changes, cpu.change_ns an access, mini-batch after mini-batch beside
//     their training. A mini-batch whose changes are not found waits for them.
//   - Rows are placed by the CPU in two passes over lists (placeBytes).
//   - Moves are gathers behind those of their mini-batch; what goes to the CPU tier leaves the GPU
//     over a link of its own, as PCIe has one for each direction, at pcie.uva_gbs.
//
// The superbatch of the next pass is not sampled beside this one's training, as in a run: a pass
// takes longer by that.
//
// Under --superbatch-overlap the next superbatch is sampled and inspected while one trains. Its
// kernels share the GPU with the others; its CPU time takes nothing from other threads.
//
// A superbatch without a given length is as long as it may be: how much memory and disk there is
// does not bound it. It ends with the last mini-batch that is played, and of it only those that are
// played take time to be sampled and inspected (cost.Hardware.Warm, Batches).

// Simulate is the system on the virtual clock.
var Simulate = virtual.System{New: func(v *virtual.Player) virtual.Tiers {
	t := &simulation{Base: virtual.Base{Player: v}, held: map[*simSuperbatch]bool{}}
	t.Self = t
	return t
}, Refuse: refuse}

// refuse refuses what has no times.
func refuse(c *plan.Config) error {
	switch {
	case !planned(c):
		return errs.New(errs.Capability,
			"%v virtual plays superbatches under %v %s, not %s; use that, or another %v",
			errs.Key("clock"), errs.Key("policy"), plan.PolicyBelady, c.Policy, errs.Key("mode"))
	case c.Topology == plan.TopologySSD && c.NeighborShared && !c.SuperbatchOverlap:
		return errs.New(errs.Capability,
			"%v virtual has no times for memory that %v lends the CPU cache and takes back; give %v a size, or add %v",
			errs.Key("clock"), errs.Key("neighbor-cache"), errs.Key("neighbor-cache"),
			errs.Key("superbatch-overlap"))
	}
	return virtual.RefuseTuning(c)
}

// simulation has tiers that know a superbatch on the virtual clock.
type simulation struct {
	virtual.Base
	tiers        plan.TierSizes
	after        *superbatch.State       // what the tiers hold; nil: nothing
	held         map[*simSuperbatch]bool // superbatches whose files are open
	info         spec.SuperbatchInfo
	rows, misses []int64       // scratch
	drawn        *virtual.Work // has mini-batches that nobody has to sample; nil: they are
}

// simSuperbatch is a superbatch: mini-batches first to end-1 of a pass. Mini-batches are played
// from "from" on.
type simSuperbatch struct {
	first, from, end int
	shapes           []*cost.Shape
	files            *samples.Files // nil: it is drawn
	accesses         superbatch.Accesses
	changes          *superbatch.Changes
	there            []int64 // when the changes of each mini-batch that is played are found
}

// found returns the time at which the changes of a mini-batch are found.
func (x *simSuperbatch) found(index int) int64 { return x.there[index-x.from] }

// Open implements Tiers: superbatches say what comes into the tiers.
func (t *simulation) Open(_ context.Context, b plan.TierSizes) error {
	return t.open(b)
}

// open makes tiers of b's sizes, which nothing has to fill.
func (t *simulation) open(b plan.TierSizes) error {
	v := t.Player
	t.tiers = b
	v.OnClose(func() (err error) {
		for x := range t.held {
			err = errors.Join(err, t.drop(x))
		}
		return err
	})
	v.Machine.Restored = true
	v.Machine.Gpu.Egress = des.NewLink(v.Machine.Sim, v.Hardware.Profile.PCIe.UVAGBs.Value*1e9, 0)
	return v.OpenStack()
}

// OpenWork implements Tiers.
func (t *simulation) OpenWork(_ context.Context, w *virtual.Work) error {
	t.drawn, t.after = w, w.Own.(*superbatch.State)
	return t.open(w.Tiers)
}

// Before implements Tiers: batches that are not played fill nothing.
func (t *simulation) Before(context.Context, *virtual.Pass, int, bool) error { return nil }

// GPUBytes implements Tiers.
func (t *simulation) GPUBytes() int64 { return t.tiers.GPURows * t.Player.RowBytes }

// CPUBytes implements Tiers.
func (t *simulation) CPUBytes() int64 { return t.tiers.CPURows * t.Player.RowBytes }

// Describe implements Tiers.
func (t *simulation) Describe(r *report.RunInfo) {
	info := t.info
	r.Superbatch = &info
}

// drop releases a superbatch.
func (t *simulation) drop(x *simSuperbatch) error {
	delete(t.held, x)
	if x.files == nil {
		return nil
	}
	return x.files.Close()
}

// Pass implements Tiers: it plays one superbatch after the other.
func (t *simulation) Pass(ctx context.Context, p *virtual.Pass, _ *report.Partial, _ bool,
	_ func(ctx context.Context) error) error {
	v := t.Player
	from, end, size := p.First, p.End, longest(&v.Config, p.End)
	next := func(first int) (*simSuperbatch, error) {
		x := &simSuperbatch{first: first, end: min(first+size, end)}
		x.from = min(max(first, from), x.end)
		return x, t.makeSuper(ctx, x, p.Name)
	}
	p.Begin()
	var coming, last *simSuperbatch
	for first := 0; first < end; {
		idle, x := p.Ended, coming
		if coming = nil; x == nil {
			var err error
			if x, err = next(first); err != nil {
				return err
			}
			t.playSuper(x, last)
			v.Machine.Sim.Run()
		}
		t.after = &x.changes.After
		if v.Config.SuperbatchOverlap && x.end < end {
			var err error
			if coming, err = next(x.end); err != nil {
				return err
			}
			t.playSuper(coming, x)
		}
		p.Waited += v.Machine.Sim.Now() - idle
		p.First, p.End, p.Found = x.from, x.end, x.found
		p.Shape = func(i int) (*cost.Shape, error) { return t.shape(x, i) }
		if x.from < x.end {
			if err := p.Walk(ctx); err != nil {
				return err
			}
		}
		first, last = x.end, x
		p.Found = nil
		if err := t.drop(x); err != nil {
			return err
		}
	}
	return nil
}

// makeSuper samples a superbatch for real, or draws it, and finds its changes.
func (t *simulation) makeSuper(ctx context.Context, x *simSuperbatch, pass string) (err error) {
	take := t.sampleSuper
	if t.drawn != nil {
		take = t.drawSuper
	}
	if err := take(ctx, x, pass); err != nil {
		return err
	}
	if x.changes, err = superbatch.Inspect(ctx, x.accesses, superbatch.Config{
		Slots: t.tiers.GPURows + t.tiers.CPURows, GPU: t.tiers.GPURows, Before: t.after,
		Keep: true, Nodes: t.Player.Rows, Workers: hostcpu.Count(),
	}); err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	st, i, bytes := x.changes.Stats, &t.info, int64(0)
	for _, s := range x.shapes {
		bytes += s.Saved
	}
	i.Superbatches++
	i.Batches = max(i.Batches, x.end-x.first)
	i.FileBytes, i.InspectBytes = max(i.FileBytes, bytes), max(i.InspectBytes, st.Bytes)
	i.Accesses += st.Accesses
	i.RowsLoaded += st.Loaded
	return nil
}

// sampleSuper samples the mini-batches of a superbatch into files.
func (t *simulation) sampleSuper(ctx context.Context, x *simSuperbatch, pass string) (err error) {
	v, s := t.Player, &t.Player.Source
	dir := folder(&v.Config, v.In.Dataset.Dir())
	if x.files, err = samples.Create(dir, v.Rows, 0); err != nil {
		return err
	}
	t.held[x], x.accesses = true, x.files
	mb := v.Batches[0]
	for i := x.first; i < x.end; i++ {
		if err := prepare.Interrupted(ctx); err != nil {
			return err
		}
		if err := v.SampleWhole(ctx, mb, s.Key, i, s.Order.Seeds(i)); err != nil {
			return fmt.Errorf("batch %d: %w", i, err)
		}
		shape, err := v.Keep(mb, x.files)
		if err != nil {
			return fmt.Errorf("batch %d: %w", i, err)
		}
		shape.Index, shape.At = i, i
		x.shapes = append(x.shapes, shape)
		v.Observer.TellStep("sample superbatch of "+pass, i-x.first+1, x.end-x.first)
	}
	return nil
}

// drawSuper takes the mini-batches of a superbatch that nobody has to sample.
func (t *simulation) drawSuper(ctx context.Context, x *simSuperbatch, _ string) error {
	var rows superbatch.Memory
	for i := x.first; i < x.end; i++ {
		d, err := t.drawn.Draw(ctx, i)
		if err != nil {
			return err
		}
		s := d.Shape
		s.Index, s.At, s.Saved = i, i, s.SavedBytes()
		x.shapes, rows = append(x.shapes, &s), append(rows, d.Rows)
	}
	x.accesses = rows
	return nil
}

// playSuper begins the sampling of a superbatch and its inspection behind it, which needs to know
// what the one before it leaves.
func (t *simulation) playSuper(x, before *simSuperbatch) {
	v, m := t.Player, t.Player.Machine
	free := int64(0)
	if before != nil && len(before.there) > 0 {
		free = before.there[len(before.there)-1]
	}
	begin := m.Sim.Now()
	p, accesses := m.Model.Profile, int64(0)
	shapes := x.shapes[x.from-x.first:]
	var batch func()
	batch = func() {
		if len(shapes) == 0 {
			t.info.SampleSeconds += float64(m.Sim.Now()-begin) / 1e9
			v.Draw(report.TrackSuper, "sample superbatch", begin, m.Sim.Now())
			m.Sim.At(max(m.Sim.Now(), free), func() { t.inspect(x, accesses) })
			return
		}
		s := shapes[0]
		shapes = shapes[1:]
		accesses += s.HopEnd[len(s.HopEnd)-1]
		m.SampleWhole(m.SuperS, s, func() {
			bytes := float64(s.Saved)
			took := p.PCIe.CopyNS.NS() + int64(bytes/p.PCIe.CopyGBs.Value) +
				int64(bytes/p.CPU.GatherGBs.Value)
			m.Filed += took
			m.Sim.After(took, batch)
		})
	}
	batch()
}

// inspect plays the look ahead over so many accesses, and finds out when the changes of each
// mini-batch are found behind it.
func (t *simulation) inspect(x *simSuperbatch, accesses int64) {
	v, m := t.Player, t.Player.Machine
	cpu, begin := &m.Model.Profile.CPU, m.Sim.Now()
	looked := int64(float64(accesses) * (cpu.InspectScanNS.Value +
		cpu.InspectNS.Value/max(cpu.Cores.Value, 1)))
	found := begin + looked
	for _, s := range x.shapes[x.from-x.first:] {
		found += int64(float64(s.HopEnd[len(s.HopEnd)-1]) * cpu.ChangeNS.Value)
		x.there = append(x.there, found)
	}
	t.info.InspectSeconds += float64(looked) / 1e9
	t.info.ChangeSeconds += float64(found-begin-looked) / 1e9
	m.Inspected += found - begin
	v.Draw(report.TrackInspect, "look ahead", begin, begin+looked)
	v.Draw(report.TrackInspect, "find changes", begin+looked, found)
	m.Sim.After(looked, func() {})
}

// shape finds the places of the rows of a batch of a superbatch.
func (t *simulation) shape(x *simSuperbatch, i int) (*cost.Shape, error) {
	v, index := t.Player, i-x.first
	s := x.shapes[index]
	rows, err := x.accesses.Read(index, t.rows)
	if err != nil {
		return nil, err
	}
	if x.files != nil {
		t.rows = rows
	}
	slots := x.changes.Slots(index)
	err = v.Parts(s, func(from int64, part *cost.Part) error {
		t.misses = t.misses[:0]
		for k, slot := range slots[from : from+part.Count] {
			switch {
			case slot == superbatch.Miss:
				t.misses = append(t.misses, rows[from+int64(k)])
			case int64(slot) < t.tiers.GPURows:
				part.NGPU++
			default:
				part.NCPU++
			}
		}
		v.Miss(t.misses, part)
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
