package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/bound"
	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/testing/fakesys"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// rig is a machine made of files whose controllers, once vfio-pci has them, are played by software
// ones over the files that were their disks.
type rig struct {
	*fakesys.Machine
	m     *machine
	serve string // folder of the controllers' data
	// Calls that fail.
	openErr  error  // of every Open
	failOpen string // the address of one that does not open
	serial   string // that controllers say is theirs
	domains  int    // open now
	set      nvme.CommandSet
}

const (
	addrA, addrB, addrC = "0000:00:04.0", "0000:00:05.0", "0000:00:06.0"

	serialA, serialB, serialC = "SERIAL-A", "SERIAL-B", "SERIAL-C"
)

// newRig makes a machine with two controllers, each in a group of its own.
func newRig(t *testing.T) *rig {
	t.Helper()
	isolate(t)
	t.Setenv("SUDO_GID", "")
	r := &rig{Machine: fakesys.New(t.TempDir()), serve: t.TempDir()}
	sys := r.Sys()
	sys.Wait = 5 * time.Second
	r.m = machineOf(sys)
	r.m.Root = func() bool { return true }
	r.m.typed = func() io.Reader { return nil }
	r.m.Domain = func() (bound.Domain, error) { r.domains++; return r, nil }
	before := thisMachine
	thisMachine = func() *machine { return r.m }
	t.Cleanup(func() {
		thisMachine = before
		require.Zero(t, r.domains, "domains are closed")
	})
	r.Add(fakesys.SSD{Addr: addrA, Serial: serialA, Group: 1})
	r.Add(fakesys.SSD{Addr: addrB, Serial: serialB, Group: 2, LBABytes: 4096})
	return r
}

// Open is a domain's: a controller at vfio-pci opens as a proxy.
func (r *rig) Open(addr string) (nvme.Bus, error) {
	if r.openErr != nil {
		return nil, r.openErr
	}
	if r.failOpen == addr {
		return nil, errs.New(errs.Device, "%s does not open", addr)
	}
	if d := r.Driver(addr); d != vfioDriver {
		return nil, errs.New(errs.Usage, "%s has driver %q", addr, d)
	}
	cfg := proxy.Config{Name: addr, Path: filepath.Join(r.serve, addr), Bytes: 64 << 20,
		LBABytes: 512, Buffered: true, Serial: serialA}
	switch addr {
	case addrB:
		cfg.LBABytes, cfg.Serial = 4096, serialB
	case addrC:
		cfg.Serial = serialC
	}
	cfg.CommandSet = r.set
	if r.serial != "" {
		cfg.Serial = r.serial
	}
	if _, err := os.Stat(cfg.Path); err != nil {
		if err := proxy.Create(cfg.Path, cfg.Bytes); err != nil {
			return nil, err
		}
	}
	return proxy.Open(cfg)
}

func (r *rig) Close() error { r.domains--; return nil }

// records are those of the machine.
func records(t *testing.T) []state.Record {
	t.Helper()
	rs, err := state.OpenMachine("").Records()
	require.NoError(t, err)
	return rs
}

func TestBindAndUnbind(t *testing.T) {
	r := newRig(t)
	found := lines(t, ok(t, "ssds", "--json"))
	require.Len(t, found, 2)
	require.Equal(t, "kernel", found[0]["kind"])
	require.Equal(t, "nvme0", found[0]["name"])
	require.Equal(t, []any{"nvme0n1"}, found[0]["disks"])
	require.Equal(t, "16.0 GT/s PCIe x4", found[0]["link"])
	require.Equal(t, "none", found[0]["content"])

	out := lines(t, ok(t, "bind-ssds", "00:04.0", serialB, "--json", "--group",
		strconv.Itoa(os.Getgid())))
	require.Len(t, out, 4)
	require.Equal(t, "candidate", out[0]["event"])
	require.Equal(t, []any{}, out[0]["held_by"])
	require.Equal(t, "bind", out[0]["plan"])
	require.Equal(t, float64(4096), out[1]["lba_bytes"])
	require.Equal(t, "bound", out[2]["event"])
	require.Equal(t, "vfio0", out[2]["name"])
	require.Equal(t, "nvme", out[2]["previous_driver"])
	require.Equal(t, float64(1), out[2]["iommu_group"])
	rs := records(t)
	require.Len(t, rs, 2)
	require.Equal(t, state.Bound, rs[0].Phase)
	require.Equal(t, serialA, rs[0].Serial)
	require.Equal(t, []string{"nvme0n1"}, rs[0].Disks)
	require.Equal(t, 4096, rs[1].LBABytes)
	require.Equal(t, vfioDriver, r.Driver(addrA))
	for _, f := range []string{r.m.Sys.Path("/dev/vfio/1"), filepath.Join(os.Getenv(state.EnvRun),
		"vfio0.lock")} {
		fi, err := os.Stat(f)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o660), fi.Mode().Perm(), f)
	}
	// Only these two were written to, and by override.
	for _, w := range r.Writes() {
		require.True(t, strings.Contains(w, addrA) || strings.Contains(w, addrB), w)
		require.NotContains(t, w, "new_id")
	}

	// Again: nothing to do, by whatever name.
	require.NoError(t, os.Chmod(r.m.Sys.Path("/dev/vfio/2"), 0o600))
	n := len(r.Writes())
	again := ok(t, "bind-ssds", addrA, "nvme1n1")
	require.Contains(t, again, "bound already as vfio0")
	require.Contains(t, again, "bound already as vfio1")
	require.Len(t, r.Writes(), n)
	ok(t, "bind-ssds", addrB, "--group", strconv.Itoa(os.Getgid()))
	fi, err := os.Stat(r.m.Sys.Path("/dev/vfio/2"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o660), fi.Mode().Perm(),
		"shared again, with the group that is named")

	found = lines(t, ok(t, "ssds", "--json"))
	require.Len(t, found, 2)
	require.Equal(t, "vfio", found[0]["kind"])
	require.Equal(t, "good", found[0]["health"])
	require.Equal(t, "none", found[0]["content"])
	require.Equal(t, vfioDriver, found[0]["driver"])
	require.Contains(t, ok(t, "doctor"), "bound as vfio0")

	require.Contains(t, ok(t, "unbind-ssds", "/dev/nvme1"),
		"vfio1 (0000:00:05.0): unbound, /dev/nvme1n1 again, driver nvme")
	require.Equal(t, vfioDriver, r.Driver(addrA), "the other stays")
	require.Contains(t, ok(t, "unbind-ssds"), "/dev/nvme0n1 again")
	require.Equal(t, "nvme", r.Driver(addrA))
	require.Empty(t, records(t))
	d, err := r.m.Sys.Device(addrA)
	require.NoError(t, err)
	require.Empty(t, d.Override)
	require.Contains(t, ok(t, "unbind-ssds"), "no SSD is bound")
	fails(t, hc(t, "unbind-ssds", addrA), 2, "unbind-ssds", addrA, "not bound", "driver nvme")
}

