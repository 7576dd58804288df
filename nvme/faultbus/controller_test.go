package faultbus_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/proxy"
)

func TestFatalStatus(t *testing.T) {
	g := newRig(t, rigOptions{faults: "cfs(op=read,after=2,times=1)"})
	q := g.queue(8)
	q.Put(g.read(1, 1, 1, 0), g.read(2, 2, 1, 4096))
	q.done(1, 0)
	q.done(2, 0)
	q.Put(g.read(3, 3, 1, 8192), g.read(4, 4, 1, 12288))
	q.none()
	_, err := g.c.SMART(t.Context())
	require.ErrorIs(t, err, nvme.ErrFatal)
	require.NoError(t, g.c.Reset(t.Context()))
	_, err = g.c.SMART(t.Context())
	require.NoError(t, err)
	q.delete() // frees its memory
	q = g.queue(8)
	q.Put(g.read(3, 3, 1, 8192))
	q.done(3, 0)
	g.holds(3, 1, 8192)
}

func TestGone(t *testing.T) {
	testrig.CheckLeaks(t)
	bus, _, _ := openBus(t, rigOptions{faults: "gone(op=read,after=1)"})
	c, err := nvme.Open(t.Context(), bus, nvme.Options{Timeout: time.Second})
	require.NoError(t, err)
	mem, err := hostmem.Alloc(8192, "fault bus test")
	require.NoError(t, err)
	iova, err := c.MapDMA(mem)
	require.NoError(t, err)
	g := &rig{t: t, bus: bus, c: c, mem: mem, iova: iova}
	q := g.queue(8)
	q.Put(g.read(1, 1, 1, 0))
	q.done(1, 0)
	q.Put(g.read(2, 2, 1, 4096))
	q.none()
	v, err := nvme.Read64(bus, nvme.RegCAP)
	require.NoError(t, err)
	require.EqualValues(t, uint64(1<<64-1), v)
	require.NoError(t, bus.Write32(nvme.RegCC, 0))
	require.ErrorIs(t, c.Reset(t.Context()), nvme.ErrGone)
	err = c.Close(context.Background())
	require.ErrorIs(t, err, nvme.ErrGone)
	require.NoError(t, hostmem.Free(mem)) // its mapping ended with the bus
	_, err = bus.Read32(nvme.RegVS)
	require.ErrorIs(t, err, nvme.ErrClosed)
}

// Opening fails with the error that belongs to the fault, and leaves nothing behind.
func TestOpenFails(t *testing.T) {
	for faults, want := range map[string]func(error) bool{
		"cfs()":         func(err error) bool { return errors.Is(err, nvme.ErrFatal) },
		"gone()":        func(err error) bool { return errors.Is(err, nvme.ErrGone) },
		"notready()":    func(err error) bool { return errors.Is(err, nvme.ErrTimeout) },
		"cfs(op=admin)": func(err error) bool { return errors.Is(err, nvme.ErrFatal) },
		"error(op=identify,sct=0,sc=0x06,dnr=1)": func(err error) bool {
			var se *nvme.StatusError
			return errors.As(err, &se) && se.Status == nvme.StatusInternalError.WithDNR()
		},
		"error(op=features,sct=0,sc=2,dnr=1)": func(err error) bool {
			var se *nvme.StatusError
			return errors.As(err, &se) && se.Status.Is(nvme.StatusInvalidField)
		},
		"lost(op=identify)":    func(err error) bool { return errors.Is(err, nvme.ErrTimeout) },
		"drop(op=admin)":       func(err error) bool { return errors.Is(err, nvme.ErrTimeout) },
		"stuck(op=identify)":   func(err error) bool { return errors.Is(err, nvme.ErrTimeout) },
		"phase(op=identify)":   func(err error) bool { return errors.Is(err, nvme.ErrTimeout) },
		"foreign(op=identify)": func(err error) bool { return errors.Is(err, nvme.ErrProtocol) },
		"dup(op=identify)":     func(err error) bool { return errors.Is(err, nvme.ErrProtocol) },
		"sqhead(op=identify)":  func(err error) bool { return errors.Is(err, nvme.ErrProtocol) },
		"sqid(op=identify)":    func(err error) bool { return errors.Is(err, nvme.ErrProtocol) },
	} {
		t.Run(faults, func(t *testing.T) {
			testrig.CheckLeaks(t)
			bus, _, _ := openBus(t, rigOptions{faults: faults})
			start := time.Now()
			_, err := nvme.Open(t.Context(), testrig.WithReadyTimeout(bus, time.Millisecond),
				nvme.Options{Timeout: 50 * time.Millisecond})
			require.True(t, want(err), "%v", err)
			require.Equal(t, errs.Device, errs.ClassOf(err))
			require.Less(t, time.Since(start), 5*time.Second)
			require.NoError(t, bus.Close())
			require.NoError(t, bus.Close(), "again")
		})
	}
}

