// Package plan turns a configuration into the plan of a run: it fills in defaults, refuses what
// can't be meant together, sizes the tiers of the feature cache, and draws the graph of operators
// that the engine runs and the virtual clock plays.
package plan

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"helios/cache/policy"
	"helios/cuda"
	"helios/gnn"
	"helios/gpuio"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/metrics"
	"helios/internal/options"
	"helios/internal/rowtype"
	"helios/internal/timeline"
	"helios/internal/units"
	diskgnn "helios/sched/tiers/diskgnn/spec"
	dynamic "helios/sched/tiers/dynamic/spec"
	ginex "helios/sched/tiers/ginex/spec"
	hier "helios/sched/tiers/hier/spec"
)

// MaxGroup is the most batches whose reads are merged: each keeps its sample in memory until it
// trains.
const MaxGroup = 32

// PolicyStatic places rows once, by hotness; the others are package policy's.
const PolicyStatic = "static"

// Where the topology is.
const (
	TopologyMemory = "memory" // the CPU's, read in place by the device
	// in-neighbour lists are read as they are needed, through a cache of lists
	TopologySSD = "ssd"
)

// Sources of rows' hotness, beside a file.
const (
	HotnessPresample = "presample"
	HotnessDegree    = "degree"
	HotnessPageRank  = "pagerank"
)

// How the tuner measures.
const (
	TuneOff   = "off"
	TuneQuick = "quick"
	TuneFull  = "full"
)

// PolicyBelady keeps, in both tiers, what the mini-batches of a superbatch need next (MIN with
// bypass, Belady 1966): these are sampled before the first of them trains.
const PolicyBelady = "belady"

// Checks turns the comparison of reads with their checksums on or off.
type Checks int8

// Values of Checks.
const (
	ChecksAuto Checks = iota // where there are checksums of what was stored
	ChecksOn                 // or it is an error
	ChecksOff
)

func (c Checks) String() string { return [...]string{"auto", "true", "false"}[c] }

// StackNone is reported in the place of a gpuio.Stack where no batch reads.
const StackNone = "none"

// MaxEpochs is the most epochs of a run: the numbers from there on key other uses of sampling.
const MaxEpochs = 1 << 20

// The accepted values of the fields of these names, for usage text.
var (
	Stacks     = gpuio.StackNames(nil)
	Policies   = append([]string{PolicyStatic, PolicyBelady}, policy.Online()...)
	Samplers   = graph.MethodNames()
	Topologies = []string{TopologyMemory, TopologySSD}
	Tunes      = []string{TuneOff, TuneQuick, TuneFull}
)

