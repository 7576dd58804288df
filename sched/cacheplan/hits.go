package cacheplan

import (
	"slices"
)

// hitsAt ranks the rows by score, of equals the one with the lower number first, as placement does,
// and sums the counts of the hottest rows up to each cut (ascending).
func hitsAt(scores, counts []uint32, cuts []int64) map[int64]int64 {
	order := make([]uint32, len(scores))
	rankRows(scores, order)
	out := map[int64]int64{}
	sum := int64(0)
	for i, row := range order {
		for len(cuts) > 0 && cuts[0] == int64(i) {
			out[cuts[0]] = sum
			cuts = cuts[1:]
		}
		sum += int64(counts[row])
	}
	out[int64(len(order))] = sum
	return out
}

// sorted is the different values of v in order.
func sorted(v []int64) []int64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return slices.Compact(v)
}

// rankRows fills order with the rows from the highest score to the lowest, equals by number: a
// radix sort of 11 bits at a time. There are fewer than 2^32 rows.
func rankRows(scores, order []uint32) {
	const radix = 11
	from := make([]uint32, len(scores))
	for i := range from {
		from[i] = uint32(i)
	}
	for shift := 0; shift < 32; shift += radix {
		var count [1 << radix]int64
		digit := func(row uint32) uint32 { return ^scores[row] >> shift & (1<<radix - 1) }
		for _, s := range scores {
			count[^s>>shift&(1<<radix-1)]++
		}
		pos := int64(0)
		for d, n := range count {
			count[d] = pos
			pos += n
		}
		for _, row := range from {
			d := digit(row)
			order[count[d]] = row
			count[d]++
		}
		from, order = order, from
	}
	// After three digits the caller's slice holds the result.
}
