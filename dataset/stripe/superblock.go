// Package stripe is a dataset's rows on SSDs: the superblock that describes a stripe
// (superblock.go), writing (load.go, resume.go), finding (attach.go), checking (verify.go,
// rowsums.go), and SSDs that compute their rows (computed.go).
package stripe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"unsafe"

	"github.com/google/uuid"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/nvme"
)

// On an SSD, all little-endian, everything on 4 KiB bounds:
//
//	0                 superblock (4 KiB), then zeros up to
//	1 MiB             the feature extent of this stripe, as gpuio.Layout places rows
//	after it          CRC32C of each 1 MiB chunk of the extent, 4 bytes each
//	after that        optional: the row table: for each row of the extent, by slot, its CRC32C where
//	                  there are row checksums, and its scale (float32) where its type has one
//	after that        optional: extents of pages, which superblocks list (pagelist.go)
//	end - 1 MiB       zeros up to
//	end - 4 KiB       the superblock again ("end" rounded down to 4 KiB)
//
// The zeros clear what other formats keep at both ends of a disk. Superblocks of more datasets lie
// among them (shared.go); the extents of each are where its superblock says.
//
// When the version rises: when a heliosctl that does not know a change would do something wrong
// with the stripe, for it refuses versions that it does not know. A change that it may ignore goes
// into reserved fields, whose zero means "not there", and keeps the version. The checksums of rows are
// of that kind: they lie behind everything else, so version 1 without them reads, verifies and
// loads over a stripe that has them, and is right in all that it says; and stripes without them
// attach here. The progress mark of a load (Mark) is of that kind too: to a version 1 that does not
// know it the stripe is one whose load did not finish, and loads again from the start. These
// are worth a version: rows in another type than float32, which are version 2 (stripes of float32
// stay version 1, to the byte), mirrors, and extents of pages: a heliosctl that does not know these
// would load over them and ask nobody. A stripe is version 3 while it has some, and goes back to 1
// or 2 with the last of them. Rows of int8 are version 4, with or without pages: up to version 3
// each of them began with its scale, and this heliosctl refuses those. Version 5 is of an SSD that
// several datasets share, or have shared: its extents lie anywhere, and its dataset may be gone.
const (
	superblockBytes   = 4096
	headBytes         = 1 << 20
	tailBytes         = 1 << 20
	chunkBytes        = 1 << 20
	alignBytes        = 4096
	superblockVersion = 1
	versionRowTypes   = 2 // version 1 with rows that are not float32
	versionPages      = 3 // with extents of pages, and rows of any type
	versionScales     = 4 // with rows whose scales are in the row table
	versionShared     = 5 // of an SSD of several datasets, with rows of any type
	superblockMagic   = "HeliosSB"
)

// maxStripe is the largest SSD. Twice as many bytes are still within an int64.
const maxStripe = 1 << 61

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// State reports whether a stripe can be used.
type State uint32

// States of a stripe.
const (
	StateLoading  State = 1 // a load has begun and has not finished
	StateComplete State = 2 // data and table are durable
	StateFree     State = 3 // the dataset was unloaded: all but Shared counts for nothing
)

// Kinds of values in superblocks.
const (
	dtypeFloat32   = 1
	dtypeFloat16   = 2
	dtypeBFloat16  = 3
	dtypeInt8      = 4 // up to version 3 each row begins with its scale
	checksumNone   = 0 // of rows only
	checksumCRC32C = 1
)

// dtypes are the codes of the row types in superblocks.
var dtypes = map[rowtype.Type]uint32{rowtype.Float32: dtypeFloat32, rowtype.Float16: dtypeFloat16,
	rowtype.BFloat16: dtypeBFloat16, rowtype.Int8: dtypeInt8}

func rowTypeOf(code uint32) (rowtype.Type, bool) {
	for t, c := range dtypes {
		if c == code {
			return t, true
		}
	}
	return 0, false
}

