package cache

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// DynamicConfig is a dynamic cache's.
type DynamicConfig struct {
	Rows, RowBytes int64
	Lines          Lines
	Slots          int64 // lines of the GPU tier
	Policy         string
	Directory      string // one of policy.Kinds; empty: the first
	Seed           uint64
	CPU            []int64 // rows of the constant CPU buffer, ascending
	// NoData: lookups only, for a run that reads nothing (the virtual clock).
	NoData bool
}

// Dynamic is a GPU tier whose lines come and go by a policy, over a constant CPU tier. One
// goroutine decides its content, in the order of Admit; copies follow in that same order, however
// late: a Ticket is a batch's lease on the lines that it found and on the slots that it will fill.
//
// A line is in the directory from the Admit that promises it a slot. Its bytes come into the slot
// in the Finish of that ticket, on the one stream that all copies run on, from a staging buffer
// that the caller has filled and checked. So a later batch's hits, whose copies come after it on
// that stream, never meet a line that is on its way, and a slot keeps its old line until the copies
// of all earlier batches are done with it.
//
// Announce, NextBatch and Admit are one goroutine's, in the order of the batches. Plan, Finish,
// Release and Abandon may be others'.
type Dynamic struct {
	c    DynamicConfig
	dev  cuda.Device
	host bool // the CPU sees device memory
	// lines of the index of the CPU tier; nil without one.
	cpuIndex []line
	slots    cuda.Buffer
	cpu      cuda.Buffer
	gather   cuda.Kernel

	dirMu  sync.Mutex
	dir    policy.Directory // nil where it is gpu
	gpu    *gpuSets         // in the memory of a device of the driver, in sets
	seen   lineSet          // of one part, or of an announcement
	lines  []int64
	answer []policy.Answer
	byPos  eachScratch // where the directory is in sets
	ahead  cuda.Buffer // pinned: announced rows of a device that the CPU does not see

	mu      sync.Mutex
	stream  cuda.Stream // of the last copies
	next    uint64      // number of the next ticket
	waiting []*Ticket   // admitted and not finished, in order
	used    map[*Ticket]struct{}
	closed  bool
}

// NewDynamic allocates the tiers. The CPU buffer holds zeros until the caller fills it.
func NewDynamic(dev cuda.Device, c DynamicConfig) (*Dynamic, error) {
	if err := c.Lines.check(c.RowBytes); err != nil {
		return nil, fmt.Errorf("dynamic cache: %w", err)
	}
	switch {
	case c.Rows < 0 || c.Rows > math.MaxInt64/c.RowBytes:
		return nil, errs.New(errs.Usage, "dynamic cache: %d rows of %d bytes", c.Rows, c.RowBytes)
	case c.Slots < 0 || c.Slots > math.MaxInt32 || c.Slots*c.Lines.RowsPerLine > math.MaxUint32:
		return nil, errs.New(errs.Usage,
			"dynamic cache: %d lines of %d rows: want at most %d lines, and less than 2^32 rows; use longer lines or a smaller GPU tier ({gpu-cache})",
			c.Slots, c.Lines.RowsPerLine, math.MaxInt32)
	}
	d := &Dynamic{c: c, dev: dev, host: dev.Info().Backend == "host", used: map[*Ticket]struct{}{}}
	onGPU := c.Directory == policy.InSets && !d.host
	if len(c.CPU) > 0 && !onGPU {
		w := &lineWriter{rows: c.Rows, window: make([]line, (c.Rows+RowsPerLine-1)/RowsPerLine)}
		if err := errors.Join(w.placement(Placement{CPU: c.CPU}), w.finish()); err != nil {
			return nil, fmt.Errorf("dynamic cache: %w", err)
		}
		d.cpuIndex = w.window
	}
	var err error
	if onGPU {
		d.gpu, err = newGPUSets(dev, c)
	} else {
		d.dir, err = policy.New(policy.Config{Policy: c.Policy, Kind: c.Directory, Slots: c.Slots,
			Lines: c.Lines.Count(c.Rows), Seed: c.Seed, Workers: d.workers()})
	}
	if err != nil {
		return nil, fmt.Errorf("dynamic cache: %w", err)
	}
	if c.NoData {
		return d, nil
	}
	d.gather, err = dev.Kernel("gather")
	if err == nil {
		d.slots, err = dev.Alloc(cuda.MemDevice, c.Slots*c.Lines.LineBytes, "gpu cache")
	}
	if err == nil {
		d.cpu, err = dev.Alloc(cuda.MemPinned, int64(len(c.CPU))*c.RowBytes, "cpu cache")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dynamic cache: %w", err), d.Close())
	}
	return d, nil
}

