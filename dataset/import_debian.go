package dataset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset/debian"
	"helios/internal/errs"
)

// DebianOptions shape the import of a Debian package index.
type DebianOptions struct {
	// In holds package indexes (Packages files, plain, .gz, .lz4 or .xz) or folders of them.
	// Empty means apt's own lists, and if there are none, what "apt-cache dumpavail" prints.
	In   []string
	Out  string
	Name string // defaults to the base name of Out
	Dim  int    // words that become features (DebianDim)
	// LongDescriptions also takes the words of the long descriptions, where the index has
	// them. Indexes differ in that, so without it the same archive gives the same features.
	LongDescriptions bool
	// OneWay keeps only the edges from a package to its dependents. Without it messages also
	// flow from a package to what it needs.
	OneWay                     bool
	NoEdges                    bool
	FeatureDType               string  // as in ImportOptions
	Seed                       uint64  // of the splits
	TrainFraction, ValFraction float64 // 0.6 and 0.2, the rest is test
	Progress                   Progress
}

// DebianDim is the default number of features of a Debian import.
const DebianDim = 256

// DebianReport says what an import found.
type DebianReport struct {
	Packages     int64    `json:"packages"`
	Dependencies int64    `json:"dependencies"` // distinct pairs (package, package it names)
	Edges        int64    `json:"edges"`        // as stored, both ways unless OneWay
	Sections     int      `json:"sections"`
	Words        int      `json:"words"`
	From         []string `json:"from"`
}

// ImportDebian makes a graph of a Debian package index: packages are nodes, their sections the
// classes, the words of their synopses the features, and every package that a package names in
// Depends, Pre-Depends, Recommends, Suggests or Enhances, alternatives included, is an edge.
//
// A package's features are TF-IDF weights of the Dim most frequent words, without those in its
// own or its source package's name. Section, Tag, Filename and the name itself are not used.
// Edges are stored in both directions: what a package needs says what it is made of, and what
// needs it says what it is for, and libraries, which need little, have only the latter.
func ImportDebian(ctx context.Context, o DebianOptions) (DebianReport, error) {
	var r DebianReport
	if o.Dim == 0 {
		o.Dim = DebianDim
	}
	io := ImportOptions{In: string(filepath.Separator), Out: o.Out, Name: o.Name, Seed: o.Seed, Dim: o.Dim,
		TrainFraction: o.TrainFraction, ValFraction: o.ValFraction, NoEdges: o.NoEdges, Undirected: !o.OneWay, Dedup: true, UnlabelledOK: true, Progress: o.Progress, FeatureDType: o.FeatureDType}
	if err := io.fill(); err != nil {
		return r, err
	}
	err := runImport(io, "debian", func(im *importer) error {
		packages, from, err := readIndexes(ctx, o)
		if err != nil {
			return err
		}
		r.From = from
		return im.fromPackages(ctx, o, packages, &r)
	})
	return r, err
}

// readIndexes merges indexes: of a package in several, the newest version counts.
func readIndexes(ctx context.Context, o DebianOptions) (packages []debian.Package, from []string, err error) {
	in := o.In
	dump := false
	if len(in) == 0 {
		if in, err = debian.FindLists(debian.ListsDir); err != nil || len(in) == 0 {
			dump = true
		}
	}
	newest := map[string]debian.Package{}
	keep := func(p debian.Package) error {
		if have, ok := newest[p.Name]; !ok || debian.CompareVersions(p.Version, have.Version) > 0 {
			newest[p.Name] = p
		}
		if len(newest)&0xfff == 0 {
			o.Progress.report("packages", int64(len(newest)), 0)
			return ctx.Err()
		}
		return nil
	}
	if dump {
		cmd := exec.CommandContext(ctx, "apt-cache", "dumpavail")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, nil, errs.New(errs.Capability, "no package lists in %s and apt-cache dumpavail failed (%w %s); run \"apt-get update\" or give a Packages file with --in",
				debian.ListsDir, err, strings.TrimSpace(stderr.String()))
		}
		if err := debian.Parse(bytes.NewReader(out), keep); err != nil {
			return nil, nil, errs.New(errs.Usage, "apt-cache dumpavail: %w", err)
		}
		from = []string{"apt-cache dumpavail"}
	}
	var files []string
	for _, path := range in {
		if err := readable("--in", path); err != nil {
			return nil, nil, err
		}
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			found, err := debian.FindLists(path)
			if err != nil {
				return nil, nil, err
			}
			if len(found) == 0 {
				return nil, nil, errs.New(errs.Usage, "%s holds no package index (…_Packages, or Packages); give a folder or file that does, or run \"apt-get update\"", path)
			}
			files = append(files, found...)
			continue
		}
		files = append(files, path)
	}
	for _, path := range files {
		if err := parseIndex(path, keep); err != nil {
			return nil, nil, err
		}
		from = append(from, filepath.Base(path))
	}
	for _, p := range newest {
		packages = append(packages, p)
	}
	slices.SortFunc(packages, func(a, b debian.Package) int { return strings.Compare(a.Name, b.Name) })
	if len(packages) == 0 {
		return nil, nil, errs.New(errs.Usage, "%s: no packages; run \"apt-get update\" or give another index with --in", strings.Join(from, ", "))
	}
	return packages, from, nil
}