// Superblock describes the stripe of a dataset on one SSD.
type Superblock struct {
	UUID        uuid.UUID // of the dataset
	LoadID      uuid.UUID // of the load: stripes of different loads do not mix
	Name        string    // of the dataset, at most 64 bytes, for people
	State       State
	StripeIndex int
	StripeCount int
	Rows        int64 // of the whole dataset
	RowBytes    int
	DType       rowtype.Type // of the dataset's own rows
	RowType     rowtype.Type // of the rows here
	LBABytes    int
	RowsPerLBA  int
	LBAsPerRow  int
	DataLBA     nvme.LBA // the feature extent
	DataLBAs    int64
	TableLBA    nvme.LBA // the chunk checksums
	TableLBAs   int64
	ChunkBytes  int
	TableCRC    uint32 // CRC32C of the table's entries
	DeviceLBAs  uint64 // size of the namespace when it was loaded
	// The row table; all zero where the stripe has none.
	RowChecksum  uint32   // kind
	RowTableLBA  nvme.LBA // rowEntry bytes for each slot
	RowTableLBAs int64
	RowTableCRC  uint32 // CRC32C of the row table's entries
	Mark         Mark   // while it is being loaded
	Pages        PageList
	Shared       bool // other datasets may have superblocks on the SSD
}

// newSuperblock describes stripe i of a layout of d's rows, but for its load and its checksums.
func newSuperblock(d *dataset.Dataset, l *gpuio.Layout, g *geometry, i int, t rowtype.Type,
	deviceLBAs uint64, rowSums bool) Superblock {
	name := d.Meta.Name
	sb := Superblock{UUID: d.UUID(), Name: name[:min(len(name), 64)], StripeIndex: i,
		StripeCount: int(l.SSDs), Rows: l.Rows, RowBytes: int(l.RowBytes),
		DType: d.Meta.RowType(), RowType: t, LBABytes: g.lbaBytes,
		RowsPerLBA: int(l.RowsPerLBA), LBAsPerRow: int(l.LBAsPerRow), DataLBA: g.dataLBA,
		DataLBAs: g.dataLBAs, TableLBA: g.tableLBA, TableLBAs: g.tableLBAs,
		ChunkBytes: chunkBytes, DeviceLBAs: deviceLBAs, RowTableLBA: g.rowTableLBA,
		RowTableLBAs: g.rowTableLBAs}
	if rowSums {
		sb.RowChecksum = checksumCRC32C
	}
	return sb
}

// hasRowSums reports whether the stripe has a checksum for each row.
func (s *Superblock) hasRowSums() bool { return s.RowChecksum != checksumNone }

// computed reports whether the stripe is one that an SSD computes (computedID).
func (s *Superblock) computed() bool { return s.LoadID.Version() == 8 }

// unfinished is for messages; "" where the stripe is complete.
func (s *Superblock) unfinished() string {
	if s.State == StateComplete {
		return ""
	}
	return ", which did not finish"
}

// rowEntry returns the bytes of a row in the row table.
func (s *Superblock) rowEntry() int64 { return rowEntry(s.RowType, s.hasRowSums()) }

func rowEntry(t rowtype.Type, sums bool) (n int64) {
	if sums {
		n = 4
	}
	if t.Scaled() {
		n += 4
	}
	return n
}

// stored are the fields that say how rows differ from the dataset's own.
func (s *Superblock) stored() (code uint32, scale float32) {
	switch s.RowType {
	case s.DType:
		return 0, 0
	case rowtype.Int8:
		return dtypeInt8, 0
	}
	return dtypes[s.RowType], 1
}

// layout is the gpuio layout that the superblock states.
func (s *Superblock) layout() gpuio.Layout {
	return gpuio.Layout{Rows: s.Rows, RowBytes: int32(s.RowBytes), SSDs: int32(s.StripeCount),
		LBABytes:   int32(s.LBABytes),
		RowsPerLBA: int32(s.RowsPerLBA), LBAsPerRow: int32(s.LBAsPerRow)}
}

