package planner

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/infile"
	"helios/internal/units"
)

// Popularity is the distribution of accesses: the rank of the node at the other end of an edge, the
// most popular first, and the number of in-neighbours of a node.
type Popularity struct {
	// by names its source.
	by string
	// power is the exponent s of 1/(rank+1)^s; used where groups is empty.
	power float64
	// share: power is found such that the hottest `rows` of the nodes take `accesses` of the
	// accesses, which are what is left of a mini-batch's draws when each node counts once.
	rows, accesses float64
	// groups are nodes of one degree, the highest first.
	groups []degreeGroup
}

// degreeGroup is nodes of one degree. nodes and mass are sums up to its end.
type degreeGroup struct {
	degree, count int64
	nodes, mass   float64
}

// ParsePopularity reads a skew: zipf:S for an exponent, or SHARE:SHARE, such as 10%:70%, for what
// share of the accesses the hottest share of the rows takes.
func ParsePopularity(text string) (*Popularity, error) {
	bad := func() error {
		return errs.New(errs.Usage,
			"skew %q is neither zipf:S, such as zipf:0.8, nor the share of the accesses that the hottest share of the rows takes, such as 10%%:70%%",
			text)
	}
	p := &Popularity{by: "skew " + text}
	if s, ok := strings.CutPrefix(text, "zipf:"); ok {
		v, err := strconv.ParseFloat(s, 64)
		if err != nil || !(v >= 0 && v <= 4) {
			return nil, bad()
		}
		p.power = v
		return p, nil
	}
	rows, accesses, ok := strings.Cut(text, ":")
	if !ok {
		return nil, bad()
	}
	for _, x := range []struct {
		text string
		to   *float64
	}{{rows, &p.rows}, {accesses, &p.accesses}} {
		digits, ok := strings.CutSuffix(x.text, "%")
		v, err := strconv.ParseFloat(digits, 64)
		if !ok || err != nil || !(v > 0 && v < 100) {
			return nil, bad()
		}
		*x.to = v / 100
	}
	if p.accesses < p.rows {
		return nil, errs.New(errs.Usage,
			"skew %q: the hottest rows take less than an even share of the accesses", text)
	}
	return p, nil
}

// maxDegrees bounds the lines of a file of degrees.
const maxDegrees = 1 << 22

// ReadDegrees reads a degree distribution: a line for each degree, "degree nodes". A node is met as
// often as its degree has it.
func ReadDegrees(path string) (*Popularity, error) {
	text, err := infile.Read(path, 256<<20)
	if err != nil {
		return nil, errs.With(errs.Usage, fmt.Errorf("degree distribution: %w", err))
	}
	return parseDegrees(path, text)
}

