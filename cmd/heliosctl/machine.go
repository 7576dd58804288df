package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/bound"
	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/probe"
	"helios/internal/state"
	"helios/internal/ui"
	"helios/internal/vfio"
	"helios/nvme"
)

const vfioDriver = bound.VFIODriver

// kernelDriver is the kernel's own NVMe driver.
const kernelDriver = "nvme"

// machine is the computer as verbs see and change it. Tests have one made of files.
type machine struct {
	bound.Machine
	bind    func(addr, driver string) error
	restore func(addr, driver string) error
	uses    func(addr string) ([]diskuse.Use, error) // for who wants to take it
	// identify asks the kernel's driver of a controller (nvme0) for a namespace's Identify data.
	identify func(ctrl string, nsid int) (nvme.IdentifyNamespace, error)
	typed    func() io.Reader // where a serial number is asked for; nil where nobody sits
}

// thisMachine makes the machine of a run; tests replace it.
var thisMachine = func() *machine { return machineOf(pci.Sys{}) }

func machineOf(sys pci.Sys) *machine {
	return &machine{
		Machine: bound.MachineOf(sys),
		bind:    sys.Bind,
		restore: sys.Restore,
		uses: func(addr string) ([]diskuse.Use,
			error) {
			return diskuse.OfController(sys, addr)
		},
		identify: func(ctrl string, nsid int) (nvme.IdentifyNamespace, error) {
			return identifyOf(sys.Path("/dev", ctrl), uint32(nsid))
		},
		typed: func() io.Reader {
			if ui.IsTerminal(os.Stderr) {
				if _, err := unix.IoctlGetTermios(int(os.Stdin.Fd()), unix.TCGETS); err == nil {
					return os.Stdin
				}
			}
			return nil
		},
	}
}

// controller is an NVMe controller of the machine, whoever has it.
type controller struct {
	pci.Device
	Kernel pci.Controller // what the kernel's nvme driver says of it, while it has it
	Record *state.Record  // ours, or half on its way
	// Others say by which bound controllers its namespaces are reached as well.
	Others []string
}

// text is the name of a controller in messages.
func (c *controller) text() string {
	if c.Kernel.Name != "" {
		return c.Addr + " (/dev/" + c.Kernel.Name + ")"
	}
	if c.Record != nil {
		return c.Addr + " (" + c.Record.Name + ")"
	}
	return c.Addr
}

// serial, model, bytes and lbaBytes are what the kernel says now, else what our record says; of
// several namespaces it is the one that we would use.
func (c *controller) serial() string {
	if c.Kernel.Name == "" && c.Record != nil {
		return c.Record.Serial
	}
	return c.Kernel.Serial
}

func (c *controller) model() string {
	if c.Kernel.Name == "" && c.Record != nil {
		return c.Record.Controller
	}
	return c.Kernel.Model
}

func (c *controller) bytes() int64 {
	if c.Kernel.Name == "" && c.Record != nil {
		return c.Record.Bytes
	}
	ns, _ := c.Kernel.First()
	return ns.Bytes
}

func (c *controller) lbaBytes() int {
	if c.Kernel.Name == "" && c.Record != nil {
		return c.Record.LBABytes
	}
	ns, _ := c.Kernel.First()
	return ns.LBABytes
}

// disks are the names of its block devices, such as nvme0n1.
func (c *controller) disks() []string {
	var out []string
	for _, d := range c.Kernel.Namespaces {
		out = append(out, d.Name)
	}
	return out
}

// link is the PCIe link in words.
func (c *controller) link() string {
	if c.LinkSpeed == "" || c.LinkWidth == 0 {
		return ""
	}
	return c.LinkSpeed + " x" + strconv.Itoa(c.LinkWidth)
}

