package superbatch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/testing/wide"
)

// random is a superbatch whose rows are skewed to low numbers.
func random(r *rand.Rand, batches, rows, limit int) Memory {
	m := make(Memory, batches)
	for b := range m {
		seen := map[int64]bool{}
		for range r.IntN(limit + 1) {
			row := int64(float64(rows) * r.Float64() * r.Float64())
			if !seen[row] {
				seen[row] = true
				m[b] = append(m[b], row)
			}
		}
	}
	return m
}

// play makes the moves that the changesets ask for, and returns the number of rows that were read:
// the place that an access gives for its row must be right.
func play(t *testing.T, m Memory, c Config, x *Changes) (reads int64) {
	t.Helper()
	cache := make([]int64, c.Slots)
	for i := range cache {
		cache[i] = Empty
	}
	if c.Before != nil {
		copy(cache, c.Before.Rows)
	}
	into := map[int32]bool{}
	require.Equal(t, len(m), x.Batches())
	hits, moves := int64(0), int64(0)
	for b, rows := range m {
		slots := x.Slots(b)
		require.Len(t, slots, len(rows))
		for i, s := range slots {
			if s == Miss {
				require.NotContains(t, cache, rows[i],
					"mini-batch %d reads row %d, which is cached", b, rows[i])
				reads++
				continue
			}
			require.Equal(t, rows[i], cache[s], "mini-batch %d, slot %d", b, s)
			hits++
		}
		clear(into)
		for _, v := range x.Moves(b) {
			require.False(t, into[v.Slot], "two rows move into slot %d", v.Slot)
			into[v.Slot] = true
			require.EqualValues(t, Miss, slots[v.At], "a row that is cached moves")
			cache[v.Slot] = rows[v.At]
			moves++
		}
	}
	require.Equal(t, cache, x.After.Rows)
	order := slices.Sorted(slices.Values(x.After.Reuse))
	require.Len(t, order, int(c.Slots))
	require.Len(t, slices.Compact(order), int(c.Slots))
	require.Equal(t, hits, x.Stats.Hits)
	require.Equal(t, moves, x.Stats.Inserted)
	return reads
}

// fewest is the least number of reads that any choice of rows needs: it tries every set of rows
// that may be kept after each mini-batch. Rows are below 16.
func fewest(m Memory, slots int64, held uint16) int64 {
	best := map[uint16]int64{held: 0}
	for _, rows := range m {
		var brings uint16
		for _, r := range rows {
			brings |= 1 << r
		}
		next := map[uint16]int64{}
		for had, reads := range best {
			reads += int64(bits.OnesCount16(brings &^ had))
			from := had | brings
			for keep := from; ; keep = (keep - 1) & from {
				if int64(bits.OnesCount16(keep)) <= slots {
					if was, ok := next[keep]; !ok || reads < was {
						next[keep] = reads
					}
				}
				if keep == 0 {
					break
				}
			}
		}
		best = next
	}
	least := int64(math.MaxInt64)
	for _, reads := range best {
		least = min(least, reads)
	}
	return least
}

// plain is MIN with bypass as it is defined, by sorting.
func plain(m Memory, slots int64, held []int64) (reads int64) {
	after := func(b int, row int64) int {
		for i := b + 1; i < len(m); i++ {
			if slices.Contains(m[i], row) {
				return i
			}
		}
		return math.MaxInt
	}
	cached := slices.DeleteFunc(slices.Clone(held), func(row int64) bool { return row == Empty })
	for b, rows := range m {
		for _, row := range rows {
			if !slices.Contains(cached, row) {
				reads++
				cached = append(cached, row)
			}
		}
		next := map[int64]int{}
		for _, row := range cached {
			next[row] = after(b, row)
		}
		slices.SortStableFunc(cached, func(x, y int64) int { return next[x] - next[y] })
		cached = cached[:min(int64(len(cached)), slots)]
	}
	return reads
}

// trials is the number of random traces that a test plays.
func trials() int {
	if wide.Lean() {
		return 1000
	}
	return 10000
}