// Config is a training run: its settings, and what a caller hands over beside them. Zero values
// mean the defaults. The tags of a setting are its only declaration: flag, YAML key, help, checks,
// and what a checkpoint keeps (package options). SetOption reads the few texts that say more.
//
// Large: a field for each setting of a run, which callers set by name.
type Config struct {
	Mode string `option:"mode" group:"Data path" common:"yes" use:"setting" oneof:"auto,@modes" shown:"auto" usage:"data path; auto, where a model trains or is used: the fastest here of those whose results are equal to the bit, said with the reason"`

	// Chosen is the choice of ModeAuto; nil: Mode was given.
	Chosen *Choice

	// filled: defaults are in, so that zero values are meant.
	filled bool

	// The settings of these groups decide the parameters that come out.
	gnn.ModelSettings
	gnn.LossSettings
	// ClassWeights and PosWeight are Balanced or a file's path, PosWeight also a number. A
	// checkpoint keeps the weights that they give.
	ClassWeights string `option:"class-weights" group:"Model" use:"input" words:"balanced" shown:"1 each" arg:"FILE" usage:"weights of the classes in the loss: balanced (all classes count alike in training), or a FILE of a number for each (.npy or text)"`
	PosWeight    string `option:"pos-weight" group:"Model" use:"input" words:"balanced" shown:"1 each" arg:"WEIGHT" usage:"WEIGHT in {loss} bce of a label that is there: a number, balanced (by label, as heavy as all nodes without it), or a file of a number for each label"`
	// Fanouts are the neighbours of each hop, one model layer per hop; -1 takes every neighbour.
	Fanouts []int `option:"fanout" group:"Model" common:"yes" ints:"-1" shown:"10,10" print:"yes" arg:"F1,F2,…" usage:"neighbours sampled per hop F1,F2,…, the seeds' first; -1 takes all; one layer per hop"`
	Batch   int   `option:"batch-size" group:"Model" common:"yes" positive:"yes" range:"1..16777216" print:"yes" usage:"seed nodes in a mini-batch"`
	// RelationFanouts are those of a typed graph's relations that differ from Fanouts, or Together.
	RelationFanouts string `option:"relation-fanout" group:"Model" use:"setting" print:"yes" omit:"" arg:"NAME=F1,F2;…" usage:"fanouts NAME=F1,F2;… of relations of a typed graph, 0 for none; the others have those of {fanout}; or together: {fanout} counts over all relations into a node"`

	// Sampler is the name of a graph.Method; its Fanouts are what that counts.
	Sampler string `option:"sampler" group:"Model" use:"setting" oneof:"@samplers" shown:"neighbor" print:"yes" omit:"neighbor" usage:"how mini-batches are drawn ({@sampler-summaries}; {fanout} counts that)"`
	// BatchDependency is graph.SamplerConfig.Dependency.
	BatchDependency int `option:"batch-dependency" group:"Model" positive:"yes" shown:"1" print:"yes" omit:"1" usage:"batches that keep a node's random number ({sampler} {@dependent-samplers}): each next one has one number in so many anew, and needs fewer rows that the last did not; 1: each draws for itself; changes results"`
	EpochSettings
	Optimizer string  `option:"optimizer" group:"Model" use:"setting" oneof:"@optimizers" print:"yes" omit:"adam" usage:"optimiser; adamw decays weights apart from the gradient"`
	LR        float64 `option:"lr" group:"Model" common:"yes" positive:"yes" range:"0.." print:"yes" usage:"Adam's learning rate"`
	gnn.ScheduleSettings
	WeightDecay float64 `option:"weight-decay" group:"Model" range:"0.." print:"yes" usage:"L2 penalty; with {optimizer} adamw the share that a step takes from each weight, times {lr}"`
	// Shards is the number of mini-batches that a step of the optimiser covers, one after another.
	Shards   int    `option:"shards" group:"Model" positive:"yes" range:"1..65536" shown:"as {replicas}, 1" arg:"V" print:"yes" omit:"1" usage:"mini-batches that a step of Adam covers V: its gradient is the mean over all their labelled seeds; changes results"`
	Seed     uint64 `option:"seed" group:"Model" common:"yes" print:"yes" usage:"seed of all random choices; equal seeds give equal parameters in every mode"`
	SeedZero bool   // the seed is 0, not its default
	Epochs   int    `option:"epochs" group:"Model" common:"yes" positive:"yes" range:"1..1048576" usage:"passes over the training nodes"`
	hier.MegaSettings
	// Precision and BLAS change results by rounding.
	Precision string `option:"precision" group:"Data path" use:"setting" oneof:"@precisions" usage:"of the model's products; bf16 rounds their factors, tf32 too, on a GPU only"`
	BLAS      string `option:"blas" group:"Data path" words:"off,auto" arg:"PATH" usage:"who computes products on a GPU: off (our kernels), auto (cuBLAS where it is installed) or the PATH of libcublas"`

	// The others never change a result.
	IOStack  string `option:"io-stack" group:"Data path" use:"setting" oneof:"@stacks" usage:"who reads the SSDs"`
	Pipeline string `option:"pipeline" group:"Data path" use:"setting" oneof:"@pipelines" usage:"what overlaps ({@pipeline-summaries})"`
	// Workers are the threads of the cpu stack, too.
	Workers int `option:"workers" group:"Data path" positive:"yes" shown:"one per CPU" usage:"worker slots of the host device, and threads of the cpu stack"`
	// Blocks is 32 by default; under sync, as many as the device keeps resident.
	Blocks     int `option:"io-blocks" group:"Data path" positive:"yes" range:"1..65536" shown:"32; sync: a full grid" usage:"thread blocks of each I/O kernel"`
	QueueDepth int `option:"depth" group:"Data path" positive:"yes" range:"1..65535" shown:"256" usage:"reads in flight per SSD"`
	// Depth bounds the mini-batches that pipelines prepare ahead.
	Depth       int           `option:"prefetch-depth" group:"Data path" positive:"yes" range:"1..64" shown:"3 in ginex, else 2" usage:"mini-batches prepared ahead"`
	ReadTimeout time.Duration `option:"read-timeout" group:"Data path" shown:"the stack's" arg:"TIME" usage:"TIME after which a read is aborted and tried again"`
	// ReadRetries and ReadResets are -1 for none.
	ReadRetries int `option:"read-retries" group:"Data path" range:"-1.." zero:"-1" shown:"the stack's" usage:"how often a failed read is tried again; -1 for never"`
	ReadResets  int `option:"on-ssd-failure" group:"Data path" text:"yes" shown:"retry=3" usage:"when an SSD hangs or fails and new queues did not help: \"stop\", or \"retry=N\": reset its controller up to N times in the run, then stop"`
	// CoalesceBytes is the most that one command reads for rows on equal and close LBAs: 0
	// leaves it to the stack (async and cpu), negative is a command for each row.
	CoalesceBytes int `option:"coalesce" group:"Data path" text:"yes" shown:"auto" arg:"SIZE" usage:"one command for rows that lie close (async and cpu stacks): auto, off, or up to SIZE a command"`
	// CheckReads holds every row against the checksum that load has written.
	CheckReads Checks `option:"check-reads" group:"Data path" use:"setting" shown:"on, where load has written checksums" usage:"hold every row and page that is read from SSDs against its checksum; read it again, then stop, where they differ; {no-check-reads} does not"`
	VerifyRows bool   `option:"verify-rows" group:"Data path" use:"setting" usage:"hold every row that a mini-batch has gathered, from wherever, against the dataset's feature function (generate {feature-fn}); stop at the first wrong one"`
	// RowType is the type that the rows on the SSDs must have; empty: whatever they have. On the
	// virtual clock it is the type that they are taken to have; empty: the dataset's.
	RowType    string   `option:"row-dtype" group:"Data path" use:"setting" offers:"@row-types" shown:"whatever is there" arg:"TYPE" usage:"stop unless the SSDs hold rows of TYPE ({@row-types}; load {row-dtype} makes them); with {clock} virtual, the type they are taken to have"`
	CPUEngine  string   `option:"cpu-engine" group:"Data path" use:"setting" oneof:"io_uring,pread" shown:"the best there is" usage:"how the cpu stack reads"`
	SMs        SMBudget `option:"sm-budget" group:"Data path" shown:"all; on a GPU io has as many SMs as hold the blocks of {io-blocks}" arg:"OP=N,…" usage:"most thread blocks at once per operator OP=N,… (sample, lookup, io, gather, train); on a GPU SMs, in steps of its green contexts, where the driver has them"`
	MemoryRung string   `option:"memory-rung" group:"Data path" use:"setting" oneof:"@rungs" usage:"where the I/O kernels' queues and data are on a GPU; auto takes the best that a pattern read both ways proves"`

	// The tiers of the feature cache. GPUCacheAuto sets GPUCache on a GPU: what its memory has free
	// less what the run needs, measured. NoCache is none, whatever the mode has.
	GPUCache     units.Budget `option:"gpu-cache" group:"Tiers" common:"yes" arg:"BUDGET" usage:"BUDGET of the device memory tier, as 256MiB or as a share of the features; auto: on a GPU what is free there less what the run needs, measured; on the host device 5%, in {mode} inmem none"`
	GPUCacheAuto bool
	CPUCache     units.Budget `option:"cpu-cache" group:"Tiers" common:"yes" arg:"BUDGET" usage:"BUDGET of the CPU memory tier"`
	// Policy of the GPU tier: PolicyStatic, PolicyBelady, which is of the CPU tier too, or one of
	// policy.Online().
	Policy string `option:"policy" group:"Tiers" use:"setting" oneof:"@policies" usage:"what the GPU tier keeps ({@policy-summaries})"`
	ginex.SuperbatchSettings
	diskgnn.PackedSettings
	PagesOn string `option:"pages-on" group:"Tiers" use:"setting" oneof:"@page-places" shown:"folder" usage:"where their pages are (folder: that of {packed} or {parted}; ssds: the bound SSDs, behind the features)"`
	// Unpacked: nothing is laid out in a mode that does so, as in evaluation, whose samples are its
	// own.
	Unpacked bool
	dynamic.DynamicSettings
	// Hotness places the static tiers: one of Hotnesses, or a file's path. HotnessDir keeps it for
	// later runs; empty: the dataset's folder hotness; NoFolder: nowhere.
	Hotness    string `option:"hotness" group:"Tiers" use:"input" words:"@hotnesses" arg:"FILE" usage:"what rows are placed by: {@hotnesses}, or a FILE of node numbers, hottest first (.npy or text)"`
	Presample  int    `option:"presample-epochs" group:"Tiers" positive:"yes" range:"1..1024" usage:"epochs sampled beforehand to find the hottest rows ({hotness} presample)"`
	HotnessDir string `option:"hotness-dir" group:"Tiers" use:"aside" words:"off" shown:"the dataset's folder hotness" arg:"DIR" usage:"DIR that keeps hotness for later runs of the same graph and batches; off for none"`
	Topology   string `option:"topology" group:"Tiers" use:"setting" oneof:"@topologies" usage:"where the neighbour lists are: in memory, or read as they are needed, through a cache of lists"`
	// NeighborShared sets NeighborCache: its memory is the CPU tier's. While a superbatch is
	// sampled lists have as many of the tier's slots as they need; others keep their rows. Under
	// SuperbatchOverlap both are there at once, and each has a half. By mode.
	NeighborCache  units.Budget `option:"neighbor-cache" group:"Tiers" shown:"with {topology} ssd 10%, in ginex shared" arg:"BUDGET" usage:"BUDGET of CPU memory for the lists of hot nodes, a size or a share of the topology; shared: that of {cpu-cache}, of which lists have what they need while a superbatch is sampled, and rows all while one trains (with {superbatch-overlap} each has half)"`
	NeighborShared bool

	// Replicas never change a result by themselves, but Shards is as many where it is left out.
	Replicas int `option:"replicas" group:"Replicas" positive:"yes" range:"1..64" shown:"1" arg:"Q" usage:"devices that train with copies of the model Q: GPUs from {device} on, or host devices that share {workers}; at equal {shards} (without it: as many) the parameters are the same"`
	// Reduce adds the replicas' gradients. NCCL's sums may differ from the tree's in their
	// last bits.
	Reduce string `option:"reduce" group:"Replicas" words:"tree" shown:"tree" arg:"PATH" usage:"who adds the gradients of {replicas}: tree (ours, to the bit as one device does), nccl (NVIDIA's NCCL where it is installed, GPUs only, not bit-exact) or the PATH of libnccl"`

	// Checkpoints.
	CheckpointDir   string `option:"checkpoint" there:"checkpoint" group:"Run" common:"yes" use:"aside" arg:"DIR" usage:"DIR for the checkpoint, written after each epoch and on Ctrl-C"`
	CheckpointEvery int    `option:"checkpoint-every" group:"Run" use:"aside" range:"0..2147483647" arg:"N" usage:"also write it after every N mini-batches, at the end of their step of {shards}"`
	Resume          bool   `option:"resume" group:"Run" common:"yes" use:"aside" usage:"go on from the checkpoint in {checkpoint}, to the bit where {kernels} is as it was; start where there is none"`
	// NoEval skips validation and test; the best epoch is then the last.
	NoEval bool `option:"no-eval" group:"Run" use:"setting" usage:"skip validation and test"`
	SelectionSettings
	Tune string `option:"tune" group:"Run" use:"setting" oneof:"@tunes" usage:"measure the first mini-batches under other depths, SM budgets and accumulator targets, and keep the best: it never changes a result"`
	// OtherDataset lets Evaluate and Predict use a checkpoint of another dataset.
	OtherDataset bool `option:"other-dataset" group:"Model" use:"setting" usage:"use a checkpoint of another dataset, whose training nodes may be test nodes of this one"`

	// Overwrite lets another run's checkpoint be replaced.
	Overwrite bool
	// Run is the identity of a new run, which its checkpoint keeps; may be empty. A resumed run has
	// its checkpoint's.
	Run string
	// LastParameters has Evaluate and Predict take the parameters that training stopped with
	// instead of the best epoch's.
	LastParameters bool
	// Rank and Ranks are this process's place among those that train together; 0 and 1. Where
	// Shards is left out it is as many, times Replicas.
	Rank, Ranks int
	// OpTimeout bounds each single wait for an operator; 5 minutes.
	OpTimeout time.Duration
	// Timeline, where given, gets a span for each operator of each batch.
	Timeline *timeline.Recorder
	// OnRows sees the rows that a batch is about to train on: rows holds len(nodes)*dim
	// values. Both are valid during the call. It runs on the training goroutine.
	OnRows func(nodes []int64, rows []float32)
	// OnBatch sees each batch of training before it trains, in order. The epoch counts from 0.
	OnBatch func(epoch, index int, mb *graph.MiniBatch)
}

