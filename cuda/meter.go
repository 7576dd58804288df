package cuda

import (
	"runtime"
	"time"

	"helios/internal/hostcpu"
)

// blockMeter is a block's CPU time, for hostcpu.Spent: goroutines share threads, so the block is
// tied to its thread while the thread's clock measures it. The spender is the kernel on its stream.
type blockMeter struct {
	running, paused bool
	from, spent     time.Duration
}

func (b *Block) beginMeter() {
	if !hostcpu.Metering() {
		return
	}
	runtime.LockOSThread()
	b.meter = blockMeter{running: true, from: hostcpu.ThreadTime()}
}

func (b *Block) endMeter(g *grid) {
	if !b.meter.running {
		return
	}
	spent := b.meter.spent
	if !b.meter.paused { // a kernel that panics in a pause ends there
		spent += hostcpu.ThreadTime() - b.meter.from
		runtime.UnlockOSThread()
	}
	b.meter = blockMeter{}
	hostcpu.Spend(hostcpu.Spender{Stage: g.stream.opt.Name, Operator: g.kernel.name}, spent)
}

// Pause begins work that is not the kernel's own, until Resume, such as that of a controller which
// a kernel has rung: its CPU time is not the kernel's. A nil block has none.
func (b *Block) Pause() {
	if b == nil || !b.meter.running || b.meter.paused {
		return
	}
	b.meter.paused = true
	b.meter.spent += hostcpu.ThreadTime() - b.meter.from
	runtime.UnlockOSThread()
}

// Resume ends a Pause.
func (b *Block) Resume() {
	if b == nil || !b.meter.paused {
		return
	}
	runtime.LockOSThread()
	b.meter.paused, b.meter.from = false, hostcpu.ThreadTime()
}
