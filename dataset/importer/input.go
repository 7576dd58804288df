package importer

import (
	"fmt"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/units"
)

// leastMemory is the least budget: an import needs it anyway.
const leastMemory = 64 << 20

// needMemory takes room for count elements of width bytes off the memory budget before they are
// allocated, or refuses. A number in a file must not make the import take memory that it was not
// given.
func (im *importer) needMemory(what string, count, width int64) error {
	hi, lo := bits.Mul64(uint64(max(count, 0)), uint64(width))
	left := max(edges.Budget(im.o.Memory), leastMemory) - im.held
	if hi == 0 && lo <= uint64(max(left, 0)) {
		im.held += int64(lo)
		return nil
	}
	need := "more than 8 EiB"
	if hi == 0 && lo <= math.MaxInt64 {
		need = units.FormatBytes(int64(lo))
	}
	return errs.New(errs.Usage,
		"%s needs %s of memory (%d × %d bytes), and %s of the budget are left; give more with {memory}, if the number is right",
		what, need, count, width, units.FormatBytes(max(left, 0)))
}

// checkNodes refuses a number of nodes that no dataset has.
func (im *importer) checkNodes(from errs.Text) error {
	if n := im.m.Nodes; n < 1 || n > maxTextNodes {
		return errs.New(errs.Usage, "%s: %d nodes; 1 to %d can be imported", from, n,
			int64(maxTextNodes))
	}
	return nil
}

// stateNodes takes the number of nodes that the input states.
func (im *importer) stateNodes(n int64, from string) error {
	if n < 1 || n > maxTextNodes {
		return errs.New(errs.Usage, "%s: %d nodes, must be from 1 to %d", from, n,
			int64(maxTextNodes))
	}
	if im.o.Nodes > 0 && im.o.Nodes != n {
		return errs.New(errs.Usage, "{nodes} %d, but %s says %d", im.o.Nodes, from, n)
	}
	im.m.Nodes = n
	return nil
}

// maxNames and maxNameBytes bound what an error tells of names that a file holds.
const (
	maxNames     = 12
	maxNameBytes = 40
)

// brief is text of a file for a message: escaped where it must be, and cut.
func brief(s string) string {
	cut := ""
	if len(s) > maxNameBytes {
		s, cut = s[:maxNameBytes], "…"
	}
	if q := fmt.Sprintf("%q", s); q != `"`+s+`"` {
		s = q
	}
	return s + cut
}

// briefNames lists the first of the names.
func briefNames(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	var out []string
	for _, n := range names[:min(len(names), maxNames)] {
		out = append(out, brief(n))
	}
	if more := len(names) - maxNames; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// noteUnused names what the input holds and neither the import takes nor an option names.
func (im *importer) noteUnused(where string, names []string) {
	given := []string{im.o.Features, im.o.Labels, im.o.SplitDir}
	if im.o.SplitDir != "" {
		splits := findSplits(im.o.SplitDir)
		given = append(given, splits[:]...)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return among(given, where, n) })
	if len(names) == 0 {
		return
	}
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	weights := ""
	for _, n := range names {
		if l := strings.ToLower(n); strings.Contains(l, "weight") ||
			strings.Contains(l, "edge_attr") {
			weights = "; models take no edge weights"
		}
	}
	im.o.note("not used of %s: %s%s", where, briefNames(names), weights)
}

// unusedFiles are the files of a folder, but for those that are used, hidden or READMEs.
func unusedFiles(dir string, used ...string) (names []string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // reading what is needed has said so
	}
	for _, e := range entries {
		n := e.Name()
		if e.IsDir() || strings.HasPrefix(n, ".") || strings.HasPrefix(strings.ToLower(n),
			"readme") || strings.Contains(n, dataset.PartialMark) {
			continue
		}
		if !among(used, dir, n) {
			names = append(names, n)
		}
	}
	return names
}

// among reports whether files, by names in a folder or by paths, have one that is called so there.
func among(files []string, dir, name string) bool {
	return slices.ContainsFunc(files, func(f string) bool {
		if f == name || filepath.Base(f) != filepath.Base(name) {
			return f == name
		}
		a, err1 := os.Stat(f)
		b, err2 := os.Stat(filepath.Join(dir, name))
		return err1 == nil && err2 == nil && os.SameFile(a, b)
	})
}

