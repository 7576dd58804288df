package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/rowtype"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/planner"
	"helios/sched/prepare"
	"helios/sched/tiers"
)

// planArgs holds the options of "plan".
type planArgs struct {
	runArgs
	graph   string `option:"graph" common:"yes" group:"Graph and accesses" use:"input" words:"@graphs" arg:"NAME" usage:"the graph, by NAME ({@graphs}: those of the papers) or a dataset's folder, whose mini-batches are then sampled"`
	degrees string `option:"degrees" group:"Graph and accesses" use:"input" arg:"FILE" usage:"plan for a degree distribution: FILE with a line \"degree nodes\" for each degree"`
	skew    string `option:"skew" group:"Graph and accesses" use:"setting" shown:"the graph's" arg:"ROWS:ACCESSES" usage:"how unevenly rows are accessed: ROWS:ACCESSES, as 10%:70% where the hottest 10 % of the rows have 70 % of the accesses, or zipf:S"`
	// of --hardware
	profile  string          `option:"hardware" common:"yes" group:"Question" use:"input" words:"@hardware" arg:"PROFILE" usage:"the machine, a PROFILE ({@hardware}) or a YAML file"`
	ssdCount int             `option:"ssd-count" common:"yes" group:"Question" positive:"yes" range:"1..256" shown:"the profile's" usage:"number of SSDs of that machine"`
	nodes    int64           `option:"nodes" group:"Graph and accesses" positive:"yes" shown:"the graph's" usage:"nodes"`
	edges    int64           `option:"edges" group:"Graph and accesses" positive:"yes" shown:"the graph's" usage:"edges"`
	dim      int             `option:"dim" group:"Graph and accesses" positive:"yes" shown:"the graph's, or 1024" usage:"features of a row"`
	classes  int             `option:"classes" group:"Graph and accesses" positive:"yes" shown:"the graph's, or 64" usage:"classes of nodes"`
	fraction float64         `option:"train-fraction" group:"Graph and accesses" share:"yes" positive:"yes" shown:"the graph's, or 0.01" arg:"SHARE" usage:"SHARE of the nodes that train"`
	budget   units.Budget    `option:"budget" common:"yes" group:"Question" arg:"SIZE" usage:"memory for both tiers together, a SIZE or a share of the features: the GPU's as far as it goes (half of it for a dynamic tier), then the CPU's; else {gpu-cache} and {cpu-cache}"`
	batches  int             `option:"batches" group:"Question" positive:"yes" shown:"what seconds allow" usage:"mini-batches that are played; an epoch is continued from them"`
	cut      *float64        `option:"cut" text:"yes" group:"Graph and accesses" shown:"that of random parts, or assumed to be 50%" arg:"SHARE" usage:"SHARE of the edges that lead from part to part ({mode} {@mega-modes}, without a dataset)"`
	prices   planner.Prices  `option:"price" text:"yes" group:"Question" arg:"WHAT=PRICE[,…]" usage:"prices an hour WHAT=PRICE[,…] of {@priced} (of CPU memory): adds what an epoch costs"`
	sweep    []planner.Sweep `option:"sweep" common:"yes" group:"Question" offers:"@sweep-starts" arg:"KEY=VALUES" usage:"plan for each value of a setting, KEY=VALUES, as ssds=1..12 or cpu-cache=0,5%,10%: {@sweep-keys}"`
	halve    bool            `option:"halve" common:"yes" group:"Question" use:"setting" usage:"also say which resource, doubled, gains most, and what it takes to halve the epoch's time"`
	// of --calibrate
	run string `option:"calibrate" group:"Question" use:"input" arg:"RESULTS" usage:"make training, and lookups of a dynamic tier, as fast as they were in the run of RESULTS (train --results) on this dataset, with the same model and mini-batches"`
	// of --save-profile
	saved string `option:"save-profile" group:"Question" use:"aside" arg:"FILE" usage:"keep the calibrated machine in FILE, for {hardware}"`
}

// plansOwn are the options that only a plan has, and those about its device and its results.
var plansOwn = []string{"graph", "degrees", "skew", "nodes", "edges", "dim", "classes",
	"train-fraction", "cut", "hardware", "ssd-count", "budget", "price", "sweep", "halve",
	"calibrate", "save-profile", "batches", "kernels", "results", "overwrite"}

// SetOption reads cuts, prices and sweeps.
func (a *planArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "cut":
		a.cut, err = planner.ParseCut(text)
	case "price":
		a.prices, err = planner.ParsePrices(text)
	case "sweep":
		var s planner.Sweep
		s, err = planner.ParseSweep(text)
		a.sweep = []planner.Sweep{s}
	default:
		return false, nil
	}
	return true, err
}

