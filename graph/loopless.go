package graph

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	"helios/cuda"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
)

// In-degrees without a node's edges to itself: models that add remaining self loops normalise by
// them. A graph without such edges, which most are, needs no table of them.

// looplessParams is the parameter block of sample_loopless: Degrees[i] = Table[Nodes[i]].
type looplessParams struct {
	Nodes    cuda.DevicePtr // int64[Count], frontier
	Table    cuda.DevicePtr // uint32[NumNodes]
	Degrees  cuda.DevicePtr // uint32[Count]
	NumNodes int64
	Count    int64
}

const (
	_ = uint(unsafe.Sizeof(looplessParams{}) - 40)
	_ = uint(40 - unsafe.Sizeof(looplessParams{}))
)

func init() { cuda.RegisterHost("sample_loopless", sampleLoopless) }

func sampleLoopless(b *cuda.Block, p *looplessParams) error {
	nodes, table := cuda.View[int64](p.Nodes, p.Count), cuda.View[uint32](p.Table, p.NumNodes)
	degrees := cuda.View[uint32](p.Degrees, p.Count)
	lo, hi := b.Range(p.Count)
	for i := lo; i < hi; i++ {
		v := nodes[i]
		if uint64(v) >= uint64(p.NumNodes) {
			return fmt.Errorf("sample: node %d: nodes are 0 to %d", v, p.NumNodes-1)
		}
		degrees[i] = table[v]
	}
	return nil
}

// loops counts the edges of nodes lo to hi-1 to themselves, and calls each, unless it is nil, with
// every node's.
func (t *Topology) loops(lo, hi int64, each func(v, own int64)) (n int64) {
	for v := lo; v < hi; v++ {
		own := int64(0)
		if t.Indices64 != nil {
			for _, j := range t.Indices64[t.Indptr[v]:t.Indptr[v+1]] {
				if j == v {
					own++
				}
			}
		} else {
			for _, j := range t.Indices32[t.Indptr[v]:t.Indptr[v+1]] {
				if int64(j) == v {
					own++
				}
			}
		}
		n += own
		if each != nil {
			each(v, own)
		}
	}
	return n
}

// overNodes calls do for shares of the nodes with about as many edges each, on all cores, and
// returns the sum of its results.
func (t *Topology) overNodes(do func(lo, hi int64) int64) (sum int64) {
	workers := int64(hostcpu.Count())
	starts := make([]int64, workers+1)
	for w := range workers {
		node, _ := slices.BinarySearch(t.Indptr[:t.NumNodes], t.NumEdges/workers*w)
		starts[w] = int64(node)
	}
	starts[0], starts[workers] = 0, t.NumNodes
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			n := do(starts[w], starts[w+1])
			mu.Lock()
			sum += n
			mu.Unlock()
		})
	}
	wg.Wait()
	return sum
}

// looplessDegrees returns memory of the device with the in-degree of every node without its edges
// to itself; nil where no node has one. It is made once, and the topology's.
func (d *DeviceTopology) looplessDegrees(dev cuda.Device) (cuda.Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.Host
	if d.looked || t.NumNodes == 0 {
		return d.loopless, nil
	}
	if t.OnStorage() {
		d.looked = true
		if t.far.loopless == nil {
			return nil, nil
		}
	} else if t.overNodes(func(lo, hi int64) int64 { return t.loops(lo, hi, nil) }) == 0 {
		d.looked = true
		return nil, nil
	}
	buf, err := dev.Alloc(cuda.MemPinned, 4*t.NumNodes, "degrees without self loops")
	if err != nil {
		return nil, fmt.Errorf("attach topology: %w", err)
	}
	table := hostmem.View[uint32](buf.Bytes()[:4*t.NumNodes])
	if t.OnStorage() {
		copy(table, t.far.loopless)
	} else {
		t.overNodes(func(lo, hi int64) int64 {
			return t.loops(lo, hi, func(v, own int64) { table[v] = uint32(t.InDegree(v) - own) })
		})
	}
	d.loopless, d.looked = buf, true
	return buf, nil
}
