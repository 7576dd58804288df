package induced

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkBuild induces a quarter of the parts of a random graph on one core: ns for an edge of
// what is loaded.
func BenchmarkBuild(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := random(b, rng, 64, 1<<19, 16, 64)
	parts, rows := w.load(rng, []int{3, 7, 8, 20, 21, 22, 30, 33, 40, 41, 48, 50, 51, 60, 61, 63},
		false)
	p, err := NewPlaces(w.n, rows, parts)
	require.NoError(b, err)
	static := w.lists(w.statics(), false)
	edges := static.edges()
	for i := range parts {
		edges += parts[i].edges()
	}
	for b.Loop() {
		t, err := Build(context.Background(), p, static, parts, 1)
		require.NoError(b, err)
		require.NoError(b, t.Close())
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(edges), "ns/edge")
}
