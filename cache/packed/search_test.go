package packed

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

// The search reads at most a tenth more than the best length of all does, and knows beforehand what
// it takes, within a tenth.
func TestSearchIsNearTheBest(t *testing.T) {
	cases := 30
	if wide.Lean() {
		cases = 1
	}
	for seed := range uint64(cases) {
		r := rand.New(rand.NewPCG(7, seed))
		m := random(r, 24, 6000, 600)
		c := Config{Rows: 6000, RowBytes: 512, Hot: 200, Seed: seed, Workers: 2}
		c.Segment = len(m)
		_, least, _ := build(t, m, c)
		c.Segment = 1
		_, largest, _ := build(t, m, c)
		for _, share := range []float64{0.05, 0.3, 0.6, 0.9} {
			pages := least.Stats.Pages + int64(share*float64(largest.Stats.Pages-least.Stats.Pages))
			c.Budget = pages * least.Shape.PageBytes
			best := int64(-1)
			for c.Segment = 1; c.Segment <= len(m); c.Segment++ {
				f := &file{}
				res, err := Build(t.Context(), m, c, f)
				if err != nil {
					require.ErrorContains(t, err, "option disk-budget")
					continue
				}
				if n := res.Stats.ReadPages(); best < 0 || n < best {
					best = n
				}
			}
			c.Segment = 0
			p, res, _ := build(t, m, c)
			check(t, m, c, p)
			t.Logf("seed %d, %.2f: segment %d, reads %d, best %d (%.3f), estimate off by %.3f",
				seed, share, res.Found.Segment, res.Stats.ReadPages(), best,
				float64(res.Stats.ReadPages())/float64(best),
				float64(res.Found.ReadPages)/float64(res.Stats.ReadPages())-1)
			require.LessOrEqual(t, float64(res.Stats.ReadPages()), 1.1*float64(best))
			if res.Found.Retries == 0 {
				require.InEpsilon(t, res.Stats.Pages, res.Found.Pages, 0.1)
				require.InEpsilon(t, res.Stats.ReadPages(), res.Found.ReadPages, 0.1)
			}
		}
	}
}

// A budget of less than a page ends with what is needed at least.
func TestBudgetOfLessThanAPage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	m := random(rand.New(rand.NewPCG(7, 7)), 4, 200, 50)
	for _, segment := range []int{0, 2} {
		c := Config{Rows: 200, RowBytes: 512, Budget: 1, Segment: segment, Workers: 1}
		_, err := Build(ctx, m, c, &file{})
		require.Equal(t, errs.Usage, errs.ClassOf(err), "segment %d: %v", segment, err)
		require.ErrorContains(t, err, "option disk-budget is 1 B; give more of it")
	}
}
