package ptxrun

import (
	"fmt"
	"math/bits"
	"strings"
)

// clocks are special registers that change while a kernel runs; mov reads them.
var clocks = map[string]struct {
	bits int
	read func(w *warp) uint64
}{
	"%globaltimer":    {64, func(w *warp) uint64 { return w.block.run.clock() }},
	"%globaltimer_lo": {32, func(w *warp) uint64 { return truncate(w.block.run.clock(), 32) }},
	"%globaltimer_hi": {32, func(w *warp) uint64 { return w.block.run.clock() >> 32 }},
	"%clock64":        {64, func(w *warp) uint64 { return uint64(w.steps) }},
	"%clock":          {32, func(w *warp) uint64 { return truncate(uint64(w.steps), 32) }},
	"%clock_hi":       {32, func(w *warp) uint64 { return uint64(w.steps) >> 32 }},
}

// specialFill is a special register that a lane has from its start to its end.
func specialFill(name string) (of func(w *warp, lane int) uint64, width int, ok bool) {
	if base, axis, dotted := strings.Cut(name, "."); dotted && len(axis) == 1 {
		i := strings.Index("xyz", axis)
		if i < 0 {
			return nil, 0, false
		}
		switch base {
		case "%tid":
			return func(w *warp, lane int) uint64 {
				dim := w.block.run.block
				t := w.index*32 + lane
				return uint64([3]int{t % dim[0], t / dim[0] % dim[1], t / dim[0] / dim[1]}[i])
			}, 32, true
		case "%ntid":
			return func(w *warp, _ int) uint64 { return uint64(w.block.run.block[i]) }, 32, true
		case "%ctaid":
			return func(w *warp, _ int) uint64 {
				dim := w.block.run.grid
				b := w.block.index
				return uint64([3]int{b % dim[0], b / dim[0] % dim[1], b / dim[0] / dim[1]}[i])
			}, 32, true
		case "%nctaid":
			return func(w *warp, _ int) uint64 { return uint64(w.block.run.grid[i]) }, 32, true
		}
		return nil, 0, false
	}
	mask := func(f func(lane int) uint32) func(*warp, int) uint64 {
		return func(_ *warp, lane int) uint64 { return uint64(f(lane)) }
	}
	switch name {
	case "%laneid":
		of = func(_ *warp, lane int) uint64 { return uint64(lane) }
	case "%warpid":
		of = func(w *warp, _ int) uint64 { return uint64(w.index) }
	case "%nwarpid":
		of = func(w *warp, _ int) uint64 { return uint64(len(w.block.warps)) }
	case "%smid":
		of = func(w *warp, _ int) uint64 { return uint64(w.block.place) }
	case "%nsmid":
		of = func(w *warp, _ int) uint64 { return uint64(w.block.run.resident) }
	case "%lanemask_eq":
		of = mask(func(l int) uint32 { return 1 << l })
	case "%lanemask_lt":
		of = mask(func(l int) uint32 { return 1<<l - 1 })
	case "%lanemask_le":
		of = mask(func(l int) uint32 { return 2<<l - 1 })
	case "%lanemask_gt":
		of = mask(func(l int) uint32 { return ^uint32(2<<l - 1) })
	case "%lanemask_ge":
		of = mask(func(l int) uint32 { return ^uint32(1<<l - 1) })
	case "%dynamic_smem_size":
		of = func(w *warp, _ int) uint64 { return uint64(w.block.run.dynamic) }
	case "%total_smem_size":
		of = func(w *warp, _ int) uint64 { return uint64(w.block.run.sharedBytes) }
	default:
		return nil, 0, false
	}
	return of, 32, true
}

func copyRegister(w *warp, in *inst, lanes uint32) {
	d, a := &w.regs[in.d], &w.regs[in.a]
	if lanes == full {
		*d = *a
		return
	}
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = a[l]
	}
}

func move(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	if t.kind == 'p' {
		if c.in.p, err = c.predDst(ops[0]); err != nil {
			return err
		}
		if c.in.q, err = c.pred(ops[1]); err != nil {
			return err
		}
		c.in.exec = func(w *warp, in *inst, lanes uint32) {
			w.setPred(in.p, w.preds[in.q], lanes)
		}
		return nil
	}
	if t.bits < 16 {
		return wrong(o, t)
	}
	if to, ok := vector(ops[0]); ok {
		return c.unpack(t, to, ops[1])
	}
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if from, ok := vector(ops[1]); ok {
		return c.pack(t, from)
	}
	if clock, ok := clocks[ops[1]]; ok {
		if clock.bits != t.bits {
			return fmt.Errorf("%s has %d bits", ops[1], clock.bits)
		}
		c.in.exec = func(w *warp, in *inst, lanes uint32) {
			v, d := clock.read(w), &w.regs[in.d]
			for m := lanes; m != 0; m &= m - 1 {
				d[bits.TrailingZeros32(m)&31] = v
			}
		}
		return nil
	}
	c.in.exec = copyRegister
	return c.sources(t, ops[1])
}

