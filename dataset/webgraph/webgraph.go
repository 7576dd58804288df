// Package webgraph reads graphs in the BV format of the WebGraph framework (Boldi and Vigna, "The
// WebGraph framework I: compression techniques", WWW 2004): NAME.properties, the bit stream
// NAME.graph and, where it is there, NAME.offsets, by which parts of the stream are read at the
// same time.
//
// A node's record holds its outdegree; a reference to one of the last nodes and the blocks of
// successors copied from it; intervals of successive numbers; and what is left as gaps.
package webgraph

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"helios/internal/container"
	"helios/internal/errs"
	"helios/internal/infile"
)

// maxProperties bounds the text of NAME.properties.
const maxProperties = 1 << 20

// MaxNodes bounds the nodes that a graph may claim.
const MaxNodes = 1 << 36

// partBytes is the least that a part of the stream has, maxParts the most parts.
const (
	partBytes = 256 << 10
	maxParts  = 1024
	maxWindow = 1 << 12
	maxWarm   = 1 << 16 // nodes whose offsets are kept for the start of a part
	maxDegree = 1 << 28 // successors are kept in memory, 8 bytes each
)

// Graph is an open graph. Parts may be read at the same time.
type Graph struct {
	Name        string // of the .graph file
	Nodes, Arcs int64

	props       string // name of .properties
	window      int64
	maxRef      int64 // longest chain of references, -1 = any
	minInterval int64 // 0 = no intervals
	zetaK       uint
	outdegree   code
	reference   code
	blockCount  code
	block       code
	residual    code
	offset      code

	r     io.ReaderAt
	size  int64
	parts []part
	file  *os.File
}

// part is the nodes first to end-1.
type part struct {
	first, end int64
	stop       int64   // bit after the last record; -1 where it is not known
	warm       int64   // the node of offsets[0]
	offsets    []int64 // of the nodes warm … first
}

// Open reads the properties and the offsets of the graph whose files are called base plus an
// ending.
func Open(ctx context.Context, base string) (g *Graph, err error) {
	g = &Graph{Name: base + ".graph", props: base + ".properties"}
	text, err := infile.Read(g.props, maxProperties)
	if err != nil {
		return nil, errs.New(errs.Usage, "%w; WebGraph needs NAME.properties beside NAME.graph",
			err)
	}
	if err := g.properties(string(text)); err != nil {
		return nil, err
	}
	if g.file, _, err = container.Open(g.Name); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.file.Close())
		}
	}()
	st, err := g.file.Stat()
	if err != nil {
		return nil, err
	}
	g.r, g.size = g.file, st.Size()
	off, err := infile.Open(base + ".offsets")
	if errors.Is(err, os.ErrNotExist) {
		g.parts = []part{{0, g.Nodes, -1, 0, []int64{0}}}
		return g, nil
	}
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	defer off.Close()
	if st, err = off.Stat(); err != nil {
		return nil, err
	}
	return g, g.split(ctx, base+".offsets", off, st.Size())
}

// Close closes the graph's file.
func (g *Graph) Close() error { return g.file.Close() }

// Parts returns how many parts can be read by themselves: 1 without offsets.
func (g *Graph) Parts() int { return len(g.parts) }

func (g *Graph) bad(format string, a ...any) error {
	return errs.New(errs.Usage, "%s: "+format, append([]any{g.props}, a...)...)
}

