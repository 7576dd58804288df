package proxy

import (
	"hash/fnv"
	"math"
	"sync"
	"time"

	"helios/internal/ssdmodel"
	"helios/nvme"
)

// immediately and never are times of completions.
const (
	immediately = math.MinInt64
	never       = math.MaxInt64
)

var epoch = time.Now()

// nanotime is the clock of completions. In a bubble of testing/synctest it is the bubble's, and
// negative.
func nanotime() int64 { return int64(time.Since(epoch)) }

// played is an SSD model in wall time. All queues of a controller share it.
type played struct {
	mu     sync.Mutex
	server *ssdmodel.Server
	start  int64 // nanotime of the server's time 0
}

// play starts a model; nil plays none. The serial number decides the latencies that are drawn, so
// that SSDs of one model differ and each is the same in every run.
func play(m *ssdmodel.Model, serial string) *played {
	if m == nil {
		return nil
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(serial)) // never fails
	return &played{server: m.NewServer(h.Sum64()), start: nanotime()}
}

// arrive tells the model of a command that was fetched and returns the time of its completion.
func (p *played) arrive(opcode uint8, bytes int64) int64 {
	op := ssdmodel.Read
	switch opcode {
	case nvme.OpWrite:
		op = ssdmodel.Write
	case nvme.OpFlush:
		op = ssdmodel.Flush
	}
	p.mu.Lock()
	due := p.start + p.server.Admit(nanotime()-p.start, op, bytes)
	p.mu.Unlock()
	return due
}

// timedEntry is a completion with the time before which it is not posted. Its entry in the queue is
// reserved.
type timedEntry struct {
	entry
	due int64
	seq uint64 // of entries that are due together the first comes first
}

func (e *timedEntry) before(f *timedEntry) bool {
	return e.due < f.due || e.due == f.due && e.seq < f.seq
}

// timedHeap holds completions whose time has not come, the next one first.
type timedHeap []timedEntry

func (h *timedHeap) push(e timedEntry) {
	*h = append(*h, e)
	s := *h
	i := len(s) - 1
	for i > 0 && e.before(&s[(i-1)/2]) {
		s[i] = s[(i-1)/2]
		i = (i - 1) / 2
	}
	s[i] = e
}

func (h *timedHeap) pop() timedEntry {
	s := *h
	top, e := s[0], s[len(s)-1]
	s = s[:len(s)-1]
	*h = s
	if len(s) == 0 {
		return top
	}
	i := 0
	for {
		k := 2*i + 1
		if k >= len(s) {
			break
		}
		if k+1 < len(s) && s[k+1].before(&s[k]) {
			k++
		}
		if !s[k].before(&e) {
			break
		}
		s[i] = s[k]
		i = k
	}
	s[i] = e
	return top
}

// remove takes out the completions of a submission queue (nil: of all) and returns how many.
func (h *timedHeap) remove(q *squeue) int {
	old := *h
	*h = old[:0]
	for _, e := range old { // each goes to a place that was read already
		if q != nil && e.sq != q {
			h.push(e)
		}
	}
	return len(old) - len(*h)
}

// completeAt finishes a command whose completion queue entry is reserved, not before a time.
func (c *cqueue) completeAt(q *squeue, cid uint16, st nvme.Status, due int64) {
	e := entry{q, cid, 0, st}
	if due == immediately || due <= nanotime() {
		c.settle(e)
		return
	}
	c.timedSeq++
	c.timed.push(timedEntry{e, due, c.timedSeq})
}

// postTimed posts the completions whose time has come.
func (c *cqueue) postTimed() {
	if len(c.timed) == 0 {
		return
	}
	for now := nanotime(); len(c.timed) > 0 && c.timed[0].due <= now; {
		c.settle(c.timed.pop().entry)
	}
}

// nextDue tells when the next completion has to be posted.
func (c *cqueue) nextDue() int64 {
	if len(c.timed) == 0 || c.dead || c.bus.stopped() {
		return never
	}
	return c.timed[0].due
}