// wireSuperblock is the layout on the SSD. Reserved fields are zero until a later version of
// Helios gives them their meaning; they are there so that it need not move anything.
//
// Large: the fields are the format's.
type wireSuperblock struct {
	Magic        [8]byte
	Version      uint32
	HeaderBytes  uint32
	UUID         [16]byte
	LoadID       [16]byte
	Name         [64]byte
	State        uint32
	CopyIndex    uint32 // 0 at the start, 1 at the end
	StripeIndex  uint32
	StripeCount  uint32
	Rows         uint64
	RowBytes     uint32
	DType        uint32
	LBABytes     uint32
	RowsPerLBA   uint32
	LBAsPerRow   uint32
	ChecksumKind uint32
	DataLBA      uint64
	DataLBAs     uint64
	TableLBA     uint64
	TableLBAs    uint64
	ChunkBytes   uint32
	TableCRC     uint32
	DeviceLBAs   uint64
	// Reserved for mirror copies of a stripe.
	MirrorCount uint32
	MirrorIndex uint32
	MirrorGroup [16]byte
	// Of rows stored in another type than the dataset's: value = stored × Scale + Zero. StoredDType
	// 0: they are of type DType, and both others are 0; Scale 0: each row has its own.
	StoredDType uint32
	Scale       float32
	Zero        float32
	_           uint32
	// Optional, see superblockVersion: zero in stripes without a checksum per row, and in all that
	// were written before there was one.
	RowTableLBA  uint64
	RowTableLBAs uint64
	RowTableCRC  uint32
	RowChecksum  uint32
	// Optional: how far a load has got; zero where it has left no mark, or has ended.
	MarkChunks    uint64
	MarkRowPieces uint64
	MarkDigest    [32]byte
	PageExtents   uint32 // optional: how many there are, behind this header
	Shared        uint32 // 1: look for more superblocks
	Reserved      [179]byte
	Salt          uint8  // not 0 where the checksum would otherwise end as a boot sector does
	CRC           uint32 // CRC32C of the 4 KiB with this field zero
}

// Layout assertions: these fail to compile when a field moves.
const (
	wireBytes = 512
	crcOffset = 508
)

var (
	_ = [1]int{}[unsafe.Sizeof(wireSuperblock{})-wireBytes]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.UUID)-16]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.State)-112]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.Rows)-128]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.DataLBA)-160]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.MirrorCount)-208]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.RowTableLBA)-248]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.RowChecksum)-268]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.MarkChunks)-272]
	_ = [1]int{}[unsafe.Offsetof(wireSuperblock{}.CRC)-crcOffset]
)

// encode makes the 4 KiB of one copy.
func (s *Superblock) encode(copyIndex int) ([]byte, error) {
	w := wireSuperblock{
		Version: superblockVersion, HeaderBytes: wireBytes, UUID: s.UUID, LoadID: s.LoadID,
		State: uint32(s.State), CopyIndex: uint32(copyIndex), StripeIndex: uint32(s.StripeIndex),
		StripeCount: uint32(s.StripeCount),
		Rows:        uint64(s.Rows), RowBytes: uint32(s.RowBytes), DType: dtypes[s.DType],
		LBABytes:   uint32(s.LBABytes),
		RowsPerLBA: uint32(s.RowsPerLBA), LBAsPerRow: uint32(s.LBAsPerRow),
		ChecksumKind: checksumCRC32C,
		DataLBA:      uint64(s.DataLBA), DataLBAs: uint64(s.DataLBAs), TableLBA: uint64(s.TableLBA),
		TableLBAs:  uint64(s.TableLBAs),
		ChunkBytes: uint32(s.ChunkBytes), TableCRC: s.TableCRC, DeviceLBAs: s.DeviceLBAs,
		RowChecksum: s.RowChecksum, RowTableLBA: uint64(s.RowTableLBA),
		RowTableLBAs: uint64(s.RowTableLBAs), RowTableCRC: s.RowTableCRC,
		MarkChunks: uint64(s.Mark.Chunks), MarkRowPieces: uint64(s.Mark.RowPieces),
		MarkDigest: s.Mark.Digest, PageExtents: uint32(s.Pages.n),
	}
	if s.DType != rowtype.Float32 || s.RowType != rowtype.Float32 {
		w.Version = versionRowTypes
	}
	if s.Pages.n > 0 {
		w.Version = versionPages
	}
	if s.RowType.Scaled() {
		w.Version = versionScales
	}
	if s.isShared() {
		w.Version = versionShared
	}
	if s.Shared {
		w.Shared = 1
	}
	w.StoredDType, w.Scale = s.stored()
	copy(w.Magic[:], superblockMagic)
	copy(w.Name[:], s.Name)
	b := make([]byte, superblockBytes)
	if _, err := binary.Encode(b, binary.LittleEndian, &w); err != nil {
		return nil, fmt.Errorf("encode superblock: %w", err)
	}
	if err := s.Pages.encode(b[wireBytes:]); err != nil {
		return nil, err
	}
	for {
		clear(b[crcOffset : crcOffset+4])
		binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
		if b[crcOffset+2] != 0x55 || b[crcOffset+3] != 0xaa {
			return b, nil
		}
		// To all others a first sector that ends so is a boot sector. No version reads Salt.
		b[crcOffset-1]++
	}
}

