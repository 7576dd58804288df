package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/bound"
	"helios/internal/pci"
	"helios/internal/testing/fakesys"
)

// playedNQN is the subsystem of a controller that the rig plays at vfio-pci.
func playedNQN(serial string) string {
	return "nqn.2014-08.org.nvmexpress:helios:proxy:" + serial
}

// A controller without a driver says only after the bind that the kernel has its namespace.
func TestBindRefusesASharedNamespace(t *testing.T) {
	for name, args := range map[string][]string{"plain": {addrC},
		"forced": {addrC, "--force", serialC}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.Add(fakesys.SSD{Addr: "0000:00:08.0", Serial: serialC, Group: 4,
				NQN: playedNQN(serialC)})
			r.Add(fakesys.SSD{Addr: addrC, Serial: serialC, Group: 3, Driver: "-"})
			fails(t, hc(t, append([]string{"bind-ssds", "--quiet"}, args...)...), 4, "bind-ssds",
				addrC, "the kernel reaches through nvme2", "/dev/nvme2n1", "no force")
			require.Empty(t, r.Driver(addrC), "given back")
			require.Empty(t, records(t))
		})
	}
}

// The kernel shows one namespace as two disks, as without native multipath: neither can be taken.
func TestBindRefusesTheKernelsOtherPath(t *testing.T) {
	r := newRig(t)
	r.Put("/sys/class/block/nvme0n1/uuid", "5b9d2c1e-0000-4000-8000-0123456789ab\n")
	r.Put("/sys/class/block/nvme1n1/wwid", "uuid.5b9d2c1e-0000-4000-8000-0123456789ab\n")
	n := len(r.Writes())
	for _, args := range [][]string{{"nvme0"}, {"nvme1", "--force", serialB}, {"nvme0", "nvme1"},
		{"--all-unused"}} {
		fails(t, hc(t, append([]string{"bind-ssds", "--quiet"}, args...)...), 4, "bind-ssds",
			"the kernel reaches through nvme", "as well")
	}
	require.Len(t, r.Writes(), n, "no driver was touched")
	require.Contains(t, ok(t, "doctor"), "the kernel reaches through nvme1 as well")
}

// Two controllers without a driver reach one namespace: the first is bound, the second never.
func TestBindRefusesASecondPath(t *testing.T) {
	r := newRig(t)
	r.serial = "ONE"
	const second = "0000:00:08.0"
	r.Add(fakesys.SSD{Addr: addrC, Group: 3, Driver: "-"})
	r.Add(fakesys.SSD{Addr: second, Group: 3, Driver: "-"}) // of the same IOMMU group
	fails(t, hc(t, "bind-ssds", "--quiet", addrC, second), 4, "bind-ssds", addrC, second, "reaches")
	require.Empty(t, records(t), "a group is bound whole or not at all")
	const third = "0000:00:09.0"
	r.Add(fakesys.SSD{Addr: third, Group: 5, Driver: "-"})
	ok(t, "bind-ssds", "--quiet", third)
	fails(t, hc(t, "bind-ssds", "--quiet", "--force", "ONE", addrC, second), 4, "bind-ssds",
		"the namespace that vfio0 ("+third+") reaches, which is bound")
	require.Len(t, records(t), 1)

	// The kernel's path to it is no free disk, either.
	r.Add(fakesys.SSD{Addr: "0000:00:0a.0", Serial: "ONE", Group: 6, NQN: playedNQN("ONE")})
	name := r.Name("0000:00:0a.0")
	fails(t, hc(t, "bind-ssds", "--quiet", name), 4, "bind-ssds", "vfio0 ("+third+") reaches")
	require.Contains(t, ok(t, "ssds", name), "vfio0 ("+third+") reaches")
}

// The other path came after the bind. Nothing is written, and nothing trains.
func TestLoadRefusesASharedNamespace(t *testing.T) {
	r := newRig(t)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "4", "--classes", "2",
		"--dim", "8", "--seed", "3", "--out", "g")
	ok(t, "bind-ssds", "nvme0")
	require.Equal(t, serialA, records(t)[0].Namespace.Serial)
	r.Add(fakesys.SSD{Addr: addrC, Serial: serialA, Group: 3, NQN: playedNQN(serialA)})
	before, err := os.ReadFile(filepath.Join(r.serve, addrA))
	require.NoError(t, err)
	for _, args := range [][]string{{"load", "g"}, {"load", "g", "--force", serialA}} {
		fails(t, hc(t, args...), 4, "load", "vfio0", "the kernel reaches through nvme2",
			"no force")
	}
	after, err := os.ReadFile(filepath.Join(r.serve, addrA))
	require.NoError(t, err)
	require.Equal(t, before, after)
	require.Contains(t, ok(t, "ssds", "--json", "vfio0"), "the kernel reaches through nvme2")
	ok(t, "unbind-ssds")
}

