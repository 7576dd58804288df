package simd

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/philox"
)

// The second key is for nodes whose hash below span, added to turn, reaches span.
func TestLaborFrom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	for range 20000 {
		span := 1 + r.Uint32N(1<<(1+r.IntN(31)))
		turn := r.Uint32N(span)
		from := LaborFrom(span, turn)
		want := func(hash uint64) bool {
			return uint64(turn)+philox.Bounded(hash, uint64(span)) >= uint64(span)
		}
		require.Equal(t, turn == 0, from == 0)
		for _, hash := range []uint64{r.Uint64(), 0, ^uint64(0), from, from - 1, from + 1} {
			require.Equal(t, want(hash), from != 0 && hash >= from, "%d of %d at %d", turn, span,
				hash)
		}
	}
	require.Equal(t, new(big.Int).Lsh(big.NewInt(1), 63).Uint64(), LaborFrom(2, 1))
}

// Every level takes what the definition takes, by one key and by two, from lists of every length
// and place, stops for room and goes on, reads and writes nothing besides, and notes the largest
// id.
func TestLaborTake(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	for _, back := range []bool{false, true} {
		f := &fence{t: t, back: back, r: r}
		for _, n := range []int{0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 700} {
			narrow, wide := guarded[uint32](f, max(n, 1))[:n], guarded[int64](f, max(n, 1))[:n]
			for _, two := range []bool{false, true} {
				k := LaborKeys{Keys: [2]uint64{r.Uint64(), r.Uint64()}, Phase: r.Uint64()}
				if two {
					k.From = r.Uint64()
				}
				var largest uint32
				for i := range narrow {
					narrow[i] = r.Uint32() >> r.IntN(32)
					wide[i] = int64(narrow[i])
				}
				limits := []uint64{0, 1 << 60, 1 << 62, 1 << 63, 3 << 62, ^uint64(0) - 1,
					^uint64(0)}
				if n > 0 {
					v := k.Variate(uint64(narrow[n/2])) // just taken, and just not
					limits = append(limits, v, v-1)
				}
				for _, limit := range limits {
					want := []uint32{}
					largest = 0
					for _, id := range narrow {
						if k.Variate(uint64(id)) <= limit {
							want = append(want, id)
							largest = max(largest, id)
						}
					}
					for _, l := range Levels() {
						for _, room := range []int{LaborRoom, 40, n + LaborRoom + 1} {
							name := fmt.Sprintf("%v: %d ids, limit %d, room %d", l, n, limit, room)
							out := guarded[uint32](f, room)
							walk := func(take func(pos int, m *LaborLargest) (int, int),
								wide bool) {
								var m LaborLargest
								got := []uint32{}
								for pos := 0; pos < n; {
									done, taken := take(pos, &m)
									require.Greater(t, done, 0, name)
									got = append(got, out[:taken]...)
									pos += done
								}
								require.Equal(t, want, got, name)
								require.True(t, m.In(int64(largest)+1, wide), name)
								require.Equal(t, largest == 0, m.In(int64(largest), wide), name)
							}
							walk(func(pos int, m *LaborLargest) (int, int) {
								return l.LaborTake32(narrow[pos:], &k, limit, m, out)
							}, false)
							walk(func(pos int, m *LaborLargest) (int, int) {
								return l.LaborTake64(wide[pos:], &k, limit, m, out)
							}, true)
						}
					}
				}
			}
		}
	}
}

// Ids of 64 bits are hashed whole, and one that is no node shows among what is taken, wherever it
// stands, and only there.
func TestLaborTakeBadIDs(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 4))
	k := LaborKeys{Keys: [2]uint64{1, 2}, Phase: 3, From: 1 << 63}
	for _, l := range Levels() {
		for range 300 {
			list := make([]int64, 1+r.IntN(40))
			pos := r.IntN(len(list))
			for _, bad := range []int64{-1, 1 << 32, 5 << 33, 1000, -1 << 63} {
				for i := range list {
					list[i] = r.Int64N(1000)
				}
				list[pos] = bad
				limit := k.Variate(uint64(bad))
				for _, limit := range []uint64{limit, limit - 1} {
					var m LaborLargest
					out := make([]uint32, len(list)+LaborRoom)
					_, n := l.LaborTake64(list, &k, limit, &m, out)
					want := 0
					for _, id := range list {
						if k.Variate(uint64(id)) <= limit {
							want++
						}
					}
					require.Equal(t, want, n)
					require.Equal(t, k.Variate(uint64(bad)) > limit, m.In(1000, true), "%v: %d",
						l, bad)
				}
			}
		}
		var m LaborLargest
		out := make([]uint32, 64)
		list := slices.Repeat([]uint32{5}, 20)
		list[19] = 9
		l.LaborTake32(list, &k, ^uint64(0), &m, out)
		require.False(t, m.In(9, false))
		require.True(t, m.In(10, false))
	}
}

func BenchmarkLaborTake(b *testing.B) {
	list := make([]uint32, 4096)
	for i := range list {
		list[i] = uint32(i * 37)
	}
	out := make([]uint32, len(list)+LaborRoom)
	for _, l := range Levels() {
		for _, from := range []uint64{0, 1 << 62} {
			b.Run(fmt.Sprintf("%v/two=%v", l, from != 0), func(b *testing.B) {
				k := LaborKeys{Keys: [2]uint64{1, 2}, Phase: 3, From: from}
				var m LaborLargest
				best := time.Hour
				for b.Loop() {
					begin := time.Now()
					l.LaborTake32(list, &k, 1<<58, &m, out)
					best = min(best, time.Since(begin))
				}
				b.ReportMetric(float64(best.Nanoseconds())/float64(len(list)), "ns/id-best")
			})
		}
	}
}