// ErrNoSuperblock says that an SSD holds no dataset, as far as its superblock's place shows.
var ErrNoSuperblock = errors.New("no Helios superblock")

// errOldScales is that of a stripe up to version 3 with rows of int8.
var errOldScales = errs.New(errs.Failed,
	"its int8 rows begin with their scales, as an earlier heliosctl stored them; this one has scales in a table beside the rows: load the SSD again with \"heliosctl load --row-dtype int8 --force\"")

var errBadSuperblock = errors.New("damaged Helios superblock")

// decodeSuperblock checks and decodes one copy. Every field is checked here, so that nothing
// that an SSD holds can lead outside it.
func decodeSuperblock(b []byte) (Superblock, error) {
	w, rest, err := decodeWire(b)
	if err != nil {
		return Superblock{}, err
	}
	dtype, stored, err := w.rowTypes()
	if err != nil {
		return Superblock{}, err
	}
	s := w.superblock(dtype, stored)
	what := ""
	if what = w.impossible(&s); what == "" {
		g, err := s.geometry()
		if what = "its extents"; err == nil {
			what = w.outside(&s, &g)
		}
		if what == "" {
			if s.Pages, err = decodePageList(rest, w.PageExtents); err != nil {
				return s, err
			}
			what = s.checkPages(&g)
		}
	}
	if what != "" {
		return Superblock{}, fmt.Errorf("%w: %s is impossible", errBadSuperblock, what)
	}
	return s, nil
}

// decodeWire checks the checksum and the version of one copy, and parts its header from the rest.
func decodeWire(b []byte) (w wireSuperblock, rest []byte, err error) {
	if len(b) < superblockBytes || string(b[:8]) != superblockMagic {
		return w, nil, ErrNoSuperblock
	}
	b = bytes.Clone(b[:superblockBytes])
	want := binary.LittleEndian.Uint32(b[crcOffset:])
	clear(b[crcOffset : crcOffset+4])
	if got := crc32.Checksum(b, castagnoli); got != want {
		return w, nil, fmt.Errorf("%w: CRC32C is %08x, should be %08x", errBadSuperblock, got, want)
	}
	if _, err := binary.Decode(b, binary.LittleEndian, &w); err != nil {
		return w, nil, fmt.Errorf("%w: %w", errBadSuperblock, err)
	}
	if w.Version < superblockVersion || w.Version > versionShared || w.HeaderBytes != wireBytes {
		return w, nil, fmt.Errorf(
			"superblock version %d is unknown, this heliosctl reads %d to %d; use the heliosctl that wrote it or load again",
			w.Version, superblockVersion, versionShared)
	}
	return w, b[wireBytes:], nil
}

// rowTypes returns the type of the dataset's rows and that of the stored ones, where this version
// knows them and how they are checked.
func (w *wireSuperblock) rowTypes() (dtype, stored rowtype.Type, err error) {
	dtype, known := rowTypeOf(w.DType)
	if w.ChecksumKind != checksumCRC32C || !known || w.Version == superblockVersion &&
		dtype != rowtype.Float32 {
		return dtype, stored, fmt.Errorf(
			"superblock with checksum kind %d and dtype %d, this heliosctl knows kind 1 and dtypes 1 to 4 (version 1: only 1); load again",
			w.ChecksumKind, w.DType)
	}
	stored = dtype
	if w.Version >= versionRowTypes && w.StoredDType != 0 {
		if stored, known = rowTypeOf(w.StoredDType); !known {
			return dtype, stored, fmt.Errorf(
				"superblock with rows of stored dtype %d, this heliosctl knows 1 to 4; use the heliosctl that wrote it or load again",
				w.StoredDType)
		}
	}
	if stored.Scaled() && w.Version < versionScales {
		return dtype, stored, errOldScales
	}
	if w.RowChecksum != checksumNone && w.RowChecksum != checksumCRC32C {
		return dtype, stored, fmt.Errorf(
			"superblock with row checksum kind %d, this heliosctl knows %d; use the heliosctl that wrote it or load again",
			w.RowChecksum, checksumCRC32C)
	}
	return dtype, stored, nil
}

