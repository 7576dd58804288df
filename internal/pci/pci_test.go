package pci_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/nsid"
	"helios/internal/pci"
	"helios/internal/testing/fakesys"
)

const (
	addrA = "0000:00:04.0"
	addrB = "0000:00:05.0"
	addrC = "10000:01:00.0" // a domain of more than four digits, as Intel VMD has
)

func machine(t *testing.T) *fakesys.Machine {
	m := fakesys.New(t.TempDir())
	m.Add(fakesys.SSD{Addr: addrA, Serial: "SER0", Group: 7})
	m.Add(fakesys.SSD{Addr: addrB, Serial: "SER1", Group: 8, Bytes: 1 << 30, LBABytes: 4096,
		Multipath: true, Model: "QEMU NVMe Ctrl", Firmware: "7.2"})
	m.Add(fakesys.SSD{Addr: addrC, Serial: "SER2", Group: -1, Driver: "-"})
	m.Add(fakesys.SSD{Addr: "0000:00:02.0", Class: 0x020000, Group: 8, Driver: "-"})
	m.Add(fakesys.SSD{Addr: "0000:00:01.0", Class: 0x060400, Group: 8, Driver: "-"})
	return m
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"00:04.0": addrA, "0000:00:04.0": addrA, "0000:3B:00.1": "0000:3b:00.1", addrC: addrC,
		"": "", "00:04": "", "00:04.8": "", "nvme0": "", "000:00:04.0": "", "0000:00:04.0 ": "",
		"SER0": "",
	} {
		got, ok := pci.Address(in)
		require.Equal(t, want, got, in)
		require.Equal(t, want != "", ok, in)
	}
}

func TestDevices(t *testing.T) {
	m := machine(t)
	s := m.Sys()
	all, err := s.Devices(pci.NVMeClass)
	require.NoError(t, err)
	require.Equal(t, []pci.Device{
		{Addr: addrA, Vendor: 0x1b36, DeviceID: 0x10, Class: pci.NVMeClass, Driver: "nvme",
			Group: 7, NUMANode: -1, LinkSpeed: "16.0 GT/s PCIe", LinkWidth: 4},
		{Addr: addrB, Vendor: 0x1b36, DeviceID: 0x10, Class: pci.NVMeClass, Driver: "nvme",
			Group: 8, NUMANode: -1, LinkSpeed: "16.0 GT/s PCIe", LinkWidth: 4},
		{Addr: addrC, Vendor: 0x1b36, DeviceID: 0x10, Class: pci.NVMeClass, Group: -1, NUMANode: -1,
			LinkSpeed: "16.0 GT/s PCIe", LinkWidth: 4},
	}, all)
	all, err = s.Devices(0)
	require.NoError(t, err)
	require.Len(t, all, 5)

	members, err := s.GroupMembers(8)
	require.NoError(t, err)
	require.Len(t, members, 2, "the bridge stays with its driver")
	require.Equal(t, "0000:00:02.0", members[0].Addr)
	require.Equal(t, addrB, members[1].Addr)
	_, err = s.GroupMembers(9)
	require.ErrorIs(t, err, pci.ErrNotFound)

	none, err := pci.Sys{Root: t.TempDir()}.Devices(0)
	require.NoError(t, err, "a machine without PCI has no devices")
	require.Empty(t, none)
}

