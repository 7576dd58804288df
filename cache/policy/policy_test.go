package policy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// play runs a directory and the naive model over random batches, with a window of announcements, parts, and
// fills that fail, and compares every answer, what is cached after every part, and the totals.
func play(t testing.TB, policy string, slots int, seed uint64, batches, window, parts int, faults bool) {
	r := rand.New(rand.NewPCG(seed, 1))
	d, err := New(Config{Policy: policy, Slots: int64(slots), Seed: seed})
	require.NoError(t, err)
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
	told := 0
	var order []int64
	out := make([]Answer, slots+8)
	for i, b := range all {
		for window > 0 && told < batches && told <= i+window {
			union := []int64{}
			for _, p := range all[told] {
				for _, l := range p {
					if !slices.Contains(union, l) {
						union = append(union, l)
					}
				}
			}
			d.Announce(union)
			n.announce(union)
			told++
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
				require.Equal(t, hit[j], out[j].Hit, "%s seed %d batch %d line %d: hit", policy, seed, i, l)
				require.Equal(t, in[j], out[j].Slot >= 0, "%s seed %d batch %d line %d: cached", policy, seed, i, l)
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
				require.Equal(t, n.cached[l] != nil, slot >= 0, "%s seed %d batch %d: line %d after the part", policy, seed, i, l)
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
			require.Equal(t, evictable, d.evictable, "%s seed %d batch %d: lines that may be evicted", policy, seed, i)
		}
	}
	require.Zero(t, d.announced)
	require.Zero(t, d.uses.n, "a use that never ended")
}

func TestAgainstNaive(t *testing.T) {
	for _, policy := range Online() {
		t.Run(policy, func(t *testing.T) {
			for seed := range uint64(40) {
				slots := []int{1, 2, 5, 12, 31}[seed%5]
				play(t, policy, slots, seed, 30, []int{0, 1, 3, 8}[seed%4], 1+int(seed%3), seed%7 == 0)
			}
			// A line a batch: no pin ever matters, so this is the policy as its paper has it.
			play(t, policy, 20, 99, 30, 0, 1, false)
		})
	}
}

func FuzzAgainstNaive(f *testing.F) {
	f.Add(uint64(1), uint8(0), uint8(7), uint8(2), uint8(1), false)
	f.Fuzz(func(t *testing.T, seed uint64, which, slots, window, parts uint8, faults bool) {
		play(t, Online()[int(which)%len(Online())], 1+int(slots)%40, seed, 12, int(window)%17, 1+int(parts)%4, faults)
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
