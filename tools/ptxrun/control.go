package ptxrun

import (
	"fmt"
	"math/bits"
)

// Builders of what moves lanes, makes them wait or lets them work together.

func jump(c *compiler, o *opcode, ops []string) (err error) {
	o.take("uni")
	if err := count(ops, 1, 1); err != nil {
		return err
	}
	c.in.kind = branch
	c.in.target, err = c.label(ops[0])
	return err
}

func jumpTable(c *compiler, o *opcode, ops []string) (err error) {
	o.take("uni")
	if o.take("idx") == "" {
		return fmt.Errorf("brx is run as brx.idx only")
	}
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	names, ok := c.src.tables[ops[1]]
	if !ok {
		return fmt.Errorf("no .branchtargets %s", ops[1])
	}
	for _, n := range names {
		pos, err := c.label(n)
		if err != nil {
			return err
		}
		c.in.targets = append(c.in.targets, pos)
	}
	c.in.kind = branchTable
	return c.sources(ptype{'u', 32}, ops[0])
}

func end(c *compiler, o *opcode, ops []string) error {
	o.take("uni")
	c.in.kind = exit
	if o.base == "trap" {
		c.in.kind = trap
	}
	return count(ops, 0, 0)
}

func pause(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 1, 1); err != nil {
		return err
	}
	if t != (ptype{'u', 32}) {
		return wrong(o, t)
	}
	c.in.kind = sleep
	return c.sources(t, ops[0])
}

// barriers is bar.sync, barrier.sync, their .arrive, and bar.warp.sync.
func barriers(c *compiler, o *opcode, ops []string) (err error) {
	u32 := ptype{'u', 32}
	if o.take("warp") != "" {
		if o.take("sync") == "" {
			return fmt.Errorf("bar.warp is run as bar.warp.sync only")
		}
		if err := count(ops, 1, 1); err != nil {
			return err
		}
		c.meets("bar.warp.sync", func(*warp, []part, uint32) {})
		c.in.e, err = c.srcOf(ops[0], u32, false)
		return err
	}
	o.take("cta")
	o.take("aligned")
	c.in.kind = barrier
	switch o.take("sync", "arrive") {
	case "sync":
		if err := count(ops, 1, 2); err != nil {
			return err
		}
	case "arrive":
		c.in.imm = 1
		if err := count(ops, 2, 2); err != nil {
			return err
		}
	default:
		return fmt.Errorf("want .sync or .arrive")
	}
	if err := c.sources(u32, ops[0]); err != nil {
		return err
	}
	if c.in.b = sink; len(ops) == 2 {
		c.in.b, err = c.srcOf(ops[1], u32, false)
	}
	return err
}

// meets makes the instruction a collective; slot e holds the member mask.
func (c *compiler) meets(key string, group func(w *warp, parts []part, member uint32)) {
	c.in.kind, c.in.key, c.in.group = collective, key, group
}

// part is the lanes that one path brings to a collective.
type part struct {
	in    *inst
	lanes uint32
}

// undefinedLane is the value of a lane that reads from one that takes no part.
const undefinedLane = 0xdeadbeef

func shuffle(c *compiler, o *opcode, ops []string) (err error) {
	mode := o.take("idx", "up", "down", "bfly")
	t, err := o.typ()
	if err != nil {
		return err
	}
	if o.take("sync") == "" || mode == "" || t != (ptype{'b', 32}) {
		return wrong(o, t)
	}
	if err := count(ops, 5, 5); err != nil {
		return err
	}
	if ops[0], c.in.p, err = c.dstPred(ops[0]); err != nil {
		return err
	}
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if err := c.sources(ptype{'u', 32}, ops[1:]...); err != nil { // a, b, c and the member mask
		return err
	}
	c.meets("shfl."+mode, func(w *warp, parts []part, member uint32) {
		var value [32]uint64
		var joined uint32
		for _, p := range parts {
			joined |= p.lanes
			a := &w.regs[p.in.a]
			for m := p.lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				value[l] = a[l]
			}
		}
		for _, p := range parts {
			d, b, c := &w.regs[p.in.d], &w.regs[p.in.b], &w.regs[p.in.c]
			var inside uint32
			for m := p.lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				by, clamp, segment := int(b[l]&31), int(c[l]&31), int(c[l]>>8&31)
				limit, least := l&segment|clamp&^segment, l&segment
				from, ok := 0, false
				switch mode {
				case "up":
					from = l - by
					ok = from >= limit
				case "down":
					from = l + by
					ok = from <= limit
				case "bfly":
					from = l ^ by
					ok = from <= limit
				default:
					from = least | by&^segment
					ok = from <= limit
				}
				if ok {
					inside |= 1 << l
				} else {
					from = l
				}
				if joined>>from&1 != 0 {
					d[l] = value[from]
				} else {
					d[l] = undefinedLane
				}
			}
			w.setPred(p.in.p, inside, p.lanes)
		}
	})
	return nil
}

// dstPred splits d|p.
func (c *compiler) dstPred(text string) (string, int32, error) {
	for i := range text {
		if text[i] == '|' {
			p, err := c.predDst(text[i+1:])
			return text[:i], p, err
		}
	}
	return text, predSink, nil
}

