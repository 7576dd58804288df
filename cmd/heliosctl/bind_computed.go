package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"helios/dataset"
	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/state"
)

// maxComputed is the most computed SSDs of one command.
const maxComputed = 64

// bindComputed binds SSDs that compute a dataset.
func (b *binder) bindComputed(ctx context.Context, model boundModel) (err error) {
	n := b.count
	if n < 1 || n > maxComputed {
		return errs.New(errs.Usage, "{ssd-count} %d is not between 1 and %d", n, maxComputed)
	}
	dir, err := filepath.Abs(b.computed)
	if err != nil {
		return errs.New(errs.Usage, "{computed} %s: %w", b.computed, err)
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	d, err := dataset.Open(dir)
	if err != nil {
		return err
	}
	defer closing(&err, d.Close)
	if int64(n) > d.Meta.Rows() {
		return errs.New(errs.Usage, "{ssd-count} %d is more than the %d rows of %s", n,
			d.Meta.Rows(), dir)
	}
	want := make([]state.SSD, n)
	for i := range want {
		c, err := stripe.NewComputed(ctx, d, stripe.ComputedOptions{Stripe: i, Stripes: n,
			LBABytes: b.lba, Bytes: b.size, Type: b.rowType,
			Progress: func(stage string, done, total int64) {
				b.ui.Progress(fmt.Sprintf("%s, SSD %d of %d", stage, i+1, n), done, total)
			}})
		if err != nil {
			return whenStopped(err, "nothing was bound: run it again")
		}
		sums := c.Sums()
		want[i] = state.SSD{Kind: state.KindComputed, Path: dir, Serial: newSerial(),
			Bytes: c.Size(), LBABytes: b.lba, Bound: time.Now().UTC().Truncate(time.Second),
			Computed: &state.Computed{UUID: d.UUID().String(), Stripe: i, Stripes: n,
				RowDType: b.rowType.String(), TableCRC: sums.Table, RowTableCRC: sums.RowTable,
				Scales: b.rowType.Scaled()}}
		if err := model.bind(&want[i]); err != nil {
			return err
		}
	}
	err = b.store.Update(ctx, func(st *state.State) error {
		if index := slices.IndexFunc(st.SSDs, func(s state.SSD) bool {
			return s.Computed != nil && s.Computed.UUID == d.UUID().String()
		}); index >= 0 {
			return errs.New(errs.Usage,
				"{computed} %s: SSD %s holds it already; \"heliosctl unbind-ssds %s\" first", dir,
				st.SSDs[index].Name, st.SSDs[index].Name)
		}
		for i := range want {
			want[i].Name = st.NextName()
			st.SSDs = append(st.SSDs, want[i])
		}
		return nil
	})
	if err != nil {
		return err
	}
	return showSoftware(b.env, want)
}

// loadComputed ends a load onto computed SSDs, which hold their dataset already and no other: done.
func loadComputed(ctx context.Context, e *env, d *dataset.Dataset, set *ssdSet,
	rowType string) (done bool, err error) {
	var computed []string
	for _, s := range set.Bound {
		if s.Kind == state.KindComputed {
			computed = append(computed, s.Name)
		}
	}
	switch {
	case len(computed) == 0:
		return false, nil
	case len(computed) < len(set.Bound):
		return true, errs.New(errs.Usage,
			"SSD %s is computed and cannot be loaded; choose the others with {ssds}", computed[0])
	}
	a, err := stripe.Find(ctx, d, set.SSDs,
		stripe.AttachOptions{Note: e.plainNote})
	if err != nil {
		return true, errs.New(errs.Refused,
			"SSD %s is computed and cannot be written: %w; bind SSDs that compute this dataset with \"heliosctl bind-ssds --computed %s\", or others",
			computed[0], err, d.Dir())
	}
	if rowType != "" && rowType != a.RowType.String() {
		return true, errs.New(errs.Refused,
			"{row-dtype} %s: the SSDs compute rows of %s and cannot be written; \"heliosctl unbind-ssds\" them, and bind them with \"heliosctl bind-ssds --computed %s --ssd-count %d --row-dtype %s\"",
			rowType, a.RowType, d.Dir(), len(a.SSDs), rowType)
	}
	e.ui.Printf("%s: nothing to load: the %d SSDs compute its %d rows as %s", d.Meta.Name,
		len(a.SSDs), a.Layout.Rows, a.RowType)
	return true, e.ui.Event("result", stripe.LoadReport{SSDs: len(a.SSDs), Stripes: len(a.SSDs),
		Rows: a.Layout.Rows, RowDType: a.RowType.String(), RowBytes: int(a.Layout.RowBytes),
		RowsPerLBA: int(a.Layout.RowsPerLBA), LBAsPerRow: int(a.Layout.LBAsPerRow),
		PaddingBytes: a.Layout.PaddingBytes(), Computed: true, Extents: []stripe.SSDExtents{}})
}
