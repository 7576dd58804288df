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
	"slices"
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
	p, err := parseProperties(text)
	if err != nil {
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
	return g.flags(p["compressionflags"])
}

// parseProperties reads lines KEY=VALUE.
func parseProperties(text string) (map[string]string, error) {
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
	return p, sc.Err()
}

// flags takes the codes of a record's parts, where they are not the usual ones.
func (g *Graph) flags(text string) error {
	g.outdegree, g.blockCount, g.block, g.offset, g.reference, g.residual = gamma, gamma, gamma,
		gamma, unary, zeta
	for _, f := range strings.Split(text, "|") {
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
	c := g.newCutter()
	in, degrees := newBitReader(r, size), newBitReader(g.r, g.size)
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
		if v == g.Nodes {
			last := len(g.parts) - 1
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
		c.node(v, offset)
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

// cutter cuts a graph into parts.
type cutter struct {
	g      *Graph
	keep   int64   // nodes before a part that its references can lead to
	single bool    // references lead too far: there is one part
	target int64   // bits of a part
	recent []int64 // offsets of the last nodes
}

func (g *Graph) newCutter() *cutter {
	c := &cutter{g: g, keep: g.window * g.maxRef, target: max(partBytes*8, g.size*8/maxParts)}
	if c.single = g.window > 0 && (g.maxRef < 0 || c.keep > maxWarm); c.single {
		c.keep = 0
	}
	c.recent = make([]int64, 0, 2*c.keep+2)
	return c
}

// node takes the offset of the next node, at which a part may begin.
func (c *cutter) node(v, offset int64) {
	if len(c.recent) == cap(c.recent) {
		c.recent = append(c.recent[:0], c.recent[int64(len(c.recent))-c.keep:]...)
	}
	c.recent = append(c.recent, offset)
	parts := c.g.parts
	if n := len(parts); n > 0 {
		last := &parts[n-1]
		if c.single || offset-last.offsets[len(last.offsets)-1] < c.target {
			return
		}
		last.end, last.stop = v, offset
	}
	n := min(c.keep, v) + 1
	c.g.parts = append(parts, part{first: v, warm: v - n + 1,
		offsets: slices.Clone(c.recent[int64(len(c.recent))-n:])})
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
	prev  int64 // the last successor that merge added
	// of the record that is being read
	intervals []int64 // first, and behind the last, in turn
	residuals []int64
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
	r := record{decoder: d, in: in, v: v}
	start := in.pos()
	from, err := r.read(l, depth)
	if err == nil && !d.merge(from, l) {
		err = fmt.Errorf("successor %d is followed by one that is not larger", d.prev)
	}
	if in.err != nil {
		err = in.err
	}
	if err != nil {
		return d.g.damaged(v, start, err)
	}
	return nil
}

// record is the record of node v, which is being read.
type record struct {
	*decoder
	in     *bitReader
	v      int64
	degree int64
	left   int64 // successors that are still to come
}

func (r *record) number(c code) int64 { return int64(r.in.number(c, r.g.zetaK)) }

// read reads the parts of the record, and returns the list that its copy blocks are of.
func (r *record) read(l *list, depth int64) (from []int64, err error) {
	d, g := r.decoder, r.g
	l.node, l.depth, l.succ = r.v, 0, l.succ[:0]
	d.block, d.intervals, d.residuals = d.block[:0], d.intervals[:0], d.residuals[:0]
	r.degree = r.number(g.outdegree)
	if r.in.err != nil || r.degree > min(g.Nodes, g.Arcs, maxDegree) {
		return nil, fmt.Errorf("outdegree %d in a graph of %d nodes and %d arcs (at most %d are read)",
			r.degree, g.Nodes, g.Arcs, int64(maxDegree))
	}
	if r.left = r.degree; r.left == 0 {
		return nil, nil
	}
	if g.window > 0 {
		if from, err = r.copied(l, depth); err != nil {
			return nil, err
		}
	}
	if r.left > 0 && g.minInterval > 0 {
		if err := r.readIntervals(); err != nil {
			return nil, err
		}
	}
	return from, r.readResiduals()
}

// copied reads the reference, and which successors of that node this one has as well.
func (r *record) copied(l *list, depth int64) ([]int64, error) {
	d, g := r.decoder, r.g
	ref := r.number(g.reference)
	if r.in.err != nil || ref > min(g.window, r.v) {
		return nil, fmt.Errorf("reference to %d nodes before, the window has %d", ref, g.window)
	}
	if ref == 0 {
		return nil, nil
	}
	other, err := d.list(r.v-ref, depth+1)
	if err != nil {
		return nil, err
	}
	if l.depth = other.depth + 1; g.maxRef >= 0 && l.depth > g.maxRef {
		return nil, fmt.Errorf("a chain of %d references, maxrefcount is %d", l.depth, g.maxRef)
	}
	size := int64(len(other.succ))
	n := r.number(g.blockCount)
	if r.in.err != nil || n > size+1 {
		return nil, fmt.Errorf("%d copy blocks of a list of %d", n, size)
	}
	total := int64(0)
	for i := range n {
		b := r.number(g.block)
		if i > 0 {
			b++
		}
		if total += b; r.in.err != nil || total > size {
			return nil, fmt.Errorf("copy blocks of %d successors of a list of %d", total, size)
		}
		if i%2 == 0 {
			r.left -= b
		}
		d.block = append(d.block, b)
	}
	if n%2 == 0 {
		r.left -= size - total
		d.block = append(d.block, size-total)
	}
	if r.left < 0 {
		return nil, fmt.Errorf("%d successors are copied, the outdegree is %d", r.degree-r.left,
			r.degree)
	}
	return other.succ, nil
}

// readIntervals reads runs of successors.
func (r *record) readIntervals() error {
	g := r.g
	n := r.number(gamma)
	if r.in.err != nil || n > r.left/g.minInterval {
		return fmt.Errorf("%d intervals for %d successors", n, r.left)
	}
	next := int64(0)
	for i := range n {
		first := r.number(gamma)
		if i == 0 {
			first = signed(uint64(first)) + r.v
		} else {
			first += next + 1
		}
		size := r.number(gamma) + g.minInterval
		if r.in.err != nil || first < 0 || size > r.left || first > g.Nodes-size {
			return fmt.Errorf(
				"interval of %d successors from %d: outside the graph of %d nodes or of the %d that are left",
				size, first, g.Nodes, r.left)
		}
		next = first + size
		r.intervals = append(r.intervals, first, next)
		r.left -= size
	}
	return nil
}

// readResiduals reads the successors that are left, one by one.
func (r *record) readResiduals() error {
	prev := int64(-1)
	for i := range r.left {
		x := r.number(r.g.residual)
		if i == 0 {
			x = signed(uint64(x)) + r.v
		} else {
			x += prev + 1
		}
		if r.in.err != nil || x < 0 || x >= r.g.Nodes {
			return fmt.Errorf("successor %d in a graph of %d nodes", x, r.g.Nodes)
		}
		r.residuals = append(r.residuals, x)
		prev = x
	}
	return nil
}

// merge puts the three rising sequences of a record together; false where they do not rise, with
// the last successor in prev.
func (d *decoder) merge(from []int64, l *list) bool {
	d.prev = -1
	m := merger{decoder: d, l: l, residuals: d.residuals, intervals: d.intervals}
	first := int64(0)
	for i, b := range d.block {
		if i%2 == 0 {
			for _, x := range from[first : first+b] {
				if !m.below(x) || x <= d.prev {
					return false
				}
				l.succ, d.prev = append(l.succ, x), x
			}
		}
		first += b
	}
	return m.below(math.MaxInt64)
}

// merger adds residuals and intervals to a list.
type merger struct {
	*decoder
	l                    *list
	residuals, intervals []int64
}

// below adds those below x; false where they do not rise.
func (m *merger) below(x int64) bool {
	for {
		r, i := int64(math.MaxInt64), int64(math.MaxInt64)
		if len(m.residuals) > 0 {
			r = m.residuals[0]
		}
		if len(m.intervals) > 0 {
			i = m.intervals[0]
		}
		switch {
		case min(r, i) >= x:
			return true
		case min(r, i) <= m.prev:
			return false
		case r < i:
			m.l.succ, m.prev, m.residuals = append(m.l.succ, r), r, m.residuals[1:]
		default:
			end := min(m.intervals[1], x, r)
			for ; i < end; i++ {
				m.l.succ = append(m.l.succ, i)
			}
			if m.prev = end - 1; end != m.intervals[1] {
				return false // a number inside the interval comes from elsewhere too
			}
			m.intervals = m.intervals[2:]
		}
	}
}
