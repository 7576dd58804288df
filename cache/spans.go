package cache

import (
	"fmt"

	"helios/cuda"
)

// Spans is the index of rows that are all in memory, the first ones in one buffer and the others in
// another: rows 0 to First-1 are of the GPU tier, all behind them of the CPU tier, each in its
// order. Several caches may share it, whose buffers hold other rows at the same places.
type Spans struct {
	index       *Index
	first, rows int64
}

// NewSpans makes the index.
func NewSpans(dev cuda.Device, first, rows int64) (*Spans, error) {
	if first < 0 || first > rows {
		return nil, fmt.Errorf("cache: %d of %d rows in the first span", first, rows)
	}
	i, err := BuildIndexOf(dev, rows, func(yield func(int64, Tier) bool) {
		for row := range rows {
			t := CPU
			if row < first {
				t = GPU
			}
			if !yield(row, t) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return &Spans{i, first, rows}, nil
}

// Close frees the index. No cache over it may be used any more.
func (s *Spans) Close() error { return s.index.Close() }

// Over makes a cache over two buffers, which stay the caller's and hold the rows of both spans: its
// Close frees nothing. Buckets are those of any cache over as many SSDs.
func (s *Spans) Over(dev cuda.Device, rowBytes int64, ssds int, first,
	others cuda.Buffer) (*Hetero, error) {
	h, err := openHetero(dev, s.rows, rowBytes, ssds)
	if err != nil {
		return nil, err
	}
	if first.Size() < s.first*rowBytes || others.Size() < (s.rows-s.first)*rowBytes {
		return nil, fmt.Errorf("cache: %d and %d bytes for %d and %d rows of %d bytes",
			first.Size(), others.Size(), s.first, s.rows-s.first, rowBytes)
	}
	h.index, h.gpu, h.cpu, h.spans = s.index, first, others, s
	return h, nil
}
