package cache

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/simd"
)

// maxSSDs bounds the miss buckets: a block counts them in its own memory.
const maxSSDs = 256

// Buckets of a lookup: GPU hits, CPU hits, then misses by SSD.
const (
	bucketGPU  = 0
	bucketCPU  = 1
	bucketMiss = 2
)

const (
	phaseCount   = 1 // each block: find its rows, count them by bucket
	phasePrefix  = 2 // one block: from counts to places
	phaseScatter = 4 // each block: write its rows to their places
)

// lookupParams are the parameters of the kernel "lookup".
//
// Positions First..First+Count-1 of Nodes are cut into contiguous shares, one for each of Grid
// blocks. The first pass finds each row with one read of its 64-byte index line, notes the
// answer in Code, and counts by bucket. The second pass, by one block, turns the counts into
// the places where each block's part of each bucket starts, in block order. The third pass
// writes the buckets. So a bucket holds its positions in ascending order whatever the grid is
// and in whatever order the blocks run: no atomics, no sort.
//
// Bytes moved per position: 8 (row) + 64 (line, random) + 2×8 (code) + 8 or 12 (entry).
type lookupParams struct {
	Nodes  cuda.DevicePtr // int64, indexed by position
	Lines  cuda.DevicePtr // line[]
	Code   cuda.DevicePtr // uint64[Count]: tier<<62 | slot, or the SSD
	Counts cuda.DevicePtr // uint32[Grid][2+SSDs]: counts, then places
	Totals cuda.DevicePtr // int64[2+SSDs]
	GPUPos, GPUSlot,
	CPUPos, CPUSlot, // uint32[Count] each
	MissPos, // uint32[Count]
	MissRow cuda.DevicePtr // int64[Count]
	Rows, First, Count int64
	Grid, SSDs         uint32
	Phases             uint32
	_                  uint32
}

// gatherParams are the parameters of the kernel "gather": row GPUSlot[i] of GPURows goes to row
// GPUPos[i] of Dst, likewise for the CPU tier. Rows are RowBytes long and Stride apart in Dst. In
// the CPU tier they are adjacent; in the GPU tier, which may be one of lines, row k is row k mod
// GPUPerLine of line k div GPUPerLine: lines are GPULine bytes apart, a line's rows GPUStride. A
// tier of rows has GPUPerLine 1 and GPULine RowBytes. Memory bound: 2×RowBytes + 8 bytes moved per
// row.
type gatherParams struct {
	GPURows, CPURows cuda.DevicePtr
	GPUPos, GPUSlot,
	CPUPos, CPUSlot cuda.DevicePtr // uint32[NGPU], uint32[NCPU]
	Dst                cuda.DevicePtr
	NGPU, NCPU         int64
	GPUTotal, CPUTotal int64 // rows of the tiers
	DstRows            int64
	RowBytes, Stride   int64
	GPUPerLine         int64
	GPULine, GPUStride int64
}

// hotnessParams are the parameters of the kernel "hotness": Counts[Nodes[i]]++ for N nodes.
type hotnessParams struct {
	Nodes, Counts cuda.DevicePtr // int64[N], uint32[Rows]
	N, Rows       int64
}

// CUDA kernels get the same bytes.
const (
	_ = -(unsafe.Sizeof(lookupParams{}) ^ 128)
	_ = -(unsafe.Offsetof(lookupParams{}.MissRow) ^ 80)
	_ = -(unsafe.Offsetof(lookupParams{}.Rows) ^ 88)
	_ = -(unsafe.Offsetof(lookupParams{}.Phases) ^ 120)
	_ = -(unsafe.Sizeof(gatherParams{}) ^ 136)
	_ = -(unsafe.Offsetof(gatherParams{}.NGPU) ^ 56)
	_ = -(unsafe.Offsetof(gatherParams{}.Stride) ^ 104)
	_ = -(unsafe.Sizeof(hotnessParams{}) ^ 32)
)

const codeTier = 62 // where Code keeps the tier

func init() {
	cuda.RegisterHost("lookup", lookupKernel)
	cuda.RegisterHost("gather", gatherKernel)
	cuda.RegisterHost("hotness", hotnessKernel)
	cuda.RegisterHost("hotness_rank", hotnessRank)
}

func lookupKernel(b *cuda.Block, p *lookupParams) error {
	if p.Phases&phaseCount != 0 {
		if _, err := lookupCount(b, p); err != nil {
			return err
		}
	}
	if p.Phases&phasePrefix != 0 {
		lookupPrefix(p)
	}
	if p.Phases&phaseScatter != 0 {
		lookupScatter(b, p)
	}
	return nil
}

// byLine divides rows by those of an index line.
var byLine = simd.DivisorOf(RowsPerLine)

// linesAhead is the number of rows whose lines are prefetched before the first is read, above
// Generic.
const linesAhead = 32

