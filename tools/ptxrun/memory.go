package ptxrun

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// access holds what a load, a store or an atomic needs besides its registers.
type access struct {
	space  space
	bytes  int // of one element
	width  int // of the register, in bits
	signed bool
	strong bool   // one access of the memory model: atomic, in the order of the program
	rmw    string // of an atomic
	typ    ptype
}

var (
	orders    = []string{"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
	cacheOps  = []string{"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}
	scopes    = []string{"cta", "cluster", "gpu", "sys"}
	cacheHint = []string{"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
		"L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B"}
	stateSpaces = []string{"global", "const", "shared", "local", "param"}
)

// access takes what a load or store may have. All orders are run sequentially consistent, which
// every scope allows; weak accesses are plain ones.
func (o *opcode) access() (*access, int, error) {
	a := &access{}
	for m := o.take(orders...); m != ""; m = o.take(orders...) {
		a.strong = a.strong || m != "weak"
	}
	scope := o.take(scopes...)
	o.take(cacheOps...)
	for o.take(cacheHint...) != "" {
	}
	a.space = spaces["."+o.take(stateSpaces...)]
	n := 1
	switch o.take("v2", "v4") {
	case "v2":
		n = 2
	case "v4":
		n = 4
	}
	if scope != "" && !a.strong {
		return nil, 0, fmt.Errorf(".%s without an order", scope)
	}
	t, err := o.typ()
	if err != nil {
		return nil, 0, err
	}
	if t.kind == 'p' || n*t.bits > 128 {
		return nil, 0, wrong(o, t)
	}
	a.typ, a.bytes, a.signed = t, t.bits/8, t.kind == 's'
	return a, n, nil
}

func load(c *compiler, o *opcode, ops []string) (err error) {
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	a, n, err := o.access()
	if err != nil {
		return err
	}
	c.in.mem, c.in.observes = a, a.strong
	to := []string{ops[0]}
	if v, ok := vector(ops[0]); ok != (n > 1) || ok && len(v) != n {
		return fmt.Errorf("%s is not %d registers", ops[0], n)
	} else if ok {
		to = v
	}
	for _, name := range to {
		s, width, err := c.dst(name, a.typ, true)
		if err != nil {
			return err
		}
		c.in.list = append(c.in.list, s)
		a.width = width
	}
	c.in.exec = loadLanes
	if n == 1 && a.space == global && !a.strong && !a.signed {
		switch a.bytes {
		case 4:
			c.in.exec = load32
		case 8:
			c.in.exec = load64
		}
	}
	c.in.a, c.in.imm, err = c.address(ops[1])
	return err
}

func store(c *compiler, o *opcode, ops []string) (err error) {
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	a, n, err := o.access()
	if err != nil {
		return err
	}
	if a.space == constant || a.space == parameter {
		return fmt.Errorf("a kernel does not write this space")
	}
	c.in.mem = a
	from := []string{ops[1]}
	if v, ok := vector(ops[1]); ok != (n > 1) || ok && len(v) != n {
		return fmt.Errorf("%s is not %d registers", ops[1], n)
	} else if ok {
		from = v
	}
	for _, name := range from {
		s, err := c.srcOf(name, a.typ, true)
		if err != nil {
			return err
		}
		c.in.list = append(c.in.list, s)
	}
	c.in.exec = storeLanes
	c.in.a, c.in.imm, err = c.address(ops[0])
	return err
}

// at turns an address of a lane into a pointer to size bytes, or reports a fault and returns nil.
// The lane's own memory moves for nobody: run keeps it reachable.
func (w *warp) at(sp space, addr uint64, size, lane int, write bool) unsafe.Pointer {
	if addr&uint64(size-1) != 0 {
		w.faultf(lane, "address %#x is not aligned to %d bytes", addr, size)
		return nil
	}
	if sp == generic {
		switch sp = global; addr >> windowShift {
		case windows[shared] >> windowShift:
			sp = shared
		case windows[local] >> windowShift:
			sp = local
		case windows[parameter] >> windowShift:
			sp = parameter
		}
		if sp != global {
			addr &= windowMask
		}
	}
	var of []byte
	switch sp {
	case global, constant:
		if !w.allowed(addr, uint64(size), write) {
			w.faultf(lane, "address %#x+%d is outside the memory of the launch", addr, size)
			return nil
		}
		return *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	case shared:
		of = w.block.shared
	case local:
		n := w.block.run.kernel.LocalBytes
		of = w.block.local[(w.index*32+lane)*n:][:n]
	case parameter:
		of = w.block.run.params
		if write {
			w.faultf(lane, "write to a parameter")
			return nil
		}
	}
	if addr > uint64(len(of)) || uint64(len(of))-addr < uint64(size) {
		w.faultf(lane, "address %#x+%d is outside the %d bytes of %s memory", addr, size, len(of),
			spaceNames[sp])
		return nil
	}
	return unsafe.Pointer(&of[addr])
}

var spaceNames = map[space]string{global: "global", constant: "constant", shared: "shared",
	local: "local", parameter: "parameter"}

// allowed checks an address against the launch's list; the last region found is tried first.
func (w *warp) allowed(addr, size uint64, write bool) bool {
	r := w.region
	if addr-r.Base < r.Size && addr-r.Base+size <= r.Size && !(write && r.ReadOnly) {
		return true
	}
	run := w.block.run
	if run.open {
		return addr >= 4096 && addr < 1<<47
	}
	for _, r := range run.memory {
		if addr-r.Base < r.Size && addr-r.Base+size <= r.Size && !(write && r.ReadOnly) {
			w.region = r
			return true
		}
	}
	return false
}

func load32(w *warp, in *inst, lanes uint32) {
	d, a := &w.regs[in.list[0]], &w.regs[in.a]
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		p := w.at(global, a[l]+uint64(in.imm), 4, l, false)
		if p == nil {
			return
		}
		d[l] = uint64(*(*uint32)(p))
	}
}

func load64(w *warp, in *inst, lanes uint32) {
	d, a := &w.regs[in.list[0]], &w.regs[in.a]
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		p := w.at(global, a[l]+uint64(in.imm), 8, l, false)
		if p == nil {
			return
		}
		d[l] = *(*uint64)(p)
	}
}

