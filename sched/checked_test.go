package sched

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/sched/report"
)

// With checked reads a byte that changed on an SSD stops the run before anything trains on it,
// whichever stack reads it; without damage nothing changes.
func TestCheckReads(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs, cfg.GPUCache, cfg.CPUCache = 1, percent(2), percent(2)
	plain := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, plain.err)
	cfg.CheckReads = true
	stacks := []string{gpuio.StackAsync, gpuio.StackSync, gpuio.StackCPU}
	for _, stack := range stacks {
		cfg.IOStack = stack
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, stack)
		require.Equal(t, plain.res.ParamsSHA256, r.res.ParamsSHA256)
		require.Zero(t, r.res.IO.Mismatch)
	}

	f, err := os.OpenFile(s.paths[1], os.O_RDWR, 0)
	require.NoError(t, err)
	at := int64(s.ssds[1].DataStart) * 512 // row 1
	b := make([]byte, 512*tiny.nodes/2)
	_, err = f.ReadAt(b, at)
	require.NoError(t, err)
	for i := 77; i < len(b); i += 512 {
		b[i] ^= 4 // in every row of the SSD, so that any batch meets one
	}
	_, err = f.WriteAt(b, at)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	for _, stack := range stacks {
		cfg.IOStack = stack
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		var sum *gpuio.ChecksumError
		require.True(t, errors.As(r.err, &sum), "%s: %v", stack, r.err)
		require.Equal(t, errs.Device, errs.ClassOf(r.err))
		require.NotZero(t, sum.Row%2, "it names a row of the damaged SSD")
		require.Positive(t, r.res.IO.Mismatch)
	}
}
