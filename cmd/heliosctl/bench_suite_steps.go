package main

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/cache/policy"
	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/bench/cache"
	"helios/sched/plan"
)

// suiteGroups are the groups of --only, in the order of the report.
var suiteGroups = []string{"io", "memory", "cache", "sample", "compute", "pipeline", "modes"}

// suiteStep is one benchmark of the suite: a command line of heliosctl, which writes its own
// results.
type suiteStep struct {
	name, group, title string
	clock              string
	args               []string
	// turned are the flags whose lists are turned round in every second round, so that no value is
	// always measured first.
	turned []string
	rounds int
	points int // rows of results of a round whose length --seconds sets; 0: it has no --seconds
	// apart: it reads SSDs that training does not.
	apart bool
	reads bool // bound SSDs, or a dataset
}

// suiteSize is the amount of work of a preset.
type suiteSize struct {
	seconds float64 // of a measurement
	rounds  int
	// The suite's own software SSDs and dataset.
	ssds     int
	ssdBytes string
	nodes    int
	model    []string // flags of a model's training
	// Graphs, tiers and matrices in memory.
	sampleNodes, cacheNodes, cacheRows int
	tier, set                          string
	computeRows                        int
	shapes                             string
	virtualSeconds                     string // "": as many as bench io takes by itself
}

// suiteSizes are the presets.
var suiteSizes = map[string]suiteSize{
	"smoke": {seconds: 0.02, rounds: 2, ssds: 2, ssdBytes: "4MiB", nodes: 2000,
		model: []string{"--hidden=8", "--fanout=3,3", "--batch-size=256"}, sampleNodes: 2000,
		cacheNodes: 10000, cacheRows: 1000, tier: "1MiB", set: "256KiB", computeRows: 64,
		shapes: "nn:64x64x64", virtualSeconds: "0.004"},
	"quick": {seconds: 0.25, rounds: 3, ssds: 4, ssdBytes: "32MiB", nodes: 20000,
		model:       []string{"--hidden=64", "--fanout=10,5", "--batch-size=1000"},
		sampleNodes: 500_000, cacheNodes: 10_000_000, cacheRows: 200_000, tier: "256MiB",
		set: "64MiB", computeRows: 4096, shapes: "nn:4096x256x256,nt:4096x256x256,tn:256x256x4096"},
	"full": {seconds: 2, rounds: 5, ssds: 4, ssdBytes: "256MiB", nodes: 200_000,
		model:       []string{"--hidden=256", "--fanout=15,10,5", "--batch-size=1000"},
		sampleNodes: 4_000_000, cacheNodes: 100_000_000, cacheRows: 1_000_000, tier: "1GiB",
		set: "256MiB", computeRows: 65536},
}

// suiteModel is the SSD that the suite's own software SSDs play: one that two cores can play in
// wall time, so that the SSDs are what is measured and not the cores.
const suiteModel = "slow"

// suiteRow is the bytes of a row of the suite's own dataset.
const (
	suiteDim = 128
	suiteRow = 4 * suiteDim
)

// steps are those of a suite.
func (s *suite) steps() (all []suiteStep) {
	for _, clock := range s.clocks {
		all = append(all, s.ioSteps(clock)...)
		if clock == iobench.ClockWall {
			all = append(all, s.kernelSteps()...)
		}
		all = append(all, s.trainSteps(clock)...)
	}
	return slices.DeleteFunc(all, func(x suiteStep) bool {
		return len(s.only) > 0 && !slices.Contains(s.only, x.group)
	})
}

// sized writes a flag with numbers.
func sized(name string, values ...int) string {
	var words []string
	for _, v := range values {
		words = append(words, strconv.Itoa(v))
	}
	return "--" + name + "=" + strings.Join(words, ",")
}

// upTo are 1, 2, 4, … below n, and n.
func upTo(n int) (all []int) {
	for v := 1; v < n; v *= 2 {
		all = append(all, v)
	}
	return append(all, n)
}

// ioSteps read by the number of SSDs, by blocks, row size, depth and stack.
func (s *suite) ioSteps(clock string) []suiteStep {
	count, where, rounds := s.ssdCount, s.ssdFlags(), s.size.rounds
	counts := upTo(count)
	if clock == iobench.ClockVirtual {
		count, rounds = s.hardware.SSDs.Count.Int(), 1
		where = []string{"--clock=virtual", "--hardware=" + s.profile}
		if s.size.virtualSeconds != "" {
			where = append(where, "--seconds="+s.size.virtualSeconds)
		}
		counts = nil
		for n := 1; n <= count; n++ {
			counts = append(counts, n)
		}
	}
	// Stacks that read past the controllers read past what these play, too.
	stacks := gpuio.StackNames(queued)
	if clock == iobench.ClockVirtual {
		stacks = gpuio.StackNames(nil)
	}
	async := []string{gpuio.StackAsync}
	step := func(name, title string, stacks []string, points int, turned string,
		flags ...string) suiteStep {
		args := slices.Concat([]string{"bench", "io"}, where,
			[]string{"--io-stack=" + strings.Join(stacks, ","), "--coalesce=off"}, flags)
		return suiteStep{name: name, group: "io", title: title, clock: clock, args: args,
			turned: []string{"io-stack", turned}, rounds: rounds, points: points * len(stacks),
			reads: clock == iobench.ClockWall}
	}
	blocks, depths := []int{1, 2, 4, 8, 16, 32}, []int{1, 4, 16, 64, 256}
	rows := []int{suiteRow, 1024, 4096, 16384}
	all := []suiteStep{
		step("ssds", "Reads by number of SSDs", stacks, len(counts), "ssd-count",
			sized("ssd-count", counts...)),
		step("blocks", "Reads by I/O blocks", gpuio.StackNames(queued), len(blocks), "io-blocks",
			sized("ssd-count", count), sized("io-blocks", blocks...)),
		step("rows", "Reads by row size", async, len(rows), "row-bytes", sized("ssd-count", count),
			sized("row-bytes", rows...)),
		step("depth", "Reads by depth", async, len(depths), "depth", sized("ssd-count", count),
			sized("depth", depths...)),
	}
	if clock == iobench.ClockWall && s.own { // the software alone, with SSDs that take no time
		x := step("stacks", "Reads by stack, from SSDs that take no time", gpuio.StackNames(nil), 1,
			"", sized("ssd-count", len(s.fast)))
		x.args = append(slices.DeleteFunc(x.args, func(a string) bool {
			return strings.HasPrefix(a, "--ssds=")
		}), "--ssds="+strings.Join(s.fast, ","))
		x.apart = true
		all = append(all, x)
	}
	return all
}

