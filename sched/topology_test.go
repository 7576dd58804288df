package sched

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/dynamic"
)

// copyOf is a dataset of its own files, that a test may damage.
func copyOf(t *testing.T, d *dataset.Dataset) *dataset.Dataset {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "g")
	require.NoError(t, os.CopyFS(dir, os.DirFS(d.Dir())))
	c, err := dataset.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// Training with the topology on storage is training with it in memory: the same blocks, losses and
// parameters, for each cache of lists, pipeline, model and sampler.
func TestTopologyOnSSD(t *testing.T) {
	d, feat := tiny.open(t)
	all := units.Budget{Bytes: 8 * d.Meta.Edges} // with what finds the lists
	for i, v := range []struct {
		name string
		set  func(*plan.Config)
	}{
		{"sage", func(*plan.Config) {}},
		{"gcn, all neighbours, serial", func(c *plan.Config) {
			c.Model, c.Fanouts, c.Pipeline, c.Epochs = "gcn", []int{-1, 3}, plan.PipelineNone, 1
		}},
		{"ladies", func(c *plan.Config) { c.Sampler, c.Fanouts = graph.Ladies, []int{64, 64} }},
		{"labor", func(c *plan.Config) { c.Sampler, c.BatchDependency = graph.Labor, 3 }},
		{"gids", func(c *plan.Config) {
			c.Mode, c.GPUCache, c.CPUCache, c.Epochs = dynamic.ModeGIDS, percent(10), percent(10), 1
		}},
	} {
		if wide.Lean() && i > 1 {
			break
		}
		t.Run(v.name, func(t *testing.T) {
			s := bind(t, d, 2, "")
			cfg := small()
			v.set(&cfg)
			want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, want.err)
			require.Nil(t, want.res.Epochs[0].TopologyReads)
			require.Nil(t, want.res.TopologyStorage)
			for _, lists := range []units.Budget{plan.NoCache(), percent(40), all} {
				if wide.Lean() && lists == all || i > 0 && lists.Percent == 0 {
					continue
				}
				before := testrig.Held(t)
				cfg.Topology, cfg.NeighborCache = plan.TopologySSD, lists
				got := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
				require.NoError(t, got.err)
				require.Equal(t, want.blocks, got.blocks)
				require.Equal(t, want.seen, got.seen)
				require.Equal(t, want.res.ParamsSHA256, got.res.ParamsSHA256)
				for i, e := range got.res.Epochs {
					require.Equal(t, want.res.Epochs[i].Loss, e.Loss)
					require.Equal(t, want.res.Epochs[i].RowsSSD, e.RowsSSD)
					r := e.TopologyReads
					require.NotNil(t, r)
					require.Positive(t, r.Edges)
					switch {
					case lists == all:
						require.Equal(t, r.Edges, r.CachedEdges)
						require.Zero(t, r.Reads)
						continue
					case lists.Percent == 0:
						require.Zero(t, r.CachedEdges)
					default:
						require.Positive(t, r.CachedEdges)
						require.Less(t, r.CachedEdges, r.Edges)
					}
					require.Positive(t, r.Bytes)
					require.InDelta(t, r.Wait.Seconds(), e.StageSeconds.Topology, 1e-6)
				}
				info := got.res.TopologyStorage
				require.LessOrEqual(t, info.CacheBytes, max(lists.Of(4*d.Meta.Edges), 0))
				require.Equal(t, 8*(d.Meta.Nodes+1), info.OffsetBytes)
				before.Leaked(t, "topology")
			}
		})
	}
}

