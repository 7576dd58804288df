package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"helios/cuda"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Store is the SSDs of a run and the I/O stack that reads them.
type Store struct {
	of         *prepare.Sampling
	Layout     gpuio.Layout // of the rows
	SSDs       []*gpuio.SSD
	Memory     *gpuio.Memory  // of the I/O kernels; nil: as the stack does without
	Pages      *PageStore     // that the stack is open for; nil: it reads the rows
	Reader     gpuio.Reader   // nil when every row is in a tier
	planner    *gpuio.Planner // of that stack's commands
	speed      gpuio.Speed    // of the SSDs, for rows that lie as timed says
	timed      gpuio.Layout
	before     gpuio.Stats // of readers that are closed
	ScaleTable cuda.Buffer // pinned, of all rows; nil: their type has none
	lease      *stripe.Lease
	checks     checks
	// Checked describes them; unchecked is the reason why rows are not checked unless asked for.
	Checked   report.ChecksInfo
	unchecked string
	Notes     []string // on the SSDs
	// Stopped: the user interrupted, and nothing is worth a long wait any more.
	Stopped bool
}

// openReader opens the run's I/O stack, and what checks its rows where they have checksums.
func (s *Store) openReader(ctx context.Context, l gpuio.Layout) (gpuio.Reader, error) {
	// The checksums are read before the stack takes the SSDs' queues.
	sums, err := s.sumsOf(ctx, l)
	if err != nil {
		return nil, err
	}
	r, err := s.newReader(ctx, s.of.Config.IOStack, l)
	if err != nil || sums == nil {
		return r, err
	}
	ssds := s.SSDs
	if s.Pages != nil {
		ssds = s.Pages.SSDs
	}
	checked, err := gpuio.NewCheckedBy(s.of.Device, r, ssds, l, sums)
	if err != nil {
		op, cancel := context.WithTimeout(context.Background(), s.of.Config.OpTimeout)
		defer cancel()
		return nil, errors.Join(err, r.Close(op))
	}
	return checked, nil
}

// newReader opens an I/O stack by name, for rows or lines that lie as l says.
func (s *Store) newReader(ctx context.Context, name string, l gpuio.Layout) (gpuio.Reader, error) {
	c := s.of.Config
	stack, err := gpuio.FindStack(name)
	if err != nil {
		return nil, err
	}
	ssds, memory := s.SSDs, s.Memory
	if s.Pages != nil {
		ssds, memory = s.Pages.SSDs, s.Pages.memory
	}
	o := gpuio.StackOptions{
		AsyncOptions: gpuio.AsyncOptions{
			Blocks: c.Blocks, Depth: c.QueueDepth, Timeout: c.ReadTimeout, Retries: c.ReadRetries,
			Resets: c.ReadResets, CoalesceBytes: c.CoalesceBytes, SMs: c.SMs.IO,
			Priority: plan.IOPriority, Memory: memory,
		},
		Engine: c.CPUEngine,
	}
	if c.CPUEngine != "pread" { // there a thread is one read in flight
		o.Workers = c.Workers
	}
	if s.Pages != nil {
		o = s.Pages.Options(o)
	}
	if s.timed != l {
		if s.speed, err = stack.MeasureSpeed(ctx, s.of.Device, ssds, l, o); err != nil {
			return nil, err
		}
		s.timed = l
	}
	o.Speed = s.speed
	r, err := stack.Open(s.of.Device, ssds, l, o)
	if b, ok := r.(interface{ RunningBlocks() (int, string) }); ok && err == nil {
		n, why := b.RunningBlocks()
		text := fmt.Sprintf("of %d I/O blocks %d run at once, as %s", c.Blocks, n, why)
		if n < c.Blocks && !slices.Contains(s.Notes, text) {
			s.Notes = append(s.Notes, text)
			s.of.Observer.TellNote("%s", text)
		}
	}
	return r, err
}

