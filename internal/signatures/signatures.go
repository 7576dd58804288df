// Package signatures knows the marks that other uses of a disk leave on it: partition tables, file
// systems, RAID, LVM, encryption, swap.
package signatures

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
)

// Mark is a text that some use of a disk leaves at a fixed place.
type Mark struct {
	What string
	At   int64 // bytes; negative counts from the end of the device
	Text string
}

// Offsets are those that libblkid documents in its probers, and the formats' own on-disk
// descriptions. Several formats keep copies at the end of the device.
var marks = []Mark{
	{"a GPT partition table", 512, "EFI PART"},
	{"a GPT partition table", 4096, "EFI PART"},
	{"a GPT partition table (its backup)", -512, "EFI PART"},
	{"a GPT partition table (its backup)", -4096, "EFI PART"},
	{"an ext2/3/4 file system", 1024 + 0x38, "\x53\xef"},
	{"an XFS file system", 0, "XFSB"},
	{"a Btrfs file system", 0x10040, "_BHRfS_M"},
	{"an F2FS file system", 1024, "\x10\x20\xf5\xf2"},
	{"an NTFS file system", 3, "NTFS    "},
	{"an exFAT file system", 3, "EXFAT   "},
	{"a FAT file system", 0x36, "FAT1"},
	{"a FAT file system", 0x52, "FAT32   "},
	{"an ISO 9660 file system", 0x8001, "CD001"},
	{"a SquashFS file system", 0, "hsqs"},
	{"a ReiserFS file system", 0x10034, "ReIsEr"},
	{"a JFS file system", 0x8000, "JFS1"},
	{"a bcachefs or bcache device", 4096 + 24,
		"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{"a bcachefs device", 4096 + 24,
		"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
	{"LUKS encryption", 0, "LUKS\xba\xbe"},
	{"LUKS encryption", 0x4000, "SKUL\xba\xbe"},
	{"an LVM physical volume", 0, "LABELONE"},
	{"an LVM physical volume", 512, "LABELONE"},
	{"an LVM physical volume", 1024, "LABELONE"},
	{"an LVM physical volume", 1536, "LABELONE"},
	{"a Linux RAID member", 0, "\xfc\x4e\x2b\xa9"},
	{"a Linux RAID member", 4096, "\xfc\x4e\x2b\xa9"},
	{"an Intel RAID member", -1024, "Intel Raid ISM Cfg Sig. "},
	{"swap space", 4096 - 10, "SWAPSPACE2"},
	{"swap space", 4096 - 10, "SWAP-SPACE"},
	{"swap space", 16384 - 10, "SWAPSPACE2"},
	{"swap space", 65536 - 10, "SWAPSPACE2"},
	{"a Ceph BlueStore device", 0, "bluestore block device"},
	{"an SPDK blobstore", 0, "SPDKBLOB"},
	{"a dm-verity device", 0, "verity\x00\x00"},
	{"a dm-integrity device", 0, "integrt\x00"},
}

// ProbeBytes at each end of a device hold every place that is looked at.
const ProbeBytes = 512 << 10

// Table is a copy of the marks at fixed places. Linux RAID 0.90 and 1.0, ZFS and MBR tables, whose
// places depend on the device or which are no single text, are not in it.
func Table() []Mark { return slices.Clone(marks) }

// Find names what lives on a device of deviceBytes, whose first and last bytes head and tail are
// (ProbeBytes each, or the whole of a smaller device), or returns "".
func Find(head, tail []byte, deviceBytes int64) string {
	if all := All(head, tail, deviceBytes); len(all) > 0 {
		return all[0]
	}
	return ""
}

// ends are the first and the last bytes of a device.
type ends struct {
	head, tail []byte
	size       int64
}

// bytes returns n bytes of the device from offset on, which counts from its end where it is
// negative; nil where they are in neither end.
func (e *ends) bytes(offset, n int64) []byte {
	if offset >= 0 && offset+n <= int64(len(e.head)) {
		return e.head[offset : offset+n]
	}
	if offset < 0 {
		offset += e.size
	}
	if offset -= e.size - int64(len(e.tail)); offset >= 0 && offset+n <= int64(len(e.tail)) {
		return e.tail[offset : offset+n]
	}
	return nil
}

// All names everything that Find looks for, each thing once.
func All(head, tail []byte, deviceBytes int64) []string {
	e := &ends{head, tail, deviceBytes}
	var out []string
	add := func(what string) {
		if !slices.Contains(out, what) {
			out = append(out, what)
		}
	}
	for _, m := range marks {
		if bytes.Equal(e.bytes(m.At, int64(len(m.Text))), []byte(m.Text)) {
			add(m.What)
		}
	}
	if e.raid() {
		add("a Linux RAID member")
	}
	if e.zfs() {
		add("a ZFS pool")
	}
	if what := e.mbr(); what != "" && len(out) == 0 {
		add(what)
	}
	return out
}

// raid looks for the superblocks of Linux RAID: 1.0 sits 8 KiB before the end, on a 4 KiB bound;
// 0.90 in the last full 64 KiB.
func (e *ends) raid() bool {
	mark := []byte("\xfc\x4e\x2b\xa9")
	return bytes.Equal(e.bytes((e.size/512-16)&^7*512, 4), mark) ||
		bytes.Equal(e.bytes(e.size&^0xffff-0x10000, 4), mark)
}

// zfs looks for uberblocks: ZFS has two labels of 256 KiB at each end, and in the second half of
// each a ring of them.
func (e *ends) zfs() bool {
	const label, mark = 256 << 10, 0x00bab10c
	end := e.size &^ (label - 1)
	for offset := int64(label / 2); offset < label; offset += 1024 {
		for _, from := range []int64{0, label, end - 2*label, end - label} {
			b := e.bytes(max(from, 0)+offset, 8)
			if b != nil && (binary.LittleEndian.Uint64(b) == mark ||
				binary.BigEndian.Uint64(b) == mark) {
				return true
			}
		}
	}
	return false
}

// mbr describes a boot sector. A boot signature alone may be the boot code of a file system; with a
// used entry it is a table.
func (e *ends) mbr() string {
	b := e.bytes(0, 512)
	if b == nil || b[510] != 0x55 || b[511] != 0xaa {
		return ""
	}
	for i := 446; i < 510; i += 16 {
		if b[i+4] != 0 && b[i]&0x7f == 0 {
			return "an MBR partition table"
		}
	}
	return "a boot sector or an empty MBR partition table"
}

// UUIDs are the identifiers of file systems whose superblocks lie in head: ext2/3/4, XFS, Btrfs.
func UUIDs(head []byte) []string {
	var out []string
	for _, f := range []struct {
		magicAt int
		magic   string
		idAt    int
	}{{1024 + 0x38, "\x53\xef", 1024 + 0x68}, {0, "XFSB", 32}, {0x10040, "_BHRfS_M", 0x10020}} {
		if len(head) < max(f.magicAt+len(f.magic), f.idAt+16) ||
			string(head[f.magicAt:f.magicAt+len(f.magic)]) != f.magic {
			continue
		}
		u := head[f.idAt : f.idAt+16]
		out = append(out, fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]))
	}
	return out
}
