package nvme

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// quick are options for tests that run into timeouts on purpose.
var quick = Options{Timeout: 60 * time.Millisecond, ShutdownTimeout: 60 * time.Millisecond}

// open brings a fake up, and checks at the end of the test that nothing leaked.
func open(t *testing.T, f *fakeBus, opt Options) *Controller {
	t.Helper()
	return openBus(t, f, f, opt)
}

func openBus(t *testing.T, f *fakeBus, b Bus, opt Options) *Controller {
	t.Helper()
	leaks(t, f)
	c, err := Open(t.Context(), b, opt)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// leaks compares memory, mappings and goroutines at the end of the test with now.
func leaks(t *testing.T, f *fakeBus) {
	t.Helper()
	before := fmt.Sprint(hostmem.Usage())
	n := runtime.NumGoroutine()
	t.Cleanup(func() {
		f.checkLeaks(t)
		if after := fmt.Sprint(hostmem.Usage()); after != before {
			t.Errorf("host memory %s, was %s", after, before)
		}
		// A goroutine that was told to end may need a moment until it is not counted.
		for end := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > n; runtime.Gosched() {
			if time.Now().After(end) {
				t.Errorf("%d goroutines, were %d", runtime.NumGoroutine(), n)
				return
			}
		}
	})
}

func TestOpen(t *testing.T) {
	f := newFake()
	c := open(t, f, Options{})
	if f.cc != 0x00460001 {
		t.Errorf("CC %#x", f.cc)
	}
	if f.aqa != 31<<16|31 || f.asq&4095 != 0 || f.acq&4095 != 0 || f.asq == f.acq {
		t.Errorf("AQA %#x ASQ %#x ACQ %#x", f.aqa, f.asq, f.acq)
	}
	got := fmt.Sprintf("%s|%s|%s|%s|%v|%+v|%d|%d|%d|%d|%v", c.Name(), c.Model(), c.Serial(),
		c.Firmware(), c.Version(),
		c.Namespace(), c.MaxTransferBytes(), c.MaxQueuePairs(), c.MaxQueueEntries(), c.PageBytes(),
		c.Namespaces())
	want := "fake:0|Fake model|FAKE0001|1.0|1.4|{ID:1 LBABytes:512 Blocks:1048576}|131072|6|1024|4096|[1]"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if c.Bus() != Bus(f) || c.Namespace().Bytes() != 512<<20 {
		t.Errorf("bus %v, %d bytes", c.Bus(), c.Namespace().Bytes())
	}
}

// The controller may be in any state when it is taken over.
func TestOpenFromAnyState(t *testing.T) {
	for _, s := range []struct {
		name     string
		cc, csts uint32
		after    int
	}{
		{"disabled", 0, 0, 0},
		{"slow", 0, 0, 50},
		{"enabled by somebody else", 0x00460001, 1, 3},
		{"being enabled", 0x00460001, 0, 5},
		{"being disabled", 0x00460000, 1, 5},
		{"shut down", 0x00464001, 9, 0},
		{"dead", 0x00460001, 3, 0},
		{"dead before it was ready", 0x00460001, 2, 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake()
			f.cc, f.csts, f.readyAfter = s.cc, s.csts, s.after
			c := open(t, f, Options{})
			if c.Serial() != "FAKE0001" {
				t.Error(c.Serial())
			}
			if f.early {
				t.Error("CC.EN was cleared while CSTS.RDY had not followed it")
			}
		})
	}
}

func TestOpenLargeBlocks(t *testing.T) {
	f := newFake()
	f.ns.LBAF[0].LBADS, f.ns.LBAF[1].LBADS = 9, 12
	f.ns.NLBAF, f.ns.FLBAS, f.id.MDTS = 1, 1, 0
	c := open(t, f, Options{MaxTransferBytes: 10000})
	if c.Namespace().LBABytes != 4096 || c.MaxTransferBytes() != 8192 {
		t.Errorf("%+v, %d", c.Namespace(), c.MaxTransferBytes())
	}
}

func TestOpenChoosesNamespace(t *testing.T) {
	f := newFake()
	f.nsids = nil
	for i := range uint32(2500) {
		f.nsids = append(f.nsids, 3+2*i)
	}
	c := open(t, f, Options{Namespace: 4001})
	if c.Namespace().ID != 4001 || len(c.Namespaces()) != 2500 {
		t.Errorf("namespace %d of %d", c.Namespace().ID, len(c.Namespaces()))
	}
}

// A controller of NVMe 1.0 knows no active namespace list.
func TestOpenWithoutNamespaceList(t *testing.T) {
	f := newFake()
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminIdentify && c.CDW10 == CNSActiveNSList {
			return failed(c, StatusInvalidField), true
		}
		return nil, false
	}
	if c := open(t, f, Options{}); c.Namespace().ID != 1 {
		t.Error(c.Namespace())
	}
}

