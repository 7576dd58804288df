package gnn

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/openblas"
	"helios/internal/philox"
	"helios/internal/simd"
)

// Benchmark is a group of kernels that "bench compute" measures.
type Benchmark struct {
	Name, About string
	Cases       func(c *BenchConfig) ([]BenchCase, error)
}

// Benchmarks are all groups.
var Benchmarks = []Benchmark{
	{"gemm", "products of matrices (--shapes)", gemmCases},
}

// BenchConfig is what cases are made for.
type BenchConfig struct {
	Seed   uint64
	Shapes []Shape
	BLAS   *openblas.Library // nil: no comparison
}

// BenchCase is one piece of work. Open makes its data on a device.
type BenchCase struct {
	Name, Kernel string
	M, N, K      int64 // of a product
	Flops, Bytes float64
	Open         func(dev cuda.Device) (*BenchRun, error)
}

// BenchRun is a case with its data.
type BenchRun struct {
	Launch func(s cuda.Stream) error
	Rival  func()         // the same work by OpenBLAS, or nil
	Check  func() Checked // after Launch, and Rival where there is one
	Close  func() error
}

// Checked is how far results are from float64 references: the largest error in the elements looked
// at, as a share of the sum of the terms' sizes.
type Checked struct {
	Elements   int     `json:"elements"`
	Error      float64 `json:"error"`
	Bound      float64 `json:"error_bound"` // what rounding alone can give
	RivalError float64 `json:"openblas_error"`
	Inexact    int     `json:"inexact"` // elements that are not the sum that the level promises, to the bit
	Where      string  `json:"-"`       // of the largest error
}

// Spread is a median with its range.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf is the spread of at least one value.
func SpreadOf(v []float64) Spread {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return Spread{(v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]}
}

func (s Spread) String() string { return fmt.Sprintf("%.2f (%.2f-%.2f)", s.Median, s.Min, s.Max) }

// BenchResult is a row of "bench compute".
type BenchResult struct {
	Case            string  `json:"case"`
	Kernel          string  `json:"kernel"`
	M               int64   `json:"m,omitempty"`
	N               int64   `json:"n,omitempty"`
	K               int64   `json:"k,omitempty"`
	Kernels         string  `json:"kernels"`
	Workers         int     `json:"workers"`
	Rounds          int     `json:"rounds"`
	RunsPerRound    int     `json:"runs_per_round"`
	Seconds         Spread  `json:"seconds_per_run"`
	CPUSeconds      Spread  `json:"cpu_seconds_per_run"`
	FLOPS           float64 `json:"flops_per_second"`
	BytesPerSecond  float64 `json:"bytes_per_second"`
	Peak            float64 `json:"peak_flops_per_second"` // measured for one worker, times workers; 0 for generic
	PeakShare       float64 `json:"peak_share"`
	OpenBLASThreads int     `json:"openblas_threads,omitempty"`
	OpenBLASFLOPS   float64 `json:"openblas_flops_per_second,omitempty"`
	Ratio           *Spread `json:"ratio,omitempty"`     // OpenBLAS's time by ours, round by round
	RatioCPU        *Spread `json:"ratio_cpu,omitempty"` // the same in CPU time, which others on the machine disturb less
	Checked
	OK bool `json:"ok"`
}

// blasSpin is how long OpenBLAS's idle threads are given to fall asleep after a product: they spin on the CPUs that
// our turn would get, those of the wheels for more than 80 ms (seen; OPENBLAS_THREAD_TIMEOUT sets it).
const blasSpin = 250 * time.Millisecond

// minRounds is how often a case and its rival take turns at least.
const minRounds = 5

