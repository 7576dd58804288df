package gnn

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/shardtree"
)

// shardRigs are mini-batches of one graph, of different sizes, and the weight of each.
func shardRigs(t testing.TB, n int, c rigConfig) (rigs []*rig, weights []float32) {
	all := 0
	var counted []int
	for s := range n {
		c.batchSeeds = nil
		for i := range 3 + 2*s {
			c.batchSeeds = append(c.batchSeeds, int64((7*s+i)%c.nodes))
		}
		g := newRig(t, c)
		k := 0
		for _, y := range g.y {
			if y >= 0 {
				k++
			}
		}
		rigs, counted, all = append(rigs, g), append(counted, k), all+k
	}
	for _, k := range counted {
		weights = append(weights, float32(float64(k)/float64(all)))
	}
	return rigs, weights
}

// sharded makes a model with room for a step of n shards.
func (g *rig) sharded(t testing.TB, cfg ModelConfig, n int) *Model {
	m := g.model(t, cfg)
	require.NoError(t, m.OpenShards(shardtree.Room(n, 0, n), 0))
	return m
}

// gradients runs shards first to end-1 of a step through a model on the stream of on.
func gradients(t testing.TB, m *Model, on *rig, rigs []*rig, weights []float32, first, end int,
	st Step) {
	for s := first; s < end; s++ {
		g := rigs[s]
		st.Batch = s
		require.NoError(t, m.Gradient(on.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st,
			Shard{s, len(rigs), weights[s]}))
	}
	require.NoError(t, on.stream.Synchronize(on.ctx))
}

// The gradient of a step is that of the mean loss over all labelled seeds of its shards, for every
// Arch and Norm, against central differences of the float64 reference.
func TestGradientOfShards(t *testing.T) {
	for _, kind := range Archs() {
		for n, norm := range Norms() {
			t.Run(kind+"/"+norm, func(t *testing.T) {
				rigs, weights := shardRigs(t, 3, rigConfig{nodes: 30, edges: 120, dim: 4,
					classes: 3, fanouts: []int{3, 2}, sms: 2})
				cfg := withOptions(ModelConfig{
					ModelSettings: ModelSettings{Model: kind, Hidden: 4, Dropout: 0.2, Norm: norm},
					InDim:         4,
					Classes:       3,
					Layers:        2,
					Seed:          uint64(9 + n),
				},
					ownOptions{true, 2, 0.2})
				m := rigs[0].sharded(t, cfg, 3)
				for _, p := range m.Params() { // no sum is 0, where ReLU has a kink
					for i := range f32(p.Value) {
						if p.Rows == 1 {
							f32(p.Value)[i] += 0.1 * float32(i+1)
						}
					}
				}
				params, st := paramValues(m), Step{Seed: 5, Epoch: 2}
				gradients(t, m, rigs[0], rigs, weights, 0, 3, st)
				require.Equal(t, params, paramValues(m), "a gradient changes no parameter")
				roots := m.Roots()
				require.Len(t, roots, 1)
				require.Equal(t, shardtree.Node{First: 0, Count: 3}, roots[0].Node)
				mean := func() (loss float64) {
					for s, g := range rigs {
						shard := st
						shard.Batch = s
						_, _, l, _, _ := reference(g, cfg, params, &shard)
						loss += float64(weights[s]) * l
					}
					return loss
				}
				checked, offset := 0, int64(0)
				for _, p := range m.Params() {
					grad := cuda.View[float32](roots[0].At+cuda.DevicePtr(4*offset),
						int64(p.Rows*p.Cols))
					offset += align(int64(p.Rows * p.Cols))
					if strings.Contains(p.Name, ".running_") {
						continue
					}
					v := params[p.Name].v
					for i, old := range v {
						const eps = 1e-7
						v[i] = old + eps
						up := mean()
						v[i] = old - eps
						num := (up - mean()) / (2 * eps)
						v[i] = old
						require.InDelta(t, num, grad[i], 3e-6+1e-4*math.Abs(num), "%s[%d]",
							p.Name, i)
						if math.Abs(num) > 1e-4 {
							checked++
						}
					}
				}
				require.Greater(t, checked, 10, "gradients that are not 0")
			})
		}
	}
}