// Bound controllers do everything that software SSDs do, with the same result.
func TestBoundControllersTrain(t *testing.T) {
	newRig(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "2000", "--avg-degree", "8", "--classes", "5",
		"--dim", "32", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "nvme0")
	ok(t, "load", "g")
	require.Contains(t, ok(t, "verify", "g"), "are good")
	listing := lines(t, ok(t, "ssds", "--json", "vfio0"))
	require.Equal(t, "g", listing[0]["dataset"])
	want := last(t, ok(t, trainArgs()...))["params_sha256"]
	require.Equal(t, want,
		last(t, ok(t, trainArgs("--fault", "error(op=read,sct=2,sc=0x81,times=3)", "--gpu-cache",
			"0", "--cpu-cache", "0")...))["params_sha256"], "faults strike and heal")

	for flag, word := range map[string]string{"--mode=cpu": "--mode helios",
		"--mode=mmap": "--mode helios", "--io-stack=cpu": "--io-stack async"} {
		fails(t, hc(t, trainArgs(flag)...), 3, "train", "vfio0", addrA, "through the kernel", word)
	}
	fails(t, hc(t, "bench", "io", "--io-stack", "async,mmap", "--seconds", "0.05", "--quiet"), 3,
		"bench io", "--io-stack mmap", "vfio0")
	ok(t, "bind-ssds", "nvme1")
	fails(t, hc(t, "bench", "io", "--seconds", "0.05", "--quiet"), 2, "bench io",
		"SSD vfio0 has LBAs of 512 bytes and vfio1 of 4096", "--ssds")
	ok(t, "bench", "io", "--seconds", "0.05", "--quiet", "--ssd-count", "1")
	ok(t, "unbind-ssds", "vfio1")
	b := lines(t, ok(t, "bench", "io", "--seconds", "0.05", "--json", "--quiet"))
	require.Nil(t, b[0]["written"], "only the controller knows")
	require.Contains(t, b[0], "written")
	require.Equal(t, true, b[0]["audited"])

	// The same on a software SSD.
	ok(t, "unbind-ssds")
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	ok(t, "load", "g")
	require.Equal(t, want, last(t, ok(t, trainArgs()...))["params_sha256"])
}

func TestBindRefusals(t *testing.T) {
	gpt := append(make([]byte, 512), "EFI PART"...)
	for _, c := range []struct {
		name  string
		setUp func(t *testing.T, r *rig)
		args  string
		code  int
		want  []string
	}{
		{"live use", func(t *testing.T, r *rig) { r.live(addrA, "is mounted at /data (ext4)") },
			"nvme0", 4, []string{addrA, "/dev/nvme0n1 is mounted at /data", "nothing was changed"}},
		{"live use is not for --force",
			func(t *testing.T, r *rig) { r.live(addrA, "is mounted at /data (ext4)") },
			"nvme0 --force " + serialA, 4, []string{"mounted at /data"}},
		{"live use is not for the partner",
			func(t *testing.T, r *rig) { r.live(addrB, "is in use as swap space") }, "nvme0 nvme1",
			4, []string{addrB, "swap", "nothing was changed"}},
		{"content", func(t *testing.T, r *rig) { r.Fill("nvme0n1", 0, string(gpt)) }, "nvme0", 4,
			[]string{addrA, "GPT", "--force " + serialA}},
		{"content, the other's serial",
			func(t *testing.T, r *rig) { r.Fill("nvme0n1", 0, string(gpt)) },
			"nvme0 nvme1 --force " + serialB, 4, []string{"GPT", "--force " + serialA}},
		{"a serial of nobody", nil, "nvme0 --force X", 2, []string{"--force X"}},
		{"could not look", func(t *testing.T, r *rig) {
			r.m.uses = func(string) ([]diskuse.Use, error) { return nil, errors.New("no /proc") }
		}, "nvme0", 4, []string{"could not be found out", "no /proc"}},
		{"no IOMMU", func(t *testing.T, r *rig) {
			r.Put("/proc/cpuinfo", "vendor_id : GenuineIntel\n")
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: -1})
		}, addrC, 3, []string{addrC, "intel_iommu=on", "VT-d"}},
		{"IOMMU off by argument", func(t *testing.T, r *rig) {
			r.Put("/proc/cmdline", "quiet intel_iommu=off\n")
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: -1})
		}, addrC, 3, []string{"intel_iommu=off", "take it out"}},
		{"no-IOMMU group", func(t *testing.T, r *rig) {
			r.Put("/sys/kernel/iommu_groups/1/name", "vfio-noiommu\n")
			r.Put("/proc/cpuinfo", "vendor_id : GenuineIntel\n")
		}, "nvme0", 3, []string{addrA, "without an IOMMU", "intel_iommu=on"}},
		{"AMD-Vi failed", func(t *testing.T, r *rig) {
			r.Put("/proc/cpuinfo", "vendor_id : AuthenticAMD\n")
			r.Put("/sys/firmware/acpi/tables/IVRS", "")
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: -1})
		}, addrC, 3, []string{"the firmware offers the IOMMU (AMD-Vi)", "dmesg"}},
		{"zones",
			func(t *testing.T,
				r *rig) {
				r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 3, Zoned: true})
			}, addrC + " --force C", 3, []string{"/dev/nvme2n1 has zones"}},
		{"large LBAs",
			func(t *testing.T,
				r *rig) {
				r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 3, LBABytes: 8192})
			}, addrC, 3, []string{"LBAs of 8192 bytes", "only 512 and 4096"}},
		{"large LBAs that the kernel hides", func(t *testing.T, r *rig) {
			r.Put("/sys/devices/pci0000:00/"+addrA+"/nvme/nvme0/nvme0n1/size", "0\n")
			r.m.identify = largeLBAs
		}, "nvme0", 3, []string{"LBAs of 8192 bytes are not supported, only 512 and 4096"}},
		{"metadata, by the controller's word", func(t *testing.T, r *rig) {
			r.m.identify = func(string, int) (id nvme.IdentifyNamespace, err error) {
				id.NSZE, id.LBAF[0], id.DPS = 100, nvme.LBAFormat{LBADS: 12, MetadataBytes: 8}, 1
				return id, nil
			}
		}, "nvme0 --force " + serialA, 3, []string{"/dev/nvme0n1",
			"8 bytes of metadata per block (protection information of type 1)", "nvme format"}},
		{"metadata, by the kernel's word", func(t *testing.T, r *rig) {
			r.Put("/sys/class/block/nvme0n1/metadata_bytes", "16\n")
		}, "nvme0", 3, []string{"/dev/nvme0n1 has 16 bytes of metadata"}},
		{"protection information", func(t *testing.T, r *rig) {
			r.Put("/sys/class/block/nvme0n1/integrity/format", "T10-DIF-TYPE1-CRC\n")
		}, "nvme0", 3, []string{"/dev/nvme0n1 has metadata (integrity format T10-DIF-TYPE1-CRC)"}},
		{"no namespace", func(t *testing.T, r *rig) {
			r.Remove("/sys/devices/pci0000:00/" + addrA + "/nvme/nvme0/nvme0n1")
		}, "nvme0", 3, []string{"/dev/nvme0 has no namespace", "nvme create-ns"}},
		{"AMD", func(t *testing.T, r *rig) {
			r.Put("/proc/cpuinfo", "vendor_id : AuthenticAMD\n")
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: -1})
		}, addrC, 3, []string{"AMD-Vi"}},
		{"not root", func(t *testing.T, r *rig) { r.m.Root = func() bool { return false } },
			"nvme0", 3, []string{"root", "sudo"}},
		{"no module", func(t *testing.T, r *rig) { r.Remove("/sys/bus/pci/drivers/vfio-pci") },
			"nvme0", 3, []string{"vfio-pci", "heliosctl vfio-setup setup"}},
		{"shared group", func(t *testing.T, r *rig) {
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 1})
			r.Add(fakesys.SSD{Addr: "0000:00:07.0", Class: 0x020000, Group: 1, Driver: "e1000e"})
		}, "nvme0", 4, []string{"IOMMU group 1", addrC, "/dev/nvme2", "0000:00:07.0", "e1000e"}},
		{"no such group of users", nil, "nvme0 --group no-such-group", 2,
			[]string{"no-such-group", "heliosctl vfio-setup setup"}},
		{"no NVMe", func(t *testing.T, r *rig) {
			r.Add(fakesys.SSD{Addr: addrC, Class: 0x020000, Group: 3, Driver: "e1000e"})
		}, addrC, 2, []string{addrC, "020000"}},
		{"a partition", func(t *testing.T, r *rig) { r.Partition("nvme0n1", 1, 1<<20) },
			"/dev/nvme0n1p1", 4, []string{"partition", "/dev/nvme0n1"}},
		{"a virtual machine's", func(t *testing.T, r *rig) {
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 3, Driver: "vfio-pci"})
			r.openErr = errs.New(errs.Refused, "somebody else drives group 3: %w", unix.EPERM)
		}, addrC, 4, []string{"somebody else drives group 3"}},
		{"another program's driver", func(t *testing.T, r *rig) {
			r.Mkdir("/sys/bus/pci/drivers/uio_pci_generic")
			r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 3, Driver: "uio_pci_generic"})
		}, addrC, 4, []string{addrC, "uio_pci_generic"}},
		{"nothing unused", func(t *testing.T, r *rig) {
			r.live(addrA, "is mounted at /data (ext4)")
			r.Fill("nvme1n1", 0, "XFSB")
		}, "--all-unused", 4, []string{addrA, "mounted", addrB, "XFS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			if c.setUp != nil {
				c.setUp(t, r)
			}
			n := len(r.Writes())
			fails(t, hc(t, append([]string{"bind-ssds", "--quiet"}, strings.Fields(c.args)...)...),
				c.code, "bind-ssds", c.want...)
			require.Len(t, r.Writes(), n, "no driver was touched")
			require.Empty(t, records(t))
		})
	}
}

