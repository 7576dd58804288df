package vfio

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

var backends = []string{"type1", "iommufd"}

// each runs a test on both backends.
func each(t *testing.T, f func(t *testing.T, k *fake, d *Domain)) {
	for _, b := range backends {
		t.Run(b, func(t *testing.T) {
			k := newFake(t)
			d := k.domain(b)
			if d.Backend() != b {
				t.Fatalf("backend %q", d.Backend())
			}
			f(t, k, d)
		})
	}
}

func attach(t *testing.T, d *Domain, addr string) *Device {
	t.Helper()
	dev, err := d.Attach(addr)
	require.NoError(t, err)
	return dev
}

func ok(t *testing.T, err error) {
	t.Helper()
	require.NoError(t, err)
}

// wants asserts an error's class and words.
func wants(t *testing.T, err error, class errs.Class, words ...string) {
	t.Helper()
	if err == nil || errs.ClassOf(err) != class {
		t.Errorf("class %d: %v; want class %d", errs.ClassOf(err), err, class)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

func pages(t *testing.T, n int) []byte {
	t.Helper()
	b, err := hostmem.Alloc(int64(n)*pageBytes, "vfio test")
	ok(t, err)
	t.Cleanup(func() { ok(t, hostmem.Free(b)) })
	return b
}

func va(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }

func mapped(t *testing.T, d *Domain, b []byte) IOVA {
	t.Helper()
	i, err := d.Map(b)
	ok(t, err)
	return i
}

func TestMapsCountAndShare(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		mem := pages(t, 32)
		if _, err := d.Map(mem); err == nil {
			t.Error("a Map without a device")
		}
		a := attach(t, d, cardA)
		if got := d.Ranges(); !slices.Equal(got, k.ranges) {
			t.Errorf("ranges %x", got)
		}
		i := mapped(t, d, mem[:10*4096-7]) // the length is rounded up
		if i < lowestIOVA || i != 1<<20 {
			t.Errorf("the first mapping is at %#x", i)
		}
		if m := k.maps()[uint64(i)]; m.Vaddr != va(mem) || m.Size != 40960 {
			t.Errorf("the kernel has %+v", m)
		}
		if j := mapped(t, d, mem[:10*4096]); j != i {
			t.Errorf("the same memory again: %#x, then %#x", i, j)
		}
		if j := mapped(t, d, mem[4096:12288]); j != i+4096 {
			t.Errorf("a part: %#x in %#x", j, i)
		}
		// Memory that sticks out of a mapping gets its own.
		j := mapped(t, d, mem[5*4096:])
		if j < i+40960 || len(k.maps()) != 2 {
			t.Errorf("overlapping memory: %#x, %d mappings", j, len(k.maps()))
		}
		b := attach(t, d, cardB)
		if len(k.maps()) != 2 {
			t.Errorf("%d mappings after a second device", len(k.maps()))
		}
		for _, c := range []struct {
			iova  IOVA
			bytes int64
		}{{i, 4096}, {i + 4096, 4096}, {i, 0}, {i + 4096, 40960 - 4096}, {0, 4096},
			{j + 4096, 4096}} {
			if d.Unmap(c.iova, c.bytes) == nil {
				t.Errorf("unmapped %d bytes at %#x, which nobody mapped so", c.bytes, c.iova)
			}
		}
		ok(t, d.Unmap(i, 40960))
		ok(t, d.Unmap(i, 40960-7))
		if d.Unmap(i, 40960) == nil || len(k.maps()) != 2 {
			t.Error("the part's count went with the whole's")
		}
		if n, bytes := d.Mapped(); n != 2 || bytes != 40960+27*4096 {
			t.Errorf("mapped %d pieces, %d bytes", n, bytes)
		}
		ok(t, d.Unmap(i+4096, 8192))
		if _, there := k.maps()[uint64(i)]; there || len(k.maps()) != 1 {
			t.Error("the kernel keeps a mapping without users")
		}
		// The freed addresses are the first to be used again.
		if l := mapped(t, d, mem[:4096]); l != i {
			t.Errorf("a hole at %#x, and a mapping at %#x", i, l)
		}
		ok(t, d.Unmap(i, 4096))
		ok(t, d.Unmap(j, 27*4096))
		if _, err := d.Map(mem[1:4097]); err == nil {
			t.Error("memory between pages")
		}
		if _, err := d.Map(nil); err == nil {
			t.Error("no memory")
		}
		ok(t, a.Close())
		ok(t, b.Close())
		ok(t, d.Close())
		ok(t, d.Close())
		if _, err := d.Map(mem); err == nil {
			t.Error("a Map after Close")
		}
		if _, err := d.Attach(cardA); err == nil {
			t.Error("an Attach after Close")
		}
	})
}

