package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	benchsuite "helios/internal/bench/suite"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/htmlreport"
	"helios/internal/outfile"
	"helios/internal/ui"
	"helios/internal/units"
	"helios/sched/plan"
)

func benchSuiteCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "suite",
		Usage:     "measure all parts and whole runs, each figure beside its floor, and draw the report",
		ArgsUsage: "[DATASET]",
		Description: "Writes results.jsonl and report.html to a folder of its own. A suite that was stopped or killed goes on where it was,\n" +
			"with the same command. Groups: io (reads by SSDs, blocks, row size, depth, stack), memory (gathers), cache (lookups),\n" +
			"sample, compute (kernels), pipeline and modes (training). Each step is a verb of its own, with its warm-up and its audit;\n" +
			"rounds go forth and back, and a figure is the median over them with its range. The virtual clock plays io, pipeline and\n" +
			"modes on --hardware.\n" +
			"A floor is the best that is possible: bytes by bandwidth, operations by the peak, or reads by IOPS. The report says for\n" +
			"each figure which it is and how much of it was reached.\n" +
			"Reads go to the SSDs that are bound, and training to DATASET, loaded on them. Without these the suite makes software\n" +
			"SSDs that play the model \"" + suiteModel + "\", and a dataset, in its folder, and removes them at its end.",
	}, 1, hcli.Of[suiteArgs]().Says("dataset",
		"train on this dataset `DIR`, loaded before; may also be given as an argument"), runBenchSuite)
}

// suiteArgs holds the options of "bench suite".
type suiteArgs struct {
	datasetArgs
	out     string        `option:"out" use:"aside" shown:"none" arg:"DIR" usage:"DIR of results and report (required)"`
	preset  string        `option:"preset" use:"setting" oneof:"@presets" default:"full" usage:"how much is measured: smoke takes seconds and shows that all of it runs, quick a few minutes on two cores, full longer"`
	profile string        `option:"hardware" use:"input" words:"@hardware" default:"a100-p5510x12" arg:"PROFILE" usage:"machine of the virtual clock, a PROFILE ({@hardware}) or a YAML file"`
	device  string        `option:"device" use:"setting" offers:"host,cuda" default:"host" arg:"DEVICE" usage:"DEVICE of the wall clock's measurements: host, cuda or cuda:N"`
	quick   bool          `option:"quick" use:"setting" usage:"the same as {preset} quick"`
	anew    bool          `option:"overwrite" use:"aside" usage:"begin anew in a folder that holds a suite"`
	budget  time.Duration `option:"budget-time" range:"1s..168h" shown:"the preset's" arg:"TIME" usage:"choose the length of the measurements so that the suite takes about TIME, such as 20m"`
	only    []string      `option:"only" use:"setting" offers:"@suite-groups" shown:"all" arg:"GROUP[,GROUP…]" usage:"groups to measure GROUP[,GROUP…]: {@suite-groups}"`
	clocks  []string      `option:"clock" use:"setting" offers:"@clocks" default:"@clocks" arg:"CLOCK[,CLOCK]" usage:"CLOCK[,CLOCK]: {@clocks}"`
}

// suite is one run of all steps.
type suite struct {
	*env
	*suiteArgs
	size     suiteSize
	seconds  float64 // of a measurement
	hardware *hardware.Profile
	// own: the SSDs are the suite's, slow ones that training reads and fast ones; else those that
	// are bound. dataset is the user's or its own.
	own         bool
	slow, fast  []string
	ssdCount    int
	state       string              // folder of the SSDs' list
	ready, made bool                // the work folder, and what it holds of the suite's own
	done        map[string]stepDone // by key and round
	results     *results
}

// stepDone is a step of a round in the results, an event "step".
type stepDone struct {
	Step      string            `json:"step"` // with its clock: "ssds-wall"
	Group     string            `json:"group"`
	Title     string            `json:"title"`
	Clock     string            `json:"clock"`
	Verb      string            `json:"verb"`
	Round     int               `json:"round"` // from 1
	Rounds    int               `json:"rounds"`
	Arguments []string          `json:"arguments"`
	Seconds   float64           `json:"seconds"`
	Failed    string            `json:"failed,omitempty"` // why it has no lines
	ExitCode  int               `json:"exit_code,omitempty"`
	Lines     []json.RawMessage `json:"lines"`
	Apart     bool              `json:"apart,omitempty"`
}

