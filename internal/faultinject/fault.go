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
	"math"
	"slices"
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
	ops  ops      // what it can hit
	keys []number // its own keys
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
	Error: {"error", allOps, []number{
		num("sct", "%d", 0, 7, 1, func(f *Fault) *uint8 { return &f.SCT }),
		num("sc", "0x%02x", 0, 0xff, 1, func(f *Fault) *uint8 { return &f.SC }),
		num("dnr", "%d", 0, 1, 1, func(f *Fault) *uint8 { return &f.DNR }).quiet(0),
	}},
	Lost: {name: "lost", ops: allOps},
	Late: {"late", allOps, []number{num("ms", "%d", 1, uint64(time.Hour/time.Millisecond),
		time.Millisecond, func(f *Fault) *time.Duration { return &f.Delay })}},
	Drop: {name: "drop", ops: allOps},
	Slow: {"slow", allOps, []number{num("us", "%d", 1, uint64(time.Minute/time.Microsecond),
		time.Microsecond, func(f *Fault) *time.Duration { return &f.Delay })}},
	Reorder: {"reorder", allOps, []number{
		num("n", "%d", 2, maxReorder, 1, func(f *Fault) *int { return &f.N }).or(8)}},
	Stuck:        {name: "stuck", ops: allOps},
	TornDoorbell: {name: "torndb", ops: allOps},
	Dup: {"dup", allOps, []number{
		num("n", "%d", 0, maxReorder, 1, func(f *Fault) *int { return &f.N }).quiet(0)}},
	// No command of ours has the identifier FFFEh: there is no generation of all ones (gpuio), nor
	// an admin command FEh.
	Foreign: {"foreign", allOps, []number{num("cid", "0x%04x", 0, 0xffff, 1,
		func(f *Fault) *uint16 { return &f.CID }).quiet(0xfffe)}},
	Phase:   {name: "phase", ops: allOps},
	SQHead:  {name: "sqhead", ops: allOps},
	SQID:    {name: "sqid", ops: allOps},
	CQStuck: {name: "cqstuck", ops: allOps},
	Flip: {"flip", opSet(Read), []number{
		num("byte", "%d", 0, math.MaxUint32, 1, func(f *Fault) *uint32 { return &f.Byte }),
		num("bit", "%d", 0, 7, 1, func(f *Fault) *uint8 { return &f.Bit }),
	}},
	Short: {"short", opSet(Read), []number{
		num("bytes", "%d", 0, math.MaxUint32, 1, func(f *Fault) *uint32 { return &f.Bytes })}},
	Misdirect: {"misdirect", opSet(Read, Write), []number{num("shift", "%d", 1, math.MaxUint32, 1,
		func(f *Fault) *uint32 { return &f.Shift }).or(1)}},
	Torn:      {name: "torn", ops: opSet(Write)},
	CFS:       {name: "cfs", ops: allOps},
	Gone:      {name: "gone", ops: allOps},
	NotReady:  {name: "notready"},
	StayReady: {name: "stayready"},
}

// counts are the keys that every kind takes, besides op and lba.
var counts = []number{
	num("after", "%d", 0, math.MaxInt64, 1, func(f *Fault) *int64 { return &f.After }).quiet(0),
	num("times", "%d", 0, math.MaxInt64, 1, func(f *Fault) *int64 { return &f.Times }).quiet(0),
}

// number is a key whose value is a number from lo to hi.
type number struct {
	name, format string
	lo, hi       uint64
	unset        uint64 // its value where the text leaves it out
	omit         bool   // and then it does not print
	get          func(*Fault) uint64
	set          func(*Fault, uint64)
}

func num[T ~uint8 | ~uint16 | ~uint32 | ~int | ~int64](name, format string, lo, hi uint64, unit T,
	field func(*Fault) *T) number {
	return number{name: name, format: format, lo: lo, hi: hi,
		get: func(f *Fault) uint64 { return uint64(*field(f) / unit) },
		set: func(f *Fault, n uint64) { *field(f) = T(n) * unit }}
}

func (n number) or(unset uint64) number {
	n.unset = unset
	return n
}

func (n number) quiet(unset uint64) number {
	n.unset, n.omit = unset, true
	return n
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
	DNR         uint8  // Error: 1 for Do Not Retry
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

// maxReorder bounds what is held back.
const maxReorder = 1024

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
	case f.Kind == Error && f.SCT == 0 && f.SC == 0:
		return bad("sct=0,sc=0 is success; give the status to fail with, such as sct=2,sc=0x81")
	}
	known := Fault{Kind: f.Kind, Op: f.Op, AllLBAs: f.AllLBAs, First: f.First, Last: f.Last}
	for _, n := range f.Kind.numbers() {
		v := n.get(&f)
		if v < n.lo || v > n.hi {
			return bad("needs %s=%d to %s=%d", n.name, n.lo, n.name, n.hi)
		}
		n.set(&known, v)
	}
	if f != known {
		return bad("has values of other kinds, or a part of a unit")
	}
	return nil
}

// numbers are all keys of the kind that are numbers.
func (k Kind) numbers() []number { return slices.Concat(kinds[k].keys, counts) }
