package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/hostmem"
	"helios/sched/prepare"
)

// A merged set has the rows of all segments by SSD, and their places in the reservation.
func TestMerge(t *testing.T) {
	const rowBytes, size = 512, 4 * hostmem.PageBytes
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	all, err := cuda.Reserve(dev, 2*size, "test")
	require.NoError(t, err)
	lists, err := dev.Alloc(cuda.MemPinned, hostmem.PageBytes, "test")
	require.NoError(t, err)
	copy(hostmem.View[int64](lists.Bytes()), []int64{4, 6, 1, 8, 3})
	places := lists.Ptr() + 1024
	copy(hostmem.View[uint32](lists.Bytes()[1024:]), []uint32{0, 1, 2, 7, 5})
	segment := func(at int64, first cuda.DevicePtr, offsets ...int64) *Segment {
		g := &Segment{}
		g.Ask(offsets[2], &gpuio.ReadSet{Rows: lists.Ptr() + first*8, Pos: places + first*4,
			SSDOffset: offsets, Dst: &tensor{all, at, size}, DstStride: rowBytes,
			DstBytes: 8 * rowBytes})
		return g
	}
	one, two := segment(0, 0, 0, 2, 3), segment(size, 3, 0, 1, 2)
	e := &Engine{Sampling: &prepare.Sampling{Device: dev, RowBytes: rowBytes}}
	require.NoError(t, e.merge([]*Segment{one, two}))
	require.EqualValues(t, 5, one.Asked)
	require.Zero(t, two.Asked)
	set := one.asks
	require.Equal(t, all, set.Dst)
	require.EqualValues(t, size+8*rowBytes, set.DstBytes)
	require.Equal(t, []int64{0, 3, 5}, set.SSDOffset)
	require.Equal(t, []int64{4, 6, 8, 1, 3}, cuda.View[int64](set.Rows, 5))
	const next = size / rowBytes // the second tensor's first row
	require.Equal(t, []uint32{0, 1, next + 7, 2, next + 5}, cuda.View[uint32](set.Pos, 5))

	alone := segment(size, 3, 0, 1, 2)
	require.NoError(t, e.merge([]*Segment{alone}))
	require.EqualValues(t, size, alone.asks.DstOffset)
	require.Equal(t, all, alone.asks.Dst)
	require.NoError(t, one.freeLists())
	require.NoError(t, lists.Free())
	require.NoError(t, all.Free())
	require.NoError(t, dev.Close())
}