// Big memory keeps its place within 2 MiB, so that the IOMMU can use big pages.
// A window pins what Extend asked for, in few pieces, counts by SSD, and goes as a whole.
func TestWindows(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		const mib = 1 << 20
		mem := pages(t, 16*mib/4096)
		if _, err := d.Window(mem); err == nil {
			t.Error("a window without a device")
		}
		a := attach(t, d, cardA)
		i, err := d.Window(mem)
		ok(t, err)
		j, err := d.Window(mem) // of another SSD
		ok(t, err)
		if n, bytes := d.Mapped(); i != j || n != 1 || bytes != 0 || len(k.maps()) != 0 {
			t.Errorf("windows at %#x and %#x, %d bytes mapped, %d mappings", i, j, bytes,
				len(k.maps()))
		}
		reach := func(want int64, pieces int) {
			t.Helper()
			var sum int64
			for at, m := range k.maps() {
				if m.Vaddr-va(mem) != at-uint64(i) {
					t.Errorf("memory at %d lies at %d", m.Vaddr-va(mem), at-uint64(i))
				}
				sum += int64(m.Size)
			}
			if _, bytes := d.Mapped(); bytes != want || sum != want || len(k.maps()) != pieces {
				t.Errorf("%d bytes in %d mappings, by the books %d, want %d in %d", sum,
					len(k.maps()), bytes, want, pieces)
			}
		}
		ok(t, d.Extend(i, 0))
		reach(0, 0)
		ok(t, d.Extend(i, 5000))
		reach(2*mib, 1)
		ok(t, d.Extend(i, 2*mib))
		reach(2*mib, 1)
		k.limit = 3 * mib // no room for a whole step, but for what is needed
		ok(t, d.Extend(i, 2*mib+1))
		reach(2*mib+4096, 2)
		wants(t, d.Extend(i, 4*mib), errs.Capability, "RLIMIT_MEMLOCK")
		k.limit = -1
		ok(t, d.Extend(i, 10*mib))
		reach(10*mib, 3)
		// A Map of a part brings it into reach; a later device has it all.
		if p := mapped(t, d, mem[11*mib:11*mib+4096]); p != i+11*mib {
			t.Errorf("a part of the window is at %#x", p)
		}
		reach(11*mib+4096, 4)
		ok(t, d.Unmap(i+11*mib, 4096))
		for _, bad := range []struct {
			iova  IOVA
			bytes int64
		}{{i, 16*mib + 1}, {i, -1}, {i - 1, 1}, {i + 16*mib, 1}} {
			if d.Extend(bad.iova, bad.bytes) == nil {
				t.Errorf("extended %#x to %d bytes", bad.iova, bad.bytes)
			}
		}
		ok(t, d.Unmap(i, 16*mib))
		reach(11*mib+4096, 4)
		// Without devices type1 forgets it; the next device gets it back in one piece.
		ok(t, a.Close())
		pieces := 4
		if d.Backend() == "type1" {
			pieces = 1
			if d.Extend(i, 16*mib) == nil {
				t.Error("extended without a device")
			}
		}
		b := attach(t, d, cardB)
		reach(11*mib+4096, pieces)
		ok(t, d.Unmap(i, 16*mib))
		reach(0, 0)
		if d.Unmap(i, 16*mib) == nil || d.Extend(i, 1) == nil {
			t.Error("the window is still there")
		}
		ok(t, b.Close())
		ok(t, d.Close())
		if d.Extend(i, 1) == nil {
			t.Error("an Extend after Close")
		}
	})
}

