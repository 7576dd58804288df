package simd

import (
	"unsafe"

	"helios/internal/philox"
)

//go:generate go -C ../../tools run ./simdgen/ways -out ../internal/simd/ways_amd64.s -stubs ../internal/simd/ways_amd64.go -pkg simd

// SetWays is the number of tags in a set of SetWords.
const SetWays = 32

// SetWords are sets of Stride words that follow each other, each with SetWays tags from its word
// Tags on.
type SetWords struct {
	Words        []uint32
	Stride, Tags int
}

// waysArgs is the assembly's view of FindWays; gen/ways has the offsets.
type waysArgs struct {
	words      *uint32 // the first tag of set 0
	sets, tags *uint32
	out        *uint8
	n, stride  int64 // bytes
}

// setsArgs is that of PrefetchSets.
type setsArgs struct {
	words, sets *uint32
	n, stride   int64
}

// FindWays writes to out for each tag the way of its set that has it, or SetWays.
func (l Level) FindWays(s SetWords, sets, tags []uint32, out []uint8) {
	if len(tags) == 0 {
		return
	}
	sets, out = sets[:len(tags)], out[:len(tags)]
	if l < AVX2 {
		for i, tag := range tags {
			first := int(sets[i])*s.Stride + s.Tags
			out[i] = findWay((*[SetWays]uint32)(s.Words[first:]), tag)
		}
		return
	}
	last := uint32(0)
	for _, set := range sets {
		last = max(last, set)
	}
	_ = s.Words[int(last)*s.Stride+s.Tags+SetWays-1]
	a := waysArgs{&s.Words[s.Tags], &sets[0], &tags[0], &out[0], int64(len(tags)),
		int64(s.Stride) * 4}
	findWaysAVX2((*byte)(unsafe.Pointer(&a)))
}

// FindWay is FindWays of one tag.
func (l Level) FindWay(tags *[SetWays]uint32, tag uint32) uint8 {
	if l < AVX2 {
		return findWay(tags, tag)
	}
	var set uint32
	var way uint8
	a := waysArgs{&tags[0], &set, &tag, &way, 1, 0}
	findWaysAVX2((*byte)(unsafe.Pointer(&a)))
	return way
}

// findWay compares two tags at a time: what is zero where they are equal borrows from its top bit.
func findWay(tags *[SetWays]uint32, tag uint32) uint8 {
	const low, high = 1<<32 | 1, 1<<63 | 1<<31
	pairs := (*[SetWays / 2]uint64)(unsafe.Pointer(tags))
	both := uint64(tag)<<32 | uint64(tag)
	for i := 0; i < SetWays/2; i += 4 {
		a, b, c, d := pairs[i]^both, pairs[i+1]^both, pairs[i+2]^both, pairs[i+3]^both
		if ((a-low)&^a|(b-low)&^b|(c-low)&^c|(d-low)&^d)&high == 0 {
			continue
		}
		for way, t := range tags[2*i : 2*i+8] {
			if t == tag {
				return uint8(2*i + way)
			}
		}
	}
	return SetWays
}

// PrefetchSets asks memory for sets and does not wait. It does nothing at Generic.
func (l Level) PrefetchSets(s SetWords, sets []uint32) {
	if l < AVX2 || len(sets) == 0 || len(s.Words) == 0 {
		return
	}
	a := setsArgs{&s.Words[0], &sets[0], int64(len(sets)), int64(s.Stride) * 4}
	prefetchSets((*byte)(unsafe.Pointer(&a)))
}

// drawArgs is the assembly's view of DrawTagged.
type drawArgs struct {
	tags     *uint32
	out      *uint64
	keys     *[20]uint64
	n, batch int64
}

// DrawKeys has the keys of Philox's ten rounds, two a round.
func DrawKeys(key [2]uint32) (keys [20]uint64) {
	for i := range 10 {
		keys[2*i] = uint64(key[0] + uint32(i)*0x9E3779B9)
		keys[2*i+1] = uint64(key[1] + uint32(i)*0xBB67AE85)
	}
	return keys
}

// DrawTagged writes to out for each tag 64 random bits: the first two words of Philox4x32-10 under
// counter (tag, 0, batch, 0). keys are DrawKeys's.
func DrawTagged(l Level, keys *[20]uint64, tags []uint32, batch uint32, out []uint64) {
	out = out[:len(tags)]
	i := 0
	if l >= AVX2 && len(tags) >= 8 {
		i = len(tags) &^ 7
		a := drawArgs{&tags[0], &out[0], keys, int64(i), int64(batch)}
		drawTaggedAVX2((*byte)(unsafe.Pointer(&a)))
	}
	key := [2]uint32{uint32(keys[0]), uint32(keys[1])}
	for ; i < len(tags); i++ {
		w := philox.Block(key, [4]uint32{tags[i], 0, batch, 0})
		out[i] = uint64(w[1])<<32 | uint64(w[0])
	}
}
