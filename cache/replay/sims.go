package replay

import (
	"slices"

	"helios/cache/policy"
	"helios/cache/superbatch"
)

// batch holds what simulators get of a mini-batch.
type batch struct {
	index int
	again bool // the first after a Reset: batches that stood before it may stand again
	parts [][]int64
	seen  []seen
}

// tally sums a pass's batches. A batch that stands again after a Reset counts as it does then.
type tally struct {
	done   []Counts
	sum    Counts
	recent []counted // the last batches, in case they stand again
}

type counted struct {
	index int
	c     Counts
}

// maxAgain bounds the batches that a run looks up ahead of training, and so those that stand again
// after a Reset. Their rows are kept only where the trace has one.
const maxAgain = 256

func (t *tally) batch(index int, again bool, c Counts) {
	if again {
		for len(t.recent) > 0 && t.recent[len(t.recent)-1].index >= index {
			t.sum.add(t.recent[len(t.recent)-1].c, -1)
			t.recent = t.recent[:len(t.recent)-1]
		}
	}
	if len(t.recent) >= 2*maxAgain {
		t.recent = append(t.recent[:0], t.recent[maxAgain:]...)
	}
	c.Batches = 1
	t.recent = append(t.recent, counted{index, c})
	t.sum.add(c, 1)
}

func (t *tally) passEnds() {
	t.done = append(t.done, t.sum)
	t.sum, t.recent = Counts{}, t.recent[:0]
}

func (t *tally) passes() []Counts { return t.done }

// static plays tiers that hold the same rows throughout.
type static struct {
	tally
	gpu, cpu bitset
	bytes    int64
}

func (s *static) batch(b *batch) {
	var c Counts
	for _, rows := range b.parts {
		for _, r := range rows {
			switch {
			case s.gpu.has(r):
				c.RowsGPU++
			case s.cpu.has(r):
				c.RowsCPU++
			}
		}
		c.Rows += int64(len(rows))
	}
	c.RowsSSD = c.Rows - c.RowsGPU - c.RowsCPU
	c.Accesses = c.Rows - c.RowsCPU
	c.Reads, c.BytesSSD = c.RowsSSD, c.RowsSSD*s.bytes
	s.tally.batch(b.index, b.again, c)
}

// dynamic plays a directory. With a window it runs behind, until the batches that it has to
// announce are there. Within a pass they are found by their index: what a run announced before a
// Reset and looked up after it only, stands after it.
type dynamic struct {
	tally
	d         policy.Directory
	view      int
	v         *view
	window    int
	again     bool // batches may stand again
	queue     []queued
	known     map[int]*batch // of the pass, from the next batch to play on
	met       int            // the highest index of the pass so far, plus 1
	announced int            // batches of the pass below this index were announced
	out       []policy.Answer
}

// queued is a batch, or where the tiers were emptied.
type queued struct {
	b     *batch
	reset policy.Directory // the empty one
}

func (s *dynamic) batch(b *batch) {
	if s.window == 0 {
		s.play(b)
		return
	}
	if s.known == nil {
		s.known = map[int]*batch{}
	}
	if len(s.queue) == 0 && s.met == 0 {
		s.announced = b.index // a resumed pass begins in the middle
	}
	s.queue = append(s.queue, queued{b: b})
	s.known[b.index] = b
	s.met = max(s.met, b.index+1)
	for len(s.queue) > 0 && (s.queue[0].b == nil || s.met > s.queue[0].b.index+s.window) {
		s.next()
	}
}

// next plays the head of the queue.
func (s *dynamic) next() {
	q := s.queue[0]
	s.queue = s.queue[1:]
	if q.b == nil {
		s.d = q.reset
		s.announced = -1 // the batch to come
		return
	}
	if s.announced < 0 {
		s.announced = q.b.index
	}
	for ; s.announced < s.met && s.announced <= q.b.index+s.window; s.announced++ {
		if b := s.known[s.announced]; b != nil {
			s.d.Announce(b.seen[s.view].union)
		}
	}
	s.play(q.b)
	if s.again {
		delete(s.known, q.b.index-maxAgain)
	} else {
		delete(s.known, q.b.index)
	}
}

