package cache

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/cache/packed"
	"helios/cuda"
	"helios/internal/hostmem"
)

// Ranked is a static cache for mini-batches that were laid out beforehand (package packed): these
// name its rows by their place in a list, the hottest first, so that nothing is looked up for them.
// Others look rows up as in any Hetero.
type Ranked struct {
	*Hetero
	slot []uint32 // by rank, in the tier that the rank is in
}

// NewRanked makes the tiers: the first gpuRows rows of hot are in the GPU tier, all others in the
// CPU tier, each tier in ascending order.
func NewRanked(dev cuda.Device, rows, rowBytes int64, ssds int, hot []int64,
	gpuRows int64) (*Ranked, error) {
	n := int64(len(hot))
	if gpuRows < 0 || gpuRows > n || n >= math.MaxUint32 {
		return nil, fmt.Errorf("cache: %d of %d ranked rows in the GPU tier: want below 2^32 rows",
			gpuRows, n)
	}
	c := &Ranked{}
	var place Placement
	place, c.slot = ranks(hot, gpuRows)
	var err error
	c.Hetero, err = NewHetero(dev, rows, rowBytes, ssds, place)
	return c, err
}

// Ranks is the placement of a Ranked cache.
func Ranks(hot []int64, gpuRows int64) Placement {
	p, _ := ranks(hot, gpuRows)
	return p
}

// ranks places hot rows, and gives each rank's slot in its tier.
func ranks(hot []int64, gpuRows int64) (p Placement, slot []uint32) {
	slot = make([]uint32, len(hot))
	tier := func(from, to int64) []int64 {
		order := make([]uint32, to-from)
		for i := range order {
			order[i] = uint32(from) + uint32(i)
		}
		slices.SortFunc(order, func(a, b uint32) int { return cmp.Compare(hot[a], hot[b]) })
		sorted := make([]int64, len(order))
		for i, r := range order {
			sorted[i], slot[r] = hot[r], uint32(i)
		}
		return sorted
	}
	return Placement{GPU: tier(0, gpuRows), CPU: tier(gpuRows, int64(len(hot)))}, slot
}

// Assembly has the reads and copies of a mini-batch that was laid out beforehand: pages and their
// places in a staging buffer, and the rows that come from the tiers and from those pages. Kernels
// and I/O stacks read its lists out of pinned memory.
type Assembly struct {
	NGPU, NCPU, NPaged int64
	Pages              int64   // to be read
	SSDOffset          []int64 // pages of SSD s are SSDOffset[s] .. SSDOffset[s+1]-1
	Page, Place        cuda.DevicePtr

	lists                                       cuda.Buffer
	used                                        int64 // bytes of lists
	gpuPos, gpuSlot, cpuPos, cpuSlot, pos, slot cuda.DevicePtr
	next                                        []int64
	shape                                       packed.Shape
	rows                                        int64
}

// Close frees the lists.
func (a *Assembly) Close() error {
	b := a.lists
	*a = Assembly{}
	if b == nil {
		return nil
	}
	return b.Free()
}

// Assemble writes the lists of a mini-batch whose frontier has so many rows, and whose pages are
// striped over so many SSDs (page p is on SSD p mod ssds). The pages lie in the staging buffer one
// behind the other. a must not be in use by work under way.
func (c *Ranked) Assemble(a *Assembly, b *packed.Batch, shape packed.Shape, ssds int,
	rows int64) error {
	a.NGPU, a.NCPU, a.NPaged, a.Pages, a.rows = 0, 0, 0, 0, 0
	hot, paged := int64(len(b.HotPos)), int64(len(b.Pos))
	if int64(len(b.HotRank)) != hot || int64(len(b.Slot)) != paged || hot+paged != rows ||
		ssds < 1 || ssds > maxSSDs || shape.RowBytes != c.rowBytes || shape.RowsPerPage < 1 {
		return fmt.Errorf(
			"cache: a mini-batch of %d rows is laid out as %d hot and %d packed ones of %d bytes over %d SSDs",
			rows, hot, paged, shape.RowBytes, ssds)
	}
	if len(a.SSDOffset) != ssds+1 {
		a.SSDOffset, a.next = make([]int64, ssds+1), make([]int64, ssds)
	}
	pages := a.countPages(b.Runs)
	if pages != b.ReadPages || pages > math.MaxUint32/max(shape.RowsPerPage, 1) {
		return fmt.Errorf("cache: a mini-batch reads %d pages in runs of %d", b.ReadPages, pages)
	}
	if err := c.room(a, pages*12+(hot+paged)*8); err != nil {
		return err
	}
	a.Page, a.used = a.lists.Ptr(), pages*8
	a.deal(b.Runs, hostmem.View[int64](a.lists.Bytes()[:a.used]), a.list(&a.Place, pages))
	onGPU, err := c.dealHot(a, b)
	if err != nil {
		return err
	}
	copy(a.list(&a.pos, paged), b.Pos)
	copy(a.list(&a.slot, paged), b.Slot)
	a.NGPU, a.NCPU, a.NPaged, a.Pages = onGPU, hot-onGPU, paged, pages
	a.shape, a.rows = shape, rows
	return nil
}