// Of several namespaces the one with the lowest ID is used, and it is the one that is shown.
func TestMixedNamespaces(t *testing.T) {
	r := newRig(t)
	dir := "/sys/devices/pci0000:00/" + addrA + "/nvme/nvme0/"
	r.Put(dir+"nvme0n1/nsid", "2\n")
	r.Put(dir+"nvme0n2/nsid", "1\n")
	r.Put(dir+"nvme0n2/size", "2048\n")
	r.Put(dir+"nvme0n2/queue/logical_block_size", "4096\n")
	r.Link("/sys/class/block/nvme0n2", "../../"+strings.TrimPrefix(dir, "/sys/")+"nvme0n2")
	found := lines(t, ok(t, "ssds", "--json", addrA))
	require.Equal(t, float64(4096), found[0]["lba_bytes"])
	require.Equal(t, float64(1<<20), found[0]["bytes"])
	require.Equal(t, []any{"nvme0n1", "nvme0n2"}, found[0]["disks"])
}

// An SSD that has left the machine, or vfio-pci, is a matter of the device, not of what was typed.
func TestVanishedSSDs(t *testing.T) {
	r := newRig(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "4", "--classes", "2",
		"--dim", "8", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "nvme0")
	ok(t, "load", "g")
	require.NoError(t, r.m.Sys.Restore(addrA, "nvme"))
	fails(t, hc(t, "verify", "g"), 5, "verify", "vfio0", addrA, "vfio-pci has it no more", "driver nvme")
	r.Remove("/sys/bus/pci/devices/" + addrA)
	for _, args := range [][]string{{"verify", "g"}, {"load", "g"}, trainArgs()} {
		fails(t, hc(t, args...), 5, args[0], "vfio0", addrA, "not in the machine any more",
			"unbind-ssds vfio0")
	}
}

func largeLBAs(ctrl string, nsid int) (id nvme.IdentifyNamespace, err error) {
	if ctrl != "nvme0" || nsid != 1 {
		return id, fmt.Errorf("asked %s for %d", ctrl, nsid)
	}
	id.NSZE, id.LBAF[0].LBADS = 4096, 13
	return id, nil
}

// A namespace that the kernel shows as a disk of no bytes is listed with its own size and blocks.
func TestListLargeLBAs(t *testing.T) {
	r := newRig(t)
	r.Put("/sys/devices/pci0000:00/"+addrA+"/nvme/nvme0/nvme0n1/size", "0\n")
	r.m.identify = largeLBAs
	l := lines(t, ok(t, "ssds", "--json"))[0]
	require.Equal(t, float64(8192), l["lba_bytes"])
	require.Equal(t, float64(8192*4096), l["bytes"])
	require.Contains(t, l["content"], "unusable")
	require.Contains(t, l["content"], "LBAs of 8192 bytes are not supported")
}

// A zoned SSD is left out, and one whose driver does not show it is found out by its own words.
func TestCommandSetsAreRefused(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Zoned: true})
	x := hc(t, "bind-ssds", "--all-unused")
	require.Equal(t, 0, x.code, x.errOut)
	require.Contains(t, x.errOut, "left out: "+addrC)
	require.Contains(t, x.errOut, "has zones")
	require.Len(t, records(t), 2)
	ok(t, "unbind-ssds")
	r.set = nvme.CommandSetKeyValue
	fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 3, "bind-ssds", "key value command set",
		addrA+" is back with driver nvme")
	require.Empty(t, records(t))
}

// A controller without a driver goes back to none, whether its bind worked or not.
func TestNoFormerDriver(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Driver: "-"})
	for range 2 {
		ok(t, "bind-ssds", addrC)
		require.Equal(t, "none", records(t)[0].Driver)
		require.Contains(t, ok(t, "unbind-ssds", "vfio0"), "unbound, with no driver")
		require.Empty(t, r.Driver(addrC))
		require.Empty(t, records(t))
	}
	r.openErr = errs.New(errs.Device, "CSTS.RDY stays 0")
	fails(t, hc(t, "bind-ssds", addrC, "--quiet"), 5, "bind-ssds", "CSTS.RDY stays 0",
		addrC+" is back with no driver")
	require.Empty(t, records(t), "not half bound")
	require.Empty(t, r.Driver(addrC))
}

