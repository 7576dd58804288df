package packs

import (
	"helios/cache/packed"
	"helios/internal/hostcpu"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// Epochs returns the sample epochs first to end-1 of the pack that has one of them: those that
// training begins with, or those of a refresh.
func Epochs(c *plan.Config, sampleEpoch int) (first, end int) {
	n := c.SampleEpochs
	if n == 0 {
		n = c.Epochs
	}
	if sampleEpoch < n || c.Refresh == 0 {
		return 0, n
	}
	first = n + (sampleEpoch-n)/c.Refresh*c.Refresh
	return first, first + c.Refresh
}

// Config sets the limits of packing beside so many rows in memory, on SSDs with LBAs of lbaBytes.
func Config(s *prepare.Sampling, hot, lbaBytes int64) packed.Config {
	return packed.Config{
		Rows: s.Rows, RowBytes: s.RowBytes, LBABytes: lbaBytes, Hot: hot,
		Budget: s.Config.DiskBudget.Of(s.Rows * s.RowBytes), Segment: s.Config.Segment,
		Seed: s.Config.Seed, Workers: hostcpu.Count(),
		Progress: func(step string, done, of int) { s.Observer.TellStep(step, done, of) },
	}
}
