package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
)

// devicesFlag chooses the devices that a benchmark of kernels runs on, one after another or in turns.
func devicesFlag() cli.Flag {
	return &cli.StringFlag{Name: "device", Value: "host", Usage: "`DEVICE[,DEVICE…]`: host, cuda or cuda:N"}
}

// devices reads devicesFlag.
func (e *env) devices() ([]string, error) {
	names, err := list("device", e.c.String("device"))
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
			return nil, errs.New(errs.Usage, "--device auto: say which devices to measure: host, cuda, or both")
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

// gpuOnly says whether no device is the host device.
func gpuOnly(devices []string) bool {
	return !slices.ContainsFunc(devices, func(d string) bool { return !strings.HasPrefix(d, "cuda") })
}
