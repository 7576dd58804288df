package main

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/simd"
)

// deviceArgs choose the compute device. The zero value is what a run without flags takes.
type deviceArgs struct {
	device  string
	kernels simd.Level
}

func deviceOptions() hcli.Options[deviceArgs] {
	return append(hcli.Options[deviceArgs]{hcli.Text(&cli.StringFlag{
		Name: "device", Value: "auto",
		Usage: "compute device: auto (a GPU if there is one that can, else host), host, cuda or cuda:`N`",
	}, func(a *deviceArgs) *string { return &a.device }).Checked(func(a *deviceArgs,
		_ string) error {
		_, _, err := parseDevice(a.device)
		return err
	})}, kernelsOptions()...)
}

// kernelsOptions are those of verbs that have the host device only.
func kernelsOptions() hcli.Options[deviceArgs] {
	return hcli.Options[deviceArgs]{hcli.Parsed(&cli.StringFlag{
		Name: "kernels", Value: simd.Auto.String(), Usage: "instructions of the host device's kernels: " +
			strings.Join(simd.Names(), ", ") +
			"; avx2 and avx512 give the same bits, generic (Go) others",
	}, func(a *deviceArgs) *simd.Level { return &a.kernels }, simd.Parse)}
}

// parseDevice reads auto, host, cuda or cuda:N.
func parseDevice(v string) (kind string, index int, err error) {
	switch {
	case v == "auto" || v == "host" || v == "cuda":
		return v, 0, nil
	case strings.HasPrefix(v, "cuda:"):
		n, err := strconv.ParseUint(strings.TrimPrefix(v, "cuda:"), 10, 16)
		if err != nil {
			return "", 0, errs.New(errs.Usage,
				"--device %q: what follows cuda: is the number of a GPU, such as cuda:0", v)
		}
		return "cuda", int(n), nil
	}
	return "", 0, errs.New(errs.Usage, "unknown --device %q; %s", v,
		meant(v, []string{"auto", "host", "cuda"}, "choose one of auto, host, cuda, cuda:N"))
}

// open opens the compute device that --device names. With auto a GPU that is not there or
// cannot run our kernels is no error: the verb says so and takes the host device. hostOnly is for
// verbs that take no GPU: unless empty, it says why.
//
// workers are the slots of the host device, 0 for one per CPU.
func (a *deviceArgs) open(e *env, workers int, hostOnly string) (cuda.Device, error) {
	v := cmp.Or(a.device, "auto")
	kind, index, err := parseDevice(v)
	if err != nil {
		return nil, err
	}
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
			if err := a.refuseKernels(e, kind, v); err != nil {
				return nil, errors.Join(err, dev.Close())
			}
			if kind == "auto" {
				e.ui.Note("device: %s", dev.Info().Name)
			}
			return dev, nil
		case kind == "cuda":
			return nil, errs.With(errs.ClassOf(err), &deviceError{v, err})
		case errs.ClassOf(err) != errs.Capability:
			return nil, err
		}
		e.note(hostInstead(err))
	}
	return openHost(workers, a.kernels)
}

// ringsDoorbells tells whether a device's kernels ring doorbells by writing them: they cannot call
// the software controller that serves them, which must look.
func ringsDoorbells(dev cuda.Device) bool { return dev.Info().Backend != "host" }

// hostInstead says why auto takes the host device. A machine without a driver is the usual case and
// needs no explanation before every run; a GPU that cannot be used does.
func hostInstead(err error) string {
	if errors.Is(err, driver.ErrNoDriver) {
		return "device: host (no GPU; see heliosctl doctor)"
	}
	return fmt.Sprintf("device: host (no usable GPU: %v)", err)
}

// refuseKernels refuses --kernels, which means nothing on a GPU, where a GPU was asked for, and
// tells of it where auto took the GPU.
func (a *deviceArgs) refuseKernels(e *env, kind, device string) error {
	if e.given(&a.kernels) == "" {
		return nil
	}
	if kind == "auto" {
		e.ui.Note("--kernels %s has no effect: it is for the host device", a.kernels)
		return nil
	}
	return errs.New(errs.Usage,
		"--kernels %s is for the host device, and --device is %s; leave it out",
		a.kernels, device)
}

// deviceError tells why a device that was asked for could not be opened.
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
