package setuptest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/pci"
	"helios/internal/probe"
	"helios/internal/state"
	"helios/internal/vfio"
)

const (
	modulesFile = "etc/modules-load.d/heliosctl-vfio.conf"
	sysctlFile  = "etc/sysctl.d/80-heliosctl-hugepages.conf"
	limitsFile  = "etc/security/limits.d/80-heliosctl-memlock.conf"
	rulesFile   = "etc/udev/rules.d/72-heliosctl-vfio.rules"
	recordFile  = "etc/heliosctl/vfio-setup.record"
)

// groupTools are the ways to a group: shadow's commands, busybox's, and none at all.
var groupTools = map[string][]string{
	"shadow":  {"modprobe", "udevadm", "groupadd", "groupdel", "gpasswd"},
	"busybox": {"modprobe", "addgroup", "delgroup"},
	"none":    {"modprobe"},
}

// readyFiles holds the files that "setup --user alice" writes on newMachine, by shell: it runs once
// for each.
var readyFiles = struct {
	sync.Mutex
	of map[string]map[string]string
}{of: map[string]map[string]string{}}

// ready is a machine after "setup --user alice".
func ready(t *testing.T, sh shell) *machine {
	t.Helper()
	m := newMachine(t, sh, groupTools["none"]...)
	readyFiles.Lock()
	defer readyFiles.Unlock()
	files := readyFiles.of[sh.name]
	if files == nil {
		before := m.tree()
		m.run("setup", "--user", "alice", "--hugepages", "1GiB").want(0, "nothing lacks")
		files = map[string]string{}
		for f, v := range m.tree() {
			if _, text, _ := strings.Cut(v, " "); v != before[f] && strings.HasPrefix(v, "-") {
				files[f] = text
			}
		}
		readyFiles.of[sh.name] = files
	} else {
		for f, text := range files {
			m.write(f, text)
		}
		m.mode("dev/vfio/vfio", 0o666)
	}
	return m
}

func TestSetupStatusReset(t *testing.T) {
	for name, tools := range groupTools {
		t.Run(name, func(t *testing.T) {
			eachShell(t, func(t *testing.T, sh shell) {
				m := newMachine(t, sh, tools...)
				m.env = []string{"SUDO_USER=alice"}
				before := m.tree()
				m.run("status").want(3, "sudo "+m.script+" setup")
				m.same(before, "status")

				r := m.run("setup").want(0, "loaded module vfio-pci",
					"loaded module vfio_iommu_type1", "asked for 512 huge pages",
					"got all 512 (1 GiB)", "made group helios", "added alice to group helios",
					"wrote /"+limitsFile, "wrote /"+rulesFile, "nothing lacks")
				r.not("chatter")
				if got, want := m.read(modulesFile),
					"vfio-pci\nvfio_iommu_type1\n"; !strings.HasSuffix(got, want) {
					t.Errorf("modules-load.d: %q", got)
				}
				if got := m.read(limitsFile); !strings.Contains(got,
					"\n@helios - memlock unlimited\n") {
					t.Errorf("limits.d: %q", got)
				}
				if got := m.read(sysctlFile); !strings.HasSuffix(got,
					"\nvm.nr_hugepages = 512\n") || m.read("proc/sys/vm/nr_hugepages") != "512\n" {
					t.Errorf("huge pages: %q, %q", got, m.read("proc/sys/vm/nr_hugepages"))
				}
				for _, f := range []string{"etc/group", "etc/gshadow"} {
					if old := strings.SplitN(before[f], " ", 2)[1]; !strings.HasPrefix(m.read(f),
						old+"helios:") {
						t.Errorf("%s lost lines: %q", f, m.read(f))
					}
				}
				if !strings.Contains(m.read("etc/group"), ":alice\n") {
					t.Errorf("alice is not in the group: %q", m.read("etc/group"))
				}
				for _, f := range []string{modulesFile, sysctlFile, limitsFile, rulesFile,
					recordFile} {
					if !strings.HasPrefix(m.read(f),
						"# Written by \"vfio-setup.sh setup\" of heliosctl") {
						t.Errorf("%s is not marked", f)
					}
				}

				m.uid, m.me = "1000", "alice" // status needs no root
				m.env = []string{"FAKE_GROUPS=1000 998 101 997"}
				m.before = nil
				m.run("status", "--user", "alice")
				m.uid, m.me, m.env = "0", "root", []string{"SUDO_USER=alice"}
				m.run("status").want(0, "nothing lacks", "alice: unlimited at login, from /"+
					limitsFile, "on (Intel VT-d), 4 groups")

				after, calls := m.tree(), len(m.calls())
				m.run("setup").want(0, "kept module vfio-pci", "kept 512 huge pages",
					"kept group helios", "kept alice in group helios", "kept /"+rulesFile).
					not("loaded module", "wrote", "made", "added")
				m.same(after, "setup again")
				for _, c := range m.calls()[calls:] {
					if !strings.HasPrefix(c, "udevadm control --reload") {
						t.Errorf("setup again ran %s", c)
					}
				}

				dry := m.run("reset", "--dry-run").want(0, "would run: rm -f -- ",
					"would run: echo 0 >", "/bin/modprobe' -r vfio_pci\n")
				if strings.Contains(dry.out, "removed /") {
					t.Errorf("a dry run says it removed something:\n%s", dry.out)
				}
				m.same(after, "reset --dry-run")
				m.run("reset").want(0, "removed /"+rulesFile, "huge pages back to 0",
					"removed alice from group helios", "removed group helios",
					"unloaded module vfio_pci").not("left")
				m.same(before, "reset")
				m.run("reset").want(0, "nothing to reset")
				m.same(before, "reset again")
			})
		})
	}
}

