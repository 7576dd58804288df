// Package compute measures the kernels of a model one by one, and whole training steps: the time of
// each beside the least time that the device could take, in turns with a BLAS library, and its
// error against a float64 reference.
package compute

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/gnn"
	"helios/graph"
	"helios/internal/bench"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/openblas"
	"helios/internal/philox"
	"helios/internal/simd"
)

// Group is a group of kernels that "bench compute" measures.
type Group struct {
	Name, About string
	GPU         bool // by default on GPUs only
	Cases       func(c *Config) ([]Case, error)
}

// Groups are all groups.
var Groups = []Group{
	{"gemm", "products of matrices (option shapes)", false, gemmCases},
}

// Config holds what cases are made for.
type Config struct {
	Seed   uint64
	Shapes []Shape
	// destinations of the aggregates, and half the rows of other matrices; 0: benchDst
	Rows   int64             `option:"rows" default:"65536" usage:"destinations of the aggregates; other matrices of that group grow with it"`
	BLAS   *openblas.Library // on the CPU, for the host device; nil: no comparison
	Vendor cuda.BLAS         // of the GPU; nil: no comparison
	// Precisions of products and steps; none: fp32.
	Precisions []cuda.Precision
	Step       StepShape `options:"in"`

	topo *graph.Topology
}

// Close frees what cases have in common.
func (c *Config) Close() error {
	if c.topo == nil {
		return nil
	}
	t := c.topo
	c.topo = nil
	return t.Close()
}

func (c *Config) precisions() []cuda.Precision {
	if len(c.Precisions) == 0 {
		return []cuda.Precision{cuda.FP32}
	}
	return c.Precisions
}

// Machine holds what a device can do at most.
type Machine struct {
	Peak [3]float64 // operations a second by precision; 0: not known
	// bytes a second, read and written, of a copy within its memory; 0: not measured
	Copy float64
}

// Case is one piece of work. Open makes its data on a device.
type Case struct {
	Name, Kernel string
	M, N, K      int64 // of a product
	Precision    cuda.Precision
	Flops, Bytes float64
	// Sum: the floor is the time of Bytes and that of Flops, one after the other, as in a step of
	// many kernels; else the longer of them.
	Sum  bool
	Open func(dev cuda.Device) (*Run, error)
}

// Run is a case with its data.
type Run struct {
	Launch func(s cuda.Stream) error
	// the same work by RivalName, or nil; one of the CPU's is done when it returns
	Rival     func(s cuda.Stream) error
	RivalName string
	Idle      bool // the rival computes nothing: it is a floor
	// Threads gives a rival of the CPU so many threads, which may spin after their work, and
	// returns how many it has; nil: it has none of its own.
	Threads func(n int) int
	// Check does the work once more, with nothing of before left in the results, and looks at them.
	Check        func(ctx context.Context, s cuda.Stream) (Checked, error)
	Flops, Bytes float64 // those of the case, where only Open knows them
	Blocks       []Block
	Close        func() error
}

// Block is the shape of a sampled block.
type Block struct {
	Dst   int64 `json:"dst"`
	Src   int64 `json:"src"`
	Edges int64 `json:"edges"`
}

// Checked tells how far results are from float64 references: the largest error in the elements
// looked at, as a share of the sum of the terms' sizes.
type Checked struct {
	Elements   int     `json:"elements"`
	Error      float64 `json:"error"`
	Bound      float64 `json:"error_bound"` // what rounding alone can give
	RivalError float64 `json:"rival_error"`
	RivalBound float64 `json:"-"`       // 0: Bound
	Inexact    int     `json:"inexact"` // elements that are not the sum that the kernel promises
	Where      string  `json:"-"`       // of the largest error
}

