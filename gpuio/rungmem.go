package gpuio

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// Memory by rung: what SSDs and kernels share. Kernel state (queueState, command, setState) is a
// twin on every rung, so it is not here. The host touches rings on p2p in two places only: it
// clears a completion ring before its queue is created, and proves.

// side allocates what SSDs write to and read from.
type side struct {
	dev    cuda.Device
	peer   cuda.PeerMapper // p2p: maps device memory; nil: CPU memory
	method string          // of peer
}

// exportBytes is the granularity of device memory that is mapped for others: one allocation is one
// export, and the driver rounds small allocations up to such pieces anyway.
const exportBytes = 2 << 20

// dmaArea is memory that one SSD reaches.
type dmaArea struct {
	buf  cuda.Buffer
	peer cuda.PeerMapping // of buf; nil: it is CPU memory
	mem  []byte           // as the CPU reaches it: I/O memory when peer is not nil
	iova nvme.IOVA
}

// onHost reports whether the device's kernels are Go functions of this process.
func (s *side) onHost() bool { return s.dev.Info().Backend == "host" }

// twin is kernel state: the device's memory, where a kernel's look at it does not cross PCIe, and
// the host's copy, which is good while no kernel changes it. The host brings it over by streams. On
// the host device the two are one.
type twin struct{ dev, host cuda.Buffer }

// twin takes zeroed kernel state.
func (s *side) twin(n int64, purpose string) (t twin, err error) {
	if t.host, err = s.alloc(n, purpose); err != nil || s.onHost() {
		t.dev = t.host
		return t, err
	}
	t.dev, err = s.dev.Alloc(cuda.MemDevice, n, purpose)
	return t, err
}

// pull enqueues a copy of n bytes from an offset on to the host, push one to the device.
func (t *twin) pull(st cuda.Stream, off, n int64) error {
	return st.Copy(t.host.Ptr()+cuda.DevicePtr(off), t.dev.Ptr()+cuda.DevicePtr(off), n)
}

func (t *twin) push(st cuda.Stream, off, n int64) error {
	return st.Copy(t.dev.Ptr()+cuda.DevicePtr(off), t.host.Ptr()+cuda.DevicePtr(off), n)
}

func (t *twin) free() error {
	if t.dev == t.host {
		t.dev = nil
	}
	return freeBuffers(&t.dev, &t.host)
}

// alloc takes memory that the host reaches at the device's address: on all rungs but p2p what SSDs
// reach, and the host's copy of kernel state.
func (s *side) alloc(n int64, purpose string) (cuda.Buffer, error) {
	if s.onHost() {
		return s.dev.Alloc(cuda.MemDevice, max(n, 1), purpose)
	}
	b, err := s.dev.Alloc(cuda.MemPinned, max(n, 1), purpose)
	if err == nil && addr(b.Bytes()) != b.Ptr() {
		err = errs.New(errs.Capability,
			"device %s does not use pinned memory at the CPU's address: it lacks unified addressing; use %v host",
			s.dev.Info().Name, errs.Key("device"))
		return nil, errors.Join(err, b.Free())
	}
	return b, err
}

