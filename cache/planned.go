package cache

import (
	"errors"
	"fmt"
	"math"

	"helios/cache/superbatch"
	"helios/cuda"
	"helios/internal/hostmem"
)

// Planned is a cache over GPU and CPU memory whose changes are known beforehand: package superbatch
// says for each access where the row is, and which rows of a mini-batch enter when it is gathered.
// Nothing is looked up while the mini-batches train, so there is no index. Slots below GPUSlots are
// the GPU tier's, the others the CPU tier's.
type Planned struct {
	c        PlannedConfig
	dev      cuda.Device
	gpu, cpu cuda.Buffer
	gather   cuda.Kernel
}

// PlannedConfig is the shape of a Planned cache.
type PlannedConfig struct {
	RowBytes           int64
	SSDs               int // rows that are not cached are striped over these
	GPUSlots, CPUSlots int64
	CPUBytes           int64 // the least memory of the CPU tier, where it serves others too
}

// NewPlanned allocates the tiers: the GPU tier in device memory, the CPU tier in pinned memory that
// the device reads and writes in place.
func NewPlanned(dev cuda.Device, c PlannedConfig) (*Planned, error) {
	if c.RowBytes < 1 || c.SSDs < 1 || c.SSDs > maxSSDs || c.GPUSlots < 0 || c.CPUSlots < 0 ||
		c.GPUSlots+c.CPUSlots >= math.MaxInt32 ||
		c.GPUSlots+c.CPUSlots > math.MaxInt64/c.RowBytes {
		return nil, fmt.Errorf(
			"cache: %d and %d slots of %d bytes over %d SSDs: want fewer than 2^31 slots over 1 to %d SSDs",
			c.GPUSlots, c.CPUSlots, c.RowBytes, c.SSDs, maxSSDs)
	}
	p := &Planned{c: c, dev: dev}
	var err error
	if p.gather, err = dev.Kernel("gather"); err != nil {
		return nil, fmt.Errorf("cache: %w", err)
	}
	if p.gpu, err = dev.Alloc(cuda.MemDevice, c.GPUSlots*c.RowBytes, "gpu cache"); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: %w", err), p.Close())
	}
	if p.cpu, err = dev.Alloc(cuda.MemPinned, max(c.CPUSlots*c.RowBytes, c.CPUBytes),
		"cpu cache"); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: %w", err), p.Close())
	}
	return p, nil
}

// Close frees the tiers. Nothing may be under way.
func (p *Planned) Close() error {
	var all []error
	for _, b := range []cuda.Buffer{p.gpu, p.cpu} {
		if b != nil {
			all = append(all, b.Free())
		}
	}
	p.gpu, p.cpu = nil, nil
	return errors.Join(all...)
}

// Config is the cache's.
func (p *Planned) Config() PlannedConfig { return p.c }

// Buffer is the memory of the GPU or the CPU tier, slots without gaps.
func (p *Planned) Buffer(t Tier) cuda.Buffer {
	if t == GPU {
		return p.gpu
	}
	return p.cpu
}

// Places has the slots of a part of a frontier's rows, and the rows that enter. Kernels read its
// lists out of pinned memory, one after the other.
type Places struct {
	NGPU, NCPU, NMiss int64
	SSDOffset         []int64 // misses of SSD s are SSDOffset[s] .. SSDOffset[s+1]-1
	MissRow, MissPos  cuda.DevicePtr

	lists, changes                   cuda.Buffer
	gpuPos, gpuSlot, cpuPos, cpuSlot cuda.DevicePtr
	next                             []int64
	dstRows                          int64
	moves                            [3]pairs
}

// pairs are rows to copy from one place to another.
type pairs struct {
	from, to cuda.DevicePtr // uint32[n]
	n        int64
}

// Close frees the lists.
func (l *Places) Close() error {
	var all []error
	for _, b := range []cuda.Buffer{l.lists, l.changes} {
		if b != nil {
			all = append(all, b.Free())
		}
	}
	*l = Places{}
	return errors.Join(all...)
}

// room makes b hold so many bytes; what it held is lost.
func (p *Planned) room(b *cuda.Buffer, bytes int64) error {
	if *b != nil && (*b).Size() >= bytes {
		return nil
	}
	if *b != nil {
		old := *b
		*b = nil
		if err := old.Free(); err != nil {
			return fmt.Errorf("cache: %w", err)
		}
	}
	var err error
	if *b, err = p.dev.Alloc(cuda.MemPinned, bytes+bytes/8+4096, "cache places"); err != nil {
		return fmt.Errorf("cache: %w", err)
	}
	return nil
}

