package build

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/bits"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/internal/work"
)

// GenerateOptions shape a generated dataset. Zero values mean the defaults.
type GenerateOptions struct {
	Kind      string  `option:"kind" common:"yes" oneof:"@graph-kinds" default:"sbm" usage:"graph model"`
	Nodes     int64   `option:"nodes" common:"yes" shown:"none" arg:"NUMBER" usage:"NUMBER of nodes (required)"`
	AvgDegree float64 `option:"avg-degree" common:"yes" positive:"yes" default:"12" usage:"mean number of in-neighbours"`
	Classes   int     `option:"classes" common:"yes" positive:"yes" default:"16" usage:"number of labels"`
	// Target is one of dataset.TargetClass (the default), TargetMultiLabel and TargetRegression.
	Target string `option:"target" common:"yes" oneof:"class,multi-label,regression" default:"class" usage:"what is to be predicted: the class; labels, of which a node has those of its class and of the next; or a number, ten times the class plus noise of variance 1; not for typed"`
	Dim    int    `option:"dim" common:"yes" positive:"yes" default:"128" usage:"features of a node (float32)"`
	// the same seed and options give the same bytes on every machine
	Seed uint64 `option:"seed" common:"yes" default:"1" usage:"seed of all random choices"`
	Out  string `option:"out" common:"yes" arg:"DIR" usage:"DIR to create"`
	Name string `option:"name" usage:"name of the dataset (default: last part of {out})"`

	Homophily float64 `option:"homophily" common:"yes" share:"yes" positive:"yes" shown:"0.8" usage:"sbm, communities: share of neighbours of a node's own class"`
	// Signal is the distance of a class centre from the origin, where the noise of each
	// feature has variance 1 (1.0). At 1.0 a node's own features settle its class in a third
	// of the cases; the mean over its neighbours settles most. For communities it is that of nodes
	// that are no hubs (0.1: next to nothing).
	Signal      float64          `option:"signal" common:"yes" positive:"yes" shown:"1, and 0.1 for communities" usage:"distance of class centres, in standard deviations of a feature"`
	Communities CommunityOptions `options:"in"`
	// TrainFraction and ValFraction of the nodes go to these splits (0.6 and 0.2 where neither is
	// given), and TestFraction to test: 0 means the rest, and below 0 none. The other nodes are in
	// no split.
	TrainFraction float64 `option:"train-fraction" common:"yes" share:"yes" shown:"0.6" usage:"share of the nodes to train on"`
	ValFraction   float64 `option:"val-fraction" common:"yes" share:"yes" shown:"0.2" usage:"share of the nodes to validate on"`
	TestFraction  float64 `option:"test-fraction" zero:"-1" share:"yes" shown:"the rest" usage:"share of the nodes to test on; with less than the rest some nodes are in no split"`
	// FeatureFn makes rows a function of their number, as "hash" or "hash:7" ("hash" takes Seed),
	// and stores none. They say nothing about the class then.
	FeatureFn string `option:"feature-fn" arg:"hash[:SEED]" usage:"rows computed from their numbers, none stored: hash[:SEED] (default seed: {seed}); they say nothing about the class"`
	// WithoutRows is for kind typed.
	WithoutRows int `option:"without-rows" range:"1..4" shown:"none" arg:"N" usage:"typed: the last N of the 4 types have no rows"`
	// Memory bounds the edge sort of rmat (half of what is available, at most 8 GiB).
	Memory   int64 `option:"memory" size:"16MiB" shown:"half of what is available, at most 8GiB" arg:"SIZE" usage:"SIZE that sorting edges may take"`
	Progress work.Progress
}

