package hier

import (
	"context"
	"errors"
	"helios/sched/tiers/hier/spec"
	"helios/sched/virtual"

	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// PlayMega plays epochs of a dataset's mega-batches as Run does, without evaluation, and returns
// the last of them.
func PlayMega(ctx context.Context, find virtual.Find, cfg plan.Config, in prepare.Inputs,
	hw cost.Hardware,
	obs report.Observer) (p *virtual.Played, err error) {
	v, err := virtual.Open(ctx, find, cfg, in, hw, obs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	t := v.Tiers.(*simulation)
	return t.playMega(ctx, func(i int) (*cost.Shape, error) { return t.shape(ctx, i) })
}

// playMega plays the epochs of Config over mega-batches. The SSDs' work in the last one is that of
// its mega-batches, though the first of them was read in the epoch before.
func (t *simulation) playMega(ctx context.Context, shape func(i int) (*cost.Shape,
	error)) (p *virtual.Played,
	err error) {
	v, m := t.Player, t.Player.Machine.Model
	for epoch := range v.Config.Epochs {
		key := v.Config.SampleEpoch(epoch)
		order := t.orderOf(key)
		pass, sum := virtual.NewPass(v, "plan", order.Len(), true), report.Partial{}
		pass.Epoch = epoch
		pass.First, pass.End = v.Hardware.Limit(pass.End)
		v.Source = virtual.Part{Key: key, N: pass.End, Order: order.Order}
		t.info = spec.MegaInfo{PagesOn: t.info.PagesOn, StaticBytes: t.info.StaticBytes}
		p = &virtual.Played{}
		pass.After = func(b *virtual.Batch) {
			virtual.Count(&sum, b)
			p.Ends = append(p.Ends, float64(v.Machine.Sim.Now()-pass.Began)/1e9)
		}
		pass.Shape = shape
		crossed, copied := m.Ingress.Bytes(), v.Machine.CopySeconds()
		if err := t.Pass(ctx, pass, &sum, true, nil); err != nil {
			return nil, err
		}
		p.Epoch = pass.Result(sum, epoch, v.RowBytes)
		p.Batches, p.Info.Mega = t.orderOf(key).Len(), t.describe(&v.Config, t.parts, t.onGPU)
		p.LinkSeconds = float64(m.Ingress.Time(m.Ingress.Bytes()-crossed)) / 1e9
		p.CopySeconds = v.Machine.CopySeconds() - copied
		for i := range m.SSDs() {
			if sum.Commands > 0 {
				p.SSDSeconds = max(p.SSDSeconds, float64(sum.Commands)/float64(m.SSDs())/
					m.BoundOf(i, sum.BytesSSD/sum.Commands))
			}
		}
	}
	p.PerSSD = v.Io().SSDs
	return p, v.Conserved()
}
