package sched

import (
	"context"
	"fmt"
	"time"

	"helios/internal/errs"
	"helios/sched/plan"
)

// megaPrint is what mega-batches decide of a run's parameters.
type megaPrint struct {
	Key    string `json:"key"` // of the parts
	Parts  int    `json:"parts"`
	Loaded int    `json:"parts_in_memory"`
	Passes int    `json:"passes"` // 0: not chosen yet
	Order  string `json:"part_order"`
}

func (t *megaTiers) print() *megaPrint {
	return &megaPrint{Key: t.parts.info.Key, Parts: t.parts.Parts, Loaded: t.room.Loaded,
		Passes: t.passes, Order: t.e.Config.PartOrder}
}

// resumeMega lets a configuration go on with the checkpoint's mega-batches: what it leaves open is
// as it was.
func resumeMega(c *plan.Config, path string, was *megaPrint) error {
	refuse := func(key string, is, old any) error {
		return errs.New(errs.Usage,
			"checkpoint %s was made with %v %v, this run has %v; give the same, or another folder for option checkpoint",
			path, errs.Key(key), old, is)
	}
	switch {
	case was == nil && c.MegaBatched():
		return errs.New(errs.Usage,
			"checkpoint %s is of a run that samples the whole graph, and %v %s samples within mega-batches; give another mode, or another folder for option checkpoint",
			path, errs.Key("mode"), c.Mode)
	case was == nil:
		return nil
	case !c.MegaBatched():
		return errs.New(errs.Usage,
			"checkpoint %s is of a run that samples within mega-batches, and %v %s samples the whole graph; give the mode that it had, or another folder for option checkpoint",
			path, errs.Key("mode"), c.Mode)
	case c.PartOrder != was.Order:
		return refuse("part-order", c.PartOrder, was.Order)
	case c.Passes != plan.PassesAuto && was.Passes != 0 && c.Passes != was.Passes:
		return refuse("passes", c.Passes, was.Passes)
	}
	if n := c.MegaBatch.Of(was.Parts); n != 0 && n != was.Loaded {
		return refuse("megabatch", n, was.Loaded)
	}
	c.MegaBatch = plan.MegaSize{Parts: was.Loaded}
	if was.Passes != 0 {
		c.Passes = was.Passes
	}
	return nil
}

// settleMega holds the parts of a run that goes on against the checkpoint's, and notes those of a
// new one.
func (t *trainer) settleMega(resumed bool) error {
	m, ok := t.e.features.(*megaTiers)
	if !ok {
		return nil
	}
	is, was := m.print(), t.state.Print.Mega
	if resumed && (was == nil || is.Key != was.Key || is.Parts != was.Parts) {
		return errs.New(errs.Usage,
			"checkpoint %s is of a graph in other parts than those in %s; give the folder and the options that it had (%v, %v, %v, %v), or another folder for option checkpoint",
			t.path, m.parts.info.Dir, errs.Key("parted"), errs.Key("parts"),
			errs.Key("partition"), errs.Key("static-nodes"))
	}
	t.state.Print.Mega = is
	return nil
}

// misplacedMega is misplaced for a run over mega-batches, whose epochs need not have equally many
// mini-batches; a step has so many of them.
func (st *state) misplacedMega(of int) string {
	steps := int64((st.Batch + of - 1) / of)
	for _, e := range st.Epochs {
		steps += int64((e.Batches + of - 1) / of)
	}
	if st.AdamStep != steps {
		return fmt.Sprintf("Adam step %d does not agree with %d steps of trained batches",
			st.AdamStep, steps)
	}
	return ""
}

// choosePasses lets a run of option passes auto train its first mega-batch once, and chooses by
// what that took how often each trains. The order of one pass is what any number of them begins
// with, up to the last whole step of that pass. changed is called when the pass has another order.
func (t *trainer) choosePasses(ctx context.Context, p *pass, changed func()) error {
	m, ok := t.e.features.(*megaTiers)
	if !ok || m.passes != 0 {
		return nil
	}
	if t.e.others != nil {
		return errs.New(errs.Capability,
			"%v auto: several processes would each choose for themselves; give a number",
			errs.Key("passes"))
	}
	o := m.orderOf(p.epoch)
	if len(o.First) == 0 {
		return nil
	}
	of, n := max(t.cfg.Shards, 1), o.First[0]
	p.end = n / of * of // whole steps
	switch {
	case p.end == 0:
		return errs.New(errs.Usage,
			"%v auto: the first mega-batch has %d mini-batches, and a step of %v %d goes beyond them, so that no pass can be measured; lower %v, or give a number",
			errs.Key("passes"), n, errs.Key("shards"), of, errs.Key("shards"))
	case p.first >= p.end:
		return errs.New(errs.Usage,
			"%v auto: the checkpoint is behind the first pass, which is what tells the number, and holds none; give a number",
			errs.Key("passes"))
	}
	begin, before := time.Now(), p.prepared
	from := p.first
	// Before a checkpoint can be saved there: it has to hold the choice.
	measured := func() {
		took := time.Since(begin) - (p.prepared - before)
		m.choosePasses(m.lastLoad, took*time.Duration(n)/time.Duration(p.end-from))
		t.state.Print.Mega = m.print()
	}
	after := p.after
	p.after = func(index int) error {
		if index+1 == p.end {
			measured()
		}
		return after(index)
	}
	err := t.e.run(ctx, p)
	p.after, p.end = after, 0
	if err != nil {
		return err
	}
	p.order = m.shuffled(nil, p.epoch)
	changed()
	return nil
}
