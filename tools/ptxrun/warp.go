package ptxrun

import (
	"fmt"
	"math/bits"
	"strings"
	"sync/atomic"
)

// state names the event that a path waits for.
type state uint8

const (
	ready state = iota
	atCollective
	atBarrier
	asleep
)

// path is lanes of a warp that are at the same instruction. A warp is one path until a branch
// divides it.
type path struct {
	pc     int32
	state  state
	lanes  uint32
	member uint32 // atCollective: the lanes that it waits for
	alone  int32  // instructions since it was divided from others or met them; see patience
	wake   uint64 // asleep: until this time of the launch's clock
	node   *node
}

// node is a place where the lanes that a branch has divided meet again.
type node struct {
	pc              int32
	expect, arrived uint32
	parent          *node
}

// patience bounds the instructions that a path runs while lanes of its warp wait to meet it. It
// may spin for one of those, so they go on alone then, as threads since sm_70 do. Instructions for
// lanes in step find each other by their member masks afterwards. An instruction that can see what
// another lane has done (an atomic or a strong load) counts as observed: loops spin on those.
const (
	patience = 1 << 16
	observed = 1 << 10
)

// slice is the number of instructions a path runs before another path of its warp has a turn.
const slice = 256

// napCost is the cost of a nanosleep against the budget of its warp, in instructions.
const napCost = 64

// warp is 32 lanes of a block.
type warp struct {
	block   *block
	index   int // in the block
	regs    [][32]uint64
	preds   []uint32
	paths   []*path
	waiting []*node // with lanes that have arrived
	exited  uint32  // lanes that ended, and those that the block does not have
	steps   int64
	turn    int // the lane that is first at an atomic
	region  Region
	copies  [32][]pending
	groups  [32]int // committed by the lane
	fence   atomic.Uint64
	fault   error
	at_     int32   // the instruction that runs
	trips   trips   // see Traffic
	arrives []trips // by register slot: how many trips the warp has made when its value is there
	spare   []*node
}

func (w *warp) faultf(lane int, format string, a ...any) {
	if w.fault != nil {
		return
	}
	k := w.block.run.kernel
	w.fault = fmt.Errorf("kernel %s, block %d, warp %d, lane %d, ptx line %d: %s: %s", k.Name,
		w.block.index, w.index, lane, k.prog.insts[w.at_].line, k.src.instrs[w.at_],
		fmt.Sprintf(format, a...))
}

// start makes the warp ready to run from the first instruction.
func (w *warp) start(index, lanes int) {
	run := w.block.run
	prog := run.kernel.prog
	if w.regs == nil {
		w.regs = make([][32]uint64, prog.slots)
		w.preds = make([]uint32, prog.preds)
	}
	w.index, w.fault, w.steps, w.trips = index, nil, 0, trips{}
	if run.traffic {
		w.arrives = make([]trips, prog.slots)
	}
	w.waiting = w.waiting[:0]
	w.groups = [32]int{}
	for l := range w.copies {
		w.copies[l] = w.copies[l][:0]
	}
	seed := mix(run.seed ^ uint64(w.block.index)<<20 ^ uint64(index))
	w.turn = 0
	if run.seed != 0 {
		w.turn = int(seed & 31)
	}
	for s := range w.regs {
		v := seed | 1<<40
		for l := range w.regs[s] {
			w.regs[s][l] = truncate(v, 32) // undefined, but no wider than any register
		}
	}
	for i := range w.preds {
		w.preds[i] = uint32(seed >> 32)
	}
	w.preds[predFalse], w.preds[predTrue] = 0, full
	for _, f := range prog.fills {
		for l := range 32 {
			v := f.value
			if f.of != nil {
				v = f.of(w, l)
			}
			w.regs[f.slot][l] = v
		}
	}
	alive := uint32(full)
	if lanes < 32 {
		alive = 1<<lanes - 1
	}
	w.exited = ^alive
	w.paths = append(w.paths[:0], &path{lanes: alive})
}

// run gives each path that can go on a turn until the budget of instructions is used or none can.
// It returns how many instructions it ran.
func (w *warp) run(budget int) int {
	used := 0
	for used < budget && len(w.paths) > 0 && w.fault == nil {
		ran := 0
		for i := 0; i < len(w.paths) && used < budget && w.fault == nil; {
			p := w.paths[i]
			if p.state == asleep && p.wake <= w.block.run.now() {
				p.state = ready
			}
			if p.state != ready {
				i++
				continue
			}
			n := w.advance(p, min(slice, budget-used))
			used += n
			ran += max(n, 1)
			if i < len(w.paths) && w.paths[i] == p {
				w.mergeInto(i)
				i++
			}
		}
		if w.fault != nil {
			break
		}
		w.release(ran == 0)
		if ran == 0 && !w.anyReady() {
			break
		}
	}
	w.steps += int64(used)
	return used
}

func (w *warp) anyReady() bool {
	for _, p := range w.paths {
		if p.state == ready {
			return true
		}
	}
	return false
}

