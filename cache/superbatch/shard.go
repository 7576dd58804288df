package superbatch

import "math/bits"

// shard is a worker's table of rows: each row's first access among the mini-batches seen so far. It
// has the rows of some hashes, or all from a number on.
type shard struct {
	rows    []place // nil: all has the rows
	from    int64   // of rows
	all     []entry
	n       int
	touched int64 // keeps meet's loads from being optimised away
}

type entry struct {
	key   int64 // row + 1; 0: none
	first place
}

// newShard makes a worker's table. Of so many accesses a sixteenth of the rows have room in it from
// the beginning: it is rarely too many, and most growing is spared.
func newShard(accesses int) *shard { return &shard{all: make([]entry, 1024+accesses/16)} }

// newRange makes the table of the rows from a number to end-1.
func newRange(from, end int64) *shard {
	s := &shard{from: from, rows: make([]place, end-from)}
	for i := range s.rows {
		s.rows[i].batch = none
	}
	return s
}

// meetRange is meet for a range of rows: nothing is searched.
func (s *shard) meetRange(rows []int64, batch uint32, next []place) {
	for i, row := range rows {
		if k := row - s.from; k >= 0 && k < int64(len(s.rows)) {
			next[i] = s.rows[k]
			if next[i].batch == none {
				s.n++
			}
			s.rows[k] = place{batch, uint32(i)}
		}
	}
}

// ahead is the number of rows whose entries are prefetched at once.
const ahead = 64

// meet notes that a mini-batch before all that were met accesses the shard's rows among these, and
// says when each is accessed next. Memory is what it waits for, so it loads where many rows stand
// before it looks at the first.
func (s *shard) meet(rows []int64, batch uint32, next []place, shard, shards int) {
	var (
		hashes [ahead]uint64
		places [ahead]int32
	)
	for first := 0; first < len(rows); {
		n := 0
		for ; first < len(rows) && n < ahead; first++ {
			h := hash(rows[first])
			if shards == 1 || shardOf(h, shards) == shard {
				hashes[n], places[n] = h, int32(first)
				n++
			}
		}
		for 3*(s.n+n) > 2*len(s.all) {
			s.grow()
		}
		touched := int64(0)
		for _, h := range hashes[:n] {
			touched ^= s.all[s.home(h)].key
		}
		s.touched = touched
		for i, h := range hashes[:n] {
			e := s.find(rows[places[i]], h)
			next[places[i]] = e.first
			e.first = place{batch, uint32(places[i])}
		}
	}
}

func hash(row int64) uint64 {
	h := uint64(row) * 0x9e3779b97f4a7c15
	h ^= h >> 32
	return h * 0xd6e8feb86659fd93
}

// shardOf uses the high bits of a hash, and shard.at what the product leaves below them.
func shardOf(h uint64, shards int) int {
	hi, _ := bits.Mul64(h, uint64(shards))
	return int(hi)
}

func (s *shard) home(h uint64) int {
	hi, _ := bits.Mul64(bits.RotateLeft64(h, 31), uint64(len(s.all)))
	return int(hi)
}

// at returns the entry of a row, made where there is none; there is room for it.
func (s *shard) find(row int64, h uint64) *entry {
	for i := s.home(h); ; {
		switch s.all[i].key {
		case row + 1:
			return &s.all[i]
		case 0:
			s.all[i] = entry{row + 1, place{batch: none}}
			s.n++
			return &s.all[i]
		}
		if i++; i == len(s.all) {
			i = 0
		}
	}
}

// get returns the first access of a row, a batch none where it has none.
func (s *shard) get(row int64, h uint64) place {
	for i := s.home(h); s.all[i].key != 0; {
		if s.all[i].key == row+1 {
			return s.all[i].first
		}
		if i++; i == len(s.all) {
			i = 0
		}
	}
	return place{batch: none}
}

func (s *shard) grow() {
	old := s.all
	s.all = make([]entry, 2*len(old))
	for _, e := range old {
		if e.key == 0 {
			continue
		}
		i := s.home(hash(e.key - 1))
		for s.all[i].key != 0 {
			if i++; i == len(s.all) {
				i = 0
			}
		}
		s.all[i] = e
	}
}

// bytes is the most that the table took: what it has, and where it has grown the half of that.
func (s *shard) bytes() int64 { return int64(len(s.rows))*8 + int64(len(s.all))*16*3/2 }