// An SSD that had no driver and that an administrator gave to nvme since is not taken from it.
func TestUnbindLeavesAMountedDisk(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Driver: "-"})
	ok(t, "bind-ssds", addrC)
	require.Equal(t, "none", records(t)[0].Driver)
	require.NoError(t, r.m.Sys.Restore(addrC, "nvme"))
	n := len(r.Writes())
	require.Contains(t, ok(t, "unbind-ssds", "vfio0"), "/dev/nvme2n1 again, driver nvme")
	require.Equal(t, "nvme", r.Driver(addrC))
	require.Empty(t, r.Writes()[n:], "the driver is left alone")
	require.Empty(t, records(t))
}

// The content of a disk that no driver has is looked at before anybody gets it.
func TestContentOfDriverlessDisk(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Driver: "-"})
	disk := append(make([]byte, 1024+0x38), "\x53\xef"...)
	require.NoError(t, proxy.Create(filepath.Join(r.serve, addrC), 64<<20))
	f, err := os.OpenFile(filepath.Join(r.serve, addrC), os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.Write(disk)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	shared := 0
	r.Fail = func(path, text string) error {
		if filepath.Base(path) == "unbind" { // on its way back: nobody had got it
			fi, err := os.Stat(r.m.Sys.Path("/dev/vfio/3"))
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), fi.Mode().Perm())
			shared++
		}
		return nil
	}
	group := "--group=" + strconv.Itoa(os.Getgid())
	for _, force := range []string{"", serialA} {
		fails(t, hc(t, "bind-ssds", addrC, "--quiet", group, "--force", force), 4, "bind-ssds",
			"an ext2/3/4 file system", "--force "+serialC, "is back with no driver")
		require.Empty(t, records(t))
	}
	require.Equal(t, 2, shared)
	r.Fail = nil
	ok(t, "bind-ssds", addrC, "--force", serialC)
	require.Equal(t, "no dataset, but an ext2/3/4 file system",
		lines(t, ok(t, "ssds", "vfio0", "--json"))[0]["content"])
	ok(t, "unbind-ssds")

	// Another program's, whose disk the kernel does not show either.
	r.Add(fakesys.SSD{Addr: "0000:00:08.0", Serial: "HYPER", Group: 4, Driver: vfioDriver})
	require.NoError(t, os.Rename(filepath.Join(r.serve, addrC),
		filepath.Join(r.serve, "0000:00:08.0")))
	fails(t, hc(t, "bind-ssds", "0000:00:08.0", "--quiet"), 4, "bind-ssds",
		"an ext2/3/4 file system")
	require.Equal(t, vfioDriver, r.Driver("0000:00:08.0"), "nothing was done to it")
	require.Empty(t, records(t))
}

// A udev rule that gives the nodes away as soon as they appear gives nobody an SSD that is not
// proved yet.
func TestNodesAreRootsUntilProved(t *testing.T) {
	r := newRig(t)
	r.DeviceNodes = true
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Driver: "-"})
	nodes := []string{"/dev/vfio/3", "/dev/vfio/devices/vfio2"}
	bind, domainOf := r.m.bind, r.m.Domain
	r.m.bind = func(addr, driver string) error {
		err := bind(addr, driver)
		for _, n := range nodes {
			require.NoError(t, os.Chmod(r.m.Sys.Path(n), 0o660))
		}
		return err
	}
	modes := func(want os.FileMode) {
		t.Helper()
		for _, n := range nodes {
			fi, err := os.Stat(r.m.Sys.Path(n))
			require.NoError(t, err)
			require.Equal(t, want, fi.Mode().Perm(), n)
		}
	}
	opened := 0
	r.m.Domain = func() (bound.Domain, error) {
		_, err := domainOf()
		return interruptingDomain{r, func() { opened++; modes(0o600) }}, err
	}
	ok(t, "bind-ssds", addrC, "--group", strconv.Itoa(os.Getgid()))
	require.Equal(t, 1, opened)
	modes(0o660)

	// One that another program had at vfio-pci stays as that program has it.
	r.Add(fakesys.SSD{Addr: "0000:00:08.0", Serial: serialA, Group: 4, Driver: vfioDriver})
	nodes = []string{"/dev/vfio/4"}
	require.NoError(t, os.Chmod(r.m.Sys.Path(nodes[0]), 0o640))
	r.m.Domain = func() (bound.Domain, error) {
		_, err := domainOf()
		return interruptingDomain{r, func() { opened++; modes(0o640) }}, err
	}
	ok(t, "bind-ssds", "0000:00:08.0", "--group", strconv.Itoa(os.Getgid()))
	require.Equal(t, 2, opened)
}

// An SSD without a serial number is not given up by an empty line.
func TestBlankSerial(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: "", Group: 3})
	r.serial = " "
	typed := func(text string) outcome {
		r.Fill("nvme2n1", 0, "XFSB")
		r.m.typed = func() io.Reader { return strings.NewReader(text) }
		return hc(t, "bind-ssds", addrC)
	}
	for _, text := range []string{"\n", "", "yes\n"} {
		x := typed(text)
		require.Equal(t, 4, x.code, x.errOut)
		require.Contains(t, x.errOut, "Type its PCI address")
		require.Contains(t, x.errOut, "is not its PCI address")
		require.Equal(t, "nvme", r.Driver(addrC))
	}
	require.Equal(t, 0, typed(addrC+"\n").code)
	ok(t, "unbind-ssds")
	r.m.typed = func() io.Reader { return nil }
	r.Fill("nvme2n1", 0, "XFSB")
	fails(t, hc(t, "bind-ssds", addrC, "--quiet"), 4, "bind-ssds", "XFS", "--force "+addrC)
	ok(t, "bind-ssds", addrC, "--force", addrC)
}

// The nodes of a group that holds anything but SSDs that we bound stay root's.
func TestGroupsThatAreNotGivenAway(t *testing.T) {
	for name, c := range map[string]struct {
		other fakesys.SSD
		words string
	}{
		"a GPU at vfio-pci": {fakesys.SSD{Addr: "0000:00:07.0", Class: 0x030000, Group: 1,
			Driver: vfioDriver}, "0000:00:07.0, which is no SSD (class 030000)"},
		"a network card of nobody": {fakesys.SSD{Addr: "0000:00:07.0", Class: 0x020000, Group: 1,
			Driver: "-"}, "0000:00:07.0, which is no SSD (class 020000)"},
		"a virtual machine's own SSD": {fakesys.SSD{Addr: "0000:00:07.0", Serial: "VM", Group: 1,
			Driver: vfioDriver}, "0000:00:07.0, which heliosctl did not bind"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.DeviceNodes = true
			r.Add(c.other)
			group := "--group=" + strconv.Itoa(os.Getgid())
			for range 2 { // and not when it is bound already
				x := hc(t, "bind-ssds", addrA, addrB, group)
				require.Equal(t, 0, x.code, x.errOut)
				require.Contains(t, x.errOut,
					"/dev/vfio/1 stays root's: its IOMMU group also holds "+c.words)
				for node, mode := range map[string]os.FileMode{"/dev/vfio/1": 0o600,
					"/dev/vfio/devices/vfio0": 0o600, "/dev/vfio/2": 0o660,
					"/dev/vfio/devices/vfio1": 0o660} {
					fi, err := os.Stat(r.m.Sys.Path(node))
					require.NoError(t, err)
					require.Equal(t, mode, fi.Mode().Perm(), node)
				}
			}
			ok(t, "unbind-ssds")
			require.NoFileExists(t, r.m.Sys.Path("/dev/vfio/devices/vfio1"))
		})
	}
}