// element is the type of one of n elements of a packed register.
func element(t ptype, n int) (ptype, error) {
	if n != 2 && n != 4 || t.bits/n < 8 {
		return ptype{}, fmt.Errorf("%s has no %d parts", t, n)
	}
	return ptype{'b', t.bits / n}, nil
}

// unpack is mov.b64 {lo, hi}, a.
func (c *compiler) unpack(t ptype, to []string, from string) error {
	p, err := element(t, len(to))
	if err != nil {
		return err
	}
	for _, name := range to {
		s, _, err := c.dst(name, p, false)
		if err != nil {
			return err
		}
		c.in.list = append(c.in.list, s)
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		a := &w.regs[in.a]
		for i, s := range in.list {
			d := &w.regs[s]
			for m := lanes; m != 0; m &= m - 1 {
				l := bits.TrailingZeros32(m) & 31
				d[l] = truncate(a[l]>>(i*p.bits), p.bits)
			}
		}
	}
	return c.sources(t, from)
}

// pack is mov.b64 d, {lo, hi}.
func (c *compiler) pack(t ptype, from []string) error {
	p, err := element(t, len(from))
	if err != nil {
		return err
	}
	for _, name := range from {
		s, err := c.srcOf(name, p, false)
		if err != nil {
			return err
		}
		c.in.list = append(c.in.list, s)
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		d := &w.regs[in.d]
		for m := lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			var v uint64
			for i, s := range in.list {
				v |= w.regs[s][l] << (i * p.bits)
			}
			d[l] = v
		}
	}
	return nil
}

func convert(c *compiler, o *opcode, ops []string) (err error) {
	if special := o.take("tf32", "bf16x2", "bf16"); special != "" {
		return convertShort(c, o, special, ops)
	}
	to, err := o.typ()
	if err != nil {
		return err
	}
	from, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	mode := o.take("rn", "rz", "rm", "rp")
	whole := strings.TrimSuffix(o.take("rni", "rzi", "rmi", "rpi"), "i")
	ftz, sat := o.take("ftz") != "", o.take("sat") != ""
	var width int
	if c.in.d, width, err = c.dst(ops[0], to, true); err != nil {
		return err
	}
	if c.in.a, err = c.srcOf(ops[1], from, true); err != nil {
		return err
	}
	c.in.exec = eachOne
	isInt := func(t ptype) bool { return t.kind == 'u' || t.kind == 's' }
	switch {
	case isInt(to) && isInt(from) && mode == "" && whole == "" && !ftz:
		c.in.f1 = intToInt(to, from, width, sat)
		if to.bits >= from.bits && from.kind == 'u' && !sat && to.kind == 'u' && width == to.bits {
			if r, ok := c.declared(ops[1]); ok && r.bits == from.bits {
				c.in.exec = copyRegister
			}
		}
	case isInt(to) && from.kind == 'f' && from.bits >= 32:
		if mode != "" || whole == "" {
			return fmt.Errorf("want .rni, .rzi, .rmi or .rpi")
		}
		read := func(a uint64) float64 { return f64(a) }
		if from.bits == 32 {
			read = func(a uint64) float64 {
				if ftz {
					a = flush(a)
				}
				return float64(f32(a))
			}
		}
		c.in.f1 = func(a uint64) uint64 {
			v := toInt(read(a), whole, to, from.bits)
			if to.kind == 's' {
				v = truncate(uint64(signed(v, to.bits)), width)
			}
			return v
		}
	case to.kind == 'f' && isInt(from) && to.bits >= 32:
		if mode == "" || whole != "" {
			return fmt.Errorf("want .rn, .rz, .rm or .rp")
		}
		c.in.f1 = func(a uint64) uint64 {
			a = truncate(a, from.bits)
			neg := from.kind == 's' && signed(a, from.bits) < 0
			if neg {
				a = truncate(-a, from.bits)
			}
			if to.bits == 64 {
				return bits64(fromInt(neg, a, mode, 53))
			}
			v := bits32(float32(fromInt(neg, a, mode, 24)))
			if sat {
				v = saturate(v)
			}
			return v
		}
	case to.kind == 'f' && from.kind == 'f':
		if (to.bits < from.bits) != (mode != "") || whole != "" && to.bits != from.bits ||
			to.bits == 16 && mode != "rn" {
			return fmt.Errorf("rounding does not fit %s of %s", to, from)
		}
		f, err := floatToFloat(to, from, mode, whole)
		if err != nil {
			return err
		}
		if (ftz || sat) && from.bits != 32 && to.bits != 32 {
			return fmt.Errorf(".ftz and .sat are run of f32 only")
		}
		c.in.f1 = func(a uint64) uint64 {
			if ftz && from.bits == 32 {
				a = flush(a)
			}
			v := f(a)
			if ftz && to.bits == 32 {
				v = flush(v)
			}
			if sat && to.bits == 32 {
				v = saturate(v)
			}
			return v
		}
	default:
		return fmt.Errorf("cvt has no %s of %s with these modifiers", to, from)
	}
	return nil
}

