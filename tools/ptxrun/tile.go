package ptxrun

import (
	"fmt"
	"math"
	"math/bits"
	"unsafe"
)

// multiplyTile is mma.sync of 16 rows and 8 columns with float32 sums, by the fragment layouts of
// the PTX ISA ("Matrix Fragments for mma.m16n8k8" and "… m16n8k16"). With g = lane/4 and t =
// lane%4 a lane holds of A[16][K], B[K][8], C and D[16][8]
//
//	tf32, K = 8:   a0 A[g][t], a1 A[g+8][t], a2 A[g][t+4], a3 A[g+8][t+4]; b0 B[t][g], b1 B[t+4][g]
//	16 bits, K = 16, two to a register with the lower k in the lower half:
//	               a0 A[g][2t…], a1 A[g+8][2t…], a2 A[g][2t+8…], a3 A[g+8][2t+8…];
//	               b0 B[2t…][g], b1 B[2t+8…][g]
//	16 bits, K = 8: a0 A[g][2t…], a1 A[g+8][2t…]; b0 B[2t…][g]
//	all:           d0 D[g][2t], d1 D[g][2t+1], d2 D[g+8][2t], d3 D[g+8][2t+1]
//
// Products are exact and are summed in float64 with C; the sum is rounded once to float32. The PTX
// ISA leaves order and precision of the sum open.
func multiplyTile(c *compiler, o *opcode, ops []string) error {
	shape := o.take("m16n8k8", "m16n8k16")
	if o.take("sync") == "" || o.take("aligned") == "" || o.take("row") == "" ||
		o.take("col") == "" || shape == "" {
		return fmt.Errorf("mma is run as mma.sync.aligned.m16n8k8|m16n8k16.row.col")
	}
	element := o.take("tf32", "bf16")
	second := o.take("tf32", "bf16")
	// the types that are left: d, a and b where they are f16, c
	floats := 2
	if element == "" {
		element, second, floats = "f16", "f16", 4
	}
	for i := range floats {
		t, err := o.typ()
		want := ptype{'f', 32}
		if floats == 4 && (i == 1 || i == 2) {
			want.bits = 16
		}
		if err != nil || t != want {
			return fmt.Errorf("mma is run with sums of f32 and factors of tf32, bf16 or f16")
		}
	}
	depth := 8
	if shape == "m16n8k16" {
		depth = 16
	}
	if element != second || element == "tf32" && depth != 8 {
		return fmt.Errorf("mma.%s has no .%s.%s", shape, element, second)
	}
	each := 2 // factors to a register
	if element == "tf32" {
		each = 1
	}
	na, nb := 16*depth/32/each, 8*depth/32/each
	if err := count(ops, 4, 4); err != nil {
		return err
	}
	for i, n := range []int{4, na, nb, 4} {
		v, ok := vector(ops[i])
		if !ok || len(v) != n {
			return fmt.Errorf("%s is not %d registers", ops[i], n)
		}
		for _, name := range v {
			t := ptype{'b', 32}
			var s int32
			var err error
			if i == 0 {
				s, _, err = c.dst(name, t, false)
			} else {
				s, err = c.srcOf(name, t, false)
			}
			if err != nil {
				return err
			}
			c.in.list = append(c.in.list, s)
		}
	}
	value := func(v uint32, e int) float64 {
		switch element {
		case "tf32":
			return float64(math.Float32frombits(v &^ 0x1fff))
		case "bf16":
			return float64(math.Float32frombits(v >> (16 * e) << 16))
		}
		return float64(math.Float32frombits(ofF16(v >> (16 * e) & 0xffff)))
	}
	c.in.e = c.fixed("0xffffffff", fill{value: full})
	c.meets("mma"+shape+element, func(w *warp, parts []part, member uint32) {
		if len(parts) != 1 || parts[0].lanes != full {
			w.faultf(bits.TrailingZeros32(parts[0].lanes),
				"mma.sync.aligned by a part of a warp, or from several places at once")
			return
		}
		list := parts[0].in.list
		d, a, b, sum := list[:4], list[4:4+na], list[4+na:4+na+nb], list[4+na+nb:]
		var left [16][16]float64
		var right [8][16]float64 // by columns
		for l := range 32 {
			g, t := l/4, l%4
			for r, s := range a {
				for e := range each {
					k := each*t + e + r/2*4*each
					left[g+r%2*8][k] = value(uint32(w.regs[s][l]), e)
				}
			}
			for r, s := range b {
				for e := range each {
					right[g][each*t+e+r*4*each] = value(uint32(w.regs[s][l]), e)
				}
			}
		}
		var result [4][32]uint64
		for l := range 32 {
			g, t := l/4, l%4
			for r := range 4 {
				row, col := &left[g+r/2*8], &right[2*t+r%2]
				x := float64(f32(w.regs[sum[r]][l]))
				for k := range depth {
					x += row[k] * col[k]
				}
				result[r][l] = bits32(float32(x))
			}
		}
		for r := range 4 {
			w.regs[d[r]] = result[r]
		}
	})
	return nil
}

// loadTile is ldmatrix of 8×8 matrices of 16-bit elements: lane 8i+r has the address of row r of
// matrix i, and register i of lane l gets elements 2(l%4) and 2(l%4)+1 of row l/4.
func loadTile(c *compiler, o *opcode, ops []string) (err error) {
	num := map[string]int{"x1": 1, "x2": 2, "x4": 4}[o.take("x1", "x2", "x4")]
	turned := o.take("trans") != ""
	o.take("shared")
	t, err := o.typ()
	if err != nil {
		return err
	}
	if o.take("sync") == "" || o.take("aligned") == "" || o.take("m8n8") == "" || num == 0 ||
		t != (ptype{'b', 16}) {
		return wrong(o, t)
	}
	if err := count(ops, 2, 2); err != nil {
		return err
	}
	to, ok := vector(ops[0])
	if !ok || len(to) != num {
		return fmt.Errorf("%s is not %d registers", ops[0], num)
	}
	for _, name := range to {
		s, _, err := c.dst(name, ptype{'b', 32}, false)
		if err != nil {
			return err
		}
		c.in.list = append(c.in.list, s)
	}
	if c.in.a, c.in.imm, err = c.address(ops[1]); err != nil {
		return err
	}
	c.in.e = c.fixed("0xffffffff", fill{value: full})
	c.meets("ldmatrix", func(w *warp, parts []part, member uint32) {
		if len(parts) != 1 || parts[0].lanes != full {
			w.faultf(bits.TrailingZeros32(parts[0].lanes),
				"ldmatrix.sync.aligned by a part of a warp, or from several places at once")
			return
		}
		in := parts[0].in
		address := w.regs[in.a]
		for i, s := range in.list {
			var m [8][8]uint16
			for r := range 8 {
				l := 8*i + r
				p := w.at(shared, address[l]+uint64(in.imm), 16, l, false)
				if p == nil {
					return
				}
				m[r] = *(*[8]uint16)(unsafe.Pointer(p))
			}
			for l := range 32 {
				r, k := l/4, l%4*2
				lo, hi := m[r][k], m[r][(k+1)&7]
				if turned {
					lo, hi = m[k][r], m[(k+1)&7][r]
				}
				w.regs[s][l] = uint64(lo) | uint64(hi)<<16
			}
		}
	})
	return nil
}
