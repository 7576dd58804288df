package metis

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// METIS sets handlers of its own for SIGABRT and SIGTERM when it begins, and again on the way: they
// jump out of a failed allocation. Afterwards it sets the old ones by signal(3), which loses their
// flags, and Go's runtime ends the process when such a handler is called. A user's SIGTERM, which
// any thread may get, would jump into a thread that isn't METIS's. So while METIS works SIGTERM is
// given back to Go within a millisecond or so, and both have their flags again when it is done. In
// that millisecond a SIGTERM still ends the process, with a trace. SIGABRT stays with METIS
// meanwhile: its own thread alone raises it.

// action is the kernel's struct sigaction, unread: it is at most 32 bytes on amd64 and arm64.
type action [8]uint64

// sigsetBytes is the kernel's sizeof(sigset_t).
const sigsetBytes = 8

func sigaction(sig unix.Signal, set, get *action) error {
	_, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(set)),
		uintptr(unsafe.Pointer(get)), sigsetBytes, 0, 0)
	if e != 0 {
		return fmt.Errorf("METIS: rt_sigaction of %v: %w", sig, e)
	}
	return nil
}

// keeper holds the handlers from before METIS.
type keeper struct {
	abort, term action
	stop        chan struct{}
	done        chan error
}

// keepSignals notes the handlers and watches for METIS's. One call of METIS at a time is the
// caller's business.
func keepSignals() (*keeper, error) {
	k := &keeper{stop: make(chan struct{}), done: make(chan error, 1)}
	if err := errors.Join(sigaction(unix.SIGABRT, nil, &k.abort),
		sigaction(unix.SIGTERM, nil, &k.term)); err != nil {
		return nil, err
	}
	go func() { k.done <- k.watch() }()
	return k, nil
}

// watch gives SIGTERM back to Go whenever METIS has taken it.
func (k *keeper) watch() error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		var now action
		if err := sigaction(unix.SIGTERM, nil, &now); err != nil {
			return err
		}
		if now != k.term {
			if err := sigaction(unix.SIGTERM, &k.term, nil); err != nil {
				return err
			}
		}
		select {
		case <-k.stop:
			return nil
		case <-tick.C:
		}
	}
}

// restore puts both handlers back as they were.
func (k *keeper) restore() error {
	close(k.stop)
	return errors.Join(<-k.done, sigaction(unix.SIGABRT, &k.abort, nil),
		sigaction(unix.SIGTERM, &k.term, nil))
}
