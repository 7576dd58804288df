package packed

import (
	"context"
	"time"

	"helios/internal/errs"
	"helios/internal/units"
)

// Stats are totals of a plan. Reads are those of all mini-batches, each once.
type Stats struct {
	Batches  int64 `json:"batches"`
	Segment  int64 `json:"segment"` // most mini-batches that share a disk cache
	Segments int64 `json:"segments"`

	HotRows   int64 `json:"hot_rows"`
	CacheRows int64 `json:"cache_rows"` // of all disk caches
	ChunkRows int64 `json:"chunk_rows"` // of all chunks

	Accesses      int64 `json:"accesses"`
	HotAccesses   int64 `json:"hot_accesses"`
	CacheAccesses int64 `json:"cache_accesses"`
	ChunkAccesses int64 `json:"chunk_accesses"`
	// Copies are accesses of rows that a chunk has though several mini-batches of the segment need
	// them.
	Copies int64 `json:"copies"`

	Pages          int64 `json:"pages"`
	CachePages     int64 `json:"cache_pages"`
	ChunkPages     int64 `json:"chunk_pages"`
	CacheReadPages int64 `json:"cache_read_pages"`
	CacheRuns      int64 `json:"cache_runs"` // of pages that are read from disk caches
	ChunkRuns      int64 `json:"chunk_runs"` // chunks that have rows
	// MostReadPages is the largest number of pages that one mini-batch reads.
	MostReadPages int64 `json:"most_read_pages"`
}

// ReadPages is the number of pages that all mini-batches read.
func (s *Stats) ReadPages() int64 { return s.CacheReadPages + s.ChunkPages }

// Amplification is the ratio of the bytes that are read to those that are needed; 0 where none
// are.
func (s *Stats) Amplification(h Shape) float64 {
	return ratio(s.ReadPages()*h.PageBytes, (s.CacheAccesses+s.ChunkAccesses)*h.RowBytes)
}

