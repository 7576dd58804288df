package gpuio

import (
	"fmt"

	"helios/cuda"
	"helios/nvme"
)

func (e *async) openHostSide() error {
	if !e.onHost() { // kernels ring and poll by themselves
		e.host = &hostSide{parks: make([]blockPark, 1)}
		return nil
	}
	h := &hostSide{kickers: make([]nvme.Kicker, len(e.ssds)), parks: make([]blockPark, e.blocks)}
	for s, d := range e.ssds {
		h.kickers[s], _ = d.Ctrl.Bus().(nvme.Kicker)
	}
	refs := make([][]nvme.CQRef, e.blocks)
	for g := range e.pairs {
		b := blockOf(g, e.blocks, e.queues())
		e.pairs[g].block = b
		bus := e.ssds[g/e.perSSD].Ctrl.Bus()
		refs[b] = append(refs[b], nvme.CQRef{Bus: bus, QID: e.pairs[g].qp.ID})
		w, _ := bus.(nvme.Waiter)
		h.parks[b].waiters = append(h.parks[b].waiters, queueWaiter{w, e.queue(g), &e.queue(g).QID})
	}
	e.host = h
	for b := range refs {
		gw, ok := refs[b][0].Bus.(nvme.GroupWaiter)
		for _, r := range refs[b] {
			if _, has := r.Bus.(nvme.GroupWaiter); !has {
				ok = false
			}
		}
		if ok {
			group, err := gw.GroupCQs(refs[b])
			if err != nil {
				return fmt.Errorf("gpuio: wait for the queues of block %d: %w", b, err)
			}
			h.parks[b].group = group
		}
		h.parks[b].init()
	}
	if e.sync != nil {
		h.initSync(e.sync.blocks, e.queues())
	}
	e.handle = registerHostSide(h)
	return nil
}

// launchSubmit enqueues the submit kernel for a set. Needs e.mu.
func (e *async) launchSubmit(slot uint32) error {
	grid := cuda.LaunchConfig{Blocks: e.submitBlocks, Threads: e.opt.Threads}
	if err := cuda.Launch(e.submitS, e.submitK, grid, submitParams{
		Queues: e.queueBuf.dev.Ptr(), Sets: e.setBuf.dev.Ptr(), Engine: e.handle,
		NumQueues: uint32(e.queues()), QueuesPerSSD: uint32(e.perSSD),
		Set: slot * e.shape.stride,
	}); err != nil {
		return err
	}
	return e.submitS.Record(e.submitEv[slot])
}

// launchComplete enqueues the complete kernel for a set. Needs e.mu.
func (e *async) launchComplete(slot uint32) error {
	if err := cuda.Launch(e.complS, e.complK, cuda.LaunchConfig{Blocks: e.blocks,
		Threads: e.opt.Threads}, completeParams{
		Queues: e.queueBuf.dev.Ptr(), Sets: e.setBuf.dev.Ptr(), Engine: e.handle,
		NumQueues: uint32(e.queues()), Set: slot * e.shape.stride,
		LimitNS: int64(launchLimit),
	}); err != nil {
		return err
	}
	return e.ended(e.complS, slot)
}

// launchSync enqueues read_sync for a set. No complete kernel follows: the warps see to their own
// completions. Needs e.mu.
func (e *async) launchSync(slot uint32) error {
	grid := cuda.LaunchConfig{Blocks: e.sync.blocks, Threads: e.sync.threads}
	if err := cuda.Launch(e.submitS, e.submitK, grid, syncParams{
		Queues: e.queueBuf.dev.Ptr(), Sets: e.setBuf.dev.Ptr(), Engine: e.handle,
		NumQueues: uint32(e.queues()), QueuesPerSSD: uint32(e.perSSD),
		Set:     slot * e.shape.stride,
		LimitNS: int64(e.sync.limit),
	}); err != nil {
		return err
	}
	return e.ended(e.submitS, slot)
}

// ended has a slot's set come to the host behind the kernel that may end it.
func (e *async) ended(st cuda.Stream, slot uint32) error {
	if !e.onHost() {
		off, n := e.shape.block(slot)
		if err := e.setBuf.pull(st, off, n); err != nil {
			return err
		}
	}
	return st.Record(e.complEv[slot])
}

// blockOf is the block of complete that owns queue g, by the rule of cuda.Block.Range.
func blockOf(g, blocks, queues int) int {
	q, r := queues/blocks, queues%blocks
	if g < r*(q+1) {
		return g / (q + 1)
	}
	return r + (g-r*(q+1))/q
}

func (e *async) kernelView() kernelView {
	return kernelView{h: e.host, sets: e.setBuf.dev.Ptr(), deferred: !e.onHost()}
}

// chooseGrids settles the grids, of kernels of which so many warps run at once and so many are in a
// block.
func (e *async) chooseGrids(active, perBlock int) {
	e.blocks = (max(min(active, e.queues()), 1) + perBlock - 1) / perBlock
	e.submitBlocks = min(e.opt.Blocks, (e.queues()+perBlock-1)/perBlock)
	if e.sync != nil {
		// Any block of read_sync may wait for any queue, so they all wait as one.
		e.blocks = 1
	}
}

// RunningBlocks returns the number of blocks of the I/O kernels that run at once. why says why they
// are fewer than were asked for; "" if they are not.
func (e *async) RunningBlocks() (n int, why string) {
	switch {
	case e.sync != nil:
		return e.sync.blocks, ""
	case e.blocks >= e.opt.Blocks:
		return e.blocks, ""
	case !e.onHost() || e.blocks == e.queues():
		return e.blocks, fmt.Sprintf("there are %d queue pairs for them", e.queues())
	case inKernel(e.ssds):
		return e.blocks, fmt.Sprintf("over files each takes %d cores", smsPerRing)
	}
	return e.blocks, fmt.Sprintf("they have %d cores", e.blocks)
}

// openKernels finds the kernels and makes their streams and events, and a stream that moves kernel
// state beside them.
func (e *async) openKernels() (err error) {
	submit := "submit"
	if e.sync != nil {
		submit = "read_sync"
	}
	if e.submitK, err = e.dev.Kernel(submit); err != nil {
		return err
	}
	if e.complK, err = e.dev.Kernel("complete"); err != nil {
		return err
	}
	if e.submitS, err = e.dev.NewStream(cuda.StreamOptions{Name: submit, SMs: e.opt.SMs,
		Priority: e.opt.Priority, Untimed: true}); err != nil {
		return err
	}
	if e.complS, err = e.dev.NewStream(cuda.StreamOptions{Name: "complete", SMs: e.opt.SMs,
		Priority: e.opt.Priority, Untimed: true}); err != nil {
		return err
	}
	if !e.onHost() {
		if e.stateS, err = e.dev.NewStream(cuda.StreamOptions{Name: "gpuio state",
			Priority: e.opt.Priority, Untimed: true}); err != nil {
			return err
		}
	}
	for i := range maxSets {
		if e.submitEv[i], err = e.dev.NewEvent(); err != nil {
			return err
		}
		if e.complEv[i], err = e.dev.NewEvent(); err != nil {
			return err
		}
	}
	return nil
}