// A record that another program's SSD has from before does not make it ours.
func TestStaleRecordsShareNothing(t *testing.T) {
	for name, c := range map[string]struct {
		phase  state.Phase
		driver string
		words  string
	}{
		"unbinding was cut off": {state.Unbinding, vfioDriver,
			addrC + ", whose unbinding was cut off (vfio1)"},
		"binding was cut off": {state.Binding, vfioDriver,
			addrC + ", whose binding was cut off (vfio1)"},
		"another driver": {state.Bound, "nvme_vfio_pci",
			addrC + ", which vfio-pci has no more (vfio1 is a stale record)"},
		"no driver": {state.Bound, "-",
			addrC + ", which vfio-pci has no more (vfio1 is a stale record)"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.Mkdir("/sys/bus/pci/drivers/nvme_vfio_pci")
			group := "--group=" + strconv.Itoa(os.Getgid())
			ok(t, "bind-ssds", addrA, group)
			r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 1, Driver: c.driver})
			one := 1
			require.NoError(t,
				state.OpenMachine("").Put(&state.Record{Phase: c.phase,
					SSD: state.SSD{Name: "vfio1", Kind: state.KindVFIO, PCI: addrC, Group: &one,
						Serial: serialC}}))
			require.NoError(t, os.Chmod(r.m.Sys.Path("/dev/vfio/1"), 0o600))
			x := hc(t, "bind-ssds", addrA, group)
			require.Equal(t, 0, x.code, x.errOut)
			require.Contains(t, x.errOut, "/dev/vfio/1 stays root's: its IOMMU group also holds "+
				c.words)
			fi, err := os.Stat(r.m.Sys.Path("/dev/vfio/1"))
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), fi.Mode().Perm())
			if c.phase == state.Bound { // it is told
				x := hc(t, "ssds", addrC)
				require.Equal(t, 5, x.code, x.errOut)
				require.Contains(t, x.out, "vfio-pci has it no more")
				require.Contains(t, x.out, "sudo heliosctl unbind-ssds vfio1")
			}
		})
	}
}

// A kernel that has iommufd alone offers no node of the group.
func TestDeviceNodesAlone(t *testing.T) {
	r := newRig(t)
	r.DeviceNodes = true
	was := r.m.bind
	r.m.bind = func(addr, driver string) error {
		err := was(addr, driver)
		r.Remove("/dev/vfio/1")
		return err
	}
	group := "--group=" + strconv.Itoa(os.Getgid())
	ok(t, "bind-ssds", addrA, group)
	node := r.m.Sys.Path("/dev/vfio/devices/vfio0")
	for range 2 {
		fi, err := os.Stat(node)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o660), fi.Mode().Perm())
		require.NoError(t, os.Chmod(node, 0o600))
		ok(t, "bind-ssds", addrA, group)
	}
}

// Kernels from 6.1 on list devices of VFIO without giving them nodes.
func TestDevicesWithoutNodes(t *testing.T) {
	r := newRig(t)
	r.DevicesOnly = true
	ok(t, "bind-ssds", addrA)
}

func TestPrivateGroup(t *testing.T) {
	const passwd = "root:x:0:0::/:/bin/sh\nann:x:1000:1000::/:/bin/sh\nbob:x:1001:100::/:/bin/sh\neve:x:1002:100::/:/bin/sh\ndan:x:1003:1003::/:/bin/sh\n"
	const groups = "root:x:0:\nusers:x:100:\nann:x:1000:\ndan:x:1003:eve\nown:x:1004:ann\n"
	for _, c := range []struct {
		uid, gid string
		want     int
		words    string
	}{
		{"1000", "1000", 1000, ""},
		{"1000", "1004", 1004, ""},
		{"1001", "100", -1, "group users of the user who called sudo is not his alone"},
		{"1003", "1003", -1, "group dan"},
		{"1000", "7777", -1, "group 7777"},
		{"", "1000", -1, "group ann"},
		{"0", "0", -1, "there is no group helios"},
		{"", "", -1, "there is no group helios"},
	} {
		gid, why := privateGroup(passwd, groups, c.uid, c.gid)
		require.Equal(t, c.want, gid, c)
		require.Contains(t, why, c.words)
	}
}

// live gives a controller a use that is there now.
func (r *rig) live(addr, text string) {
	was := r.m.uses
	r.m.uses = func(a string) ([]diskuse.Use, error) {
		us, err := was(a)
		if a == addr {
			us = append(us, diskuse.Use{Kind: diskuse.Mount, Device: r.Name(addr), Text: text,
				Live: true})
		}
		return us, err
	}
}

// Between the question and its answer the disk gets mounted: the answer does not take it.
func TestMountedWhileAsked(t *testing.T) {
	r := newRig(t)
	r.Fill("nvme0n1", 0, "XFSB")
	r.m.typed = func() io.Reader {
		r.live(addrA, "is mounted at /data")
		return strings.NewReader(serialA + "\n")
	}
	fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 4, "bind-ssds", "nothing was changed",
		"is mounted at /data")
	require.Equal(t, "nvme", r.Driver(addrA))
	require.Empty(t, records(t))
}

// A process that only lists SSDs opens nothing exclusively.
func TestListingIsInNobodysWay(t *testing.T) {
	r := newRig(t)
	r.m.uses = func(string) ([]diskuse.Use,
		error) {
		t.Error("looked with O_EXCL")
		return nil, nil
	}
	ok(t, "ssds")
	ok(t, "doctor")
}

func TestBindForceAndTypedSerial(t *testing.T) {
	r := newRig(t)
	r.Fill("nvme0n1", 0, "XFSB")
	ok(t, "bind-ssds", "nvme0", "--force", serialA)
	ok(t, "unbind-ssds")

	r.Fill("nvme0n1", 0, "XFSB") // the fake kernel's disks forget
	r.m.typed = func() io.Reader { return strings.NewReader("yes\n") }
	x := hc(t, "bind-ssds", "nvme0")
	require.Equal(t, 4, x.code, x.errOut)
	require.Contains(t, x.errOut, "Type its serial number")
	require.Contains(t, x.errOut, `"yes" is not its serial number`)
	require.Equal(t, "nvme", r.Driver(addrA))
	r.m.typed = func() io.Reader { return strings.NewReader(serialA + "\n") }
	require.Equal(t, 0, hc(t, "bind-ssds", "nvme0").code)
	require.Equal(t, vfioDriver, r.Driver(addrA))
}

