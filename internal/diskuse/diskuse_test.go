package diskuse

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/testing/fakesys"
)

const (
	addr = "0000:00:04.0"
	disk = "nvme0n1"
)

func machine(t *testing.T) *fakesys.Machine {
	m := fakesys.New(t.TempDir())
	m.Add(fakesys.SSD{Addr: addr, Serial: "SER0", Group: 7})
	m.Add(fakesys.SSD{Addr: "0000:00:05.0", Serial: "SER1", Group: 8})
	return m
}

// mount adds a line to the mountinfo of a process.
func mount1(m *fakesys.Machine, pid int, dev, root, at, fstype, source string) {
	p := fmt.Sprintf("/proc/%d/mountinfo", pid)
	b, err := os.ReadFile(m.Root + p)
	if err != nil {
		panic(err)
	}
	m.Put(p, string(b)+fmt.Sprintf("77 22 %s %s %s rw,relatime shared:3 master:1 - %s %s rw\n", dev,
		root, at, fstype, source))
}

// both mounts in the first process's namespace, which ours shares.
func both(m *fakesys.Machine, dev, at, fstype, source string) {
	mount1(m, 1, dev, "/", at, fstype, source)
	mount1(m, 4711, dev, "/", at, fstype, source)
}

func hold(m *fakesys.Machine, lower, holder string) {
	m.Link("/sys/class/block/"+lower+"/holders/"+holder, "../../../../../virtual/block/"+holder)
}

func dm(m *fakesys.Machine, lower, name, dmName, uuid string) {
	m.Block(name, 1<<20)
	m.Put("/sys/devices/virtual/block/"+name+"/dm/name", dmName+"\n")
	m.Put("/sys/devices/virtual/block/"+name+"/dm/uuid", uuid+"\n")
	hold(m, lower, name)
}

func open(m *fakesys.Machine, pid int, comm, node string) {
	m.Process(pid, comm)
	m.Link(fmt.Sprintf("/proc/%d/fd/5", pid), node)
	m.Link(fmt.Sprintf("/proc/%d/fd/6", pid), node)
	m.Link(fmt.Sprintf("/proc/%d/fd/7", pid), "socket:[123]")
}

func TestMain(m *testing.M) {
	lookAgain = time.Millisecond
	os.Exit(m.Run())
}

func free(string) error { return nil }
func busy(p string) error {
	return &fs.PathError{Op: "open", Path: p, Err: unix.EBUSY}
}

const (
	lvmUUID = "LVM-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	gpt     = "EFI PART"
)

