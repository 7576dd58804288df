package vfio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// TestRealDevices drives NVMe controllers that vfio-pci has, as tools/vmtest does in a guest:
// HELIOS_VFIO_TEST=ADDR[,ADDR…].
func TestRealDevices(t *testing.T) {
	list := os.Getenv("HELIOS_VFIO_TEST")
	if list == "" {
		t.Skip(
			"HELIOS_VFIO_TEST names no PCI addresses of NVMe controllers that are bound to vfio-pci")
	}
	for _, f := range Probe() {
		t.Logf("%-16s %-14s %s %s", f.Name, f.Answer, f.Detail, f.Next)
	}
	dom, err := New(Options{})
	require.NoError(t, err)
	var devs []*Device
	for _, addr := range strings.Split(list, ",") {
		dev, err := dom.Attach(addr)
		require.NoError(t, err)
		devs = append(devs, dev)
	}
	if _, err := dom.Attach(devs[0].Addr()); err == nil {
		t.Error("attached twice")
	}
	t.Logf("%d devices, %s, ranges %#x", len(devs), dom.Backend(), dom.Ranges())

	mem, err := hostmem.Alloc(8<<20, "vfio test")
	require.NoError(t, err)
	iova, err := dom.Map(mem)
	require.NoError(t, err)
	if want := os.Getenv("HELIOS_VFIO_HUGE"); want != "" && strconv.FormatInt(hostmem.HugeBytes(),
		10) != want {
		t.Errorf("%d bytes on reserved huge pages, want %s", hostmem.HugeBytes(), want)
	}
	if again, err := dom.Map(mem[1<<20 : 2<<20]); err != nil || again != iova+1<<20 {
		t.Errorf("a part again: %#x %v, the whole is at %#x", again, err, iova)
	}
	if err := dom.Unmap(iova+1<<20, 1<<20); err != nil {
		t.Error(err)
	}
	for i, dev := range devs {
		identify(t, dev, mem[i<<16:(i+1)<<16], iova+IOVA(i<<16))
		select {
		case <-dev.Asked():
			t.Errorf("%s: the kernel asks for it", dev.Addr())
		case <-dev.Failed():
			t.Errorf("%s: a PCI error", dev.Addr())
		default:
		}
	}
	if err := dom.Close(); err == nil {
		t.Error("the domain closed under its devices")
	}
	// Mappings outlive a device that comes back, and one that is alone.
	for _, dev := range devs {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}
	dev, err := dom.Attach(devs[0].Addr())
	require.NoError(t, err)
	identify(t, dev, mem[:64<<10], iova)
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if err := dom.Unmap(iova, int64(len(mem))); err != nil {
		t.Error(err)
	}
	if err := dom.Close(); err != nil {
		t.Error(err)
	}
	if err := hostmem.Free(mem); err != nil {
		t.Error(err)
	}
}

// TestRealUnplug holds the controller HELIOS_VFIO_UNPLUG until the kernel asks for it, having made
// the file HELIOS_VFIO_READY, and gives it back.
func TestRealUnplug(t *testing.T) {
	addr := os.Getenv("HELIOS_VFIO_UNPLUG")
	if addr == "" {
		t.Skip("HELIOS_VFIO_UNPLUG names no PCI address of a controller that will be unplugged")
	}
	dom, err := New(Options{})
	ok(t, err)
	dev := attach(t, dom, addr)
	mem := pages(t, 16)
	iova := mapped(t, dom, mem)
	identify(t, dev, mem, iova)
	ok(t, os.WriteFile(os.Getenv("HELIOS_VFIO_READY"), nil, 0o644))
	select {
	case <-dev.Asked():
	case <-time.After(time.Minute):
		t.Fatal("the kernel did not ask")
	}
	ok(t, dom.Unmap(iova, int64(len(mem))))
	ok(t, dev.Close())
	ok(t, dom.Close())
}

// TestRealMemlock fills RLIMIT_MEMLOCK to the last page, as a user whom it binds, on the controller
// HELIOS_VFIO_MEMLOCK: the account before a Map must be the kernel's.
func TestRealMemlock(t *testing.T) {
	addr := os.Getenv("HELIOS_VFIO_MEMLOCK")
	if addr == "" {
		t.Skip(
			"HELIOS_VFIO_MEMLOCK names no PCI address of a controller, to run as a user with a limit of locked memory")
	}
	dom, err := New(Options{})
	ok(t, err)
	dev := attach(t, dom, addr)
	used, limit, err := dom.m.k.memlock()
	if ok(t, err); limit < 0 || limit-used > 64<<20 {
		t.Fatalf("%d bytes locked, limit %d", used, limit)
	}
	n := int(limit-used) / pageBytes
	mem := pages(t, n+1)
	iova := mapped(t, dom, mem[:n*pageBytes])
	_, err = dom.Map(mem[n*pageBytes:])
	wants(t, err, errs.Capability, "RLIMIT_MEMLOCK is "+strconv.FormatInt(limit, 10),
		"heliosctl vfio-setup setup")
	if err := dom.space.mapMem(uintptr(va(mem))+uintptr(n*pageBytes), 1<<32,
		pageBytes); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("the kernel answers %v to a page beyond the limit", err)
	}
	ok(t, dom.Unmap(iova, int64(n*pageBytes)))
	mapped(t, dom, mem[n*pageBytes:]) // there is room again
	ok(t, dev.Close())
	ok(t, dom.Close())
}