func TestResetOnOddFolders(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		// Neither folder is there, the container node was closed, SSDs and a GPU are bound by hand.
		m := newMachine(t, sh, "modprobe")
		m.remove("etc/security", "etc/modules-load.d", "etc/udev", "etc/gshadow", "etc/pam.d")
		m.write("dev/vfio/vfio", "")
		m.mode("dev/vfio/vfio", 0o600)
		m.bound("0000:01:00.0", 11)
		m.bound("0000:03:00.0", 13)
		for _, mod := range []string{"vfio", "vfio_pci", "vfio_iommu_type1"} {
			m.write("sys/module/"+mod+"/initstate", "live\n")
		}
		before := m.tree()
		m.ours("0000:01:00.0", 11)
		m.run("setup", "--user", "bob", "--hugepages", "0").want(0, "kept module vfio-pci",
			"kept 0 huge pages", "/dev/vfio/11: group helios", "/dev/vfio/vfio: mode 666").
			not("/dev/vfio/13", "asked for")
		if m.exists(sysctlFile) {
			t.Error("a sysctl file without huge pages")
		}
		if got := m.read("gids"); got != "998 /dev/vfio/11\n" {
			t.Errorf("groups of nodes: %q", got)
		}
		if i, err := os.Stat(filepath.Join(m.root, "dev/vfio/11")); err != nil ||
			i.Mode().Perm() != 0o660 {
			t.Errorf("node: %v %v", i.Mode(), err)
		}
		m.run("status", "--user", "bob").want(0, "no pam_limits")
		// A second SSD is another program's, until heliosctl takes it.
		m.bound("0000:02:00.0", 12)
		m.run("status", "--user", "bob").want(0,
			"bound by another program, or heliosctl's record was lost").not("/dev/vfio/12 does not")
		m.run("setup").want(0).not("/dev/vfio/12")
		if got := m.read("gids"); got != "998 /dev/vfio/11\n" {
			t.Errorf("groups of nodes: %q", got)
		}
		// While heliosctl is at it, it stays root's.
		for _, phase := range []state.Phase{state.Binding, state.Unbinding} {
			m.record("0000:02:00.0", 12, phase)
			m.run("setup").want(0,
				"heliosctl's record vfio12 is unfinished or stale").not("/dev/vfio/12")
		}
		m.record("0000:02:00.0", 12, state.Bound)
		m.driver("0000:02:00.0", "nvme") // which somebody gave it back to
		m.run("setup").want(0,
			"heliosctl's record vfio12 is unfinished or stale").not("/dev/vfio/12")
		m.ours("0000:02:00.0", 12)
		m.run("status", "--user", "bob").lacks("/dev/vfio/12 does not belong to group helios")
		m.run("setup").want(0, "/dev/vfio/12: group helios")
		m.run("status", "--user", "bob").want(0,
			"0000:02:00.0  driver vfio-pci, IOMMU group 12, SSD vfio12 of heliosctl")
		m.remove("run")
		m.run("reset").want(0, "/dev/vfio/vfio: mode 600", "left the VFIO modules loaded",
			"vfio-pci still has: 0000:01:00.0 0000:02:00.0 0000:03:00.0",
			"sudo heliosctl unbind-ssds 0000:01:00.0 0000:02:00.0\n")
		m.remove("dev/vfio/12", "sys/bus/pci/drivers/vfio-pci/0000:02:00.0")
		m.driver("0000:02:00.0", "nvme")
		m.same(before, "reset")
	})
}

