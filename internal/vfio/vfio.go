// Package vfio lets an unprivileged process drive PCI devices: Linux VFIO, with the IOMMU on.
//
// A Domain is one IOMMU address space that all devices of a process share, so that memory is pinned
// and mapped once whatever the number of SSDs. A Device is a function that was bound to vfio-pci
// and that a Domain took; closing it lets the kernel reset it. Numbers and structures are those of
// the kernel's include/uapi/linux/vfio.h and iommufd.h.
package vfio

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"helios/internal/errs"
)

// IOVA is an address as devices of a domain see it.
type IOVA uint64

// Range is a piece of the IOVA space, End inclusive, as the IOMMU reports it.
type Range struct{ Start, End IOVA }

// Options shape a domain. The zero value is good.
type Options struct {
	// Backend is "type1" or "iommufd"; "" takes the first that a probe finds.
	Backend string
}

// Domain is an IOMMU address space. Its methods are safe for concurrent use.
type Domain struct {
	m     machine
	space addressSpace

	attaching sync.Mutex // one Attach at a time; it may wait for a reset

	mu       sync.Mutex
	closed   bool
	live     bool // a device is in the space, so the kernel takes mappings
	known    []Range
	iovas    iovaSpace
	maps     []*mapping // sorted by va, and by end where that is equal
	byIOVA   map[IOVA]*mapping
	reserved []span
	devices  map[string]*Device
}

// mapping is a piece of memory that the kernel has pinned. Maps of parts of it share it.
type mapping struct {
	va    uintptr
	size  uint64
	iova  IOVA
	reach uint64       // bytes that the kernel has mapped: all of a Map, the beginning of a Window
	users map[span]int // Maps and Windows that were not taken back, by their addresses
	peer  bool         // another device's memory
	// stuck: the kernel refused to unmap it. Its memory may be other memory by now, so no Map
	// shares it.
	stuck bool
}

// New opens an address space without devices. Without a wish for a backend it takes type1, which
// every distribution's kernel has, and iommufd where type1 is missing.
func New(o Options) (*Domain, error) { return newDomain(realMachine(), o) }

func newDomain(m machine, o Options) (*Domain, error) {
	d := &Domain{m: m, byIOVA: map[IOVA]*mapping{}, devices: map[string]*Device{}}
	switch o.Backend {
	case "", "type1":
		t, err := openType1(m)
		if err == nil {
			d.space = t
			return d, nil
		}
		if o.Backend != "" || !m.exists(iommuNode) {
			return nil, err
		}
		s, ierr := openIOMMUFD(m)
		if ierr != nil {
			return nil, errs.With(errs.Capability, errors.Join(err, ierr))
		}
		d.space = s
	case "iommufd":
		s, err := openIOMMUFD(m)
		if err != nil {
			return nil, err
		}
		d.space = s
	default:
		return nil, errs.New(errs.Usage, "vfio: no backend %q; there are type1 and iommufd",
			o.Backend)
	}
	return d, nil
}

var errDomainClosed = errors.New("vfio: the domain is closed")

// Attach takes the device at a PCI address such as 0000:00:04.0. Errors name the device, its group
// and the next step: class Capability where the machine or rights lack, Refused where somebody else
// has the group, Usage where the device is not bound to vfio-pci. Mappings that exist reach the new
// device too.
func (d *Domain) Attach(addr string) (*Device, error) {
	d.attaching.Lock()
	defer d.attaching.Unlock()
	pd, err := d.m.findDevice(addr)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	old, closed := d.devices[pd.Addr], d.closed
	d.mu.Unlock()
	if closed {
		return nil, errDomainClosed
	}
	if old != nil {
		if old.closed.Load() {
			return nil, errs.New(errs.Refused,
				"vfio %s: the kernel is still taking it back from this process; try again later",
				pd.Addr)
		}
		return nil, fmt.Errorf("vfio %s: this process has it already", pd.Addr)
	}
	fd, fresh, err := d.space.attach(pd)
	if err != nil {
		return nil, err
	}
	dev := newDevice(d, pd, d.m.k.raise(fd))
	if err := d.join(fresh); err != nil {
		return nil, errors.Join(fmt.Errorf("vfio %s: %w", pd.Addr, err), d.leave(dev))
	}
	if err := dev.start(); err != nil {
		return nil, errors.Join(err, d.leave(dev))
	}
	d.mu.Lock()
	d.devices[pd.Addr] = dev
	d.mu.Unlock()
	return dev, nil
}

