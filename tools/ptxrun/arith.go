package ptxrun

import (
	"fmt"
	"math"
	"math/bits"
	"strings"
)

// Builders turn one opcode with its operands into an inst. Registers are kept with zeros above
// their width; signed reads widen them.

func signed(v uint64, bits int) int64 { return int64(v<<(64-bits)) >> (64 - bits) }

type builder func(c *compiler, o *opcode, ops []string) error

var builders map[string]builder

func init() {
	builders = map[string]builder{
		"nop": func(c *compiler, _ *opcode, ops []string) error {
			c.in.exec = func(*warp, *inst, uint32) {}
			return count(ops, 0, 0)
		},
		"add": addSub, "sub": addSub, "addc": addSub, "subc": addSub, "mul": multiply,
		"mad": multiply, "fma": fused, "div": divide, "rem": divide, "min": extreme, "max": extreme,
		"abs": sign, "neg": sign, "rcp": root, "sqrt": root, "rsqrt": root, "ex2": root,
		"lg2": root, "sin": root, "cos": root, "tanh": root,
		"and": logic, "or": logic, "xor": logic, "not": logic, "cnot": logic, "shl": shift,
		"shr": shift, "shf": funnel, "lop3": lop3, "popc": countBits, "clz": countBits,
		"brev": countBits, "bfind": countBits, "bfe": field, "bfi": field, "prmt": permute,
		"dp4a": dot4, "setp": setPredicate, "selp": selectPredicate, "mov": move, "cvt": convert,
		"cvta": convertAddress,
		"ld":   load, "ldu": load, "st": store, "atom": readModifyWrite, "red": readModifyWrite,
		"fence":  fence,
		"membar": fence, "cp.async": asyncCopy, "bra": jump, "brx": jumpTable, "ret": end, "exit": end,
		"trap": end, "bar": barriers, "barrier": barriers, "shfl": shuffle, "vote": vote,
		"match": match, "redux": redux, "elect": elect, "activemask": activeMask, "mma": multiplyTile,
		"ldmatrix": loadTile, "nanosleep": pause,
	}
}

// full is a warp with all its lanes.
const full = math.MaxUint32

func eachOne(w *warp, in *inst, lanes uint32) {
	d, a, f := &w.regs[in.d], &w.regs[in.a], in.f1
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = f(a[l])
	}
}

func eachTwo(w *warp, in *inst, lanes uint32) {
	d, a, b, f := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], in.f2
	if lanes == full {
		for l := range d {
			d[l] = f(a[l], b[l])
		}
		return
	}
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = f(a[l], b[l])
	}
}

func eachThree(w *warp, in *inst, lanes uint32) {
	d, a, b, c, f := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], &w.regs[in.c], in.f3
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = f(a[l], b[l], c[l])
	}
}

func (c *compiler) unary(t ptype, ops []string, f func(a uint64) uint64) error {
	return c.unaryTo(t, t, ops, f)
}

func (c *compiler) unaryTo(to, from ptype, ops []string, f func(a uint64) uint64) (err error) {
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	c.in.exec, c.in.f1 = eachOne, f
	if c.in.d, _, err = c.dst(ops[0], to, false); err != nil {
		return err
	}
	return c.sources(from, ops[1])
}

func (c *compiler) binary(t ptype, ops []string, f func(a, b uint64) uint64) (err error) {
	if err := count(ops, 3, 3); err != nil {
		return err
	}
	c.in.exec, c.in.f2 = eachTwo, f
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	return c.sources(t, ops[1:]...)
}

func (c *compiler) ternary(t ptype, ops []string, f func(a, b, c uint64) uint64) (err error) {
	if err := count(ops, 4, 4); err != nil {
		return err
	}
	c.in.exec, c.in.f3 = eachThree, f
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	return c.sources(t, ops[1:]...)
}

// nearest takes the rounding modifier of arithmetic, of which only .rn is run, and .ftz and .sat.
func (o *opcode) nearest() (ftz, sat bool) {
	o.take("rn")
	return o.take("ftz") != "", o.take("sat") != ""
}