func doneKey(step string, round int) string { return fmt.Sprint(step, " ", round) }

// check completes the options and refuses what cannot be.
func (s *suite) check() (err error) {
	if s.out == "" {
		return errs.New(errs.Usage, "no {out} DIR; name the folder for results and report")
	}
	if s.quick {
		if s.given(&s.preset) != "" {
			return errs.New(errs.Usage, "{quick} and {preset}: give one of them")
		}
		s.preset = "quick"
	}
	s.size = suiteSizes[s.preset]
	for _, c := range s.clocks {
		if !slices.Contains(plan.Clocks, c) {
			return errs.New(errs.Usage, "unknown {clock} %q; %s", c,
				meant(c, plan.Clocks, "choose among "+strings.Join(plan.Clocks, ", ")))
		}
	}
	for _, g := range s.only {
		if !slices.Contains(suiteGroups, g) {
			return errs.New(errs.Usage, "unknown {only} %q; %s", g,
				meant(g, suiteGroups, "choose among "+strings.Join(suiteGroups, ", ")))
		}
	}
	if _, err := parseMeasured(s.device); err != nil {
		return err
	}
	if s.hardware, err = hardware.Load(s.profile); err != nil {
		return err
	}
	if s.out, err = filepath.Abs(s.out); err != nil {
		return err
	}
	if err := s.chooseSSDs(); err != nil {
		return err
	}
	s.seconds = s.size.seconds
	steps := s.steps()
	if len(steps) == 0 {
		return errs.New(errs.Usage,
			"nothing is left to measure: {only} %s has no step on {clock} %s",
			strings.Join(s.only, ","), strings.Join(s.clocks, ","))
	}
	if s.budget > 0 {
		s.seconds = s.fit(steps, s.budget)
	}
	return nil
}

// chooseSSDs takes the bound SSDs, or decides on the suite's own.
func (s *suite) chooseSSDs() error {
	st, err := s.store.Load()
	if err != nil {
		return err
	}
	named := s.named(s.env)
	if s.own = len(st.SSDs) == 0; !s.own {
		s.state, s.ssdCount = s.store.Dir(), len(st.SSDs)
		if !named && s.trains() {
			return errs.New(errs.Usage,
				"SSDs are bound, but no dataset is given to train on: give one that is loaded on them, leave training out with {only} io,memory,cache,sample,compute, or name an empty folder with {state} for SSDs of the suite's own")
		}
	} else if named {
		return errs.New(errs.Usage,
			"a dataset is given, but no SSD is bound that could hold it; \"heliosctl bind-ssds\" and \"heliosctl load\" first, or leave it out")
	}
	if named {
		dir, err := s.dir(s.env)
		if err != nil {
			return err
		}
		if s.dataset, err = filepath.Abs(dir); err != nil {
			return err
		}
	}
	if s.own {
		s.state, s.ssdCount, s.dataset = s.work("state"), s.size.ssds, s.work("g")
		for i := range s.size.ssds {
			s.slow = append(s.slow, fmt.Sprintf("ssd%d", i))
		}
		s.fast = []string{fmt.Sprintf("ssd%d", s.size.ssds)}
	}
	return nil
}

// trains reports whether a step trains.
func (s *suite) trains() bool {
	return len(s.only) == 0 || slices.Contains(s.only, "pipeline") || slices.Contains(s.only, "modes")
}

func runBenchSuite(ctx context.Context, e *env, a *suiteArgs) (err error) {
	s := &suite{env: e, suiteArgs: a, done: map[string]stepDone{}}
	if err := s.check(); err != nil {
		return err
	}
	if err := s.open(); err != nil {
		return err
	}
	whole, failed := false, 0
	defer func() {
		if whole {
			closing(&err, func() error { return os.RemoveAll(s.work()) })
		}
	}()
	defer s.results.end(&err)
	if failed, err = s.runAll(ctx); err != nil {
		return whenStopped(err, "the same command goes on where the suite was")
	}
	whole = failed == 0
	if err := s.tell(); err != nil {
		return err
	}
	if failed > 0 {
		return errs.New(errs.Failed,
			"%d steps failed; %s has the reasons, and the same command tries them again", failed,
			filepath.Join(s.out, suiteResults))
	}
	return s.results.err
}

