package prepare

import (
	"slices"

	"helios/dataset/parted"
)

// PageRun is a run of pages, and where it begins in a buffer, in pages.
type PageRun struct {
	parted.Run
	At int64
}

// pageSetBytes bounds one set of a read of runs: an interrupt ends the read between two.
const pageSetBytes = 256 << 20

// CutPages divides runs of pages into the sets by which they are read, one behind the other, of no
// more than limit pages.
func CutPages(runs []PageRun, pageBytes int64) (sets [][]PageRun, limit int64) {
	limit = min(max(pageSetBytes/pageBytes, 1), int64(FillRows))
	for room, rest := int64(0), slices.Clone(runs); len(rest) > 0; {
		r := &rest[0]
		if r.Pages == 0 {
			rest = rest[1:]
			continue
		}
		if room == 0 {
			sets, room = append(sets, nil), limit
		}
		n := min(r.Pages, room)
		set := &sets[len(sets)-1]
		*set = append(*set, PageRun{parted.Run{Page: r.Page, Pages: n}, r.At})
		*r = PageRun{parted.Run{Page: r.Page + n, Pages: r.Pages - n}, r.At + n}
		room -= n
	}
	return sets, limit
}