// OnGPU reports whether kernels look rows up, on a stream that is busy then.
func (d *Dynamic) OnGPU() bool { return d.gpu != nil }

// workers counts the goroutines that the directory may play a part on: those of the host device.
func (d *Dynamic) workers() int {
	if d.host {
		return d.dev.Info().SMs
	}
	return 0
}

// Config returns what the cache was made with.
func (d *Dynamic) Config() DynamicConfig { return d.c }

// CPUBuffer is the constant CPU tier's memory, rows in the order of DynamicConfig.CPU: the caller
// fills it. It is nil with NoData.
func (d *Dynamic) CPUBuffer() cuda.Buffer { return d.cpu }

// Stats are the directory's.
func (d *Dynamic) Stats() policy.Stats {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	if d.gpu != nil {
		return d.gpu.stats
	}
	return d.dir.Stats()
}

// MetadataBytes returns what the policy keeps, by cached line and announced line.
func (d *Dynamic) MetadataBytes() int64 {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	if d.gpu != nil {
		return d.gpu.bytes()
	}
	return d.dir.Bytes()
}

// Announce takes the rows of a batch that will be admitted, for the window: the first count of
// nodes (device memory), behind the work of st; in the order of admission, each batch once. Where
// the directory is on the CPU it waits for st, no longer than ctx; else nodes must stay until the
// batch is admitted.
func (d *Dynamic) Announce(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr,
	count int64) error {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	var err error
	if d.gpu != nil {
		err = d.gpu.announce(st, nodes, count)
	} else {
		err = d.announce(ctx, st, nodes, count)
	}
	if err != nil {
		return fmt.Errorf("dynamic cache: announcement of %d rows: %w", count, err)
	}
	return nil
}

// announce is Announce to a directory on the CPU.
func (d *Dynamic) announce(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr,
	count int64) error {
	rows, err := d.toCPU(ctx, st, nodes, 0, count, &d.ahead)
	if err != nil {
		return err
	}
	d.lines = d.lines[:0]
	d.seen.reset(int64(len(rows)))
	for i, row := range rows {
		if uint64(row) >= uint64(d.c.Rows) {
			return fmt.Errorf("row %d at position %d: the dataset has rows 0 to %d", row, i,
				d.c.Rows-1)
		}
		if d.inCPU(row) {
			continue
		}
		l, _ := d.c.Lines.Of(row)
		if _, fresh := d.seen.add(l, uint32(len(d.lines))); fresh {
			d.lines = append(d.lines, l)
		}
	}
	d.dir.Announce(d.lines)
	return nil
}

func (d *Dynamic) inCPU(row int64) bool {
	return d.cpuIndex != nil &&
		d.cpuIndex[row/RowsPerLine].code[row%RowsPerLine/rowsPerWord]>>(row%rowsPerWord*2)&3 != 0
}

// Forget ends all announcements: of a pass that stops early, whose other batches will not be
// admitted.
func (d *Dynamic) Forget() {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	if d.gpu != nil {
		d.gpu.forget()
		return
	}
	d.dir.Forget()
}

// NextBatch begins a batch.
func (d *Dynamic) NextBatch() {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	if d.gpu != nil {
		d.gpu.batch++
		return
	}
	d.dir.NextBatch()
}

// Close frees everything. A ticket that was not released is an error that names it.
func (d *Dynamic) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	var all []error
	if len(d.used) > 0 {
		var left []*Ticket
		for t := range d.used {
			left = append(left, t)
		}
		slices.SortFunc(left,
			func(a, b *Ticket) int { return int(int64(a.number) - int64(b.number)) })
		all = append(all,
			fmt.Errorf("dynamic cache: closed with %d tickets out, the first of which is %v",
				len(left), left[0]))
	}
	if d.gpu != nil {
		all = append(all, d.gpu.close())
	}
	for _, b := range []cuda.Buffer{d.slots, d.cpu, d.ahead} {
		if b != nil {
			all = append(all, b.Free())
		}
	}
	return errors.Join(all...)
}