func (o *GenerateOptions) fill() error {
	o.Kind = cmp.Or(o.Kind, kindSBM)
	o.AvgDegree = cmp.Or(o.AvgDegree, 12)
	o.Homophily = cmp.Or(o.Homophily, 0.8)
	o.Target = cmp.Or(o.Target, dataset.TargetClass)
	if o.Kind == kindCommunities {
		o.Signal = cmp.Or(o.Signal, 0.1)
	}
	o.Signal = cmp.Or(o.Signal, 1)
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		o.TrainFraction, o.ValFraction = 0.6, 0.2
	}
	o.Classes, o.Dim = cmp.Or(o.Classes, 16), cmp.Or(o.Dim, 128)
	o.Name = cmp.Or(o.Name, filepath.Base(filepath.Clean(o.Out)))
	if err := o.check(); err != nil {
		return err
	}
	if o.Kind == kindCommunities {
		if err := o.Communities.fill(o); err != nil {
			return err
		}
	}
	if o.Memory == 0 {
		o.Memory = generateMemory
		if free, err := hostmem.AvailableBytes(); err == nil { // the bytes do not depend on it
			o.Memory = max(min(o.Memory, free/2), 16<<20)
		}
	}
	if o.FeatureFn != "" {
		fn, err := dataset.ParseFeatureFn(o.FeatureFn, o.Seed)
		if err != nil {
			return err
		}
		o.FeatureFn = fn
	}
	return nil
}

// check refuses options outside their bounds.
func (o *GenerateOptions) check() error {
	in := func(v, lo, hi float64) bool { return v >= lo && v <= hi } // false for NaN
	if err := o.checkTarget(); err != nil {
		return err
	}
	switch {
	case o.WithoutRows != 0 && (o.Kind != kindTyped || o.FeatureFn != ""):
		return errs.New(errs.Usage,
			"{without-rows} is for {kind} %s without {feature-fn}; leave it out", kindTyped)
	case !slices.Contains(Kinds, o.Kind):
		return errs.New(errs.Usage, "{kind} %q is unknown; use one of %s", o.Kind,
			strings.Join(Kinds, ", "))
	case o.Nodes < 1 || o.Nodes > 1<<40:
		return errs.New(errs.Usage, "{nodes} %d is outside 1..2^40", o.Nodes)
	case o.Classes < 1 || int64(o.Classes) > o.Nodes || o.Classes > 1<<20:
		return errs.New(errs.Usage, "{classes} %d is outside 1..%d ({nodes})", o.Classes,
			min(o.Nodes, 1<<20))
	case o.Dim < 1 || o.Dim > dataset.MaxDim:
		return errs.New(errs.Usage, "{dim} %d is outside 1..%d", o.Dim, dataset.MaxDim)
	case !in(o.AvgDegree, 0.001, 1e6):
		return errs.New(errs.Usage, "{avg-degree} %g is outside 0.001..1000000", o.AvgDegree)
	case !in(o.Homophily, 0.000001, 1):
		return errs.New(errs.Usage, "{homophily} %g is outside 0..1", o.Homophily)
	case !in(o.Signal, 0.000001, 1000):
		return errs.New(errs.Usage, "{signal} %g is outside 0..1000", o.Signal)
	case !in(o.TrainFraction, 0, 1) || !in(o.ValFraction, 0, 1) || !in(o.TestFraction, -1, 1) ||
		o.TrainFraction+o.ValFraction+max(o.TestFraction, 0) > 1:
		return errs.New(errs.Usage,
			"{train-fraction} %g, {val-fraction} %g and {test-fraction} %g are not parts of a whole; give numbers from 0 that make at most 1 together",
			o.TrainFraction, o.ValFraction, max(o.TestFraction, 0))
	}
	return nil
}

// checkTarget refuses targets that there are not, or not of that kind.
func (o *GenerateOptions) checkTarget() error {
	switch {
	case !slices.Contains(targets, o.Target):
		return errs.New(errs.Usage, "{target} %q is unknown; use one of %s", o.Target,
			strings.Join(targets, ", "))
	case !o.plain() && o.Kind == kindTyped:
		return errs.New(errs.Usage,
			"{target} %s: {kind} %s has classes alone; leave one of the two out", o.Target, o.Kind)
	case o.Target == dataset.TargetMultiLabel && (o.Classes < 2 || o.Classes > dataset.MaxDim):
		return errs.New(errs.Usage, "{classes} %d is outside 2..%d ({target} %s)", o.Classes,
			dataset.MaxDim, o.Target)
	}
	return nil
}

// generateMemory is the most that sorting edges takes when nobody says.
const generateMemory = 8 << 30

