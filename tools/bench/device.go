package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/kernels"
	"helios/internal/testing/conformance"
)

// The measurements of the GPU and its driver alone: probe, clock, queues and start.

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
	Kind string `json:"kind"` // clock, queues, start

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
}

func (d deviceRow) String() string {
	switch d.Kind {
	case "clock":
		return fmt.Sprintf("steps of %d ns (%d to %d) between %d values", d.MedianNS, d.LeastNS,
			d.MostNS, d.Values)
	case "queues":
		return fmt.Sprintf("kernels of %d of %d streams ran at one time, with %s connections",
			d.AtOnce, d.Streams, d.Connections)
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
