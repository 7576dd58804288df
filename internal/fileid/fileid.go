// Package fileid tells one file or block device from another that took its name.
package fileid

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ID holds what a file or block device is known by, whatever its name. The zero value is not known.
type ID struct {
	// of a file: its file system's number (st_dev), which a reboot may change,
	Device uint64 `json:"device,omitempty"`
	// the file system's own name for itself (f_fsid), which few keep either,
	FS    uint64 `json:"fs,omitempty"`
	Inode uint64 `json:"inode,omitempty"` // and the file's number there
	Rdev  uint64 `json:"rdev,omitempty"`  // of a block device: its number (st_rdev)
	// and what the kernel says of the disk: a WWN, serial number or UUID
	Disk string `json:"disk_id,omitempty"`
}

// Known reports whether there is anything to compare with.
func (id ID) Known() bool { return id.Inode != 0 || id.Rdev != 0 }

// loopFile is the attribute with the path of the file that a loop device shows: no identity.
const loopFile = "loop/backing_file"

// maxDisk bounds a disk's own description.
const maxDisk = 256

// Of is the identity of an open file or block device, and its size.
func Of(f *os.File) (id ID, bytes int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return id, 0, fmt.Errorf("fstat %s: %w", f.Name(), err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		id = ID{Device: uint64(st.Dev), Inode: st.Ino}
		var fs unix.Statfs_t
		if unix.Fstatfs(int(f.Fd()), &fs) == nil {
			id.FS = uint64(uint32(fs.Fsid.Val[0])) | uint64(uint32(fs.Fsid.Val[1]))<<32
		}
		return id, st.Size, nil
	case unix.S_IFBLK:
		n, err := f.Seek(0, io.SeekEnd)
		if err != nil {
			return id, 0, fmt.Errorf("size of %s: %w", f.Name(), err)
		}
		return ID{Rdev: uint64(st.Rdev), Disk: disk("/sys", uint64(st.Rdev))}, n, nil
	}
	return id, 0, fmt.Errorf("%s is neither a file nor a block device", f.Name())
}

// disk returns what sysfs says about the disk of a block device, or "". A partition is its disk's
// number n, from where it begins.
func disk(sys string, rdev uint64) string {
	dir := filepath.Join(sys, "dev/block", fmt.Sprintf("%d:%d", unix.Major(rdev), unix.Minor(rdev)))
	attr := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return ""
		}
		s := strings.Join(strings.Fields(string(b)), " ")
		return s[:min(len(s), maxDisk)]
	}
	part := ""
	if n := attr("partition"); n != "" {
		part = fmt.Sprintf(", partition %s at %s", n, attr("start"))
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return ""
		}
		dir = filepath.Dir(real)
	}
	for _, name := range []string{"wwid", "device/wwid", "serial", "device/serial", "dm/uuid",
		"md/uuid", loopFile} {
		if s := attr(name); s != "" {
			return name + " " + s + part
		}
	}
	return ""
}

// Differs describes how id is another than was, or "" where they are the same. The kernel numbers many
// devices and file systems anew at each boot (partitions of NVMe SSDs, device mapper; btrfs, NFS,
// tmpfs), so a disk that has a name of its own is known by that, and a file system by either of its
// two numbers.
func (id ID) Differs(was ID) string {
	switch {
	case (id.Rdev != 0) != (was.Rdev != 0):
		return fmt.Sprintf("it is %s now and was %s", id.kind(), was.kind())
	case id.Rdev != 0 && id.Disk != "" && id.Disk == was.Disk &&
		!strings.HasPrefix(id.Disk, loopFile):
		return ""
	case id.Rdev != was.Rdev:
		return fmt.Sprintf("it is block device %s now and was %s", number(id.Rdev),
			number(was.Rdev))
	case id.Disk != was.Disk:
		return fmt.Sprintf("the disk is another one: %q now, %q before", id.Disk, was.Disk)
	case id.Inode != was.Inode:
		return fmt.Sprintf("it is another file of that name: inode %d now, %d before", id.Inode,
			was.Inode)
	case id.Device != was.Device && (id.FS == 0 || id.FS != was.FS):
		return fmt.Sprintf(
			"its file system is another one, or got another number when it was mounted: %s now, %s before",
			number(id.Device), number(was.Device))
	}
	return ""
}

func (id ID) kind() string {
	if id.Rdev != 0 {
		return "a block device"
	}
	return "a file"
}

func number(dev uint64) string { return fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev)) }
