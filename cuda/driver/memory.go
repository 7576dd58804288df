package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/cuda"
	"helios/cuda/internal/region"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

const pageBytes = 4096

// origin is the way in which a buffer was made, and so the way in which it is freed.
type origin uint8

const (
	fromEmpty    origin = iota
	fromDevice          // cuMemAlloc
	fromPinned          // hostmem, registered
	fromRegister        // the caller's memory
	fromIO              // the caller's I/O memory
	fromReserve         // cuMemAddressReserve, with memory mapped as it grows
	fromShared          // another device's pinned memory
)

type buffer struct {
	d       *Device
	ptr     devicePtr
	base    devicePtr // what cuMemAlloc returned
	size    int64
	mem     []byte // the CPU's view
	origin  origin
	purpose string
	counted bool // in usage once kept
	kept    bool
	region  *region.Region
	pins    []*pin
	grows   *growth // of fromReserve
	freed   atomic.Bool
}

// pin is a range of whole pages of CPU memory that the driver has registered. The driver takes no
// page twice, but buffers that we are asked to register may share one, or lie in each other.
type pin struct {
	lo, hi uint64
	refs   int // buffers
	gone   bool
	io     bool   // another device's registers
	dev    uint64 // the GPU's address of them
}

func (b *buffer) Ptr() cuda.DevicePtr { return cuda.DevicePtr(b.ptr) }
func (b *buffer) Size() int64         { return b.size }
func (b *buffer) Purpose() string     { return b.purpose }

func (b *buffer) Kind() cuda.MemKind {
	if b.mem != nil {
		return cuda.MemPinned
	}
	return cuda.MemDevice
}

// Bytes is nil for memory of the GPU, also where the fake driver could show it.
func (b *buffer) Bytes() []byte {
	if b.freed.Load() {
		return nil
	}
	return b.mem
}

// Free implements cuda.Buffer. It waits for all work that is enqueued on the device, as cuMemFree
// does by itself and cuMemUnmap does not; but no longer than CloseTimeout, and then the memory
// stays with the context. Memory that is mapped for other devices is not freed.
func (b *buffer) Free() error {
	if b.freed.Swap(true) {
		return nil
	}
	if err := b.d.peers.busy(b); err != nil { // after the swap, for MapPeer looks at it last
		b.freed.Store(false)
		return err
	}
	d := b.d
	var busy error
	if b.size > 0 {
		busy = d.quiet()
	}
	d.memMu.Lock()
	delete(d.buffers, b)
	if b.kept && b.counted {
		d.countLocked(b.purpose, -b.size)
	}
	if b.region != nil {
		d.regions.Drop(b.region, b.origin != fromRegister && b.origin != fromIO &&
			b.origin != fromShared)
	}
	var err error
	if busy == nil && len(b.pins) > 0 && d.enterToFree() { // else they went with the context
		err = d.unpin(b)
		d.leave()
	}
	d.memMu.Unlock()
	if err = errors.Join(busy, err, b.giveBack(busy == nil)); err != nil {
		return fmt.Errorf("device %s: free %s: %w", d.info.Name, b.purpose, err)
	}
	return nil
}

// giveBack frees the memory. While kernels run (idle is false) nothing is pulled from under them.
func (b *buffer) giveBack(idle bool) (err error) {
	switch d := b.d; {
	case b.origin == fromReserve:
		return b.unreserve(idle)
	case !idle:
		return nil
	case b.origin == fromDevice && d.enterToFree():
		// Not under the lock: it may wait for kernels, and one of those for another goroutine that
		// takes memory.
		err = d.freed("cuMemFree_v2", d.api.MemFree(b.base))
		d.leave()
	case b.origin == fromPinned:
		err = hostmem.Free(b.mem)
	}
	return err
}

