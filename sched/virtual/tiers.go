package virtual

import (
	"context"
	"errors"

	"helios/graph"
	"helios/internal/errs"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// System is a way to keep rows, as the virtual clock plays it.
type System struct {
	// New makes the tiers of a run. They hold nothing yet.
	New func(v *Player) Tiers
	// Refuse says of which configurations the clock has no times; nil: it plays all.
	Refuse func(c *plan.Config) error
}

// Find finds the system of a configuration's runs.
type Find func(c *plan.Config) *System

// Tiers are the tiers of a modelled run: mini-batches are looked up in them for real, and take time
// on the model. Base answers all that tiers need not decide.
type Tiers interface {
	// Open plays what comes before the first epoch: it places rows in tiers of b's sizes, opens the
	// I/O stack and fills the tiers.
	Open(ctx context.Context, b plan.TierSizes) error
	// OpenWork opens, in its place, tiers for mini-batches that are drawn, and PlayWork plays
	// these.
	OpenWork(ctx context.Context, w *Work) error
	PlayWork(ctx context.Context, w *Work) (*Played, error)
	// Made looks the rows of a drawn mini-batch up; Find looks up those of a part.
	Made(ctx context.Context, w *Work, i int) (*cost.Shape, error)
	Find(rows, ranks []int64, part *cost.Part)

	// Order is the order of an epoch of training under the number of its samples.
	Order(train []int64, sampleEpoch int) prepare.Order
	// Before comes before a pass, whose sampling has a key.
	Before(ctx context.Context, p *Pass, key int, train bool) error
	// Pass plays a pass; walk plays the batches of a part of it.
	Pass(ctx context.Context, p *Pass, sum *report.Partial, train bool,
		walk func(ctx context.Context) error) error
	// Shape samples a batch and looks its rows up.
	Shape(ctx context.Context, i int) (*cost.Shape, error)

	// Announce tells the tiers of a batch that the window has sampled.
	Announce(ctx context.Context, mb *graph.MiniBatch) error
	// NextBatch tells them that a batch is looked up, Look looks a part of it up, and Looked ends
	// that.
	NextBatch()
	Look(ctx context.Context, mb *graph.MiniBatch, from int64, part *cost.Part) error
	Looked(s *cost.Shape, i int)
	// Staged reports whether rows are read beside their places, and put there part after part.
	Staged() bool

	// GPUBytes and CPUBytes are the sizes of the tiers. Describe says in results what they are.
	GPUBytes() int64
	CPUBytes() int64
	Describe(r *report.RunInfo)
}

// Base is the part of modelled tiers that most of them have alike.
type Base struct {
	Player *Player
	Self   Tiers // that have it
}

// Order implements Tiers.
func (b *Base) Order(train []int64, sampleEpoch int) prepare.Order {
	return b.Player.Shuffled(train, sampleEpoch)
}

// Before implements Tiers: batches that are not played fill the tiers.
func (b *Base) Before(ctx context.Context, p *Pass, _ int, _ bool) error {
	v := b.Player
	for i := range p.First {
		if err := prepare.Interrupted(ctx); err != nil {
			return err
		}
		read := append(v.perSSD[:0:0], v.perSSD...)
		if _, err := b.Self.Shape(ctx, i); err != nil {
			return err
		}
		v.perSSD = read
	}
	return nil
}

// Pass implements Tiers.
func (b *Base) Pass(ctx context.Context, p *Pass, _ *report.Partial, _ bool,
	walk func(ctx context.Context) error) error {
	p.Begin()
	return walk(ctx)
}

// Shape implements Tiers.
func (b *Base) Shape(ctx context.Context, i int) (*cost.Shape, error) {
	return b.Player.shape(ctx,
		i)
}

// Announce implements Tiers.
func (b *Base) Announce(context.Context, *graph.MiniBatch) error { return nil }

// NextBatch implements Tiers.
func (b *Base) NextBatch() {}

// Look implements Tiers.
func (b *Base) Look(context.Context, *graph.MiniBatch, int64, *cost.Part) error {
	return errors.New("tiers that look nothing up were asked to; this is a bug")
}

// Find implements Tiers: no tier has a row.
func (b *Base) Find(rows, _ []int64, part *cost.Part) { b.Player.Miss(rows, part) }

// Looked implements Tiers.
func (b *Base) Looked(*cost.Shape, int) {}

// Staged implements Tiers.
func (b *Base) Staged() bool { return false }

// GPUBytes implements Tiers.
func (b *Base) GPUBytes() int64 { return int64(len(b.Player.Placement.GPU)) * b.Player.RowBytes }

// CPUBytes implements Tiers.
func (b *Base) CPUBytes() int64 { return int64(len(b.Player.Placement.CPU)) * b.Player.RowBytes }

// Describe implements Tiers.
func (b *Base) Describe(*report.RunInfo) {}

// RefuseTuning refuses a tuner of what is not sampled while it trains.
func RefuseTuning(cfg *plan.Config) error {
	if !cfg.Tuning() {
		return nil
	}
	return errs.New(errs.Capability,
		"%v virtual tunes runs whose mini-batches are sampled as they train; leave %v out, and play other values of %v or %v",
		errs.Key("clock"), errs.Key("tune"), errs.Key("prefetch-depth"), errs.Key("sm-budget"))
}