// intToInt widens by the sign of the source, clamps if asked to, and widens again to the register.
func intToInt(to, from ptype, width int, sat bool) func(a uint64) uint64 {
	return func(a uint64) uint64 {
		a = truncate(a, from.bits)
		neg := from.kind == 's' && signed(a, from.bits) < 0
		if from.kind == 's' {
			a = uint64(signed(a, from.bits))
		}
		if sat {
			switch limit := truncate(1<<63-1, to.bits-1); {
			case to.kind == 'u' && neg:
				a = 0
			case to.kind == 'u':
				a = min(a, truncate(1<<64-1, to.bits))
			case neg:
				a = uint64(max(int64(a), -int64(limit)-1))
			default:
				a = min(a, limit)
			}
		}
		a = truncate(a, to.bits)
		if to.kind == 's' {
			a = truncate(uint64(signed(a, to.bits)), width)
		}
		return a
	}
}

func floatToFloat(to, from ptype, mode, whole string) (func(a uint64) uint64, error) {
	switch [2]int{to.bits, from.bits} {
	case [2]int{32, 32}:
		return func(a uint64) uint64 {
			if whole == "" {
				return bits32(f32(a))
			}
			return bits32(float32(integral(float64(f32(a)), whole)))
		}, nil
	case [2]int{64, 64}:
		return func(a uint64) uint64 {
			if whole == "" {
				return a
			}
			return bits64(integral(f64(a), whole))
		}, nil
	case [2]int{64, 32}:
		return func(a uint64) uint64 { return bits64(float64(f32(a))) }, nil
	case [2]int{32, 64}:
		return func(a uint64) uint64 { return bits32(narrow(f64(a), mode)) }, nil
	case [2]int{16, 32}:
		return func(a uint64) uint64 { return uint64(toF16(uint32(a))) }, nil
	case [2]int{32, 16}:
		return func(a uint64) uint64 { return uint64(ofF16(uint32(a) & 0xffff)) }, nil
	}
	return nil, fmt.Errorf("cvt has no %s of %s", to, from)
}

// convertShort is cvt to tf32 and between float32 and bf16.
func convertShort(c *compiler, o *opcode, special string, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	b32, b16 := ptype{'b', 32}, ptype{'b', 16}
	if t != (ptype{'f', 32}) {
		return wrong(o, t)
	}
	mode := o.take("rn", "rna")
	switch {
	case special == "tf32" && mode == "rna":
		return c.unary(b32, ops, func(a uint64) uint64 { return uint64(toTF32(uint32(a))) })
	case special == "bf16x2" && mode == "rn": // the first source becomes the upper half
		return c.binary(b32, ops, func(a, b uint64) uint64 {
			return uint64(toBF16(uint32(a))<<16 | toBF16(uint32(b)))
		})
	case special == "bf16" && mode == "rn":
		return c.unaryTo(b16, b32, ops, func(a uint64) uint64 { return uint64(toBF16(uint32(a))) })
	case special == "bf16" && mode == "":
		return c.unaryTo(b32, b16, ops, func(a uint64) uint64 { return bits32(f32(a << 16)) })
	}
	return fmt.Errorf("cvt has no .%s with this rounding", special)
}

// Generic addresses of the spaces that are no host memory: none that the host can have.
const (
	windowShift = 60
	windowMask  = 1<<windowShift - 1
)

var windows = [parameter + 1]uint64{shared: 1 << windowShift, local: 2 << windowShift,
	parameter: 3 << windowShift}

func convertAddress(c *compiler, o *opcode, ops []string) error {
	to := o.take("to") != ""
	sp := spaces["."+o.take("global", "const", "shared", "local", "param")]
	t, err := o.typ()
	if err != nil {
		return err
	}
	if sp == generic || t != (ptype{'u', 64}) {
		return wrong(o, t)
	}
	window := windows[sp]
	if window == 0 {
		if err := c.unary(t, ops, nil); err != nil {
			return err
		}
		c.in.exec = copyRegister
		return nil
	}
	if to {
		return c.unary(t, ops, func(a uint64) uint64 { return a - window })
	}
	return c.unary(t, ops, func(a uint64) uint64 { return a + window })
}
