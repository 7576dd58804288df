//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/sched/report"
)

// On a GPU mega-batches are those of the host device: static rows in its memory, the parts' rows
// and the induced topology in pinned memory.
func TestMegaTiersOnGPU(t *testing.T) {
	d, feat, s := fiberRig(t)
	cfg := onFibers()
	mega := onMega(t, 4, 2)
	cfg.Mode, cfg.Parts, cfg.MegaBatch, cfg.GPUCache = mega.Mode, 4, mega.MegaBatch, mega.GPUCache
	cfg.NoEval, cfg.PartedDir = true, mega.PartedDir
	host := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	dev, _ := gpu(t, "")
	g := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
	near(t, host, g)
	require.True(t, g.res.Mega.StaticOnGPU)
	require.Positive(t, g.res.Epochs[1].RowsGPU)
	require.Positive(t, g.res.GPUCacheBytes)
	require.Positive(t, g.res.Mega.Ahead)
}
