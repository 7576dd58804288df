package main

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/gpuio/iobench"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
	"helios/internal/units"
)

// benchPlan is what "bench io" is asked for. ssds is nil for all there are.
type benchPlan struct {
	stacks                                  []string
	rowBytes, ssds, blocks, depths, setRows []int
	rates                                   []float64
	coalesce                                []int // as AsyncOptions.CoalesceBytes
	threads, sets, lba                      int
	seconds                                 float64 // 0: virtual, by itself
	hardware                                *hardware.Profile
}

// point is one row of results to be.
type point struct {
	stack                                            string
	rowBytes, ssds, blocks, depth, setRows, coalesce int
	rate                                             float64
}

// points are all combinations.
func (p *benchPlan) points() []point {
	var out []point
	for _, stack := range p.stacks {
		for _, bytes := range p.rowBytes {
			for _, n := range p.ssds {
				for _, b := range p.blocks {
					for _, d := range p.depths {
						for _, s := range p.setRows {
							for _, c := range p.coalesce {
								for _, r := range p.rates {
									out = append(out, point{stack, bytes, n, b, d, s, c, r})
								}
							}
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

// numbers reads a list flag of whole numbers of at least 1 and of ranges of them.
func (e *env) numbers(flag string) ([]int, error) {
	var out []int
	parts, err := list(flag, e.c.String(flag))
	if err != nil {
		return nil, err
	}
	if parts == nil {
		return nil, errs.New(errs.Usage, "--%s is empty; write it like 1,2,4 or 1..12", flag)
	}
	for _, p := range parts {
		from, to, isRange := strings.Cut(p, "..")
		lo, err := units.ParseInts(from, 1)
		if err != nil {
			return nil, errs.New(errs.Usage, "--%s: %w", flag, err)
		}
		hi := lo
		if isRange {
			if hi, err = units.ParseInts(to, 1); err != nil {
				return nil, errs.New(errs.Usage, "--%s: %w", flag, err)
			}
		}
		if hi[0] < lo[0] || hi[0]-lo[0] >= maxPoints {
			return nil, errs.New(errs.Usage, "--%s %s is not a range; write it like 1..12, the smaller number first, at most %d of them", flag, p, maxPoints)
		}
		for n := lo[0]; n <= hi[0]; n++ {
			if !slices.Contains(out, n) {
				out = append(out, n)
			}
		}
	}
	return out, nil
}

// notVirtual are flags that mean nothing where nothing is read.
var notVirtual = map[string]string{
	"dataset": "nothing is loaded there; give its --row-bytes", "only": "no SSD is opened there; choose their number with --ssds", "fault": "its SSDs are healthy models; inject faults with --clock wall", "sq": "its queues are modelled in host memory",
	"device": "the profile has the device", "memory-rung": "the profile says where queues are", "cpu-engine": "the profile has the cost of a read", "read-timeout": "no modelled read fails", "check-reads": "no data moves there",
}

// queues says whether some stack drives NVMe queues from kernels.
func (p *benchPlan) queues() bool {
	return slices.Contains(p.stacks, "async") || slices.Contains(p.stacks, "sync")
}

func (e *env) benchPlan() (*benchPlan, error) {
	c := e.c
	p := &benchPlan{setRows: []int{0}, rates: []float64{0}}
	var err error
	if p.blocks, err = e.numbers("blocks"); err != nil {
		return nil, err
	}
	if p.depths, err = e.numbers("depth"); err != nil {
		return nil, err
	}
	if p.stacks, err = list("stack", c.String("stack")); err != nil {
		return nil, err
	}
	for _, s := range p.stacks {
		if nearest(s, benchStacks) != s {
			return nil, errs.New(errs.Usage, "unknown --stack %q; %s", s, meant(s, benchStacks, "choose one of "+strings.Join(benchStacks, ", ")))
		}
	}
	if c.IsSet("memory-rung") && !p.queues() {
		return nil, errs.New(errs.Usage, "--memory-rung %s is for the stacks async and sync, and --stack %s has no queues of its own; leave it out", c.String("memory-rung"), c.String("stack"))
	}
	sizes, err := list("row-bytes", c.String("row-bytes"))
	if err != nil {
		return nil, err
	}
	for _, s := range sizes {
		n, err := units.ParseBytes(s)
		if err != nil || n < 1 || n > 16<<20 {
			return nil, errs.New(errs.Usage, "--row-bytes %q is not a size between 1 and 16MiB", s)
		}
		p.rowBytes = append(p.rowBytes, int(n))
	}
	if c.IsSet("ssds") {
		if p.ssds, err = e.numbers("ssds"); err != nil {
			return nil, errs.New(errs.Usage, "%w (numbers of SSDs; --only chooses some by name)", err)
		}
	}
	if c.IsSet("set-rows") {
		if p.setRows, err = e.numbers("set-rows"); err != nil {
			return nil, err
		}
	}
	if c.IsSet("rate") {
		if p.rates, err = rates(c.String("rate")); err != nil {
			return nil, err
		}
	}
	ways, err := list("coalesce", c.String("coalesce"))
	if err != nil {
		return nil, err
	}
	if len(ways) == 0 {
		return nil, errs.New(errs.Usage, "--coalesce is empty; give auto, off, a size, or several of these")
	}
	for _, w := range ways {
		n, err := coalesceFlag(w)
		if err != nil {
			return nil, err
		}
		if n > 0 && !slices.Contains(p.stacks, "async") && !slices.Contains(p.stacks, "cpu") {
			return nil, errs.New(errs.Usage, "--coalesce %s: stack %s reads each row by itself; add async or cpu to --stack, or leave it out", w, strings.Join(p.stacks, ", "))
		}
		p.coalesce = append(p.coalesce, n)
	}
	if p.seconds = c.Float64("seconds"); !(p.seconds >= 0.001 && p.seconds <= 86400) {
		return nil, errs.New(errs.Usage, "--seconds %v is not between 0.001 and 86400", p.seconds)
	}
	if c.Int("queue-pairs") < 0 {
		return nil, errs.New(errs.Usage, "--queue-pairs %d is negative", c.Int("queue-pairs"))
	}
	if err := e.notZero("queue-pairs", "workers", "threads", "sets-in-flight", "lba"); err != nil {
		return nil, err
	}
	if p.threads = c.Int("threads"); p.threads < 0 || p.threads > 1024 || p.threads%32 != 0 {
		return nil, errs.New(errs.Usage, "--threads %d: choose a multiple of 32 up to 1024", p.threads)
	}
	if p.threads == 0 && slices.Contains(p.stacks, "async") && slices.Contains(p.stacks, "sync") {
		p.threads = 128 // for both, so that they compare
	}
	if p.sets = c.Int("sets-in-flight"); p.sets < 0 || p.sets > 32 {
		return nil, errs.New(errs.Usage, "--sets-in-flight %d is not between 1 and 32", p.sets)
	}
	if err := e.benchModel(p); err != nil {
		return nil, err
	}
	if err := e.benchClock(p); err != nil {
		return nil, err
	}
	return p, nil
}

// rates reads a list of rows a second.
func rates(s string) ([]float64, error) {
	parts, err := list("rate", s)
	if err != nil {
		return nil, err
	}
	var out []float64
	for _, part := range parts {
		v, err := strconv.ParseFloat(part, 64)
		if err != nil || !(v >= 1 && v <= 1e8) {
			return nil, errs.New(errs.Usage, "--rate %q is not a number of rows a second between 1 and 1e8", part)
		}
		out = append(out, v)
	}
	if len(out) == 0 {
		return nil, errs.New(errs.Usage, "--rate is empty; give rows a second, such as 20000")
	}
	return out, nil
}

// benchModel settles what the SSDs are to play.
func (e *env) benchModel(p *benchPlan) (err error) {
	c := e.c
	latency := c.Duration("ssd-latency")
	if latency < 0 || latency > 100*time.Millisecond {
		return errs.New(errs.Usage, "--ssd-latency %v is not between 0 and 100ms", latency)
	}
	given := ""
	switch {
	case c.IsSet("ssd-model") && latency > 0:
		return errs.New(errs.Usage, "--ssd-model and --ssd-latency: give one of them")
	case c.IsSet("ssd-model"):
		given = "ssd-model"
		if e.playModel, err = ssdmodel.Load(c.String("ssd-model")); err != nil {
			return errs.New(errs.Usage, "--ssd-model: %w", err)
		}
	case latency > 0:
		given = "ssd-latency"
		if e.playModel, err = ssdmodel.Fixed(latency); err != nil {
			return errs.New(errs.Usage, "--ssd-latency: %w", err)
		}
	}
	for _, s := range p.stacks {
		if given != "" && c.String("clock") == iobench.ClockWall && (s == "cpu" || s == "mmap") {
			return errs.New(errs.Usage, "--%s with --stack %s: that stack reads the backing past the controller, which alone plays a model; choose async or sync, or --clock virtual", given, s)
		}
	}
	return nil
}

// benchClock checks the flags of one clock against the other.
func (e *env) benchClock(p *benchPlan) (err error) {
	c := e.c
	if c.String("clock") == iobench.ClockWall {
		for _, f := range []string{"hardware", "lba"} {
			if c.IsSet(f) {
				return errs.New(errs.Usage, "--%s is for --clock virtual", f)
			}
		}
		return nil
	}
	for _, f := range slices.Sorted(maps.Keys(notVirtual)) {
		if c.IsSet(f) || f == "dataset" && c.NArg() > 0 {
			return errs.New(errs.Usage, "--%s means nothing under --clock virtual: %s", f, notVirtual[f])
		}
	}
	if !c.IsSet("hardware") {
		return errs.New(errs.Usage, "--clock virtual needs --hardware: choose one of %s, or give a YAML file", strings.Join(hardware.Names(), ", "))
	}
	if p.hardware, err = hardware.Load(c.String("hardware")); err != nil {
		return err
	}
	if !c.IsSet("seconds") {
		p.seconds = 0
	}
	p.lba = c.Int("lba")
	if p.ssds == nil {
		p.ssds = []int{p.hardware.SSDs.Count.Int()}
	}
	return nil
}
