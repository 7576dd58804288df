// Package report holds what a run tells: the result of training, evaluation and a modelled run,
// the figures of each epoch and SSD, and the observer that hears of them while the run goes on.
package report

import (
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/metrics"
	"helios/sched/plan"
)

// StageSeconds is the time in which each operator's own resource was busy. For sample, lookup,
// gather and train that is the SMs that its stream held, not its waits for SMs that others held:
// the stages of a device with one SM would seem to overlap otherwise. Lookups in a dynamic tier are
// the CPU's, and those by which a window hears of coming batches count too. Submit is the
// submitting kernel, complete the SSDs from a read's submission to its end. Train includes the
// widening of rows that are not stored as float32. Sampling a superbatch counts with the files that
// its samples go through. Several instances of an operator in flight
// (reads of several hops) count once.
type StageSeconds struct {
	Sample float64 `json:"sample"`
	// Inspect holds what the CPU takes to find the changes of a cache that knows a superbatch.
	Inspect  float64 `json:"inspect,omitempty"`
	Lookup   float64 `json:"lookup"`
	Submit   float64 `json:"submit"`
	Complete float64 `json:"complete"`
	Gather   float64 `json:"gather"`
	Train    float64 `json:"train"`
	// Topology holds what sampling waited for lists of a topology on storage.
	Topology float64 `json:"topology,omitempty"`
	// Between is the part of an epoch that no stage accounts for: launches, and what passes from
	// the end of an operator to the begin of the next while nothing else is busy. It is the least
	// that this can have been, 0 where stages overlap for longer.
	Between float64 `json:"between,omitempty"`
}

// Sum is the time that the operators would take one after the other.
func (s StageSeconds) Sum() float64 {
	return s.Sample + s.Inspect + s.Lookup + s.Submit + s.Complete + s.Gather + s.Train +
		s.Topology + s.Between
}

// ByName has the stages by their names in JSON.
func (s StageSeconds) ByName() map[string]float64 {
	return map[string]float64{"sample": s.Sample, "inspect": s.Inspect, "lookup": s.Lookup,
		"submit": s.Submit, "complete": s.Complete, "gather": s.Gather, "train": s.Train,
		"topology": s.Topology}
}

// Add adds o, stage by stage.
func (s *StageSeconds) Add(o StageSeconds) { s.AddTimes(o, 1) }

// AddTimes adds o times sign.
func (s *StageSeconds) AddTimes(o StageSeconds, sign float64) {
	s.Sample += sign * o.Sample
	s.Inspect += sign * o.Inspect
	s.Lookup += sign * o.Lookup
	s.Submit += sign * o.Submit
	s.Complete += sign * o.Complete
	s.Gather += sign * o.Gather
	s.Train += sign * o.Train
	s.Topology += sign * o.Topology
	s.Between += sign * o.Between
}

