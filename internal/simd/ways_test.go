package simd

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/philox"
)

// Every level finds the first way with a tag, and none where there is none; no level reads outside
// of the sets.
func TestFindWays(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, back := range []bool{false, true} {
		f := &fence{t: t, back: back, r: r}
		for _, stride := range []int{48, 80} {
			const sets, n = 7, 400
			s := SetWords{Words: guarded[uint32](f, sets*stride), Stride: stride,
				Tags: stride - SetWays}
			for i := range s.Words { // few tags, so that some stand twice and some nowhere
				s.Words[i] = r.Uint32N(60)
			}
			of, tags := f.numbers(n, sets), f.numbers(n, 60)
			tags[0], tags[1] = 1<<32-1, s.Words[s.Tags]
			var found, missed bool
			for _, l := range Levels() {
				out := guarded[uint8](f, n)
				l.PrefetchSets(s, of)
				l.FindWays(s, of, tags, out)
				for i, tag := range tags {
					set := s.Words[int(of[i])*stride+s.Tags:][:SetWays]
					want := slices.Index(set, tag)
					found, missed = found || want >= 0, missed || want < 0
					if want < 0 {
						want = SetWays
					}
					require.EqualValues(t, want, out[i], "%v: tag %d", l, tag)
					require.EqualValues(t, want, l.FindWay((*[SetWays]uint32)(set), tag))
				}
				require.Panics(t, func() {
					l.FindWays(s, []uint32{sets}, tags[:1], out)
				})
			}
			require.True(t, found && missed)
		}
	}
	for _, l := range Levels() {
		l.FindWays(SetWords{}, nil, nil, nil)
		l.PrefetchSets(SetWords{}, []uint32{1})
	}
}

// Every level draws what Philox does, for any number of tags, and writes nothing beside them.
func TestDrawTagged(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, back := range []bool{false, true} {
		f := &fence{t: t, back: back, r: r}
		for _, n := range []int{0, 1, 7, 8, 9, 16, 31, 200} {
			key, batch := [2]uint32{r.Uint32(), r.Uint32()}, r.Uint32()
			keys, tags := DrawKeys(key), guarded[uint32](f, n)
			for i := range tags {
				tags[i] = r.Uint32()
			}
			for _, l := range Levels() {
				out := guarded[uint64](f, n)
				DrawTagged(l, &keys, tags, batch, out)
				for i, tag := range tags {
					w := philox.Block(key, [4]uint32{tag, 0, batch, 0})
					require.Equal(t, uint64(w[1])<<32|uint64(w[0]), out[i], "%v: %d of %d", l, i,
						n)
				}
			}
		}
	}
}