// Row is a row of "bench compute".
type Row struct {
	Case           string       `json:"case"`
	Kernel         string       `json:"kernel"`
	M              int64        `json:"m,omitempty"`
	N              int64        `json:"n,omitempty"`
	K              int64        `json:"k,omitempty"`
	Device         string       `json:"device"`
	Precision      string       `json:"precision"`
	Kernels        string       `json:"kernels"`
	Code           string       `json:"code,omitempty"` // cuda.Info.Code
	Workers        int          `json:"workers"`        // or SMs
	Rounds         int          `json:"rounds"`
	RunsPerRound   int          `json:"runs_per_round"`
	Seconds        bench.Spread `json:"seconds_per_run"`
	CPUSeconds     bench.Spread `json:"cpu_seconds_per_run"`
	FLOPS          float64      `json:"flops_per_second"`
	BytesPerSecond float64      `json:"bytes_per_second"`
	// host: measured for one worker, times workers; GPU: of its clock; 0: not known
	Peak      float64 `json:"peak_flops_per_second"`
	PeakShare float64 `json:"peak_share"`
	// measured, see Machine; 0: not measured
	CopyRate  float64 `json:"copy_bytes_per_second"`
	CopyShare float64 `json:"copy_share"`
	// Floor is the least time for the operations at Peak and the bytes at CopyRate, or for the
	// operations alone where CopyRate is not measured; 0: not known. FloorShare divides it by the
	// time taken.
	Floor        float64 `json:"floor_seconds"`
	FloorShare   float64 `json:"floor_share"`
	Rival        string  `json:"rival,omitempty"`
	RivalThreads int     `json:"rival_threads,omitempty"`
	RivalFLOPS   float64 `json:"rival_flops_per_second,omitempty"`
	// the rival's time by ours, round by round
	Ratio *bench.Spread `json:"ratio,omitempty"`
	// the same in CPU time, which others on the machine disturb less
	RatioCPU *bench.Spread `json:"ratio_cpu,omitempty"`
	Blocks   []Block       `json:"blocks,omitempty"` // of a step, the first layer's first
	Checked
	OK bool `json:"ok"`
}

// blasSpin gives OpenBLAS's idle threads time to fall asleep after a product: they spin
// on the CPUs that our turn would get, those of the wheels for more than 80 ms (seen;
// OPENBLAS_THREAD_TIMEOUT sets it).
const blasSpin = 250 * time.Millisecond

// minRounds is how often a case and its rival take turns at least.
const minRounds = 5

// Measure runs a case for about a time, in turns with its rival, and checks what it computed.
func (b *Case) Measure(ctx context.Context, dev cuda.Device, cfg *Config, most Machine,
	d time.Duration) (r Row, err error) {
	info := dev.Info()
	r = Row{Case: b.Name, Kernel: b.Kernel, M: b.M, N: b.N, K: b.K, Device: info.Name,
		Precision: b.Precision.String(),
		Kernels:   info.Kernels, Workers: info.SMs}
	run, err := b.Open(dev)
	if err != nil {
		return r, fmt.Errorf("%s: %w", b.Name, err)
	}
	r.Code = dev.Info().Code // of loaded kernels
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
	timed := func(n int, do func(cuda.Stream) error) (wall, cpu float64, err error) {
		start, busy := time.Now(), cpuTime()
		for range n {
			if err := do(s); err != nil {
				return 0, 0, err
			}
		}
		err = s.Synchronize(ctx)
		return time.Since(start).Seconds() / float64(n), (cpuTime() - busy) / float64(n), err
	}
	host := info.Backend == "host"
	sides := 1.0
	if run.Rival != nil {
		r.Rival = run.RivalName
		if run.Threads != nil {
			r.RivalThreads = run.Threads(info.SMs)
		}
		if _, _, err = timed(1, run.Rival); err != nil {
			return r, err
		}
		sides = 2
	}
	if _, _, err = timed(1, run.Launch); err != nil { // warm: pages, panels, modules
		return r, err
	}
	one, _, err := timed(1, run.Launch)
	if err != nil {
		return r, err
	}
	// At most a second: closing the stream, after an interrupt too, waits for what is launched.
	r.RunsPerRound = max(1, int(min(d.Seconds()/sides/20, 1)/max(one, 1e-9)))
	var wall, cpu, rival, ratio, ratioCPU []float64
	for end := time.Now().Add(d); r.Rounds < minRounds || time.Now().Before(end); r.Rounds++ {
		w, c, err := timed(r.RunsPerRound, run.Launch)
		if err != nil {
			return r, err
		}
		wall, cpu = append(wall, w), append(cpu, c)
		if run.Rival == nil {
			continue
		}
		rw, rc, err := timed(r.RunsPerRound, run.Rival)
		if err != nil {
			return r, err
		}
		rival, ratio, ratioCPU = append(rival, rw), append(ratio, rw/w), append(ratioCPU, rc/c)
		if r.RivalThreads > 1 {
			time.Sleep(blasSpin)
		}
	}
	r.Seconds, r.CPUSeconds = bench.SpreadOf(wall), bench.SpreadOf(cpu)
	flops, bytes := b.Flops, b.Bytes
	r.Blocks = run.Blocks
	if run.Flops > 0 {
		flops, bytes = run.Flops, run.Bytes
	}
	r.FLOPS, r.BytesPerSecond = flops/r.Seconds.Median, bytes/r.Seconds.Median
	r.limits(flops, bytes, most, b)
	if run.Rival != nil {
		if !run.Idle {
			r.RivalFLOPS = flops / bench.SpreadOf(rival).Median
		}
		a := bench.SpreadOf(ratio)
		if r.Ratio = &a; host {
			b := bench.SpreadOf(ratioCPU)
			r.RatioCPU = &b
		}
	}
	if r.Checked, err = run.Check(ctx, s); err != nil {
		return r, err
	}
	if r.RivalBound == 0 {
		r.RivalBound = r.Bound
	}
	r.OK = r.Error <= r.Bound && r.RivalError <= r.RivalBound && r.Inexact == 0 // false for NaN too
	if !(r.RivalError <= r.RivalBound) {
		r.Where = fmt.Sprintf("%s computed something else: its error is %.2g", run.RivalName,
			r.RivalError)
	}
	return r, nil
}

