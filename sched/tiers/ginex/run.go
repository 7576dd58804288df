// Package ginex samples a superbatch of mini-batches before the first of them trains, and then
// keeps the rows that are accessed next: mode ginex (Park et al., VLDB 2022).
package ginex

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"helios/cache"
	"helios/cache/superbatch"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
	"helios/sched/tiers/ginex/spec"
	"helios/sched/walk"
)

// Run is the system on an engine.
var Run = engine.System{New: New}

// Tiers that know the future, as those of Ginex (Park et al., VLDB 2022). A superbatch's
// mini-batches are sampled before the first of them trains and go to files; package superbatch
// finds the changes of a cache that keeps what is needed next; then the walk brings the
// mini-batches back one after the other, and their hits, reads and changes of the tiers are known
// already. Before the first one trains it only has to be known when each row is accessed next,
// which all cores find together; the changes themselves are found beside the walk, ahead of it. The
// changes of a mini-batch are made behind its gathers, on their stream, so the next one's gathers
// find them done.

// superbatchRun is a superbatch that has been sampled: mini-batches first to end-1 of a pass.
type superbatchRun struct {
	engine.KeptPass
	first, end int
	files      *samples.Files
	changes    *superbatch.Changes

	// The changes are found on a goroutine of their own.
	stop   context.CancelFunc
	played chan struct{} // closed when it has ended; nil: it has not begun
}

// close ends the search for changes, and gives the files' room back.
func (x *superbatchRun) close() error {
	if x.played != nil {
		x.stop()
		<-x.played
	}
	return x.files.Close()
}

// after returns what the tiers hold after the superbatch, once that is known.
func (x *superbatchRun) after(ctx context.Context) (*superbatch.State, error) {
	if err := x.changes.Wait(ctx, x.changes.Batches()-1); err != nil {
		return nil, err
	}
	return &x.changes.After, nil
}

// Tiers are a GPU and a CPU tier of a run whose mini-batches are sampled a superbatch at a
// time.
type Tiers struct {
	engine.Base
	tier   *cache.Planned     // nil until the tiers are placed
	static *superbatch.Static // the rows of plan.PolicyStatic; nil under plan.PolicyBelady

	sampler *prepare.Ahead // of superbatches; nil until the first
	stage   graph.Stage    // of the walk's mini-batches

	// sampled is the time for which earlier streams were busy; filed is the time, of no stream, of
	// writing mini-batches to files and reading them back.
	sampled time.Duration
	filed   atomic.Int64

	now   *superbatchRun
	after *superbatch.State // what the tiers hold; nil: unknown
	next  *comingSuperbatch
	tight bool  // there was no room for the superbatch of another pass
	lost  error // errors of drop that its caller could not return

	mu   sync.Mutex
	info spec.SuperbatchInfo
}

// comingSuperbatch is one that is sampled while another trains.
type comingSuperbatch struct {
	pass   *engine.Pass
	first  int
	cancel context.CancelFunc
	done   chan struct{}
	plan   *superbatchRun // valid once done is closed, as full; nil: it failed
	full   bool           // by lack of room
}

// New makes the tiers of an engine.
func New(e *engine.Engine) (engine.Tiers, error) {
	return &Tiers{Base: engine.Base{Engine: e}}, nil
}

// Place makes the tiers. They are empty: superbatches bring their rows in.
func (t *Tiers) Place(ctx context.Context) (err error) {
	e := t.Engine
	if err := e.Store.Open(ctx, e.Store.Layout); err != nil {
		return engine.Untiered(err)
	}
	b, err := t.choose(ctx)
	if err != nil {
		return engine.Untiered(err)
	}
	if b.GPURows+b.CPURows >= math.MaxInt32 {
		return engine.Untiered(errs.New(errs.Usage,
			"%v %s keeps below 2^31 rows, and the tiers have room for %d; lower %v or %v",
			errs.Key("policy"), e.Config.Policy, b.GPURows+b.CPURows, errs.Key("gpu-cache"),
			errs.Key("cpu-cache")))
	}
	e.Sizes = plan.TierSizes{GPURows: b.GPURows, CPURows: b.CPURows}
	if err := t.takeBack(); err != nil { // of what hotness was found by
		return err
	}
	// Lists may need more than whole rows of the budget take, or than rows that the GPU tier lacks.
	lists := int64(0)
	if lends(&e.Config) {
		lists = (e.ListBytes() + 7) &^ 7
	}
	if t.tier, err = cache.NewPlanned(e.Device, cache.PlannedConfig{RowBytes: e.RowBytes,
		SSDs: len(e.Store.SSDs), GPUSlots: b.GPURows, CPUSlots: b.CPURows,
		CPUBytes: lists}); err != nil {
		return err
	}
	for _, s := range e.Slots {
		for i := range s.Segments {
			s.Segments[i].Part = &cache.Places{}
		}
	}
	return nil
}

