package stripe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"sync"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/work"
)

// ComputedOptions say what a computed SSD holds. The zero value of a field is its default.
type ComputedOptions struct {
	Stripe, Stripes int
	LBABytes        int          // 512 or 4096
	Bytes           int64        // of the SSD; 0: as few as the stripe needs
	Type            rowtype.Type // of the rows
	NoRowChecksums  bool
	// NoSums leaves all checksums out: rows are not compared with any, and nobody verifies the SSD.
	NoSums bool
	// Sums are the checksums of the tables, where they are known already; nil computes them, which
	// looks at every row: 5 ns for each float32 row, as long as making it for the others.
	Sums     *ComputedSums
	Progress work.Progress

	loadID uuid.UUID // for tests
}

// ComputedSums hold what a computed SSD's superblock says that takes time to find out.
type ComputedSums struct {
	Table    uint32 `json:"table"`     // CRC32C of the checksums of chunks
	RowTable uint32 `json:"row_table"` // of the checksums of rows
}

// Computed is the content of an SSD that holds one stripe of a dataset with a feature function, as
// load would have written it to an SSD of zeros: superblocks, rows, the checksums of chunks and
// rows, all computed when they are read. It takes a few MiB of memory whatever the dataset's size,
// and is safe for concurrent use.
//
// Without checksums (ComputedOptions.NoSums) the rows may be in features.npy, too, from which they
// are read.
type Computed struct {
	sb       Superblock
	g        geometry
	l        gpuio.Layout
	enc      *rowEncoder      // of the feature function
	files    *dataset.Dataset // that has none
	size     int64
	super    [2][]byte
	unit     int64 // bytes of a padded row, or of an LBA of packed ones
	perUnit  int64 // rows in a unit
	unitTail shiftTable
	pieces   sync.Pool // *[]byte of a unit
}