// Registers that do not follow heal when the fault ends, and each try costs what CAP.TO says.
func TestReadyDoesNotFollow(t *testing.T) {
	for _, faults := range []string{"notready(after=1,times=1)", "stayready(times=1)"} {
		t.Run(faults, func(t *testing.T) {
			path := image(t, true, 512)
			synctest.Test(t, func(t *testing.T) {
				inner, err := proxy.Open(proxy.Config{Path: path, RAM: true})
				require.NoError(t, err)
				g := newBubble(t, inner, faults, 1200*time.Millisecond)
				v, err := nvme.Read64(g.c.Bus(), nvme.RegCAP)
				require.NoError(t, err)
				require.Equal(t, 3, nvme.CAP(v).TO())
				q := g.queue(8)
				start := time.Now()
				require.ErrorIs(t, g.c.Reset(t.Context()), nvme.ErrTimeout)
				require.GreaterOrEqual(t, time.Since(start), 1500*time.Millisecond)
				require.Less(t, time.Since(start), 3*time.Second)
				g.counts(1)
				require.NoError(t, g.c.Reset(t.Context()))
				q.delete()
				q = g.queue(8)
				q.Put(g.read(1, 5, 1, 0))
				q.done(1, 0)
				g.holds(5, 1, 0)
				g.end()
			})
		})
	}
}

// Queue creation and deletion under faults: what failed can be tried again.
func TestQueueAdminFaults(t *testing.T) {
	g := newRig(t,
		rigOptions{
			faults: "error(op=createq,sct=1,sc=1,dnr=1,times=1);error(op=createq,sct=1,sc=2,after=2,times=1);error(op=deleteq,sct=0,sc=6,after=1,times=1);late(op=abort,ms=5)"})
	// The queue that the fault refuses first is a completion queue, then a submission queue.
	_, err := g.c.CreateQueuePair(t.Context(), 8)
	var se *nvme.StatusError
	require.ErrorAs(t, err, &se)
	_, err = g.c.CreateQueuePair(t.Context(), 8)
	require.ErrorAs(t, err, &se)
	require.Equal(t, nvme.StatusInvalidQueueSize, se.Status)
	q := g.queue(8)
	q.Put(g.read(1, 1, 1, 0))
	q.done(1, 0)
	require.ErrorAs(t, g.c.DeleteQueuePair(t.Context(), q.qp), &se)
	require.NoError(t, g.c.Reset(t.Context()))
	for range 20 {
		q = g.queue(4)
		for range 7 {
			q.Put(g.read(1, 1, 1, 0))
			q.done(1, 0)
		}
		q.delete()
	}
}

