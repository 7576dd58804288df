package vfio

import "unsafe"

// The numbers and structures of include/uapi/linux/vfio.h and iommufd.h that are used here. A test
// compares them with the header where one is installed.

// ioctl requests: _IO(';', 100+n) for VFIO, _IO(';', 0x80+n) for iommufd. They carry no size.
const (
	vfioGetAPIVersion       = 0x3b64
	vfioCheckExtension      = 0x3b65
	vfioSetIOMMU            = 0x3b66
	vfioGroupGetStatus      = 0x3b67
	vfioGroupSetContainer   = 0x3b68
	vfioGroupGetDeviceFD    = 0x3b6a
	vfioDeviceGetInfo       = 0x3b6b
	vfioDeviceGetRegionInfo = 0x3b6c
	vfioDeviceGetIRQInfo    = 0x3b6d
	vfioDeviceSetIRQs       = 0x3b6e
	vfioDeviceReset         = 0x3b6f
	vfioIOMMUGetInfo        = 0x3b70
	vfioIOMMUMapDMA         = 0x3b71
	vfioIOMMUUnmapDMA       = 0x3b72
	vfioDeviceBindIOMMUFD   = 0x3b76
	vfioDeviceAttachIOMMUFD = 0x3b77
	iommuDestroy            = 0x3b80
	iommuIOASAlloc          = 0x3b81
	iommuIOASIOVARanges     = 0x3b84
	iommuIOASMap            = 0x3b85
	iommuIOASUnmap          = 0x3b86
	iommuIOASMapFile        = 0x3b8f
	vfioAPIVersion          = 0
	vfioType1v2IOMMU        = 3
	groupViable             = 1 << 0
	deviceFlagReset         = 1 << 0
	deviceFlagPCI           = 1 << 1
	regionFlagRead          = 1 << 0
	regionFlagWrite         = 1 << 1
	regionFlagMmap          = 1 << 2
	regionFlagCaps          = 1 << 3
	regionCapSparseMmap     = 1
	irqInfoEventfd          = 1 << 0
	irqSetDataEventfd       = 1 << 2
	irqSetActionTrigger     = 1 << 5
	irqIndexERR             = 3
	irqIndexREQ             = 4
	iommuInfoCaps           = 1 << 1
	iommuInfoCapIOVARange   = 1
	dmaMapRead              = 1 << 0
	dmaMapWrite             = 1 << 1
	ioasMapFixedIOVA        = 1 << 0
	ioasMapWriteable        = 1 << 1
	ioasMapReadable         = 1 << 2
)

type groupStatus struct{ Argsz, Flags uint32 }

type deviceInfo struct{ Argsz, Flags, NumRegions, NumIRQs, CapOffset uint32 }

type regionInfo struct {
	Argsz, Flags, Index, CapOffset uint32
	Size, Offset                   uint64
}

type irqInfo struct{ Argsz, Flags, Index, Count uint32 }

// irqSet is vfio_irq_set with one eventfd as its data.
type irqSet struct {
	Argsz, Flags, Index, Start, Count uint32
	FD                                int32
}

// iommuInfo is vfio_iommu_type1_info; capabilities follow it at CapOffset.
type iommuInfo struct {
	Argsz, Flags uint32
	IOVAPgsizes  uint64
	CapOffset    uint32
	_            uint32
}

type dmaMap struct {
	Argsz, Flags      uint32
	Vaddr, IOVA, Size uint64
}

type dmaUnmap struct {
	Argsz, Flags uint32
	IOVA, Size   uint64
}

type bindIOMMUFD struct {
	Argsz, Flags uint32
	IOMMUFD      int32
	OutDevID     uint32
}

type attachIOMMUFD struct{ Argsz, Flags, PtID uint32 }

type ioasAlloc struct{ Size, Flags, OutIOASID uint32 }

type iovaRange struct{ Start, Last uint64 }

type ioasIOVARanges struct {
	Size, IOASID, NumIOVAs, _ uint32
	AllowedIOVAs              uint64 // address of an array of iovaRange
	OutIOVAAlignment          uint64
}

type ioasMap struct {
	Size, Flags, IOASID, _ uint32
	UserVA, Length, IOVA   uint64
}

type ioasMapFile struct {
	Size, Flags, IOASID uint32
	FD                  int32
	Start, Length, IOVA uint64
}

type ioasUnmap struct {
	Size, IOASID uint32
	IOVA, Length uint64
}

type ioasDestroy struct{ Size, ID uint32 }

// Sizes as the kernel has them; a difference does not compile.
var (
	_ [8]byte  = [unsafe.Sizeof(groupStatus{})]byte{}
	_ [20]byte = [unsafe.Sizeof(deviceInfo{})]byte{}
	_ [32]byte = [unsafe.Sizeof(regionInfo{})]byte{}
	_ [16]byte = [unsafe.Sizeof(irqInfo{})]byte{}
	_ [24]byte = [unsafe.Sizeof(irqSet{})]byte{}
	_ [24]byte = [unsafe.Sizeof(iommuInfo{})]byte{}
	_ [32]byte = [unsafe.Sizeof(dmaMap{})]byte{}
	_ [24]byte = [unsafe.Sizeof(dmaUnmap{})]byte{}
	_ [16]byte = [unsafe.Sizeof(bindIOMMUFD{})]byte{}
	_ [12]byte = [unsafe.Sizeof(attachIOMMUFD{})]byte{}
	_ [12]byte = [unsafe.Sizeof(ioasAlloc{})]byte{}
	_ [32]byte = [unsafe.Sizeof(ioasIOVARanges{})]byte{}
	_ [40]byte = [unsafe.Sizeof(ioasMap{})]byte{}
	_ [40]byte = [unsafe.Sizeof(ioasMapFile{})]byte{}
	_ [24]byte = [unsafe.Sizeof(ioasUnmap{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(ioasDestroy{})]byte{}
)
