// Package plan turns a configuration into the plan of a run: it fills in defaults, refuses what
// can't be meant together, sizes the tiers of the feature cache, and draws the graph of operators
// that the engine runs and the virtual clock plays.
package plan

import (
	"errors"
	"fmt"
	"math"
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
	"helios/internal/rowtype"
	"helios/internal/timeline"
	"helios/internal/units"
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

// What rows' hotness is from, beside a file.
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

// DefaultDirectory is of a dynamic GPU tier: the one that a GPU keeps by itself, and that all cores
// work on (docs/architecture/cache.md has the figures).
const DefaultDirectory = policy.InSets

// PolicyBelady keeps, in both tiers, what the mini-batches of a superbatch need next (MIN with
// bypass, Belady 1966): these are sampled before the first of them trains.
const PolicyBelady = policy.Belady

// SuperbatchOptions are the keys of the options that mean something under PolicyBelady alone.
var SuperbatchOptions = []string{"superbatch", "superbatch-overlap", "superbatch-dir",
	"superbatch-disk"}

// Checks says whether what is read from SSDs is held against checksums.
type Checks int8

// Values of Checks.
const (
	ChecksAuto Checks = iota // where there are checksums of what was stored
	ChecksOn                 // or it is an error
	ChecksOff
)

func (c Checks) String() string { return [...]string{"auto", "true", "false"}[c] }

// LineRow as Config.CacheLine: a line of a dynamic tier is a row.
const LineRow = -1

// StackNone is reported in the place of a gpuio.Stack where no batch reads.
const StackNone = "none"

// MaxEpochs is the most epochs of a run: the numbers from there on key other uses of sampling.
const MaxEpochs = 1 << 20

// MaxShards is the most mini-batches of an optimiser step.
const MaxShards = 1 << 16

// MaxReplicas is the most devices that train.
const MaxReplicas = 64

// maxWindow is the deepest window: each batch in it keeps its sample in memory.
const maxWindow = 64

// The accepted values of the fields of these names, for usage text.
var (
	Stacks     = gpuio.StackNames(nil)
	Policies   = append([]string{PolicyStatic, PolicyBelady}, policy.Online()...)
	Samplers   = graph.MethodNames()
	Topologies = []string{TopologyMemory, TopologySSD}
	Tunes      = []string{TuneOff, TuneQuick, TuneFull}
)

// Config is a training run. Its zero values mean the defaults given here.
//
// Large: a field for each option of a run, which callers set by name.
type Config struct {
	Mode string // one of ModeNames; DefaultMode

	// filled: defaults are in, so that zero values are meant.
	filled bool

	// What is computed: these decide the parameters that come out.
	Model   string // one of gnn.Archs; gnn.DefaultArch
	Fanouts []int  // 10,10; hop 1 first; -1 takes every neighbour; one model layer per hop
	Batch   int    // seed nodes in a mini-batch; 1024
	// Shards is how many mini-batches that follow each other a step of the optimiser covers; 1.
	Shards  int // by Replicas
	Hidden  int // 128
	LR      float64
	Dropout float64 // 0; of hidden activations
	// FeatureDropout is the share of the input features that a step of training drops; 0.
	FeatureDropout float64
	WeightDecay    float64 // 0
	LearnEps       bool    // of gin: ε is learned, else 0
	Heads          int     // of gat; 0: 8
	OutHeads       int     // of gat, in its last layer; 0: Heads
	Activation     string  // one of gnn.Activations
	Norm           string  // one of gnn.Norms
	Residual       bool    // a layer's input is added to its sums
	Optimizer      string  // one of gnn.Optimizers
	// AttentionDropout is the share of the edges' attention that a step of training drops (gat); 0.
	AttentionDropout float64
	Seed             uint64 // 1
	SeedZero         bool   // the seed is 0, not its default
	Epochs           int    // 1
	// SampleEpochs is how many epochs' samples there are at a time, which training goes round; 0:
	// each epoch has its own. After every RefreshEvery epochs (0: SampleEpochs), the Refresh oldest
	// are replaced.
	SampleEpochs, Refresh, RefreshEvery int

	// How it is computed: these never change a result.
	IOStack  string // by mode
	Pipeline string // by mode
	// share or bytes of the features in the device's memory; by mode; NoCache for none
	GPUCache units.Budget
	// GPUCacheAuto sets GPUCache on a GPU: what its memory has free less what the run needs,
	// measured. The host device, whose memory is the CPU's, takes 5% then.
	GPUCacheAuto bool
	CPUCache     units.Budget // the same in pinned CPU memory; inmem takes every row instead
	Depth        int          // mini-batches prepared ahead under prefetch and deep; 2
	Presample    int          // epochs of sampling that count accesses to place rows; 4
	Workers      int          // threads of the cpu stack; the device's SMs
	// thread blocks of the I/O kernels; 32, sync: as many as the device keeps resident
	Blocks      int
	QueueDepth  int // reads outstanding per SSD; the stack's default
	ReadTimeout time.Duration
	ReadRetries int    // -1 for none; the stack's default
	ReadResets  int    // controller resets before an SSD is given up, -1 for none; 3
	CPUEngine   string // io_uring or pread, for the cpu stack
	// CoalesceBytes is how much one command may read for rows on equal and adjacent LBAs: 0
	// leaves it to the stack (async and cpu), negative is a command for each row.
	CoalesceBytes int
	// RowType is the type that the rows on the SSDs must have, by name; empty: whatever they have.
	// On the virtual clock it is the type they are taken to have; empty: the dataset's.
	RowType    string
	CheckReads Checks // every row is held against the checksum that load has written
	VerifyRows bool   // every row that was gathered is held against the dataset's feature function
	SMs        SMBudget
	// MemoryRung is where the I/O kernels' queues and data are (gpuio.Rungs); empty or "auto": the
	// best that proves itself.
	MemoryRung string
	// Policy of the GPU tier: PolicyStatic, PolicyBelady, which is of the CPU tier too, or one of
	// policy.Online(); empty: by mode.
	Policy string
	// Superbatch is how many mini-batches PolicyBelady knows at once; 0: what memory and disk have
	// room for. SuperbatchOverlap: the next ones are sampled while those train.
	Superbatch        int
	SuperbatchOverlap bool
	// SuperbatchDir is the folder on whose file system their samples are, in files without a name;
	// empty: the dataset's. SuperbatchDisk bounds their bytes; 0: a quarter of what is free.
	SuperbatchDir  string
	SuperbatchDisk int64
	// Superbatches has mini-batches sampled a superbatch at a time under PolicyStatic, too: the
	// tiers find the rows that they hold and change none. By mode.
	Superbatches bool
	// SuperbatchFill has the rows that come first read before a superbatch begins, as Ginex does;
	// else rows come in as they are needed. By mode.
	SuperbatchFill bool
	// PackedDir is the folder of mini-batches that are laid out before training; empty: beside the
	// dataset. DiskBudget bounds their bytes; zero: three times the features. Segment is how many
	// of them share a disk cache; 0: what is best under the budget. PagesOn is one of PagePlaces;
	// empty: the folder. Unpacked: there are none in a mode that has them, as in evaluation, whose
	// samples are its own.
	PackedDir  string
	DiskBudget DiskBudget
	Segment    int
	PagesOn    string
	Unpacked   bool
	// Of mega-batches. Parts is how many parts the graph has, 0: by the size of its features;
	// PartitionFile says which node is in which, empty: they are made; StaticNodes is the share of
	// the nodes, those of the highest out-degree, that are in every mega-batch; MegaBatch is how
	// many parts that has; Passes is how often a mega-batch trains before the next, or PassesAuto;
	// PartOrder is one of PartOrders, LoadAhead one of LoadAheads. These change results, but for
	// the last. PartedDir is the folder of the parts; empty: beside the dataset.
	Parts         int
	PartitionFile string
	StaticNodes   Share
	MegaBatch     MegaSize
	Passes        int
	PartOrder     string
	LoadAhead     string
	PartedDir     string
	// CacheLine is the bytes of a line of a dynamic GPU tier, or LineRow; 0: by mode (bam and gids
	// 4096, else a row).
	CacheLine int64
	// Directory is of a dynamic GPU tier: one of policy.Kinds.
	Directory string
	// Window is how many coming batches' lines a dynamic tier keeps (window buffer of GIDS); 0:
	// none.
	Window int
	// Accumulate is the share of the SSDs' peak rate that merging the reads of coming batches aims
	// at (accumulator of GIDS); 0: reads are not merged.
	Accumulate float64
	// Sampler is the name of a graph.Method; its Fanouts are what that counts. It changes results.
	Sampler string
	// BatchDependency is graph.SamplerConfig.Dependency; 0: 1. It changes results.
	BatchDependency int
	// Topology is TopologyMemory or TopologySSD; NeighborCache is the memory for the lists of hot
	// nodes under the latter.
	Topology      string
	NeighborCache units.Budget
	// NeighborShared sets NeighborCache: its memory is the CPU tier's. While a superbatch is
	// sampled the neighbour cache has all of CPUCache, while one trains the CPU tier has. Under
	// SuperbatchOverlap both are there at once, and each has a half. By mode.
	NeighborShared bool
	// Hotness is what places the static tiers: HotnessPresample, HotnessDegree, HotnessPageRank, or
	// a file's path.
	Hotness string
	// HotnessDir is where it is kept and found again; empty: the dataset's folder hotness;
	// NoFolder: nowhere.
	HotnessDir string
	// Tune lets the first batches choose budgets, depth and the accumulator's target.
	Tune string
	// Trace is a file for the run's accesses ("cache replay"); empty: none.
	Trace string
	// Overwrite lets another run's checkpoint and a trace that is there be replaced.
	Overwrite bool
	// Run is the identity of a new run, which its checkpoint keeps; may be empty. One that goes on
	// has its checkpoint's.
	Run string
	// LastParameters has Evaluate and Predict take the parameters that training stopped with
	// instead of the best epoch's.
	LastParameters bool
	// OtherDataset lets them use a checkpoint on a dataset that it was not trained on.
	OtherDataset bool
	// Precision of the model's products (cuda.Precisions); empty: fp32. It changes results, by
	// rounding.
	Precision string
	// BLAS computes the products on a GPU in place of our kernels: empty or "off", "auto" (where it
	// is installed), or the library's path. It changes results, by rounding.
	BLAS string

	// OpTimeout bounds each single wait for an operator; 5 minutes.
	OpTimeout time.Duration

	// Timeline, where given, gets a span for each operator of each batch.
	Timeline *timeline.Recorder

	// Replicas is how many devices train, each with a copy of the model; 1. It never changes a
	// result by itself, but Shards is as many where it is left out.
	Replicas int
	// Reduce is who adds the replicas' gradients: ReduceTree, ReduceNCCL, or the path of the
	// latter's library. Its sums may differ from the tree's in their last bits.
	Reduce string

	// Rank and Ranks are this process's place among those that train together; 0 and 1. Where
	// Shards is left out it is as many, times Replicas.
	Rank, Ranks int

	// Checkpoints.
	CheckpointDir   string // none are written when empty
	CheckpointEvery int    // also after every so many batches; 0 = at the end of epochs only
	Resume          bool   // go on from CheckpointDir's checkpoint, where there is one

	// NoEval skips validation and test; the best epoch is then the last.
	NoEval bool

	// OnRows sees the rows that a batch is about to train on: rows holds len(nodes)*dim
	// values. Both are valid during the call. It runs on the training goroutine.
	OnRows func(nodes []int64, rows []float32)
	// OnBatch sees each batch of training before it trains, in order. The epoch counts from 0.
	OnBatch func(epoch, index int, mb *graph.MiniBatch)
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
	orText(&c.Mode, DefaultMode)
	c.mode().Fill(&c)
	c.fillCommon()
	return c.settled()
}

// fillCommon sets what no mode has an opinion of, and DefaultMode's parts where the mode set none.
func (c *Config) fillCommon() {
	orText(&c.Model, gnn.DefaultArch)
	if len(c.Fanouts) == 0 {
		c.Fanouts = []int{10, 10}
	}
	orNumber(&c.Batch, 1024)
	orNumber(&c.Replicas, 1)
	orText(&c.Reduce, ReduceTree)
	orNumber(&c.Ranks, 1)
	orNumber(&c.Shards, c.Replicas*c.Ranks)
	orNumber(&c.Hidden, 128)
	m := gnn.ModelConfig{Heads: c.Heads}
	c.Arch().Default(&m)
	c.Heads = m.Heads
	orText(&c.Activation, gnn.DefaultActivation)
	orText(&c.Norm, gnn.NoNorm)
	orText(&c.Optimizer, gnn.DefaultOptimizer)
	orNumber(&c.LR, 0.003)
	orNumber(&c.Epochs, 1)
	if c.Refresh > 0 {
		orNumber(&c.RefreshEvery, c.SampleEpochs)
	}
	if c.Seed == 0 && !c.SeedZero {
		c.Seed = 1
	}
	orNumber(&c.Depth, 2)
	orNumber(&c.Presample, 4)
	orNumber(&c.ReadResets, 3)
	if c.OpTimeout == 0 {
		c.OpTimeout = 5 * time.Minute
	}
	orText(&c.IOStack, gpuio.StackAsync)
	orText(&c.Pipeline, DefaultPipeline)
	orText(&c.Policy, PolicyStatic)
	if c.Dynamic() {
		orText(&c.Directory, DefaultDirectory)
	}
	orText(&c.Hotness, HotnessPresample)
	orText(&c.Sampler, graph.Neighbor)
	orNumber(&c.BatchDependency, 1)
	orText(&c.Topology, TopologyMemory)
	orText(&c.Tune, TuneOff)
	orText(&c.MemoryRung, gpuio.RungAuto)
	orText(&c.Precision, cuda.FP32.String())
	orText(&c.BLAS, BLASOff)
	if c.Dynamic() {
		orNumber(&c.CacheLine, LineRow)
	}
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
	switch {
	case f.Dynamic() && !f.GPUCacheAuto && c.GPUCache == units.Budget{}:
		return errs.New(errs.Usage,
			"option policy %s: option mode %s has no GPU tier by itself; add option gpu-cache, or leave it out",
			f.Policy, f.Mode)
	case f.Planned() && !f.GPUCacheAuto && f.GPUCache == units.Budget{} &&
		f.CPUCache == units.Budget{} && c.GPUCache == units.Budget{} &&
		c.CPUCache == units.Budget{}:
		return errs.New(errs.Usage,
			"%v %s has no tier to keep anything in; give %v or %v, or use %v %s",
			errs.Key("policy"), PolicyBelady, errs.Key("gpu-cache"), errs.Key("cpu-cache"),
			errs.Key("policy"), PolicyStatic)
	case f.Planned() && (c.Hotness != "" || c.Presample != 0 ||
		c.HotnessDir != "" && c.HotnessDir != NoFolder):
		return errs.New(errs.Usage,
			"%v %s keeps what comes next, whatever is hot; leave %v, %v and %v out, or use %v %s",
			errs.Key("policy"), f.Policy, errs.Key("hotness"), errs.Key("hotness-dir"),
			errs.Key("presample-epochs"), errs.Key("policy"), PolicyStatic)
	case f.LaidOut() && (c.Hotness != "" || c.Presample != 0 ||
		c.HotnessDir != "" && c.HotnessDir != NoFolder):
		return errs.New(errs.Usage,
			"%v %s keeps in memory what its own mini-batches need most; leave %v, %v and %v out",
			errs.Key("mode"), f.Mode, errs.Key("hotness"), errs.Key("hotness-dir"),
			errs.Key("presample-epochs"))
	case c.checkMegaAsked(f) != nil:
		return c.checkMegaAsked(f)
	case c.Presample != 0 && c.Hotness != "" && c.Hotness != HotnessPresample:
		return errs.New(errs.Usage,
			"option presample-epochs: option hotness %s counts no epochs beforehand; leave one of the two out",
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

// Dynamic tells whether the GPU tier's lines come and go by what was accessed.
func (c Config) Dynamic() bool {
	return c.Policy != "" && c.Policy != PolicyStatic && !c.Planned()
}

// Planned tells whether rows come and go by what will be accessed.
func (c Config) Planned() bool { return c.Policy == PolicyBelady }

// Superbatched tells whether mini-batches are sampled a superbatch at a time, before they train.
func (c Config) Superbatched() bool {
	return c.Planned() || c.Superbatches && c.Policy == PolicyStatic
}

// SuperbatchMost returns how many of a pass's n mini-batches a superbatch has at most. One without
// a given length may have them all, or a quarter where the next one is sampled while one trains.
func (c Config) SuperbatchMost(n int) int {
	switch {
	case c.Superbatch > 0:
		return c.Superbatch
	case c.SuperbatchOverlap:
		return max((n+3)/4, 1)
	}
	return max(n, 1)
}

// SuperbatchFolder returns the folder on whose file system superbatches are kept; dataset is the
// dataset's own.
func (c Config) SuperbatchFolder(dataset string) string {
	if c.SuperbatchDir == "" {
		return dataset
	}
	return c.SuperbatchDir
}

// PerHop tells whether the pipeline looks rows up hop by hop.
func (c Config) PerHop() bool { return c.Overlap().PerHop }

// OnDevice settles what depends on the device.
func (c Config) OnDevice(dev cuda.Info) (Config, error) {
	if dev.Backend == "host" {
		if c.GPUCacheAuto {
			c.GPUCacheAuto, c.GPUCache = false, units.Budget{Percent: 5}
		}
		return c, c.hostOnly()
	}
	if c.Overlap().WholeDevice && c.Blocks == 0 && c.Stack().Overlaps {
		c.Blocks = max(32, 16*dev.SMs) // alone on the device, an I/O kernel has all of it
	}
	if c.SMs.IO == 0 && c.Stack().Overlaps && !c.Overlap().WholeDevice {
		// As many SMs as hold the blocks of an I/O kernel (32 to start with): the fewest that any
		// GPU from sm_75 on keeps resident on an SM are 16 (CUDA C++ programming guide, table of
		// technical specifications).
		c.SMs.IO = IOSMs(c.Blocks, dev.SMs)
	}
	return c, nil
}

// IOSMs returns how many of a GPU's SMs hold an I/O kernel of so many blocks, 0 for the default.
func IOSMs(blocks, sms int) int {
	if blocks == 0 {
		blocks = IOBlocks
	}
	return min((blocks+15)/16, sms)
}

// hostOnly refuses what the host device lacks.
func (c Config) hostOnly() error {
	if p := c.ProductPrecision(); !slices.Contains(gnn.HostPrecisions(), p) {
		return errs.New(errs.Capability,
			"option precision %v: the host device computes in fp32 or bf16; use one of them, or option device cuda",
			p)
	}
	if c.BLAS != "" && c.BLAS != BLASOff && c.BLAS != BLASAuto {
		return errs.New(errs.Capability,
			"option blas %s: the host device computes with its own kernels; leave it out, or use option device cuda",
			c.BLAS)
	}
	if c.Reduce != "" && c.Reduce != ReduceTree {
		return errs.New(errs.Capability,
			"option reduce %s: NCCL adds gradients of GPUs, and these are host devices; leave it out, or use option device cuda",
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

// Queued tells whether the stack's reads go through NVMe queues of ours.
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
	oneOf := func(key, v string, all []string) error {
		if !slices.Contains(all, v) {
			return unknown(key, v, all)
		}
		return nil
	}
	mode, err := ModeOf(c.Mode)
	if err != nil {
		return err
	}
	for _, e := range []error{
		oneOf("pipeline", c.Pipeline, PipelineNames(nil)),
		oneOf("io-stack", c.IOStack, Stacks),
		oneOf("model", c.Model, gnn.Archs()),
		oneOf("sampler", c.Sampler, Samplers),
		oneOf("topology", c.Topology, Topologies),
		oneOf("tune", c.Tune, Tunes),
	} {
		if e != nil {
			return e
		}
	}
	if c.RowType != "" {
		if _, err := rowtype.Parse(c.RowType); err != nil {
			return fmt.Errorf("option row-dtype: %w", err)
		}
	}
	if share := func(s *gpuio.Stack) bool { return s.Coalesces }; c.CoalesceBytes > 0 &&
		!share(c.Stack()) {
		return errs.New(errs.Usage,
			"option coalesce: stack %s reads each row by itself; leave it out, or use option io-stack %s",
			c.IOStack, strings.Join(gpuio.StackNames(share), " or "))
	}
	if c.Precision != "" {
		if err := oneOf("precision", c.Precision, cuda.Precisions()); err != nil {
			return err
		}
	}
	if rung := c.MemoryRung; rung != "" && rung != gpuio.RungAuto {
		if err := oneOf("memory-rung", rung, append([]string{gpuio.RungAuto},
			gpuio.Rungs()...)); err != nil {
			return err
		}
		if !c.Queued() {
			return errs.New(errs.Usage,
				"option memory-rung %s: stack %s has no queues in memory of ours; leave it out, or use option io-stack async or sync",
				rung, c.IOStack)
		}
	}
	for _, f := range c.Fanouts {
		if f == 0 || f < -1 {
			return errs.New(errs.Usage,
				"option fanout %v: %d is not a number of neighbours; give at least 1, or -1 for all",
				c.Fanouts, f)
		}
	}
	if len(c.Fanouts) > 8 {
		return errs.New(errs.Usage, "option fanout names %d hops; at most 8 are supported",
			len(c.Fanouts))
	}
	for _, n := range []struct {
		flag      string
		v, lo, hi int
	}{
		{"batch-size", c.Batch, 1, 1 << 24},
		{"shards", c.Shards, 1, MaxShards},
		{"replicas", c.Replicas, 1, MaxReplicas},
		{"hidden", c.Hidden, 1, 1 << 16},
		{"epochs", c.Epochs, 1, MaxEpochs},
		{"prefetch-depth", c.Depth, 1, 64},
		{"presample-epochs", c.Presample, 1, 1 << 10},
		{"io-blocks", c.Blocks, 0, 1 << 16},
		{"depth", c.QueueDepth, 0, 1 << 16},
		{"checkpoint-every", c.CheckpointEvery, 0, math.MaxInt32},
	} {
		if n.v < n.lo || n.v > n.hi {
			return errs.New(errs.Usage, "option %s %d is not between %d and %d", n.flag, n.v,
				n.lo, n.hi)
		}
	}
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
	if err := c.checkEpochs(); err != nil {
		return err
	}
	if err := c.checkCache(); err != nil {
		return err
	}
	if mode.Check != nil {
		if err := mode.Check(c); err != nil {
			return err
		}
	}
	if !(c.LR > 0) || math.IsInf(c.LR, 0) {
		return errs.New(errs.Usage, "option lr %v is not a positive number", c.LR)
	}
	if !(c.Dropout >= 0 && c.Dropout < 1) {
		return errs.New(errs.Usage, "option dropout %v is not in [0, 1)", c.Dropout)
	}
	if !(c.FeatureDropout >= 0 && c.FeatureDropout < 1) {
		return errs.New(errs.Usage, "option feature-dropout %v is not in [0, 1)", c.FeatureDropout)
	}
	m := c.Network()
	if err := m.CheckKind(); err != nil {
		return err
	}
	if _, err := gnn.Decoupled(c.Optimizer); err != nil {
		return err
	}
	if !(c.WeightDecay >= 0) || math.IsInf(c.WeightDecay, 0) {
		return errs.New(errs.Usage, "option weight-decay %v is not a number of at least 0",
			c.WeightDecay)
	}
	if c.Resume && c.CheckpointDir == "" {
		return errs.New(errs.Usage,
			"option resume needs option checkpoint DIR, the folder to go on from")
	}
	for _, b := range []struct {
		flag string
		v    units.Budget
	}{{"gpu-cache", c.GPUCache}, {"cpu-cache", c.CPUCache}, {"neighbor-cache", c.NeighborCache}} {
		if b.v.Bytes < 0 || !(b.v.Percent >= 0 && b.v.Percent <= 100) {
			return errs.New(errs.Usage, "option %s %v is not a size or a share of 0%% to 100%%",
				b.flag, b.v)
		}
	}
	return nil
}

// unknown is the error of a value that an option does not take.
func unknown(key, v string, all []string) error {
	return errs.New(errs.Usage, "option %s %q is not known; choose one of %v", key, v, all)
}

// resident names the policies without lines that come and go by what was accessed.
const resident = PolicyStatic + " and " + PolicyBelady

// checkCache refuses parts of the dynamic tier, the accumulator and the sampler that can't go
// together.
func (c Config) checkCache() error {
	if p := policy.Find(c.Policy); p != nil && p.Offline != "" && !c.Planned() {
		return errs.New(errs.Usage, "%v %s %s; for a run choose one of %v", errs.Key("policy"),
			p.Name, p.Offline, Policies)
	}
	if !slices.Contains(Policies, c.Policy) {
		return errs.New(errs.Usage, "option policy %q is not known; choose one of %v", c.Policy,
			Policies)
	}
	if err := errors.Join(c.checkSuperbatch(), c.checkShared()); err != nil {
		return err
	}
	if err := c.checkPacked(); err != nil {
		return err
	}
	if err := c.checkMega(); err != nil {
		return err
	}
	switch {
	case c.CacheLine != 0 && !c.Dynamic():
		return errs.New(errs.Usage,
			"option cache-line is of a GPU tier whose lines come and go; choose option policy other than %s, or leave it out",
			resident)
	case c.CacheLine != 0 && c.CacheLine != LineRow && (c.CacheLine < 512 || c.CacheLine > MaxLine):
		return errs.New(errs.Usage, "option cache-line %d is not \"row\" or 512 to %d bytes",
			c.CacheLine, MaxLine)
	case c.Directory != "" && !c.Dynamic():
		return errs.New(errs.Usage,
			"option directory is of a GPU tier whose lines come and go; choose option policy other than %s, or leave it out",
			resident)
	case c.Directory != "" && !slices.Contains(policy.Kinds(), c.Directory):
		return errs.New(errs.Usage, "option directory %q is not known; choose one of %v", c.Directory,
			policy.Kinds())
	case c.Window < 0 || c.Window > maxWindow:
		return errs.New(errs.Usage, "option window %d is not between 0 and %d batches", c.Window,
			maxWindow)
	case c.Window > 0 && !c.Dynamic():
		return errs.New(errs.Usage,
			"option window %d keeps the lines of coming batches from eviction, and static tiers evict none; choose option policy other than %s, or leave it out",
			c.Window, resident)
	case !(c.Accumulate >= 0 && c.Accumulate < 1):
		return errs.New(errs.Usage,
			"option accumulate %v is not a share in [0, 1) of the SSDs' peak rate", c.Accumulate)
	case c.Accumulate > 0 && !c.Dynamic():
		return errs.New(errs.Usage,
			"option accumulate merges the reads of several batches in the staging of a GPU tier whose lines come and go; choose option policy other than %s, or leave it out",
			resident)
	case c.Accumulate > 0 && c.Stack().Overlaps:
		return errs.New(errs.Usage,
			"option accumulate merges the reads of coming batches for stacks whose launches wait for their reads; stack %s has several sets in flight anyhow: leave it out, or use option io-stack %s",
			c.IOStack, gpuio.StackSync)
	case c.Accumulate > 0 && c.PerHop():
		return errs.New(errs.Usage,
			"option accumulate merges the reads of whole batches, option pipeline %s reads hop by hop; use another one: %s",
			c.Pipeline, strings.Join(PipelineNames((*Pipeline).whole), ", "))
	case c.Topology == TopologyMemory && (c.NeighborShared || c.NeighborCache.Bytes != 0 ||
		c.NeighborCache.Percent != 0):
		return errs.New(errs.Usage,
			"option neighbor-cache is of a topology that stays on storage; use option topology %s, or leave it out",
			TopologySSD)
	}
	if check := c.Overlap().Check; check != nil {
		if err := check(c); err != nil {
			return err
		}
	}
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

// checkSuperbatch refuses what only tiers that know the future have, and what they can't have.
func (c Config) checkSuperbatch() error {
	for i, given := range []bool{c.Superbatch != 0, c.SuperbatchOverlap, c.SuperbatchDir != "",
		c.SuperbatchDisk != 0} {
		if given && !c.Superbatched() {
			return errs.New(errs.Usage,
				"%v is of tiers that know the mini-batches to come; use %v %s, or leave it out",
				errs.Key(SuperbatchOptions[i]), errs.Key("policy"), PolicyBelady)
		}
	}
	switch {
	case !c.Superbatched():
		return nil
	case c.Superbatch < 0:
		return errs.New(errs.Usage, "%v %d is not a number of mini-batches", errs.Key("superbatch"),
			c.Superbatch)
	case c.SuperbatchDisk < 0:
		return errs.New(errs.Usage, "%v %d is not a size", errs.Key("superbatch-disk"),
			c.SuperbatchDisk)
	}
	return nil
}

// Method returns the graph.Method of Sampler, whose name Check has accepted.
func (c Config) Method() *graph.Method {
	m, _ := graph.FindMethod(c.Sampler)
	return m
}

// MaxLine is the largest line of a dynamic tier, in bytes: no more than a superblock's format
// leaves behind the rows, as the last line of an SSD, where it is not full, is read beyond them.
const MaxLine = 1 << 20

// TierSizes are the tiers' sizes in rows.
type TierSizes struct {
	GPURows, CPURows int64
	Auto             bool // what the tiers get is measured once the rest is there
}

// HostSlack is what a run needs beside its caches: slots, activations, the program itself.
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
	refuse := func(flag string, want, fits int64, where string) error {
		return errs.New(errs.Usage, "%s asks for %s, but %s has room for %s; give at most that",
			flag, units.FormatBytes(want), where, units.FormatBytes(max(fits, 0)))
	}
	onCPU := cpu
	if deviceFree >= 0 {
		if gpu > deviceFree {
			return TierSizes{}, refuse("option gpu-cache "+c.GPUCache.String(), gpu, deviceFree,
				"device memory")
		}
	} else {
		if gpu > fits {
			return TierSizes{}, refuse("option gpu-cache "+c.GPUCache.String(), gpu, fits,
				"memory (the host device keeps its tier there)")
		}
		fits -= gpu
	}
	if onCPU > fits {
		if c.InMemory() {
			return TierSizes{}, errs.New(errs.Usage,
				"option mode %s needs %s for the features, but memory has room for %s; use option mode %s",
				c.Mode, units.FormatBytes(onCPU), units.FormatBytes(max(fits, 0)), DefaultMode)
		}
		what := "memory"
		if gpu > 0 && deviceFree < 0 {
			what = fmt.Sprintf("memory beside the option gpu-cache of %s", units.FormatBytes(gpu))
		}
		return TierSizes{}, refuse("option cpu-cache "+c.CPUCache.String(), onCPU, fits, what)
	}
	b := TierSizes{GPURows: min(gpu/rowBytes, rows), Auto: auto}
	b.CPURows = min(cpu/rowBytes, rows-b.GPURows)
	if c.Dynamic() { // any row may come into the GPU tier
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

// Tuning tells whether the run's first batches are measured.
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
