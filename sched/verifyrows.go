package sched

import (
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

// verifyRows checks a batch whose rows are in place, as they are stored, on all cores.
func (e *engine) verifyRows(s *slot) error {
	if e.verify == nil {
		return nil
	}
	n := s.mb.HopEnd[len(e.cfg.Fanouts)]
	nodes := hostmem.View[int64](s.mb.Nodes.Bytes())[:n]
	rows := s.x.Bytes()[:n*e.rowBytes]
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
			return errs.New(errs.Device, "batch %d: row %d of %d: %s; run \"heliosctl verify\", and with --check-reads to see whether it came so from the SSD", s.index, i, n,
				e.verify.Wrong(nodes[i], rows[i*e.rowBytes:(i+1)*e.rowBytes]))
		}
	}
	e.verify.rows.Add(n)
	return nil
}

// verified is how many rows were verified; nil where none is.
func (e *engine) verified() *int64 {
	if e.verify == nil {
		return nil
	}
	n := e.verify.rows.Load()
	return &n
}
