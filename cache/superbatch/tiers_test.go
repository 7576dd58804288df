package superbatch

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// tierPlay is a superbatch whose moves and demotions are made on simulated memory.
type tierPlay struct {
	t     *testing.T
	m     Memory
	c     Config
	x     *Changes
	slots []int64 // memory: by slot, the row whose bytes it has
	gpu   map[int64]bool
	kept  map[int64]bool
	reads int64
	hits  [2]int64
	moved struct{ in, up, down int64 }
}

// next is a row's first access after a mini-batch, by mini-batch and place.
func (p *tierPlay) next(b int, row int64) (batchPos [2]int) {
	for i := b + 1; i < len(p.m); i++ {
		if pos := slices.Index(p.m[i], row); pos >= 0 {
			return [2]int{i, pos}
		}
	}
	return [2]int{math.MaxInt}
}

// nearest are the n rows that are accessed first after a mini-batch, and are accessed at all.
func (p *tierPlay) nearest(b int, rows map[int64]bool, n int64) map[int64]bool {
	type coming struct {
		row  int64
		next [2]int
	}
	var all []coming
	for row := range rows {
		if next := p.next(b, row); next[0] != math.MaxInt {
			all = append(all, coming{row, next})
		}
	}
	slices.SortFunc(all, func(a, b coming) int { return slices.Compare(a.next[:], b.next[:]) })
	out := map[int64]bool{}
	for _, c := range all[:min(n, int64(len(all)))] {
		out[c.row] = true
	}
	return out
}

// playTiers makes what the changesets say, and holds every access and every place against the rule
// that the package states, by sorting.
func playTiers(t *testing.T, m Memory, c Config, x *Changes) *tierPlay {
	t.Helper()
	p := &tierPlay{t: t, m: m, c: c, x: x, slots: make([]int64, c.Slots)}
	for i := range p.slots {
		p.slots[i] = Empty
	}
	if c.Before != nil {
		copy(p.slots, c.Before.Rows)
	}
	p.gpu, p.kept = map[int64]bool{}, map[int64]bool{}
	for slot, row := range p.slots {
		if row != Empty && p.next(-1, row)[0] != math.MaxInt {
			p.kept[row] = true
			if int64(slot) < c.GPU {
				p.gpu[row] = true
			}
		}
	}
	require.Equal(t, len(m), x.Batches())
	for b := range m {
		p.batch(b)
	}
	held := map[int64]bool{}
	for slot, row := range x.After.Rows {
		if row != Empty {
			require.Equal(t, row, p.slots[slot], "slot %d after the last mini-batch", slot)
			require.False(t, held[row], "row %d is there twice", row)
			held[row] = true
		}
	}
	order := slices.Sorted(slices.Values(x.After.Reuse))
	require.Len(t, order, int(c.Slots))
	require.Len(t, slices.Compact(order), int(c.Slots))
	empty := slices.IndexFunc(x.After.Reuse, func(s int32) bool {
		return x.After.Rows[s] != Empty
	})
	for i, slot := range x.After.Reuse {
		require.Equal(t, empty < 0 || i < empty, x.After.Rows[slot] == Empty, "empty ones first")
	}
	s := x.Stats
	require.Equal(t, p.hits, [2]int64{s.HitsGPU, s.HitsCPU})
	require.Equal(t, s.Hits, s.HitsGPU+s.HitsCPU)
	require.Equal(t, p.reads, s.Loaded+s.Accesses-s.Hits)
	require.Equal(t, []int64{p.moved.in, p.moved.up, p.moved.down},
		[]int64{s.Inserted, s.Promoted, s.Demoted})
	return p
}