// The kernel's attributes of an identity, in every form that it has had.
func TestIdentities(t *testing.T) {
	const uuid, plain = "5b9d2c1e-0000-4000-8000-0123456789ab", "5b9d2c1e0000400080000123456789ab"
	for name, put := range map[string]map[string]string{
		"uuid": {"uuid": uuid}, "nguid": {"nguid": uuid}, "capitals": {"uuid": strings.ToUpper(uuid)},
		"wwid, UUID": {"wwid": "uuid." + uuid}, "wwid, NGUID": {"wwid": "eui." + plain},
		"all": {"uuid": uuid, "nguid": uuid, "wwid": "uuid." + uuid},
	} {
		m := machine(t)
		for k, v := range put {
			m.Put("/sys/class/block/nvme0n1/"+k, v+"\n")
		}
		all, err := m.Sys().Namespaces()
		require.NoError(t, err)
		require.Equal(t, []string{plain}, all[0].ID.IDs, name)
		require.Empty(t, all[1].ID.IDs, name)
		require.False(t, all[0].ID.Same(all[1].ID))
	}
	m := machine(t)
	m.Put("/sys/class/block/nvme0n1/eui", "00 25 38 b1 11 b2 a0 a2\n")
	m.Put("/sys/class/block/nvme1n1/wwid", "nvme.8086-4242-4d-00000001\n")
	m.Put("/sys/class/nvme/nvme1/subsysnqn", "nqn.2014.08.org.nvmexpress:80868086SER1  M\n")
	all, err := m.Sys().Namespaces()
	require.NoError(t, err)
	require.Equal(t, []string{"002538b111b2a0a2"}, all[0].ID.IDs)
	require.Empty(t, all[1].ID.IDs)
	require.Empty(t, all[1].ID.NQN, "made up by the kernel")
}

func TestVirtualFunctions(t *testing.T) {
	m := machine(t)
	m.Virtual(addrA, addrB)
	pf, err := m.Sys().Device(addrA)
	require.NoError(t, err)
	vf, err := m.Sys().Device(addrB)
	require.NoError(t, err)
	require.Equal(t, 1, pf.VFs)
	require.Empty(t, pf.PF)
	require.Equal(t, addrA, vf.PF)
	require.Zero(t, vf.VFs)
}

func TestController(t *testing.T) {
	m := machine(t)
	id := nsid.ID{NQN: "nqn.2019-08.org.qemu:SER0", Serial: "SER0", Model: "Fake NVMe", NSID: 1}
	c, err := m.Sys().NVMe("00:04.0")
	require.NoError(t, err)
	require.Equal(t, pci.Controller{Name: "nvme0", State: "live", Serial: "SER0",
		Model: "Fake NVMe", Firmware: "1.0", NQN: "nqn.2019-08.org.qemu:SER0",
		Namespaces: []pci.Namespace{{Name: "nvme0n1", Generic: "ng0n1", Dev: "259:1", NSID: 1,
			Bytes: 64 << 20, LBABytes: 512, Paths: []string{"nvme0"}, ID: id}}}, c)

	c, err = m.Sys().NVMe(addrB)
	require.NoError(t, err)
	require.Equal(t, []pci.Namespace{{Name: "nvme1n1", Hidden: "nvme1c1n1", Generic: "ng1n1",
		Dev: "259:2", NSID: 1, Bytes: 1 << 30, LBABytes: 4096, Paths: []string{"nvme1"},
		ID: nsid.ID{NQN: "nqn.2019-08.org.qemu:SER1", Serial: "SER1", Model: "QEMU NVMe Ctrl",
			NSID: 1}}}, c.Namespaces)

	_, err = m.Sys().NVMe(addrC)
	require.ErrorIs(t, err, pci.ErrNotFound)
	require.ErrorContains(t, err, "no driver")
}

