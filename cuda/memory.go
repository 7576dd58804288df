package cuda

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"unsafe"

	"helios/cuda/internal/region"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// OutOfMemoryError names the use that asked a device for memory, its size, and the free bytes.
type OutOfMemoryError struct {
	Device     string
	Purpose    string
	Want, Free int64 // bytes
	// Others counts the bytes held beside this process's buffers, by other processes and by the
	// device's own software; 0 where nobody counts it.
	Others int64
}

func (e *OutOfMemoryError) Error() string {
	others := ""
	if e.Others > 0 {
		others = fmt.Sprintf(
			", %d bytes held by other processes and the driver (see \"nvidia-smi\")", e.Others)
	}
	return fmt.Sprintf(
		"device %s: out of memory for %s: %d bytes wanted, %d bytes free%s; lower the budgets",
		e.Device, e.Purpose, e.Want, e.Free, others)
}

// hostBuffer is memory of a host device.
type hostBuffer struct {
	h       *Host
	mem     []byte
	kind    MemKind
	purpose string
	owned   bool // from hostmem, as against registered
	counted bool // in the device's usage
	region  *region.Region
	freed   atomic.Bool
}

func (b *hostBuffer) Ptr() DevicePtr {
	if len(b.mem) == 0 {
		return 0
	}
	return DevicePtr(uintptr(unsafe.Pointer(unsafe.SliceData(b.mem))))
}
func (b *hostBuffer) Size() int64     { return int64(len(b.mem)) }
func (b *hostBuffer) Kind() MemKind   { return b.kind }
func (b *hostBuffer) Purpose() string { return b.purpose }

func (b *hostBuffer) Bytes() []byte {
	if b.freed.Load() {
		return nil
	}
	return b.mem
}

func (b *hostBuffer) Free() error {
	if b.freed.Swap(true) {
		return nil
	}
	h := b.h
	h.memMu.Lock()
	delete(h.buffers, b)
	if b.counted {
		if h.usage[b.purpose] -= b.Size(); h.usage[b.purpose] == 0 {
			delete(h.usage, b.purpose)
		}
	}
	if b.kind == MemDevice {
		h.devBytes -= b.Size()
	}
	h.memMu.Unlock()
	if b.region != nil {
		h.regions.Drop(b.region, b.owned)
	}
	if !b.owned {
		return nil
	}
	if err := hostmem.Free(b.mem); err != nil {
		return fmt.Errorf("device %s: %w", h.info.Name, err)
	}
	return nil
}

// Alloc implements Device. Size 0 gives a buffer without memory, whose Ptr is 0.
func (h *Host) Alloc(kind MemKind, size int64, purpose string) (Buffer, error) {
	if kind != MemDevice && kind != MemPinned {
		return nil, fmt.Errorf("device %s: allocate %s: unknown kind of memory %d", h.info.Name,
			purpose, kind)
	}
	if size < 0 {
		return nil, fmt.Errorf("device %s: allocate %s: negative size %d", h.info.Name,
			purpose, size)
	}
	// Reserve before allocating: two callers must not pass the limit together.
	h.memMu.Lock()
	if h.closed.Load() {
		h.memMu.Unlock()
		return nil, h.errClosed()
	}
	if kind == MemDevice {
		if free := h.info.MemTotal - h.devBytes; size > free {
			h.memMu.Unlock()
			return nil, errs.With(errs.Capability, &OutOfMemoryError{Device: h.info.Name,
				Purpose: purpose, Want: size, Free: max(free, 0)})
		}
		h.devBytes += size
	}
	h.memMu.Unlock()
	b := &hostBuffer{h: h, kind: kind, purpose: purpose, owned: true, counted: true}
	mem, err := hostmem.Alloc(size, purpose)
	if err == nil && size > 0 {
		lo := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
		b.region, _, err = h.regions.Add(lo, lo+uint64(size), purpose)
	}
	h.memMu.Lock()
	defer h.memMu.Unlock()
	if err != nil {
		if kind == MemDevice {
			h.devBytes -= size
		}
		return nil, fmt.Errorf("device %s: %w", h.info.Name, err)
	}
	b.mem = mem
	h.buffers[b] = struct{}{}
	if size > 0 {
		h.usage[purpose] += size
	}
	return b, nil
}

// Register implements Device. Memory inside a live buffer may be registered again; it is then
// not counted twice.
func (h *Host) Register(mem []byte, purpose string) (Buffer, error) {
	lo, err := region.HostMemory(h.info.Name, mem, purpose)
	if err != nil {
		return nil, err
	}
	if h.closed.Load() {
		return nil, h.errClosed()
	}
	r, fresh, err := h.regions.Add(lo, lo+uint64(len(mem)), purpose)
	if err != nil {
		return nil, fmt.Errorf("device %s: register: %w", h.info.Name, err)
	}
	b := &hostBuffer{h: h, mem: mem, kind: MemPinned, purpose: purpose, region: r, counted: fresh}
	h.memMu.Lock()
	defer h.memMu.Unlock()
	h.buffers[b] = struct{}{}
	if b.counted {
		h.usage[purpose] += b.Size()
	}
	return b, nil
}

// MemUsage implements Device.
func (h *Host) MemUsage() map[string]int64 {
	h.memMu.Lock()
	defer h.memMu.Unlock()
	return maps.Clone(h.usage)
}

// open host devices, for View.
var openHosts struct {
	sync.Mutex
	list atomic.Pointer[[]*Host]
}

func setOpen(h *Host, open bool) {
	openHosts.Lock()
	defer openHosts.Unlock()
	var n []*Host
	if p := openHosts.list.Load(); p != nil {
		for _, x := range *p {
			if x != h {
				n = append(n, x)
			}
		}
	}
	if open {
		n = append(n, h)
	}
	openHosts.list.Store(&n)
}

// View is a host kernel's view of n elements of T at p: device memory as a slice. It panics, which
// fails the kernel, when p is nil or not aligned for T, or when the elements pass the end of the
// buffer that p lies in. T must hold no Go pointers.
func View[T any](p DevicePtr, n int64) []T {
	if n == 0 {
		return nil
	}
	var t T
	size := uint64(unsafe.Sizeof(t))
	if p == 0 || n < 0 || uint64(p)%uint64(unsafe.Alignof(t)) != 0 {
		panic(fmt.Sprintf("view of %d elements of %T at address %#x: nil, negative or not aligned",
			n, t, uint64(p)))
	}
	if list := openHosts.list.Load(); list != nil {
		for _, h := range *list {
			if r := h.regions.Find(uint64(p)); r != nil {
				if size != 0 && uint64(n) > (r.Hi-uint64(p))/size {
					panic(
						fmt.Sprintf(
							"view of %d elements of %T at offset %d of %s (%d bytes): out of bounds",
							n, t, uint64(p)-r.Lo, r.Purpose, r.Hi-r.Lo))
				}
				break
			}
		}
	}
	return unsafe.Slice((*T)(pointer(p)), n)
}

// pointer turns a device address into a Go pointer. The address is of mapped memory that the
// garbage collector does not know, so none of unsafe.Pointer's rules about objects that move
// or vanish applies; going through memory keeps vet from assuming that they do.
func pointer(p DevicePtr) unsafe.Pointer {
	u := uintptr(p)
	return *(*unsafe.Pointer)(unsafe.Pointer(&u))
}