func (p *tierPlay) batch(b int) {
	t, x, rows, gpu := p.t, p.x, p.m[b], p.c.GPU
	slots := x.Slots(b)
	require.Len(t, slots, len(rows))
	for i, s := range slots {
		require.Equal(t, p.kept[rows[i]], s != Miss, "mini-batch %d, row %d", b, rows[i])
		if s == Miss {
			p.reads++
			continue
		}
		require.Equal(t, rows[i], p.slots[s], "mini-batch %d, slot %d", b, s)
		require.Equal(t, p.gpu[rows[i]], int64(s) < gpu, "mini-batch %d, row %d", b, rows[i])
		if int64(s) < gpu {
			p.hits[0]++
		} else {
			p.hits[1]++
		}
	}
	// The rule.
	all, pool := map[int64]bool{}, map[int64]bool{}
	for row := range p.kept {
		all[row] = true
	}
	for _, row := range rows {
		all[row] = true
	}
	p.kept = p.nearest(b, all, p.c.Slots)
	for row := range p.kept {
		if p.gpu[row] || slices.Contains(rows, row) {
			pool[row] = true
		}
	}
	p.gpu = p.nearest(b, pool, gpu)
	// The changes.
	from, to := map[int32]bool{}, map[int32]bool{}
	for _, d := range x.Demotions(b) {
		require.True(t, int64(d.From) < gpu && int64(d.To) >= gpu, "%+v", d)
		require.False(t, from[d.From] || to[d.To], "%+v twice", d)
		from[d.From], to[d.To] = true, true
		require.NotContains(t, rows, p.slots[d.From], "a row of the mini-batch is demoted")
		p.slots[d.To] = p.slots[d.From]
		p.moved.down++
	}
	for _, v := range x.Moves(b) {
		require.False(t, to[v.Slot], "two rows move into slot %d", v.Slot)
		to[v.Slot] = true
		p.slots[v.Slot] = rows[v.At]
		switch was, up := slots[v.At], int64(v.Slot) < gpu; {
		case was == Miss:
			p.moved.in++
		case up:
			require.GreaterOrEqual(t, int64(was), gpu, "a row moves within the GPU tier")
			p.moved.up++
		default:
			require.Less(t, int64(was), gpu, "a row moves within the CPU tier")
			p.moved.down++
		}
	}
}

// byOrder are the rows of a state in the order in which they leave.
func byOrder(s State) (out []int64) {
	for _, slot := range s.Reuse {
		out = append(out, s.Rows[slot])
	}
	return out
}

// TestTiers plays one superbatch after the other on two tiers and on one: the same rows are read,
// and with Keep the same rows are there at the end.
func TestTiers(t *testing.T) {
	for n := range trials() {
		r := rand.New(rand.NewPCG(uint64(n), 4))
		rows := 2 + r.IntN(40)
		all := random(r, 1+r.IntN(16), rows, 1+r.IntN(12))
		two := Config{Slots: int64(r.IntN(rows + 3)), Workers: 1 + r.IntN(3), Keep: n%4 > 0}
		two.GPU = r.Int64N(two.Slots + 1)
		one := two
		one.GPU = 0
		for first, size := 0, 1+r.IntN(len(all)); first < len(all); first += size {
			m := all[first:min(first+size, len(all))]
			x, err := Inspect(t.Context(), m, two)
			require.NoError(t, err)
			p := playTiers(t, m, two, x)
			var held []int64
			if two.Before != nil {
				held = two.Before.Rows
			}
			require.Equal(t, plain(m, two.Slots, held), p.reads, "trace %d from %d", n, first)
			if !two.Keep {
				one.Before = two.Before
			}
			y, err := Inspect(t.Context(), m, one)
			require.NoError(t, err)
			playTiers(t, m, one, y)
			require.Equal(t, y.Stats.Hits, x.Stats.Hits, "trace %d from %d", n, first)
			require.Equal(t, y.Stats.Inserted, x.Stats.Inserted)
			if two.Keep {
				require.Equal(t, y.Stats.Evicted, x.Stats.Evicted)
				require.Equal(t, byOrder(y.After), byOrder(x.After), "trace %d from %d", n, first)
			}
			two.Before, one.Before = &x.After, &y.After
		}
	}
}

// TestTiersFewestReads: no choice of rows reads fewer, by trying all.
func TestTiersFewestReads(t *testing.T) {
	for n := range trials() {
		r := rand.New(rand.NewPCG(uint64(n), 5))
		m := random(r, 1+r.IntN(7), 1+r.IntN(7), 5)
		c := Config{Slots: int64(r.IntN(5)), Keep: n&1 != 0}
		c.GPU = r.Int64N(c.Slots + 1)
		x, err := Inspect(t.Context(), m, c)
		require.NoError(t, err)
		require.Equal(t, fewest(m, c.Slots, 0), playTiers(t, m, c, x).reads, "trace %d: %v, %+v",
			n, m, c)
	}
}