// EpochResult is one epoch of training and its validation. Seconds, stall, overlap and
// stage_seconds are of the training pass alone.
//
//   - overlap is 1 - seconds / (sum of stage_seconds). Time of no stage is a part of
//     that sum, so that a serial run shows 0, and not less for the time between its operators.
//   - stall is the share of seconds in which training waited: for its next batch, and on the host
//     device for worker slots that other operators held.
//   - read_amplification is bytes_ssd over the bytes of the rows that had to come from SSD,
//     each row counted once for a mini-batch that needs it; 0 where none had to.
//
// Large: a field for each figure of an epoch, as its JSON has them.
type EpochResult struct {
	Epoch    int      `json:"epoch"` // from 1
	Seconds  float64  `json:"seconds"`
	Loss     float64  `json:"loss"`      // mean over the seeds that have a label
	TrainAcc *float64 `json:"train_acc"` // null where no seed has a class
	ValAcc   *float64 `json:"val_acc"`   // null without validation, and of numbers
	// ValLoss is the mean loss over the labelled nodes of validation.
	ValLoss    *float64 `json:"val_loss,omitempty"`
	ValSeconds float64  `json:"val_seconds"`
	// ValMetrics are there where another metric than accuracy chooses the best epoch.
	ValMetrics *metrics.Summary `json:"val_metrics,omitempty"`
	Batches    int              `json:"batches"`
	Seeds      int64            `json:"seeds"`
	RowsGPU    int64            `json:"rows_gpu"`
	RowsCPU    int64            `json:"rows_cpu"`
	RowsSSD    int64            `json:"rows_ssd"`
	// RowsChunk, of RowsSSD, are from the mini-batch's own chunk of packed rows; the others from
	// the disk cache of its segment.
	RowsChunk         int64        `json:"rows_chunk,omitempty"`
	BytesSSD          int64        `json:"bytes_ssd"`
	SSDCommands       int64        `json:"ssd_commands"`
	Retries           int64        `json:"retries"`
	Timeouts          int64        `json:"timeouts"`
	ReadAmplification float64      `json:"read_amplification"`
	Stall             float64      `json:"stall"`
	Overlap           float64      `json:"overlap"`
	SeedsPerSecond    float64      `json:"seeds_per_second"`
	SSDBytesPerSecond float64      `json:"ssd_bytes_per_second"` // over seconds, as the next
	SSDIOPS           float64      `json:"ssd_iops"`
	StageSeconds      StageSeconds `json:"stage_seconds"`
	// resident at the end of the epoch, without pages of files
	MemoryBytes int64 `json:"memory_bytes"`
	// Lines that a dynamic GPU tier took in, those that it let go for them, and those that found no
	// place; 0 in a static one.
	LinesInserted int64 `json:"lines_inserted"`
	LinesEvicted  int64 `json:"lines_evicted"`
	LinesBypassed int64 `json:"lines_bypassed"`
	// HitRatio is the share of rows that no SSD had to give.
	HitRatio float64 `json:"hit_ratio"`
	// ReadGroups are the sets of reads that were merged, of GroupBatches batches in the mean.
	ReadGroups   int     `json:"read_groups"`
	GroupBatches float64 `json:"group_batches"`
	// LR is the learning rate of the last step. GradNorm is the mean norm of the steps' gradients,
	// before any is clipped, and GradNormMax the largest; absent in a modelled run.
	LR          float64  `json:"lr,omitempty"`
	GradNorm    *float64 `json:"grad_norm,omitempty"`
	GradNormMax float64  `json:"grad_norm_max,omitempty"`
	Clipped     int      `json:"clipped_steps,omitempty"` // whose gradient was
	// TopologyReads holds what sampling read of a topology on storage, run-ahead included; absent
	// for one in memory.
	TopologyReads *graph.StorageStats `json:"topology_reads,omitempty"`
	// CPU accounts for the process's CPU time; absent unless the run was asked to.
	CPU *CPUUse `json:"cpu,omitempty"`
}

// Score returns the figure of validation of a metric; nil: there is none.
func (r *EpochResult) Score(m metrics.Metric) *float64 {
	if r.ValMetrics != nil {
		return m.Of(r.ValMetrics)
	}
	return r.ValAcc
}

