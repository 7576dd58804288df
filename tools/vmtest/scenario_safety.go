package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// safety: disks that somebody uses are refused with exit code 4 in words that name the user, with
// --force too where the use is live, and neither their driver nor a byte of them changes.
func init() {
	disks := make([]Disk, 12)
	for i := range disks {
		disks[i].MB = 16
	}
	disks[diskBoot].LBA = 4096
	scenarios = append(scenarios, Scenario{
		Name: "safety", Limit: 4 * time.Minute,
		Config: Config{SharedGroup: true, Disks: disks, Tests: []string{"./internal/diskuse"}},
		Run:    func(t *T) { (&safety{T: t}).run() },
	})
}

const (
	diskFreeA   = 0 // the two of one IOMMU group
	diskFreeB   = 1
	diskMounted = 2
	diskParts   = 3 // one partition mounted, the other swapped to
	diskSwap    = 4
	diskLVM     = 5
	diskRAID0   = 6
	diskRAID1   = 7
	diskOpen    = 8
	diskContent = 9 // partitions that nobody uses
	diskBoot    = 10
	// a file system that nobody uses; by turns below a loop device, mounted elsewhere, …
	diskFS = 11
)

type safety struct {
	*T
	dev  []string // /dev/nvme3n1
	addr []string
}

func (s *safety) run() {
	for i := range s.VM.cfg.Disks {
		s.dev, s.addr = append(s.dev, s.Dev(i)), append(s.addr, s.Addr(i))
	}
	s.OK("root", "modprobe -a vfio-pci vfio_iommu_type1 loop raid1 dm-mod")
	s.setUp()

	before := s.state()
	s.refusals()
	s.sharedGroup()
	s.passingUses()
	s.unchanged(before, s.all()...)

	s.content()
	before = s.state()
	s.allUnused()
	s.unchanged(before, s.all()[2:]...)
	s.kills()
}

func (s *safety) all() []int {
	out := make([]int, len(s.dev))
	for i := range out {
		out[i] = i
	}
	return out
}

func (s *safety) serial(i int) string { return s.VM.cfg.Disks[i].Serial }

// ctrl is /dev/nvme3.
func (s *safety) ctrl(i int) string { return strings.TrimSuffix(s.dev[i], "n1") }

// put writes text at a byte of a disk.
func (s *safety) put(i, at int, data []byte) {
	s.WriteFile("/tmp/put", data, 0o600)
	s.OK("root", fmt.Sprintf("dd if=/tmp/put of=%s bs=512 seek=%d conv=notrunc,fsync 2>/dev/null",
		s.dev[i], at/512))
}

// mbr is a partition table: pairs of first block and number of blocks.
func mbr(parts ...uint32) []byte {
	b := make([]byte, 512)
	for i := 0; i < len(parts); i += 2 {
		e := b[446+8*i:]
		e[4] = 0x83
		binary.LittleEndian.PutUint32(e[8:], parts[i])
		binary.LittleEndian.PutUint32(e[12:], parts[i+1])
	}
	b[510], b[511] = 0x55, 0xaa
	return b
}

// raidMember is the superblock of one of two RAID 1 members (md.4; version 1.2 lies 4 KiB into the
// disk), in sync.
func raidMember(n uint32, sectors uint64) []byte {
	b := make([]byte, 512)
	u32 := func(at int, v uint32) { binary.LittleEndian.PutUint32(b[at:], v) }
	u64 := func(at int, v uint64) { binary.LittleEndian.PutUint64(b[at:], v) }
	const offset = 2048
	u32(0, 0xa92b4efc)
	u32(4, 1)
	copy(b[16:], "helios-vm-array!")
	copy(b[32:], "vm:0")
	u64(64, 1e9)
	u32(72, 1) // level
	u64(80, sectors-offset)
	u32(92, 2)
	u64(128, offset)
	u64(136, sectors-offset)
	u64(144, 8)
	u32(160, n)
	copy(b[168:], fmt.Sprintf("helios-member-%02d", n))
	u64(192, 1e9)
	u64(200, 1)
	u64(208, 1<<64-1) // nothing to resync
	u32(220, 2)
	binary.LittleEndian.PutUint16(b[258:], 1) // roles 0 and 1
	sum := uint64(0)
	for i := 0; i < 260; i += 4 {
		sum += uint64(binary.LittleEndian.Uint32(b[i:]))
	}
	u32(216, uint32(sum)+uint32(sum>>32))
	return b
}