// Files of a suite's folder.
const (
	suiteResults = "results.jsonl"
	suiteReport  = "report.html"
)

// runAll runs what is not done yet, round by round, every second one backwards.
func (s *suite) runAll(ctx context.Context) (failed int, err error) {
	steps := s.steps()
	rounds, total, done := 0, 0, 0
	for _, x := range steps {
		rounds, total = max(rounds, x.rounds), total+x.rounds
	}
	for round := range rounds {
		order := slices.Clone(steps)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, x := range order {
			if round >= x.rounds {
				continue
			}
			done++
			if _, is := s.done[doneKey(x.key(), round+1)]; is {
				continue
			}
			s.ui.Progress("bench suite", int64(done-1), int64(total))
			d, err := s.runStep(ctx, &x, round)
			if err != nil {
				return failed, err
			}
			s.results.event("step", d)
			if s.results.err != nil {
				return failed, s.results.err
			}
			if d.Failed != "" {
				failed++
				s.ui.Note("%s, %s clock, round %d of %d failed: %s", x.title, x.clock, round+1,
					x.rounds, d.Failed)
				continue
			}
			s.done[doneKey(d.Step, d.Round)] = d
			s.ui.Printf("%d of %d: %s, %s clock, round %d of %d: %.1f s", done, total, x.title, x.clock,
				round+1, x.rounds, d.Seconds)
		}
	}
	return failed, nil
}

// runStep runs one benchmark as the command line that it is. Its own failure is kept in d; err is
// a stop, or a fault of the work folder.
func (s *suite) runStep(ctx context.Context, x *suiteStep, round int) (d stepDone, err error) {
	d = stepDone{Step: x.key(), Group: x.group, Title: x.title, Clock: x.clock, Verb: x.verb(),
		Round: round + 1, Rounds: x.rounds, Lines: []json.RawMessage{}, Apart: x.apart}
	if err := s.prepare(ctx, x); err != nil {
		return d, err
	}
	made := s.work("step.jsonl")
	if err := os.Remove(made); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return d, err
	}
	d.Arguments = x.arguments(round, s.seconds, made)
	begun := time.Now()
	code, said := s.runVerb(ctx, d.Arguments)
	d.Seconds = time.Since(begun).Seconds()
	d.Arguments = usesOf(findVerb(s.c.App.Commands, strings.Fields(x.verb()))).settings(d.Arguments)
	switch {
	case ctx.Err() != nil:
		return d, context.Cause(ctx)
	case code != 0:
		d.Failed, d.ExitCode = said, code
		return d, nil
	}
	d.Lines, err = readStep(made)
	return d, err
}

// runVerb runs a verb on the suite's SSDs and returns what it said of an error.
func (s *suite) runVerb(ctx context.Context, args []string) (code int, said string) {
	var stderr bytes.Buffer
	code = run(ctx, append([]string{"--state=" + s.state}, args...), io.Discard, &stderr)
	text := strings.TrimSpace(stderr.String())
	if i := strings.LastIndexByte(text, '\n'); i >= 0 { // notes come before
		text = text[i+1:]
	}
	return code, ui.OneLine(text)
}

// readStep reads the lines of a file of results, without those that stand around them.
func readStep(path string) (all []json.RawMessage, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		var head struct{ Event string }
		line = bytes.TrimSpace(line)
		if err := json.Unmarshal(line, &head); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if head.Event != "begin" && head.Event != "end" {
			all = append(all, json.RawMessage(line))
		}
	}
	return all, nil
}

// prepare makes what a step needs in the work folder, where that is the suite's own. It makes
// again the leftovers of a suite that was killed: nobody knows how far that was.
func (s *suite) prepare(ctx context.Context, x *suiteStep) error {
	if !s.ready {
		if err := os.RemoveAll(s.work()); err != nil {
			return err
		}
		if err := os.MkdirAll(s.work("state"), 0o777); err != nil {
			return err
		}
		s.ready = true
	}
	if x.reads && s.own && !s.made {
		if err := s.make(ctx); err != nil {
			return err
		}
		s.made = true
	}
	return ctx.Err()
}

