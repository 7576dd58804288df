// Package outfile is the one rule for files that a verb writes.
//
// A file that is there is not replaced, unless the caller says so. A new one is written without a
// name and gets its own when it is whole, so that no reader takes a part of it for all, and a
// process that dies leaves nothing. A pipe, a terminal or /dev/null is
// written straight. Lines is for files that grow by whole lines.
//
// Where the file system has no files without names (open(2), O_TMPFILE), the file has a temporary
// name beside its place meanwhile, as every file has for the moment in which it replaces another.
// The next process that writes the same name removes what one that died has left there, once the
// kernel says that nobody has it open.
package outfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
)

// Exists is the refusal to replace a file. Its class is errs.Refused.
type Exists struct{ What, Path string }

func (e *Exists) Error() string { return e.What + " " + e.Path + " is there already" }

// File is an output that is being written.
type File struct {
	what, path string
	f          *os.File
	place      string // what the new file becomes; "" where the target is written straight
	temp       string // the name that it has meanwhile; "": none
	replace    bool
	err        error // the first of writing
}

// Check is the error that Create would have, for those who have long work to do before it. It
// leaves nothing behind.
func Check(what, path string, replace bool) error {
	t, err := find(what, path, replace)
	if err != nil || t.straight() {
		return err
	}
	f, err := t.create()
	if err != nil {
		return err
	}
	return f.Discard()
}

// Create begins path; what names it in errors ("--out"). Unless replace is set, a regular file that
// is there is an Exists.
func Create(what, path string, replace bool) (*File, error) {
	t, err := find(what, path, replace)
	if err != nil {
		return nil, err
	}
	if t.straight() {
		f, err := t.open()
		if err != nil {
			return nil, errs.New(errs.Usage, "%s %s can't be written: %w; name another", what,
				path, err)
		}
		return &File{what: what, path: path, f: f}, nil
	}
	return t.create()
}

// Path is the name that was given.
func (f *File) Path() string { return f.path }

// Write keeps its first error, which Commit returns as well.
func (f *File) Write(b []byte) (int, error) {
	n, err := f.f.Write(b)
	if err != nil && f.err == nil {
		f.err = err
	}
	return n, err
}

// Commit gives a file that is whole its name. err is what went wrong before; with one, nothing is
// kept. A file that is written straight is only closed.
func (f *File) Commit(err error) error {
	if f.err != nil {
		err = f.err
	}
	if f.place == "" {
		cerr := f.f.Close()
		f.f = nil
		if err == nil {
			err = cerr
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", f.what, f.path, err)
		}
		return nil
	}
	if err == nil {
		err = f.put()
	}
	if err != nil {
		return errors.Join(
			fmt.Errorf(
				"%s %s: %w; nothing was kept of it: free some space there or name another file",
				f.what, f.path, err), f.Discard())
	}
	err = f.f.Close()
	f.f = nil
	return err
}

// put gives the new file its name. It stays open.
func (f *File) put() error {
	err := f.f.Sync()
	switch {
	case err != nil:
	case f.temp == "" && !f.replace:
		err = link(f.f, f.place)
	case f.replace:
		if f.temp == "" { // a link replaces nothing
			err = f.name(func(temp string) error { return link(f.f, temp) })
		}
		if err == nil {
			err = os.Rename(f.temp, f.place)
		}
	default:
		err = durable.RenameNew(f.temp, f.place)
	}
	if errors.Is(err, fs.ErrExist) {
		err = fmt.Errorf("it came to be there meanwhile: %w", err)
	}
	if err != nil {
		return err
	}
	f.temp = ""
	return durable.Sync(filepath.Dir(f.place))
}

// Discard removes what was not committed.
func (f *File) Discard() error {
	if f == nil || f.f == nil {
		return nil
	}
	err := f.f.Close()
	if f.temp != "" {
		err = errors.Join(err, os.Remove(f.temp))
	}
	f.f = nil
	return err
}

// link gives a file without a name one where nothing is.
func link(f *os.File, to string) error {
	return unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, to,
		unix.AT_SYMLINK_FOLLOW)
}

// target is the place of an output.
type target struct {
	what, path string
	fd         int    // of this process, for /dev/stdout and its like; else -1
	device     bool   // there, and no regular file
	real       string // the file with links followed, which a rename must not replace
	replace    bool
}

func (t *target) straight() bool { return t.fd >= 0 || t.device }

