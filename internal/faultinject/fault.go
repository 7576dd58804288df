// Package faultinject describes faults as values that print, parse, compose and count, so
// that a test can inject them by name and assert that each one surfaced. Catalogue is the list of
// those with a documented outcome (docs/reference/faults.md).
//
// A fault is written as kind(key=value,...), several are joined with ';':
//
//	error(op=read,lba=100-199,sct=2,sc=0x81,dnr=1,times=3)
//	lost(op=read,times=1);late(ms=50,op=write,after=10)
//
// kinds of what becomes of a command:
//
//	error      it is not carried out and completes with status code type sct, status code sc, dnr
//	lost       it is carried out, its completion is never posted
//	late       it is carried out and completed ms milliseconds late
//	drop       it never reaches the controller
//	slow       its completion comes no earlier than us microseconds after its fetch
//	reorder    n completions are held back and posted in reverse, after 2 ms at the latest
//	stuck      from it on the controller does not see the tail doorbell of its submission queue
//	torndb     its tail doorbell arrives as a value that is none
//
// of its completion:
//
//	dup        it is posted twice; n: the second time after so many others of its queue, or a moment
//	           without any, when its CID may be in use again
//	foreign    one for command cid, which nobody sent, comes before it
//	phase      its phase tag is the wrong one
//	sqhead     its submission queue head lies outside the queue
//	sqid       it names another submission queue
//	cqstuck    from it on the controller does not see the head doorbell of its completion queue
//
// of its data:
//
//	flip       bit of byte of what was read, counted from the first block that lba chooses, is the
//	           other one
//	short      only the first bytes of what was read arrive
//	misdirect  it goes to the blocks shift before its own (below shift: behind) and says nothing of it
//	torn       the first half of the blocks of a write lands, and it says nothing of it
//
// and of the controller, in its registers:
//
//	cfs        it stops with CSTS.CFS until it is reset
//	gone       it leaves its bus for good: registers read as all ones
//	notready   enabled, it does not become ready (CSTS.RDY stays 0)
//	stayready  disabled, it stays ready (CSTS.RDY stays 1)
//
// keys of every kind:
//
//	op     read, write, flush or any of these three (default), or an admin command: abort,
//	       createq, deleteq, identify, features, log, or admin for any
//	lba    A or A-B, inclusive: reads and writes that touch one of these blocks (default all)
//	after  this many matching commands pass first (default 0)
//	times  at most so many commands are hit (default no limit)
//
// notready counts enables, stayready counts disables, and neither takes op or lba. cfs without
// op, lba and after happens at each enable, gone so before anybody looks.
package faultinject

//go:generate go -C ../../tools run ./gendocs faults ../docs/reference/faults.md

import (
	"fmt"
	"time"

	"helios/internal/errs"
)

// Kind names what goes wrong.
type Kind uint8

// The kinds of faults.
const (
	Error Kind = iota + 1
	Lost
	Late
	Drop
	Slow
	Reorder
	Stuck
	TornDoorbell
	Dup
	Foreign
	Phase
	SQHead
	SQID
	CQStuck
	Flip
	Short
	Misdirect
	Torn
	CFS
	Gone
	NotReady
	StayReady
	kindEnd
)

// kindInfo describes how a kind is written and what it is for.
type kindInfo struct {
	name string
	keys string // its own keys, separated by blanks
	ops  ops    // what it can hit
}

// ops is a set of operations.
type ops uint16

func opSet(list ...Op) ops {
	var s ops
	for _, o := range list {
		s |= 1 << o
	}
	return s
}

func (s ops) has(o Op) bool { return s>>o&1 != 0 }

var (
	ioOps    = opSet(Read, Write, Flush)
	adminOps = opSet(Admin, Abort, CreateQ, DeleteQ, Identify, Features, Log)
	allOps   = ioOps | adminOps
)

var kinds = [kindEnd]kindInfo{
	Error:        {"error", "sct sc dnr", allOps},
	Lost:         {"lost", "", allOps},
	Late:         {"late", "ms", allOps},
	Drop:         {"drop", "", allOps},
	Slow:         {"slow", "us", allOps},
	Reorder:      {"reorder", "n", allOps},
	Stuck:        {"stuck", "", allOps},
	TornDoorbell: {"torndb", "", allOps},
	Dup:          {"dup", "n", allOps},
	Foreign:      {"foreign", "cid", allOps},
	Phase:        {"phase", "", allOps},
	SQHead:       {"sqhead", "", allOps},
	SQID:         {"sqid", "", allOps},
	CQStuck:      {"cqstuck", "", allOps},
	Flip:         {"flip", "byte bit", opSet(Read)},
	Short:        {"short", "bytes", opSet(Read)},
	Misdirect:    {"misdirect", "shift", opSet(Read, Write)},
	Torn:         {"torn", "", opSet(Write)},
	CFS:          {"cfs", "", allOps},
	Gone:         {"gone", "", allOps},
	NotReady:     {"notready", "", 0},
	StayReady:    {"stayready", "", 0},
}

func (k Kind) valid() bool { return k > 0 && k < kindEnd }

