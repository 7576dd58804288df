package simd

import (
	"unsafe"

	"helios/internal/philox"
)

//go:generate go -C ../../tools run ./simdgen/sample -out ../internal/simd/sample_amd64.s -stubs ../internal/simd/sample_amd64.go -pkg simd

// The loops of neighbour sampling on the host. A tile of destinations goes through them one after
// the other: SampleRows (where each one's neighbours stand), SampleDraw (which of them are taken,
// 16 destinations side by side), SamplePrefetch and SampleGather (their ids), SampleEnter or
// SampleEnterHash (ids to frontier indices in order of first appearance, by a table whose entries
// are prefetched). All but SampleRows' and SampleDraw's rare cases are free of branches that depend
// on data. Every level gives the same results.
//
// Prefetches go to the second-level cache, far ahead: misses there overlap more than those of the
// first level, and they bound the rate on large graphs.

const (
	// SampleGroup is the number of nodes whose draws stand side by side.
	SampleGroup = 16
	// SampleAhead is the number of elements, of any value, that must be readable behind the ids
	// that are entered.
	SampleAhead = 128
	// SampleMaxDraws bounds the draws of a node in SampleDraw: each is compared with all earlier
	// ones.
	SampleMaxDraws = 64
)

// SampleKeys is the key schedule of ten rounds.
func SampleKeys(key [2]uint32) (k [20]uint64) {
	for i := range 10 {
		k[2*i] = uint64(key[0] + uint32(i)*0x9E3779B9)
		k[2*i+1] = uint64(key[1] + uint32(i)*0xBB67AE85)
	}
	return k
}

// SampleRows writes where the rows of nodes[:n] begin in the indices and how long they are (an
// empty one begins at 0), and to local the running sum of min(length, k), n+1 numbers. Nodes behind
// n are only prefetched. It returns n, or the index of the first node that is out of range or has
// bad offsets.
func (l Level) SampleRows(nodes []int64, n int, indptr []int64, numEdges int64, k uint32,
	first []int64, deg, local []uint32) int {
	_, _, _, _ = nodes[:n], first[:n], deg[:n], local[:n+1]
	numNodes := uint64(len(indptr) - 1)
	if l.Resolve() >= AVX2 && n > 0 {
		return int(sampleRowsAsm(&nodes[0], uint64(n), uint64(len(nodes)), unsafe.SliceData(indptr),
			numNodes, uint64(numEdges), uint64(k),
			&first[0], &deg[0], &local[0]))
	}
	sum := uint32(0)
	for i, v := range nodes[:n] {
		local[i] = sum
		if uint64(v) >= numNodes {
			return i
		}
		f, e := uint64(indptr[v]), uint64(indptr[v+1])
		if e > uint64(numEdges) || f > e || (e-f)>>32 != 0 {
			return i
		}
		d := uint32(e - f)
		if d == 0 {
			f = 0
		}
		first[i], deg[i] = int64(f), d
		sum += min(d, k)
	}
	local[n] = sum
	return n
}

// SampleDraw fills out[i][node], i < k, for a group: by Floyd's algorithm with k draws where a
// node's degree is larger than k, and else with i, or the last neighbour where i is past it. Draw i
// of a node is half i&1 of Philox block i>>1 under counter (node, epoch, hop | block). out has k
// rows, rounded up to even; k is at most SampleMaxDraws.
func (l Level) SampleDraw(nodes *[SampleGroup]int64, deg *[SampleGroup]uint32, k int,
	keys *[20]uint64, epoch, hop uint32, out []uint32) {
	rows := (k + 1) &^ 1
	out = out[:rows*SampleGroup]
	if k < 1 || k > SampleMaxDraws {
		panic("simd: SampleDraw: number of draws out of range")
	}
	switch l.Resolve() {
	case AVX512:
		sampleDrawAVX512(&nodes[0], &deg[0], uint64(k), keys, uint64(epoch), uint64(hop), &out[0])
		return
	case AVX2:
		sampleDrawAVX2(&nodes[0], &deg[0], uint64(k), keys, uint64(epoch), uint64(hop), &out[0])
		sampleDrawAVX2(&nodes[8], &deg[8], uint64(k), keys, uint64(epoch), uint64(hop), &out[8])
		return
	}
	key := [2]uint32{uint32(keys[0]), uint32(keys[1])}
	for lane, v := range nodes {
		d := deg[lane]
		if d <= uint32(k) {
			for i := range k {
				out[i*SampleGroup+lane] = min(uint32(i), max(d, 1)-1)
			}
			continue
		}
		var w [4]uint32
		for i := range k {
			if i&1 == 0 {
				w = philox.Block(key, [4]uint32{uint32(v), uint32(uint64(v) >> 32), epoch,
					hop + uint32(i>>1)})
			}
			h := (i & 1) * 2
			j := d - uint32(k) + uint32(i)
			c := uint32(philox.Bounded(uint64(w[h+1])<<32|uint64(w[h]), uint64(j)+1))
			for p := range i {
				if out[p*SampleGroup+lane] == c {
					c = j
					break
				}
			}
			out[i*SampleGroup+lane] = c
		}
	}
}

// SamplePrefetch prefetches what SampleGather32 or, wide, SampleGather64 will read of the indices.
func (l Level) SamplePrefetch(first []int64, n, k int, draws []uint32, indices unsafe.Pointer,
	wide bool) {
	_, _ = first[:n], draws[:k*SampleGroup]
	if l.Resolve() < AVX2 || n == 0 {
		return
	}
	shift := uint64(2)
	if wide {
		shift = 3
	}
	samplePrefetchAsm(&first[0], uint64(n), uint64(k), &draws[0], (*byte)(indices), shift)
}

