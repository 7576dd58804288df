package vfiobus

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/faultbus"
)

// rig is a controller behind a fake device.
type rig struct {
	*fake // nil: a real device
	t     *testing.T
	bus   *Bus
	c     *nvme.Controller
}

// short are options for tests that wait for what does not come.
var short = nvme.Options{Timeout: 200 * time.Millisecond, ShutdownTimeout: 200 * time.Millisecond}

func newBus(t *testing.T, f *fake) *Bus {
	t.Helper()
	b, err := open(f, f, Options{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, b.Close())
		f.check()
	})
	return b
}

func newRig(t *testing.T, f *fake, opt nvme.Options) *rig {
	t.Helper()
	testrig.CheckLeaks(t)
	r := &rig{fake: f, t: t, bus: newBus(t, f)}
	var err error
	r.c, err = nvme.Open(t.Context(), r.bus, opt)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.c.Close(context.Background()) })
	return r
}

// queue drives a queue pair entry by entry.
type queue struct {
	*testrig.Queue
	t  *testing.T
	qp *nvme.QueuePair
}

func (r *rig) queue(entries int) *queue {
	r.t.Helper()
	qp, err := r.c.CreateQueuePair(r.t.Context(), entries)
	require.NoError(r.t, err)
	return &queue{Queue: testrig.QueueOf(r.c.Bus(), qp), t: r.t, qp: qp}
}

// do sends a command and waits for its completion.
func (q *queue) do(cmd nvme.Command) nvme.Status {
	q.t.Helper()
	e := q.Do(q.t, cmd)
	return e.Status()
}

// verify writes and reads blocks through a queue, more often than it has entries unless it is long.
func (r *rig) verify(q *queue) {
	r.t.Helper()
	mem, err := hostmem.Alloc(8192, "test")
	require.NoError(r.t, err)
	iova, err := r.c.MapDMA(mem)
	require.NoError(r.t, err)
	ns := r.c.Namespace()
	blocks := uint32(4096 / ns.LBABytes)
	for i := range min(2*q.qp.Entries+3, 300) {
		for k := range mem[:4096] {
			mem[k], mem[4096+k] = byte(i+k*7), 0
		}
		lba := nvme.LBA(uint64(i) * uint64(blocks) % ns.Blocks)
		require.Zero(r.t, q.do(nvme.WriteCommand(uint16(2*i), ns.ID, lba, blocks, uint64(iova), 0)))
		require.Zero(r.t,
			q.do(nvme.ReadCommand(uint16(2*i+1), ns.ID, lba, blocks, uint64(iova)+4096, 0)))
		require.Equal(r.t, mem[:4096], mem[4096:])
	}
	require.NoError(r.t, r.c.UnmapDMA(iova, 8192))
	require.NoError(r.t, hostmem.Free(mem))
}

// The whole protocol over a device whose registers only the kernel can reach, and whose doorbells
// are mapped.
func TestBringUpAndIO(t *testing.T) {
	r := newRig(t, newFake(t), nvme.Options{})
	require.Equal(t, "0000:00:09.0", r.c.Name())
	require.Equal(t, "FAKE1", r.c.Serial())
	smart, err := r.c.SMART(t.Context())
	require.NoError(t, err)
	require.Zero(t, smart.HostReads.Lo)
	q := r.queue(8)
	r.verify(q)
	smart, err = r.c.SMART(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 19, smart.HostReads.Lo)
	require.NoError(t, r.c.DeleteQueuePair(t.Context(), q.qp))
	require.NoError(t, r.c.Reset(t.Context()))
	r.verify(r.queue(4))
	require.Zero(t, r.resets, "nothing was wrong with the controller")
	require.NoError(t, r.c.Close(t.Context()))
	require.True(t, r.shutdown, "it was shut down in order")
	_, err = r.bus.Read32(nvme.RegCSTS)
	require.ErrorIs(t, err, nvme.ErrClosed)
	_, err = r.bus.MapDMA(make([]byte, 4096))
	require.ErrorIs(t, err, nvme.ErrClosed)
}

