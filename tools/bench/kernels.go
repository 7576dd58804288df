package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/graph"
	"helios/internal/simd"
	"helios/internal/units"
)

// benchSeed is the seed of all that is drawn.
const benchSeed = 1

// kernelConfig holds what cases of kernels are made for.
type kernelConfig struct {
	rows       int64     // destinations of the aggregates; other matrices grow with it
	blas       *openBLAS // beside products of the host device; nil: no comparison
	vendor     cuda.BLAS // of the GPU; nil: no comparison
	precisions []cuda.Precision
	shapes     []shape
	step       stepShape
	topo       *graph.Topology // of the steps

	names        []string // of precisions; one empty name: those that are usual for a device
	openBLASPath string
	vendorPath   string // "auto": where it is installed
}

// close frees what cases have in common.
func (c *kernelConfig) close() error {
	if c.topo == nil {
		return nil
	}
	return c.topo.Close()
}

// productFlags adds the flags of measurements that multiply matrices.
func (c *kernelConfig) productFlags(b *bench) {
	b.listVar(&c.names, "precision", "",
		"`NAME[,NAME…]` of fp32, tf32, bf16; by default on a GPU all, on the host device fp32")
	b.StringVar(&c.vendorPath, "blas", "auto",
		"compare a GPU with the cuBLAS at `PATH`; off: with none, auto: where it is installed")
}

// measureKernels measures the cases of each device.
func (b *bench) measureKernels(ctx context.Context, c *kernelConfig,
	cases func(c *kernelConfig, gpu bool) ([]kernelCase, error)) (err error) {
	b.Int64Var(&c.rows, "rows", benchDst,
		"destinations of the aggregates; other matrices, and a GPU's copy, grow with it")
	if err := b.parse(); err != nil {
		return err
	}
	if c.rows < 1 || c.rows > 1<<24 {
		return fmt.Errorf("-rows %d is not between 1 and %d", c.rows, 1<<24)
	}
	if c.openBLASPath != "" {
		if c.blas, err = openOpenBLAS(c.openBLASPath); err != nil {
			return err
		}
		fmt.Fprintln(os.Stderr, c.blas.config)
	}
	return b.each(func(dev cuda.Device) (err error) {
		own := *c
		defer func() { err = errors.Join(err, own.close()) }()
		if err := own.choosePrecisions(dev); err != nil {
			return err
		}
		if err := own.openVendor(dev); err != nil {
			return err
		}
		if own.vendor != nil {
			defer func() { err = errors.Join(err, own.vendor.Close()) }()
		}
		list, err := cases(&own, !onHost(dev))
		if err != nil {
			return err
		}
		limits, err := limitsOf(ctx, dev, &own)
		if err != nil {
			return err
		}
		for i := range list {
			r, err := list[i].measure(ctx, dev, &own, limits, b.length)
			if err != nil {
				return err
			}
			failure := ""
			if !r.OK {
				failure = r.Where
			}
			if err := b.row(&r, failure); err != nil {
				return err
			}
		}
		return nil
	})
}

func (c *kernelConfig) choosePrecisions(dev cuda.Device) error {
	names := c.names
	if len(names) == 0 || names[0] == "" {
		names = cuda.Precisions()
		if onHost(dev) {
			names = names[:1]
		}
	}
	for _, name := range names {
		i := slices.Index(cuda.Precisions(), name)
		if i < 0 {
			return fmt.Errorf("-precision %s: choose among %s", name,
				strings.Join(cuda.Precisions(), ", "))
		}
		c.precisions = append(c.precisions, cuda.Precision(i))
	}
	return nil
}

// openVendor opens the cuBLAS of a GPU.
func (c *kernelConfig) openVendor(dev cuda.Device) (err error) {
	o, ok := dev.(cuda.BLASOpener)
	if !ok || c.vendorPath == "off" || c.vendorPath == "" {
		return nil
	}
	if c.vendorPath == "auto" {
		if c.vendor, err = o.OpenBLAS(""); err != nil {
			fmt.Fprintf(os.Stderr, "cuBLAS is not compared with: %v\n", err)
		}
		return nil
	}
	c.vendor, err = o.OpenBLAS(c.vendorPath)
	return err
}

