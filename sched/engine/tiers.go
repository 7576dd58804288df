package engine

import (
	"context"
	"time"

	"helios/cuda"
	"helios/gpuio"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// System is a way to keep rows and to bring them to mini-batches, as an engine runs it.
type System struct {
	// New makes the tiers of an engine. They hold nothing yet.
	New func(e *Engine) (Tiers, error)
	// Prepares: something is laid out on disk before training begins.
	Prepares bool
	// Loads refuses a loader that hands mini-batches on; nil: there is one.
	Loads func(c *plan.Config) error
	// Resume lets a configuration resume a checkpoint that was made within such parts of the graph,
	// and sets what it leaves open; nil: mini-batches are sampled from the whole graph.
	Resume func(c *plan.Config, path string, was *PartPrint) error
}

// Tiers hold a run's rows, and bring those of a mini-batch into its feature tensor. Calls are for a
// run, a walk, a mini-batch or a part of one, never for a row. Base answers all that tiers need not
// decide.
type Tiers interface {
	// Place makes the tiers by engine.tiers and fills them, for which it opens the I/O stack. It
	// leaves the stack open for rows or lines as layout says, or closed where no batch will read.
	// After close it may be called again.
	Place(ctx context.Context) error
	// Close frees the tiers. Nothing may be in flight.
	Close() error
	Layout() gpuio.Layout
	// Credit adds a feature tensor for a mini-batch in flight.
	Credit(x cuda.Growable) error
	// Begin makes the stages of a walk.
	Begin(w *Walk) Stages
	// GPUBytes and CPUBytes are the sizes of the tiers. Describe says in results what they are.
	GPUBytes() int64
	CPUBytes() int64
	Describe(r *report.RunInfo)

	During
	Limits
}

// During has what tiers do around walks.
type During interface {
	// Shuffled is the order of an epoch of training under the number of its samples.
	Shuffled(train []int64, sampleEpoch int) prepare.Order
	// Prepare comes before a walk from p.first on, and returns where that walk has to end, at the
	// latest at end.
	Prepare(ctx context.Context, p *Pass, end int) (int, error)
	// Lookahead is the number of batches that must have been sampled beyond the one that is looked
	// up. Forget drops what the tiers know of these: they will be sampled again.
	Lookahead() int
	Forget()
	// Drain waits for what a walk left in flight outside of its slots. Settle then ends what it
	// left in the tiers.
	Drain(rd context.Context) error
	Settle() error
	// Beside is the time of operators of the tiers outside of walks, since the run began.
	Beside() report.StageSeconds
}

// Limits has what tiers ask of a run, and what they lack.
type Limits interface {
	// BatchBytes is the device memory that batches of so many rows take beside their feature
	// tensors and lookups, and the number of batches that are sampled at once.
	BatchBytes(rows int64) (bytes, samples int64)
	// Fixed reports whether the CPU tier takes the rows that the GPU tier gives back.
	Fixed() bool
	// Places reports whether a consumer's memory may take a feature tensor's place.
	Places() bool
	// Pages names what is read in place of rows and always has checksums; "": nothing is.
	Pages() string
	// HasEpoch refuses an epoch of training that the tiers have no mini-batches of.
	HasEpoch(epoch int) error
	// Tunes reports whether an operator's SMs change anything.
	Tunes(op string) bool
}

// Base is the part of tiers that most of them have alike. Those that differ say so themselves.
type Base struct{ Engine *Engine }

// Layout implements Tiers.
func (b *Base) Layout() gpuio.Layout { return b.Engine.Store.Layout }

// Credit implements Tiers: a batch has a feature tensor from its first sample on.
func (b *Base) Credit(x cuda.Growable) error {
	s, err := b.Engine.NewSlot()
	if err == nil {
		s.Own = x
	}
	return err
}

// GPUBytes implements Tiers.
func (b *Base) GPUBytes() int64 { return int64(len(b.Engine.Placement.GPU)) * b.Engine.RowBytes }

// CPUBytes implements Tiers.
func (b *Base) CPUBytes() int64 { return int64(len(b.Engine.Placement.CPU)) * b.Engine.RowBytes }

// Describe implements Tiers.
func (b *Base) Describe(*report.RunInfo) {}

// Shuffled implements Tiers.
func (b *Base) Shuffled(train []int64, sampleEpoch int) prepare.Order {
	return b.Engine.Shuffled(train, sampleEpoch)
}

// Prepare implements Tiers.
func (b *Base) Prepare(_ context.Context, _ *Pass, end int) (int, error) { return end, nil }

// Lookahead implements Tiers.
func (b *Base) Lookahead() int { return 0 }

// Forget implements Tiers.
func (b *Base) Forget() {}

// Drain implements Tiers: all reads are those of the slots.
func (b *Base) Drain(context.Context) error { return nil }

// Settle implements Tiers.
func (b *Base) Settle() error { return nil }

// Beside implements Tiers.
func (b *Base) Beside() report.StageSeconds { return report.StageSeconds{} }

// BatchBytes implements Tiers.
func (b *Base) BatchBytes(int64) (bytes, samples int64) { return 0, int64(b.Engine.Plan.Credits) }

// Fixed implements Tiers.
func (b *Base) Fixed() bool { return false }

// Places implements Tiers.
func (b *Base) Places() bool { return true }

// Pages implements Tiers.
func (b *Base) Pages() string { return "" }

// HasEpoch implements Tiers.
func (b *Base) HasEpoch(int) error { return nil }

// Tunes implements Tiers.
func (b *Base) Tunes(string) bool { return true }

// Stages are the operators of a walk that depend on where rows live. Those of lookup and of
// submission run on one goroutine, in the order of batches and their parts, and those of completion
// and of gathering on another.
type Stages interface {
	// Room is called before a part of a batch's frontier that ends at so many rows is looked up.
	Room(s *Slot, rows int64) error
	// Announce tells the tiers of a batch that was sampled beyond the one that is looked up, by its
	// last part.
	Announce(ctx context.Context, last *Work) error
	// Lookup finds the rows of a part, and asks for those that are in no tier.
	Lookup(ctx context.Context, w *Work) error
	// Closes reports whether a set of reads ends with a batch.
	Closes(s *Set) bool
	// Submit sends the reads of a set out, and Complete waits for them.
	Submit(ctx context.Context, set *Set) error
	Complete(ctx context.Context, set *Set) error
	// Gather enqueues what brings a part's rows to their places.
	Gather(ctx context.Context, w *Work) error
	// Change enqueues what follows the gathers of a batch.
	Change(s *Slot) error
	// Placed comes when all rows of a batch are in their places.
	Placed(s *Slot) error
	// Release takes back what a batch that has trained held, its slot aside.
	Release(s *Slot)
}

// PartPrint is the part of a checkpoint's fingerprint that says within which parts of the graph
// mini-batches were sampled.
type PartPrint struct {
	Key    string `json:"key"` // of the parts
	Parts  int    `json:"parts"`
	Loaded int    `json:"parts_in_memory"`
	Passes int    `json:"passes"` // 0: not chosen yet
	Order  string `json:"part_order"`
}

// PartSampler are tiers whose mini-batches are sampled within parts of the graph.
type PartSampler interface {
	Print() *PartPrint
	// Folder is the folder of the parts.
	Folder() string
	// Unmeasured returns the number of mini-batches of an epoch's first parts where the run has yet
	// to choose how often each trains; 0: there is nothing to choose, or to train.
	Unmeasured(p *Pass) int
	// Choose chooses by how long those parts train once.
	Choose(train time.Duration)
}

// place decides where each row lives, by e.tiers, and fills the tiers from the SSDs. Where the
// device's memory does not suffice the GPU tier gets smaller.
func (e *Engine) place(ctx context.Context) error {
	err := e.Tiers.Place(ctx)
	if err != nil && prepare.Interrupted(ctx) == nil {
		return overdue(e.shrink(ctx, err))
	}
	return err
}

// Hooks are the engine's own steps in the choice of rows.
func (e *Engine) Hooks() prepare.Hooks {
	return prepare.Hooks{Measure: e.measured,
		Found: func(start time.Time) { e.Trace.Run("presample", start) }}
}

// Filled counts the time that filling the tiers took.
func (e *Engine) Filled(start time.Time) {
	e.Fill += time.Since(start)
	e.Trace.Run("fill tiers", start)
}
