package driver

import (
	"fmt"
	"slices"
	"strings"

	"helios/internal/errs"
)

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

// LostError says that a device's CUDA context is gone: after such an error the driver refuses
// every call on it, so nothing of the device can be used any more.
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
	return fmt.Sprintf("device %s: its CUDA context is lost, %v; %s; its memory is gone: close the device and start again, and see \"dmesg | grep -i xid\" if it comes back",
		e.Device, e.Cause, running)
}

func (e *LostError) Unwrap() error { return e.Cause }

// fatal reports whether a result means that the context is unusable from now on: cuda.h says of
// these that "the process must be terminated and relaunched" or that the context was destroyed.
func fatal(r result) bool {
	switch r {
	case errDeinitialized, errDeviceUnavailable, errECC, errNVLink, errContained, errIllegalAddress, errLaunchTimeout, errContextDestroyed,
		errAssert, errHardwareStack, errIllegalInstruction, errMisaligned, errAddressSpace, errInvalidPC, errLaunchFailed, errTensorMemory, errMPSTerminated, errUnknown:
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

// failed makes an error of a result that is not success, and notes when it means that the
// context is lost.
func (d *Device) failed(call string, r result) error {
	if l := d.lost.Load(); l != nil {
		return errs.With(errs.Device, l)
	}
	e := callError(d.api, call, r)
	if !fatal(r) {
		return e
	}
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
