package spec

import (
	"fmt"

	"helios/gpuio"
	"helios/internal/units"
)

// MegaInfo describes the parts that a run trained on, a few at a time. Bytes, requests and seconds
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
	// CPUBytes bounds the CPU memory of mega-batches, by their largest parts; Budget is the memory
	// that they were allowed.
	CPUBytes int64 `json:"cpu_bytes"`
	Budget   int64 `json:"cpu_budget_bytes"`

	MegaBatches  int   `json:"megabatches"` // that were loaded
	Ahead        int   `json:"megabatches_ahead"`
	FeatureBytes int64 `json:"feature_bytes"` // that were read for them, by section
	EdgeBytes    int64 `json:"edge_bytes"`
	StaticBytes  int64 `json:"static_bytes"`
	// EpochBytes are the bytes that an epoch reads by the formula: the rows and edges of every part
	// that it loads, once, without the padding of pages. Parts that stay are not read again; of the
	// others it is the mean.
	EpochBytes   int64   `json:"epoch_bytes"`
	Requests     int64   `json:"requests"`
	RequestBytes float64 `json:"mean_request_bytes"`
	LoadSeconds  float64 `json:"load_seconds"` // sum over the mega-batches
	// InduceSeconds is the part of them in which the topology was induced.
	InduceSeconds float64 `json:"induce_seconds"`
	// Waits counts the waits of training for a mega-batch; WaitSeconds is their sum.
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

// PartsRows are lines for people: what parts there are on disk.
func (m *MegaInfo) PartsRows() [][]string {
	when := "reused"
	if !m.Reused {
		when = fmt.Sprintf("made in %.3g s", m.LayoutSeconds)
	}
	in := "in " + m.Dir
	if m.Dir == "" {
		in, when = "on the SSDs", "taken to be there"
	}
	return [][]string{{"parts", fmt.Sprintf("%d %s, %s: %s in pages of %s; up to %d at a time have room in %s",
		m.Parts, in, when, units.FormatBytes(m.DiskBytes), units.FormatBytes(m.PageBytes),
		m.Loaded, units.FormatBytes(m.Budget))}}
}

// Rows returns lines for people: the mega-batches of a run, and the cost of loading them.
func (m *MegaInfo) Rows() [][]string {
	if m == nil {
		return nil
	}
	passes := "1 pass"
	switch {
	case m.Passes == 0:
		passes = "passes not chosen yet"
	case m.Passes > 1:
		passes = fmt.Sprintf("%d passes", m.Passes)
	}
	if m.PassesAuto && m.Passes > 0 {
		passes += " (chosen)"
	}
	static := "no static nodes"
	if m.StaticRows > 0 {
		static = units.FormatCount(float64(m.StaticRows)) + " static nodes"
		if m.StaticOnGPU {
			static += " (rows in the GPU tier)"
		}
	}
	rows := append(m.PartsRows(), []string{"in memory", fmt.Sprintf("%d of %d parts, %s, %s over each",
		m.Loaded, m.Parts, static, passes)})
	if m.MegaBatches > 0 {
		rows = append(rows, []string{"mega-batches", fmt.Sprintf(
			"%d loaded in %.3g s, %.3g s of them to induce topologies (%d while others trained; training waited %d times, %.3g s): %s of rows, %s of edges, %s of static nodes, %s a request",
			m.MegaBatches, m.LoadSeconds, m.InduceSeconds, m.Ahead, m.Waits, m.WaitSeconds,
			units.FormatBytes(m.FeatureBytes), units.FormatBytes(m.EdgeBytes),
			units.FormatBytes(m.StaticBytes), units.FormatBytes(int64(m.RequestBytes)))})
	}
	return rows
}
