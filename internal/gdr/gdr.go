// Package gdr speaks with gdrdrv, NVIDIA's kernel module of GDRCopy, which maps a GPU's memory for
// the CPU: pages are pinned by their GPU address and mapped at an offset of /dev/gdrdrv. The
// numbers and structures are those of its header (src/gdrdrv/gdrdrv.h, version 2.x).
package gdr

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// PageBytes is the size of the GPU's pages that the module pins (nvidia_p2p_get_pages has them in
// 64 KiB).
const PageBytes = 64 << 10

// Node is the module's device.
const Node = "/dev/gdrdrv"

const pageShift = 12 // the kernel's pages on x86-64; offsets of mmap count in them

// ioctl requests: _IOWR(0xDA, n, T), where T is a structure for Pin and a pointer for all others.
const (
	iocPin     = 0xc028da01
	iocUnpin   = 0xc008da02
	iocInfo    = 0xc008da04
	iocVersion = 0xc008daff
)

type pinArgs struct {
	Addr, Size, Token uint64
	Space             uint32
	_                 uint32
	Handle            uint64
}

type unpinArgs struct{ Handle uint64 }

type infoArgs struct {
	Handle, VA, Size uint64
	PageSize, TSCkHz uint32
	Cycles           uint64
	Mapped, WC       uint32
}

type versionArgs struct{ Version, MinimumAPI uint32 }

// Sizes as the module has them; a difference does not compile.
var (
	_ [40]byte = [unsafe.Sizeof(pinArgs{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(unpinArgs{})]byte{}
	_ [48]byte = [unsafe.Sizeof(infoArgs{})]byte{}
	_ [8]byte  = [unsafe.Sizeof(versionArgs{})]byte{}
)

// Interface versions: of the module that are spoken here, and what we offer it.
const (
	oldest  = 2 << 16
	ours    = 2<<16 | 4
	install = "install GDRCopy's module (package gdrdrv-dkms) and load it with \"modprobe gdrdrv\""
)

// kernel is every system call of this package, so that tests can play the module.
type kernel interface {
	open(path string) (int, error)
	ioctl(fd int, req uintptr, arg unsafe.Pointer) error
	close(fd int) error
}

type linux struct{}

func (linux) open(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

func (linux) ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		if e == 0 {
			return nil
		}
		if e != unix.EINTR {
			return e
		}
	}
}

func (linux) close(fd int) error { return unix.Close(fd) }

// Driver is the open module. It serves the process that opened it only. It is safe for concurrent
// use.
type Driver struct {
	k       kernel
	fd      int
	version uint32

	mu   sync.Mutex
	pins map[uint64]bool // handles
}

// Pin is a range of GPU memory that the module holds.
type Pin struct {
	Handle uint64 // the module's
	Addr   uint64 // on the GPU
	Bytes  int64  // whole pages of the GPU
}

// Offset shows where the range is in the module's file, for mmap. It is mapped once, from its
// beginning.
func (p Pin) Offset() int64 { return int64(p.Handle << pageShift) }

// Open opens the module. Errors are of class Capability: it is missing, not ours to use, or of
// another age than this program.
func Open() (*Driver, error) { return open(linux{}) }

func open(k kernel) (*Driver, error) {
	fd, err := k.open(Node)
	if err != nil {
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
			return nil, errs.New(errs.Capability,
				"%s: %w: the kernel module gdrdrv is not loaded; %s", Node, err, install)
		case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
			return nil, errs.New(errs.Capability,
				"%s: no right to open it: %w; let your group have it (chgrp, chmod g+rw)",
				Node, err)
		}
		return nil, fmt.Errorf("%s: %w", Node, err)
	}
	d := &Driver{k: k, fd: fd, pins: map[uint64]bool{}}
	if err := d.hello(); err != nil {
		return nil, errors.Join(err, k.close(fd))
	}
	return d, nil
}

