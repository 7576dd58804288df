// Package diskuse says in words who uses a disk: what must be ended before an SSD can be taken from
// the kernel, and what would be lost.
package diskuse

// Kind is the sort of a use.
type Kind string

// The sorts of use. Mount to PF are live, the others are content.
const (
	// a file system on the disk, a partition or something stacked on it
	Mount Kind = "mounted"
	Swap  Kind = "swap"  // swap space that is on
	LVM   Kind = "lvm"   // a logical volume stands on it
	Crypt Kind = "crypt" // an open encrypted volume
	// device-mapper multipath, or another path to the namespace that the kernel has
	Multipath Kind = "multipath"
	Mapper    Kind = "dm"     // any other device-mapper device
	RAID      Kind = "raid"   // a Linux RAID array that is assembled
	Holder    Kind = "held"   // another block driver: bcache, drbd, …
	Loop      Kind = "loop"   // a loop device reads and writes it
	Target    Kind = "target" // exported by the kernel's NVMe target
	ZFS       Kind = "zfs"    // a member of an imported pool
	Open      Kind = "open"   // a process has it open
	Busy      Kind = "busy"   // the kernel says that somebody holds it, and nothing says who
	Boot      Kind = "boot"   // the machine runs or boots from it
	VFs       Kind = "vfs"    // virtual functions depend on the controller
	PF        Kind = "pf"     // the controller is a virtual function of one that is in use

	Partitions Kind = "partitioned" // it has partitions
	Signature  Kind = "signature"   // a mark of a file system, RAID, LVM, …
)

// Use is one use of a disk.
type Use struct {
	Kind Kind `json:"kind"`
	// the block device that is used: the disk, a partition, dm-0, …; "" where there is none
	Device string `json:"device"`
	Text   string `json:"text"` // "is mounted at /data (ext4)"
	// Live uses are there now: to take the disk away would hurt whoever it is, and no --force may.
	// The others are content, which the owner of the serial number may give up.
	Live bool `json:"live"`
}

// String is a sentence of device and text.
func (u Use) String() string {
	if u.Device == "" {
		return u.Text
	}
	return "/dev/" + u.Device + " " + u.Text
}
