package iosim

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/des"
	"helios/internal/errs"
	"helios/internal/hardware"
	"helios/internal/ssdmodel"
	cases "helios/internal/testing/wide"
)

// bench keeps sets in flight for a while and reports reads a second after a warm-up.
type bench struct {
	profile  string
	machine  func() *Machine // in place of profile and ssds
	ssds     int
	c        Config
	set      int64 // commands of a set, for each SSD
	sets     int   // in flight
	warm, ns int64
}

func machine(t testing.TB, profile string, ssds int) *Machine {
	t.Helper()
	p, err := hardware.Load(profile)
	require.NoError(t, err)
	m, err := NewMachine(des.New(), p, ssds)
	require.NoError(t, err)
	return m
}

func stack(t testing.TB, m *Machine, c Config) *Stack {
	t.Helper()
	s, err := New(m, c)
	require.NoError(t, err)
	return s
}

func each(ssds int, n int64) []int64 {
	per := make([]int64, ssds)
	for i := range per {
		per[i] = n
	}
	return per
}

// keep submits a set whenever one is done, so that some are always in flight, until stop.
func keep(s *Stack, sets int, per []int64) (stop func()) {
	on := true
	var next func(Times)
	next = func(Times) {
		if on {
			s.Submit(per, next)
		}
	}
	for range sets {
		s.Submit(per, next)
	}
	return func() { on = false }
}

func (b bench) run(t testing.TB) (iops float64, st Stats, s *Stack) {
	t.Helper()
	var m *Machine
	if b.machine != nil {
		m = b.machine()
	} else {
		m = machine(t, b.profile, b.ssds)
	}
	s = stack(t, m, b.c)
	stop := keep(s, b.sets, each(m.SSDs(), b.set))
	m.Sim.RunUntil(b.warm)
	before := s.Stats().Commands
	m.Sim.RunUntil(b.warm + b.ns)
	iops = float64(s.Stats().Commands-before) / float64(b.ns) * 1e9
	stop()
	m.Sim.Run()
	st = s.Stats()
	require.Zero(t, s.InFlight())
	require.Zero(t, s.Outstanding())
	require.Equal(t, st.Sets*b.set*int64(m.SSDs()), st.Commands)
	require.Equal(t, st.Commands, st.Latency.Count())
	require.Equal(t, st.Commands*b.bytes(), st.Bytes)
	for _, p := range st.PerSSD {
		require.Equal(t, st.Sets*b.set, p.Commands)
	}
	return iops, st, s
}

func (b bench) bytes() int64 {
	if b.c.CommandBytes == 0 {
		return 4096
	}
	return b.c.CommandBytes
}

var stacks = gpuio.StackNames(nil)

func TestSetsOfAnyShape(t *testing.T) {
	for _, name := range stacks {
		for _, ssds := range []int{1, 3} {
			for _, c := range []Config{{}, {Blocks: 1, Threads: 32, Depth: 1},
				{Blocks: 3, Threads: 64, Depth: 7, QueuePairs: 5}, {CommandBytes: 131072},
				{StagedBytes: 500}} {
				c.Stack = name
				m := machine(t, "a100-p5510x12", ssds)
				s := stack(t, m, c)
				rng := rand.New(rand.NewPCG(3, 4))
				var done []int
				total := int64(0)
				const sets = 40 // more than have a slot
				for i := range sets {
					per := make([]int64, ssds)
					for d := range per {
						if rng.IntN(3) > 0 {
							per[d] = int64(rng.IntN(300))
							total += per[d]
						}
					}
					s.Submit(per, func(x Times) {
						done = append(done, i)
						require.LessOrEqual(t, x.SubmitNS, x.SubmitEndNS)
						require.LessOrEqual(t, x.SubmitEndNS, x.DoneNS)
						require.Equal(t, m.Sim.Now(), x.DoneNS)
					})
				}
				require.LessOrEqual(t, s.flying, maxSets)
				m.Sim.Run()
				require.Len(t, done, sets, "%+v", c)
				st := s.Stats()
				require.Equal(t, total, st.Commands)
				require.Zero(t, s.InFlight())
				require.Zero(t, s.Outstanding())
			}
		}
	}
}

