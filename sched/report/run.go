package report

import (
	"fmt"
	"strings"

	"helios/dataset"
	"helios/gpuio"
	"helios/graph"
)

// HotnessInfo says what placed the static tiers.
type HotnessInfo struct {
	By string `json:"by"` // one of Hotnesses, or the path of the user's list
	// Epochs of sampling that were counted.
	Epochs int `json:"epochs,omitempty"`
	// File tells where the scores were found (Reused) or are kept now.
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

// ChecksInfo says what a run holds against checksums as it reads it, and what it does not and why.
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

// RunInfo says how a run got at its rows and computed.
type RunInfo struct {
	MemoryRung string `json:"memory_rung"`
	// MemoryRungTried tells why no better rung was taken, the best first.
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
	Superbatch *SuperbatchInfo `json:"superbatch,omitempty"`
	// Packed is absent where mini-batches are not laid out beforehand.
	Packed *PackedInfo `json:"packed,omitempty"`
	// Mega is absent where no mega-batches train.
	Mega *MegaInfo `json:"megabatches,omitempty"`
	// Accumulator is absent where reads are not merged.
	Accumulator *AccumulatorInfo `json:"accumulator,omitempty"`
	// Shards is how many mini-batches a step of the optimiser covers.
	Shards int `json:"shards"`
	// Replicas is how many devices trained; the others of them are named.
	Replicas    int      `json:"replicas"`
	MoreDevices []string `json:"more_devices,omitempty"`
	// Reduce is who added their gradients: "tree", to the bit as one device does, or a library,
	// which does not; absent with one replica.
	Reduce  string `json:"reduce,omitempty"`
	Sampler string `json:"sampler"`
	// BatchDependency is how many batches share draws; 1: each draws for itself.
	BatchDependency int `json:"batch_dependency"`
	// SampleEpochs is how many epochs' samples training goes round, of which Refresh are replaced
	// after every RefreshEvery epochs; absent where each epoch has its own.
	SampleEpochs int    `json:"sample_epochs,omitempty"`
	Refresh      int    `json:"refresh,omitempty"`
	RefreshEvery int    `json:"refresh_every,omitempty"`
	Topology     string `json:"topology"`
	// TopologyStorage says how a topology on storage is held; absent for one in memory.
	TopologyStorage *graph.StorageInfo `json:"topology_storage,omitempty"`
	// Checks says what is held against checksums as it is read; absent in a modelled run.
	Checks *ChecksInfo `json:"checks,omitempty"`
	// SSDNotes are losses on the SSDs that the run did without, and SSDs that it left out.
	SSDNotes []string `json:"ssd_notes,omitempty"`
	// Seal says what was checked of the dataset's files; absent in a modelled run.
	Seal *dataset.SealInfo `json:"seal,omitempty"`
	// Hotness holds what placed the static tiers; absent where nothing had to.
	Hotness *HotnessInfo `json:"hotness,omitempty"`
	// Tuned holds what the tuner measured and chose; absent without it.
	Tuned *TuneResult `json:"tuned,omitempty"`
}

// SuperbatchInfo tells how mini-batches were sampled ahead of their training. Seconds are sums over
// all superbatches, Bytes those of the largest.
type SuperbatchInfo struct {
	Batches        int     `json:"batches"` // of one
	Superbatches   int     `json:"superbatches"`
	SampleSeconds  float64 `json:"sample_seconds"`
	InspectSeconds float64 `json:"inspect_seconds"` // until it is known when each row is accessed
	ChangeSeconds  float64 `json:"change_seconds"`  // in which, then, the cache's changes are found
	FillSeconds    float64 `json:"fill_seconds"`    // in which the first rows are read
	FillBytes      int64   `json:"fill_bytes"`      // read for them, over all superbatches
	FileBytes      int64   `json:"file_bytes"`
	InspectBytes   int64   `json:"inspect_bytes"` // of memory
	Accesses       int64   `json:"accesses"`
	RowsLoaded     int64   `json:"rows_loaded"` // before their superbatch
	// SharedBytes is memory that the neighbour cache has while a superbatch is sampled and the CPU
	// tier while one trains; 0: each has its own. ListSeconds and ListBytes are what it took to
	// read the neighbour lists again, over all superbatches.
	SharedBytes int64   `json:"shared_bytes"`
	ListSeconds float64 `json:"list_seconds"`
	ListBytes   int64   `json:"list_bytes"`
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
	// Flags hold what the run goes on with, where that differs from what it was told.
	Flags string `json:"flags"`
	// Skipped tells why less was measured than could have been; empty: nothing was left out.
	Skipped string `json:"skipped,omitempty"`
}
