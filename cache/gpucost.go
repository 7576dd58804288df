package cache

import (
	"math"
	"math/bits"

	"helios/cache/policy"
)

// GPUSets describes a directory in sets in a GPU's memory, as far as the time of its launches
// depends on it.
type GPUSets struct {
	Policy string
	Sets   int64
	SSDs   int64
	Window bool // batches are announced
	SMs    int64
}

// GPULookup is a part that is looked up: positions, the different lines among them that are not in
// the CPU tier, and those of them that are not cached.
type GPULookup struct{ Rows, Lines, Missed int64 }

// GPULaunch is the work of one launch. Warps take part, and an SM holds Resident of them at a time.
// The slowest warp waits for Trips to memory, one after the other. All warps together execute
// Instructions and Atomics, and touch Sectors of 32 bytes, as if there were no caches. The figures
// are counted in the committed PTX (tools/gpucost).
type GPULaunch struct {
	Kernel                         string
	Warps, Resident                int64
	Trips                          float64
	Instructions, Sectors, Atomics float64
}

// Warps that an SM holds by registers and by shared memory: RESOURCES.md, of sm_80.
const (
	residentUsual = 48
	residentPlay  = 20
)

// playCosts are the instructions of an access, of the warp that plays its set: for a hit, and for a
// miss.
var playCosts = map[string][2]float64{
	policy.Random: {35, 170}, policy.LRU: {60, 90}, policy.Clock: {35, 75},
	policy.Sieve: {45, 110}, policy.S3FIFO: {50, 130},
}

// Launches lists the launches of a lookup, in order, but for the one that fills the table of first
// places, of TableBytes.
func (g GPUSets) Launches(l GPULookup) []GPULaunch {
	if l.Rows == 0 {
		return nil
	}
	n, m := float64(l.Rows), float64(l.Lines)
	largest := 4 * g.SMs
	grid := min(max(l.Rows/(2*threads), 1), largest)
	fine := func(n, each int64) int64 { return min((n+each-1)/each, largest) }
	const perBlock = threads / 32
	// Rounds of 32 entries that a warp of the grid has.
	rounds := func(n int64) float64 {
		return math.Ceil(math.Ceil(float64(n)/float64(grid*perBlock)) / 32)
	}
	wide := func(name string, trips, instructions, sectors float64) GPULaunch {
		return GPULaunch{name, grid * perBlock, residentUsual, trips, instructions, sectors, 0}
	}
	ahead := func() GPULaunch { // bins of all blocks, each by four threads, 8 counts at a time
		return GPULaunch{"sets_sort", prefixThreads / 32, 32,
			2*math.Ceil(float64(grid)/32) + 1, 205*float64(grid) + 6000, 96 * float64(grid), 0}
	}
	r, rm := rounds(l.Rows), rounds(l.Lines)
	blocks := fine(l.Rows, threads)
	out := []GPULaunch{{"sets_lines", blocks * perBlock, residentUsual,
		14 * math.Ceil(n/float64(blocks*threads)), 4.8 * n, 0.6 * n, 1.35 * m}}
	if g.Window { // when the lines come next
		x := &out[0]
		x.Trips += 8 * math.Ceil(n/float64(blocks*threads))
		x.Instructions += 3 * n
		x.Sectors += 1.8 * n
	}
	add := func(name string, all ...GPULaunch) {
		if grid > 1 {
			for _, x := range all {
				x.Kernel = name
				out = append(out, x)
			}
			return
		}
		one := GPULaunch{Kernel: name, Warps: perBlock, Resident: residentUsual}
		for _, x := range all { // phases of one block
			one.Trips += x.Trips
			one.Instructions += x.Instructions
			one.Sectors += x.Sectors
		}
		out = append(out, one)
	}
	for shift := 0; shift == 0 || shift < bits.Len64(uint64(max(g.Sets-1, 0))); shift += sortBits {
		if shift == 0 {
			add("sets_sort", wide("", 8.5*r, 10*n, 1.9*n), ahead(),
				wide("", 4.5*r, 11.5*n, scattered(g.Sets)*m))
			continue
		}
		add("sets_sort", wide("", 1.6*rm, 6*m, 0.25*m), ahead(),
			wide("", 2.8*rm, 10*m, scattered(g.Sets>>shift)*m))
	}
	if g.Sets > 0 {
		out = append(out, g.play(l, fine(l.Rows, playedEach)*perBlock))
	}
	add("sets_lists", wide("", 3.3*r, 4*n, 0.55*n),
		GPULaunch{Warps: prefixThreads / 32, Resident: residentUsual,
			Trips:        math.Ceil(float64(grid)/32) + 2,
			Instructions: 3000 + 40*float64(grid), Sectors: 100 + 2*float64(grid)},
		wide("", 9.7*r, 9*n, 2.3*n), ahead(), wide("", 14.8*r, 12*n, 3.2*n))
	return out
}

