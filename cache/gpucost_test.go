//go:build linux && (amd64 || arm64) && !nocuda

package cache

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"helios/cache/policy"
	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// GPUSetsBytes, GPUSetsWork and GPUTicketBytes are the memory that lookups allocate. tools/gpucost
// compares their launches.
func TestGPUSetsMemory(t *testing.T) {
	library := fakecuda.Build(t, fakecuda.Private())
	fakecuda.Control(t, library, "reset,sms=108,mem=1073741824")
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
					checkGPUMemory(t, dev, name, n, window)
				})
			}
		}
	}
}

func checkGPUMemory(t *testing.T, dev cuda.Device, name string, n int64, window bool) {
	rows := 20 * n
	c := DynamicConfig{Rows: rows, RowBytes: 8, Lines: Lines{SSDs: 12, RowsPerLine: 1,
		LineBytes: 8, RowStride: 8}, NoData: true, Directory: policy.InSets, Policy: name,
		Seed: 1, Slots: rows / 10}
	d, st := must(NewDynamic(dev, c))(t), stream(t, dev)
	ticket, rng := must(d.NewTicket())(t), rand.New(rand.NewPCG(1, 2))
	list := make([]int64, n)
	for j := range list {
		list[j] = int64(rng.Float64() * rng.Float64() * float64(rows))
	}
	if window {
		announce(t, d, st, list)
	}
	d.NextBatch()
	ok(t, d.Admit(limit(t), st, upload(t, dev, list).Ptr(), 0, n, ticket))
	ok(t, d.Finish(st, ticket, nil, 0, 8))
	ok(t, d.Release(ticket))
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
	if limit := GPUSetsWork(n, ahead); n >= 2048 && (work > limit || work < limit/5) {
		t.Errorf("lookups work in %d bytes, and %d by GPUSetsWork", work, limit)
	}
	each := (ticket.lists.Size() + ticket.read.Size()) / ticket.capacity
	if each != GPUTicketBytes {
		t.Errorf("%d bytes a position of a ticket, want %d", each, GPUTicketBytes)
	}
	ok(t, ticket.Close())
	ok(t, d.Close())
}
