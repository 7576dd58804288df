// Package pci looks at PCI devices through sysfs and moves them from one kernel driver to another.
package pci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"helios/internal/errs"
)

// Sys is a view of the machine. Root "" is the real one; tests give a folder that holds "sys",
// "proc", "dev" and "run" as they would be below "/".
type Sys struct {
	Root string
	// Wait bounds each wait for the kernel to bind, unbind or probe; 0 is half a minute.
	Wait time.Duration
	// Write, where it is set, is called instead of writing text to the sysfs attribute at path (as
	// below "/"). Tests put a kernel there (package fakesys).
	Write func(path, text string) error
}

// NVMeClass is the class code of NVM Express I/O controllers (PCI Code and ID Assignment, 01 08
// 02).
const NVMeClass = 0x010802

// bridgeClass is that of PCI-to-PCI bridges without the programming interface (06 04).
const bridgeClass = 0x0604

// ErrNotFound is in the error of a name that no device of this machine has.
var ErrNotFound = errors.New("not found")

// Device is one function.
type Device struct {
	Addr      string // 0000:00:04.0
	Vendor    uint16
	DeviceID  uint16
	Class     uint32 // 24 bits
	Driver    string // bound kernel driver, "" for none
	Override  string // driver_override, "" for none
	Group     int    // IOMMU group, -1 without one
	NoIOMMU   bool   // the kernel's only group for it is one of VFIO's mode without an IOMMU
	NUMANode  int    // -1 when unknown
	LinkSpeed string // "16.0 GT/s PCIe", "" when unknown
	LinkWidth int    // lanes, 0 when unknown
	VFs       int    // virtual functions that are enabled (SR-IOV)
	PF        string // of a virtual function: the address of its physical function
	Busy      bool   // the kernel is still binding or unbinding it; Override is unknown
}

// NVMe reports whether the function is an NVMe I/O controller.
func (d Device) NVMe() bool { return d.Class == NVMeClass }

// Taken reports whether the function was taken from its own driver, or is halfway there: an
// override is set, or a VFIO driver has it. Bind and Restore go on from every such state.
func (d Device) Taken() bool { return d.Override != "" || strings.HasPrefix(d.Driver, "vfio") }

// Path is an absolute path of this view: below Root.
func (s Sys) Path(elem ...string) string {
	p := filepath.Join(elem...)
	if s.Root == "" {
		return filepath.Join("/", p)
	}
	return filepath.Join(s.Root, p)
}

const devicesDir = "/sys/bus/pci/devices"

