package datasettest

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
)

// ReadRows reads rows of a layout in one set, and returns their bytes.
func ReadRows(t testing.TB, dev cuda.Device, r gpuio.Reader, l gpuio.Layout,
	list []int64) ([]byte, gpuio.ReadStats, error) {
	t.Helper()
	alloc := func(bytes int64) cuda.Buffer {
		b, err := dev.Alloc(cuda.MemDevice, bytes, "test")
		require.NoError(t, err)
		return b
	}
	n, size := int64(len(list)), int64(l.RowBytes)
	rows, pos, dst := alloc(n*8), alloc(n*4), alloc(n*size)
	defer func() {
		require.NoError(t, errors.Join(rows.Free(), pos.Free(), gpuio.Forget(r, dst), dst.Free()))
	}()
	offsets := []int64{0}
	k := 0
	for s := range int64(l.SSDs) {
		for i, p := range list {
			if p%int64(l.SSDs) == s {
				cuda.View[int64](rows.Ptr(), n)[k] = p
				cuda.View[uint32](pos.Ptr(), n)[k] = uint32(i)
				k++
			}
		}
		offsets = append(offsets, int64(k))
	}
	p, err := r.Submit(context.Background(), &gpuio.ReadSet{Rows: rows.Ptr(), Pos: pos.Ptr(),
		SSDOffset: offsets, Dst: dst, DstStride: size})
	require.NoError(t, err)
	st, err := p.Wait(context.Background())
	return bytes.Clone(dst.Bytes()), st, err
}
