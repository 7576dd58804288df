package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/klauspost/cpuid/v2"
	"golang.org/x/sys/unix"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/outfile"
	"helios/internal/state"
	"helios/internal/ui"
	"helios/sched"
)

// outputs are the files that a verb writes.
type outputs struct {
	results   string `option:"results" common:"yes" use:"aside" arg:"FILE" usage:"also write the {json} lines to FILE, each as it comes, between a line that identifies the run and one for its end"`
	overwrite bool   `option:"overwrite" use:"aside" usage:"replace outputs that are there; without it they are refused"`
	opened    *outfile.Set
}

// notOfDataset are the ends of names of what people keep in a dataset's folder beside it.
var notOfDataset = []string{".jsonl", ".json", ".html", ".csv", ".trace", ".txt", ".log"}

// protect notes what no output of the verb may replace: all bound SSDs and their list, and what the
// verb reads.
func (e *env) protect(files *outfile.Set) {
	if st, err := e.store.Load(); err == nil { // else who needs the SSDs says so
		for _, d := range st.SSDs {
			if d.Kind == state.KindProxy {
				files.Reads("SSD "+d.Name, d.Path)
			}
		}
	}
	in := func(what, path string) { protectInput(files, what, path) }
	for _, name := range e.c.FlagNames() {
		text := fmt.Sprint(e.c.Value(name))
		if use := e.uses.of(name, text); use != hcli.Input && name != "checkpoint" && name != "config" {
			continue
		}
		in("--"+name, text)
		for part := range strings.SplitSeq(text, ",") {
			in("--"+name, part)
		}
	}
	for _, name := range []string{"packed", "parted", "hotness-dir"} {
		if dir := e.c.String(name); dir != "" {
			files.Reads("--"+name, dir)
		}
	}
	apart := func(r rune) bool { return strings.ContainsRune(" ;=,", r) }
	for _, word := range strings.FieldsFunc(e.c.String("variants"), apart) { // flags of train
		in("--variants", word)
	}
	files.Reads("--state", filepath.Join(e.store.Dir(), state.FileName))
	for _, path := range e.c.Args().Slice() {
		in("argument "+path, path)
	}
}

// protectInput protects a file, or what a dataset or a checkpoint has in a folder.
func protectInput(files *outfile.Set, what, path string) {
	st, err := os.Stat(path)
	if err != nil {
		return
	}
	if !st.IsDir() {
		files.Reads(what, path)
		return
	}
	entries, _ := os.ReadDir(path) // what can't be read is none of the run's inputs
	_, nerr := os.Lstat(filepath.Join(path, dataset.MetaName))
	for _, f := range entries {
		end := filepath.Ext(f.Name())
		if nerr == nil && !slices.Contains(notOfDataset, end) || end == ".safetensors" {
			files.Reads(what, filepath.Join(path, f.Name()))
		}
	}
}

// files are those of this run.
func (o *outputs) files() *outfile.Set {
	if o.opened == nil {
		o.opened = &outfile.Set{Replace: o.overwrite}
	}
	return o.opened
}

// create begins the file of a flag; nil without a path.
func (o *outputs) create(flag, path string) (*outfile.File, error) {
	if path == "" {
		return nil, nil
	}
	f, err := o.files().Create("--"+flag, path)
	return f, orOverwrite(err)
}

// orOverwrite adds the way out to the refusal of a file that is there.
func orOverwrite(err error) error {
	if exists := (*outfile.Exists)(nil); errors.As(err, &exists) {
		return errs.Errorf("%w; {overwrite} replaces it, or name another file", err)
	}
	return err
}

// results writes a verb's JSON lines to standard output, with --json, and to the file of --results.
// There they stand between an event "begin", which identifies the run, and an event "end", which
// ends it.
type results struct {
	e     *env
	path  string // of --results
	run   string // its identity; a run that is resumed keeps it
	file  *outfile.File
	lines *outfile.Lines // file from the first line on, or a file that is continued
	w     *ui.UI         // over lines
	page  *ui.UI         // over a page that follows the run; nil: there is none
	err   error

	continued bool
	silent    bool         // continued, and no line of this run is in it yet
	dataset   string       // UUID in the line "begin" of a file that is continued
	epochs    map[int]bool // that it has
}

// resultsSchema is the version of the lines in a file of --results.
const resultsSchema = 2