// scattered is the sectors that an entry takes of a pass of the sort by so many values: each run of
// equal digits among a warp's 32 entries begins a sector of the keys and one of the positions.
func scattered(values int64) float64 {
	b := float64(min(max(values, 1), sortBins))
	return 0.5 + 2*b*(1-math.Pow(1-1/b, 32))/32
}

// play is the launch that plays the sets.
func (g GPUSets) play(l GPULookup, warps int64) GPULaunch {
	m, sets := float64(l.Lines), float64(g.Sets)
	touched := sets * -math.Expm1(-m/sets)
	chunks := math.Ceil(m / max(touched, 1) / 32)
	hit, miss := playCosts[g.Policy][0], playCosts[g.Policy][1]
	x := GPULaunch{"sets_play", warps, residentPlay,
		4 + math.Ceil(touched/float64(warps))*(3+7*(chunks-1)),
		150*float64(warps) + 280*touched + hit*float64(l.Lines-l.Missed) + miss*float64(l.Missed),
		20*float64(warps) + 23.5*touched + 1.8*m, 3 * float64(warps)}
	if g.Policy == policy.S3FIFO {
		x.Sectors += 8 * touched
	}
	if g.Window {
		x.Sectors += 8*touched + 0.9*m
	}
	return x
}

// TableBytes is the size of the table of first places.
func (l GPULookup) TableBytes() int64 {
	if l.Rows == 0 {
		return 0
	}
	return int64(8) << bits.Len64(uint64(2*l.Rows-1))
}

// GPUSetsBytes returns the bytes of GPU memory that a directory in sets keeps for a number of
// cached lines under a policy. With a window it also keeps until when each line stays.
func GPUSetsBytes(rule string, lines int64, window bool) (int64, error) {
	l, err := policy.LayOutSets(policy.Config{Policy: rule, Slots: lines, Lines: lines})
	if err != nil {
		return 0, err
	}
	words := int64(l.Stride)
	if window {
		words += policy.Ways
	}
	return l.Sets * words * 4, nil
}

// GPUSetsWork returns the bytes of GPU memory that lookups of up to rows rows need beside the
// directory, when window batches are announced ahead.
func GPUSetsWork(rows int64, window int) int64 {
	rows += rows / 4
	n := rows*4*setsScratch + GPULookup{Rows: rows}.TableBytes()
	if window > 0 { // two tables, of announced rows
		n += 2 * 8 * windowSlots(rows*int64(window+2))
	}
	return n
}

// GPUTicketBytes is the GPU memory that a ticket holds for each of its rows.
const GPUTicketBytes = gpuTicketLists*4 + 2*8

// windowSlots returns the slots of the hash table of a number of announced rows: a power of two.
func windowSlots(rows int64) int64 {
	slots := int64(1024)
	for slots < 4*rows {
		slots *= 2
	}
	return slots
}

// Announcement returns the launch for an announced batch of so many rows.
func (g GPUSets) Announcement(rows int64) GPULaunch {
	grid := min(max(rows/(2*threads), 1), 4*g.SMs)
	n, each := float64(rows), math.Ceil(float64(rows)/float64(grid*threads))
	return GPULaunch{"sets_announce", grid * threads / 32, residentUsual, 42 * each, 21 * n,
		4.3 * n, 1.5 * n}
}
