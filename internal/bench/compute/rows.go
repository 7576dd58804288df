package compute

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"unsafe"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/hostcpu"
	"helios/internal/philox"
	"helios/internal/simd"
)

func init() {
	Groups = append(Groups,
		Group{"rows",
			"kernels that memory bounds: aggregates, their gradients and transposes, and sums of columns, beside a copy ({rows}); on the host device in turns with loops that only read and write the same rows in the same order: the ratio is the share of that floor",
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

// rowData is the data of a kernel over rows on one device.
type rowData struct {
	mem     buffers
	launch  func(s cuda.Stream) error
	floor   func(s cuda.Stream) error // nil where none is known
	results []array
	inPlace bool // results have drawn values before
}

// rowCase completes a case whose data open makes.
func rowCase(c *Config, b Case, open func(d *rowData, cfg *Config) error) Case {
	b.Open = func(dev cuda.Device) (*Run, error) {
		d := &rowData{mem: buffers{dev: dev}}
		if err := open(d, c); err != nil {
			return nil, errors.Join(err, d.mem.close())
		}
		run := &Run{Launch: d.launch, Close: d.mem.close}
		if d.floor != nil && dev.Info().Backend == "host" {
			run.Rival, run.RivalName, run.Idle = d.floor, "memory", true
		}
		run.Check = func(ctx context.Context, s cuda.Stream) (Checked, error) {
			return d.check(ctx, s, c, open)
		}
		return run, nil
	}
	return b
}

// again does the work once more, with nothing of before left in the results.
func (d *rowData) again(ctx context.Context, s cuda.Stream, cfg *Config) error {
	if d.inPlace {
		cfg.fill(d.results[0].v, 1)
		if err := d.mem.move(ctx, s, true, d.results[0]); err != nil {
			return err
		}
		if err := d.launch(s); err != nil {
			return err
		}
		return d.mem.move(ctx, s, false, d.results...)
	}
	return d.mem.again(ctx, s, &Run{Launch: d.launch}, d.results...)
}

// check compares every element with the kernels in plain Go: kernels over rows have equal bits on
// all devices. gnn's tests hold those against float64.
func (d *rowData) check(ctx context.Context, s cuda.Stream, cfg *Config,
	open func(*rowData, *Config) error) (out Checked, err error) {
	if err := d.again(ctx, s, cfg); err != nil {
		return out, err
	}
	host, err := cuda.NewHost(cuda.HostOptions{SMs: hostcpu.Count(), Kernels: simd.Generic})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	plain := &rowData{mem: buffers{dev: host}}
	defer func() { err = errors.Join(err, plain.mem.close()) }()
	if err := open(plain, cfg); err != nil {
		return out, err
	}
	redo := func(s cuda.Stream) error { return plain.again(ctx, s, cfg) }
	if err := plain.mem.do(redo); err != nil {
		return out, err
	}
	for r, want := range plain.results {
		got := view32[uint32](d.results[r])
		for i, v := range view32[uint32](want) {
			out.Elements++
			if got[i] != v {
				out.wrong("element %d of result %d is %v, of plain Go %v (bits %#x, %#x)", i, r,
					d.results[r].v[i], want.v[i], got[i], v)
			}
		}
	}
	return out, nil
}

func copyCase(c *Config) Case {
	rows := benchRows * c.destinations()
	return rowCase(c, Case{
		Name: fmt.Sprintf("copy:%dx%d", rows, benchWidth), Kernel: "copy",
		Bytes: float64(2 * 4 * rows * benchWidth),
	}, func(d *rowData, cfg *Config) error {
		x, y := d.mem.floats(rows*benchWidth), d.mem.floats(rows*benchWidth)
		cfg.fill(x.v, 1)
		d.launch = func(s cuda.Stream) error { return s.Copy(y.p, x.p, int64(len(x.v))*4) }
		d.results = []array{y}
		return d.mem.upload(x)
	})
}

func rowCases(c *Config) ([]Case, error) {
	n := c.destinations()
	out := []Case{copyCase(c)}
	for _, kind := range []string{"sage_mean", "gcn_agg", "sage_mean_bwd", "gcn_agg_bwd"} {
		for _, dim := range []int64{100, 128, 256, 1024} {
			a := aggregate{kernel: kind, n: n, dim: dim, gcn: strings.HasPrefix(kind, "gcn_"),
				bwd: strings.HasSuffix(kind, "_bwd")}
			if dim == 1024 {
				if a.gcn || a.bwd {
					// The first layer of a step with wide features has an aggregate, and no
					// gradient of it.
					continue
				}
				a.n = max(1, n/4)
			}
			out = append(out, a.sized(c))
		}
	}
	edges, src := n*benchList, n*benchSrc
	transpose := aggregate{kernel: "transpose", n: n, dim: 1, bwd: true}
	return append(out, rowCase(c, Case{
		// The list of sources in, the list of destinations and its ends out: no way to sort can do
		// without these.
		Name: fmt.Sprintf("transpose:%dx%d", n, edges), Kernel: "sage_transpose",
		Bytes: float64(edges*8 + n*12 + src*4),
	}, transpose.open), columnSumCase(c, benchRows*n)), nil
}

// aggregate is a sum over neighbours, its gradient (bwd), or the transpose that the gradient needs.
type aggregate struct {
	kernel   string
	n, dim   int64 // destinations, columns
	gcn, bwd bool

	x, y, self               array
	indptr, src, ends, lists array
}

// sized returns the case of an aggregate with its work.
func (a aggregate) sized(c *Config) Case {
	edges, rows := a.n*benchList, a.n*(benchList+1)
	switch {
	// a row for each edge, the destinations' own, the gates, and the results in their place
	case a.bwd:
		rows = edges + a.n + 2*benchSrc*a.n
	case a.gcn:
		rows += a.n
	}
	return rowCase(c, Case{
		Name: fmt.Sprintf("%s:%dx%d", a.kernel, a.n, a.dim), Kernel: a.kernel,
		Flops: float64(2 * edges * a.dim), Bytes: float64(rows*a.dim*4 + edges*4 + a.n*8),
	}, a.open)
}

// open makes the arrays of an aggregate on a device. It has a copy of a for them.
func (a aggregate) open(d *rowData, cfg *Config) error {
	nSrc, edges, mem := a.n*benchSrc, a.n*benchList, &d.mem
	a.x, a.y = mem.floats(nSrc*a.dim), mem.floats(a.n*a.dim)
	if a.bwd {
		a.self = mem.floats(a.n * a.dim)
	}
	a.indptr, a.src = mem.floats(2*(a.n+1)), mem.floats(edges)
	degrees, parts := mem.floats(nSrc), mem.floats(nSrc)
	a.ends, a.lists = mem.floats(nSrc), mem.floats(edges)
	ops, err := gnn.NewOperators(mem.dev, cuda.FP32)
	if err != nil {
		return err
	}
	scratch := cuda.DevicePtr(0)
	if a.bwd {
		scratch = mem.scratch(ops.TransposeScratch(nSrc, edges))
	}
	a.draw(cfg, degrees, parts)
	if err := mem.upload(a.x, a.y, a.self, a.indptr, a.src, degrees, parts); err != nil {
		return err
	}
	p := gnn.AggregateArgs{
		Indptr: a.indptr.p, Src: a.src.p, Weights: parts.p, X: a.x.p, Out: a.y.p, NumDst: a.n,
		NumSrc: nSrc, Edges: edges, Dim: a.dim,
	}
	if a.gcn {
		p.Degrees = degrees.p
	}
	if a.bwd {
		p.X, p.Out, p.Grad, p.Self, p.TEnd, p.TDst = 0, a.x.p, a.y.p, a.self.p, a.ends.p, a.lists.p
	}
	transpose := func(s cuda.Stream) error { return ops.Transpose(s, &p, scratch) }
	if a.kernel == "transpose" {
		d.launch, d.results = transpose, []array{a.ends, a.lists}
		return nil
	}
	d.launch = func(s cuda.Stream) error { return ops.Aggregate(s, a.kernel, &p) }
	d.floor = a.floor(mem.dev)
	if !a.bwd {
		d.results = []array{a.y}
		return nil
	}
	d.results, d.inPlace = []array{a.x}, true // its values are the gates
	return mem.do(transpose)
}

// draw fills the arrays on the CPU's side.
func (a *aggregate) draw(cfg *Config, degrees, parts array) {
	cfg.fill(a.x.v, 1)
	cfg.fill(a.y.v, 4)
	cfg.fill(a.self.v, 5)
	indptr, src, deg := view64(a.indptr), view32[uint32](a.src), view32[uint32](degrees)
	for i := range indptr {
		indptr[i] = int64(i) * benchList
	}
	key := philox.Key(cfg.Seed, philox.StreamBench)
	for i := range src {
		src[i] = philox.Block(key, [4]uint32{uint32(i), 0, 2, 0xc0})[0] % uint32(len(deg))
	}
	for i := range deg {
		deg[i] = benchList + uint32(i)%16
		if !a.bwd { // forward, GCN's kernel finds each source's part of the weights
			parts.v[i] = 1 / float32(math.Sqrt(float64(float32(deg[i])+1)))
		}
	}
}

func columnSumCase(c *Config, rows int64) Case {
	return rowCase(c, Case{
		Name: fmt.Sprintf("col_sum:%dx%d", rows, benchWidth), Kernel: "col_sum",
		Flops: float64(rows * benchWidth), Bytes: float64(4 * rows * benchWidth),
	}, func(d *rowData, cfg *Config) error {
		x, y := d.mem.floats(rows*benchWidth), d.mem.floats(benchWidth)
		ops, err := gnn.NewOperators(d.mem.dev, cuda.FP32)
		if err != nil {
			return err
		}
		scratch := d.mem.scratch(ops.ColumnSumScratch(rows, benchWidth))
		cfg.fill(x.v, 1)
		d.launch = func(s cuda.Stream) error {
			return ops.ColumnSum(s, y.p, x.p, rows, benchWidth, scratch)
		}
		d.results = []array{y}
		order := inOrder(rows)
		d.floor = touch(d.mem.dev, rows, func(l simd.Level, lo, hi int64) {
			simd.ReadRows(l, x.v, benchWidth, order, int(lo), int(hi))
		})
		return d.mem.upload(x)
	})
}

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

// floor reads the rows that an aggregate or its gradient reads, in its order, and writes
// those that it writes.
func (a *aggregate) floor(dev cuda.Device) func(cuda.Stream) error {
	x, y, d, order := a.x.v, a.y.v, int(a.dim), inOrder(a.n*benchSrc)
	same, indptr := make([]uint32, len(order)), view64(a.indptr)
	if !a.bwd {
		src := view32[uint32](a.src)
		return touch(dev, a.n, func(l simd.Level, lo, hi int64) {
			simd.ReadRows(l, x, d, src, int(indptr[lo]), int(indptr[hi]))
			if a.gcn {
				simd.ReadRows(l, x, d, order, int(lo), int(hi))
			}
			overwrite(l, y[lo*a.dim:hi*a.dim], a.dim, order[:hi-lo], same[:hi-lo])
		})
	}
	own, ends, lists := a.self.v, view32[uint32](a.ends), view32[uint32](a.lists)
	if a.gcn {
		own = y
	}
	return touch(dev, int64(len(order)), func(l simd.Level, lo, hi int64) {
		from := uint32(0)
		if lo > 0 {
			from = ends[lo-1]
		}
		if lo < hi {
			simd.ReadRows(l, y, d, lists, int(from), int(ends[hi-1]))
		}
		if lo < a.n {
			simd.ReadRows(l, own, d, order, int(lo), int(min(hi, a.n)))
		}
		var empty [64]simd.RowList // each row is read and written where it is
		for i := range empty {
			empty[i].Start = 1
		}
		for ; lo < hi; lo += int64(len(empty)) {
			to := min(hi, lo+int64(len(empty)))
			rows := x[lo*a.dim : to*a.dim]
			l.SumLists(&simd.RowSum{Dim: d}, rows, 0, empty[:to-lo], rows)
		}
	})
}