// label is a ZFS label with an uberblock: enough of one to be known by.
func label(m *fakesys.Machine, dev, pool string) {
	pair := func(name string, kind uint32, value []byte) string {
		be := func(
			n int) string {
			return string([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
		}
		pad := func(s string) string { return s + strings.Repeat("\x00", -len(s)&3) }
		body := be(len(name)) + pad(name) + be(int(kind)) + be(1) + pad(string(value))
		return be(len(body)+8) + be(len(body)+24) + body
	}
	be32 := string([]byte{0, 0, 0, byte(len(pool))})
	m.Fill(dev, 16<<10, "\x01\x01\x00\x00"+"\x00\x00\x00\x00\x00\x00\x00\x01"+pair("version", 8,
		make([]byte, 8))+pair("name", 9, []byte(be32+pool)))
	m.Fill(dev, 128<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00")
}

func TestUses(t *testing.T) {
	for name, c := range map[string]struct {
		setup func(m *fakesys.Machine)
		excl  func(string) error
		want  []string // KIND LIVE DEVICE: TEXT, all of them
	}{
		"free": {func(m *fakesys.Machine) {}, free, nil},
		"the other disk": {func(m *fakesys.Machine) {
			both(m, m.Dev("nvme1n1"), "/data", "ext4", "/dev/nvme1n1")
			m.Put("/proc/swaps", "Filename\n/dev/nvme1n1 partition 8 0 -2\n")
			open(m, 88, "fio", "/dev/nvme1n1")
			open(m, 89, "fio", "/dev/nvme0n11")
		}, free, nil},
		"mounted": {func(m *fakesys.Machine) { both(m, m.Dev(disk), "/data", "ext4", "/dev/root") },
			busy,
			[]string{"mounted live nvme0n1: is mounted at /data (ext4)"}},
		"mounted, with white space": {
			func(m *fakesys.Machine) { both(m, m.Dev(disk), `/my\040data`, "xfs", "/dev/nvme0n1") },
			busy,
			[]string{"mounted live nvme0n1: is mounted at /my data (xfs)"}},
		"bind mounts": {func(m *fakesys.Machine) {
			mount1(m, 1, m.Dev(disk), "/sub", "/a", "ext4", "/dev/nvme0n1")
			for _, at := range []string{"/data", "/b", "/c", "/d"} {
				both(m, m.Dev(disk), at, "ext4", "/dev/nvme0n1")
			}
		}, busy, []string{"mounted live nvme0n1: is mounted at /data, /b, /c and 2 more (ext4)"}},
		"mounted in a container": {func(m *fakesys.Machine) {
			m.Process(900, "postgres")
			m.Process(901, "postgres")
			for _, pid := range []int{900, 901} {
				m.Link(fmt.Sprintf("/proc/%d/ns/mnt", pid), "mnt:[99]")
				mount1(m, pid, m.Dev(disk), "/", "/var/lib/pg", "ext4", "/dev/nvme0n1")
			}
		}, busy,
			[]string{
				"mounted live nvme0n1: is mounted at /var/lib/pg (ext4) in the mount namespace of process 900 (postgres)"}},
		"Btrfs, first disk": {
			func(m *fakesys.Machine) { both(m, "0:44", "/b", "btrfs", "/dev/nvme0n1") }, busy,
			[]string{"mounted live nvme0n1: is mounted at /b (btrfs)"}},
		"Btrfs, another disk": {func(m *fakesys.Machine) {
			both(m, "0:44", "/b", "btrfs", "/dev/nvme1n1")
			m.Link("/sys/fs/btrfs/abcd/devices/nvme0n1", "../../../../block/nvme0n1")
		}, busy, []string{"mounted live nvme0n1: is part of the mounted Btrfs file system abcd"}},
		"bcachefs": {
			func(
				m *fakesys.Machine) {
				both(m, "0:45", "/c", "bcachefs", "/dev/nvme1n1:/dev/nvme0n1")
			}, busy,
			[]string{"mounted live nvme0n1: is mounted at /c (bcachefs)"}},
		"swap": {func(m *fakesys.Machine) {
			m.Put("/proc/swaps",
				"Filename Type Size Used Priority\n/dev/nvme0n1                            partition\t65532\t0\t-2\n/data/swapfile file 8 0 -3\n")
		}, busy, []string{"swap live nvme0n1: is in use as swap space"}},
		"LVM": {func(m *fakesys.Machine) {
			dm(m, disk, "dm-3", "vg--fast-my--data", lvmUUID)
			both(m, m.Dev("dm-3"), "/data", "ext4", "/dev/mapper/vg--fast-my--data")
			m.Fill(disk, 512, "LABELONE")
		}, busy, []string{
			"lvm live nvme0n1: belongs to LVM volume vg-fast/my-data (dm-3)",
			"mounted live nvme0n1: carries LVM volume vg-fast/my-data (dm-3), which is mounted at /data (ext4)",
			"signature content nvme0n1: holds an LVM physical volume"}},
		"encrypted swap on a partition": {func(m *fakesys.Machine) {
			m.Partition(disk, 2, 1<<20)
			dm(m, disk+"p2", "dm-0", "cryptswap", "CRYPT-PLAIN-cryptswap")
			// and no udev
			m.Put("/proc/swaps", "Filename\n/dev/mapper/cryptswap partition 8 0 -2\n")
		}, busy, []string{
			"crypt live nvme0n1p2: belongs to encrypted volume cryptswap (dm-0)",
			"swap live nvme0n1p2: carries encrypted volume cryptswap (dm-0), which is in use as swap space",
			"partitioned content nvme0n1: has the partition nvme0n1p2 (1 MiB)"}},
		"multipath": {func(m *fakesys.Machine) { dm(m, disk, "dm-0", "mpatha", "mpath-3600") },
			busy,
			[]string{"multipath live nvme0n1: belongs to multipath device mpatha (dm-0)"}},
		"other device-mapper": {func(m *fakesys.Machine) { dm(m, disk, "dm-0", "lin", "") }, busy,
			[]string{"dm live nvme0n1: belongs to device-mapper device lin (dm-0)"}},
		"RAID below LVM below a mount": {func(m *fakesys.Machine) {
			m.Fill(disk, 4096, "\xfc\x4e\x2b\xa9")
			m.Block("md0", 1<<20)
			m.Put("/sys/devices/virtual/block/md0/md/level", "raid1\n")
			hold(m, disk, "md0")
			m.Partition("md0", 1, 1<<19)
			dm(m, "md0p1", "dm-1", "vg-lv", lvmUUID)
			both(m, m.Dev("dm-1"), "/srv", "xfs", "/dev/dm-1")
		}, busy, []string{
			"raid live nvme0n1: belongs to RAID array md0 (raid1)",
			"mounted live nvme0n1: carries LVM volume vg/lv (dm-1), which is mounted at /srv (xfs)",
			"signature content nvme0n1: holds a Linux RAID member"}},
		"inactive RAID": {func(m *fakesys.Machine) {
			m.Block("md127", 0)
			m.Put("/sys/devices/virtual/block/md127/md/array_state", "inactive\n")
			hold(m, disk, "md127")
		}, busy, []string{"raid live nvme0n1: belongs to RAID array md127 (inactive)"}},
		"bcache": {func(m *fakesys.Machine) { m.Block("bcache0", 1<<20); hold(m, disk, "bcache0") },
			busy,
			[]string{"held live nvme0n1: belongs to block device bcache0"}},
		"loop device": {func(m *fakesys.Machine) { // claims nothing
			m.Block("loop0", 1<<20)
			m.Put("/sys/devices/virtual/block/loop0/loop/backing_file", "/dev/nvme0n1\n")
			m.Block("loop1", 1<<20)
			m.Put("/sys/devices/virtual/block/loop1/loop/backing_file", "/srv/nvme0n1\n")
			both(m, m.Dev("loop0"), "/l", "ext4", "/dev/loop0")
		}, free, []string{
			"loop live nvme0n1: belongs to loop device loop0",
			"mounted live nvme0n1: carries loop device loop0, which is mounted at /l (ext4)"}},
		"NVMe target": {func(m *fakesys.Machine) {
			for i, on := range []string{"0", "1"} {
				ns := fmt.Sprintf("/sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/%d", i+1)
				m.Put(ns+"/device_path", "/dev/nvme0n1\n")
				m.Put(ns+"/enable", on+"\n")
			}
		}, free, []string{"target live nvme0n1: is exported over NVMe-oF as namespace 2 of nqn.x"}},
		"open": {func(m *fakesys.Machine) {
			open(m, 88, "fio", "/dev/nvme0n1")
			open(m, 4711, "heliosctl", "/dev/nvme0n1") // ourselves
			m.Link("/proc/self", "4711")
		}, free, []string{"open live nvme0n1: is open in fio (process 88)"}},
		"open, exclusively, by many": {func(m *fakesys.Machine) {
			m.Partition(disk, 1, 1<<20)
			for i := range 5 {
				open(m, 90+i, "qemu", "/dev/nvme0n1p1")
			}
		}, busy, []string{
			"open live nvme0n1p1: is open in qemu (process 90), qemu (process 91), qemu (process 92), 2 more",
			"partitioned content nvme0n1: has the partition nvme0n1p1 (1 MiB)"}},
		"held by nobody who says so": {func(m *fakesys.Machine) {}, busy,
			[]string{
				"busy live nvme0n1: is held exclusively by something in the kernel that does not say its name, such as a file system that was unmounted lazily"}},
		"ZFS, imported": {func(m *fakesys.Machine) { label(m, disk, "tank") }, busy,
			[]string{"zfs live nvme0n1: is a member of the imported ZFS pool tank"}},
		"ZFS on a partition, seen by its statistics": {func(m *fakesys.Machine) {
			label(m, m.Partition(disk, 1, 1<<20), "tank")
			m.Mkdir("/proc/spl/kstat/zfs/tank")
		}, free, []string{
			"zfs live nvme0n1p1: is a member of the imported ZFS pool tank",
			"partitioned content nvme0n1: has the partition nvme0n1p1 (1 MiB)"}},
		"ZFS, exported": {func(m *fakesys.Machine) { label(m, disk, "tank") }, free,
			[]string{"signature content nvme0n1: holds a ZFS pool (tank, not imported)"}},
		"ZFS, damaged label": {
			func(m *fakesys.Machine) { m.Fill(disk, 128<<10, "\x0c\xb1\xba\x00\x00\x00\x00\x00") },
			free,
			[]string{"signature content nvme0n1: holds a ZFS pool"}},
		"old ZFS mark below a mount": {func(m *fakesys.Machine) {
			label(m, disk, "tank")
			both(m, m.Dev(disk), "/data", "ext4", "/dev/nvme0n1")
		}, busy, []string{
			"mounted live nvme0n1: is mounted at /data (ext4)",
			"signature content nvme0n1: holds a ZFS pool (tank, not imported)"}},
		"boot disk": {func(m *fakesys.Machine) {
			m.Fill(disk, 512, gpt)
			m.Partition(disk, 1, 1<<20)
			m.Partition(disk, 2, 2<<20)
			m.Fill(disk+"p2", 0, "LUKS\xba\xbe")
			dm(m, disk+"p2", "dm-0", "root", "CRYPT-LUKS2-x-root")
			both(m, m.Dev(disk+"p1"), "/boot/efi", "vfat", "/dev/nvme0n1p1")
			both(m, m.Dev("dm-0"), "/", "ext4", "/dev/mapper/root")
		}, busy, []string{
			"crypt live nvme0n1p2: belongs to encrypted volume root (dm-0)",
			"mounted live nvme0n1p1: is mounted at /boot/efi (vfat)",
			"mounted live nvme0n1p2: carries encrypted volume root (dm-0), which is mounted at / (ext4)",
			"boot live nvme0n1p1: is a boot disk: the machine runs from it (/boot/efi)",
			"boot live nvme0n1p2: is a boot disk: the machine runs from it (/)",
			"signature content nvme0n1: holds a GPT partition table",
			"partitioned content nvme0n1: has 2 partitions: nvme0n1p1 (1 MiB), nvme0n1p2 (2 MiB, LUKS encryption)"}},
		"file systems on the disk and its partitions": {func(m *fakesys.Machine) {
			m.Fill(disk, 0, "XFSB")
			m.Fill(disk, 4096-10, "SWAPSPACE2")
		}, free, []string{"signature content nvme0n1: holds an XFS file system",
			"signature content nvme0n1: holds swap space"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := machine(t)
			c.setup(m)
			us, err := of(m.Sys(), "/dev/"+disk, c.excl)
			require.NoError(t, err)
			require.ElementsMatch(t, c.want, words(us))
			require.Equal(t,
				slices.ContainsFunc(c.want,
					func(s string) bool { return strings.Contains(s, " live ") }), slices.ContainsFunc(us, live))
		})
	}
}

func words(us []Use) []string {
	var out []string
	for _, u := range us {
		live := "content"
		if u.Live {
			live = "live"
		}
		out = append(out, fmt.Sprintf("%s %s %s: %s", u.Kind, live, u.Device, u.Text))
		if u.Device != "" && u.String() != "/dev/"+u.Device+" "+u.Text {
			panic(u.String())
		}
	}
	return out
}

// root= and resume= in every form that the kernel and initramfs take.
func TestBootArgument(t *testing.T) {
	m := machine(t)
	p1 := m.Partition(disk, 1, 1<<20)
	m.Put("/sys/devices/pci0000:00/"+addr+"/nvme/nvme0/"+disk+"/"+p1+"/uevent",
		"DEVTYPE=partition\nPARTUUID=2d1c1a3a-01\n")
	m.Fill(p1, 1024+0x38, "\x53\xef")
	m.Fill(p1, 1024+0x68, "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef")
	m.Link("/dev/disk/by-label/rootfs", "../../"+p1)
	dm(m, p1, "dm-0", "vg-root", lvmUUID)
	for arg, want := range map[string]bool{
		"root=/dev/nvme0n1p1": true, "root=/dev/nvme0n1p2": false, "root=/dev/nvme1n1p1": false,
		"resume=/dev/nvme0n1p1":     true,
		"root=PARTUUID=2D1C1A3A-01": true, "root=PARTUUID=2d1c1a3a-02": false,
		"root=UUID=01234567-89ab-cdef-0123-456789abcdef": true,
		"root=UUID=11234567-89ab-cdef-0123-456789abcdef": false,
		"root=LABEL=rootfs": true, "root=LABEL=other": false, "root=" + m.Dev(p1): true,
		"root=/dev/mapper/vg-root": true, "root=/dev/nfs": false, "root=": false, "rootwait": false,
	} {
		m.Put("/proc/cmdline", "BOOT_IMAGE=/vmlinuz "+arg+" ro quiet\n")
		us, err := ofOnce(m.Sys(), disk, free)
		require.NoError(t, err)
		i := slices.IndexFunc(us, func(u Use) bool { return u.Kind == Boot })
		require.Equal(t, want, i >= 0, "%s: %v", arg, us)
		if want {
			require.True(t, us[i].Live)
			require.Contains(t, us[i].Text, arg)
		}
	}
}

// Not to know is not the same as free.
func TestUnseen(t *testing.T) {
	m := machine(t)
	m.Remove("/dev/" + disk)
	both(m, m.Dev(disk), "/data", "ext4", "/dev/nvme0n1")
	us, err := of(m.Sys(), disk, openExclusive)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "what is on /dev/nvme0n1")
	require.ErrorContains(t, err, "whether /dev/nvme0n1 is held")
	require.Equal(t, []string{"mounted live nvme0n1: is mounted at /data (ext4)"}, words(us),
		"with what was found")

	m = machine(t)
	require.NoError(t, os.Truncate(filepath.Join(m.Root, "dev", disk), 4096)) // reads fail
	_, err = Of(m.Sys(), disk)
	require.ErrorContains(t, err, "reading the first 524288 bytes")

	_, err = Of(m.Sys(), "/dev/nvme7n1")
	require.ErrorContains(t, err, "/dev/nvme7n1")
	_, err = Of(m.Sys(), "nvme7n1")
	require.ErrorContains(t, err, "nvme7n1")

	if os.Getuid() == 0 {
		t.Log("as root, nothing is hidden")
		return
	}
	m = machine(t)
	m.Process(5, "secret")
	require.NoError(t, os.Chmod(filepath.Join(m.Root, "/proc/5/fd"), 0))
	_, err = Of(m.Sys(), disk)
	require.ErrorContains(t, err, "only root sees it")
}

// A file that is open for a moment only is no use.
func TestPassing(t *testing.T) {
	m := machine(t)
	open(m, 88, "udev-worker", "/dev/nvme0n1")
	n := 0
	us, err := of(m.Sys(), disk, func(p string) error {
		if n++; n == 2 {
			m.Remove("/proc/88")
		}
		return free(p)
	})
	require.NoError(t, err)
	require.Empty(t, us)
	require.Equal(t, 3, n)
}

func TestOfController(t *testing.T) {
	m := machine(t)
	us, err := OfController(m.Sys(), addr)
	require.NoError(t, err)
	require.Empty(t, us)

	open(m, 88, "smartd", "/dev/nvme0")
	open(m, 89, "nvme", "/dev/ng0n1")
	both(m, m.Dev(disk), "/data", "ext4", "/dev/nvme0n1")
	m.Put("/sys/devices/pci0000:00/"+addr+"/sriov_numvfs", "2\n")
	us, err = OfController(m.Sys(), "00:04.0")
	require.NoError(t, err)
	require.Equal(t, []string{
		"vfs live : 0000:00:04.0 has 2 virtual functions, which would vanish; write 0 to its sriov_numvfs first",
		"mounted live nvme0n1: is mounted at /data (ext4)",
		"open live nvme0: is open in smartd (process 88)",
		"open live ng0n1: is open in nvme (process 89)",
	}, words(us))

	m.Add(fakesys.SSD{Addr: "0000:00:06.0", Serial: "SER2", Group: 9, Multipath: true})
	both(m, m.Dev("nvme2n1"), "/m", "ext4", "/dev/nvme2n1")
	m.Put("/sys/devices/pci0000:00/"+addr+"/nvme/nvme0/nvme2c0n1/size", "8\n")
	us, err = OfController(m.Sys(), "0000:00:06.0")
	require.NoError(t, err)
	require.Equal(t, []string{"mounted live nvme2n1: is mounted at /m (ext4)",
		"multipath live nvme2n1: is the namespace that the kernel reaches through nvme0 as well (/dev/nvme2n1)"},
		words(us))

	const passthru = "/sys/kernel/config/nvmet/subsystems/nqn.x/passthru"
	m.Put(passthru+"/device_path", "/dev/nvme1\n")
	for enable, want := range map[string][]string{"0\n": nil,
		"1\n": {"target live nvme1: is exported over NVMe-oF as nqn.x"}} {
		m.Put(passthru+"/enable", enable)
		us, err = OfController(m.Sys(), "0000:00:05.0")
		require.NoError(t, err)
		require.Equal(t, want, words(us), "the target has the whole controller: %s", enable)
	}

	require.NoError(t, m.Sys().Bind(addr, "vfio-pci"))
	us, err = OfController(m.Sys(), addr)
	require.NoError(t, err)
	require.Equal(t, []string{
		"vfs live : 0000:00:04.0 has 2 virtual functions, which would vanish; write 0 to its sriov_numvfs first",
	}, words(us), "taken from the kernel")
	_, err = OfController(m.Sys(), "00:09.0")
	require.Error(t, err)
}

// One namespace under two names, as without native multipath: what one name is used for, the other
// does not show.
func TestOtherPaths(t *testing.T) {
	const uuid, third = "5b9d2c1e-0000-4000-8000-0123456789ab", "0000:00:06.0"
	for name, c := range map[string]struct {
		other fakesys.SSD
		want  []string
	}{
		"by UUID": {fakesys.SSD{Serial: "SER2", UUID: uuid}, []string{
			"multipath live nvme0n1: is the namespace that the kernel reaches through nvme1 as well (/dev/nvme1n1)"}},
		"by subsystem and NSID": {fakesys.SSD{Serial: "SER2", NQN: "nqn.2019-08.org.qemu:SER0"},
			[]string{
				"multipath live nvme0n1: is the namespace that the kernel reaches through nvme1 as well (/dev/nvme1n1)"}},
		"another namespace of the subsystem": {fakesys.SSD{Serial: "SER2",
			UUID: "5b9d2c1e-0000-4000-8000-0123456789ac", NQN: "nqn.2019-08.org.qemu:SER0"}, nil},
		"another SSD": {fakesys.SSD{Serial: "SER2"}, nil},
		"another SSD of a make that gives all the same ID": {fakesys.SSD{Serial: "SER2", UUID: uuid,
			Model: "native multipath shows it as private"}, nil},
	} {
		m := fakesys.New(t.TempDir())
		m.Add(fakesys.SSD{Addr: addr, Serial: "SER0", Group: 7, UUID: uuid})
		if c.other.UUID == "" {
			m.Remove("/sys/class/block/nvme0n1/uuid")
		}
		c.other.Addr, c.other.Group = third, 8
		m.Add(c.other)
		if c.other.Model != "" {
			m.Put("/sys/module/nvme_core/parameters/multipath", "Y\n")
		}
		us, err := OfController(m.Sys(), addr)
		require.NoError(t, err)
		require.Equal(t, c.want, words(us), name)
	}
}

func TestVirtualFunctionOfOneInUse(t *testing.T) {
	m := machine(t)
	const vf = "0000:00:05.0"
	m.Virtual(addr, vf)
	us, err := OfController(m.Sys(), vf)
	require.NoError(t, err)
	require.Empty(t, us, "nobody uses the physical function")
	both(m, m.Dev(disk), "/data", "ext4", "/dev/nvme0n1")
	want := []string{"pf live : 0000:00:05.0 is a virtual function of 0000:00:04.0, which is in use: /dev/nvme0n1 is mounted at /data (ext4)"}
	us, err = OfController(m.Sys(), vf)
	require.NoError(t, err)
	require.Equal(t, want, words(us))
	require.NoError(t, m.Sys().Bind(vf, "vfio-pci"))
	us, err = LookAt(m.Sys(), vf)
	require.NoError(t, err)
	require.Equal(t, want, words(us), "without a driver that could be asked, too")
	m.Put("/proc/1/mountinfo", "")
	m.Put("/proc/4711/mountinfo", "")
	require.NoError(t, m.Sys().Bind(addr, "vfio-pci"))
	us, err = OfController(m.Sys(), vf)
	require.NoError(t, err)
	require.Equal(t, []string{"pf live : 0000:00:05.0 is a virtual function of 0000:00:04.0, which driver vfio-pci has"}, words(us))
}

func TestOpeners(t *testing.T) {
	m := machine(t)
	open(m, 88, "heliosctl", "/dev/vfio/7")
	open(m, 89, "heliosctl", "/dev/vfio/77")
	got, err := Openers(m.Sys(), "/dev/vfio/7", "/dev/vfio/8")
	require.NoError(t, err)
	require.Equal(t, []Opener{{88, "heliosctl", "/dev/vfio/7"}}, got)
}

func TestLVMName(t *testing.T) {
	for in, want := range map[string]string{"vg0-data": "vg0/data", "a--b-c--d": "a-b/c-d",
		"a----b-c": "a--b/c", "odd": "odd"} {
		require.Equal(t, want, lvmName(in))
	}
}

func live(u Use) bool { return u.Live }