func TestRegisters(t *testing.T) {
	f := newFlat(t, 0x4000)
	f.put(nvme.RegCAP, uint64(nvme.MakeCAP(64, 4, 2, 0, 0)))
	f.cfg[6] = 1 << 4
	binary.LittleEndian.PutUint32(f.cfg[0x54:], 0x3000) // MSI-X table
	b, err := open(f, f, Options{Name: "vfio3"})
	require.NoError(t, err)
	require.Equal(t, "vfio3", b.Name())
	require.NoError(t, nvme.Write64(b, nvme.RegASQ, 0x1122334455667788))
	require.EqualValues(t, 0x1122334455667788, binary.LittleEndian.Uint64(f.mem[nvme.RegASQ:]))
	v, err := nvme.Read64(b, nvme.RegASQ)
	require.NoError(t, err)
	require.EqualValues(t, 0x1122334455667788, v)
	v32, err := b.Read32(nvme.RegASQ + 4)
	require.NoError(t, err)
	require.EqualValues(t, 0x11223344, v32)
	for _, off := range []uint32{2, 0x4000, 0x3ffe} {
		_, err = b.Read32(off)
		require.ErrorContains(t, err, "no 32-bit register")
		require.Error(t, b.Write32(off, 0))
	}
	_, err = nvme.Read64(b, 0x3ffc)
	require.Error(t, err)
	require.Error(t, nvme.Write64(b, 4, 0))
	// 16 bytes apart, up to the MSI-X table.
	p, err := b.Doorbell(3)
	require.NoError(t, err)
	nvme.StoreDoorbell(p, 77)
	require.EqualValues(t, 77, binary.LittleEndian.Uint32(f.mem[0x1000+3*16:]))
	_, err = b.Doorbell(0x200)
	require.ErrorContains(t, err, "the controller has 512")
	mem, io, err := b.DoorbellMemory()
	require.NoError(t, err)
	require.True(t, io)
	require.Same(t, &f.mem[0x1000], &mem[0])
	require.Len(t, mem, 0x2000)
	require.NoError(t, b.Close())
	f.check()
	_, err = b.Doorbell(0)
	require.ErrorIs(t, err, nvme.ErrClosed)
	_, _, err = b.DoorbellMemory()
	require.ErrorIs(t, err, nvme.ErrClosed)
	require.ErrorIs(t, b.Write32(nvme.RegCC, 0), nvme.ErrClosed)
}

// Doorbells whose pages the kernel keeps, as it does with MSI-X tables before 4.16.
func TestUnmappableDoorbells(t *testing.T) {
	f := newFlat(t, 0x3000)
	f.spans = []vfio.Span{{Offset: 0, Size: 0x2000}}
	b, err := open(f, f, Options{})
	require.NoError(t, err)
	_, err = b.Doorbell(0)
	require.NoError(t, err)
	_, err = b.Doorbell(0x400)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "newer kernel")
	_, _, err = b.DoorbellMemory()
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.NoError(t, b.Close())
}

// Memory space that is off: accesses of the mapping fault.
func TestFaultingRegisters(t *testing.T) {
	f := newFlat(t, 0x3000)
	b, err := open(f, f, Options{})
	require.NoError(t, err)
	require.NoError(t, os.Truncate(f.path, 0))
	_, err = b.Read32(nvme.RegCSTS)
	require.ErrorContains(t, err, "0000:00:09.0: access to register 0x1c faults")
	require.ErrorContains(t, err, "memory space is switched off")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Error(t, b.Write32(nvme.RegCC, 1))
	_, _, err = b.DoorbellMemory()
	require.Error(t, err)
	f.with(func() { f.left = true })
	_, err = b.Read32(nvme.RegCSTS)
	require.ErrorIs(t, err, nvme.ErrGone)
	require.NoError(t, b.Close())
}