// Measure runs a case for about a time, in turns with its rival, and checks what it computed.
func (b *BenchCase) Measure(ctx context.Context, dev cuda.Device, blas *openblas.Library, peak float64, d time.Duration) (r BenchResult, err error) {
	info := dev.Info()
	r = BenchResult{Case: b.Name, Kernel: b.Kernel, M: b.M, N: b.N, K: b.K, Kernels: info.Kernels, Workers: info.SMs}
	run, err := b.Open(dev)
	if err != nil {
		return r, fmt.Errorf("%s: %w", b.Name, err)
	}
	defer func() {
		if e := run.Close(); err == nil {
			err = e
		}
	}()
	s, err := dev.NewStream(cuda.StreamOptions{Name: "bench compute"})
	if err != nil {
		return r, err
	}
	defer func() {
		if e := s.Close(); err == nil {
			err = e
		}
	}()
	ours := func(n int) (wall, cpu float64, err error) {
		start, busy := time.Now(), cpuTime()
		for range n {
			if err := run.Launch(s); err != nil {
				return 0, 0, err
			}
		}
		err = s.Synchronize(ctx)
		return time.Since(start).Seconds() / float64(n), (cpuTime() - busy) / float64(n), err
	}
	theirs := func(n int) (wall, cpu float64) {
		start, busy := time.Now(), cpuTime()
		for range n {
			run.Rival()
		}
		return time.Since(start).Seconds() / float64(n), (cpuTime() - busy) / float64(n)
	}
	if run.Rival != nil {
		r.OpenBLASThreads = blas.SetThreads(info.SMs)
		theirs(1)
	}
	if _, _, err = ours(1); err != nil { // warm: pages, panels
		return r, err
	}
	one, _, err := ours(1)
	if err != nil {
		return r, err
	}
	sides := 1.0
	if run.Rival != nil {
		sides = 2
	}
	// At most a second: closing the stream, after an interrupt too, waits for what is launched.
	r.RunsPerRound = max(1, int(min(d.Seconds()/sides/20, 1)/max(one, 1e-9)))
	var wall, cpu, rival, ratio, ratioCPU []float64
	for end := time.Now().Add(d); r.Rounds < minRounds || time.Now().Before(end); r.Rounds++ {
		w, c, err := ours(r.RunsPerRound)
		if err != nil {
			return r, err
		}
		wall, cpu = append(wall, w), append(cpu, c)
		if run.Rival == nil {
			continue
		}
		rw, rc := theirs(r.RunsPerRound)
		rival, ratio, ratioCPU = append(rival, rw), append(ratio, rw/w), append(ratioCPU, rc/c)
		if r.OpenBLASThreads > 1 {
			time.Sleep(blasSpin)
		}
	}
	r.Seconds, r.CPUSeconds = SpreadOf(wall), SpreadOf(cpu)
	r.FLOPS, r.BytesPerSecond = b.Flops/r.Seconds.Median, b.Bytes/r.Seconds.Median
	if r.Peak = peak * float64(info.SMs); r.Peak > 0 {
		r.PeakShare = r.FLOPS / r.Peak
	}
	if run.Rival != nil {
		r.OpenBLASFLOPS = b.Flops / SpreadOf(rival).Median
		a, b := SpreadOf(ratio), SpreadOf(ratioCPU)
		r.Ratio, r.RatioCPU = &a, &b
	}
	r.Checked = run.Check()
	r.OK = r.Error <= r.Bound && r.RivalError <= r.Bound && r.Inexact == 0 // false for NaN too
	if !r.OK && !(r.RivalError <= r.Bound) {
		r.Where = "OpenBLAS computed something else"
	}
	return r, nil
}

// cpuTime is the CPU time of the process in seconds.
func cpuTime() float64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts); err != nil {
		return math.NaN()
	}
	return time.Duration(ts.Nano()).Seconds()
}

// Shape is a product to measure: Kind nn (C = A·B), nt (A·Bᵀ) or tn (Aᵀ·B).
type Shape struct {
	Kind    string
	M, N, K int64
}

func (s Shape) String() string { return fmt.Sprintf("%s:%dx%dx%d", s.Kind, s.M, s.N, s.K) }

// DefaultShapes are a usual product, the widths of features and classes of well-known datasets, vectors, and
// the layers of a step of GraphSAGE with 256 hidden units: forward, gradient of the inputs, gradient
// of the weights.
const DefaultShapes = "nn:4096x1024x256,nn:4096x256x1024,nn:4096x256x100,nn:4096x256x602,nn:4096x47x256,nn:4096x1x256,nn:1x1024x256,nn:1024x1024x1," +
	"nt:4096x256x47,tn:100x256x4096,tn:602x256x4096,nn:130000x256x256,nt:130000x256x256,tn:256x256x130000"

