package columns

import (
	"encoding/binary"
	"math"
	"math/bits"
	"unicode"
)

// murmur3 is MurmurHash3 for 32 bits with seed 0, which scikit-learn hashes texts with.
func murmur3(b []byte) uint32 {
	const c1, c2 = 0xcc9e2d51, 0x1b873593
	n := uint32(len(b))
	h := uint32(0)
	for ; len(b) >= 4; b = b[4:] {
		k := binary.LittleEndian.Uint32(b) * c1
		h ^= bits.RotateLeft32(k, 15) * c2
		h = bits.RotateLeft32(h, 13)*5 + 0xe6546b64
	}
	k := uint32(0)
	for i := len(b) - 1; i >= 0; i-- {
		k = k<<8 | uint32(b[i])
	}
	h ^= bits.RotateLeft32(k*c1, 15) * c2
	h ^= n
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	return h ^ h>>16
}

// bucket is the feature of a text among so many, as in scikit-learn's FeatureHasher.
func bucket(b []byte, size int) int {
	h := int32(murmur3(b))
	if h == math.MinInt32 {
		return (math.MaxInt32 - (size - 1)) % size
	}
	return max(int(h), -int(h)) % size
}

// countWords adds 1 to the bucket of each word of a text: two or more letters, digits or
// underscores, in lower case. tmp is for a word.
func countWords(dst []float64, t, tmp []byte) []byte {
	word, letters := tmp[:0], 0
	end := func() {
		if letters > 1 {
			dst[bucket(word, len(dst))]++
		}
		word, letters = word[:0], 0
	}
	for _, r := range text(t) {
		if r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r) {
			word, letters = append(word, string(unicode.ToLower(r))...), letters+1
			continue
		}
		end()
	}
	end()
	return word
}

// unit makes a vector's length 1, unless it is 0.
func unit(x []float64) {
	sum := 0.0
	for _, v := range x {
		sum += float64(v * v)
	}
	if sum == 0 {
		return
	}
	sum = math.Sqrt(sum)
	for i := range x {
		x[i] /= sum
	}
}
