//go:build linux && (amd64 || arm64) && !nocuda

// Package gpucost compares the cost of a GPU's cache directory that cache.GPUSets computes with the
// counts of the committed PTX.
package gpucost

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cache/policy"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
	"helios/tools/ptxrun"
)

// launched holds the counts of the PTX of one launch.
type launched struct {
	kernel string
	warps  int64
	stats  ptxrun.Stats
}

// recorder runs a library's launches from their PTX and keeps the counts of each.
type recorder struct {
	mu      sync.Mutex
	modules map[uint64]*ptxrun.Module
	all     []launched
}

// take returns the launches since the last call.
func (r *recorder) take() []launched {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.all
	r.all = nil
	return out
}

func (r *recorder) run(l *fakecuda.Launch) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.modules[l.Module]
	if m == nil {
		var err error
		if m, err = ptxrun.Parse([]byte(l.PTX)); err != nil {
			return err
		}
		r.modules[l.Module] = m
	}
	k, there := m.Kernel(l.Kernel)
	if !there {
		return fmt.Errorf("no kernel %s", l.Kernel)
	}
	var memory ptxrun.Memory
	for _, g := range l.Ranges {
		memory = append(memory, ptxrun.Region{Base: g.Addr, Size: g.Size,
			Far: g.Host != 0})
	}
	dims := func(d [3]uint32) [3]int { return [3]int{int(d[0]), int(d[1]), int(d[2])} }
	stats, err := k.Run(context.Background(), ptxrun.Launch{Grid: dims(l.Grid),
		Block: dims(l.Block), SharedBytes: int(l.SharedBytes), Params: l.Params,
		Memory: memory, Traffic: true})
	r.all = append(r.all, launched{l.Kernel, int64(l.Grid[0]) * int64(l.Block[0]) / 32, stats})
	return err
}

// GPUSets predicts the launches of a lookup and of an announcement, for each policy, with a window
// and without, in one block and in several.
func TestGPUCost(t *testing.T) {
	library := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, library, "reset,sms=108,mem=1073741824")
	seen := &recorder{modules: map[uint64]*ptxrun.Module{}}
	require.NoError(t, fakecuda.Execute(library, seen.run))
	t.Cleanup(func() { require.NoError(t, fakecuda.Execute(library, nil)) })
	dev, err := driver.Open(driver.Options{Library: library})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dev.Close()) })
	policies, sizes, windows := policy.Online(), []int64{600, 8000}, []bool{false, true}
	if wide.Lean() {
		policies, sizes, windows = policies[:1], []int64{600, 3000}, windows[1:]
	}
	for _, name := range policies {
		for _, n := range sizes {
			for _, window := range windows {
				t.Run(fmt.Sprintf("%s, %d rows, window %v", name, n, window), func(t *testing.T) {
					checkCost(t, dev, seen, name, n, window)
				})
			}
		}
	}
}

func checkCost(t *testing.T, dev cuda.Device, seen *recorder, name string, n int64, window bool) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	rows := 20 * n
	c := cache.DynamicConfig{Rows: rows, RowBytes: 8, Lines: cache.Lines{SSDs: 12, RowsPerLine: 1,
		LineBytes: 8, RowStride: 8}, NoData: true, Directory: policy.InSets, Policy: name,
		Seed: 1, Slots: rows / 10}
	d, err := cache.NewDynamic(dev, c)
	require.NoError(t, err)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "gpucost"})
	require.NoError(t, err)
	ticket, err := d.NewTicket()
	require.NoError(t, err)
	nodes, err := dev.Alloc(cuda.MemPinned, 8*n, "seeds")
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	cost := cache.GPUSets{Policy: name, Sets: (c.Slots + policy.Ways - 1) / policy.Ways,
		Window: window, SMs: 108}
	var sum, want cache.GPULaunch
	for batch := range 4 { // the cache is full by the third
		for j := range n {
			binary.LittleEndian.PutUint64(nodes.Bytes()[8*j:],
				uint64(rng.Float64()*rng.Float64()*float64(rows)))
		}
		seen.take()
		if window {
			require.NoError(t, d.Announce(ctx, st, nodes.Ptr(), n))
		}
		d.NextBatch()
		before := d.Stats()
		require.NoError(t, d.Admit(ctx, st, nodes.Ptr(), 0, n, ticket))
		all := seen.take()
		models := cost.Launches(cache.GPULookup{Rows: n,
			Lines: d.Stats().Accesses - before.Accesses, Missed: ticket.NLines})
		// The announcement comes first, and may move its table before.
		ahead := len(all) - len(models)
		if ahead < 0 || ahead > 0 != window {
			t.Fatalf("%d launches, of which a lookup has %d by GPUSets", len(all), len(models))
		}
		if window {
			near(t, all[ahead-1], cost.Announcement(n))
		}
		for i, l := range all[ahead:] {
			if batch < 3 {
				continue
			}
			near(t, l, models[i])
			sum.Trips += float64(l.stats.Traffic.Trips)
			sum.Instructions += float64(l.stats.Instructions)
			sum.Sectors += float64(l.stats.Traffic.Sectors)
			want.Trips += models[i].Trips
			want.Instructions += models[i].Instructions
			want.Sectors += models[i].Sectors
		}
		require.NoError(t, d.Finish(st, ticket, nil, 0, 8))
		require.NoError(t, d.Release(ticket))
	}
	for what, x := range map[string][2]float64{"trips": {sum.Trips, want.Trips},
		"instructions": {sum.Instructions, want.Instructions},
		"sectors":      {sum.Sectors, want.Sectors}} {
		if r := x[1] / x[0]; r < 0.75 || r > 1.35 {
			t.Errorf("%s of a lookup: %.0f, and %.0f by GPUSets", what, x[0], x[1])
		}
	}
	require.NoError(t, ticket.Close())
	require.NoError(t, d.Close())
	require.NoError(t, nodes.Free())
	require.NoError(t, st.Close())
}

// near compares the counts of a launch with their prediction.
func near(t *testing.T, l launched, want cache.GPULaunch) {
	t.Helper()
	if l.kernel != want.Kernel || l.warps != want.Warps {
		t.Errorf("%s of %d warps, and %s of %d by GPUSets", l.kernel, l.warps, want.Kernel,
			want.Warps)
	}
	traffic := l.stats.Traffic
	for what, x := range map[string][2]float64{
		"trips":        {float64(traffic.Trips), want.Trips},
		"instructions": {float64(l.stats.Instructions), want.Instructions},
		"sectors":      {float64(traffic.Sectors), want.Sectors},
		"atomics":      {float64(traffic.Atomics), want.Atomics},
	} {
		if math.Abs(x[1]-x[0]) > 0.5*x[0]+12 && what != "atomics" {
			t.Errorf("%s: %.0f %s, and %.0f by GPUSets", l.kernel, x[0], what, x[1])
		}
	}
}
