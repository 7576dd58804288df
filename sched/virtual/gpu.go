package virtual

import (
	"math"
	"slices"

	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/hardware"
	"helios/sched/cost"
)

// GPU shares the modelled GPU between the kernels that run at once.
//
//   - SMs go by stream priority; streams of one priority get shares by what they want, and what they
//     want is their SM budget, or all. So a kernel on k of n SMs runs at the roofline of k, and budgets
//     that together exceed the GPU slow the less urgent kernels down. SMs of the I/O kernels are taken
//     off first while reads are in flight.
//   - Kernels that together want more of the GPU's memory than there is get it in proportion.
//   - Reads of the CPU's memory go over the link into the GPU, which the SSDs' data takes too. A kernel
//     ends when both its work and its reads are done; one that only waits for reads holds no SMs, as its
//     few warps leave room for other kernels' blocks.
type GPU struct {
	sim  *des.Sim
	m    *iosim.Machine
	g    *hardware.GPU
	io   func() float64 // SMs that the I/O kernels hold now
	jobs []*vjob        // computing
	last int64          // up to when progress is accounted
	gen  uint64         // of the latest plan
	// Egress takes what kernels write to the CPU's memory; nil where nobody does.
	Egress *des.Link
}

func newVGPU(m *iosim.Machine) *GPU {
	return &GPU{sim: m.Sim, m: m, g: &m.Profile.GPU, io: func() float64 { return 0 }}
}

// vstream runs jobs in order.
type vstream struct {
	gpu   *GPU
	prio  int
	sms   int     // budget; 0: all
	busy  float64 // ns in which its kernels ran, as far as they had the SMs that they wanted
	queue []*vjob
	ends  int64 // when the latest job ended
	used  bool
}

// vjob is kernels that follow each other on a stream.
type vjob struct {
	stream  *vstream
	kernels []cost.Kernel
	ready   int64 // when its launch has reached the GPU
	begin   func(now int64)
	done    func(now int64)

	left      float64 // share of the current kernel's work that is not done
	rate      float64 // of that per ns
	got       float64 // share of the SMs it wants
	parts     int     // of the current kernel that are not done: work, reads
	unread    int64   // bytes of its reads, while they have not begun
	reading   bool
	worked    int64 // when the work ended
	nextIndex int
}

func (g *GPU) stream(prio, sms int) *vstream { return &vstream{gpu: g, prio: prio, sms: sms} }

// launch enqueues kernels. begin is called when the first of them runs, done when the host, or what
// waits for the stream, knows that the last has ended; each may be nil.
func (s *vstream) launch(kernels []cost.Kernel, begin, done func(now int64)) {
	j := &vjob{stream: s, kernels: kernels, ready: s.gpu.sim.Now() + s.gpu.g.OpLaunchNS.NS(),
		begin: begin, done: done}
	s.queue = append(s.queue, j)
	if len(s.queue) == 1 {
		s.start()
	}
}

// start begins the stream's first job.
func (s *vstream) start() {
	j := s.queue[0]
	begin := j.ready
	if s.used {
		begin = max(begin, s.ends+s.gpu.g.GapNS.NS())
	}
	s.gpu.sim.At(begin, func() {
		if j.begin != nil {
			j.begin(s.gpu.sim.Now())
		}
		j.next()
	})
}

// next runs the job's next kernel, or ends the job.
func (j *vjob) next() {
	s := j.stream
	g := s.gpu
	if j.nextIndex == len(j.kernels) {
		s.ends, s.used = g.sim.Now(), true
		s.queue = s.queue[1:]
		if j.done != nil {
			g.sim.After(g.g.TeardownNS.NS(), func() { j.done(g.sim.Now()) })
		}
		if len(s.queue) > 0 {
			s.start()
		}
		return
	}
	k := &j.kernels[j.nextIndex]
	j.parts, j.unread = 1, k.UVA
	if k.UVA > 0 {
		j.parts = 2
	}
	if j.alone(g.g.SMs.Int()) == 0 {
		j.worked = g.sim.Now()
		j.read()
		j.part()
		return
	}
	g.account()
	j.left = 1
	g.jobs = append(g.jobs, j)
	g.plan()
}

// read starts the current kernel's reads of the CPU's memory, once it runs.
func (j *vjob) read() {
	if j.unread == 0 {
		return
	}
	g := j.stream.gpu
	bytes := j.unread
	j.unread, j.reading = 0, true
	g.uva(bytes, func() {
		g.account()
		j.reading = false
		if j.parts == 1 { // the work was done before: the kernel waited for its reads
			j.stream.busy += float64(g.sim.Now() - j.worked)
		}
		j.part()
	})
}