func TestBindDryRun(t *testing.T) {
	r := newRig(t)
	r.m.Root = func() bool { return false }
	out := ok(t, "bind-ssds", "--all-unused", "--dry-run", "--quiet")
	for _, w := range []string{addrA, addrB, serialA, "64 MiB", "nobody", "needs root",
		"nothing was changed"} {
		require.Contains(t, out, w)
	}
	require.Empty(t, r.Writes())
	require.NoDirExists(t, os.Getenv(state.EnvRun))
	r.live(addrA, "is mounted at /data (ext4)")
	fails(t, hc(t, "bind-ssds", "nvme0", "--dry-run", "--quiet"), 4, "bind-ssds",
		"mounted at /data")
}

func TestBindAllUnusedLeavesOutTheOthers(t *testing.T) {
	r := newRig(t)
	r.live(addrA, "is mounted at /data (ext4)")
	r.Add(fakesys.SSD{Addr: addrC, Serial: "C", Group: 1}) // free, but in A's group
	x := hc(t, "bind-ssds", "--all-unused")
	require.Equal(t, 0, x.code, x.errOut)
	require.Contains(t, x.errOut, "left out: "+addrA)
	require.Contains(t, x.errOut, "left out: "+addrC)
	require.Contains(t, x.errOut, "IOMMU group 1 also holds "+addrA)
	require.Equal(t, vfioDriver, r.Driver(addrB))
	require.Equal(t, "nvme", r.Driver(addrC))
}

// A group that is shared works when all of it is given, and is kept whole.
func TestSharedGroupAsAWhole(t *testing.T) {
	r := newRig(t)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 1})
	// bridges are no matter
	r.Add(fakesys.SSD{Addr: "0000:00:07.0", Class: 0x060400, Group: 1, Driver: "pcieport"})
	ok(t, "bind-ssds", addrA, addrC)
	require.Len(t, records(t), 2)
	fails(t, hc(t, "unbind-ssds", "vfio0"), 4, "unbind-ssds",
		"vfio0 shares IOMMU group 1 with vfio1", "unbind-ssds vfio0 vfio1")
	ok(t, "unbind-ssds", "vfio0", "vfio1")

	// One that fails takes the other back with it, which would be no use alone.
	r.failOpen = addrC
	fails(t, hc(t, "bind-ssds", addrA, addrC, addrB, "--quiet"), 5, "bind-ssds", "1 of 3",
		addrA+" is back with driver nvme", addrC+" is back with driver nvme")
	require.Equal(t, addrB, records(t)[0].PCI)
}

func TestBindThatFailsGivesBack(t *testing.T) {
	t.Run("one of two", func(t *testing.T) {
		r := newRig(t)
		r.Fail = func(path, text string) error {
			if path == "/sys/bus/pci/drivers/vfio-pci/bind" && text == addrB {
				return unix.EINVAL
			}
			return nil
		}
		x := hc(t, "bind-ssds", "nvme0", "nvme1", "--quiet")
		fails(t, x, 5, "bind-ssds", "1 of 2 SSDs are bound", addrB, "nvme")
		require.Equal(t, vfioDriver, r.Driver(addrA))
		require.Equal(t, "nvme", r.Driver(addrB))
		require.Len(t, records(t), 1)
		require.Contains(t, x.out, "vfio0")
	})
	t.Run("the controller does not come up", func(t *testing.T) {
		r := newRig(t)
		r.openErr = errs.New(errs.Device, "CSTS.RDY stays 0")
		fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 5, "bind-ssds", "CSTS.RDY stays 0",
			addrA+" is back with driver nvme")
		require.Equal(t, "nvme", r.Driver(addrA))
		require.Empty(t, records(t))
	})
	t.Run("another controller answers", func(t *testing.T) {
		r := newRig(t)
		r.serial = "OTHER"
		fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 5, "bind-ssds", serialA, "OTHER",
			"back with driver nvme")
		require.Empty(t, records(t))
	})
	t.Run("and giving back fails", func(t *testing.T) {
		r := newRig(t)
		r.openErr = errs.New(errs.Device, "CSTS.RDY stays 0")
		r.Fail = func(path, text string) error {
			if path == "/sys/bus/pci/drivers/nvme/bind" {
				return unix.EIO
			}
			return nil
		}
		fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 5, "bind-ssds", "CSTS.RDY stays 0",
			"giving", "half bound as vfio0", "unbind-ssds "+addrA)
		require.Equal(t, state.Binding, records(t)[0].Phase)
		r.Fail = nil
		require.Contains(t, ok(t, "unbind-ssds", addrA), "/dev/nvme0n1 again")
		require.Empty(t, records(t))
	})
	t.Run("no VFIO in this kernel", func(t *testing.T) {
		r := newRig(t)
		r.m.Domain = func() (bound.Domain, error) { return nil, errs.New(errs.Capability, "no type1v2") }
		fails(t, hc(t, "bind-ssds", "nvme0", "--quiet"), 3, "bind-ssds", "no type1v2")
		require.Empty(t, r.Writes(), "known before any driver was touched")
	})
}

// killed is thrown by a test's kernel to end a verb as SIGKILL does: nothing after it runs but
// defers, which find no error and do nothing.
type killed struct{}

// kill runs heliosctl and lets it die when the machine says so.
func kill(t *testing.T, args ...string) {
	t.Helper()
	defer func() {
		if p := recover(); p != nil && p != (any)(killed{}) {
			panic(p)
		}
	}()
	var out, errOut bytes.Buffer
	run(t.Context(), args, &out, &errOut)
	t.Fatalf("it lived: %s %s", out.String(), errOut.String())
}

