package edges

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/bits"
	"slices"
	"sort"
	"unsafe"
)

// Edge points from src to dst: dst aggregates src.
type Edge struct{ Dst, Src uint64 }

func (a Edge) less(b Edge) bool { return a.Dst < b.Dst || a.Dst == b.Dst && a.Src < b.Src }

// next is the smallest edge after a.
func (a Edge) next() Edge {
	if a.Src++; a.Src == 0 {
		a.Dst++
	}
	return a
}

// lastEdge is beyond every edge: ids are below 2^63.
var lastEdge = Edge{1<<64 - 1, 1<<64 - 1}

// Edges are sorted as keys: dst<<32 | src in one word where ids fit 32 bits (narrow), else dst
// and src in two words (wide).
func narrowKey(e Edge) uint64 { return e.Dst<<32 | e.Src }

func edgeOf(k uint64) Edge { return Edge{k >> 32, k & (1<<32 - 1)} }

// pairs reads wide keys as edges.
func pairs(a []uint64) []Edge {
	if len(a) < 2 {
		return nil
	}
	return unsafe.Slice((*Edge)(unsafe.Pointer(&a[0])), len(a)/2)
}

// wordsOf is the number of words of a key.
func wordsOf(wide bool) int {
	if wide {
		return wideKeyWords
	}
	return 1
}

// firstOf returns the first of some keys.
func firstOf(keys []uint64, wide bool) Edge {
	if wide {
		return pairs(keys)[0]
	}
	return edgeOf(keys[0])
}

// crcTable is the polynomial of the checksums of groups and indexes.
var crcTable = crc32.MakeTable(crc32.Castagnoli)

const (
	msdBits  = 10      // buckets of a pass that goes from main memory into the cache
	lsdBits  = 11      // buckets of a pass within it
	cacheful = 1 << 17 // keys that a core's second-level cache holds with as many beside them
)

// sortKeys sorts narrow keys by radix; tmp is as long as a. Large ranges are first dealt by
// their top bits into parts that fit a cache, since a pass over main memory costs several
// passes within it.
func sortKeys(a, tmp []uint64) {
	if len(a) < 2 {
		return
	}
	or, and, last, sorted := uint64(0), ^uint64(0), uint64(0), true
	for _, k := range a {
		or |= k
		and &= k
		sorted = sorted && k >= last
		last = k
	}
	if !sorted {
		radix(a, tmp[:len(a)], or^and, bits.Len64(or^and), false)
	}
}

// radix sorts the keys of a, which differ only in the low n bits and there where vary is set;
// they end in b if over is set, else in a.
func radix(a, b []uint64, vary uint64, n int, over bool) {
	switch {
	case len(a) <= 32:
		insertionSort(a)
	case len(a) <= 192:
		slices.Sort(a)
	case len(a) > cacheful && n > msdBits:
		radixByTop(a, b, vary, n, over)
		return
	default:
		radixByDigits(a, b, vary, n, over)
		return
	}
	if over {
		copy(b, a)
	}
}

// radixByTop deals the keys out by their top bits and sorts each share.
func radixByTop(a, b []uint64, vary uint64, n int, over bool) {
	shift := n - msdBits
	var count [1<<msdBits + 1]int
	for _, k := range a {
		count[k>>shift&(1<<msdBits-1)+1]++
	}
	for i := 1; i < len(count); i++ {
		count[i] += count[i-1]
	}
	next := count
	for _, k := range a {
		d := k >> shift & (1<<msdBits - 1)
		b[next[d]] = k
		next[d]++
	}
	low := vary & (1<<shift - 1)
	for i := range 1 << msdBits {
		if from, to := count[i], count[i+1]; to > from {
			radix(b[from:to], a[from:to], low, bits.Len64(low), !over)
		}
	}
}

// radixByDigits sorts by digits, the least first.
func radixByDigits(a, b []uint64, vary uint64, n int, over bool) {
	home := true
	digit := lsdBits
	if len(a) < 1<<11 {
		digit = 8
	}
	var count [1 << lsdBits]uint32
	for shift := 0; shift < n; {
		shift += bits.TrailingZeros64(vary >> shift) // bits that all keys share cost no pass
		if shift >= n {
			break
		}
		mask := uint64(1)<<digit - 1
		c := count[:1<<digit]
		clear(c)
		for _, k := range a {
			c[k>>shift&mask]++
		}
		sum := uint32(0)
		for i, x := range c {
			c[i] = sum
			sum += x
		}
		b = b[:len(a)]
		for _, k := range a {
			d := k >> shift & mask
			b[c[d]] = k
			c[d]++
		}
		a, b = b, a
		home = !home
		shift += digit
	}
	if home == over { // on the wrong side
		copy(b, a)
	}
}

func insertionSort(a []uint64) {
	for i := 1; i < len(a); i++ {
		k := a[i]
		j := i
		for ; j > 0 && a[j-1] > k; j-- {
			a[j] = a[j-1]
		}
		a[j] = k
	}
}