// shaped applies .ftz and .sat around a function of float32.
func shaped1(ftz, sat bool, f func(a uint64) uint64) func(a uint64) uint64 {
	if !ftz && !sat {
		return f
	}
	g := shaped3(ftz, sat, func(a, _, _ uint64) uint64 { return f(a) })
	return func(a uint64) uint64 { return g(a, 0, 0) }
}

func shaped2(ftz, sat bool, f func(a, b uint64) uint64) func(a, b uint64) uint64 {
	if !ftz && !sat {
		return f
	}
	g := shaped3(ftz, sat, func(a, b, _ uint64) uint64 { return f(a, b) })
	return func(a, b uint64) uint64 { return g(a, b, 0) }
}

func shaped3(ftz, sat bool, f func(a, b, c uint64) uint64) func(a, b, c uint64) uint64 {
	if !ftz && !sat {
		return f
	}
	return func(a, b, c uint64) uint64 {
		if ftz {
			a, b, c = flush(a), flush(b), flush(c)
		}
		r := f(a, b, c)
		if ftz {
			r = flush(r)
		}
		if sat {
			r = saturate(r)
		}
		return r
	}
}

// saturate clamps a float32 to 0 … 1; NaN becomes 0.
func saturate(v uint64) uint64 {
	switch f := f32(v); {
	case f >= 1:
		return bits32(1)
	case f > 0:
		return v
	}
	return 0
}

func wrong(o *opcode, t ptype) error { return fmt.Errorf("%s has no %s", o.base, t) }

func addSub(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	sub := strings.HasPrefix(o.base, "sub")
	if t.kind == 'f' {
		ftz, sat := o.nearest()
		switch {
		case len(o.base) != 3:
			return wrong(o, t)
		case t.bits == 32 && sub:
			return c.binary(t, ops, shaped2(ftz, sat, func(a, b uint64) uint64 {
				return bits32(f32(a) - f32(b))
			}))
		case t.bits == 32:
			if err := c.binary(t, ops, shaped2(ftz, sat, func(a, b uint64) uint64 {
				return bits32(f32(a) + f32(b))
			})); err != nil {
				return err
			}
			if !ftz && !sat {
				c.in.exec = addFloat
			}
			return nil
		case t.bits == 64 && sub && !ftz && !sat:
			return c.binary(t, ops, func(a, b uint64) uint64 { return bits64(f64(a) - f64(b)) })
		case t.bits == 64 && !ftz && !sat:
			return c.binary(t, ops, func(a, b uint64) uint64 { return bits64(f64(a) + f64(b)) })
		}
		return wrong(o, t)
	}
	if t.kind != 'u' && t.kind != 's' || t.bits < 16 {
		return wrong(o, t)
	}
	if o.take("cc") != "" || len(o.base) == 4 {
		return carry(c, o, t, ops)
	}
	if o.take("sat") != "" {
		if t != (ptype{'s', 32}) {
			return wrong(o, t)
		}
		return c.binary(t, ops, func(a, b uint64) uint64 {
			r := signed(a, 32) + signed(b, 32)
			if sub {
				r = signed(a, 32) - signed(b, 32)
			}
			return uint64(uint32(max(min(r, math.MaxInt32), math.MinInt32)))
		})
	}
	n := t.bits
	if sub {
		err = c.binary(t, ops, func(a, b uint64) uint64 { return truncate(a-b, n) })
	} else {
		err = c.binary(t, ops, func(a, b uint64) uint64 { return truncate(a+b, n) })
	}
	if err == nil && !sub {
		switch n {
		case 32:
			c.in.exec = add32
		case 64:
			c.in.exec = add64
		}
	}
	return err
}

