package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"helios/cache/policy"
	"helios/gnn"
	"helios/graph"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/nvme/proxy"
	"helios/sched"
	"helios/sched/cost"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/virtual"
)

func compareCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "compare",
		Usage:     "train the same model by several data paths in turns, and tell their times, bytes, hits and bottlenecks",
		ArgsUsage: "[DATASET]",
		Description: "Each variant trains from the same seed, without evaluation; then the next one does, and all of them again, --repeats times.\n" +
			"Times are those of an epoch's training after the first, where --epochs has more than one: the first fills dynamic tiers.\n" +
			"Ratios are to the first variant, by repeat: the median and, in brackets, the least and the most. Losses must be the same.\n" +
			"Flags of train hold for all variants; --cpu-cache for those modes that have that tier; --gpu-cache, --policy, --cache-line and\n" +
			"--window for those whose GPU tier can have them. A variant of its own can say anything but what all runs share: the dataset,\n" +
			"its edges, the SSDs and the device.\n" +
			"All have equal cache memory. Where the GPU tier is the CPU's memory, each mode's tiers have --gpu-cache and --cpu-cache\n" +
			"together: a mode with one tier has the sum in it. A variant that sizes a tier itself keeps what it says, and a note tells\n" +
			"whose memory differs. With a GPU, whose memory is another kind, each mode has the tiers that it uses.\n" +
			"With --clock virtual each variant is played once, and all figures are modelled.",
	}, 1, compareOptions(), runCompare)
}

// compareArgs holds the options of compare. The configuration of its runArgs has the flags that
// hold for all variants.
type compareArgs struct {
	runArgs
	clockArgs
	modes    []string `option:"modes" common:"yes" use:"setting" offers:"@modes,@baselines" default:"@modes" arg:"MODE,…" usage:"data paths to compare MODE,…, or baselines of papers ({@baselines}); the first is what the others are told relative to"`
	variants string   `option:"variants" common:"yes" arg:"NAME=FLAGS; …" usage:"also compare, or without {modes} only compare, these: NAME=FLAGS; … with flags of train, as \"lru=--mode bam --policy lru; none=--pipeline none\""`
	repeats  int      `option:"repeats" common:"yes" range:"1..1000" positive:"yes" default:"3" usage:"how often each is run, in turns"`
	explain  bool     `option:"explain" use:"aside" usage:"add what bounds each data path, and all notes"`
}

// compareOptions are train's that make sense for all variants, two epochs by default, and its own.
func compareOptions() hcli.Options[compareArgs] {
	return hcli.Of[compareArgs]().WithoutGroups("Replicas", "Run").Without("other-dataset", "mode",
		"timeline", "fault").Shown(strconv.Itoa(comparedEpochs), "epochs")
}

// comparedOptions are those that hold for all variants.
func comparedOptions() hcli.Options[runArgs] {
	return hcli.Of[runArgs]().WithoutGroups("Replicas", "Run").Without("other-dataset", "mode",
		"timeline", "fault", "results", "overwrite").Shown(strconv.Itoa(comparedEpochs), "epochs")
}

// UseOf classifies the text of --variants by the flags in it.
func (a *compareArgs) UseOf(name, text string) (use hcli.Use, decided bool) {
	if name != "variants" {
		return hcli.Unknown, false
	}
	uses := hcli.Of[runArgs]().Uses()
	known := &cli.Command{Flags: variantFlags()}
	for part := range strings.SplitSeq(text, ";") {
		_, args, _ := strings.Cut(part, "=")
		flags, _, _, err := parse(known, "compare", strings.Fields(args))
		if err != nil {
			return hcli.Unknown, true
		}
		for _, f := range flags {
			if use := uses[f.name]; use == nil || use(f.value) != hcli.Setting {
				return hcli.Unknown, true
			}
		}
	}
	return hcli.Setting, true
}

// variantFlags are those that a variant may have of its own.
func variantFlags() []cli.Flag {
	return append(comparedOptions().Flags(), hcli.Lookup(hcli.Of[runArgs]().Flags(), "mode"))
}

// comparedEpochs is the default number of epochs of each run: the first fills tiers.
const comparedEpochs = 2

