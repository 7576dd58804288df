package packed

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// PackConfig sets the memory and the limits of a Pack.
type PackConfig struct {
	// Memory is the most that it takes, in bytes; 0: 1 GiB. The features are read in parts of
	// nearly half of it.
	Memory  int64
	Workers int // goroutines that write pages; below 1: one
	// Mark, where not nil, keeps the progress, so that a pack that was cut off resumes with the
	// same Pages.
	Mark      MarkFile
	MarkEvery time.Duration // at the earliest, of writing the mark; 0: 10 seconds
	// Progress, where not nil, hears how many bytes of all that are read and written are done. No
	// two calls overlap.
	Progress func(done, total int64)
}

// Packed has the results of a Pack.
type Packed struct {
	Resumed      bool  // it resumed an earlier one
	SourceBytes  int64 // read in order
	WrittenBytes int64 // of pages
	OrderedBytes int64 // of disk caches, read back to be brought into order
	Collected    int64 // rows that were read by themselves, as an earlier pack was cut off
	Seconds      float64
}

const (
	defaultMemory = 1 << 30
	defaultEvery  = 10 * time.Second
	writeBuffer   = 1 << 20 // of a worker
	sourceBytes   = 8 << 20 // most that is read of a Source at one go
	leastPart     = 1 << 20 // of the features
	orderTogether = 16      // parts of disk caches between two marks
)

// packer reads the features once, in order, a part at a time, and appends the rows of each part to
// all streams that need them. Chunks are finished then. A disk cache is not in the order of its
// rows' numbers; its parts of about 8 MiB are brought into order afterwards, in memory. So nothing
// is ever read or written a row at a time (DiskGNN calls it batched packing).
type packer struct {
	p       *Plan
	src     Source
	to      Pages
	c       PackConfig
	shape   Shape
	streams []packStream
	mark    mark
	marked  time.Time
	done    atomic.Int64
	total   int64
	stats   Packed
	written atomic.Int64
	bufs    [][]byte // by worker
	sides   [][]byte // two for each worker: a part of a disk cache, before and after
	lists   [][]byte
}

// packStream is the progress of a stream.
type packStream struct {
	list
	has  bool   // list.row is the next row
	end  bool   // there is none, and those that were given were right
	rows int64  // appended
	tail []byte // those of them that are not in a whole page yet
}

// Pack fills the pages of a plan with rows of a Source.
func Pack(ctx context.Context, p *Plan, src Source, to Pages, c PackConfig) (_ *Packed, err error) {
	begin := time.Now()
	if c.Memory == 0 {
		c.Memory = defaultMemory
	}
	if c.MarkEvery == 0 {
		c.MarkEvery = defaultEvery
	}
	c.Workers = max(c.Workers, 1)
	k := &packer{p: p, src: src, to: to, c: c, shape: p.Shape(),
		streams: make([]packStream, p.Streams()), marked: begin, lists: make([][]byte, c.Workers)}
	for i := range k.streams {
		k.streams[i].list = list{p: p, stream: i}
	}
	if k.mark, err = loadMark(c.Mark, p); err != nil {
		return nil, err
	}
	h := &p.header
	k.total = h.Rows*h.Shape.RowBytes + (h.Stats.Pages+2*h.Stats.CachePages)*h.Shape.PageBytes
	defer func() { err = errors.Join(err, k.free()) }()
	part, err := k.part()
	if err != nil {
		return nil, err
	}
	for range c.Workers {
		b, err := hostmem.Alloc(k.bufferBytes(), "packing")
		if err != nil {
			return nil, err
		}
		k.bufs = append(k.bufs, b)
	}
	k.stats.Resumed = k.mark.seq > 0
	switch {
	case k.mark.row == h.Rows: // all rows have been appended
		k.done.Store(h.Rows*h.Shape.RowBytes + h.Stats.Pages*h.Shape.PageBytes)
	case k.mark.seq > 0:
		if err := k.resume(ctx); err != nil {
			return nil, err
		}
	}
	if err := k.append(ctx, part); err != nil {
		return nil, err
	}
	if err := k.order(ctx); err != nil {
		return nil, err
	}
	if err := to.Sync(ctx); err != nil {
		return nil, err
	}
	k.stats.WrittenBytes = k.written.Load()
	k.stats.Seconds = time.Since(begin).Seconds()
	return &k.stats, nil
}

