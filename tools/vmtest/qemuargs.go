package main

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// Disk is one NVMe controller with one namespace. The zero value of each field is a plain SSD.
type Disk struct {
	Serial string // default HELIOSn
	MB     int64  // size; default 64
	LBA    int    // bytes of a logical block; default 512
	Zoned  bool   // a zoned namespace, in zones of 1 MiB
	MDTS   int    // 0: QEMU's default (7: 512 KiB)
	CMBMB  int    // controller memory buffer
	// LegacyCMB makes the CMB that of NVMe 1.2 and 1.3: always on, without CMBMSC.
	LegacyCMB bool
	IOQPairs  int  // 0: QEMU's default (64)
	HotPlug   bool // behind a pcie-root-port of its own, so that device_del and device_add work
	Absent    bool // with HotPlug: not there at boot; T.Plug adds it
	// BlkDebug is the text of a blkdebug configuration file ([inject-error], [set-state]). "-"
	// gives an empty one: break and resume through HMP "qemu-io dN 'break read_aio tag'".
	BlkDebug     string
	ThrottleIOPS int
	VFs          int // virtual functions that it can have (SR-IOV)
}

// Config is a machine.
type Config struct {
	CPUs     int // default 2
	MemoryMB int // default 768
	Disks    []Disk
	// SharedGroup puts the first two disks into one IOMMU group: two functions of one slot, which
	// without ACS may reach each other.
	SharedGroup bool
	// SharedNamespace makes the first two disks two controllers of one subsystem with one
	// namespace, which the image of the first holds.
	SharedNamespace bool
	NoRemapping     bool   // the IOMMU has no interrupt remapping
	KernelArgs      string // more of them
	// PeerMB is the size of a device at peerAddr with memory behind its BAR 2, a power of two. Its
	// memory is a file of the host.
	PeerMB int
	// Files go into the guest: path there to path here. Tests are packages (./tools/nvmewalk) whose test
	// binaries T.GoTest runs.
	Files map[string]string
	Tests []string
}

func (c Config) withDefaults() Config {
	if c.CPUs == 0 {
		c.CPUs = 2
	}
	if c.MemoryMB == 0 {
		c.MemoryMB = 768
	}
	disks := make([]Disk, len(c.Disks))
	for i, d := range c.Disks {
		if d.Serial == "" {
			d.Serial = fmt.Sprintf("HELIOS%d", i)
		}
		if d.MB == 0 {
			d.MB = 64
		}
		if d.LBA == 0 {
			d.LBA = 512
		}
		disks[i] = d
	}
	c.Disks = disks
	return c
}

// check refuses what QEMU would take in another sense, or refuse in other words.
func (c Config) check() error {
	serials := map[string]int{}
	for i, d := range c.Disks {
		if j, twice := serials[d.Serial]; twice && !(c.SharedNamespace && i == 1) {
			return fmt.Errorf("disks %d and %d have the serial %s", j, i, d.Serial)
		}
		serials[d.Serial] = i
		if len(d.Serial) > 20 || strings.ContainsAny(d.Serial, ", =") {
			return fmt.Errorf(
				"disk %d: serial %q: at most 20 characters, none of them a comma, blank or =", i,
				d.Serial)
		}
		if d.LBA < 512 || d.LBA > 8192 || d.LBA&(d.LBA-1) != 0 {
			return fmt.Errorf("disk %d: LBA of %d bytes: 512 to 8192, a power of two", i, d.LBA)
		}
		if d.Absent && !d.HotPlug {
			return fmt.Errorf("disk %d: absent without a hot-plug port", i)
		}
		if d.HotPlug && (d.LBA != 512 || d.Zoned) {
			return fmt.Errorf("disk %d: hot plug takes 512-byte blocks without zones only", i)
		}
		if d.LegacyCMB && d.CMBMB == 0 {
			return fmt.Errorf("disk %d: LegacyCMB without a CMB", i)
		}
		if c.SharedGroup && i < 2 && d.HotPlug {
			return fmt.Errorf("disk %d: a shared group has no hot plug", i)
		}
	}
	if c.SharedNamespace && (len(c.Disks) < 2 || c.Disks[0].Serial != c.Disks[1].Serial) {
		return fmt.Errorf("a shared namespace needs two disks with one serial")
	}
	if c.SharedGroup && len(c.Disks) < 2 {
		return fmt.Errorf("a shared group needs two disks")
	}
	if c.PeerMB < 0 || c.PeerMB&(c.PeerMB-1) != 0 {
		return fmt.Errorf("a BAR of %d MiB: a power of two", c.PeerMB)
	}
	return nil
}

