package sched

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
)

// content is a copy of all of a mini-batch but its rows, as text.
func (b *Loaded) content() string {
	s := fmt.Sprint(b.HopEnd, b.Nodes, b.TypeEnd)
	for _, k := range b.Blocks {
		s += fmt.Sprint(k.Indptr, k.Src, k.Weights, k.Lists)
	}
	return s
}

// from returns the batches of an epoch behind the first ones.
func from(l *Loader, first int) (batches []int) {
	for i := first; i < l.Batches(); i++ {
		batches = append(batches, i)
	}
	return batches
}

// trained returns the content of the mini-batches that training under cfg has, by epoch and index.
func trained(t *testing.T, cfg plan.Config, in prepare.Inputs) map[[2]int]string {
	t.Helper()
	all := map[[2]int]string{}
	cfg.OnBatch = func(epoch, index int, mb *graph.MiniBatch) {
		b := &Loaded{HopEnd: mb.HopEnd, TypeEnd: mb.TypeEnd,
			Nodes: hostmem.View[int64](mb.Nodes.Bytes())[:mb.HopEnd[len(mb.HopEnd)-1]]}
		for _, k := range mb.Blocks {
			l := LoadedBlock{Indptr: hostmem.View[int64](k.Indptr.Bytes())[:k.NumLists()+1],
				Lists: k.Lists}
			if k.NumEdges > 0 {
				l.Src = hostmem.View[uint32](k.Src.Bytes())[:k.NumEdges]
			}
			if k.Weights != nil {
				l.Weights = hostmem.View[float32](k.Weights.Bytes())[:k.NumSrc]
			}
			b.Blocks = append(b.Blocks, l)
		}
		all[[2]int{epoch, index}] = b.content()
	}
	_, err := Train(context.Background(), cfg, in, report.Observer{})
	require.NoError(t, err)
	return all
}

// A loader's mini-batches are those that training has, in every mode and with every sampler, also
// behind an epoch that was broken off, and its rows are the dataset's.
func TestLoaderIsTraining(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	for _, mode := range tiers.Catalog.Names() {
		for _, sampler := range plan.Samplers {
			t.Run(mode+" "+sampler, func(t *testing.T) {
				if wide.Lean() && mode != static.ModeHelios && sampler != plan.Samplers[0] {
					t.Skip("samplers of one mode are enough")
				}
				cfg := small()
				cfg.Mode, cfg.Sampler, cfg.NoEval = mode, sampler, true
				if runsOn(cfg, &diskgnn.System) {
					cfg.PackedDir = filepath.Join(t.TempDir(), "packed")
				}
				if sampler == graph.Ladies {
					cfg.Fanouts = []int{200, 150}
				}
				if cfg.Check() != nil {
					t.Logf("%s has no %s", mode, sampler)
					return
				}
				dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
				require.NoError(t, err)
				before := hostmem.Usage()
				in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
				open := func() (*Loader, error) {
					return OpenLoader(context.Background(), cfg, in,
						LoaderOptions{Split: "train", Shuffle: true}, report.Observer{})
				}
				if runsOn(cfg, &hier.System) {
					_, err := open()
					require.Equal(t, errs.Capability, errs.ClassOf(err))
					require.NoError(t, dev.Close())
					return
				}
				want := trained(t, cfg, in)
				l, err := open()
				require.NoError(t, err)
				enough := errors.New("enough")
				err = l.Epoch(context.Background(), 0, from(l, 0),
					func(*Loaded) error { return enough })
				require.ErrorIs(t, err, enough)
				got := map[[2]int]string{}
				rb := int64(d.Meta.RowBytes())
				require.Equal(t, rb, l.RowBytes())
				keep := func(b *Loaded) error {
					got[[2]int{b.Epoch, b.Index}] = b.content()
					for i, v := range b.Nodes {
						if !slices.Equal(b.Rows[int64(i)*rb:][:rb], feat[v*rb:][:rb]) {
							return fmt.Errorf("row %d is not of node %d", i, v)
						}
					}
					return nil
				}
				require.NoError(t, l.Epoch(context.Background(), 0, from(l, 0), keep))
				require.NoError(t, l.Epoch(context.Background(), 1, from(l, 2), keep))
				require.NoError(t, l.Close())
				require.Greater(t, len(want), l.Batches()+2)
				delete(want, [2]int{1, 0})
				delete(want, [2]int{1, 1})
				require.Equal(t, want, got)
				require.NoError(t, dev.Close(), "streams or buffers were left open")
				for k, v := range hostmem.Usage() {
					if !strings.HasPrefix(k, "topology") { // the dataset's, until it is closed
						require.LessOrEqual(t, v, before[k], "hostmem for %q", k)
					}
				}
			})
		}
	}
}

