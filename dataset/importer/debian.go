package importer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/dataset/debian"
	"helios/dataset/edges"
	"helios/internal/errs"
)

var debianFormat = reportingFormat(Format{Name: "debian",
	Usage:       "packages as nodes, dependencies as edges, sections as labels, words of descriptions as features",
	Description: debianHelp}, func(ctx context.Context, o DebianOptions) (fmt.Stringer, error) {
	return Debian(ctx, o)
})

const debianHelp = "Edges go both ways unless {one-way}, and are never repeated. Packages without a section are unlabelled.\n" +
	"{typed} has packages, sources, maintainers (by number) and tags as types of nodes, and the relations depends, recommends,\n" +
	"suggests, enhances, conflicts, built-from, maintained-by and tagged, each with its reverse unless {one-way}. The types\n" +
	"other than packages have the means of their packages' rows.\n" +
	"An import that is interrupted keeps nothing, as it takes seconds."

// DebianOptions shape the import of a Debian package index.
type DebianOptions struct {
	// In holds package indexes (Packages files, plain or compressed) or folders of them.
	// Empty means apt's own lists, and if there are none, what "apt-cache dumpavail" prints.
	In  []string `option:"in" shown:"the package lists of this machine" arg:"PATH[,PATH…]" usage:"package indexes PATH[,PATH…]: Packages files, plain or compressed (gzip, bzip2, xz, lz4), or folders of them"`
	Dim int      `option:"dim" positive:"yes" shown:"256" usage:"words that become features"`
	// LongDescriptions also takes the words of the long descriptions, where the index has
	// them. Indexes differ in that, so without it the same archive gives the same features.
	LongDescriptions bool `option:"long-descriptions" usage:"also take the words of the long descriptions"`
	// OneWay keeps only the edges from a package to its dependents. Without it messages also
	// flow from a package to what it needs.
	OneWay bool `option:"one-way" usage:"keep only the edges from a package to those that need it; with {typed} those as the index has them"`
	// Typed keeps the kinds of dependencies apart, and adds other types of nodes.
	Typed bool `option:"typed" usage:"make a typed graph, of packages, sources, maintainers and tags"`
	Output
}

// DebianDim is the default number of features of a Debian import.
const DebianDim = 256

// DebianReport counts the findings of an import.
type DebianReport struct {
	Packages     int64    `json:"packages"`
	Dependencies int64    `json:"dependencies"` // distinct pairs (package, package it names)
	Edges        int64    `json:"edges"`        // as stored, both ways unless OneWay
	Sections     int      `json:"sections"`
	Words        int      `json:"words"`
	From         []string `json:"from"`
}

func (r DebianReport) String() string {
	return fmt.Sprintf("%d packages, %d dependencies, %d sections, %d words, from %s", r.Packages,
		r.Dependencies, r.Sections, r.Words, strings.Join(r.From, ", "))
}

// Debian makes a graph of a Debian package index: packages are nodes, their sections the
// classes, the words of their synopses the features, and every package that a package names in
// Depends, Pre-Depends, Recommends, Suggests or Enhances, alternatives included, is an edge.
//
// A package's features are TF-IDF weights of the Dim most frequent words, without those in its own
// or its source package's name. Section, Tag, Filename and the name itself are not used. Edges are
// stored in both directions: the packages that a package needs show what it is made of, and those
// that need it what it is for; libraries, which need little, have only the latter.
func Debian(ctx context.Context, o DebianOptions) (DebianReport, error) {
	var r DebianReport
	if o.Dim == 0 {
		o.Dim = DebianDim
	}
	all := Options{Input: Input{In: string(filepath.Separator), UnlabelledOK: true},
		Output: o.Output, Dim: o.Dim, Undirected: !o.OneWay, Dedup: true}
	if err := all.fill(); err != nil {
		return r, err
	}
	// Seconds of work, from an input that may be a program's output: nothing is worth a journal.
	err := run(request{kind: "debian", options: &o, Options: all, once: true},
		func(im *importer) error {
			packages, from, err := readIndexes(ctx, o, im)
			if err != nil {
				return err
			}
			r.From = from
			return (&debianImport{im, o}).run(ctx, packages, &r)
		})
	return r, err
}

