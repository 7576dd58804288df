// Package policy decides which lines a cache of a fixed number of slots holds: the online policies
// behind one interface, the offline optimum, and the directory that finds a line's slot. It knows no
// memory and no clock: equal accesses give equal answers, so a run and the replay of its trace agree
// to the last hit.
package policy

import (
	"math"
	"slices"
	"strings"

	"helios/internal/errs"
)

// The policies of a dynamic cache.
const (
	Random = "random" // BaM, GIDS
	LRU    = "lru"
	Clock  = "clock"
	Sieve  = "sieve"
	S3FIFO = "s3fifo"
	Belady = "belady" // MIN with bypass (Ginex): needs the future, so it is for replays
)

// Online lists the policies that need no knowledge of the future.
func Online() []string { return []string{Random, LRU, Clock, Sieve, S3FIFO} }

// Config is a directory's.
type Config struct {
	Policy string // one of Online
	Slots  int64  // lines that the cache holds, below 2^31
	Seed   uint64 // of Random's draws
}

// Answer says where an accessed line is.
type Answer struct {
	Slot int32 // of the line, or -1: it is not cached and stays so (bypass)
	Hit  bool  // the line was in the cache before the part; false with a slot: the caller fills the slot
}

// Stats are totals of a directory, in lines.
type Stats struct{ Accesses, Hits, Inserted, Evicted, Bypassed int64 }

// What keeps a cached line from being evicted, and what policies note of it.
const (
	current = 1 << iota // the current batch accessed it
	wanted              // a batch that was announced will access it
	parked              // the policy met it while it was pinned, and took it out of its queue
	visited             // Clock, Sieve
	inMain              // S3FIFO
	once                // S3FIFO: two bits of frequency, 0..3
	twice
)

const (
	pinned   = current | wanted
	freqMask = once | twice
)

// evictor is a policy: it orders the slots that hold a line. A slot is pinned when it is inserted. Every
// method takes O(1) time, victim amortised: what it steps over is paid for by an access or by a pin.
type evictor interface {
	insert(slot int32) // holds a new line
	hit(slot int32)    // was accessed; once a batch, and not in the batch that inserted it
	pin(slot int32)    // may not be evicted from now on
	unpin(slot int32)  // may be evicted
	victim() int32     // takes out a slot that is not pinned; there is one
	remove(slot int32) // is emptied
	bytes() int64
}

// Directory is what a cache of lines knows of them. Accesses come in batches: a line that the current
// batch has accessed is not evicted until NextBatch, nor is one that an announced batch will access
// (the window buffer of GIDS). What finds no slot then bypasses the cache. A batch is one moment for the
// policy: a line that two parts of a batch access was accessed once. It is not safe for concurrent use.
type Directory struct {
	table   table   // line -> slot
	lineOf  []int64 // by slot; -1: empty
	flags   []uint8 // by slot
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
}

// New makes the directory of an empty cache.
func New(c Config) (*Directory, error) {
	if c.Slots < 0 || c.Slots >= math.MaxInt32 {
		return nil, errs.New(errs.Usage, "a dynamic cache of %d lines: at least 0 and below 2^31 are possible; use larger lines or a smaller cache", c.Slots)
	}
	d := &Directory{
		table: newTable(c.Slots), lineOf: make([]int64, c.Slots), flags: make([]uint8, c.Slots),
	}
	for i := range d.lineOf {
		d.lineOf[i] = -1
	}
	switch c.Policy {
	case Random:
		d.evictor = newRandom(c.Slots, c.Seed)
	case LRU:
		d.evictor = newLRU(c.Slots)
	case Clock:
		d.evictor = newClock(d, c.Slots)
	case Sieve:
		d.evictor = newSieve(d, c.Slots)
	case S3FIFO:
		d.evictor = newS3FIFO(d, c.Slots)
	case Belady:
		return nil, errs.New(errs.Usage, "policy belady needs the future, which a run does not know: record a trace (train --trace FILE) and play it with \"heliosctl cache replay --policies belady\"; a run takes one of %s", strings.Join(Online(), ", "))
	default:
		return nil, errs.New(errs.Usage, "cache policy %q: use one of %s", c.Policy, strings.Join(Online(), ", "))
	}
	return d, nil
}

// Announce tells the lines, each once, of the next batch that was not announced yet; between batches, not
// between the parts of one. A batch that was announced must access exactly these lines, and its announcement
// ends line by line as it does. The current batch cannot be announced any more.
func (d *Directory) Announce(lines []int64) {
	d.announced++
	for _, line := range lines {
		d.uses.add(line)
		slot := d.Find(line)
		if slot < 0 {
			continue
		}
		if d.flags[slot]&pinned == 0 {
			d.evictable--
			d.evictor.pin(slot)
		}
		d.flags[slot] |= wanted
	}
}

