package vfio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/pci"
)

// ErrGone is in the errors of a device that left its bus.
var ErrGone = errors.New("the device left its bus")

// Device is a PCI function that the process drives. Its methods are safe for concurrent use.
type Device struct {
	dom *Domain
	dev pci.Device
	fd  int

	asked, failed, given chan struct{}
	wake                 int           // eventfd that ends the watch
	watched              chan struct{} // closed when the watch ended
	events               []int         // eventfds that the kernel signals
	canReset             bool
	giveErr              error // valid when given is closed

	mu     sync.RWMutex // held for reading during every use of fd
	closed atomic.Bool

	smu     sync.Mutex
	regions map[int]regionAt
	maps    map[unsafe.Pointer]int64 // live mappings of regions, by address
}

type regionAt struct {
	Region
	offset int64
}

// Region numbers: BARs 0 to 5, and the configuration space.
const (
	RegionBAR0   = 0
	RegionConfig = 7
)

// Region describes one region of a device.
type Region struct {
	Size        int64
	Read, Write bool
	Mappable    []Span // the parts that MapRegion takes; all of it, or less (sparse mmap, MSI-X)
}

// Span is a part of a region.
type Span struct{ Offset, Size int64 }

func newDevice(d *Domain, dev pci.Device, fd int) *Device {
	return &Device{
		dom: d, dev: dev, fd: fd, wake: -1,
		asked: make(chan struct{}), failed: make(chan struct{}), given: make(chan struct{}),
		watched: make(chan struct{}),
		regions: map[int]regionAt{}, maps: map[unsafe.Pointer]int64{},
	}
}

// start asks what the device can do and begins to listen to the kernel. On error it leaves nothing
// but fd behind.
func (d *Device) start() error {
	k := d.dom.m.k
	info := deviceInfo{Argsz: uint32(unsafe.Sizeof(deviceInfo{}))}
	if _, err := k.ioctl(d.fd, vfioDeviceGetInfo, unsafe.Pointer(&info)); err != nil {
		return errs.New(errs.Device, "vfio %s: ask for the device's abilities: %w", d.dev.Addr, err)
	}
	if info.Flags&deviceFlagPCI == 0 || info.NumRegions <= RegionConfig {
		return errs.New(errs.Device, "vfio %s: not a PCI device (flags %#x, %d regions)",
			d.dev.Addr, info.Flags, info.NumRegions)
	}
	d.canReset = info.Flags&deviceFlagReset != 0
	if err := d.listen(info.NumIRQs); err != nil {
		d.closeEvents()
		return err
	}
	return nil
}

// listen gives the kernel an eventfd for each of its two messages, where it has them.
func (d *Device) listen(irqs uint32) error {
	var err error
	if d.wake, err = eventfd(); err != nil {
		return fmt.Errorf("vfio %s: %w", d.dev.Addr, err)
	}
	fds, done := []unix.PollFd{{Fd: int32(d.wake), Events: unix.POLLIN}}, []chan struct{}{nil}
	for index, ch := range map[uint32]chan struct{}{irqIndexREQ: d.asked, irqIndexERR: d.failed} {
		if index >= irqs {
			continue
		}
		info := irqInfo{Argsz: uint32(unsafe.Sizeof(irqInfo{})), Index: index}
		// A device without PCI Express has no ERR, which the kernel says as EINVAL.
		if _, err := d.dom.m.k.ioctl(d.fd, vfioDeviceGetIRQInfo,
			unsafe.Pointer(&info)); err != nil || info.Count == 0 ||
			info.Flags&irqInfoEventfd == 0 {
			continue
		}
		fd, err := eventfd()
		if err != nil {
			return fmt.Errorf("vfio %s: %w", d.dev.Addr, err)
		}
		d.events = append(d.events, fd)
		set := irqSet{
			Argsz: uint32(unsafe.Sizeof(irqSet{})), Flags: irqSetDataEventfd | irqSetActionTrigger,
			Index: index, Count: 1, FD: int32(fd),
		}
		if _, err := d.dom.m.k.ioctl(d.fd, vfioDeviceSetIRQs, unsafe.Pointer(&set)); err != nil {
			return errs.New(errs.Device, "vfio %s: listen to the kernel's message %d: %w",
				d.dev.Addr, index, err)
		}
		fds, done = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}), append(done, ch)
	}
	go d.watch(fds, done)
	return nil
}

func eventfd() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("eventfd: %w", err)
	}
	return fd, nil
}

