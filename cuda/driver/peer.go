package driver

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/gdr"
	"helios/internal/probe"
)

// Peer mappings: the GPU's memory behind its BAR at addresses of this process, which VFIO can then
// map for an SSD's DMA (VFIO_IOMMU_MAP_DMA of type1 takes page frames that are no RAM). Two ways:
// mmap of a dma-buf that libcuda exports (CUDA 13.3, driver R610: cuda.h says of
// CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED that "mmap() of dmabuf file descriptors for CUDA
// device memory allocations" works), and NVIDIA's module gdrdrv, which pins pages and maps them.
// Neither has met a real GPU here.
//
// type1 keeps page frames, not the mapping that it read them from, and nobody tells it when they go
// back to the GPU's allocator. So a mapping is a hold on its buffer: Free and the device's Close
// refuse as long as it is open, and who opened it ends the SSDs' DMA before. When the process
// dies, the kernel does the same by the order in which it releases files: internal/vfio gives its
// devices the highest numbers, whose release makes them silent, and libcuda's files go after them.

// Names of the ways.
const (
	peerDMABuf = "dma-buf"
	peerGDR    = "gdrdrv"
)

var _ cuda.PeerMapper = (*Device)(nil)

// peerPiece is a physical allocation behind a part of a buffer, in bytes from the buffer's Ptr.
type peerPiece struct{ offset, bytes int64 }

// peerTable is a device's peer mappings.
type peerTable struct {
	mu   sync.Mutex
	live map[*peerMapping]struct{}
	os   peerOS // nil: Linux
	gdr  gdrModule
}

// peerOS has the calls that mappings need of the kernel; tests replace it.
type peerOS interface {
	// reserve takes addresses without memory, and release gives them back with what was put there.
	reserve(bytes int64) (unsafe.Pointer, error)
	release(p unsafe.Pointer, bytes int64) error
	// put maps a file over a part of a reservation; clear takes it away again.
	put(addr unsafe.Pointer, bytes int64, fd int, off int64) error
	clear(addr unsafe.Pointer, bytes int64) error
	close(fd int) error
	openGDR() (gdrModule, error)
}

// gdrModule is internal/gdr's Driver.
type gdrModule interface {
	FD() int
	Pin(addr uint64, bytes int64) (gdr.Pin, error)
	Unpin(p gdr.Pin) error
	Close() error
}

type linuxPeer struct{}

func (linuxPeer) reserve(n int64) (unsafe.Pointer, error) {
	return unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
}
func (linuxPeer) release(p unsafe.Pointer, n int64) error { return unix.MunmapPtr(p, uintptr(n)) }
func (linuxPeer) put(addr unsafe.Pointer, n int64, fd int, off int64) error {
	_, err := unix.MmapPtr(fd, off, addr, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED)
	return err
}
func (linuxPeer) clear(addr unsafe.Pointer, n int64) error {
	_, err := unix.MmapPtr(-1, 0, addr, uintptr(n), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	return err
}
func (linuxPeer) close(fd int) error { return unix.Close(fd) }
func (linuxPeer) openGDR() (gdrModule, error) {
	d, err := gdr.Open()
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (t *peerTable) sys() peerOS {
	if t.os == nil {
		return linuxPeer{}
	}
	return t.os
}

// module opens gdrdrv once. t.mu is held.
func (t *peerTable) module() (gdrModule, error) {
	if t.gdr == nil {
		m, err := t.sys().openGDR()
		if err != nil {
			return nil, err
		}
		t.gdr = m
	}
	return t.gdr, nil
}

// busy is the reason for which a buffer's memory cannot be freed now, or nil.
func (t *peerTable) busy(b *buffer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for m := range t.live {
		if m.b == b {
			return fmt.Errorf(
				"device %s: %s is mapped for the DMA of other devices (%s); end that and close the mapping before its memory goes",
				b.d.info.Name, b.purpose, m.method)
		}
	}
	return nil
}

// open names the buffers that are still mapped, for Close.
func (t *peerTable) open() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for m := range t.live {
		out = append(out, fmt.Sprintf("peer mapping of %q (%d bytes)", m.b.purpose, m.b.size))
	}
	slices.Sort(out)
	return out
}

// close ends the use of gdrdrv.
func (t *peerTable) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gdr == nil {
		return nil
	}
	err := t.gdr.Close()
	t.gdr = nil
	return err
}