// Where a ticket is in its life.
type ticketState uint8

const (
	ticketFree ticketState = iota
	ticketAdmitted
	ticketFinished
)

var ticketStates = [...]string{"free", "admitted", "finished"}

// Ticket is one lookup's answer and lease.
type Ticket struct {
	NGPU, NCPU, NMiss int64 // rows: found in the GPU tier, in the CPU tier, on lines to be read
	NLines            int64 // lines to be read

	d        *Dynamic
	number   uint64
	state    ticketState
	planned  bool
	base     int64 // of its lines in the staging buffer
	dstRows  int64 // highest position + 1
	fills    int64
	capacity int64
	nodes    cuda.Buffer // pinned: what Admit copied from the device
	read     cuda.Buffer // of the device: lines, and lines by SSD, where kernels find them
	offsets  []int64     // by SSD: where its lines begin among those
	lists    cuda.Buffer // uint32[capacity] for each of the below: pinned, or of the device
	// and there a ninth, the numbers of the lines by SSD
	// Rows by where they come from: position in the batch and row in the tier (or in the staging
	// lines). Nil where kernels write them.
	gpuPos, gpuRow, cpuPos, cpuRow, missPos, missRow []uint32
	fillLine, fillSlot                               []uint32 // staging line, slot
	lines                                            []int64  // to be read
}

// Lines are the lines to be read, valid until Release; nil where they are in a GPU's memory.
func (t *Ticket) Lines() []int64 { return t.lines }

// Fills returns how many of them go to slots.
func (t *Ticket) Fills() int64 { return t.fills }

const (
	ticketLists    = 8
	gpuTicketLists = ticketLists + 1
)

func (t *Ticket) String() string {
	return fmt.Sprintf("ticket %d (%s: %d rows, %d lines to read)", t.number, ticketStates[t.state],
		t.NGPU+t.NCPU+t.NMiss, t.NLines)
}

// NewTicket makes a ticket to be used again and again. Its memory grows with the largest lookup.
func (d *Dynamic) NewTicket() (*Ticket, error) { return &Ticket{d: d}, nil }

// reserve makes room for count positions.
func (t *Ticket) reserve(count int64) (err error) {
	if count <= t.capacity {
		return nil
	}
	if err := t.free(); err != nil {
		return fmt.Errorf("dynamic cache: %w", err)
	}
	count = max(count+count/4, 2048)
	where, lists := cuda.MemPinned, int64(ticketLists)
	if t.d.gpu != nil {
		where, lists = cuda.MemDevice, gpuTicketLists
	}
	if t.lists, err = t.d.dev.Alloc(where, count*lists*4, "cache lookup"); err != nil {
		return fmt.Errorf("dynamic cache: ticket for %d rows: %w", count, err)
	}
	if t.d.gpu != nil {
		if t.read, err = t.d.dev.Alloc(cuda.MemDevice, 2*count*8, "cache lookup"); err != nil {
			return errors.Join(fmt.Errorf("dynamic cache: ticket for %d rows: %w", count, err),
				t.free())
		}
		t.capacity = count
		return nil
	}
	mem := hostmem.View[uint32](t.lists.Bytes())
	for i, l := range []*[]uint32{&t.gpuPos, &t.gpuRow, &t.cpuPos, &t.cpuRow, &t.missPos,
		&t.missRow, &t.fillLine, &t.fillSlot} {
		*l = mem[int64(i)*count:][:count:count]
	}
	t.capacity = count
	return nil
}

func (t *Ticket) free() error {
	t.capacity = 0
	var all []error
	t.lines = nil
	for _, b := range []*cuda.Buffer{&t.lists, &t.nodes, &t.read} {
		if *b != nil {
			all = append(all, (*b).Free())
			*b = nil
		}
	}
	return errors.Join(all...)
}

// list is a list's address on the device, in the order of reserve.
func (t *Ticket) list(
	i int64) cuda.DevicePtr {
	return t.lists.Ptr() + cuda.DevicePtr(i*t.capacity*4)
}

