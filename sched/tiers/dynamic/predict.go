package dynamic

import (
	"context"
	"fmt"
	"helios/cache"
	"helios/cache/policy"
	"helios/gpuio"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/virtual"
	"math"
)

// Predict is the system in a plan.
var Predict = planner.System{New: func(j *planner.Job) planner.Tiers {
	return &prediction{Base: planner.Base{Job: j}}
},
	Simulate: &Simulate, Directory: onCPU}

// onCPU is the figure of lookups where the CPU keeps the directory.
func onCPU(c *plan.Config, p *hardware.Profile) (string, *hardware.Figure) {
	switch {
	case c.Directory != policy.InSets:
		return "directory_ns", &p.CPU.DirectoryNS
	case !p.GPU.KeepsDirectory():
		return "sets_ns", &p.CPU.SetsNS
	}
	return "", nil
}

// prediction foresees dynamic tiers.
type prediction struct {
	planner.Base
	ctx   context.Context
	warm  int // batches that the tier has seen before the first one
	lines cache.Lines
	dir   policy.Directory
	heard int // batches that the directory has heard of
}

// Open implements Tiers.
func (t *prediction) Open(ctx context.Context, n int) error {
	t.ctx, t.warm = ctx, t.warmUp()
	j := t.Job
	j.Warm = t.warm
	j.Work.Source = virtual.Source{Open: t.open, Batch: t.batch}
	j.Work.Slots = t.slots
	return nil
}

// open makes a dynamic tier and lets it fill.
func (t *prediction) open(_ gpuio.Layout, lines cache.Lines) (err error) {
	c := &t.Job.Config
	t.lines = lines
	if t.dir, err = policy.New(policy.Config{Policy: c.Policy, Kind: c.Directory, Seed: c.Seed,
		Lines: lines.Count(t.Job.Accesses.Rows), Slots: t.slots(lines)}); err != nil {
		return err
	}
	for i := range t.warm {
		if _, err := t.batch(i - t.warm); err != nil {
			return err
		}
	}
	return nil
}

// slots is the number of lines that the tier holds.
func (t *prediction) slots(lines cache.Lines) int64 {
	j := t.Job
	return min(j.Sizes.GPURows*j.RowBytes/lines.LineBytes, lines.Count(j.Accesses.Rows))
}

// SlotBytes implements Tiers.
func (t *prediction) SlotBytes(slots, n int64) int64 {
	if !t.onGPU() {
		return 0
	}
	return slots*n*cache.GPUTicketBytes + cache.GPUSetsWork(n, t.Job.Config.Window)
}

// GPUShare implements Tiers: both tiers get the same.
func (t *prediction) GPUShare(all int64) int64 {
	if t.Job.Config.CPUCache == (units.Budget{}) {
		return all
	}
	return all / 2
}

// Bounds implements Tiers.
func (t *prediction) Bounds() (least, most, rows int) {
	least, most, rows = t.Base.Bounds()
	if t.Job.Config.Accumulate > 0 {
		most = planner.MostGroups
	}
	return least, most, rows
}

// Pace implements Tiers: groups of merged reads end together, and all of them count.
func (t *prediction) Pace(n int) (from, to int) {
	if t.Job.Config.Accumulate > 0 {
		return -1, n - 1
	}
	return t.Base.Pace(n)
}

// Prepare implements Tiers: lines come into the GPU tier by themselves.
func (t *prediction) Prepare(p *planner.Plan, b planner.Before) {
	p.Preparation.Fill = t.Job.FillSeconds(t.Job.Sizes.CPURows)
	p.Preparation.Hotness = t.Job.HotnessSeconds(b.Sample)
}

// Memory implements Tiers.
func (t *prediction) Memory(p *planner.Plan) {
	j := t.Job
	if !t.onGPU() {
		p.CPUMemory["directory"] = 24*j.Sizes.GPURows + cache.IndexBytes(j.Sizes.CPURows)
		return
	}
	// The sizes were laid out before, so nothing fails here.
	p.GPUMemory["directory"], _ = t.DirectoryBytes(p.GPUCacheBytes)
	if j.Sizes.CPURows > 0 {
		p.GPUMemory["directory"] += cache.IndexBytes(j.Accesses.Rows)
	}
}