// EpochSettings say which epochs share samples: there are SampleEpochs epochs' samples at a time,
// which training goes round; 0: each epoch has its own. After every RefreshEvery epochs (0:
// SampleEpochs), the Refresh oldest are replaced.
type EpochSettings struct {
	SampleEpochs int `option:"sample-epochs" group:"Model" positive:"yes" range:"1..1048576" shown:"each epoch has its own" print:"yes" omit:"0" arg:"E" usage:"train in turns on the samples of E epochs; changes results"`
	Refresh      int `option:"refresh" group:"Model" positive:"yes" range:"1.." shown:"none" print:"yes" omit:"0" arg:"K" usage:"the K oldest of {sample-epochs} that are sampled anew each time; changes results"`
	RefreshEvery int `option:"refresh-every" group:"Model" positive:"yes" range:"1.." shown:"as {sample-epochs}" print:"yes" omit:"0" arg:"N" usage:"epochs of training N from one {refresh} to the next; changes results"`
}

// SelectionSettings say which epoch is the best, and when there are enough.
type SelectionSettings struct {
	// Metric is the name of one of package metrics.
	Metric string `option:"metric" group:"Run" common:"yes" use:"setting" oneof:"@metrics" shown:"accuracy of classes, f1-micro of labels, rmse of numbers" print:"yes" omit:"accuracy" usage:"figure of validation that chooses the best epoch"`
	// Patience is 0 where all epochs train.
	Patience int     `option:"patience" group:"Run" positive:"yes" range:"1..1048576" shown:"all epochs train" arg:"N" usage:"stop after N epochs one after the other in which {metric} was not better than before"`
	MinDelta float64 `option:"min-delta" group:"Run" range:"0.." usage:"by how much it has to be better for {patience}"`
}