// The effect of an admin command is known although its completion is lost.
func TestLostCreation(t *testing.T) {
	g := newRig(t, rigOptions{faults: "lost(op=createq,times=1)",
		options: nvme.Options{Timeout: 30 * time.Millisecond}})
	_, err := g.c.CreateQueuePair(t.Context(), 8)
	require.ErrorIs(t, err, nvme.ErrTimeout)
	q := g.queue(8)
	q.Put(g.read(1, 1, 1, 0))
	q.done(1, 0)
	require.NoError(t, g.c.Reset(t.Context()))
	q.delete()
}

// Memory of a live queue that is unmapped is fatal, and not touched any more.
func TestUnmapLiveQueue(t *testing.T) {
	testrig.CheckLeaks(t)
	bus, _, _ := openBus(t, rigOptions{faults: "late(ms=5,op=admin)"})
	page, err := hostmem.Alloc(8192, "fault bus test")
	require.NoError(t, err)
	iova, err := bus.MapDMA(page)
	require.NoError(t, err)
	require.NoError(t, bus.Write32(nvme.RegAQA, nvme.MakeAQA(8, 8)))
	require.NoError(t, nvme.Write64(bus, nvme.RegASQ, uint64(iova)))
	require.NoError(t, nvme.Write64(bus, nvme.RegACQ, uint64(iova)+4096))
	require.NoError(t, bus.Write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable)))
	got, err := nvme.Read64(bus, nvme.RegACQ)
	require.NoError(t, err)
	require.EqualValues(t, uint64(iova)+4096, got, "the client's own")
	v, err := bus.Read32(nvme.RegCSTS)
	require.NoError(t, err)
	require.True(t, nvme.CSTS(v).RDY() && !nvme.CSTS(v).CFS())
	require.NoError(t, bus.UnmapDMA(iova, 8192))
	require.NoError(t, hostmem.Free(page))
	v, err = bus.Read32(nvme.RegCSTS)
	require.NoError(t, err)
	require.True(t, nvme.CSTS(v).CFS())
	bus.Kick(0)
	bus.WaitCQ(0, time.Millisecond)
	require.ErrorContains(t, bus.UnmapDMA(iova, 8192), "unmap")
	require.NoError(t, bus.Close())
}

// A controller that somebody left enabled is disabled first.
func TestLeftEnabled(t *testing.T) {
	g := newRig(t, rigOptions{faults: "late(ms=1,op=read)", wrap: func(b nvme.Bus) nvme.Bus {
		require.NoError(t, b.Write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable)))
		v, err := b.Read32(nvme.RegCC)
		require.NoError(t, err)
		require.True(t, nvme.CC(v).EN())
		return b
	}})
	q := g.queue(8)
	q.Put(g.read(1, 5, 1, 0))
	q.done(1, 0)
	g.holds(5, 1, 0)
}

// Rings that the controller cannot reach are its to refuse.
func TestBadAdminRings(t *testing.T) {
	testrig.CheckLeaks(t)
	bus, _, _ := openBus(t, rigOptions{faults: "late(ms=5,op=admin)"})
	require.NoError(t, bus.Write32(nvme.RegAQA, nvme.MakeAQA(8, 8)))
	require.NoError(t, nvme.Write64(bus, nvme.RegASQ, 0x1000))
	require.NoError(t, bus.Write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable)))
	v, err := bus.Read32(nvme.RegCSTS)
	require.NoError(t, err)
	require.True(t, nvme.CSTS(v).CFS())
	require.NoError(t, bus.Close())
}

