package simd

import "unsafe"

// HeadSoftmax is the attention of graph attention networks over the edges of destinations: for each
// head, the softmax of the scores of a destination's self loop, which comes first, and of its edges
// in order. The score of an edge is LeakyReLU of its source's and its destination's. Every step is
// rounded, so all levels and GPUs give the same bits; exp is that of Exp.
type HeadSoftmax struct {
	Heads int
	// Heads of each source, the destinations first, and of each destination: score, largest score
	// and inverse of the sum.
	Src, Dst, Largest, Inverse []float32
	Weights                    []float32 // of the sources' exps, nil for 1
	Loops                      []float32 // of the destinations' self loops' exps, nil for 1
	Alpha, AlphaSelf           []float32 // attention: Heads of each edge, of each destination
	// Gradients by attention, behind which SoftmaxSlope leaves those by the scores, and by Dst.
	Dot, DotSelf, DDst []float32
}

const leakySlope = 0.2

// softmaxArgs is the assembly's view of HeadSoftmax; gen/heads has the offsets. The first list's
// values stand first in each array.
type softmaxArgs struct {
	src, own, dst, weights *float32 // own: scores of destinations as sources
	alpha, alphaSelf       *float32
	largest, inverse       *float32
	dot, dotSelf, dDst     *float32
	list, counts           *uint32
	left                   int64
	stride, heads, sources int64 // bytes, heads of the call
	loops                  *float32
}

const (
	_ = -(unsafe.Offsetof(softmaxArgs{}.dot) ^ 64)
	_ = -(unsafe.Offsetof(softmaxArgs{}.left) ^ 104)
	_ = -(unsafe.Offsetof(softmaxArgs{}.sources) ^ 128)
	_ = -(unsafe.Offsetof(softmaxArgs{}.loops) ^ 136)
)

// Exp is e^x for x <= 0 or NaN, within a unit in the last place from -87 on. Below -87 it is
// e^-87 = 2·10^-38.
func Exp(x float32) float32 {
	p, s := down(x)
	return float32(p*s) + s
}

func leaky(v float32) float32 { return max(v, leakySlope*v) }

// Softmax computes Alpha, AlphaSelf, Largest and Inverse of destinations from row on. counts has
// the number of edges of each; they stand one behind the other in list from lo on. Softmax panics
// on a source that is not there.
func (l Level) Softmax(s *HeadSoftmax, row int, list []uint32, lo int, counts []uint32) {
	s.run(l, softmaxAVX2, softmaxPartAVX2, s.forward, row, list, lo, counts)
}

// SoftmaxSlope turns Dot and DotSelf into the gradients by the scores before LeakyReLU, whose sums
// are DDst, and computes Alpha and AlphaSelf once more, from Largest and Inverse.
func (l Level) SoftmaxSlope(s *HeadSoftmax, row int, list []uint32, lo int, counts []uint32) {
	s.run(l, softmaxSlopeAVX2, softmaxSlopePartAVX2, s.backward, row, list, lo, counts)
}

