package stripe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/work"
	"helios/nvme"
)

// VerifyOptions shape a verification.
type VerifyOptions struct {
	// Source also compares every row with features.npy.
	Source bool
	// MaxBad stops collecting after so many findings (1000); counting goes on.
	MaxBad   int
	Progress work.Progress
}

// BadChunk is one finding of Verify.
type BadChunk struct {
	SSD    string `json:"ssd"`
	Stripe int    `json:"stripe"`
	// of 1 MiB; -1 for a superblock, the checksum table or pages
	Chunk  int64    `json:"chunk"`
	LBA    nvme.LBA `json:"lba"`
	Blocks int64    `json:"blocks"`
	What   string   `json:"what"`
	// Rows are the first rows that end in this chunk and whose own checksum is wrong.
	Rows []int64 `json:"rows,omitempty"`
	Pack string  `json:"pack,omitempty"` // of the pages, where it is about some
}

// VerifyReport counts the bytes that were read, and lists the faults.
type VerifyReport struct {
	SSDs int `json:"ssds"`
	// of the rows on the SSDs; "mixed" where they differ
	RowDType     string     `json:"row_dtype,omitempty"`
	RowBytes     int        `json:"row_bytes,omitempty"` // 0: they differ
	Chunks       int64      `json:"chunks"`
	Bytes        int64      `json:"bytes"`
	RowsCompared int64      `json:"rows_compared"` // with features.npy
	RowsChecked  int64      `json:"rows_checked"`  // against their own checksums
	BadRows      int64      `json:"bad_rows"`      // whose own checksum is wrong
	Pages        int64      `json:"pages"`         // prepared ones, beside the rows
	BadPages     int64      `json:"bad_pages"`     // findings among them
	BadCount     int64      `json:"bad_count"`
	Bad          []BadChunk `json:"bad"`
	Notes        []string   `json:"notes,omitempty"`
	// what load has written, of SSDs with a complete stripe
	Extents  []SSDExtents  `json:"extents"`
	Seconds  float64       `json:"seconds"`
	Duration time.Duration `json:"-"`
}

// Verify reads everything back and compares it with the checksums of chunks and, where the stripe
// has them, of rows, and with features.npy if asked. It takes 4 bytes a row and 1 MiB an SSD. The
// report lists what is bad; the error, of class device, sums it up. An SSD whose superblocks are
// gone fails as in Find.
func Verify(ctx context.Context, d *dataset.Dataset, ssds []*gpuio.SSD,
	o VerifyOptions) (r VerifyReport, err error) {
	err = withTargets(ctx, ssds, func(ts []*target) error {
		r, err = verify(ctx, d, ts, o)
		return err
	})
	return r, err
}

// VerifySSDs reads back what each SSD holds by itself: its superblocks, its checksum table and its
// chunks. It needs no dataset directory and not all stripes; there is nothing to compare rows with,
// so VerifyOptions.Source does not apply. An SSD without an intact superblock, or with an
// interrupted load, is a finding.
func VerifySSDs(ctx context.Context, ssds []*gpuio.SSD, o VerifyOptions) (r VerifyReport,
	err error) {
	err = withTargets(ctx, ssds, func(ts []*target) error {
		r, err = verifyEach(ctx, ts, o)
		return err
	})
	return r, err
}

func verifyEach(ctx context.Context, ts []*target, o VerifyOptions) (VerifyReport, error) {
	o.Source = false
	v := newVerifier(nil, o)
	var stripes []stripe
	for _, t := range ts {
		all, err := t.contents(ctx)
		if err != nil {
			return v.r, err
		}
		for _, h := range all {
			s := stripe{h.t, h.sb}
			blocks := superblockBytes / int64(t.lbaBytes)
			switch {
			case h.err != nil:
				v.bad(s, -1, h.t.copyLBA(0), blocks, "%v", h.err)
				continue
			case !h.there():
				v.note("ssd %s: a dataset was unloaded from it", t.name)
				continue
			case h.sb.State != StateComplete:
				v.bad(s, -1, h.t.copyLBA(0), blocks,
					"loading dataset %q onto it did not finish%s", h.sb.Name, h.sb.howFar())
				continue
			case h.note != "":
				v.note("ssd %s: %s", t.name, h.note)
			}
			stripes = append(stripes, s)
		}
	}
	v.r.SSDs = len(ts)
	return v.run(ctx, stripes)
}