// parseDegrees is ReadDegrees of what a file holds.
func parseDegrees(path string, text []byte) (*Popularity, error) {
	p := &Popularity{by: "degree distribution " + path}
	lines := bufio.NewScanner(bytes.NewReader(text))
	n := 0
	for lines.Scan() {
		n++
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.FieldsFunc(line,
			func(r rune) bool { return strings.ContainsRune(" \t,;", r) })
		var g degreeGroup
		ok := len(fields) == 2
		for i, to := range []*int64{&g.degree, &g.count} {
			if ok {
				v, err := strconv.ParseInt(fields[i], 10, 64)
				*to, ok = v, err == nil && v >= 0 && v <= maxNodes
			}
		}
		if !ok {
			return nil, errs.New(errs.Usage,
				"degree distribution %s, line %d: %.40q is not a degree and a number of nodes",
				path, n, line)
		}
		if g.count > 0 {
			p.groups = append(p.groups, g)
		}
		if len(p.groups) > maxDegrees {
			return nil, errs.New(errs.Usage, "degree distribution %s has more than %d lines", path,
				maxDegrees)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, errs.New(errs.Usage, "degree distribution %s, line %d: %w", path, n+1, err)
	}
	slices.SortFunc(p.groups, func(a, b degreeGroup) int { return cmp.Compare(b.degree, a.degree) })
	nodes, mass := 0.0, 0.0
	for i := range p.groups {
		g := &p.groups[i]
		nodes += float64(g.count)
		mass += float64(g.count) * float64(g.degree)
		g.nodes, g.mass = nodes, mass
	}
	if !(mass > 0) || nodes > maxNodes || mass > 64*maxNodes {
		return nil, errs.New(errs.Usage,
			"degree distribution %s has %s nodes and %s edges; 1 to %d nodes, and some edge, can be planned for",
			path, units.FormatCount(nodes), units.FormatCount(mass), int64(maxNodes))
	}
	return p, nil
}

// Totals returns the nodes and edges of a degree distribution.
func (p *Popularity) Totals() (nodes, edges int64, ok bool) {
	if p == nil || len(p.groups) == 0 {
		return 0, 0, false
	}
	last := p.groups[len(p.groups)-1]
	return int64(last.nodes), int64(last.mass), true
}

// drawn is the number of in-neighbours that a node draws on average at a fanout (-1: all) in a
// graph of a mean degree. Without a distribution degrees are taken to spread exponentially.
func (p *Popularity) drawn(fanout int, mean float64) float64 { return p.DrawnOf(fanout, mean, 1) }

// DrawnOf is drawn where a share of every node's edges is there.
func (p *Popularity) DrawnOf(fanout int, mean, share float64) float64 {
	mean *= share
	if fanout < 0 || mean == 0 {
		return mean
	}
	f := float64(fanout)
	if len(p.groups) == 0 {
		return mean * (1 - math.Exp(-f/mean))
	}
	sum := 0.0
	for _, g := range p.groups {
		sum += float64(g.count) * min(share*float64(g.degree), f)
	}
	return sum / p.groups[len(p.groups)-1].nodes
}

// Rank turns a number in [0, 1) into the rank of one of n nodes.
func (p *Popularity) Rank(u float64, n int64) int64 {
	if len(p.groups) > 0 {
		want := u * p.groups[len(p.groups)-1].mass
		i, _ := slices.BinarySearchFunc(p.groups, want,
			func(g degreeGroup, w float64) int { return cmp.Compare(g.mass, w) })
		i = min(i, len(p.groups)-1)
		g := &p.groups[i]
		within := (g.mass - want) / max(float64(g.degree), 1)
		return min(max(int64(g.nodes-math.Ceil(within)), 0), n-1)
	}
	top, r := float64(n)+1, 0.0
	if a := 1 - p.power; math.Abs(a) < 1e-9 {
		r = math.Exp(u * math.Log(top))
	} else {
		r = math.Pow(1+u*(math.Pow(top, a)-1), 1/a)
	}
	return min(max(int64(r-1), 0), n-1)
}

// Below is the share of the draws that meet the hottest so many of n nodes.
func (p *Popularity) Below(hottest, n int64) float64 {
	switch {
	case hottest <= 0:
		return 0
	case hottest >= n:
		return 1
	case len(p.groups) > 0:
		return p.EdgesOf(hottest, 0) / p.groups[len(p.groups)-1].mass
	}
	top, hot, a := float64(n)+1, float64(hottest)+1, 1-p.power
	if math.Abs(a) < 1e-9 {
		return math.Log(hot) / math.Log(top)
	}
	return (math.Pow(hot, a) - 1) / (math.Pow(top, a) - 1)
}

// EdgesOf is the in-edges of the hottest so many nodes, of a graph of a mean degree.
func (p *Popularity) EdgesOf(hottest int64, mean float64) float64 {
	if len(p.groups) == 0 {
		return float64(hottest) * mean
	}
	i, _ := slices.BinarySearchFunc(p.groups, float64(hottest),
		func(g degreeGroup, h float64) int { return cmp.Compare(g.nodes, h) })
	g := p.groups[min(i, len(p.groups)-1)]
	return g.mass - max(g.nodes-float64(hottest), 0)*float64(g.degree)
}

// chance is the probability that a draw meets the node of a rank among n.
func (p *Popularity) chance(rank float64, n int64) float64 {
	if len(p.groups) > 0 {
		i, _ := slices.BinarySearchFunc(p.groups, rank,
			func(g degreeGroup, r float64) int { return cmp.Compare(g.nodes, r) })
		i = min(i, len(p.groups)-1)
		return float64(p.groups[i].degree) / p.groups[len(p.groups)-1].mass
	}
	top, a := float64(n)+1, 1-p.power
	if math.Abs(a) < 1e-9 {
		return 1 / (rank + 1) / math.Log(top)
	}
	return a * math.Pow(rank+1, -p.power) / (math.Pow(top, a) - 1)
}

// steps is the resolution of sums over ranks.
const steps = 600

// hops sums what a mini-batch of seeds accesses: after each hop the edges drawn, the nodes in it,
// and the share of them that the hottest `hot` of n nodes have.
func (p *Popularity) hops(seeds float64, per []float64, n int64, hot float64) (edges,
	nodes []float64, share float64) {
	total := float64(n)
	// Ranks from 0 on, spaced by their logarithm; a cell has those from one to the next.
	cell := make([]float64, steps+1)
	for i := range cell {
		cell[i] = math.Pow(total+1, float64(i)/steps) - 1
	}
	met := func(draws, upto float64) (sum float64) {
		for i := range steps {
			from, to := cell[i], min(cell[i+1], upto)
			if to <= from {
				break
			}
			c := p.chance((from+to)/2, n)
			sum += (to - from) * -math.Expm1(-draws*c-seeds/total)
		}
		return sum
	}
	now, draws := seeds, 0.0
	for _, k := range per {
		e := now * k
		draws += e
		now = min(max(met(draws, total), now), total)
		edges, nodes = append(edges, e), append(nodes, now)
	}
	return edges, nodes, met(draws, hot*total) / max(met(draws, total), 1)
}

// settle finds the exponent that gives the share which was asked for.
func (p *Popularity) settle(seeds float64, per []float64, n int64) error {
	return p.settleBy(seeds, n, func() float64 {
		_, _, x := p.hops(seeds, per, n, p.rows)
		return x
	})
}

// settleBy is settle where of is the share at the exponent that p has.
func (p *Popularity) settleBy(seeds float64, n int64, of func() float64) error {
	if p.rows == 0 {
		return nil
	}
	share := func(power float64) float64 {
		p.power = power
		return of()
	}
	// The share rises with the exponent until few nodes are met at all, and the seeds, which are
	// any, are most of a mini-batch.
	hi, peak := 0.0, 0.0
	for i := range 26 {
		if x := share(float64(i) / 10); x > peak {
			hi, peak = float64(i)/10, x
		}
	}
	lo := 0.0
	for range 60 {
		if mid := (lo + hi) / 2; share(mid) < p.accesses {
			lo = mid
		} else {
			hi = mid
		}
	}
	p.power = hi
	if math.Abs(share(hi)-p.accesses) > 0.02 {
		return errs.New(errs.Usage,
			"%s cannot be: mini-batches of %.0f seeds meet so many of %d nodes that the hottest %g%% take at most %.0f%% of the accesses; give a smaller share, or zipf:S",
			p.by, seeds, n, 100*p.rows, 100*peak)
	}
	return nil
}