// carry is add.cc, addc, sub.cc and subc. The carry flag is a register of the lane; after sub it is
// the borrow.
func carry(c *compiler, o *opcode, t ptype, ops []string) error {
	sub, uses := strings.HasPrefix(o.base, "sub"), len(o.base) == 4
	if t.bits < 32 {
		return wrong(o, t)
	}
	if err := c.binary(t, ops, nil); err != nil {
		return err
	}
	cc := c.slot("%CC")
	c.uses, c.defs = append(c.uses, cc), append(c.defs, cc)
	c.in.c = cc
	n := t.bits
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		d, a, b, cc := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], &w.regs[in.c]
		for m := lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			with := uint64(0)
			if uses {
				with = cc[l] & 1
			}
			var r, out uint64
			if sub {
				r, out = bits.Sub64(a[l], b[l], with)
			} else {
				r, out = bits.Add64(a[l], b[l], with)
			}
			if n == 32 {
				out = r >> 32 & 1
			}
			d[l], cc[l] = truncate(r, n), out
		}
	}
	return nil
}

func multiply(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if t.kind == 'f' {
		if o.base == "mad" {
			return fusedOf(c, o, t, ops)
		}
		ftz, sat := o.nearest()
		switch {
		case t.bits == 32:
			if err := c.binary(t, ops, shaped2(ftz, sat, func(a, b uint64) uint64 {
				return bits32(f32(a) * f32(b))
			})); err != nil {
				return err
			}
			if !ftz && !sat {
				c.in.exec = multiplyFloat
			}
			return nil
		case t.bits == 64 && !ftz && !sat:
			return c.binary(t, ops, func(a, b uint64) uint64 { return bits64(f64(a) * f64(b)) })
		}
		return wrong(o, t)
	}
	if t.kind != 'u' && t.kind != 's' || t.bits < 16 {
		return wrong(o, t)
	}
	part := o.take("lo", "hi", "wide")
	n, sgn := t.bits, t.kind == 's'
	to := t
	var f func(a, b uint64) uint64
	switch {
	case part == "lo":
		f = func(a, b uint64) uint64 { return truncate(a*b, n) }
	case part == "wide" && n < 64:
		to.bits *= 2
		f = func(a, b uint64) uint64 { return a * b }
		if sgn {
			f = func(a, b uint64) uint64 {
				return truncate(uint64(signed(a, n)*signed(b, n)), 2*n)
			}
		}
	case part == "hi" && n < 64:
		f = func(a, b uint64) uint64 { return a * b >> n }
		if sgn {
			f = func(a, b uint64) uint64 {
				return truncate(uint64(signed(a, n)*signed(b, n))>>n, n)
			}
		}
	case part == "hi":
		f = func(a, b uint64) uint64 {
			hi, _ := bits.Mul64(a, b)
			if sgn {
				hi -= uint64(int64(a)>>63)&b + uint64(int64(b)>>63)&a
			}
			return hi
		}
	default:
		return fmt.Errorf("%s.%s: want .lo, .hi or .wide", o.base, t)
	}
	if o.base == "mul" {
		if err := count(ops, 3, 3); err != nil {
			return err
		}
		c.in.exec, c.in.f2 = eachTwo, f
	} else {
		if err := count(ops, 4, 4); err != nil {
			return err
		}
		c.in.exec = eachThree
		c.in.f3 = func(a, b, d uint64) uint64 { return truncate(f(a, b)+d, to.bits) }
		if c.in.c, err = c.srcOf(ops[3], to, false); err != nil {
			return err
		}
	}
	if c.in.d, _, err = c.dst(ops[0], to, false); err != nil {
		return err
	}
	return c.sources(t, ops[1], ops[2])
}

func fused(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	return fusedOf(c, o, t, ops)
}

func fusedOf(c *compiler, o *opcode, t ptype, ops []string) error {
	if t.kind != 'f' || t.bits < 32 {
		return wrong(o, t)
	}
	if o.take("rn") == "" {
		return fmt.Errorf("%s.%s: only .rn is run", o.base, t)
	}
	ftz, sat := o.nearest()
	if t.bits == 64 {
		if ftz || sat {
			return wrong(o, t)
		}
		return c.ternary(t, ops, func(a, b, c uint64) uint64 {
			return bits64(math.FMA(f64(a), f64(b), f64(c)))
		})
	}
	err := c.ternary(t, ops, shaped3(ftz, sat, func(a, b, c uint64) uint64 {
		return bits32(fma32(f32(a), f32(b), f32(c)))
	}))
	if err == nil && !ftz && !sat {
		c.in.exec = fuseFloat
	}
	return err
}

