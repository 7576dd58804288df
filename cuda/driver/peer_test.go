//go:build linux && (amd64 || arm64) && !nocuda && !gorgonia

package driver

import (
	"bytes"
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/gdr"
	"helios/internal/testing/fakecuda"
)

// exchange shows that a mapping and the GPU see one memory: what either stores the other loads.
func exchange(t *testing.T, d *Device, b cuda.Buffer, m cuda.PeerMapping) {
	t.Helper()
	s := streamOf(t, d, cuda.StreamOptions{Name: "peer"})
	pinned, err := d.Alloc(cuda.MemPinned, b.Size(), "pattern")
	require.NoError(t, err)
	mem := m.Bytes()
	require.Len(t, mem, int(b.Size()))
	for i := range mem {
		mem[i] = byte(i*7 + i>>8)
	}
	require.NoError(t, s.Copy(pinned.Ptr(), b.Ptr(), b.Size()))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.True(t, bytes.Equal(mem, pinned.Bytes()), "stores of the CPU's side reach the GPU")
	require.NoError(t, s.Fill(b.Ptr(), 0x5a, b.Size()))
	require.NoError(t, s.Synchronize(soon(t, patience)))
	require.Equal(t, bytes.Repeat([]byte{0x5a}, len(mem)), mem, "stores of the GPU are seen")
	require.NoError(t, errors.Join(pinned.Free(), s.Close()))
}

func TestPeerByDMABuf(t *testing.T) {
	d, _ := device(t, "", Options{})
	require.NoError(t, d.PeerMethods()[0].Err)
	b, err := d.Alloc(cuda.MemDevice, 3<<20+5000, "queues")
	require.NoError(t, err)
	m, err := d.MapPeer(b, "dma-buf")
	require.NoError(t, err)
	exchange(t, d, b, m)
	fd, off := m.DMABuf()
	require.Zero(t, off)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.ErrorContains(t, b.Free(), "queues is mapped for the DMA of other devices")
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.Nil(t, m.Bytes())
	_, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.Error(t, err, "the dma-buf is closed")
	require.NoError(t, b.Free())
	_, err = d.MapPeer(b, "dma-buf")
	require.ErrorContains(t, err, "not a live buffer")
	require.NoError(t, d.Close())
}

// A device that is closed under a mapping keeps the memory: an SSD may be writing to it.
func TestPeerOutlivesClose(t *testing.T) {
	lib := fake(t, "")
	d, err := Open(Options{Library: lib})
	require.NoError(t, err)
	b, err := d.Alloc(cuda.MemDevice, 8192, "queues")
	require.NoError(t, err)
	m, err := d.MapPeer(b, "dma-buf")
	require.NoError(t, err)
	err = d.Close()
	require.ErrorContains(t, err, `peer mapping of "queues" (8192 bytes)`)
	m.Bytes()[8191] = 3
	require.Contains(t, fakecuda.Control(t, lib, "live"), "device=1 ")
	require.NoError(t, m.Close())
}

// fakePeers is the kernel for mappings: mmap that can fail, and gdrdrv. The module's file is played
// by exports of the same memory.
type fakePeers struct {
	linuxPeer
	t       *testing.T
	d       *Device
	b       *buffer // whose pages the module may map
	refuse  []error // of the next mmaps; nil: it works
	hole    bool    // mmap leaves its last page out
	openErr error
	pinErr  error
	unpin   error // of Unpin; nil: it works
	pins    map[uint64]gdr.Pin
	next    uint64
	closed  bool
}

const moduleFD = 1 << 30

