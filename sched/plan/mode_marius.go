package plan

import (
	"helios/graph/partition"
	"helios/internal/errs"
)

// ModeMarius is the data path of MariusGNN (Waleffe et al., EuroSys 2023).
const ModeMarius = "marius"

var mariusMode = &Mode{
	Name:        ModeMarius,
	Summary:     "random parts of the graph are loaded together, and mini-batches are sampled within them",
	PartOrders:  PartOrders,
	Partitioner: partition.Random,
	Fill: func(c *Config) {
		c.fillMegaTiers()
		if c.MegaBatched() && c.StaticNodes == 0 {
			c.StaticNodes = NoShare
		}
		c.fillMega()
	},
	Check: func(c Config) error {
		switch {
		case !c.MegaBatched():
			return nil
		case c.StaticNodes.Fraction() > 0:
			return errs.New(errs.Usage, "%v: %v %s has no static nodes; leave it out, or use %v %s",
				errs.Key("static-nodes"), errs.Key("mode"), c.Mode, errs.Key("mode"), ModeHier)
		case c.PartitionFile != "" && c.PartOrder == PartsSequential:
			return errs.New(errs.Usage,
				"%v: with %v %s the first parts have the training nodes, so that the parts are made for it; leave one of the two out",
				errs.Key("partition"), errs.Key("part-order"), c.PartOrder)
		}
		return nil
	},
}
