package vfio

import (
	"testing"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// Another device's memory by type1: mapped whole or as far as it grew, in the memory's own order,
// without the limit of locked memory, and given to a device that comes later.
func TestPeerMemory(t *testing.T) {
	const mib = 1 << 20
	k := newFake(t)
	k.Mkdir("/sys/module/vfio_iommu_type1")
	d := k.domain("type1")
	bar := pages(t, 8*mib/4096)
	k.noRAM, k.holes, k.limit = bar, bar[6*mib:], 4096
	if _, err := d.MapPeer(bar[:4096], -1, 0); err == nil {
		t.Error("mapped without a device")
	}
	a := attach(t, d, cardA)
	i, err := d.MapPeer(bar[:3*mib], 5, 0)
	ok(t, err)
	if m := k.maps(); len(m) != 1 || m[uint64(i)].Vaddr != va(bar) || m[uint64(i)].Size != 3*mib ||
		k.used != 0 {
		t.Errorf("mapped %v, %d bytes counted", m, k.used)
	}
	if uint64(i)%hugeBytes != va(bar)%hugeBytes {
		t.Errorf("memory at %#x is mapped at %#x", va(bar), i)
	}
	// Queues within it are Maps like any other, and share it.
	if q := mapped(t, d, bar[mib:mib+8192]); q != i+mib {
		t.Errorf("a part is at %#x, want %#x", q, i+mib)
	}
	ok(t, d.Unmap(i+mib, 8192))
	ok(t, d.Unmap(i, 3*mib))

	// A window has nothing at first, and then just what it is asked for, though more is near.
	w, err := d.WindowPeer(bar)
	ok(t, err)
	if _, n := d.Mapped(); n != 0 {
		t.Errorf("%d bytes of a window are mapped", n)
	}
	ok(t, d.Extend(w, 2*mib))
	ok(t, d.Extend(w, 6*mib))
	if _, n := d.Mapped(); n != 6*mib || len(k.maps()) != 2 {
		t.Errorf("%d bytes mapped in %d pieces", n, len(k.maps()))
	}
	wants(t, d.Extend(w, 6*mib+1), errs.Capability, "another device's memory",
		"no page frame behind them")
	if _, n := d.Mapped(); n != 6*mib {
		t.Errorf("%d bytes after a refused step", n)
	}
	ok(t, a.Close())
	b := attach(t, d, cardB)
	if m := k.maps(); len(m) != 1 || m[uint64(w)].Size != 6*mib || k.used != 0 {
		t.Errorf("a later device has %v", m)
	}
	ok(t, d.Unmap(w, 8*mib))

	// Ordinary memory that was mapped at the same addresses and never taken back is not it.
	k.noRAM, k.holes, k.limit = nil, nil, -1
	old := mapped(t, d, bar[:mib])
	j, err := d.MapPeer(bar[:mib], -1, 0)
	ok(t, err)
	if j == old {
		t.Error("it shares the mapping of memory that is gone")
	}
	ok(t, d.Unmap(j, mib))
	ok(t, d.Unmap(old, mib))
	ok(t, b.Close())
	ok(t, d.Close())
}

func TestPeerRefusals(t *testing.T) {
	k := newFake(t)
	d := k.domain("type1")
	bar := pages(t, 4)
	k.noRAM = bar
	a := attach(t, d, cardA)
	// Without the module the container is iommufd's imitation.
	k.failNext("MAP_DMA", unix.EFAULT, unix.EINVAL, unix.ENOSPC)
	_, err := d.MapPeer(bar, -1, 0)
	wants(t, err, errs.Capability, "map 16384 bytes of another device's memory", "bad address",
		"iommufd's imitation", "CONFIG_VFIO_CONTAINER")
	_, err = d.MapPeer(bar, -1, 0)
	wants(t, err, errs.Capability, "imitation")
	_, err = d.MapPeer(bar, -1, 0)
	wants(t, err, errs.Capability, "no space left")
	k.Mkdir("/sys/module/vfio_iommu_type1")
	k.failNext("MAP_DMA", unix.EFAULT)
	_, err = d.MapPeer(bar, -1, 0)
	wants(t, err, errs.Capability, "no page frame")
	// Nothing was left by them.
	if i, err := d.MapPeer(bar, -1, 0); err != nil || i != lowestIOVA {
		t.Errorf("mapped at %#x: %v", i, err)
	} else {
		ok(t, d.Unmap(i, 4*4096))
	}
	ok(t, a.Close())
	ok(t, d.Close())
}

// iommufd takes exports where the kernel does, and no addresses.
func TestPeerByIOMMUFD(t *testing.T) {
	k := newFake(t)
	d := k.domain("iommufd")
	bar := pages(t, 4)
	k.noRAM = bar
	a := attach(t, d, cardA)
	_, err := d.MapPeer(bar, -1, 0)
	wants(t, err, errs.Capability, "takes no GPU's memory", "type1")
	k.failNext("MAP_FILE", unix.ENOTTY, unix.EINVAL)
	for range 2 {
		_, err = d.MapPeer(bar, 33, 0)
		wants(t, err, errs.Capability, "takes no GPU's memory", "6.19")
	}
	i, err := d.MapPeer(bar[4096:], 33, 8192)
	ok(t, err)
	if len(k.files) != 1 || k.files[0].FD != 33 || k.files[0].Start != 8192 ||
		k.files[0].Length != 3*4096 || k.files[0].IOVA != uint64(i) {
		t.Errorf("mapped %+v", k.files)
	}
	ok(t, d.Unmap(i, 3*4096))
	ok(t, a.Close())
	ok(t, d.Close())
}