// machine holds what a device can do at most.
type machine struct {
	Peak [3]float64 // operations a second by precision; 0: not known
	// bytes a second, read and written, of a copy within its memory; 0: not measured
	Copy float64
}

// kernelCase is one piece of work. Open makes its data on a device.
type kernelCase struct {
	Name, Kernel string
	M, N, K      int64 // of a product
	Precision    cuda.Precision
	Flops, Bytes float64
	// Sum: the floor is the time of Bytes and that of Flops, one after the other, as in a step of
	// many kernels; else the longer of them.
	Sum  bool
	Open func(dev cuda.Device) (*kernelRun, error)
}

// kernelRun is a case with its data.
type kernelRun struct {
	Launch func(s cuda.Stream) error
	// the same work by RivalName, or nil; one of the CPU's is done when it returns
	Rival     func(s cuda.Stream) error
	RivalName string
	// Threads gives a rival of the CPU so many threads, which may spin after their work, and
	// returns how many it has; nil: it has none of its own.
	Threads func(n int) int
	// Check does the work once more, with nothing of before left in the results, and looks at them.
	Check        func(ctx context.Context, s cuda.Stream) (checked, error)
	Flops, Bytes float64 // those of the case, where only Open knows them
	Blocks       []block
	Close        func() error
}

// block is the shape of a sampled block.
type block struct {
	Dst   int64 `json:"dst"`
	Src   int64 `json:"src"`
	Edges int64 `json:"edges"`
}

// checked holds the distance of results from references: the largest error in the elements
// compared, as a share of the sum of the terms' sizes.
type checked struct {
	Elements   int     `json:"elements"`
	Error      float64 `json:"error"`
	Bound      float64 `json:"error_bound"` // what rounding alone can give
	RivalError float64 `json:"rival_error"`
	RivalBound float64 `json:"-"`       // 0: Bound
	Inexact    int     `json:"inexact"` // elements that are not the sum that the kernel promises
	Where      string  `json:"-"`       // of the largest error
}

// kernelRow is a row of results of a kernel or a step.
type kernelRow struct {
	Case           string  `json:"case"`
	Kernel         string  `json:"kernel"`
	M              int64   `json:"m,omitempty"`
	N              int64   `json:"n,omitempty"`
	K              int64   `json:"k,omitempty"`
	Device         string  `json:"device"`
	Precision      string  `json:"precision"`
	Kernels        string  `json:"kernels"`
	Code           string  `json:"code,omitempty"` // cuda.Info.Code
	Workers        int     `json:"workers"`        // or SMs
	Rounds         int     `json:"rounds"`
	RunsPerRound   int     `json:"runs_per_round"`
	Seconds        spread  `json:"seconds_per_run"`
	CPUSeconds     spread  `json:"cpu_seconds_per_run"`
	FLOPS          float64 `json:"flops_per_second"`
	BytesPerSecond float64 `json:"bytes_per_second"`
	// host: measured for one worker, times workers; GPU: of its clock; 0: not known
	Peak      float64 `json:"peak_flops_per_second"`
	PeakShare float64 `json:"peak_share"`
	// measured, see machine; 0: not measured
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
	Ratio *spread `json:"ratio,omitempty"`
	// the same in CPU time, which others on the machine disturb less
	RatioCPU *spread `json:"ratio_cpu,omitempty"`
	Blocks   []block `json:"blocks,omitempty"` // of a step, the first layer's first
	checked
	OK bool `json:"ok"`
}

func (r *kernelRow) String() string {
	words := fmt.Sprintf("%s %s, %s, %d workers: %s", r.Case, r.Precision, r.Device, r.Workers,
		units.FormatSeconds(r.Seconds.Median))
	for _, v := range []struct {
		value float64
		form  string
	}{{r.FLOPS / 1e9, ", %.3g GFLOP/s"}, {r.BytesPerSecond / 1e9, ", %.3g GB/s"},
		{100 * r.PeakShare, ", %.0f %% of the peak"}, {100 * r.CopyShare, ", %.0f %% of a copy"},
		{100 * r.FloorShare, ", %.0f %% of the floor"}} {
		if v.value > 0 {
			words += fmt.Sprintf(v.form, v.value)
		}
	}
	if r.Ratio != nil {
		words += fmt.Sprintf("; %s's time by ours %s", r.Rival, r.Ratio.by(1))
	}
	return words
}