// planned are the options of a run that mean something in a plan.
var planned = []string{"model", "fanout", "relation-fanout", "root", "bases", "batch-size", "shards", "hidden", "heads", "heads-out",
	"epochs", "seed", "sampler", "batch-dependency", "sample-epochs", "refresh", "refresh-every",
	"mode", "io-stack", "pipeline", "io-blocks", "depth", "prefetch-depth", "coalesce",
	"sm-budget",
	"workers", "replicas", "gpu-cache", "cpu-cache", "policy", "superbatch", "superbatch-overlap",
	"disk-budget", "directory", "cache-line", "window", "accumulate", "hotness",
	"presample-epochs", "hotness-dir", "row-dtype", "parts", "partition", "static-nodes", "megabatch",
	"passes", "part-order", "load-ahead"}

// sweepStarts are the beginnings of sweeps.
func sweepStarts() []string {
	keys := planner.SweepKeys()
	for i := range keys {
		keys[i] += "="
	}
	return keys
}

func planCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "plan",
		Usage:     "what an epoch would take on a machine, for a graph that need not be there",
		ArgsUsage: "[DATASET]",
		Description: "Plays mini-batches on the virtual clock, as train --clock virtual does, but they may come from a skew or a degree\n" +
			"distribution, so neither the graph nor the machine has to exist: time of an epoch, what bounds it, bytes by tier,\n" +
			"preparation, disk, memory, cost. Every figure is modelled.",
	}, 1, hcli.Of[planArgs]().Only(slices.Concat(planned, plansOwn)...), runPlan)
}

// describe settles the graph and where its accesses are from.
func (a *planArgs) describe(e *env, o *planner.Options) (err error) {
	name := cmp.Or(a.graph, e.c.Args().First())
	if a.graph != "" && e.c.NArg() > 0 {
		return errs.New(errs.Usage, "two graphs, {graph} %s and %s; give one", a.graph,
			e.c.Args().First())
	}
	g, known := planner.FindGraph(name)
	if !known && name != "" {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return errs.New(errs.Usage,
				"no graph and no dataset's folder is called %s; known graphs are %s", name,
				strings.Join(planner.GraphNames(), ", "))
		}
		a.dataset = name
	}
	if from := e.given(&a.degrees, &a.skew); from != "" && a.dataset != "" {
		return errs.New(errs.Usage,
			"%v: %s is a dataset, whose mini-batches are sampled; leave one of the two out", errs.Key(from),
			a.dataset)
	}
	if a.degrees != "" && e.given(&a.skew) != "" {
		return errs.New(errs.Usage,
			"{degrees} and {skew} each say what is accessed; give one of them")
	}
	switch {
	case a.dataset != "":
	case a.degrees != "":
		if o.Popularity, err = planner.ReadDegrees(a.degrees); err != nil {
			return err
		}
	case known || e.given(&a.skew) != "" && a.nodes > 0:
		g.Skew = cmp.Or(a.skew, g.Skew)
		if a.skew != "" {
			g.SkewSource = "given"
		}
		if o.Popularity, err = planner.ParsePopularity(g.Skew); err != nil {
			return err
		}
	default:
		return errs.New(errs.Usage,
			"no graph: give {graph} with one of %s or a dataset's folder, or {degrees}, or {skew} with {nodes} and {edges}",
			strings.Join(planner.GraphNames(), ", "))
	}
	if n, m, ok := o.Popularity.Totals(); ok && !known {
		g.Name, g.Nodes, g.Edges = a.degrees, n, m
	}
	if len(g.Types) > 0 {
		if f := e.given(&a.nodes, &a.edges, &a.degrees); f != "" {
			return errs.New(errs.Usage, "%v: graph %s has counts by type and relation; leave it out",
				errs.Key(f), g.Name)
		}
		if a.cfg.RowType == "" {
			if o.RowType, err = rowtype.Parse(cmp.Or(g.RowType, "float32")); err != nil {
				return err
			}
		}
	}
	g.Name = cmp.Or(g.Name, "given")
	g.Nodes, g.Edges = cmp.Or(a.nodes, g.Nodes), cmp.Or(a.edges, g.Edges)
	g.Dim = cmp.Or(a.dim, g.Dim, 1024)
	g.Classes = cmp.Or(a.classes, g.Classes, 64)
	g.Train = cmp.Or(a.fraction, g.Train, 0.01)
	o.Graph = g
	return nil
}

