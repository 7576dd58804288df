package diskgnn

import (
	"context"
	"errors"
	"fmt"
	"helios/sched/tiers/static"
	"helios/sched/virtual"
	"math"
	"os"

	"helios/cache"
	"helios/cache/packed"
	"helios/gpuio"
	"helios/internal/des"
	"helios/sched/cost"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
	"helios/sched/tiers/diskgnn/spec"
)

// Packed mini-batches on the virtual clock. The sample epochs are sampled for real and laid out for
// real, so levels, pages and reads are those of a run whose pages are striped over the machine's
// SSDs; nothing is packed. Its times:
//
//   - Sampling: the kernels, the way to the CPU, and a core's copy to a file at cpu.gather_gbs, as
//     for superbatches.
//   - Planning takes one core cpu.inspect_ns for an access, as finding a superbatch's changes does;
//     a guess of the same kind of work.
//   - Packing reads all features once and writes all pages once, at the SSDs' bandwidths, reads
//     within the link's; or takes what one core needs to copy the rows at cpu.gather_gbs, where that
//     is longer.
//   - A mini-batch comes back as one of a superbatch; its pages are read as a set; its rows are
//     placed by the CPU, and gathered from the tiers and from the GPU's memory.
//
// Evaluation samples anew and reads rows, as over static tiers.

// Simulate is the system on the virtual clock.
var Simulate = virtual.System{New: func(v *virtual.Player) virtual.Tiers {
	t := &simulation{Simulation: static.Simulation{Base: virtual.Base{Player: v}}}
	t.Self = t
	return t
}, Refuse: virtual.RefuseTuning}

// simulation has packed mini-batches on the virtual clock, over static tiers.
type simulation struct {
	static.Simulation
	packs    []*simPack
	rows     gpuio.Layout // of the features
	info     spec.PackedInfo
	now      *simPack
	tiers    plan.TierSizes
	pages    []int64      // scratch
	shapeOf  packed.Shape // of pages of mini-batches that are drawn
	nextPage int64
	prepared int64 // ns
}

// simPack is a pack: sample epochs first to end-1.
type simPack struct {
	first, end, batches int // batches of an epoch
	shapes              []*cost.Shape
	plan                *packed.Plan
	file                *os.File
	layout              gpuio.Layout
	at                  packed.Batch
}

// Open implements Tiers: it samples and lays out the first pack.
func (t *simulation) Open(ctx context.Context, b plan.TierSizes) error {
	v := t.Player
	t.rows, t.tiers = v.Layout, b
	v.OnClose(func() (err error) {
		for _, p := range t.packs {
			err = errors.Join(err, p.file.Close())
		}
		return err
	})
	v.Machine.Gpu.Egress = des.NewLink(v.Machine.Sim, v.Hardware.Profile.PCIe.UVAGBs.Value*1e9, 0)
	p, err := t.pack(ctx, v.Config.SampleEpoch(0))
	if err != nil {
		return err
	}
	return t.hold(ctx, p)
}

// OpenWork implements Tiers: each mini-batch has pages of its own, which follow each other.
func (t *simulation) OpenWork(ctx context.Context, w *virtual.Work) (err error) {
	v := t.Player
	if t.shapeOf, err = packed.NewShape(v.RowBytes, int64(v.Layout.LBABytes)); err != nil {
		return err
	}
	t.rows, t.now = v.Layout, &simPack{}
	v.Machine.Restored, v.Paged = true, true
	v.Machine.Gpu.Egress = des.NewLink(v.Machine.Sim, v.Hardware.Profile.PCIe.UVAGBs.Value*1e9, 0)
	if v.Layout, err = gpuio.NewLayout(math.MaxInt64>>20, int(t.shapeOf.PageBytes),
		int(v.Layout.SSDs), int(v.Layout.LBABytes)); err != nil {
		return err
	}
	return t.Simulation.OpenWork(ctx, w)
}

// Find implements Tiers.
func (t *simulation) Find(_, ranks []int64, part *cost.Part) {
	t.Rank(ranks, part)
	rows := part.Count - part.NGPU - part.NCPU
	t.pages = t.pages[:0]
	for range (rows + t.shapeOf.RowsPerPage - 1) / t.shapeOf.RowsPerPage {
		t.pages = append(t.pages, t.nextPage)
		t.nextPage++
	}
	t.Player.Miss(t.pages, part)
	part.NMiss, part.Staged, part.Chunk = rows, rows, rows
}

