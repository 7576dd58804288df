package ptxrun

import (
	"math/bits"
	"slices"
)

// basic is a basic block: instructions from first up to last.
type basic struct {
	first, last int32
	next, prev  []int32
}

// leaves returns where a lane may be after an instruction; nothing after its end.
func (in *inst) leaves(at int32) []int32 {
	guarded := in.guard != predTrue || in.not
	var out []int32
	switch in.kind {
	case branch:
		out = append(out, in.target)
	case branchTable:
		out = append(out, in.targets...)
	case exit, trap:
	default:
		return append(out, at+1)
	}
	if guarded && !slices.Contains(out, at+1) {
		out = append(out, at+1)
	}
	return out
}

// blocks divides a program into basic blocks and names the block of each instruction.
func (p *program) blocks() ([]basic, []int32) {
	leader := make([]bool, len(p.insts)+1)
	leader[0] = true
	for i := range p.insts {
		if in := &p.insts[i]; in.kind != plain && in.kind != collective && in.kind != barrier &&
			in.kind != sleep {
			leader[i+1] = true
			for _, n := range in.leaves(int32(i)) {
				leader[n] = true
			}
		}
	}
	var out []basic
	of := make([]int32, len(p.insts))
	for i := range p.insts {
		if leader[i] {
			out = append(out, basic{first: int32(i)})
		}
		of[i] = int32(len(out) - 1)
		out[len(out)-1].last = int32(i)
	}
	for b := range out {
		last := out[b].last
		for _, n := range p.insts[last].leaves(last) {
			out[b].next = append(out[b].next, of[n])
			out[of[n]].prev = append(out[of[n]].prev, int32(b))
		}
	}
	return out, of
}

// reconverge finds for each branch where its lanes meet again: the first instruction of the block
// that post-dominates it immediately (after Cooper, Harvey and Kennedy, "A Simple, Fast Dominance
// Algorithm", on the reversed graph). Instructions that may leave lanes behind by their guard meet
// behind it.
func (p *program) reconverge() {
	blocks, of := p.blocks()
	end := int32(len(blocks)) // follows every block that ends lanes
	// A post-order walk from the end, against the edges.
	order := make([]int32, 0, len(blocks)+1)
	number := make([]int32, len(blocks)+1)
	for i := range number {
		number[i] = -1
	}
	var ends []int32
	for b := range blocks {
		in := &p.insts[blocks[b].last]
		if in.kind == exit || in.kind == trap {
			ends = append(ends, int32(b))
		}
	}
	type visit struct {
		b    int32
		next int
	}
	prev := func(b int32) []int32 {
		if b == end {
			return ends
		}
		return blocks[b].prev
	}
	seen := make([]bool, len(blocks)+1)
	seen[end] = true
	for stack := []visit{{end, 0}}; len(stack) > 0; {
		v := &stack[len(stack)-1]
		if from := prev(v.b); v.next < len(from) {
			n := from[v.next]
			v.next++
			if !seen[n] {
				seen[n] = true
				stack = append(stack, visit{n, 0})
			}
			continue
		}
		number[v.b] = int32(len(order))
		order = append(order, v.b)
		stack = stack[:len(stack)-1]
	}
	idom := make([]int32, len(blocks)+1)
	for i := range idom {
		idom[i] = -1
	}
	idom[end] = end
	meet := func(a, b int32) int32 {
		for a != b {
			for number[a] < number[b] {
				a = idom[a]
			}
			for number[b] < number[a] {
				b = idom[b]
			}
		}
		return a
	}
	for changed := true; changed; {
		changed = false
		for i := len(order) - 2; i >= 0; i-- {
			b := order[i]
			next := blocks[b].next
			if in := &p.insts[blocks[b].last]; in.kind == exit || in.kind == trap {
				next = append(slices.Clone(next), end)
			}
			best := int32(-1)
			for _, n := range next {
				switch {
				case idom[n] < 0:
				case best < 0:
					best = n
				default:
					best = meet(best, n)
				}
			}
			if best >= 0 && idom[b] != best {
				idom[b], changed = best, true
			}
		}
	}
	for i := range p.insts {
		in := &p.insts[i]
		switch in.kind {
		case branch, branchTable:
			if d := idom[of[i]]; d >= 0 && d != end {
				in.meet = blocks[d].first
			}
		case collective, barrier, sleep:
			if in.guard != predTrue || in.not {
				in.meet = int32(i + 1)
			}
		}
		if in.meet >= 0 {
			p.insts[in.meet].join = true
		}
	}
}

