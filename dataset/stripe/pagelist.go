package stripe

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/google/uuid"

	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/units"
	"helios/nvme"
)

// Extents of pages: a stripe's SSD may hold, behind the rows and their checksums, shares of stores
// of pages (package pages): page p of a store is on the SSD of stripe p mod n, as rows are. Each is
// an entry behind the superblock's header, and on the SSD
//
//	the pages         slot k is page k × n + stripe
//	then              CRC32C of each page, by slot, 4 bytes each, to a 4 KiB bound
//	then              a bit for each slot that was written, to a 4 KiB bound: while loading only
//
// Extents begin where one before them ends, or in the room of one that was removed.

// maxPageExtents is the number of entries behind the header of a superblock.
const maxPageExtents = 32

// PageExtent is an SSD's share of a store of pages.
type PageExtent struct {
	ID        uuid.UUID // of the pack
	State     State     // StateLoading while pages are being written
	PageBytes int64
	Pages     int64 // on all SSDs
	LBA       nvme.LBA
	LBAs      int64
	TableLBA  nvme.LBA // checksums
	TableLBAs int64
	TableCRC  uint32 // CRC32C of the table's entries; of a complete one
}

// Spec describes the pages on all SSDs.
func (e *PageExtent) Spec() pages.Spec {
	return pages.Spec{ID: e.ID, PageBytes: e.PageBytes, Pages: e.Pages}
}

// PageList holds the extents of an SSD. It can be compared.
type PageList struct {
	n int
	e [maxPageExtents]PageExtent
}

// All are the extents, in order of their making.
func (p *PageList) All() []PageExtent { return slices.Clone(p.e[:p.n]) }

// find returns the place of a pack's extent, or -1.
func (p *PageList) find(id uuid.UUID) int {
	return slices.IndexFunc(p.e[:p.n], func(e PageExtent) bool { return e.ID == id })
}

// remove takes an extent out.
func (p *PageList) remove(i int) {
	copy(p.e[i:], p.e[i+1:p.n])
	p.n--
	p.e[p.n] = PageExtent{}
}

// String lists the packs for messages; "": there are none.
func (p *PageList) String() string {
	if p.n == 0 {
		return ""
	}
	var all []string
	for _, e := range p.e[:p.n] {
		what := "pages of pack "
		if e.State != StateComplete {
			what = "unfinished pages of pack "
		}
		all = append(all, what+e.ID.String()+" ("+units.FormatBytes(e.Spec().Bytes())+
			" on all its SSDs)")
	}
	return strings.Join(all, ", ")
}

// wirePages is an entry on the SSD.
type wirePages struct {
	ID        [16]byte
	State     uint32
	TableCRC  uint32
	PageBytes uint64
	Pages     uint64
	LBA       uint64
	LBAs      uint64
	TableLBA  uint64
	TableLBAs uint64
	Reserved  [24]byte
}

const (
	wirePagesBytes = 96
	_              = uint(unsafe.Sizeof(wirePages{}) - wirePagesBytes)
	_              = uint(wirePagesBytes - unsafe.Sizeof(wirePages{}))
	_              = uint(superblockBytes - wireBytes - maxPageExtents*wirePagesBytes)
)

// encode puts the entries behind a header.
func (p *PageList) encode(b []byte) error {
	for _, e := range p.e[:p.n] {
		w := wirePages{ID: e.ID, State: uint32(e.State), TableCRC: e.TableCRC,
			PageBytes: uint64(e.PageBytes), Pages: uint64(e.Pages), LBA: uint64(e.LBA),
			LBAs: uint64(e.LBAs), TableLBA: uint64(e.TableLBA), TableLBAs: uint64(e.TableLBAs)}
		if _, err := binary.Encode(b, binary.LittleEndian, &w); err != nil {
			return fmt.Errorf("encode page extent: %w", err)
		}
		b = b[wirePagesBytes:]
	}
	return nil
}

// decodePageList reads n entries, which checkPages checks.
func decodePageList(b []byte, n uint32) (p PageList, err error) {
	if n > maxPageExtents {
		return p, fmt.Errorf("%w: %d page extents, at most %d have room", errBadSuperblock, n,
			maxPageExtents)
	}
	for i := range n {
		var w wirePages
		if _, err := binary.Decode(b, binary.LittleEndian, &w); err != nil {
			return p, fmt.Errorf("%w: %w", errBadSuperblock, err)
		}
		b = b[wirePagesBytes:]
		p.e[i] = PageExtent{ID: w.ID, State: State(w.State), TableCRC: w.TableCRC,
			PageBytes: int64(w.PageBytes), Pages: int64(w.Pages), LBA: nvme.LBA(w.LBA),
			LBAs: int64(w.LBAs), TableLBA: nvme.LBA(w.TableLBA), TableLBAs: int64(w.TableLBAs)}
		p.n++
	}
	return p, nil
}