// Forget ends all announcements: a pass that stops early will not make their accesses.
func (d *Directory) Forget() {
	for slot := range d.flags[:d.fresh] {
		was := d.flags[slot]
		d.flags[slot] = was &^ wanted
		if was&pinned == wanted {
			d.evictable++
			d.evictor.unpin(int32(slot))
		}
	}
	d.uses.clear()
	d.announced, d.ending = 0, false
}

// NextBatch begins a batch: what the last one accessed may be evicted again.
func (d *Directory) NextBatch() {
	for _, slot := range d.batch {
		d.flags[slot] &^= current
		if d.flags[slot]&wanted == 0 {
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

// Access answers for the lines of a part of the current batch; no line stands twice in a part. out has
// room for them. Lines that are cached are found before any is inserted, so no line of a part takes the
// slot of another; the misses then get their slots in order.
func (d *Directory) Access(lines []int64, out []Answer) {
	out = out[:len(lines)]
	for i, line := range lines {
		slot := d.Find(line)
		out[i] = Answer{Slot: slot, Hit: slot >= 0}
	}
	d.stats.Accesses += int64(len(lines))
	for i, line := range lines {
		slot := out[i].Slot
		more := d.endUse(line)
		if slot < 0 {
			continue
		}
		d.stats.Hits++
		was := d.flags[slot]
		if was&pinned == 0 {
			d.evictable--
			d.evictor.pin(slot)
		}
		if was&current == 0 {
			d.evictor.hit(slot)
			d.batch = append(d.batch, slot)
		}
		d.flags[slot] |= current
		if !more {
			d.flags[slot] &^= wanted
		}
	}
	for i, line := range lines {
		if out[i].Hit {
			continue
		}
		slot := d.slot()
		out[i].Slot = slot
		if slot < 0 {
			d.stats.Bypassed++
			continue
		}
		d.stats.Inserted++
		d.lineOf[slot], d.flags[slot] = line, current
		if d.uses.has(line) {
			d.flags[slot] |= wanted
		}
		d.table.put(line, slot)
		d.evictor.insert(slot)
		d.batch = append(d.batch, slot)
	}
}

// slot is a slot for a new line, -1 where all hold lines that must stay.
func (d *Directory) slot() int32 {
	if n := len(d.free); n > 0 {
		slot := d.free[n-1]
		d.free = d.free[:n-1]
		return slot
	}
	if int(d.fresh) < len(d.lineOf) {
		d.fresh++
		return d.fresh - 1
	}
	if d.evictable == 0 {
		return -1
	}
	slot := d.evictor.victim()
	d.evictable--
	d.stats.Evicted++
	d.table.del(d.lineOf[slot], slot)
	return slot
}

// endUse ends the current batch's announcement of a line, and says whether a later batch announced it.
func (d *Directory) endUse(line int64) bool {
	if d.uses.n == 0 {
		return false
	}
	if d.ending {
		return d.uses.end(line, d.began)
	}
	return d.uses.has(line)
}

// Drop empties a slot whose filling failed. An empty one stays so.
func (d *Directory) Drop(slot int32) {
	if d.lineOf[slot] < 0 {
		return
	}
	if d.flags[slot]&pinned == 0 {
		d.evictable--
	}
	if d.flags[slot]&current != 0 {
		// Its next line stands where it is inserted. Failures are rare.
		at := slices.Index(d.batch, slot)
		d.batch = slices.Delete(d.batch, at, at+1)
	}
	d.evictor.remove(slot)
	d.table.del(d.lineOf[slot], slot)
	d.lineOf[slot], d.flags[slot] = -1, 0
	d.free = append(d.free, slot)
}

// Find is a line's slot without an access, -1 for none.
func (d *Directory) Find(line int64) int32 { return d.table.get(line, d.lineOf) }

// Line is the line that a slot holds, -1 for none.
func (d *Directory) Line(slot int32) int64 { return d.lineOf[slot] }

// Stats are the totals since New.
func (d *Directory) Stats() Stats { return d.stats }

// Bytes is the directory's memory: per cached line, and per line that a batch of the window announced;
// never per row of the dataset.
func (d *Directory) Bytes() int64 {
	return d.table.bytes() + int64(cap(d.lineOf))*8 + int64(cap(d.flags)) + int64(cap(d.free)+cap(d.batch))*4 +
		d.uses.bytes() + d.evictor.bytes()
}
