package dynamic

import (
	"context"
	"fmt"
	"helios/cache"
	"helios/cache/policy"
	"helios/internal/hardware"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
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
type prediction struct{ planner.Base }

// Open implements Tiers.
func (t *prediction) Open(ctx context.Context, n int) error {
	j := t.Job
	j.Warm = t.warmUp()
	j.Work.Warm = j.Warm
	return t.Base.Open(ctx, n)
}

// SlotBytes implements Tiers.
func (t *prediction) SlotBytes(slots, n int64) int64 {
	if !t.onGPU() {
		return 0
	}
	return slots*n*(cache.GPUTicketBytes-prepare.BucketBytes)*9/8 +
		cache.GPUSetsWork(n, t.Job.Config.Window)
}

// GPUShare implements Tiers: both tiers get the same.
func (t *prediction) GPUShare(all int64) int64 {
	if t.Job.Config.CPUCache == (units.Budget{}) {
		return all
	}
	return all / 2
}

// Bounds implements Tiers.
func (t *prediction) Bounds() (least, limit, rows int) {
	least, limit, rows = t.Base.Bounds()
	if t.Job.Config.Accumulate > 0 {
		limit = planner.MostGroups
	}
	return least, limit, rows
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

// DirectoryBytes implements Tiers: the GPU memory that the directory of a tier of so many bytes
// takes.
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
