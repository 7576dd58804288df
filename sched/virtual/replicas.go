package virtual

import (
	"helios/internal/des"
	"helios/sched/plan"
	"helios/sched/report"
)

// Several devices that train, on the virtual clock, as package sched has them (replicas.go there).
// The first device samples, reads, caches, and adds the gradients; the others compute. A replica
// takes its next mini-batch over, buffer after buffer, and then computes its gradient, which goes
// back; the sum of a step goes to each replica, one after the other, and all apply it. Copies go
// through pinned memory of the CPU in pieces of bridgePiece. On their way out they share the first
// device's link with what else leaves it, on their way in with what the SSDs and the CPU send
// there. Each other device has a link, and memory, of its own. A profile without pcie.peer_gbs is
// of devices that have one memory: nothing is copied, and replicas share the SMs.

// bridgePiece and leafPlaces are those of package sched: how much of a copy is in pinned memory at
// a time, and how many mini-batches of a replica are under way.
const (
	bridgePiece = 4 << 20
	leafPlaces  = 2
)

// vreplica is a device that trains.
type vreplica struct {
	train  *vstream
	apart  bool // it has memory of its own
	queue  []*Batch
	busy   bool
	flying int // mini-batches that are not counted
}

// openReplicas makes the devices that train, where there are several.
func (m *Machine) openReplicas(n int, train plan.OpStream) {
	if n == 1 {
		return
	}
	rate := m.Model.Profile.PCIe.PeerGBs.Value
	if rate > 0 {
		m.Gpu.Egress = des.NewLink(m.Sim, m.Model.Profile.PCIe.UVAGBs.Value*1e9, 0)
	}
	m.sumS = m.Gpu.stream(train.Priority, train.SMs)
	m.replicas = []*vreplica{{train: m.trainS}}
	for len(m.replicas) < n {
		gpu := m.Gpu
		if rate > 0 {
			gpu = newVGPU(m.Model)
		}
		m.replicas = append(m.replicas, &vreplica{train: gpu.stream(train.Priority, train.SMs),
			apart: rate > 0})
	}
}

// CopySeconds is how long what left for other devices has kept the first one's link busy.
func (m *Machine) CopySeconds() float64 {
	if len(m.replicas) < 2 || !m.replicas[1].apart {
		return 0
	}
	return float64(m.Gpu.Egress.BusyNS()) / 1e9
}

// leave copies buffers from the first device to another one.
func (m *Machine) leave(sizes []int64, done func()) {
	if len(sizes) == 0 {
		done()
		return
	}
	p, left, last := &m.Model.Profile.PCIe, sizes[0], int64(0)
	var piece func()
	piece = func() {
		if left == 0 {
			// The last piece goes on to the other device.
			m.Sim.After(p.CopyNS.NS()+int64(float64(last)/p.PeerGBs.Value),
				func() { m.leave(sizes[1:], done) })
			return
		}
		last = min(left, bridgePiece)
		left -= last
		m.Sim.After(p.CopyNS.NS(), func() {
			m.Model.HostMem.Send(2 * last)
			wire := int64(float64(last) * p.UVAGBs.Value / p.PeerGBs.Value)
			m.Sim.At(m.Gpu.Egress.Send(wire), piece)
		})
	}
	piece()
}

// arrive copies so many bytes from another device to the first.
func (m *Machine) arrive(bytes int64, done func()) {
	p, left := &m.Model.Profile.PCIe, bytes
	var piece func()
	piece = func() {
		if left == 0 {
			done()
			return
		}
		n := min(left, bridgePiece)
		left -= n
		m.Sim.After(p.CopyNS.NS(), func() {
			m.Model.HostMem.Send(2 * n)
			wire := int64(float64(n) * p.GPU.RawGBs.Value / p.PeerGBs.Value)
			m.Sim.At(m.Model.Ingress.Send(wire), piece)
		})
	}
	first := float64(min(left, bridgePiece)) / p.PeerGBs.Value // leaves the other device
	m.Sim.After(p.CopyNS.NS()+int64(first), piece)
}

// vfleet is the replicas at work in a pass.
type vfleet struct {
	p       *Pass
	sent    int  // of the mini-batches in flight, the oldest
	closing bool // the last of a step is sent, and the step is not applied
	landing bool
}

// of is the replica of a mini-batch.
func (f *vfleet) of(b *Batch) *vreplica {
	at, _ := f.p.shard(b.Index)
	return f.p.replicas[at%len(f.p.replicas)]
}

// send hands mini-batches that are whole to their replicas, in order, up to the end of a step.
func (f *vfleet) send() {
	p := f.p
	for p.err == nil && !f.closing && f.sent < len(p.flying) {
		b := p.flying[f.sent]
		r := f.of(b)
		if !b.whole || b.open > 0 || r.flying == leafPlaces {
			return
		}
		if f.sent == 0 {
			p.Waited += p.Sim.Now() - p.idle
		}
		at, of := p.shard(b.Index)
		f.closing = at == of-1
		f.sent++
		r.flying++
		r.queue = append(r.queue, b)
		f.work(r)
	}
}

// work has a replica take up its next mini-batch.
func (f *vfleet) work(r *vreplica) {
	if r.busy || len(r.queue) == 0 {
		return
	}
	p, b := f.p, r.queue[0]
	r.queue, r.busy = r.queue[1:], true
	begin := p.Sim.Now()
	train := func() {
		r.train.launch(append(p.Work.Model(b.Shape, true), p.Work.Weigh()...), nil,
			func(now int64) {
				p.span(report.TrackTrain, "T", begin, now, b, b.HopEnd[len(b.HopEnd)-1])
				r.busy, b.trained = false, true
				f.land()
				f.work(r)
			})
	}
	if r.apart {
		p.leave(p.Work.Buffers(b.Shape), train)
		return
	}
	train()
}

// land adds the oldest mini-batch's gradient to those of its step, once it is there.
func (f *vfleet) land() {
	p := f.p
	if f.landing || len(p.flying) == 0 || !p.flying[0].trained {
		return
	}
	f.landing = true
	b := p.flying[0]
	r := f.of(b)
	at, of := p.shard(b.Index)
	add := func() {
		p.sumS.launch(p.Work.Joins(at, of), nil, func(int64) {
			if at < of-1 {
				f.landed(b, r)
				return
			}
			f.apply(func() {
				f.closing = false
				f.landed(b, r)
			})
		})
	}
	if r.apart {
		p.arrive(p.Work.GradientBytes(), add)
		return
	}
	add()
}

// landed counts a mini-batch.
func (f *vfleet) landed(b *Batch, r *vreplica) {
	p := f.p
	f.landing = false
	f.sent--
	r.flying--
	if f.sent == 0 {
		p.idle = p.Sim.Now()
	}
	p.counted(b)
	f.send()
	f.land()
}

// apply brings the sum to all replicas and has them apply it.
func (f *vfleet) apply(done func()) {
	p := f.p
	var sums []int64 // that leave
	for _, r := range p.replicas {
		if r.apart {
			sums = append(sums, p.Work.GradientBytes())
		}
	}
	p.leave(sums, func() {
		open := len(p.replicas)
		for _, r := range p.replicas {
			r.train.launch(p.Work.Adam(), nil, func(int64) {
				if open--; open == 0 {
					done()
				}
			})
		}
	})
}
