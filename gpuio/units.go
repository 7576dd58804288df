package gpuio

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/internal/errs"
)

// Units hold what one command reads; setState names which kinds there are. Here is what the host
// does with them: it chooses a set's form, keeps the memory that the form needs, and names the rows
// of a unit that failed.

// partAlign is the alignment of a row's parts: no smaller page is in use, and NVMe's pages are
// powers of two from there on.
const partAlign = 4096

// Limits of coalescing that nobody has asked for: as much as one command moves well, and staging
// memory of each SSD.
const (
	autoCoalesceBytes = 128 << 10
	autoStagingBytes  = 32 << 20
)

// unitRule describes how the rows of a layout become commands.
type unitRule struct {
	parts      uint32 // commands of a row
	partBlocks uint32 // LBAs of each but the last; 0: a command reads a row
	window     uint32 // LBAs: no coalesced command crosses a multiple; 0: rows never share one
	reach      uint32 // LBAs from one row of a coalesced command to the next, at most
}

// chooseUnits settles the rule for commands of at most limit bytes. share: rows may share commands,
// of up to coalesceBytes (0: what depth of them leave reasonable), by SSDs of that speed.
func chooseUnits(l Layout, limit int, share bool, coalesceBytes, depth int,
	speed Speed) (unitRule, error) {
	lba, row := int(l.LBABytes), l.ReadBytes()
	if row > limit {
		align := max(lba, partAlign)
		part := limit / align * align
		if part == 0 {
			return unitRule{}, errs.New(errs.Capability,
				"a command moves at most %d bytes here, and a row is read in parts of %d bytes or a multiple: use the cpu stack",
				limit, align)
		}
		return unitRule{parts: uint32((row + part - 1) / part), partBlocks: uint32(part / lba)}, nil
	}
	u := unitRule{parts: 1}
	if !share || coalesceBytes < 0 {
		return u, nil
	}
	bytes := min(coalesceBytes, limit)
	if coalesceBytes == 0 {
		bytes = min(autoCoalesceBytes, limit)
		for bytes > lba && bytes*depth > autoStagingBytes {
			bytes /= 2
		}
	}
	u.window = uint32(max(bytes/row, 1) * int(l.LBAsPerRow))
	u.reach = uint32(max(int(l.LBAsPerRow), speed.reachBytes(row)/lba))
	return u, nil
}

// pays reports whether a set's rows are to share commands, where coalesceBytes is the option of
// that name.
func (u unitRule) pays(l Layout, offsets []int64, coalesceBytes int) bool {
	if u.window == 0 || coalesceBytes > 0 {
		return u.window != 0
	}
	n := float64(offsets[l.SSDs] - offsets[0])
	return expectedCommands(l, offsets, u.window, u.reach) <= (1-coalesceSaves)*n
}

// listLimit returns what one page of PRP list describes at any offset.
func listLimit(page int) int { return page / 8 * page }

// commandLimit returns how many bytes one command of any of the SSDs may move: what the controllers
// allow, what one page of PRP list describes, and what NLB can say.
func commandLimit(ssds []*SSD, lbaBytes int) int {
	limit := (1 << 16) * lbaBytes
	for _, d := range ssds {
		limit = min(limit, listLimit(d.Ctrl.PageBytes()))
		if m := d.Ctrl.MaxTransferBytes(); m > 0 {
			limit = min(limit, m)
		}
	}
	return limit
}

// setScratch is a slot's memory for a form that needs some. It grows and is kept.
type setScratch struct {
	order  cuda.Buffer // uint32 Order[n] and Runs[n+SSDs]
	marks  cuda.Buffer // uint32 Marks[n], which the host reaches
	crcs   cuda.Buffer // uint32[n], of the rows that have landed
	rows   int64       // that order has room for
	marked int64       // that marks has room for
	landed int64       // that crcs has room for
}

// coalesceScratch holds what all sets' coalesce kernels use in turn; they run on one stream.
type coalesceScratch struct {
	keysA, keysB, idx cuda.Buffer
	rows              int64
}

// grown is the room to make for n entries.
func grown(n int64) int64 {
	c := int64(1024)
	for c < n {
		c *= 2
	}
	return c
}

// replace puts a larger buffer into the place of b. The old one stays until Close: kernels may use
// it, and freeing waits for them on some devices. Since sizes double, all old ones together are
// smaller than the new one.
func (e *async) replace(b *cuda.Buffer, bytes int64, purpose string, reach bool) error {
	var fresh cuda.Buffer
	var err error
	if reach {
		fresh, err = e.alloc(bytes, purpose)
	} else {
		fresh, err = e.dev.Alloc(cuda.MemDevice, bytes, purpose)
	}
	if err != nil {
		return err
	}
	if *b != nil {
		e.retired = append(e.retired, *b)
	}
	*b = fresh
	return nil
}