func (f *fakePeers) put(addr unsafe.Pointer, n int64, fd int, off int64) error {
	if len(f.refuse) > 0 {
		err := f.refuse[0]
		if f.refuse = f.refuse[1:]; err != nil {
			return err
		}
	}
	if fd == moduleFD {
		p, ok := f.pins[uint64(off)>>12]
		require.True(f.t, ok && n <= p.Bytes, "mmap of %d bytes at %#x, which are not pinned", n,
			off)
		// The bytes before the buffer in the GPU's page are somebody's memory too.
		if _, err := unix.MmapPtr(-1, 0, addr, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
			return err
		}
		lead := max(int64(f.b.ptr)-int64(p.Addr), 0)
		fd, err := f.d.export(devicePtr(p.Addr)+devicePtr(lead), n-lead, 0)
		require.NoError(f.t, err)
		defer f.linuxPeer.close(fd)
		return f.linuxPeer.put(unsafe.Add(addr, lead), n-lead, fd, 0)
	}
	if f.hole {
		n -= pageBytes
	}
	return f.linuxPeer.put(addr, n, fd, off)
}

func (f *fakePeers) openGDR() (gdrModule, error) {
	if f.openErr != nil {
		return nil, f.openErr
	}
	return fakeModule{f}, nil
}

type fakeModule struct{ f *fakePeers }

func (m fakeModule) FD() int { return moduleFD }

func (m fakeModule) Pin(addr uint64, n int64) (gdr.Pin, error) {
	if m.f.pinErr != nil {
		return gdr.Pin{}, m.f.pinErr
	}
	require.Zero(m.f.t, addr%gdr.PageBytes)
	p := gdr.Pin{Handle: m.f.next, Addr: addr,
		Bytes: (n + gdr.PageBytes - 1) &^ (gdr.PageBytes - 1)}
	m.f.next += uint64(p.Bytes) >> 12
	m.f.pins[p.Handle] = p
	return p, nil
}

func (m fakeModule) Unpin(p gdr.Pin) error {
	require.Contains(m.f.t, m.f.pins, p.Handle)
	if m.f.unpin != nil {
		return m.f.unpin
	}
	delete(m.f.pins, p.Handle)
	return nil
}

func (m fakeModule) Close() error {
	m.f.closed = true
	return nil
}

// peers gives a device a fake kernel.
func peers(t *testing.T, knobs string) (*Device, *fakePeers) {
	d, _ := device(t, knobs, Options{})
	f := &fakePeers{t: t, d: d, pins: map[uint64]gdr.Pin{}}
	d.peers.os = f
	return d, f
}

// attributes answers for some attributes of a device.
type attributes struct {
	api
	of map[attribute]int
}

func (a attributes) DeviceGetAttribute(attr attribute, d ordinal) (int, result) {
	if v, ok := a.of[attr]; ok {
		if v < 0 {
			return 0, errInvalidValue
		}
		return v, success
	}
	return a.api.DeviceGetAttribute(attr, d)
}

func TestPeerByGDR(t *testing.T) {
	d, f := peers(t, "")
	b, err := d.Alloc(cuda.MemDevice, 1<<20+5000, "queues")
	require.NoError(t, err)
	f.b = b.(*buffer)
	m, err := d.MapPeer(b, "gdrdrv")
	require.NoError(t, err)
	fd, _ := m.DMABuf()
	require.Equal(t, -1, fd)
	exchange(t, d, b, m)
	require.Len(t, f.pins, 1)
	require.NoError(t, m.Close())
	require.Empty(t, f.pins)

	f.pinErr = unix.ENOMEM
	_, err = d.MapPeer(b, "gdrdrv")
	refused(t, err, "queues", "BAR 1")
	f.pinErr, f.refuse = nil, []error{unix.EAGAIN}
	_, err = d.MapPeer(b, "gdrdrv")
	refused(t, err, "mmap of gdrdrv")
	require.Empty(t, f.pins)
	require.Empty(t, d.peers.live)
	require.NoError(t, b.Free())
	require.NoError(t, d.Close())
	require.True(t, f.closed)
}

// freeing wants no memory freed that gdrdrv has pinned: where the module pins persistently, it
// would stay taken.
type freeing struct {
	api
	f *fakePeers
}

func (a freeing) unpinned(call string, p devicePtr) {
	for _, q := range a.f.pins {
		addr := uint64(p)
		require.False(a.f.t, addr+gdr.PageBytes > q.Addr && addr < q.Addr+uint64(q.Bytes),
			"%s of memory at %#x, which is pinned", call, addr)
	}
}

