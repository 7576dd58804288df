package dataset

import (
	"encoding/binary"
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// TestFeatureFnValues pins the function: it may never change, for datasets are its values. The slow way
// beside it is the definition.
func TestFeatureFnValues(t *testing.T) {
	slow := func(seed uint64, r int64, w int) float32 {
		x := hashBits(seed, 0, w) | hashOne
		for b := range 63 {
			if r>>b&1 != 0 {
				x ^= hashBits(seed, 1+b, w)
			}
		}
		return math.Float32frombits(x)
	}
	for _, dim := range []int{1, 2, 3, 7, 64, 129} {
		for _, rows := range []int64{1, 2, 17, 1000, 1 << 20, 1e9, 1 << 40} {
			f := newFeatureFn(42, dim, rows)
			buf, v := make([]byte, 4*dim), make([]float32, dim)
			for _, r := range []int64{0, 1, rows / 3, rows / 2, rows - 1} {
				r = min(r, rows-1)
				f.floats(r, v, buf)
				for w, x := range v {
					require.Equal(t, slow(42, r, w), x, "row %d of %d, column %d of %d", r, rows, w, dim)
					require.True(t, x > -1 && x < 1 && (x >= 0.5 || x <= -0.5), "%v", x)
				}
			}
		}
	}
	f := newFeatureFn(7, 4, 1e9)
	buf := make([]byte, 16)
	var got []uint32
	for _, r := range []int64{0, 1, 123456789, 999999999} {
		f.row(r, buf)
		for w := range 4 {
			got = append(got, binary.LittleEndian.Uint32(buf[4*w:]))
		}
	}
	require.Equal(t, pinnedHash, got)
}

// TestFeatureFnSpread looks at what a hash must have: bits even, columns and rows unalike.
func TestFeatureFnSpread(t *testing.T) {
	const dim, rows = 8, 1 << 14
	f := newFeatureFn(3, dim, rows)
	buf := make([]byte, 4*dim)
	seen := map[[4 * dim]byte]bool{}
	var ones [dim][32]int
	var sum float64
	for r := range int64(rows) {
		f.row(r, buf)
		seen[[4 * dim]byte(buf)] = true
		for w := range dim {
			x := binary.LittleEndian.Uint32(buf[4*w:])
			sum += float64(math.Float32frombits(x))
			for b := range 32 {
				ones[w][b] += int(x >> b & 1)
			}
		}
	}
	require.Len(t, seen, rows)
	require.InDelta(t, 0, sum/(rows*dim), 0.02)
	for w := range dim {
		for b := range 32 {
			if hashMask>>b&1 != 0 {
				// A linear bit over all rows is even, or the same for all where no row number moves it: 2^-14.
				require.Equal(t, rows/2, ones[w][b], "bit %d of column %d", b, w)
			}
		}
	}
}

func hashed(t testing.TB, nodes int64, dim int, seed uint64, fn string) *Dataset {
	t.Helper()
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, Generate(bg, GenerateOptions{Kind: "sbm", Nodes: nodes, Dim: dim, Classes: int(min(nodes, 4)), AvgDegree: 3, Seed: seed, FeatureFn: fn, Out: out}))
	d, err := Open(out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// TestFeatureFnDataset: no features.npy, rows by number, and an identity that covers the function.
func TestFeatureFnDataset(t *testing.T) {
	d := hashed(t, 1000, 10, 5, "hash")
	require.Equal(t, "hash:5", d.FeatureFn())
	require.NoFileExists(t, d.path(featuresName))
	all := make([]byte, 1000*40)
	require.NoError(t, d.ReadRows(0, all))
	one := make([]byte, 40)
	for _, r := range []int64{0, 1, 500, 999} {
		require.NoError(t, d.ReadRows(r, one))
		require.Equal(t, all[r*40:r*40+40], one)
	}
	require.Error(t, d.ReadRows(999, make([]byte, 80)))
	require.Error(t, d.ReadRows(-1, one))

	same := hashed(t, 1000, 10, 5, "hash:5")
	require.Equal(t, d.UUID(), same.UUID())
	for _, other := range []*Dataset{hashed(t, 1000, 10, 5, "hash:6"), hashed(t, 1000, 11, 5, "hash"), hashed(t, 1000, 10, 5, "")} {
		require.NotEqual(t, d.UUID(), other.UUID())
	}
	for _, fn := range []string{"crc", "hash:", "hash:x", "hash:-1", "hash:1:2", "Hash"} {
		err := Generate(bg, GenerateOptions{Nodes: 100, FeatureFn: fn, Out: filepath.Join(t.TempDir(), "x")})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%s: %v", fn, err)
	}
	for _, fn := range []string{"hash", "sum:1", "hash:01"} {
		m := d.Meta
		m.FeatureFn = fn
		require.Error(t, m.checkFeatureFn(), fn)
	}
}

// TestSplitFractions: a test split of its own leaves nodes in no split.
func TestSplitFractions(t *testing.T) {
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, Generate(bg, GenerateOptions{Nodes: 20000, Dim: 1, FeatureFn: "hash", TrainFraction: 0.1, ValFraction: 0.05, TestFraction: 0.01, Out: out}))
	d, err := Open(out)
	require.NoError(t, err)
	require.InDelta(t, 2000, d.Meta.Train, 200)
	require.InDelta(t, 1000, d.Meta.Val, 150)
	require.InDelta(t, 200, d.Meta.Test, 70)
	require.NoError(t, d.Close())
}

// pinnedHash was computed by a program in another language, from the text of featureFn.
var pinnedHash = []uint32{
	0xbf34c297, 0xbf5305fd, 0xbf23cbb6, 0xbf2f21d8,
	0x3f603fcc, 0x3f01c041, 0x3f3a6317, 0x3f2b7a5a,
	0x3f4218cc, 0x3f001dac, 0xbf444345, 0xbf3f780e,
	0xbf7fd750, 0xbf5049b9, 0xbf59cdbe, 0x3f79ecbb,
}
