package ssdmodel

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"helios/internal/philox"
)

// streamLatency is the use that a server makes of its seed.
const streamLatency philox.Stream = 0x55D

// timing holds what a server computes with: integers, so that the same sequence of commands takes
// the same times on every architecture. Times are in picoseconds: the interval of a few million
// IOPS is too short for whole nanoseconds.
type timing struct {
	q   []uint64 // quantiles as shares of 2^32
	lat []int64  // and their latencies
	ref int64    // bytes contained in them
	// mean is that of the latencies.
	mean int64

	sizes     []int64 // IOPS caps: bytes and time per command
	intervals []int64
	refInt    int64 // the interval at ref bytes

	psPerByte float64 // exactly: ps per 2^20 bytes is perMiB
	perMiB    int64

	// stretch[d], in 1/2^16, is what the mean latency is multiplied with when d commands are
	// outstanding, so that a command takes d / curve(d) on average; none: no curve.
	stretch []uint64
	flat    uint64 // what each depth beyond the table adds: the curve is flat there
}

// checker keeps the first complaint.
type checker struct{ err error }

func (c *checker) check(ok bool, format string, a ...any) {
	if !ok && c.err == nil {
		c.err = fmt.Errorf(format, a...)
	}
}

// in is false for NaN.
func in(v, lo, hi float64) bool { return v >= lo && v <= hi }

// timing checks the figures and makes integers of them.
func (f *Ops) timing() (t timing, err error) {
	var c checker
	t.addLatency(&f.Latency, &c)
	t.addCaps(&f.IOPS, &c)
	b := &f.Bandwidth
	c.check(b.MBs == 0 || b.Source != "", "bandwidth: no source")
	c.check(b.MBs == 0 || in(b.MBs, 1e-3, 1e6),
		"bandwidth: %v MB/s; 0.001 to 1000000 are possible", b.MBs)
	f.Curve.check(&c)
	if c.err != nil {
		return t, c.err
	}
	t.mean = t.lat[0]
	if n := len(t.q); n > 1 {
		sum := 0.0
		for i := 1; i < n; i++ {
			sum += (f.Latency.Quantiles[i].Q - f.Latency.Quantiles[i-1].Q) *
				float64(t.lat[i]+t.lat[i-1]) / 2
		}
		t.mean = int64(math.Round(sum))
	}
	t.refInt = t.interval(t.ref)
	if b.MBs > 0 {
		t.psPerByte = 1e6 / b.MBs
		t.perMiB = int64(math.Round(t.psPerByte * (1 << 20)))
	}
	if len(f.Curve.Points) > 0 && t.mean > 0 {
		t.addStretch(f.Curve.Points)
	}
	return t, nil
}

// addLatency adds the quantiles.
func (t *timing) addLatency(l *Latency, c *checker) {
	check := c.check
	check(len(l.Quantiles) > 0, "latency: no quantiles")
	check(l.Source != "", "latency: no source; write where the figures are from, or \"assumed: …\"")
	check(l.Bytes >= 0 && l.Bytes <= maxBytes, "latency: of %d bytes", l.Bytes)
	for i, q := range l.Quantiles {
		check(in(q.Q, 0, 1), "latency: quantile %v is not between 0 and 1", q.Q)
		check(in(q.US, 0, maxLatencyUS), "latency: %v µs; 0 to %v are possible", q.US,
			float64(maxLatencyUS))
		if i > 0 {
			p := l.Quantiles[i-1]
			check(q.Q > p.Q && q.US >= p.US,
				"latency: quantile %v (%v µs) after %v (%v µs): they have to ascend", q.Q, q.US,
				p.Q, p.US)
		}
		t.q = append(t.q, uint64(math.Round(q.Q*(1<<32))))
		t.lat = append(t.lat, int64(math.Round(q.US*1e6)))
	}
	if n := len(l.Quantiles); n > 1 {
		check(l.Quantiles[0].Q == 0 && l.Quantiles[n-1].Q == 1,
			"latency: the quantiles go from %v to %v; they have to go from 0 to 1",
			l.Quantiles[0].Q, l.Quantiles[n-1].Q)
	}
	t.ref = l.Bytes
	if t.ref == 0 {
		t.ref = 4096
	}
}

