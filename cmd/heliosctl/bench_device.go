package main

import (
	"slices"
	"strings"
	"time"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/simd"
)

// kernelBenchArgs holds the options of benchmarks of kernels: devices, one after another or in
// turns, and the length of a row's measurement.
type kernelBenchArgs struct {
	outputs
	devices []string   `option:"device" common:"yes" use:"setting" default:"host" arg:"DEVICE[,DEVICE…]" usage:"DEVICE[,DEVICE…]: host, cuda or cuda:N"`
	seconds float64    `option:"seconds" common:"yes" range:"0..3600" positive:"yes" default:"1" usage:"length of a row's measurement"`
	workers int        `option:"workers" range:"0..4096" shown:"one per CPU" usage:"worker slots of the host device"`
	kernels simd.Level `option:"kernels" text:"yes" offers:"@levels" default:"auto" usage:"instructions of the host device's kernels: {@levels}; avx2 and avx512 give the same bits, generic (Go) others"`
	seed    uint64     `option:"seed" default:"1" usage:"seed of the values"`
}

// SetOption reads devices and levels of kernels.
func (a *kernelBenchArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "device":
		a.devices, err = parseList(name, text, "host, cuda or cuda:N", parseMeasured)
	case "kernels":
		a.kernels, err = simd.Parse(text)
	default:
		return false, nil
	}
	return true, err
}

// parseMeasured reads the name of a device to measure.
func parseMeasured(name string) (string, error) {
	kind, _, err := parseDevice(name)
	if err == nil && kind == "auto" {
		err = errs.New(errs.Usage,
			"{device} auto: say which devices to measure: host, cuda, or both")
	}
	return name, err
}

// refuseHostOnly refuses options of the host device, which are fields of the verb's struct, where
// only GPUs are measured.
func (a *kernelBenchArgs) refuseHostOnly(e *env, fields ...any) error {
	if f := e.given(fields...); f != "" && !slices.ContainsFunc(a.devices,
		func(d string) bool { return !strings.HasPrefix(d, "cuda") }) {
		return errs.New(errs.Usage,
			"%v is for the host device; add host to {device}, or leave it out", errs.Key(f))
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
