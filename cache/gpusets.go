package cache

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"unsafe"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// Phases of sets_sort and sets_lists.
const (
	setsCount  = 1  // each block: find its entries, count them by bin or list
	setsPrefix = 2  // one block: from counts to places
	setsNumber = 4  // each block: number the lines to be read, and count them by SSD
	setsDeal   = 16 // one block: from counts by SSD to places
	setsWrite  = 8  // each block: write its entries to their places
)

const (
	sortBits = 8 // of a set's number that a pass of sets_sort orders by
	sortBins = 1 << sortBits
	setStats = 5 // sums that sets_play keeps: policy.Stats
	setLists = 5 // of a ticket, that sets_lists counts
)

// setsParams are the parameters of the kernels "sets_…", which keep a directory in sets in a GPU's
// memory; cuda/kernels/sets.cu describes each.
//
// Large: one block for all of a lookup's launches, which hand arrays on from one to the next.
type setsParams struct {
	Words, Until  cuda.DevicePtr // uint32[Sets][Stride], uint32[Sets][policy.Ways]; 0: no window
	Window, Table cuda.DevicePtr // uint64[WindowSlots], uint64[TableSlots]
	CPUIndex      cuda.DevicePtr // line[]; 0: no CPU tier
	Nodes         cuda.DevicePtr // int64, indexed by position
	// By position, uint32[Count].
	Line, Place, Of, Answer, Number  cuda.DevicePtr
	KeysIn, ValsIn, KeysOut, ValsOut cuda.DevicePtr // uint32[Count]: set and position
	Counts                           cuda.DevicePtr // uint32[Grid][sortBins]
	Stats                            cuda.DevicePtr // uint64[setStats]
	// int64[setLists + setStats + sortBins], the last of them by SSD: where its lines begin.
	Totals             cuda.DevicePtr
	GPUPos, GPURow     cuda.DevicePtr // uint32[Count], as the others
	CPUPos, CPURow     cuda.DevicePtr
	MissPos, MissRow   cuda.DevicePtr
	FillLine, FillSlot cuda.DevicePtr
	Lines              cuda.DevicePtr // int64[Count]
	SSDCounts          cuda.DevicePtr // uint32[Grid][sortBins]
	// Lines and their numbers, by SSD: int64[Count], uint32[Count].
	Dealt, DealtPos cuda.DevicePtr
	// sets_merge: the plan's, and by SSD how far a ticket's lines move there, int64[SSDs].
	PlanRows, PlanPos, Moves cuda.DevicePtr
	Rows, First, Count       int64
	Sets, Slots              int64
	WindowSlots, TableSlots  int64 // powers of two
	SSDs, PerLine            uint32
	Key                      [2]uint32
	Batch, Rule, Stride      uint32
	Grid, Phases, Shift      uint32
	SSDBits, _               uint32
}

// CUDA kernels get the same bytes.
const (
	_ = -(unsafe.Sizeof(setsParams{}) ^ 368)
	_ = -(unsafe.Offsetof(setsParams{}.Rows) ^ 264)
	_ = -(unsafe.Offsetof(setsParams{}.Phases) ^ 352)
)

// gpuSets is a policy.Sets in a GPU's memory, played by kernels: to the bit what policy.Sets is.
// Lookups and announcements run on their caller's stream, what ends announcements and what failed
// reads give back on one of its own, and events keep them in the order of the calls. The CPU waits
// for a lookup's counts, without which it cannot ask for the reads, and for nothing else but memory
// that grows.
type gpuSets struct {
	dev    cuda.Device
	kernel map[string]cuda.Kernel
	params setsParams // what all launches have in common
	index  *Index     // of the CPU tier; nil without one
	st     cuda.Stream
	plans  cuda.Stream // of merged plans, which others than lookups' goroutine make
	on     cuda.Stream // has the latest work on the directory; nil: that is known to be done
	turn   cuda.Event  // behind it, when another stream follows
	failed error       // a launch that may have changed half of the directory

	words, until         cuda.Buffer
	window, spare        cuda.Buffer // each announced line's last batch; a second table
	batch, lastAnnounced uint32      // numbers of the current and of the last announced batch
	announced            []announcement
	noted                int64 // entries that window has at most

	capacity int64       // positions that there is room for
	scratch  cuda.Buffer // uint32[9][capacity]
	table    cuda.Buffer
	counts   cuda.Buffer // and those by SSD, and Stats behind them
	totals   cuda.Buffer // pinned
	stats    policy.Stats
}