// mergeInto joins path i with others that are at the same instruction and meet at the same place.
func (w *warp) mergeInto(i int) {
	p := w.paths[i]
	if p.state != ready {
		return
	}
	for k := len(w.paths) - 1; k > i; k-- {
		if q := w.paths[k]; q.state == ready && q.pc == p.pc && q.node == p.node {
			p.lanes |= q.lanes
			p.alone = 0
			q.lanes = 0
			w.remove(q)
		}
	}
}

func (w *warp) remove(p *path) {
	for i, q := range w.paths {
		if q == p {
			w.paths = append(w.paths[:i], w.paths[i+1:]...)
			return
		}
	}
}

// release lets lanes go on that wait to meet others, where those may wait for them: the others have
// run long enough alone, or (stuck) nothing else of the warp can run.
func (w *warp) release(stuck bool) {
	if len(w.waiting) == 0 {
		return
	}
	if stuck {
		for _, p := range w.paths {
			if p.state == asleep {
				stuck = false
			}
		}
	}
	for _, p := range w.paths {
		if p.alone >= patience {
			stuck = true
			p.alone = 0
		}
	}
	if !stuck {
		return
	}
	list := w.waiting
	w.waiting = nil
	for _, n := range list {
		w.paths = append(w.paths, &path{pc: n.pc, lanes: n.arrived, node: n.parent})
		n.expect &^= n.arrived
		n.arrived = 0
	}
}

// arrive ends the path's way at the place where it meets others, if it is there. It reports whether
// the path is gone: it waits, and whoever comes last goes on for all.
func (w *warp) arrive(p *path) bool {
	for p.node != nil && p.node.pc == p.pc {
		n := p.node
		first := n.arrived == 0
		n.arrived |= p.lanes
		if n.arrived != n.expect {
			if first {
				w.waiting = append(w.waiting, n)
			}
			w.remove(p)
			return true
		}
		if !first {
			w.unlist(n)
		}
		p.lanes, p.node, p.alone = n.arrived, n.parent, 0
		w.spare = append(w.spare, n)
	}
	return false
}

func (w *warp) unlist(n *node) {
	for i, q := range w.waiting {
		if q == n {
			w.waiting = append(w.waiting[:i], w.waiting[i+1:]...)
			return
		}
	}
}

// divide sends some of a path's lanes elsewhere. They meet at the instruction meet; -1 is none.
func (w *warp) divide(p *path, lanes uint32, to, rest, meet int32) {
	if meet >= 0 && (p.node == nil || p.node.pc != meet) {
		n := &node{}
		if len(w.spare) > 0 {
			n = w.spare[len(w.spare)-1]
			w.spare = w.spare[:len(w.spare)-1]
		}
		*n = node{pc: meet, expect: p.lanes, parent: p.node}
		p.node = n
	}
	p.lanes &^= lanes
	p.pc, p.alone = rest, 0
	if n := p.node; n != nil && n.pc == to {
		if n.arrived == 0 {
			w.waiting = append(w.waiting, n)
		}
		n.arrived |= lanes
		return
	}
	w.paths = append(w.paths, &path{pc: to, lanes: lanes, node: p.node})
}

// end takes lanes of a path out of the warp for good.
func (w *warp) end(p *path, lanes uint32) {
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		w.finish(l, w.groups[l]+1)
	}
	w.exited |= lanes
	p.lanes &^= lanes
	w.block.ended(bits.OnesCount32(lanes))
	for n := p.node; n != nil; n = n.parent {
		n.expect &^= lanes
		if n.arrived != 0 && n.arrived == n.expect {
			w.unlist(n)
			w.paths = append(w.paths, &path{pc: n.pc, lanes: n.arrived, node: n.parent})
		}
	}
	if p.lanes == 0 {
		w.remove(p)
	}
	w.collect()
}

// advance runs a path until it waits, ends, divides or has had its slice.
func (w *warp) advance(p *path, budget int) int {
	prog := w.block.run.kernel.prog
	counts := w.block.counts
	lanesRun := int64(0)
	used := 0
	defer func() {
		p.alone += int32(used)
		w.block.lanes += lanesRun
	}()
	for used < budget {
		in := &prog.insts[p.pc]
		if in.join && w.arrive(p) {
			return used
		}
		in = &prog.insts[p.pc]
		w.at_ = p.pc
		g := w.preds[in.guard]
		if in.not {
			g = ^g
		}
		lanes := p.lanes & g
		used++
		if lanes != 0 {
			counts[p.pc]++
			lanesRun += int64(bits.OnesCount32(lanes))
			if w.block.run.traffic {
				w.travel(in, lanes)
			}
		}
		if in.kind == plain {
			p.pc++
			if lanes != 0 {
				if in.observes {
					p.alone += observed
				}
				in.exec(w, in, lanes)
				if w.fault != nil {
					return used
				}
			}
			continue
		}
		switch {
		case lanes == 0:
			p.pc++
			continue
		case in.kind == branch && lanes == p.lanes:
			p.pc = in.target
			continue
		case in.kind == branch:
			w.divide(p, lanes, in.target, p.pc+1, in.meet)
			continue
		case in.kind == exit:
			w.end(p, lanes)
			if p.lanes == 0 {
				return used
			}
			p.pc++
			continue
		case in.kind == trap:
			w.faultf(bits.TrailingZeros32(lanes), "trap")
			return used
		case in.kind == branchTable:
			if !w.table(p, in, lanes) {
				return used
			}
			continue
		}
		// Lanes that a guard keeps out go round: the others come behind the instruction.
		if lanes != p.lanes {
			w.divide(p, p.lanes&^lanes, p.pc+1, p.pc, in.meet)
		}
		switch in.kind {
		case collective:
			if !w.together(p, in) {
				return used
			}
		case barrier:
			w.block.arriveAt(w, p, in)
			if p.state != ready || w.fault != nil {
				return used
			}
		case sleep:
			ns := w.regs[in.a][bits.TrailingZeros32(p.lanes)&31]
			p.pc++
			p.state, p.wake = asleep, w.block.run.now()+ns
			p.alone += observed
			used += napCost
			return used
		}
	}
	return used
}