// A controller with several command sets is used through a namespace of the NVM one.
func TestCommandSets(t *testing.T) {
	for _, list := range [][]byte{nil, {4, 1, 0, 0, 0}, {1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 1,
		0, 0, 0}} {
		f := newFake()
		f.cap |= 1 << 43
		f.descriptors = list
		if c := open(t, f, Options{}); c.Namespace().ID != 1 {
			t.Error(c.Namespace())
		}
	}
	f := newFake() // one that has no such list is not asked for it
	f.vs = 1<<16 | 2<<8
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminIdentify && c.CDW10 == CNSNSDescriptors {
			t.Error("asked for descriptors")
		}
		return nil, false
	}
	open(t, f, Options{})
	page := make([]byte, IdentifyBytes)
	for n := range page { // no list makes it read beyond the page
		page[n] = 1
	}
	if _, err := DecodeNamespaceDescriptors(page); err != nil {
		t.Error(err)
	}
	page[0], page[1] = 9, 255
	if _, err := DecodeNamespaceDescriptors(page[:200]); err == nil {
		t.Error("a descriptor that ends behind the list")
	}
}

// A namespace has one identity through every controller, and says so in three places.
func TestNamespaceIdentity(t *testing.T) {
	uuid := []byte("0123456789abcdef")
	one, two := newFake(), newFake()
	for i, f := range []*fakeBus{one, two} {
		f.ns.NGUID[3], f.ns.NMIC = byte(i+1), SharedNamespace // each knows its UUID, at least
		f.descriptors = append([]byte{DescriptorUUID, 16, 0, 0}, uuid...)
	}
	a, b := open(t, one, Options{}).NamespaceID(), open(t, two, Options{}).NamespaceID()
	if !a.Same(b) || a.Private || len(a.IDs) != 2 || a.NSID != 1 {
		t.Error(a, b)
	}
	other := newFake()
	other.ns.NGUID[3] = 2
	if b = open(t, other, Options{}).NamespaceID(); a.Same(b) || !b.Private {
		t.Error(a, b)
	}
}

func TestOpenFails(t *testing.T) {
	boom := errors.New("register access refused")
	for _, s := range []struct {
		name  string
		spoil func(f *fakeBus)
		is    error
		class errs.Class
		want  string
		limit time.Duration
	}{
		{"never ready", func(f *fakeBus) { f.neverReady = true }, ErrTimeout, errs.Device,
			"enable: CSTS.RDY stays 0", 900 * time.Millisecond},
		{"never idle", func(f *fakeBus) { f.cc, f.csts, f.neverIdle = 0x460001, 1, true },
			ErrTimeout, errs.Device, "disable: CSTS.RDY stays 1", 2 * time.Second},
		{"fatal on enable", func(f *fakeBus) { f.cfsOnEnable = true }, ErrFatal, errs.Device,
			"controller fatal status (CSTS 00000002h)", 300 * time.Millisecond},
		{"gone", func(f *fakeBus) { f.gone = true }, ErrGone, errs.Device,
			"CAP reads 0xffffffffffffffff: device is gone (CSTS FFFFFFFFh)",
			300 * time.Millisecond},
		{"no registers", func(f *fakeBus) { f.readErr = boom }, boom, errs.Device, "read CAP",
			300 * time.Millisecond},
		{"dead memory space", func(f *fakeBus) { f.cap = 0 }, ErrGone, errs.Device, "CAP reads 0x0",
			300 * time.Millisecond},
		{"large pages", func(f *fakeBus) { f.cap = uint64(MakeCAP(64, 0, 0, 1, 1)) }, nil,
			errs.Capability, "memory pages of 8192 bytes", 0},
		{"no NVM command set", func(f *fakeBus) { f.cap &^= 1 << 37 }, nil, errs.Capability,
			"no NVM command set", 0},
		{"queue entry sizes", func(f *fakeBus) { f.id.SQES = 0x77 }, nil, errs.Capability,
			"queue entry sizes SQES 77h", 0},
		{"administrative controller", func(f *fakeBus) { f.id.CNTRLTYPE = 3 }, nil, errs.Capability,
			"type 3", 0},
		{"no namespace", func(f *fakeBus) { f.nsids = nil }, nil, errs.Capability,
			"no active namespace", 0},
		{"empty namespace", func(f *fakeBus) { f.ns.NSZE = 0 }, nil, errs.Capability,
			"has no blocks", 0},
		{"strange blocks", func(f *fakeBus) { f.ns.LBAF[0].LBADS = 13 }, nil, errs.Capability,
			"LBAs of 8192 bytes are not supported, only 512 and 4096", 0},
		{"zoned", func(f *fakeBus) {
			f.cap |= 1 << 43
			f.descriptors = []byte{1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 1, 0, 0, 2}
		}, nil, errs.Capability, "namespace 1 has the zoned namespace command set", 0},
		{"key value", func(f *fakeBus) { f.cap |= 1 << 43; f.descriptors = []byte{4, 1, 0, 0, 1} },
			nil, errs.Capability, "the key value command set", 0},
		{"descriptors without length",
			func(f *fakeBus) { f.cap |= 1 << 43; f.descriptors = []byte{4, 0, 0, 0, 1} },
			ErrProtocol, errs.Device, "descriptor of type 4 has length 0", 0},
		{"metadata", func(f *fakeBus) { f.ns.LBAF[0].MetadataBytes = 8 }, nil, errs.Capability,
			"8 bytes of metadata", 0},
		{"namespace list out of order", func(f *fakeBus) {
			f.handle = func(c Command) (*Completion, bool) {
				if c.Opcode != AdminIdentify || c.CDW10 != CNSActiveNSList {
					return nil, false
				}
				list := [4]uint32{5, 4}
				if err := f.data(c, raw(&list)); err != nil {
					return failed(c, StatusDataTransferError), true
				}
				e := ok(c)
				return &e, true
			}
		}, ErrProtocol, errs.Device, "ID 4 is out of order", 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake()
			s.spoil(f)
			leaks(t, f)
			start := time.Now()
			c, err := Open(t.Context(), f, Options{})
			if err == nil {
				t.Fatal(c.Close(t.Context()), "opened")
			}
			if s.is != nil && !errors.Is(err, s.is) || errs.ClassOf(err) != s.class ||
				!strings.Contains(err.Error(), s.want) {
				t.Errorf("error (class %d) %v; want %q, class %d", errs.ClassOf(err), err, s.want,
					s.class)
			}
			if d := time.Since(start); s.limit != 0 && d > s.limit {
				t.Errorf("took %v", d)
			}
			if strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("more than one line: %v", err)
			}
			if f.closed {
				t.Error("Open closed a bus that is not its own")
			}
		})
	}
}