// runLine identifies a run, in the events "begin" and "resume".
type runLine struct {
	Schema  int      `json:"schema"`
	Run     string   `json:"run"`
	Verb    string   `json:"verb"`
	Command []string `json:"command"` // as it was typed
	// Arguments are the verb, its flags as --name=value, those of --config among them, and behind
	// "--" the others: what "rerun" runs again in Folder.
	Arguments []string    `json:"arguments"`
	Folder    string      `json:"folder"`
	Dataset   string      `json:"dataset"`      // its UUID; empty where there is none
	Name      string      `json:"dataset_name"` // likewise
	Version   string      `json:"version"`      // of heliosctl
	Machine   machineLine `json:"machine"`
	// Settings are all options of the verb with their values, defaults among them: 0 and "" are
	// left to what is found at run time.
	Settings map[string]any `json:"settings"`
	// Inputs are the checksums (SHA-256) of other files that the verb read, by option: "rerun"
	// takes such a file while it is the same.
	Inputs  map[string]string `json:"inputs,omitempty"`
	Devices []string          `json:"devices"` // that compute
	SSDs    []state.SSD       `json:"ssds"`    // that are read
	Time    string            `json:"time"`
}

// machineLine tells a machine from others.
type machineLine struct {
	CPU         string `json:"cpu"`
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	Kernel      string `json:"kernel"`
}

// ofThisMachine leaves empty what cannot be told.
func ofThisMachine() machineLine {
	m := machineLine{CPU: cpuid.CPU.BrandName, CPUs: hostcpu.Count()}
	m.MemoryBytes, _ = hostmem.TotalBytes()
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Sysname[:]) + " " +
			unix.ByteSliceToString(u.Release[:])
	}
	return m
}

func (e *env) runLine(run string) runLine {
	folder, _ := os.Getwd() // where it is gone, paths from the root still tell
	var settings map[string]any
	if e.tookSettings != nil {
		settings = e.tookSettings()
	}
	return runLine{Schema: resultsSchema, Run: run, Verb: e.verb,
		Command: append([]string{"heliosctl"}, e.args...), Arguments: e.argv, Folder: folder,
		Settings: settings, Inputs: e.inputSums(), Devices: e.tookDevices, SSDs: e.tookSSDs,
		Dataset: e.dataMeta.UUID, Name: e.dataMeta.Name, Version: programVersion(),
		Machine: ofThisMachine(), Time: nowText()}
}

// endLine has the end of a run.
type endLine struct {
	Run   string `json:"run"`
	Whole bool   `json:"whole"` // it did all that it was asked for
	// Reason why it is not whole, and the exit code.
	Reason   string `json:"reason,omitempty"`
	ExitCode int    `json:"exit_code,omitempty"`
	Time     string `json:"time"`
}

func nowText() string { return time.Now().UTC().Format(time.RFC3339) }

// newRun makes a run's identity.
func newRun() string {
	id := uuid.New()
	return hex.EncodeToString(id[:8])
}

// openResults refuses a file that is there, but writes nothing yet: the first line comes with the
// first event, or with begin.
func (o *outputs) openResults(e *env) (*results, error) {
	r := &results{e: e, path: o.results, run: newRun()}
	var err error
	r.file, err = o.create("results", o.results)
	return r, err
}

// resumeResults is openResults for a run that goes on: it adds to its own file, where that is
// there. held is the checkpoint that it goes on from; with none, the file may hold no epochs, as a
// run that died early leaves it, and the identity is the file's.
func (o *outputs) resumeResults(e *env, held *sched.Held) (*results, error) {
	run := ""
	if held != nil {
		run = held.Run
	}
	st, err := os.Stat(o.results)
	if o.results != "" && !errors.Is(err, fs.ErrNotExist) && (err != nil || st.Mode().IsRegular()) {
		r, err := o.continueResults(e, run, held != nil)
		if errs.ClassOf(err) != errs.Refused || !o.overwrite {
			return r, err
		}
	}
	r, err := o.openResults(e)
	if run != "" && err == nil {
		r.run = run
	}
	return r, err
}

// continueResults adds to the results of a run, whose epochs a checkpoint must have.
func (o *outputs) continueResults(e *env, run string, held bool) (r *results, err error) {
	r = &results{e: e, path: o.results, run: run, epochs: map[int]bool{}}
	refuse := func(why string) error {
		return errs.New(errs.Refused,
			"{results} %s %s; {overwrite} replaces it, or name another file", o.results, why)
	}
	first := true
	r.lines, err = o.files().Continue("--results", o.results, func(line []byte) error {
		var l struct {
			Event   string `json:"event"`
			Run     string `json:"run"`
			Dataset string `json:"dataset"`
			Epoch   int    `json:"epoch"`
		}
		err := json.Unmarshal(line, &l)
		switch {
		case err != nil || first && (l.Event != "begin" || l.Run == ""):
			return refuse("is there and no run's results")
		case first && run != "" && l.Run != run:
			return refuse("holds the results of run " + l.Run + ", the checkpoint is of run " + run)
		case first:
			first, r.run, r.dataset = false, l.Run, l.Dataset
		case l.Event == "epoch" && !held:
			return refuse("holds epochs of run " + r.run +
				", and there is no checkpoint to go on from")
		case l.Event == "epoch":
			r.epochs[l.Epoch] = true
		}
		return nil
	})
	if err == nil {
		r.continued, r.silent = true, true
		r.render()
	}
	return r, err
}