// superblock copies the fields, which nobody has checked yet.
func (w *wireSuperblock) superblock(dtype, stored rowtype.Type) Superblock {
	return Superblock{
		UUID: w.UUID, LoadID: w.LoadID, Name: string(bytes.TrimRight(w.Name[:], "\x00")),
		State:       State(w.State),
		StripeIndex: int(w.StripeIndex), StripeCount: int(w.StripeCount), Rows: int64(w.Rows),
		RowBytes: int(w.RowBytes), DType: dtype, RowType: stored,
		LBABytes: int(w.LBABytes), RowsPerLBA: int(w.RowsPerLBA), LBAsPerRow: int(w.LBAsPerRow),
		DataLBA: nvme.LBA(w.DataLBA), DataLBAs: int64(w.DataLBAs), TableLBA: nvme.LBA(w.TableLBA),
		TableLBAs:  int64(w.TableLBAs),
		ChunkBytes: int(w.ChunkBytes), TableCRC: w.TableCRC, DeviceLBAs: w.DeviceLBAs,
		RowChecksum: w.RowChecksum, RowTableLBA: nvme.LBA(w.RowTableLBA),
		RowTableLBAs: int64(w.RowTableLBAs), RowTableCRC: w.RowTableCRC,
		Mark: Mark{Chunks: int64(w.MarkChunks), RowPieces: int64(w.MarkRowPieces),
			Digest: w.MarkDigest},
		Shared: w.Version == versionShared && w.Shared != 0,
	}
}

// impossible names a field that cannot be, among those that say how rows lie; "": none.
func (w *wireSuperblock) impossible(s *Superblock) string {
	code, scale := s.stored()
	types := w.Version >= versionRowTypes
	plain := s.DType == rowtype.Float32 && s.RowType == s.DType
	switch {
	case s.State != StateLoading && s.State != StateComplete && s.State != StateFree,
		w.Version == versionShared && !s.isShared(),
		w.Version < versionShared && s.State == StateFree:
		return "its state"
	case types && (w.StoredDType != code || w.Scale != scale || w.Zero != 0),
		types && (w.RowBytes%4 != 0 || int(w.RowBytes) < s.RowType.RowBytes(1)),
		w.Version == versionRowTypes && plain, w.Version == versionScales && !s.RowType.Scaled():
		return "its row type"
	// The layout decides the extents; NewLayout inside Check bounds the sizes it is made of.
	case w.RowBytes > 1<<24, w.StripeCount > 1<<16, w.LBABytes > 1<<16, w.RowsPerLBA > 1<<16,
		w.LBAsPerRow > 1<<16, s.Rows < 1, s.Rows > 1<<48:
		return "its row geometry"
	}
	if l := s.layout(); l.Check() != nil {
		return "its row geometry"
	}
	if w.StripeIndex >= w.StripeCount {
		return "its stripe index"
	}
	return ""
}

// outside names a field that says something else than the geometry of the rows allows; "": none.
func (w *wireSuperblock) outside(s *Superblock, g *geometry) string {
	switch {
	case w.Version < versionShared && int64(s.DataLBA)*int64(s.LBABytes) != headBytes,
		s.ChunkBytes != chunkBytes, s.DataLBA != g.dataLBA, s.DataLBAs != g.dataLBAs,
		s.TableLBA != g.tableLBA, s.TableLBAs != g.tableLBAs:
		return "its extents"
	case s.RowTableLBA != g.rowTableLBA, s.RowTableLBAs != g.rowTableLBAs,
		s.rowEntry() == 0 && s.RowTableCRC != 0:
		return "its row table"
	case w.MarkChunks > uint64(g.chunks), w.MarkRowPieces > uint64(g.rowPieces()),
		s.State != StateLoading && s.Mark != Mark{}:
		return "its progress mark"
	case w.Version < versionScales && (w.Version == versionPages) != (w.PageExtents > 0):
		return "its number of page extents"
	}
	return ""
}

// geometry has the places of a stripe's parts on an SSD.
type geometry struct {
	lbaBytes     int
	dataLBA      nvme.LBA
	dataLBAs     int64
	dataBytes    int64
	chunks       int64
	tableLBA     nvme.LBA
	tableLBAs    int64
	rows         int64
	rowEntry     int64    // bytes of a row in the row table
	rowTableLBA  nvme.LBA // 0: there is none
	rowTableLBAs int64
	tailLBA      nvme.LBA // start of the zeros before the second superblock
	secondLBA    nvme.LBA
	needBytes    int64
	haveBytes    int64
}

