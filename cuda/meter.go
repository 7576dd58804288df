package cuda

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"helios/internal/hostcpu"
)

// CPUMeter is a device whose kernels run on CPUs and that tells what they spend there.
type CPUMeter interface {
	// MeterCPU has CPUTimes count from here on, until stop is called. It takes two system calls for
	// each block.
	MeterCPU() (stop func())
	// CPUTimes is what kernels have spent while it was counted. What blocks have paused for is not
	// in it (Park, Yield, Pause), nor are copies and fills.
	CPUTimes() map[Spender]time.Duration
}

var _ CPUMeter = (*Host)(nil)

// Spender is a kernel on a stream.
type Spender struct{ Stream, Kernel string }

// meter adds up the CPU time of blocks while somebody asks for it.
type meter struct {
	on    atomic.Int32
	mu    sync.Mutex
	spent map[Spender]time.Duration
}

// blockMeter is a block's part: goroutines share threads, so the block is tied to its thread while
// the thread's clock measures it.
type blockMeter struct {
	running, paused bool
	from, spent     time.Duration
}

// MeterCPU implements CPUMeter.
func (h *Host) MeterCPU() (stop func()) {
	h.sched.meter.on.Add(1)
	return sync.OnceFunc(func() { h.sched.meter.on.Add(-1) })
}

// CPUTimes implements CPUMeter.
func (h *Host) CPUTimes() map[Spender]time.Duration {
	m := &h.sched.meter
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[Spender]time.Duration, len(m.spent))
	for k, v := range m.spent {
		out[k] = v
	}
	return out
}

func (b *Block) beginMeter() {
	if b.sched.meter.on.Load() == 0 {
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
	m := &b.sched.meter
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.spent == nil {
		m.spent = map[Spender]time.Duration{}
	}
	m.spent[Spender{g.stream.opt.Name, g.kernel.name}] += spent
}

// Pause says that what follows, until Resume, is not the kernel's own work, such as that of a
// controller which a kernel has rung: its CPU time is not the kernel's. A nil block has none.
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
