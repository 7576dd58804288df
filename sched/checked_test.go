package sched

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/stripe"
	"helios/gnn"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/sched/plan"
	"helios/sched/report"
	"helios/sched/tiers/dynamic"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/static"
)

// With checked reads a byte that changed on an SSD stops the run before anything trains on it,
// whichever stack reads it; without damage nothing changes.
func TestCheckReads(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	cfg := small()
	cfg.Epochs, cfg.GPUCache, cfg.CPUCache = 1, percent(2), percent(2)
	cfg.CheckReads = plan.ChecksOff
	plain := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, plain.err)
	require.Contains(t, plain.res.Checks.NotChecked, "rows as they come from the SSDs (turned off)")
	cfg.CheckReads = plan.ChecksAuto
	stacks := []string{gpuio.StackAsync, gpuio.StackSync, gpuio.StackCPU, gpuio.StackMmap}
	for _, stack := range stacks {
		cfg.IOStack = stack
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, stack)
		require.Equal(t, plain.res.ParamsSHA256, r.res.ParamsSHA256)
		require.Zero(t, r.res.IO.Mismatch)
		require.Contains(t, r.res.Checks.Checked, "rows as they come from the SSDs")
	}

	f, err := os.OpenFile(s.paths[1], os.O_RDWR, 0)
	require.NoError(t, err)
	_, on, err := stripe.Attach(t.Context(), d, s.ssds)
	require.NoError(t, err)
	pos := int64(on[1].DataStart) * 512 // row 1
	b := make([]byte, 512*tiny.nodes/2)
	_, err = f.ReadAt(b, pos)
	require.NoError(t, err)
	for i := 77; i < len(b); i += 512 {
		b[i] ^= 4 // in every row of the SSD, so that any batch meets one
	}
	_, err = f.WriteAt(b, pos)
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
	for _, mode := range []string{dynamic.ModeBaM, dynamic.ModeGIDS, static.ModeInmem,
		ginex.ModeGinex} {
		c := plan.Config{
			ModelSettings: gnn.ModelSettings{Model: cfg.Model, Hidden: cfg.Hidden},
			Mode:          mode,
			Seed:          cfg.Seed,
			Epochs:        1,
			Batch:         cfg.Batch,
			Fanouts:       cfg.Fanouts,
		}
		if mode == ginex.ModeGinex {
			c.SuperbatchDir = t.TempDir()
		}
		r := train(t, context.Background(), c, d, feat, s, 2, report.Observer{})
		require.ErrorContains(t, r.err, "CRC32C", mode)
		require.Equal(t, errs.Device, errs.ClassOf(r.err))
	}
}

// A stripe that has lost what is behind its rows (both checksum tables, a superblock) stops a run
// that needs them, and is a note of one that does not.
func TestLostTail(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	st, err := os.Stat(s.paths[1])
	require.NoError(t, err)
	rows := int64(512*tiny.nodes/2+4095) &^ 4095
	require.NoError(t, os.Truncate(s.paths[1], 1<<20+rows))
	require.NoError(t, os.Truncate(s.paths[1], st.Size()))
	cfg := small()
	cfg.Epochs = 1
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.Equal(t, errs.Device, errs.ClassOf(r.err), "%v", r.err)
	require.ErrorContains(t, r.err, "row checksums: damaged table")
	cfg.CheckReads = plan.ChecksOff
	var notes []string
	r = train(t, context.Background(), cfg, d, feat, s, 2,
		report.Observer{Note: func(s errs.Text) { notes = append(notes, s.String()) }})
	require.NoError(t, r.err)
	require.Len(t, r.res.SSDNotes, 4)
	for i, what := range []string{"second superblock unusable", "checksums of chunks: damaged",
		"row checksums: damaged", "of 4 I/O blocks 2 run at once"} {
		require.Contains(t, r.res.SSDNotes[i], what)
		require.Contains(t, notes, r.res.SSDNotes[i])
	}
}
