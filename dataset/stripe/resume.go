package stripe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"time"

	"github.com/google/uuid"

	"helios/nvme"
)

// Mark counts what was durable of a stripe when it was written: both counts hold from then on,
// since a load writes front to back and nothing twice.
type Mark struct {
	Chunks    int64 // of the feature extent
	RowPieces int64 // of the row table, of 1 MiB each
	// Digest is the SHA-256 of the CRC32Cs of those chunks and pieces, 4 bytes each, in the order
	// in which a load has them ready. It tells features.npy from one that has changed since.
	Digest [32]byte
}

// A mark is made when the last one is markEvery ago, and long enough that it costs less than one
// part in markShare of the time: SSDs differ by orders of magnitude in what a flush takes.
const (
	markEvery = time.Second
	markShare = 128
	// markTimeout bounds the last mark of an interrupted load.
	markTimeout = 5 * time.Second
)

func markDue(since, cost time.Duration) bool { return since >= max(markEvery, markShare*cost) }

// A load that goes on reads back this many chunks of a stripe from those before its mark, and as
// many from the rest, evenly: the last ones are what an SSD that lies about flushes loses first.
const resumeSample = 16

// staleError reports that an interrupted load cannot be resumed, and why.
type staleError struct{ why string }

func (e *staleError) Error() string { return e.why }

func stale(format string, a ...any) error { return &staleError{fmt.Sprintf(format, a...)} }

// headway counts what is done of a stripe, on its way through writeData.
type headway struct {
	table  []byte // the chunk table so far, and room for the rest
	chunks int64
	pieces int64  // of the row table so far
	rowCRC uint32 // of it
	digest hash.Hash
	// Chunks of an earlier load, which are not written again. Nil: there are none.
	old  *oldStripe
	kept int64 // bytes of those that are the same as before
}

// oldStripe holds what an interrupted load has left of a stripe.
type oldStripe struct {
	mark     Mark
	complete bool // its superblock says so: mark has no digest, but there are the tables' checksums
	tableCRC uint32
	rowCRC   uint32
	matched  bool // the digest is that of features.npy
	// table has the checksums of the chunks of the dataset as it was; nil: the load was interrupted
	table []byte
}

func newHeadway(g *geometry) *headway {
	return &headway{table: make([]byte, g.tableLBAs*int64(g.lbaBytes)), digest: sha256.New()}
}

func (p *headway) mark() Mark {
	m := Mark{Chunks: p.chunks, RowPieces: p.pieces}
	p.digest.Sum(m.Digest[:0])
	return m
}

// there reports whether the next piece is on the SSD already.
func (p *headway) there(b []byte, sums bool) bool {
	switch {
	case p.old == nil:
		return false
	case p.old.table != nil:
		if sums || p.chunks >= p.old.mark.Chunks ||
			binary.LittleEndian.Uint32(p.old.table[4*p.chunks:]) != crc32.Checksum(b, castagnoli) {
			return false
		}
		p.kept += int64(len(b))
		return true
	case sums:
		return p.pieces < p.old.mark.RowPieces
	}
	return p.chunks < p.old.mark.Chunks
}

// check compares with the mark where it is reached: before the first piece that it does not count.
func (p *headway) check(ssd string) error {
	o := p.old
	if o == nil || o.matched || o.complete || o.mark == (Mark{}) {
		return nil
	}
	switch {
	case p.chunks == o.mark.Chunks && p.pieces == o.mark.RowPieces:
		if p.mark() != o.mark {
			return stale(
				"features.npy is not what ssd %s was loaded from up to here, or its progress mark is damaged",
				ssd)
		}
		o.matched = true
	case p.chunks > o.mark.Chunks || p.pieces > o.mark.RowPieces:
		return stale(
			"ssd %s: its progress mark (%d chunks, %d pieces of the row table) is none that a load makes",
			ssd, o.mark.Chunks, o.mark.RowPieces)
	}
	return nil
}

// checkEnd is check behind the last piece.
func (p *headway) checkEnd(ssd string, tableCRC uint32) error {
	if err := p.check(ssd); err != nil {
		return err
	}
	if o := p.old; o != nil && o.complete && (o.tableCRC != tableCRC || o.rowCRC != p.rowCRC) {
		return stale("features.npy is not what ssd %s was loaded from: the checksums differ", ssd)
	}
	return nil
}

// samples reports whether chunk n, or piece n of the row table, which is there, is read back.
func (p *headway) samples(n int64, sums bool) bool {
	was := p.old.mark.Chunks
	if sums {
		was = p.old.mark.RowPieces
	}
	return n >= was-resumeSample || n%((was+resumeSample-1)/resumeSample) == 0
}

