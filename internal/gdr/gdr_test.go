package gdr

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/errs"
)

// fake plays the module.
type fake struct {
	t       *testing.T
	openErr error
	version versionArgs
	fail    map[uintptr]error
	pins    map[uint64]pinArgs
	info    func(*infoArgs)
	next    uint64
	open_   bool
}

func newFake(t *testing.T) *fake {
	f := &fake{t: t, version: versionArgs{2<<16 | 5, 2 << 16}, fail: map[uintptr]error{},
		pins: map[uint64]pinArgs{}}
	t.Cleanup(func() { require.False(t, f.open_, "left open") })
	return f
}

func (f *fake) open(path string) (int, error) {
	require.Equal(f.t, "/dev/gdrdrv", path)
	if f.openErr != nil {
		return -1, f.openErr
	}
	f.open_ = true
	return 77, nil
}

func (f *fake) close(fd int) error {
	require.Equal(f.t, 77, fd)
	f.open_ = false
	return nil
}

func (f *fake) ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	require.Equal(f.t, 77, fd)
	if err := f.fail[req]; err != nil {
		return err
	}
	switch req {
	case iocVersion:
		*(*versionArgs)(arg) = f.version
	case iocPin:
		a := (*pinArgs)(arg)
		if a.Token != 0 || a.Space != 0 || a.Addr%PageBytes != 0 || a.Size%PageBytes != 0 {
			return unix.EINVAL
		}
		a.Handle = f.next
		f.next += a.Size >> pageShift
		f.pins[a.Handle] = *a
	case iocInfo:
		a := (*infoArgs)(arg)
		p := f.pins[a.Handle]
		a.VA, a.Size, a.PageSize = p.Addr, p.Size, PageBytes
		if f.info != nil {
			f.info(a)
		}
	case iocUnpin:
		h := (*unpinArgs)(arg).Handle
		if _, ok := f.pins[h]; !ok {
			return unix.EINVAL
		}
		delete(f.pins, h)
	default:
		return unix.ENOTTY
	}
	return nil
}

// The numbers that _IOWR makes: both directions, the argument's size, 0xDA and the number
// (include/uapi/asm-generic/ioctl.h); all but the pin take the size of a pointer.
func TestRequests(t *testing.T) {
	iowr := func(n, size uintptr) uintptr { return 3<<30 | size<<16 | 0xda<<8 | n }
	require.Equal(t, iowr(1, unsafe.Sizeof(pinArgs{})), uintptr(iocPin))
	for n, req := range map[uintptr]uintptr{2: iocUnpin, 4: iocInfo, 255: iocVersion} {
		require.Equal(t, iowr(n, 8), req)
	}
	require.EqualValues(t, 32, unsafe.Offsetof(pinArgs{}.Handle))
	require.EqualValues(t, 24, unsafe.Offsetof(infoArgs{}.PageSize))
	require.EqualValues(t, 40, unsafe.Offsetof(infoArgs{}.Mapped))
}

func TestPins(t *testing.T) {
	f := newFake(t)
	d, err := open(f)
	require.NoError(t, err)
	require.Equal(t, "2.5", d.Version())
	require.Equal(t, 77, d.FD())
	a, err := d.Pin(0x7f0000000000, 100)
	require.NoError(t, err)
	require.EqualValues(t, PageBytes, a.Bytes)
	b, err := d.Pin(0x7f0000100000, 3*PageBytes)
	require.NoError(t, err)
	require.EqualValues(t, 0, a.Offset())
	require.EqualValues(t, PageBytes, b.Offset(), "the handle is in pages of the kernel")
	require.NoError(t, d.Unpin(a))
	require.ErrorContains(t, d.Unpin(a), "are not pinned")
	f.fail[iocUnpin] = unix.EIO
	require.ErrorIs(t, d.Unpin(b), unix.EIO)
	delete(f.fail, iocUnpin)
	require.NoError(t, d.Unpin(b), "what was not unpinned can be")
	require.Empty(t, f.pins)

	for _, bad := range []struct {
		addr  uint64
		bytes int64
	}{{0, 1}, {4096, 1}, {PageBytes, 0}, {PageBytes, -1}} {
		_, err = d.Pin(bad.addr, bad.bytes)
		require.ErrorContains(t, err, "whole pages")
	}
	f.fail[iocPin] = unix.EINVAL
	_, err = d.Pin(PageBytes, 1)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "dmesg")
	delete(f.fail, iocPin)
	// A module that pins something else is not believed, and nothing stays pinned.
	live := len(f.pins)
	for _, lie := range []func(
		*infoArgs){
		func(a *infoArgs) { a.VA += PageBytes }, func(a *infoArgs) { a.Size -= 4096 },
		func(a *infoArgs) { a.PageSize = 4096 }} {
		f.info = lie
		_, err = d.Pin(PageBytes, 1)
		require.Equal(t, errs.Capability, errs.ClassOf(err))
		require.Len(t, f.pins, live)
	}
	require.NoError(t, d.Close())
}

func TestMissing(t *testing.T) {
	for _, c := range []struct {
		what  string
		do    func(f *fake)
		words string
		class errs.Class
	}{
		{"absent", func(f *fake) { f.openErr = unix.ENOENT },
			"is not loaded; install GDRCopy's module", errs.Capability},
		{"no rights", func(f *fake) { f.openErr = unix.EACCES }, "no right to open",
			errs.Capability},
		{"broken", func(f *fake) { f.openErr = unix.EIO }, "input/output error", errs.Failed},
		{"of 1.3", func(f *fake) { f.fail[iocVersion] = unix.EINVAL }, "older than 2.0",
			errs.Capability},
		{"too old", func(f *fake) { f.version.Version = 1<<16 | 9 }, "version 1.9 is too old",
			errs.Capability},
		{"too new", func(f *fake) { f.version = versionArgs{3 << 16, 3 << 16} },
			"wants callers of version 3.0", errs.Capability},
	} {
		f := newFake(t)
		c.do(f)
		_, err := open(f)
		require.ErrorContains(t, err, c.words)
		require.Equal(t, c.class, errs.ClassOf(err), c.what)
	}
}
