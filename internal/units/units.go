// Package units reads and writes the quantities that people type: sizes in bytes, and cache
// budgets as bytes or as a share of something.
package units

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Binary and decimal multiples of a byte.
const (
	KiB int64 = 1 << 10
	MiB int64 = 1 << 20
	GiB int64 = 1 << 30
	TiB int64 = 1 << 40
)

// suffixes maps a lower-case unit to its factor. As in fio and dd, a bare letter is binary;
// with a B after it, it is decimal, as on an SSD's label.
var suffixes = map[string]float64{
	"": 1, "b": 1,
	"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15,
}

// ParseBytes reads a size such as 4096, 512KiB, 1.5GiB, 2G (binary) or 2GB (decimal).
// It refuses negative sizes, fractions of a byte and sizes beyond 2^63-1.
func ParseBytes(s string) (int64, error) {
	t := strings.TrimSpace(s)
	cut := strings.LastIndexAny(t, "0123456789.") + 1
	num, unit := t[:cut], strings.ToLower(strings.TrimSpace(t[cut:]))
	factor, ok := suffixes[unit]
	if num == "" || !ok {
		return 0, fmt.Errorf("%q is not a size; write it like 4096, 512MiB or 2GiB", s)
	}
	if n, err := strconv.ParseInt(num, 10, 64); err == nil {
		if n < 0 {
			return 0, fmt.Errorf("size %q is negative", s)
		}
		if f := int64(factor); n > math.MaxInt64/f {
			return 0, fmt.Errorf("size %q is beyond 8 EiB", s)
		}
		return n * int64(factor), nil
	}
	f, err := strconv.ParseFloat(num, 64)
	if err != nil || strings.ContainsAny(num, "eExXpP_") {
		return 0, fmt.Errorf("%q is not a size; write it like 4096, 512MiB or 2GiB", s)
	}
	v := f * factor
	switch {
	case v < 0:
		return 0, fmt.Errorf("size %q is negative", s)
	case v >= math.MaxInt64:
		return 0, fmt.Errorf("size %q is beyond 8 EiB", s)
	case v != math.Trunc(v) && factor == 1:
		return 0, fmt.Errorf("size %q has a fraction of a byte", s)
	}
	return int64(v), nil
}

