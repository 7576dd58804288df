package packed

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache/superbatch"
)

// BenchmarkBuild is on accesses like those of sampled mini-batches: 200 of 20,000 rows each, of 2
// million skewed ones, a twentieth of them in memory, in segments of 50.
func BenchmarkBuild(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 9))
	m := make(superbatch.Memory, 200)
	for i := range m {
		seen := map[int64]bool{}
		for len(m[i]) < 20000 {
			row := int64(2e6 * r.Float64() * r.Float64() * r.Float64())
			if !seen[row] {
				seen[row] = true
				m[i] = append(m[i], row)
			}
		}
	}
	for _, budget := range []int64{0, 2 << 30} {
		name := "once"
		if budget > 0 {
			name = "copies"
		}
		b.Run(name, func(b *testing.B) {
			var s Stats
			for b.Loop() {
				f := &file{}
				res, err := Build(b.Context(), m, Config{Rows: 2e6, RowBytes: 512, Hot: 1e5,
					Segment: 50, Budget: budget, Workers: 2}, f)
				require.NoError(b, err)
				s = res.Stats
			}
			b.ReportMetric(float64(s.Accesses)*float64(b.N)/b.Elapsed().Seconds()/1e6,
				"Maccesses/s")
		})
	}
}