// Lists that can't be read end the run with an error of class device that names the file; nothing
// trains on the batch, and a run that finds the file whole goes on from the checkpoint to the same
// parameters.
func TestTopologyFaults(t *testing.T) {
	whole, feat := tiny.open(t)
	cfg := small()
	cfg.Topology, cfg.NeighborCache = plan.TopologySSD, percent(30)
	clean := train(t, context.Background(), cfg, whole, feat, bind(t, whole, 2, ""), 2,
		report.Observer{})
	require.NoError(t, clean.err)
	for name, c := range map[string]struct {
		spoil func(path string, data []byte) error
		cause error
	}{
		"short": {func(path string,
			data []byte) error {
			return os.Truncate(path, int64(len(data)/4))
		}, graph.ErrTopologyShort},
		"changed": {func(path string, data []byte) error {
			other := append([]byte(nil), data...)
			for i := 200; i < len(other); i += 512 {
				other[i] ^= 1
			}
			// in place: a shorter file would be another fault
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt(other, 0)
			return errors.Join(err, f.Close())
		}, graph.ErrTopologyChanged},
	} {
		t.Run(name, func(t *testing.T) {
			d := copyOf(t, whole)
			s := bind(t, d, 2, "")
			path := filepath.Join(d.Dir(), "indices.npy")
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			before := testrig.Held(t)
			cfg := cfg
			cfg.CheckpointDir, cfg.CheckpointEvery = t.TempDir(), 1
			batches := 0
			cfg.OnBatch = func(int, int, *graph.MiniBatch) {
				if batches++; batches == 3 {
					require.NoError(t, c.spoil(path, data))
				}
			}
			r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.ErrorIs(t, r.err, c.cause)
			require.Equal(t, errs.Device, errs.ClassOf(r.err))
			require.ErrorContains(t, r.err, path)
			before.Leaked(t, "topology")
			require.NoError(t, os.WriteFile(path, data, 0o600))
			cfg.OnBatch, cfg.Resume = nil, true
			r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
			require.NoError(t, r.err)
			require.Equal(t, clean.res.ParamsSHA256, r.res.ParamsSHA256)
		})
	}
	t.Run("budgets and files", func(t *testing.T) {
		d := copyOf(t, whole)
		s := bind(t, d, 2, "")
		few := cfg
		few.NeighborCache = units.Budget{Bytes: 10}
		r := train(t, context.Background(), few, d, feat, s, 2, report.Observer{})
		require.ErrorContains(t, r.err, "neighbor-cache")
		require.Equal(t, errs.Usage, errs.ClassOf(r.err))
		// nobody's wish for a cache of a few bytes: the default is a share, too
		few.NeighborCache = percent(0.01)
		r = train(t, context.Background(), few, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err)
		require.Zero(t, r.res.TopologyStorage.CacheBytes)
		require.NoError(t, os.Remove(filepath.Join(d.Dir(), "indices.npy")))
		r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.ErrorIs(t, r.err, fs.ErrNotExist)
	})
	t.Run("interrupted", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(errors.New("enough"))
		_, err := whole.TopologyOnSSD(ctx, graph.OutOfCoreOptions{})
		require.ErrorContains(t, err, "enough")
	})
}

// topologyNeeds returns what opening a topology takes, near enough to refuse budgets that will not
// fit.
func TestTopologyNeeds(t *testing.T) {
	d, _ := tiny.open(t)
	for _, c := range []struct {
		topology string
		lists    units.Budget
	}{{plan.TopologyMemory, units.Budget{}}, {plan.TopologySSD, percent(50)},
		{plan.TopologySSD, units.Budget{Bytes: 1 << 50}}} {
		t.Run(fmt.Sprint(c.topology, c.lists), func(t *testing.T) {
			e := &prepare.Sampling{In: prepare.Inputs{Dataset: d},
				Config: plan.Config{Topology: c.topology, NeighborCache: c.lists}}
			var err error
			e.Device, err = cuda.NewHost(cuda.HostOptions{SMs: 1})
			require.NoError(t, err)
			defer func() { require.NoError(t, e.Device.Close()) }()
			before := e.TopologyNeeds()
			require.NoError(t, e.OpenTopology(context.Background()))
			defer func() { require.NoError(t, e.Close()) }()
			require.Zero(t, e.TopologyNeeds())
			if c.topology == plan.TopologySSD {
				i := e.Topology.StorageInfo()
				require.InDelta(t, i.OffsetBytes+i.ChecksumBytes+i.CacheBytes, before, 4096)
			} else {
				require.Zero(t, before) // on the host device it can be mapped
			}
		})
	}
}