// newGeometry places a stripe at the start of an SSD; it fails when the SSD is too small.
func newGeometry(l gpuio.Layout, stripe, lbaBytes int, deviceLBAs uint64, rowEntry int64) (geometry,
	error) {
	return geometryAt(headBytes, l, stripe, lbaBytes, deviceLBAs, rowEntry)
}

// geometry has the places of the stripe's parts.
func (s *Superblock) geometry() (geometry, error) {
	start := headBytes / int64(max(s.LBABytes, 1))
	if s.isShared() {
		start = int64(s.DataLBA)
	}
	if uint64(start) > s.DeviceLBAs {
		return geometry{}, fmt.Errorf("%w: its extents begin behind the SSD", errBadSuperblock)
	}
	return geometryAt(start*int64(s.LBABytes), s.layout(), s.StripeIndex, s.LBABytes,
		s.DeviceLBAs, s.rowEntry())
}

// geometryAt places a stripe from a byte on.
func geometryAt(start int64, l gpuio.Layout, stripe, lbaBytes int, deviceLBAs uint64,
	rowEntry int64) (geometry, error) {
	g := geometry{lbaBytes: lbaBytes, rows: l.RowsOn(stripe), rowEntry: rowEntry}
	lba := int64(lbaBytes)
	if lba < 512 || lba > alignBytes {
		return g, errs.New(errs.Capability, "LBAs of %d bytes are not supported, only 512 to 4096",
			lbaBytes)
	}
	if deviceLBAs > maxStripe/uint64(lba) {
		return g, errs.New(errs.Capability, "SSDs of more than %d bytes are not supported",
			int64(maxStripe))
	}
	if g.rows > maxStripe/max(int64(l.ReadBytes()), rowEntry) { // the sums below would overflow
		return g, errs.New(errs.Usage,
			"its %d rows take more than the %d bytes that an SSD may have; use more SSDs", g.rows,
			int64(maxStripe))
	}
	up := func(n int64) int64 { return (n + alignBytes - 1) / alignBytes * alignBytes }
	if start < headBytes || start%alignBytes != 0 || start > maxStripe {
		return g, fmt.Errorf("%w: its extents begin at byte %d", errBadSuperblock, start)
	}
	g.dataLBA = nvme.LBA(start / lba)
	g.dataLBAs = l.LBAsOn(stripe)
	g.dataBytes = g.dataLBAs * lba
	g.chunks = (g.dataBytes + chunkBytes - 1) / chunkBytes
	table := start + up(g.dataBytes)
	g.tableLBA = nvme.LBA(table / lba)
	g.tableLBAs = up(g.chunks*4) / lba
	end := table + up(g.chunks*4)
	if rowEntry > 0 {
		g.rowTableLBA = nvme.LBA(end / lba)
		g.rowTableLBAs = up(g.rows*rowEntry) / lba
		end += up(g.rows * rowEntry)
	}
	g.needBytes = end + tailBytes
	g.haveBytes = int64(deviceLBAs) * lba / alignBytes * alignBytes
	if g.haveBytes < g.needBytes {
		return g, errs.New(errs.Usage, "needs %d bytes, has %d", g.needBytes, g.haveBytes)
	}
	g.tailLBA = nvme.LBA((g.haveBytes - tailBytes) / lba)
	g.secondLBA = nvme.LBA((g.haveBytes - superblockBytes) / lba)
	return g, nil
}

// SSDBytes returns the size that an SSD with blocks of 512 bytes needs for its share of a dataset
// on so many SSDs, with checksums of rows.
func SSDBytes(d *dataset.Dataset, ssds int) (int64, error) {
	const lba = 512
	typ := d.Meta.RowType()
	l, err := gpuio.NewLayout(d.Meta.Rows(), typ.RowBytes(d.Meta.Dim), ssds, lba)
	if err != nil {
		return 0, err
	}
	// the first stripe has as many rows as any; as large as can be, to learn the need
	g, err := newGeometry(l, 0, lba, maxStripe/lba, rowEntry(typ, true))
	return g.needBytes, err
}

// rowPieces returns how many pieces of up to 1 MiB the row table is written in.
func (g *geometry) rowPieces() int64 {
	return (g.rows*g.rowEntry + chunkBytes - 1) / chunkBytes
}

// Extent is a run of LBAs of an SSD.
type Extent struct {
	What   string   `json:"what"`
	LBA    nvme.LBA `json:"lba"`
	Blocks int64    `json:"blocks"`
}

