package signatures

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPlaces(t *testing.T) {
	for _, size := range []int64{0, 512, 2 * mib, 2*mib + 4096, 3*mib + 512, 8 * mib, 64 * mib, gib,
		1000204886016, 16 << 40, 1 << 61, 1<<63 - 1} {
		draws := 0
		got := Places(size, func(n int64) int64 { draws++; return n - 1 })
		require.LessOrEqual(t, len(got), 2600, "bounded: %d bytes", size)
		require.True(t, slices.IsSorted(got))
		for _, offset := range got {
			require.Zero(t, offset%SampleBytes)
			require.GreaterOrEqual(t, offset, int64(BlankBytes))
			require.LessOrEqual(t, offset+SampleBytes, size-BlankBytes)
		}
		if size < 2*mib+SampleBytes {
			require.Empty(t, got)
			continue
		}
		require.Positive(t, draws)
		gaps := int64(0) // none is much larger than a part
		for i, offset := range append(got[1:], (size-BlankBytes)&^(SampleBytes-1)) {
			gaps = max(gaps, offset-got[i])
		}
		require.LessOrEqual(t, gaps/2, (size-2*BlankBytes)/samples+SampleBytes, "%d bytes", size)
	}
	// Superblocks that were seen on real file systems.
	for name, c := range map[string]struct{ size, offset int64 }{
		"ext4, group 1":                {1000204886016, 32768 * 4096},
		"ext4, group 343":              {1000204886016, 343 * 32768 * 4096},
		"ext4, blocks of 1 KiB":        {256 * mib, 8 * mib}, // its block 8193 is in there
		"Btrfs":                        {1000204886016, 256 * gib},
		"XFS of 512 MB, 4 groups":      {512 * mib, 128 * mib},
		"XFS of 1 TB, third group":     {1000204886016, 2 * 61047662 * 4096},
		"XFS of 8 TB, second group":    {8 << 40, 1<<40 - 4096},
		"LUKS2 with a header of 4 MiB": {gib, 4 * mib},
	} {
		got := Places(c.size, func(int64) int64 { return 0 })
		require.Contains(t, got, c.offset, name)
	}
	require.Contains(t, Places(64*mib, func(n int64) int64 { return n - 1 }),
		Places(64*mib, func(n int64) int64 { return n - 1 })[0])
}

func TestSampled(t *testing.T) {
	with := func(offset int, text string) []byte {
		b := make([]byte, SampleBytes)
		copy(b[offset:], text)
		return b
	}
	require.Empty(t, Sampled(mib, make([]byte, SampleBytes)))
	for _, c := range []struct {
		block []byte
		want  string
	}{
		{with(0x38, "\x53\xef"), "an ext2/3/4 file system (its copy at byte 1048576)"},
		{with(0x438, "\x53\xef"), "an ext2/3/4 file system (its copy at byte 1048576)"},
		{with(0x40, "_BHRfS_M"), "a Btrfs file system (its copy"},
		{with(0, "SKUL\xba\xbe"), "LUKS encryption (its copy"},
		{with(0, "XFSB"), "an XFS file system (at byte 1048576)"},
		{with(512, "LABELONE"), "an LVM physical volume (at byte"},
		{with(100, "some text"), `byte 1048676 and the next look like "some text"`},
		{with(0, strings.Repeat("\xff", SampleBytes)), "look like ff ff"},
		{with(SampleBytes-1, "\x01"), "byte 1052671 and the next look like 01"},
	} {
		require.Contains(t, Sampled(mib, c.block), c.want)
	}
}
