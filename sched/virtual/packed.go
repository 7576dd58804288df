package virtual

import (
	"context"
	"errors"
	"fmt"
	"os"

	"helios/cache"
	"helios/cache/packed"
	"helios/cuda"
	"helios/gpuio"
	"helios/gpuio/iosim"
	"helios/graph"
	"helios/internal/des"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/packs"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/samples"
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

// laid is what a run with packed mini-batches has of them.
type laid struct {
	packs    []*vpack
	rows     gpuio.Layout // of the features
	info     report.PackedInfo
	now      *vpack
	tiers    plan.TierSizes
	adj      []byte
	pages    []int64 // scratch
	striped  []int64
	off      []int64
	prepared int64 // ns
}

// vpack is a pack: sample epochs first to end-1.
type vpack struct {
	first, end, batches int // batches of an epoch
	shapes              []*cost.Shape
	plan                *packed.Plan
	file                *os.File
	layout              gpuio.Layout
	at                  packed.Batch
}

// openPacked samples and lays out the first pack, and fills tiers of b's sizes.
func (v *run) openPacked(ctx context.Context, b plan.TierSizes) error {
	v.laid = &laid{rows: v.layout, tiers: b, off: make([]int64, v.layout.SSDs+1)}
	v.OnClose(func() (err error) {
		for _, p := range v.laid.packs {
			err = errors.Join(err, p.file.Close())
		}
		return err
	})
	v.m.gpu.egress = des.NewLink(v.m.sim, v.hw.Profile.PCIe.UVAGBs.Value*1e9, 0)
	p, err := v.pack(ctx, v.Config.SampleEpoch(0))
	if err != nil {
		return err
	}
	return v.hold(ctx, p)
}

// pack gives the pack that has a sample epoch, and makes it where it is not there.
func (v *run) pack(ctx context.Context, epoch int) (*vpack, error) {
	t := v.laid
	for _, p := range t.packs {
		if p.first <= epoch && epoch < p.end {
			return p, nil
		}
	}
	p := &vpack{}
	p.first, p.end = v.Config.PackEpochs(epoch)
	if len(t.packs) > 0 {
		p.batches = t.packs[0].batches
	}
	begin := v.m.sim.Now()
	err := v.layOut(ctx, p)
	v.span("prepare", begin)
	t.prepared += v.m.sim.Now() - begin
	t.info.Seconds = float64(t.prepared) / 1e9
	return p, err
}

// layOut samples a pack's epochs and plans its pages.
func (v *run) layOut(ctx context.Context, p *vpack) error {
	t := v.laid
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
	mb, began := v.mbs[0], v.m.sim.Now()
	var accesses int64
	for e := p.first; e < p.end; e++ {
		order := v.Shuffled(train, e)
		for i := range p.batches {
			if err := prepare.Interrupted(ctx); err != nil {
				return err
			}
			if err := v.SampleWhole(ctx, mb, e, i, order.Seeds(i)); err != nil {
				return fmt.Errorf("batch %d: %w", i, err)
			}
			s, err := save(v, mb, files)
			if err != nil {
				return fmt.Errorf("batch %d: %w", i, err)
			}
			s.Index, s.At = i, i
			p.shapes = append(p.shapes, s)
			accesses += s.HopEnd[len(s.HopEnd)-1]
			t.info.SamplesBytes += s.Saved
			playSampling(v, s)
			v.Observer.TellStep("sample for packing", len(p.shapes), (p.end-p.first)*p.batches)
		}
	}
	sampled := v.m.sim.Now()
	t.info.SampleSeconds += float64(sampled-began) / 1e9
	c := v.PackConfig(t.tiers.GPURows+t.tiers.CPURows, int64(v.layout.LBABytes))
	if len(t.packs) > 0 { // the tiers are filled, and a refresh has its share of the room
		_, all := v.Config.PackEpochs(0)
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
		int(v.layout.SSDs), int(v.layout.LBABytes)); err != nil {
		return err
	}
	v.m.sim.After(int64(float64(accesses)*v.hw.Profile.CPU.InspectNS.Value), func() {})
	v.m.sim.Run()
	planned := v.m.sim.Now()
	t.info.PlanSeconds += float64(planned-sampled) / 1e9
	v.m.sim.After(packing(v, r), func() {})
	v.m.sim.Run()
	t.info.PackSeconds += float64(v.m.sim.Now()-planned) / 1e9
	t.info.BytesRead += v.Rows * v.RowBytes
	t.info.BytesWritten += t.info.SamplesBytes + r.Bytes + r.Stats.Pages*r.Shape.PageBytes
	t.info.Add(r.Stats, r.Shape, p.end-p.first, r.Bytes)
	t.info.Budget = c.Budget
	return nil
}

// StripedRates returns the bytes a second that the SSDs of a machine read and write together in
// long requests, where each has an equal share, within what the link carries. SSDs of which nobody
// said a bandwidth bound nothing.
func StripedRates(m *iosim.Machine) (read, write float64) {
	link := m.Profile.PCIe.CopyGBs.Value * 1e9
	read, write = link, link
	for _, x := range m.Models() {
		for _, r := range []struct {
			mbs float64
			to  *float64
		}{{x.Read.Bandwidth.MBs, &read}, {x.Write.Bandwidth.MBs, &write}} {
			if r.mbs > 0 {
				*r.to = min(*r.to, float64(m.SSDs())*r.mbs*1e6)
			}
		}
	}
	return read, write
}

// packing is how long a pack's pages take to be written.
func packing(v *run, r *packed.Result) int64 {
	read, write := StripedRates(v.m.m)
	rows := float64(r.Stats.CacheRows+r.Stats.ChunkRows) * float64(v.RowBytes)
	io := float64(v.Rows*v.RowBytes)/read + float64(r.Stats.Pages*r.Shape.PageBytes)/write
	return int64(1e9 * max(io, rows/(v.hw.Profile.CPU.GatherGBs.Value*1e9)))
}

// save keeps the frontier of a sampled batch in files; of its blocks only the size is needed.
func save(v *run, mb *graph.MiniBatch, to *samples.Files) (*cost.Shape, error) {
	t := v.laid
	adj, n, err := mb.Save(t.adj[:0], func(b cuda.Buffer, bytes int64) ([]byte, error) {
		return b.Bytes()[:bytes], nil
	})
	if err != nil {
		return nil, err
	}
	t.adj = adj
	s, was := v.m.shapeOf(mb), to.Bytes()
	nodes := hostmem.View[int64](mb.Nodes.Bytes())
	if v.Config.Method().WholeLists {
		s.CountLists(v.Topology.Indptr, nodes)
	}
	err = to.Append(nodes[:n], nil)
	s.Saved = to.Bytes() - was + int64(len(adj))
	return &s, err
}

// playSampling plays the sampling of a mini-batch and its way to a file.
func playSampling(v *run, s *cost.Shape) {
	m := v.m
	m.sampleWhole(m.superS, s, func() {
		bytes, p := float64(s.Saved), m.m.Profile
		m.sim.After(p.PCIe.CopyNS.NS()+int64(bytes/p.PCIe.CopyGBs.Value)+
			int64(bytes/p.CPU.GatherGBs.Value), func() {})
	})
	m.sim.Run()
}

// hold fills the tiers with a pack's hot rows. Later packs have the same.
func (v *run) hold(ctx context.Context, p *vpack) error {
	t := v.laid
	hot, err := p.plan.Hot()
	if err != nil {
		return err
	}
	v.placement = cache.Ranks(hot, min(t.tiers.GPURows, int64(len(hot))))
	// The tiers hold no features here: a byte for each row is enough for lookups.
	if v.hetero, err = cache.NewHetero(v.Device, v.Rows, 1, int(t.rows.SSDs),
		v.placement); err != nil {
		return err
	}
	v.OnClose(v.hetero.Close)
	if v.buckets, err = v.hetero.NewBuckets(); err != nil {
		return err
	}
	v.OnClose(v.buckets.Close)
	if err := v.openStack(); err != nil {
		return err
	}
	v.fill(ctx)
	return prepare.Interrupted(ctx)
}

// turnTo has the stack read pages of a pack, or rows where it is nil.
func (v *run) turnTo(p *vpack) error {
	l := v.laid.rows
	if p != nil {
		l = p.layout
	}
	v.laid.now, v.m.planned, v.paged = p, p != nil, p != nil
	if l.Rows == 0 {
		return nil
	}
	return v.turn(l)
}

// turn has the stack read what lies as l says.
func (v *run) turn(l gpuio.Layout) error {
	if v.layout == l && v.stack != nil {
		return nil
	}
	v.layout = l
	return v.openStack()
}

// packedShape says where the rows of a batch of the pack are.
func (v *run) packedShape(i int) (*cost.Shape, error) {
	t, p := v.laid, v.laid.now
	index := (v.src.key-p.first)*p.batches + i
	s := *p.shapes[index]
	b := &p.at
	if err := p.plan.Batch(index, b); err != nil {
		return nil, err
	}
	part := cost.Part{Count: int64(len(b.HotPos) + len(b.Pos)), NMiss: int64(len(b.Pos))}
	gpu := uint32(len(v.placement.GPU))
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
		if cap(t.striped) < len(t.pages) {
			t.striped = make([]int64, len(t.pages)+len(t.pages)/4)
		}
		out := t.striped[:len(t.pages)]
		stripe(t.pages, out, t.off)
		part.Reads, _, _ = v.commands(out, t.off)
		part.Staged = part.NMiss
		shared := uint32((b.ReadPages - b.ChunkPages) * p.plan.Shape().RowsPerPage)
		for _, at := range b.Slot {
			if at >= shared {
				part.Chunk++
			}
		}
	}
	s.Parts = []cost.Part{part}
	return &s, nil
}