func TestNotNVMe(t *testing.T) {
	f := newFlat(t, 0x1000)
	_, err := open(f, f, Options{})
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	f.check() // it was closed
}

// A device that left: registers read as ones or zeros, and nothing hangs.
func TestGone(t *testing.T) {
	for _, ones := range []bool{true, false} {
		for _, queues := range []int{0, 1} {
			t.Run(fmt.Sprint(ones, queues), func(t *testing.T) {
				r := newRig(t, newFake(t), nvme.Options{})
				if queues > 0 {
					r.verify(r.queue(8))
				}
				r.with(func() { r.away, r.ones, r.left = true, ones, true })
				err := r.c.Health()
				require.ErrorIs(t, err, nvme.ErrGone)
				require.ErrorContains(t, err, "left its slot")
				require.ErrorIs(t, r.c.Reset(t.Context()), nvme.ErrGone)
				require.Zero(t, r.resets, "the kernel would wait for it")
				began := time.Now()
				require.ErrorIs(t, r.c.Close(t.Context()), nvme.ErrGone)
				require.Less(t, time.Since(began), 2*time.Second)
			})
		}
	}
}

// QEMU's removed device reads zeros while its configuration space looks alive.
func TestGoneSeenByRegisters(t *testing.T) {
	r := newRig(t, newFake(t), nvme.Options{})
	r.with(func() { r.away, r.resetErr = true, errors.New("fake: no answer") })
	require.ErrorIs(t, r.c.Health(), nvme.ErrGone)
	began := time.Now()
	require.ErrorIs(t, r.c.Close(t.Context()), nvme.ErrGone)
	require.Less(t, time.Since(began), 2*time.Second)
}

// The kernel's events end the use of a device that still answers, in order.
func TestLeaving(t *testing.T) {
	for _, what := range []string{"asked", "failed"} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, newFake(t), nvme.Options{})
			q := r.queue(8)
			words := "asks for the device back"
			if what == "asked" {
				close(r.asked)
			} else {
				words = "PCI error"
				close(r.failed)
			}
			require.ErrorContains(t, r.c.Leaving(), words)
			for _, err := range []error{r.c.Health(), r.c.Leaving(), r.c.Reset(t.Context()),
				r.bus.HardReset()} {
				require.ErrorIs(t, err, nvme.ErrGone)
				require.ErrorContains(t, err, words)
				require.Equal(t, errs.Device, errs.ClassOf(err))
			}
			_, err := r.c.CreateQueuePair(t.Context(), 4)
			require.ErrorIs(t, err, nvme.ErrGone)
			require.True(t, q.do(nvme.FlushCommand(1, 1)).OK(), "what is in flight completes")
			require.NoError(t, r.c.Close(t.Context()))
		})
	}
}

// A controller that somebody left enabled is disabled before it may reach memory.
func TestLeftEnabled(t *testing.T) {
	enabled := func(t *testing.T) *fake {
		f := newFake(t)
		require.NoError(t, f.inner.Write32(nvme.RegAQA, nvme.MakeAQA(8, 8)))
		require.NoError(t, nvme.Write64(f.inner, nvme.RegASQ, uint64(f.cba)))
		require.NoError(t, nvme.Write64(f.inner, nvme.RegACQ, uint64(f.cba)+4096))
		require.NoError(t, f.inner.Write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable)))
		csts, err := f.inner.Read32(nvme.RegCSTS)
		require.NoError(t, err)
		require.True(t, nvme.CSTS(csts).RDY())
		return shorten(f)
	}
	for _, stuck := range []bool{false, true} {
		f := enabled(t)
		f.stuck = stuck
		b := newBus(t, f)
		cc, err := b.Read32(nvme.RegCC)
		require.NoError(t, err)
		require.False(t, nvme.CC(cc).EN())
		require.False(t, f.master)
		require.Equal(t, stuck, f.resets == 1)
		require.NoError(t, b.Prepare())
		require.True(t, f.master)
	}
	f := enabled(t)
	f.stuck, f.resetErr = true, errors.New("fake: FLR timed out")
	_, err := open(f, f, Options{})
	require.ErrorContains(t, err, "gets no access to memory")
	require.ErrorContains(t, err, "fake: FLR timed out")
	require.False(t, f.master)
	f.check()
}

