package sched

import (
	"context"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/simd"
	"helios/sched/checkpoint"
	"helios/sched/prepare"
	"helios/sched/report"
)

// A checkpoint that goes on at a level which rounds otherwise says so; levels of the same bits are
// silent, and one from before levels counts as generic.
func TestResumeAtAnotherLevel(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 1, "")
	dir := t.TempDir()
	precision := ""
	run := func(l simd.Level, epochs int) (notes string) {
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2, Kernels: l})
		require.NoError(t, err)
		cfg := small()
		cfg.Epochs, cfg.CheckpointDir, cfg.Resume, cfg.NoEval = epochs, dir, true, true
		cfg.Precision = precision
		_, err = Train(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d,
			SSDs: s.ssds}, report.Observer{Note: func(s errs.Text) { notes += s.String() + "\n" }})
		require.NoError(t, err)
		require.NoError(t, dev.Close())
		return notes
	}
	require.NotContains(t, run(simd.Generic, 1), "option kernels")
	path := filepath.Join(dir, checkpointName)
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	require.Equal(t, "3", f.Metadata["helios.format"])
	old := strings.Replace(f.Metadata["helios.config"], `,"kernels":"generic"`, "", 1)
	require.NotEqual(t, old, f.Metadata["helios.config"])
	f.Metadata["helios.config"] = old
	require.NoError(t, checkpoint.Save(path, f))
	require.NotContains(t, run(simd.Generic, 2), "option kernels")
	if simd.Best() == simd.Generic {
		t.Skip("this machine has generic kernels only")
	}
	n := run(simd.AVX2, 3)
	require.Contains(t, n, path)
	require.Contains(t, n, "option kernels generic and resumes with avx2")
	require.NotContains(t, run(simd.Best(), 4), "option kernels", "AVX2 and AVX-512 give the same bits")
	require.Contains(t, run(simd.Generic, 5), "resumes with generic")
	precision = "bf16"
	require.Contains(t, run(simd.Best(), 6), "option kernels generic and resumes with option kernels "+
		simd.Best().String()+" and option precision bf16")
	require.NotContains(t, run(simd.Generic, 7), "option kernels", "all levels give the same bits")
	precision = "fp32"
	require.Contains(t, run(simd.AVX2, 8),
		"option kernels generic and option precision bf16 and resumes with option kernels avx2")
}

// A checkpoint of a program whose model rounded otherwise says so once, and is one of this
// program's after that; models that always rounded as now write what they did and are silent.
func TestResumeOfAnotherRounding(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 1, "")
	for _, model := range gnn.Archs() {
		t.Run(model, func(t *testing.T) {
			dir := t.TempDir()
			run := func(epochs int) (notes string) {
				dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
				require.NoError(t, err)
				cfg := small()
				cfg.Model, cfg.Epochs, cfg.CheckpointDir, cfg.Resume, cfg.NoEval = model, epochs,
					dir, true, true
				_, err = Train(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d,
					SSDs: s.ssds}, report.Observer{Note: func(s errs.Text) { notes += s.String() }})
				require.NoError(t, err)
				require.NoError(t, dev.Close())
				return notes
			}
			run(1)
			path := filepath.Join(dir, checkpointName)
			f, err := checkpoint.Load(path)
			require.NoError(t, err)
			old := regexp.MustCompile(`,"rounding":"[^"]*"`).ReplaceAllString(
				f.Metadata["helios.config"], "")
			changed := old != f.Metadata["helios.config"]
			require.Equal(t, model == "gat", changed)
			require.NotContains(t, run(2), "rounds otherwise")
			if changed {
				f.Metadata["helios.config"] = old
				require.NoError(t, checkpoint.Save(path, f))
				require.Contains(t, run(3), path+" was made by a heliosctl whose model gat rounds")
				require.NotContains(t, run(4), "rounds otherwise")
			}
		})
	}
}
