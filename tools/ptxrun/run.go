package ptxrun

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// launch is a Run under way.
type launch struct {
	kernel      *Kernel
	grid, block [3]int
	blocks      int // of the grid
	threads     int // of a block
	params      []byte
	memory      Memory
	open        bool   // no list of memory
	data        uint64 // address of the module's variables
	seed        uint64
	resident    int
	dynamic     int
	sharedBytes int
	limit       int64 // of instructions
	clock       func() uint64
	traffic     bool
	next        atomic.Int64 // block
	used        atomic.Int64 // instructions
	compared    atomic.Int64 // runs of a mutation's instruction beside its shadow
	differed    atomic.Int64
	ctx         context.Context
	stop        context.CancelCauseFunc

	mu    sync.Mutex
	stats Stats
}

// now is a time in ns to sleep by.
func (r *launch) now() uint64 { return uint64(time.Since(epoch)) }

var epoch = time.Now()

// block is one block under way, or its place for the next one.
type block struct {
	run    *launch
	index  int
	place  int // among the resident ones
	warps  []*warp
	order  []int
	shared []byte
	local  []byte
	alive  int // threads
	bars   [16]meeting
	counts []int64 // of the worker
	lanes  int64
	trips  trips    // of its warps up to barriers
	moved  *Traffic // of the worker
}

// meeting is one of a block's barriers.
type meeting struct {
	want    int // threads; 0 for all of the block
	arrived int
	paths   []*path
	of      []*warp
}

// turnLength is the number of instructions a warp runs before the next one has a turn.
const turnLength = 1024

func dims(d [3]int) ([3]int, int, error) {
	n := 1
	for i := range d {
		if d[i] == 0 {
			d[i] = 1
		}
		if d[i] < 0 || d[i] > math.MaxInt32 || n*d[i] > math.MaxInt32 {
			return d, 0, fmt.Errorf("dimensions %v", d)
		}
		n *= d[i]
	}
	return d, n, nil
}

// Run executes a launch and waits for its end. An error describes an action that a GPU would
// fault on or that PTX leaves undefined, and names kernel, block, warp and line.
func (k *Kernel) Run(ctx context.Context, l Launch) (Stats, error) {
	bad := func(format string, a ...any) (Stats, error) {
		return Stats{}, fmt.Errorf("launch of %s: "+format, append([]any{k.Name}, a...)...)
	}
	r := &launch{kernel: k, params: slices.Clone(l.Params), seed: l.Seed, limit: l.MaxInstructions,
		open: l.Memory == nil, dynamic: l.SharedBytes, clock: l.Clock, resident: l.Resident,
		traffic: l.Traffic}
	var err error
	if r.grid, r.blocks, err = dims(l.Grid); err != nil {
		return bad("grid: %v", err)
	}
	if r.block, r.threads, err = dims(l.Block); err != nil {
		return bad("block: %v", err)
	}
	largest := 1024
	if k.MaxBlock > 0 {
		largest = min(largest, k.MaxBlock)
	}
	if r.threads > largest {
		return bad("%d threads to a block, and the kernel takes up to %d", r.threads, largest)
	}
	need := 0
	for _, p := range k.Params {
		need = p.Offset + p.Size
	}
	if len(l.Params) != need {
		return bad("%d bytes of parameters, not %d", len(l.Params), need)
	}
	if l.SharedBytes < 0 || l.SharedBytes > maxVariable {
		return bad("%d bytes of shared memory", l.SharedBytes)
	}
	r.sharedBytes = k.SharedBytes + l.SharedBytes
	r.memory = slices.Clone(l.Memory)
	if data := k.module.data; len(data) > 0 {
		pos := alignedTo(data, maxAlign)
		r.data = uint64(uintptr(unsafe.Pointer(&pos[0])))
		r.memory = append(r.memory, Region{Base: r.data, Size: uint64(len(pos))})
	}
	if r.clock == nil {
		r.clock = func() uint64 { return uint64(time.Now().UnixNano()) }
	}
	if r.resident <= 0 {
		r.resident = 16
	}
	r.resident = min(r.resident, r.blocks)
	workers := min(max(l.Workers, 1), r.resident)
	r.ctx, r.stop = context.WithCancelCause(ctx)
	defer r.stop(nil)
	r.stats.Executed = make([]int64, len(k.prog.insts))
	var wg sync.WaitGroup
	for i := range workers {
		places := r.resident / workers
		if i < r.resident%workers {
			places++
		}
		wg.Go(func() {
			if err := r.work(i, places); err != nil {
				r.stop(err)
			}
		})
	}
	wg.Wait()
	r.stats.Compared, r.stats.Differed = r.compared.Load(), r.differed.Load()
	runtime.KeepAlive(k.module.data)
	if cause := context.Cause(r.ctx); cause != nil {
		if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
			cause = fmt.Errorf("kernel %s: after %d instructions: %w", k.Name, r.used.Load(), cause)
		}
		return r.stats, cause
	}
	return r.stats, nil
}

