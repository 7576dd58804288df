package sched

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/gnn"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/testing/wide"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
	"helios/sched/tiers/diskgnn"
	"helios/sched/tiers/ginex"
	"helios/sched/tiers/hier"
	"helios/sched/tiers/static"
)

// typedConfig is small for a model of typed graphs.
func typedConfig(model string) plan.Config {
	c := small()
	c.Model = model
	switch model {
	case "rgcn":
		c.Bases = 3
	case "rgat":
		c.Sampler, c.BatchDependency = graph.Labor, 2
	}
	return c
}

// tablesConfig is typedConfig where types have no rows.
func tablesConfig(model string) plan.Config {
	c := typedConfig(model)
	c.Embed, c.LR, c.Norm, c.ResidualLinear, c.Head = "36", 0.02, "batch", true, "mlp"
	c.Activation, c.ShareTypes = "leaky", true
	c.RelationFanouts = prepare.Together
	return c
}

// Every mode trains a typed graph to the same mini-batches, rows and parameters with any number of
// SSDs, workers and caches, or refuses it by name.
func TestTypedEveryWay(t *testing.T) {
	d, feat := types.open(t)
	everyWay(t, d, feat, typedConfig, gnn.TypedArchs(), 0.5)
}

// So they do where types have tables in the place of rows, and fanouts count over all relations.
func TestTablesEveryWay(t *testing.T) {
	d, feat := tables.open(t)
	kinds := gnn.TypedArchs()
	if wide.Lean() {
		kinds = kinds[:1]
	}
	// In the two epochs of small, tables of types without rows have learnt little.
	everyWay(t, d, feat, tablesConfig, kinds, 0.3)
}

// everyWay trains models in all modes; the accuracy of one in five is a guess.
func everyWay(t *testing.T, d *dataset.Dataset, feat []byte, config func(string) plan.Config,
	kinds []string, accuracy float64) {
	sets := []*ssdSet{bind(t, d, 1, ""), bind(t, d, 3, "")}
	for _, model := range kinds {
		t.Run(model, func(t *testing.T) {
			var first *record
			for i, m := range tiers.Modes {
				cfg := config(model)
				cfg.Mode, cfg.CPUCache = m.Name, percent(float64(5*i))
				if i%2 == 1 || m.Name == ginex.ModeGinex {
					cfg.Topology, cfg.NeighborCache = plan.TopologySSD, percent(float64(10*(i%3)))
				}
				r := train(t, context.Background(), cfg, d, feat, sets[i%2], 1+i%3,
					report.Observer{})
				if cfg.Traits().Untyped != "" {
					require.ErrorContains(t, r.err, m.Name)
					require.Equal(t, errs.Capability, errs.ClassOf(r.err))
					continue
				}
				require.NoError(t, r.err, m.Name)
				require.Positive(t, r.rows, "rows were compared")
				require.Equal(t, cfg.Topology == plan.TopologySSD, r.res.TopologyStorage != nil)
				if cfg.Topology == plan.TopologySSD {
					require.Positive(t, r.res.Epochs[0].TopologyReads.Edges)
				}
				if first == nil {
					first = &r
					require.Less(t, r.res.Epochs[1].Loss, r.res.Epochs[0].Loss, "the loss fell")
					require.Greater(t, *r.res.TestAcc, accuracy)
					continue
				}
				require.Equal(t, first.blocks, r.blocks, m.Name)
				require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, m.Name)
				require.Equal(t, first.res.TestAcc, r.res.TestAcc, m.Name)
			}
		})
	}
}

// A mini-batch may have more lists than nodes, as each relation has a list for each destination.
func TestTypedWithoutNeighbours(t *testing.T) {
	d, feat := types.open(t)
	s := bind(t, d, 1, "")
	var none []string
	for _, r := range d.Meta.Relations {
		none = append(none, r.Name+"=0,0")
	}
	for _, model := range gnn.TypedArchs() {
		cfg := typedConfig(model)
		cfg.Bases, cfg.RelationFanouts = 0, strings.Join(none, ";")
		cfg.Mode, cfg.PackedDir = diskgnn.ModeDiskGNN, t.TempDir()
		r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.NoError(t, r.err, model)
		cfg.RelationFanouts = ""
		r = train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		require.ErrorContains(t, r.err, "were prepared with option relation-fanout cites=0,0;")
	}
}

// Replicas, ranks and stops change no bit.
func TestTypedTogetherAndResumed(t *testing.T) {
	t.Run("rows", func(t *testing.T) { togetherAndResumed(t, types, typedConfig("rsage")) })
	t.Run("tables", func(t *testing.T) { togetherAndResumed(t, tables, tablesConfig("rsage")) })
}