func TestBigMapsAreAligned(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		dev := attach(t, d, cardA)
		small, big := pages(t, 1), pages(t, 2048)
		s, b := mapped(t, d, small), mapped(t, d, big)
		if uint64(b)%hugeBytes != va(big)%hugeBytes {
			t.Errorf("memory at %#x is mapped at %#x", va(big), b)
		}
		ok(t, d.Unmap(s, 4096))
		ok(t, d.Unmap(b, 2048*4096))
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

func TestAddressesRunOut(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		// 16 pages from 1 MiB, a hole of 4, 8 pages, and 2 that touch them; unsorted, with an empty
		// one.
		k.ranges = []Range{{0x114000, 0x11bfff}, {0x11c000, 0x11dfff}, {0, 0x10ffff},
			{0x800000, 0x7fffff}}
		dev := attach(t, d, cardA)
		mem := pages(t, 64)
		if i := mapped(t, d, mem[:8*4096]); i != 0x100000 {
			t.Errorf("first at %#x", i)
		}
		// Twice 8 pages are left in one piece.
		_, err := d.Map(mem[8*4096 : 17*4096])
		wants(t, err, errs.Capability, "36864 bytes", "largest: 32768")
		for n, want := range []IOVA{0x108000, 0x114000} {
			if i := mapped(t, d, mem[(8+8*n)*4096:(16+8*n)*4096]); i != want {
				t.Errorf("8 pages at %#x, want %#x", i, want)
			}
		}
		if i := mapped(t, d, mem[24*4096:26*4096]); i != 0x11c000 {
			t.Errorf("2 pages at %#x", i)
		}
		if _, err := d.Map(mem[26*4096 : 27*4096]); err == nil {
			t.Error("more than there is")
		}
		ok(t, d.Unmap(0x114000, 8*4096))
		ok(t, d.Unmap(0x11c000, 2*4096))
		if _, err := d.Map(mem[20*4096 : 29*4096]); err == nil {
			t.Error("a mapping across the border of two ranges")
		}
		ok(t, d.Unmap(0x108000, 8*4096))
		if i := mapped(t, d, mem[30*4096:34*4096]); i != 0x108000 {
			t.Errorf("in what was given back: %#x", i)
		}
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

func TestMapErrors(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		dev := attach(t, d, cardA)
		mem := pages(t, 64)
		k.limit = 10 * 4096
		_, err := d.Map(mem)
		wants(t, err, errs.Capability, "RLIMIT_MEMLOCK is 40960 bytes", "262144 needed",
			"heliosctl vfio-setup setup")
		if k.count("MAP_DMA") != 0 {
			t.Error("the kernel was asked although the limit is known")
		}
		i := mapped(t, d, mem[:8*4096])
		_, err = d.Map(mem[8*4096 : 11*4096])
		wants(t, err, errs.Capability, "32768 of them in use", "45056 needed")
		k.failNext("MAP_DMA", unix.ENOMEM)
		_, err = d.Map(mem[8*4096 : 9*4096])
		wants(t, err, errs.Capability, "RLIMIT_MEMLOCK")
		k.limit = -1
		k.failNext("MAP_DMA", unix.ENOMEM, unix.EFAULT)
		_, err = d.Map(mem[8*4096 : 9*4096])
		wants(t, err, errs.Capability, "free memory")
		_, err = d.Map(mem[8*4096 : 9*4096])
		wants(t, err, errs.Failed, "not memory")
		k.maxMaps = 1
		_, err = d.Map(mem[8*4096 : 9*4096])
		wants(t, err, errs.Capability, "65,535", "dma_entry_limit")
		k.failNext("memlock", unix.EIO)
		_, err = d.Map(mem[8*4096 : 9*4096])
		wants(t, err, errs.Failed, "limit of locked memory")
		// Failed Maps took no addresses.
		k.maxMaps = 9
		if j := mapped(t, d, mem[8*4096:9*4096]); j != i+8*4096 {
			t.Errorf("a Map after failed ones is at %#x", j)
		} else {
			// An Unmap that the kernel refuses keeps the addresses.
			k.failNext("UNMAP_DMA", unix.EIO)
			if d.Unmap(j, 4096) == nil {
				t.Error("the kernel's refusal was lost")
			}
			// The same address may be other memory by now: it gets a mapping of its own.
			if o := mapped(t, d, mem[8*4096:9*4096]); o == j {
				t.Error("a Map shares a mapping that could not be undone")
			} else {
				ok(t, d.Unmap(o, 4096))
			}
			ok(t, d.Unmap(j, 4096))
		}
		ok(t, d.Unmap(i, 8*4096))
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

func TestReserve(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		dev := attach(t, d, cardA)
		mem := pages(t, 4)
		ok(t, d.ReserveAt(1<<21, 5000))
		ok(t, d.ReserveAt(1<<20, 4096))
		if i := mapped(t, d, mem[:4096]); i != 1<<20+4096 {
			t.Errorf("mapped at %#x", i)
		}
		for _, at := range []IOVA{1 << 20, 1<<20 + 4096, 1<<21 + 4096, 5, ^IOVA(0) - 4095} {
			if d.ReserveAt(at, 8192) == nil {
				t.Errorf("reserved at %#x", at)
			}
		}
		ok(t, d.ReserveAt(0xfee00000, 1<<20)) // the IOMMU does not offer it, which is as good
		ok(t, d.Unreserve(1<<20, 4096))
		if d.Unreserve(1<<20, 4096) == nil {
			t.Error("taken back twice")
		}
		if i := mapped(t, d, mem[4096:8192]); i != 1<<20 {
			t.Errorf("mapped at %#x", i)
		}
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

// first fit against a plain model of every page.
func TestAllocatorAgainstModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 5))
	const n = 700
	var s iovaSpace
	holes := []Range{{lowestIOVA, lowestIOVA + 299*4096 + 4095},
		{lowestIOVA + 310*4096, lowestIOVA + (n-1)*4096 + 4095}}
	s.reset(holes, nil)
	free := make([]bool, n)
	for i := range free {
		free[i] = i < 300 || i >= 310
	}
	type piece struct{ at, size int }
	var live []piece
	for range 20000 {
		if r.IntN(2) == 0 && len(live) > 0 {
			i := r.IntN(len(live))
			p := live[i]
			live = slices.Delete(live, i, i+1)
			s.give(lowestIOVA+IOVA(p.at)*4096, uint64(p.size)*4096)
			for j := range p.size {
				free[p.at+j] = true
			}
			continue
		}
		size, align := 1+r.IntN(20), 1<<r.IntN(5)
		phase := r.IntN(align)
		want := -1
	search:
		for off := 0; off+size <= n; off++ {
			if (off-phase)%align != 0 { // lowestIOVA is a multiple of every align here
				continue
			}
			for j := range size {
				if !free[off+j] {
					continue search
				}
			}
			want = off
			break
		}
		got, err := s.take(uint64(size)*4096, uint64(align)*4096, uint64(phase)*4096)
		if want < 0 {
			if err == nil {
				t.Fatalf("seed %d: %d pages at %#x, where none fit", seed, size, got)
			}
			continue
		}
		if err != nil || got != lowestIOVA+IOVA(want)*4096 {
			t.Fatalf("seed %d: %d pages aligned to %d: %#x %v, want page %d", seed, size, align,
				got, err, want)
		}
		for j := range size {
			free[want+j] = false
		}
		live = append(live, piece{want, size})
	}
	for _, p := range live {
		s.give(lowestIOVA+IOVA(p.at)*4096, uint64(p.size)*4096)
	}
	if !slices.Equal(s.free, usable(holes)) {
		t.Errorf("seed %d: after all was given back: %x", seed, s.free)
	}
}

func TestRangesOfOldAndLongAndStrangeIOMMUs(t *testing.T) {
	k := newFake(t)
	k.noCaps = true
	d := k.domain("type1")
	dev := attach(t, d, cardA)
	if !slices.Equal(d.Ranges(), defaultRanges) {
		t.Errorf("without a list: %x", d.Ranges())
	}
	ok(t, dev.Close())
	ok(t, d.Close())

	each(t, func(t *testing.T, k *fake, d *Domain) {
		k.ranges = nil
		for i := range 300 {
			k.ranges = append(k.ranges, Range{IOVA(i+1) << 32, IOVA(i+1)<<32 + 0xffffff})
		}
		dev := attach(t, d, cardA)
		if len(d.Ranges()) != 300 || d.Ranges()[299] != k.ranges[299] {
			t.Errorf("%d ranges", len(d.Ranges()))
		}
		ok(t, dev.Close())
		k.ranges = nil
		_, err := d.Attach(cardA)
		wants(t, err, errs.Capability, "no addresses", cardA)
		// 64 bits in full: the last page is not given out, and nothing wraps.
		k.ranges = []Range{{0xfffffffffffe0000, ^IOVA(0)}}
		dev = attach(t, d, cardA)
		mem := pages(t, 40)
		if i := mapped(t, d, mem[:31*4096]); i != 0xfffffffffffe0000 {
			t.Errorf("mapped at %#x", i)
		}
		if _, err := d.Map(mem[31*4096 : 32*4096]); err == nil {
			t.Error("the last page was given out")
		}
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

func TestAttachErrors(t *testing.T) {
	for _, c := range []struct {
		name     string
		backends []string
		prepare  func(k *fake)
		addr     string
		class    errs.Class
		words    []string
	}{
		{"no such device", backends, func(*fake) {}, "0000:00:1f.0", errs.Device,
			[]string{"0000:00:1f.0"}},
		{"no address", backends, func(*fake) {}, "nvme0", errs.Usage, []string{"nvme0"}},
		{"kernel driver", backends, func(k *fake) { k.add("0000:01:00.0", 20, "nvme") },
			"0000:01:00.0", errs.Usage, []string{"kernel driver nvme",
				"heliosctl bind-ssds 0000:01:00.0"}},
		{"no driver", backends, func(k *fake) { k.add("0000:01:00.0", 20, "-") }, "0000:01:00.0",
			errs.Usage, []string{"no kernel driver"}},
		{"no group", backends, func(k *fake) { k.add("0000:01:00.0", -1, "vfio-pci") },
			"0000:01:00.0", errs.Capability,
			[]string{"IOMMU is off", "heliosctl vfio-setup status"}},
		{"shared group", backends, func(k *fake) {
			k.add("0000:00:04.1", 10, "nvme")
			k.failNext("BIND_IOMMUFD", unix.EPERM)
		}, cardA, errs.Refused, []string{cardA + " (vfio-pci)", "0000:00:04.1 (nvme)",
			"bind-ssds 0000:00:04.1", "another slot"}},
		{"group taken while joining", []string{"type1"},
			func(k *fake) { k.failNext("SET_CONTAINER", unix.EBUSY) }, cardA, errs.Refused,
			[]string{"group 10", cardA}},
		{"rights", []string{"type1"},
			func(k *fake) { k.failNext("open /dev/vfio/10", unix.EACCES) }, cardA, errs.Capability,
			[]string{"/dev/vfio/10", "heliosctl vfio-setup setup"}},
		{"rights to the device", []string{"iommufd"},
			func(k *fake) { k.failNext("open /dev/vfio/devices/vfio0", unix.EACCES) }, cardA,
			errs.Capability, []string{"/dev/vfio/devices/vfio0", "heliosctl vfio-setup setup"}},
		{"other program", []string{"type1"}, func(k *fake) {
			k.failNext("open /dev/vfio/10", unix.EBUSY)
			k.Process(99, "qemu-system-x86")
			k.Link("/proc/99/fd/12", "/dev/vfio/10")
		}, cardA, errs.Refused, []string{"group 10", "qemu-system-x86, process 99"}},
		{"other program has the device", []string{"iommufd"},
			func(k *fake) { k.cards[cardA].open = true }, cardA, errs.Refused,
			[]string{"somebody else"}},
		{"no node", []string{"type1"}, func(k *fake) { k.Remove("/dev/vfio/10") }, cardA,
			errs.Capability, []string{"/dev/vfio/10 is missing"}},
		{"no device node", []string{"iommufd"},
			func(k *fake) { k.Remove("/sys/bus/pci/devices/" + cardA + "/vfio-dev") }, cardA,
			errs.Capability, []string{"CONFIG_VFIO_DEVICE_CDEV", "type1"}},
		{"broken node", []string{"type1"},
			func(k *fake) { k.failNext("open /dev/vfio/10", unix.EIO) }, cardA, errs.Capability,
			[]string{"input/output error"}},
		{"no status", []string{"type1"}, func(k *fake) { k.failNext("GROUP_GET_STATUS", unix.EIO) },
			cardA, errs.Capability, []string{"status"}},
		{"container", []string{"type1"}, func(k *fake) { k.failNext("SET_CONTAINER", unix.EIO) },
			cardA, errs.Capability, []string{"container", "group 10"}},
		{"interrupt remapping", []string{"type1"},
			func(k *fake) { k.failNext("SET_IOMMU", unix.EPERM) }, cardA, errs.Capability,
			[]string{"interrupt remapping"}},
		{"interrupt remapping at the bind", []string{"iommufd"},
			func(k *fake) { k.failNext("BIND_IOMMUFD", unix.EPERM) }, cardA, errs.Capability,
			[]string{"interrupt remapping", "firmware"}},
		{"interrupt remapping at the attach", []string{"iommufd"},
			func(k *fake) { k.failNext("ATTACH_IOMMUFD_PT", unix.EPERM) }, cardA, errs.Capability,
			[]string{"interrupt remapping", "firmware"}},
		{"no IOMMU", backends,
			func(k *fake) { k.Put("/sys/kernel/iommu_groups/10/name", "vfio-noiommu\n") }, cardA,
			errs.Capability, []string{"without an IOMMU", "heliosctl vfio-setup status"}},
		{"IOMMU", []string{"type1"}, func(k *fake) { k.failNext("SET_IOMMU", unix.ENODEV) }, cardA,
			errs.Capability, []string{"type1v2"}},
		{"device is open", []string{"type1"}, func(k *fake) { k.cards[cardA].open = true }, cardA,
			errs.Refused, []string{"somebody else"}},
		{"device left", []string{"type1"},
			func(k *fake) { k.failNext("GET_DEVICE_FD", unix.ENODEV) }, cardA, errs.Device,
			[]string{"left"}},
		{"attach", []string{"iommufd"},
			func(k *fake) { k.failNext("ATTACH_IOMMUFD_PT", unix.EINVAL) }, cardA, errs.Capability,
			[]string{"address space"}},
		{"bind", []string{"iommufd"}, func(k *fake) { k.failNext("BIND_IOMMUFD", unix.EIO) }, cardA,
			errs.Capability, []string{"iommufd"}},
		{"addresses", backends,
			func(
				k *fake) {
				k.failNext("IOMMU_GET_INFO", unix.EIO)
				k.failNext("IOVA_RANGES", unix.EIO)
			}, cardA, errs.Capability, []string{"addresses"}},
		{"info", backends, func(k *fake) { k.failNext("GET_INFO", unix.EIO) }, cardA, errs.Device,
			[]string{cardA}},
		{"not PCI", backends, func(k *fake) { k.cards[cardA].flags = deviceFlagReset }, cardA,
			errs.Device, []string{"not a PCI device"}},
		{"events", backends, func(k *fake) { k.failNext("SET_IRQS", unix.EINVAL) }, cardA,
			errs.Device, []string{"listen"}},
	} {
		for _, b := range c.backends {
			t.Run(c.name+"/"+b, func(t *testing.T) {
				k := newFake(t)
				d := k.domain(b)
				before := openFDs(t)
				c.prepare(k)
				_, err := d.Attach(c.addr)
				wants(t, err, c.class, c.words...)
				if n := openFDs(t); n != before {
					t.Errorf("%d descriptors before, %d after", before, n)
				}
				k.Remove("/sys/kernel/iommu_groups/10/name")
				k.cards[cardA].open, k.cards[cardA].flags = false, deviceFlagPCI|deviceFlagReset
				if c.name != "shared group" && c.name != "no node" && c.name != "no device node" {
					ok(t, attach(t, d, cardA).Close()) // nothing stuck
				}
				ok(t, d.Close())
			})
		}
	}
}

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	ok(t, err)
	return len(list)
}

func TestNewErrors(t *testing.T) {
	for _, c := range []struct {
		backend string
		prepare func(k *fake)
		class   errs.Class
		words   []string
	}{
		{"vfio", func(*fake) {}, errs.Usage, []string{`"vfio"`, "type1 and iommufd"}},
		{"", func(k *fake) { k.Remove("/dev/vfio/vfio") }, errs.Capability,
			[]string{"heliosctl vfio-setup setup"}},
		{"", func(k *fake) { k.failNext("open /dev/vfio/vfio", unix.EACCES) }, errs.Capability,
			[]string{"no right"}},
		{"", func(k *fake) { k.type1 = 0 }, errs.Capability, []string{"vfio_iommu_type1"}},
		{"", func(k *fake) { k.failNext("API_VERSION", unix.EINVAL) }, errs.Capability,
			[]string{"version"}},
		{"iommufd", func(*fake) {}, errs.Capability, []string{"/dev/iommu", "type1"}},
		{"iommufd",
			func(k *fake) { k.Put("/dev/iommu", ""); k.failNext("open /dev/iommu", unix.EACCES) },
			errs.Capability, []string{"no right"}},
		{"iommufd",
			func(k *fake) { k.Put("/dev/iommu", ""); k.failNext("IOAS_ALLOC", unix.ENOTTY) },
			errs.Capability, []string{"address space"}},
		{"",
			func(
				k *fake) {
				k.type1 = 0
				k.Put("/dev/iommu", "")
				k.failNext("IOAS_ALLOC", unix.ENOTTY)
			}, errs.Capability, []string{"vfio_iommu_type1", "/dev/iommu"}},
	} {
		k := newFake(t)
		c.prepare(k)
		_, err := newDomain(k.machine(), Options{Backend: c.backend})
		wants(t, err, c.class, c.words...)
	}
	// Without type1, iommufd serves.
	k := newFake(t)
	k.type1 = 0
	k.Put("/dev/iommu", "")
	d := k.domain("")
	if d.Backend() != "iommufd" {
		t.Errorf("backend %s", d.Backend())
	}
	ok(t, d.Close())
}

func TestBusyResetIsWaitedOut(t *testing.T) {
	for b, call := range map[string]string{"type1": "GET_DEVICE_FD", "iommufd": "BIND_IOMMUFD"} {
		k := newFake(t)
		d := k.domain(b)
		k.failNext(call, unix.EAGAIN, unix.EAGAIN, unix.EAGAIN)
		dev := attach(t, d, cardA)
		if n := k.count(call); n != 4 {
			t.Errorf("%s: %d calls", b, n)
		}
		k.failNext("RESET", unix.EAGAIN)
		ok(t, dev.Reset())
		ok(t, dev.Close())
		began := time.Now()
		k.failNext(call, slices.Repeat([]error{unix.EAGAIN}, 1000)...)
		_, err := d.Attach(cardA)
		wants(t, err, errs.Device, cardA, "could not reset")
		if spent := time.Since(began); spent > 5*time.Second {
			t.Errorf("%s: it took %s", b, spent)
		}
		ok(t, d.Close())
	}
}

// Mappings are the domain's: they come back with the next device when all had left, and stay while
// one is there.
func TestMappingsOutliveDevices(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		mem := pages(t, 16)
		a, b := attach(t, d, cardA), attach(t, d, cardB)
		if _, err := d.Attach(cardA); err == nil || !strings.Contains(err.Error(), "already") {
			t.Errorf("attached twice: %v", err)
		}
		i, j := mapped(t, d, mem[:8*4096]), mapped(t, d, mem[8*4096:])
		if err := d.Close(); err == nil || !strings.Contains(err.Error(), cardA) ||
			!strings.Contains(err.Error(), cardB) {
			t.Errorf("a domain closed under its devices: %v", err)
		}
		ok(t, a.Close())
		if len(k.maps()) != 2 {
			t.Errorf("%d mappings while a device is there", len(k.maps()))
		}
		ok(t, b.Close())
		ok(t, d.Unmap(j, 8*4096)) // also while no device is there
		if _, err := d.Map(mem[:4096]); err != nil {
			t.Errorf("a part of what is mapped: %v", err)
		}
		c := attach(t, d, cardC)
		m := k.maps()
		if len(m) != 1 || m[uint64(i)].Vaddr != va(mem) || m[uint64(i)].Size != 8*4096 {
			t.Errorf("the kernel has %+v", m)
		}
		if l := mapped(t, d, mem[8*4096:]); l != j {
			t.Errorf("mapped at %#x", l)
		}
		ok(t, c.Close())
		if d.Backend() == "type1" {
			k.failNext("MAP_DMA", unix.ENOMEM)
			_, err := d.Attach(cardC)
			wants(t, err, errs.Capability, "pin", cardC)
		}
		// An IOMMU that offers less.
		k.ranges = []Range{{1 << 30, 1<<31 - 1}}
		if d.Backend() == "type1" {
			if _, err := d.Attach(cardA); err == nil {
				t.Error("mappings outside the new device's addresses")
			}
		}
		k.ranges = []Range{{0, 1<<31 - 1}}
		ok(t, attach(t, d, cardA).Close())
		ok(t, d.Close())
		if k.used != 0 {
			t.Errorf("%d bytes stay pinned", k.used)
		}
	})
}

// TestLastDevicesLeaveTogether: each of them is not the last when its close begins.
func TestLastDevicesLeaveTogether(t *testing.T) {
	k := newFake(t)
	d := k.domain("type1")
	mem := pages(t, 1)
	a, b := attach(t, d, cardA), attach(t, d, cardB)
	i := mapped(t, d, mem)
	hold := make(chan struct{})
	k.cards[cardA].closing, k.cards[cardB].closing = hold, hold
	var both sync.WaitGroup
	for _, dev := range []*Device{a, b} {
		both.Go(func() { _ = dev.Close() }) // each gives up waiting
	}
	both.Wait()
	close(hold)
	await(t, a.GivenBack())
	await(t, b.GivenBack())
	if len(k.maps()) != 0 {
		t.Fatal("the kernel has kept the mapping")
	}
	if _, err := d.Map(pages(t, 1)); err == nil || !strings.Contains(err.Error(),
		"no device is attached") {
		t.Errorf("Map without a device: %v", err)
	}
	ok(t, d.Unmap(i, 4096))
	if n, _ := d.Mapped(); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
	ok(t, d.Close())
}

func TestOneGroupTwoDevices(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		k.add("0000:00:04.1", 10, "vfio-pci")
		a, b := attach(t, d, cardA), attach(t, d, "0000:00:04.1")
		i := mapped(t, d, pages(t, 1))
		ok(t, a.Close())
		if len(k.maps()) != 1 {
			t.Error("the group went with its first device")
		}
		ok(t, d.Unmap(i, 4096))
		ok(t, b.Close())
		ok(t, d.Close())
	})
	k := newFake(t)
	d := k.domain("type1")
	dev := attach(t, d, cardA)
	k.failNext("SET_CONTAINER", unix.EINVAL)
	_, err := d.Attach(cardB)
	wants(t, err, errs.Capability, "address space of the other SSDs")
	ok(t, dev.Close())
	ok(t, d.Close())
}

