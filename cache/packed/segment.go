package packed

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"helios/internal/errs"
)

// segment is consecutive mini-batches that share a disk cache.
type segment struct {
	first, end int
	tables     []table
	order      []item   // the rows of the disk cache, in their order there
	once       []int64  // by mini-batch: rows that it alone needs
	best       []uint32 // by row of order: the most that one mini-batch needs of the row's page
	// pairs counts, by mini-batch and level, the pages of the disk cache of which the mini-batch
	// needs so many rows; the last level is that many or more.
	pairs [][]int32
}

// table has the rows of a segment that a worker owns, by their number in builder.entry.
type table struct {
	rows []int64
	keys []uint64 // the MinHash functions' values, the first one on top
	many []bool   // more than one mini-batch needs it
	pos  []uint32 // in the disk cache, or none
}

// item is a row of a disk cache.
type item struct {
	key uint64
	row int64
	id  uint32
}

const none = math.MaxUint32

// levels bounds the rows of a page that a mini-batch may need for copies to be considered.
const mostLevel = 256

func (b *builder) levels() int { return int(min(b.shape.RowsPerPage, mostLevel)) }

// noFirsts are the places of four first mini-batches, three of which are not known yet.
const noFirsts = 1<<48 - 1

// gather finds which rows a segment has, which of them several mini-batches need, and the order of
// those. release follows it.
func (b *builder) gather(ctx context.Context, first, end int) (*segment, error) {
	s := &segment{first: first, end: end, tables: make([]table, b.c.Workers)}
	k := max(b.c.Hashes, 0)
	ranks := b.hashes(first, end, k)
	err := b.scan(ctx, first, end, func(w, batch int, rows []int64) {
		t := &s.tables[w]
		key := uint64(0)
		if k > 0 {
			key = ranks[batch-first]
		} else if b.c.Hashes == 0 {
			key = noFirsts<<16 | uint64(min(batch-first, mostFirsts))
		}
		for _, r := range rows {
			if b.owner(r) != w {
				continue
			}
			switch v := b.entry[r]; {
			case v&hotBit != 0:
			case v == 0 && len(t.rows) == hotBit-1:
				t.many = nil // an error in countBuckets
			case v == 0:
				t.rows, t.many = append(t.rows, r), append(t.many, false)
				t.keys = append(t.keys, key)
				b.entry[r] = uint32(len(t.rows))
			default:
				t.many[v-1] = true
				if was := t.keys[v-1]; k > 0 {
					t.keys[v-1] = lesser(was, key, k)
				} else if was>>48 == mostFirsts {
					t.keys[v-1] = was<<16 | key&mostFirsts
				}
			}
		}
	})
	if err != nil {
		b.release(s)
		return nil, err
	}
	return s, b.sort(s, k)
}

// hashes gives each mini-batch of a segment the values of k hash functions, which are its places in
// random orders of the segment's mini-batches, in one number.
func (b *builder) hashes(first, end, k int) []uint64 {
	all := make([]uint64, end-first)
	r := rand.New(rand.NewPCG(b.c.Seed, uint64(first)))
	for range k {
		for i, v := range r.Perm(len(all)) {
			all[i] = all[i]<<(64/k%64) | uint64(v)
		}
	}
	return all
}

// lesser takes the lesser of each of k values.
func lesser(x, y uint64, k int) uint64 {
	switch k {
	case 0, 1:
		return min(x, y)
	case 2:
		return min(x>>32, y>>32)<<32 | min(x&math.MaxUint32, y&math.MaxUint32)
	}
	width := 64 / k
	mask, v := uint64(1)<<width-1, uint64(0)
	for j := range k {
		v |= min(x>>(j*width)&mask, y>>(j*width)&mask) << (j * width)
	}
	return v
}

// sort orders the rows that several mini-batches need: by the values of the hash functions, one
// after the other, equals by their number. Rows that the same mini-batches need have the same
// values, so they are together (Broder's MinHash: two rows agree in a value with the probability of
// their mini-batches' Jaccard index).
func (b *builder) sort(s *segment, k int) error {
	order := b.bucketOrder(s, k)
	starts, err := b.countBuckets(s, order)
	if err != nil {
		return err
	}
	b.fillBuckets(s, order, starts)
	b.sortBuckets(s, starts)
	for w := range s.tables {
		t := &s.tables[w]
		t.pos = make([]uint32, len(t.rows))
		for i := range t.pos {
			t.pos[i] = none
		}
	}
	s.place(b)
	return nil
}

// bucketOrder is the order of rows in buckets.
type bucketOrder struct {
	hashes  int
	k       int
	top     uint64
	buckets int
}

func (b *builder) bucketOrder(s *segment, k int) bucketOrder {
	const limit = 1 << 12
	// Buckets by the first value, or by the row's number, are sorted by themselves.
	top := uint64(s.end - s.first)
	if b.c.Hashes < 0 {
		top = uint64(b.c.Rows)
	}
	return bucketOrder{hashes: b.c.Hashes, k: k, top: top, buckets: int(min(top, limit))}
}

