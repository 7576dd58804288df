package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"helios/internal/htmlreport"
	"helios/internal/ui"
	"helios/internal/units"
	"helios/sched/report"
)

// watch follows a run of train: it tells progress of the whole, draws the view of --live, and knows
// what evaluation read beside training.
type watch struct {
	*trainer
	far progressOfRuns

	page  *htmlreport.Live // that is told; nil: there is none
	told  time.Time        // when it last was
	start time.Time        // of the run, which had done so much by then
	first int64

	pass             string // that was last heard of
	now              report.Partial
	losses           []float64 // of the epochs that ended
	numbers          bool      // are learnt: no seed is right or wrong
	trained, beside  traffic   // of passes that ended, by kind
	lately           traffic   // as of a while ago
	at               time.Time // when that was
	perBytes, perCmd float64   // bytes and commands a second since

	began   time.Time // the time in which a rate is measured
	before  int64     // commands of the pass until then
	fastest float64   // commands a second of the fastest such time; 0: no pass was so long
}

// rateTime is the time that SSDs work for a rate. The commands of a set are counted at its end, so
// a shorter time would have too many or too few.
const rateTime = 250 * time.Millisecond

// traffic counts the bytes and commands of SSDs.
type traffic struct{ bytes, commands int64 }

func (t *traffic) add(p report.Partial) {
	t.bytes += p.BytesSSD
	t.commands += p.Commands
}

func newWatch(t *trainer) *watch {
	return &watch{trainer: t, far: progressOfRuns{ui: t.ui, whole: "train", runs: 1,
		epochs: int64(max(t.cfg.WithDefaults().Epochs, 1)), silent: t.live}}
}

func (w *watch) observer() report.Observer {
	o := w.env.observer()
	o.Step, o.Live = w.far.step, w.hear
	return o
}

// hear takes over what a pass has come to.
func (w *watch) hear(pass string, p report.Partial) {
	if pass != w.pass {
		w.endPass()
		w.began, w.before = time.Now(), p.Commands
	} else if d := time.Since(w.began); d >= rateTime {
		w.fastest = max(w.fastest, float64(p.Commands-w.before)/d.Seconds())
		w.began, w.before = time.Now(), p.Commands
	}
	w.pass, w.now = pass, p
	if w.live {
		w.ui.Live("train", w.far.done, w.far.total, w.view)
	}
	if now := time.Now(); w.page != nil && now.Sub(w.told) >= pageEvery {
		if w.told = now; w.start.IsZero() {
			w.start, w.first = now, w.far.done
		}
		took, left := now.Sub(w.start), time.Duration(0)
		if n := w.far.done - w.first; n > 0 {
			left = time.Duration(float64(took) * float64(w.far.total-w.far.done) / float64(n))
		}
		w.page.Show(w.view(took, left))
	}
}

// pageEvery is the time after which a page hears of a pass again.
const pageEvery = 500 * time.Millisecond

func (w *watch) endPass() {
	if strings.HasPrefix(w.pass, "epoch ") {
		w.trained.add(w.now)
	} else {
		w.beside.add(w.now)
	}
	w.pass, w.now = "", report.Partial{}
}

func (w *watch) ended(r report.EpochResult) { w.losses = append(w.losses, r.Loss) }

// besideRows say what SSDs gave beside training, so that all sums add up.
func (w *watch) besideRows(io report.IOResult) (rows [][]string) {
	w.endPass()
	text := func(t traffic) string {
		return fmt.Sprintf("%s in %s commands", units.FormatBytes(t.bytes),
			units.FormatCount(float64(t.commands)))
	}
	if w.beside.commands > 0 {
		rows = append(rows, []string{"SSDs in evaluation", text(w.beside)})
	}
	rest := traffic{-w.trained.bytes - w.beside.bytes, -w.trained.commands - w.beside.commands}
	for _, s := range io.SSDs {
		rest.bytes += s.Bytes
		rest.commands += s.Commands
	}
	if rest.commands > 0 && rest.bytes > 0 {
		rows = append(rows, []string{"SSDs before training", text(rest) + ", to fill tiers"})
	}
	return rows
}

// view is the text of --live.
func (w *watch) view(took, left time.Duration) [][]string {
	p := w.now
	far := float64(w.far.done) / float64(max(w.far.total, 1))
	head := fmt.Sprintf("%s  %s %.0f%%  %s", w.far.part, ui.Bar(far, 20), 100*far,
		took.Round(time.Second))
	if left > 0 {
		head += fmt.Sprintf(", %s left", left.Round(time.Second))
	}
	rows := [][]string{{cmp.Or(w.cfg.Mode, "train"), head}}
	if p.Counted > 0 {
		loss := fmt.Sprintf("%.4f", p.Loss())
		if !w.numbers {
			loss += fmt.Sprintf(", accuracy %.2f%%", 100*float64(p.Correct)/float64(p.Counted))
		}
		if n := len(w.losses); n > 0 {
			loss += "; epochs before " + ui.Spark(w.losses[max(n-20, 0):])
		}
		rows = append(rows, []string{"loss", loss})
	}
	if norm := p.GradNorm(); norm != nil {
		steps := fmt.Sprintf("lr %.3g, gradient norm %.3g", p.LR, *norm)
		if p.Clipped > 0 {
			steps += fmt.Sprintf("; %s clipped", share(int64(p.Clipped), int64(p.Steps)))
		}
		rows = append(rows, []string{"steps", steps})
	}
	all := p.RowsGPU + p.RowsCPU + p.RowsSSD
	rows = append(rows, []string{"rows", fmt.Sprintf("GPU tier %s, CPU tier %s, SSDs %s of %s",
		share(p.RowsGPU, all), share(p.RowsCPU, all), share(p.RowsSSD, all),
		units.FormatCount(float64(all)))})
	rows = append(rows, []string{"SSDs", w.rates()})
	return append(rows, w.stages()...)
}

// rates are the SSDs' of the last second or so.
func (w *watch) rates() string {
	sum := w.trained
	sum.bytes += w.beside.bytes + w.now.BytesSSD
	sum.commands += w.beside.commands + w.now.Commands
	now := time.Now()
	if d := now.Sub(w.at).Seconds(); w.at.IsZero() {
		w.at, w.lately = now, sum
	} else if d >= 1 {
		w.perBytes = float64(sum.bytes-w.lately.bytes) / d
		w.perCmd = float64(sum.commands-w.lately.commands) / d
		w.at, w.lately = now, sum
	}
	text := fmt.Sprintf("%s/s, %s IOPS; %s by now", units.FormatBytes(int64(w.perBytes)),
		units.FormatCount(w.perCmd), units.FormatBytes(sum.bytes))
	if w.now.Retries+w.now.Timeouts > 0 {
		text += fmt.Sprintf("; %d retries, %d timeouts", w.now.Retries, w.now.Timeouts)
	}
	return text
}

// stageNames are the stages in the order of a mini-batch's way.
var stageNames = []string{"sample", "topology", "inspect", "lookup", "submit", "complete", "gather", "train"}

// stages say which share of the time each stage was busy.
func (w *watch) stages() (rows [][]string) {
	by := w.now.Stages.ByName()
	for _, name := range stageNames {
		if by[name] == 0 || w.now.Seconds == 0 {
			continue
		}
		busy := by[name] / w.now.Seconds
		rows = append(rows, []string{"  " + name, fmt.Sprintf("%s %4.0f%% busy",
			ui.Bar(busy, 20), 100*busy)})
	}
	return rows
}