// blasSpin gives OpenBLAS's idle threads time to fall asleep after a product: they spin
// on the CPUs that our turn would get, those of the wheels for more than 80 ms (seen;
// OPENBLAS_THREAD_TIMEOUT sets it).
const blasSpin = 250 * time.Millisecond

// measure runs a case for about a time, in turns with its rival, and checks what it computed.
func (b *kernelCase) measure(ctx context.Context, dev cuda.Device, cfg *kernelConfig, peaks machine,
	d time.Duration) (r kernelRow, err error) {
	info := dev.Info()
	r = kernelRow{Case: b.Name, Kernel: b.Kernel, M: b.M, N: b.N, K: b.K, Device: info.Name,
		Precision: b.Precision.String(),
		Kernels:   info.Kernels, Workers: info.SMs}
	run, err := b.Open(dev)
	if err != nil {
		return r, fmt.Errorf("%s: %w", b.Name, err)
	}
	r.Code = dev.Info().Code // of loaded kernels
	defer func() { err = errors.Join(err, run.Close()) }()
	s, err := dev.NewStream(cuda.StreamOptions{Name: "bench"})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := r.warm(ctx, s, run, d); err != nil {
		return r, err
	}
	rival, err := r.takeTurns(ctx, s, run, d)
	if err != nil {
		return r, err
	}
	flops, bytes := b.Flops, b.Bytes
	r.Blocks = run.Blocks
	if run.Flops > 0 {
		flops, bytes = run.Flops, run.Bytes
	}
	r.FLOPS, r.BytesPerSecond = flops/r.Seconds.Median, bytes/r.Seconds.Median
	r.limits(flops, bytes, peaks, b)
	if rival > 0 {
		r.RivalFLOPS = flops / rival
	}
	if info.Backend != "host" {
		r.RatioCPU = nil
	}
	if r.checked, err = run.Check(ctx, s); err != nil {
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

// timed does something n times on a stream, and returns the seconds of each.
func timed(ctx context.Context, s cuda.Stream, n int, do func(cuda.Stream) error) (wall,
	cpu float64, err error) {
	start, busy := time.Now(), cpuTime()
	for range n {
		if err := do(s); err != nil {
			return 0, 0, err
		}
	}
	err = s.Synchronize(ctx)
	return time.Since(start).Seconds() / float64(n), (cpuTime() - busy) / float64(n), err
}

// warm runs both sides for the first time, which touches pages and loads modules, and decides how
// many runs a round has.
func (r *kernelRow) warm(ctx context.Context, s cuda.Stream, run *kernelRun,
	d time.Duration) error {
	sides := 1.0
	if run.Rival != nil {
		r.Rival = run.RivalName
		if run.Threads != nil {
			r.RivalThreads = run.Threads(r.Workers)
		}
		if _, _, err := timed(ctx, s, 1, run.Rival); err != nil {
			return err
		}
		sides = 2
	}
	if _, _, err := timed(ctx, s, 1, run.Launch); err != nil {
		return err
	}
	one, _, err := timed(ctx, s, 1, run.Launch)
	// At most a second: closing the stream, after an interrupt too, waits for what is launched.
	r.RunsPerRound = max(1, int(min(d.Seconds()/sides/20, 1)/max(one, 1e-9)))
	return err
}

// takeTurns measures rounds of both sides, and returns the rival's median seconds, 0 without one.
func (r *kernelRow) takeTurns(ctx context.Context, s cuda.Stream, run *kernelRun,
	d time.Duration) (float64, error) {
	var wall, cpu, rival, ratio, ratioCPU []float64
	for end := time.Now().Add(d); r.Rounds < leastTurns || time.Now().Before(end); r.Rounds++ {
		w, c, err := timed(ctx, s, r.RunsPerRound, run.Launch)
		if err != nil {
			return 0, err
		}
		wall, cpu = append(wall, w), append(cpu, c)
		if run.Rival == nil {
			continue
		}
		rw, rc, err := timed(ctx, s, r.RunsPerRound, run.Rival)
		if err != nil {
			return 0, err
		}
		rival, ratio, ratioCPU = append(rival, rw), append(ratio, rw/w), append(ratioCPU, rc/c)
		if r.RivalThreads > 1 {
			time.Sleep(blasSpin)
		}
	}
	r.Seconds, r.CPUSeconds = spreadOf(wall), spreadOf(cpu)
	if rival == nil {
		return 0, nil
	}
	a, b := spreadOf(ratio), spreadOf(ratioCPU)
	r.Ratio, r.RatioCPU = &a, &b
	return spreadOf(rival).Median, nil
}

// limits compares what was reached with what the device can do.
func (r *kernelRow) limits(flops, bytes float64, peaks machine, b *kernelCase) {
	r.Peak, r.CopyRate = peaks.Peak[b.Precision], peaks.Copy
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

// limitsOf returns the peak rates of a device. On the host device they are measured for one worker,
// times their number; a GPU's follow from its clock, and copies are measured.
func limitsOf(ctx context.Context, dev cuda.Device, cfg *kernelConfig) (m machine, err error) {
	info := dev.Info()
	if onHost(dev) {
		l, err := simd.Parse(info.Kernels)
		if err != nil {
			return m, err
		}
		m.Peak[cuda.FP32] = l.PeakFLOPS() * float64(info.SMs) // of all but products, too
		if slices.Contains(cfg.precisions, cuda.BF16) {
			m.Peak[cuda.BF16] = simd.PeakBF16(l) * float64(info.SMs)
			fmt.Fprintf(os.Stderr, "bf16 by %s\n", simd.BF16Way(l))
		}
		return m, nil
	}
	var how string
	m.Peak, how = gpuPeak(dev)
	fmt.Fprintf(os.Stderr, "%s: peak %s\n", info.Name, how)
	c := copyCase(cfg)
	r, err := c.measure(ctx, dev, cfg, m, 200*time.Millisecond)
	if err == nil && !r.OK {
		err = fmt.Errorf("device %s: a copy within its memory: %s", info.Name, r.Where)
	}
	m.Copy = r.BytesPerSecond
	return m, err
}

// gpuPeak returns what a GPU can compute in a second by its clock, and how that was found.
// Operations of an SM in a clock are those of the CUDA programming guide (throughput of native
// arithmetic instructions: lanes of float32, two operations each) and of NVIDIA's architecture
// papers (dense tensor cores, sums in float32).
func gpuPeak(dev cuda.Device) (peak [3]float64, how string) {
	d, ok := dev.(interface{ Capabilities() driver.Capabilities })
	if !ok {
		return peak, "not known"
	}
	c := d.Capabilities()
	rates := map[int][3]float64{ // fp32, tf32, bf16
		70: {128, 0, 0}, 72: {128, 0, 0}, 75: {128, 0, 0},
		80: {128, 1024, 2048}, 86: {256, 512, 1024}, 87: {256, 512, 1024}, 89: {256, 512, 1024},
		90:  {256, 2048, 4096},
		100: {256, 4096, 8192}, 103: {256, 4096, 8192}, 120: {256, 512, 1024},
	}
	rate, ok := rates[c.ComputeCapability]
	if !ok || c.ClockKHz == 0 {
		return peak, fmt.Sprintf("not known (compute capability %d.%d, clock %d kHz)",
			c.ComputeCapability/10, c.ComputeCapability%10, c.ClockKHz)
	}
	sms := dev.Info().SMs
	words := fmt.Sprintf("by %d SMs at %.0f MHz", sms, float64(c.ClockKHz)/1e3)
	for i, r := range rate {
		if peak[i] = r * float64(sms) * float64(c.ClockKHz) * 1e3; r > 0 {
			words += fmt.Sprintf(", %s %.4g TFLOP/s (%.0f in a clock)", cuda.Precision(i),
				peak[i]/1e12, r)
		}
	}
	return peak, words
}