// unfit returns the reason why the namespace that we would use cannot be used, as far as the
// kernel's driver shows it; "" for none.
func (m *machine) unfit(c *controller) string {
	if c.Kernel.Name == "" {
		return ""
	}
	ns, there := c.Kernel.First()
	switch {
	case !there && (c.Kernel.State == "live" || c.Kernel.State == ""):
		return "/dev/" + c.Kernel.Name +
			" has no namespace that the kernel shows as a disk; create and attach one with \"nvme create-ns\" and \"nvme attach-ns\""
	case !there:
		return ""
	case ns.Zoned:
		return "/dev/" + ns.Name +
			" has zones, which must be written in order; only the NVM command set is supported"
	case ns.LBABytes > 4096:
		return fmt.Sprintf(
			"/dev/%s has LBAs of %d bytes, which are not supported, only 512 and 4096; format it to one of them with \"nvme format\"",
			ns.Name, ns.LBABytes)
	}
	// The kernel shows some formats that it cannot use itself as a disk of no bytes, and does not
	// say everywhere which have metadata. The controller tells root.
	id, err := m.identify(c.Kernel.Name, ns.NSID)
	if err == nil {
		_, err = nvme.MakeNamespace(uint32(ns.NSID), &id)
		if err == nil {
			return ""
		}
		return fmt.Sprintf("/dev/%s cannot be used: %v", ns.Name, err)
	}
	dir := "/sys/class/block/" + ns.Name
	meta, pi := m.attr(dir+"/metadata_bytes"), m.attr(dir+"/integrity/format")
	switch {
	case meta != "" && meta != "0":
		return fmt.Sprintf(
			"/dev/%s has %s bytes of metadata per block; format it to none with \"nvme format\"",
			ns.Name, meta)
	case pi != "" && pi != "none":
		return fmt.Sprintf(
			"/dev/%s has metadata (integrity format %s) in each block; format it to none with \"nvme format\"",
			ns.Name, pi)
	case ns.Bytes > 0 || errors.Is(err, os.ErrPermission):
		return ""
	}
	return fmt.Sprintf("/dev/%s has no bytes for the kernel: %v", ns.Name, err)
}

