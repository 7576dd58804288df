package graph

import (
	"fmt"
	"math"
	"sync/atomic"
	"unsafe"

	"helios/cuda"
	"helios/internal/philox"
)

// Layer-wise importance sampling: LADIES (Zou et al., "Layer-Dependent Importance Sampling for
// Training Deep and Large Graph Convolutional Networks", NeurIPS 2019). Where neighbour sampling
// draws for each destination, which makes the frontier grow by a factor with each hop, here a hop
// draws s nodes for all its destinations together, by how much these need them:
//
//	mass     q_j = Σ_i Ā_ij², summed over the in-edges i ← j of the hop's destinations; Ā_ij = 1 / in-degree of i
//	draw     s of the nodes with q_j > 0, without replacement, each next one with probability q_j / Σ of those that are left
//	block    the sources are the destinations and the drawn nodes, its edges all those between them
//	weights  Weights[j] = 1 / (probability that j is in the block); rows are normalised where they are used
//
// The draw gives each node an exponential variable of rate q_j, -ln(u_j) / q_j, and takes the s
// smallest (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", IPL 97(5), 2006),
// so that no node waits for another. u_j is a function of (seed, epoch, batch, hop, node).
//
// The paper weighs by 1 / q_j, the inverse of a draw's probability with replacement. Of draws
// without replacement that overrates the rare: when all candidates are taken the aggregate would
// still not be their mean. Instead, with τ the smallest variable that was not taken, j is in the
// sample with probability 1 - exp(-q_j τ) given the others' variables (Cohen and Kaplan,
// "Summarizing data using bottom-k sketches", PODC 2007), and its inverse makes sums over the
// sample unbiased. Destinations are in for certain: their weight is 1, as everybody's when all
// candidates are taken.
//
// Results do not depend on the device, its workers or the order of threads: masses are sums of
// integers (in units of 2^-Bits), logarithms and exponentials are spelled out in operations that
// IEEE 754 rounds, and candidates are numbered by their first edge.

// Ladies samples by layer.
const Ladies = "ladies"

var ladiesMethod = &Method{
	Name: Ladies, Summary: "layer-wise, nodes a layer; other results",
	Title:  "layer-wise (LADIES)",
	Fanout: "nodes of a layer", MostFanout: mostLayer, WholeLists: true, NoAll: true,
	Untyped: "a layer's nodes come from one matrix, and each relation has its own",
	Bound: func(n int64, fanout int) int64 {
		if fanout < 0 {
			return Unbounded
		}
		return n + int64(fanout)
	},
	open: func(c sampling) (hopper, error) { return newLayerHopper(c) },
}

// layerParams is the parameter block of the layer kernels. Sample is that of sample_fill with all
// neighbours (Fanout -1): its Src has the E in-edges of the destinations as table slots, its
// EdgeStart where each destination's begin.
//
// A candidate's number is its position in the table: that of the destination that it is, or NumDst
// + the first edge that names it.
type layerParams struct {
	Sample sampleParams
	// uint32[E]: each edge's candidate; from layer_count on noPos where that is no source of the
	// block
	Pos cuda.DevicePtr
	// uint64[NumDst+E]: q by candidate in units of 2^-Bits; 0 = no candidate. Zeroed
	Mass cuda.DevicePtr
	// uint64[NumDst+E]: the bits of the exponential variable; all ones = no candidate
	Rank     cuda.DevicePtr
	Hist     cuda.DevicePtr // uint32[layerBins], zeroed
	State    cuda.DevicePtr // layerState
	News     cuda.DevicePtr // int64[grid]: new nodes by block
	OutStart cuda.DevicePtr // int64[NumDst+1], offsets of the sampled block
	// uint32[OutLen]: candidates until layer_relabel, then frontier indices
	OutSrc    cuda.DevicePtr
	Weights   cuda.DevicePtr // float32[WeightLen]
	Edges     int64          // E
	OutLen    int64
	WeightLen int64
	Take      int64 // s
	Key       [2]uint32
	Batch     uint32
	Bits      uint32
	Shift     uint32 // of the digit that layer_hist and layer_pick look at
	_         uint32
}

// layerState holds what the selection knows: the (s+1)-th smallest variable agrees with Tau in the
// bits from Shift on, and is number Left (from 0) among those that do. Left < 0: all are taken, Tau
// is all ones.
type layerState struct {
	Tau  uint64
	Left int64
}

