// Package state keeps what outlives one command: the file of bound SSDs, and who uses them now.
//
// The file is replaced atomically (temporary file, fsync, rename, fsync of the folder) under a
// lock, so that a command killed at any moment leaves the old list or the new one. Using an SSD
// takes a lease: an exclusive flock that the kernel drops when its holder dies. Controllers bound
// to vfio-pci are in no user's file: the machine has a record of each (Machine), which Load adds.
package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/internal/infile"
)

// version is the state file's format. A file with a higher one is refused, not guessed at.
const version = 1

// EnvDir is the environment variable that names the state folder.
const EnvDir = "HELIOS_STATE"

// FileName is the list of bound SSDs in the state folder.
const FileName = "state.json"

// Kinds of bound SSDs.
const (
	KindProxy = "proxy" // a software controller over a file or block device
	KindRAM   = "ram"   // a software controller over a file in shared memory
	KindVFIO  = "vfio"  // an NVMe controller that vfio-pci holds for us
	// KindComputed is a software controller that stores nothing: its content is computed from a
	// dataset.
	KindComputed = "computed"
)

// SSD is one bound SSD, with all that a later command needs to open it again.
type SSD struct {
	Name string `json:"name"` // ssd0, ssd1, …: how --ssds chooses it
	Kind string `json:"kind"` // KindProxy, KindRAM, KindVFIO or KindComputed
	// absolute path of the backing file or block device; of a controller its folder in sysfs, which
	// ends in its PCI address; of computed content the dataset
	Path     string `json:"path"`
	Serial   string `json:"serial"`
	Bytes    int64  `json:"bytes"`
	LBABytes int    `json:"lba_bytes"`
	Buffered bool   `json:"buffered,omitempty"` // through the page cache, not O_DIRECT
	// SSD model to play: a built-in name, or the absolute path of a file
	Model string `json:"ssd_model,omitempty"`
	// bind-ssds made the file, so unbind-ssds --delete may remove it
	Created bool   `json:"created,omitempty"`
	PCI     string `json:"pci,omitempty"` // address of a controller, such as 0000:00:04.0
	Group   *int   `json:"iommu_group,omitempty"`
	// which unbind-ssds gives the controller back to
	Driver   string    `json:"previous_driver,omitempty"`
	Bound    time.Time `json:"bound,omitzero"`
	Computed *Computed `json:"computed,omitempty"` // of KindComputed
	// The backing file or block device, whatever its name: another that takes the name is neither
	// used nor deleted. Not known for files that an older heliosctl bound as they were.
	fileid.ID
}

// Computed holds what a computed SSD holds, with what takes time to find out.
type Computed struct {
	UUID        string `json:"dataset_uuid"`
	Stripe      int    `json:"stripe"`
	Stripes     int    `json:"stripes"`
	RowDType    string `json:"row_dtype"`
	TableCRC    uint32 `json:"table_crc"`
	RowTableCRC uint32 `json:"row_table_crc"`
	// Scales says that the row table has the scales of int8 rows; an older heliosctl had them in
	// the rows.
	Scales bool `json:"scales,omitempty"`
}

// State is the content of the file.
type State struct {
	Version int   `json:"version"`
	SSDs    []SSD `json:"ssds"`
	// Unfinished are controllers of the machine whose bind or unbind was cut off.
	Unfinished []Record `json:"-"`
}

// is reports whether a name stands for the SSD and for no other: its name, its path or its serial
// number, or a controller's PCI address, with or without the domain.
func (d *SSD) is(name string) bool {
	path := strings.TrimPrefix(name, "proxy:") // as a software controller's bus calls it
	abs, _ := filepath.Abs(path)
	switch {
	case name == "":
		return false
	case d.Name == name || d.Serial == name || d.Path == path || d.Path == abs:
		return true
	}
	return d.PCI != "" && (strings.EqualFold(d.PCI, name) || strings.EqualFold(d.PCI, "0000:"+name))
}

// Find returns the SSD that a name stands for: its name, its path, its serial, its PCI address, or
// the last part of its path where only one SSD has it.
func (s *State) Find(name string) (SSD, error) {
	path := strings.TrimPrefix(name, "proxy:")
	var exact, byBase []SSD
	for _, d := range s.SSDs {
		switch {
		case name == "":
		case d.Name == name:
			return d, nil
		case d.is(name):
			exact = append(exact, d)
		case filepath.Base(d.Path) == path:
			byBase = append(byBase, d)
		}
	}
	if len(exact) > 0 {
		byBase = exact // two SSDs of one serial number cannot be told by it
	}
	switch len(byBase) {
	case 1:
		return byBase[0], nil
	case 0:
		for _, r := range s.Unfinished {
			if r.Is(name) {
				return SSD{}, errs.New(errs.Usage, "SSD %s (%s) is half bound: %s was cut off; %s",
					r.Name, r.PCI, r.Phase, r.NextStep())
			}
		}
		names := make([]string, len(s.SSDs))
		for i, d := range s.SSDs {
			names[i] = d.Name
		}
		if len(names) == 0 {
			return SSD{}, errs.New(errs.Usage,
				"no SSD %q: none is bound; bind some with \"heliosctl bind-ssds\"", name)
		}
		return SSD{}, errs.New(errs.Usage, "no SSD %q is bound; there are %s", name,
			strings.Join(names, ", "))
	}
	return SSD{}, errs.New(errs.Usage, "SSD %q could be %s or %s; use the name", name,
		byBase[0].Name, byBase[1].Name)
}