func TestHardReset(t *testing.T) {
	for _, s := range []struct {
		name  string
		spoil func(f *fake)
	}{
		{"CC.EN does not go to 0", func(f *fake) { f.stuck = true }},
		{"CSTS.CFS stays", func(f *fake) { f.fatal = true }},
		{"does not get ready", func(f *fake) { f.noReady = true }},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake(t)
			r := newRig(t, shorten(f), nvme.Options{})
			q := r.queue(8)
			g := r.c.Generation()
			f.with(func() { s.spoil(f) })
			require.NoError(t, r.c.Reset(t.Context()))
			require.EqualValues(t, 1, r.c.Counters().HardResets)
			require.Equal(t, 1, f.resets)
			require.Greater(t, r.c.Generation(), g)
			require.NoError(t, r.c.DeleteQueuePair(t.Context(), q.qp), "only its memory is left")
			r.verify(r.queue(8))
		})
	}
}

// A controller that nothing resets keeps its memory until the device is closed.
func TestHardResetFails(t *testing.T) {
	f := newFake(t)
	r := newRig(t, shorten(f), short)
	r.queue(8)
	f.with(func() { f.stuck, f.resetErr = true, errors.New("fake: FLR timed out") })
	err := r.c.Reset(t.Context())
	require.ErrorIs(t, err, nvme.ErrTimeout)
	require.ErrorContains(t, err, "fake: FLR timed out")
	require.NotEmpty(t, f.maps)
	err = r.c.Disable(t.Context())
	require.ErrorContains(t, err, "fake: FLR timed out")
	require.NotEmpty(t, f.maps, "the controller may still write there")
	f.with(func() { f.resetErr = nil })
	require.NoError(t, r.c.Reset(t.Context()))
	r.verify(r.queue(8))
}

// shorten makes the bounds of waits for CSTS.RDY short.
func shorten(f *fake) *fake { f.quick = true; return f }

func TestCloseOrder(t *testing.T) {
	for _, dead := range []error{nil, errors.New("fake: config space refused")} {
		f := newFake(t)
		b, err := open(f, f, Options{})
		require.NoError(t, err)
		mem, err := hostmem.Alloc(8192, "test")
		require.NoError(t, err)
		_, err = b.MapDMA(mem)
		require.NoError(t, err)
		_, err = b.MapDMA(mem[100:300])
		require.NoError(t, err)
		f.dmaErr = dead
		require.NoError(t, b.Close())
		require.NoError(t, b.Close())
		want := []string{"disable DMA", "unmap", "close"}
		if dead != nil {
			want = []string{"disable DMA", "close", "unmap"}
		}
		require.Equal(t, want, f.events)
		f.check()
		require.NoError(t, hostmem.Free(mem))
	}
}