// A loader makes any mini-batches of an epoch in any order, with every kind of tiers, and reads no
// row more often than in one pass where the tiers are static.
func TestLoaderMakesAnyBatches(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 1, "")
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
	for _, mode := range []string{"helios", "gids", "ginex", "diskgnn"} {
		for _, o := range []LoaderOptions{{Split: "train", Shuffle: true}, {Split: "val"},
			{Nodes: []int64{9, 3, 1200}}} {
			cfg := small()
			// A row alone in its command, so that bytes count rows: the first mini-batch of each
			// call has its hops read apart, so that fewer share one.
			cfg.Mode, cfg.Batch, cfg.CoalesceBytes = mode, 2, -1
			if o.Nodes == nil {
				cfg.Batch = 50
			}
			whole := map[int]string{}
			got := map[int]string{}
			load := func(to map[int]string) func(b *Loaded) error {
				return func(b *Loaded) error {
					require.NotContains(t, to, b.Index)
					to[b.Index] = b.content()
					return nil
				}
			}
			o.Any = true
			l, err := OpenLoader(context.Background(), cfg, in, o, report.Observer{})
			require.NoError(t, err)
			require.NoError(t, l.Epoch(context.Background(), 1, from(l, 0), load(whole)))
			once := l.BytesRead()
			batches := from(l, 0)
			require.Len(t, whole, len(batches))
			slices.Reverse(batches)
			require.NoError(t, l.Epoch(context.Background(), 1, nil, load(got)))
			require.Empty(t, got)
			half := len(batches) / 2
			require.NoError(t, l.Epoch(context.Background(), 1, batches[half:], load(got)))
			require.Len(t, got, len(batches)-half)
			require.NoError(t, l.Epoch(context.Background(), 1, batches[:half], load(got)))
			require.Equal(t, whole, got)
			if mode == "helios" {
				require.Equal(t, 2*once, l.BytesRead())
			}
			require.NoError(t, l.Close())
		}
	}
	require.NoError(t, dev.Close())
}

// With Anew each epoch and batch draws for itself in the order of the nodes, of which one may stand
// twice, in one batch too; without it the draws stay. Labels of all nodes are the dataset's.
func TestLoaderDrawsAnew(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 2, "")
	all, err := d.Labels()
	require.NoError(t, err)
	nodes := []int64{7, 1, 7, 900, 1, 3, 7, 1200}
	rb := int64(d.Meta.RowBytes())
	of := map[bool][]string{}
	for _, mode := range tiers.Catalog.Names() {
		cfg := small()
		cfg.Mode, cfg.Batch, cfg.Fanouts = mode, 5, []int{2, 2}
		if cfg.Check() != nil || runsOn(cfg, &hier.System) {
			continue
		}
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
		for _, anew := range []bool{false, true} {
			l, err := OpenLoader(context.Background(), cfg, in,
				LoaderOptions{Nodes: nodes, Anew: anew, AllLabels: true, Positions: true},
				report.Observer{})
			require.NoError(t, err)
			got := []string{"", ""}
			for epoch := range got {
				require.NoError(t, l.Epoch(context.Background(), epoch, from(l, 0),
					func(b *Loaded) error {
						got[epoch] += b.content()
						require.Equal(t, nodes[5*b.Index:][:b.Seeds], b.Nodes[:b.Seeds])
						for i, at := range b.Positions {
							require.Equal(t, nodes[at], b.Nodes[i])
						}
						require.Len(t, b.Positions, b.Seeds)
						require.Len(t, b.Labels, len(b.Nodes))
						for i, v := range b.Nodes {
							require.Equal(t, all[v], b.Labels[i])
							require.Equal(t, feat[v*rb:][:rb], b.Rows[int64(i)*rb:][:rb])
						}
						return nil
					}))
			}
			require.Equal(t, !anew, got[0] == got[1], mode)
			if of[anew] == nil {
				of[anew] = got
			}
			require.Equal(t, of[anew], got, mode)
			require.NoError(t, l.Close())
		}
		require.NoError(t, dev.Close())
	}
}

func TestLoaderRefuses(t *testing.T) {
	d, _ := tiny.open(t)
	s := bind(t, d, 1, "")
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
	for text, o := range map[string]LoaderOptions{
		`unknown split "x"`:           {Split: "x"},
		"node 1500 is not in dataset": {Nodes: []int64{1500}},
		"no nodes to load":            {Nodes: []int64{}},
	} {
		_, err := OpenLoader(context.Background(), small(), in, o, report.Observer{})
		require.ErrorContains(t, err, text)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	l, err := OpenLoader(context.Background(), small(), in,
		LoaderOptions{Split: "train", Shuffle: true}, report.Observer{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	last := l.Batches() - 1
	for _, at := range [][]int{{-1}, {plan.MaxEpochs}, {0, -1}, {0, last + 1}, {0, 0},
		{0, last, last}} {
		err := l.Epoch(ctx, at[0], at[1:], func(*Loaded) error { return nil })
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", at)
	}
	n := 0
	err = l.Epoch(ctx, 0, from(l, 0), func(*Loaded) error { n++; cancel(); return nil })
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	require.Equal(t, 1, n)
	require.NoError(t, l.Close())
	require.NoError(t, dev.Close())
}
