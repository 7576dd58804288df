package main

import (
	"context"
	"errors"

	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/bound"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/ssdmodel"
	"helios/internal/state"
	"helios/sched/plan"
)

// ssdArgs choose the SSDs of a verb that uses them, and how it uses them.
type ssdArgs struct {
	names  []string         `option:"ssds" there:"ssd" common:"yes" use:"setting" arg:"SSD[,SSD…]" usage:"use only SSD[,SSD…], by name, path or serial (default: all bound)"`
	faults *faultinject.Set `option:"fault" text:"yes" arg:"FAULT[;FAULT…]" usage:"inject FAULT[;FAULT…] between the program and its SSDs, such as \"error(op=read,lba=0-99,sct=2,sc=0x81,times=3)\" or \"lost(op=read)\"; list shows them all"`
}

// SetOption reads faults.
func (a *ssdArgs) SetOption(name, text string) (done bool, err error) {
	if name != "fault" {
		return false, nil
	}
	if text == "list" {
		return true, errListFaults
	}
	if a.faults = nil; text == "" {
		return true, nil
	}
	if a.faults, err = faultinject.Parse(text); err != nil {
		err = errs.New(errs.Usage, "{fault}: %w", err)
	}
	return true, err
}

// errListFaults ends a verb that has --fault list: the catalogue is printed and the verb does
// nothing.
var errListFaults = errors.New("the faults are listed")

// faultLine is a fault that can be injected.
type faultLine struct {
	Name    string `json:"name"`
	During  string `json:"during"`
	Fault   string `json:"fault"` // what --fault takes
	What    string `json:"what"`
	Outcome string `json:"outcome"`
	Class   string `json:"class"`
}

// listFaults prints the faults that have a documented outcome.
func listFaults(e *env) error {
	rows := [][]string{}
	for _, f := range faultinject.Catalogue() {
		if err := e.ui.Event("fault", faultLine{f.Name, string(f.During), f.Fault, f.What, f.Outcome,
			string(f.Class)}); err != nil {
			return err
		}
		rows = append(rows, []string{f.Fault, string(f.During), string(f.Class),
			f.What + ": " + f.Outcome})
	}
	e.ui.Table([]string{"--fault", "while", "class", "what happens: outcome"}, rows)
	return nil
}

// ssdSet is the SSDs that a verb has opened.
type ssdSet struct {
	*bound.Set
	faults *faultinject.Set
}

// ssdOpener brings bound SSDs up for a verb.
type ssdOpener struct {
	*env
	ssdArgs
	// stacks are the I/O stacks that will read the SSDs, and of which flag that follows; with
	// stackFlag "mode" they are modes.
	stacks    []string
	stackFlag string
	// listing opens SSDs to look at them only: other paths to their namespaces do not matter.
	listing bool
	// playModel replaces the model that a software controller was bound with.
	playModel *ssdmodel.Model
	// pollDoorbells has software controllers look at their doorbells, for a device that writes
	// them and cannot call who serves them.
	pollDoorbells bool
	// data is the dataset whose files are read where no SSD is bound; nil: SSDs must be.
	data *dataset.Dataset
}

// open leases and brings up the SSDs that were chosen, or all bound ones.
func (o *ssdOpener) open(ctx context.Context) (*ssdSet, error) {
	if o.data != nil && o.data.Meta.Rows() == 0 {
		return o.openData(ctx, "")
	}
	st, err := o.store.Load()
	if err != nil {
		return nil, err
	}
	chosen, err := choose(st, o.names)
	if err != nil {
		return nil, err
	}
	if len(o.names) == 0 {
		for _, r := range st.Unfinished {
			o.ui.Note("SSD %s (%s) is left out, for its %s was cut off: %s", r.Name, r.PCI, r.Phase,
				r.NextStep())
		}
	}
	if len(o.names) == 0 {
		chosen = o.opener().Permitted(chosen)
	} else {
		o.leftOut = namesExcept(st.SSDs, chosen)
	}
	if err := o.refuseKernelStacks(chosen); err != nil {
		return nil, err
	}
	if len(chosen) == 0 && o.data != nil && len(st.Unfinished) == 0 {
		return o.openData(ctx, "no SSD is bound")
	}
	if len(chosen) == 0 {
		return nil, errs.New(errs.Usage,
			"no SSD is bound in %s; bind some with \"heliosctl bind-ssds\" ({state} DIR chooses another list)",
			o.store.Dir())
	}
	set, err := o.openThese(ctx, chosen)
	if err != nil || o.data == nil || len(o.names) > 0 || !o.faults.Empty() {
		return set, err
	}
	absent, err := stripe.Absent(ctx, o.data, set.SSDs)
	if err == nil && !absent {
		return set, nil
	}
	if err = errors.Join(err, set.Close()); err != nil {
		return nil, err
	}
	return o.openData(ctx, "the bound SSDs do not hold it")
}