// announcement is a batch that will be admitted.
type announcement struct {
	batch uint32
	rows  int64
}

// setsTimeout bounds the waits before memory is freed and for what a failed batch gives back.
const setsTimeout = moveTimeout

const setsScratch = 9 // arrays

const (
	prefixThreads = 1024
	playedEach    = 2 * threads / 32 // accesses that make a block of sets_play: two a warp
)

func newGPUSets(dev cuda.Device, c DynamicConfig) (s *gpuSets, err error) {
	if c.Lines.SSDs > sortBins {
		return nil, errs.New(errs.Capability,
			"%d SSDs: a directory in a GPU's memory deals lines out to at most %d; use {directory} %s",
			c.Lines.SSDs, sortBins, policy.InQueues)
	}
	layout, err := policy.LayOutSets(policy.Config{Policy: c.Policy, Slots: c.Slots,
		Lines: c.Lines.Count(c.Rows), Seed: c.Seed})
	if err != nil {
		return nil, err
	}
	s = &gpuSets{dev: dev, kernel: map[string]cuda.Kernel{}, batch: 1, lastAnnounced: 1}
	defer func() {
		if err != nil {
			_ = s.close() // the first error says more
		}
	}()
	for _, name := range []string{"sets_clear", "sets_lines", "sets_sort", "sets_play",
		"sets_lists", "sets_merge", "sets_announce", "sets_window", "sets_drop"} {
		if s.kernel[name], err = dev.Kernel(name); err != nil {
			return s, err
		}
	}
	if len(c.CPU) > 0 {
		if s.index, err = BuildIndex(dev, c.Rows, Placement{CPU: c.CPU}); err != nil {
			return s, err
		}
		s.params.CPUIndex = s.index.buf.Ptr()
	}
	if s.st, err = dev.NewStream(cuda.StreamOptions{Name: "cache directory"}); err != nil {
		return s, err
	}
	if s.plans, err = dev.NewStream(cuda.StreamOptions{Name: "cache read plans"}); err != nil {
		return s, err
	}
	if s.turn, err = dev.NewEvent(); err != nil {
		return s, err
	}
	words := layout.Sets * int64(layout.Stride)
	if s.words, err = dev.Alloc(cuda.MemDevice, words*4, "cache directory"); err != nil {
		return s, err
	}
	counts := maxGrid(dev) * sortBins * 4
	if s.counts, err = dev.Alloc(cuda.MemDevice, 2*counts+setStats*8, "cache lookup"); err != nil {
		return s, err
	}
	if s.totals, err = dev.Alloc(cuda.MemPinned, (setLists+setStats+sortBins)*8,
		"cache lookup"); err != nil {
		return s, err
	}
	p := &s.params
	p.Words, p.Counts, p.Totals = s.words.Ptr(), s.counts.Ptr(), s.totals.Ptr()
	p.SSDCounts = p.Counts + cuda.DevicePtr(counts)
	p.Stats = p.SSDCounts + cuda.DevicePtr(counts)
	p.Rows, p.Sets, p.Slots = c.Rows, layout.Sets, c.Slots
	p.SSDs, p.PerLine = uint32(c.Lines.SSDs), uint32(c.Lines.RowsPerLine)
	p.SSDBits = uint32(bits.Len64(uint64(c.Lines.SSDs - 1)))
	p.Key, p.Rule, p.Stride = layout.Key, layout.Rule, uint32(layout.Stride)
	if words > 0 {
		s.on = s.st
		if err = s.launch(s.st, "sets_clear", s.grid(words), s.params); err != nil {
			return s, err
		}
	}
	return s, s.settle()
}

// grid is as many blocks as n items are worth.
func (s *gpuSets) grid(n int64) int {
	return int(min(max(n/rowsPerBlock(s.dev), 1), maxGrid(s.dev)))
}

// fine is a grid of more blocks, of so few items that none waits for memory again and again.
func (s *gpuSets) fine(n, each int64) int {
	each = grain(s.dev, each)
	return int(min((n+each-1)/each, maxGrid(s.dev)))
}