// SSDExtents are extents of one SSD.
type SSDExtents struct {
	SSD      string   `json:"ssd"`
	Serial   string   `json:"serial"`
	LBABytes int      `json:"lba_bytes"`
	Extents  []Extent `json:"extents"`
}

// Extents is all of an SSD that a load of this stripe may write, in order of LBAs, and that it has
// written when it has ended, with the page extents that it has: nothing else on the SSD is ours.
func (s *Superblock) Extents() ([]Extent, error) {
	g, err := s.geometry()
	if err != nil {
		return nil, err
	}
	e := []Extent{
		{"superblock and zeros", 0, int64(headBytes / s.LBABytes)},
		{"features", g.dataLBA, g.dataLBAs},
		{"chunk checksums", g.tableLBA, g.tableLBAs},
	}
	if g.rowEntry > 0 {
		e = append(e, Extent{s.rowTableName(), g.rowTableLBA, g.rowTableLBAs})
	}
	e = append(e, s.pageExtents()...)
	slices.SortStableFunc(e, func(a, b Extent) int { return cmp.Compare(a.LBA, b.LBA) })
	return append(e, Extent{"zeros and superblock", g.tailLBA, int64(s.DeviceLBAs) -
		int64(g.tailLBA)}), nil
}

// rowTableName names the row table by its content.
func (s *Superblock) rowTableName() string {
	switch {
	case !s.RowType.Scaled():
		return "row checksums"
	case s.hasRowSums():
		return "row checksums and scales"
	}
	return "scales of rows"
}

func extentsOf(t *target, sb *Superblock) (SSDExtents, error) {
	e, err := sb.Extents()
	return SSDExtents{SSD: t.name, Serial: t.serial, LBABytes: t.lbaBytes, Extents: e}, err
}

// secondCopy returns the place of the second superblock of a device, whatever it holds.
func secondCopy(lbaBytes int, lbas uint64) nvme.LBA {
	return nvme.LBA((int64(lbas)*int64(lbaBytes)/alignBytes*alignBytes -
		superblockBytes) / int64(lbaBytes))
}

// blockDev has the calls that loading, attaching and verifying need of an SSD. Tests have a
// simulated one that loses power.
type blockDev interface {
	ReadAt(ctx context.Context, lba nvme.LBA, dst []byte) error
	WriteAt(ctx context.Context, lba nvme.LBA, data []byte) error
	Flush(ctx context.Context) error
	Close(ctx context.Context) error
}

// target is an SSD with an open blockDev, and one of the places for superblocks on it.
type target struct {
	dev      blockDev
	slot     int // of the superblock; 0: at both ends
	ssd      *gpuio.SSD
	name     string
	serial   string
	lbaBytes int
	lbas     uint64
	pairs    int // most stripes that can be read: each needs a queue pair
}

// bulkDepth commands of up to 256 KiB keep a fast SSD busy with sequential transfers.
const bulkDepth = 16

func openTargets(ctx context.Context, ssds []*gpuio.SSD) ([]*target, error) {
	if len(ssds) == 0 {
		return nil, errs.New(errs.Usage, "no SSDs are bound; run \"heliosctl bind-ssds\" first")
	}
	var ts []*target
	for _, s := range gpuio.Distinct(ssds) {
		ns := s.Ctrl.Namespace()
		if err := ctx.Err(); err != nil {
			return nil, errors.Join(err, closeTargets(ctx, ts))
		}
		// Cut off in the middle, the controller would keep a queue pair that nobody knows.
		b, err := gpuio.NewBulk(context.WithoutCancel(ctx), s.Ctrl, bulkDepth)
		if err != nil {
			return nil, errors.Join(err, closeTargets(ctx, ts))
		}
		name := s.Name
		if name == "" {
			name = s.Ctrl.Name()
		}
		ts = append(ts, &target{dev: b, ssd: s, name: name, serial: s.Ctrl.Serial(),
			lbaBytes: ns.LBABytes, lbas: ns.Blocks, pairs: gpuio.ReadPairs(s)})
	}
	return ts, nil
}

// withTargets opens SSDs for fn.
func withTargets(ctx context.Context, ssds []*gpuio.SSD, fn func(ts []*target) error) error {
	ts, err := openTargets(ctx, ssds)
	if err != nil {
		return err
	}
	return errors.Join(fn(ts), closeTargets(ctx, ts))
}