// check refuses what cannot be, before anything is opened.
func (a *planArgs) check(e *env) (o planner.Options, err error) {
	if e.given(&a.profile) == "" {
		return o, errs.New(errs.Usage, "no {hardware}: choose one of %s, or give a YAML file",
			strings.Join(hardware.Names(), ", "))
	}
	if err := a.describe(e, &o); err != nil {
		return o, err
	}
	if o.Hardware.Profile, err = hardware.Load(a.profile); err != nil {
		return o, err
	}
	c := &a.cfg
	if f := e.given(&a.budget); f != "" {
		g := e.given(&c.GPUCache, &c.CPUCache)
		if c.GPUCache == plan.NoCache() { // the budget is the CPU tier's then
			g = e.given(&c.CPUCache)
		}
		if g != "" {
			return o, errs.New(errs.Usage,
				"%v divides the memory between the tiers; leave %v out, or %v", errs.Key(f), errs.Key(g), errs.Key(f))
		}
		if a.budget == (units.Budget{}) { // 0 was typed, which is no tier
			a.budget = plan.NoCache()
		}
	}
	if f := e.given(&a.nodes, &a.edges, &a.dim, &a.classes, &a.fraction); f != "" &&
		a.dataset != "" {
		return o, errs.New(errs.Usage, "%v: the dataset %s has its own; leave it out", errs.Key(f), a.dataset)
	}
	if a.run != "" && a.dataset == "" {
		return o, errs.New(errs.Usage,
			"{calibrate}: a run is of a dataset, and none is given; give its folder")
	}
	if a.saved != "" && a.run == "" {
		return o, errs.New(errs.Usage,
			"{save-profile} keeps a calibrated machine; give the results of a run with {calibrate}")
	}
	if f := e.given(&a.cut); f != "" {
		switch {
		case a.dataset != "":
			return o, errs.New(errs.Usage, "%v: the dataset %s is partitioned; leave it out", errs.Key(f),
				a.dataset)
		case !slices.Contains(tiers.Catalog.With("parts"), c.Mode):
			return o, errs.New(errs.Usage, "%v is for parts, which {mode} %s trains on; leave it out",
				errs.Key(f), strings.Join(tiers.Catalog.With("parts"), " or "))
		}
	}
	if a.halve && len(a.sweep) > 0 {
		return o, errs.New(errs.Usage, "{halve} asks about one plan; leave {sweep} out")
	}
	if c.RowType != "" {
		if o.RowType, err = rowtype.Parse(c.RowType); err != nil {
			return o, errs.Errorf("{row-dtype}: %w", err)
		}
	}
	o.Hardware.SSDs, o.Budget, o.Batches, o.Prices = a.ssdCount, a.budget, a.batches, a.prices
	o.Cut = a.cut
	o.Config = a.cfg
	return o, nil
}

// open opens the dataset, where there is one.
func (a *planArgs) open(e *env, o *planner.Options) (closes func() error, err error) {
	if a.dataset == "" {
		return func() error { return nil }, nil
	}
	s, err := openGraph(e, &a.runArgs, "a plan samples on the host device")
	if err != nil {
		return nil, err
	}
	m := s.Dataset.Meta
	o.Inputs = s.Inputs
	o.Graph = planner.Graph{Name: m.Name, Nodes: m.Nodes, Edges: m.Edges, Dim: m.Dim,
		Classes: max(m.Classes, 1), Train: 1, Source: a.dataset}
	if train, err := s.Dataset.Split("train"); err == nil && m.Nodes > 0 && len(train) > 0 {
		o.Graph.Train = float64(len(train)) / float64(prepare.TargetNodes(&m))
	}
	if a.cfg.RowType == "" {
		o.RowType = m.RowType()
	}
	return s.close, nil
}

func runPlan(ctx context.Context, e *env, a *planArgs) (err error) {
	o, err := a.check(e)
	if err != nil {
		return err
	}
	closes, err := a.open(e, &o)
	if err != nil {
		return err
	}
	defer closing(&err, closes)
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)
	o.Find = tiers.Prediction
	p, err := planner.New(o, e.observer())
	if err != nil {
		return err
	}
	defer closing(&err, p.Close)
	if a.run != "" {
		if err := a.calibrate(ctx, e, p, o.Inputs.Dataset.Meta.UUID); err != nil {
			return err
		}
	}
	if len(a.sweep) > 0 {
		return a.runSweep(ctx, e, p, out)
	}
	x, err := p.Plan(ctx, nil)
	if err != nil {
		return err
	}
	r := planResult{Plan: x}
	if a.halve {
		if r.Halving, err = p.Halve(ctx, x); err != nil {
			return err
		}
	}
	showPlan(e, &r)
	out.event("plan", r)
	return nil
}

