package dataset

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// FormatOptions are those that single formats have beside the common ones.
type FormatOptions struct {
	// Split chooses a folder of split/ where an OGB dataset has several.
	Split string
	// AddInverse says whether OGB's edges stand for both directions: "yes", "no", or "auto" (also ""), which
	// is what the dataset's master.csv or its name says.
	AddInverse string
	// Classes is IGB's set of labels: "19" (also "") or "2K".
	Classes string
	// Graph is the number of a graph in a file of DGL, from 0; "" where the file holds only one.
	Graph string
	// Task and Feature are names in GraphBolt's metadata.yaml, where there are several.
	Task, Feature string
	// NormalizeFeatures is "row" where planetoid is to divide each node's features by their sum.
	NormalizeFeatures string
	// Raw is what headerless arrays do not tell (raw).
	Raw RawOptions
}

// inFolder checks that o.In is a folder and that it has the files, and otherwise says what a folder of the format must hold.
func (o *ImportOptions) inFolder(must string, files ...string) error {
	st, err := os.Stat(o.In)
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	if !st.IsDir() {
		return errs.New(errs.Usage, "%s is a file; --in must be a folder with %s", o.In, must)
	}
	for _, f := range files {
		if !isFile(filepath.Join(o.In, f)) {
			return errs.New(errs.Usage, "%s has no %s; --in must be a folder with %s", o.In, f, must)
		}
	}
	return nil
}

// runFormat is runImport of a format whose input is a folder, or a file.
func runFormat(o ImportOptions, kind string, fn func(*importer) error) error {
	return runImport(o, kind, func(im *importer) error {
		im.m.Source.From = o.source(kind, im.absIn(), o.Features, o.Labels, o.SplitDir).From
		return fn(im)
	})
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && !st.IsDir()
}

// features writes features.npy from an array that must have a row for each node.
func (im *importer) features(ctx context.Context, a *npy.Array) error {
	if err := im.oneRowEach(a, "features"); err != nil {
		return err
	}
	if j := im.s.journal; j != nil && a.Seekable() {
		// Gone on with, a member of an archive is not read from its start, so no checksum covers what is.
		if _, ok := j.partial["features"]; ok {
			if err := a.Check(ctx); err != nil {
				return err
			}
		}
	}
	return im.matrix(ctx, a)
}

// featuresOr makes the features that --feature-fn or --features says, or else those of own.
func (im *importer) featuresOr(ctx context.Context, own func() error) error {
	switch {
	case im.o.FeatureFn != "":
		return im.hashFeatures(im.o.FeatureFn)
	case im.o.Features != "":
		return im.featureFile(ctx, im.o.Features)
	}
	return own()
}

// oneRowEach checks that an array has a row for each node.
func (im *importer) oneRowEach(a *npy.Array, what string) error {
	if sh := a.Header.Shape; len(sh) == 0 || sh[0] != im.m.Nodes {
		return errs.New(errs.Usage, "%s: %s have shape %s, there are %d nodes; one row per node is needed", a.Name, what, a.Header.ShapeString(), im.m.Nodes)
	}
	return nil
}

// featureFile writes features.npy from a file that --features names.
func (im *importer) featureFile(ctx context.Context, path string) error {
	if !strings.HasSuffix(path, ".npy") {
		return im.csvMatrix(ctx, path)
	}
	a, err := npy.Open(path)
	if err != nil {
		return err
	}
	return im.features(ctx, a)
}

// nodeLabels reads an array of labels, one for each node.
func (im *importer) nodeLabels(a *npy.Array) ([]int32, error) {
	if err := im.oneRowEach(a, "labels"); err != nil {
		return nil, err
	}
	return im.labelArray(a)
}

// eachInt calls fn with the integers of an array of one dimension, in order.
func eachInt(a *npy.Array, fn func(pos, x int64) error) error {
	r, err := a.Reader(0)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]int64, 32<<10)
	for pos := int64(0); pos < a.Header.Elements(); {
		n, err := r.Ints(buf)
		if err != nil {
			return err
		}
		for _, x := range buf[:n] {
			if err := fn(pos, x); err != nil {
				return err
			}
			pos++
		}
	}
	return nil
}

// folderSplits reads train, valid (or val) and test of a folder, each a text or .npy file.
func (im *importer) folderSplits(ctx context.Context, dir string) ([]splitSet, error) {
	var sets []splitSet
	for i, names := range splitFiles {
		path := findText(dir, names)
		if path == "" {
			path = findText(dir, splitNames[i])
		}
		if path == "" {
			return nil, errs.New(errs.Usage, "%s has no split %q; all three are needed", dir, names[0])
		}
		ids, err := im.splitFile(ctx, path)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{path, ids})
	}
	return sets, nil
}

func (im *importer) splitFile(ctx context.Context, path string) ([]int64, error) {
	if !strings.HasSuffix(path, ".npy") {
		return im.csvIDs(ctx, path)
	}
	a, err := npy.Open(path)
	if err != nil {
		return nil, err
	}
	return im.splitIDs(a)
}

// closing closes an archive and joins what that says to err.
func closing(err error, a *npy.Archive) error { return errors.Join(err, a.Close()) }