// ownNamespace reports whether QEMU gets the namespace as a device of its own: it has what the
// controller's own default lacks.
func (d Disk) ownNamespace() bool { return d.LBA != 512 || d.Zoned || d.VFs > 0 }

// peerAddr is the address of the device with memory.
const peerAddr = "0000:00:1e.0"

// bootArgs are the kernel's arguments. no_timer_check: on a busy host a virtual CPU may starve
// while the kernel tests its timer interrupt, and it panics then.
const bootArgs = "no_timer_check console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off tsc=reliable clocksource=tsc intel_iommu=on log_buf_len=1M"

// places are the files that a machine's QEMU works with.
type places struct {
	dir    string // images, sockets, console
	kernel string
	initrd string
	aio    string // io_uring or threads
}

func (p places) disk(i int) string     { return filepath.Join(p.dir, fmt.Sprintf("disk%d", i)) }
func (p places) console() string       { return filepath.Join(p.dir, "console") }
func (p places) blkdebug(i int) string { return filepath.Join(p.dir, fmt.Sprintf("blkdebug%d", i)) }
func (p places) peer() string          { return filepath.Join(p.dir, "peer") }
func (p places) qmp() string           { return filepath.Join(p.dir, "q") }
func (p places) channel() string       { return filepath.Join(p.dir, "c") }

// firstSlot is disk 0's slot on the root bus: disk i is 0000:00:(04+i).0, or behind a port there.
const firstSlot = 4

// nvmeDevice is the arguments of -device nvme for disk i; hot plug uses the same.
func nvmeDevice(i int, d Disk) map[string]any {
	a := map[string]any{"driver": "nvme", "id": fmt.Sprintf("nvme%d", i), "serial": d.Serial}
	if !d.ownNamespace() {
		a["drive"] = fmt.Sprintf("d%d", i)
	}
	if d.MDTS > 0 {
		a["mdts"] = d.MDTS
	}
	if d.CMBMB > 0 {
		a["cmb_size_mb"] = d.CMBMB
	}
	if d.LegacyCMB {
		a["legacy-cmb"] = true
	}
	if d.IOQPairs > 0 {
		a["max_ioqpairs"] = d.IOQPairs
	}
	if d.VFs > 0 { // a subsystem of its own, and at least two queues and an interrupt for each
		a["subsys"], a["sriov_max_vfs"] = fmt.Sprintf("sub%d", i), d.VFs
		a["sriov_vq_flexible"], a["sriov_vi_flexible"] = 2*d.VFs, d.VFs
	}
	if d.HotPlug {
		a["bus"] = fmt.Sprintf("port%d", i)
	} else {
		a["addr"] = fmt.Sprintf("%x", firstSlot+i)
	}
	return a
}

func deviceText(a map[string]any) string {
	out := fmt.Sprint(a["driver"])
	for _, k := range []string{"id", "serial", "drive", "subsys", "bus", "addr", "multifunction",
		"mdts", "cmb_size_mb", "legacy-cmb", "max_ioqpairs", "sriov_max_vfs", "sriov_vq_flexible",
		"sriov_vi_flexible"} {
		if v, ok := a[k]; ok {
			if v == true {
				v = "on"
			}
			out += fmt.Sprintf(",%s=%v", k, v)
		}
	}
	return out
}