// addCaps adds the IOPS that the front end takes.
func (t *timing) addCaps(f *IOPS, c *checker) {
	c.check(len(f.Caps) == 0 || f.Source != "", "iops: no source")
	for i, p := range f.Caps {
		c.check(p.Bytes > 0 && p.Bytes <= maxBytes, "iops: a cap for %d bytes", p.Bytes)
		c.check(in(p.IOPS, 1, maxIOPS), "iops: %v; 1 to %v are possible", p.IOPS, float64(maxIOPS))
		c.check(i == 0 || p.Bytes > f.Caps[i-1].Bytes, "iops: the sizes have to ascend")
		t.sizes = append(t.sizes, p.Bytes)
		t.intervals = append(t.intervals, int64(math.Round(1e12/p.IOPS)))
	}
}

func (f *Curve) check(c *checker) {
	c.check(len(f.Points) == 0 || f.Source != "", "curve: no source")
	for i, p := range f.Points {
		c.check(p.Depth > 0 && p.Depth <= maxDepth, "curve: depth %d; 1 to %d are possible",
			p.Depth, maxDepth)
		c.check(in(p.IOPS, 1, maxIOPS), "curve: %v IOPS; 1 to %v are possible", p.IOPS,
			float64(maxIOPS))
		c.check(i == 0 || p.Depth > f.Points[i-1].Depth && p.IOPS >= f.Points[i-1].IOPS,
			"curve: depths and IOPS have to ascend")
	}
}

// addStretch adds the factors of the mean latency by depth, between the points of a curve.
func (t *timing) addStretch(points []Point) {
	residence := func(depth int, iops float64) uint64 { // over the mean latency
		return max(1<<16, uint64(math.Round(float64(depth)/iops*1e12/float64(t.mean)*(1<<16))))
	}
	last := points[len(points)-1]
	t.stretch = make([]uint64, last.Depth+1)
	t.stretch[0] = 1 << 16
	for d, i := 1, 0; d <= last.Depth; d++ {
		for points[i].Depth < d {
			i++
		}
		p, from := points[i], Point{} // to the first point from the origin
		if i > 0 {
			from = points[i-1]
		}
		x := float64(d-from.Depth) / float64(p.Depth-from.Depth)
		t.stretch[d] = residence(d, from.IOPS+x*(p.IOPS-from.IOPS))
	}
	t.flat = uint64(math.Round(1 / last.IOPS * 1e12 / float64(t.mean) * (1 << 16)))
}

// interval is the time that a command of a size takes of the front end.
func (t *timing) interval(bytes int64) int64 {
	n := len(t.sizes)
	switch {
	case n == 0:
		return 0
	case bytes <= t.sizes[0]:
		return t.intervals[0]
	case bytes >= t.sizes[n-1]:
		return t.intervals[n-1]
	}
	i, _ := slices.BinarySearch(t.sizes, bytes)
	return t.intervals[i-1] + mulDiv(t.intervals[i]-t.intervals[i-1], bytes-t.sizes[i-1],
		t.sizes[i]-t.sizes[i-1])
}

// transfer is the time that so many bytes take of the link.
func (t *timing) transfer(bytes int64) int64 {
	if t.perMiB == 0 || bytes <= 0 {
		return 0
	}
	return mulDiv(t.perMiB, bytes, 1<<20)
}

// latency maps a uniform word to the distribution.
func (t *timing) latency(u uint32) int64 {
	if len(t.q) == 1 {
		return t.lat[0]
	}
	i := 1
	for i < len(t.q)-1 && uint64(u) >= t.q[i] { // a handful, and the first are the likely ones
		i++
	}
	return t.lat[i-1] + mulDiv(t.lat[i]-t.lat[i-1], int64(uint64(u)-t.q[i-1]),
		int64(t.q[i]-t.q[i-1]))
}

