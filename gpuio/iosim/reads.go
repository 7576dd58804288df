package iosim

import "helios/internal/ssdmodel"

// reads are the commands that SSDs have, from the doorbell until data and completion entry have
// arrived.
//
// The model's latency is that of a command at an otherwise idle host, transfer included. So a
// command's data begins to leave so early that it would be over then; it is later where the SSD's
// link or the GPU's is taken.
type reads struct {
	m       *Machine
	servers []*ssdmodel.Server
	toHost  bool // queues are in the CPU's memory, and the data comes there first
	// The data comes there, wherever the queues are.
	dataToHost bool
	arrive     func(id uint32) // data and completion entry are there
	// from the doorbell's store to the SSD having the command, beyond the model's latency
	delay int64
	serve func(bytes int64) int64

	items   []read
	free    []uint32
	out     int        // commands that the SSDs have
	batches [][]uint32 // doorbells under way
	spare   []uint32   // free entries of batches
}

// wiring holds what the commands of a set take of the links.
type wiring struct{ ssd, last, early int64 }

type read struct {
	set   *set
	start int64 // ns: the command was made
	ssd   int32
	owner int32 // queue, or thread
}

// Events of a command, the upper half of an event's argument.
const (
	atSSD    = iota << 32 // a doorbell's batch is at the SSD
	leaving               // its data begins to leave
	crossing              // its data is through the SSD's link
	arriving              // its data and completion entry are there
	idMask   = 1<<32 - 1
)

func (s *Stack) newReads(seed uint64, toHost bool, arrive func(uint32)) *reads {
	m := s.m
	d := &reads{m: m, toHost: toHost, arrive: arrive}
	p := &m.Profile.PCIe
	if !toHost {
		d.delay = max(p.DoorbellNS.NS()+p.FetchNS.NS()-p.IncludedNS.NS(), 0)
	}
	for i := range m.SSDs() {
		d.servers = append(d.servers, m.models[i].NewServer(seed*MaxSSDs+uint64(i)))
	}
	if io := &m.Profile.GPU.IO; m.slots != nil && !toHost {
		d.serve = func(bytes int64) int64 {
			ns := m.Profile.GPU.Time(io.Serve)
			if io.ServeGBs.Value > 0 {
				ns += float64(bytes) / io.ServeGBs.Value
			}
			return int64(ns + 0.5)
		}
	}
	return d
}

func (d *reads) wiring(bytes int64) wiring {
	p := &d.m.Profile.PCIe
	w := wiring{ssd: p.SSD.WireBytes(bytes)}
	if d.dataToHost {
		w.last = bytes
	} else {
		w.last = p.GPU.WireBytes(bytes) + d.m.cqeWire()
	}
	w.early = d.m.links[0].Time(w.ssd) + d.last().Time(w.last)
	return w
}

// last is the link that all SSDs share.
func (d *reads) last() link {
	if d.dataToHost {
		return d.m.HostMem
	}
	return d.m.Ingress
}

type link interface {
	Send(int64) int64
	Time(int64) int64
}

// make makes a command that ring hands to its SSD.
func (d *reads) make(x *set, ssd, owner int32, start int64) uint32 {
	r := read{set: x, start: start, ssd: ssd, owner: owner}
	if n := len(d.free); n > 0 {
		id := d.free[n-1]
		d.free = d.free[:n-1]
		d.items[id] = r
		return id
	}
	d.items = append(d.items, r)
	return uint32(len(d.items) - 1)
}

// drop ends a command, whose id may be used again.
func (d *reads) drop(id uint32) {
	d.items[id].set = nil
	d.free = append(d.free, id)
}

// ring tells an SSD at time t of commands, all its own. The slice stays the caller's.
func (d *reads) ring(t int64, ids []uint32) {
	var b uint32
	if n := len(d.spare); n > 0 {
		b = d.spare[n-1]
		d.spare = d.spare[:n-1]
	} else {
		b = uint32(len(d.batches))
		d.batches = append(d.batches, nil)
	}
	d.batches[b] = append(d.batches[b][:0], ids...)
	d.out += len(ids)
	if d.serve == nil {
		d.m.Sim.Call(t+d.delay, d, atSSD|uint64(b))
		return
	}
	work := int64(0)
	for _, id := range ids {
		work += d.serve(d.items[id].set.bytes)
	}
	d.m.Sim.At(t+d.delay, func() {
		d.m.slots.Do(1, work, func(int64) { d.Event(atSSD | uint64(b)) })
	})
}

// Event implements des.Handler.
func (d *reads) Event(arg uint64) {
	id := uint32(arg & idMask)
	now := d.m.Sim.Now()
	switch arg &^ idMask {
	case atSSD:
		for _, id := range d.batches[id] {
			r := &d.items[id]
			done := d.servers[r.ssd].Admit(now, ssdmodel.Read, r.set.bytes)
			d.m.Sim.Call(done-r.set.wires.early, d, leaving|uint64(id))
		}
		d.spare = append(d.spare, id)
	case leaving:
		r := &d.items[id]
		d.m.Sim.Call(d.m.links[r.ssd].Send(r.set.wires.ssd), d, crossing|uint64(id))
	case crossing:
		d.m.Sim.Call(d.last().Send(d.items[id].set.wires.last), d, arriving|uint64(id))
	case arriving:
		d.out--
		d.arrive(id)
	}
}
