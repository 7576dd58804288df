package columns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
	"unsafe"

	"helios/dataset/table"
	"helios/internal/errs"
)

// text is a cell as a string that is valid until its batch goes.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// fault is an error of a row; -1: of all rows.
type fault struct {
	row int
	err error
}

// first returns an error of the first row that has a fault; ties are the first column's.
func first(b *table.Batch, n int, spec func(int) *Spec, check func(int) *fault) error {
	var worst *fault
	var s *Spec
	for i := range n {
		if f := check(i); f != nil && (worst == nil || f.row < worst.row) {
			worst, s = f, spec(i)
		}
	}
	switch {
	case worst == nil:
		return nil
	case worst.row < 0:
		return worst.err
	}
	return b.Bad(worst.row, s.Column, "%w", worst.err)
}

// columnOf returns a column of a batch, which is likely at a place.
func columnOf(b *table.Batch, name string, likely int) (*table.Column, error) {
	if likely < len(b.Columns) && b.Columns[likely].Name == name {
		return &b.Columns[likely], nil
	}
	for i := range b.Columns {
		if b.Columns[i].Name == name {
			return &b.Columns[i], nil
		}
	}
	return nil, errs.New(errs.Usage, "%s has no column %s", b.File, table.Brief(name))
}

// missing reports whether a cell has no value.
func (s *Spec) missing(c *table.Column, i int) bool {
	switch {
	case c.IsMissing(i):
		return true
	case c.Kind == table.Text:
		t := c.Text(i)
		if len(s.NA) == 0 && len(t) > 0 && t[0] > ' ' && t[0] < 0x80 {
			return false
		}
		t = bytes.TrimSpace(t)
		return len(t) == 0 || len(s.NA) > 0 && slices.Contains(s.NA, text(t))
	case c.Kind == table.Float && c.Floats[i] != c.Floats[i]:
		return true
	}
	return len(s.NA) > 0 && s.namesNumber(c, i)
}

// namesNumber reports whether a number is one that stands for no value.
func (s *Spec) namesNumber(c *table.Column, i int) bool {
	switch c.Kind {
	case table.Int, table.Uint:
		return slices.Contains(s.NA, string(table.AppendInt(nil, c, i)))
	case table.Float:
		return slices.ContainsFunc(s.NA, func(na string) bool {
			x, err := parseNumber([]byte(na))
			return err == nil && x == c.Floats[i]
		})
	}
	return false
}

var (
	errNumber = errors.New("is no number")
	errFinite = errors.New("is no number that float32 holds")
)

// parseNumber reads a decimal number.
func parseNumber(t []byte) (float64, error) {
	if x, ok := shortNumber(t); ok {
		return x, nil
	}
	t = bytes.TrimSpace(t)
	if len(t) == 0 || !(t[len(t)-1] >= '0' && t[len(t)-1] <= '9' || t[len(t)-1] == '.') ||
		bytes.ContainsAny(t, "xX_") { // infinities, NaN, hexadecimal
		return 0, errNumber
	}
	x, err := strconv.ParseFloat(text(t), 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, errNumber
	}
	return x, nil // too large is an infinity, which no feature may be
}

