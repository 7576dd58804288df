// Package policy decides which lines a cache of a fixed number of slots holds: the policies behind
// one interface, and the directory that finds a line's slot. It knows no memory and no clock: equal
// accesses give equal answers, so a run and its model on the virtual clock agree to the last hit.
package policy

import (
	"math"
	"slices"
	"strings"

	"helios/internal/errs"
)

// Policy is a rule that chooses the line that leaves a full cache. Each is declared in a file of
// its own and stands in the list of this one, which names, help and documents read.
type Policy struct {
	Name    string
	Summary string // for help: a few words after the name

	open func(d *Queues, c Config) evictor
	set  setRule // its rule over a set
}

// policies are all policies in the order of lists.
var policies []*Policy

func init() {
	policies = []*Policy{randomPolicy, lruPolicy, clockPolicy, sievePolicy, s3fifoPolicy}
}

// All returns all policies.
func All() []*Policy { return slices.Clone(policies) }

// Find returns the policy of a name, or nil.
func Find(name string) *Policy {
	if i := slices.IndexFunc(policies, func(p *Policy) bool { return p.Name == name }); i >= 0 {
		return policies[i]
	}
	return nil
}

// Online returns the names of the policies.
func Online() []string {
	var names []string
	for _, p := range policies {
		names = append(names, p.Name)
	}
	return names
}

// Config is a directory's.
type Config struct {
	Policy string // one of Online
	Kind   string // of the directory, one of Kinds; empty: InQueues
	Slots  int64  // lines that the cache holds, below 2^31; line numbers are below 2^55
	Lines  int64  // that there are: numbers are below it; 0: not known
	Seed   uint64 // of Random's draws
	// Workers bounds the goroutines that play a part, where the kind lets several; 0: as many as
	// there are CPUs. Answers do not depend on it.
	Workers int
}

// Kinds of directories.
const (
	// InSets is Sets: sets of up to 32 lines, each under the policy by itself.
	InSets = "sets"
	// InQueues is Queues: any line in any slot, under the policy over all of them.
	InQueues = "queues"
)

// Kinds lists the kinds of directories.
func Kinds() []string { return []string{InSets, InQueues} }

// Directory keeps the lines of a cache and their slots. Accesses come in batches: a line that an
// announced batch will access (the window buffer of GIDS) is not evicted. A line that finds no slot
// bypasses the cache. A batch is one moment for the policy: a line that two parts of a batch access
// was accessed once. It is not safe for concurrent use.
type Directory interface {
	// Announce takes the lines, each once, of the next batch that was not announced yet; between
	// batches, not between the parts of one. A batch that was announced must access exactly these
	// lines, and its announcement ends line by line as it does. The current batch cannot be
	// announced any more.
	Announce(lines []int64)
	// Forget ends all announcements: a pass that stops early will not make their accesses.
	Forget()
	// NextBatch begins a batch.
	NextBatch()
	// Access answers for the lines of a part of the current batch; no line stands twice in a part.
	// out has room for them. Lines that are cached are found before any is inserted; the misses
	// then get their slots in order.
	Access(lines []int64, out []Answer)
	// Drop empties a slot whose filling failed. An empty one stays so.
	Drop(slot int32)
	// Find is a line's slot without an access, -1 for none.
	Find(line int64) int32
	// Line is the line that a slot holds, -1 for none.
	Line(slot int32) int64
	// Stats are the totals since New.
	Stats() Stats
	// Bytes is the directory's memory: per cached line, and per line that a batch of the window
	// announced; never per row of the dataset.
	Bytes() int64
}

// New makes the directory of an empty cache.
func New(c Config) (Directory, error) {
	p, err := c.check()
	if err != nil {
		return nil, err
	}
	switch c.Kind {
	case InSets:
		return newSets(c)
	case InQueues, "":
		return newQueues(c, p), nil
	}
	return nil, errs.New(errs.Usage, "cache directory %q: use one of %s", c.Kind,
		strings.Join(Kinds(), ", "))
}

// check finds the policy of a configuration whose slots and policy a run can have.
func (c Config) check() (*Policy, error) {
	if c.Slots < 0 || c.Slots >= math.MaxInt32 {
		return nil, errs.New(errs.Usage,
			"a dynamic cache of %d lines: at least 0 and below 2^31 are possible; use larger lines or a smaller cache",
			c.Slots)
	}
	p := Find(c.Policy)
	if p == nil {
		return nil, errs.New(errs.Usage, "cache policy %q: use one of %s", c.Policy,
			strings.Join(Online(), ", "))
	}
	return p, nil
}

// Answer is the place of an accessed line.
type Answer struct {
	Slot int32 // of the line, or -1: it is not cached and stays so (bypass)
	// the line was in the cache before the part; false with a slot: the caller fills the slot
	Hit bool
}