// mmapSupport asks the driver about mmap of its dma-bufs. Drivers before R610 do not know the
// attribute; of them only a try shows it.
func mmapSupport(a api, d ordinal) probe.Answer {
	v, r := a.DeviceGetAttribute(attrDMABufMmap, d)
	switch {
	case r != success:
		return probe.Unknown
	case v == 1:
		return probe.There
	}
	return probe.NotThere
}

const (
	// CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: Grace
	attrCoherent   attribute = 100
	attrDMABufMmap attribute = 152 // CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED
	handleByPCIe             = 0x1 // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE

	mmapHint = "use NVIDIA's driver R610 (CUDA 13.3) or later with the open kernel modules, or load the module gdrdrv (package gdrdrv-dkms)"
)

// unordered is the reason for which no other device may write to this one's memory, or nil. A
// completion must not be seen before the data that it announces (CUDA's GPUDirect RDMA guide,
// section "Synchronization and Memory Ordering").
func unordered(c Capabilities) error {
	if c.WritesOrdered {
		return nil
	}
	return errs.New(errs.Capability,
		"the GPU does not order other devices' writes for its own kernels (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING is below OWNER), so that a completion could be seen before its data")
}

// byDMABuf is the reason against dma-buf, or nil.
func byDMABuf(a api, d ordinal, c Capabilities) error {
	switch {
	case !c.DMABuf:
		return errs.New(errs.Capability,
			"the driver exports no dma-buf; it takes CUDA 11.7 with the open kernel modules and Linux 5.12")
	case mmapSupport(a, d) == probe.NotThere:
		return errs.New(errs.Capability,
			"the driver lets no dma-buf of the GPU's memory be mapped; %s", mmapHint)
	}
	return unordered(c)
}

// PeerMethods implements cuda.PeerMapper.
func (d *Device) PeerMethods() []cuda.PeerMethod {
	return []cuda.PeerMethod{{Name: peerDMABuf, Err: d.peerError(peerDMABuf)},
		{Name: peerGDR, Err: d.peerError(peerGDR)}}
}

// peerError is the reason against a method, or nil.
func (d *Device) peerError(method string) error {
	if method == peerDMABuf {
		return byDMABuf(d.api, d.ord, d.caps)
	}
	if !d.caps.DirectRDMA {
		return errs.New(errs.Capability,
			"the GPU has no GPUDirect RDMA; it takes a data-centre or workstation GPU")
	}
	if err := unordered(d.caps); err != nil {
		return err
	}
	d.peers.mu.Lock()
	defer d.peers.mu.Unlock()
	_, err := d.peers.module()
	return err
}

// peerMapping is a buffer at addresses of this process. All of its addresses are reserved from the
// beginning, so that it never moves as the buffer grows.
type peerMapping struct {
	d      *Device
	b      *buffer
	method string

	base  unsafe.Pointer // of the reservation
	total int64
	mem   []byte

	mu     sync.Mutex // guards all below
	closed bool
	pieces []peerPart
	fd     int // the only piece's dma-buf, or -1
}

// peerPart is a piece that is mapped.
type peerPart struct {
	peerPiece
	lead int64 // bytes before it that had to be mapped with it
	pin  gdr.Pin
	held bool // by the module, which did not unpin it; it is not mapped any more
}

var _ cuda.PeerGrower = (*peerMapping)(nil)

// MapPeer implements cuda.PeerMapper.
func (d *Device) MapPeer(b cuda.Buffer, method string) (cuda.PeerMapping, error) {
	fail := func(err error) (cuda.PeerMapping, error) {
		return nil, fmt.Errorf("device %s: map %s for other devices by %s: %w", d.info.Name,
			b.Purpose(), method, err)
	}
	gb, ok := b.(*buffer)
	if !ok || gb.d != d || (gb.origin != fromDevice && gb.origin != fromReserve) ||
		gb.freed.Load() {
		return fail(errors.New("not a live buffer of the GPU's memory"))
	}
	if method != peerDMABuf && method != peerGDR {
		return fail(errs.New(errs.Usage, "no such way; there are %s and %s", peerDMABuf, peerGDR))
	}
	if err := d.peerError(method); err != nil {
		return fail(err)
	}
	sys := d.peers.sys()
	// Room before the first byte: gdrdrv maps from a multiple of the GPU's page on.
	lead := int64(uint64(gb.ptr) % gdr.PageBytes)
	m := &peerMapping{d: d, b: gb, method: method, fd: -1,
		total: lead + (gb.size+pageBytes-1)&^(pageBytes-1)}
	var err error
	if m.base, err = sys.reserve(m.total); err != nil {
		return fail(fmt.Errorf("reserve %d bytes of addresses: %w", m.total, err))
	}
	m.mem = unsafe.Slice((*byte)(unsafe.Add(m.base, lead)), gb.size)
	d.peers.mu.Lock()
	if d.peers.live == nil {
		d.peers.live = map[*peerMapping]struct{}{}
	}
	d.peers.live[m] = struct{}{}
	d.peers.mu.Unlock()
	if gb.freed.Load() { // by another goroutine, before the mapping was known
		return fail(errors.Join(errors.New("the buffer was freed"), m.Close()))
	}
	if err := m.Extend(); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Bytes implements cuda.PeerMapping.
func (m *peerMapping) Bytes() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	return m.mem
}

