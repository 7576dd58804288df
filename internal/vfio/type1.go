package vfio

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/pci"
)

// type1 is a VFIO container with a type1 (version 2) IOMMU: groups join it, and its mappings live
// as long as it has a group.
type type1 struct {
	m  machine
	fd int

	mu     sync.Mutex
	groups map[int]*type1Group
}

type type1Group struct {
	fd      int
	devices int
}

func openType1(m machine) (*type1, error) {
	fd, err := m.k.open(deviceNodes + "vfio")
	if err != nil {
		if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			return nil, errs.New(errs.Capability, "vfio: no right to open %svfio: %w; %s",
				deviceNodes, err, setupHint)
		}
		return nil, errs.New(errs.Capability,
			"vfio: open %svfio: %w: the kernel module vfio is not loaded; %s", deviceNodes, err,
			setupHint)
	}
	t := &type1{m: m, fd: fd, groups: map[int]*type1Group{}}
	if v, err := m.k.ioctlInt(fd, vfioGetAPIVersion, 0); err != nil || v != vfioAPIVersion {
		_ = m.k.close(fd)
		return nil, errs.New(errs.Capability,
			"vfio: %svfio speaks API version %d (%v), this program version %d", deviceNodes, v, err,
			vfioAPIVersion)
	}
	if v, err := m.k.ioctlInt(fd, vfioCheckExtension, vfioType1v2IOMMU); err != nil || v <= 0 {
		_ = m.k.close(fd)
		return nil, errs.New(errs.Capability,
			"vfio: the kernel has no type1v2 IOMMU driver (answer %d, %v): the module vfio_iommu_type1 is not loaded; %s",
			v, err, setupHint)
	}
	return t, nil
}

func (t *type1) name() string { return "type1" }

func (t *type1) attach(dev pci.Device) (int, bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g, fresh := t.groups[dev.Group], false
	if g == nil {
		fd, err := t.joinGroup(dev)
		if err != nil {
			return -1, false, err
		}
		g, fresh = &type1Group{fd: fd}, len(t.groups) == 0
		t.groups[dev.Group] = g
		if fresh {
			if err := t.setIOMMU(dev); err != nil {
				t.leave(dev.Group, g)
				return -1, false, err
			}
		}
	}
	name := append([]byte(dev.Addr), 0)
	fd := -1
	err := t.m.again(func() (err error) {
		fd, err = t.m.k.ioctl(g.fd, vfioGroupGetDeviceFD, unsafe.Pointer(&name[0]))
		return err
	})
	if err != nil {
		if g.devices == 0 {
			t.leave(dev.Group, g)
		}
		return -1, false, t.deviceError(dev, err)
	}
	g.devices++
	return fd, fresh, nil
}

// joinGroup opens a group and puts it into the container.
func (t *type1) joinGroup(dev pci.Device) (int, error) {
	node := deviceNodes + strconv.Itoa(dev.Group)
	fd, err := t.m.k.open(node)
	if err != nil {
		return -1, t.m.openError(dev, node, err)
	}
	fail := func(err error) (int, error) {
		_ = t.m.k.close(fd)
		return -1, err
	}
	st := groupStatus{Argsz: uint32(unsafe.Sizeof(groupStatus{}))}
	if _, err := t.m.k.ioctl(fd, vfioGroupGetStatus, unsafe.Pointer(&st)); err != nil {
		return fail(errs.New(errs.Capability, "vfio %s: status of %s: %w", dev.Addr, node, err))
	}
	if st.Flags&groupViable == 0 {
		return fail(t.m.notViable(dev, nil))
	}
	container := int32(t.fd)
	if _, err := t.m.k.ioctl(fd, vfioGroupSetContainer, unsafe.Pointer(&container)); err != nil {
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EBUSY):
			return fail(t.m.notViable(dev, err))
		case errors.Is(err, unix.EINVAL) && len(t.groups) > 0:
			return fail(errs.New(errs.Capability,
				"vfio %s: it does not fit the address space of the other SSDs: %w: its IOMMU offers fewer addresses than are mapped; attach it before the others",
				dev.Addr, err))
		}
		return fail(errs.New(errs.Capability, "vfio %s: put %s into a container: %w", dev.Addr,
			t.m.groupText(dev.Group), err))
	}
	return fd, nil
}

func (t *type1) setIOMMU(dev pci.Device) error {
	_, err := t.m.k.ioctlInt(t.fd, vfioSetIOMMU, vfioType1v2IOMMU)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return noRemapping(dev, err)
	}
	return errs.New(errs.Capability, "vfio %s: set the type1v2 IOMMU: %w; %s", dev.Addr, err,
		statusHint)
}