func TestFind(t *testing.T) {
	m := machine(t)
	m.Link("/dev/disk/by-id/nvme-Fake_SER0", "../../nvme0n1")
	m.Link("/dev/disk/by-id/nvme-Fake_SER0-part1", "../../nvme0n1p1")
	m.Partition("nvme0n1", 1, 1<<20)
	m.Put("/dev/sda", "")
	m.Put("/sys/devices/virtual/nvme-fabrics/ctl/nvme9/transport", "tcp\n")
	m.Link("/sys/class/nvme/nvme9", "../../devices/virtual/nvme-fabrics/ctl/nvme9")
	m.Put("/dev/nvme9", "")
	for name, want := range map[string]string{
		addrA: addrA, "00:05.0": addrB, addrC: addrC, "SER0": addrA, "SER1": addrB,
		"/dev/nvme0": addrA, "nvme1": addrB, "/dev/nvme0n1": addrA, "nvme0n1": addrA,
		"/dev/ng0n1":   addrA,
		"/dev/nvme1n1": addrB, "/dev/ng1n1": addrB, "nvme1c1n1": addrB, // multipath
		"/dev/disk/by-id/nvme-Fake_SER0": addrA,
	} {
		d, err := m.Sys().Find(name)
		require.NoError(t, err, name)
		require.Equal(t, want, d.Addr, name)
	}
	for name, want := range map[string]struct {
		class  errs.Class
		absent bool
		words  []string
	}{
		"/dev/nvme0n1p1": {errs.Refused, false,
			[]string{"partition of /dev/nvme0n1", "name /dev/nvme0n1"}},
		"/dev/disk/by-id/nvme-Fake_SER0-part1": {errs.Refused, false,
			[]string{"by-id", "partition of /dev/nvme0n1"}},
		"nvme0n1p1": {errs.Refused, false, []string{"partition"}},
		"nvme5n1p1": {errs.Usage, true,
			[]string{"/dev/nvme5n1", "heliosctl ssds"}},
		"/dev/nvme5": {errs.Usage, true,
			[]string{"/dev/nvme5", "heliosctl ssds"}},
		"nvme5n1": {errs.Usage, true, []string{"/dev/nvme5n1"}},
		"nvme5":   {errs.Usage, true, []string{"nvme5"}},
		"00:06.0": {errs.Usage, true, []string{"0000:00:06.0"}},
		"00:02.0": {errs.Usage, false, []string{"no NVMe controller",
			"020000"}},
		// no driver to ask
		"SER2":       {errs.Usage, true, []string{"SER2", "serial number"}},
		"/dev/sda":   {errs.Usage, false, []string{"no NVMe device"}},
		"/dev/nvme9": {errs.Usage, false, []string{"tcp"}},
	} {
		_, err := m.Sys().Find(name)
		require.Error(t, err, name)
		require.Equal(t, want.class, errs.ClassOf(err), "%s: %v", name, err)
		require.Equal(t, want.absent, errors.Is(err, pci.ErrNotFound), "%s: %v", name, err)
		for _, w := range want.words {
			require.ErrorContains(t, err, w, name)
		}
	}
	m.Add(fakesys.SSD{Addr: "0000:00:07.0", Serial: "SER0", Group: 9})
	_, err := m.Sys().Find("SER0")
	require.ErrorContains(t, err, addrA+", 0000:00:07.0")
}

// A namespace that two controllers reach is not taken by its name.
func TestSharedNamespace(t *testing.T) {
	m := machine(t)
	m.Put("/sys/devices/pci0000:00/"+addrA+"/nvme/nvme0/nvme1c0n1/size", "8\n")
	_, err := m.Sys().Find("/dev/nvme1n1")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.ErrorContains(t, err, "2 controllers (nvme0, nvme1)")
	c, err := m.Sys().NVMe(addrB)
	require.NoError(t, err)
	require.Equal(t, []string{"nvme0", "nvme1"}, c.Namespaces[0].Paths)
}

