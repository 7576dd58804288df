package stripe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/nvme"
)

// RowSums reads the checksums of all rows from the SSDs into dst, which has room for them, for
// gpuio.NewChecked: element r is the CRC32C of row r, as load has computed it from features.npy. It
// takes 1 MiB an SSD meanwhile. The SSDs are those that Find returned, in any order. Errors are
// of class device: a stripe without row checksums, which a load with --row-checksums mends, or a
// damaged table.
func RowSums(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, dst []uint32) error {
	return withStripes(ctx, d, ssds, AttachOptions{}, func(stripes []stripe) error {
		return fillSums(ctx, d, stripes, dst)
	})
}

// rowSums is RowSums with room of its own, where memory has some.
func rowSums(ctx context.Context, d *dataset.Dataset, stripes []stripe) ([]uint32, error) {
	if err := needSums(d, stripes); err != nil {
		return nil, err
	}
	if err := RoomForSums(stripes[0].sb.Rows); err != nil {
		return nil, fmt.Errorf("%w; read without checking, or free memory", err)
	}
	sums := make([]uint32, stripes[0].sb.Rows)
	return sums, fillSums(ctx, d, stripes, sums)
}

func fillSums(ctx context.Context, d *dataset.Dataset, stripes []stripe, dst []uint32) error {
	if err := needSums(d, stripes); err != nil {
		return err
	}
	if sb := &stripes[0].sb; int64(len(dst)) != sb.Rows {
		return errs.New(errs.Failed, "room for %d checksums of %d rows", len(dst), sb.Rows)
	}
	return eachTable(ctx, d, stripes, func(row int64, sum uint32, _ float32) { dst[row] = sum })
}

// needSums refuses stripes without row checksums.
func needSums(d *dataset.Dataset, stripes []stripe) error {
	switch why := withoutSums(d, stripes); {
	case why == "":
		return nil
	case stripes[0].sb.computed():
		return errs.New(errs.Usage, "no SSD holds %s, and %s; leave it out", d.Dir(), why)
	default:
		return errs.New(errs.Device, "%s", why)
	}
}

// withoutSums is the reason that rows have no checksums; "": all have one.
func withoutSums(d *dataset.Dataset, stripes []stripe) string {
	for _, s := range stripes {
		switch {
		case s.sb.hasRowSums():
		case s.sb.computed():
			return "blocks of " + dataset.FeaturesName +
				" are held against the seal when they are first read"
		default:
			return fmt.Sprintf(
				"ssd %s: stripe %d of %s has no row checksums; load it again with \"heliosctl load --dataset %s --row-checksums\"",
				s.t.name, s.sb.StripeIndex, d.Dir(), d.Dir())
		}
	}
	return ""
}

// Lines are runs of adjacent rows of an SSD that are read as one: line k of an SSD begins with its
// row k × Rows, and a row begins Stride bytes behind the one before it.
type Lines struct {
	Layout       gpuio.Layout // a line is a row of it
	Rows, Stride int64
}

// LineSums computes the checksums of lines from those of their rows, which load has parted with
// zeros. The bytes behind the last row of an SSD are in its last line, which is read for that, and
// whose rows are checked now.
func LineSums(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, l Lines, rows []uint32,
	dst []uint32) error {
	return withStripes(ctx, d, ssds, AttachOptions{}, func(stripes []stripe) error {
		return lineSums(ctx, stripes, l, rows, dst)
	})
}

func lineSums(ctx context.Context, stripes []stripe, l Lines, rows, dst []uint32) error {
	sb := &stripes[0].sb
	if int64(len(rows)) != sb.Rows || int64(len(dst)) != l.Layout.Rows {
		return errs.New(errs.Failed, "checksums of %d rows for %d, of %d lines for %d", len(rows),
			sb.Rows, len(dst), l.Layout.Rows)
	}
	row := int64(sb.RowBytes)
	whole, gap := shiftBy(row), shiftBy(l.Stride-row)
	end := shiftBy(int64(l.Layout.RowBytes) - l.Rows*l.Stride)
	first, n := whole.apply(^uint32(0)), int64(len(stripes))
	g, ctx := errgroup.WithContext(ctx)
	for i, s := range stripes {
		g.Go(func() error {
			have := s.sb.layout().RowsOn(i)
			for k := range have / l.Rows {
				state := ^uint32(0)
				for slot := k * l.Rows; slot < (k+1)*l.Rows; slot++ {
					// the row's own state, begun with 0, goes on where the line's is
					state = gap.apply(whole.apply(state) ^ ^rows[slot*n+int64(i)] ^ first)
				}
				dst[k*n+int64(i)] = ^end.apply(state)
			}
			if have%l.Rows == 0 {
				return nil
			}
			return s.lastLine(ctx, l, rows, &dst[have/l.Rows*n+int64(i)])
		})
	}
	return g.Wait()
}

// lastLine is LineSums for a line that rows do not fill.
func (s stripe) lastLine(ctx context.Context, l Lines, rows []uint32, sum *uint32) error {
	n, i, bytes := int64(l.Layout.SSDs), int64(s.sb.StripeIndex), int64(l.Layout.RowBytes)
	have := s.sb.layout().RowsOn(int(i))
	k := have / l.Rows
	b := make([]byte, bytes)
	start := s.sb.DataLBA + nvme.LBA(k*bytes/int64(s.sb.LBABytes))
	if err := s.t.dev.ReadAt(ctx, start, b); err != nil {
		return errs.With(errs.Device, fmt.Errorf("ssd %s: its last rows: %w", s.t.name, err))
	}
	for slot := k * l.Rows; slot < have; slot++ {
		row := b[(slot-k*l.Rows)*l.Stride:][:s.sb.RowBytes]
		if got, want := crc32.Checksum(row, castagnoli), rows[slot*n+i]; got != want {
			return errs.New(errs.Device,
				"ssd %s: row %d, in the line at LBA %d: CRC32C %08x, load has written %08x; run \"heliosctl verify --ssds %s\"",
				s.t.name, slot*n+i, start, got, want, s.t.name)
		}
	}
	*sum = crc32.Checksum(b, castagnoli)
	return nil
}