// CAP.TO is honoured: a controller that takes most of it comes up, and the wait is longer
// than its units say and ends soon after.
func TestReadyTimeout(t *testing.T) {
	for _, s := range []struct {
		cap  CAP
		crto uint32
		want time.Duration
	}{
		{MakeCAP(64, 0, 0, 0, 0), 0, 500 * time.Millisecond},
		{MakeCAP(64, 30, 0, 0, 0), 0, 15500 * time.Millisecond},
		{MakeCAP(64, 255, 0, 0, 0), 0, 128 * time.Second},
		{MakeCAP(64, 255, 0, 0, 0) | 3<<59, 0x0010_0200, 256500 * time.Millisecond},
	} {
		f := newFake()
		f.cap, f.crto = uint64(s.cap), s.crto
		c := &Controller{bus: f, cap: s.cap}
		if got := c.readyTimeout(); got != s.want {
			t.Errorf("CAP %#x: %v, want %v", uint64(s.cap), got, s.want)
		}
	}
	f := newFake()
	f.cap, f.neverReady = uint64(MakeCAP(64, 1, 0, 0, 0)), true
	leaks(t, f)
	start := time.Now()
	_, err := Open(t.Context(), f, Options{})
	var te *TimeoutError
	if !errors.As(err, &te) || te.After != time.Second {
		t.Fatalf("error %v", err)
	}
	if d := time.Since(start); d < time.Second || d > 4*time.Second {
		t.Errorf("gave up after %v", d)
	}
}

// Every command of the bring-up that fails stops it with an error that names the command.
func TestOpenStatusErrors(t *testing.T) {
	for _, s := range []struct {
		op    uint8
		cdw10 uint32
		want  string
	}{
		{AdminIdentify, CNSController,
			"nvme fake:0 q0: identify controller: internal error (SCT 0h, SC 06h), not retryable; "},
		{AdminIdentify, CNSNamespace, "identify namespace 1: internal error"},
		{AdminSetFeatures, FeatureNumberOfQueues, "set features: number of queues: internal error"},
	} {
		f := newFake()
		f.handle = func(c Command) (*Completion, bool) {
			if c.Opcode == s.op && c.CDW10 == s.cdw10 {
				return failed(c, StatusInternalError.WithDNR()), true
			}
			return nil, false
		}
		leaks(t, f)
		_, err := Open(t.Context(), f, quick)
		var se *StatusError
		if !errors.As(err, &se) || !se.Status.Is(StatusInternalError) ||
			!strings.Contains(err.Error(), s.want) {
			t.Errorf("error %v, want %q", err, s.want)
		}
		// And one that says nothing at all.
		f = newFake()
		f.handle = func(c Command) (*Completion,
			bool) {
			return nil, c.Opcode == s.op && c.CDW10 == s.cdw10
		}
		leaks(t, f)
		if _, err := Open(t.Context(), f, quick); !errors.Is(err, ErrTimeout) {
			t.Errorf("opcode %d silent: error %v", s.op, err)
		}
	}
	// This it can do without.
	f := newFake()
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminGetFeatures {
			return failed(c, StatusInvalidOpcode), true
		}
		return nil, false
	}
	if c := open(t, f, quick); c.MaxQueuePairs() != 6 {
		t.Errorf("%d queue pairs", c.MaxQueuePairs())
	}
}

