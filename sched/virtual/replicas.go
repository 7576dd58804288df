package virtual

import (
	"helios/internal/des"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/walk"
)

// Several devices that train, on the virtual clock, as package sched has them (replicas.go there).
// The first device samples, reads, caches, and adds the gradients; the others compute. A replica
// takes its next mini-batch over, buffer after buffer, and then computes its gradient, which goes
// back; the sum of a step goes to each replica, one after the other, and all apply it. Copies go
// through pinned memory of the CPU in pieces of bridgePiece. On their way out they share the first
// device's link with what else leaves it, on their way in with what the SSDs and the CPU send
// there. Each other device has a link, and memory, of its own. A profile without pcie.peer_gbs is
// of devices that have one memory: nothing is copied, and replicas share the SMs.

// bridgePiece is that of package sched: how much of a copy is in pinned memory at a time.
const bridgePiece = 4 << 20

// vreplica is a device that trains.
type vreplica struct {
	train *vstream
	apart bool // it has memory of its own
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

// CopySeconds is the time in which copies to other devices kept the first one's link busy.
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

// fleet is the replicas at work in a pass.
type fleet struct{ *Pass }

// startReplicas begins the stages that train.
func (p *Pass) startReplicas() {
	f := &walk.Fleet[*Batch, *Batch]{Walk: &p.walk, Trainers: fleet{p}}
	f.Start(len(p.replicas))
	p.run.Go(f.Train)
}

// Replica implements walk.Trainers.
func (p fleet) Replica(index int) (replica int, ends bool) {
	shard, of := p.shard(index)
	return shard % len(p.replicas), shard == of-1
}

// Send implements walk.Trainers.
func (p fleet) Send(b *Batch) (*Batch, error) { return b, nil }

// Gradient implements walk.Trainers.
func (p fleet) Gradient(b *Batch) {
	replica, _ := p.Replica(b.Index)
	r, begin := p.replicas[replica], p.Sim.Now()
	if r.apart {
		p.run.Run(func(done func()) { p.leave(p.Work.Buffers(b.Shape), done) })
	}
	p.run.Run(func(done func()) {
		r.train.launch(append(p.Work.Model(b.Shape, true), p.Work.Weigh()...), nil,
			func(int64) { done() })
	})
	p.span(report.TrackTrain, "T", begin, p.Sim.Now(), b, b.HopEnd[len(b.HopEnd)-1])
}

// Land implements walk.Trainers.
func (p fleet) Land(b *Batch) error {
	replica, ends := p.Replica(b.Index)
	if p.replicas[replica].apart {
		p.run.Run(func(done func()) { p.arrive(p.Work.GradientBytes(), done) })
	}
	p.run.Run(func(done func()) {
		p.sumS.launch(p.Work.Joins(p.shard(b.Index)), nil, func(int64) { done() })
	})
	if ends {
		p.run.Run(p.apply)
	}
	return nil
}

// apply brings the sum to all replicas and has them apply it.
func (p fleet) apply(done func()) {
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
