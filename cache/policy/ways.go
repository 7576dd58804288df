package policy

import (
	"bytes"
	"math/bits"
	"unsafe"

	"helios/internal/philox"
)

// The policies over one set. Words have 32 bits and a set 32 ways, so that a warp can work on one.

// order is a set's ways from the oldest to the newest.
func order(s []uint32, ways int) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[setOrder])), Ways)[:ways]
}

// newest moves the way at a place to the newest end.
func newest(order []byte, place int) {
	way := order[place]
	copy(order[place:], order[place+1:])
	order[len(order)-1] = way
}

// oldest is the first place whose way is in a mask that is not empty.
func oldest(order []byte, mask uint32) int {
	for place, way := range order {
		if mask>>way&1 != 0 {
			return place
		}
	}
	panic("policy: no way of the set may leave")
}

// seen is the ways that the current batch accessed.
func (d *Sets) seen(s []uint32) *uint32 {
	if s[setBatch] != d.batch {
		s[setBatch], s[setSeen] = d.batch, 0
	}
	return &s[setSeen]
}

// hit notes an access to a way; a batch does so once, and not where it brought the line in.
func (d *Sets) hit(s []uint32, ways, way int) {
	bit, seen := uint32(1)<<way, d.seen(s)
	if *seen&bit != 0 {
		return
	}
	*seen |= bit
	switch d.rule {
	case setLRU:
		o := order(s, ways)
		newest(o, bytes.IndexByte(o, byte(way)))
	case setClock, setSieve:
		s[setVisited] |= bit
	case setS3FIFO: // a count up to 3
		if s[setVisited]&s[setOften]&bit == 0 {
			s[setOften] ^= s[setVisited] & bit
			s[setVisited] ^= bit
		}
	}
}

// keepsBatch reports whether lines that the current batch has accessed stay until the next. A batch
// of more lines than the cache then leaves its first ones there, where else each line would drive
// out one that was not used again. Sieve and S3-FIFO need no such rule.
func (r setRule) keepsBatch() bool { return r == setRandom || r == setLRU || r == setClock }

// stay is the ways whose lines must not leave: those of the batch, under rules that keep them, and
// those that an announced batch will access, a later one or the current one, which has not yet.
func (d *Sets) stay(s []uint32, set uint64, ways int) (mask uint32) {
	if d.rule.keepsBatch() {
		mask = *d.seen(s)
	}
	if d.until == nil {
		return mask
	}
	var now uint32
	for way, until := range d.until[set*Ways:][:ways] {
		if until >= d.batch {
			mask |= 1 << way
			if until == d.batch {
				now |= 1 << way
			}
		}
	}
	if d.rule.keepsBatch() {
		return mask
	}
	return mask &^ (now & *d.seen(s))
}

// insert brings a line in that is not cached; ghost is where it was among the set's ghosts before
// the part, Ways for nowhere, and draw what random draws. It tells the way, -1 where all must stay,
// and whether another line left it.
func (d *Sets) insert(s []uint32, set uint64, ways int, line uint32, ghost uint8,
	draw uint64) (way int, evicts bool) {
	full := uint32(1<<ways - 1)
	if free := full &^ s[setHeld]; free != 0 {
		way = bits.TrailingZeros32(free)
		d.fill(s, ways, way)
	} else {
		may := full &^ d.stay(s, set, ways)
		if may == 0 {
			return -1, false
		}
		way, evicts = d.replace(s, ways, draw, may), true
	}
	bit := uint32(1) << way
	s[setTags+way] = line
	s[setHeld] |= bit
	s[setVisited] &^= bit
	*d.seen(s) |= bit
	if d.rule == setS3FIFO {
		s[setOften] &^= bit
		s[setMain] &^= bit
		// No part makes a ghost of a line that it has yet to bring in.
		if ghost < Ways && s[setGhosts+int(ghost)] == line {
			s[setGhosts+int(ghost)] = noTag
			s[setMain] |= bit
		}
	}
	if d.until != nil {
		until := d.window[mix(uint64(line))%windowShards].last(line)
		if until < d.batch { // the table still has it, or has let it go
			until = 0
		}
		d.until[set*Ways+uint64(way)] = until
	}
	return way, evicts
}

// fill puts an empty way at the newest end.
func (d *Sets) fill(s []uint32, ways, way int) {
	if d.rule != setLRU && d.rule != setSieve && d.rule != setS3FIFO {
		return
	}
	o := order(s, ways)
	place := bytes.IndexByte(o, byte(way))
	newest(o, place)
	if d.rule == setSieve && place < int(s[setHand]) {
		s[setHand]--
	}
}