// variant is one of the ways to train.
type variant struct {
	name string
	cfg  plan.Config
	// ownTiers: its own flags size a tier, and it keeps what they say.
	ownTiers bool
	// optional: left out with a note where the machine has no room for it, since nobody asked for
	// it by name.
	optional bool
}

// ofTiers are the flags about tiers that not every mode has: a mode takes those of its
// TierOptions over from the flags for all.
var ofTiers = slices.Concat([]string{"gpu-cache", "cpu-cache", "policy"}, plan.HotnessOptions(),
	tiers.Catalog.Options())

// baselineNames are the names that --modes takes beside those of modes.
func baselineNames() (names []string) {
	for _, b := range tiers.Catalog.Baselines() {
		names = append(names, b.Name)
	}
	return names
}

// ofMode are the flags of a mode or a baseline.
func ofMode(name string) []string {
	for _, b := range tiers.Catalog.Baselines() {
		if b.Name == name {
			flags := []string{"--mode", b.Mode}
			for _, o := range b.Options {
				flags = append(flags, "--"+o[0], o[1])
			}
			return flags
		}
	}
	return []string{"--mode", name}
}

// sharedFlags decide what all runs work on, which is opened once.
var sharedFlags = []string{"dataset", "no-edges", "workers", "device", "kernels", "ssds"}

// comparer trains by several data paths.
type comparer struct {
	*env
	*compareArgs
	*comparison
	out     *results
	in      prepare.Inputs
	set     *ssdSet
	played  *cost.Hardware // of the virtual clock; nil: runs are measured
	far     progressOfRuns
	rest    int               // runs that are not done
	leftOut map[string]bool   // variants that there is no room for
	first   map[string]string // results that must be the same → the variant that had them first
}

// readVariants reads what is to be compared.
func (c *comparer) readVariants() ([]variant, error) {
	var out []variant
	add := func(name string, optional bool, args ...string) error {
		if slices.ContainsFunc(out, func(v variant) bool { return v.name == name }) {
			return errs.New(errs.Usage, "two variants are called %q; give each a name of its own",
				name)
		}
		cfg, ownTiers, err := c.variantConfig(args)
		if err == nil && !optional { // before hours of the other variants
			err = cfg.Check()
		}
		if err != nil {
			return errs.New(errs.ClassOf(err), "variant %s: %s", name,
				errs.Spell(err, errs.Key.Flag))
		}
		out = append(out, variant{name, cfg, ownTiers, optional})
		return nil
	}
	if asked := c.given(&c.modes) != ""; asked || c.variants == "" {
		for _, m := range c.modes {
			if err := add(m, !asked, ofMode(m)...); err != nil {
				return nil, err
			}
		}
	}
	for part := range strings.SplitSeq(c.variants, ";") {
		if strings.TrimSpace(part) == "" {
			continue
		}
		name, flags, ok := strings.Cut(part, "=")
		if name = strings.TrimSpace(name); !ok || name == "" || strings.HasPrefix(name, "-") {
			return nil, errs.New(errs.Usage, "{variants}: %q is not NAME=FLAGS",
				strings.TrimSpace(part))
		}
		if err := add(name, false, strings.Fields(flags)...); err != nil {
			return nil, err
		}
	}
	if len(out) < 2 {
		return nil, errs.New(errs.Usage,
			"{modes} and {variants} name %d of what is to be compared; give at least two", len(out))
	}
	return out, nil
}

// variantConfig returns train's configuration by the flags for all and a variant's own, which win.
// ownTiers reports that its own flags size a tier.
func (c *comparer) variantConfig(args []string) (cfg plan.Config, ownTiers bool, err error) {
	flags := variantFlags()
	own, positional, _, err := parse(&cli.Command{Flags: flags}, "compare", args)
	if err != nil {
		return cfg, false, err
	}
	if len(positional) > 0 {
		return cfg, false, errs.New(errs.Usage, "%q is no flag", positional[0])
	}
	for _, f := range own {
		if slices.Contains(sharedFlags, f.name) {
			return cfg, false, errs.New(errs.Usage,
				"%v is the same for all runs, which share dataset, device and SSDs; give it outside {variants}, or compare two runs of train",
				errs.Key(f.name))
		}
	}
	shared := c.sharedTierOptions(own)
	values := map[string]string{}
	for _, f := range flags {
		name := f.Names()[0]
		if c.c.IsSet(name) && name != "mode" &&
			(!slices.Contains(ofTiers, name) || slices.Contains(shared, name)) {
			values[name] = fmt.Sprint(c.c.Value(name))
		}
	}
	for _, f := range own { // its own flags win
		values[f.name] = f.value
	}
	cfg = plan.Config{Epochs: comparedEpochs, NoEval: true}
	if err := c.setOptions(&cfg, values); err != nil {
		return cfg, false, err
	}
	if cfg.HotnessDir == "" {
		cfg.HotnessDir = plan.NoFolder // each run finds its own: set-up times are compared too
	}
	return cfg, ownsTiers(own), nil
}