type verifier struct {
	d     *dataset.Dataset // nil in VerifySSDs
	o     VerifyOptions
	l     gpuio.Layout // of the dataset, for comparing rows
	start time.Time

	noRows  bool      // memory has no room for the checksums of rows
	badPack uuid.UUID // of the first bad page; guarded by mu

	mu    sync.Mutex
	r     VerifyReport
	done  int64
	total int64
}

func newVerifier(d *dataset.Dataset, o VerifyOptions) *verifier {
	if o.MaxBad <= 0 {
		o.MaxBad = 1000
	}
	return &verifier{d: d, o: o, start: time.Now(), r: VerifyReport{Bad: []BadChunk{}}}
}

func verify(ctx context.Context, d *dataset.Dataset, ts []*target, o VerifyOptions) (VerifyReport,
	error) {
	v := newVerifier(d, o)
	stripes, err := attach(ctx, d, ts,
		AttachOptions{Note: func(s string) { v.r.Notes = append(v.r.Notes, s) }})
	if err != nil {
		return v.r, err
	}
	v.l = stripes[0].sb.layout()
	v.r.SSDs = len(namesOf(targetsIn(stripes)))
	v.wholePacks(stripes)
	return v.run(ctx, stripes)
}

// run checks all stripes at once and sums up.
func (v *verifier) run(ctx context.Context, stripes []stripe) (VerifyReport, error) {
	if err := v.measure(stripes); err != nil {
		return v.r, err
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, s := range stripes {
		g.Go(func() error {
			if err := v.stripe(gctx, s); err != nil {
				return err
			}
			return v.pages(gctx, s)
		})
	}
	err := g.Wait()
	v.r.Duration = time.Since(v.start)
	v.r.Seconds = v.r.Duration.Seconds()
	slices.SortFunc(v.r.Bad, func(a, b BadChunk) int { // SSDs are read at once
		return cmp.Or(strings.Compare(a.SSD, b.SSD), cmp.Compare(a.Chunk, b.Chunk),
			cmp.Compare(a.LBA, b.LBA), strings.Compare(a.What, b.What))
	})
	return v.r, v.verdict(err)
}

// measure adds up what there is to read, and whether memory has room for the rows' checksums.
func (v *verifier) measure(stripes []stripe) error {
	var sums int64
	for i, s := range stripes {
		e, err := extentsOf(s.t, &s.sb)
		if err != nil {
			return err
		}
		if t := s.sb.RowType.String(); i == 0 {
			v.r.RowDType, v.r.RowBytes = t, s.sb.RowBytes
		} else if v.r.RowDType != t || v.r.RowBytes != s.sb.RowBytes {
			v.r.RowDType, v.r.RowBytes = "mixed", 0
		}
		v.r.Extents = append(v.r.Extents, e)
		v.total += s.sb.DataLBAs*int64(s.sb.LBABytes) + s.pageBytes()
		l := s.sb.layout()
		sums += l.RowsOn(s.sb.StripeIndex) * s.sb.rowEntry() / 4
	}
	if err := RoomForSums(sums); err != nil { // chunks have theirs
		v.noRows = true
		v.r.Notes = append(v.r.Notes,
			fmt.Sprintf("rows are checked by the checksums of their chunks only: %v", err))
	}
	return nil
}

// verdict is the error of a check that ended with err, with the next step.
func (v *verifier) verdict(err error) error {
	what, again := "the SSDs", "heliosctl load"
	if v.d != nil {
		what, again = "dataset "+v.d.Dir(), again+" "+errs.Key("dataset").Flag()+" "+v.d.Dir()
	}
	if err != nil {
		return fmt.Errorf("verify %s: %w", what, err)
	}
	if v.r.BadCount == 0 {
		return nil
	}
	b, pages := v.r.Bad[0], ""
	if v.r.Pages > 0 {
		pages = fmt.Sprintf(" and %d pages", v.r.Pages)
	}
	next := fmt.Sprintf("load it again with %q", again)
	switch {
	case v.r.BadPages == v.r.BadCount:
		next = pageAdvice(v.badPack)
	case v.r.BadPages > 0: // a load needs consent then, and removes the pages, too
		next += "; " + pageAdvice(v.badPack)
	}
	return errs.New(errs.Device,
		"%s: faults found: %d in %d chunks%s, the first on ssd %s at LBA %d+%d: %s; %s",
		what, v.r.BadCount, v.r.Chunks, pages, b.SSD, b.LBA, b.Blocks, b.What, next)
}

func (v *verifier) bad(s stripe, chunk int64, lba nvme.LBA, blocks int64, format string, a ...any) {
	v.badRows(s, chunk, lba, blocks, nil, format, a...)
}

func (v *verifier) badRows(s stripe, chunk int64, lba nvme.LBA, blocks int64, rows []int64,
	format string, a ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.record(BadChunk{SSD: s.t.name, Stripe: s.sb.StripeIndex, Chunk: chunk, LBA: lba,
		Blocks: blocks, What: fmt.Sprintf(format, a...), Rows: rows})
}

// record keeps a finding. Needs v.mu.
func (v *verifier) record(b BadChunk) {
	v.r.BadCount++
	if len(v.r.Bad) < v.o.MaxBad {
		v.r.Bad = append(v.r.Bad, b)
	}
}

// rowTable reads the stripe's row table, by slot; nil where it has none, or none that can be used.
func (v *verifier) rowTable(ctx context.Context, s stripe) (sums []uint32, scales []float32,
	err error) {
	if s.sb.rowEntry() == 0 || v.noRows && !s.sb.RowType.Scaled() {
		return nil, nil, nil
	}
	l := s.sb.layout()
	n := l.RowsOn(s.sb.StripeIndex)
	if s.sb.hasRowSums() && !v.noRows {
		sums = make([]uint32, n)
	}
	if s.sb.RowType.Scaled() && v.o.Source && !v.noRows {
		scales = make([]float32, n)
	}
	if err := s.rowTable(ctx, func(slot int64, sum uint32, scale float32) {
		if sums != nil {
			sums[slot] = sum
		}
		if scales != nil {
			scales[slot] = scale
		}
	}); err != nil {
		if ctx.Err() != nil {
			return nil, nil, err
		}
		v.bad(s, -1, s.sb.RowTableLBA, s.sb.RowTableLBAs, "%s: %v", s.sb.rowTableName(), err)
		return nil, nil, nil
	}
	return sums, scales, nil
}

// superblocks checks both superblocks of an SSD.
func (v *verifier) superblocks(ctx context.Context, s stripe) error {
	c, err := s.t.readCopies(ctx)
	if err != nil {
		return err
	}
	for i, cerr := range c.err {
		if cerr == nil {
			continue
		}
		mend := ""
		if s.sb.Pages.n > 0 {
			mend = "; making or removing pages writes it anew"
		}
		v.bad(s, -1, s.t.copyLBA(i), superblockBytes/int64(s.sb.LBABytes), "superblock %d of 2: %v%s", i+1,
			cerr, mend)
	}
	return nil
}

// stripe checks one SSD. Only the end of ctx and errors of features.npy stop it.
func (v *verifier) stripe(ctx context.Context, s stripe) error {
	if err := v.superblocks(ctx, s); err != nil {
		return err
	}
	table, err := s.chunkTable(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		v.bad(s, -1, s.sb.TableLBA, s.sb.TableLBAs, "checksum table: %v", err)
	}
	sums, scales, err := v.rowTable(ctx, s)
	if err != nil {
		return err
	}
	l := s.sb.layout()
	c := chunkReader{verifier: v, s: s, table: table, cmp: newComparer(v, s, scales),
		rows: rowChecker{l: l, n: l.RowsOn(s.sb.StripeIndex), sums: sums},
		buf:  make([]byte, chunkBytes)}
	size := s.sb.DataLBAs * int64(s.sb.LBABytes)
	for i := int64(0); i*chunkBytes < size; i++ {
		n := min(chunkBytes, size-i*chunkBytes)
		if err := c.check(ctx, i, n); err != nil {
			return err
		}
		v.mu.Lock()
		v.r.Chunks++
		v.r.Bytes += n
		v.done += n
		v.o.Progress.Report("verify", v.done, v.total)
		v.mu.Unlock()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.r.RowsCompared += c.cmp.rows
	v.r.RowsChecked += c.rows.checked
	v.r.BadRows += c.badRows
	return nil
}

// chunkReader checks the chunks of a stripe, one after the other.
type chunkReader struct {
	*verifier
	s       stripe
	table   []byte // checksums of chunks; nil: they cannot be used
	rows    rowChecker
	cmp     *comparer
	buf     []byte
	badRows int64
}

// check reads chunk i, of n bytes, and compares it with its checksum, those of its rows and, where
// that is asked for, the source.
func (c *chunkReader) check(ctx context.Context, i, n int64) error {
	sb := &c.s.sb
	lba := int64(sb.LBABytes)
	start := sb.DataLBA + nvme.LBA(i*chunkBytes/lba)
	b := c.buf[:n]
	if err := c.s.t.dev.ReadAt(ctx, start, b); err != nil {
		if ctx.Err() != nil {
			return err
		}
		c.bad(c.s, i, start, n/lba, "%v", err)
		c.cmp.skip(n)
		c.rows.chunk(nil, n)
		return nil
	}
	fault := ""
	if c.table != nil {
		want := binary.LittleEndian.Uint32(c.table[4*i:])
		if got := crc32.Checksum(b, castagnoli); got != want {
			fault = fmt.Sprintf("CRC32C %08x, the table says %08x", got, want)
		}
	}
	wrong, count := c.rows.chunk(b, n)
	c.badRows += count
	if count > 0 {
		for k, slot := range wrong {
			wrong[k] = slot*int64(c.rows.l.SSDs) + int64(sb.StripeIndex)
		}
		fault = strings.TrimPrefix(fault+"; "+wrongRows(wrong, count), "; ")
	}
	if fault != "" {
		c.verifier.badRows(c.s, i, start, n/lba, wrong, "%s", fault)
	}
	if c.o.Source {
		return c.cmp.chunk(i, start, b)
	}
	return nil
}

// wrongRows names rows whose checksum is wrong.
func wrongRows(rows []int64, count int64) string {
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = strconv.FormatInt(r, 10)
	}
	text := "row " + names[0] + " is not what its checksum says"
	if len(rows) > 1 {
		text = "rows " + strings.Join(names, ", ")
		if more := count - int64(len(rows)); more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		text += " are not what their checksums say"
	}
	return text
}

// comparer lays out what features.npy says a stripe must hold, alongside the reads.
type comparer struct {
	v    *verifier
	s    stripe
	pos  int64 // bytes of the extent done
	rows int64
	from *dataset.RowReader
	want []byte
	row  []byte
	have int64 // slot that row holds; -1 none
	// by slot, as the row table has them; nil: they are not compared
	scales []float32
}

func newComparer(v *verifier, s stripe, scales []float32) *comparer {
	c := &comparer{v: v, s: s, row: make([]byte, s.sb.RowBytes), have: -1, scales: scales}
	if v.d != nil {
		c.from = v.d.RowsAs(s.sb.RowType)
	}
	return c
}

func (c *comparer) skip(n int64) { c.pos += n }

// chunk compares b, the extent's bytes from pos on. One finding a chunk is enough.
func (c *comparer) chunk(i int64, start nvme.LBA, b []byte) error {
	l := c.v.l
	row := int64(l.RowBytes)
	onSSD := l.RowsOn(c.s.sb.StripeIndex)
	c.want = append(c.want[:0], make([]byte, len(b))...)
	// The first slot that reaches into this chunk.
	unit := int64(l.LBAsPerRow) * int64(l.LBABytes) // padded slot, or LBA of packed rows
	slot := c.pos / unit * int64(l.RowsPerLBA)
	first, scaled, end := int64(-1), int64(-1), c.pos+int64(len(b))
	for ; slot < onSSD && slotOffset(l, slot) < end; slot++ {
		off := slotOffset(l, slot)
		if off+row <= c.pos {
			continue
		}
		if c.have != slot {
			var scale [1]float32
			v := slot*int64(l.SSDs) + int64(c.s.sb.StripeIndex)
			if err := c.from.ReadScaled(v, c.row, scale[:]); err != nil {
				return err
			}
			c.have = slot
			if c.scales != nil && c.scales[slot] != scale[0] && scaled < 0 {
				scaled = v
			}
			c.rows++
		}
		from := max(off, c.pos)
		copy(c.want[from-c.pos:], c.row[from-off:])
		if first < 0 && !bytes.Equal(b[from-c.pos:min(off+row, end)-c.pos],
			c.row[from-off:min(off+row, end)-off]) {
			first = slot*int64(l.SSDs) + int64(c.s.sb.StripeIndex)
		}
	}
	switch {
	case first >= 0:
		c.v.bad(c.s, i, start, int64(len(b))/int64(l.LBABytes), "row %d differs from %s", first,
			c.v.d.RowSource())
	case !bytes.Equal(c.want, b):
		c.v.bad(c.s, i, start, int64(len(b))/int64(l.LBABytes), "padding is not zero")
	}
	if scaled >= 0 {
		c.v.bad(c.s, -1, c.s.sb.RowTableLBA, c.s.sb.RowTableLBAs, "the scale of row %d differs from %s",
			scaled, c.v.d.RowSource())
	}
	c.pos = end
	return nil
}