// flowOf holds what an instruction reads and writes, as slots.
type flowOf struct{ uses, defs []int32 }

// set is a set of slots.
type set []uint64

func (s set) add(i int32)  { s[i/64] |= 1 << (i % 64) }
func (s set) drop(i int32) { s[i/64] &^= 1 << (i % 64) }

// shareSlots gives registers that are never alive together the same row, so that a warp's file fits
// the CPU's caches. A lane has a column of its own, so what one lane's path says of a register
// holds for it alone, and divergence changes nothing.
func (p *program) shareSlots(flow []flowOf) {
	blocks, _ := p.blocks()
	words := int(p.slots)/64 + 1
	row := func() set { return make(set, words) }
	gen, kill, in := make([]set, len(blocks)), make([]set, len(blocks)), make([]set, len(blocks))
	for b := range blocks {
		gen[b], kill[b], in[b] = row(), row(), row()
		for i := blocks[b].last; i >= blocks[b].first; i-- {
			if p.always(i) {
				for _, d := range flow[i].defs {
					kill[b].add(d)
					gen[b].drop(d)
				}
			}
			for _, u := range flow[i].uses {
				gen[b].add(u)
			}
		}
		copy(in[b], gen[b])
	}
	out := row()
	liveOut := func(b int) {
		clear(out)
		for _, n := range blocks[b].next {
			for k, v := range in[n] {
				out[k] |= v
			}
		}
	}
	for changed := true; changed; {
		changed = false
		for b := len(blocks) - 1; b >= 0; b-- {
			liveOut(b)
			for k := range out {
				if v := gen[b][k] | out[k]&^kill[b][k]; v != in[b][k] {
					in[b][k], changed = v, true
				}
			}
		}
	}
	// From first to last instruction at which a slot is alive or written, in the order of the text.
	first, last := make([]int32, p.slots), make([]int32, p.slots)
	for s := range first {
		first[s], last[s] = int32(len(p.insts)), -1
	}
	touch := func(s, i int32) {
		first[s], last[s] = min(first[s], i), max(last[s], i)
	}
	each := func(s set, fn func(slot int32)) {
		for k, v := range s {
			for ; v != 0; v &= v - 1 {
				fn(int32(k*64 + bits.TrailingZeros64(v)))
			}
		}
	}
	for b := range blocks {
		each(in[b], func(s int32) { touch(s, blocks[b].first) })
		liveOut(b)
		each(out, func(s int32) { touch(s, blocks[b].last) })
		for i := blocks[b].first; i <= blocks[b].last; i++ {
			for _, s := range flow[i].uses {
				touch(s, i)
			}
			for _, s := range flow[i].defs {
				touch(s, i)
			}
		}
	}
	to := make([]int32, p.slots)
	next := firstSlot
	for i := range p.fills { // they live from before the first instruction to the end
		to[p.fills[i].slot] = next
		p.fills[i].slot = next
		next++
	}
	var order []int32
	for s := firstSlot; s < p.slots; s++ {
		if last[s] >= 0 && to[s] == sink {
			order = append(order, s)
		}
	}
	slices.SortStableFunc(order, func(a, b int32) int { return int(first[a] - first[b]) })
	type busy struct{ slot, until int32 }
	var active []busy
	var free []int32
	for _, s := range order {
		keep := active[:0]
		for _, a := range active {
			if a.until < first[s] {
				free = append(free, a.slot)
			} else {
				keep = append(keep, a)
			}
		}
		active = keep
		if len(free) == 0 {
			free = append(free, next)
			next++
		}
		to[s] = free[len(free)-1]
		free = free[:len(free)-1]
		active = append(active, busy{to[s], last[s]})
	}
	move := func(in *inst) {
		for _, f := range []*int32{&in.d, &in.a, &in.b, &in.c, &in.e} {
			*f = to[*f]
		}
		for _, slots := range [][]int32{in.list, in.uses, in.defs} {
			for k := range slots {
				slots[k] = to[slots[k]]
			}
		}
	}
	for i := range p.insts {
		move(&p.insts[i])
	}
	if p.shadow != nil {
		move(p.shadow)
	}
	p.slots = next
}

// always says that an instruction writes its destinations in every lane that comes by.
func (p *program) always(i int32) bool {
	return p.insts[i].guard == predTrue && !p.insts[i].not
}
