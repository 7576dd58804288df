package dataset

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFeatureFnValues pins the function: it may never change, for datasets are its values. The slow
// way beside it is the definition.
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
			f := NewFeatureFunc(42, dim, rows)
			buf, v := make([]byte, 4*dim), make([]float32, dim)
			for _, r := range []int64{0, 1, rows / 3, rows / 2, rows - 1} {
				r = min(r, rows-1)
				f.Floats(r, v, buf)
				for w, x := range v {
					require.Equal(t, slow(42, r, w), x, "row %d of %d, column %d of %d", r,
						rows, w, dim)
					require.True(t, x > -1 && x < 1 && (x >= 0.5 || x <= -0.5), "%v", x)
				}
			}
		}
	}
	f := NewFeatureFunc(7, 4, 1e9)
	buf := make([]byte, 16)
	var got []uint32
	for _, r := range []int64{0, 1, 123456789, 999999999} {
		f.Row(r, buf)
		for w := range 4 {
			got = append(got, binary.LittleEndian.Uint32(buf[4*w:]))
		}
	}
	require.Equal(t, pinnedHash, got)
}

// TestFeatureFnSpread looks at what a hash must have: bits even, columns and rows unalike.
func TestFeatureFnSpread(t *testing.T) {
	const dim, rows = 8, 1 << 14
	f := NewFeatureFunc(3, dim, rows)
	buf := make([]byte, 4*dim)
	seen := map[[4 * dim]byte]bool{}
	var ones [dim][32]int
	var sum float64
	for r := range int64(rows) {
		f.Row(r, buf)
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
				// A linear bit over all rows is even, or the same for all where no row number moves
				// it: 2^-14.
				require.Equal(t, rows/2, ones[w][b], "bit %d of column %d", b, w)
			}
		}
	}
}

// pinnedHash was computed by a program in another language, from the text of featureFn.
var pinnedHash = []uint32{
	0xbf34c297, 0xbf5305fd, 0xbf23cbb6, 0xbf2f21d8,
	0x3f603fcc, 0x3f01c041, 0x3f3a6317, 0x3f2b7a5a,
	0x3f4218cc, 0x3f001dac, 0xbf444345, 0xbf3f780e,
	0xbf7fd750, 0xbf5049b9, 0xbf59cdbe, 0x3f79ecbb,
}
