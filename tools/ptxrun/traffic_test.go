package ptxrun

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A load is waited for where its value is read, and neighbours' words share sectors.
func TestTraffic(t *testing.T) {
	for name, x := range map[string]struct {
		body           string
		trips          int64
		sectors, atoms int64
	}{
		"two loads at once": {"ld.global.u32 %r1, [%rd0]; ld.global.u32 %r2, [%o];\n" +
			"add.s32 %r1, %r1, %r2; st.global.u32 [%o], %r1; ret;", 1, 2 * (1 + 4 + 4), 0},
		"one after the other": {"ld.global.u32 %r1, [%o]; add.s32 %r1, %r1, 0;\n" +
			"ld.global.u32 %r2, [%o]; st.global.u32 [%o], %r2; ret;", 2, 2 * 12, 0},
		"nobody reads it": {"ld.global.u32 %r1, [%o]; mov.u32 %r1, 5;\n" +
			"st.global.u32 [%o], %r1; ret;", 1, 2 * 8, 0},
		"shared memory": {".shared .align 4 .b32 s; ld.shared.u32 %r1, [s];\n" +
			"add.s32 %r1, %r1, 1; ret;", 0, 0, 0},
		"an atomic, a reduction": {"atom.relaxed.gpu.global.add.u32 %r1, [%rd0], 1;\n" +
			"red.relaxed.gpu.global.add.u32 [%o], %r1; ret;", 1, 0, 2 * 64},
		"a barrier": {"setp.lt.u32 %p1, %l, 32; @!%p1 bra B;\n" +
			"ld.global.u32 %r1, [%o]; add.s32 %r1, %r1, 1;\n" +
			"B: bar.sync 0; ld.global.u32 %r2, [%o]; ret;", 2, 4 + 2*4, 0},
	} {
		t.Run(name, func(t *testing.T) {
			_, s, err := launchWords(t, begin+x.body, 64, Launch{Block: [3]int{64}, Traffic: true})
			require.NoError(t, err)
			require.Equal(t, Traffic{x.trips, 0, x.sectors, x.atoms}, s.Traffic)
			_, s, err = launchWords(t, begin+x.body, 64, Launch{Block: [3]int{64}})
			require.NoError(t, err)
			require.Zero(t, s.Traffic)
		})
	}
}