// Before implements Tiers: the stack turns to the pages of an epoch, or to rows.
func (t *simulation) Before(ctx context.Context, _ *virtual.Pass, key int, train bool) error {
	if !train {
		return t.turnTo(nil)
	}
	pack, err := t.pack(ctx, key)
	if err != nil {
		return err
	}
	return t.turnTo(pack)
}

// Shape implements Tiers.
func (t *simulation) Shape(ctx context.Context, i int) (*cost.Shape, error) {
	if t.now == nil {
		return t.Simulation.Shape(ctx, i)
	}
	return t.shape(i)
}

// Describe implements Tiers.
func (t *simulation) Describe(r *report.RunInfo) {
	info := t.info
	r.Packed = &info
}

// pack returns the pack that has a sample epoch, and makes it where it is not there.
func (t *simulation) pack(ctx context.Context, epoch int) (*simPack, error) {
	v := t.Player
	for _, p := range t.packs {
		if p.first <= epoch && epoch < p.end {
			return p, nil
		}
	}
	p := &simPack{}
	p.first, p.end = packs.Epochs(&v.Config, epoch)
	if len(t.packs) > 0 {
		p.batches = t.packs[0].batches
	}
	begin := v.Machine.Sim.Now()
	err := t.layOut(ctx, p)
	v.Span("prepare", begin)
	t.prepared += v.Machine.Sim.Now() - begin
	t.info.Seconds = float64(t.prepared) / 1e9
	return p, err
}

// layOut samples a pack's epochs and plans its pages.
func (t *simulation) layOut(ctx context.Context, p *simPack) error {
	v := t.Player
	train, err := prepare.TrainSplit(v.In)
	if err != nil {
		return err
	}
	files, err := samples.Create(os.TempDir(), v.Rows, 0)
	if err != nil {
		return err
	}
	defer func() { _ = files.Close() }() // only read
	p.batches = prepare.Batches(len(train), v.Config.Batch)
	began := v.Machine.Sim.Now()
	accesses, err := t.sample(ctx, p, train, files)
	if err != nil {
		return err
	}
	sampled := v.Machine.Sim.Now()
	t.info.SampleSeconds += float64(sampled-began) / 1e9
	c := packs.Config(v.Sampling, t.tiers.GPURows+t.tiers.CPURows, int64(v.Layout.LBABytes))
	if len(t.packs) > 0 { // the tiers are filled, and a refresh has its share of the room
		_, all := packs.Epochs(&v.Config, 0)
		c.Budget = packs.Budget(c.Budget, p.end-p.first, all, v.Rows*v.RowBytes)
		if c.HotRows, err = t.packs[0].plan.Hot(); err != nil {
			return err
		}
	}
	if p.file, err = os.CreateTemp("", "helios-plan-*"); err != nil {
		return err
	}
	t.packs = append(t.packs, p)
	if err := os.Remove(p.file.Name()); err != nil {
		return err
	}
	r, err := packed.Build(ctx, files, c, p.file)
	if err != nil {
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return stopped
		}
		return err
	}
	if p.plan, err = packed.New("of the modelled run", p.file, r.Bytes); err != nil {
		return err
	}
	if p.layout, err = gpuio.NewLayout(r.Stats.Pages, int(r.Shape.PageBytes),
		int(v.Layout.SSDs), int(v.Layout.LBABytes)); err != nil {
		return err
	}
	v.Machine.Sim.After(int64(float64(accesses)*v.Hardware.Profile.CPU.InspectNS.Value), func() {})
	v.Machine.Sim.Run()
	planned := v.Machine.Sim.Now()
	t.info.PlanSeconds += float64(planned-sampled) / 1e9
	v.Machine.Sim.After(packing(v, r), func() {})
	v.Machine.Sim.Run()
	t.info.PackSeconds += float64(v.Machine.Sim.Now()-planned) / 1e9
	t.info.BytesRead += v.Rows * v.RowBytes
	t.info.BytesWritten += t.info.SamplesBytes + r.Bytes + r.Stats.Pages*r.Shape.PageBytes
	t.info.Add(r.Stats, r.Shape, p.end-p.first, r.Bytes)
	t.info.Budget = c.Budget
	return nil
}