func (s *gpuSets) launch(st cuda.Stream, name string, blocks int, p setsParams) error {
	c := cuda.LaunchConfig{Blocks: blocks, Threads: threads}
	if p.Phases == setsPrefix || p.Phases == setsDeal { // its one block waits for less
		c.Threads = prefixThreads
	}
	return cuda.Launch(st, s.kernel[name], c, p)
}

// follow has st's next work come after all work on the directory so far.
func (s *gpuSets) follow(st cuda.Stream) error {
	if s.on != nil && s.on != st {
		if err := s.on.Record(s.turn); err != nil {
			return err
		}
		if err := st.Wait(s.turn); err != nil {
			return err
		}
	}
	s.on = st
	return nil
}

// settle waits until all work on the directory is done.
func (s *gpuSets) settle() error {
	if s.on == nil {
		return nil
	}
	err := settled(s.on)
	if err == nil {
		s.on = nil
	}
	return err
}

func settled(st cuda.Stream) error {
	ctx, cancel := context.WithTimeout(context.Background(), setsTimeout)
	defer cancel()
	return st.Synchronize(ctx)
}

func (s *gpuSets) close() error {
	_ = s.settle() // an error is that of a caller's stream, who hears of it there
	var all []error
	for _, st := range []cuda.Stream{s.st, s.plans} {
		if st != nil {
			all = append(all, st.Close())
		}
	}
	if s.index != nil {
		all = append(all, s.index.Close())
	}
	if s.turn != nil {
		all = append(all, s.turn.Close())
	}
	for _, b := range []cuda.Buffer{s.words, s.until, s.window, s.spare, s.scratch, s.table,
		s.counts, s.totals} {
		if b != nil {
			all = append(all, b.Free())
		}
	}
	return errors.Join(all...)
}

// bytes is the directory's memory but for what a lookup works in.
func (s *gpuSets) bytes() (n int64) {
	for _, b := range []cuda.Buffer{s.words, s.until, s.window, s.spare} {
		if b != nil {
			n += b.Size()
		}
	}
	return n
}

// grow makes a buffer of at least that size, whose content is lost, in place of a smaller one.
func (s *gpuSets) grow(b *cuda.Buffer, kind cuda.MemKind, size int64, purpose string) error {
	if *b != nil && (*b).Size() >= size {
		return nil
	}
	if *b != nil {
		old := *b
		*b = nil
		if err := old.Free(); err != nil {
			return err
		}
	}
	fresh, err := s.dev.Alloc(kind, size, purpose)
	if err != nil {
		return err
	}
	*b = fresh
	return nil
}

// announce takes the rows (device memory) of a coming batch, behind the work of st.
func (s *gpuSets) announce(st cuda.Stream, nodes cuda.DevicePtr, n int64) error {
	if s.params.Slots == 0 {
		return nil
	}
	if err := s.follow(st); err != nil {
		return err
	}
	if s.until == nil {
		var err error
		if s.until, err = s.dev.Alloc(cuda.MemDevice, s.params.Sets*policy.Ways*4,
			"cache directory"); err != nil {
			return err
		}
		s.params.Until = s.until.Ptr()
	}
	s.lastAnnounced = max(s.lastAnnounced, s.batch) + 1
	if err := s.makeRoom(st, n); err != nil {
		return err
	}
	s.announced = append(s.announced, announcement{s.lastAnnounced, n})
	s.noted += n
	if n == 0 {
		return nil
	}
	p := s.params
	p.Nodes, p.Count, p.Batch = nodes, n, s.lastAnnounced
	return s.launch(st, "sets_announce", s.grid(n), p)
}

