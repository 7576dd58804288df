package ui

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"

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
	}
	u.done = done
	took := now.Sub(u.started)
	switch {
	case u.LogJSON:
		if now.Sub(u.last) >= linesEvery || done == total {
			u.last = now
			u.progressLine(part, done, total, took)
		}
	case u.term:
		if now.Sub(u.last) >= liveEvery {
			u.last = now
			u.drawBar(part, done, total, took)
		}
	case took >= plainFirst && now.Sub(u.last) >= plainEvery:
		u.last = now
		of := ""
		if total > 0 {
			of = fmt.Sprintf(" of %d (%.0f%%)", total, 100*float64(done)/float64(total))
		}
		fmt.Fprintf(u.err, "%s: %d%s, %s\n", part, done, of, u.pace(done, total, took))
	}
}

// pace returns a stage's time, its rate and what the rest takes. Call with mu held.
func (u *UI) pace(done, total int64, took time.Duration) string {
	n, seconds := float64(done-u.first), took.Seconds()
	text := took.Round(time.Second).String() + ", "
	if n > 0 && seconds > n { // people count the seconds of one
		text += units.FormatSeconds(seconds/n) + " each"
	} else {
		text += units.FormatCount(n/max(seconds, 1e-9)) + "/s"
	}
	if d, known := u.left(done, total, took); known {
		text += fmt.Sprintf(", %s left", d.Round(time.Second))
	}
	return text
}

// drawBar draws a stage as one line over the one before. Call with mu held.
func (u *UI) drawBar(part string, done, total int64, took time.Duration) {
	line := fmt.Sprintf("%s: %d, %s", part, done, u.pace(done, total, took))
	if total > 0 {
		share := float64(done) / float64(total)
		line = fmt.Sprintf("%s %3.0f%% %s %d of %d, %s", part, 100*share, Bar(share, 20), done,
			total, u.pace(done, total, took))
	}
	u.draw([]string{line})
}

// left returns the time that the rest of a stage takes at the pace so far. Call with mu held.
func (u *UI) left(done, total int64, took time.Duration) (time.Duration, bool) {
	if done <= u.first || done >= total {
		return 0, false
	}
	return time.Duration(float64(took) * float64(total-done) / float64(done-u.first)), true
}

// progress has the fields of a line of progress for scripts.
type progress struct {
	Stage   string  `json:"stage"`
	Done    int64   `json:"done"`
	Total   int64   `json:"total"`   // 0: not known
	Seconds float64 `json:"seconds"` // since the stage began
	// Left is the time for the rest at the pace so far; absent where nobody knows.
	Left float64 `json:"left_seconds,omitempty"`
}

func (u *UI) progressLine(part string, done, total int64, took time.Duration) {
	l := progress{Stage: part, Done: done, Total: total, Seconds: took.Seconds()}
	if d, known := u.left(done, total, took); known {
		l.Left = d.Seconds()
	}
	u.log(info, "progress", l)
}

// Live draws a view of several lines over the one before, on a terminal, a few times a second:
// rows are names and what there is to say, of which draw makes them. Elsewhere draw's first row is
// a plain line now and then, and with LogJSON nothing is drawn. done and total are those of the
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
	case u.LogJSON:
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
		u.draw(strings.Split(strings.TrimRight(layOut(nil, draw(took, left), 0), "\n"), "\n"))
	}
}

// draw draws lines over those before. Call with mu held.
func (u *UI) draw(lines []string) {
	width := u.errWide
	if width == 0 {
		width = 80
	}
	u.erase()
	for _, l := range lines {
		fmt.Fprintln(u.err, text.Snip(l, width-1, "…"))
	}
	u.drawn = len(lines)
}

// erase takes the bar or the view away, so that other lines can follow. Call with mu held.
func (u *UI) erase() {
	for ; u.drawn > 0; u.drawn-- {
		fmt.Fprint(u.err, text.CursorUp.Sprint()+text.EraseLine.Sprint())
	}
}

// begin begins a stage of which done is done. Call with mu held.
func (u *UI) begin(stage string, done int64) {
	u.endStage()
	u.stage, u.started, u.last, u.first, u.done = stage, u.now(), time.Time{}, done, done
}

// endStage takes the bar or the view away. Call with mu held.
func (u *UI) endStage() {
	u.erase()
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
	least, largest := slices.Min(v), slices.Max(v)
	var b strings.Builder
	for _, x := range v {
		height := 0.0
		if largest > least { // which NaN never is
			height = (x - least) / (largest - least) * float64(len(marks)-1)
		}
		b.WriteRune(marks[int(min(max(height, 0), float64(len(marks)-1)))])
	}
	return b.String()
}
