package plan

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
)

// Mega-batches: the graph's nodes are divided into parts, which lie on disk one behind the other;
// a few parts at a time are in memory, and mini-batches are sampled within them.

// MegaOptions returns the keys of the options that mean something where mega-batches train alone.
func MegaOptions() []string { return append(options.Names(&MegaSettings{}), "pages-on") }

// How parts come together to mega-batches: Config.PartOrder.
const (
	// PartsDispersed: every epoch has all parts, in mega-batches that share none.
	PartsDispersed = "dispersed"
	// PartsSequential: the first parts have all training nodes and stay in memory; an epoch is one
	// mega-batch of them and of some others.
	PartsSequential = "sequential"
)

// PartOrders are the values of Config.PartOrder.
var PartOrders = []string{PartsDispersed, PartsSequential}

// LoadAheads are the values of Config.LoadAhead.
var LoadAheads = []string{LoadAheadOn, LoadAheadOff}

// Whether the next mega-batch is loaded while one trains.
const (
	LoadAheadOn  = "on"
	LoadAheadOff = "off"
)

// PassesAuto as Config.Passes: chosen by what the first mega-batch took.
const PassesAuto = -1

// MostPasses bounds Config.Passes, and the automatic choice.
const (
	MostPasses     = 1000
	MostPassesAuto = 16
)

// MostParts bounds Config.Parts.
const MostParts = 1 << 20

// The default number of parts: as many as make partBytes of features each, within bounds.
const (
	leastParts = 4
	usualParts = 64
	partBytes  = 1 << 20
)

// LeastMegaBudget is what a CPU budget of mega-batches is taken for where it is less: parts are
// whole pages, of which even the smallest graph needs a few. Tests lower it.
var LeastMegaBudget int64 = 16 << 20

// MegaSize is how many parts a mega-batch has: a number, or a share of all. The zero value is as
// many as the CPU budget has room for.
type MegaSize struct {
	Parts   int
	Percent float64
}

// ParseMegaSize reads a number of parts such as 8, or a share of them such as 25%.
func ParseMegaSize(text string) (s MegaSize, err error) {
	if share, ok := strings.CutSuffix(text, "%"); ok {
		if s.Percent, err = strconv.ParseFloat(share, 64); err == nil && !(s.Percent > 0 &&
			s.Percent <= 100) {
			err = strconv.ErrRange
		}
	} else if s.Parts, err = strconv.Atoi(text); err == nil && s.Parts < 1 {
		err = strconv.ErrRange
	}
	if err != nil {
		return MegaSize{}, errs.New(errs.Usage,
			"%v %s is neither a number of parts such as 8 nor a share of them such as 25%%",
			errs.Key("megabatch"), text)
	}
	return s, nil
}

// Of returns the number of so many parts; 0: as many as there is room for.
func (s MegaSize) Of(parts int) int {
	if s.Percent > 0 {
		return max(int(math.Round(s.Percent/100*float64(parts))), 1)
	}
	return s.Parts
}

func (s MegaSize) String() string {
	if s.Percent > 0 {
		return fmt.Sprintf("%g%%", s.Percent)
	}
	return strconv.Itoa(s.Parts)
}

// Share is a share of the nodes; NoShare is none, and the zero value the mode's own.
type Share float64

// NoShare as Config.StaticNodes: none, whatever the mode has.
const NoShare Share = -1

// ParseShare reads a share such as 5%.
func ParseShare(text string) (Share, error) {
	v, err := units.ParseShare(text)
	switch {
	case err != nil:
		return 0, errs.New(errs.Usage, "%v %w, of the nodes", errs.Key("static-nodes"), err)
	case v == 0:
		return NoShare, nil
	}
	return Share(math.Round(1e14*v) / 1e12), nil // 7 of 7%, not 7.000000000000001
}

// Fraction returns the share as a number from 0 to 1.
func (s Share) Fraction() float64 { return max(float64(s), 0) / 100 }

// MegaModes returns the names of the modes that train mega-batches.
func MegaModes() (names []string) {
	for _, m := range modes {
		if m.Mega() {
			names = append(names, m.Name)
		}
	}
	return names
}

// PartOrderModes returns the names of the modes that have one of PartOrders.
func PartOrderModes(order string) (names []string) {
	for _, m := range modes {
		if slices.Contains(m.PartOrders, order) {
			names = append(names, m.Name)
		}
	}
	return names
}

// MegaBatched reports whether training goes mega-batch by mega-batch.
func (c Config) MegaBatched() bool { return c.mode().Mega() && !c.Unpacked }

// PartsOf returns how many parts a graph whose features take so many bytes has.
func (c Config) PartsOf(features, nodes int64) int {
	if c.Parts > 0 {
		return c.Parts
	}
	return int(min(max(min(features/partBytes, usualParts), leastParts), max(nodes, 1)))
}