// stretchAt is the factor, in 1/2^16, at a depth for commands with that interval.
func (t *timing) stretchAt(depth int, interval int64) uint64 {
	if len(t.stretch) == 0 {
		return 1 << 16
	}
	last := len(t.stretch) - 1
	f := t.stretch[min(depth, last)]
	if depth > last {
		f = max(f, uint64(depth)*t.flat)
	}
	if interval < t.refInt { // the whole curve is higher for small commands
		f = max(1<<16, uint64(mulDiv(int64(f), interval, t.refInt)))
	}
	return f
}

// mulDiv returns a·b/c for b, c ≥ 0 and c > 0 without overflow in between.
func mulDiv(a, b, c int64) int64 {
	neg := a < 0
	if neg {
		a = -a
	}
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return math.MaxInt64 / 4 // beyond any time that a run lasts
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	if neg {
		return -int64(q)
	}
	return int64(q)
}

// Server is an SSD at work. It belongs to one goroutine at a time.
//
// A command passes the front end, which commands of all kinds share and which each occupies for
// 1/IOPS of its kind and size; then the link of its direction, for its bytes; and then takes its
// latency, in parallel with all others. Front end and link are passed in the order of arrival, so a
// command with a long latency holds nobody up and completions overtake each other. A queue-depth
// curve makes the latency longer, waiting at the front end included.
type Server struct {
	m     *Model
	now   int64 // ns; arrivals never go back
	front int64 // ps: when the front end is free
	link  [numOps]int64

	done []int64 // ns: min-heap of the completions to come

	key   [2]uint32
	draws uint64
	block [4]uint32
}

// NewServer returns an idle SSD. The seed decides the latencies that it draws.
func (m *Model) NewServer(seed uint64) *Server {
	return &Server{m: m, key: philox.Key(seed, streamLatency)}
}

// Admit takes a command that arrives at a time and returns the time of its completion, which is not
// before it. Times are nanoseconds on any clock; one before that of the last command counts as
// that. The same sequence of calls gives the same times.
func (s *Server) Admit(nowNS int64, op Op, bytes int64) (doneNS int64) {
	depth := s.Outstanding(nowNS) + 1
	t := &s.m.ops[op]
	now := s.now * 1000
	interval := t.interval(bytes)
	start := max(now, s.front)
	s.front = start + interval
	if x := t.transfer(bytes); x > 0 {
		start = max(start, s.link[op])
		s.link[op] = start + x
	}
	l := t.latency(s.draw())
	end := start + l
	if f := t.stretchAt(depth, interval); f > 1<<16 {
		// The mean is stretched and the spread stays: waiting in a queue adds to a command's own
		// time.
		end = max(end, now+l+mulDiv(t.mean, int64(f-1<<16), 1<<16))
	}
	end += t.transfer(bytes - t.ref)
	done := (end + 999) / 1000
	s.push(done)
	return done
}

// Outstanding returns how many commands are admitted and not complete at a time.
func (s *Server) Outstanding(nowNS int64) int {
	s.now = max(s.now, nowNS)
	for len(s.done) > 0 && s.done[0] <= s.now {
		s.pop()
	}
	return len(s.done)
}

func (s *Server) draw() uint32 {
	i := s.draws & 3
	if i == 0 {
		n := s.draws >> 2
		s.block = philox.Block(s.key, [4]uint32{uint32(n), uint32(n >> 32)})
	}
	s.draws++
	return s.block[i]
}

func (s *Server) push(v int64) {
	s.done = append(s.done, v)
	h := s.done
	i := len(h) - 1
	for i > 0 {
		p := (i - 1) / 2
		if h[p] <= v {
			break
		}
		h[i] = h[p]
		i = p
	}
	h[i] = v
}

func (s *Server) pop() {
	h := s.done
	n := len(h) - 1
	v := h[n]
	s.done = h[:n]
	if n == 0 {
		return
	}
	i := 0
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && h[c+1] < h[c] {
			c++
		}
		if v <= h[c] {
			break
		}
		h[i] = h[c]
		i = c
	}
	h[i] = v
}
