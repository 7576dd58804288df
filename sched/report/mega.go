package report

import "helios/gpuio"

// MegaInfo tells of the parts that a run trained on, a few at a time. Bytes, requests and seconds
// are of this run's loads of mega-batches.
//
// Large: a field for each figure, as its JSON has them.
type MegaInfo struct {
	Dir     string `json:"dir"`
	PagesOn string `json:"pages_on"` // "folder", or "ssds": beside the features
	// Reused: the parts were there before the run.
	Reused bool   `json:"reused"`
	Key    string `json:"key"` // of what the parts depend on
	Parts  int    `json:"parts"`
	Loaded int    `json:"parts_in_memory"` // of a mega-batch
	Order  string `json:"part_order"`
	// Passes over each mega-batch before the next, and whether the run has chosen them; 0: not yet.
	Passes      int   `json:"passes"`
	PassesAuto  bool  `json:"passes_auto"`
	StaticRows  int64 `json:"static_rows"`
	StaticOnGPU bool  `json:"static_on_gpu"`
	PageBytes   int64 `json:"page_bytes"`
	DiskBytes   int64 `json:"disk_bytes"`
	// CPUBytes is what mega-batches may take of the CPU's memory, by their largest parts, and
	// Budget what they were allowed.
	CPUBytes int64 `json:"cpu_bytes"`
	Budget   int64 `json:"cpu_budget_bytes"`

	MegaBatches  int   `json:"megabatches"` // that were loaded
	Ahead        int   `json:"megabatches_ahead"`
	FeatureBytes int64 `json:"feature_bytes"` // that were read for them, by section
	EdgeBytes    int64 `json:"edge_bytes"`
	StaticBytes  int64 `json:"static_bytes"`
	// EpochBytes is what an epoch reads by the formula: the rows and edges of every part that it
	// loads, once, without the padding of pages. Parts that stay are not read again; of the others
	// it is the mean.
	EpochBytes   int64   `json:"epoch_bytes"`
	Requests     int64   `json:"requests"`
	RequestBytes float64 `json:"mean_request_bytes"`
	LoadSeconds  float64 `json:"load_seconds"` // sum over the mega-batches
	// InduceSeconds is the part of them in which the topology was induced.
	InduceSeconds float64 `json:"induce_seconds"`
	// Waits is how often training had to wait for a mega-batch, WaitSeconds for how long in all.
	Waits       int     `json:"waits"`
	WaitSeconds float64 `json:"wait_seconds"`

	LayoutSeconds float64 `json:"layout_seconds"` // of making the parts; 0: they were there

	bytes int64
}

// AddReads counts reads of pages.
func (i *MegaInfo) AddReads(s gpuio.ReadStats) {
	i.Requests += s.Commands
	i.bytes += s.Bytes
}

// Settle works out what follows from the counts.
func (i *MegaInfo) Settle() {
	if i.Requests > 0 {
		i.RequestBytes = float64(i.bytes) / float64(i.Requests)
	}
}

// AddReadStats adds up what reads took.
func AddReadStats(a, b gpuio.ReadStats) gpuio.ReadStats {
	a.Rows += b.Rows
	a.Bytes += b.Bytes
	a.Commands += b.Commands
	a.Retries += b.Retries
	a.Timeouts += b.Timeouts
	a.Submit += b.Submit
	a.Complete += b.Complete
	return a
}