// divide is div and rem. Division by zero is machine-specific (PTX ISA, "div"): as on GPUs, a
// quotient has all bits set and a remainder is the dividend.
func divide(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	div := o.base == "div"
	switch {
	case t == ptype{'f', 32} && div:
		if o.take("full", "approx") == "" && o.take("rn") == "" {
			return fmt.Errorf("div.f32: want .rn, .full or .approx")
		}
		ftz, _ := o.nearest()
		return c.binary(t, ops, shaped2(ftz, false, func(a, b uint64) uint64 {
			return bits32(f32(a) / f32(b))
		}))
	case t == ptype{'f', 64} && div:
		if o.take("rn") == "" {
			return fmt.Errorf("div.f64: only .rn is run")
		}
		return c.binary(t, ops, func(a, b uint64) uint64 { return bits64(f64(a) / f64(b)) })
	case t.kind == 'u' && t.bits >= 16:
		return c.binary(t, ops, func(a, b uint64) uint64 {
			switch {
			case b == 0 && div:
				return truncate(math.MaxUint64, t.bits)
			case b == 0:
				return a
			case div:
				return a / b
			}
			return a % b
		})
	case t.kind == 's' && t.bits >= 16:
		return c.binary(t, ops, func(a, b uint64) uint64 {
			x, y := signed(a, t.bits), signed(b, t.bits)
			switch {
			case y == 0 && div:
				return truncate(math.MaxUint64, t.bits)
			case y == 0:
				return a
			case div:
				return truncate(uint64(x/y), t.bits)
			}
			return truncate(uint64(x%y), t.bits)
		})
	}
	return wrong(o, t)
}

func extreme(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	least := o.base == "min"
	switch {
	case t == ptype{'f', 32}:
		ftz := o.take("ftz") != ""
		keepNaN := o.take("NaN") != ""
		f := max32
		if least {
			f = min32
		}
		return c.binary(t, ops, shaped2(ftz, false, func(a, b uint64) uint64 {
			if keepNaN && (f32(a) != f32(a) || f32(b) != f32(b)) {
				return nan32
			}
			return f(a, b)
		}))
	case t == ptype{'f', 64} && least:
		return c.binary(t, ops, min64)
	case t == ptype{'f', 64}:
		return c.binary(t, ops, max64)
	case t.kind == 'u' && t.bits >= 16 && least:
		return c.binary(t, ops, func(a, b uint64) uint64 { return min(a, b) })
	case t.kind == 'u' && t.bits >= 16:
		return c.binary(t, ops, func(a, b uint64) uint64 { return max(a, b) })
	case t.kind == 's' && t.bits >= 16:
		return c.binary(t, ops, func(a, b uint64) uint64 {
			if (signed(a, t.bits) < signed(b, t.bits)) == least {
				return a
			}
			return b
		})
	}
	return wrong(o, t)
}

func sign(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	neg := o.base == "neg"
	switch {
	case t.kind == 'f' && t.bits >= 32:
		ftz := o.take("ftz") != "" && t.bits == 32
		top := uint64(1) << (t.bits - 1)
		return c.unary(t, ops, func(a uint64) uint64 {
			if ftz {
				a = flush(a)
			}
			if neg {
				return a ^ top
			}
			return a &^ top
		})
	case t.kind == 's' && t.bits >= 16:
		return c.unary(t, ops, func(a uint64) uint64 {
			if neg || signed(a, t.bits) < 0 {
				return truncate(-a, t.bits)
			}
			return a
		})
	}
	return wrong(o, t)
}