func TestEvents(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		before, routines := openFDs(t), runtime.NumGoroutine()
		k.cards[cardB].noERR = true
		a, b := attach(t, d, cardA), attach(t, d, cardB)
		if a.Domain() != d || a.Addr() != cardA {
			t.Error("whose device is it?")
		}
		quiet := func(c <-chan struct{}) {
			t.Helper()
			select {
			case <-c:
				t.Error("a message that nobody sent")
			case <-time.After(20 * time.Millisecond):
			}
		}
		quiet(a.Asked())
		k.signal(cardA, irqIndexREQ)
		await(t, a.Asked())
		k.signal(cardA, irqIndexREQ) // the kernel repeats itself
		quiet(a.Failed())
		k.signal(cardA, irqIndexERR)
		await(t, a.Failed())
		quiet(b.Asked())
		k.signal(cardB, irqIndexREQ)
		await(t, b.Asked())
		if _, listens := k.cards[cardB].irqs[irqIndexERR]; listens {
			t.Error("a message that the device does not have")
		}
		ok(t, a.Close())
		await(t, a.GivenBack())
		ok(t, b.Close())
		ok(t, d.Close())
		if n := openFDs(t); n != before {
			t.Errorf("%d descriptors before, %d after", before, n)
		}
		for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > routines; time.Sleep(
			time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d goroutines before, %d after", routines, runtime.NumGoroutine())
			}
		}
	})
}

