package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/nsid"
)

// Controllers that vfio-pci holds belong to the machine, not to a user: root binds and unbinds
// them, and whoever is in the group of their device node uses them. Each has a record in a folder
// that all may read. Records go with the next boot, as the kernel's driver overrides do.

// EnvRun is the environment variable that names the folder of machine-wide records.
const EnvRun = "HELIOS_RUN"

// defaultRun lies on a tmpfs (Filesystem Hierarchy Standard, section 3.15).
const defaultRun = "/run/heliosctl"

// recordVersion is the records' format.
const recordVersion = 1

// Phase is the last step of a controller's way to us or back. It is written before the first and
// after the last step of that way, so that what a kill leaves can be told and finished.
type Phase string

// The phases of a record.
const (
	Binding Phase = "binding" // the kernel's driver may have it still, or nobody, or vfio-pci
	// vfio-pci has it, and it has been brought up once through our own queues
	Bound     Phase = "bound"
	Unbinding Phase = "unbinding" // on its way back to the previous driver
)

// Record holds what the machine knows of one controller. SSD.Driver is the driver before ours,
// which gets it back.
type Record struct {
	Version int `json:"version"`
	SSD
	Phase      Phase    `json:"phase"`
	Controller string   `json:"controller_model,omitempty"`
	Firmware   string   `json:"controller_firmware,omitempty"`
	Disks      []string `json:"disks,omitempty"` // what the kernel called its namespaces
	Node       string   `json:"node,omitempty"`  // its VFIO group's device node
	// Namespace is the one that is used, as the controller said when it was proved; nil before, and
	// in records of an older heliosctl.
	Namespace *nsid.ID  `json:"namespace,omitempty"`
	PID       int       `json:"pid"`   // who wrote this
	Since     time.Time `json:"since"` // when the phase began
}

// NamespaceID is the identity of the SSD's namespace, as far as the record knows it.
func (r *Record) NamespaceID() nsid.ID {
	if r.Namespace != nil {
		return *r.Namespace
	}
	return nsid.ID{Serial: r.Serial, Model: r.Controller}
}

// Machine is the folder of records.
type Machine struct{ dir string }

// OpenMachine names the folder; "" is HELIOS_RUN, else /run/heliosctl.
func OpenMachine(dir string) *Machine {
	if dir == "" {
		dir = os.Getenv(EnvRun)
	}
	if dir == "" {
		dir = defaultRun
	}
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return &Machine{dir}
}

// Dir is the folder's absolute path.
func (m *Machine) Dir() string { return m.dir }

// machineName are the names of SSDs that have a record.
var machineName = regexp.MustCompile(`^vfio(0|[1-9][0-9]*)$`)

func (m *Machine) file(name string) string     { return filepath.Join(m.dir, name+".json") }
func (m *Machine) lockPath(name string) string { return filepath.Join(m.dir, name+".lock") }

// Records reads all records in the order of their names' numbers. No folder is no records.
func (m *Machine) Records() ([]Record, error) {
	entries, err := os.ReadDir(m.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "records of bound controllers: %w; check %s", err, EnvRun)
	}
	var out []Record
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !machineName.MatchString(name) {
			continue
		}
		b, err := os.ReadFile(m.file(name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // unbound meanwhile
		}
		if err != nil {
			return nil, errs.New(errs.Usage, "record of a bound controller: %w; check %s",
				err, EnvRun)
		}
		var r Record
		if err := json.Unmarshal(b, &r); err != nil || r.Name != name || r.PCI == "" {
			return nil, errs.New(errs.Device,
				"record %s is damaged; move it away, then give its controller back by its PCI address with \"heliosctl unbind-ssds\" (\"heliosctl ssds\" lists them)",
				m.file(name))
		}
		if r.Version != recordVersion {
			return nil, errs.New(errs.Usage,
				"record %s has format %d and this heliosctl knows %d; use the heliosctl that wrote it",
				m.file(name), r.Version, recordVersion)
		}
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b Record) int { return number(a.Name) - number(b.Name) })
	return out, nil
}

func number(name string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(name, "vfio"))
	return n
}

// NextMachineName is the lowest vfioN that no record has.
func NextMachineName(records []Record) string {
	for n := 0; ; n++ {
		name := "vfio" + strconv.Itoa(n)
		if !slices.ContainsFunc(records, func(r Record) bool { return r.Name == name }) {
			return name
		}
	}
}

