package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/pci"
	"helios/internal/state"
)

// splitUnbind tells the machine's controllers among the SSDs of want from those of the user's list,
// whose names it returns. No want is all.
func (u *unbinder) splitUnbind(want []string) (records []state.Record, own []string, err error) {
	all, err := u.store.Machine().Records()
	if err != nil || len(want) == 0 {
		return all, nil, err
	}
	add := func(r state.Record) {
		if !slices.ContainsFunc(records, func(o state.Record) bool { return o.PCI == r.PCI }) {
			records = append(records, r)
		}
	}
	for _, w := range want {
		var found []state.Record
		for _, r := range all {
			if r.Is(w) || r.Was(w) {
				found = append(found, r)
			}
		}
		switch {
		case len(found) > 1:
			return nil, nil, errs.New(errs.Usage, "SSD %q could be %s or %s; use the name", w,
				found[0].Name, found[1].Name)
		case len(found) == 1:
			add(found[0])
			continue
		}
		_, isAddr := pci.Address(w)
		var lacks error
		if !isAddr {
			st, err := u.store.Load()
			if err != nil {
				return nil, nil, err
			}
			if _, lacks = st.Find(w); lacks == nil {
				own = append(own, w)
				continue
			}
		}
		r, err := u.strayRecord(w)
		if lacks != nil && errors.Is(err, pci.ErrNotFound) {
			err = lacks // which lists the bound ones
		}
		if err != nil {
			return nil, nil, err
		}
		add(r)
	}
	return records, own, nil
}

// strayRecord describes a controller at vfio-pci of which there is no record: another program bound
// it, or the record was lost.
func (u *unbinder) strayRecord(addr string) (state.Record, error) {
	d, err := u.machine.Sys.Find(addr)
	if err != nil {
		return state.Record{}, err
	}
	if !d.Taken() {
		has := "no driver"
		if d.Driver != "" {
			has = "driver " + d.Driver
		}
		return state.Record{}, errs.New(errs.Usage,
			"%s is not bound: it has %s; \"heliosctl ssds\" lists what is", d.Addr, has)
	}
	group := d.Group
	return state.Record{SSD: state.SSD{Kind: state.KindVFIO, PCI: d.Addr, Group: &group}}, nil
}

func recordNames(records []state.Record) string {
	var out []string
	for _, r := range records {
		out = append(out, recordName(r))
	}
	return strings.Join(out, ", ")
}

func recordName(r state.Record) string {
	if r.Name == "" {
		return r.PCI
	}
	return r.Name
}

// unboundReport is a line of "unbind-ssds --json" about a controller.
type unboundReport struct {
	state.SSD
	Driver string   `json:"driver"`          // that has it now
	Device string   `json:"controller"`      // nvme0
	Disks  []string `json:"disks"`           // nvme0n1
	Note   string   `json:"note,omitempty"`  // what is odd
	Error  string   `json:"error,omitempty"` // why it did not work
}

// unbindControllers gives controllers back to the driver that had them before.
func (u *unbinder) unbindControllers(ctx context.Context, chosen []state.Record) error {
	m, recs := u.machine, u.store.Machine()
	if !m.Root() {
		return errs.New(errs.Capability,
			"%s: changing a device's driver needs root: run the same command with sudo",
			recordNames(chosen))
	}
	unlock, err := lockMachine(ctx, recs)
	if err != nil {
		return err
	}
	defer unlock()
	all, err := recs.Records()
	if err != nil {
		return err
	}
	chosen = slices.DeleteFunc(chosen, func(r state.Record) bool { // unbound while this waited
		return r.Name != "" &&
			!slices.ContainsFunc(all,
				func(o state.Record) bool { return o.Name == r.Name && o.PCI == r.PCI })
	})
	lease, err := u.leaseControllers(chosen)
	if err != nil {
		return err
	}
	defer lease.Release()
	if err := u.groupsFree(chosen, all); err != nil {
		return err
	}
	var failed []error
	done := 0
	for _, r := range chosen {
		if ctx.Err() != nil {
			break
		}
		rep, err := u.unbindOne(ctx, r)
		if err != nil {
			failed = append(failed, err)
			rep.Error = err.Error()
		} else {
			done++
			u.showUnbound(rep)
		}
		if err := u.ui.Event("unbound", rep); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		if done == len(chosen) {
			return nil
		}
		return errors.Join(
			fmt.Errorf(
				"%w: %d SSDs were given back, %d were not; run the same command again for the rest",
				ctx.Err(), done, len(chosen)-done), errors.Join(failed...))
	}
	if len(failed) > 0 && done > 0 {
		return errs.New(errs.ClassOf(failed[0]),
			"%d of %d SSDs were given back, the others were not: %w", done, len(chosen),
			errors.Join(failed...))
	}
	return errs.With(classOr(failed), errors.Join(failed...))
}

