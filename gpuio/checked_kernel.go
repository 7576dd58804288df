package gpuio

import (
	"fmt"
	"hash/crc32"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// checkParams are the parameters of the kernel "check_rows": the CRC32C of row Rows[i], which is at
// Pos[i]*DstStride of the destination, goes to Got[i]; Bad counts those that are not Sums[Rows[i]].
type checkParams struct {
	Rows       cuda.DevicePtr // int64[Count]
	Pos        cuda.DevicePtr // uint32[Count]
	Sums       cuda.DevicePtr // uint32[LayoutRows]
	Dst        cuda.DevicePtr
	Got        cuda.DevicePtr // uint32[Count]
	Bad        cuda.DevicePtr // uint32, added to
	Tables     cuda.DevicePtr // checkTables(Lanes), for the CUDA kernel
	Count      int64
	LayoutRows int64
	DstLimit   int64 // bytes from Dst to the end of its buffer
	DstStride  int64
	RowBytes   uint32
	Lanes      uint32 // of a warp that share a row, for the CUDA kernel
}

// The CUDA kernel gets the same bytes.
const (
	_ = -(unsafe.Sizeof(checkParams{}) ^ 96)
	_ = -(unsafe.Offsetof(checkParams{}.Count) ^ 56)
	_ = -(unsafe.Offsetof(checkParams{}.RowBytes) ^ 88)
)

func init() { cuda.RegisterHost("check_rows", checkRowsKernel) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checkRowsKernel uses the CPU's CRC32 instruction by way of hash/crc32: ~18 GB/s a core for rows
// of 1 KiB. Blocks take contiguous shares.
func checkRowsKernel(b *cuda.Block, p *checkParams) error {
	lo, hi := b.Range(p.Count)
	rows, pos := cuda.View[int64](p.Rows, p.Count), cuda.View[uint32](p.Pos, p.Count)
	sums, got := cuda.View[uint32](p.Sums, p.LayoutRows), cuda.View[uint32](p.Got, p.Count)
	dst := cuda.View[byte](p.Dst, p.DstLimit)
	n := int64(p.RowBytes)
	bad := uint32(0)
	for i := lo; i < hi; i++ {
		if uint64(rows[i]) >= uint64(p.LayoutRows) {
			return fmt.Errorf("check_rows: row %d at index %d: the layout has %d rows", rows[i], i,
				p.LayoutRows)
		}
		off := int64(pos[i]) * p.DstStride
		if off > p.DstLimit-n {
			return fmt.Errorf(
				"check_rows: position %d at index %d is outside the destination of %d bytes",
				pos[i], i, p.DstLimit)
		}
		got[i] = crc32.Checksum(dst[off:off+n], castagnoli)
		if got[i] != sums[rows[i]] {
			bad++
		}
	}
	if bad != 0 {
		atomic.AddUint32(at[uint32](p.Bad, 0), bad)
	}
	return nil
}

// checkLanes returns how many lanes of a warp share a row: 8, whose words are one sector of 32
// bytes, where the row has so many words. More would join more and look up less.
func checkLanes(rowBytes int) uint32 {
	words := max(min(rowBytes/4, 8), 1)
	return 1 << bits.Len(uint(words-1))
}

const checkTableWords = 4*256 + 3*8*16 + 256

// checkTables are the tables of the CUDA kernel, see there: what so many zero bytes do to the
// register of a CRC, for the parts of the register, whose sum (xor) it is.
func checkTables(lanes uint32) []uint32 {
	advance := func(r uint32, bytes uint32) uint32 {
		for range bytes {
			r = castagnoli[r&255] ^ r>>8
		}
		return r
	}
	t := make([]uint32, 0, checkTableWords)
	for part := range 4 {
		for v := range uint32(256) {
			t = append(t, advance(v<<(8*part), 4*lanes))
		}
	}
	for k := range 3 {
		for part := range 8 {
			for v := range uint32(16) {
				t = append(t, advance(v<<(4*part), 4<<k))
			}
		}
	}
	return append(t, castagnoli[:]...)
}