func TestBindAndRestore(t *testing.T) {
	m := machine(t)
	s := m.Sys()
	require.NoError(t, s.Bind("00:04.0", "vfio-pci"))
	d, err := s.Device(addrA)
	require.NoError(t, err)
	require.Equal(t, "vfio-pci", d.Driver)
	require.Equal(t, "vfio-pci", d.Override)
	require.True(t, d.Taken())
	dev := "/sys/bus/pci/devices/" + addrA
	require.Equal(t, []string{dev + "/driver_override vfio-pci",
		"/sys/bus/pci/drivers/nvme/unbind " + addrA, "/sys/bus/pci/drivers/vfio-pci/bind " + addrA},
		m.Writes())
	require.Equal(t, "nvme", m.Driver(addrB), "nothing else is rebound")

	require.NoError(t, s.Bind(addrA, "vfio-pci"), "again")
	require.Len(t, m.Writes(), 3, "nothing was left to do")

	require.NoError(t, s.Restore(addrA, "nvme"))
	d, err = s.Device(addrA)
	require.NoError(t, err)
	require.Equal(t, "nvme", d.Driver)
	require.Equal(t, "", d.Override)
	require.False(t, d.Taken())
	c, err := s.WaitNVMe(context.Background(), addrA)
	require.NoError(t, err)
	require.Equal(t, "SER0", c.Serial)
	n := len(m.Writes())
	require.NoError(t, s.Restore(addrA, "nvme"), "again")
	require.NoError(t, s.Restore(addrA, ""), "the driver that never left")
	require.Len(t, m.Writes(), n)

	require.NoError(t, s.Bind(addrA, "vfio-pci"))
	require.NoError(t, s.Restore(addrA, ""), "the kernel finds the driver")
	require.Equal(t, "nvme", m.Driver(addrA))
}

// killed stops the process at one of its writes.
type killed struct{}

// A device that had no driver goes back to none, and one that no driver takes is not waited for.
func TestRestoreToNoDriver(t *testing.T) {
	m := machine(t)
	s := m.Sys()
	s.Wait = time.Hour // a wait for a driver would end the test
	const bare = "0000:00:08.0"
	m.Add(fakesys.SSD{Addr: bare, Serial: "BARE", Group: 3, Driver: "-"})
	for range 2 {
		require.NoError(t, s.Bind(bare, "vfio-pci"))
		require.NoError(t, s.Restore(bare, pci.NoDriver))
		d, err := s.Device(bare)
		require.NoError(t, err)
		require.Empty(t, d.Driver)
		require.Empty(t, d.Override)
	}
	require.NoError(t, s.Restore(bare, pci.NoDriver), "again")
	m.Remove("/sys/bus/pci/drivers/nvme")
	require.NoError(t, s.Bind(bare, "vfio-pci"))
	m.Fail = func(path, text string) error { // the kernel has no driver for it
		if filepath.Base(path) == "drivers_probe" {
			return syscall.EINVAL
		}
		return nil
	}
	require.ErrorContains(t, s.Restore(bare, ""), "probing for a driver")
	m.Fail = nil
	m.Add(fakesys.SSD{Addr: "0000:00:09.0", Class: 0x020000, Group: 4}) // a class without a driver
	require.NoError(t, s.Bind("0000:00:09.0", "vfio-pci"))
	require.NoError(t, s.Restore("0000:00:09.0", ""))
	d, err := s.Device("0000:00:09.0")
	require.NoError(t, err)
	require.Empty(t, d.Driver)
}

// A device that somebody gave to another driver since stays there, whoever had it before: its disk
// may be mounted.
func TestRestoreSparesAnotherDriver(t *testing.T) {
	const moved = "0000:00:08.0"
	for _, former := range []string{pci.NoDriver, "", "nvme"} {
		for _, now := range []string{"nvme", "uio_pci_generic"} {
			// a killed Bind leaves the latter
			for _, override := range []string{"(null)", "vfio-pci"} {
				m := machine(t)
				m.Mkdir("/sys/bus/pci/drivers/uio_pci_generic")
				m.Add(fakesys.SSD{Addr: moved, Serial: "MOVED", Group: 3, Driver: now})
				m.Put("/sys/devices/pci0000:00/"+moved+"/driver_override", override+"\n")
				require.NoError(t, m.Sys().Restore(moved, former))
				for _, w := range m.Writes() {
					require.NotContains(t, w, "unbind", "former %q, now %s", former, now)
				}
				d, err := m.Sys().Device(moved)
				require.NoError(t, err)
				require.Equal(t, now, d.Driver)
				require.Empty(t, d.Override)
			}
		}
	}
}