// Kernels of a stream follow each other, so sets are done in the order in which they came.
func TestSetsAreDoneInOrder(t *testing.T) {
	for _, name := range []string{gpuio.StackAsync, gpuio.StackSync} {
		m := machine(t, "a100-p5510x12", 2)
		s := stack(t, m, Config{Stack: name})
		var done []int
		for i := range 50 {
			s.Submit([]int64{int64(1 + i*37%400), int64(1 + i*91%400)},
				func(Times) { done = append(done, i) })
		}
		m.Sim.Run()
		for i := range done {
			require.Equal(t, i, done[i], name)
		}
	}
}

func TestSameSeedSameRun(t *testing.T) {
	for _, name := range stacks {
		run := func(seed uint64) (Stats, int64) {
			m := machine(t, "a100-p5510x12", 3)
			s := stack(t, m, Config{Stack: name, Seed: seed})
			for range 5 {
				s.Submit([]int64{1000, 900, 800}, func(Times) {})
			}
			m.Sim.Run()
			return s.Stats(), m.Sim.Now()
		}
		st, end := run(1)
		again, endAgain := run(1)
		require.Equal(t, st, again)
		require.Equal(t, end, endAgain)
		other, _ := run(2)
		require.NotEqual(t, st.Latency, other.Latency)
	}
}

// Little's law holds for any queueing system; here it checks the bookkeeping of commands and times:
// commands between their making and their completion, looked at every so often, are throughput
// times mean latency.
func TestLittlesLaw(t *testing.T) {
	for _, b := range []bench{
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackAsync}, set: 4096, sets: 4},
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackAsync, Depth: 16,
			State: "gpu"}, set: 4096, sets: 4},
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackSync, Blocks: 64},
			set: 4096, sets: 4},
		{profile: "a100-optane", ssds: 1, c: Config{Stack: gpuio.StackAsync, Depth: 64}, set: 4096,
			sets: 4},
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackCPU}, set: 4096, sets: 4},
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackMmap}, set: 4096, sets: 4},
		{profile: "host", ssds: 1, c: Config{Stack: gpuio.StackAsync}, set: 4096, sets: 4},
	} {
		m := machine(t, b.profile, b.ssds)
		s := stack(t, m, b.c)
		stop := keep(s, b.sets, each(b.ssds, b.set))
		warm, step := int64(3_000_000), int64(5_000)
		if b.profile == "host" {
			warm, step = 30_000_000, 100_000 // its SSD is a slow one
		}
		const steps = 4_000
		m.Sim.RunUntil(warm)
		before := s.Stats()
		sum := 0
		for i := range int64(steps) {
			m.Sim.RunUntil(warm + i*step)
			sum += len(s.dev.items) - len(s.dev.free)
		}
		st := s.Stats()
		n := float64(st.Commands - before.Commands)
		mean := float64(st.LatencyNS-before.LatencyNS) / n
		rate := n / float64(steps*step)
		tolerance := 0.02
		// the others make the command when they have been at it for a while
		if b.c.Stack != gpuio.StackAsync {
			tolerance = 0.05
		}
		require.InEpsilon(t, rate*mean, float64(sum)/steps, tolerance,
			"%s %+v: %.0f commands, mean %.0f ns", b.profile, b.c, n, mean)
		stop()
		m.Sim.Run()
	}
}