func togetherAndResumed(t *testing.T, of graphSpec, cfg plan.Config) {
	d, feat := of.open(t)
	s := bind(t, d, 2, "")
	cfg.Shards, cfg.Batch = 2, 70
	plan.OrText(&cfg.RelationFanouts, "cites=2,1")
	want := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, want.err)
	c := cfg
	c.Replicas = 2
	r := trainSeveral(t, context.Background(), c, d, s, report.Observer{})
	require.NoError(t, r.err)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, "replicas")
	res, failed := trainRanks(t, context.Background(), d, cfg, cfg)
	for i, err := range failed {
		require.NoError(t, err)
		require.Equal(t, want.res.ParamsSHA256, res[i].ParamsSHA256, "ranks")
	}

	c = cfg
	c.CheckpointDir, c.CheckpointEvery = t.TempDir(), 1
	for stops := 0; ; stops++ {
		ctx, cancel := context.WithCancel(context.Background())
		left := 1 + rand.IntN(4)
		r := train(t, ctx, c, d, feat, s, 1+stops%2, report.Observer{Step: func(string, int, int) {
			if left--; left == 0 && stops < 3 {
				cancel()
			}
		}})
		cancel()
		if c.Resume = true; stops < 3 {
			require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
			continue
		}
		require.NoError(t, r.err)
		require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256, "resumed")
		break
	}
	c.RelationFanouts = ""
	other := train(t, context.Background(), c, d, feat, s, 1, report.Observer{})
	require.ErrorContains(t, other.err, "relation-fanout")
	require.Equal(t, errs.Usage, errs.ClassOf(other.err))
}

// Evaluation and prediction are of the nodes that have a class, by their numbers in their type.
func TestTypedEvaluateAndPredict(t *testing.T) {
	t.Run("rows", func(t *testing.T) { evaluateAndPredict(t, types, typedConfig("rsage")) })
	t.Run("tables", func(t *testing.T) {
		cfg := tablesConfig("rsage")
		cfg.RelationFanouts = "" // more edges in two epochs
		evaluateAndPredict(t, tables, cfg)
	})
}

func evaluateAndPredict(t *testing.T, of graphSpec, cfg plan.Config) {
	d, feat := of.open(t)
	s := bind(t, d, 2, "")
	cfg.Epochs, cfg.CheckpointDir = 2, t.TempDir()
	r := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
	require.NoError(t, r.err)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	in, ctx := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}, context.Background()
	e, err := Evaluate(ctx, plan.Config{Mode: static.ModeCPU}, in, cfg.CheckpointDir, "test",
		report.Observer{})
	require.NoError(t, err)
	require.Equal(t, r.res.TestAcc, e.Accuracy)
	require.NotEmpty(t, e.Metrics)

	all := make([]int64, prepare.TargetNodes(&d.Meta))
	for i := range all {
		all[i] = int64(i)
	}
	require.Less(t, int64(len(all)), d.Meta.Nodes)
	labels, err := d.Labels()
	require.NoError(t, err)
	right, seen := 0, 0
	_, err = Predict(ctx, plan.Config{Fanouts: []int{-1, -1}, Batch: 64}, in, cfg.CheckpointDir,
		all, report.Outputs{}, func(p report.Prediction) error {
			for i, v := range p.Nodes {
				require.Equal(t, int64(seen), v)
				if seen++; labels[v] == p.Classes[i] {
					right++
				}
			}
			return nil
		}, report.Observer{})
	require.NoError(t, err)
	require.Equal(t, len(all), seen)
	require.Greater(t, right, len(all)/2)
	_, err = Predict(ctx, plan.Config{}, in, cfg.CheckpointDir, []int64{int64(len(all))},
		report.Outputs{}, nil, report.Observer{})
	require.ErrorContains(t, err, fmt.Sprintf("nodes are 0 to %d", len(all)-1))

	// A model of more relations is not that of this dataset.
	path := filepath.Join(cfg.CheckpointDir, checkpointName)
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	f.Tensors = append(f.Tensors, checkpoint.Tensor{Name: "model.layer0.paper:sells:paper.bias",
		DType: "F32", Shape: []int64{1}, Data: make([]byte, 4)})
	require.NoError(t, checkpoint.Save(path, f))
	_, err = Evaluate(ctx, plan.Config{LastParameters: true}, in, path, "test", report.Observer{})
	require.ErrorContains(t, err, "sells:paper.bias is none of the model's")
}