// dealHot lists the rows of both tiers, and returns the number of those in the GPU's.
func (c *Ranked) dealHot(a *Assembly, b *packed.Batch) (onGPU int64, err error) {
	gpu, hot := uint32(len(c.place.GPU)), int64(len(b.HotRank))
	for _, r := range b.HotRank {
		if r < gpu {
			onGPU++
		}
	}
	gpuPos, gpuSlot := a.list(&a.gpuPos, onGPU), a.list(&a.gpuSlot, onGPU)
	cpuPos, cpuSlot := a.list(&a.cpuPos, hot-onGPU), a.list(&a.cpuSlot, hot-onGPU)
	i, k := 0, 0
	for j, r := range b.HotRank {
		if int(r) >= len(c.slot) {
			return 0, fmt.Errorf("cache: a mini-batch wants row %d of %d that stay in memory", r,
				len(c.slot))
		}
		if r < gpu {
			gpuPos[i], gpuSlot[i] = b.HotPos[j], c.slot[r]
			i++
		} else {
			cpuPos[k], cpuSlot[k] = b.HotPos[j], c.slot[r]
			k++
		}
	}
	return onGPU, nil
}

// countPages counts each SSD's pages in SSDOffset, and returns the sum.
func (a *Assembly) countPages(runs []packed.Run) (pages int64) {
	clear(a.SSDOffset)
	ssds := int64(len(a.next))
	for _, r := range runs {
		for p := r.Page; p < r.Page+r.Pages; p++ {
			a.SSDOffset[p%ssds+1]++
		}
		pages += r.Pages
	}
	for s := range ssds {
		a.SSDOffset[s+1] += a.SSDOffset[s]
		a.next[s] = a.SSDOffset[s]
	}
	return pages
}

// deal lists the pages of each SSD, and their places in the staging buffer.
func (a *Assembly) deal(runs []packed.Run, pages []int64, places []uint32) {
	ssds, place := int64(len(a.next)), uint32(0)
	for _, r := range runs {
		for p := r.Page; p < r.Page+r.Pages; p++ {
			k := &a.next[p%ssds]
			pages[*k], places[*k] = p, place
			*k++
			place++
		}
	}
}

// list takes the next part of the lists.
func (a *Assembly) list(to *cuda.DevicePtr, n int64) []uint32 {
	from := a.used
	a.used += n * 4
	*to = a.lists.Ptr() + cuda.DevicePtr(from)
	return hostmem.View[uint32](a.lists.Bytes()[from:a.used])
}

// room makes the lists of a hold so many bytes; what they held is lost.
func (c *Ranked) room(a *Assembly, bytes int64) error {
	if a.lists != nil && a.lists.Size() >= bytes {
		return nil
	}
	if old := a.lists; old != nil {
		a.lists = nil
		if err := old.Free(); err != nil {
			return fmt.Errorf("cache: %w", err)
		}
	}
	var err error
	if a.lists, err = c.dev.Alloc(cuda.MemPinned, bytes+bytes/8+4096,
		"packed batch"); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}

// GatherHot enqueues the copy of the rows that are in the tiers to dst: the row of position i goes
// to dst + i×stride.
func (c *Ranked) GatherHot(st cuda.Stream, a *Assembly, dst cuda.DevicePtr, stride int64) error {
	if a.NGPU+a.NCPU == 0 {
		return nil
	}
	if c.gpu == nil {
		return errors.New("cache: gather from tiers without memory")
	}
	return launchGather(c.dev, c.gather, st, gatherParams{
		GPURows: c.gpu.Ptr(), CPURows: c.cpu.Ptr(), GPUPos: a.gpuPos, GPUSlot: a.gpuSlot,
		CPUPos: a.cpuPos, CPUSlot: a.cpuSlot, Dst: dst, NGPU: a.NGPU, NCPU: a.NCPU,
		GPUTotal: int64(len(c.place.GPU)), CPUTotal: int64(len(c.place.CPU)), DstRows: a.rows,
		RowBytes: c.rowBytes, Stride: stride,
		GPUPerLine: 1, GPULine: c.rowBytes, GPUStride: c.rowBytes,
	})
}

// GatherPages enqueues the copy of the rows that were read, from the staging buffer to dst.
func (c *Ranked) GatherPages(st cuda.Stream, a *Assembly, staging, dst cuda.DevicePtr,
	stride int64) error {
	if a.NPaged == 0 {
		return nil
	}
	return launchGather(c.dev, c.gather, st, gatherParams{
		GPURows: staging, GPUPos: a.pos, GPUSlot: a.slot, NGPU: a.NPaged,
		GPUTotal: a.Pages * a.shape.RowsPerPage, GPUPerLine: a.shape.RowsPerPage,
		GPULine: a.shape.PageBytes, GPUStride: c.rowBytes,
		CPURows: staging, CPUPos: a.pos, CPUSlot: a.slot, // of none
		Dst: dst, DstRows: a.rows, RowBytes: c.rowBytes, Stride: stride,
	})
}
