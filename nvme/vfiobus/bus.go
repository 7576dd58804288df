// Package vfiobus is the way to a real NVMe controller: an nvme.Bus over a PCI function that
// internal/vfio took.
//
// Registers and doorbells are the mapped BAR 0; where a page of it cannot be mapped, registers are
// read and written through the kernel. Nothing here wakes or waits: the controller sees doorbells
// by itself, and who wants completions looks at the queue. Interrupts stay off.
//
// A device can leave at any time. Its registers then read as all ones, as zeros, or an access
// faults; all of these, and what the kernel reports by event (hot unplug, PCI errors), come out as
// nvme.ErrGone with words. Doorbells are stores into the same mapping by whoever has a queue: the
// kernel keeps the mapping of a device that left until it is closed, so they go nowhere, and do not
// fault as long as nobody switches memory space off, which this package never does.
package vfiobus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/vfio"
	"helios/nvme"
)

// Options of a Bus. The zero value is good.
type Options struct {
	Name string // in messages; "" = the PCI address
}

// device and domain have the calls that a Bus needs of vfio.Device and vfio.Domain.
type device interface {
	Addr() string
	Region(index int) (vfio.Region, error)
	MapRegion(index int, off, size int64) ([]byte, error)
	UnmapRegion(b []byte) error
	ReadAt(index int, b []byte, off int64) error
	WriteAt(index int, b []byte, off int64) error
	EnableMemory() error
	EnableDMA() error
	DisableDMA() error
	Reset() error
	Gone() bool
	Asked() <-chan struct{}
	Failed() <-chan struct{}
	Close() error
}

type domain interface {
	Map(mem []byte) (vfio.IOVA, error)
	Window(mem []byte) (vfio.IOVA, error)
	MapPeer(mem []byte, dmabuf int, offset int64) (vfio.IOVA, error)
	WindowPeer(mem []byte) (vfio.IOVA, error)
	Extend(iova vfio.IOVA, bytes int64) error
	Unmap(iova vfio.IOVA, bytes int64) error
	ReserveAt(iova vfio.IOVA, bytes int64) error
	Unreserve(iova vfio.IOVA, bytes int64) error
	Ranges() []vfio.Range
}

// Bus is a controller behind VFIO. It implements nvme.Bus, Preparer, HardResetter, Leaver,
// BARReserver and DoorbellMapper.
type Bus struct {
	dev  device
	dom  domain
	name string

	size   int64 // of BAR 0
	stride uint32
	end    int64    // of the doorbells, as an offset in BAR 0
	pages  []window // of BAR 0 that are mapped

	life   sync.RWMutex // held for reading by accesses of mapped registers, for writing by Close
	closed bool

	mu   sync.Mutex // guards all below
	maps map[mapping]int
	kept []span // reserved
}

// window is a mapped part of BAR 0.
type window struct {
	off int64
	mem []byte
}

// mapping holds what MapDMA gave: an address and a length, and the pages behind them.
type mapping struct {
	iova  nvme.IOVA
	bytes int64
}

type span struct{ iova, bytes int64 }

const (
	pageBytes = 4096
	// maxDoorbells is two for each of 65,536 queue pairs.
	maxDoorbells = 2 * 65536
)

// Open makes the bus of a device, which it owns from now on: Close closes it. On error the device
// is closed already.
func Open(dev *vfio.Device, opt Options) (*Bus, error) {
	return open(dev, dev.Domain(), opt)
}

