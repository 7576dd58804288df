package parted

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/graph"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
	"helios/internal/units"
)

// filler fills the pages: the edges in one pass or more over the topology, then the rows in one
// pass or more over the features. Both are read in their order, and each list and row goes to its
// place in the page that it belongs to, which is in memory until it is whole. A sweep fills the
// parts that have room for such pages at one time; the fewer, the more sweeps. A sweep costs one
// sequential read, and all pages are written once.
//
// A mark says that the pages are durable that a sweep had filled from the nodes before one. Going
// on from it, pages that are whole by then are left out, and the nodes that others have rows or
// lists of are read once more.
type filler struct {
	l       *Layout
	topo    *graph.Topology
	of      []uint32 // part by old number
	newOf   []uint32 // new number by old number
	to      pages.Writer
	o       *Options
	pool    int64 // bytes for pages
	block   int64 // bytes of rows read at one go
	mark    mark
	noted   time.Time
	stats   *Stats
	renamed []uint32 // neighbours
}

// mark says that the parts before First, and of those before End the nodes before Node, are done in
// a pass. Passes are of the edges, then of the rows.
type mark struct {
	ID    uuid.UUID `json:"id"`
	Pass  string    `json:"pass"`
	First int       `json:"first"`
	End   int       `json:"end"`
	Node  int64     `json:"node"`
}

// loadMark reads the mark of a folder; the zero value where there is none.
func loadMark(dir string, id uuid.UUID) (m mark, err error) {
	path := filepath.Join(dir, markName)
	b, err := infile.Read(path, mostManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return mark{}, nil
	}
	if err == nil {
		err = durable.Decode(b, &m)
	}
	if err == nil && (m.ID != id || m.First < 0 || m.End < m.First || m.Node < 0) {
		err = errors.New("it belongs to another layout")
	}
	if err != nil {
		return m, damagedAt(dir, "%s: %v", path, err)
	}
	return m, nil
}

// note makes durable what was written, and then how far it is.
func (f *filler) note(c *scatter) error {
	if c != nil {
		if err := c.settle(); err != nil {
			return err
		}
	}
	f.noted = time.Now()
	b, err := durable.Encode(f.mark)
	if err != nil {
		return err
	}
	return durably(f.l.Dir, markName, b)
}

// noteNow reports whether it is time for a mark.
func (f *filler) noteNow() bool { return time.Since(f.noted) >= f.o.MarkEvery }

// run fills all pages, from the mark on.
func (f *filler) run(ctx context.Context, lists *listKind, rows *rowKind) error {
	f.noted = time.Now()
	if f.mark.Pass != rows.name() {
		if err := f.pass(ctx, lists, f.scanEdges); err != nil {
			return err
		}
		f.mark = mark{ID: f.l.Spec.ID, Pass: rows.name()}
		if err := f.note(nil); err != nil {
			return err
		}
	}
	return f.pass(ctx, rows, f.readRows)
}

// pass does the sweeps of a kind.
func (f *filler) pass(ctx context.Context, k kind,
	sweep func(ctx context.Context, k kind, c *scatter) error) error {
	if f.mark.Pass != k.name() {
		f.mark = mark{ID: f.l.Spec.ID, Pass: k.name()}
	}
	for f.mark.First < f.l.Parts {
		limit := f.l.Parts
		if f.mark.Node > 0 { // the mark knows of no node of later parts
			limit = f.mark.End
		}
		end, buffers, err := f.group(k, f.mark.First, limit)
		if err != nil {
			return err
		}
		f.mark.End = end
		if err := f.sweep(ctx, k, buffers, sweep); err != nil {
			return err
		}
		f.mark.First, f.mark.Node = end, 0
		if err := f.note(nil); err != nil {
			return err
		}
	}
	return nil
}

// sweep fills the parts of the mark, and makes them durable.
func (f *filler) sweep(ctx context.Context, k kind, buffers int64,
	read func(ctx context.Context, k kind, c *scatter) error) (err error) {
	c, err := newScatter(ctx, f.to, f.l.Spec, buffers, f.o.Workers)
	if err != nil {
		return err
	}
	defer func() {
		// Where pages cannot be written, that is why there is nothing more to read.
		if cerr := c.close(); cerr != nil && ctx.Err() == nil {
			err = cerr
		}
		f.stats.BytesWritten += c.written
	}()
	if err := f.begin(k, c.left); err != nil {
		return err
	}
	k.rewind()
	if err := read(c.ctx, k, c); err != nil {
		return err
	}
	if err := c.settle(); err != nil {
		return err
	}
	if n := c.missing(); n > 0 && f.mark.End == f.l.Parts {
		return errs.New(errs.Failed, "%d pages of %s of the layout are not whole", n, k.name())
	}
	return nil
}

