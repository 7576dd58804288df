package vfio

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/pci"
)

// addressSpace is a way to the kernel's IOMMU: type1 and iommufd. A Domain serialises its calls,
// but for detach, which may come from the background at any time.
type addressSpace interface {
	name() string
	// attach opens a device inside the space. fresh says that the space has no mappings because
	// this is its first device, or the first after it had none.
	attach(dev pci.Device) (fd int, fresh bool, err error)
	// detach closes the device. When it returns the kernel has given the device back.
	detach(dev pci.Device, fd int) error
	// last reports whether a detach of dev would end the mappings.
	last(dev pci.Device) bool
	// empty reports whether the mappings have ended with the last device.
	empty() bool
	// ranges is known while there is a device.
	ranges() ([]Range, error)
	mapMem(va uintptr, iova IOVA, size uint64) error
	// mapPeer maps another device's memory, by its addresses or by its export.
	mapPeer(va uintptr, iova IOVA, size uint64, dmabuf int, offset int64) error
	unmapMem(iova IOVA, size uint64) error
	close() error
}

const (
	setupHint   = `run "sudo heliosctl vfio-setup setup", then log in again`
	statusHint  = `"heliosctl vfio-setup status" describes what is missing`
	bindHint    = `heliosctl bind-ssds`
	vfioDriver  = "vfio-pci"
	deviceNodes = "/dev/vfio/"
)

// findDevice is the sysfs view of a device that vfio-pci must have.
func (m machine) findDevice(addr string) (pci.Device, error) {
	dev, err := m.sys().Device(addr)
	if errors.Is(err, pci.ErrNotFound) {
		return dev, errs.New(errs.Device, "vfio %s: it is not in the machine any more: %w", addr,
			pci.ErrNotFound)
	}
	if err != nil {
		return dev, fmt.Errorf("vfio %s: %w", addr, err)
	}
	if dev.Driver != vfioDriver {
		has := "no kernel driver"
		if dev.Driver != "" {
			has = "the kernel driver " + dev.Driver
		}
		return dev, errs.New(errs.Usage, `vfio %s: %s has it, not %s; run "%s %s" as root`,
			dev.Addr, has, vfioDriver, bindHint, dev.Addr)
	}
	if dev.NoIOMMU {
		return dev, errs.New(errs.Capability,
			"vfio %s: its group is of VFIO's mode without an IOMMU, which protects no memory and is not used; %s",
			dev.Addr, statusHint)
	}
	if dev.Group < 0 {
		return dev, errs.New(errs.Capability, "vfio %s: no IOMMU group, so the IOMMU is off; %s",
			dev.Addr, statusHint)
	}
	return dev, nil
}

// noRemapping is the error of both backends where the kernel takes no device since its IOMMU does
// not check interrupts: a device could raise any of them by a write.
func noRemapping(dev pci.Device, err error) error {
	return errs.New(errs.Capability,
		"vfio %s: the kernel refuses the IOMMU: %w: this machine has no interrupt remapping; %s",
		dev.Addr, err, remappingHint)
}

// groupText names every device of a group with its driver.
func (m machine) groupText(group int) string {
	members, err := m.sys().GroupMembers(group)
	if err != nil || len(members) == 0 {
		return fmt.Sprintf("group %d", group)
	}
	var parts []string
	for _, d := range members {
		driver := d.Driver
		if driver == "" {
			driver = "no driver"
		}
		parts = append(parts, fmt.Sprintf("%s (%s)", d.Addr, driver))
	}
	return fmt.Sprintf("group %d: %s", group, strings.Join(parts, ", "))
}

// foreign lists the devices of a group that other drivers have.
func (m machine) foreign(group int) []string {
	members, err := m.sys().GroupMembers(group)
	if err != nil {
		return nil
	}
	var out []string
	for _, d := range members {
		if d.Driver != "" && d.Driver != vfioDriver {
			out = append(out, d.Addr)
		}
	}
	slices.Sort(out)
	return out
}