// shapeSet gives a set its form: units, shares and the memory of its form. Needs e.mu.
func (e *async) shapeSet(slot uint32, rs *ReadSet, set *setState) (coalesced bool, err error) {
	nssd := len(e.ssds)
	total := rs.SSDOffset[nssd]
	sc := &e.scratch[slot]
	set.Parts, set.PartBlocks = e.parts, e.partBlocks
	switch {
	case e.partBlocks != 0:
		if total > math.MaxUint32/int64(e.parts) {
			return false, errs.New(errs.Usage,
				"read set of %d rows in %d commands each: at most %d commands in a set", total,
				e.parts, uint32(math.MaxUint32))
		}
		if sc.marked < total {
			c := grown(total)
			if err := e.replace(&sc.marks, c*4, "gpuio marks", true); err != nil {
				return false, err
			}
			sc.marked = c
		}
		set.Marks = sc.marks.Ptr()
		clear(view[uint32](set.Marks, 0, total))
	case e.coalesces(rs):
		if total > math.MaxUint32-int64(nssd) {
			return false, errs.New(errs.Usage,
				"read set of %d rows: at most %d where rows share commands", total,
				math.MaxUint32-int64(nssd))
		}
		if err := e.growCoalesce(sc, total); err != nil {
			return false, err
		}
		coalesced = true
		set.Order, set.Runs = sc.order.Ptr(), sc.order.Ptr()+cuda.DevicePtr(sc.rows*4)
	}
	units := e.units(slot)
	for s := range nssd {
		units[2*s], units[2*s+1] = rs.SSDOffset[s]*int64(e.parts), rs.SSDOffset[s+1]*int64(e.parts)
	}
	// A coalesced set's shares are written over by its kernel. Until then it is not done.
	rem := e.remaining(slot)
	for g := range rem {
		s := g / e.perSSD
		lo, hi := share(units[2*s+1]-units[2*s], uint32(g%e.perSSD), uint32(e.perSSD), set.Rotate)
		rem[g] = uint32(hi - lo)
	}
	clear(e.taken(slot))
	return coalesced, nil
}

func (e *async) growCoalesce(sc *setScratch, n int64) error {
	if sc.rows < n {
		c := grown(n)
		if err := e.replace(&sc.order, c*4+(c+int64(len(e.ssds)))*4, "gpuio runs",
			false); err != nil {
			return err
		}
		sc.rows = c
	}
	cs := &e.sorting
	if cs.rows < n {
		c := grown(n)
		cs.rows = 0 // until all three are there
		for _, b := range []struct {
			buf   *cuda.Buffer
			bytes int64
		}{{&cs.keysA, c * 8}, {&cs.keysB, c * 8}, {&cs.idx, c * 4}} {
			if err := e.replace(b.buf, b.bytes, "gpuio sorting", false); err != nil {
				return err
			}
		}
		cs.rows = c
	}
	return nil
}

// launchCoalesce enqueues the sort of a set before its submit kernel. Needs e.mu.
func (e *async) launchCoalesce(slot uint32) error {
	p := coalesceParams{
		Sets: e.setBuf.dev.Ptr(), KeysA: e.sorting.keysA.Ptr(), KeysB: e.sorting.keysB.Ptr(),
		Set: slot * e.shape.stride, QueuesPerSSD: uint32(e.perSSD), Window: e.window,
		Passes: e.layout.passes(), Reach: e.reach,
	}
	order := e.scratch[slot].order.Ptr()
	p.IdxA, p.IdxB = e.sorting.idx.Ptr(), order
	if p.Passes%2 == 0 {
		p.IdxA, p.IdxB = p.IdxB, p.IdxA
	}
	return cuda.Launch(e.submitS, e.coalesceK, cuda.LaunchConfig{Blocks: len(e.ssds),
		Threads: sortThreads}, p)
}

// freeScratch gives back what forms have needed. No kernel runs.
func (e *async) freeScratch() error {
	e.copies.mu.Lock()
	defer e.copies.mu.Unlock()
	bufs := append([]cuda.Buffer{e.sorting.keysA, e.sorting.keysB, e.sorting.idx}, e.retired...)
	bufs = append(bufs, e.copies.bufs...)
	for i := range e.scratch {
		bufs = append(bufs, e.scratch[i].order, e.scratch[i].marks, e.scratch[i].crcs)
	}
	e.sorting, e.scratch, e.retired = coalesceScratch{}, [maxSets]setScratch{}, nil
	e.copies.bufs, e.copies.m = nil, [maxSets]listCopy{}
	var err error
	for _, b := range bufs {
		if b != nil {
			err = errors.Join(err, b.Free())
		}
	}
	return err
}