func TestStatusNamesEachLack(t *testing.T) {
	noGroups := func(m *machine) {
		m.remove("sys/kernel/iommu_groups", "sys/class/iommu")
	}
	const off = "the IOMMU is off"
	for _, c := range []struct {
		name   string
		break_ func(m *machine)
		lacks  []string
		words  []string
	}{
		{"nothing", func(m *machine) {}, nil,
			[]string{"nothing lacks", "A Model, serial SERIAL1, nvme0 nvme0n1",
				"driver nvme, IOMMU group 11", "512 of 2 MiB"}},
		{"intel without argument",
			func(m *machine) { noGroups(m); m.write("proc/cmdline", "quiet\n") },
			[]string{off + ": on Intel this kernel may need the argument intel_iommu=on"},
			[]string{"add intel_iommu=on iommu=pt", "/etc/default/grub", "sudo update-grub",
				"sudo grubby --update-kernel=ALL --args='intel_iommu=on iommu=pt'",
				"leaves boot loaders alone"}},
		{"intel with argument", noGroups, []string{off + ", although intel_iommu=on is given"},
			[]string{"VT-d", "firmware"}},
		{"turned off",
			func(m *machine) { noGroups(m); m.write("proc/cmdline", "intel_iommu=off\n") },
			[]string{off + ": the kernel argument intel_iommu=off turns it off"},
			[]string{"remove intel_iommu=off", "--remove-args='intel_iommu=off'"}},
		{"amd", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware/acpi/tables/DMAR")
			m.write("sys/firmware/acpi/tables/IVRS", "")
			m.write("proc/cmdline", "quiet\n")
			m.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n")
		}, []string{off + ", although the firmware offers it (AMD-Vi)"},
			[]string{"dmesg | grep AMD-Vi"}},
		{"amd, firmware unknown", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware")
			m.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n")
		}, []string{off + ": on AMD the kernel uses it unasked"}, []string{"AMD-Vi",
			"--args='iommu=pt'"}},
		{"groups without an IOMMU", func(m *machine) {
			noGroups(m)
			m.write("sys/kernel/iommu_groups/0/name", "vfio-noiommu\n")
		}, []string{off + ", although intel_iommu=on is given"},
			[]string{"IOMMU group 0 is of VFIO's mode without an IOMMU"}},
		{"no firmware tables",
			func(m *machine) { noGroups(m); m.remove("sys/firmware/acpi/tables/DMAR") },
			[]string{off + ": the firmware reports none"}, []string{"QEMU: -device intel-iommu"}},
		{"arm", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware")
			m.write("proc/cpuinfo", "CPU implementer\t: 0x41\n")
		}, []string{off}, []string{"SMMU"}},
		{"no iommu=pt", func(m *machine) { m.write("proc/cmdline", "intel_iommu=on\n") }, nil,
			[]string{"without iommu=pt", "nothing lacks"}},
		{"VIOT without its driver", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware/acpi/tables/DMAR")
			m.write("sys/firmware/acpi/tables/VIOT", "")
			m.write("proc/cmdline", "quiet\n")
		}, []string{off + ": the firmware offers a virtual one (VIOT), whose driver virtio_iommu is not loaded"},
			[]string{"sudo modprobe virtio_iommu", "initramfs"}},
		{"VIOT with its driver", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware/acpi/tables/DMAR")
			m.write("sys/firmware/acpi/tables/VIOT", "")
			m.write("sys/module/virtio_iommu/initstate", "live\n")
		}, []string{off + ": the firmware offers a virtual one (VIOT) and virtio_iommu is loaded"}, nil},
		{"VIOT with its driver built in", func(m *machine) {
			noGroups(m)
			m.remove("sys/firmware/acpi/tables/DMAR")
			m.write("sys/firmware/acpi/tables/VIOT", "")
			m.write("lib/modules/6.1.0-99-test/modules.builtin",
				"kernel/drivers/iommu/virtio-iommu.ko\n")
		}, []string{off + ": the firmware offers a virtual one (VIOT) and virtio_iommu is loaded"}, nil},
		{"interrupts remapped",
			func(m *machine) { m.write("proc/interrupts", irq) }, nil, []string{"interrupts      remapped"}},
		{"no interrupt remapping", func(m *machine) {
			m.write("proc/interrupts", strings.ReplaceAll(irq, "IR-", ""))
		}, []string{"there is no interrupt remapping (the kernel uses none)"},
			[]string{"intremap=on", "libvirt"}},
		{"remapping turned off", func(m *machine) { m.write("proc/cmdline", "iommu=pt intremap=off\n") },
			[]string{"there is no interrupt remapping (the kernel argument intremap=off turns it off)"}, nil},
		{"an IOMMU without remapping", func(m *machine) {
			m.write("sys/class/iommu/dmar0/intel-iommu/ecap", "f00f42\n")
		}, []string{"there is no interrupt remapping (the IOMMU has none)"}, nil},
		{"an IOMMU with remapping", func(m *machine) {
			m.write("sys/class/iommu/dmar0/intel-iommu/ecap", "f00f4e\n")
		}, nil, nil},
		{"unsafe interrupts", func(m *machine) {
			m.write("proc/interrupts", strings.ReplaceAll(irq, "IR-", ""))
			m.write("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y\n")
		}, nil, []string{"a device can raise any interrupt"}},
		{"no modules",
			func(m *machine) { m.remove("sys/module/vfio_pci", "sys/module/vfio_iommu_type1") },
			[]string{"vfio_pci and vfio_iommu_type1: not loaded"}, nil},
		{"one module", func(m *machine) { m.remove("sys/module/vfio_iommu_type1") },
			[]string{"module vfio_iommu_type1 is not loaded"}, nil},
		{"built in", func(m *machine) {
			m.remove("sys/module/vfio_pci")
			m.write("lib/modules/6.1.0-99-test/modules.builtin",
				"kernel/drivers/vfio/pci/vfio-pci.ko\n")
		}, nil, nil},
		{"no group", func(m *machine) {
			m.write("etc/group", "alice:x:1000:\n")
			m.write("etc/security/limits.conf", "* - memlock 999999\n")
		}, []string{"there is no group helios"}, nil},
		{"not in the group", func(m *machine) {
			m.write("etc/group", "alice:x:1000:\nhelios:x:998:bob\n")
			m.write("etc/security/limits.conf", "alice - memlock 999999\n")
		}, []string{"alice is not in group helios"}, []string{"setup --user alice"}},
		{"by his own group", func(m *machine) {
			m.write("etc/group", "helios:x:998:\n")
			m.write("etc/passwd", "alice:x:1000:998::/:/bin/sh\n")
		}, nil, nil},
		{"an empty group",
			func(m *machine) { m.write("etc/group", "helios:x:998:\n"); m.env = nil },
			[]string{"nobody is in group helios"}, nil},
		{"little memory", func(m *machine) { m.remove(limitsFile) },
			[]string{"alice may lock too little memory"},
			[]string{"alice: 8 MiB at login, from the default",
				"setup --memlock 512MiB --user alice, then log in again"}},
		{"a user's own limit",
			func(
				m *machine) {
				m.write("etc/security/limits.conf", "alice soft memlock 100 # KiB\n")
			}, []string{"alice may lock too little memory"},
			[]string{"alice: 100 KiB at login, from /etc/security/limits.conf",
				"next: raise memlock in /etc/security/limits.conf, then log in again"}},
		{"a hard limit", func(m *machine) {
			m.write(limitsFile, "@helios soft memlock unlimited\n@helios hard memlock 2048\n")
		}, []string{"alice may lock too little memory"}, []string{"alice: 2 MiB"}},
		{"a later file", func(m *machine) {
			m.write("etc/security/limits.d/99-site.conf",
				"@helios - memlock 262143\n* - memlock 1\n")
		}, []string{"alice may lock too little memory for SSDs to reach (train with default settings needs 256 MiB)"},
			[]string{"at login, from /etc/security/limits.d/99-site.conf",
				"raise memlock in /etc/security/limits.d/99-site.conf"}},
		{"just enough", func(m *machine) { m.write(limitsFile, "@helios - memlock 262144\n") },
			nil, []string{"256 MiB at login"}},
		{"no rule", func(m *machine) { m.remove(rulesFile) },
			[]string{"there is no udev rule that gives the group helios"}, nil},
		{"a rule of others", func(m *machine) { m.write(rulesFile, "GROUP=\"helios\"\n") },
			[]string{"there is no udev rule"}, nil},
		{"a rule for others", func(m *machine) {
			m.write(rulesFile, strings.ReplaceAll(m.read(rulesFile), "helios\"", "kvm\""))
		}, []string{"the udev rule is not for group helios"}, nil},
		{"no container", func(m *machine) { m.remove("dev/vfio/vfio") },
			[]string{"/dev/vfio/vfio is not there"}, nil},
		{"iommufd only", func(m *machine) {
			m.remove("dev/vfio/vfio", "sys/module/vfio_iommu_type1")
			m.write("dev/iommu", "")
			m.write("gids", "998 /dev/iommu\n")
			m.mode("dev/iommu", 0o660)
		}, nil, []string{"/dev/iommu is there"}},
		{"closed container", func(m *machine) { m.mode("dev/vfio/vfio", 0o600) },
			[]string{"/dev/vfio/vfio is closed"}, nil},
		{"nodes", func(m *machine) {
			m.ours("0000:01:00.0", 11)
			m.bound("0000:02:00.0", 12) // another program's
			m.bound("0000:03:00.0", 13)
			m.write("dev/vfio/devices/vfio1", "")
			m.link("sys/class/vfio-dev/vfio1/device", "../../../bus/pci/devices/0000:02:00.0")
			m.write("dev/vfio/devices/vfio0", "")
			m.link("sys/class/vfio-dev/vfio0/device", "../../../bus/pci/devices/0000:01:00.0")
		}, []string{"/dev/vfio/11 does not", "/dev/vfio/devices/vfio0 does not"},
			[]string{"groups: 11 12 13"}},
		{"no huge pages", func(m *machine) { m.write("proc/meminfo", meminfo(0)) }, nil,
			[]string{"no huge pages are reserved"}},
		{"no-IOMMU mode",
			func(
				m *machine) {
				m.write("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n")
			}, nil, []string{"heliosctl does not use it", "take enable_unsafe_noiommu_mode out"}},
		{"a shared group", func(m *machine) { m.pci("0000:02:00.0", "0x010802", 13, "nvme") }, nil,
			[]string{"shares the group with 0000:03:00.0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachShell(t, func(t *testing.T, sh shell) {
				m := ready(t, sh)
				m.env = []string{"SUDO_USER=alice"}
				c.break_(m)
				before := m.tree()
				r := m.run("status")
				if c.lacks == nil {
					r.want(0, c.words...)
				} else {
					r.lacks(c.lacks...)
					r.want(3, c.words...)
				}
				m.same(before, "status")
				compareWithHeliosctl(t, r)
			})
		})
	}
}