func await(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatal("no message")
	}
}

// A device that left the bus is closed in the background, one that hangs after a bounded wait.
func TestDeadDevices(t *testing.T) {
	for _, dead := range []bool{true, false} {
		each(t, func(t *testing.T, k *fake, d *Domain) {
			d.m.closeFor = 200 * time.Millisecond
			dev, other := attach(t, d, cardA), attach(t, d, cardB)
			i := mapped(t, d, pages(t, 1))
			k.mu.Lock()
			k.cards[cardA].dead = dead
			k.cards[cardA].closing = make(chan struct{})
			k.mu.Unlock()
			if dev.Gone() != dead || other.Gone() {
				t.Error("who is gone?")
			}
			if dead {
				wants(t, dev.EnableDMA(), errs.Device, "left its bus")
				if !errors.Is(dev.DisableDMA(), ErrGone) || !errors.Is(dev.Reset(), ErrGone) {
					t.Error("not ErrGone")
				}
				if k.count("RESET") != 0 {
					t.Error("the kernel was asked to reset what is gone")
				}
			}
			began := time.Now()
			err := dev.Close()
			if dead {
				ok(t, err)
			} else {
				wants(t, err, errs.Device, cardA, "in the background")
			}
			if spent := time.Since(began); spent > 5*time.Second {
				t.Errorf("it took %s", spent)
			}
			ok(t, dev.Close())
			if dev.Gone() || dev.EnableDMA() == nil || dev.Reset() == nil {
				t.Error("a closed device answers")
			}
			_, err = d.Attach(cardA)
			wants(t, err, errs.Refused, "still taking it back")
			ok(t, d.Unmap(i, 4096))
			select {
			case <-dev.GivenBack():
				t.Error("given back too early")
			default:
			}
			ok(t, other.Close())
			ok(t, d.Close()) // not held up
			close(k.cards[cardA].closing)
			await(t, dev.GivenBack())
		})
	}
}

