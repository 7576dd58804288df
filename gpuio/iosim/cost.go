package iosim

import "helios/internal/hardware"

// cost holds what a step takes a warp: time, and traffic of the link into the GPU where the
// kernels' state lies in the CPU's memory.
type cost struct{ ns, wire float64 }

func (c cost) plus(o cost) cost        { return cost{c.ns + o.ns, c.wire + o.wire} }
func (c cost) times(n float64) cost    { return cost{c.ns * n, c.wire * n} }
func (c cost) and(o cost, n int) cost  { return c.plus(o.times(float64(n))) }
func (c cost) whole() (ns, wire int64) { return int64(c.ns + 0.5), int64(c.wire + 0.5) }

// costs are a profile's, with the state where this stack has it.
type costs struct {
	push, refill, refillEnd, batch, each, ring, look, check, idle, retire, retireEach cost
	syncTake, syncLock, syncUnlock, syncScan, syncReap, syncEnd                       cost
	// of a staged command
	copyEach                 cost
	pauseMin, pauseMax, wake int64
	launch, gap, teardown    int64
}

// sector is the data in bytes that a load of the CPU's memory brings over the link.
const sector = 32

func (s *Stack) costs(c *Config) costs {
	g := &s.m.Profile.GPU
	io := &g.IO
	of := func(x hardware.Cost) cost {
		y := cost{ns: g.TimeAt(x, c.State)}
		if c.State == hardware.StateHost {
			y.wire = x.StateWays * (sector + s.m.Profile.PCIe.GPU.PacketOver.Value)
		}
		return y
	}
	out := costs{
		push: of(io.Push), refill: of(io.Refill), refillEnd: of(io.RefillEnd), batch: of(io.Batch),
		each: of(io.Each), ring: of(io.Ring),
		look: of(io.Look), check: of(io.Check), idle: of(io.Idle), retire: of(io.Retire),
		retireEach: of(io.RetireEach),
		syncTake:   of(io.SyncTake), syncLock: of(io.SyncLock), syncUnlock: of(io.SyncUnlock),
		syncScan: of(io.SyncScan), syncReap: of(io.SyncReap), syncEnd: of(io.SyncEnd),
		pauseMin: io.PauseMinNS.NS(), pauseMax: io.PauseMaxNS.NS(), wake: io.WakeNS.NS(),
		launch: g.LaunchNS.NS(), gap: g.GapNS.NS(), teardown: g.TeardownNS.NS(),
	}
	if c.StagedBytes > 0 {
		out.copyEach.ns = float64(c.StagedBytes) / io.CopyGBs.Value
	}
	return out
}

// work lets a warp be busy and then calls then. Where warps share slots it waits for one first.
// amount counts the work once it begins.
func (m *Machine) work(what func() cost, then func()) {
	do := func() int64 {
		ns, wire := what().whole()
		if wire > 0 {
			m.Ingress.Send(wire)
		}
		return ns
	}
	if m.slots == nil {
		m.Sim.After(do(), then)
		return
	}
	m.slots.Acquire(1, func() {
		m.Sim.After(do(), func() {
			m.slots.Release(1)
			then()
		})
	})
}

// spend is work of a known cost.
func (m *Machine) spend(c cost, then func()) { m.work(func() cost { return c }, then) }