// subfolders are the folders in a folder, each with a slash behind its name.
func subfolders(dir string) (names []string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // reading what is needed has said so
	}
	for _, e := range entries {
		if n := e.Name(); e.IsDir() && !strings.HasPrefix(n, ".") &&
			!strings.Contains(n, dataset.PartialMark) {
			names = append(names, n+"/")
		}
	}
	return names
}

// unusedBelow are the files in and under a folder, by their paths from it, but for those that are
// used, hidden or READMEs. A folder of which nothing is used stands for its files.
func unusedBelow(dir string, used []string) (names []string) {
	for _, n := range unusedFiles(dir) {
		if !slices.Contains(used, filepath.Join(dir, n)) {
			names = append(names, n)
		}
	}
	for _, n := range subfolders(dir) {
		below := filepath.Join(dir, n)
		if !slices.ContainsFunc(used,
			func(u string) bool { return strings.HasPrefix(u, below+string(filepath.Separator)) }) {
			names = append(names, n)
			continue
		}
		for _, f := range unusedBelow(below, used) {
			names = append(names, n+f)
		}
	}
	return names
}

// splitWords are the words of names that people give to splits; "trainmask" and "val_idx" are made
// of them.
var splitWords = regexp.MustCompile(
	`^((train(ing)?|val(id(ation)?)?|test(ing)?|split|fold|mask)s?)+(idx|ids?|ind(ex|ices)|n?ids?|nodes?|set|mask)?s?$`)

// looksLikeSplit reports whether a name is one that people give to splits: none of these may be
// replaced in silence.
func looksLikeSplit(name string) bool {
	words := strings.FieldsFunc(strings.ToLower(name),
		func(r rune) bool { return !unicode.IsLetter(r) })
	return slices.ContainsFunc(words, splitWords.MatchString)
}

// inside resolves a path that a foreign description gives, and refuses one that leads out of its
// folder, also by way of links: else a description could have any file of this machine read.
func inside(dir, path, from string) (string, error) {
	full := path
	if !filepath.IsAbs(path) {
		full = filepath.Join(dir, path)
	}
	root, err := filepath.EvalSymlinks(dir)
	if err == nil {
		root, err = filepath.Abs(root)
	}
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	real, err := filepath.EvalSymlinks(full)
	if err != nil {
		real = filepath.Clean(full) // not there: its opener says so, if it would be inside
	}
	if real, err = filepath.Abs(real); err != nil {
		return "", errs.With(errs.Usage, err)
	}
	if rel, err := filepath.Rel(root, real); err != nil || rel == ".." ||
		strings.HasPrefix(rel, "../") {
		return "", errs.New(errs.Usage,
			"%s names %s, which is outside its folder; give {allow-outside} if you trust the file",
			from, brief(path))
	}
	return full, nil
}

// sameRows checks a row count against the nodes found so far and takes it as theirs.
func (im *importer) sameRows(n int64, file string, nodesFrom *errs.Text) error {
	if *nodesFrom != "" && n != im.m.Nodes {
		return errs.New(errs.Usage, "%s has %d rows, %s has %d; one row per node is needed in both",
			file, n, *nodesFrom, im.m.Nodes)
	}
	if *nodesFrom == "" {
		im.m.Nodes, *nodesFrom = n, errs.Text(file)
	}
	return nil
}

// nodesFrom takes the rows of an array as the number of nodes.
func (im *importer) nodesFrom(a *npy.Array) error {
	sh := a.Header.Shape
	if len(sh) == 0 || sh[0] < 1 {
		return errs.New(errs.Usage, "%s has shape %s: no nodes", a.Name, a.Header.ShapeString())
	}
	if im.o.Nodes > 0 && im.o.Nodes != sh[0] {
		return errs.New(errs.Usage, "{nodes} %d, but %s has %d rows", im.o.Nodes, a.Name, sh[0])
	}
	im.m.Nodes = sh[0]
	return nil
}

// oneRowEach checks that an array has a row for each node.
func (im *importer) oneRowEach(a *npy.Array, what string) error {
	if sh := a.Header.Shape; len(sh) == 0 || sh[0] != im.m.Nodes {
		return errs.New(errs.Usage,
			"%s: %s have shape %s, there are %d nodes; one row per node is needed", a.Name, what,
			a.Header.ShapeString(), im.m.Nodes)
	}
	return nil
}

func (im *importer) absIn() string {
	if abs, err := filepath.Abs(im.o.In); err == nil {
		return abs
	}
	return im.o.In
}
