package stripe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/work"
	"helios/nvme"
)

// LoadOptions shape a load.
type LoadOptions struct {
	// Force holds serial numbers, separated by commas, of SSDs that may be overwritten
	// whatever they hold.
	Force string
	// NoRowChecksums leaves the CRC32C of each row out, and with it checked reads
	// (gpuio.NewChecked).
	NoRowChecksums bool
	// RowType is the form in which rows are stored, by name; empty: the dataset's own.
	RowType string
	// Restart starts over where an interrupted load could be resumed.
	Restart bool
	// MarkEvery is the time between marks of how far the load is; 0 chooses: a second, or more
	// where flushes are slow, so that marks take less than 1 % of the time.
	MarkEvery time.Duration
	Progress  work.Progress
	// Note hears of the point from which the load resumes, or why it starts over. Nil is silent.
	Note func(string)

	// For tests: when a mark is made (markDue), and how much of features.npy is read at a time
	// (readBytes).
	due  func(since, cost time.Duration) bool
	read int64
	// the SSDs may have other users; simulated ones have none
	shared bool
}

// LoadReport counts the bytes that a load wrote.
type LoadReport struct {
	SSDs       int    `json:"ssds"`
	Stripes    int    `json:"stripes"` // more than SSDs where larger ones have several
	Rows       int64  `json:"rows"`
	RowDType   string `json:"row_dtype"` // of the rows on the SSDs
	RowBytes   int    `json:"row_bytes"`
	RowsPerLBA int    `json:"rows_per_lba"` // 1 when padded
	LBAsPerRow int    `json:"lbas_per_row"` // 1 when packed
	// feature extents on all SSDs, padding included
	DataBytes    int64 `json:"data_bytes"`
	PaddingBytes int64 `json:"padding_bytes"`
	Chunks       int64 `json:"chunks"` // checksummed, 1 MiB each
	// bytes of their tables on all SSDs; 0: none
	RowChecksums int64 `json:"row_checksums"`
	RowScales    int64 `json:"row_scales,omitempty"`
	// of DataBytes: what an interrupted load had left, and was not written again
	ResumedBytes int64 `json:"resumed_bytes"`
	// why an interrupted load was not resumed
	StartedOver string `json:"started_over,omitempty"`
	Marks       int    `json:"marks"` // progress marks, on all SSDs
	// they took, on the SSD where they took longest
	MarkSeconds float64 `json:"mark_seconds"`
	// of an interrupted load: bytes of DataBytes that the next one need not write
	OnFlash int64 `json:"-"`
	// all that a load of this layout writes
	Extents []SSDExtents `json:"extents"`
	// nothing was loaded: the SSDs compute the dataset
	Computed bool          `json:"computed,omitempty"`
	Seconds  float64       `json:"seconds"`
	Layout   gpuio.Layout  `json:"-"`
	Duration time.Duration `json:"-"`
}

// Load stripes the features over the SSDs, in the order given. It refuses SSDs that hold
// something else (errors of class refused) before it writes to any of them.
//
// The order of writes makes every interruption visible: superblocks in state "loading" first,
// flush; data and checksums of chunks and rows, flush; superblocks in state "complete", flush. A
// stripe that was being loaded when power failed is either still the old one, untouched, or not
// complete. That rests on the SSD's word that what it flushed is durable; where it lies, Verify
// finds what the checksums cover: rows, tables and superblocks.
//
// Now and then, and when ctx ends, a load flushes and notes its progress in the superblocks (Mark).
// The next load of the same dataset with the same options over the same SSDs in the same order goes
// on there: it reads features.npy from the start, for the checksums, and writes what is missing. It
// has the same result, byte for byte, as a load that was never interrupted. Where anything speaks
// against that (what is on the SSDs does not belong together, features.npy is not what was loaded,
// a sample read back is not what was written) it starts over, and the report has the reason. After
// an error the report holds OnFlash.
func Load(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, o LoadOptions) (r LoadReport,
	err error) {
	if err := distinct(ssds); err != nil {
		return r, err
	}
	o.shared = true
	err = withTargets(ctx, ssds, func(ts []*target) error {
		r, err = load(ctx, d, ts, o)
		return err
	})
	return r, err
}