// Balanced as Config.ClassWeights or PosWeight: by how many training nodes have each.
const Balanced = "balanced"

// ForTarget settles what depends on the targets of the dataset, and refuses what neither learns nor
// judges them.
func (c Config) ForTarget(t metrics.Target) (Config, error) {
	own, err := gnn.LossFor(t, "")
	if err == nil {
		_, err = gnn.LossFor(t, c.Loss)
	}
	if err != nil {
		return c, err
	}
	if c.Loss == own {
		c.Loss = ""
	}
	OrText(&c.Metric, t.Default())
	for _, wrong := range []struct {
		key  errs.Key
		text string
		why  string
		bad  bool
	}{
		{"metric", c.Metric, "choose one of " + strings.Join(metrics.NamesFor(t), ", "),
			!slices.Contains(metrics.NamesFor(t), c.Metric)},
		{"class-weights", c.ClassWeights, "leave it out",
			c.ClassWeights != "" && t != metrics.Classes},
		{"pos-weight", c.PosWeight, "leave it out", c.PosWeight != "" && t != metrics.Labels},
		{"label-smoothing", fmt.Sprint(c.LabelSmoothing), "leave it out",
			c.LabelSmoothing != 0 && t == metrics.Numbers},
	} {
		if wrong.bad {
			return c, errs.New(errs.Usage, "%v %s is not for %s, which the dataset's targets are; %s",
				wrong.key, wrong.text, t.Plural(), wrong.why)
		}
	}
	return c, nil
}

// SMBudget is the most thread blocks that each operator's stream runs at once; 0 = all.
// IO is that of the submit and of the complete kernel.
type SMBudget struct{ Sample, Lookup, IO, Gather, Train int }

// WithDefaults returns c with every value that was left out set, by its mode where the modes
// differ.
func (c Config) WithDefaults() Config {
	if c.filled {
		return c
	}
	c.filled = true
	if c.Mode == "" || c.Mode == ModeAuto {
		c.Mode = DefaultMode
	}
	if fill := c.mode().Fill; fill != nil {
		fill(&c)
	}
	c.fillCommon()
	if fill := c.System().Fill; fill != nil {
		fill(&c)
	}
	return c.settled()
}