func (r *results) render() { r.w = linesTo(r.lines) }

// linesTo writes JSON lines alone.
func linesTo(w io.Writer) *ui.UI {
	u := ui.New(w, w)
	u.JSON, u.Quiet = true, true
	return u
}

// follow has the page of a run follow it, where there is one.
func (r *results) follow(m *metrics) {
	if m != nil {
		r.page = linesTo(m.page)
	}
}

// tell writes an event to the file and to the page.
func (r *results) tell(name string, v any) {
	for _, w := range []*ui.UI{r.w, r.page} {
		if w != nil {
			r.keep(w.Event(name, v))
		}
	}
}

// begin writes the file's first line, once.
func (r *results) begin() {
	if r.file == nil || r.err != nil {
		return
	}
	var first strings.Builder
	w := ui.New(&first, &first)
	w.JSON = true
	r.keep(w.Event("begin", r.e.runLine(r.run)))
	lines, err := outfile.Begin(r.file, []byte(first.String()))
	r.file = nil
	if r.keep(err); err == nil {
		r.lines = lines
		r.render()
	}
}

// start begins the results of a training run. A file that is continued gets a line "resume" and the
// epochs that it lacks of those that the checkpoint has behind it: a run may die after it has saved
// an epoch and before it says so.
func (r *results) start(held *sched.Held) error {
	if !r.continued {
		r.begin()
	} else {
		if r.dataset != r.e.dataMeta.UUID {
			return errs.New(errs.Refused,
				"{results} %s holds the results of dataset %s, this is %s; {overwrite} replaces it, or name another file",
				r.path, r.dataset, r.e.dataMeta.UUID)
		}
		r.silent = false
		r.keep(r.w.Event("resume", r.e.runLine(r.run)))
	}
	if r.page != nil {
		r.keep(r.page.Event("begin", r.e.runLine(r.run)))
	}
	if held != nil {
		for _, ep := range held.Epochs {
			if r.w != nil && !r.epochs[ep.Epoch] {
				r.keep(r.w.Event("epoch", ep))
			}
			if r.page != nil {
				r.keep(r.page.Event("epoch", ep))
			}
		}
	}
	return r.err
}

// event keeps its first error for the end, so that callbacks can use it.
func (r *results) event(name string, v any) {
	r.begin()
	r.keep(r.e.ui.Event(name, v))
	r.tell(name, v)
}

func (r *results) keep(err error) {
	if r.err == nil {
		r.err = err
	}
}

// end writes the end of the run, which returns err. A run that fails before its first line leaves
// no file.
func (r *results) end(err *error) {
	if p := recover(); p != nil { // else this would look whole
		if r.lines != nil && !r.silent {
			_ = r.w.Event("end", endLine{Run: r.run, Reason: "a fault of heliosctl", Time: nowText()})
		}
		panic(p)
	}
	if *err == nil && !r.silent {
		r.begin()
		*err = r.err
	}
	last := endLine{Run: r.run, Whole: *err == nil, Time: nowText()}
	if *err != nil {
		class, text := r.e.classify(*err)
		last.Reason, last.ExitCode = text, int(class)
	}
	if r.page != nil {
		_ = r.page.Event("end", last) // the page is no result
	}
	switch {
	case r.silent: // nothing of this run stands in the file
		*err = errors.Join(*err, r.lines.Close())
		return
	case r.lines == nil:
		*err = errors.Join(*err, r.file.Discard())
		return
	}
	werr := errors.Join(r.w.Event("end", last), r.lines.Close())
	if *err == nil {
		*err = werr
	}
}

// classify returns an error's class and its text for people. After a stop the text is of its cause.
func (e *env) classify(err error) (errs.Class, string) {
	cause := context.Cause(e.ctx)
	stopped := errors.Is(cause, errSignal) || errors.Is(cause, errOutputClosed)
	if stopped && (errors.Is(err, context.Canceled) || errors.Is(err, cause)) {
		err = errs.With(errs.Interrupted, err)
	}
	err = e.advise(err)
	class, text := errs.ClassOf(err), ui.OneLine(e.spell(err))
	if class == errs.Interrupted && stopped {
		// In the user's words, and once.
		text = strings.ReplaceAll(text, context.Canceled.Error(), cause.Error())
		text = strings.ReplaceAll(text, cause.Error()+": "+cause.Error(), cause.Error())
	}
	return class, text
}