func loadLanes(w *warp, in *inst, lanes uint32) {
	a, m := &w.regs[in.a], in.mem
	for left := lanes; left != 0; left &= left - 1 {
		l := bits.TrailingZeros32(left) & 31
		p := w.at(m.space, a[l]+uint64(in.imm), m.bytes*len(in.list), l, false)
		if p == nil {
			return
		}
		for i, s := range in.list {
			v := read(unsafe.Add(p, i*m.bytes), m.bytes, m.strong)
			if m.signed {
				v = truncate(uint64(signed(v, m.bytes*8)), m.width)
			}
			w.regs[s][l] = v
		}
	}
}

func storeLanes(w *warp, in *inst, lanes uint32) {
	a, m := &w.regs[in.a], in.mem
	for left := lanes; left != 0; left &= left - 1 {
		l := bits.TrailingZeros32(left) & 31
		p := w.at(m.space, a[l]+uint64(in.imm), m.bytes*len(in.list), l, true)
		if p == nil {
			return
		}
		for i, s := range in.list {
			write(unsafe.Add(p, i*m.bytes), w.regs[s][l], m.bytes, m.strong)
		}
	}
}

func read(p unsafe.Pointer, bytes int, strong bool) uint64 {
	switch {
	case bytes == 4 && strong:
		return uint64(atomic.LoadUint32((*uint32)(p)))
	case bytes == 4:
		return uint64(*(*uint32)(p))
	case bytes == 8 && strong:
		return atomic.LoadUint64((*uint64)(p))
	case bytes == 8:
		return *(*uint64)(p)
	case bytes == 2:
		return uint64(*(*uint16)(p))
	}
	return uint64(*(*uint8)(p))
}

func write(p unsafe.Pointer, v uint64, bytes int, strong bool) {
	switch {
	case bytes == 4 && strong:
		atomic.StoreUint32((*uint32)(p), uint32(v))
	case bytes == 4:
		*(*uint32)(p) = uint32(v)
	case bytes == 8 && strong:
		atomic.StoreUint64((*uint64)(p), v)
	case bytes == 8:
		*(*uint64)(p) = v
	case bytes == 2:
		*(*uint16)(p) = uint16(v)
	default:
		*(*uint8)(p) = uint8(v)
	}
}