func TestFewestReads(t *testing.T) {
	for n := range trials() {
		r := rand.New(rand.NewPCG(uint64(n), 1))
		m := random(r, 1+r.IntN(7), 1+r.IntN(7), 5)
		c := Config{Slots: int64(r.IntN(5)), Workers: 1 + r.IntN(3)}
		held := uint16(0)
		if r.IntN(3) > 0 {
			c.Before = &State{}
			for slot := range int32(c.Slots) {
				row := r.Int64N(7)
				if held>>row&1 != 0 || r.IntN(4) == 0 {
					row = Empty
				} else {
					held |= 1 << row
				}
				c.Before.Rows = append(c.Before.Rows, row)
				c.Before.Reuse = append(c.Before.Reuse, slot)
			}
			r.Shuffle(int(c.Slots), func(i, j int) {
				o := c.Before.Reuse
				o[i], o[j] = o[j], o[i]
			})
		}
		least := fewest(m, c.Slots, held)
		for i := range 2 {
			c.Keep = i > 0
			x, err := Inspect(t.Context(), m, c)
			require.NoError(t, err)
			require.Equal(t, least, play(t, m, c, x), "trace %d: %v, %+v", n, m, c)
		}
	}
}

func TestAgainstPlainMIN(t *testing.T) {
	for n := range trials() / 50 {
		r := rand.New(rand.NewPCG(uint64(n), 2))
		rows := 20 + r.IntN(300)
		all := random(r, 2+r.IntN(40), rows, 40)
		c := Config{Slots: int64(r.IntN(rows)), Workers: 1 + r.IntN(4), Keep: n%2 == 0}
		// One superbatch after the other, each with what the last one has left.
		for first, size := 0, 1+r.IntN(len(all)); first < len(all); first += size {
			m := all[first:min(first+size, len(all))]
			x, err := Inspect(t.Context(), m, c)
			require.NoError(t, err)
			reads := play(t, m, c, x)
			var held []int64
			if c.Before != nil {
				held = c.Before.Rows
			}
			require.Equal(t, plain(m, c.Slots, held), reads, "trace %d from %d", n, first)
			require.Equal(t, reads, x.Stats.Accesses-x.Stats.Hits)
			c.Before = &x.After
		}
	}
}

// Any number of workers finds the same, with a table of the rows that are accessed and of all, also
// over what an earlier superbatch has left.
func TestWorkersAgree(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 3))
	earlier, m := random(r, 20, 5000, 400), random(r, 60, 5000, 400)
	for i := range 4 {
		var want *Changes
		c := Config{Slots: 700, GPU: int64(i>>1) * 300, Keep: i&1 != 0}
		left, err := Inspect(t.Context(), earlier, c)
		require.NoError(t, err)
		c.Before = &left.After
		for _, workers := range []int{0, 1, 2, 3, 8} {
			for _, c.Nodes = range []int64{0, 5000, 1 << 40} {
				c.Workers = workers
				x, err := Inspect(t.Context(), m, c)
				require.NoError(t, err)
				x.Stats.Bytes, x.more = 0, nil // of the workers' tables
				if want == nil {
					want = x
				}
				require.Equal(t, want, x, "%d workers, %d nodes", workers, c.Nodes)
			}
		}
	}
}

// broken fails to give a mini-batch, or gives another number of rows than it said.
type broken struct {
	Memory
	fails error
	more  bool
}

func (b *broken) Read(batch int, buf []int64) ([]int64, error) {
	if batch == 1 && b.fails != nil {
		return nil, b.fails
	}
	if batch == 1 && b.more {
		return append(slices.Clone(b.Memory[1]), 99), nil
	}
	return b.Memory.Read(batch, buf)
}