// limits compares what was reached with what the device can do.
func (r *Row) limits(flops, bytes float64, most Machine, b *Case) {
	r.Peak, r.CopyRate = most.Peak[b.Precision], most.Copy
	compute, move := 0.0, 0.0
	if r.Peak > 0 {
		r.PeakShare, compute = r.FLOPS/r.Peak, flops/r.Peak
	}
	if r.CopyRate > 0 {
		r.CopyShare, move = r.BytesPerSecond/r.CopyRate, bytes/r.CopyRate
	}
	if flops > 0 && r.Peak == 0 {
		return // the bytes alone would make a product look slow
	}
	if r.Floor = max(compute, move); b.Sum {
		r.Floor = compute + move
	}
	r.FloorShare = r.Floor / r.Seconds.Median
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

// DefaultShapes are a usual product, the widths of features and classes of well-known datasets,
// vectors, and the layers of a step of GraphSAGE with 256 hidden units: forward, gradient of the
// inputs, gradient of the weights.
const DefaultShapes = "nn:4096x1024x256,nn:4096x256x1024,nn:4096x256x100,nn:4096x256x602,nn:4096x47x256,nn:4096x1x256,nn:1x1024x256,nn:1024x1024x1," +
	"nt:4096x256x47,tn:100x256x4096,tn:602x256x4096,nn:130000x256x256,nt:130000x256x256,tn:256x256x130000"

// GPUShapes are the products of a step of GraphSAGE with a batch of 8000, fanout 25,10, 1024
// features and 256 hidden units, and usual ones.
const GPUShapes = "nn:180000x256x1024,tn:1024x256x180000,nn:8000x47x256,nt:8000x256x47,tn:256x47x8000,nn:4096x4096x4096,nn:130000x256x256,nt:130000x256x256,tn:256x256x130000,nn:4096x256x100"

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
			return nil, errs.New(errs.Usage,
				"%v: %q is no shape; give rows, columns and steps such as 4096x1024x256, with nt: or tn: before it for A·Bᵀ or Aᵀ·B",
				errs.Key("shapes"), t)
		}
		if float64(s.M)*float64(s.K)+float64(s.K)*float64(s.N)+
			2*float64(s.M)*float64(s.N) > maxShape/4 {
			return nil, errs.New(errs.Usage,
				"%v: the matrices of %q take more than %d GiB; make it smaller", errs.Key("shapes"),
				t, maxShape>>30)
		}
		out = append(out, s)
	}
	return out, nil
}

func gemmCases(c *Config) ([]Case, error) {
	var out []Case
	for _, s := range c.Shapes {
		m, n, k := float64(s.M), float64(s.N), float64(s.K)
		for _, prec := range c.precisions() {
			out = append(out, Case{
				Name: s.String(), Kernel: "gemm_" + s.Kind, M: s.M, N: s.N, K: s.K, Precision: prec,
				Flops: 2 * m * n * k, Bytes: 4 * (m*k + k*n + m*n),
				Open: func(dev cuda.Device) (*Run, error) { return s.open(dev, c, prec) },
			})
		}
	}
	return out, nil
}