// NewComputed prepares stripe o.Stripe of o.Stripes of d. Errors are of class usage, or capability
// where d has no rows.
func NewComputed(ctx context.Context, d *dataset.Dataset, o ComputedOptions) (*Computed, error) {
	if err := needRows(d); err != nil && !o.NoSums {
		return nil, err
	}
	o.NoRowChecksums = o.NoRowChecksums || o.NoSums
	c := &Computed{files: d}
	rows, dim := d.Meta.Stored()
	row := int64(d.Meta.RowType().RowBytes(dim))
	if fn := d.FeatureFunc(); fn != nil {
		c.files, c.enc = nil, newRowEncoder(fn, o.Type)
		row = int64(c.enc.bytes)
	} else if !o.NoSums {
		return nil, errs.New(errs.Usage,
			"dataset %s has its rows in %s: only rows of a feature function can be computed; make one with {feature-fn} hash, or bind other SSDs and load it",
			d.Dir(), dataset.FeaturesName)
	}
	if o.Stripes < 1 || o.Stripe < 0 || o.Stripe >= o.Stripes ||
		c.files != nil && o.Stripes > 1 { // runs of rows are read from the file
		return nil, errs.New(errs.Usage, "stripe %d of %d: there is none", o.Stripe, o.Stripes)
	}
	var err error
	if c.l, err = gpuio.NewLayout(rows, int(row), o.Stripes, o.LBABytes); err != nil {
		return nil, err
	}
	if c.size = o.Bytes; c.size == 0 {
		// as large as can be, to learn the need
		g, err := newGeometry(c.l, o.Stripe, o.LBABytes, maxStripe/uint64(o.LBABytes),
			rowEntry(o.Type, !o.NoRowChecksums))
		if err != nil {
			return nil, fmt.Errorf("stripe %d of %d of %s: %w", o.Stripe, o.Stripes, d.Dir(), err)
		}
		c.size = g.needBytes
	}
	lbas := uint64(c.size / int64(o.LBABytes))
	if c.g, err = newGeometry(c.l, o.Stripe, o.LBABytes, lbas,
		rowEntry(o.Type, !o.NoRowChecksums)); err != nil {
		return nil, errs.Errorf("stripe %d of %d of %s: %w; leave {size} out, or give a larger one",
			o.Stripe, o.Stripes, d.Dir(), err)
	}
	c.unit = int64(c.l.LBAsPerRow) * int64(c.l.LBABytes)
	c.perUnit = int64(c.l.RowsPerLBA)
	c.unitTail = shiftBy(c.unit - c.perUnit*row)
	c.pieces.New = func() any { b := make([]byte, c.unit); return &b }
	id := o.loadID
	if id == (uuid.UUID{}) {
		id = computedID(d, o)
	}
	c.sb = newSuperblock(d, &c.l, &c.g, o.Stripe, o.Type, lbas, !o.NoRowChecksums)
	c.sb.LoadID, c.sb.State = id, StateComplete
	if o.NoSums {
		o.Sums = &ComputedSums{}
	}
	if o.Sums == nil {
		if o.Sums, err = c.sums(ctx, o.Progress); err != nil {
			return nil, err
		}
	}
	c.sb.TableCRC, c.sb.RowTableCRC = o.Sums.Table, o.Sums.RowTable
	for i := range c.super {
		if c.super[i], err = c.sb.encode(i); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// computedID is the same for all stripes that belong together, whenever they are bound.
func computedID(d *dataset.Dataset, o ComputedOptions) (id uuid.UUID) {
	sum := sha256.Sum256(fmt.Appendf(nil, "computed %s %d %d %s %v", d.UUID(), o.Stripes,
		o.LBABytes, o.Type, o.NoRowChecksums))
	if o.NoSums {
		sum = sha256.Sum256(append(sum[:], "no sums"...))
	}
	copy(id[:], sum[:])
	id[6] = id[6]&0x0f | 0x80 // RFC 9562 section 5.8, version 8
	id[8] = id[8]&0x3f | 0x80
	return id
}

// Size is the SSD's, in bytes.
func (c *Computed) Size() int64 { return c.size }

// Sums are to be given to NewComputed the next time.
func (c *Computed) Sums() ComputedSums { return ComputedSums{c.sb.TableCRC, c.sb.RowTableCRC} }

// ReadAt implements io.ReaderAt.
func (c *Computed) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off > c.size {
		return 0, fmt.Errorf("computed SSD of %d bytes: read at %d", c.size, off)
	}
	n := len(p)
	if int64(n) > c.size-off {
		n = int(c.size - off)
	}
	lba := int64(c.sb.LBABytes)
	for offset := 0; offset < n; {
		b, pos := p[offset:n], off+int64(offset)
		did := 0
		for _, r := range []struct {
			from, bytes int64
			read        func(b []byte, pos int64) error
		}{
			{int64(c.g.dataLBA) * lba, c.g.dataBytes, c.rows},
			{0, superblockBytes, never(func(b []byte, pos int64) { copy(b, c.super[0][pos:]) })},
			{int64(c.g.tableLBA) * lba, 4 * c.g.chunks, never(c.table)},
			{int64(c.g.rowTableLBA) * lba, c.rowTableBytes(), never(c.rowTable)},
			{int64(c.g.secondLBA) * lba, superblockBytes,
				never(func(b []byte, pos int64) { copy(b, c.super[1][pos:]) })},
		} {
			if r.bytes == 0 || pos >= r.from+r.bytes {
				continue
			}
			if pos < r.from { // what comes first, and nothing is here
				b = b[:min(int64(len(b)), r.from-pos)]
				continue
			}
			b = b[:min(int64(len(b)), r.from+r.bytes-pos)]
			if err := r.read(b, pos-r.from); err != nil {
				return offset, err
			}
			did = len(b)
			break
		}
		if did == 0 {
			clear(b)
			did = len(b)
		}
		offset += did
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// never gives the error of a read that can't fail.
func never(read func(b []byte, pos int64)) func(b []byte, pos int64) error {
	return func(b []byte, pos int64) error {
		read(b, pos)
		return nil
	}
}

// rows computes or reads the feature extent from pos on.
func (c *Computed) rows(b []byte, pos int64) error {
	if c.files == nil {
		c.data(b, pos)
		return nil
	}
	for len(b) > 0 {
		u := pos / c.unit
		from := pos - u*c.unit
		if n := int64(len(b)) / c.unit; from == 0 && n > 0 {
			if err := c.readUnits(b[:n*c.unit], u); err != nil {
				return err
			}
			b, pos = b[n*c.unit:], pos+n*c.unit
			continue
		}
		whole := c.pieces.Get().(*[]byte)
		err := c.readUnits(*whole, u)
		n := copy(b, (*whole)[from:])
		c.pieces.Put(whole)
		if err != nil {
			return err
		}
		b, pos = b[n:], pos+int64(n)
	}
	return nil
}

// readUnits reads whole units from unit u on.
func (c *Computed) readUnits(b []byte, u int64) error {
	if c.files.Meta.Rows() == 0 {
		clear(b)
		return nil
	}
	row := int64(c.files.Meta.RowBytes())
	step := c.unit
	if c.perUnit*row == c.unit { // rows stand as they do in the file
		step = int64(len(b))
	}
	for ; len(b) > 0; b, u = b[step:], u+step/c.unit {
		first := u * c.perUnit
		n := max(min(step/c.unit*c.perUnit, c.g.rows-first), 0) * row
		clear(b[n:step])
		if n == 0 {
			continue
		}
		if err := c.files.ReadRows(c.rowOf(first), b[:n]); err != nil {
			return err
		}
	}
	return nil
}

func (c *Computed) rowTableBytes() int64 { return c.g.rowEntry * c.g.rows }

// rowOf is the row in a slot of this stripe.
func (c *Computed) rowOf(slot int64) int64 {
	return slot*int64(c.sb.StripeCount) + int64(c.sb.StripeIndex)
}

// data computes the feature extent from pos on.
func (c *Computed) data(b []byte, pos int64) {
	for len(b) > 0 {
		u := pos / c.unit
		from := pos - u*c.unit
		n := min(c.unit-from, int64(len(b)))
		if from == 0 && n == c.unit {
			c.fillUnit(b[:n], u)
		} else if row := int64(c.enc.bytes); c.perUnit > 1 && from%row == 0 && n == row &&
			from/row < c.perUnit {
			// one packed row
			c.fillRow(b[:n], u*c.perUnit+from/row)
		} else {
			whole := c.pieces.Get().(*[]byte)
			c.fillUnit(*whole, u)
			copy(b[:n], (*whole)[from:])
			c.pieces.Put(whole)
		}
		b, pos = b[n:], pos+n
	}
}

func (c *Computed) fillUnit(b []byte, u int64) {
	row := int64(c.enc.bytes)
	for k := range c.perUnit {
		c.fillRow(b[k*row:][:row], u*c.perUnit+k)
	}
	clear(b[c.perUnit*row:])
}

// fillRow computes a slot; behind the last one there are zeros.
func (c *Computed) fillRow(b []byte, slot int64) {
	if slot >= c.g.rows {
		clear(b)
		return
	}
	c.enc.encode(c.rowOf(slot), b)
}

// table computes the chunk checksums from pos on.
func (c *Computed) table(b []byte, pos int64) {
	if c.files != nil {
		clear(b)
		return
	}
	entries(b, pos, 4, func(i int64, x []byte) { binary.LittleEndian.PutUint32(x, c.chunkCRC(i)) })
}

// rowTable computes the row table from pos on.
func (c *Computed) rowTable(b []byte, pos int64) {
	entries(b, pos, c.g.rowEntry, func(slot int64, x []byte) {
		row := c.rowOf(slot)
		if c.sb.RowType.Scaled() {
			sum, scale := c.enc.scaled(row)
			binary.LittleEndian.PutUint32(x, sum)
			binary.LittleEndian.PutUint32(x[c.g.rowEntry-4:], math.Float32bits(scale))
			return
		}
		binary.LittleEndian.PutUint32(x, c.enc.crc(row))
	})
}

// entries writes what fill makes of numbered things, size bytes each, to b, from byte pos of all of
// them on.
func entries(b []byte, pos, size int64, fill func(i int64, x []byte)) {
	var all [8]byte
	x := all[:size]
	for len(b) > 0 {
		fill(pos/size, x)
		n := copy(b, x[pos%size:])
		b, pos = b[n:], pos+int64(n)
	}
}

// chunkCRC is the CRC32C of chunk i of the feature extent: whole units by their rows' checksums,
// what stands over at both ends by its bytes.
func (c *Computed) chunkCRC(i int64) uint32 {
	lo := i * chunkBytes
	hi := min(lo+chunkBytes, c.g.dataBytes)
	s := ^uint32(0)
	byBytes := func(to int64) {
		for lo < to {
			b := c.pieces.Get().(*[]byte)
			n := min(to-lo, c.unit)
			c.data((*b)[:n], lo)
			s = ^crc32.Update(^s, castagnoli, (*b)[:n])
			c.pieces.Put(b)
			lo += n
		}
	}
	byBytes(min((lo+c.unit-1)/c.unit*c.unit, hi))
	if c.enc.slow() { // by the bytes is no slower
		byBytes(hi)
		return ^s
	}
	for ; hi-lo >= c.unit; lo += c.unit {
		for slot := lo / c.unit * c.perUnit; slot < (lo/c.unit+1)*c.perUnit; slot++ {
			s = c.enc.shift.apply(s)
			if slot < c.g.rows {
				s ^= c.enc.raw(c.rowOf(slot))
			}
		}
		s = c.unitTail.apply(s)
	}
	byBytes(hi)
	return ^s
}

// sums computes the checksums of both tables, on all cores.
func (c *Computed) sums(ctx context.Context, p work.Progress) (*ComputedSums, error) {
	var r ComputedSums
	total := c.g.dataBytes + c.rowTableBytes()
	done := int64(0)
	each := func(sum *uint32, n, weight int64, fill func(b []byte, pos int64)) error {
		per := int64(1 << 18)
		return work.InOrder(ctx, (n+per-1)/per, func(i int64) []byte {
			b := make([]byte, min(per, n-i*per))
			fill(b, i*per)
			return b
		}, func(_ int64, b []byte) error {
			*sum = crc32.Update(*sum, castagnoli, b)
			done += int64(len(b)) * weight
			p.Report("checksums", min(done, total), total)
			return ctx.Err()
		})
	}
	err := each(&r.Table, 4*c.g.chunks, chunkBytes/4, c.table)
	if err == nil {
		err = each(&r.RowTable, c.rowTableBytes(), 1, c.rowTable)
	}
	if err != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	return &r, nil
}

// shiftTable holds what a number of zero bytes does to the state of a CRC32C, which is linear.
type shiftTable [4][256]uint32

// shiftBy makes the table for n bytes, which is at most a chunk's worth.
func shiftBy(n int64) (t shiftTable) {
	zeros := make([]byte, n)
	for k := range 4 {
		for b := range 8 {
			one := ^crc32.Update(^(uint32(1) << (8*k + b)), castagnoli, zeros)
			for v := 1 << b; v < 2<<b; v++ {
				t[k][v] = t[k][v-1<<b] ^ one
			}
		}
	}
	return t
}

func (t *shiftTable) apply(s uint32) uint32 {
	return t[0][s&0xff] ^ t[1][s>>8&0xff] ^ t[2][s>>16&0xff] ^ t[3][s>>24]
}

// rowEncoder makes rows of a feature function in the type that they have on SSDs, and their
// checksums.
type rowEncoder struct {
	fn    *dataset.FeatureFunc
	typ   rowtype.Type
	bytes int
	shift shiftTable
	base  uint32 // state of a CRC32C of row 0, begun with 0
	// for each byte of the row number: what it adds; nil where the type is not linear
	lin     [][256]uint32
	scratch sync.Pool // *rowScratch
}

type rowScratch struct {
	raw    []byte
	floats []float32
	row    []byte
}

func newRowEncoder(fn *dataset.FeatureFunc, t rowtype.Type) *rowEncoder {
	e := &rowEncoder{fn: fn, typ: t, bytes: t.RowBytes(fn.Dim)}
	e.shift = shiftBy(int64(e.bytes))
	e.scratch.New = func() any {
		return &rowScratch{make([]byte, 4*fn.Dim), make([]float32, fn.Dim), make([]byte, e.bytes)}
	}
	if t != rowtype.Float32 { // rounding is not linear
		return e
	}
	buf := make([]byte, e.bytes)
	rawOf := func(r int64) uint32 {
		fn.Row(r, buf)
		return ^crc32.Update(^uint32(0), castagnoli, buf)
	}
	e.base = rawOf(0)
	for offset := 0; offset < fn.Bits(); offset += 8 {
		var t [256]uint32
		for b := 0; b < 8 && offset+b < fn.Bits(); b++ {
			one := rawOf(1<<(offset+b)) ^ e.base
			for v := 1 << b; v < 2<<b; v++ {
				t[v] = t[v-1<<b] ^ one
			}
		}
		e.lin = append(e.lin, t)
	}
	return e
}

// slow reports whether checksums take as long as the rows.
func (e *rowEncoder) slow() bool { return e.lin == nil }

// encode writes row r to b, of e.bytes, and returns its scale.
func (e *rowEncoder) encode(r int64, b []byte) (scale float32) {
	if e.typ == rowtype.Float32 {
		e.fn.Row(r, b)
		return 1
	}
	s := e.scratch.Get().(*rowScratch)
	e.fn.Floats(r, s.floats, s.raw)
	scale, err := e.typ.Encode(b, s.floats)
	if err != nil {
		panic("feature function: a value within ±1 that " + e.typ.String() + " does not hold: " +
			err.Error())
	}
	e.scratch.Put(s)
	return scale
}

// scaled is the CRC32C of row r, and its scale.
func (e *rowEncoder) scaled(r int64) (sum uint32, scale float32) {
	s := e.scratch.Get().(*rowScratch)
	defer e.scratch.Put(s)
	scale = e.encode(r, s.row)
	return crc32.Checksum(s.row, castagnoli), scale
}

// raw is the state of a CRC32C that began with 0 and took row r.
func (e *rowEncoder) raw(r int64) uint32 {
	if e.lin == nil {
		s := e.scratch.Get().(*rowScratch)
		row := s.row
		e.encode(r, row)
		x := ^crc32.Update(^uint32(0), castagnoli, row)
		e.scratch.Put(s)
		return x
	}
	x := e.base
	for k := range e.lin {
		x ^= e.lin[k][r>>(8*k)&0xff]
	}
	return x
}

// crc is the CRC32C of row r.
func (e *rowEncoder) crc(r int64) uint32 { return ^(e.shift.apply(^uint32(0)) ^ e.raw(r)) }

// RowVerifier checks rows that were gathered from anywhere against the dataset's feature function,
// to the bit. It is safe for concurrent use.
type RowVerifier struct {
	enc    *rowEncoder
	name   string
	scales []float32 // by row; nil: they are not checked
}

// NewRowVerifier is for rows of d that are stored as t. A dataset whose rows are stored in
// features.npy has nothing to check against: an error of class usage.
func NewRowVerifier(d *dataset.Dataset, t rowtype.Type) (*RowVerifier, error) {
	fn := d.FeatureFunc()
	if fn == nil {
		return nil, errs.New(errs.Usage,
			"dataset %s has no feature function to check rows against; make one with {feature-fn} hash, or check reads by checksums ({check-reads})",
			d.Dir())
	}
	return &RowVerifier{enc: newRowEncoder(fn, t), name: d.Meta.FeatureFn}, nil
}

// WithScales has Check hold the scales of rows against the function, too. They are by row.
func (v *RowVerifier) WithScales(scales []float32) { v.scales = scales }

// Check returns the index of the first of nodes whose row is not what it must be, or -1. rows holds
// the rows of all nodes, one behind the other.
func (v *RowVerifier) Check(nodes []int64, rows []byte) int {
	n := v.enc.bytes
	buf := make([]byte, n)
	for i, node := range nodes {
		scale := v.enc.encode(node, buf)
		if !bytes.Equal(buf, rows[i*n:(i+1)*n]) || v.scales != nil && v.scales[node] != scale {
			return i
		}
	}
	return -1
}

// Wrong describes what is wrong with a row that Check has found.
func (v *RowVerifier) Wrong(node int64, row []byte) string {
	buf := make([]byte, v.enc.bytes)
	scale := v.enc.encode(node, buf)
	if bytes.Equal(buf, row) {
		return fmt.Sprintf("scale of node %d is not what %s says: %v, not %v", node, v.name,
			v.scales[node], scale)
	}
	offset := 0
	for offset < len(row)-1 && buf[offset] == row[offset] {
		offset++
	}
	return fmt.Sprintf("row of node %d is not what %s says: byte %d is %02x, not %02x", node,
		v.name, offset, row[offset], buf[offset])
}
