package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/hostcpu"
	"helios/internal/philox"
	"helios/internal/simd"
)

// benchRowKernels measures the kernels that memory bounds.
func benchRowKernels(ctx context.Context, b *bench) error {
	return b.measureKernels(ctx, &kernelConfig{}, func(c *kernelConfig, _ bool) ([]kernelCase,
		error) {
		return rowCases(c), nil
	})
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

// rowData is the data of a kernel over rows on one device.
type rowData struct {
	mem     buffers
	launch  func(s cuda.Stream) error
	results []array
	inPlace bool // results have drawn values before
}

// rowCase completes a case whose data open makes.
func rowCase(b kernelCase, open func(d *rowData) error) kernelCase {
	b.Open = func(dev cuda.Device) (*kernelRun, error) {
		d := &rowData{mem: buffers{dev: dev}}
		if err := open(d); err != nil {
			return nil, errors.Join(err, d.mem.close())
		}
		run := &kernelRun{Launch: d.launch, Close: d.mem.close}
		run.Check = func(ctx context.Context, s cuda.Stream) (checked, error) {
			return d.check(ctx, s, open)
		}
		return run, nil
	}
	return b
}

// again does the work once more, with nothing of before left in the results.
func (d *rowData) again(ctx context.Context, s cuda.Stream) error {
	if d.inPlace {
		fill(d.results[0].v, 1)
		if err := d.mem.move(ctx, s, true, d.results[0]); err != nil {
			return err
		}
		if err := d.launch(s); err != nil {
			return err
		}
		return d.mem.move(ctx, s, false, d.results...)
	}
	return d.mem.again(ctx, s, &kernelRun{Launch: d.launch}, d.results...)
}

// check compares every element with the kernels in plain Go: kernels over rows have equal bits on
// all devices. gnn's tests hold those against float64.
func (d *rowData) check(ctx context.Context, s cuda.Stream,
	open func(*rowData) error) (out checked, err error) {
	if err := d.again(ctx, s); err != nil {
		return out, err
	}
	host, err := cuda.NewHost(cuda.HostOptions{SMs: hostcpu.Count(), Kernels: simd.Generic})
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	plain := &rowData{mem: buffers{dev: host}}
	defer func() { err = errors.Join(err, plain.mem.close()) }()
	if err := open(plain); err != nil {
		return out, err
	}
	redo := func(s cuda.Stream) error { return plain.again(ctx, s) }
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

func copyCase(c *kernelConfig) kernelCase {
	rows := benchRows * c.rows
	return rowCase(kernelCase{
		Name: fmt.Sprintf("copy:%dx%d", rows, benchWidth), Kernel: "copy",
		Bytes: float64(2 * 4 * rows * benchWidth),
	}, func(d *rowData) error {
		x, y := d.mem.floats(rows*benchWidth), d.mem.floats(rows*benchWidth)
		fill(x.v, 1)
		d.launch = func(s cuda.Stream) error { return s.Copy(y.p, x.p, int64(len(x.v))*4) }
		d.results = []array{y}
		return d.mem.upload(x)
	})
}

func rowCases(c *kernelConfig) []kernelCase {
	n := c.rows
	out := []kernelCase{copyCase(c)}
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
			out = append(out, a.sized())
		}
	}
	edges, src := n*benchList, n*benchSrc
	transpose := aggregate{kernel: "transpose", n: n, dim: 1, bwd: true}
	return append(out, rowCase(kernelCase{
		// The list of sources in, the list of destinations and its ends out: no way to sort can do
		// without these.
		Name: fmt.Sprintf("transpose:%dx%d", n, edges), Kernel: "sage_transpose",
		Bytes: float64(edges*8 + n*12 + src*4),
	}, transpose.open), columnSumCase(benchRows*n))
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
func (a aggregate) sized() kernelCase {
	edges, rows := a.n*benchList, a.n*(benchList+1)
	switch {
	// a row for each edge, the destinations' own, the gates, and the results in their place
	case a.bwd:
		rows = edges + a.n + 2*benchSrc*a.n
	case a.gcn:
		rows += a.n
	}
	return rowCase(kernelCase{
		Name: fmt.Sprintf("%s:%dx%d", a.kernel, a.n, a.dim), Kernel: a.kernel,
		Flops: float64(2 * edges * a.dim), Bytes: float64(rows*a.dim*4 + edges*4 + a.n*8),
	}, a.open)
}

// open makes the arrays of an aggregate on a device. It has a copy of a for them.
func (a aggregate) open(d *rowData) error {
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
	a.draw(degrees, parts)
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
	if !a.bwd {
		d.results = []array{a.y}
		return nil
	}
	d.results, d.inPlace = []array{a.x}, true // its values are the gates
	return mem.do(transpose)
}

// draw fills the arrays on the CPU's side.
func (a *aggregate) draw(degrees, parts array) {
	fill(a.x.v, 1)
	fill(a.y.v, 4)
	fill(a.self.v, 5)
	indptr, src, deg := view64(a.indptr), view32[uint32](a.src), view32[uint32](degrees)
	for i := range indptr {
		indptr[i] = int64(i) * benchList
	}
	key := philox.Key(benchSeed, philox.StreamBench)
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

func columnSumCase(rows int64) kernelCase {
	return rowCase(kernelCase{
		Name: fmt.Sprintf("col_sum:%dx%d", rows, benchWidth), Kernel: "col_sum",
		Flops: float64(rows * benchWidth), Bytes: float64(4 * rows * benchWidth),
	}, func(d *rowData) error {
		x, y := d.mem.floats(rows*benchWidth), d.mem.floats(benchWidth)
		ops, err := gnn.NewOperators(d.mem.dev, cuda.FP32)
		if err != nil {
			return err
		}
		scratch := d.mem.scratch(ops.ColumnSumScratch(rows, benchWidth))
		fill(x.v, 1)
		d.launch = func(s cuda.Stream) error {
			return ops.ColumnSum(s, y.p, x.p, rows, benchWidth, scratch)
		}
		d.results = []array{y}
		return d.mem.upload(x)
	})
}
