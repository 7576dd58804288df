package sched

import (
	"context"
	"fmt"
	"math"
	"time"

	"helios/cuda"
	"helios/gnn"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/shardtree"
	"helios/sched/engine"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/walk"
)

// An optimiser step covers Config.Shards mini-batches that follow each other, its shards; the last
// step of an epoch may have fewer. A step's gradient is that of the mean loss over all labelled
// seeds of its shards: each shard's is weighted by its share of them, known by its labels
// before anything trains, and package shardtree fixes the order of the sums.
//
// A walk may end between two shards of a step, where a superbatch ends or memory ran out. The
// sums so far stay with the model, and the next walk adds to them.

// hostRoot is a sum of shards' gradients where the CPU sees it.
type hostRoot struct {
	shardtree.Node
	Floats []float32
}

// steps take the mini-batches of a pass through optimiser steps.
type steps struct {
	e    *runner
	mine prepare.Order // that the pass walks
	all  prepare.Order // of the epoch, in all processes
	set  func(batch int) gnn.Step
	// figures are those of the steps of the pass.
	figures *report.StepFigures

	first   int // mini-batch of all that weights begin with; -1: none yet
	weights []float32
	summed  int // first mini-batch of the last step whose sum was whole; -1: none yet

	exchanged time.Duration // with other processes, so far
}

// newSteps is for one pass; set returns the settings of a mini-batch's step.
func (e *runner) newSteps(order prepare.Order, set func(batch int) gnn.Step,
	figures *report.StepFigures) *steps {
	return &steps{e: e, mine: order, all: order.Whole(), set: set, figures: figures, first: -1,
		summed: -1}
}

// note counts a step that parameters have taken, by a gradient of that norm.
func (s *steps) note(set gnn.Step, norm float64) error {
	if math.IsNaN(norm) || math.IsInf(norm, 0) {
		return engine.Applied(errs.New(errs.Failed,
			"batch %d: the norm of the gradient is %v: the parameters are lost; train with a smaller {lr}, or check the features",
			set.Batch, norm))
	}
	s.figures.Add(float64(set.LR), norm, s.e.Config.ClipNorm)
	return nil
}

// shardOf returns a mini-batch's place in its step, by its number in the epoch.
func (s *steps) shardOf(index int) (first int, at gnn.Shard) {
	limit := s.e.Config.Shards
	at.Index = index % limit
	first = index - at.Index
	at.Of = min(limit, s.all.Len()-first)
	return first, at
}

// ends reports whether a step ends with mini-batch i of the pass.
func (s *steps) ends(i int) bool {
	if i+1 == s.mine.Len() {
		return true
	}
	a, _ := s.shardOf(s.mine.Index(i))
	b, _ := s.shardOf(s.mine.Index(i + 1))
	return a != b
}

// weigh sets weights to those of the step of n shards from mini-batch first on: the share that each
// has of what the step's mean loss divides by: its labelled seeds, where none weighs more; without
// any, of its shards.
func (s *steps) weigh(first, n int) {
	if s.first == first {
		return
	}
	masses := make([]float64, n)
	for i := range masses {
		masses[i] = s.e.Targets.Mass(s.all.Seeds(first + i))
	}
	s.first, s.weights = first, sharesOf(masses)
}

// sharesOf returns what each of some numbers is of their sum; the same for all where that is 0.
func sharesOf(masses []float64) []float32 {
	shares, all := make([]float32, len(masses)), 0.0
	for _, m := range masses {
		all += m
	}
	for i, m := range masses {
		shares[i] = float32(1 / float64(len(masses)))
		if all > 0 {
			shares[i] = float32(m / all)
		}
	}
	return shares
}

// step trains with a mini-batch of the pass; with the last one of a step parameters change.
func (s *steps) step(op context.Context, b *engine.Slot) (engine.Outcome, error) {
	e := s.e
	index := s.mine.Index(b.Index)
	first, shard := s.shardOf(index)
	s.weigh(first, shard.Of)
	shard.Weight = s.weights[shard.Index]
	set := s.set(index)
	err := e.model.Gradient(e.TrainStream, b.Batch, e.Wide.Of(b.Features).Ptr(), b.Labels.Ptr(),
		set, shard)
	if err != nil {
		return engine.Outcome{}, err
	}
	mark, err := e.model.Mark(e.TrainStream)
	if err != nil {
		return engine.Outcome{}, engine.Applied(err)
	}
	out, err := outcomeOf(op, mark, e.Targets, b.Seeds)
	if err != nil {
		return out, engine.Applied(err)
	}
	if s.summed != first {
		e.others.add(index, len(b.Seeds), out)
	}
	if !s.ends(b.Index) {
		return out, nil
	}
	before := s.exchanged
	err = s.apply(op, first, shard.Of, set)
	out.Elsewhere = s.exchanged - before
	return out, err
}

// openSteps makes room for the gradients of a step's shards, where it has several.
func (e *runner) openSteps() error {
	n := e.Config.Shards
	if n == 1 {
		return nil
	}
	room, leaves, more := shardtree.PartRoom(n, e.Config.Rank, e.Config.Ranks), 0, 1
	if len(e.replicas) > 1 {
		leaves = walk.ReplicaPlaces
	}
	if e.collective != nil { // each adds up its own
		own := (n + len(e.replicas) - 1) / len(e.replicas)
		room, leaves = shardtree.PartRoom(own, 0, 1), 0
		more = room
	}
	if err := e.model.OpenShards(room, leaves); err != nil {
		return err
	}
	for _, r := range e.replicas[1:] {
		if err := r.model.OpenShards(more, leaves); err != nil {
			return fmt.Errorf("replica %d on %s: %w", r.number, r.dev.Info().Name, err)
		}
	}
	return nil
}

// sumOthers adds what other processes have of a step of n shards. It is the point at which a step's
// gradient is whole in this process, and no parameter has changed.
func (s *steps) sumOthers(op context.Context, n int) error {
	e := s.e
	if e.others == nil {
		return nil
	}
	bytes := e.model.GradientBytes()
	roots := e.model.Roots()
	size := bytes * int64(max(len(roots), 1))
	if e.summed == nil || e.summed.Size() < size {
		if e.summed != nil {
			if err := e.summed.Free(); err != nil {
				return err
			}
			e.summed = nil
		}
		var err error
		if e.summed, err = e.Device.Alloc(cuda.MemPinned, size, "sums of gradients"); err != nil {
			return err
		}
	}
	stage := e.summed
	mine := make([]hostRoot, len(roots))
	for i, r := range roots {
		offset := int64(i) * bytes
		if err := e.TrainStream.Copy(stage.Ptr()+cuda.DevicePtr(offset), r.At, bytes); err != nil {
			return err
		}
		mine[i] = hostRoot{r.Node, hostmem.View[float32](stage.Bytes()[offset : offset+bytes])}
	}
	if err := e.TrainStream.Synchronize(op); err != nil {
		return err
	}
	began := time.Now()
	err := e.others.sum(n, mine, hostmem.View[float32](stage.Bytes()[:bytes]))
	s.exchanged += time.Since(began)
	if err != nil {
		return err
	}
	return e.TrainStream.Copy(e.model.SetSum(n), stage.Ptr(), bytes)
}
