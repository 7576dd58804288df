package main

import (
	"slices"
	"strings"
	"time"

	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
	"helios/internal/units"
)

// ioBench measures random reads.
type ioBench struct {
	*env
	*ioBenchArgs
	opener   *ssdOpener
	hardware *hardware.Profile // of the virtual clock; nil for the wall's
}

// point is one row of results to be.
type point struct {
	stack                                   string
	rowBytes, ssds, blocks, depth, coalesce int
}

// points are all combinations.
func (b *ioBench) points() []point {
	ofKernels := b.blocks
	if len(ofKernels) == 0 {
		ofKernels = []int{0} // each stack has its own, as in training
	}
	var out []point
	for _, stack := range b.stacks {
		for _, bytes := range b.rowBytes {
			for _, n := range b.counts {
				for _, blocks := range ofKernels {
					for _, d := range b.depths {
						for _, c := range b.coalesce {
							out = append(out, point{stack, bytes, n, blocks, d, c})
						}
					}
				}
			}
		}
	}
	return out
}

// maxPoints bounds a sweep, so that a range with a digit too many is noticed before the next day.
const maxPoints = 10000

// parseNumbers reads whole numbers of at least 1 and ranges of them.
func parseNumbers(flag, text string) ([]int, error) {
	var out []int
	parts, err := list(flag, text)
	if err != nil {
		return nil, err
	}
	if parts == nil {
		return nil, errs.New(errs.Usage, "%v is empty; write it like 1,2,4 or 1..12", errs.Key(flag))
	}
	for _, p := range parts {
		from, to, isRange := strings.Cut(p, "..")
		lo, err := units.ParseInts(from, 1)
		if err != nil {
			return nil, errs.New(errs.Usage, "%v: %w", errs.Key(flag), err)
		}
		hi := lo
		if isRange {
			if hi, err = units.ParseInts(to, 1); err != nil {
				return nil, errs.New(errs.Usage, "%v: %w", errs.Key(flag), err)
			}
		}
		if hi[0] < lo[0] || hi[0]-lo[0] >= maxPoints {
			return nil, errs.New(errs.Usage,
				"%v %s is not a range; write it like 1..12, the smaller number first, at most %d of them",
				errs.Key(flag), p, maxPoints)
		}
		for n := lo[0]; n <= hi[0]; n++ {
			if !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	return out, nil
}

func parseRowBytes(s string) (int, error) {
	n, err := units.ParseBytes(s)
	if err != nil || n < 1 || n > 16<<20 {
		return 0, errs.New(errs.Usage, "{row-bytes} %q is not a size between 1 and 16MiB", s)
	}
	return int(n), nil
}

// queues reports whether some stack drives NVMe queues from kernels.
func (b *ioBench) queues() bool { return gpuio.AnyStack(b.stacks, queued) }

func queued(s *gpuio.Stack) bool { return s.Queued }

// check refuses what cannot be, before anything is opened, and loads the models.
func (b *ioBench) check() error {
	if b.given(&b.rung) != "" && !b.queues() {
		return errs.New(errs.Usage,
			"{memory-rung} %s is for the stacks async and sync, and {io-stack} %s has no queues of its own; leave it out",
			b.rung, strings.Join(b.stacks, ","))
	}
	shares := func(s *gpuio.Stack) bool { return s.Coalesces }
	for _, n := range b.coalesce {
		if n > 0 && !gpuio.AnyStack(b.stacks, shares) {
			return errs.New(errs.Usage,
				"{coalesce} %s: stack %s reads each row by itself; add %s to {io-stack}, or leave it out",
				strings.ReplaceAll(units.FormatBytes(int64(n)), " ", ""), strings.Join(b.stacks, ", "),
				strings.Join(gpuio.StackNames(shares), " or "))
		}
	}
	if !(b.seconds >= 0.001 && b.seconds <= 86400) {
		return errs.New(errs.Usage, "{seconds} %v is not between 0.001 and 86400", b.seconds)
	}
	if b.threads < 0 || b.threads > 1024 || b.threads%32 != 0 {
		return errs.New(errs.Usage, "{threads} %d: choose a multiple of 32 up to 1024", b.threads)
	}
	if err := b.loadModel(); err != nil {
		return err
	}
	return b.loadClock()
}

// loadModel settles what the SSDs are to play.
func (b *ioBench) loadModel() (err error) {
	if b.latency < 0 || b.latency > 100*time.Millisecond {
		return errs.New(errs.Usage, "{ssd-latency} %v is not between 0 and 100ms", b.latency)
	}
	given := b.given(&b.model)
	switch {
	case given != "" && b.latency > 0:
		return errs.New(errs.Usage, "{ssd-model} and {ssd-latency}: give one of them")
	case given != "":
		if b.opener.playModel, err = ssdmodel.Load(b.model); err != nil {
			return errs.New(errs.Usage, "{ssd-model}: %w", err)
		}
	case b.latency > 0:
		given = "ssd-latency"
		if b.opener.playModel, err = ssdmodel.Fixed(b.latency); err != nil {
			return errs.New(errs.Usage, "{ssd-latency}: %w", err)
		}
	}
	for _, s := range b.stacks {
		if given != "" && b.clock == iobench.ClockWall && !gpuio.AnyStack([]string{s}, queued) {
			return errs.New(errs.Usage,
				"%v with {io-stack} %s: that stack reads the backing past the controller, which alone plays a model; choose %s, or {clock} virtual",
				errs.Key(given), s, strings.Join(gpuio.StackNames(queued), " or "))
		}
	}
	return nil
}

// loadClock checks the options of one clock against the other, and loads the virtual one's machine.
func (b *ioBench) loadClock() (err error) {
	if b.clock == iobench.ClockWall {
		if f := b.given(&b.profile); f != "" {
			return errs.New(errs.Usage, "%v is for {clock} virtual", errs.Key(f))
		}
		return nil
	}
	if b.named(b.env) {
		return errs.New(errs.Usage,
			"{dataset} means nothing under {clock} virtual: nothing is loaded there; give its {row-bytes}")
	}
	for _, off := range []struct {
		field any
		why   string
	}{
		{&b.names, "no SSD is opened there; choose their number with --ssd-count"},
		{&b.faults, "its SSDs are healthy models; inject faults with --clock wall"},
		{&b.device, "the profile has the device"},
		{&b.rung, "the profile places the queues"},
		{&b.checkReads, "no data moves there"},
	} {
		f := b.given(off.field)
		if f == "" || off.field == &b.names && len(b.names) == 0 { // numbers
			continue
		}
		return errs.New(errs.Usage, "%v means nothing under {clock} virtual: %s", errs.Key(f), off.why)
	}
	if b.given(&b.profile) == "" {
		return errs.New(errs.Usage,
			"{clock} virtual needs {hardware}: choose one of %s, or give a YAML file",
			strings.Join(hardware.Names(), ", "))
	}
	if b.hardware, err = hardware.Load(b.profile); err != nil {
		return err
	}
	if b.given(&b.seconds) == "" {
		b.seconds = 0
	}
	if len(b.counts) == 0 {
		b.counts = []int{b.hardware.SSDs.Count.Int()}
	}
	return nil
}
