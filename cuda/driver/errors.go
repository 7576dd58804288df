package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"helios/cuda"
	"helios/internal/errs"
)

// ErrNoDriver says that the machine has no CUDA driver: Open returns it wrapped in an error that
// names the missing library.
var ErrNoDriver = errors.New("no CUDA driver")

// CallError is a call of libcuda that failed.
type CallError struct {
	Call string // the libcuda function
	Code int    // CUresult
	Name string // such as CUDA_ERROR_INVALID_VALUE
	Text string // the driver's words
}

func (e *CallError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code)
	}
	return fmt.Sprintf("%s: %s (%d): %s", e.Call, e.Name, e.Code, e.Text)
}

// LostError is the loss of a device's CUDA context: after such an error the driver refuses every
// call on it, so nothing of the device can be used any more.
type LostError struct {
	Device  string
	Cause   *CallError
	Running []string // kernels that may be the cause
}

func (e *LostError) Error() string {
	running := "no kernel was running"
	if len(e.Running) > 0 {
		running = "running: " + strings.Join(e.Running, ", ")
	}
	return fmt.Sprintf(
		"device %s: its CUDA context is lost, %v; %s; its memory is gone: close the device and start again; %s",
		e.Device, e.Cause, running, afterLoss(result(e.Cause.Code)))
}

// afterLoss names the next step after a lost context, by its CUresult (cuda.h).
func afterLoss(r result) string {
	switch r {
	case errECC:
		return "the GPU's memory has errors that it cannot correct: see \"nvidia-smi -q -d ECC\" and reset or replace the GPU"
	case errNVLink:
		return "NVLink failed: see \"nvidia-smi nvlink -e\""
	case errMPSTerminated:
		return "a client of the MPS server faulted, or the server ended: see its log, or run without it"
	case errDeviceUnavailable, errDeinitialized, errNoDevice, errSystemNotReady, errDriverMismatch:
		return "the driver let the GPU go (reset, unloaded or updated under the program): see \"nvidia-smi\" and \"dmesg | grep -i nvrm\""
	case errLaunchTimeout:
		return "the driver's watchdog ends long kernels on GPUs with a display: use another GPU, or run without the display server"
	}
	return "see \"dmesg | grep -i xid\" if it comes back"
}

// TimeoutError names a kernel that does not end. The GPU cannot be told to stop one: it runs until
// the process ends, and what it may use is not freed before.
type TimeoutError struct {
	Device, Stream string
	Kernel         string // or the kernels of a graph
	After          time.Duration
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf(
		"device %s: kernel %q on stream %q has not ended after %v; only the end of this process stops it: start again (a checkpoint is kept), and see \"nvidia-smi\" for who else uses the GPU",
		e.Device, e.Kernel, e.Stream, e.After)
}

func (e *LostError) Unwrap() error { return e.Cause }

// fatal reports whether a result means that the context is unusable from now on: cuda.h says of
// these that "the process must be terminated and relaunched" or that the context was destroyed.
func fatal(r result) bool {
	switch r {
	case errDeinitialized, errNotInitialized, errNoDevice, errInvalidDevice, errSystemNotReady,
		errDriverMismatch, errDeviceUnavailable, errECC, errNVLink, errContained, errIllegalAddress,
		errLaunchTimeout, errContextDestroyed,
		errAssert, errHardwareStack, errIllegalInstruction, errMisaligned, errAddressSpace,
		errInvalidPC, errLaunchFailed, errTensorMemory, errMPSTerminated, errUnknown:
		return true
	}
	return false
}

func callError(a api, call string, r result) *CallError {
	e := &CallError{Call: call, Code: int(r), Name: a.GetErrorName(r), Text: a.GetErrorString(r)}
	if e.Name == "" {
		e.Name = "CUresult"
	}
	return e
}

// refused is failed for a call whose result does not concern the context: where the kernel module
// does not map I/O memory, the driver answers with whatever came of it, CUDA_ERROR_UNKNOWN among
// others, and everything else goes on. The context itself tells: a lost one answers each query of a
// stream with its error (cuStreamQuery). It runs within enter.
func (d *Device) refused(call string, r result) error {
	e := callError(d.api, call, r)
	if q := d.api.StreamQuery(0); q != success && q != errNotReady && fatal(q) {
		return d.failed("cuStreamQuery", q)
	}
	return e
}

// unregistered is failed for a registration of the CPU's memory.
func (d *Device) unregistered(r result) error {
	err := d.failed("cuMemHostRegister_v2", r)
	if r == errNotSupported && d.lost.Load() == nil {
		return errs.With(errs.Capability,
			errs.Errorf("%w (%w)", errConfidential("device "+d.info.Name), err))
	}
	return err
}

// littleBytes is an estimate of what a call needs that is no allocation of ours.
const littleBytes = 64 << 20

// failed makes an error of a result that is not success, and notes when it means that the
// context is lost.
func (d *Device) failed(call string, r result) error {
	if l := d.lost.Load(); l != nil {
		return errs.With(errs.Device, l)
	}
	e := callError(d.api, call, r)
	if r == errOutOfMemory {
		// Also what only needs a little, such as a stream or a graph: the caller can give memory
		// back and try again. The driver does not say how much it wanted.
		free, _, ir := d.api.MemGetInfo()
		if ir != success {
			free = 0
		}
		oom := &cuda.OutOfMemoryError{Device: d.info.Name, Purpose: call, Want: littleBytes,
			Free: max(min(free, littleBytes-1), 0)}
		return errs.With(errs.Capability, fmt.Errorf("%w (%w)", oom, e))
	}
	if !fatal(r) {
		return e
	}
	return d.lose(e)
}

// lose notes that the context is lost, by that error or an earlier one.
func (d *Device) lose(e *CallError) error {
	l := &LostError{Device: d.info.Name, Cause: e}
	d.streamMu.Lock()
	for s := range d.streams {
		if k := s.running.Load(); k != nil {
			l.Running = append(l.Running, fmt.Sprintf("kernel %q on stream %q", k.name, s.opt.Name))
		}
	}
	d.streamMu.Unlock()
	slices.Sort(l.Running)
	d.lost.CompareAndSwap(nil, l)
	return errs.With(errs.Device, d.lost.Load())
}