// Close frees the tiers and what superbatches take.
func (t *Tiers) Close() error {
	all := []error{t.lost, t.drop()}
	t.lost = nil
	for _, s := range t.Engine.Slots {
		for i := range s.Segments {
			if l, ok := s.Segments[i].Part.(*cache.Places); ok {
				all = append(all, l.Close())
			}
			s.Segments[i].Part = nil
		}
	}
	if t.sampler != nil {
		t.sampled += t.sampler.Busy()
		all = append(all, t.sampler.Close(context.Background()))
		t.sampler = nil
	}
	all = append(all, t.stage.Close())
	if t.tier != nil {
		all = append(all, t.tier.Close())
		t.tier = nil
	}
	return errors.Join(all...)
}

// drop releases all superbatches. The content of the tiers is known no more.
func (t *Tiers) drop() error {
	var all []error
	if n := t.next; n != nil {
		n.cancel()
		<-n.done
		if n.plan != nil {
			all = append(all, n.plan.close())
		}
		t.next = nil
	}
	if t.now != nil {
		t.now.Pass.Sampled = nil
		all = append(all, t.now.close())
		t.now = nil
	}
	t.after = nil
	return errors.Join(all...)
}

// Prepare has the superbatch that p.first is in ready, and ends the walk where it ends.
func (t *Tiers) Prepare(ctx context.Context, p *engine.Pass, end int) (int, error) {
	if p.First >= end { // a pass that an earlier run has finished
		return end, nil
	}
	now := t.now
	if now == nil || now.Pass != p || p.First < now.first || p.First >= now.end {
		var err error
		if now, err = t.following(ctx, p); err != nil {
			return end, err
		}
		t.now = now
		if err := t.fill(ctx, now); err != nil {
			return end, errors.Join(err, t.drop())
		}
	}
	p.Sampled = now
	if t.next == nil {
		t.ahead(ctx, p, now)
	}
	return min(now.end, end), nil
}

// following ends the superbatch that has trained, and returns the next: the one that was sampled
// meanwhile, or a new one.
func (t *Tiers) following(ctx context.Context, p *engine.Pass) (now *superbatchRun, err error) {
	coming := t.next
	t.next = nil
	if was := t.now; was != nil {
		t.now, was.Pass.Sampled = nil, nil
		if t.after = nil; was.Pass.First >= was.end {
			var after *superbatch.State
			if after, err = was.after(ctx); err == nil {
				state := *after // and no more of it
				t.after = &state
			}
		}
		err = errors.Join(err, was.close())
	}
	if coming != nil {
		fits := err == nil && coming.first == p.First && coming.pass.Draws(p)
		if !fits { // as of an epoch that patience has spared
			coming.cancel()
		}
		release := context.AfterFunc(ctx, coming.cancel)
		<-coming.done
		release()
		coming.cancel()
		now, t.tight = coming.plan, t.tight || coming.full // one that failed is tried again alone
		if now != nil && !fits {
			err = errors.Join(err, now.close())
			now = nil
		}
	}
	if now != nil {
		now.Pass = p
	}
	if now == nil && err == nil {
		known := func(context.Context) (*superbatch.State, error) { return t.after, nil }
		now, err = t.make(ctx, p, p.First, known, nil)
	}
	return now, err
}

