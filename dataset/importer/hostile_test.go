package importer

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

// TestNotRegular: a pipe in the place of an array is refused by name; it does not hang.
func TestNotRegular(t *testing.T) {
	dir := t.TempDir()
	for name, a := range datasettest.GoodArrays() {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".npy"), a.Bytes(t), 0o644))
	}
	path := filepath.Join(dir, "labels.npy")
	require.NoError(t, os.Remove(path))
	require.NoError(t, syscall.Mkfifo(path, 0o644))
	err := plain(NPY)(bg, Options{Input: Input{In: dir},
		Output: Output{Out: filepath.Join(t.TempDir(), "g")}})
	require.ErrorContains(t, err, "labels.npy is a pipe")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// TestNeedMemory: what a file claims is held against the budget before it is allocated, without an
// overflow.
func TestNeedMemory(t *testing.T) {
	im := &importer{o: Options{Output: Output{Memory: 100 << 20}}}
	require.NoError(t, im.needMemory("x", 20<<20, 4))
	require.ErrorContains(t, im.needMemory("labels.npy", 20<<20, 4), "labels.npy needs 80 MiB")
	require.ErrorContains(t, im.needMemory("x", 1<<62, 8), "more than 8 EiB")
	require.NoError(t, im.needMemory("x", 5<<20, 4), "what was refused takes nothing")
}

// TestInside: a description leads to files of its own folder alone, by links too.
func TestInside(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "in")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(root, "secret"), []byte("x"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "own"), []byte("x"), 0o644))
	require.NoError(t, os.Symlink("../secret", filepath.Join(dir, "link")))
	for _, p := range []string{"../secret", "link", "/etc/passwd", "a/../../secret",
		filepath.Join(root, "secret"), "../none"} {
		_, err := inside(dir, p, "metadata.yaml")
		require.ErrorContains(t, err, "option allow-outside", p)
	}
	for _, p := range []string{"own", "./own", "none", filepath.Join(dir, "own"), "..own"} {
		_, err := inside(dir, p, "metadata.yaml")
		require.NoError(t, err, p)
	}
}

// TestOthersSplits: splits under the names and in the shapes of others are taken or refused, and
// never replaced.
func TestOthersSplits(t *testing.T) {
	write := func(change func(a map[string]datasettest.Arr)) string {
		a := datasettest.GoodArrays()
		for _, s := range []string{"train", "val", "test"} {
			delete(a, s)
		}
		change(a)
		dir := t.TempDir()
		for name, x := range a {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name+".npy"), x.Bytes(t), 0o644))
		}
		return dir
	}
	var notes []string
	run := func(dir string, change func(o *NPYOptions)) (*dataset.Dataset, error) {
		notes = nil
		o := NPYOptions{Options: Options{Input: Input{In: dir}, Output: Output{
			Out: filepath.Join(t.TempDir(), "g"), Note: func(s errs.Text) {
				notes = append(notes,
					s.String())
			}}}}
		change(&o)
		if err := NPY(bg, o); err != nil {
			return nil, err
		}
		return dataset.Open(o.Out)
	}
	// (2, 5): nodes 0 and 1, 2, 3 and 4, and the other way round
	masks := func(name string) datasettest.Arr {
		v := map[string][]int64{"train": {1, 1, 0, 0, 0, 0, 0, 0, 1, 1},
			"val": {0, 0, 1, 0, 0, 0, 0, 1, 0, 0}, "test": {0, 0, 0, 1, 1, 1, 1, 0, 0, 0}}[name]
		return datasettest.Arr{DT: "<i8", Shape: []int64{2, 5}, Data: v}
	}
	ten := write(func(a map[string]datasettest.Arr) {
		for _, s := range []string{"train", "val", "test"} {
			a[s+"_masks"] = masks(s)
		}
	})
	_, err := run(ten, func(*NPYOptions) {})
	require.ErrorContains(t, err, "choose one with option split-index 0 to 1")
	_, err = run(ten, func(o *NPYOptions) { o.SplitIndex = "2" })
	require.ErrorContains(t, err, "option split-index 2")
	for i, want := range [][]int64{{0, 1}, {3, 4}} {
		d, err := run(ten, func(o *NPYOptions) { o.SplitIndex = string(rune('0' + i)) })
		require.NoError(t, err)
		got, err := d.Split("train")
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.NoError(t, d.Close())
	}
	mine := write(func(a map[string]datasettest.Arr) {
		for i, s := range []string{"train", "val", "test"} {
			v := make([]int64, 5)
			v[i] = 1
			// masks of integers
			a["my_"+s+"_set"] = datasettest.Arr{DT: "<i8", Shape: []int64{5}, Data: v}
		}
		a["edge_weight"] = datasettest.Arr{DT: "<f4", Shape: []int64{1}, Data: []float32{1}}
	})
	_, err = run(mine, func(*NPYOptions) {})
	require.ErrorContains(t, err, "my_test_set.npy")
	d, err := run(mine, func(o *NPYOptions) {
		o.Map = map[string]string{"train": "my_train_set", "val": "my_val_set",
			"test": "my_test_set"}
	})
	require.NoError(t, err)
	got, err := d.Split("val")
	require.NoError(t, err)
	require.Equal(t, []int64{1}, got)
	require.NoError(t, d.Close())
	require.Contains(t, strings.Join(notes, "\n"), "edge_weight.npy; models take no edge weights")
	d, err = run(mine, func(o *NPYOptions) { o.MakeSplits = true })
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.Contains(t, strings.Join(notes, "\n"), "at random by seed")
}

// FuzzGraphBolt: whatever the description, it is refused, or its entries can be gone through.
// Names of splits are known in all their spellings, and ordinary words are none.
func TestLooksLikeSplit(t *testing.T) {
	for _, name := range []string{"train", "train.npy", "train_mask", "trainmask", "train_masks",
		"val", "val_idx", "valid", "test", "testing", "split_idx_train", "splits0", "10_fold",
		"trainids", "test_nid", "validation-index", "train1"} {
		require.True(t, looksLikeSplit(name), name)
	}
	for _, name := range []string{"latest.npy", "contest", "pretrained.pt", "constraint",
		"strain.csv", "unmasked", "values", "interval", "attestation"} {
		require.False(t, looksLikeSplit(name), name)
	}
}

func FuzzGraphBolt(f *testing.F) {
	f.Add(
		[]byte(
			"graph:\n  nodes: [{num: 68719476736}]\n  edges: [{format: csv, path: ../x}]\nfeature_data: [{domain: node, name: feat, path: /etc/passwd}]\ntasks: [{train_set: [{data: [null]}]}]\n"))
	f.Add([]byte("graph: &a {nodes: *a}\n"))
	f.Add([]byte("a: &a [x, x]\nb: &b [*a, *a]\ngraph: {nodes: [*b], edges: [null]}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if len(text) > 1<<14 {
			return
		}
		m, err := parseGraphBolt("metadata.yaml", text)
		if err != nil {
			require.Less(t, len(err.Error()), 1000)
			return
		}
		_ = m.all()
		_ = m.inside(".", "metadata.yaml")
		_, _ = graphboltFeature("metadata.yaml", m, "")
	})
}
