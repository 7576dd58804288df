package vfio

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/probe"
	"helios/internal/units"
)

// lockedNeeded is the RLIMIT_MEMLOCK that a run with default settings needs: all that SSDs read
// into is locked, for a small graph some 190 MiB. vfio-setup.sh has the same.
const lockedNeeded = 256 << 20

// Probe looks at what driving SSDs in user space needs (Needs), at VFIO's two backends, at huge
// pages, and whether SSDs can be given a GPU's memory. It opens no device.
func Probe() []probe.Finding { return realMachine().probe() }

func (m machine) probe() []probe.Finding {
	out := []probe.Finding{m.probeIOMMU(), m.probeRemapping(), m.probeVFIO()}
	type1, iommufd := m.probeType1(), m.probeIOMMUFD()
	return append(out, backendOf(type1, iommufd), type1, iommufd, m.probeDriver(), m.probeLocked(),
		m.probeGroup(), m.probeHuge(), m.probePeer(), m.probeMapFile())
}

// entries counts what a folder holds; a missing folder holds nothing.
func (m machine) entries(dir string) (int, error) {
	list, err := os.ReadDir(m.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return len(list), err
}

func (m machine) probeIOMMU() probe.Finding {
	f := probe.Finding{Name: NeedIOMMU}
	list, err := os.ReadDir(m.path("/sys/kernel/iommu_groups"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.Detail = err.Error()
		return f
	}
	groups, without := 0, 0
	for _, g := range list {
		if n, err := strconv.Atoi(g.Name()); err != nil || m.sys().Translates(n) {
			groups++
		} else {
			without++
		}
	}
	devices, err := m.entries("/sys/class/iommu")
	switch {
	case groups > 0:
		f.Answer, f.Detail = probe.There, fmt.Sprintf("%d groups", groups)
	case without > 0:
		f.Answer, f.Detail, f.Next = probe.NotThere,
			fmt.Sprintf(
				"%d groups of VFIO's mode without an IOMMU, which protects no memory and is not used",
				without), m.noIOMMU()
	case devices > 0 && err == nil:
		f.Answer, f.Detail, f.Next = probe.NotThere,
			"the IOMMU is there, but no device has a group", m.noIOMMU()
	default:
		f.Answer, f.Detail, f.Next = probe.NotThere,
			"no device has an IOMMU group: it is off in the firmware or on the kernel's command line",
			m.noIOMMU()
	}
	return f
}

// opened turns an error of opening a node into an answer.
func opened(f probe.Finding, node string, err error) probe.Finding {
	f.Detail = node + ": " + err.Error()
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		f.Answer = probe.NotThere
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		f.Answer, f.Detail = probe.NotThere, node+": no right to open it"
	}
	return f
}

func (m machine) probeVFIO() probe.Finding {
	f := probe.Finding{Name: "VFIO", Next: setupHint}
	node := deviceNodes + "vfio"
	fd, err := m.k.open(node)
	if err != nil {
		return opened(f, node, err)
	}
	defer func() { _ = m.k.close(fd) }()
	v, err := m.k.ioctlInt(fd, vfioGetAPIVersion, 0)
	if err != nil || v != vfioAPIVersion {
		f.Answer, f.Detail = probe.NotThere, fmt.Sprintf("%s speaks version %d (%v), not %d", node,
			v, err, vfioAPIVersion)
		return f
	}
	f.Answer, f.Detail, f.Next = probe.There, node, ""
	return f
}

func (m machine) probeType1() probe.Finding {
	f := probe.Finding{Name: "VFIO type1v2", Next: setupHint}
	fd, err := m.k.open(deviceNodes + "vfio")
	if err != nil {
		return opened(f, deviceNodes+"vfio", err)
	}
	defer func() { _ = m.k.close(fd) }()
	v, err := m.k.ioctlInt(fd, vfioCheckExtension, vfioType1v2IOMMU)
	switch {
	case err != nil:
		f.Detail = err.Error()
	case v <= 0:
		f.Answer, f.Detail = probe.NotThere, "the module vfio_iommu_type1 is not loaded"
	default:
		f.Answer, f.Detail, f.Next = probe.There, "the backend that is used", ""
	}
	return f
}

func (m machine) probeIOMMUFD() probe.Finding {
	f := probe.Finding{Name: "VFIO iommufd",
		Next: "not needed where type1 works; else a kernel from 6.6 on with CONFIG_IOMMUFD and CONFIG_VFIO_DEVICE_CDEV"}
	fd, err := m.k.open(iommuNode)
	if err != nil {
		return opened(f, iommuNode, err)
	}
	_ = m.k.close(fd)
	n, err := m.entries(deviceNodes + "devices")
	switch {
	case err != nil:
		f.Detail = err.Error()
	case n == 0:
		// The folder comes with the first device that is bound, so nothing follows from its
		// absence.
		f.Detail = iommuNode + " is there; " + deviceNodes +
			"devices shows nothing while no SSD is bound"
	default:
		f.Answer, f.Detail, f.Next = probe.There,
			fmt.Sprintf("%d device nodes; used where type1 is not there", n), ""
	}
	return f
}

func (m machine) probeDriver() probe.Finding {
	f := probe.Finding{Name: NeedDriver, Next: setupHint}
	dir := "/sys/bus/pci/drivers/" + vfioDriver
	list, err := os.ReadDir(m.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		f.Answer, f.Detail = probe.NotThere, "the module is not loaded"
		return f
	}
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	var bound []string
	for _, e := range list {
		if strings.Count(e.Name(), ":") == 2 {
			bound = append(bound, e.Name())
		}
	}
	f.Answer, f.Detail, f.Next = probe.There, "no device is bound to it", ""
	if len(bound) > 0 {
		f.Detail = "has " + strings.Join(bound, ", ")
	}
	return f
}

func (m machine) probeLocked() probe.Finding {
	f := probe.Finding{Name: NeedLocked, Next: setupHint}
	used, limit, err := m.k.memlock()
	switch {
	case err != nil:
		f.Detail = err.Error()
	case limit < 0:
		f.Answer, f.Detail, f.Next = probe.There, "no limit", ""
	case limit < lockedNeeded:
		f.Answer, f.Next = probe.NotThere, memlockNext(lockedNeeded)
		f.Detail = fmt.Sprintf(
			"RLIMIT_MEMLOCK is %s (%s in use); train with default settings needs %s or more",
			units.FormatBytes(limit), units.FormatBytes(used), units.FormatBytes(lockedNeeded))
	default:
		f.Answer, f.Detail, f.Next = probe.There, fmt.Sprintf("RLIMIT_MEMLOCK is %s (%s in use)",
			units.FormatBytes(limit), units.FormatBytes(used)), ""
	}
	return f
}

func (m machine) probeHuge() probe.Finding {
	f := probe.Finding{Name: "huge pages",
		Next: `not needed; "sudo heliosctl vfio-setup setup --hugepages 2GiB" reserves some`}
	total, free, err := hostmem.HugePool(m.root)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Answer, f.Detail = probe.NotThere, "the kernel has none of 2 MiB"
	case err != nil:
		f.Detail = err.Error()
	case total == 0:
		f.Answer, f.Detail = probe.NotThere, "none reserved; transparent ones are asked for"
	default:
		f.Answer, f.Next = probe.There, ""
		f.Detail = fmt.Sprintf("%s reserved, %s free", units.FormatBytes(total),
			units.FormatBytes(free))
	}
	return f
}

