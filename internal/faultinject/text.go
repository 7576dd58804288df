package faultinject

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"helios/internal/errs"
)

func kindList() string {
	names := make([]string, 0, kindEnd)
	for k := Error; k < kindEnd; k++ {
		names = append(names, k.String())
	}
	return strings.Join(names, ", ")
}

func opList(s ops) string {
	names := []string{Any.String()}
	for o := Any + 1; o < opEnd; o++ {
		if s.has(o) {
			names = append(names, o.String())
		}
	}
	return strings.Join(names, ", ")
}

// commonKeys are the keys that every kind takes.
var commonKeys = []string{"op", "lba", "after", "times"}

// String prints the fault so that Parse reads it back.
func (f Fault) String() string {
	var kv []string
	add := func(format string, a ...any) { kv = append(kv, fmt.Sprintf(format, a...)) }
	switch f.Kind {
	case Late:
		add("ms=%d", f.Delay/time.Millisecond)
	case Slow:
		add("us=%d", f.Delay/time.Microsecond)
	}
	if f.Op != Any {
		add("op=%s", f.Op)
	}
	switch {
	case f.AllLBAs:
	case f.First == f.Last:
		add("lba=%d", f.First)
	default:
		add("lba=%d-%d", f.First, f.Last)
	}
	switch f.Kind {
	case Error:
		add("sct=%d,sc=0x%02x", f.SCT, f.SC)
		if f.DNR {
			add("dnr=1")
		}
	case Foreign:
		if f.CID != defaultCID {
			add("cid=0x%04x", f.CID)
		}
	case Flip:
		add("byte=%d,bit=%d", f.Byte, f.Bit)
	case Short:
		add("bytes=%d", f.Bytes)
	case Misdirect:
		add("shift=%d", f.Shift)
	case Reorder:
		add("n=%d", f.N)
	case Dup:
		if f.N != 0 {
			add("n=%d", f.N)
		}
	}
	if f.After != 0 {
		add("after=%d", f.After)
	}
	if f.Times != 0 {
		add("times=%d", f.Times)
	}
	return f.Kind.String() + "(" + strings.Join(kv, ",") + ")"
}

// Values of kinds where the text leaves them out. No command of ours has the identifier FFFEh: there
// is no generation of all ones (gpuio), nor an admin command FEh.
const (
	defaultCID     = 0xfffe
	defaultShift   = 1
	defaultReorder = 8
)

// ParseFault reads one fault.
func ParseFault(s string) (Fault, error) {
	bad := func(format string, a ...any) (Fault, error) {
		return Fault{}, errs.New(errs.Usage, "fault %q: %s", s, fmt.Sprintf(format, a...))
	}
	s = strings.TrimSpace(s)
	name, rest, ok := strings.Cut(s, "(")
	if !ok || !strings.HasSuffix(rest, ")") {
		return bad("write it as kind(key=value,...), for example lost(op=read,times=1)")
	}
	f := Fault{AllLBAs: true}
	for k := Error; k < kindEnd; k++ {
		if strings.TrimSpace(name) == k.String() {
			f.Kind = k
		}
	}
	switch f.Kind {
	case 0:
		return bad("unknown kind %q; use one of %s", name, kindList())
	case Foreign:
		f.CID = defaultCID
	case Misdirect:
		f.Shift = defaultShift
	case Reorder:
		f.N = defaultReorder
	}
	seen := map[string]bool{}
	body := strings.TrimSpace(strings.TrimSuffix(rest, ")"))
	for _, kv := range strings.Split(body, ",") {
		if body == "" {
			break
		}
		key, val, ok := strings.Cut(kv, "=")
		key, val = strings.TrimSpace(key), strings.TrimSpace(val)
		if !ok || val == "" {
			return bad("%q is not key=value", strings.TrimSpace(kv))
		}
		if seen[key] {
			return bad("%s is given twice", key)
		}
		seen[key] = true
		if err := f.set(key, val); err != nil {
			return bad("%v", err)
		}
	}
	if err := f.Validate(); err != nil {
		return bad("%v", err)
	}
	return f, nil
}

// set takes one key.
func (f *Fault) set(key, val string) error {
	own := strings.Fields(kinds[f.Kind].keys)
	switch key {
	case "op":
		for o := Any; o < opEnd; o++ {
			if val == o.String() {
				f.Op = o
				return nil
			}
		}
		return fmt.Errorf("op=%s: use one of %s", val, opList(kinds[f.Kind].ops))
	case "lba":
		a, b, isRange := strings.Cut(val, "-")
		if !isRange {
			b = a
		}
		var err error
		if f.First, err = parseUint(strings.TrimSpace(a), 64); err == nil {
			f.Last, err = parseUint(strings.TrimSpace(b), 64)
		}
		if err != nil {
			return fmt.Errorf("lba=%s: %w", val, err)
		}
		f.AllLBAs = false
		return nil
	case "after", "times":
		own = append(own, key)
	}
	bits, to := f.number(key)
	if to == nil || !slices.Contains(own, key) {
		keys := slices.Concat(commonKeys, strings.Fields(kinds[f.Kind].keys))
		return fmt.Errorf("unknown key %q of %s; the keys are %s", key, f.Kind,
			strings.Join(keys, ", "))
	}
	n, err := parseUint(val, bits)
	if err != nil {
		return fmt.Errorf("%s=%s: %w", key, val, err)
	}
	to(n)
	return nil
}

// number is the width of a numeric key and where it goes.
func (f *Fault) number(key string) (bits int, to func(uint64)) {
	switch key {
	case "sct":
		return 8, func(n uint64) { f.SCT = uint8(n) }
	case "sc":
		return 8, func(n uint64) { f.SC = uint8(n) }
	case "dnr":
		return 1, func(n uint64) { f.DNR = n == 1 }
	case "ms":
		return 32, func(n uint64) { f.Delay = time.Duration(n) * time.Millisecond }
	case "us":
		return 32, func(n uint64) { f.Delay = time.Duration(n) * time.Microsecond }
	case "cid":
		return 16, func(n uint64) { f.CID = uint16(n) }
	case "byte":
		return 32, func(n uint64) { f.Byte = uint32(n) }
	case "bit":
		return 8, func(n uint64) { f.Bit = uint8(n) }
	case "bytes":
		return 32, func(n uint64) { f.Bytes = uint32(n) }
	case "shift":
		return 32, func(n uint64) { f.Shift = uint32(n) }
	case "n":
		return 16, func(n uint64) { f.N = int(n) }
	case "after":
		return 63, func(n uint64) { f.After = int64(n) }
	case "times":
		return 63, func(n uint64) { f.Times = int64(n) }
	}
	return 0, nil
}

// parseUint reads decimal and 0x numbers, and nothing else that strconv would take.
func parseUint(s string, bits int) (uint64, error) {
	for _, r := range s {
		if r == '_' || r == '+' || unicode.IsSpace(r) {
			return 0, fmt.Errorf("%q is not a number", s)
		}
	}
	base := 10
	if h, ok := strings.CutPrefix(s, "0x"); ok {
		s, base = h, 16
	}
	n, err := strconv.ParseUint(s, base, bits)
	if err != nil {
		return 0, fmt.Errorf("is not a number of at most %d bits", bits)
	}
	return n, nil
}
