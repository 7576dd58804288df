package gnn

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
)

// DefaultOptimizer is the optimiser where none is named: Adam (Kingma and Ba, ICLR 2015), whose
// weight decay is an L2 term.
const DefaultOptimizer = "adam"

const adamW = "adamw" // whose weight decay is decoupled from the gradient (Loshchilov, Hutter, 2019)

// Optimizers lists the names of all optimisers, DefaultOptimizer first.
func Optimizers() []string { return []string{DefaultOptimizer, adamW} }

// Decoupled returns the value of Step.Decoupled for an optimiser; an empty name is
// DefaultOptimizer.
func Decoupled(name string) (bool, error) {
	switch name {
	case "", DefaultOptimizer:
		return false, nil
	case adamW:
		return true, nil
	}
	return false, errs.New(errs.Usage, "optimizer %q is unknown; choose one of %s", name,
		strings.Join(Optimizers(), ", "))
}

// ScheduleSettings say how the steps of a run differ in length.
type ScheduleSettings struct {
	LRSchedule string `option:"lr-schedule" group:"Model" use:"setting" words:"@schedules" print:"yes" omit:"constant" usage:"how {lr} changes: constant; step:N,G (times G after every N epochs); cosine or linear (down to 0 at the end of {epochs}); plateau:N,G (times G after N epochs one after the other in which {metric} was not better)"`
	// Warmup is 0 for none.
	Warmup int `option:"warmup" group:"Model" positive:"yes" range:"1..2147483647" shown:"none" print:"yes" omit:"0" arg:"N" usage:"first N steps, over which the learning rate rises evenly; a step is a mini-batch, or {shards} of them"`
	// ClipNorm is 0 for none.
	ClipNorm float64 `option:"clip-norm" group:"Model" positive:"yes" range:"0.." shown:"none" print:"yes" omit:"0" arg:"C" usage:"largest norm C of a step's gradient, over all parameters; a longer gradient is scaled down"`
}

// Kinds of schedules. The texts of those that take numbers are KIND:N,G.
const (
	Constant     = "constant" // the default
	stepSchedule = "step"
	cosine       = "cosine"
	linear       = "linear"
	plateau      = "plateau"
)

// Schedules lists the schedules that a word names.
func Schedules() []string { return []string{Constant, cosine, linear} }

var _ = options.Define("schedules", Schedules)

// Schedule changes the learning rate over a run.
type Schedule struct {
	kind  string
	after int     // epochs, of step and plateau
	times float64 // likewise
}

// ParseSchedule reads a schedule.
func ParseSchedule(text string) (Schedule, error) {
	kind, numbers, has := strings.Cut(text, ":")
	s := Schedule{kind: kind}
	if !has && slices.Contains(Schedules(), kind) {
		return s, nil
	}
	after, times, _ := strings.Cut(numbers, ",")
	var err, wrong error
	s.after, err = strconv.Atoi(after)
	s.times, wrong = strconv.ParseFloat(times, 64)
	if kind != stepSchedule && kind != plateau || err != nil || wrong != nil || s.after < 1 ||
		!(s.times > 0 && s.times <= 1) {
		return s, errs.New(errs.Usage,
			"%v %q is none of %s, step:N,G and plateau:N,G, with N epochs and a factor G from 0 to 1, as step:30,0.1",
			errs.Key("lr-schedule"), text, strings.Join(Schedules(), ", "))
	}
	return s, nil
}

// Ends reports whether the schedule depends on the number of epochs.
func (s Schedule) Ends() bool { return s.kind == cosine || s.kind == linear }

// Plateau returns after how many epochs without a better figure the rate falls; 0: it does not.
func (s Schedule) Plateau() int {
	if s.kind != plateau {
		return 0
	}
	return s.after
}

// Position is a step's place in a run.
type Position struct {
	Epoch int     // from 0
	Done  float64 // share of all steps that are behind
	// Plateaus are those that validation has met so far.
	Plateaus int
}

// Factor is that of the learning rate at a position.
func (s Schedule) Factor(p Position) float64 {
	switch s.kind {
	case stepSchedule:
		return math.Pow(s.times, float64(p.Epoch/s.after))
	case plateau:
		return math.Pow(s.times, float64(p.Plateaus))
	case cosine:
		return (1 + math.Cos(math.Pi*p.Done)) / 2
	case linear:
		return 1 - p.Done
	}
	return 1
}

// Warm is the factor of the learning rate at a step of a run, from 0, that warms up for so many.
func Warm(step int64, warmup int) float64 {
	return min(1, float64(step+1)/float64(max(warmup, 1)))
}
