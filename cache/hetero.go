package cache

import (
	"context"
	"errors"
	"fmt"
	"math"

	"helios/cuda"
	"helios/internal/hostmem"
)

const threads = 256 // of a block on a GPU

// Hetero is the static cache over GPU and CPU memory. Its methods may be called from several
// goroutines; what a lookup and a gather write belongs to their Buckets and their destination.
type Hetero struct {
	dev      cuda.Device
	index    *Index
	rowBytes int64
	ssds     int
	place    Placement
	gpu, cpu cuda.Buffer
	lookup   cuda.Kernel
	gather   cuda.Kernel
	spans    *Spans // whose index it is, over buffers of others; nil: all is its own
}

// NewHetero allocates the tiers of a placement (the GPU tier in device memory, the CPU tier in
// pinned memory that the device reads in place) and their index. The tiers hold zeros until the
// caller fills them: slot i of a tier is for row TierRows(t)[i]. ssds is over how many SSDs
// misses are striped (row r is on SSD r mod ssds), 1 to 256; 0 counts as one.
func NewHetero(dev cuda.Device, rows, rowBytes int64, ssds int, p Placement) (*Hetero, error) {
	h, err := openHetero(dev, rows, rowBytes, ssds)
	if err != nil {
		return nil, err
	}
	h.place = p
	// The index checks the placement, so it comes before the memory for its rows.
	if h.index, err = BuildIndex(dev, rows, p); err != nil {
		return nil, err
	}
	if h.gpu, err = dev.Alloc(cuda.MemDevice, int64(len(p.GPU))*rowBytes, "gpu cache"); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: %w", err), h.Close())
	}
	if h.cpu, err = dev.Alloc(cuda.MemPinned, int64(len(p.CPU))*rowBytes, "cpu cache"); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: %w", err), h.Close())
	}
	return h, nil
}

