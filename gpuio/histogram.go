package gpuio

import (
	"math/bits"
	"time"
)

// Histogram counts durations in buckets of 1/16 octave, from 256 ns to 68 s (a relative error of
// at most 6.25 %); what is shorter is in the first. It is plain data, so that kernels can count in
// it. A duration is no finer than the clock that it was taken with: %globaltimer of some GPUs steps
// by 1 us and more, and then the buckets below the step are empty but for the first ("gputier
// clock", a step of make test-gpu-pack, measures it).
type Histogram struct {
	Counts [histBuckets]uint64
}

const (
	histSubBits = 4
	histMinBits = 8
	histMaxBits = 36
	histBuckets = (histMaxBits - histMinBits) << histSubBits
)

// histBucket is the bucket of a duration in nanoseconds.
func histBucket(ns int64) int {
	if ns < 1<<histMinBits {
		return 0
	}
	if ns >= 1<<histMaxBits {
		return histBuckets - 1
	}
	exp := bits.Len64(uint64(ns)) - 1
	return (exp-histMinBits)<<histSubBits | int(uint64(ns)>>(exp-histSubBits))&(1<<histSubBits-1)
}

// histUpper is the upper bound of a bucket in nanoseconds.
func histUpper(b int) int64 {
	exp := b>>histSubBits + histMinBits
	sub := int64(b&(1<<histSubBits-1)) + 1
	return 1<<exp + sub<<(exp-histSubBits)
}

// Add counts one duration.
func (h *Histogram) Add(d time.Duration) { h.Counts[histBucket(int64(d))]++ }

// Merge adds the counts of o.
func (h *Histogram) Merge(o *Histogram) {
	for i, n := range o.Counts {
		h.Counts[i] += n
	}
}

// Since returns what was counted after an earlier copy of the same histogram.
func (h Histogram) Since(earlier *Histogram) Histogram {
	for i, n := range earlier.Counts {
		h.Counts[i] -= n
	}
	return h
}

// Count is the number of durations counted.
func (h *Histogram) Count() int64 {
	var n uint64
	for _, c := range h.Counts {
		n += c
	}
	return int64(n)
}

// Quantile is a duration that a share q of the counted ones does not exceed; 0 when there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.Count()
	if total == 0 {
		return 0
	}
	rank := uint64(q * float64(total))
	var seen uint64
	for i, n := range h.Counts {
		seen += n
		if n > 0 && seen >= rank {
			return time.Duration(histUpper(i))
		}
	}
	return time.Duration(histUpper(histBuckets - 1))
}
