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
	key := philox.Key(id, philox.StreamBench)
	span := ns.Blocks / uint64(lbas)
	tail, head, phase := 0, 0, true
	var rnd [4]uint32
	issue := func(cid uint16, n uint64) {
		if n%4 == 0 {
			rnd = philox.Block(key, [4]uint32{uint32(n), uint32(n >> 32)})
		}
		lba := uint64(rnd[n%4]) * span >> 32 * uint64(lbas)
		prp2 := uint64(0)
		if bytes > page {
			prp2 = uint64(iova) + uint64(page)
		}
		*(*nvme.Command)(unsafe.Pointer(&qp.SQ[tail*nvme.CommandBytes])) = nvme.ReadCommand(cid,
			ns.ID, nvme.LBA(lba), uint32(lbas), uint64(iova), prp2)
		if tail++; tail == qp.Entries {
			tail = 0
		}
	}
	ring := func() {
		nvme.StoreDoorbell(qp.SQDoorbell, uint32(tail))
		if kicker != nil {
			kicker.Kick(qp.ID)
		}
	}
	var issued uint64
	for cid := range depth {
		issue(uint16(cid), issued)
		issued++
	}
	ring()
	last := time.Now()
	out := depth
	for out > 0 {
		stop := ctx.Err() != nil
		n := 0
		for {
			e, ok := nvme.LoadCompletion(
				(*nvme.Completion)(unsafe.Pointer(&qp.CQ[head*nvme.CompletionBytes])), phase)
			if !ok {
				break
			}
			if head++; head == qp.Entries {
				head, phase = 0, !phase
			}
			if st := e.Status(); !st.OK() && err == nil {
				err = fmt.Errorf("nvme %s q%d: read: %v", c.Name(), qp.ID, st)
			}
			n++
			if stop || err != nil {
				out--
				continue
			}
			issue(e.CID, issued)
			issued++
		}
		if n > 0 {
			nvme.StoreDoorbell(qp.CQDoorbell, uint32(head))
			ring()
			reads += int64(n)
			last = time.Now()
		} else if time.Since(last) > serveStall {
			return reads, errs.New(errs.Device, "nvme %s q%d: no completion within %v", c.Name(),
				qp.ID, serveStall)
		}
		waiter.WaitCQ(qp.ID, 10*time.Millisecond)
	}
	return reads, err
}
