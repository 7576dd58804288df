package hier

import (
	"path/filepath"
	"slices"
	"strings"

	"helios/gpuio"
	"helios/graph/partition"
	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/tiers/hier/spec"
)

// Mega-batches: the graph's nodes are divided into parts, which lie on disk one behind the other;
// a few parts at a time are in memory, and mini-batches are sampled within them.

// System trains mega-batch by mega-batch.
var System = plan.System{
	Settings: func(c *plan.Config) any { return &c.MegaSettings },
	Shared:   []string{"pages-on"},
	Fill: func(c *plan.Config) {
		if c.StaticNodes == 0 {
			c.StaticNodes = kindOf(c).static
		}
		plan.OrNumber(&c.Passes, 1)
		plan.OrText(&c.PartOrder, kindOf(c).orders[0])
		plan.OrText(&c.LoadAhead, spec.LoadAheadOn)
		plan.OrText(&c.PagesOn, plan.PagesFolder)
	},
	Check: check,
	Keeps: "whole parts and the nodes of the highest out-degree",
	Traits: func(*plan.Config) plan.Traits {
		return plan.Traits{OneBudget: true,
			Untyped:    "its parts are of a graph without types",
			OneProcess: "its mega-batches are loaded by one process"}
	},
	Draws: func(c *plan.Config) []any {
		return []any{c.Mode, c.Parts, c.PartitionFile, c.StaticNodes, c.MegaBatch, c.Passes,
			c.PartOrder, c.PartedDir, c.CPUCache, c.GPUCache, c.LoadAhead}
	},
}

// The modes of mega-batches.
const (
	ModeHier   = "hier"
	ModeMarius = "marius"
)

// Hier is the data path of HierBatching. Its GPU tier has room for the rows of the static nodes.
var Hier = plan.Mode{
	Name:    ModeHier,
	Summary: "parts of the graph are loaded together in long reads, and mini-batches are sampled within them and the hottest nodes; edges between them are lost, which cost 0 to 4 points of accuracy by graph",
	Own:     &System,
	Fill: func(c *plan.Config) {
		if !c.GPUCacheAuto && c.GPUCache == (units.Budget{}) {
			c.GPUCache.Percent = 5
		}
		fillTiers(c)
	},
}

// Marius is the data path of MariusGNN (Waleffe et al., EuroSys 2023).
var Marius = plan.Mode{
	Name:    ModeMarius,
	Summary: "random parts of the graph are loaded together, and mini-batches are sampled within them",
	Own:     &System,
	Fill:    fillTiers,
}

// kind is the way that a mode divides the graph.
type kind struct {
	mode        string
	partitioner string     // one of partition.MethodNames
	orders      []string   // how parts come together, of spec.PartOrders; the first by default
	static      spec.Share // of the nodes, whose rows and lists are always there
}

var kinds = []kind{
	{ModeHier, partition.Stream, []string{spec.PartsMixed, spec.PartsDispersed}, 2},
	{ModeMarius, partition.Random, []string{spec.PartsDispersed, spec.PartsMixed,
		spec.PartsSequential}, spec.NoShare},
}

// kindOf returns the kind of a configuration's mode.
func kindOf(c *plan.Config) kind {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.mode == c.Mode })]
}

// modes returns the names of the modes that have an order of parts; "": of all.
func modes(order string) (names []string) {
	for _, k := range kinds {
		if order == "" || slices.Contains(k.orders, order) {
			names = append(names, k.mode)
		}
	}
	return names
}

var _ = options.Define("mega-modes", func() []string { return modes("") }) &&
	options.Define("sequential-modes", func() []string { return modes(spec.PartsSequential) })

// fillTiers sets the data path that both modes share.
func fillTiers(c *plan.Config) {
	c.CPUTier(25)
	plan.OrText(&c.IOStack, gpuio.StackCPU)
	plan.OrText(&c.Pipeline, plan.PipelinePrefetch)
	plan.OrText(&c.Topology, plan.TopologySSD) // training has its own; only evaluation reads it
}

// check refuses settings that mega-batches cannot have, and parts of a run that do not work with
// them.
func check(c plan.Config) error {
	for _, check := range []func(*plan.Config) error{checkParts, checkKind, checkRun} {
		if err := check(&c); err != nil {
			return err
		}
	}
	return nil
}