func vote(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	mode := o.take("ballot", "any", "all", "uni")
	if o.take("sync") == "" || mode == "" || (t.kind == 'p') == (mode == "ballot") ||
		t.bits != 32 && t.kind != 'p' {
		return wrong(o, t)
	}
	if err := count(ops, 3, 3); err != nil {
		return err
	}
	if mode == "ballot" {
		c.in.d, _, err = c.dst(ops[0], t, false)
	} else {
		c.in.p, err = c.predDst(ops[0])
	}
	if err != nil {
		return err
	}
	bare := ops[1]
	if bare[0] == '!' {
		bare, c.in.notQ = bare[1:], true
	}
	if c.in.q, err = c.pred(bare); err != nil {
		return err
	}
	if c.in.e, err = c.srcOf(ops[2], ptype{'u', 32}, false); err != nil {
		return err
	}
	c.meets("vote."+mode, func(w *warp, parts []part, member uint32) {
		var yes, joined uint32
		for _, p := range parts {
			v := w.preds[p.in.q]
			if p.in.notQ {
				v = ^v
			}
			yes |= v & p.lanes
			joined |= p.lanes
		}
		for _, p := range parts {
			switch mode {
			case "ballot":
				w.spread(p.in.d, p.lanes, uint64(yes))
				continue
			case "any":
				w.setPred(p.in.p, all(yes != 0), p.lanes)
			case "all":
				w.setPred(p.in.p, all(yes == joined), p.lanes)
			default:
				w.setPred(p.in.p, all(yes == 0 || yes == joined), p.lanes)
			}
		}
	})
	return nil
}

func all(yes bool) uint32 {
	if yes {
		return full
	}
	return 0
}

// spread writes one value to lanes of a register.
func (w *warp) spread(slot int32, lanes uint32, v uint64) {
	d := &w.regs[slot]
	for m := lanes; m != 0; m &= m - 1 {
		d[bits.TrailingZeros32(m)&31] = v
	}
}

// gather reads a register of every lane that takes part.
func (w *warp) gather(parts []part, slot func(in *inst) int32) (value [32]uint64, joined uint32) {
	for _, p := range parts {
		joined |= p.lanes
		a := &w.regs[slot(p.in)]
		for m := p.lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			value[l] = a[l]
		}
	}
	return value, joined
}

func slotA(in *inst) int32 { return in.a }

func match(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	mode := o.take("any", "all")
	if o.take("sync") == "" || mode == "" || t.kind != 'b' || t.bits < 32 {
		return wrong(o, t)
	}
	if err := count(ops, 3, 3); err != nil {
		return err
	}
	u32 := ptype{'u', 32}
	if ops[0], c.in.p, err = c.dstPred(ops[0]); err != nil {
		return err
	}
	if c.in.d, _, err = c.dst(ops[0], u32, false); err != nil {
		return err
	}
	if c.in.a, err = c.srcOf(ops[1], t, false); err != nil {
		return err
	}
	if c.in.e, err = c.srcOf(ops[2], u32, false); err != nil {
		return err
	}
	c.meets("match."+mode+t.String(), func(w *warp, parts []part, member uint32) {
		value, joined := w.gather(parts, slotA)
		for _, p := range parts {
			for m := p.lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				var same uint32
				for k := joined; k != 0; k &= k - 1 {
					if i := bits.TrailingZeros32(k) & 31; value[i] == value[l] {
						same |= 1 << i
					}
				}
				if mode == "all" {
					w.setPred(p.in.p, all(same == joined), 1<<l)
					if same != joined {
						same = 0
					}
				}
				w.regs[p.in.d][l] = uint64(same)
			}
		}
	})
	return nil
}

func redux(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	mode := o.take("add", "min", "max", "and", "or", "xor")
	f := update(mode, t)
	if o.take("sync") == "" || f == nil || t.bits != 32 || t.kind == 'f' {
		return wrong(o, t)
	}
	if err := count(ops, 3, 3); err != nil {
		return err
	}
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if c.in.a, err = c.srcOf(ops[1], t, false); err != nil {
		return err
	}
	if c.in.e, err = c.srcOf(ops[2], ptype{'u', 32}, false); err != nil {
		return err
	}
	c.meets("redux."+mode+t.String(), func(w *warp, parts []part, member uint32) {
		value, joined := w.gather(parts, slotA)
		r := value[bits.TrailingZeros32(joined)&31]
		for m := joined & (joined - 1); m != 0; m &= m - 1 {
			r = f(r, value[bits.TrailingZeros32(m)&31], 0)
		}
		for _, p := range parts {
			w.spread(p.in.d, p.lanes, r)
		}
	})
	return nil
}

func elect(c *compiler, o *opcode, ops []string) (err error) {
	if o.take("sync") == "" {
		return fmt.Errorf("elect is run as elect.sync only")
	}
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	u32 := ptype{'u', 32}
	if ops[0], c.in.p, err = c.dstPred(ops[0]); err != nil {
		return err
	}
	if c.in.d, _, err = c.dst(ops[0], u32, false); err != nil {
		return err
	}
	if c.in.e, err = c.srcOf(ops[1], u32, false); err != nil {
		return err
	}
	c.meets("elect", func(w *warp, parts []part, member uint32) {
		_, joined := w.gather(parts, slotA)
		leader := bits.TrailingZeros32(joined)
		for _, p := range parts {
			w.spread(p.in.d, p.lanes, uint64(leader))
			w.setPred(p.in.p, 1<<leader, p.lanes)
		}
	})
	return nil
}

func activeMask(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 1, 1); err != nil {
		return err
	}
	if t != (ptype{'b', 32}) {
		return wrong(o, t)
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) { w.spread(in.d, lanes, uint64(lanes)) }
	c.in.d, _, err = c.dst(ops[0], t, false)
	return err
}