// String is the kind's name in the syntax.
func (k Kind) String() string {
	if k.valid() {
		return kinds[k].name
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Op is the commands that a fault is for.
type Op uint8

// The operations of a fault. Any is all I/O commands, Admin all admin commands; as what a command
// is, Admin stands for those without a name of their own.
const (
	Any Op = iota
	Read
	Write
	Flush
	Admin
	Abort
	CreateQ
	DeleteQ
	Identify
	Features
	Log
	opEnd
)

var opNames = [opEnd]string{Any: "any", Read: "read", Write: "write", Flush: "flush",
	Admin: "admin", Abort: "abort",
	CreateQ: "createq", DeleteQ: "deleteq", Identify: "identify", Features: "features", Log: "log"}

// String is the operation's name in the syntax.
func (o Op) String() string {
	if o < opEnd {
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
	CID         uint16 // Foreign
	Byte        uint32 // Flip
	Bit         uint8  // Flip, 0 to 7
	Bytes       uint32 // Short
	Shift       uint32 // Misdirect, blocks
	N           int    // Reorder, Dup
	After       int64  // matching commands that pass before the first hit
	Times       int64  // hits at most; 0 = no limit
}

// Bounds: every wait has an end, and what is held back is bounded.
const (
	maxDelay   = time.Hour
	maxSlow    = time.Minute
	maxReorder = 1024
)

// atOnce reports that the fault does not wait for a command.
func (f *Fault) atOnce() bool { return f.Op == Any && f.AllLBAs && f.After == 0 }

// Validate describes what is wrong with the fault, if anything.
func (f Fault) Validate() error {
	bad := func(format string, a ...any) error {
		return errs.New(errs.Usage, "fault %s: %s", f.Kind, fmt.Sprintf(format, a...))
	}
	if !f.Kind.valid() {
		return bad("is no kind; use one of %s", kindList())
	}
	if f.Op >= opEnd {
		return bad("operation %d; use one of %s", f.Op, opList(allOps))
	}
	can := kinds[f.Kind].ops
	ranged := !f.AllLBAs || f.First != 0 || f.Last != 0
	switch {
	case can == 0 && (f.Op != Any || ranged):
		return bad("takes no op and no lba: it counts enables or disables of the controller")
	case f.Op != Any && !can.has(f.Op):
		return bad("op=%s: use one of %s", f.Op, opList(can))
	case f.AllLBAs && ranged:
		return bad("has both a block range and all blocks")
	case adminOps.has(f.Op) && ranged:
		return bad("op=%s has no lba", f.Op)
	case f.First > f.Last:
		return bad("lba=%d-%d ends before it starts", f.First, f.Last)
	case f.After < 0 || f.Times < 0:
		return bad("after and times are not negative")
	}
	return f.validateOwn(bad)
}

// validateOwn checks the keys that only some kinds have.
func (f *Fault) validateOwn(bad func(string, ...any) error) error {
	zero := func(kind Kind, unset bool, what string) error {
		if f.Kind == kind || unset {
			return nil
		}
		return bad("takes no %s", what)
	}
	for _, err := range []error{
		zero(Error, f.SCT == 0 && f.SC == 0 && !f.DNR, "status"),
		zero(Foreign, f.CID == 0, "cid"),
		zero(Flip, f.Byte == 0 && f.Bit == 0, "byte or bit"),
		zero(Short, f.Bytes == 0, "bytes"),
		zero(Misdirect, f.Shift == 0, "shift"),
		zero(Reorder, f.N == 0 || f.Kind == Dup, "n"),
	} {
		if err != nil {
			return err
		}
	}
	if f.Kind != Late && f.Kind != Slow && f.Delay != 0 {
		return bad("takes no ms or us")
	}
	return f.validateValues(bad)
}

// validateValues checks the values of a kind's own keys.
func (f *Fault) validateValues(bad func(string, ...any) error) error {
	whole := func(unit, limit time.Duration) bool {
		return f.Delay >= unit && f.Delay <= limit && f.Delay%unit == 0
	}
	switch f.Kind {
	case Error:
		switch {
		case f.SCT > 7:
			return bad("sct=%d is above 7", f.SCT)
		case f.SCT == 0 && f.SC == 0:
			return bad("sct=0,sc=0 is success; give the status to fail with, such as sct=2,sc=0x81")
		}
	case Late:
		if !whole(time.Millisecond, maxDelay) {
			return bad("needs ms=1 to ms=%d", maxDelay/time.Millisecond)
		}
	case Slow:
		if !whole(time.Microsecond, maxSlow) {
			return bad("needs us=1 to us=%d", maxSlow/time.Microsecond)
		}
	case Flip:
		if f.Bit > 7 {
			return bad("bit=%d; a byte has bits 0 to 7", f.Bit)
		}
	case Misdirect:
		if f.Shift == 0 {
			return bad("needs shift=1 or more")
		}
	case Reorder:
		if f.N < 2 || f.N > maxReorder {
			return bad("needs n=2 to n=%d", maxReorder)
		}
	case Dup:
		if f.N < 0 || f.N > maxReorder {
			return bad("takes n=1 to n=%d", maxReorder)
		}
	}
	return nil
}