const irq = "  1:  0  9  IR-IO-APIC  1-edge  i8042\nLOC:  1  2  Local timer interrupts\n"

// compareWithHeliosctl: doctor and bind-ssds lack what status lacks, and name the same next step.
func compareWithHeliosctl(t *testing.T, r result) {
	t.Helper()
	sys := pci.Sys{Root: r.m.root}
	if got, want := vfio.Remapping(sys).Answer == probe.NotThere,
		strings.Contains(r.out, "there is no interrupt remapping"); got != want &&
		!strings.Contains(r.out, "the IOMMU is off") {
		t.Errorf("no interrupt remapping: heliosctl says %v, status %v:\n%s", got, want, r.out)
	}
	if !strings.Contains(r.out, "the IOMMU is off") {
		return
	}
	next := vfio.NoIOMMU(sys)
	for _, w := range []string{"sudo modprobe virtio_iommu", "update-initramfs", "dmesg | grep -i iommu",
		"dmesg | grep AMD-Vi", "add intel_iommu=on", "the kernel argument intel_iommu=off"} {
		if got, want := strings.Contains(next, w), strings.Contains(r.out, w); got != want {
			t.Errorf("%q: in heliosctl's next step %v, in that of status %v:\n%s\n%s", w, got, want,
				next, r.out)
		}
	}
}