// ahead begins to sample the superbatch after now, while now trains: the first one of the pass that
// comes next, or under plan.Config.SuperbatchOverlap one of the same pass. A pass that the room for
// one superbatch has cut into several leaves no room for another beside it, and reads of lists from
// storage belong to the pass that needs them.
func (t *Tiers) ahead(ctx context.Context, p *engine.Pass, now *superbatchRun) {
	first, c := now.end, &t.Engine.Config
	switch {
	case p.End != 0 && now.end >= p.End:
		return
	case now.end < p.Batches:
		if !c.SuperbatchOverlap {
			return
		}
	case p.Next == nil || t.tight || c.Topology == plan.TopologySSD ||
		now.first > 0 && c.Superbatch == 0 && !c.SuperbatchOverlap:
		return
	default:
		if first, p = 0, p.Next(); p == nil {
			return
		}
	}
	// The context of a pass may end before the next one begins.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	n := &comingSuperbatch{pass: p, first: first, cancel: cancel, done: make(chan struct{})}
	t.next = n
	go func() {
		defer close(n.done)
		var err error // is met again by who needs the superbatch
		n.plan, err = t.make(inner, p, first, now.after, now)
		n.full = errors.Is(err, samples.ErrFull)
	}()
}

// make samples the superbatch that begins with mini-batch first of a pass, and begins to find its
// changes of tiers that hold before. beside is the one that trains meanwhile; nil: none does.
func (t *Tiers) make(ctx context.Context, p *engine.Pass, first int, before func(
	context.Context) (*superbatch.State, error), beside *superbatchRun) (*superbatchRun, error) {
	e := t.Engine
	if err := t.openSampler(); err != nil {
		return nil, err
	}
	// While memory is lent nothing trains: what the tiers hold is known.
	var held *superbatch.State
	var err error
	lent := lends(&e.Config)
	if lent {
		if held, err = before(ctx); err == nil {
			held, err = t.lend(ctx, held)
		}
		if err != nil {
			return nil, err
		}
	}
	dir := folder(&e.Config, e.In.Dataset.Dir())
	room, err := t.roomIn(dir, beside)
	if err != nil {
		return nil, err
	}
	files, err := samples.Create(dir, e.Rows, room.disk)
	if err != nil {
		return nil, err
	}
	x := &superbatchRun{KeptPass: engine.KeptPass{Engine: e, Pass: p, From: files, Base: -first,
		Stage: &t.stage, Took: &t.filed}, files: files, first: first,
		end: min(first+longest(&e.Config, p.Order.Len()), p.Order.Len())}
	begin := time.Now()
	err = t.sampleAll(ctx, x, room, beside != nil)
	sampled := time.Now()
	e.Trace.Beside(report.TrackSuper, "sample superbatch", begin)
	if err == nil {
		err = t.takeBack()
	}
	if err == nil && !lent {
		held, err = before(ctx)
	}
	inspect := time.Now()
	if err == nil {
		err = t.inspect(ctx, x, held, beside != nil)
	}
	if err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			err = stopped
		}
		op, cancel := e.OperatorContext(ctx)
		defer cancel()
		return nil, errors.Join(err, x.close(), t.sampler.Wait(op))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.info.Superbatches++
	t.info.Batches = max(t.info.Batches, x.end-x.first)
	t.info.SampleSeconds += sampled.Sub(begin).Seconds()
	t.info.InspectSeconds += time.Since(inspect).Seconds()
	t.info.FileBytes = max(t.info.FileBytes, x.files.Bytes())
	e.Trace.Beside(report.TrackInspect, "look ahead", inspect)
	t.play(ctx, x)
	return x, nil
}

// openSampler opens the sampler of superbatches, where it is not open.
func (t *Tiers) openSampler() (err error) {
	if t.sampler == nil {
		t.sampler, err = t.Engine.NewAhead(
			t.Engine.Config.Operators(true).StreamOptions(plan.OpSuperbatch))
	}
	return err
}

