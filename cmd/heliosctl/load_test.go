package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// Row checksums from load to verify, and what verify says with and without them.
func TestRowChecksums(t *testing.T) {
	loaded(t, 2)
	require.Contains(t, ok(t, "verify", "g"), "4000 rows have their checksums")
	r := lines(t, ok(t, "load", "g", "--json", "--quiet"))
	require.EqualValues(t, 16384, r[len(r)-1]["row_checksums"],
		"2000 rows of 4 bytes an SSD, in 4 KiB")

	// Row 84 is slot 42 of the first SSD: the third of the four rows in the extent's LBA 10.
	const at = 1<<20 + 10*512 + 2*128 + 77
	f, err := os.OpenFile("ssd0.img", os.O_RDWR, 0)
	require.NoError(t, err)
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	require.NoError(t, err)
	b[0] ^= 1
	_, err = f.WriteAt(b, at)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	out := hc(t, "verify", "g", "--quiet")
	fails(t, out, 5, "verify", "ssd0", "row 84 is not what its checksum says", "heliosctl load")
	require.Contains(t, out.out, "row 84 is not what its checksum says")

	require.Contains(t, ok(t, "load", "g", "--row-checksums=false"), "no row checksums")
	require.NotContains(t, ok(t, "verify", "g"), "checksums")
}
