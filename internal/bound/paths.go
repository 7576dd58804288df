package bound

import (
	"fmt"
	"slices"
	"strings"

	"helios/internal/diskuse"
	"helios/internal/errs"
	"helios/internal/nsid"
	"helios/internal/pci"
	"helios/internal/state"
)

// A namespace that two controllers reach is one disk. Nobody sees through one of them what the
// kernel, or a program, does to it through the other: it is in use, always.

// BoundPaths says by which other bound controllers than the one at addr a namespace is reached.
func (m *Machine) BoundPaths(id nsid.ID, addr string, records []state.Record) []string {
	var out []string
	for _, r := range records {
		if r.PCI == addr || !r.NamespaceID().Same(id) {
			continue
		}
		// The kernel's own paths are asked for elsewhere.
		if d, err := m.Sys.Device(r.PCI); err == nil && d.Driver == VFIODriver {
			out = append(out, fmt.Sprintf("is the namespace that %s (%s) reaches, which is bound",
				r.Name, r.PCI))
		}
	}
	return out
}

// SoleOwner refuses a namespace of the controller at addr, which vfio-pci has, where the kernel or
// another bound controller reaches it too, or where it is that of a virtual function whose physical
// one is in use.
func (m *Machine) SoleOwner(id nsid.ID, addr string, records []state.Record) error {
	kernel, err := m.Sys.Namespaces()
	if err != nil {
		return err
	}
	var why []string
	for _, p := range append(diskuse.OtherPaths(kernel, pci.Namespace{ID: id}, ""),
		m.BoundPaths(id, addr, records)...) {
		why = append(why, "its namespace "+p)
	}
	uses, err := m.Seen(addr)
	if err != nil && m.Root() {
		return err
	}
	for _, u := range uses {
		if u.Live {
			why = append(why, u.String())
		}
	}
	return notSole(addr, why)
}

// notSole is the error of an SSD that is reached otherwise, nil for no reasons.
func notSole(name string, why []string) error {
	if len(why) == 0 {
		return nil
	}
	return errs.New(errs.Refused,
		"%s: %s; end that use, which no force overrides: unbind the other controller from its driver (\"echo ADDRESS >/sys/bus/pci/drivers/nvme/unbind\" as root takes it from the kernel)",
		name, strings.Join(why, ", "))
}

// SolePath refuses a file or block device that is in use without a claim, and one over a namespace
// that the kernel shows by another name too, or that a bound controller reaches.
func (m *Machine) SolePath(path string, b diskuse.Backing, records []state.Record) error {
	var why []string
	for _, u := range b.Elsewhere(m.Sys) {
		why = append(why, u.String())
	}
	if len(why) > 0 {
		return errs.New(errs.Refused, "%s is in use: %s; end that use, which no force overrides",
			path, strings.Join(why, ", "))
	}
	kernel, err := m.Sys.Namespaces()
	if err != nil {
		return err
	}
	why = b.OtherPaths(kernel)
	for _, ns := range b.Namespaces {
		why = append(why, m.BoundPaths(ns.ID, "", records)...)
	}
	for i := range why {
		why[i] = "its namespace " + why[i]
	}
	return notSole(path, why)
}

// CheckPaths refuses SSDs of a set that are one disk, or that somebody else reaches too.
func (o *Opener) CheckPaths(s *Set) error {
	records, err := o.Store.Machine().Records()
	if err != nil {
		return err
	}
	var before []diskuse.Backing
	for i, d := range s.Bound {
		if d.Kind == state.KindVFIO {
			if err := o.Machine.SoleOwner(s.SSDs[i].Ctrl.NamespaceID(), d.PCI,
				records); err != nil {
				return fmt.Errorf("SSD %s at %w", d.Name, err)
			}
		}
		b, err := o.Machine.Backing(d, records)
		if err != nil {
			return err
		}
		if j := slices.IndexFunc(before, b.Overlaps); j >= 0 {
			return errs.New(errs.Refused,
				"SSDs %s (%s) and %s (%s) are two paths to one disk; use one of them, and \"heliosctl unbind-ssds\" the other",
				s.Bound[j].Name, s.Bound[j].Path, d.Name, d.Path)
		}
		before = append(before, b)
		if d.Kind == state.KindVFIO || d.Kind == state.KindComputed {
			continue
		}
		if err := o.Machine.SolePath(d.Path, b, records); err != nil {
			return fmt.Errorf("SSD %s at %w", d.Name, err)
		}
	}
	return nil
}

// Backing returns the file or namespace behind a bound SSD.
func (m *Machine) Backing(d state.SSD, records []state.Record) (diskuse.Backing, error) {
	switch d.Kind {
	case state.KindComputed:
		return diskuse.Backing{}, nil
	case state.KindVFIO:
		i := slices.IndexFunc(records, func(r state.Record) bool { return r.Name == d.Name })
		if i < 0 {
			return diskuse.Backing{}, nil
		}
		return diskuse.BackingOfNamespace(records[i].NamespaceID()), nil
	}
	return diskuse.BackingOf(m.Sys, d.Path)
}
