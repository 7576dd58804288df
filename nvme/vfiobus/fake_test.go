package vfiobus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/proxy"
)

// fake is a PCI function whose registers are those of a software controller, and its IOMMU.
// Doorbells can be mapped, the first page of BAR 0 cannot.
type fake struct {
	t     *testing.T
	inner *proxy.Bus
	cfg   [256]byte
	bells []byte

	mu       sync.Mutex
	enabled  bool // memory space
	master   bool // bus master
	early    bool // bus master was set while CC.EN was 1
	stuck    bool // CC.EN does not go to 0 by a write
	fatal    bool // CSTS.CFS stays up until a function reset
	quick    bool // CAP.TO is 0
	noReady  bool // enabling has no effect until a function reset
	away     bool // all registers read as zeros or ones
	ones     bool
	left     bool // configuration space reads as all ones
	dmaErr   error
	resetErr error
	resets   int
	shutdown bool // CC.SHN was written
	closed   bool
	mapped   map[*byte]int // regions
	maps     map[vfio.IOVA]int64
	events   []string // order of what ends the device
	asked    chan struct{}
	failed   chan struct{}

	cmb      []byte // behind BAR 2
	legacy   bool   // no CMBMSC
	cmbmsc   uint64
	cba      vfio.IOVA // where the proxy finds cmb, and BAR 2 is
	extended []span
	peers    []peer
	reserved []span
}

const fakeCMB = 64 << 10

func newFake(t *testing.T) *fake {
	path := filepath.Join(testrig.MemoryDir(t), "ssd.img")
	require.NoError(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
	inner, err := proxy.Open(proxy.Config{Path: path, RAM: true, PollDoorbells: true,
		Serial: "FAKE1", MaxQueueEntries: 256})
	require.NoError(t, err)
	f := &fake{t: t, inner: inner, mapped: map[*byte]int{}, maps: map[vfio.IOVA]int64{},
		asked: make(chan struct{}), failed: make(chan struct{})}
	bells, _, err := inner.DoorbellMemory()
	require.NoError(t, err)
	f.bells = unsafe.Slice(&bells[0], (len(bells)+4095)&^4095)
	f.cmb, err = hostmem.Alloc(fakeCMB, "fake CMB")
	require.NoError(t, err)
	iova, err := inner.MapDMA(f.cmb)
	require.NoError(t, err)
	f.cba = vfio.IOVA(iova)
	f.cfg[6] = 1 << 4 // capability list
	f.cfg[0x34] = 0x40
	f.cfg[0x40], f.cfg[0x41] = 0x01, 0x50 // power management
	f.cfg[0x50], f.cfg[0x51] = 0x11, 0    // MSI-X
	binary.LittleEndian.PutUint32(f.cfg[0x54:], uint32(0x1000+len(f.bells)))
	binary.LittleEndian.PutUint32(f.cfg[0x58:], uint32(0x1000+len(f.bells)+0x1000))
	binary.LittleEndian.PutUint64(f.cfg[0x18:], uint64(f.cba)|4) // BAR 2, 64 bits
	t.Cleanup(func() {
		require.NoError(t, inner.UnmapDMA(iova, fakeCMB))
		require.NoError(t, inner.Close())
		require.NoError(t, hostmem.Free(f.cmb))
	})
	return f
}

// with changes the fake under its lock.
func (f *fake) with(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

func (f *fake) Addr() string { return "0000:00:09.0" }

func (f *fake) Region(i int) (vfio.Region, error) {
	if i != 0 {
		return vfio.Region{}, fmt.Errorf("fake: no region %d", i)
	}
	n := int64(0x3000 + len(f.bells))
	return vfio.Region{Size: n, Read: true, Write: true,
		Mappable: []vfio.Span{{Offset: 0x1000, Size: int64(len(f.bells))}}}, nil
}

func (f *fake) MapRegion(i int, off, n int64) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.bells
	off -= 0x1000
	f.mapped[&b[off]]++
	return b[off : off+n : off+n], nil
}

func (f *fake) UnmapRegion(b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mapped[&b[0]]--; f.mapped[&b[0]] < 0 {
		return errors.New("fake: unmapped what was not mapped")
	}
	return nil
}

func (f *fake) register(off uint32) uint32 {
	v, err := f.inner.Read32(off)
	require.NoError(f.t, err)
	switch off {
	case nvme.RegCAP:
		if f.quick {
			v &^= 0xff << 24
		}
	case nvme.RegCAP + 4:
		if !f.legacy {
			v |= 1 << 25
		}
	case nvme.RegCSTS:
		if f.fatal {
			v |= 2
		}
	case nvme.RegCMBLOC:
		if f.legacy || f.cmbmsc&1 != 0 {
			return 2 // BIR
		}
	case nvme.RegCMBSZ:
		if f.legacy || f.cmbmsc&1 != 0 {
			return fakeCMB / 4096 << 12
		}
	}
	return v
}

func (f *fake) ReadAt(i int, b []byte, off int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i == vfio.RegionConfig {
		copy(b, f.cfg[off:])
		return nil
	}
	v := uint32(0)
	switch {
	case f.away && f.ones, !f.enabled:
		v = 1<<32 - 1
	case f.away:
	default:
		v = f.register(uint32(off))
	}
	binary.LittleEndian.PutUint32(b, v)
	return nil
}

func (f *fake) WriteAt(i int, b []byte, off int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i == vfio.RegionConfig || f.away || !f.enabled {
		return nil
	}
	v := binary.LittleEndian.Uint32(b)
	switch off {
	case nvme.RegCMBMSC:
		f.cmbmsc = f.cmbmsc>>32<<32 | uint64(v)
		return nil
	case nvme.RegCMBMSC + 4:
		f.cmbmsc = f.cmbmsc&(1<<32-1) | uint64(v)<<32
		return nil
	case nvme.RegCC:
		f.shutdown = f.shutdown || nvme.CC(v).SHN() != 0
		if nvme.CC(v).EN() && f.noReady || !nvme.CC(v).EN() && f.stuck {
			return nil
		}
	}
	return f.inner.Write32(uint32(off), v)
}

func (f *fake) EnableMemory() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.enabled, f.master = !f.away, false
	return nil
}

