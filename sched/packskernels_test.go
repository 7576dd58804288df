//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/pages"
	"helios/internal/testing/wide"
	"helios/sched/packs"
	"helios/sched/report"
)

// On a GPU packs hold what it samples, and bring it back, to the bit.
func TestPacksHoldWhatAGPUDraws(t *testing.T) {
	d := tiny.generate(t)
	for i, v := range sampledWays {
		if wide.Lean() && i > 0 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			dev, _ := gpu(t, "")
			cfg := onFibers()
			cfg.Epochs, cfg.SampleEpochs, cfg.Refresh = 2, 1, 1
			v.set(&cfg)
			s := openSampling(t, dev, d, cfg, report.Observer{})
			r, err := packs.Start(s, packs.Options{Dir: filepath.Join(t.TempDir(), "p"),
				Hot: 100, Segment: 3, Pages: pages.InFolder{}})
			require.NoError(t, err)
			requireSampled(t, s, r, d)
			require.NoError(t, r.Close())
		})
	}
}