// Lock keeps other binds and unbinds of this machine out until unlock, waiting for them until ctx
// is done. It makes the folder.
func (m *Machine) Lock(ctx context.Context) (unlock func(), err error) {
	err = os.MkdirAll(m.dir, 0o755)
	if fi, serr := os.Stat(m.dir); err == nil && serr == nil && fi.Mode().Perm()&0o055 != 0o055 {
		err = os.Chmod(m.dir, 0o755) // all may read, whatever root's umask
	}
	if err != nil {
		return nil, errs.New(errs.Capability,
			"records of bound controllers: %w; bind and unbind as root (sudo), or check %s",
			err, EnvRun)
	}
	f, err := openLock(ctx, filepath.Join(m.dir, "lock"), 0o600)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return nil, errs.New(errs.Capability,
				"records of bound controllers: %w; bind and unbind as root (sudo), or check %s",
				err, EnvRun)
		}
		return nil, err
	}
	return func() { _ = f.Close() }, nil // closing drops the lock
}

// Put writes a record, replacing the one of its name, so that it survives the process from here on;
// it fills in Version, PID and Since. The caller holds Lock.
func (m *Machine) Put(r *Record) error {
	if !machineName.MatchString(r.Name) || r.Kind != KindVFIO || r.PCI == "" {
		return fmt.Errorf("state: record %q of kind %q at %q", r.Name, r.Kind, r.PCI)
	}
	r.Version, r.PID, r.Since = recordVersion, os.Getpid(), time.Now().UTC().Truncate(time.Second)
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if err := replaceFile(m.dir, m.file(r.Name), append(b, '\n'), 0o644); err != nil {
		return errs.New(errs.ClassOf(err), "record %s: %w", m.file(r.Name), err)
	}
	return nil
}

// Remove takes a record and its lease file away. The caller holds Lock, and the lease of an SSD
// that others may want.
func (m *Machine) Remove(name string) error {
	for _, p := range []string{m.file(name), m.lockPath(name)} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("record of %s: %w", name, err)
		}
	}
	return durable.Sync(m.dir)
}

// Share makes the file that leases of an SSD lock, for root and for the group that uses its device
// node; gid -1 leaves it to root.
func (m *Machine) Share(name string, gid int) error {
	f, err := os.OpenFile(m.lockPath(name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lease file of %s: %w", name, err)
	}
	defer f.Close() //nolint:errcheck // nothing is written
	mode := os.FileMode(0o600)
	if gid >= 0 {
		if err := f.Chown(-1, gid); err != nil {
			return fmt.Errorf("lease file of %s: %w", name, err)
		}
		mode = 0o660
	}
	if err := f.Chmod(mode); err != nil {
		return fmt.Errorf("lease file of %s: %w", name, err)
	}
	return nil
}

// NextStep returns the command that finishes a record that is not Bound.
func (r *Record) NextStep() string {
	if r.Phase == Unbinding {
		return fmt.Sprintf(
			"finish with \"sudo heliosctl unbind-ssds %s\", or take it again with \"sudo heliosctl bind-ssds %s\"",
			r.PCI, r.PCI)
	}
	return fmt.Sprintf(
		"finish with \"sudo heliosctl bind-ssds %s\", or give it back with \"sudo heliosctl unbind-ssds %s\"",
		r.PCI, r.PCI)
}

// Is reports whether a name stands for this record: its name, its serial number or its PCI address,
// with or without the domain.
func (r *Record) Is(name string) bool { return r.SSD.is(name) }

// Was reports whether the kernel called the controller, or a disk of it, by that name before it was
// bound: /dev/nvme0 or /dev/nvme0n1. It may call another one so by now.
func (r *Record) Was(name string) bool {
	name = strings.TrimPrefix(name, "/dev/")
	return slices.ContainsFunc(r.Disks,
		func(d string) bool { return d == name || strings.HasPrefix(d, name+"n") })
}

// openLease opens an SSD's lease file, which bind made.
func (m *Machine) openLease(name string) (*os.File, error) {
	f, err := os.OpenFile(m.lockPath(name), os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errs.New(errs.Usage,
			"SSD %s is not bound any more; \"heliosctl ssds\" lists what there is", name)
	case errors.Is(err, fs.ErrPermission):
		return nil, errs.New(errs.Capability, "SSD %s: %s", name, NotPermitted(m.lockPath(name)))
	case err != nil:
		return nil, errs.New(errs.Usage, "lease file of SSD %s: %w", name, err)
	}
	return f, nil
}

// Permitted reports whether this user may use an SSD: nil, or an error of class Capability with
// the reason and the next step.
func (m *Machine) Permitted(name string) error {
	f, err := m.openLease(name)
	if err != nil {
		if errs.ClassOf(err) == errs.Capability {
			return err
		}
		return nil // what else is wrong shows when it is used
	}
	return f.Close()
}

// stillThere reports whether an open lease file is the one under its name: unbind-ssds removes it.
func stillThere(f *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink > 0
}