// A reset in which the kernel waits for a device that has just died.
func TestResetThatHangs(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		d.m.closeFor = 200 * time.Millisecond
		dev := attach(t, d, cardA)
		wait := make(chan struct{})
		k.mu.Lock()
		k.cards[cardA].resetting = wait
		k.mu.Unlock()
		began := time.Now()
		wants(t, dev.Reset(), errs.Device, cardA, "reset", "not done")
		if dev.Gone() {
			t.Error("gone")
		}
		wants(t, dev.Close(), errs.Device, "in the background")
		if dev.Gone() || dev.Reset() == nil {
			t.Error("a closed device answers")
		}
		if spent := time.Since(began); spent > 5*time.Second {
			t.Errorf("it took %s", spent)
		}
		close(wait)
		await(t, dev.GivenBack())
		ok(t, d.Close())
	})
}

func TestRegions(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		for i := range 40 { // more than the first question has room for
			k.cards[cardB].sparse = append(k.cards[cardB].sparse, Span{int64(i) * 8192, 4096})
		}
		k.cards[cardB].sparse[0].Size, k.cards[cardB].sparse[1].Offset = 8192, 12288
		a, b := attach(t, d, cardA), attach(t, d, cardB)
		r, err := a.Region(RegionBAR0)
		ok(t, err)
		if r.Size != 16384 || !r.Read || !r.Write || !slices.Equal(r.Mappable, []Span{{0, 16384}}) {
			t.Errorf("BAR 0 %+v", r)
		}
		if r, err := a.Region(RegionConfig); err != nil || r.Size != 256 || r.Mappable != nil {
			t.Errorf("configuration space %+v %v", r, err)
		}
		if r, err := a.Region(2); err != nil || r.Size != 0 {
			t.Errorf("a BAR that is not there: %+v %v", r, err)
		}
		if _, err := a.Region(9); err == nil {
			t.Error("region 9")
		}
		// Spans outside the BAR are left out; 0–8191 and 12288–16383 remain.
		r, err = b.Region(RegionBAR0)
		if ok(t, err); !slices.Equal(r.Mappable, []Span{{0, 8192}, {12288, 4096}}) {
			t.Errorf("sparse BAR 0 %+v", r)
		}
		for _, c := range []struct {
			off, size int64
			ok        bool
		}{{0, 8192, true}, {4096, 4096, true}, {12288, 4096, true}, {4096, 8192, false},
			{8192, 4096, false}, {0, 0, false}, {1, 4096, false}, {0, 100, false},
			{-4096, 8192, false}, {12288, 8192, false}} {
			m, err := b.MapRegion(RegionBAR0, c.off, c.size)
			if (err == nil) != c.ok {
				t.Errorf("map %d bytes at %d: %v", c.size, c.off, err)
			}
			if err == nil {
				if int64(len(m)) != c.size {
					t.Errorf("%d bytes", len(m))
				}
				ok(t, b.UnmapRegion(m))
				if b.UnmapRegion(m) == nil {
					t.Error("unmapped twice")
				}
			}
		}
		k.failNext("mmap", unix.EPERM)
		_, err = a.MapRegion(RegionBAR0, 0, 4096)
		wants(t, err, errs.Device, cardA)
		if _, err := a.MapRegion(RegionBAR0, 0, 4096); err != nil { // left for Close
			t.Error(err)
		}
		var w [4]byte
		ok(t, a.WriteAt(RegionBAR0, []byte{1, 2, 3, 4}, 0x14))
		if ok(t, a.ReadAt(RegionBAR0, w[:], 0x14)); w != [4]byte{1, 2, 3, 4} {
			t.Errorf("read %x", w)
		}
		for _, off := range []int64{-1, 16381, 1 << 62} {
			if a.ReadAt(RegionBAR0, w[:], off) == nil {
				t.Errorf("read at %d", off)
			}
		}
		k.failNext("pread", unix.EIO)
		wants(t, a.ReadAt(RegionBAR0, w[:], 0), errs.Device, cardA, "region 0")
		ok(t, a.Close())
		ok(t, b.Close())
		if a.ReadAt(RegionBAR0, w[:], 0) == nil {
			t.Error("a closed device answers")
		}
		ok(t, d.Close())
	})
}

