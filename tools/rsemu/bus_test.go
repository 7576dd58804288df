//go:build linux && (amd64 || arm64) && !nocuda

// Package rsemu_test runs heliosctl's queues on an NVMe controller that others wrote: that of the
// crate rsemu, in this process (src/lib.rs). "make test-rsemu" builds the library and starts the
// tests.
package rsemu_test

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/internal/dl"
	"helios/internal/hostmem"
	"helios/nvme"
)

// libraryVar names the library that src/lib.rs makes.
const libraryVar = "HELIOS_RSEMU"

var library struct {
	sync.Once
	err error

	make    func(bytes uint64, shift, queues uint32, serial string) uintptr
	free    func(h uintptr)
	read32  func(h uintptr, off uint32, value unsafe.Pointer) int32
	write32 func(h uintptr, off, value uint32) int32
	mapMem  func(h uintptr, at, bytes uint64)
	unmap   func(h uintptr, at, bytes uint64) int32
	refused func(h uintptr) uint64
}

func needLibrary(t *testing.T) {
	t.Helper()
	path := os.Getenv(libraryVar)
	if path == "" {
		t.Skip("$" + libraryVar + " names no library of the crate rsemu; make test-rsemu builds it")
	}
	library.Do(func() {
		var h uintptr
		if h, library.err = dl.Open(path); library.err == nil {
			library.err = dl.Bind(h, map[string]any{
				"helios_rsemu_new": &library.make, "helios_rsemu_free": &library.free,
				"helios_rsemu_read32": &library.read32, "helios_rsemu_write32": &library.write32,
				"helios_rsemu_map": &library.mapMem, "helios_rsemu_unmap": &library.unmap,
				"helios_rsemu_refused": &library.refused,
			})
		}
	})
	require.NoError(t, library.err)
}

// device is a controller of rsemu and what it stores, for one bus after the other.
type device struct {
	name string
	h    uintptr
}

func newDevice(t *testing.T, name string, bytes uint64, shift uint32) *device {
	t.Helper()
	d := &device{name, library.make(bytes, shift, 8, name)}
	require.NotZero(t, d.h, "rsemu takes no namespace of %d bytes", bytes)
	t.Cleanup(func() { library.free(d.h) })
	return d
}

// refused counts the controller's accesses to memory that is not mapped.
func (d *device) refused() uint64 { return library.refused(d.h) }

// bus is the way to a controller of rsemu. Doorbells are words of this process, as a device with a
// BAR has them; a goroutine hands each store on, as the bus of a machine does.
type bus struct {
	*device
	bell []byte

	mu     sync.RWMutex // held by calls, and to write by Close
	closed bool
	stop   chan struct{}
	done   chan struct{}
}

// The doorbells that a store can be seen at: more than the model has.
const (
	bells   = 256
	noStore = 1<<32 - 1 // no doorbell takes it
)

var errClosed = errors.New("the bus is closed")

func (d *device) open() (*bus, error) {
	mem, err := hostmem.Alloc(4*bells, "rsemu doorbells")
	if err != nil {
		return nil, err
	}
	b := &bus{device: d, bell: mem, stop: make(chan struct{}), done: make(chan struct{})}
	for i := range hostmem.View[uint32](mem) {
		hostmem.View[uint32](mem)[i] = noStore
	}
	go b.serve()
	return b, nil
}

// serve hands stores on until the bus is closed.
func (b *bus) serve() {
	defer close(b.done)
	words := hostmem.View[uint32](b.bell)
	for {
		for i := range words {
			if v := atomic.LoadUint32(&words[i]); v == noStore {
				continue
			}
			v := atomic.SwapUint32(&words[i], noStore)
			library.write32(b.h, 0x1000+4*uint32(i), v)
		}
		select {
		case <-b.stop:
			return
		case <-time.After(20 * time.Microsecond):
		}
	}
}

func (b *bus) Name() string { return "rsemu:" + b.name }

func (b *bus) call(f func() bool) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.closed {
		return errClosed
	}
	if !f() {
		return fmt.Errorf("%s: rsemu has no such register or mapping", b.Name())
	}
	return nil
}

func (b *bus) Read32(off uint32) (uint32, error) {
	v := new(uint32)
	err := b.call(func() bool { return library.read32(b.h, off, unsafe.Pointer(v)) != 0 })
	return *v, err
}

func (b *bus) Write32(off, v uint32) error {
	return b.call(func() bool { return library.write32(b.h, off, v) != 0 })
}

func (b *bus) Read64(off uint32) (uint64, error) {
	lo, err := b.Read32(off)
	if err != nil {
		return 0, err
	}
	hi, err := b.Read32(off + 4)
	return uint64(hi)<<32 | uint64(lo), err
}

func (b *bus) Write64(off uint32, v uint64) error {
	return errors.Join(b.Write32(off, uint32(v)), b.Write32(off+4, uint32(v>>32)))
}

func (b *bus) Doorbell(i uint32) (*uint32, error) {
	words := hostmem.View[uint32](b.bell)
	if int(i) >= len(words) {
		return nil, fmt.Errorf("%s has no doorbell %d", b.Name(), i)
	}
	return &words[i], nil
}

func (b *bus) MapDMA(mem []byte) (nvme.IOVA, error) {
	pos := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	return nvme.IOVA(pos), b.call(func() bool {
		library.mapMem(b.h, pos, uint64(len(mem)))
		return true
	})
}

func (b *bus) UnmapDMA(iova nvme.IOVA, bytes int64) error {
	return b.call(func() bool { return library.unmap(b.h, uint64(iova), uint64(bytes)) != 0 })
}

func (b *bus) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	close(b.stop)
	<-b.done
	b.closed = true
	return hostmem.Free(b.bell)
}
