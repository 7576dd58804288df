package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/simd"
)

// deviceArgs choose the compute device. The zero value is what a run without flags takes.
type deviceArgs struct {
	device  string     `option:"device" common:"yes" use:"setting" offers:"auto,host,cuda" default:"auto" arg:"N" usage:"compute device: auto (a GPU if there is one that can, else host), host, cuda or cuda:N; with {replicas} also a list, cuda:0,cuda:2"`
	kernels simd.Level `option:"kernels" text:"yes" offers:"@levels" default:"auto" usage:"instructions of the host device's kernels: {@levels}; avx2 and avx512 give the same bits, generic (Go) others"`
	auto    int        // GPU that auto takes: that of this process among the ranks of its machine
}

// SetOption reads devices and levels of kernels.
func (a *deviceArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "device":
		_, _, err = parseDeviceList(text)
		return false, err
	case "kernels":
		a.kernels, err = simd.Parse(text)
		return true, err
	}
	return false, nil
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
				"{device} %q: what follows cuda: is the number of a GPU, such as cuda:0", v)
		}
		return "cuda", int(n), nil
	}
	return "", 0, errs.New(errs.Usage, "unknown {device} %q; %s", v,
		meant(v, []string{"auto", "host", "cuda"}, "choose one of auto, host, cuda, cuda:N"))
}

// parseDeviceList reads what parseDevice does, or a list of GPUs by number.
func parseDeviceList(v string) (kind string, index []int, err error) {
	list := strings.Split(v, ",")
	for _, one := range list {
		k, i, err := parseDevice(one)
		switch {
		case err != nil:
			return "", nil, err
		case len(list) > 1 && !strings.HasPrefix(one, "cuda:"):
			return "", nil, errs.New(errs.Usage,
				"{device} %q: a list names GPUs by number, such as cuda:0,cuda:2", v)
		case slices.Contains(index, i):
			return "", nil, errs.New(errs.Usage,
				"{device} %q names GPU %d twice; each replica needs one of its own", v, i)
		}
		kind, index = k, append(index, i)
	}
	return kind, index, nil
}

// takeLocal chooses the GPUs of a rank by its number among those of its machine, below 0 where that
// is not known; each has so many replicas. A GPU that was named by number is taken by all.
func (a *deviceArgs) takeLocal(local, replicas int) error {
	_, index, err := parseDeviceList(cmp.Or(a.device, "auto"))
	switch {
	case err != nil:
		return err
	case len(index) > 1 && local > 0: // one rank of a machine may have a list
		return errs.New(errs.Usage,
			"{device} %s: all ranks of this machine would take the same GPUs; leave the list out, and rank LOCAL_RANK takes {replicas} of them, one after the other",
			a.device)
	case local < 0:
		return nil
	}
	switch a.device {
	case "cuda":
		a.device = fmt.Sprintf("cuda:%d", local*max(replicas, 1))
	case "auto", "":
		a.auto = local * max(replicas, 1)
	}
	return nil
}

// openAll opens the devices of so many replicas, the first as open does. On the host device they
// share its workers.
func (a *deviceArgs) openAll(e *env, workers, replicas int) (all []cuda.Device, err error) {
	v := cmp.Or(a.device, "auto")
	kind, index, err := parseDeviceList(v)
	if err != nil {
		return nil, err
	}
	if len(index) > 1 && len(index) != replicas {
		return nil, errs.New(errs.Usage,
			"{device} %s names %d GPUs and {replicas} is %d; give as many of one as of the other", v,
			len(index), replicas)
	}
	if kind == "auto" {
		index[0] = a.auto
	}
	defer func() {
		if err != nil {
			for _, dev := range all {
				err = errors.Join(err, dev.Close())
			}
			all = nil
		}
	}()
	share := cmp.Or(workers, hostcpu.Count())
	if len(index) > 1 {
		v = fmt.Sprintf("cuda:%d", index[0])
	}
	one := workers
	if replicas > 1 {
		one = max(share/replicas, 1)
	}
	dev, err := a.openNamed(e, v, one, "")
	if err != nil {
		return nil, err
	}
	all = append(all, dev)
	host := dev.Info().Backend == "host"
	if host && replicas > share {
		return all, errs.New(errs.Usage,
			"{replicas} %d: the host device has %d workers, and each replica needs one of its own; give {workers} %d, or fewer replicas",
			replicas, share, replicas)
	}
	for i := 1; i < replicas; i++ {
		if host {
			dev, err = openHost((i+1)*share/replicas-i*share/replicas, a.kernels)
		} else {
			number := index[0] + i
			if len(index) > 1 {
				number = index[i]
			}
			var gpu *driver.Device
			if gpu, err = driver.Open(driver.Options{Index: number}); err == nil {
				dev = gpu
			}
		}
		if err != nil {
			return all, errs.Errorf("{replicas} %d, device %s: %w; give fewer replicas, or name the GPUs with {device} cuda:N,cuda:M",
				replicas, kind, err)
		}
		all = append(all, dev)
	}
	e.took(all...)
	return all, nil
}

