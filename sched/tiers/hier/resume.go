package hier

import (
	"helios/internal/errs"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/tiers/hier/spec"
)

// Print implements PartSampler.
func (t *Tiers) Print() *engine.PartPrint {
	return &engine.PartPrint{Key: t.info.Key, Parts: t.parts.Parts, Loaded: t.room.Loaded,
		Passes: t.passes, Order: t.Engine.Config.PartOrder}
}

// Folder implements PartSampler.
func (t *Tiers) Folder() string { return t.info.Dir }

// Loads refuses loaders.
func Loads(c *plan.Config) error {
	return errs.New(errs.Capability,
		"%v %s trains on parts of the graph in which nodes have other numbers, which no loader hands on; use another mode",
		errs.Key("mode"), c.Mode)
}

// Resume continues a configuration with the checkpoint's mega-batches: settings that it leaves open
// are the checkpoint's.
func Resume(c *plan.Config, path string, was *engine.PartPrint) error {
	refuse := func(key string, is, old any) error {
		return errs.New(errs.Usage,
			"checkpoint %s was made with %v %v, this run has %v; give the same, or another folder for {checkpoint}",
			path, errs.Key(key), old, is)
	}
	switch {
	case was == nil:
		return errs.New(errs.Usage,
			"checkpoint %s is of a run that samples the whole graph, and %v %s samples within mega-batches; give another mode, or another folder for {checkpoint}",
			path, errs.Key("mode"), c.Mode)
	case c.PartOrder != was.Order && (c.OrderGiven || was.Order == spec.PartsSequential ||
		c.PartOrder == spec.PartsSequential):
		return refuse("part-order", c.PartOrder, was.Order)
	case c.Passes != spec.PassesAuto && was.Passes != 0 && c.Passes != was.Passes:
		return refuse("passes", c.Passes, was.Passes)
	}
	if n := c.MegaBatch.Of(was.Parts); n != 0 && n != was.Loaded {
		return refuse("megabatch", n, was.Loaded)
	}
	c.PartOrder = was.Order // older programs had no mixed order
	c.MegaBatch = spec.MegaSize{Parts: was.Loaded}
	if was.Passes != 0 {
		c.Passes = was.Passes
	}
	return nil
}