// properties reads NAME.properties (java.util.Properties, of which only plain lines are used here).
func (g *Graph) properties(text string) error {
	p := map[string]string{}
	sc := bufio.NewScanner(strings.NewReader(text))
	for sc.Scan() {
		line := strings.TrimSpace(sc.Text())
		if line == "" || line[0] == '#' || line[0] == '!' {
			continue
		}
		if i := strings.IndexAny(line, "=:"); i > 0 {
			p[strings.TrimSpace(line[:i])] = strings.TrimSpace(line[i+1:])
		}
	}
	if err := sc.Err(); err != nil {
		return g.bad("%w", err)
	}
	class := strings.TrimPrefix(p["graphclass"], "class ")
	if name := class[strings.LastIndexByte(class, '.')+1:]; name != "BVGraph" {
		return g.bad(
			"graphclass %.80q is not BVGraph; convert it with WebGraph: java it.unimi.dsi.webgraph.BVGraph SOURCE NAME",
			class)
	}
	if v, ok := p["version"]; ok && v != "0" {
		return g.bad("version %.20q of the BV format; 0 is read", v)
	}
	for _, f := range []struct {
		key    string
		to     *int64
		lo, hi int64
		def    string
	}{
		{"nodes", &g.Nodes, 1, MaxNodes, ""}, {"arcs", &g.Arcs, 0, math.MaxInt64 >> 8, ""},
		{"windowsize", &g.window, 0, maxWindow, ""}, {"maxrefcount", &g.maxRef, -1,
			math.MaxInt32, ""},
		{"minintervallength", &g.minInterval, 0, math.MaxInt32, ""},
	} {
		n, err := strconv.ParseInt(p[f.key], 10, 64)
		if err != nil || n < f.lo || n > f.hi {
			return g.bad("%s=%.40q is not a number from %d to %d", f.key, p[f.key], f.lo, f.hi)
		}
		*f.to = n
	}
	if g.maxRef == math.MaxInt32 {
		g.maxRef = -1
	}
	if g.minInterval == 1 {
		return g.bad("minintervallength=1 is not possible; 0 means no intervals")
	}
	k := p["zetak"]
	if k == "" {
		k = "3"
	}
	n, err := strconv.Atoi(k)
	if err != nil || n < 1 || n > 31 {
		return g.bad("zetak=%.40q is not a number from 1 to 31", k)
	}
	g.zetaK = uint(n)
	g.outdegree, g.blockCount, g.block, g.offset, g.reference, g.residual = gamma, gamma, gamma,
		gamma, unary, zeta
	for _, f := range strings.Split(p["compressionflags"], "|") {
		if f = strings.TrimSpace(f); f == "" {
			continue
		}
		i := strings.LastIndexByte(f, '_')
		to := map[string]*code{
			"OUTDEGREES": &g.outdegree, "BLOCKS": &g.block, "RESIDUALS": &g.residual,
			"REFERENCES":  &g.reference,
			"BLOCK_COUNT": &g.blockCount, "OFFSETS": &g.offset,
		}[f[:max(i, 0)]]
		c, ok := codeNames[f[i+1:]]
		if to == nil || !ok {
			return g.bad(
				"compressionflags has %.40q; γ, δ, ζ, unary and nibble codes are read; convert the graph with WebGraph's default flags",
				f)
		}
		*to = c
	}
	return nil
}

// damaged is an error at a bit of the stream.
func (g *Graph) damaged(node, bit int64, err error) error {
	return errs.New(errs.Usage, "%s: node %d, byte %d (bit %d): %w", g.Name, node, bit/8, bit, err)
}