// root is the functions of one float. Those with .approx are the host's, rounded correctly or in
// an ulp of that: nearer than a GPU's, which may be off by what the PTX ISA allows (rcp, sqrt 1
// ulp, rsqrt 2^-22.9, ex2 2 ulp, lg2 2^-22, sin and cos 2^-20.5, tanh 2^-11).
func root(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	approx := o.take("approx") != ""
	exact := o.base == "rcp" || o.base == "sqrt"
	if !approx && (!exact || o.take("rn") == "") {
		return fmt.Errorf("%s.%s: want .approx, or .rn of rcp and sqrt", o.base, t)
	}
	fn := map[string]func(x float64) float64{
		"rcp": func(x float64) float64 { return 1 / x }, "sqrt": math.Sqrt,
		"rsqrt": func(x float64) float64 { return 1 / math.Sqrt(x) }, "ex2": math.Exp2,
		"lg2": math.Log2, "sin": math.Sin, "cos": math.Cos, "tanh": math.Tanh}[o.base]
	switch {
	case t == ptype{'f', 32}:
		ftz := o.take("ftz") != ""
		return c.unary(t, ops, shaped1(ftz, false, func(a uint64) uint64 {
			// one rounding of float64 more does not change 1/x nor the root of a float32
			return bits32(float32(fn(float64(f32(a)))))
		}))
	case t == ptype{'f', 64} && exact && !approx:
		return c.unary(t, ops, func(a uint64) uint64 { return bits64(fn(f64(a))) })
	}
	return wrong(o, t)
}

func logic(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if t.kind == 'p' {
		return logicPredicate(c, o, ops)
	}
	if t.kind != 'b' || t.bits < 16 {
		return wrong(o, t)
	}
	n := t.bits
	switch o.base {
	case "not":
		return c.unary(t, ops, func(a uint64) uint64 { return truncate(^a, n) })
	case "cnot":
		return c.unary(t, ops, func(a uint64) uint64 {
			if a == 0 {
				return 1
			}
			return 0
		})
	case "and":
		return c.binary(t, ops, func(a, b uint64) uint64 { return a & b })
	case "or":
		return c.binary(t, ops, func(a, b uint64) uint64 { return a | b })
	}
	return c.binary(t, ops, func(a, b uint64) uint64 { return a ^ b })
}

// logicPredicate works on the bits of all lanes at once: p of a and b.
func logicPredicate(c *compiler, o *opcode, ops []string) (err error) {
	least := 3
	if o.base == "not" {
		least = 2
	}
	if err := count(ops, least, least); err != nil {
		return err
	}
	if c.in.p, err = c.predDst(ops[0]); err != nil {
		return err
	}
	src := make([]int32, 2)
	for i, s := range ops[1:] {
		if src[i], err = c.pred(s); err != nil {
			return err
		}
	}
	a, b, base := src[0], src[1], o.base
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		var r uint32
		switch x, y := w.preds[a], w.preds[b]; base {
		case "and":
			r = x & y
		case "or":
			r = x | y
		case "xor":
			r = x ^ y
		default:
			r = ^x
		}
		w.setPred(in.p, r, lanes)
	}
	return nil
}

func shift(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	n := uint64(t.bits)
	var f func(a, b uint64) uint64
	switch {
	case t.bits < 16 || t.kind == 'f' || t.kind == 'p' || o.base == "shl" && t.kind != 'b':
		return wrong(o, t)
	case o.base == "shl":
		f = func(a, b uint64) uint64 { return truncate(a<<b, t.bits) } // Go's shift of 64 is 0
	case t.kind == 's':
		f = func(a, b uint64) uint64 {
			return truncate(uint64(signed(a, t.bits)>>min(b, n-1)), t.bits)
		}
	default:
		f = func(a, b uint64) uint64 { return a >> b }
	}
	if err := count(ops, 3, 3); err != nil {
		return err
	}
	c.in.exec, c.in.f2 = eachTwo, f
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if err := c.sources(t, ops[1]); err != nil {
		return err
	}
	c.in.b, err = c.srcOf(ops[2], ptype{'u', 32}, false)
	return err
}

func funnel(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	way, mode := o.take("l", "r"), o.take("wrap", "clamp")
	if t != (ptype{'b', 32}) || way == "" || mode == "" {
		return wrong(o, t)
	}
	return c.ternary(t, ops, func(a, b, n uint64) uint64 {
		if mode == "wrap" {
			n &= 31
		}
		n = min(n, 32)
		if both := b<<32 | a; way == "r" {
			return uint64(uint32(both >> n))
		} else {
			return both << n >> 32
		}
	})
}

