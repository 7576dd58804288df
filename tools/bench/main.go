// Command bench measures the parts of heliosctl by themselves and checks what they computed:
// kernels, neighbour sampling, gathers and lookups.
//
//	bin/lab/bench gemm      products of matrices, beside OpenBLAS or cuBLAS and the peak
//	bin/lab/bench rows      aggregates, their gradients, sums of columns, beside a copy on a GPU
//	bin/lab/bench step      training steps, as a share of their floor
//	bin/lab/bench sample    mini-batches, which have to be equal on all devices
//	bin/lab/bench memory    gathers of cached rows, beside copies
//	bin/lab/bench cache     lookups in the static index and in dynamic tiers
//	bin/lab/bench clock     a GPU's clock; queues: kernels that run at one time; pcie: trips; start: loading
//	                        all kernels; probe: the driver's report
//
// Each row of results is a JSON object on standard output and a line of words on standard error.
// The exit code is 1 when a row failed its check.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/hostcpu"
	"helios/internal/units"
)

var measurements = map[string]func(ctx context.Context, b *bench) error{
	"gemm": benchGemm, "rows": benchRowKernels, "step": benchStep, "sample": benchSample,
	"memory": benchMemory, "cache": benchCache, "probe": benchProbe, "clock": onGPU(clockStep),
	"queues": onGPU(hardwareQueues), "start": onGPU(startTime), "pcie": onGPU(pricePCIe),
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := run(ctx, os.Args[1:]); {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || measurements[args[0]] == nil {
		fmt.Fprintln(os.Stderr, "usage: bench gemm|rows|step|sample|memory|cache|clock|queues|pcie|start|probe [FLAGS]")
		return flag.ErrHelp
	}
	b := &bench{FlagSet: flag.NewFlagSet("bench "+args[0], flag.ContinueOnError), args: args[1:]}
	if err := measurements[args[0]](ctx, b); err != nil {
		return err
	}
	if b.failed > 0 {
		return fmt.Errorf("%d rows failed their check", b.failed)
	}
	return nil
}

// bench is a call of the command: the flags that all measurements have, and the rows.
type bench struct {
	*flag.FlagSet
	args    []string
	devices []string
	workers []int
	length  time.Duration // of a row's measurement
	failed  int           // rows
}

// parse reads the flags; a measurement has added its own.
func (b *bench) parse() error {
	b.listVar(&b.devices, "device", "host", "`DEVICE[,DEVICE…]`: host, cuda or cuda:N")
	seconds := b.Float64("seconds", 1, "length of a row's measurement")
	b.intsVar(&b.workers, "workers", strconv.Itoa(hostcpu.Count()),
		"`N[,N…]` worker slots of the host device")
	if err := b.Parse(b.args); err != nil {
		return flag.ErrHelp // Parse has said why
	}
	if b.NArg() > 0 {
		return fmt.Errorf("%s: it takes no argument", b.Arg(0))
	}
	b.length = time.Duration(*seconds * float64(time.Second))
	return nil
}

// listVar adds a flag of words with commas between them.
func (b *bench) listVar(to *[]string, name, value, usage string) {
	*to = strings.Split(value, ",")
	b.Func(name, usage+" (default "+value+")", func(text string) error {
		*to = strings.Split(text, ",")
		return nil
	})
}

// intsVar adds a flag of numbers of at least 1, as units.ParseInts reads them.
func (b *bench) intsVar(to *[]int, name, value, usage string) {
	read := func(text string) (err error) {
		*to, err = units.ParseInts(text, 1)
		return err
	}
	if err := read(value); err != nil {
		panic(err)
	}
	b.Func(name, usage+" (default "+value+")", read)
}

// sizeVar adds a flag of bytes, as units.ParseBytes reads them.
func (b *bench) sizeVar(to *int64, name, value, usage string) {
	read := func(text string) (err error) {
		*to, err = units.ParseBytes(text)
		return err
	}
	if err := read(value); err != nil {
		panic(err)
	}
	b.Func(name, usage+" (default "+value+")", read)
}

// open opens the devices, the host device with each number of workers, until do fails.
func (b *bench) open(do func(dev cuda.Device) error) error {
	for _, name := range b.devices {
		slots := b.workers
		if name != "host" {
			slots = slots[:1]
		}
		for _, n := range slots {
			dev, err := openDevice(name, n)
			if err == nil {
				err = do(dev)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// each has do measure on the devices one by one.
func (b *bench) each(do func(dev cuda.Device) error) error {
	return b.open(func(dev cuda.Device) error { return errors.Join(do(dev), dev.Close()) })
}

func openDevice(name string, workers int) (cuda.Device, error) {
	number, ok := strings.CutPrefix(name, "cuda:")
	if name == "cuda" {
		number, ok = "0", true
	}
	if ok {
		index, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("-device %s: give the number of a GPU, such as cuda:0", name)
		}
		dev, err := driver.Open(driver.Options{Index: index})
		if err != nil {
			return nil, err
		}
		return dev, nil
	}
	if name != "host" {
		return nil, fmt.Errorf("-device %s: choose host, cuda or cuda:N", name)
	}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers})
	if err != nil {
		return nil, err
	}
	return dev, nil
}

// row prints a row of results, and why it failed its check; "": it passed.
func (b *bench) row(r fmt.Stringer, failure string) error {
	words := r.String()
	if failure != "" {
		b.failed++
		words += "; FAILED: " + failure
	}
	fmt.Fprintln(os.Stderr, words)
	return json.NewEncoder(os.Stdout).Encode(r)
}

// spread is the median of several measurements with their range.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf returns the spread of at least one value.
func spreadOf(v []float64) spread {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return spread{(v[(n-1)/2] + v[n/2]) / 2, v[0], v[n-1]}
}

// by returns the spread in another unit, in words.
func (s spread) by(unit float64) string {
	return fmt.Sprintf("%.3g (%.3g–%.3g)", s.Median/unit, s.Min/unit, s.Max/unit)
}

// leastTurns is the least number of turns that a measurement takes.
const leastTurns = 5

// onHost reports whether a device is the host device.
func onHost(dev cuda.Device) bool { return dev.Info().Backend == "host" }