// probePeer is about the page frames of other devices: what rung p2p of the memory ladder maps.
func (m machine) probePeer() probe.Finding {
	f := probe.Finding{Name: "other devices' memory",
		Next: "only for SSDs that read into a GPU's memory: a kernel with CONFIG_VFIO_CONTAINER, which Debian's and most others have"}
	switch t := m.probeType1(); {
	case t.Answer == probe.NotThere:
		f.Answer, f.Detail = probe.NotThere, "takes type1: "+t.Detail
	case t.Answer != probe.There:
		f.Detail = t.Detail
	case !m.nativeType1():
		f.Answer, f.Detail = probe.NotThere,
			"/dev/vfio/vfio is iommufd's imitation of type1, which maps RAM only"
	default:
		f.Answer, f.Next = probe.There, ""
		f.Detail = "type1 maps what is behind their BARs; that the machine's PCIe passes it on only a proof with both devices tells"
	}
	return f
}

// probeMapFile tries IOMMU_IOAS_MAP_FILE on a page of a memory file, in an address space without
// devices.
func (m machine) probeMapFile() probe.Finding {
	f := probe.Finding{Name: "dma-buf import",
		Next: "not needed where type1 maps other devices' memory"}
	s, err := openIOMMUFD(m)
	if err != nil {
		f.Detail = err.Error()
		if errs.ClassOf(err) == errs.Capability {
			f.Answer = probe.NotThere
		}
		return f
	}
	defer func() { _ = s.close() }()
	fd, err := m.k.memfd(pageBytes)
	if err != nil {
		f.Detail = "a memory file to try it on: " + err.Error()
		return f
	}
	defer func() { _ = m.k.close(fd) }()
	err = s.mapPeer(0, lowestIOVA, pageBytes, fd, 0)
	switch {
	case err == nil:
		// Exports of a GPU's driver are another matter.
		f.Detail = "iommufd takes files (IOMMU_IOAS_MAP_FILE), and from Linux 6.19 on dma-bufs of vfio-pci; of a GPU only a try tells"
		if err := s.unmapMem(lowestIOVA, pageBytes); err != nil {
			f.Detail += "; unmap: " + err.Error()
		}
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EOPNOTSUPP):
		f.Answer, f.Detail = probe.NotThere,
			"iommufd takes no files (IOMMU_IOAS_MAP_FILE, Linux 6.13)"
	default:
		f.Detail = "IOMMU_IOAS_MAP_FILE: " + err.Error()
	}
	return f
}