// ssdFlags choose the SSDs that training reads.
func (s *suite) ssdFlags() []string {
	if !s.own {
		return nil
	}
	return []string{"--ssds=" + strings.Join(s.slow, ",")}
}

// kernelSteps measure what needs no SSD.
func (s *suite) kernelSteps() []suiteStep {
	z := &s.size
	device := "--device=" + s.device
	host := s.device == "host"
	step := func(group, title string, points int, turned []string, args ...string) suiteStep {
		return suiteStep{name: group, group: group, title: title, clock: iobench.ClockWall,
			args: append([]string{"bench", group, device}, args...), turned: turned,
			rounds: z.rounds, points: points}
	}
	policies := append([]string{cache.Static}, policy.Online()...)
	compute := []string{sized("rows", z.computeRows)}
	if z.shapes != "" {
		compute = append(compute, "--shapes="+z.shapes)
	}
	sampled := []string{"--nodes=" + strconv.Itoa(z.sampleNodes), "--graph=skewed", "--turns=3"}
	if host {
		sampled = append(sampled, sized("workers", upTo(runtime.NumCPU())...))
		compute = append(compute, sized("workers", runtime.NumCPU()))
	}
	return []suiteStep{
		step("memory", "Gathers of cached rows", 2*2, []string{"row-bytes"},
			sized("row-bytes", suiteRow, 4096), "--tier="+z.tier, "--set="+z.set),
		step("cache", "Lookups in caches", len(policies), []string{"policy"},
			"--policy="+strings.Join(policies, ","), sized("nodes", z.cacheNodes),
			sized("rows", z.cacheRows)),
		step("sample", "Neighbour sampling", 2, []string{"workers"}, sampled...),
		step("compute", "Kernels of models", 30, nil, compute...),
	}
}

// trainSteps compare pipelines and modes. Each step has its repeats in it, in turns.
func (s *suite) trainSteps(clock string) []suiteStep {
	var pipelines []string
	ofAnyMode := func(p *plan.Pipeline) bool { return p.Check == nil }
	for _, p := range plan.PipelineNames(ofAnyMode) {
		pipelines = append(pipelines, fmt.Sprintf("%s=--pipeline %s", p, p))
	}
	where := append(s.ssdFlags(), "--device="+s.device,
		fmt.Sprintf("--repeats=%d", s.size.rounds))
	if clock == iobench.ClockVirtual {
		where = []string{"--clock=virtual", "--hardware=" + s.profile}
	}
	step := func(group, title string, args ...string) suiteStep {
		return suiteStep{name: group, group: group, title: title, clock: clock, rounds: 1,
			reads: true,
			args:  slices.Concat([]string{"compare"}, where, s.size.model, args, []string{s.dataset})}
	}
	return []suiteStep{
		step("pipeline", "Pipelines", "--variants="+strings.Join(pipelines, "; "), "--gpu-cache=5%"),
		step("modes", "Modes", "--gpu-cache=5%", "--cpu-cache=10%"),
	}
}

// key tells a step from those of the other clock.
func (x *suiteStep) key() string { return x.name + "-" + x.clock }

// verb is the step's, with the groups that it is in.
func (x *suiteStep) verb() string {
	if x.args[0] == "bench" {
		return strings.Join(x.args[:2], " ")
	}
	return x.args[0]
}

// arguments are the step's command line in a round, from 0.
func (x *suiteStep) arguments(round int, seconds float64, results string) []string {
	args := slices.Clone(x.args)
	for i, a := range args {
		name, value, ok := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if ok && round%2 == 1 && slices.Contains(x.turned, name) {
			values := strings.Split(value, ",")
			slices.Reverse(values)
			args[i] = "--" + name + "=" + strings.Join(values, ",")
		}
	}
	flags := []string{"--results=" + results, "--quiet"}
	if x.points > 0 && x.clock == iobench.ClockWall {
		flags = append(flags, "--seconds="+strconv.FormatFloat(seconds, 'g', 6, 64))
	}
	words := len(strings.Fields(x.verb()))
	return slices.Insert(args, words, flags...)
}

// fit returns how long a measurement may take for the suite to end in about so long. Half of the
// time is for what has no length of its own: training, audits and set-up.
func (s *suite) fit(all []suiteStep, budget time.Duration) float64 {
	sum := 0.0
	for _, x := range all {
		if x.clock == iobench.ClockWall {
			sum += float64(x.points*x.rounds) * 1.5 // a quarter to warm up, and one for the limits
		}
	}
	if sum == 0 {
		return s.size.seconds
	}
	return min(max(budget.Seconds()/2/sum, 0.02), 60)
}

// work are the files of the suite's own SSDs and dataset.
func (s *suite) work(name ...string) string {
	return filepath.Join(append([]string{s.out, "work"}, name...)...)
}
