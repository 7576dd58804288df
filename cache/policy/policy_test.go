package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

// play runs a directory and the naive model over random batches, with a window of announcements,
// parts, and fills that fail, and compares every answer, what is cached after every part, and the
// totals.
func play(t testing.TB, policy string, slots int, seed uint64, batches, window, parts int,
	faults bool) {
	r := rand.New(rand.NewPCG(seed, 1))
	d := newQueues(Config{Slots: int64(slots), Seed: seed}, Find(policy))
	n := newNaive(policy, slots, seed)
	lines := int64(2*slots + 5)
	all := make([][][]int64, batches)
	for i := range all {
		for range 1 + r.IntN(parts) {
			part := []int64{}
			for range r.IntN(max(2, slots)) {
				// A skewed draw, so that there is something to keep.
				l := int64(float64(lines) * r.Float64() * r.Float64())
				if !slices.Contains(part, l) {
					part = append(part, l)
				}
			}
			all[i] = append(all[i], part)
		}
	}
	announced := 0
	var order []int64
	out := make([]Answer, slots+8)
	for i, b := range all {
		for window > 0 && announced < batches && announced <= i+window {
			union := []int64{}
			for _, p := range all[announced] {
				for _, l := range p {
					if !slices.Contains(union, l) {
						union = append(union, l)
					}
				}
			}
			d.Announce(union)
			n.announce(union)
			announced++
		}
		d.NextBatch()
		n.nextBatch(order)
		order = order[:0]
		for _, p := range b {
			d.Access(p, out)
			hit, in := n.access(p)
			for _, pass := range []bool{true, false} {
				for j, l := range p {
					if hit[j] == pass && in[j] && !slices.Contains(order, l) {
						order = append(order, l)
					}
				}
			}
			for j, l := range p {
				require.Equal(t, hit[j], out[j].Hit, "%s seed %d batch %d line %d: hit", policy,
					seed, i, l)
				require.Equal(t, in[j], out[j].Slot >= 0, "%s seed %d batch %d line %d: cached",
					policy, seed, i, l)
				if in[j] {
					require.Equal(t, l, d.Line(out[j].Slot))
				}
			}
			if faults && len(p) > 0 && r.IntN(3) == 0 {
				if l := p[r.IntN(len(p))]; d.Find(l) >= 0 {
					d.Drop(d.Find(l))
					n.drop(l)
					order = without(order, l)
				}
			}
			count := 0
			for l := int64(0); l < lines; l++ {
				slot := d.Find(l)
				require.Equal(t, n.cached[l] != nil, slot >= 0,
					"%s seed %d batch %d: line %d after the part", policy, seed, i, l)
				if slot >= 0 {
					count++
					require.Equal(t, l, d.Line(slot))
				}
			}
			require.Equal(t, len(n.cached), count)
			require.Equal(t, n.stats, d.Stats())
			evictable := int64(0)
			for l := range n.cached {
				if !n.pinned(l) {
					evictable++
				}
			}
			require.Equal(t, evictable, d.evictable,
				"%s seed %d batch %d: lines that may be evicted", policy, seed, i)
		}
	}
	require.Zero(t, d.announced)
	require.Zero(t, d.uses.n, "a use that never ended")
}

func TestAgainstNaive(t *testing.T) {
	for _, policy := range Online() {
		t.Run(policy, func(t *testing.T) {
			seeds := uint64(40)
			if wide.Lean() {
				seeds = 12
			}
			for seed := range seeds {
				slots := []int{1, 2, 5, 12, 31}[seed%5]
				play(t, policy, slots, seed, 30, []int{0, 1, 3, 8}[seed%4], 1+int(seed%3),
					seed%7 == 0)
			}
			// A line a batch: no pin ever matters, so this is the policy as its paper has it.
			play(t, policy, 20, 99, 30, 0, 1, false)
		})
	}
}

func FuzzAgainstNaive(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint8(7), uint8(2), uint8(1), false)
	f.Fuzz(func(t *testing.T, seed uint64, which, slots, window, parts uint8, faults bool) {
		play(t, Online()[int(which)%len(Online())], 1+int(slots)%40, seed, 12, int(window)%17,
			1+int(parts)%4, faults)
	})
}

func ExampleDirectory() {
	d, _ := New(Config{Policy: LRU, Slots: 2})
	out := make([]Answer, 2)
	for _, batch := range [][]int64{{7, 8}, {7}, {9}, {8}} {
		d.NextBatch()
		d.Access(batch, out)
	}
	fmt.Printf("%+v\n", d.Stats())
	// Output: {Accesses:5 Hits:1 Inserted:4 Evicted:2 Bypassed:0}
}

