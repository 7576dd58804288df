package plan

import (
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"helios/cache/policy"
	"helios/cuda"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/internal/options"
	"helios/internal/rowtype"
	"helios/internal/units"
)

// The lists that tags of settings name.
var _ = options.Define("pipelines", func() []string { return PipelineNames(nil) }) &&
	options.Define("pipeline-summaries", pipelineSummaries) &&
	options.Define("stacks", func() []string { return Stacks }) &&
	options.Define("policies", func() []string { return Policies }) &&
	options.Define("policy-summaries", policySummaries) &&
	options.Define("directories", policy.Kinds) &&
	options.Define("samplers", func() []string { return Samplers }) &&
	options.Define("sampler-summaries", samplerSummaries) &&
	options.Define("dependent-samplers", graph.DependentNames) &&
	options.Define("topologies", func() []string { return Topologies }) &&
	options.Define("hotnesses", func() []string { return Hotnesses }) &&
	options.Define("metrics", metrics.Names) &&
	options.Define("tunes", func() []string { return Tunes }) &&
	options.Define("precisions", cuda.Precisions) &&
	options.Define("rungs", func() []string {
		return append([]string{gpuio.RungAuto},
			gpuio.Rungs()...)
	}) &&
	options.Define("row-types", rowtype.Names) &&
	options.Define("page-places", func() []string { return PagePlaces }) &&
	options.Define("clocks", func() []string { return Clocks })

// summaries joins what a list says of its names.
func summaries(about []string) []string { return []string{strings.Join(about, "; ")} }

func pipelineSummaries() (about []string) {
	for _, p := range pipelines {
		about = append(about, p.Name+": "+p.Summary)
	}
	return summaries(about)
}

func policySummaries() []string {
	about := []string{PolicyStatic + ": rows are placed once, by hotness",
		PolicyBelady + ": both tiers keep what a superbatch needs next"}
	for _, p := range policy.All() {
		about = append(about, p.Name+": "+p.Summary)
	}
	return summaries(about)
}

func samplerSummaries() (about []string) {
	for _, m := range graph.Methods() {
		about = append(about, m.Name+": "+m.Summary)
	}
	return summaries(about)
}

// DefaultText returns the words of help for a default that its field does not hold.
func (c *Config) DefaultText(name string) string {
	if name == "gpu-cache" && c.GPUCacheAuto {
		return "auto"
	}
	return ""
}

// SetOption sets the settings whose texts say more than a field holds.
func (c *Config) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "seed":
		n, err := strconv.ParseUint(text, 10, 64)
		c.SeedZero = err == nil && n == 0
	case "gpu-cache":
		if c.GPUCacheAuto = text == "auto"; c.GPUCacheAuto {
			c.GPUCache = units.Budget{}
			return true, nil
		}
		return true, readCache(&c.GPUCache, name, text)
	case "cpu-cache":
		return true, readCache(&c.CPUCache, name, text)
	case "neighbor-cache":
		if c.NeighborShared = text == "shared"; c.NeighborShared {
			c.NeighborCache = units.Budget{}
			return true, nil
		}
		return true, readCache(&c.NeighborCache, name, text)
	case "on-ssd-failure":
		c.ReadResets, err = parseResets(text)
		return true, err
	case "coalesce":
		c.CoalesceBytes, err = ParseCoalesce(text)
		return true, err
	case "blas", "hotness-dir":
		if text == "" {
			return true, errs.New(errs.Usage, "%v: empty; leave it out, or give %s", errs.Key(name),
				map[string]string{"blas": "off, auto or the path of libcublas",
					"hotness-dir": "a folder or off"}[name])
		}
	case "hotness":
		return false, CheckHotness(text)
	}
	return false, nil
}

// readCache reads the size of a tier. A 0 that is given is none, whatever the mode has.
func readCache(to *units.Budget, name, text string) (err error) {
	if *to, err = units.ParseBudget(text); err != nil {
		return errs.New(errs.Usage, "%v %w", errs.Key(name), err)
	}
	if *to == (units.Budget{}) {
		*to = NoCache()
	}
	return nil
}

// CheckHotness refuses what names neither a source of hotness nor a file.
func CheckHotness(name string) error {
	if name == "" || slices.Contains(Hotnesses, name) {
		return nil
	}
	if fi, err := os.Stat(name); err != nil || !fi.Mode().IsRegular() {
		return errs.New(errs.Usage, "%v %q is neither one of %s nor a file that is there; %s",
			errs.Key("hotness"), name, strings.Join(Hotnesses, ", "), options.Meant(name, Hotnesses,
				"name a .npy or text file of node numbers, hottest first"))
	}
	return nil
}

// parseResets reads how often controllers are reset: -1 for never.
func parseResets(text string) (int, error) {
	if text == "stop" {
		return -1, nil
	}
	if v, ok := strings.CutPrefix(text, "retry="); ok {
		if n, err := strconv.Atoi(v); err == nil && n >= 1 && n <= math.MaxInt16 {
			return n, nil
		}
	}
	return 0, errs.New(errs.Usage, "%v %q is neither \"stop\" nor \"retry=N\" with N from 1 to %d",
		errs.Key("on-ssd-failure"), text, math.MaxInt16)
}

// ParseCoalesce reads the most bytes of a command: 0 for the stack's choice, -1 for a row each.
func ParseCoalesce(text string) (int, error) {
	switch text {
	case "auto":
		return 0, nil
	case "off":
		return -1, nil
	}
	n, err := units.ParseBytes(text)
	if err != nil || n < 512 || n > 1<<30 {
		return 0, errs.New(errs.Usage,
			"%v %q is neither \"auto\" nor \"off\" nor a size from 512 B to 1 GiB",
			errs.Key("coalesce"), text)
	}
	return int(n), nil
}

// SetText reads the limits of operators, as io=4,train=8.
func (b *SMBudget) SetText(text string) error {
	parts, err := options.List(text)
	if err != nil {
		return err
	}
	limits := map[string]*int{"sample": &b.Sample, "lookup": &b.Lookup, "io": &b.IO,
		"gather": &b.Gather, "train": &b.Train}
	for _, p := range parts {
		op, n, _ := strings.Cut(p, "=")
		limit, ok := limits[op]
		if !ok {
			return errs.New(errs.Usage,
				"%v: unknown operator %q; choose one of sample, lookup, io, gather, train",
				errs.Key("sm-budget"), op)
		}
		if *limit, err = strconv.Atoi(n); err != nil || *limit < 1 {
			return errs.New(errs.Usage, "%v %q is not OP=N with N at least 1", errs.Key("sm-budget"), p)
		}
	}
	return nil
}

// IsBoolFlag has a command line take the setting for a switch.
func (c *Checks) IsBoolFlag() bool { return true }

// SetText reads on or off; a run without the setting has neither.
func (c *Checks) SetText(text string) error {
	on, err := strconv.ParseBool(text)
	if *c = ChecksOff; on {
		*c = ChecksOn
	}
	return err
}
