package diskuse

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/nsid"
	"helios/internal/pci"
)

// Backing holds what a file or block device is known by, and what it stands on: two SSDs over one
// disk have something in common, whatever their names.
type Backing struct {
	name  string   // of a block device
	self  []string // names of the thing itself: a device number, a file, a namespace
	under []string // of what it is a part of or stands on
	// Namespaces are those of the kernel's that it is, is a part of or stands on.
	Namespaces []pci.Namespace
}

// Overlaps reports whether both are one thing, or one stands on the other. Two partitions of a
// disk, or two volumes on it, do not overlap.
func (b Backing) Overlaps(other Backing) bool {
	return common(b.self, other.self) || common(b.self, other.under) || common(b.under, other.self)
}

func common(x, y []string) bool {
	return slices.ContainsFunc(x, func(s string) bool { return slices.Contains(y, s) })
}

// Elsewhere says who uses it now without the kernel's claim, which O_EXCL asks for: a loop device
// over the same file or block device that is in use itself, and the kernel's NVMe target. Root is
// reports whether a loop device is claimed also in a container, which does not see others' mounts.
func (b Backing) Elsewhere(sys pci.Sys) []Use {
	l := &look{sys: sys, nodes: []node{{name: b.name, base: b.name}}}
	if b.name != "" {
		l.targets()
	}
	for _, name := range l.list("/sys/class/block") {
		if name == b.name || l.text("/sys/class/block/"+name+"/loop/backing_file") == "" ||
			!common(blockBacking(sys, name).self, b.self) {
			continue
		}
		us, _ := Of(sys, name) // what could not be looked at
		l.uses = append(l.uses, slices.DeleteFunc(us, func(u Use) bool { return !u.Live })...)
	}
	return l.uses
}

// OtherPaths says by which other block devices the kernel reaches its namespaces. all are the
// namespaces that the kernel has.
func (b Backing) OtherPaths(all []pci.Namespace) []string {
	all = slices.DeleteFunc(slices.Clone(all), func(o pci.Namespace) bool {
		return slices.ContainsFunc(b.Namespaces,
			func(ns pci.Namespace) bool { return ns.Name == o.Name })
	})
	var out []string
	for _, ns := range b.Namespaces {
		out = append(out, OtherPaths(all, ns, "")...)
	}
	return out
}

// BackingOfNamespace is that of an SSD which the kernel does not have.
func BackingOfNamespace(id nsid.ID) Backing { return Backing{self: id.Keys()} }

// BackingOf looks at a file or block device, by whatever name.
func BackingOf(sys pci.Sys, path string) (Backing, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Backing{}, fmt.Errorf("%s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		number := fmt.Sprintf("%d:%d", unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev)))
		real, err := filepath.EvalSymlinks(sys.Path("/sys/dev/block", number))
		if err != nil { // no sysfs: its number alone
			return Backing{self: []string{"device " + number}}, nil
		}
		return blockBacking(sys, filepath.Base(real)), nil
	}
	return Backing{self: []string{fileKey(uint64(st.Dev), st.Ino)}}, nil
}

func fileKey(dev, inode uint64) string { return fmt.Sprintf("file %d:%d", dev, inode) }

// blockBacking looks at a block device of sysfs.
func blockBacking(sys pci.Sys, name string) Backing {
	l := &look{sys: sys}
	dir := "/sys/class/block/" + name
	b := Backing{name: name, self: []string{"device " + l.text(dir+"/dev")}}
	on := func(o Backing) {
		b.under = append(b.under, append(o.self, o.under...)...)
		b.Namespaces = append(b.Namespaces, o.Namespaces...)
	}
	for _, attr := range []string{"/device/wwid", "/device/vpd_pg83"} { // two paths of SCSI
		if s := l.text(dir + attr); s != "" && strings.HasPrefix(name, "sd") {
			b.self = append(b.self, "disk "+s)
		}
	}
	if all, err := sys.Namespaces(); err == nil {
		for _, ns := range all {
			if ns.Name == name {
				b.self, b.Namespaces = append(b.self, ns.ID.Keys()...), append(b.Namespaces, ns)
			}
		}
	}
	if _, err := os.Stat(sys.Path(dir, "partition")); err == nil {
		if real, err := filepath.EvalSymlinks(sys.Path(dir)); err == nil {
			on(blockBacking(sys, filepath.Base(filepath.Dir(real))))
		}
		return b
	}
	for _, s := range l.list(dir + "/slaves") {
		on(blockBacking(sys, s))
	}
	// A loop device is its file, or the block device that it shows, by another name.
	if file := l.text(dir + "/loop/backing_file"); file != "" {
		if dev := l.deviceOf(file); dev != "" {
			o := blockBacking(sys, dev)
			b.self, b.under = append(b.self, o.self...), append(b.under, o.under...)
			b.Namespaces = append(b.Namespaces, o.Namespaces...)
		} else if key := loopFile(sys, name, file); key != "" {
			b.self = append(b.self, key)
		}
	}
	return b
}

// loopFile is the file behind a loop device. The kernel tells its numbers to whoever may open the
// device; to others its path at the time when it was set up.
func loopFile(sys pci.Sys, name, path string) string {
	fd, err := unix.Open(sys.Path("/dev", name), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		info, err := unix.IoctlLoopGetStatus64(fd)
		_ = unix.Close(fd) // only asked
		if err == nil && info.Inode != 0 {
			return fileKey(info.Device, info.Inode)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(sys.Path(path), &st); err != nil {
		return ""
	}
	return fileKey(uint64(st.Dev), st.Ino)
}
