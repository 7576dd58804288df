package ui

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/stretchr/testify/require"
)

type inner struct {
	A int     `json:"a"`
	B float64 `json:"b"`
}

type outer struct {
	inner
	When  time.Time        `json:"when"`
	Never time.Time        `json:"never,omitzero"`
	Since time.Time        `json:"since,omitzero"`
	Skip  string           `json:"-"`
	Empty string           `json:"empty,omitempty"`
	List  []inner          `json:"list"`
	Nil   []int            `json:"nil"`
	Map   map[string]inner `json:"map"`
	Ptr   *inner           `json:"ptr"`
}

// Where nothing is out of JSON's range, an object is what encoding/json makes of it.
func TestEventIsEncodingJSON(t *testing.T) {
	v := outer{inner: inner{1, 2.5}, When: time.Unix(0, 0).UTC(), Since: time.Unix(7, 0).UTC(),
		Skip: "x", List: []inner{{3, 4}}, Map: map[string]inner{"z": {}, "a": {1, 1}},
		Ptr: &inner{5, 6}}
	want, err := json.Marshal(v)
	require.NoError(t, err)
	var out bytes.Buffer
	u := New(&out, &out)
	u.JSON = true
	require.NoError(t, u.Event("x", &v))
	require.Equal(t, `{"event":"x",`+string(want[1:])+"\n", out.String())
}

func TestEvent(t *testing.T) {
	var out bytes.Buffer
	u := New(&out, &out)
	require.NoError(t, u.Event("result", inner{1, 2}))
	require.Empty(t, out.String(), "no JSON was asked for")
	u.JSON = true
	require.NoError(t, u.Event("result", inner{1, math.NaN()}))
	require.NoError(t, u.Event("done", struct{}{}))
	require.Error(t, u.Event("result", 5))
	require.Equal(t, "{\"event\":\"result\",\"a\":1,\"b\":null}\n{\"event\":\"done\"}\n",
		out.String())
	u.Table([]string{"x"}, nil)
	u.Printf("x")
	require.Equal(t, 2, strings.Count(out.String(), "\n"),
		"with JSON, nothing else goes to standard output")
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	u := New(&out, &out)
	u.Table([]string{"name", "size"}, [][]string{{"ssd0", "1 GiB"}, {"longer-name", ""}})
	require.Equal(t, "name          size\nssd0         1 GiB\nlonger-name\n", out.String())
}

func TestPlainProgress(t *testing.T) {
	var out, errw bytes.Buffer
	u := New(&out, &errw)
	now := time.Unix(1000, 0)
	u.now = func() time.Time { return now }
	for i := range 30 {
		u.Progress("load", int64(i), 30)
		now = now.Add(time.Second)
	}
	u.Progress("check", 1, 0)
	require.NoError(t, u.Close())
	lines := strings.Split(strings.TrimSpace(errw.String()), "\n")
	require.Len(t, lines, 6, "%q", lines)
	require.Equal(t, "load: 2 of 30 (7%), 2s, 1/s, 28s left", lines[0])
	require.Empty(t, out.String())

	errw.Reset()
	for i := range 3 { // one takes longer than a second
		u.Progress("epoch 1", int64(i), 10)
		now = now.Add(7500 * time.Millisecond)
	}
	require.Contains(t, errw.String(), "epoch 1: 2 of 10 (20%), 15s, 7.5 s each, 1m0s left\n")

	errw.Reset()
	u.Quiet = true
	u.Progress("load", 0, 30)
	now = now.Add(time.Hour)
	u.Progress("load", 1, 30)
	u.Note("x")
	require.Empty(t, errw.String())
	u.DataNote("left out: %d", 3)
	require.Equal(t, "left out: 3\n", errw.String())
}

// On a terminal a bar is drawn and taken away before a result is written.
func TestBarIsTakenAway(t *testing.T) {
	var both bytes.Buffer
	u := New(&both, &both)
	u.term = true
	u.Progress("load", 1, 10)
	u.Progress("load", 5, 10)
	require.Contains(t, both.String(), "load")
	u.Printf("result")
	up := text.CursorUp.Sprint() + text.EraseLine.Sprint()
	require.True(t, strings.HasSuffix(both.String(), up+"result\n"), "%q", both.String())
	require.Contains(t, both.String(), "load  10% ██░░")
	require.NoError(t, u.Close())
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestLostOutputIsAnError(t *testing.T) {
	u := New(full{}, &bytes.Buffer{})
	u.Printf("x")
	require.ErrorContains(t, u.Close(), "no space left")
}

func TestOneLine(t *testing.T) {
	require.Equal(t, "a; b", OneLine("a\n\n  b\r\n"))
}