// Stats are totals of a directory, in lines.
type Stats struct{ Accesses, Hits, Inserted, Evicted, Bypassed int64 }

// Flags that keep a cached line from being evicted, and those of the policies.
const (
	current = 1 << iota // the current batch accessed it
	wanted              // a batch that was announced will access it
	parked              // the policy met it while it was pinned, and took it out of its queue
	own                 // from here on, five bits for what a policy notes of a slot
)

const pinned = current | wanted

// slot is the record of a slot: 16 bytes, so that a line's access meets one cache line of them.
type slot struct {
	word int64 // line << 8 | flags
	// The neighbours in the policy's queue; -1: none. Random: older is the place in its array.
	older, newer int32
}

const noLine = -1

func (s *slot) line() int64  { return s.word >> 8 }
func (s *slot) flags() uint8 { return uint8(s.word) }

func (s *slot) hold(line int64, flags uint8) { s.word = line<<8 | int64(flags) }

func (s *slot) set(flags uint8)   { s.word |= int64(flags) }
func (s *slot) unset(flags uint8) { s.word &^= int64(flags) }

// evictor is a policy: it orders the slots that hold a line. A slot is pinned when it is inserted.
// Every method takes O(1) time, victim amortised: what it steps over is paid for by an access or by
// a pin.
type evictor interface {
	insert(slot int32) // holds a new line
	hit(slot int32)    // was accessed; once a batch, and not in the batch that inserted it
	pin(slot int32)    // may not be evicted from now on
	unpin(slot int32)  // may be evicted
	victim() int32     // takes out a slot that is not pinned; there is one
	remove(slot int32) // is emptied
	// likely guesses the slots of the next victims, as many as into has room for, and returns their
	// number. It is a hint: nothing but time depends on it.
	likely(into []int32) int
	bytes() int64
}

// Queues is a directory in which any line may be in any slot. A line that the current batch has
// accessed is not evicted until NextBatch.
type Queues struct {
	table   table // line -> slot
	slots   []slot
	free    []int32 // emptied slots
	fresh   int32   // slots from here on were never used
	batch   []int32 // slots that the current batch accessed, by first access
	evictor evictor
	// evictable slots hold a line and are not pinned.
	evictable int64
	uses      uses
	announced int64 // batches that were announced and have not begun
	ending    bool  // the current batch was announced
	began     uint32
	stats     Stats
	touched   uint64 // keeps touch's loads from being optimised away
}

func newQueues(c Config, p *Policy) *Queues {
	d := &Queues{table: newTable(c.Slots), slots: make([]slot, c.Slots)}
	for i := range d.slots {
		d.slots[i].hold(noLine, 0)
	}
	d.evictor = p.open(d, c)
	return d
}

// Announce takes the lines of a coming batch.
func (d *Queues) Announce(lines []int64) {
	d.announced++
	var tags [ahead]uint32
	for len(lines) > 0 {
		n := min(len(lines), ahead)
		d.uses.reserve(n)
		d.touch(lines[:n], &tags)
		for i, line := range lines[:n] {
			d.uses.add(line)
			slot := d.table.get(line, tags[i], d.slots)
			if slot < 0 {
				continue
			}
			s := &d.slots[slot]
			if s.flags()&pinned == 0 {
				d.evictable--
				d.evictor.pin(slot)
			}
			s.set(wanted)
		}
		lines = lines[n:]
	}
}

// Forget ends all announcements.
func (d *Queues) Forget() {
	for slot := range d.fresh {
		was := d.slots[slot].flags()
		d.slots[slot].unset(wanted)
		if was&pinned == wanted {
			d.evictable++
			d.evictor.unpin(slot)
		}
	}
	d.uses.clear()
	d.announced, d.ending = 0, false
}

// NextBatch begins a batch: lines that the last batch accessed may be evicted again.
func (d *Queues) NextBatch() {
	for _, slot := range d.batch {
		s := &d.slots[slot]
		s.unset(current)
		if s.flags()&wanted == 0 {
			d.evictable++
			d.evictor.unpin(slot)
		}
	}
	d.batch = d.batch[:0]
	d.began++
	d.ending = d.announced > 0
	if d.ending {
		d.announced--
	}
}

// Access answers for the lines of a part. No line of a part takes the slot of another.
func (d *Queues) Access(lines []int64, out []Answer) {
	out = out[:len(lines)]
	d.find(lines, out)
	d.stats.Accesses += int64(len(lines))
	for i, line := range lines {
		slot := out[i].Slot
		more := d.endUse(line)
		if slot < 0 {
			continue
		}
		d.stats.Hits++
		s := &d.slots[slot]
		was := s.flags()
		if was&pinned == 0 {
			d.evictable--
			d.evictor.pin(slot)
		}
		if was&current == 0 {
			d.evictor.hit(slot)
			d.batch = append(d.batch, slot)
		}
		s.set(current)
		if !more {
			s.unset(wanted)
		}
	}
	d.insert(lines, out)
}

