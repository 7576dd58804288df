package main

import (
	"fmt"
	"strconv"
	"strings"

	"helios/internal/ui"
)

// progressOfRuns shows the progress of training, over all epochs of one run or of several: the time
// that is left is that of the whole, and does not begin anew with an epoch or a run.
type progressOfRuns struct {
	ui     *ui.UI
	whole  string // of the stage
	runs   int64  // that are left, the present one included
	epochs int64  // of a run
	name   string // of the present run; empty where there is one alone
	silent bool   // somebody else shows it

	before      int64  // mini-batches of runs that ended
	done, total int64  // mini-batches of all runs, those of training alone
	part        string // epoch or pass at work
}

// begin begins a run of several.
func (p *progressOfRuns) begin(name string, epochs int) {
	p.name, p.epochs = name+": ", int64(max(epochs, 1))
}

// end ends that run. more is how many runs are left.
func (p *progressOfRuns) end(more int) { p.before, p.runs = p.done, int64(more) }

// step is report.Observer's. A run's other passes belong to the epoch before them, and what is
// before the first epoch of all has progress of its own. The runs to come are taken to be as long
// as the present one.
func (p *progressOfRuns) step(stage string, done, total int) {
	name, in := strings.CutPrefix(strings.TrimPrefix(stage, "modelled "), "epoch ")
	epoch, err := strconv.Atoi(name)
	switch {
	case in && err == nil:
		each := p.epochs * int64(total)
		p.total = p.before + p.runs*each
		p.done = p.before + int64(epoch-1)*int64(total) + int64(done)
		p.part = fmt.Sprintf("%s%s of %d", p.name, stage, p.epochs)
	case p.total == 0 || p.done == p.total && stage == "test":
		p.ui.Progress(p.name+stage, int64(done), int64(total))
		return
	default:
		p.part = p.name + stage
	}
	if !p.silent {
		p.ui.ProgressOf(p.whole, p.part, p.done, p.total)
	}
}