func classOr(failed []error) errs.Class {
	if len(failed) == 0 {
		return errs.Failed // of no error
	}
	return errs.ClassOf(failed[0])
}

func (u *unbinder) showUnbound(r unboundReport) {
	name := r.PCI
	if r.Name != "" {
		name = r.Name + " (" + r.PCI + ")"
	}
	now := "with no driver"
	switch {
	case len(r.Disks) > 0:
		now = "/dev/" + strings.Join(r.Disks, ", /dev/") + " again, driver " + r.Driver
	case r.Device != "":
		now = "/dev/" + r.Device + " again, driver " + r.Driver
	case r.Driver != "":
		now = "with driver " + r.Driver
	}
	if r.Note != "" {
		now += "; " + r.Note
	}
	u.ui.Printf("%s: unbound, %s", name, now)
}

// leaseControllers takes the leases of bound controllers. One that never got as far has no lease
// file.
func (u *unbinder) leaseControllers(chosen []state.Record) (*state.Lease, error) {
	var names []string
	for _, r := range chosen {
		if r.Phase == state.Bound {
			names = append(names, r.Name)
		}
	}
	return u.store.Acquire("heliosctl unbind-ssds", names...)
}

// groupsFree refuses to break up an IOMMU group, or to take a device from a process: the kernel
// would wait in the unbind until that process ends.
func (u *unbinder) groupsFree(chosen, all []state.Record) error {
	for _, r := range chosen {
		if r.Group == nil || *r.Group < 0 {
			continue
		}
		for _, o := range all {
			in := slices.ContainsFunc(chosen, func(c state.Record) bool { return c.PCI == o.PCI })
			if !in && o.Phase == state.Bound && o.Group != nil && *o.Group == *r.Group {
				return errs.New(errs.Refused,
					"%s shares IOMMU group %d with %s, which could not be used without it; unbind both: \"sudo heliosctl unbind-ssds %s %s\"",
					recordName(r), *r.Group, o.Name, recordName(r), o.Name)
			}
		}
		node := groupNode(*r.Group)
		// root sees them all; whom it cannot name, busy finds
		who, _ := diskuse.Openers(u.machine.Sys, node)
		if len(who) > 0 {
			return errs.New(errs.Refused,
				"%s is in use by %s (process %d); wait until it ends, or end it", recordName(r),
				who[0].Name, who[0].PID)
		}
		if u.machine.busy(*r.Group) {
			return errs.New(errs.Refused, "%s: another process has %s open; end it first",
				recordName(r), node)
		}
	}
	return nil
}

// unbindOne gives one controller back and waits until the kernel has its disk again.
func (u *unbinder) unbindOne(ctx context.Context, r state.Record) (rep unboundReport, err error) {
	m, recs := u.machine, u.store.Machine()
	rep.SSD = r.SSD
	if _, err := m.Sys.Device(r.PCI); errors.Is(err, pci.ErrNotFound) {
		rep.Note = "it is not in the machine any more"
		return rep, u.forget(r)
	} else if err != nil {
		return rep, err
	}
	if r.Name != "" {
		r.Phase = state.Unbinding
		if err := recs.Put(&r); err != nil {
			return rep, err
		}
	} else {
		rep.Note = "there was no record of its former driver, so the kernel chose"
	}
	if err := m.restore(r.PCI, r.Driver); err != nil {
		if r.Name != "" {
			err = fmt.Errorf("%w; %s is half unbound: %s", err, r.Name, r.NextStep())
		}
		return rep, err
	}
	if err := u.forget(r); err != nil {
		return rep, err
	}
	d, err := m.Sys.Device(r.PCI)
	if err != nil {
		return rep, err
	}
	rep.Driver = d.Driver
	if d.Driver != kernelDriver {
		return rep, nil
	}
	// The device has its driver; what is waited for now is only told.
	k, err := m.Sys.WaitNVMe(ctx, r.PCI)
	if err != nil {
		if ctx.Err() != nil {
			rep.Note = "its disk had not appeared when this was interrupted"
			return rep, nil
		}
		return rep, fmt.Errorf("%s was given back to driver nvme, but its disk did not appear: %w",
			r.PCI, err)
	}
	rep.Device = k.Name
	for _, n := range k.Namespaces {
		rep.Disks = append(rep.Disks, n.Name)
	}
	if len(rep.Disks) == 0 && len(r.Disks) > 0 {
		return rep, errs.New(errs.Device,
			"%s was given back to driver nvme, which finds no disk where there were %d; see the kernel's log (dmesg)",
			r.PCI, len(r.Disks))
	}
	return rep, nil
}

func (u *unbinder) forget(r state.Record) error {
	if r.Name == "" {
		return nil
	}
	return u.store.Machine().Remove(r.Name)
}
