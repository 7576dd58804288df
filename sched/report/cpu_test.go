package report

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/hostcpu"
)

// The parts, what no part has, and the idle time are all that the processors had.
func TestCPUSince(t *testing.T) {
	by := func(stage, operator string) hostcpu.Spender {
		return hostcpu.Spender{Stage: stage, Operator: operator}
	}
	was := hostcpu.Usage{At: time.Unix(100, 0), Process: 5 * time.Second,
		Spent: map[hostcpu.Spender]time.Duration{by("train", "product"): time.Second}}
	now := hostcpu.Usage{At: time.Unix(104, 0), Process: 11 * time.Second,
		Spent: map[hostcpu.Spender]time.Duration{by("train", "product"): 3 * time.Second,
			by("train", "mean"): time.Second / 2, by("gather", "copy"): 9 * time.Second / 4}}
	require.Equal(t, &CPUUse{Batches: 12, Seconds: 6, Unaccounted: 1.25, Idle: 2,
		Parts: []CPUPart{{"gather", "copy", 2.25}, {"train", "product", 2}, {"train", "mean", 0.5}}},
		CPUSince(was, now, 2, 12))
	was.Idle, now.Idle, was.Processors, now.Processors = 7*time.Second, 8500*time.Millisecond, 2, 2
	u := CPUSince(was, now, 2, 12)
	require.Equal(t, []float64{1.5, 0.5}, []float64{u.Idle, u.Others})
	u = CPUSince(was, now, 1, 12)
	require.Zero(t, u.Others, "it may use one processor of two")
	was.Processors = 3
	require.Equal(t, 2.0, CPUSince(was, now, 2, 12).Idle, "one of three went away")
	was.Processors, now.Idle = 2, was.Idle-time.Second
	u = CPUSince(was, now, 2, 12)
	require.Equal(t, []float64{0, 2}, []float64{u.Idle, u.Others}, "idle time fell")
	was.Spent = nil
	require.Nil(t, CPUSince(was, now, 2, 12), "not metered from the beginning")
}
