package vfio

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/pci"
)

// iommufd is the newer way (Linux 6.6 with CONFIG_VFIO_DEVICE_CDEV): an I/O address space of
// /dev/iommu, and devices by their own nodes below /dev/vfio/devices. Mappings do not depend on
// devices. A kernel 7.0 without vfio_iommu_type1 ran bind, load, verify, train and kill -9 on it,
// with Intel's and AMD's IOMMU, to the same parameters as type1. Debian's kernels are built without
// it, so the vm tier has type1 only, which New prefers.
type iommufd struct {
	m    machine
	fd   int
	ioas uint32
}

const iommuNode = "/dev/iommu"

func openIOMMUFD(m machine) (*iommufd, error) {
	fd, err := m.k.open(iommuNode)
	if err != nil {
		if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			return nil, errs.New(errs.Capability, "vfio: no right to open %s: %w; %s", iommuNode,
				err, setupHint)
		}
		return nil, errs.New(errs.Capability,
			"vfio: open %s: %w: the kernel has no iommufd; use the backend type1", iommuNode, err)
	}
	a := ioasAlloc{Size: uint32(unsafe.Sizeof(ioasAlloc{}))}
	if _, err := m.k.ioctl(fd, iommuIOASAlloc, unsafe.Pointer(&a)); err != nil {
		_ = m.k.close(fd)
		return nil, errs.New(errs.Capability, "vfio: allocate an I/O address space of %s: %w",
			iommuNode, err)
	}
	return &iommufd{m: m, fd: fd, ioas: a.OutIOASID}, nil
}

func (s *iommufd) name() string { return "iommufd" }

// deviceNode is the node of a device, by its name in sysfs.
func (m machine) deviceNode(dev pci.Device) (string, error) {
	dir := "/sys/bus/pci/devices/" + dev.Addr + "/vfio-dev"
	entries, err := os.ReadDir(m.path(dir))
	if err != nil {
		return "", errs.New(errs.Capability,
			"vfio %s: no device node for iommufd: %w: the kernel needs CONFIG_VFIO_DEVICE_CDEV (Linux 6.6); use the backend type1",
			dev.Addr, err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "vfio") {
			return path.Join(deviceNodes, "devices", e.Name()), nil
		}
	}
	return "", errs.New(errs.Capability, "vfio %s: %s is empty; use the backend type1",
		dev.Addr, dir)
}

func (s *iommufd) attach(dev pci.Device) (int, bool, error) {
	node, err := s.m.deviceNode(dev)
	if err != nil {
		return -1, false, err
	}
	fd, err := s.m.k.open(node)
	if err != nil {
		return -1, false, s.m.openError(dev, node, err)
	}
	fail := func(err error) (int, bool, error) {
		_ = s.m.k.close(fd)
		return -1, false, err
	}
	b := bindIOMMUFD{Argsz: uint32(unsafe.Sizeof(bindIOMMUFD{})), IOMMUFD: int32(s.fd)}
	err = s.m.again(func() error {
		_, err := s.m.k.ioctl(fd, vfioDeviceBindIOMMUFD, unsafe.Pointer(&b))
		return err
	})
	switch {
	case errors.Is(err, unix.EAGAIN):
		return fail(errs.New(errs.Device, "vfio %s: the kernel could not reset it for %s: %w",
			dev.Addr, s.m.retryFor, err))
	case err != nil && len(s.m.foreign(dev.Group)) > 0:
		return fail(s.m.notViable(dev, err))
	// EINVAL: another process has it open
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL):
		return fail(errs.New(errs.Refused,
			"vfio %s: somebody else drives %s%s: %w; end that program first", dev.Addr,
			s.m.groupText(dev.Group), s.m.heldBy(node), err))
	case errors.Is(err, unix.EPERM):
		return fail(noRemapping(dev, err))
	case err != nil:
		return fail(errs.New(errs.Capability, "vfio %s: bind it to an iommufd: %w; %s", dev.Addr,
			err, statusHint))
	}
	a := attachIOMMUFD{Argsz: uint32(unsafe.Sizeof(attachIOMMUFD{})), PtID: s.ioas}
	if _, err := s.m.k.ioctl(fd, vfioDeviceAttachIOMMUFD, unsafe.Pointer(&a)); errors.Is(err,
		unix.EPERM) {
		return fail(noRemapping(dev, err)) // kernels before 6.4 look for it here
	} else if err != nil {
		return fail(errs.New(errs.Capability,
			"vfio %s: attach it to the address space: %w: its IOMMU offers fewer addresses than are mapped; %s",
			dev.Addr, err, statusHint))
	}
	return fd, false, nil
}

