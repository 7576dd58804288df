package ui

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/stretchr/testify/require"
)

// Columns that are not due stay out until --wide asks for them.
func TestColumns(t *testing.T) {
	columns := []Column{{Name: "a", About: "the first"}, {Name: "same", Shown: IfVaries},
		{Name: "vary", Shown: IfVaries}, {Name: "none", Shown: IfAny}, {Name: "some", Shown: IfAny},
		{Name: "more", About: "the last", Shown: OnlyWide}}
	rows := [][]string{{"x", "1", "1", "-", "0", "m"}, {"y", "1", "2", "0", "z", "m"}}
	show := func(wide bool, rows [][]string) string {
		var out bytes.Buffer
		u := New(&out, &out)
		u.Wide = wide
		u.Columns(columns, rows)
		first, _, _ := strings.Cut(out.String(), "\n")
		return strings.Join(strings.Fields(first), " ")
	}
	require.Equal(t, "a vary some", show(false, rows))
	require.Equal(t, "a same vary none some more", show(true, rows))
	require.Equal(t, "a", show(false, nil))
	require.True(t, HasWide(columns))
	require.False(t, HasWide(columns[:1]))
	text := Explain(columns, "(on demand)")
	require.Contains(t, text, "  a     the first\n")
	require.Contains(t, text, "more  the last (on demand)")
}

// A table keeps to the terminal's width as long as its columns can be narrowed, and loses no word.
func TestTableFitsTheTerminal(t *testing.T) {
	words := strings.Repeat("some words ", 20)
	rows := [][]string{{"ssd0", words, "12 MiB", words}, {"ssd1", "short", "7", ""}}
	for _, width := range []int{80, 120} {
		got := layOut([]string{"SSD", "what", "size", "why"}, rows, width)
		for _, l := range strings.Split(got, "\n") {
			require.LessOrEqual(t, text.StringWidth(l), width, l)
		}
		require.Equal(t, 40, strings.Count(got, "some"))
		require.Contains(t, got, "12 MiB")
	}
	facts := layOut(nil, [][]string{{"name", words}}, 60)
	for i, l := range strings.Split(strings.TrimSpace(facts), "\n") {
		require.LessOrEqual(t, len(l), 60)
		require.Equal(t, i > 0, strings.HasPrefix(l, "      "), "%q hangs", l)
	}
	require.Equal(t, "one two\nthree", fold("one two three", 8))
	require.Equal(t, "one two three", fold("one two three", 0))
}

// A live view is drawn over the one before on a terminal, and makes way for other lines.
func TestLive(t *testing.T) {
	var errw bytes.Buffer
	u := New(&bytes.Buffer{}, &errw)
	now := time.Unix(1000, 0)
	u.now = func() time.Time { return now }
	view := func(done int64) {
		u.Live("train", done, 10, func(took, left time.Duration) [][]string {
			return [][]string{{"epoch", took.String() + " " + left.String()}, {"loss", "1"}}
		})
	}
	view(0)
	now = now.Add(3 * time.Second)
	view(3)
	require.Equal(t, "epoch 3s 7s; loss 1\n", errw.String(), "a plain line where there is no terminal")
	errw.Reset()
	u.term, u.errWide = true, 10
	now = now.Add(time.Second)
	view(4)
	require.Equal(t, "epoch  4…\nloss   1\n", errw.String())
	now = now.Add(time.Millisecond)
	view(4)
	require.Equal(t, 2, strings.Count(errw.String(), "\n"), "not drawn more often than one can see")
	errw.Reset()
	u.Note("a note")
	up := text.CursorUp.Sprint() + text.EraseLine.Sprint()
	require.Equal(t, up+up+"a note\n", errw.String())
	now = now.Add(time.Second)
	view(5)
	u.Printf("result")
	errw.Reset()
	require.NoError(t, u.Close())
	require.Empty(t, errw.String(), "nothing is left to take away")
}

// The time left counts for the whole, whatever is printed in between, and its parts are named.
func TestProgressOfAWhole(t *testing.T) {
	var errw bytes.Buffer
	u := New(&bytes.Buffer{}, &errw)
	now := time.Unix(1000, 0)
	u.now = func() time.Time { return now }
	for i := range int64(20) {
		u.ProgressOf("train", []string{"epoch 1 of 2", "epoch 2 of 2"}[i/10], i, 20)
		u.Printf("result %d", i)
		now = now.Add(time.Second)
	}
	require.Contains(t, errw.String(), "epoch 1 of 2: 7 of 20 (35%), 7s, 1/s, 13s left\n")
	require.Contains(t, errw.String(), "epoch 2 of 2: 17 of 20 (85%), 17s, 1/s, 3s left\n")
	errw.Reset()
	u.ProgressOf("train", "again", 0, 20)
	now = now.Add(2 * time.Second)
	u.ProgressOf("train", "again", 10, 20)
	require.Contains(t, errw.String(), "again: 10 of 20 (50%), 2s, 5/s, 2s left")
}

// Scripts and journals get progress, notes and the error as JSON; all lines begin alike.
func TestLogJSON(t *testing.T) {
	var errw bytes.Buffer
	u := New(&bytes.Buffer{}, &errw)
	u.LogJSON = true
	now := time.Unix(1000, 0)
	u.now = func() time.Time { return now }
	u.Progress("load", 0, 4)
	now = now.Add(time.Second)
	u.Progress("load", 1, 4)
	u.Note("a\n%s", "note")
	u.Error("heliosctl load", "no\nroom", 1)
	require.Equal(t, `{"time":"1970-01-01T00:16:40Z","level":"info","msg":"progress","stage":"load","done":0,"total":4,"seconds":0}
{"time":"1970-01-01T00:16:41Z","level":"info","msg":"progress","stage":"load","done":1,"total":4,"seconds":1,"left_seconds":3}
{"time":"1970-01-01T00:16:41Z","level":"info","msg":"a; note"}
{"time":"1970-01-01T00:16:41Z","level":"error","msg":"no; room","verb":"heliosctl load","exit_code":1}
`, errw.String())
}

func TestBarAndSpark(t *testing.T) {
	require.Equal(t, "██░░", Bar(0.5, 4))
	require.Equal(t, "░░", Bar(math.NaN(), 2))
	require.Equal(t, "██", Bar(7, 2))
	require.Equal(t, "█▁▄", Spark([]float64{3, 1, 2}))
	require.Equal(t, "▁▁", Spark([]float64{math.NaN(), 1}))
	require.Empty(t, Spark(nil))
}