// sample samples the epochs of a pack, and returns the number of accesses.
func (t *simulation) sample(ctx context.Context, p *simPack, train []int64, files *samples.Files) (
	accesses int64, err error) {
	v, mb := t.Player, t.Player.Batches[0]
	for e := p.first; e < p.end; e++ {
		order := v.Shuffled(train, e)
		for i := range p.batches {
			if err := prepare.Interrupted(ctx); err != nil {
				return 0, err
			}
			if err := v.SampleWhole(ctx, mb, e, i, order.Seeds(i)); err != nil {
				return 0, fmt.Errorf("batch %d: %w", i, err)
			}
			s, err := v.Keep(mb, files)
			if err != nil {
				return 0, fmt.Errorf("batch %d: %w", i, err)
			}
			s.Index, s.At = i, i
			p.shapes = append(p.shapes, s)
			accesses += s.HopEnd[len(s.HopEnd)-1]
			t.info.SamplesBytes += s.Saved
			playSampling(v, s)
			v.Observer.TellStep("sample for packing", len(p.shapes), (p.end-p.first)*p.batches)
		}
	}
	return accesses, nil
}

// packing is the time that writing a pack's pages takes.
func packing(v *virtual.Player, r *packed.Result) int64 {
	read, write := virtual.StripedRates(v.Machine.Model)
	rows := float64(r.Stats.CacheRows+r.Stats.ChunkRows) * float64(v.RowBytes)
	io := float64(v.Rows*v.RowBytes)/read + float64(r.Stats.Pages*r.Shape.PageBytes)/write
	return int64(1e9 * max(io, rows/(v.Hardware.Profile.CPU.GatherGBs.Value*1e9)))
}

// playSampling plays the sampling of a mini-batch and its way to a file.
func playSampling(v *virtual.Player, s *cost.Shape) {
	m := v.Machine
	m.SampleWhole(m.SuperS, s, func() {
		bytes, p := float64(s.Saved), m.Model.Profile
		m.Sim.After(p.PCIe.CopyNS.NS()+int64(bytes/p.PCIe.CopyGBs.Value)+
			int64(bytes/p.CPU.GatherGBs.Value), func() {})
	})
	m.Sim.Run()
}

// hold fills the tiers with a pack's hot rows. Later packs have the same.
func (t *simulation) hold(ctx context.Context, p *simPack) error {
	v := t.Player
	hot, err := p.plan.Hot()
	if err != nil {
		return err
	}
	v.Placement = cache.Ranks(hot, min(t.tiers.GPURows, int64(len(hot))))
	if err := t.Hold(t.rows.SSDs); err != nil {
		return err
	}
	if err := v.OpenStack(); err != nil {
		return err
	}
	v.Fill(ctx)
	return prepare.Interrupted(ctx)
}

// turnTo turns the stack to pages of a pack, or to rows where it is nil.
func (t *simulation) turnTo(p *simPack) error {
	v, l := t.Player, t.rows
	if p != nil {
		l = p.layout
	}
	t.now, v.Machine.Restored, v.Paged = p, p != nil, p != nil
	if l.Rows == 0 {
		return nil
	}
	return v.Turn(l)
}

// shape finds the places of the rows of a batch of the pack.
func (t *simulation) shape(i int) (*cost.Shape, error) {
	v, p := t.Player, t.now
	index := (v.Source.Key-p.first)*p.batches + i
	s := *p.shapes[index]
	b := &p.at
	if err := p.plan.Batch(index, b); err != nil {
		return nil, err
	}
	part := cost.Part{Count: int64(len(b.HotPos) + len(b.Pos)), NMiss: int64(len(b.Pos))}
	gpu := uint32(len(v.Placement.GPU))
	for _, r := range b.HotRank {
		if r < gpu {
			part.NGPU++
		} else {
			part.NCPU++
		}
	}
	if b.ReadPages > 0 {
		t.pages = t.pages[:0]
		for _, r := range b.Runs {
			for page := r.Page; page < r.Page+r.Pages; page++ {
				t.pages = append(t.pages, page)
			}
		}
		part.Reads = v.ReadsOf(t.pages)
		part.Staged = part.NMiss
		shared := uint32((b.ReadPages - b.ChunkPages) * p.plan.Shape().RowsPerPage)
		for _, place := range b.Slot {
			if place >= shared {
				part.Chunk++
			}
		}
	}
	s.Parts = []cost.Part{part}
	return &s, nil
}