func (f *fake) EnableDMA() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.enabled = !f.away
	if !f.master && f.enabled {
		f.early = f.early || nvme.CC(f.register(nvme.RegCC)).EN() ||
			nvme.CSTS(f.register(nvme.RegCSTS)).RDY()
	}
	f.master = f.enabled
	return nil
}

func (f *fake) DisableDMA() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, "disable DMA")
	return f.dmaErr
}

func (f *fake) Reset() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resets++
	if f.resetErr != nil {
		return f.resetErr
	}
	f.enabled, f.master, f.stuck, f.fatal, f.noReady, f.cmbmsc = false, false, false, false,
		false, 0
	return f.inner.Write32(nvme.RegCC, 0)
}

func (f *fake) Gone() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left
}

func (f *fake) Asked() <-chan struct{}  { return f.asked }
func (f *fake) Failed() <-chan struct{} { return f.failed }

func (f *fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return errors.New("fake: closed twice")
	}
	f.closed = true
	f.events = append(f.events, "close")
	// The kernel resets it.
	return f.inner.Write32(nvme.RegCC, 0)
}

// The IOMMU.

func (f *fake) Map(mem []byte) (vfio.IOVA, error) {
	iova, err := f.inner.MapDMA(mem)
	if err == nil {
		f.with(func() { f.maps[vfio.IOVA(iova)] = int64(len(mem)) })
	}
	return vfio.IOVA(iova), err
}

// Window maps at once; extended notes what was asked for.
func (f *fake) Window(mem []byte) (vfio.IOVA, error) { return f.Map(mem) }