func find(what, path string, replace bool) (*target, error) {
	t := &target{what: what, path: path, fd: descriptor(path), replace: replace}
	if path == "" {
		return nil, errs.New(errs.Usage, "%s: no file is named", what)
	}
	if t.fd >= 0 {
		return t, nil
	}
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		return nil, errs.New(errs.Usage, "%s %s is a folder; name a file", what, path)
	case err == nil && st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0:
		return nil, errs.New(errs.Refused,
			"%s %s is a disk, which is never written over; name a file", what, path)
	case err == nil && !st.Mode().IsRegular():
		t.device = true
		return t, nil
	case err == nil:
		if !replace {
			return nil, errs.With(errs.Refused, &Exists{what, path})
		}
		if written(path) {
			return nil, errs.New(errs.Refused,
				"%s %s is being written by another run; wait for it, or name another file",
				what, path)
		}
		if t.real, err = filepath.EvalSymlinks(path); err != nil {
			return nil, errs.New(errs.Usage, "%s: %w; name another file", what, err)
		}
	case errors.Is(err, fs.ErrNotExist):
		if _, lerr := os.Lstat(path); lerr == nil && !replace { // a link to nothing
			return nil, errs.With(errs.Refused, &Exists{what, path})
		}
		dir, derr := filepath.EvalSymlinks(filepath.Dir(path))
		if derr != nil || strings.HasSuffix(path, "/") {
			return nil, errs.New(errs.Usage, "%s: %w; name a file in a folder that is there",
				what, err)
		}
		t.real = filepath.Join(dir, filepath.Base(path))
	default:
		return nil, errs.New(errs.Usage, "%s: %w; name a file in a folder that can be written",
			what, err)
	}
	return t, nil
}

// written reports whether the Lines of another process are in a file: replaced, it would go on
// where nobody sees it.
func written(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read
	return errors.Is(lock(f), unix.EWOULDBLOCK)
}

// descriptor is N for the names that Linux gives to this process's file N, else -1. Opening them
// again would begin at the file's start, and renaming would replace the link in /dev.
func descriptor(path string) int {
	switch path = filepath.Clean(path); path {
	case "/dev/stdout":
		return 1
	case "/dev/stderr":
		return 2
	}
	for _, dir := range []string{"/dev/fd/", "/proc/self/fd/"} {
		if n, ok := strings.CutPrefix(path, dir); ok {
			if fd, err := strconv.Atoi(n); err == nil && fd >= 0 {
				return fd
			}
		}
	}
	return -1
}

func (t *target) open() (*os.File, error) {
	if t.fd < 0 {
		return os.OpenFile(t.path, os.O_WRONLY, 0)
	}
	fd, err := unix.FcntlInt(uintptr(t.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), t.path), nil
}

// partialMark stands in temporary names, before a random number.
const partialMark = ".partial-"

// noNames are the errors of open(2) with O_TMPFILE where it makes no files without names: the file
// system, or a kernel that takes it for the opening of a folder, has none.
var noNames = []error{unix.EOPNOTSUPP, unix.EISDIR, unix.ENOENT, unix.EINVAL}

// create makes the new file, and removes those of processes that died.
func (t *target) create() (*File, error) {
	dir, base := filepath.Split(t.real)
	Sweep(dir, "."+base+partialMark, "")
	f := &File{what: t.what, path: t.path, place: t.real, replace: t.replace}
	err := f.openNameless(dir)
	if slices.ContainsFunc(noNames, func(no error) bool { return errors.Is(err, no) }) {
		err = f.name(func(temp string) (err error) { // os.CreateTemp would not heed the umask
			f.f, err = f.open(temp, unix.O_CREAT|unix.O_EXCL)
			return err
		})
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "%s: %w; name a file in a folder that can be written",
			t.what, err)
	}
	return f, nil
}

// openNameless makes a file that link can name.
func (f *File) openNameless(dir string) (err error) {
	if _, err := os.Stat("/proc/self/fd"); err != nil || alwaysNamed {
		return unix.EOPNOTSUPP // link needs it
	}
	f.f, err = f.open(cmp.Or(dir, "."), unix.O_TMPFILE)
	return err
}

// open opens what becomes the file. Its errors name the file as the user did: a full disk is where
// that is, and neither the folder nor a name of ours says so.
func (f *File) open(path string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|flags, 0o666)
		if err == nil {
			return os.NewFile(uintptr(fd), f.path), nil
		}
		if err != unix.EINTR {
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

// alwaysNamed lets tests have what file systems without nameless files have.
var alwaysNamed bool

// name finds a temporary name for which try does not say that it is taken.
func (f *File) name(try func(temp string) error) error {
	dir, base := filepath.Split(f.place)
	err := fs.ErrExist
	for errors.Is(err, fs.ErrExist) {
		f.temp = filepath.Join(dir, "."+base+partialMark+strconv.FormatUint(rand.Uint64(), 10))
		err = try(f.temp)
	}
	if err != nil {
		f.temp = ""
	}
	return err
}

// Sweep removes what dead processes left in dir: regular files whose names are prefix, a number and
// suffix, and that nobody has open. It is best effort; what it can't be sure of stays.
func Sweep(dir, prefix, suffix string) {
	if dir == "" {
		dir = "."
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		n, ok := strings.CutPrefix(e.Name(), prefix)
		n, end := strings.CutSuffix(n, suffix)
		if _, err := strconv.ParseUint(n, 10, 64); !ok || !end || err != nil ||
			!e.Type().IsRegular() {
			continue
		}
		if path := filepath.Join(dir, e.Name()); unused(path) {
			_ = os.Remove(path) // another run's Sweep may have been faster
		}
	}
}

// unused reports whether no process has a file open for writing. The kernel grants a write lease
// (fcntl(2), F_SETLEASE) only then, whoever the writer is and whatever program; where the file
// system has no leases the answer is no.
func unused(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // only read
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return err == nil
}
