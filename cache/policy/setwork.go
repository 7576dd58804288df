package policy

import (
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"helios/internal/hostcpu"
	"helios/internal/simd"
)

// How a part is played on Sets. Its accesses are dealt out to buckets of neighbouring sets that fit
// a second-level cache; a worker takes a bucket and brings the accesses to each set together. So a
// set's number is found twice and its memory is asked for once a part, while groups of sets before
// it are played. Each access leaves its answer where it stood in its bucket, and a pass over the
// part, which reads buckets from front to back, brings the answers into the part's order.

// bucketBytes is about what the sets of a bucket take: less than a second-level cache.
const bucketBytes = 128 << 10

// groupSets is the number of sets with accesses that are played while those of the next group are
// prefetched.
const groupSets = 16

// perWorker is the number of lines that make another worker worth its start.
const perWorker = 4096

// An access is line << 32 | place in the part; once played it is an answer: a slot or noSlot,
// answerHit beside it, or answerAgain beside the place of the line's first access.
const (
	noSlot      = math.MaxInt32
	answerHit   = 1 << 32
	answerAgain = 1 << 33
)

// setWork deals a part's accesses to workers by buckets of neighbouring sets.
type setWork struct {
	shift   uint // of a set's number to its bucket
	buckets int
	places  []uint32 // where buckets begin, by chunk of the part
	ends    []uint32 // by bucket
	sets    []uint32 // by place in the part
	entryOf []uint32 // by place in the part: where in entries
	entries []uint64 // by bucket, stably
	workers []setWorker
	next    atomic.Int64
}

// setWorker is the memory of one worker: a bucket's accesses by set. places and some are zero
// between buckets.
type setWorker struct {
	stats      Stats
	places     []uint32 // by set within the bucket: how many accesses, then where the next goes
	some       []uint64 // a bit a set: it has accesses
	local      []uint32 // set within the bucket
	set, tag   []uint32
	from       []uint32 // in the bucket
	draw       []uint64 // random's, of the line and the batch
	way, ghost []uint8  // Ways: nowhere
	runs, lead []uint32 // where the accesses to a set begin; the set
	seen       []uint64 // of distinct: line + 1 << 32 | an access
	_          [64]byte
}

// run calls do for 0..n-1 at the same time.
func run(n int, do func(i int)) {
	if n == 1 {
		do(0)
		return
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			section := hostcpu.Begin()
			do(i)
			section.End(hostcpu.Lookups)
		})
	}
	wg.Wait()
}

// chunks is the number of pieces of a part.
func (k *setWork) chunks(d *Sets, lines int) int {
	n := min(max(lines/perWorker, 1), d.workers)
	if len(k.workers) < n {
		k.workers = append(k.workers, make([]setWorker, n-len(k.workers))...)
	}
	return n
}

// partition sorts a part's lines by bucket, stably.
func (k *setWork) partition(d *Sets, lines []int64) {
	n := k.chunks(d, len(lines))
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
		size := len(lines) + len(lines)/4
		k.entries = make([]uint64, size)
		k.sets, k.entryOf = make([]uint32, size), make([]uint32, size)
	}
	used := len(lines)
	k.entries, k.sets, k.entryOf = k.entries[:used], k.sets[:used], k.entryOf[:used]
	clear(k.places[:n*k.buckets])
	run(n, func(i int) {
		lo, hi := i*len(lines)/n, (i+1)*len(lines)/n
		places, sets := k.places[i*k.buckets:][:k.buckets], k.sets[lo:hi]
		for j, line := range lines[lo:hi] {
			if line >= 0 {
				set := d.setOf(line)
				sets[j] = uint32(set)
				places[set>>k.shift]++
			}
		}
	})
	next := uint32(0)
	for b := range k.buckets {
		for i := range n {
			c := &k.places[i*k.buckets+b]
			*c, next = next, next+*c
		}
		k.ends[b] = next
	}
	run(n, func(i int) {
		lo, hi := i*len(lines)/n, (i+1)*len(lines)/n
		places, sets, to := k.places[i*k.buckets:][:k.buckets], k.sets[lo:hi], k.entryOf[lo:hi]
		for j, line := range lines[lo:hi] {
			if line >= 0 {
				p := &places[sets[j]>>k.shift]
				k.entries[*p] = uint64(line)<<32 | uint64(lo+j)
				to[j] = *p
				*p++
			}
		}
	})
}