func TestMapDMA(t *testing.T) {
	f := newFake(t)
	b := newBus(t, f)
	mem, err := hostmem.Alloc(3*4096, "test")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	a, err := b.MapDMA(mem[5000:6000])
	require.NoError(t, err)
	require.EqualValues(t, 5000%4096, a%4096, "mem[i] is at the address plus i")
	require.ErrorContains(t, b.UnmapDMA(a, 999), "not mapped so")
	require.NoError(t, b.UnmapDMA(a, 1000))
	require.ErrorContains(t, b.UnmapDMA(a, 1000), "not mapped so")
	_, err = b.MapDMA(nil)
	require.Equal(t, errs.Usage, errs.ClassOf(err))

	w, err := b.MapWindow(mem[5000:9000])
	require.NoError(t, err)
	require.EqualValues(t, 5000%4096, w%4096)
	require.NoError(t, b.ExtendWindow(w, 3000))
	require.Equal(t, []span{{int64(w) - 5000%4096, 3000 + 5000%4096}}, f.extended,
		"from the page that it starts in")
	require.NoError(t, b.UnmapDMA(w, 4000))
	_, err = b.MapWindow(nil)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// Other devices' memory: whole pages, and where they are in its export.
func TestMapPeer(t *testing.T) {
	f := newFake(t)
	b := newBus(t, f)
	mem, err := hostmem.Alloc(4*4096, "test")
	require.NoError(t, err)
	defer func() { require.NoError(t, hostmem.Free(mem)) }()
	a, err := b.MapPeerDMA(mem[5000:9000], 7, 65536+5000)
	require.NoError(t, err)
	require.EqualValues(t, 5000%4096, a%4096)
	w, err := b.MapPeerWindow(mem)
	require.NoError(t, err)
	require.Equal(t, []peer{{4000 + 5000%4096, 7, 65536 + 4096}, {len(mem), -2, 0}}, f.peers)
	require.NoError(t, errors.Join(b.UnmapDMA(a, 4000), b.UnmapDMA(w, int64(len(mem)))))
	_, err = b.MapPeerDMA(nil, -1, 0)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	// Through a bus that injects faults, and over one that knows no such thing.
	fb := faultbus.New(b, faults(t, ""), faultbus.Options{})
	a, err = fb.MapPeerDMA(mem, 8, 0)
	require.NoError(t, err)
	require.NoError(t, fb.UnmapDMA(a, int64(len(mem))))
	w, err = fb.MapPeerWindow(mem)
	require.NoError(t, err)
	require.NoError(t, fb.UnmapDMA(w, int64(len(mem))))
	require.Len(t, f.peers, 4)
}

// The controller takes no address of ours for its memory buffer: what an earlier driver switched on
// is off, and where it cannot be, nobody else gets its addresses on the PCI bus.
func TestControllerMemoryBufferIsKeptAway(t *testing.T) {
	for _, legacy := range []bool{false, true} {
		f := newFake(t)
		f.legacy, f.cmbmsc = legacy, 3
		r := newRig(t, f, nvme.Options{})
		if legacy {
			require.Equal(t, []span{{int64(f.cba), fakeCMB}}, f.reserved)
		} else {
			require.Zero(t, f.cmbmsc)
			require.Empty(t, f.reserved)
		}
		r.verify(r.queue(8))
		require.NoError(t, r.c.Reset(t.Context()), "the addresses are reserved once")
		require.Len(t, f.reserved, map[bool]int{true: 1}[legacy])
	}
}

func faults(t *testing.T, text string) *faultinject.Set {
	t.Helper()
	set, err := faultinject.Parse(text)
	require.NoError(t, err)
	return set
}

// Faults in front of a real SSD: its bus is prepared and reset all the same.
func TestFaultsInFront(t *testing.T) {
	f := shorten(newFake(t))
	b, err := open(f, f, Options{})
	require.NoError(t, err)
	outer := testrig.WithReadyTimeout(
		faultbus.New(b, faults(t, "stayready(times=1)"), faultbus.Options{}),
		500*time.Millisecond)
	c, err := nvme.Open(t.Context(), outer, nvme.Options{})
	require.NoError(t, err)
	require.True(t, f.enabled)
	qp, err := c.CreateQueuePair(t.Context(), 8)
	require.NoError(t, err)
	require.NoError(t, c.Reset(t.Context()),
		"CC.EN = 0 does not get through; a function reset does")
	require.Equal(t, 1, f.resets)
	require.EqualValues(t, 1, c.Counters().HardResets)
	require.NoError(t, c.DeleteQueuePair(t.Context(), qp))
	r := &rig{fake: f, t: t, bus: b, c: c}
	r.verify(r.queue(8))
	require.NoError(t, c.Close(t.Context()))
	f.check()
}
