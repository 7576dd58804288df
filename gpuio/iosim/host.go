package iosim

import (
	"helios/internal/des"
	"helios/internal/errs"
)

// hostEngine plays the stacks that the CPU manages: cpu (threads with io_uring that read with
// O_DIRECT, gather the rows and have the copy engine bring them to the GPU) and mmap (threads that
// take page faults, one read each).
type hostEngine struct {
	m     *Machine
	s     *Stack
	mmap  bool
	cores *des.Pool
	half  float64 // CPU time of a read before and after the SSD has it
	depth int     // reads outstanding per SSD; mmap: threads
	room  []int
	pend  [][]segment // by SSD
	turn  int
	came  []uint32 // arrived, not dealt with
	busy  int      // cores that deal with them
}

// chunk is the number of reads that a thread submits or reaps together, as a ring does.
const chunk = 8

func (s *Stack) newHost(c *Config) error {
	cores := s.m.CPU.Size()
	if c.Threads == 0 {
		c.Threads = cores
	}
	if c.Threads > 1024 {
		return errs.New(errs.Usage, "%d threads: choose 1 to 1024", c.Threads)
	}
	cpu := &s.m.Profile.CPU
	h := &hostEngine{m: s.m, s: s, mmap: s.kind.PageCache, cores: s.m.CPU, depth: c.Depth,
		half: cpu.UringNS.Value / 2, pend: make([][]segment, s.m.SSDs())}
	if c.Threads < cores {
		h.cores = des.NewPool(s.m.Sim, c.Threads)
	}
	n := s.m.SSDs()
	if h.mmap {
		h.half = cpu.FaultNS.Value / 2
		n, h.depth = 1, c.Threads
	}
	for range n {
		h.room = append(h.room, h.depth)
	}
	s.dev = s.newReads(c.Seed, true, h.arrive)
	s.impl = h
	return nil
}

func (h *hostEngine) start(x *set) {
	for i, n := range x.per {
		if n > 0 {
			h.pend[i] = append(h.pend[i], segment{x, n})
		}
	}
	x.times.SubmitEndNS = h.m.Sim.Now()
	h.pump()
}

// pump submits as long as there are reads and room for them.
func (h *hostEngine) pump() {
	for idle := 0; idle < len(h.pend); {
		ssd := h.turn
		h.turn = (h.turn + 1) % len(h.pend)
		room, limit := &h.room[min(ssd, len(h.room)-1)], chunk
		if h.mmap {
			room, limit = &h.room[0], 1
		}
		if *room == 0 || len(h.pend[ssd]) == 0 {
			idle++
			continue
		}
		idle = 0
		p := &h.pend[ssd][0]
		x := p.set
		n := int(min(int64(min(*room, limit)), p.left))
		*room -= n
		if p.left -= int64(n); p.left == 0 {
			h.pend[ssd] = append(h.pend[ssd][:0], h.pend[ssd][1:]...)
		}
		h.cores.Do(1, int64(h.half*float64(n)+0.5), func(start int64) {
			ids := make([]uint32, n)
			for i := range ids {
				ids[i] = h.s.dev.make(x, int32(ssd), 0, start)
			}
			h.s.dev.ring(h.m.Sim.Now(), ids)
			h.s.st.SQDoorbells++
		})
	}
}

// arrive takes a completion. A thread deals with what has come, some at a time.
func (h *hostEngine) arrive(id uint32) {
	h.came = append(h.came, id)
	if h.busy < h.cores.Size() {
		h.busy++
		h.cores.Acquire(1, h.reap)
	}
}

// reap has a thread take some completions and put their rows in place.
func (h *hostEngine) reap() {
	n := min(len(h.came), chunk)
	if n == 0 {
		h.busy--
		h.cores.Release(1)
		return
	}
	ids := append([]uint32(nil), h.came[:n]...)
	h.came = append(h.came[:0], h.came[n:]...)
	ns := 0.0
	for _, id := range ids {
		row := h.s.dev.items[id].set.row
		ns += h.half + float64(row)/h.m.Profile.CPU.GatherGBs.Value
		h.m.HostMem.Send(2 * row)
	}
	h.m.Sim.After(int64(ns+0.5), func() {
		now := h.m.Sim.Now()
		for _, id := range ids {
			r := &h.s.dev.items[id]
			x := r.set
			h.s.completed(r, now)
			h.room[min(int(r.ssd), len(h.room)-1)]++
			h.s.dev.drop(id)
			if x.left--; x.left == 0 {
				end := func() { h.s.finish(x, h.m.Sim.Now()) }
				if h.s.c.ToHost {
					end()
				} else {
					h.m.Copy(x.total*x.row, end)
				}
			}
		}
		h.s.st.CQDoorbells++
		// In line again, behind the submissions that now have room.
		h.busy--
		h.cores.Release(1)
		h.pump()
		if len(h.came) > 0 && h.busy < h.cores.Size() {
			h.busy++
			h.cores.Acquire(1, h.reap)
		}
	})
}