// sharedTierOptions returns the options about tiers that a variant takes over from the flags for
// all.
func (c *comparer) sharedTierOptions(own flagValues) []string {
	name, _ := own.get("mode")
	if _, err := tiers.Catalog.Mode(cmp.Or(name, plan.DefaultMode)); err != nil {
		return nil // the flag refuses it
	}
	cfg := plan.Config{Mode: name}
	policy, is := own.get("policy")
	if !is && slices.Contains(cfg.TierOptions(), "policy") && c.c.IsSet("policy") {
		policy = fmt.Sprint(c.c.Value("policy"))
	}
	cfg.Policy = policy
	return cfg.TierOptions()
}

// setOptions sets options of train by name, in one order, whatever was typed.
func (c *comparer) setOptions(cfg *plan.Config, values map[string]string) error {
	options := hcli.Of[plan.Config]().WithoutGroups("Replicas", "Run")
	for _, o := range options {
		value, ok := values[o.Key()]
		if !ok {
			continue
		}
		if err := options.Set(cfg, o.Key(), value); err != nil {
			return err
		}
	}
	return nil
}

// comparedRun is one run of a variant.
type comparedRun struct {
	Variant string `json:"variant"`
	Repeat  int    `json:"repeat"` // from 1
	Mode    string `json:"mode"`
	IOStack string `json:"io_stack"`
	// Pipeline and Policy as they were by mode or by flag.
	Pipeline string `json:"pipeline"`
	// Epochs whose means the figures are; the first one is left out where there are more.
	Epochs  int     `json:"epochs_measured"`
	Seconds float64 `json:"epoch_seconds"`
	First   float64 `json:"first_epoch_seconds"`
	Setup   float64 `json:"setup_seconds"` // presampling and the filling of the tiers
	// Prepare is the time of laying mini-batches out beforehand, whenever that was. Amortised is an
	// epoch with its part of Setup and Prepare, over the epochs of the run.
	Prepare   float64 `json:"prepare_seconds"`
	Amortised float64 `json:"amortised_epoch_seconds"`

	RowsGPU           float64             `json:"rows_gpu"`
	RowsCPU           float64             `json:"rows_cpu"`
	RowsSSD           float64             `json:"rows_ssd"`
	BytesSSD          float64             `json:"bytes_ssd"`
	Commands          float64             `json:"ssd_commands"`
	ReadAmplification float64             `json:"read_amplification"`
	Stall             float64             `json:"stall"`
	Overlap           float64             `json:"overlap"`
	Stages            report.StageSeconds `json:"stage_seconds"`
	cpuUse
	// DiskBytes are the bytes that the kernel read from disks for the process in an epoch: rows of
	// files, also by page faults, neighbour lists and the samples of superbatches; 0 where the
	// kernel does not count them.
	DiskBytes  float64 `json:"disk_bytes"`
	PeakMemory int64   `json:"peak_memory_bytes"`
	GPUCache   int64   `json:"gpu_cache_bytes"`
	CPUCache   int64   `json:"cpu_cache_bytes"`
	Topology   int64   `json:"topology_bytes"` // of neighbour lists in memory
	// absent where nothing was computed, as the next
	Losses     []float64 `json:"losses,omitempty"`
	Params     string    `json:"params_sha256,omitempty"`
	Bottleneck string    `json:"bottleneck"`
	// software SSDs played a model, or all times are the virtual clock's
	Modelled bool `json:"modelled"`
}

// cpuUse is CPU time of an epoch.
type cpuUse struct {
	// the process's, and of it the software controllers'
	CPUSeconds   float64 `json:"cpu_seconds"`
	ProxySeconds float64 `json:"proxy_cpu_seconds"`
}

