package hier

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/graph"
	"helios/graph/induced"
	"helios/sched/prepare"
)

func megaBatches(t *testing.T, parts, size, loaded, fixed int) (*MegaBatches, []int64) {
	t.Helper()
	base, static := []int64{0}, []int64{0}
	for p := range parts {
		base, static = append(base, base[p]+int64(size)), append(static, 0)
	}
	n, err := induced.NewNumbering(base, static)
	require.NoError(t, err)
	var train, ids []int64
	for id := range n.Nodes() {
		if id%3 != 0 && (fixed == 0 || id < base[fixed]) {
			ids, train = append(ids, id), append(train, 1000+id)
		}
	}
	return NewMegaBatches(MegaBatches{Numbering: n, Train: ids, Loaded: loaded, Fixed: fixed,
		Batch: 7, Seed: 5}), train
}

// Each mega-batch trains its own nodes, each as often as there are passes, in mini-batches that
// cross nothing.
func TestMegaOrder(t *testing.T) {
	for _, c := range []struct{ parts, loaded, passes int }{{1, 1, 1}, {6, 2, 1}, {7, 3, 2},
		{5, 5, 3}} {
		m, train := megaBatches(t, c.parts, 20, c.loaded, 0)
		other := m.Order(train, 4, c.passes)
		seen := map[int][]int{}
		for epoch := range 3 {
			o := m.Order(train, epoch, c.passes)
			require.Equal(t, o, m.Order(train, epoch, c.passes))
			require.Len(t, o.Parts, (c.parts+c.loaded-1)/c.loaded)
			seen[epoch] = slices.Concat(o.Parts...)
			var all []int
			count := map[int64]int{}
			for k, parts := range o.Parts {
				require.True(t, slices.IsSorted(parts))
				all = append(all, parts...)
				first := 0
				if k > 0 {
					first = o.Ends[k-1]
				}
				for pass, pos := 0, first; pass < c.passes; pass++ {
					once := map[int64]bool{}
					want := 0
					for _, id := range m.Train {
						if slices.Contains(parts, m.Numbering.PartOf(id)) {
							want++
						}
					}
					for len(once) < want {
						seeds, ids := o.Seeds(pos), o.IDs(pos)
						require.Equal(t, k, o.Mega(pos))
						for i, v := range seeds {
							require.False(t, once[v])
							once[v] = true
							count[v]++
							require.Equal(t, v, 1000+ids[i])
							require.Contains(t, parts, m.Numbering.PartOf(ids[i]))
						}
						require.True(t, len(seeds) == 7 || len(once) == want)
						pos++
					}
					if pass == 0 {
						require.Equal(t, pos, o.First[k])
					}
					if pass == c.passes-1 {
						require.Equal(t, pos, o.Ends[k])
					}
				}
			}
			require.Equal(t, o.Ends[len(o.Ends)-1], o.Len())
			slices.Sort(all)
			for p := range all {
				require.Equal(t, p, all[p])
			}
			for _, v := range train {
				require.Equal(t, c.passes, count[v])
			}
		}
		if c.parts > c.loaded {
			require.NotEqual(t, seen[0], seen[1])
			require.NotEqual(t, m.Order(train, 0, c.passes).Order, other.Order)
		}
	}
}

// One part and one pass: the order of every other mode. More passes begin with it.
func TestMegaOrderOfAll(t *testing.T) {
	m, train := megaBatches(t, 1, 50, 1, 0)
	want := make([]int64, len(train))
	graph.Shuffle(want, train, 5, 3)
	usual := prepare.NewOrder(want, 7)
	o := m.Order(train, 3, 1)
	twice := m.Order(train, 3, 2)
	require.Equal(t, usual.Len(), o.Len())
	require.Equal(t, 2*usual.Len(), twice.Len())
	for i := range usual.Len() {
		require.Equal(t, usual.Seeds(i), o.Seeds(i))
		require.Equal(t, usual.Seeds(i), twice.Seeds(i))
		require.Equal(t, i, o.Before(i))
	}
	require.NotEqual(t, usual.Seeds(0), twice.Seeds(usual.Len()))
}

// Parts that hold all training nodes stay, and an epoch is one mega-batch.
func TestMegaOrderWithFixedParts(t *testing.T) {
	m, train := megaBatches(t, 8, 20, 4, 2)
	others := map[int]bool{}
	for epoch := range 12 {
		o := m.Order(train, epoch, 1)
		require.Len(t, o.Parts, 1)
		require.Len(t, o.Parts[0], 4)
		require.Equal(t, []int{0, 1}, o.Parts[0][:2])
		for _, p := range o.Parts[0][2:] {
			others[p] = true
		}
		require.Equal(t, prepare.Batches(len(train), 7), o.Len())
	}
	require.Len(t, others, 6)
}

// Mega-batches without a training node are left out.
func TestMegaOrderSkipsWhatNothingTrainsOn(t *testing.T) {
	m, train := megaBatches(t, 6, 10, 1, 0)
	m.Train, train = m.Train[:3], train[:3] // of part 0
	m = NewMegaBatches(*m)
	o := m.Order(train, 1, 2)
	require.Equal(t, [][]int{{0}}, o.Parts)
	require.Equal(t, 2, o.Len())
}

// Mixed mega-batches have the labels of all training nodes in shares near those of the whole, where
// each part has one label or two; parts come together anew in each epoch, each once; without labels
// the order is that by chance.
func TestMixedOrder(t *testing.T) {
	const parts, size, loaded, labels = 24, 30, 6, 5
	plain, _ := megaBatches(t, parts, size, loaded, 0)
	of := func(id int64) int32 {
		if p := plain.Numbering.PartOf(id); id%5 > 0 {
			return int32(p % labels)
		}
		return int32(id/5) % labels
	}
	ids := plain.Train
	plain.Labels = make([]int32, len(ids))
	for i, id := range ids {
		plain.Labels[i] = of(id)
	}
	mixed := NewMegaBatches(*plain)
	worst := func(m *MegaBatches, epoch int) (most float64) {
		var all [labels]float64
		for _, id := range ids {
			all[of(id)] += 1 / float64(len(ids))
		}
		for _, group := range m.Parts(epoch) {
			var share [labels]float64
			n := 0.0
			for _, id := range ids {
				if slices.Contains(group, m.Numbering.PartOf(id)) {
					share[of(id)]++
					n++
				}
			}
			for y := range share {
				most = max(most, math.Abs(share[y]/n-all[y]))
			}
		}
		return most
	}
	plain.Labels = nil
	plain = NewMegaBatches(*plain)
	deals, chance := map[string]bool{}, 0.0
	for epoch := range 6 {
		deal := mixed.Parts(epoch)
		require.Equal(t, deal, mixed.Parts(epoch))
		deals[fmt.Sprint(deal)] = true
		together := slices.Sorted(slices.Values(slices.Concat(deal...)))
		for p := range parts {
			require.Equal(t, p, together[p])
		}
		require.Less(t, worst(mixed, epoch), 0.15)
		chance += worst(plain, epoch) / 6
	}
	require.Greater(t, chance, 0.2)
	require.Len(t, deals, 6)
	plain.Labels = make([]int32, len(ids))
	for i := range plain.Labels {
		plain.Labels[i] = -1
	}
	require.Equal(t, plain.Parts(1), NewMegaBatches(*plain).Parts(1))
}
