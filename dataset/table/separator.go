package table

import "bytes"

// Blank stands for white space of any length between columns.
const Blank = ' '

// SeparatorOf returns what is between the columns of a file, by its first line. A semicolon or a
// tab goes before a comma, which may be that of a decimal, and these before a bar, as LDBC has it.
func SeparatorOf(line []byte) byte {
	quoted := false
	has := map[byte]bool{}
	for _, c := range bytes.TrimSpace(line) {
		if c == '"' {
			quoted = !quoted
		}
		has[c] = has[c] || !quoted
	}
	for _, c := range []byte{';', '\t', ',', '|', Blank} {
		if has[c] {
			return c
		}
	}
	return ','
}

// SeparatorNames are for messages.
var SeparatorNames = map[byte]string{';': "semicolons", '\t': "tabs", ',': "commas", '|': "bars",
	Blank: "white space"}
