package dataset

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/seal"
	"helios/graph"
	"helios/internal/errs"
)

// unseal makes a dataset one that an older version has written.
func unseal(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, os.Remove(filepath.Join(dir, seal.Name)))
	path := filepath.Join(dir, metaName)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "sealed: true\n")
	require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(b), "sealed: true\n", "", 1)), 0o644))
}

// flipBit changes one bit of a file.
func flipBit(t *testing.T, path string, at int64) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[at] ^= 4
	require.NoError(t, os.WriteFile(path, b, 0o644))
}

func sealedDataset(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 3000, Dim: 40, Classes: 4, AvgDegree: 9, Seed: 5, Out: out}))
	return out
}

// useAll reads all that a run may read of a dataset in memory, and of one whose ids stay in their file.
func useAll(dir string) error {
	d, err := Open(dir)
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
	for _, s := range Splits {
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

// One bit anywhere, bytes behind an array or missing from it, a file that is gone and one that nobody sealed: all of it is
// a device error that names the file, for whoever uses the dataset and for VerifyFiles.
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
		for _, at := range []int64{0, st.Size() / 2, st.Size() - 1} {
			all = append(all, damage{fmt.Sprintf("%s bit of byte %d", f.Name(), at), f.Name(), func(t *testing.T, path string) { flipBit(t, path, at) }})
		}
		all = append(all,
			damage{f.Name() + " longer", f.Name(), func(t *testing.T, path string) {
				b, err := os.ReadFile(path)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(path, append(b, make([]byte, 400)...), 0o644))
			}},
			damage{f.Name() + " shorter", f.Name(), func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, st.Size()-3)) }})
		if f.Name() != metaName {
			all = append(all, damage{f.Name() + " gone", f.Name(), func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) }})
		}
	}
	all = append(all, damage{"names from elsewhere", namesName, func(t *testing.T, path string) { require.NoError(t, os.WriteFile(path, []byte("a\n"), 0o644)) }})
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "g")
			require.NoError(t, os.CopyFS(dir, os.DirFS(good)))
			c.do(t, filepath.Join(dir, c.file))
			err := useAll(dir)
			require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.file)
			d, err := Open(dir)
			if err == nil {
				_, err = VerifyFiles(bg, d, nil)
				require.NoError(t, d.Close())
			}
			require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, c.file)
			// A seal that disagrees is never made anew; one that is gone is, where the arrays are what the UUID says.
			if _, anew, err := Seal(bg, dir, nil); c.name == seal.Name+" gone" {
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
	topology, labels := mapTopologyFrom, mapLabelsFrom
	t.Cleanup(func() { mapTopologyFrom, mapLabelsFrom = topology, labels })
	mapTopologyFrom, mapLabelsFrom = 0, 0
	for _, name := range []string{indptrName, indicesName, labelsName} {
		dir := filepath.Join(t.TempDir(), "g")
		require.NoError(t, Generate(bg, GenerateOptions{Nodes: 40_000, Dim: 2, Classes: 4, AvgDegree: 2, Seed: 5, Out: dir})) // damage in its first block Open finds
		require.NoError(t, useAll(dir))
		st, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		flipBit(t, filepath.Join(dir, name), st.Size()-8)
		d := open(t, dir)
		if name == labelsName {
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

// A dataset of an older version works, is found out by its UUID where it is damaged, and can be sealed where it is not.
func TestSealOlderDataset(t *testing.T) {
	dir := sealedDataset(t)
	want, err := os.ReadFile(filepath.Join(dir, indicesName))
	require.NoError(t, err)
	unseal(t, dir)
	require.NoError(t, useAll(dir))
	d := open(t, dir)
	require.False(t, d.Sealed())
	_, err = VerifyFiles(bg, d, nil)
	require.NoError(t, err)

	flipBit(t, filepath.Join(dir, indicesName), 128+40) // still a node
	_, err = VerifyFiles(bg, d, nil)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "UUID")
	_, _, err = Seal(bg, dir, nil)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	_, err = os.Stat(filepath.Join(dir, seal.Name))
	require.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.WriteFile(filepath.Join(dir, indicesName), want, 0o644))
	_, anew, err := Seal(bg, dir, nil)
	require.NoError(t, err)
	require.True(t, anew)
	require.True(t, open(t, dir).Sealed())
	_, anew, err = Seal(bg, dir, nil)
	require.NoError(t, err)
	require.False(t, anew, "it is sealed")
	flipBit(t, filepath.Join(dir, indicesName), 128+40)
	require.Equal(t, errs.Device, errs.ClassOf(useAll(dir)))
	left, err := filepath.Glob(filepath.Join(dir, "*"+partialMark+"*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// features.npy that rots before a load gets no fresh checksums on the SSDs.
func TestLoadFindsRottenFeatures(t *testing.T) {
	dir := sealedDataset(t)
	flipBit(t, filepath.Join(dir, featuresName), 200_000)
	d := open(t, dir)
	_, err := VerifyAllButRows(bg, d, nil)
	require.NoError(t, err)
	_, err = load(bg, d, targetsOf(junkSims()...), LoadOptions{Force: "SER0,SER1"})
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "features.npy: bytes 196608 to 262143 ")
}

// Wherever an import ends, the one that goes on seals the same files; and a part that rotted in between is found.
func TestSealResumedImport(t *testing.T) {
	in := writeDir(t, goodArrays())
	whole := filepath.Join(t.TempDir(), "whole")
	require.NoError(t, importNPY(whole, in))
	wantSeal, err := os.ReadFile(filepath.Join(whole, seal.Name))
	require.NoError(t, err)
	stop := errors.New("stop")
	defer func() { journalStep = nil }()
	cut := 0
	for _, rot := range []bool{false, true} {
		for at := 1; ; at++ {
			out := filepath.Join(t.TempDir(), "whole")
			n := 0
			journalStep = func(_ []byte, written bool) error {
				if n++; n == at {
					return errors.Join(stop, context.Canceled)
				}
				return nil
			}
			err := importNPY(out, in)
			journalStep = nil
			if err == nil {
				break
			}
			require.ErrorIs(t, err, stop)
			parts, err := filepath.Glob(out + partialMark + "*/features.npy")
			require.NoError(t, err)
			kept := false
			if rot && len(parts) == 1 {
				text, err := os.ReadFile(filepath.Join(filepath.Dir(parts[0]), journalName))
				require.NoError(t, err)
				kept = strings.Contains(string(text), `{"array":"features","done"`)
				flipBit(t, parts[0], 128+4)
			}
			err = importNPY(out, in)
			if kept {
				cut++
				require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
				require.ErrorContains(t, err, "features.npy is not what was written")
				continue
			}
			require.NoError(t, err)
			got, err := os.ReadFile(filepath.Join(out, seal.Name))
			require.NoError(t, err)
			require.Equal(t, wantSeal, got)
		}
	}
	require.Positive(t, cut)
}

func importNPY(out, in string) error {
	return ImportNPY(bg, ImportOptions{In: in, Out: out, Seed: 1, Memory: 64 << 20})
}