const (
	_ = uint(unsafe.Sizeof(layerParams{}) - 208 - 128)
	_ = uint(208 + 128 - unsafe.Sizeof(layerParams{}))
	_ = uint(unsafe.Sizeof(layerState{}) - 16)
	_ = uint(16 - unsafe.Sizeof(layerState{}))
)

const (
	layerBits = 11 // of a digit; 64 bits are six of them
	layerBins = 1 << layerBits
	noRank    = math.MaxUint64
	noPos     = math.MaxUint32
	// mostLayer is the most nodes that a hop may be asked to draw.
	mostLayer    = 1 << 30
	layerPurpose = "layer sampling"
)

func init() {
	cuda.RegisterHost("layer_weigh", layerWeigh)
	cuda.RegisterHost("layer_rank", layerRank)
	cuda.RegisterHost("layer_hist", layerHist)
	cuda.RegisterHost("layer_pick", layerPick)
	cuda.RegisterHost("layer_count", layerCount)
	cuda.RegisterHost("layer_assign", layerAssign)
	cuda.RegisterHost("layer_relabel", layerRelabel)
}

// layerView is a block's view of a launch.
type layerView struct {
	*layerParams
	n     int64 // destinations
	start []int64
	src   []uint32
	pos   []uint32
	mass  []uint64
	rank  []uint64
}

func (p *layerParams) view() layerView {
	n := p.Sample.NumDst
	return layerView{
		p, n, cuda.View[int64](p.Sample.EdgeStart, n+1), cuda.View[uint32](p.Sample.Src, p.Edges),
		cuda.View[uint32](p.Pos, p.Edges),
		cuda.View[uint64](p.Mass, n+p.Edges), cuda.View[uint64](p.Rank, n+p.Edges),
	}
}

func (p *layerParams) state() *layerState { return &cuda.View[layerState](p.State, 1)[0] }