// watch closes done[i] when fds[i] is signalled, and ends with the signal of fds[0].
func (d *Device) watch(fds []unix.PollFd, done []chan struct{}) {
	defer close(d.watched)
	for {
		_, err := unix.Poll(fds, -1)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || fds[0].Revents != 0 {
			// an error means that somebody closed our descriptors: there is nothing to listen to
			return
		}
		for i := 1; i < len(fds); i++ {
			if fds[i].Fd >= 0 && fds[i].Revents != 0 {
				close(done[i])
				fds[i].Fd, fds[i].Revents = -1, 0 // poll skips it from now on
			}
		}
	}
}

// closeEvents closes the eventfds of a watch that has ended or never began.
func (d *Device) closeEvents() {
	for _, fd := range append(d.events, d.wake) {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	d.events, d.wake = nil, -1
}

// Addr is the PCI address.
func (d *Device) Addr() string { return d.dev.Addr }

// Domain is the address space that the device is in.
func (d *Device) Domain() *Domain { return d.dom }

// use holds the device open until the returned function is called.
func (d *Device) use() (func(), error) {
	if !d.closed.Load() { // the lock is asked for only then: after Close it may be taken for long
		d.mu.RLock()
		if !d.closed.Load() {
			return d.mu.RUnlock, nil
		}
		d.mu.RUnlock()
	}
	return nil, fmt.Errorf("vfio %s: the device is closed", d.dev.Addr)
}

// Region asks for a region's size and abilities.
func (d *Device) Region(index int) (Region, error) {
	done, err := d.use()
	if err != nil {
		return Region{}, err
	}
	defer done()
	r, err := d.region(index)
	return r.Region, err
}

func (d *Device) region(index int) (regionAt, error) {
	d.smu.Lock()
	defer d.smu.Unlock()
	if r, ok := d.regions[index]; ok {
		return r, nil
	}
	size := uint32(256)
	for range 4 { // the capabilities may need more room
		words := make([]uint64, size/8)
		buf := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), size)
		info := (*regionInfo)(unsafe.Pointer(&words[0]))
		info.Argsz, info.Index = size, uint32(index)
		if _, err := d.dom.m.k.ioctl(d.fd, vfioDeviceGetRegionInfo,
			unsafe.Pointer(info)); err != nil {
			return regionAt{}, errs.New(errs.Device, "vfio %s: region %d: %w", d.dev.Addr,
				index, err)
		}
		if info.Argsz > size {
			size = min((info.Argsz+7)&^7, 1<<20)
			continue
		}
		if info.Size > 1<<62 || info.Offset > 1<<62 {
			return regionAt{}, errs.New(errs.Device, "vfio %s: region %d: %d bytes at %d cannot be",
				d.dev.Addr, index, info.Size, info.Offset)
		}
		r := regionAt{Region{Size: int64(info.Size), Read: info.Flags&regionFlagRead != 0,
			Write: info.Flags&regionFlagWrite != 0}, int64(info.Offset)}
		if info.Flags&regionFlagMmap != 0 && r.Size > 0 {
			r.Mappable = []Span{{0, r.Size}}
			if info.Flags&regionFlagCaps != 0 {
				if body, ok := capability(buf, info.CapOffset, regionCapSparseMmap); ok {
					r.Mappable = nil
					for _, p := range pairs(body) {
						if p[1] > 0 && p[0] <= info.Size && p[1] <= info.Size-p[0] {
							r.Mappable = append(r.Mappable, Span{int64(p[0]), int64(p[1])})
						}
					}
				}
			}
		}
		d.regions[index] = r
		return r, nil
	}
	return regionAt{}, errs.New(errs.Device, "vfio %s: region %d: its description does not end",
		d.dev.Addr, index)
}

// MapRegion maps whole pages of a region; Unmap them with UnmapRegion before Close.
func (d *Device) MapRegion(index int, off, size int64) ([]byte, error) {
	done, err := d.use()
	if err != nil {
		return nil, err
	}
	defer done()
	r, err := d.region(index)
	if err != nil {
		return nil, err
	}
	if off < 0 || size <= 0 || off%pageBytes != 0 || size%pageBytes != 0 {
		return nil, fmt.Errorf("vfio %s: map %d bytes at %d of region %d: not whole pages",
			d.dev.Addr, size, off, index)
	}
	inside := false
	for _, s := range r.Mappable {
		// A span smaller than its page is mapped as the page.
		inside = inside || s.Offset <= off && off-s.Offset+size <= int64(roundUp(uint64(s.Size)))
	}
	if !inside {
		return nil, errs.New(errs.Capability,
			"vfio %s: bytes %d to %d of region %d (%d bytes) cannot be mapped; use ReadAt and WriteAt",
			d.dev.Addr, off, off+size-1, index, r.Size)
	}
	prot := 0
	if r.Read {
		prot |= unix.PROT_READ
	}
	if r.Write {
		prot |= unix.PROT_WRITE
	}
	p, err := d.dom.m.k.mmap(d.fd, r.offset+off, size, prot)
	if err != nil {
		return nil, errs.New(errs.Device, "vfio %s: map %d bytes at %d of region %d: %w",
			d.dev.Addr, size, off, index, err)
	}
	d.smu.Lock()
	d.maps[p] = size
	d.smu.Unlock()
	return unsafe.Slice((*byte)(p), size), nil
}

