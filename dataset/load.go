package dataset

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/nvme"
)

// LoadOptions shape a load.
type LoadOptions struct {
	// Force holds serial numbers, separated by commas, of SSDs that may be overwritten
	// whatever they hold.
	Force string
	// NoRowChecksums leaves the CRC32C of each row out, and with it checked reads (gpuio.NewChecked).
	NoRowChecksums bool
	Progress       Progress
}

// LoadReport says what a load wrote.
type LoadReport struct {
	SSDs         int           `json:"ssds"`
	Rows         int64         `json:"rows"`
	RowBytes     int           `json:"row_bytes"`
	RowsPerLBA   int           `json:"rows_per_lba"` // 1 when padded
	LBAsPerRow   int           `json:"lbas_per_row"` // 1 when packed
	DataBytes    int64         `json:"data_bytes"`   // feature extents on all SSDs, padding included
	PaddingBytes int64         `json:"padding_bytes"`
	Chunks       int64         `json:"chunks"`        // checksummed, 1 MiB each
	RowChecksums int64         `json:"row_checksums"` // bytes of their tables on all SSDs; 0: none
	Seconds      float64       `json:"seconds"`
	Layout       gpuio.Layout  `json:"-"`
	Duration     time.Duration `json:"-"`
}

// Load stripes the features over the SSDs, in the order given. It refuses SSDs that hold
// something else (errors of class refused) before it writes to any of them.
//
// The order of writes makes every interruption visible: superblocks that say "loading" first,
// flush; data and checksums of chunks and rows, flush; superblocks that say "complete", flush. A
// stripe that was being loaded when power failed is either still the old one, untouched, or not
// complete. That rests on the SSD's word that what it flushed is durable; where it lies, Verify finds
// what the checksums cover: rows, tables and superblocks.
func Load(ctx context.Context, d *Dataset, ssds []*gpuio.SSD, o LoadOptions) (r LoadReport, err error) {
	ts, err := openTargets(ctx, ssds)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, closeTargets(ctx, ts)) }()
	return load(ctx, d, ts, o)
}

func load(ctx context.Context, d *Dataset, ts []*target, o LoadOptions) (LoadReport, error) {
	start := time.Now()
	serials := map[string]string{}
	for _, t := range ts {
		if t.lbaBytes != ts[0].lbaBytes {
			return LoadReport{}, errs.New(errs.Usage, "ssd %s has LBAs of %d bytes and %s of %d; all SSDs of a dataset must agree, choose others with --ssds",
				ts[0].name, ts[0].lbaBytes, t.name, t.lbaBytes)
		}
		if other, twice := serials[t.name]; twice {
			return LoadReport{}, errs.New(errs.Usage, "ssd %s is given twice (serial %s)", t.name, other)
		}
		serials[t.name] = t.serial
	}
	l, err := gpuio.NewLayout(d.Meta.Nodes, d.Meta.RowBytes(), len(ts), ts[0].lbaBytes)
	if err != nil {
		return LoadReport{}, err
	}
	loadID, err := uuid.NewRandom()
	if err != nil {
		return LoadReport{}, fmt.Errorf("a random identity for the load: %w", err)
	}
	w := &loader{d: d, ts: ts, l: l, o: o}
	for i, t := range ts {
		g, err := newGeometry(l, i, t.lbaBytes, t.lbas, !o.NoRowChecksums)
		if err != nil {
			return LoadReport{}, fmt.Errorf("ssd %s is too small for its share (stripe %d of %d): %w; bind larger SSDs or more of them", t.name, i, len(ts), err)
		}
		w.geo = append(w.geo, g)
		w.sb = append(w.sb, Superblock{UUID: d.id, LoadID: loadID, Name: trimName(d.Meta.Name), StripeIndex: i, StripeCount: len(ts),
			Rows: l.Rows, RowBytes: int(l.RowBytes), DType: dtypeFloat32, LBABytes: t.lbaBytes, RowsPerLBA: int(l.RowsPerLBA), LBAsPerRow: int(l.LBAsPerRow),
			DataLBA: g.dataLBA, DataLBAs: g.dataLBAs, TableLBA: g.tableLBA, TableLBAs: g.tableLBAs, ChunkBytes: chunkBytes, DeviceLBAs: t.lbas,
			RowTableLBA: g.rowTableLBA, RowTableLBAs: g.rowTableLBAs})
		if !o.NoRowChecksums {
			w.sb[i].RowChecksum = checksumCRC32C
		}
	}
	var taken error
	var serial []string
	for _, t := range ts {
		err := t.checkFree(ctx, d, o.Force)
		if err != nil && errs.ClassOf(err) != errs.Refused {
			return LoadReport{}, err
		}
		if err != nil {
			serial = append(serial, t.serial)
			if taken == nil {
				taken = err
			}
		}
	}
	if len(serial) > 1 {
		return LoadReport{}, fmt.Errorf("%w; %d of the %d SSDs hold something: --force %s overwrites all of them", taken, len(serial), len(ts), strings.Join(serial, ","))
	}
	if taken != nil {
		return LoadReport{}, taken
	}
	if err := w.run(ctx); err != nil {
		return LoadReport{}, fmt.Errorf("load of %s: %w", d.dir, err)
	}
	r := LoadReport{SSDs: len(ts), Rows: l.Rows, RowBytes: int(l.RowBytes), RowsPerLBA: int(l.RowsPerLBA), LBAsPerRow: int(l.LBAsPerRow),
		PaddingBytes: l.PaddingBytes(), Layout: l}
	for i, t := range ts {
		r.DataBytes += w.geo[i].dataBytes
		r.Chunks += w.geo[i].chunks
		r.RowChecksums += w.geo[i].rowTableLBAs * int64(t.lbaBytes)
		if t.ssd != nil {
			t.ssd.DataStart = w.geo[i].dataLBA
		}
	}
	r.Duration = time.Since(start)
	r.Seconds = r.Duration.Seconds()
	return r, nil
}