// A command that is not there would make everything look as if it were not there.
func TestMissingCommands(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := ready(t, sh)
		m.env = []string{"SUDO_USER=alice"}
		before := m.tree()
		dir := t.TempDir() // a PATH without awk and tail
		names, err := os.ReadDir("/usr/bin")
		require.NoError(t, err)
		if sh.name == "busybox" {
			if names, err = os.ReadDir(sh.path); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range names {
			pos := filepath.Join("/usr/bin", n.Name())
			if sh.name == "busybox" {
				pos = filepath.Join(sh.path, n.Name())
			}
			if !strings.HasSuffix(n.Name(), "awk") && n.Name() != "tail" {
				require.NoError(t, os.Symlink(pos, filepath.Join(dir, n.Name())))
			}
		}
		m.sh.path = dir
		for _, verb := range []string{"status", "setup", "reset"} {
			m.run(verb).want(3, "there is no awk, tail in PATH", "install what has it").not("lack", "removed")
		}
		m.run("--help").want(0, "prepare this machine")
		m.same(before, "without awk")
	})
}

// setup prints the limit of locked memory that it leaves, and keeps one that was given.
func TestSetupSaysTheLimit(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		m.env = []string{"SUDO_USER=alice"}
		m.run("setup", "--hugepages", "0").want(0, "locked memory: unlimited for group helios")
		m.run("setup", "--hugepages", "0", "--memlock", "64MiB").want(0,
			"locked memory: 64 MiB for group helios from the next login on",
			"alice may lock too little memory").not("as an earlier setup set it")
		m.run("setup", "--hugepages", "0").want(0,
			"locked memory: 64 MiB for group helios from the next login on, as an earlier setup set it (--memlock SIZE or unlimited changes it)")
		m.run("setup", "--hugepages", "0", "--memlock", "512MiB").want(0, "locked memory: 512 MiB")
	})
}

// Rights that only a new login brings are told apart from those that setup brings.
func TestStatusOfASession(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := ready(t, sh)
		m.uid, m.me = "1000", "alice"
		m.before = []string{"ulimit -l 32"}
		m.env = []string{"FAKE_GROUPS=1000"}
		m.run("status").lacks("this session of alice began before he was in group helios",
			"this session may lock 32 KiB only")
		m.env = []string{"FAKE_GROUPS=1000 998"}
		m.run("status").lacks("this session may lock 32 KiB only")
		m.run("status", "--user", "alice", "--group",
			"helios").lacks("this session may lock 32 KiB only")
		m.run("status", "--user", "bob").lacks("bob is not in group helios",
			"bob may lock too little memory")
	})
}

func TestDryRunChangesNothing(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["shadow"]...)
		m.uid = "1000" // needs no root either
		m.ours("0000:01:00.0", 11)
		before := m.tree()
		for _, args := range [][]string{{"--dry-run", "setup", "--user", "alice"},
			{"setup", "--user=alice", "--dry-run"}} {
			m.run(args...).want(0, "would run: '"+m.root+"/bin/modprobe' vfio-pci", "echo 512 >",
				"groupadd' -r helios", "gpasswd' -a alice helios",
				"would write /"+limitsFile+":\n    # Written by", "    @helios - memlock unlimited",
				"would write /"+rulesFile, "chgrp helios /dev/vfio/11",
				"udevadm' control --reload").
				not("wrote", "loaded module", "made group")
			m.same(before, strings.Join(args, " "))
		}
		m.remove("run")
		before = m.tree()
		m.run("--dry-run", "reset").want(0, "nothing to reset")
		m.run("--dry-run", "status")
		m.same(before, "dry runs")
		if c := m.calls(); len(c) > 0 {
			t.Errorf("a dry run ran %q", c)
		}
	})
}

func TestForeignFilesAreRefused(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		for _, f := range []string{modulesFile, sysctlFile, limitsFile, rulesFile, recordFile} {
			for _, kind := range []string{"file", "empty", "link", "folder"} {
				m := newMachine(t, sh, groupTools["none"]...)
				switch kind {
				case "file":
					m.write(f,
						"somebody's\n# Written by \"vfio-setup.sh setup\" of heliosctl; \"vfio-setup.sh reset\" removes it.\n")
				case "empty":
					m.write(f, "")
				case "link":
					m.write("etc/target",
						"# Written by \"vfio-setup.sh setup\" of heliosctl; \"vfio-setup.sh reset\" removes it.\n")
					m.link(f, filepath.Join(m.root, "etc/target"))
				case "folder":
					m.write(f+"/x", "")
				}
				before := m.tree()
				m.run("setup", "--user", "alice").want(4, "/"+f+" is there and is not ours",
					"move it away")
				m.same(before, kind+" "+f)
				if c := m.calls(); len(c) > 0 {
					t.Fatalf("%s %s: ran %q before it refused", kind, f, c)
				}
			}
		}
	})
}