func (a freeing) MemFree(p devicePtr) result {
	a.unpinned("cuMemFree", p)
	return a.api.MemFree(p)
}

func (a freeing) MemUnmap(p devicePtr, n int64) result {
	a.unpinned("cuMemUnmap", p)
	return a.api.MemUnmap(p, n)
}

// Memory that is pinned is not freed before it is unpinned, whatever the module answers.
func TestPeerUnpinsBeforeFree(t *testing.T) {
	d, f := peers(t, "")
	d.api = freeing{d.api, f}
	b, err := d.Alloc(cuda.MemDevice, 1<<20, "queues")
	require.NoError(t, err)
	f.b = b.(*buffer)
	m, err := d.MapPeer(b, "gdrdrv")
	require.NoError(t, err)
	require.ErrorContains(t, b.Free(), "queues is mapped for the DMA of other devices (gdrdrv)")
	f.unpin = unix.EBUSY
	err = m.Close()
	require.ErrorIs(t, err, unix.EBUSY)
	require.ErrorContains(t, err, "the memory stays pinned and is not freed")
	require.ErrorContains(t, b.Free(), "queues is mapped")
	require.Len(t, f.pins, 1)
	f.unpin = nil
	require.NoError(t, m.Close())
	require.Empty(t, f.pins)
	require.NoError(t, b.Free())

	// The same of memory that has grown: what is still pinned grows no more.
	r, err := d.Reserve(8<<20, "rows")
	require.NoError(t, err)
	f.b = r.(*buffer)
	require.NoError(t, r.Grow(2<<20))
	pm, err := d.MapPeer(r, "gdrdrv")
	require.NoError(t, err)
	g := pm.(cuda.PeerGrower)
	require.NoError(t, r.Grow(8<<20))
	require.NoError(t, g.Extend())
	f.unpin = unix.EBUSY
	require.ErrorIs(t, g.Close(), unix.EBUSY)
	require.ErrorContains(t, r.Free(), "mapped for the DMA of other devices")
	require.ErrorContains(t, g.Extend(), "has not unpinned a part of it")
	f.unpin = nil
	require.NoError(t, errors.Join(g.Close(), r.Free(), d.Close()))
	require.Empty(t, f.pins)
}

// Memory that grows is mapped piece by piece, at the same addresses all the time, and does not go
// while it is mapped.
func TestPeerGrows(t *testing.T) {
	const mib = 1 << 20
	for _, method := range []string{"dma-buf", "gdrdrv"} {
		t.Run(method, func(t *testing.T) {
			d, f := peers(t, "")
			b, err := d.Reserve(20*mib+4096, "rows")
			require.NoError(t, err)
			f.b = b.(*buffer)
			pm, err := d.MapPeer(b, method)
			require.NoError(t, err)
			m := pm.(cuda.PeerGrower)
			mem := m.Bytes()
			require.Len(t, mem, 20*mib+4096)
			s := streamOf(t, d, cuda.StreamOptions{Name: "rows"})
			// step compares the first bytes with what the GPU stores there.
			value := byte(0)
			step := func(n int64) {
				t.Helper()
				value++
				require.NoError(t, s.Fill(b.Ptr(), value, n))
				require.NoError(t, s.Synchronize(soon(t, patience)))
				for i := int64(0); i < n; i += 4096 {
					require.Equal(t, value, mem[i])
				}
				require.Equal(t, value, mem[n-1])
			}
			require.NoError(t, b.Grow(3*mib))
			require.NoError(t, m.Extend())
			step(3 * mib)
			require.NoError(t, b.Grow(8*mib))
			require.NoError(t, m.Extend())
			step(8 * mib)
			require.NoError(t, b.Grow(20*mib+4096))
			require.NoError(t, m.Extend())
			require.NoError(t, m.Extend())
			step(20*mib + 4096)
			require.Same(t, &mem[0], &m.Bytes()[0])
			require.ErrorContains(t, b.Free(), "is mapped")
			require.NoError(t, m.Close())
			require.Error(t, m.Extend())
			require.Empty(t, f.pins)
			require.NoError(t, errors.Join(b.Free(), s.Close(), d.Close()))
		})
	}
}