func TestOptionsRefused(t *testing.T) {
	for _, o := range []Options{{AdminDepth: 1}, {AdminDepth: 257}, {QueuePairs: 65536},
		{QueuePairs: -1}, {MaxTransferBytes: 512}, {Timeout: -1}} {
		if _, err := Open(t.Context(), newFake(), o); errs.ClassOf(err) != errs.Usage {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// The smallest and the largest admin queues wrap many times.
func TestAdminDepths(t *testing.T) {
	for _, d := range []int{2, 3, 5, 256} {
		f := newFake()
		c := open(t, f, Options{AdminDepth: d})
		f.with(func() { f.smart.HostReads.Lo = uint64(d) })
		for range 3*d + 3 {
			if l, err := c.SMART(t.Context()); err != nil || l.HostReads.Lo != uint64(d) {
				t.Fatalf("depth %d: %v %v", d, l.HostReads, err)
			}
		}
		if n := c.Counters(); n.ForeignCompletions+n.LateCompletions+n.Timeouts != 0 {
			t.Errorf("depth %d: %+v", d, n)
		}
	}
}

// A bus whose controller works only inside WaitCQ.
func TestWaiter(t *testing.T) {
	f := newFake()
	w := &waitBus{fakeBus: f}
	c := openBus(t, f, w, Options{})
	if _, err := c.SMART(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w.waits.Load() == 0 {
		t.Error("WaitCQ was never used")
	}
	// One that returns at once without any news must not be called in a tight loop.
	f.with(
		func() {
			f.handle = func(c Command) (*Completion,
				bool) {
				return nil, c.Opcode == AdminGetLogPage
			}
		})
	c.opt.Timeout = 50 * time.Millisecond
	before := w.waits.Load()
	if _, err := c.SMART(t.Context()); !errors.Is(err, ErrTimeout) {
		t.Fatal(err)
	}
	if n := w.waits.Load() - before; n > 2000 {
		t.Errorf("%d calls of WaitCQ in 50 ms", n)
	}
}

func TestLogPages(t *testing.T) {
	f := newFake()
	c := open(t, f, Options{})
	f.smart = SMARTLog{CriticalWarning: WarnSpare, AvailableSpare: 99, PercentageUsed: 3,
		HostReads: Uint128{7, 1}, MediaErrors: Uint128{5, 0}}
	f.smart.SetTemperature(310)
	l, err := c.SMART(t.Context())
	if err != nil || l != f.smart || l.Temperature() != 310 ||
		l.HostReads.String() != "18446744073709551623" {
		t.Errorf("%+v %v", l, err)
	}
	if _, err := c.Admin(t.Context(), "too much", GetLogPageCommand(0, LogSMART, NSIDAll, 8192, false,
		0, 0), make([]byte, 8192)); errs.ClassOf(err) != errs.Usage {
		t.Errorf("more than a page: %v", err)
	}
}

// The bytes that a controller leaves out of its answer read as zeros, never as an earlier answer.
func TestShortAnswer(t *testing.T) {
	f := newFake()
	c := open(t, f, Options{AdminDepth: 2})
	f.with(func() { f.smart.HostReads.Lo = 99 })
	if l, err := c.SMART(t.Context()); err != nil || l.HostReads.Lo != 99 {
		t.Fatalf("%v %v", l.HostReads, err)
	}
	f.with(func() {
		f.handle = func(c Command) (*Completion, bool) { e := ok(c); return &e, true }
	})
	if l, err := c.SMART(t.Context()); err != nil || l != (SMARTLog{}) {
		t.Errorf("%+v %v", l, err)
	}
	f.with(func() { f.handle = nil })
}

// A command that times out keeps its CID and memory until its completion comes.
func TestTimeoutQuarantine(t *testing.T) {
	f := newFake()
	var lost []Command
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminGetLogPage && len(lost) < 2 {
			lost = append(lost, c)
			return nil, true
		}
		return nil, false
	}
	c := open(t, f, Options{Timeout: 30 * time.Millisecond, AdminDepth: 16})
	seen := map[uint16]bool{}
	for i := range 2 {
		start := time.Now()
		_, err := c.SMART(t.Context())
		var te *TimeoutError
		if !errors.As(err, &te) || !errors.Is(err, ErrTimeout) || errs.ClassOf(err) != errs.Device {
			t.Fatalf("error %v", err)
		}
		if d := time.Since(start); d < 30*time.Millisecond || d > 2*time.Second {
			t.Errorf("timed out after %v", d)
		}
		if te.CID != lost[i].CID || seen[te.CID&0xff] {
			t.Errorf("CID %#x", te.CID)
		}
		seen[te.CID&0xff] = true
	}
	for range 40 { // others go on, with other slots
		if _, err := c.SMART(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	f.with(func() {
		for _, l := range f.log {
			if l.Opcode == AdminGetLogPage && seen[l.CID&0xff] && l != lost[0] && l != lost[1] {
				t.Errorf("slot of CID %#x used again", l.CID)
			}
		}
		if f.mem(lost[0].PRP1, 4096) == nil { // a late DMA must still have somewhere to go
			t.Error("the lost command's memory is not mapped any more")
		}
		f.post(ok(lost[0]))
	})
	if _, err := c.SMART(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := c.Counters(); n.Timeouts != 2 || n.LateCompletions != 1 || n.ForeignCompletions != 0 {
		t.Errorf("%+v", n)
	}
	f.with(func() { f.post(ok(lost[0])) }) // once more: that is a breach
	if _, err := c.SMART(t.Context()); !errors.Is(err, ErrProtocol) {
		t.Errorf("second completion: %v", err)
	}
}

// When most CIDs are lost the error says so at once instead of waiting for nothing.
func TestTimeoutExhaustion(t *testing.T) {
	f := newFake()
	f.handle = func(c Command) (*Completion, bool) { return nil, c.Opcode == AdminGetLogPage }
	c := open(t, f, Options{Timeout: 5 * time.Millisecond, AdminDepth: 8})
	var err error
	for range 10 {
		if _, err = c.SMART(t.Context()); !errors.Is(err, ErrTimeout) {
			t.Fatal(err)
		}
	}
	if n := c.Counters(); n.Timeouts > 7 || !strings.Contains(err.Error(),
		"admin queue: most commands never completed") {
		t.Errorf("%+v, %v", n, err)
	}
	f.with(func() { f.handle = nil })
	require.NoError(t, c.Reset(t.Context()))
	if _, err := c.SMART(t.Context()); err != nil {
		t.Errorf("after reset: %v", err)
	}
}

func TestFatalDuringCommand(t *testing.T) {
	for _, s := range []struct {
		name string
		fail func(f *fakeBus)
		is   error
	}{
		{"CFS", func(f *fakeBus) { f.csts |= 2 }, ErrFatal},
		{"all ones", func(f *fakeBus) { f.gone = true }, ErrGone},
		{"zeros", func(f *fakeBus) { f.csts, f.neverReady = 0, true }, ErrGone},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake()
			f.handle = func(c Command) (*Completion, bool) {
				if c.Opcode == AdminGetLogPage {
					s.fail(f)
					return nil, true
				}
				return nil, false
			}
			c := open(t, f, Options{Timeout: 10 * time.Second})
			start := time.Now()
			_, err := c.SMART(t.Context())
			if !errors.Is(err, s.is) || errs.ClassOf(err) != errs.Device {
				t.Errorf("error %v", err)
			}
			if d := time.Since(start); d > 2*time.Second {
				t.Errorf("noticed after %v", d)
			}
			n := f.sent(AdminGetLogPage)
			if _, err := c.SMART(t.Context()); !errors.Is(err, s.is) ||
				f.sent(AdminGetLogPage) != n {
				t.Errorf("next command: %v", err)
			}
			f.with(func() { f.gone, f.neverReady, f.handle = false, false, nil })
			require.NoError(t, c.Reset(t.Context()))
			if _, err := c.SMART(t.Context()); err != nil {
				t.Errorf("after reset: %v", err)
			}
		})
	}
}

func TestProtocolBreaches(t *testing.T) {
	for _, s := range []struct {
		name string
		e    func(f *fakeBus, c Command) Completion
		want string
	}{
		{"foreign CID",
			func(f *fakeBus, c Command) Completion { return Completion{CID: c.CID ^ 0x4000} },
			"is not in flight"},
		{"CID beyond the queue",
			func(f *fakeBus, c Command) Completion { return Completion{CID: 0xff} },
			"00FFh, which is not in flight"},
		{"other queue",
			func(f *fakeBus, c Command) Completion { return Completion{CID: c.CID, SQID: 3} },
			"names submission queue 3"},
		{"head beyond the queue",
			func(f *fakeBus, c Command) Completion { return Completion{CID: c.CID, SQHead: 32} },
			"submission queue head 32"},
		{"head beyond the tail", func(f *fakeBus, c Command) Completion {
			return Completion{CID: c.CID, SQHead: uint16((f.sqHead + 1) % 32)}
		}, "submission queue head"},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake()
			f.handle = func(c Command) (*Completion, bool) {
				if c.Opcode == AdminGetLogPage {
					e := s.e(f, c)
					return &e, true
				}
				return nil, false
			}
			c := open(t, f, quick)
			_, err := c.SMART(t.Context())
			var pe *ProtocolError
			if !errors.As(err, &pe) || !errors.Is(err, ErrProtocol) ||
				!strings.Contains(err.Error(), s.want) || errs.ClassOf(err) != errs.Device {
				t.Errorf("error %v, want %q", err, s.want)
			}
			if n := c.Counters(); n.ForeignCompletions != 1 {
				t.Errorf("%+v", n)
			}
			if _, err := c.CreateQueuePair(t.Context(), 64); !errors.Is(err, ErrProtocol) {
				t.Errorf("next command: %v", err)
			}
			f.with(func() { f.handle = nil })
			require.NoError(t, c.Reset(t.Context()))
			if _, err := c.SMART(t.Context()); err != nil {
				t.Errorf("after reset: %v", err)
			}
		})
	}
}

func TestQueuePairs(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	for _, n := range []int{-1, 0, 1, 1025} {
		if _, err := c.CreateQueuePair(t.Context(), n); errs.ClassOf(err) != errs.Usage {
			t.Errorf("%d entries: %v", n, err)
		}
	}
	var all []*QueuePair
	for i, n := range []int{2, 64, 65, 1024, 3, 128} {
		q, err := c.CreateQueuePair(t.Context(), n)
		require.NoError(t, err)
		if int(q.ID) != i+1 || q.Entries != n || len(q.SQ) != n*64 || len(q.CQ) != n*16 ||
			cap(q.SQ) != len(q.SQ) ||
			q.SQDoorbell != &f.db[2*q.ID] || q.CQDoorbell != &f.db[2*q.ID+1] {
			t.Errorf("queue pair %+v", q)
		}
		cqc, sqc := f.log[len(f.log)-2], f.log[len(f.log)-1]
		if cqc.CDW10 != uint32(n-1)<<16|uint32(q.ID) || sqc.CDW10 != cqc.CDW10 || cqc.CDW11 != 1 ||
			sqc.CDW11 != uint32(q.ID)<<16|1 {
			t.Errorf("commands %+v %+v", cqc, sqc)
		}
		if cqc.PRP1&4095 != 0 || sqc.PRP1&4095 != 0 || &f.mem(sqc.PRP1, 1)[0] != &q.SQ[0] ||
			&f.mem(cqc.PRP1, 1)[0] != &q.CQ[0] {
			t.Errorf("queue memory %#x %#x", sqc.PRP1, cqc.PRP1)
		}
		all = append(all, q)
	}
	if _, err := c.CreateQueuePair(t.Context(), 64); errs.ClassOf(err) != errs.Capability {
		t.Errorf("one more than granted: %v", err)
	}
	require.NoError(t, c.DeleteQueuePair(t.Context(), all[2]))
	if err := c.DeleteQueuePair(t.Context(), all[2]); err == nil || !strings.Contains(err.Error(),
		"deleted already") {
		t.Errorf("deleted twice: %v", err)
	}
	q, err := c.CreateQueuePair(t.Context(), 16)
	if err != nil || q.ID != 3 {
		t.Fatalf("%+v %v", q, err)
	}
	// After a reset the pairs are gone at the controller, but their memory stays readable.
	require.NoError(t, c.Reset(t.Context()))
	if len(f.cqs) != 0 {
		t.Error("the reset left queues")
	}
	for _, q := range all[:2] {
		_ = *(*Completion)(unsafe.Pointer(&q.CQ[len(q.CQ)-16]))
		n := f.sent(AdminDeleteSQ)
		require.NoError(t, c.DeleteQueuePair(t.Context(), q))
		if f.sent(AdminDeleteSQ) != n {
			t.Error("a queue of before the reset was deleted at the controller")
		}
	}
	if q, err = c.CreateQueuePair(t.Context(), 16); err != nil || q.ID != 1 {
		t.Fatalf("%+v %v", q, err)
	}
	// Close deletes the rest in order: submission queue first.
	require.NoError(t, c.Close(t.Context()))
	n := len(f.log)
	if f.log[n-2].Opcode != AdminDeleteSQ || f.log[n-1].Opcode != AdminDeleteCQ || f.csts != 0 ||
		!f.closed {
		t.Errorf("%+v, CSTS %#x", f.log[n-2:], f.csts)
	}
	if err := c.DeleteQueuePair(t.Context(), q); err == nil {
		t.Error("deleted after Close")
	}
	if _, err := c.CreateQueuePair(t.Context(), 64); !errors.Is(err, ErrClosed) {
		t.Errorf("created after Close: %v", err)
	}
}

// A queue pair of a visitor is waited for, one of anybody else is not.
func TestVisitQueuePair(t *testing.T) {
	c := open(t, newFake(), quick)
	var all []*QueuePair
	for range c.MaxQueuePairs() - 1 {
		q, err := c.CreateQueuePair(t.Context(), 4)
		require.NoError(t, err)
		all = append(all, q)
	}
	visitor, err := c.VisitQueuePair(t.Context(), 4)
	require.NoError(t, err)
	if _, err := c.VisitQueuePair(t.Context(), 4); errs.ClassOf(err) != errs.Capability {
		t.Errorf("a second visitor: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.CreateQueuePair(ended, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("waited on after the end of its context: %v", err)
	}
	got := make(chan *QueuePair)
	go func() {
		q, err := c.CreateQueuePair(t.Context(), 4)
		if err != nil {
			t.Error(err)
		}
		got <- q
	}()
	select {
	case <-got:
		t.Error("created beside the visitor")
	case <-time.After(20 * time.Millisecond):
	}
	require.NoError(t, c.DeleteQueuePair(t.Context(), visitor))
	if q := <-got; q == nil || q.ID != visitor.ID {
		t.Errorf("%+v", q)
	}
	if _, err := c.CreateQueuePair(t.Context(), 4); errs.ClassOf(err) != errs.Capability {
		t.Errorf("all are taken for good: %v", err)
	}
	for _, q := range all {
		require.NoError(t, c.DeleteQueuePair(t.Context(), q))
	}
}

func TestQueuePairFailures(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	on := func(op uint8, e func(c Command) *Completion) {
		f.with(func() {
			f.handle = func(c Command) (*Completion, bool) {
				if c.Opcode == op {
					return e(c), true
				}
				return nil, false
			}
		})
	}
	refuse := func(c Command) *Completion { return failed(c, StatusInvalidQueueSize.WithDNR()) }
	silent := func(Command) *Completion { return nil }
	var se *StatusError
	mappings := len(f.maps)

	on(AdminCreateCQ, refuse)
	if _, err := c.CreateQueuePair(t.Context(), 64); !errors.As(err, &se) ||
		len(f.maps) != mappings ||
		!strings.Contains(err.Error(),
			"create completion queue 1: invalid queue size (SCT 1h, SC 02h), not retryable") {
		t.Errorf("CQ refused: %v, %d mappings", err, len(f.maps))
	}
	on(AdminCreateSQ, refuse)
	if _, err := c.CreateQueuePair(t.Context(), 64); !errors.As(err, &se) ||
		len(f.maps) != mappings || len(f.cqs) != 0 {
		t.Errorf("SQ refused: %v, %d mappings, CQs %v", err, len(f.maps), f.cqs)
	}
	// Without an answer the queue may exist: ID and memory stay away until the reset.
	on(AdminCreateSQ, silent)
	if _, err := c.CreateQueuePair(t.Context(), 64); !errors.Is(err, ErrTimeout) ||
		len(f.maps) != mappings+1 {
		t.Errorf("SQ silent: %v, %d mappings", err, len(f.maps))
	}
	on(AdminDeleteSQ, silent)
	q, err := c.CreateQueuePair(t.Context(), 64)
	if err != nil || q.ID != 2 {
		t.Fatalf("%+v %v", q, err)
	}
	if err := c.DeleteQueuePair(t.Context(), q); !errors.Is(err, ErrTimeout) ||
		len(f.maps) != mappings+2 {
		t.Errorf("delete silent: %v, %d mappings", err, len(f.maps))
	}
	f.with(func() { f.handle = nil })
	if q, err = c.CreateQueuePair(t.Context(), 64); err != nil || q.ID != 3 {
		t.Fatalf("%+v %v", q, err)
	}
	require.NoError(t, c.Reset(t.Context()))
	if len(f.maps) != mappings+1 { // q's
		t.Errorf("%d mappings after the reset", len(f.maps))
	}
	if q, err = c.CreateQueuePair(t.Context(), 64); err != nil || q.ID != 1 {
		t.Fatalf("%+v %v", q, err)
	}
	// A queue that the controller does not know is deleted all right.
	f.with(func() { delete(f.sqs, 1); delete(f.cqs, 1) })
	if err := c.DeleteQueuePair(t.Context(), q); err != nil {
		t.Error(err)
	}
}

func TestAbort(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	if aborted, err := c.Abort(t.Context(), 3, 0x1234); aborted || err != nil {
		t.Errorf("%v %v", aborted, err)
	}
	if l := f.log[len(f.log)-1]; l.CDW10 != 0x1234<<16|3 {
		t.Errorf("%+v", l)
	}
	// At most ACL+1 = 2 at once.
	var out, most int
	var held []Command
	f.with(func() {
		f.handle = func(c Command) (*Completion, bool) {
			if c.Opcode != AdminAbort {
				return nil, false
			}
			out++
			most = max(most, out)
			held = append(held, c)
			return nil, true
		}
	})
	c.opt.Timeout = 5 * time.Second
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if aborted, err := c.Abort(t.Context(), 1, uint16(i)); !aborted || err != nil {
				t.Errorf("%v %v", aborted, err)
			}
		})
	}
	for done, end := 0, time.Now().Add(10*time.Second); done < 8; runtime.Gosched() {
		f.with(func() {
			if len(held) > 0 {
				out--
				f.post(ok(held[0]))
				held = held[1:]
				done++
			}
		})
		if time.Now().After(end) {
			t.Fatal("aborts do not come")
		}
	}
	wg.Wait()
	if most > 2 {
		t.Errorf("%d aborts at once", most)
	}
}