// makeRoom makes room in the window for n more lines: at most half of it is used.
func (s *gpuSets) makeRoom(st cuda.Stream, n int64) error {
	if (s.noted+n)*2 <= s.params.WindowSlots {
		return nil
	}
	live, kept := int64(0), s.announced[:0]
	for _, a := range s.announced {
		if a.batch >= s.batch {
			live += a.rows
			kept = append(kept, a)
		}
	}
	s.announced = kept
	slots := windowSlots(live + n)
	if s.spare != nil && s.spare.Size() < slots*8 { // the table may be read yet
		if err := settled(st); err != nil {
			return err
		}
	}
	if err := s.grow(&s.spare, cuda.MemDevice, slots*8, "cache directory"); err != nil {
		return err
	}
	slots = s.spare.Size() / 8
	if err := st.Fill(s.spare.Ptr(), 0, slots*8); err != nil {
		return err
	}
	p := s.params
	p.Window, p.WindowSlots, p.Batch = s.spare.Ptr(), slots, s.batch
	if s.window != nil && live > 0 {
		p.Table, p.TableSlots = s.window.Ptr(), s.params.WindowSlots
		if err := s.launch(st, "sets_window", s.grid(p.TableSlots), p); err != nil {
			return err
		}
	}
	s.window, s.spare, s.noted = s.spare, s.window, live
	s.params.Window, s.params.WindowSlots = p.Window, slots
	return nil
}

// forget ends all announcements. The next lookup returns errors.
func (s *gpuSets) forget() {
	s.lastAnnounced, s.announced, s.noted = s.batch, s.announced[:0], 0
	if s.until == nil {
		return
	}
	err := s.follow(s.st)
	if err == nil {
		err = s.st.Fill(s.until.Ptr(), 0, s.until.Size())
	}
	// None: nothing was announced, or there was no memory for it.
	if err == nil && s.window != nil {
		err = s.st.Fill(s.window.Ptr(), 0, s.window.Size())
	}
	if err != nil {
		s.failed = fmt.Errorf("announcements did not end: %w", err)
	}
}

func (s *gpuSets) reserve(count int64) error {
	if count <= s.capacity {
		return nil
	}
	s.capacity = 0
	count = max(count+count/4, 2048)
	if err := s.grow(&s.scratch, cuda.MemDevice, count*4*setsScratch, "cache lookup"); err != nil {
		return err
	}
	if err := s.grow(&s.table, cuda.MemDevice, GPULookup{Rows: count}.TableBytes(),
		"cache lookup"); err != nil {
		return err
	}
	s.capacity = count
	return nil
}

// access looks positions first..first+count-1 of nodes up and fills t's lists. It waits for st no
// longer than ctx.
func (s *gpuSets) access(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64, t *Ticket) error {
	if s.failed != nil {
		return s.failed
	}
	if count == 0 {
		t.dstRows = first
		return nil
	}
	if count > math.MaxInt32 {
		return fmt.Errorf("%d positions: want at most %d", count, math.MaxInt32)
	}
	if err := s.reserve(count); err != nil {
		return err
	}
	err := s.follow(st)
	if err == nil {
		err = s.play(st, nodes, first, count, t)
	}
	if err == nil {
		err = st.Synchronize(ctx)
	}
	if err != nil {
		s.failed = fmt.Errorf("the directory on the GPU is of no use after: %w", err)
		return err
	}
	s.on = nil
	n := hostmem.View[int64](s.totals.Bytes())
	t.NGPU, t.NCPU, t.NMiss, t.NLines, t.fills = n[0], n[1], n[2], n[3], n[4]
	ssds := int64(s.params.SSDs)
	t.offsets = append(append(t.offsets[:0], n[setLists+setStats:][:ssds]...), t.NLines)
	n = n[setLists:]
	if s.params.Slots == 0 {
		n[4] = n[0]
	}
	s.stats.Accesses += n[0]
	s.stats.Hits += n[1]
	s.stats.Inserted += n[2]
	s.stats.Evicted += n[3]
	s.stats.Bypassed += n[4]
	t.dstRows = first + count
	return nil
}