// shortNumber reads digits with or without a sign and a point, at most 15 of them: they and the
// power of ten are float64s, so that their quotient is the nearest one to the number (Clinger, "How
// to Read Floating Point Numbers Accurately", PLDI 1990).
func shortNumber(t []byte) (x float64, ok bool) {
	minus := len(t) > 0 && t[0] == '-'
	if minus {
		t = t[1:]
	}
	n := len(t)
	if n == 0 || n > 16 {
		return 0, false
	}
	var own [16]byte
	w := own[:]
	if cap(t) < len(own) {
		copy(w, t)
	} else {
		w = t[:len(own)]
	}
	lo, hi := binary.LittleEndian.Uint64(w), binary.LittleEndian.Uint64(w[8:])
	if n <= 8 { // no bytes behind the text
		lo, hi = lo&(^uint64(0)>>(64-8*n)), 0
	} else {
		hi &= ^uint64(0) >> (128 - 8*n)
	}
	decimals := 0
	if p := placeOf(lo, '.'); p < 8 { // close the gap of the point
		before := uint64(1)<<(8*p) - 1
		lo, hi = lo&before|(lo>>8|hi<<56)&^before, hi>>8
		n--
		decimals = n - p
	} else if p := placeOf(hi, '.'); p < 8 {
		before := uint64(1)<<(8*p) - 1
		hi = hi&before | hi>>8&^before
		n--
		decimals = n - 8 - p
	}
	if n == 0 || n > 15 {
		return 0, false
	}
	// Zeros before the digits, so that there are 16.
	if s := 8 * (16 - n); s >= 64 {
		lo, hi = '0'*ones, hi<<(s-64)|lo<<(s-64)|'0'*ones&(1<<(s-64)-1)
	} else {
		lo, hi = lo<<s|'0'*ones&(1<<s-1), hi<<s|lo>>(64-s)
	}
	lo, hi = lo^'0'*ones, hi^'0'*ones
	if (lo|hi|(lo+0x76*ones)|(hi+0x76*ones))&(0x80*ones) != 0 { // a byte is over 9
		return 0, false
	}
	if x = float64(1e8*eightDigits(lo) + eightDigits(hi)); decimals > 0 {
		x /= tens[decimals]
	}
	if minus {
		x = -x
	}
	return x, true
}

const ones = 0x0101010101010101

// placeOf returns the place of a byte among eight, or 8.
func placeOf(x uint64, c byte) int {
	x ^= uint64(c) * ones
	return bits.TrailingZeros64(^((x&(0x7f*ones) + 0x7f*ones) | x | 0x7f*ones)) / 8
}

// eightDigits is the number of eight digits, of which the first is in the lowest byte: neighbours
// are joined three times.
func eightDigits(x uint64) uint64 {
	const each = 0x000000ff000000ff
	x = x*10 + x>>8
	return ((x&each)*(100+1000000<<32) + (x>>16&each)*(1+10000<<32)) >> 32
}

var tens = [...]float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13,
	1e14, 1e15}

// parseBool reads a word for true or false.
func parseBool(t []byte) (float64, error) {
	switch string(bytes.ToLower(bytes.TrimSpace(t))) {
	case "true", "t", "yes", "y", "1":
		return 1, nil
	case "false", "f", "no", "n", "0":
		return 0, nil
	}
	return 0, errors.New("is none of true, false, yes, no, 1 and 0")
}

var timeLayouts = []string{"2006-01-02 15:04:05", time.RFC3339, "2006-01-02T15:04:05",
	"2006-01-02 15:04:05Z07:00", "2006-01-02T15:04:05Z0700", "2006-01-02 15:04",
	"2006-01-02T15:04"}

// ParseTime reads a date, or a date and time, in UTC where it names no zone, as microseconds since
// 1970. A year comes first: the other orders have two meanings.
func ParseTime(t []byte) (int64, error) {
	const day = len("2006-01-02")
	t = bytes.TrimSpace(t)
	if len(t) >= day && t[4] == '/' && t[7] == '/' {
		t = slices.Clone(t)
		t[4], t[7] = '-', '-'
	}
	switch {
	case len(t) < day || t[4] != '-':
	case len(t) == day:
		if x, err := time.Parse(time.DateOnly, text(t)); err == nil {
			return x.UnixMicro(), nil
		}
	default:
		for _, l := range timeLayouts {
			if x, err := time.Parse(l, text(t)); err == nil {
				return x.UnixMicro(), nil
			}
		}
	}
	return 0, errors.New("is no date such as 2026-01-31 or 2026-01-31T12:00:00Z")
}

// parse reads the numbers of a text, into a slice of its own.
func (s *Spec) parse(t []byte) ([]float64, error) {
	dst := make([]float64, s.numbers())
	return dst, s.parseInto(dst, t)
}

