package dataset

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"helios/internal/errs"
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
	// Reverse adds the opposite of each edge, and drops repeated edges.
	Reverse bool
	// Dedup drops repeated edges.
	Dedup bool
	// NoEdges keeps the nodes and drops all edges.
	NoEdges bool
	// FeatureDType is the type of features.npy, float32 or float16; empty: float16 where the source is float16.
	FeatureDType string
	// Dim is the number of features to make up for an edge list that has none (64).
	Dim int

	Seed                       uint64  // of the splits, and of made-up features
	TrainFraction, ValFraction float64 // when no splits are given: 0.6 and 0.2, rest test
	Memory                     int64   // for sorting edges: DefaultMemory
	Progress                   Progress

	Format FormatOptions // of single formats
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
	if err := o.checkFeatureDType(); err != nil {
		return err
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
	for name, set := range map[string]bool{"unlabelled-ok": o.UnlabelledOK, "reverse": o.Reverse, "dedup": o.Dedup, "no-edges": o.NoEdges} {
		if set {
			s.Options[name] = "true"
		}
	}
	s.Options["seed"] = strconv.FormatUint(o.Seed, 10)
	return s
}

// importer collects the parts of an import.
type importer struct {
	o      ImportOptions
	s      *staging
	m      Meta
	sorter *edgeSorter
	// splitKey is a stable key of a node for dealing it to a split; nil means its id.
	splitKey func(v int64) uint64
	// splitOf, where set, is the split of a node as the format defines it, or -1 for none.
	splitOf func(v int64) int
}

// runImport does what all imports share: the staging directory and its end.
func runImport(o ImportOptions, kind string, fn func(*importer) error) (err error) {
	s, err := newStaging(o.Out)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort())
		}
	}()
	im := &importer{o: o, s: s, sorter: newEdgeSorter(s, o.Memory), m: Meta{Name: o.Name, DType: "float32", Source: o.source(kind)}}
	defer func() { err = errors.Join(err, im.sorter.free()) }()
	if err := fn(im); err != nil {
		return err
	}
	return s.commit(im.m)
}

// edge takes one edge whose ids are checked.
func (im *importer) edge(src, dst int64) error {
	if im.o.NoEdges {
		return nil
	}
	if err := im.sorter.add(src, dst); err != nil {
		return err
	}
	if im.o.Reverse && src != dst {
		return im.sorter.add(dst, src)
	}
	return nil
}

func (im *importer) topology(ctx context.Context) error {
	c, err := im.s.writeCSC(ctx, im.sorter, im.m.Nodes, edgeRules{dedup: im.o.Dedup || im.o.Reverse}, im.o.Progress)
	im.m.Edges = c.stored
	if c.duplicates > 0 {
		im.m.Source.Counts["duplicate-edges"] = c.duplicates
	}
	return err
}