// Steps of one shard are those of Train, to the bit.
func TestOneShardIsTrain(t *testing.T) {
	for _, norm := range Norms() {
		g := newRig(t, rigConfig{nodes: 60, edges: 300, dim: 6, classes: 4, seeds: 20,
			fanouts: []int{4, 3}, sms: 2})
		cfg := ModelConfig{
			ModelSettings: ModelSettings{Model: "gcn", Hidden: 8, Dropout: 0.3, Norm: norm},
			InDim:         6,
			Classes:       4,
			Layers:        2,
			Seed:          2,
		}
		whole, shard := g.model(t, cfg), g.sharded(t, cfg, 1)
		for i := range 4 {
			st := Step{Seed: 3, Batch: i, LR: 0.01, WeightDecay: 0.1, Decoupled: i%2 == 0}
			require.NoError(t, whole.Train(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st))
			require.NoError(t, shard.Gradient(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), st,
				Shard{0, 1, 1}))
			loss, correct, counted, err := shard.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			require.NoError(t, shard.Apply(g.stream, st))
			wantLoss, wantCorrect, wantCounted, err := whole.Outcome(g.ctx, g.stream)
			require.NoError(t, err)
			require.Equal(t, []any{wantLoss, wantCorrect, wantCounted},
				[]any{loss, correct, counted})
			require.Equal(t, shaOf(t, whole), shaOf(t, shard), "%s, step %d", norm, i)
			require.Equal(t, whole.AdamStep(), shard.AdamStep())
			require.Empty(t, shard.Roots())
		}
	}
}

func shaOf(t testing.TB, m *Model) string {
	sha, err := m.ParamsSHA256()
	require.NoError(t, err)
	return sha
}

// However many models share a step's shards, and on however many workers, they come to the same
// parameters, running means included.
func TestShardsOnSeveralModels(t *testing.T) {
	const shards = 5
	cfg := ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 8, Dropout: 0.3, Norm: "batch"},
		InDim:         6,
		Classes:       4,
		Layers:        2,
		Seed:          2,
	}
	shas := map[string]string{}
	for _, parts := range []int{1, 2, 3, 5} {
		for _, sms := range []int{1, 3} {
			rigs, weights := shardRigs(t, shards, rigConfig{nodes: 60, edges: 300, dim: 6,
				classes: 4, fanouts: []int{4, 3}, sms: sms})
			on := rigs[0]
			var models []*Model
			for range parts {
				models = append(models, on.sharded(t, cfg, shards))
			}
			for step := range 3 {
				st := Step{Seed: 3, Epoch: step, LR: 0.01, WeightDecay: 0.1}
				var all []shardtree.Node
				var sums []cuda.DevicePtr
				for p, m := range models {
					first, end := shardtree.Share(shards, shards, p, parts)
					gradients(t, m, on, rigs, weights, first, end, st)
					for _, r := range m.Roots() {
						all, sums = append(all, r.Node), append(sums, r.At)
						for range shardtree.Joins(all, shards) {
							k := len(all) - 1
							require.NoError(t, m.Add(on.stream, sums[k-1], sums[k-1], sums[k]))
							all[k-1].Count += all[k].Count
							all, sums = all[:k], sums[:k]
						}
					}
				}
				require.Equal(t, []shardtree.Node{{First: 0, Count: shards}}, all)
				for p, m := range models {
					to := m.SetSum(shards)
					if p > 0 {
						require.NoError(t, on.stream.Copy(to, sums[0], m.GradientBytes()))
					}
				}
				for _, m := range models {
					require.NoError(t, m.Apply(on.stream, st))
				}
				require.NoError(t, on.stream.Synchronize(on.ctx))
			}
			for _, m := range models {
				shas[shaOf(t, m)] = fmt.Sprint(parts, sms)
			}
		}
	}
	require.Len(t, shas, 1, "%v", shas)
}

