package gnn

import (
	"math/bits"

	"helios/cuda"
)

// grid shapes launches. It knows how large the device is, and nothing of what runs on it.
type grid struct {
	gpu   bool // no host device: kernels of its own, steps enqueued as a whole
	limit int  // blocks of a launch on the host
	sms   int
}

func gridOf(info cuda.Info) grid {
	return grid{gpu: info.Backend != "host", limit: max(1, 4*info.SMs), sms: info.SMs}
}

// aggThreads is the block size of these launches; kernels of the transpose take no more.
const aggThreads = 256

// gpuItems is the number of elements that a warp takes in one round of the kernels that work
// element by element: four for each lane.
const gpuItems = 128

// blocksFor is a launch of the host over n items, of which a block takes at least per.
func (g grid) blocksFor(n, per int64) cuda.LaunchConfig {
	blocks := min(int64(g.limit), (n+per-1)/per)
	return cuda.LaunchConfig{Blocks: int(max(blocks, 1)), Threads: aggThreads}
}

// blocks is the launch of a kernel over n items, of which a block of the host takes at least per,
// and which are work for so many warps on a GPU.
func (g grid) blocks(n, per, warps int64) cuda.LaunchConfig {
	if g.gpu {
		return g.warpBlocks(warps)
	}
	return g.blocksFor(n, per)
}

// oneBlock is the launch of a kernel that makes one result of many.
func (g grid) oneBlock() cuda.LaunchConfig {
	if g.gpu {
		return cuda.LaunchConfig{Blocks: 1, Threads: 1024}
	}
	return cuda.LaunchConfig{Blocks: 1, Threads: aggThreads}
}

// rowBlocks is the launch of an aggregate over rows, of which a block of the host takes at least
// per.
func (g grid) rowBlocks(rows, per, dim int64) cuda.LaunchConfig {
	if g.gpu {
		return g.aggBlocks(rows, dim)
	}
	return g.blocksFor(rows, per)
}

// dotBlocks is the launch of dot products of so many rows of a width.
func (g grid) dotBlocks(rows, dim int64) cuda.LaunchConfig {
	return g.blocks(rows, 256, rows*min(max(dim, 1), 32)/32)
}

// headBlocks is the launch of sums over so many rows of all heads, each of width dim.
func (g grid) headBlocks(rows, per, heads, dim int64) cuda.LaunchConfig {
	if g.gpu {
		return g.aggBlocks(rows*heads, dim)
	}
	return g.blocksFor(rows, per)
}

// quadBlocks is the launch of kernels that take four columns of a row at a time (cuda/kernels,
// quads.h).
func (g grid) quadBlocks(rows, cols int64) cuda.LaunchConfig {
	return g.blocks(rows, 64, rows*((cols+3)/4)*4/gpuItems)
}

// warpBlocks is a launch for so many warps' worth of work: a few rounds for each warp, so that the
// GPU balances what takes longer, and no more than 32 blocks for each SM.
func (g grid) warpBlocks(warps int64) cuda.LaunchConfig {
	blocks := (warps + aggThreads/32 - 1) / (aggThreads / 32)
	return cuda.LaunchConfig{Blocks: int(max(1, min(blocks, int64(32*max(1, g.sms))))),
		Threads: aggThreads}
}

// aggBlocks is the launch of the aggregations and their gradients over so many rows of a width: a
// warp does 128 columns of one row, or several rows where they are narrower.
func (g grid) aggBlocks(rows, dim int64) cuda.LaunchConfig {
	words := (dim + 3) / 4
	if words < 32 {
		per := int64(32) >> bits.Len64(uint64(max(words-1, 0)))
		return g.warpBlocks((rows + per - 1) / per)
	}
	return g.warpBlocks(rows * ((words + 31) / 32))
}