// group returns the end of the parts from first on that are filled together, and the pages that
// may be in memory.
func (f *filler) group(k kind, first, limit int) (end int, buffers int64, err error) {
	room := f.pool / f.l.Spec.PageBytes
	own, static := int64(0), int64(0)
	need := int64(0)
	for end = first; end < limit; end++ {
		o, s := k.buffers(end)
		own, static = own+o, static+s
		n := own + min(static, k.static().Pages) + int64(f.o.Workers)
		if n > room {
			break
		}
		need = n
	}
	if end == first {
		return 0, 0, f.tooLittle((own + static + int64(f.o.Workers) + 1) * f.l.Spec.PageBytes)
	}
	return end, max(need, 1), nil
}

// tooLittle refuses a bound of memory.
func (f *filler) tooLittle(pool int64) error {
	least := f.o.MemoryBytes - f.pool + pool
	return errs.New(errs.Usage,
		"the layout by part takes at least %s of memory (%s of it pages that are filled, 4 bytes a node, rows that are read), and it may take %s; give it more",
		units.FormatBytes(least), units.FormatBytes(pool), units.FormatBytes(f.o.MemoryBytes))
}

// begin sets the bytes that each page waits for: none where it was whole by the mark.
func (f *filler) begin(k kind, left []uint32) error {
	page := f.l.Spec.PageBytes
	k.sections(func(r Run, bytes int64) {
		for i := range r.Pages {
			left[r.Page+i] = uint32(min(page, bytes-i*page))
		}
	})
	if f.mark.First == 0 && f.mark.Node == 0 {
		return nil
	}
	// earlier counts what the sweeps before this one have put, before what this one has: a page
	// that neither has filled begins again.
	mem, err := hostmem.Alloc(8*int64(len(left)), "layout by part")
	if err != nil {
		return err
	}
	defer func() { _ = hostmem.Free(mem) }() // it is ours
	counts := hostmem.View[uint32](mem)
	earlier, before := counts[:len(left)], counts[len(left):]
	k.rewind()
	for v, part := range f.of {
		if int(part) >= f.mark.End {
			continue
		}
		for _, x := range k.pieces(int64(v), int(part), int64(f.newOf[v])) {
			for offset, n := x.offset, x.bytes; n > 0; {
				now := min(page-offset%page, n)
				if int(part) < f.mark.First {
					earlier[offset/page] += uint32(now)
				}
				if int64(v) < f.mark.Node {
					before[offset/page] += uint32(now)
				}
				offset, n = offset+now, n-now
			}
		}
	}
	for p, n := range left {
		if earlier[p] == n || before[p] == n {
			left[p] = 0
		}
	}
	return nil
}

// waits reports whether a page of the pieces is not whole.
func (c *scatter) waits(all []piece) bool {
	for _, x := range all {
		for page := x.offset / c.page; page*c.page < x.offset+x.bytes; page++ {
			if c.left[page] > 0 {
				return true
			}
		}
	}
	return false
}

// readRows is a sweep over the features. Rows are read while those before are put in place.
func (f *filler) readRows(ctx context.Context, k kind, c *scatter) (err error) {
	src, closeSource, err := f.o.Source()
	if err != nil {
		return err
	}
	defer errs.Closing(&err, closeSource)
	f.stats.RowSweeps++
	l, per := f.l, max(f.block/f.l.RowBytes, 1)
	var bufs [2][]byte
	for i := range bufs {
		if bufs[i], err = hostmem.Alloc(per*l.RowBytes, "layout by part"); err != nil {
			return err
		}
		defer errs.Closing(&err, func() error { return hostmem.Free(bufs[i]) })
	}
	read := func(from int64, buf []byte) (rowBlock, chan error) {
		b := f.needed(k, c, from, min(from+per, l.Nodes))
		done := make(chan error, 1)
		if b.end == b.first {
			done <- nil
			return b, done
		}
		f.stats.RowBytesRead += (b.end - b.first) * l.RowBytes
		go func() { done <- src.ReadRows(ctx, b.first, b.end-b.first, buf) }()
		return b, done
	}
	now, done := read(0, bufs[0])
	for from, turn := int64(0), 0; from < l.Nodes; from, turn = from+per, turn^1 {
		if err := <-done; err != nil {
			return err
		}
		next, ready := rowBlock{}, (chan error)(nil)
		if from+per < l.Nodes {
			next, ready = read(from+per, bufs[turn^1])
		}
		err := f.putRows(k, c, now.first, now.end, bufs[turn])
		if end := min(from+per, l.Nodes); err == nil && f.noteNow() && end > f.mark.Node {
			f.mark.Node = end
			err = f.note(c)
		}
		if err != nil {
			if ready != nil {
				<-ready // it reads into memory that is about to go
			}
			return err
		}
		f.o.Progress.Report("lay out rows by part", min(from+per, l.Nodes), l.Nodes)
		now, done = next, ready
	}
	return nil
}