func open(dev device, dom domain, opt Options) (_ *Bus, err error) {
	b := &Bus{dev: dev, dom: dom, name: opt.Name, maps: map[mapping]int{}}
	if b.name == "" {
		b.name = dev.Addr()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	r, err := dev.Region(vfio.RegionBAR0)
	if err != nil {
		return nil, fmt.Errorf("%s: BAR 0: %w", b.name, err)
	}
	if r.Size < nvme.RegDoorbells+8 || !r.Read || !r.Write {
		return nil, errs.New(errs.Usage,
			"%s: BAR 0 has %d bytes and is no NVMe register file; choose an NVMe controller (heliosctl ssds)",
			b.name, r.Size)
	}
	b.size = r.Size
	// Registers need memory space, and no more. Bus mastering waits for Prepare: a controller that
	// somebody left enabled would go on with his queues, whose addresses are ours in this address
	// space.
	if err := b.answerOnly(); err != nil {
		return nil, err
	}
	if err := b.mapRegisters(r.Mappable, 0, nvme.RegDoorbells); err != nil {
		return nil, err
	}
	v, err := nvme.Read64(b, nvme.RegCAP)
	if err != nil {
		return nil, err
	}
	if err := b.disable(nvme.CAP(v)); err != nil {
		return nil, err
	}
	b.stride = 4 << nvme.CAP(v).DSTRD()
	if b.end, err = b.doorbellEnd(); err != nil {
		return nil, err
	}
	if err := b.mapRegisters(r.Mappable, nvme.RegDoorbells,
		(b.end+pageBytes-1)&^(pageBytes-1)); err != nil {
		return nil, err
	}
	return b, nil
}

// answerOnly lets the registers answer, and keeps the device from memory.
func (b *Bus) answerOnly() error {
	if err := b.dev.EnableMemory(); err != nil {
		if b.dev.Gone() {
			return b.gone(err.Error())
		}
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

// disable brings CC.EN to 0 and waits for CSTS.RDY to follow, while the controller cannot reach
// memory. One that does not follow gets a function reset; one that ignores that too is not used.
// The controller is not asked to finish anything: what it had to do is nobody's here.
func (b *Bus) disable(cap nvme.CAP) error {
	cc, err := b.Read32(nvme.RegCC)
	if err != nil {
		return err
	}
	csts, err := b.Read32(nvme.RegCSTS)
	if err != nil {
		return err
	}
	if !nvme.CC(cc).EN() && !nvme.CSTS(csts).RDY() {
		return nil
	}
	if nvme.CC(cc).EN() {
		if err := b.Write32(nvme.RegCC,
			cc&^uint32(nvme.CCEnable)&^uint32(nvme.CCShutdownMask)); err != nil {
			return err
		}
	}
	// One unit of CAP.TO more for rounding.
	idle, err := b.idle(time.Duration(cap.TO()+1) * 500 * time.Millisecond)
	if err != nil || idle {
		return err
	}
	if err := b.HardReset(); err != nil {
		return errs.New(errs.ClassOf(err),
			"%s: somebody left it enabled and it cannot be disabled, so it gets no access to memory: %w; power-cycle the SSD",
			b.name, err)
	}
	if err := b.answerOnly(); err != nil {
		return err
	}
	if idle, err = b.idle(time.Duration(cap.TO()+1) * 500 * time.Millisecond); err == nil && !idle {
		err = errs.New(errs.Device,
			"%s: somebody left it enabled and a reset does not disable it, so it gets no access to memory; power-cycle the SSD",
			b.name)
	}
	return err
}

// idle waits until CC.EN and CSTS.RDY are 0.
func (b *Bus) idle(limit time.Duration) (bool, error) {
	for end := time.Now().Add(limit); ; {
		cc, err := b.Read32(nvme.RegCC)
		if err != nil {
			return false, err
		}
		csts, err := b.Read32(nvme.RegCSTS)
		if err != nil {
			return false, err
		}
		if !nvme.CC(cc).EN() && !nvme.CSTS(csts).RDY() {
			return true, nil
		}
		if time.Now().After(end) {
			return false, nil
		}
		time.Sleep(time.Millisecond)
	}
}

// mapRegisters maps what can be mapped of [lo, hi) of BAR 0.
func (b *Bus) mapRegisters(can []vfio.Span, lo, hi int64) error {
	for _, s := range can {
		from := (max(s.Offset, lo) + pageBytes - 1) &^ (pageBytes - 1)
		to := min(s.Offset+s.Size, hi) &^ (pageBytes - 1)
		if from >= to {
			continue
		}
		mem, err := b.dev.MapRegion(vfio.RegionBAR0, from, to-from)
		if err != nil {
			return fmt.Errorf("%s: map %d bytes at %#x of BAR 0: %w", b.name, to-from, from, err)
		}
		b.pages = append(b.pages, window{from, mem})
	}
	return nil
}

// doorbellEnd shows where the doorbells end at the latest: at the end of the BAR, of as many as
// queue IDs allow, or where MSI-X tables begin that lie behind them.
func (b *Bus) doorbellEnd() (int64, error) {
	end := min(b.size, nvme.RegDoorbells+maxDoorbells*int64(b.stride))
	tables, err := b.msixTables()
	if err != nil {
		return 0, fmt.Errorf("%s: configuration space: %w", b.name, err)
	}
	for _, t := range tables {
		if t > nvme.RegDoorbells {
			end = min(end, t)
		}
	}
	return end, nil
}

// msixTables are the offsets of the MSI-X table and pending bits in BAR 0 (PCI Express base
// specification, section 7.7.2).
func (b *Bus) msixTables() ([]int64, error) {
	const idMSIX = 0x11
	read := func(w []byte, off int64) error { return b.dev.ReadAt(vfio.RegionConfig, w, off) }
	off, err := pci.Capability(read, idMSIX)
	if err != nil || off == 0 {
		return nil, err
	}
	var w [8]byte // where the table is, and where its pending bits
	if err := read(w[:], off+4); err != nil {
		return nil, err
	}
	var out []int64
	for _, v := range []uint32{binary.LittleEndian.Uint32(w[:]),
		binary.LittleEndian.Uint32(w[4:])} {
		if v&7 == 0 {
			out = append(out, int64(v&^7))
		}
	}
	return out, nil
}

// Name implements nvme.Bus.
func (b *Bus) Name() string { return b.name }

// Leaving implements nvme.Leaver.
func (b *Bus) Leaving() error {
	select {
	case <-b.dev.Asked():
		return errs.New(errs.Device,
			"the kernel asks for the device back (hot unplug, or it is being unbound): %w",
			nvme.ErrGone)
	default:
	}
	select {
	case <-b.dev.Failed():
		return errs.New(errs.Device,
			"the kernel reports a PCI error that cannot be corrected (see its log, dmesg; then bind the SSD again): %w",
			nvme.ErrGone)
	default:
	}
	return nil
}

// gone is the error of a device that is not there any more, or not for long.
func (b *Bus) gone(why string) error {
	return errs.New(errs.Device, "%s: %s: %w", b.name, why, nvme.ErrGone)
}

// check is the error of an access that this bus does not have.
func (b *Bus) check(off uint32) error {
	if off%4 != 0 || int64(off)+4 > b.size {
		return fmt.Errorf("%s: there is no 32-bit register at %#x", b.name, off)
	}
	return nil
}

// Read32 implements nvme.Bus.
func (b *Bus) Read32(off uint32) (uint32, error) {
	if err := b.check(off); err != nil {
		return 0, err
	}
	v, err := b.load(off)
	if err != nil {
		return 0, err
	}
	// Registers of a device that left read as all ones; in QEMU as zeros.
	suspect := v == 1<<32-1 || v == 0 && (off == nvme.RegCAP || off == nvme.RegVS ||
		off == nvme.RegCSTS)
	if suspect && b.dev.Gone() {
		return 0,
			b.gone(
				fmt.Sprintf(
					"register %#x reads as %#x, its configuration space as all ones: the SSD left its slot",
					off, v))
	}
	return v, nil
}

// Write32 implements nvme.Bus.
func (b *Bus) Write32(off, v uint32) error {
	if err := b.check(off); err != nil {
		return err
	}
	return b.store(off, v)
}

// at is the mapped register at off; nil: its page is not mapped.
func (b *Bus) at(off int64) *uint32 {
	for i := range b.pages {
		w := &b.pages[i]
		if off >= w.off && off+4 <= w.off+int64(len(w.mem)) {
			return (*uint32)(unsafe.Pointer(&w.mem[off-w.off]))
		}
	}
	return nil
}

func (b *Bus) load(off uint32) (v uint32, err error) {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return 0, fmt.Errorf("%s: register %#x: %w", b.name, off, nvme.ErrClosed)
	}
	if p := b.at(int64(off)); p != nil {
		err = b.guard(off, func() { v = atomic.LoadUint32(p) })
		return v, err
	}
	var w [4]byte
	if err := b.dev.ReadAt(vfio.RegionBAR0, w[:], int64(off)); err != nil {
		return 0, b.through(off, err)
	}
	return binary.LittleEndian.Uint32(w[:]), nil
}

func (b *Bus) store(off, v uint32) error {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return fmt.Errorf("%s: register %#x: %w", b.name, off, nvme.ErrClosed)
	}
	if p := b.at(int64(off)); p != nil {
		// A plain store, after all before it: what a register announces must be there.
		return b.guard(off, func() { nvme.StoreDoorbell(p, v) })
	}
	var w [4]byte
	binary.LittleEndian.PutUint32(w[:], v)
	return b.through(off, b.dev.WriteAt(vfio.RegionBAR0, w[:], int64(off)))
}

// through words an error of an access through the kernel.
func (b *Bus) through(off uint32, err error) error {
	switch {
	case err == nil:
		return nil
	case b.dev.Gone():
		return b.gone(fmt.Sprintf("register %#x: %v", off, err))
	}
	return errs.With(errs.Device, fmt.Errorf("%s: register %#x: %w", b.name, off, err))
}

// guard turns a fault of an access to the BAR into an error: memory space is off, or the device
// left.
func (b *Bus) guard(off uint32, access func()) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		r := recover()
		if r == nil {
			return
		}
		fault, ok := r.(interface{ Addr() uintptr })
		if !ok {
			panic(r)
		}
		why := fmt.Sprintf("access to register %#x faults (address %#x)", off, fault.Addr())
		if b.dev.Gone() {
			err = b.gone(why)
			return
		}
		err = errs.New(errs.Device,
			"%s: %s: its memory space is switched off; reset the controller, or bind it again",
			b.name, why)
	}()
	access()
	return nil
}