// dealt is the address of the lines by SSD.
func (t *Ticket) dealt() cuda.DevicePtr { return t.read.Ptr() + cuda.DevicePtr(t.capacity*8) }

func (t *Ticket) clear() {
	t.NGPU, t.NCPU, t.NMiss, t.NLines, t.fills, t.dstRows, t.base, t.planned = 0, 0, 0, 0, 0, 0,
		0, false
	t.lines = t.lines[:0]
}

// Admit looks positions first..first+count-1 of nodes (int64 rows in device memory, indexed by
// position) up: on return the policy has decided, and t has the reads. It waits for st no longer
// than ctx. A row may stand twice (a split that names a node twice). On an error the directory and
// t are as before.
func (d *Dynamic) Admit(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64, t *Ticket) error {
	if first < 0 || count < 0 || first+count > math.MaxUint32 ||
		count*d.c.Lines.RowsPerLine > math.MaxUint32 {
		return fmt.Errorf(
			"dynamic cache: lookup of %d positions from %d with %d rows to a line: want positions and rows of lines below 2^32",
			count, first, d.c.Lines.RowsPerLine)
	}
	d.mu.Lock()
	err := t.in(d, ticketFree)
	if err == nil && d.closed {
		err = errors.New("dynamic cache: lookup in a closed cache")
	}
	d.mu.Unlock()
	if err != nil {
		return err
	}
	if err := t.reserve(count); err != nil {
		return err
	}
	var rows []int64
	if d.gpu == nil {
		if rows, err = d.toCPU(ctx, st, nodes, first, count, &t.nodes); err != nil {
			return fmt.Errorf("dynamic cache: lookup of %d rows: %w", count, err)
		}
	}
	t.clear()
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	if d.gpu == nil {
		err = d.sort(rows, first, t)
	} else if err = d.gpu.access(ctx, st, nodes, first, count, t); err != nil {
		err = fmt.Errorf("dynamic cache: lookup of %d rows: %w", count, err)
	}
	if err != nil {
		t.clear()
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t.state, t.number = ticketAdmitted, d.next
	d.next++
	d.used[t] = struct{}{}
	d.waiting = append(d.waiting, t)
	return nil
}

// toCPU is the rows where the CPU can read them. Where it does not see the device's memory they are
// copied to mem, which grows.
func (d *Dynamic) toCPU(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64, mem *cuda.Buffer) ([]int64, error) {
	if count == 0 {
		return nil, nil
	}
	if d.host {
		if err := st.Synchronize(ctx); err != nil {
			return nil, err
		}
		return cuda.View[int64](nodes, first+count)[first:], nil
	}
	if *mem == nil || (*mem).Size() < count*8 {
		if *mem != nil {
			old := *mem
			*mem = nil
			if err := old.Free(); err != nil {
				return nil, err
			}
		}
		var err error
		if *mem, err = d.dev.Alloc(cuda.MemPinned, max(count+count/4, 2048)*8,
			"cache lookup"); err != nil {
			return nil, err
		}
	}
	if err := st.Copy((*mem).Ptr(), nodes+cuda.DevicePtr(first*8), count*8); err != nil {
		return nil, err
	}
	if err := st.Synchronize(ctx); err != nil {
		return nil, err
	}
	return hostmem.View[int64]((*mem).Bytes())[:count], nil
}

// sort asks the directory and fills t's lists.
func (d *Dynamic) sort(rows []int64, first int64, t *Ticket) error {
	if dir, ok := d.dir.(*policy.Sets); ok {
		return d.sortSets(dir, rows, first, t)
	}
	total := uint64(d.c.Rows)
	for i, row := range rows {
		if uint64(row) >= total {
			return fmt.Errorf("dynamic cache: row %d at position %d: the dataset has rows 0 to %d",
				row, first+int64(i), d.c.Rows-1)
		}
	}
	n := d.sortLines(rows, first, t)
	answers := d.access(t)
	per := uint32(d.c.Lines.RowsPerLine)
	for i := range n {
		pos, a := t.missPos[i], answers[t.missRow[i]]
		row := uint32(a.Slot)*per + t.gpuRow[i]
		if a.Hit { // never ahead of what is still to be read
			t.gpuPos[t.NGPU], t.gpuRow[t.NGPU] = pos, row
			t.NGPU++
		} else {
			t.missPos[t.NMiss], t.missRow[t.NMiss] = pos, row
			t.NMiss++
		}
	}
	t.NLines = int64(len(t.lines))
	t.dstRows = first + int64(len(rows))
	return nil
}

// sortLines lists the rows of the CPU tier, and the lines of the others, each once in order of
// appearance. It returns the number of the others. Until their lines are looked up missRow is the
// number of a row's line and gpuRow its place in the line.
func (d *Dynamic) sortLines(rows []int64, first int64, t *Ticket) (others int) {
	d.lines = d.lines[:0]
	d.seen.reset(int64(len(rows)))
	n, pos := 0, uint32(first)
	for _, row := range rows {
		if d.cpuIndex != nil {
			if tier, slot := d.cpuIndex[row/RowsPerLine].find(
				uint64(row % RowsPerLine)); tier != SSD {
				t.cpuPos[t.NCPU], t.cpuRow[t.NCPU] = pos, uint32(slot)
				t.NCPU++
				pos++
				continue
			}
		}
		l, index := d.c.Lines.Of(row)
		k, fresh := d.seen.add(l, uint32(len(d.lines)))
		if fresh {
			d.lines = append(d.lines, l)
		}
		t.missPos[n], t.missRow[n], t.gpuRow[n] = pos, k, uint32(index)
		n++
		pos++
	}
	return n
}

// access looks the lines up. Lines that have to be read get numbers in the same order; a hit's
// answer keeps its slot, a miss's becomes its number.
func (d *Dynamic) access(t *Ticket) []policy.Answer {
	if cap(d.answer) < len(d.lines) {
		d.answer = make([]policy.Answer, len(d.lines)+len(d.lines)/4)
	}
	answers := d.answer[:len(d.lines)]
	d.dir.Access(d.lines, answers)
	for i := range answers {
		a := &answers[i]
		if a.Hit {
			continue
		}
		k := uint32(len(t.lines))
		if a.Slot >= 0 {
			t.fillLine[t.fills], t.fillSlot[t.fills] = k, uint32(a.Slot)
			t.fills++
		}
		t.lines = append(t.lines, d.lines[i])
		a.Slot = int32(k)
	}
	return answers
}

// in checks a ticket's state. The caller holds mu.
func (t *Ticket) in(d *Dynamic, want ticketState) error {
	switch {
	case t.d != d:
		return errors.New("dynamic cache: a ticket of another cache")
	case t.state != want:
		return fmt.Errorf("dynamic cache: %v: want it %s", t, ticketStates[want])
	}
	return nil
}

// ReadPlan is the lines of one or several tickets as one set of reads of the layout of lines: Rows,
// Pos and SSDOffset of a gpuio.ReadSet; line Pos[i] of the staging buffer, LineBytes apart, is line
// Rows[i].
type ReadPlan struct {
	Rows, Pos cuda.DevicePtr // in the CPU's memory, or with a directory of the GPU in the GPU's
	SSDOffset []int64
	Lines     int64
	Ready     cuda.Event // Rows and Pos are valid once it happened; nil: they are

	d        *Dynamic
	own      [2]cuda.Buffer // rows and positions; a plan of one ticket of the GPU uses that one's
	moves    cuda.Buffer    // pinned; see setsParams
	merged   cuda.Event     // is Ready where kernels merge the reads of tickets
	capacity int64
	rows     []int64
	pos      []uint32
	pieces   []planPiece
}

// planPiece is some lines of a ticket.
type planPiece struct {
	lines []int64
	base  int64   // their first place in the staging buffer
	next  []int64 // by SSD: how many lines; then where they go
}

// NewReadPlan makes an empty plan to be used again and again. Its memory grows with the largest
// one.
func (d *Dynamic) NewReadPlan() (*ReadPlan, error) {
	return &ReadPlan{d: d, SSDOffset: make([]int64, d.c.Lines.SSDs+1)}, nil
}

func (p *ReadPlan) reserve(lines int64) (err error) {
	if lines <= p.capacity {
		return nil
	}
	if err := p.free(); err != nil {
		return fmt.Errorf("dynamic cache: %w", err)
	}
	lines = max(lines+lines/4, 2048)
	kind := cuda.MemPinned
	if p.d.gpu != nil {
		kind = cuda.MemDevice
	}
	for i, bytes := range []int64{8, 4} {
		if p.own[i], err = p.d.dev.Alloc(kind, lines*bytes, "cache lookup"); err != nil {
			return errors.Join(fmt.Errorf("dynamic cache: reads of %d lines: %w", lines, err),
				p.Close())
		}
	}
	if p.d.gpu == nil {
		p.rows, p.pos = hostmem.View[int64](p.own[0].Bytes()),
			hostmem.View[uint32](p.own[1].Bytes())
	}
	p.capacity = lines
	return nil
}

// Close frees the plan.
func (p *ReadPlan) Close() error {
	all := []error{p.settle(), p.free()}
	if p.merged != nil {
		all = append(all, p.merged.Close())
		p.merged = nil
	}
	return errors.Join(all...)
}

// settle waits for a merge whose reads never went out; those that did have waited for it.
func (p *ReadPlan) settle() error {
	if p.Ready == nil || p.Ready.Done() {
		p.Ready = nil
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), setsTimeout)
	defer cancel()
	err := p.Ready.Synchronize(ctx)
	p.Ready = nil
	return err
}