// split reads the offsets, cuts the stream into parts, and holds the outdegrees against the number
// of arcs, before anything that takes long is done.
func (g *Graph) split(ctx context.Context, name string, r io.ReaderAt, size int64) error {
	keep := g.window * g.maxRef // nodes before a part that its references can lead to
	single := g.window > 0 && (g.maxRef < 0 || keep > maxWarm)
	if single {
		keep = 0
	}
	target := max(partBytes*8, g.size*8/maxParts)
	in, degrees := newBitReader(r, size), newBitReader(g.r, g.size)
	recent := make([]int64, 0, 2*keep+2) // offsets of the last nodes
	offset, arcs := int64(0), int64(0)
	g.parts = g.parts[:0]
	for v := int64(0); v <= g.Nodes; v++ {
		bit := in.pos()
		gap := in.number(g.offset, g.zetaK)
		if in.err != nil {
			return errs.New(errs.Usage,
				"%s: entry %d, byte %d: %w; without the file the graph is read in one piece", name,
				v, bit/8, in.err)
		}
		if offset += int64(gap); offset < 0 || offset > g.size*8 || v == 0 && offset != 0 {
			return errs.New(errs.Usage,
				"%s: entry %d, byte %d: node %d would begin at bit %d of the %d of %s; without the file the graph is read in one piece",
				name, v, bit/8, v, offset, g.size*8, g.Name)
		}
		last := len(g.parts) - 1
		if v == g.Nodes {
			g.parts[last].end, g.parts[last].stop = v, offset
			break
		}
		degrees.seek(offset)
		d := degrees.number(g.outdegree, g.zetaK)
		if degrees.err != nil {
			return g.damaged(v, offset, degrees.err)
		}
		if arcs += int64(d); d > uint64(g.Nodes) || arcs > g.Arcs {
			return g.damaged(v, offset,
				fmt.Errorf(
					"with its outdegree of %d there are %d arcs; %s has %d nodes and %d arcs", d,
					arcs, g.props, g.Nodes, g.Arcs))
		}
		if int64(len(recent)) == int64(cap(recent)) {
			recent = append(recent[:0], recent[int64(len(recent))-keep:]...)
		}
		recent = append(recent, offset)
		if last < 0 || !single && offset-g.parts[last].offsets[len(g.parts[last].offsets)-
			1] >= target {
			if last >= 0 {
				g.parts[last].end, g.parts[last].stop = v, offset
			}
			n := min(keep, v) + 1
			g.parts = append(g.parts, part{first: v, warm: v - n + 1, offsets: append([]int64(nil),
				recent[int64(len(recent))-n:]...)})
		}
		if v&0xfffff == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if arcs != g.Arcs {
		return errs.New(errs.Usage, "%s: the outdegrees of its %d nodes make %d arcs, %s has %d",
			g.Name, g.Nodes, arcs, g.props, g.Arcs)
	}
	if g.size*8-offset >= 64 {
		return errs.New(errs.Usage,
			"%s: the last record ends at bit %d of %d; the files are not of one graph, or damaged",
			g.Name, offset, g.size*8)
	}
	return nil
}

// list is the successors of a node that others may refer to.
type list struct {
	node  int64
	depth int64 // references followed
	succ  []int64
}

// decoder reads one part.
type decoder struct {
	g     *Graph
	p     *part
	in    *bitReader
	ring  []list
	arcs  int64
	back  *bitReader // for nodes before the part
	block []int64
	left  []int64 // intervals: first and last in turn
	res   []int64
}

// Read calls emit for each node of a part that has successors, in order, with the successors in
// rising order, which emit must not keep.
func (g *Graph) Read(ctx context.Context, n int, emit func(node int64, succ []int64) error) error {
	p := &g.parts[n]
	d := &decoder{g: g, p: p, in: newBitReader(g.r, g.size), ring: make([]list, g.window+1)}
	for i := range d.ring {
		d.ring[i].node = -1
	}
	d.in.seek(p.offsets[len(p.offsets)-1])
	for v := p.first; v < p.end; v++ {
		l := &d.ring[v%int64(len(d.ring))]
		if err := d.record(d.in, v, l, 0); err != nil {
			return err
		}
		d.arcs += int64(len(l.succ))
		if d.arcs > g.Arcs {
			return g.damaged(v, d.in.pos(), fmt.Errorf("more than the %d arcs of %s", g.Arcs,
				g.props))
		}
		if len(l.succ) > 0 {
			if err := emit(v, l.succ); err != nil {
				return err
			}
		}
		if v&0xfff == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if p.stop >= 0 && d.in.pos() != p.stop {
		return g.damaged(p.end-1, d.in.pos(),
			fmt.Errorf("the record ends here, .offsets has the next at bit %d", p.stop))
	}
	if p.stop < 0 && (d.arcs != g.Arcs || g.size*8-d.in.pos() >= 64) {
		return errs.New(errs.Usage, "%s: %d nodes with %d arcs end at bit %d of %d; %s has %d arcs",
			g.Name, g.Nodes, d.arcs, d.in.pos(), g.size*8, g.props, g.Arcs)
	}
	return nil
}

// list returns the successors of an earlier node: from the window, or, at the start of a part, by
// its offset.
func (d *decoder) list(v, depth int64) (*list, error) {
	if l := &d.ring[v%int64(len(d.ring))]; l.node == v {
		return l, nil
	}
	if v < d.p.warm || v >= d.p.first || depth > d.g.maxRef {
		return nil, fmt.Errorf("node %d is referred to by a chain longer than maxrefcount=%d", v,
			d.g.maxRef)
	}
	if d.back == nil {
		d.back = newBitReader(d.g.r, d.g.size)
	}
	d.back.seek(d.p.offsets[v-d.p.warm])
	l := &list{}
	// A decoder of its own: this one is in the middle of a record.
	e := &decoder{g: d.g, p: d.p, back: newBitReader(d.g.r, d.g.size),
		ring: make([]list, len(d.ring))}
	for i := range e.ring {
		e.ring[i].node = -1
	}
	return l, e.record(d.back, v, l, depth)
}

// record reads the record of node v into l. depth is how many references led to it.
func (d *decoder) record(in *bitReader, v int64, l *list, depth int64) error {
	g := d.g
	start := in.pos()
	l.node, l.depth, l.succ = v, 0, l.succ[:0]
	fail := func(format string, a ...any) error {
		err := fmt.Errorf(format, a...)
		if in.err != nil {
			err = in.err
		}
		return g.damaged(v, start, err)
	}
	num := func(c code) int64 { return int64(in.number(c, g.zetaK)) }
	degree := num(g.outdegree)
	if in.err != nil || degree > min(g.Nodes, g.Arcs, maxDegree) {
		return fail("outdegree %d in a graph of %d nodes and %d arcs (at most %d are read)", degree,
			g.Nodes, g.Arcs, int64(maxDegree))
	}
	if degree == 0 {
		return nil
	}
	var from []int64
	d.block = d.block[:0]
	left := degree // successors that are still to come
	if g.window > 0 {
		ref := num(g.reference)
		if in.err != nil || ref > min(g.window, v) {
			return fail("reference to %d nodes before, the window has %d", ref, g.window)
		}
		if ref > 0 {
			r, err := d.list(v-ref, depth+1)
			if err != nil {
				return fail("%w", err)
			}
			if l.depth = r.depth + 1; g.maxRef >= 0 && l.depth > g.maxRef {
				return fail("a chain of %d references, maxrefcount is %d", l.depth, g.maxRef)
			}
			from = r.succ
			n := num(g.blockCount)
			if in.err != nil || n > int64(len(from))+1 {
				return fail("%d copy blocks of a list of %d", n, len(from))
			}
			total := int64(0)
			for i := range n {
				b := num(g.block)
				if i > 0 {
					b++
				}
				if total += b; in.err != nil || total > int64(len(from)) {
					return fail("copy blocks of %d successors of a list of %d", total, len(from))
				}
				if i%2 == 0 {
					left -= b
				}
				d.block = append(d.block, b)
			}
			if n%2 == 0 {
				left -= int64(len(from)) - total
				d.block = append(d.block, int64(len(from))-total)
			}
			if left < 0 {
				return fail("%d successors are copied, the outdegree is %d", degree-left, degree)
			}
		}
	}
	d.left, d.res = d.left[:0], d.res[:0]
	if left > 0 && g.minInterval > 0 {
		n := num(gamma)
		if in.err != nil || n > left/g.minInterval {
			return fail("%d intervals for %d successors", n, left)
		}
		next := int64(0)
		for i := range n {
			lo := num(gamma)
			if i == 0 {
				lo = signed(uint64(lo)) + v
			} else {
				lo += next + 1
			}
			size := num(gamma) + g.minInterval
			if in.err != nil || lo < 0 || size > left || lo > g.Nodes-size {
				return fail(
					"interval of %d successors from %d: outside the graph of %d nodes or of the %d that are left",
					size, lo, g.Nodes, left)
			}
			d.left = append(d.left, lo, lo+size)
			next = lo + size
			left -= size
		}
	}
	prev := int64(-1)
	for i := range left {
		x := num(g.residual)
		if i == 0 {
			x = signed(uint64(x)) + v
		} else {
			x += prev + 1
		}
		if in.err != nil || x < 0 || x >= g.Nodes {
			return fail("successor %d in a graph of %d nodes", x, g.Nodes)
		}
		d.res = append(d.res, x)
		prev = x
	}
	return d.merge(v, start, from, l)
}

// merge puts the three rising sequences of a record together.
func (d *decoder) merge(v, start int64, from []int64, l *list) error {
	prev := int64(-1)
	res, ival := d.res, d.left
	up := func(x int64) bool { // adds residuals and intervals below x
		for {
			r, i := int64(math.MaxInt64), int64(math.MaxInt64)
			if len(res) > 0 {
				r = res[0]
			}
			if len(ival) > 0 {
				i = ival[0]
			}
			switch {
			case min(r, i) >= x:
				return true
			case r < i:
				if r <= prev {
					return false
				}
				l.succ, prev, res = append(l.succ, r), r, res[1:]
			default:
				if i <= prev {
					return false
				}
				end := min(ival[1], x, r)
				for ; i < end; i++ {
					l.succ = append(l.succ, i)
				}
				if prev = end - 1; end == ival[1] {
					ival = ival[2:]
				} else {
					return false // a number inside the interval comes from elsewhere too
				}
			}
		}
	}
	at, ok := int64(0), true
	for i, b := range d.block {
		if i%2 == 0 {
			for _, x := range from[at : at+b] {
				if ok = ok && up(x) && x > prev; !ok {
					break
				}
				l.succ, prev = append(l.succ, x), x
			}
		}
		at += b
	}
	if !ok || !up(math.MaxInt64) {
		return d.g.damaged(v, start,
			fmt.Errorf("successor %d is followed by one that is not larger", prev))
	}
	return nil
}