// compare reads back what should be on the SSD.
func compare(ctx context.Context, t *target, start nvme.LBA, want, buf []byte, what string,
	n int64) error {
	got := buf[:len(want)]
	if err := t.dev.ReadAt(ctx, start, got); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return stale("ssd %s: %s %d cannot be read back: %v", t.name, what, n, err)
	}
	if !bytes.Equal(got, want) {
		return stale(
			"ssd %s: %s %d is not what features.npy says, though it was durable: the SSD has lost or changed it, or features.npy has changed",
			t.name, what, n)
	}
	return nil
}

// add counts a piece that is on the SSD.
func (p *headway) add(b []byte, sums bool) {
	crc := binary.LittleEndian.AppendUint32(nil, crc32.Checksum(b, castagnoli))
	p.digest.Write(crc)
	if sums {
		p.rowCRC = crc32.Update(p.rowCRC, castagnoli, b)
		p.pieces++
		return
	}
	copy(p.table[4*p.chunks:], crc)
	p.chunks++
}

// leaveMark makes what is on the SSD durable and says so in both superblocks. A mark that says no
// more than the one before is not made.
func (w *loader) leaveMark(ctx context.Context, i int, p *headway) error {
	// Not before what is there has been told from a features.npy that changed.
	if err := p.check(w.ts[i].name); err != nil {
		return err
	}
	m := p.mark()
	if m.Chunks+m.RowPieces == 0 || m.Chunks < w.sb[i].Mark.Chunks ||
		m.RowPieces < w.sb[i].Mark.RowPieces || m == w.sb[i].Mark || p.old != nil &&
		p.old.complete {
		return nil
	}
	start := time.Now()
	if err := w.ts[i].dev.Flush(ctx); err != nil {
		return err
	}
	was := w.sb[i].Mark
	w.sb[i].Mark = m
	if err := w.writeSuperblocks(ctx, i, StateLoading); err != nil {
		w.sb[i].Mark = was
		return err
	}
	w.marked(i, time.Since(start))
	return nil
}

// lastMark is the mark of a load that is being interrupted: it saves what markEvery would cost. It
// is not needed, so errors do not count.
func (w *loader) lastMark(ctx context.Context, i int, p *headway) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout)
	defer cancel()
	_ = w.leaveMark(ctx, i, p)
}

// worthResuming reports whether there is anything to lose: a mark, or stripes of a load that others
// have finished.
func (w *loader) worthResuming(found []placed) bool {
	loading, finished := map[uuid.UUID]bool{}, map[uuid.UUID]bool{}
	for _, r := range found {
		c := &r.c
		for k, sb := range c.sb {
			switch {
			case c.err[k] != nil || sb.UUID != w.d.UUID() || sb.State == StateFree:
			case sb.State == StateComplete:
				finished[sb.LoadID] = true
			case sb.Mark != Mark{}:
				return true
			default:
				loading[sb.LoadID] = true
			}
		}
	}
	for id := range finished {
		if loading[id] {
			return true
		}
	}
	return false
}

// resumable looks for an interrupted load on the SSDs that this one may resume: the same dataset,
// layout and options on the same SSDs in the same order. why is the reason that there is one that
// cannot be resumed; it is empty where there is none.
func (w *loader) resumable(found []placed) (old []oldStripe, id uuid.UUID, why string) {
	if !w.worthResuming(found) {
		return nil, id, ""
	}
	old = make([]oldStripe, len(found))
	var first Superblock
	for i := range found {
		sb, err := found[i].c.loading()
		if err != nil {
			return nil, id, fmt.Sprintf("ssd %s: %v", w.ts[i].name, err)
		}
		if i == 0 {
			first = sb
		}
		if why := w.unlike(i, len(found), &sb, &first); why != "" {
			return nil, id, why
		}
		old[i] = oldStripe{mark: sb.Mark}
		if sb.State == StateComplete {
			old[i] = oldStripe{mark: Mark{Chunks: w.geo[i].chunks, RowPieces: w.geo[i].rowPieces()},
				complete: true, tableCRC: sb.TableCRC, rowCRC: sb.RowTableCRC}
		}
	}
	return old, first.LoadID, ""
}

// asItWas returns the stripes of the dataset as it was before imports added to it, where they begin
// where this load's do. Its rows come first on each SSD, so most chunks stay the same, as their
// checksums show. Stripes that begin elsewhere, or whose checksums are damaged, are written whole;
// nil: all are.
func (w *loader) asItWas(ctx context.Context, found []placed) []oldStripe {
	old, any := make([]oldStripe, len(found)), false
	for i := range found {
		old[i].matched = true
		c := &found[i].c
		s, own := stripe{w.ts[i], c.sb[0]}, &w.sb[i]
		if !w.was[i] || !c.alike() || s.sb.State != StateComplete || s.sb.computed() ||
			s.sb.DataLBA != own.DataLBA || w.o.Restart {
			continue
		}
		if s.sb.StripeIndex != i || s.sb.StripeCount != own.StripeCount ||
			s.sb.RowType != own.RowType || s.sb.RowBytes != own.RowBytes {
			continue // its chunks are others: a checksum that is the same by chance shows nothing
		}
		table, err := s.chunkTable(ctx)
		if err != nil {
			continue
		}
		n := s.sb.DataLBAs * int64(s.sb.LBABytes) / chunkBytes // whole ones
		old[i], any = oldStripe{mark: Mark{Chunks: n}, matched: true, table: table}, true
	}
	if !any {
		return nil
	}
	return old
}

