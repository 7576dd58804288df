package sched

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
)

// A mini-batch on its way to a replica and a gradient on its way back don't touch each other, nor
// do two copies in one direction.
func TestBridgeBothWaysAtOnce(t *testing.T) {
	near, lib := gpu(t, "devices=2,mem=268435456")
	t.Cleanup(func() { require.NoError(t, near.Close()) })
	far, err := driver.Open(driver.Options{Library: lib, Index: 1, CloseTimeout: 3 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, far.Close()) })
	b, err := newBridge(near, far)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.close()) })
	const n = 2*bridgeChunk + 12345
	type ends struct {
		from, to cuda.Device
		copy     func(dst, src cuda.DevicePtr) error
	}
	out := ends{near, far, func(dst, src cuda.DevicePtr) error {
		return b.out(t.Context(), dst, src, n)
	}}
	back := ends{far, near, func(dst, src cuda.DevicePtr) error {
		return b.back(t.Context(), dst, src, n)
	}}
	var wg sync.WaitGroup
	for i, x := range []ends{out, back, out, back} {
		hold := func(dev cuda.Device, kind cuda.MemKind) cuda.Buffer {
			m, err := dev.Alloc(kind, n, "test")
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, m.Free()) })
			return m
		}
		host, got := hold(x.from, cuda.MemPinned), hold(x.to, cuda.MemPinned)
		src, dst := hold(x.from, cuda.MemDevice), hold(x.to, cuda.MemDevice)
		move := func(dev cuda.Device, dst, src cuda.Buffer) error {
			s, err := dev.NewStream(cuda.StreamOptions{Name: "test"})
			if err != nil {
				return err
			}
			return errors.Join(s.Copy(dst.Ptr(), src.Ptr(), n), s.Synchronize(t.Context()),
				s.Close())
		}
		want, have := cuda.View[byte](host.Ptr(), n), cuda.View[byte](got.Ptr(), n)
		wg.Go(func() {
			for round := range 8 {
				for j := range want {
					want[j] = byte(j>>8 ^ j + i*8 + round)
				}
				err := errors.Join(move(x.from, src, host), x.copy(dst.Ptr(), src.Ptr()),
					move(x.to, got, dst))
				if err != nil || !bytes.Equal(want, have) {
					t.Errorf("copy %d, round %d: other bytes came, or %v", i, round, err)
					return
				}
			}
		})
	}
	wg.Wait()
}
