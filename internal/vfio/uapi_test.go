package vfio

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// header is a parsed C header: the values of its macros and enumerations, and the fields of its
// structures with their sizes.
type header struct {
	text    string
	numbers map[string]uint64
	structs map[string][]field
}

type field struct {
	name string
	size uintptr
}

var (
	comments = regexp.MustCompile(`(?s)/\*.*?\*/`)
	define   = regexp.MustCompile(`(?m)^\s*#\s*define\s+(\w+)\s+(.+?)\s*$`)
	ioNumber = regexp.MustCompile(`^_IO\(\s*(\w+)\s*,\s*(\w+)(?:\s*\+\s*(\d+))?\s*\)$`)
	enums    = regexp.MustCompile(`(?s)enum\s*\w*\s*\{(.*?)\}`)
	structs  = regexp.MustCompile(`(?s)struct\s+(\w+)\s*\{(.*?)\n\}`)
	member   = regexp.MustCompile(
		`(?m)^\s*(__u8|__u16|__u32|__s32|__u64|__aligned_u64)\s+(\w+)\s*;`)
	shift = regexp.MustCompile(`^\(?\s*(\w+)\s*<<\s*(\w+)\s*\)?$`)
)

// parseHeader reads as much C as the kernel's uapi headers use, from the installed ones or the
// folder in HELIOS_UAPI. It answers nil where the file is not there.
func parseHeader(t *testing.T, name string) *header {
	t.Helper()
	dir := os.Getenv("HELIOS_UAPI")
	if dir == "" {
		dir = "/usr/include/linux"
	}
	b, err := os.ReadFile(filepath.Join(dir, name))
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(t, err)
	text := comments.ReplaceAllString(string(b), "")
	h := &header{text: text, numbers: map[string]uint64{}, structs: map[string][]field{}}
	for _, m := range define.FindAllStringSubmatch(text, -1) {
		if v, ok := h.value(m[2]); ok {
			h.numbers[m[1]] = v
		}
	}
	for _, e := range enums.FindAllStringSubmatch(text, -1) {
		next := uint64(0)
		for _, item := range strings.Split(e[1], ",") {
			name, value, given := strings.Cut(item, "=")
			if name = strings.TrimSpace(name); name == "" {
				continue
			}
			if v, ok := h.value(value); given && ok {
				next = v
			}
			h.numbers[name] = next
			next++
		}
	}
	for _, m := range define.FindAllStringSubmatch(text, -1) { // requests built on enumerations
		if v, ok := h.value(m[2]); ok {
			h.numbers[m[1]] = v
		}
	}
	for _, s := range structs.FindAllStringSubmatch(text, -1) {
		for _, m := range member.FindAllStringSubmatch(s[2], -1) {
			size := map[string]uintptr{"__u8": 1, "__u16": 2, "__u32": 4, "__s32": 4, "__u64": 8,
				"__aligned_u64": 8}[m[1]]
			h.structs[s[1]] = append(h.structs[s[1]], field{m[2], size})
		}
	}
	return h
}

// value reads a number, a known name, a shift, a character or an _IO request.
func (h *header) value(s string) (uint64, bool) {
	s = strings.TrimSpace(s)
	if m := ioNumber.FindStringSubmatch(s); m != nil {
		kind, ok1 := h.value(m[1])
		number, ok2 := h.value(m[2])
		plus, _ := strconv.ParseUint("0"+m[3], 10, 64)
		return kind<<8 | (number + plus), ok1 && ok2
	}
	if m := shift.FindStringSubmatch(s); m != nil {
		a, ok1 := h.value(m[1])
		b, ok2 := h.value(m[2])
		return a << b, ok1 && ok2
	}
	s = strings.Trim(s, "()")
	if len(s) == 3 && s[0] == '\'' {
		return uint64(s[1]), true
	}
	if v, err := strconv.ParseUint(s, 0, 64); err == nil {
		return v, true
	}
	v, ok := h.numbers[s]
	return v, ok
}

// offset shows where a field of a structure lies, with C's padding.
func (h *header) offset(structure, name string) (uintptr, error) {
	var at uintptr
	for _, f := range h.structs[structure] {
		at = (at + f.size - 1) &^ (f.size - 1)
		if f.name == name {
			return at, nil
		}
		at += f.size
	}
	return 0, fmt.Errorf("struct %s has no %s: %v", structure, name, h.structs[structure])
}

type numbers map[string]uint64

type offsets map[string]uintptr