// took keeps the names of devices for the results.
func (e *env) took(all ...cuda.Device) {
	for _, d := range all {
		e.tookDevices = append(e.tookDevices, d.Info().Name)
	}
}

// open opens the compute device that --device names. With auto a GPU that is not there or
// cannot run our kernels is no error: the verb says so and takes the host device. hostOnly is for
// verbs that take no GPU: unless empty, it is the reason.
//
// workers are the slots of the host device, 0 for one per CPU.
func (a *deviceArgs) open(e *env, workers int, hostOnly string) (cuda.Device, error) {
	dev, err := a.openNamed(e, cmp.Or(a.device, "auto"), workers, hostOnly)
	if err == nil {
		e.took(dev)
	}
	return dev, err
}

// openNamed is open for a device of a name.
func (a *deviceArgs) openNamed(e *env, v string, workers int, hostOnly string) (cuda.Device,
	error) {
	kind, index, err := parseDevice(v)
	if err != nil {
		if _, list, bad := parseDeviceList(v); bad == nil && len(list) > 1 {
			return nil, errs.New(errs.Usage,
				"{device} %s: several GPUs are for {replicas}; name one of them", v)
		}
		return nil, err
	}
	if workers < 0 || workers > 4096 {
		return nil, errs.New(errs.Usage, "{workers} %d is not between 1 and 4096", workers)
	}
	if kind == "cuda" && hostOnly != "" {
		return nil, errs.New(errs.Usage, "{device} %s: %s; use {device} host", v, hostOnly)
	}
	if kind == "auto" {
		index = a.auto
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
		case index > 0 && opens(0): // else the machine's first rank takes the host device too
			return nil, errs.Errorf(
				"{device} auto takes GPU %d, as there are other ranks on this machine, or CUDA_VISIBLE_DEVICES names it: %w; start fewer of them, or say {device} host, or {device} cuda:0 to share one",
				index, err)
		}
		e.note(hostInstead(err))
	}
	return openHost(workers, a.kernels)
}

// opens reports whether a GPU can be used.
func opens(index int) bool {
	dev, err := driver.Open(driver.Options{Index: index})
	return err == nil && dev.Close() == nil
}

// ringsDoorbells reports whether a device's kernels ring doorbells by writing them: they cannot
// call the software controller that serves them, which must look.
func ringsDoorbells(dev cuda.Device) bool { return dev.Info().Backend != "host" }

// hostInstead explains that auto takes the host device. A machine without a driver is the usual
// case and needs no explanation before every run; a GPU that cannot be used does.
func hostInstead(err error) errs.Text {
	if errors.Is(err, driver.ErrNoDriver) {
		return "device: host (no GPU; see heliosctl doctor)"
	}
	return errs.Textf("device: host (no usable GPU: %v)", err)
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
		"{kernels} %s is for the host device, and {device} is %s; leave it out",
		a.kernels, device)
}

// deviceError is the failure to open a device that was asked for.
type deviceError struct {
	flag string
	err  error
}

func (d *deviceError) Error() string { return "--device " + d.flag + ": " + d.err.Error() }
func (d *deviceError) Unwrap() error { return d.err }

// openHost opens the host device. workers are its SM slots; 0 is one for each CPU.
func openHost(workers int, level simd.Level) (cuda.Device, error) {
	if workers == 0 {
		workers = hostcpu.Count()
	}
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: workers, Kernels: level})
	if err != nil {
		return nil, err
	}
	return dev, nil
}