// Alloc implements cuda.Device. Size 0 gives a buffer without memory, whose Ptr is 0.
func (d *Device) Alloc(kind cuda.MemKind, size int64, purpose string) (cuda.Buffer, error) {
	if kind != cuda.MemDevice && kind != cuda.MemPinned {
		return nil, fmt.Errorf("device %s: allocate %s: unknown kind of memory %d", d.info.Name,
			purpose, kind)
	}
	if size < 0 {
		return nil, fmt.Errorf("device %s: allocate %s: negative size %d", d.info.Name,
			purpose, size)
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	b := &buffer{d: d, size: size, purpose: purpose, counted: size > 0}
	var err error
	switch {
	case size == 0:
		if kind == cuda.MemPinned {
			b.mem = []byte{}
		}
	case kind == cuda.MemPinned:
		err = d.allocPinned(b)
	default:
		err = d.allocDevice(b)
	}
	if err != nil {
		return nil, fmt.Errorf("device %s: allocate %s: %w", d.info.Name, purpose, err)
	}
	if err := d.keep(b); err != nil {
		return nil, err
	}
	return b, nil
}

// keep counts a buffer among the device's, unless the device closes: then it frees it.
func (d *Device) keep(b *buffer) error {
	d.memMu.Lock()
	late := d.closing.Load()
	if !late {
		d.keepLocked(b)
	}
	d.memMu.Unlock()
	if late {
		return errors.Join(d.errClosed(), b.Free())
	}
	return nil
}

// keepLocked counts a buffer among the device's. d.memMu is held.
func (d *Device) keepLocked(b *buffer) {
	d.buffers[b] = struct{}{}
	b.kept = true
	if b.counted {
		d.countLocked(b.purpose, b.size)
	}
}

// countLocked adds to what a purpose uses. d.memMu is held.
func (d *Device) countLocked(purpose string, bytes int64) {
	if d.usage[purpose] += bytes; d.usage[purpose] == 0 {
		delete(d.usage, purpose)
	}
}

// exact is the unit in which GPUs give memory: small allocations are rounded up to 2 MiB.
const exact = 2 << 20

// allocDevice takes memory of the GPU. cuMemAlloc aligns to 256 bytes ("any kind of variable"), and
// leaves in the memory what was there.
func (d *Device) allocDevice(b *buffer) error {
	b.origin = fromDevice
	if b.size > d.info.MemTotal {
		return d.outOfMemory(b.purpose, b.size)
	}
	whole := (b.size + pageBytes - 1) &^ (pageBytes - 1)
	if err := d.enter(); err != nil {
		return err
	}
	// Whole pages of ours within it, without giving anything back: cuMemFree waits for all kernels.
	// Large allocations are pages of 2 MiB, which have room at their end or begin where ours do.
	n := whole
	if n%exact != 0 {
		n += pageBytes
	}
	p, r := d.api.MemAlloc(n)
	if r == success && p%pageBytes != 0 && n == whole {
		d.api.MemFree(p)
		p, r = d.api.MemAlloc(whole + pageBytes)
	}
	d.leave()
	switch r {
	case success:
	case errOutOfMemory:
		return fmt.Errorf("%w (%w)", d.outOfMemory(b.purpose, b.size),
			callError(d.api, "cuMemAlloc_v2", r))
	default:
		return d.failed("cuMemAlloc_v2", r)
	}
	b.base, b.ptr = p, (p+pageBytes-1)&^(pageBytes-1)
	err := d.house.zero(d, b.ptr, whole)
	if err == nil {
		b.region, _, err = d.regions.Add(uint64(b.ptr), uint64(b.ptr)+uint64(b.size), b.purpose)
	}
	// cuMemFree waits for all that runs. Behind a kernel that does not end the memory stays with
	// the context.
	if err != nil && d.quiet() == nil && d.enterToFree() {
		d.api.MemFree(p)
		d.leave()
	}
	return err
}

// outOfMemory reports the memory that would have fitted, and what others hold. Free memory in
// pieces counts as less than the request, for it did not fit.
func (d *Device) outOfMemory(purpose string, want int64) error {
	free, total, err := d.FreeMemory()
	if err != nil {
		return err
	}
	own := int64(0)
	d.memMu.Lock()
	for b := range d.buffers {
		switch b.origin {
		case fromDevice:
			own += b.size
		case fromReserve:
			own += b.grows.mapped.Load()
		}
	}
	d.memMu.Unlock()
	// A GPU's driver holds some 500 MB beside our buffers; other processes matter when they hold
	// more than a little.
	others := total - free - own
	if others < total/16 {
		others = 0
	}
	return errs.With(errs.Capability, &cuda.OutOfMemoryError{Device: d.info.Name, Purpose: purpose,
		Want: want, Free: max(min(free, want-1), 0), Others: others})
}

// allocPinned takes CPU memory of our own and registers it. cuMemHostAlloc's would be a mapping of
// the driver's, which VFIO cannot map for an SSD's DMA.
func (d *Device) allocPinned(b *buffer) error {
	mem, err := hostmem.Alloc(b.size, b.purpose)
	if err != nil {
		return err
	}
	b.mem, b.origin = mem, fromPinned
	d.memMu.Lock()
	err = d.pin(b, registerPortable|registerDeviceMap)
	d.memMu.Unlock()
	if err != nil {
		return freeAnd(mem, err)
	}
	return nil
}

// pin makes b.mem known to the driver, page by page where it is not yet, and enters it into the
// table. d.memMu is held.
func (d *Device) pin(b *buffer, flags uint32) (err error) {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	defer func() {
		if err != nil {
			err = errors.Join(err, d.unpin(b))
		}
	}()
	lo := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b.mem))))
	hi, seen := lo+uint64(len(b.mem)), lo
	for page, end := lo&^(pageBytes-1), (hi+pageBytes-1)&^(pageBytes-1); page < end; {
		// The pin that holds at, or the gap up to the next one.
		i := sort.Search(len(d.pins), func(i int) bool { return d.pins[i].hi > page })
		if i == len(d.pins) || d.pins[i].lo > page {
			to := end
			if i < len(d.pins) {
				to = min(to, d.pins[i].lo)
			}
			dev, err := d.registerPages(page, to, flags)
			if err != nil {
				return err
			}
			seen = dev
			d.pins = slices.Insert(d.pins, i, &pin{lo: page, hi: to,
				io: flags&registerIOMemory != 0, dev: dev})
		} else if flags&registerIOMemory != 0 {
			// by another reader of the same SSD, or it is an error
			if p := d.pins[i]; !p.io || p.lo != page || p.hi != end {
				return fmt.Errorf("memory for %s is registered already", b.purpose)
			}
			seen = d.pins[i].dev
		}
		p := d.pins[i]
		p.refs++
		b.pins = append(b.pins, p)
		page = p.hi
	}
	if len(b.pins) > 1 {
		d.split.Store(true)
	}
	if flags&registerIOMemory != 0 { // whole pages in one registration
		lo, hi = seen, seen+uint64(len(b.mem))
	}
	b.ptr = devicePtr(lo)
	b.region, b.counted, err = d.regions.Add(lo, hi, b.purpose)
	return err
}

