package ranks

import (
	"errors"
	"net"
	"slices"
	"sync"
	"time"
)

// door lets processes in that come to a listener. Strangers who say nothing keep nobody out: where
// there is no room for one more, or no file, the one that has been silent longest goes.
type door struct {
	listener net.Listener
	arrivals chan arrival
	quit     chan struct{} // nobody takes arrivals any more
	limit    int           // connections that have not said who they are

	mu     sync.Mutex
	silent []net.Conn // those that have not said who they are, in the order in which they came
}

// arrival is a rank that has come, or something else that has.
type arrival struct {
	p      *peer
	link   *proven
	h      hello
	reply  string // why it is sent away, for itself
	refuse error  // and for this rank's user
}

// serve accepts connections until the listener is closed.
func (d *door) serve(wg *sync.WaitGroup, receive func(net.Conn) (arrival, error)) {
	for {
		c, err := d.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no file is left for one more
			if !d.sendOldestAway(1) {
				time.Sleep(10 * time.Millisecond)
			}
			continue
		}
		d.sendOldestAway(d.limit)
		d.mu.Lock()
		d.silent = append(d.silent, c)
		d.mu.Unlock()
		wg.Go(func() {
			a, err := receive(c)
			if !d.takeOut(c) || err != nil {
				_ = c.Close() // no rank
				return
			}
			select {
			case d.arrivals <- a:
			case <-d.quit:
				_ = c.Close()
			}
		})
	}
}

// sendOldestAway hangs up on the connection that has been silent longest where n or more are; it
// reports whether it did.
func (d *door) sendOldestAway(n int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.silent) < n {
		return false
	}
	_ = d.silent[0].Close()
	d.silent = d.silent[1:]
	return true
}

// takeOut takes a connection off the silent ones; it reports whether it was still there.
func (d *door) takeOut(c net.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.Index(d.silent, c)
	if i >= 0 {
		d.silent = slices.Delete(d.silent, i, i+1)
	}
	return i >= 0
}