// fillCommon sets what no mode has an opinion of, and DefaultMode's parts where the mode set none.
func (c *Config) fillCommon() {
	OrText(&c.Model, gnn.DefaultArch)
	if len(c.Fanouts) == 0 {
		c.Fanouts = []int{10, 10}
	}
	OrNumber(&c.Batch, 1024)
	OrNumber(&c.EmbedMemory, 4<<30)
	OrNumber(&c.Replicas, 1)
	OrText(&c.Reduce, ReduceTree)
	OrNumber(&c.Ranks, 1)
	OrNumber(&c.Shards, c.Replicas*c.Ranks)
	OrNumber(&c.Hidden, 128)
	c.Arch().Default(&c.ModelSettings)
	OrText(&c.Activation, gnn.DefaultActivation)
	OrText(&c.Norm, gnn.NoNorm)
	OrText(&c.Head, gnn.Heads()[0])
	OrText(&c.Root, gnn.Roots()[0])
	OrText(&c.Optimizer, gnn.DefaultOptimizer)
	OrNumber(&c.LR, 0.003)
	OrText(&c.LRSchedule, gnn.Constant)
	OrNumber(&c.Epochs, 1)
	if c.Refresh > 0 {
		OrNumber(&c.RefreshEvery, c.SampleEpochs)
	}
	if c.Seed == 0 && !c.SeedZero {
		c.Seed = 1
	}
	OrNumber(&c.Depth, 2)
	OrNumber(&c.Presample, 4)
	OrNumber(&c.ReadResets, 3)
	if c.OpTimeout == 0 {
		c.OpTimeout = 5 * time.Minute
	}
	OrText(&c.IOStack, gpuio.StackAsync)
	OrText(&c.Pipeline, DefaultPipeline)
	OrText(&c.Policy, PolicyStatic)
	OrText(&c.Hotness, HotnessPresample)
	OrText(&c.Sampler, graph.Neighbor)
	OrNumber(&c.BatchDependency, 1)
	OrText(&c.Topology, TopologyMemory)
	OrText(&c.Tune, TuneOff)
	OrText(&c.MemoryRung, gpuio.RungAuto)
	OrText(&c.Precision, cuda.FP32.String())
	OrText(&c.BLAS, BLASOff)
	if (c.Topology == TopologySSD && c.NeighborCache == units.Budget{} && !c.NeighborShared) {
		c.NeighborCache.Percent = 10
	}
}

// Filled returns c with its defaults, or the error of what can't be meant together on any device
// or dataset.
func (c Config) Filled() (Config, error) {
	f := c.WithDefaults()
	if err := f.check(); err != nil {
		return f, err
	}
	if c.filled {
		return f, nil
	}
	return f, c.checkAsked(f)
}

// checkAsked refuses what only shows before defaults are filled in; f is c with them.
func (c Config) checkAsked(f Config) error {
	s := f.System()
	if s.Keeps != "" && c.HotnessAsked() {
		return errs.New(errs.Usage, "{mode} %s keeps %s; leave {hotness}, {hotness-dir} and {presample-epochs} out",
			f.Mode, s.Keeps)
	}
	if check := s.CheckAsked; check != nil {
		if err := check(c, f); err != nil {
			return err
		}
	}
	if c.Presample != 0 && c.Hotness != "" && c.Hotness != HotnessPresample {
		return errs.New(errs.Usage,
			"{presample-epochs}: {hotness} %s counts no epochs beforehand; leave one of the two out",
			c.Hotness)
	}
	return nil
}

// settled takes what was asked not to be (negative: none) for none.
func (c Config) settled() Config {
	if c.Window == Off {
		c.Window = 0
	}
	if c.Accumulate == Off {
		c.Accumulate = 0
	}
	caches := []*units.Budget{&c.GPUCache, &c.CPUCache}
	if c.Topology == TopologySSD {
		caches = append(caches, &c.NeighborCache)
	}
	for _, b := range caches {
		if *b == NoCache() {
			*b = units.Budget{}
		}
	}
	return c
}

// Off as Config.Window or Config.Accumulate: none, whatever the mode has.
const Off = -1

// NoCache as Config.GPUCache, CPUCache or NeighborCache: none, whatever the mode has.
func NoCache() units.Budget { return units.Budget{Bytes: Off} }

// NoFolder as Config.HotnessDir: hotness is kept nowhere.
const NoFolder = "off"

// HotnessFolder returns the folder that keeps hotness, "" for none; dataset is the dataset's own.
func (c Config) HotnessFolder(dataset string) string {
	switch c.HotnessDir {
	case NoFolder:
		return ""
	case "":
		return filepath.Join(dataset, "hotness")
	}
	return c.HotnessDir
}

// PerHop reports whether the pipeline looks rows up hop by hop.
func (c Config) PerHop() bool { return c.Overlap().PerHop }

// OnDevice settles what depends on the device.
func (c Config) OnDevice(dev cuda.Info) (Config, error) {
	if dev.Backend == "host" {
		if c.GPUCacheAuto {
			c.GPUCacheAuto, c.GPUCache = false, c.HostGPUCache()
		}
		return c, c.hostOnly()
	}
	if c.Overlap().WholeDevice && c.Blocks == 0 && c.Stack().Overlaps {
		// Alone on the device, an I/O kernel has all of it.
		c.Blocks = max(32, IOBlocksPerSM*dev.SMs)
	}
	if c.SMs.IO == 0 && c.Stack().Overlaps && !c.Overlap().WholeDevice {
		c.SMs.IO = IOSMs(c.Blocks, dev.SMs)
	}
	return c, nil
}

// HostGPUCache is the GPUCache of GPUCacheAuto on the host device, where both tiers are the same
// memory.
func (c Config) HostGPUCache() units.Budget {
	if c.InMemory() { // one tier has all rows in order
		return NoCache()
	}
	return units.Budget{Percent: 5}
}

// IOBlocksPerSM counts the blocks of one warp of kernel complete that an SM holds: each of its
// four parts has 16,384 registers, and a thread takes 210 (cuda/kernels/RESOURCES.md), which are
// given in eights.
const IOBlocksPerSM = 4 * (16384 / (216 * 32))