// VFIO's groups of its mode without an IOMMU are no groups.
func TestNoIOMMUGroup(t *testing.T) {
	m := machine(t)
	d, err := m.Sys().Device(addrA)
	require.NoError(t, err)
	require.GreaterOrEqual(t, d.Group, 0)
	require.False(t, d.NoIOMMU)
	m.Put(fmt.Sprintf("/sys/kernel/iommu_groups/%d/name", d.Group), "vfio-noiommu\n")
	d, err = m.Sys().Device(addrA)
	require.NoError(t, err)
	require.Equal(t, -1, d.Group)
	require.True(t, d.NoIOMMU)
	err = m.Sys().Bind(addrA, "vfio-pci")
	require.Equal(t, errs.Capability, errs.ClassOf(err))
}

// From wherever a kill leaves a device, Bind and Restore go on.
func TestKilledAnywhere(t *testing.T) {
	verbs := map[string]func(pci.Sys) error{
		"bind":            func(s pci.Sys) error { return s.Bind(addrA, "vfio-pci") },
		"restore":         func(s pci.Sys) error { return s.Restore(addrA, "nvme") },
		"restore to \"\"": func(s pci.Sys) error { return s.Restore(addrA, "") },
	}
	states := map[string]bool{}
	for first, one := range verbs {
		for _, before := range []bool{true, false} {
			for step := range 3 {
				for second, two := range verbs {
					if second == "restore" && first != "bind" { // restore to "" covers it
						continue
					}
					m := fakesys.New(t.TempDir())
					m.Add(fakesys.SSD{Addr: addrA, Serial: "SER0", Group: 7})
					if first != "bind" {
						require.NoError(t, m.Sys().Bind(addrA, "vfio-pci"))
					}
					start := len(m.Writes())
					s := m.Sys()
					kernel := s.Write
					s.Write = func(path, text string) error {
						if len(m.Writes())-start == step && before {
							panic(killed{})
						}
						err := kernel(path, text)
						if len(m.Writes())-start == step+1 && !before {
							panic(killed{})
						}
						return err
					}
					// The write runs in a goroutine of its own; a kill is one that never returns.
					inner := s.Write
					dead := make(chan struct{})
					s.Write = func(path, text string) (err error) {
						defer func() {
							if r := recover(); r != nil {
								if _, ok := r.(killed); !ok {
									panic(r)
								}
								close(dead)
								select {}
							}
						}()
						return inner(path, text)
					}
					s.Wait = time.Hour
					go one(s) //nolint:errcheck // never returns
					<-dead
					d, err := m.Sys().Device(addrA)
					require.NoError(t, err)
					if !d.Taken() { // before the first step, after the last but one of restore
						require.True(t, d.Driver == "nvme" || d.Driver == "")
					}
					states[d.Driver+"/"+d.Override] = true

					require.NoError(t, two(m.Sys()), "%s killed at step %d (before: %v), then %s",
						first, step, before, second)
					d, err = m.Sys().Device(addrA)
					require.NoError(t, err)
					want, override := "nvme", ""
					if second == "bind" {
						want, override = "vfio-pci", "vfio-pci"
					}
					require.Equal(t, want, d.Driver)
					require.Equal(t, override, d.Override)
				}
			}
		}
	}
	require.Equal(t, map[string]bool{"nvme/": true, "nvme/vfio-pci": true, "/vfio-pci": true,
		"vfio-pci/vfio-pci": true, "vfio-pci/": true, "/": true}, states,
		"every state in between was met")
}