func lop3(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 5, 5); err != nil {
		return err
	}
	lut, ok := parseNumber(ops[4], ptype{'u', 32})
	if t != (ptype{'b', 32}) || !ok || lut > 255 {
		return wrong(o, t)
	}
	return c.ternary(t, ops[:4], func(a, b, c uint64) uint64 {
		var r uint64
		for i := range uint64(8) {
			if lut>>i&1 == 0 {
				continue
			}
			x, y, z := a, b, c
			if i&4 == 0 {
				x = ^x
			}
			if i&2 == 0 {
				y = ^y
			}
			if i&1 == 0 {
				z = ^z
			}
			r |= x & y & z
		}
		return uint64(uint32(r))
	})
}

func countBits(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if t.bits < 32 || t.kind == 'f' || (t.kind != 'b') != (o.base == "bfind") {
		return wrong(o, t)
	}
	n := t.bits
	to := ptype{'u', 32}
	var f func(a uint64) uint64
	switch o.base {
	case "popc":
		f = func(a uint64) uint64 { return uint64(bits.OnesCount64(a)) }
	case "clz":
		f = func(a uint64) uint64 { return uint64(n - bits.Len64(a)) }
	case "brev":
		to = t
		f = func(a uint64) uint64 { return bits.Reverse64(a) >> (64 - n) }
	case "bfind":
		amount := o.take("shiftamt") != ""
		f = func(a uint64) uint64 {
			if t.kind == 's' && signed(a, n) < 0 {
				a = truncate(^a, n)
			}
			pos := bits.Len64(a) - 1
			switch {
			case pos < 0:
				return math.MaxUint32
			case amount:
				return uint64(n - 1 - pos)
			}
			return uint64(pos)
		}
	}
	return c.unaryTo(to, t, ops, f)
}

// field is bfe and bfi: position and length are the lowest 8 bits.
func field(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	n := uint64(t.bits)
	u32 := ptype{'u', 32}
	insert := o.base == "bfi"
	if t.bits < 32 || t.kind == 'f' || (t.kind == 'b') != insert {
		return wrong(o, t)
	}
	if !insert {
		if err := count(ops, 4, 4); err != nil {
			return err
		}
		c.in.exec = eachThree
		c.in.f3 = func(a, pos, length uint64) uint64 {
			pos, length = pos&255, length&255
			kept := min(length, n-min(pos, n))
			r := truncate(a>>pos, int(kept))
			if t.kind == 's' && length > 0 && a>>min(pos+length-1, n-1)&1 != 0 {
				r |= math.MaxUint64 << kept
			}
			return truncate(r, t.bits)
		}
		if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
			return err
		}
		if err := c.sources(t, ops[1]); err != nil {
			return err
		}
		if c.in.b, err = c.srcOf(ops[2], u32, false); err != nil {
			return err
		}
		c.in.c, err = c.srcOf(ops[3], u32, false)
		return err
	}
	if err := count(ops, 5, 5); err != nil {
		return err
	}
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if err := c.sources(t, ops[1], ops[2]); err != nil {
		return err
	}
	if c.in.c, err = c.srcOf(ops[3], u32, false); err != nil {
		return err
	}
	if c.in.e, err = c.srcOf(ops[4], u32, false); err != nil {
		return err
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		d, a, b := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b]
		offset, length := &w.regs[in.c], &w.regs[in.e]
		for m := lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			mask := truncate(truncate(math.MaxUint64, int(min(length[l]&255, 64)))<<(offset[l]&255),
				int(n))
			d[l] = a[l]<<(offset[l]&255)&mask | b[l]&^mask
		}
	}
	return nil
}