// alignedTo cuts what lies before an aligned address off.
func alignedTo(b []byte, align int) []byte {
	off := int(uintptr(unsafe.Pointer(&b[0])) & uintptr(align-1))
	return b[(align-off)&(align-1):]
}

// work runs blocks in some places until none is left. An address that is not mapped ends it with an
// error.
func (r *launch) work(worker, places int) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	counts := make([]int64, len(r.kernel.prog.insts))
	var total, lanes int64
	var moved Traffic
	var running *warp
	defer func() {
		if running != nil { // a fault of the CPU in the middle of an instruction
			if cause := recover(); cause != nil {
				e, ok := cause.(interface {
					error
					Addr() uintptr
				})
				if !ok {
					panic(cause)
				}
				running.faultf(0, "address %#x is not mapped", e.Addr())
				err = running.fault
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stats.Instructions += total
		r.stats.Lanes += lanes
		for i, n := range counts {
			r.stats.Executed[i] += n
		}
		r.stats.Traffic.add(moved)
	}()
	var list []*block
	for i := range places {
		b := &block{run: r, place: worker*places + i, counts: counts, moved: &moved}
		if !b.begin() {
			break
		}
		list = append(list, b)
	}
	state := mix(r.seed ^ uint64(worker)<<56)
	for len(list) > 0 {
		ran := 0
		wake := uint64(math.MaxUint64)
		if r.seed != 0 {
			state = mix(state)
			i := int(state % uint64(len(list)))
			list[0], list[i] = list[i], list[0]
		}
		for i := 0; i < len(list); i++ {
			b := list[i]
			length := turnLength
			if r.seed != 0 {
				for k := len(b.order) - 1; k > 0; k-- {
					state = mix(state)
					m := int(state % uint64(k+1))
					b.order[k], b.order[m] = b.order[m], b.order[k]
				}
			}
			progress := 0
			blockWake := uint64(math.MaxUint64)
			for _, at := range b.order {
				w := b.warps[at]
				if len(w.paths) == 0 {
					continue
				}
				if r.seed != 0 {
					state = mix(state)
					length = 1 + int(state%turnLength)
				}
				running = w
				n := w.run(length)
				running = nil
				if w.fault != nil {
					return w.fault
				}
				progress += n
				for _, p := range w.paths {
					switch p.state {
					case ready:
						progress++
					case asleep:
						blockWake = min(blockWake, p.wake)
					}
				}
			}
			ran += progress
			total += int64(progress)
			wake = min(wake, blockWake)
			lanes += b.lanes
			b.lanes = 0
			if b.alive == 0 {
				if !b.begin() {
					list = slices.Delete(list, i, i+1)
					i--
				}
				continue
			}
			if progress == 0 && blockWake == math.MaxUint64 {
				return b.deadlock()
			}
		}
		if used := r.used.Add(int64(ran)); r.limit > 0 && used > r.limit {
			return fmt.Errorf("kernel %s: more than MaxInstructions, %d: %s", r.kernel.Name, r.limit,
				where(list))
		}
		if r.ctx.Err() != nil {
			return nil
		}
		if ran == 0 && len(list) > 0 && wake != math.MaxUint64 {
			if now := r.now(); wake > now {
				time.Sleep(time.Duration(wake - now))
			} else {
				runtime.Gosched()
			}
		}
	}
	return nil
}

// begin takes the next block of the grid into the place.
func (b *block) begin() bool {
	r := b.run
	next := r.next.Add(1) - 1
	if next >= int64(r.blocks) {
		return false
	}
	b.index = int(next)
	b.alive, b.trips = r.threads, trips{}
	clear(b.bars[:])
	warps := (r.threads + 31) / 32
	if b.warps == nil {
		b.shared = alignedTo(make([]byte, r.sharedBytes+maxAlign), maxAlign)[:r.sharedBytes]
		b.local = alignedTo(make([]byte, warps*32*r.kernel.LocalBytes+maxAlign), maxAlign)
		for i := range warps {
			b.warps = append(b.warps, &warp{block: b})
			b.order = append(b.order, i)
		}
	}
	junk(b.shared, r.seed^uint64(b.index)<<32)
	junk(b.local[:warps*32*r.kernel.LocalBytes], r.seed^uint64(b.index)<<32+1)
	for i, w := range b.warps {
		w.start(i, min(32, r.threads-i*32))
	}
	return true
}

// arriveAt brings a path to a barrier.
func (b *block) arriveAt(w *warp, p *path, in *inst) {
	lane := 0
	for p.lanes>>lane&1 == 0 {
		lane++
	}
	id := w.regs[in.a][lane]
	if id >= uint64(len(b.bars)) {
		w.faultf(lane, "barrier %d; a block has 0 to %d", id, len(b.bars)-1)
		return
	}
	want := 0
	if in.b != sink {
		want = int(w.regs[in.b][lane])
		if want == 0 || want%32 != 0 {
			w.faultf(lane, "a barrier of %d threads; it takes a multiple of 32", want)
			return
		}
	}
	m := &b.bars[id]
	if m.arrived > 0 && m.want != want {
		w.faultf(lane, "barrier %d of %d threads, where others came to one of %d", id, want, m.want)
		return
	}
	for i, q := range m.paths {
		if m.of[i] == w && q.pc != p.pc {
			w.faultf(lane, "lanes of this warp wait at another barrier instruction, ptx line %d; all of a warp use the same",
				b.run.kernel.prog.insts[q.pc].line)
			return
		}
	}
	m.want = want
	for n := p.lanes; n != 0; n &= n - 1 {
		m.arrived++
	}
	if in.imm == 1 { // bar.arrive does not wait
		p.pc++
	} else {
		p.state = atBarrier
		m.paths, m.of = append(m.paths, p), append(m.of, w)
	}
	b.open(m)
}

// open lets everybody go on from a barrier to which all have come.
func (b *block) open(m *meeting) {
	want := m.want
	if want == 0 {
		want = b.alive
	}
	if m.arrived == 0 || m.arrived < want {
		return
	}
	for i, p := range m.paths {
		p.state, p.alone = ready, 0
		p.pc++
		if b.run.traffic {
			m.of[i].trips.await(b.trips)
		}
	}
	*m = meeting{}
}

// ended takes threads out of the block; the others do not wait for them.
func (b *block) ended(threads int) {
	b.alive -= threads
	for i := range b.bars {
		b.open(&b.bars[i])
	}
}

func (b *block) deadlock() error {
	return fmt.Errorf("kernel %s, block %d: no thread can go on: %s", b.run.kernel.Name, b.index,
		where([]*block{b}))
}

// where describes what the threads of some blocks do, up to a few.
func where(list []*block) string {
	var out []string
	for _, b := range list {
		for _, w := range b.warps {
			if s := w.describe(); s != "" {
				out = append(out, s)
			}
			for _, p := range w.paths {
				if p.state == ready || p.state == asleep {
					out = append(out, fmt.Sprintf("block %d warp %d lanes %#08x run at ptx line %d",
						b.index, w.index, p.lanes, b.run.kernel.prog.insts[p.pc].line))
				}
			}
			if len(out) > 4 {
				return strings.Join(append(out[:4], "…"), "; ")
			}
		}
	}
	return strings.Join(out, "; ")
}
