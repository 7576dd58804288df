package ui

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/schollz/progressbar/v3"

	"helios/internal/units"
)

// Plain progress lines: the first only once a stage has lasted so long, so that short work
// stays silent, then one at this interval. Lines of JSON come more often, and a live view is drawn
// so often.
const (
	plainFirst = 2 * time.Second
	plainEvery = 5 * time.Second
	linesEvery = 500 * time.Millisecond
	liveEvery  = 200 * time.Millisecond
)

// Progress reports done of total units (total 0 = not known) of a stage. A call with another
// stage ends the previous one. It is cheap enough to be called for every chunk.
func (u *UI) Progress(stage string, done, total int64) { u.ProgressOf(stage, stage, done, total) }

// ProgressOf is Progress of a whole that has parts: the part is shown, and what is left counts for
// the whole.
func (u *UI) ProgressOf(whole, part string, done, total int64) {
	if u.Quiet {
		return
	}
	whole, part = lineText(whole), lineText(part)
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	if whole != u.stage || done < u.done {
		u.begin(whole, done)
		if u.term && !u.Lines {
			u.bar = newBar(u.err, part, total)
		}
	}
	u.done = done
	if u.bar != nil {
		u.bar.Describe(part)
		if total > 0 && total != u.bar.GetMax64() {
			u.bar.ChangeMax64(total)
		}
		_ = u.bar.Set64(done) // drawing is best effort
		return
	}
	took := now.Sub(u.started)
	if u.Lines {
		if now.Sub(u.last) >= linesEvery || done == total {
			u.last = now
			u.progressLine(part, done, total, took)
		}
		return
	}
	if u.term || took < plainFirst || now.Sub(u.last) < plainEvery {
		return
	}
	u.last = now
	rate := float64(done-u.first) / took.Seconds()
	if total > 0 {
		left := ""
		if d, known := u.left(done, total, took); known {
			left = fmt.Sprintf(", %s left", d.Round(time.Second))
		}
		fmt.Fprintf(u.err, "%s: %d of %d (%.0f%%), %s, %s/s%s\n", part, done, total,
			100*float64(done)/float64(total), took.Round(time.Second),
			units.FormatCount(rate), left)
	} else {
		fmt.Fprintf(u.err, "%s: %d, %s, %s/s\n", part, done, took.Round(time.Second),
			units.FormatCount(rate))
	}
}

// left is what the rest of a stage takes at the pace so far. Call with mu held.
func (u *UI) left(done, total int64, took time.Duration) (time.Duration, bool) {
	if done <= u.first || done >= total {
		return 0, false
	}
	return time.Duration(float64(took) * float64(total-done) / float64(done-u.first)), true
}

// ProgressLine is a line of progress for scripts.
type ProgressLine struct {
	Event   string  `json:"event"` // "progress"
	Stage   string  `json:"stage"`
	Done    int64   `json:"done"`
	Total   int64   `json:"total"`   // 0: not known
	Seconds float64 `json:"seconds"` // since the stage began
	// Left is what the rest takes at the pace so far; absent where nobody knows.
	Left float64 `json:"left_seconds,omitempty"`
}

func (u *UI) progressLine(part string, done, total int64, took time.Duration) {
	l := ProgressLine{Event: "progress", Stage: part, Done: done, Total: total,
		Seconds: took.Seconds()}
	if d, known := u.left(done, total, took); known {
		l.Left = d.Seconds()
	}
	u.line(l)
}

// line writes a line of JSON to standard error. Call with mu held.
func (u *UI) line(v any) {
	b, err := json.Marshal(finite(reflect.ValueOf(v)))
	if err == nil {
		_, _ = u.err.Write(append(escapeJSON(b), '\n')) // as best it can, like all progress
	}
}

func newBar(w io.Writer, stage string, total int64) *progressbar.ProgressBar {
	if total <= 0 {
		total = -1
	}
	return progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(stage),
		progressbar.OptionSetWidth(20), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(), progressbar.OptionSetPredictTime(true),
		progressbar.OptionShowCount(), progressbar.OptionShowIts())
}

// Live draws a view of several lines over the one before, on a terminal, a few times a second:
// rows are names and what there is to say, of which draw makes them. Elsewhere draw's first row is
// a plain line now and then, and with Lines nothing is drawn. done and total are those of the
// whole, from which draw hears what is left.
func (u *UI) Live(whole string, done, total int64, draw func(took, left time.Duration) [][]string) {
	if u.Quiet {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	if whole != u.stage || done < u.done {
		u.begin(whole, done)
	}
	u.done = done
	took := now.Sub(u.started)
	left, _ := u.left(done, total, took)
	switch {
	case u.Lines:
		if now.Sub(u.last) >= linesEvery {
			u.last = now
			u.progressLine(whole, done, total, took)
		}
	case !u.term:
		if took >= plainFirst && now.Sub(u.last) >= plainEvery {
			u.last = now
			var words []string
			for _, r := range draw(took, left) {
				words = append(words, strings.Join(strings.Fields(strings.Join(r, " ")), " "))
			}
			fmt.Fprintln(u.err, lineText(strings.Join(words, "; ")))
		}
	case now.Sub(u.last) >= liveEvery:
		u.last = now
		u.drawLive(draw(took, left))
	}
}

// drawLive draws a view over the one before. Call with mu held.
func (u *UI) drawLive(rows [][]string) {
	width := u.errWide
	if width == 0 {
		width = 80
	}
	lines := strings.Split(strings.TrimRight(layOut(nil, rows, 0), "\n"), "\n")
	u.eraseLive()
	for _, l := range lines {
		fmt.Fprintln(u.err, text.Snip(l, width-1, "…"))
	}
	u.drawn = len(lines)
}

// eraseLive takes the view away, so that other lines can follow. Call with mu held.
func (u *UI) eraseLive() {
	for ; u.drawn > 0; u.drawn-- {
		fmt.Fprint(u.err, text.CursorUp.Sprint()+text.EraseLine.Sprint())
	}
}

// begin begins a stage of which done is done. Call with mu held.
func (u *UI) begin(stage string, done int64) {
	u.endStage()
	u.stage, u.started, u.last, u.first, u.done = stage, u.now(), time.Time{}, done, done
}

// hide takes the bar or the view away until the stage goes on. Call with mu held.
func (u *UI) hide() {
	if u.bar != nil {
		_ = u.bar.Clear()
	}
	u.eraseLive()
}

// endStage takes the bar or the view away, so that the next line starts on a clean one. Call with
// mu held.
func (u *UI) endStage() {
	if u.bar != nil {
		_ = u.bar.Clear()
		_ = u.bar.Exit()
		u.bar = nil
	}
	u.eraseLive()
	u.stage = ""
}

// Bar draws a share as a bar of so many characters.
func Bar(share float64, width int) string {
	n := 0
	if share > 0 { // which NaN never is
		n = int(min(share, 1)*float64(width) + 0.5)
	}
	return strings.Repeat("█", n) + strings.Repeat("░", width-n)
}

// Spark draws values as a line of small bars, from the least to the most.
func Spark(v []float64) string {
	marks := []rune("▁▂▃▄▅▆▇█")
	if len(v) == 0 {
		return ""
	}
	least, most := slices.Min(v), slices.Max(v)
	var b strings.Builder
	for _, x := range v {
		at := 0.0
		if most > least { // which NaN never is
			at = (x - least) / (most - least) * float64(len(marks)-1)
		}
		b.WriteRune(marks[int(min(max(at, 0), float64(len(marks)-1)))])
	}
	return b.String()
}