// Scales reads the scales of all rows from the SSDs into dst, which has room for them.
// The SSDs are those that Find returned, in any order.
// A damaged table is an error of class device.
func Scales(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD, dst []float32) error {
	return withStripes(ctx, d, ssds, AttachOptions{}, func(stripes []stripe) error {
		if sb := &stripes[0].sb; !sb.RowType.Scaled() || int64(len(dst)) != sb.Rows {
			return errs.New(errs.Failed, "%d scales of %d rows of %s", len(dst), sb.Rows, sb.RowType)
		}
		return eachTable(ctx, d, stripes, func(row int64, _ uint32, scale float32) {
			dst[row] = scale
		})
	})
}

// eachTable reads the row tables of all stripes at once.
func eachTable(ctx context.Context, d *dataset.Dataset, stripes []stripe,
	put func(row int64, sum uint32, scale float32)) error {
	n := len(stripes)
	g, gctx := errgroup.WithContext(ctx)
	for i, s := range stripes {
		g.Go(func() error {
			err := s.rowTable(gctx,
				func(slot int64, sum uint32, scale float32) {
					put(slot*int64(n)+int64(i), sum, scale)
				})
			if err != nil {
				return fmt.Errorf("ssd %s: %s: %w", s.t.name, s.sb.rowTableName(), err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if ctx.Err() == nil {
			err = errs.With(errs.Device,
				fmt.Errorf("%w; run \"heliosctl verify --dataset %s\", or load it again", err,
					d.Dir()))
		}
		return err
	}
	return nil
}

// refuseSumsFrom is the share of the memory that can be had from which on row checksums are
// refused; a variable for tests.
var refuseSumsFrom = 1.0

// RoomForSums refuses checksums of more rows than memory has room for.
func RoomForSums(rows int64) error {
	if hostmem.Scarce(4*rows, refuseSumsFrom) {
		return errs.New(errs.Capability,
			"the checksums of %d rows take %d bytes, which memory has no room for", rows, 4*rows)
	}
	return nil
}

// errTable is a table that is not the one that its superblock describes.
var errTable = errors.New("damaged table")

// rowTable reads the row table of a stripe and gives what it has of each row, zero for the rest, to
// put in order of slots. That the table is whole is known only at the end.
func (s stripe) rowTable(ctx context.Context,
	put func(slot int64, sum uint32, scale float32)) error {
	lba, each := int64(s.sb.LBABytes), s.sb.rowEntry()
	l := s.sb.layout()
	left := l.RowsOn(s.sb.StripeIndex) * each
	buf := make([]byte, min(s.sb.RowTableLBAs*lba, chunkBytes))
	start, slot, crc := s.sb.RowTableLBA, int64(0), uint32(0)
	for left > 0 {
		b := buf[:min((left+lba-1)/lba*lba, chunkBytes)]
		if err := s.t.dev.ReadAt(ctx, start, b); err != nil {
			return err
		}
		start += nvme.LBA(int64(len(b)) / lba)
		b = b[:min(int64(len(b)), left)]
		left -= int64(len(b))
		crc = crc32.Update(crc, castagnoli, b)
		for ; len(b) > 0; b = b[each:] {
			var sum uint32
			if s.sb.hasRowSums() {
				sum = binary.LittleEndian.Uint32(b)
			}
			scale := float32(0)
			if s.sb.RowType.Scaled() {
				scale = math.Float32frombits(binary.LittleEndian.Uint32(b[each-4:]))
			}
			put(slot, sum, scale)
			slot++
		}
	}
	if crc != s.sb.RowTableCRC {
		return fmt.Errorf("%w: CRC32C %08x, the superblock says %08x", errTable, crc,
			s.sb.RowTableCRC)
	}
	return nil
}

// rowChecker compares the rows of a stripe with its row table, chunk by chunk.
type rowChecker struct {
	l       gpuio.Layout
	n       int64    // rows of the stripe
	sums    []uint32 // by slot; nil: there is nothing to compare with
	slot    int64    // the next, or the one that the last chunk has ended in
	pos     int64    // bytes of the extent done
	crc     uint32   // of the part of the slot's row that was in the chunks before
	lost    bool     // a part of that row could not be read
	checked int64    // rows compared so far
}

// maxBadRows bounds the bad rows of a chunk that are named.
const maxBadRows = 16

// chunk checks the rows that end in b, the extent's bytes from pos on, or skips them (b nil, of n
// bytes). It returns the slots of the first maxBadRows bad ones, and how many there are.
func (c *rowChecker) chunk(b []byte, n int64) (bad []int64, count int64) {
	if c.sums == nil {
		return nil, 0
	}
	end := c.pos + n
	row := int64(c.l.RowBytes)
	for ; c.slot < c.n; c.slot++ {
		off := slotOffset(c.l, c.slot)
		if off >= end {
			break
		}
		from, to := max(off, c.pos), min(off+row, end)
		if from == off {
			c.crc, c.lost = 0, false
		}
		if b == nil {
			c.lost = true
		} else {
			c.crc = crc32.Update(c.crc, castagnoli, b[from-c.pos:to-c.pos])
		}
		if off+row > end {
			break
		}
		if c.lost {
			continue
		}
		if c.checked++; c.crc != c.sums[c.slot] {
			if count++; len(bad) < maxBadRows {
				bad = append(bad, c.slot)
			}
		}
	}
	c.pos = end
	return bad, count
}
