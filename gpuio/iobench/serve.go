package iobench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/philox"
	"helios/nvme"
)

// ServeLimit holds what the CPU threads that play the SSDs can do at most.
type ServeLimit struct {
	Threads int     // that serve, as far as there are CPUs
	IOPS    float64 // of all of them
}

// serveStall bounds the time without any completion.
const serveStall = 10 * time.Second

// MeasureServe drives software SSDs with nothing beside them: each of threads goroutines, one for
// each SSD at least, fills a queue with random reads, lets the controller work in its own call, and
// takes the completions off. No kernel, no destination but a page of memory, so this is about what
// so many CPU threads can play. Depth is that of an SSD. The result's zero value is for SSDs that
// are not played by CPU threads (files behind an io_uring).
func MeasureServe(ctx context.Context, ssds []*gpuio.SSD, rowBytes, depth, threads int,
	d time.Duration) (ServeLimit, error) {
	for _, s := range ssds {
		if b, ok := s.Ctrl.Bus().(interface{ Engine() string }); !ok || b.Engine() != "memory" {
			return ServeLimit{}, nil
		}
	}
	var wg sync.WaitGroup
	var reads atomic.Int64
	var mu sync.Mutex
	var failed error
	sctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	start := time.Now()
	threads = max(threads, len(ssds))
	for i := range threads {
		s := ssds[i%len(ssds)]
		queues := (threads - i%len(ssds) + len(ssds) - 1) / len(ssds) // of this SSD
		wg.Go(func() {
			n, err := serveOne(sctx, s, uint64(i), rowBytes, max(depth/queues, 1))
			reads.Add(n)
			if err != nil {
				mu.Lock()
				failed = errors.Join(failed, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	if failed == nil {
		failed = ctx.Err()
	}
	return ServeLimit{Threads: min(threads, hostcpu.Count()),
		IOPS: float64(reads.Load()) / took.Seconds()}, failed
}

// serveOne reads one SSD until ctx ends.
func serveOne(ctx context.Context, s *gpuio.SSD, id uint64, rowBytes, depth int) (reads int64,
	err error) {
	c := s.Ctrl
	ns := c.Namespace()
	lbas := max((rowBytes+ns.LBABytes-1)/ns.LBABytes, 1)
	page := c.PageBytes()
	bytes := lbas * ns.LBABytes
	if bytes > 2*page {
		lbas = max(2*page/ns.LBABytes, 1) // no list; a larger row costs the same command
		bytes = lbas * ns.LBABytes
	}
	waiter, ok := c.Bus().(nvme.Waiter)
	if !ok {
		return 0, errs.New(errs.Capability, "nvme %s: not a software controller", c.Name())
	}
	kicker, _ := c.Bus().(nvme.Kicker)
	depth = min(depth, c.MaxQueueEntries()-1)
	// The context ends the measurement, not the queue's orderly end.
	admin, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	mem, err := hostmem.Alloc(int64(2*page), "bench destination")
	if err != nil {
		return 0, err
	}
	iova, err := c.MapDMA(mem)
	if err != nil {
		return 0, errors.Join(err, hostmem.Free(mem))
	}
	defer func() {
		err = errors.Join(err, c.UnmapDMA(iova, int64(len(mem))), hostmem.Free(mem))
	}()
	qp, err := c.CreateQueuePair(admin, depth+1)
	if err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, c.DeleteQueuePair(admin, qp))
	}()
	r := serveReads{c: c, qp: qp, kicker: kicker, phase: true, nsid: ns.ID,
		key: philox.Key(id, philox.StreamBench), lbas: uint64(lbas),
		span: ns.Blocks / uint64(lbas), prp1: uint64(iova), out: depth}
	if bytes > page {
		r.prp2 = uint64(iova) + uint64(page)
	}
	for cid := range depth {
		r.issue(uint16(cid))
	}
	r.ring()
	last := time.Now()
	for r.out > 0 {
		if n := r.reap(ctx.Err() != nil); n > 0 {
			r.ring()
			reads += n
			last = time.Now()
		} else if time.Since(last) > serveStall {
			return reads, errs.New(errs.Device, "nvme %s q%d: no completion within %v", c.Name(),
				qp.ID, serveStall)
		}
		waiter.WaitCQ(qp.ID, 10*time.Millisecond)
	}
	return reads, r.err
}

// serveReads keeps reads of random rows outstanding on one queue pair.
type serveReads struct {
	c          *nvme.Controller
	qp         *nvme.QueuePair
	kicker     nvme.Kicker
	key        [2]uint32
	random     [4]uint32 // of the next reads
	issued     uint64
	nsid       uint32
	span, lbas uint64 // rows of an SSD, and LBAs of a row
	prp1, prp2 uint64
	tail, head int
	phase      bool
	out        int   // outstanding
	err        error // the first
}

// issue writes the next read to the queue.
func (r *serveReads) issue(cid uint16) {
	n := r.issued
	r.issued++
	if n%4 == 0 {
		r.random = philox.Block(r.key, [4]uint32{uint32(n), uint32(n >> 32)})
	}
	lba := uint64(r.random[n%4]) * r.span >> 32 * r.lbas
	*(*nvme.Command)(unsafe.Pointer(&r.qp.SQ[r.tail*nvme.CommandBytes])) = nvme.ReadCommand(cid,
		r.nsid, nvme.LBA(lba), uint32(r.lbas), r.prp1, r.prp2)
	if r.tail++; r.tail == r.qp.Entries {
		r.tail = 0
	}
}

func (r *serveReads) ring() {
	nvme.StoreDoorbell(r.qp.SQDoorbell, uint32(r.tail))
	if r.kicker != nil {
		r.kicker.Kick(r.qp.ID)
	}
}

// reap takes completions, and issues a read for each unless it is to stop.
func (r *serveReads) reap(stop bool) (n int64) {
	for {
		e, ok := nvme.LoadCompletion(
			(*nvme.Completion)(unsafe.Pointer(&r.qp.CQ[r.head*nvme.CompletionBytes])), r.phase)
		if !ok {
			break
		}
		if r.head++; r.head == r.qp.Entries {
			r.head, r.phase = 0, !r.phase
		}
		if st := e.Status(); !st.OK() && r.err == nil {
			r.err = fmt.Errorf("nvme %s q%d: read: %v", r.c.Name(), r.qp.ID, st)
		}
		n++
		if stop || r.err != nil {
			r.out--
			continue
		}
		r.issue(e.CID)
	}
	if n > 0 {
		nvme.StoreDoorbell(r.qp.CQDoorbell, uint32(r.head))
	}
	return n
}
