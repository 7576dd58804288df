package proxy

import (
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
)

// rig is a host that drives a controller at the level of queue entries, so that it can send
// what no driver would. Only nvme's structures are shared with the code under test.
type rig struct {
	t     testing.TB
	bus   *Bus
	adm   *ring
	mem   []byte // DMA memory for data and PRP lists
	iova  nvme.IOVA
	cid   uint16
	rings []*ring
}

type ring struct {
	*testrig.Queue
	g      *rig
	sq, cq nvme.IOVA
}

const rigMem = 8 << 20

// newFile makes a backing of zeroes.
func newFile(t testing.TB, bytes int64, ram bool) string {
	t.Helper()
	dir := t.TempDir()
	if ram {
		dir = testrig.MemoryDir(t)
	}
	p := filepath.Join(dir, "ssd.img")
	require.NoError(t, Create(p, bytes))
	return p
}

// newRig opens an SSD, enables its controller and checks that everything comes back at the end.
func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	testrig.CheckLeaks(t)
	if cfg.Path == "" {
		cfg.Path = newFile(t, 16<<20, cfg.RAM)
	}
	bus, err := Open(cfg)
	require.NoError(t, err)
	g := &rig{t: t, bus: bus}
	g.mem, g.iova = g.dma(rigMem)
	g.adm = g.ring(0, 0, 32)
	t.Cleanup(g.close)
	g.enable()
	return g
}

func (g *rig) dma(n int64) ([]byte, nvme.IOVA) {
	g.t.Helper()
	m, err := hostmem.Alloc(n, "proxy test")
	if err != nil {
		g.t.Fatal(err)
	}
	iova, err := g.bus.MapDMA(m)
	if err != nil {
		g.t.Fatal(err)
	}
	return m, iova
}

func (g *rig) undma(m []byte, iova nvme.IOVA) {
	g.t.Helper()
	if err := g.bus.UnmapDMA(iova, int64(len(m))); err != nil {
		g.t.Error(err)
	}
	if err := hostmem.Free(m); err != nil {
		g.t.Error(err)
	}
}

func (g *rig) ring(qid, cqid uint16, n int) *ring {
	g.t.Helper()
	q := &ring{g: g, Queue: &testrig.Queue{ID: qid, CQID: cqid, Entries: n, Bus: g.bus,
		Phase: true}}
	q.SQ, q.sq = g.dma(int64(n * nvme.CommandBytes))
	q.CQ, q.cq = g.dma(int64(n * nvme.CompletionBytes))
	var err error
	if q.SQDoorbell, err = g.bus.Doorbell(2 * uint32(qid)); err != nil {
		g.t.Fatal(err)
	}
	if q.CQDoorbell, err = g.bus.Doorbell(2*uint32(cqid) + 1); err != nil {
		g.t.Fatal(err)
	}
	g.rings = append(g.rings, q)
	return q
}

func (g *rig) write32(off, v uint32) {
	g.t.Helper()
	if err := g.bus.Write32(off, v); err != nil {
		g.t.Fatal(err)
	}
}

func (g *rig) csts() nvme.CSTS {
	g.t.Helper()
	v, err := g.bus.Read32(nvme.RegCSTS)
	if err != nil {
		g.t.Fatal(err)
	}
	return nvme.CSTS(v)
}

func (g *rig) enable() {
	g.t.Helper()
	g.write32(nvme.RegAQA, nvme.MakeAQA(g.adm.Entries, g.adm.Entries))
	for reg, v := range map[uint32]nvme.IOVA{nvme.RegASQ: g.adm.sq, nvme.RegACQ: g.adm.cq} {
		if err := nvme.Write64(g.bus, reg, uint64(v)); err != nil {
			g.t.Fatal(err)
		}
	}
	g.adm.Tail, g.adm.Head, g.adm.Phase = 0, 0, true
	clear(g.adm.CQ)
	g.write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable))
	if c := g.csts(); !c.RDY() || c.CFS() {
		g.t.Fatalf("CSTS %#x after enabling", c)
	}
}

func (g *rig) close() {
	g.write32(nvme.RegCC, 0)
	for _, q := range g.rings {
		g.undma(q.SQ, q.sq)
		g.undma(q.CQ, q.cq)
	}
	g.undma(g.mem, g.iova)
	if err := g.bus.Close(); err != nil {
		g.t.Error(err)
	}
}

func (g *rig) nextCID() uint16 { g.cid++; return g.cid }

// must runs a command that has to succeed.
func (q *ring) must(c nvme.Command) uint32 {
	q.g.t.Helper()
	e := q.Do(q.g.t, c)
	if s := e.Status(); !s.OK() {
		q.g.t.Fatalf("queue %d, opcode %02xh: %v", q.ID, c.Opcode, s)
	}
	return e.DW0
}

// want runs a command that has to fail with a status, DNR set.
func (q *ring) want(st nvme.Status, c nvme.Command) {
	q.g.t.Helper()
	e := q.Do(q.g.t, c)
	if s := e.Status(); !s.Is(st) || !s.DNR() {
		q.g.t.Errorf("queue %d, opcode %02xh: %v (DNR %v), want %v, not retryable", q.ID, c.Opcode,
			s, s.DNR(), st)
	}
}

// pair creates an I/O queue pair.
func (g *rig) pair(qid uint16, n int) *ring {
	g.t.Helper()
	q := g.ring(qid, qid, n)
	g.adm.must(nvme.CreateCQCommand(g.nextCID(), qid, n, q.cq))
	g.adm.must(nvme.CreateSQCommand(g.nextCID(), qid, n, q.sq, qid))
	return q
}

func (g *rig) smart() nvme.SMARTLog {
	g.t.Helper()
	off := g.mem[rigMem-8192:]
	g.adm.must(nvme.GetLogPageCommand(g.nextCID(), nvme.LogSMART, nvme.NSIDAll, nvme.SMARTLogBytes,
		false, uint64(g.iova)+rigMem-8192, 0))
	return *(*nvme.SMARTLog)(unsafe.Pointer(&off[0]))
}

// listPRPs gives the data pointer of n bytes at off of the rig's memory, its list at listOff.
func (g *rig) prps(off, n, listOff int) (prp1, prp2 uint64) {
	const page = 4096
	prp1 = uint64(g.iova) + uint64(off)
	first := page - off%page
	if n <= first {
		return prp1, 0
	}
	next := prp1 + uint64(first)
	if n-first <= page {
		return prp1, next
	}
	list := uint64(g.iova) + uint64(listOff)
	prp2 = list
	entries := (n - first + page - 1) / page
	pos := listOff
	for i := range entries {
		if pos%page == page-8 && i != entries-1 { // the last entry of a page chains
			follow := pos + 8
			*(*uint64)(unsafe.Pointer(&g.mem[pos])) = uint64(g.iova) + uint64(follow)
			pos = follow
		}
		*(*uint64)(unsafe.Pointer(&g.mem[pos])) = next + uint64(i*page)
		pos += 8
	}
	return prp1, prp2
}

// kinds are the ways to reach a medium, each with both block sizes where it matters.
func kinds() map[string]Config {
	m := map[string]Config{
		"file":     {},
		"file4096": {LBABytes: 4096},
		"buffered": {Buffered: true},
		"pread":    {NoIOUring: true},
		"ram":      {RAM: true},
		"ram4096":  {RAM: true, LBABytes: 4096},
		"unorder":  {RAM: true, OutOfOrder: true},
	}
	return m
}