// planResult is the line of a plan.
type planResult struct {
	*planner.Plan
	Halving *planner.Halving `json:"halving,omitempty"`
}

// sweepPoint is a line of a sweep.
type sweepPoint struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	*planner.Plan
}

// sweepResult is the last line of a sweep.
type sweepResult struct {
	Modelled bool      `json:"modelled"`
	Key      string    `json:"key"`
	Values   []string  `json:"values"`
	Seconds  []float64 `json:"seconds"`
	Best     string    `json:"best"` // the first value within a hundredth of the least time
}

// runSweep plans for each value of a setting.
func (a *planArgs) runSweep(ctx context.Context, e *env, p *planner.Planner,
	out *results) (err error) {
	s := a.sweep[0]
	r := sweepResult{Modelled: true, Key: s.Key, Values: s.Values}
	header := []string{s.Key, "s an epoch", "limit", "hits", "read", "GB/s of the SSDs", "stall"}
	var rows [][]string
	noted := map[string]bool{}
	for i, v := range s.Values {
		e.ui.Progress("plan "+s.Key, int64(i+1), int64(len(s.Values)))
		x, err := p.Point(ctx, s, v)
		if err != nil {
			return fmt.Errorf("%s %s: %w", s.Key, v, err)
		}
		out.event("point", sweepPoint{s.Key, v, x})
		r.Seconds = append(r.Seconds, x.Seconds)
		row := []string{v, fmt.Sprintf("%.4g", x.Seconds), x.Bottleneck,
			fmt.Sprintf("%.1f%%", 100*x.HitRatio), units.FormatBytes(x.BytesSSD),
			fmt.Sprintf("%.3g", x.SSDBytesPerSecond/1e9), fmt.Sprintf("%.0f%%", 100*x.Stall)}
		if x.Cost != nil {
			row = append(row, fmt.Sprintf("%.4g", x.Cost.Epoch))
		}
		rows = append(rows, row)
		for _, n := range x.Notes {
			if !noted[n] {
				noted[n] = true
				e.plainNote(n)
			}
		}
	}
	if a.prices != nil {
		header = append(header, "cost")
	}
	least := slices.Min(r.Seconds)
	i := slices.IndexFunc(r.Seconds, func(t float64) bool { return t <= 1.01*least })
	r.Best = s.Values[i]
	e.ui.Table(header, rows)
	e.ui.Printf("modelled: from %s %s on an epoch takes no more than %.4g s, within 1%% of the least",
		s.Key, r.Best, r.Seconds[i])
	out.event("sweep", r)
	return nil
}