// play finds the changes of a superbatch, on a goroutine of its own.
func (t *Tiers) play(ctx context.Context, x *superbatchRun) {
	inner, stop := context.WithCancel(context.WithoutCancel(ctx))
	x.stop, x.played = stop, make(chan struct{})
	begin := time.Now()
	go func() {
		defer close(x.played)
		defer stop()
		if x.changes.Play(inner) != nil {
			return // whoever waits for the changes is told
		}
		t.Engine.Trace.Beside(report.TrackInspect, "find changes", begin)
		s := x.changes.Stats
		t.mu.Lock()
		defer t.mu.Unlock()
		t.info.ChangeSeconds += time.Since(begin).Seconds()
		t.info.InspectBytes = max(t.info.InspectBytes, s.Bytes)
		t.info.Accesses += s.Accesses
		t.info.RowsLoaded += s.Loaded
	}()
}

// sampleAll samples a superbatch into its files. One without a given length ends where the room
// does; where alone it would have more of that, it fails.
func (t *Tiers) sampleAll(ctx context.Context, x *superbatchRun, room superbatchRoom,
	meanwhile bool) error {
	given, accesses := t.Engine.Config.Superbatch > 0, int64(0)
	var full error
	if meanwhile && !t.Engine.Config.SuperbatchOverlap {
		full = samples.ErrFull
	}
	for i := x.first; i < x.end; i++ {
		if err := prepare.Interrupted(ctx); err != nil {
			return err
		}
		rows, err := t.sampler.Draw(ctx, x.Pass.Epoch, x.Pass.Order.Index(i), x.Pass.Order.Seeds(i))
		if err != nil {
			return err
		}
		accesses += rows
		if need := inspectBytes(accesses, t.Engine.Rows); need > room.memory {
			if full != nil {
				return full
			}
			if given && need > room.memory*memoryShare {
				return errs.New(errs.Usage,
					"the first %d mini-batches of a superbatch have %d rows, and finding the cache's changes takes up to %s for them; %s are free for that: lower %v, or leave it out",
					i-x.first+1, accesses, units.FormatBytes(need),
					units.FormatBytes(room.memory*memoryShare), errs.Key("superbatch"))
			}
			if !given && i > x.first {
				x.end = i
				return nil
			}
		}
		took, err := t.sampler.Keep(ctx, x.files)
		t.filed.Add(int64(took))
		if err != nil {
			if errors.Is(err, samples.ErrFull) && !given && i > x.first {
				x.end = i
				return full
			}
			return fmt.Errorf("batch %d: %w", i, err)
		}
		if !meanwhile {
			t.Engine.Observer.TellStep("sample superbatch", i-x.first+1, x.end-x.first)
		}
	}
	return nil
}

// inspect finds when the rows of a superbatch are accessed, over tiers that hold before. Where
// another one trains meanwhile, half of the cores are left to it.
func (t *Tiers) inspect(ctx context.Context, x *superbatchRun, before *superbatch.State,
	meanwhile bool) (err error) {
	c, workers := t.tier.Config(), hostcpu.Count()
	if meanwhile {
		workers = max(workers/2, 1)
	}
	if t.static != nil {
		x.changes, err = t.static.Inspect(ctx, x.files, before, workers)
		return err
	}
	x.changes, err = superbatch.Begin(ctx, x.files, superbatch.Config{
		Slots: c.GPUSlots + c.CPUSlots, GPU: c.GPUSlots, Before: before, Keep: true,
		Nodes: t.Engine.Rows, Workers: workers,
	})
	return err
}

// slotBytes is the size of a slot's entry in planning: its row and its place in the order of reuse,
// for the superbatch and for those before and after it.
const slotBytes = 3 * (8 + 4 + 4)

// memoryShare divides the memory that is free: a superbatch of no given length plans in one part.
const memoryShare = 8

// superbatchRoom holds what superbatches may take.
type superbatchRoom struct {
	disk, memory int64 // of one
}

// inspectBytes is the most memory that planning takes for so many accesses of a graph's rows: for
// an access the next one, its slot, its move and a candidate's place; for a row its entry in a
// table that grows.
func inspectBytes(accesses, rows int64) int64 {
	return accesses*(8+4+8+4) + min(accesses, rows)*24*3
}