func (k *packer) free() error {
	var all []error
	for _, b := range append(k.bufs, k.sides...) {
		if b != nil {
			all = append(all, hostmem.Free(b))
		}
	}
	k.bufs, k.sides = nil, nil
	return errors.Join(all...)
}

// bufferBytes is the size of a worker's writes: whole pages.
func (k *packer) bufferBytes() int64 {
	return max(writeBuffer/k.shape.PageBytes, 1) * k.shape.PageBytes
}

// pieceMost is the memory that a part of a disk cache takes while it is brought into order.
func (k *packer) pieceMost() int64 {
	bytes := int64(0)
	for i := range k.p.streams {
		if s := &k.p.streams[i]; s.Cache {
			bytes = max(bytes, 2*k.shape.PagesOf(s.Rows)*k.shape.PageBytes+s.Rows*(4+8+1+5)+
				max(collectBytes, k.shape.RowBytes))
		}
	}
	return bytes
}

// part is the number of rows that are read at one time: two parts, rows that wait for their page to
// be whole, and the workers' buffers are in memory together.
func (k *packer) part() (int64, error) {
	h := &k.p.header
	fixed := int64(k.c.Workers)*(k.bufferBytes()+listMost) +
		int64(len(k.streams))*(k.shape.PageBytes+packStreamBytes) +
		k.c.Memory/32 // what is small, and what Go has not given back yet
	least := max(fixed+2*max(leastPart, k.shape.RowBytes),
		k.pieceMost()*int64(k.c.Workers)+fixed)
	if least > k.c.Memory {
		return 0, errs.New(errs.Usage,
			"packing %d mini-batches takes at least %s of memory, and it may take %s; give it more",
			k.p.Batches(), units.FormatBytes(least), units.FormatBytes(k.c.Memory))
	}
	return min((k.c.Memory-fixed)/2/k.shape.RowBytes, h.Rows), nil
}

// packStreamBytes is a packStream and what Plan has of it.
const packStreamBytes = 256

func (k *packer) tell(bytes int64) {
	done := k.done.Add(bytes)
	if k.c.Progress != nil {
		k.c.Progress(min(done, k.total), k.total)
	}
}