// notViable explains a group that cannot be had because another kernel driver works in it.
func (m machine) notViable(dev pci.Device, cause error) error {
	next := "give every device of the group to vfio-pci, or put the SSD in another slot"
	if f := m.foreign(dev.Group); len(f) > 0 {
		next = fmt.Sprintf(`run "%s %s" if they can be spared, or put the SSD in another slot`,
			bindHint, strings.Join(f, " "))
	}
	if cause == nil {
		return errs.New(errs.Refused,
			"vfio %s: its IOMMU group is shared with devices that the kernel uses (%s); %s",
			dev.Addr, m.groupText(dev.Group), next)
	}
	return errs.New(errs.Refused,
		"vfio %s: its IOMMU group is shared with devices that the kernel uses (%s): %w; %s",
		dev.Addr, m.groupText(dev.Group), cause, next)
}

// heldBy is " (held by …)" where the holder of a node can be seen.
func (m machine) heldBy(node string) string {
	// Processes that cannot be seen are left out of an error about something else.
	openers, _ := diskuse.Openers(m.sys(), node)
	var who []string
	for _, o := range openers {
		who = append(who, fmt.Sprintf("%s, process %d", o.Name, o.PID))
	}
	if len(who) == 0 {
		return ""
	}
	return " (held by " + strings.Join(who, "; ") + ")"
}

// openError explains why a VFIO device node did not open.
func (m machine) openError(dev pci.Device, node string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return errs.New(errs.Capability, "vfio %s: %s is missing: %w; %s", dev.Addr, node, err,
			statusHint)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return errs.New(errs.Capability,
			"vfio %s: no right to open %s: %w; %s, as a member of the group that owns it", dev.Addr,
			node, err, setupHint)
	case errors.Is(err, unix.EBUSY):
		return errs.New(errs.Refused,
			"vfio %s: somebody else drives %s%s: %w; end that program first", dev.Addr,
			m.groupText(dev.Group), m.heldBy(node), err)
	}
	return errs.New(errs.Capability, "vfio %s: open %s: %w; %s", dev.Addr, node, err, statusHint)
}

// mapError explains a refused mapping.
func (m machine) mapError(size uint64, err error) error {
	switch {
	case errors.Is(err, unix.ENOMEM):
		used, limit, lerr := m.k.memlock()
		if lerr == nil && limit >= 0 {
			return m.memlockError(size, used, limit)
		}
		return errs.New(errs.Capability,
			"vfio: pin %d bytes: %w; free memory or lower the buffer budgets", size, err)
	case errors.Is(err, unix.ENOSPC):
		return errs.New(errs.Capability,
			"vfio: map %d bytes: %w: the kernel's limit of mappings is reached (65,535 unless vfio_iommu_type1's dma_entry_limit says otherwise); use fewer queues or larger buffers",
			size, err)
	case errors.Is(err, unix.EFAULT):
		return fmt.Errorf("vfio: pin %d bytes: %w: not memory that a device can reach", size, err)
	}
	return fmt.Errorf("vfio: map %d bytes: %w", size, err)
}

// peerError explains a refused mapping of another device's memory.
func (m machine) peerError(backend string, size uint64, err error) error {
	head := fmt.Sprintf("vfio: map %d bytes of another device's memory", size)
	switch {
	case backend == "iommufd":
		return errs.New(errs.Capability,
			"%s: %w: this kernel's iommufd takes no GPU's memory (from Linux 6.19 on it takes dma-bufs, of vfio-pci only); use the backend type1",
			head, err)
	case errors.Is(err, unix.EFAULT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		if !m.nativeType1() {
			return errs.New(errs.Capability,
				"%s: %w: this kernel's /dev/vfio/vfio is iommufd's imitation, which maps RAM only; it takes a kernel with CONFIG_VFIO_CONTAINER and the module vfio_iommu_type1",
				head, err)
		}
		return errs.New(errs.Capability,
			"%s: %w: some of its addresses have no page frame behind them, or none that may be written",
			head, err)
	}
	return errs.New(errs.Capability, "%s: %w", head, err)
}

// nativeType1 tells the type1 driver from iommufd's imitation of it, by its folder in sysfs, which
// also drivers that are built in have when they have parameters, as this one has.
func (m machine) nativeType1() bool { return m.exists("/sys/module/vfio_iommu_type1") }
