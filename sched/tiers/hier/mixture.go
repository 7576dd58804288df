package hier

import "slices"

// Parts follow communities, and so do labels: a few parts together have other shares of labels than
// the graph, and training on one mega-batch after another forgets. A mixture deals parts so that
// the shares in each mega-batch are near those of all, from a random order of parts, which decides
// among the many good deals.

// mixture counts labels by part.
type mixture struct {
	labels int
	counts []float64 // of the parts, one behind the other: training nodes of each label
	shares []float64 // of each label among all
	sizes  []float64 // by part, its labelled training nodes
}

// mostMixing bounds the steps of a deal, each over all labels: beyond, parts stay where chance has
// put them.
const mostMixing = 1 << 26

// mendsFrom is the largest share of two mega-batches' distance that may remain after a change of
// two parts: the best deals of all are few, and the same parts would meet in every epoch.
const mendsFrom = 0.5

// newMixture returns nil where there is no label.
func newMixture(m *MegaBatches) *mixture {
	x := &mixture{}
	for _, y := range m.Labels {
		x.labels = max(x.labels, int(y)+1)
	}
	if x.labels == 0 {
		return nil
	}
	parts := m.Numbering.Parts()
	x.counts, x.shares = make([]float64, parts*x.labels), make([]float64, x.labels)
	x.sizes = make([]float64, parts)
	all := 0.0
	for i, id := range m.Train {
		if y := m.Labels[i]; y >= 0 {
			p := m.Numbering.PartOf(id)
			x.counts[p*x.labels+int(y)]++
			x.shares[y]++
			x.sizes[p]++
			all++
		}
	}
	for y := range x.shares {
		x.shares[y] /= all
	}
	return x
}

// of returns the counts of a part.
func (x *mixture) of(p int64) []float64 { return x.counts[int(p)*x.labels:][:x.labels] }

// away is the squared distance of counts, with a part more and another less (-1: none), from a
// mixture with the shares of all. Products are rounded before they are added, so all machines
// agree.
func (x *mixture) away(counts []float64, size float64, more, less int64) float64 {
	if more >= 0 {
		size += x.sizes[more]
	}
	if less >= 0 {
		size -= x.sizes[less]
	}
	sum := 0.0
	for y, n := range counts {
		if more >= 0 {
			n += x.counts[int(more)*x.labels+y]
		}
		if less >= 0 {
			n -= x.counts[int(less)*x.labels+y]
		}
		d := n - float64(x.shares[y]*size)
		sum += float64(d * d)
	}
	return sum
}

// group is a mega-batch that is being dealt.
type group struct {
	first, room int // its places among the parts
	counts      []float64
	size        float64
	away        float64
}

func (g *group) add(x *mixture, part int64, sign float64) {
	for y, n := range x.of(part) {
		g.counts[y] += float64(sign * n)
	}
	g.size += float64(sign * x.sizes[part])
	g.away = x.away(g.counts, g.size, -1, -1)
}

// deal orders parts so that each loaded of them, one behind the other, are well mixed: one after
// the other goes where it mends most; then two parts change places as long as that mends much.
func (x *mixture) deal(parts []int64, loaded int) {
	var groups []*group
	for first := 0; first < len(parts); first += loaded {
		groups = append(groups, &group{first: first, room: min(loaded, len(parts)-first),
			counts: make([]float64, x.labels)})
	}
	pairs := len(parts) * len(parts) * x.labels
	if len(groups) < 2 || len(parts)*len(groups)*x.labels > mostMixing {
		return
	}
	taken := make([]int, len(groups))
	for _, p := range slices.Clone(parts) {
		best, least := -1, 0.0
		for k, g := range groups {
			if taken[k] == g.room {
				continue
			}
			if d := x.away(g.counts, g.size, p, -1) - g.away; best < 0 || d < least {
				best, least = k, d
			}
		}
		g := groups[best]
		parts[g.first+taken[best]] = p
		taken[best]++
		g.add(x, p, 1)
	}
	for round := 0; round < 8 && pairs < mostMixing/8 && x.mend(parts, groups); round++ {
	}
}

// mend has parts of different groups change places where both together are much nearer then; it
// reports whether any did.
func (x *mixture) mend(parts []int64, groups []*group) (changed bool) {
	for k, g := range groups {
		for _, h := range groups[k+1:] {
			for i := g.first; i < g.first+g.room; i++ {
				for j := h.first; j < h.first+h.room; j++ {
					p, q := parts[i], parts[j]
					now := float64(g.away + h.away)
					then := x.away(g.counts, g.size, q, p) + x.away(h.counts, h.size, p, q)
					if then > now*mendsFrom {
						continue
					}
					parts[i], parts[j], changed = q, p, true
					for _, f := range []struct {
						g         *group
						more, out int64
					}{{g, q, p}, {h, p, q}} {
						f.g.add(x, f.more, 1)
						f.g.add(x, f.out, -1)
					}
				}
			}
		}
	}
	return changed
}
