package pages

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/nvme/proxy"
)

// PagesName is the file of the pages, one behind the other, beside SumsName.
const PagesName = "pages"

// Folder writes a store of pages as a file, past the page cache where the file system can. It is a
// packed.Pages, and safe for concurrent use; a page is written by one goroutine at a time.
type Folder struct {
	dir     string
	spec    Spec
	f       *os.File
	align   int64 // of memory, offsets and lengths: 1 without O_DIRECT
	resumed bool
	buffers chan []byte

	mu   sync.Mutex // of sums
	sums []uint32
}

// A piece is moved at a time through one of folderBuffers, where the caller's memory is not
// aligned.
const (
	folderPiece   = 1 << 20
	folderBuffers = 4
)

// CreateFolder makes the pages of s in dir, which is there: a file of zeros with all its space
// reserved, so that a full disk shows now; then nothing is left. Pages that were not finished are
// resumed: they hold what was written before the last Sync, and of later writes some, or
// parts. Finished ones are a *FinishedError of class refused, others than s are refused too, and so
// are pages that another process writes or reads.
func CreateFolder(dir string, s Spec) (_ *Folder, err error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if err := roomForSums(s.Pages); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, PagesName)
	f := &Folder{dir: dir, spec: s}
	old, err := readSums(dir, &s)
	switch {
	case err == nil && old.complete:
		return nil, finished(dir)
	case err == nil:
		f.sums = old.sums
		err = f.reopen(path)
	case errors.Is(err, fs.ErrNotExist):
		err = f.begin(path)
	}
	if err != nil {
		return nil, err
	}
	f.buffers = make(chan []byte, folderBuffers)
	for range folderBuffers {
		b, err := hostmem.Alloc(folderPiece, "pages")
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		f.buffers <- b
	}
	return f, nil
}

// begin makes both files. The table is first: pages without one are nobody's.
func (f *Folder) begin(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return errs.New(errs.Refused,
			"%s is there without %s, so it is not known whose it is; name another folder, or look at it and remove it",
			path, SumsName)
	}
	f.sums = make([]uint32, f.spec.Pages)
	zero := zeroSum(f.spec.PageBytes)
	for i := range f.sums {
		f.sums[i] = zero
	}
	if err := (&sumsFile{spec: f.spec, sums: f.sums}).write(f.dir); err != nil {
		return f.cause(err)
	}
	if err := f.reserve(path); err != nil {
		return err
	}
	return f.open(path)
}