// distinct refuses SSDs that are two paths to one namespace.
func distinct(ssds []*gpuio.SSD) error {
	for i, s := range ssds {
		for _, o := range ssds[:i] {
			if s.Ctrl != o.Ctrl && s.Ctrl.NamespaceID().Same(o.Ctrl.NamespaceID()) {
				return errs.New(errs.Refused,
					"ssds %s and %s are two paths to one namespace (%v): each would overwrite what the other holds; leave one of them out",
					o.Name, s.Name, s.Ctrl.NamespaceID())
			}
		}
	}
	return nil
}

func load(ctx context.Context, d *dataset.Dataset, ts []*target, o LoadOptions) (_ LoadReport,
	err error) {
	start := time.Now()
	if err := checkTargets(ts); err != nil {
		return LoadReport{}, err
	}
	w, err := newLoader(d, ts, o)
	if err != nil {
		return LoadReport{}, err
	}
	if w.rooms, err = checkAllFree(ctx, d, ts, o.Force); err != nil {
		return LoadReport{}, err
	}
	if w.places, err = w.choosePlaces(w.rooms); err != nil {
		return LoadReport{}, err
	}
	r, err := w.layOut()
	if err != nil {
		return LoadReport{}, err
	}
	if o.shared {
		if w.lease, err = holdEach(ctx, ts, w.scope, o.Note); err != nil {
			return LoadReport{}, fmt.Errorf("load of %s: %w", d.Dir(), err)
		}
		defer func() { err = errors.Join(err, w.lease.Close()) }()
		for i := range w.rooms {
			if err := w.rooms[i].same(ctx); err != nil {
				return LoadReport{}, fmt.Errorf("load of %s: %w", d.Dir(), err)
			}
		}
	}
	began, err := w.write(ctx, &r)
	if !began {
		return LoadReport{}, err
	}
	r.Duration = time.Since(start)
	r.Seconds = r.Duration.Seconds()
	r.Marks = w.marks
	r.MarkSeconds = slices.Max(w.cost).Seconds()
	if err != nil {
		for i := range w.sb {
			r.OnFlash += w.geo[i].bytesOn(w.sb[i].Mark)
		}
		return r, fmt.Errorf("load of %s: %w", d.Dir(), err)
	}
	return r, nil
}

// checkTargets refuses SSDs that cannot hold one dataset together.
func checkTargets(ts []*target) error {
	serials := map[string]string{}
	for _, t := range ts {
		if t.lbaBytes != ts[0].lbaBytes {
			return errs.New(errs.Usage,
				"ssd %s has LBAs of %d bytes and %s of %d; all SSDs of a dataset must agree, choose others with {ssds}",
				ts[0].name, ts[0].lbaBytes, t.name, t.lbaBytes)
		}
		if other, twice := serials[t.name]; twice {
			return errs.New(errs.Usage, "ssd %s is given twice (serial %s)", t.name, other)
		}
		serials[t.name] = t.serial
	}
	return nil
}

// needRows refuses a dataset without rows.
func needRows(d *dataset.Dataset) error {
	if d.Meta.Rows() > 0 {
		return nil
	}
	return errs.New(errs.Capability,
		"dataset %s: none of its types has rows, so there is nothing for SSDs to hold; import it with rows",
		d.Dir())
}

// newLoader makes a load that has no place yet.
func newLoader(d *dataset.Dataset, ts []*target, o LoadOptions) (w *loader, err error) {
	rt := d.Meta.RowType()
	if o.RowType != "" {
		if rt, err = rowtype.Parse(o.RowType); err != nil {
			return nil, err
		}
	}
	if err := needRows(d); err != nil {
		return nil, err
	}
	w = &loader{d: d, rows: d.RowsAs(rt), rt: rt, o: o}
	switch {
	case o.due != nil:
	case o.MarkEvery > 0:
		w.o.due = func(since, _ time.Duration) bool { return since >= o.MarkEvery }
	default:
		w.o.due = markDue
	}
	if w.o.read == 0 {
		w.o.read = readBytes
	}
	return w, nil
}