// onGPU reports whether kernels keep the directory of a dynamic tier.
func (t *prediction) onGPU() bool {
	j := t.Job
	return j.Config.Directory == policy.InSets &&
		j.Options.Hardware.Profile.GPU.KeepsDirectory()
}

// DirectoryBytes implements Tiers: it is what a directory takes of the GPU's memory for a tier of
// so many bytes.
func (t *prediction) DirectoryBytes(bytes int64) (int64, error) {
	if !t.onGPU() {
		return 0, nil
	}
	j := t.Job
	lines, _, err := prepare.LayLines(j.Layout, j.Accesses.Rows, j.Config.CacheLine)
	if err != nil {
		return 0, err
	}
	return cache.GPUSetsBytes(j.Config.Policy, min(bytes/lines.LineBytes,
		lines.Count(j.Accesses.Rows)),
		j.Config.Window > 0)
}

// warmUp returns how many batches fill the tier first: a few times what it holds.
func (t *prediction) warmUp() int {
	j := t.Job
	rows := max(len(j.First.Rows), 1)
	slots := float64(j.Sizes.GPURows)
	n := int(math.Ceil(3 * slots / float64(rows)))
	n = min(n, planner.WarmRows/rows, planner.MostWarm, j.Accesses.Batches)
	if float64(n*rows) < slots {
		j.Notes = append(j.Notes, fmt.Sprintf(
			"%d mini-batches before those that are played do not fill the GPU tier: hits are fewer here than later",
			n))
	}
	return n
}

// linesOf returns the different lines of the rows that are not in the CPU buffer, and how many rows
// each has.
func (t *prediction) linesOf(rows, ranks []int64) (lines []int64, counts []int64, inBuffer int64) {
	at := map[int64]int{}
	for k, row := range rows {
		if ranks[k] < t.Job.Sizes.CPURows {
			inBuffer++
			continue
		}
		line, _ := t.lines.Of(row)
		j, ok := at[line]
		if !ok {
			j = len(lines)
			at[line] = j
			lines, counts = append(lines, line), append(counts, 0)
		}
		counts[j]++
	}
	return lines, counts, inBuffer
}

// batch looks rows up in the constant CPU buffer first, and then lines in the GPU tier.
func (t *prediction) batch(i int) (*virtual.Looked, error) {
	at := i + t.warm // among those that the tier sees
	b, err := t.Job.Accesses.Get(t.ctx, at)
	if err != nil {
		return nil, err
	}
	for ; t.Job.Config.Window > 0 && t.heard <= at+t.Job.Config.Window; t.heard++ {
		coming, err := t.Job.Accesses.Get(t.ctx, t.heard)
		if err != nil {
			return nil, err
		}
		lines, _, _ := t.linesOf(coming.Rows, coming.Ranks)
		t.dir.Announce(lines)
	}
	t.dir.NextBatch()
	return t.Job.Parts(b, func(rows, ranks []int64) (p cost.Part, read []int64) {
		lines, counts, inBuffer := t.linesOf(rows, ranks)
		out, before := make([]policy.Answer, len(lines)), t.dir.Stats()
		t.dir.Access(lines, out)
		for j, x := range out {
			if x.Hit {
				p.NGPU += counts[j]
				continue
			}
			p.NMiss += counts[j]
			read = append(read, lines[j])
		}
		st := t.dir.Stats()
		p.NCPU, p.Fills = inBuffer, st.Inserted-before.Inserted
		p.Evicted, p.Bypassed = st.Evicted-before.Evicted, st.Bypassed-before.Bypassed
		p.Lines, p.Missed = int64(len(lines)), int64(len(read))
		return p, read
	}), nil
}