func (s *HeadSoftmax) run(l Level, whole, part func(*byte) bool,
	one func(row, lo, k int, list []uint32), row int, list []uint32, lo int, counts []uint32) {
	edges, heads := 0, s.Heads
	for _, n := range counts {
		edges += int(n)
	}
	list = list[lo : lo+edges]
	if l < AVX2 {
		for _, n := range counts {
			for k := range heads {
				one(row, lo, k, list[:n])
			}
			list, lo, row = list[n:], lo+int(n), row+1
		}
		return
	}
	if len(counts) == 0 {
		return
	}
	const lanes = 8
	for k := 0; k < heads; k += lanes {
		rows := func(v []float32) *float32 {
			if v == nil {
				return nil
			}
			return &v[row*heads : (row+len(counts))*heads][k]
		}
		ofEdges := func(v []float32) *float32 {
			if edges == 0 || v == nil {
				return nil
			}
			return &v[lo*heads : (lo+edges)*heads][k]
		}
		a := softmaxArgs{src: &s.Src[k], own: rows(s.Src), dst: rows(s.Dst),
			weights: unsafe.SliceData(s.Weights), alpha: ofEdges(s.Alpha),
			alphaSelf: rows(s.AlphaSelf), largest: rows(s.Largest), inverse: rows(s.Inverse),
			dot: ofEdges(s.Dot), dotSelf: rows(s.DotSelf), dDst: rows(s.DDst),
			list: unsafe.SliceData(list), counts: &counts[0], left: int64(len(counts)),
			stride: int64(4 * heads), heads: int64(min(lanes, heads-k)),
			sources: int64(len(s.Src) / heads)}
		if s.Loops != nil {
			a.loops = &s.Loops[row : row+len(counts)][0]
		}
		if s.Weights != nil {
			a.sources = min(a.sources, int64(len(s.Weights)))
		}
		do := whole
		if heads-k < lanes {
			do = part
		}
		if !do((*byte)(unsafe.Pointer(&a))) {
			panic("simd: Softmax: a row of a list is not there")
		}
	}
}

// score is that of an edge from source j to a destination with score own.
func (s *HeadSoftmax) score(j uint32, k int, own float32) float32 {
	return leaky(own + s.Src[int(j)*s.Heads+k])
}

// attention is the exp of a score as a share of the largest one's, times the source's weight.
func (s *HeadSoftmax) attention(score, largest float32, j uint32) float32 {
	x := Exp(score - largest)
	if s.Weights != nil {
		x *= s.Weights[j]
	}
	return x
}

// loop is the exp of the score of a destination's self loop as a share of the largest one's, times
// the loop's weight.
func (s *HeadSoftmax) loop(row int, score, largest float32) float32 {
	x := Exp(score - largest)
	if s.Loops != nil {
		x *= s.Loops[row]
	}
	return x
}

// forward is Softmax of one destination and head, in Go.
func (s *HeadSoftmax) forward(row, lo, k int, list []uint32) {
	pos, alpha := row*s.Heads+k, s.Alpha[lo*s.Heads:]
	own := s.Dst[pos]
	self := leaky(own + s.Src[pos])
	largest := self
	for _, j := range list {
		if v := s.score(j, k, own); v > largest {
			largest = v
		}
	}
	first := s.loop(row, self, largest)
	sum := first
	for e, j := range list {
		x := s.attention(s.score(j, k, own), largest, j)
		sum += x
		alpha[e*s.Heads+k] = x
	}
	inverse := 1 / sum
	s.Largest[pos], s.Inverse[pos], s.AlphaSelf[pos] = largest, inverse, first*inverse
	for e := range list {
		alpha[e*s.Heads+k] *= inverse
	}
}

// backward is SoftmaxSlope of one destination and head, in Go.
func (s *HeadSoftmax) backward(row, lo, k int, list []uint32) {
	pos, alpha, dot := row*s.Heads+k, s.Alpha[lo*s.Heads:], s.Dot[lo*s.Heads:]
	own, largest, inverse := s.Dst[pos], s.Largest[pos], s.Inverse[pos]
	self := leaky(own + s.Src[pos])
	mine := s.loop(row, self, largest) * inverse
	mean := float32(mine * s.DotSelf[pos])
	for e, j := range list {
		a := s.attention(s.score(j, k, own), largest, j) * inverse
		mean += float32(a * dot[e*s.Heads+k])
		alpha[e*s.Heads+k] = a
	}
	slope := func(score float32) float32 {
		if score > 0 {
			return 1
		}
		return leakySlope
	}
	sum := float32(mine*(s.DotSelf[pos]-mean)) * slope(self)
	s.DotSelf[pos], s.AlphaSelf[pos] = sum, mine
	for e, j := range list {
		d := &dot[e*s.Heads+k]
		g := float32(float32(alpha[e*s.Heads+k]*(*d-mean)) * slope(s.score(j, k, own)))
		sum += g
		*d = g
	}
	s.DDst[pos] = sum
}