// layOut makes the superblocks of all stripes, and reports their sizes.
func (w *loader) layOut() (r LoadReport, err error) {
	l, sums := &w.l, !w.o.NoRowChecksums
	r = LoadReport{SSDs: len(w.rooms), Stripes: len(w.places), Rows: l.Rows,
		RowDType: w.rt.String(), RowBytes: int(l.RowBytes),
		RowsPerLBA: int(l.RowsPerLBA), LBAsPerRow: int(l.LBAsPerRow),
		PaddingBytes: l.PaddingBytes(), Layout: *l}
	w.cost, w.last = make([]time.Duration, len(w.places)), make([]time.Duration, len(w.places))
	for i := range w.places {
		p := &w.places[i]
		sb := newSuperblock(w.d, l, &p.g, i, w.rt, p.t.lbas, sums)
		sb.Shared = p.shared || p.t.slot > 0 || len(w.onDisk(p.disk)) > 1
		w.ts, w.geo, w.sb = append(w.ts, p.t), append(w.geo, p.g), append(w.sb, sb)
		old := &p.c.sb[0]
		w.was = append(w.was, p.c.err[0] == nil && isOurs(w.d, old) && old.UUID != w.d.UUID())
		e, err := extentsOf(p.t, &sb)
		if err != nil {
			return r, err
		}
		r.Extents = append(r.Extents, e)
		r.DataBytes += p.g.dataBytes
		r.Chunks += p.g.chunks
		if p.g.rowEntry > 0 {
			each := p.g.rowTableLBAs * int64(p.t.lbaBytes) / p.g.rowEntry * 4
			if sums {
				r.RowChecksums += each
			}
			if w.rt.Scaled() {
				r.RowScales += each
			}
		}
	}
	return r, nil
}

// scope is the dataset that the load writes to an SSD; uuid.Nil where it is to hold no other, or
// others may use it by an earlier UUID.
func (w *loader) scope(disk int) uuid.UUID {
	stripes := w.onDisk(disk)
	was := func(i int) bool { return w.was[i] }
	if w.alone(disk, stripes) || slices.ContainsFunc(stripes, was) {
		return uuid.Nil
	}
	return w.d.UUID()
}

// alone reports whether an SSD is to hold nothing else.
func (w *loader) alone(disk int, stripes []int) bool {
	return !w.rooms[disk].shared && w.ts[stripes[0]].slot == 0
}

// write resumes the interrupted load that the SSDs hold, or writes everything. False: it has not
// begun.
func (w *loader) write(ctx context.Context, r *LoadReport) (began bool, err error) {
	old, id, why := w.resumable(w.places)
	if w.o.Restart && old != nil {
		old, why = nil, "a restart was asked for"
	}
	if old != nil {
		r.ResumedBytes = w.goOn(old, id)
		w.note(
			"%.0f %% of %s are on the SSDs from a load that was interrupted; going on there; a restart starts over",
			100*float64(r.ResumedBytes)/float64(r.DataBytes), w.d.Dir())
		err = w.run(ctx, old)
		var s *staleError
		if errors.As(err, &s) {
			old, why, r.ResumedBytes = nil, s.why, 0
		}
	}
	if why != "" {
		r.StartedOver = why
		w.note("starting over, not where the interrupted load was: %s", why)
	}
	if old != nil {
		return true, err
	}
	if err := w.begin(); err != nil {
		return false, err
	}
	if old = w.asItWas(ctx, w.places); old != nil {
		w.note("the SSDs hold %s as it was before an import added to it: chunks that are the same are not written",
			w.d.Dir())
		err = w.run(ctx, old)
		var s *staleError
		if !errors.As(err, &s) {
			r.ResumedBytes = w.kept
			return true, err
		}
		w.note("writing all of it: %s", s.why)
		if err := w.begin(); err != nil {
			return false, err
		}
	}
	return true, w.run(ctx, nil)
}

