package hostcpu

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Spender is an operator of a stage that takes CPU time, such as a kernel of a stream.
type Spender struct{ Stage, Operator string }

// The process's CPU time by what took it. Goroutines share threads, so a section of work is tied to
// its thread while the thread's clock measures it. That takes two system calls a section, which are
// not for every run: it is counted only while somebody asks.
var (
	metering atomic.Int32
	ledger   struct {
		sync.Mutex
		spent map[Spender]time.Duration
	}
)

// Meter has Spent count from here on, until stop is called.
func Meter() (stop func()) {
	metering.Add(1)
	return sync.OnceFunc(func() { metering.Add(-1) })
}

// Metering reports whether somebody asks.
func Metering() bool { return metering.Load() != 0 }

// Spent returns the CPU time of each spender while it was metered.
func Spent() map[Spender]time.Duration {
	ledger.Lock()
	defer ledger.Unlock()
	out := make(map[Spender]time.Duration, len(ledger.spent)+2)
	for k, v := range ledger.spent {
		out[k] = v
	}
	return out
}

// Spend counts time that the caller has measured.
func Spend(by Spender, t time.Duration) {
	ledger.Lock()
	defer ledger.Unlock()
	if ledger.spent == nil {
		ledger.spent = map[Spender]time.Duration{}
	}
	ledger.spent[by] += t
}

// Section is a piece of work of one goroutine. It may block in the kernel: that takes no CPU time.
type Section struct {
	from time.Duration
	on   bool
}

// Begin begins a section, if somebody asks for CPU time. Sections don't nest.
func Begin() Section {
	if !Metering() {
		return Section{}
	}
	runtime.LockOSThread()
	return Section{ThreadTime(), true}
}

// End ends a section and counts what it took.
func (s Section) End(by Spender) {
	if s.on {
		Spend(by, ThreadTime()-s.from)
		runtime.UnlockOSThread()
	}
}

// Thread counts all that a goroutine takes which is locked to its thread.
type Thread struct {
	By   Spender
	last time.Duration
	on   bool
}

// Lap counts what the thread took since the Lap before, if somebody asked then.
func (t *Thread) Lap() {
	on := Metering()
	if !on && !t.on {
		return
	}
	now := ThreadTime()
	if t.on {
		Spend(t.By, now-t.last)
	}
	t.on, t.last = on, now
}
