package policy

import (
	"math/bits"
	"sync"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/philox"
	"helios/internal/simd"
)

// Ways bounds the lines of a set of Sets: a lane of a warp for each.
const Ways = 32

// Sets is a directory whose lines belong to sets of up to Ways slots each: a line is in the set
// that its number's hash names, or nowhere. A policy rules over each set by itself. So sets are
// worked on at the same time, by as many workers as there are, and the answers do not depend on how
// many: within a set, the lines of a part are found first, and the misses then come in, in the
// order of the part. Nothing else is ordered. Draws are of the line's and the batch's numbers, not
// of a state.
//
// Under sieve and S3-FIFO a batch may evict lines that it has accessed, unlike in Queues: hits are
// copied before slots are filled, and a line that came in and left within one part was never in (a
// bypass). Lines that an announced batch will access, this one's own accesses to come included,
// stay.
type Sets struct {
	rule          setRule
	draws         [20]uint64 // simd.DrawKeys
	slots         uint64
	sets          uint64
	stride        int // words of a set
	words         []uint32
	until         []uint32 // by way: its line's last announced batch; nil before Announce
	window        [windowShards]windowShard
	batch         uint32 // number of the current batch
	lastAnnounced uint32 // of the last one that was announced
	workers       int
	level         simd.Level
	stats         Stats
	work          setWork
}

// setRule is a policy over one set. Kernels know it by its number.
type setRule uint8

const (
	noSetRule setRule = iota
	setRandom
	setLRU
	setClock
	setSieve
	setS3FIFO
)

// A set's words. Ways are bits of the masks. Clock's hand is a way, sieve's a place of the order;
// S3-FIFO has its next ghost's place there.
const (
	setBatch   = 0 // the batch that setSeen is of
	setSeen    = 1 // ways that it accessed
	setHeld    = 2 // ways with a line
	setVisited = 3 // accessed since the hand passed; S3-FIFO: its count's low bit
	setOften   = 4 // S3-FIFO: its count's high bit
	setMain    = 5 // S3-FIFO: in the main queue
	setHand    = 6
	setOrder   = 8  // a byte a place: the ways from the oldest to the newest
	setTags    = 16 // lines, noTag: none
	setGhosts  = 48 // S3-FIFO: lines that left the small queue, noTag: none
	setWords   = setGhosts
	noTag      = 1<<32 - 1
)

// MaxSetLine is the greatest number of a line that Sets can hold.
const MaxSetLine = noTag - 1

// SetLayout is the layout of Sets for kernels that keep them in a GPU's memory.
type SetLayout struct {
	Rule   uint32 // the policy's number
	Key    [2]uint32
	Sets   int64
	Stride int // words of a set
}

// LayOutSets checks c as New does, and lays its sets out.
func LayOutSets(c Config) (SetLayout, error) {
	p, err := c.check()
	if err != nil {
		return SetLayout{}, err
	}
	if c.Lines > MaxSetLine+1 {
		return SetLayout{}, errs.New(errs.Usage,
			"a set-associative directory over %d lines: it knows lines by 32 bits, so at most %d; use longer lines or the directory in %s",
			c.Lines, int64(MaxSetLine+1), InQueues)
	}
	l := SetLayout{Rule: uint32(p.set), Key: philox.Key(c.Seed, philox.StreamCache),
		Sets: (c.Slots + Ways - 1) / Ways, Stride: setWords}
	if p.set == setS3FIFO {
		l.Stride += Ways
	}
	return l, nil
}