func TestBadInput(t *testing.T) {
	m := Memory{{1, 2}, {3}, {1}}
	lost := errors.New("lost")
	_, err := Inspect(t.Context(), &broken{Memory: m, fails: lost}, Config{Slots: 1, Workers: 2})
	require.ErrorIs(t, err, lost)
	_, err = Inspect(t.Context(), &broken{Memory: m, more: true}, Config{Slots: 1})
	require.ErrorContains(t, err, "mini-batch 1 has 2 rows and was said to have 1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Inspect(ctx, m, Config{Slots: 1})
	require.ErrorIs(t, err, context.Canceled)
	_, err = Inspect(t.Context(), m, Config{Slots: -1})
	require.ErrorContains(t, err, "a cache of -1 rows")
	_, err = Inspect(t.Context(), m, Config{Slots: 1,
		Before: &State{Rows: []int64{1, 2}, Reuse: []int32{0, 1}}})
	require.ErrorContains(t, err, "has 1 slots and was left with 2")
	before := State{Rows: []int64{7, Empty}, Reuse: []int32{1, 0}}
	x, err := Inspect(t.Context(), Memory{}, Config{Slots: 2, Before: &before})
	require.NoError(t, err)
	require.Equal(t, before, x.After)
}

// Slots that lose their rows are the first to be used again, and what the others hold still hits.
func TestStateWithout(t *testing.T) {
	c, err := Inspect(context.Background(), Memory{{1, 2, 3, 4}}, Config{Slots: 5, GPU: 2,
		Keep: true})
	require.NoError(t, err)
	gpu := slices.Clone(c.After.Rows[:2])
	require.NotContains(t, gpu, int64(Empty))
	was := State{slices.Clone(c.After.Rows), slices.Clone(c.After.Reuse)}
	left := c.After.Without(2)
	require.Equal(t, was, c.After)
	require.Equal(t, append(gpu, Empty, Empty, Empty), left.Rows)
	require.ElementsMatch(t, []int32{2, 3, 4}, left.Reuse[:3])
	require.ElementsMatch(t, []int32{0, 1}, left.Reuse[3:])
	next, err := Inspect(context.Background(), Memory{{1, 2, 3, 4}}, Config{Slots: 5, GPU: 2,
		Before: left})
	require.NoError(t, err)
	require.EqualValues(t, 2, next.Stats.Hits)
}

// TestReuse: what nobody knows a use of leaves in the order of its last access, after the slots
// that are empty.
func TestReuse(t *testing.T) {
	x, err := Inspect(t.Context(), Memory{{1, 2}, {3}, {1}, {9}}, Config{Slots: 4})
	require.NoError(t, err)
	// Rows 2, 3 and 9 are not accessed again.
	require.Equal(t, []int64{1, Empty, Empty, Empty}, x.After.Rows)
	require.Equal(t, []int32{1, 2, 3, 0}, x.After.Reuse)
	x, err = Inspect(t.Context(), Memory{{4, 5, 6, 7}, {4, 5, 6}, {7}, {4}, {5}},
		Config{Slots: 4, Before: &x.After})
	require.NoError(t, err)
	require.Equal(t, []int64{7, 4, 5, 6}, x.After.Rows)
	require.Equal(t, []int32{3, 0, 1, 2}, x.After.Reuse)

	x, err = Inspect(t.Context(), Memory{{1, 2}, {3}, {1}, {9}}, Config{Slots: 4, Keep: true})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 3, 9}, x.After.Rows)
	require.Equal(t, []int32{1, 2, 0, 3}, x.After.Reuse)
	x, err = Inspect(t.Context(), Memory{{2}, {5, 6}, {2}}, Config{Slots: 4, Keep: true,
		Before: &x.After})
	require.NoError(t, err)
	require.Equal(t, []int64{6, 2, 5, 9}, x.After.Rows)
	require.Equal(t, []int32{3, 2, 0, 1}, x.After.Reuse)
}