func (h *header) compare(t *testing.T, want numbers, at offsets) {
	t.Helper()
	for name, v := range want {
		got, ok := h.numbers[name]
		if !ok && !strings.Contains(h.text, name) {
			t.Logf("%s: this header is older and does not have it", name)
			continue
		}
		if !ok || got != v {
			t.Errorf("%s is %#x in the header (found: %v), %#x here", name, got, ok, v)
		}
	}
	for name, v := range at {
		structure, f, _ := strings.Cut(name, ".")
		if len(h.structs[structure]) == 0 && !strings.Contains(h.text, structure) {
			t.Logf("%s: this header is older and does not have it", structure)
			continue
		}
		if got, err := h.offset(structure, f); err != nil || got != v {
			t.Errorf("%s is at %d in the header (%v), at %d here", name, got, err, v)
		}
	}
}

func TestAgainstVFIOHeader(t *testing.T) {
	h := parseHeader(t, "vfio.h")
	if h == nil {
		t.Skip("linux/vfio.h is not installed (Debian: linux-libc-dev)")
	}
	if len(h.numbers) < 100 || len(h.structs) < 20 {
		t.Fatalf("parsed %d numbers and %d structures only", len(h.numbers), len(h.structs))
	}
	h.compare(t, numbers{
		"VFIO_API_VERSION": vfioAPIVersion, "VFIO_TYPE1v2_IOMMU": vfioType1v2IOMMU,
		"VFIO_GET_API_VERSION": vfioGetAPIVersion, "VFIO_CHECK_EXTENSION": vfioCheckExtension,
		"VFIO_SET_IOMMU":              vfioSetIOMMU,
		"VFIO_GROUP_GET_STATUS":       vfioGroupGetStatus,
		"VFIO_GROUP_SET_CONTAINER":    vfioGroupSetContainer,
		"VFIO_GROUP_GET_DEVICE_FD":    vfioGroupGetDeviceFD,
		"VFIO_DEVICE_GET_INFO":        vfioDeviceGetInfo,
		"VFIO_DEVICE_GET_REGION_INFO": vfioDeviceGetRegionInfo,
		"VFIO_DEVICE_GET_IRQ_INFO":    vfioDeviceGetIRQInfo,
		"VFIO_DEVICE_SET_IRQS":        vfioDeviceSetIRQs, "VFIO_DEVICE_RESET": vfioDeviceReset,
		"VFIO_IOMMU_GET_INFO": vfioIOMMUGetInfo, "VFIO_IOMMU_MAP_DMA": vfioIOMMUMapDMA,
		"VFIO_IOMMU_UNMAP_DMA":          vfioIOMMUUnmapDMA,
		"VFIO_DEVICE_BIND_IOMMUFD":      vfioDeviceBindIOMMUFD,
		"VFIO_DEVICE_ATTACH_IOMMUFD_PT": vfioDeviceAttachIOMMUFD,
		"VFIO_GROUP_FLAGS_VIABLE":       groupViable, "VFIO_DEVICE_FLAGS_RESET": deviceFlagReset,
		"VFIO_DEVICE_FLAGS_PCI":            deviceFlagPCI,
		"VFIO_REGION_INFO_FLAG_READ":       regionFlagRead,
		"VFIO_REGION_INFO_FLAG_WRITE":      regionFlagWrite,
		"VFIO_REGION_INFO_FLAG_MMAP":       regionFlagMmap,
		"VFIO_REGION_INFO_FLAG_CAPS":       regionFlagCaps,
		"VFIO_REGION_INFO_CAP_SPARSE_MMAP": regionCapSparseMmap,
		"VFIO_IRQ_INFO_EVENTFD":            irqInfoEventfd,
		"VFIO_IRQ_SET_DATA_EVENTFD":        irqSetDataEventfd,
		"VFIO_IRQ_SET_ACTION_TRIGGER":      irqSetActionTrigger,
		"VFIO_PCI_ERR_IRQ_INDEX":           irqIndexERR, "VFIO_PCI_REQ_IRQ_INDEX": irqIndexREQ,
		"VFIO_PCI_BAR0_REGION_INDEX": RegionBAR0, "VFIO_PCI_CONFIG_REGION_INDEX": RegionConfig,
		"VFIO_IOMMU_INFO_CAPS":                 iommuInfoCaps,
		"VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE": iommuInfoCapIOVARange,
		"VFIO_DMA_MAP_FLAG_READ":               dmaMapRead, "VFIO_DMA_MAP_FLAG_WRITE": dmaMapWrite,
	}, offsets{
		"vfio_group_status.flags":     unsafe.Offsetof(groupStatus{}.Flags),
		"vfio_device_info.flags":      unsafe.Offsetof(deviceInfo{}.Flags),
		"vfio_device_info.num_irqs":   unsafe.Offsetof(deviceInfo{}.NumIRQs),
		"vfio_device_info.cap_offset": unsafe.Offsetof(deviceInfo{}.CapOffset),
		"vfio_region_info.index":      unsafe.Offsetof(regionInfo{}.Index),
		"vfio_region_info.cap_offset": unsafe.Offsetof(regionInfo{}.CapOffset),
		"vfio_region_info.size":       unsafe.Offsetof(regionInfo{}.Size),
		"vfio_region_info.offset":     unsafe.Offsetof(regionInfo{}.Offset),
		"vfio_irq_info.index":         unsafe.Offsetof(irqInfo{}.Index),
		"vfio_irq_info.count":         unsafe.Offsetof(irqInfo{}.Count),
		"vfio_irq_set.index":          unsafe.Offsetof(irqSet{}.Index),
		"vfio_irq_set.start":          unsafe.Offsetof(irqSet{}.Start),
		"vfio_irq_set.count":          unsafe.Offsetof(irqSet{}.Count),

		"vfio_iommu_type1_info.iova_pgsizes":  unsafe.Offsetof(iommuInfo{}.IOVAPgsizes),
		"vfio_iommu_type1_info.cap_offset":    unsafe.Offsetof(iommuInfo{}.CapOffset),
		"vfio_iommu_type1_dma_map.flags":      unsafe.Offsetof(dmaMap{}.Flags),
		"vfio_iommu_type1_dma_map.vaddr":      unsafe.Offsetof(dmaMap{}.Vaddr),
		"vfio_iommu_type1_dma_map.iova":       unsafe.Offsetof(dmaMap{}.IOVA),
		"vfio_iommu_type1_dma_map.size":       unsafe.Offsetof(dmaMap{}.Size),
		"vfio_iommu_type1_dma_unmap.iova":     unsafe.Offsetof(dmaUnmap{}.IOVA),
		"vfio_iommu_type1_dma_unmap.size":     unsafe.Offsetof(dmaUnmap{}.Size),
		"vfio_device_bind_iommufd.iommufd":    unsafe.Offsetof(bindIOMMUFD{}.IOMMUFD),
		"vfio_device_bind_iommufd.out_devid":  unsafe.Offsetof(bindIOMMUFD{}.OutDevID),
		"vfio_device_attach_iommufd_pt.pt_id": unsafe.Offsetof(attachIOMMUFD{}.PtID),
	})
}