func TestCancel(t *testing.T) {
	f := newFake()
	sent := make(chan struct{}, 1)
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminGetLogPage {
			sent <- struct{}{}
			return nil, true
		}
		return nil, false
	}
	c := open(t, f, Options{Timeout: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-sent; cancel() }()
	start := time.Now()
	if _, err := c.SMART(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("took %v", d)
	}
	n := f.sent(AdminGetLogPage)
	if _, err := c.SMART(ctx); !errors.Is(err, context.Canceled) || f.sent(AdminGetLogPage) != n {
		t.Errorf("sent in spite of a cancelled context: %v", err)
	}
	if _, err := Open(ctx, newFake(), Options{}); err == nil {
		t.Error("opened with a cancelled context")
	}
}

// Commands from many goroutines, completed out of order.
func TestConcurrentCommands(t *testing.T) {
	f := newFake()
	c := open(t, f, Options{AdminDepth: 8})
	r := rand.New(rand.NewPCG(7, 7))
	var held []Completion
	f.with(func() {
		f.handle = func(c Command) (*Completion, bool) {
			if e, ok := f.answer(c); ok {
				held = append(held, e)
			}
			for len(held) > 0 && r.IntN(3) > 0 {
				i := r.IntN(len(held))
				f.post(held[i])
				held = append(held[:i], held[i+1:]...)
			}
			return nil, true
		}
	})
	stop := make(chan struct{})
	var flusher sync.WaitGroup
	flusher.Go(func() { // the last ones have nobody behind them to push them out
		for {
			select {
			case <-stop:
				return
			default:
			}
			f.with(func() {
				if len(held) > 0 {
					f.post(held[0])
					held = held[1:]
				}
			})
			runtime.Gosched()
		}
	})
	n := 150
	if testing.Short() {
		n = 30
	}
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			for i := range n {
				var err error
				switch (g + i) % 4 {
				case 0:
					_, err = c.SMART(t.Context())
				case 1:
					_, err = c.Admin(t.Context(), "get features",
						GetFeaturesCommand(0, FeatureNumberOfQueues), nil)
				case 2:
					_, err = c.Abort(t.Context(), 1, uint16(i))
				case 3:
					var q *QueuePair
					if q, err = c.CreateQueuePair(t.Context(), 8); err == nil {
						err = c.DeleteQueuePair(t.Context(), q)
					}
				}
				if err != nil {
					t.Errorf("goroutine %d, command %d: %v", g, i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	flusher.Wait()
	f.with(func() { f.handle = nil })
	if k := c.Counters(); k.ForeignCompletions+k.Timeouts+k.LateCompletions+k.StatusErrors != 0 {
		t.Errorf("%+v", k)
	}
}

// A reset in the middle of commands: they end with an error soon, and nothing is confused.
func TestResetUnderLoad(t *testing.T) {
	f := newFake()
	c := open(t, f, Options{AdminDepth: 16, Timeout: 5 * time.Second})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := c.SMART(t.Context())
				// A command may meet the reset or be turned away.
				if err != nil && !errors.Is(err, ErrReset) && !errors.Is(err, errStarting) {
					t.Errorf("%v", err)
					return
				}
				runtime.Gosched()
			}
		})
	}
	for range 20 {
		q, err := c.CreateQueuePair(t.Context(), 32)
		require.NoError(t, err)
		require.NoError(t, c.Reset(t.Context()))
		require.NoError(t, c.DeleteQueuePair(t.Context(), q))
	}
	close(stop)
	wg.Wait()
	if _, err := c.SMART(t.Context()); err != nil {
		t.Error(err)
	}
	if n := c.Counters(); n.Resets != 20 || n.ForeignCompletions != 0 {
		t.Errorf("%+v", n)
	}
}