// join follows a device's coming: the addresses may have become fewer, and a space that was empty
// gets the mappings back.
func (d *Domain) join(fresh bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ranges, err := d.space.ranges()
	if err != nil {
		return err
	}
	for _, m := range d.maps {
		if !fresh {
			break
		}
		if m.reach == 0 {
			continue
		}
		if m.peer {
			if err := d.space.mapPeer(m.va, m.iova, m.reach, -1, 0); err != nil {
				return d.m.peerError(d.space.name(), m.reach, err)
			}
			continue
		}
		if err := d.space.mapMem(m.va, m.iova, m.reach); err != nil {
			return d.m.mapError(m.reach, err)
		}
	}
	d.known = ranges
	d.iovas.reset(ranges, d.used())
	d.live = true
	return nil
}

// leave gives a device back to the kernel. It may take long.
func (d *Domain) leave(dev *Device) error {
	d.mu.Lock()
	if d.space.last(dev.dev) {
		d.live = false
	}
	d.mu.Unlock()
	err := d.space.detach(dev.dev, dev.fd)
	d.mu.Lock()
	if d.space.empty() { // the last ones may have left at the same time
		d.live = false
	}
	if d.devices[dev.dev.Addr] == dev {
		delete(d.devices, dev.dev.Addr)
	}
	d.mu.Unlock()
	return err
}

// Map pins mem and makes it reachable for every device of the domain, now and later. The address
// must be a multiple of 4096; the length is rounded up to it. The same memory mapped again, or a
// part of it, gets the same address and counts; mem[i] is at the returned address plus i. A device
// must be attached.
func (d *Domain) Map(mem []byte) (IOVA, error) {
	return d.enter(mem, uint64(len(mem)), source{dmabuf: -1})
}

// Window is Map for memory of which perhaps only the beginning will be used: it takes addresses for
// all of mem, but pins and maps nothing before Extend. Unmap of all of it takes it back.
func (d *Domain) Window(mem []byte) (IOVA, error) { return d.enter(mem, 0, source{dmabuf: -1}) }

// MapPeer is Map of another device's memory, such as a GPU's: mem is its mapping for the CPU (page
// frames behind a BAR, which type1 takes as they are), and dmabuf, when it is not -1, an export of
// it, in which mem starts at offset, for iommufd. Nothing is pinned and no limit of locked memory
// applies. type1 keeps the frames, also when their owner ends the mapping or gives the memory to
// somebody else, so Unmap comes before that, and the devices' silence before Unmap.
func (d *Domain) MapPeer(mem []byte, dmabuf int, offset int64) (IOVA, error) {
	return d.enter(mem, uint64(len(mem)), source{peer: true, dmabuf: dmabuf, offset: offset})
}

// WindowPeer is Window of another device's memory, whose mapping grows: behind what it has,
// addresses fault, so Extend maps just what it is asked for.
func (d *Domain) WindowPeer(mem []byte) (IOVA, error) {
	return d.enter(mem, 0, source{peer: true, dmabuf: -1})
}

// source holds what else is known of memory.
type source struct {
	peer   bool
	dmabuf int
	offset int64 // of the memory in dmabuf
}

// enter takes addresses for mem and maps its first bytes.
func (d *Domain) enter(mem []byte, bytes uint64, src source) (IOVA, error) {
	va, size := uintptr(unsafe.Pointer(unsafe.SliceData(mem))), roundUp(uint64(len(mem)))
	if len(mem) == 0 || va%pageBytes != 0 {
		return 0, fmt.Errorf("vfio: map %d bytes at %#x: not whole pages of memory", len(mem), va)
	}
	bytes = roundUp(bytes)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, errDomainClosed
	}
	if m := d.covering(va, size, src.peer); m != nil {
		iova := m.iova + IOVA(va-m.va)
		if bytes > 0 {
			src.offset -= int64(va - m.va)
			if err := d.extend(m, uint64(va-m.va)+bytes, src); err != nil {
				return 0, err
			}
		}
		m.users[span{iova, iova + IOVA(size)}]++
		return iova, nil
	}
	if !d.live {
		return 0, fmt.Errorf("vfio: map %d bytes: no device is attached", len(mem))
	}
	// Where memory is in huge pages, equal low bits let the IOMMU use huge pages too. A BAR is one
	// piece of addresses, and its mapping is usually placed so that this holds there as well.
	align := uint64(pageBytes)
	if size >= hugeBytes {
		align = hugeBytes
	}
	iova, err := d.iovas.take(size, align, uint64(va)&(align-1))
	if err != nil && align > pageBytes {
		iova, err = d.iovas.take(size, pageBytes, 0)
	}
	if err != nil {
		return 0, err
	}
	m := &mapping{va: va, size: size, iova: iova, peer: src.peer,
		users: map[span]int{{iova, iova + IOVA(size)}: 1}}
	if err := d.extend(m, bytes, src); err != nil {
		d.iovas.give(iova, size)
		return 0, err
	}
	i, _ := slices.BinarySearchFunc(d.maps, m, func(a, b *mapping) int {
		return cmp.Or(cmp.Compare(a.va, b.va),
			cmp.Compare(uint64(a.va)+a.size, uint64(b.va)+b.size))
	})
	d.maps = slices.Insert(d.maps, i, m)
	d.byIOVA[iova] = m
	return iova, nil
}

