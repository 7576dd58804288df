package build

import (
	"math/bits"
	"testing"

	"github.com/stretchr/testify/require"
)

// slowRMAT is the definition of edge number n, one level at a time: ranks, and how often it was
// drawn.
func slowRMAT(g *generator, n uint64, levels int) (src, dst uint64) {
	for try := uint32(0); ; try++ {
		src, dst = 0, 0
		var w [4]uint32
		for l := range levels {
			if l%8 == 0 {
				w = g.words(n, try<<8|uint32(l/8), genRMAT)
			}
			r := w[l%8/2] >> (16 * (l % 2)) & 0xffff
			src, dst = src<<1, dst<<1
			switch {
			case r < rmatA:
			case r < rmatB:
				dst |= 1
			case r < rmatC:
				src |= 1
			default:
				src, dst = src|1, dst|1
			}
		}
		if src < uint64(g.Nodes) && dst < uint64(g.Nodes) {
			return src, dst
		}
	}
}

// TestRMATBatch: edges drawn many at a time are those that the definition says.
func TestRMATBatch(t *testing.T) {
	for _, nodes := range []int64{1, 2, 3, 255, 257, 65537, 100_000_000, 1 << 30, 1e9,
		5_600_000_000, 1 << 40} {
		o := GenerateOptions{Kind: "rmat", Nodes: nodes, Classes: 1, Dim: 1, Seed: uint64(nodes)}
		g := newGenerator(o)
		levels := bits.Len64(uint64(nodes - 1))
		src, dst := make([]int64, 1500), make([]int64, 1500)
		var again []int32
		for _, first := range []int64{0, 1<<32 - 700} {
			g.rmatBatch(first, src, dst, &again)
			for i := range src {
				s, d := slowRMAT(g, uint64(first)+uint64(i), levels)
				require.Equal(t, g.id(int64(s)), src[i], "source of edge %d of %d nodes",
					first+int64(i), nodes)
				require.Equal(t, g.id(int64(d)), dst[i], "destination of edge %d of %d nodes",
					first+int64(i), nodes)
			}
		}
	}
}

func BenchmarkRMAT(b *testing.B) {
	g := newGenerator(GenerateOptions{Kind: "rmat", Nodes: 100_000_000, Classes: 1, Dim: 1,
		Seed: 1})
	src, dst := make([]int64, 8192), make([]int64, 8192)
	var again []int32
	n := int64(0)
	for b.Loop() {
		g.rmatBatch(n, src, dst, &again)
		n += 8192
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/edge")
}