// Prepare implements nvme.Preparer: memory space and bus mastering, which resets take away.
func (b *Bus) Prepare() error {
	if err := b.dev.EnableDMA(); err != nil {
		if b.dev.Gone() {
			return b.gone(err.Error())
		}
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

// HardReset implements nvme.HardResetter. A device that left is not tried: the kernel would wait
// for it.
func (b *Bus) HardReset() error {
	if err := b.Leaving(); err != nil {
		return err
	}
	if b.dev.Gone() {
		return b.gone("its configuration space reads as all ones: the SSD left its slot")
	}
	if err := b.dev.Reset(); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

// Doorbell implements nvme.Bus.
func (b *Bus) Doorbell(i uint32) (*uint32, error) {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return nil, fmt.Errorf("%s: doorbell %d: %w", b.name, i, nvme.ErrClosed)
	}
	off := nvme.RegDoorbells + int64(i)*int64(b.stride)
	if off+4 > b.end {
		return nil, fmt.Errorf("%s: doorbell %d: the controller has %d", b.name, i,
			(b.end-nvme.RegDoorbells)/int64(b.stride))
	}
	p := b.at(off)
	if p == nil {
		return nil, errs.New(errs.Capability,
			"%s: doorbell %d: the kernel does not let its page of BAR 0 (offset %#x) be mapped; use a newer kernel (4.16 or later)",
			b.name, i, off&^(pageBytes-1))
	}
	return p, nil
}

// DoorbellMemory implements nvme.DoorbellMapper. Each page was read once, since VFIO maps pages
// when they are first used, and a GPU's driver does not cause that.
func (b *Bus) DoorbellMemory() (mem []byte, io bool, err error) {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return nil, true, fmt.Errorf("%s: doorbells: %w", b.name, nvme.ErrClosed)
	}
	end := (b.end + pageBytes - 1) &^ (pageBytes - 1)
	for _, w := range b.pages {
		if w.off > nvme.RegDoorbells || w.off+int64(len(w.mem)) < end {
			continue
		}
		mem = w.mem[nvme.RegDoorbells-w.off : end-w.off]
		for pos := 0; pos < len(mem); pos += pageBytes {
			p := (*uint32)(unsafe.Pointer(&mem[pos]))
			if err := b.guard(nvme.RegDoorbells+uint32(pos),
				func() { _ = atomic.LoadUint32(p) }); err != nil {
				return nil, true, err
			}
		}
		return mem, true, nil
	}
	return nil, true, errs.New(errs.Capability,
		"%s: the kernel does not let all doorbell pages of BAR 0 be mapped; use a newer kernel (4.16 or later)",
		b.name)
}

// MapDMA implements nvme.Bus. The domain maps whole pages, so that what shares mem's first and last
// page is reachable for the SSD too.
func (b *Bus) MapDMA(mem []byte) (nvme.IOVA, error) { return b.enter(mem, b.dom.Map) }

// MapPeerDMA implements nvme.PeerDMA. The mapping that mem is of must outlive it: what the SSD
// reaches is the page frames, which nobody takes from it when their device frees them.
func (b *Bus) MapPeerDMA(mem []byte, dmabuf int, offset int64) (nvme.IOVA, error) {
	return b.enter(mem, func(pages []byte) (vfio.IOVA, error) {
		return b.dom.MapPeer(pages, dmabuf, offset-int64(len(pages)-len(mem)))
	})
}

// MapPeerWindow implements nvme.PeerDMA.
func (b *Bus) MapPeerWindow(mem []byte) (nvme.IOVA, error) { return b.enter(mem, b.dom.WindowPeer) }

// MapWindow implements nvme.WindowMapper.
func (b *Bus) MapWindow(mem []byte) (nvme.IOVA, error) { return b.enter(mem, b.dom.Window) }

func (b *Bus) enter(mem []byte, domain func([]byte) (vfio.IOVA, error)) (nvme.IOVA, error) {
	if len(mem) == 0 {
		return 0, errs.New(errs.Usage, "%s: map no memory for DMA", b.name)
	}
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return 0, fmt.Errorf("%s: map for DMA: %w", b.name, nvme.ErrClosed)
	}
	p := unsafe.Pointer(unsafe.SliceData(mem))
	skip := uintptr(p) % pageBytes
	pages := unsafe.Slice((*byte)(unsafe.Add(p, -int(skip))), len(mem)+int(skip))
	iova, err := domain(pages)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", b.name, err)
	}
	m := mapping{nvme.IOVA(iova) + nvme.IOVA(skip), int64(len(mem))}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.maps[m]++
	return m.iova, nil
}