// DMABuf implements cuda.PeerMapping.
func (m *peerMapping) DMABuf() (fd int, offset int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fd, 0
}

// Extend implements cuda.PeerGrower. A failure leaves the mapping as it was.
func (m *peerMapping) Extend() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return fmt.Errorf("device %s: the mapping of %s for other devices is closed", m.d.info.Name,
			m.b.purpose)
	}
	if slices.ContainsFunc(m.pieces, func(p peerPart) bool { return p.held }) {
		return fmt.Errorf(
			"device %s: %s: %s has not unpinned a part of it; close the mapping and make a new one",
			m.d.info.Name, m.b.purpose, m.method)
	}
	had := len(m.pieces)
	for _, p := range m.b.peerPieces() {
		if slices.ContainsFunc(m.pieces, func(q peerPart) bool { return q.offset == p.offset }) {
			continue
		}
		if err := m.add(p); err != nil {
			err = fmt.Errorf(
				"device %s: map %d bytes at offset %d of %s for other devices by %s: %w",
				m.d.info.Name, p.bytes, p.offset, m.b.purpose, m.method, err)
			return errors.Join(err, m.drop(had))
		}
	}
	if len(m.pieces) > 1 && m.fd >= 0 { // no longer all of it
		err := m.d.peers.sys().close(m.fd)
		m.fd = -1
		return err
	}
	return nil
}

// at is the address of a byte of the buffer, or of one before it.
func (m *peerMapping) addr(off int64) unsafe.Pointer {
	return unsafe.Add(unsafe.Pointer(unsafe.SliceData(m.mem)), off)
}

// add maps a piece. m.mu is held.
func (m *peerMapping) add(p peerPiece) error {
	part := peerPart{peerPiece: p}
	var err error
	if m.method == peerGDR {
		err = m.addPinned(&part)
	} else {
		err = m.addExported(part)
	}
	if err != nil {
		return err
	}
	m.pieces = append(m.pieces, part)
	return m.touch(p)
}

// addExported maps a dma-buf of the piece, from its beginning: NVIDIA's mmap maps the first
// allocation of a dma-buf and leaves a hole at others (nv_dma_buf_mmap of the open modules).
func (m *peerMapping) addExported(p peerPart) error {
	flags := []uint64{0, handleByPCIe}
	if v, r := m.d.api.DeviceGetAttribute(attrCoherent, m.d.ord); r == success && v == 1 {
		slices.Reverse(flags) // there the plain mapping is not the BAR
	}
	sys := m.d.peers.sys()
	var refused []error
	for _, f := range flags {
		fd, err := m.d.export(m.b.ptr+devicePtr(p.offset), p.bytes, f)
		if err != nil {
			refused = append(refused, err)
			continue
		}
		if err := sys.put(m.addr(p.offset), p.bytes, fd, 0); err != nil {
			refused = append(refused, mmapError(err, p.bytes))
			// A refused mapping may have taken the reservation with it.
			if err := errors.Join(sys.close(fd), sys.clear(m.addr(p.offset), p.bytes)); err != nil {
				return err
			}
			continue
		}
		if p.offset == 0 && p.bytes >= m.b.size {
			m.fd = fd
			return nil
		}
		return sys.close(fd) // the mapping holds the dma-buf
	}
	return errs.With(errs.Capability, errors.Join(refused...))
}

// export makes a dma-buf of a range that lies in one allocation.
func (d *Device) export(p devicePtr, bytes int64, flags uint64) (int, error) {
	if err := d.enter(); err != nil {
		return -1, err
	}
	defer d.leave()
	h, r := d.api.MemGetHandleForAddressRange(p, bytes, handleDMABuf, flags)
	if r != success {
		return -1, d.failed("cuMemGetHandleForAddressRange", r)
	}
	return int(h), nil
}

// enotsupp is the kernel's ENOTSUPP, which is not for user space, and which NVIDIA's module answers
// with.
const enotsupp = unix.Errno(524)