// Wherever a kill strikes, the state is told and both ways out work.
func TestKilledBinds(t *testing.T) {
	die := func(string, string) error { panic(killed{}) }
	override := func(r *rig, addr string) {
		require.NoError(t, r.m.Sys.Write("/sys/bus/pci/devices/"+addr+"/driver_override",
			vfioDriver+"\n"))
	}
	unbind := func(r *rig, addr string) {
		require.NoError(t, r.m.Sys.Write("/sys/bus/pci/drivers/nvme/unbind", addr))
	}
	for name, fail := range map[string]func(r *rig){
		"before the first step": func(r *rig) { r.m.bind = die },
		"override set": func(r *rig) {
			r.m.bind = func(a, d string) error { override(r, a); return die(a, d) }
		},
		"no driver": func(r *rig) {
			r.m.bind = func(a, d string) error { override(r, a); unbind(r, a); return die(a, d) }
		},
		"bound": func(r *rig) {
			was := r.m.bind
			r.m.bind = func(a, d string) error { require.NoError(t, was(a, d)); return die(a, d) }
		},
		"while it is proved": func(r *rig) {
			was := r.m.Domain
			r.m.Domain = func() (bound.Domain, error) {
				_, err := was()
				return dyingDomain{r}, err
			}
		},
	} {
		for _, way := range []string{"bind-ssds", "unbind-ssds"} {
			t.Run(name+", then "+way, func(t *testing.T) {
				if wide.Lean() && name != "no driver" && name != "while it is proved" {
					t.Skip("an early and a late moment are enough")
				}
				r := newRig(t)
				healthy := *r.m
				fail(r)
				kill(t, "bind-ssds", "nvme0", "--quiet")
				*r.m = healthy
				rs := records(t)
				require.Len(t, rs, 1)
				require.Equal(t, state.Binding, rs[0].Phase)
				require.Equal(t, "nvme", rs[0].Driver, "recorded before anything was touched")

				listing := ok(t, "ssds")
				require.Contains(t, listing, "binding was cut off")
				require.Contains(t, listing, "sudo heliosctl bind-ssds "+addrA)
				l := lines(t, ok(t, "ssds", "--json", addrA))
				require.Equal(t, "binding", l[0]["phase"])
				require.Contains(t, ok(t, "doctor"), "half bound as vfio0")
				ok(t, "generate", "--nodes", "100", "--out", "g", "--quiet")
				fails(t, hc(t, "load", "g", "--ssds", "vfio0"), 2, "load", "vfio0", "half bound",
					"sudo heliosctl unbind-ssds "+addrA)

				out := ok(t, way, addrA)
				if way == "bind-ssds" {
					require.Contains(t, out, "finish: binding was cut off")
					rs = records(t)
					require.Equal(t, state.Bound, rs[0].Phase)
					require.Equal(t, "nvme", rs[0].Driver)
					require.Equal(t, []string{"nvme0n1"}, rs[0].Disks)
					out = ok(t, "unbind-ssds", "vfio0")
				}
				require.Contains(t, out, "/dev/nvme0n1 again, driver nvme")
				require.Empty(t, records(t))
				d, err := r.m.Sys.Device(addrA)
				require.NoError(t, err)
				require.Equal(t, "nvme", d.Driver)
				require.Empty(t, d.Override)
			})
		}
	}
}

type dyingDomain struct{ *rig }

func (d dyingDomain) Open(string) (nvme.Bus, error) { panic(killed{}) }

func TestKilledUnbinds(t *testing.T) {
	for name, fail := range map[string]func(r *rig){
		"before the first step": func(
			r *rig) {
			r.m.restore = func(string, string) error { panic(killed{}) }
		},
		"no driver": func(r *rig) {
			r.m.restore = func(a, d string) error {
				_ = r.m.Sys.Write("/sys/bus/pci/devices/"+a+"/driver_override", "\n")
				_ = r.m.Sys.Write("/sys/bus/pci/drivers/vfio-pci/unbind", a)
				panic(killed{})
			}
		},
		"back already": func(r *rig) {
			was := r.m.restore
			r.m.restore = func(a, d string) error { _ = was(a, d); panic(killed{}) }
		},
	} {
		for _, way := range []string{"bind-ssds", "unbind-ssds"} {
			t.Run(name+", then "+way, func(t *testing.T) {
				if wide.Lean() && name != "no driver" {
					t.Skip("a moment is enough")
				}
				r := newRig(t)
				healthy := *r.m
				ok(t, "bind-ssds", "nvme0")
				fail(r)
				kill(t, "unbind-ssds", "--quiet")
				*r.m = healthy
				require.Equal(t, state.Unbinding, records(t)[0].Phase)
				require.Contains(t, ok(t, "ssds"), "unbinding was cut off")
				ok(t, way, addrA)
				if way == "bind-ssds" {
					require.Equal(t, state.Bound, records(t)[0].Phase)
					require.Equal(t, vfioDriver, r.Driver(addrA))
					ok(t, "unbind-ssds")
				}
				require.Equal(t, "nvme", r.Driver(addrA))
				require.Empty(t, records(t))
			})
		}
	}
}

// Ctrl-C between and within SSDs: what is in work is given back, the rest told.
func TestInterruptedBind(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	opened := 0
	was := r.m.Domain
	r.m.Domain = func() (bound.Domain, error) {
		_, err := was()
		return interruptingDomain{r, func() {
			if opened++; opened == 2 {
				cancel(errSignal)
			}
		}}, err
	}
	var out, errOut bytes.Buffer
	code := run(ctx, []string{"bind-ssds", "nvme0", "nvme1", "--quiet"}, &out, &errOut)
	fails(t, outcome{code, out.String(), errOut.String()}, 130, "bind-ssds", "interrupted",
		addrB+" is back with driver nvme", "1 SSDs are bound, 1 are not",
		"run the same command again")
	require.Equal(t, vfioDriver, r.Driver(addrA))
	require.Equal(t, "nvme", r.Driver(addrB))
	require.Len(t, records(t), 1)
	r.m.Domain = was
	ok(t, "bind-ssds", "nvme0", "nvme1")
	require.Len(t, records(t), 2)

	// And back: the first is given back whole, the second not begun.
	ctx, cancel = context.WithCancelCause(t.Context())
	restore := r.m.restore
	r.m.restore = func(a, d string) error { cancel(errSignal); return restore(a, d) }
	out.Reset()
	errOut.Reset()
	code = run(ctx, []string{"unbind-ssds", "--quiet"}, &out, &errOut)
	fails(t, outcome{code, out.String(), errOut.String()}, 130, "unbind-ssds", "interrupted",
		"1 SSDs were given back, 1 were not", "run the same command again")
	require.Equal(t, "nvme", r.Driver(addrA))
	require.Equal(t, vfioDriver, r.Driver(addrB))
	require.Equal(t, state.Bound, records(t)[0].Phase)
}

