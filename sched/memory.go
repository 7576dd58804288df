package sched

import (
	"context"
	"errors"
	"fmt"

	"helios/cache"
	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// onGPU tells whether the device's memory is its own, not the CPU's.
func (e *engine) onGPU() bool { return e.dev.Info().Backend != "host" }

// deviceFree is how much of the device's own memory nobody holds now, other processes included; -1 where it is the CPU's.
func deviceFree(dev cuda.Device) (int64, error) {
	i := dev.Info()
	if i.Backend == "host" {
		return -1, nil
	}
	if m, ok := dev.(cuda.MemoryMeter); ok {
		free, _, err := m.FreeMemory()
		return free, err
	}
	return i.MemTotal, nil
}

// deviceSlack is what a GPU tier leaves free beside what was counted: rounding of allocations, the driver's own, batches
// that are larger than those that were sampled beforehand.
func deviceSlack(total int64) int64 { return min(max(total/32, leastSlack), 1<<30) }

// leastSlack is of the smallest devices. Tests lower it.
var leastSlack int64 = 8 << 20

// frontier is the largest of the mini-batches that were sampled beforehand, hop by hop.
type frontier struct {
	hopEnd, edges []int64
}

func (f *frontier) add(mb *graph.MiniBatch) {
	if f.hopEnd == nil {
		f.hopEnd, f.edges = make([]int64, len(mb.HopEnd)), make([]int64, len(mb.Blocks))
	}
	for i, n := range mb.HopEnd {
		f.hopEnd[i] = max(f.hopEnd[i], n)
	}
	for i := range mb.Blocks {
		f.edges[i] = max(f.edges[i], mb.Blocks[i].NumEdges)
	}
}

// Bytes of device memory behind a looked-up position (cache.Buckets), beside the lookup's own rounding.
const bucketBytes = 36

// workingSet is what a run will still take of the device's memory when it is measured with one mini-batch sampled and no
// slot in use: the slots by the sizes in f, the lookups, and the activations.
func (e *engine) workingSet(f *frontier) int64 {
	credits := int64(e.plan.credits)
	rows := f.hopEnd[len(f.hopEnd)-1]
	n := credits * rows * e.rowBytes
	if e.rowType != rowtype.Float32 {
		n += rows * int64(e.dim) * 4
	}
	n += credits * rows * bucketBytes * 9 / 8
	samples := credits
	if e.cfg.dynamic() {
		// In the worst case each row is on a line of its own. Of what the accumulator reads beside a batch, and of the
		// tier's own lists (pinned memory), there is nothing here: its staging grows later, and the tier then shrinks.
		n += credits * rows * e.dyn.lines.LineBytes
		samples = int64(e.plan.samples)
	}
	mb := rows * 8
	if e.cfg.arch().Degrees() {
		mb += rows * 4
	}
	for h, edges := range f.edges {
		mb += (f.hopEnd[h]+1)*8 + edges*4
	}
	n += samples * mb * 5 / 4 // one is there; when it grows it is there twice for a while
	n += e.model.WorkspaceBytes(f.hopEnd, f.edges)
	n += cache.IndexBytes(e.rows)
	// Batches differ a little, and buffers that grow take a quarter more than they need.
	return n + n/8
}

// measured are the budgets of --gpu-cache auto: what the device has free less what the run still needs.
func (e *engine) measured(b budgets, h *cache.Hotness) (budgets, error) {
	free, err := deviceFree(e.dev)
	if err != nil {
		return b, err
	}
	free += h.DeviceBytes() // which goes before the tiers come
	room := max(free-e.workingSet(&e.seen)-deviceSlack(e.dev.Info().MemTotal), 0)
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return b, err
	}
	c := e.cfg
	c.GPUCacheAuto, c.GPUCache = false, units.Budget{Bytes: min(room, e.rows*e.rowBytes)}
	if b, err = c.tierRows(e.rows, e.rowBytes, avail, free); err != nil {
		return b, err
	}
	return b, nil
}

