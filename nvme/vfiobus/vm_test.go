package vfiobus

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/faultbus"
)

// TestVFIO drives the controllers at HELIOS_VFIO_TEST=ADDR[,ADDR…], which vfio-pci has, and WRITES
// to them. tools/vmtest runs it in a guest.
func TestVFIO(t *testing.T) {
	list := os.Getenv("HELIOS_VFIO_TEST")
	if list == "" {
		t.Skip("HELIOS_VFIO_TEST names no scratch controllers that are bound to vfio-pci")
	}
	dom, err := vfio.New(vfio.Options{})
	require.NoError(t, err)
	for _, addr := range strings.Split(list, ",") {
		t.Run(addr, func(t *testing.T) { testDevice(t, dom, addr) })
	}
	pieces, bytes := dom.Mapped()
	require.Zero(t, pieces, "%d bytes left mapped", bytes)
	require.Empty(t, hostmem.Usage())
	require.NoError(t, dom.Close())
}

func openDevice(t *testing.T, dom *vfio.Domain, addr string) *Bus {
	t.Helper()
	dev, err := dom.Attach(addr)
	require.NoError(t, err)
	b, err := Open(dev, Options{})
	require.NoError(t, err)
	return b
}

func testDevice(t *testing.T, dom *vfio.Domain, addr string) {
	ctx := t.Context()
	start := func(t *testing.T, opt nvme.Options) *rig {
		t.Helper()
		b := openDevice(t, dom, addr)
		c, err := nvme.Open(ctx, b, opt)
		if err != nil {
			_ = b.Close()
		}
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
		return &rig{t: t, bus: b, c: c}
	}
	t.Run("bring-up", func(t *testing.T) {
		began := time.Now()
		r := start(t, nvme.Options{})
		took := time.Since(began)
		c := r.c
		require.Equal(t, addr, c.Name())
		smart, err := c.SMART(ctx)
		require.NoError(t, err)
		t.Logf(
			"%s %s, firmware %s, NVMe %s: %+v, %d bytes a command, %d queue pairs of %d entries, %d K, up in %v",
			c.Model(), c.Serial(), c.Firmware(), c.Version(), c.Namespace(), c.MaxTransferBytes(),
			c.MaxQueuePairs(), c.MaxQueueEntries(), smart.Temperature(), took)
		mem, io, err := r.bus.DoorbellMemory()
		require.NoError(t, err)
		require.True(t, io)
		bell, err := r.bus.Doorbell(uint32(2*c.MaxQueuePairs() + 1))
		require.NoError(t, err, "the last doorbell is there")
		off := uintptr(unsafe.Pointer(bell)) - uintptr(unsafe.Pointer(&mem[0]))
		require.Less(t, off, uintptr(len(mem)))
	})
	t.Run("all queues", func(t *testing.T) {
		r := start(t, nvme.Options{})
		var all []*queue
		for range r.c.MaxQueuePairs() {
			all = append(all, r.queue(16))
		}
		_, err := r.c.CreateQueuePair(ctx, 16)
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		for i, q := range all {
			if i < 4 || i == len(all)-1 {
				r.verify(q)
			}
		}
		for _, q := range all {
			require.NoError(t, r.c.DeleteQueuePair(ctx, q.qp))
		}
		r.verify(r.queue(min(1024, r.c.MaxQueueEntries())))
	})
	t.Run("reset", func(t *testing.T) {
		r := start(t, nvme.Options{})
		old := r.queue(16)
		r.verify(old)
		require.NoError(t, r.c.Reset(ctx))
		require.NoError(t, r.c.DeleteQueuePair(ctx, old.qp))
		r.verify(r.queue(16))
		require.Zero(t, r.c.Counters().HardResets)
	})
	t.Run("bus master off", func(t *testing.T) {
		r := start(t, nvme.Options{})
		q := r.queue(16)
		r.verify(q)
		require.NoError(t, r.bus.dev.DisableDMA())
		// The controller cannot fetch what the doorbell announces.
		nvme.StoreDoorbell(q.qp.SQDoorbell, uint32((q.Tail+1)%16))
		require.Eventually(t, func() bool { return r.c.Health() != nil }, 5*time.Second,
			time.Millisecond)
		require.ErrorIs(t, r.c.Health(), nvme.ErrFatal)
		t.Log(r.c.Health())
		_, err := r.c.SMART(ctx)
		require.ErrorIs(t, err, nvme.ErrFatal)
		require.NoError(t, r.c.Reset(ctx))
		require.NoError(t, r.c.Health())
		r.verify(r.queue(16))
	})
	t.Run("function reset", func(t *testing.T) {
		r := start(t, nvme.Options{})
		old := r.queue(16)
		r.verify(old)
		require.NoError(t, r.bus.HardReset())
		require.Error(t, r.c.Health(), "it was reset behind our back")
		require.NoError(t, r.c.Reset(ctx))
		require.NoError(t, r.c.DeleteQueuePair(ctx, old.qp))
		q := r.queue(16)
		r.verify(q)
	})
	t.Run("hard reset as the last resort", func(t *testing.T) {
		b := openDevice(t, dom, addr)
		outer := testrig.WithReadyTimeout(
			faultbus.New(b, faults(t, "stayready(times=1)"), faultbus.Options{}),
			500*time.Millisecond)
		c, err := nvme.Open(ctx, outer, nvme.Options{})
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close(ctx)) }()
		r := &rig{t: t, bus: b, c: c}
		q := r.queue(16)
		r.verify(q)
		require.NoError(t, c.Reset(ctx))
		require.EqualValues(t, 1, c.Counters().HardResets)
		require.NoError(t, c.DeleteQueuePair(ctx, q.qp))
		r.verify(r.queue(16))
	})
	t.Run("left enabled", func(t *testing.T) {
		methods := "/sys/bus/pci/devices/" + addr + "/reset_method"
		// Else the kernel resets it between two owners.
		require.NoError(t, os.WriteFile(methods, []byte("\n"), 0))
		defer func() { require.NoError(t, os.WriteFile(methods, []byte("default\n"), 0)) }()
		b := openDevice(t, dom, addr)
		require.NoError(t, b.Prepare())
		mem, err := hostmem.Alloc(8192, "queues of a former owner")
		require.NoError(t, err)
		iova, err := b.MapDMA(mem)
		require.NoError(t, err)
		require.NoError(t, b.Write32(nvme.RegAQA, nvme.MakeAQA(8, 8)))
		require.NoError(t, nvme.Write64(b, nvme.RegASQ, uint64(iova)))
		require.NoError(t, nvme.Write64(b, nvme.RegACQ, uint64(iova)+4096))
		require.NoError(t, b.Write32(nvme.RegCC, uint32(nvme.MakeCC(12, 6, 4)|nvme.CCEnable)))
		ready := func(b *Bus) (enabled, ready bool) {
			cc, err := b.Read32(nvme.RegCC)
			require.NoError(t, err)
			csts, err := b.Read32(nvme.RegCSTS)
			require.NoError(t, err)
			return nvme.CC(cc).EN(), nvme.CSTS(csts).RDY()
		}
		require.Eventually(t, func() bool { _, r := ready(b); return r }, 10*time.Second,
			time.Millisecond)
		require.NoError(t, b.Close()) // as a process that is killed does: CC.EN stays
		require.NoError(t, hostmem.Free(mem))

		dev, err := dom.Attach(addr)
		require.NoError(t, err)
		raw := &Bus{dev: dev, dom: dom, name: addr, size: 0x2000, maps: map[mapping]int{}}
		require.NoError(t, raw.answerOnly())
		enabled, _ := ready(raw)
		require.True(t, enabled, "with memory space alone it answers, and is as it was left")
		require.NoError(t, raw.Close())

		b = openDevice(t, dom, addr)
		var command [2]byte
		require.NoError(t, b.dev.ReadAt(vfio.RegionConfig, command[:], 4))
		require.EqualValues(t, 2, command[0]&6, "memory space without bus master")
		enabled, rdy := ready(b)
		require.False(t, enabled || rdy, "disabled before it may reach memory")
		require.NoError(t, b.Close())
		start(t, nvme.Options{})
	})
}
