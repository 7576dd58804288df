package gnn

import (
	"encoding/json"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/metrics"
)

// lossCase is a case of testdata/losses.json, which PyTorch has computed.
type lossCase struct {
	Loss          string
	Rows, Cols    int64
	Outputs, Grad []float32
	Targets       []*float32 // null: none
	Weights       []float32
	Smoothing     float64
	Want          float64
}

func lossCases(t testing.TB) []lossCase {
	text, err := os.ReadFile("testdata/losses.json")
	require.NoError(t, err)
	var all struct{ Cases []lossCase }
	require.NoError(t, json.Unmarshal(text, &all))
	require.NotEmpty(t, all.Cases)
	return all.Cases
}

// targets are as a step takes them.
func (c *lossCase) targets() (classes []int32, dense []float32) {
	for _, x := range c.Targets {
		switch {
		case c.Loss == softmaxLoss.Name:
			classes = append(classes, int32(*x))
		case x == nil:
			dense = append(dense, float32(math.NaN()))
		default:
			dense = append(dense, *x)
		}
	}
	return classes, dense
}

// Every loss and its gradient are PyTorch's, with weights, smoothing and targets that are missing.
func TestLossesOfPyTorch(t *testing.T) {
	seen := map[string]int{}
	dev := host(t, 2)
	stream, on := newStream(t, dev), newLauncher(dev)
	for _, c := range lossCases(t) {
		seen[c.Loss]++
		l, err := lossOf(c.Loss)
		require.NoError(t, err)
		n := c.Rows * c.Cols
		grad, out := alloc(t, dev, n*4), alloc(t, dev, 32)
		outputs := floats(t, dev, c.Outputs)
		weights := cuda.DevicePtr(0)
		if len(c.Weights) > 0 {
			weights = floats(t, dev, c.Weights).Ptr()
		}
		classes, dense := c.targets()
		targets := floats(t, dev, dense)
		if classes != nil {
			targets = alloc(t, dev, c.Rows*4)
			copy(cuda.View[int32](targets.Ptr(), c.Rows), classes)
		}
		losses, rows := alloc(t, dev, c.Rows*8), alloc(t, dev, c.Rows*4)
		for _, name := range l.kernels() {
			k, err := on.kernel(name)
			require.NoError(t, err)
			q, grid := &stepSink{stream: stream}, cuda.LaunchConfig{Blocks: 2, Threads: 256}
			if l.dense() {
				err = put(q, k, grid, denseParams{outputs.Ptr(), targets.Ptr(), grad.Ptr(),
					losses.Ptr(), rows.Ptr(), out.Ptr(), weights, c.Rows, c.Cols, c.Smoothing})
			} else {
				err = put(q, k, grid, xentParams{outputs.Ptr(), targets.Ptr(), grad.Ptr(),
					losses.Ptr(), rows.Ptr(), out.Ptr(), weights, c.Rows, c.Cols, c.Smoothing})
			}
			require.NoError(t, err)
		}
		require.NoError(t, stream.Synchronize(t.Context()))
		got := cuda.View[outcome](out.Ptr(), 1)[0]
		require.InDelta(t, c.Want, got.Loss, 1e-6, "%s of %d × %d", c.Loss, c.Rows, c.Cols)
		require.InDeltaSlice(t, c.Grad, f32(grad)[:n], 1e-6, c.Loss)
		checkRight(t, &c, got, cuda.View[int32](rows.Ptr(), c.Rows))
	}
	for _, l := range losses {
		require.Positive(t, seen[l.Name], "loss %s has no case in testdata/losses.py", l.Name)
	}
}

// checkRight counts the rows that have targets, and of labels those that are right.
func checkRight(t *testing.T, c *lossCase, got outcome, right []int32) {
	if c.Loss == softmaxLoss.Name {
		return // TestInfer does
	}
	counted, correct, targets := int64(0), int64(0), 0
	for i := range c.Rows {
		some, all := false, true
		for k := i * c.Cols; k < (i+1)*c.Cols; k++ {
			if c.Targets[k] != nil {
				targets++
				some, all = true, all && (*c.Targets[k] > 0.5) == (c.Outputs[k] > 0)
			}
		}
		if some {
			counted++
		}
		require.Equal(t, some && all, right[i] == 1)
		correct += int64(right[i])
	}
	require.Equal(t, []any{counted, correct, float64(targets)},
		[]any{got.Counted, got.Correct, got.Mass})
}