// unlike returns the difference between the stripe of an interrupted load on SSD i of n and that of
// this load; first is the stripe on the first SSD.
func (w *loader) unlike(i, n int, sb, first *Superblock) string {
	name, own := w.ts[i].name, &w.sb[i]
	switch {
	case sb.UUID != w.d.UUID():
		return fmt.Sprintf("ssd %s holds another dataset, %q (%s)", name, sb.Name, sb.UUID)
	case sb.StripeCount != n:
		return fmt.Sprintf("ssd %s was loaded with one of %d stripes, now there are %d", name,
			sb.StripeCount, n)
	case sb.StripeIndex != i:
		return fmt.Sprintf(
			"ssd %s holds stripe %d and is given as number %d: the order of the SSDs has changed",
			name, sb.StripeIndex, i)
	case sb.LoadID != first.LoadID:
		return fmt.Sprintf("ssds %s and %s hold stripes of different loads", w.ts[0].name, name)
	case sb.RowType != own.RowType:
		return fmt.Sprintf("ssd %s was being loaded with rows of %s, now they are %s", name,
			sb.RowType, own.RowType)
	case sb.RowChecksum != own.RowChecksum:
		return fmt.Sprintf("ssd %s was being loaded with another choice of row checksums", name)
	}
	same := *sb
	same.LoadID, same.State, same.Name = own.LoadID, own.State, own.Name
	same.Mark, same.TableCRC, same.RowTableCRC = Mark{}, 0, 0
	same.Shared = own.Shared // another dataset may have come, or gone
	if same != *own {
		return fmt.Sprintf("ssd %s was being loaded in another layout (%d rows of %d bytes)", name,
			sb.Rows, sb.RowBytes)
	}
	return ""
}

// loading returns the superblock of a load that did not end. Where they differ in no
// more than how far it was, since it was cut off while it wrote them, the less holds.
func (c *copies) loading() (Superblock, error) {
	switch {
	case c.err[0] != nil && c.err[1] != nil:
		return Superblock{}, fmt.Errorf("no superblock of that load: %w; was it replaced?",
			c.err[0])
	case c.err[0] != nil:
		return c.sb[1], nil
	case c.err[1] != nil || c.sb[0] == c.sb[1]:
		return c.sb[0], nil
	}
	a, b := c.sb[0], c.sb[1] // a is to say less
	if b.State == StateLoading && (a.State == StateComplete || a.Mark.holds(b.Mark)) {
		a, b = b, a
	}
	ok := a.State == StateLoading && (b.State == StateComplete || b.Mark.holds(a.Mark))
	b.State, b.Mark, b.TableCRC, b.RowTableCRC = a.State, a.Mark, a.TableCRC, a.RowTableCRC
	b.Shared = a.Shared
	if !ok || a != b {
		return Superblock{}, errors.New("its two superblocks disagree")
	}
	return a, nil
}

// settled ends a change of the superblocks that was cut off, forwards or back, for both to say.
func (c *copies) settled() (Superblock, error) {
	sb, _, err := c.best()
	if err == nil && sb.State == StateLoading {
		if less, err := c.loading(); err == nil {
			return less, nil
		}
	}
	return sb, err
}

// alike reports whether both superblocks are there and say the same.
func (c *copies) alike() bool {
	return c.err[0] == nil && c.err[1] == nil && c.sb[0] == c.sb[1]
}

// holds reports whether all that less counts is counted by m, too, as far as the counts tell.
func (m Mark) holds(less Mark) bool {
	if m.Chunks == less.Chunks && m.RowPieces == less.RowPieces {
		return m == less
	}
	return m.Chunks >= less.Chunks && m.RowPieces >= less.RowPieces
}

// bytesOn returns how much of the feature extent m says is on the SSD.
func (g *geometry) bytesOn(m Mark) int64 { return min(m.Chunks*chunkBytes, g.dataBytes) }

// OnFlash returns how many bytes of the stripe's feature extent an interrupted load has left
// durable, as its progress mark says, and how many there are.
func (s *Superblock) OnFlash() (bytes, total int64) {
	total = s.DataLBAs * int64(s.LBABytes)
	if s.State == StateComplete {
		return total, total
	}
	return min(s.Mark.Chunks*chunkBytes, total), total
}

// howFar is for messages about a load that did not end.
func (s *Superblock) howFar() string {
	if n, all := s.OnFlash(); n > 0 {
		return fmt.Sprintf(" (%.0f %% of its stripe is there, and the next load goes on there)",
			100*float64(n)/float64(all))
	}
	return ""
}