var address = regexp.MustCompile(`^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// Address returns the full form of a PCI address, which may lack the domain; ok is false where name
// is no such address.
func Address(name string) (addr string, ok bool) {
	m := address.FindStringSubmatch(strings.ToLower(name))
	if m == nil {
		return "", false
	}
	if m[1] == "" {
		m[1] = "0000"
	}
	return m[1] + ":" + m[2] + ":" + m[3] + "." + m[4], true
}

// Devices lists the functions of a class (0: all) in the order of their addresses.
func (s Sys) Devices(class uint32) ([]Device, error) {
	names, err := s.list(devicesDir)
	if err != nil {
		return nil, fmt.Errorf("listing PCI devices: %w", err)
	}
	var out []Device
	for _, n := range names {
		d, err := s.Device(n)
		if errors.Is(err, ErrNotFound) { // unplugged meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		if class == 0 || d.Class == class {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b Device) int {
		if len(a.Addr) != len(b.Addr) { // longer domains come later
			return len(a.Addr) - len(b.Addr)
		}
		return strings.Compare(a.Addr, b.Addr)
	})
	return out, nil
}

// Device reads one function; addr may lack the domain ("00:04.0").
func (s Sys) Device(addr string) (Device, error) {
	full, ok := Address(addr)
	if !ok {
		return Device{}, errs.New(errs.Usage, "%q is not a PCI address such as 0000:3b:00.0", addr)
	}
	dir := devicesDir + "/" + full
	class, err := s.hex(dir+"/class", 24)
	if errors.Is(err, fs.ErrNotExist) {
		return Device{}, errs.New(errs.Usage,
			"PCI device %s: %w; \"heliosctl ssds\" lists the NVMe controllers", full, ErrNotFound)
	}
	if err != nil {
		return Device{}, fmt.Errorf("PCI device %s: %w", full, err)
	}
	d := Device{Addr: full, Class: uint32(class), Group: -1, NUMANode: -1}
	vendor, _ := s.hex(dir+"/vendor", 16)
	device, _ := s.hex(dir+"/device", 16)
	d.Vendor, d.DeviceID = uint16(vendor), uint16(device)
	d.Driver = s.driver(full)
	d.Override, d.Busy = s.override(full)
	if g, err := os.Readlink(s.Path(dir, "iommu_group")); err == nil {
		if n, err := strconv.Atoi(filepath.Base(g)); err == nil {
			d.Group = n
		}
	}
	if d.Group >= 0 && !s.Translates(d.Group) {
		d.Group, d.NoIOMMU = -1, true
	}
	if n, err := strconv.Atoi(s.text(dir + "/numa_node")); err == nil {
		d.NUMANode = n
	}
	if l := s.text(dir + "/current_link_speed"); !strings.HasPrefix(l, "Unknown") {
		d.LinkSpeed = l
	}
	// 255: unknown
	if n, err := strconv.Atoi(s.text(dir + "/current_link_width")); err == nil && n < 255 {
		d.LinkWidth = n
	}
	d.VFs, _ = strconv.Atoi(s.text(dir + "/sriov_numvfs"))
	if vfs, err := filepath.Glob(s.Path(dir, "virtfn*")); err == nil {
		d.VFs = max(d.VFs, len(vfs))
	}
	if pf, err := os.Readlink(s.Path(dir, "physfn")); err == nil {
		d.PF = filepath.Base(pf)
	}
	return d, nil
}

// LinkBytes is the most bytes a second that the device's link carries in one direction, packets'
// headers among them; 0 where the kernel does not tell. PCIe sends 8 bits as 10 at up to 5 GT/s,
// and above that 128 as 130.
func (d *Device) LinkBytes() float64 {
	number, _, _ := strings.Cut(d.LinkSpeed, " ")
	gt, err := strconv.ParseFloat(number, 64)
	if err != nil || !(gt > 0 && gt < 1e3) {
		return 0
	}
	code := 128.0 / 130
	if gt <= 5 {
		code = 8.0 / 10
	}
	return gt * 1e9 * code / 8 * float64(d.LinkWidth)
}

// driver is the name of the bound driver.
func (s Sys) driver(addr string) string {
	l, err := os.Readlink(s.Path(devicesDir, addr, "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(l)
}

// busyAfter bounds the time of the kernel to read out an override, for which it needs the
// device's lock: binding and unbinding hold it.
const busyAfter = 2 * time.Second

func (s Sys) override(addr string) (name string, busy bool) {
	got := make(chan string, 1)
	go func() { got <- s.text(devicesDir + "/" + addr + "/driver_override") }()
	t := time.NewTimer(busyAfter)
	defer t.Stop()
	select {
	case name = <-got:
	case <-t.C:
		return "", true
	}
	if name == "(null)" {
		name = ""
	}
	return name, false
}

// Translates tells a group of an IOMMU from one that VFIO makes up in its mode without an IOMMU
// (Linux, CONFIG_VFIO_NOIOMMU), in which a device reaches all memory.
func (s Sys) Translates(group int) bool {
	return s.text(fmt.Sprintf("/sys/kernel/iommu_groups/%d/name", group)) != "vfio-noiommu"
}

// GroupMembers lists the functions of an IOMMU group other than PCI-to-PCI bridges, which VFIO
// leaves with their driver.
func (s Sys) GroupMembers(group int) ([]Device, error) {
	dir := fmt.Sprintf("/sys/kernel/iommu_groups/%d/devices", group)
	names, err := s.list(dir)
	if err != nil {
		return nil, fmt.Errorf("IOMMU group %d: %w", group, err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("IOMMU group %d: %w", group, ErrNotFound)
	}
	var out []Device
	for _, n := range names {
		d, err := s.Device(n)
		if err != nil {
			return nil, fmt.Errorf("IOMMU group %d: %w", group, err)
		}
		if d.Class>>8 != bridgeClass {
			out = append(out, d)
		}
	}
	return out, nil
}

// list returns the names in a folder of this view, sorted; none where there is no such folder.
func (s Sys) list(dir string) ([]string, error) {
	es, err := os.ReadDir(s.Path(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	out := make([]string, len(es))
	for i, e := range es {
		out[i] = e.Name()
	}
	return out, nil
}

// text returns an attribute without white space around it, "" where it cannot be read.
func (s Sys) text(path string) string {
	b, err := os.ReadFile(s.Path(path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// hex reads an attribute such as 0x010802.
func (s Sys) hex(path string, bits int) (uint64, error) {
	b, err := os.ReadFile(s.Path(path))
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimSpace(string(b)), "0x"), 16, bits)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// Bits of the configuration space (PCI Local Bus Specification 3.0, chapter 6).
const (
	configStatus    = 0x06
	statusCapList   = 1 << 4
	configCapList   = 0x34
	firstCapability = 0x40
	lastCapability  = 256 - 8 // those of interest here have 8 bytes or more
	maxCapabilities = 48      // what fits into 256 bytes
)

// Capability finds a capability in a function's configuration space, which read reads; 0: the
// function does not have it. A list that runs in a circle ends.
func Capability(read func(b []byte, off int64) error, id byte) (int64, error) {
	var b [2]byte
	if err := read(b[:], configStatus); err != nil || b[0]&statusCapList == 0 {
		return 0, err
	}
	if err := read(b[:1], configCapList); err != nil {
		return 0, err
	}
	off := int64(b[0]) &^ 3
	for range maxCapabilities {
		if off < firstCapability || off > lastCapability {
			break
		}
		if err := read(b[:], off); err != nil || b[0] == id {
			return off, err
		}
		off = int64(b[1]) &^ 3
	}
	return 0, nil
}