// peers returns what was mapped as other devices' memory.
func (f *fake) MapPeer(mem []byte, fd int, off int64) (vfio.IOVA, error) {
	f.with(func() { f.peers = append(f.peers, peer{len(mem), fd, off}) })
	return f.Map(mem)
}

func (f *fake) WindowPeer(mem []byte) (vfio.IOVA, error) { return f.MapPeer(mem, -2, 0) }

type peer struct {
	bytes, fd int
	offset    int64
}

func (f *fake) Extend(iova vfio.IOVA, n int64) error {
	f.with(func() { f.extended = append(f.extended, span{int64(iova), n}) })
	return nil
}

func (f *fake) Unmap(iova vfio.IOVA, n int64) error {
	err := f.inner.UnmapDMA(nvme.IOVA(iova), n)
	f.with(func() {
		delete(f.maps, iova)
		if len(f.events) > 0 && f.events[len(f.events)-1] != "unmap" {
			f.events = append(f.events, "unmap")
		}
	})
	return err
}

func (f *fake) ReserveAt(iova vfio.IOVA, n int64) error {
	f.with(func() { f.reserved = append(f.reserved, span{int64(iova), n}) })
	return nil
}

func (f *fake) Unreserve(iova vfio.IOVA, n int64) error {
	f.with(func() {
		f.reserved = slices.DeleteFunc(f.reserved,
			func(s span) bool { return s == span{int64(iova), n} })
	})
	return nil
}

func (f *fake) Ranges() []vfio.Range { return []vfio.Range{{Start: 0, End: 1<<39 - 1}} }

// check looks at the end of a test that the bus gave everything back.
func (f *fake) check() {
	f.mu.Lock()
	defer f.mu.Unlock()
	require.True(f.t, f.closed, "device not closed")
	require.False(f.t, f.early, "it could reach memory while somebody else's queues were enabled")
	require.Empty(f.t, f.maps, "mappings left")
	require.Empty(f.t, f.reserved, "addresses left reserved")
	for _, n := range f.mapped {
		require.Zero(f.t, n, "regions left mapped")
	}
}

// flat is a device whose BAR 0 is plain memory, a file's that can be cut short.
type flat struct {
	*fake
	mem   []byte
	path  string
	spans []vfio.Span
}

func newFlat(t *testing.T, bytes int) *flat {
	f := &flat{fake: newFake(t), path: filepath.Join(t.TempDir(), "bar0")}
	require.NoError(t, os.WriteFile(f.path, make([]byte, bytes), 0o600))
	file, err := os.OpenFile(f.path, os.O_RDWR, 0)
	require.NoError(t, err)
	f.mem, err = unix.Mmap(int(file.Fd()), 0, bytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	t.Cleanup(func() { require.NoError(t, unix.Munmap(f.mem)) })
	f.spans = []vfio.Span{{Offset: 0, Size: int64(bytes)}}
	f.put(nvme.RegCAP, uint64(nvme.MakeCAP(64, 4, 0, 0, 0)))
	f.cfg[6] = 0
	return f
}

func (f *flat) put(off uint32, v uint64) { binary.LittleEndian.PutUint64(f.mem[off:], v) }

func (f *flat) Region(i int) (vfio.Region, error) {
	return vfio.Region{Size: int64(len(f.mem)), Read: true, Write: true, Mappable: f.spans}, nil
}

func (f *flat) MapRegion(_ int, off, n int64) ([]byte, error) {
	f.with(func() { f.mapped[&f.mem[off]]++ })
	return f.mem[off : off+n : off+n], nil
}

func (f *flat) ReadAt(i int, b []byte, off int64) error {
	if i == vfio.RegionConfig {
		return f.fake.ReadAt(i, b, off)
	}
	copy(b, f.mem[off:])
	return nil
}

func (f *flat) WriteAt(_ int, b []byte, off int64) error {
	copy(f.mem[off:], b)
	return nil
}

var (
	_ device = (*fake)(nil)
	_ domain = (*fake)(nil)
	_ device = (*flat)(nil)
)