// each gives the buckets to workers, each bucket once, with the number of its first set.
func (k *setWork) each(d *Sets, do func(w *setWorker, first uint64, entries []uint64)) {
	k.next.Store(0)
	run(k.chunks(d, len(k.entries)), func(i int) {
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
				do(&k.workers[i], uint64(b)<<k.shift, k.entries[from:k.ends[b]])
			}
		}
	})
}

// answer brings the answers into the part's order.
func (k *setWork) answer(lines []int64, out []Answer, of []uint32) {
	n := min(max(len(lines)/perWorker, 1), len(k.workers))
	run(n, func(i int) {
		for j := i * len(lines) / n; j < (i+1)*len(lines)/n; j++ {
			if lines[j] < 0 {
				continue
			}
			e := k.entries[k.entryOf[j]]
			if of != nil {
				if of[j] = uint32(j); e&answerAgain != 0 {
					of[j] = uint32(e)
					continue
				}
			}
			slot := int32(uint32(e))
			if slot == noSlot {
				slot = -1
			}
			out[j] = Answer{Slot: slot, Hit: e&answerHit != 0}
		}
	})
}

// reserve makes room for a bucket of so many accesses to so many sets.
func (w *setWorker) reserve(accesses, sets int) {
	if len(w.places) < sets {
		w.places, w.some = make([]uint32, sets), make([]uint64, sets/64+1)
	}
	if len(w.local) < accesses {
		n := accesses + accesses/4
		for _, s := range []*[]uint32{&w.local, &w.set, &w.tag, &w.from, &w.lead} {
			*s = make([]uint32, n)
		}
		w.draw = make([]uint64, n)
		w.way, w.ghost, w.runs = make([]uint8, n), make([]uint8, n), make([]uint32, n+1)
	}
}

// bySet brings the accesses to each set together, in their order, and returns the number of sets:
// the accesses to set lead[r] are those from runs[r] up to runs[r+1]. Sets come in the order of
// their numbers, so that memory is met from front to back.
func (w *setWorker) bySet(d *Sets, first uint64, entries []uint64) (sets int) {
	local, places := w.local[:len(entries)], w.places
	for i, e := range entries {
		set := uint32(d.setOf(int64(e>>32)) - first)
		local[i] = set
		places[set]++
		w.some[set/64] |= 1 << (set % 64)
	}
	n := uint32(0)
	for i, some := range w.some {
		for ; some != 0; some &= some - 1 {
			set := uint32(i*64 + bits.TrailingZeros64(some))
			w.runs[sets], w.lead[sets] = n, uint32(first)+set
			places[set], n = n, n+places[set]
			sets++
		}
		w.some[i] = 0
	}
	w.runs[sets] = n
	of, tag, from := w.set[:len(entries)], w.tag[:len(entries)], w.from[:len(entries)]
	for i, set := range local {
		p := places[set]
		places[set]++
		of[p], tag[p], from[p] = uint32(first)+set, uint32(entries[i]>>32), uint32(i)
	}
	for _, set := range w.lead[:sets] {
		places[set-uint32(first)] = 0
	}
	return sets
}

// bucket plays the accesses to some neighbouring sets. With repeats a line may stand twice.
func (d *Sets) bucket(w *setWorker, first uint64, entries []uint64, repeats bool) {
	w.reserve(len(entries), 1<<d.work.shift)
	if d.slots == 0 {
		d.bypass(w, entries, repeats)
		return
	}
	words := simd.SetWords{Words: d.words, Stride: d.stride, Tags: setTags}
	ghosts := words
	ghosts.Tags = setGhosts
	sets := w.bySet(d, first, entries)
	d.level.PrefetchSets(words, w.lead[:min(groupSets, sets)])
	if d.rule == setRandom {
		n := w.runs[sets]
		simd.DrawTagged(d.level, &d.draws, w.tag[:n], d.batch, w.draw[:n])
	}
	for group := 0; group < sets; group += groupSets {
		end := min(group+groupSets, sets)
		d.level.PrefetchSets(words, w.lead[end:min(end+groupSets, sets)])
		lo, hi := w.runs[group], w.runs[end]
		d.level.FindWays(words, w.set[lo:hi], w.tag[lo:hi], w.way[lo:hi])
		if d.rule == setS3FIFO {
			d.level.FindWays(ghosts, w.set[lo:hi], w.tag[lo:hi], w.ghost[lo:hi])
		}
		for r := group; r < end; r++ {
			lo, hi := w.runs[r], w.runs[r+1]
			if repeats && anyTwice(w.tag[lo:hi]) {
				hi = lo + w.distinct(entries, lo, hi)
			}
			d.play(w, uint64(w.lead[r]), entries, lo, hi)
		}
	}
}