func TestResetLeavesWhatIsNotOurs(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := ready(t, sh)
		m.write("etc/group", strings.Replace(m.read("etc/group"), ":alice\n", ":alice,bob\n", 1))
		m.write(limitsFile, "# the admin's now\n")
		m.write("etc/sysctl.d/99-site.conf", "vm.swappiness = 1\n")
		m.write("proc/sys/vm/nr_hugepages", "2000\n")
		m.command("modprobe", `exit 1`)
		m.run("reset").want(0, "left group helios: others are in it: bob", "left /"+limitsFile+
			": somebody else's by now",
			"left 2000 huge pages: somebody raised them above our 512",
			"left /etc/sysctl.d: something else is in it",
			"left module vfio_pci loaded: it is in use")
		for f, want := range map[string]string{limitsFile: "# the admin's now\n",
			"etc/sysctl.d/99-site.conf": "vm.swappiness = 1\n",
			"proc/sys/vm/nr_hugepages":  "2000\n"} {
			if got := m.read(f); got != want {
				t.Errorf("%s: %q", f, got)
			}
		}
		if !strings.Contains(m.read("etc/group"), "\nhelios:x:998:bob\n") {
			t.Errorf("group: %q", m.read("etc/group"))
		}
		for _, f := range []string{modulesFile, sysctlFile, rulesFile, "etc/heliosctl"} {
			if m.exists(f) {
				t.Errorf("%s is still there", f)
			}
		}
		// A group that was there before setup stays, and so do its members.
		m = newMachine(t, sh, groupTools["none"]...)
		m.write("etc/group", m.read("etc/group")+"lab:x:500:bob\n")
		before := m.tree()
		m.run("setup", "--group", "lab", "--user", "bob").want(0, "kept group lab",
			"kept bob in group lab")
		m.run("status").want(0, "lab (gid 500), members: bob")
		m.run("reset").want(0)
		m.same(before, "reset")
	})
}

func TestSetupAgainWithOtherValues(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		m.write("proc/sys/vm/nr_hugepages", "10\n")
		m.bound("0000:01:00.0", 11)
		before := m.tree()
		m.ours("0000:01:00.0", 11)
		m.run("setup", "--user", "alice", "--hugepages", "100MiB", "--memlock", "2GiB").want(0,
			"asked for 50 huge pages")
		// neither value goes back to its default
		m.run("setup").want(0, "kept 50 huge pages", "kept /"+limitsFile)
		m.run("setup", "--hugepages=64MiB", "--group", "lab", "--user", "bob", "--memlock",
			"unlimited").want(0, "asked for 32 huge pages", "the group changes from helios to lab",
			"/dev/vfio/11: group lab")
		if got := m.read(limitsFile); !strings.Contains(got, "@lab - memlock unlimited\n") ||
			strings.Contains(got, "helios -") {
			t.Errorf("limits: %q", got)
		}
		if got := m.read(rulesFile); strings.Contains(got, `"helios"`) ||
			!strings.Contains(got, `GROUP="lab"`) {
			t.Errorf("rules: %q", got)
		}
		m.run("status").want(0, "lab (gid ")
		// as many as there were
		m.run("setup", "--hugepages", "20MiB").want(0, "huge pages back to 10",
			"kept 10 huge pages")
		if m.exists(sysctlFile) {
			t.Error("the sysctl file stays without our pages")
		}
		m.run("setup", "--hugepages", "1G").want(0, "got all 512")
		m.remove("run") // the records are lost: rights go back all the same
		m.run("reset").want(0, "huge pages back to 10", "removed group lab", "removed group helios")
		// The stub of modprobe is not asked: a device is bound. Its files are taken away by hand.
		m.remove("sys/module/vfio", "sys/module/vfio_pci", "sys/module/vfio_iommu_type1",
			"dev/vfio/vfio")
		m.same(before, "reset")
	})
}

func TestHugePages(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		m.write("proc/meminfo", meminfo(100))
		m.run("setup", "--hugepages", "1GiB", "--user", "alice").want(0,
			"got 100 of 512 huge pages", "after a reboot")
		if m.read("proc/sys/vm/compact_memory") != "1\n" {
			t.Error("memory was not compacted")
		}
		m = newMachine(t, sh, groupTools["none"]...)
		before := m.tree()
		m.run("setup", "--hugepages", "11.2GiB").want(2, "11.2 GiB more", "are available")
		m.same(before, "too many")
		m.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
		m.run("setup", "--hugepages", "64M", "--user", "alice").want(3, "no huge pages")
		m.run("setup", "--user", "alice").want(0, "this kernel has none")
	})
}

