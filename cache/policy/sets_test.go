package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/simd"
	"helios/internal/testing/wide"
)

// playSets runs a directory in sets and its naive twin over random batches with a window, parts in
// which lines stand twice, and fills that fail, and compares every answer, what is cached after
// every part, and the totals.
func playSets(t testing.TB, policy string, slots, workers int, seed uint64, batches, window,
	parts int, faults bool) {
	r := rand.New(rand.NewPCG(seed, 2))
	dir, err := New(Config{Policy: policy, Kind: InSets, Slots: int64(slots), Seed: seed,
		Workers: workers})
	require.NoError(t, err)
	d := dir.(*Sets)
	n := newNaiveSets(policy, slots, seed)
	lines := int64(3*slots + 5)
	all := make([][][]int64, batches)
	for i := range all {
		for range 1 + r.IntN(parts) {
			part := []int64{}
			for range r.IntN(max(4, 2*slots)) {
				part = append(part, int64(float64(lines)*r.Float64()*r.Float64()))
				if r.IntN(9) == 0 {
					part = append(part, -1)
				}
			}
			all[i] = append(all[i], part)
		}
	}
	announced := 0
	for i, b := range all {
		for window > 0 && announced < batches && announced <= i+window {
			union := []int64{}
			for _, l := range slices.Concat(all[announced]...) {
				if l >= 0 {
					union = append(union, l)
				}
			}
			d.Announce(union)
			n.announce(union)
			announced++
		}
		d.NextBatch()
		n.nextBatch()
		for _, p := range b {
			out, of := make([]Answer, len(p)), make([]uint32, len(p))
			d.AccessEach(p, out, of)
			var distinct []int64
			var first []int
			for j, l := range p {
				if l < 0 {
					continue
				}
				if later := slices.Index(p, l); later == j {
					distinct, first = append(distinct, l), append(first, j)
				} else {
					require.EqualValues(t, later, of[j])
				}
			}
			hit, in := n.access(distinct)
			for k, l := range distinct {
				a := out[first[k]]
				require.Equal(t, hit[k], a.Hit, "%s seed %d batch %d line %d: hit", policy, seed, i, l)
				require.True(t, in[k] == (a.Slot >= 0) || a.Hit,
					"%s seed %d batch %d line %d: cached", policy, seed, i, l)
			}
			if faults && len(distinct) > 0 && r.IntN(3) == 0 {
				if l := distinct[r.IntN(len(distinct))]; d.Find(l) >= 0 {
					d.Drop(d.Find(l))
					n.drop(l)
				}
			}
			for l := range lines {
				slot := d.Find(l)
				require.Equal(t, n.cached(l), slot >= 0, "%s seed %d batch %d: line %d after the part",
					policy, seed, i, l)
				if slot >= 0 {
					require.Equal(t, l, d.Line(slot))
					require.Less(t, int(slot), slots)
				}
			}
			require.Equal(t, n.stats, d.Stats())
		}
	}
}

func TestSetsAgainstNaive(t *testing.T) {
	for _, policy := range Online() {
		t.Run(policy, func(t *testing.T) {
			seeds := uint64(60)
			if wide.Lean() {
				seeds = 14
			}
			for seed := range seeds {
				slots := []int{1, 2, 31, 32, 33, 75, 128}[seed%7]
				playSets(t, policy, slots, 1+int(seed%2), seed, 12, []int{0, 1, 3, 8}[seed%4],
					1+int(seed%3), seed%3 == 0)
			}
		})
	}
}

func FuzzSetsAgainstNaive(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint8(40), uint8(2), uint8(1), false)
	f.Fuzz(func(t *testing.T, seed uint64, which, slots, window, parts uint8, faults bool) {
		playSets(t, Online()[int(which)%len(Online())], 1+int(slots)%140, 2, seed, 8,
			int(window)%17, 1+int(parts)%4, faults)
	})
}

