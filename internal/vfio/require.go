package vfio

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/probe"
)

// The needs of real SSDs: "heliosctl doctor" and bind-ssds ask here, and "vfio-setup.sh
// status" asks the same of the same files, since it also runs where there is no heliosctl
// (tools/setuptest compares the two). A change here is a change there.

// The names of the findings that have to be there.
const (
	NeedIOMMU     = "IOMMU"
	NeedRemapping = "interrupt remapping"
	NeedBackend   = "VFIO backend"
	NeedDriver    = "vfio-pci"
	NeedLocked    = "locked memory"
	NeedGroup     = "group"
)

// Needs are those of an ordinary user; root needs all but the last two.
var Needs = []string{NeedIOMMU, NeedRemapping, NeedDriver, NeedBackend, NeedLocked, NeedGroup}

// attr reads a file of the kernel's, "" where there is none.
func (m machine) attr(path string) string {
	b, _ := os.ReadFile(m.path(path))
	return strings.TrimSpace(string(b))
}

// argument returns the first of the kernel's arguments that begins with one of the words, or "".
func (m machine) argument(words ...string) string {
	for _, a := range strings.Fields(m.attr("/proc/cmdline")) {
		for _, w := range words {
			if a == w || strings.HasSuffix(w, "=") && strings.HasPrefix(a, w) {
				return a
			}
		}
	}
	return ""
}

// loaded reports whether a module is there, by its name with underscores; also when it is built in.
func (m machine) loaded(module string) bool {
	if m.exists("/sys/module/" + module) {
		return true
	}
	builtin := m.attr("/lib/modules/" + m.attr("/proc/sys/kernel/osrelease") + "/modules.builtin")
	return strings.Contains(strings.ReplaceAll(builtin, "-", "_"), "/"+module+".ko")
}

// NoIOMMU describes how a machine gets its IOMMU switched on.
func NoIOMMU(sys pci.Sys) string { return machine{root: sys.Root}.noIOMMU() }

func (m machine) noIOMMU() string {
	table := func(name string) bool { return m.exists("/sys/firmware/acpi/tables/" + name) }
	cpu := m.attr("/proc/cpuinfo")
	intel, amd := strings.Contains(cpu, "GenuineIntel"), strings.Contains(cpu, "AuthenticAMD")
	off := m.argument("intel_iommu=off", "amd_iommu=off", "iommu=off")
	virtual := table("VIOT") && !table("DMAR") && !table("IVRS")
	switch {
	case virtual && !m.loaded("virtio_iommu"):
		return "the firmware offers a virtual IOMMU (VIOT), whose driver virtio_iommu is not loaded; \"sudo modprobe virtio_iommu\", and put virtio_iommu into the initramfs (Debian, Ubuntu: /etc/initramfs-tools/modules, then \"sudo update-initramfs -u\"; RHEL, Fedora: a line add_drivers+=virtio_iommu in /etc/dracut.conf.d/virtio_iommu.conf, then \"sudo dracut -f\") and reboot, for devices must come after it"
	case virtual:
		return "the firmware offers a virtual IOMMU (VIOT) and virtio_iommu is loaded, but no device is behind it; the kernel's log explains why (\"sudo dmesg | grep -i iommu\")"
	case off != "":
		return "the kernel argument " + off +
			" keeps the IOMMU off; take it out of the boot loader's command line, and reboot"
	case amd && table("IVRS"):
		return "the firmware offers the IOMMU (AMD-Vi), but the kernel does not use it; its log explains why (\"sudo dmesg | grep AMD-Vi\"): often a firmware update helps, or a kernel with CONFIG_AMD_IOMMU"
	case intel && m.argument("intel_iommu=") != "":
		return "intel_iommu=on is given, so the firmware hides the IOMMU; switch on VT-d (\"Virtualization Technology for Directed I/O\") in its set-up"
	case intel:
		return "the IOMMU is not on; add intel_iommu=on iommu=pt to the kernel's command line in the boot loader, switch on VT-d in the firmware's set-up, and reboot"
	case amd:
		return "the IOMMU is not on; switch on IOMMU (AMD-Vi) in the firmware's set-up, add iommu=pt to the kernel's command line in the boot loader, and reboot"
	}
	if strings.Contains(cpu, "CPU implementer") { // Arm
		return "the IOMMU is not on; switch the SMMU on in the firmware's set-up, and reboot"
	}
	return "the IOMMU is not on; switch it on in the firmware's set-up (VT-d, AMD-Vi or SMMU), with an Intel CPU also add intel_iommu=on to the kernel's command line, and reboot"
}

