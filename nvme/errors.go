package nvme

import (
	"errors"
	"fmt"
	"time"

	"helios/internal/errs"
)

// Sentinels that errors.Is finds in the typed errors of this package.
var (
	// ErrTimeout: a command or a register did not answer in time.
	ErrTimeout = errors.New("timed out")
	// ErrFatal: the controller reports a fatal status (CSTS.CFS); only Reset may help.
	ErrFatal = errors.New("controller fatal status")
	// ErrProtocol: the controller answered something that the specification does not allow.
	ErrProtocol = errors.New("protocol violation")
	// ErrClosed: the controller was closed.
	ErrClosed = errors.New("controller is closed")
	// ErrReset: a reset of the controller ended the command.
	ErrReset = errors.New("given up by a controller reset")
	// ErrTaken: another process uses the SSD by now, so the controller is not reset.
	ErrTaken = errors.New("another process uses the SSD")
	// ErrGone: the device no longer answers on its bus.
	ErrGone = errors.New("device is gone")
)

// deviceClass returns what the typed errors unwrap to: their cause, with a class for errs.ClassOf.
func deviceClass(cause error) error { return errs.With(errs.Device, cause) }

// errStatus is the cause of every StatusError.
var errStatus = deviceClass(errors.New("command failed"))

// StatusError is a command that completed with an error status. Retry only when
// !Status.DNR().
type StatusError struct {
	Bus    string // Bus.Name
	QID    uint16 // 0 = admin queue
	CID    uint16
	Op     string // "read", "identify controller", …
	LBA    LBA    // of I/O commands
	Blocks uint32 // 0: not an I/O command with a range
	Status Status
}

// Error names the controller, queue, command, blocks, the status in words, whether a retry
// makes sense, and what to try next.
func (e *StatusError) Error() string {
	off := ""
	if e.Blocks != 0 {
		off = fmt.Sprintf(" LBA %d+%d", uint64(e.LBA), e.Blocks)
	}
	retry := "retryable"
	if e.Status.DNR() {
		retry = "not retryable"
	}
	return fmt.Sprintf("nvme %s q%d: %s%s: %s, %s; %s", e.Bus, e.QID, e.Op, off, e.Status, retry,
		e.remedy())
}

// remedy is the next thing to try. It depends on the status only.
func (e *StatusError) remedy() string {
	s := e.Status
	switch {
	case s.SCT() == SCTMedia && s.Is(StatusWriteFault):
		return `see its health with "heliosctl ssds", free space under a file-backed SSD, or replace it`
	case s.SCT() == SCTMedia:
		return fmt.Sprintf(`run "heliosctl verify --ssds %s"`, e.Bus)
	case s.Is(StatusLBAOutOfRange), s.Is(StatusCapacityExceeded):
		return `the data lies beyond the SSD's end: bind the SSD that was loaded, or run "heliosctl load" again`
	case s.Is(StatusNamespaceReadOnly), s.Is(StatusReadOnlyRange), s.Is(StatusAccessDenied):
		return "the SSD does not accept this access; bind it writable, or choose another"
	case s.Is(StatusNamespaceNotReady), s.Is(StatusCommandInterrupted), s.SCT() == SCTPath:
		return "wait and run it again"
	case s.Is(StatusAbortRequested), s.Is(StatusAbortedSQDeletion), s.Is(StatusAbortedPowerLoss):
		return "the command was given up, not refused; run it again"
	}
	return `check the SSD with "heliosctl ssds"`
}

// Unwrap gives errs.Device as the error's class.
func (e *StatusError) Unwrap() error { return errStatus }

// TimeoutError is a wait that reached its deadline.
type TimeoutError struct {
	Bus   string
	QID   uint16
	CID   uint16
	Op    string        // the command, or the controller state that was waited for
	After time.Duration // how long it was waited
	Next  string        // what to try
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("nvme %s q%d: %s: no answer in %v; %s", e.Bus, e.QID, e.Op, e.After, e.Next)
}

// Unwrap makes errors.Is(err, ErrTimeout) true.
func (e *TimeoutError) Unwrap() error { return deviceClass(ErrTimeout) }

// ProtocolError is an answer that the specification does not allow, such as the completion
// of a command that was not sent. The controller must be reset before further use.
type ProtocolError struct {
	Bus  string
	QID  uint16
	What string
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf(
		"nvme %s q%d: %s; reset the controller, and update its firmware if it happens again", e.Bus,
		e.QID, e.What)
}

// Unwrap makes errors.Is(err, ErrProtocol) true.
func (e *ProtocolError) Unwrap() error { return deviceClass(ErrProtocol) }

// FatalError is a controller that stopped: it set CSTS.CFS, left the ready state by itself,
// or vanished. Cause is ErrFatal or ErrGone.
type FatalError struct {
	Bus   string
	Op    string // what was waited for
	CSTS  CSTS
	Cause error
}

func (e *FatalError) Error() string {
	next := "reset the controller; if it does so again, replace the SSD"
	if errors.Is(e.Cause, ErrGone) {
		next = "check that the SSD is still plugged in and bound"
	}
	return fmt.Sprintf("nvme %s: %s: %v (CSTS %08Xh); %s", e.Bus, e.Op, e.Cause,
		uint32(e.CSTS), next)
}

// Unwrap makes errors.Is(err, ErrFatal) or ErrGone true.
func (e *FatalError) Unwrap() error { return deviceClass(e.Cause) }
