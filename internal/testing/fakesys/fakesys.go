// Package fakesys builds a machine for tests: a tree of sysfs, proc and dev with NVMe controllers,
// and the kernel's part when a driver is bound or unbound. Only tests use it.
package fakesys

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"helios/internal/pci"
)

// SSD describes an NVMe controller with one namespace.
type SSD struct {
	Addr, Serial, Model, Firmware string // Model and Firmware have defaults
	Group                         int    // IOMMU group; -1 for none
	Bytes                         int64  // 0: 64 MiB
	LBABytes                      int    // 0: 512
	Multipath                     bool   // the block device hangs under the subsystem
	Driver                        string // at first; "" is nvme, "-" none
	Class                         uint32 // 0: an NVMe controller; others get no nvme driver
	Zoned                         bool   // host-managed zones
	Content                       []byte // the first bytes of its disk
	NQN                           string // of the subsystem; "": one of the serial number's own
	UUID                          string // of the namespace; "": none
}

// Machine is a fake machine. Its methods panic where the tree cannot be made: the test is wrong.
type Machine struct {
	Root string
	// Fail, where it is set, is asked before each write to sysfs; its error is the kernel's answer.
	Fail func(path, text string) error
	// DeviceNodes makes vfio-pci offer a node of each device, as kernels with iommufd do.
	DeviceNodes bool
	// DevicesOnly makes it list its devices without such nodes, as kernels from 6.1 on do.
	DevicesOnly bool

	mu     sync.Mutex
	ssds   map[string]*SSD
	number map[string]int // controller number by address
	minor  int
	writes []string
}

// New makes a machine below root with the drivers nvme and vfio-pci.
func New(root string) *Machine {
	m := &Machine{Root: root, ssds: map[string]*SSD{}, number: map[string]int{}}
	for _, d := range []string{"nvme", "vfio-pci"} {
		m.Mkdir("/sys/bus/pci/drivers/" + d)
	}
	for _, d := range []string{"/sys/bus/pci/devices", "/sys/class/block", "/sys/class/nvme",
		"/sys/class/nvme-generic", "/sys/kernel/iommu_groups", "/dev", "/run"} {
		m.Mkdir(d)
	}
	m.Put("/proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")
	m.Put("/proc/cmdline", "quiet\n")
	m.Process(4711, "heliosctl")
	m.Link("/proc/self", "4711")
	m.Process(1, "init")
	return m
}

// Sys is the view of the machine for the code under test.
func (m *Machine) Sys() pci.Sys { return pci.Sys{Root: m.Root, Write: m.write} }

// Put writes a file of the tree, and the folders above it.
func (m *Machine) Put(path, text string) {
	m.Mkdir(filepath.Dir(path))
	must(os.WriteFile(filepath.Join(m.Root, path), []byte(text), 0o644))
}

// Mkdir makes a folder of the tree.
func (m *Machine) Mkdir(path string) { must(os.MkdirAll(filepath.Join(m.Root, path), 0o755)) }

// Link makes a symbolic link of the tree.
func (m *Machine) Link(path, to string) {
	m.Mkdir(filepath.Dir(path))
	_ = os.Remove(filepath.Join(m.Root, path))
	must(os.Symlink(to, filepath.Join(m.Root, path)))
}

// Remove takes away a file or folder of the tree.
func (m *Machine) Remove(path string) { must(os.RemoveAll(filepath.Join(m.Root, path))) }

func must(err error) {
	if err != nil {
		panic("fakesys: " + err.Error())
	}
}

// Process makes a process in the first mount namespace, with the root file system mounted.
func (m *Machine) Process(pid int, comm string) {
	dir := fmt.Sprintf("/proc/%d", pid)
	m.Put(dir+"/comm", comm+"\n")
	m.Mkdir(dir + "/fd")
	m.Link(dir+"/ns/mnt", "mnt:[4026531840]")
	m.Put(dir+"/mountinfo", "22 1 0:21 / / rw,relatime - tmpfs tmpfs rw\n")
}

// Writes lists what was written to sysfs: "path text".
func (m *Machine) Writes() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.writes...)
}

// Add plugs in an SSD and gives it to its driver.
func (m *Machine) Add(s SSD) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.Model == "" {
		s.Model = "Fake NVMe"
	}
	if s.Firmware == "" {
		s.Firmware = "1.0"
	}
	if s.Bytes == 0 {
		s.Bytes = 64 << 20
	}
	if s.LBABytes == 0 {
		s.LBABytes = 512
	}
	if s.Class == 0 {
		s.Class = pci.NVMeClass
	}
	m.number[s.Addr] = len(m.ssds)
	m.ssds[s.Addr] = &s
	dir := device(s.Addr)
	m.Put(dir+"/class", fmt.Sprintf("0x%06x\n", s.Class))
	m.Put(dir+"/vendor", "0x1b36\n")
	m.Put(dir+"/device", "0x0010\n")
	m.Put(dir+"/driver_override", "(null)\n")
	m.Put(dir+"/numa_node", "-1\n")
	m.Put(dir+"/current_link_speed", "16.0 GT/s PCIe\n")
	m.Put(dir+"/current_link_width", "4\n")
	m.Link("/sys/bus/pci/devices/"+s.Addr, "../../../devices/pci0000:00/"+s.Addr)
	if s.Group >= 0 {
		g := fmt.Sprintf("/sys/kernel/iommu_groups/%d", s.Group)
		m.Link(dir+"/iommu_group", "../../../kernel/iommu_groups/"+strconv.Itoa(s.Group))
		m.Link(g+"/devices/"+s.Addr, "../../../../devices/pci0000:00/"+s.Addr)
	}
	switch {
	case s.Driver == "-":
	case s.Driver != "":
		m.attach(s.Addr, s.Driver)
	case s.Class == pci.NVMeClass:
		m.attach(s.Addr, "nvme")
	}
}

