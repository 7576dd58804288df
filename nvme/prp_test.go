package nvme

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// prpLists hands out list memories at made-up addresses and finds them again for the walker.
type prpLists struct {
	page    int
	entries int // per list, 0 = all of the page
	first   int // byte offset of the first list in its page
	mem     map[uint64][]uint64
	calls   int
}

func (l *prpLists) next() ([]uint64, IOVA, error) {
	off := 0
	if l.calls == 0 {
		off = l.first
	}
	l.calls++
	base := uint64(0x5000_0000_0000) + uint64(l.calls*2*l.page) + uint64(off)
	n := (l.page - off) / 8
	if l.entries != 0 {
		n = l.entries
	}
	// Some more than the page has, which must not be used.
	e := make([]uint64, n+3)
	for i := range e {
		e[i] = 0xdead
	}
	if l.mem == nil {
		l.mem = map[uint64][]uint64{}
	}
	l.mem[base] = e
	return e, IOVA(base), nil
}

func (l *prpLists) load(addr uint64) []byte {
	for base, e := range l.mem {
		if addr >= base && addr+8 <= base+uint64(len(e))*8 {
			return unsafe.Slice((*byte)(unsafe.Pointer(&e[(addr-base)/8])), 8)
		}
	}
	return nil
}

// prpListEntries is the number of PRP list entries, not counting chain pointers, that a transfer
// needs; 0 when PRP1 and PRP2 alone describe it.
func prpListEntries(addr IOVA, bytes, pageBytes int) int {
	pages := prpPages(addr, bytes, pageBytes)
	if pages <= 2 {
		return 0
	}
	return pages - 1
}

// prpListPages is the number of whole, page-aligned list pages that BuildPRP asks for.
func prpListPages(addr IOVA, bytes, pageBytes int) int {
	n, per := prpListEntries(addr, bytes, pageBytes), pageBytes/8
	pages := 0
	for n > 0 {
		pages++
		if n <= per {
			break
		}
		n -= per - 1
	}
	return pages
}

// checkPRP builds PRPs and has the walker read them again: exactly the bytes, in order.
func checkPRP(t *testing.T, addr uint64, bytes, page, firstOff int) {
	t.Helper()
	l := &prpLists{page: page, first: firstOff}
	prp1, prp2, err := BuildPRP(IOVA(addr), bytes, page, l.next)
	if err != nil {
		t.Fatalf("BuildPRP(%#x, %d, %d): %v", addr, bytes, page, err)
	}
	segs, err := walkPRP(prp1, prp2, bytes, page, l.load)
	if err != nil {
		t.Fatalf("BuildPRP(%#x, %d, %d) = %#x %#x: walker: %v", addr, bytes, page, prp1, prp2, err)
	}
	off := addr
	for i, s := range segs {
		if s.addr != off {
			t.Fatalf("BuildPRP(%#x, %d, %d): segment %d at %#x, want %#x", addr, bytes, page, i,
				s.addr, off)
		}
		if s.addr/uint64(page) != (s.addr+uint64(s.n)-1)/uint64(page) {
			t.Fatalf("segment %d crosses a page", i)
		}
		off += uint64(s.n)
	}
	if off != addr+uint64(bytes) {
		t.Fatalf("BuildPRP(%#x, %d, %d): %d bytes covered", addr, bytes, page, off-addr)
	}
	if firstOff == 0 {
		if want := prpListPages(IOVA(addr), bytes, page); l.calls != want {
			t.Fatalf("BuildPRP(%#x, %d, %d): %d list pages, prpListPages says %d", addr, bytes,
				page, l.calls, want)
		}
	}
	if (l.calls == 0) != (prpListEntries(IOVA(addr), bytes, page) == 0) {
		t.Fatalf("BuildPRP(%#x, %d, %d): %d lists, prpListEntries says %d", addr, bytes, page,
			l.calls, prpListEntries(IOVA(addr), bytes, page))
	}
}

func TestBuildPRPEveryAlignment(t *testing.T) {
	const base = 0x1234_5678_9000
	for off := 0; off < 4096; off += 4 {
		for _, n := range []int{4, 512, 4096 - off, 4096, 4100, 8192 - off, 8192, 8196, 12288 - off,
			16384} {
			if n > 0 {
				checkPRP(t, base+uint64(off), n, 4096, 0)
			}
		}
	}
}

// A list page has 512 entries; 511 of them are data when it is chained.
func TestBuildPRPListEdges(t *testing.T) {
	const page = 4096
	for _, entries := range []int{2, 510, 511, 512, 513, 1021, 1022, 1023, 1024, 1533, 1534, 1535} {
		for _, off := range []uint64{0, 4, 512, 4092} {
			checkPRP(t, 0x10_0000_0000+off, (entries+1)*page-int(off), page, 0)
			checkPRP(t, 0x10_0000_0000+off, (entries+1)*page-int(off)-4, page, 0)
			checkPRP(t, 0x10_0000_0000+off, (entries+1)*page-int(off)+4, page, 0)
		}
	}
	for _, first := range []int{8, 2048, 4096 - 16} { // the first list may start inside its page
		for _, pages := range []int{3, 4, 255, 256, 257, 258, 600, 1200} {
			checkPRP(t, 0x10_0000_0000, pages*page, page, first)
		}
	}
}

func TestBuildPRPRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		page := 4096 << r.IntN(4)
		addr := r.Uint64N(1<<48) &^ 3
		bytes := (1 + r.IntN(1<<r.IntN(20))) * 4
		checkPRP(t, addr, bytes, page, r.IntN(page/8-1)*8)
	}
}

func TestBuildPRPExact(t *testing.T) {
	l := &prpLists{page: 4096}
	for _, c := range []struct {
		addr       uint64
		bytes      int
		prp1, prp2 uint64
	}{
		{0x1000, 4096, 0x1000, 0},
		{0x1ffc, 4, 0x1ffc, 0},
		{0x1ffc, 8, 0x1ffc, 0x2000},
		{0x1e00, 4096, 0x1e00, 0x2000},
		{0x1000, 8192, 0x1000, 0x2000},
		{0xffff_ffff_ffff_f000, 4096, 0xffff_ffff_ffff_f000, 0}, // the last page there is
	} {
		p1, p2, err := BuildPRP(IOVA(c.addr), c.bytes, 4096, l.next)
		if err != nil || p1 != c.prp1 || p2 != c.prp2 {
			t.Errorf("BuildPRP(%#x, %d) = %#x %#x %v, want %#x %#x", c.addr, c.bytes, p1, p2, err,
				c.prp1, c.prp2)
		}
	}
	if l.calls != 0 {
		t.Errorf("%d lists were asked for without need", l.calls)
	}
}

func TestBuildPRPRefuses(t *testing.T) {
	full := errors.New("no list memory left")
	short := func(n int, iova IOVA) func() ([]uint64, IOVA, error) {
		return func() ([]uint64, IOVA, error) { return make([]uint64, n), iova, nil }
	}
	for _, c := range []struct {
		name        string
		addr        IOVA
		bytes, page int
		list        func() ([]uint64, IOVA, error)
		want        string
	}{
		{"address not on a dword", 0x1002, 4096, 4096, nil, "multiple of 4"},
		{"no bytes", 0x1000, 0, 4096, nil, "positive multiple"},
		{"negative", 0x1000, -4, 4096, nil, "positive multiple"},
		{"odd length", 0x1000, 4095, 4096, nil, "positive multiple"},
		{"page size", 0x1000, 4096, 3000, nil, "power of two"},
		{"small page", 0x1000, 4096, 512, nil, "power of two"},
		{"end of the address space", 0xffff_ffff_ffff_f000, 8192, 4096, nil, "address space"},
		{"no list", 0x1000, 12288, 4096, nil, "there is none"},
		{"list fails", 0x1000, 12288, 4096, func() ([]uint64, IOVA, error) { return nil, 0, full },
			full.Error()},
		{"list not on a qword", 0x1000, 12288, 4096, short(512, 0x3004), "multiple of 8"},
		{"list ends inside its page", 0x1000, 4096 * 20, 4096, short(4, 0x3000),
			"before its memory page"},
		{"list has room for the pointer only", 0x1000, 4096 * 20, 4096, short(1, 0x3ff8),
			"room for the chain pointer only"},
		{"empty list", 0x1000, 4096 * 20, 4096, short(0, 0x3000), "before its memory page"},
	} {
		_, _, err := BuildPRP(c.addr, c.bytes, c.page, c.list)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
	}
}

func FuzzBuildPRP(f *testing.F) {
	f.Add(uint64(0x1000), 4096, uint8(0), uint16(0))
	f.Add(uint64(0x1ffc), 8, uint8(0), uint16(0))
	f.Add(uint64(0x10_0000_0200), 513*4096, uint8(0), uint16(8))
	f.Add(uint64(0x10_0000_0000), 2<<20, uint8(0), uint16(4080))
	f.Add(uint64(0xffff_ffff_ffff_f000), 4096, uint8(0), uint16(0))
	f.Add(uint64(3), -1, uint8(9), uint16(1))
	f.Fuzz(func(t *testing.T, addr uint64, bytes int, shift uint8, first uint16) {
		page := 4096 << (shift % 5)
		if bytes > 32<<20 {
			bytes %= 32 << 20
		}
		off := int(first) * 8 % (page - 8)
		valid := addr&3 == 0 && bytes > 0 && bytes&3 == 0 && addr+uint64(bytes)-1 >= addr
		if !valid {
			l := &prpLists{page: page}
			if _, _, err := BuildPRP(IOVA(addr), bytes, page, l.next); err == nil {
				t.Fatalf("BuildPRP(%#x, %d) accepted", addr, bytes)
			}
			return
		}
		if addr+uint64(bytes) < addr { // ends with the address space: the walker's sum would wrap
			return
		}
		checkPRP(t, addr, bytes, page, off&^7)
	})
}

// PRP entries are little-endian.
func TestPRPEntriesAreLittleEndian(t *testing.T) {
	l := &prpLists{page: 4096}
	_, prp2, err := BuildPRP(0x1_2000, 3*4096, 4096, l.next)
	require.NoError(t, err)
	if got := binary.LittleEndian.Uint64(l.load(prp2)); got != 0x1_3000 {
		t.Fatalf("first entry %#x", got)
	}
}

func BenchmarkBuildPRP128K(b *testing.B) {
	list := make([]uint64, 512)
	next := func() ([]uint64, IOVA, error) { return list, 0x2000, nil }
	for b.Loop() {
		if _, _, err := BuildPRP(0x10_0000_0000, 128<<10, 4096, next); err != nil {
			b.Fatal(err)
		}
	}
}
