package policy

import (
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The n-th bit of a mask is where counting from the least finds it.
func TestNthBit(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	masks := []uint32{1, 1 << 31, 1<<32 - 1, 0xff00, 0x80808080}
	for range 2000 {
		masks = append(masks, r.Uint32(), r.Uint32()&r.Uint32()&r.Uint32())
	}
	for _, mask := range masks {
		n := 0
		for left := mask; left != 0; left &= left - 1 {
			require.Equal(t, bits.TrailingZeros32(left), nthBit(mask, n), "bit %d of %08x", n, mask)
			n++
		}
	}
}

// A set's span is from its first slot to the next set's.
func TestSpan(t *testing.T) {
	for _, slots := range []int64{1, 31, 32, 33, 63, 64, 65, 1000, 1023, 99_991, 1 << 20} {
		d, err := newSets(Config{Policy: "lru", Slots: slots, Lines: 1 << 30})
		require.NoError(t, err)
		for set := uint64(0); set < d.sets; set += 1 + d.sets/100 {
			base, ways := d.span(set)
			require.EqualValues(t, d.base(set), base, "set %d of %d slots", set, slots)
			require.EqualValues(t, d.base(set+1)-d.base(set), ways, "set %d of %d slots", set, slots)
		}
	}
}

// Equal tags are seen at any two places.
func TestAnyTwice(t *testing.T) {
	for n := range fewAccesses + 1 {
		tags := make([]uint32, n)
		for i := range tags {
			tags[i] = uint32(i) * 0x40000001
		}
		require.False(t, anyTwice(tags))
		for i := range tags {
			for j := range i {
				was := tags[i]
				tags[i] = tags[j]
				require.True(t, anyTwice(tags))
				tags[i] = was
			}
		}
	}
	require.True(t, anyTwice(make([]uint32, fewAccesses+1)))
}