func checkParts(c *plan.Config) error {
	mega := c.MegaBatch
	switch {
	case c.Parts != 0 && c.PartitionFile != "":
		return errs.New(errs.Usage, "%v: the file has the number of parts; leave %v out",
			errs.Key("partition"), errs.Key("parts"))
	case !(c.StaticNodes == spec.NoShare || c.StaticNodes >= 0 && c.StaticNodes <= 100):
		return errs.New(errs.Usage, "%v %v%% is not a share of the nodes",
			errs.Key("static-nodes"), float64(c.StaticNodes))
	case mega.Parts < 0 || !(mega.Percent >= 0 && mega.Percent <= 100) ||
		mega.Parts > 0 && mega.Percent > 0:
		return errs.New(errs.Usage, "%v of %d parts and %v%% is no size", errs.Key("megabatch"),
			mega.Parts, mega.Percent)
	case c.Parts > 0 && mega.Parts > c.Parts:
		return errs.New(errs.Usage, "%v %d: there are %d parts; give at most so many",
			errs.Key("megabatch"), mega.Parts, c.Parts)
	}
	return nil
}

// checkKind refuses the settings of the other mode.
func checkKind(c *plan.Config) error {
	k := kindOf(c)
	switch {
	case !slices.Contains(k.orders, c.PartOrder):
		return errs.New(errs.Usage, "%v %s is of %v %s; leave it out, or use that mode",
			errs.Key("part-order"), c.PartOrder, errs.Key("mode"),
			strings.Join(modes(c.PartOrder), " or "))
	case k.static == spec.NoShare && c.StaticNodes.Fraction() > 0:
		return errs.New(errs.Usage, "%v: %v %s has no static nodes; leave it out, or use %v %s",
			errs.Key("static-nodes"), errs.Key("mode"), c.Mode, errs.Key("mode"), ModeHier)
	case c.PartitionFile != "" && c.PartOrder == spec.PartsSequential:
		return errs.New(errs.Usage,
			"%v: with %v %s the first parts have the training nodes, so that the parts are made for it; leave one of the two out",
			errs.Key("partition"), errs.Key("part-order"), c.PartOrder)
	}
	return nil
}

func checkRun(c *plan.Config) error {
	switch {
	case c.Policy != plan.PolicyStatic:
		return errs.New(errs.Usage,
			"%v %s: %v %s has the rows of whole parts in memory, so that no row comes or goes; leave it out, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"),
			plan.DefaultMode)
	case c.GPUCacheAuto:
		return errs.New(errs.Usage,
			"%v auto: %v %s keeps the static nodes' rows there or none; give a size or a share",
			errs.Key("gpu-cache"), errs.Key("mode"), c.Mode)
	case c.Tuning():
		return errs.New(errs.Usage,
			"%v %s: the tuner changes the stack while it trains, and %v %s loads parts through it then; leave it out",
			errs.Key("tune"), c.Tune, errs.Key("mode"), c.Mode)
	}
	return nil
}

// The default number of parts: as many as make partBytes of features each, within bounds.
const (
	leastParts = 4
	usualParts = 64
	partBytes  = 1 << 20
)

// partsOf returns the number of parts of a graph whose features take so many bytes.
func partsOf(c *plan.Config, features, nodes int64) int {
	if c.Parts > 0 {
		return c.Parts
	}
	return int(min(max(min(features/partBytes, usualParts), leastParts), max(nodes, 1)))
}

// partedFolder returns the folder that has the parts; dataset is the dataset's own. Modes and
// orders that divide a graph differently have a folder each.
func partedFolder(c *plan.Config, dataset string) string {
	if c.PartedDir != "" {
		return c.PartedDir
	}
	name := "parted-" + c.Mode
	if c.PartOrder == spec.PartsSequential {
		name += "-" + c.PartOrder
	}
	return filepath.Join(dataset, name)
}

// Partitioner returns the way that parts are made where no file has them.
func Partitioner(c *plan.Config) string { return kindOf(c).partitioner }

// LeastBudget is the least CPU budget of mega-batches: parts are whole pages, of which even the
// smallest graph needs a few. Tests lower it.
var LeastBudget int64 = 16 << 20

// budget is the CPU memory that mega-batches may take of so many bytes of features.
func budget(c *plan.Config, features int64) int64 {
	return max(c.CPUCache.Of(features), LeastBudget)
}