// Result is a finished run: the last line of "train --json".
type Result struct {
	Mode    string `json:"mode"`
	Model   string `json:"model"`
	Dataset string `json:"dataset"`
	Seed    uint64 `json:"seed"`
	Device  string `json:"device"`
	// of the host device: generic, avx2 or avx512; of a GPU what they were loaded from: "cubin
	// sm_90", or "PTX" and why
	Kernels  string        `json:"kernels"`
	IOStack  string        `json:"io_stack"`
	Pipeline string        `json:"pipeline"`
	Epochs   []EpochResult `json:"epochs"`
	// the earliest with the best figure of validation, which Metric names
	BestEpoch int    `json:"best_epoch"`
	Metric    string `json:"metric"`
	// with that epoch's parameters; null without a test
	TestAcc     *float64        `json:"test_acc"`
	TestMetrics *metrics.Report `json:"test_metrics,omitempty"`
	// of the rows on the SSDs, in the slots and in the tiers
	RowDType string `json:"row_dtype"`
	RowBytes int64  `json:"row_bytes"` // of one of them
	// against the feature function, in training and evaluation
	RowsVerified    *int64        `json:"rows_verified,omitempty"`
	GPUCacheBytes   int64         `json:"gpu_cache_bytes"`
	CPUCacheBytes   int64         `json:"cpu_cache_bytes"`
	TopologyBytes   int64         `json:"topology_bytes"`
	ScaleBytes      int64         `json:"scale_bytes,omitempty"` // of rows that have scales, in memory
	PeakMemoryBytes int64         `json:"peak_memory_bytes"`
	Memory          []hostmem.Use `json:"memory"` // at the end, by purpose, the largest first
	PresampleSecs   float64       `json:"presample_seconds"`
	FillSeconds     float64       `json:"fill_seconds"`
	ParamsSHA256    string        `json:"params_sha256"` // after the last epoch
	RunInfo
	IO         IOResult `json:"io"`
	Checkpoint string   `json:"checkpoint,omitempty"`
	ResumedAt  string   `json:"resumed_at,omitempty"`
}

// Observer hears how a run goes. Nil functions are not called; all calls come from the
// goroutine that called Train.
type Observer struct {
	Epoch func(EpochResult)
	Step  func(stage string, done, total int)
	Note  func(errs.Text)
	// Live hears of a pass after each of its mini-batches: its name, as Step has it, and what it
	// has come to in this run.
	Live func(pass string, p Partial)
	// Plan hears of the run's operators: once, when all is open and the first batch is about to be
	// sampled, and again where the tuner chose other bounds.
	Plan func(*plan.OpGraph)
}

// TellPlan passes the operator graph on.
func (o Observer) TellPlan(g *plan.OpGraph) {
	if o.Plan != nil {
		o.Plan(g)
	}
}

// TellEpoch passes a finished epoch on.
func (o Observer) TellEpoch(e EpochResult) {
	if o.Epoch != nil {
		o.Epoch(e)
	}
}

// TellStep passes the progress of a stage on.
func (o Observer) TellStep(stage string, done, total int) {
	if o.Step != nil {
		o.Step(stage, done, total)
	}
}

// TellLive passes a pass at work on.
func (o Observer) TellLive(pass string, p func() Partial) {
	if o.Live != nil {
		o.Live(pass, p())
	}
}

// TellNote passes a line for people on; its format may name options (errs.Text).
func (o Observer) TellNote(format string, args ...any) {
	if o.Note != nil {
		o.Note(errs.Textf(format, args...))
	}
}

// Partial holds what an unfinished epoch has gathered; it travels in checkpoints, so that a
// resumed epoch reports what an undisturbed one would. Counts are those of trained batches.
type Partial struct {
	Seconds float64 `json:"seconds"`
	Waited  float64 `json:"waited"`
	LossSum float64 `json:"loss_sum"` // sum over batches of mean loss * labelled seeds, or * mass
	// Mass is the number that the losses are means by; 0: Counted.
	Mass    float64 `json:"mass,omitempty"`
	Correct int64   `json:"correct"`
	Counted int64   `json:"counted"`
	Batches int     `json:"batches"`
	Seeds   int64   `json:"seeds"`
	RowsGPU int64   `json:"rows_gpu"`
	RowsCPU int64   `json:"rows_cpu"`
	RowsSSD int64   `json:"rows_ssd"`
	// RowsChunk, of RowsSSD, are from chunks of packed rows.
	RowsChunk int64        `json:"rows_chunk,omitempty"`
	BytesSSD  int64        `json:"bytes_ssd"`
	Commands  int64        `json:"commands"`
	Retries   int64        `json:"retries"`
	Timeouts  int64        `json:"timeouts"`
	Stages    StageSeconds `json:"stages"`
	// Of a dynamic tier, in lines, and of the accumulator: sets of merged reads, and the batches in
	// them.
	Inserted int64 `json:"inserted,omitempty"`
	Evicted  int64 `json:"evicted,omitempty"`
	Bypassed int64 `json:"bypassed,omitempty"`
	Groups   int   `json:"groups,omitempty"`
	Grouped  int   `json:"grouped,omitempty"`
	// Of a topology on storage.
	TopologyReads *graph.StorageStats `json:"topology_reads,omitempty"`
	StepFigures
}