// part ends one of the current kernel's parts.
func (j *vjob) part() {
	if j.parts--; j.parts > 0 {
		return
	}
	j.nextIndex++
	g := j.stream.gpu
	if j.nextIndex == len(j.kernels) {
		j.next()
		return
	}
	g.sim.After(g.g.GapNS.NS(), j.next)
}

// alone returns how long the current kernel works on so many SMs with nothing beside it, in ns.
func (j *vjob) alone(sms int) int64 {
	k := &j.kernels[j.nextIndex]
	if k.Op == nil {
		return 0
	}
	return j.stream.gpu.g.KernelNS(*k.Op, k.Work, sms)
}

// account brings all progress up to now.
func (g *GPU) account() {
	dt := float64(g.sim.Now() - g.last)
	g.last = g.sim.Now()
	for _, j := range g.jobs {
		j.left -= j.rate * dt
		if j.reading {
			j.stream.busy += dt
		} else {
			j.stream.busy += j.got * dt
		}
	}
}

// Changed is called when the I/O kernels come or go.
func (g *GPU) Changed() {
	g.account()
	g.plan()
}

// plan shares the GPU anew and asks to be called when the first kernel ends.
func (g *GPU) plan() {
	all := g.g.SMs.Value
	free := max(all-g.io(), 0)
	wants := func(j *vjob) float64 {
		if j.stream.sms > 0 {
			return min(float64(j.stream.sms), all)
		}
		return all
	}
	order := slices.Clone(g.jobs)
	slices.SortStableFunc(order, func(a, b *vjob) int { return b.stream.prio - a.stream.prio })
	memory := 0.0 // time that the memory would need for each ns
	shares := make([]float64, len(order))
	for i := 0; i < len(order); {
		end, sum := i, 0.0
		for ; end < len(order) && order[end].stream.prio == order[i].stream.prio; end++ {
			sum += wants(order[end])
		}
		scale := 1.0
		if sum > free {
			scale = free / sum
		}
		for ; i < end; i++ {
			j := order[i]
			sms := wants(j) * scale
			free -= sms
			j.got, j.rate = scale, 0
			if sms < 0.5 { // not one SM
				j.got = 0
				continue
			}
			n := max(int(math.Round(sms)), 1)
			t := float64(j.alone(n))
			j.rate = 1 / t
			k := &j.kernels[j.nextIndex]
			if k.Work.Bytes > 0 && k.Op.Memory.Value > 0 {
				shares[i] = min(float64(k.Work.Bytes)/(g.g.HBMGBs.Value*k.Op.Memory.Value)/t, 1)
				memory += shares[i]
			}
		}
	}
	first := int64(math.MaxInt64)
	for i, j := range order {
		if memory > 1 && shares[i] > 0 {
			j.rate /= memory
		}
		if j.rate > 0 {
			j.read()
			first = min(first, g.sim.Now()+int64(math.Ceil(max(j.left, 0)/j.rate)))
		}
	}
	g.gen++
	if first == math.MaxInt64 {
		return
	}
	gen := g.gen
	g.sim.At(first, func() {
		if gen == g.gen {
			g.ended()
		}
	})
}

// ended takes out the kernels whose work is done, up to the rounding of a nanosecond.
func (g *GPU) ended() {
	g.account()
	var over []*vjob
	g.jobs = slices.DeleteFunc(g.jobs, func(j *vjob) bool {
		if j.left > j.rate*0.5 {
			return false
		}
		over = append(over, j)
		return true
	})
	g.plan()
	for _, j := range over {
		j.worked = g.sim.Now()
		j.part()
	}
}

// Pieces in which kernels' reads of the CPU's memory go over the link.
const (
	uvaLeast = 64 << 10
	uvaMost  = 1 << 20
)

// uva has a kernel read bytes of the CPU's memory. They take the link in pieces as long as what the
// SSDs have in line before them, so that both get half of it when both want it all, as from an
// arbiter that takes turns.
func (g *GPU) uva(bytes int64, done func()) {
	p := &g.m.Profile.PCIe
	var send func()
	send = func() {
		if bytes == 0 {
			g.sim.After(g.g.HostWayNS.NS(), done)
			return
		}
		piece := int64(float64(g.m.Ingress.Backlog()) * p.UVAGBs.Value)
		piece = min(max(piece, uvaLeast), uvaMost, bytes)
		bytes -= piece
		g.m.HostMem.Send(piece)
		g.sim.At(g.m.Ingress.Send(int64(float64(piece)*p.GPU.RawGBs.Value/p.UVAGBs.Value)), send)
	}
	send()
}