// Virtual makes vf a virtual function of pf (SR-IOV).
func (m *Machine) Virtual(pf, vf string) {
	m.Link(device(pf)+"/virtfn0", "../"+vf)
	m.Link(device(vf)+"/physfn", "../"+pf)
}

// Name is the namespace's block device when the kernel drives the SSD: nvme0n1.
func (m *Machine) Name(addr string) string { return fmt.Sprintf("nvme%dn1", m.number[addr]) }

func device(addr string) string { return "/sys/devices/pci0000:00/" + addr }

// block makes a block device at dir, with its entry in class/block and its file in dev.
func (m *Machine) block(dir string, bytes int64, lba int) {
	m.minor++
	name := filepath.Base(dir)
	m.Put(dir+"/dev", fmt.Sprintf("259:%d\n", m.minor))
	m.Put(dir+"/size", fmt.Sprintf("%d\n", bytes/512))
	m.Put(dir+"/queue/logical_block_size", fmt.Sprintf("%d\n", lba))
	m.Mkdir(dir + "/holders")
	m.Link("/sys/class/block/"+name, "../../"+strings.TrimPrefix(dir, "/sys/"))
	f := filepath.Join(m.Root, "dev", name)
	must(os.WriteFile(f, nil, 0o644))
	must(os.Truncate(f, bytes))
}

// Block makes another block device, such as dm-0 or md0.
func (m *Machine) Block(name string, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.block("/sys/devices/virtual/block/"+name, bytes, 512)
}

// Partition makes partition n of a block device.
func (m *Machine) Partition(disk string, n int, bytes int64) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	real, err := filepath.EvalSymlinks(filepath.Join(m.Root, "/sys/class/block", disk))
	must(err)
	dir := strings.TrimPrefix(real, must1(filepath.EvalSymlinks(m.Root)))
	name := fmt.Sprintf("%sp%d", disk, n)
	m.block(dir+"/"+name, bytes, 512)
	m.Put(dir+"/"+name+"/partition", fmt.Sprintln(n))
	return name
}

func must1(s string, err error) string { must(err); return s }

// Dev is the number of a block device, as in mountinfo.
func (m *Machine) Dev(name string) string {
	b, err := os.ReadFile(filepath.Join(m.Root, "/sys/class/block", name, "dev"))
	must(err)
	return strings.TrimSpace(string(b))
}

// Fill writes to a block device's file.
func (m *Machine) Fill(name string, at int64, text string) {
	f, err := os.OpenFile(filepath.Join(m.Root, "dev", name), os.O_WRONLY, 0)
	must(err)
	_, err = f.WriteAt([]byte(text), at)
	must(err)
	must(f.Close())
}

