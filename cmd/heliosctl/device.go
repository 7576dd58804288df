package main

import (
	"errors"
	"runtime"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/simd"
)

// deviceFlag chooses the compute device.
func deviceFlag() cli.Flag {
	return &cli.StringFlag{
		Name: "device", Value: "auto", Usage: "compute device: auto (a GPU if there is one that can, else host), host, cuda or cuda:`N`",
		Action: func(_ *cli.Context, v string) error {
			_, _, err := parseDevice(v)
			return err
		},
	}
}

// kernelsFlag chooses the instructions of the host device's kernels.
func kernelsFlag() cli.Flag {
	return &cli.StringFlag{
		Name: "kernels", Value: "auto", Usage: "instructions of the host device's kernels: " + strings.Join(simd.Names(), ", ") + "; avx2 and avx512 give the same bits, generic (Go) others",
		Action: func(_ *cli.Context, v string) error {
			_, err := simd.Parse(v)
			return err
		},
	}
}

// parseDevice reads auto, host, cuda or cuda:N.
func parseDevice(v string) (kind string, index int, err error) {
	switch {
	case v == "auto" || v == "host" || v == "cuda":
		return v, 0, nil
	case strings.HasPrefix(v, "cuda:"):
		n, err := strconv.ParseUint(strings.TrimPrefix(v, "cuda:"), 10, 16)
		if err != nil {
			return "", 0, errs.New(errs.Usage, "--device %q: what follows cuda: is the number of a GPU, such as cuda:0", v)
		}
		return "cuda", int(n), nil
	}
	return "", 0, errs.New(errs.Usage, "unknown --device %q; %s", v, meant(v, []string{"auto", "host", "cuda"}, "choose one of auto, host, cuda, cuda:N"))
}

// openDevice opens the compute device that --device names. With auto a GPU that is not there or
// cannot run our kernels is no error: the verb says so and takes the host device. hostOnly is for verbs that take no GPU:
// unless empty, it says why.
func (e *env) openDevice(hostOnly string) (cuda.Device, error) {
	v := e.c.String("device")
	if v == "" {
		v = "auto"
	}
	kind, index, err := parseDevice(v)
	if err != nil {
		return nil, err
	}
	workers := e.c.Int("workers")
	if workers < 0 || workers > 4096 {
		return nil, errs.New(errs.Usage, "--workers %d is not between 1 and 4096", workers)
	}
	if kind == "cuda" && hostOnly != "" {
		return nil, errs.New(errs.Usage, "--device %s: %s; use --device host", v, hostOnly)
	}
	if kind != "host" && hostOnly == "" {
		dev, err := driver.Open(driver.Options{Index: index})
		switch {
		case err == nil:
			if err := e.gpuFlags(kind, v); err != nil {
				return nil, errors.Join(err, dev.Close())
			}
			// Kernels on a GPU ring doorbells by writing them, and cannot call who serves them.
			e.pollDoorbells = true
			if kind == "auto" {
				e.ui.Note("device: %s", dev.Info().Name)
			}
			return dev, nil
		case kind == "cuda":
			return nil, errs.With(errs.ClassOf(err), &deviceError{v, err})
		case errs.ClassOf(err) != errs.Capability:
			return nil, err
		}
		e.ui.Note("device: host, for a GPU cannot be used: %v", err)
	}
	level := simd.Auto
	if v := e.c.String("kernels"); v != "" {
		if level, err = simd.Parse(v); err != nil {
			return nil, err
		}
	}
	return openHost(workers, level)
}

// gpuFlags looks at flags that mean nothing on a GPU: refused where a GPU was asked for, told where auto took it.
func (e *env) gpuFlags(kind, device string) error {
	if !e.c.IsSet("kernels") {
		return nil
	}
	if kind == "auto" {
		e.ui.Note("--kernels %s has no effect: it is for the host device", e.c.String("kernels"))
		return nil
	}
	return errs.New(errs.Usage, "--kernels %s is for the host device, and --device is %s; leave it out", e.c.String("kernels"), device)
}

// deviceError is why a device that was asked for could not be opened.
type deviceError struct {
	flag string
	err  error
}

func (d *deviceError) Error() string { return "--device " + d.flag + ": " + d.err.Error() }
func (d *deviceError) Unwrap() error { return d.err }

// openHost opens the host device. workers are its SM slots; 0 is one for each CPU.
func openHost(workers int, level simd.Level) (cuda.Device, error) {
	if workers == 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers, Kernels: level})
	if err != nil {
		return nil, err
	}
	return dev, nil
}