// SampleGather32 writes the ids of the draws of n nodes of a group to ids, one node after the
// other: min(deg, k) for each. It writes up to k more elements behind them, and returns how many
// ids it met that are no nodes.
func (l Level) SampleGather32(first []int64, deg []uint32, n, k int, draws, indices []uint32,
	numNodes int64, ids []uint32) int {
	_, _ = first[:n], deg[:n]
	if l.Resolve() >= AVX2 && n > 0 && len(indices) > 0 {
		return int(sampleGather32Asm(&first[0], &deg[0], uint64(n), uint64(k), &draws[0],
			(*byte)(unsafe.Pointer(&indices[0])), uint64(numNodes), &ids[0]))
	}
	return sampleGather(first, deg, n, k, draws, indices, numNodes, ids)
}

// SampleGather64 is SampleGather32 for indices of 64 bits; the graph has at most 2^32 nodes.
func (l Level) SampleGather64(first []int64, deg []uint32, n, k int, draws []uint32,
	indices []int64, numNodes int64, ids []uint32) int {
	_, _ = first[:n], deg[:n]
	if l.Resolve() >= AVX2 && n > 0 && len(indices) > 0 {
		return int(sampleGather64Asm(&first[0], &deg[0], uint64(n), uint64(k), &draws[0],
			(*byte)(unsafe.Pointer(&indices[0])), uint64(numNodes), &ids[0]))
	}
	return sampleGather(first, deg, n, k, draws, indices, numNodes, ids)
}

func sampleGather[T uint32 | int64](first []int64, deg []uint32, n, k int, draws []uint32,
	indices []T, numNodes int64, ids []uint32) (bad int) {
	found := 0
	for lane := range n {
		for i := range min(int(deg[lane]), k) {
			id := indices[first[lane]+int64(draws[i*SampleGroup+lane])]
			if uint64(id) >= uint64(numNodes) {
				bad++
			}
			ids[found] = uint32(id)
			found++
		}
	}
	return bad
}

// SampleEnter numbers ids[:n] in order of first appearance: src[i] is the number of ids[i], which
// is its entry in the table, stamp | number, or the next free one. New ids are appended to nodes,
// at next; nodes needs room for one more. stamp has the bits outside of mask; entries of other
// stamps count as none. It returns the next free number.
func (l Level) SampleEnter(ids []uint32, n int, table []uint32, stamp, mask uint32, nodes []int64,
	next int, src []uint32) int {
	if n == 0 {
		return next
	}
	_, _, _ = ids[:n+SampleAhead], src[:n], nodes[:next+1]
	if l.Resolve() >= AVX2 {
		return int(sampleEnterAsm(&ids[0], uint64(n), &table[0], stamp, mask, &nodes[0],
			uint64(next), &src[0]))
	}
	for i, id := range ids[:n] {
		x := table[id] ^ stamp
		if x > mask {
			x = uint32(next)
			nodes[next] = int64(id)
			table[id] = stamp | x
			next++
		}
		src[i] = x
	}
	return next
}

// SampleWarm prefetches the entries of ids in a table of SampleEnter.
func SampleWarm(l Level, ids, table []uint32) {
	if l.Resolve() >= AVX2 && len(ids) > 0 {
		sampleWarmAsm(&ids[0], uint64(len(ids)), &table[0])
	}
}

// SampleHash is a hash table of a power of two of slots with linear probing: an entry is stamp, id
// and number, packed. It must never be full.
type SampleHash struct {
	Table   []uint64
	Shift   uint64 // 64 - log2(slots)
	PosBits uint64 // of a number
	Stamp   uint64 // the bits above id and number
	Mask    uint64 // of the number
	Low     uint64 // of id and number
}

// SampleEnterHash is SampleEnter by a hash table.
func (l Level) SampleEnterHash(ids []uint32, n int, t *SampleHash, nodes []int64, next int,
	src []uint32) int {
	if n == 0 {
		return next
	}
	_, _, _ = ids[:n+SampleAhead], src[:n], nodes[:next+1]
	mask := uint64(len(t.Table) - 1)
	if l.Resolve() >= AVX2 {
		return int(sampleEnterHashAsm(&ids[0], uint64(n), &t.Table[0], mask, t.Shift, t.PosBits,
			t.Stamp, t.Mask, t.Low, &nodes[0], uint64(next), &src[0]))
	}
	for i, id := range ids[:n] {
		want := t.Stamp | uint64(id)<<t.PosBits
		h := (uint64(id) * sampleHash) >> t.Shift
		for {
			e := t.Table[h]
			if e^want <= t.Mask {
				src[i] = uint32(e ^ want)
				break
			}
			if e^t.Stamp > t.Low {
				t.Table[h] = want | uint64(next)
				nodes[next] = int64(id)
				src[i] = uint32(next)
				next++
				break
			}
			h = (h + 1) & mask
		}
	}
	return next
}

const sampleHash = 0x9E3779B97F4A7C15

// Put gives id the number pos unless it has one.
func (t *SampleHash) Put(id uint32, pos uint64) {
	want := t.Stamp | uint64(id)<<t.PosBits
	for h := (uint64(id) * sampleHash) >> t.Shift; ; h = (h + 1) & uint64(len(t.Table)-1) {
		e := t.Table[h]
		if e^want <= t.Mask {
			return
		}
		if e^t.Stamp > t.Low {
			t.Table[h] = want | pos
			return
		}
	}
}