// maxShape bounds the bytes of the three matrices of a shape.
const maxShape = 8 << 30

// ParseShapes reads [KIND:]MxNxK,…
func ParseShapes(text string) ([]Shape, error) {
	var out []Shape
	for _, t := range strings.Split(text, ",") {
		s := Shape{Kind: "nn"}
		size := t
		if kind, rest, ok := strings.Cut(t, ":"); ok {
			s.Kind, size = kind, rest
		}
		dims := strings.Split(size, "x")
		bad := len(dims) != 3 || !slices.Contains([]string{"nn", "nt", "tn"}, s.Kind)
		for i, d := range dims {
			v, err := strconv.ParseInt(d, 10, 32)
			if bad = bad || err != nil || v < 1; bad {
				break
			}
			*[]*int64{&s.M, &s.N, &s.K}[i] = v
		}
		if bad {
			return nil, errs.New(errs.Usage, "--shapes: %q is no shape; give rows, columns and steps such as 4096x1024x256, with nt: or tn: before it for A·Bᵀ or Aᵀ·B", t)
		}
		if float64(s.M)*float64(s.K)+float64(s.K)*float64(s.N)+2*float64(s.M)*float64(s.N) > maxShape/4 {
			return nil, errs.New(errs.Usage, "--shapes: the matrices of %q take more than %d GiB; make it smaller", t, maxShape>>30)
		}
		out = append(out, s)
	}
	return out, nil
}

func gemmCases(c *BenchConfig) ([]BenchCase, error) {
	var out []BenchCase
	for _, s := range c.Shapes {
		m, n, k := float64(s.M), float64(s.N), float64(s.K)
		out = append(out, BenchCase{
			Name: s.String(), Kernel: "gemm_" + s.Kind, M: s.M, N: s.N, K: s.K, Flops: 2 * m * n * k, Bytes: 4 * (m*k + k*n + m*n),
			Open: func(dev cuda.Device) (*BenchRun, error) { return s.open(dev, c) },
		})
	}
	return out, nil
}

// buffers allocates for a case; close frees all.
type buffers struct {
	dev cuda.Device
	all []cuda.Buffer
	err error
}

// floats allocates n float32.
func (b *buffers) floats(n int64) []float32 {
	if b.err != nil {
		return make([]float32, n)
	}
	x, err := b.dev.Alloc(cuda.MemDevice, n*4, "bench compute")
	if err != nil {
		b.err = err
		return make([]float32, n)
	}
	b.all = append(b.all, x)
	return cuda.View[float32](x.Ptr(), n)
}

func (b *buffers) close() error {
	var err error
	for _, x := range b.all {
		if e := x.Free(); err == nil {
			err = e
		}
	}
	b.all = nil
	return err
}

// fill draws uniform values of [-1, 1).
func (c *BenchConfig) fill(v []float32, stream uint32) {
	key := philox.Key(c.Seed, philox.StreamBench)
	for i := 0; i < len(v); i += 4 {
		w := philox.Block(key, [4]uint32{uint32(i / 4), uint32(i / 4 >> 32), stream, 0xc0})
		for j := range v[i:min(i+4, len(v))] {
			v[i+j] = 2*philox.Float32(w[j]) - 1
		}
	}
}

func devicePtr(v []float32) cuda.DevicePtr {
	return cuda.DevicePtr(uintptr(unsafe.Pointer(unsafe.SliceData(v))))
}