// A stack with all it needs reaches the rate of SSDs or link, and never more.
func TestPlateauIsTheSmallestBound(t *testing.T) {
	for _, b := range []bench{
		{profile: "a100-p5510x12", ssds: 1, c: Config{Stack: gpuio.StackAsync}},
		{profile: "a100-p5510x12", ssds: 4, c: Config{Stack: gpuio.StackAsync}},
		{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackAsync}},
		{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackAsync, CommandBytes: 512}},
		{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackAsync,
			CommandBytes: 131072}},
		{profile: "a100-p5510x12", ssds: 1, c: Config{Stack: gpuio.StackAsync,
			CommandBytes: 131072}},
		{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackSync}},
		{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackCPU}},
		{profile: "a100-980pro", ssds: 2, c: Config{Stack: gpuio.StackAsync, Depth: 1024}},
		{profile: "a100-optane", ssds: 1, c: Config{Stack: gpuio.StackAsync}},
		{profile: "h100-pm1753x16", ssds: 16, c: Config{Stack: gpuio.StackAsync,
			CommandBytes: 4096}},
		{profile: "host", ssds: 1, c: Config{Stack: gpuio.StackAsync}},
		{profile: "host", ssds: 1, c: Config{Stack: gpuio.StackSync}},
	} {
		if cases.Lean() && b.ssds == 12 && b.c.CommandBytes != 0 {
			continue
		}
		b.set, b.sets, b.warm, b.ns = 2048, 6, 8e6, 20e6
		if b.bytes() > 4096 {
			b.set, b.warm, b.ns = 256, 20e6, 40e6
		}
		// the copies are what bounds it, and a set's copy waits for all its reads
		if b.c.Stack == gpuio.StackCPU {
			b.set, b.warm = 256, 30e6
		}
		if b.profile == "host" {
			b.warm, b.ns = 300e6, 300e6
		}
		iops, _, s := b.run(t)
		bound := s.m.Bound(b.bytes())
		require.LessOrEqual(t, iops, bound*1.02, "%s %d %+v", b.profile, b.ssds, b.c)
		require.GreaterOrEqual(t, iops, bound*0.93, "%s %d %+v", b.profile, b.ssds, b.c)
	}
}

// The path from doorbell to completion entry adds nothing to the SSD model: a closed loop through
// it has the queue-depth curve of the model alone.
func TestQueueDepthCurveIsTheModels(t *testing.T) {
	for _, profile := range []string{"a100-p5510x12", "a100-980pro", "a100-optane"} {
		for _, depth := range []int{1, 4, 16, 64, 256} {
			const span = 50_000_000
			m := machine(t, profile, 1)

			// The model alone.
			server := m.Model().NewServer(9)
			var pure des.Sim
			want := 0
			var again func()
			again = func() {
				pure.At(server.Admit(pure.Now(), ssdmodel.Read, 4096), func() {
					want++
					again()
				})
			}
			for range depth {
				again()
			}
			pure.RunUntil(span)

			// The same through links and events.
			got := 0
			s := &Stack{m: m}
			x := &set{bytes: 4096}
			s.dev = s.newReads(9, false, func(id uint32) {
				got++
				s.dev.ring(m.Sim.Now(), []uint32{id})
			})
			s.dev.delay = 0
			x.wires = s.dev.wiring(4096)
			for range depth {
				s.dev.ring(0, []uint32{s.dev.make(x, 0, 0, 0)})
			}
			m.Sim.RunUntil(span)
			require.InEpsilon(t, want, got, 0.02, "%s at depth %d", profile, depth)
		}
	}
}

// Several sets in flight hide what a set costs beside its reads.
func TestSetsOverlap(t *testing.T) {
	run := func(sets int) float64 {
		iops, _, _ := bench{profile: "a100-p5510x12", ssds: 2, c: Config{Stack: gpuio.StackAsync},
			set: 512, sets: sets, warm: 3e6, ns: 15e6}.run(t)
		return iops
	}
	one, two, four := run(1), run(2), run(4)
	require.Greater(t, two, one*1.1)
	require.Greater(t, four, 1.4e6*0.97)
}

