package vfio

import (
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"helios/internal/probe"
)

// huge puts a pool of 2 MiB pages into the fake machine.
func (k *fake) huge(total, free, promised string) {
	dir := "/sys/kernel/mm/hugepages/hugepages-2048kB/"
	k.Put(dir+"nr_hugepages", total+"\n")
	k.Put(dir+"free_hugepages", free+"\n")
	k.Put(dir+"resv_hugepages", promised+"\n")
}

func TestProbe(t *testing.T) {
	names := []string{"IOMMU", "interrupt remapping", "VFIO", "VFIO backend", "VFIO type1v2",
		"VFIO iommufd", "vfio-pci", "locked memory", "group", "huge pages", "other devices' memory",
		"dma-buf import"}
	const there, not, unknown = probe.There, probe.NotThere, probe.Unknown
	for _, c := range []struct {
		name    string
		prepare func(k *fake)
		answers []probe.Answer
		words   map[string]string
	}{
		{"ready", func(k *fake) { k.huge("8", "5", "2"); k.Mkdir("/sys/module/vfio_iommu_type1") },
			[]probe.Answer{there, there, there, not, there, there, there, there, not},
			map[string]string{
				"other devices' memory": "behind their BARs", "dma-buf import": "no iommufd",
				"IOMMU": "3 groups", "vfio-pci": cardA, "locked memory": "no limit",
				"huge pages": "16 MiB reserved, 6 MiB free",
			}},
		{"bare", func(k *fake) {
			k.Remove("/sys/kernel/iommu_groups")
			k.Remove("/dev/vfio")
			k.Remove("/sys/bus/pci/drivers/vfio-pci")
			k.limit = 8 << 20
			k.huge("0", "0", "0")
		}, []probe.Answer{not, not, not, not, not, not, not, not, not}, map[string]string{
			"other devices' memory": "takes type1",
			"IOMMU":                 "switch it on in the firmware's set-up",
			"VFIO":                  "heliosctl vfio-setup setup", "vfio-pci": "not loaded",
			"locked memory": "8 MiB", "huge pages": "none reserved",
		}},
		{"groups without an IOMMU", func(k *fake) {
			k.Remove("/sys/kernel/iommu_groups")
			k.Put("/sys/kernel/iommu_groups/0/name", "vfio-noiommu\n")
		}, []probe.Answer{not, there, there, not, there, there, not, not, not},
			map[string]string{"IOMMU": "1 groups of VFIO's mode without an IOMMU"}},
		{"no rights", func(k *fake) {
			k.failNext("open /dev/vfio/vfio", unix.EACCES, unix.EACCES, unix.EACCES)
			k.limit = 1 << 30
		}, []probe.Answer{there, not, not, not, there, there, not, not, not},
			map[string]string{"VFIO": "no right", "locked memory": "1 GiB"}},
		{"iommufd", func(k *fake) { k.Put("/dev/iommu", ""); k.type1 = 0 },
			[]probe.Answer{there, there, not, there, there, there, not, not, unknown},
			map[string]string{
				"VFIO iommufd": "3 device nodes", "VFIO type1v2": "vfio_iommu_type1",
			}},
		{"iommufd and nothing bound",
			func(k *fake) { k.Put("/dev/iommu", ""); k.Remove("/dev/vfio/devices") },
			[]probe.Answer{there, there, there, unknown, there, there, not, not, unknown},
			map[string]string{
				"other devices' memory": "imitation", "dma-buf import": "of a GPU only a try tells",
			}},
		{"iommufd without files", func(k *fake) {
			k.Put("/dev/iommu", "")
			k.failNext("MAP_FILE", unix.ENOTTY)
		}, []probe.Answer{there, there, there, there, there, there, not, not, not},
			map[string]string{"dma-buf import": "Linux 6.13"}},
		{"no memory file", func(k *fake) {
			k.Put("/dev/iommu", "")
			k.failNext("memfd", unix.EMFILE)
		}, []probe.Answer{there, there, there, there, there, there, not, not, unknown},
			map[string]string{"dma-buf import": "too many open files"}},
		{"could not tell", func(k *fake) {
			k.failNext("open /dev/vfio/vfio", unix.EMFILE, unix.EMFILE, unix.EMFILE)
			k.failNext("memlock", unix.EIO)
		}, []probe.Answer{there, unknown, unknown, not, there, unknown, not, unknown, not}, nil},
		{"other version",
			func(
				k *fake) {
				k.failNext("API_VERSION", unix.EINVAL)
				k.failNext("CHECK_EXTENSION", unix.EINVAL)
			}, []probe.Answer{there, not, unknown, not, there, there, not, not, not}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newFake(t)
			c.prepare(k)
			a := c.answers // those that follow from them are told here
			backend := a[2]
			if backend != there && a[3] != not {
				backend = there
			}
			c.answers = slices.Concat(a[:1], []probe.Answer{unknown, a[1], backend}, a[2:6],
				[]probe.Answer{there}, a[6:])
			found := k.machine().probe()
			if len(found) != len(names) {
				t.Fatalf("%d findings", len(found))
			}
			for i, f := range found {
				if f.Name == NeedGroup && os.Geteuid() != 0 {
					continue // as the user of this test has it
				}
				if f.Name != names[i] || f.Answer != c.answers[i] {
					t.Errorf("%+v, want %s %s", f, names[i], c.answers[i])
				}
				if f.Detail == "" || f.Answer == not && f.Next == "" {
					t.Errorf("%+v: no words", f)
				}
				if f.Answer == there && f.Next != "" {
					t.Errorf("%+v: a next step where nothing is missing", f)
				}
				if w := c.words[f.Name]; !strings.Contains(f.Detail+f.Next, w) {
					t.Errorf("%+v does not say %q", f, w)
				}
			}
		})
	}
	if n := len(Probe()); n != len(names) { // the real machine, whatever it has
		t.Errorf("%d findings", n)
	}
}