func (o *bucketOrder) of(key uint64, row int64) int {
	v := uint64(row)
	switch {
	case o.k > 0:
		v = key >> (64 / o.k * (o.k - 1))
	case o.hashes == 0:
		v = key >> 48
	}
	return int(v * uint64(o.buckets) / o.top)
}

// countBuckets returns the beginnings of the buckets, and the end of the last one.
func (b *builder) countBuckets(s *segment, order bucketOrder) ([]int, error) {
	starts := make([]int, order.buckets+1)
	total := 0
	for w := range s.tables {
		t := &s.tables[w]
		if len(t.rows) != len(t.many) {
			return nil, errs.New(errs.Usage,
				"a segment of mini-batches %d to %d has 2^31 rows or more; give shorter segments",
				s.first, s.end-1)
		}
		for i, many := range t.many {
			if many {
				if b.c.Hashes == 0 {
					t.keys[i] = firsts(t.keys[i])
				}
				starts[order.of(t.keys[i], t.rows[i])+1]++
				total++
			}
		}
	}
	if total >= none {
		return nil, errs.New(errs.Usage,
			"a segment of mini-batches %d to %d has a disk cache of %d rows, and below 2^32 are possible; give shorter segments",
			s.first, s.end-1, total)
	}
	for i := range order.buckets {
		starts[i+1] += starts[i]
	}
	return starts, nil
}

// fillBuckets puts the rows that several mini-batches need into their buckets.
func (b *builder) fillBuckets(s *segment, order bucketOrder, starts []int) {
	s.order = make([]item, starts[order.buckets])
	next := slices.Clone(starts)
	for w := range s.tables {
		t := &s.tables[w]
		for i, many := range t.many {
			if many {
				to := &next[order.of(t.keys[i], t.rows[i])]
				s.order[*to] = item{t.keys[i], t.rows[i], uint32(i)}
				*to++
			}
		}
		t.keys = nil
	}
}

// sortBuckets sorts each bucket by itself.
func (b *builder) sortBuckets(s *segment, starts []int) {
	var g errgroup.Group
	var turn atomic.Int64
	for range b.c.Workers {
		g.Go(func() error {
			for {
				i := int(turn.Add(1)) - 1
				if i >= len(starts)-1 {
					return nil
				}
				slices.SortFunc(s.order[starts[i]:starts[i+1]], func(x, y item) int {
					if b.c.Hashes >= 0 && x.key != y.key {
						return cmp.Compare(x.key, y.key)
					}
					return cmp.Compare(x.row, y.row)
				})
			}
		})
	}
	_ = g.Wait()
}

// firsts puts the first mini-batch that needs a row on top; those that there are not come last.
func firsts(key uint64) uint64 {
	for range 3 {
		if key>>48 == mostFirsts {
			key = key<<16 | mostFirsts
		}
	}
	return key
}

// place writes where the rows of order are.
func (s *segment) place(b *builder) {
	for i := range s.order {
		x := &s.order[i]
		s.tables[b.owner(x.row)].pos[x.id] = uint32(i)
	}
}

// release forgets a segment's rows.
func (b *builder) release(s *segment) {
	for w := range s.tables {
		for _, r := range s.tables[w].rows {
			b.entry[r] = 0
		}
	}
}

// shared reports whether several mini-batches of a segment need a row.
func (b *builder) shared(s *segment, row int64) bool {
	return s.tables[b.owner(row)].many[b.entry[row]-1]
}

// find returns the place of a row: its rank in memory, its position in the disk cache, or none.
func (b *builder) find(s *segment, batch int, row int64) (rank uint32, hot bool, pos uint32,
	err error) {
	v := b.entry[row]
	if v&hotBit != 0 {
		return v &^ hotBit, true, 0, nil
	}
	t := &s.tables[b.owner(row)]
	if v == 0 || int(v) > len(t.pos) {
		return 0, false, 0, errs.New(errs.Device,
			"packing: mini-batch %d needs row %d, which it did not need when it was read before; prepare its samples again",
			batch, row)
	}
	return 0, false, t.pos[v-1], nil
}

// scratch is a worker's memory for laying out a mini-batch.
type scratch struct {
	count   []uint32 // by page of the disk cache; zeros between mini-batches
	touched []uint32 // pages
	pos     []uint32 // of the frontier
	chunk   []chunkRow
}

type chunkRow struct {
	row int64
	pos uint32
}

// count fills in of x how many rows of each page of the disk cache a mini-batch needs, and its
// rows' positions there.
func (b *builder) count(s *segment, x *scratch, batch int, rows []int64,
	hot func(pos int, rank uint32)) error {
	perPage := uint32(b.shape.RowsPerPage)
	if need := int(b.shape.PagesOf(int64(len(s.order)))); len(x.count) < need {
		x.count = make([]uint32, need)
	}
	x.touched, x.pos = x.touched[:0], slices.Grow(x.pos[:0], len(rows))[:len(rows)]
	for i, r := range rows {
		rank, isHot, pos, err := b.find(s, batch, r)
		if err != nil {
			return err
		}
		if isHot {
			x.pos[i] = none - 1
			if hot != nil {
				hot(i, rank)
			}
			continue
		}
		if x.pos[i] = pos; pos != none {
			page := pos / perPage
			if x.count[page] == 0 {
				x.touched = append(x.touched, page)
			}
			x.count[page]++
		}
	}
	return nil
}

