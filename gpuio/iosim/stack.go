package iosim

import (
	"time"

	"helios/gpuio"
	"helios/internal/errs"
)

// Bounds that gpuio's kernels have.
const (
	maxSets     = 32
	maxCommands = 1024 // of a queue pair
	maxPairs    = 127  // of an SSD: 128 are usual, and one is left for load and verify
	warp        = 32
	ringEvery   = 4 * warp
)

// Config shapes a stack, as gpuio's options do. Zero values choose the same defaults.
type Config struct {
	Stack        string // name of a gpuio.Stack
	Blocks       int    // of each I/O kernel: async 32; sync: as many as are resident
	Threads      int    // of a block: async 32, sync 128; cpu, mmap: CPU threads, one a core
	QueuePairs   int    // per SSD; 0: as many as the blocks can drive at once
	Depth        int    // reads outstanding per SSD (256)
	CommandBytes int64  // of each read (4096)
	StagedBytes  int64  // bytes that complete copies for each command; 0: the data is in its place
	ToHost       bool   // the data stays in the CPU's memory
	// State is the memory of the kernels' state, "host" or "gpu"; "": for async where the profile
	// has it, for sync in GPU memory, as BaM and GIDS have it.
	State string
	Seed  uint64
	// Beside has the SSDs serve another stack's reads, too: those that a second stack has in flight
	// wait for each other. nil: this stack's SSDs serve nobody else.
	Beside *Stack
}

// Times tell when a set was submitted, when its last command had been handed to a queue or a
// pending list, and when whoever waits for it knew that all its rows were in place; ns.
type Times struct{ SubmitNS, SubmitEndNS, DoneNS int64 }

// Stats are totals of a stack. They are modelled.
type Stats struct {
	Sets        int64
	Commands    int64 // completed
	Bytes       int64
	Pended      int64 // commands that waited in a pending list
	SQDoorbells int64
	CQDoorbells int64
	Launches    int64 // of kernels
	Latency     gpuio.Histogram
	LatencyNS   int64 // sum
	PerSSD      []SSDStats
}

// SSDStats are one SSD's share of Stats.
type SSDStats struct {
	Commands int64
	Bytes    int64
}

// Stack is one I/O stack at work on a machine.
type Stack struct {
	m    *Machine
	c    Config
	kind *gpuio.Stack
	impl engine
	dev  *reads
	st   Stats

	flying  int // sets with a slot
	waiting []*set
	rotate  uint32
}

// engine has what the stacks differ in. start is called when a set has its slot.
type engine interface{ start(s *set) }

// set is one read set.
type set struct {
	per    []int64 // commands by SSD
	total  int64
	row    int64 // bytes that the caller wants of a command
	bytes  int64 // that the command reads
	rotate uint32
	times  Times
	done   func(Times)

	wires     wiring
	remaining []int64 // by queue
	left      int64
}

// New makes a stack. Several may share a machine.
func New(m *Machine, c Config) (*Stack, error) {
	if c.CommandBytes == 0 {
		c.CommandBytes = 4096
	}
	if c.Depth == 0 {
		c.Depth = 256
	}
	switch {
	case c.CommandBytes < 1 || c.CommandBytes > 1<<27:
		return nil, errs.New(errs.Usage, "modelled reads of %d bytes: choose 1 to %d",
			c.CommandBytes, 1<<27)
	case c.Depth < 1 || c.Depth > 1<<16:
		return nil, errs.New(errs.Usage, "depth %d: choose 1 to %d reads outstanding per SSD",
			c.Depth, 1<<16)
	case c.Blocks < 0 || c.Blocks > 1<<16:
		return nil, errs.New(errs.Usage, "%d blocks: choose 1 to %d, or 0 for the default",
			c.Blocks, 1<<16)
	case c.Threads < 0 || c.QueuePairs < 0 || c.StagedBytes < 0:
		return nil, errs.New(errs.Usage,
			"modelled stack %s: threads, queue pairs and staged bytes cannot be negative", c.Stack)
	case c.QueuePairs > maxPairs:
		return nil, errs.New(errs.Usage, "%d queue pairs per SSD: at most %d", c.QueuePairs,
			maxPairs)
	case c.State != "" && c.State != "host" && c.State != "gpu":
		return nil, errs.New(errs.Usage, "kernels' state in %q memory: host or gpu", c.State)
	}
	s := &Stack{m: m, st: Stats{PerSSD: make([]SSDStats, m.SSDs())}}
	var err error
	if s.kind, err = gpuio.FindStack(c.Stack); err != nil {
		return nil, err
	}
	// A stack is modelled by its traits.
	c.Stack = s.kind.Name
	switch {
	case s.kind.Overlaps:
		err = s.newAsync(&c)
	case s.kind.Queued:
		err = s.newSync(&c)
	default:
		err = s.newHost(&c)
	}
	if err != nil {
		return nil, err
	}
	s.dev.dataToHost = s.dev.toHost || c.ToHost
	if c.Beside != nil {
		s.dev.servers = c.Beside.dev.servers
	}
	s.c = c
	return s, nil
}

