package spec

import (
	"fmt"

	"helios/cache/packed"
	"helios/internal/units"
)

// PackedInfo describes the mini-batches that were laid out before training. Counts and bytes are of
// all packs that the run has used; seconds and what was written are of preparing them, whenever
// that was.
type PackedInfo struct {
	Dir     string `json:"dir"`
	PagesOn string `json:"pages_on"` // "folder", or "ssds": beside the features
	// Reused: all was there before the run.
	Reused       bool  `json:"reused"`
	SampleEpochs int   `json:"sample_epochs"` // that are laid out
	Batches      int   `json:"batches"`
	Segment      int   `json:"segment"` // mini-batches that share a disk cache
	Budget       int64 `json:"disk_budget_bytes"`
	PageBytes    int64 `json:"page_bytes"`
	RowsPerPage  int64 `json:"rows_per_page"`

	// Rows of the levels: those in memory, those in disk caches, those in chunks; each disk cache
	// and chunk counts its own copy.
	RowsMemory    int64 `json:"rows_memory"`
	RowsDiskCache int64 `json:"rows_disk_cache"`
	RowsChunks    int64 `json:"rows_chunks"`
	// Accesses of the sample epochs by level.
	AccessesMemory    int64 `json:"accesses_memory"`
	AccessesDiskCache int64 `json:"accesses_disk_cache"`
	AccessesChunks    int64 `json:"accesses_chunks"`

	PagesBytes   int64 `json:"pages_bytes"`
	SamplesBytes int64 `json:"samples_bytes"`
	PlanBytes    int64 `json:"plan_bytes"`
	DiskBytes    int64 `json:"disk_bytes"` // of all three
	// Amplification is the bytes of the pages that the mini-batches read, once each, over those of
	// the rows that they need of them. RequestBytes is the mean length of what lies in one piece.
	Amplification float64 `json:"read_amplification"`
	RequestBytes  float64 `json:"mean_run_bytes"`

	// Preparing, by phase.
	Seconds       float64 `json:"prepare_seconds"`
	SampleSeconds float64 `json:"sample_seconds"`
	PlanSeconds   float64 `json:"plan_seconds"`
	PackSeconds   float64 `json:"pack_seconds"`
	BytesRead     int64   `json:"prepare_bytes_read"` // of features
	BytesWritten  int64   `json:"prepare_bytes_written"`

	sum packed.Stats
}

// Add counts a pack of so many sample epochs, whose plan takes planBytes.
func (i *PackedInfo) Add(s packed.Stats, h packed.Shape, epochs int, planBytes int64) {
	addStats(&i.sum, s)
	i.SampleEpochs += epochs
	i.Segment, i.PageBytes, i.RowsPerPage = int(s.Segment), h.PageBytes, h.RowsPerPage
	t := &i.sum
	i.Batches = int(t.Batches)
	i.RowsMemory, i.RowsDiskCache, i.RowsChunks = s.HotRows, t.CacheRows, t.ChunkRows
	i.AccessesMemory, i.AccessesDiskCache, i.AccessesChunks = t.HotAccesses, t.CacheAccesses,
		t.ChunkAccesses
	i.PlanBytes += planBytes
	i.PagesBytes = t.Pages * h.PageBytes
	i.DiskBytes = i.PagesBytes + i.SamplesBytes + i.PlanBytes
	i.Amplification, i.RequestBytes = t.Amplification(h), t.RunBytes(h)
}

func addStats(t *packed.Stats, s packed.Stats) {
	t.Batches += s.Batches
	t.CacheRows += s.CacheRows
	t.ChunkRows += s.ChunkRows
	t.HotAccesses += s.HotAccesses
	t.CacheAccesses += s.CacheAccesses
	t.ChunkAccesses += s.ChunkAccesses
	t.Pages += s.Pages
	t.ChunkPages += s.ChunkPages
	t.CacheReadPages += s.CacheReadPages
	t.CacheRuns += s.CacheRuns
	t.ChunkRuns += s.ChunkRuns
}

// Rows returns lines for people: what was laid out before training, and its cost.
func (p *PackedInfo) Rows() [][]string {
	if p == nil {
		return nil
	}
	when := "prepared"
	if p.Reused {
		when = "reused; prepared once"
	}
	where := ""
	if p.Dir != "" {
		where = " in " + p.Dir
	}
	pages := ""
	if p.PagesOn == "ssds" {
		pages = " (" + units.FormatBytes(p.PagesBytes) + " of them pages on the SSDs)"
	}
	return [][]string{
		{"packed", fmt.Sprintf("%d mini-batches of %d sample epochs%s, segments of %d; %s in %.3g s (sampling %.3g s, planning %.3g s, packing %.3g s)",
			p.Batches, p.SampleEpochs, where, p.Segment, when, p.Seconds, p.SampleSeconds,
			p.PlanSeconds, p.PackSeconds)},
		{"packed rows", fmt.Sprintf("%s stay in memory, %s in disk caches, %s in chunks; %s on disk%s, read at %.3f times what is needed, %s at a time",
			units.FormatCount(float64(p.RowsMemory)), units.FormatCount(float64(p.RowsDiskCache)),
			units.FormatCount(float64(p.RowsChunks)), units.FormatBytes(p.DiskBytes), pages,
			p.Amplification, units.FormatBytes(int64(p.RequestBytes)))},
	}
}