// usage is CPU time of the process, and what was read from disks.
type usage struct {
	hostcpu.Usage
	disk int64
}

func usageNow() usage { return usage{hostcpu.Now(), diskBytes()} }

// cpuBetween is CPU time from a to b, as a part of one in n.
func cpuBetween(a, b usage, n float64) (u cpuUse) {
	u.CPUSeconds = (b.Process - a.Process).Seconds() / n
	spent, _ := b.Since(a.Usage)
	for k, t := range spent {
		if k.Stage == proxy.Stage {
			u.ProxySeconds += t.Seconds() / n
		}
	}
	return u
}

// diskBytes returns the bytes that the process has had read from disks so far, 0 where the kernel
// does not count them.
func diskBytes() int64 {
	b, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "read_bytes: "); ok {
			v, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64) // else 0
			return v
		}
	}
	return 0
}

func runCompare(ctx context.Context, e *env, a *compareArgs) (err error) {
	if err := e.oneProcess(); err != nil {
		return err
	}
	c := &comparer{env: e, compareArgs: a, comparison: &comparison{}, leftOut: map[string]bool{},
		first: map[string]string{}}
	vs, err := c.readVariants()
	if err != nil {
		return err
	}
	if err := c.chooseClock(); err != nil {
		return err
	}
	if c.out, err = a.openResults(e); err != nil {
		return err
	}
	defer c.out.end(&err)
	s, err := c.openInputs(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, s.close)
	defer hostcpu.Meter()()
	if vs, err = c.settle(vs); err != nil {
		return err
	}
	if c.played == nil {
		remove, perr := packApart(vs, c.in.Dataset.Dir())
		defer closing(&err, remove)
		if perr != nil {
			return perr
		}
	}
	if err := c.runAll(ctx, vs); err != nil {
		return err
	}
	c.addNotes(vs)
	sum := c.summary()
	c.showComparison(sum)
	c.out.event("compare", sum)
	return nil
}

// chooseClock reads the machine of the virtual clock. Under it equal arguments give equal results,
// and one repeat is enough.
func (c *comparer) chooseClock() error {
	hw, modelled, err := c.clockArgs.hardware(c.env, notVirtual(&c.runArgs))
	if err != nil || !modelled {
		return err
	}
	if c.given(&c.repeats) != "" && c.repeats > 1 {
		return errs.New(errs.Usage,
			"{repeats} %d: under {clock} virtual each run would be the same; leave it out",
			c.repeats)
	}
	c.repeats, c.played = 1, &hw
	return nil
}

// openInputs opens the dataset, the device and, of measured runs, the SSDs.
func (c *comparer) openInputs(ctx context.Context) (s *session, err error) {
	if c.played != nil {
		s, err = openGraph(c.env, &c.runArgs, "--clock virtual samples on the host device")
	} else {
		s, err = openSession(ctx, c.env, &c.runArgs)
	}
	if err != nil {
		return nil, err
	}
	c.in, c.set = s.Inputs, s.set
	c.cores, c.device, c.dataset = hostcpu.Count(), s.Dev.Info().Name, s.Dataset.Meta.Name
	if c.played != nil {
		p := c.played.Profile
		c.comparison.hardware, c.device, c.cores = p.Name, p.GPU.Name+" (modelled)", 0
	}
	return s, nil
}

// settle divides the memory between the variants and returns those that can run.
func (c *comparer) settle(vs []variant) ([]variant, error) {
	if err := c.shareMemory(vs); err != nil {
		return nil, err
	}
	vs, err := c.checkVariants(vs)
	c.names = variantNames(vs)
	return vs, err
}

// runAll runs all variants in turns.
func (c *comparer) runAll(ctx context.Context, vs []variant) error {
	c.rest = c.repeats * len(vs)
	c.far = progressOfRuns{ui: c.ui, whole: "compare", runs: int64(c.rest)}
	for repeat := range c.repeats {
		for i := range vs {
			v := vs[(i+repeat)%len(vs)] // no variant always follows the same one
			if c.leftOut[v.name] {
				continue
			}
			if err := c.runVariant(ctx, v, repeat); err != nil {
				return err
			}
		}
	}
	c.names = slices.DeleteFunc(c.names, func(n string) bool { return c.leftOut[n] })
	return nil
}

