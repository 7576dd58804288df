package importer

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/debian"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
)

const debianSample = `Package: app
Version: 1
Depends: libc (>= 2), libx | libx-alt, virtual-thing
Recommends: libc, app-doc
Suggests: app
Description: graphical editor of pictures
Section: graphics

Package: libc
Version: 2
Description: shared library of C
Section: libs

Package: libx
Version: 2
Depends: libc
Description: shared library for pictures
Section: contrib/libs

Package: app-doc
Version: 1
Enhances: app
Description: pictures of the editor

Package: libx-alt
Version: 1
Pre-Depends: libc
Description: shared library for pictures, another
Section: libs
`

func TestImportDebianSample(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a_Packages"), []byte(debianSample), 0o644))
	// A newer version of one package, and an older of another, in a second index.
	update := "Package: libx\nVersion: 3\nDescription: shared library for pictures\nSection: x11\n\nPackage: libc\nVersion: 1\nSection: wrong\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b_Packages"), []byte(update), 0o644))
	out := filepath.Join(t.TempDir(), "deb")
	r, err := Debian(bg, DebianOptions{In: []string{dir}, Dim: 16, Output: Output{Out: out}})
	require.NoError(t, err)
	// app→libc, libx, libx-alt, app-doc; app-doc→app; libx-alt→libc. libx 3 needs nothing.
	require.Equal(t, DebianReport{Packages: 5, Dependencies: 6, Edges: 10, Sections: 3,
		Words: r.Words, From: []string{"a_Packages", "b_Packages"}}, r)
	d := datasettest.Open(t, out)
	names, err := d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"app", "app-doc", "libc", "libx", "libx-alt"}, names)
	require.Equal(t, []string{"graphics", "libs", "x11"}, d.Meta.ClassNames)
	v := viewOf(t, out)
	require.Equal(t, []int32{0, -1, 1, 2, 1}, v.labels)
	require.Equal(t, []int64{0, 4, 5, 7, 8, 10}, v.indptr)
	require.Equal(t, []uint32{1, 2, 3, 4, 0, 0, 4, 0, 0, 2}, v.indices)
	require.Len(t, slices.Concat(v.train, v.val, v.test), 4,
		"a package without section is in no split")

	oneWay := filepath.Join(t.TempDir(), "deb")
	_, err = Debian(bg, DebianOptions{In: []string{dir}, Dim: 16, OneWay: true,
		Output: Output{Out: oneWay}})
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 2, 3, 4, 0, 2}, viewOf(t, oneWay).indices,
		"a package listens to what it needs")
	require.Equal(t, v.train, viewOf(t, oneWay).train, "splits do not depend on edges")

	// The features hold no word of the name, and each row has length 1 or 0.
	for i, name := range names {
		var sum float32
		for _, x := range v.features[i*16:][:16] {
			sum += x * x
		}
		require.True(t, sum == 0 || sum > 0.999 && sum < 1.001, "%s: %v", name, sum)
	}
}

func TestImportDebianSplitsOutliveUpdates(t *testing.T) {
	dir := t.TempDir()
	var a, b strings.Builder
	for i := range 300 {
		fmt.Fprintf(&a,
			"Package: p%03d\nVersion: 1\nSection: s%d\nDescription: thing number some\n\n", i, i%3)
		if i%2 == 0 {
			fmt.Fprintf(&b,
				"Package: p%03d\nVersion: 1\nSection: s%d\nDescription: thing number some\n\n", i,
				i%3)
		}
	}
	of := func(name, text string) map[string]string {
		file, out := filepath.Join(dir, name), filepath.Join(dir, name+"-out")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
		_, err := Debian(bg, DebianOptions{In: []string{file}, Output: Output{Out: out}})
		require.NoError(t, err)
		d := datasettest.Open(t, out)
		names, err := d.Names()
		require.NoError(t, err)
		m := map[string]string{}
		for _, s := range dataset.Splits {
			ids, err := d.Split(s)
			require.NoError(t, err)
			for _, v := range ids {
				m[names[v]] = s
			}
		}
		return m
	}
	all, half := of("a", a.String()), of("b", b.String())
	require.Len(t, half, 150)
	for name, s := range half {
		require.Equal(t, all[name], s, name)
	}
}

