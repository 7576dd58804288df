package graph

import (
	"math"
	"math/bits"
	"sync"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/philox"
)

// Synthetic makes a graph in memory at the speed of writing it, for measurements: node degrees are
// about the same everywhere, or, skewed, in- and out-degrees are those that R-MAT with (0.57, 0.19,
// 0.19, 0.05) gives on average, with independent edges and a number of nodes that is rounded up to
// a power of two. It is a pure function of its arguments. Close it.
func Synthetic(nodes int64, avgDegree float64, skewed bool, seed uint64) (*Topology, error) {
	if nodes < 2 || nodes > 1<<32 || !(avgDegree > 0 && avgDegree <= 1<<16) {
		return nil, errs.New(errs.Usage,
			"a graph of %d nodes with %g neighbours: give 2 to 2^32 nodes and more than 0, at most 65536 neighbours",
			nodes, avgDegree)
	}
	scale := bits.Len64(uint64(nodes - 1))
	if skewed {
		nodes = 1 << scale
	}
	const mix = 0x9E3779B97F4A7C15
	// Hubs get numbers all over.
	id := func(rank uint64) uint64 { return rank * (mix | 1) & uint64(nodes-1) }
	// by the rank's ones
	expect := make([]float64, scale+1)
	for ones := range expect {
		expect[ones] = avgDegree * math.Pow(2*0.76, float64(scale-ones)) * math.Pow(2*0.24,
			float64(ones))
	}
	degree := func(v uint64) int64 {
		r := float64(philox.Mix(seed+v*mix)>>11) / (1 << 53)
		if !skewed {
			return int64(float64(avgDegree*(0.5+r)) + 0.5) // rounded twice on every processor
		}
		// v = rank × odd, so its inverse would be wanted; any fixed shuffle serves, this one is
		// cheap.
		return int64(expect[bits.OnesCount64(id(v))] + r)
	}
	parallel := func(f func(lo, hi int64)) {
		workers := int64(hostcpu.Count())
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() { f(nodes*w/workers, nodes*(w+1)/workers) })
		}
		wg.Wait()
	}
	edges := int64(0)
	var mu sync.Mutex
	parallel(func(lo, hi int64) {
		n := int64(0)
		for v := lo; v < hi; v++ {
			n += degree(uint64(v))
		}
		mu.Lock()
		edges += n
		mu.Unlock()
	})
	t, err := Alloc(nodes, edges, false)
	if err != nil {
		return nil, err
	}
	for v := range nodes {
		t.Indptr[v+1] = t.Indptr[v] + degree(uint64(v))
	}
	parallel(func(lo, hi int64) {
		for e := t.Indptr[lo]; e < t.Indptr[hi]; e++ {
			x := philox.Mix(seed ^ (uint64(e)+1)*mix)
			if skewed {
				// Bits that are 1 with probability 1/4: R-MAT's 0.24, nearly.
				t.Indices32[e] = uint32(id(x & philox.Mix(x+mix) & uint64(nodes-1)))
			} else {
				h, _ := bits.Mul64(x, uint64(nodes))
				t.Indices32[e] = uint32(h)
			}
		}
	})
	return t, nil
}