func (p *ReadPlan) free() error {
	p.Lines, p.capacity, p.rows, p.pos, p.Rows, p.Pos = 0, 0, nil, nil, 0, 0
	clear(p.SSDOffset)
	var all []error
	for _, b := range []*cuda.Buffer{&p.own[0], &p.own[1], &p.moves} {
		if *b != nil {
			all = append(all, (*b).Free())
			*b = nil
		}
	}
	return errors.Join(all...)
}

// Plan merges the reads of tickets, which must be admitted and not finished. A line that two of
// them miss (bypass) is read twice. p must not be in use by reads under way. With NoData only
// SSDOffset and Lines are set.
func (d *Dynamic) Plan(p *ReadPlan, tickets ...*Ticket) error {
	if p.d != d {
		return errors.New("dynamic cache: a read plan of another cache")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	total := int64(0)
	for _, t := range tickets {
		if err := t.in(d, ticketAdmitted); err != nil {
			return err
		}
		total += t.NLines
	}
	if total > math.MaxUint32 {
		return errs.Errorf(
			"dynamic cache: %d tickets read %d lines: want less than 2^32; lower {batch-size}",
			len(tickets), total)
	}
	if d.gpu != nil {
		return d.planGPU(p, tickets, total)
	}
	if !d.c.NoData {
		if err := p.reserve(total); err != nil {
			return err
		}
		if total > 0 {
			p.Rows, p.Pos = p.own[0].Ptr(), p.own[1].Ptr()
		}
	}
	p.cut(tickets, total, d.workers())
	p.each(p.count)
	clear(p.SSDOffset)
	for i := range p.pieces {
		for s, n := range p.pieces[i].next {
			p.SSDOffset[s+1] += n
		}
	}
	for s := range d.c.Lines.SSDs {
		p.SSDOffset[s+1] += p.SSDOffset[s]
		first := p.SSDOffset[s]
		for i := range p.pieces {
			n := &p.pieces[i].next[s]
			*n, first = first, first+*n
		}
	}
	if !d.c.NoData {
		p.each(p.deal)
	}
	p.Lines = total
	return nil
}

// planGPU is Plan where kernels have dealt the lines out. The caller holds mu.
func (d *Dynamic) planGPU(p *ReadPlan, tickets []*Ticket, total int64) error {
	base, with := int64(0), []*Ticket(nil)
	for _, t := range tickets {
		if t.NLines > 0 {
			with = append(with, t)
		}
	}
	if err := p.settle(); err != nil {
		return fmt.Errorf("dynamic cache: the plan's last merge: %w", err)
	}
	if len(with) > 1 && !d.c.NoData {
		if err := p.reserve(total); err != nil {
			return err
		}
	}
	clear(p.SSDOffset)
	for _, t := range tickets {
		t.base, t.planned = base, true
		base += t.NLines
		if t.NLines == 0 { // its bounds are another lookup's
			continue
		}
		for ssd := range t.offsets[1:] {
			p.SSDOffset[ssd+1] += t.offsets[ssd+1] - t.offsets[ssd]
		}
	}
	for ssd := range p.SSDOffset[1:] {
		p.SSDOffset[ssd+1] += p.SSDOffset[ssd]
	}
	p.Lines = total
	switch {
	case d.c.NoData || total == 0:
	case len(with) == 1:
		p.Rows, p.Pos = with[0].dealt(), with[0].list(8)
	default:
		p.Rows, p.Pos = p.own[0].Ptr(), p.own[1].Ptr()
		if err := d.gpu.merge(p, with); err != nil {
			return fmt.Errorf("dynamic cache: reads of %d lines: %w", total, err)
		}
	}
	return nil
}

// Finish enqueues on st what a ticket's rows need once its reads are whole and checked: hits, CPU
// hits and rows of staging go to dst + position·dstStride, then the lines of staging to their
// slots. Tickets must be finished in the order of their admission, and all on one stream (another
// one when each finished ticket has been released); another order is an error and moves nothing.
// staging may be nil where nothing was read, and is the buffer of the whole plan. Everything must
// stay as it is until the stream is done; then the ticket is released.
func (d *Dynamic) Finish(st cuda.Stream, t *Ticket, staging cuda.Buffer, dst cuda.DevicePtr,
	dstStride int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.in(d, ticketAdmitted); err != nil {
		return err
	}
	if d.waiting[0] != t {
		return fmt.Errorf("dynamic cache: %v: finished before %v", t, d.waiting[0])
	}
	if d.c.NoData {
		d.finished(t)
		return nil
	}
	// work of finished tickets may still be on it
	if d.stream != nil && d.stream != st && len(d.used) > len(d.waiting) {
		return fmt.Errorf("dynamic cache: %v: finished on another stream than the tickets before",
			t)
	}
	if dstStride < d.c.RowBytes || t.dstRows > math.MaxInt64/dstStride {
		return fmt.Errorf("dynamic cache: rows of %d bytes with a stride of %d", d.c.RowBytes,
			dstStride)
	}
	l := d.c.Lines
	from := cuda.DevicePtr(0)
	if t.NLines > 0 {
		if !t.planned {
			return fmt.Errorf("dynamic cache: %v: finished before its reads were planned", t)
		}
		size := int64(0)
		if g, ok := staging.(cuda.Growable); ok {
			size = g.Backed()
		} else if staging != nil {
			size = staging.Size()
		}
		if want := (t.base + t.NLines) * l.LineBytes; size < want {
			return fmt.Errorf("dynamic cache: %v: a staging buffer of %d bytes: want %d", t,
				size, want)
		}
		from = staging.Ptr() + cuda.DevicePtr(t.base*l.LineBytes)
	}
	d.stream = st
	if err := d.copies(st, t, from, dst, dstStride); err != nil {
		return err
	}
	d.finished(t)
	return nil
}

func (d *Dynamic) finished(t *Ticket) {
	t.state = ticketFinished
	d.waiting = d.waiting[1:]
}

func (d *Dynamic) copies(st cuda.Stream, t *Ticket, staging, dst cuda.DevicePtr,
	stride int64) error {
	l := d.c.Lines
	// Lines without a gap at their end are rows at one distance: no division by the kernel.
	per, lineAt := l.RowsPerLine, l.LineBytes
	if lineAt == per*l.RowStride {
		per, lineAt = 1, l.RowStride
	}
	rows := gatherParams{
		Dst: dst, DstRows: t.dstRows, RowBytes: d.c.RowBytes, Stride: stride, GPUPerLine: per,
		GPULine: lineAt, GPUStride: l.RowStride,
	}
	if t.NGPU+t.NCPU > 0 {
		p := rows
		p.GPURows, p.GPUPos, p.GPUSlot, p.NGPU, p.GPUTotal = d.slots.Ptr(), t.list(0), t.list(1),
			t.NGPU, d.c.Slots*l.RowsPerLine
		p.CPURows, p.CPUPos, p.CPUSlot, p.NCPU, p.CPUTotal = d.cpu.Ptr(), t.list(2), t.list(3),
			t.NCPU, int64(len(d.c.CPU))
		if err := launchGather(d.dev, d.gather, st, p); err != nil {
			return err
		}
	}
	if t.NMiss > 0 {
		p := rows
		p.GPURows, p.GPUPos, p.GPUSlot, p.NGPU, p.GPUTotal = staging, t.list(4), t.list(5), t.NMiss,
			t.NLines*l.RowsPerLine
		if err := launchGather(d.dev, d.gather, st, p); err != nil {
			return err
		}
	}
	if t.fills > 0 {
		return launchGather(d.dev, d.gather, st, gatherParams{
			GPURows: staging, GPUPos: t.list(7), GPUSlot: t.list(6), NGPU: t.fills,
			GPUTotal: t.NLines,
			Dst:      d.slots.Ptr(), DstRows: d.c.Slots, RowBytes: l.LineBytes, Stride: l.LineBytes,
			GPUPerLine: 1, GPULine: l.LineBytes, GPUStride: l.LineBytes,
		})
	}
	return nil
}

// Release ends a ticket whose work on the stream is done.
func (d *Dynamic) Release(t *Ticket) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.in(d, ticketFinished); err != nil {
		return err
	}
	d.end(t)
	return nil
}