// With all but eight slots pinned for long, an access takes no longer in a large cache than in a
// small one: what a policy steps over once it does not meet again.
func TestAllButAFewPinned(t *testing.T) {
	const accesses = 4000
	cost := func(name string, slots int64) time.Duration {
		d, err := New(Config{Policy: name, Slots: slots})
		require.NoError(t, err)
		lines, out := make([]int64, slots), make([]Answer, slots)
		for i := range lines {
			lines[i] = int64(i)
		}
		d.NextBatch()
		d.Access(lines, out)
		for i := range int64(accesses) {
			d.Announce([]int64{slots + i})
		}
		d.Announce(lines[:slots-8])
		next := func(i int64) {
			d.NextBatch()
			d.Access([]int64{slots + i}, out)
			require.GreaterOrEqual(t, out[0].Slot, int32(0))
		}
		next(0) // meets whatever is pinned
		start := time.Now()
		for i := int64(1); i < accesses; i++ {
			next(i)
		}
		took := time.Since(start)
		d.NextBatch()
		d.Access(lines[:slots-8], out)
		for _, a := range out[:slots-8] {
			require.True(t, a.Hit, "a pinned line was evicted")
		}
		return took
	}
	for _, name := range Online() {
		small, large := cost(name, 1<<10), cost(name, 1<<17)
		require.Less(t, large, 40*small+100*time.Millisecond, "%s: %v in 2^17 slots, %v in 2^10",
			name, large, small)
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []Config{{Policy: "best"}, {Policy: LRU, Slots: -1},
		{Policy: LRU, Slots: 1 << 31}} {
		_, err := New(c)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	}
}

// A cache of no slots lets everything pass; one that a pass leaves early keeps no pins.
func TestNoSlotsAndForget(t *testing.T) {
	for _, name := range Online() {
		d, err := New(Config{Policy: name})
		require.NoError(t, err)
		out := make([]Answer, 3)
		d.Announce([]int64{1, 2, 3})
		d.NextBatch()
		d.Access([]int64{1, 2, 3}, out)
		require.Equal(t, Stats{Accesses: 3, Bypassed: 3}, d.Stats())

		d, err = New(Config{Policy: name, Slots: 2})
		require.NoError(t, err)
		d.Announce([]int64{1, 2})
		d.Announce([]int64{1, 2})
		d.Announce([]int64{1, 2})
		d.NextBatch()
		d.Access([]int64{1, 2}, out)
		d.NextBatch()
		d.Access([]int64{1}, out)
		d.Forget()
		d.NextBatch()
		d.Access([]int64{3, 4}, out)
		require.Equal(t, Stats{Accesses: 5, Hits: 1, Inserted: 4, Evicted: 2}, d.Stats(), name)
	}
}

func BenchmarkAccess(b *testing.B) {
	for _, name := range Online() {
		for _, window := range []int{0, 8} {
			b.Run(fmt.Sprintf("%s/window%d", name, window), func(b *testing.B) {
				const slots, batch = 1 << 20, 1 << 14
				d, err := New(Config{Policy: name, Slots: slots})
				require.NoError(b, err)
				r := rand.New(rand.NewPCG(1, 1))
				// Distinct lines of a skewed draw, about half of them hits; drawn ahead of the
				// clock.
				batches := make([][]int64, 512)
				for i := range batches {
					seen := map[int64]bool{}
					for len(seen) < batch {
						seen[int64(8*slots*r.Float64()*r.Float64()*r.Float64())] = true
					}
					for l := range seen {
						batches[i] = append(batches[i], l)
					}
				}
				out := make([]Answer, batch)
				announced, done := 0, 0
				step := func() {
					for window > 0 && announced <= done+window {
						d.Announce(batches[announced%len(batches)])
						announced++
					}
					d.NextBatch()
					d.Access(batches[done%len(batches)], out)
					done++
				}
				for range 128 {
					step()
				}
				b.ResetTimer()
				for b.Loop() {
					step()
				}
				b.ReportMetric(float64(b.N)*batch/b.Elapsed().Seconds()/1e6, "Mlines/s")
				b.ReportMetric(float64(d.Stats().Hits)/float64(d.Stats().Accesses), "hits")
				b.ReportMetric(float64(d.Bytes())/slots, "bytes/line")
			})
		}
	}
}
