// Package infile opens files that somebody else made. A name can stand for a pipe, which blocks
// whoever opens it, a device, which never ends, or a folder; these are refused before anything is
// read. So is a pointer of Git LFS, which stands where the data should be.
package infile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// lfsPrefix begins a pointer of Git LFS (git-lfs, docs/spec.md); it has less than 1024 bytes.
const (
	lfsPrefix = "version https://git-lfs.github.com/spec/"
	lfsMax    = 1024
)

// Open opens a regular file to read. Errors are of class usage and name the file.
func Open(path string) (*os.File, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	if err := Check(path, st); err != nil {
		return nil, err
	}
	if err := notOfKernel(path); err != nil {
		return nil, err
	}
	// The file may have been replaced since: a pipe does not block, and what was opened is looked
	// at again.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	if st, err = f.Stat(); err == nil {
		err = Check(path, st)
	}
	if err == nil {
		err = pointer(path, f, st.Size())
	}
	if err != nil {
		return nil, errors.Join(errs.With(errs.Usage, err), f.Close())
	}
	return f, nil
}

// kernelFiles are file systems whose files look regular, and may block whoever reads them
// (/proc/kmsg, trace_pipe) or never end.
var kernelFiles = []int64{unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.DEBUGFS_MAGIC,
	unix.TRACEFS_MAGIC}

func notOfKernel(path string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return errs.With(errs.Usage, &os.PathError{Op: "statfs", Path: path, Err: err})
	}
	if slices.Contains(kernelFiles, int64(fs.Type)) { //nolint:unconvert // 32 bits on some machines
		return errs.New(errs.Usage, "%s is a file of the kernel; a regular file is needed", path)
	}
	return nil
}

// Check refuses what is not a regular file.
func Check(path string, st fs.FileInfo) error {
	if st.Mode().IsRegular() {
		return nil
	}
	return errs.New(errs.Usage, "%s is %s; a regular file is needed", path, kind(st.Mode()))
}

func kind(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a folder"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "no regular file"
}

func pointer(path string, f *os.File, size int64) error {
	if size < int64(len(lfsPrefix)) || size >= lfsMax {
		return nil
	}
	head := make([]byte, len(lfsPrefix))
	if _, err := f.ReadAt(head, 0); err != nil || !bytes.Equal(head, []byte(lfsPrefix)) {
		return nil //nolint:nilerr // whoever reads the file says so
	}
	return fmt.Errorf(
		"%s is a pointer of Git LFS, not the data; run \"git lfs pull\" where it comes from, and copy the file again",
		path)
}

// Read returns the content of a regular file of at most limit bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	st, err := f.Stat()
	if err != nil {
		return nil, errs.With(errs.Device, err)
	}
	// Room for a last read that finds the end, so that the buffer does not grow.
	b := bytes.NewBuffer(make([]byte, 0, min(st.Size(), limit)+bytes.MinRead))
	if _, err := b.ReadFrom(io.LimitReader(f, limit+1)); err != nil {
		return nil, errs.With(errs.Device, err)
	}
	if int64(b.Len()) > limit {
		return nil, errs.New(errs.Usage, "%s has more than %d bytes, the most that is read",
			path, limit)
	}
	return b.Bytes(), nil
}
