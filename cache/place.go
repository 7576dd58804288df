// Package cache places each feature row (GPU memory, CPU memory, SSD), and serves a mini-batch's
// lookups and gathers on the device.
//
// The static cache of Helios: hotness (how often presampling met a row) puts the hottest rows into
// the GPU tier and the next into the CPU tier for the whole run. A kernel then looks a mini-batch's
// rows up and sorts them into GPU hits, CPU hits and misses by SSD; another copies the hits. Misses
// go to a gpuio stack.
package cache

// Tier is the place of a row. Its values are the 2-bit codes of the index.
type Tier uint8

// The tiers.
const (
	SSD Tier = 0
	GPU Tier = 1
	CPU Tier = 2
)

func (t Tier) String() string {
	switch t {
	case SSD:
		return "ssd"
	case GPU:
		return "gpu"
	case CPU:
		return "cpu"
	}
	return "invalid tier"
}

// Placement is the rows of each cache tier in ascending order. All others stay on SSD.
type Placement struct{ GPU, CPU []int64 }
