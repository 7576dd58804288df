package compute

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"unsafe"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/philox"
	"helios/internal/simd"
)

func init() {
	Groups = append(Groups,
		Group{"rows",
			"kernels that memory bounds: aggregates, their gradients and transposes, and sums of columns, beside a copy (option rows); on the host device in turns with loops that only read and write the same rows in the same order: the ratio is the share of that floor",
			false, rowCases})
}

// Shapes of the row cases: larger than the caches of most machines.
const (
	benchDst  = 1 << 16 // destinations, of
	benchList = 5       // neighbours each, among
	benchSrc  = 4       // times as many sources
	// times as many rows has a matrix whose columns are summed, or that is copied,
	benchRows  = 2
	benchWidth = 256 // of so many columns
)

func (c *Config) destinations() int64 {
	if c.Rows == 0 {
		return benchDst
	}
	return c.Rows
}

func copyCase(c *Config) Case {
	rows := benchRows * c.destinations()
	return Case{
		Name: fmt.Sprintf("copy:%dx%d", rows, benchWidth), Kernel: "copy",
		Bytes: float64(2 * 4 * rows * benchWidth),
		Open:  func(dev cuda.Device) (*Run, error) { return openCopy(dev, c, rows) },
	}
}

func rowCases(c *Config) ([]Case, error) {
	n := c.destinations()
	out := []Case{copyCase(c)}
	for _, kind := range []string{"sage_mean", "gcn_agg", "sage_mean_bwd", "gcn_agg_bwd"} {
		for _, dim := range []int64{100, 128, 256, 1024} {
			n := n
			gcn, bwd := strings.HasPrefix(kind, "gcn_"), kind != "sage_mean" && kind != "gcn_agg"
			if dim == 1024 && (gcn || bwd) {
				// the first layer of a step with wide features has an aggregate, and no gradient of
				// it
				continue
			}
			if dim == 1024 {
				n = max(1, n/4)
			}
			b := Case{Name: fmt.Sprintf("%s:%dx%d", kind, n, dim), Kernel: kind}
			edges, rows := n*benchList, n*(benchList+1)
			switch {
			// a row for each edge, the destinations' own, the gates, and the results in their place
			case bwd:
				rows = edges + n + 2*benchSrc*n
			case gcn:
				rows += n
			}
			b.Flops, b.Bytes = float64(2*edges*dim), float64(rows*dim*4+edges*4+n*8)
			b.Open = func(dev cuda.Device) (*Run,
				error) {
				return openAggregate(dev, c, kind, n, dim, gcn, bwd)
			}
			out = append(out, b)
		}
	}
	edges, src := n*benchList, n*benchSrc
	return append(out, Case{
		// The list of sources in, the list of destinations and its ends out: what no way to sort
		// can do without.
		Name: fmt.Sprintf("transpose:%dx%d", n, edges), Kernel: "sage_transpose",
		Bytes: float64(edges*8 + n*12 + src*4),
		Open: func(dev cuda.Device) (*Run, error) {
			return openAggregate(dev, c, "transpose", n, 1, false, true)
		},
	}, Case{
		Name: fmt.Sprintf("col_sum:%dx%d", benchRows*n, benchWidth), Kernel: "col_sum",
		Flops: float64(benchRows * n * benchWidth), Bytes: float64(4 * benchRows * n * benchWidth),
		Open: func(dev cuda.Device) (*Run, error) { return openColSum(dev, c, benchRows*n) },
	}), nil
}

// openCopy returns what memory gives a single stream that does nothing else.
func openCopy(dev cuda.Device, cfg *Config, rows int64) (*Run, error) {
	mem := &buffers{dev: dev}
	x, y := mem.floats(rows*benchWidth), mem.floats(rows*benchWidth)
	cfg.fill(x.v, 1)
	if err := mem.upload(x); err != nil {
		_ = mem.close()
		return nil, err
	}
	run := &Run{
		Launch: func(s cuda.Stream) error { return s.Copy(y.p, x.p, int64(len(x.v))*4) },
		Close:  mem.close,
	}
	run.Check = func(ctx context.Context, s cuda.Stream) (out Checked, err error) {
		if err := mem.again(ctx, s, run, y); err != nil {
			return out, err
		}
		for i := range x.v {
			out.add(y.v[i], x.v[i], float64(x.v[i]), math.Abs(float64(x.v[i])), "element", i)
		}
		return out, nil
	}
	return run, nil
}