func TestDMASwitch(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		dev := attach(t, d, cardA)
		c := k.cards[cardA]
		k.mu.Lock()
		c.config[0x64] = 3 // D3hot
		k.setCommand(c, 0x0100)
		k.mu.Unlock()
		ok(t, dev.EnableDMA())
		if got := k.command(cardA); got != 0x0506 || c.config[0x64] != 0 {
			t.Errorf("command %#x, power %d", got, c.config[0x64])
		}
		ok(t, dev.EnableMemory())
		if got := k.command(cardA); got != 0x0502 {
			t.Errorf("command %#x: memory space alone", got)
		}
		ok(t, dev.EnableDMA())
		ok(t, dev.DisableDMA())
		if got := k.command(cardA); got != 0x0502 {
			t.Errorf("command %#x", got)
		}
		ok(t, dev.Reset())
		if c.resets != 1 {
			t.Errorf("%d resets", c.resets)
		}
		k.failNext("RESET", unix.EIO)
		wants(t, dev.Reset(), errs.Device, cardA, "reset")
		// A list of capabilities that runs in a circle, and one that leaves the configuration
		// space.
		c.config[0x41] = 0x40
		ok(t, dev.EnableDMA())
		c.config[0x41] = 0xff
		ok(t, dev.EnableDMA())
		ok(t, dev.Close())
		c.flags = deviceFlagPCI
		dev = attach(t, d, cardA)
		wants(t, dev.Reset(), errs.Capability, "reset")
		ok(t, dev.Close())
		ok(t, d.Close())
	})
}

