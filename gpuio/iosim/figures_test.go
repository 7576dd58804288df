package iosim

import (
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/hardware"
	cases "helios/internal/testing/wide"
)

// The papers' figures in shape. The tests assert shapes; IOSIM_FIGURES=FILE go test -run
// FiguresAsTables ./gpuio/iosim writes the numbers, for documents.

// figure7 is a point of figure 7 of the Helios paper: IOPS by SSDs and blocks.
func figure7(t testing.TB, c Config, ssds int, sets int) float64 {
	iops, _, _ := bench{profile: "a100-p5510x12", ssds: ssds, c: c, set: 2048, sets: sets,
		warm: 4e6, ns: 12e6}.run(t)
	return iops
}

// More SSDs give proportionally more, until the link into the GPU is full; a few blocks are enough
// for that where the reads are asynchronous, and synchronous reads need many.
func TestShapeOfHeliosFigure7(t *testing.T) {
	m := machine(t, "a100-p5510x12", 1)
	one := m.SSDBound(4096)
	link := m.IngressBound(4096)
	require.InDelta(t, link/one, 7.5, 0.3, "so many P5510 fill the link by arithmetic")

	var by []float64
	knee := 0
	for n := 1; n <= 12; n++ {
		x := figure7(t, Config{Stack: gpuio.StackAsync}, n, 4)
		if n > 1 {
			require.GreaterOrEqual(t, x, by[n-2]*0.98, "%d SSDs are not slower than %d", n, n-1)
		}
		if knee == 0 && x < 0.95*one*float64(n) {
			knee = n
		}
		by = append(by, x)
	}
	require.GreaterOrEqual(t, knee, 7)
	require.LessOrEqual(t, knee, 9)
	for n := 1; n < knee; n++ {
		require.InEpsilon(t, one*float64(n), by[n-1], 0.04, "%d SSDs", n)
	}
	require.Greater(t, by[11], 0.92*link)

	// Blocks: async is flat from 8 on, sync grows with its warps.
	best := by[11]
	for _, blocks := range []int{8, 64, 128} {
		best = max(best, figure7(t, Config{Stack: gpuio.StackAsync, Blocks: blocks}, 12, 4))
	}
	require.Greater(t, by[11], 0.95*best, "32 blocks are enough")
	sync := map[int]float64{}
	last := 0.0
	for _, blocks := range []int{8, 32, 64, 128, 0} {
		sync[blocks] = figure7(t, Config{Stack: gpuio.StackSync, Blocks: blocks}, 12, 2)
		require.Greater(t, sync[blocks], last, "%d blocks", blocks)
		last = sync[blocks]
	}
	require.Greater(t, by[11], 2.5*sync[32], "async and sync with 32 blocks")
	require.InEpsilon(t, by[11], sync[0], 0.08, "32 blocks of async, sync with all SMs")
}

// Rows below 4 KiB cost an SSD of TLC as much as one of 4 KiB, so they never fill the link.
func TestShapeByRowBytes(t *testing.T) {
	var rate [4]float64
	for i, bytes := range []int64{512, 1024, 2048, 4096} {
		rate[i] = figure7(t, Config{Stack: gpuio.StackAsync, CommandBytes: bytes}, 12,
			4) * float64(bytes)
		if i > 0 && bytes < 4096 {
			require.InEpsilon(t, 2*rate[i-1], rate[i], 0.05)
		}
	}
	require.Less(t, rate[3], 1.5*rate[2], "4 KiB rows meet the link")
}

// oneAfterAnother is the share of the machine's peak that sets of n reads reach without overlap.
func oneAfterAnother(t testing.TB, m func() *Machine, c Config, n int64) float64 {
	iops, _, s := bench{machine: m, ssds: 1, c: c, set: n, sets: 1, warm: 5e6,
		ns: 40e6 + 40*n*1000}.run(t)
	return iops / s.m.Bound(4096)
}

