//go:build linux && (amd64 || arm64) && !nocuda

package cache

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"helios/cache/policy"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/cuda/fakecuda"
	"helios/cuda/ptxrun"
	"helios/internal/wide"
)

// launched counts the work of the PTX of one launch.
type launched struct {
	kernel string
	warps  int64
	stats  ptxrun.Stats
}

// followLaunches runs a library's launches from their PTX, and gives what each did since the last
// call.
func followLaunches(t *testing.T, library string) func() []launched {
	t.Helper()
	var mu sync.Mutex
	var all []launched
	modules := map[uint64]*ptxrun.Module{}
	run := func(l *fakecuda.Launch) error {
		mu.Lock()
		defer mu.Unlock()
		m := modules[l.Module]
		if m == nil {
			var err error
			if m, err = ptxrun.Parse([]byte(l.PTX)); err != nil {
				return err
			}
			modules[l.Module] = m
		}
		k, there := m.Kernel(l.Kernel)
		if !there {
			return fmt.Errorf("no kernel %s", l.Kernel)
		}
		var memory ptxrun.Memory
		for _, r := range l.Ranges {
			memory = append(memory, ptxrun.Region{Base: r.Addr, Size: r.Size})
		}
		dims := func(d [3]uint32) [3]int { return [3]int{int(d[0]), int(d[1]), int(d[2])} }
		stats, err := k.Run(context.Background(), ptxrun.Launch{Grid: dims(l.Grid),
			Block: dims(l.Block), SharedBytes: int(l.SharedBytes), Params: l.Params,
			Memory: memory, Traffic: true})
		all = append(all, launched{l.Kernel, int64(l.Grid[0]) * int64(l.Block[0]) / 32, stats})
		return err
	}
	ok(t, fakecuda.Execute(library, run))
	t.Cleanup(func() { ok(t, fakecuda.Execute(library, nil)) })
	return func() []launched {
		mu.Lock()
		defer mu.Unlock()
		out := all
		all = nil
		return out
	}
}

// What GPUSets says of the launches of a lookup is what their PTX does, for each policy, with a
// window and without, in one block and in several.
func TestGPUCost(t *testing.T) {
	library := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, library, "reset,sms=108,mem=1073741824")
	seen := followLaunches(t, library)
	dev := must(driver.Open(driver.Options{Library: library}))(t)
	t.Cleanup(func() { ok(t, dev.Close()) })
	policies, sizes, windows := policy.Online(), []int64{600, 8000}, []bool{false, true}
	if wide.Lean() {
		policies, sizes, windows = policies[:1], []int64{600, 3000}, windows[1:]
	}
	for _, name := range policies {
		for _, n := range sizes {
			for _, window := range windows {
				t.Run(fmt.Sprintf("%s, %d rows, window %v", name, n, window), func(t *testing.T) {
					checkGPUCost(t, dev, seen, name, n, window)
				})
			}
		}
	}
}

func checkGPUCost(t *testing.T, dev cuda.Device, seen func() []launched, name string, n int64,
	window bool) {
	rows := 20 * n
	c := DynamicConfig{Rows: rows, RowBytes: 8, Lines: Lines{SSDs: 12, RowsPerLine: 1,
		LineBytes: 8, RowStride: 8}, NoData: true, Directory: policy.InSets, Policy: name,
		Seed: 1, Slots: rows / 10}
	d, st := must(NewDynamic(dev, c))(t), stream(t, dev)
	ticket, rng := must(d.NewTicket())(t), rand.New(rand.NewPCG(1, 2))
	cost := GPUSets{Policy: name, Sets: (c.Slots + policy.Ways - 1) / policy.Ways,
		Window: window, SMs: 108}
	var sum, want GPULaunch
	for batch := range 4 { // the cache is full by the third
		list := make([]int64, n)
		for j := range list {
			list[j] = int64(rng.Float64() * rng.Float64() * float64(rows))
		}
		nodes := upload(t, dev, list)
		seen()
		if window {
			announce(t, d, st, list)
			ok(t, d.gpu.settle())
			all := seen() // before it, the table may move
			near(t, all[len(all)-1], cost.Announcement(n))
		}
		d.NextBatch()
		before := d.Stats()
		ok(t, d.Admit(limit(t), st, nodes.Ptr(), 0, n, ticket))
		all := seen()
		models := cost.Launches(GPULookup{n, d.Stats().Accesses - before.Accesses, ticket.NLines})
		if len(all) != len(models) {
			t.Fatalf("%d launches, and %d by GPUSets", len(all), len(models))
		}
		for i, l := range all {
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
		ok(t, d.Finish(st, ticket, nil, 0, 8))
		ok(t, d.Release(ticket))
	}
	for what, x := range map[string][2]float64{"trips": {sum.Trips, want.Trips},
		"instructions": {sum.Instructions, want.Instructions},
		"sectors":      {sum.Sectors, want.Sectors}} {
		if r := x[1] / x[0]; r < 0.75 || r > 1.35 {
			t.Errorf("%s of a lookup: %.0f, and %.0f by GPUSets", what, x[0], x[1])
		}
	}
	size := must(GPUSetsBytes(name, c.Slots, window))(t)
	have := d.gpu.words.Size()
	if window {
		have += d.gpu.until.Size()
	}
	if have != size {
		t.Errorf("a directory of %d bytes, and %d by GPUSetsBytes", have, size)
	}
	work, ahead := d.gpu.scratch.Size()+d.gpu.table.Size(), 0
	if window {
		work, ahead = work+d.gpu.window.Size(), 1
	}
	if bound := GPUSetsWork(n, ahead); n >= 2048 && (work > bound || work < bound/5) {
		t.Errorf("lookups work in %d bytes, and %d by GPUSetsWork", work, bound)
	}
	each := (ticket.lists.Size() + ticket.read.Size()) / ticket.capacity
	if each != GPUTicketBytes {
		t.Errorf("%d bytes a position of a ticket, want %d", each, GPUTicketBytes)
	}
	ok(t, ticket.Close())
	ok(t, d.Close())
}

// near compares a launch with what is said of it.
func near(t *testing.T, l launched, want GPULaunch) {
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
