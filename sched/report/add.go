package report

import "helios/gpuio"

// counts are the figures that ranks count each for itself.
func (p *Partial) counts() []*int64 {
	return []*int64{&p.RowsGPU, &p.RowsCPU, &p.RowsSSD, &p.RowsChunk, &p.BytesSSD, &p.Commands,
		&p.Retries, &p.Timeouts, &p.Inserted, &p.Evicted, &p.Bypassed}
}

// AddRows adds the rows, commands and lines of another rank.
func (p *Partial) AddRows(x Partial) {
	from := x.counts()
	for i, n := range p.counts() {
		*n += *from[i]
	}
	p.Groups, p.Grouped = p.Groups+x.Groups, p.Grouped+x.Grouped
	if t := x.TopologyReads; t != nil {
		if p.TopologyReads != nil {
			sum := t.Add(*p.TopologyReads)
			t = &sum
		}
		p.TopologyReads = t
	}
}

// Since returns what of p came after base, in times as p has them.
func (p Partial) Since(base Partial) Partial {
	from := base.counts()
	for i, n := range p.counts() {
		*n -= *from[i]
	}
	p.Batches, p.Seeds = p.Batches-base.Batches, p.Seeds-base.Seeds
	p.Steps, p.NormSum, p.Clipped = p.Steps-base.Steps, p.NormSum-base.NormSum,
		p.Clipped-base.Clipped
	p.LossSum, p.Correct, p.Counted = p.LossSum-base.LossSum, p.Correct-base.Correct,
		p.Counted-base.Counted
	p.Mass -= base.Mass
	return p
}

// DropRows clears what AddRows adds.
func (p *Partial) DropRows() {
	for _, n := range p.counts() {
		*n = 0
	}
	p.Groups, p.Grouped, p.TopologyReads = 0, 0, nil
}

// AddReadStats adds up what reads took.
func AddReadStats(a, b gpuio.ReadStats) gpuio.ReadStats {
	a.Rows += b.Rows
	a.Bytes += b.Bytes
	a.Commands += b.Commands
	a.Retries += b.Retries
	a.Timeouts += b.Timeouts
	a.Submit += b.Submit
	a.Complete += b.Complete
	return a
}