// PartedFolder returns the folder that has the parts; dataset is the dataset's own. Modes and
// orders that divide a graph otherwise have one each.
func (c Config) PartedFolder(dataset string) string {
	if c.PartedDir != "" {
		return c.PartedDir
	}
	name := "parted-" + c.Mode
	if c.PartOrder == PartsSequential {
		name += "-" + c.PartOrder
	}
	return filepath.Join(dataset, name)
}

// Partitioner returns how parts are made where no file says them.
func (c Config) Partitioner() string { return c.mode().Partitioner }

// fillMega sets what modes of mega-batches have in common.
func (c *Config) fillMega() {
	if !c.MegaBatched() {
		return
	}
	orNumber(&c.Passes, 1)
	orText(&c.PartOrder, PartsDispersed)
	orText(&c.LoadAhead, LoadAheadOn)
	orText(&c.PagesOn, PagesFolder)
}

// checkMega refuses options of mega-batches where there are none, and those that can't be.
func (c Config) checkMega() error {
	if key := options.FirstSet(&c.MegaSettings); key != "" && !c.mode().Mega() {
		return errs.New(errs.Usage, "%v is of mega-batches; use %v %s, or leave it out",
			errs.Key(key), errs.Key("mode"), strings.Join(MegaModes(), " or "))
	}
	if !c.MegaBatched() {
		return nil
	}
	mega := c.MegaBatch
	switch {
	case c.Parts != 0 && c.PartitionFile != "":
		return errs.New(errs.Usage, "%v: the file says how many parts there are; leave %v out",
			errs.Key("partition"), errs.Key("parts"))
	case !(c.StaticNodes == NoShare || c.StaticNodes >= 0 && c.StaticNodes <= 100):
		return errs.New(errs.Usage, "%v %v%% is not a share of the nodes",
			errs.Key("static-nodes"), float64(c.StaticNodes))
	case mega.Parts < 0 || !(mega.Percent >= 0 && mega.Percent <= 100) ||
		mega.Parts > 0 && mega.Percent > 0:
		return errs.New(errs.Usage, "%v of %d parts and %v%% is no size", errs.Key("megabatch"),
			mega.Parts, mega.Percent)
	case c.Parts > 0 && mega.Parts > c.Parts:
		return errs.New(errs.Usage, "%v %d: there are %d parts; give at most so many",
			errs.Key("megabatch"), mega.Parts, c.Parts)
	case !slices.Contains(c.mode().PartOrders, c.PartOrder):
		return errs.New(errs.Usage, "%v %s is of %v %s; leave it out, or use that mode",
			errs.Key("part-order"), c.PartOrder, errs.Key("mode"),
			strings.Join(PartOrderModes(c.PartOrder), " or "))
	case c.Dynamic() || c.Superbatched():
		return errs.New(errs.Usage,
			"%v %s: %v %s has the rows of whole parts in memory, so that no row comes or goes; leave it out, or use %v %s",
			errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"), DefaultMode)
	case c.GPUCacheAuto:
		return errs.New(errs.Usage,
			"%v auto: %v %s keeps the static nodes' rows there or none; give a size or a share",
			errs.Key("gpu-cache"), errs.Key("mode"), c.Mode)
	case c.Trace != "":
		return errs.New(errs.Usage,
			"%v %s reads whole parts, which a replay of %v cannot be held against; record a run of another mode",
			errs.Key("mode"), c.Mode, errs.Key("trace"))
	case c.Tuning():
		return errs.New(errs.Usage,
			"%v %s: the tuner changes the stack while it trains, and %v %s loads parts through it then; leave it out",
			errs.Key("tune"), c.Tune, errs.Key("mode"), c.Mode)
	case c.Topology == TopologySSD && c.NeighborShared:
		return errs.New(errs.Usage, "%v shared: %v %s has no tier that could give way to it",
			errs.Key("neighbor-cache"), errs.Key("mode"), c.Mode)
	}
	return nil
}

// checkMegaAsked refuses what says how rows are placed where parts do.
func (c Config) checkMegaAsked(f Config) error {
	if f.MegaBatched() && (c.Hotness != "" || c.Presample != 0 ||
		c.HotnessDir != "" && c.HotnessDir != NoFolder) {
		return errs.New(errs.Usage,
			"%v %s keeps whole parts and the nodes of the highest out-degree; leave %v, %v and %v out",
			errs.Key("mode"), f.Mode, errs.Key("hotness"), errs.Key("hotness-dir"),
			errs.Key("presample-epochs"))
	}
	return nil
}

// MegaBudget is the CPU memory that mega-batches may take of so many bytes of features.
func (c Config) MegaBudget(features int64) int64 {
	return max(c.CPUCache.Of(features), LeastMegaBudget)
}

// defaultMegaCPU is the CPU budget's default: a share of the features.
var defaultMegaCPU = units.Budget{Percent: 25}
