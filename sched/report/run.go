package report

import (
	"fmt"
	"strings"

	"helios/dataset"
	"helios/gpuio"
	"helios/graph"
	"helios/sched/plan"
	diskgnn "helios/sched/tiers/diskgnn/spec"
	ginex "helios/sched/tiers/ginex/spec"
	hier "helios/sched/tiers/hier/spec"
)

// HotnessInfo describes the hotness that placed the static tiers.
type HotnessInfo struct {
	By string `json:"by"` // one of Hotnesses, or the path of the user's list
	// Epochs of sampling that were counted.
	Epochs int `json:"epochs,omitempty"`
	// File has the scores: they were found there (Reused) or are kept there now.
	File   string `json:"file,omitempty"`
	Reused bool   `json:"reused"`
	// Seconds holds what finding them took, whenever that was.
	Seconds float64 `json:"seconds"`
}

func (i HotnessInfo) String() string {
	s := i.By
	switch {
	case i.Epochs == 1:
		s += " of 1 epoch"
	case i.Epochs > 1:
		s += fmt.Sprintf(" of %d epochs", i.Epochs)
	}
	switch {
	case i.Reused:
		s += ", reused from " + i.File
	case i.File != "":
		s += ", kept in " + i.File
	}
	return s
}

// ChecksInfo lists the data that a run compares with checksums, and the other data with the reason.
type ChecksInfo struct {
	Checked    []string `json:"checked"`
	NotChecked []string `json:"not_checked,omitempty"`
}

func (i ChecksInfo) String() string {
	var all []string
	if len(i.Checked) > 0 {
		all = append(all, "checked: "+strings.Join(i.Checked, "; "))
	}
	if len(i.NotChecked) > 0 {
		all = append(all, "not checked: "+strings.Join(i.NotChecked, "; "))
	}
	return strings.Join(all, ". ")
}

// RunInfo describes a run's data path and its arithmetic.
type RunInfo struct {
	MemoryRung string `json:"memory_rung"`
	// MemoryRungTried has the better rungs and the reason that each was not taken, the best first.
	MemoryRungTried []gpuio.RungTried `json:"memory_rung_tried,omitempty"`
	Precision       string            `json:"precision"` // of products
	// the library that computed them; "off": our kernels
	BLAS string `json:"blas"`
	// GPUCacheShrunkBytes holds what the GPU tier gave back because the device's memory ran out.
	GPUCacheShrunkBytes int64 `json:"gpu_cache_shrunk_bytes"`
	// Policy of the GPU tier; with another than "static" its lines are CacheLineBytes long,
	// PolicyBytes is what the policy keeps of them in the CPU's memory, and Window how many coming
	// batches' lines stay.
	Policy         string `json:"policy"`
	CacheLineBytes int64  `json:"cache_line_bytes,omitempty"`
	PolicyBytes    int64  `json:"policy_bytes,omitempty"`
	Window         int    `json:"window"`
	// Superbatch is absent where mini-batches are sampled one by one.
	Superbatch *ginex.SuperbatchInfo `json:"superbatch,omitempty"`
	// Packed is absent where mini-batches are not laid out beforehand.
	Packed *diskgnn.PackedInfo `json:"packed,omitempty"`
	// Mega is absent where no mega-batches train.
	Mega *hier.MegaInfo `json:"megabatches,omitempty"`
	// Accumulator is absent where reads are not merged.
	Accumulator *AccumulatorInfo `json:"accumulator,omitempty"`
	// Shards is the number of mini-batches that a step of the optimiser covers.
	Shards int `json:"shards"`
	// Replicas is the number of devices that trained; MoreDevices names all but the first.
	Replicas    int      `json:"replicas"`
	MoreDevices []string `json:"more_devices,omitempty"`
	// Reduce added their gradients: "tree", to the bit as one device does, or a library,
	// which does not; absent with one replica.
	Reduce  string `json:"reduce,omitempty"`
	Sampler string `json:"sampler"`
	// BatchDependency is the number of batches that share draws; 1: each draws for itself.
	BatchDependency int `json:"batch_dependency"`
	// SampleEpochs is the number of epochs whose samples training goes round; Refresh of them are
	// replaced after every RefreshEvery epochs; absent where each epoch has its own.
	SampleEpochs int    `json:"sample_epochs,omitempty"`
	Refresh      int    `json:"refresh,omitempty"`
	RefreshEvery int    `json:"refresh_every,omitempty"`
	Topology     string `json:"topology"`
	// TopologyStorage describes a topology on storage; absent for one in memory.
	TopologyStorage *graph.StorageInfo `json:"topology_storage,omitempty"`
	// Checks lists the data that is compared with checksums; absent in a modelled run.
	Checks *ChecksInfo `json:"checks,omitempty"`
	// SSDNotes are losses on the SSDs that the run did without, SSDs that it left out, and how many
	// I/O blocks run where these are fewer than were asked for.
	SSDNotes []string `json:"ssd_notes,omitempty"`
	// Seal describes the checks of the dataset's files; absent in a modelled run.
	Seal *dataset.SealInfo `json:"seal,omitempty"`
	// Hotness holds what placed the static tiers; absent where nothing had to.
	Hotness *HotnessInfo `json:"hotness,omitempty"`
	// Tuned holds what the tuner measured and chose; absent without it.
	Tuned *TuneResult `json:"tuned,omitempty"`
	// Choice has the mode that the machine chose; absent where one was given.
	Choice *plan.Choice `json:"choice,omitempty"`
}

// SystemRows are lines for people on what the run's system has done.
func (r *RunInfo) SystemRows() (rows [][]string) {
	for _, s := range []interface{ Rows() [][]string }{r.Superbatch, r.Packed, r.Mega} {
		rows = append(rows, s.Rows()...)
	}
	return rows
}

// TuneTrial is one value of a setting as it was measured.
type TuneTrial struct {
	Setting string `json:"setting"` // a flag of train
	Value   string `json:"value"`
	Batches int    `json:"batches"`
	// Seconds of one mini-batch, the best of the rounds.
	Seconds float64 `json:"seconds_per_batch"`
	Before  bool    `json:"before,omitempty"` // the value before
	Chosen  bool    `json:"chosen,omitempty"`
}

// TuneResult holds what the tuner did.
type TuneResult struct {
	Level   string      `json:"level"` // quick or full
	Batches int         `json:"batches"`
	Seconds float64     `json:"seconds"`
	Trials  []TuneTrial `json:"trials"`
	// Flags are the settings that the tuner changed.
	Flags string `json:"flags"`
	// Skipped gives the reason that less was measured than possible; empty: nothing was left out.
	Skipped string `json:"skipped,omitempty"`
}

// PrepareResult is the result of preparing mini-batches or parts for training.
type PrepareResult struct {
	Mode                string         `json:"mode"`
	Dataset             string         `json:"dataset"`
	Seed                uint64         `json:"seed"`
	Device              string         `json:"device"`
	*diskgnn.PackedInfo                // of mini-batches; nil: parts were prepared
	Mega                *hier.MegaInfo `json:"megabatches,omitempty"`
}
