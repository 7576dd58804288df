// Package faultinject describes faults as values that print, parse, compose and count, so
// that a test can inject them by name and assert that each one surfaced.
//
// A fault is written as kind(key=value,...), several are joined with ';':
//
//	error(op=read,lba=100-199,sct=2,sc=0x81,dnr=1,times=3)
//	lost(op=read,times=1);late(ms=50,op=write,after=10)
//
// kinds:
//
//	error  the command completes with status code type sct and status code sc
//	lost   the command is carried out, its completion is never posted
//	late   the command is carried out and completed ms milliseconds late
//
// keys of every kind:
//
//	op     read, write, flush or any (default any)
//	lba    A or A-B, inclusive: commands that touch one of these blocks (default all)
//	after  this many matching commands pass first (default 0)
//	times  at most so many commands are hit (default no limit)
package faultinject

import (
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unicode"

	"helios/internal/errs"
)

// Kind is what goes wrong.
type Kind uint8

// The kinds of faults.
const (
	Error Kind = iota + 1
	Lost
	Late
)

var kindNames = [...]string{Error: "error", Lost: "lost", Late: "late"}

// String is the kind's name in the syntax.
func (k Kind) String() string {
	if k >= Error && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Op is the commands that a fault is for.
type Op uint8

// The operations of a fault; Any is all of them.
const (
	Any Op = iota
	Read
	Write
	Flush
)

var opNames = [...]string{Any: "any", Read: "read", Write: "write", Flush: "flush"}

// String is the operation's name in the syntax.
func (o Op) String() string {
	if int(o) < len(opNames) {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Fault is one fault. The zero LBA range with AllLBAs unset is block 0.
type Fault struct {
	Kind        Kind
	Op          Op
	AllLBAs     bool
	First, Last uint64 // blocks, inclusive; only without AllLBAs
	SCT, SC     uint8  // Error: status code type (0 to 7) and status code
	DNR         bool   // Error: Do Not Retry
	Delay       time.Duration
	After       int64 // matching commands that pass before the first hit
	Times       int64 // hits at most; 0 = no limit
}

// maxDelay bounds a late completion: every wait has an end.
const maxDelay = time.Hour

// Validate says what is wrong with the fault, if anything.
func (f Fault) Validate() error {
	bad := func(format string, a ...any) error {
		return errs.New(errs.Usage, "fault %s: %s", f.Kind, fmt.Sprintf(format, a...))
	}
	switch {
	case f.Kind < Error || f.Kind > Late:
		return bad("is no kind; use error, lost or late")
	case f.Op > Flush:
		return bad("operation %d; use read, write, flush or any", f.Op)
	case f.AllLBAs && (f.First != 0 || f.Last != 0):
		return bad("has both a block range and all blocks")
	case f.First > f.Last:
		return bad("lba=%d-%d ends before it starts", f.First, f.Last)
	case f.Kind == Error && f.SCT > 7:
		return bad("sct=%d is above 7", f.SCT)
	case f.Kind == Error && f.SCT == 0 && f.SC == 0:
		return bad("sct=0,sc=0 is success; give the status to fail with, such as sct=2,sc=0x81")
	case f.Kind != Error && (f.SCT != 0 || f.SC != 0 || f.DNR):
		return bad("takes no status")
	case f.Kind == Late && (f.Delay < time.Millisecond || f.Delay > maxDelay || f.Delay%time.Millisecond != 0):
		return bad("needs ms=1 to ms=%d", maxDelay/time.Millisecond)
	case f.Kind != Late && f.Delay != 0:
		return bad("takes no ms")
	case f.After < 0 || f.Times < 0:
		return bad("after and times are not negative")
	}
	return nil
}

// String prints the fault so that Parse reads it back.
func (f Fault) String() string {
	var kv []string
	add := func(format string, a ...any) { kv = append(kv, fmt.Sprintf(format, a...)) }
	if f.Kind == Late {
		add("ms=%d", f.Delay/time.Millisecond)
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
	if f.Kind == Error {
		add("sct=%d,sc=0x%02x", f.SCT, f.SC)
		if f.DNR {
			add("dnr=1")
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
	for k := Error; k <= Late; k++ {
		if strings.TrimSpace(name) == k.String() {
			f.Kind = k
		}
	}
	if f.Kind == 0 {
		return bad("unknown kind %q; use error, lost or late", name)
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

func (f *Fault) set(key, val string) error {
	num := func(bits int) (uint64, error) {
		n, err := parseUint(val, bits)
		if err != nil {
			return 0, fmt.Errorf("%s=%s: %w", key, val, err)
		}
		return n, nil
	}
	var n uint64
	var err error
	switch key {
	case "op":
		for o := Any; o <= Flush; o++ {
			if val == o.String() {
				f.Op = o
				return nil
			}
		}
		return fmt.Errorf("op=%s: use read, write, flush or any", val)
	case "lba":
		a, b, isRange := strings.Cut(val, "-")
		if !isRange {
			b = a
		}
		if f.First, err = parseUint(strings.TrimSpace(a), 64); err == nil {
			f.Last, err = parseUint(strings.TrimSpace(b), 64)
		}
		if err != nil {
			return fmt.Errorf("lba=%s: %w", val, err)
		}
		f.AllLBAs = false
	case "sct":
		n, err = num(8)
		f.SCT = uint8(n)
	case "sc":
		n, err = num(8)
		f.SC = uint8(n)
	case "dnr":
		n, err = num(1)
		f.DNR = n == 1
	case "ms":
		n, err = num(32)
		f.Delay = time.Duration(n) * time.Millisecond
	case "after":
		n, err = num(63)
		f.After = int64(n)
	case "times":
		n, err = num(63)
		f.Times = int64(n)
	default:
		return fmt.Errorf("unknown key %q; the keys are op, lba, sct, sc, dnr, ms, after and times", key)
	}
	return err
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

// Action is what shall happen to a command: all matching faults together.
type Action struct {
	Fail    bool // complete with the status SCT, SC, DNR
	SCT, SC uint8
	DNR     bool
	Lost    bool          // do not post the completion
	Delay   time.Duration // complete this much later
}

// Set is an ordered set of faults with their counters. The nil set has no faults. It is safe
// for concurrent use.
type Set struct{ faults []*armed }

type armed struct {
	Fault
	matched atomic.Int64 // commands that matched
	fired   atomic.Int64 // commands that were hit
}

// NewSet makes a set of faults.
func NewSet(faults ...Fault) (*Set, error) {
	s := &Set{}
	for _, f := range faults {
		if err := f.Validate(); err != nil {
			return nil, err
		}
		s.faults = append(s.faults, &armed{Fault: f})
	}
	return s, nil
}

// Parse reads faults joined with ';'. An empty string is an empty set.
func Parse(text string) (*Set, error) {
	s := &Set{}
	if strings.TrimSpace(text) == "" {
		return s, nil
	}
	for _, part := range strings.Split(text, ";") {
		f, err := ParseFault(part)
		if err != nil {
			return nil, err
		}
		s.faults = append(s.faults, &armed{Fault: f})
	}
	return s, nil
}

// String prints the set so that Parse reads it back.
func (s *Set) String() string {
	if s == nil {
		return ""
	}
	parts := make([]string, len(s.faults))
	for i, f := range s.faults {
		parts[i] = f.String()
	}
	return strings.Join(parts, ";")
}

// Empty tells whether the set has no faults, so that a hot path may skip Match.
func (s *Set) Empty() bool { return s == nil || len(s.faults) == 0 }

// Match counts a command on the blocks lba to lba+blocks-1 against every fault, and returns
// what the ones that hit it do together. A flush (blocks 0) touches every block. Where
// several give a status, the first does; delays add up.
func (s *Set) Match(op Op, lba uint64, blocks uint32) (Action, bool) {
	var a Action
	hit := false
	if s == nil {
		return a, false
	}
	for _, f := range s.faults {
		if f.Op != Any && f.Op != op {
			continue
		}
		if !f.AllLBAs && blocks != 0 && (lba > f.Last || f.First > lba && f.First-lba >= uint64(blocks)) {
			continue
		}
		n := f.matched.Add(1)
		if n <= f.After || f.Times != 0 && n > f.After+f.Times {
			continue
		}
		f.fired.Add(1)
		hit = true
		switch f.Kind {
		case Error:
			if !a.Fail {
				a.Fail, a.SCT, a.SC, a.DNR = true, f.SCT, f.SC, f.DNR
			}
		case Lost:
			a.Lost = true
		case Late:
			a.Delay += f.Delay
		}
	}
	return a, hit
}

// Counts is the number of commands hit so far by each fault, by its text; equal faults add up.
func (s *Set) Counts() map[string]int64 {
	m := map[string]int64{}
	if s != nil {
		for _, f := range s.faults {
			m[f.String()] += f.fired.Load()
		}
	}
	return m
}