func TestUsage(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		before := m.tree()
		for _, args := range []string{
			"", "frobnicate", "--frobnicate", "setup --frobnicate", "setup extra", "status extra",
			"reset extra", "reset --user alice", "status --hugepages 1G",
			"setup --user", "setup --user=", "setup --group", "setup --hugepages",
			"setup --hugepages x", "setup --hugepages -1", "setup --hugepages 1GX",
			"setup --hugepages 1..5G",
			"setup --hugepages 99999999999999999999T", "setup --memlock 1KiB",
			"setup --memlock lots", "setup --user nobody-here", "status --user nobody-here",
			"setup --group -x", "setup --user ../x", "setup --group a:b", "setup --group a,b",
			`setup --group a"b`, "setup --user $(reboot)", "setup --group `reboot`",
			"setup --group a;b",
			"setup --group " + strings.Repeat("g", 65),
		} {
			m.run(strings.Fields(args)...).want(2, "vfio-setup: ", "--help")
		}
		for _, args := range [][]string{{"setup", "--user", "alice bob"},
			{"setup", "--group", "a group"}, {"setup", "--user", ""}, {"setup", "--group", "a\nb"},
			{"status", "--user", "alice\n"}, {"set up"}, {"setup", "--user", "*"}} {
			m.run(args...).want(2, "vfio-setup: ")
		}
		m.env = []string{"SUDO_USER=x y;z"}
		m.run("setup").want(2, "is no name of a user")
		m.env = []string{"HELIOS_SYSROOT=relative"}
		m.run("status").want(2, "absolute")
		m.env = []string{"HELIOS_SYSROOT=/nowhere/at/all"}
		m.run("status").want(2, "there is no folder")
		m.env = nil
		for _, args := range []string{"--help", "-h", "help", "status --help", "setup -h",
			"reset --help", "--dry-run --help"} {
			m.run(strings.Fields(args)...).want(0, "status", "setup", "bind", "unbind", "reset",
				"--dry-run", "HELIOS_SYSROOT", "Exit codes")
		}
		m.uid = "1000"
		for _, verb := range []string{"setup", "reset"} {
			m.run(verb).want(3, verb+" needs root", "sudo "+m.script+" "+verb, "--dry-run")
		}
		m.same(before, "usage")
		if c := m.calls(); len(c) > 0 {
			t.Errorf("ran %q", c)
		}
	})
}

// Each argument of heliosctl in a line of its own, its length first.
const echoArgs = "#!/bin/sh\nfor a; do printf '%s:%s\\n' \"${#a}\" \"$a\"; done\nexit ${CODE:-0}\n"

func TestBindAndUnbind(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh)
		m.uid = "1000" // heliosctl itself reports its needs
		m.run("bind", "0000:01:00.0").want(3, "no heliosctl", "make build")
		m.run("unbind").want(3, "no heliosctl")
		folder := filepath.Dir(m.script)
		other := t.TempDir()
		var at string
		for _, at = range []string{filepath.Join(other, "heliosctl"),
			filepath.Join(folder, "bin", "heliosctl"), filepath.Join(folder, "heliosctl")} {
			require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
			if err := os.WriteFile(at,
				[]byte(strings.Replace(echoArgs, "for a;", "echo '"+at+"'; for a;", 1)),
				0o755); err != nil {
				t.Fatal(err)
			}
			m.sh.path = sh.path + ":" + other
			if r := m.run("bind", "x"); !strings.HasPrefix(r.out, at+"\n") {
				t.Fatalf("not %s but %s%s", at, r.out, r.err)
			}
		}
		before := m.tree()
		hostile := []string{"a b", "", "it's", "$(touch x)", "--force", "*", "a\nb", `back\slash`,
			"--help"}
		for _, verb := range []string{"bind", "unbind"} {
			want := at + "\n" + fmt.Sprintf("%d:%s-ssds\n", len(verb)+5, verb)
			for _, a := range hostile {
				want += strconv.Itoa(len(a)) + ":" + a + "\n"
			}
			if r := m.run(append([]string{verb}, hostile...)...); r.out != want || r.code != 0 {
				t.Errorf("%s: exit code %d, %q, not %q", verb, r.code, r.out, want)
			}
			for _, args := range [][]string{{"--dry-run", verb, "a b", "it's"},
				{verb, "a b", "--dry-run", "it's"}} {
				r := m.run(args...).want(0)
				if want := "would run: '" + at + "' " + verb +
					"-ssds 'a b' 'it'\\''s'\n"; r.out != want {
					t.Errorf("%q: %q, not %q", args, r.out, want)
				}
			}
		}
		for _, code := range []int{1, 2, 3, 4, 5, 130} {
			m.env = []string{"CODE=" + strconv.Itoa(code)}
			m.run("bind", "x").want(code)
			m.run("unbind", "x").want(code)
		}
		m.same(before, "bind and unbind")
	})
}

func TestResetUnbindsFirst(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		before := m.tree()
		m.run("setup", "--user", "alice").want(0)
		m.write("run/heliosctl/vfio0.json", "{}")
		m.write("run/heliosctl/vfio11.json", "{}")
		m.write("run/heliosctl/vfio0.lock", "")
		after := m.tree()
		m.run("reset").want(3, "no heliosctl")
		m.same(after, "reset without heliosctl")
		h := filepath.Join(filepath.Dir(m.script), "heliosctl")
		write := func(text string) {
			t.Helper()
			require.NoError(t, os.WriteFile(h, []byte("#!/bin/sh\n"+text), 0o755))
		}
		write("echo 'vfio0 is in use by process 7' >&2; exit 4\n")
		m.run("reset").want(4, "in use by process 7", "SSDs are still bound, so nothing was reset")
		m.same(after, "reset of SSDs in use")
		write(`[ "$*" = "unbind-ssds vfio0 vfio11" ] && rm -r "$HELIOS_SYSROOT/run"` + "\n")
		m.run("reset", "--dry-run").want(0, "unbind-ssds vfio0 vfio11", "rm -f --")
		m.same(after, "reset --dry-run")
		m.run("reset").want(0, "unbound: vfio0 vfio11", "removed /"+rulesFile)
		m.same(before, "reset")
	})
}