// Without a GPU, a typed graph that does not fit into memory is read by the CPU: no plan knows it.
func TestTypedModeIsChosen(t *testing.T) {
	d := types.generate(t)
	for free, want := range map[int64]string{1 << 40: static.ModeInmem, 1: static.ModeCPU} {
		cfg := typedConfig("rsage")
		cfg.Mode, cfg.GPUCache, cfg.CPUCache, cfg.HotnessDir = "", plan.Config{}.GPUCache,
			plan.Config{}.CPUCache, ""
		c, err := chooseOf(context.Background(), cfg, facts{Auto: true, Files: true, Rows: 1 << 20,
			Free: free}, prepare.Inputs{Dataset: d}, nil, report.Observer{})
		require.NoError(t, err)
		require.Equal(t, want, c.Mode)
	}
}

// A typed graph is refused by name where it can't be had, before anything is read.
func TestTypedRefused(t *testing.T) {
	d, feat := types.open(t)
	untyped, feat1 := tiny.open(t)
	s, s1 := bind(t, d, 1, ""), bind(t, untyped, 1, "")
	for text, set := range map[string]func(*plan.Config){
		"use option model rsage, rgcn": func(c *plan.Config) { c.Model = "sage" },
		"sampler ladies does not draw from typed graphs: a layer's nodes come": func(c *plan.Config) {
			c.Sampler = graph.Ladies
		},
		"option mode hier does not train on typed graphs: its parts are of a graph without types": func(
			c *plan.Config) {
			c.Mode = hier.ModeHier
		},
		"option mode marius does not train on typed graphs: its parts are of a graph without types": func(
			c *plan.Config) {
			c.Mode = hier.ModeMarius
		},
		"the nodes have rows; leave it out": func(c *plan.Config) { c.Embed = "64" },
		"and Adam's moments, option embed-memory allows 1 MiB": func(c *plan.Config) {
			c.Model, c.Featureless, c.EmbedMemory = "rgcn", true, 1<<20
		},
		"sampler labor draws by the in-degree in each relation": func(c *plan.Config) {
			c.Sampler, c.RelationFanouts = graph.Labor, prepare.Together
		},
		"is no relation \"quotes\"":       func(c *plan.Config) { c.RelationFanouts = "quotes=1,1" },
		"give NAME=F1,F2 with a fanout":   func(c *plan.Config) { c.RelationFanouts = "cites=1" },
		"\"cites\" is there twice":        func(c *plan.Config) { c.RelationFanouts = "cites=1,1;cites=2,2" },
		"\"cites\": give NAME=F1,F2 with": func(c *plan.Config) { c.RelationFanouts = "cites" },
	} {
		cfg := typedConfig("rsage")
		set(&cfg)
		r := train(t, context.Background(), cfg, d, feat, s, 1, report.Observer{})
		require.ErrorContains(t, r.err, text)
	}
	cfg := typedConfig("rsage")
	r := train(t, context.Background(), cfg, untyped, feat1, s1, 1, report.Observer{})
	require.ErrorContains(t, r.err, "this graph has no types")
	cfg = small()
	cfg.RelationFanouts = "cites=1,1"
	r = train(t, context.Background(), cfg, untyped, feat1, s1, 1, report.Observer{})
	require.ErrorContains(t, r.err, "one type and one relation")
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	for text, o := range map[string]LoaderOptions{
		"node 825 is not in type paper of dataset": {Nodes: []int64{825}},
		"node 30 is not in type venue of dataset":  {Nodes: []int64{30}, Type: "venue"},
		`no nodes of type "x"; its types are paper, author, institution, venue`: {Nodes: []int64{0},
			Type: "x"},
		"split train has nodes of type paper, not venue": {Split: "train", Type: "venue"},
	} {
		_, err = OpenLoader(context.Background(), small(), prepare.Inputs{Dev: dev, Dataset: d,
			SSDs: s.ssds}, o, report.Observer{})
		require.ErrorContains(t, err, text)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	_, err = OpenLoader(context.Background(), small(), prepare.Inputs{Dev: dev, Dataset: untyped,
		SSDs: s1.ssds}, LoaderOptions{Nodes: []int64{0}, Type: "x"}, report.Observer{})
	require.ErrorContains(t, err, "its types are node")
}

// A loader's mini-batches of a typed graph are those that training has, in every mode; its rows and
// labels are the dataset's.
func TestTypedLoaderIsTraining(t *testing.T) {
	d, feat := types.open(t)
	s := bind(t, d, 2, "")
	labels, err := d.Labels()
	require.NoError(t, err)
	rb := int64(d.Meta.RowBytes())
	for _, mode := range tiers.Catalog.Names() {
		cfg := typedConfig("rsage")
		cfg.Mode, cfg.NoEval, cfg.RelationFanouts = mode, true, "cites=4,1;rev_writes=2,0"
		if runsOn(cfg, &diskgnn.System) {
			cfg.PackedDir = filepath.Join(t.TempDir(), "packed")
		}
		dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
		untrained := cfg.Traits().Untyped != "" || runsOn(cfg, &hier.System)
		var want map[[2]int]string
		if !untrained {
			want = trained(t, cfg, in)
		}
		plain := cfg
		plain.Model = "" // a loader has no use for it
		l, err := OpenLoader(context.Background(), plain, in, LoaderOptions{Split: "train",
			Shuffle: true, AllLabels: true}, report.Observer{})
		if untrained {
			require.Equal(t, errs.Capability, errs.ClassOf(err), mode)
			require.NoError(t, dev.Close())
			continue
		}
		require.NoError(t, err, mode)
		got := map[[2]int]string{}
		for epoch := range 2 {
			require.NoError(t, l.Epoch(context.Background(), epoch, from(l, 0),
				func(b *Loaded) error {
					got[[2]int{b.Epoch, b.Index}] = b.content()
					for i, v := range b.Nodes {
						require.Equal(t, feat[v*rb:][:rb], b.Rows[int64(i)*rb:][:rb])
					}
					requireLabels(t, labels, b)
					return nil
				}), mode)
		}
		require.Equal(t, want, got, mode)
		require.NoError(t, l.Close())
		require.NoError(t, dev.Close())
	}
}

// requireLabels checks that a batch has the labels of its papers, which are the first type.
func requireLabels(t *testing.T, labels []int32, b *Loaded) {
	t.Helper()
	n := 0
	for h := range b.TypeEnd {
		lo, hi := b.TypeRange(h, 0)
		for _, v := range b.Nodes[lo:hi] {
			require.Equal(t, labels[v], b.Labels[n])
			n++
		}
	}
	require.Len(t, b.Labels, n)
}

// Seeds may be of any type; caches are then filled by what these need.
func TestTypedLoaderOfOtherTypes(t *testing.T) {
	d, feat := types.open(t)
	s := bind(t, d, 2, "")
	labels, err := d.Labels()
	require.NoError(t, err)
	rb, authors := int64(d.Meta.RowBytes()), d.Meta.FirstRow(1)
	nodes := []int64{5, 599, 0, 5, 42, 17, 300}
	var first string
	for i, mode := range []string{"helios", "gids", "ginex", "diskgnn", "cpu", "inmem"} {
		for _, hotness := range []string{"", plan.HotnessPageRank} {
			cfg := small()
			cfg.Mode, cfg.Batch, cfg.Hotness = mode, 3, hotness
			dev, err := cuda.NewHost(cuda.HostOptions{SMs: 1 + i%3})
			require.NoError(t, err)
			if cfg.Check() != nil { // the mode has no hotness
				require.NoError(t, dev.Close())
				continue
			}
			l, err := OpenLoader(context.Background(), cfg, prepare.Inputs{Dev: dev, Dataset: d,
				SSDs: s.ssds}, LoaderOptions{Nodes: nodes, Type: "author", Anew: true,
				AllLabels: i%2 == 0, Any: true}, report.Observer{})
			require.NoError(t, err, mode)
			all, places := "", 0
			for epoch := range 2 {
				require.NoError(t, l.Epoch(context.Background(), epoch, []int{2, 0, 1},
					func(b *Loaded) error {
						all += b.content()
						for i, v := range b.Nodes {
							require.Equal(t, feat[v*rb:][:rb], b.Rows[int64(i)*rb:][:rb])
						}
						for i, v := range b.Nodes[:b.Seeds] {
							require.Equal(t, nodes[3*b.Index+i], v-authors)
						}
						if places += len(b.Nodes); i%2 == 0 {
							requireLabels(t, labels, b)
						} else {
							require.Empty(t, b.Labels)
						}
						return nil
					}))
			}
			require.Greater(t, places, 6*len(nodes), "neighbours came, too")
			if first == "" {
				first = all
			}
			require.Equal(t, first, all, mode)
			require.NoError(t, l.Close())
			require.NoError(t, dev.Close())
		}
	}
}

// On a GPU, which samples itself unless the lists are on storage, a typed graph has the host's
// mini-batches, rows and losses.
func TestTypedOnGPU(t *testing.T) {
	d, feat := graphSpec{nodes: 300, dim: 16, degree: 5, train: 0.25, kind: "typed"}.open(t)
	s := bind(t, d, 2, "")
	s.off(t)
	s.poll = true
	s.power(t, "")
	for i, model := range gnn.TypedArchs() {
		cfg := onFibers()
		cfg.Model, cfg.Epochs, cfg.GPUCache, cfg.CPUCache = model, 1, percent(10), percent(20)
		if i > 0 {
			cfg.Mode, cfg.Topology = static.ModeInmem, plan.TopologySSD
		}
		host := train(t, context.Background(), cfg, d, feat, s, 2, report.Observer{})
		dev, _ := gpu(t, "")
		g := trainOn(t, context.Background(), dev, cfg, d, feat, s, report.Observer{})
		near(t, host, g)
	}
}