// FormatBytes writes a size for people, with binary units: 1536 is "1.5 KiB".
func FormatBytes(n int64) string {
	v, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	i := 0
	for math.Abs(v) >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if v == math.Trunc(v) {
		return fmt.Sprintf("%d %s", int64(v), units[i])
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}

// FormatCount writes a count for people: 1234567 is "1.23 M".
func FormatCount(v float64) string {
	for _, u := range []struct {
		size float64
		name string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		from := 0.9995 * u.size // what three digits would round up to it
		if u.name == "k" {
			from = 9999.5
		}
		if math.Abs(v) >= from {
			return strconv.FormatFloat(v/u.size, 'g', 3, 64) + " " + u.name
		}
	}
	if v != math.Trunc(v) {
		digits := 3
		if math.Abs(v) >= 999.5 {
			digits = 4
		}
		return strconv.FormatFloat(v, 'g', digits, 64)
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// Budget is an amount of memory: bytes, a percentage of a total known later, or both together.
type Budget struct {
	Bytes   int64
	Percent float64 // 0 when given in bytes
}

// Plus is two budgets together.
func (b Budget) Plus(o Budget) Budget { return Budget{b.Bytes + o.Bytes, b.Percent + o.Percent} }

// ParseBudget reads 256MiB, 0 or 5%. A percentage lies in [0, 100]. A bare number from 1 to 100
// is refused: it is a percentage whose sign was forgotten, more often than so few bytes.
func ParseBudget(s string) (Budget, error) {
	t := strings.TrimSpace(s)
	if p, ok := strings.CutSuffix(t, "%"); ok {
		v, err := strconv.ParseFloat(strings.TrimSpace(p), 64)
		if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
			return Budget{}, fmt.Errorf("%q is not a percentage; write it like 5%%", s)
		}
		if v < 0 || v > 100 {
			return Budget{}, fmt.Errorf("%q is not between 0%% and 100%%", s)
		}
		return Budget{Percent: v}, nil
	}
	b, err := ParseBytes(t)
	if err != nil {
		return Budget{},
			fmt.Errorf("%q is neither a size nor a percentage; write it like 256MiB or 5%%", s)
	}
	if noUnit := strings.ContainsAny(t[len(t)-1:], "0123456789."); noUnit && b > 0 && b <= 100 {
		return Budget{}, fmt.Errorf("%q could be a percentage or bytes; write %s%% or %sB", s, t, t)
	}
	return Budget{Bytes: b}, nil
}

// Of is the budget in bytes where the total is known.
func (b Budget) Of(total int64) int64 {
	return b.Bytes + int64(b.Percent/100*float64(total))
}

// String writes the budget so that ParseBudget reads it back, but for a share and bytes together.
func (b Budget) String() string {
	if b.Percent != 0 && b.Bytes != 0 {
		return Budget{Percent: b.Percent}.String() + " and " + FormatBytes(b.Bytes)
	}
	if b.Percent != 0 {
		return strconv.FormatFloat(b.Percent, 'g', -1, 64) + "%"
	}
	if b.Bytes > 0 && b.Bytes <= 100 {
		return strconv.FormatInt(b.Bytes, 10) + "B"
	}
	return strconv.FormatInt(b.Bytes, 10)
}

// ParseShare reads a share of a whole: 5%, or 0.05. It lies in [0, 1].
func ParseShare(s string) (float64, error) {
	number, percent := strings.CutSuffix(strings.TrimSpace(s), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil {
		return 0, fmt.Errorf("%s is not a share; write it like 10%% or 0.1", s)
	}
	if percent {
		v /= 100
	}
	if !(v >= 0 && v <= 1) {
		return 0, fmt.Errorf("%s is not a share from 0 to 1, or from 0%% to 100%%", s)
	}
	return v, nil
}

// ParseCount reads a number of things: 1000000, 100M or 1.5k, where K, M, G and T are thousands,
// millions, billions and trillions.
func ParseCount(s string) (int64, error) {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, nil
	}
	digits, scale := s, 1.0
	if last := len(s) - 1; last > 0 {
		if by := map[byte]float64{'k': 1e3, 'm': 1e6, 'g': 1e9, 't': 1e12}[s[last]|0x20]; by > 0 {
			digits, scale = s[:last], by
		}
	}
	v, err := strconv.ParseFloat(digits, 64)
	v *= scale
	if err != nil || math.IsNaN(v) || math.Abs(v) > 1<<53 || v != math.Trunc(v) ||
		strings.ContainsAny(digits, "xXpP_") {
		return 0, fmt.Errorf("%q is not a whole number; write it like 1000000 or 1M", s)
	}
	return int64(v), nil
}

// ParseInts reads a list such as 1,2,4. Every number must be at least low.
func ParseInts(s string, low int) ([]int, error) {
	var out []int
	for _, p := range strings.Split(s, ",") {
		n, err := ParseCount(strings.TrimSpace(p))
		if err != nil {
			return nil, fmt.Errorf("%q is not a list of whole numbers; write it like 1,2,4", s)
		}
		if n < int64(low) {
			return nil, fmt.Errorf("%d in %q is below %d", n, s, low)
		}
		out = append(out, int(n))
	}
	return out, nil
}

// FormatSeconds writes a time for people, with three digits: 0.0123 is "12.3 ms".
func FormatSeconds(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "-"
	case a >= 5999.5:
		return fmt.Sprintf("%.3g h", v/3600)
	case a >= 119.95:
		return fmt.Sprintf("%.3g min", v/60)
	case a >= 0.9995:
		return strconv.FormatFloat(v, 'g', 3, 64) + " s"
	case a >= 0.9995e-3:
		return strconv.FormatFloat(v*1e3, 'g', 3, 64) + " ms"
	case a >= 0.9995e-6:
		return strconv.FormatFloat(v*1e6, 'g', 3, 64) + " µs"
	case a == 0:
		return "0 s"
	}
	return strconv.FormatFloat(v*1e9, 'g', 3, 64) + " ns"
}
