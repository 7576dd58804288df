package engine

import (
	"context"
	"errors"
	"time"

	"helios/cuda"
	"helios/dataset/pages"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/sched/plan"
)

// PageStore holds the pages of mini-batches, or of parts, that were laid out beforehand. A page is
// a row of its Layout.
type PageStore struct {
	*pages.Opened
	memory *gpuio.Memory
	checks cuda.Buffer // the pages' checksums, once they are used
}

// Close frees the checksums and ends what was opened for the pages. No stack is open for them.
func (p *PageStore) Close() (err error) {
	if p.checks != nil {
		err = p.checks.Free()
		p.checks = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(err, p.Opened.Close(ctx))
}

// pagePairs is the number of queue pairs of each SSD that are taken at once where pages are on
// SSDs: by what writes them, and by what reads rows for them, or for training.
const pagePairs = 2

// PagePlace returns the place of a run's pages, and reports whether an SSD has too few queue pairs
// to read rows while pages are written.
func (e *Engine) PagePlace() (place pages.Place, alone bool) {
	if e.Config.PagesOn != plan.PagesSSDs {
		return pages.InFolder{Options: pages.OpenOptions{PollDoorbells: e.OnGPU()}}, false
	}
	for _, s := range e.Store.SSDs {
		alone = alone || s.Ctrl.MaxQueuePairs() < pagePairs
	}
	return stripe.PagePlace{Dataset: e.In.Dataset, SSDs: e.Store.SSDs}, alone
}

// RowSource has the rows read from the SSDs, in their order, and returns what ends that.
func (e *Engine) RowSource(ctx context.Context) (*stripe.RowSource, func() error, error) {
	r, err := stripe.OpenRows(ctx, e.In.Dataset, e.Store.SSDs)
	if err != nil {
		return nil, nil, err
	}
	if why := r.Unchecked(); why != "" {
		e.Observer.TellNote("rows are copied without being held against their checksums: %s", why)
	}
	return r, func() error { return r.Close(ctx) }, nil
}

// ReadLayout is the layout of what the stack reads: rows, or the pages that it is open for.
func (s *Store) ReadLayout() gpuio.Layout {
	if s.Pages != nil {
		return s.Pages.Layout
	}
	return s.Layout
}