func parseIndex(path string, keep func(debian.Package) error) (err error) {
	r, err := debian.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := debian.Parse(r, keep); err != nil {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return errs.New(errs.Usage, "%s: %w", path, err)
	}
	return nil
}

func (im *importer) fromPackages(ctx context.Context, o DebianOptions, packages []debian.Package, r *DebianReport) error {
	im.m.Source.From = r.From
	delete(im.m.Source.Options, "unlabelled-ok")
	im.m.Nodes = int64(len(packages))
	node := make(map[string]int64, len(packages))
	var sections []string
	names, err := im.s.create(namesName)
	if err != nil {
		return err
	}
	for i, p := range packages {
		node[p.Name] = int64(i)
		if p.Section != "" {
			sections = append(sections, p.Section)
		}
		if _, err := fmt.Fprintln(names, p.Name); err != nil {
			return errors.Join(err, names.discard())
		}
	}
	if err := names.finish(); err != nil {
		return err
	}
	slices.Sort(sections)
	sections = slices.Compact(sections)

	seen := map[int64]bool{}
	if err := im.edgesFrom(ctx, edgeSource{Name: "dependencies", Unit: "packages", Total: im.m.Nodes, Parts: 1, Read: func(_ context.Context, _ int, emit func(src, dst []int64) error, done func(int64)) error {
		var src, dst []int64
		for i, p := range packages {
			clear(seen)
			for _, field := range p.Relations {
				for _, name := range debian.Targets(field) {
					dep, ok := node[name]
					if !ok || dep == int64(i) || seen[dep] { // a virtual or foreign package, itself, again
						continue
					}
					seen[dep] = true
					r.Dependencies++
					src, dst = append(src, dep), append(dst, int64(i)) // i listens to what it needs
				}
			}
			if len(src) >= 1<<12 || i == len(packages)-1 {
				if err := emit(src, dst); err != nil {
					return err
				}
				src, dst = src[:0], dst[:0]
			}
			done(1)
		}
		return nil
	}}); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if err := im.wordFeatures(ctx, o, packages, r); err != nil {
		return err
	}

	// Where a package goes depends on its name only, so that a split outlives an update of the
	// archive.
	labels := make([]int32, len(packages))
	for i, p := range packages {
		labels[i] = noLabel
		if at, ok := slices.BinarySearch(sections, p.Section); ok {
			labels[i] = int32(at)
		}
	}
	im.splitKey = func(v int64) uint64 {
		h := fnv.New64a()
		h.Write([]byte(packages[v].Name))
		return h.Sum64()
	}
	if err := im.labelsAndSplits(labels, "", nil); err != nil {
		return err
	}
	im.m.ClassNames = sections
	r.Packages, r.Edges, r.Sections = im.m.Nodes, im.m.Edges, len(sections)
	im.m.Source.Counts["dependencies"] = r.Dependencies
	return nil
}

func (im *importer) wordFeatures(ctx context.Context, o DebianOptions, packages []debian.Package, r *DebianReport) error {
	docs := make([][]string, len(packages))
	for i := range packages {
		docs[i] = packages[i].DescriptionWords(o.LongDescriptions)
	}
	v := debian.NewVocabulary(docs, o.Dim)
	r.Words = len(v.Words)
	im.m.Dim = o.Dim
	im.m.Source.Options["dim"] = strconv.Itoa(o.Dim)
	w, err := im.featureWriter("descriptions", int64(o.Dim))
	if err != nil {
		return err
	}
	row := make([]float32, o.Dim)
	for i, d := range docs {
		v.Row(d, row)
		err := w.put(row)
		if i&0xfff == 0 {
			err = errors.Join(err, ctx.Err())
			im.o.Progress.report("features", int64(i), im.m.Nodes)
		}
		if err != nil {
			return errors.Join(err, w.out.discard())
		}
	}
	im.o.Progress.report("features", im.m.Nodes, im.m.Nodes)
	return w.out.close()
}
