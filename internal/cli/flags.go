// Package cli has what the verbs of heliosctl share: the names of flags in messages, arguments, the
// table of options, output, and the way to open a machine's devices. cmd/heliosctl has the verbs.
package cli

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

var optionKey = regexp.MustCompile(`\boption ([a-z][a-z0-9]*(?:-[a-z0-9]+)*)`)

// NameFlags writes the options that a library's message names (errs.Key) as the flags of a verb:
// "option cpu-cache" becomes "--cpu-cache". A name that is no flag of the verb stays as it is. So
// does what stands in a path or in one of own, the user's own words: a folder may be called "option
// model".
func NameFlags(text string, flags []cli.Flag, own ...string) string {
	return NameAllFlags(text, flags, func(string) string { return "" }, own...)
}

// NameAllFlags is NameFlags that asks elsewhere for names that are no flags of the verb. An empty
// answer leaves the name as it is.
func NameAllFlags(text string, flags []cli.Flag, elsewhere func(name string) string,
	own ...string) string {
	var kept []string
	for _, w := range own {
		if optionKey.MatchString(w) && strings.Contains(text, w) {
			text = strings.ReplaceAll(text, w, placeholder(len(kept)))
			kept = append(kept, w)
		}
	}
	var b strings.Builder
	at := 0
	for _, m := range optionKey.FindAllStringSubmatchIndex(text, -1) {
		name := text[m[2]:m[3]]
		inPath := m[0] > 0 && text[m[0]-1] == '/' || m[1] < len(text) && text[m[1]] == '/'
		if inPath {
			continue
		}
		flag := "--" + name
		if !HasFlag(flags, name) {
			flag = elsewhere(name)
		}
		if flag != "" {
			b.WriteString(text[at:m[0]] + flag)
			at = m[1]
		}
	}
	text = b.String() + text[at:]
	for i, w := range kept {
		text = strings.ReplaceAll(text, placeholder(i), w)
	}
	return text
}

// HasFlag tells whether one of flags has a name.
func HasFlag(flags []cli.Flag, name string) bool {
	return slices.ContainsFunc(flags,
		func(f cli.Flag) bool { return slices.Contains(f.Names(), name) })
}

// placeholder stands for a word of the user; no message has a zero byte.
func placeholder(i int) string { return fmt.Sprintf("\x00%d\x00", i) }
