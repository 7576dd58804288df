package iobench

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSummarise(t *testing.T) {
	row := func(stack string, blocks int, iops float64, audited bool) Row {
		return Row{SSDs: 2, RowBytes: 4096, Depth: 256, Stack: stack, Blocks: blocks, Threads: 128,
			IOPS: iops, Audited: audited}
	}
	rows := []Row{
		row("async", 1, 500e3, true), row("async", 8, 985e3, true), row("async", 32, 1000e3, true),
		row("async", 64, 2000e3, false),
		row("sync", 1, 50e3, true), row("sync", 8, 400e3, true), row("sync", 32, 0, false),
		row("cpu", 1, 9e9, true),
	}
	s := Summarise(rows)
	require.Len(t, s, 2)
	require.Equal(t, 8, s[0].PlateauBlocks)
	require.Equal(t, 1000e3, s[0].BestIOPS)
	require.Len(t, s[0].Ratios, 2)
	require.InDelta(t, 10, s[0].Ratios[0].Ratio, 1e-9)
	require.InDelta(t, 2.4625, s[0].Ratios[1].Ratio, 1e-9)
	require.Equal(t, 8, s[1].PlateauBlocks)
	require.Empty(t, s[1].Ratios)
	require.Contains(t, s[0].String(), "98 % of it with 8 blocks; async/sync 10.00 at 1, 2.46 at 8")
	require.Empty(t, Summarise(rows[:1]))
}
