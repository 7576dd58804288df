package iobench

import (
	"sync"
	"time"

	"helios/gpuio"
)

// Bucket is a part of a latency histogram: so many took up to UpToUS microseconds, and longer than
// the bucket before allows.
type Bucket struct {
	UpToUS float64 `json:"up_to_us"`
	Count  uint64  `json:"count"`
}

// bounds are the upper bounds of the buckets of gpuio's histograms: what a histogram with a single
// entry answers.
var bounds = sync.OnceValue(func() []float64 {
	out := make([]float64, len(gpuio.Histogram{}.Counts))
	for i := range out {
		var h gpuio.Histogram
		h.Counts[i] = 1
		out[i] = us(h.Quantile(1))
	}
	return out
})

func us(d time.Duration) float64 { return float64(d) / 1e3 }

// latency enters a histogram into the row.
func (r *Row) latency(h *gpuio.Histogram) {
	r.P50, r.P95, r.P99, r.P999, r.Max = us(h.Quantile(0.5)), us(h.Quantile(0.95)),
		us(h.Quantile(0.99)), us(h.Quantile(0.999)), us(h.Quantile(1))
	r.Histogram = []Bucket{}
	for i, n := range h.Counts {
		if n > 0 {
			r.Histogram = append(r.Histogram, Bucket{bounds()[i], n})
		}
	}
}