// bytes is about what the dataset takes on disk, rather less than more: features, labels and
// offsets of the nodes, and half the neighbours, since R-MAT drops repeated ones; and what sorting
// needs beside it.
func (o *GenerateOptions) bytes() float64 {
	nodes := float64(o.Nodes)
	row := 4 * float64(o.Dim)
	if o.FeatureFn != "" {
		row = 0
	}
	splits := o.TrainFraction + o.ValFraction + o.TestFraction
	switch {
	case o.TestFraction == 0:
		splits = 1
	case o.TestFraction < 0:
		splits = o.TrainFraction + o.ValFraction
	}
	if o.Target == dataset.TargetMultiLabel {
		row += float64(o.Classes)
	}
	edges := nodes * o.AvgDegree
	// sorted runs, 5 bytes an edge, lie beside what is merged from them
	if o.Kind == kindRMAT && edges*16 > float64(o.Memory) {
		edges *= 1 + 5.0/2
	}
	return float64(nodes*(row+12+float64(8*splits))) + float64(edges*4/2)
}

// Generate makes a dataset from a seed. Every part of it is a function of the seed and the
// node or edge number alone (Philox), so it is made in parallel, streamed in bounded memory,
// and equal for any number of cores.
//
// "sbm" is a degree-corrected stochastic block model (Karrer and Newman 2011): classes are the
// blocks; a node draws its in-neighbours from its own class with probability Homophily, and
// within a class by popularity, so that a few nodes are in very many neighbourhoods, as in
// real graphs. "rmat" is the recursive matrix model (Chakrabarti et al. 2004) with Graph500's
// parameters 0.57, 0.19, 0.19, 0.05 and classes by recursive position; repeated edges and self
// loops are dropped, so the mean degree ends a little lower. "communities" are groups whose nodes
// know each other, and hubs that everybody knows, which carry the signal of the class
// (communities.go). "typed" has several types of nodes and edges (typed.go). Node ids are scrambled
// in all.
//
// Features are the centre of the class plus noise.
func Generate(ctx context.Context, o GenerateOptions) (err error) {
	if err := o.fill(); err != nil {
		return err
	}
	s, err := NewStaging(o.Out)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Abort())
		}
	}()
	if err := EnoughDisk(o.Out, o.bytes()); err != nil {
		return err
	}
	g := newGenerator(o)
	m := dataset.Meta{
		Name: o.Name, Nodes: o.Nodes, Dim: o.Dim, Classes: o.Classes, DType: "float32",
		FeatureFn: o.FeatureFn,
		Source: dataset.Source{Kind: o.Kind, Options: map[string]string{
			"seed": strconv.FormatUint(o.Seed, 10), "avg-degree": formatFloat(o.AvgDegree),
			"signal":         formatFloat(o.Signal),
			"train-fraction": formatFloat(o.TrainFraction),
			"val-fraction":   formatFloat(o.ValFraction)}},
	}
	if o.TestFraction != 0 {
		m.Source.Options["test-fraction"] = formatFloat(max(o.TestFraction, 0))
	}
	if o.WithoutRows != 0 {
		m.Source.Options["without-rows"] = strconv.Itoa(o.WithoutRows)
	}
	switch o.Kind {
	case kindRMAT:
		m.Edges, m.Source.Counts, err = g.rmatEdges(ctx, s)
	case kindCommunities:
		o.Communities.record(m.Source.Options)
		m.Source.Options["homophily"] = formatFloat(o.Homophily)
		m.Edges, err = g.listEdges(ctx, s, g.community)
	case kindTyped:
		m.Source.Options["homophily"] = formatFloat(o.Homophily)
		m.Schema, err = g.typed(ctx, s)
	default:
		m.Source.Options["homophily"] = formatFloat(o.Homophily)
		m.Edges, err = g.listEdges(ctx, s, g.neighbors)
	}
	if err != nil {
		return err
	}
	if m.Typed() {
		return s.Commit(m)
	}
	if !o.plain() {
		g.folder = dataset.NodesDir(0)
	}
	if o.FeatureFn == "" {
		if err := g.features(ctx, s); err != nil {
			return err
		}
	}
	if !o.plain() {
		g.folder = dataset.TasksDir(0)
	}
	if m.Train, m.Val, m.Test, err = g.labelsAndSplits(ctx, s); err != nil {
		return err
	}
	if !o.plain() {
		g.describe(&m)
	}
	return s.Commit(m)
}

