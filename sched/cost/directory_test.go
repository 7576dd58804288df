package cost

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cache"
	"helios/cache/policy"
	"helios/gnn"
	"helios/internal/hardware"
	"helios/internal/rowtype"
	"helios/sched/plan"
)

// A directory that the GPU keeps is no slower by the row where more of them are looked up, waits
// for memory only some hundred times in turn, and is slower with few SMs. With -v the test
// prints BENCHMARKS.md's table: 10 M cached lines, 10 % hits, lines of one row.
func TestDirectoryTime(t *testing.T) {
	var table strings.Builder
	for _, name := range []string{"a100-p5510x12", "h100-pm1753x16"} {
		p, err := hardware.Load(name)
		require.NoError(t, err)
		g := &p.GPU
		for _, rule := range policy.Online() {
			for _, window := range []bool{false, true} {
				fmt.Fprintf(&table, "\n| %s | %s | %v |", name, rule, window)
				last, trips, launches := 0.0, 0.0, 0
				for _, rows := range []int64{1_000, 10_000, 100_000, 1_000_000} {
					w := NewKernels(&g.Ops,
						plan.Config{ModelSettings: gnn.ModelSettings{Model: "sage"},
							Fanouts: []int{1}}, 128,
						rowtype.Float32, 2, false, nil)
					w.Directory = &cache.GPUSets{Policy: rule, Sets: 312_500, SSDs: 12,
						Window: window, SMs: int64(g.SMs.Int())}
					part := &Part{Count: rows, Lines: rows, Missed: rows * 9 / 10}
					k := w.Admit(part)
					took := func(sms int) float64 {
						ns := g.OpLaunchNS.Value + g.TeardownNS.Value +
							float64(len(k)-1)*g.GapNS.Value
						for _, x := range k {
							ns += float64(g.KernelNS(*x.Op, x.Work, sms))
						}
						return ns
					}
					trips, launches = 0, len(k)
					for _, x := range k {
						trips += x.Work.Trips
					}
					rate := float64(rows) / took(0) * 1e3
					fmt.Fprintf(&table, " %.0f M, %.0f us, %.0f trips, %d launches |", rate,
						took(0)/1e3, trips, launches)
					require.Greater(t, rate, last)
					require.Less(t, trips, 2500.0)
					if rows >= 100_000 {
						require.Greater(t, took(4), 2*took(0))
					}
					last = rate
				}
				require.Greater(t, last, 100.0)
			}
		}
	}
	t.Log(table.String())
}