// Extend makes at least the first bytes of a Window reachable, some more than asked for so that a
// window that grows takes few mappings. Of other devices' memory it maps no more than that. It
// never shrinks.
func (d *Domain) Extend(iova IOVA, bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errDomainClosed
	}
	for _, m := range d.maps {
		if off := uint64(iova - m.iova); iova >= m.iova && off < m.size {
			if bytes < 0 || uint64(bytes) > m.size-off {
				return fmt.Errorf("vfio: extend the window at %#x to %d bytes: it has %d", iova,
					bytes, m.size-off)
			}
			want := roundUp(off + uint64(bytes))
			if want <= m.reach {
				return nil
			}
			if !d.live {
				return fmt.Errorf("vfio: extend the window at %#x: no device is attached", iova)
			}
			src := source{dmabuf: -1}
			ample := min(m.size, (max(want, m.reach+m.reach/4)+hugeBytes-1)&^(hugeBytes-1))
			if m.peer {
				ample = want
			}
			if err := d.extend(m, ample, src); err == nil || ample == want {
				return err
			}
			return d.extend(m, want, src) // a limit may leave room for just that
		}
	}
	return fmt.Errorf("vfio: extend the window at %#x: there is none", iova)
}

// extend maps what is missing of a mapping's first bytes.
func (d *Domain) extend(m *mapping, bytes uint64, src source) error {
	if bytes <= m.reach {
		return nil
	}
	more := bytes - m.reach
	if m.peer {
		err := d.space.mapPeer(m.va+uintptr(m.reach), m.iova+IOVA(m.reach), more, src.dmabuf,
			src.offset+int64(m.reach))
		if err != nil {
			return d.m.peerError(d.space.name(), more, err)
		}
		m.reach = bytes
		return nil
	}
	used, limit, err := d.m.k.memlock()
	if err != nil {
		return fmt.Errorf("vfio: the limit of locked memory: %w", err)
	}
	if limit >= 0 && uint64(used)+more > uint64(limit) {
		return d.m.memlockError(more, used, limit)
	}
	if err := d.space.mapMem(m.va+uintptr(m.reach), m.iova+IOVA(m.reach), more); err != nil {
		return d.m.mapError(more, err)
	}
	m.reach = bytes
	return nil
}

func roundUp(n uint64) uint64 { return (n + pageBytes - 1) &^ (pageBytes - 1) }

// covering finds a mapping that holds all of [va, va+size). Another device's memory shares
// no mapping with the CPU's: its addresses were other memory's when that was mapped.
func (d *Domain) covering(va uintptr, size uint64, peer bool) *mapping {
	n, _ := slices.BinarySearchFunc(d.maps, va+1,
		func(m *mapping, v uintptr) int { return cmp.Compare(m.va, v) })
	for i := n - 1; i >= 0; i-- { // maps that start at or below va, the nearest first
		if m := d.maps[i]; !m.stuck && (m.peer || !peer) && uint64(va)+size <= uint64(m.va)+m.size {
			return m
		}
	}
	return nil
}