// lookupCount asks for lines long before it needs them: by prefetches, or at Generic in groups as
// gatherTier does. Without that a mispredicted tier would hold the next row's cache miss up.
func lookupCount(b *cuda.Block, p *lookupParams) (touched uint64, err error) {
	lo, hi := b.Range(p.Count)
	nodes := cuda.View[int64](p.Nodes, p.First+p.Count)[p.First:]
	code := cuda.View[uint64](p.Code, p.Count)
	numLines := (p.Rows + RowsPerLine - 1) / RowsPerLine
	lines, mem := cuda.View[line](p.Lines, numLines), cuda.View[byte](p.Lines, numLines*lineBytes)
	rows, ssds := uint64(p.Rows), uint64(p.SSDs)
	var count [bucketMiss + maxSSDs]uint32
	nodes, code = nodes[lo:hi], code[lo:hi]
	level := b.SIMD()
	level.PrefetchParts(mem, nodes[:min(linesAhead, len(nodes))], byLine)
	for first := 0; first < len(nodes); first += touchAhead {
		group := nodes[first:min(first+touchAhead, len(nodes))]
		for i, node := range group {
			if uint64(node) >= rows {
				return 0, fmt.Errorf("lookup: row %d at position %d: the dataset has rows 0 to %d",
					node, p.First+lo+int64(first+i), p.Rows-1)
			}
			if level == simd.Generic {
				touched |= lines[uint64(node)/RowsPerLine].code[0]
			}
		}
		if far := first + linesAhead; far < len(nodes) {
			level.PrefetchParts(mem, nodes[far:min(far+touchAhead, len(nodes))], byLine)
		}
		for i, node := range group {
			row := uint64(node)
			t, slot := lines[row/RowsPerLine].find(row % RowsPerLine)
			if t == SSD {
				slot = row % ssds
				count[bucketMiss+slot]++
			} else {
				count[t-GPU]++
			}
			code[first+i] = uint64(t)<<codeTier | slot
		}
	}
	n := int64(bucketMiss + p.SSDs)
	copy(cuda.View[uint32](p.Counts, n*int64(p.Grid))[int64(b.Index)*n:], count[:n])
	return touched, nil
}

func lookupPrefix(p *lookupParams) {
	n := int(bucketMiss + p.SSDs)
	counts := cuda.View[uint32](p.Counts, int64(n)*int64(p.Grid))
	totals := cuda.View[int64](p.Totals, int64(n))
	place := uint32(0)
	for bucket := range n {
		if bucket <= bucketMiss { // the misses of all SSDs share one array
			place = 0
		}
		start := place
		for i := bucket; i < len(counts); i += n {
			c := counts[i]
			counts[i] = place
			place += c
		}
		totals[bucket] = int64(place - start)
	}
}

func lookupScatter(b *cuda.Block, p *lookupParams) {
	lo, hi := b.Range(p.Count)
	n := int64(bucketMiss + p.SSDs)
	nodes := cuda.View[int64](p.Nodes, p.First+p.Count)[p.First:]
	code := cuda.View[uint64](p.Code, p.Count)
	var place [bucketMiss + maxSSDs]uint32
	copy(place[:n], cuda.View[uint32](p.Counts, n*int64(p.Grid))[int64(b.Index)*n:])
	gpuPos, gpuSlot := cuda.View[uint32](p.GPUPos, p.Count), cuda.View[uint32](p.GPUSlot, p.Count)
	cpuPos, cpuSlot := cuda.View[uint32](p.CPUPos, p.Count), cuda.View[uint32](p.CPUSlot, p.Count)
	missPos, missRow := cuda.View[uint32](p.MissPos, p.Count), cuda.View[int64](p.MissRow, p.Count)
	nodes, code = nodes[lo:hi], code[lo:hi]
	pos := uint32(p.First + lo)
	for i, c := range code {
		switch slot := uint32(c); Tier(c >> codeTier) {
		case GPU:
			next := place[bucketGPU]
			place[bucketGPU]++
			gpuPos[next], gpuSlot[next] = pos, slot
		case CPU:
			next := place[bucketCPU]
			place[bucketCPU]++
			cpuPos[next], cpuSlot[next] = pos, slot
		default:
			next := place[bucketMiss+slot]
			place[bucketMiss+slot]++
			missPos[next], missRow[next] = pos, nodes[i]
		}
		pos++
	}
}

func gatherKernel(b *cuda.Block, p *gatherParams) error {
	lo, hi := b.Range(p.NGPU + p.NCPU)
	dst := cuda.View[byte](p.Dst, (p.DstRows-1)*p.Stride+p.RowBytes)
	level := simd.Generic
	if p.around() {
		level = b.SIMD()
	}
	defer level.StoreFence()
	if first, end := lo, min(hi, p.NGPU); first < end {
		pos := cuda.View[uint32](p.GPUPos, end)[first:]
		slot := cuda.View[uint32](p.GPUSlot, end)[first:]
		var err error
		if p.GPUPerLine == 1 && p.GPULine == p.RowBytes {
			_, err = gatherTier(level, dst, cuda.View[byte](p.GPURows, p.GPUTotal*p.RowBytes),
				p.GPUTotal, pos, slot, first, p)
		} else {
			_, err = gatherLines(dst, pos, slot, first, p)
		}
		if err != nil {
			return err
		}
	}
	if first, end := max(lo-p.NGPU, 0), hi-p.NGPU; first < end {
		_, err := gatherTier(level, dst, cuda.View[byte](p.CPURows, p.CPUTotal*p.RowBytes),
			p.CPUTotal,
			cuda.View[uint32](p.CPUPos, end)[first:], cuda.View[uint32](p.CPUSlot, end)[first:],
			p.NGPU+first, p)
		return err
	}
	return nil
}

