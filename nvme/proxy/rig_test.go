package proxy

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"helios/internal/hostmem"
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
	g          *rig
	qid, cqid  uint16
	n          int
	sqm, cqm   []byte
	sq, cq     nvme.IOVA
	tail, head int
	phase      bool
	sqdb, cqdb *uint32
}

const rigMem = 8 << 20

// newFile makes a backing of zeroes.
func newFile(t testing.TB, bytes int64, ram bool) string {
	t.Helper()
	dir := t.TempDir()
	if ram {
		d, err := os.MkdirTemp("/dev/shm", "proxytest")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(d) })
		dir = d
	}
	p := filepath.Join(dir, "ssd.img")
	if err := Create(p, bytes); err != nil {
		t.Fatal(err)
	}
	return p
}

// newRig opens an SSD, enables its controller and checks that everything comes back at the end.
func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	checkLeaks(t)
	if cfg.Path == "" {
		cfg.Path = newFile(t, 16<<20, cfg.RAM)
	}
	bus, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{t: t, bus: bus}
	g.mem, g.iova = g.dma(rigMem)
	g.adm = g.ring(0, 0, 32)
	t.Cleanup(g.close)
	g.enable()
	return g
}

var leaksChecked sync.Map // test names

// checkLeaks compares goroutines, descriptors and memory off the heap at the end of a test
// with those at its start.
// The first call of a test counts.
func checkLeaks(t testing.TB) {
	t.Helper()
	if _, again := leaksChecked.LoadOrStore(t.Name(), true); again {
		return
	}
	goroutines, fds, mem := runtime.NumGoroutine(), openFDs(t), hostmem.Usage()
	t.Cleanup(func() {
		leaksChecked.Delete(t.Name())
		if t.Failed() {
			return
		}
		deadline := time.Now().Add(5 * time.Second)
		for runtime.NumGoroutine() > goroutines && time.Now().Before(deadline) {
			runtime.Gosched()
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			buf := make([]byte, 1<<16)
			t.Errorf("%d goroutines, %d at the start\n%s", n, goroutines, buf[:runtime.Stack(buf, true)])
		}
		if n := openFDs(t); n != fds {
			t.Errorf("%d file descriptors, %d at the start", n, fds)
		}
		for k, v := range hostmem.Usage() {
			if v != mem[k] {
				t.Errorf("%d bytes of %s, %d at the start", v, k, mem[k])
			}
		}
	})
}

func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range d {
		// The runtime opens an epoll and an eventfd when a file first becomes pollable.
		l, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(l, "eventpoll") && !strings.Contains(l, "eventfd") {
			n++
		}
	}
	return n
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
	q := &ring{g: g, qid: qid, cqid: cqid, n: n, phase: true}
	q.sqm, q.sq = g.dma(int64(n * nvme.CommandBytes))
	q.cqm, q.cq = g.dma(int64(n * nvme.CompletionBytes))
	var err error
	if q.sqdb, err = g.bus.Doorbell(2 * uint32(qid)); err != nil {
		g.t.Fatal(err)
	}
	if q.cqdb, err = g.bus.Doorbell(2*uint32(cqid) + 1); err != nil {
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
	g.write32(nvme.RegAQA, nvme.MakeAQA(g.adm.n, g.adm.n))
	for reg, v := range map[uint32]nvme.IOVA{nvme.RegASQ: g.adm.sq, nvme.RegACQ: g.adm.cq} {
		if err := g.bus.Write64(reg, uint64(v)); err != nil {
			g.t.Fatal(err)
		}
	}
	g.adm.tail, g.adm.head, g.adm.phase = 0, 0, true
	clear(g.adm.cqm)
	g.write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable))
	if c := g.csts(); !c.RDY() || c.CFS() {
		g.t.Fatalf("CSTS %#x after enabling", c)
	}
}

func (g *rig) close() {
	g.write32(nvme.RegCC, 0)
	for _, q := range g.rings {
		g.undma(q.sqm, q.sq)
		g.undma(q.cqm, q.cq)
	}
	g.undma(g.mem, g.iova)
	if err := g.bus.Close(); err != nil {
		g.t.Error(err)
	}
}

func (g *rig) nextCID() uint16 { g.cid++; return g.cid }

// put writes commands to the queue and rings its doorbell once.
func (q *ring) put(cmds ...nvme.Command) {
	for _, c := range cmds {
		*(*nvme.Command)(unsafe.Pointer(&q.sqm[q.tail*nvme.CommandBytes])) = c
		q.tail = (q.tail + 1) % q.n
	}
	nvme.StoreDoorbell(q.sqdb, uint32(q.tail))
	q.g.bus.Kick(q.qid)
}

// get waits for the next completion, no longer than d; false when none came.
func (q *ring) get(d time.Duration) (nvme.Completion, bool) {
	for deadline := time.Now().Add(d); ; {
		if c, ok := q.poll(); ok {
			return c, true
		}
		left := time.Until(deadline)
		if left <= 0 {
			return nvme.Completion{}, false
		}
		q.g.bus.WaitCQ(q.cqid, left)
	}
}

func (q *ring) poll() (nvme.Completion, bool) {
	c, ok := nvme.LoadCompletion((*nvme.Completion)(unsafe.Pointer(&q.cqm[q.head*nvme.CompletionBytes])), q.phase)
	if !ok {
		return c, false
	}
	if q.head++; q.head == q.n {
		q.head, q.phase = 0, !q.phase
	}
	nvme.StoreDoorbell(q.cqdb, uint32(q.head))
	return c, true
}

// do runs one command to its end.
func (q *ring) do(c nvme.Command) nvme.Completion {
	q.g.t.Helper()
	q.put(c)
	e, ok := q.get(10 * time.Second)
	if !ok {
		q.g.t.Fatalf("queue %d: no completion of opcode %02xh", q.qid, c.Opcode)
	}
	if e.CID != c.CID || e.SQID != q.qid {
		q.g.t.Fatalf("completion of CID %d of queue %d, want %d of %d", e.CID, e.SQID, c.CID, q.qid)
	}
	return e
}

// must runs a command that has to succeed.
func (q *ring) must(c nvme.Command) uint32 {
	q.g.t.Helper()
	e := q.do(c)
	if s := e.Status(); !s.OK() {
		q.g.t.Fatalf("queue %d, opcode %02xh: %v", q.qid, c.Opcode, s)
	}
	return e.DW0
}

// want runs a command that has to fail with a status, DNR set.
func (q *ring) want(st nvme.Status, c nvme.Command) {
	q.g.t.Helper()
	e := q.do(c)
	if s := e.Status(); !s.Is(st) || !s.DNR() {
		q.g.t.Errorf("queue %d, opcode %02xh: %v (DNR %v), want %v, not retryable", q.qid, c.Opcode, s, s.DNR(), st)
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
	at := g.mem[rigMem-8192:]
	g.adm.must(nvme.GetLogPageCommand(g.nextCID(), nvme.LogSMART, nvme.NSIDAll, nvme.SMARTLogBytes, false, uint64(g.iova)+rigMem-8192, 0))
	return *(*nvme.SMARTLog)(unsafe.Pointer(&at[0]))
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
	at := listOff
	for i := range entries {
		if at%page == page-8 && i != entries-1 { // the last entry of a page chains
			follow := at + 8
			*(*uint64)(unsafe.Pointer(&g.mem[at])) = uint64(g.iova) + uint64(follow)
			at = follow
		}
		*(*uint64)(unsafe.Pointer(&g.mem[at])) = next + uint64(i*page)
		at += 8
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
