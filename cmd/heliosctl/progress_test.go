package main

import (
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/ui"
)

// Progress of several runs never goes back, whatever passes are between their epochs and however
// long each run is, and ends where all of them have trained. So the time left is that of the whole.
func TestProgressOfRuns(t *testing.T) {
	p := &progressOfRuns{ui: ui.New(io.Discard, io.Discard), whole: "compare", runs: 4}
	p.ui.Quiet = true
	last, shares := int64(0), []float64{}
	step := func(stage string, done, total int) {
		p.step(stage, done, total)
		require.GreaterOrEqual(t, p.done, last, stage)
		last = p.done
	}
	for run, batches := range []int{10, 10, 6, 8} { // a variant with other mini-batches
		if run == 1 { // it is left out
			p.end(2)
			continue
		}
		p.begin(fmt.Sprint("v", run), 2)
		step("presample", 1, 1)
		for epoch := range 2 {
			for i := range batches {
				step(fmt.Sprintf("modelled epoch %d", epoch+1), i+1, batches)
			}
			require.Equal(t, fmt.Sprintf("v%d: modelled epoch %d of 2", run, epoch+1), p.part)
			step("modelled validate", 1, 3)
			require.Equal(t, fmt.Sprintf("v%d: modelled validate", run), p.part)
		}
		shares = append(shares, float64(p.done)/float64(p.total))
		p.end(3 - run)
	}
	require.Equal(t, []float64{20. / 80, 32. / 44, 1}, shares)
}

// One run has its epochs' progress as the library tells it.
func TestProgressOfOneRun(t *testing.T) {
	p := &progressOfRuns{ui: ui.New(io.Discard, io.Discard), whole: "train", runs: 1, epochs: 3}
	p.ui.Quiet = true
	p.step("sample", 5, 9)
	require.Zero(t, p.total, "presampling is no part of it")
	p.step("epoch 2", 4, 10)
	require.Equal(t, []any{int64(14), int64(30), "epoch 2 of 3"}, []any{p.done, p.total, p.part})
	p.step("validate", 1, 2)
	require.Equal(t, []any{int64(14), int64(30), "validate"}, []any{p.done, p.total, p.part})
}