// reset empties the cache where it stands in the trace.
func (s *dynamic) reset(d policy.Directory) {
	if len(s.queue) == 0 {
		s.d, s.announced = d, -1
		return
	}
	s.queue = append(s.queue, queued{reset: d})
}

func (s *dynamic) play(b *batch) {
	var c Counts
	seen := &b.seen[s.view]
	before := s.d.Stats()
	s.d.NextBatch()
	for i := range seen.parts {
		p := &seen.parts[i]
		if len(s.out) < len(p.lines) {
			s.out = make([]policy.Answer, len(p.lines)+len(p.lines)/4)
		}
		s.d.Access(p.lines, s.out)
		hits := int64(0)
		for j, n := range p.counts {
			if s.out[j].Hit {
				hits += int64(n)
			}
		}
		c.RowsGPU += hits
		c.RowsCPU += p.cpu
		c.RowsSSD += p.rows - p.cpu - hits
		c.Rows += p.rows
	}
	after := s.d.Stats()
	c.Accesses = after.Accesses - before.Accesses
	c.Reads = c.Accesses - (after.Hits - before.Hits)
	c.BytesSSD = c.Reads * s.v.bytes
	c.Inserted, c.Evicted, c.Bypassed = after.Inserted-before.Inserted,
		after.Evicted-before.Evicted, after.Bypassed-before.Bypassed
	s.tally.batch(b.index, b.again, c)
}

func (s *dynamic) passEnds() {
	for len(s.queue) > 0 {
		s.next()
	}
	if s.window > 0 {
		// Batches that were announced and not looked up when the pass ended do not come.
		s.d.Forget()
	}
	clear(s.known)
	s.met, s.announced = 0, 0
	s.tally.passEnds()
}

// belady plays MIN with bypass by part. The lines that are cached stand in buckets by the lookup
// that accesses them next, so a lookup's hits are its bucket, and what has to go stands in the last
// bucket: no line is looked for, and a part takes time in proportion to its lines.
type belady struct {
	tally
	view   int
	v      *view
	slots  int64
	cached bitset
	n      int64
	heads  []int32            // by lookup: first node of its bucket + 1
	full   *superbatch.MaxSet // lookups whose bucket is not empty
	nodes  []node
	free   int32 // first free node + 1
}

// node is a cached line in its bucket.
type node struct {
	line int64
	next int32
}

func newBelady(number int, v *view, slots int64) *belady {
	return &belady{view: number, v: v, slots: slots}
}

func (s *belady) batch(b *batch) {
	var c Counts
	seen := &b.seen[s.view]
	if s.full == nil {
		s.full = superbatch.NewMaxSet(0)
	}
	for i := range seen.parts {
		p := &seen.parts[i]
		now := seen.first + int64(i)
		hits := int64(0)
		for j, line := range p.lines {
			if s.cached.has(line) {
				hits += int64(p.counts[j])
				c.Reads--
			}
		}
		c.Reads += int64(len(p.lines))
		c.Accesses += int64(len(p.lines))
		s.empty(now)
		for j, line := range p.lines {
			if p.next[j] == never || s.slots == 0 {
				if s.cached.has(line) {
					s.cached.clear(line)
				}
				continue
			}
			s.put(int64(p.next[j]), line)
		}
		for s.n > s.slots {
			s.evict()
		}
		c.RowsGPU += hits
		c.RowsCPU += p.cpu
		c.RowsSSD += p.rows - p.cpu - hits
		c.Rows += p.rows
	}
	c.BytesSSD = c.Reads * s.v.bytes
	s.tally.batch(b.index, b.again, c)
}

// empty ends a bucket: its lines are accessed now. They are put where they are accessed next.
func (s *belady) empty(now int64) {
	if now >= int64(len(s.heads)) || s.heads[now] == 0 {
		return
	}
	for i := s.heads[now]; i != 0; {
		n := &s.nodes[i-1]
		next := n.next
		n.next = s.free
		s.free = i
		i = next
		s.n--
	}
	s.heads[now] = 0
	s.full.Clear(now)
}