// area takes zeroed memory that an SSD reaches.
func (s *side) area(d *SSD, bytes int, purpose string) (dmaArea, error) {
	page := d.Ctrl.PageBytes()
	if s.peer == nil {
		b, err := s.alloc(int64((bytes+page-1)/page*page), purpose)
		if err != nil {
			return dmaArea{}, err
		}
		iova, err := d.Ctrl.MapDMA(b.Bytes())
		if err != nil {
			return dmaArea{}, errors.Join(fmt.Errorf("nvme %s: map %s: %w", d.name(), purpose, err),
				b.Free())
		}
		return dmaArea{buf: b, mem: b.Bytes(), iova: iova}, nil
	}
	b, err := s.dev.Alloc(cuda.MemDevice, int64(bytes+exportBytes-1)/exportBytes*exportBytes,
		purpose)
	if err != nil {
		return dmaArea{}, err
	}
	m, err := s.peer.MapPeer(b, s.method)
	if err != nil {
		return dmaArea{}, errors.Join(fmt.Errorf("%w; use less %v or a smaller %v, or %v %s", err,
			errs.Key("depth"), errs.Key("coalesce"), errs.Key("memory-rung"), RungPinned), b.Free())
	}
	a := dmaArea{buf: b, peer: m, mem: m.Bytes()}
	if int64(len(a.mem)) < b.Size() {
		return dmaArea{},
			errors.Join(errs.New(errs.Capability,
				"device %s: %s: the mapping of %s has %d of %d bytes", s.dev.Info().Name, s.method,
				purpose, len(a.mem), b.Size()), m.Close(), b.Free())
	}
	fd, off := m.DMABuf()
	a.iova, err = d.Ctrl.MapPeer(a.mem, fd, off)
	if err == nil && uint64(a.iova)%uint64(page) != 0 {
		err = errors.Join(errs.New(errs.Capability,
			"the memory begins at %#x, in the middle of a page of the controller", uint64(a.iova)),
			d.Ctrl.UnmapDMA(a.iova, int64(len(a.mem))))
	}
	if err != nil {
		return dmaArea{}, errors.Join(fmt.Errorf("nvme %s: map %s in memory of device %s: %w",
			d.name(), purpose, s.dev.Info().Name, err), m.Close(), b.Free())
	}
	return a, nil
}

// giveBack gives an area back, which the SSD may not use any more.
func (s *side) giveBack(d *SSD, a *dmaArea) error {
	if a.buf == nil {
		return nil
	}
	if err := d.Ctrl.UnmapDMA(a.iova, int64(len(a.mem))); err != nil {
		return err // the SSD may still write there: better a leak than somebody else's memory
	}
	var err error
	if a.peer != nil {
		err = a.peer.Close()
	}
	err = errors.Join(err, a.buf.Free())
	*a = dmaArea{}
	return err
}

// I/O memory behind a BAR takes plain loads and stores of at most 8 bytes here: no atomics, which
// would be locked bus cycles, and none of the library's copies, which on arm64 use instructions (DC
// ZVA) that fault on device memory. All lengths are multiples of 8.

// ioFill stores v to all of mem, and returns when it has arrived.
func ioFill(mem []byte, v uint64) {
	p := unsafe.Pointer(unsafe.SliceData(mem))
	for off := 0; off+8 <= len(mem); off += 8 {
		*(*uint64)(unsafe.Add(p, off)) = v
	}
	ioDrain(mem)
}

// ioCopy stores src.
func ioCopy(mem, src []byte) {
	p, q := unsafe.Pointer(unsafe.SliceData(mem)), unsafe.Pointer(unsafe.SliceData(src))
	for off := 0; off+8 <= len(src); off += 8 {
		*(*uint64)(unsafe.Add(p, off)) = *(*uint64)(unsafe.Add(q, off))
	}
	ioDrain(mem)
}

// ioRead loads len(dst) bytes.
func ioRead(dst, mem []byte) {
	p, q := unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(mem))
	for off := 0; off+8 <= len(dst); off += 8 {
		*(*uint64)(unsafe.Add(p, off)) = *(*uint64)(unsafe.Add(q, off))
	}
}

var (
	ioFence atomic.Uint32
	ioSeen  atomic.Uint64
)

// ioDrain waits for the arrival of stores: a read-modify-write of ordinary memory empties the CPU's
// write-combining buffers, and a load from the device comes back only after posted writes before it
// (PCIe base specification, 2.4.1). A later doorbell cannot overtake them.
func ioDrain(mem []byte) {
	if len(mem) < 8 {
		return
	}
	ioFence.Add(1)
	ioSeen.Store(*(*uint64)(unsafe.Pointer(&mem[len(mem)&^7-8])))
}
