package packed

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
)

// builder makes a plan. entry has four bytes for each row of the graph, so that each access costs
// one load: it counts accesses, then marks the rows that stay in memory, then numbers the rows of
// one segment after the other. Beside it a segment takes some 30 bytes for each of its rows.
type builder struct {
	a       Accesses
	c       Config
	shape   Shape
	n       int // mini-batches
	entry   []uint32
	hot     []int64
	pool    [][]int64 // frontiers under way
	scratch []scratch // by worker
	telling sync.Mutex
}

// hotBit marks the entry of a row that stays in memory; the other bits are its rank. Without it the
// entry is the row's number in the segment, plus 1; 0: none.
const hotBit = 1 << 31

// each gives the mini-batches first to end-1 to fn, each once, several at a time and in no order.
func (b *builder) each(ctx context.Context, step string, first, end int,
	fn func(worker, batch int, rows []int64) error) error {
	g, ctx := errgroup.WithContext(ctx)
	var next, done atomic.Int64
	next.Store(int64(first))
	for w := range min(b.c.Workers, end-first) {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= end {
					return nil
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				rows, err := b.read(w, i)
				if err == nil {
					err = fn(w, i, rows)
				}
				if err != nil {
					return err
				}
				b.tell(step, int(done.Add(1)), end-first)
			}
		})
	}
	return g.Wait()
}

func (b *builder) tell(step string, done, of int) {
	if b.c.Progress != nil && step != "" {
		b.telling.Lock()
		defer b.telling.Unlock()
		b.c.Progress(step, done, of)
	}
}

// read gives a mini-batch's frontier in buffer i.
func (b *builder) read(i, batch int) ([]int64, error) {
	rows, err := b.a.Read(batch, b.pool[i])
	if err != nil {
		return nil, err
	}
	b.pool[i] = rows[:0]
	for _, r := range rows {
		if uint64(r) >= uint64(b.c.Rows) {
			return nil, errs.New(errs.Device,
				"packing: mini-batch %d needs row %d, and the graph has %d; prepare its samples again",
				batch, r, b.c.Rows)
		}
	}
	return rows, nil
}

// owners divide the rows of a graph among the workers, some neighbours at a time.
const ownerShift = 10

func (b *builder) owner(row int64) int {
	return int(uint64(row) >> ownerShift % uint64(b.c.Workers))
}

// scan gives mini-batches first to end-1 in their order to each worker, which looks at the rows
// that it owns. Each is read once, as many at a time as there are workers.
func (b *builder) scan(ctx context.Context, first, end int,
	fn func(worker, batch int, rows []int64)) error {
	group := make([][]int64, b.c.Workers)
	for from := first; from < end; from += len(group) {
		if err := ctx.Err(); err != nil {
			return err
		}
		var g errgroup.Group
		for i := range min(len(group), end-from) {
			g.Go(func() (err error) {
				group[i], err = b.read(i, from+i)
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		for w := range b.c.Workers {
			g.Go(func() error {
				for i := range min(len(group), end-from) {
					fn(w, from+i, group[i])
				}
				return nil
			})
		}
		_ = g.Wait()
	}
	return nil
}

// rank finds the rows that stay in memory: by falling count of accesses, equals by their number.
func (b *builder) rank(ctx context.Context) error {
	if b.c.HotRows != nil {
		b.hot = slices.Clone(b.c.HotRows)
		return b.mark()
	}
	if b.c.Hot == 0 {
		return nil
	}
	err := b.each(ctx, "count accesses", 0, b.n, func(_, _ int, rows []int64) error {
		for _, r := range rows {
			atomic.AddUint32(&b.entry[r], 1)
		}
		return nil
	})
	if err != nil {
		return err
	}
	largest := uint32(0)
	for _, n := range b.entry {
		largest = max(largest, n)
	}
	next := make([]int64, int64(largest)+2)
	for _, n := range b.entry {
		next[n]++
	}
	next[0] = 0
	for n, above := int64(largest), int64(0); n > 0; n-- {
		next[n], above = above, above+next[n]
		next[0] = above
	}
	b.hot = make([]int64, min(b.c.Hot, next[0]))
	for r, n := range b.entry {
		if n > 0 && next[n] < int64(len(b.hot)) {
			b.hot[next[n]] = int64(r)
			next[n]++
		}
	}
	clear(b.entry)
	return b.mark()
}

func (b *builder) mark() error {
	for i, r := range b.hot {
		if uint64(r) >= uint64(b.c.Rows) || b.entry[r] != 0 {
			return errs.New(errs.Failed,
				"packing: the rows that stay in memory hold %d twice, or the graph has not so many rows (%d)",
				r, b.c.Rows)
		}
		b.entry[r] = hotBit | uint32(i)
	}
	return nil
}
