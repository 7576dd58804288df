package dataset

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
)

// ImportOptions are common to imports of arrays and of edge lists.
type ImportOptions struct {
	In   string // directory, archive or file; see ImportNPY and ImportEdges
	Out  string // directory to create
	Name string // defaults to the base name of Out

	// Features, Labels and SplitDir name files that are not in In, or not under the names
	// that are looked for. SplitDir holds train, val (or valid) and test.
	Features, Labels, SplitDir string

	// Nodes is the number of nodes where no features or labels tell it (0: the largest id in
	// the edges, plus 1).
	Nodes int64
	// UnlabelledOK takes nodes without a label (NaN, or -1) as unlabelled and leaves them out
	// of the splits. Without it they are an error where a label is needed: everywhere, or in
	// the given splits.
	UnlabelledOK bool
	// MakeSplits deals new splits in place of those of the input.
	MakeSplits bool
	// SplitIndex chooses one of the splits of masks that hold several (10 × nodes), from 0; "" where there is one.
	SplitIndex string
	// Map gives the input's name for one of ours, such as "train": "my_train_ids"; see ArrayNames.
	Map map[string]string
	// IgnoreColumns takes the first two columns of an edge list that has more.
	IgnoreColumns bool
	// AllowOutside reads files that a description in the input names outside its own folder.
	AllowOutside bool
	// Undirected stores each edge both ways, and drops repeated edges.
	Undirected bool
	// AddReverse adds the opposite of each edge that is not a self loop; repeated edges stay.
	AddReverse bool
	// SelfLoops says what becomes of edges from a node to itself: "keep" (or ""), "drop", or
	// "add": one for each node, whether it had some or none.
	SelfLoops string
	// Dedup drops repeated edges.
	Dedup bool
	// NoEdges keeps the nodes and drops all edges.
	NoEdges bool
	// FeatureDType is the type of features.npy, float32 or float16; empty: float16 where the source is float16.
	FeatureDType string
	// FeatureFn, such as "hash:7", computes the features from the node's number, in place of Features.
	FeatureFn string
	// Dim is the number of features to make up for an edge list that has none (64).
	Dim int

	Seed                       uint64  // of the splits, and of made-up features
	TrainFraction, ValFraction float64 // when no splits are given: 0.6 and 0.2, rest test

	// Memory bounds what the import takes: DefaultMemory, or half of what is available.
	Memory int64
	// Restart starts over where an interrupted import with the same input and options could be gone on with.
	Restart  bool
	Progress Progress
	Note     func(text string) // hears of what is chosen or odd; may be nil

	Format FormatOptions // of single formats

	inputs []string // files that a format reads beside those that the fields name, for the fingerprint
}

func (o *ImportOptions) note(format string, args ...any) {
	if o.Note != nil {
		o.Note(fmt.Sprintf(format, args...))
	}
}

func (o *ImportOptions) rules() edgeRules {
	return edgeRules{dedup: o.Dedup || o.Undirected, opposite: o.Undirected || o.AddReverse, noSelf: o.SelfLoops == "drop",
		addSelf: o.SelfLoops == "add" && !o.NoEdges, none: o.NoEdges}
}

// memoryBudget is the budget that a user gave, or one that fits the machine. The result does not depend on it.
func memoryBudget(given int64) int64 {
	if given > 0 {
		return given
	}
	given = DefaultMemory
	if free, err := hostmem.AvailableBytes(); err == nil {
		given = min(given, free/2)
	}
	return given
}

func (o *ImportOptions) fill() error {
	if o.In == "" {
		return errs.New(errs.Usage, "--in is missing: name the file or directory to import")
	}
	if o.Name == "" {
		o.Name = filepath.Base(filepath.Clean(o.Out))
	}
	if o.TrainFraction == 0 && o.ValFraction == 0 {
		o.TrainFraction, o.ValFraction = 0.6, 0.2
	}
	if !(o.TrainFraction >= 0 && o.ValFraction >= 0 && o.TrainFraction+o.ValFraction <= 1) {
		return errs.New(errs.Usage, "--train-fraction %g and --val-fraction %g are not parts of a whole; give numbers from 0 that make at most 1 together", o.TrainFraction, o.ValFraction)
	}
	if o.Dim == 0 {
		o.Dim = 64
	}
	if o.Dim < 1 || o.Dim > maxDim {
		return errs.New(errs.Usage, "--dim %d is outside 1..%d", o.Dim, maxDim)
	}
	if o.Nodes < 0 || o.Memory < 0 {
		return errs.New(errs.Usage, "--nodes %d: a number of nodes (or a memory budget, here %d) cannot be negative", o.Nodes, o.Memory)
	}
	if o.Nodes > maxTextNodes {
		return errs.New(errs.Usage, "--nodes %d: at most %d nodes can be imported", o.Nodes, int64(maxTextNodes))
	}
	if err := o.checkFeatureDType(); err != nil {
		return err
	}
	if o.FeatureFn != "" && o.Features != "" {
		return errs.New(errs.Usage, "--feature-fn %s and --features %s: give one of them", o.FeatureFn, o.Features)
	}
	if o.MakeSplits && o.SplitDir != "" {
		return errs.New(errs.Usage, "--make-splits and --splits %s: give one of them", o.SplitDir)
	}
	if o.SplitIndex != "" {
		if n, err := strconv.Atoi(o.SplitIndex); err != nil || n < 0 {
			return errs.New(errs.Usage, "--split-index %q: give the number of a split, from 0", brief(o.SplitIndex))
		}
	}
	switch o.SelfLoops {
	case "", "keep", "drop", "add":
	default:
		return errs.New(errs.Usage, "--self-loops %q is unknown; use keep, drop or add", o.SelfLoops)
	}
	for _, p := range [][2]string{{"--in", o.In}, {"--features", o.Features}, {"--labels", o.Labels}, {"--splits", o.SplitDir}} {
		if err := readable(p[0], p[1]); err != nil {
			return err
		}
	}
	return nil
}