func (x *scratch) clean() {
	for _, p := range x.touched {
		x.count[p] = 0
	}
}

// weigh finds the cost and the savings of copies of the disk cache's rows.
func (b *builder) weigh(ctx context.Context, s *segment) error {
	perPage, levels := uint32(b.shape.RowsPerPage), b.levels()
	s.once, s.pairs = make([]int64, s.end-s.first), make([][]int32, s.end-s.first)
	s.best = make([]uint32, len(s.order))
	return b.each(ctx, "", s.first, s.end, func(w, batch int, rows []int64) error {
		x := &b.scratch[w]
		defer x.clean()
		if err := b.count(s, x, batch, rows, nil); err != nil {
			return err
		}
		once, pairs := int64(0), make([]int32, levels+1)
		for _, pos := range x.pos {
			switch {
			case pos == none:
				once++
			case pos < none-1:
				n := x.count[pos/perPage]
				for was := atomic.LoadUint32(&s.best[pos]); was < n; {
					if atomic.CompareAndSwapUint32(&s.best[pos], was, n) {
						break
					}
					was = atomic.LoadUint32(&s.best[pos])
				}
			}
		}
		for _, p := range x.touched {
			pairs[min(int(x.count[p]), levels)]++
		}
		s.once[batch-s.first], s.pairs[batch-s.first] = once, pairs
		return nil
	})
}

// split divides a segment's rows between its disk cache and chunks. A mini-batch reads a page of
// the disk cache where it needs more than level of its rows; else its chunk has them. The first
// ahead mini-batches go by level + 1.
type split struct{ level, ahead int }

// of is the level of a mini-batch of the segment.
func (v split) of(i int) int {
	if i < v.ahead {
		return v.level + 1
	}
	return v.level
}

// cost estimates what a split takes: pages of the disk, and pages read by all mini-batches. Rows
// that are no longer read from the disk cache leave it; the estimate ignores that others move up.
type cost struct{ disk, read int64 }

// costs returns the cost of each split that a segment may have, the least disk first: levels 0 to
// the last, and of each one all values of ahead.
func (b *builder) costs(s *segment, visit func(v split, c cost)) {
	levels := b.levels()
	last := levels
	if int64(levels) < b.shape.RowsPerPage {
		last-- // the last level stands for more rows as well
	}
	stay := make([]int64, levels+1) // rows that stay in the disk cache at a level
	for _, n := range s.best {
		stay[min(int(n), levels)]++
	}
	for l := levels - 1; l >= 0; l-- {
		stay[l] += stay[l+1]
	}
	// Now stay[n] has the rows of which n or more are needed on their page by one mini-batch.
	rows, pages := slices.Clone(s.once), make([]int64, len(s.once))
	chunks, read := int64(0), int64(0)
	for i, n := range rows {
		for l := 1; l <= levels; l++ {
			pages[i] += int64(s.pairs[i][l])
		}
		chunks += b.shape.PagesOf(n)
		read += b.shape.PagesOf(n) + pages[i]
	}
	for level := 0; ; level++ {
		kept := b.shape.PagesOf(stay[min(level+1, levels)])
		if level == levels {
			kept = 0
		}
		visit(split{level, 0}, cost{kept + chunks, read})
		if level == last {
			return
		}
		for i := range rows {
			pairs := int64(s.pairs[i][level+1])
			was := b.shape.PagesOf(rows[i])
			rows[i] += pairs * int64(level+1)
			now := b.shape.PagesOf(rows[i])
			chunks += now - was
			read += now - was - pairs
			if i+1 < len(rows) {
				visit(split{level, i + 1}, cost{kept + chunks, read})
			}
		}
	}
}

// fit returns the split with the fewest reads that takes no more than allowed; where none does, the
// one that takes the least disk.
func (b *builder) fit(s *segment, allowed int64) (v split, c cost) {
	first := true
	b.costs(s, func(tried split, now cost) {
		if first || (now.disk <= allowed && now.read < c.read) {
			v, c = tried, now
		}
		first = false
	})
	return v, c
}

// keep takes the rows out of the disk cache that no mini-batch reads from it under a split. It
// returns all of them as they were.
func (b *builder) keep(s *segment, v split) (all []item) {
	all = s.order
	if v == (split{}) {
		return all
	}
	s.order = nil
	for i, x := range all {
		if s.best[i] > uint32(v.level) {
			s.order = append(s.order, x)
		} else {
			s.tables[b.owner(x.row)].pos[x.id] = none
		}
	}
	s.place(b)
	return all
}
