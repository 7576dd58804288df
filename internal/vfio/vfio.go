// Package vfio lets an unprivileged process drive PCI devices: Linux VFIO, with the IOMMU on.
//
// A Domain is one IOMMU address space that all devices of a process share, so that memory is pinned
// and mapped once whatever the number of SSDs. A Device is a function that was bound to vfio-pci and
// that a Domain took; closing it lets the kernel reset it. Numbers and structures are those of the
// kernel's include/uapi/linux/vfio.h and iommufd.h.
package vfio

import "helios/internal/errs"

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
type Domain struct{}

// New opens an address space without devices.
func New(o Options) (*Domain, error) { return nil, errTodo }

// Attach takes the device at a PCI address such as 0000:00:04.0. Errors name the device, its group
// and the next step: class Capability where the machine or rights lack, Refused where somebody
// else has the group, Usage where the device is not bound to vfio-pci.
func (d *Domain) Attach(addr string) (*Device, error) { return nil, errTodo }

// Map pins mem and makes it reachable for every device of the domain, now and later. The address
// must be a multiple of 4096; the length is rounded up to it. The same memory mapped again gets the
// same address and counts; mem[i] is at the returned address plus i.
func (d *Domain) Map(mem []byte) (IOVA, error) { return 0, errTodo }

// Unmap takes back one Map of that address and length.
func (d *Domain) Unmap(iova IOVA, bytes int64) error { return errTodo }

// Reserve returns addresses that no Map will use, aligned to align (a power of two, at least 4096).
func (d *Domain) Reserve(bytes, align int64) (IOVA, error) { return 0, errTodo }

// Ranges are the addresses that the IOMMU offers, known from the first Attach on.
func (d *Domain) Ranges() []Range { return nil }

// Backend is "type1" or "iommufd".
func (d *Domain) Backend() string { return "" }

// Close ends all mappings. Devices must have been closed.
func (d *Domain) Close() error { return errTodo }

// Device is a PCI function that the process drives. Its methods are safe for concurrent use.
type Device struct{}

// Region numbers: BARs 0 to 5, and the configuration space.
const (
	RegionBAR0   = 0
	RegionConfig = 7
)

// Region describes one region of a device.
type Region struct {
	Size        int64
	Read, Write bool
	Mappable    []Span // the parts that MapRegion takes; all of it, or less (sparse mmap, MSI-X)
}

// Span is a part of a region.
type Span struct{ Offset, Size int64 }

// Addr is the PCI address.
func (d *Device) Addr() string { return "" }

// Domain is the address space that the device is in.
func (d *Device) Domain() *Domain { return nil }

// Region asks for a region's size and abilities.
func (d *Device) Region(index int) (Region, error) { return Region{}, errTodo }

// MapRegion maps whole pages of a region; Unmap them with UnmapRegion before Close.
func (d *Device) MapRegion(index int, off, size int64) ([]byte, error) { return nil, errTodo }

// UnmapRegion takes back a mapping of MapRegion.
func (d *Device) UnmapRegion(b []byte) error { return errTodo }

// ReadAt and WriteAt access a region through the kernel (configuration space: RegionConfig).
func (d *Device) ReadAt(index int, b []byte, off int64) error { return errTodo }

// WriteAt is ReadAt's counterpart.
func (d *Device) WriteAt(index int, b []byte, off int64) error { return errTodo }

// EnableDMA sets memory space, bus master and interrupt disable in the command register (bits 1, 2
// and 10), and wakes the device to D0. After Reset it is needed again.
func (d *Device) EnableDMA() error { return errTodo }

// DisableDMA clears bus master: the device reaches no memory any more.
func (d *Device) DisableDMA() error { return errTodo }

// Reset resets the function (FLR where the device has it). When it returns nil no DMA comes any more.
func (d *Device) Reset() error { return errTodo }

// Gone tells whether the device left its bus: its configuration space reads as all ones.
func (d *Device) Gone() bool { return false }

// Asked is closed when the kernel wants the device back (REQ eventfd: hot unplug, or unbinding).
func (d *Device) Asked() <-chan struct{} { return nil }

// Failed is closed when the kernel reported an uncorrectable PCI error (ERR eventfd).
func (d *Device) Failed() <-chan struct{} { return nil }

// Close gives the device back; the kernel stops its DMA and resets it. A device that left its bus
// is closed in the background, since the kernel may take more than a minute.
func (d *Device) Close() error { return errTodo }

var errTodo = errs.New(errs.Capability, "vfio: not in this version yet")