func TestBindVirtualFunctions(t *testing.T) {
	r := newRig(t)
	r.Virtual(addrA, addrB)
	r.live(addrA, "is mounted at /data (ext4)")
	fails(t, hc(t, "bind-ssds", "--quiet", "nvme0"), 4, "bind-ssds", "mounted at /data")
	r.m = machineOf(r.m.Sys) // with its own eyes
	r.m.Root, r.m.Domain = func() bool { return true },
		func() (bound.Domain, error) { r.domains++; return r, nil }
	fails(t, hc(t, "bind-ssds", "--quiet", addrA, "--force", serialA), 4, "bind-ssds",
		"virtual functions, which would vanish")
	r.Put("/proc/4711/mountinfo", "22 1 0:21 / / rw - tmpfs tmpfs rw\n77 22 "+r.Dev("nvme0n1")+
		" / /data rw - ext4 /dev/nvme0n1 rw\n")
	for _, args := range [][]string{{addrB}, {addrB, "--force", serialB}} {
		fails(t, hc(t, append([]string{"bind-ssds", "--quiet"}, args...)...), 4, "bind-ssds",
			addrB+" is a virtual function of "+addrA, "mounted at /data")
	}
	require.Equal(t, "nvme", r.Driver(addrB))
}

// One file under several names is one SSD.
func TestProxiesOfOneFile(t *testing.T) {
	isolate(t)
	ok(t, "bind-ssds", "--proxy", "a.img", "--size", "8MiB")
	require.NoError(t, os.Symlink("a.img", "link.img"))
	require.NoError(t, os.Link("a.img", "hard.img"))
	require.NoError(t, os.Mkdir("sub", 0o755))
	require.NoError(t, os.Symlink("../a.img", "sub/b.img"))
	for _, other := range []string{"a.img", "./sub/../a.img", "link.img", "hard.img", "sub/b.img"} {
		fails(t, hc(t, "bind-ssds", "--proxy", other), 2, "bind-ssds", other, "bound already as ssd0")
	}
	ok(t, "unbind-ssds")
	fails(t, hc(t, "bind-ssds", "--proxy", "hard.img,a.img"), 2, "bind-ssds",
		"names the same file twice")

	// Paths that became one file after the bind are refused before a write.
	ok(t, "bind-ssds", "--proxy", "a.img,c.img", "--size", "8MiB")
	require.NoError(t, os.Remove("c.img"))
	require.NoError(t, os.Link("a.img", "c.img"))
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "4", "--classes", "2",
		"--dim", "8", "--seed", "3", "--out", "g")
	out := hc(t, "load", "g")
	require.NotZero(t, out.code)

	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	ok(t, "unbind-ssds")
	dev, err := exec.Command("losetup", "--find", "--show", "hard.img").Output()
	if err != nil {
		t.Skip("no loop device: ", err)
	}
	loop := strings.TrimSpace(string(dev))
	before := thisMachine
	thisMachine = func() *machine { return machineOf(pci.Sys{}) } // this one has loop devices
	t.Cleanup(func() { thisMachine = before })
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "-d", loop).Run()) })
	ok(t, "bind-ssds", "--proxy", "a.img")
	fails(t, hc(t, "bind-ssds", "--proxy", loop), 2, "bind-ssds", loop, "bound already as ssd0")
	ok(t, "unbind-ssds")
	fails(t, hc(t, "bind-ssds", "--proxy", loop+",a.img"), 2, "bind-ssds", "twice")

	// A claim of the loop device, as of a mount, is one of the file.
	ok(t, "bind-ssds", "--proxy", "a.img")
	fd, err := unix.Open(loop, unix.O_RDONLY|unix.O_EXCL, 0)
	require.NoError(t, err)
	in := filepath.Base(loop) + " is held exclusively"
	fails(t, hc(t, "load", "g"), 4, "load", "ssd0", in, "no force")
	ok(t, "unbind-ssds")
	fails(t, hc(t, "bind-ssds", "--proxy", "a.img"), 4, "bind-ssds", "a.img", in, "no force")
	require.NoError(t, unix.Close(fd))
	ok(t, "bind-ssds", "--proxy", "a.img")
}

// A block device is one of two names of a namespace, as without native multipath.
func TestProxyOfTheKernelsOtherPath(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root")
	}
	r := newRig(t)
	const uuid = "5b9d2c1e-0000-4000-8000-0123456789ab\n"
	r.Put("/sys/class/block/nvme0n1/uuid", uuid)
	require.NoError(t, os.WriteFile("d.img", make([]byte, 8<<20), 0o600))
	dev, err := exec.Command("losetup", "--find", "--show", "d.img").Output()
	if err != nil {
		t.Skip("no loop device: ", err)
	}
	loop := strings.TrimSpace(string(dev))
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "-d", loop).Run()) })
	number, err := os.ReadFile("/sys/class/block/" + filepath.Base(loop) + "/dev")
	require.NoError(t, err)
	r.Link("/sys/dev/block/"+strings.TrimSpace(string(number)), "../../class/block/nvme0n1")
	ok(t, "bind-ssds", "--proxy", loop)
	ok(t, "generate", "--kind", "sbm", "--nodes", "200", "--avg-degree", "4", "--classes", "2",
		"--dim", "8", "--seed", "3", "--out", "g")
	r.Put("/sys/class/block/nvme1n1/uuid", uuid)
	fails(t, hc(t, "load", "g", "--ssds", "ssd0"), 4, "load", "ssd0",
		"its namespace is the namespace that the kernel reaches through nvme1", "no force")
	ok(t, "unbind-ssds")
	fails(t, hc(t, "bind-ssds", "--proxy", loop), 4, "bind-ssds", "--proxy "+loop,
		"the kernel reaches through nvme1", "no force")
}
