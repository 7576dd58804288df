package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/seal"
	"helios/internal/errs"
)

// A killed import continues where it stopped. Its directory has a journal: a line of JSON for each
// step that is on the disk, written and synced after the step itself. Work after the last line is
// done again.
const (
	JournalName    = "import.journal"
	journalVersion = 1
)

type journalLine struct {
	Begin    *journalBegin `json:"begin,omitempty"`
	Folder   string        `json:"folder,omitempty"` // the edges that follow are those of its topology
	Source   *sourceMark   `json:"source,omitempty"`
	Run      *edges.Run    `json:"run,omitempty"`      // a sorted run is there
	Replaces []int         `json:"replaces,omitempty"` // by Run: these are merged into it
	Merged   *edges.Merged `json:"merged,omitempty"`
	Topology *edges.Counts `json:"topology,omitempty"` // is whole
	Arrays   []arrayDone   `json:"arrays,omitempty"`   // of Topology: indptr and indices
	Array    string        `json:"array,omitempty"`
	Done     *arrayDone    `json:"done,omitempty"` // the array is whole
	Step     *stepDone     `json:"step,omitempty"`
	// the array is there up to here; neither: it begins anew
	Partial *edges.ArrayMark `json:"partial,omitempty"`
}

type journalBegin struct {
	Version int    `json:"version"`
	Input   string `json:"input"` // fingerprint
	Memory  int64  `json:"memory"`
}

type sourceMark struct {
	ID    int    `json:"id"`
	Name  string `json:"name"`
	Unit  string `json:"unit"`
	Total int64  `json:"total"`
	Parts int    `json:"parts"`
}

// stepDone is a step of which the import needs the files only.
type stepDone struct {
	Name  string          `json:"name"`
	State json.RawMessage `json:"state"`
	Files []stepFile      `json:"files"`
}

type stepFile struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Sum  uint32 `json:"sum,omitempty"` // of its checksums in the seal
}

type arrayDone struct {
	Sum   []byte `json:"sum"`
	Rows  int64  `json:"rows"`
	Width int64  `json:"width,omitempty"`
}

// journal is nil where nothing is to be resumed; its methods that end it may then be called.
type journal struct {
	f    *os.File
	path string // as the user knows it
	size int64

	begin    journalBegin
	sources  map[int]sourceMark
	parts    map[int]map[int]*edges.PartMark
	runs     []edges.Run
	lastRun  int
	merged   *edges.Merged
	folder   string                   // of the topology that is being made; "" where there is one alone
	topology map[string]*edges.Counts // that are whole, by folder
	done     map[string]arrayDone
	partial  map[string]edges.ArrayMark
	steps    map[string]*stepDone
}

// JournalStep lets tests end an import before and after each line.
var JournalStep func(line []byte, written bool) error

func newJournal(f *os.File, path string) *journal {
	j := &journal{f: f, path: path, topology: map[string]*edges.Counts{},
		done: map[string]arrayDone{}, partial: map[string]edges.ArrayMark{},
		steps: map[string]*stepDone{}}
	j.newEdges("")
	return j
}

// newEdges begins the topology of a folder.
func (j *journal) newEdges(folder string) {
	j.folder, j.sources, j.parts = folder, map[int]sourceMark{}, map[int]map[int]*edges.PartMark{}
	j.runs, j.merged = nil, nil
}

// sorted reports whether the topology that was begun last is whole.
func (j *journal) sorted() bool { return j.topology[j.folder] != nil }

// worth reports whether there is anything that another run need not do again.
func (j *journal) worth() bool {
	return j != nil && (len(j.steps) > 0 || len(j.runs) > 0 || len(j.topology) > 0 ||
		len(j.done) > 0 || len(j.partial) > 0)
}

// where describes how far it is.
func (j *journal) where() string {
	features := ""
	for name := range j.done {
		if path.Base(name) == "features" {
			features = "the features"
		}
	}
	bytes := int64(0)
	for name, m := range j.partial {
		if path.Base(name) == "features" {
			bytes += m.Bytes
		}
	}
	switch {
	case len(j.topology) > 0 && j.folder != "":
		return fmt.Sprintf("the edges of %d relations", len(j.topology))
	case len(j.runs) == 0 && len(j.topology) == 0 && bytes == 0 && features == "":
		return "the names of the nodes"
	case j.sorted() || len(j.runs) == 0:
		switch {
		case bytes > 0:
			return fmt.Sprintf("%.1f GB of the features", float64(bytes)/1e9)
		case features != "" && !j.sorted():
			return features
		case features != "":
			return "the edges and the features"
		}
		return "the edges"
	// repeated edges that went between two marks make Total smaller than what is done
	case j.merged != nil:
		return fmt.Sprintf("%.0f %% of the merge of edges",
			100*float64(j.merged.Done)/float64(max(j.merged.Total, j.merged.Done, 1)))
	}
	units, total, edges := int64(0), int64(0), int64(0)
	for id, s := range j.sources {
		total += s.Total
		for _, p := range j.parts[id] {
			if p.Ended() {
				units += p.Units
			}
			for _, s := range p.Spans {
				edges += s.To - s.From
			}
		}
	}
	switch {
	// of parts that are not at their end, such as the only one of a .gz file
	case units == 0 && edges > 0:
		return fmt.Sprintf("%d of the edges", edges)
	case total > 0:
		return fmt.Sprintf("%.0f %% of the edges", 100*float64(units)/float64(total))
	}
	return "a part of the edges"
}

