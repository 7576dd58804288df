package virtual

import (
	"context"
	"errors"

	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// megaBatches plays epochs of mega-batches that are made up.
func (p *playing) megaBatches(ctx context.Context) (*Played, error) {
	v, w := p.run, p.w
	t := &mega{v: v, ordered: -1, rows: v.layout, parts: w.Parts, split: w.Parts.Train}
	if n := w.Config.Passes; n != plan.PassesAuto {
		t.passes = n
	}
	v.mega, v.hw.Batches, v.hw.Warm = t, w.Batches, 0
	if err := t.open(w.Tiers); err != nil {
		return nil, err
	}
	if err := t.fill(); err != nil {
		return nil, err
	}
	return t.playMega(ctx, func(i int) (*cost.Shape, error) {
		b, err := w.Source.Mega(len(t.order.IDs(i)))
		if err != nil {
			return nil, err
		}
		return p.settle(i, b)
	})
}

// PlayMega plays epochs of a dataset's mega-batches as Run does, without evaluation, and returns
// the last of them.
func PlayMega(ctx context.Context, cfg plan.Config, in prepare.Inputs, hw cost.Hardware,
	obs report.Observer) (p *Played, err error) {
	s, err := prepare.Open(ctx, cfg, in, obs)
	if err != nil {
		return nil, err
	}
	v := &run{Sampling: s, plan: s.Config.Schedule(), hw: hw}
	v.rec = recorder{v: v, Recording: prepare.Recording{Of: s}}
	defer func() { err = errors.Join(err, v.Close()) }()
	if err := v.open(ctx, in); err != nil {
		return nil, err
	}
	return v.mega.playMega(ctx,
		func(i int) (*cost.Shape, error) { return v.mega.shape(ctx, i) })
}

// playMega plays the epochs of Config over mega-batches. What the SSDs do in the last is what its
// mega-batches took, though the first of them was read in the epoch before.
func (t *mega) playMega(ctx context.Context, shape func(i int) (*cost.Shape, error)) (p *Played,
	err error) {
	v, m := t.v, t.v.m.m
	for epoch := range v.Config.Epochs {
		key := v.Config.SampleEpoch(epoch)
		order := t.orderOf(key)
		pass, sum := newPass(v, "plan", order.Len(), true), report.Partial{}
		pass.epoch = epoch
		pass.first, pass.n = v.hw.Limit(pass.n)
		v.src = source{key: key, n: pass.n, order: order.Order}
		t.info = report.MegaInfo{StaticBytes: t.info.StaticBytes}
		p = &Played{}
		pass.after = func(b *vbatch) {
			count(&sum, b)
			p.Ends = append(p.Ends, float64(v.m.sim.Now()-pass.start)/1e9)
		}
		pass.shape = shape
		crossed, copied := m.Ingress.Bytes(), v.m.copySeconds()
		if err := t.pass(ctx, pass, &sum, true); err != nil {
			return nil, err
		}
		p.Epoch = pass.result(sum, epoch, v.RowBytes)
		p.Batches, p.Mega = t.orderOf(key).Len(), t.describe(&v.Config)
		p.LinkSeconds = float64(m.Ingress.Time(m.Ingress.Bytes()-crossed)) / 1e9
		p.CopySeconds = v.m.copySeconds() - copied
		for i := range m.SSDs() {
			if sum.Commands > 0 {
				p.SSDSeconds = max(p.SSDSeconds, float64(sum.Commands)/float64(m.SSDs())/
					m.BoundOf(i, sum.BytesSSD/sum.Commands))
			}
		}
	}
	p.PerSSD = v.io().SSDs
	return p, v.conserved()
}
