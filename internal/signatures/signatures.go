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

// All names everything that Find looks for, each thing once.
func All(head, tail []byte, deviceBytes int64) []string {
	bytesAt := func(off, n int64) []byte {
		if off >= 0 && off+n <= int64(len(head)) {
			return head[off : off+n]
		}
		// Offsets in tail, which ends at the end of the device.
		if off < 0 {
			off += deviceBytes
		}
		if off -= deviceBytes - int64(len(tail)); off >= 0 && off+n <= int64(len(tail)) {
			return tail[off : off+n]
		}
		return nil
	}
	var out []string
	add := func(what string) {
		if !slices.Contains(out, what) {
			out = append(out, what)
		}
	}
	for _, m := range marks {
		if bytes.Equal(bytesAt(m.At, int64(len(m.Text))), []byte(m.Text)) {
			add(m.What)
		}
	}
	// Linux RAID 1.0 sits 8 KiB before the end, on a 4 KiB bound; 0.90 in the last full 64 KiB.
	raid := []byte("\xfc\x4e\x2b\xa9")
	if bytes.Equal(bytesAt((deviceBytes/512-16)&^7*512, 4), raid) ||
		bytes.Equal(bytesAt(deviceBytes&^0xffff-0x10000, 4), raid) {
		add("a Linux RAID member")
	}
	// ZFS has two labels of 256 KiB at each end, and in the second half of each a ring of
	// uberblocks.
	const label = 256 << 10
	end := deviceBytes &^ (label - 1)
	for off := int64(label / 2); off < label; off += 1024 {
		for _, from := range []int64{0, label, end - 2*label, end - label} {
			if b := bytesAt(max(from, 0)+off, 8); b != nil &&
				(binary.LittleEndian.Uint64(b) == 0x00bab10c ||
					binary.BigEndian.Uint64(b) == 0x00bab10c) {
				add("a ZFS pool")
			}
		}
	}
	// A boot signature alone may be the boot code of a file system; with a used entry it is a
	// table.
	if b := bytesAt(0, 512); b != nil && b[510] == 0x55 && b[511] == 0xaa && len(out) == 0 {
		what := "a boot sector or an empty MBR partition table"
		for i := 446; i < 510; i += 16 {
			if b[i+4] != 0 && b[i]&0x7f == 0 {
				what = "an MBR partition table"
				break
			}
		}
		add(what)
	}
	return out
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