// make makes the suite's own SSDs and dataset.
func (s *suite) make(ctx context.Context) error {
	var slow []string
	for i := range s.size.ssds {
		slow = append(slow, s.work(fmt.Sprintf("ssd%d.img", i)))
	}
	fast := s.work("fast.img")
	for _, args := range [][]string{
		{"bind-ssds", "--buffered", "--size=" + s.size.ssdBytes, "--ssd-model=" + suiteModel,
			"--proxy=" + strings.Join(slow, ",")},
		{"bind-ssds", "--buffered", "--size=" + s.size.ssdBytes, "--proxy=" + fast},
		{"generate", "--kind=rmat", fmt.Sprintf("--nodes=%d", s.size.nodes), "--quiet",
			fmt.Sprintf("--dim=%d", suiteDim), "--out=" + s.dataset},
		{"load", "--quiet", "--ssds=" + strings.Join(s.slow, ","), s.dataset},
	} {
		if code, said := s.runVerb(ctx, args); code != 0 {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return errs.New(errs.Class(code), "the suite's own SSDs and dataset: %s", said)
		}
	}
	return nil
}

// figuresLine holds the figures of all steps.
type figuresLine struct {
	Figures []benchsuite.Figure `json:"figures"`
}

// tell adds the figures to the results, prints them and draws the report.
func (s *suite) tell() error {
	var steps []benchsuite.Step
	titles := map[string]string{}
	for _, x := range s.steps() {
		step := benchsuite.Step{Name: x.key(), Verb: x.verb(), Apart: x.apart}
		for round := range x.rounds {
			step.Rows = append(step.Rows, s.done[doneKey(x.key(), round+1)].Lines...)
		}
		steps = append(steps, step)
		titles[x.key()] = x.title + ", " + x.clock
	}
	figures, err := benchsuite.Figures(steps)
	if err != nil {
		return err
	}
	s.results.event("figures", figuresLine{figures})
	if s.results.err != nil {
		return s.results.err
	}
	s.show(figures, titles)
	return s.draw()
}

// show prints, for each step, the figure that came nearest to its floor; the report has them all.
func (s *suite) show(figures []benchsuite.Figure, titles map[string]string) {
	var table [][]string
	for first := 0; first < len(figures); {
		best, to := first, first
		for ; to < len(figures) && figures[to].Step == figures[first].Step; to++ {
			if figures[to].Share > figures[best].Share {
				best = to
			}
		}
		f := figures[best]
		floor, share := "-", "-"
		if f.Floor > 0 {
			floor, share = fmt.Sprintf("%.4g", f.Floor), percent1(f.Share)
		}
		table = append(table, []string{titles[f.Step], strconv.Itoa(to - first), f.What,
			fmt.Sprintf("%.4g", f.Value.Median), f.Unit, floor, share})
		first = to
	}
	s.ui.Columns(suiteColumns, table)
}

func percent1(v float64) string { return strconv.FormatFloat(100*v, 'f', 1, 64) + "%" }

// draw writes the report of the results so far.
func (s *suite) draw() error {
	path := filepath.Join(s.out, suiteReport)
	source, err := readSource(filepath.Join(s.out, suiteResults))
	if err != nil {
		return err
	}
	source.Ended, source.Whole = true, len(s.missing()) == 0
	out, err := outfile.Create("--out", path, true)
	if err != nil {
		return err
	}
	err = out.Commit(htmlreport.Write(out, []*htmlreport.Source{source}, programVersion()))
	if err != nil {
		return err
	}
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	s.ui.Printf("report: %s (%s)", path, units.FormatBytes(st.Size()))
	return nil
}

// missing are the steps that have no results.
func (s *suite) missing() (keys []string) {
	for _, x := range s.steps() {
		for round := range x.rounds {
			if _, is := s.done[doneKey(x.key(), round+1)]; !is {
				keys = append(keys, doneKey(x.key(), round+1))
			}
		}
	}
	return keys
}