func TestGroup(t *testing.T) {
	g := newRig(t, rigOptions{faults: "late(ms=20,op=read,lba=3)"})
	h := newRig(t, rigOptions{faults: "drop(op=read,lba=3)"})
	q, r := g.queue(8), h.queue(8)
	group, err := g.bus.GroupCQs([]nvme.CQRef{{Bus: g.bus, QID: q.qp.ID},
		{Bus: h.bus, QID: r.qp.ID}})
	require.NoError(t, err)
	require.Error(t, group.Rejoin(nvme.CQRef{Bus: g.bus, QID: q.qp.ID}), "is in it")
	require.Error(t, group.Rejoin(nvme.CQRef{Bus: h.bus, QID: 40}), "does not exist")
	require.Error(t, group.Rejoin(nvme.CQRef{Bus: h.bus.Unwrap(), QID: r.qp.ID}),
		"has no faults in front")
	group.Wait(0)
	group.Wait(0)
	start := time.Now()
	group.Wait(5 * time.Millisecond)
	require.GreaterOrEqual(t, time.Since(start), 5*time.Millisecond, "nothing came")
	r.Put(h.read(1, 7, 1, 0))
	for end := time.Now().Add(patience); ; group.Wait(patience) {
		if _, ok := r.Poll(); ok {
			break
		}
		require.True(t, time.Now().Before(end))
	}
	q.Put(g.read(1, 3, 1, 0)) // a timer's work
	for end := time.Now().Add(patience); ; group.Wait(patience) {
		if _, ok := q.Poll(); ok {
			break
		}
		require.True(t, time.Now().Before(end))
	}
	// A queue that is deleted leaves the group, its successor joins it.
	r.delete()
	r = h.queue(8)
	require.NoError(t, group.Rejoin(nvme.CQRef{Bus: h.bus, QID: r.qp.ID}))
	r.Put(h.read(1, 3, 1, 0), h.read(2, 4, 1, 0))
	for end := time.Now().Add(patience); ; group.Wait(patience) {
		if e, ok := r.Poll(); ok {
			require.EqualValues(t, 2, e.CID)
			break
		}
		require.True(t, time.Now().Before(end))
	}
	require.NoError(t, group.Close())
	require.NoError(t, group.Close())
	require.Error(t, group.Rejoin(nvme.CQRef{Bus: g.bus, QID: q.qp.ID}))
	q.Put(g.read(1, 5, 1, 0))
	q.done(1, 0)
}

// bare is a controller that nobody can wait for or wake, as on a PCI bus.
type bare struct{ nvme.Bus }

func TestControllerWithoutWaits(t *testing.T) {
	g := newRig(t, rigOptions{faults: "late(ms=2,op=read,lba=3)",
		wrap:  func(b nvme.Bus) nvme.Bus { return bare{b} },
		proxy: func(c *proxy.Config) { c.PollDoorbells = true }})
	q := g.queue(8)
	for i := range 100 {
		q.Put(g.read(uint16(i), i%8, 1, 0))
		q.done(uint16(i), 0)
		g.holds(i%8, 1, 0)
	}
	q.delete()
	require.NoError(t, g.c.Reset(t.Context()))
}

// In a bubble of virtual time every goroutine and timer of the bus blocks as it should: an hour
// of lateness takes no time.
func TestVirtualTime(t *testing.T) {
	path := image(t, true, 512)
	synctest.Test(t, func(t *testing.T) {
		inner, err := proxy.Open(proxy.Config{Path: path, RAM: true})
		require.NoError(t, err)
		g := newBubble(t, inner,
			"late(ms=3600000,op=read,lba=3);slow(us=60000000,op=read,lba=4);lost(op=read,lba=5)", 0)
		q := g.queue(8)
		start := time.Now()
		q.Put(g.read(1, 3, 1, 0), g.read(2, 4, 1, 4096), g.read(3, 5, 1, 8192),
			g.read(4, 6, 1, 12288))
		for _, want := range []struct {
			cid uint16
			at  time.Duration
		}{{4, 0}, {2, time.Minute}, {1, time.Hour}} {
			e, ok := q.Get(2 * time.Hour)
			require.True(t, ok)
			require.Equal(t, want.cid, e.CID)
			require.InDelta(t, float64(want.at), float64(time.Since(start)), float64(time.Second))
		}
		g.holds(3, 1, 0)
		_, ok := q.Get(time.Hour)
		require.False(t, ok)
		g.end()
	})
}