func ExampleInspect() {
	// Three mini-batches, sampled beforehand, and a cache of two rows.
	batches := Memory{{10, 11, 12}, {13, 11}, {10, 11, 14}}
	changes, err := Inspect(context.Background(), batches, Config{Slots: 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	for b, rows := range batches {
		for i, slot := range changes.Slots(b) {
			if slot == Miss {
				fmt.Print("read ", rows[i], ", ")
			} else {
				fmt.Print(rows[i], " is cached, ")
			}
		}
		fmt.Println(len(changes.Moves(b)), "stay")
	}
	// Output:
	// read 10, read 11, read 12, 2 stay
	// read 13, 11 is cached, 0 stay
	// 10 is cached, 11 is cached, read 14, 0 stay
}

// cpuSeconds is the processor time of the process: it says more than the clock on a busy machine.
func cpuSeconds(b *testing.B) float64 {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// sampledLike are accesses like those of sampled mini-batches: 200 of 20,000 rows each, of 2
// million skewed ones.
func sampledLike() Memory {
	r := rand.New(rand.NewPCG(1, 9))
	m := make(Memory, 200)
	for i := range m {
		seen := map[int64]bool{}
		for len(m[i]) < 20000 {
			row := int64(2e6 * r.Float64() * r.Float64() * r.Float64())
			if !seen[row] {
				seen[row] = true
				m[i] = append(m[i], row)
			}
		}
	}
	return m
}

// BenchmarkInspect has a cache of a tenth of the rows.
func BenchmarkInspect(b *testing.B) {
	m := sampledLike()
	for _, c := range []Config{{Workers: 1}, {Workers: 2}, {Workers: 1, GPU: 50000},
		{Workers: 1, GPU: 50000, Keep: true}} {
		c.Slots = 200000
		b.Run(fmt.Sprintf("workers=%d,gpu=%d,keep=%v", c.Workers, c.GPU, c.Keep), func(b *testing.B) {
			var s Stats
			from := cpuSeconds(b)
			for b.Loop() {
				x, err := Inspect(b.Context(), m, c)
				require.NoError(b, err)
				s = x.Stats
			}
			b.ReportMetric(float64(s.Accesses)*float64(b.N)/b.Elapsed().Seconds()/1e6,
				"Maccesses/s")
			b.ReportMetric(float64(s.Accesses)*float64(b.N)/(cpuSeconds(b)-from)/1e6,
				"Maccesses/cpu-s")
			b.ReportMetric(float64(s.Bytes)/float64(s.Accesses), "B/access")
			b.ReportMetric(float64(s.Hits)/float64(s.Accesses), "hits")
		})
	}
}

// BenchmarkBegin shows what a worker takes for the accesses that are not its own.
func BenchmarkBegin(b *testing.B) {
	m := sampledLike()
	for _, workers := range []int{1, 4, 16} {
		for _, nodes := range []int64{0, 2e6} {
			b.Run(fmt.Sprintf("workers=%d,nodes=%d", workers, nodes), func(b *testing.B) {
				var n int64
				from := cpuSeconds(b)
				for b.Loop() {
					x, err := Begin(b.Context(), m, Config{Workers: workers, Slots: 200000,
						Nodes: nodes})
					require.NoError(b, err)
					n += x.Stats.Accesses
				}
				b.ReportMetric((cpuSeconds(b)-from)*1e9/float64(n), "cpu-ns/access")
			})
		}
	}
}

// A mini-batch's changeset can be read while those of later ones are found, and is then what it is
// at the end.
func TestWait(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 3))
	m := random(r, 300, 5000, 400)
	for _, c := range []Config{{Slots: 700}, {Slots: 700, GPU: 300, Keep: true}} {
		want, err := Inspect(t.Context(), m, c)
		require.NoError(t, err)
		x, err := Begin(t.Context(), m, c)
		require.NoError(t, err)
		early, stop := context.WithCancel(t.Context())
		stop()
		require.ErrorIs(t, x.Wait(early, 0), context.Canceled)
		played := make(chan error, 1)
		go func() { played <- x.Play(t.Context()) }()
		for b := range m {
			require.NoError(t, x.Wait(t.Context(), b))
			require.Equal(t, want.Slots(b), x.Slots(b))
			require.Equal(t, want.Moves(b), x.Moves(b))
			require.Equal(t, want.Demotions(b), x.Demotions(b))
		}
		require.NoError(t, <-played)
		require.Equal(t, want.After, x.After)
		require.Equal(t, want.Stats, x.Stats)
	}
}

// Whoever waits hears that Play has failed; the changesets before that are there.
func TestWaitForFailure(t *testing.T) {
	m := Memory{{1, 2}, {3}, {1}}
	lost := errors.New("lost")
	b := &broken{Memory: m}
	x, err := Begin(t.Context(), b, Config{Slots: 1})
	require.NoError(t, err)
	b.fails = lost
	heard := make(chan error, 2)
	for range 2 {
		go func() { heard <- x.Wait(t.Context(), 2) }()
	}
	require.ErrorIs(t, x.Play(t.Context()), lost)
	require.ErrorIs(t, <-heard, lost)
	require.ErrorIs(t, <-heard, lost)
	require.NoError(t, x.Wait(t.Context(), 0))
	require.ErrorIs(t, x.Wait(t.Context(), 1), lost)
}