// SSDs that serve two stacks take as long as for one with the reads of both; SSDs of their own,
// half.
func TestStacksShareSSDs(t *testing.T) {
	took := func(per int64, stacks int, beside bool) int64 {
		m := machine(t, "a100-p5510x12", 2)
		c := Config{Stack: gpuio.StackCPU, Threads: 8, ToHost: true, Seed: 3}
		for range stacks {
			s := stack(t, m, c)
			if s.Submit(each(2, per), func(Times) {}); beside {
				c.Beside = s
			}
		}
		m.Sim.Run()
		return m.Sim.Now()
	}
	const n = 20_000
	all := float64(took(2*n, 1, false))
	require.InEpsilon(t, all, took(n, 2, true), .03)
	require.InEpsilon(t, all/2, took(n, 2, false), .03)
}

func TestCPUStacksAreBoundByTheirThreads(t *testing.T) {
	iops, _, s := bench{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackCPU,
		Threads: 2}, set: 512, sets: 4, warm: 5e6, ns: 20e6}.run(t)
	cpu := &s.m.Profile.CPU
	require.InEpsilon(t, 2e9/(cpu.UringNS.Value+4096/cpu.GatherGBs.Value), iops, 0.05)
	iops, st, _ := bench{profile: "a100-p5510x12", ssds: 12, c: Config{Stack: gpuio.StackMmap,
		Threads: 4}, set: 64, sets: 4, warm: 5e6, ns: 50e6}.run(t)
	require.InEpsilon(t, 4e9*float64(st.Commands)/float64(st.LatencyNS), iops, 0.1, "a thread has one read out")
	// A fault reads whole pages, whatever the row.
	m := machine(t, "a100-p5510x12", 1)
	s = stack(t, m, Config{Stack: gpuio.StackMmap, CommandBytes: 512})
	s.Submit([]int64{10}, func(Times) {})
	m.Sim.Run()
	require.EqualValues(t, 10*4096, s.Stats().Bytes)
}

// The full grid of sync leaves no SM to others while it runs; async leaves them all.
func TestSyncTakesTheSMs(t *testing.T) {
	for _, c := range []struct {
		stack  string
		blocks int
		waits  bool
	}{{gpuio.StackSync, 0, true}, {gpuio.StackSync, 32, false}, {gpuio.StackAsync, 32, false}} {
		m := machine(t, "a100-p5510x12", 1)
		s := stack(t, m, Config{Stack: c.stack, Blocks: c.blocks})
		var read Times
		kernel := int64(0)
		s.Submit([]int64{20000}, func(x Times) { read = x })
		m.Sim.At(1_000_000, func() { m.SMs.Do(90, 10_000, func(int64) { kernel = m.Sim.Now() }) })
		m.Sim.Run()
		require.Greater(t, read.DoneNS, int64(20_000_000))
		if c.waits {
			require.Greater(t, kernel, read.DoneNS-m.Profile.GPU.TeardownNS.NS())
		} else {
			require.EqualValues(t, 1_010_000, kernel)
		}
	}
}

func TestDoorbellsAndPendingLists(t *testing.T) {
	m := machine(t, "a100-p5510x12", 1)
	s := stack(t, m, Config{Stack: gpuio.StackAsync, QueuePairs: 1, Depth: 256})
	s.Submit([]int64{256}, func(Times) {})
	m.Sim.RunUntil(m.Profile.GPU.LaunchNS.NS() + 60_000)
	require.EqualValues(t, 2, s.Stats().SQDoorbells, "one for each 128 entries")
	require.Equal(t, 256, s.Outstanding())
	m.Sim.Run()
	require.Zero(t, s.Stats().Pended)

	s.Submit([]int64{1000}, func(Times) {})
	m.Sim.Run()
	require.EqualValues(t, 1000-256, s.Stats().Pended, "what had no CID waits in the list")

	y := stack(t, m, Config{Stack: gpuio.StackSync})
	y.Submit([]int64{500}, func(Times) {})
	m.Sim.Run()
	require.EqualValues(t, 500, y.Stats().SQDoorbells, "a doorbell for each read")
	require.LessOrEqual(t, y.Stats().CQDoorbells, int64(500))
}

func TestSharesAddUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		n, per, rotate := int64(rng.IntN(5000)), uint32(1+rng.IntN(20)), rng.Uint32()
		sum := int64(0)
		for q := range per {
			x := share(n, q, per, rotate)
			require.GreaterOrEqual(t, x, int64(0))
			sum += x
		}
		require.Equal(t, n, sum)
	}
}

func TestPollingWarpLooksAtItsTimes(t *testing.T) {
	w := &warpState{since: 1000, look: 100}
	var looks []int64
	for at := int64(0); len(looks) < 12; {
		at = w.nextLook(at, 64, 1024)
		looks = append(looks, at)
		at++
	}
	// Pauses of 64, 128, … 1,024 between rounds of 100.
	want, pause := []int64{1064}, int64(64)
	for len(want) < 12 {
		pause = min(pause*2, 1024)
		want = append(want, want[len(want)-1]+100+pause)
	}
	require.Equal(t, want, looks)
	require.Equal(t, want[5], w.nextLook(want[5], 64, 1024))
	require.Equal(t, want[11], w.nextLook(want[10]+1, 64, 1024))
}

func TestOperatorsOnTheMachine(t *testing.T) {
	m := machine(t, "a100-p5510x12", 1)
	p := &m.Profile.PCIe
	var copied int64
	m.Copy(1e9, func() { copied = m.Sim.Now() })
	m.Sim.Run()
	require.InEpsilon(t, 1e9/p.CopyGBs.Value+p.CopyNS.Value, float64(copied), 0.001)
	none := false
	m.Copy(0, func() { none = true })
	m.Sim.Run()
	require.True(t, none)
}

// A long transfer and the SSDs share the link: neither waits for the other to end.
func TestTransfersShareTheLink(t *testing.T) {
	m := machine(t, "a100-p5510x12", 12)
	s := stack(t, m, Config{Stack: gpuio.StackAsync})
	stop := keep(s, 4, each(12, 2048))
	m.Sim.RunUntil(5e6)
	alone := s.Stats().Commands
	m.Sim.RunUntil(15e6)
	alone = s.Stats().Commands - alone
	var next func()
	moved := int64(0)
	next = func() {
		if moved += 8 << 20; moved < 4<<30 {
			m.Copy(8<<20, next)
		}
	}
	m.Copy(8<<20, next)
	before := s.Stats().Commands
	m.Sim.RunUntil(25e6)
	shared := s.Stats().Commands - before
	require.Less(t, shared, alone)
	require.Greater(t, shared, alone*8/10)
	require.Greater(t, float64(moved), 0.04*21.5e9*0.01)
	stop()
	m.Sim.Run()
}

