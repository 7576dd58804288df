package policy

import (
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/philox"
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
// Under sieve and S3-FIFO what a batch has accessed may be evicted in it, unlike in Queues: hits
// are copied before slots are filled, and a line that came in and left within one part was never in
// (a bypass). What an announced batch will access, this one's own accesses to come included, stays.
type Sets struct {
	rule    setRule
	key     [2]uint32
	slots   uint64
	sets    uint64
	stride  int // words of a set
	words   []uint32
	until   []uint32 // by way: the last announced batch that accesses its line; nil before Announce
	window  [windowShards]windowShard
	batch   uint32 // number of the current batch
	told    uint32 // of the last one that was announced
	workers int
	stats   Stats
	work    setWork
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
	noTag      = math.MaxUint32
)

// MaxSetLine is the greatest number of a line that Sets can hold.
const MaxSetLine = noTag - 1

func newSets(c Config, rule setRule) (*Sets, error) {
	if c.Lines > MaxSetLine+1 {
		return nil, errs.New(errs.Usage,
			"a set-associative directory over %d lines: it knows lines by 32 bits, so at most %d; use longer lines or the directory in %s",
			c.Lines, int64(MaxSetLine+1), InQueues)
	}
	d := &Sets{rule: rule, key: philox.Key(c.Seed, philox.StreamCache), slots: uint64(c.Slots),
		sets: uint64(c.Slots+Ways-1) / Ways, stride: setWords, batch: 1, told: 1,
		workers: c.Workers}
	if d.workers <= 0 {
		d.workers = hostcpu.Count()
	}
	if rule == setS3FIFO {
		d.stride += Ways
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
	at := i * uint64(d.stride)
	return d.words[at : at+uint64(d.stride) : at+uint64(d.stride)]
}

// setOf is the set of a line.
func (d *Sets) setOf(line int64) uint64 {
	hi, _ := bits.Mul64(mix(uint64(line)), d.sets)
	return hi
}

// base is the first slot of a set: sizes differ by one at most.
func (d *Sets) base(set uint64) uint64 {
	if d.slots == d.sets*Ways {
		return set * Ways
	}
	return set * d.slots / d.sets
}

// ways counts the slots of a set.
func (d *Sets) ways(set uint64) int { return int(d.base(set+1) - d.base(set)) }

// at is a slot's set and way.
func (d *Sets) at(slot int32) (set uint64, way int) {
	set = ((uint64(slot)+1)*d.sets - 1) / d.slots
	return set, int(uint64(slot) - d.base(set))
}

// find is a line's way, or -1. Two tags are compared at a time: what is zero where they are equal
// borrows from its top bit.
func find(tags []uint32, tag uint32) int {
	const low, high = 1<<32 | 1, 1<<63 | 1<<31
	pairs := (*[Ways / 2]uint64)(unsafe.Pointer((*[Ways]uint32)(tags)))
	both := uint64(tag)<<32 | uint64(tag)
	for i := 0; i < Ways/2; i += 4 {
		a, b, c, d := pairs[i]^both, pairs[i+1]^both, pairs[i+2]^both, pairs[i+3]^both
		if ((a-low)&^a|(b-low)&^b|(c-low)&^c|(d-low)&^d)&high == 0 {
			continue
		}
		for way, t := range tags[2*i : 2*i+8] {
			if t == tag {
				return 2*i + way
			}
		}
	}
	return -1
}

// Announce tells the lines of the next batch that was not announced yet, as Directory's does; a
// line may stand more than once.
func (d *Sets) Announce(lines []int64) {
	if d.slots == 0 {
		return
	}
	if d.until == nil {
		d.until = make([]uint32, d.sets*Ways)
	}
	d.told = max(d.told, d.batch) + 1
	d.work.partition(d, lines)
	d.work.each(d, func(_ *setWorker, at []uint64) {
		for _, e := range at {
			line := int64(e >> 32)
			hash := mix(uint64(line))
			set, _ := bits.Mul64(hash, d.sets)
			if way := find(d.set(set)[setTags:], uint32(line)); way >= 0 {
				d.until[set*Ways+uint64(way)] = d.told
			}
			d.window[hash%windowShards].note(uint32(line), d.told, d.batch)
		}
	})
}

// Forget ends all announcements.
func (d *Sets) Forget() {
	clear(d.until)
	for i := range d.window {
		d.window[i].clear()
	}
	d.told = d.batch
}

// NextBatch begins a batch.
func (d *Sets) NextBatch() { d.batch++ }

// Access answers for the lines of a part, each once, as Directory's does.
func (d *Sets) Access(lines []int64, out []Answer) { d.AccessEach(lines, out, nil) }

// AccessEach is Access where a line may stand more than once, and a number below 0 stands for no
// line. The answer stands at a line's first place, and of tells for each place which that is; it
// may be nil where no line stands twice. Places without a line are left alone.
func (d *Sets) AccessEach(lines []int64, out []Answer, of []uint32) {
	d.work.partition(d, lines)
	var total Stats
	if d.slots == 0 {
		d.work.each(d, func(w *setWorker, at []uint64) {
			at = w.distinct(at, of)
			for _, e := range at {
				out[uint32(e)] = Answer{Slot: -1}
			}
			w.stats.Accesses += int64(len(at))
			w.stats.Bypassed += int64(len(at))
		})
	} else {
		d.work.each(d, func(w *setWorker, at []uint64) {
			d.bucket(w, w.distinct(at, of), out)
		})
	}
	for i := range d.work.workers {
		w := &d.work.workers[i]
		total = total.plus(w.stats)
		w.stats = Stats{}
	}
	d.stats = d.stats.plus(total)
}

func (s Stats) plus(o Stats) Stats {
	return Stats{s.Accesses + o.Accesses, s.Hits + o.Hits, s.Inserted + o.Inserted,
		s.Evicted + o.Evicted, s.Bypassed + o.Bypassed}
}

// bucket plays the accesses to some neighbouring sets: what is cached is found, then the rest comes
// in, and then what left again within the part is told to be a bypass.
func (d *Sets) bucket(w *setWorker, at []uint64, out []Answer) {
	w.stats.Accesses += int64(len(at))
	misses := at[:0]
	next := d.touch(w, at, 0)
	for k := 1; len(at) > 0; k++ {
		group, sets := at[:next], &w.sets[(k+1)%2]
		at = at[next:]
		next = d.touch(w, at, k%2)
		for i, e := range group {
			s := d.set(sets[i])
			way := find(s[setTags:], uint32(e>>32))
			if way < 0 {
				misses = append(misses, e)
				continue
			}
			d.hit(s, sets[i], way)
			out[uint32(e)] = Answer{Slot: int32(d.base(sets[i])) + int32(way), Hit: true}
			w.stats.Hits++
		}
	}
	for _, e := range misses {
		set := d.setOf(int64(e >> 32))
		slot := int32(-1)
		if way, evicts := d.insert(set, int64(e>>32)); way >= 0 {
			slot = int32(d.base(set)) + int32(way)
			w.stats.Inserted++
			if evicts {
				w.stats.Evicted++
			}
		} else {
			w.stats.Bypassed++
		}
		out[uint32(e)] = Answer{Slot: slot}
	}
	if d.rule.keepsBatch() { // what came in is there
		return
	}
	for _, e := range misses {
		a := &out[uint32(e)]
		if a.Slot < 0 {
			continue
		}
		set := d.setOf(int64(e >> 32))
		if d.set(set)[setTags+int(uint64(a.Slot)-d.base(set))] != uint32(e>>32) {
			a.Slot = -1
			w.stats.Inserted--
			w.stats.Evicted--
			w.stats.Bypassed++
		}
	}
}

// touch loads the sets of the accesses to come, all of them before any is looked at: memory is what
// a directory waits for. It says how many they are.
func (d *Sets) touch(w *setWorker, at []uint64, turn int) int {
	n := min(len(at), setsAhead)
	touched := w.touched
	for i, e := range at[:n] {
		set := d.setOf(int64(e >> 32))
		w.sets[turn][i] = set
		from := set * uint64(d.stride)
		touched ^= d.words[from] ^ d.words[from+16] ^ d.words[from+32]
	}
	w.touched = touched
	return n
}

// Drop empties a slot whose filling failed. An empty one stays so.
func (d *Sets) Drop(slot int32) {
	set, way := d.at(slot)
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
	way := find(d.set(set)[setTags:], uint32(line))
	if way < 0 {
		return -1
	}
	return int32(d.base(set)) + int32(way)
}

// Line is the line that a slot holds, -1 for none.
func (d *Sets) Line(slot int32) int64 {
	set, way := d.at(slot)
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

// setsAhead is how many sets are asked for before the first of them is looked at.
const setsAhead = 16

// bucketBytes is about what the sets of a bucket take: less than a second-level cache.
const bucketBytes = 256 << 10

// setWork deals a part's accesses to workers by buckets of neighbouring sets.
type setWork struct {
	shift   uint // of a set's number to its bucket
	buckets int
	places  []uint32 // where buckets begin, by chunk of the part
	ends    []uint32 // by bucket
	entries []uint64 // line << 32 | place in the part
	workers []setWorker
	next    atomic.Int64
}

// setWorker is what one worker has.
type setWorker struct {
	stats   Stats
	seen    []uint64             // of distinct: line + 1 << 32 | its first place
	sets    [2][setsAhead]uint64 // of a group of accesses and of the next
	touched uint32
	_       [64]byte
}

// perWorker is how many lines make another worker worth its start.
const perWorker = 4096

// run calls do for 0..n-1 at the same time.
func run(n int, do func(i int)) {
	if n == 1 {
		do(0)
		return
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { do(i) })
	}
	wg.Wait()
}

// partition sorts a part's lines by bucket, stably.
func (k *setWork) partition(d *Sets, lines []int64) {
	n := min(max(len(lines)/perWorker, 1), d.workers)
	if len(k.workers) < n {
		k.workers = append(k.workers, make([]setWorker, n-len(k.workers))...)
	}
	k.shift = 0
	for bucketBytes>>(k.shift+1) > d.stride*4 && d.sets>>k.shift > uint64(4*n) {
		k.shift++
	}
	k.buckets = int(d.sets>>k.shift) + 1
	if need := n * k.buckets; len(k.places) < need {
		k.places = make([]uint32, need)
	}
	if len(k.ends) < k.buckets {
		k.ends = make([]uint32, k.buckets)
	}
	if cap(k.entries) < len(lines) {
		k.entries = make([]uint64, len(lines)+len(lines)/4)
	}
	k.entries = k.entries[:len(lines)]
	clear(k.places[:n*k.buckets])
	chunk := func(i int) (part []int64, first int, places []uint32) {
		lo, hi := i*len(lines)/n, (i+1)*len(lines)/n
		return lines[lo:hi], lo, k.places[i*k.buckets:][:k.buckets]
	}
	run(n, func(i int) {
		part, _, places := chunk(i)
		for _, line := range part {
			if line >= 0 {
				places[d.setOf(line)>>k.shift]++
			}
		}
	})
	at := uint32(0)
	for b := range k.buckets {
		for i := range n {
			c := &k.places[i*k.buckets+b]
			*c, at = at, at+*c
		}
		k.ends[b] = at
	}
	run(n, func(i int) {
		part, first, places := chunk(i)
		for j, line := range part {
			if line >= 0 {
				p := &places[d.setOf(line)>>k.shift]
				k.entries[*p] = uint64(line)<<32 | uint64(first+j)
				*p++
			}
		}
	})
}

// each gives the buckets to workers, each bucket once.
func (k *setWork) each(d *Sets, do func(w *setWorker, at []uint64)) {
	k.next.Store(0)
	n := min(max(len(k.entries)/perWorker, 1), d.workers)
	run(n, func(i int) {
		for {
			b := int(k.next.Add(1)) - 1
			if b >= k.buckets {
				return
			}
			from := uint32(0)
			if b > 0 {
				from = k.ends[b-1]
			}
			if from < k.ends[b] {
				do(&k.workers[i], k.entries[from:k.ends[b]])
			}
		}
	})
}

// distinct drops accesses to lines that stand before them, and tells of all where the first is.
func (w *setWorker) distinct(at []uint64, of []uint32) []uint64 {
	if of == nil {
		return at
	}
	size := 64
	for size < 2*len(at) {
		size *= 2
	}
	if len(w.seen) < size {
		w.seen = make([]uint64, size)
	}
	seen, shift := w.seen[:size], 32-uint(bits.TrailingZeros(uint(size)))
	clear(seen)
	out := at[:0]
	for _, e := range at {
		key := e>>32 + 1
		i := uint32(key) * 0x9e3779b1 >> shift
		for seen[i] != 0 && seen[i]>>32 != key {
			i = (i + 1) & uint32(size-1)
		}
		if seen[i] == 0 {
			seen[i] = key<<32 | e&math.MaxUint32
			out = append(out, e)
		}
		of[uint32(e)] = uint32(seen[i])
	}
	return out
}

// windowShards is a power of two. Workers meet in a shard: the low bits of a line's hash say its
// shard, and the high ones its bucket. So shards have a lock.
const windowShards = 64

// windowShard tells of announced lines the last batch that accesses them: open addressing with
// linear probes. An entry is line << 32 | batch; a batch that was is as good as empty when the
// table is made anew.
type windowShard struct {
	mu      sync.Mutex
	entries []uint64
	n       int
}

func (s *windowShard) at(line uint32) int {
	mask := len(s.entries) - 1
	i := int(line*0x9e3779b1>>7) & mask
	for s.entries[i] != 0 && uint32(s.entries[i]>>32) != line {
		i = (i + 1) & mask
	}
	return i
}

// note says that a batch accesses a line; now is the current batch.
func (s *windowShard) note(line, batch, now uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if (s.n+1)*2 > len(s.entries) {
		s.grow(now)
	}
	e := &s.entries[s.at(line)]
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
			s.entries[s.at(uint32(e>>32))] = e
			s.n++
		}
	}
}

// last is the last announced batch that accesses a line, 0 for none. Nothing is noted meanwhile.
func (s *windowShard) last(line uint32) uint32 {
	if s.n == 0 {
		return 0
	}
	return uint32(s.entries[s.at(line)])
}

func (s *windowShard) clear() {
	clear(s.entries)
	s.n = 0
}