// replace takes the line out that the policy gives up, one of may, which is not empty; all ways
// hold a line. The way stands at the newest end then.
func (d *Sets) replace(s []uint32, ways int, draw uint64, may uint32) int {
	switch d.rule {
	case setRandom:
		return nthBit(may, int(philox.Bounded(draw, uint64(bits.OnesCount32(may)))))
	case setLRU:
		o := order(s, ways)
		place := oldest(o, may)
		way := int(o[place])
		newest(o, place)
		return way
	case setClock:
		// The hand passes ways up to the first that may leave and was not accessed; if there is
		// none, it comes round once and then takes the first that may leave.
		hand := s[setHand]
		can := may &^ s[setVisited]
		if can == 0 {
			s[setVisited], can = 0, may
		}
		before, way := uint32(1)<<hand-1, 0
		if ahead := can &^ before; ahead != 0 {
			way = bits.TrailingZeros32(ahead)
			s[setVisited] &^= (1<<way - 1) &^ before
		} else { // behind the last way
			way = bits.TrailingZeros32(can)
			s[setVisited] &= before &^ (1<<way - 1)
		}
		if s[setHand] = uint32(way) + 1; way+1 == ways {
			s[setHand] = 0
		}
		return way
	case setSieve:
		o := order(s, ways)
		for place := int(s[setHand]); ; {
			way := int(o[place])
			bit := uint32(1) << way
			if (may&^s[setVisited])&bit != 0 {
				newest(o, place)
				if s[setHand] = uint32(place); place == ways-1 { // the new line is looked at last
					s[setHand] = 0
				}
				return way
			}
			s[setVisited] &^= bit
			if place++; place == ways {
				place = 0
			}
		}
	}
	return replaceS3FIFO(s, ways, may)
}

// nthBit is the place of the n-th bit, from 0, of a mask that has more. It does not branch: the
// place is random. Of four sums, of the bits up to the end of each byte, those up to n are counted:
// that many bytes are passed.
func nthBit(mask uint32, n int) (place int) {
	const ones, tops = 0x01010101, 0x80808080
	x := mask - mask>>1&0x55555555
	x = x&0x33333333 + x>>2&0x33333333
	sums := (x + x>>4) & 0x0f0f0f0f * ones
	passed := bits.OnesCount32(((uint32(n)*ones|tops)-sums)&tops) * 8
	n -= int(sums << 8 >> passed & 0xff)
	return passed + int(bitPlaces[mask>>passed&0xff][n&7])
}

// bitPlaces has the places of each byte's bits.
var bitPlaces = func() (t [256][8]uint8) {
	for b := range t {
		n := 0
		for place := range 8 {
			if b>>place&1 != 0 {
				t[b][n] = uint8(place)
				n++
			}
		}
	}
	return t
}()

// replaceS3FIFO looks at the small queue while it is at least a tenth of the set, else at the main
// one, and in both only at what may leave. The small queue gives a line that was accessed more
// than once to the main one, and a line that leaves to the ghosts; the main queue gives a line as
// many further rounds as it was accessed.
func replaceS3FIFO(s []uint32, ways int, may uint32) int {
	o, full := order(s, ways), uint32(1<<ways-1)
	target := max(1, ways/10)
	for {
		small, main := may&^s[setMain], may&s[setMain]
		if small != 0 && (bits.OnesCount32(full&^s[setMain]) >= target || main == 0) {
			place := oldest(o, small)
			way := int(o[place])
			bit := uint32(1) << way
			newest(o, place)
			if s[setOften]&bit == 0 {
				if ghosts := ways - target; ghosts > 0 {
					s[setGhosts+s[setHand]] = s[setTags+way]
					if s[setHand]++; s[setHand] == uint32(ghosts) {
						s[setHand] = 0
					}
				}
				return way
			}
			s[setMain] |= bit
			s[setOften] &^= bit
			s[setVisited] &^= bit
			continue
		}
		place := oldest(o, main)
		way := int(o[place])
		bit := uint32(1) << way
		newest(o, place)
		if (s[setOften]|s[setVisited])&bit == 0 {
			return way
		}
		s[setOften] &^= bit &^ s[setVisited] // 2 becomes 1
		s[setVisited] ^= bit
	}
}