// openData has the dataset's own files play an SSD, for the reason that it notes.
func (o *ssdOpener) openData(ctx context.Context, why string) (*ssdSet, error) {
	for _, s := range o.stacks {
		if kind, err := gpuio.FindStack(o.stackOf(s)); err == nil && !kind.Queued {
			return nil, errs.New(errs.Capability,
				"%v %s reads SSDs through the kernel, and %s; bind files with \"heliosctl bind-ssds --proxy FILE\" and load the dataset onto them, or use %s",
				errs.Key(o.stackFlag), s, why, o.queuedWay())
		}
	}
	if o.data.Meta.Rows() == 0 {
		o.ui.Note("no type of nodes has rows, so none are read")
	} else {
		o.ui.Note("%s, so rows are read from %s", why, o.data.RowSource())
	}
	return o.opened(o.opener().OpenDataset(ctx, o.data))
}

// stackOf returns the I/O stack that a value of the flag o.stackFlag chooses.
func (o *ssdOpener) stackOf(value string) string {
	if o.stackFlag == "mode" {
		return plan.Config{Mode: value}.WithDefaults().IOStack
	}
	return value
}

// queuedWay gives an option that reads SSDs without the kernel.
func (o *ssdOpener) queuedWay() string {
	if o.stackFlag == "mode" {
		return "--mode " + plan.DefaultMode
	}
	return "--io-stack " + gpuio.StackAsync
}

// refuseKernelStacks says that an I/O stack which reads through the kernel cannot read SSDs that
// were taken from it, nor those that it has never had.
func (o *ssdOpener) refuseKernelStacks(chosen []state.SSD) error {
	flag := o.stackFlag
	for _, s := range o.stacks {
		if kind, err := gpuio.FindStack(o.stackOf(s)); err != nil || kind.Queued {
			continue
		}
		way := o.queuedWay()
		for _, d := range chosen {
			switch d.Kind {
			case state.KindComputed:
				return errs.New(errs.Capability,
					"%v %s reads through the kernel, and SSD %s is computed: there is no file behind it; use %s, or bind files with {proxy} and load the dataset onto them",
					errs.Key(flag), s, d.Name, way)
			case state.KindVFIO:
				return errs.New(errs.Capability,
					"%v %s reads through the kernel, from which SSD %s (%s) was taken; use %s, or give the SSD back with \"sudo heliosctl unbind-ssds %s\" and bind it with {proxy}",
					errs.Key(flag), s, d.Name, d.PCI, way, d.Name)
			}
		}
	}
	return nil
}

// opener is the part of o that knows no verb.
func (o *ssdOpener) opener() *bound.Opener {
	return &bound.Opener{Store: o.store, User: o.c.Command.HelpName, Note: o.plainNote,
		Faults: o.faults, Model: o.playModel, PollDoorbells: o.pollDoorbells,
		Machine: &o.machine.Machine, Listing: o.listing}
}

// openThese leases and brings up SSDs of the state.
func (o *ssdOpener) openThese(ctx context.Context, chosen []state.SSD) (*ssdSet, error) {
	return o.opened(o.opener().Open(ctx, chosen))
}

// opened takes a set over for the verb.
func (o *ssdOpener) opened(set *bound.Set, err error) (*ssdSet, error) {
	if err != nil {
		return nil, err
	}
	o.tookSSDs = set.Bound
	return &ssdSet{Set: set, faults: o.faults}, nil
}

// faultCounts returns how often each injected fault struck, for reports; nil without faults.
func (s *ssdSet) faultCounts() map[string]int64 {
	if s == nil || s.faults == nil {
		return nil
	}
	return s.faults.Counts()
}

// open opens the dataset of the flag or argument.
func (a *datasetArgs) open(e *env) (*dataset.Dataset, error) {
	dir, err := a.dir(e)
	if err != nil {
		return nil, err
	}
	d, err := dataset.Open(dir)
	if err == nil {
		e.dataMeta = d.Meta
	}
	if err == nil && !d.Sealed() {
		e.ui.Note(
			"dataset %s is not sealed: it was made by an older version; \"heliosctl verify --seal %s\" seals it after checking what can be checked",
			dir, dir)
	}
	return d, err
}

// closing runs a deferred close and keeps its error unless there is one already.
func closing(err *error, f func() error) {
	if cerr := f(); *err == nil {
		*err = cerr
	}
}