// add holds an element against the sum in its promised order and against the float64 sum of terms
// of so much in all.
func (c *Checked) add(got, promised float32, sum, size float64, what string, at int) {
	c.Elements++
	if got != promised {
		c.Inexact++
		c.Where = fmt.Sprintf("%s %d is %v, the sum in order is %v", what, at, got, promised)
	}
	if size == 0 {
		size = 1
	}
	if d := math.Abs(float64(got)-sum) / size; d > c.Error || math.IsNaN(d) {
		if c.Error = d; c.Inexact == 0 {
			c.Where = fmt.Sprintf("%s %d is %v, expected %v", what, at, got, sum)
		}
	}
}

// sumOf is a sum of float32 products in order, and in float64.
type sumOf struct {
	sum, size float64
	chain     float32
}

func (s *sumOf) add(w, x float32) {
	t := float32(w * x)
	s.chain += t
	s.sum += float64(w) * float64(x)
	s.size += math.Abs(float64(w) * float64(x))
}

// weights are those of edges in an aggregate of a block without weights of its own: the mean over
// neighbours, or GCN's normalisation (gnn's kernels.go has the formula), rounded as the kernels
// round.
type weights struct {
	gcn     bool
	indptr  []int64
	degrees []uint32
}

func rsqrt1(d uint32) float32 { return 1 / float32(math.Sqrt(float64(float32(d)+1))) }

// ofDst is the factor that all edges to destination i share.
func (w *weights) ofDst(i int64) float32 {
	sampled := float32(w.indptr[i+1] - w.indptr[i])
	if !w.gcn {
		return 1 / sampled
	}
	return float32(float32(w.degrees[i])/sampled) * rsqrt1(w.degrees[i])
}

// ofSrc is the factor of source j.
func (w *weights) ofSrc(j int64) float32 {
	if !w.gcn {
		return 1
	}
	return rsqrt1(w.degrees[j])
}

// self is the weight of a node's own row in GCN.
func (w *weights) self(i int64) float32 { return 1 / (float32(w.degrees[i]) + 1) }

// sumLeaf is the number of values a chain of col_sum's tree of sums has.
const sumLeaf = 64

// touch does on the host device what no kernel over rows can do without, so many workers side by
// side: each calls do for its share of n rows.
func touch(dev cuda.Device, n int64, do func(l simd.Level, lo, hi int64)) func(cuda.Stream) error {
	info := dev.Info()
	l, err := simd.Parse(info.Kernels)
	return func(cuda.Stream) error {
		if err != nil {
			return err
		}
		var all sync.WaitGroup
		for w := range int64(info.SMs) {
			all.Go(func() { do(l, n*w/int64(info.SMs), n*(w+1)/int64(info.SMs)) })
		}
		all.Wait()
		return nil
	}
}

// inOrder are the numbers of n rows.
func inOrder(n int64) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(i)
	}
	return list
}

// overwrite stores something in rows of y, around the caches where they are whole lines.
func overwrite(l simd.Level, y []float32, dim int64, order, same []uint32) {
	if len(order) == 0 || l.CopyRows(bytesOf(y), bytesOf(y), order, same, len(order), int(4*dim),
		int(4*dim)) {
		l.StoreFence()
		return
	}
	clear(y)
}

func bytesOf(v []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*len(v))
}

// aggregateFloor reads the rows that an aggregate or its gradient reads, in its order, and writes
// those that it writes.
func aggregateFloor(dev cuda.Device, a *aggregateData) func(cuda.Stream) error {
	d, n, order := int(a.dim), int64(len(a.indptr)-1), inOrder(int64(len(a.x))/a.dim)
	same := make([]uint32, len(order))
	if !a.bwd {
		return touch(dev, n, func(l simd.Level, lo, hi int64) {
			simd.ReadRows(l, a.x, d, a.src, int(a.indptr[lo]), int(a.indptr[hi]))
			if a.gcn {
				simd.ReadRows(l, a.x, d, order, int(lo), int(hi))
			}
			overwrite(l, a.y[lo*a.dim:hi*a.dim], a.dim, order[:hi-lo], same[:hi-lo])
		})
	}
	own := a.self
	if a.gcn {
		own = a.y
	}
	return touch(dev, int64(len(order)), func(l simd.Level, lo, hi int64) {
		from := uint32(0)
		if lo > 0 {
			from = a.ends[lo-1]
		}
		if lo < hi {
			simd.ReadRows(l, a.y, d, a.lists, int(from), int(a.ends[hi-1]))
		}
		if lo < n {
			simd.ReadRows(l, own, d, order, int(lo), int(min(hi, n)))
		}
		var lists [64]simd.RowList // empty: each row is read and written where it is
		for i := range lists {
			lists[i].Start = 1
		}
		for ; lo < hi; lo += int64(len(lists)) {
			to := min(hi, lo+int64(len(lists)))
			x := a.x[lo*a.dim : to*a.dim]
			l.SumLists(&simd.RowSum{Dim: d}, x, 0, lists[:to-lo], x)
		}
	})
}