// append reads the features from the mark on.
func (k *packer) append(ctx context.Context, part int64) error {
	rows, width := k.p.header.Rows, k.shape.RowBytes
	if k.mark.row == rows {
		return nil
	}
	var bufs [2][]byte
	for i := range bufs {
		b, err := hostmem.Alloc(min(part, rows-k.mark.row)*width, "packing")
		if err != nil {
			return err
		}
		bufs[i] = b
		defer func() { _ = hostmem.Free(b) }()
	}
	read := func(ctx context.Context, first int64, buf []byte) error {
		for n := min(part, rows-first); n > 0; {
			now := min(n, max(sourceBytes/width, 1))
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := k.src.ReadRows(ctx, first, now, buf[:now*width]); err != nil {
				return err
			}
			first, n, buf = first+now, n-now, buf[now*width:]
		}
		return nil
	}
	first := k.mark.row
	if err := read(ctx, first, bufs[0]); err != nil {
		return err
	}
	for turn := 0; first < rows; turn ^= 1 {
		n := min(part, rows-first)
		g, inner := errgroup.WithContext(ctx)
		if first+n < rows {
			g.Go(func() error { return read(inner, first+n, bufs[turn^1]) })
		}
		g.Go(func() error { return k.distribute(inner, first, n, bufs[turn]) })
		if err := g.Wait(); err != nil {
			return err
		}
		first += n
		k.stats.SourceBytes += n * width
		k.tell(n * width)
		if first == rows || time.Since(k.marked) >= k.c.MarkEvery {
			k.mark.row = first
			if err := k.settle(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// settle makes the pages durable, then the mark.
func (k *packer) settle(ctx context.Context) error {
	if err := k.to.Sync(ctx); err != nil {
		return err
	}
	k.marked = time.Now()
	return k.mark.store(k.c.Mark)
}

// distribute appends rows first to first+n-1 to the streams.
func (k *packer) distribute(ctx context.Context, first, n int64, data []byte) error {
	return k.each(ctx, len(k.streams), func(w, i int) error {
		s := &k.streams[i]
		s.lend(&k.lists[w], first, n)
		defer s.giveBack()
		return k.stream(ctx, s, k.bufs[w], first, n, data)
	})
}

// each calls fn for 0 to n-1, by all workers.
func (k *packer) each(ctx context.Context, n int, fn func(worker, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for w := range k.c.Workers {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := fn(w, i); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// peek returns the next row below end, if any.
func (s *packStream) peek(end int64) (row int64, ok bool, err error) {
	if s.end {
		return 0, false, nil
	}
	if !s.has {
		switch _, err := s.next(); {
		case errors.Is(err, io.EOF):
			s.end = true
			return 0, false, nil
		case err != nil:
			return 0, false, err
		}
		s.has = true
	}
	return s.row, s.row < end, nil
}

// stream appends a stream's rows among first to first+n-1: what waited, then whole pages, by buf.
func (k *packer) stream(ctx context.Context, s *packStream, buf []byte, first, n int64,
	data []byte) error {
	of := &k.p.streams[s.list.stream]
	h := k.shape
	page := of.Page + s.rows/h.RowsPerPage
	offset := int64(copy(buf, s.tail)) // in buf
	inPage := s.rows % h.RowsPerPage
	for {
		row, ok, err := s.peek(first + n)
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		from := (row - first) * h.RowBytes
		if from < 0 {
			return k.p.damaged("rows %d are not in order", s.list.stream)
		}
		copy(buf[offset:offset+h.RowBytes], data[from:])
		offset += h.RowBytes
		s.has = false
		s.rows++
		if inPage++; inPage == h.RowsPerPage || s.rows == of.Rows {
			inPage = 0
			full := (offset + h.PageBytes - 1) / h.PageBytes * h.PageBytes
			clear(buf[offset:full])
			if offset = full; offset == int64(len(buf)) {
				if err := k.write(ctx, page, buf); err != nil {
					return err
				}
				page, offset = page+offset/h.PageBytes, 0
			}
		}
	}
	whole := offset / h.PageBytes * h.PageBytes
	if whole > 0 {
		if err := k.write(ctx, page, buf[:whole]); err != nil {
			return err
		}
	}
	switch {
	case offset > whole && s.tail == nil:
		s.tail = make([]byte, 0, h.PageBytes)
		fallthrough
	case offset > whole:
		s.tail = append(s.tail[:0], buf[whole:offset]...)
	case s.rows == of.Rows:
		s.tail = nil
	default:
		s.tail = s.tail[:0]
	}
	return nil
}

func (k *packer) write(ctx context.Context, page int64, data []byte) error {
	if err := k.to.WriteAt(ctx, page, data); err != nil {
		return err
	}
	k.written.Add(int64(len(data)))
	k.done.Add(int64(len(data)))
	return nil
}

// resume brings the streams to where the mark is. Rows that waited for their page to be whole are
// read again.
func (k *packer) resume(ctx context.Context) error {
	type waiting struct {
		row           int64
		stream, index int
	}
	var all []waiting
	var mu sync.Mutex
	per := k.shape.RowsPerPage
	k.done.Store(k.mark.row * k.shape.RowBytes)
	err := k.each(ctx, len(k.streams), func(w, i int) error {
		s := &k.streams[i]
		s.lend(&k.lists[w], 0, k.p.header.Rows)
		defer s.giveBack()
		last := make([]int64, 0, per)
		for {
			row, ok, err := s.peek(k.mark.row)
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			s.has = false
			s.rows++
			if last = append(last, row); int64(len(last)) == per {
				last = last[:0]
			}
		}
		k.done.Add(s.rows / per * k.shape.PageBytes)
		if s.rows == k.p.streams[i].Rows || len(last) == 0 {
			return nil
		}
		s.tail = make([]byte, int64(len(last))*k.shape.RowBytes, k.shape.PageBytes)
		mu.Lock()
		defer mu.Unlock()
		for j, row := range last {
			all = append(all, waiting{row, i, j})
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(x, y waiting) int { return cmp.Compare(x.row, y.row) })
	rows := make([]int64, len(all))
	for i, x := range all {
		rows[i] = x.row
	}
	k.stats.Collected += int64(len(rows))
	width := k.shape.RowBytes
	return collect(ctx, k.src, rows, width, make([]byte, max(collectBytes, width)),
		func(i int, data []byte) {
			copy(k.streams[all[i].stream].tail[int64(all[i].index)*width:], data)
		})
}