// shrunk is what an out-of-memory error leaves of the GPU tier: what was wanted and some more is given back. The error is
// the cause where there is nothing to shrink any more.
func (e *engine) shrunk(cause error) (budgets, error) {
	var oom *cuda.OutOfMemoryError
	if !e.onGPU() || !errors.As(cause, &oom) {
		return budgets{}, cause
	}
	if errors.As(cause, new(applied)) {
		return budgets{}, errs.New(errs.Capability, "%w; the step was under way, so it cannot be done again: go on from the last checkpoint (--checkpoint, --resume), with a smaller --gpu-cache", cause)
	}
	have := e.tiers.gpuRows
	if have == 0 || errors.As(cause, new(untiered)) {
		return budgets{}, errs.New(errs.Capability, "%w; the GPU tier holds nothing, so no device memory can be given back for it: lower --batch-size, --fanout, --prefetch-depth or --hidden, or end what else uses the GPU", cause)
	}
	give := max(oom.Want-oom.Free, 0) + deviceSlack(e.dev.Info().MemTotal)
	b := e.tiers
	b.gpuRows = max(have-(give+e.rowBytes-1)/e.rowBytes, 0)
	if e.cfg.Mode == ModeInmem {
		avail, err := hostmem.AvailableBytes()
		if err != nil {
			return b, err
		}
		more := (have - b.gpuRows) * e.rowBytes
		if more > max(avail-slack, 0) {
			return b, errs.New(errs.Capability, "%w; --mode inmem has no room in CPU memory for the %s that the GPU tier would give back: use --mode helios", cause, units.FormatBytes(more))
		}
		b.cpuRows += have - b.gpuRows
	}
	return b, nil
}

// untiered is an error of a time in which no tier holds memory.
type untiered struct{ error }

func (u untiered) Unwrap() error { return u.error }

// applied is an error of a time in which a training step may have changed the parameters: doing the batch again would
// change them twice.
type applied struct{ error }

func (a applied) Unwrap() error { return a.error }

// shrink makes room after an out-of-memory error: nothing may be in flight. The tiers are placed anew, so their rows are
// what a run with the smaller budget would have had from its beginning. It returns cause where that is another error.
func (e *engine) shrink(ctx context.Context, cause error) error {
	b, err := e.shrunk(cause)
	if err != nil {
		return err
	}
	was := e.tiers.gpuRows * e.rowBytes
	var oom *cuda.OutOfMemoryError
	errors.As(cause, &oom)
	e.obs.note(fmt.Sprintf("out of device memory (%v): the GPU tier shrinks from %s to %s, and the run goes on at the same batch",
		oom, units.FormatBytes(was), units.FormatBytes(b.gpuRows*e.rowBytes)))
	e.gpuShrunk += was - b.gpuRows*e.rowBytes
	b.auto = false
	e.tiers = b
	// The activations too: to grow they would be there twice for a moment.
	if err := errors.Join(e.closeTiers(), e.model.ReleaseWorkspace()); err != nil {
		return err
	}
	return e.place(ctx)
}

// stager copies device memory to where the CPU sees it.
type stager struct{ buf cuda.Buffer }

func (g *stager) close() error {
	if g.buf == nil {
		return nil
	}
	b := g.buf
	g.buf = nil
	return b.Free()
}

// view is n bytes of b from at on, after the work of st so far: in place where the CPU sees them, else a copy that lasts
// until the next view.
func (g *stager) view(ctx context.Context, dev cuda.Device, st cuda.Stream, b cuda.Buffer, at, n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if mem := b.Bytes(); mem != nil {
		return mem[at : at+n], st.Synchronize(ctx)
	}
	return g.copy(ctx, dev, st, b.Ptr()+cuda.DevicePtr(at), n)
}

// copy is a copy of n bytes of device memory that lasts until the next one.
func (g *stager) copy(ctx context.Context, dev cuda.Device, st cuda.Stream, from cuda.DevicePtr, n int64) ([]byte, error) {
	if g.buf == nil || g.buf.Size() < n {
		if err := g.close(); err != nil {
			return nil, err
		}
		var err error
		if g.buf, err = dev.Alloc(cuda.MemPinned, n+n/8, "staging of what the CPU looks at"); err != nil {
			return nil, err
		}
	}
	if err := st.Copy(g.buf.Ptr(), from, n); err != nil {
		return nil, err
	}
	return g.buf.Bytes()[:n], st.Synchronize(ctx)
}
