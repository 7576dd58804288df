package static

import (
	"context"
	"fmt"
	"helios/sched/virtual"

	"helios/cache"
	"helios/graph"
	"helios/internal/hostmem"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
)

// Simulate is the system on the virtual clock.
var Simulate = virtual.System{New: func(v *virtual.Player) virtual.Tiers {
	t := &Simulation{Base: virtual.Base{Player: v}}
	t.Self = t
	return t
}}

// Simulation has static tiers on the virtual clock. They hold no features: a byte for each row is
// enough for lookups.
type Simulation struct {
	virtual.Base
	hetero  *cache.Hetero
	buckets *cache.Buckets
	sizes   plan.TierSizes // of the tiers of drawn mini-batches
}

// Open implements Tiers.
func (t *Simulation) Open(ctx context.Context, b plan.TierSizes) error {
	v := t.Player
	if err := v.ChooseRows(ctx, b); err != nil {
		return err
	}
	if err := t.Hold(v.Layout.SSDs); err != nil {
		return err
	}
	if err := v.OpenStack(); err != nil {
		return err
	}
	v.Fill(ctx)
	if b.GPURows+b.CPURows == v.Rows { // every row is in a tier
		v.Machine.Stack = nil
	}
	return prepare.Interrupted(ctx)
}

// Hold makes the tiers hold the rows that are placed.
func (t *Simulation) Hold(ssds int32) (err error) {
	v := t.Player
	if t.hetero, err = cache.NewHetero(v.Device, v.Rows, 1, int(ssds), v.Placement); err != nil {
		return err
	}
	v.OnClose(t.hetero.Close)
	if t.buckets, err = t.hetero.NewBuckets(); err != nil {
		return err
	}
	v.OnClose(t.buckets.Close)
	return nil
}

// OpenWork implements Tiers.
func (t *Simulation) OpenWork(_ context.Context, w *virtual.Work) error {
	t.sizes = w.Tiers
	return t.Player.OpenStack()
}

// Find implements Tiers: the hottest rows are in the GPU tier and the next ones in the CPU tier.
func (t *Simulation) Find(rows, ranks []int64, part *cost.Part) {
	t.Rank(ranks, part)
	var read []int64
	for k, r := range ranks {
		if r >= t.sizes.GPURows+t.sizes.CPURows {
			read = append(read, rows[k])
		}
	}
	t.Player.Miss(read, part)
}

// Rank counts the rows that a tier has.
func (t *Simulation) Rank(ranks []int64, part *cost.Part) {
	for _, r := range ranks {
		switch {
		case r < t.sizes.GPURows:
			part.NGPU++
		case r < t.sizes.GPURows+t.sizes.CPURows:
			part.NCPU++
		}
	}
}

// Look implements Tiers.
func (t *Simulation) Look(ctx context.Context, mb *graph.MiniBatch, from int64,
	part *cost.Part) error {
	v, b := t.Player, t.buckets
	if err := t.hetero.Lookup(ctx, v.LookupS, mb.Nodes.Ptr(), from, part.Count, b); err != nil {
		return err
	}
	part.NGPU, part.NCPU, part.NMiss = b.NGPU, b.NCPU, b.NMiss
	if part.NMiss > 0 {
		if v.Machine.Stack == nil {
			return fmt.Errorf("%d rows are in no tier and no SSD is there", part.NMiss)
		}
		v.Read(hostmem.View[int64](b.MissRow.Bytes())[:part.NMiss], part)
	}
	return nil
}