// IOSMs returns how many of a GPU's SMs hold an I/O kernel of so many blocks, 0 for the default.
func IOSMs(blocks, sms int) int {
	if blocks == 0 {
		blocks = IOBlocks
	}
	return min((blocks+IOBlocksPerSM-1)/IOBlocksPerSM, sms)
}

// hostOnly refuses what the host device lacks.
func (c Config) hostOnly() error {
	if p := c.ProductPrecision(); !slices.Contains(gnn.HostPrecisions(), p) {
		return errs.New(errs.Capability,
			"{precision} %v: the host device computes in fp32 or bf16; use one of them, or {device} cuda",
			p)
	}
	if c.BLAS != "" && c.BLAS != BLASOff && c.BLAS != BLASAuto {
		return errs.New(errs.Capability,
			"{blas} %s: the host device computes with its own kernels; leave it out, or use {device} cuda",
			c.BLAS)
	}
	if c.Reduce != "" && c.Reduce != ReduceTree {
		return errs.New(errs.Capability,
			"{reduce} %s: NCCL adds gradients of GPUs, and these are host devices; leave it out, or use {device} cuda",
			c.Reduce)
	}
	return nil
}

// Values of Config.Reduce beside a path.
const (
	ReduceTree = "tree"
	ReduceNCCL = "nccl"
)

// Values of Config.BLAS beside a path.
const (
	BLASOff  = "off"
	BLASAuto = "auto"
)

// ProductPrecision returns c.Precision, which check has looked at.
func (c Config) ProductPrecision() cuda.Precision {
	return cuda.Precision(max(slices.Index(cuda.Precisions(), c.Precision), 0))
}

// Queued reports whether the stack's reads go through NVMe queues of ours.
func (c Config) Queued() bool { return c.Stack().Queued }

// Stack returns the gpuio.Stack of IOStack; one without any trait where none has that name.
func (c Config) Stack() *gpuio.Stack {
	if s, err := gpuio.FindStack(c.IOStack); err == nil && c.IOStack != "" {
		return s
	}
	return &gpuio.Stack{Name: c.IOStack}
}

// Check refuses, as Train does, what can't be meant together on any device or dataset.
func (c Config) Check() error {
	_, err := c.Filled()
	return err
}

// Arch returns the kind of model; the default's where check would refuse it.
func (c Config) Arch() gnn.Arch {
	a, err := gnn.ArchOf(c.Model)
	if err != nil {
		a, _ = gnn.ArchOf(gnn.DefaultArch)
	}
	return a
}

// check refuses what can't be meant in c, which is filled; each error names the option.
func (c Config) check() error {
	mode, err := catalog.Mode(c.Mode)
	if err != nil {
		return err
	}
	if err := options.Check(&c); err != nil {
		return err
	}
	for _, check := range []func() error{c.checkReading, c.checkFanouts, c.checkReplicas,
		c.checkEpochs, c.checkTiers} {
		if err := check(); err != nil {
			return err
		}
	}
	if mode.Check != nil {
		if err := mode.Check(c); err != nil {
			return err
		}
	}
	if err := c.checkModel(); err != nil {
		return err
	}
	if c.Resume && c.CheckpointDir == "" {
		return errs.New(errs.Usage, "%v needs %v DIR, the folder to go on from",
			errs.Key("resume"), errs.Key("checkpoint"))
	}
	for _, check := range []func() error{c.checkSelection, c.checkSchedule} {
		if err := check(); err != nil {
			return err
		}
	}
	return c.checkBudgets()
}

// checkSelection refuses choices between epochs that no validation could make.
func (c Config) checkSelection() error {
	switch {
	case c.NoEval && c.Patience > 0:
		return errs.New(errs.Usage, "%v %d looks at validation, and %v skips it; leave one out",
			errs.Key("patience"), c.Patience, errs.Key("no-eval"))
	case c.NoEval && c.Metric != "" && !metrics.IsDefault(c.Metric):
		return errs.New(errs.Usage, "%v %s is of validation, and %v skips it; leave one out",
			errs.Key("metric"), c.Metric, errs.Key("no-eval"))
	case c.MinDelta > 0 && c.Patience == 0:
		return errs.New(errs.Usage, "%v needs %v; give both", errs.Key("min-delta"),
			errs.Key("patience"))
	}
	return nil
}

// RateSchedule is that of LRSchedule, which Check has accepted.
func (c Config) RateSchedule() gnn.Schedule {
	s, _ := gnn.ParseSchedule(c.LRSchedule)
	return s
}

// checkSchedule refuses learning rates that nothing could tell.
func (c Config) checkSchedule() error {
	s, err := gnn.ParseSchedule(c.LRSchedule)
	switch {
	case err != nil:
		return err
	case s.Plateau() > 0 && c.NoEval:
		return errs.New(errs.Usage, "%v %s looks at validation, and %v skips it; leave one out",
			errs.Key("lr-schedule"), c.LRSchedule, errs.Key("no-eval"))
	case s.Ends() && c.Passes == hier.PassesAuto:
		return errs.New(errs.Usage,
			"%v %s has to know the steps of an epoch, and %v auto measures them; give a number",
			errs.Key("lr-schedule"), c.LRSchedule, errs.Key("passes"))
	}
	return nil
}