// TestTiersMove follows rows from tier to tier.
func TestTiersMove(t *testing.T) {
	m := Memory{{1, 2}, {3}, {3}, {2}, {1, 3}, {1}, {2}}
	x, err := Inspect(t.Context(), m, Config{Slots: 3, GPU: 1})
	require.NoError(t, err)
	playTiers(t, m, Config{Slots: 3, GPU: 1}, x)
	// Row 2 is needed before row 1; then row 3 before both.
	require.Equal(t, []Move{{0, 1}, {1, 0}}, x.Moves(0))
	require.Empty(t, x.Demotions(0))
	require.Equal(t, []Demotion{{0, 2}}, x.Demotions(1))
	require.Equal(t, []Move{{0, 0}}, x.Moves(1))
	// Row 3 is needed in mini-batch 4, as row 1 is, and stays; row 2 later than row 3.
	require.Empty(t, x.Moves(2))
	require.Empty(t, x.Moves(3))
	// Row 3 is not needed again, row 1 goes up.
	require.Equal(t, []Move{{0, 0}}, x.Moves(4))
	require.EqualValues(t, 3, x.Stats.HitsGPU)
	require.EqualValues(t, 1, x.Stats.Demoted)
	_, err = Inspect(t.Context(), m, Config{Slots: 3, GPU: 4})
	require.ErrorContains(t, err, "4 of a cache's 3 rows")
}

// static tries every placement of rows below 16 for a whole trace. It returns the fewest reads and
// the least cost, where a read costs ssd, a hit of the CPU tier 1 and one of the GPU tier nothing.
// Reads that load the placed rows are counted.
func static(m Memory, gpu, cpu int, ssd int64) (reads, least int64) {
	var counts [16]int64
	total := int64(0)
	rows := 0
	for _, b := range m {
		for _, row := range b {
			counts[row]++
			total++
			rows = max(rows, int(row)+1)
		}
	}
	var order []int
	for row := range rows {
		order = append(order, row)
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(counts[b], counts[a]) })
	reads, least = math.MaxInt64, math.MaxInt64
	// Every assignment of a tier to each row: 0 none, 1 CPU, 2 GPU.
	var try func(i, g, c int, inGPU, inCPU int64)
	try = func(i, g, c int, inGPU, inCPU int64) {
		if i == len(order) {
			missed := total - inGPU - inCPU + int64(gpu-g+cpu-c)
			reads = min(reads, missed)
			least = min(least, ssd*missed+inCPU)
			return
		}
		n := counts[order[i]]
		try(i+1, g, c, inGPU, inCPU)
		if g > 0 {
			try(i+1, g-1, c, inGPU+n, inCPU)
		}
		if c > 0 {
			try(i+1, g, c-1, inGPU, inCPU+n)
		}
	}
	try(0, gpu, cpu, 0, 0)
	return reads, least
}

// TestTiersAgainstStatic holds the tiers against every static placement, and the GPU tier against a
// cache of its size alone: it has as many hits.
func TestTiersAgainstStatic(t *testing.T) {
	for n := range trials() {
		r := rand.New(rand.NewPCG(uint64(n), 6))
		m := random(r, 1+r.IntN(20), 1+r.IntN(7), 5)
		c := Config{Slots: int64(r.IntN(5)), Keep: n%2 == 0}
		c.GPU = r.Int64N(c.Slots + 1)
		x, err := Inspect(t.Context(), m, c)
		require.NoError(t, err)
		p := playTiers(t, m, c, x)
		for _, ssd := range []int64{1, 2, 10} {
			reads, least := static(m, int(c.GPU), int(c.Slots-c.GPU), ssd)
			require.LessOrEqual(t, p.reads, reads, "trace %d: %v, %+v", n, m, c)
			require.LessOrEqual(t, ssd*p.reads+p.hits[1], least, "trace %d: %v, %+v", n, m, c)
		}
		alone, err := Inspect(t.Context(), m, Config{Slots: c.GPU})
		require.NoError(t, err)
		require.Equal(t, alone.Stats.Hits, x.Stats.HitsGPU, "trace %d: %v, %+v", n, m, c)
	}
}