func permute(c *compiler, o *opcode, ops []string) error {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if t != (ptype{'b', 32}) {
		return wrong(o, t)
	}
	mode := o.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
	return c.ternary(t, ops, func(a, b, sel uint64) uint64 {
		both := b<<32 | a
		var r uint64
		for i := range uint64(4) {
			s, k := sel>>(4*i)&15, sel&3
			switch mode {
			case "f4e":
				s = k + i
			case "b4e":
				s = (k - i) & 7
			case "rc8":
				s = k
			case "ecl":
				s = max(k, i)
			case "ecr":
				s = min(k, i)
			case "rc16":
				s = k&1*2 + i&1
			}
			v := both >> (8 * (s & 7)) & 255
			if s&8 != 0 { // the sign, eight times
				v = uint64(uint8(int8(v) >> 7))
			}
			r |= v << (8 * i)
		}
		return r
	})
}

// dot4 is dp4a.
func dot4(c *compiler, o *opcode, ops []string) error {
	ta, err := o.typ()
	if err != nil {
		return err
	}
	tb, err := o.typ()
	if err != nil {
		return err
	}
	for _, t := range []ptype{ta, tb} {
		if t.bits != 32 || t.kind != 'u' && t.kind != 's' {
			return wrong(o, t)
		}
	}
	lane := func(v uint64, i int, t ptype) int64 {
		v = v >> (8 * i) & 255
		if t.kind == 's' {
			return signed(v, 8)
		}
		return int64(v)
	}
	return c.ternary(ptype{'b', 32}, ops, func(a, b, c uint64) uint64 {
		r := int64(c)
		for i := range 4 {
			r += lane(a, i, ta) * lane(b, i, tb)
		}
		return uint64(uint32(r))
	})
}

// Comparisons by name; the second of each pair is true where an operand is NaN.
func comparison(name string, t ptype) func(a, b uint64) bool {
	if t.kind == 'f' {
		var f func(x, y float64) bool
		base := strings.TrimSuffix(name, "u")
		unordered := base != name
		switch base {
		case "eq":
			f = func(x, y float64) bool { return x == y }
		case "ne":
			f = func(x, y float64) bool { return x < y || x > y }
		case "lt":
			f = func(x, y float64) bool { return x < y }
		case "le":
			f = func(x, y float64) bool { return x <= y }
		case "gt":
			f = func(x, y float64) bool { return x > y }
		case "ge":
			f = func(x, y float64) bool { return x >= y }
		case "num":
			f = func(x, y float64) bool { return x == x && y == y }
		case "nan":
			f = func(x, y float64) bool { return x != x || y != y }
		default:
			return nil
		}
		if unordered {
			g := f
			f = func(x, y float64) bool { return x != x || y != y || g(x, y) }
		}
		if t.bits == 32 {
			return func(a, b uint64) bool { return f(float64(f32(a)), float64(f32(b))) }
		}
		return func(a, b uint64) bool { return f(f64(a), f64(b)) }
	}
	switch name {
	case "eq":
		return func(a, b uint64) bool { return a == b }
	case "ne":
		return func(a, b uint64) bool { return a != b }
	}
	if t.kind == 's' {
		n := t.bits
		switch name {
		case "lt":
			return func(a, b uint64) bool { return signed(a, n) < signed(b, n) }
		case "le":
			return func(a, b uint64) bool { return signed(a, n) <= signed(b, n) }
		case "gt":
			return func(a, b uint64) bool { return signed(a, n) > signed(b, n) }
		case "ge":
			return func(a, b uint64) bool { return signed(a, n) >= signed(b, n) }
		}
	}
	if t.kind == 'u' {
		switch name {
		case "lt", "lo":
			return func(a, b uint64) bool { return a < b }
		case "le", "ls":
			return func(a, b uint64) bool { return a <= b }
		case "gt", "hi":
			return func(a, b uint64) bool { return a > b }
		case "ge", "hs":
			return func(a, b uint64) bool { return a >= b }
		}
	}
	return nil
}