// transferTimeout bounds transfers of data for checks.
const transferTimeout = 5 * time.Minute

// array is memory of a device and what the CPU sees of it: on a GPU a copy in pinned memory.
type array struct {
	v     []float32
	p     cuda.DevicePtr
	stage cuda.DevicePtr // of v; p where they are one
}

// view is the CPU's side of a as other elements of 4 bytes.
func view32[T uint32 | int32](a array) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(a.v))), len(a.v))
}

func view64(a array) []int64 {
	return unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(a.v))), len(a.v)/2)
}

// buffers allocates for a case; close frees all.
type buffers struct {
	dev cuda.Device
	all []cuda.Buffer
	err error
}

func (b *buffers) alloc(kind cuda.MemKind, bytes int64) cuda.DevicePtr {
	if b.err != nil {
		return 0
	}
	x, err := b.dev.Alloc(kind, bytes, "bench compute")
	if err != nil {
		b.err = err
		return 0
	}
	b.all = append(b.all, x)
	return x.Ptr()
}

// floats allocates n float32.
func (b *buffers) floats(n int64) array {
	a := array{p: b.alloc(cuda.MemDevice, n*4)}
	if a.stage = a.p; b.dev.Info().Backend != "host" {
		a.stage = b.alloc(cuda.MemPinned, n*4)
	}
	if b.err != nil {
		return array{v: make([]float32, n)}
	}
	if a.stage == a.p {
		a.v = cuda.View[float32](a.p, n)
	} else if mem := b.all[len(b.all)-1].Bytes(); n > 0 {
		a.v = unsafe.Slice((*float32)(unsafe.Pointer(&mem[0])), n)
	}
	return a
}

// scratch allocates memory that only kernels see; 0 bytes need none.
func (b *buffers) scratch(n int64) cuda.DevicePtr {
	if n == 0 {
		return 0
	}
	return b.alloc(cuda.MemDevice, n)
}

