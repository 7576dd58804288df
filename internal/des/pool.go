package des

// Pool is a number of equal servers (SMs, CPU threads). A request waits in line, also
// behind one for more than are free now: a large request is not starved by small ones.
type Pool struct {
	sim   *Sim
	size  int
	free  int
	line  []request
	first int
	busy  int64 // server × ns, up to changed
	since int64
}

type request struct {
	n  int
	fn func()
}

// NewPool makes a pool of n servers.
func NewPool(sim *Sim, n int) *Pool { return &Pool{sim: sim, size: n, free: n} }

// Size is the number of servers.
func (p *Pool) Size() int { return p.size }

// Free is the number of servers that nobody has.
func (p *Pool) Free() int { return p.free }

// Waiting is the number of requests in line.
func (p *Pool) Waiting() int { return len(p.line) - p.first }

// Acquire calls fn, in an event of its own, once n servers are the caller's. More than there are
// means all of them. It returns how many Release must give back.
func (p *Pool) Acquire(n int, fn func()) int {
	n = min(max(n, 1), p.size)
	p.line = append(p.line, request{n, fn})
	p.grant()
	return n
}

// Release gives n servers back.
func (p *Pool) Release(n int) {
	p.account()
	p.free += n
	if p.free > p.size {
		panic("des: a pool got back more servers than it gave")
	}
	p.grant()
}

// Do holds n servers for d ns and then calls done with the time at which it got them.
func (p *Pool) Do(n int, d int64, done func(startNS int64)) {
	n = min(max(n, 1), p.size)
	p.Acquire(n, func() {
		start := p.sim.now
		p.sim.After(d, func() {
			p.Release(n)
			done(start)
		})
	})
}

// BusyNS is the servers' busy time so far: servers × ns.
func (p *Pool) BusyNS() int64 {
	p.account()
	return p.busy
}

func (p *Pool) account() {
	p.busy += int64(p.size-p.free) * (p.sim.now - p.since)
	p.since = p.sim.now
}

func (p *Pool) grant() {
	for p.first < len(p.line) && p.line[p.first].n <= p.free {
		r := p.line[p.first]
		p.line[p.first] = request{}
		p.first++
		p.account()
		p.free -= r.n
		p.sim.At(p.sim.now, r.fn)
	}
	if p.first == len(p.line) {
		p.line, p.first = p.line[:0], 0
	} else if p.first > 64 && p.first > len(p.line)/2 {
		p.line = append(p.line[:0], p.line[p.first:]...)
		p.first = 0
	}
}
