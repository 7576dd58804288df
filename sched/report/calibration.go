package report

import (
	"fmt"
	"math"
	"time"
)

// AccumulatorInfo holds what the accumulator aims at, as measured before the first batch, and what
// bounds it.
type AccumulatorInfo struct {
	Calibration
	// Capped gives the reason that Target is below the formula's; empty: it is not.
	Capped     string `json:"capped,omitempty"`
	MaxBatches int    `json:"max_batches"` // of a group
}

// String is a line for people.
func (a AccumulatorInfo) String() string {
	s := fmt.Sprintf(
		"accumulator: %d reads at a time for %.0f%% of %.0f reads/s an SSD (%v until reads are out, %v after the last)",
		a.Target, a.Share*100, a.IOPS, seconds(a.InitiateSeconds), seconds(a.TerminateSeconds))
	if a.Capped != "" {
		s += "; " + a.Capped
	}
	return s
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(100 * time.Nanosecond)
}

// Calibration holds what the accumulator aims at and what it was found from.
type Calibration struct {
	Share float64 `json:"share"` // of the SSDs' peak rate
	// IOPS is the peak rate of one SSD with all of them at work.
	IOPS float64 `json:"iops_per_ssd"`
	// OverheadSeconds holds what a launch of reads takes beside what it reads at that rate (T_i +
	// T_t of GIDS, and the SSDs' latency), of which so much until the first reads are with the SSDs
	// and so much from the last completion on.
	OverheadSeconds  float64 `json:"overhead_seconds"`
	InitiateSeconds  float64 `json:"initiate_seconds"`
	TerminateSeconds float64 `json:"terminate_seconds"`
	// Target is the number of reads that have to overlap: N = n_ssd·a·IOPS·(T_i+T_t)/(1−a) (GIDS,
	// section
	// 3.2).
	Target int64 `json:"target"`
}

// Calibrate finds the accumulator's target from the seconds that a shorter and a longer set of
// reads took: what the longer one took more is the rate, what the shorter one took besides is the
// overhead. With the overhead so found, a set of Target reads takes Target/(a·rate), which is what
// the formula says. A target of 0: the times give no rate.
func Calibrate(share float64, few, fewSeconds, many, manySeconds, ssds float64) Calibration {
	c := Calibration{Share: share}
	if many <= few || manySeconds <= fewSeconds {
		return c
	}
	rate := (many - few) / (manySeconds - fewSeconds)
	c.IOPS = rate / ssds
	c.OverheadSeconds = max(fewSeconds-few/rate, 0)
	c.Target = c.ReadsToOverlap(ssds)
	return c
}

// ReadsToOverlap is the formula.
func (c Calibration) ReadsToOverlap(ssds float64) int64 {
	n := ssds * c.Share * c.IOPS * c.OverheadSeconds / (1 - c.Share)
	return max(int64(math.Ceil(min(n, math.MaxInt32))), 1)
}
