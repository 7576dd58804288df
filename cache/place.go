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

// Place fills the GPU tier with the gpuRows hottest rows and the CPU tier with the next cpuRows.
// Of equally hot rows the one with the lower id comes first, so rows that were never met
// (hotness 0) are taken last and in order. That maximises the hits of a run that meets rows as
// the presampling did, first those in the GPU tier and then in total.
// Numbers of rows below 0 count as 0, and above what there is as all.
//
// It takes O(rows) time and no memory besides the result: no sort, but a selection of the two
// thresholds by radix. Hotness.Place does the same where the counts are, and must agree with it to
// the row.
func Place(hotness []uint32, gpuRows, cpuRows int64) Placement {
	rows := int64(len(hotness))
	gpuRows = min(max(gpuRows, 0), rows)
	cpuRows = min(max(cpuRows, 0), rows-gpuRows)
	p := Placement{make([]int64, 0, gpuRows), make([]int64, 0, cpuRows)}
	if gpuRows+cpuRows == 0 {
		return p
	}
	gpu, all := selectTop(hotness, gpuRows), selectTop(hotness, gpuRows+cpuRows)
	for row, h := range hotness {
		// Both see each row: a row at the GPU threshold counts against both shares.
		inGPU, inAny := gpu.takes(h), all.takes(h)
		switch {
		case inGPU:
			p.GPU = append(p.GPU, int64(row))
		case inAny:
			p.CPU = append(p.CPU, int64(row))
		}
	}
	return p
}

// top is a selection of the k largest values: all above the threshold and, in order, the first
// of those equal to it.
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

// selectTop finds the k-th largest of v in two passes of 16 bits.
func selectTop(v []uint32, k int64) top {
	if k <= 0 {
		return top{none: true}
	}
	digit := func(use func(uint32) (uint32, bool)) uint32 {
		count := make([]int64, 1<<16)
		for _, x := range v {
			if d, ok := use(x); ok {
				count[d]++
			}
		}
		for d := len(count) - 1; ; d-- {
			if count[d] >= k || d == 0 {
				return uint32(d)
			}
			k -= count[d]
		}
	}
	high := digit(func(x uint32) (uint32, bool) { return x >> 16, true })
	low := digit(func(x uint32) (uint32, bool) { return x & 0xffff, x>>16 == high })
	return top{threshold: high<<16 | low, equal: k}
}
