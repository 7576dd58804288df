package faultinject

import (
	"fmt"
	"strconv"
	"strings"
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

// String prints the fault so that Parse reads it back.
func (f Fault) String() string {
	var kv []string
	add := func(format string, a ...any) { kv = append(kv, fmt.Sprintf(format, a...)) }
	numbers := f.Kind.numbers()
	addNumber := func(n number) {
		if v := n.get(&f); !n.omit || v != n.unset {
			add(n.name+"="+n.format, v)
		}
	}
	if f.Kind == Late || f.Kind == Slow { // how late comes first
		addNumber(numbers[0])
		numbers = numbers[1:]
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
	for _, n := range numbers {
		addNumber(n)
	}
	return f.Kind.String() + "(" + strings.Join(kv, ",") + ")"
}

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
	if f.Kind == 0 {
		return bad("unknown kind %q; use one of %s", name, kindList())
	}
	for _, n := range kinds[f.Kind].keys {
		n.set(&f, n.unset)
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
		if f.First, err = parseUint(strings.TrimSpace(a)); err == nil {
			f.Last, err = parseUint(strings.TrimSpace(b))
		}
		if err != nil {
			return fmt.Errorf("lba=%s: %w", val, err)
		}
		f.AllLBAs = false
		return nil
	}
	keys := []string{"op", "lba"}
	for _, k := range f.Kind.numbers() {
		if k.name != key {
			keys = append(keys, k.name)
			continue
		}
		n, err := parseUint(val)
		if err == nil && n > k.hi {
			err = fmt.Errorf("choose %d to %d", k.lo, k.hi)
		}
		if err != nil {
			return fmt.Errorf("%s=%s: %w", key, val, err)
		}
		k.set(f, n)
		return nil
	}
	return fmt.Errorf("unknown key %q of %s; the keys are %s", key, f.Kind,
		strings.Join(keys, ", "))
}

// parseUint reads decimal and 0x numbers, and nothing else that strconv would take.
func parseUint(s string) (uint64, error) {
	for _, r := range s {
		if r == '_' || r == '+' || unicode.IsSpace(r) {
			return 0, fmt.Errorf("%q is not a number", s)
		}
	}
	base := 10
	if h, ok := strings.CutPrefix(s, "0x"); ok {
		s, base = h, 16
	}
	n, err := strconv.ParseUint(s, base, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", s)
	}
	return n, nil
}
