package engine

import (
	"context"
	"errors"
	"fmt"

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
	Memory     *gpuio.Memory // of the I/O kernels; nil: as the stack does without
	Pages      *PageStore    // that the stack is open for; nil: it reads the rows
	Reader     gpuio.Reader  // nil when every row is in a tier
	before     gpuio.Stats   // of readers that are closed
	ScaleTable cuda.Buffer   // pinned, of all rows; nil: their type has none
	lease      *stripe.Lease
	checks     checks
	// Checked says what they cover; unchecked why rows are not checked unless that is asked for.
	Checked   report.ChecksInfo
	unchecked string
	Notes     []string // on the SSDs
	// Stopped: the user interrupted, and nothing is worth a long wait any more.
	Stopped bool
}

// PagePairs is the number of queue pairs of each SSD that are taken at once where pages are on
// SSDs: by what writes them, and by what reads rows for them, or for training.
const PagePairs = 2

// PageStore is where the pages of mini-batches are that were laid out beforehand.
type PageStore struct {
	SSDs   []*gpuio.SSD // extents of the rows' own, or others
	Layout gpuio.Layout // a page is a row of it
	memory *gpuio.Memory
	// Options adds what suits pages to a stack's.
	Options func(gpuio.StackOptions) gpuio.StackOptions
	// Sums gives the pages' checksums.
	Sums   func(ctx context.Context) ([]uint32, error)
	checks cuda.Buffer // they, once they are used
}

// Close frees the checksums. No stack is open for the pages.
func (p *PageStore) Close() (err error) {
	if p.checks != nil {
		err = p.checks.Free()
		p.checks = nil
	}
	return err
}