// A loss learns the targets that it is for, and others are refused by name.
func TestLossFor(t *testing.T) {
	for target, want := range map[metrics.Target]string{metrics.Classes: "softmax",
		metrics.Labels: "bce", metrics.Numbers: "mse"} {
		name, err := LossFor(target, "")
		require.NoError(t, err)
		require.Equal(t, want, name)
	}
	name, err := LossFor(metrics.Numbers, "huber")
	require.NoError(t, err)
	require.Equal(t, "huber", name)
	_, err = LossFor(metrics.Classes, "bce")
	require.ErrorContains(t, err, "loss bce does not learn classes")
	require.ErrorContains(t, err, "choose softmax")
	_, err = LossFor(metrics.Numbers, "softmax")
	require.ErrorContains(t, err, "choose mse or mae or huber")
	_, err = NewModel(host(t, 1), ModelConfig{InDim: 2, Classes: 2, Layers: 1,
		LossSettings: LossSettings{Loss: "mse", LabelSmoothing: 0.1}})
	require.ErrorContains(t, err, "label-smoothing is for classes and labels")
}

// lossRun trains a few steps and returns the parameters' hash.
func lossRun(t *testing.T, sms int, loss LossSettings, weights []float32) (sha string, first,
	last float64) {
	c := rigConfig{nodes: 60, edges: 300, dim: 6, classes: 4, seeds: 30, fanouts: []int{4, 3},
		sms: sms}
	g := newRig(t, c)
	labels := g.labels.Ptr()
	if l, _ := lossOf(loss.Loss); l.dense() {
		dense := make([]float32, 30*4)
		for i := range dense {
			switch {
			case i%7 == 3:
				dense[i] = float32(math.NaN())
			case i%3 == 0:
				dense[i] = 1
			}
		}
		labels = floats(t, g.dev, dense).Ptr()
	}
	m := g.model(t, ModelConfig{ModelSettings: ModelSettings{Model: DefaultArch, Hidden: 8},
		LossSettings: loss, InDim: 6, Classes: 4, Layers: 2, Seed: 5, Weights: weights})
	for i := range 30 {
		require.NoError(t, m.Train(g.stream, g.mb, g.x.Ptr(), labels, Step{LR: 0.02, Batch: i}))
		l, _, _, err := m.Outcome(g.ctx, g.stream)
		require.NoError(t, err)
		if i == 0 {
			first = l
		}
		last = l
	}
	sha, err := m.ParamsSHA256()
	require.NoError(t, err)
	return sha, first, last
}

// Every loss falls, to the same parameters on any number of workers; weights and smoothing change
// them.
func TestLossesLearn(t *testing.T) {
	var seen []string
	for _, name := range append([]string{""}, Losses()...) {
		set := LossSettings{Loss: name}
		sha, first, last := lossRun(t, 1, set, nil)
		require.Less(t, last, 0.8*first, name)
		again, _, _ := lossRun(t, 3, set, nil)
		require.Equal(t, sha, again, name)
		if name == "softmax" {
			require.Equal(t, seen[0], sha, "the default")
			continue
		}
		seen = append(seen, sha)
		if l, err := lossOf(name); err == nil && slices.Contains(smoothed, l) {
			ones, _, _ := lossRun(t, 2, set, []float32{1, 1, 1, 1})
			if l.dense() {
				require.Equal(t, sha, ones, "weights of 1")
			}
			other, _, _ := lossRun(t, 2, set, []float32{1, 2, 1, 0.5})
			set.LabelSmoothing = 0.1
			smooth, _, _ := lossRun(t, 2, set, nil)
			seen = append(seen, other, smooth)
		}
	}
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(seen))), len(seen), "all differ")
}