// firstFrom is the first destination whose edges begin at e or later.
func (v *layerView) firstFrom(e int64) int64 {
	lo, hi := int64(0), v.n
	for lo < hi {
		if mid := (lo + hi) / 2; v.start[mid] < e {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// edgeMass returns what an edge of a destination with so many in-neighbours gives its source, at
// least one unit: a destination has at most 2^Bits units in all, or 2^32.
func edgeMass(degree int64, bits uint32) uint64 {
	return max(uint64(1)<<bits/uint64(degree)/uint64(degree), 1)
}

// layerWeigh numbers the candidates and adds their masses up.
func layerWeigh(b *cuda.Block, p *layerParams) error {
	v, t := p.view(), p.Sample.table()
	lo, hi := b.Range(p.Edges)
	if lo == hi {
		return nil
	}
	i, w, end := v.firstFrom(lo+1)-1, uint64(0), lo
	for e := lo; e < hi; e++ {
		for ; e >= end; i++ { // in the end one more than the edge's destination
			if end = v.start[i+1]; e < end {
				w = edgeMass(end-v.start[i], p.Bits)
			}
		}
		pos := t.pos(uint64(v.src[e]))
		v.pos[e] = uint32(pos)
		if b.Blocks == 1 {
			v.mass[pos] += w
		} else {
			atomic.AddUint64(&v.mass[pos], w)
		}
	}
	return nil
}

// node is the graph's node of candidate c.
func (v *layerView) node(t *table, nodes []int64, c int64) uint64 {
	if c < v.n {
		return uint64(nodes[c])
	}
	return t.node(uint64(v.src[c-v.n]))
}

// layerRank draws the candidates' variables.
func layerRank(b *cuda.Block, p *layerParams) error {
	v, t := p.view(), p.Sample.table()
	nodes := cuda.View[int64](p.Sample.Nodes, v.n)
	lo, hi := b.Range(v.n + p.Edges)
	for c := lo; c < hi; c++ {
		q := v.mass[c]
		if q == 0 {
			v.rank[c] = noRank
			continue
		}
		id := v.node(&t, nodes, c)
		w := philox.Block(p.Key, [4]uint32{uint32(id), uint32(id>>32) | p.Sample.Hop<<16,
			p.Sample.Epoch, p.Batch})
		v.rank[c] = math.Float64bits(exponential(uint64(w[1])<<32|uint64(w[0])) / float64(q))
	}
	return nil
}

// layerHist counts the digit at Shift among the variables that Tau's digits above begin.
func layerHist(b *cuda.Block, p *layerParams) error {
	first := p.Shift+layerBits >= 64
	s := p.state()
	if !first && s.Left < 0 {
		return nil
	}
	v := p.view()
	lo, hi := b.Range(v.n + p.Edges)
	hist := make([]uint32, layerBins)
	done := p.Shift + layerBits
	for _, r := range v.rank[lo:hi] {
		if r != noRank && (first || r>>done == s.Tau>>done) {
			hist[r>>p.Shift&(layerBins-1)]++
		}
	}
	sum := cuda.View[uint32](p.Hist, layerBins)
	for i, n := range hist {
		if n > 0 {
			atomic.AddUint32(&sum[i], n)
		}
	}
	return nil
}

// layerPick finds Tau's digit at Shift, and leaves Hist zeroed. One block.
func layerPick(b *cuda.Block, p *layerParams) error {
	if b.Index != 0 {
		return nil
	}
	s, hist := p.state(), cuda.View[uint32](p.Hist, layerBins)
	if p.Shift+layerBits >= 64 {
		*s = layerState{0, p.Take}
	}
	if s.Left < 0 {
		return nil
	}
	sum, found := int64(0), false
	for d, n := range hist {
		if s.Left < sum+int64(n) {
			s.Tau |= uint64(d) << p.Shift
			s.Left -= sum
			found = true
			break
		}
		sum += int64(n)
	}
	if !found { // there are no more than are taken
		*s = layerState{noRank, -1}
	}
	clear(hist)
	return nil
}

// layerCount counts the edges of the block, and the nodes that are new in the frontier, in the
// launch block's share, and strikes out the other edges.
func layerCount(b *cuda.Block, p *layerParams) error {
	v, tau := p.view(), p.state().Tau
	lo, hi := b.Range(p.Edges)
	kept, news := int64(0), int64(0)
	for e := lo; e < hi; e++ {
		pos := v.pos[e]
		if int64(pos) >= v.n && v.rank[pos] >= tau {
			v.pos[e] = noPos
			continue
		}
		kept++
		if int64(pos) == v.n+e {
			news++
		}
	}
	cuda.View[int64](p.Sample.Sums, int64(b.Blocks))[b.Index] = kept
	cuda.View[int64](p.News, int64(b.Blocks))[b.Index] = news
	return nil
}

// layerAssign writes the block's edges and appends the new nodes to the frontier, with their
// weights, in order of their first edges. The grid must be that of layer_count.
func layerAssign(b *cuda.Block, p *layerParams) error {
	v, t, tau := p.view(), p.Sample.table(), p.state().Tau
	nodes := cuda.View[int64](p.Sample.Nodes, p.Sample.NodesLen)
	weights := cuda.View[float32](p.Weights, p.WeightLen)
	outStart, out := cuda.View[int64](p.OutStart, v.n+1), cuda.View[uint32](p.OutSrc, p.OutLen)
	lo, hi := b.Range(v.n)
	for i := lo; i < hi; i++ {
		weights[i] = 1
	}
	to, next := before(b, p.Sample.Sums), v.n+before(b, p.News)
	first := next
	lo, hi = b.Range(p.Edges)
	i := v.firstFrom(lo)
	for e := lo; e < hi; e++ {
		for ; i < v.n && v.start[i] == e; i++ {
			outStart[i] = to
		}
		pos := v.pos[e]
		if pos == noPos {
			continue
		}
		if to >= p.OutLen {
			return fmt.Errorf("sample: %d edges, room for %d", to+1, p.OutLen)
		}
		out[to] = pos
		to++
		if int64(pos) != v.n+e {
			continue
		}
		if next >= p.Sample.NodesLen || next >= p.WeightLen {
			return fmt.Errorf("sample: frontier index %d: room for %d", next,
				min(p.Sample.NodesLen, p.WeightLen))
		}
		nodes[next] = int64(t.node(uint64(v.src[e])))
		weights[next] = layerWeight(v.mass[pos], tau)
		v.src[e] = uint32(next)
		next++
	}
	if p.Sample.Degrees != 0 {
		indptr, deg := p.Sample.indptr(), cuda.View[uint32](p.Sample.Degrees, p.Sample.NodesLen)
		for i := first; i < next; i++ {
			_, d, err := neighbours(indptr, p.Sample.NumEdges, nodes[i])
			if err != nil {
				return err
			}
			deg[i] = uint32(d)
		}
	}
	if b.Index == b.Blocks-1 {
		for ; i <= v.n; i++ {
			outStart[i] = to
		}
		totals := cuda.View[int64](p.Sample.Totals, 2)
		totals[0], totals[1] = to, next-v.n
	}
	return nil
}

// layerRelabel replaces candidates by frontier indices.
func layerRelabel(b *cuda.Block, p *layerParams) error {
	v := p.view()
	edges := cuda.View[int64](p.OutStart, v.n+1)[v.n]
	lo, hi := b.Range(edges)
	out := cuda.View[uint32](p.OutSrc, p.OutLen)
	for e := lo; e < hi; e++ {
		if c := int64(out[e]) - v.n; c >= 0 {
			out[e] = v.src[c]
		}
	}
	return nil
}

// exponential maps 64 random bits to an exponential variable of rate 1, above 0.
func exponential(r uint64) float64 {
	return -logOf((float64(int64(r>>12)) + 0.5) * (1.0 / (1 << 52)))
}

// layerWeight is 1 / (1 - exp(-q τ)), τ given by its bits, all ones for infinity.
func layerWeight(q, tau uint64) float32 {
	if tau == noRank {
		return 1
	}
	x := float64(float64(q) * math.Float64frombits(tau))
	// of small ones two terms are enough, and 1 - exp would cancel
	p := x - float64(float64(x*x)*0.5)
	if x > 1.0/(1<<20) {
		p = 1 - expDown(-x)
	}
	return float32(1 / p)
}

// logOf is the logarithm of a normal x > 0 as cuda/kernels/fp.h computes it (after FreeBSD's
// e_log.c), on every machine: the conversions keep compilers from fusing.
func logOf(x float64) float64 {
	b := math.Float64bits(x)
	f := math.Float64frombits(b&(1<<52-1) | 0x3fe<<52)
	k := float64(int32(b>>52) - 0x3fe)
	if f <= 7.07106781186547524401e-01 {
		k--
		f *= 2
	}
	f--
	s := f / (f + 2)
	s2 := float64(s * s)
	s4 := float64(s2 * s2)
	t1 := s2 * (float64((float64((float64(1.479819860511658591e-01*s4)+
		1.818357216161805012e-01)*s4)+2.857142874366239149e-01)*s4) + 6.666666666666735130e-01)
	t2 := s4 * (float64((float64(1.531383769920937332e-01*s4)+2.222219843214978396e-01)*s4) +
		3.999999999940941908e-01)
	r := float64(t1) + float64(t2)
	half := float64(0.5 * f * f)
	low := float64(s*(half+r)) + float64(1.90821492927058770002e-10*k)
	return float64(6.93147180369123816490e-01*k) - ((half - low) - f)
}

// expDown is exp of x <= 0 as cuda/kernels/fp.h computes it.
func expDown(x float64) float64 {
	if !(x > -2000) {
		return 0
	}
	const toInteger = 6755399441055744.0 // 1.5 · 2^52: a sum with it is rounded to an integer
	m := float64(x*1.4426950408889634073599246810018920) + toInteger
	k := int32(uint32(math.Float64bits(m)))
	n := m - toInteger
	r := math.FMA(-0.69314718055966295651160180568695068359375, n, x)
	r = math.FMA(-0.28235290563031577122588448175013436025525412068e-12, n, r)
	r *= 0.0625
	t := 2.4801587301587301587e-5
	for _, c := range [...]float64{1.9841269841269841270e-4, 1.3888888888888888889e-3,
		8.3333333333333333333e-3,
		4.1666666666666666667e-2, 1.6666666666666666667e-1, 0.5, 1} {
		t = math.FMA(t, r, c)
	}
	r = float64(r * t)
	r = float64(r * (r + 2)) // (1+r)² - 1
	r = float64(r * (r + 2))
	r = float64(r * (r + 2))
	r = math.FMA(r, r+2, 1)
	k += 0x3ff
	switch {
	case k > 0:
		return r * math.Float64frombits(uint64(k)<<52)
	case k < -52:
		return 0
	}
	return r * math.Float64frombits(uint64(k+0x3fe)<<52) * math.Float64frombits(1<<52)
}