func openHetero(dev cuda.Device, rows, rowBytes int64, ssds int) (*Hetero, error) {
	if rowBytes < 1 || ssds < 0 || ssds > maxSSDs {
		return nil,
			fmt.Errorf("cache: rows of %d bytes over %d SSDs: want 1 byte or more over at most %d",
				rowBytes, ssds, maxSSDs)
	}
	if rows > math.MaxInt64/rowBytes {
		return nil, fmt.Errorf("cache: %d rows of %d bytes", rows, rowBytes)
	}
	h := &Hetero{dev: dev, rowBytes: rowBytes, ssds: max(ssds, 1)}
	var err error
	if h.lookup, err = dev.Kernel("lookup"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if h.gather, err = dev.Kernel("gather"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return h, nil
}

// NewLookup is a cache of tiers without memory over an index, which it takes over: it looks rows
// up, over so many SSDs, and has nothing to gather.
func NewLookup(dev cuda.Device, i *Index, ssds int) (*Hetero, error) {
	h, err := openHetero(dev, i.rows, 1, ssds)
	if err != nil {
		return nil, err
	}
	h.index = i
	return h, nil
}

// Close frees tiers and index. No lookup or gather may be under way.
func (h *Hetero) Close() error {
	if h.spans != nil {
		return nil
	}
	var errs []error
	for _, b := range []cuda.Buffer{h.gpu, h.cpu} {
		if b != nil {
			errs = append(errs, b.Free())
		}
	}
	return errors.Join(append(errs, h.index.Close())...)
}

// Placement has the rows of the tiers. The caller must not change it.
func (h *Hetero) Placement() Placement { return h.place }

// TierBuffer is the memory of the GPU or the CPU tier, rows in slot order without gaps; nil for
// SSD and with NewLookup.
func (h *Hetero) TierBuffer(t Tier) cuda.Buffer {
	switch t {
	case GPU:
		return h.gpu
	case CPU:
		return h.cpu
	}
	return nil
}

// TierRows is the rows of a tier in slot order; nil for SSD and with NewLookup. The caller must not
// change it.
func (h *Hetero) TierRows(t Tier) []int64 {
	switch t {
	case GPU:
		return h.place.GPU
	case CPU:
		return h.place.CPU
	}
	return nil
}

// Buckets is a lookup's answer: requested positions sorted by where their rows are, in ascending
// order of position within the GPU hits, the CPU hits, and the misses of each SSD.
type Buckets struct {
	GPUPos, GPUSlot cuda.Buffer // uint32[NGPU]: position, slot in the GPU tier
	CPUPos, CPUSlot cuda.Buffer // uint32[NCPU]
	MissPos         cuda.Buffer // uint32[NMiss], grouped by SSD
	MissRow         cuda.Buffer // int64[NMiss]

	NGPU, NCPU, NMiss int64
	SSDOffset         []int64 // misses of SSD s are SSDOffset[s] .. SSDOffset[s+1]-1

	dev      cuda.Device
	capacity int64
	code     cuda.Buffer // scratch of the lookup
	counts   cuda.Buffer
	totals   cuda.Buffer // pinned: read by the CPU
	total    []int64
	dstRows  int64 // highest position + 1
}

// NewBuckets makes empty buckets for this cache. Their memory grows with the largest lookup;
// Reserve gets it at once.
func (h *Hetero) NewBuckets() (*Buckets, error) {
	b := &Buckets{dev: h.dev, SSDOffset: make([]int64, h.ssds+1)}
	n := int64(bucketMiss + h.ssds)
	var err error
	if b.totals, err = h.dev.Alloc(cuda.MemPinned, n*8, "cache lookup"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	b.total = hostmem.View[int64](b.totals.Bytes())
	if b.counts, err = h.dev.Alloc(cuda.MemDevice, n*4*maxGrid(h.dev), "cache lookup"); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: %w", err), b.totals.Free())
	}
	if err := b.Reserve(2048); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// Reserve makes room for lookups of count positions. The content of the buckets is lost when they
// have to grow, and nothing on the device may be using them.
func (b *Buckets) Reserve(count int64) error {
	if count <= b.capacity {
		return nil
	}
	b.clear()
	b.capacity = 0
	count += count / 8 // a little more, as mini-batches differ
	parts := []struct {
		buf  *cuda.Buffer
		size int64
	}{{&b.GPUPos, 4}, {&b.GPUSlot, 4}, {&b.CPUPos, 4}, {&b.CPUSlot, 4}, {&b.MissPos, 4},
		{&b.MissRow, 8}, {&b.code, 8}}
	for _, p := range parts {
		if *p.buf != nil {
			if err := (*p.buf).Free(); err != nil {
				return fmt.Errorf("cache: %w", err)
			}
			*p.buf = nil
		}
	}
	for _, p := range parts {
		buf, err := b.dev.Alloc(cuda.MemDevice, count*p.size, "cache lookup")
		if err != nil {
			return fmt.Errorf("cache: buckets of %d rows: %w", count, err)
		}
		*p.buf = buf
	}
	b.capacity = count
	return nil
}

func (b *Buckets) clear() {
	b.NGPU, b.NCPU, b.NMiss, b.dstRows = 0, 0, 0, 0
	clear(b.SSDOffset)
}

// Close frees the buckets.
func (b *Buckets) Close() error {
	b.clear()
	b.capacity = 0
	var errs []error
	for _, p := range []cuda.Buffer{b.GPUPos, b.GPUSlot, b.CPUPos, b.CPUSlot, b.MissPos, b.MissRow,
		b.code, b.counts, b.totals} {
		if p != nil {
			errs = append(errs, p.Free())
		}
	}
	return errors.Join(errs...)
}

// rowsPerBlock returns how many positions make another block worth its launch: on the host device
// enough to pay for the call, on a GPU two for each thread, as the SMs are many and a start is
// cheap.
func rowsPerBlock(dev cuda.Device) int64 {
	usual := int64(2 * threads)
	if dev.Info().Backend == "host" {
		usual = 2048
	}
	return grain(dev, usual)
}

// grain lets a device have a mind of its own about the work that makes a block.
func grain(dev cuda.Device, usual int64) int64 {
	if g, ok := dev.(interface{ Grain(usual int64) int64 }); ok {
		return max(g.Grain(usual), 1)
	}
	return usual
}

// maxGrid keeps a few blocks for each SM, so that those of other streams find a slot between
// them.
func maxGrid(dev cuda.Device) int64 { return 4 * int64(dev.Info().SMs) }

func (h *Hetero) grid(count int64) int {
	return int(min(max(count/rowsPerBlock(h.dev), 1), maxGrid(h.dev)))
}

// Lookup sorts positions first..first+count-1 of nodes (int64 row numbers in device memory,
// indexed by position) into b and waits for it, no longer than ctx. The result does not depend
// on the number of workers. b must not be in use by work under way; after an error it is empty.
func (h *Hetero) Lookup(ctx context.Context, st cuda.Stream, nodes cuda.DevicePtr, first,
	count int64, b *Buckets) error {
	b.clear()
	if first < 0 || count < 0 || first+count > math.MaxUint32 {
		return fmt.Errorf("cache: lookup of %d positions from %d: want positions below 2^32",
			count, first)
	}
	if count == 0 {
		return nil
	}
	if len(b.SSDOffset) != h.ssds+1 || b.dev != h.dev {
		return errors.New("cache: lookup into the buckets of another cache")
	}
	if err := b.Reserve(count); err != nil {
		return err
	}
	grid := h.grid(count)
	p := lookupParams{
		Nodes: nodes, Lines: h.index.buf.Ptr(), Code: b.code.Ptr(), Counts: b.counts.Ptr(),
		Totals: b.totals.Ptr(),
		GPUPos: b.GPUPos.Ptr(), GPUSlot: b.GPUSlot.Ptr(), CPUPos: b.CPUPos.Ptr(),
		CPUSlot: b.CPUSlot.Ptr(),
		MissPos: b.MissPos.Ptr(), MissRow: b.MissRow.Ptr(),
		Rows: h.index.rows, First: first, Count: count, Grid: uint32(grid), SSDs: uint32(h.ssds),
	}
	passes := []struct {
		phases uint32
		blocks int
	}{{phaseCount, grid}, {phasePrefix, 1}, {phaseScatter, grid}}
	if grid == 1 { // one block needs its own counts only
		passes = passes[:1]
		passes[0].phases = phaseCount | phasePrefix | phaseScatter
	}
	for _, pass := range passes {
		p.Phases = pass.phases
		if err := cuda.Launch(st, h.lookup, cuda.LaunchConfig{Blocks: pass.blocks,
			Threads: threads}, p); err != nil {
			return fmt.Errorf("cache: %w", err)
		}
	}
	if err := st.Synchronize(ctx); err != nil {
		return fmt.Errorf("cache: lookup of %d rows: %w", count, err)
	}
	b.NGPU, b.NCPU = b.total[bucketGPU], b.total[bucketCPU]
	for s, n := range b.total[bucketMiss:] {
		b.NMiss += n
		b.SSDOffset[s+1] = b.NMiss
	}
	b.dstRows = first + count
	return nil
}

// Gather enqueues the copy of all hits in b to dst: the row of position i goes to dst +
// i×dstStride. dst must have room up to the lookup's last position. b must stay as it is until
// the copy is done.
func (h *Hetero) Gather(st cuda.Stream, b *Buckets, dst cuda.DevicePtr, dstStride int64) error {
	if dstStride < h.rowBytes || b.dstRows > math.MaxInt64/dstStride {
		return fmt.Errorf("cache: gather of rows of %d bytes with a stride of %d", h.rowBytes,
			dstStride)
	}
	if b.NGPU+b.NCPU == 0 {
		return nil
	}
	if h.gpu == nil {
		return errors.New("cache: gather from tiers without memory")
	}
	gpu, cpu := int64(len(h.place.GPU)), int64(len(h.place.CPU))
	if h.spans != nil {
		gpu, cpu = h.spans.first, h.spans.rows-h.spans.first
	}
	p := gatherParams{
		GPURows: h.gpu.Ptr(), CPURows: h.cpu.Ptr(),
		GPUPos: b.GPUPos.Ptr(), GPUSlot: b.GPUSlot.Ptr(), CPUPos: b.CPUPos.Ptr(),
		CPUSlot: b.CPUSlot.Ptr(),
		Dst:     dst, NGPU: b.NGPU, NCPU: b.NCPU, GPUTotal: gpu, CPUTotal: cpu,
		DstRows: b.dstRows, RowBytes: h.rowBytes, Stride: dstStride,
		GPUPerLine: 1, GPULine: h.rowBytes, GPUStride: h.rowBytes,
	}
	return launchGather(h.dev, h.gather, st, p)
}

// launchGather enqueues a gather with a grid that suits it.
func launchGather(dev cuda.Device, k cuda.Kernel, st cuda.Stream, p gatherParams) error {
	// A block for each 64 KiB: enough to pay for its start. On a GPU 16 KiB, which its 8 warps
	// have in flight at one time.
	share := int64(16 << 10)
	if dev.Info().Backend == "host" {
		share = 64 << 10
	}
	blocks := min(max((p.NGPU+p.NCPU)*p.RowBytes/grain(dev, share), 1), maxGrid(dev))
	if err := cuda.Launch(st, k, cuda.LaunchConfig{Blocks: int(blocks), Threads: threads},
		p); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}

// Hotness counts how often each row is met.
type Hotness struct {
	dev      cuda.Device
	count    cuda.Kernel
	rank     cuda.Kernel
	perBlock int64 // rows that make another block worth its launch
	blocks   int64 // at most
	rows     int64
	counts   cuda.Buffer
}

// NewHotness starts counts of zero for so many rows: 4 bytes a row of device memory, or of pinned
// memory where that does not fit. Presampling comes before the tiers, so they do not compete for
// it.
func NewHotness(dev cuda.Device, rows int64) (*Hotness, error) {
	if rows < 0 || rows > math.MaxInt64/4 {
		return nil, fmt.Errorf("cache: hotness of %d rows", rows)
	}
	h := &Hotness{dev: dev, perBlock: rowsPerBlock(dev), blocks: 4 * int64(dev.Info().SMs),
		rows: rows}
	var err error
	if h.count, err = dev.Kernel("hotness"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if h.rank, err = dev.Kernel("hotness_rank"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	h.counts, err = dev.Alloc(cuda.MemDevice, rows*4, "hotness")
	var full *cuda.OutOfMemoryError
	if errors.As(err, &full) {
		h.counts, err = dev.Alloc(cuda.MemPinned, rows*4, "hotness")
	}
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	return h, nil
}

// Add enqueues one more count for each of the n rows at nodes (int64 in device memory).
func (h *Hotness) Add(st cuda.Stream, nodes cuda.DevicePtr, n int64) error {
	if n < 0 {
		return fmt.Errorf("cache: hotness of %d rows", n)
	}
	if n == 0 {
		return nil
	}
	blocks := min(max(n/h.perBlock, 1), h.blocks)
	p := hotnessParams{Nodes: nodes, Counts: h.counts.Ptr(), N: n, Rows: h.rows}
	if err := cuda.Launch(st, h.count, cuda.LaunchConfig{Blocks: int(blocks), Threads: threads},
		p); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}

// Counts copies the counts by row to the CPU, after the work of st so far and no longer than ctx.
func (h *Hotness) Counts(ctx context.Context, st cuda.Stream) ([]uint32, error) {
	counts := make([]uint32, h.rows)
	if h.rows == 0 {
		return counts, nil
	}
	stage, err := h.dev.Alloc(cuda.MemPinned, h.rows*4, "hotness")
	if err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if err = st.Copy(stage.Ptr(), h.counts.Ptr(), h.rows*4); err == nil {
		err = st.Synchronize(ctx)
	}
	if err == nil {
		copy(counts, hostmem.View[uint32](stage.Bytes()))
	}
	if err = errors.Join(err, stage.Free()); err != nil {
		return nil, fmt.Errorf("cache: hotness of %d rows: %w", h.rows, err)
	}
	return counts, nil
}

// DeviceBytes returns the device memory that the counts hold.
func (h *Hotness) DeviceBytes() int64 {
	if h.counts == nil || h.counts.Kind() != cuda.MemDevice {
		return 0
	}
	return h.counts.Size()
}

// Close frees the counts.
func (h *Hotness) Close() error { return h.counts.Free() }
