package nvme_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// driver is the least that can drive a queue pair: it keeps commands in flight, and checks
// phase, CID and SQ head of every completion.
type driver struct {
	*testrig.Queue
	t      *testing.T
	c      *nvme.Controller
	qp     *nvme.QueuePair
	flight map[uint16]bool
}

func newDriver(t *testing.T, c *nvme.Controller, entries int) *driver {
	t.Helper()
	qp, err := c.CreateQueuePair(t.Context(), entries)
	require.NoError(t, err)
	return &driver{Queue: testrig.QueueOf(c.Bus(), qp), t: t, c: c, qp: qp,
		flight: map[uint16]bool{}}
}

func (d *driver) full() bool { return len(d.flight) == d.qp.Entries-1 }

func (d *driver) submit(cmd nvme.Command) {
	d.t.Helper()
	if d.full() || d.flight[cmd.CID] {
		d.t.Fatalf("queue is full or CID %d is in flight", cmd.CID)
	}
	d.flight[cmd.CID] = true
	d.Put(cmd)
}

// poll takes a completion if there is one within d.
func (d *driver) poll(wait time.Duration) (nvme.Completion, bool) {
	d.t.Helper()
	e, ok := d.Get(wait)
	if !ok {
		return e, false
	}
	if e.SQID != d.qp.ID || !d.flight[e.CID] || int(e.SQHead) >= d.qp.Entries {
		d.t.Fatalf("completion %+v of queue %d", e, d.qp.ID)
	}
	delete(d.flight, e.CID)
	return e, true
}

func (d *driver) do(cmd nvme.Command) nvme.Status {
	d.t.Helper()
	d.submit(cmd)
	e, ok := d.poll(10 * time.Second)
	if !ok {
		d.t.Fatalf("command %+v was not completed", cmd)
	}
	return e.Status()
}

// memory is DMA memory with room for PRP lists at its end.
type memory struct {
	data  []byte
	iova  nvme.IOVA
	lists int // offset of the list pages
}

func newMemory(t *testing.T, c *nvme.Controller, bytes int) *memory {
	t.Helper()
	const lists = 16 * 4096
	b, err := hostmem.Alloc(int64(bytes+lists), "nvme e2e test")
	require.NoError(t, err)
	iova, err := c.MapDMA(b)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := errors.Join(c.UnmapDMA(iova, int64(len(b))), hostmem.Free(b)); err != nil {
			t.Error(err)
		}
	})
	return &memory{b, iova, bytes}
}

func (m *memory) prp(t *testing.T, off, n int) (uint64, uint64) {
	t.Helper()
	used := 0
	p1, p2, err := nvme.BuildPRP(m.iova+nvme.IOVA(off), n, 4096, func() ([]uint64, nvme.IOVA,
		error) {
		pos := m.lists + used*4096
		used++
		return hostmem.View[uint64](m.data[pos : pos+4096]), m.iova + nvme.IOVA(pos), nil
	})
	require.NoError(t, err)
	return p1, p2
}

// device is a software controller, with a bus that injects faults in front of it or without.
type device struct {
	proxy.Config
	front  bool
	faults *faultinject.Set
}

// kinds are the controllers that everything here runs against.
func kinds(t *testing.T, fn func(t *testing.T, cfg device)) {
	for _, k := range []proxy.Config{
		{LBABytes: 512, RAM: true}, {LBABytes: 4096, RAM: true, MDTS: 10},
		{LBABytes: 512, OutOfOrder: true}, {LBABytes: 4096, Buffered: true, MDTS: 10},
	} {
		name := fmt.Sprintf("%d", k.LBABytes)
		switch {
		case k.RAM:
			name += "-ram"
		case k.Buffered:
			name += "-buffered"
		default:
			name += "-direct"
		}
		t.Run(name, func(t *testing.T) {
			k.Path = filepath.Join(t.TempDir(), "ssd.img")
			require.NoError(t, proxy.Create(k.Path, 16<<20))
			fn(t, device{Config: k})
		})
		t.Run(name+"-behind-faults", func(t *testing.T) {
			k.Path = filepath.Join(t.TempDir(), "ssd.img")
			require.NoError(t, proxy.Create(k.Path, 16<<20))
			fn(t, device{Config: k, front: true})
		})
	}
}