// registerPages returns the address that the GPU has for them. For RAM it must be the CPU's, as it
// is wherever usable found CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
func (d *Device) registerPages(lo, hi uint64, flags uint32) (uint64, error) {
	p := pointer(lo)
	r := d.api.MemHostRegister(p, int64(hi-lo), flags)
	switch {
	case r == success:
	case r == errOutOfMemory && flags&registerIOMemory == 0:
		// It is the CPU's memory that is short: no *cuda.OutOfMemoryError, which is of the GPU's.
		return 0, errs.With(errs.Capability,
			fmt.Errorf("%d bytes of CPU memory cannot be pinned: %w; lower the budgets", hi-lo,
				callError(d.api, "cuMemHostRegister_v2", r)))
	case flags&registerIOMemory != 0:
		return 0, d.refused("cuMemHostRegister_v2", r)
	default:
		return 0, d.unregistered(r)
	}
	dev, r := d.api.MemHostGetDevicePointer(p)
	var err error
	if flags&registerIOMemory != 0 && r != success {
		err = d.refused("cuMemHostGetDevicePointer_v2", r)
	} else {
		err = d.check("cuMemHostGetDevicePointer_v2", r)
	}
	if err == nil && uint64(dev) != lo && flags&registerIOMemory == 0 {
		err = errs.New(errs.Capability,
			"CPU address %#x is %#x to the GPU; Helios needs one address for both", lo, uint64(dev))
	}
	if err != nil {
		d.api.MemHostUnregister(p)
	}
	return uint64(dev), err
}

