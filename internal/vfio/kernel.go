package vfio

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/pci"
)

// kernel is every system call of this package, so that tests can run against a fake. Calls that a
// signal interrupts are repeated below it.
type kernel interface {
	open(path string) (int, error)
	close(fd int) error
	// raise gives a descriptor a high number, where there is one.
	raise(fd int) int
	// ioctl passes a structure, ioctlInt a number.
	ioctl(fd int, req uintptr, arg unsafe.Pointer) (int, error)
	ioctlInt(fd int, req, arg uintptr) (int, error)
	// memfd makes a file of memory.
	memfd(size int64) (int, error)
	pread(fd int, b []byte, off int64) (int, error)
	pwrite(fd int, b []byte, off int64) (int, error)
	mmap(fd int, off, size int64, prot int) (unsafe.Pointer, error)
	munmap(p unsafe.Pointer, size int64) error
	// memlock returns what the process has locked and may lock; limit -1 means any amount.
	memlock() (used, limit int64, err error)
}

// machine is the kernel and the tree that describes it: root "" is the real one (see pci.Sys).
type machine struct {
	k        kernel
	root     string
	retryFor time.Duration // how long EAGAIN is waited out
	// how long Close and Reset wait before they leave the rest to the background
	closeFor time.Duration
}

func realMachine() machine {
	return machine{k: linux{}, retryFor: 5 * time.Second, closeFor: 10 * time.Second}
}

func (m machine) sys() pci.Sys { return pci.Sys{Root: m.root} }

func (m machine) path(p string) string { return filepath.Join("/", m.root, p) }

func (m machine) exists(p string) bool {
	_, err := os.Stat(m.path(p))
	return err == nil
}

// again repeats f while the kernel says EAGAIN, for a bounded time.
func (m machine) again(f func() error) error {
	for end := time.Now().Add(m.retryFor); ; time.Sleep(20 * time.Millisecond) {
		if err := f(); !errors.Is(err, unix.EAGAIN) || time.Now().After(end) {
			return err
		}
	}
}

// linux is the real kernel.
type linux struct{}

// repeated calls f again for as long as a signal interrupts it.
func repeated(f func() (int, error)) (int, error) {
	for {
		if n, err := f(); err != unix.EINTR {
			return n, err
		}
	}
}

func (linux) open(path string) (int, error) {
	return repeated(func() (int, error) { return unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0) })
}

// close is not repeated: the descriptor is gone whatever close says.
func (linux) close(fd int) error { return unix.Close(fd) }

// highFD is above what other parts of the process are likely to use.
const highFD = 512

// When a process is killed its files are released the highest number first: close_files of
// fs/file.c goes up, each last fput is a task_work, and those run in the reverse order of their
// coming since Linux 4.3 (kernel/task_work.c). A device must be silent, as its release makes it,
// before the files of a GPU's driver are released, and with them the GPU's memory that type1 has
// mapped for the device: so its number is above theirs.
func (linux) raise(fd int) int {
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, highFD)
	if err != nil { // RLIMIT_NOFILE is lower
		return fd
	}
	_ = unix.Close(fd) // its file lives on
	return high
}

func (linux) ioctl(fd int, req uintptr, arg unsafe.Pointer) (int, error) {
	for {
		r, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		if e == 0 {
			return int(r), nil
		}
		if e != unix.EINTR {
			return -1, e
		}
	}
}

func (linux) ioctlInt(fd int, req, arg uintptr) (int, error) {
	for {
		r, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
		if e == 0 {
			return int(r), nil
		}
		if e != unix.EINTR {
			return -1, e
		}
	}
}

func (linux) memfd(size int64) (int, error) {
	fd, err := unix.MemfdCreate("heliosctl probe", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (linux) pread(fd int, b []byte, off int64) (int, error) {
	return repeated(func() (int, error) { return unix.Pread(fd, b, off) })
}

func (linux) pwrite(fd int, b []byte, off int64) (int, error) {
	return repeated(func() (int, error) { return unix.Pwrite(fd, b, off) })
}

func (linux) mmap(fd int, off, size int64, prot int) (unsafe.Pointer, error) {
	return unix.MmapPtr(fd, off, nil, uintptr(size), prot, unix.MAP_SHARED)
}

func (linux) munmap(p unsafe.Pointer, size int64) error { return unix.MunmapPtr(p, uintptr(size)) }

const capIPCLock = 14 // CAP_IPC_LOCK of include/uapi/linux/capability.h

func (linux) memlock() (used, limit int64, err error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, 0, err
	}
	limit = 0
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		f := strings.Fields(value)
		if len(f) == 0 {
			continue
		}
		switch name {
		case "VmLck":
			kb, err := strconv.ParseInt(f[0], 10, 64)
			if err != nil {
				return 0, 0, err
			}
			used = kb << 10
		case "CapEff":
			caps, err := strconv.ParseUint(f[0], 16, 64)
			if err != nil {
				return 0, 0, err
			}
			if caps&(1<<capIPCLock) != 0 {
				limit = -1
			}
		}
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return 0, 0, err
	}
	if limit < 0 || r.Cur > 1<<62 { // RLIM_INFINITY is all ones
		return used, -1, nil
	}
	return used, int64(r.Cur), nil
}
