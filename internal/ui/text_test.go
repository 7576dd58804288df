package ui

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// hostile are texts that a terminal acts on, or that forge lines.
var hostile = []string{
	"\x1b[2J", "\x1b]0;owned\x07", "\x1b]8;;http://evil\x1b\\", "\u009b31m", "\x9b31m",
	"a\nheliosctl: done", "a\rb", "a\tb", "\x00", "\x7f", "\b\b\b",
	"abc\u202edef", "\u2066x\u2069", "\u200b", "\u2028", "\ufeff", "\xff\xfe", "\xe2\x28",
	"\U000e0041", "\U000f0000",
}

// harmless fails for text that holds more than lines of printable characters.
func harmless(t *testing.T, s string) {
	t.Helper()
	require.True(t, utf8.ValidString(s), "%q", s)
	for _, r := range s {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			require.Fail(t, "not printable", "%q in %q", r, s)
		}
	}
}

func TestText(t *testing.T) {
	for _, s := range []string{"", "plain text", "naïve café 日本 → ×", `back\slash "quotes"`} {
		require.Equal(t, s, Text(s))
	}
	require.Equal(t, `\x1b[2J`, Text("\x1b[2J"))
	require.Equal(t, `a\nb\rc\td`, Text("a\nb\rc\td"))
	require.Equal(t, `\u202e\xff\u009b\U000e0041\x7f`, Text("\u202e\xff\u009b\U000e0041\x7f"))
	require.Equal(t, "a\n\tb\\x1b", Lines("a\n\tb\x1b"))
	for _, s := range hostile {
		harmless(t, strings.ReplaceAll(Text(s), "\n", "!"))
	}
}

// Nothing that is printed, in any way, steers the terminal or is without bound.
func TestOutputIsEscapedAndBounded(t *testing.T) {
	for _, s := range append(hostile, strings.Repeat("x", 1<<17), strings.Repeat("é", 1<<17)) {
		for _, asJSON := range []bool{false, true} {
			var out, errw bytes.Buffer
			u := New(&out, &errw)
			u.JSON = asJSON
			now := u.now()
			u.Printf("%s", s)
			u.Printf("%v", errors.New(s))
			u.Note("%s", s)
			u.Error("heliosctl", OneLine(s), 1)
			u.Table([]string{"a", "b"}, [][]string{{s, "1"}, {"x", s}})
			u.now = func() time.Time { return now.Add(plainFirst) }
			u.Progress(s, 0, 1)
			u.now = func() time.Time { return now.Add(10 * plainFirst) }
			u.Progress(s, 1, 2)
			require.NoError(t, u.Event("m", map[string]any{"v": s, s: 1}))
			require.NoError(t, u.Event("e", map[string]any{"v": s}))
			require.NoError(t, u.Close())
			harmless(t, out.String())
			harmless(t, errw.String())
			require.LessOrEqual(t, strings.Count(errw.String(), "\n"), 4, "a line was forged: %q",
				errw.String())
			if !asJSON {
				require.Equal(t, 5, strings.Count(out.String(), "\n"), "a line was forged: %q",
					out.String())
				require.Less(t, out.Len(), 1<<16)
				continue
			}
			var got struct{ V string }
			first, _, _ := strings.Cut(out.String(), "\n")
			require.NoError(t, json.Unmarshal([]byte(first), &got))
			if utf8.ValidString(s) {
				require.Equal(t, s, got.V, "JSON keeps the value")
			}
		}
	}
}