// parseInto reads the numbers of a text.
func (s *Spec) parseInto(dst []float64, t []byte) (err error) {
	switch {
	case s.Transform == Boolean:
		dst[0], err = parseBool(t)
	case s.Transform == Date:
		var us int64
		if us, err = ParseTime(t); err == nil {
			s.dateInto(dst, us)
		}
	case s.Size > 0:
		err = parseVector(dst, t)
	default:
		dst[0], err = parseNumber(t)
	}
	return err
}

// parseVector reads numbers between spaces, commas or semicolons, in brackets or not.
func parseVector(dst []float64, t []byte) error {
	t = bytes.TrimSpace(t)
	if n := len(t); n > 1 && t[0] == '[' && t[n-1] == ']' {
		t = t[1 : n-1]
	}
	n := 0
	for f := range bytes.FieldsFuncSeq(t, func(r rune) bool {
		return r == ' ' || r == ',' || r == ';' || r == '|' || r == '\t'
	}) {
		if n < len(dst) {
			x, err := parseNumber(f)
			if err != nil {
				return err
			}
			dst[n] = x
		}
		n++
	}
	if n != len(dst) {
		return errs.Errorf("holds %d numbers, the column has vectors of %d", n, len(dst))
	}
	return nil
}

// dateInto gives the parts of a time.
func (s *Spec) dateInto(dst []float64, us int64) {
	if len(s.Parts) == 0 {
		dst[0] = days(us)
		return
	}
	t := time.UnixMicro(us).UTC()
	for i, p := range s.Parts {
		switch p {
		case "number":
			dst[i] = days(us)
		case "year":
			dst[i] = float64(t.Year())
		case "month":
			dst[i] = float64(t.Month())
		case "day":
			dst[i] = float64(t.Day())
		case "weekday":
			dst[i] = float64((t.Weekday() + 6) % 7)
		case "hour":
			dst[i] = float64(t.Hour())
		}
	}
}

func days(us int64) float64 { return float64(us) / (24 * 3600 * 1e6) }

// vectorSize returns the numbers of a cell of lists, or of a text that parseVector reads.
func vectorSize(c *table.Column, i int) int {
	if c.Kind == table.List {
		return c.Offsets[i+1] - c.Offsets[i]
	}
	return 0
}

// cell gives the numbers of a cell that has a value.
func (s *Spec) cell(dst []float64, c *table.Column, i int) error {
	switch c.Kind {
	case table.Text:
		if err := s.parseInto(dst, c.Text(i)); err != nil {
			return errs.Errorf("%s %w", table.Brief(c.Text(i)), err)
		}
	case table.List:
		if n := c.Offsets[i+1] - c.Offsets[i]; s.Size == 0 || n != s.Size {
			return errs.Errorf("holds %d values, and the column has %d", n, s.numbers())
		}
		one := Spec{Transform: s.Transform}
		for k := range dst {
			if j := c.Offsets[i] + k; s.missing(c.Values, j) {
				return errs.Errorf("value %d of the list is missing", k)
			} else if err := one.cell(dst[k:k+1], c.Values, j); err != nil {
				return err
			}
		}
		return nil
	case table.Time:
		if s.Transform != Date {
			return errs.Errorf("is a time; take transform %s", Date)
		}
		s.dateInto(dst, c.Ints[i])
		return nil
	default:
		if s.Transform == Date || s.Size > 1 {
			return errs.Errorf("is one number; take another transform than %s", s.Transform)
		}
		if dst[0] = number(c, i); s.Transform == Boolean && dst[0] != 0 && dst[0] != 1 {
			return errs.Errorf("%v is neither 0 nor 1", dst[0])
		}
	}
	for _, x := range dst {
		if !(math.Abs(x) <= math.MaxFloat32) {
			return errs.Errorf("%v %w", x, errFinite)
		}
	}
	return nil
}

// number is the number of a cell of numbers.
func number(c *table.Column, i int) float64 {
	switch c.Kind {
	case table.Float:
		return c.Floats[i]
	case table.Uint:
		return float64(uint64(c.Ints[i]))
	}
	return float64(c.Ints[i])
}