func trimName(s string) string {
	if len(s) > 64 {
		s = s[:64]
	}
	return s
}

type loader struct {
	d   *Dataset
	ts  []*target
	l   gpuio.Layout
	o   LoadOptions
	geo []geometry
	sb  []Superblock
}

// each runs fn for all SSDs at once.
func (w *loader) each(ctx context.Context, fn func(ctx context.Context, i int, t *target) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, t := range w.ts {
		g.Go(func() error {
			if err := fn(ctx, i, t); err != nil {
				return fmt.Errorf("ssd %s: %w", t.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (w *loader) run(ctx context.Context) error {
	if err := w.each(ctx, func(ctx context.Context, i int, t *target) error {
		return w.writeSuperblocks(ctx, i, StateLoading)
	}); err != nil {
		return err
	}
	// What other formats keep at both ends goes, so that no tool takes the SSD for theirs.
	if err := w.each(ctx, func(ctx context.Context, i int, t *target) error {
		g := &w.geo[i]
		zeros := make([]byte, headBytes)
		if err := t.dev.WriteAt(ctx, superblockBytes/nvme.LBA(g.lbaBytes), zeros[superblockBytes:]); err != nil {
			return err
		}
		if err := t.dev.WriteAt(ctx, g.tailLBA, zeros[:tailBytes-superblockBytes]); err != nil {
			return err
		}
		end := g.secondLBA + nvme.LBA(superblockBytes/g.lbaBytes)
		if rest := int64(t.lbas) - int64(end); rest > 0 { // less than 4 KiB beyond the last 4 KiB bound
			return t.dev.WriteAt(ctx, end, zeros[:rest*int64(g.lbaBytes)])
		}
		return nil
	}); err != nil {
		return err
	}
	if err := w.writeData(ctx); err != nil {
		return err
	}
	return w.each(ctx, func(ctx context.Context, i int, t *target) error {
		return w.writeSuperblocks(ctx, i, StateComplete)
	})
}

// writeSuperblocks writes both copies, one after the other, each durable before the next: a
// torn write can then damage only one.
func (w *loader) writeSuperblocks(ctx context.Context, i int, st State) error {
	t := w.ts[i]
	w.sb[i].State = st
	for c, lba := range []nvme.LBA{0, w.geo[i].secondLBA} {
		b, err := w.sb[i].encode(c)
		if err != nil {
			return err
		}
		if err := t.dev.WriteAt(ctx, lba, b); err != nil {
			return err
		}
		if err := t.dev.Flush(ctx); err != nil {
			return err
		}
	}
	return nil
}

// writeData reads features.npy once, from front to back, and deals its rows to the stripes.
func (w *loader) writeData(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	stripes := make([]*stripeWriter, len(w.ts))
	for i := range w.ts {
		stripes[i] = newStripeWriter(w.l, w.geo[i], !w.o.NoRowChecksums)
	}
	g.Go(func() (err error) {
		for _, s := range stripes {
			defer close(s.full)
		}
		row := int64(w.l.RowBytes)
		n := int64(len(stripes))
		buf := make([]byte, max(4<<20/row, 1)*row)
		for at := int64(0); at < w.l.Rows; {
			b := buf[:min(int64(len(buf)), (w.l.Rows-at)*row)]
			if err := w.d.ReadRows(at, b); err != nil {
				return err
			}
			for ; len(b) > 0; at++ {
				if err := stripes[at%n].put(ctx, at/n, b[:row]); err != nil {
					return err
				}
				b = b[row:]
			}
			w.o.Progress.report("load", at, w.l.Rows)
		}
		for _, s := range stripes {
			if err := s.end(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	for i, t := range w.ts {
		g.Go(func() error {
			if err := w.drain(ctx, i, t, stripes[i]); err != nil {
				return fmt.Errorf("ssd %s: %w", t.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// drain writes the chunks and the row table of one stripe as they come, then its chunk table.
func (w *loader) drain(ctx context.Context, i int, t *target, s *stripeWriter) error {
	g := &w.geo[i]
	table := make([]byte, g.tableLBAs*int64(g.lbaBytes))
	data, rows := stream{at: g.dataLBA}, stream{at: g.rowTableLBA}
	c := int64(0)
	for {
		var p piece
		var more bool
		select {
		case p, more = <-s.full:
		case <-ctx.Done():
			return ctx.Err()
		}
		if !more {
			break
		}
		to := &data
		if p.sums {
			to = &rows
			w.sb[i].RowTableCRC = crc32.Update(w.sb[i].RowTableCRC, castagnoli, p.buf)
			p.buf = append(p.buf, zeroBlock[:-len(p.buf)&(alignBytes-1)]...)
		} else {
			binary.LittleEndian.PutUint32(table[4*c:], crc32.Checksum(p.buf, castagnoli))
			c++
		}
		if err := to.write(ctx, t, p.buf); err != nil {
			return err
		}
		s.free <- p.buf[:0] // never blocks: there are as many places as buffers
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if c != g.chunks || rows.bytes != g.rowTableLBAs*int64(g.lbaBytes) {
		return fmt.Errorf("wrote %d chunks of %d and %d bytes of row checksums of %d: the layout and the extents disagree",
			c, g.chunks, rows.bytes, g.rowTableLBAs*int64(g.lbaBytes))
	}
	if err := t.dev.WriteAt(ctx, g.tableLBA, table); err != nil {
		return err
	}
	w.sb[i].TableCRC = crc32.Checksum(table[:4*g.chunks], castagnoli)
	return t.dev.Flush(ctx)
}

// stream is an extent that is written from front to back.
type stream struct {
	at    nvme.LBA
	bytes int64 // written so far
}

func (s *stream) write(ctx context.Context, t *target, b []byte) error {
	if err := t.dev.WriteAt(ctx, s.at, b); err != nil {
		return err
	}
	s.at += nvme.LBA(len(b) / t.lbaBytes)
	s.bytes += int64(len(b))
	return nil
}

// stripeWriter lays rows out as the layout says and cuts the result into chunks; beside them it
// makes the row table.
type stripeWriter struct {
	l       gpuio.Layout
	full    chan piece
	free    chan []byte
	buf     []byte
	pos     int64 // bytes laid out so far
	size    int64
	rowSums bool
	sums    []byte // the row table from its last piece on
}

// piece is up to 1 MiB of a stripe's extent or of its row table.
type piece struct {
	buf  []byte
	sums bool
}

func newStripeWriter(l gpuio.Layout, g geometry, rowSums bool) *stripeWriter {
	s := &stripeWriter{l: l, full: make(chan piece, 2), free: make(chan []byte, 4), size: g.dataBytes, rowSums: rowSums}
	for range cap(s.free) {
		s.free <- make([]byte, 0, chunkBytes)
	}
	return s
}

// slotOffset is where a slot begins in the extent, in bytes.
func slotOffset(l gpuio.Layout, slot int64) int64 {
	per := int64(l.RowsPerLBA)
	return slot/per*int64(l.LBAsPerRow)*int64(l.LBABytes) + slot%per*int64(l.RowBytes)
}

// put lays out a row; slots come in order.
func (s *stripeWriter) put(ctx context.Context, slot int64, row []byte) error {
	if err := s.zeroTo(ctx, slotOffset(s.l, slot)); err != nil {
		return err
	}
	if s.rowSums {
		if err := s.fresh(ctx, &s.sums); err != nil {
			return err
		}
		s.sums = binary.LittleEndian.AppendUint32(s.sums, crc32.Checksum(row, castagnoli))
		if len(s.sums) == chunkBytes {
			if err := s.send(ctx, &s.sums, true); err != nil {
				return err
			}
		}
	}
	return s.append(ctx, row)
}

// fresh gives *b a buffer if it has none.
func (s *stripeWriter) fresh(ctx context.Context, b *[]byte) error {
	if *b != nil {
		return nil
	}
	select {
	case *b = <-s.free:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *stripeWriter) append(ctx context.Context, b []byte) error {
	for len(b) > 0 {
		if err := s.fresh(ctx, &s.buf); err != nil {
			return err
		}
		n := min(len(b), chunkBytes-len(s.buf))
		s.buf = append(s.buf, b[:n]...)
		s.pos += int64(n)
		b = b[n:]
		if len(s.buf) == chunkBytes {
			if err := s.send(ctx, &s.buf, false); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *stripeWriter) send(ctx context.Context, b *[]byte, sums bool) error {
	if len(*b) == 0 {
		return nil
	}
	select {
	case s.full <- piece{*b, sums}:
		*b = nil
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

var zeroBlock [alignBytes]byte

func (s *stripeWriter) zeroTo(ctx context.Context, pos int64) error {
	for s.pos < pos {
		if err := s.append(ctx, zeroBlock[:min(pos-s.pos, alignBytes)]); err != nil {
			return err
		}
	}
	return nil
}

func (s *stripeWriter) end(ctx context.Context) error {
	if err := s.zeroTo(ctx, s.size); err != nil {
		return err
	}
	if err := s.send(ctx, &s.buf, false); err != nil {
		return err
	}
	return s.send(ctx, &s.sums, true)
}
