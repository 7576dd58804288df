package stripe

import (
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/errs"
)

// Sizes whose sums wrap around must not look like a stripe that fits.
func TestGeometryDoesNotWrap(t *testing.T) {
	for _, c := range []struct {
		rows     int64
		rowBytes int
	}{{1 << 40, 1 << 24}, {1 << 48, 1 << 24}, {1 << 47, 1 << 24}, {1<<48 - 1, 1<<24 - 4}} {
		l, err := gpuio.NewLayout(c.rows, c.rowBytes, 1, 512)
		require.NoError(t, err)
		for _, entry := range []int64{0, 4, 8} {
			_, err = newGeometry(l, 0, 512, 1<<42, entry)
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%d rows of %d", c.rows, c.rowBytes)
			require.ErrorContains(t, err, "use more SSDs")
		}
	}
	// As a superblock with a right checksum: 2^40 rows of 2^24 bytes, none of which would be
	// anywhere.
	sb := Superblock{State: StateComplete, StripeCount: 1, Rows: 1 << 40, RowBytes: 1 << 24,
		LBABytes: 512, RowsPerLBA: 1, LBAsPerRow: 1 << 15,
		DataLBA: headBytes / 512, DataLBAs: 1 << 55, TableLBA: headBytes / 512,
		ChunkBytes: chunkBytes, DeviceLBAs: 1 << 42,
		RowChecksum: checksumCRC32C, RowTableLBA: headBytes / 512, RowTableLBAs: 1 << 33}
	b, err := sb.encode(0)
	require.NoError(t, err)
	clear(b[crcOffset : crcOffset+4])
	binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
	_, err = decodeSuperblock(b)
	require.ErrorIs(t, err, errBadSuperblock)

	// The largest that there may be: a row of 1 MiB for each of 2^40 nodes.
	l, err := gpuio.NewLayout(1<<40, 4<<18, 1, 4096)
	require.NoError(t, err)
	g, err := newGeometry(l, 0, 4096, maxStripe/4096, 4)
	require.NoError(t, err)
	require.EqualValues(t, 1<<60, g.dataBytes)
	require.Greater(t, g.needBytes, g.dataBytes)
	_, err = newGeometry(l, 0, 4096, maxStripe/4096+1, 4)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	_, err = newGeometry(l, 0, 4096, 1<<20, 4)
	require.ErrorContains(t, err, "needs ")
}