// plain reports whether a cell is one number, as it is.
func (s *Spec) plain() bool { return s.is(None, Standard, MinMax, Log) && s.Size == 0 }

// oneNumber reports whether the cells of a column are one number each.
func (s *Spec) oneNumber(c *table.Column) bool {
	return c.Kind != table.List && !s.texts() && s.numbers() == 1
}

// numbersOf gives the numbers of the cells from a place on, NaN for those without a value, up to
// the first with a fault. Of a column of oneNumber.
func (s *Spec) numbersOf(dst []float64, c *table.Column, from int) *fault {
	plain, anyNA := s.plain(), len(s.NA) > 0
	for k := range dst {
		i := from + k
		switch {
		case c.Kind == table.Text && plain && !anyNA:
			if x, ok := shortNumber(c.Text(i)); ok {
				dst[k] = x
				continue
			}
		case c.Kind == table.Float && plain && !c.IsMissing(i):
			if x := c.Floats[i]; math.Abs(x) <= math.MaxFloat32 {
				dst[k] = x
				continue
			}
		}
		err := errNoValue
		if !s.missing(c, i) {
			err = s.cell(dst[k:k+1], c, i)
		} else if s.Missing != "" {
			dst[k], err = math.NaN(), nil
		}
		if err != nil {
			return &fault{i, err}
		}
	}
	return nil
}

// AppendText appends a cell as a text, by which it is a category or a name: equal in every kind of
// file.
func AppendText(dst []byte, c *table.Column, i int) ([]byte, error) {
	switch c.Kind {
	case table.Text:
		t := bytes.TrimSpace(c.Text(i))
		if !utf8.Valid(t) {
			return dst, errs.Errorf("%s is no UTF-8", table.Brief(t))
		}
		return append(dst, t...), nil
	case table.Int:
		return strconv.AppendInt(dst, c.Ints[i], 10), nil
	case table.Uint:
		return strconv.AppendUint(dst, uint64(c.Ints[i]), 10), nil
	case table.Bool:
		return strconv.AppendBool(dst, c.Ints[i] != 0), nil
	case table.Float:
		return strconv.AppendFloat(dst, c.Floats[i], 'g', -1, 64), nil
	case table.Time:
		t := time.UnixMicro(c.Ints[i]).UTC()
		if c.Ints[i]%(24*3600*1e6) == 0 {
			return t.AppendFormat(dst, "2006-01-02"), nil
		}
		return t.AppendFormat(dst, "2006-01-02T15:04:05.999999Z"), nil
	}
	return dst, errors.New("is a list, not one text")
}

// IsMissing reports whether a cell has no value.
func (s *Spec) IsMissing(c *table.Column, i int) bool { return s.missing(c, i) }

// Number is the number of a cell that has a value; truth reads true and false, too.
func Number(c *table.Column, i int, truth bool) (float64, error) {
	s := Spec{Transform: None}
	if truth {
		s.Transform = Boolean
	}
	var x [1]float64
	err := s.cell(x[:], c, i)
	return x[0], err
}

// When is the time or number of a cell that has a value, by which rows are ordered.
func When(c *table.Column, i int) (float64, error) {
	switch c.Kind {
	case table.Text:
		x, err := ParseWhen(c.Text(i))
		if err != nil {
			err = errs.Errorf("%s %w", table.Brief(c.Text(i)), err)
		}
		return x, err
	case table.Time:
		return float64(c.Ints[i]), nil
	case table.List:
		return 0, errors.New("is a list, not a time")
	}
	return number(c, i), nil
}

// ParseWhen reads a date or a number: dates as microseconds since 1970.
func ParseWhen(t []byte) (float64, error) {
	if us, err := ParseTime(t); err == nil {
		return float64(us), nil
	}
	x, err := parseNumber(t)
	if err != nil {
		err = errors.New("is neither a number nor a date such as 2026-01-31")
	}
	return x, err
}