func newSets(c Config) (*Sets, error) {
	l, err := LayOutSets(c)
	if err != nil {
		return nil, err
	}
	d := &Sets{rule: setRule(l.Rule), draws: simd.DrawKeys(l.Key), slots: uint64(c.Slots),
		sets: uint64(l.Sets), stride: l.Stride, batch: 1, lastAnnounced: 1, workers: c.Workers,
		level: simd.Best()}
	if d.workers <= 0 {
		d.workers = hostcpu.Count()
	}
	d.words = make([]uint32, d.sets*uint64(d.stride))
	for i := range d.sets {
		s := d.set(i)
		for j := setTags; j < len(s); j++ {
			s[j] = noTag
		}
		for j := range uint32(Ways / 4) {
			s[setOrder+j] = j*0x04040404 + 0x03020100
		}
	}
	return d, nil
}

func (d *Sets) set(i uint64) []uint32 {
	first := i * uint64(d.stride)
	return d.words[first : first+uint64(d.stride) : first+uint64(d.stride)]
}

// setOf is the set of a line.
func (d *Sets) setOf(line int64) uint64 {
	hi, _ := bits.Mul64(mix(uint64(line)), d.sets)
	return hi
}

// base is the first slot of a set, set·slots/sets: sizes differ by one at most. No product here is
// 2^32 or more.
func (d *Sets) base(set uint64) uint64 {
	short := d.sets*Ways - d.slots // sets that have a slot less
	return set*Ways - uint64(uint32(set*short+d.sets-1)/uint32(d.sets))
}

// span is base, and how many slots the set has, for one division.
func (d *Sets) span(set uint64) (base uint32, ways int) {
	short, sets := uint32(d.sets*Ways-d.slots), uint32(d.sets)
	x := uint32(set)*short + sets - 1
	before := x / sets
	ways = Ways
	if rest := x - before*sets + short; rest >= sets {
		ways -= int(rest / sets)
	}
	return uint32(set)*Ways - before, ways
}

// at is a slot's set and way.
func (d *Sets) wayOf(slot int32) (set uint64, way int) {
	set = ((uint64(slot)+1)*d.sets - 1) / d.slots
	return set, int(uint64(slot) - d.base(set))
}

// find is a line's way, or -1.
func (d *Sets) find(tags []uint32, tag uint32) int {
	if way := d.level.FindWay((*[Ways]uint32)(tags), tag); way < Ways {
		return int(way)
	}
	return -1
}

// Announce takes the lines of the next batch that was not announced yet, as Directory's does; a
// line may stand more than once.
func (d *Sets) Announce(lines []int64) {
	if d.slots == 0 {
		return
	}
	if d.until == nil {
		d.until = make([]uint32, d.sets*Ways)
	}
	d.lastAnnounced = max(d.lastAnnounced, d.batch) + 1
	d.work.partition(d, lines)
	d.work.each(d, func(_ *setWorker, _ uint64, entries []uint64) {
		for _, e := range entries {
			line := int64(e >> 32)
			hash := mix(uint64(line))
			set, _ := bits.Mul64(hash, d.sets)
			if way := d.find(d.set(set)[setTags:], uint32(line)); way >= 0 {
				d.until[set*Ways+uint64(way)] = d.lastAnnounced
			}
			d.window[hash%windowShards].note(uint32(line), d.lastAnnounced, d.batch)
		}
	})
}

// Forget ends all announcements.
func (d *Sets) Forget() {
	clear(d.until)
	for i := range d.window {
		d.window[i].clear()
	}
	d.lastAnnounced = d.batch
}

// NextBatch begins a batch.
func (d *Sets) NextBatch() { d.batch++ }

// Access answers for the lines of a part, each once, as Directory's does.
func (d *Sets) Access(lines []int64, out []Answer) { d.AccessEach(lines, out, nil) }

// AccessEach is Access where a line may stand more than once, and a number below 0 stands for no
// line. The answer stands at a line's first place, and of has that place for each place; it may be
// nil where no line stands twice. Places without a line are left alone.
func (d *Sets) AccessEach(lines []int64, out []Answer, of []uint32) {
	d.work.partition(d, lines)
	d.work.each(d, func(w *setWorker, first uint64, entries []uint64) {
		d.bucket(w, first, entries, of != nil)
	})
	d.work.answer(lines, out, of)
	for i := range d.work.workers {
		w := &d.work.workers[i]
		d.stats = d.stats.plus(w.stats)
		w.stats = Stats{}
	}
}

