// Package compute measures the kernels of a model one by one, and whole training steps: the time of
// each beside the least time that the device could take, in turns with a BLAS library, and its
// error against a float64 reference.
package compute

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/graph"
	"helios/internal/bench"
	"helios/internal/openblas"
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
	{"gemm", "products of matrices ({shapes})", false, gemmCases},
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

// Checked holds the distance of results from references: the largest error in the elements
// compared, as a share of the sum of the terms' sizes.
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

// minRounds is the least number of turns of a case and its rival.
const minRounds = 5

// Measure runs a case for about a time, in turns with its rival, and checks what it computed.
func (b *Case) Measure(ctx context.Context, dev cuda.Device, cfg *Config, peaks Machine,
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
	defer func() { err = errors.Join(err, run.Close()) }()
	s, err := dev.NewStream(cuda.StreamOptions{Name: "bench compute"})
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
	if rival > 0 && !run.Idle {
		r.RivalFLOPS = flops / rival
	}
	if info.Backend != "host" {
		r.RatioCPU = nil
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
func (r *Row) warm(ctx context.Context, s cuda.Stream, run *Run, d time.Duration) error {
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
func (r *Row) takeTurns(ctx context.Context, s cuda.Stream, run *Run, d time.Duration) (float64,
	error) {
	var wall, cpu, rival, ratio, ratioCPU []float64
	for end := time.Now().Add(d); r.Rounds < minRounds || time.Now().Before(end); r.Rounds++ {
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
	r.Seconds, r.CPUSeconds = bench.SpreadOf(wall), bench.SpreadOf(cpu)
	if rival == nil {
		return 0, nil
	}
	a, b := bench.SpreadOf(ratio), bench.SpreadOf(ratioCPU)
	r.Ratio, r.RatioCPU = &a, &b
	return bench.SpreadOf(rival).Median, nil
}

// limits compares what was reached with what the device can do.
func (r *Row) limits(flops, bytes float64, peaks Machine, b *Case) {
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

// Limits returns the peak rates of a device. On the host device they are measured for one worker,
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