// ExtendWindow implements nvme.WindowMapper.
func (b *Bus) ExtendWindow(iova nvme.IOVA, bytes int64) error {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return fmt.Errorf("%s: map for DMA: %w", b.name, nvme.ErrClosed)
	}
	skip := int64(iova % pageBytes)
	if err := b.dom.Extend(vfio.IOVA(iova)-vfio.IOVA(skip), bytes+skip); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

// UnmapDMA implements nvme.Bus.
func (b *Bus) UnmapDMA(iova nvme.IOVA, bytes int64) error {
	b.life.RLock()
	defer b.life.RUnlock()
	if b.closed {
		return fmt.Errorf("%s: unmap: %w", b.name, nvme.ErrClosed)
	}
	m := mapping{iova, bytes}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.maps[m] == 0 {
		return fmt.Errorf("%s: unmap %d bytes at %#x, which were not mapped so", b.name, bytes,
			uint64(iova))
	}
	if err := b.unmap(m); err != nil {
		return err
	}
	if b.maps[m]--; b.maps[m] == 0 {
		delete(b.maps, m)
	}
	return nil
}

func (b *Bus) unmap(m mapping) error {
	skip := int64(m.iova % pageBytes)
	if err := b.dom.Unmap(vfio.IOVA(m.iova)-vfio.IOVA(skip), m.bytes+skip); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

// ReserveBAR implements nvme.BARReserver. The address is the one that configuration space has.
func (b *Bus) ReserveBAR(bir int, off, bytes int64) error {
	const firstBAR, is64, isIO = 0x10, 2 << 1, 1
	var w [8]byte
	n := 8
	if bir == 5 {
		n = 4
	}
	if bir < 0 || bir > 5 {
		return errs.New(errs.Device, "%s: there is no BAR %d", b.name, bir)
	}
	if err := b.dev.ReadAt(vfio.RegionConfig, w[:n], int64(firstBAR+4*bir)); err != nil {
		return fmt.Errorf("%s: BAR %d: %w", b.name, bir, err)
	}
	v := binary.LittleEndian.Uint64(w[:])
	if v&isIO != 0 {
		return errs.New(errs.Device, "%s: BAR %d is I/O ports", b.name, bir)
	}
	if v&(3<<1) != is64 {
		v &= 1<<32 - 1
	}
	pos := span{int64(v&^0xf) + off, (bytes + pageBytes - 1) &^ (pageBytes - 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	// Only what the IOMMU translates could be given to somebody else.
	for _, r := range b.dom.Ranges() {
		lo := max(pos.iova, int64(r.Start))
		hi := min(pos.iova+pos.bytes-1, int64(min(r.End, 1<<63-1)))
		if lo > hi {
			continue
		}
		lo &^= pageBytes - 1
		part := span{lo, (hi - lo + pageBytes) &^ (pageBytes - 1)}
		if slices.Contains(b.kept, part) {
			continue // by an earlier bring-up
		}
		if err := b.dom.ReserveAt(vfio.IOVA(part.iova), part.bytes); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
		b.kept = append(b.kept, part)
	}
	return nil
}

// Close takes the device off all memory, unmaps what is still mapped, and gives the device back to
// the kernel, which resets it. A device that left its bus is closed in the background
// (vfio.Device.Close).
func (b *Bus) Close() error {
	b.life.Lock()
	defer b.life.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	b.mu.Lock()
	defer b.mu.Unlock()
	var err error
	for _, w := range b.pages {
		err = errors.Join(err, b.dev.UnmapRegion(w.mem))
	}
	b.pages = nil
	unmap := func() {
		for m, n := range b.maps {
			for range n {
				err = errors.Join(err, b.unmap(m))
			}
		}
		clear(b.maps)
	}
	// Memory is unmapped only when the SSD cannot write to it any more.
	quiet := b.dev.Gone() || b.dev.DisableDMA() == nil
	if quiet {
		unmap()
	}
	if cerr := b.dev.Close(); cerr != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w", b.name, cerr))
	} else if !quiet {
		unmap()
	}
	for _, s := range b.kept {
		err = errors.Join(err, b.dom.Unreserve(vfio.IOVA(s.iova), s.bytes))
	}
	b.kept = nil
	return err
}

var _ interface {
	nvme.Bus
	nvme.Preparer
	nvme.HardResetter
	nvme.Leaver
	nvme.BARReserver
	nvme.DoorbellMapper
	nvme.WindowMapper
	nvme.PeerDMA
} = (*Bus)(nil)