func TestBindUndoes(t *testing.T) {
	for name, c := range map[string]struct {
		fail  func(path, text string) error
		class errs.Class
		words []string
	}{
		"no permission": {func(p,
			_ string) error {
			return &os.PathError{Op: "open", Path: p, Err: syscall.EACCES}
		}, errs.Capability, []string{"only root"}},
		"nvme stays": {failAt("nvme/unbind", syscall.EBUSY), errs.Device,
			[]string{"unbinding driver nvme", "nothing has changed", "it is with driver nvme"}},
		"vfio refuses": {failAt("vfio-pci/bind", syscall.EINVAL), errs.Device,
			[]string{"binding driver vfio-pci", "invalid argument", "nothing has changed",
				"it is with driver nvme"}},
		"no match": {failAt("vfio-pci/bind", syscall.ENODEV), errs.Device,
			[]string{"does not take this device"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine(t)
			m.Fail = c.fail
			err := m.Sys().Bind(addrA, "vfio-pci")
			require.Error(t, err)
			require.Equal(t, c.class, errs.ClassOf(err), "%v", err)
			for _, w := range append(c.words, addrA) {
				require.ErrorContains(t, err, w)
			}
			require.Equal(t, "nvme", m.Driver(addrA))
			d, err := m.Sys().Device(addrA)
			require.NoError(t, err)
			require.False(t, d.Taken())
		})
	}

	m := machine(t)
	m.Fail = func(path, text string) error {
		if strings.HasSuffix(path, "/bind") {
			return syscall.EIO
		}
		return nil
	}
	err := m.Sys().Bind(addrA, "vfio-pci")
	require.ErrorContains(t, err, "putting it back failed too")
	require.ErrorContains(t, err, addrA+": it has no driver")
	err = m.Sys().Restore(addrA, "nvme")
	require.ErrorContains(t, err, "binding driver nvme")
	require.ErrorContains(t, err, addrA+": it has no driver")
	m.Fail = nil
	require.NoError(t, m.Sys().Restore(addrA, "nvme"))

	// The override of a killed bind is not put back where another bind fails.
	m = machine(t)
	m.Put("/sys/devices/pci0000:00/"+addrA+"/driver_override", "vfio-pci\n")
	m.Fail = failAt("vfio-pci/bind", syscall.EINVAL)
	require.Error(t, m.Sys().Bind(addrA, "vfio-pci"))
	d, err := m.Sys().Device(addrA)
	require.NoError(t, err)
	require.Equal(t, "nvme", d.Driver)
	require.Equal(t, "", d.Override)
}

func failAt(suffix string, err error) func(path, text string) error {
	return func(path, _ string) error {
		if strings.HasSuffix(path, suffix) {
			return err
		}
		return nil
	}
}

func TestBindRefuses(t *testing.T) {
	m := machine(t)
	for _, c := range []struct {
		addr, driver string
		class        errs.Class
		words        string
	}{
		{"00:09.0", "vfio-pci", errs.Usage, "not found"},
		{"nvme0", "vfio-pci", errs.Usage, "not a PCI address"},
		{addrA, "", errs.Usage, "not the name of a kernel driver"},
		{addrA, "../nvme", errs.Usage, "not the name of a kernel driver"},
		{addrA, "uio", errs.Capability, "modprobe uio"},
		{addrC, "vfio-pci", errs.Capability, "no IOMMU group"},
	} {
		err := m.Sys().Bind(c.addr, c.driver)
		require.ErrorContains(t, err, c.words)
		require.Equal(t, c.class, errs.ClassOf(err))
	}
	m.Remove("/sys/bus/pci/drivers/vfio-pci")
	require.ErrorContains(t, m.Sys().Bind(addrA, "vfio-pci"), "heliosctl vfio-setup setup")
	m.Remove("/sys/bus/pci/drivers/nvme")
	require.ErrorContains(t, m.Sys().Restore(addrA, "nvme"), "modprobe nvme")
	require.Empty(t, m.Writes(), "nothing was touched")
}

