package stripe

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/gpuio"
)

// PagePlace is the pages.Place beside the rows of a dataset, on all SSDs that hold them. Each store
// that is written, and each call while it lasts, takes a queue pair of every SSD; readers of the
// same SSDs may go on meanwhile.
type PagePlace struct {
	Dataset *dataset.Dataset
	SSDs    []*gpuio.SSD // that are there and stay open
}

// LBABytes is that of the SSDs.
func (p PagePlace) LBABytes() int64 {
	n := 0
	for _, s := range p.SSDs {
		n = max(n, s.Ctrl.Namespace().LBABytes)
	}
	return int64(n)
}

// Create is CreatePages.
func (p PagePlace) Create(ctx context.Context, _ string, s pages.Spec) (pages.Writer, error) {
	w, err := CreatePages(ctx, p.Dataset, p.SSDs, s)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Open is OpenPages.
func (p PagePlace) Open(ctx context.Context, _ string, s pages.Spec) (*pages.Opened, error) {
	return OpenPages(ctx, p.Dataset, p.SSDs, s)
}

// Remove is RemovePages, which finds none where they are gone.
func (p PagePlace) Remove(ctx context.Context, _ string, id uuid.UUID) error {
	return withTargets(ctx, p.SSDs, func(ts []*target) error {
		// A load of another dataset may write the same superblocks.
		lease, err := holdForPack(ctx, ts, id, false)
		if err != nil {
			return err
		}
		_, _, err = forgetPages(ctx, ts, id)
		return errors.Join(err, lease.Close())
	})
}