// with is a machine with one SSD.
func with(t testing.TB, profile string) func() *Machine {
	return func() *Machine { return machine(t, profile, 1) }
}

// wide is the Optane machine if T_i and T_t of the GIDS paper hold all of the kernel's own work up
// to the first and from the last access on, which the model plays besides.
func wide(t testing.TB) func() *Machine {
	return func() *Machine {
		m := machine(t, "a100-optane", 1)
		g := &m.Profile.GPU
		at := func(c hardware.Cost) float64 { return g.TimeAt(c, hardware.StateGPU) }
		g.LaunchNS.Value -= at(g.IO.SyncTake) + at(g.IO.SyncLock)
		g.TeardownNS.Value = max(g.TeardownNS.Value-at(g.IO.SyncReap)-at(g.IO.SyncEnd), 0)
		return m
	}
}

// required is the smallest set, in steps, that reaches a share of the peak.
func required(t testing.TB, m func() *Machine, c Config, share float64, step, most int64) int64 {
	lo, hi := int64(0), most/step
	for hi-lo > 1 {
		mid := (lo + hi) / 2
		if oneAfterAnother(t, m, c, mid*step) >= share {
			hi = mid
		} else {
			lo = mid
		}
	}
	return hi * step
}

// gids has BaM's queues: many, and deep enough for any set here.
var gids = Config{Stack: gpuio.StackSync, QueuePairs: 64, Depth: 16384}

// gidsFormula gives, for one SSD, the reads that must overlap to reach the share a of its peak
// (GIDS, section 3.2).
func gidsFormula(a, iops, seconds float64) float64 { return a * iops * seconds / (1 - a) }

func TestShapeOfTheAccumulator(t *testing.T) {
	cases.Only(t)
	require.InDelta(t, 855, gidsFormula(0.95, 1.5e6, 30e-6), 1)
	require.InDelta(t, 1168, gidsFormula(0.95, 1.5e6, 41e-6), 2)

	last := 0.0
	for _, n := range []int64{128, 256, 512, 1024, 2048, 4096} {
		x := oneAfterAnother(t, with(t, "a100-optane"), gids, n)
		require.Greater(t, x, last, "sets of %d", n)
		require.Less(t, x, 1.0)
		last = x
	}
	need := required(t, with(t, "a100-optane"), gids, 0.95, 64, 4096)
	require.GreaterOrEqual(t, need, int64(855), "the formula leaves out what it does not know")
	require.LessOrEqual(t, need, int64(2*1024))

	// The formula is right for the time that the model itself takes beside the reads.
	x := oneAfterAnother(t, with(t, "a100-optane"), gids, 1024)
	beside := 1024 / 1.5e6 * (1/x - 1)
	require.InEpsilon(t, gidsFormula(0.95, 1.5e6, beside), float64(need), 0.15)

	wider := required(t, wide(t), gids, 0.95, 64, 4096)
	require.Less(t, wider, need)
	require.GreaterOrEqual(t, wider, int64(1024))

	// Overlap is the purpose of the accumulator: with several sets in flight small ones are enough.
	iops, _, s := bench{profile: "a100-optane", ssds: 1, c: Config{Stack: gpuio.StackAsync,
		Depth: 1024}, set: 256, sets: 16, warm: 5e6, ns: 20e6}.run(t)
	require.Greater(t, iops, 0.9*s.m.Bound(4096))
}

// Measurements by others on a machine that the profiles describe, and that were not used for them.
func TestShapeOnPM1753(t *testing.T) {
	run := func(bytes int64, depth, pairs int) float64 {
		iops, _, _ := bench{profile: "h100-pm1753x16", ssds: 16, c: Config{Stack: gpuio.StackAsync,
			State: "gpu", CommandBytes: bytes, Depth: depth, QueuePairs: pairs, Blocks: 64},
			set: 2048, sets: 6, warm: 2e6, ns: 3e6}.run(t)
		return iops
	}
	full := run(512, 256, 4)
	// With 4,096 reads out 61.7 M need 66 us a read; the SSD model, whose latency is assumed, and
	// the kernels take some 80.
	require.InEpsilon(t, 61.7e6, full, 0.2, "4 queues of 64: 61.7 M")
	require.Greater(t, run(512, 512, 1), 0.8*full, "one queue of 512: 53.5 M")
	require.InEpsilon(t, 45e9/4096, run(4096, 256, 4), 0.05, "4 KiB: 45 GB/s")
}