// UnmapRegion takes back a mapping of MapRegion.
func (d *Device) UnmapRegion(b []byte) error {
	p := unsafe.Pointer(unsafe.SliceData(b))
	d.smu.Lock()
	size, ok := d.maps[p]
	delete(d.maps, p)
	d.smu.Unlock()
	if !ok {
		return fmt.Errorf("vfio %s: unmap at %p: no mapping of a region starts there",
			d.dev.Addr, p)
	}
	if err := d.dom.m.k.munmap(p, size); err != nil {
		return fmt.Errorf("vfio %s: unmap %d bytes of a region: %w", d.dev.Addr, size, err)
	}
	return nil
}

// ReadAt and WriteAt access a region through the kernel (configuration space: RegionConfig).
func (d *Device) ReadAt(index int, b []byte, off int64) error {
	return d.access("read", d.dom.m.k.pread, index, b, off)
}

// WriteAt is ReadAt's counterpart.
func (d *Device) WriteAt(index int, b []byte, off int64) error {
	return d.access("write", d.dom.m.k.pwrite, index, b, off)
}

func (d *Device) access(verb string, f func(int, []byte, int64) (int, error), index int, b []byte,
	off int64) error {
	done, err := d.use()
	if err != nil {
		return err
	}
	defer done()
	r, err := d.region(index)
	if err != nil {
		return err
	}
	if off < 0 || off > r.Size || int64(len(b)) > r.Size-off {
		return fmt.Errorf("vfio %s: %s %d bytes at %#x of region %d: it has %d", d.dev.Addr, verb,
			len(b), off, index, r.Size)
	}
	n, err := f(d.fd, b, r.offset+off)
	if err != nil || n != len(b) {
		return errs.New(errs.Device, "vfio %s: %s %d bytes at %#x of region %d: %d done: %w",
			d.dev.Addr, verb, len(b), off, index, n, orShort(err))
	}
	return nil
}

func orShort(err error) error {
	if err != nil {
		return err
	}
	return errors.New("no more")
}

// Configuration space (PCI Local Bus Specification 3.0, chapter 6; power management 1.2, chapter
// 3).
const (
	pciCommand     = 0x04
	pciRevision    = 0x08 // with the class code
	commandMemory  = 1 << 1
	commandMaster  = 1 << 2
	commandNoINTx  = 1 << 10
	capIDPower     = 0x01
	powerControl   = 4 // from the capability's start
	powerStateMask = 3 // 0 is D0
	powerUpDelay   = 10 * time.Millisecond
)

func (d *Device) config16(off int64) (uint16, error) {
	var b [2]byte
	err := d.ReadAt(RegionConfig, b[:], off)
	return binary.LittleEndian.Uint16(b[:]), err
}

func (d *Device) setConfig16(off int64, v uint16) error {
	var b [2]byte
	binary.LittleEndian.PutUint16(b[:], v)
	return d.WriteAt(RegionConfig, b[:], off)
}

// command changes bits of the command register and makes sure that they took; those of wish may
// not.
func (d *Device) command(set, wish, clear uint16) error {
	v, err := d.config16(pciCommand)
	if err != nil {
		return err
	}
	if v == 0xffff {
		return errs.New(errs.Device, "vfio %s: %w (its command register reads as all ones)",
			d.dev.Addr, ErrGone)
	}
	if err := d.setConfig16(pciCommand, v&^clear|set|wish); err != nil {
		return err
	}
	got, err := d.config16(pciCommand)
	if err != nil {
		return err
	}
	if got&set != set || got&clear != 0 {
		if d.Gone() {
			return errs.New(errs.Device, "vfio %s: %w", d.dev.Addr, ErrGone)
		}
		return errs.New(errs.Device,
			"vfio %s: the command register is %#04x after %#04x was written", d.dev.Addr, got,
			v&^clear|set|wish)
	}
	return nil
}

// EnableMemory sets memory space and interrupt disable in the command register (bits 1 and 10),
// clears bus master (bit 2), and wakes the device to D0: its registers answer, and it reaches no
// memory.
func (d *Device) EnableMemory() error {
	if err := d.wakeUp(); err != nil {
		return err
	}
	return d.command(commandMemory, commandNoINTx, commandMaster)
}

// EnableDMA sets memory space, bus master and interrupt disable in the command register (bits 1, 2
// and 10), and wakes the device to D0. After Reset it is needed again.
func (d *Device) EnableDMA() error {
	if err := d.wakeUp(); err != nil {
		return err
	}
	// Interrupt disable is read-only in devices without INTx.
	return d.command(commandMemory|commandMaster, commandNoINTx, 0)
}

