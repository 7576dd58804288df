// Package sched trains a graph neural network out of core. It decomposes a mini-batch into
// operators (S_h sample hop h, L_h look its rows up, I_h submit their reads, C complete them,
// G gather the cached ones, T train), puts them on streams with SM budgets, and bounds what is
// in flight by credits: mini-batch slots that a batch holds from its first sample to its last
// gradient (DESIGN section 7). Every mode of DESIGN section 10 is one configuration of it.
package sched

import (
	"fmt"
	"math"
	"slices"
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

// Modes: whose data path a run takes.
const (
	ModeHelios = "helios" // asynchronous stack, static GPU and CPU tiers
	ModeInmem  = "inmem"  // every row in memory before the first batch
	ModeCPU    = "cpu"    // CPU-managed reads, static CPU tier
	ModeMmap   = "mmap"   // the kernel's page cache
	ModeBaM    = "bam"    // synchronous stack, dynamic GPU tier
	ModeGIDS   = "gids"   // bam with window buffer, constant CPU buffer and accumulator
)

// Pipelines: which operators may overlap.
const (
	PipelineNone     = "none"     // one operator at a time
	PipelineIntra    = "intra"    // reads for hop h go out while hop h+1 is sampled
	PipelinePrefetch = "prefetch" // whole batches are prepared while one trains
	PipelineDeep     = "deep"     // both
	// PipelineSeries is the paper's NoPipe: one operator at a time, each with all SMs.
	PipelineSeries = "series"
	// PipelineRunAhead samples ahead and merges the reads of coming batches; else one operator at a time.
	PipelineRunAhead = "run-ahead"
)

// PolicyStatic places rows once, by hotness; the others are package policy's.
const PolicyStatic = "static"

// Samplers.
const (
	SamplerNeighbor = "neighbor"
	SamplerLadies   = "ladies" // layer-wise; Fanouts are nodes per layer
)

// Where the topology is.
const (
	TopologyMemory = "memory" // the CPU's, read in place by the device
	TopologySSD    = "ssd"    // in-neighbour lists are read as they are needed, through a cache of lists
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

// LineRow as Config.CacheLine: a line of a dynamic tier is a row.
const LineRow = -1

// I/O stacks: who drives the SSDs.
const (
	StackAsync = "async"
	StackSync  = "sync" // one warp a row: the baseline
	StackCPU   = "cpu"
	StackMmap  = "mmap"
	StackNone  = "none" // reported where no batch reads
)

// The defaults of GIDS (its evaluation, section 4): the window's depth, the accumulator's target, lines of BaM's page size,
// and (for who turns flags into a Config, since an empty Budget is none) the constant CPU buffer's share of the features.
const (
	GIDSWindow     = 8
	GIDSAccumulate = 0.95
	GIDSCPUPercent = 10
	BaMLine        = 4096
)

// maxWindow is the deepest window: each batch in it keeps its sample in memory.
const maxWindow = 64

// Modes, Pipelines and Stacks list the accepted values, for usage text.
var (
	Modes     = []string{ModeHelios, ModeInmem, ModeCPU, ModeMmap, ModeBaM, ModeGIDS}
	Pipelines = []string{PipelineDeep, PipelineIntra, PipelineNone, PipelinePrefetch, PipelineSeries, PipelineRunAhead}
	Stacks    = []string{StackAsync, StackSync, StackCPU, StackMmap}
	// Policies of the GPU tier; Samplers, Topologies and Tunes are what their fields accept.
	Policies   = append([]string{PolicyStatic}, policy.Online()...)
	Samplers   = []string{SamplerNeighbor, SamplerLadies}
	Topologies = []string{TopologyMemory, TopologySSD}
	Tunes      = []string{TuneOff, TuneQuick, TuneFull}
)

// Config is a training run. Its zero values mean the defaults given here.
type Config struct {
	Mode string // helios

	// What is computed: these decide the parameters that come out.
	Model   string // one of gnn.Archs; gnn.DefaultArch
	Fanouts []int  // 10,10; hop 1 first; -1 takes every neighbour; one model layer per hop
	Batch   int    // seed nodes in a mini-batch; 1024
	Hidden  int    // 128
	LR      float64
	Dropout float64 // 0; of hidden activations
	// FeatureDropout is the share of the input features that a step of training drops; 0.
	FeatureDropout float64
	WeightDecay    float64 // 0
	LearnEps       bool    // of gin: ε is learned, else 0
	Heads          int     // of gat; 0: 8
	// AttentionDropout is the share of the edges' attention that a step of training drops (gat); 0.
	AttentionDropout float64
	Seed             uint64
	Epochs           int // 1

	// How it is computed: these never change a result.
	IOStack  string       // by mode
	Pipeline string       // by mode
	GPUCache units.Budget // share or bytes of the features in the device's memory
	// GPUCacheAuto sets GPUCache on a GPU: what its memory has free less what the run needs, measured. The host device,
	// whose memory is the CPU's, takes 5% then.
	GPUCacheAuto bool
	CPUCache     units.Budget // the same in pinned CPU memory; inmem takes every row instead
	Depth        int          // mini-batches prepared ahead under prefetch and deep; 2
	Presample    int          // epochs of sampling that count accesses to place rows; 4
	Workers      int          // threads of the cpu stack; the device's SMs
	Blocks       int          // thread blocks of the I/O kernels; 32, sync: as many as the device keeps resident
	QueueDepth   int          // reads outstanding per SSD; the stack's default
	ReadTimeout  time.Duration
	ReadRetries  int    // -1 for none; the stack's default
	ReadResets   int    // controller resets before an SSD is given up, -1 for none; the stack's default
	CPUEngine    string // io_uring or pread, for the cpu stack
	// CoalesceBytes is how much one command may read for rows on equal and adjacent LBAs: 0
	// leaves it to the stack (async and cpu), negative is a command for each row.
	CoalesceBytes int
	// RowType is the type that the rows on the SSDs must have, by name; empty: whatever they have. On the
	// virtual clock it is the type they are taken to have; empty: the dataset's.
	RowType    string
	CheckReads bool // every row is held against the checksum that load has written
	VerifyRows bool // every row that was gathered is held against the dataset's feature function
	SMs        SMBudget
	// MemoryRung is where the I/O kernels' queues and data are (gpuio.Rungs); empty or "auto": the best that proves itself.
	MemoryRung string
	// Policy of the GPU tier: PolicyStatic or one of policy.Online(); empty: by mode.
	Policy string
	// CacheLine is the bytes of a line of a dynamic GPU tier, or LineRow; 0: by mode (bam and gids 4096, else a row).
	CacheLine int64
	// Window is how many coming batches' lines a dynamic tier keeps (window buffer of GIDS); 0: none.
	Window int
	// Accumulate is the share of the SSDs' peak rate that merging the reads of coming batches aims at (accumulator of
	// GIDS); 0: reads are not merged.
	Accumulate float64
	// Sampler is SamplerNeighbor or SamplerLadies. It changes results.
	Sampler string
	// Topology is TopologyMemory or TopologySSD; NeighborCache is the memory for the lists of hot nodes under the latter.
	Topology      string
	NeighborCache units.Budget
	// Hotness is what places the static tiers: HotnessPresample, HotnessDegree, HotnessPageRank, or a file's path.
	Hotness string
	// HotnessDir is where it is kept and found again; empty: nowhere.
	HotnessDir string
	// Tune lets the first batches choose budgets, depth and the accumulator's target.
	Tune string
	// Trace is a file for the run's accesses ("cache replay"); empty: none.
	Trace string
	// Overwrite lets another run's checkpoint and a trace that is there be replaced.
	Overwrite bool
	// Run is the identity of a new run, which its checkpoint keeps; may be empty. One that goes on has its checkpoint's.
	Run string
	// LastParameters has Evaluate and Predict take the parameters that training stopped with instead of the best epoch's.
	LastParameters bool
	// OtherDataset lets them use a checkpoint on a dataset that it was not trained on.
	OtherDataset bool
	// Precision of the model's products (cuda.Precisions); empty: fp32. It changes results, by rounding.
	Precision string
	// BLAS computes the products on a GPU in place of our kernels: empty or "off", "auto" (where it is installed), or the
	// library's path. It changes results, by rounding.
	BLAS string

	// OpTimeout bounds each single wait for an operator; 5 minutes.
	OpTimeout time.Duration

	// Timeline, where given, gets a span for each operator of each batch.
	Timeline *timeline.Recorder

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

func (c Config) withDefaults() Config {
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	defInt := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def(&c.Mode, ModeHelios)
	def(&c.Model, gnn.DefaultArch)
	if len(c.Fanouts) == 0 {
		c.Fanouts = []int{10, 10}
	}
	defInt(&c.Batch, 1024)
	defInt(&c.Hidden, 128)
	m := gnn.ModelConfig{Heads: c.Heads}
	c.arch().Default(&m)
	c.Heads = m.Heads
	if c.LR == 0 {
		c.LR = 0.003
	}
	defInt(&c.Epochs, 1)
	defInt(&c.Depth, 2)
	defInt(&c.Presample, 4)
	if c.OpTimeout == 0 {
		c.OpTimeout = 5 * time.Minute
	}
	switch c.Mode {
	case ModeCPU:
		def(&c.IOStack, StackCPU)
		def(&c.Pipeline, PipelinePrefetch)
	case ModeMmap:
		def(&c.IOStack, StackMmap)
		def(&c.Pipeline, PipelinePrefetch)
	case ModeBaM:
		def(&c.IOStack, StackSync)
		def(&c.Pipeline, PipelineNone)
		def(&c.Policy, policy.Random)
	case ModeGIDS:
		def(&c.IOStack, StackSync)
		def(&c.Policy, policy.Random)
		def(&c.Hotness, HotnessPageRank)
		if c.dynamic() { // a static tier has neither
			defInt(&c.Window, GIDSWindow)
			if c.Accumulate == 0 && c.IOStack != StackAsync && (c.Pipeline == "" || !c.perHop()) {
				c.Accumulate = GIDSAccumulate
			}
		}
		c = c.settled()
		if c.Window == 0 && c.Accumulate == 0 { // nothing to run ahead for
			def(&c.Pipeline, PipelineNone)
		}
		def(&c.Pipeline, PipelineRunAhead)
	default:
		def(&c.IOStack, StackAsync)
		def(&c.Pipeline, PipelineDeep)
	}
	def(&c.Policy, PolicyStatic)
	def(&c.Hotness, HotnessPresample)
	def(&c.Sampler, SamplerNeighbor)
	def(&c.Topology, TopologyMemory)
	def(&c.Tune, TuneOff)
	if c.CacheLine == 0 && c.dynamic() {
		c.CacheLine = LineRow
		if c.Mode == ModeBaM || c.Mode == ModeGIDS {
			c.CacheLine = BaMLine
			if c.CheckReads { // checksums are of rows
				c.CacheLine = LineRow
			}
		}
	}
	return c.settled()
}

// settled takes what was asked not to be (negative: none) for none.
func (c Config) settled() Config {
	if c.Window == Off {
		c.Window = 0
	}
	if c.Accumulate == Off {
		c.Accumulate = 0
	}
	return c
}

// Off as Config.Window or Config.Accumulate: none, whatever the mode has.
const Off = -1

// dynamic tells whether the GPU tier's lines come and go.
func (c Config) dynamic() bool { return c.Policy != "" && c.Policy != PolicyStatic }

// perHop tells whether the pipeline looks rows up hop by hop.
func (c Config) perHop() bool {
	return c.Pipeline == PipelineDeep || c.Pipeline == PipelineIntra
}

// onDevice settles what depends on the device.
func (c Config) onDevice(dev cuda.Info) (Config, error) {
	if dev.Backend == "host" {
		if c.GPUCacheAuto {
			c.GPUCacheAuto, c.GPUCache = false, units.Budget{Percent: 5}
		}
		return c, c.hostOnly()
	}
	if c.Pipeline == PipelineSeries && c.Blocks == 0 && c.IOStack == StackAsync {
		c.Blocks = max(32, 16*dev.SMs) // alone on the device, an I/O kernel has all of it
	}
	if c.SMs.IO == 0 && c.IOStack == StackAsync && c.Pipeline != PipelineSeries {
		// As many SMs as hold the blocks of an I/O kernel (32 to start with, DESIGN section 7): the fewest that any GPU
		// from sm_75 on keeps resident on an SM are 16 (CUDA C++ programming guide, table of technical specifications).
		c.SMs.IO = ioSMs(c.Blocks, dev.SMs)
	}
	return c, nil
}

// ioSMs is how many of a GPU's SMs hold an I/O kernel of so many blocks, 0 for the default.
func ioSMs(blocks, sms int) int {
	if blocks == 0 {
		blocks = ioBlocks
	}
	return min((blocks+15)/16, sms)
}

// hostOnly refuses what the host device lacks.
func (c Config) hostOnly() error {
	if c.precision() != cuda.FP32 {
		return errs.New(errs.Capability, "--precision %s: the host device computes in fp32 alone; leave it out, or use --device cuda", c.Precision)
	}
	if c.BLAS != "" && c.BLAS != BLASOff && c.BLAS != BLASAuto {
		return errs.New(errs.Capability, "--blas %s: the host device computes with its own kernels; leave it out, or use --device cuda", c.BLAS)
	}
	return nil
}

// Values of Config.BLAS beside a path.
const (
	BLASOff  = "off"
	BLASAuto = "auto"
)

// precision is c.Precision, which check has looked at.
func (c Config) precision() cuda.Precision {
	return cuda.Precision(max(slices.Index(cuda.Precisions(), c.Precision), 0))
}

// queued tells whether the stack's reads go through NVMe queues of ours.
func (c Config) queued() bool { return c.IOStack == StackAsync || c.IOStack == StackSync }

// Check refuses, as Train does, what can't be meant together on any device or dataset.
func (c Config) Check() error { return c.withDefaults().check() }

// arch is the kind of model; the default's where check would refuse it.
func (c Config) arch() gnn.Arch {
	a, err := gnn.ArchOf(c.Model)
	if err != nil {
		a, _ = gnn.ArchOf(gnn.DefaultArch)
	}
	return a
}

// check refuses what can't be meant; each error names the flag.
func (c Config) check() error {
	oneOf := func(flag, v string, all []string) error {
		if !slices.Contains(all, v) {
			return errs.New(errs.Usage, "--%s %q is not known; choose one of %v", flag, v, all)
		}
		return nil
	}
	for _, e := range []error{
		oneOf("mode", c.Mode, Modes),
		oneOf("pipeline", c.Pipeline, Pipelines),
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
			return fmt.Errorf("--row-dtype: %w", err)
		}
	}
	if c.CoalesceBytes > 0 && c.IOStack != StackAsync && c.IOStack != StackCPU {
		return errs.New(errs.Usage, "--coalesce: stack %s reads each row by itself; leave it out, or use --io-stack async or cpu", c.IOStack)
	}
	if c.Precision != "" {
		if err := oneOf("precision", c.Precision, cuda.Precisions()); err != nil {
			return err
		}
	}
	if rung := c.MemoryRung; rung != "" && rung != gpuio.RungAuto {
		if err := oneOf("memory-rung", rung, append([]string{gpuio.RungAuto}, gpuio.Rungs()...)); err != nil {
			return err
		}
		if !c.queued() {
			return errs.New(errs.Usage, "--memory-rung %s: stack %s has no queues in memory of ours; leave it out, or use --io-stack async or sync", rung, c.IOStack)
		}
	}
	for _, f := range c.Fanouts {
		if f == 0 || f < -1 {
			return errs.New(errs.Usage, "--fanout %v: %d is not a number of neighbours; give at least 1, or -1 for all", c.Fanouts, f)
		}
	}
	if len(c.Fanouts) > 8 {
		return errs.New(errs.Usage, "--fanout names %d hops; at most 8 are supported", len(c.Fanouts))
	}
	for _, n := range []struct {
		flag      string
		v, lo, hi int
	}{
		{"batch-size", c.Batch, 1, 1 << 24},
		{"hidden", c.Hidden, 1, 1 << 16},
		{"epochs", c.Epochs, 1, maxEpochs},
		{"prefetch-depth", c.Depth, 1, 64},
		{"presample-epochs", c.Presample, 1, 1 << 10},
		{"io-blocks", c.Blocks, 0, 1 << 16},
		{"depth", c.QueueDepth, 0, 1 << 16},
		{"checkpoint-every", c.CheckpointEvery, 0, math.MaxInt32},
	} {
		if n.v < n.lo || n.v > n.hi {
			return errs.New(errs.Usage, "--%s %d is not between %d and %d", n.flag, n.v, n.lo, n.hi)
		}
	}
	if err := c.checkCache(); err != nil {
		return err
	}
	if !(c.LR > 0) || math.IsInf(c.LR, 0) {
		return errs.New(errs.Usage, "--lr %v is not a positive number", c.LR)
	}
	if !(c.Dropout >= 0 && c.Dropout < 1) {
		return errs.New(errs.Usage, "--dropout %v is not in [0, 1)", c.Dropout)
	}
	if !(c.FeatureDropout >= 0 && c.FeatureDropout < 1) {
		return errs.New(errs.Usage, "--feature-dropout %v is not in [0, 1)", c.FeatureDropout)
	}
	m := gnn.ModelConfig{
		Kind: c.Model, Hidden: c.Hidden, Layers: len(c.Fanouts), LearnEps: c.LearnEps, Heads: c.Heads, AttentionDropout: float32(c.AttentionDropout),
	}
	if err := c.arch().Check(&m); err != nil {
		return err
	}
	if !(c.WeightDecay >= 0) || math.IsInf(c.WeightDecay, 0) {
		return errs.New(errs.Usage, "--weight-decay %v is not a number of at least 0", c.WeightDecay)
	}
	if c.Resume && c.CheckpointDir == "" {
		return errs.New(errs.Usage, "--resume needs --checkpoint DIR, the folder to go on from")
	}
	for _, b := range []struct {
		flag string
		v    units.Budget
	}{{"gpu-cache", c.GPUCache}, {"cpu-cache", c.CPUCache}, {"neighbor-cache", c.NeighborCache}} {
		if b.v.Bytes < 0 || !(b.v.Percent >= 0 && b.v.Percent <= 100) {
			return errs.New(errs.Usage, "--%s %v is not a size or a share of 0%% to 100%%", b.flag, b.v)
		}
	}
	return nil
}

// checkCache refuses parts of the dynamic tier, the accumulator and the sampler that can't go together.
func (c Config) checkCache() error {
	if c.Policy == policy.Belady {
		return errs.New(errs.Usage, "--policy %s needs to know every later access: record a run with --trace FILE, and see what it would have done with \"heliosctl cache replay\"; for a run choose one of %v", c.Policy, Policies)
	}
	if !slices.Contains(Policies, c.Policy) {
		return errs.New(errs.Usage, "--policy %q is not known; choose one of %v", c.Policy, Policies)
	}
	switch {
	case c.CacheLine != 0 && !c.dynamic():
		return errs.New(errs.Usage, "--cache-line is of a GPU tier whose lines come and go; give a --policy other than %s, or leave it out", PolicyStatic)
	case c.CacheLine != 0 && c.CacheLine != LineRow && (c.CacheLine < 512 || c.CacheLine > maxLine):
		return errs.New(errs.Usage, "--cache-line %d is not \"row\" or 512 to %d bytes", c.CacheLine, maxLine)
	case c.Window < 0 || c.Window > maxWindow:
		return errs.New(errs.Usage, "--window %d is not between 0 and %d batches", c.Window, maxWindow)
	case c.Window > 0 && !c.dynamic():
		return errs.New(errs.Usage, "--window %d keeps the lines of coming batches from eviction, and static tiers evict none; give a --policy other than %s, or leave it out", c.Window, PolicyStatic)
	case c.dynamic() && c.Mode == ModeInmem:
		return errs.New(errs.Usage, "--policy %s: --mode inmem has every row in memory, so that nothing comes or goes; leave it out, or use --mode helios", c.Policy)
	case !(c.Accumulate >= 0 && c.Accumulate < 1):
		return errs.New(errs.Usage, "--accumulate %v is not a share in [0, 1) of the SSDs' peak rate", c.Accumulate)
	case c.Accumulate > 0 && !c.dynamic():
		return errs.New(errs.Usage, "--accumulate merges the reads of several batches in the staging of a GPU tier whose lines come and go; give a --policy other than %s, or leave it out", PolicyStatic)
	case c.Accumulate > 0 && c.IOStack == StackAsync:
		return errs.New(errs.Usage, "--accumulate merges the reads of coming batches for stacks whose launches wait for their reads; stack %s has several sets in flight anyhow: leave it out, or use --io-stack sync", c.IOStack)
	case c.Accumulate > 0 && c.perHop():
		return errs.New(errs.Usage, "--accumulate merges the reads of whole batches, --pipeline %s reads hop by hop; use --pipeline %s, %s, %s or %s",
			c.Pipeline, PipelineRunAhead, PipelinePrefetch, PipelineNone, PipelineSeries)
	case c.Pipeline == PipelineRunAhead && c.Accumulate == 0 && c.Window == 0:
		return errs.New(errs.Usage, "--pipeline %s samples ahead for --window and --accumulate, and neither is given; give one, or use --pipeline %s", PipelineRunAhead, PipelineNone)
	case c.Pipeline == PipelineSeries && (c.SMs.Sample != 0 || c.SMs.Lookup != 0 || c.SMs.IO != 0 || c.SMs.Gather != 0 || c.SMs.Train != 0):
		return errs.New(errs.Usage, "--pipeline %s gives each operator all SMs; leave the SM budgets out, or use --pipeline %s", PipelineSeries, PipelineNone)
	case c.CheckReads && c.dynamic() && c.CacheLine != LineRow:
		return errs.New(errs.Usage, "--check-reads holds rows against their checksums, and a line of --cache-line %d holds several; use --cache-line row", c.CacheLine)
	case c.Topology == TopologyMemory && (c.NeighborCache.Bytes != 0 || c.NeighborCache.Percent != 0):
		return errs.New(errs.Usage, "--neighbor-cache is of a topology that stays on storage; use --topology %s, or leave it out", TopologySSD)
	}
	if c.Sampler == SamplerLadies {
		for _, f := range c.Fanouts {
			if f < 1 || f > graph.MostLayer {
				return errs.New(errs.Usage, "--fanout %v: --sampler %s draws so many nodes for a layer, and %d is not from 1 to %d", c.Fanouts, c.Sampler, f, graph.MostLayer)
			}
		}
	}
	return nil
}

// maxLine is the largest line of a dynamic tier, in bytes: no more than a superblock's format leaves behind the rows, as the
// last line of an SSD, where it is not full, is read beyond them.
const maxLine = 1 << 20

// plan is what a pipeline name means: the two kinds of overlap, and how many batches may be in
// flight.
type plan struct {
	credits int  // mini-batches whose rows are on their way or in place: feature tensors
	samples int  // mini-batches that are sampled and not trained, to begin with; a dynamic tier may have more than credits
	perHop  bool // rows of hop h are looked up and read while hop h+1 is sampled
	serial  bool // one operator at a time: gather waits for the reads
	group   bool // the reads of several batches are merged
}

func (c Config) plan() plan {
	p := plan{credits: 1, group: c.Accumulate > 0}
	switch c.Pipeline {
	case PipelineNone, PipelineSeries, PipelineRunAhead:
		p.serial = true
	case PipelineIntra:
		p.perHop = true
	case PipelinePrefetch:
		p.credits = c.Depth + 1
	default:
		p.credits, p.perHop = c.Depth+1, true
	}
	p.samples = p.credits + c.Window
	return p
}

// budgets are the tiers' sizes in rows.
type budgets struct {
	gpuRows, cpuRows int64
	auto             bool // what the tiers get is measured once the rest is there
}

// slack is what a run needs beside its caches: slots, activations, the program itself.
const slack = 64 << 20

// tierRows turns the budgets into rows. available is the CPU memory that can still be had;
// deviceFree the device's own, or -1 where it is the same memory. A budget that does not fit is
// refused even where the features are smaller, since the user believed in memory that is not
// there.
func (c Config) tierRows(rows, rowBytes, available, deviceFree int64) (budgets, error) {
	total := rows * rowBytes
	gpu, cpu := c.GPUCache.Of(total), c.CPUCache.Of(total)
	auto := c.GPUCacheAuto && deviceFree >= 0
	if auto {
		gpu = 0
	}
	if c.Mode == ModeInmem {
		cpu = max(total-gpu/rowBytes*rowBytes, 0)
		if auto { // at best the device takes all it has
			cpu = max(total-deviceFree/rowBytes*rowBytes, 0)
		}
	}
	fits := max(available-slack, 0)
	refuse := func(flag string, want, fits int64, where string) error {
		return errs.New(errs.Usage, "%s asks for %s, but %s has room for %s; give at most that",
			flag, units.FormatBytes(want), where, units.FormatBytes(max(fits, 0)))
	}
	onCPU := cpu
	if deviceFree >= 0 {
		if gpu > deviceFree {
			return budgets{}, refuse("--gpu-cache "+c.GPUCache.String(), gpu, deviceFree, "device memory")
		}
	} else {
		if gpu > fits {
			return budgets{}, refuse("--gpu-cache "+c.GPUCache.String(), gpu, fits, "memory (the host device keeps its tier there)")
		}
		fits -= gpu
	}
	if onCPU > fits {
		if c.Mode == ModeInmem {
			return budgets{}, errs.New(errs.Usage, "--mode inmem needs %s for the features, but memory has room for %s; use --mode helios",
				units.FormatBytes(onCPU), units.FormatBytes(max(fits, 0)))
		}
		what := "memory"
		if gpu > 0 && deviceFree < 0 {
			what = fmt.Sprintf("memory beside the --gpu-cache of %s", units.FormatBytes(gpu))
		}
		return budgets{}, refuse("--cpu-cache "+c.CPUCache.String(), onCPU, fits, what)
	}
	b := budgets{gpuRows: min(gpu/rowBytes, rows), auto: auto}
	b.cpuRows = min(cpu/rowBytes, rows-b.gpuRows)
	if c.dynamic() { // any row may come into the GPU tier
		b.cpuRows = min(cpu/rowBytes, rows)
	}
	if c.Mode == ModeInmem && !auto {
		b.cpuRows = rows - b.gpuRows
	}
	return b, nil
}
