package bound

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/state"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/vfiobus"
)

// VFIODriver is the kernel driver that hands a device to user space.
const VFIODriver = "vfio-pci"

// Machine is the computer whose SSDs are opened. Tests have one made of files.
type Machine struct {
	Sys    pci.Sys
	Root   func() bool
	Seen   func(addr string) ([]diskuse.Use, error) // uses of a controller's disks; no lock
	Domain func() (Domain, error)
}

// MachineOf returns the machine behind a sysfs.
func MachineOf(sys pci.Sys) Machine {
	return Machine{Sys: sys, Root: func() bool { return os.Geteuid() == 0 }, Domain: openDomain,
		Seen: func(addr string) ([]diskuse.Use, error) { return diskuse.LookAt(sys, addr) }}
}

// Domain is one IOMMU address space with the controllers that a process drives in it.
type Domain interface {
	// Open takes the controller at a PCI address.
	Open(addr string) (nvme.Bus, error)
	// Close ends the address space; the buses must have been closed.
	Close() error
}

type vfioDomain struct{ *vfio.Domain }

func openDomain() (Domain, error) {
	d, err := vfio.New(vfio.Options{})
	if err != nil {
		return nil, err
	}
	return vfioDomain{d}, nil
}

// Open takes the controller at a PCI address.
func (d vfioDomain) Open(addr string) (nvme.Bus, error) {
	dev, err := d.Attach(addr)
	if err != nil {
		return nil, err
	}
	bus, err := vfiobus.Open(dev, vfiobus.Options{})
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return bus, nil
}

// OpenController opens a controller's bus. The holder of its IOMMU group may have just been killed:
// the kernel releases the group some time after the process.
func OpenController(ctx context.Context, d Domain, addr string) (nvme.Bus, error) {
	return Retry(ctx, DyingTimeout,
		func() (nvme.Bus, error) { return d.Open(addr) },
		func(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EAGAIN) })
}

// StillBound finds the controller of a bound SSD, which may have left the machine or vfio-pci
// since; next is what to do then.
func (m *Machine) StillBound(d state.SSD) (dev pci.Device, next string, err error) {
	dev, err = m.Sys.Device(d.PCI)
	if errors.Is(err, pci.ErrNotFound) {
		return dev, fmt.Sprintf(
			"plug it in again and reboot or bind it anew; \"sudo heliosctl unbind-ssds %s\" forgets it",
			d.Name), errs.New(errs.Device, "it is not in the machine any more")
	}
	if err != nil || dev.Driver == VFIODriver {
		return dev, "", err
	}
	return dev, fmt.Sprintf(
			"take it again with \"sudo heliosctl bind-ssds %s\", or forget it with \"sudo heliosctl unbind-ssds %s\"",
			d.PCI, d.Name), errs.New(errs.Device, "vfio-pci has it no more, but %s",
			map[bool]string{true: "nobody", false: "driver " + dev.Driver}[dev.Driver == ""])
}
