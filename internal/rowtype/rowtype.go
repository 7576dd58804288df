// Package rowtype has the forms in which feature rows are stored, on SSDs and in every cache tier:
// float32, or less than half of its bytes for rows whose values do not need more. Rows become
// float32 again before they are trained on.
//
// A stored row is a whole multiple of 4 bytes, as kernels copy words:
//
//	float32   dim × 4 bytes
//	float16   dim × 2 bytes, zero-padded: IEEE half precision, up to 65504
//	bfloat16  dim × 2 bytes, zero-padded: float32's range, 8 bits of precision
//	int8      dim bytes, zero-padded: value = scale × byte, scale = largest magnitude / 127
//
// The scale of an int8 row, a float32, lies beside it, in a table by row (dataset/stripe). All
// numbers are little-endian and rounded to nearest, ties to even.
package rowtype

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"helios/internal/errs"
	"helios/internal/simd"
)

// Type is a form of stored rows.
type Type uint8

// Types. The zero value is float32.
const (
	Float32 Type = iota
	Float16
	BFloat16
	Int8
)

var names = []string{"float32", "float16", "bfloat16", "int8"}

// Names returns what Parse takes.
func Names() []string { return names }

// Types are all types, in the order of Names.
func Types() []Type { return []Type{Float32, Float16, BFloat16, Int8} }

// Parse reads a type's name. Its error is of class usage.
func Parse(s string) (Type, error) {
	for i, n := range names {
		if s == n {
			return Type(i), nil
		}
	}
	return 0, errs.New(errs.Usage, "unknown row dtype %q; choose one of %s", s,
		strings.Join(names, ", "))
}

func (t Type) String() string {
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("row type %d", uint8(t))
}

// RowBytes is the size of a stored row of dim values.
func (t Type) RowBytes(dim int) int {
	switch t {
	case Float16, BFloat16:
		return (2*dim + 3) &^ 3
	case Int8:
		return (dim + 3) &^ 3
	default:
		return 4 * dim
	}
}

// Scaled reports whether each row has a scale beside it.
func (t Type) Scaled() bool { return t == Int8 }

// Dim returns the most features that a row of so many bytes has; 1 where it has no room for any.
func (t Type) Dim(bytes int) int {
	switch bytes &^= 3; t {
	case Float16, BFloat16:
		return max(bytes/2, 1)
	case Int8:
		return max(bytes, 1)
	default:
		return max(bytes/4, 1)
	}
}

// RangeError is a value that a type cannot hold.
type RangeError struct {
	Type  Type
	Index int // in the row
	Value float32
}

func (e *RangeError) Error() string {
	limit := ""
	if e.Type == Float16 {
		limit = " (it ends at 65504)"
	}
	return fmt.Sprintf("feature %d is %v, which %s cannot hold%s", e.Index, e.Value, e.Type, limit)
}

// Wider is the smallest type that can hold the value; there is none for a NaN or an infinity, which
// nothing can be trained on.
func (e *RangeError) Wider() (Type, bool) {
	switch {
	case e.Value-e.Value != 0:
		return 0, false
	case e.Type == Float16 && brain(e.Value)&0x7f80 != 0x7f80:
		return BFloat16, true
	}
	return Float32, true
}

// Encode stores a row: dst has RowBytes(len(src)) bytes. The scale is 1 where the type has none.
// Its error is a *RangeError for the first value that the type cannot hold; dst is then not a row.
// float32 takes everything as it is.
func (t Type) Encode(dst []byte, src []float32) (scale float32, err error) {
	dst = dst[:t.RowBytes(len(src))]
	switch t {
	case Float16:
		for i, x := range src {
			h := half(x)
			if h&0x7c00 == 0x7c00 {
				return 0, &RangeError{t, i, x}
			}
			binary.LittleEndian.PutUint16(dst[2*i:], h)
		}
		clear(dst[2*len(src):])
	case BFloat16:
		for i, x := range src {
			h := brain(x)
			if h&0x7f80 == 0x7f80 {
				return 0, &RangeError{t, i, x}
			}
			binary.LittleEndian.PutUint16(dst[2*i:], h)
		}
		clear(dst[2*len(src):])
	case Int8:
		return encodeInt8(dst, src)
	default:
		for i, x := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(x))
		}
	}
	return 1, nil
}

func encodeInt8(q []byte, src []float32) (scale float32, err error) {
	var largest float32
	index := 0
	for i, x := range src {
		if x-x != 0 {
			return 0, &RangeError{Int8, i, x}
		}
		if a := math.Float32frombits(math.Float32bits(x) &^ (1 << 31)); a > largest {
			largest, index = a, i
		}
	}
	scale = largest / 127
	if full := float32(scale * 127); full-full != 0 {
		return 0, &RangeError{Int8, index, src[index]}
	}
	if scale == 0 { // all zero, or so small that nothing is left
		clear(q)
		return 0, nil
	}
	for i, x := range src {
		// Where the scale has few bits itself (subnormal), the quotient may be beyond 127.
		v := max(-127, min(127, math.RoundToEven(float64(x/scale))))
		q[i] = byte(int8(v))
	}
	clear(q[len(src):])
	return scale, nil
}

// Decode widens a stored row to len(dst) values. The scale is the row's, where the type has one.
func (t Type) Decode(l simd.Level, dst []float32, row []byte, scale float32) {
	row = row[:t.RowBytes(len(dst))]
	switch t {
	case Float16:
		l.FromFloat16(dst, row)
	case BFloat16:
		l.FromBFloat16(dst, row)
	case Int8:
		l.FromInt8(dst, row, scale)
	default:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(row[4*i:]))
		}
	}
}

// half rounds to half precision; what is beyond it becomes infinity.
func half(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &^= 1 << 31
	switch {
	case b > 0x7f800000:
		return sign | 0x7e00 // NaN
	case b >= 0x477ff000: // 65520 and above round to 2^16
		return sign | 0x7c00
	case b >= 0x38800000: // 2^-14: normal
		b -= (127 - 15) << 23
		return sign | uint16((b+0xfff+(b>>13&1))>>13)
	}
	// Subnormal, in units of 2^-24: adding 0.5, whose last bit is 2^-24, rounds to them.
	return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-math.Float32bits(0.5))
}

// brain rounds to bfloat16; what is beyond it becomes infinity.
func brain(x float32) uint16 {
	b := math.Float32bits(x)
	if b&^(1<<31) > 0x7f800000 {
		return uint16(b>>16) | 0x40 // a NaN stays one
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