// sortPairs sorts wide keys, least significant digit first, over only the bits that ids have.
func sortPairs(a, b []Edge) {
	home := a
	var any uint64
	for _, x := range a {
		any |= x.Dst | x.Src
	}
	for key := range 2 { // src first, then dst
		for shift := 0; shift < bits.Len64(any); shift += lsdBits {
			var count [1 << lsdBits]int
			word := func(x Edge) uint64 {
				if key == 1 {
					return x.Dst >> shift & (1<<lsdBits - 1)
				}
				return x.Src >> shift & (1<<lsdBits - 1)
			}
			for _, x := range a {
				count[word(x)]++
			}
			sum := 0
			for i, c := range count {
				count[i] = sum
				sum += c
			}
			b = b[:len(a)]
			for _, x := range a {
				d := word(x)
				b[count[d]] = x
				count[d]++
			}
			a, b = b, a
		}
	}
	if len(a) > 0 && &a[0] != &home[0] {
		copy(home, a)
	}
}

// sortAny sorts n keys of either width.
func sortAny(a, tmp []uint64, wide bool) {
	if wide {
		sortPairs(pairs(a), pairs(tmp))
	} else {
		sortKeys(a, tmp)
	}
}

// compactAny drops repeated keys of a sorted range.
func compactAny(a []uint64, wide bool) []uint64 {
	if wide {
		return a[:2*len(slices.Compact(pairs(a)))]
	}
	return slices.Compact(a)
}

// within cuts a sorted range of keys to lo <= key < hi.
func within(a []uint64, wide bool, lo, hi Edge) []uint64 {
	if wide {
		p := pairs(a)
		i := sort.Search(len(p), func(i int) bool { return !p[i].less(lo) })
		j := sort.Search(len(p), func(i int) bool { return !p[i].less(hi) })
		return a[2*i : 2*max(i, j)]
	}
	i := sort.Search(len(a), func(i int) bool { return !edgeOf(a[i]).less(lo) })
	j := sort.Search(len(a), func(i int) bool { return !edgeOf(a[i]).less(hi) })
	return a[i:max(i, j)]
}

// A run is stored in groups of keys that can be read apart:
//
//	payload bytes u32, CRC32C of the payload u32, payload
//	narrow payload: first key u64, then for each 64 keys: w u8, 64 differences to the key before of w bytes
//	wide payload: dst u64, src u64 of each key
const (
	groupHead = 8
	packKeys  = 64 // keys that share a width
	maxGroup  = 4096
	// groupRoom is more than a group of maxGroup keys takes, with what encode and decode touch
	// beyond.
	groupRoom = groupHead + 8 + maxGroup*16 + maxGroup/packKeys + 64
)

// encodeGroup puts a group into buf, which has groupRoom, and returns its length.
func encodeGroup(buf []byte, keys []uint64, wide bool) int {
	p := groupHead
	if wide {
		for _, k := range keys {
			binary.LittleEndian.PutUint64(buf[p:], k)
			p += 8
		}
	} else {
		binary.LittleEndian.PutUint64(buf[p:], keys[0])
		p += 8
		prev := keys[0]
		for len(keys) > 0 {
			part := keys[:min(packKeys, len(keys))]
			keys = keys[len(part):]
			var diff [packKeys]uint64
			var any uint64
			for i, k := range part {
				diff[i] = k - prev
				any |= diff[i]
				prev = k
			}
			w := (bits.Len64(any) + 7) / 8
			buf[p] = byte(w)
			p++
			for _, d := range diff[:len(part)] {
				binary.LittleEndian.PutUint64(buf[p:], d)
				p += w
			}
		}
	}
	binary.LittleEndian.PutUint32(buf, uint32(p-groupHead))
	binary.LittleEndian.PutUint32(buf[4:], crc32.Checksum(buf[groupHead:p], crcTable))
	return p
}

var errDamagedRun = errors.New("a sorted part of the edges is damaged")

// decodeGroup reads n keys from b, which holds the group and 8 bytes more, into dst and returns
// the group's length.
func decodeGroup(dst []uint64, b []byte, n int, wide bool) (int, error) {
	if len(b) < groupHead+8 {
		return 0, errDamagedRun
	}
	size := int(binary.LittleEndian.Uint32(b))
	if size < 8 || groupHead+size+8 > len(b) || crc32.Checksum(b[groupHead:groupHead+size],
		crcTable) != binary.LittleEndian.Uint32(b[4:]) {
		return 0, errDamagedRun
	}
	b = b[groupHead : groupHead+size+8]
	if wide {
		if size != 16*n {
			return 0, errDamagedRun
		}
		for i := range dst[:2*n] {
			dst[i] = binary.LittleEndian.Uint64(b[8*i:])
		}
		return groupHead + size, nil
	}
	k := binary.LittleEndian.Uint64(b)
	p := 8
	dst = dst[:n]
	for len(dst) > 0 {
		m := min(packKeys, len(dst))
		w := int(b[p])
		p++
		if w > 8 || p+m*w > size {
			return 0, errDamagedRun
		}
		mask := ^uint64(0) >> (64 - 8*w) // a shift by 64 gives 0
		for i := range dst[:m] {
			k += binary.LittleEndian.Uint64(b[p:]) & mask
			dst[i] = k
			p += w
		}
		dst = dst[m:]
	}
	if p != size {
		return 0, errDamagedRun
	}
	return groupHead + size, nil
}
