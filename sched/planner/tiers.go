package planner

import (
	"context"

	"helios/cache"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/virtual"
)

// System is a way to keep rows, as a plan foresees it.
type System struct {
	// New makes what foresees a plan's run.
	New func(j *Job) Tiers
	// Simulate plays it.
	Simulate *virtual.System
	// Hotness ranks a dataset's rows where tiers place them by something of their own; "": the
	// configuration says.
	Hotness string
	// Refuse says of which configurations there is no plan; nil: there is one of all.
	Refuse func(c *plan.Config) error
	// Dataset gives what a plan has to know of a dataset before it is played; nil: samples of it.
	Dataset func(c plan.Config, in prepare.Inputs) *Accesses
	// Directory is the figure of a profile for lookups by the CPU, and its name;
	// nil: the CPU does not.
	Directory func(c *plan.Config, p *hardware.Profile) (name string, figure *hardware.Figure)
}

// Find finds the system of a configuration's runs.
type Find func(c *plan.Config) *System

// Simulation finds how the virtual clock plays a configuration.
func (f Find) Simulation(c *plan.Config) *virtual.System { return f(c).Simulate }

// of is f's system of a configuration.
func (f Find) of(c *plan.Config) (*System, error) {
	if f == nil {
		return nil, errs.New(errs.Failed, "a plan knows of no system; this is a bug")
	}
	return f(c), nil
}

// Tiers foresee a run's tiers. Base answers all that they need not decide.
type Tiers interface {
	// Open completes the job's work, of which n batches are played, with a source of batches.
	Open(ctx context.Context, n int) error
	// Play plays it.
	Play(ctx context.Context) (*virtual.Played, error)

	// SlotBytes is the GPU memory that batches of n rows take in so many slots, beside
	// prepare.Frontier.BatchBytes.
	SlotBytes(slots, n int64) int64
	// DirectoryBytes is the GPU memory of the directory of a tier of so many bytes.
	DirectoryBytes(bytes int64) (int64, error)
	// GPUShare is the share of the GPU tier in a budget for both tiers.
	GPUShare(all int64) int64
	// CheckSizes refuses tiers that are too large to be played.
	CheckSizes() error

	// Bounds are the least and the most batches that are played where no number is given, and the
	// most rows of them.
	Bounds() (least, most, rows int)
	// Beyond is the number of batches that are played beside those that count.
	Beyond() int
	// Shorten returns how many of n batches are played.
	Shorten(n int) int
	// Pace returns the range of n batches that give the pace of an epoch: behind from, up to to.
	Pace(n int) (from, to int)

	// Prepare fills in what comes before the first epoch, Memory what lies where.
	Prepare(p *Plan, b Before)
	Memory(p *Plan)
	Describe(p *Plan)
}

// Before has what preparing a run takes.
type Before struct {
	Stored      int64   // bytes of all rows on the SSDs
	Read, Write float64 // bytes a second of the SSDs
	Sample      float64 // seconds, of a mini-batch
}

// Base is the part of foreseen tiers that most of them have alike.
type Base struct{ Job *Job }

// Open implements Tiers.
func (b *Base) Open(context.Context, int) error {
	b.Job.Work.Tiers, b.Job.Work.Draw = b.Job.Sizes, b.Job.Accesses.Get
	return nil
}

// Play implements Tiers.
func (b *Base) Play(ctx context.Context) (*virtual.Played, error) {
	return virtual.Play(ctx, b.Job.Options.Find.Simulation, b.Job.Work, b.Job.Options.Hardware)
}

// SlotBytes implements Tiers.
func (b *Base) SlotBytes(int64, int64) int64 { return 0 }

// DirectoryBytes implements Tiers.
func (b *Base) DirectoryBytes(int64) (int64, error) { return 0, nil }

// GPUShare implements Tiers.
func (b *Base) GPUShare(all int64) int64 { return all }

// CheckSizes implements Tiers.
func (b *Base) CheckSizes() error { return nil }

// Bounds implements Tiers.
func (b *Base) Bounds() (least, most, rows int) { return leastBatches, mostBatches, playRows }

// Beyond implements Tiers: the last batches find nothing behind them to wait for.
func (b *Base) Beyond() int { return b.Job.schedule().Credits }

// Shorten implements Tiers.
func (b *Base) Shorten(n int) int { return n }

// Pace implements Tiers. Of the last batches, as many as are in flight at once, the rows came while
// those before trained, and none came beside them.
func (b *Base) Pace(n int) (from, to int) {
	if to = n - 1 - b.Job.schedule().Credits; to < 1 {
		return -1, n - 1
	}
	return to / 3, to
}

// Memory implements Tiers.
func (b *Base) Memory(p *Plan) { p.GPUMemory["index"] = cache.IndexBytes(b.Job.Accesses.Rows) }

// Describe implements Tiers.
func (b *Base) Describe(*Plan) {}

// FillSeconds is the time to read so many rows into the tiers.
func (j *Job) FillSeconds(rows int64) float64 {
	return float64(rows) / j.Machine.Bound(int64(j.Layout.ReadBytes()))
}

// HotnessSeconds is the time to find the hottest rows.
func (j *Job) HotnessSeconds(sample float64) float64 {
	both := j.Sizes.GPURows + j.Sizes.CPURows
	if both <= 0 || both >= j.Accesses.Rows {
		return 0
	}
	switch j.Config.Hotness {
	case plan.HotnessPresample, plan.HotnessForesight:
		return sample * float64(j.Accesses.Batches*j.Config.Presample)
	}
	// reads the lists once, or some times
	return float64(j.Accesses.Topology) / (j.Options.Hardware.Profile.CPU.MemoryGBs.Value * 1e9)
}