// setUp puts every disk but the first two to use, as far as the kernel alone can. Mounts are
// read-only: ext4 writes its superblock whenever it likes, and the images are compared.
func (s *safety) setUp() {
	const sectors = 16 << 20 / 512
	d := s.dev
	s.OK("root", "mke2fs -q "+d[diskMounted]+" 2>&1 && mkdir /data && mount -t ext4 -o ro "+
		d[diskMounted]+" /data")
	s.OK("root", "mkdir '/my data' && mount -o bind /data '/my data'")

	s.put(diskParts, 0, mbr(2048, 8192, 12288, 16384))
	s.OK("root", "blockdev --rereadpt "+d[diskParts]+" && mke2fs -q "+d[diskParts]+
		"p1 2>&1 && mkdir /srv && mount -t ext4 -o ro "+d[diskParts]+"p1 /srv")
	s.OK("root", "mkswap "+d[diskParts]+"p2 && swapon "+d[diskParts]+"p2")
	s.OK("root", "mkswap "+d[diskSwap]+" && swapon "+d[diskSwap])

	s.put(diskLVM, 512, []byte("LABELONE"))
	s.GoTest("./internal/diskuse", "^TestMapperInGuest$", "HELIOS_VM_MAPPER="+d[diskLVM]+
		" vg0-my--data LVM-"+strings.Repeat("a", 32)+strings.Repeat("b", 32))

	for n, i := range []int{diskRAID0, diskRAID1} {
		s.put(i, 4096, raidMember(uint32(n), sectors))
	}
	s.OK("root",
		"echo md0 >/sys/module/md_mod/parameters/new_array; cd /sys/block/md0/md && echo 1.2 >metadata_version")
	for _, i := range []int{diskRAID0, diskRAID1} {
		s.OK("root", "cat /sys/class/block/"+d[i][5:]+"/dev >/sys/block/md0/md/new_dev")
	}
	s.OK("root",
		"echo active >/sys/block/md0/md/array_state && [ $(cat /sys/block/md0/md/level) = raid1 ]")

	s.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec 5<" + d[diskOpen] + "; exec sleep 1000"},
		Timeout: 10 * time.Minute})

	s.put(diskContent, 0, mbr(2048, 8192))
	s.OK("root", "blockdev --rereadpt "+d[diskContent]+" && mke2fs -q "+d[diskContent]+"p1 2>&1")

	s.put(diskBoot, 0, append(mbr(256, 2048), make([]byte, 4096-512)...))
	s.OK("root", "blockdev --rereadpt "+d[diskBoot]+" && mke2fs -q -b 4096 "+d[diskBoot]+
		"p1 2>&1 && mkdir /boot && mount -t ext4 -o ro "+d[diskBoot]+"p1 /boot")

	s.OK("root", "mke2fs -q "+d[diskFS]+" 2>&1")
	s.OK("root", "sync; sleep 0.5; sync") // the array marks itself clean
}

// snapshot holds what must not change: each disk's driver and override, and its image in hashes of
// 4 KiB.
type snapshot struct {
	drivers []string
	images  [][][32]byte
}

func (s *safety) drivers() []string {
	cmd := ""
	for _, a := range s.addr {
		p := "/sys/bus/pci/devices/" + a
		cmd += fmt.Sprintf("echo $(basename $(readlink %s/driver)) $(cat %s/driver_override);", p,
			p)
	}
	return strings.Split(strings.TrimSpace(s.OK("root", cmd)), "\n")
}

func (s *safety) state() snapshot {
	s.OK("root", "sync")
	x := snapshot{drivers: s.drivers()}
	for i := range s.dev {
		b, err := os.ReadFile(s.DiskPath(i))
		if err != nil {
			s.Fatalf("%v", err)
		}
		var sums [][32]byte
		for block := range slices.Chunk(b, 4096) {
			sums = append(sums, sha256.Sum256(block))
		}
		x.images = append(x.images, sums)
	}
	return x
}