// bringUp opens a proxy and checks at the end that it left nothing behind.
func bringUp(t *testing.T, cfg device, opt nvme.Options) *nvme.Controller {
	t.Helper()
	goroutines, usage, fds := runtime.NumGoroutine(), fmt.Sprint(hostmem.Usage()), openFiles(t)
	t.Cleanup(func() {
		if u := fmt.Sprint(hostmem.Usage()); u != usage {
			t.Errorf("host memory %s, was %s", u, usage)
		}
		if n := openFiles(t); n != fds {
			t.Errorf("%d descriptors, were %d", n, fds)
		}
		for end := time.Now().Add(
			5 * time.Second); runtime.NumGoroutine() > goroutines; runtime.Gosched() {
			if time.Now().After(end) {
				t.Errorf("%d goroutines, were %d", runtime.NumGoroutine(), goroutines)
				return
			}
		}
	})
	ssd, err := proxy.Open(cfg.Config)
	require.NoError(t, err)
	var bus nvme.Bus = ssd
	if cfg.front {
		bus = faultbus.New(ssd, cfg.faults, faultbus.Options{})
	}
	c, err := nvme.Open(t.Context(), bus, opt)
	if err != nil {
		t.Fatal(errors.Join(err, bus.Close()))
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

func openFiles(t *testing.T) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(l)
}

func TestProxyIdentity(t *testing.T) {
	kinds(t, func(t *testing.T, cfg device) {
		c := bringUp(t, cfg, nvme.Options{})
		mdts := cfg.MDTS
		if mdts == 0 {
			mdts = 5
		}
		if ns := c.Namespace(); ns.LBABytes != cfg.LBABytes || ns.Bytes() != 16<<20 ||
			c.MaxTransferBytes() != min(4096<<mdts, 1<<20) {
			t.Errorf("%+v, %d", ns, c.MaxTransferBytes())
		}
		if c.Serial() == "" || c.Model() == "" || c.Firmware() == "" || c.MaxQueuePairs() < 1 ||
			c.MaxQueueEntries() < 64 {
			t.Errorf("%q %q %q %d %d", c.Model(), c.Serial(), c.Firmware(), c.MaxQueuePairs(),
				c.MaxQueueEntries())
		}
	})
}

// Random reads and writes at every kind of alignment, several in flight, against a model in
// memory. Reads land between guard bytes: exactly the bytes asked for may change.
func TestProxyReadsWhatWasWritten(t *testing.T) {
	kinds(t, func(t *testing.T, cfg device) {
		c := bringUp(t, cfg, nvme.Options{})
		seed := uint64(1)
		source := rand.NewChaCha8([32]byte{byte(seed), byte(cfg.LBABytes >> 8)})
		r := rand.New(source)
		random := func(b []byte) {
			if _, err := source.Read(b); err != nil {
				t.Fatal(err)
			}
		}
		lba, limit := c.Namespace().LBABytes, c.MaxTransferBytes()
		d := newDriver(t, c, 9) // a small ring wraps often
		m := newMemory(t, c, 2*limit+3*4096)
		model := make([]byte, 16<<20)
		random(model)
		guard := bytes.Repeat([]byte{0xa5}, m.lists)
		// Fill, so that every block is known.
		for pos := 0; pos < len(model); pos += limit {
			n := copy(m.data[:limit], model[pos:])
			p1, p2 := m.prp(t, 0, n)
			if st := d.do(nvme.WriteCommand(1, c.Namespace().ID, nvme.LBA(pos/lba), uint32(n/lba),
				p1, p2)); !st.OK() {
				t.Fatal(st)
			}
		}
		rounds := 400
		if testing.Short() {
			rounds = 100
		}
		for i := range rounds {
			off := r.IntN(2*4096/4) * 4
			if r.IntN(2) == 0 {
				off = r.IntN(3) * 4096
			}
			n := lba * (1 + r.IntN(min(limit/lba, 1<<r.IntN(12))))
			pos := r.IntN((len(model)-n)/lba+1) * lba
			p1, p2 := m.prp(t, off, n)
			cid := uint16(r.Uint32())
			if r.IntN(3) == 0 {
				random(m.data[off : off+n])
				copy(model[pos:pos+n], m.data[off:])
				if st := d.do(nvme.WriteCommand(cid, c.Namespace().ID, nvme.LBA(pos/lba),
					uint32(n/lba), p1, p2)); !st.OK() {
					t.Fatalf("seed %d round %d: %v", seed, i, st)
				}
				continue
			}
			copy(m.data, guard)
			if st := d.do(nvme.ReadCommand(cid, c.Namespace().ID, nvme.LBA(pos/lba), uint32(n/lba),
				p1, p2)); !st.OK() {
				t.Fatalf("seed %d round %d: %v", seed, i, st)
			}
			if !bytes.Equal(m.data[off:off+n], model[pos:pos+n]) {
				t.Fatalf("seed %d round %d: %d bytes of LBA %d at offset %d differ", seed, i, n,
					pos/lba, off)
			}
			if !bytes.Equal(m.data[:off], guard[:off]) || !bytes.Equal(m.data[off+n:m.lists],
				guard[off+n:]) {
				t.Fatalf("seed %d round %d: bytes beside the %d at offset %d changed", seed,
					i, n, off)
			}
		}
		if st := d.do(nvme.FlushCommand(7, c.Namespace().ID)); !st.OK() {
			t.Fatal(st)
		}
		before, err := c.SMART(t.Context())
		require.NoError(t, err)
		// A full ring of reads, each to its own block of memory.
		for round := range 20 {
			want := map[uint16]int{}
			for !d.full() {
				cid := uint16(len(d.flight))
				pos := r.IntN(len(model)/lba) * lba
				p1, p2 := m.prp(t, int(cid)*lba, lba)
				want[cid] = pos
				d.submit(nvme.ReadCommand(cid, c.Namespace().ID, nvme.LBA(pos/lba), 1, p1, p2))
			}
			for len(d.flight) > 0 {
				e, ok := d.poll(10 * time.Second)
				if !ok || !e.Status().OK() {
					t.Fatalf("round %d: %v %v", round, ok, e.Status())
				}
				if pos := want[e.CID]; !bytes.Equal(m.data[int(e.CID)*lba:][:lba],
					model[pos:pos+lba]) {
					t.Fatalf("round %d: LBA %d differs when its completion came", round, pos/lba)
				}
			}
		}
		after, err := c.SMART(t.Context())
		if err != nil || after.HostReads.Lo-before.HostReads.Lo != 160 {
			t.Errorf("SMART counted %d reads, want 160 (%v)", after.HostReads.Lo-
				before.HostReads.Lo, err)
		}
		if err := c.DeleteQueuePair(t.Context(), d.qp); err != nil {
			t.Error(err)
		}
	})
}

// Commands that a controller must refuse, and the words for it.
func TestProxyRefusals(t *testing.T) {
	kinds(t, func(t *testing.T, cfg device) {
		c := bringUp(t, cfg, nvme.Options{})
		d := newDriver(t, c, 16)
		m := newMemory(t, c, 1<<20)
		ns := c.Namespace()
		p1, p2 := m.prp(t, 0, ns.LBABytes)
		over := uint32(c.MaxTransferBytes()/ns.LBABytes) + 1
		if cfg.MDTS != 0 { // beyond Options.MaxTransferBytes, not yet MDTS
			over = uint32(4096<<cfg.MDTS/ns.LBABytes) + 1
		}
		for _, s := range []struct {
			cmd  nvme.Command
			want nvme.Status
		}{
			{nvme.ReadCommand(1, ns.ID, nvme.LBA(ns.Blocks), 1, p1, p2), nvme.StatusLBAOutOfRange},
			{nvme.ReadCommand(2, ns.ID, nvme.LBA(ns.Blocks-1), 2, p1, p2),
				nvme.StatusLBAOutOfRange},
			{nvme.ReadCommand(3, ns.ID, ^nvme.LBA(0), 1, p1, p2), nvme.StatusLBAOutOfRange},
			{nvme.ReadCommand(4, ns.ID+7, 0, 1, p1, p2), nvme.StatusInvalidNamespace},
			{nvme.ReadCommand(5, ns.ID, 0, over, p1, p2), nvme.StatusInvalidField},
			{nvme.Command{Opcode: 0x7f, CID: 6, NSID: ns.ID}, nvme.StatusInvalidOpcode},
		} {
			if st := d.do(s.cmd); !st.Is(s.want) || !st.DNR() {
				t.Errorf("%+v: %v (DNR %v), want %v", s.cmd, st, st.DNR(), s.want)
			}
		}
		page := make([]byte, 6*nvme.ErrorLogEntryBytes)
		if _, err := c.Admin(t.Context(), "error log", nvme.GetLogPageCommand(0,
			nvme.LogErrorInformation, nvme.NSIDAll, len(page), false, 0, 0), page); err != nil {
			t.Error(err)
		}
		e := (*[6]nvme.ErrorLogEntry)(unsafe.Pointer(&page[0]))
		if e[0].SQID != d.qp.ID || e[0].CID != 6 || e[5].ErrorCount == 0 {
			t.Errorf("error log %+v", e)
		}
		if _, err := c.CreateQueuePair(t.Context(), c.MaxQueueEntries()+
			1); errs.ClassOf(err) != errs.Usage {
			t.Errorf("too deep: %v", err)
		}
	})
}

// Injected faults: an error status in words, an Abort of a command whose completion is
// lost, and the deletion of its queue.
func TestProxyFaults(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ssd.img")
	require.NoError(t, proxy.Create(path, 4<<20))
	faults, err := faultinject.Parse(
		"error(op=read,lba=100-107,sct=2,sc=0x81,dnr=1,times=1);lost(op=read,lba=200,times=2)")
	require.NoError(t, err)
	c := bringUp(t, device{Config: proxy.Config{Path: path, RAM: true}, front: true,
		faults: faults}, nvme.Options{})
	d := newDriver(t, c, 16)
	m := newMemory(t, c, 8192)
	p1, p2 := m.prp(t, 0, 4096)
	read := func(cid uint16,
		lba nvme.LBA) nvme.Command {
		return nvme.ReadCommand(cid, 1, lba, 8, p1, p2)
	}
	st := d.do(read(1, 96))
	e := &nvme.StatusError{Bus: c.Name(), QID: d.qp.ID, CID: 1, Op: "read", LBA: 96, Blocks: 8,
		Status: st}
	if !st.OK() { // LBAs 96 to 103 touch the range
		if want := fmt.Sprintf(
			"nvme proxy:%s q1: read LBA 96+8: unrecovered read error (SCT 2h, SC 81h), not retryable; run \"heliosctl verify --ssds ",
			path); !strings.HasPrefix(e.Error(), want) {
			t.Errorf("%v", e)
		}
	} else {
		t.Error("the fault did not surface")
	}
	if st := d.do(read(2, 96)); !st.OK() {
		t.Errorf("second read: %v", st)
	}
	d.submit(read(3, 200))
	if e, ok := d.poll(30 * time.Millisecond); ok {
		t.Fatalf("lost completion came: %+v", e)
	}
	if aborted, err := c.Abort(t.Context(), d.qp.ID, 3); err != nil || !aborted {
		t.Fatalf("abort: %v %v", aborted, err)
	}
	if e, ok := d.poll(5 * time.Second); !ok || e.CID != 3 ||
		!e.Status().Is(nvme.StatusAbortRequested) {
		t.Errorf("aborted command: %+v %v", e, ok)
	}
	d.submit(read(4, 200))
	if e, ok := d.poll(30 * time.Millisecond); ok { // fetched, and lost as well
		t.Fatalf("lost completion came: %+v", e)
	}
	if err := c.DeleteQueuePair(t.Context(), d.qp); err != nil {
		t.Error(err)
	}
	d = newDriver(t, c, 16)
	if st := d.do(read(5, 200)); !st.OK() {
		t.Error(st)
	}
	for f, n := range faults.Counts() {
		if n == 0 {
			t.Errorf("fault %s never surfaced", f)
		}
	}
}

// A reset with reads in flight: no DMA afterwards, and new queues work.
func TestProxyReset(t *testing.T) {
	kinds(t, func(t *testing.T, cfg device) {
		c := bringUp(t, cfg, nvme.Options{})
		m := newMemory(t, c, 64*4096)
		for round := range 5 {
			d := newDriver(t, c, 33)
			for !d.full() {
				i := len(d.flight)
				p1, p2 := m.prp(t, i*4096, 4096)
				d.submit(nvme.ReadCommand(uint16(i), 1, nvme.LBA(i*8), uint32(4096/cfg.LBABytes),
					p1, p2))
			}
			require.NoError(t, c.Reset(t.Context()))
			for i := range m.data[:m.lists] {
				m.data[i] = byte(round + 1)
			}
			if err := c.DeleteQueuePair(t.Context(), d.qp); err != nil { // frees its memory only
				t.Fatal(err)
			}
			d = newDriver(t, c, 8)
			p1, p2 := m.prp(t, m.lists-8192, 4096)
			if st := d.do(nvme.ReadCommand(1, 1, 0, uint32(4096/cfg.LBABytes), p1, p2)); !st.OK() {
				t.Fatal(st)
			}
			if n := bytes.Count(m.data[:m.lists-8192], []byte{byte(round + 1)}); n != m.lists-8192 {
				t.Fatalf("round %d: %d bytes changed after the reset", round, m.lists-8192-n)
			}
			require.NoError(t, c.DeleteQueuePair(t.Context(), d.qp))
		}
	})
}