// runVariant runs a variant once, and leaves it out from then on where there is no room for it and
// nobody asked for it.
func (c *comparer) runVariant(ctx context.Context, v variant, repeat int) error {
	if c.set != nil {
		dropPages(c.set)
	}
	run, err := c.measure(ctx, v, repeat+1)
	if err != nil {
		class := errs.ClassOf(err)
		if v.optional && repeat == 0 && (class == errs.Usage || class == errs.Capability) &&
			ctx.Err() == nil {
			c.leftOut[v.name] = true
			c.rest -= c.repeats
			c.far.end(c.rest)
			c.leave(c.env, v.name, err)
			return nil
		}
		return whenStopped(fmt.Errorf("%s, repeat %d: %w", v.name, repeat+1, err),
			"a comparison saves nothing: start it again")
	}
	c.rest--
	c.far.end(c.rest)
	c.runs = append(c.runs, run)
	c.out.event("run", run)
	what := fmt.Sprintf("%s, repeat %d: ", v.name, repeat+1)
	if c.played != nil {
		what = v.name + ": modelled "
	}
	what += units.FormatSeconds(run.Seconds) + " an epoch"
	if c.explain {
		what += "; " + run.Bottleneck
	}
	c.ui.Printf("%s", what)
	if c.played != nil {
		return nil
	}
	key := resultKey(v.cfg)
	if first, ok := c.first[key]; ok {
		return c.same(first, run)
	}
	c.first[key] = v.name
	return nil
}

// measure trains a variant, or plays it.
func (c *comparer) measure(ctx context.Context, v variant, repeat int) (comparedRun, error) {
	if c.played != nil {
		return c.playOne(ctx, v)
	}
	return c.compareOne(ctx, v, repeat)
}

// addNotes adds the notes that a reader of all runs needs.
func (c *comparer) addNotes(vs []variant) {
	if c.played != nil {
		c.noteDirectory(vs)
	} else if slices.ContainsFunc(c.runs, func(x comparedRun) bool {
		return plan.Config{IOStack: x.IOStack}.Stack().PageCache
	}) {
		c.notePageCache(c.in)
	}
}

func variantNames(vs []variant) []string {
	out := make([]string, len(vs))
	for i, v := range vs {
		out[i] = v.name
	}
	return out
}

// resultKey is equal where losses must be, whether a default was typed or left out.
func resultKey(c plan.Config) string {
	c = c.WithDefaults()
	var drawn []any // what decides which nodes may be drawn
	if draws := c.System().Draws; draws != nil {
		drawn = draws(&c)
	}
	return fmt.Sprint(drawn, c.Shards,
		c.Model, c.Fanouts, c.Batch, c.Hidden, c.LR, c.Dropout, c.FeatureDropout,
		c.WeightDecay, c.Seed, c.Epochs,
		c.ModelConfig(), cmp.Or(c.Optimizer, gnn.DefaultOptimizer), cmp.Or(c.Sampler,
			graph.Neighbor),
		c.BatchDependency, c.SampledAs(c.Epochs),
		c.Precision, c.BLAS)
}

// dropPages takes the files behind software SSDs out of the page cache: what one run has read must
// not be a present to the next. Best effort: pages that are being written stay.
func dropPages(set *ssdSet) {
	for _, s := range set.SSDs {
		if s.BackingPath == "" {
			continue
		}
		if f, err := os.Open(s.BackingPath); err == nil {
			_ = unix.Fdatasync(int(f.Fd()))
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			_ = f.Close() // only read
		}
	}
}