// NextName is the lowest ssdN that is free.
func (s *State) NextName() string {
	for n := 0; ; n++ {
		name, taken := "ssd"+strconv.Itoa(n), false
		for _, d := range s.SSDs {
			taken = taken || d.Name == name
		}
		if !taken {
			return name
		}
	}
}

// DefaultDir is HELIOS_STATE, else heliosctl under the user's state folder (XDG_STATE_HOME,
// else ~/.local/state).
func DefaultDir() (string, error) {
	if d := os.Getenv(EnvDir); d != "" {
		return d, nil
	}
	if d := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "heliosctl"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil || home == "" {
		return "", errs.New(errs.Usage,
			"no state folder: neither %s nor HOME is set; give one with {state} DIR", EnvDir)
	}
	return filepath.Join(home, ".local", "state", "heliosctl"), nil
}

// Store is a state folder, with the machine's records beside it.
type Store struct {
	dir     string
	machine *Machine
}

// Open names the folder; "" is DefaultDir. Nothing is created before the first write.
func Open(dir string) (*Store, error) {
	if dir == "" {
		d, err := DefaultDir()
		if err != nil {
			return nil, err
		}
		dir = d
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, errs.New(errs.Usage, "state folder %s: %w", dir, err)
	}
	return &Store{dir: abs, machine: OpenMachine("")}, nil
}

// Machine is the folder of machine-wide records.
func (s *Store) Machine() *Machine { return s.machine }

// Dir is the folder's absolute path.
func (s *Store) Dir() string { return s.dir }

func (s *Store) file() string { return filepath.Join(s.dir, FileName) }

// Load reads the user's SSDs and adds the machine's, in this order.
func (s *Store) Load() (*State, error) {
	st, err := s.loadOwn()
	if err != nil {
		return nil, err
	}
	// those have records
	st.SSDs = slices.DeleteFunc(st.SSDs, func(d SSD) bool { return d.Kind == KindVFIO })
	records, err := s.machine.Records()
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		if r.Phase == Bound {
			st.SSDs = append(st.SSDs, r.SSD)
		} else {
			st.Unfinished = append(st.Unfinished, r)
		}
	}
	return st, nil
}

// loadOwn reads the user's file; one that is not there is an empty state.
func (s *Store) loadOwn() (*State, error) {
	b, err := infile.Read(s.file(), 64<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return &State{Version: version}, nil
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "state file: %w; check {state} and %s", err, EnvDir)
	}
	st := &State{}
	if err := json.Unmarshal(b, st); err != nil {
		return nil, errs.New(errs.Device,
			"state file %s is damaged (%v); move it away and bind the SSDs again", s.file(), err)
	}
	if st.Version != version {
		return nil, errs.New(errs.Usage,
			"state file %s has format %d and this heliosctl knows %d; use the heliosctl that wrote it, or name another folder with {state} DIR",
			s.file(), st.Version, version)
	}
	return st, nil
}

// Update loads the state, lets change edit it and replaces the file, all under the folder's
// lock, for which it waits until ctx is done. When change fails, nothing is written. change also
// sees the machine's SSDs; what it does to those has no effect.
func (s *Store) Update(ctx context.Context, change func(*State) error) error {
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return errs.New(errs.Usage,
			"state folder: %w; name one that can be written with {state} DIR", err)
	}
	l, err := lockFile(ctx, filepath.Join(s.dir, "lock"))
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // closing drops the lock; nothing was written through it
	st, err := s.Load()
	if err != nil {
		return err
	}
	if err := change(st); err != nil {
		return err
	}
	return s.write(st)
}

func (s *Store) write(st *State) error {
	own := State{Version: st.Version, SSDs: slices.DeleteFunc(slices.Clone(st.SSDs),
		func(d SSD) bool { return d.Kind == KindVFIO })}
	b, err := json.MarshalIndent(own, "", "  ")
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	err = replaceFile(s.dir, s.file(), append(b, '\n'), 0o600)
	switch {
	case errors.Is(err, errNoTemp):
		return errs.New(errs.Usage,
			"state folder: %w; name one that can be written with {state} DIR", err)
	case err != nil:
		return errs.New(errs.ClassOf(err), "state file %s: %w; the old list is still in place",
			s.file(), err)
	}
	return nil
}

