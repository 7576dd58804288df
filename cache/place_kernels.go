package cache

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/hostmem"
)

// Phases of "hotness_rank", one to a launch.
const (
	// each block: rows by the digit at Shift, among those that Threshold's higher digits leave
	rankHist    = 1
	rankPick    = 2  // one block: the digit where the selection ends
	rankCount   = 4  // each block: its rows above and at the thresholds
	rankPrefix  = 8  // one block: from counts to places
	rankScatter = 16 // each block: write its rows to their places
)

const (
	rankBits = 8 // of a count at a time
	rankBins = 1 << rankBits
)

// rankParams are the parameters of the kernel "hotness_rank", which is Place on the device: the
// GPURows largest counts and the GPURows+CPURows largest are selected side by side (0 and 1), by
// radix from the top digit down. Then the rows of each are written in ascending order; those at a
// threshold are taken from the lowest on.
type rankParams struct {
	Counts           cuda.DevicePtr // uint32[Rows]
	Hist             cuda.DevicePtr // uint64[2][rankBins], zero between digits
	State            cuda.DevicePtr // rankState
	Parts            cuda.DevicePtr // rankPart[Grid]
	GPU, CPU         cuda.DevicePtr // int64[GPURows], int64[CPURows]
	Rows             int64
	GPURows, CPURows int64
	Grid             uint32
	Phase            uint32
	Shift            uint32 // of the digit
	_                uint32
}

// rankState holds what is known of both selections.
type rankState struct {
	Left      [2]int64 // rows to take among those at the threshold
	Threshold [2]uint32
}

// rankPart is a block's share: first how many rows are above and at each threshold, then where its
// rows start in both tiers' lists, and how many rows at the threshold come before it.
type rankPart struct {
	Take  [2]int64
	Equal [2]int64
}

const (
	_ = -(unsafe.Sizeof(rankParams{}) ^ 88)
	_ = -(unsafe.Sizeof(rankState{}) ^ 24)
	_ = -(unsafe.Sizeof(rankPart{}) ^ 32)
)

func hotnessRank(b *cuda.Block, p *rankParams) error {
	counts := cuda.View[uint32](p.Counts, p.Rows)
	state := &cuda.View[rankState](p.State, 1)[0]
	lo, hi := b.Range(p.Rows)
	switch p.Phase {
	case rankHist:
		rankHistogram(counts[lo:hi], cuda.View[uint64](p.Hist, 2*rankBins), state, p.Shift)
	case rankPick:
		rankDigit(cuda.View[uint64](p.Hist, 2*rankBins), state, p.Shift)
	case rankCount:
		cuda.View[rankPart](p.Parts, int64(p.Grid))[b.Index] = rankCounts(counts[lo:hi], state)
	case rankPrefix:
		rankSums(cuda.View[rankPart](p.Parts, int64(p.Grid)), state)
	case rankScatter:
		part := cuda.View[rankPart](p.Parts, int64(p.Grid))[b.Index]
		rankRows(counts[lo:hi], lo, part, state, cuda.View[int64](p.GPU, p.GPURows),
			cuda.View[int64](p.CPU, p.CPURows))
	}
	return nil
}

// rankDigit finds the next digit of both thresholds, and empties the histograms.
func rankDigit(hist []uint64, state *rankState, shift uint32) {
	for k := range 2 {
		d := rankBins - 1
		for bins := hist[k*rankBins:]; d > 0 && int64(bins[d]) < state.Left[k]; d-- {
			state.Left[k] -= int64(bins[d])
		}
		state.Threshold[k] |= uint32(d) << shift
	}
	clear(hist)
}

// rankCounts counts a block's rows above each threshold, and those equal to it.
func rankCounts(counts []uint32, state *rankState) (part rankPart) {
	for _, v := range counts {
		for k, t := range state.Threshold {
			if v > t {
				part.Take[k]++
			} else if v == t {
				part.Equal[k]++
			}
		}
	}
	return part
}

// rankSums turns the blocks' counts into the places where each block's rows begin in the lists.
func rankSums(parts []rankPart, state *rankState) {
	var before rankPart
	for i, part := range parts {
		parts[i] = before
		var take [2]int64
		for k := range 2 {
			take[k] = part.Take[k] + min(max(state.Left[k]-before.Equal[k], 0), part.Equal[k])
			before.Equal[k] += part.Equal[k]
		}
		before.Take[0] += take[0]
		before.Take[1] += take[1] - take[0]
	}
}

// rankRows writes a block's rows, which begin at row lo, to the tiers' lists.
func rankRows(counts []uint32, lo int64, part rankPart, state *rankState, gpu, cpu []int64) {
	var sides [2]top
	for k := range sides {
		sides[k] = top{threshold: state.Threshold[k], equal: state.Left[k] - part.Equal[k]}
	}
	for i, v := range counts {
		// Both see each row: a row at the GPU threshold counts against both shares.
		inGPU, inAny := sides[0].takes(v), sides[1].takes(v)
		switch {
		case inGPU:
			gpu[part.Take[0]] = lo + int64(i)
			part.Take[0]++
		case inAny:
			cpu[part.Take[1]] = lo + int64(i)
			part.Take[1]++
		}
	}
}

