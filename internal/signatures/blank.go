package signatures

import (
	"bytes"
	"fmt"
)

// BlankBytes at each end of a device decide whether it is blank.
const BlankBytes = 1 << 20

// Blank tells whether an end of a device holds nothing: it is all zeroes, as a new file or a
// discarded SSD reads, or all ones, as erased flash does.
func Blank(end []byte) bool {
	return len(end) == 0 || (end[0] == 0 || end[0] == 0xff) && bytes.Count(end, end[:1]) == len(end)
}

// shownBytes of unknown content are shown.
const shownBytes = 16

// Unknown describes the content of a device that Find has no name for, by the first bytes of either
// end that are not blank; it is "" for a blank device. head and tail hold BlankBytes each, or the
// whole of a smaller device. The text is bounded and has no control characters.
func Unknown(head, tail []byte) string {
	if !Blank(head) {
		at := firstByte(head)
		return fmt.Sprintf("something unknown, not empty: byte %d and the next look like %s", at,
			look(head[at:]))
	}
	if !Blank(tail) {
		at := firstByte(tail)
		return fmt.Sprintf(
			"something unknown, not empty: the bytes from %d before its end look like %s",
			len(tail)-at, look(tail[at:]))
	}
	return ""
}

// firstByte tells where content begins behind a lead of zeroes or ones.
func firstByte(b []byte) int {
	for i, c := range b {
		if c != b[0] || c != 0 && c != 0xff {
			return i
		}
	}
	return 0
}

// look shows bytes: a text of three letters or more in quotes, all else in hexadecimal.
func look(b []byte) string {
	b = b[:min(len(b), shownBytes)]
	n := bytes.IndexFunc(b, func(r rune) bool { return r < ' ' || r > '~' })
	if n < 0 {
		n = len(b)
	}
	if n >= 3 {
		return fmt.Sprintf("%q", b[:n])
	}
	return fmt.Sprintf("% x (hexadecimal)", b)
}