func (s *belady) put(lookup, line int64) {
	if lookup >= int64(len(s.heads)) {
		s.heads = append(s.heads, make([]int32, max(lookup+1, int64(2*len(s.heads)))-
			int64(len(s.heads)))...)
	}
	i := s.free
	if i != 0 {
		s.free = s.nodes[i-1].next
	} else {
		s.nodes = append(s.nodes, node{})
		i = int32(len(s.nodes))
	}
	s.nodes[i-1] = node{line, s.heads[lookup]}
	s.heads[lookup] = i
	s.full.Set(lookup)
	s.cached.set(line)
	s.n++
}

// evict drops a line of the last bucket.
func (s *belady) evict() {
	last := s.full.Last()
	i := s.heads[last]
	n := &s.nodes[i-1]
	s.heads[last] = n.next
	if n.next == 0 {
		s.full.Clear(last)
	}
	n.next = s.free
	s.free = i
	s.cached.clear(n.line)
	s.n--
}

func (s *belady) passEnds() { s.tally.passEnds() }

// counter finds what the best static tiers of each pass hit: the sums of its highest counts.
type counter struct {
	counts paged
	total  Counts
	wants  []*wanted
	again  bool // batches may stand again
	recent []lookedUp
}

// lookedUp is a batch that may stand again.
type lookedUp struct {
	index int
	parts [][]int64
}

// wanted is a size of the oracle's tiers.
type wanted struct {
	tally
	gpu, cpu, bytes int64
}

func (c *counter) want(gpu, cpu, bytes int64) *wanted {
	w := &wanted{gpu: gpu, cpu: cpu, bytes: bytes}
	c.wants = append(c.wants, w)
	return w
}

// batch of an oracle is counted by the counter, before it.
func (w *wanted) batch(*batch) {}

// passEnds of an oracle: the counter has put its counts there.
func (w *wanted) passEnds() {}

func (c *counter) count(b *batch) {
	if b.again {
		for len(c.recent) > 0 && c.recent[len(c.recent)-1].index >= b.index {
			c.addRows(c.recent[len(c.recent)-1].parts, -1)
			c.recent = c.recent[:len(c.recent)-1]
		}
	}
	if c.again {
		if len(c.recent) == maxAgain {
			c.recent = append(c.recent[:0], c.recent[1:]...)
		}
		c.recent = append(c.recent, lookedUp{b.index, b.parts})
	}
	c.addRows(b.parts, 1)
}

func (c *counter) addRows(parts [][]int64, sign int64) {
	for _, rows := range parts {
		for _, r := range rows {
			*c.counts.entry(r) += uint32(sign)
		}
		c.total.Rows += sign * int64(len(rows))
	}
	c.total.Batches += sign
}

// ends is the end of a pass.
func (c *counter) ends() {
	many := map[uint32]int64{}
	for _, page := range c.counts.pages {
		for i, n := range page {
			if n > 0 {
				many[n]++
				page[i] = 0
			}
		}
	}
	order := make([]uint32, 0, len(many))
	for n := range many {
		order = append(order, n)
	}
	slices.Sort(order)
	top := func(k int64) (sum int64) {
		for _, n := range slices.Backward(order) {
			take := min(k, many[n])
			sum += take * int64(n)
			k -= take
		}
		return sum
	}
	for _, w := range c.wants {
		x := c.total
		x.RowsGPU = top(w.gpu)
		x.RowsCPU = top(w.gpu+w.cpu) - x.RowsGPU
		x.RowsSSD = x.Rows - x.RowsGPU - x.RowsCPU
		x.Accesses = x.Rows - x.RowsCPU
		x.Reads, x.BytesSSD = x.RowsSSD, x.RowsSSD*w.bytes
		w.done = append(w.done, x)
	}
	c.total, c.recent = Counts{}, c.recent[:0]
}