// checkAllFree is checkFree of all SSDs; what it refuses, it names once for all.
func checkAllFree(ctx context.Context, d *dataset.Dataset, ts []*target, force string) ([]room,
	error) {
	var taken error
	var serial []string
	var found []room
	for _, t := range ts {
		c, err := t.checkFree(ctx, d, force)
		if err != nil && errs.ClassOf(err) != errs.Refused {
			return nil, err
		}
		if err != nil {
			serial = append(serial, t.forceName())
			if taken == nil {
				taken = err
			}
		}
		found = append(found, c)
	}
	if len(serial) > 1 {
		return nil,
			errs.Errorf("%w; %d of the %d SSDs hold something: {force} %s overwrites all of them",
				taken, len(serial), len(ts), strings.Join(serial, ","))
	}
	return found, taken
}

// readBytes of features.npy are read at a time.
const readBytes = 4 << 20

type loader struct {
	d      *dataset.Dataset
	rows   *dataset.RowReader
	rt     rowtype.Type
	l      gpuio.Layout
	o      LoadOptions
	rooms  []room   // by SSD
	places []placed // by stripe, as all that follow
	ts     []*target
	geo    []geometry
	sb     []Superblock
	was    []bool // the slot has the dataset as it was before imports added to it
	// says that the SSDs are written, once that is known to be right; nil: it isn't said
	lease *Lease

	mu    sync.Mutex
	marks int
	kept  int64           // bytes of chunks that were there and stay
	cost  []time.Duration // of the marks of each SSD
	last  []time.Duration // what the last mark of each SSD has taken
}

func (w *loader) note(format string, a ...any) {
	if w.o.Note != nil {
		w.o.Note(fmt.Sprintf(format, a...))
	}
}

// scaled reports whether the rows have scales beside them.
func (w *loader) scaled() bool { return w.sb[0].RowType.Scaled() }

// begin makes w a new load.
func (w *loader) begin() error {
	id, err := uuid.NewRandom()
	if err != nil {
		return fmt.Errorf("a random identity for the load: %w", err)
	}
	for i := range w.sb {
		w.sb[i].LoadID, w.sb[i].Mark, w.sb[i].TableCRC, w.sb[i].RowTableCRC = id, Mark{}, 0, 0
	}
	return nil
}

// goOn makes w the load that was interrupted, and returns how many bytes it need not write.
func (w *loader) goOn(old []oldStripe, id uuid.UUID) (there int64) {
	for i := range w.sb {
		w.sb[i].LoadID, w.sb[i].Mark = id, old[i].mark
		there += w.geo[i].bytesOn(old[i].mark)
	}
	return there
}

