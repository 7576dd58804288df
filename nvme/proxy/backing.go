package proxy

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"helios/internal/durable"
	"helios/internal/errs"
	"helios/internal/fileid"
)

// Create makes the backing file of a new SSD: bytes long, all zeroes, with its space
// reserved where the filesystem can, so that a full disk shows here and not in the middle of
// a write. It never replaces a file, and leaves none behind when it fails.
func Create(path string, bytes int64) (err error) {
	if bytes <= 0 || bytes%4096 != 0 {
		return errs.New(errs.Usage, "size %d of %s: must be a positive multiple of 4096",
			bytes, path)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		if errors.Is(err, fs.ErrExist) {
			return errs.New(errs.Refused,
				"%s exists already: choose another name, or use it as it is", path)
		}
		return errs.New(errs.Usage, "create SSD backing file: %w", err)
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	err = ignoringEINTR(func() error { return unix.Fallocate(int(f.Fd()), 0, 0, bytes) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		err = f.Truncate(bytes) // sparse: the filesystem cannot reserve
	}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.New(errs.Usage,
			"no space for the %d bytes of %s: free some or choose a smaller size (%w)", bytes,
			path, err)
	case errors.Is(err, unix.EFBIG):
		return errs.New(errs.Usage,
			"the filesystem of %s takes no file of %d bytes: choose a smaller size (%w)", path,
			bytes, err)
	case err != nil:
		return fmt.Errorf("reserve %d bytes for %s: %w", bytes, path, err)
	}
	return nil
}

// ReplacedError is that of a backing which is another file or disk than Config.File.
type ReplacedError struct {
	Path string
	How  string // it differs
}

func (e *ReplacedError) Error() string {
	return fmt.Sprintf("%s is not what was bound: %s", e.Path, e.How)
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// backing is the medium: an open, locked file or block device, mapped memory, or content that is
// computed.
type backing struct {
	file   *os.File
	fd     int
	bytes  int64
	direct bool
	// What O_DIRECT asks for: memory addresses, and file offsets with lengths, are multiples
	// of these. 1 when not direct.
	memAlign, offAlign int64
	mem                []byte      // RAM: the whole file, mapped
	calc               io.ReaderAt // computed: there is no file
}

func openBacking(cfg *Config) (*backing, error) {
	if cfg.Content != nil {
		if cfg.Bytes < int64(cfg.LBABytes) {
			return nil, errs.New(errs.Usage, "%s has %d bytes, less than one block of %d", cfg.Name,
				cfg.Bytes, cfg.LBABytes)
		}
		return &backing{fd: -1, bytes: cfg.Bytes - cfg.Bytes%int64(cfg.LBABytes), memAlign: 1,
			offAlign: 1, calc: cfg.Content}, nil
	}
	st, err := os.Stat(cfg.Path)
	if err != nil {
		return nil, errs.New(errs.Usage, "open SSD backing: %w", err)
	}
	isBlock := st.Mode()&fs.ModeDevice != 0 && st.Mode()&fs.ModeCharDevice == 0
	switch {
	case isBlock && cfg.RAM:
		return nil, errs.New(errs.Usage,
			"%s is a block device: a RAM SSD needs a file, best in /dev/shm", cfg.Path)
	case !isBlock && !st.Mode().IsRegular():
		return nil, errs.New(errs.Usage, "%s is neither a file nor a block device", cfg.Path)
	}
	direct := !cfg.Buffered && !cfg.RAM
	f, err := openBackingFile(cfg, isBlock, direct)
	if err != nil {
		return nil, err
	}
	b := &backing{file: f, fd: int(f.Fd()), direct: direct, memAlign: 1, offAlign: 1}
	size, err := b.claim(cfg, isBlock)
	if err == nil {
		err = b.measure(cfg, size)
	}
	if err == nil && cfg.RAM {
		err = b.mapWhole(cfg)
	}
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

// openBackingFile opens the file or block device.
func openBackingFile(cfg *Config, isBlock, direct bool) (*os.File, error) {
	flags := os.O_RDWR
	if cfg.ReadOnly {
		flags = os.O_RDONLY
	}
	if isBlock {
		// On a block device O_EXCL without O_CREAT fails when it is mounted, part of a
		// RAID or volume group, or claimed by another proxy.
		flags |= unix.O_EXCL
	}
	if direct {
		flags |= unix.O_DIRECT
	}
	f, err := os.OpenFile(cfg.Path, flags, 0)
	switch {
	case err == nil:
		return f, nil
	case isBlock && errors.Is(err, unix.EBUSY):
		return nil, errs.New(errs.Refused,
			"%s is in use (mounted, or part of a volume): unmount it or choose another device",
			cfg.Path)
	case direct && errors.Is(err, unix.EINVAL):
		return nil, errs.New(errs.Capability,
			"the filesystem of %s has no direct I/O: use the buffered option", cfg.Path)
	case errors.Is(err, unix.EROFS), errors.Is(err, fs.ErrPermission):
		// A right that is missing, as with the node of a controller that VFIO has.
		return nil, errs.New(errs.Capability,
			"open SSD backing: %w; give write permission or choose another file", err)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return nil, errs.New(errs.Capability, "open SSD backing: %w", err)
	}
	return nil, errs.New(errs.Usage, "open SSD backing: %w", err)
}

// claim checks that the open file is the one that was meant, and locks it. It looks at the file,
// not at its name: that may stand for another by now.
func (b *backing) claim(cfg *Config, isBlock bool) (size int64, err error) {
	id, size, err := fileid.Of(b.file)
	if err != nil {
		return 0, errs.New(errs.Usage, "SSD backing: %w", err)
	}
	if isBlock != (id.Rdev != 0) {
		return 0, errs.New(errs.Refused,
			"%s was replaced while it was opened: look at what it is, then try again", cfg.Path)
	}
	if cfg.File.Known() {
		if how := id.Differs(cfg.File); how != "" {
			return 0, errs.With(errs.Refused, &ReplacedError{Path: cfg.Path, How: how})
		}
	}
	how := unix.LOCK_EX
	if cfg.ReadOnly || cfg.Shared {
		how = unix.LOCK_SH
	}
	err = ignoringEINTR(func() error { return unix.Flock(b.fd, how|unix.LOCK_NB) })
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return 0, errs.New(errs.Refused,
			"SSD %s is in use by %s: wait for it, stop it, or choose another SSD", cfg.Path,
			lockHolder(b.fd))
	case err != nil:
		return 0, fmt.Errorf("lock %s: %w", cfg.Path, err)
	}
	return size, nil
}

// measure sets the size of the medium, in whole blocks and whole units of direct I/O.
func (b *backing) measure(cfg *Config, size int64) error {
	b.bytes = size
	if cfg.Bytes != 0 {
		if cfg.Bytes > size {
			return errs.New(errs.Usage,
				"%s has %d bytes, the SSD shall have %d: it was truncated, or the size is wrong",
				cfg.Path, size, cfg.Bytes)
		}
		b.bytes = cfg.Bytes
	}
	b.bytes -= b.bytes % int64(cfg.LBABytes)
	if b.bytes == 0 {
		return errs.New(errs.Usage, "%s has %d bytes, less than one block of %d", cfg.Path,
			size, cfg.LBABytes)
	}
	if b.direct {
		b.probeDirect()
		// The last, partial unit of O_DIRECT could not be read.
		b.bytes -= b.bytes % b.offAlign
		if b.bytes == 0 {
			return errs.New(errs.Usage, "%s has %d bytes, less than one unit of direct I/O (%d)",
				cfg.Path, size, b.offAlign)
		}
	}
	return nil
}

// mapWhole maps the file of a RAM SSD.
func (b *backing) mapWhole(cfg *Config) (err error) {
	prot := unix.PROT_READ | unix.PROT_WRITE
	if cfg.ReadOnly {
		prot = unix.PROT_READ
	}
	if b.mem, err = unix.Mmap(b.fd, 0, int(b.bytes), prot, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %d bytes of %s: %w", b.bytes, cfg.Path, err)
	}
	// Fewer TLB misses where tmpfs allows huge pages; where it does not, nothing is lost.
	_ = unix.Madvise(b.mem, unix.MADV_HUGEPAGE)
	return nil
}

// probeDirect asks what O_DIRECT needs (statx, Linux 6.1), and assumes 4096 where nobody says.
func (b *backing) probeDirect() {
	b.memAlign, b.offAlign = 4096, 4096
	var st unix.Statx_t
	err := unix.Statx(b.fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 && st.Dio_offset_align != 0 {
		b.memAlign, b.offAlign = int64(max(st.Dio_mem_align, 1)), int64(st.Dio_offset_align)
	}
}

func (b *backing) close() error {
	var err error
	if b.mem != nil {
		err = unix.Munmap(b.mem)
		b.mem = nil
	}
	if b.file != nil {
		err = errors.Join(err, b.file.Close()) // drops the lock, too
		b.file = nil
	}
	return err
}

// lockHolder names the process that holds the lock on an open file.
func lockHolder(fd int) string {
	switch pid := durable.LockHolder(fd); pid {
	case 0:
		return "another process"
	case os.Getpid():
		return fmt.Sprintf("this process (pid %d)", pid)
	default:
		name := ""
		if p, ok := durable.Look(pid); ok {
			name = fmt.Sprintf(" (%q)", p.Comm)
		}
		return fmt.Sprintf("process %d%s", pid, name)
	}
}