func TestSetupThatFailsOrDies(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		before := m.tree()
		m.command("modprobe",
			`echo "modprobe: FATAL: Module $1 not found in directory" >&2; exit 1`)
		m.env = []string{"SUDO_USER=alice"}
		out := runRaw(m, "setup")
		out.want(3, "module vfio-pci does not load", "CONFIG_VFIO_PCI")
		if m.exists(modulesFile) || m.exists(limitsFile) {
			t.Error("setup went on without the module")
		}
		m.run("reset").want(0)
		m.command("modprobe", stubs["modprobe"])
		m.same(before, "reset after a setup that failed")

		// Killed in the middle of each change that a command makes.
		for _, at := range []string{"modprobe", "groupadd", "gpasswd", "udevadm", "chgrp"} {
			m := newMachine(t, sh, groupTools["shadow"]...)
			m.bound("0000:01:00.0", 11)
			m.env = []string{"SUDO_USER=alice"}
			before := m.tree()
			m.ours("0000:01:00.0", 11)
			m.command(at, stubs[at]+"\nkill -9 $PPID")
			if r := m.run("setup"); r.code != -1 {
				t.Fatalf("%s: was not killed but ended with %d:\n%s%s", at, r.code, r.out, r.err)
			}
			m.command(at, stubs[at])
			m.driver("0000:01:00.0", "nvme") // else the modules stay
			m.remove("run")
			m.run("reset").want(0)
			m.driver("0000:01:00.0", "vfio-pci")
			m.bound2(before)
			m.same(before, "reset after setup was killed in "+at)
		}
	})
}

// bound2 brings back the node that the stub of "modprobe -r" took away with the module.
func (m *machine) bound2(before map[string]string) {
	if _, ok := before["dev/vfio/11"]; ok && !m.exists("dev/vfio/11") {
		m.write("dev/vfio/11", "")
		m.mode("dev/vfio/11", 0o600)
	}
}

// runRaw is run for a script whose commands fail on purpose: their words are theirs.
func runRaw(m *machine, args ...string) result {
	m.t.Helper()
	m.before = []string{"exec 2>&1"}
	defer func() { m.before = nil }()
	return m.run(args...)
}

// The IOMMU is the one thing that setup cannot bring: it does its part and exits with 3.
func TestSetupWithoutIOMMU(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := newMachine(t, sh, groupTools["none"]...)
		m.remove("sys/kernel/iommu_groups", "sys/class/iommu")
		m.write("proc/cmdline", "quiet\n")
		before := m.tree()
		m.run("setup", "--user", "alice").want(3, "wrote /"+rulesFile,
			"add intel_iommu=on iommu=pt", "setup did its part")
		if !slices.Contains(m.calls(), "modprobe vfio-pci") {
			t.Errorf("ran %q", m.calls())
		}
		m.run("reset").want(0)
		m.same(before, "reset")
	})
}

// The udev rule's program, run as udev would run it, gives away what setup gives away.
func TestRuleProgram(t *testing.T) {
	eachShell(t, func(t *testing.T, sh shell) {
		m := ready(t, sh)
		programs := regexp.MustCompile(`PROGRAM=="/bin/sh -c '([^"']*)'"`).FindAllStringSubmatch(
			m.read(rulesFile), -1)
		if len(programs) != 2 {
			t.Fatalf("%d programs in %s", len(programs), m.read(rulesFile))
		}
		m.link("sys/class/vfio-dev/vfio0/device", "../../../bus/pci/devices/0000:01:00.0")
		gives := func(program, kernel string) bool {
			t.Helper()
			// udev's substitutions (udev(7)), and the machine in its folder, whose name has a
			// blank.
			text := strings.NewReplacer("$$", "$", "%k", kernel, " /sys/", " ./sys/", " /run/",
				" ./run/").Replace(program)
			c := exec.Command(sh.argv[0], append(sh.argv[1:], "-c", text)...)
			c.Dir, c.Env = m.root, []string{"PATH=" + sh.path}
			out, err := c.CombinedOutput()
			if len(out) > 0 {
				t.Errorf("it prints %s", out)
			}
			return err == nil
		}
		check := func(want bool, when string) {
			t.Helper()
			if got := gives(programs[0][1], "11"); got != want {
				t.Errorf("%s: the group's node is given: %v", when, got)
			}
			if got := gives(programs[1][1], "vfio0"); got != want {
				t.Errorf("%s: the device's node is given: %v", when, got)
			}
		}
		m.driver("0000:01:00.0", "vfio-pci")
		check(false, "bound by somebody else")
		m.record("10000:01:00.0", 1, state.Bound)
		check(false, "a record of another domain's")
		for _, phase := range []state.Phase{state.Binding, state.Unbinding} {
			m.record("0000:01:00.0", 0, phase)
			check(false, "ours, "+string(phase))
		}
		m.record("0000:01:00.0", 0, state.Bound)
		check(true, "ours")
		m.driver("0000:01:00.0", "nvme_vfio_pci")
		check(false, "ours once, another driver's now")
		m.driver("0000:01:00.0", "vfio-pci")
		m.pci("0000:01:00.1", "0x010802", 11, "vfio-pci")
		check(false, "with another program's SSD")
		m.record("0000:01:00.1", 2, state.Binding)
		check(false, "with one of ours that is not proved yet")
		m.record("0000:01:00.1", 2, state.Bound)
		check(true, "two of ours")
		m.pci("0000:01:00.2", "0x030000", 11, "vfio-pci")
		check(false, "with a GPU")
		if gives(programs[0][1], "13") {
			t.Error("a GPU's group is given")
		}
	})
}
