package dataset_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/seal"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
)

func sealedDataset(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: 3000, Dim: 40, Classes: 4,
		AvgDegree: 9, Seed: 5, Out: out}))
	return out
}

// useAll reads all that a run may read of a dataset in memory, and of one whose ids stay in their
// file.
func useAll(dir string) error {
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
	for _, s := range dataset.Splits {
		if _, err := d.Split(s); err != nil {
			return err
		}
	}
	rows := make([]byte, d.Meta.Nodes*int64(d.Meta.RowBytes()))
	if err := d.ReadRows(0, rows); err != nil {
		return err
	}
	t, err := d.TopologyOnSSD(bg, graph.OutOfCoreOptions{})
	if err != nil {
		return err
	}
	return t.Close()
}

// One bit anywhere, bytes behind an array or missing from it, a file that is gone and one that
// nobody sealed: all of it is a device error that names the file, for whoever uses the dataset and
// for VerifyFiles.
func TestSealFindsDamage(t *testing.T) {
	good := sealedDataset(t)
	require.NoError(t, useAll(good))
	files, err := os.ReadDir(good)
	require.NoError(t, err)
	require.Len(t, files, 9)
	type damage struct {
		name, file string
		do         func(t *testing.T, path string)
	}
	var all []damage
	for _, f := range files {
		st, err := f.Info()
		require.NoError(t, err)
		for _, offset := range []int64{0, st.Size() / 2, st.Size() - 1} {
			all = append(all, damage{fmt.Sprintf("%s bit of byte %d", f.Name(), offset), f.Name(),
				func(t *testing.T, path string) { datasettest.FlipBit(t, path, offset) }})
		}
		all = append(all,
			damage{f.Name() + " longer", f.Name(), func(t *testing.T, path string) {
				b, err := os.ReadFile(path)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(path, append(b, make([]byte, 400)...), 0o644))
			}},
			damage{f.Name() + " shorter", f.Name(),
				func(t *testing.T,
					path string) {
					require.NoError(t, os.Truncate(path, st.Size()-3))
				}})
		if f.Name() != dataset.MetaName {
			all = append(all, damage{f.Name() + " gone", f.Name(),
				func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) }})
		}
	}
	all = append(all, damage{"names from elsewhere", dataset.NamesName,
		func(t *testing.T,
			path string) {
			require.NoError(t, os.WriteFile(path, []byte("a\n"), 0o644))
		}})
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "g")
			require.NoError(t, os.CopyFS(dir, os.DirFS(good)))
			c.do(t, filepath.Join(dir, c.file))
			err := useAll(dir)
			require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.file)
			d, err := dataset.Open(dir)
			if err == nil {
				_, err = dataset.VerifyFiles(bg, d, nil)
				require.NoError(t, d.Close())
			}
			require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.file)
			// A seal that disagrees is never made anew; one that is gone is, where the arrays are
			// what the UUID says.
			if _, anew, err := dataset.Seal(bg, dir, nil); c.name == seal.Name+" gone" {
				require.NoError(t, err)
				require.True(t, anew)
				require.NoError(t, useAll(dir))
			} else {
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				require.False(t, anew)
			}
		})
	}
}

// Mapped arrays are checked, too.
func TestSealFindsDamageMapped(t *testing.T) {
	dataset.MapAlways(t)
	for _, name := range []string{dataset.IndptrName, dataset.IndicesName, dataset.LabelsName} {
		dir := filepath.Join(t.TempDir(), "g")
		// damage in its first block Open finds
		require.NoError(t, build.Generate(bg, build.GenerateOptions{Nodes: 40_000, Dim: 2,
			Classes: 4, AvgDegree: 2, Seed: 5, Out: dir}))
		require.NoError(t, useAll(dir))
		st, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		datasettest.FlipBit(t, filepath.Join(dir, name), st.Size()-8)
		d := datasettest.Open(t, dir)
		if name == dataset.LabelsName {
			_, err = d.Labels()
		} else {
			_, err = d.Topology()
		}
		var m *seal.Mismatch
		require.ErrorAs(t, err, &m)
		require.Equal(t, filepath.Join(dir, name), m.Path)
		require.Equal(t, st.Size(), m.To)
	}
}

// A dataset of an older version works, is found out by its UUID where it is damaged, and can be
// sealed where it is not.
func TestSealOlderDataset(t *testing.T) {
	dir := sealedDataset(t)
	want, err := os.ReadFile(filepath.Join(dir, dataset.IndicesName))
	require.NoError(t, err)
	datasettest.Unseal(t, dir)
	require.NoError(t, useAll(dir))
	d := datasettest.Open(t, dir)
	require.False(t, d.Sealed())
	_, err = dataset.VerifyFiles(bg, d, nil)
	require.NoError(t, err)

	datasettest.FlipBit(t, filepath.Join(dir, dataset.IndicesName), 128+40) // still a node
	_, err = dataset.VerifyFiles(bg, d, nil)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "UUID")
	_, _, err = dataset.Seal(bg, dir, nil)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	_, err = os.Stat(filepath.Join(dir, seal.Name))
	require.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.WriteFile(filepath.Join(dir, dataset.IndicesName), want, 0o644))
	_, anew, err := dataset.Seal(bg, dir, nil)
	require.NoError(t, err)
	require.True(t, anew)
	require.True(t, datasettest.Open(t, dir).Sealed())
	_, anew, err = dataset.Seal(bg, dir, nil)
	require.NoError(t, err)
	require.False(t, anew, "it is sealed")
	datasettest.FlipBit(t, filepath.Join(dir, dataset.IndicesName), 128+40)
	require.Equal(t, errs.Device, errs.ClassOf(useAll(dir)))
	left, err := filepath.Glob(filepath.Join(dir, "*"+dataset.PartialMark+"*"))
	require.NoError(t, err)
	require.Empty(t, left)
}
