package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"helios/tools/simdgen/vec"
)

// Offsets of softmaxArgs.
const (
	softSrc, softOwn, softDst, softWeights = 0, 8, 16, 24
	softAlpha, softAlphaSelf               = 32, 40
	softLargest, softInverse               = 48, 56
	softDot, softDotSelf, softDDst         = 64, 72, 80
	softList, softCounts, softLeft         = 88, 96, 104
	softStride, softHeads, softSources     = 112, 120, 128
	softLoops                              = 136
)

const leakySlope = 0.2

// softmax writes attention over lists of edges, of eight heads at a time or, unless whole, fewer.
type softmax struct {
	args   reg.Register
	counts Mem // of the destination
	loops  Mem // the destination's
	whole  bool
	mask   vec.Rest
	stride reg.GPVirtual // bytes of the heads of an edge, a source or a destination
	row    reg.GPVirtual // bytes before those of the destination

	first, last     reg.GPVirtual // its edges in the list
	firstAt         reg.GPVirtual // bytes before those of its first edge
	e, at           reg.GPVirtual // an edge in the list, and bytes before it
	own             reg.VecVirtual
	largest, invert reg.VecVirtual
}

func (s *softmax) load(m Mem) reg.VecVirtual {
	if s.whole {
		return vec.Read(m)
	}
	v := YMM()
	s.mask.Load(m, v)
	return v
}

func (s *softmax) store(v reg.VecVirtual, m Mem) {
	if s.whole {
		VMOVUPS(v, m)
	} else {
		s.mask.Store(v, m)
	}
}

// ofRow addresses the destination's part of an array, ofEdge an edge's.
func (s *softmax) ofRow(field int) Mem {
	return Mem{Base: vec.Arg(s.args, field), Index: s.row, Scale: 1}
}

func (s *softmax) ofEdge(field int) Mem {
	return Mem{Base: vec.Arg(s.args, field), Index: s.at, Scale: 1}
}

// leaky is LeakyReLU: the larger of v and its share.
func leaky(v reg.VecVirtual) reg.VecVirtual { return vec.Max(v, vec.Mul(v, vec.Num(leakySlope))) }

// self is the score of the destination's self loop.
func (s *softmax) self() reg.VecVirtual { return leaky(vec.Add(s.own, s.load(s.ofRow(softOwn)))) }

// score is that of edge e, whose source has to be there.
func (s *softmax) score() reg.VecVirtual {
	j := GP64()
	MOVL(Mem{Base: s.e}, j.As32())
	CMPQ(j, vec.Field(s.args, softSources))
	JAE(LabelRef("bad"))
	IMULQ(s.stride, j)
	return leaky(vec.Add(s.own,
		s.load(Mem{Base: vec.Arg(s.args, softSrc), Index: j, Scale: 1})))
}

// attention is e^(score - largest).
func (s *softmax) attention(score reg.VecVirtual) reg.VecVirtual {
	p, scale := vec.Down(vec.Sub(score, s.largest))
	return vec.Add(vec.Mul(p, scale), scale)
}

// weighed multiplies x by the weight of the source of edge e, where sources have one.
func (s *softmax) weighed(x reg.VecVirtual, label string) {
	w, j, weight := vec.Arg(s.args, softWeights), GP64(), YMM()
	TESTQ(w, w)
	JE(LabelRef(label))
	MOVL(Mem{Base: s.e}, j.As32())
	VBROADCASTSS(Mem{Base: w, Index: j, Scale: 4}, weight)
	VMULPS(weight, x, x)
	Label(label)
}

// looped multiplies x, the exp of the self loop's score, by the loop's weight, if loops have one.
func (s *softmax) looped(x reg.VecVirtual) reg.VecVirtual {
	w, weight := GP64(), YMM()
	MOVQ(s.loops, w)
	TESTQ(w, w)
	JE(LabelRef("loopPlain"))
	VBROADCASTSS(Mem{Base: w}, weight)
	VMULPS(weight, x, x)
	ADDQ(U8(4), s.loops)
	Label("loopPlain")
	return x
}

// edges writes a loop over the destination's edges.
func (s *softmax) edges(name string, body func()) {
	MOVQ(s.first, s.e)
	MOVQ(s.firstAt, s.at)
	JMP(LabelRef(name + "More"))
	Label(name)
	body()
	ADDQ(U8(4), s.e)
	ADDQ(s.stride, s.at)
	Label(name + "More")
	CMPQ(s.e, s.last)
	JB(LabelRef(name))
}