func (t *type1) deviceError(dev pci.Device, err error) error {
	switch {
	case errors.Is(err, unix.EAGAIN):
		return errs.New(errs.Device,
			"vfio %s: the kernel could not reset it for %s: %w; take it off the bus and back (echo 1 > /sys/bus/pci/devices/%s/remove; echo 1 > /sys/bus/pci/rescan)",
			dev.Addr, t.m.retryFor, err, dev.Addr)
	case errors.Is(err, unix.EBUSY):
		return errs.New(errs.Refused,
			"vfio %s: somebody else drives it%s: %w; end that program first", dev.Addr,
			t.m.heldBy(deviceNodes+strconv.Itoa(dev.Group)), err)
	case errors.Is(err, unix.ENODEV):
		return errs.New(errs.Device,
			"vfio %s: it left its bus or its driver: %w; look at it with heliosctl ssds",
			dev.Addr, err)
	}
	return errs.New(errs.Device, "vfio %s: open the device: %w", dev.Addr, err)
}

// leave takes a group out of the container. The mappings end with the last group.
func (t *type1) leave(number int, g *type1Group) {
	delete(t.groups, number)
	_ = t.m.k.close(g.fd) // leaves the container too; nothing is left to undo
}

func (t *type1) last(dev pci.Device) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.groups[dev.Group]
	return len(t.groups) == 1 && g != nil && g.devices == 1
}

func (t *type1) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.groups) == 0
}

func (t *type1) detach(dev pci.Device, fd int) error {
	err := t.m.k.close(fd) // may take minutes for a dead device, so without the lock
	t.mu.Lock()
	defer t.mu.Unlock()
	if g := t.groups[dev.Group]; g != nil {
		if g.devices--; g.devices == 0 {
			t.leave(dev.Group, g)
		}
	}
	if err != nil {
		return fmt.Errorf("vfio %s: close: %w", dev.Addr, err)
	}
	return nil
}

// defaultRanges serve kernels that report none (before 5.4): what the narrowest IOMMU in use has,
// without the interrupt window of x86.
var defaultRanges = []Range{{0, 0xfedfffff}, {0xfef00000, 1<<39 - 1}}

func (t *type1) ranges() ([]Range, error) {
	size := uint32(4096)
	for range 4 { // the list may grow between two calls
		words := make([]uint64, size/8)
		buf := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), size)
		info := (*iommuInfo)(unsafe.Pointer(&words[0]))
		info.Argsz = size
		if _, err := t.m.k.ioctl(t.fd, vfioIOMMUGetInfo, unsafe.Pointer(info)); err != nil {
			return nil, errs.New(errs.Capability, "vfio: ask for the IOMMU's addresses: %w", err)
		}
		if info.Argsz > size {
			size = min((info.Argsz+7)&^7, 1<<20)
			continue
		}
		if info.IOVAPgsizes != 0 && info.IOVAPgsizes&(2*pageBytes-1) == 0 {
			return nil, errs.New(errs.Capability,
				"vfio: the IOMMU has no pages of %d bytes (sizes %#x)", pageBytes, info.IOVAPgsizes)
		}
		if info.Flags&iommuInfoCaps == 0 {
			return defaultRanges, nil
		}
		body, ok := capability(buf, info.CapOffset, iommuInfoCapIOVARange)
		if !ok {
			return defaultRanges, nil
		}
		var out []Range
		for _, p := range pairs(body) {
			out = append(out, Range{IOVA(p[0]), IOVA(p[1])})
		}
		if len(out) == 0 {
			return nil, errs.New(errs.Capability, "vfio: the IOMMU offers no addresses")
		}
		return out, nil
	}
	return nil, errs.New(errs.Capability, "vfio: the IOMMU's list of addresses does not end")
}

func (t *type1) mapMem(va uintptr, iova IOVA, size uint64) error {
	a := dmaMap{Argsz: uint32(unsafe.Sizeof(dmaMap{})), Flags: dmaMapRead | dmaMapWrite,
		Vaddr: uint64(va), IOVA: uint64(iova), Size: size}
	_, err := t.m.k.ioctl(t.fd, vfioIOMMUMapDMA, unsafe.Pointer(&a))
	return err
}

// mapPeer maps the page frames behind the addresses (vfio_iommu_type1 follows VM_PFNMAP areas, and
// counts no frame that is not RAM against RLIMIT_MEMLOCK). All of it is one of the container's
// 65,535 mappings.
func (t *type1) mapPeer(va uintptr, iova IOVA, size uint64, _ int, _ int64) error {
	return t.mapMem(va, iova, size)
}

func (t *type1) unmapMem(iova IOVA, size uint64) error {
	a := dmaUnmap{Argsz: uint32(unsafe.Sizeof(dmaUnmap{})), IOVA: uint64(iova), Size: size}
	if _, err := t.m.k.ioctl(t.fd, vfioIOMMUUnmapDMA, unsafe.Pointer(&a)); err != nil {
		return err
	}
	if a.Size != size {
		return fmt.Errorf("the kernel unmapped %d bytes instead of %d", a.Size, size)
	}
	return nil
}

func (t *type1) close() error { return t.m.k.close(t.fd) }
