// Package samples keeps mini-batches outside of memory between sampling and training: in two files,
// one for the node numbers of their frontiers (Ginex's ids) and one for what else they are, their
// blocks (its adj). A superbatch's Files have no name, so nothing is left of them however the
// process ends; a Store is of a folder, and stays for later runs.
package samples

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/units"
)

// Files are a superbatch's. Append is of one goroutine; what is appended is read by several.
type Files struct {
	batches
	dir string
}

// ErrFull is the cause where a mini-batch does not go into what the files may take.
var ErrFull = errors.New("take more than they may")

// Create makes files without a name on the file system of dir, for node numbers below nodes, that
// take up to limit bytes (0: what there is room for).
func Create(dir string, nodes, limit int64) (*Files, error) {
	f := &Files{dir: dir}
	f.batches = batches{wide: nodes > math.MaxUint32, limit: limit, what: "superbatch in " + dir,
		remedy: "run it again", cause: f.cause, full: f.full}
	for _, to := range []**os.File{&f.ids, &f.adj} {
		var err error
		if *to, err = unnamed(dir); err != nil {
			return nil, errors.Join(f.cause(err), f.Close())
		}
	}
	return f, nil
}

// unnamed opens a file that no folder lists.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), dir), nil
	}
	// File systems without O_TMPFILE say one of these (open(2)): the name lasts for a moment.
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) &&
		!errors.Is(err, unix.EINVAL) {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	f, err := os.CreateTemp(dir, ".superbatch-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// cause adds the remedy to an error of a file.
func (f *Files) cause(err error) error {
	key, dir := errs.Key("superbatch"), errs.Key("superbatch-dir")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG):
		return errs.New(errs.Capability,
			"the samples of a superbatch take more room than %s has (%w; %s were written): lower %v, or give another folder with %v",
			f.dir, err, units.FormatBytes(f.Bytes()), key, dir)
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) ||
		errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
		return errs.New(errs.Usage, "the samples of a superbatch: %w; give another folder with %v",
			err, dir)
	}
	return fmt.Errorf("the samples of a superbatch in %s: %w", f.dir, err)
}

// full is the error of a mini-batch too many.
func (f *Files) full() error {
	return errs.New(errs.Usage,
		"the samples of a superbatch of %d mini-batches %w: %v %s; lower %v, or give more",
		len(f.all)+1, ErrFull, errs.Key("superbatch-disk"), units.FormatBytes(f.limit),
		errs.Key("superbatch"))
}

// Append adds a mini-batch: its frontier and what else belongs to it.
func (f *Files) Append(nodes []int64, adj []byte) error { return f.add(nodes, adj) }

// Close gives the room back.
func (f *Files) Close() error { return f.close() }