func (j *journal) write(l journalLine) error {
	line, err := json.Marshal(l)
	if err != nil {
		return fmt.Errorf("%s: %w", j.path, err)
	}
	line = append(line, '\n')
	step := func(written bool) error {
		if JournalStep == nil {
			return nil
		}
		return JournalStep(line, written)
	}
	if err := step(false); err != nil {
		return err
	}
	if WriteFault != nil {
		err = WriteFault(j.path)
	}
	if err == nil {
		_, err = j.f.Write(line)
	}
	if err == nil {
		err = j.f.Sync()
	}
	if err != nil {
		return explainWrite(j.path, err)
	}
	j.take(l)
	return step(true)
}

// take changes the state as a line says.
func (j *journal) take(l journalLine) {
	switch {
	case l.Begin != nil:
		j.begin = *l.Begin
	case l.Folder != "":
		j.newEdges(l.Folder)
	case l.Step != nil:
		j.steps[l.Step.Name] = l.Step
	case l.Source != nil:
		j.sources[l.Source.ID] = *l.Source
	case l.Run != nil:
		j.takeRun(*l.Run, l.Replaces)
	case l.Merged != nil:
		j.merged = l.Merged
	case l.Topology != nil:
		j.topology[j.folder] = l.Topology
		for i, name := range topologyArrays {
			j.done[path.Join(j.folder, name)] = l.Arrays[i]
		}
	case l.Done != nil:
		j.done[l.Array] = *l.Done
		delete(j.partial, l.Array)
	case l.Partial != nil:
		j.partial[l.Array] = *l.Partial
	case l.Array != "":
		delete(j.done, l.Array)
		delete(j.partial, l.Array)
	}
}

// takeRun takes a run, which stands for those that it replaces and for pieces of parts.
func (j *journal) takeRun(r edges.Run, replaces []int) {
	keep := slices.DeleteFunc(j.runs, func(old edges.Run) bool {
		return slices.Contains(replaces, old.ID)
	})
	for _, p := range r.Pieces {
		parts := j.parts[p.Source]
		if parts == nil {
			parts = map[int]*edges.PartMark{}
			j.parts[p.Source] = parts
		}
		m := parts[p.Part]
		if m == nil {
			m = &edges.PartMark{}
			parts[p.Part] = m
		}
		if p.To > p.From {
			m.Spans = append(m.Spans, p.Span)
		}
		if p.End {
			m.Known, m.Total, m.Units = true, p.To, p.Units
		}
	}
	r.Pieces = nil
	j.runs = append(keep, r)
	j.lastRun = max(j.lastRun, r.ID)
}

// sorterLog is the journal as a sorter of edges sees it.
type sorterLog struct {
	*journal
	s      *Staging
	folder string
}

// Begin notes a source, or checks that it is that of the interrupted import.
func (j sorterLog) Begin(id int, s edges.Source) error {
	if j.folder != j.journal.folder {
		if err := j.write(journalLine{Folder: j.folder}); err != nil {
			return err
		}
	}
	m := sourceMark{id, s.Name, s.Unit, s.Total, s.Parts}
	if old, ok := j.sources[id]; ok {
		if old != m {
			return errs.Errorf(
				"%s: the edges are %v, the interrupted import read %v; run the import again with {restart}",
				s.Name, m, old)
		}
		return nil
	}
	return j.write(journalLine{Source: &m})
}

// Covered returns what runs have of a source, as it is now: its readers ask while new runs are
// noted.
func (j sorterLog) Covered(id int) map[int]*edges.PartMark {
	return maps.Clone(j.parts[id])
}

// Runs are those that are there.
func (j sorterLog) Runs() ([]edges.Run, int) {
	if j.folder != j.journal.folder {
		return nil, j.lastRun
	}
	return j.runs, j.lastRun
}

