package plan

import "slices"

// Pipeline declares the operators of mini-batches that overlap. It never changes a result.
//
// One file for each pipeline declares it, and the list in this file has it. The operator graph, the
// schedule, the tuner, checks and help go by the list, so nothing else names a pipeline, but modes,
// which choose one.
type Pipeline struct {
	Name string
	// Summary says in a line what overlaps.
	Summary string
	// PerHop: the rows of a hop are looked up and read while the next hop is sampled.
	PerHop bool
	// Ahead: Config.Depth mini-batches are prepared while one trains.
	Ahead bool
	// WholeDevice: the operator that runs has all SMs. Budgets mean nothing.
	WholeDevice bool
	// Check refuses what this pipeline has no use for; c is filled. Nil: it takes everything.
	Check func(c Config) error
}

// Serial reports whether one operator runs at a time: nothing overlaps within a mini-batch, nor
// between two of them.
func (p *Pipeline) Serial() bool { return !p.PerHop && !p.Ahead }

// Whole reports whether a mini-batch is sampled before its rows are looked up.
func (p *Pipeline) Whole() bool { return !p.PerHop }

// pipelines are all pipelines in the order of lists.
var pipelines []*Pipeline

func init() {
	pipelines = []*Pipeline{deepPipeline, intraPipeline, nonePipeline, prefetchPipeline,
		seriesPipeline, runaheadPipeline}
}

// Pipelines returns every pipeline.
func Pipelines() []*Pipeline { return slices.Clone(pipelines) }

// PipelineNames returns the names of the pipelines that have a trait; of all where it is nil.
func PipelineNames(has func(*Pipeline) bool) (names []string) {
	for _, p := range pipelines {
		if has == nil || has(p) {
			names = append(names, p.Name)
		}
	}
	return names
}

// pipelineOf returns the pipeline of a name, nil for none.
func pipelineOf(name string) *Pipeline {
	if i := slices.IndexFunc(pipelines,
		func(p *Pipeline) bool { return p.Name == name }); i >= 0 {
		return pipelines[i]
	}
	return nil
}

// Overlap returns the pipeline of a configuration; DefaultPipeline where Check would refuse the
// name.
func (c Config) Overlap() *Pipeline {
	if p := pipelineOf(c.Pipeline); p != nil {
		return p
	}
	return pipelineOf(DefaultPipeline)
}

// Schedule holds what a pipeline means for a configuration: the two kinds of overlap, and how many
// batches may be in flight.
type Schedule struct {
	Credits int // mini-batches whose rows are on their way or in place: feature tensors
	// mini-batches that are sampled and not trained, to begin with; a dynamic tier may have more
	// than credits
	Samples int
	PerHop  bool // rows of hop h are looked up and read while hop h+1 is sampled
	Serial  bool // one operator at a time: gather waits for the reads
	Group   bool // the reads of several batches are merged
	// Joins: the hops of a mini-batch are looked up and read as one set after all where its rows
	// are expected to share commands. More of them do than within a hop, and with mini-batches
	// prepared ahead no read waits for its hop.
	Joins bool
	// Merges counts the mini-batches that may be read as one set; 0 and 1: each is read by itself.
	Merges int
}

// Merging is the schedule where files play the SSDs and the CPU is the device: one half of the
// mini-batches trains while the other is read, as one set where that saves commands.
func (s Schedule) Merging() Schedule {
	if s.Joins && s.Credits > 2 {
		odd := s.Credits % 2
		s.Credits, s.Samples = s.Credits+odd, s.Samples+odd
		s.Merges = s.Credits / 2
	}
	return s
}

// Schedule returns what the configuration's pipeline means.
func (c Config) Schedule() Schedule {
	p := c.Overlap()
	s := Schedule{Credits: 1, PerHop: p.PerHop, Serial: p.Serial(), Group: c.Accumulate > 0}
	if p.Ahead {
		s.Credits = c.Depth + 1
	}
	if c.Replicas > 1 {
		s.Credits += c.Replicas - 1 // each trains on one
	}
	s.Samples = s.Credits + c.Window
	t := c.Traits()
	s.Joins = p.PerHop && p.Ahead && t.ByHotness && !t.Staged && c.Stack().Coalesces &&
		c.CoalesceBytes >= 0
	return s
}
