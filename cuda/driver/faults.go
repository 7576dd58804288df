package driver

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"helios/internal/hostmem"
)

// hxFault is hx_fault of cuda/kernels/device.h.
type hxFault struct {
	Seq      uint64
	Code     uint32
	Block    uint32
	A, B, C  uint64
	Mirror   uint64
	Lock     uint64
	Reserved uint64
}

const faultBytes = 64

const _ = -(unsafe.Sizeof(hxFault{}) ^ faultBytes)
const _ = -(unsafe.Offsetof(hxFault{}.Mirror) ^ 40)

// seq is the number of the launch that failed, or 0. The kernel writes it last, with release.
func (f *hxFault) seq() uint64 { return atomic.LoadUint64(&f.Seq) } // litmus: fault-look

// faultSlot is the place where one stream's kernels report failures.
type faultSlot struct {
	dev    devicePtr // the record that kernels look at
	mirror *hxFault  // its copy in CPU memory
	first  devicePtr // what the record is before the first launch: CPU memory, as the GPU sees it
}

// faultPool gives out slots. They come in slabs, for an allocation each would cost the driver's
// granularity.
type faultPool struct {
	mu    sync.Mutex
	slabs []faultSlab
	spare []*faultSlot
}

type faultSlab struct {
	dev  devicePtr
	host []byte
}

const slabSlots = 64

func (p *faultPool) take(d *Device) (*faultSlot, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.spare) == 0 {
		if err := p.grow(d); err != nil {
			return nil, err
		}
	}
	s := p.spare[len(p.spare)-1]
	p.spare = p.spare[:len(p.spare)-1]
	*s.mirror = hxFault{}
	return s, nil
}

func (p *faultPool) give(s *faultSlot) {
	p.mu.Lock()
	p.spare = append(p.spare, s)
	p.mu.Unlock()
}

func (p *faultPool) grow(d *Device) (err error) {
	host, err := hostmem.Alloc(2*slabSlots*faultBytes, "kernel faults")
	if err != nil {
		return err
	}
	if err := d.enter(); err != nil {
		return freeAnd(host, err)
	}
	defer d.leave()
	base := unsafe.Pointer(unsafe.SliceData(host))
	if r := d.api.MemHostRegister(base, int64(len(host)),
		registerPortable|registerDeviceMap); r != success {
		return freeAnd(host, d.unregistered(r))
	}
	seen, r := d.api.MemHostGetDevicePointer(base)
	if r != success {
		err = d.failed("cuMemHostGetDevicePointer_v2", r)
	}
	var dev devicePtr
	if err == nil {
		if dev, r = d.api.MemAlloc(slabSlots * faultBytes); r != success {
			err = d.failed("cuMemAlloc_v2", r)
		}
	}
	if err != nil {
		d.api.MemHostUnregister(base)
		return freeAnd(host, err)
	}
	p.slabs = append(p.slabs, faultSlab{dev, host})
	lines := hostmem.View[hxFault](host)
	for i := range slabSlots {
		lines[slabSlots+i].Mirror = uint64(seen) + uint64(i)*faultBytes
		p.spare = append(p.spare, &faultSlot{
			dev:    dev + devicePtr(i)*faultBytes,
			mirror: &lines[i],
			first:  seen + devicePtr(slabSlots+i)*faultBytes,
		})
	}
	return nil
}

func freeAnd(host []byte, err error) error {
	if ferr := hostmem.Free(host); ferr != nil {
		return fmt.Errorf("%w; %w", err, ferr)
	}
	return err
}

// close frees the slabs. On a lost device the context's end frees what the GPU holds.
func (p *faultPool) close(d *Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	usable := d.enterToFree()
	for _, s := range p.slabs {
		if usable {
			d.api.MemFree(s.dev)
			d.api.MemHostUnregister(unsafe.Pointer(unsafe.SliceData(s.host)))
		}
	}
	if usable {
		d.leave()
	}
	for _, s := range p.slabs {
		_ = hostmem.Free(s.host) // it is ours and whole: there is nothing to say
	}
	p.slabs, p.spare = nil, nil
}