// compareOne trains one variant once.
func (c *comparer) compareOne(ctx context.Context, v variant, repeat int) (comparedRun, error) {
	obs := c.observer()
	c.far.begin(fmt.Sprintf("%s, repeat %d", v.name, repeat), v.cfg.WithDefaults().Epochs)
	obs.Step = c.far.step
	var uses []usage // when training begins, and after each epoch
	obs.Plan = func(*plan.OpGraph) {
		if len(uses) == 0 {
			uses = append(uses, usageNow())
		}
	}
	obs.Epoch = func(report.EpochResult) { uses = append(uses, usageNow()) }
	res, err := sched.Train(ctx, v.cfg, c.in, obs)
	if err != nil {
		return comparedRun{}, err
	}
	c.set.markModelled(&res.IO, v.cfg)
	run, from := runOf(v.name, repeat, res)
	for _, ep := range res.Epochs {
		run.Losses = append(run.Losses, ep.Loss)
	}
	run.Params, run.PeakMemory = res.ParamsSHA256, res.PeakMemoryBytes
	if len(uses) == len(res.Epochs)+1 {
		a, b, n := uses[from], uses[len(uses)-1], float64(run.Epochs)
		run.cpuUse = cpuBetween(a, b, n)
		run.DiskBytes = float64(b.disk-a.disk) / n
	}
	run.Bottleneck = bottleneck(run, hostcpu.Count())
	return run, nil
}

// playOne plays one variant on the virtual clock.
func (c *comparer) playOne(ctx context.Context, v variant) (comparedRun, error) {
	obs := c.observer()
	c.far.begin(v.name, v.cfg.WithDefaults().Epochs)
	obs.Step = c.far.step
	res, err := virtual.Run(ctx, tiers.Simulation, v.cfg, c.in, *c.played, obs)
	if err != nil {
		return comparedRun{}, err
	}
	run, _ := runOf(v.name, 1, &res.Result)
	run.Modelled = true
	run.Bottleneck = bottleneck(run, 1)
	return run, nil
}

// runOf returns what a result says of a run: means over its epochs from the second on, or of its
// only one, which from tells.
func runOf(name string, repeat int, res *report.Result) (run comparedRun, from int) {
	run = comparedRun{
		Variant: name, Repeat: repeat, Mode: res.Mode, IOStack: res.IOStack, Pipeline: res.Pipeline,
		First: res.Epochs[0].Seconds, Setup: res.PresampleSecs + res.FillSeconds,
		GPUCache: res.GPUCacheBytes, CPUCache: res.CPUCacheBytes, Topology: res.TopologyBytes,
		Modelled: slices.ContainsFunc(res.IO.SSDs,
			func(s report.SSDResult) bool { return s.Model != "" }),
	}
	if res.Mega != nil { // rooms of whole parts
		run.CPUCache = res.Mega.Budget
	}
	from = min(1, len(res.Epochs)-1)
	part := *res
	part.Epochs = res.Epochs[from:]
	sum, seconds := epochsOf(&part)
	n := float64(len(part.Epochs))
	run.Epochs, run.Seconds = len(part.Epochs), seconds/n
	if res.Packed != nil {
		run.Prepare = res.Packed.Seconds
	}
	run.Amortised = run.Seconds + (run.Setup+run.Prepare)/float64(len(res.Epochs))
	gpu, cpu, ssd := sum.RowsGPU, sum.RowsCPU, sum.RowsSSD
	run.RowsGPU, run.RowsCPU, run.RowsSSD = float64(gpu)/n, float64(cpu)/n, float64(ssd)/n
	run.BytesSSD, run.Commands, run.ReadAmplification = float64(sum.BytesSSD)/n,
		float64(sum.SSDCommands)/n, sum.ReadAmplification
	run.Stall, run.Overlap = sum.Stall, sum.Overlap
	st := sum.StageSeconds
	run.Stages = report.StageSeconds{Sample: st.Sample / n, Inspect: st.Inspect / n,
		Lookup: st.Lookup / n, Submit: st.Submit / n, Complete: st.Complete / n,
		Gather: st.Gather / n, Train: st.Train / n, Topology: st.Topology / n,
		Between: st.Between / n}
	return run, from
}

// enoughStall is the share of an epoch in which training may wait without the data path being
// called its bottleneck.
const enoughStall = 0.10