// StepFigures are those of the optimiser's steps.
type StepFigures struct {
	Steps   int     `json:"steps,omitempty"`
	LR      float64 `json:"lr,omitempty"` // of the last
	NormSum float64 `json:"norm_sum,omitempty"`
	NormMax float64 `json:"norm_max,omitempty"`
	Clipped int     `json:"clipped,omitempty"`
}

// Add counts a step by its learning rate and the norm of its gradient, of which limit is allowed;
// 0: any.
func (f *StepFigures) Add(lr, norm, limit float64) {
	f.Steps++
	f.LR, f.NormSum, f.NormMax = lr, f.NormSum+norm, max(f.NormMax, norm)
	if limit > 0 && norm > limit {
		f.Clipped++
	}
}

// GradNorm is the mean norm of the gradients; nil: there was no step.
func (f *StepFigures) GradNorm() *float64 {
	if f.Steps == 0 {
		return nil
	}
	mean := f.NormSum / float64(f.Steps)
	return &mean
}

// coverSeconds gives the seconds that no stage accounts for to Between, and returns the overlap of
// the stages.
func (r *EpochResult) coverSeconds() float64 {
	s := &r.StageSeconds
	if left := r.Seconds - s.Sum(); left >= 0 {
		s.Between += left
		return 0
	}
	return 1 - r.Seconds/s.Sum()
}

// Loss is the mean loss so far; some seed must have a target.
func (p *Partial) Loss() float64 {
	if p.Mass != 0 {
		return p.LossSum / p.Mass
	}
	return p.LossSum / float64(p.Counted)
}

// Result turns the sums into an epoch's line. epoch counts from 0.
func (p Partial) Result(epoch int, rowBytes int64) EpochResult {
	r := EpochResult{
		Epoch: epoch + 1, Seconds: p.Seconds, Batches: p.Batches, Seeds: p.Seeds,
		RowsGPU: p.RowsGPU, RowsCPU: p.RowsCPU, RowsSSD: p.RowsSSD,
		RowsChunk: p.RowsChunk,
		BytesSSD:  p.BytesSSD, SSDCommands: p.Commands, Retries: p.Retries, Timeouts: p.Timeouts,
		StageSeconds: p.Stages, TopologyReads: p.TopologyReads,
		LR: p.LR, GradNorm: p.GradNorm(), GradNormMax: p.NormMax, Clipped: p.Clipped,
	}
	r.LinesInserted, r.LinesEvicted, r.LinesBypassed, r.ReadGroups = p.Inserted, p.Evicted,
		p.Bypassed, p.Groups
	if p.Groups > 0 {
		r.GroupBatches = float64(p.Grouped) / float64(p.Groups)
	}
	if hits := r.RowsGPU + r.RowsCPU; hits+r.RowsSSD > 0 {
		r.HitRatio = float64(hits) / float64(hits+r.RowsSSD)
	}
	if p.Counted > 0 {
		r.Loss = p.Loss()
		accuracy := float64(p.Correct) / float64(p.Counted)
		r.TrainAcc = &accuracy
	}
	if p.RowsSSD > 0 {
		r.ReadAmplification = float64(p.BytesSSD) / float64(p.RowsSSD*rowBytes)
	}
	if p.Seconds > 0 {
		r.Stall = p.Waited / p.Seconds
		r.SeedsPerSecond = float64(p.Seeds) / p.Seconds
		r.SSDBytesPerSecond = float64(p.BytesSSD) / p.Seconds
		r.SSDIOPS = float64(p.Commands) / p.Seconds
	}
	r.Overlap = r.coverSeconds()
	return r
}
