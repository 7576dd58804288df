package dataset

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"

	"helios/dataset/seal"
)

// An import that is killed goes on where it was. Its directory has a journal: a line of JSON for
// each step that is on the disk, written and synced after what it tells of. What was done later
// than the last line is done again.
const (
	journalName    = "import.journal"
	journalVersion = 1
)

type journalLine struct {
	Begin    *journalBegin `json:"begin,omitempty"`
	Source   *sourceMark   `json:"source,omitempty"`
	Run      *run          `json:"run,omitempty"`      // a sorted run is there
	Replaces []int         `json:"replaces,omitempty"` // by Run: these are merged into it
	Merged   *mergedMark   `json:"merged,omitempty"`
	Topology *edgeCounts   `json:"topology,omitempty"` // is whole
	Arrays   []arrayDone   `json:"arrays,omitempty"`   // of Topology: indptr and indices
	Array    string        `json:"array,omitempty"`
	Done     *arrayDone    `json:"done,omitempty"`    // the array is whole
	Partial  *arrayMark    `json:"partial,omitempty"` // the array is there up to here; neither: it begins anew
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

type mergedMark struct {
	Dst  uint64 `json:"dst"`
	Src  uint64 `json:"src"`
	Done int64  `json:"done"` // keys
	// Total is how many keys there are, with the self loops that are added.
	Total int64   `json:"total"`
	CSC   cscMark `json:"csc"`
}

func (m *mergedMark) from() edge { return edge{m.Dst, m.Src} }

type arrayDone struct {
	Sum   []byte `json:"sum"`
	Rows  int64  `json:"rows"`
	Width int64  `json:"width,omitempty"`
}

// partMark is what runs have of a part of a source.
type partMark struct {
	spans []span
	total int64 // edges, where known
	known bool
	units int64
}

func (p *partMark) ended() bool {
	have := int64(0)
	for _, s := range p.spans {
		have += s.To - s.From
	}
	return p.known && have == p.total
}

// journal is nil where nothing is to be gone on with; its methods that end it may then be called.
type journal struct {
	f    *os.File
	path string // as the user knows it
	size int64

	begin    journalBegin
	sources  map[int]sourceMark
	parts    map[int]map[int]*partMark
	runs     []run
	lastRun  int
	merged   *mergedMark
	topology *edgeCounts
	done     map[string]arrayDone
	partial  map[string]arrayMark
}

// journalStep lets tests end an import before and after each line.
var journalStep func(line []byte, written bool) error

func newJournal(f *os.File, path string) *journal {
	return &journal{f: f, path: path, sources: map[int]sourceMark{}, parts: map[int]map[int]*partMark{}, done: map[string]arrayDone{}, partial: map[string]arrayMark{}}
}

// worth says whether there is anything that another run need not do again.
func (j *journal) worth() bool {
	return j != nil && (len(j.runs) > 0 || j.topology != nil || len(j.done) > 0 || len(j.partial) > 0)
}

// where says how far it is.
func (j *journal) where() string {
	switch {
	case j.topology != nil || len(j.runs) == 0:
		if m, ok := j.partial["features"]; ok {
			return fmt.Sprintf("%.1f GB of the features", float64(m.Bytes)/1e9)
		}
		if _, ok := j.done["features"]; ok && j.topology == nil {
			return "the features"
		}
		if _, ok := j.done["features"]; ok {
			return "the edges and the features"
		}
		return "the edges"
	case j.merged != nil: // repeated edges that went between two marks make Total smaller than what is done
		return fmt.Sprintf("%.0f %% of the merge of edges", 100*float64(j.merged.Done)/float64(max(j.merged.Total, j.merged.Done, 1)))
	}
	units, total, edges := int64(0), int64(0), int64(0)
	for id, s := range j.sources {
		total += s.Total
		for _, p := range j.parts[id] {
			if p.ended() {
				units += p.units
			}
			for _, s := range p.spans {
				edges += s.To - s.From
			}
		}
	}
	switch {
	case units == 0 && edges > 0: // of parts that are not at their end, such as the only one of a .gz file
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
		if journalStep == nil {
			return nil
		}
		return journalStep(line, written)
	}
	if err := step(false); err != nil {
		return err
	}
	if writeFault != nil {
		err = writeFault(j.path)
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
	case l.Source != nil:
		j.sources[l.Source.ID] = *l.Source
	case l.Run != nil:
		var keep []run
		for _, r := range j.runs {
			gone := false
			for _, id := range l.Replaces {
				gone = gone || r.ID == id
			}
			if !gone {
				keep = append(keep, r)
			}
		}
		r := *l.Run
		for _, p := range r.Pieces {
			parts := j.parts[p.Source]
			if parts == nil {
				parts = map[int]*partMark{}
				j.parts[p.Source] = parts
			}
			m := parts[p.Part]
			if m == nil {
				m = &partMark{}
				parts[p.Part] = m
			}
			if p.To > p.From {
				m.spans = append(m.spans, p.span)
			}
			if p.End {
				m.known, m.total, m.units = true, p.To, p.Units
			}
		}
		r.Pieces = nil
		j.runs = append(keep, r)
		j.lastRun = max(j.lastRun, r.ID)
	case l.Merged != nil:
		j.merged = l.Merged
	case l.Topology != nil:
		j.topology = l.Topology
		for i, name := range topologyArrays {
			j.done[name] = l.Arrays[i]
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

func (j *journal) source(id int, s edgeSource) error {
	m := sourceMark{id, s.Name, s.Unit, s.Total, s.Parts}
	if old, ok := j.sources[id]; ok {
		if old != m {
			return fmt.Errorf("%s: the edges are %v, the interrupted import read %v; run the import again with --restart", s.Name, m, old)
		}
		return nil
	}
	return j.write(journalLine{Source: &m})
}

func (j *journal) ran(r run, replaces []int) error {
	return j.write(journalLine{Run: &r, Replaces: replaces})
}

func (j *journal) mergedTo(to edge, done, total int64, csc cscMark) error {
	return j.write(journalLine{Merged: &mergedMark{to.dst, to.src, done, total, csc}})
}

var topologyArrays = []string{"indptr", "indices"}

func (j *journal) topologyDone(c edgeCounts, s *staging) error {
	l := journalLine{Topology: &c}
	for _, name := range topologyArrays {
		l.Arrays = append(l.Arrays, arrayDone{Sum: s.sums[name], Rows: s.rows[name]})
	}
	return j.write(l)
}

// arrayTo notes how far an array is.
func (j *journal) arrayTo(a *arrayOut) error {
	at, err := a.mark()
	if err != nil {
		return err
	}
	return j.write(journalLine{Array: a.name, Partial: &at})
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
	path := filepath.Join(dir, journalName)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	j := newJournal(nil, filepath.Join(out, journalName))
	for {
		line, rest, whole := bytes.Cut(text, []byte{'\n'})
		var l journalLine
		if !whole || json.Unmarshal(line, &l) != nil || l.Topology != nil && len(l.Arrays) != len(topologyArrays) {
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
	if j.topology == nil {
		for _, r := range j.runs {
			groups := (r.Keys + int64(r.Group) - 1) / int64(r.Group)
			if err := need(runName(r.ID), r.Bytes+groups*indexEntry+4); err != nil {
				return err
			}
		}
		if m := j.merged; m != nil {
			if err := errors.Join(need("indptr.npy", m.CSC.Indptr.Bytes), need("indices.npy", m.CSC.Indices.Bytes)); err != nil {
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

// importStaging is a new directory for an import, or that of an interrupted one with the same
// input and options.
func importStaging(o *ImportOptions, kind string) (*staging, error) {
	out, err := checkOut(o.Out)
	if err != nil {
		return nil, err
	}
	input, err := fingerprint(o, kind)
	if err != nil {
		return nil, err
	}
	var s *staging
	why := ""
	_ = eachStale(out, func(dir string, lock *os.File) bool {
		if s != nil {
			return false
		}
		j, err := readJournal(dir, out)
		switch {
		case err != nil || !j.worth():
			return false
		case o.Restart:
			why = "as --restart asks"
		case j.begin.Version != journalVersion || j.begin.Input != input:
			why = "its input or options were others, or have changed"
		case o.Memory > 0 && o.Memory < j.begin.Memory/2:
			why = "--memory is less than half of what it had"
		default:
			if err = j.usable(dir); err != nil {
				why = err.Error()
				break
			}
			if j.f, err = os.OpenFile(filepath.Join(dir, journalName), os.O_RDWR|os.O_APPEND, 0); err != nil {
				why = err.Error()
				break
			}
			if err = j.f.Truncate(j.size); err != nil { // a torn last line
				why = err.Error()
				_ = j.close()
				break
			}
			s = &staging{dir: dir, out: out, lock: lock, sums: map[string][]byte{}, rows: map[string]int64{}, sealed: map[string]seal.Sealed{}, journal: j}
			return true
		}
		return false
	})
	if s != nil {
		for name, d := range s.journal.done {
			s.sums[name], s.rows[name] = d.Sum, d.Rows
		}
		if o.Memory == 0 {
			o.Memory = s.journal.begin.Memory
		}
		o.note("going on with an interrupted import: %s are done", s.journal.where())
		return s, s.sweep()
	}
	if why != "" {
		o.note("starting over, not where an interrupted import was: %s", why)
	}
	if s, err = makeStaging(out); err != nil {
		return nil, err
	}
	o.Memory = memoryBudget(o.Memory)
	f, err := os.OpenFile(filepath.Join(s.dir, journalName), os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		return nil, errors.Join(explainWrite(filepath.Join(out, journalName), err), s.abort())
	}
	s.journal = newJournal(f, filepath.Join(out, journalName))
	if err := s.journal.write(journalLine{Begin: &journalBegin{journalVersion, input, o.Memory}}); err != nil {
		return nil, errors.Join(err, s.abort())
	}
	return s, nil
}

// sweep removes runs that no line tells of.
func (s *staging) sweep() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	live := map[string]bool{}
	for _, r := range s.journal.runs {
		live[runName(r.ID)] = s.journal.topology == nil
	}
	for _, e := range entries {
		if n := e.Name(); strings.HasPrefix(n, "sort-") && !live[n] {
			if err := os.Remove(filepath.Join(s.dir, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// leave closes a directory that another run goes on with.
func (s *staging) leave() error {
	err := s.journal.close()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

// KeptError says that an interrupted import can be gone on with.
type KeptError struct {
	Where string // what is done
	Err   error
}

func (e *KeptError) Error() string { return e.Err.Error() }

// Unwrap is what interrupted it.
func (e *KeptError) Unwrap() error { return e.Err }

// kept says whether an import that ended with err leaves its directory for another run: when it
// was interrupted, not when its input or the disk is at fault.
func (s *staging) kept(err error) bool {
	return s.journal.worth() && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded))
}

// maxListed bounds the files whose sizes and times tell one input from another.
const maxListed = 1 << 16

// fingerprint is a hash of what an import's result depends on: the options, and names, sizes and
// times of the input files.
func fingerprint(o *ImportOptions, kind string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n", kind)
	v := reflect.ValueOf(*o)
	for i := range v.NumField() {
		f := v.Type().Field(i)
		switch {
		case !f.IsExported(), f.Type.Kind() == reflect.Func, f.Name == "Memory", f.Name == "Restart", f.Name == "Out":
			continue
		}
		b, err := json.Marshal(v.Field(i).Interface())
		if err != nil {
			return "", fmt.Errorf("option %s: %w", f.Name, err)
		}
		fmt.Fprintf(h, "%s %s\n", f.Name, b)
	}
	for _, path := range slices.Concat([]string{o.In, o.Features, o.Labels, o.SplitDir}, o.inputs) {
		if path == "" {
			continue
		}
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
		n := 0
		if err := listed(path, &n, nil, func(p string, st fs.FileInfo) {
			if st.IsDir() {
				fmt.Fprintf(h, "%q\n", p)
			} else {
				// A file that is put in another's place, or written without a change of its time, has another time of change.
				changed := int64(0)
				if sys, ok := st.Sys().(*syscall.Stat_t); ok {
					changed = sys.Ctim.Nano()
				}
				fmt.Fprintf(h, "%q %d %d %d\n", p, st.Size(), st.ModTime().UnixNano(), changed)
			}
		}); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// listed calls fn with a file, or a folder and what is in it, up to maxListed of them. Links are followed, since
// datasets often are some; above are the folders on the way.
func listed(path string, n *int, above []fs.FileInfo, fn func(path string, st fs.FileInfo)) error {
	st, err := os.Stat(path)
	switch {
	case *n >= maxListed || err != nil && len(above) > 0:
		return nil //nolint:nilerr // a dangling link is no input; what is needed says so when it is opened
	case err != nil:
		return err
	}
	*n++
	fn(path, st)
	if !st.IsDir() || slices.ContainsFunc(above, func(a fs.FileInfo) bool { return os.SameFile(a, st) }) {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil && len(above) > 0 {
		return nil //nolint:nilerr // such as lost+found
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), partialMark) { // --out may be in --in
			continue
		}
		if err := listed(filepath.Join(path, e.Name()), n, append(slices.Clip(above), st), fn); err != nil {
			return err
		}
	}
	return nil
}
