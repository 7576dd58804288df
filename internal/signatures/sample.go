package signatures

import (
	"fmt"
	"slices"
)

// SampleBytes are read at each place of a sample.
const SampleBytes = 4096

// samples is the number of parts of a device's middle, with two places in each.
const samples = 1024

const (
	mib = 1 << 20
	gib = 1 << 30
)

// Places lists, in order, where the middle of a device is looked at to see whether it is blank:
// what lies between the BlankBytes at its ends. Wiping the ends of a disk does not wipe what
// was on it. The number of places is bounded, however large the device: the places where formats
// keep copies of their superblocks, each MiB of the beginning, which fills up first, and two in
// each of 1,024 equal parts, the second one at random. draw gives a number below n.
func Places(deviceBytes int64, draw func(n int64) int64) []int64 {
	first, last := int64(BlankBytes), (deviceBytes-BlankBytes)&^(SampleBytes-1)-SampleBytes
	if last < first {
		return nil
	}
	out := copies(deviceBytes)
	for offset := first; offset <= 128*mib; offset += mib {
		out = append(out, offset)
	}
	blocks := (last-first)/SampleBytes + 1
	for i := range int64(samples) {
		// in blocks, so that no product overflows
		from, to := blocks/samples*i+blocks%samples*i/samples,
			blocks/samples*(i+1)+blocks%samples*(i+1)/samples
		if from < to {
			out = append(out, first+from*SampleBytes, first+(from+draw(to-from))*SampleBytes)
		}
	}
	out = append(out, last)
	out = slices.DeleteFunc(out, func(offset int64) bool { return offset < first || offset > last })
	slices.Sort(out)
	return slices.Compact(out)
}

// copies are the places of superblocks, or their copies, in the middle of a device.
func copies(deviceBytes int64) []int64 {
	out := []int64{
		64 * mib, 256 * gib, // Btrfs
		1 * mib, 2 * mib, 4 * mib, // LUKS2's second header, by the size of the first
		3 * gib,                                  // NTFS's master file table
		1 * gib, 10 * gib, 100 * gib, 1000 * gib, // Ceph BlueStore's labels
	}
	// ext2/3/4: the first block of group 1 and of the powers of 3, 5 and 7, and of the last group;
	// groups of 8 blocks for each byte of a block of 1, 2 or 4 KiB.
	for block := int64(1024); block <= 4096; block *= 2 {
		group := 8 * block * block
		out = append(out, group, (deviceBytes/group-1)*group, deviceBytes/group*group)
		for _, base := range []int64{3, 5, 7} {
			for k := base; k < deviceBytes/group; k *= base {
				out = append(out, k*group)
			}
		}
	}
	// XFS: the beginning of each allocation group. mkfs.xfs makes a power of two of them, and of
	// 1 TiB less a block from 4 TiB on.
	const block, mostGroup = 4096, 1<<40 - 4096
	for parts := int64(2); parts <= 32; parts *= 2 {
		blocks := deviceBytes / block
		for k := range parts {
			out = append(out, k*((blocks+parts-1)/parts)*block)
		}
	}
	for k := int64(1); k <= 32 && k <= deviceBytes/mostGroup; k++ {
		out = append(out, k*mostGroup)
	}
	for i := range out {
		out[i] &^= SampleBytes - 1
	}
	return out
}

// deepMarks are those of copies, by their place in a sample.
var deepMarks = []Mark{
	{"an ext2/3/4 file system", 0x38, "\x53\xef"},
	{"an ext2/3/4 file system", 1024 + 0x38, "\x53\xef"},
	{"a Btrfs file system", 0x40, "_BHRfS_M"},
	{"LUKS encryption", 0, "SKUL\xba\xbe"},
	{"an NTFS file system", 0, "FILE0"},
}

// Sampled describes what a sample at a place of a device holds, or is "" for a blank one.
func Sampled(offset int64, block []byte) string {
	if Blank(block) {
		return ""
	}
	for _, m := range deepMarks {
		if end := int(m.At) + len(m.Text); end <= len(block) &&
			string(block[m.At:end]) == m.Text {
			return fmt.Sprintf("%s (its copy at byte %d)", m.What, offset)
		}
	}
	if what := Find(block, nil, 0); what != "" {
		return fmt.Sprintf("%s (at byte %d)", what, offset)
	}
	i := firstByte(block)
	return fmt.Sprintf("something unknown, not empty: byte %d and the next look like %s",
		offset+int64(i), look(block[i:]))
}
