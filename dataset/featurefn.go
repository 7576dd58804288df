package dataset

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/philox"
	"helios/internal/simd"
)

// FeatureFunc makes rows from their numbers, so that a dataset of any size needs no
// features.npy, and each row that was read from anywhere can be checked against what it must be.
//
// There is one, "hash:SEED". Column w of row r is a float32 in ±[0.5, 1): sign and 23 bits of
// mantissa are
//
//	h(0, w) ^ h(1+i, w) ^ h(1+j, w) ^ …     for each bit i, j, … that is set in r
//
// where h(b, w) are the high 32 bits of Mix(Mix(seed + γ(b+1)) + γ(w+1)), γ the odd constant of
// splitmix64 and Mix its finaliser (package philox). All is integer arithmetic: the bytes are the
// same on every machine.
//
// A hash that is linear in the bits of the row is chosen on purpose. Rows of distinct numbers
// differ as random ones do (any set of rows that is not bound to sum up to 0 is independent), which
// is all that telling them apart needs; and CRCs are linear, too: the checksum of a row follows
// from its number in five table look-ups, that of a chunk of 1 MiB from those of its rows, so the
// tables and superblocks of 4 TB are computed in seconds where hashing the bytes would take a
// quarter of an hour.
type FeatureFunc struct {
	seed uint64
	Dim  int
	// row 0; two columns a word, the first one in the low half; an odd dim leaves the last half 0
	base []uint64
	nib  [][]uint64 // for each 4 bits of the row number: 16 rows, what each value adds
}

const (
	hashGamma = 0x9E3779B97F4A7C15
	hashMask  = 0x807fffff // sign and mantissa
	hashOne   = 0x3f000000 // exponent of 0.5
)

// hashBits are bits b of column w; see featureFn.
func hashBits(seed uint64, b, w int) uint32 {
	return uint32(philox.Mix(philox.Mix(seed+hashGamma*uint64(b+1))+
		hashGamma*uint64(w+1))>>32) & hashMask
}

// parseFeatureFn reads "hash" and "hash:SEED"; without a seed it is def.
func parseFeatureFn(s string, def uint64) (seed uint64, err error) {
	name, num, given := strings.Cut(s, ":")
	if name != "hash" {
		return 0,
			fmt.Errorf("feature function %q is unknown; the one there is is hash, or hash:SEED", s)
	}
	if !given {
		return def, nil
	}
	if seed, err = strconv.ParseUint(num, 10, 64); err != nil {
		return 0,
			fmt.Errorf("feature function %q: the seed is a number of at most 64 bits, as in hash:7",
				s)
	}
	return seed, nil
}

// featureFnText returns its name in dataset.yaml.
func featureFnText(seed uint64) string { return "hash:" + strconv.FormatUint(seed, 10) }

// ParseFeatureFn reads --feature-fn for dim features.
func ParseFeatureFn(s string, def uint64) (string, error) {
	seed, err := parseFeatureFn(s, def)
	if err != nil {
		return "", errs.New(errs.Usage, "{feature-fn}: %w", err)
	}
	return featureFnText(seed), nil
}

// NewFeatureFunc makes the tables for rows 0 to rows-1: 16 rows for each 4 bits of the largest
// number.
func NewFeatureFunc(seed uint64, dim int, rows int64) *FeatureFunc {
	f := &FeatureFunc{seed: seed, Dim: dim}
	words := (dim + 1) / 2
	make1 := func(b int) []uint64 {
		row := make([]uint64, words)
		for w := range dim {
			row[w/2] |= uint64(hashBits(seed, b, w)) << (w % 2 * 32)
		}
		return row
	}
	f.base = make1(0)
	for w := range dim {
		f.base[w/2] |= hashOne << (w % 2 * 32)
	}
	for bit := 0; bit < bits.Len64(uint64(max(rows-1, 1))); bit += 4 {
		t := make([]uint64, 16*words)
		for k := range 4 {
			one := make1(1 + bit + k)
			for v := 1 << k; v < 2<<k; v++ {
				dst, from := t[v*words:][:words], t[(v-1<<k)*words:][:words]
				for i := range dst {
					dst[i] = from[i] ^ one[i]
				}
			}
		}
		f.nib = append(f.nib, t)
	}
	return f
}

// Bits returns how many bits of a row number count.
func (f *FeatureFunc) Bits() int { return 4 * len(f.nib) }

// Row writes row r, little-endian float32, to dst, which has 4·dim bytes.
func (f *FeatureFunc) Row(r int64, dst []byte) {
	words := len(f.base)
	pick := func(k int) []uint64 {
		if k >= len(f.nib) {
			return nil
		}
		return f.nib[k][int(r>>(4*k)&15)*words:][:words]
	}
	from := f.base
	for k := 0; k < len(f.nib); k += 4 {
		a, b, c, d := pick(k), pick(k+1), pick(k+2), pick(k+3)
		xorRows(dst, from, a, b, c, d)
		from = nil // dst has it
	}
}