// attach gives a device to a driver, as probing does.
func (m *Machine) attach(addr, driver string) {
	m.Link(device(addr)+"/driver", "../../../bus/pci/drivers/"+driver)
	m.Link("/sys/bus/pci/drivers/"+driver+"/"+addr, "../../../../devices/pci0000:00/"+addr)
	s := m.ssds[addr]
	if driver != "nvme" {
		if s.Group >= 0 {
			m.Put(fmt.Sprintf("/dev/vfio/%d", s.Group), "")
			must(os.Chmod(filepath.Join(m.Root, fmt.Sprintf("/dev/vfio/%d", s.Group)), 0o600))
		}
		if m.DevicesOnly {
			m.Mkdir(device(addr) + fmt.Sprintf("/vfio-dev/vfio%d", m.number[addr]))
		}
		if m.DeviceNodes {
			node := fmt.Sprintf("vfio%d", m.number[addr])
			m.Put(device(addr)+"/vfio-dev/"+node+"/dev", fmt.Sprintf("511:%d\n", m.number[addr]))
			m.Put("/dev/vfio/devices/"+node, "")
			must(os.Chmod(filepath.Join(m.Root, "/dev/vfio/devices", node), 0o600))
		}
		return
	}
	n := m.number[addr]
	ctrl := fmt.Sprintf("%s/nvme/nvme%d", device(addr), n)
	nqn := s.NQN
	if nqn == "" {
		nqn = "nqn.2019-08.org.qemu:" + s.Serial
	}
	for k, v := range map[string]string{"serial": s.Serial, "model": s.Model,
		"firmware_rev": s.Firmware, "state": "live", "transport": "pcie",
		"subsysnqn": nqn} {
		m.Put(ctrl+"/"+k, v+"\n")
	}
	m.Put(fmt.Sprintf("/dev/nvme%d", n), "")
	m.Link(fmt.Sprintf("/sys/class/nvme/nvme%d", n), "../../devices/pci0000:00/"+addr+
		fmt.Sprintf("/nvme/nvme%d", n))
	head := ctrl
	if s.Multipath {
		head = fmt.Sprintf("/sys/devices/virtual/nvme-subsystem/nvme-subsys%d", n)
		m.Put(fmt.Sprintf("%s/nvme%dc%dn1/size", ctrl, n, n), fmt.Sprintf("%d\n", s.Bytes/512))
	}
	m.block(head+"/"+m.Name(addr), s.Bytes, s.LBABytes)
	m.Put(head+"/"+m.Name(addr)+"/nsid", "1\n")
	if s.UUID != "" {
		m.Put(head+"/"+m.Name(addr)+"/uuid", s.UUID+"\n")
	}
	zones := "none\n"
	if s.Zoned {
		zones = "host-managed\n"
	}
	m.Put(head+"/"+m.Name(addr)+"/queue/zoned", zones)
	generic := fmt.Sprintf("ng%dn1", n)
	m.Mkdir(head + "/" + generic)
	m.Link("/sys/class/nvme-generic/"+generic, "../../"+strings.TrimPrefix(head, "/sys/")+"/"+
		generic)
	m.Put("/dev/"+generic, "")
	m.Fill(m.Name(addr), 0, string(s.Content))
}

// detach takes a device from its driver.
func (m *Machine) detach(addr, driver string) {
	m.Remove(device(addr) + "/driver")
	m.Remove("/sys/bus/pci/drivers/" + driver + "/" + addr)
	if driver != "nvme" {
		m.Remove(fmt.Sprintf("/dev/vfio/%d", m.ssds[addr].Group))
		m.Remove(device(addr) + "/vfio-dev")
		m.Remove(fmt.Sprintf("/dev/vfio/devices/vfio%d", m.number[addr]))
		return
	}
	n := m.number[addr]
	m.Remove(device(addr) + "/nvme")
	m.Remove(fmt.Sprintf("/sys/devices/virtual/nvme-subsystem/nvme-subsys%d", n))
	for _, p := range []string{"/sys/class/nvme/nvme%d", "/sys/class/block/nvme%dn1",
		"/sys/class/nvme-generic/ng%dn1", "/dev/nvme%d", "/dev/nvme%dn1", "/dev/ng%dn1"} {
		m.Remove(fmt.Sprintf(p, n))
	}
}

// Driver is the driver that has a device, "" for none.
func (m *Machine) Driver(addr string) string {
	l, err := os.Readlink(filepath.Join(m.Root, device(addr), "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(l)
}

// matches is the bus's match: an override decides alone, else the class.
func (m *Machine) matches(addr, driver string) bool {
	if o := m.override(addr); o != "" {
		return o == driver
	}
	return driver == "nvme" && m.ssds[addr].Class == pci.NVMeClass
}

func (m *Machine) override(addr string) string {
	b, err := os.ReadFile(filepath.Join(m.Root, device(addr), "driver_override"))
	must(err)
	if t := strings.TrimSpace(string(b)); t != "(null)" {
		return t
	}
	return ""
}

// write plays the kernel: drivers/pci/pci-sysfs.c and drivers/base/bus.c.
func (m *Machine) write(path, text string) error {
	if m.Fail != nil {
		if err := m.Fail(path, text); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	text = strings.TrimSuffix(text, "\n")
	m.writes = append(m.writes, path+" "+text)
	dir, attr := filepath.Split(path)
	dir = filepath.Clean(dir)
	if attr == "driver_override" {
		if m.ssds[filepath.Base(dir)] == nil {
			return syscall.ENOENT
		}
		if text == "" {
			text = "(null)"
		}
		m.Put(path, text+"\n")
		return nil
	}
	s := m.ssds[text]
	if s == nil {
		return syscall.ENODEV
	}
	driver := filepath.Base(dir)
	switch {
	case attr == "unbind" && m.Driver(text) == driver:
		m.detach(text, driver)
	case attr == "bind" && m.Driver(text) == "" && m.matches(text, driver):
		if driver == "vfio-pci" && s.Group < 0 {
			return syscall.EINVAL
		}
		m.attach(text, driver)
	case attr == "bind" && m.Driver(text) != "" && m.matches(text, driver):
		return syscall.EBUSY
	case attr == "drivers_probe":
		if m.Driver(text) != "" {
			return nil
		}
		for _, d := range []string{"nvme", "vfio-pci"} {
			if m.matches(text, d) {
				m.attach(text, d)
				break
			}
		}
	case attr == "bind", attr == "unbind":
		return syscall.ENODEV
	default:
		return syscall.ENOENT
	}
	return nil
}