// update is a read-modify-write: what old becomes with b, and for cas c.
func update(op string, t ptype) func(old, b, c uint64) uint64 {
	n := t.bits
	integer := t.kind == 'u' || t.kind == 's'
	switch {
	case t.kind == 'f' && op == "add" && n == 32:
		return func(old, b, _ uint64) uint64 { return bits32(f32(old) + f32(b)) }
	case t.kind == 'f' && op == "add":
		return func(old, b, _ uint64) uint64 { return bits64(f64(old) + f64(b)) }
	case integer && op == "add":
		return func(old, b, _ uint64) uint64 { return truncate(old+b, n) }
	case integer && (op == "min" || op == "max"):
		least := op == "min"
		return func(old, b, _ uint64) uint64 {
			less := old < b
			if t.kind == 's' {
				less = signed(old, n) < signed(b, n)
			}
			if less == least {
				return old
			}
			return b
		}
	case t == ptype{'u', 32} && op == "inc":
		return func(old, b, _ uint64) uint64 {
			if old >= b {
				return 0
			}
			return old + 1
		}
	case t == ptype{'u', 32} && op == "dec":
		return func(old, b, _ uint64) uint64 {
			if old == 0 || old > b {
				return b
			}
			return old - 1
		}
	case t.kind != 'b':
	case op == "and":
		return func(old, b, _ uint64) uint64 { return old & b }
	case op == "or":
		return func(old, b, _ uint64) uint64 { return old | b }
	case op == "xor":
		return func(old, b, _ uint64) uint64 { return old ^ b }
	case op == "exch":
		return func(_, b, _ uint64) uint64 { return b }
	case op == "cas":
		return func(old, b, c uint64) uint64 {
			if old == b {
				return c
			}
			return old
		}
	}
	return nil
}

// readModifyWrite is atom and red. Lanes come one after the other, from one that the seed chooses.
func readModifyWrite(c *compiler, o *opcode, ops []string) (err error) {
	m := &access{strong: true}
	o.take("relaxed", "acquire", "release", "acq_rel")
	o.take(scopes...)
	m.space = spaces["."+o.take("global", "shared")]
	m.rmw = o.take("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
	t, err := o.typ()
	if err != nil {
		return err
	}
	m.typ, m.bytes = t, t.bits/8
	f := update(m.rmw, t)
	if f == nil || t.bits < 32 {
		return fmt.Errorf("%s has no .%s.%s", o.base, m.rmw, t)
	}
	sources := 1
	if m.rmw == "cas" {
		sources = 2
	}
	if o.base == "atom" {
		if err := count(ops, 2+sources, 2+sources); err != nil {
			return err
		}
		if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
			return err
		}
		ops = ops[1:]
	} else if m.rmw == "cas" || m.rmw == "exch" {
		return fmt.Errorf("red has no .%s", m.rmw)
	}
	if err := count(ops, 1+sources, 1+sources); err != nil {
		return err
	}
	if c.in.a, c.in.imm, err = c.address(ops[0]); err != nil {
		return err
	}
	if c.in.b, err = c.srcOf(ops[1], t, false); err != nil {
		return err
	}
	if sources == 2 {
		if c.in.c, err = c.srcOf(ops[2], t, false); err != nil {
			return err
		}
	}
	c.in.mem, c.in.f3, c.in.exec, c.in.observes = m, f, atomicLanes, true
	return nil
}

func atomicLanes(w *warp, in *inst, lanes uint32) {
	d, a, b, c, m := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], &w.regs[in.c], in.mem
	turn := w.turn
	for left := bits.RotateLeft32(lanes, -turn); left != 0; left &= left - 1 {
		l := (bits.TrailingZeros32(left) + turn) & 31
		p := w.at(m.space, a[l]+uint64(in.imm), m.bytes, l, true)
		if p == nil {
			return
		}
		var old uint64
		for done := false; !done; {
			old = read(p, m.bytes, true)
			v := in.f3(old, b[l], c[l])
			if m.bytes == 4 {
				done = atomic.CompareAndSwapUint32((*uint32)(p), uint32(old), uint32(v))
			} else {
				done = atomic.CompareAndSwapUint64((*uint64)(p), old, v)
			}
		}
		d[l] = old
	}
}

// fence and membar: Go's atomic operations are sequentially consistent, and on this machine a plain
// access does not pass one.
func fence(c *compiler, o *opcode, ops []string) error {
	if o.base == "fence" {
		if o.take("sc", "acq_rel") == "" || o.take(scopes...) == "" {
			return fmt.Errorf("fence needs .sc or .acq_rel and a scope")
		}
	} else if o.take("cta", "gl", "sys") == "" {
		return fmt.Errorf("membar needs .cta, .gl or .sys")
	}
	c.in.exec = func(w *warp, _ *inst, _ uint32) { w.fence.Add(1) }
	return count(ops, 0, 0)
}