// reopen resumes pages that were not finished.
func (f *Folder) reopen(path string) error {
	f.resumed = true
	st, err := os.Lstat(path)
	if err == nil && st.Mode().IsRegular() && st.Size() == f.spec.Bytes() {
		return f.open(path)
	}
	// Making them was cut off, then no page was written; or they were cut short later.
	for p, zero := 0, zeroSum(f.spec.PageBytes); p < len(f.sums); p++ {
		if f.sums[p] != zero {
			if err != nil {
				return damaged(path, "%v, and %d pages were written", err, len(f.sums))
			}
			return damaged(path, "it is %s of %d bytes and should be a file of %d",
				st.Mode().Type(), st.Size(), f.spec.Bytes())
		}
	}
	switch {
	case err == nil && !st.Mode().IsRegular():
		return errs.New(errs.Refused, "%s is no file; look at it and remove it", path)
	case err == nil:
		if err := os.Remove(path); err != nil {
			return errs.With(errs.Usage, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return errs.With(errs.Usage, err)
	}
	if err := f.reserve(path); err != nil {
		return err
	}
	return f.open(path)
}

// reserve makes the file of zeros, or leaves nothing, not even the table.
func (f *Folder) reserve(path string) error {
	err := proxy.Create(path, f.spec.Bytes())
	if err == nil {
		return nil
	}
	if no := unix.Errno(0); errors.As(err, &no) &&
		(no == unix.ENOSPC || no == unix.EDQUOT || no == unix.EFBIG) {
		err = errs.New(errs.Capability, // their size is not for anybody to choose
			"prepared pages take %s, more room than %s has (%w): free some, or name another folder",
			units.FormatBytes(f.spec.Bytes()), f.dir, no)
	} else {
		err = fmt.Errorf("prepared pages take %s: %w", units.FormatBytes(f.spec.Bytes()), err)
	}
	if errs.ClassOf(err) == errs.Refused { // another process was faster: the table is its own
		return err
	}
	return errors.Join(err, os.Remove(filepath.Join(f.dir, SumsName)))
}

// open opens the file of the pages and locks it.
func (f *Folder) open(path string) error {
	flags := os.O_RDWR | unix.O_NOFOLLOW
	fd, err := os.OpenFile(path, flags|unix.O_DIRECT, 0)
	f.align = align
	if errors.Is(err, unix.EINVAL) { // a file system without direct I/O
		fd, err = os.OpenFile(path, flags, 0)
		f.align = 1
	}
	if err != nil {
		return errs.With(errs.Usage, err)
	}
	f.f = fd
	if f.align > 1 && offsetAlign(int(fd.Fd())) > align {
		// Pages of this size cannot be read and written directly here.
		fl, err := unix.FcntlInt(fd.Fd(), unix.F_GETFL, 0)
		if err == nil {
			_, err = unix.FcntlInt(fd.Fd(), unix.F_SETFL, fl&^unix.O_DIRECT)
		}
		if err != nil {
			return errors.Join(errs.With(errs.Device, err), f.Close())
		}
		f.align = 1
	}
	var held *durable.HeldError
	if errors.As(durable.LockFile(fd), &held) {
		return errors.Join(errs.New(errs.Refused,
			"%s is in use by %s; wait for it, or name another folder", path, held.Holder), f.Close())
	}
	// Between the table that was read and the lock another process may have finished them.
	now, err := readSums(f.dir, &f.spec)
	if err == nil && now.complete {
		err = finished(f.dir)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	f.sums = now.sums
	return nil
}

// offsetAlign asks what offsets of direct I/O are multiples of; 1 where nobody says.
func offsetAlign(fd int) int64 {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil &&
		st.Mask&unix.STATX_DIOALIGN != 0 {
		return int64(max(st.Dio_offset_align, st.Dio_mem_align))
	}
	return 1
}

// Spec returns the properties of the store.
func (f *Folder) Spec() Spec { return f.spec }

// Resumed reports whether pages were there that are resumed.
func (f *Folder) Resumed() bool { return f.resumed }

// WriteAt writes whole pages from a page on.
func (f *Folder) WriteAt(ctx context.Context, page int64, data []byte) error {
	if err := f.spec.CheckRun(page, data); err != nil {
		return err
	}
	if err := f.move(ctx, page, data, func(b, to []byte, offset int64) error {
		if f.bounced(b) {
			copy(to, b)
			b = to[:len(b)]
		}
		_, err := f.f.WriteAt(b, offset)
		return err
	}); err != nil {
		return err
	}
	size := f.spec.PageBytes
	for p := page; len(data) > 0; p++ {
		sum := crc32.Checksum(data[:size], castagnoli)
		f.mu.Lock()
		f.sums[p] = sum
		f.mu.Unlock()
		data = data[size:]
	}
	return nil
}

// ReadAt reads whole pages from a page on. They are not checked: after a crash those of the last
// moments are rewritten by whoever goes on.
func (f *Folder) ReadAt(ctx context.Context, page int64, data []byte) error {
	if err := f.spec.CheckRun(page, data); err != nil {
		return err
	}
	return f.move(ctx, page, data, func(b, from []byte, offset int64) error {
		to := b
		if f.bounced(b) {
			to = from[:len(b)]
		}
		n, err := f.f.ReadAt(to, offset)
		if n < len(to) {
			if errors.Is(err, io.EOF) {
				return damaged(f.f.Name(), "it ends at byte %d", offset+int64(n))
			}
			return err
		}
		if f.bounced(b) {
			copy(b, to)
		}
		return nil
	})
}

// bounced reports whether memory has to be copied to where direct I/O takes it.
func (f *Folder) bounced(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(f.align) != 0
}

// move gives fn data in pieces, a buffer for each, and where in the file it belongs.
func (f *Folder) move(ctx context.Context, page int64, data []byte,
	fn func(b, buf []byte, offset int64) error) error {
	if len(data) == 0 {
		return nil
	}
	var buf []byte
	select {
	case buf = <-f.buffers:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { f.buffers <- buf }()
	for offset := page * f.spec.PageBytes; len(data) > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(len(data), folderPiece)
		if err := fn(data[:n], buf, offset); err != nil {
			return f.cause(err)
		}
		offset += int64(n)
		data = data[n:]
	}
	return nil
}

// Sync makes durable what was written, and then the checksums of it.
func (f *Folder) Sync(ctx context.Context) error { return f.sync(ctx, false) }

// Finish is Sync, and says that the pages are whole: from then on they are read only.
func (f *Folder) Finish(ctx context.Context) error { return f.sync(ctx, true) }

func (f *Folder) sync(ctx context.Context, complete bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	// The table must not be ahead of the pages: it is taken before they are made durable.
	f.mu.Lock()
	sums := append([]uint32(nil), f.sums...)
	f.mu.Unlock()
	if err := f.f.Sync(); err != nil {
		return f.cause(err)
	}
	s := sumsFile{spec: f.spec, complete: complete, sums: sums}
	return f.cause(s.write(f.dir))
}

// Close ends the writing. Pages that are not finished stay, to be resumed.
func (f *Folder) Close() error {
	var err error
	if f.f != nil {
		err = f.f.Close() // drops the lock, too
		f.f = nil
	}
	for len(f.buffers) > 0 {
		err = errors.Join(err, hostmem.Free(<-f.buffers))
	}
	return err
}

// cause adds the next step to an error of the file.
func (f *Folder) cause(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errs.New(errs.Capability,
			"the prepared pages take more room than %s has (%w): free some, or name another folder",
			f.dir, err)
	case errors.Is(err, unix.EIO):
		return errs.New(errs.Device,
			"the prepared pages in %s: %w; look at the kernel's log for the storage behind it",
			f.dir, err)
	}
	return err
}

// RemoveFolder removes the pages and their checksums from dir; what is not there is no error. The
// table goes last: pages without one would be nobody's.
func RemoveFolder(dir string) error {
	for _, name := range []string{PagesName, SumsName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return errs.With(errs.Usage, err)
		}
	}
	return nil
}
