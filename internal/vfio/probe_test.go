package vfio

import (
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
	names := []string{"IOMMU", "VFIO", "VFIO type1v2", "VFIO iommufd", "vfio-pci", "locked memory",
		"huge pages", "other devices' memory", "dma-buf import"}
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
			"IOMMU":                 "heliosctl vfio-setup status",
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
			found := k.machine().probe()
			if len(found) != len(names) {
				t.Fatalf("%d findings", len(found))
			}
			for i, f := range found {
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
