package stripe

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/testing/testrig"
)

// TestRowSource: rows of every type and placement come in their order as they are stored, checked
// where they have checksums.
func TestRowSource(t *testing.T) {
	testrig.CheckLeaks(t)
	for _, dim := range []int{7, 100, 1024, 1100} {
		d := small(t, 300, dim, 1)
		for n := 1; n <= 3; n++ {
			for _, rt := range rowtype.Types() {
				for _, sums := range []bool{true, false} {
					why := fmt.Sprintf("dim %d, %d SSDs, %s", dim, n, rt)
					s := sims(n, 512)
					must(load(bg, d, targetsOf(s...), LoadOptions{RowType: rt.String(),
						NoRowChecksums: !sums}))
					r, err := openRows(bg, d, targetsOf(s...))
					require.NoError(t, err, why)
					require.Equal(t, rt, r.RowType())
					require.Equal(t, sums, r.Unchecked() == "")
					want := make([]byte, 300*r.RowBytes())
					require.NoError(t, d.RowsAs(rt).Read(0, want))
					for first, rng := int64(0), rand.New(rand.NewPCG(1, 2)); first < 300; {
						k := min(1+rng.Int64N(90), 300-first)
						got := make([]byte, int(k)*r.RowBytes())
						require.NoError(t, r.ReadRows(bg, first, k, got), why)
						require.True(t, bytes.Equal(want[int(first)*r.RowBytes():][:len(got)],
							got), "%s: rows from %d", why, first)
						first += k
					}
					require.Error(t, r.ReadRows(bg, 299, 2, want))
					require.Error(t, r.ReadRows(bg, -1, 2, want))
					require.Error(t, r.ReadRows(bg, 0, 2, nil))
					require.NoError(t, r.Close(bg))
					scrap(s...)
				}
			}
		}
	}
}

// TestRowSourceNamesRows: a flipped bit and a read error are named.
func TestRowSourceNamesRows(t *testing.T) {
	d := small(t, 300, 128, 1)
	s := sealed(t, d, 2)
	s[1].durable[headBytes+512*31+3] ^= 1 // row 63
	r, err := openRows(bg, d, targetsOf(s...))
	require.NoError(t, err)
	b := make([]byte, 300*512)
	require.NoError(t, r.ReadRows(bg, 0, 63, b))
	err = r.ReadRows(bg, 0, 300, b)
	require.ErrorContains(t, err, "ssd sim1: row 63 at LBA 2079")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	s[0].readFail = func(lba int64) error {
		if lba == 2048+40 {
			return errPowerLoss
		}
		return nil
	}
	err = r.ReadRows(bg, 70, 100, b)
	require.ErrorContains(t, err, "ssd sim0: rows 70 to 169")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.NoError(t, r.Close(bg))
}
