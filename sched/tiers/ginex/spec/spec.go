// Package spec declares the settings of superbatches, and their figures in results.
package spec

import (
	"fmt"

	"helios/internal/units"
)

// SuperbatchSettings set up tiers that know the mini-batches to come.
type SuperbatchSettings struct {
	// Superbatch is the number of mini-batches that policy belady knows at once; 0: as many as
	// memory and disk have room for. SuperbatchOverlap: the next ones are sampled while those
	// train.
	Superbatch        int  `option:"superbatch" hint:"give a number of mini-batches from 1 on, or auto" group:"Tiers" named:"auto=0" positive:"yes" range:"1.." shown:"auto" arg:"N" usage:"mini-batches N that {policy} belady samples and knows at once; auto: what memory and disk have room for"`
	SuperbatchOverlap bool `option:"superbatch-overlap" group:"Tiers" use:"setting" usage:"sample the next superbatch of an epoch, too, while one trains"`
	// SuperbatchDir is the folder on whose file system their samples are; empty: the dataset's.
	// SuperbatchDisk bounds their bytes; 0: a quarter of the free space.
	SuperbatchDir  string `option:"superbatch-dir" group:"Tiers" use:"aside" shown:"the dataset's folder" arg:"FOLDER" usage:"FOLDER on whose file system the samples of superbatches are, in files without a name"`
	SuperbatchDisk int64  `option:"superbatch-disk" hint:"give more, or leave it out" group:"Tiers" size:"" positive:"yes" range:"0.." shown:"a quarter of what is free" arg:"BYTES" usage:"most BYTES that they take there"`
	// Superbatches has mini-batches sampled a superbatch at a time under policy static, too: the
	// tiers find the rows that they hold and change none. By mode.
	Superbatches bool
}

// SuperbatchInfo reports how mini-batches were sampled ahead of their training. Seconds are sums
// over all superbatches, Bytes those of the largest.
type SuperbatchInfo struct {
	Batches        int     `json:"batches"` // of one
	Superbatches   int     `json:"superbatches"`
	SampleSeconds  float64 `json:"sample_seconds"`
	InspectSeconds float64 `json:"inspect_seconds"` // until it is known when each row is accessed
	ChangeSeconds  float64 `json:"change_seconds"`  // in which, then, the cache's changes are found
	FillSeconds    float64 `json:"fill_seconds"`    // in which a static cache's rows are read
	FillBytes      int64   `json:"fill_bytes"`      // read for them, over all superbatches
	FileBytes      int64   `json:"file_bytes"`
	InspectBytes   int64   `json:"inspect_bytes"` // of memory
	Accesses       int64   `json:"accesses"`
	RowsLoaded     int64   `json:"rows_loaded"` // before their superbatch
	// SharedBytes of the CPU tier have neighbour lists while a superbatch is sampled.
	// ListSeconds and ListBytes are the cost of reading the lists, over all superbatches.
	SharedBytes int64   `json:"shared_bytes"`
	ListSeconds float64 `json:"list_seconds"`
	ListBytes   int64   `json:"list_bytes"`
}

// Rows are lines for people: the times of sampling ahead.
func (s *SuperbatchInfo) Rows() [][]string {
	if s == nil {
		return nil
	}
	text := fmt.Sprintf(
		"%d of up to %d mini-batches: sampled in %.3g s, inspected in %.3g s, %.3g s more beside training",
		s.Superbatches, s.Batches, s.SampleSeconds, s.InspectSeconds, s.ChangeSeconds)
	if s.FillSeconds > 0 {
		text += fmt.Sprintf(", first rows read in %.3g s", s.FillSeconds)
	}
	text += fmt.Sprintf("; files of %s, inspection in %s", units.FormatBytes(s.FileBytes),
		units.FormatBytes(s.InspectBytes))
	return [][]string{{"superbatches", text}}
}