// play enqueues a lookup.
func (s *gpuSets) play(st cuda.Stream, nodes cuda.DevicePtr, first, count int64, t *Ticket) error {
	p := s.params
	array := func(i int64) cuda.DevicePtr {
		return s.scratch.Ptr() + cuda.DevicePtr(i*s.capacity*4)
	}
	p.Nodes, p.First, p.Count, p.Batch = nodes, first, count, s.batch
	p.Line, p.Place, p.Of, p.Answer, p.Number = array(0), array(1), array(2), array(3), array(4)
	keys, vals := [2]cuda.DevicePtr{array(5), array(6)}, [2]cuda.DevicePtr{array(7), array(8)}
	p.GPUPos, p.GPURow, p.CPUPos, p.CPURow = t.list(0), t.list(1), t.list(2), t.list(3)
	p.MissPos, p.MissRow, p.FillLine, p.FillSlot = t.list(4), t.list(5), t.list(6), t.list(7)
	p.Lines, p.Dealt, p.DealtPos = t.read.Ptr(), t.dealt(), t.list(8)
	p.Table, p.TableSlots = s.table.Ptr(), int64(1)<<bits.Len64(uint64(2*count-1))
	grid := s.grid(count)
	p.Grid = uint32(grid)
	if err := st.Fill(p.Table, 0xff, p.TableSlots*8); err != nil {
		return err
	}
	if err := s.launch(st, "sets_lines", s.fine(count, threads), p); err != nil {
		return err
	}
	width := uint32(bits.Len64(uint64(max(s.params.Sets-1, 0))))
	for i := 0; p.Shift == 0 && i == 0 || p.Shift < width; i++ {
		p.KeysOut, p.ValsOut = keys[i%2], vals[i%2]
		if err := s.phases(st, "sets_sort", p, setsCount, setsPrefix, setsWrite); err != nil {
			return err
		}
		p.KeysIn, p.ValsIn = p.KeysOut, p.ValsOut
		p.Shift += sortBits
	}
	if p.Slots == 0 {
		if err := st.Fill(p.Answer, 0xff, count*4); err != nil {
			return err
		}
	} else {
		if err := s.launch(st, "sets_play", s.fine(count, playedEach), p); err != nil {
			return err
		}
	}
	return s.phases(st, "sets_lists", p, setsCount, setsPrefix, setsNumber, setsDeal,
		setsWrite)
}

// phases launches a kernel for each of its phases, or once where one block does all.
func (s *gpuSets) phases(st cuda.Stream, name string, p setsParams, phases ...uint32) error {
	if p.Grid == 1 {
		all := uint32(0)
		for _, phase := range phases {
			all |= phase
		}
		phases = []uint32{all}
	}
	for _, phase := range phases {
		p.Phases = phase
		blocks := int(p.Grid)
		if phase == setsPrefix || phase == setsDeal {
			blocks = 1
		}
		if err := s.launch(st, name, blocks, p); err != nil {
			return err
		}
	}
	return nil
}

// merge writes the reads of tickets to p's places, in order; p.Ready happens when they are there.
func (s *gpuSets) merge(p *ReadPlan, tickets []*Ticket) error {
	ssds := int64(s.params.SSDs)
	if p.merged == nil {
		var err error
		if p.merged, err = s.dev.NewEvent(); err != nil {
			return err
		}
	}
	if err := s.grow(&p.moves, cuda.MemPinned, int64(len(tickets))*ssds*8,
		"cache lookup"); err != nil {
		return err
	}
	moves := hostmem.View[int64](p.moves.Bytes())
	next := slices.Clone(p.SSDOffset[:ssds])
	for i, t := range tickets {
		for ssd := range ssds {
			moves[int64(i)*ssds+ssd] = next[ssd] - t.offsets[ssd]
			next[ssd] += t.offsets[ssd+1] - t.offsets[ssd]
		}
		if t.NLines == 0 {
			continue
		}
		k := s.params
		k.Dealt, k.DealtPos, k.Count, k.First = t.dealt(), t.list(8), t.NLines, t.base
		k.PlanRows, k.PlanPos = p.Rows, p.Pos
		k.Moves = p.moves.Ptr() + cuda.DevicePtr(int64(i)*ssds*8)
		if err := s.launch(s.plans, "sets_merge", s.grid(t.NLines), k); err != nil {
			return err
		}
	}
	p.Ready = p.merged
	return s.plans.Record(p.merged)
}

// drop empties the slots that t was promised and whose filling failed.
func (s *gpuSets) drop(t *Ticket) error {
	if t.fills == 0 {
		return nil
	}
	if err := s.follow(s.st); err != nil {
		return err
	}
	p := s.params
	p.Count, p.FillLine, p.FillSlot, p.Lines = t.fills, t.list(6), t.list(7), t.read.Ptr()
	return s.launch(s.st, "sets_drop", s.grid(t.fills), p)
}