// openReader opens the run's I/O stack, and what checks its rows where they have checksums.
func (s *Store) openReader(ctx context.Context, l gpuio.Layout) (gpuio.Reader, error) {
	// The checksums are read before the stack takes the SSDs' queues.
	sums, err := s.sumsOf(ctx, l)
	if err != nil {
		return nil, err
	}
	r, err := s.newReader(s.of.Config.IOStack, l)
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
func (s *Store) newReader(name string, l gpuio.Layout) (gpuio.Reader, error) {
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
	return stack.Open(s.of.Device, ssds, l, o)
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

// FillSlots reads rows into slots of a buffer; nil: one slot after the other. It says what that
// took of the SSDs.
func (s *Store) FillSlots(ctx context.Context, rows []int64, slots []int32, dst cuda.Buffer,
	name string) (took gpuio.ReadStats, err error) {
	if len(rows) == 0 {
		return took, nil
	}
	n := min(prepare.FillRows, len(rows))
	ids, err := s.of.Device.Alloc(cuda.MemPinned, int64(n)*8, "tier fill rows")
	if err != nil {
		return took, err
	}
	defer func() { _ = ids.Free() }()
	pos, err := s.of.Device.Alloc(cuda.MemPinned, int64(n)*4, "tier fill slots")
	if err != nil {
		return took, err
	}
	defer func() { _ = pos.Free() }()
	idv, posv := hostmem.View[int64](ids.Bytes()), hostmem.View[uint32](pos.Bytes())
	ssds := len(s.SSDs)
	end := func(rows int) int64 { return int64(rows) }
	if slots != nil {
		end = func(int) int64 { return dst.Size() / s.of.RowBytes }
	}
	for at := 0; at < len(rows); at += n {
		if err := prepare.Interrupted(ctx); err != nil {
			return took, err
		}
		part := rows[at:min(at+n, len(rows))]
		off := make([]int64, ssds+1)
		for _, r := range part {
			off[r%int64(ssds)+1]++
		}
		for s := range ssds {
			off[s+1] += off[s]
		}
		next := append([]int64(nil), off...)
		for i, r := range part {
			k := next[r%int64(ssds)]
			next[r%int64(ssds)]++
			idv[k], posv[k] = r, uint32(at+i)
			if slots != nil {
				posv[k] = uint32(slots[at+i])
			}
		}
		op, cancel := s.of.ReadContext(ctx)
		p, err := s.Reader.Submit(op, &gpuio.ReadSet{
			Rows: ids.Ptr(), Pos: pos.Ptr(), SSDOffset: off, Dst: dst, DstStride: s.of.RowBytes,
			DstBytes: end(at+len(part)) * s.of.RowBytes,
		})
		if err == nil {
			var st gpuio.ReadStats
			st, err = p.Wait(op)
			took.Bytes += st.Bytes
			took.Commands += st.Commands
			took.Retries += st.Retries
			took.Timeouts += st.Timeouts
			took.Submit += st.Submit
			took.Complete += st.Complete
		}
		cancel()
		if err != nil {
			// The set's buffers may be freed only when nothing can read or write them.
			s.Stopped = ctx.Err() != nil
			cerr := s.Close()
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return took, errs.With(errs.Interrupted, errors.Join(stopped, cerr))
			}
			return took, fmt.Errorf("filling the %s: %w", name[len("fill "):],
				errors.Join(ReadError(err), cerr))
		}
		s.of.Observer.TellStep(name, at+len(part), len(rows))
	}
	return took, gpuio.Forget(s.Reader, dst) // no SSD writes there again
}

// ReadPages reads runs of the pages that the stack is open for into a buffer, one set behind the
// other. After an error no read is under way. told: the observer hears how far it is.
func (s *Store) ReadPages(ctx context.Context, runs []prepare.PageRun, dst cuda.Buffer, name string,
	told bool) (took gpuio.ReadStats, err error) {
	page := int64(s.Pages.Layout.RowBytes)
	sets, most := prepare.CutPages(runs, page)
	if len(sets) == 0 {
		return took, nil
	}
	total := int64(0)
	for _, r := range runs {
		total += r.Pages
	}
	most = min(most, total)
	ids, err := s.of.Device.Alloc(cuda.MemPinned, most*12, "numbers of pages")
	if err != nil {
		return took, err
	}
	defer func() { err = errors.Join(err, ids.Free()) }()
	list := hostmem.View[int64](ids.Bytes()[:most*8])
	places := hostmem.View[uint32](ids.Bytes()[most*8:])
	ssds := int64(len(s.Pages.SSDs))
	next := make([]int64, ssds)
	done := int64(0)
	for _, set := range sets { // their pages in their order on each SSD
		if err := prepare.Interrupted(ctx); err != nil {
			return took, err
		}
		off := make([]int64, ssds+1)
		for _, r := range set {
			for p := r.Page; p < r.Page+r.Pages; p++ {
				off[p%ssds+1]++
			}
		}
		for i := range ssds {
			off[i+1] += off[i]
		}
		copy(next, off)
		for _, r := range set {
			for i := range r.Pages {
				p := r.Page + i
				k := next[p%ssds]
				next[p%ssds]++
				list[k], places[k] = p, uint32(r.At+i)
			}
		}
		op, cancel := s.of.ReadContext(ctx)
		p, err := s.Reader.Submit(op, &gpuio.ReadSet{Rows: ids.Ptr(),
			Pos: ids.Ptr() + cuda.DevicePtr(most*8), SSDOffset: off, Dst: dst, DstStride: page,
			DstBytes: dst.Size() / page * page})
		if err == nil {
			var st gpuio.ReadStats
			st, err = p.Wait(op)
			took = report.AddReadStats(took, st)
		}
		cancel()
		if err != nil {
			// The buffers may be freed only when nothing can read or write them.
			s.Stopped = ctx.Err() != nil
			cerr := s.Close()
			if stopped := prepare.Interrupted(ctx); stopped != nil {
				return took, errs.With(errs.Interrupted, errors.Join(stopped, cerr))
			}
			return took, fmt.Errorf("%s: %w", name, errors.Join(ReadError(err), cerr))
		}
		done += off[ssds]
		if told {
			s.of.Observer.TellStep(name, int(done), int(total))
		}
	}
	return took, nil
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
	if err == nil {
		s.Reader = r
	}
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
