package gpuio

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/nvme"
)

// windowBus has windows, as a bus does whose mappings pin memory: it maps what was asked for and
// fails the controller's reach beyond by the books only, since the software controller maps all.
type windowBus struct {
	waitBus
	mu      sync.Mutex
	windows map[nvme.IOVA]*window
	past    []window // taken back
}

type window struct{ size, reach int64 }

func (b *windowBus) MapWindow(mem []byte) (nvme.IOVA, error) {
	iova, err := b.MapDMA(mem)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.windows[iova] = &window{size: int64(len(mem))}
	return iova, err
}

func (b *windowBus) ExtendWindow(iova nvme.IOVA, bytes int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.windows[iova].reach = max(b.windows[iova].reach, bytes)
	return nil
}

func (b *windowBus) UnmapDMA(iova nvme.IOVA, bytes int64) error {
	b.mu.Lock()
	if w := b.windows[iova]; w != nil {
		b.past = append(b.past, *w)
		delete(b.windows, iova)
	}
	b.mu.Unlock()
	return b.waitBus.UnmapDMA(iova, bytes)
}

// Of a large destination only what sets say they use gets into the SSDs' reach, a position beyond
// it is refused by the kernel, and Forget takes the window back whole.
func TestWindows(t *testing.T) {
	var buses []*windowBus
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 1024, rows: 600, ram: true,
		wrap: func(b nvme.Bus) nvme.Bus {
			w := &windowBus{waitBus: waitBus{b, b.(nvme.Kicker), b.(nvme.Waiter)},
				windows: map[nvme.IOVA]*window{}}
			buses = append(buses, w)
			return w
		}})
	ctx := testCtx(t)
	rd := r.async(AsyncOptions{})
	s := r.newSet(rand.New(rand.NewPCG(1, 1)), 40, 2048, 4096)
	whole := s.rs.Dst.Size()
	used := int64(slices.Max(s.pos))*s.rs.DstStride + 1024
	s.rs.DstBytes = used
	reach := func(want int64) {
		t.Helper()
		for _, b := range buses {
			var got []window
			for _, w := range b.windows {
				if w.size == whole {
					got = append(got, *w)
				}
			}
			require.Equal(t, []window{{whole, want}}, got)
		}
	}
	s.read(rd)
	reach(s.rs.DstOffset + s.rs.DstBytes)

	s.rs.DstBytes += 512 // grows
	limit := s.rs.DstBytes
	s.read(rd)
	reach(s.rs.DstOffset + limit)

	s.rs.DstBytes = used - 1 // never shrinks; and the last row ends beyond
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	_, err = p.Wait(ctx)
	require.ErrorContains(t, err, "is outside the destination of")
	reach(s.rs.DstOffset + limit)

	for _, bad := range []int64{-1, 1023, whole - s.rs.DstOffset + 1} {
		s.rs.DstBytes = bad
		_, err := rd.Submit(ctx, s.rs)
		require.ErrorContains(t, err, "read set: rows of 1024 bytes in")
	}
	s.free(rd)
	for _, b := range buses {
		require.Contains(t, b.past, window{whole, s.rs.DstOffset + limit})
	}
}