// move copies arrays between the CPU's side and the device's, where they are not one, and waits.
func (b *buffers) move(ctx context.Context, s cuda.Stream, toDevice bool, list ...array) error {
	for _, a := range list {
		if a.stage == a.p || len(a.v) == 0 {
			continue
		}
		dst, src := a.stage, a.p
		if toDevice {
			dst, src = src, dst
		}
		if err := s.Copy(dst, src, int64(len(a.v))*4); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	return s.Synchronize(ctx)
}

// upload is move to the device, by a stream of its own.
func (b *buffers) upload(list ...array) (err error) {
	if b.err != nil || b.dev.Info().Backend == "host" {
		return b.err
	}
	s, err := b.dev.NewStream(cuda.StreamOptions{Name: "bench data"})
	if err != nil {
		return err
	}
	err = b.move(context.Background(), s, true, list...)
	if e := s.Close(); err == nil {
		err = e
	}
	return err
}

// again spoils results, does the work once more and brings the results to the CPU.
func (b *buffers) again(ctx context.Context, s cuda.Stream, run *Run, results ...array) error {
	for _, a := range results {
		if err := s.Fill(a.p, 0xFF, int64(len(a.v))*4); err != nil { // NaN
			return err
		}
	}
	if err := s.Synchronize(ctx); err != nil { // the CPU's rival does not go through the stream
		return err
	}
	if err := run.Launch(s); err != nil {
		return err
	}
	if run.Rival != nil && !run.Idle {
		if err := run.Rival(s); err != nil {
			return err
		}
	}
	return b.move(ctx, s, false, results...)
}

// read copies bytes of the device to memory of the caller's.
func (b *buffers) read(ctx context.Context, s cuda.Stream, src cuda.DevicePtr, n int64) (_ []byte,
	err error) {
	stage, err := b.dev.Alloc(cuda.MemPinned, n, "bench compute")
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := stage.Free(); err == nil {
			err = e
		}
	}()
	if err := s.Copy(stage.Ptr(), src, n); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	if err := s.Synchronize(ctx); err != nil {
		return nil, err
	}
	return slices.Clone(stage.Bytes()[:n]), nil
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
func (c *Config) fill(v []float32, stream uint32) {
	key := philox.Key(c.Seed, philox.StreamBench)
	parts := min((len(v)+1<<20-1)>>20, hostcpu.Count())
	var wg sync.WaitGroup
	for part := range parts {
		lo, hi := len(v)*part/parts&^3, len(v)*(part+1)/parts&^3
		if part == parts-1 {
			hi = len(v)
		}
		wg.Go(func() {
			for i := lo; i < hi; i += 4 {
				w := philox.Block(key, [4]uint32{uint32(i / 4), uint32(i / 4 >> 32), stream, 0xc0})
				for j := range v[i:min(i+4, hi)] {
					v[i+j] = 2*philox.Float32(w[j]) - 1
				}
			}
		})
	}
	wg.Wait()
}

// rounded is a factor of a product as a precision takes it (PTX ISA, cvt: .rna for tf32, .rn for
// bf16).
func rounded(v float32, prec cuda.Precision) float64 {
	b := math.Float32bits(v)
	switch prec {
	case cuda.TF32:
		b = (b + 1<<12) &^ (1<<13 - 1)
	case cuda.BF16:
		b = (b + 1<<15 - 1 + b>>16&1) &^ (1<<16 - 1)
	}
	return float64(math.Float32frombits(b))
}

// unit is the largest relative error of a factor rounded to a precision.
func unit(prec cuda.Precision) float64 {
	return [...]float64{cuda.FP32: 0, cuda.TF32: 0x1p-11, cuda.BF16: 0x1p-8}[prec]
}

func (s Shape) open(dev cuda.Device, cfg *Config, prec cuda.Precision) (*Run, error) {
	mem := &buffers{dev: dev}
	a, b, c := mem.floats(s.M*s.K), mem.floats(s.K*s.N), mem.floats(s.M*s.N)
	gpu := dev.Info().Backend != "host"
	p := cuda.BLASProduct{M: s.M, N: s.N, K: s.K, LDA: s.K, LDB: s.N, LDC: s.N, A: a.p,
		B: b.p, C: c.p,
		TransA: s.Kind == "tn", TransB: s.Kind == "nt", Precision: prec}
	if p.TransA {
		p.LDA = s.M
	}
	if p.TransB {
		p.LDB = s.K
	}
	results := []array{c}
	blas := !gpu && cfg.BLAS != nil && prec == cuda.FP32
	if gpu && cfg.Vendor != nil || blas {
		results = append(results, mem.floats(s.M*s.N))
	}
	rival := results[len(results)-1]
	fail := func(err error) (*Run, error) {
		_ = mem.close()
		return nil, err
	}
	if mem.err != nil {
		return fail(mem.err)
	}
	cfg.fill(a.v, 1)
	cfg.fill(b.v, 2)
	if err := mem.upload(a, b); err != nil {
		return fail(err)
	}
	ops, err := gnn.NewOperators(dev, prec)
	if err != nil {
		return fail(err)
	}
	scratch := mem.scratch(ops.ProductScratch(&p))
	if mem.err != nil {
		return fail(mem.err)
	}
	run := &Run{
		Launch: func(st cuda.Stream) error { return ops.Multiply(st, &p, scratch) },
		Close:  mem.close,
	}
	switch {
	case gpu && cfg.Vendor != nil:
		run.RivalName = cfg.Vendor.Name()
		run.Rival = func(st cuda.Stream) error {
			q := p
			q.C = rival.p
			return cfg.Vendor.Multiply(st, &q)
		}
	case blas:
		run.RivalName, run.Threads = "OpenBLAS", cfg.BLAS.SetThreads
		run.Rival = func(cuda.Stream) error {
			cfg.BLAS.Multiply(int(s.M), int(s.N), int(s.K),
				openblas.Matrix{Data: a.v, LD: int(p.LDA), Trans: p.TransA},
				openblas.Matrix{Data: b.v, LD: int(p.LDB), Trans: p.TransB},
				openblas.Matrix{Data: rival.v, LD: int(p.LDC)})
			return nil
		}
	}
	// In fp32 kernels promise a chain of (on the host's generic level not fused) multiply-adds,
	// unless the GPU splits K.
	chained := ops.Chained(&p)
	run.Check = func(ctx context.Context, st cuda.Stream) (Checked, error) {
		if err := mem.again(ctx, st, run, results...); err != nil {
			return Checked{}, err
		}
		// |error| <= K·u·Σ|a·b|, u = 2^-24
		// (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1),
		// to first order. Tensor cores may cut sums off instead of rounding them, and a library
		// factors.
		sums := float64(s.K) * 0x1p-24 * 1.001
		out := Checked{Bound: sums}
		if prec != cuda.FP32 {
			sums = float64(s.K+8) * 0x1p-22
			out.Bound, out.RivalBound = 2.01*unit(prec)+sums, 4.02*unit(prec)+sums
		}
		key := philox.Key(cfg.Seed, philox.StreamBench)
		// All corners, and elements all over C; of few they are all.
		total := s.M * s.N
		samples := min(4000, max(64, 8_000_000/s.K))
		fused := gpu || dev.Info().Kernels != simd.Generic.String()
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
			sum, near, size, chain := 0.0, 0.0, 0.0, float32(0)
			for q := range s.K {
				ai, bi := i*p.LDA+q, q*p.LDB+j
				if p.TransA {
					ai = q*p.LDA + i
				}
				if p.TransB {
					bi = j*p.LDB + q
				}
				x := float64(a.v[ai]) * float64(b.v[bi])
				sum += x
				size += math.Abs(x)
				if fused {
					chain = addRounded(x, chain)
				} else {
					chain += float32(x)
				}
				if prec != cuda.FP32 {
					near += rounded(a.v[ai], prec) * rounded(b.v[bi], prec)
				}
			}
			got := c.v[at]
			if chained && got != chain {
				out.Inexact++
				out.Where = fmt.Sprintf("C[%d,%d] is %v, the sum in order of k is %v", i, j,
					got, chain)
			}
			if size == 0 { // all terms are 0, and so must the sums be
				size = 1
			}
			if prec != cuda.FP32 && !(math.Abs(float64(got)-near)/size <= sums) {
				out.Inexact++
				out.Where = fmt.Sprintf("C[%d,%d] is %v, the sum of the rounded factors is %v", i,
					j, got, near)
			}
			if d := math.Abs(float64(got)-sum) / size; d > out.Error || math.IsNaN(d) {
				out.Error = d
				if out.Inexact == 0 {
					out.Where = fmt.Sprintf("C[%d,%d] is %v, expected %v", i, j, got, sum)
				}
			}
			if run.Rival != nil {
				// NaN stays
				out.RivalError = max(out.RivalError, math.Abs(float64(rival.v[at])-sum)/size)
			}
			out.Elements++
		}
		return out, nil
	}
	return run, nil
}