// xorRows writes from ^ a ^ b ^ c ^ d to dst; from nil means dst, and the last ones may be nil.
func xorRows(dst []byte, from, a, b, c, d []uint64) {
	n := len(dst) / 8
	if n > 0 && uintptr(unsafe.Pointer(&dst[0]))%8 == 0 {
		xorWords(unsafe.Slice((*uint64)(unsafe.Pointer(&dst[0])), n), from, a, b, c, d)
	} else {
		var part [64]uint64
		for pos := 0; pos < n; pos += len(part) {
			p := part[:min(len(part), n-pos)]
			cut := func(t []uint64) []uint64 {
				if t == nil {
					return nil
				}
				return t[pos:][:len(p)]
			}
			f := cut(from)
			for i := range p {
				if from == nil {
					p[i] = binary.LittleEndian.Uint64(dst[8*(pos+i):])
				}
			}
			xorWords(p, f, cut(a), cut(b), cut(c), cut(d))
			for i, x := range p {
				binary.LittleEndian.PutUint64(dst[8*(pos+i):], x)
			}
		}
	}
	if len(dst)%8 == 0 {
		return
	}
	tail := dst[8*n:] // an odd dim: the low half of the last word
	var x uint32
	if from != nil {
		x = uint32(from[n])
	} else {
		x = binary.LittleEndian.Uint32(tail)
	}
	for _, t := range [][]uint64{a, b, c, d} {
		if t != nil {
			x ^= uint32(t[n])
		}
	}
	binary.LittleEndian.PutUint32(tail, x)
}

// xorWords is xorRows of whole words.
func xorWords(dst, from, a, b, c, d []uint64) {
	if from == nil {
		from = dst
	}
	n := len(dst)
	from = from[:n]
	switch {
	case d != nil:
		a, b, c, d := a[:n], b[:n], c[:n], d[:n]
		for i := range dst {
			dst[i] = from[i] ^ a[i] ^ b[i] ^ c[i] ^ d[i]
		}
	case c != nil:
		a, b, c := a[:n], b[:n], c[:n]
		for i := range dst {
			dst[i] = from[i] ^ a[i] ^ b[i] ^ c[i]
		}
	case b != nil:
		a, b := a[:n], b[:n]
		for i := range dst {
			dst[i] = from[i] ^ a[i] ^ b[i]
		}
	default:
		a := a[:n]
		for i := range dst {
			dst[i] = from[i] ^ a[i]
		}
	}
}

// rows writes rows first, first+1, … that fill dst.
func (f *FeatureFunc) rows(first int64, dst []byte) {
	n := 4 * f.Dim
	for ; len(dst) > 0; dst = dst[n:] {
		f.Row(first, dst[:n])
		first++
	}
}

// Floats writes row r to dst, which has dim elements.
func (f *FeatureFunc) Floats(r int64, dst []float32, scratch []byte) {
	f.Row(r, scratch)
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(scratch[4*i:]))
	}
}

// FeatureFunc is the dataset's feature function; nil where its rows are in features.npy.
func (d *Dataset) FeatureFunc() *FeatureFunc {
	if d.Meta.FeatureFn == "" {
		return nil
	}
	d.fnOnce.Do(func() {
		seed, err := parseFeatureFn(d.Meta.FeatureFn, 0)
		if err == nil { // Meta.decode has checked it
			d.fnTable = NewFeatureFunc(seed, d.Meta.Dim, d.Meta.Rows())
		}
	})
	return d.fnTable
}

// FeatureFn is the name of the function that makes the rows, such as "hash:7"; empty where they are
// stored in features.npy.
func (d *Dataset) FeatureFn() string { return d.Meta.FeatureFn }

// checkFeatureFn checks dataset.yaml.
func (m *Meta) checkFeatureFn() error {
	if m.FeatureFn == "" {
		return nil
	}
	if seed, err := parseFeatureFn(m.FeatureFn, 0); err != nil ||
		m.FeatureFn != featureFnText(seed) {
		return errors.Join(fmt.Errorf("feature_fn %q is unknown; this heliosctl knows hash:SEED",
			m.FeatureFn), err)
	}
	return nil
}

// fnState is the part of a Dataset that is made when its feature function is first used.
type fnState struct {
	fnOnce  sync.Once
	fnTable *FeatureFunc
}

// Rows reads the feature rows first, first+1, … as float32 into dst, whose length must be a whole
// number of rows.
func (d *Dataset) Rows(first int64, dst []float32) error {
	n := int64(len(dst)) / int64(d.Meta.Dim)
	if int64(len(dst))%int64(d.Meta.Dim) != 0 || first < 0 || first+n > d.Meta.Rows() {
		return fmt.Errorf("dataset %s: rows %d..%d (%d numbers) are not rows of %d in 0..%d", d.dir,
			first, first+n-1, len(dst), d.Meta.Dim, d.Meta.Rows()-1)
	}
	if fn := d.FeatureFunc(); fn != nil {
		scratch := make([]byte, 4*d.Meta.Dim)
		for ; len(dst) > 0; dst = dst[d.Meta.Dim:] {
			fn.Floats(first, dst[:d.Meta.Dim], scratch)
			first++
		}
		return nil
	}
	t, row := d.Meta.RowType(), d.Meta.RowBytes()
	buf := make([]byte, int(n)*row)
	if err := d.ReadRows(first, buf); err != nil {
		return err
	}
	for ; len(dst) > 0; dst, buf = dst[d.Meta.Dim:], buf[row:] {
		t.Decode(simd.Auto, dst[:d.Meta.Dim], buf[:row], 1)
	}
	return nil
}

// FeatureFnSum stands for the rows of a feature function in a dataset's identity.
func FeatureFnSum(fn string, dim int) []byte {
	sum := sha256.Sum256(fmt.Appendf(nil, "feature function %s float32 %d", fn, dim))
	return sum[:]
}