// FiguresAsTables writes the numbers as Markdown.
func TestFiguresAsTables(t *testing.T) {
	path := os.Getenv("IOSIM_FIGURES")
	if path == "" {
		t.Skip("IOSIM_FIGURES names no file")
	}
	var out strings.Builder
	row := func(cells ...string) { fmt.Fprintf(&out, "| %s |\n", strings.Join(cells, " | ")) }
	head := func(cells ...string) {
		row(cells...)
		out.WriteString("|" + strings.Repeat("---|", len(cells)) + "\n")
	}
	m := func(x float64) string { return fmt.Sprintf("%.2f", x/1e6) }

	head("SSDs", "async 8", "async 32", "async 64", "async 128", "sync 8", "sync 32", "sync 64",
		"sync 128", "sync full grid", "GB/s, async 32")
	for n := 1; n <= 12; n++ {
		cells := []string{fmt.Sprint(n)}
		gbs := ""
		for _, b := range []int{8, 32, 64, 128} {
			x := figure7(t, Config{Stack: gpuio.StackAsync, Blocks: b}, n, 4)
			if b == 32 {
				gbs = fmt.Sprintf("%.1f", x*4096/1e9)
			}
			cells = append(cells, m(x))
		}
		for _, b := range []int{8, 32, 64, 128, 0} {
			cells = append(cells, m(figure7(t, Config{Stack: gpuio.StackSync, Blocks: b}, n, 2)))
		}
		row(append(cells, gbs)...)
	}

	out.WriteString("\n12 SSDs, where the kernels' state lies:\n\n")
	head("blocks", "async, host", "async, gpu", "sync 128 threads, host", "sync 128, gpu",
		"sync 1024 threads, gpu")
	for _, b := range []int{2, 4, 8, 16, 32, 64, 128} {
		cells := []string{fmt.Sprint(b)}
		for _, c := range []Config{{Stack: gpuio.StackAsync, State: "host"},
			{Stack: gpuio.StackAsync, State: "gpu"}, {Stack: gpuio.StackSync, State: "host"},
			{Stack: gpuio.StackSync, State: "gpu"}, {Stack: gpuio.StackSync, State: "gpu",
				Threads: 1024}} {
			c.Blocks = b
			cells = append(cells, m(figure7(t, c, 12, 3)))
		}
		row(cells...)
	}

	out.WriteString("\nRow bytes, async, 32 blocks:\n\n")
	head("row bytes", "1 SSD", "4", "8", "12", "GB/s, 12", "of the bound")
	for _, b := range []int64{512, 1024, 2048, 4096, 8192, 16384} {
		cells := []string{fmt.Sprint(b)}
		var x float64
		for _, n := range []int{1, 4, 8, 12} {
			x = figure7(t, Config{Stack: gpuio.StackAsync, CommandBytes: b}, n, 4)
			cells = append(cells, m(x))
		}
		row(append(cells, fmt.Sprintf("%.1f", x*float64(b)/1e9),
			fmt.Sprintf("%.2f", x/machine(t, "a100-p5510x12", 12).Bound(b)))...)
	}

	out.WriteString("\nStacks, 4 KiB rows (sets of 256 an SSD):\n\n")
	head("SSDs", "async", "sync full grid", "cpu, 32 threads", "cpu, 4 threads", "mmap, 32 threads")
	for _, n := range []int{1, 4, 8, 12} {
		cells := []string{fmt.Sprint(n)}
		for _, c := range []Config{{Stack: gpuio.StackAsync}, {Stack: gpuio.StackSync},
			{Stack: gpuio.StackCPU}, {Stack: gpuio.StackCPU, Threads: 4},
			{Stack: gpuio.StackMmap}} {
			iops, _, _ := bench{profile: "a100-p5510x12", ssds: n, c: c, set: 256, sets: 8,
				warm: 10e6, ns: 30e6}.run(t)
			cells = append(cells, m(iops))
		}
		row(cells...)
	}

	out.WriteString("\nOne set after another, share of the peak:\n\n")
	sizes := []int64{128, 256, 512, 768, 1024, 1280, 1536, 2048, 4096, 8192}
	cells := []string{"SSD, stack"}
	for _, n := range sizes {
		cells = append(cells, fmt.Sprint(n))
	}
	head(append(cells, "95 % from")...)
	for _, p := range []string{"a100-optane", "T_i, T_t wide", "a100-980pro"} {
		m := with(t, p)
		if p == "T_i, T_t wide" {
			m = wide(t)
		}
		for _, c := range []Config{gids, {Stack: gpuio.StackAsync, QueuePairs: 64, Depth: 16384},
			{Stack: gpuio.StackAsync, QueuePairs: 64, Depth: 16384, State: "gpu"}} {
			cells := []string{p + ", " + c.Stack + " " + c.State}
			for _, n := range sizes {
				cells = append(cells, fmt.Sprintf("%.3f", oneAfterAnother(t, m, c, n)))
			}
			row(append(cells, fmt.Sprint(required(t, m, c, 0.95, 32, 32768)))...)
		}
	}

	out.WriteString(
		"\nQueue-depth curve, one SSD, async with 4 sets in flight: k IOPS, median latency in us\n\n")
	head("depth", "optane, gpu state", "optane, host state", "980pro, gpu", "980pro, host",
		"p5510, gpu", "p5510, host")
	for d := 1; d <= 512; d *= 2 {
		cells := []string{fmt.Sprint(d)}
		for _, p := range []string{"a100-optane", "a100-980pro", "a100-p5510x12"} {
			for _, state := range []string{"gpu", "host"} {
				iops, st, _ := bench{profile: p, ssds: 1, c: Config{Stack: gpuio.StackAsync,
					Depth: d, State: state}, set: 2048, sets: 4, warm: 10e6, ns: 40e6}.run(t)
				cells = append(cells, fmt.Sprintf("%.0f, %.0f", iops/1e3,
					math.Round(float64(st.Latency.Quantile(0.5))/1e3)))
			}
		}
		row(cells...)
	}

	out.WriteString("\nH100 and 16 PM1753, M IOPS:\n\n")
	head("bytes", "queues × depth of each", "gpu state", "host state", "measured by others")
	for _, c := range []struct {
		bytes        int64
		pairs, depth int
		seen         string
	}{{512, 4, 256, "61.7"}, {512, 1, 512, "53.5"}, {512, 1, 64, "–"},
		{4096, 1, 32, "some 11 (45 GB/s)"}, {4096, 4, 256, "some 11 (45 GB/s)"}} {
		cells := []string{fmt.Sprint(c.bytes), fmt.Sprintf("%d × %d", c.pairs, c.depth/c.pairs)}
		for _, state := range []string{"gpu", "host"} {
			iops, _, _ := bench{profile: "h100-pm1753x16", ssds: 16,
				c: Config{Stack: gpuio.StackAsync, State: state, CommandBytes: c.bytes,
					Depth: c.depth, QueuePairs: c.pairs, Blocks: 64}, set: 4096, sets: 6, warm: 2e6,
				ns: 4e6}.run(t)
			cells = append(cells, m(iops))
		}
		row(append(cells, c.seen)...)
	}
	require.NoError(t, os.WriteFile(path, []byte(out.String()), 0o644))
}
