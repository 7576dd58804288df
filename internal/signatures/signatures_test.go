package signatures

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// image is a device of 2.5 MiB, whose middle no probe reads.
func image() []byte { return make([]byte, 5<<19) }

func all(b []byte) []string {
	n := min(len(b), ProbeBytes)
	return All(b[:n], b[len(b)-n:], int64(len(b)))
}

func TestEveryMark(t *testing.T) {
	require.Empty(t, all(image()))
	for _, m := range Table() {
		b := image()
		offset := m.At
		if offset < 0 {
			offset += int64(len(b))
		}
		copy(b[offset:], m.Text)
		require.Equal(t, []string{m.What}, all(b))
		require.Equal(t, m.What, Find(b[:ProbeBytes], b[len(b)-ProbeBytes:], int64(len(b))))
		for i := range m.Text { // a wrong byte is another thing
			b[int(offset)+i] ^= 1
			require.NotContains(t, all(b), m.What)
			b[int(offset)+i] ^= 1
		}
	}
}

func TestMarksWithoutAPlace(t *testing.T) {
	for name, c := range map[string]struct {
		offset int
		text   string
		want   string
	}{
		"RAID 1.0": {(5<<19/512 - 16) &^ 7 * 512, "\xfc\x4e\x2b\xa9",
			"a Linux RAID member"},
		"RAID 0.90":       {5<<19&^0xffff - 0x10000, "\xfc\x4e\x2b\xa9", "a Linux RAID member"},
		"ZFS":             {128<<10 + 5*1024, "\x0c\xb1\xba\x00\x00\x00\x00\x00", "a ZFS pool"},
		"ZFS, big endian": {256<<10 - 1024, "\x00\x00\x00\x00\x00\xba\xb1\x0c", "a ZFS pool"},
		"MBR": {446 + 4, "\x83" + string(make([]byte, 59)) + "\x55\xaa",
			"an MBR partition table"},
		"empty MBR":        {510, "\x55\xaa", "a boot sector or an empty MBR partition table"},
		"RAID 0.90 nearby": {5<<19&^0xffff - 0x10000 + 4, "\xfc\x4e\x2b\xa9", ""},
	} {
		b := image()
		copy(b[c.offset:], c.text)
		if c.want == "" {
			require.Empty(t, all(b), name)
			continue
		}
		require.Equal(t, []string{c.want}, all(b), name)
	}
	b := image() // several; a boot sector beside a file system is part of it
	copy(b[3:], "NTFS    ")
	copy(b[510:], "\x55\xaa")
	copy(b[4096-10:], "SWAPSPACE2")
	require.Equal(t, []string{"an NTFS file system", "swap space"}, all(b))
	require.Empty(t, all(make([]byte, 512)), "a tiny device")
}

func TestUUIDs(t *testing.T) {
	b := image()
	require.Empty(t, UUIDs(b))
	id := "\x01\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\xab\xcd\xef"
	copy(b[1024+0x38:], "\x53\xef")
	copy(b[1024+0x68:], id)
	copy(b[0x10040:], "_BHRfS_M")
	require.Equal(t, []string{"01234567-89ab-cdef-0123-456789abcdef",
		"00000000-0000-0000-0000-000000000000"}, UUIDs(b))
	require.Empty(t, UUIDs(b[:1030]))
}
