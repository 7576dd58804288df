package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/kernels"
	"helios/internal/testing/conformance"
)

// The measurements of the GPU, its link and its driver alone: probe, clock, queues, pcie and start.

// benchProbe prints the driver's report.
func benchProbe(_ context.Context, b *bench) error {
	if err := b.parse(); err != nil {
		return err
	}
	report, err := driver.Probe(driver.Options{})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(report)
}

// deviceRow is a line of one of them.
type deviceRow struct {
	Kind string `json:"kind"` // clock, queues, start, pcie

	// clock: the differences between the values that the device's clock takes, in nanoseconds.
	// Latencies and deadlines of kernels are no finer.
	Values   int   `json:"values,omitempty"`
	LeastNS  int64 `json:"least_ns,omitempty"`
	MedianNS int64 `json:"median_ns,omitempty"`
	MostNS   int64 `json:"most_ns,omitempty"`

	// queues: streams whose kernels ran at one time, of so many that had one, under the driver's
	// CUDA_DEVICE_MAX_CONNECTIONS.
	Streams     int    `json:"streams,omitempty"`
	AtOnce      int    `json:"at_once,omitempty"`
	Connections string `json:"connections,omitempty"`

	// start: to open the device, and to load all kernels of the binary.
	OpenMS    float64 `json:"open_ms,omitempty"`
	KernelsMS float64 `json:"kernels_ms,omitempty"`
	Kernels   int     `json:"kernels,omitempty"`
	ForcedPTX bool    `json:"forced_ptx,omitempty"`

	// pcie: what steps of the I/O kernels cost.
	Prices []price `json:"prices,omitempty"`
}

func (d deviceRow) String() string {
	switch d.Kind {
	case "clock":
		return fmt.Sprintf("steps of %d ns (%d to %d) between %d values", d.MedianNS, d.LeastNS,
			d.MostNS, d.Values)
	case "queues":
		return fmt.Sprintf("kernels of %d of %d streams ran at one time, with %s connections",
			d.AtOnce, d.Streams, d.Connections)
	case "pcie":
		var words []string
		for _, p := range d.Prices {
			words = append(words, p.String())
		}
		return strings.Join(words, "; ")
	}
	return fmt.Sprintf("device open after %.0f ms, %d kernels loaded after %.0f ms more", d.OpenMS,
		d.Kernels, d.KernelsMS)
}

// onGPU is a measurement that opens the first GPU and prints what measure finds.
func onGPU(measure func(ctx context.Context, d *driver.Device) (deviceRow, error)) func(
	context.Context, *bench) error {
	return func(ctx context.Context, b *bench) error {
		if err := b.parse(); err != nil {
			return err
		}
		began := time.Now()
		d, err := driver.Open(driver.Options{})
		if err != nil {
			return err
		}
		opened := time.Since(began)
		row, err := measure(ctx, d)
		if row.Kind == "start" {
			row.OpenMS = millis(opened)
		}
		if err := errors.Join(err, d.Close()); err != nil {
			return err
		}
		return b.row(row, "")
	}
}

func millis(d time.Duration) float64 { return math.Round(float64(d)/1e4) / 100 }

// deviceLimit bounds the wait for a measuring kernel.
const deviceLimit = 20 * time.Second

// clockStep has a kernel write down the clock's values. The first launch warms up.
func clockStep(ctx context.Context, d *driver.Device) (row deviceRow, err error) {
	ctx, cancel := context.WithTimeout(ctx, deviceLimit)
	defer cancel()
	const values = 2048
	k, err := d.Kernel("conf_clock")
	if err != nil {
		return row, err
	}
	b, err := d.Alloc(cuda.MemPinned, 8*(1+values), "clock's values")
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, b.Free()) }()
	s, err := d.NewStream(cuda.StreamOptions{Name: "clock"})
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for range 2 {
		if err := cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32},
			conformance.ClockParams{Dst: b.Ptr(), N: values, Looks: 100_000_000}); err != nil {
			return row, err
		}
		if err := s.Synchronize(ctx); err != nil {
			return row, err
		}
	}
	v := cuda.View[uint64](b.Ptr(), 1+values)
	n := int(v[0])
	if n < 3 {
		return row, fmt.Errorf("the clock took %d values", n)
	}
	var steps []int64
	for i := 2; i <= n; i++ {
		steps = append(steps, int64(v[i]-v[i-1]))
	}
	slices.Sort(steps)
	return deviceRow{Kind: "clock", Values: n, LeastNS: steps[0], MedianNS: steps[len(steps)/2],
		MostNS: steps[len(steps)-1]}, nil
}