func (s *safety) unchanged(before snapshot, disks ...int) {
	now := s.state()
	for _, i := range disks {
		if now.drivers[i] != before.drivers[i] || now.drivers[i] != "nvme (null)" {
			s.Errorf("disk %d: its driver was %q and is %q", i, before.drivers[i], now.drivers[i])
		}
		for n, sum := range now.images[i] {
			if sum != before.images[i][n] {
				s.Errorf("disk %d: its image has changed, first in the 4 KiB from byte %d on",
					i, 4096*n)
				break
			}
		}
	}
	if t := s.OK("root", "cat /proc/swaps; mount"); !strings.Contains(t, s.dev[diskSwap]) ||
		!strings.Contains(t, " /data ") || !strings.Contains(t, " /boot ") {
		s.Errorf("the users of the disks are not what they were:\n%s", t)
	}
}

// refusals asks for each disk by another of its names.
func (s *safety) refusals() {
	d := s.dev
	for _, c := range []struct {
		disk  int
		name  string
		words []string
	}{
		{diskMounted, d[diskMounted], []string{d[diskMounted] + " is mounted at ", "/data",
			"/my data", "(ext4)"}},
		{diskParts, s.addr[diskParts], []string{d[diskParts] + "p1 is mounted at /srv (ext4)",
			d[diskParts] + "p2 is in use as swap space"}},
		{diskSwap, s.serial(diskSwap), []string{d[diskSwap] + " is in use as swap space"}},
		{diskLVM, s.ctrl(diskLVM),
			[]string{d[diskLVM] + " belongs to LVM volume vg0/my-data (dm-0)"}},
		{diskRAID0, strings.TrimPrefix(s.addr[diskRAID0], "0000:"),
			[]string{d[diskRAID0] + " belongs to RAID array md0 (raid1)"}},
		{diskRAID1, strings.TrimPrefix(d[diskRAID1], "/dev/"),
			[]string{d[diskRAID1] + " belongs to RAID array md0 (raid1)"}},
		{diskOpen, d[diskOpen], []string{d[diskOpen] + " is open in sleep (process "}},
		{diskBoot, "/dev/ng" + strings.TrimPrefix(d[diskBoot], "/dev/nvme"),
			[]string{d[diskBoot] + "p1 is mounted at /boot",
				"is a boot disk: the machine runs from it (/boot)"}},
	} {
		words := append(c.words, "nothing was changed", s.addr[c.disk])
		s.Exit(4, words, "root", "heliosctl bind-ssds "+c.name)
		s.Exit(4, words, "root", "heliosctl bind-ssds --force "+s.serial(c.disk)+" "+c.name)
	}
	// one bad disk among good ones stops all
	s.Exit(4, []string{"is mounted at", "nothing was changed"}, "root",
		fmt.Sprintf("heliosctl bind-ssds %s %s %s", s.addr[0], s.addr[1], s.addr[diskMounted]))
	s.Exit(4, []string{d[diskParts] + "p1 is a partition of " + d[diskParts]}, "root",
		"heliosctl bind-ssds "+d[diskParts]+"p1")
	s.Exit(2, []string{"HELIOS99"}, "root", "heliosctl bind-ssds HELIOS99")
	s.Exit(2, []string{"0000:00:1d.0"}, "root", "heliosctl bind-ssds 00:1d.0")
	s.Exit(2, []string{"/dev/nvme77n1"}, "root", "heliosctl bind-ssds /dev/nvme77n1")
}

// sharedGroup: a device of a group is refused by the name of the other.
func (s *safety) sharedGroup() {
	for _, i := range []int{diskFreeA, diskFreeB} {
		words := []string{"IOMMU group", s.addr[1-i], "nothing was changed"}
		s.Exit(4, words, "root", "heliosctl bind-ssds "+s.addr[i])
		s.Exit(4, words, "root", "heliosctl bind-ssds --force "+s.serial(i)+" "+s.serial(i))
	}
	// the other one in use: nothing is left that is unused
	p := s.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec 5<" + s.dev[diskFreeB] +
		"; exec sleep 1000"}})
	s.Exit(4, []string{"unused", "is open in sleep", s.addr[diskFreeA]}, "root",
		"sleep 0.2; heliosctl bind-ssds --all-unused")
	p.Kill(syscall.SIGKILL)
	p.Wait()
}