// errNoTemp is a folder in which no file can be made.
var errNoTemp = errors.New("no new file")

// tempError is the reason why none could be made, in its own words.
type tempError struct{ err error }

func (e *tempError) Error() string   { return e.err.Error() }
func (e *tempError) Unwrap() []error { return []error{e.err, errNoTemp} }

// replaceFile gives a file of a folder new content, which is on disk under its name when it
// returns; until then the old content is.
func replaceFile(dir, path string, content []byte, mode os.FileMode) (err error) {
	f, err := os.CreateTemp(dir, ".state-*")
	if err != nil {
		return &tempError{err}
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return durable.Sync(dir)
}

// lockFile takes an exclusive flock, asking again every 20 ms until ctx is done.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := openLock(ctx, path, 0o644)
	var p *fs.PathError
	if errors.As(err, &p) {
		return nil, errs.New(errs.Usage,
			"state folder: %w; name one that can be written with {state} DIR", err)
	}
	return f, err
}

func openLock(ctx context.Context, path string, mode os.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, mode)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: another heliosctl holds it: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}

// Lease is the use of some SSDs until Release, or until the process ends: exclusive, or shared with
// others that share.
type Lease struct {
	files []*os.File
	sole  bool
}

// InUseError is that of an SSD that another process has leased.
type InUseError struct {
	SSD string
	By  string // "heliosctl train (process 4711)", or what is known of another process
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("SSD %s is in use by %s; wait until it ends, or choose other SSDs",
		e.SSD, e.By)
}

// Acquire takes all SSDs of names, or none. what is the caller's work with them, for the
// error that another command gets meanwhile. An SSD in use is errs.Refused, at once.
func (s *Store) Acquire(what string, names ...string) (*Lease, error) {
	return s.acquire(what, true, names)
}

// Share is Acquire beside others that share.
func (s *Store) Share(what string, names ...string) (*Lease, error) {
	return s.acquire(what, false, names)
}

func (s *Store) acquire(what string, sole bool, names []string) (*Lease, error) {
	l := &Lease{sole: sole}
	for _, name := range names {
		f, err := s.take(name, what, sole)
		if err != nil {
			l.Release()
			return nil, err
		}
		l.files = append(l.files, f)
	}
	return l, nil
}

// openOwn opens the lease file of an SSD of the user's list.
func (s *Store) openOwn(name string) (*os.File, error) {
	err := os.MkdirAll(s.dir, 0o755)
	if err == nil {
		var f *os.File
		if f, err = os.OpenFile(filepath.Join(s.dir, name+".lock"), os.O_RDWR|os.O_CREATE,
			0o644); err == nil {
			return f, nil
		}
	}
	return nil, errs.New(errs.Usage,
		"state folder: %w; name one that can be written with {state} DIR", err)
}

// nameTimeout bounds the wait for the name of a lease's holder.
const nameTimeout = 250 * time.Millisecond

func (s *Store) take(name, what string, sole bool) (*os.File, error) {
	how := unix.LOCK_EX
	if !sole {
		how = unix.LOCK_SH
	}
	open := s.openOwn
	if machineName.MatchString(name) {
		open = s.machine.openLease
	}
	f, err := open(name)
	if err != nil {
		return nil, err
	}
	who := ""
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		b := make([]byte, noteBytes)
		n, _ := f.ReadAt(b, 0)
		// A holder that has just taken the lease has not written its name yet; one that gives it up
		// has wiped it out.
		if who = strings.TrimSpace(string(b[:n])); who != "" || time.Since(begin) > nameTimeout {
			break
		}
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		who = holder(who, durable.LockHolder(int(f.Fd())), durable.Look)
		_ = f.Close()
		return nil, errs.With(errs.Refused, &InUseError{SSD: name, By: who})
	case err != nil:
		_ = f.Close()
		return nil, fmt.Errorf("lock SSD %s: %w", name, err)
	case !stillThere(f):
		_ = f.Close()
		return nil, errs.New(errs.Usage,
			"SSD %s is not bound any more; \"heliosctl ssds\" lists what there is", name)
	}
	// The text only serves the other command's error; the lock itself is the flock.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(note(what)), 0)
	}
	return f, nil
}

// Release ends the lease; later calls are no-ops.
func (l *Lease) Release() {
	if l == nil {
		return
	}
	for _, f := range l.files {
		if l.sole { // else it may have another's name by now
			_ = f.Truncate(0)
		}
		_ = f.Close() // closing the only descriptor drops the flock
	}
	l.files = nil
}