func (d *Dynamic) end(t *Ticket) {
	delete(d.used, t)
	t.state = ticketFree
	t.clear()
}

// Abandon ends a ticket whose reads failed, and all later ones that were admitted: their promised
// lines leave the directory. None of their reads may be under way. Earlier ones are finished as
// ever.
func (d *Dynamic) Abandon(t *Ticket) (err error) {
	d.dirMu.Lock()
	defer d.dirMu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.in(d, ticketAdmitted); err != nil {
		return err
	}
	i := slices.Index(d.waiting, t)
	for _, w := range d.waiting[i:] {
		err = errors.Join(err, d.takeBack(w))
		d.end(w)
	}
	d.waiting = d.waiting[:i]
	if d.gpu != nil {
		err = errors.Join(err, d.gpu.settle(), settled(d.gpu.plans))
	}
	if err != nil {
		return fmt.Errorf("dynamic cache: lines of failed reads leave: %w", err)
	}
	return nil
}

// takeBack empties the slots that a ticket was promised. The caller holds both locks.
func (d *Dynamic) takeBack(t *Ticket) error {
	if d.gpu != nil {
		return d.gpu.drop(t)
	}
	for i := range t.fills {
		// A later ticket may have the slot, which is then its line's to leave.
		if slot := int32(t.fillSlot[i]); d.dir.Find(t.lines[t.fillLine[i]]) == slot {
			d.dir.Drop(slot)
		}
	}
	return nil
}

