package mpi

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Open MPI sets handlers of its own for faults, which print a trace. Go's runtime turns faults into
// panics, on a stack of its own, and ends the process where a handler lacks that stack. So the
// handlers from before are put back once MPI has begun.

var signals = []unix.Signal{unix.SIGABRT, unix.SIGBUS, unix.SIGFPE, unix.SIGSEGV, unix.SIGTERM,
	unix.SIGINT, unix.SIGCHLD, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE}

// action is the kernel's struct sigaction, unread: it is at most 32 bytes on amd64 and arm64.
type action [8]uint64

// sigsetBytes is the kernel's sizeof(sigset_t).
const sigsetBytes = 8

func sigaction(sig unix.Signal, set, get *action) error {
	_, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(set)),
		uintptr(unsafe.Pointer(get)), sigsetBytes, 0, 0)
	if e != 0 {
		return fmt.Errorf("MPI: rt_sigaction of %v: %w", sig, e)
	}
	return nil
}

type keeper map[unix.Signal]*action

func keepSignals() (keeper, error) {
	k := keeper{}
	for _, s := range signals {
		k[s] = new(action)
		if err := sigaction(s, nil, k[s]); err != nil {
			return nil, err
		}
	}
	return k, nil
}

func (k keeper) restore() error {
	for s, a := range k {
		if err := sigaction(s, a, nil); err != nil {
			return err
		}
	}
	return nil
}