func TestManyAtOnce(t *testing.T) {
	each(t, func(t *testing.T, k *fake, d *Domain) {
		first := attach(t, d, cardA)
		mem := pages(t, 256)
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Go(func() {
				for i := range 100 {
					m := mem[(w*64+i%32)*4096:][: (1+i%8)*4096 : (1+i%8)*4096]
					iova, err := d.Map(m)
					if err != nil {
						t.Error(err)
						return
					}
					if err := d.Unmap(iova, int64(len(m))); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for _, addr := range []string{cardB, cardC} {
			wg.Go(func() {
				for range 20 {
					dev, err := d.Attach(addr)
					if err != nil {
						t.Error(err)
						return
					}
					go dev.Gone()
					if err := errors.Join(dev.EnableDMA(), dev.Close()); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if n := len(k.maps()); n != 0 {
			t.Errorf("%d mappings are left", n)
		}
		ok(t, first.Close())
		ok(t, d.Close())
	})
}

func TestCapabilityChains(t *testing.T) {
	b := make([]byte, 64)
	chain(b, 16, 1, [][2]uint64{{1, 2}})
	if body, found := capability(b, 16, 1); !found || fmt.Sprint(pairs(body)) != "[[1 2]]" {
		t.Errorf("%v %x", found, body)
	}
	if _, found := capability(b, 16, 5); found {
		t.Error("found what is not there")
	}
	b[20] = 16 // a circle
	if _, found := capability(b, 16, 1); found {
		t.Error("found in a circle")
	}
	if _, found := capability(b, 60, 0); found {
		t.Error("found beyond the end")
	}
	if p := pairs([]byte{255, 255, 255, 255, 0, 0, 0, 0, 1, 2}); len(p) != 0 {
		t.Errorf("pairs of a short body: %v", p)
	}
	if pairs(nil) != nil {
		t.Error("pairs of nothing")
	}
}

func TestHeldByNobody(t *testing.T) {
	k := newFake(t)
	if s := k.machine().heldBy("/dev/vfio/10"); s != "" {
		t.Errorf("%q", s)
	}
}