// rowBlock is the rows first to end-1.
type rowBlock struct{ first, end int64 }

// needed returns the least block of the rows from to to-1 that holds all that wait for pages.
func (f *filler) needed(k kind, c *scatter, from, to int64) rowBlock {
	b := rowBlock{from, from}
	for v := from; v < to; v++ {
		part := int(f.of[v])
		if part < f.mark.End && c.waits(k.pieces(v, part, int64(f.newOf[v]))) {
			if b.end == from {
				b.first = v
			}
			b.end = v + 1
		}
	}
	return b
}

// putRows puts rows first to end-1.
func (f *filler) putRows(k kind, c *scatter, first, end int64, data []byte) error {
	for v := first; v < end; v++ {
		part := int(f.of[v])
		if part >= f.mark.End {
			continue
		}
		row := data[(v-first)*f.l.RowBytes:][:f.l.RowBytes]
		for _, x := range k.pieces(v, part, int64(f.newOf[v])) {
			if err := c.put(x.offset, row); err != nil {
				return err
			}
		}
	}
	return nil
}

// scanEdges is a sweep over the topology.
func (f *filler) scanEdges(ctx context.Context, k kind, c *scatter) error {
	f.stats.EdgeSweeps++
	s := listSweep{filler: f, k: k, c: c, v: -1}
	err := f.topo.Scan(ctx, func(first int64, ids []uint32) error {
		f.stats.EdgesRead += int64(len(ids))
		for len(ids) > 0 {
			for s.v < 0 || f.topo.Indptr[s.v+1] == first {
				if err := s.next(); err != nil {
					return err
				}
			}
			now := ids[:min(f.topo.Indptr[s.v+1]-first, int64(len(ids)))]
			if err := s.put(first, now); err != nil {
				return err
			}
			first, ids = first+int64(len(now)), ids[len(now):]
		}
		f.o.Progress.Report("lay out edges by part", first, f.topo.NumEdges)
		// The nodes before v are done.
		if f.noteNow() && s.v > f.mark.Node {
			f.mark.Node = s.v
			return f.note(c)
		}
		return nil
	})
	for err == nil && s.v < f.l.Nodes-1 {
		err = s.next()
	}
	return err
}

// listSweep puts the lists of nodes one after the other.
type listSweep struct {
	*filler
	k     kind
	c     *scatter
	v     int64
	lists [2]int64 // offsets of the rest of v's list
	n     int      // how many of them there are
}

// next goes to the next node, and puts all but its list.
func (s *listSweep) next() error {
	s.v++
	s.n = 0
	part, id := int(s.of[s.v]), int64(s.newOf[s.v])
	if part >= s.mark.End {
		return nil
	}
	all := s.k.pieces(s.v, part, id)
	degree, old := uint32(s.topo.InDegree(s.v)), uint32(s.v)
	for ; len(all) > 0; all = all[3:] {
		if err := errors.Join(s.c.put(all[0].offset, hostmem.Bytes([]uint32{degree})),
			s.c.put(all[1].offset, hostmem.Bytes([]uint32{old}))); err != nil {
			return err
		}
		s.lists[s.n] = all[2].offset
		s.n++
	}
	return nil
}

// put puts some of v's list, whose first is edge number first.
func (s *listSweep) put(first int64, ids []uint32) error {
	if s.n == 0 {
		return nil
	}
	s.renamed = s.renamed[:0]
	for _, id := range ids {
		if int64(id) >= s.l.Nodes {
			return dataset.BadID(dataset.IndicesName, first, int64(id), s.l.Nodes)
		}
		s.renamed = append(s.renamed, s.newOf[id])
	}
	for i := range s.lists[:s.n] {
		if err := s.c.put(s.lists[i], hostmem.Bytes(s.renamed)); err != nil {
			return err
		}
		s.lists[i] += 4 * int64(len(ids))
	}
	return nil
}

// removeMark removes the mark of a layout that is whole.
func removeMark(dir string) error {
	err := os.Remove(filepath.Join(dir, markName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