func TestImportDebianBad(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	junk := filepath.Join(dir, "junk_Packages")
	cut := filepath.Join(dir, "cut_Packages.gz")
	require.NoError(t, os.WriteFile(empty, nil, 0o644))
	require.NoError(t, os.WriteFile(junk, []byte("hello world\n"), 0o644))
	require.NoError(t, os.WriteFile(cut, []byte(gz(t, strings.Repeat(debianSample, 50)))[:300],
		0o644))
	for in, want := range map[string]string{
		empty: "no packages", junk: junk + ": line 1", cut: cut,
		filepath.Join(dir, "none"): "no such file", t.TempDir(): "holds no package index",
	} {
		root := t.TempDir()
		_, err := Debian(bg, DebianOptions{In: []string{in},
			Output: Output{Out: filepath.Join(root, "g")}})
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
		datasettest.RequireEmpty(t, root)
		datasettest.RequireNoFDs(t, dir)
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	root := t.TempDir()
	good := filepath.Join(dir, "good_Packages")
	require.NoError(t, os.WriteFile(good, []byte(debianSample), 0o644))
	_, err := Debian(ctx, DebianOptions{In: []string{good},
		Output: Output{Out: filepath.Join(root, "g")}})
	require.ErrorIs(t, err, context.Canceled)
	datasettest.RequireEmpty(t, root)
}

// TestImportDebianForReal imports the lists of this machine, where it has Debian's main
// archive, and checks that the graph is worth training on: the class means of a package's own
// words, smoothed over its neighbours, must place many more packages than its words alone.
func TestImportDebianForReal(t *testing.T) {
	if wide.Lean() {
		t.Skip("-short")
	}
	lists, _ := debian.FindLists(debian.ListsDir)
	if !slices.ContainsFunc(lists,
		func(f string) bool { return strings.Contains(f, "_main_binary-") }) {
		t.Skip("no Debian package lists on this machine")
	}
	out := filepath.Join(t.TempDir(), "deb")
	r, err := Debian(bg, DebianOptions{Output: Output{Out: out}})
	require.NoError(t, err)
	t.Logf("%+v", r)
	require.Greater(t, r.Packages, int64(60_000))
	require.Greater(t, r.Dependencies, int64(290_000))
	require.InDelta(t, 58, r.Sections, 6)
	require.Equal(t, DebianDim, r.Words)
	d := datasettest.Open(t, out)
	tp, err := d.Topology()
	require.NoError(t, err)
	x := datasettest.RowsOf(t, d)
	one := datasettest.Smooth(tp, x, DebianDim)
	for i, a := range x {
		one[i] += a / 2
	}
	alone, with := datasettest.CentroidAccuracy(t, d, x, DebianDim), datasettest.CentroidAccuracy(t,
		d, one, DebianDim)
	t.Logf("nearest class mean: own words %.3f, with neighbours' %.3f", alone, with)
	require.Greater(t, with, alone+0.05)
}

// A package index that does not fit the budget is refused before it fills the memory.
func TestImportDebianMemory(t *testing.T) {
	var text strings.Builder
	for i := range 1100 {
		fmt.Fprintf(&text, "Package: p%d\nVersion: 1\nSection: libs\nDescription: %s\n\n", i,
			strings.Repeat("word ", 16<<10))
	}
	in, out := writeText(t, "a_Packages", text.String()), filepath.Join(t.TempDir(), "g")
	_, err := Debian(bg, DebianOptions{In: []string{in}, Output: Output{Out: out,
		Memory: 64 << 20}})
	require.ErrorContains(t, err, "the package index needs")
	require.ErrorContains(t, err, "give more with option memory")
	datasettest.RequireUsage(t, err)
	require.NoDirExists(t, out)
}

// Types keep the kinds of dependencies apart. Maintainers are numbers, sections are labels, and
// rows of the other types are means of their packages'.
func TestImportDebianTyped(t *testing.T) {
	dir := t.TempDir()
	index := strings.NewReplacer(
		"Section: graphics\n", "Section: graphics\nMaintainer: A <a@x>\nTag: role::program, use::{editing,\n viewing}, use::editing\nConflicts: libx-alt, app\nBreaks: libx-alt\n",
		"Recommends: libc, app-doc\n", "Recommends: libc, app-doc\nSource: appsrc (1.2)\nMaintainer: B <b@x>\n",
	).Replace(debianSample)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a_Packages"), []byte(index), 0o644))
	for _, oneWay := range []bool{false, true} {
		out := filepath.Join(t.TempDir(), "deb")
		r, err := Debian(bg, DebianOptions{In: []string{dir}, Dim: 4, Typed: true, OneWay: oneWay,
			Output: Output{Out: out}})
		require.NoError(t, err)
		d := datasettest.Open(t, out)
		got := map[string][2][]int64{}
		for i, rel := range d.Meta.Relations {
			topo, err := d.Relation(i)
			require.NoError(t, err)
			var src, dst []int64
			for v := range topo.NumNodes {
				for i := range topo.InDegree(v) {
					u := topo.Neighbor(v, i)
					src, dst = append(src, u), append(dst, v)
				}
			}
			got[rel.String()] = [2][]int64{src, dst}
		}
		// Packages are app, app-doc, libc, libx, libx-alt, in this order.
		want := map[string][2][]int64{
			"package depends package":              {{0, 3, 4, 0, 0}, {2, 2, 2, 3, 4}},
			"package recommends package":           {{0, 0}, {1, 2}},
			"package enhances package":             {{1}, {0}},
			"package conflicts package":            {{0}, {4}},
			"package built-from source":            {{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}},
			"package maintained-by maintainer":     {{0}, {0}},
			"package tagged tag":                   {{0, 0, 0}, {0, 1, 2}},
			"package rev_depends package":          {{2, 3, 4, 2, 2}, {0, 0, 0, 3, 4}},
			"package rev_recommends package":       {{1, 2}, {0, 0}},
			"package rev_enhances package":         {{0}, {1}},
			"package rev_conflicts package":        {{4}, {0}},
			"source rev_built-from package":        {{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}},
			"maintainer rev_maintained-by package": {{0}, {0}},
			"tag rev_tagged package":               {{0, 1, 2}, {0, 0, 0}},
		}
		edges := int64(18)
		if oneWay {
			maps.DeleteFunc(want, func(k string, _ [2][]int64) bool {
				return strings.Contains(k, " rev_")
			})
		} else {
			edges *= 2
		}
		require.Equal(t, want, got)
		require.Equal(t, DebianReport{Packages: 5, Dependencies: 9, Edges: edges, Sections: 2,
			Words: r.Words, From: r.From}, r)
		require.Equal(t, []string{"graphics", "libs"}, d.Meta.ClassNames)
		labels, err := d.Labels()
		require.NoError(t, err)
		require.Equal(t, []int32{0, -1, 1, 1, 1}, labels)
		for i, names := range [][]string{{"app", "app-doc", "libc", "libx", "libx-alt"},
			{"appsrc", "app-doc", "libc", "libx", "libx-alt"}, nil,
			{"role::program", "use::editing", "use::viewing"}} {
			if names == nil {
				require.NoFileExists(t, filepath.Join(out, dataset.NodesDir(i), dataset.NamesName))
				continue
			}
			have, err := d.NamesOf(i)
			require.NoError(t, err)
			require.Equal(t, names, have)
		}
		text, err := os.ReadFile(filepath.Join(out, dataset.MetaName))
		require.NoError(t, err)
		require.NotContains(t, string(text), "a@x")
		all := make([]byte, d.Meta.Rows()*4*4)
		require.NoError(t, d.ReadRows(0, all))
		require.Equal(t, all[:16], all[10*16:11*16], "the one maintainer has its one package's row")
	}
}
