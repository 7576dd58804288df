package plan

import "helios/internal/errs"

// checkRanks refuses what processes that train together can't do.
func (c Config) checkRanks() error {
	switch {
	case c.Shards < c.Ranks*c.Replicas:
		return errs.New(errs.Usage,
			"%v %d: %d ranks of %d replicas train, and each needs a mini-batch of a step; give at least %d, or fewer ranks",
			errs.Key("shards"), c.Shards, c.Ranks, c.Replicas, c.Ranks*c.Replicas)
	case c.Traits().OneProcess != "":
		return errs.New(errs.Usage, "%v %s with %d ranks: %s; give another mode", errs.Key("mode"),
			c.Mode, c.Ranks, c.Traits().OneProcess)
	case c.Reduce != ReduceTree:
		return errs.New(errs.Usage,
			"%v %s with %d ranks: they add their gradients in the tree alone; leave it out",
			errs.Key("reduce"), c.Reduce, c.Ranks)
	case c.Tuning():
		return errs.New(errs.Usage,
			"%v %s with %d ranks: they wait for each other in each step, so no time that it measured would be of one setting; tune a run of one rank and give all the settings that it finds",
			errs.Key("tune"), c.Tune, c.Ranks)
	}
	return nil
}