// aggregateData are the arrays of an aggregate, as the CPU sees them.
type aggregateData struct {
	x, y, self       []float32
	src, ends, lists []uint32
	indptr           []int64
	dim              int64
	gcn, bwd         bool
}

// openAggregate opens an aggregate, its gradient (bwd), or the transpose that the gradient needs.
func openAggregate(dev cuda.Device, cfg *Config, kind string, n, dim int64, gcn, bwd bool) (*Run,
	error) {
	transposes := kind == "transpose"
	nSrc, edges := n*benchSrc, n*benchList
	mem := &buffers{dev: dev}
	x, y := mem.floats(nSrc*dim), mem.floats(n*dim)
	selfs := n * dim
	if !bwd {
		selfs = 0
	}
	self := mem.floats(selfs)
	ptr, list, deg := mem.floats(2*(n+1)), mem.floats(edges), mem.floats(nSrc)
	parts, ends, lists := mem.floats(nSrc), mem.floats(nSrc), mem.floats(edges)
	ops, err := gnn.NewOperators(dev, cuda.FP32)
	fail := func(err error) (*Run, error) {
		_ = mem.close()
		return nil, err
	}
	if err != nil {
		return fail(err)
	}
	scratch := cuda.DevicePtr(0)
	if bwd {
		scratch = mem.scratch(ops.TransposeScratch(nSrc, edges))
	}
	if mem.err != nil {
		return fail(mem.err)
	}
	cfg.fill(x.v, 1)
	cfg.fill(y.v, 4)
	cfg.fill(self.v, 5)
	indptr, src, degrees := view64(ptr), view32[uint32](list), view32[uint32](deg)
	for i := range indptr {
		indptr[i] = int64(i) * benchList
	}
	key := philox.Key(cfg.Seed, philox.StreamBench)
	for i := range src {
		src[i] = philox.Block(key, [4]uint32{uint32(i), 0, 2, 0xc0})[0] % uint32(nSrc)
	}
	for i := range degrees {
		degrees[i] = benchList + uint32(i)%16
	}
	if !bwd { // forward, GCN's kernel finds each source's part of the weights
		for i := range degrees {
			parts.v[i] = rsqrt1(degrees[i])
		}
	}
	if err := mem.upload(x, y, self, ptr, list, deg, parts); err != nil {
		return fail(err)
	}
	p := gnn.AggregateArgs{
		Indptr: ptr.p, Src: list.p, Weights: parts.p, X: x.p, Out: y.p, NumDst: n, NumSrc: nSrc,
		Edges: edges, Dim: dim,
	}
	if gcn {
		p.Degrees = deg.p
	}
	if bwd {
		p.X, p.Out, p.Grad, p.Self, p.TEnd, p.TDst = 0, x.p, y.p, self.p, ends.p, lists.p
	}
	transpose := func(s cuda.Stream) error { return ops.Transpose(s, &p, scratch) }
	run := &Run{
		Launch: func(s cuda.Stream) error { return ops.Aggregate(s, kind, &p) },
		Close:  mem.close,
	}
	if !transposes && dev.Info().Backend == "host" {
		run.RivalName, run.Idle = "memory", true
		run.Rival = aggregateFloor(dev, &aggregateData{x: x.v, y: y.v, self: self.v, src: src,
			ends: view32[uint32](ends), lists: view32[uint32](lists), indptr: indptr, dim: dim,
			gcn: gcn, bwd: bwd})
	}
	if transposes {
		run.Launch = transpose
	} else if bwd {
		if err := mem.do(transpose); err != nil {
			return fail(err)
		}
	}
	run.Check = func(ctx context.Context, s cuda.Stream) (Checked, error) {
		w := weights{gcn: gcn, indptr: indptr, degrees: degrees}
		out := Checked{Bound: (benchList + 3) * 0x1p-24}
		switch {
		case transposes:
			if err := mem.again(ctx, s, run, ends, lists); err != nil {
				return out, err
			}
			out.transposed(view32[uint32](ends), view32[uint32](lists), src, indptr)
		case bwd:
			// The gates are in the results' place.
			cfg.fill(x.v, 1)
			before := append([]float32(nil), x.v...)
			if err := mem.move(ctx, s, true, x); err != nil {
				return out, err
			}
			if err := run.Launch(s); err != nil {
				return out, err
			}
			if err := mem.move(ctx, s, false, x); err != nil {
				return out, err
			}
			targets := make([][]uint32, nSrc)
			for i := range n {
				for _, j := range src[indptr[i]:indptr[i+1]] {
					if j%61 == 0 {
						targets[j] = append(targets[j], uint32(i))
					}
				}
			}
			most := 0
			for j := int64(0); j < nSrc; j += 61 {
				most = max(most, len(targets[j]))
				for c := range dim {
					at := j*dim + c
					var sum sumOf
					if before[at] > 0 {
						switch {
						case j < n && gcn:
							sum.add(w.self(j), y.v[at])
						case j < n:
							sum.add(1, self.v[at])
						}
						for _, i := range targets[j] {
							sum.add(w.ofSrc(j)*w.ofDst(int64(i)), y.v[int64(i)*dim+c])
						}
					}
					out.add(x.v[at], sum.chain, sum.sum, sum.size, "element", int(at))
				}
			}
			out.Bound = float64(most+3) * 0x1p-24
		default:
			if err := mem.again(ctx, s, run, y); err != nil {
				return out, err
			}
			for i := int64(0); i < n; i += 61 {
				for c := range dim {
					var sum sumOf
					if gcn {
						sum.add(w.self(i), x.v[i*dim+c])
					}
					for _, j := range src[indptr[i]:indptr[i+1]] {
						sum.add(w.ofDst(i)*w.ofSrc(int64(j)), x.v[int64(j)*dim+c])
					}
					out.add(y.v[i*dim+c], sum.chain, sum.sum, sum.size, "element", int(i*dim+c))
				}
			}
		}
		return out, nil
	}
	return run, nil
}

