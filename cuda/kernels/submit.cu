// Kernel "submit": hands the units of one read set to the queue pairs. A unit is what one command reads: a
// row, a part of a row that exceeds a command, or a run of rows on equal and close LBAs (coalesce.cu).
//
// Shape: one warp for each contiguous range of queue pairs (launched as blocks of one warp); a lane makes
// the command of a unit. 12 bytes are read per row, of a run its first and last row and 12 bytes for its place;
// 64 bytes of SQE and 64 of command entry are written, and a PRP list where a command has more than
// two pages. The pages of a run that lands in place are those of its rows, for which each row's
// position is read.
//
// Ownership: the warp alone pushes to its queues' pending lists during the launch (one submit kernel
// runs at a time). The submission side of a queue belongs to whoever holds Own; when a complete
// kernel has it at this moment, that one is told to look again, so nothing here waits.
//
// Memory order: the pending list's entry, release of PendTail, then Own. SQEs and command entries of
// all lanes, syncwarp, fence.sys by lane 0, doorbell.
//
// Must match: gpuio/submit.go, byte for byte but for times.
//
// Bandwidth: 140 bytes per command; at 2 million reads per second 0.28 GB/s, far below the memory's. The
// latency of the doorbell and of the row list bounds it, hence 32 rows at a time.
#include "queue.h"

HX_KERNEL(submit, SubmitParams) {
	SetState *s = io::set(p.Sets, p.Set);
	u64 units = dev::ld(&s->Units); // under way with what dropped looks at; litmus: submit-set
	u32 rotate = dev::ld(&s->Rotate);
	if (dev::dropped(hx)) return;
	if (io::leader()) dev::cas_gpu<dev::relaxed>((u64 *)&s->StartNS, (u64)0, (u64)dev::now_ns());
	u32 lo, hi;
	io::range(p.NumQueues, &lo, &hi);
	// A lane finds what one of 32 queues gets, for all of them in the same trip.
	for (u32 base = lo; base < hi; base += 32) {
		u32 mine = base + dev::lane(), tails = 0;
		i64 from = 0, begin = 0, end = 0;
		if (mine < hi) {
			u64 bucket = units + mine / p.QueuesPerSSD * 16;
			tails = dev::ld_relaxed_gpu(&io::queue(p.Queues, mine)->PendTail); // litmus: submit-push
			from = dev::ld(dev::at<i64>(bucket, 0));
			io::share(dev::ld(dev::at<i64>(bucket, 1)) - from, mine % p.QueuesPerSSD, p.QueuesPerSSD, rotate, &begin, &end);
		}
		for (u32 i = 0; i < 32 && base + i < hi; i++) {
			QueueState *q = io::queue(p.Queues, base + i);
			u32 tail = dev::shfl(dev::full_mask, tails, i);
			i64 first = dev::shfl(dev::full_mask, from + begin, i), last = dev::shfl(dev::full_mask, from + end, i);
			if (first == last) continue;
			// litmus: submit-push
			if (io::leader()) {
#ifdef HX_PLANT_REFILL_BEFORE_HANDOVER
				dev::st_release_gpu(&q->PendTail, tail + 1);
#endif
				dev::st(&q->Pend[tail % maxSets].Next, first);
				dev::st(&q->Pend[tail % maxSets].End, last);
				dev::st(&q->PendRing[tail % maxSets], p.Set);
#ifndef HX_PLANT_REFILL_BEFORE_HANDOVER
				dev::st_release_gpu(&q->PendTail, tail + 1);
#endif
			}
			dev::syncwarp();
			io::serve(q, base + i, p.Sets, false, p.Set);
		}
	}
	if (io::leader()) dev::max_gpu<dev::relaxed>(&s->SubmitNS, dev::now_ns());
}