func (s Stats) plus(o Stats) Stats {
	return Stats{s.Accesses + o.Accesses, s.Hits + o.Hits, s.Inserted + o.Inserted,
		s.Evicted + o.Evicted, s.Bypassed + o.Bypassed}
}

// Drop empties a slot whose filling failed. An empty one stays so.
func (d *Sets) Drop(slot int32) {
	set, way := d.wayOf(slot)
	s, keep := d.set(set), ^(uint32(1) << way)
	for _, mask := range []int{setSeen, setHeld, setVisited, setOften, setMain} {
		s[mask] &= keep
	}
	s[setTags+way] = noTag
	if d.until != nil {
		d.until[set*Ways+uint64(way)] = 0
	}
}

// Find is a line's slot without an access, -1 for none.
func (d *Sets) Find(line int64) int32 {
	if d.slots == 0 {
		return -1
	}
	set := d.setOf(line)
	way := d.find(d.set(set)[setTags:], uint32(line))
	if way < 0 {
		return -1
	}
	return int32(d.base(set)) + int32(way)
}

// Line is the line that a slot holds, -1 for none.
func (d *Sets) Line(slot int32) int64 {
	set, way := d.wayOf(slot)
	if tag := d.set(set)[setTags+way]; tag != noTag {
		return int64(tag)
	}
	return noLine
}

// Stats are the totals since the directory was made.
func (d *Sets) Stats() Stats { return d.stats }

// Bytes is the directory's memory but for what a part takes while it is played: per cached line,
// and per line that a batch of the window announced.
func (d *Sets) Bytes() int64 {
	n := int64(cap(d.words)+cap(d.until)) * 4
	for i := range d.window {
		n += int64(cap(d.window[i].entries)) * 8
	}
	return n
}

// windowShards is a power of two. Workers meet in a shard: the low bits of a line's hash say its
// shard, and the high ones its bucket. So shards have a lock.
const windowShards = 64

// windowShard maps announced lines to the last batch that accesses them: open addressing with
// linear probes. An entry is line << 32 | batch; a batch that was is as good as empty when the
// table is made anew.
type windowShard struct {
	mu      sync.Mutex
	entries []uint64
	n       int
}

func (s *windowShard) find(line uint32) int {
	mask := len(s.entries) - 1
	i := int(line*0x9e3779b1>>7) & mask
	for s.entries[i] != 0 && uint32(s.entries[i]>>32) != line {
		i = (i + 1) & mask
	}
	return i
}

// note records that a batch accesses a line; now is the current batch.
func (s *windowShard) note(line, batch, now uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if (s.n+1)*2 > len(s.entries) {
		s.grow(now)
	}
	e := &s.entries[s.find(line)]
	if *e == 0 {
		s.n++
	}
	*e = uint64(line)<<32 | uint64(batch)
}

// grow makes the table anew, without what is over, at most a quarter full.
func (s *windowShard) grow(now uint32) {
	old, live := s.entries, 1
	for _, e := range old {
		if e != 0 && uint32(e) >= now {
			live++
		}
	}
	size := 64
	for size < 4*live {
		size *= 2
	}
	s.entries, s.n = make([]uint64, size), 0
	for _, e := range old {
		if e != 0 && uint32(e) >= now {
			s.entries[s.find(uint32(e>>32))] = e
			s.n++
		}
	}
}

// last is the last announced batch that accesses a line, 0 for none. Nothing is noted meanwhile.
func (s *windowShard) last(line uint32) uint32 {
	if s.n == 0 {
		return 0
	}
	return uint32(s.entries[s.find(line)])
}

func (s *windowShard) clear() {
	clear(s.entries)
	s.n = 0
}