func TestRemapping(t *testing.T) {
	const irq = "  1:  0  9  IR-IO-APIC  1-edge  i8042\nLOC:  1  2  Local timer interrupts\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  probe.Answer
		word  string
	}{
		"nothing to be seen": {nil, probe.Unknown, "a bind tells"},
		"on":                 {map[string]string{"/proc/interrupts": irq}, probe.There, "on"},
		"newer names": {map[string]string{"/proc/interrupts": strings.ReplaceAll(irq, "IR-IO-APIC",
			"IR-PCI-MSIX-0000:00:04.0")}, probe.There, "on"},
		"off": {map[string]string{"/proc/interrupts": strings.ReplaceAll(irq, "IR-", "")},
			probe.NotThere, "the kernel uses none"},
		"an argument": {map[string]string{"/proc/cmdline": "quiet intel_iommu=on intremap=off"},
			probe.NotThere, "intremap=off"},
		"an old argument": {map[string]string{"/proc/cmdline": "nointremap"}, probe.NotThere,
			"nointremap"},
		"an IOMMU without": {map[string]string{"/sys/class/iommu/dmar0/intel-iommu/ecap": "f00040\n"},
			probe.NotThere, "the IOMMU has none"},
		"an IOMMU with": {map[string]string{"/sys/class/iommu/dmar0/intel-iommu/ecap": "f0004a\n"},
			probe.Unknown, "a bind tells"},
		"unsafe, and known": {map[string]string{"/proc/cmdline": "intremap=off",
			"/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts": "Y\n"}, probe.There,
			"allow_unsafe_interrupts"},
		"unsafe by iommufd, which type1 does not ask": {map[string]string{
			"/proc/cmdline": "intremap=off",
			"/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts": "N\n",
			"/sys/module/iommufd/parameters/allow_unsafe_interrupts":          "Y\n"},
			probe.NotThere, "intremap=off"},
		"unsafe by iommufd": {map[string]string{"/proc/cmdline": "intremap=off",
			"/sys/module/iommufd/parameters/allow_unsafe_interrupts": "Y\n"}, probe.There, "iommufd"},
		"an Arm machine": {map[string]string{
			"/proc/interrupts": " 11:  0  9  GICv3  27 Level  arch_timer\n"}, probe.Unknown, ""},
	} {
		k := newFake(t)
		for f, text := range c.files {
			k.Put(f, text)
		}
		f := k.machine().probeRemapping()
		if f.Answer != c.want || !strings.Contains(f.Detail, c.word) ||
			f.Answer == probe.NotThere && !strings.Contains(f.Next, "intremap=on") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func TestNoIOMMU(t *testing.T) {
	const tables = "/sys/firmware/acpi/tables/"
	for _, c := range []struct {
		files []string
		cpu   string
		args  string
		want  string
	}{
		{[]string{tables + "VIOT"}, "GenuineIntel", "", "sudo modprobe virtio_iommu"},
		{[]string{tables + "VIOT"}, "AuthenticAMD", "", "sudo modprobe virtio_iommu"},
		{[]string{tables + "VIOT", "/sys/module/virtio_iommu/initstate"}, "GenuineIntel", "",
			"virtio_iommu is loaded"},
		{[]string{tables + "VIOT", tables + "DMAR"}, "GenuineIntel", "", "add intel_iommu=on"},
		{nil, "GenuineIntel", "intel_iommu=off", "keeps the IOMMU off"},
		{nil, "GenuineIntel", "intel_iommu=on", "hides the IOMMU"},
		{[]string{tables + "IVRS"}, "AuthenticAMD", "", "dmesg | grep AMD-Vi"},
		{nil, "", "", "VT-d, AMD-Vi or SMMU"},
	} {
		k := newFake(t)
		for _, f := range c.files {
			k.Put(f, "")
		}
		k.Put("/proc/cpuinfo", "vendor_id : "+c.cpu+"\n")
		k.Put("/proc/cmdline", "quiet "+c.args+"\n")
		if got := NoIOMMU(k.machine().sys()); !strings.Contains(got, c.want) {
			t.Errorf("%v: %s", c, got)
		}
	}
}

// doctor calls no limit enough at which a run with default settings fails.
func TestProbeLocked(t *testing.T) {
	for limit, want := range map[int64]probe.Answer{-1: probe.There, 64 << 20: probe.NotThere,
		lockedNeeded - 1: probe.NotThere, lockedNeeded: probe.There} {
		k := newFake(t)
		k.limit = limit
		if f := k.machine().probeLocked(); f.Answer != want ||
			want == probe.NotThere && !strings.Contains(f.Next, "--memlock 512MiB") {
			t.Errorf("%d: %+v", limit, f)
		}
	}
}

// setup can raise a limit of locked memory; an earlier value stays unless a flag changes it.
func TestMemlockNext(t *testing.T) {
	for needed, want := range map[uint64]string{1: "--memlock 512MiB", 300 << 20: "--memlock 512MiB",
		500 << 20: "--memlock 768MiB", 64 << 30: "--memlock 81920MiB"} {
		if got := memlockNext(needed); !strings.Contains(got, want+"\"") ||
			!strings.Contains(got, "log in again") {
			t.Errorf("%d: %s", needed, got)
		}
	}
}