// RunBytes is the average length of what is read at one go, before commands divide it.
func (s *Stats) RunBytes(h Shape) float64 {
	return ratio(s.ReadPages()*h.PageBytes, s.CacheRuns+s.ChunkRuns)
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// Found is the result of a search for the length of segments.
type Found struct {
	Segment   int
	Estimated bool // false: Config.Segment was given
	// Retries counts the times that the segments that were found did not fit and longer ones were
	// taken.
	Retries int
	// Estimates for the segments that were found first; compare them with Stats.Pages and ReadPages
	// where there was no retry.
	Pages, ReadPages int64
	Seconds          float64
}

// Result describes a plan that Build has written.
type Result struct {
	Shape Shape
	Stats Stats
	Found Found
	Bytes int64 // of the plan's file
}

// File takes a plan: an *os.File is one. Build starts it anew.
type File interface {
	WriteAt(b []byte, offset int64) (int, error)
	Truncate(size int64) error
}

// Build lays out mini-batches and writes the plan to a file. Equal accesses and configurations give
// equal files. The caller makes the file durable and gives it its name. Memory is four bytes for
// each row of the graph, 16 for each row that stays in memory, and for one segment some 50 for each
// of its rows, whatever the number of accesses.
func Build(ctx context.Context, a Accesses, c Config, to File) (*Result, error) {
	n := a.Batches()
	shape, err := c.check(n)
	if err != nil {
		return nil, err
	}
	b := &builder{a: a, c: c, shape: shape, n: n, entry: make([]uint32, c.Rows),
		pool: make([][]int64, c.Workers), scratch: make([]scratch, c.Workers)}
	if err := b.rank(ctx); err != nil {
		return nil, err
	}
	r := &Result{Shape: shape, Found: Found{Segment: c.Segment}}
	begin := time.Now()
	if c.Segment == 0 {
		if r.Found, err = b.search(ctx); err != nil {
			return nil, err
		}
		r.Found.Seconds = time.Since(begin).Seconds()
	}
	budget := b.c.budgetPages(shape)
	for soft, once := budget, false; ; {
		if err := b.write(ctx, r, to, soft, once); err != nil {
			return nil, err
		}
		over := r.Stats.Pages - budget
		switch {
		case over <= 0:
			return r, nil
		case !once && soft == budget && soft > 0:
			// The last segments need more than their share: less for all.
			soft = max(budget-2*over, 0)
		case !once:
			once = true
		case c.Segment != 0 || r.Found.Segment >= n:
			return nil, b.tooSmall(r.Found.Segment, r.Stats.Pages)
		default:
			// The sample was luckier than the rest: fewer, longer segments need less.
			less := float64(budget) / float64(r.Stats.Pages)
			r.Found.Segment = lengthOf(n, int(float64(segmentsOf(n, r.Found.Segment))*less))
			r.Found.Retries++
			soft, once = budget, false
		}
	}
}

// tooSmall is the error of a budget that segments of a length do not fit into.
func (b *builder) tooSmall(segment int, pages int64) error {
	if b.c.Segment != 0 {
		return errs.New(errs.Usage,
			"packed mini-batches in segments of %d take %s, and %v is %s; give more of it, or leave the length of segments to a search",
			segment, units.FormatBytes(pages*b.shape.PageBytes), errs.Key("disk-budget"),
			units.FormatBytes(b.c.Budget))
	}
	return errs.New(errs.Usage,
		"packed mini-batches take at least %s, each row that does not stay in memory once, and %v is %s; give more of it, or more memory",
		units.FormatBytes(pages*b.shape.PageBytes), errs.Key("disk-budget"),
		units.FormatBytes(b.c.Budget))
}

// write lays out all segments and writes the plan, so that it takes about soft pages where it can;
// once: without copies.
func (b *builder) write(ctx context.Context, r *Result, to File, soft int64, once bool) error {
	w := newWriter(to, b.shape)
	if err := w.begin(); err != nil {
		return err
	}
	if err := w.hot(b.hot, b.c.Rows); err != nil {
		return err
	}
	r.Stats = Stats{Batches: int64(b.n), Segment: int64(r.Found.Segment),
		HotRows: int64(len(b.hot))}
	all := segmentsOf(b.n, r.Found.Segment)
	for i := range all {
		first, end := i*b.n/all, (i+1)*b.n/all
		s, err := b.gather(ctx, first, end)
		if err != nil {
			return err
		}
		// A segment's share is that of the mini-batches so far, less what those before it took.
		allowed := int64(float64(soft)*float64(end)/float64(b.n)) - r.Stats.Pages
		err = b.segment(ctx, s, r, w, allowed, once || b.c.Budget == 0)
		b.release(s)
		if err != nil {
			return err
		}
		b.tell("lay out", end, b.n)
	}
	var err error
	r.Bytes, err = w.end(Header{Shape: b.shape, Rows: b.c.Rows, Hashes: b.c.Hashes,
		Budget: b.c.Budget, Seed: b.c.Seed, Stats: r.Stats})
	return err
}

// segmentsOf is the number of segments of up to a length; they differ by one mini-batch at most.
func segmentsOf(batches, length int) int { return (batches + length - 1) / length }

// lengthOf is the length of so many segments, of one at least.
func lengthOf(batches, segments int) int { return segmentsOf(batches, max(segments, 1)) }

// segment lays one segment out in about the pages that are allowed, where it can be. Pages that are
// left go to the next one.
func (b *builder) segment(ctx context.Context, s *segment, r *Result, w *writer, allowed int64,
	once bool) error {
	var v split
	var c cost
	limit := b.c.budgetPages(b.shape)
	if !once && len(s.order) > 0 {
		if err := b.weigh(ctx, s); err != nil {
			return err
		}
		v, c = b.fit(s, allowed)
	}
	before, mark := r.Stats, w.mark()
	for {
		all := b.keep(s, v)
		if err := b.lay(ctx, s, v, r, w); err != nil {
			return err
		}
		over := r.Stats.Pages - limit
		if v == (split{}) || over <= 0 {
			return nil
		}
		// Rows that moved up changed which pages are worth being read, and the last segments had
		// no room for that: fewer copies.
		allowed = min(allowed-over, c.disk-1)
		v, c = b.fit(s, allowed)
		r.Stats, s.order = before, all
		w.rewind(mark)
		s.place(b)
	}
}