// readable says what is wrong with the path of a flag before any work is done for it.
func readable(flag, path string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Stat(path); err != nil {
		return errs.New(errs.Usage, "%s: %w; name what is there and can be read", flag, err)
	}
	return nil
}

func (o *ImportOptions) source(kind string, files ...string) Source {
	s := Source{Kind: kind, Options: map[string]string{}, Counts: map[string]int64{}}
	for _, f := range files {
		if f != "" {
			s.From = append(s.From, filepath.Base(f))
		}
	}
	for name, set := range map[string]bool{"unlabelled-ok": o.UnlabelledOK, "undirected": o.Undirected, "add-reverse": o.AddReverse, "dedup": o.Dedup, "no-edges": o.NoEdges} {
		if set {
			s.Options[name] = "true"
		}
	}
	if o.SelfLoops != "" && o.SelfLoops != "keep" {
		s.Options["self-loops"] = o.SelfLoops
	}
	s.Options["seed"] = strconv.FormatUint(o.Seed, 10)
	return s
}

// importer collects the parts of an import.
type importer struct {
	o         ImportOptions
	s         *staging
	m         Meta
	sorter    *edgeSorter // made by the first edgesFrom
	nodesOpen bool        // the largest id tells how many there are
	madeUp    bool        // so are the features
	held      int64       // bytes of memory that were promised (needMemory)
	indexed   bool        // SplitIndex chose a split
	// splitKey is a stable key of a node for dealing it to a split; nil means its id.
	splitKey func(v int64) uint64
	// splitOf, where set, is the split of a node as the format defines it, or -1 for none.
	splitOf func(v int64) int
}

// runImport does what all imports share: the staging directory and its end.
func runImport(o ImportOptions, kind string, fn func(*importer) error) (err error) {
	old := debug.SetGCPercent(gcPercent)
	defer debug.SetGCPercent(old)
	var s *staging
	if kind == "debian" { // seconds of work, from an input that is not one file
		s, err = newStaging(o.Out)
		o.Memory = memoryBudget(o.Memory)
	} else {
		s, err = importStaging(&o, kind)
	}
	if err != nil {
		return err
	}
	im := &importer{o: o, s: s, m: Meta{Name: o.Name, DType: "float32", Source: o.source(kind)}}
	defer func() {
		err = errors.Join(err, im.freeSorter())
		switch {
		case err == nil:
		case s.kept(err):
			err = errors.Join(&KeptError{s.journal.where(), err}, s.leave())
		default:
			err = errors.Join(err, s.abort())
		}
	}()
	if err := fn(im); err != nil {
		return err
	}
	if o.SplitIndex != "" && !im.indexed {
		return errs.New(errs.Usage, "--split-index %s: the input has no masks of several splits; leave the flag out", o.SplitIndex)
	}
	return s.commit(im.m)
}

// gcPercent keeps Go's heap, on which labels are, near what is in use.
const gcPercent = 25

func (im *importer) freeSorter() error {
	e := im.sorter
	im.sorter = nil
	if e == nil {
		return nil
	}
	return e.close()
}

// room refuses more nodes than the disk can hold before the disk is full: an id, or a number in a heading, may be a stray one.
func (im *importer) room() error {
	from := im.o.In + " or --nodes"
	if im.nodesOpen {
		from = "the largest id in the edges"
	}
	if err := im.checkNodes(from); err != nil {
		return err
	}
	if j := im.s.journal; j != nil && j.merged != nil {
		return nil // an interrupted import that has had the room
	}
	row := 8 + 4.0 // offset and label
	if im.madeUp {
		size := 4.0
		if im.o.FeatureDType == rowtype.Float16.String() {
			size = 2
		}
		row += size * float64(im.o.Dim)
	}
	err := enoughDisk(im.o.Out, row*float64(im.m.Nodes))
	switch {
	case err == nil:
		return nil
	case im.nodesOpen:
		return fmt.Errorf("the largest id in the edges is %d, so there are %d nodes: %w; where ids have gaps, renumber the nodes from 0", im.m.Nodes-1, im.m.Nodes, err)
	}
	return fmt.Errorf("there are %d nodes, as --nodes or %s says: %w", im.m.Nodes, im.o.In, err)
}

// topology writes what edgesFrom took.
func (im *importer) topology(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, im.freeSorter()) }()
	var c edgeCounts
	if j := im.s.journal; j != nil && j.topology != nil {
		c = *j.topology
	} else {
		if im.sorter == nil {
			if im.sorter, err = newEdgeSorter(im.s, im.o.Memory, im.o.rules()); err != nil {
				return err
			}
		}
		if err = im.room(); err != nil {
			return err
		}
		if c, err = im.s.writeCSC(ctx, im.sorter, im.m.Nodes, im.o.Progress); err != nil {
			return err
		}
	}
	im.m.Edges, im.m.Nodes = c.Stored, c.Nodes
	for name, n := range map[string]int64{"duplicate-edges": c.Duplicates, "self-loops": c.Kept, "self-loops-dropped": c.Self,
		"self-loops-added": c.Added, "opposite-edges": c.Opposite} {
		if n > 0 {
			im.m.Source.Counts[name] = n
		}
	}
	// Each edge gives at most two nodes neighbours.
	if ends := 2 * (c.Taken + 1); c.Nodes/8 > ends && !im.o.NoEdges {
		im.o.note("at most %d of %d nodes have an edge: ids are sparse; renumber them from 0 without gaps, or the others cost memory and disk for nothing", ends, c.Nodes)
	}
	return nil
}