// pending is a copy of cp.async of one lane: it reads and writes when the lane waits for its group.
type pending struct {
	to, from    uint64
	bytes, real int // what is written, and how much of that is read; the rest are zeros
	group       int
}

func asyncCopy(c *compiler, o *opcode, ops []string) (err error) {
	number := func(text string) (int64, error) {
		v, ok := parseNumber(text, ptype{'u', 32})
		if !ok {
			return 0, fmt.Errorf("%s is no number", text)
		}
		return int64(v), nil
	}
	switch o.take("commit_group", "wait_group", "wait_all") {
	case "commit_group":
		c.in.exec = func(w *warp, _ *inst, lanes uint32) {
			for m := lanes; m != 0; m &= m - 1 {
				w.groups[bits.TrailingZeros32(m)&31]++
			}
		}
		return count(ops, 0, 0)
	case "wait_group":
		if err := count(ops, 1, 1); err != nil {
			return err
		}
		c.in.imm, err = number(ops[0])
		c.in.exec = func(w *warp, in *inst, lanes uint32) {
			for m := lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				w.finish(l, w.groups[l]-int(in.imm))
			}
		}
		return err
	case "wait_all":
		c.in.exec = func(w *warp, _ *inst, lanes uint32) {
			for m := lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				w.finish(l, w.groups[l]+1)
			}
		}
		return count(ops, 0, 0)
	}
	around := o.take("ca", "cg")
	o.take(cacheHint...)
	if around == "" || o.take("shared") == "" || o.take("global") == "" {
		return fmt.Errorf("cp.async copies .shared.global with .ca or .cg")
	}
	if err := count(ops, 3, 4); err != nil {
		return err
	}
	n, err := number(ops[2])
	if err != nil {
		return err
	}
	if n != 16 && (around == "cg" || n != 4 && n != 8) {
		return fmt.Errorf("cp.async.%s does not copy %d bytes", around, n)
	}
	if c.in.a, c.in.imm, err = c.address(ops[0]); err != nil {
		return err
	}
	var off int64
	if c.in.b, off, err = c.address(ops[1]); err != nil {
		return err
	}
	c.in.c = -1
	whole := len(ops) == 3
	if !whole {
		if c.in.c, err = c.srcOf(ops[3], ptype{'u', 32}, false); err != nil {
			return err
		}
	} else {
		c.in.c = sink
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		to, from, size := &w.regs[in.a], &w.regs[in.b], &w.regs[in.c]
		for m := lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			p := pending{to: to[l] + uint64(in.imm), from: from[l] + uint64(off), bytes: int(n),
				real: int(n), group: w.groups[l]}
			if !whole {
				p.real = int(min(size[l], uint64(n)))
			}
			if p.from&uint64(n-1) != 0 {
				w.faultf(l, "address %#x is not aligned to %d bytes", p.from, n)
				return
			}
			if w.copyNow() {
				w.copyAsync(l, p)
			} else {
				w.copies[l] = append(w.copies[l], p)
			}
		}
	}
	return nil
}

// finish does the copies of the groups before one.
func (w *warp) finish(lane, before int) {
	kept := w.copies[lane][:0]
	for _, p := range w.copies[lane] {
		if p.group < before {
			w.copyAsync(lane, p)
		} else {
			kept = append(kept, p)
		}
	}
	w.copies[lane] = kept
}

func (w *warp) copyAsync(lane int, p pending) {
	to := w.at(shared, p.to, p.bytes, lane, true)
	if to == nil {
		return
	}
	d := unsafe.Slice((*byte)(to), p.bytes)
	clear(d)
	if p.real == 0 {
		return
	}
	if !w.allowed(p.from, uint64(p.real), false) {
		w.faultf(lane, "address %#x+%d is outside the memory of the launch", p.from, p.real)
		return
	}
	copy(d, unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p.from))), p.real))
}

// junk fills memory that begins undefined with what is not zero and differs by place.
func junk(b []byte, seed uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], mix(seed+uint64(i)))
	}
	for i := len(b) &^ 7; i < len(b); i++ {
		b[i] = 0xa5
	}
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