// Ran notes a run.
func (j sorterLog) Ran(r edges.Run, replaces []int) error {
	return j.write(journalLine{Run: &r, Replaces: replaces})
}

// Merged returns how far the merge is.
func (j sorterLog) Merged() *edges.Merged {
	if j.folder != j.journal.folder {
		return nil
	}
	return j.merged
}

// MergedTo notes how far the merge is.
func (j sorterLog) MergedTo(m edges.Merged) error { return j.write(journalLine{Merged: &m}) }

var topologyArrays = []string{"indptr", "indices"}

// Done notes that the topology is whole.
func (j sorterLog) Done(c edges.Counts) error {
	l := journalLine{Topology: &c}
	for _, name := range topologyArrays {
		name = path.Join(j.folder, name)
		l.Arrays = append(l.Arrays, arrayDone{Sum: j.s.sums[name], Rows: j.s.rows[name]})
	}
	return j.write(l)
}

// arrayTo notes how far an array is.
func (j *journal) arrayTo(a *Array) error {
	mark, err := a.Mark()
	if err != nil {
		return err
	}
	return j.write(journalLine{Array: a.name, Partial: &mark})
}

// anew says that an array is written from its start.
func (j *journal) anew(name string) error {
	_, done := j.done[name]
	_, partial := j.partial[name]
	if !done && !partial {
		return nil
	}
	return j.write(journalLine{Array: name})
}

func (j *journal) close() error {
	if j == nil || j.f == nil {
		return nil
	}
	f := j.f
	j.f = nil
	return f.Close()
}

func (j *journal) remove() error {
	if j == nil || j.f == nil {
		return nil
	}
	name := j.f.Name()
	return errors.Join(j.close(), os.Remove(name))
}

// readJournal reads the journal of a directory up to the first line that is not whole.
func readJournal(dir, out string) (*journal, error) {
	path := filepath.Join(dir, JournalName)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	j := newJournal(nil, filepath.Join(out, JournalName))
	for {
		line, rest, whole := bytes.Cut(text, []byte{'\n'})
		var l journalLine
		if !whole || json.Unmarshal(line, &l) != nil || l.Topology != nil &&
			len(l.Arrays) != len(topologyArrays) {
			break
		}
		j.take(l)
		j.size += int64(len(line)) + 1
		text = rest
	}
	return j, nil
}

// usable checks that the files that the journal tells of are there.
func (j *journal) usable(dir string) error {
	need := func(name string, size int64) error {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if st.Size() < size {
			return fmt.Errorf("%s has %d bytes, must have %d", name, st.Size(), size)
		}
		return nil
	}
	if !j.sorted() {
		for _, r := range j.runs {
			if err := need(r.File()); err != nil {
				return err
			}
		}
		if m := j.merged; m != nil {
			if err := errors.Join(need(path.Join(j.folder, "indptr.npy"), m.CSC.Indptr.Bytes),
				need(path.Join(j.folder, "indices.npy"), m.CSC.Indices.Bytes)); err != nil {
				return err
			}
		}
	}
	for _, step := range j.steps {
		for _, f := range step.Files {
			if err := need(f.Name, f.Size); err != nil {
				return err
			}
		}
	}
	for name, d := range j.done {
		if err := need(name+".npy", d.Rows); err != nil {
			return err
		}
	}
	for name, d := range j.partial {
		if err := need(name+".npy", d.Bytes); err != nil {
			return err
		}
	}
	return nil
}

// ResumeOptions tell an import that may go on from others.
type ResumeOptions struct {
	Out     string
	Input   string // fingerprint of input and options: only an import with the same one goes on
	Over    string // UUID of the dataset at Out, whose place the new one takes; "": none is there
	Memory  int64  // 0: what the interrupted import had, or edges.Budget
	Restart bool   // start over
	Note    func(format string, a ...any)
}

// Resume is a new directory for an import, or that of an interrupted one with the same input and
// options. memory is what the import may take.
func Resume(o ResumeOptions) (s *Staging, memory int64, err error) {
	out := filepath.Clean(o.Out)
	if o.Over == "" {
		out, err = CheckOut(o.Out)
	} else {
		err = CheckOver(out, o.Over)
	}
	if err != nil {
		return nil, 0, err
	}
	var why errs.Text
	_ = EachStale(out, func(dir string, lock *os.File) bool {
		if s != nil {
			return false
		}
		j, err := readJournal(dir, out)
		if err != nil || !j.worth() {
			return false
		}
		if why = o.mismatch(j); why != "" {
			return false
		}
		if err := j.reopen(dir); err != nil {
			why = errs.Textf("%v", err)
			return false
		}
		s = &Staging{dir: dir, out: out, over: o.Over, lock: lock, sums: map[string][]byte{},
			rows: map[string]int64{}, sealed: map[string]seal.Sealed{}, journal: j}
		return true
	})
	if s != nil {
		for name, d := range s.journal.done {
			s.sums[name], s.rows[name] = d.Sum, d.Rows
		}
		if o.Memory == 0 {
			o.Memory = s.journal.begin.Memory
		}
		o.Note("going on with an interrupted import: %s are done", s.journal.where())
		return s, o.Memory, s.sweep()
	}
	if why != "" {
		o.Note("starting over, not where an interrupted import was: %s", why)
	}
	return o.begin(out)
}

