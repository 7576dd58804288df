package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
)

// Reads that overlap count their time once; gaps count nothing.
func TestCompleteTimeIsAUnion(t *testing.T) {
	c := &clock{}
	t0 := time.Now()
	after := func(ms int) time.Time { return t0.Add(time.Duration(ms) * time.Millisecond) }
	rs := func(submit, complete int) gpuio.ReadStats {
		return gpuio.ReadStats{Submit: time.Duration(submit) * time.Millisecond,
			Complete: time.Duration(complete) * time.Millisecond}
	}
	c.Read(after(0), rs(1, 10))  // 1 to 11
	c.Read(after(2), rs(1, 5))   // 3 to 8: inside
	c.Read(after(9), rs(1, 5))   // 10 to 15: 4 more
	c.Read(after(20), rs(0, 10)) // after a gap
	require.Equal(t, 24*time.Millisecond, c.complete)
	require.Equal(t, 3*time.Millisecond, c.submit)
}