// comma doubles commas, as QEMU wants them in values.
func comma(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// qemuArgs is QEMU's command line for a checked Config with its defaults. Accelerator tcg: nothing
// here depends on KVM, which hung where it could be opened. -cx16: with cmpxchg16b exposed, guests
// of Linux 6.12 crash at random.
func qemuArgs(c Config, p places) []string {
	a := []string{
		"-machine", "q35,kernel-irqchip=split", "-accel", "tcg,thread=multi", "-cpu", "max,-cx16",
		"-smp", strconv.Itoa(c.CPUs), "-m", fmt.Sprintf("%dM", c.MemoryMB),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-kernel", p.kernel, "-initrd", p.initrd, "-append",
		strings.TrimSpace(bootArgs + " " + c.KernelArgs),
		"-chardev", "file,id=con,path=" + comma(p.console()), "-serial", "chardev:con",
		"-chardev", "socket,id=ch,path=" + comma(p.channel()), "-serial", "chardev:ch",
		"-chardev", "socket,id=qmp,path=" + comma(p.qmp()), "-mon", "chardev=qmp,mode=control",
		"-device", "intel-iommu,intremap=" + map[bool]string{true: "off", false: "on"}[c.NoRemapping] +
			",caching-mode=on",
	}
	if c.SharedNamespace {
		a = append(a, "-device", "nvme-subsys,id=sub0,nqn=shared")
	}
	if c.PeerMB > 0 {
		a = append(a, "-object",
			fmt.Sprintf("memory-backend-file,id=peer,size=%dM,share=on,mem-path=%s", c.PeerMB,
				comma(p.peer())),
			"-device", "ivshmem-plain,memdev=peer,addr=1e.0")
	}
	for i, d := range c.Disks {
		file := "file.driver=file,file.filename=" + comma(p.disk(i)) + ",file.aio=" + p.aio
		if d.BlkDebug != "" {
			file = "file.driver=blkdebug,file.config=" + comma(p.blkdebug(i)) +
				",file.image.driver=file,file.image.filename=" + comma(p.disk(i)) +
				",file.image.aio=" + p.aio
		}
		drive := fmt.Sprintf("if=none,id=d%d,driver=raw,%s", i, file)
		if d.ThrottleIOPS > 0 {
			drive += fmt.Sprintf(",throttling.iops-total=%d", d.ThrottleIOPS)
		}
		a = append(a, "-drive", drive)
		if d.HotPlug {
			a = append(a, "-device",
				fmt.Sprintf("pcie-root-port,id=port%d,addr=%x,chassis=%d,slot=%d", i, firstSlot+i,
					i+1, i+1))
		}
		if d.Absent {
			continue
		}
		dev := nvmeDevice(i, d)
		if d.VFs > 0 {
			a = append(a, "-device", fmt.Sprintf("nvme-subsys,id=sub%d", i))
		}
		shared := c.SharedNamespace && i < 2
		if shared {
			delete(dev, "drive")
			dev["subsys"] = "sub0"
		}
		if c.SharedGroup && i < 2 {
			dev["addr"] = fmt.Sprintf("10.%d", i)
			if i == 0 {
				dev["multifunction"] = "on"
			}
		}
		a = append(a, "-device", deviceText(dev))
		if shared && i == 1 { // behind both controllers
			a = append(a, "-device", "nvme-ns,bus=nvme0,drive=d0,nsid=1,shared=on")
		}
		if d.ownNamespace() {
			ns := fmt.Sprintf(
				"nvme-ns,bus=nvme%d,drive=d%d,logical_block_size=%d,physical_block_size=%d", i, i,
				d.LBA, d.LBA)
			if d.Zoned {
				ns += ",zoned=on,zoned.zone_size=1M,zoned.zone_capacity=1M"
			}
			a = append(a, "-device", ns)
		}
	}
	return a
}
