package planner

import (
	"fmt"
	"math"

	"helios/cache"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/virtual"
)

// prepare fills in what comes before the first epoch. A mini-batch is sampled in sample seconds.
func (j *job) prepare(p *Plan, sample float64) {
	hw := j.o.Hardware.Profile
	slot := int64(j.layout.LBABytes) * int64(j.layout.LBAsPerRow) / int64(j.layout.RowsPerLBA)
	stored := j.a.rows * slot
	read, write := virtual.StripedRates(j.m)
	p.Preparation.Load = float64(stored) / write
	filled := j.tiers.CPURows
	if !j.c.Dynamic() {
		filled += j.tiers.GPURows
	}
	p.Disk = map[string]int64{"features": stored, "topology": j.a.topology}
	if j.mega != nil {
		p.Preparation.Pack = float64(stored)/read + float64(j.disk)/write
		p.Preparation.Fill = float64(j.static) / read
		p.Disk["parts"] = j.disk
		return
	}
	static := !j.c.Planned() && !j.c.LaidOut()
	if j.c.Planned() {
		filled = 0
	}
	p.Preparation.Fill = float64(filled) / j.m.Bound(int64(j.layout.ReadBytes()))
	if both := j.tiers.GPURows + j.tiers.CPURows; static && both > 0 && both < j.a.rows {
		switch j.c.Hotness {
		case plan.HotnessPresample, plan.HotnessForesight:
			p.Preparation.Hotness = sample * float64(j.a.epoch*j.c.Presample)
		default: // reads the lists once, or some times
			p.Preparation.Hotness = float64(j.a.topology) / (hw.CPU.MemoryGBs.Value * 1e9)
		}
	}
	saved := savedBytes(&j.first.shape)
	if j.c.Planned() {
		size := min(j.o.Config.SuperbatchMost(j.a.epoch), j.a.epoch)
		p.Disk["superbatch"] = saved * int64(size)
	}
	if j.c.LaidOut() {
		first, end := j.c.PackEpochs(0)
		batches := int64(j.a.epoch) * int64(end-first)
		perBatch := float64(p.RowsSSD) / float64(j.a.epoch)
		pages := int64(math.Ceil(perBatch/float64(j.shape.RowsPerPage))) * batches
		size := pages * j.shape.PageBytes
		p.Disk["packed"], p.Disk["samples"] = size, saved*batches
		accesses := float64(len(j.first.rows)) * float64(batches)
		io := float64(stored)/read + float64(size)/write
		copied := perBatch * float64(batches) * float64(j.bytes) / (hw.CPU.GatherGBs.Value * 1e9)
		p.Preparation.Pack = sample*float64(batches) + accesses*hw.CPU.InspectNS.Value/1e9 +
			max(io, copied)
		if budget := j.c.DiskBudget.Of(j.a.rows * j.bytes); size > budget {
			p.Notes = append(p.Notes, fmt.Sprintf(
				"packed rows take %s, beyond %v of %s: a run shares pages among mini-batches and reads more than is said here",
				units.FormatBytes(size), errs.Key("disk-budget"), units.FormatBytes(budget)))
		}
	}
}

// memory fills in what lies where.
func (j *job) memory(p *Plan) {
	index := cache.IndexBytes(j.a.rows)
	p.GPUMemory = map[string]int64{"rows": p.GPUCacheBytes, "mini-batches": j.slots(),
		"model": 4 * j.kernels.GradientBytes()}
	p.CPUMemory = map[string]int64{"topology": j.a.topology, "rows": p.CPUCacheBytes}
	switch {
	case j.mega != nil:
		p.CPUMemory = map[string]int64{"mega-batches": j.memoryOf}
		p.CPUCacheBytes = j.memoryOf
	case j.c.Planned():
		p.CPUMemory["superbatch"] = 20 * int64(len(j.first.rows)) *
			int64(min(j.o.Config.SuperbatchMost(j.a.epoch), j.a.epoch))
	case j.onGPU():
		// The sizes were laid out before, so nothing fails here.
		p.GPUMemory["directory"], _ = j.directory(p.GPUCacheBytes)
		if j.tiers.CPURows > 0 {
			p.GPUMemory["directory"] += index
		}
	case j.c.Dynamic():
		p.CPUMemory["directory"] = 24*j.tiers.GPURows + cache.IndexBytes(j.tiers.CPURows)
	default:
		p.GPUMemory["index"] = index
	}
	if j.o.RowType.Scaled() {
		p.CPUMemory["scales"] = 4 * j.a.rows
	}
}