// insert gives the lines that were not hit their slots, in order. The table's entries of a group
// are prefetched before its first line: their own, and those of the lines that are likely to go.
func (d *Queues) insert(lines []int64, out []Answer) {
	var (
		group [ahead]int32
		tags  [ahead]uint32
		going [ahead]int32
	)
	for next := 0; next < len(lines); {
		n, touched := 0, uint64(0)
		for ; next < len(lines) && n < ahead; next++ {
			if !out[next].Hit {
				group[n], tags[n] = int32(next), tag(lines[next])
				touched ^= d.table.entries[d.table.home(tags[n])]
				n++
			}
		}
		if evict := n - len(d.free) - (len(d.slots) - int(d.fresh)); evict > 0 && d.evictable > 0 {
			for _, slot := range going[:d.evictor.likely(going[:evict])] {
				touched ^= d.table.entries[d.table.home(tag(d.slots[slot].line()))]
			}
		}
		d.touched = touched
		for i, pos := range group[:n] {
			line := lines[pos]
			slot := d.slot()
			out[pos].Slot = slot
			if slot < 0 {
				d.stats.Bypassed++
				continue
			}
			d.stats.Inserted++
			flags := uint8(current)
			if d.uses.has(line) {
				flags |= wanted
			}
			d.slots[slot].hold(line, flags)
			d.table.put(tags[i], slot)
			d.evictor.insert(slot)
			d.batch = append(d.batch, slot)
		}
	}
}

// slot is a slot for a new line, -1 where all hold lines that must stay.
func (d *Queues) slot() int32 {
	if n := len(d.free); n > 0 {
		slot := d.free[n-1]
		d.free = d.free[:n-1]
		return slot
	}
	if int(d.fresh) < len(d.slots) {
		d.fresh++
		return d.fresh - 1
	}
	if d.evictable == 0 {
		return -1
	}
	slot := d.evictor.victim()
	d.evictable--
	d.stats.Evicted++
	d.table.del(tag(d.slots[slot].line()), slot)
	return slot
}

// endUse ends the current batch's announcement of a line, and reports whether a later batch
// announced it.
func (d *Queues) endUse(line int64) bool {
	if d.uses.n == 0 {
		return false
	}
	if d.ending {
		return d.uses.end(line, d.began)
	}
	return d.uses.has(line)
}

// Drop empties a slot whose filling failed. An empty one stays so.
func (d *Queues) Drop(slot int32) {
	s := &d.slots[slot]
	if s.line() == noLine {
		return
	}
	if s.flags()&pinned == 0 {
		d.evictable--
	}
	if s.flags()&current != 0 {
		// Its next line stands where it is inserted. Failures are rare.
		i := slices.Index(d.batch, slot)
		d.batch = slices.Delete(d.batch, i, i+1)
	}
	d.evictor.remove(slot)
	d.table.del(tag(s.line()), slot)
	s.hold(noLine, 0)
	d.free = append(d.free, slot)
}

// Find is a line's slot without an access, -1 for none.
func (d *Queues) Find(line int64) int32 { return d.table.get(line, tag(line), d.slots) }

// ahead is the number of lines whose places are prefetched at once.
const ahead = 64

// touch loads where up to ahead lines stand in the tables, all of them before any is looked at: a
// directory waits for memory most. It fills in the lines' tags.
func (d *Queues) touch(lines []int64, tags *[ahead]uint32) {
	touched := uint64(0)
	for i, line := range lines {
		tags[i] = tag(line)
		touched ^= d.table.entries[d.table.home(tags[i])]
	}
	if d.uses.n > 0 {
		for _, line := range lines {
			touched ^= uint64(d.uses.all[d.uses.home(line+1)].key)
		}
	}
	d.touched = touched
}

// find answers for many lines.
func (d *Queues) find(lines []int64, out []Answer) {
	var tags [ahead]uint32
	for len(lines) > 0 {
		n := min(len(lines), ahead)
		d.touch(lines[:n], &tags)
		for i, line := range lines[:n] {
			slot := d.table.get(line, tags[i], d.slots)
			out[i] = Answer{Slot: slot, Hit: slot >= 0}
		}
		lines, out = lines[n:], out[n:]
	}
}

// Line is the line that a slot holds, -1 for none.
func (d *Queues) Line(slot int32) int64 { return d.slots[slot].line() }

// Stats are the totals since New.
func (d *Queues) Stats() Stats { return d.stats }

// Bytes is the directory's memory.
func (d *Queues) Bytes() int64 {
	return d.table.bytes() + int64(cap(d.slots))*16 + int64(cap(d.free)+cap(d.batch))*4 +
		d.uses.bytes() + d.evictor.bytes()
}