// lists writes a function over lists of edges, of which body does one.
func (s *softmax) lists(name, doc string, body func()) {
	if !s.whole {
		name += "Part"
	}
	name += "AVX2"
	TEXT(name, NOSPLIT, "func(a *byte) bool")
	Pragma("noescape")
	Doc(name + " is " + doc + ". It returns false where a row is not there.")
	s.args = Load(Param("a"), GP64())
	s.counts, s.loops = vec.Own(s.args, softCounts), vec.Own(s.args, softLoops)
	if !s.whole {
		s.mask = vec.AVX2().Clamped(vec.Arg(s.args, softHeads))
	}
	s.stride, s.row, s.first = vec.Arg(s.args, softStride), GP64(), vec.Arg(s.args, softList)
	s.last, s.firstAt, s.e, s.at = GP64(), GP64(), GP64(), GP64()
	XORQ(s.row, s.row)
	XORQ(s.firstAt, s.firstAt)
	Label("list")
	DECQ(vec.Field(s.args, softLeft))
	JL(LabelRef("done"))
	MOVQ(s.counts, s.last)
	MOVL(Mem{Base: s.last}, s.last.As32())
	LEAQ(Mem{Base: s.first, Index: s.last, Scale: 4}, s.last)
	ADDQ(U8(4), s.counts)
	s.own = s.load(s.ofRow(softDst))
	body()
	MOVQ(s.last, s.first)
	MOVQ(s.at, s.firstAt)
	ADDQ(s.stride, s.row)
	JMP(LabelRef("list"))
	vec.End()
}

// forward is simd's HeadSoftmax.forward.
func (s *softmax) forward() {
	self := s.self()
	s.largest = YMM()
	VMOVAPS(self, s.largest)
	s.edges("scores", func() {
		score := s.score()
		s.store(score, s.ofEdge(softAlpha))
		VMAXPS(s.largest, score, s.largest) // as it is where the score is NaN
	})
	mine, sum := s.looped(s.attention(self)), YMM()
	VMOVAPS(mine, sum)
	s.edges("exps", func() {
		x := s.attention(s.load(s.ofEdge(softAlpha)))
		s.weighed(x, "expsPlain")
		s.store(x, s.ofEdge(softAlpha))
		VADDPS(x, sum, sum)
	})
	inverse := vec.Div(vec.Read(vec.Num(1)), sum)
	s.store(s.largest, s.ofRow(softLargest))
	s.store(inverse, s.ofRow(softInverse))
	s.store(vec.Mul(mine, inverse), s.ofRow(softAlphaSelf))
	s.edges("shares", func() {
		s.store(vec.Mul(inverse, s.load(s.ofEdge(softAlpha))), s.ofEdge(softAlpha))
	})
}

// through is the gradient by a score before LeakyReLU.
func through(alpha, dot, mean, score reg.VecVirtual) reg.VecVirtual {
	slope := vec.Choose(vec.Above(score), vec.Num(1), vec.Read(vec.Num(leakySlope)))
	return vec.Mul(vec.Mul(alpha, vec.Sub(dot, mean)), slope)
}

// backward is simd's HeadSoftmax.backward.
func (s *softmax) backward() {
	s.largest, s.invert = s.load(s.ofRow(softLargest)), s.load(s.ofRow(softInverse))
	self := s.self()
	mine := vec.Mul(s.looped(s.attention(self)), s.invert)
	dot := s.load(s.ofRow(softDotSelf))
	mean := vec.Mul(mine, dot)
	s.edges("shares", func() {
		x := s.attention(s.score())
		s.weighed(x, "sharesPlain")
		a := vec.Mul(x, s.invert)
		s.store(a, s.ofEdge(softAlpha))
		VADDPS(vec.Mul(a, s.load(s.ofEdge(softDot))), mean, mean)
	})
	sum := through(mine, dot, mean, self)
	s.store(sum, s.ofRow(softDotSelf))
	s.store(mine, s.ofRow(softAlphaSelf))
	s.edges("slopes", func() {
		g := through(s.load(s.ofEdge(softAlpha)), s.load(s.ofEdge(softDot)), mean, s.score())
		s.store(g, s.ofEdge(softDot))
		VADDPS(g, sum, sum)
	})
	s.store(sum, s.ofRow(softDDst))
}

// softmaxes writes both passes.
func softmaxes() {
	for _, whole := range []bool{true, false} {
		s := &softmax{whole: whole}
		s.lists("softmax", "Softmax", s.forward)
		s.lists("softmaxSlope", "SoftmaxSlope", s.backward)
	}
}
