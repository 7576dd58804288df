package diskuse

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/pci"
	"helios/internal/testing/fakesys"
)

// Block devices that share bytes overlap, whatever their names; those that only share a disk do
// not.
func TestOverlaps(t *testing.T) {
	m := fakesys.New(t.TempDir())
	const uuid = "5b9d2c1e-0000-4000-8000-0123456789ab"
	m.Add(fakesys.SSD{Addr: addr, Serial: "SER0", Group: 7, UUID: uuid})
	m.Add(fakesys.SSD{Addr: "0000:00:05.0", Serial: "SER1", Group: 8, UUID: uuid}) // the same one
	m.Add(fakesys.SSD{Addr: "0000:00:06.0", Serial: "SER2", Group: 9})
	p1, p2 := m.Partition("nvme0n1", 1, 1<<20), m.Partition("nvme0n1", 2, 1<<20)
	for _, v := range []string{"dm-0", "dm-1"} { // two volumes on a partition
		m.Block(v, 1<<20)
		m.Link("/sys/class/block/"+v+"/slaves/"+p2, "../"+p2)
	}
	m.Block("md0", 1<<20)
	m.Link("/sys/class/block/md0/slaves/nvme2n1", "../nvme2n1")
	m.Link("/sys/class/block/md0/slaves/dm-1", "../dm-1")
	for _, d := range []string{"sda", "sdb", "sdc"} { // two paths of SCSI, and another disk
		m.Block(d, 1<<20)
		m.Put("/sys/class/block/"+d+"/device/wwid", "naa.600"+map[string]string{"sdc": "9"}[d]+"\n")
	}
	m.Block("loop7", 1<<20)
	m.Put("/sys/class/block/loop7/loop/backing_file", "/dev/nvme2n1\n")
	all := []string{"nvme0n1", "nvme1n1", "nvme2n1", p1, p2, "dm-0", "dm-1", "md0", "sda", "sdb", "sdc",
		"loop7"}
	overlap := map[[2]string]bool{
		{"nvme0n1", "nvme1n1"}: true, {"nvme0n1", p1}: true, {"nvme0n1", p2}: true,
		{"nvme1n1", p1}: true, {"nvme1n1", p2}: true, // by the other path
		{"nvme0n1", "dm-0"}: true, {"nvme0n1", "dm-1"}: true, {"nvme1n1", "dm-0"}: true,
		{"nvme1n1", "dm-1"}: true, {p2, "dm-0"}: true, {p2, "dm-1"}: true,
		{"dm-1", "md0"}: true, {p2, "md0"}: true, {"nvme0n1", "md0"}: true, {"nvme1n1", "md0"}: true,
		{"nvme2n1", "md0"}: true, {"nvme2n1", "loop7"}: true, {"loop7", "md0"}: true,
		{"sda", "sdb"}: true,
	}
	for _, a := range all {
		for _, b := range all {
			want := a == b || overlap[[2]string{a, b}] || overlap[[2]string{b, a}]
			require.Equal(t, want, blockBacking(m.Sys(), a).Overlaps(blockBacking(m.Sys(), b)),
				"%s and %s", a, b)
		}
	}
	ns, err := m.Sys().Namespaces()
	require.NoError(t, err)
	require.True(t, BackingOfNamespace(ns[0].ID).Overlaps(blockBacking(m.Sys(), p1)),
		"an SSD that was taken from the kernel, and its disk by another path")
	require.False(t, Backing{}.Overlaps(Backing{}), "what is computed is nothing")

	m.Block("dm-2", 1<<20) // multipath, which has both paths
	for _, d := range []string{"nvme0n1", "nvme1n1"} {
		m.Link("/sys/class/block/dm-2/slaves/"+d, "../"+d)
	}
	const other = "is the namespace that the kernel reaches through nvme0 as well (/dev/nvme0n1)"
	for name, want := range map[string][]string{"nvme1n1": {other}, "dm-2": nil, "nvme2n1": nil,
		"loop7": nil, "sda": nil} {
		require.Equal(t, want, blockBacking(m.Sys(), name).OtherPaths(ns), name)
	}
	for _, name := range []string{p1, "dm-0"} {
		require.Len(t, blockBacking(m.Sys(), name).OtherPaths(ns), 1, name)
	}
}

// A user of a disk without a claim shows, and a device that is only set up does not.
func TestElsewhere(t *testing.T) {
	m := machine(t)
	file := filepath.Join(t.TempDir(), "a.img")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	m.Link(file, file) // a path of the fake machine's too
	m.Block("loop0", 1<<20)
	m.Put("/sys/class/block/loop0/loop/backing_file", file+"\n")
	m.Block("loop1", 1<<20)
	m.Put("/sys/class/block/loop1/loop/backing_file", "/dev/nvme1n1\n")
	of := func() (out [][]string) {
		b, err := BackingOf(m.Sys(), file)
		require.NoError(t, err)
		for _, b := range []Backing{b, blockBacking(m.Sys(), "nvme1n1"), blockBacking(m.Sys(), disk),
			blockBacking(m.Sys(), "loop0")} {
			out = append(out, words(b.Elsewhere(m.Sys())))
		}
		return out
	}
	require.Equal(t, [][]string{nil, nil, nil, nil}, of())
	both(m, m.Dev("loop0"), "/a", "ext4", "/dev/loop0")
	both(m, m.Dev("loop1"), "/b", "xfs", "/dev/loop1")
	const ns = "/sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/1"
	m.Put(ns+"/device_path", "/dev/"+disk+"\n")
	m.Put(ns+"/enable", "1\n")
	require.Equal(t, [][]string{{"mounted live loop0: is mounted at /a (ext4)"},
		{"mounted live loop1: is mounted at /b (xfs)"},
		{"target live nvme0n1: is exported over NVMe-oF as namespace 1 of nqn.x"}, nil}, of())
}

func TestBackingOfFiles(t *testing.T) {
	dir := t.TempDir()
	off := func(n string) string { return filepath.Join(dir, n) }
	require.NoError(t, os.WriteFile(off("a"), nil, 0o600))
	require.NoError(t, os.WriteFile(off("b"), nil, 0o600))
	require.NoError(t, os.Link(off("a"), off("hard")))
	require.NoError(t, os.Symlink("a", off("soft")))
	of := func(n string) Backing {
		b, err := BackingOf(pci.Sys{Root: dir}, off(n))
		require.NoError(t, err)
		return b
	}
	require.True(t, of("a").Overlaps(of("hard")))
	require.True(t, of("soft").Overlaps(of("hard")))
	require.False(t, of("a").Overlaps(of("b")))
	_, err := BackingOf(pci.Sys{}, off("none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