func (s Shape) open(dev cuda.Device, cfg *BenchConfig) (*BenchRun, error) {
	mem := &buffers{dev: dev}
	a, b, c := mem.floats(s.M*s.K), mem.floats(s.K*s.N), mem.floats(s.M*s.N)
	rival := c
	if cfg.BLAS != nil {
		rival = mem.floats(s.M * s.N)
	}
	if mem.err != nil {
		_ = mem.close()
		return nil, mem.err
	}
	cfg.fill(a, 1)
	cfg.fill(b, 2)
	p := gemmParams{M: s.M, N: s.N, K: s.K, LDA: s.K, LDB: s.N, LDC: s.N, A: devicePtr(a), B: devicePtr(b), C: devicePtr(c)}
	transA, transB := s.Kind == "tn", s.Kind == "nt"
	if transA {
		p.LDA = s.M
	}
	if transB {
		p.LDB = s.K
	}
	op := opNN
	if transA {
		op = opTN
	} else if transB {
		op = opNT
	}
	m := newModel(dev)
	if err := m.findProducts(); err != nil {
		_ = mem.close()
		return nil, err
	}
	run := &BenchRun{
		Launch: func(st cuda.Stream) error { return m.gemm(&stepSink{stream: st}, op, &p, 0) },
		Close:  mem.close,
	}
	if cfg.BLAS != nil {
		run.Rival = func() {
			cfg.BLAS.Multiply(int(s.M), int(s.N), int(s.K), openblas.Matrix{Data: a, LD: int(p.LDA), Trans: transA},
				openblas.Matrix{Data: b, LD: int(p.LDB), Trans: transB}, openblas.Matrix{Data: rival, LD: int(p.LDC)})
		}
	}
	run.Check = func() Checked {
		// |error| <= K·u·Σ|a·b|, u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1),
		// to first order.
		out := Checked{Bound: float64(s.K) * 0x1p-24 * 1.001}
		key := philox.Key(cfg.Seed, philox.StreamBench)
		// All corners, and elements all over C; of few they are all.
		total := s.M * s.N
		samples := min(4000, max(64, 8_000_000/s.K))
		fused := dev.Info().Kernels != simd.Generic.String()
		for e := range min(total, samples) {
			at := e
			if total > samples {
				w := philox.Block(key, [4]uint32{uint32(e), 0, 3, 0xc0})
				at = int64(philox.Bounded(uint64(w[0])<<32|uint64(w[1]), uint64(total)))
				if e < 4 {
					at = e%2*(s.N-1) + e/2*(total-s.N)
				}
			}
			i, j := at/s.N, at%s.N
			sum, size, chain := 0.0, 0.0, float32(0)
			for q := range s.K {
				ai, bi := i*p.LDA+q, q*p.LDB+j
				if transA {
					ai = q*p.LDA + i
				}
				if transB {
					bi = j*p.LDB + q
				}
				x := float64(a[ai]) * float64(b[bi])
				sum += x
				size += math.Abs(x)
				if fused {
					chain = addRounded(x, chain)
				} else {
					chain += float32(x)
				}
			}
			if c[at] != chain {
				out.Inexact++
				out.Where = fmt.Sprintf("C[%d,%d] is %v, the sum in order of k is %v", i, j, c[at], chain)
			}
			if size == 0 { // all terms are 0, and so must the sums be
				size = 1
			}
			if d := math.Abs(float64(c[at])-sum) / size; d > out.Error || math.IsNaN(d) {
				out.Error, out.Where = d, fmt.Sprintf("C[%d,%d] is %v, expected %v", i, j, c[at], sum)
			}
			if cfg.BLAS != nil {
				out.RivalError = max(out.RivalError, math.Abs(float64(rival[at])-sum)/size) // NaN stays
			}
			out.Elements++
		}
		return out
	}
	return run, nil
}

// addRounded is x + s, rounded to float32 once: a fused multiply-add for a product x of two float32
// values, which float64 holds. The float64 sum gets an odd last bit where it is not exact (the error of
// 2Sum, Møller 1965, says so), so that rounding it again does no harm (Boldo and Melquiond, 2008).
func addRounded(x float64, s float32) float32 {
	y := float64(s)
	sum := x + y
	z := sum - x
	if e := (x - (sum - z)) + (y - z); e != 0 && math.Float64bits(sum)&1 == 0 {
		step := int64(1)
		if (e > 0) != (sum > 0) {
			step = -1
		}
		sum = math.Float64frombits(math.Float64bits(sum) + uint64(step))
	}
	return float32(sum)
}

// BenchPeak measures the most that one worker of dev can do in float32 operations a second; 0 for level generic.
func BenchPeak(dev cuda.Device) (float64, error) {
	l, err := simd.Parse(dev.Info().Kernels)
	if err != nil {
		return 0, err
	}
	return l.PeakFLOPS(), nil
}
