package gnn

import (
	"fmt"
	"math"

	"helios/cuda"
	"helios/internal/philox"
)

func init() {
	Benchmarks = append(Benchmarks, Benchmark{"rows", "kernels that memory bounds: aggregates and sums of columns, beside a copy", rowCases})
}

// Shapes of the row cases: larger than the caches of most machines.
const (
	benchDst   = 1 << 16 // destinations, of
	benchList  = 5       // neighbours each, among
	benchSrc   = 1 << 18 // sources
	benchRows  = 1 << 17 // of a matrix whose columns are summed, or that is copied
	benchWidth = 256
)

func rowCases(c *BenchConfig) ([]BenchCase, error) {
	out := []BenchCase{{
		Name: fmt.Sprintf("copy:%dx%d", benchRows, benchWidth), Kernel: "copy", Bytes: 2 * 4 * benchRows * benchWidth,
		Open: func(dev cuda.Device) (*BenchRun, error) { return openCopy(dev, c) },
	}}
	for _, kind := range []string{"sage_mean", "gcn_agg"} {
		for _, dim := range []int64{100, 128, 256} {
			rows := int64(benchDst * (benchList + 1))
			if kind == "gcn_agg" {
				rows += benchDst
			}
			out = append(out, BenchCase{
				Name: fmt.Sprintf("%s:%dx%d", kind, benchDst, dim), Kernel: kind,
				Flops: float64(2 * benchDst * benchList * dim), Bytes: float64(rows*dim*4 + benchDst*(benchList*4+8)),
				Open: func(dev cuda.Device) (*BenchRun, error) { return openAggregate(dev, c, kind, dim) },
			})
		}
	}
	return append(out, BenchCase{
		Name: fmt.Sprintf("col_sum:%dx%d", benchRows, benchWidth), Kernel: "col_sum",
		Flops: benchRows * benchWidth, Bytes: 4 * benchRows * benchWidth,
		Open: func(dev cuda.Device) (*BenchRun, error) { return openColSum(dev, c) },
	}), nil
}

// openCopy is what memory gives a single stream that does nothing else.
func openCopy(dev cuda.Device, cfg *BenchConfig) (*BenchRun, error) {
	mem := &buffers{dev: dev}
	x, y := mem.floats(benchRows*benchWidth), mem.floats(benchRows*benchWidth)
	if mem.err != nil {
		_ = mem.close()
		return nil, mem.err
	}
	cfg.fill(x, 1)
	return &BenchRun{
		Launch: func(s cuda.Stream) error { return s.Copy(devicePtr(y), devicePtr(x), int64(len(x))*4) },
		Check: func() Checked {
			var out Checked
			for i := range x {
				out.add(y[i], x[i], float64(x[i]), math.Abs(float64(x[i])), "element", i)
			}
			return out
		},
		Close: mem.close,
	}, nil
}

// add holds an element against the sum in its promised order and against the float64 sum of terms of so much in all.
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
		c.Error, c.Where = d, fmt.Sprintf("%s %d is %v, expected %v", what, at, got, sum)
	}
}

func openAggregate(dev cuda.Device, cfg *BenchConfig, kind string, dim int64) (*BenchRun, error) {
	k, err := dev.Kernel(kind)
	if err != nil {
		return nil, err
	}
	gcn := kind == "gcn_agg"
	mem := &buffers{dev: dev}
	x, y := mem.floats(benchSrc*dim), mem.floats(benchDst*dim)
	ptr, list := mem.floats(2*(benchDst+1)), mem.floats(benchDst*benchList)
	deg, weights := mem.floats(benchSrc), mem.floats(benchSrc)
	if mem.err != nil {
		_ = mem.close()
		return nil, mem.err
	}
	cfg.fill(x, 1)
	indptr := cuda.View[int64](devicePtr(ptr), benchDst+1)
	src := cuda.View[uint32](devicePtr(list), benchDst*benchList)
	degrees := cuda.View[uint32](devicePtr(deg), benchSrc)
	for i := range indptr {
		indptr[i] = int64(i) * benchList
	}
	key := philox.Key(cfg.Seed, philox.StreamBench)
	for i := range src {
		src[i] = philox.Block(key, [4]uint32{uint32(i), 0, 2, 0xc0})[0] % benchSrc
	}
	for i := range degrees {
		degrees[i] = benchList + uint32(i)%16
		weights[i] = rsqrt1(degrees[i])
	}
	p := aggParams{
		Indptr: devicePtr(ptr), Src: devicePtr(list), Degrees: devicePtr(deg), Weights: devicePtr(weights), X: devicePtr(x), Out: devicePtr(y),
		NumDst: benchDst, NumSrc: benchSrc, Edges: benchDst * benchList, Dim: dim,
	}
	m := &Model{dev: dev, grid: max(1, 4*dev.Info().SMs)}
	return &BenchRun{
		Launch: func(s cuda.Stream) error { return launch(m, s, k, benchDst, 16, p) },
		Check: func() Checked {
			out := Checked{Bound: (benchList + 3) * 0x1p-24}
			w := p.weights(gcn)
			for i := int64(0); i < benchDst; i += 61 {
				for c := range dim {
					sum, size, chain := 0.0, 0.0, float32(0)
					add := func(w, x float32) {
						t := float32(w * x)
						chain += t
						sum += float64(w) * float64(x)
						size += math.Abs(float64(w) * float64(x))
					}
					if gcn {
						add(w.self(i), x[i*dim+c])
					}
					for _, j := range src[indptr[i]:indptr[i+1]] {
						add(w.dst(i)*w.src(int64(j)), x[int64(j)*dim+c])
					}
					out.add(y[i*dim+c], chain, sum, size, "element", int(i*dim+c))
				}
			}
			return out
		},
		Close: mem.close,
	}, nil
}

func openColSum(dev cuda.Device, cfg *BenchConfig) (*BenchRun, error) {
	k, err := dev.Kernel("col_sum")
	if err != nil {
		return nil, err
	}
	mem := &buffers{dev: dev}
	x, y := mem.floats(benchRows*benchWidth), mem.floats(benchWidth)
	if mem.err != nil {
		_ = mem.close()
		return nil, mem.err
	}
	cfg.fill(x, 1)
	m := &Model{dev: dev, grid: max(1, 4*dev.Info().SMs)}
	p := sumParams{X: devicePtr(x), Out: devicePtr(y), Rows: benchRows, Cols: benchWidth}
	return &BenchRun{
		Launch: func(s cuda.Stream) error { return launch(m, s, k, benchWidth, colSumPer, p) },
		Check: func() Checked {
			out := Checked{Bound: benchRows * 0x1p-24}
			for c := range benchWidth {
				sum, size, chain := 0.0, 0.0, float32(0)
				for r := range benchRows {
					v := x[r*benchWidth+c]
					chain += v
					sum += float64(v)
					size += math.Abs(float64(v))
				}
				out.add(y[c], chain, sum, size, "column", c)
			}
			return out
		},
		Close: mem.close,
	}, nil
}