// pointer is an address of memory that is not Go's; going through memory keeps vet from taking it
// for an object of the heap.
func pointer(a uint64) unsafe.Pointer {
	u := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&u))
}

// unpin ends a buffer's hold on its pages. With an allocation of ours its pages go, whoever else
// has registered a part of it. d.memMu is held, and it runs within enter.
func (d *Device) unpin(b *buffer) (err error) {
	for _, p := range b.pins {
		if p.refs--; p.gone || p.refs > 0 && b.origin != fromPinned {
			continue
		}
		p.gone = true
		d.pins = slices.DeleteFunc(d.pins, func(x *pin) bool { return x == p })
		err = errors.Join(err, d.freed("cuMemHostUnregister",
			d.api.MemHostUnregister(pointer(p.lo))))
	}
	b.pins = nil
	return err
}

// pieces calls f for the parts of a copy that lie in one registration each, on either side: the
// driver refuses a copy across two ("pointer … not in one allocation" is CUDA_ERROR_INVALID_VALUE).
func (d *Device) pieces(dst, src, n uint64, f func(offset, n uint64) error) error {
	if !d.split.Load() {
		return f(0, n)
	}
	d.memMu.Lock()
	edges := make([]uint64, 0, 2*len(d.pins))
	for _, p := range d.pins {
		edges = append(edges, p.lo, p.hi)
	}
	d.memMu.Unlock()
	for offset := uint64(0); offset < n; {
		step := n - offset
		for _, side := range []uint64{dst + offset, src + offset} {
			for _, e := range edges {
				if e > side {
					step = min(step, e-side)
				}
			}
		}
		if err := f(offset, step); err != nil {
			return err
		}
		offset += step
	}
	return nil
}