// Config is the stack's configuration with its defaults filled in.
func (s *Stack) Config() Config { return s.c }

// Submit reads perSSD[i] commands from SSD i, as one set, and calls done when they are there. More
// than 32 sets at once wait their turn, as a caller of gpuio's Submit would.
func (s *Stack) Submit(perSSD []int64, done func(Times)) { s.SubmitSized(perSSD, 0, done) }

// SubmitSized is Submit with commands of another size than the configuration's; 0: of that.
func (s *Stack) SubmitSized(perSSD []int64, commandBytes int64, done func(Times)) {
	if len(perSSD) != s.m.SSDs() {
		panic("iosim: a set for another number of SSDs")
	}
	if commandBytes <= 0 {
		commandBytes = s.c.CommandBytes
	}
	x := &set{per: append([]int64(nil), perSSD...), row: commandBytes, bytes: commandBytes,
		rotate: s.rotate, done: done}
	if s.kind.PageCache { // faults read pages
		page := max(int64(s.m.Profile.CPU.ReadAheadKB.Value*1024), 4096)
		x.bytes = (commandBytes + page - 1) / page * page
	}
	x.times.SubmitNS = s.m.Sim.Now()
	for _, n := range x.per {
		x.total += n
	}
	x.left = x.total
	x.wires = s.dev.wiring(x.bytes)
	s.rotate++
	if x.total == 0 {
		x.times.SubmitEndNS, x.times.DoneNS = x.times.SubmitNS, x.times.SubmitNS
		s.m.Sim.After(0, func() { done(x.times) })
		return
	}
	s.waiting = append(s.waiting, x)
	s.admit()
}

// admit gives slots to the sets that wait for one.
func (s *Stack) admit() {
	for len(s.waiting) > 0 && s.flying < maxSets {
		x := s.waiting[0]
		s.waiting = s.waiting[1:]
		s.flying++
		s.impl.start(x)
	}
}

// finish ends a set at time t, which is not before now.
func (s *Stack) finish(x *set, t int64) {
	s.m.Sim.At(t, func() {
		x.times.DoneNS = t
		s.st.Sets++
		s.flying--
		s.admit()
		x.done(x.times)
	})
}

// InFlight is the number of sets that are submitted and not done.
func (s *Stack) InFlight() int { return s.flying + len(s.waiting) }

// Outstanding is the number of commands that the SSDs have.
func (s *Stack) Outstanding() int { return s.dev.out }

// Stats are totals since the stack was made.
func (s *Stack) Stats() Stats {
	out := s.st
	out.PerSSD = append([]SSDStats(nil), s.st.PerSSD...)
	return out
}

// completed counts a command at its completion.
func (s *Stack) completed(r *read, now int64) {
	s.st.Commands++
	s.st.Bytes += r.set.bytes
	s.st.Latency.Add(time.Duration(now - r.start))
	s.st.LatencyNS += now - r.start
	p := &s.st.PerSSD[r.ssd]
	p.Commands++
	p.Bytes += r.set.bytes
}

// share is the part of n commands that queue q of perSSD takes (gpuio's share).
func share(n int64, q, perSSD, rotate uint32) int64 {
	per := (n + int64(perSSD) - 1) / int64(perSSD)
	per = (per + warp - 1) / warp * warp
	j := int64((q + perSSD - rotate%perSSD) % perSSD)
	return min((j+1)*per, n) - min(j*per, n)
}