// attr reads a file of the kernel's, "" where there is none.
func (m *machine) attr(p string) string {
	b, err := os.ReadFile(m.Sys.Path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// controllers lists the NVMe controllers of the machine in the order of their addresses.
func (m *machine) controllers(records []state.Record) ([]controller, error) {
	devices, err := m.Sys.Devices(pci.NVMeClass)
	if err != nil {
		return nil, err
	}
	out := make([]controller, len(devices))
	for i, d := range devices {
		if out[i], err = m.look(d, records); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// look adds to a PCI function what the kernel's nvme driver and our records say about it.
func (m *machine) look(d pci.Device, records []state.Record) (controller, error) {
	c := controller{Device: d}
	if i := slices.IndexFunc(records,
		func(r state.Record) bool { return r.PCI == d.Addr }); i >= 0 {
		c.Record = &records[i]
	}
	var err error
	if c.Kernel, err = m.Sys.NVMe(d.Addr); err != nil && !errors.Is(err, pci.ErrNotFound) {
		return c, err
	}
	for _, ns := range c.Kernel.Namespaces {
		for _, p := range m.BoundPaths(ns.ID, d.Addr, records) {
			c.Others = append(c.Others, "/dev/"+ns.Name+" "+p)
		}
	}
	return c, nil
}

// choose finds the controllers that arguments name, each once, in the order of the arguments: by
// PCI address, serial number, /dev/nvmeX, /dev/nvmeXnY or a link to one, or the name that we gave
// it.
func (m *machine) choose(args []string, records []state.Record) ([]controller, error) {
	var out []controller
	for _, a := range args {
		var d pci.Device
		var err error
		if i := slices.IndexFunc(records, func(r state.Record) bool { return r.Is(a) }); i >= 0 {
			d, err = m.Sys.Device(records[i].PCI)
		} else {
			d, err = m.Sys.Find(a)
		}
		if errors.Is(err, pci.ErrNotFound) { // what the kernel called one that we have
			if i := slices.IndexFunc(records,
				func(r state.Record) bool { return r.Was(a) }); i >= 0 {
				d, err = m.Sys.Device(records[i].PCI)
			}
		}
		if errors.Is(err, pci.ErrNotFound) {
			if fi, serr := os.Stat(a); serr == nil &&
				(fi.Mode().IsRegular() || fi.Mode()&os.ModeDevice != 0) {
				err = errs.New(errs.Usage,
					"%s is no NVMe device; for a file or block device write {proxy} %s", a, a)
			} else {
				err = errs.Errorf("%w; for a file write {proxy} PATH", err)
			}
		}
		if err != nil {
			return nil, err
		}
		c, err := m.look(d, records)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(out, func(o controller) bool { return o.Addr == c.Addr }) {
			out = append(out, c)
		}
	}
	return out, nil
}

// ready returns the error of what the machine lacks to bind the chosen controllers.
func (m *machine) ready(chosen []candidate) error {
	for _, c := range chosen {
		if c.NoIOMMU {
			return errs.New(errs.Capability,
				"%s: its group is of VFIO's unsafe mode without an IOMMU (enable_unsafe_noiommu_mode), in which an SSD reaches all memory, and which heliosctl does not use: %s",
				c.text(), m.noIOMMU())
		}
		if c.Group < 0 {
			return errs.New(errs.Capability, "%s is in no IOMMU group: %s", c.text(), m.noIOMMU())
		}
	}
	if f := vfio.Remapping(m.Sys); f.Answer == probe.NotThere {
		return errs.New(errs.Capability,
			"this machine has no interrupt remapping (%s), without which the kernel gives no device to user space; %s",
			f.Detail, f.Next)
	}
	if !m.Root() {
		return errs.New(errs.Capability,
			"changing a device's driver needs root: run the same command with sudo; using bound SSDs does not")
	}
	if _, err := os.Stat(m.Sys.Path("/sys/bus/pci/drivers", vfioDriver)); err != nil {
		return errs.New(errs.Capability,
			"the kernel module vfio-pci is not loaded: run \"sudo heliosctl vfio-setup setup\" once, or \"sudo modprobe vfio-pci\"")
	}
	return nil
}

// noIOMMU is the advice to switch this machine's IOMMU on.
func (m *machine) noIOMMU() string { return vfio.NoIOMMU(m.Sys) }

// groupNode is the device node of an IOMMU group.
func groupNode(group int) string { return "/dev/vfio/" + strconv.Itoa(group) }

// busy reports whether another process has a group open: the kernel lets one at a time.
func (m *machine) busy(group int) bool {
	f, err := os.OpenFile(m.Sys.Path(groupNode(group)), os.O_RDWR, 0)
	if err == nil {
		_ = f.Close() // nothing was done with it
	}
	return errors.Is(err, unix.EBUSY)
}

// claim opens disks exclusively, so that until release nobody can mount, swap to or stack on them.
func (m *machine) claim(disks []pci.Namespace) (release func(), err error) {
	var files []*os.File
	release = func() {
		for _, f := range files {
			_ = f.Close() // only read, if at all
		}
	}
	for _, d := range disks {
		f, err := os.OpenFile(m.Sys.Path("/dev", d.Name), os.O_RDONLY|unix.O_EXCL, 0)
		switch {
		case errors.Is(err, unix.EBUSY):
			release()
			return nil, errs.New(errs.Refused,
				"/dev/%s came into use just now: mounted, swap, or held by RAID, LVM or another device; choose another SSD, or end that use",
				d.Name)
		case err == nil:
			files = append(files, f)
		case !errors.Is(err, os.ErrNotExist): // no node, no user
			release()
			return nil, errs.New(errs.Device, "/dev/%s: %w", d.Name, err)
		}
	}
	return release, nil
}

// readLine returns a channel that gets the next line that somebody types, or an empty one at the
// end of the input. Nothing interrupts a read from a terminal: where nobody waits any more, the
// read ends with the line.
func readLine(b *bufio.Reader) <-chan string {
	line := make(chan string, 1)
	go func() {
		s, _ := b.ReadString('\n') // an error is the end of the input
		line <- strings.TrimSpace(s)
	}()
	return line
}