// Close frees a ticket's buffers. It must not be out.
func (t *Ticket) Close() error {
	t.d.mu.Lock()
	defer t.d.mu.Unlock()
	if err := t.in(t.d, ticketFree); err != nil {
		return err
	}
	return t.free()
}

// lineSet numbers the lines of a part: open addressing, emptied by a new stamp.
type lineSet struct {
	slots []lineEntry
	shift uint
	stamp uint32
}

type lineEntry struct {
	line          int64
	stamp, number uint32
}

// reset empties the set and makes room for n lines.
func (s *lineSet) reset(n int64) {
	size, shift := int64(1024), uint(54)
	for size < 2*n {
		size, shift = size*2, shift-1
	}
	if size > int64(len(s.slots)) {
		s.slots, s.shift, s.stamp = make([]lineEntry, size), shift, 0
	}
	if s.stamp++; s.stamp == 0 {
		clear(s.slots)
		s.stamp = 1
	}
}

// add is a line's number, which is number if the line is fresh.
func (s *lineSet) add(line int64, number uint32) (uint32, bool) {
	mask := len(s.slots) - 1
	for i := int(uint64(line) * 0x9e3779b97f4a7c15 >> s.shift); ; i = (i + 1) & mask {
		switch e := &s.slots[i]; {
		case e.stamp != s.stamp:
			*e = lineEntry{line, s.stamp, number}
			return number, true
		case e.line == line:
			return e.number, false
		}
	}
}