// checkReading refuses what the stack that reads can't do.
func (c Config) checkReading() error {
	if c.RowType != "" {
		if _, err := rowtype.Parse(c.RowType); err != nil {
			return errs.Errorf("%v: %w", errs.Key("row-dtype"), err)
		}
	}
	if share := func(s *gpuio.Stack) bool { return s.Coalesces }; c.CoalesceBytes > 0 &&
		!share(c.Stack()) {
		return errs.New(errs.Usage,
			"%v: stack %s reads each row by itself; leave it out, or use %v %s",
			errs.Key("coalesce"), c.IOStack, errs.Key("io-stack"),
			strings.Join(gpuio.StackNames(share), " or "))
	}
	if rung := c.MemoryRung; rung != "" && rung != gpuio.RungAuto && !c.Queued() {
		return errs.New(errs.Usage,
			"%v %s: stack %s has no queues in memory of ours; leave it out, or use %v async or sync",
			errs.Key("memory-rung"), rung, c.IOStack, errs.Key("io-stack"))
	}
	return nil
}

// checkFanouts refuses numbers of neighbours that no hop can have.
func (c Config) checkFanouts() error {
	for _, f := range c.Fanouts {
		if f == 0 || f < -1 {
			return errs.New(errs.Usage,
				"%v %v: %d is not a number of neighbours; give at least 1, or -1 for all",
				errs.Key("fanout"), c.Fanouts, f)
		}
	}
	if len(c.Fanouts) > 8 {
		return errs.New(errs.Usage, "%v names %d hops; at most 8 are supported",
			errs.Key("fanout"), len(c.Fanouts))
	}
	return nil
}

// checkReplicas refuses what devices and processes that train together can't share.
func (c Config) checkReplicas() error {
	switch library := c.Reduce == ReduceNCCL || strings.Contains(c.Reduce, "/"); {
	case c.Reduce == ReduceTree:
	case !library:
		return unknown("reduce", c.Reduce, []string{ReduceTree, ReduceNCCL, "/PATH/libnccl.so.2"})
	case c.Replicas == 1:
		return errs.New(errs.Usage,
			"%v %s: there is one replica, and nothing to add; give %v too, or leave it out",
			errs.Key("reduce"), c.Reduce, errs.Key("replicas"))
	}
	if c.Ranks > 1 {
		if err := c.checkRanks(); err != nil {
			return err
		}
	}
	if c.Replicas > c.Shards {
		return errs.New(errs.Usage,
			"%v %d: a step of %v %d has a mini-batch for %d of them; give at least as many shards, or fewer replicas",
			errs.Key("replicas"), c.Replicas, errs.Key("shards"), c.Shards, c.Shards)
	}
	return nil
}

// checkModel refuses models and optimisers that there are not.
func (c Config) checkModel() error {
	m := c.ModelConfig()
	if err := m.CheckKind(); err != nil {
		return err
	}
	_, err := gnn.Decoupled(c.Optimizer)
	return err
}

// checkBudgets refuses tiers of no size.
func (c Config) checkBudgets() error {
	for _, b := range []struct {
		key  errs.Key
		size units.Budget
	}{{"gpu-cache", c.GPUCache}, {"cpu-cache", c.CPUCache}, {"neighbor-cache", c.NeighborCache}} {
		if b.size.Bytes < 0 || !(b.size.Percent >= 0 && b.size.Percent <= 100) {
			return errs.New(errs.Usage, "%v %v is not a size or a share of 0%% to 100%%", b.key,
				b.size)
		}
	}
	return nil
}

// unknown is the error of a value that an option does not take.
func unknown(key errs.Key, v string, all []string) error {
	return errs.New(errs.Usage, "unknown %v %q; %s", key, v,
		options.OneOf(v, all))
}

// checkTiers refuses parts of the tiers, the accumulator and the sampler that can't go together.
func (c Config) checkTiers() error {
	for _, check := range []func() error{c.checkShared, c.checkSystem, c.checkAccumulate,
		c.checkTopology} {
		if err := check(); err != nil {
			return err
		}
	}
	if check := c.Overlap().Check; check != nil {
		if err := check(c); err != nil {
			return err
		}
	}
	return c.checkSampler()
}

// checkAccumulate refuses reads that can't be merged.
func (c Config) checkAccumulate() error {
	switch {
	case c.Accumulate == 0:
		return nil
	case c.Stack().Overlaps:
		return errs.New(errs.Usage,
			"%v merges the reads of coming batches for stacks whose launches wait for their reads; stack %s has several sets in flight anyhow: leave it out, or use %v %s",
			errs.Key("accumulate"), c.IOStack, errs.Key("io-stack"), gpuio.StackSync)
	case c.PerHop():
		return errs.New(errs.Usage,
			"%v merges the reads of whole batches, %v %s reads hop by hop; use another one: %s",
			errs.Key("accumulate"), errs.Key("pipeline"), c.Pipeline,
			strings.Join(PipelineNames((*Pipeline).Whole), ", "))
	}
	return nil
}

// checkTopology refuses a cache of lists that are all in memory.
func (c Config) checkTopology() error {
	if c.Topology == TopologyMemory && (c.NeighborShared || c.NeighborCache != units.Budget{}) {
		return errs.New(errs.Usage,
			"%v needs a topology that stays on storage; use %v %s, or leave it out",
			errs.Key("neighbor-cache"), errs.Key("topology"), TopologySSD)
	}
	return nil
}

