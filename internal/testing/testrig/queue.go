package testrig

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"helios/nvme"
)

// Queue drives a queue pair entry by entry, as no driver would: a test sees every completion.
type Queue struct {
	ID, CQID   uint16
	Entries    int
	SQ, CQ     []byte
	SQDoorbell *uint32
	CQDoorbell *uint32
	Bus        nvme.Bus // is kicked and waited for where it can be
	Tail, Head int
	Phase      bool
}

// QueueOf drives a queue pair of a controller from its beginning.
func QueueOf(bus nvme.Bus, qp *nvme.QueuePair) *Queue {
	return &Queue{ID: qp.ID, CQID: qp.ID, Entries: qp.Entries, SQ: qp.SQ, CQ: qp.CQ,
		SQDoorbell: qp.SQDoorbell, CQDoorbell: qp.CQDoorbell, Bus: bus, Phase: true}
}

// Write puts a command into the next entry and does not ring.
func (q *Queue) Write(c nvme.Command) {
	*(*nvme.Command)(unsafe.Pointer(&q.SQ[q.Tail*nvme.CommandBytes])) = c
	q.Tail = (q.Tail + 1) % q.Entries
}

// Put writes commands and rings the doorbell once.
func (q *Queue) Put(cmds ...nvme.Command) {
	for _, c := range cmds {
		q.Write(c)
	}
	nvme.StoreDoorbell(q.SQDoorbell, uint32(q.Tail))
	if k, ok := q.Bus.(nvme.Kicker); ok {
		k.Kick(q.ID)
	}
}

// Poll takes the next completion if it is there.
func (q *Queue) Poll() (nvme.Completion, bool) {
	e, ok := nvme.LoadCompletion(
		(*nvme.Completion)(unsafe.Pointer(&q.CQ[q.Head*nvme.CompletionBytes])), q.Phase)
	if !ok {
		return e, false
	}
	if q.Head++; q.Head == q.Entries {
		q.Head, q.Phase = 0, !q.Phase
	}
	nvme.StoreDoorbell(q.CQDoorbell, uint32(q.Head))
	return e, true
}

// Get waits for the next completion, no longer than d.
func (q *Queue) Get(d time.Duration) (nvme.Completion, bool) {
	for end := time.Now().Add(d); ; {
		if e, ok := q.Poll(); ok {
			return e, true
		}
		left := time.Until(end)
		if left <= 0 {
			return nvme.Completion{}, false
		}
		if w, ok := q.Bus.(nvme.Waiter); ok {
			w.WaitCQ(q.CQID, left)
		} else {
			runtime.Gosched()
		}
	}
}

// Do sends one command and waits for its completion, which must be the next.
func (q *Queue) Do(t testing.TB, c nvme.Command) nvme.Completion {
	t.Helper()
	q.Put(c)
	e, ok := q.Get(patience)
	if !ok {
		t.Fatalf("queue %d: no completion of opcode %02xh", q.ID, c.Opcode)
	}
	if e.CID != c.CID || e.SQID != q.ID {
		t.Fatalf("completion of CID %d of queue %d, want %d of %d", e.CID, e.SQID, c.CID, q.ID)
	}
	return e
}