// bottleneck names what an epoch's time went into, with figures: training where it hardly waited;
// else the stage that took longest, and whether the CPUs that play SSDs and GPU were themselves
// what ran out.
func bottleneck(r comparedRun, cores int) string {
	if r.Seconds <= 0 {
		return "nothing was measured"
	}
	s := r.Stages
	stages := []struct {
		name string
		t    float64
	}{{"sampling", s.Sample}, {"finding the cache's changes", s.Inspect}, {"lookup", s.Lookup},
		{"submission", s.Submit}, {"the SSDs", s.Complete}, {"gathering", s.Gather},
		{"the topology on storage", s.Topology}, {"launches, with nothing busy", s.Between}}
	slowest := stages[0]
	for _, x := range stages[1:] {
		if x.t > slowest.t {
			slowest = x
		}
	}
	of := func(t float64) string { return fmt.Sprintf("%.0f%%", 100*t/r.Seconds) }
	cpu := ""
	if busy := r.CPUSeconds / (r.Seconds * float64(cores)); busy >= 0.9 {
		cpu = fmt.Sprintf("; the CPUs, which play what is not there, are busy %.0f%% of the time",
			100*math.Min(busy, 1))
		if r.ProxySeconds > 0 {
			cpu += fmt.Sprintf(" (software SSDs %.0f%%)",
				100*r.ProxySeconds/(r.Seconds*float64(cores)))
		}
	}
	switch {
	case r.Stall <= enoughStall:
		return fmt.Sprintf("training: it waits %.0f%% of the time", 100*r.Stall) + cpu
	case slowest.t < 0.6*r.Seconds && r.Overlap < 0.1:
		return fmt.Sprintf(
			"nothing overlaps: training waits %.0f%% of the time, longest for %s (%s)", 100*r.Stall,
			slowest.name, of(slowest.t)) + cpu
	case slowest.name == "the SSDs":
		return fmt.Sprintf("the SSDs: reads are in flight %s of the time, %s/s", of(slowest.t),
			units.FormatBytes(int64(r.BytesSSD/r.Seconds))) + cpu
	}
	return fmt.Sprintf("%s: %s of the time", slowest.name, of(slowest.t)) + cpu
}

// comparison holds what was run.
type comparison struct {
	names   []string
	runs    []comparedRun
	cores   int
	device  string
	dataset string
	// hardware is the profile of a modelled comparison; empty: it was measured.
	hardware string
	memory   string // memoryTogether or memoryApart
	notes    []string
}

// leave notes a variant that there is no room for.
func (r *comparison) leave(e *env, name string, err error) {
	r.tell(e, fmt.Sprintf("%s is left out: %s", name, e.spell(err)))
}

// notePageCache notes that the page cache has room for all rows, where a stack reads through it.
func (r *comparison) notePageCache(in prepare.Inputs) {
	m := in.Dataset.Meta
	bytes := m.Nodes * int64(m.RowType().RowBytes(m.Dim))
	if free, err := hostmem.AvailableBytes(); err == nil && free > bytes {
		r.notes = append(r.notes,
			fmt.Sprintf(
				"memory has room (%s) for all features (%s): what mmap has read once it finds in the page cache, so its later epochs read no SSD",
				units.FormatBytes(free), units.FormatBytes(bytes)))
	}
}

// noteDirectory says of modelled dynamic tiers that their directory is one core's.
func (r *comparison) noteDirectory(vs []variant) {
	var names []string
	for _, v := range vs {
		c := v.cfg.WithDefaults()
		if c.Directory == policy.InQueues && slices.Contains(r.names, v.name) {
			names = append(names, v.name)
		}
	}
	if len(names) > 0 {
		r.notes = append(r.notes, fmt.Sprintf(
			"%s: one core looks rows up in the directory of the GPU tier (cpu.directory_ns of the profile); the directories of the GIDS and BaM papers are in GPU memory, as that of --directory %s is",
			strings.Join(names, ", "), policy.InSets))
	}
}

// same holds a run against the first one of the same results.
func (r *comparison) same(first string, run comparedRun) error {
	i := slices.IndexFunc(r.runs, func(x comparedRun) bool { return x.Variant == first })
	was := r.runs[i]
	for ep := range was.Losses {
		if ep >= len(run.Losses) || was.Losses[ep] != run.Losses[ep] {
			return errs.New(errs.Failed,
				"%s, repeat %d: the loss of epoch %d differs from that of %s: the same seed must give the same losses by every data path; this is a bug, please report it with both commands",
				run.Variant, run.Repeat, ep+1, first)
		}
	}
	if was.Params != run.Params {
		return errs.New(errs.Failed,
			"%s, repeat %d: its parameters differ from those of %s although all losses agree; this is a bug, please report it with both commands",
			run.Variant, run.Repeat, first)
	}
	return nil
}