// addRounded is x + s, rounded to float32 once: a fused multiply-add for a product x of two float32
// values, which float64 holds. The float64 sum gets an odd last bit where it is not exact (the
// error of 2Sum, Møller 1965, says so), so that rounding it again does no harm (Boldo and
// Melquiond, 2008).
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

// Limits says what a device can do at most. On the host device the peak is measured for one worker,
// times their number. On a GPU copies are measured, and peak has what its clock gives, by
// precision.
func Limits(ctx context.Context, dev cuda.Device, cfg *Config, peak [3]float64) (m Machine,
	err error) {
	info := dev.Info()
	if info.Backend == "host" {
		l, err := simd.Parse(info.Kernels)
		if err != nil {
			return m, err
		}
		m.Peak[cuda.FP32] = l.PeakFLOPS() * float64(info.SMs) // of all but products, too
		if slices.Contains(cfg.precisions(), cuda.BF16) {
			m.Peak[cuda.BF16] = simd.PeakBF16(l) * float64(info.SMs)
		}
		return m, nil
	}
	m.Peak = peak
	own := *cfg
	if meter, ok := dev.(cuda.MemoryMeter); ok {
		free, _, err := meter.FreeMemory()
		if err != nil {
			return m, err
		}
		for own.Rows = cfg.destinations(); own.Rows > 1 && int64(copyCase(&own).Bytes) > free/2; {
			own.Rows /= 2
		}
	}
	c := copyCase(&own)
	r, err := c.Measure(ctx, dev, cfg, m, 200*time.Millisecond)
	if err == nil && !r.OK {
		err = fmt.Errorf("device %s: a copy within its memory: %s", info.Name, r.Where)
	}
	m.Copy = r.BytesPerSecond
	return m, err
}