// price is the cost of one thing, done again and again.
type price struct {
	Of string `json:"of"`
	// of one, by one thread that waits for each: the median of three rounds
	NS float64 `json:"ns,omitempty"`
	// of reads by a full GPU
	GBs float64 `json:"gb_s,omitempty"`
}

func (p price) String() string {
	if p.GBs > 0 {
		return fmt.Sprintf("%s %.2f GB/s", p.Of, p.GBs)
	}
	return fmt.Sprintf("%s %.0f ns", p.Of, p.NS)
}

// pricePCIe prices what the I/O kernels do on their way to the CPU's memory and to a doorbell, and
// the same in the device's memory.
func pricePCIe(ctx context.Context, d *driver.Device) (row deviceRow, err error) {
	ctx, cancel := context.WithTimeout(ctx, deviceLimit)
	defer cancel()
	const steps, reads, threads, region = 2000, 64, 256, 64 << 20
	blocks := 4 * d.Info().SMs
	k, err := d.Kernel("conf_price")
	if err != nil {
		return row, err
	}
	s, err := d.NewStream(cuda.StreamOptions{Name: "pcie"})
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var bufs []cuda.Buffer
	defer func() {
		for _, b := range bufs {
			err = errors.Join(err, b.Free())
		}
	}()
	alloc := func(kind cuda.MemKind, bytes int64) (b cuda.Buffer) {
		if err == nil {
			if b, err = d.Alloc(kind, bytes, "pcie"); err == nil {
				bufs = append(bufs, b)
			}
		}
		return b
	}
	pinned, there := alloc(cuda.MemPinned, region), alloc(cuda.MemDevice, region)
	out := alloc(cuda.MemPinned, 8*int64(blocks)*(2+threads))
	if err != nil {
		return row, err
	}
	// A trip goes far from the one before, to all of the region in the end.
	words := cuda.View[uint64](pinned.Ptr(), region/8)
	for i := range words {
		words[i] = (uint64(i) + 0x9e3779b1) % uint64(len(words))
	}
	if err := s.Copy(there.Ptr(), pinned.Ptr(), region); err != nil {
		return row, err
	}
	measure := func(of string, src cuda.Buffer, grid cuda.LaunchConfig,
		p conformance.PriceParams) error {
		p.Dst, p.Src = out.Ptr(), src.Ptr()
		var ns []float64
		for range 4 { // the first warms up
			if err := cuda.Launch(s, k, grid, p); err != nil {
				return err
			}
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
			v := cuda.View[uint64](out.Ptr(), 2*int64(grid.Blocks))
			begin, end := v[0], v[1]
			for b := range grid.Blocks {
				begin, end = min(begin, v[2*b]), max(end, v[2*b+1])
			}
			ns = append(ns, float64(end-begin))
		}
		slices.Sort(ns[1:])
		x := price{Of: of, NS: ns[2] / float64(p.N)}
		if p.Kind == conformance.PriceRead {
			x = price{Of: of, GBs: float64(p.N*16*threads) * float64(grid.Blocks) / max(ns[2], 1)}
		}
		row.Prices = append(row.Prices, x)
		return nil
	}
	one := cuda.LaunchConfig{Blocks: 1, Threads: 32}
	for _, m := range []struct {
		name string
		buf  cuda.Buffer
	}{{"CPU", pinned}, {"device", there}} {
		for kind, of := range []string{"a trip to %s memory", "an atomic in %s memory",
			"a store to %s memory and fence.sys", "a doorbell's store to %s memory"} {
			if err := measure(fmt.Sprintf(of, m.name), m.buf, one,
				conformance.PriceParams{N: steps, Kind: uint32(kind)}); err != nil {
				return row, err
			}
		}
		for _, width := range []uint32{32, 64, 128} {
			if err := measure(fmt.Sprintf("reads of %d bytes of %s memory", width, m.name), m.buf,
				cuda.LaunchConfig{Blocks: blocks, Threads: threads},
				conformance.PriceParams{N: reads, Kind: conformance.PriceRead,
					Width: width, Lines: region / width}); err != nil {
				return row, err
			}
		}
	}
	row.Kind = "pcie"
	return row, nil
}