func formatFloat(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

// The last word of a counter of StreamGenerate names its use.
const (
	genPermute uint32 = iota
	genDegree
	genNeighbor
	genRMAT
	genCentre
	genNoise
	genSplit
	genHub
	genTarget
)

// Kinds of graphs.
const (
	kindSBM         = "sbm"
	kindRMAT        = "rmat"
	kindCommunities = "communities"
	kindTyped       = "typed"
)

// Kinds are the kinds of graphs that Generate makes.
var Kinds = []string{kindSBM, kindRMAT, kindCommunities, kindTyped}

// Homophilous reports whether the edges of a kind know classes.
func Homophilous(kind string) bool { return kind != kindRMAT }

// Grouped reports whether a kind takes CommunityOptions.
func Grouped(kind string) bool { return kind == kindCommunities }

type generator struct {
	GenerateOptions
	key     [2]uint32
	half    uint      // bits in half an id, for the permutation
	rounds  [4]uint64 // keys of the permutation
	centres []float32 // [classes × dim]
	folder  string    // of what it writes; "" is the dataset's own
}

func newGenerator(o GenerateOptions) *generator {
	g := &generator{GenerateOptions: o, key: philox.Key(o.Seed, philox.StreamGenerate)}
	for g.half = 1; int64(1)<<(2*g.half) < o.Nodes; g.half++ {
	}
	for i := range g.rounds {
		w := philox.Block(g.key, [4]uint32{uint32(i), 0, 0, genPermute})
		g.rounds[i] = uint64(w[0])<<32 | uint64(w[1])
	}
	// Centres have length Signal on average: dim entries of variance Signal²/dim.
	g.centres = make([]float32, o.Classes*o.Dim)
	scale := float32(o.Signal / math.Sqrt(float64(o.Dim)))
	for c := range o.Classes {
		row := g.centres[c*o.Dim:][:o.Dim]
		g.noise(row, uint64(c), genCentre)
		for i := range row {
			row[i] *= scale
		}
	}
	return g
}

// Ranks are positions in the model, ids are what the dataset shows. A Feistel network on twice
// half bits, walked until it lands below nodes, is a permutation that needs no table (Black and
// Rogaway, "Ciphers with arbitrary finite domains", 2002). It keeps popular nodes, and the
// classes, spread over the ids and so over the SSDs.
func (g *generator) id(rank int64) int64 {
	mask := uint64(1)<<g.half - 1
	x := uint64(rank)
	for {
		l, r := x>>g.half, x&mask
		for _, k := range g.rounds {
			l, r = r, l^philox.Mix(r^k)&mask
		}
		if x = l<<g.half | r; x < uint64(g.Nodes) {
			return int64(x)
		}
	}
}

func (g *generator) rank(id int64) int64 {
	mask := uint64(1)<<g.half - 1
	x := uint64(id)
	for {
		l, r := x>>g.half, x&mask
		for i := len(g.rounds) - 1; i >= 0; i-- {
			l, r = r^philox.Mix(l^g.rounds[i])&mask, l
		}
		if x = l<<g.half | r; x < uint64(g.Nodes) {
			return int64(x)
		}
	}
}

// class is the label of a node of the given rank.
func (g *generator) class(rank int64) int64 {
	switch g.Kind {
	case kindSBM:
		return rank % int64(g.Classes)
	case kindCommunities:
		class, _ := g.placeOf(rank)
		return class
	}
	hi, lo := bits.Mul64(uint64(rank), uint64(g.Classes))
	q, _ := bits.Div64(hi, lo, uint64(g.Nodes))
	return int64(q)
}

func (g *generator) words(n uint64, i, use uint32) [4]uint32 {
	return philox.Block(g.key, [4]uint32{uint32(n), uint32(n >> 32), i, use})
}

// unit maps two words to [0, 1) with 53 bits.
func unit(hi, lo uint32) float64 {
	return float64(float64((uint64(hi)<<32|uint64(lo))>>11) * (1.0 / (1 << 53)))
}

// noise fills row with variates of mean 0 and variance 1: sums of four 16-bit uniforms, near
// normal, exact in integers and therefore equal on every machine.
func (g *generator) noise(row []float32, n uint64, use uint32) {
	// Variance of one uniform on 0..65535 is (2^32-1)/12.
	const mean = 4 * 65535 / 2
	scale := float32(1 / math.Sqrt(4*(1<<32-1)/12.0))
	sum := func(a, b uint32) float32 {
		s := a&0xffff + a>>16 + b&0xffff + b>>16
		return float32(int32(s)-mean) * scale
	}
	for i := 0; i < len(row); i += 2 {
		w := g.words(n, uint32(i/2), use)
		row[i] = sum(w[0], w[1])
		if i+1 < len(row) {
			row[i+1] = sum(w[2], w[3])
		}
	}
}

// neighbors draws the in-neighbours of a node of the block model: distinct, without the node
// itself, ascending. Collisions are drawn again a bounded number of times.
func (g *generator) neighbors(id int64, dst []int64) []int64 {
	own := g.rank(id) % int64(g.Classes)
	return g.draw(id, dst, func(i uint32) int64 {
		w := g.words(uint64(id), i, genNeighbor)
		c := g.classOf(own, w[0], w[1])
		size := (g.Nodes - c + int64(g.Classes) - 1) / int64(g.Classes)
		return c + g.popular(unit(w[2], w[3]), size)*int64(g.Classes)
	})
}

// popular is one of size ranks, by a number from 0 to below 1. Popularity falls with the rank:
// density r^-0.6. The square root is correctly rounded everywhere, unlike a general power.
func (g *generator) popular(u float64, size int64) int64 {
	return min(int64(float64(size)*float64(u*u*math.Sqrt(u))), size-1)
}

// classOf draws the class of a neighbour of a node of class own.
func (g *generator) classOf(own int64, share, which uint32) int64 {
	if g.Classes == 1 || unit(share, 0) < g.Homophily {
		return own
	}
	return (own + 1 + int64(philox.Bounded(uint64(which)<<32, uint64(g.Classes-1)))) %
		int64(g.Classes)
}

// degree draws a number of in-neighbours. These spread evenly from half to one and a half times the
// mean.
func (g *generator) degree(id int64) int64 {
	w := g.words(uint64(id), 0, genDegree)
	x := float64(g.AvgDegree * (0.5 + unit(w[0], w[1])))
	degree := int64(x)
	if unit(w[2], w[3]) < x-float64(degree) {
		degree++
	}
	return degree
}

// draw fills dst with the neighbours of a node, of which source gives the rank of draw i, or a
// number below 0 for none.
func (g *generator) draw(id int64, dst []int64, source func(i uint32) int64) []int64 {
	degree := int(min(g.degree(id), g.Nodes-1))
	dst = dst[:0]
	for try := uint32(0); len(dst) < degree && try < 4; try++ {
		for i := uint32(0); len(dst) < degree && i < uint32(degree); i++ {
			rank := source(try<<28 | i)
			if rank < 0 {
				continue
			}
			if src := g.id(rank); src != id {
				dst = append(dst, src)
			}
		}
		slices.Sort(dst)
		dst = slices.Compact(dst)
	}
	return dst
}

const nodesPerChunk = 4096

// listEdges writes the in-neighbours that draw gives for each node, distinct and ascending.
func (g *generator) listEdges(ctx context.Context, s *Staging,
	draw func(id int64, dst []int64) []int64) (int64, error) {
	w, err := edges.NewCSC(g.store(s), g.Nodes, g.Nodes)
	if err != nil {
		return 0, err
	}
	type part struct{ degrees, sources []int64 }
	chunks := (g.Nodes + nodesPerChunk - 1) / nodesPerChunk
	err = work.InOrder(ctx, chunks, func(c int64) part {
		var p part
		var buf []int64
		for v := c * nodesPerChunk; v < min((c+1)*nodesPerChunk, g.Nodes); v++ {
			buf = draw(v, buf)
			p.degrees = append(p.degrees, int64(len(buf)))
			p.sources = append(p.sources, buf...)
		}
		return p
	}, func(c int64, p part) error {
		pos := 0
		for i, d := range p.degrees {
			for range d {
				if err := w.Put(edges.Edge{Dst: uint64(c*nodesPerChunk) + uint64(i),
					Src: uint64(p.sources[pos])}); err != nil {
					return err
				}
				pos++
			}
		}
		g.Progress.Report("topology", min((c+1)*nodesPerChunk, g.Nodes), g.Nodes)
		return nil
	})
	if err != nil {
		return 0, errors.Join(err, w.Discard())
	}
	return w.Edges, w.Close()
}

func (g *generator) rmatEdges(ctx context.Context, s *Staging) (_ int64, _ map[string]int64,
	err error) {
	const perChunk, perPart = 1 << 13, 1 << 20
	total := int64(float64(g.Nodes) * g.AvgDegree)
	counts, err := edges.Sort(ctx, g.store(s), edges.Source{Name: "rmat", Unit: "edges",
		Total: total, Parts: int((total + perPart - 1) / perPart),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			src, dst := make([]int64, perChunk), make([]int64, perChunk)
			var again []int32
			for n, end := int64(part)*perPart,
				min(int64(part+1)*perPart, total); n < end; n += perChunk {
				k := min(perChunk, end-n)
				g.rmatBatch(n, src[:k], dst[:k], &again)
				if err := emit(src[:k], dst[:k]); err != nil {
					return err
				}
				done(k)
			}
			return nil
		}}, edges.Options{Memory: g.Memory, Nodes: g.Nodes, Rules: edges.Rules{Dedup: true,
		NoSelf: true}, Progress: g.Progress})
	return counts.Stored, map[string]int64{"drawn": total, "duplicates": counts.Duplicates,
		"self-loops": counts.Self}, err
}

