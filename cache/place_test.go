package cache

// Place fills the GPU tier with the gpuRows hottest rows and the CPU tier with the next cpuRows.
// Of equally hot rows the one with the lower id comes first, so rows that were never met
// (hotness 0) are taken last and in order. That maximises the hits of a run that meets rows as
// the presampling did, first those in the GPU tier and then in total.
// Numbers of rows below 0 count as 0, and above what there is as all.
//
// Hotness.Place does the same where the counts are, and must agree with it to the row.
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