// checkSampler refuses draws that the sampler can't make.
func (c Config) checkSampler() error {
	m := c.Method()
	if n := c.BatchDependency; n < 1 || n > graph.MostDependency {
		return errs.New(errs.Usage, "%v %d is not from 1 to %d batches",
			errs.Key("batch-dependency"), n, graph.MostDependency)
	} else if n > 1 && !m.Dependent {
		return errs.New(errs.Usage,
			"%v %d: with sampler %s each batch draws for itself; leave it out, or use %v %s",
			errs.Key("batch-dependency"), n, m.Name, errs.Key("sampler"),
			strings.Join(graph.DependentNames(), " or "))
	}
	if m.NoAll {
		for _, f := range c.Fanouts {
			if f < 1 || f > m.MostFanout {
				return errs.New(errs.Usage,
					"%v %v: sampler %s draws so many %s, and %d is not from 1 to %d",
					errs.Key("fanout"), c.Fanouts, c.Sampler, m.Fanout, f, m.MostFanout)
			}
		}
	}
	return nil
}

// Method returns the graph.Method of Sampler, whose name Check has accepted.
func (c Config) Method() *graph.Method {
	m, _ := graph.FindMethod(c.Sampler)
	return m
}

// TierSizes are the tiers' sizes in rows.
type TierSizes struct {
	GPURows, CPURows int64
	Auto             bool // what the tiers get is measured once the rest is there
}

// HostSlack is the memory that a run needs beside its caches: slots, activations, the program
// itself.
const HostSlack = 64 << 20

// TierRows turns the budgets into rows. available is the CPU memory that can still be had;
// deviceFree the device's own, or -1 where it is the same memory. A budget that does not fit is
// refused even where the features are smaller, since the user believed in memory that is not
// there.
func (c Config) TierRows(rows, rowBytes, available, deviceFree int64) (TierSizes, error) {
	total := rows * rowBytes
	gpu, cpu := c.GPUCache.Of(total), c.CPUCache.Of(total)
	auto := c.GPUCacheAuto && deviceFree >= 0
	if auto {
		gpu = 0
	}
	if c.InMemory() {
		cpu = max(total-gpu/rowBytes*rowBytes, 0)
		if auto { // at best the device takes all it has
			cpu = max(total-deviceFree/rowBytes*rowBytes, 0)
		}
	}
	fits := max(available-HostSlack, 0)
	refuse := func(key errs.Key, given any, want, fits int64, where errs.Text) error {
		return errs.New(errs.Usage, "%v %v asks for %s, but %s has room for %s; give at most that",
			key, given, units.FormatBytes(want), where, units.FormatBytes(max(fits, 0)))
	}
	onCPU := cpu
	if deviceFree >= 0 {
		if gpu > deviceFree {
			return TierSizes{}, refuse("gpu-cache", c.GPUCache, gpu, deviceFree,
				"device memory")
		}
	} else {
		if gpu > fits {
			return TierSizes{}, refuse("gpu-cache", c.GPUCache, gpu, fits,
				"memory (the host device keeps its tier there)")
		}
		fits -= gpu
	}
	if onCPU > fits {
		if c.InMemory() {
			return TierSizes{}, errs.New(errs.Usage,
				"{mode} %s needs %s for the features, but memory has room for %s; use {mode} %s",
				c.Mode, units.FormatBytes(onCPU), units.FormatBytes(max(fits, 0)), DefaultMode)
		}
		what := errs.Text("memory")
		if gpu > 0 && deviceFree < 0 {
			what = errs.Textf("memory beside the {gpu-cache} of %s", units.FormatBytes(gpu))
		}
		return TierSizes{}, refuse("cpu-cache", c.CPUCache, onCPU, fits, what)
	}
	b := TierSizes{GPURows: min(gpu/rowBytes, rows), Auto: auto}
	b.CPURows = min(cpu/rowBytes, rows-b.GPURows)
	if c.Traits().Inclusive {
		b.CPURows = min(cpu/rowBytes, rows)
	}
	if c.InMemory() && !auto {
		b.CPURows = rows - b.GPURows
	}
	return b, nil
}

// HotnessOutDegree places rows by how many in-neighbour lists a node stands in, each drawn from as
// often as the other: one pass over the edges. HotnessDegree (in-degree) needs none, and is the
// same on graphs whose edges go both ways.
const HotnessOutDegree = "out-degree"

// HotnessForesight counts Presample epochs as HotnessPresample does, but the run's own, from the
// first on (no more than it has): samples are a function of the seed, so what is counted is what
// training will access. Where all epochs are counted no static placement has more hits.
const HotnessForesight = "foresight"

// Hotnesses lists the accepted values of Config.Hotness beside the path of a file.
var Hotnesses = []string{HotnessPresample, HotnessDegree, HotnessOutDegree, HotnessPageRank,
	HotnessForesight}

// Tuning reports whether the run's first batches are measured.
func (c Config) Tuning() bool { return c.Tune == TuneQuick || c.Tune == TuneFull }

// TuneDepths returns the depths that are tried.
func (c Config) TuneDepths() []int {
	if !c.Tuning() || !c.Overlap().Ahead {
		return nil
	}
	d := []int{1, 2, 4}
	if c.Tune == TuneFull {
		d = []int{1, 2, 3, 4, 6, 8}
	}
	if !slices.Contains(d, c.Depth) {
		d = append(d, c.Depth)
		slices.Sort(d)
	}
	return d
}

// ForTuning returns the configuration that the engine is made with: room for the deepest pipeline
// that is tried, which stays with the run whatever is chosen.
func (c Config) ForTuning() Config {
	if d := c.TuneDepths(); len(d) > 0 {
		c.Depth = d[len(d)-1]
	}
	return c
}

// IOBlocks is the default of Config.Blocks under stack async.
const IOBlocks = gpuio.DefaultBlocks