// roomIn returns what a superbatch may take beside another (nil: alone): of the disk the budget, or
// a quarter of what is free, less what the other has; of the memory an eighth of what is free.
func (t *Tiers) roomIn(dir string, beside *superbatchRun) (r superbatchRoom, err error) {
	copies, held := int64(1), int64(0) // superbatches there are at one time; bytes of the other
	if t.Engine.Config.SuperbatchOverlap {
		copies = 2
	} else if beside != nil {
		held = beside.files.Bytes()
	}
	all := t.Engine.Config.SuperbatchDisk
	if all == 0 {
		var s unix.Statfs_t
		if err := unix.Statfs(dir, &s); err != nil {
			return r, errs.New(errs.Usage,
				"the folder %s for the samples of a superbatch: %w; give another with %v", dir, err,
				errs.Key("superbatch-dir"))
		}
		all = (int64(s.Bavail)*int64(s.Bsize) + held) / 4
	}
	r.disk = max((all-held)/copies, 1)
	avail, err := hostmem.AvailableBytes()
	c := t.tier.Config()
	free := avail - slotBytes*(c.GPUSlots+c.CPUSlots)
	r.memory = max(free, 0) / memoryShare / copies
	return r, err
}

// fill reads the rows of a static cache that the tiers lack.
func (t *Tiers) fill(ctx context.Context, x *superbatchRun) error {
	if len(x.changes.Fill) == 0 {
		return nil
	}
	begin := time.Now()
	rows, slots := firstRows(x.changes, t.tier.Config().GPUSlots)
	var bytes int64
	for i, to := range []cache.Tier{cache.GPU, cache.CPU} {
		name := "fill gpu cache"
		if to == cache.CPU {
			name = "fill cpu cache"
		}
		took, err := t.Engine.Store.FillSlots(ctx, rows[i], slots[i], t.tier.Buffer(to), name)
		s := &x.Pass.Stats
		s.BytesSSD += took.Bytes
		bytes += took.Bytes
		s.Commands += took.Commands
		s.Retries += took.Retries
		s.Timeouts += took.Timeouts
		if len(rows[i]) > 0 {
			x.Pass.Clock.Read(time.Now().Add(-took.Submit-took.Complete), took)
		}
		if err != nil {
			return err
		}
	}
	t.Engine.Trace.Run("fill tiers", begin)
	t.mu.Lock()
	t.info.FillSeconds += time.Since(begin).Seconds()
	t.info.FillBytes += bytes
	t.mu.Unlock()
	return nil
}

// firstRows takes the rows that a static cache lacks from its changes, and their slots.
func firstRows(c *superbatch.Changes, gpuSlots int64) (rows [2][]int64, slots [2][]int32) {
	for _, m := range c.Fill {
		tier, slot := 0, m.Slot
		if int64(slot) >= gpuSlots {
			tier, slot = 1, slot-int32(gpuSlots)
		}
		rows[tier] = append(rows[tier], c.First[m.At])
		slots[tier] = append(slots[tier], slot)
	}
	c.Fill, c.First = nil, nil
	return rows, slots
}

// stages are the stages of a walk over planned tiers. Behind the gathers of a mini-batch its
// changes of the tiers are made.
type stages struct {
	*Tiers
	engine.SlotStages
}

// Begin implements engine.Tiers.
func (t *Tiers) Begin(w *engine.Walk) engine.Stages {
	return &stages{t, engine.SlotStages{Walk: w}}
}