const (
	queueStreams = 64 // more than any driver has hardware queues
	// A kernel that has not begun so long after the one before waits for another stream's.
	queuePatience = 300 * time.Millisecond
)

// hardwareQueues starts a kernel on each of many streams that waits until it is let go, and counts
// those that have begun when no more do. Streams that share a queue run theirs one after another.
func hardwareQueues(ctx context.Context, d *driver.Device) (row deviceRow, err error) {
	ctx, cancel := context.WithTimeout(ctx, deviceLimit)
	defer cancel()
	k, err := d.Kernel("conf_gate")
	if err != nil {
		return row, err
	}
	b, err := d.Alloc(cuda.MemPinned, 4*8, "gate")
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, b.Free()) }()
	word := func(i int) *uint64 { return &cuda.View[uint64](b.Ptr(), 4)[i] }
	var streams []cuda.Stream
	defer func() {
		atomic.StoreUint64(word(0), 1)
		for _, s := range streams {
			err = errors.Join(err, s.Close())
		}
	}()
	for i := range queueStreams {
		s, err := d.NewStream(cuda.StreamOptions{Name: fmt.Sprintf("queue %d", i)})
		if err != nil {
			return row, err
		}
		streams = append(streams, s)
	}
	p := conformance.GateParams{Gate: b.Ptr(), Arrived: b.Ptr() + 8, Left: b.Ptr() + 16,
		Late: b.Ptr() + 24, LimitNS: int64(deviceLimit / 2)}
	for _, s := range streams {
		if err := cuda.Launch(s, k, cuda.LaunchConfig{Blocks: 1, Threads: 32}, p); err != nil {
			return row, err
		}
	}
	arrived, since := uint64(0), time.Now()
	for arrived < queueStreams && time.Since(since) < queuePatience {
		if n := atomic.LoadUint64(word(1)); n != arrived {
			arrived, since = n, time.Now()
		}
		time.Sleep(time.Millisecond)
	}
	atomic.StoreUint64(word(0), 1)
	for _, s := range streams {
		if err := s.Synchronize(ctx); err != nil {
			return row, err
		}
	}
	if left := atomic.LoadUint64(word(2)); left != queueStreams || atomic.LoadUint64(word(3)) != 0 {
		return row, fmt.Errorf("%d of %d kernels were let go in time", left, queueStreams)
	}
	return deviceRow{Kind: "queues", Streams: queueStreams, AtOnce: int(arrived),
		Connections: os.Getenv("CUDA_DEVICE_MAX_CONNECTIONS")}, nil
}

// startTime loads every kernel. CUDA_CACHE_DISABLE=1 keeps the driver from remembering what it has
// compiled, and CUDA_FORCE_PTX_JIT=1 has it compile although there is machine code.
func startTime(_ context.Context, d *driver.Device) (deviceRow, error) {
	list, err := kernels.List()
	if err != nil {
		return deviceRow{}, err
	}
	began := time.Now()
	for _, k := range list {
		if _, err := d.Kernel(k.Name); err != nil {
			return deviceRow{}, err
		}
	}
	return deviceRow{Kind: "start", KernelsMS: millis(time.Since(began)), Kernels: len(list),
		ForcedPTX: os.Getenv("CUDA_FORCE_PTX_JIT") == "1"}, nil
}