func TestAgainstIOMMUFDHeader(t *testing.T) {
	h := parseHeader(t, "iommufd.h")
	if h == nil {
		t.Skip("linux/iommufd.h is not installed (Linux 6.2 or later brings it)")
	}
	h.compare(t, numbers{
		"IOMMU_DESTROY": iommuDestroy, "IOMMU_IOAS_ALLOC": iommuIOASAlloc,
		"IOMMU_IOAS_IOVA_RANGES": iommuIOASIOVARanges,
		"IOMMU_IOAS_MAP":         iommuIOASMap, "IOMMU_IOAS_UNMAP": iommuIOASUnmap,
		"IOMMU_IOAS_MAP_FILE":       iommuIOASMapFile,
		"IOMMU_IOAS_MAP_FIXED_IOVA": ioasMapFixedIOVA, "IOMMU_IOAS_MAP_WRITEABLE": ioasMapWriteable,
		"IOMMU_IOAS_MAP_READABLE": ioasMapReadable,
	}, offsets{
		"iommu_ioas_alloc.out_ioas_id":         unsafe.Offsetof(ioasAlloc{}.OutIOASID),
		"iommu_ioas_iova_ranges.num_iovas":     unsafe.Offsetof(ioasIOVARanges{}.NumIOVAs),
		"iommu_ioas_iova_ranges.allowed_iovas": unsafe.Offsetof(ioasIOVARanges{}.AllowedIOVAs),
		"iommu_ioas_iova_ranges.out_iova_alignment": unsafe.Offsetof(
			ioasIOVARanges{}.OutIOVAAlignment),
		"iommu_ioas_map.ioas_id":    unsafe.Offsetof(ioasMap{}.IOASID),
		"iommu_ioas_map.user_va":    unsafe.Offsetof(ioasMap{}.UserVA),
		"iommu_ioas_map.length":     unsafe.Offsetof(ioasMap{}.Length),
		"iommu_ioas_map.iova":       unsafe.Offsetof(ioasMap{}.IOVA),
		"iommu_ioas_map_file.fd":    unsafe.Offsetof(ioasMapFile{}.FD),
		"iommu_ioas_map_file.start": unsafe.Offsetof(ioasMapFile{}.Start),
		"iommu_ioas_map_file.iova":  unsafe.Offsetof(ioasMapFile{}.IOVA),
		"iommu_ioas_unmap.ioas_id":  unsafe.Offsetof(ioasUnmap{}.IOASID),
		"iommu_ioas_unmap.length":   unsafe.Offsetof(ioasUnmap{}.Length),
	})
}
