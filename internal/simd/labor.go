package simd

import (
	"math/bits"
	"unsafe"

	"helios/internal/philox"
)

// LaborRoom is the number of elements, of any value, that LaborTake may write behind the ids that
// it takes.
const LaborRoom = 16

// LaborKeys makes the variates of layer-neighbour sampling (graph/labor.go): Mix(key + x), where x
// is the node times the golden ratio and the key the second one where Mix(Phase + x) is From or
// more. From 0: it never is.
type LaborKeys struct {
	Keys        [2]uint64
	Phase, From uint64
}

// LaborFrom is From where nodes have a hash below span, and turn + hash >= span the second key;
// turn < span.
func LaborFrom(span, turn uint32) uint64 {
	if turn == 0 {
		return 0
	}
	q, rest := bits.Div64(uint64(span-turn), 0, uint64(span))
	if rest > 0 {
		q++
	}
	return q
}

// Variate is the number of node t.
func (k *LaborKeys) Variate(t uint64) uint64 {
	x := t * sampleHash
	key := k.Keys[0]
	if k.From != 0 && philox.Mix(k.Phase+x) >= k.From {
		key = k.Keys[1]
	}
	return philox.Mix(key + x)
}

// LaborLargest keeps the largest id that was taken.
type LaborLargest [16]uint32

// In reports whether all ids were below numNodes, which is at most 2^32.
func (m *LaborLargest) In(numNodes int64, wide bool) bool {
	for i, v := range m {
		limit := uint64(numNodes)
		if wide && i&1 != 0 {
			limit = 1 // a high half
		}
		if uint64(v) >= max(limit, 1) {
			return false
		}
	}
	return true
}

// LaborTake32 copies the ids of list whose variates are at most limit to out, in their order, until
// out has no room for LaborRoom more. It returns how many ids it has looked at, and how many it
// took; the largest one goes into largest.
func (l Level) LaborTake32(list []uint32, k *LaborKeys, limit uint64, largest *LaborLargest,
	out []uint32) (done, taken int) {
	if len(list) == 0 {
		return 0, 0
	}
	base := (*byte)(unsafe.Pointer(&list[0]))
	if done, taken, ok := l.laborTake(base, len(list), 4, k, limit, largest, out); ok {
		return done, taken
	}
	return laborTake(list, k, limit, largest, out)
}

// LaborTake64 is LaborTake32 for ids of 64 bits, whose lower halves it copies.
func (l Level) LaborTake64(list []int64, k *LaborKeys, limit uint64, largest *LaborLargest,
	out []uint32) (done, taken int) {
	if len(list) == 0 {
		return 0, 0
	}
	base := (*byte)(unsafe.Pointer(&list[0]))
	if done, taken, ok := l.laborTake(base, len(list), 8, k, limit, largest, out); ok {
		return done, taken
	}
	return laborTake(list, k, limit, largest, out)
}

// laborTake runs the level's assembly, if it has any.
func (l Level) laborTake(list *byte, n, width int, k *LaborKeys, limit uint64,
	largest *LaborLargest, out []uint32) (done, taken int, ok bool) {
	if len(out) == 0 {
		return 0, 0, true
	}
	var d, t uint64
	keys, largestOut := (*[4]uint64)(unsafe.Pointer(k)), (*[16]uint32)(largest)
	room := uint64(len(out))
	switch level := l.Resolve(); {
	case level >= AVX512 && width == 4:
		d, t = laborTake32AVX512(list, uint64(n), keys, limit, largestOut, &out[0], room)
	case level >= AVX512:
		d, t = laborTake64AVX512(list, uint64(n), keys, limit, largestOut, &out[0], room)
	case level >= AVX2 && width == 4:
		d, t = laborTake32AVX2(list, uint64(n), keys, limit, largestOut, &out[0], room)
	case level >= AVX2:
		d, t = laborTake64AVX2(list, uint64(n), keys, limit, largestOut, &out[0], room)
	default:
		return 0, 0, false
	}
	return int(d), int(t), true
}

func laborTake[T uint32 | int64](list []T, k *LaborKeys, limit uint64, largest *LaborLargest,
	out []uint32) (done, taken int) {
	for i, id := range list {
		if taken > len(out)-LaborRoom {
			return i, taken
		}
		if k.Variate(uint64(id)) <= limit {
			out[taken] = uint32(id)
			largest[0] = max(largest[0], uint32(id))
			largest[1] = max(largest[1], uint32(uint64(id)>>32))
			taken++
		}
	}
	return len(list), taken
}

// LaborLeast32 is the least variate of a list that is not empty and none of whose is at most above.
// Scratch is for a few ids.
func (l Level) LaborLeast32(list []uint32, k *LaborKeys, above uint64, scratch []uint32) uint64 {
	return laborLeast(list, k, above, scratch, l.LaborTake32)
}

// LaborLeast64 is LaborLeast32 for ids of 64 bits.
func (l Level) LaborLeast64(list []int64, k *LaborKeys, above uint64, scratch []uint32) uint64 {
	return laborLeast(list, k, above, scratch, l.LaborTake64)
}

// laborLeast looks among those below a limit that rises until there are any.
func laborLeast[T uint32 | int64](list []T, k *LaborKeys, above uint64, scratch []uint32,
	take func([]T, *LaborKeys, uint64, *LaborLargest, []uint32) (int, int)) uint64 {
	least := ^uint64(0)
	for limit, found := above, false; !found; {
		limit |= limit<<2 | 3
		var largest LaborLargest
		for pos := 0; pos < len(list); {
			done, n := take(list[pos:], k, limit, &largest, scratch)
			pos += done
			for _, id := range scratch[:n] {
				least = min(least, k.Variate(uint64(id)))
				found = true
			}
		}
		if unsafe.Sizeof(T(0)) == 8 && !largest.In(1<<32, true) { // ids that are no nodes were cut
			least = ^uint64(0)
			for _, id := range list {
				least = min(least, k.Variate(uint64(id)))
			}
			break
		}
	}
	return least
}

var _ = [1]struct{}{}[unsafe.Sizeof(LaborKeys{})-32]