func rankHistogram(counts []uint32, hist []uint64, state *rankState, shift uint32) {
	var own [2][rankBins]uint64
	done := shift + rankBits // bits above are Threshold's already
	want := [2]uint64{uint64(state.Threshold[0]) >> done, uint64(state.Threshold[1]) >> done}
	for _, v := range counts {
		for k, w := range want {
			if uint64(v)>>done == w {
				own[k][v>>shift%rankBins]++
			}
		}
	}
	for k := range own {
		for d, c := range own[k] {
			if c != 0 {
				atomic.AddUint64(&hist[k*rankBins+d], c)
			}
		}
	}
}

// Place is Place of the counts, computed on the device: only the tiers' lists come to the CPU, not
// the counts. It waits for the streams' Adds that st has seen, and for the result, no longer than
// ctx.
func (h *Hotness) Place(ctx context.Context, st cuda.Stream, gpuRows, cpuRows int64) (p Placement,
	err error) {
	gpuRows = min(max(gpuRows, 0), h.rows)
	cpuRows = min(max(cpuRows, 0), h.rows-gpuRows)
	p = Placement{make([]int64, gpuRows), make([]int64, cpuRows)}
	if gpuRows+cpuRows == 0 {
		return p, nil
	}
	grid := min(max(h.rows/h.perBlock, 1), h.blocks)
	var bufs []cuda.Buffer
	defer func() {
		for _, b := range bufs {
			err = errors.Join(err, b.Free())
		}
	}()
	alloc := func(kind cuda.MemKind, bytes int64) (cuda.Buffer, error) {
		b, err := h.dev.Alloc(kind, bytes, "hotness ranking")
		if err != nil {
			return nil, fmt.Errorf("cache: %w", err)
		}
		bufs = append(bufs, b)
		return b, nil
	}
	hist, err := alloc(cuda.MemDevice, 2*rankBins*8)
	if err != nil {
		return p, err
	}
	parts, err := alloc(cuda.MemDevice, grid*int64(unsafe.Sizeof(rankPart{})))
	if err != nil {
		return p, err
	}
	// Pinned: the CPU writes the state and reads the lists.
	state, err := alloc(cuda.MemPinned, int64(unsafe.Sizeof(rankState{})))
	if err != nil {
		return p, err
	}
	lists, err := alloc(cuda.MemPinned, (gpuRows+cpuRows)*8)
	if err != nil {
		return p, err
	}
	hostmem.View[rankState](state.Bytes()[:unsafe.Sizeof(rankState{})])[0].Left = [2]int64{gpuRows,
		gpuRows + cpuRows}
	if err := h.launchRank(ctx, st, rankParams{
		Counts: h.counts.Ptr(), Hist: hist.Ptr(), State: state.Ptr(), Parts: parts.Ptr(),
		GPU: lists.Ptr(), CPU: lists.Ptr() + cuda.DevicePtr(gpuRows*8),
		Rows: h.rows, GPURows: gpuRows, CPURows: cpuRows, Grid: uint32(grid),
	}); err != nil {
		return p, err
	}
	got := hostmem.View[int64](lists.Bytes()[:(gpuRows+cpuRows)*8])
	copy(p.GPU, got)
	copy(p.CPU, got[gpuRows:])
	return p, nil
}

// launchRank runs the phases of a ranking, and waits for the last.
func (h *Hotness) launchRank(ctx context.Context, st cuda.Stream, q rankParams) error {
	grid := int64(q.Grid)
	launch := func(phase uint32, blocks int64) error {
		q.Phase = phase
		if err := cuda.Launch(st, h.rank, cuda.LaunchConfig{Blocks: int(blocks), Threads: threads},
			q); err != nil {
			return fmt.Errorf("cache: %w", err)
		}
		return nil
	}
	for shift := 32 - rankBits; shift >= 0; shift -= rankBits {
		q.Shift = uint32(shift)
		if err := errors.Join(launch(rankHist, grid), launch(rankPick, 1)); err != nil {
			return err
		}
	}
	if err := errors.Join(launch(rankCount, grid), launch(rankPrefix, 1),
		launch(rankScatter, grid)); err != nil {
		return err
	}
	if err := st.Synchronize(ctx); err != nil {
		return fmt.Errorf("cache: placement of %d rows: %w", h.rows, err)
	}
	return nil
}

// top selects the k largest values: all above the threshold, and in their order the first that
// equal it.
type top struct {
	threshold uint32
	equal     int64 // how many equal to the threshold are still to be taken
	none      bool
}

func (t *top) takes(v uint32) bool {
	if t.none || v < t.threshold {
		return false
	}
	if v > t.threshold {
		return true
	}
	t.equal--
	return t.equal >= 0
}