func (s *iommufd) last(pci.Device) bool { return false } // mappings outlive devices

func (s *iommufd) empty() bool { return false }

func (s *iommufd) detach(dev pci.Device, fd int) error {
	if err := s.m.k.close(fd); err != nil { // unbinds and detaches
		return fmt.Errorf("vfio %s: close: %w", dev.Addr, err)
	}
	return nil
}

func (s *iommufd) ranges() ([]Range, error) {
	n := 64
	for range 4 {
		list := make([]iovaRange, n)
		var pin runtime.Pinner
		pin.Pin(&list[0])
		a := ioasIOVARanges{Size: uint32(unsafe.Sizeof(ioasIOVARanges{})), IOASID: s.ioas,
			NumIOVAs: uint32(n), AllowedIOVAs: uint64(uintptr(unsafe.Pointer(&list[0])))}
		_, err := s.m.k.ioctl(s.fd, iommuIOASIOVARanges, unsafe.Pointer(&a))
		pin.Unpin()
		if errors.Is(err, unix.EMSGSIZE) && a.NumIOVAs > uint32(n) {
			n = int(min(a.NumIOVAs, 1<<16))
			continue
		}
		if err != nil {
			return nil, errs.New(errs.Capability, "vfio: ask for the IOMMU's addresses: %w", err)
		}
		if a.OutIOVAAlignment > pageBytes {
			return nil, errs.New(errs.Capability,
				"vfio: the IOMMU wants mappings in multiples of %d bytes, this program of %d",
				a.OutIOVAAlignment, pageBytes)
		}
		var out []Range
		for _, r := range list[:min(a.NumIOVAs, uint32(n))] {
			out = append(out, Range{IOVA(r.Start), IOVA(r.Last)})
		}
		if len(out) == 0 {
			return nil, errs.New(errs.Capability, "vfio: the IOMMU offers no addresses")
		}
		return out, nil
	}
	return nil, errs.New(errs.Capability, "vfio: the IOMMU's list of addresses does not end")
}

func (s *iommufd) mapMem(va uintptr, iova IOVA, size uint64) error {
	a := ioasMap{
		Size:   uint32(unsafe.Sizeof(ioasMap{})),
		Flags:  ioasMapFixedIOVA | ioasMapReadable | ioasMapWriteable,
		IOASID: s.ioas, UserVA: uint64(va), Length: size, IOVA: uint64(iova),
	}
	_, err := s.m.k.ioctl(s.fd, iommuIOASMap, unsafe.Pointer(&a))
	return err
}

// mapPeer maps an export by IOMMU_IOAS_MAP_FILE. IOAS_MAP of the addresses, which is left for
// memory without one, is known to refuse page frames that are no RAM (EFAULT), and is asked all the
// same.
func (s *iommufd) mapPeer(va uintptr, iova IOVA, size uint64, dmabuf int, offset int64) error {
	if dmabuf < 0 || offset < 0 {
		return s.mapMem(va, iova, size)
	}
	_, err := s.m.k.ioctl(s.fd, iommuIOASMapFile,
		unsafe.Pointer(s.fileMap(dmabuf, offset, iova, size)))
	return err
}

func (s *iommufd) fileMap(fd int, offset int64, iova IOVA, size uint64) *ioasMapFile {
	return &ioasMapFile{
		Size:   uint32(unsafe.Sizeof(ioasMapFile{})),
		Flags:  ioasMapFixedIOVA | ioasMapReadable | ioasMapWriteable,
		IOASID: s.ioas, FD: int32(fd), Start: uint64(offset), Length: size, IOVA: uint64(iova),
	}
}

func (s *iommufd) unmapMem(iova IOVA, size uint64) error {
	a := ioasUnmap{Size: uint32(unsafe.Sizeof(ioasUnmap{})), IOASID: s.ioas, IOVA: uint64(iova),
		Length: size}
	if _, err := s.m.k.ioctl(s.fd, iommuIOASUnmap, unsafe.Pointer(&a)); err != nil {
		return err
	}
	if a.Length != size {
		return fmt.Errorf("the kernel unmapped %d bytes instead of %d", a.Length, size)
	}
	return nil
}

// close ends the address space: destroying it fails while a device is being given back, and closing
// the descriptor then does it later.
func (s *iommufd) close() error {
	d := ioasDestroy{Size: uint32(unsafe.Sizeof(ioasDestroy{})), ID: s.ioas}
	_, derr := s.m.k.ioctl(s.fd, iommuDestroy, unsafe.Pointer(&d))
	if errors.Is(derr, unix.EBUSY) {
		derr = nil
	}
	return errors.Join(derr, s.m.k.close(s.fd))
}
