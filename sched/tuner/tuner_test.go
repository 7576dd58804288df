package tuner

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/report"
)

// A value is taken when it is better by more than noise, and only then.
func TestTuneChoice(t *testing.T) {
	for _, c := range []struct {
		times []float64 // of the values; the second is the present one
		noise float64   // of its second time
		want  int
	}{
		{[]float64{2, 1, 0.9}, 0, 2},
		{[]float64{0.98, 1, 0.985}, 0, 1},
		{[]float64{0.5, 1, 0.6}, 0, 0},
		{[]float64{2, 1, 3}, 0, 1},
		{[]float64{2, 1, 0.9}, 0.2, 1}, // its own times differ by more
		{[]float64{2, 1, 0.5}, 0.2, 2},
	} {
		for rounds := 1; rounds <= 2; rounds++ {
			var at int
			var sets []int
			k := Knob{Name: "x", Values: []string{"a", "b", "c"}, Now: 1,
				Set: func(_ context.Context, i int) error {
					at = i
					sets = append(sets, i)
					return nil
				}}
			tn := &Tuner{Note: func(string, ...any) {}, res: &report.TuneResult{},
				level: rounds, each: 2}
			measured := map[int]int{}
			tn.Train = func(_ context.Context, n int) (float64, error) {
				measured[at]++
				took := c.times[at]
				if at == 1 && measured[1]%2 == 0 {
					took += c.noise
				}
				return took * float64(n), nil
			}
			require.NoError(t, tn.choose(context.Background(), &k))
			require.Equal(t, c.want, k.Now, fmt.Sprint(c))
			require.Equal(t, c.want, at, "the engine is left with it")
			require.Equal(t, map[int]int{0: rounds, 1: 2 * rounds, 2: rounds}, measured)
			require.Equal(t, 1, sets[0], "the present value comes first")
		}
	}
}