// transposed looks at the lists of all sources: each edge in its source's, in order of
// destinations.
func (c *Checked) transposed(ends, lists, src []uint32, indptr []int64) {
	at := make([]uint32, len(ends))
	copy(at[1:], ends)
	for i := range len(indptr) - 1 {
		for _, j := range src[indptr[i]:indptr[i+1]] {
			c.Elements++
			k := at[j]
			at[j]++
			if k >= ends[j] || int(k) >= len(lists) || lists[k] != uint32(i) {
				c.Inexact++
				c.Where = fmt.Sprintf("the list of source %d lacks destination %d at %d", j, i, k)
			}
		}
	}
	for j := range ends {
		if at[j] != ends[j] {
			c.Inexact++
			c.Where = fmt.Sprintf("the list of source %d ends at %d, its last is %d", j,
				ends[j], at[j])
		}
	}
}

// do runs something on a stream of its own and waits.
func (b *buffers) do(enqueue func(cuda.Stream) error) error {
	s, err := b.dev.NewStream(cuda.StreamOptions{Name: "bench data"})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferTimeout)
	defer cancel()
	if err = enqueue(s); err == nil {
		err = s.Synchronize(ctx)
	}
	if e := s.Close(); err == nil {
		err = e
	}
	return err
}

func openColSum(dev cuda.Device, cfg *Config, rows int64) (*Run, error) {
	mem := &buffers{dev: dev}
	x, y := mem.floats(rows*benchWidth), mem.floats(benchWidth)
	scratch := cuda.DevicePtr(0)
	ops, err := gnn.NewOperators(dev, cuda.FP32)
	if err == nil {
		scratch = mem.scratch(ops.ColumnSumScratch(rows, benchWidth))
		err = mem.err
	}
	if err == nil {
		cfg.fill(x.v, 1)
		err = mem.upload(x)
	}
	if err != nil {
		_ = mem.close()
		return nil, err
	}
	run := &Run{
		Launch: func(
			s cuda.Stream) error {
			return ops.ColumnSum(s, y.p, x.p, rows, benchWidth, scratch)
		},
		Close: mem.close,
	}
	if dev.Info().Backend == "host" {
		order := inOrder(rows)
		run.RivalName, run.Idle = "memory", true
		run.Rival = touch(dev, rows, func(l simd.Level, lo, hi int64) {
			simd.ReadRows(l, x.v, benchWidth, order, int(lo), int(hi))
		})
	}
	run.Check = func(ctx context.Context, s cuda.Stream) (Checked, error) {
		out := Checked{Bound: benchWidth * 0x1p-24} // of a tree whose levels are chains of sumLeaf
		if err := mem.again(ctx, s, run, y); err != nil {
			return out, err
		}
		level := make([]float32, rows)
		for c := range benchWidth {
			sum, size := 0.0, 0.0
			for r := range rows {
				v := x.v[r*benchWidth+int64(c)]
				level[r] = v
				sum += float64(v)
				size += math.Abs(float64(v))
			}
			left := level
			for first := true; first || len(left) > 1; first = false {
				n := 0
				for at := 0; at < len(left); at += sumLeaf {
					part := float32(0)
					for _, v := range left[at:min(at+sumLeaf, len(left))] {
						part += v
					}
					left[n] = part
					n++
				}
				left = left[:n]
			}
			out.add(y.v[c], left[0], sum, size, "column", c)
		}
		return out, nil
	}
	return run, nil
}