// However many workers play a part, and by which instructions, the answers are the same. Parts are
// long enough for several.
func TestSetsWorkers(t *testing.T) {
	const slots, batches = 2000, 3
	for _, name := range Online() {
		var want []Answer
		var stats Stats
		for turn, workers := range []int{1, 2, 5} {
			r := rand.New(rand.NewPCG(7, 7))
			d, err := New(Config{Policy: name, Kind: InSets, Slots: slots, Seed: 3,
				Workers: workers})
			require.NoError(t, err)
			if levels := simd.Levels(); turn > 0 {
				d.(*Sets).level = levels[turn%len(levels)]
			}
			var got []Answer
			var next []int64
			draw := func() []int64 {
				lines := make([]int64, 2*perWorker+100)
				for i := range lines {
					lines[i] = int64(20000 * r.Float64() * r.Float64())
				}
				return lines
			}
			for b := range batches {
				lines := next
				if b == 0 {
					lines = draw()
				}
				next = draw()
				d.NextBatch()
				d.Announce(next)
				out, of := make([]Answer, len(lines)), make([]uint32, len(lines))
				d.(*Sets).AccessEach(lines, out, of)
				got = append(got, out...)
			}
			if want == nil {
				want, stats = got, d.Stats()
				require.Positive(t, stats.Bypassed, name)
			}
			require.True(t, slices.Equal(want, got), "%s with %d workers", name, workers)
			require.Equal(t, stats, d.Stats())
		}
	}
}

// Lines beyond 32 bits, and kinds that are not known, are refused; no slots let everything pass.
func TestSetsErrors(t *testing.T) {
	for _, c := range []Config{{Policy: LRU, Kind: InSets, Slots: 1, Lines: MaxSetLine + 2},
		{Policy: LRU, Kind: "trees", Slots: 1}} {
		_, err := New(c)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	}
	d, err := New(Config{Policy: LRU, Kind: InSets})
	require.NoError(t, err)
	d.Announce([]int64{1, 2})
	d.NextBatch()
	out := make([]Answer, 2)
	d.Access([]int64{1, 2}, out)
	require.Equal(t, Stats{Accesses: 2, Bypassed: 2}, d.Stats())
	require.Equal(t, []Answer{{Slot: -1}, {Slot: -1}}, out)
	require.EqualValues(t, -1, d.Find(1))
}

// Announcements that are forgotten pin nothing.
func TestSetsForget(t *testing.T) {
	for _, name := range Online() {
		d, err := New(Config{Policy: name, Kind: InSets, Slots: 2})
		require.NoError(t, err)
		out := make([]Answer, 3)
		for range 3 {
			d.Announce([]int64{1, 2})
		}
		d.NextBatch()
		d.Access([]int64{1, 2, 3}, out)
		require.Equal(t, Stats{Accesses: 3, Inserted: 2, Bypassed: 1}, d.Stats(), name)
		d.NextBatch()
		d.Forget()
		d.Access([]int64{3}, out)
		require.Equal(t, Stats{Accesses: 4, Inserted: 3, Evicted: 1, Bypassed: 1}, d.Stats(), name)
	}
}

// BenchmarkSets has as many lines as make a directory of 60 MB, ten times as many rows, each part a
// million of them once.
func BenchmarkSets(b *testing.B) {
	const slots, rows, part = 10_000_000, 100_000_000, 1_000_000
	for _, name := range Online() {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/workers%d", name, workers), func(b *testing.B) {
				dir, err := New(Config{Policy: name, Kind: InSets, Slots: slots, Workers: workers})
				require.NoError(b, err)
				d, out, of := dir.(*Sets), make([]Answer, part), make([]uint32, part)
				lines, x, took := make([]int64, part), uint64(0), time.Duration(0)
				step := func() {
					for i := range lines { // a permutation of all rows, in pieces
						x = (x + 38_196_601) % rows
						lines[i] = int64(x)
					}
					d.NextBatch()
					before := cpuTime(b)
					b.StartTimer()
					d.AccessEach(lines, out, of)
					b.StopTimer()
					took += cpuTime(b) - before
				}
				b.StopTimer()
				for range 16 {
					step()
				}
				b.ResetTimer()
				took = 0
				for range b.N {
					step()
				}
				b.ReportMetric(part*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mlines/s")
				b.ReportMetric(float64(took)/float64(b.N)/part, "ns-cpu/line")
			})
		}
	}
}

// cpuTime is the process's.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