// Place sorts positions first and on by where their rows are: slots has the slot of each row,
// superbatch.Miss for none. Rows that are not cached are sorted by SSD. l must not be in use by
// work under way.
func (p *Planned) Place(l *Places, rows []int64, slots []int32, first int64) error {
	n := int64(len(rows))
	l.NGPU, l.NCPU, l.NMiss, l.dstRows = 0, 0, 0, 0
	ssds := int64(p.c.SSDs)
	if l.SSDOffset == nil {
		l.SSDOffset, l.next = make([]int64, ssds+1), make([]int64, ssds)
	}
	clear(l.SSDOffset)
	if n == 0 {
		return nil
	}
	if first < 0 || first+n > math.MaxUint32 || int64(len(slots)) != n {
		return fmt.Errorf("cache: %d places of %d positions from %d", len(slots), n, first)
	}
	const perRow = 8 + 5*4
	if err := p.room(&l.lists, n*perRow); err != nil {
		return err
	}
	mem, base := l.lists.Bytes(), l.lists.Ptr()
	offset := int64(0)
	take := func(bytes int64) ([]byte, cuda.DevicePtr) {
		from := offset
		offset += n * bytes
		return mem[from:offset], base + cuda.DevicePtr(from)
	}
	var b []byte
	b, l.MissRow = take(8)
	missRow := hostmem.View[int64](b)
	list := func(to *cuda.DevicePtr) []uint32 {
		var b []byte
		b, *to = take(4)
		return hostmem.View[uint32](b)
	}
	missPos, gpuPos, gpuSlot := list(&l.MissPos), list(&l.gpuPos), list(&l.gpuSlot)
	cpuPos, cpuSlot := list(&l.cpuPos), list(&l.cpuSlot)
	for i, slot := range slots {
		switch s := int64(slot); {
		case s < 0:
			l.SSDOffset[rows[i]%ssds+1]++
			l.NMiss++
		case s < p.c.GPUSlots:
			gpuPos[l.NGPU], gpuSlot[l.NGPU] = uint32(first)+uint32(i), uint32(s)
			l.NGPU++
		default:
			cpuPos[l.NCPU], cpuSlot[l.NCPU] = uint32(first)+uint32(i), uint32(s-p.c.GPUSlots)
			l.NCPU++
		}
	}
	for s := range ssds {
		l.SSDOffset[s+1] += l.SSDOffset[s]
		l.next[s] = l.SSDOffset[s]
	}
	for i, slot := range slots {
		if slot < 0 {
			k := &l.next[rows[i]%ssds]
			missRow[*k], missPos[*k] = rows[i], uint32(first)+uint32(i)
			*k++
		}
	}
	l.dstRows = first + n
	return nil
}

// Gather enqueues the copy of what Place has found cached to dst: the row of position i goes to dst
// + i×stride.
func (p *Planned) Gather(st cuda.Stream, l *Places, dst cuda.DevicePtr, stride int64) error {
	if l.NGPU+l.NCPU == 0 {
		return nil
	}
	return launchGather(p.dev, p.gather, st, gatherParams{
		GPURows: p.gpu.Ptr(), CPURows: p.cpu.Ptr(), GPUPos: l.gpuPos, GPUSlot: l.gpuSlot,
		CPUPos: l.cpuPos, CPUSlot: l.cpuSlot, Dst: dst, NGPU: l.NGPU, NCPU: l.NCPU,
		GPUTotal: p.c.GPUSlots, CPUTotal: p.c.CPUSlots, DstRows: l.dstRows,
		RowBytes: p.c.RowBytes, Stride: stride,
		GPUPerLine: 1, GPULine: p.c.RowBytes, GPUStride: p.c.RowBytes,
	})
}

// Kinds of moves.
const (
	toGPU = iota
	toCPU
	demoted // from the GPU tier to the CPU tier
)

// Prepare lists the moves of a mini-batch's changeset in l, for Apply.
func (p *Planned) Prepare(l *Places, moves []superbatch.Move,
	demotions []superbatch.Demotion) error {
	n := int64(len(moves) + len(demotions))
	l.moves = [3]pairs{}
	if n == 0 {
		return nil
	}
	if err := p.room(&l.changes, n*8); err != nil {
		return err
	}
	for _, m := range moves {
		l.moves[p.kind(m.Slot)].n++
	}
	l.moves[demoted].n = int64(len(demotions))
	all, base := hostmem.View[uint32](l.changes.Bytes()[:n*8]), l.changes.Ptr()
	var from, to [3][]uint32
	offset := int64(0)
	for k := range l.moves {
		x := &l.moves[k]
		x.from, x.to = base+cuda.DevicePtr(offset*4), base+cuda.DevicePtr((offset+x.n)*4)
		from[k], to[k] = all[offset:offset:offset+x.n], all[offset+x.n:offset+x.n:offset+2*x.n]
		offset += 2 * x.n
	}
	for _, m := range moves {
		k, slot := p.kind(m.Slot), m.Slot
		if k == toCPU {
			slot -= int32(p.c.GPUSlots)
		}
		from[k], to[k] = append(from[k], uint32(m.At)), append(to[k], uint32(slot))
	}
	for _, d := range demotions {
		from[demoted] = append(from[demoted], uint32(d.From))
		to[demoted] = append(to[demoted], uint32(int64(d.To)-p.c.GPUSlots))
	}
	return nil
}

func (p *Planned) kind(slot int32) int {
	if int64(slot) < p.c.GPUSlots {
		return toGPU
	}
	return toCPU
}

// Apply enqueues the moves that Prepare has listed: behind all of the mini-batch's gathers, on
// their stream. Its rows are at x, stride bytes from one to the next.
func (p *Planned) Apply(st cuda.Stream, l *Places, x cuda.DevicePtr, stride, rows int64) error {
	for _, k := range []int{demoted, toGPU, toCPU} { // what leaves the GPU tier first
		m := l.moves[k]
		if m.n == 0 {
			continue
		}
		g := gatherParams{
			GPURows: x, GPUTotal: rows, GPULine: stride, GPUStride: stride, GPUPerLine: 1,
			CPURows: x, GPUSlot: m.from, GPUPos: m.to, NGPU: m.n,
			CPUSlot: m.from, CPUPos: m.to, // of none
			RowBytes: p.c.RowBytes, Stride: p.c.RowBytes,
			Dst: p.cpu.Ptr(), DstRows: p.c.CPUSlots,
		}
		switch k {
		case demoted:
			g.GPURows, g.GPUTotal = p.gpu.Ptr(), p.c.GPUSlots
			g.GPULine, g.GPUStride = p.c.RowBytes, p.c.RowBytes
		case toGPU:
			g.Dst, g.DstRows = p.gpu.Ptr(), p.c.GPUSlots
		}
		if err := launchGather(p.dev, p.gather, st, g); err != nil {
			return err
		}
	}
	return nil
}
