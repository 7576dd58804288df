package policy

import "math/bits"

// mix spreads line numbers, which come in runs and strides (the finaliser of splitmix64).
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// table finds a line's slot: open addressing with linear probes, at most 5/8 full. An entry is 32
// bits of the line's hash, which give its home and tell nearly all other lines from it, over 32
// bits of its slot + 1.
type table struct{ entries []uint64 }

func newTable(n int64) table { return table{make([]uint64, n+n*3/5+8)} }

func (t *table) home(hash uint32) int {
	hi, _ := bits.Mul64(uint64(hash)<<32, uint64(len(t.entries)))
	return int(hi)
}

// tag is a line's 32 bits of hash.
func tag(line int64) uint32 { return uint32(mix(uint64(line)) >> 32) }

func (t *table) get(line int64, hash uint32, slots []slot) int32 {
	for i := t.home(hash); ; {
		e := t.entries[i]
		if e == 0 {
			return -1
		}
		if uint32(e>>32) == hash {
			if slot := int32(uint32(e)) - 1; slots[slot].line() == line {
				return slot
			}
		}
		if i++; i == len(t.entries) {
			i = 0
		}
	}
}

// among is get where a slot is a place in lines.
func (t *table) among(line int64, lines []int64) int32 {
	hash := tag(line)
	for i := t.home(hash); t.entries[i] != 0; {
		if e := t.entries[i]; uint32(e>>32) == hash && lines[uint32(e)-1] == line {
			return int32(uint32(e)) - 1
		}
		if i++; i == len(t.entries) {
			i = 0
		}
	}
	return -1
}

func (t *table) put(hash uint32, slot int32) {
	i := t.home(hash)
	for t.entries[i] != 0 {
		if i++; i == len(t.entries) {
			i = 0
		}
	}
	t.entries[i] = uint64(hash)<<32 | uint64(uint32(slot+1))
}

// del takes a slot's entry out and moves later ones of the run up, so that no mark of it stays.
func (t *table) del(hash uint32, slot int32) {
	want := uint64(hash)<<32 | uint64(uint32(slot+1))
	n := len(t.entries)
	hole := t.home(hash)
	for t.entries[hole] != want {
		if t.entries[hole] == 0 {
			panic("policy: a cached line is not in the table")
		}
		if hole++; hole == n {
			hole = 0
		}
	}
	for i := hole; ; {
		if i++; i == n {
			i = 0
		}
		e := t.entries[i]
		if e == 0 {
			break
		}
		// e may move to the hole unless its home lies behind it: (hole, i], around the end.
		home := t.home(uint32(e >> 32))
		behind := hole < home && home <= i
		if i < hole {
			behind = hole < home || home <= i
		}
		if !behind {
			t.entries[hole] = e
			hole = i
		}
	}
	t.entries[hole] = 0
}

func (t *table) bytes() int64 { return int64(cap(t.entries)) * 8 }

// uses counts the announced batches that will access a line. It grows with the lines of a window.
type uses struct {
	all []use
	n   int
}

// use is a line's count and the batch that lowered it last: a batch does so once.
type use struct {
	key       int64 // line + 1; 0: none
	count, by uint32
}

func (u *uses) home(key int64) int {
	hi, _ := bits.Mul64(mix(uint64(key)), uint64(len(u.all)))
	return int(hi)
}

// at is a key's place, or the empty one where it would go.
func (u *uses) find(key int64) int {
	i := u.home(key)
	for u.all[i].key != 0 && u.all[i].key != key {
		if i++; i == len(u.all) {
			i = 0
		}
	}
	return i
}

func (u *uses) has(line int64) bool { return u.n > 0 && u.all[u.find(line+1)].key != 0 }

// reserve makes room for n more lines.
func (u *uses) reserve(n int) {
	if (u.n+n)*8 < len(u.all)*5 {
		return
	}
	old := u.all
	u.all = make([]use, max(256, 2*len(old)))
	for _, x := range old {
		if x.key != 0 {
			u.all[u.find(x.key)] = x
		}
	}
}

// add counts a batch for a line, for which there is room.
func (u *uses) add(line int64) {
	x := &u.all[u.find(line+1)]
	if x.key == 0 {
		*x = use{key: line + 1}
		u.n++
	}
	x.count++
}

// end lowers a line's count for a batch and reports whether another batch will access the line.
func (u *uses) end(line int64, batch uint32) bool {
	hole := u.find(line + 1)
	x := &u.all[hole]
	if x.key == 0 {
		return false
	}
	if x.by == batch {
		return true
	}
	if x.count > 1 {
		x.count--
		x.by = batch
		return true
	}
	u.n--
	n := len(u.all)
	for j := hole; ; {
		if j++; j == n {
			j = 0
		}
		if u.all[j].key == 0 {
			break
		}
		home := u.home(u.all[j].key)
		behind := hole < home && home <= j
		if j < hole {
			behind = hole < home || home <= j
		}
		if !behind {
			u.all[hole] = u.all[j]
			hole = j
		}
	}
	u.all[hole].key = 0
	return false
}

func (u *uses) clear() {
	clear(u.all)
	u.n = 0
}

func (u *uses) bytes() int64 { return int64(cap(u.all)) * 16 }