// Lookup implements engine.Stages: it takes the rows' slots from the changes, once those are found.
func (a *stages) Lookup(ctx context.Context, w *engine.Work) error {
	if w.Count == 0 {
		return nil
	}
	e, p, s := a.Engine, a.Walk.Pass, w.Slot
	x := a.now
	index := s.Index - x.first
	if err := x.changes.Wait(ctx, index); err != nil {
		if ctx.Err() != nil {
			return walk.ErrStopped
		}
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	g := &s.Segments[s.Used]
	s.Used++
	g.Begin(w)
	begin, from := e.Trace.Now(), time.Now()
	to := w.First + w.Count
	l, ok := g.Part.(*cache.Places)
	if !ok { // of a slot that is younger than the tiers
		l = &cache.Places{}
		g.Part = l
	}
	slots := x.changes.Slots(index)
	section := hostcpu.Begin()
	err := a.tier.Place(l, s.Frontier[w.First:to], slots[w.First:to], w.First)
	section.End(hostcpu.Lookups)
	if err != nil {
		return fmt.Errorf("batch %d: %w", s.Index, err)
	}
	p.Clock.LookedUp(time.Since(from))
	g.RowsGPU, g.RowsCPU, g.RowsSSD, g.Moved = l.NGPU, l.NCPU, l.NMiss, l.NGPU+l.NCPU
	e.Trace.Op(report.TrackLookup, plan.OperatorName("L", w.Hop), begin, p, s.Index, w.Count)
	if g.RowsSSD > 0 {
		g.Ask(g.RowsSSD, &gpuio.ReadSet{
			Rows: l.MissRow, Pos: l.MissPos, SSDOffset: l.SSDOffset,
			Dst: s.Features, DstStride: e.RowBytes, DstBytes: to * e.RowBytes,
		})
	}
	return nil
}

// Gather implements engine.Stages.
func (a *stages) Gather(_ context.Context, w *engine.Work) error {
	if w.Segment == nil {
		return nil
	}
	return a.tier.Gather(a.Engine.GatherStream, w.Segment.Part.(*cache.Places),
		w.Slot.Features.Ptr(), a.Engine.RowBytes)
}

// Change implements engine.Stages: it makes the changes of the tiers.
func (a *stages) Change(s *engine.Slot) error {
	e := a.Engine
	index := s.Index - a.now.first
	moves, demotions := a.now.changes.Moves(index), a.now.changes.Demotions(index)
	if len(moves)+len(demotions) == 0 {
		return nil
	}
	g := &s.Segments[0]
	places := g.Part.(*cache.Places)
	if err := a.tier.Prepare(places, moves, demotions); err != nil {
		return err
	}
	g.Inserted = int64(len(moves))
	return a.tier.Apply(e.GatherStream, places, s.Features.Ptr(), e.RowBytes,
		int64(len(s.Frontier)))
}

// Forget is called after a walk that failed: it is unknown which changes were made.
func (t *Tiers) Forget() { t.lost = errors.Join(t.lost, t.drop()) }

// Credit implements engine.Tiers.
func (t *Tiers) Credit(x cuda.Growable) error {
	s, err := t.Engine.NewSlot()
	if err == nil {
		s.Features = x
	}
	return err
}

// Places is false: the tiers take rows in from feature tensors, which nobody else may write to.
func (t *Tiers) Places() bool { return false }

// GPUBytes implements engine.Tiers.
func (t *Tiers) GPUBytes() int64 { return t.Engine.Sizes.GPURows * t.Engine.RowBytes }

// CPUBytes implements engine.Tiers.
func (t *Tiers) CPUBytes() int64 { return t.Engine.Sizes.CPURows * t.Engine.RowBytes }

// BatchBytes implements engine.Tiers.
func (t *Tiers) BatchBytes(int64) (bytes, samples int64) {
	return 0, int64(t.Engine.Plan.Credits) + 1
}

// Describe implements engine.Tiers.
func (t *Tiers) Describe(r *report.RunInfo) {
	if x := t.now; x != nil && x.Pass.First >= x.end {
		<-x.played // it adds its last figures
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	info := t.info
	r.Superbatch = &info
}

// Tunes implements Tiers: sampling does not run between two steps, and the CPU looks rows up.
func (t *Tiers) Tunes(op string) bool { return op != plan.OpSample && op != plan.OpLookup }

// Beside implements engine.Tiers.
func (t *Tiers) Beside() report.StageSeconds {
	sampled := t.sampled + time.Duration(t.filed.Load())
	if t.sampler != nil {
		sampled += t.sampler.Busy()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return report.StageSeconds{Sample: sampled.Seconds(),
		Inspect:  t.info.InspectSeconds + t.info.ChangeSeconds,
		Complete: t.info.FillSeconds, Topology: t.info.ListSeconds}
}
