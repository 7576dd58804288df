package planner

import (
	"helios/sched/virtual"
)

// prepare fills in what comes before the first epoch. A mini-batch is sampled in sample seconds.
func (j *Job) prepare(p *Plan, sample float64) {
	slot := int64(j.Layout.LBABytes) * int64(j.Layout.LBAsPerRow) / int64(j.Layout.RowsPerLBA)
	stored := j.Accesses.Rows * slot
	read, write := virtual.StripedRates(j.Machine)
	p.Preparation.Load = float64(stored) / write
	p.Disk = map[string]int64{"features": stored, "topology": j.Accesses.Topology}
	j.predict.Prepare(p, Before{Stored: stored, Read: read, Write: write, Sample: sample})
}

// memory fills in what lies where.
func (j *Job) memory(p *Plan) {
	p.GPUMemory = map[string]int64{"rows": p.GPUCacheBytes, "mini-batches": j.slots(),
		"model": 4 * j.kernels.GradientBytes()}
	p.CPUMemory = map[string]int64{"topology": j.Accesses.Topology, "rows": p.CPUCacheBytes}
	if a := j.Accesses; a.typed != nil {
		delete(p.CPUMemory, "topology")
		for r, n := range a.relationEdges {
			offsets, ids := edgesBytes(a.typed.Schema, r, n)
			p.CPUMemory["offsets"] += offsets
			p.CPUMemory["ids"] += ids
		}
	}
	j.predict.Memory(p)
	if j.Options.RowType.Scaled() {
		p.CPUMemory["scales"] = 4 * j.Accesses.Rows
	}
}