// fail records a failed row of the set; the caller takes its unit out of Remaining afterwards.
func (s *setState) fail(r failRecord) {
	if n := atomic.AddUint32(&s.NumFails, 1); n <= maxFails {
		s.Fails[n-1] = r
	}
}

// failUnit records that no row of a unit was read, each with its index and number, in the order of
// the unit. A row of several commands is recorded once.
func (s *setState) failUnit(unit uint32, r failRecord) {
	s.unitLists().fail(s, unit, r)
}

// unitLists are the lists that say which rows a unit has, where the caller can read them.
type unitLists struct {
	rows, order, runs cuda.DevicePtr
}

func (s *setState) unitLists() unitLists { return unitLists{s.Rows, s.Order, s.Runs} }

func (u unitLists) fail(s *setState, unit uint32, r failRecord) {
	record := func(i uint32) {
		r.Index, r.Row = i, rowUnknown
		if u.rows != 0 {
			r.Row = *at[int64](u.rows, int(i))
		}
		s.fail(r)
	}
	switch {
	case s.Order != 0:
		if u.runs == 0 { // nobody knows how many
			r.Index, r.Row = 0, rowUnknown
			s.fail(r)
			return
		}
		for k := *at[uint32](u.runs, int(unit)); k < *at[uint32](u.runs, int(unit)+1); k++ {
			record(*at[uint32](u.order, int(k)))
		}
	case s.PartBlocks != 0:
		i := unit / s.Parts
		if atomic.SwapUint32(at[uint32](s.Marks, int(i)), 1) == 0 {
			record(i)
		}
	default:
		record(unit)
	}
}

// listCopies are copies of sets' lists for the host, where they are in a device's own memory. A set
// needs them when the host ends some of its units, which is rare.
type listCopies struct {
	mu   sync.Mutex
	m    [maxSets]listCopy
	bufs []cuda.Buffer
}

type listCopy struct {
	buf   cuda.Buffer // kept for the slot's later sets
	lists unitLists
	tried bool // for the set that is in the slot now
}

// copyTimeout bounds one such copy.
const copyTimeout = 5 * time.Second

// failUnit records that no row of a unit was read: r without Index and Row. The caller takes the
// unit out of Remaining. On a device other than the host's no kernel may run (quiesce).
func (e *async) failUnit(slot, unit uint32, r failRecord) {
	set := e.set(slot)
	if e.onHost() {
		set.failUnit(unit, r)
		return
	}
	e.copies.mu.Lock()
	defer e.copies.mu.Unlock()
	c := &e.copies.m[slot]
	if !c.tried {
		c.tried = true
		if err := e.copyLists(slot, c); err != nil {
			// The rows are not known then; that the set has failed is.
			c.lists = unitLists{}
		}
	}
	c.lists.fail(set, unit, r)
}

func (e *async) copyLists(slot uint32, c *listCopy) error {
	set := e.set(slot)
	n := array[int64](e, slot, 0, len(e.ssds)+1)[len(e.ssds)]
	parts := []struct {
		src   cuda.DevicePtr
		bytes int64
		to    *cuda.DevicePtr
	}{{set.Rows, n * 8, &c.lists.rows}, {set.Order, n * 4, &c.lists.order},
		{set.Runs, (n + int64(len(e.ssds))) * 4, &c.lists.runs}}
	if need := n*16 + int64(len(e.ssds))*4; c.buf == nil || c.buf.Size() < need {
		b, err := e.alloc(grown(need), "gpuio failed rows")
		if err != nil {
			return err
		}
		c.buf = b
		e.copies.bufs = append(e.copies.bufs, b)
	}
	off := cuda.DevicePtr(0)
	for _, p := range parts {
		if p.src == 0 {
			continue
		}
		*p.to = c.buf.Ptr() + off
		off += cuda.DevicePtr(p.bytes)
		if err := e.submitS.Copy(*p.to, p.src, p.bytes); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), copyTimeout)
	defer cancel()
	return e.submitS.Synchronize(ctx)
}

// forgetCopies ends the use of a slot's copies by the set that is done.
func (e *async) forgetCopies(slot uint32) {
	e.copies.mu.Lock()
	defer e.copies.mu.Unlock()
	e.copies.m[slot].tried, e.copies.m[slot].lists = false, unitLists{}
}