// Commands that wait when the controller is reset or closed end soon, with that reason.
func TestEndedByResetAndClose(t *testing.T) {
	f := newFake()
	sent := make(chan struct{}, 8)
	f.handle = func(c Command) (*Completion, bool) {
		if c.Opcode == AdminGetLogPage {
			sent <- struct{}{}
			return nil, true
		}
		return nil, false
	}
	c := open(t, f, Options{Timeout: time.Minute})
	for _, s := range []struct {
		end  func(context.Context) error
		want error
	}{{c.Reset, ErrReset}, {c.Close, ErrClosed}} {
		got := make(chan error, 2)
		for range 2 {
			go func() { _, err := c.SMART(t.Context()); got <- err }()
			<-sent
		}
		require.NoError(t, s.end(t.Context()))
		for range 2 {
			select {
			case err := <-got:
				if !errors.Is(err, s.want) || errs.ClassOf(err) != errs.Device {
					t.Errorf("%v, want %v", err, s.want)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("still waiting")
			}
		}
	}
}

func TestResetFails(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	f.with(func() { f.neverReady = true })
	if err := c.Reset(t.Context()); !errors.Is(err, ErrTimeout) {
		t.Errorf("error %v", err)
	}
	if _, err := c.SMART(t.Context()); !errors.Is(err, ErrTimeout) || !strings.Contains(err.Error(),
		"reset it again") {
		t.Errorf("after a failed reset: %v", err)
	}
	f.with(func() { f.neverReady = false })
	require.NoError(t, c.Reset(t.Context()))
	lost := errors.New("somebody loads it")
	remove := c.GuardResets(func() error { return lost })
	c.GuardResets(func() error { return nil })() // another that comes and goes takes none away
	before := c.Generation()
	if err := c.Reset(t.Context()); !errors.Is(err, ErrTaken) || !errors.Is(err, lost) ||
		c.Generation() != before {
		t.Errorf("error %v", err)
	}
	remove()
	// Another SSD in its place.
	f.with(func() { f.ns.NSZE /= 2 })
	if err := c.Reset(t.Context()); err == nil || !strings.Contains(err.Error(),
		"another SSD or namespace format") {
		t.Errorf("error %v", err)
	}
	f.with(func() { f.ns.NSZE *= 2 })
	require.NoError(t, c.Reset(t.Context()))
}

func TestCloseBad(t *testing.T) {
	t.Run("no shutdown", func(t *testing.T) {
		f := newFake()
		leaks(t, f)
		c, err := Open(t.Context(), f, quick)
		require.NoError(t, err)
		f.with(func() { f.noShutdown = true })
		if err := c.Close(t.Context()); !errors.Is(err, ErrTimeout) ||
			!strings.Contains(err.Error(), "shutdown: CSTS.SHST") {
			t.Errorf("error %v", err)
		}
		if !f.closed || f.cc&1 != 0 {
			t.Error("not closed, or left enabled")
		}
		if err := c.Close(t.Context()); err != nil {
			t.Errorf("closed again: %v", err)
		}
		if err := c.Reset(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("reset after Close: %v", err)
		}
		if _, err := c.SMART(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("command after Close: %v", err)
		}
	})
	t.Run("cannot be disabled", func(t *testing.T) {
		f := newFake()
		before := fmt.Sprint(hostmem.Usage())
		c, err := Open(t.Context(), f, quick)
		require.NoError(t, err)
		f.with(func() { f.neverIdle = true })
		if err := c.Close(t.Context()); !errors.Is(err, ErrTimeout) {
			t.Errorf("error %v", err)
		}
		// The mappings ended with the bus, so the memory is free although nobody unmapped it.
		if after := fmt.Sprint(hostmem.Usage()); after != before || !f.closed {
			t.Errorf("memory %s, was %s", after, before)
		}
	})
	t.Run("bus does not unmap", func(t *testing.T) {
		f := newFake()
		c, err := Open(t.Context(), f, quick)
		require.NoError(t, err)
		boom := errors.New("unmap refused")
		f.with(func() { f.unmapErr = boom })
		if err := c.Close(t.Context()); !errors.Is(err, boom) {
			t.Errorf("error %v", err)
		}
		for _, m := range f.maps { // still there: a controller may write to it
			m[0] = 1
			if err := hostmem.Free(m); err != nil {
				t.Error(err)
			}
		}
	})
}
