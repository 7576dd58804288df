// Package sched trains a graph neural network out of core, evaluates it and loads mini-batches for
// others, on package engine. Package tiers lists the systems that keep rows.
package sched

import (
	"context"
	"fmt"

	"helios/cuda"
	"helios/gnn"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers"
)

// runner is a run of training, evaluation or loading: an engine, and the model that its
// mini-batches are for.
type runner struct {
	*engine.Engine
	config gnn.ModelConfig // of the model; noModel: it has none
	model  *gnn.Model
	blas   cuda.BLAS // nil: our kernels
	copier *paramCopier
	// replicas are the devices that train, the engine's own first; sumS adds their gradients.
	replicas []*replica
	sumS     cuda.Stream
	// collective adds the replicas' gradients in place of the tree; nil: none.
	collective cuda.Collective
	others     *others            // nil: this process has all shards of a step
	summed     cuda.Buffer        // pinned, for others
	tuned      *report.TuneResult // nil: not yet, or not asked for
}

// newRunner opens an engine and a model. On error nothing stays open; the runner that comes with it
// says only what was read until then.
func newRunner(ctx context.Context, cfg plan.Config, in prepare.Inputs, obs report.Observer,
	mc gnn.ModelConfig) (*runner, error) {
	e := &runner{Engine: engine.NewEngine(cfg), config: mc, others: newOthers(ctx, cfg, in)}
	if mc.Layers > 0 { // not noModel
		e.config.Schema = prepare.SchemaOf(&in.Dataset.Meta)
		if err := mc.CheckSchema(e.config.Schema != nil); err != nil {
			return e, err
		}
	}
	return e, e.OpenFor(ctx, consuming{e}, tiers.Of(&cfg).Run, cfg, in, obs)
}

// consuming is a runner as its engine's consumer.
type consuming struct{ e *runner }

func (c consuming) Open() error {
	if c.e.config.Layers == 0 { // noModel
		return nil
	}
	return openModel(c.e, c.e.config)
}

func (c consuming) MakeRoom(rows int64) (err error) {
	e := c.e
	if e.model != nil {
		if e.Wide, err = e.NewWidener(e.Device, e.RowType, rows); err != nil {
			return err
		}
	}
	for _, r := range otherReplicas(e) {
		if r.wide, err = e.NewWidener(r.dev, e.RowType, rows); err != nil {
			return fmt.Errorf("replica %d on %s: %w", r.number, r.dev.Info().Name, err)
		}
	}
	return nil
}

func (c consuming) Streams() (all []cuda.Stream) {
	for _, r := range otherReplicas(c.e) {
		all = append(all, r.own)
	}
	return all
}

func (c consuming) Mirrors() bool {
	for _, r := range otherReplicas(c.e) {
		if r.mirror != nil {
			return true
		}
	}
	return false
}

func (c consuming) WorkspaceBytes(hopEnd, edges []int64) int64 {
	if c.e.model == nil {
		return 0
	}
	return c.e.model.WorkspaceBytes(hopEnd, edges)
}

func (c consuming) ReleaseWorkspace() error {
	if c.e.model == nil {
		return nil
	}
	return c.e.model.ReleaseWorkspace()
}

// noModel is for a run that hands mini-batches on in place of training with them.
var noModel gnn.ModelConfig

// openModel makes the model, its copies, and what its steps need.
func openModel(e *runner, mc gnn.ModelConfig) (err error) {
	if err := e.openBLAS(); err != nil {
		return err
	}
	mc.Precision, mc.BLAS = e.Config.ProductPrecision(), e.blas
	if e.model, err = gnn.NewModel(e.Device, mc); err != nil {
		return err
	}
	e.OnClose(e.model.Close)
	e.OnClose(func() error {
		if e.summed == nil {
			return nil
		}
		return e.summed.Free()
	})
	if err := e.openReplicas(mc); err != nil {
		return err
	}
	if err := e.openSteps(); err != nil {
		return err
	}
	if e.copier, err = newParamCopier(e.Device, e.TrainStream, e.model); err != nil {
		return err
	}
	e.OnClose(e.copier.close)
	return nil
}

// otherReplicas returns the replicas beside the first.
func otherReplicas(e *runner) []*replica { return e.replicas[min(1, len(e.replicas)):] }
