package stripe

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/nvme"
)

// RowSource reads the rows of a dataset from its SSDs in their order, in long commands, all SSDs at
// once. It is a packed.Source. Rows are as they are stored there: RowBytes each, of RowType. One
// goroutine uses it.
type RowSource struct {
	all     []*target
	stripes []stripe
	l       gpuio.Layout
	sums    []uint32 // by row; nil: they are not checked
	why     string   // that is
	bufs    [][]byte // by stripe
}

// OpenRows opens the rows of d on SSDs. Where all stripes have row checksums, and memory has room
// for them, every row is held against its own: 4 bytes of memory a row.
func OpenRows(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD) (*RowSource, error) {
	ts, err := openTargets(ctx, ssds)
	if err != nil {
		return nil, err
	}
	r, err := openRows(ctx, d, ts)
	if err != nil {
		return nil, errors.Join(err, closeTargets(ctx, ts))
	}
	return r, nil
}

func openRows(ctx context.Context, d *dataset.Dataset, ts []*target) (*RowSource, error) {
	stripes, err := attach(ctx, d, ts, AttachOptions{})
	if err != nil {
		return nil, err
	}
	r := &RowSource{all: ts, stripes: stripes, l: stripes[0].sb.layout(),
		bufs: make([][]byte, len(stripes))}
	if r.why = withoutSums(d, stripes); r.why != "" {
		return r, nil
	}
	if err := RoomForSums(r.l.Rows); err != nil {
		r.why = err.Error()
		return r, nil
	}
	r.sums, err = rowSums(ctx, d, stripes)
	return r, err
}

// Rows returns the number of rows.
func (r *RowSource) Rows() int64 { return r.l.Rows }

// RowBytes is the size of a row as it is stored.
func (r *RowSource) RowBytes() int { return int(r.l.RowBytes) }

// RowType is the form of the rows.
func (r *RowSource) RowType() rowtype.Type { return r.stripes[0].sb.RowType }

// Unchecked is the reason that rows are not compared with their checksums; "": they are.
func (r *RowSource) Unchecked() string { return r.why }

// ReadRows reads n rows from a row on into dst, which has room for them. A row that cannot be read,
// or was not loaded so, is an error of class device that names the SSD, and the row where that is
// known.
func (r *RowSource) ReadRows(ctx context.Context, first, n int64, dst []byte) error {
	row := int64(r.l.RowBytes)
	if first < 0 || n < 0 || first > r.l.Rows-n || int64(len(dst)) < n*row {
		return errs.New(errs.Failed, "rows %d to %d of %d, into %d bytes", first, first+n-1,
			r.l.Rows, len(dst))
	}
	g, ctx := errgroup.WithContext(ctx)
	for i := range r.stripes {
		g.Go(func() error { return r.share(ctx, i, first, n, dst) })
	}
	return g.Wait()
}

// share reads the rows that are on one SSD.
func (r *RowSource) share(ctx context.Context, i int, first, n int64, dst []byte) error {
	ssds, row, lba := int64(r.l.SSDs), int64(r.l.RowBytes), int64(r.l.LBABytes)
	from := first + (int64(i)-first%ssds+ssds)%ssds // the first row of this SSD
	if from >= first+n {
		return nil
	}
	s := &r.stripes[i]
	lo, hi := from/ssds, (first+n-1-int64(i))/ssds // its slots
	begin := slotOffset(r.l, lo) / lba * lba
	end := (slotOffset(r.l, hi) + row + lba - 1) / lba * lba
	if int64(cap(r.bufs[i])) < end-begin {
		b, err := hostmem.Alloc(end-begin, "rows of an SSD")
		if err != nil {
			return err
		}
		old := r.bufs[i]
		r.bufs[i] = b
		if err := hostmem.Free(old); err != nil {
			return err
		}
	}
	b := r.bufs[i][:end-begin]
	if err := s.t.dev.ReadAt(ctx, s.sb.DataLBA+nvme.LBA(begin/lba), b); err != nil {
		return errs.With(errs.Device, fmt.Errorf("ssd %s: rows %d to %d: %w", s.t.name, first,
			first+n-1, err))
	}
	for slot := lo; slot <= hi; slot++ {
		offset, v := slotOffset(r.l, slot)-begin, slot*ssds+int64(i)
		to := dst[(v-first)*row:][:row]
		copy(to, b[offset:offset+row])
		if r.sums == nil {
			continue
		}
		if got := crc32.Checksum(to, castagnoli); got != r.sums[v] {
			return errs.New(errs.Device,
				"ssd %s: row %d at LBA %d: CRC32C %08x, load has written %08x; run \"heliosctl verify --ssds %s\"",
				s.t.name, v, int64(s.sb.DataLBA)+(begin+offset)/lba, got, r.sums[v], s.t.name)
		}
	}
	return nil
}

// Close ends the reading.
func (r *RowSource) Close(ctx context.Context) error {
	err := closeTargets(ctx, r.all)
	r.all = nil
	for i, b := range r.bufs {
		r.bufs[i] = nil
		err = errors.Join(err, hostmem.Free(b))
	}
	return err
}
