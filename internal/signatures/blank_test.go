package signatures

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBlank(t *testing.T) {
	zeros, ones := make([]byte, 1<<20), bytes.Repeat([]byte{0xff}, 1<<20)
	require.True(t, Blank(zeros))
	require.False(t, Blank(ones), "all ones may be somebody's")
	require.True(t, Blank(nil))
	require.False(t, Blank(bytes.Repeat([]byte{1}, 4096)), "one byte over and over is content")
	for _, offset := range []int{0, 1, 511, 1<<20 - 1} {
		for _, b := range [][]byte{bytes.Clone(zeros), bytes.Clone(ones)} {
			b[offset] ^= 0x10
			require.False(t, Blank(b), "byte %d", offset)
		}
	}
}

func TestUnknown(t *testing.T) {
	zeros := make([]byte, 4096)
	require.Empty(t, Unknown(zeros, zeros))
	with := func(offset int, text string) []byte {
		b := bytes.Clone(zeros)
		copy(b[offset:], text)
		return b
	}
	for _, c := range []struct {
		head, tail []byte
		want       string
	}{
		{with(0, "SQLite format 3\x00"), zeros,
			"byte 0 and the next look like \"SQLite format 3\""},
		{with(0, "Dear reader, this is a long text"), zeros,
			`byte 0 and the next look like "Dear reader, thi"`},
		{with(257, "ustar\x0000"), zeros, "byte 257 and the next look like \"ustar\""},
		{zeros, bytes.Repeat([]byte{0xff}, 4096), "4096 before its end look like ff ff"},
		{zeros, with(4000, "x"), "the bytes from 96 before its end look like 78 00 00"},
		{with(0, "PK\x03\x04"), zeros, "look like 50 4b 03 04 00"},
		{bytes.Repeat([]byte{7}, 4096), zeros, "byte 0 and the next look like 07 07"},
		{with(0, "\x1b[2J\x1b]0;owned\x07"), zeros, "1b 5b 32 4a"},
	} {
		got := Unknown(c.head, c.tail)
		require.Contains(t, got, c.want)
		require.Less(t, len(got), 140)
		require.NotContains(t, got, "\x1b")
	}
}