// closeTargets works after ctx has ended, too: queue pairs must not leak.
func closeTargets(ctx context.Context, ts []*target) error {
	ctx = context.WithoutCancel(ctx)
	var err error
	for _, t := range ts {
		err = errors.Join(err, t.dev.Close(ctx))
	}
	return err
}

// copies holds what the two superblocks of an SSD say.
type copies struct {
	sb   [2]Superblock
	err  [2]error // nil, ErrNoSuperblock, errBadSuperblock, another version, or a read error
	read [2]error
}

func (t *target) readCopies(ctx context.Context) (copies, error) {
	superblocks.RLock()
	defer superblocks.RUnlock()
	var c copies
	if t.lbaBytes < 512 || t.lbaBytes > alignBytes {
		return c, errs.New(errs.Capability,
			"ssd %s: LBAs of %d bytes are not supported, only 512 and 4096; format it to one of them with \"nvme format\"",
			t.name, t.lbaBytes)
	}
	if int64(t.lbas)*int64(t.lbaBytes) < headBytes+tailBytes {
		return c, errs.New(errs.Usage,
			"ssd %s: %d LBAs of %d bytes are too small for a dataset; bind a larger SSD", t.name,
			t.lbas, t.lbaBytes)
	}
	buf := make([]byte, superblockBytes)
	for i := range c.sb {
		if err := t.dev.ReadAt(ctx, t.copyLBA(i), buf); err != nil {
			if ctx.Err() != nil {
				return c, err
			}
			c.err[i], c.read[i] = err, err
			continue
		}
		c.sb[i], c.err[i] = decodeSuperblock(buf)
		if c.err[i] == nil && (c.sb[i].DeviceLBAs != t.lbas || c.sb[i].LBABytes != t.lbaBytes) {
			c.err[i] = fmt.Errorf(
				"the superblock is for an SSD of %d LBAs of %d bytes, this one has %d of %d; was it resized or copied? load again",
				c.sb[i].DeviceLBAs, c.sb[i].LBABytes, t.lbas, t.lbaBytes)
		}
	}
	return c, nil
}

// best chooses the copy to believe. note is the reason that it is not the first, or is empty.
func (c *copies) best() (sb Superblock, note string, err error) {
	switch {
	case c.err[0] == nil && c.err[1] == nil:
		// A load writes the first copy first, both when it begins and when it ends; a crash
		// between the two leaves them different, and the stripe is then not complete.
		if c.sb[0] != c.sb[1] {
			sb = c.sb[0]
			other := c.sb[1]
			if other.Shared = sb.Shared; other == sb {
				return sb, "a change of the SSD's other datasets was interrupted", nil
			}
			if sb.State == StateFree {
				return sb, "unloading it was interrupted", nil
			}
			if sb.State == StateComplete {
				if other.Pages = sb.Pages; other == sb {
					return sb, "a change of its page extents was interrupted", nil
				}
			}
			sb.Pages = PageList{}
			sb.State = StateLoading
			return sb, "the two superblocks differ: a load was interrupted", nil
		}
		return c.sb[0], "", nil
	case c.err[0] == nil:
		return c.sb[0], fmt.Sprintf("second superblock unusable (%v), using the first",
			c.err[1]), nil
	case c.err[1] == nil:
		return c.sb[1], fmt.Sprintf("first superblock unusable (%v), using the second",
			c.err[0]), nil
	case errors.Is(c.err[0], ErrNoSuperblock):
		return sb, "", c.err[1]
	}
	return sb, "", c.err[0]
}

// readOnly is a blockDev that cannot be written.
type readOnly struct {
	name     string
	r        io.ReaderAt
	lbaBytes int
}

func (d readOnly) ReadAt(ctx context.Context, lba nvme.LBA, dst []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if n, err := d.r.ReadAt(dst, int64(lba)*int64(d.lbaBytes)); n < len(dst) {
		return fmt.Errorf("read of %s: %w", d.name, err)
	}
	return nil
}

func (d readOnly) WriteAt(context.Context, nvme.LBA, []byte) error {
	return errs.New(errs.Refused,
		"ssd %s is open for reading only; bind it with \"heliosctl bind-ssds\"", d.name)
}

func (d readOnly) Flush(context.Context) error { return nil }

func (d readOnly) Close(context.Context) error { return nil }