// memoryStep is the number of bytes of packages that are promised memory at a time.
const memoryStep = 1 << 20

// readIndexes merges indexes: of a package in several, the newest version counts.
func readIndexes(ctx context.Context, o DebianOptions, j *importer) (packages []debian.Package,
	from []string, err error) {
	x := packageIndex{importer: j, ctx: ctx, newest: map[string]debian.Package{}}
	in := o.In
	if len(in) == 0 {
		in, err = debian.FindLists(debian.ListsDir)
		if err != nil || len(in) == 0 {
			if err := x.dump(); err != nil {
				return nil, nil, err
			}
			from = []string{"apt-cache dumpavail"}
		}
	}
	files, err := indexFiles(in)
	if err != nil {
		return nil, nil, err
	}
	for _, path := range files {
		if err := parseIndex(path, x.keep); err != nil {
			return nil, nil, err
		}
		from = append(from, filepath.Base(path))
	}
	packages = slices.SortedFunc(maps.Values(x.newest),
		func(a, b debian.Package) int { return strings.Compare(a.Name, b.Name) })
	if len(packages) == 0 {
		return nil, nil, errs.New(errs.Usage,
			"%s: no packages; run \"apt-get update\" or give another index with {in}",
			strings.Join(from, ", "))
	}
	return packages, from, nil
}

// packageIndex collects packages.
type packageIndex struct {
	*importer
	ctx    context.Context
	newest map[string]debian.Package
	held   int64 // bytes of packages that no memory was promised for
}

// keep takes a package, where it is the newest of its name so far.
func (x *packageIndex) keep(p debian.Package) error {
	if have, ok := x.newest[p.Name]; !ok || debian.CompareVersions(p.Version, have.Version) > 0 {
		x.newest[p.Name] = p
	}
	if x.held += p.Bytes(); x.held >= memoryStep {
		if err := x.needMemory("the package index", x.held, 1); err != nil {
			return err
		}
		x.held = 0
	}
	if len(x.newest)&0xfff == 0 {
		x.o.Progress.Report("packages", int64(len(x.newest)), 0)
		return x.ctx.Err()
	}
	return nil
}

// dump takes the packages that apt knows.
func (x *packageIndex) dump() error {
	cmd := exec.CommandContext(x.ctx, "apt-cache", "dumpavail")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return errs.New(errs.Capability,
			"no package lists in %s and apt-cache dumpavail failed (%w %s); run \"apt-get update\" or give a Packages file with {in}",
			debian.ListsDir, err, strings.TrimSpace(stderr.String()))
	}
	if err := debian.Parse(bytes.NewReader(out), x.keep); err != nil {
		return errs.New(errs.Usage, "apt-cache dumpavail: %w", err)
	}
	return nil
}

// indexFiles lists files, and the indexes in folders.
func indexFiles(in []string) (files []string, err error) {
	for _, path := range in {
		if err := readable("in", path); err != nil {
			return nil, err
		}
		if st, err := os.Stat(path); err != nil || !st.IsDir() {
			files = append(files, path)
			continue
		}
		found, err := debian.FindLists(path)
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, errs.New(errs.Usage,
				"%s holds no package index (…_Packages, or Packages); give a folder or file that does, or run \"apt-get update\"",
				path)
		}
		files = append(files, found...)
	}
	return files, nil
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

// debianImport is an import of a package index.
type debianImport struct {
	*importer
	opt DebianOptions
}

