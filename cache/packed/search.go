package packed

import (
	"context"
	"math"
	"math/rand/v2"
)

// The search for the length of segments. Longer segments keep a row fewer times, so they take less
// of the disk; but a mini-batch finds its rows in a larger disk cache, so it reads more that it
// does not need. The paper samples mini-batches and takes the shortest segments whose estimate
// fits: shortest finds them. With copies a longer segment may read less: its disk cache is smaller,
// and the room that leaves goes to copies of the rows that cost most. So longer ones are tried on
// samples until two in a row read more.

const (
	sampleBatches = 32  // that an estimate is of, where segments are shorter
	growth        = 1.5 // from one length that is tried to the next
	alike         = 0.005
)

// search finds the length of segments with the fewest reads under the budget.
func (b *builder) search(ctx context.Context) (Found, error) {
	budget := b.c.budgetPages(b.shape)
	i, err := b.shortest(ctx, budget)
	if err != nil {
		return Found{}, err
	}
	best, tried := Found{Segment: i}, map[int]bool{}
	try := func(i int) (better bool, err error) {
		n := segmentsOf(b.n, i)
		if tried[n] {
			return false, nil
		}
		tried[n] = true
		c, err := b.estimate(ctx, i, budget)
		if err != nil {
			return false, err
		}
		// Of two that read the same, about, shorter segments read longer runs.
		limit := float64(best.ReadPages)
		if i > best.Segment {
			limit *= 1 - alike
		} else {
			limit *= 1 + alike
		}
		better = !best.Estimated || float64(c.read) < limit && c.disk <= budget ||
			best.Pages > budget && c.disk < best.Pages
		if better {
			best = Found{Segment: i, Estimated: true, Pages: c.disk, ReadPages: c.read}
		}
		return better, nil
	}
	for worse := 0; worse < 2; {
		better, err := try(i)
		if err != nil {
			return Found{}, err
		}
		if worse++; better {
			worse = 0
		}
		if i == b.n {
			break
		}
		i = lengthOf(b.n, min(segmentsOf(b.n, i)-1, int(float64(b.n)/float64(i)/growth)))
	}
	// Between the best one and those on both sides of it.
	for _, f := range []float64{1 / math.Sqrt(growth), math.Sqrt(growth)} {
		if i := int(math.Round(float64(best.Segment) * f)); i > 0 && i <= b.n {
			if _, err := try(i); err != nil {
				return Found{}, err
			}
		}
	}
	return best, nil
}

// shortest adds mini-batches to a sampled segment until the estimate of the disk fits: the rows
// that several of them need, V_d, and those that one needs, V_p, in as many segments as there would
// be (DiskGNN, section 4). Tails of pages are estimated too.
func (b *builder) shortest(ctx context.Context, budget int64) (int, error) {
	type counts struct {
		once, many int64
		rows       []int64
	}
	all := make([]counts, b.c.Workers)
	defer func() {
		for w := range all {
			for _, r := range all[w].rows {
				b.entry[r] = 0
			}
		}
	}()
	start := rand.New(rand.NewPCG(b.c.Seed, 1<<40)).IntN(b.n)
	for i := 0; i < b.n; {
		// Mini-batches come in random order, so those behind the last are the first ones. The
		// length does not depend on how many workers there are.
		first := (start + i) % b.n
		err := b.scan(ctx, first, first+1, func(w, _ int, rows []int64) {
			c := &all[w]
			for _, r := range rows {
				if b.owner(r) != w {
					continue
				}
				switch b.entry[r] {
				case 0:
					b.entry[r] = 1
					c.once++
					c.rows = append(c.rows, r)
				case 1:
					b.entry[r] = 2
					c.once--
					c.many++
				}
			}
		})
		if err != nil {
			return 0, err
		}
		i++
		once, many := 0.0, 0.0
		for w := range all {
			once, many = once+float64(all[w].once), many+float64(all[w].many)
		}
		per, segments := float64(b.shape.RowsPerPage), float64(b.n)/float64(i)
		tails := (segments + float64(b.n)) / 2
		if b.shape.RowsPerPage == 1 {
			tails = 0
		}
		if float64((once+many)/per*segments)+tails <= float64(budget) {
			return i, nil
		}
	}
	return b.n, nil
}

// estimate samples segments of a length, and returns the cost of all.
func (b *builder) estimate(ctx context.Context, length int, budget int64) (cost, error) {
	var sum cost
	r := rand.New(rand.NewPCG(b.c.Seed, 1<<41+uint64(length)))
	segments := segmentsOf(b.n, length)
	order := r.Perm(segments)
	batches, accesses, all := 0, 0, 0
	for i := range b.n {
		all += b.a.Rows(i)
	}
	for _, k := range order {
		first, end := k*b.n/segments, (k+1)*b.n/segments
		s, err := b.gather(ctx, first, end)
		if err != nil {
			return cost{}, err
		}
		err = b.weigh(ctx, s)
		if err == nil {
			_, c := b.fit(s, int64(float64(budget)*float64(end-first)/float64(b.n)))
			sum.disk, sum.read = sum.disk+c.disk, sum.read+c.read
			batches += end - first
			for i := first; i < end; i++ {
				accesses += b.a.Rows(i)
			}
		}
		b.release(s)
		if err != nil {
			return cost{}, err
		}
		if batches >= sampleBatches {
			break
		}
	}
	// By accesses: some mini-batches are larger than others.
	f := float64(all) / float64(max(accesses, 1))
	return cost{int64(float64(sum.disk) * f), int64(float64(sum.read) * f)}, nil
}