// mismatch returns the reason why an interrupted import is not resumed; "" where it is.
func (o *ResumeOptions) mismatch(j *journal) errs.Text {
	switch {
	case o.Restart:
		return errs.Textf("as {restart} asks")
	case j.begin.Version != journalVersion || j.begin.Input != o.Input:
		return errs.Textf("its input or options were others, or have changed")
	case o.Memory > 0 && o.Memory < j.begin.Memory/2:
		return errs.Textf("{memory} is less than half of what it had")
	}
	return ""
}

// reopen opens the journal in dir to write on, behind its last whole line.
func (j *journal) reopen(dir string) (err error) {
	if err := j.usable(dir); err != nil {
		return err
	}
	path := filepath.Join(dir, JournalName)
	if j.f, err = os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0); err != nil {
		return err
	}
	if err := j.f.Truncate(j.size); err != nil {
		_ = j.close()
		return err
	}
	return nil
}

// begin makes a new directory with its journal.
func (o *ResumeOptions) begin(out string) (s *Staging, memory int64, err error) {
	if s, err = makeStaging(out); err != nil {
		return nil, 0, err
	}
	s.over = o.Over
	memory = edges.Budget(o.Memory)
	path := filepath.Join(out, JournalName)
	f, err := os.OpenFile(filepath.Join(s.dir, JournalName),
		os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		return nil, 0, errors.Join(explainWrite(path, err), s.Abort())
	}
	s.journal = newJournal(f, path)
	if err := s.journal.write(journalLine{Begin: &journalBegin{journalVersion, o.Input,
		memory}}); err != nil {
		return nil, 0, errors.Join(err, s.Abort())
	}
	return s, memory, nil
}

// sweep removes runs that no line tells of.
func (s *Staging) sweep() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	live := map[string]bool{}
	for _, r := range s.journal.runs {
		name, _ := r.File()
		live[name] = !s.journal.sorted()
	}
	for _, e := range entries {
		if n := e.Name(); strings.HasPrefix(n, edges.RunPrefix) && !live[n] {
			if err := os.Remove(filepath.Join(s.dir, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Leave closes a directory that another run resumes.
func (s *Staging) Leave() error {
	err := s.journal.close()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

// Keeps reports whether an import that ended with err leaves its directory for another run: when it
// was interrupted, not when its input or the disk is at fault.
func (s *Staging) Keeps(err error) bool {
	return s.journal.worth() && (errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded))
}

// Where describes the work that another run can resume.
func (s *Staging) Where() string { return s.journal.where() }

// Journaled reports whether another run can resume what is being written.
func (s *Staging) Journaled() bool { return s.journal != nil }

// Topology returns the counts of the edges, where an interrupted import has written them.
func (s *Staging) Topology() (c edges.Counts, ok bool) { return s.counts("") }

// RelationTopology is Topology of a relation.
func (s *Staging) RelationTopology(i int) (c edges.Counts, ok bool) {
	return s.counts(dataset.EdgesDir(i))
}

func (s *Staging) counts(folder string) (c edges.Counts, ok bool) {
	if s.journal == nil || s.journal.topology[folder] == nil {
		return c, false
	}
	return *s.journal.topology[folder], true
}

// Merging reports whether an interrupted import had begun to write the topology.
func (s *Staging) Merging() bool { return s.journal != nil && s.journal.merged != nil }

// HasArray reports whether an interrupted import has written all of an array of such a shape.
func (s *Staging) HasArray(name string, rows, width int64) bool {
	if s.journal == nil {
		return false
	}
	d, ok := s.journal.done[name]
	return ok && d.Rows == rows && d.Width == width
}

// ArrayBegun returns how much of an array an interrupted import has written; nil: nothing.
func (s *Staging) ArrayBegun(name string) *edges.ArrayMark {
	if s.journal == nil {
		return nil
	}
	if m, ok := s.journal.partial[name]; ok {
		return &m
	}
	return nil
}

// MarkArray notes how far an array is, where another run can resume it.
func (s *Staging) MarkArray(a *Array) error {
	if s.journal == nil {
		return nil
	}
	return s.journal.arrayTo(a)
}