// hello checks that both sides speak one version.
func (d *Driver) hello() error {
	var v versionArgs
	if err := d.k.ioctl(d.fd, iocVersion, unsafe.Pointer(&v)); err != nil {
		return errs.New(errs.Capability,
			"%s: it does not tell its version (%w), so it is older than 2.0; %s of version 2.0 or later",
			Node, err, install)
	}
	d.version = v.Version
	if v.Version < oldest {
		return errs.New(errs.Capability, "%s: version %s is too old; %s of version 2.0 or later",
			Node, d.Version(), install)
	}
	if v.MinimumAPI > ours {
		return errs.New(errs.Capability,
			"%s: version %s wants callers of version %s or later, and this program is of %s; load an older module",
			Node, d.Version(), dotted(v.MinimumAPI), dotted(ours))
	}
	return nil
}

func dotted(v uint32) string { return fmt.Sprintf("%d.%d", v>>16, v&0xffff) }

// Version is the module's, such as 2.4.
func (d *Driver) Version() string { return dotted(d.version) }

// FD is the module's file, for mmap.
func (d *Driver) FD() int { return d.fd }

// Pin holds a range of the GPU's memory, which starts at a multiple of PageBytes; its end is
// rounded up. The context that owns the memory must be current to nobody in particular. Pinned
// memory stays at its place behind the GPU's BAR until Unpin. It has to be unpinned before it is
// freed: where the module can pin persistently (nvidia_p2p_get_pages_persistent), freed memory
// stays taken until Unpin or Close; elsewhere the module takes the mapping away from who uses it.
func (d *Driver) Pin(addr uint64, bytes int64) (Pin, error) {
	if addr == 0 || addr%PageBytes != 0 || bytes <= 0 {
		return Pin{}, fmt.Errorf("gdrdrv: pin %d bytes at %#x: want whole pages of %d bytes", bytes,
			addr, PageBytes)
	}
	whole := (bytes + PageBytes - 1) &^ (PageBytes - 1)
	a := pinArgs{Addr: addr, Size: uint64(whole)}
	if err := d.k.ioctl(d.fd, iocPin, unsafe.Pointer(&a)); err != nil {
		return Pin{}, errs.New(errs.Capability,
			"gdrdrv: pin %d bytes of GPU memory at %#x: %w (see its words in dmesg)", whole,
			addr, err)
	}
	p := Pin{a.Handle, addr, whole}
	d.mu.Lock()
	d.pins[p.Handle] = true
	d.mu.Unlock()
	info := infoArgs{Handle: p.Handle}
	err := d.k.ioctl(d.fd, iocInfo, unsafe.Pointer(&info))
	if err == nil && (info.VA != addr || info.Size < uint64(whole) || info.PageSize != PageBytes) {
		err = fmt.Errorf("it pinned %d bytes at %#x in pages of %d bytes", info.Size, info.VA,
			info.PageSize)
	}
	if err != nil {
		return Pin{},
			errors.Join(errs.New(errs.Capability, "gdrdrv: %d bytes of GPU memory at %#x: %w",
				whole, addr, err), d.Unpin(p))
	}
	return p, nil
}

// Unpin releases a range. Its mapping should be gone; the module takes away what is left of it.
// After an error it is still pinned, and Unpin can be tried again.
func (d *Driver) Unpin(p Pin) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.pins[p.Handle] {
		return fmt.Errorf("gdrdrv: unpin %d bytes at %#x, which are not pinned", p.Bytes, p.Addr)
	}
	a := unpinArgs{p.Handle}
	if err := d.k.ioctl(d.fd, iocUnpin, unsafe.Pointer(&a)); err != nil {
		return fmt.Errorf("gdrdrv: unpin %d bytes at %#x: %w", p.Bytes, p.Addr, err)
	}
	delete(d.pins, p.Handle)
	return nil
}

// Close releases all that is pinned, and the module.
func (d *Driver) Close() error {
	if err := d.k.close(d.fd); err != nil {
		return fmt.Errorf("gdrdrv: close: %w", err)
	}
	return nil
}
