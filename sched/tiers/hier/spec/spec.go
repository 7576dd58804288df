// Package spec declares the settings of mega-batches, and their figures in results.
package spec

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
)

var _ = options.Define("part-orders", func() []string { return PartOrders }) &&
	options.Define("load-aheads", func() []string { return LoadAheads })

// MegaSettings shape mega-batches. They change results, but for LoadAhead and PartedDir.
type MegaSettings struct {
	Parts         int      `option:"parts" group:"Mega-batches" positive:"yes" range:"1..1048576" shown:"4 to 64, by the size of the features" arg:"N" usage:"N parts that the graph is divided into ({mode} {@mega-modes}); changes results"`
	PartitionFile string   `option:"partition" group:"Mega-batches" use:"input" shown:"made where the parts are" arg:"FILE" usage:"FILE with the part of each node (heliosctl partition)"`
	StaticNodes   Share    `option:"static-nodes" group:"Mega-batches" shown:"2%, in marius none" arg:"SHARE" usage:"SHARE of the nodes, those of the highest out-degree, that are in every mega-batch; changes results"`
	MegaBatch     MegaSize `option:"megabatch" group:"Mega-batches" shown:"what {cpu-cache} has room for" arg:"N" usage:"parts N that are in memory together, or a share of them such as 25%; changes results"`
	// Passes is the number of times that a mega-batch trains before the next, or PassesAuto.
	Passes    int    `option:"passes" group:"Mega-batches" named:"auto=-1" positive:"yes" range:"1..1000" shown:"1" arg:"N" usage:"times N that a mega-batch trains before the next; auto: as often as loading one takes longer than training; changes results"`
	PartOrder string `option:"part-order" group:"Mega-batches" use:"setting" oneof:"@part-orders" shown:"mixed, in marius dispersed" usage:"how parts come together (mixed: every epoch has all, in mega-batches that share none and whose labels are mixed as in the whole graph, as far as whole parts allow; dispersed: the same by chance alone; sequential: those with the training nodes stay, and an epoch is one mega-batch of them and others; {mode} {@sequential-modes}); changes results"`
	// OrderGiven: PartOrder was asked for, so a checkpoint with another is refused.
	OrderGiven bool
	LoadAhead  string `option:"load-ahead" group:"Mega-batches" use:"setting" oneof:"@load-aheads" shown:"on" usage:"load the next mega-batch while one trains: off has room for more parts"`
	PartedDir  string `option:"parted" group:"Mega-batches" use:"aside" shown:"parted-MODE in the dataset's folder" arg:"FOLDER" usage:"FOLDER of the parts ({mode} {@mega-modes}); what is not there yet is made"`
}

// How parts come together to mega-batches: Config.PartOrder.
const (
	// PartsMixed: as PartsDispersed, dealt so that the labels of a mega-batch's training nodes are
	// mixed as those of all.
	PartsMixed = "mixed"
	// PartsDispersed: every epoch has all parts, in mega-batches that share none.
	PartsDispersed = "dispersed"
	// PartsSequential: the first parts have all training nodes and stay in memory; an epoch is one
	// mega-batch of them and of some others.
	PartsSequential = "sequential"
)

// PartOrders lists the values of Config.PartOrder.
var PartOrders = []string{PartsMixed, PartsDispersed, PartsSequential}

// LoadAheads lists the values of Config.LoadAhead.
var LoadAheads = []string{LoadAheadOn, LoadAheadOff}

// Values of LoadAhead: on loads the next mega-batch while one trains.
const (
	LoadAheadOn  = "on"
	LoadAheadOff = "off"
)

// PassesAuto as Config.Passes: chosen by what the first mega-batch took.
const PassesAuto = -1

// MostPassesAuto bounds the automatic choice of Config.Passes.
const MostPassesAuto = 16

// MegaSize is the number of parts of a mega-batch, or a share of all. The zero value is as many as
// the CPU budget has room for.
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

// SetOption notes whether an order of parts was asked for.
func (s *MegaSettings) SetOption(name, _ string) (done bool, err error) {
	s.OrderGiven = s.OrderGiven || name == "part-order"
	return false, nil
}

// SetText reads a share of the nodes.
func (s *Share) SetText(text string) (err error) { *s, err = ParseShare(text); return err }

// SetText reads a number of parts, or a share of them.
func (s *MegaSize) SetText(text string) (err error) { *s, err = ParseMegaSize(text); return err }
