package cache

import (
	"sync"

	"helios/internal/errs"
)

// Probe loads the index line of each row, which must be within the index, by so many goroutines,
// and does nothing else with them: what memory allows a lookup. A row's loads do not depend on
// another's, so a core keeps as many under way as it can; chained, each waits for the one before,
// so that the time is memory's latency. It returns a sum of what it read, and works where the CPU
// sees the index.
func (i *Index) Probe(nodes []int64, workers int, chained bool) (uint64, error) {
	if i.lines == nil && i.rows > 0 {
		return 0, errs.New(errs.Capability,
			"cache index: the CPU does not see the lines; probe an index of the host device")
	}
	workers = max(workers, 1)
	sums := make([]uint64, workers)
	var wg sync.WaitGroup
	for w := range workers {
		part := nodes[len(nodes)*w/workers : len(nodes)*(w+1)/workers]
		wg.Go(func() {
			var sum uint64
			if chained {
				for _, n := range part {
					sum += i.lines[(uint64(n)+sum&noBits)/RowsPerLine].code[0]
				}
			} else {
				for _, n := range part {
					sum += i.lines[uint64(n)/RowsPerLine].code[0]
				}
			}
			sums[w] = sum
		})
	}
	wg.Wait()
	for _, s := range sums[1:] {
		sums[0] += s
	}
	return sums[0], nil
}

// noBits makes an address depend on what was loaded before; the compiler does not know that it is
// 0.
var noBits uint64
