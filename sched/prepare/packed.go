package prepare

import (
	"helios/cache/packed"
	"helios/internal/hostcpu"
)

// PackConfig is what mini-batches are laid out by beside so many rows in memory, on SSDs with LBAs
// of lbaBytes.
func (s *Sampling) PackConfig(hot, lbaBytes int64) packed.Config {
	return packed.Config{
		Rows: s.Rows, RowBytes: s.RowBytes, LBABytes: lbaBytes, Hot: hot,
		Budget: s.Config.DiskBudget.Of(s.Rows * s.RowBytes), Segment: s.Config.Segment,
		Seed: s.Config.Seed, Workers: hostcpu.Count(),
		Progress: func(step string, done, of int) { s.Observer.TellStep(step, done, of) },
	}
}