// Unmap takes back one Map of that address and length. When it returns no device reaches the
// memory.
func (d *Domain) Unmap(iova IOVA, bytes int64) error {
	if bytes <= 0 {
		return fmt.Errorf("vfio: unmap of %d bytes at %#x", bytes, iova)
	}
	key := span{iova, iova + IOVA(roundUp(uint64(bytes)))}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errDomainClosed
	}
	m := d.owner(key)
	if m == nil {
		return fmt.Errorf(
			"vfio: unmap of %d bytes at %#x: no Map of that address and length is left",
			bytes, iova)
	}
	if m.users[key]--; m.users[key] == 0 {
		delete(m.users, key)
	}
	if len(m.users) > 0 {
		return nil
	}
	// One call also takes back a window that was mapped piece by piece.
	if m.reach > 0 {
		if err := d.space.unmapMem(m.iova, m.reach); err != nil && d.live {
			// The kernel may still let devices write here: keep address and memory out of use.
			m.users[key] = 1
			m.stuck = true
			return fmt.Errorf("vfio: unmap %d bytes at %#x: %w", m.reach, m.iova, err)
		}
	}
	d.maps = slices.DeleteFunc(d.maps, func(o *mapping) bool { return o == m })
	delete(d.byIOVA, m.iova)
	d.iovas.give(m.iova, m.size)
	return nil
}

// owner finds the mapping that a Map of exactly key counts in.
func (d *Domain) owner(key span) *mapping {
	if m := d.byIOVA[key.start]; m != nil && m.users[key] > 0 {
		return m
	}
	for _, m := range d.maps {
		if m.iova <= key.start && key.end <= m.iova+IOVA(m.size) {
			if m.users[key] > 0 {
				return m
			}
			return nil
		}
	}
	return nil
}

// ReserveAt keeps Map away from addresses, whether the IOMMU offers them or not. It
// fails where something is mapped or reserved there.
func (d *Domain) ReserveAt(iova IOVA, bytes int64) error {
	if bytes <= 0 || iova%pageBytes != 0 || iova+IOVA(roundUp(uint64(bytes))) < iova {
		return fmt.Errorf("vfio: reserve %d bytes at %#x: want whole pages", bytes, iova)
	}
	want := span{iova, iova + IOVA(roundUp(uint64(bytes)))}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errDomainClosed
	}
	for _, u := range d.used() {
		if u.start < want.end && want.start < u.end {
			return fmt.Errorf("vfio: reserve %d bytes at %#x: %#x to %#x are in use", bytes, iova,
				u.start, u.end-1)
		}
	}
	d.reserved = append(d.reserved, want)
	d.iovas.remove(want)
	return nil
}

// Unreserve takes back a Reserve or ReserveAt of that address and length.
func (d *Domain) Unreserve(iova IOVA, bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errDomainClosed
	}
	i := slices.Index(d.reserved, span{iova, iova + IOVA(roundUp(uint64(bytes)))})
	if i < 0 {
		return fmt.Errorf("vfio: %d bytes at %#x are not reserved", bytes, iova)
	}
	d.reserved = slices.Delete(d.reserved, i, i+1)
	d.iovas.reset(d.known, d.used())
	return nil
}

// used lists what is mapped or reserved.
func (d *Domain) used() []span {
	used := slices.Clone(d.reserved)
	for _, m := range d.maps {
		used = append(used, span{m.iova, m.iova + IOVA(m.size)})
	}
	return used
}

// Ranges are the addresses that the IOMMU offers, known from the first Attach on.
func (d *Domain) Ranges() []Range {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.known)
}

// Backend is "type1" or "iommufd".
func (d *Domain) Backend() string { return d.space.name() }

// Mapped returns how many pieces of memory and bytes are pinned and mapped.
func (d *Domain) Mapped() (pieces int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.maps {
		bytes += int64(m.reach)
	}
	return len(d.maps), bytes
}

// Close ends all mappings. Devices must have been closed; those that the kernel still takes back in
// the background keep their memory pinned until it is done.
func (d *Domain) Close() error {
	d.attaching.Lock()
	defer d.attaching.Unlock()
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	var open []string
	for addr, dev := range d.devices {
		if !dev.closed.Load() {
			open = append(open, addr)
		}
	}
	if len(open) > 0 {
		d.mu.Unlock()
		slices.Sort(open)
		return fmt.Errorf("vfio: close the domain: %s must be closed before",
			strings.Join(open, ", "))
	}
	d.closed = true
	d.maps, d.byIOVA, d.reserved = nil, map[IOVA]*mapping{}, nil
	d.mu.Unlock()
	if err := d.space.close(); err != nil {
		return fmt.Errorf("vfio: close the %s address space: %w", d.space.name(), err)
	}
	return nil
}
