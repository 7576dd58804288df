package faultinject

import (
	"strings"
	"sync/atomic"
	"time"
)

// Action holds what shall happen to a command or a register: all faults that hit together.
type Action struct {
	Fail    bool // do not carry it out, complete with the status SCT, SC, DNR
	SCT, SC uint8
	DNR     bool

	Lost  bool          // do not post the completion
	Delay time.Duration // carry it out and complete this much later
	Drop  bool          // never carry it out, never complete it

	Slow    time.Duration // do not complete it before this much time has passed
	Reorder int           // hold its completion until so many are held

	Stuck        bool // do not look at its SQ's tail doorbell any more
	TornDoorbell bool // ring a value that is none

	Dup        bool // post the completion twice,
	DupAfter   int  // the second time after so many others
	Foreign    bool // post a completion of ForeignCID first
	ForeignCID uint16
	Phase      bool // invert the phase tag
	SQHead     bool // give a head outside the SQ
	SQID       bool // give another SQ
	CQStuck    bool // do not look at its CQ's head doorbell any more

	Flip       bool // invert FlipBit of FlipByte of the data from FlipBlock of the command on
	FlipBlock  uint32
	FlipByte   uint32
	FlipBit    uint8
	Short      bool // only ShortBytes of the data arrive
	ShortBytes uint32
	Shift      uint32 // go to other blocks, so many away
	Torn       bool   // write the first half

	CFS  bool // set CSTS.CFS
	Gone bool // leave the bus
	Hang bool // CSTS.RDY does not follow CC.EN
}

// add puts what f does to a command that begins at block lba on top of a. Where two give a value,
// the first one's counts; times add up.
func (a *Action) add(f *Fault, lba uint64) {
	if sign := a.sign(f.Kind); sign != nil {
		*sign = true
		return
	}
	switch f.Kind {
	case Error:
		if !a.Fail {
			a.Fail, a.SCT, a.SC, a.DNR = true, f.SCT, f.SC, f.DNR != 0
		}
	case Late:
		a.Delay += f.Delay
	case Slow:
		a.Slow += f.Delay
	case Reorder:
		if a.Reorder == 0 {
			a.Reorder = f.N
		}
	case Dup:
		if !a.Dup {
			a.Dup, a.DupAfter = true, f.N
		}
	case Foreign:
		if !a.Foreign {
			a.Foreign, a.ForeignCID = true, f.CID
		}
	case Flip:
		if !a.Flip {
			a.Flip, a.FlipByte, a.FlipBit = true, f.Byte, f.Bit
			if !f.AllLBAs && f.First > lba {
				a.FlipBlock = uint32(f.First - lba) // within the command, since it matched
			}
		}
	case Short:
		if !a.Short {
			a.Short, a.ShortBytes = true, f.Bytes
		}
	case Misdirect:
		if a.Shift == 0 {
			a.Shift = f.Shift
		}
	}
}

// sign is the flag of a kind without a value; nil: the kind has one.
func (a *Action) sign(k Kind) *bool {
	switch k {
	case Lost:
		return &a.Lost
	case Drop:
		return &a.Drop
	case Stuck:
		return &a.Stuck
	case TornDoorbell:
		return &a.TornDoorbell
	case Phase:
		return &a.Phase
	case SQHead:
		return &a.SQHead
	case SQID:
		return &a.SQID
	case CQStuck:
		return &a.CQStuck
	case Torn:
		return &a.Torn
	case CFS:
		return &a.CFS
	case Gone:
		return &a.Gone
	case NotReady, StayReady:
		return &a.Hang
	}
	return nil
}

// Event is something other than a command that faults count.
type Event uint8

// The events of a controller.
const (
	Attach  Event = iota // it was found on its bus
	Enable               // CC.EN went to 1
	Disable              // CC.EN went to 0
)

// Set is an ordered set of faults with their counters. The nil set has no faults. It is safe
// for concurrent use. Several controllers may share one; its faults count what all of them do.
type Set struct {
	faults   []*armed
	disarmed atomic.Bool
}

type armed struct {
	Fault
	matched atomic.Int64 // commands that matched
	fired   atomic.Int64 // commands that were hit
}

// count takes one match and reports whether it is hit.
func (f *armed) count() bool {
	n := f.matched.Add(1)
	if n <= f.After || f.Times != 0 && n > f.After+f.Times {
		return false
	}
	f.fired.Add(1)
	return true
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

// Empty reports whether the set has no faults, so that a hot path may skip Match.
func (s *Set) Empty() bool { return s == nil || len(s.faults) == 0 }

// forCommand reports whether a fault looks at a command of operation op.
func (f *Fault) forCommand(op Op) bool {
	switch {
	case (f.Kind == CFS || f.Kind == Gone) && f.atOnce():
		return false
	case !kinds[f.Kind].ops.has(op):
		return false
	case f.Op == Any:
		return ioOps.has(op)
	case f.Op == Admin:
		return adminOps.has(op)
	}
	return f.Op == op
}

// Disarm ends the faults: nothing is counted or hit from here on. The effects of
// earlier hits, such as a queue whose doorbell is not seen any more, stay as they are.
func (s *Set) Disarm() { s.disarmed.Store(true) }

// Match counts a command on the blocks lba to lba+blocks-1 against every fault, and returns
// what the ones that hit it do together. A flush or admin command (blocks 0) touches every block.
// Where several give a status or another value, the first does; delays add up.
func (s *Set) Match(op Op, lba uint64, blocks uint32) (Action, bool) {
	var a Action
	hit := false
	if s == nil || s.disarmed.Load() {
		return a, false
	}
	for _, f := range s.faults {
		if !f.forCommand(op) {
			continue
		}
		if !f.AllLBAs && blocks != 0 && (lba > f.Last || f.First > lba &&
			f.First-lba >= uint64(blocks)) {
			continue
		}
		if f.count() {
			hit = true
			a.add(&f.Fault, lba)
		}
	}
	return a, hit
}

// MatchEvent counts an event against the faults that look at it.
func (s *Set) MatchEvent(e Event) (Action, bool) {
	var a Action
	hit := false
	if s == nil || s.disarmed.Load() {
		return a, false
	}
	for _, f := range s.faults {
		looks := false
		switch f.Kind {
		case CFS:
			looks = e == Enable && f.atOnce()
		case Gone:
			looks = e == Attach && f.atOnce()
		case NotReady:
			looks = e == Enable
		case StayReady:
			looks = e == Disable
		}
		if looks && f.count() {
			hit = true
			a.add(&f.Fault, 0)
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