// A kernel that does not return from a write is given up on, and says so.
func TestKernelHangs(t *testing.T) {
	m := machine(t)
	hang := make(chan struct{})
	defer close(hang)
	m.Fail = func(path, _ string) error {
		if strings.HasSuffix(path, "nvme/unbind") {
			<-hang
		}
		return nil
	}
	s := m.Sys()
	s.Wait = 20 * time.Millisecond
	err := s.Bind(addrA, "vfio-pci")
	require.ErrorContains(t, err, "did not finish within 20ms")
	require.ErrorContains(t, err, "run the same command again")
	require.Equal(t, errs.Device, errs.ClassOf(err))

	// A driver that takes its time after the write.
	m = machine(t)
	s = m.Sys()
	kernel := s.Write
	s.Write = func(path, text string) error {
		if strings.HasSuffix(path, "vfio-pci/bind") {
			time.AfterFunc(20*time.Millisecond, func() { _ = kernel(path, text) })
			return nil
		}
		return kernel(path, text)
	}
	require.NoError(t, s.Bind(addrA, "vfio-pci"))

	s.Wait = 20 * time.Millisecond
	s.Write = func(string, string) error { return nil } // does nothing at all
	require.ErrorContains(t, s.Restore(addrA, "nvme"),
		`driver_override is "vfio-pci" after it was set to ""`)
}

// Without a fake kernel the attributes themselves are written.
func TestWritesAttributes(t *testing.T) {
	m := machine(t)
	s := pci.Sys{Root: m.Root, Wait: 200 * time.Millisecond}
	unbind := filepath.Join(m.Root, "/sys/bus/pci/drivers/nvme/unbind")
	require.NoError(t, os.WriteFile(unbind, nil, 0o600))
	err := s.Bind(addrA, "vfio-pci")
	require.ErrorContains(t, err, "did not leave driver nvme within 200ms")
	b, err := os.ReadFile(unbind)
	require.NoError(t, err)
	require.Equal(t, addrA, string(b))
	b, err = os.ReadFile(filepath.Join(m.Root, "/sys/bus/pci/devices", addrA, "driver_override"))
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(b), "\n"), "cleared again: %q", b)
}

func TestWaitNVMe(t *testing.T) {
	m := machine(t)
	s := m.Sys()
	state := "/sys/devices/pci0000:00/" + addrA + "/nvme/nvme0/state"
	m.Put(state, "connecting\n")
	go func() {
		time.Sleep(20 * time.Millisecond)
		// In one step, as the kernel does: a file that is written in place is empty for a moment,
		// which is "no state".
		off := filepath.Join(m.Root, state)
		_ = os.WriteFile(off+".new", []byte("live\n"), 0o600)
		_ = os.Rename(off+".new", off)
	}()
	c, err := s.WaitNVMe(context.Background(), addrA)
	require.NoError(t, err)
	require.Equal(t, "live", c.State)

	m.Put(state, "dead\n")
	_, err = s.WaitNVMe(context.Background(), addrA)
	require.ErrorContains(t, err, "is dead")
	m.Put(state, "resetting\n")
	s.Wait = 10 * time.Millisecond
	_, err = s.WaitNVMe(context.Background(), addrA)
	require.ErrorContains(t, err, `is "resetting", not live`)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s.Wait = time.Minute
	_, err = s.WaitNVMe(ctx, addrA)
	require.ErrorIs(t, err, context.Canceled)
}

func TestLinkBytes(t *testing.T) {
	for _, c := range []struct {
		speed string
		width int
		want  float64
	}{{"16.0 GT/s PCIe", 4, 7.877e9}, {"2.5 GT/s PCIe", 1, 0.25e9}, {"", 4, 0}, {"fast", 4, 0},
		{"8.0 GT/s PCIe", 0, 0}} {
		d := pci.Device{LinkSpeed: c.speed, LinkWidth: c.width}
		require.InDelta(t, c.want, d.LinkBytes(), 1e6, c.speed)
	}
}
