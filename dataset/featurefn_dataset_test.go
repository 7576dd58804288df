package dataset_test

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/errs"
)

// TestFeatureFnDataset: no features.npy, rows by number, and an identity that covers the function.
func TestFeatureFnDataset(t *testing.T) {
	d := hashedDataset(t, 1000, 10, 5, "hash")
	require.Equal(t, "hash:5", d.FeatureFn())
	require.NoFileExists(t, d.Path(dataset.FeaturesName))
	all := make([]byte, 1000*40)
	require.NoError(t, d.ReadRows(0, all))
	one := make([]byte, 40)
	for _, r := range []int64{0, 1, 500, 999} {
		require.NoError(t, d.ReadRows(r, one))
		require.Equal(t, all[r*40:r*40+40], one)
	}
	require.Error(t, d.ReadRows(999, make([]byte, 80)))
	require.Error(t, d.ReadRows(-1, one))

	same := hashedDataset(t, 1000, 10, 5, "hash:5")
	require.Equal(t, d.UUID(), same.UUID())
	for _, other := range []*dataset.Dataset{hashedDataset(t, 1000, 10, 5, "hash:6"),
		hashedDataset(t, 1000, 11, 5, "hash"), hashedDataset(t, 1000, 10, 5, "")} {
		require.NotEqual(t, d.UUID(), other.UUID())
	}
	for _, fn := range []string{"crc", "hash:", "hash:x", "hash:-1", "hash:1:2", "Hash"} {
		err := build.Generate(bg, build.GenerateOptions{Nodes: 100, FeatureFn: fn,
			Out: filepath.Join(t.TempDir(), "x")})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%s: %v", fn, err)
	}
	for _, fn := range []string{"hash", "sum:1", "hash:01"} {
		m := d.Meta
		m.FeatureFn = fn
		require.Error(t, dataset.CheckFeatureFn(&m), fn)
	}
}

func hashedDataset(t testing.TB, nodes int64, dim int, seed uint64, fn string) *dataset.Dataset {
	t.Helper()
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Kind: "sbm", Nodes: nodes, Dim: dim,
		Classes: int(min(nodes, 4)), AvgDegree: 3, Seed: seed, FeatureFn: fn, Out: out}))
	d, err := dataset.Open(out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}