// each runs fn for all SSDs at once.
func (w *loader) each(ctx context.Context, fn func(ctx context.Context, i int,
	t *target) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, t := range w.ts {
		g.Go(func() error {
			if err := fn(ctx, i, t); err != nil {
				return fmt.Errorf("ssd %s: %w", t.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// run writes what is missing: all of it, or what is behind the marks of old.
func (w *loader) run(ctx context.Context, old []oldStripe) error {
	g, gctx := errgroup.WithContext(ctx)
	for disk := range w.rooms {
		g.Go(func() error {
			if err := w.openDisk(gctx, disk, old); err != nil {
				return fmt.Errorf("ssd %s: %w", w.rooms[disk].t.name, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if w.lease != nil { // it was among what is zeros now
		w.lease.renew(ctx)
	}
	if err := w.writeData(ctx, old); err != nil {
		return err
	}
	return w.each(ctx, func(ctx context.Context, i int, t *target) error {
		return w.writeSuperblocks(ctx, i, StateComplete)
	})
}

// openDisk says on an SSD that it is being loaded: superblocks that are left over from another
// spread go first, then those of all stripes are written. Where the dataset is alone and new there,
// marks of other formats at both ends go behind the first of them, so that no tool takes the SSD
// for theirs.
func (w *loader) openDisk(ctx context.Context, disk int, old []oldStripe) error {
	stripes := w.onDisk(disk)
	fresh := w.alone(disk, stripes)
	for _, i := range stripes {
		fresh = fresh && (old == nil || old[i].mark == (Mark{})) // else it went before the mark
	}
	start := time.Now()
	if !fresh { // else the first superblock hides all others
		// Where one of them was being written when the load was cut off, both are well again now.
		if w.sb[stripes[0]].Shared {
			if err := w.ts[stripes[0]].settleOthers(ctx); err != nil {
				return err
			}
		}
		if err := w.freeLeftover(ctx, &w.rooms[disk], stripes); err != nil {
			return err
		}
	}
	for k, i := range stripes {
		t := w.ts[i]
		if old != nil && old[i].complete {
			continue
		}
		w.sb[i].Shared = w.sb[i].Shared && !(fresh && k == 0)
		if t.slot > 0 {
			if err := t.putShared(ctx, true); err != nil {
				return err
			}
			w.sb[stripes[0]].Shared = true
		}
		if err := w.writeSuperblocks(ctx, i, StateLoading); err != nil {
			return err
		}
		w.last[i] = time.Since(start)
		if fresh && k == 0 {
			if err := t.clearEnds(ctx, &w.geo[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// clearEnds writes zeros between the superblocks in slot 0 and the room for datasets.
func (t *target) clearEnds(ctx context.Context, g *geometry) error {
	zeros := make([]byte, headBytes)
	if err := t.dev.WriteAt(ctx, superblockBytes/nvme.LBA(g.lbaBytes),
		zeros[superblockBytes:]); err != nil {
		return err
	}
	if err := t.dev.WriteAt(ctx, g.tailLBA, zeros[:tailBytes-superblockBytes]); err != nil {
		return err
	}
	end := g.secondLBA + nvme.LBA(superblockBytes/g.lbaBytes)
	// less than 4 KiB beyond the last 4 KiB bound
	if rest := int64(t.lbas) - int64(end); rest > 0 {
		return t.dev.WriteAt(ctx, end, zeros[:rest*int64(g.lbaBytes)])
	}
	return nil
}

// writeSuperblocks writes both copies, one after the other, each durable before the next: a
// torn write can then damage only one.
func (w *loader) writeSuperblocks(ctx context.Context, i int, st State) error {
	t := w.ts[i]
	sb := w.sb[i]
	if sb.State = st; st == StateComplete {
		sb.Mark = Mark{}
	} else {
		sb.TableCRC, sb.RowTableCRC = 0, 0
	}
	return t.putSuperblocks(ctx, &sb)
}

// superblocks keeps goroutines of this process from reading a superblock while it is written, as
// those of pages are while a run trains.
var superblocks sync.RWMutex

// putSuperblocks writes both copies, the first of them first, each durable before the next.
func (t *target) putSuperblocks(ctx context.Context, sb *Superblock) error {
	superblocks.Lock()
	defer superblocks.Unlock()
	for c := range 2 {
		b, err := sb.encode(c)
		if err != nil {
			return err
		}
		if err := t.dev.WriteAt(ctx, t.copyLBA(c), b); err != nil {
			return err
		}
		if err := t.dev.Flush(ctx); err != nil {
			return err
		}
	}
	return nil
}

// writeData reads features.npy once, from front to back, and deals its rows to the stripes.
func (w *loader) writeData(ctx context.Context, old []oldStripe) error {
	g, ctx := errgroup.WithContext(ctx)
	stripes := make([]*stripeWriter, len(w.ts))
	for i := range w.ts {
		stripes[i] = newStripeWriter(w.l, w.geo[i], !w.o.NoRowChecksums, w.scaled())
	}
	g.Go(func() error { return w.deal(ctx, stripes) })
	for i := range w.ts {
		g.Go(func() error {
			p := newHeadway(&w.geo[i])
			if old != nil {
				p.old = &old[i]
			}
			return w.drainAndMark(ctx, i, stripes[i], p)
		})
	}
	return g.Wait()
}

// deal reads features.npy and gives each row to its stripe.
func (w *loader) deal(ctx context.Context, stripes []*stripeWriter) error {
	row := int64(w.l.RowBytes)
	n := int64(len(stripes))
	buf := make([]byte, max(w.o.read/row, 1)*row)
	scales := make([]float32, int64(len(buf))/row)
	marked := time.Now()
	for next := int64(0); next < w.l.Rows; {
		b := buf[:min(int64(len(buf)), (w.l.Rows-next)*row)]
		if err := w.rows.ReadScaled(next, b, scales); err != nil {
			return err
		}
		for k := 0; len(b) > 0; next, k = next+1, k+1 {
			if err := stripes[next%n].put(ctx, next/n, b[:row], scales[k]); err != nil {
				return err
			}
			b = b[row:]
		}
		w.o.Progress.Report("load", next, w.l.Rows)
		// All SSDs are marked at once: while one flushes, the others soon wait for rows.
		if now := time.Now(); w.o.due(now.Sub(marked), w.markCost()) {
			marked = now
			for _, s := range stripes {
				if err := s.give(ctx, piece{mark: true}); err != nil {
					return err
				}
			}
		}
	}
	for _, s := range stripes {
		if err := s.end(ctx); err != nil {
			return err
		}
	}
	// Only now: a writer that sees its stripe end early would take that for the failure.
	for _, s := range stripes {
		close(s.full)
	}
	return nil
}

// drainAndMark drains a stripe. A load that is interrupted leaves a last mark.
func (w *loader) drainAndMark(ctx context.Context, i int, s *stripeWriter, p *headway) error {
	err := w.drain(ctx, i, w.ts[i], s, p)
	if err == nil {
		return nil
	}
	var stale *staleError
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) && !errors.As(context.Cause(ctx), &stale) {
		w.lastMark(ctx, i, p)
	}
	return fmt.Errorf("ssd %s: %w", w.ts[i].name, err)
}

// markCost returns what the last mark has cost: the SSDs make theirs at once.
func (w *loader) markCost() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Max(w.last)
}

// marked counts a mark of SSD i.
func (w *loader) marked(i int, cost time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.marks++
	w.cost[i] += cost
	w.last[i] = cost
}

// drain writes the chunks and the row table of one stripe as they come, then its chunk table; or
// looks at what is there already.
func (w *loader) drain(ctx context.Context, i int, t *target, s *stripeWriter, pr *headway) error {
	g := &w.geo[i]
	data, rows := stream{next: g.dataLBA}, stream{next: g.rowTableLBA}
	var back []byte
	if pr.old != nil {
		back = make([]byte, chunkBytes)
	}
	for {
		var p piece
		var more bool
		select {
		case p, more = <-s.full:
		case <-ctx.Done():
			return ctx.Err()
		}
		if !more {
			break
		}
		if p.mark {
			if err := w.leaveMark(ctx, i, pr); err != nil {
				return err
			}
			continue
		}
		if err := pr.check(t.name); err != nil {
			return err
		}
		to := &data
		if p.sums {
			to = &rows
		}
		if err := to.take(ctx, t, p, pr, back); err != nil {
			return err
		}
		pr.add(p.buf, p.sums)
		s.free <- p.buf[:0] // never blocks: there are as many places as buffers
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	w.mu.Lock()
	w.kept += pr.kept
	w.mu.Unlock()
	return w.endStripe(ctx, i, pr, rows.bytes)
}

// endStripe writes the chunk table behind a stripe's data.
func (w *loader) endStripe(ctx context.Context, i int, pr *headway, rowBytes int64) error {
	g, t := &w.geo[i], w.ts[i]
	if pr.chunks != g.chunks || rowBytes != g.rowTableLBAs*int64(g.lbaBytes) {
		return fmt.Errorf(
			"wrote %d chunks of %d and %d bytes of the row table of %d: the layout and the extents disagree",
			pr.chunks, g.chunks, rowBytes, g.rowTableLBAs*int64(g.lbaBytes))
	}
	tableCRC := crc32.Checksum(pr.table[:4*g.chunks], castagnoli)
	if err := pr.checkEnd(t.name, tableCRC); err != nil {
		return err
	}
	if err := t.dev.WriteAt(ctx, g.tableLBA, pr.table); err != nil {
		return err
	}
	w.sb[i].TableCRC, w.sb[i].RowTableCRC = tableCRC, pr.rowCRC
	return t.dev.Flush(ctx)
}

// stream is an extent that is written from front to back.
type stream struct {
	next  nvme.LBA
	bytes int64 // written so far
}

// take puts a piece behind those before. Where an interrupted load has written it, it is compared
// with what is there instead, or taken for that.
func (s *stream) take(ctx context.Context, t *target, p piece, pr *headway,
	back []byte) (err error) {
	b, n, name := p.buf, pr.chunks, "chunk"
	if p.sums {
		n, name = pr.pieces, "piece of the row table"
		b = append(b, zeroBlock[:-len(b)&(alignBytes-1)]...)
	}
	switch {
	case !pr.there(p.buf, p.sums):
		err = t.dev.WriteAt(ctx, s.next, b)
	case pr.samples(n, p.sums):
		err = compare(ctx, t, s.next, b, back, name, n)
	}
	s.next += nvme.LBA(len(b) / t.lbaBytes)
	s.bytes += int64(len(b))
	return err
}

// stripeWriter lays rows out as the layout says and cuts the result into chunks; beside them it
// makes the row table.
type stripeWriter struct {
	l       gpuio.Layout
	full    chan piece
	free    chan []byte
	buf     []byte
	pos     int64 // bytes laid out so far
	size    int64
	rowSums bool
	scaled  bool
	sums    []byte // the row table from its last piece on
}

// piece is up to 1 MiB of a stripe's extent or of its row table; or the word that a mark is due.
type piece struct {
	buf  []byte
	sums bool
	mark bool
}

func newStripeWriter(l gpuio.Layout, g geometry, rowSums, scaled bool) *stripeWriter {
	s := &stripeWriter{l: l, full: make(chan piece, 2), free: make(chan []byte, 4),
		size: g.dataBytes, rowSums: rowSums, scaled: scaled}
	for range cap(s.free) {
		s.free <- make([]byte, 0, chunkBytes)
	}
	return s
}

// slotOffset returns the first byte of a slot in the extent.
func slotOffset(l gpuio.Layout, slot int64) int64 {
	per := int64(l.RowsPerLBA)
	return slot/per*int64(l.LBAsPerRow)*int64(l.LBABytes) + slot%per*int64(l.RowBytes)
}

// put lays out a row; slots come in order.
func (s *stripeWriter) put(ctx context.Context, slot int64, row []byte, scale float32) error {
	if err := s.zeroTo(ctx, slotOffset(s.l, slot)); err != nil {
		return err
	}
	if s.rowSums || s.scaled {
		if err := s.fresh(ctx, &s.sums); err != nil {
			return err
		}
		if s.rowSums {
			s.sums = binary.LittleEndian.AppendUint32(s.sums, crc32.Checksum(row, castagnoli))
		}
		if s.scaled {
			s.sums = binary.LittleEndian.AppendUint32(s.sums, math.Float32bits(scale))
		}
		if len(s.sums) == chunkBytes {
			if err := s.send(ctx, &s.sums, true); err != nil {
				return err
			}
		}
	}
	return s.append(ctx, row)
}

// fresh gives *b a buffer if it has none.
func (s *stripeWriter) fresh(ctx context.Context, b *[]byte) error {
	if *b != nil {
		return nil
	}
	select {
	case *b = <-s.free:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *stripeWriter) append(ctx context.Context, b []byte) error {
	for len(b) > 0 {
		if err := s.fresh(ctx, &s.buf); err != nil {
			return err
		}
		n := min(len(b), chunkBytes-len(s.buf))
		s.buf = append(s.buf, b[:n]...)
		s.pos += int64(n)
		b = b[n:]
		if len(s.buf) == chunkBytes {
			if err := s.send(ctx, &s.buf, false); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *stripeWriter) send(ctx context.Context, b *[]byte, sums bool) error {
	if len(*b) == 0 {
		return nil
	}
	if err := s.give(ctx, piece{buf: *b, sums: sums}); err != nil {
		return err
	}
	*b = nil
	return nil
}

func (s *stripeWriter) give(ctx context.Context, p piece) error {
	select {
	case s.full <- p:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var zeroBlock [alignBytes]byte

func (s *stripeWriter) zeroTo(ctx context.Context, pos int64) error {
	for s.pos < pos {
		if err := s.append(ctx, zeroBlock[:min(pos-s.pos, alignBytes)]); err != nil {
			return err
		}
	}
	return nil
}

func (s *stripeWriter) end(ctx context.Context) error {
	if err := s.zeroTo(ctx, s.size); err != nil {
		return err
	}
	if err := s.send(ctx, &s.buf, false); err != nil {
		return err
	}
	return s.send(ctx, &s.sums, true)
}
