// Package timeline writes what happened when, as a Chrome trace ("JSON object format"), which
// Perfetto (ui.perfetto.dev) and chrome://tracing open. Times are in nanoseconds of the caller's
// clock, wall or virtual, which the file names.
package timeline

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"sync"
	"time"
)

// The clocks that times may be of.
const (
	Wall    = "wall"
	Virtual = "virtual" // every time is modelled
)

// maxLanes bounds how many lines of the picture a track may take. A track that has more spans at
// once draws the rest over each other.
const maxLanes = 64

// pid is the one process of the picture.
const pid = 1

// Recorder streams a trace: it keeps no span, only a few bytes for each track. It is safe for
// concurrent use. A nil Recorder records nothing, so that a caller needs no second path; it asks
// On before it gathers arguments that cost something.
type Recorder struct {
	origin time.Time

	mu     sync.Mutex
	w      *bufio.Writer
	line   []byte
	tracks map[string]*track
	tids   int
	events int64
	err    error // the first one; nothing is written after it
	closed bool
}

// track is a line of the picture, or several: viewers draw spans of one line that overlap as if
// one had called the other, so that a span that overlaps its line's latest goes to the next line.
type track struct {
	order int
	lanes []lane
}

type lane struct {
	tid int
	end int64
}

// New starts a trace in w; clock is Wall or Virtual. For Wall, NS gives a moment's time.
func New(w io.Writer, clock string) *Recorder {
	r := &Recorder{origin: time.Now(), w: bufio.NewWriterSize(w, 64<<10),
		tracks: map[string]*track{}}
	name, other := "heliosctl", map[string]any{"clock": clock}
	if clock == Virtual {
		name, other["modelled"] = "heliosctl, virtual clock: every time is modelled", true
	}
	head, err := json.Marshal(other)
	r.keep(err)
	_, err = fmt.Fprintf(r.w, "{\"displayTimeUnit\":\"ns\",\"otherData\":%s,\"traceEvents\":[",
		head)
	r.keep(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.meta("process_name", 0, "name", name)
	return r
}

// On reports whether anything is recorded.
func (r *Recorder) On() bool { return r != nil }

// NS is a moment of the wall clock as this trace counts: from when New was called.
func (r *Recorder) NS(t time.Time) int64 {
	if r == nil {
		return 0
	}
	return t.Sub(r.origin).Nanoseconds()
}

// Tracks fixes the order, from the top, in which tracks are drawn; others follow as they come.
func (r *Recorder) Tracks(names ...string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range names {
		r.track(n)
	}
}

// Span records that name took durNS from startNS on a track. Values of args may be anything that
// JSON has.
func (r *Recorder) Span(trackName, name string, startNS, durNS int64, args map[string]any) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.writable() {
		return
	}
	durNS = max(durNS, 0)
	tid := r.lane(trackName, startNS, startNS+durNS)
	b := r.begin(`"ph":"X","name":`, name)
	b = appendMicros(append(b, `,"ts":`...), startNS)
	b = appendMicros(append(b, `,"dur":`...), durNS)
	b = r.where(b, tid)
	if len(args) > 0 {
		a, err := json.Marshal(args) // keys come out sorted
		if err != nil {
			r.keep(fmt.Errorf("timeline: span %s of %s: %w", name, trackName, err))
			return
		}
		b = append(append(b, `,"args":`...), a...)
	}
	r.end(b)
}

// Counter records that the value of name is v from ns on. Counters of one track are drawn on top
// of each other.
func (r *Recorder) Counter(trackName, name string, ns int64, v float64) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.writable() {
		return
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		r.keep(fmt.Errorf("timeline: counter %s of %s is %v, which JSON does not have", name,
			trackName, v))
		return
	}
	b := r.begin(`"ph":"C","name":`, trackName)
	b = appendMicros(append(b, `,"ts":`...), ns)
	b = r.where(b, 0)
	b = appendString(append(b, `,"args":{`...), name)
	b = strconv.AppendFloat(append(b, ':'), v, 'g', -1, 64)
	r.end(append(b, '}'))
}

// Close ends the trace and reports what went wrong in writing it. It does not close the writer.
// Later events are not recorded.
func (r *Recorder) Close() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.closed = true
		_, err := r.w.WriteString("\n]}\n")
		r.keep(err)
		r.keep(r.w.Flush())
	}
	return r.err
}

func (r *Recorder) writable() bool { return r.err == nil && !r.closed }

func (r *Recorder) keep(err error) {
	if err != nil {
		r.err = errors.Join(r.err, err)
	}
}

// track finds or makes a track.
func (r *Recorder) track(name string) *track {
	t := r.tracks[name]
	if t == nil {
		t = &track{order: len(r.tracks)}
		r.tracks[name] = t
	}
	return t
}

// lane finds the first line of a track that is free from start on, or begins one.
func (r *Recorder) lane(name string, start, end int64) (tid int) {
	t := r.track(name)
	earliest := 0
	for i := range t.lanes {
		if t.lanes[i].end <= start {
			t.lanes[i].end = end
			return t.lanes[i].tid
		}
		if t.lanes[i].end < t.lanes[earliest].end {
			earliest = i
		}
	}
	if len(t.lanes) == maxLanes {
		t.lanes[earliest].end = max(t.lanes[earliest].end, end)
		return t.lanes[earliest].tid
	}
	r.tids++
	t.lanes = append(t.lanes, lane{r.tids, end})
	label := name
	if n := len(t.lanes); n > 1 {
		label = name + " (" + strconv.Itoa(n) + ")"
	}
	r.meta("thread_name", r.tids, "name", label)
	r.meta("thread_sort_index", r.tids, "sort_index", t.order*maxLanes+len(t.lanes)-1)
	return r.tids
}

// meta writes a metadata event.
func (r *Recorder) meta(what string, tid int, key string, value any) {
	a, err := json.Marshal(map[string]any{key: value})
	r.keep(err)
	b := r.begin(`"ph":"M","name":`, what)
	r.end(append(append(r.where(b, tid), `,"args":`...), a...))
}

func (r *Recorder) begin(head, name string) []byte {
	b := r.line[:0]
	if r.events > 0 {
		b = append(b, ',')
	}
	r.events++
	return appendString(append(append(b, "\n{"...), head...), name)
}

func (r *Recorder) where(b []byte, tid int) []byte {
	b = strconv.AppendInt(append(b, `,"pid":`...), pid, 10)
	return strconv.AppendInt(append(b, `,"tid":`...), int64(tid), 10)
}

func (r *Recorder) end(b []byte) {
	r.line = append(b, '}')
	_, err := r.w.Write(r.line)
	r.keep(err)
}

// appendMicros writes ns in the format's unit, microseconds, with nothing lost.
func appendMicros(b []byte, ns int64) []byte {
	if ns < 0 {
		b, ns = append(b, '-'), -ns
	}
	b = strconv.AppendInt(b, ns/1000, 10)
	if f := ns % 1000; f != 0 {
		b = append(b, '.', byte('0'+f/100), byte('0'+f/10%10), byte('0'+f%10))
	}
	return b
}

// appendString quotes a string as JSON does, which strconv does not.
func appendString(b []byte, s string) []byte {
	q, err := json.Marshal(s)
	if err != nil { // no string fails
		return append(b, `""`...)
	}
	return append(b, q...)
}