// Close ends the stack: afterwards nothing writes to a slot or a tier.
func (s *Store) Close() error {
	if s.Reader == nil {
		return nil
	}
	limit := s.of.Config.OpTimeout
	if s.Stopped {
		limit = s.of.Grace
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	r := s.Reader
	s.before, s.Reader = report.AddStats(s.before, r.Stats()), nil
	return r.Close(ctx)
}

// Stack is the I/O stack that batches read through.
func (s *Store) Stack() string {
	if s.Reader == nil {
		return plan.StackNone
	}
	return s.of.Config.IOStack
}

// Fill reads rows one after the other into a buffer.
func (s *Store) Fill(ctx context.Context, rows []int64, dst cuda.Buffer, name string) error {
	_, err := s.FillSlots(ctx, rows, nil, dst, name)
	return err
}

// FillSlots reads rows into slots of a buffer; nil: one slot after the other. It returns the cost
// in reads.
func (s *Store) FillSlots(ctx context.Context, rows []int64, slots []int32, dst cuda.Buffer,
	name string) (took gpuio.ReadStats, err error) {
	n := min(prepare.FillRows, len(rows))
	if n == 0 {
		return took, nil
	}
	l, err := s.newListing(int64(n), len(s.SSDs))
	if err != nil {
		return took, err
	}
	defer func() { _ = l.mem.Free() }()
	for first := 0; first < len(rows); first += n {
		part := rows[first:min(first+n, len(rows))]
		end := dst.Size() / s.of.RowBytes
		if slots == nil {
			end = int64(first + len(part))
		}
		l.fill(len(part), func(i int) (int64, uint32) {
			if slots == nil {
				return part[i], uint32(first + i)
			}
			return part[i], uint32(slots[first+i])
		})
		st, err := s.readListed(ctx, l, dst, s.of.RowBytes, end*s.of.RowBytes,
			"filling the "+strings.TrimPrefix(name, "fill "))
		took = report.AddReadStats(took, st)
		if err != nil {
			return took, err
		}
		s.of.Observer.TellStep(name, first+len(part), len(rows))
	}
	return took, gpuio.Forget(s.Reader, dst) // no SSD writes there again
}

// ReadPages reads runs of the pages that the stack is open for into a buffer, one set behind the
// other. After an error no read is under way. The observer hears of each set if tell is true.
func (s *Store) ReadPages(ctx context.Context, runs []prepare.PageRun, dst cuda.Buffer, name string,
	tell bool) (took gpuio.ReadStats, err error) {
	page := int64(s.Pages.Layout.RowBytes)
	sets, limit := prepare.CutPages(runs, page)
	if len(sets) == 0 {
		return took, nil
	}
	total, done := int64(0), int64(0)
	for _, r := range runs {
		total += r.Pages
	}
	l, err := s.newListing(min(limit, total), len(s.Pages.SSDs))
	if err != nil {
		return took, err
	}
	defer func() { err = errors.Join(err, l.mem.Free()) }()
	var pages []int64
	var places []uint32
	for _, set := range sets { // their pages in their order on each SSD
		pages, places = pages[:0], places[:0]
		for _, r := range set {
			for i := range r.Pages {
				pages, places = append(pages, r.Page+i), append(places, uint32(r.At+i))
			}
		}
		l.fill(len(pages), func(i int) (int64, uint32) { return pages[i], places[i] })
		st, err := s.readListed(ctx, l, dst, page, dst.Size()/page*page, name)
		took = report.AddReadStats(took, st)
		if err != nil {
			return took, err
		}
		if done += int64(len(pages)); tell {
			s.of.Observer.TellStep(name, int(done), int(total))
		}
	}
	return took, nil
}

// listing has the rows or pages of a set of reads by SSD, in memory that the stack reads.
type listing struct {
	mem       cuda.Buffer
	numbers   []int64
	places    []uint32
	off, next []int64
}

// newListing makes room for n rows or pages.
func (s *Store) newListing(n int64, ssds int) (l *listing, err error) {
	l = &listing{off: make([]int64, ssds+1), next: make([]int64, ssds)}
	if l.mem, err = s.of.Device.Alloc(cuda.MemPinned, n*12, "lists of reads"); err != nil {
		return nil, err
	}
	l.numbers = hostmem.View[int64](l.mem.Bytes()[:n*8])
	l.places = hostmem.View[uint32](l.mem.Bytes()[n*8 : n*12])
	return l, nil
}

// fill lists n rows or pages. Those of an SSD keep their order.
func (l *listing) fill(n int, item func(i int) (number int64, place uint32)) {
	ssds := int64(len(l.next))
	clear(l.off)
	for i := range n {
		number, _ := item(i)
		l.off[number%ssds+1]++
	}
	for i := range ssds {
		l.off[i+1] += l.off[i]
	}
	copy(l.next, l.off)
	for i := range n {
		number, place := item(i)
		k := l.next[number%ssds]
		l.next[number%ssds]++
		l.numbers[k], l.places[k] = number, place
	}
}

// readListed reads a set and waits for it. After an error the stack is closed: the set's buffers
// may be freed only when nothing can read or write them.
func (s *Store) readListed(ctx context.Context, l *listing, dst cuda.Buffer, stride, bytes int64,
	doing string) (st gpuio.ReadStats, err error) {
	if err := prepare.Interrupted(ctx); err != nil {
		return st, err
	}
	op, cancel := s.of.ReadContext(ctx)
	defer cancel()
	p, err := s.Reader.Submit(op, &gpuio.ReadSet{Rows: l.mem.Ptr(),
		Pos: l.mem.Ptr() + cuda.DevicePtr(len(l.numbers)*8), SSDOffset: l.off, Dst: dst,
		DstStride: stride, DstBytes: bytes})
	if err == nil {
		st, err = p.Wait(op)
	}
	if err == nil {
		return st, nil
	}
	s.Stopped = ctx.Err() != nil
	cerr := s.Close()
	if stopped := prepare.Interrupted(ctx); stopped != nil {
		return st, errs.With(errs.Interrupted, errors.Join(stopped, cerr))
	}
	return st, fmt.Errorf("%s: %w", doing, errors.Join(ReadError(err), cerr))
}

// ReadError attaches class Device to a failed read that has no class yet.
func ReadError(err error) error {
	if errs.ClassOf(err) == errs.Failed {
		return errs.With(errs.Device, err)
	}
	return err
}

// openMemory chooses where the I/O kernels' queues and data are.
func (s *Store) openMemory() (err error) {
	if s.Memory, err = s.chooseMemory(s.SSDs); err != nil || s.Memory == nil {
		return err
	}
	if s.of.OnGPU() {
		r := s.Memory.Report()
		text := "I/O memory: rung " + r.Rung
		if r.How != "" {
			text += " (" + r.How + ")"
		}
		for _, t := range gpuio.Together(r.Tried) {
			text += "; not " + t.Rung + ": " + t.Why
		}
		s.of.Observer.TellNote("%s", text)
	}
	return nil
}

// chooseMemory chooses it for some SSDs; nil: the stack does without.
func (s *Store) chooseMemory(ssds []*gpuio.SSD) (*gpuio.Memory, error) {
	want := s.of.Config.MemoryRung
	if !s.of.Config.Queued() || !s.of.OnGPU() && (want == "" || want == gpuio.RungAuto) {
		return nil, nil
	}
	return gpuio.ChooseRung(s.of.Device, ssds, want)
}

// TurnTo has the I/O stack read pages, or rows where they are nil. Nothing may be in flight.
func (s *Store) TurnTo(ctx context.Context, pages *PageStore) error {
	if s.Pages == pages && s.Reader != nil {
		return nil
	}
	if err := s.Close(); err != nil {
		return err
	}
	s.Pages = pages
	if pages == nil {
		return s.Open(ctx, s.Layout)
	}
	if pages.memory == nil {
		var err error
		if pages.memory, err = s.chooseMemory(pages.SSDs); err != nil {
			return err
		}
	}
	return s.Open(ctx, pages.Layout)
}

// Renew opens the I/O stack anew for rows or lines that lie as l says, as the configuration has it
// now. Nothing may be in flight.
func (s *Store) Renew(ctx context.Context, l gpuio.Layout) error {
	if err := s.Close(); err != nil {
		return err
	}
	return s.Open(ctx, l)
}

// Open opens the I/O stack where none is open.
func (s *Store) Open(ctx context.Context, l gpuio.Layout) error {
	if s.Reader != nil {
		return nil
	}
	r, err := s.openReader(ctx, l)
	if err != nil {
		return err
	}
	s.Reader = r
	c := s.of.Config
	o := gpuio.PlanOptions{Stack: c.IOStack, CoalesceBytes: c.CoalesceBytes, Depth: c.QueueDepth,
		Speed: s.speed}
	for _, d := range s.SSDs {
		if d.Ctrl != nil {
			o.MaxTransferBytes = d.Ctrl.MaxTransferBytes()
		}
	}
	s.planner, err = gpuio.NewPlanner(l, o)
	return err
}

// IO returns what the run has read so far.
func (s *Store) IO() report.IOResult {
	st := s.before
	if s.Reader != nil {
		st = report.AddStats(st, s.Reader.Stats())
	}
	return report.NewIOResult(st)
}
