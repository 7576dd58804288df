// Package ui writes what heliosctl shows: results on standard output, as tables for people or as
// one JSON object per line; progress on standard error, as a bar on a terminal and as plain,
// infrequent lines elsewhere.
package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// UI writes for one command. It is safe for concurrent use.
type UI struct {
	JSON  bool // results as JSON lines; tables and text are left out
	Quiet bool // no progress, no notes but those on data
	// LogJSON has all that goes to standard error as JSON lines, for journals and scripts.
	LogJSON bool
	Wide    bool // tables with all their columns
	// Closed, where it is set, is called when the reader of results has closed its pipe.
	Closed func()

	mu      sync.Mutex
	out     io.Writer
	err     io.Writer
	term    bool
	width   int // of the terminal that out is; 0: it is none
	errWide int // likewise, of err
	now     func() time.Time
	stage   string
	started time.Time
	last    time.Time
	done    int64
	first   int64 // done when the stage began: what an earlier run did is no measure of the rate
	drawn   int   // lines of a bar or a live view that are on the terminal
	outErr  error
}

// New writes results to out, progress and notes to err.
func New(out, err io.Writer) *UI {
	return &UI{out: out, err: err, term: IsTerminal(err),
		width: terminalWidth(out), errWide: terminalWidth(err), now: time.Now}
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Note tells people something on standard error, such as a fallback that was chosen.
func (u *UI) Note(format string, args ...any) {
	if !u.Quiet {
		u.DataNote(format, args...)
	}
}

// DataNote is Note for what changes the meaning of results, such as lines of input that were left
// out: it is shown whatever the flags say.
func (u *UI) DataNote(format string, args ...any) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.erase()
	text := OneLine(fmt.Sprintf(format, args...))
	if u.LogJSON {
		u.log(info, text, nil)
		return
	}
	fmt.Fprintln(u.err, fold(lineText(text), u.errWide))
}

// Printf writes a line of a result for people; with JSON it writes nothing.
func (u *UI) Printf(format string, args ...any) {
	if u.JSON {
		return
	}
	u.write([]byte(fold(lineText(fmt.Sprintf(format, args...)), u.width) + "\n"))
}

// Event writes v, a struct or a map, as one JSON line with "event" as its first field; without JSON
// it writes nothing. Floats that JSON can't hold (NaN, infinities) become null.
func (u *UI) Event(event string, v any) error {
	if !u.JSON {
		return nil
	}
	b, err := json.Marshal(finite(reflect.ValueOf(v)))
	if err != nil {
		return fmt.Errorf("json: %w", err)
	}
	if len(b) < 2 || b[0] != '{' {
		return fmt.Errorf("json: event %s is no object: %s", event, b)
	}
	head, err := json.Marshal(event)
	if err != nil {
		return fmt.Errorf("json: %w", err)
	}
	line := append([]byte(`{"event":`), head...)
	if len(b) > 2 {
		line = append(line, ',')
	}
	line = append(line, b[1:]...)
	u.write(append(escapeJSON(line), '\n'))
	return nil
}

func (u *UI) write(b []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.erase()
	if u.outErr != nil {
		return
	}
	if _, u.outErr = u.out.Write(b); errors.Is(u.outErr, unix.EPIPE) && u.Closed != nil {
		u.Closed()
	}
}

// Close takes a remaining bar away and returns the first error of writing results: output that
// went to a full disk or a closed pipe must not pass for whole.
func (u *UI) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.endStage()
	if u.outErr != nil {
		return fmt.Errorf("write results: %w", u.outErr)
	}
	return nil
}

// Error writes the reason of a command's failure, to standard error whatever the flags say.
func (u *UI) Error(name, text string, exitCode int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.endStage()
	if u.LogJSON {
		u.log("error", OneLine(text), struct {
			Verb     string `json:"verb"`
			ExitCode int    `json:"exit_code"`
		}{name, exitCode})
		return
	}
	fmt.Fprintln(u.err, fold(name+": "+lineText(text), u.errWide))
}

const info = "info"

// log writes a line of JSON to standard error: when, how bad and what, and the fields of a struct.
// Call with mu held.
func (u *UI) log(level, msg string, fields any) {
	line := object{{"time", u.now().UTC()}, {"level", level}, {"msg", msg}}
	if fields != nil {
		line = structFields(reflect.ValueOf(fields), line)
	}
	b, err := json.Marshal(line)
	if err == nil {
		_, _ = u.err.Write(append(escapeJSON(b), '\n')) // as best it can, like all progress
	}
}

// OneLine folds a text of several lines into one.
func OneLine(s string) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' })
	out := make([]string, 0, len(lines))
	for _, l := range lines {
		if l = strings.TrimSpace(l); l != "" {
			out = append(out, l)
		}
	}
	return strings.Join(out, "; ")
}

// finite copies v for encoding/json with NaN and infinities replaced by nil, honouring json
// tags (name, omitempty, omitzero, "-") and embedded structs without a name.
func finite(v reflect.Value) any {
	switch v.Kind() {
	case reflect.Invalid:
		return nil
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil
		}
		if m, ok := v.Interface().(json.Marshaler); ok {
			return m
		}
		return finite(v.Elem())
	case reflect.Float32, reflect.Float64:
		if f := v.Float(); math.IsNaN(f) || math.IsInf(f, 0) {
			return nil
		}
		return v.Interface()
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && (v.IsNil() || v.Type().Elem().Kind() == reflect.Uint8) {
			return v.Interface()
		}
		out := make([]any, v.Len())
		for i := range out {
			out[i] = finite(v.Index(i))
		}
		return out
	case reflect.Map:
		out := object{}
		for _, k := range v.MapKeys() {
			out = append(out, field{fmt.Sprint(k.Interface()), finite(v.MapIndex(k))})
		}
		out.sort()
		return out
	case reflect.Struct:
		if m, ok := v.Interface().(json.Marshaler); ok {
			return m
		}
		return structFields(v, object{})
	default:
		return v.Interface()
	}
}

func structFields(v reflect.Value, out object) object {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		if f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct {
			out = structFields(v.Field(i), out)
			continue
		}
		if f.Anonymous && name == "" && f.Type.Kind() == reflect.Pointer &&
			f.Type.Elem().Kind() == reflect.Struct {
			if !v.Field(i).IsNil() {
				out = structFields(v.Field(i).Elem(), out)
			}
			continue
		}
		if !f.IsExported() || strings.Contains(opts, "omitempty") && emptyValue(v.Field(i)) ||
			strings.Contains(opts, "omitzero") && v.Field(i).IsZero() {
			continue
		}
		if name == "" {
			name = f.Name
		}
		out = append(out, field{name, finite(v.Field(i))})
	}
	return out
}

// emptyValue is encoding/json's meaning of empty: a struct never is.
func emptyValue(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Array, reflect.Map, reflect.Slice, reflect.String:
		return v.Len() == 0
	case reflect.Struct:
		return false
	default:
		return v.IsZero()
	}
}
