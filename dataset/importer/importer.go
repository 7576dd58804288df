// Package importer makes datasets of other programs' files. Each format has a file of its own and
// a line in the list of format.go. importer.go runs an import; topology.go, features.go, labels.go
// and splits.go write the parts of the dataset. A killed import continues from its journal
// (dataset/build/resume.go).
package importer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/internal/errs"
	"helios/internal/options"
)

// importer is an import: the options, the folder that is made, and the dataset so far. A format's
// own type embeds it. Its methods stand by their subject: topology.go, features.go, labels.go and
// splits.go write a part of the dataset each; table.go, ids.go and classes.go serve them.
//
// Large: the parts share the options, the budget and the numbering of nodes.
type importer struct {
	o Options
	s *build.Staging
	m dataset.Meta
	// input is the fingerprint of files and options, where the import can be resumed
	input string
	held  int64 // bytes of memory that were promised (needMemory)
	// folder gets features, or labels and splits: that of a part of a typed dataset; "" of others.
	folder string
	ids    nodeIDs
	// leastNodes returns the least number of nodes, where nothing else gives it; may be nil.
	leastNodes func(context.Context) (int64, error)
	tables     map[string]*table // that were opened, by kind and path

	sorter    *edges.Sorter // made by the first edgesFrom
	nodesOpen bool          // the largest id gives the number of nodes
	// countLonely has nodes without an edge counted and named, where only ids tell of nodes.
	countLonely bool

	targets     *targets // of tasks that ask for no class; nil: not read
	used        classSet // classes with a node; nil without labels
	classesFrom string   // the source of NumClasses, where it is no option

	indexed bool // SplitIndex has chosen a split
	// splitKey, where set, deals a node by this instead of its number.
	splitKey func(v int64) uint64
	// splitOf, where set, is the split of a node as the format defines it, or -1 for none.
	splitOf func(v int64) int
	// earlier are the splits of the first nodes, -1: none; nil: the import adds to no dataset.
	earlier []int8
	// noRows says that the nodes have no features: the dataset is of format 2.
	noRows bool
}

// request holds what a format asks of run.
type request struct {
	kind    string   // the format's name
	options any      // the format's own, a pointer; the result depends on them
	Options          // those of all formats, filled in
	inputs  []string // files that are read beside those that Options names
	// once keeps an interrupted import from being resumed.
	once bool
	over *dataset.Dataset // whose place the result takes; nil: nothing is there
}

// appends returns the UUID of the dataset that is added to; "": a new one is made. input is the
// fingerprint of what is added: a command whose end nobody saw does not add edges twice.
func (r *request) appends(input string) (uuid string, err error) {
	if r.over == nil {
		return "", nil
	}
	if a := r.over.Meta.Source.Appended; len(a) > 0 && a[len(a)-1].Input == input {
		// Killed at its end, it has left the old dataset.
		_ = build.EachStale(r.Out, func(dir string, lock *os.File) bool {
			_, err := os.Stat(filepath.Join(dir, build.JournalName))
			return err == nil && lock.Close() == nil
		})
		return "", errs.New(errs.Refused, "%s has what these files add already, from the last import", r.Out)
	}
	return r.over.Meta.UUID, nil
}

// run does what all imports share: the staging directory and its end.
func run(r request, fn func(*importer) error) (err error) {
	if err := options.Check(r.options); err != nil {
		return err
	}
	old := debug.SetGCPercent(gcPercent)
	defer debug.SetGCPercent(old)
	ballast := make([]byte, min(gcBallast, edges.Budget(r.Memory)/8))
	defer runtime.KeepAlive(ballast)
	var s *build.Staging
	var input string
	o := r.Options
	if r.once {
		s, err = build.NewStaging(o.Out)
		o.Memory = edges.Budget(o.Memory)
	} else {
		var over string
		if r.over == nil {
			_, err = build.CheckOut(o.Out)
		}
		if err == nil {
			input, err = fingerprint(r)
		}
		if err == nil {
			over, err = r.appends(input)
		}
		if err == nil {
			s, o.Memory, err = build.Resume(build.ResumeOptions{Out: o.Out, Input: input + over,
				Over: over, Memory: o.Memory, Restart: o.Restart, Note: o.note})
		}
	}
	if err != nil {
		return err
	}
	im := &importer{o: o, s: s, m: dataset.Meta{Name: o.Name, DType: "float32",
		Source: o.source(r.kind)}, input: input}
	defer func() {
		err = errors.Join(err, im.freeSorter())
		switch {
		case err == nil:
		case s.Keeps(err):
			err = errors.Join(&KeptError{s.Where(), err}, s.Leave())
		default:
			err = errors.Join(err, s.Abort())
		}
	}()
	if err := fn(im); err != nil {
		return err
	}
	if o.SplitIndex != "" && !im.indexed {
		return errs.New(errs.Usage,
			"%v %s: the input has no masks of several splits; leave it out",
			errs.Key("split-index"), o.SplitIndex)
	}
	return s.Commit(im.describe())
}

// runNamed is run of a format whose input is a folder, or a file, that gives the dataset's source
// its name.
func runNamed(r request, fn func(*importer) error) error {
	return run(r, func(im *importer) error {
		im.m.Source.From = r.source(r.kind, im.absIn(), r.Features, r.Labels, r.SplitDir).From
		return fn(im)
	})
}

// parts are the edges, features, labels and splits that a format has found.
type parts struct {
	edges     edges.Source
	features  nodeFile     // the input's own, where they are taken
	write     func() error // writes the features, where nothing else has them
	labels    []int32      // nil: there are none
	labelFile string
	splits    []splitSet // none, or all three
}

// write writes the parts, the long ones last but for what depends on them: a format checks what is
// small and likely wrong before it.
func (im *importer) write(ctx context.Context, p parts) error {
	if err := im.edgesFrom(ctx, p.edges); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	features := p.write
	if features == nil {
		features = func() error { return im.ownOrOther(ctx, p.features) }
	}
	if err := features(); err != nil {
		return err
	}
	return im.labelsAndSplits(p.labels, p.labelFile, p.splits)
}

// gcPercent keeps Go's heap, on which labels are, near what is in use.
const gcPercent = 25

// gcBallast is never written, and so takes no memory: it counts as in use, so that a small heap is
// not collected each megabyte.
const gcBallast = 32 << 20

// KeptError reports an interruption after which the import can be resumed.
type KeptError struct {
	Where string // what is done
	Err   error
}

func (e *KeptError) Error() string { return e.Err.Error() }

// Unwrap returns what interrupted it.
func (e *KeptError) Unwrap() error { return e.Err }
