package sched

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/build"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/cacheplan"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// hotRun trains one epoch on s and returns the result and what was noted.
func hotRun(t *testing.T, s *ssdSet, d *dataset.Dataset, cfg plan.Config) (*report.Result,
	[]string) {
	t.Helper()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	var notes []string
	cfg.Fanouts, cfg.Batch, cfg.Hidden, cfg.NoEval, cfg.Seed = []int{4, 3}, 100, 8, true, 5
	cfg.GPUCache, cfg.CPUCache = percent(5), percent(10)
	r, err := Train(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds},
		report.Observer{Note: func(n errs.Text) { notes = append(notes, n.String()) }})
	require.NoError(t, err)
	require.Equal(t, r.Checks.String(), notes[0], "the first line says what is checked")
	return r, notes[1:]
}

// Every source places rows, none changes a result, and what is kept is found again.
func TestHotnessSources(t *testing.T) {
	d := tiny.generate(t)
	s := bind(t, d, 2, "")
	list := filepath.Join(t.TempDir(), "hot.txt")
	require.NoError(t, os.WriteFile(list, []byte("# hottest\n7\n\n 1499 # last\n7\n3\n"), 0o644))
	dir := filepath.Join(t.TempDir(), "kept")
	sha := ""
	hits := map[string]int64{}
	for _, by := range append(slices.Clone(plan.Hotnesses), list) {
		cfg := plan.Config{Hotness: by, HotnessDir: dir}
		r, notes := hotRun(t, s, d, cfg)
		require.Equal(t, by, r.Hotness.By)
		require.False(t, r.Hotness.Reused)
		require.Empty(t, notes)
		e := r.Epochs[0]
		hits[by] = e.RowsGPU + e.RowsCPU
		if sha == "" {
			sha = r.ParamsSHA256
		}
		require.Equal(t, sha, r.ParamsSHA256, by)
		if kept := by == plan.HotnessPresample || by == plan.HotnessPageRank ||
			by == plan.HotnessOutDegree || by == plan.HotnessForesight; !kept {
			require.Empty(t, r.Hotness.File)
			continue
		}
		require.FileExists(t, r.Hotness.File)
		again, notes := hotRun(t, s, d, cfg)
		require.True(t, again.Hotness.Reused)
		require.Equal(t, r.Hotness.File, again.Hotness.File)
		require.Len(t, notes, 1)
		require.Contains(t, notes[0], "reused from "+r.Hotness.File)
		g := again.Epochs[0]
		require.Equal(t, [3]int64{e.RowsGPU, e.RowsCPU, e.RowsSSD}, [3]int64{g.RowsGPU, g.RowsCPU,
			g.RowsSSD})
		require.Equal(t, sha, again.ParamsSHA256)
	}
	for by, n := range hits {
		if by != list && by != plan.HotnessDegree { // the list names three rows
			require.Greater(t, n, hits[list], by)
		}
	}
	for by, n := range hits { // of all placements of this size
		require.GreaterOrEqual(t, hits[plan.HotnessForesight], n, by)
	}
}

func TestHotnessThatCannotBeKept(t *testing.T) {
	d := tiny.generate(t)
	s := bind(t, d, 2, "")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	r, notes := hotRun(t, s, d, plan.Config{HotnessDir: filepath.Join(file, "x")})
	require.Empty(t, r.Hotness.File)
	require.Len(t, notes, 2) // it can be neither looked for nor made
	require.Contains(t, notes[1], "not kept for later runs")

	dir := t.TempDir()
	r, notes = hotRun(t, s, d, plan.Config{HotnessDir: dir})
	require.Empty(t, notes)
	text, err := os.ReadFile(r.Hotness.File)
	require.NoError(t, err)
	text[len(text)/2] ^= 1
	require.NoError(t, os.WriteFile(r.Hotness.File, text, 0o644))
	again, notes := hotRun(t, s, d, plan.Config{HotnessDir: dir})
	require.False(t, again.Hotness.Reused)
	require.Len(t, notes, 1)
	require.Contains(t, notes[0], "checksum")
	require.Equal(t, r.Epochs[0].RowsGPU, again.Epochs[0].RowsGPU)
	third, _ := hotRun(t, s, d, plan.Config{HotnessDir: dir}) // it was written anew
	require.True(t, third.Hotness.Reused)
}

// rmat is a small R-MAT graph.
func rmat(t *testing.T, nodes int64, train float64) *dataset.Dataset {
	return rmatDim(t, nodes, train, 4)
}

func rmatDim(t *testing.T, nodes int64, train float64, dim int) *dataset.Dataset {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, build.Generate(context.Background(), build.GenerateOptions{
		Kind: "rmat", Nodes: nodes, AvgDegree: 10, Classes: 4, Dim: dim, Seed: 3, Out: dir,
		TrainFraction: train, ValFraction: 0.01, FeatureFn: "hash",
	}))
	d, err := dataset.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// The bound: at a cache of 10 % and seeds of 10 %, presampling comes within 2 points of the
// next epoch's own optimum.
func TestHotnessOnTheNextEpoch(t *testing.T) {
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	nodes := int64(100_000)
	if wide.Lean() {
		nodes = 30_000
	}
	sizes := []units.Budget{percent(5), percent(10), percent(100)}
	sources := []string{"presample:1", plan.HotnessPresample, plan.HotnessDegree,
		plan.HotnessOutDegree, plan.HotnessPageRank, plan.HotnessForesight}
	for _, train := range []float64{0.1, 0.01} {
		d := rmat(t, nodes, train)
		// A batch meets about as small a part of the graph as 8,000 seeds of a hundred million
		// nodes do.
		r, err := cacheplan.CompareHotness(context.Background(),
			plan.Config{Fanouts: []int{25, 10},
				Batch: 20, Seed: 1}, prepare.Inputs{Dev: dev, Dataset: d}, sources, sizes,
			report.Observer{})
		require.NoError(t, err)
		gap := map[string]float64{}
		for _, s := range r.Sources {
			pos := s.Sizes[1]
			t.Logf(
				"%g of the nodes are seeds, %-12s hit %.4f of at best %.4f: %.2f points, %.3f of it",
				train, s.By, pos.Hit, pos.Best, pos.Gap, pos.OfBest)
			gap[s.By] = pos.Gap
			for i, h := range s.Sizes {
				require.GreaterOrEqual(t, h.Gap, 0.0)
				if i > 0 {
					require.GreaterOrEqual(t, h.Hit, s.Sizes[i-1].Hit)
				}
			}
			require.Equal(t, 1.0, s.Sizes[2].Hit)
		}
		require.Zero(t, gap[plan.HotnessForesight])
		require.Less(t, gap[plan.HotnessPresample], gap["presample:1"])
		require.Less(t, gap[plan.HotnessPresample], gap[plan.HotnessDegree])
		if train == 0.1 {
			require.LessOrEqual(t, gap[plan.HotnessPresample], 2.0)
		}
	}
}