// table is brx.idx: lanes go their ways, all that have the same way together.
func (w *warp) table(p *path, in *inst, lanes uint32) bool {
	index := &w.regs[in.a]
	if lanes != p.lanes {
		w.divide(p, p.lanes&^lanes, p.pc+1, p.pc, in.meet)
	}
	for {
		first := bits.TrailingZeros32(p.lanes) & 31
		if index[first] >= uint64(len(in.targets)) {
			w.faultf(first, "index %d of %d targets", index[first], len(in.targets))
			return false
		}
		to := in.targets[index[first]]
		var same uint32
		for m := p.lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			if v := index[l]; v < uint64(len(in.targets)) && in.targets[v] == to {
				same |= 1 << l
			}
		}
		if same == p.lanes {
			p.pc = to
			return true
		}
		w.divide(p, same, to, p.pc, in.meet)
	}
}

// together runs a collective for a path. It reports false where the path waits for other lanes.
func (w *warp) together(p *path, in *inst) bool {
	masks := &w.regs[in.e]
	first := bits.TrailingZeros32(p.lanes) & 31
	member := uint32(masks[first])
	var same uint32
	for m := p.lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		if uint32(masks[l]) == member {
			same |= 1 << l
		}
	}
	if out := same &^ member; out != 0 {
		w.faultf(bits.TrailingZeros32(out), "the lane is not in its member mask %#08x", member)
		return false
	}
	if same != p.lanes { // one path for each mask
		w.divide(p, p.lanes&^same, p.pc, p.pc, -1)
	}
	if p.lanes == member&^w.exited {
		one := [1]part{{in, p.lanes}}
		in.group(w, one[:], member)
		p.pc++
		return w.fault == nil
	}
	p.state, p.member = atCollective, member
	w.collect()
	return p.state == ready && p.lanes != 0 && w.fault == nil // its lanes may be another path's now
}

// collect runs the collectives for which all lanes have come, from whatever path.
func (w *warp) collect() {
	prog := w.block.run.kernel.prog
	for i := 0; i < len(w.paths); i++ {
		p := w.paths[i]
		if p.state != atCollective {
			continue
		}
		var come uint32
		var list []*path
		for _, q := range w.paths {
			if q.state == atCollective && q.member == p.member &&
				prog.insts[q.pc].key == prog.insts[p.pc].key {
				come |= q.lanes
				list = append(list, q)
			}
		}
		if come != p.member&^w.exited {
			continue
		}
		var parts []part
		for _, q := range list {
			if k := len(parts) - 1; k >= 0 && parts[k].in == &prog.insts[q.pc] {
				parts[k].lanes |= q.lanes
				continue
			}
			parts = append(parts, part{&prog.insts[q.pc], q.lanes})
		}
		w.at_ = p.pc
		parts[0].in.group(w, parts, p.member)
		for _, q := range list {
			q.state = ready
			q.pc++
			q.alone = 0
		}
		w.mergeInto(i)
	}
}

// copyNow decides whether a cp.async copies at once or when it is waited for: both are right.
func (w *warp) copyNow() bool {
	if w.block.run.seed == 0 {
		return false
	}
	return mix(w.block.run.seed^uint64(w.steps)^uint64(w.at_)<<32)&1 == 0
}

// describe lists the places of the lanes that can't go on.
func (w *warp) describe() string {
	k := w.block.run.kernel
	var parts []string
	say := func(lanes uint32, pc int32, what string) {
		parts = append(parts, fmt.Sprintf("warp %d lanes %#08x %s at ptx line %d: %s", w.index,
			lanes, what, k.prog.insts[pc].line, k.src.instrs[pc]))
	}
	for _, p := range w.paths {
		switch p.state {
		case atCollective:
			say(p.lanes, p.pc, fmt.Sprintf("wait for lanes %#08x", p.member&^w.exited))
		case atBarrier:
			say(p.lanes, p.pc, "wait")
		}
	}
	return strings.Join(parts, "; ")
}
