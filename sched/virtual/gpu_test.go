package virtual

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio/iosim"
	"helios/internal/des"
	"helios/internal/hardware"
	"helios/sched/cost"
)

// gpuRig is a modelled GPU without SSDs in use.
func gpuRig(t *testing.T) (*des.Sim, *GPU) {
	t.Helper()
	hw, err := hardware.Load("a100-p5510x12")
	require.NoError(t, err)
	sim := des.New()
	m, err := iosim.NewMachine(sim, hw, 1)
	require.NoError(t, err)
	return sim, newVGPU(m)
}

// A kernel alone takes what its roofline says, and kernels beside each other take their turns, by
// priority, without losing or making time.
func TestVirtualGPUShares(t *testing.T) {
	sim, g := gpuRig(t)
	items := func(n int64) []cost.Kernel {
		return []cost.Kernel{{Op: &g.g.Ops.Sample, Work: hardware.Work{Items: n}}}
	}
	const n = 10_000_000
	alone := g.g.KernelNS(g.g.Ops.Sample, hardware.Work{Items: n}, 0)
	over := g.g.OpLaunchNS.NS() + g.g.TeardownNS.NS()
	times := map[string]int64{}
	run := func(name string, s *vstream, k []cost.Kernel) {
		s.launch(k, nil, func(now int64) { times[name] = now })
	}
	run("alone", g.stream(0, 0), items(n))
	sim.Run()
	require.InDelta(t, alone+over, times["alone"], 2)

	// Two of one priority share; both take twice as long.
	start := sim.Now()
	a, b := g.stream(1, 0), g.stream(1, 0)
	run("a", a, items(n))
	run("b", b, items(n))
	sim.Run()
	require.InDelta(t, 2*alone+over, times["a"]-start, 4)
	require.InDelta(t, 2*alone+over, times["b"]-start, 4)
	require.InDelta(t, float64(2*alone), a.busy+b.busy, 8,
		"each had half of the SMs that it wanted")

	// The more urgent one goes first; the other one has what is left.
	start = sim.Now()
	run("urgent", g.stream(2, 0), items(n))
	run("patient", g.stream(1, 0), items(n))
	sim.Run()
	require.InDelta(t, alone+over, times["urgent"]-start, 4)
	require.InDelta(t, 2*alone+over, times["patient"]-start, 4)

	// With budgets that fit, neither disturbs the other.
	start = sim.Now()
	half := g.g.KernelNS(g.g.Ops.Sample, hardware.Work{Items: n}, 54)
	run("left", g.stream(2, 54), items(n))
	run("right", g.stream(1, 54), items(n))
	sim.Run()
	require.InDelta(t, half+over, times["left"]-start, 4)
	require.InDelta(t, half+over, times["right"]-start, 4)

	// Memory is shared even where SMs are not: two that fill it take twice as long.
	gather := func(bytes int64) []cost.Kernel {
		return []cost.Kernel{{Op: &g.g.Ops.Gather, Work: hardware.Work{Bytes: bytes}}}
	}
	one := g.g.KernelNS(g.g.Ops.Gather, hardware.Work{Bytes: 1 << 30}, 54)
	start = sim.Now()
	run("m1", g.stream(2, 54), gather(1<<30))
	run("m2", g.stream(2, 54), gather(1<<30))
	sim.Run()
	require.InEpsilon(t, 2*one+over, times["m1"]-start, 0.001)
	require.InEpsilon(t, 2*one+over, times["m2"]-start, 0.001)

	// SMs of the I/O kernels are not there for others.
	g.io = func() float64 { return 54 }
	start = sim.Now()
	run("io", g.stream(0, 0), items(n))
	sim.Run()
	require.InDelta(t, half+over, times["io"]-start, 4)
}

// Kernels that read the CPU's memory take the link, at its rate.
func TestVirtualUVA(t *testing.T) {
	sim, g := gpuRig(t)
	const bytes = 256 << 20
	var end int64
	s := g.stream(0, 0)
	s.launch([]cost.Kernel{{UVA: bytes}}, nil, func(now int64) { end = now })
	sim.Run()
	want := float64(bytes)/g.m.Profile.PCIe.UVAGBs.Value + float64(g.g.OpLaunchNS.NS()+
		g.g.TeardownNS.NS()+g.g.HostWayNS.NS())
	require.InEpsilon(t, want, end, 0.001)
	require.InEpsilon(t, float64(bytes)/g.m.Profile.PCIe.UVAGBs.Value, s.busy, 0.001)
	require.EqualValues(t, bytes, g.m.HostMem.Bytes())
}