// Register implements cuda.Device. Memory inside a live buffer may be registered again; it is then
// not counted twice.
func (d *Device) Register(mem []byte, purpose string) (cuda.Buffer, error) {
	_, err := region.HostMemory(d.info.Name, mem, purpose)
	if err != nil {
		return nil, err
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	b := &buffer{d: d, size: int64(len(mem)), mem: mem, origin: fromRegister, purpose: purpose}
	d.memMu.Lock()
	defer d.memMu.Unlock()
	if err := d.pin(b, registerPortable|registerDeviceMap); err != nil {
		return nil, fmt.Errorf("device %s: register %s: %w", d.info.Name, purpose, err)
	}
	d.keepLocked(b)
	return b, nil
}

// Share implements cuda.Sharer. Our pinned memory is registered as portable, so all contexts take
// it as such, at the CPU's addresses (see registerPages).
func (d *Device) Share(other cuda.Buffer) (cuda.Buffer, error) {
	mem := other.Bytes()
	if len(mem) == 0 {
		return nil, fmt.Errorf("device %s: share %s: no memory", d.info.Name, other.Purpose())
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	lo := uint64(other.Ptr())
	b := &buffer{d: d, ptr: devicePtr(lo), size: int64(len(mem)), mem: mem, origin: fromShared,
		purpose: other.Purpose()}
	d.memMu.Lock()
	defer d.memMu.Unlock()
	var err error
	if b.region, _, err = d.regions.Add(lo, lo+uint64(len(mem)), b.purpose); err != nil {
		return nil, fmt.Errorf("device %s: share %s: %w", d.info.Name, b.purpose, err)
	}
	d.keepLocked(b)
	return b, nil
}

// RegisterIO implements cuda.IORegistrar.
func (d *Device) RegisterIO(mem []byte, purpose string) (cuda.Buffer, error) {
	lo := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	if len(mem) == 0 || lo%pageBytes != 0 || len(mem)%pageBytes != 0 {
		return nil,
			fmt.Errorf("device %s: register %s: %d bytes of I/O memory at %#x: want whole pages",
				d.info.Name, purpose, len(mem), lo)
	}
	if err := d.accepting(); err != nil {
		return nil, err
	}
	// A mapping of VFIO's gets its pages at the first access, and the driver makes none.
	for i := 0; i < len(mem); i += pageBytes {
		atomic.LoadUint32((*uint32)(unsafe.Pointer(&mem[i])))
	}
	b := &buffer{d: d, size: int64(len(mem)), mem: mem, origin: fromIO, purpose: purpose,
		counted: true}
	d.memMu.Lock()
	defer d.memMu.Unlock()
	if err := d.pin(b, registerPortable|registerDeviceMap|registerIOMemory); err != nil {
		err = fmt.Errorf("device %s: register I/O memory %s: %w", d.info.Name, purpose, err)
		var ce *CallError
		if errors.As(err, &ce) && d.lost.Load() == nil {
			err = errs.With(errs.Capability,
				fmt.Errorf(
					"%w; the driver maps other devices' memory for a process with CAP_SYS_ADMIN, or for all with the option NVreg_RegistryDwords=\"PeerMappingOverride=1;\" of its kernel module",
					err))
		}
		return nil, err
	}
	d.keepLocked(b)
	return b, nil
}

// MemUsage implements cuda.Device.
func (d *Device) MemUsage() map[string]int64 {
	d.memMu.Lock()
	defer d.memMu.Unlock()
	return maps.Clone(d.usage)
}

// housekeeper clears new memory, on a stream of its own.
type housekeeper struct {
	mu sync.Mutex
	s  stream
	e  event
}

func (h *housekeeper) init(d *Device) error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.leave()
	var r result
	if h.s, r = d.api.StreamCreateWithPriority(streamNonBlocking, d.priority.least); r != success {
		return d.failed("cuStreamCreateWithPriority", r)
	}
	var err error
	h.e, err = d.events.take()
	return err
}

// zeroLimit bounds the wait for a memset, which runs at the memory's bandwidth.
const zeroLimit = time.Minute

func (h *housekeeper) zero(d *Device, p devicePtr, n int64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := d.enter(); err != nil {
		return err
	}
	err := d.check("cuMemsetD8Async", d.api.MemsetD8Async(p, 0, n, h.s))
	if err == nil {
		err = d.check("cuEventRecord", d.api.EventRecord(h.e, h.s))
	}
	d.leave()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), zeroLimit)
	defer cancel()
	var b backoff
	for {
		if err := d.enter(); err != nil {
			return err
		}
		r := d.api.EventQuery(h.e)
		d.leave()
		if r == success {
			return nil
		}
		if r != errNotReady {
			return d.failed("cuEventQuery", r)
		}
		if b.looks > quickLooks {
			if err := d.watch(); err != nil {
				return err
			}
		}
		if b.pause(ctx) != nil {
			return fmt.Errorf("clearing %d bytes took more than %v: kernels hold the GPU", n,
				zeroLimit)
		}
	}
}

// done reports whether nothing is being cleared, as far as the driver knows.
func (h *housekeeper) done(d *Device) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if d.enter() != nil {
		return true // nothing runs on a lost device
	}
	defer d.leave()
	return d.api.StreamQuery(h.s) != errNotReady
}

func (h *housekeeper) close(d *Device) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.e != 0 {
		d.events.give(h.e)
	}
	if h.s != 0 && d.enterToFree() {
		d.api.StreamDestroy(h.s)
		d.leave()
	}
	h.s, h.e = 0, 0
}
