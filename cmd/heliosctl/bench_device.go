package main

import (
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/simd"
)

// kernelBenchArgs holds the options of benchmarks of kernels: devices, one after another or in
// turns, and the length of a row's measurement.
type kernelBenchArgs struct {
	outputs
	devices []string
	seconds float64
	workers int
	kernels simd.Level
	seed    uint64
}

func devicesOption() hcli.Option[kernelBenchArgs] {
	return hcli.Parsed(&cli.StringFlag{Name: "device", Value: "host",
		Usage: "`DEVICE[,DEVICE…]`: host, cuda or cuda:N"},
		func(a *kernelBenchArgs) *[]string { return &a.devices }, parseDevices).Setting()
}

func secondsOption() hcli.Option[kernelBenchArgs] {
	return hcli.Float(&cli.Float64Flag{Name: "seconds", Value: 1,
		Usage: "length of a row's measurement"},
		func(a *kernelBenchArgs) *float64 { return &a.seconds }).Checked(func(a *kernelBenchArgs,
		_ string) error {
		if !(a.seconds > 0 && a.seconds <= 3600) {
			return errs.New(errs.Usage, "--seconds %v: give a length above 0, up to 3600", a.seconds)
		}
		return nil
	})
}

// slotsOption and levelOption are of the host device.
func slotsOption() hcli.Option[kernelBenchArgs] {
	return hcli.Int(&cli.IntFlag{Name: "workers", DefaultText: "one per CPU",
		Usage: "worker slots of the host device"},
		func(a *kernelBenchArgs) *int { return &a.workers }).Checked(func(a *kernelBenchArgs,
		_ string) error {
		if a.workers < 0 || a.workers > 4096 {
			return errs.New(errs.Usage, "--workers %d is not between 1 and 4096", a.workers)
		}
		return nil
	})
}

func levelOption() hcli.Option[kernelBenchArgs] {
	o := kernelsOptions()[0].Flag.(*cli.StringFlag)
	return hcli.Parsed(o, func(a *kernelBenchArgs) *simd.Level { return &a.kernels }, simd.Parse)
}

func seedOption(usage string) hcli.Option[kernelBenchArgs] {
	return hcli.Uint64(&cli.Uint64Flag{Name: "seed", Value: 1, Usage: usage},
		func(a *kernelBenchArgs) *uint64 { return &a.seed })
}

func kernelBenchOutputs() hcli.Options[kernelBenchArgs] {
	return hcli.In(func(a *kernelBenchArgs) *outputs { return &a.outputs }, outputOptions())
}

func parseDevices(text string) ([]string, error) {
	names, err := hcli.SplitList("device", text)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, n := range names {
		kind, _, err := parseDevice(n)
		if err != nil {
			return nil, err
		}
		if kind == "auto" {
			return nil, errs.New(errs.Usage,
				"--device auto: say which devices to measure: host, cuda, or both")
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	if len(out) == 0 {
		return nil, errs.New(errs.Usage, "--device is empty; choose among host, cuda and cuda:N")
	}
	return out, nil
}

// refuseHostOnly refuses options of the host device, which are fields of the verb's struct, where
// only GPUs are measured.
func (a *kernelBenchArgs) refuseHostOnly(e *env, fields ...any) error {
	if f := e.given(fields...); f != "" && !slices.ContainsFunc(a.devices,
		func(d string) bool { return !strings.HasPrefix(d, "cuda") }) {
		return errs.New(errs.Usage,
			"--%s is for the host device; add host to --device, or leave it out", f)
	}
	return nil
}

// openGPU opens the GPU of a name that parseDevice has read.
func openGPU(name string) (cuda.Device, error) {
	_, index, err := parseDevice(name)
	if err != nil {
		return nil, err
	}
	dev, err := driver.Open(driver.Options{Index: index})
	if err != nil {
		return nil, errs.With(errs.ClassOf(err), &deviceError{name, err})
	}
	return dev, nil
}

// open opens a device, the host device as --workers and --kernels say.
func (a *kernelBenchArgs) open(name string) (cuda.Device, error) {
	if name != "host" {
		return openGPU(name)
	}
	return openHost(a.workers, a.kernels)
}

// length returns --seconds.
func (a *kernelBenchArgs) length() time.Duration {
	return time.Duration(a.seconds * float64(time.Second))
}
