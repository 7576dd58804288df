package cuda

import (
	"errors"
	"fmt"
	"runtime/debug"
	"unsafe"

	"helios/internal/simd"
)

// WarpSize is the number of threads in a warp.
const WarpSize = 32

// Block is one thread block of a host kernel's grid, good for the duration of the call.
type Block struct {
	Index   int // 0 .. Blocks-1
	Blocks  int
	Threads int

	sched *scheduler
	grid  *grid
	slot  int32 // -1 while it holds none
	ret   returner
	meter blockMeter
}

func (b *Block) init(s *scheduler) {
	b.sched = s
	b.ret.slot = make(chan int32, 1)
}

// Yield lets other blocks have this block's worker slot, and other goroutines the processor, before
// it continues. A kernel that polls calls it once per sweep without progress.
func (b *Block) Yield() { b.sched.yield(b) }

// Park gives the worker slot up for as long as fn runs: fn is where a block blocks (with a
// deadline of its own). The memory of the device may be used in fn; time in it is not counted
// as busy.
func (b *Block) Park(fn func()) {
	b.Pause()
	defer b.Resume()
	b.sched.leave(b)
	defer b.sched.enter(b)
	fn()
}

// SIMD is the level at which the device's kernels run.
func (b *Block) SIMD() simd.Level { return b.sched.level }

// Range is this block's contiguous share of n items: all shares differ by one item at most and
// depend on nothing but n, Index and Blocks.
func (b *Block) Range(n int64) (lo, hi int64) {
	q, r := n/int64(b.Blocks), n%int64(b.Blocks)
	i := int64(b.Index)
	lo = i*q + min(i, r)
	hi = lo + q
	if i < r {
		hi++
	}
	return lo, hi
}

// KernelError is a kernel's failure. All later calls on its stream return it.
type KernelError struct {
	Kernel string
	Stream string
	Block  int
	Err    error  // what the kernel returned, or what a panic said
	Stack  string // of a panic, else empty
}

func (e *KernelError) Error() string {
	return fmt.Sprintf("kernel %q, block %d on stream %q: %v", e.Kernel, e.Block, e.Stream, e.Err)
}

func (e *KernelError) Unwrap() error { return e.Err }

// exec runs block i of g and reports whether it was the last to finish.
func (b *Block) exec(g *grid, i int32) bool {
	b.Index, b.Blocks, b.Threads = int(i), int(g.blocks), int(g.thread)
	b.grid = g
	finished := int64(1)
	b.beginMeter()
	e := b.call(g)
	b.endMeter(g)
	if e != nil {
		finished += g.abort(e)
	}
	b.grid = nil
	return g.done.Add(finished) == int64(g.blocks)
}

func (b *Block) call(g *grid) (failure *KernelError) {
	defer func() {
		if r := recover(); r != nil {
			err, ok := r.(error)
			if !ok {
				err = fmt.Errorf("%v", r)
			}
			failure = &KernelError{g.kernel.name, g.stream.opt.Name, b.Index,
				fmt.Errorf("panic: %w", err), string(debug.Stack())}
		}
	}()
	if err := g.kernel.run(b, g.params()); err != nil {
		return &KernelError{Kernel: g.kernel.name, Stream: g.stream.opt.Name, Block: b.Index,
			Err: err}
	}
	return nil
}

// abort keeps the failure of the lowest block and drops the blocks that have not started. It
// returns how many it dropped.
func (g *grid) abort(e *KernelError) int64 {
	for {
		old := g.fail.Load()
		if old != nil && old.Block <= e.Block || g.fail.CompareAndSwap(old, e) {
			break
		}
	}
	old := g.next.Swap(int64(g.blocks))
	return max(0, int64(g.blocks)-old)
}

func (g *grid) params() unsafe.Pointer {
	if g.big != nil {
		return unsafe.Pointer(unsafe.SliceData(g.big))
	}
	return unsafe.Pointer(&g.small)
}

// setParams copies the parameter block, as a launch on a GPU does: the caller may reuse its own.
func (g *grid) setParams(p unsafe.Pointer, size uintptr) error {
	if size == 0 {
		return nil
	}
	if p == nil {
		return errors.New("no parameters")
	}
	words := (size + 7) / 8
	dst := unsafe.Slice((*byte)(unsafe.Pointer(&g.small)), unsafe.Sizeof(g.small))
	if words > uintptr(len(g.small)) {
		g.big = make([]uint64, words)
		dst = unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(g.big))), words*8)
	}
	copy(dst, unsafe.Slice((*byte)(p), size))
	return nil
}