// Of a step that fails nothing is left, and what was mapped before stays.
func TestPeerStepFails(t *testing.T) {
	d, f := peers(t, "")
	b, err := d.Reserve(8<<20, "rows")
	require.NoError(t, err)
	require.NoError(t, b.Grow(2<<20))
	pm, err := d.MapPeer(b, "dma-buf")
	require.NoError(t, err)
	m := pm.(*peerMapping)
	require.NoError(t, b.Grow(8<<20))
	had := len(m.pieces)
	f.refuse = []error{unix.ENOMEM, unix.ENOMEM}
	refused(t, m.Extend(), "BAR 1", "bytes at offset 2097152 of rows")
	require.Len(t, m.pieces, had)
	m.mem[2<<20-1] = 1
	require.NoError(t, m.Extend())
	m.mem[8<<20-1] = 1
	require.NoError(t, errors.Join(m.Close(), b.Free(), d.Close()))
}

func TestPeerRefusals(t *testing.T) {
	d, f := peers(t, "")
	b, err := d.Alloc(cuda.MemDevice, 8192, "queues")
	require.NoError(t, err)
	f.b = b.(*buffer)
	try := func(method string, words ...string) {
		t.Helper()
		_, err := d.MapPeer(b, method)
		refused(t, err, append(words, "queues for other devices by "+method)...)
		require.Empty(t, d.peers.live, "nothing is left of it")
	}
	plain := d.api
	// Modules that do not map: the kernel's own errno for it, and others'.
	for _, e := range []error{enotsupp, unix.ENODEV, unix.EPERM} {
		f.refuse = []error{e, e}
		_, err = d.MapPeer(b, "dma-buf")
		refused(t, err, "R610", "gdrdrv")
	}
	f.refuse = []error{unix.ENXIO, unix.ENXIO}
	_, err = d.MapPeer(b, "dma-buf")
	refused(t, err, "mmap of the dma-buf: no such device or address")
	// One kind of mapping is refused, the other works; on Grace by the BAR first.
	for _, grace := range []int{0, 1} {
		d.api = attributes{plain, map[attribute]int{attrCoherent: grace}}
		f.refuse = []error{enotsupp}
		m, err := d.MapPeer(b, "dma-buf")
		require.NoError(t, err)
		require.NoError(t, m.Close())
	}
	f.hole = true
	try("dma-buf", "has a hole")
	f.hole = false

	d.api = attributes{plain, map[attribute]int{attrDMABufMmap: 0}}
	try("dma-buf", "no dma-buf of the GPU's memory be mapped", "R610")
	d.api = attributes{plain, map[attribute]int{attrDMABufMmap: -1}}
	m, err := d.MapPeer(b, "dma-buf") // older drivers: a try tells
	require.NoError(t, err)
	require.NoError(t, m.Close())
	d.api = plain

	f.openErr = errs.New(errs.Capability, "/dev/gdrdrv: no such file")
	try("gdrdrv", "/dev/gdrdrv: no such file")
	f.openErr = nil
	caps := d.caps
	d.caps.DMABuf = false
	try("dma-buf", "exports no dma-buf")
	d.caps = caps
	d.caps.DirectRDMA = false
	try("gdrdrv", "GPUDirect RDMA")
	d.caps = caps
	d.caps.WritesOrdered = false
	try("dma-buf", "before its data")
	try("gdrdrv", "before its data")
	d.caps = caps
	_, err = d.MapPeer(b, "hope")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	pinned, err := d.Alloc(cuda.MemPinned, 4096, "staging")
	require.NoError(t, err)
	_, err = d.MapPeer(pinned, "dma-buf")
	require.ErrorContains(t, err, "not a live buffer of the GPU's memory")
	require.NoError(t, errors.Join(pinned.Free(), b.Free(), d.Close()))

	d, _ = peers(t, "dmabuf=0")
	require.Equal(t, errs.Capability, errs.ClassOf(d.PeerMethods()[0].Err))
	require.Equal(t, errs.Capability, errs.ClassOf(d.PeerMethods()[1].Err))
	require.NoError(t, d.Close())
}
