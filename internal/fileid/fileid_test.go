package fileid

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func of(t *testing.T, path string) (ID, int64) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	id, n, err := Of(f)
	require.NoError(t, err)
	return id, n
}

func TestFile(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, os.WriteFile(a, make([]byte, 100), 0o600))
	require.NoError(t, os.WriteFile(b, make([]byte, 100), 0o600))
	ida, n := of(t, a)
	require.EqualValues(t, 100, n)
	require.True(t, ida.Known())
	require.False(t, ID{}.Known())
	idb, _ := of(t, b)
	require.Contains(t, idb.Differs(ida), "another file of that name")
	require.NoError(t, os.Rename(a, filepath.Join(dir, "c")))
	idc, _ := of(t, filepath.Join(dir, "c"))
	require.Empty(t, idc.Differs(ida), "a name is no part of it")

	f, err := os.Open(dir)
	require.NoError(t, err)
	_, _, err = Of(f)
	require.ErrorContains(t, err, "neither a file nor a block device")
	require.NoError(t, f.Close())
}

func TestDiffers(t *testing.T) {
	file, block := ID{Device: 5, Inode: 7}, ID{Rdev: unix.Mkdev(259, 1), Disk: "wwid eui.1"}
	for _, c := range []struct {
		now, was ID
		want     string
	}{
		{file, file, ""}, {block, block, ""},
		{file, block, "it is a file now and was a block device"},
		{block, file, "it is a block device now and was a file"},
		{ID{Device: 6, Inode: 7}, file, "0:6 now, 0:5 before"},
		{ID{Device: 6, FS: 9, Inode: 7}, ID{Device: 5, FS: 9, Inode: 7}, ""}, // mounted anew
		{ID{Device: 6, FS: 9, Inode: 7}, ID{Device: 5, FS: 8, Inode: 7}, "0:6 now, 0:5 before"},
		{ID{Device: 5, FS: 9, Inode: 7}, ID{Device: 5, FS: 8, Inode: 7}, ""},
		{ID{Rdev: unix.Mkdev(259, 2), Disk: "wwid eui.1"}, block, ""}, // numbered anew
		{ID{Rdev: unix.Mkdev(259, 2)}, ID{Rdev: unix.Mkdev(259, 1)},
			"block device 259:2 now and was 259:1"},
		{ID{Rdev: unix.Mkdev(7, 2), Disk: loopFile + " /x"},
			ID{Rdev: unix.Mkdev(7, 1), Disk: loopFile + " /x"}, "block device 7:2 now and was 7:1"},
		{ID{Rdev: unix.Mkdev(259, 1), Disk: "wwid \x1b[2J"}, block,
			`"wwid \x1b[2J" now, "wwid eui.1" before`},
	} {
		if c.want == "" {
			require.Empty(t, c.now.Differs(c.was))
			continue
		}
		require.Contains(t, c.now.Differs(c.was), c.want)
	}
}

func TestDisk(t *testing.T) {
	sys := t.TempDir()
	put := func(path, text string) {
		path = filepath.Join(sys, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	put("block/nvme0n1/wwid", "eui.0025385\n")
	put("block/nvme0n1/nvme0n1p2/partition", "2\n")
	put("block/nvme0n1/nvme0n1p2/start", "2048\n")
	put("block/sda/device/wwid", "t10.ATA   Some  Disk \n")
	put("block/loop0/loop/backing_file", "/srv/a.img\n")
	put("block/none/size", "1\n")
	require.NoError(t, os.MkdirAll(filepath.Join(sys, "dev/block"), 0o755))
	for number, at := range map[string]string{"259:0": "nvme0n1", "259:2": "nvme0n1/nvme0n1p2",
		"8:0": "sda", "7:0": "loop0", "9:9": "none"} {
		require.NoError(t, os.Symlink("../../block/"+at, filepath.Join(sys, "dev/block", number)))
	}
	require.Equal(t, "wwid eui.0025385", disk(sys, unix.Mkdev(259, 0)))
	require.Equal(t, "wwid eui.0025385, partition 2 at 2048", disk(sys, unix.Mkdev(259, 2)))
	require.Equal(t, "device/wwid t10.ATA Some Disk", disk(sys, unix.Mkdev(8, 0)))
	require.Equal(t, "loop/backing_file /srv/a.img", disk(sys, unix.Mkdev(7, 0)))
	require.Empty(t, disk(sys, unix.Mkdev(9, 9)))
	require.Empty(t, disk(sys, unix.Mkdev(1, 1)))
}