func TestConfigurationsThatAreRefused(t *testing.T) {
	m := machine(t, "a100-p5510x12", 2)
	for _, c := range []struct {
		c    Config
		want string
	}{
		{Config{Stack: "spdk"}, "choose one of async, sync, cpu, mmap"},
		{Config{Stack: gpuio.StackAsync, Threads: 33}, "multiple of 32"},
		{Config{Stack: gpuio.StackSync, Threads: 2048}, "multiple of 32"},
		{Config{Stack: gpuio.StackAsync, Depth: 1 << 17}, "reads outstanding"},
		{Config{Stack: gpuio.StackAsync, QueuePairs: 1, Depth: 4096},
			"use more queue pairs or less depth"},
		{Config{Stack: gpuio.StackAsync, QueuePairs: 200}, "at most 127"},
		{Config{Stack: gpuio.StackAsync, Blocks: -1}, "blocks"},
		{Config{Stack: gpuio.StackAsync, CommandBytes: -1}, "bytes"},
		{Config{Stack: gpuio.StackCPU, Threads: 5000}, "1 to 1024"},
		{Config{Stack: gpuio.StackAsync, State: "moon"}, "host or gpu"},
	} {
		_, err := New(m, c.c)
		require.ErrorContains(t, err, c.want, fmt.Sprintf("%+v", c.c))
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	_, err := NewMachine(des.New(), m.Profile, -1)
	require.ErrorContains(t, err, "-1 SSDs")
}

// The profile of the host device against what BENCHMARKS.md has of it, other than what its figures
// were taken from.
func TestHostProfileAgainstMeasurements(t *testing.T) {
	run := func(latency time.Duration, c Config) float64 {
		model, err := ssdmodel.Fixed(latency)
		require.NoError(t, err)
		on := func() *Machine {
			m := machine(t, "host", 1)
			m.UseModel(model)
			return m
		}
		iops, _, _ := bench{machine: on, c: c, set: 8192, sets: 4, warm: 20e6, ns: 40e6}.run(t)
		return iops
	}
	require.InEpsilon(t, 5.11e6, run(time.Microsecond, Config{Stack: gpuio.StackAsync, Blocks: 8,
		CommandBytes: 1024}), 0.1)
	require.InEpsilon(t, 0.73e6,
		run(time.Microsecond, Config{Stack: gpuio.StackCPU, CommandBytes: 4096}), 0.1)
	for blocks, seen := range map[int]float64{1: 47.5e3, 2: 92.7e3} { // more: on a slower machine
		require.InEpsilon(t, seen,
			run(80*time.Microsecond, Config{Stack: gpuio.StackSync, Blocks: blocks}), 0.1,
			"%d blocks", blocks)
	}
}

// Twelve SSDs for 50 virtual milliseconds.
func BenchmarkTwelveSSDs(b *testing.B) {
	var events uint64
	var reads int64
	for range b.N {
		m := machine(b, "a100-p5510x12", 12)
		s := stack(b, m, Config{Stack: gpuio.StackAsync})
		keep(s, 4, each(12, 4096))
		m.Sim.RunUntil(50_000_000)
		events += m.Sim.Events()
		reads += s.Stats().Commands
	}
	b.ReportMetric(float64(events)/b.Elapsed().Seconds()/1e6, "Mevents/s")
	b.ReportMetric(float64(reads)/b.Elapsed().Seconds()/1e6, "Mreads/s")
}

// Rows 10 KiB apart share a command where files were measured whose commands cost much, as the
// stacks find by themselves; where SSDs are hardware, or are played, two blocks of flash do not.
func TestReachOfFiles(t *testing.T) {
	measured, err := ssdmodel.Parse([]byte("name: m\nread: " + given + "write: " + given +
		"flush: " + given))
	require.NoError(t, err)
	l, err := gpuio.NewLayout(100_000, 512, 1, 512)
	require.NoError(t, err)
	for _, c := range []struct {
		profile, stack string
		measured       bool
		commands       int64
	}{{"host", "async", true, 1}, {"host", "async", false, 2}, {"host", "cpu", true, 1},
		{"host", "sync", true, 2}, {"a100-p5510x12", "async", false, 2}} {
		p, err := hardware.Load(c.profile)
		require.NoError(t, err)
		if c.measured {
			p.SSDs.Measured = measured
		}
		m, err := NewMachine(des.New(), p, 1)
		require.NoError(t, err)
		kind, err := gpuio.FindStack(c.stack)
		require.NoError(t, err)
		speed, err := m.Speed(kind, l)
		require.NoError(t, err)
		plan, err := gpuio.NewPlanner(l, gpuio.PlanOptions{Stack: c.stack, CoalesceBytes: 64 << 10,
			Speed: speed})
		require.NoError(t, err)
		var took [1]gpuio.Planned
		plan.Set([]int64{0, 20}, []int64{0, 2}, took[:])
		require.Equal(t, c.commands, took[0].Commands, "%+v", c)
	}
}

const given = "{latency: {quantiles: [{q: 1, us: 20}], source: given}, " +
	"iops: {caps: [{bytes: 512, iops: 1e5}], source: given}, " +
	"bandwidth: {mb_s: 2000, source: given}}\n"
