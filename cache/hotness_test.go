package cache

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
)

// leastCost tries every placement of at most g and c rows.
func leastCost(h []uint32, g, c int, cost Costs) float64 {
	var try func(row, g, c int) float64
	try = func(row, g, c int) float64 {
		if row == len(h) {
			return 0
		}
		w := float64(h[row])
		best := w*cost.SSD + try(row+1, g, c)
		if g > 0 {
			best = min(best, w*cost.GPU+try(row+1, g-1, c))
		}
		if c > 0 {
			best = min(best, w*cost.CPU+try(row+1, g, c-1))
		}
		return best
	}
	return try(0, g, c)
}

// total returns what a run's accesses cost under a placement.
func (c Costs) total(hotness []uint32, p Placement) float64 {
	sum := 0.0
	for _, h := range hotness {
		sum += float64(h) * c.SSD
	}
	for _, r := range p.GPU {
		sum += float64(hotness[r]) * (c.GPU - c.SSD)
	}
	for _, r := range p.CPU {
		sum += float64(hotness[r]) * (c.CPU - c.SSD)
	}
	return sum
}

// placeByCost is Costs.Place over Place.
func placeByCost(hotness []uint32, gpuRows, cpuRows int64, c Costs) (Placement, error) {
	return c.Place(gpuRows, cpuRows, func(a, b int64) (Placement,
		error) {
		return Place(hotness, a, b), nil
	})
}

func TestPlaceByCostIsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	level := func() float64 { return float64(r.IntN(5)) } // ties and useless tiers come up
	for i := range 1000 {
		h := make([]uint32, 1+r.IntN(7))
		for v := range h {
			h[v] = uint32(r.IntN(6))
		}
		c := Costs{GPU: level(), CPU: level(), SSD: level()}
		g, n := r.IntN(len(h)+2), r.IntN(len(h)+2)
		p, err := placeByCost(h, int64(g), int64(n), c)
		require.NoError(t, err)
		require.LessOrEqual(t, len(p.GPU), g)
		require.LessOrEqual(t, len(p.CPU), n)
		in := map[int64]bool{}
		for _, v := range slices.Concat(p.GPU, p.CPU) {
			require.False(t, in[v], "row %d twice", v)
			in[v] = true
		}
		require.True(t, slices.IsSorted(p.GPU) && slices.IsSorted(p.CPU))
		require.InDelta(t, leastCost(h, g, n, c), c.total(h, p), 1e-9,
			"case %d: %v, %d and %d rows, %+v: %+v", i, h, g, n, c, p)
	}
	for _, c := range []Costs{{GPU: -1}, {CPU: math.NaN()}, {SSD: math.Inf(1)}} {
		_, err := placeByCost([]uint32{1}, 1, 0, c)
		require.Error(t, err)
	}
}

func TestHotnessSet(t *testing.T) {
	ctx := context.Background()
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	st, err := dev.NewStream(cuda.StreamOptions{Name: "t"})
	require.NoError(t, err)
	defer func() { require.NoError(t, st.Close()) }()
	scores := HotnessScores([]float32{0.5, -1, 3e-8, 0.25, 0, 1})
	h, err := NewHotness(dev, 6)
	require.NoError(t, err)
	require.NoError(t, h.Set(ctx, st, scores))
	p, err := h.Place(ctx, st, 2, 2)
	require.NoError(t, err)
	require.Equal(t, Placement{GPU: []int64{0, 5}, CPU: []int64{2, 3}}, p)
	got, err := h.Counts(ctx, st)
	require.NoError(t, err)
	require.Equal(t, scores, got)
	require.Error(t, h.Set(ctx, st, scores[1:]))
	require.NoError(t, h.Close())
}

func TestSavedHotness(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "hotness")
	key := HotnessKey{Source: "presample", Dataset: "d", Rows: 40_000, Edges: 7,
		Train: HashNodes([]int64{1, 2}), Seed: 3, Fanouts: []int{5, -1}, Batch: 8,
		Sampler: "neighbor", Epochs: 4}
	s := &SavedHotness{Key: key, Nodes: []int64{8, 40}, Edges: []int64{32}, Seconds: 1.5,
		Scores: make([]uint32, key.Rows)}
	for i := range s.Scores {
		s.Scores[i] = uint32(i * i)
	}
	_, _, err := LoadHotness(dir, key)
	require.ErrorIs(t, err, fs.ErrNotExist)
	path, err := SaveHotness(dir, s)
	require.NoError(t, err)
	got, from, err := LoadHotness(dir, key)
	require.NoError(t, err)
	require.Equal(t, path, from)
	require.Equal(t, s, got)

	// Whatever differs is another file.
	other := map[string]bool{path: true}
	for _, change := range []func(*HotnessKey){
		func(k *HotnessKey) { k.Source = "pagerank" }, func(k *HotnessKey) { k.Dataset = "e" },
		func(k *HotnessKey) { k.Edges = 0 },
		func(k *HotnessKey) { k.Train = HashNodes([]int64{2, 1}) },
		func(k *HotnessKey) { k.Seed = 4 }, func(k *HotnessKey) { k.Fanouts = []int{-1, 5} },
		func(k *HotnessKey) { k.Batch = 9 }, func(k *HotnessKey) { k.Sampler = "ladies" },
		func(k *HotnessKey) { k.Epochs = 1 }, func(k *HotnessKey) { k.Method = "x" },
	} {
		k := key
		change(&k)
		p, err := HotnessPath(dir, k)
		require.NoError(t, err)
		require.False(t, other[p])
		other[p] = true
	}

	// Nothing damaged is ever used.
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	try := func(b []byte) error {
		require.NoError(t, os.WriteFile(path, b, 0o644))
		_, _, err := LoadHotness(dir, key)
		return err
	}
	for _, n := range []int{0, 7, 15, 16, 200, len(whole) / 2, len(whole) - 1} {
		require.ErrorContains(t, try(whole[:n]), "cut off", "%d bytes", n)
	}
	for _, offset := range []int{0, 9, 13, 30, len(whole) / 2, len(whole) - 2} {
		b := slices.Clone(whole)
		b[offset] ^= 0x40
		require.Error(t, try(b), "byte %d", offset)
		require.ErrorContains(t, try(b), path)
	}
	newer := slices.Clone(whole)
	newer[8]++
	require.ErrorContains(t, try(newer), "version 2")
	require.Error(t, try(append(slices.Clone(whole), 0)))
	// A file under another key's name is not that key's.
	k := key
	k.Seed++
	as, err := HotnessPath(dir, k)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(as, whole, 0o644))
	_, _, err = LoadHotness(dir, k)
	require.ErrorContains(t, err, "other settings")

	// Nothing is left of what could not be written.
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	_, err = SaveHotness(filepath.Join(file, "x"), s)
	require.Error(t, err)
	s.Key.Rows++
	_, err = SaveHotness(dir, s)
	require.Error(t, err)
	left, err := filepath.Glob(filepath.Join(dir, ".*"))
	require.NoError(t, err)
	require.Empty(t, left)
	require.False(t, errors.Is(err, fs.ErrNotExist))
}
