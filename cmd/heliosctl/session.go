package main

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/timeline"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// runArgs hold what verbs that run a model, or a part of that, have in common.
type runArgs struct {
	datasetArgs
	deviceArgs
	ssdArgs
	outputs
	noEdges  bool        `option:"no-edges" group:"Model" use:"setting" usage:"drop the graph's edges: what the model learns from a node's own features"`
	timeline string      `option:"timeline" use:"aside" arg:"FILE" usage:"write what each operator of each mini-batch did when to FILE, a Chrome trace (open it in ui.perfetto.dev)"`
	cfg      plan.Config `options:"in"`
}

// session holds what a verb works on: a dataset, a device, the SSDs and the file of --timeline, as
// far as the verb has them.
type session struct {
	*env
	*runArgs
	prepare.Inputs
	set     *ssdSet // nil where no SSD is opened
	closers []func() error
}

// settle completes the settings with their defaults.
func (a *runArgs) settle() { a.cfg = a.cfg.WithDefaults() }

// orAuto leaves the mode to the machine, where none is given. Faults strike the queues of the
// default mode.
func (a *runArgs) orAuto() {
	switch {
	case a.cfg.Mode == "" && a.faults != nil:
		a.cfg.Mode = plan.DefaultMode
	case a.cfg.Mode == "":
		a.cfg.Mode = plan.ModeAuto
	}
}

// openSession opens all that a run of a model works on. The configuration in a gets the recorder of
// --timeline.
func openSession(ctx context.Context, e *env, a *runArgs) (_ *session, err error) {
	s := &session{env: e, runArgs: a}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	tl, err := openTimeline(&a.outputs, a.timeline, timeline.Wall)
	if err != nil {
		return nil, err
	}
	s.closers = append(s.closers, tl.close)
	a.cfg.Timeline = tl.rec
	err = s.openInputs(ctx)
	if err == nil && a.cfg.Mode == plan.ModeAuto && slices.ContainsFunc(s.set.Bound,
		func(d state.SSD) bool { return d.Model != "" }) {
		a.cfg.Mode = plan.DefaultMode // files would be read without the models' times
	}
	return s, err
}

// openGraph opens what a run works on without the SSDs. hostOnly is as for deviceArgs.open.
func openGraph(e *env, a *runArgs, hostOnly string) (_ *session, err error) {
	s := &session{env: e, runArgs: a}
	if err := s.openGraph(hostOnly); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *session) openGraph(hostOnly string) error {
	d, err := s.datasetArgs.open(s.env)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, d.Close)
	if d.Meta.Classes < 1 {
		return errs.New(errs.Usage,
			"dataset %s has no labels, which a model needs; import it again with --labels FILE",
			d.Meta.Name)
	}
	if s.noEdges {
		d = d.WithoutEdges()
		s.closers = append(s.closers, d.Close)
	}
	s.Dataset = d
	if s.cfg.Replicas > 1 && hostOnly == "" {
		all, err := s.deviceArgs.openAll(s.env, s.cfg.Workers, s.cfg.Replicas)
		if err != nil {
			return err
		}
		for _, dev := range all {
			s.closers = append(s.closers, dev.Close)
		}
		s.Dev, s.More = all[0], all[1:]
		return nil
	}
	s.Dev, err = s.deviceArgs.open(s.env, s.cfg.Workers, hostOnly)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, s.Dev.Close)
	return nil
}

// openInputs opens dataset, device and SSDs.
func (s *session) openInputs(ctx context.Context) error {
	first, err := s.ssdsFirst()
	if err != nil {
		return err
	}
	o := &ssdOpener{env: s.env, ssdArgs: s.ssdArgs, stackFlag: "mode", stacks: []string{s.cfg.Mode}}
	if s.cfg.IOStack != "" {
		o.stackFlag, o.stacks = "io-stack", []string{s.cfg.IOStack}
	}
	open := func() (err error) {
		if s.set, err = o.open(ctx); err == nil {
			s.SSDs = s.set.SSDs
		}
		return err
	}
	if first {
		// Software SSDs beside those of vfio-pci look at their doorbells: kernels of a GPU could
		// not wake them.
		o.pollDoorbells = true
		if err := open(); err != nil {
			return err
		}
		// Their end comes before the device's all the same: reads may be on their way into its
		// memory.
		defer func() { s.closers = append(s.closers, s.set.Close) }()
		return s.openGraph("")
	}
	if err := s.openGraph(""); err != nil {
		return err
	}
	o.pollDoorbells, o.data = ringsDoorbells(s.Dev), s.Dataset
	if err := open(); err != nil {
		return err
	}
	s.closers = append(s.closers, s.set.Close)
	return nil
}

// ssdsFirst reports whether SSDs are opened before the device: where vfio-pci holds one that a GPU
// may be told of. A process that dies has its files closed in the order of their numbers, and
// closing a VFIO device ends its DMA: that must come before the driver gives the GPU's memory to
// somebody else.
func (s *session) ssdsFirst() (bool, error) {
	if kind, _, err := parseDeviceList(cmp.Or(s.device, "auto")); err != nil || kind == "host" {
		return false, err
	}
	st, err := s.store.Load()
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(st.SSDs,
		func(d state.SSD) bool { return d.Kind == state.KindVFIO }), nil
}

// close ends what the session has opened, what was opened last first.
func (s *session) close() error {
	var err error
	for _, f := range slices.Backward(s.closers) {
		err = errors.Join(err, f())
	}
	s.closers = nil
	return err
}

// ended reports what became of a run's SSDs: injected faults, modelled times and, where the run
// failed with err, trouble. io is nil where nothing was read.
func (s *session) ended(out *results, io *report.IOResult, err error) {
	showFaults(s.env, s.set, out)
	if io == nil {
		return
	}
	s.set.markModelled(io, s.cfg)
	if err != nil {
		showTrouble(s.env, *io, out)
	}
}