const remappingHint = "turn on interrupt remapping beside VT-d or AMD-Vi in the firmware's set-up, and take intremap=off out of the kernel arguments; in a virtual machine its host gives it: QEMU with -machine kernel-irqchip=split -device intel-iommu,intremap=on, libvirt with <ioapic driver='qemu'/> and <iommu model='intel'><driver intremap='on'/></iommu>"

// Remapping reports whether the IOMMU checks interrupts. Without that a device can raise any
// interrupt by a write, and the kernel gives none to user space unless its parameter
// allow_unsafe_interrupts says so.
func Remapping(sys pci.Sys) probe.Finding { return machine{root: sys.Root}.probeRemapping() }

func (m machine) probeRemapping() probe.Finding {
	f := probe.Finding{Name: NeedRemapping}
	off := ""
	switch text := m.attr("/proc/interrupts"); {
	// The kernel names the chips of remapped interrupts IR-IO-APIC, IR-PCI-MSI, …
	case strings.Contains(text, " IR-"):
		f.Answer, f.Detail = probe.There, "on"
		return f
	case strings.Contains(text, "IO-APIC") || strings.Contains(text, "PCI-MSI"):
		off = "the kernel uses none"
	}
	if a := m.argument("intremap=off", "nointremap"); a != "" {
		off = "the kernel argument " + a + " turns it off"
	}
	units, _ := filepath.Glob(m.path("/sys/class/iommu/dmar*/intel-iommu/ecap"))
	for _, u := range units {
		b, _ := os.ReadFile(u)
		const remaps = 1 << 3 // IR of the extended capability register (VT-d, section 11.4.3)
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 16, 64); err == nil &&
			n&remaps == 0 {
			off = "the IOMMU has none"
		}
	}
	if off == "" {
		f.Detail = "the kernel does not show it here; a bind tells"
		return f
	}
	module := "vfio_iommu_type1"
	if !m.exists("/sys/module/" + module) {
		module = "iommufd"
	}
	if m.attr("/sys/module/"+module+"/parameters/allow_unsafe_interrupts") == "Y" {
		f.Answer, f.Detail = probe.There, off+", and "+module+
			" does without (allow_unsafe_interrupts): a device can raise any interrupt"
		return f
	}
	f.Answer, f.Detail, f.Next = probe.NotThere, off, remappingHint
	return f
}

// backendOf is about what maps memory for devices: type1, or iommufd in its place.
func backendOf(type1, iommufd probe.Finding) probe.Finding {
	f := type1
	if f.Answer != probe.There && iommufd.Answer != probe.NotThere {
		f.Answer, f.Detail, f.Next = probe.There, "iommufd, without type1", ""
	}
	f.Name = NeedBackend
	return f
}

const (
	setupRecord  = "/etc/heliosctl/vfio-setup.record"
	defaultGroup = "helios"
)

// probeGroup is about the user's right to bound SSDs, which comes with a group.
func (m machine) probeGroup() probe.Finding {
	f := probe.Finding{Name: NeedGroup, Next: setupHint}
	if os.Geteuid() == 0 {
		f.Answer, f.Detail, f.Next = probe.There, "root uses every SSD", ""
		return f
	}
	name := defaultGroup
	for l := range strings.Lines(m.attr(setupRecord)) {
		if g, ok := strings.CutPrefix(strings.TrimSpace(l), "group "); ok {
			name = g
		}
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		f.Answer, f.Detail = probe.NotThere, "there is no group "+name
		return f
	}
	gid, _ := strconv.Atoi(g.Gid)
	have, err := os.Getgroups()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	if slices.Contains(append(have, os.Getegid()), gid) {
		f.Answer, f.Detail, f.Next = probe.There, "this user is in group "+name, ""
		return f
	}
	f.Answer, f.Detail = probe.NotThere, "this session's user is not in group "+name
	if u, err := user.Current(); err == nil {
		f.Next = fmt.Sprintf("\"sudo heliosctl vfio-setup setup --user %s\", then log in again",
			u.Username)
	}
	return f
}

// memlockNext returns the flag that makes a limit of locked memory enough for needed bytes. setup
// keeps the limit of an earlier setup, unless a flag gives another.
func memlockNext(needed uint64) string {
	const step = 256 << 20
	size := max((needed+needed/4+step-1)/step, 2) * step >> 20
	return fmt.Sprintf(
		`run "sudo heliosctl vfio-setup setup --memlock %dMiB" (or unlimited in place of the size), then log in again`,
		size)
}

// memlockError is that of memory that could not be pinned.
func (m machine) memlockError(size uint64, used, limit int64) error {
	return errs.New(errs.Capability,
		"vfio: pin %d bytes: RLIMIT_MEMLOCK is %d bytes, %d of them in use, %d needed; %s, or lower the buffer budgets",
		size, limit, used, uint64(used)+size, memlockNext(uint64(used)+size))
}
