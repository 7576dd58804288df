package dataset

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"helios/internal/errs"
	"helios/nvme"
)

// signature is a mark that some other use of a disk leaves at a fixed place.
type signature struct {
	what string
	at   int64 // bytes; negative counts from the end of the device
	text string
}

// Offsets are those that libblkid documents in its probers, and the formats' own on-disk
// descriptions. Several formats keep copies at the end of the device.
var signatures = []signature{
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
	{"a bcachefs or bcache device", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{"a bcachefs device", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
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

// probeBytes at each end hold every place that is probed.
const probeBytes = 512 << 10

// findSignature names what lives on the device, or returns "".
func findSignature(head, tail []byte, deviceBytes int64) string {
	at := func(off, n int64) []byte {
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
	for _, s := range signatures {
		if bytes.Equal(at(s.at, int64(len(s.text))), []byte(s.text)) {
			return s.what
		}
	}
	// Linux RAID 1.0 sits 8 KiB before the end, on a 4 KiB bound; 0.90 in the last full 64 KiB.
	raid := []byte("\xfc\x4e\x2b\xa9")
	if bytes.Equal(at((deviceBytes/512-16)&^7*512, 4), raid) || bytes.Equal(at(deviceBytes&^0xffff-0x10000, 4), raid) {
		return "a Linux RAID member"
	}
	// ZFS keeps a ring of uberblocks in each label, the first from 128 KiB on.
	for off := int64(128 << 10); off < 256<<10; off += 1024 {
		if b := at(off, 8); b != nil && (binary.LittleEndian.Uint64(b) == 0x00bab10c || binary.BigEndian.Uint64(b) == 0x00bab10c) {
			return "a ZFS pool"
		}
	}
	// A boot signature alone may be the boot code of a file system; with a used entry it is a
	// table.
	if b := at(0, 512); b != nil && b[510] == 0x55 && b[511] == 0xaa {
		for i := 446; i < 510; i += 16 {
			if b[i+4] != 0 && b[i]&0x7f == 0 {
				return "an MBR partition table"
			}
		}
		return "a boot sector or an empty MBR partition table"
	}
	return ""
}

// checkFree refuses a device that holds something which is not this dataset, unless force
// names its serial number. It returns what the superblocks say.
func (t *target) checkFree(ctx context.Context, d *Dataset, force string) (copies, error) {
	forced := false
	for _, f := range strings.Split(force, ",") {
		forced = forced || f != "" && strings.TrimSpace(f) == t.serial
	}
	c, err := t.readCopies(ctx)
	if err != nil {
		return c, err
	}
	for i, rerr := range c.read {
		if rerr != nil { // not knowing what is there is no licence to overwrite it
			if forced {
				continue
			}
			return c, errs.New(errs.Device, "ssd %s: cannot read superblock %d of 2, so it may hold data: %w; --force %s overwrites it anyway", t.name, i+1, rerr, t.serial)
		}
	}
	if forced {
		return c, nil
	}
	refuse := func(what string) (copies, error) {
		return c, errs.New(errs.Refused, "ssd %s (serial %s) holds %s; loading would destroy it; to do so, add --force %s", t.name, t.serial, what, t.serial)
	}
	ours := false
	for i := range c.sb {
		switch {
		case c.err[i] == nil && c.sb[i].UUID != d.id:
			return refuse(fmt.Sprintf("another dataset, %q (%s)", c.sb[i].Name, c.sb[i].UUID))
		case c.err[i] == nil:
			ours = true
		}
	}
	if ours {
		return c, nil
	}
	for i := range c.sb {
		if c.read[i] == nil && !errors.Is(c.err[i], ErrNoSuperblock) {
			return refuse(fmt.Sprintf("something like a dataset (superblock %d of 2: %v)", i+1, c.err[i]))
		}
	}
	bytesAll := int64(t.lbas) * int64(t.lbaBytes)
	n := min(int64(probeBytes), bytesAll)
	head, tail := make([]byte, n), make([]byte, n)
	if err := t.dev.ReadAt(ctx, 0, head); err != nil {
		return c, errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
	}
	if err := t.dev.ReadAt(ctx, nvme.LBA((bytesAll-n)/int64(t.lbaBytes)), tail); err != nil {
		return c, errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
	}
	if what := findSignature(head, tail, bytesAll); what != "" {
		return refuse(what)
	}
	return c, nil
}
