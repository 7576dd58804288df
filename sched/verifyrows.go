package sched

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// rowVerifier holds every row that was gathered against the dataset's feature function.
type rowVerifier struct {
	*dataset.RowVerifier
	rows atomic.Int64 // verified so far
}

// openVerify prepares Config.VerifyRows.
func (e *engine) openVerify(in Inputs) error {
	if !e.cfg.VerifyRows {
		return nil
	}
	v, err := in.Dataset.NewRowVerifier(e.rowType)
	if err != nil {
		return err
	}
	e.verify = &rowVerifier{RowVerifier: v}
	return nil
}

// verifyChunk bounds what is copied from a GPU at one time. Tests lower it.
var verifyChunk int64 = 32 << 20

// verifyRows checks a batch whose rows are in place, as they are stored, on all cores.
func (e *engine) verifyRows(ctx context.Context, s *slot) error {
	if e.verify == nil {
		return nil
	}
	n := s.mb.HopEnd[len(e.cfg.Fanouts)]
	step := n
	if e.onGPU() {
		step = max(verifyChunk/e.rowBytes, 1)
	}
	for at := int64(0); at < n; at += step {
		count := min(step, n-at)
		raw, err := e.look[0].view(ctx, e.dev, e.trainS, s.mb.Nodes, at*8, count*8)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		rows, err := e.look[1].view(ctx, e.dev, e.trainS, s.x, at*e.rowBytes, count*e.rowBytes)
		if err != nil {
			return fmt.Errorf("batch %d: %w", s.index, err)
		}
		nodes := hostmem.View[int64](raw)
		if i := e.firstWrong(nodes, rows); i >= 0 {
			return errs.New(errs.Device, "batch %d: row %d of %d: %s; run \"heliosctl verify\", and with --check-reads to see whether it came so from the SSD", s.index, at+i, n,
				e.verify.Wrong(nodes[i], rows[i*e.rowBytes:(i+1)*e.rowBytes]))
		}
	}
	e.verify.rows.Add(n)
	return nil
}

// firstWrong is the index of a row that is not that of its node; -1 where all are.
func (e *engine) firstWrong(nodes []int64, rows []byte) int64 {
	n := int64(len(nodes))
	workers := min(int64(runtime.GOMAXPROCS(0)), n/64+1)
	bad := make([]int64, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			lo, hi := n*w/workers, n*(w+1)/workers
			if bad[w] = int64(e.verify.Check(nodes[lo:hi], rows[lo*e.rowBytes:hi*e.rowBytes])); bad[w] >= 0 {
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

// verified is how many rows were verified; nil where none is.
func (e *engine) verified() *int64 {
	if e.verify == nil {
		return nil
	}
	n := e.verify.rows.Load()
	return &n
}