// showPlan is the summary for people.
func showPlan(e *env, r *planResult) {
	for _, n := range r.Notes {
		e.plainNote(n)
	}
	b := units.FormatBytes
	g := r.Graph
	rows := [][]string{
		{"modelled plan", fmt.Sprintf("%s, %s, on %s with %d %s; I/O stack %s, pipeline %s",
			r.Mode, r.Model, r.Hardware, r.SSDs, r.SSDModel, r.IOStack, r.Pipeline)},
		{"graph", fmt.Sprintf("%s: %s nodes, %s edges, rows of %s (%s)", g.Name,
			units.FormatCount(float64(g.Nodes)), units.FormatCount(float64(g.Edges)),
			b(r.RowBytes), b(g.Nodes*r.RowBytes))},
		{"accesses", r.From + skewFrom(g)},
		{"epoch", fmt.Sprintf("%.4g s (modelled), %d mini-batches of %d, %d played", r.Seconds,
			r.Batches, r.Batch, r.Played)},
		{"limit", fmt.Sprintf("%s; training waits %.0f%% of the time", r.Bottleneck, 100*r.Stall)},
		{"busy", busyText(r.Plan)},
		{"rows from", fmt.Sprintf("GPU %s, CPU %s, SSDs %s (%.1f%% hits)", b(r.BytesGPU),
			b(r.BytesCPU), b(r.RowsSSD*r.RowBytes), 100*r.HitRatio)},
		{"SSDs read", fmt.Sprintf("%s in %s commands, %s/s", b(r.BytesSSD),
			units.FormatCount(float64(r.SSDCommands)), b(int64(r.SSDBytesPerSecond)))},
		{"before", fmt.Sprintf(
			"writing the rows %s once; hotness %s, packing %s, filling the tiers %s",
			secondsText(r.Preparation.Load), secondsText(r.Preparation.Hotness),
			secondsText(r.Preparation.Pack), secondsText(r.Preparation.Fill))},
		{"disk", bytesText(r.Disk)}, {"GPU memory", bytesText(r.GPUMemory)},
		{"CPU memory", bytesText(r.CPUMemory)},
	}
	for _, t := range r.Types {
		rows = append(rows, []string{"type " + t.Name, fmt.Sprintf(
			"%s nodes; rows %s, of them in the GPU %s, in CPU memory %s; offsets %s, ids %s; %s in a mini-batch",
			units.FormatCount(float64(t.Nodes)), b(t.Rows), b(t.GPUCache), b(t.CPUCache),
			b(t.Offsets), b(t.IDs), byHop(t.NodesByHop))})
	}
	for _, x := range r.Relations {
		rows = append(rows, []string{"relation", fmt.Sprintf("%s: %s edges; %s in a mini-batch",
			x.Name, units.FormatCount(float64(x.Edges)), byHop(x.EdgesByHop))})
	}
	if m := r.Mega; m != nil && m.CutSource != "" {
		rows = append(rows, []string{"parts", fmt.Sprintf(
			"%d of equal size; %.3g%% of the edges lead from part to part (%s), %.3g%% are in a mega-batch",
			m.Parts, 100*m.Cut, m.CutSource, 100*m.Kept)})
	}
	if m := r.Mega; m != nil {
		rows = append(rows, []string{"mega-batches", fmt.Sprintf(
			"%d of %d parts in memory, %d times each; %s loads one, in reads of %s; an epoch reads %s, by the formula %s",
			m.Loaded, m.Parts, m.Passes, secondsText(m.LoadSeconds), b(int64(m.RequestBytes)),
			b(m.FeatureBytes+m.EdgeBytes), b(m.EpochBytes))})
	}
	if r.Cost != nil {
		rows = append(rows, []string{"cost", fmt.Sprintf(
			"%.4g an epoch, %.4g before the first, at %.4g an hour", r.Cost.Epoch,
			r.Cost.Preparation, r.Cost.Hour)})
	}
	e.ui.Facts(rows)
	if r.Halving != nil {
		showHalving(e, r)
	}
}

// byHop lists means by hop.
func byHop(list []float64) string {
	parts := make([]string, len(list))
	for i, n := range list {
		parts[i] = units.FormatCount(math.Round(n))
	}
	return strings.Join(parts, ", ")
}

func skewFrom(g planner.Graph) string {
	if g.SkewSource == "" {
		return ""
	}
	return "; " + g.SkewSource
}

func secondsText(s float64) string { return fmt.Sprintf("%.3g s", s) }

// busyText lists how long an epoch keeps what is there busy.
func busyText(p *planner.Plan) string {
	var parts []string
	for _, name := range planner.Resources {
		if t := p.Busy[name]; t > 0 {
			parts = append(parts, fmt.Sprintf("%s %.0f%%", name, 100*t/p.Seconds))
		}
	}
	return strings.Join(parts, ", ")
}

func bytesText(m map[string]int64) string {
	var parts []string
	sum := int64(0)
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] > 0 {
			parts = append(parts, name+" "+units.FormatBytes(m[name]))
			sum += m[name]
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ") + "; " + units.FormatBytes(sum) + " in all"
}

func showHalving(e *env, r *planResult) {
	var rows [][]string
	for _, d := range r.Halving.Doubled {
		rows = append(rows, []string{strings.Join(d.What, " and "), fmt.Sprintf("%.4g", d.Seconds),
			fmt.Sprintf("%.2f", d.Gain), d.Bottleneck})
	}
	e.ui.Table([]string{"doubled", "s an epoch", "times as fast", "limit then"}, rows)
	steps := r.Halving.Steps
	if len(steps) == 0 {
		e.ui.Printf("modelled: nothing that can be doubled here, alone or in a pair, gains 2%%")
		return
	}
	last := steps[len(steps)-1]
	var all []string
	for _, name := range slices.Sorted(maps.Keys(last.Factors)) {
		all = append(all, fmt.Sprintf("%g times %s", last.Factors[name], name))
	}
	end := "halves the epoch's time"
	if !r.Halving.Halved {
		end = "is as far as doubling gets"
	}
	e.ui.Printf("modelled: %s %s: %.4g s, %.2f times as fast; then %s is the limit",
		strings.Join(all, ", "), end, last.Seconds, last.Gain, last.Bottleneck)
}
