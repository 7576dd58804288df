package philox

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Known answers from the authors' Random123 distribution (kat_vectors, philox4x32 10 rounds).
func TestKnownAnswers(t *testing.T) {
	require.Equal(t, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
		Block([2]uint32{}, [4]uint32{}))
	f := uint32(0xffffffff)
	require.Equal(t, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
		Block([2]uint32{f, f}, [4]uint32{f, f, f, f}))
	require.Equal(t, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
		Block([2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e,
			0x03707344}))
}

func TestBoundedStaysInRange(t *testing.T) {
	for n := uint64(1); n < 100; n++ {
		require.Less(t, Bounded(^uint64(0), n), n)
		require.Zero(t, Bounded(0, n))
	}
	require.Less(t, Float32(^uint32(0)), float32(1))
}