func setPredicate(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 3, 4); err != nil {
		return err
	}
	name := o.take("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu",
		"leu", "gtu", "geu", "num", "nan")
	c.in.cmp = comparison(name, t)
	if c.in.cmp == nil || t.bits < 16 || t.kind == 'f' && t.bits < 32 {
		return fmt.Errorf("setp has no .%s.%s", name, t)
	}
	if o.take("ftz") != "" {
		f := c.in.cmp
		c.in.cmp = func(a, b uint64) bool { return f(flush(a), flush(b)) }
	}
	combine := o.take("and", "or", "xor")
	if (combine != "") != (len(ops) == 4) {
		return fmt.Errorf("%d operands", len(ops))
	}
	// p|q: q is the negation
	first, second, two := strings.Cut(ops[0], "|")
	if c.in.p, err = c.predDst(first); err != nil {
		return err
	}
	other := predSink
	if two {
		if other, err = c.predDst(second); err != nil {
			return err
		}
	}
	if combine != "" {
		bare, not := strings.CutPrefix(ops[3], "!")
		if c.in.q, err = c.pred(bare); err != nil {
			return err
		}
		c.in.notQ = not
	}
	if err := c.sources(t, ops[1], ops[2]); err != nil {
		return err
	}
	c.in.exec = compare
	if combine == "" && !two {
		return nil
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		with := w.preds[in.q]
		if in.notQ {
			with = ^with
		}
		r := w.compare(in, lanes)
		join := func(r uint32) uint32 {
			switch combine {
			case "and":
				return r & with
			case "or":
				return r | with
			case "xor":
				return r ^ with
			}
			return r
		}
		w.setPred(in.p, join(r), lanes)
		w.setPred(other, join(^r), lanes)
	}
	return nil
}

func compare(w *warp, in *inst, lanes uint32) { w.setPred(in.p, w.compare(in, lanes), lanes) }

func (w *warp) compare(in *inst, lanes uint32) uint32 {
	a, b, f := &w.regs[in.a], &w.regs[in.b], in.cmp
	var r uint32
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		if f(a[l], b[l]) {
			r |= 1 << l
		}
	}
	return r
}

func (w *warp) setPred(p int32, v, lanes uint32) {
	w.preds[p] = w.preds[p]&^lanes | v&lanes
}

func selectPredicate(c *compiler, o *opcode, ops []string) (err error) {
	t, err := o.typ()
	if err != nil {
		return err
	}
	if err := count(ops, 4, 4); err != nil {
		return err
	}
	if t.bits < 16 {
		return wrong(o, t)
	}
	if c.in.d, _, err = c.dst(ops[0], t, false); err != nil {
		return err
	}
	if c.in.p, err = c.pred(ops[3]); err != nil {
		return err
	}
	c.in.exec = func(w *warp, in *inst, lanes uint32) {
		d, a, b, p := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], w.preds[in.p]
		for m := lanes; m != 0; m &= m - 1 {
			l := bits.TrailingZeros32(m) & 31
			if p>>l&1 != 0 {
				d[l] = a[l]
			} else {
				d[l] = b[l]
			}
		}
	}
	return c.sources(t, ops[1], ops[2])
}

// The most frequent instructions, without a call for each lane.

func add32(w *warp, in *inst, lanes uint32) {
	d, a, b := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b]
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = uint64(uint32(a[l] + b[l]))
	}
}

func add64(w *warp, in *inst, lanes uint32) {
	d, a, b := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b]
	if lanes == full {
		for l := range d {
			d[l] = a[l] + b[l]
		}
		return
	}
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = a[l] + b[l]
	}
}

func addFloat(w *warp, in *inst, lanes uint32) {
	d, a, b := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b]
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = bits32(f32(a[l]) + f32(b[l]))
	}
}

func multiplyFloat(w *warp, in *inst, lanes uint32) {
	d, a, b := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b]
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = bits32(f32(a[l]) * f32(b[l]))
	}
}

func fuseFloat(w *warp, in *inst, lanes uint32) {
	d, a, b, c := &w.regs[in.d], &w.regs[in.a], &w.regs[in.b], &w.regs[in.c]
	if lanes == full {
		for l := range d {
			d[l] = bits32(fma32(f32(a[l]), f32(b[l]), f32(c[l])))
		}
		return
	}
	for m := lanes; m != 0; m &= m - 1 {
		l := bits.TrailingZeros32(m) & 31
		d[l] = bits32(fma32(f32(a[l]), f32(b[l]), f32(c[l])))
	}
}
