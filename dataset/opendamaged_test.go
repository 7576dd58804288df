package dataset_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/testing/datasettest"
)

// TestOpenDamaged takes a good directory and breaks one thing at a time.
func TestOpenDamaged(t *testing.T) {
	good := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: 50, Dim: 3, Classes: 2,
		AvgDegree: 4, Out: good}))
	replace := func(old, new string) func(string) error {
		return func(dir string) error {
			path := filepath.Join(dir, dataset.MetaName)
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !strings.Contains(string(b), old) {
				t.Fatalf("%q is not in %s", old, b)
			}
			return os.WriteFile(path, []byte(strings.Replace(string(b), old, new, 1)), 0o644)
		}
	}
	poke := func(name string, offset int64, b ...byte) func(string) error {
		return func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(b, offset)
			return err
		}
	}
	use := func(dir string) error {
		d, err := dataset.Open(dir)
		if err != nil {
			return err
		}
		defer d.Close()
		if _, err := d.Topology(); err != nil {
			return err
		}
		if _, err := d.Labels(); err != nil {
			return err
		}
		_, err = d.Split("train")
		return err
	}
	require.NoError(t, use(good))
	datasettest.Unseal(t, good) // sealed, each of these is found as a difference from the seal
	require.NoError(t, use(good))
	for name, c := range map[string]struct {
		damage func(dir string) error
		want   []string
	}{
		"no metadata": {
			func(d string) error { return os.Remove(filepath.Join(d, dataset.MetaName)) },
			[]string{"not a dataset directory", dataset.MetaName, "generate"}},
		"metadata not YAML": {
			func(
				d string) error {
				return os.WriteFile(filepath.Join(d, dataset.MetaName), []byte("\x00:["), 0o644)
			}, []string{dataset.MetaName, "not readable"}},
		"some other YAML": {
			func(
				d string) error {
				return os.WriteFile(filepath.Join(d, dataset.MetaName), []byte("a: 1"), 0o644)
			}, []string{dataset.MetaName, "no format version"}},
		"unknown version": {replace("format: 1", "format: 7"),
			[]string{"format version 7 is unknown", "reads 1"}},
		"bad uuid": {replace("uuid: ", "uuid: x"), []string{dataset.MetaName, "uuid"}},
		"bad dtype": {replace("float32", "bfloat16"),
			[]string{dataset.MetaName, `dtype "bfloat16"`}},
		"no nodes": {replace("nodes: 50", "nodes: 0"),
			[]string{dataset.MetaName, "nodes 0"}},
		"other row count": {replace("nodes: 50", "nodes: 51"),
			[]string{dataset.IndptrName, "(51,)", dataset.MetaName, "(52,)"}},
		"other dim": {replace("dim: 3", "dim: 4"), []string{dataset.FeaturesName,
			"(50, 3)", dataset.MetaName, "(50, 4)"}},
		"missing array": {
			func(d string) error { return os.Remove(filepath.Join(d, dataset.LabelsName)) },
			[]string{dataset.LabelsName}},
		"truncated features": {
			func(
				d string) error {
				return os.Truncate(filepath.Join(d, dataset.FeaturesName), 200)
			}, []string{dataset.FeaturesName, "truncated"}},
		"truncated header": {
			func(d string) error { return os.Truncate(filepath.Join(d, dataset.IndicesName), 20) },
			[]string{dataset.IndicesName, "truncated"}},
		"not an array": {poke("test.npy", 0, 'X'), []string{"test.npy", "magic"}},
		"wrong type": {poke(dataset.LabelsName, 22, 'f'),
			[]string{dataset.LabelsName, "f4"}},
		"id out of range": {poke(dataset.IndicesName, 128+4*3, 0xff, 0xff, 0, 0),
			[]string{dataset.IndicesName, "node id 65535 at position 3", "0..49"}},
		"offsets that fall": {poke(dataset.IndptrName, 128+8*2, 0xff),
			[]string{dataset.IndptrName, "falls from 255", "position 3"}},
		"offsets not from 0": {poke(dataset.IndptrName, 128, 1), []string{dataset.IndptrName,
			"starts with 1"}},
		"label out of range": {poke(dataset.LabelsName, 128+4*5, 9), []string{dataset.LabelsName,
			"label 9 of node 5"}},
		"split out of range": {poke("train.npy", 128+8, 0xfe),
			[]string{"train.npy", "node id 254 at position 1"}},
		"last offset too high": {poke(dataset.IndptrName, 128+8*50, 0xff, 0xff),
			[]string{dataset.IndptrName, "ends with 65535", dataset.IndicesName}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "d")
			require.NoError(t, os.CopyFS(dir, os.DirFS(good)))
			require.NoError(t, use(dir))
			require.NoError(t, c.damage(dir))
			err := use(dir)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
			require.NotContains(t, err.Error(), "\n")
			datasettest.RequireUsage(t, err)
		})
	}
	_, err := dataset.Open(filepath.Join(good, dataset.MetaName))
	require.ErrorContains(t, err, "not a directory")
	_, err = dataset.Open(filepath.Join(good, "none"))
	datasettest.RequireUsage(t, err)
	_, err = datasettest.Open(t, good).Split("dev")
	require.ErrorContains(t, err, "use train, val or test")
	d, err := dataset.Open(good)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close())
	_, err = d.Topology()
	require.ErrorContains(t, err, "closed")
	require.ErrorContains(t, d.ReadRows(0, make([]byte, 12)), "closed")
	require.ErrorContains(t, datasettest.Open(t, good).ReadRows(49, make([]byte, 24)), "0..49")
	require.ErrorContains(t, datasettest.Open(t, good).ReadRows(0, make([]byte, 10)),
		"rows of 12 bytes")
}