// passingUses are uses of one disk, one after the other, that a look at the own mounts and at
// holders does not find.
func (s *safety) passingUses() {
	dev := s.dev[diskFS]
	refused := func(words ...string) {
		s.Exit(4, append(words, "nothing was changed"), "root", "heliosctl bind-ssds --force "+
			s.serial(diskFS)+" "+dev)
	}
	s.OK("root", "losetup /dev/loop0 "+dev)
	refused(dev + " belongs to loop device loop0")
	s.OK("root", "losetup -d /dev/loop0")

	// read-only: mounting writes the time
	p := s.Start(Cmd{Argv: []string{"unshare", "-m", "/bin/sh", "-c",
		"mount -t ext4 -o ro,noload " + dev + " /mnt && touch /tmp/there && exec sleep 1000"}})
	s.OK("root",
		"for i in $(seq 100); do [ -e /tmp/there ] && break; sleep 0.1; done; ! mount | grep "+dev)
	refused(dev+" is mounted at /mnt (ext4) in the mount namespace of process", "(sleep)")
	p.Kill(syscall.SIGKILL)
	p.Wait()

	s.OK("root", "mount -t ext4 -o ro,noload "+dev+" /mnt")
	p = s.Start(Cmd{Argv: []string{"/bin/sh", "-c",
		"cd /mnt && touch /tmp/inside && exec sleep 1000"}})
	s.OK("root",
		"for i in $(seq 100); do [ -e /tmp/inside ] && break; sleep 0.1; done; umount -l /mnt; ! mount | grep "+dev)
	refused(dev + " is held exclusively by something in the kernel")
	p.Kill(syscall.SIGKILL)
	p.Wait()
}

// content: what nobody uses is given up by its serial number, and by nothing less.
func (s *safety) content() {
	s.OK("root", "echo clear >/sys/block/md0/md/array_state") // its members are content now
	before := s.state()
	for _, c := range []struct {
		disk  int
		words []string
	}{
		{diskContent, []string{"has the partition " + s.dev[diskContent][5:] +
			"p1 (4 MiB, an ext2/3/4 file system)", "an MBR partition table"}},
		{diskFS, []string{s.dev[diskFS] + " holds an ext2/3/4 file system"}},
		{diskRAID0, []string{s.dev[diskRAID0] + " holds a Linux RAID member"}},
	} {
		words := append(c.words, "nothing was changed", "--force "+s.serial(c.disk))
		s.Exit(4, words, "root", "heliosctl bind-ssds "+s.dev[c.disk])
		// another's serial number does not do, nor does one that was not chosen
		other := diskRAID1
		s.Exit(4, words, "root", fmt.Sprintf("heliosctl bind-ssds --force %s %s %s",
			s.serial(other), s.dev[c.disk], s.dev[other]))
		s.Exit(2, []string{s.serial(other)}, "root",
			fmt.Sprintf("heliosctl bind-ssds --force %s %s", s.serial(other), s.dev[c.disk]))
	}
	s.unchanged(before, s.all()...)

	s.OK("root", fmt.Sprintf("heliosctl bind-ssds --force %s,%s %s %s", s.serial(diskContent),
		s.serial(diskRAID0), s.dev[diskContent], s.addr[diskRAID0]))
	typed := func(text string) Result {
		return s.Run(Cmd{Argv: []string{"heliosctl", "bind-ssds", s.addr[diskFS]},
			Stdin: text + "\n", TTY: true})
	}
	if r := typed(s.serial(diskContent)); r.Code != 4 ||
		!strings.Contains(r.Out, "is not its serial number") {
		s.Errorf("another serial number typed: exit code %d: %s", r.Code, r.Out)
	}
	s.isBound(diskFS, "nvme")
	if r := typed(s.serial(diskFS)); r.Code != 0 ||
		!strings.Contains(r.Out, "Type its serial number") {
		s.Errorf("the serial number typed: exit code %d: %s", r.Code, r.Out)
	}
	for _, i := range s.all() {
		want := "nvme"
		if i == diskContent || i == diskRAID0 || i == diskFS {
			want = "vfio-pci"
		}
		s.isBound(i, want)
	}
	s.OK("root", "heliosctl unbind-ssds")
	s.rename()
	s.OK("root", "for i in $(seq 50); do [ -b "+s.dev[diskContent]+
		"p1 ] && exit 0; sleep 0.1; done; exit 1")
	s.unchanged(before, s.all()...) // taking and giving back writes nothing
}