// wakeUp brings the device to power state D0, where it is not.
func (d *Device) wakeUp() error {
	off, err := pci.Capability(func(b []byte, off int64) error {
		return d.ReadAt(RegionConfig, b, off)
	}, capIDPower)
	if err != nil || off == 0 {
		return err
	}
	pm, err := d.config16(off + powerControl)
	if err != nil || pm&powerStateMask == 0 {
		return err
	}
	if err := d.setConfig16(off+powerControl, pm&^powerStateMask); err != nil {
		return err
	}
	time.Sleep(powerUpDelay)
	if pm, err = d.config16(off + powerControl); err != nil {
		return err
	}
	if pm&powerStateMask != 0 {
		return errs.New(errs.Device, "vfio %s: it stays in power state D%d", d.dev.Addr,
			pm&powerStateMask)
	}
	return nil
}

// DisableDMA clears bus master: the device reaches no memory any more.
func (d *Device) DisableDMA() error { return d.command(0, 0, commandMaster) }

// Reset resets the function (FLR where the device has it). When it returns nil no DMA comes any
// more. The kernel waits a minute for a device that died; Reset waits ten seconds and lets it go
// on.
func (d *Device) Reset() error {
	if d.Gone() {
		return errs.New(errs.Device, "vfio %s: reset: %w", d.dev.Addr, ErrGone)
	}
	done, err := d.use()
	if err != nil {
		return err
	}
	if !d.canReset {
		done()
		return errs.New(errs.Capability,
			"vfio %s: the kernel knows no way to reset it (/sys/bus/pci/devices/%s/reset_method)",
			d.dev.Addr, d.dev.Addr)
	}
	end := make(chan error, 1)
	go func() {
		defer done()
		end <- d.dom.m.again(func() error {
			_, err := d.dom.m.k.ioctlInt(d.fd, vfioDeviceReset, 0)
			return err
		})
	}()
	t := time.NewTimer(d.dom.m.closeFor)
	defer t.Stop()
	select {
	case err = <-end:
	case <-t.C:
		err = fmt.Errorf("not done after %s; the kernel goes on", d.dom.m.closeFor)
	}
	if err != nil {
		return errs.New(errs.Device, "vfio %s: reset: %w", d.dev.Addr, err)
	}
	return nil
}

// Gone reports whether the device left its bus: its configuration space reads as all ones. The
// first dword does not tell, since the kernel answers for it.
func (d *Device) Gone() bool {
	var b [4]byte
	err := d.ReadAt(RegionConfig, b[:], pciRevision)
	if d.closed.Load() {
		return false
	}
	return err != nil || binary.LittleEndian.Uint32(b[:]) == 0xffffffff
}

// Asked is closed when the kernel wants the device back (REQ eventfd: hot unplug, or unbinding).
func (d *Device) Asked() <-chan struct{} { return d.asked }

// Failed is closed when the kernel reported an uncorrectable PCI error (ERR eventfd).
func (d *Device) Failed() <-chan struct{} { return d.failed }

// GivenBack is closed when the kernel has taken the device back after Close.
func (d *Device) GivenBack() <-chan struct{} { return d.given }

// Close gives the device back; the kernel stops its DMA and resets it. Mappings of regions that are
// left end here: accesses fault from then on. A device that left its bus is closed in the
// background, since the kernel may take more than a minute, and one that takes longer than ten
// seconds goes on there too; GivenBack tells the end.
func (d *Device) Close() error {
	gone := d.Gone()
	if d.closed.Swap(true) {
		return nil
	}
	go d.giveBack()
	if gone {
		return nil
	}
	t := time.NewTimer(d.dom.m.closeFor)
	defer t.Stop()
	select {
	case <-d.given:
		return d.giveErr
	case <-t.C:
		return errs.New(errs.Device,
			"vfio %s: the kernel has not taken it back after %s; it goes on in the background",
			d.dev.Addr, d.dom.m.closeFor)
	}
}

func (d *Device) giveBack() {
	defer close(d.given)
	d.mu.Lock() // until the last use has ended
	defer d.mu.Unlock()
	d.smu.Lock()
	for p, size := range d.maps {
		d.giveErr = errors.Join(d.giveErr, d.dom.m.k.munmap(p, size))
	}
	d.maps = map[unsafe.Pointer]int64{}
	d.smu.Unlock()
	one := binary.NativeEndian.AppendUint64(nil, 1)
	if _, err := unix.Write(d.wake, one); err == nil {
		<-d.watched
	}
	d.giveErr = errors.Join(d.giveErr, d.dom.leave(d))
	d.closeEvents()
}
