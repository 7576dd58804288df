package serve

import (
	"encoding/binary"
	"encoding/json"
	"sync"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// maxQueued bounds the messages that wait for a client that does not read: more than its slots and
// requests can ask for unless it never reads.
const maxQueued = maxLoaders*maxSlots + 4*maxWaiting

// outbox sends a client's messages in their order, so that who has one for it need not wait for it.
// A message that the socket takes at once goes out without a change of goroutines.
type outbox struct {
	w       *wire
	mu      sync.Mutex
	wake    *sync.Cond
	queue   []letter
	sending bool // run has taken letters out of the queue
	closed  bool
	err     error // of the first message that could not be sent
}

type letter struct {
	frame []byte
	fd    int        // to send with it and to close; negative: none
	sent  chan error // nil: nobody waits
}

func newOutbox(w *wire) *outbox {
	o := &outbox{w: w}
	o.wake = sync.NewCond(&o.mu)
	return o
}

// post has a message sent, and a copy of a descriptor with it where fd is not negative.
func (o *outbox) post(m any, fd int) error { return o.put(m, fd, nil) }

// say sends a message and returns when the socket has it.
func (o *outbox) say(m any, fd int) error {
	sent := make(chan error, 1)
	if err := o.put(m, fd, sent); err != nil {
		return err
	}
	return <-sent
}

func (o *outbox) put(m any, fd int, sent chan error) (err error) {
	l := letter{fd: -1, sent: sent}
	if l.frame, err = frame(m); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.err != nil:
		return o.err
	case o.closed:
		return errGone
	case len(o.queue) >= maxQueued:
		return errs.New(errs.Usage, "protocol: the client leaves %d messages unread", maxQueued)
	}
	if fd >= 0 {
		if l.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return err
		}
	} else if len(o.queue) == 0 && !o.sending {
		n, err := o.w.sendNow(l.frame)
		if err != nil {
			o.err = err
			return err
		}
		if l.frame = l.frame[n:]; len(l.frame) == 0 {
			if sent != nil {
				sent <- nil
			}
			return nil
		}
	}
	o.queue = append(o.queue, l)
	o.wake.Signal()
	return nil
}

// run sends until close; after an error it sends nothing more, and tells failed of it.
func (o *outbox) run(failed func(error)) {
	for {
		o.mu.Lock()
		o.sending = false
		for len(o.queue) == 0 && !o.closed {
			o.wake.Wait()
		}
		all := o.queue
		o.queue = nil
		o.sending = true
		err := o.err
		o.mu.Unlock()
		if len(all) == 0 {
			return
		}
		for _, l := range all {
			if err == nil {
				if err = o.w.send(l.frame, l.fd); err != nil {
					o.mu.Lock()
					o.err = err
					o.mu.Unlock()
					failed(err)
				}
			}
			if l.fd >= 0 {
				_ = unix.Close(l.fd) // a copy
			}
			if l.sent != nil {
				l.sent <- err
			}
		}
	}
}

// close has run return once it has sent what is there.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.wake.Signal()
}

// frame returns a message as it travels.
func frame(m any) ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...), nil
}
