package engine

import (
	"context"
	"errors"

	"helios/cache"
	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// deviceFree returns how much of the device's own memory nobody holds now, other processes
// included; -1 where it is the CPU's.
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

// deviceSlack returns what a GPU tier leaves free beside what was counted: rounding of allocations,
// the driver's own, batches that are larger than those that were sampled beforehand.
func deviceSlack(total int64) int64 { return min(max(total/32, leastSlack), 1<<30) }

// leastSlack is the memory kept free on small devices. Tests lower it.
var leastSlack int64 = 8 << 20

// workingSet returns what a run will still take of the device's memory when it is measured with one
// mini-batch sampled and no slot in use: the slots by the sizes in f, the lookups, and the
// activations.
func (e *Engine) workingSet(f *prepare.Frontier) int64 {
	rows := f.HopEnd[len(f.HopEnd)-1]
	beside, samples := e.Tiers.BatchBytes(rows)
	wide := int64(0)
	if e.RowType != rowtype.Float32 {
		wide = int64(e.Dim) * 4
	}
	n := beside + f.BatchBytes(int64(e.Plan.Credits), samples, rows, e.RowBytes, wide,
		e.Config.Arch().Degrees())
	n += e.consumer.WorkspaceBytes(f.HopEnd, f.Edges)
	n += cache.IndexBytes(e.Rows)
	// Batches differ a little, and buffers that grow take a quarter more than they need.
	return n + n/8
}

// measured are the budgets of --gpu-cache auto: what the device has free less what the run still
// needs.
func (e *Engine) measured(b plan.TierSizes, h *cache.Hotness) (plan.TierSizes, error) {
	free, err := deviceFree(e.Device)
	if err != nil {
		return b, err
	}
	free += h.DeviceBytes() // which goes before the tiers come
	room := max(free-e.workingSet(&e.Seen)-deviceSlack(e.Device.Info().MemTotal), 0)
	avail, err := hostmem.AvailableBytes()
	if err != nil {
		return b, err
	}
	c := e.Config
	c.GPUCacheAuto, c.GPUCache = false, units.Budget{Bytes: min(room, e.Rows*e.RowBytes)}
	if b, err = c.TierRows(e.Rows, e.RowBytes, avail, free); err != nil {
		return b, err
	}
	return b, nil
}

// AutoRoom returns what --gpu-cache auto gives a GPU tier where no hotness is counted: batches are
// sampled for what they need of the device's memory. Without anything to train on it is 0.
func (e *Engine) AutoRoom(ctx context.Context) (int64, error) {
	if e.Seen.HopEnd == nil {
		train, err := e.In.HotFrom()
		if err != nil {
			return 0, err
		}
		if err := e.PresampleBatches(ctx, train, false, 1, prepare.SampledForAuto,
			nil); err != nil {
			return 0, err
		}
	}
	free, err := deviceFree(e.Device)
	if err != nil || e.Seen.HopEnd == nil { // which is told later
		return 0, err
	}
	return max(free-e.workingSet(&e.Seen)-deviceSlack(e.Device.Info().MemTotal), 0), nil
}

// shrunk returns what an out-of-memory error leaves of the GPU tier: what was wanted and some more
// is given back. The error is the cause where there is nothing to shrink any more.
func (e *Engine) shrunk(cause error) (plan.TierSizes, error) {
	var oom *cuda.OutOfMemoryError
	if !e.OnGPU() || !errors.As(cause, &oom) {
		return plan.TierSizes{}, cause
	}
	if errors.As(cause, new(elsewhere)) {
		return plan.TierSizes{}, errs.New(errs.Capability,
			"%w; the caches are on the first device, so they have nothing to give back there: lower {batch-size}, {fanout} or {hidden}",
			cause)
	}
	if errors.As(cause, new(applied)) {
		return plan.TierSizes{}, errs.New(errs.Capability,
			"%w; the step was under way, so it cannot be done again: go on from the last checkpoint ({checkpoint}, {resume}), and lower {gpu-cache}",
			cause)
	}
	have := e.Sizes.GPURows
	if have == 0 || errors.As(cause, new(untiered)) {
		return plan.TierSizes{}, errs.New(errs.Capability,
			"%w; the GPU tier holds nothing, so no device memory can be given back for it: lower {batch-size}, {fanout}, {prefetch-depth} or {hidden}, or end what else uses the GPU",
			cause)
	}
	give := max(oom.Want-oom.Free, 0) + deviceSlack(e.Device.Info().MemTotal)
	b := e.Sizes
	b.GPURows = max(have-(give+e.RowBytes-1)/e.RowBytes, 0)
	if e.Config.InMemory() {
		avail, err := hostmem.AvailableBytes()
		if err != nil {
			return b, err
		}
		more := (have - b.GPURows) * e.RowBytes
		if more > max(avail-plan.HostSlack, 0) {
			return b, errs.New(errs.Capability,
				"%w; {mode} %s has no room in CPU memory for the %s that the GPU tier would give back: use {mode} %s",
				cause, e.Config.Mode, units.FormatBytes(more), plan.DefaultMode)
		}
		b.CPURows += have - b.GPURows
	}
	if e.Tiers.Fixed() {
		b.CPURows += have - b.GPURows
	}
	return b, nil
}

// Untiered marks an error of a time in which no tier holds memory.
func Untiered(err error) error { return untiered{err} }

type untiered struct{ error }

func (u untiered) Unwrap() error { return u.error }

// Elsewhere marks an error of another device than the engine's, whose tiers can't give it memory.
func Elsewhere(err error) error { return elsewhere{err} }

type elsewhere struct{ error }

func (e elsewhere) Unwrap() error { return e.error }

// Applied marks an error of a time in which a training step may have changed the parameters: doing
// the batch again would change them twice.
func Applied(err error) error { return applied{err} }

type applied struct{ error }

func (a applied) Unwrap() error { return a.error }

// shrink makes room after an out-of-memory error: nothing may be in flight. The tiers are placed
// anew, so their rows are what a run with the smaller budget would have had from its beginning. It
// returns cause where that is another error.
func (e *Engine) shrink(ctx context.Context, cause error) error {
	b, err := e.shrunk(cause)
	if err != nil {
		return err
	}
	was := e.Sizes.GPURows * e.RowBytes
	var oom *cuda.OutOfMemoryError
	errors.As(cause, &oom)
	e.Observer.TellNote(
		"out of device memory (%v): the GPU tier shrinks from %s to %s, and the run goes on at the same batch",
		oom, units.FormatBytes(was), units.FormatBytes(b.GPURows*e.RowBytes))
	e.GPUShrunk += was - b.GPURows*e.RowBytes
	b.Auto = false
	e.Sizes = b
	// The activations too: to grow they would be there twice for a moment.
	if err := errors.Join(e.Tiers.Close(), e.consumer.ReleaseWorkspace()); err != nil {
		return err
	}
	return e.place(ctx)
}