func (im *debianImport) run(ctx context.Context, packages []debian.Package,
	r *DebianReport) error {
	im.m.Source.From = r.From
	delete(im.m.Source.Options, "unlabelled-ok")
	im.m.Nodes = int64(len(packages))
	var sections []string
	for _, p := range packages {
		if p.Section != "" {
			sections = append(sections, p.Section)
		}
	}
	slices.Sort(sections)
	sections = slices.Compact(sections)
	labels := make([]int32, len(packages))
	for i, p := range packages {
		labels[i] = noLabel
		if class, ok := slices.BinarySearch(sections, p.Section); ok {
			labels[i] = int32(class)
		}
	}
	// The place of a package depends on its name only, so that a split outlives an update of the
	// archive.
	im.splitKey = func(v int64) uint64 {
		h := fnv.New64a()
		h.Write([]byte(packages[v].Name))
		return h.Sum64()
	}
	im.o.NumClasses = int64(len(sections))
	if im.opt.Typed {
		if err := im.runTyped(ctx, packages, labels, r); err != nil {
			return err
		}
		m := &im.m
		m.Tasks[0].ClassNames = sections
		r.Packages, r.Sections = m.NodeTypes[0].Nodes, len(sections)
		r.Edges = m.Edges
		m.Source.Counts["dependencies"] = r.Dependencies
		return nil
	}
	if err := im.writeNames(packages); err != nil {
		return err
	}
	if err := im.write(ctx, parts{edges: dependencies(packages, r), labels: labels,
		write: func() error { return im.wordFeatures(ctx, packages, r) }}); err != nil {
		return err
	}
	im.m.ClassNames = sections
	r.Packages, r.Edges, r.Sections = im.m.Nodes, im.m.Edges, len(sections)
	im.m.Source.Counts["dependencies"] = r.Dependencies
	return nil
}

// writeNames writes the packages' names.
func (im *debianImport) writeNames(packages []debian.Package) error {
	names, err := im.s.Create(im.nodesFile(dataset.NamesName))
	if err != nil {
		return err
	}
	for _, p := range packages {
		if _, err := fmt.Fprintln(names, p.Name); err != nil {
			return errors.Join(err, names.Discard())
		}
	}
	return names.Finish()
}

// dependencies returns the edges to each package from those that it names, and counts them.
func dependencies(packages []debian.Package, r *DebianReport) edges.Source {
	node := make(map[string]int64, len(packages))
	for i, p := range packages {
		node[p.Name] = int64(i)
	}
	return edges.Source{Name: "dependencies", Unit: "packages", Total: int64(len(packages)),
		Parts: 1, Read: func(ctx context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			var src, dst []int64
			seen := map[int64]bool{}
			for i, p := range packages {
				clear(seen)
				src, dst = src[:0], dst[:0]
				for _, field := range p.Relations {
					for _, name := range debian.Targets(field) {
						dep, ok := node[name]
						// a virtual or foreign package, itself, again
						if !ok || dep == int64(i) || seen[dep] {
							continue
						}
						seen[dep] = true
						src, dst = append(src, dep), append(dst, int64(i)) // i hears what it needs
					}
				}
				r.Dependencies += int64(len(src))
				if err := emit(src, dst); err != nil {
					return err
				}
				done(1)
			}
			return ctx.Err()
		}}
}

func (im *debianImport) wordFeatures(ctx context.Context, packages []debian.Package,
	r *DebianReport) error {
	docs := make([][]string, len(packages))
	for i := range packages {
		docs[i] = packages[i].DescriptionWords(im.opt.LongDescriptions)
	}
	v := debian.NewVocabulary(docs, im.opt.Dim)
	r.Words = len(v.Words)
	im.m.Dim = im.opt.Dim
	im.m.Source.Options["dim"] = strconv.Itoa(im.opt.Dim)
	w, err := im.featureWriter("descriptions", int64(im.opt.Dim))
	if err != nil {
		return err
	}
	row := make([]float32, im.opt.Dim)
	for i, d := range docs {
		v.Row(d, row)
		err := w.put(row)
		if i&0xfff == 0 {
			err = errors.Join(err, ctx.Err())
			im.o.Progress.Report("features", int64(i), im.m.Nodes)
		}
		if err != nil {
			return errors.Join(err, w.out.Discard())
		}
	}
	im.o.Progress.Report("features", im.m.Nodes, im.m.Nodes)
	return w.out.Close()
}