// play plays the accesses from lo up to hi, all to one set: what is cached was found, then the rest
// comes in, and then what left again within the part is told to be a bypass.
func (d *Sets) play(w *setWorker, set uint64, entries []uint64, lo, hi uint32) {
	from, tags, found, ghost := w.from[lo:hi], w.tag[lo:hi], w.way[lo:hi], w.ghost[lo:hi]
	draw := w.draw[lo:hi]
	s := d.set(set)
	base, ways := d.span(set)
	misses := uint32(0)
	for i, way := range found {
		if way == Ways {
			misses++
			continue
		}
		d.hit(s, ways, int(way))
		entries[from[i]] = uint64(base+uint32(way)) | answerHit
	}
	w.stats.Accesses += int64(len(found))
	w.stats.Hits += int64(len(found)) - int64(misses)
	if misses == 0 {
		return
	}
	for i, tag := range tags {
		if found[i] < Ways {
			continue
		}
		way, evicts := d.insert(s, set, ways, tag, ghost[i], draw[i])
		slot := uint32(noSlot)
		if way >= 0 {
			slot = base + uint32(way)
			w.stats.Inserted++
			if evicts {
				w.stats.Evicted++
			}
		} else {
			w.stats.Bypassed++
		}
		entries[from[i]] = uint64(slot)
	}
	if d.rule.keepsBatch() || misses == 1 { // what came in is there
		return
	}
	for i, tag := range tags {
		e := &entries[from[i]]
		if found[i] < Ways || *e == noSlot || s[setTags+uint32(*e)-base] == tag {
			continue
		}
		*e = noSlot
		w.stats.Inserted--
		w.stats.Evicted--
		w.stats.Bypassed++
	}
}

// bypass answers where there is no slot.
func (d *Sets) bypass(w *setWorker, entries []uint64, repeats bool) {
	n := uint32(len(entries))
	for i, e := range entries {
		w.from[i], w.tag[i] = uint32(i), uint32(e>>32)
	}
	if repeats {
		n = w.distinct(entries, 0, n)
	}
	for _, i := range w.from[:n] {
		entries[i] = noSlot
	}
	w.stats.Accesses += int64(n)
	w.stats.Bypassed += int64(n)
}

// fewAccesses are compared each with each.
const fewAccesses = 12

// anyTwice reports whether a tag may stand twice: it does, or there are too many to compare. It
// does not branch on tags.
func anyTwice(tags []uint32) bool {
	if len(tags) > fewAccesses {
		return true
	}
	equal := uint32(0) // the top bit: a difference was 0
	for i, a := range tags {
		for _, b := range tags[:i] {
			x := a ^ b
			equal |= (x - 1) &^ x
		}
	}
	return equal>>31 != 0
}

// distinct drops those of the accesses from lo up to hi whose lines stand before them, and returns
// the number of those left. Those dropped are answered.
func (w *setWorker) distinct(entries []uint64, lo, hi uint32) uint32 {
	from, tags, ways, ghosts := w.from[lo:hi], w.tag[lo:hi], w.way[lo:hi], w.ghost[lo:hi]
	draws := w.draw[lo:hi]
	size, n := 0, 0
	if len(tags) > fewAccesses {
		for size = 64; size < 2*len(tags); {
			size *= 2
		}
		if len(w.seen) < size {
			w.seen = make([]uint64, size)
		}
		clear(w.seen[:size])
	}
	for i, tag := range tags {
		first := n
		if size == 0 {
			for first = 0; first < n && tags[first] != tag; {
				first++
			}
		} else {
			shift, key := 32-uint(bits.TrailingZeros(uint(size))), uint64(tag)+1
			j := tag * 0x9e3779b1 >> shift
			for w.seen[j] != 0 && w.seen[j]>>32 != key {
				j = (j + 1) & uint32(size-1)
			}
			if w.seen[j] == 0 {
				w.seen[j] = key<<32 | uint64(n)
			}
			first = int(uint32(w.seen[j]))
		}
		if first < n {
			entries[from[i]] = answerAgain | uint64(uint32(entries[from[first]]))
			continue
		}
		from[n], tags[n], ways[n], ghosts[n] = from[i], tag, ways[i], ghosts[i]
		draws[n] = draws[i]
		n++
	}
	return uint32(n)
}