// rename reads the kernel's names again, which may have changed.
func (s *safety) rename() {
	for i := range s.dev {
		s.dev[i] = s.Dev(i)
	}
}

func (s *safety) isBound(i int, driver string) {
	if got, _, _ := strings.Cut(s.drivers()[i], " "); got != driver {
		s.Errorf("disk %d is with driver %q, not %q", i, got, driver)
	}
}

// allUnused takes exactly what nobody uses; on those two, another dataset is not overwritten.
func (s *safety) allUnused() {
	out := s.Exit(0, []string{"left out: " + s.addr[diskMounted],
		"left out: " + s.addr[diskContent], "left out: " + s.addr[diskRAID1]}, "root",
		"heliosctl bind-ssds --all-unused")
	want := slices.Repeat([]string{"nvme (null)"}, len(s.dev))
	want[diskFreeA], want[diskFreeB] = "vfio-pci vfio-pci", "vfio-pci vfio-pci"
	if got := s.drivers(); !slices.Equal(got, want) {
		s.Errorf("--all-unused left the drivers %q:\n%s", got, out)
	}

	s.OK("root",
		"cd /tmp && heliosctl generate --out one --nodes 500 --dim 32 --seed 1 && heliosctl generate --out two --nodes 500 --dim 32 --seed 2 && heliosctl load one")
	s.Exit(4, []string{"another dataset", "--force HELIOS0"}, "root",
		"cd /tmp && heliosctl load two")
	s.OK("root", "cd /tmp && heliosctl verify one")
	s.OK("root", "cd /tmp && heliosctl load two --force HELIOS0,HELIOS1 && heliosctl verify two")
	s.Exit(4, []string{"another dataset"}, "root", "cd /tmp && heliosctl load one")
	s.OK("root", "heliosctl unbind-ssds")
	s.rename()
	// our own superblock is nobody else's data
	s.OK("root", "heliosctl bind-ssds --all-unused && heliosctl unbind-ssds")
	s.rename()
}

// kills ends bind-ssds and unbind-ssds by SIGKILL at many points; the next command goes on.
func (s *safety) kills() {
	both := s.addr[diskFreeA] + " " + s.addr[diskFreeB]
	began := time.Now()
	s.OK("root", "heliosctl bind-ssds "+both)
	took := time.Since(began)
	states := map[string]int{}
	const rounds = 6
	for i := range rounds {
		verb, want := "bind-ssds "+both, "vfio-pci"
		if i%2 == 0 { // bound at first
			verb, want = "unbind-ssds", "nvme"
		}
		after := took * time.Duration(i+1) / (rounds + 1)
		s.OK("root",
			fmt.Sprintf("heliosctl %s >/dev/null 2>&1 & p=$!; usleep %d; kill -9 $p; wait $p; true",
				verb, after.Microseconds()))
		states[strings.Join(s.drivers()[:2], ", ")]++
		if i%2 == 0 { // with no record left, it had done its work
			verb += " 2>&1 || ! ls /run/heliosctl/vfio*.json"
		}
		s.OK("root", "heliosctl "+verb)
		s.isBound(diskFreeA, want)
		s.isBound(diskFreeB, want)
	}
	s.Notef("killed %d times, in the states %v", rounds, states)
	s.OK("root", "heliosctl unbind-ssds")
	for i, d := range s.drivers() {
		if d != "nvme (null)" {
			s.Errorf("disk %d ends with driver and override %q", i, d)
		}
	}
}
