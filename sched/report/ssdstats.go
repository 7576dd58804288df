package report

import (
	"slices"
	"time"

	"helios/gpuio"
)

// SSDResult holds what one SSD did in a run, the filling of the tiers included. The cpu and mmap
// stacks read files: they count reads where the others count commands, and have no queues.
type SSDResult struct {
	Name string `json:"name"`
	// the model that a software SSD played: its times, and so the run's, are modelled
	Model     string `json:"ssd_model,omitempty"`
	Commands  int64  `json:"commands"`
	Bytes     int64  `json:"bytes"`
	Errors    int64  `json:"errors"`    // completions with an error status
	Timeouts  int64  `json:"timeouts"`  // commands past their deadline
	Retries   int64  `json:"retries"`   // commands issued again
	Aborts    int64  `json:"aborts"`    // Abort commands sent
	Recreated int64  `json:"recreated"` // queue pairs deleted and created again
	Resets    int64  `json:"resets"`    // of the controller
	Foreign   int64  `json:"foreign"`   // completions that named no command in flight
	GivenUp   string `json:"given_up"`  // why the SSD was not used any more; "": it was
}

// Troubled reports whether reads of the SSD failed, were tried again or took too long.
func (s SSDResult) Troubled() bool {
	return s.Errors+s.Timeouts+s.Retries+s.Aborts+s.Recreated+s.Resets+s.Foreign > 0 ||
		s.GivenUp != ""
}

// Latency has the times of commands, from their submission to their completion, in microseconds:
// quantiles, each at most 6.25 % above the truth.
type Latency struct {
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

// NewLatency returns the quantiles of h; nil where it counted nothing.
func NewLatency(h *gpuio.Histogram) *Latency {
	if h.Count() == 0 {
		return nil
	}
	us := func(q float64) float64 { return float64(h.Quantile(q)) / float64(time.Microsecond) }
	return &Latency{P50: us(0.5), P90: us(0.9), P99: us(0.99), P999: us(0.999), Max: us(1)}
}

// Balance is the commands of the busiest SSD over the mean of all: 1 where they share evenly, the
// number of SSDs where one does it all; 0 where none had any.
func Balance(ssds []SSDResult) float64 {
	var largest, sum int64
	for _, s := range ssds {
		largest, sum = max(largest, s.Commands), sum+s.Commands
	}
	if sum == 0 {
		return 0
	}
	return float64(largest) * float64(len(ssds)) / float64(sum)
}

// IOResult is a run's reads as a whole, the filling of the tiers included.
type IOResult struct {
	SSDs      []SSDResult `json:"ssds"`
	Balance   float64     `json:"ssd_balance"`    // commands of the busiest SSD over the mean
	Coalesced int64       `json:"rows_coalesced"` // rows that shared a command with another
	// with --check-reads: rows whose checksum was wrong, each time it was
	Mismatch int64    `json:"rows_mismatched"`
	Latency  *Latency `json:"latency_us"` // null where the stack does not know it
	// NotInPlace gives the reason that rows for the GPU's memory took a copy although the SSDs
	// reach it; empty: none did, or they don't.
	NotInPlace string `json:"rows_not_in_place,omitempty"`
}

// NewIOResult returns what a reader did, SSD by SSD.
func NewIOResult(st gpuio.Stats) IOResult {
	r := IOResult{SSDs: []SSDResult{}, Coalesced: st.Coalesced, Mismatch: st.Mismatch,
		Latency: NewLatency(&st.Latency), NotInPlace: st.NotInPlace}
	for _, s := range st.PerSSD {
		r.SSDs = append(r.SSDs, SSDResult{
			Name: s.Name, Commands: s.Commands, Bytes: s.Bytes, Errors: s.Errors,
			Timeouts: s.Timeouts, Retries: s.Retries,
			Aborts: s.Aborts, Recreated: s.Recreated, Resets: s.Resets, Foreign: s.Foreign,
			GivenUp: s.GivenUp,
		})
	}
	r.Balance = Balance(r.SSDs)
	return r
}

// AddStats returns what two readers did, one after the other, as far as a result tells it. SSDs of
// the same name are the same.
func AddStats(a, b gpuio.Stats) gpuio.Stats {
	if len(a.PerSSD) == 0 {
		return b
	}
	b.Coalesced += a.Coalesced
	b.Mismatch += a.Mismatch
	b.Latency.Merge(&a.Latency)
	if b.NotInPlace == "" {
		b.NotInPlace = a.NotInPlace
	}
	b.PerSSD = gpuio.MergeSSDs(slices.Concat(a.PerSSD, b.PerSSD))
	return b
}
