package packed

import (
	"cmp"
	"context"
	"encoding/binary"
	"math"
	"slices"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
)

// pieceBytes is about how much of a disk cache the packer brings into order at one time.
const pieceBytes = 8 << 20

// laid is the part of a mini-batch's plan that does not depend on the place of its chunk.
type laid struct {
	runs      []Run // of the disk cache
	body      []byte
	list      []byte
	ranks     []uint32
	slots     []uint32
	rowsHot   int64
	rowsChunk int64
	rowsCache int64
	copies    int64
	readPages int64
	width     [2]int
	rowsAll   int64
}

// lay writes a segment: its disk cache behind the pages so far, then the chunks.
func (b *builder) lay(ctx context.Context, s *segment, v split, r *Result, w *writer) error {
	base := r.Stats.Pages
	st := &r.Stats
	st.Segments++
	st.CacheRows += int64(len(s.order))
	cachePages := b.shape.PagesOf(int64(len(s.order)))
	st.CachePages += cachePages
	st.Pages += cachePages
	if err := b.pieces(s, base, w); err != nil {
		return err
	}
	group := make([]laid, b.c.Workers)
	for from := s.first; from < s.end; from += len(group) {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(len(group), s.end-from)
		var g errgroup.Group
		for i := range n {
			g.Go(func() error {
				rows, err := b.read(i, from+i)
				if err == nil {
					err = b.one(s, &b.scratch[i], &group[i], from+i, v, base, rows)
				}
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		for i := range n {
			x := &group[i]
			chunkPages := b.shape.PagesOf(x.rowsChunk)
			if err := w.batch(x, st.Pages, chunkPages); err != nil {
				return err
			}
			if x.rowsChunk > 0 {
				if err := w.stream(Stream{Page: st.Pages, Rows: x.rowsChunk}, x.list,
					nil); err != nil {
					return err
				}
				st.ChunkRuns++
			}
			st.Accesses += x.rowsAll
			st.HotAccesses += x.rowsHot
			st.CacheAccesses += x.rowsCache
			st.ChunkAccesses += x.rowsChunk
			st.ChunkRows += x.rowsChunk
			st.Copies += x.copies
			st.CacheReadPages += x.readPages
			st.CacheRuns += int64(len(x.runs))
			st.ChunkPages += chunkPages
			st.Pages += chunkPages
			st.MostReadPages = max(st.MostReadPages, x.readPages+chunkPages)
		}
	}
	return nil
}

// one lays a mini-batch out.
func (b *builder) one(s *segment, x *scratch, to *laid, batch int, v split, base int64,
	rows []int64) error {
	perPage := uint32(b.shape.RowsPerPage)
	*to = laid{runs: to.runs[:0], body: to.body[:0], list: to.list[:0], ranks: to.ranks[:0],
		slots: to.slots[:0], rowsAll: int64(len(rows))}
	defer x.clean()
	if err := b.count(s, x, batch, rows, func(_ int, rank uint32) {
		to.ranks = append(to.ranks, rank)
	}); err != nil {
		return err
	}
	to.rowsHot = int64(len(to.ranks))
	x.readPages(to, uint32(v.of(batch-s.first)), base)
	x.chunk = x.chunk[:0]
	for i, pos := range x.pos {
		switch {
		case pos == none-1:
		case pos == none || x.count[pos/perPage] == 0:
			x.chunk = append(x.chunk, chunkRow{rows[i], uint32(i)})
			if pos != none || b.shared(s, rows[i]) {
				to.copies++
			}
		default:
			to.rowsCache++
		}
	}
	slices.SortFunc(x.chunk, func(p, q chunkRow) int {
		if p.row != q.row {
			return cmp.Compare(p.row, q.row)
		}
		return cmp.Compare(p.pos, q.pos)
	})
	to.rowsChunk = int64(len(x.chunk))
	pages := to.readPages + b.shape.PagesOf(to.rowsChunk)
	if len(rows) > math.MaxInt32 || pages >= math.MaxUint32/b.shape.RowsPerPage {
		return errs.New(errs.Usage,
			"packing: mini-batch %d has %d rows and reads %d pages, which is more than can be counted; lower %v or %v",
			batch, len(rows), pages, errs.Key("batch-size"), errs.Key("fanout"))
	}
	// Where each row of the disk cache is among what is read, then those of the chunk.
	for i, pos := range x.pos {
		if pos < none-1 {
			if page := x.count[pos/perPage]; page > 0 {
				x.pos[i] = (page-1)*perPage + pos%perPage
			}
		}
	}
	last := int64(0)
	chunk := uint32(to.readPages) * perPage
	for k, c := range x.chunk {
		x.pos[c.pos] = chunk + uint32(k)
		to.list = binary.AppendUvarint(to.list, uint64(c.row-last))
		last = c.row
	}
	b.encode(to, x.pos, pages)
	return nil
}

// readPages lists the runs of pages that are read: those of the disk cache, which begins at page
// base, with more than level rows. count becomes the page's place among them, from 1; 0: it is not
// read.
func (x *scratch) readPages(to *laid, level uint32, base int64) {
	slices.Sort(x.touched)
	for _, p := range x.touched {
		if x.count[p] <= level {
			x.count[p] = 0
			continue
		}
		page := base + int64(p)
		if n := len(to.runs); n > 0 && to.runs[n-1].Page+to.runs[n-1].Pages == page {
			to.runs[n-1].Pages++
		} else {
			to.runs = append(to.runs, Run{page, 1})
		}
		to.readPages++
		x.count[p] = uint32(to.readPages)
	}
}

// encode packs which positions are hot, their ranks, and the others' slots.
func (b *builder) encode(to *laid, pos []uint32, pages int64) {
	to.width = [2]int{widthOf(int64(len(b.hot))), widthOf(pages * b.shape.RowsPerPage)}
	ranks, bits := bitWriter{}, bitWriter{b: to.body}
	hot := 0
	for _, p := range pos {
		isHot := uint32(0)
		if p == none-1 {
			isHot = 1
		}
		bits.put(isHot, 1)
	}
	to.body = bits.end(int64(len(pos)), 1)
	ranks.b = to.body
	for _, r := range to.ranks {
		ranks.put(r, to.width[0])
		hot++
	}
	to.body = ranks.end(int64(hot), to.width[0])
	slots := bitWriter{b: to.body}
	for _, p := range pos {
		if p != none-1 {
			slots.put(p, to.width[1])
		}
	}
	to.body = slots.end(int64(len(pos)-hot), to.width[1])
}

// pieces writes the disk cache's rows for the packer: parts of it that are brought into order at
// one time, and of each its rows by their number and where in the part they go.
func (b *builder) pieces(s *segment, base int64, w *writer) error {
	pages := max(pieceBytes/b.shape.PageBytes, 1)
	perPiece := int(pages * b.shape.RowsPerPage)
	var ids []uint32
	var list []byte
	for from := 0; from < len(s.order); from += perPiece {
		rows := s.order[from:min(from+perPiece, len(s.order))]
		ids, list = ids[:0], list[:0]
		for i := range rows {
			ids = append(ids, uint32(i))
		}
		slices.SortFunc(ids, func(x, y uint32) int { return cmp.Compare(rows[x].row, rows[y].row) })
		last, width := int64(0), widthOf(int64(len(rows)))
		var places bitWriter
		for _, i := range ids {
			list = binary.AppendUvarint(list, uint64(rows[i].row-last))
			last = rows[i].row
			places.put(i, width)
		}
		if err := w.stream(Stream{Page: base + int64(from)/b.shape.RowsPerPage,
			Rows: int64(len(rows)), Cache: true}, list,
			places.end(int64(len(rows)), width)); err != nil {
			return err
		}
	}
	return nil
}