// pageShare is the part of one SSD that a store of pages takes.
type pageShare struct {
	l         gpuio.Layout // of the pages
	slots     int64
	lbas      int64
	tableLBAs int64
	mapLBAs   int64
}

func (p *pageShare) all() int64 { return p.lbas + p.tableLBAs + p.mapLBAs }

// pageShare works a share of this SSD out. s has passed Check.
func (sb *Superblock) pageShare(s pages.Spec) (p pageShare, err error) {
	if p.l, err = gpuio.NewLayout(s.Pages, int(s.PageBytes), sb.StripeCount,
		sb.LBABytes); err != nil {
		return p, err
	}
	lba := int64(sb.LBABytes)
	up := func(n int64) int64 { return (n + alignBytes - 1) / alignBytes * alignBytes / lba }
	p.slots = p.l.RowsOn(sb.StripeIndex)
	p.lbas = p.l.LBAsOn(sb.StripeIndex)
	p.tableLBAs = up(4 * p.slots)
	p.mapLBAs = up((p.slots + 7) / 8)
	return p, nil
}

// room bounds extents of pages where an SSD has one dataset: from behind the stripe to the zeros
// before its end.
func (g *geometry) room() (from, to int64) { return g.own().to, int64(g.tailLBA) }

// checkPages returns a fault of the list, or "".
func (sb *Superblock) checkPages(g *geometry) string {
	if sb.Pages.n > 0 && sb.State != StateComplete {
		return "pages of a stripe that is being loaded"
	}
	from, to := g.room()
	own := g.own()
	if sb.isShared() {
		from = headBytes / int64(g.lbaBytes)
	}
	list := sb.Pages.All()
	for i, e := range list {
		share, err := pageShare{}, e.Spec().Check()
		if err == nil {
			share, err = sb.pageShare(e.Spec())
		}
		switch {
		case err != nil:
			return "a page extent's shape"
		case e.State != StateLoading && e.State != StateComplete,
			e.State == StateLoading && e.TableCRC != 0:
			return "a page extent's state"
		case sb.Pages.find(e.ID) != i:
			return "a pack with two page extents"
		case e.LBAs != share.lbas || e.TableLBAs != share.tableLBAs,
			uint64(e.LBA) < uint64(from), uint64(e.LBA) > uint64(to), share.all() > to-int64(e.LBA),
			int64(e.LBA)*int64(sb.LBABytes)%alignBytes != 0,
			int64(e.TableLBA) != int64(e.LBA)+e.LBAs,
			int64(e.LBA) < own.to && int64(sb.endOf(e)) > own.from:
			return "a page extent's place"
		}
	}
	sb.sortPlaces(list)
	for i := range list {
		if i > 0 && list[i].LBA < sb.endOf(list[i-1]) {
			return "page extents that overlap"
		}
	}
	return ""
}

// endOf is the LBA behind an extent.
func (sb *Superblock) endOf(e PageExtent) nvme.LBA {
	share, _ := sb.pageShare(e.Spec()) // it was checked when the superblock was read
	return e.TableLBA + nvme.LBA(share.tableLBAs+share.mapLBAs)
}

// sortPlaces orders extents by where they are. One without a slot here takes nothing.
func (sb *Superblock) sortPlaces(list []PageExtent) {
	slices.SortFunc(list, func(a, b PageExtent) int {
		return cmp.Or(cmp.Compare(a.LBA, b.LBA), cmp.Compare(sb.endOf(a), sb.endOf(b)))
	})
}

// pageExtents are the parts of the SSD that pages take, in order of LBAs.
func (sb *Superblock) pageExtents() []Extent {
	var out []Extent
	list := sb.Pages.All()
	sb.sortPlaces(list)
	for _, e := range list {
		out = append(out, Extent{"pages of pack " + e.ID.String(), e.LBA, e.LBAs},
			Extent{"page checksums of pack " + e.ID.String(), e.TableLBA,
				int64(sb.endOf(e) - e.TableLBA)})
	}
	return out
}
