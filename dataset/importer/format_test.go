package importer

import (
	"archive/zip"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/testing/datasettest"
)

// TestFormats: each format is listed with help and options, names its input, and refuses
// a folder of something else through the registry.
func TestFormats(t *testing.T) {
	all := Formats()
	require.True(t, slices.IsSortedFunc(all,
		func(a, b *Format) int { return strings.Compare(a.Name, b.Name) }))
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "x"), []byte("?"), 0o644))
	for _, f := range all {
		t.Run(f.Name, func(t *testing.T) {
			require.NotEmpty(t, f.Usage)
			require.NotEmpty(t, f.Description)
			o := f.Options()
			out := f.Output(o)
			require.Equal(t, uint64(1), out.Seed)
			require.Equal(t, 0.6, out.TrainFraction)
			out.Out = filepath.Join(t.TempDir(), "g")
			set := func(name, text string) {
				all := options.Of(o)
				i := slices.IndexFunc(all, func(x options.Option) bool { return x.Name == name })
				require.GreaterOrEqual(t, i, 0)
				require.NoError(t, all[i].Set(text))
			}
			set("in", dir)
			_, err := f.Run(context.Background(), o)
			datasettest.RequireUsage(t, err)
			require.NotContains(t, err.Error(), "--")
			require.NoDirExists(t, out.Out)
		})
	}
}

// docs/reference/formats.md is what "make generate" makes.
func TestFormatsDocument(t *testing.T) {
	var want bytes.Buffer
	require.NoError(t, WriteMarkdown(&want))
	got, err := os.ReadFile("../../docs/reference/formats.md")
	require.NoError(t, err)
	require.Equal(t, want.String(), string(got), "run \"make generate\"")
}

// Every field of a format's options is an option, or one of the functions and embedded structs that
// carry them: a field without a tag would have no flag.
func TestOptionsHaveTags(t *testing.T) {
	var walk func(typ reflect.Type)
	walk = func(typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			switch {
			case f.Anonymous:
				walk(f.Type)
			case f.Type.Kind() != reflect.Func:
				require.NotEmpty(t, f.Tag.Get("option"), "%s.%s", typ, f.Name)
			}
		}
	}
	for _, f := range Formats() {
		walk(reflect.TypeOf(f.Options()).Elem())
	}
}

// The list is in the order of its names, of which each stands there once. Options whose tags are
// wrong are a mistake of the program.
func TestFormatsAreListed(t *testing.T) {
	require.True(t, slices.IsSortedFunc(Formats(), func(a, b *Format) int {
		if a.Name == b.Name {
			t.Errorf("two formats are called %s", a.Name)
		}
		return strings.Compare(a.Name, b.Name)
	}))
	type untold struct {
		Depth int `option:"depth"`
		Options
	}
	require.Panics(t, func() {
		newFormat(Format{Name: "untold"}, func(context.Context, untold) error { return nil })
	})
}

// An ArrayMap is read from text and refuses what means nothing, or two things.
func TestArrayMap(t *testing.T) {
	var m ArrayMap
	require.NoError(t, m.UnmarshalText([]byte("my_ids=train, y=labels")))
	require.Equal(t, ArrayMap{"train": "my_ids", "labels": "y"}, m)
	for text, want := range map[string]string{"a": "give THEIRS=OURS", "=train": "THEIRS=OURS",
		"a=other": "ours is one of edge_index", "a=train,b=train": "a and b are both to be train",
		"a=train,": "empty part"} {
		require.ErrorContains(t, m.UnmarshalText([]byte(text)), want)
	}
}

// Importers name what the folder holds and the import leaves, once, whole folders by their names.
func TestFoldersNameUnused(t *testing.T) {
	smallIGB(t)
	arrays, cora := tree{}, tree{}
	for n, text := range planetoidFiles() {
		cora["ind.cora."+n] = text
	}
	for n, a := range datasettest.GoodArrays() {
		arrays[n+".npy"] = string(a.Bytes(t))
	}
	for name, c := range map[string]struct {
		imp    importFunc
		folder tree
		o      Options
		want   []string
	}{
		"igb": {plain(IGB), igbTree(t, false), Options{}, []string{"not used of ",
			"processed/author/", "processed/paper/node_label_2K.npy", "release.txt"}},
		"igb, computed": {plain(IGB), igbTree(t, false), Options{FeatureFn: "hash", Dim: 3},
			[]string{"processed/paper/node_feat.npy"}},
		"mag240m": {plain(MAG240M), magTree(t, nil), Options{},
			[]string{"not used of ", "processed/author/", "release.txt"}},
		"ogb":              {plain(OGB), ogbTree(t), Options{}, []string{"processed/", "release.txt"}},
		"ogb's papers":     {plain(OGB), papersTree(t, zip.Deflate, nil), Options{}, []string{"processed/", "release.txt"}},
		"npy":              {plain(NPY), arrays, Options{}, []string{"processed/", "release.txt"}},
		"graphbolt":        {plain(GraphBolt), boltTree(t), Options{}, []string{"processed/", "release.txt"}},
		"a Planetoid file": {planetoidIn, cora, Options{}, []string{"processed/", "release.txt"}},
	} {
		t.Run(name, func(t *testing.T) {
			var notes []string
			c.folder["processed/author/ids.npy"] = "x"
			c.folder["release.txt"] = "x"
			c.o.Note = func(s errs.Text) { notes = append(notes, s.String()) }
			imported(t, c.imp, c.folder, "x", c.o)
			text := strings.Join(notes, "\n")
			for _, w := range c.want {
				require.Contains(t, text, w)
			}
			for _, used := range []string{"edge_index.npy", "node_label_19.npy", "node_label.npy",
				"node_year.npy"} {
				require.NotContains(t, text, used)
			}
			require.Equal(t, 1, strings.Count(text, "release.txt"), text)
		})
	}
}

// planetoidIn imports Planetoid's files with the options of all formats.
func planetoidIn(ctx context.Context, o Options) error {
	return Planetoid(ctx, PlanetoidOptions{Input: o.Input, Output: o.Output})
}

// A number of features beside a file of features would have no effect, so it is refused.
func TestDimIsForMadeUpFeatures(t *testing.T) {
	features := writeText(t, "x.csv", "1,2\n3,4\n")
	edges := writeText(t, "e.csv", "0,1\n")
	for name, c := range map[string]struct {
		imp importFunc
		in  string
	}{
		"edges": {plain(Edges), edges}, "npy": {plain(NPY), t.TempDir()},
		"mtx": {MTX, edges}, "webgraph": {WebGraph, filepath.Dir(edges)},
	} {
		err := c.imp(bg, Options{Input: Input{In: c.in}, Features: features, Dim: 3,
			Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
		require.ErrorContains(t, err, "option dim 3 is for ", name)
		datasettest.RequireUsage(t, err)
	}
	folder := tree{"edges.csv": "0,1\n", "features.csv": "1,2\n3,4\n"}.write(t, t.TempDir())
	err := plain(Edges)(bg, Options{Input: Input{In: folder}, Dim: 3,
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "features.csv has features")
}
