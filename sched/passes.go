package sched

import (
	"context"
	"fmt"
	"time"

	"helios/internal/errs"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/tiers"
)

// resumeWithin lets a run resume a checkpoint within the parts of the graph that it was made in, if
// in any.
func resumeWithin(c *plan.Config, path string, was *engine.PartPrint) error {
	if resume := tiers.Of(c).Run.Resume; resume != nil {
		return resume(c, path, was)
	}
	if was != nil {
		return errs.New(errs.Usage,
			"checkpoint %s is of a run that samples within mega-batches, and %v %s samples the whole graph; give the mode that it had, or another folder for {checkpoint}",
			path, errs.Key("mode"), c.Mode)
	}
	return nil
}

// settleParts holds the parts of a run that is resumed against the checkpoint's, and notes those of
// a new one.
func (t *trainer) settleParts(resumed bool) error {
	m, ok := t.e.Tiers.(engine.PartSampler)
	if !ok {
		return nil
	}
	is, was := m.Print(), t.state.Print.Mega
	if resumed && (was == nil || is.Key != was.Key || is.Parts != was.Parts) {
		return errs.New(errs.Usage,
			"checkpoint %s is of a graph in other parts than those in %s; give the folder and the options that it had (%v, %v, %v, %v), or another folder for {checkpoint}",
			t.path, m.Folder(), errs.Key("parted"), errs.Key("parts"),
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
func (t *trainer) choosePasses(ctx context.Context, p *engine.Pass, changed func()) error {
	m, ok := t.e.Tiers.(engine.PartSampler)
	if !ok {
		return nil
	}
	n := m.Unmeasured(p)
	if n == 0 {
		return nil
	}
	if t.e.others != nil {
		return errs.New(errs.Capability,
			"%v auto: several processes would each choose for themselves; give a number",
			errs.Key("passes"))
	}
	of := max(t.cfg.Shards, 1)
	p.End = n / of * of // whole steps
	switch {
	case p.End == 0:
		return errs.New(errs.Usage,
			"%v auto: the first mega-batch has %d mini-batches, and a step of %v %d goes beyond them, so that no pass can be measured; lower %v, or give a number",
			errs.Key("passes"), n, errs.Key("shards"), of, errs.Key("shards"))
	case p.First >= p.End:
		return errs.New(errs.Usage,
			"%v auto: the checkpoint is behind the first pass, which is what tells the number, and holds none; give a number",
			errs.Key("passes"))
	}
	begin, before := time.Now(), p.Prepared
	from := p.First
	// Before a checkpoint can be saved there: it has to hold the choice.
	measured := func() {
		took := time.Since(begin) - (p.Prepared - before)
		m.Choose(took * time.Duration(n) / time.Duration(p.End-from))
		t.state.Print.Mega = m.Print()
	}
	after := p.After
	p.After = func(index int) error {
		if index+1 == p.End {
			measured()
		}
		return after(index)
	}
	err := t.e.Run(ctx, p)
	p.After, p.End = after, 0
	if err != nil {
		return err
	}
	p.Order = t.e.Tiers.Shuffled(nil, p.Epoch)
	changed()
	return nil
}