// A shard that is done again counts once; steps that lack a shard, or whose shards come in another
// order, are refused.
func TestShardsInOrder(t *testing.T) {
	rigs, weights := shardRigs(t, 4, rigConfig{nodes: 60, edges: 300, dim: 6, classes: 4,
		fanouts: []int{4, 3}})
	cfg := ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 8, Norm: "batch"},
		InDim:         6,
		Classes:       4,
		Layers:        2,
		Seed:          2,
	}
	g := rigs[0]
	once, again := g.sharded(t, cfg, 4), g.sharded(t, cfg, 4)
	gradients(t, once, g, rigs, weights, 0, 4, Step{})
	require.ErrorContains(t, again.Apply(g.stream, Step{}), "sum over 0 shards is not there")
	for s := range 4 {
		for range 2 {
			gradients(t, again, g, rigs, weights, s, s+1, Step{})
		}
		shard := Shard{s + 2, 4, 1}
		require.ErrorContains(t, again.Gradient(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{},
			shard), fmt.Sprintf("shard %d of 4 comes behind shard %d of 4", s+2, s))
		if s < 3 {
			require.ErrorContains(t, again.Apply(g.stream, Step{}), "is not there")
		}
	}
	st := Step{LR: 0.1}
	require.NoError(t, once.Apply(g.stream, st))
	require.NoError(t, again.Apply(g.stream, st))
	require.NoError(t, g.stream.Synchronize(g.ctx))
	require.Equal(t, shaOf(t, once), shaOf(t, again))

	// A part of a step, the sum of all from outside, and its last shard again, as after an Apply
	// that found no memory.
	whole, part := g.sharded(t, cfg, 4), g.sharded(t, cfg, 4)
	gradients(t, whole, g, rigs, weights, 0, 4, Step{})
	gradients(t, part, g, rigs, weights, 0, 2, Step{})
	require.NoError(t, g.stream.Copy(part.SetSum(4), whole.Roots()[0].At, whole.GradientBytes()))
	gradients(t, part, g, rigs, weights, 1, 2, Step{})
	require.NoError(t, part.Push(g.stream, Shard{1, 4, 1}, func(cuda.DevicePtr) error {
		return errors.New("put again")
	}))
	require.ErrorContains(t, part.Gradient(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{},
		Shard{1, 3, 1}), "shard 1 of 3 comes behind shard 3 of 4", "of another step")
	require.NoError(t, whole.Apply(g.stream, st))
	require.NoError(t, part.Apply(g.stream, st))
	gradients(t, part, g, rigs, weights, 0, 1, Step{}) // a step of its own again
	require.Equal(t, shardtree.Node{First: 0, Count: 1}, part.Roots()[0].Node)
	require.Equal(t, shaOf(t, whole), shaOf(t, part))

	tight := g.model(t, cfg)
	require.NoError(t, tight.OpenShards(1, 0))
	gradients(t, tight, g, rigs, weights, 2, 3, Step{})
	require.ErrorContains(t, tight.Gradient(g.stream, g.mb, g.x.Ptr(), g.labels.Ptr(), Step{},
		Shard{3, 4, 1}), "room for 1")
	tight.Forget()
	gradients(t, tight, g, rigs, weights, 0, 1, Step{})
}

// Running means move by the shards' weighted mean, once a step; a shard of one node leaves them
// where they are by its weight.
func TestRunningStatisticsOfShards(t *testing.T) {
	one := newRig(t, rigConfig{nodes: 40, edges: 0, dim: 5, classes: 3, seeds: 1,
		fanouts: []int{3, 3}})
	var two []*rig
	for range 2 {
		two = append(two, newRig(t, rigConfig{nodes: 40, edges: 150, dim: 5, classes: 3, seeds: 6 +
			3*len(two), fanouts: []int{3, 3}}))
	}
	all := append(two, one)
	weights := []float32{0.5, 0.25, 0.25}
	cfg := ModelConfig{
		ModelSettings: ModelSettings{Model: "sage", Hidden: 4, Norm: "batch"},
		InDim:         5,
		Classes:       3,
		Layers:        2,
		Seed:          3,
	}
	g := all[0]
	m := g.sharded(t, cfg, 3)
	named := func(name string) []float32 {
		for _, p := range m.Params() {
			if p.Name == "layer0.norm."+name {
				return append([]float32(nil), f32(p.Value)...)
			}
		}
		return nil
	}
	for range 3 {
		mean, variance := named("running_mean"), named("running_var")
		gradients(t, m, g, all, weights, 0, 3, Step{})
		require.NoError(t, m.Apply(g.stream, Step{}))
		require.NoError(t, g.stream.Synchronize(g.ctx))
		now, wide := named("running_mean"), named("running_var")
		for c := range now {
			average, spread := 0.25*float64(mean[c]), 0.25*float64(variance[c])
			for s, r := range two {
				sums := firstSums(r, m)
				mu, sq := 0.0, 0.0
				for _, row := range sums {
					mu += row[c] / float64(len(sums))
				}
				for _, row := range sums {
					sq += (row[c] - mu) * (row[c] - mu) / float64(len(sums)-1)
				}
				average += float64(weights[s]) * mu
				spread += float64(weights[s]) * sq
			}
			require.InDelta(t, 0.9*float64(mean[c])+0.1*average, now[c], 1e-6)
			require.InDelta(t, 0.9*float64(variance[c])+0.1*spread, wide[c], 1e-6)
		}
	}
}