func mmapError(err error, bytes int64) error {
	switch {
	case errors.Is(err, enotsupp), errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENODEV),
		errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return errs.New(errs.Capability,
			"mmap of the dma-buf: %w: the driver lets no dma-buf of the GPU's memory be mapped; %s",
			err, mmapHint)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EAGAIN):
		return barError(fmt.Errorf("mmap of the dma-buf: %w", err), bytes)
	}
	return errs.New(errs.Capability, "mmap of the dma-buf: %w", err)
}

// barError is for what fails when the window is full that the GPU shows its memory through.
func barError(err error, bytes int64) error {
	return errs.With(errs.Capability,
		fmt.Errorf(
			"%w: %d bytes may be more than is free behind the GPU's BAR 1 (\"nvidia-smi -q -d MEMORY\" shows it; many GPUs have 256 MiB there until Resizable BAR is on in the firmware); lower the budgets",
			err, bytes))
}

// addPinned maps a piece by gdrdrv: whole pages of the GPU, with what lies before the piece in the
// first.
func (m *peerMapping) addPinned(p *peerPart) error {
	t := &m.d.peers
	t.mu.Lock()
	mod, err := t.module()
	t.mu.Unlock()
	if err != nil {
		return err
	}
	addr := uint64(m.b.ptr) + uint64(p.offset)
	p.lead = int64(addr % gdr.PageBytes)
	if p.lead > 0 && p.offset > 0 {
		return fmt.Errorf("a piece at %#x, which is no multiple of the GPU's pages of %d bytes",
			addr, gdr.PageBytes)
	}
	if p.pin, err = mod.Pin(addr-uint64(p.lead), p.bytes+p.lead); err != nil {
		return barError(err, p.bytes)
	}
	if err := t.sys().put(m.addr(p.offset-p.lead), p.bytes+p.lead, mod.FD(),
		p.pin.Offset()); err != nil {
		err = fmt.Errorf("mmap of gdrdrv: %w", err)
		return errors.Join(errs.With(errs.Capability, err), t.sys().clear(m.addr(p.offset-p.lead),
			p.bytes+p.lead), mod.Unpin(p.pin))
	}
	return nil
}

// touch loads a word of every 2 MiB, the granularity of the GPU's allocations, and of the last
// page: a hole in a mapping, which the IOMMU would refuse later or the CPU fault on, is found now.
func (m *peerMapping) touch(p peerPiece) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = errs.New(errs.Capability, "the mapping has a hole, where loads fault (%v); %s", r,
				mmapHint)
		}
	}()
	const step = 2 << 20
	for offset := int64(0); ; offset += step {
		offset = min(offset, p.bytes-pageBytes)
		atomic.LoadUint32((*uint32)(m.addr(p.offset + offset)))
		if offset == p.bytes-pageBytes {
			return nil
		}
	}
}

// drop takes away all pieces but the first ones. A piece that the module does not release stays in
// the list, so that its memory is not freed. m.mu is held.
func (m *peerMapping) drop(keep int) (err error) {
	sys := m.d.peers.sys()
	stay := m.pieces[:keep:keep]
	for _, p := range m.pieces[keep:] {
		cerr := sys.clear(m.addr(p.offset-p.lead), p.bytes+p.lead)
		uerr := m.unpin(p)
		if p.held = uerr != nil; p.held {
			stay = append(stay, p)
		}
		err = errors.Join(err, cerr, uerr)
	}
	m.pieces = stay
	if keep == 0 && m.fd >= 0 {
		err = errors.Join(err, sys.close(m.fd))
		m.fd = -1
	}
	if err != nil {
		return fmt.Errorf("device %s: unmap %s: %w", m.d.info.Name, m.b.purpose, err)
	}
	return nil
}

func (m *peerMapping) unpin(p peerPart) error {
	if m.method != peerGDR {
		return nil
	}
	m.d.peers.mu.Lock()
	defer m.d.peers.mu.Unlock()
	if m.d.peers.gdr == nil {
		return nil
	}
	return m.d.peers.gdr.Unpin(p.pin)
}

// Close implements cuda.PeerMapping. The buffer can be freed afterwards, unless the module did not
// unpin it: then Close can be tried again, and Free refuses meanwhile.
func (m *peerMapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	err := m.drop(0)
	if len(m.pieces) > 0 {
		return fmt.Errorf("%w; the memory stays pinned and is not freed", err)
	}
	m.closed = true
	err = errors.Join(err, m.d.peers.sys().release(m.base, m.total))
	m.d.peers.mu.Lock()
	delete(m.d.peers.live, m)
	m.d.peers.mu.Unlock()
	return err
}
