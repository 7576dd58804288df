package signatures

import (
	"bytes"
	"fmt"
)

// BlankBytes at each end of a device are read whole to decide whether it is blank, and samples of
// what lies between (Places).
const BlankBytes = 1 << 20

// Blank reports whether a part of a device holds nothing: it is all zeroes, as a new file or a
// discarded SSD reads. All ones may be content as well as erased flash.
func Blank(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }

// shownBytes of unknown content are shown.
const shownBytes = 16

// Unknown describes the content of a device that Find has no name for, by the first bytes of either
// end that are not blank; it is "" where both are blank. head and tail hold BlankBytes each, or the
// whole of a smaller device. The text is bounded and has no control characters.
func Unknown(head, tail []byte) string {
	if !Blank(head) {
		first := firstByte(head)
		return fmt.Sprintf("something unknown, not empty: byte %d and the next look like %s", first,
			look(head[first:]))
	}
	if !Blank(tail) {
		first := firstByte(tail)
		return fmt.Sprintf(
			"something unknown, not empty: the bytes from %d before its end look like %s",
			len(tail)-first, look(tail[first:]))
	}
	return ""
}

// firstByte returns where content begins behind a lead of zeroes.
func firstByte(b []byte) int {
	return max(bytes.IndexFunc(b, func(r rune) bool { return r != 0 }), 0)
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
