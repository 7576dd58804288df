package ui

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Names, paths, models, serial numbers, owners: much of what is shown comes from disks, files and
// other processes. Printed raw it could steer the terminal (ESC, CSI, OSC, carriage return), forge
// lines (newline) or turn text around (right-to-left override), so everything passes through Text
// on its way out.

const (
	maxCell = 1 << 10 // bytes of a table's cell
	maxLine = 1 << 14 // bytes of a line: longer than any of ours
)

// Text shows s with everything that is no printable character as Go would write it in a string:
// \x1b, \n, \u202e. Printable text stays as it is. Bytes that are no UTF-8 become \xNN.
func Text(s string) string { return escape(s, "") }

// lineText is Text for a line of our own, whose tabs are ours.
func lineText(s string) string { return bound(escape(s, "\t"), maxLine) }

// Lines is Text for a whole document of our own: it keeps newlines and tabs.
func Lines(s string) string { return escape(s, "\n\t") }

func escape(s, keep string) string {
	clean := true
	for i := 0; i < len(s) && clean; i++ {
		clean = s[i] >= ' ' && s[i] <= '~' || strings.IndexByte(keep, s[i]) >= 0
	}
	if clean {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsPrint(r) || r < utf8.RuneSelf && strings.IndexByte(keep, byte(r)) >= 0:
			b.WriteString(s[i : i+n])
		default:
			q := strconv.QuoteRune(r)
			b.WriteString(q[1 : len(q)-1])
		}
		i += n
	}
	return b.String()
}

// bound cuts a text that is longer than most bytes, and says by how much.
func bound(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	end := limit
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return fmt.Sprintf("%s… (%d more bytes)", s[:end], len(s)-end)
}

// escapeJSON writes what encoding/json leaves as it is and a terminal may act on, DEL, C1 controls
// and invisible characters, as \uNNNN. Outside strings JSON has only printable ASCII, so that the
// value stays the same.
func escapeJSON(b []byte) []byte {
	clean := true
	for _, c := range b {
		clean = clean && c < 0x7f
	}
	if clean {
		return b
	}
	var out []byte
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		switch {
		case unicode.IsPrint(r):
			out = append(out, b[i:i+n]...)
		case r >= 0x10000:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		i += n
	}
	return out
}