// around reports whether rows are stored around the caches. The destination so far decides that: a
// mini-batch comes hop by hop, and one call may bring little of it.
func (p *gatherParams) around() bool {
	return p.DstRows*p.RowBytes >= streamBytes && (p.RowBytes|p.Stride|int64(p.Dst))%64 == 0
}

// streamBytes is the size of a destination whose rows the caches would not keep until they are
// trained on. Stored around the caches, rows need not be read before they are written. Tests change
// it.
var streamBytes int64 = 4 << 20

// touchAhead is the number of random accesses that a kernel starts before it needs the first:
// enough to keep the memory busy, few enough to stay in the first-level cache.
const touchAhead = 16

// gatherTier copies rows in groups: first a load from each row of the group, which do not
// depend on one another and so miss the cache and the TLB together, then the copies. The first
// line is enough (measured from 128 to 4096 bytes): the rest follows it in order. hit is the
// number of the first one. Above Generic level copies, which prefetches the next group itself.
func gatherTier(level simd.Level, dst, rows []byte, total int64, pos, slot []uint32, hit int64,
	p *gatherParams) (touched byte, err error) {
	for len(pos) > 0 {
		n := min(touchAhead, len(pos))
		for i, s := range slot[:n] {
			if int64(s) >= total {
				return 0, fmt.Errorf("gather: slot %d of hit %d: the tier has %d rows", s,
					hit+int64(i), total)
			}
			if level == simd.Generic {
				touched |= rows[int64(s)*p.RowBytes]
			}
		}
		for i, row := range pos[:n] {
			if int64(row) >= p.DstRows {
				return 0, fmt.Errorf("gather: position %d of hit %d: the tensor has %d rows", row,
					hit+int64(i), p.DstRows)
			}
		}
		if !level.CopyRows(dst, rows, pos, slot, n, int(p.RowBytes), int(p.Stride)) {
			for i, row := range pos[:n] {
				d, s := int64(row)*p.Stride, int64(slot[i])*p.RowBytes
				copy(dst[d:d+p.RowBytes], rows[s:s+p.RowBytes])
			}
		}
		pos, slot = pos[n:], slot[n:]
		hit += int64(n)
	}
	return touched, nil
}

// gatherLines is gatherTier for a GPU tier of lines.
func gatherLines(dst []byte, pos, slot []uint32, hit int64, p *gatherParams) (touched byte,
	err error) {
	if p.GPUPerLine < 1 || p.GPUTotal%p.GPUPerLine != 0 {
		return 0, fmt.Errorf("gather: a tier of %d rows in lines of %d", p.GPUTotal, p.GPUPerLine)
	}
	if len(pos) == 0 {
		return 0, nil
	}
	if p.GPUTotal == 0 {
		return 0, fmt.Errorf("gather: slot %d of hit %d: the tier has 0 rows", slot[0], hit)
	}
	rows := cuda.View[byte](p.GPURows, (p.GPUTotal/p.GPUPerLine-1)*p.GPULine+
		(p.GPUPerLine-1)*p.GPUStride+p.RowBytes)
	per, one := uint32(p.GPUPerLine), p.GPUPerLine == 1
	var from [touchAhead]int64
	for len(pos) > 0 {
		n := min(touchAhead, len(pos))
		for i, s := range slot[:n] {
			if int64(s) >= p.GPUTotal {
				return 0, fmt.Errorf("gather: slot %d of hit %d: the tier has %d rows", s,
					hit+int64(i), p.GPUTotal)
			}
			if one {
				from[i] = int64(s) * p.GPULine
			} else {
				from[i] = int64(s/per)*p.GPULine + int64(s%per)*p.GPUStride
			}
			touched |= rows[from[i]]
		}
		for i, row := range pos[:n] {
			if int64(row) >= p.DstRows {
				return 0, fmt.Errorf("gather: position %d of hit %d: the tensor has %d rows", row,
					hit+int64(i), p.DstRows)
			}
			copy(dst[int64(row)*p.Stride:][:p.RowBytes], rows[from[i]:][:p.RowBytes])
		}
		pos, slot = pos[n:], slot[n:]
		hit += int64(n)
	}
	return touched, nil
}

func hotnessKernel(b *cuda.Block, p *hotnessParams) error {
	lo, hi := b.Range(p.N)
	counts := cuda.View[uint32](p.Counts, p.Rows)
	for i, node := range cuda.View[int64](p.Nodes, p.N)[lo:hi] {
		if uint64(node) >= uint64(p.Rows) {
			return fmt.Errorf("hotness: row %d at position %d: the dataset has rows 0 to %d", node,
				lo+int64(i), p.Rows-1)
		}
		atomic.AddUint32(&counts[node], 1)
	}
	return nil
}