func (g *generator) features(ctx context.Context, s *Staging) error {
	out, err := s.Array(path.Join(g.folder, "features"), npy.Float32, int64(g.Dim))
	if err != nil {
		return err
	}
	perChunk := max(1<<20/int64(4*g.Dim), 1)
	err = work.InOrder(ctx, (g.Nodes+perChunk-1)/perChunk, func(c int64) []byte {
		row := make([]float32, g.Dim)
		buf := make([]byte, 0, perChunk*int64(4*g.Dim))
		for v := c * perChunk; v < min((c+1)*perChunk, g.Nodes); v++ {
			g.noise(row, uint64(v), genNoise)
			rank := g.rank(v)
			centre, far := g.centres[g.class(rank)*int64(g.Dim):], g.far(rank)
			for i, x := range row {
				buf = binary.LittleEndian.AppendUint32(buf,
					math.Float32bits(x+float32(far*centre[i])))
			}
		}
		return buf
	}, func(c int64, buf []byte) error {
		g.Progress.Report("features", min((c+1)*perChunk, g.Nodes), g.Nodes)
		_, err := out.Write(buf)
		return err
	})
	if err != nil {
		return errors.Join(err, out.Discard())
	}
	return out.Close()
}

func (g *generator) labelsAndSplits(ctx context.Context, s *Staging) (train, val, test int64,
	err error) {
	kind, columns := g.labelShape()
	labels, err := s.Array(path.Join(g.folder, "labels"), kind, columns)
	if err != nil {
		return 0, 0, 0, err
	}
	sp, err := NewSplitter(s, g.folder, g.Seed, g.TrainFraction, g.ValFraction)
	if err == nil && g.TestFraction != 0 {
		sp.all = g.TrainFraction + g.ValFraction + max(g.TestFraction, 0)
	}
	if err != nil {
		return 0, 0, 0, errors.Join(err, labels.Discard())
	}
	const perChunk = 64 << 10
	type part struct {
		labels []byte
		nodes  [3][]int64
	}
	err = work.InOrder(ctx, (g.Nodes+perChunk-1)/perChunk, func(c int64) (p part) {
		lo, hi := c*perChunk, min((c+1)*perChunk, g.Nodes)
		for v := lo; v < hi; v++ {
			p.labels = g.appendLabels(p.labels, v)
			if i := sp.Of(uint64(v)); i >= 0 {
				p.nodes[i] = append(p.nodes[i], v)
			}
		}
		return p
	}, func(c int64, p part) error {
		_, err := labels.Write(p.labels)
		for i, v := range p.nodes {
			if err == nil {
				sp.n[i] += int64(len(v))
				err = sp.out[i].int64s(v)
			}
		}
		g.Progress.Report("labels", min((c+1)*perChunk, g.Nodes), g.Nodes)
		return err
	})
	if err != nil {
		return 0, 0, 0, errors.Join(err, labels.Discard(), sp.Discard())
	}
	if err := labels.Close(); err != nil {
		return 0, 0, 0, errors.Join(err, sp.Discard())
	}
	return sp.Close()
}

// Noise draws rows of numbers of mean 0 and variance 1: the row of a node follows from the seed and
// its number.
func Noise(seed uint64) func(row []float32, node uint64) {
	g := &generator{key: philox.Key(seed, philox.StreamGenerate)}
	return func(row []float32, node uint64) { g.noise(row, node, genNoise) }
}