// identify brings the controller up with an admin queue in mem, asks for its Identify data by DMA,
// and resets it.
func identify(t *testing.T, dev *Device, mem []byte, iova IOVA) {
	t.Helper()
	var id [4]byte
	require.NoError(t, dev.ReadAt(RegionConfig, id[:], 0))
	bar, err := dev.Region(RegionBAR0)
	if err != nil || bar.Size < 8192 || len(bar.Mappable) == 0 || bar.Mappable[0].Offset != 0 {
		t.Fatalf("%s: BAR 0 %+v %v", dev.Addr(), bar, err)
	}
	require.NoError(t, dev.EnableDMA())
	regs, err := dev.MapRegion(RegionBAR0, 0, 8192)
	require.NoError(t, err)
	reg := func(off int) *uint32 { return (*uint32)(unsafe.Pointer(&regs[off])) }
	capLo, capHi := atomic.LoadUint32(reg(0)), atomic.LoadUint32(reg(4))
	var through [4]byte
	if err := dev.ReadAt(RegionBAR0, through[:], 0); err != nil ||
		binary.LittleEndian.Uint32(through[:]) != capLo {
		t.Errorf("%s: CAP reads %x (%v) through the kernel and %#x by mapping", dev.Addr(), through,
			err, capLo)
	}
	const cc, csts, aqa, asq, acq = 0x14, 0x1c, 0x24, 0x28, 0x30
	wait := func(want uint32) {
		t.Helper()
		for range 100_000_000 {
			if atomic.LoadUint32(reg(csts))&1 == want {
				return
			}
		}
		t.Fatalf("%s: CSTS is %#x", dev.Addr(), atomic.LoadUint32(reg(csts)))
	}
	store := func(off int, v uint64) {
		storeReg(reg(off), uint32(v))
		storeReg(reg(off+4), uint32(v>>32))
	}
	clear(mem)
	storeReg(reg(cc), 0)
	wait(0)
	storeReg(reg(aqa), 15<<16|15)
	store(asq, uint64(iova))
	store(acq, uint64(iova)+4096)
	storeReg(reg(cc), 0x00460001)
	wait(1)
	const dataAt = 8192
	mem[0] = 6 // Identify
	binary.LittleEndian.PutUint64(mem[24:], uint64(iova)+dataAt)
	mem[40] = 1 // the controller
	storeReg(reg(0x1000), 1)
	phase := (*uint32)(unsafe.Pointer(&mem[4096+12]))
	for i := 0; atomic.LoadUint32(phase)>>16&1 == 0; i++ {
		if i == 100_000_000 {
			t.Fatalf("%s: no completion", dev.Addr())
		}
	}
	if status := atomic.LoadUint32(phase) >> 17; status != 0 {
		t.Fatalf("%s: Identify status %#x", dev.Addr(), status)
	}
	serial := string(bytes.TrimSpace(mem[dataAt+4 : dataAt+24]))
	if vendor := binary.LittleEndian.Uint16(mem[dataAt:]); vendor != binary.LittleEndian.Uint16(
		id[:]) || serial == "" {
		t.Errorf("%s: Identify names vendor %#x serial %q, configuration space %x", dev.Addr(),
			vendor, serial, id)
	}
	t.Logf("%s: vendor:device %x, BAR 0 %+v, CAP %08x%08x, serial %q", dev.Addr(), id, bar, capHi,
		capLo, serial)

	require.NoError(t, dev.Reset())
	require.NoError(t, dev.EnableDMA())
	if got := atomic.LoadUint32(reg(csts)) & 1; got != 0 || atomic.LoadUint32(reg(cc))&1 != 0 {
		t.Errorf("%s: ready %d after a reset", dev.Addr(), got)
	}
	if dev.Gone() {
		t.Errorf("%s: said to be gone", dev.Addr())
	}
	if err := dev.DisableDMA(); err != nil {
		t.Error(err)
	}
	if err := dev.UnmapRegion(regs); err != nil {
		t.Error(err)
	}
}

// storeReg is a plain store: atomic stores are locked exchanges on amd64, which I/O memory need not
// take.
//
//go:noinline
func storeReg(p *uint32, v uint32) { *p = v }