// Ctrl-C when an SSD has just been bound: between two of them the rest is told, after the last
// nothing is left to stop.
func TestInterruptedBetweenBinds(t *testing.T) {
	for turn, want := range []int{130, 0} {
		r := newRig(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		closed := 0
		was := r.m.Domain
		r.m.Domain = func() (bound.Domain, error) {
			_, err := was()
			return closingDomain{r, func() {
				if closed == turn {
					cancel(errSignal)
				}
				closed++
			}}, err
		}
		var out, errOut bytes.Buffer
		code := run(ctx, []string{"bind-ssds", "nvme0", "nvme1", "--quiet"}, &out, &errOut)
		require.Equal(t, want, code, errOut.String())
		require.NotContains(t, errOut.String(), "nil")
		require.Len(t, records(t), turn+1)
		require.Equal(t, vfioDriver, r.Driver(addrA))
		if turn == 0 {
			require.Contains(t, errOut.String(),
				"1 SSDs are bound, 1 are not; run the same command again")
			require.Equal(t, "nvme", r.Driver(addrB))
		}
	}
}

type closingDomain struct {
	*rig
	closed func()
}

func (d closingDomain) Open(addr string) (nvme.Bus, error) {
	b, err := d.rig.Open(addr)
	if err != nil {
		return nil, err
	}
	return closingBus{b, b.(nvme.Kicker), b.(nvme.Waiter), d.closed}, nil
}

type closingBus struct {
	nvme.Bus
	nvme.Kicker
	nvme.Waiter
	closed func()
}

func (b closingBus) Close() error {
	err := b.Bus.Close()
	b.closed()
	return err
}

type interruptingDomain struct {
	*rig
	opened func()
}

func (d interruptingDomain) Open(addr string) (nvme.Bus, error) {
	d.opened()
	return d.rig.Open(addr)
}

func TestUnbindRefusals(t *testing.T) {
	r := newRig(t)
	ok(t, "bind-ssds", "--all-unused")
	s, err := state.Open("")
	require.NoError(t, err)
	l, err := s.Acquire("heliosctl train", "vfio1")
	require.NoError(t, err)
	fails(t, hc(t, "unbind-ssds", "--quiet"), 4, "unbind-ssds", "vfio1",
		"in use by heliosctl train")
	require.Equal(t, vfioDriver, r.Driver(addrA), "all or none")
	require.Contains(t, ok(t, "ssds"), "in use by another heliosctl")
	l.Release()

	// A process that lists SSDs is waited for.
	l, err = s.Acquire("heliosctl ssds", "vfio1")
	require.NoError(t, err)
	time.AfterFunc(200*time.Millisecond, l.Release)
	ok(t, "bench", "io", "--ssds", "vfio1", "--seconds", "0.05", "--quiet")

	// Another program has the group open.
	r.Process(500, "qemu")
	r.Link("/proc/500/fd/7", r.m.Sys.Path("/dev/vfio/1"))
	r.Link("/proc/500/fd/8", "/dev/vfio/1")
	fails(t, hc(t, "unbind-ssds", "vfio0"), 4, "unbind-ssds", "vfio0", "qemu", "500")
	r.Remove("/proc/500")

	// Names of nothing that is bound.
	fails(t, hc(t, "unbind-ssds", "vfio9"), 2, "unbind-ssds",
		`no SSD "vfio9" is bound; there are vfio0, vfio1`)
	fails(t, hc(t, "unbind-ssds", "vfio0", "/dev/nvme7n1"), 2, "unbind-ssds", "/dev/nvme7n1",
		"there are vfio0, vfio1")
	fails(t, hc(t, "unbind-ssds", "/dev/vfio/1"), 2, "unbind-ssds", "no NVMe device")
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3})
	fails(t, hc(t, "unbind-ssds", serialC), 2, "unbind-ssds",
		addrC+" is not bound: it has driver nvme")
	require.Len(t, records(t), 2)

	r.m.Root = func() bool { return false }
	fails(t, hc(t, "unbind-ssds", "vfio0"), 3, "unbind-ssds", "vfio0", "sudo")
	x := hc(t, "unbind-ssds")
	require.Equal(t, 0, x.code)
	require.Contains(t, x.errOut, "vfio0, vfio1")
	require.Contains(t, x.errOut, "sudo heliosctl unbind-ssds")
	require.Len(t, records(t), 2)
}

// Changes that others made to bound controllers are reported, and unbind-ssds clears them up.
func TestOddStates(t *testing.T) {
	t.Run("the kernel's driver again", func(t *testing.T) {
		r := newRig(t)
		ok(t, "bind-ssds", "nvme0")
		require.NoError(t, r.m.Sys.Restore(addrA, "nvme"))
		x := hc(t, "ssds")
		require.Equal(t, 5, x.code)
		require.Contains(t, x.out, "vfio-pci has it no more, but driver nvme")
		require.Contains(t, x.out, "sudo heliosctl bind-ssds "+addrA)
		require.Contains(t, ok(t, "bind-ssds", addrA), "bind again: it left vfio-pci")
		require.Equal(t, vfioDriver, r.Driver(addrA))
		require.Len(t, records(t), 1)
		require.Equal(t, "good", lines(t, ok(t, "ssds", "--json", "vfio0"))[0]["health"])
	})
	t.Run("unplugged", func(t *testing.T) {
		r := newRig(t)
		ok(t, "bind-ssds", "nvme0")
		r.Remove("/sys/bus/pci/devices/" + addrA)
		x := hc(t, "ssds", "vfio0")
		require.Equal(t, 5, x.code)
		require.Contains(t, x.out, "not in the machine any more")
		require.Contains(t, ok(t, "unbind-ssds", "vfio0"), "not in the machine any more")
		require.Empty(t, records(t))
	})
	t.Run("no record", func(t *testing.T) {
		r := newRig(t)
		require.NoError(t, r.m.Sys.Bind(addrA, vfioDriver))
		l := lines(t, ok(t, "ssds", "--json"))
		require.Equal(t, "other", l[0]["kind"])
		require.Equal(t, []any{strayText}, l[0]["held_by"])
		require.NotContains(t, l[0], "bound", "nobody knows when")
		for _, verb := range []string{"ssds", "doctor"} {
			out := ok(t, verb)
			require.Contains(t, out, "our record of it was lost")
			require.Contains(t, out, "sudo heliosctl unbind-ssds "+addrA)
		}
		out := ok(t, "unbind-ssds", addrA)
		require.Contains(t, out, "/dev/nvme0n1 again")
		require.Contains(t, out, "no record")
		// And taken over.
		require.NoError(t, r.m.Sys.Bind(addrA, vfioDriver))
		require.Contains(t, ok(t, "bind-ssds", addrA), "take over")
		require.Equal(t, serialA, records(t)[0].Serial)
		require.Contains(t, ok(t, "unbind-ssds"), "/dev/nvme0n1 again")
	})
	t.Run("another SSD in its slot", func(t *testing.T) {
		r := newRig(t)
		ok(t, "bind-ssds", "nvme0")
		r.serial = "OTHER"
		fails(t, hc(t, "bench", "io", "--seconds", "0.05", "--quiet"), 5, "bench io", "vfio0",
			"OTHER", serialA, "bind it anew")
	})
	t.Run("no namespace", func(t *testing.T) {
		r := newRig(t)
		r.Remove("/sys/devices/pci0000:00/" + addrA + "/nvme/nvme0/nvme0n1")
		require.Contains(t, ok(t, "ssds"), "no namespace")
	})
}

// The software SSDs of a user and the controllers of the machine stand side by side.
func TestBothKinds(t *testing.T) {
	newRig(t)
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
	ok(t, "bind-ssds", "nvme0")
	l := lines(t, ok(t, "ssds", "--json"))
	require.Len(t, l, 3)
	for i, want := range []string{"ssd0 proxy", "vfio0 vfio", "nvme1 kernel"} {
		require.Equal(t, want, fmt.Sprint(l[i]["name"], " ", l[i]["kind"]))
	}
	ok(t, "bind-ssds", "--proxy", "b.img", "--size", "4MiB")
	require.Len(t, lines(t, ok(t, "ssds", "--json")), 4)
	ok(t, "unbind-ssds", "ssd0", "vfio0")
	require.Empty(t, records(t))
	require.Len(t, lines(t, ok(t, "ssds", "--json")), 3)
}
