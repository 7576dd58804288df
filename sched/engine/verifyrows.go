package engine

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/sched/prepare"
)

// RowVerifier holds every row that was gathered against the dataset's feature function.
type RowVerifier struct {
	*stripe.RowVerifier
	rows atomic.Int64 // verified so far
}

// newRowVerifier prepares Config.VerifyRows; nil where it is not asked for.
func newRowVerifier(s *prepare.Sampling) (*RowVerifier, error) {
	if !s.Config.VerifyRows {
		return nil, nil
	}
	v, err := stripe.NewRowVerifier(s.In.Dataset, s.RowType)
	if err != nil {
		return nil, err
	}
	return &RowVerifier{RowVerifier: v}, nil
}

// VerifyChunk bounds what is copied from a GPU at one time. Tests lower it.
var VerifyChunk int64 = 32 << 20

// check holds a batch whose rows are in place, as they are stored, against the function, on all
// cores.
func (v *RowVerifier) check(ctx context.Context, e *Engine, s *Slot) error {
	if v == nil {
		return nil
	}
	n := s.Batch.RowCount(len(e.Config.Fanouts))
	step := n
	if e.OnGPU() {
		step = max(VerifyChunk/e.RowBytes, 1)
	}
	for first := int64(0); first < n; first += step {
		count := min(step, n-first)
		raw, err := e.Look[0].View(ctx, e.Device, e.TrainStream, s.Batch.RowNumbers(),
			first*8, count*8)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
		rows, err := e.Look[1].View(ctx, e.Device, e.TrainStream, s.Features, first*e.RowBytes,
			count*e.RowBytes)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.Index, err)
		}
		nodes := hostmem.View[int64](raw)
		if i := v.firstWrong(nodes, rows, e.RowBytes); i >= 0 {
			return errs.New(errs.Device,
				"batch %d: row %d of %d: %s; run \"heliosctl verify\", and with {check-reads} to see whether it was read so",
				s.Index, first+i, n,
				v.Wrong(nodes[i], rows[i*e.RowBytes:(i+1)*e.RowBytes]))
		}
	}
	v.rows.Add(n)
	return nil
}

// firstWrong is the index of a row that is not that of its node; -1 where all are.
func (v *RowVerifier) firstWrong(nodes []int64, rows []byte, rowBytes int64) int64 {
	n := int64(len(nodes))
	workers := min(int64(hostcpu.Count()), n/64+1)
	bad := make([]int64, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			lo, hi := n*w/workers, n*(w+1)/workers
			if bad[w] = int64(v.Check(nodes[lo:hi], rows[lo*rowBytes:hi*rowBytes])); bad[w] >= 0 {
				bad[w] += lo
			}
		})
	}
	wg.Wait()
	for _, i := range bad {
		if i >= 0 {
			return i
		}
	}
	return -1
}

// Verified returns how many rows were verified; nil where none is.
func (v *RowVerifier) Verified() *int64 {
	if v == nil {
		return nil
	}
	n := v.rows.Load()
	return &n
}
