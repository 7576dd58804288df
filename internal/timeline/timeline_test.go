package timeline

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// trace is the format as its description has it: every event has ph, name, ts, pid, tid; a
// complete event ("X") a dur.
type trace struct {
	Unit   string         `json:"displayTimeUnit"`
	Other  map[string]any `json:"otherData"`
	Events []event        `json:"traceEvents"`
}

type event struct {
	Ph   string         `json:"ph"`
	Name string         `json:"name"`
	TS   json.Number    `json:"ts"`
	Dur  json.Number    `json:"dur"`
	PID  *int           `json:"pid"`
	TID  *int           `json:"tid"`
	Args map[string]any `json:"args"`
}

func read(t *testing.T, b []byte) trace {
	t.Helper()
	var tr trace
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&tr), "%s", b)
	_, err := d.Token()
	require.ErrorIs(t, err, io.EOF)
	for _, e := range tr.Events {
		require.NotNil(t, e.PID)
		require.NotNil(t, e.TID)
		require.NotEmpty(t, e.Name)
	}
	return tr
}

func (tr trace) of(ph string) (out []event) {
	for _, e := range tr.Events {
		if e.Ph == ph {
			out = append(out, e)
		}
	}
	return out
}

// labels are the tracks' names by line.
func (tr trace) labels() map[int]string {
	m := map[int]string{}
	for _, e := range tr.of("M") {
		if e.Name == "thread_name" {
			m[*e.TID] = e.Args["name"].(string)
		}
	}
	return m
}

func TestFormat(t *testing.T) {
	var b bytes.Buffer
	r := New(&b, Virtual)
	r.Tracks("sample", "train")
	r.Span("train", "T", 1_234_567, 1_000, map[string]any{"batch": 3, "name": `a"b<` + "\n"})
	r.Span("sample", "S1", 5, 0, nil)
	r.Counter("flight", "reads", 2_000, 1.5)
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "closing again is nothing")
	tr := read(t, b.Bytes())
	require.Equal(t, map[string]any{"clock": "virtual", "modelled": true}, tr.Other)
	x := tr.of("X")
	require.Len(t, x, 2)
	require.Equal(t, "1234.567", x[0].TS.String())
	require.Equal(t, "1", x[0].Dur.String())
	require.Equal(t, map[string]any{"batch": 3.0, "name": "a\"b<\n"}, x[0].Args)
	require.Equal(t, "0.005", x[1].TS.String())
	require.Equal(t, "0", x[1].Dur.String())
	c := tr.of("C")
	require.Len(t, c, 1)
	require.Equal(t, "flight", c[0].Name)
	require.Equal(t, map[string]any{"reads": 1.5}, c[0].Args)
	order := map[string]float64{}
	for _, e := range tr.of("M") {
		if e.Name == "thread_sort_index" {
			order[tr.labels()[*e.TID]] = e.Args["sort_index"].(float64)
		}
	}
	require.Less(t, order["sample"], order["train"], "Tracks gives the order, not the first span")

	b.Reset()
	require.NoError(t, New(&b, Wall).Close())
	tr = read(t, b.Bytes())
	require.Equal(t, map[string]any{"clock": "wall"}, tr.Other)
	require.Empty(t, tr.of("X"))
}

func TestMicros(t *testing.T) {
	for ns, want := range map[int64]string{0: "0", 1: "0.001", 999: "0.999", 1000: "1",
		1010: "1.010", -1500: "-1.500", math.MaxInt64: "9223372036854775.807"} {
		require.Equal(t, want, string(appendMicros(nil, ns)))
	}
}

// Spans of one line never overlap, so that no viewer draws one inside another.
func TestOverlappingSpansGetLines(t *testing.T) {
	var b bytes.Buffer
	r := New(&b, Wall)
	for i := range int64(100) {
		r.Span("reads", "C", i*10, 25, nil)
	}
	require.NoError(t, r.Close())
	tr := read(t, b.Bytes())
	end := map[int]float64{}
	for _, e := range tr.of("X") {
		ts, err := e.TS.Float64()
		require.NoError(t, err)
		dur, err := e.Dur.Float64()
		require.NoError(t, err)
		require.GreaterOrEqual(t, ts+1e-9, end[*e.TID])
		end[*e.TID] = ts + dur
	}
	require.Equal(t, map[int]string{1: "reads", 2: "reads (2)", 3: "reads (3)"}, tr.labels())

	b.Reset()
	r = New(&b, Wall)
	for range 10 * maxLanes {
		r.Span("reads", "C", 0, 1000, nil)
	}
	require.NoError(t, r.Close())
	require.Len(t, read(t, b.Bytes()).labels(), maxLanes, "lines are bounded")
}

func TestConcurrent(t *testing.T) {
	var b bytes.Buffer
	r := New(&b, Wall)
	var wg sync.WaitGroup
	const workers, each = 8, 500
	for w := range workers {
		wg.Go(func() {
			for i := range int64(each) {
				r.Span(fmt.Sprint("stream ", w), "op", r.NS(time.Now()), i, map[string]any{"i": i})
				r.Counter("c", fmt.Sprint(w), r.NS(time.Now()), float64(i))
			}
		})
	}
	wg.Wait()
	require.NoError(t, r.Close())
	r.Span("late", "x", 0, 1, nil) // not a panic, not a broken file
	tr := read(t, b.Bytes())
	require.Len(t, tr.of("X"), workers*each)
	require.Len(t, tr.of("C"), workers*each)
	require.Len(t, tr.labels(), workers)
}

func TestNilRecordsNothing(t *testing.T) {
	var r *Recorder
	require.False(t, r.On())
	r.Tracks("a")
	r.Span("a", "b", 0, 1, nil)
	r.Counter("a", "b", 0, 1)
	require.Zero(t, r.NS(time.Now()))
	require.NoError(t, r.Close())
	require.Zero(t,
		testing.AllocsPerRun(100,
			func() { r.Span("a", "b", 0, 1, nil); r.Counter("a", "b", 0, 1) }))
}

func TestErrorsSurfaceAtClose(t *testing.T) {
	full := errors.New("no space left")
	r := New(failing{full}, Wall)
	for range 10_000 {
		r.Span("a", "b", 0, 1, nil)
	}
	require.ErrorIs(t, r.Close(), full)

	r = New(io.Discard, Wall)
	r.Counter("a", "b", 0, math.NaN())
	require.ErrorContains(t, r.Close(), "NaN")
	r = New(io.Discard, Wall)
	r.Span("a", "b", 0, 1, map[string]any{"f": func() {}})
	require.ErrorContains(t, r.Close(), "span b of a")
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// A long run's trace costs memory for its tracks, not for its spans.
func TestBoundedMemory(t *testing.T) {
	r := New(io.Discard, Wall)
	live := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	r.Span("a", "b", 0, 1, nil)
	before := live()
	for i := range int64(200_000) {
		r.Span("a", "b", i, 1, nil)
		r.Counter("c", "d", i, 1)
	}
	after := live()
	require.NoError(t, r.Close())
	require.Less(t, after, before+1<<20)
}

func BenchmarkSpan(b *testing.B) {
	r := New(io.Discard, Wall)
	args := map[string]any{"batch": 3}
	for i := 0; b.Loop(); i++ {
		r.Span("a", "b", int64(i), 1, args)
	}
}
