package vfio

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"helios/internal/testing/fakesys"
)

// fake is a kernel with VFIO: containers, groups, iommufd and devices with a configuration space.
type fake struct {
	*fakesys.Machine
	t *testing.T

	mu      sync.Mutex
	fds     map[int]*fakeFile
	next    int
	fail    map[string][]error // errors of the next calls, by call or ioctl name
	calls   []string
	ranges  []Range
	noCaps  bool // an old kernel: no list of addresses
	maxMaps int
	used    int64
	limit   int64
	cards   map[string]*card
	mapped  map[unsafe.Pointer]int64
	type1   int // the answer to CHECK_EXTENSION
	files   []ioasMapFile
	// noRAM is memory behind another device's BAR: not counted, and refused by iommufd.
	noRAM []byte
	holes []byte // of it
}

type fakeFile struct {
	path      string
	set       bool // a container with an IOMMU
	container *fakeFile
	groups    int // of a container
	maps      map[uint64]dmaMap
	ioas      bool
	card      *card
	iommufd   *fakeFile
}

// card is a device.
type card struct {
	addr    string
	group   int
	config  [256]byte
	bar     [16384]byte
	sparse  []Span
	flags   uint32
	irqs    map[uint32]int // eventfds
	noERR   bool
	open    bool
	resets  int
	dead    bool
	closing chan struct{} // close waits for it

	resetting chan struct{} // so does reset
}

const (
	cardA = "0000:00:04.0"
	cardB = "0000:00:05.0"
	cardC = "0000:00:06.0"
)

func newFake(t *testing.T) *fake {
	t.Helper()
	k := &fake{
		Machine: fakesys.New(t.TempDir()), t: t, fds: map[int]*fakeFile{}, next: 1 << 20,
		fail:   map[string][]error{},
		ranges: []Range{{0, 0xfedfffff}, {0xfef00000, 1<<39 - 1}}, maxMaps: 65535, limit: -1,
		cards: map[string]*card{}, mapped: map[unsafe.Pointer]int64{}, type1: 1,
	}
	k.Put("/dev/vfio/vfio", "")
	for i, a := range []string{cardA, cardB, cardC} {
		k.add(a, 10+i, "vfio-pci")
	}
	t.Cleanup(func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		for fd, f := range k.fds {
			t.Errorf("left open: %d %s", fd, f.path)
		}
		for p := range k.mapped {
			t.Errorf("left mapped: %p", p)
		}
	})
	return k
}

func (k *fake) add(addr string, group int, driver string) *card {
	k.Add(fakesys.SSD{Addr: addr, Group: group, Serial: "S" + addr[8:10], Driver: driver})
	n := len(k.cards)
	k.Mkdir(fmt.Sprintf("/sys/bus/pci/devices/%s/vfio-dev/vfio%d", addr, n))
	k.Put(fmt.Sprintf("/dev/vfio/devices/vfio%d", n), "")
	c := &card{addr: addr, group: group, flags: deviceFlagPCI | deviceFlagReset,
		irqs: map[uint32]int{}}
	le := binary.LittleEndian
	le.PutUint32(c.config[0:], 0x00101b36)
	le.PutUint16(c.config[0x06:], 1<<4) // there is a list of capabilities
	le.PutUint32(c.config[pciRevision:], 0x01080202)
	c.config[0x34] = 0x40
	le.PutUint16(c.config[0x40:], 0x6011) // MSI-X, next at 60h
	le.PutUint16(c.config[0x60:], 0x0001) // power management, the last
	le.PutUint32(c.bar[0:], 0x0f0107ff)
	k.cards[addr] = c
	return c
}

func (k *fake) machine() machine {
	return machine{k: k, root: k.Root, retryFor: 200 * time.Millisecond,
		closeFor: 10 * time.Second}
}

func (k *fake) domain(backend string) *Domain {
	k.t.Helper()
	if backend == "iommufd" {
		k.Put("/dev/iommu", "")
	}
	d, err := newDomain(k.machine(), Options{Backend: backend})
	if err != nil {
		k.t.Fatal(err)
	}
	return d
}

// failNext makes the next calls of that name fail.
func (k *fake) failNext(name string, errs ...error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fail[name] = append(k.fail[name], errs...)
}

// hit counts a call and answers with a scripted error. k.mu is held.
func (k *fake) hit(name string) error {
	k.calls = append(k.calls, name)
	if q := k.fail[name]; len(q) > 0 {
		k.fail[name] = q[1:]
		return q[0]
	}
	return nil
}

func (k *fake) count(name string) (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.calls {
		if c == name {
			n++
		}
	}
	return n
}

func (k *fake) newFD(f *fakeFile) int {
	k.next++
	k.fds[k.next] = f
	return k.next
}

func (k *fake) open(path string) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.hit("open " + path); err != nil {
		return -1, err
	}
	if _, err := os.Stat(filepath.Join(k.Root, path)); err != nil {
		return -1, unix.ENOENT
	}
	f := &fakeFile{path: path, maps: map[uint64]dmaMap{}}
	for _, o := range k.fds { // one opener for a group
		if o.path == path && path != "/dev/vfio/vfio" && path != "/dev/iommu" &&
			!strings.Contains(path, "/devices/") {
			return -1, unix.EBUSY
		}
	}
	if base, ok := strings.CutPrefix(path, "/dev/vfio/devices/"); ok {
		for addr, c := range k.cards {
			if _, err := os.Stat(filepath.Join(k.Root, "/sys/bus/pci/devices", addr, "vfio-dev",
				base)); err == nil {
				f.card = c
			}
		}
	}
	return k.newFD(f), nil
}

func (k *fake) memfd(int64) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.hit("memfd"); err != nil {
		return -1, err
	}
	return k.newFD(&fakeFile{path: "memfd"}), nil
}

func (k *fake) raise(fd int) int { return fd }

func (k *fake) close(fd int) error {
	k.mu.Lock()
	f := k.fds[fd]
	if f == nil {
		k.mu.Unlock()
		k.t.Errorf("close of %d, which is not open", fd)
		return unix.EBADF
	}
	var wait chan struct{}
	if f.card != nil {
		wait = f.card.closing
	}
	k.mu.Unlock()
	if wait != nil {
		<-wait
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.fds, fd)
	if f.card != nil {
		f.card.open, f.card.irqs = false, map[uint32]int{}
		k.setCommand(f.card, 0)
	}
	if c := f.container; c != nil {
		if c.groups--; c.groups == 0 {
			c.set = false
			k.drop(c)
		}
	}
	if f.ioas {
		k.drop(f)
	}
	return k.hit("close " + f.path)
}

func (k *fake) drop(f *fakeFile) {
	for _, m := range f.maps {
		k.used -= k.counted(m)
	}
	f.maps = map[uint64]dmaMap{}
}

func (k *fake) setCommand(c *card,
	v uint16) {
	binary.LittleEndian.PutUint16(c.config[pciCommand:], v)
}

func (k *fake) ioctlInt(fd int, req, arg uintptr) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.fds[fd]
	if f == nil {
		return -1, unix.EBADF
	}
	switch req {
	case vfioGetAPIVersion:
		return 0, k.hit("API_VERSION")
	case vfioCheckExtension:
		if arg != vfioType1v2IOMMU {
			return 0, nil
		}
		return k.type1, k.hit("CHECK_EXTENSION")
	case vfioSetIOMMU:
		if err := k.hit("SET_IOMMU"); err != nil {
			return -1, err
		}
		if f.groups == 0 || f.set || arg != vfioType1v2IOMMU {
			return -1, unix.EINVAL
		}
		f.set = true
		return 0, nil
	case vfioDeviceReset:
		if wait := f.card.resetting; wait != nil {
			k.mu.Unlock()
			<-wait
			k.mu.Lock()
		}
		if err := k.hit("RESET"); err != nil {
			return -1, err
		}
		f.card.resets++
		k.setCommand(f.card, 0)
		return 0, nil
	}
	return -1, unix.ENOTTY
}

func (k *fake) ioctl(fd int, req uintptr, arg unsafe.Pointer) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.fds[fd]
	if f == nil {
		return -1, unix.EBADF
	}
	switch req {
	case vfioGroupGetStatus:
		a := (*groupStatus)(arg)
		if err := k.hit("GROUP_GET_STATUS"); err != nil {
			return -1, err
		}
		a.Flags = groupViable
		for _, c := range k.cards {
			if filepath.Base(f.path) == fmt.Sprint(c.group) && k.Driver(c.addr) != "vfio-pci" &&
				k.Driver(c.addr) != "" {
				a.Flags = 0
			}
		}
		return 0, nil
	case vfioGroupSetContainer:
		if err := k.hit("SET_CONTAINER"); err != nil {
			return -1, err
		}
		f.container = k.fds[int(*(*int32)(arg))]
		f.container.groups++
		return 0, nil
	case vfioGroupGetDeviceFD:
		if err := k.hit("GET_DEVICE_FD"); err != nil {
			return -1, err
		}
		name := unix.BytePtrToString((*byte)(arg))
		c := k.cards[name]
		switch {
		case f.container == nil || !f.container.set:
			return -1, unix.EINVAL
		case c == nil || fmt.Sprint(c.group) != filepath.Base(f.path):
			return -1, unix.ENODEV
		case c.open:
			return -1, unix.EBUSY
		}
		c.open = true
		return k.newFD(&fakeFile{path: name, card: c}), nil
	case vfioDeviceBindIOMMUFD:
		a := (*bindIOMMUFD)(arg)
		if err := k.hit("BIND_IOMMUFD"); err != nil {
			return -1, err
		}
		if f.card == nil || f.card.open {
			return -1, unix.EINVAL
		}
		f.card.open, f.iommufd = true, k.fds[int(a.IOMMUFD)]
		return 0, nil
	case vfioDeviceAttachIOMMUFD:
		if err := k.hit("ATTACH_IOMMUFD_PT"); err != nil {
			return -1, err
		}
		if f.iommufd == nil || !f.iommufd.ioas || (*attachIOMMUFD)(arg).PtID != 7 {
			return -1, unix.ENOENT
		}
		return 0, nil
	case vfioDeviceGetInfo:
		a := (*deviceInfo)(arg)
		if err := k.hit("GET_INFO"); err != nil {
			return -1, err
		}
		a.Flags, a.NumRegions, a.NumIRQs = f.card.flags, 9, 5
		return 0, nil
	case vfioDeviceGetRegionInfo:
		return 0, k.regionInfo(f.card, (*regionInfo)(arg))
	case vfioDeviceGetIRQInfo:
		a := (*irqInfo)(arg)
		if err := k.hit("GET_IRQ_INFO"); err != nil {
			return -1, err
		}
		if a.Index == irqIndexERR && f.card.noERR {
			return -1, unix.EINVAL
		}
		a.Count, a.Flags = 1, irqInfoEventfd
		return 0, nil
	case vfioDeviceSetIRQs:
		a := (*irqSet)(arg)
		if err := k.hit("SET_IRQS"); err != nil {
			return -1, err
		}
		if a.Argsz != 24 || a.Flags != irqSetDataEventfd|irqSetActionTrigger || a.Start != 0 ||
			a.Count != 1 {
			return -1, unix.EINVAL
		}
		f.card.irqs[a.Index] = int(a.FD)
		return 0, nil
	case vfioIOMMUGetInfo:
		return 0, k.iommuInfo(f, (*iommuInfo)(arg))
	case vfioIOMMUMapDMA:
		a := *(*dmaMap)(arg)
		if a.Argsz != 32 || a.Flags != 3 {
			return -1, unix.EINVAL
		}
		if err := k.hit("MAP_DMA"); err != nil {
			return -1, err
		}
		if !f.set {
			return -1, unix.EINVAL
		}
		return 0, k.mapInto(f, a)
	case vfioIOMMUUnmapDMA:
		a := (*dmaUnmap)(arg)
		if err := k.hit("UNMAP_DMA"); err != nil {
			return -1, err
		}
		if !f.set {
			return -1, unix.EINVAL
		}
		a.Size = k.unmapFrom(f, a.IOVA, a.Size)
		return 0, nil
	case iommuIOASAlloc:
		if err := k.hit("IOAS_ALLOC"); err != nil {
			return -1, err
		}
		f.ioas = true
		(*ioasAlloc)(arg).OutIOASID = 7
		return 0, nil
	case iommuIOASIOVARanges:
		a := (*ioasIOVARanges)(arg)
		room := a.NumIOVAs
		a.NumIOVAs, a.OutIOVAAlignment = uint32(len(k.ranges)), 4096
		out := unsafe.Slice((*iovaRange)(*(*unsafe.Pointer)(unsafe.Pointer(&a.AllowedIOVAs))), room)
		for i, r := range k.ranges[:min(int(room), len(k.ranges))] {
			out[i] = iovaRange{uint64(r.Start), uint64(r.End)}
		}
		if int(room) < len(k.ranges) {
			return -1, unix.EMSGSIZE
		}
		return 0, k.hit("IOVA_RANGES")
	case iommuIOASMap:
		a := (*ioasMap)(arg)
		if err := k.hit("MAP_DMA"); err != nil {
			return -1, err
		}
		if a.Size != 40 || a.Flags != 7 || a.IOASID != 7 {
			return -1, unix.EINVAL
		}
		return 0, k.mapInto(f, dmaMap{Vaddr: a.UserVA, IOVA: a.IOVA, Size: a.Length})
	case iommuIOASMapFile:
		a := (*ioasMapFile)(arg)
		if err := k.hit("MAP_FILE"); err != nil {
			return -1, err
		}
		if a.Size != 40 || a.Flags != 7 || a.IOASID != 7 || a.Start%4096 != 0 {
			return -1, unix.EINVAL
		}
		k.files = append(k.files, *a)
		return 0, k.mapInto(f, dmaMap{Vaddr: 4096, IOVA: a.IOVA, Size: a.Length})
	case iommuIOASUnmap:
		a := (*ioasUnmap)(arg)
		if err := k.hit("UNMAP_DMA"); err != nil {
			return -1, err
		}
		a.Length = k.unmapFrom(f, a.IOVA, a.Length)
		return 0, nil
	case iommuDestroy:
		return 0, k.hit("DESTROY")
	}
	return -1, unix.ENOTTY
}

func (k *fake) mapInto(f *fakeFile, a dmaMap) error {
	if a.Vaddr%4096 != 0 || a.IOVA%4096 != 0 || a.Size%4096 != 0 || a.Size == 0 {
		return unix.EINVAL
	}
	inside := false
	for _, r := range k.ranges {
		inside = inside || a.IOVA >= uint64(r.Start) && a.IOVA+a.Size-1 <= uint64(r.End)
	}
	if !inside {
		return unix.EINVAL
	}
	for _, m := range f.maps {
		if a.IOVA < m.IOVA+m.Size && m.IOVA < a.IOVA+a.Size {
			return unix.EEXIST
		}
	}
	if len(f.maps) >= k.maxMaps {
		return unix.ENOSPC
	}
	switch in := func(b []byte) bool {
		lo := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
		return len(b) > 0 && a.Vaddr < lo+uint64(len(b)) && lo < a.Vaddr+a.Size
	}; {
	case in(k.holes), in(k.noRAM) && f.ioas:
		return unix.EFAULT
	case in(k.noRAM):
		f.maps[a.IOVA] = a
		return nil
	}
	if k.limit >= 0 && k.used+int64(a.Size) > k.limit {
		return unix.ENOMEM
	}
	k.used += int64(a.Size)
	f.maps[a.IOVA] = a
	return nil
}

// unmapFrom unmaps all mappings within a range, and nothing when it cuts one (VFIO_IOMMU_UNMAP_DMA
// of type1 v2, IOMMU_IOAS_UNMAP).
func (k *fake) unmapFrom(f *fakeFile, iova, size uint64) uint64 {
	var in []uint64
	var n uint64
	for at, m := range f.maps {
		switch {
		case at+m.Size <= iova || iova+size <= at:
		case iova <= at && at+m.Size <= iova+size:
			in, n = append(in, at), n+m.Size
		default:
			return 0
		}
	}
	for _, at := range in {
		k.used -= k.counted(f.maps[at])
		delete(f.maps, at)
	}
	return n
}

// counted returns how much of a mapping is RAM.
func (k *fake) counted(m dmaMap) int64 {
	if len(k.noRAM) == 0 {
		return int64(m.Size)
	}
	lo := va(k.noRAM)
	if m.Vaddr >= lo && m.Vaddr < lo+uint64(len(k.noRAM)) {
		return 0
	}
	return int64(m.Size)
}

// maps lists the kernel's mappings of the one address space there is.
func (k *fake) maps() map[uint64]dmaMap {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[uint64]dmaMap{}
	for _, f := range k.fds {
		for i, m := range f.maps {
			out[i] = m
		}
	}
	return out
}

// chain appends a capability of pairs, after one that nobody asks for.
func chain(buf []byte, at int, id uint16, pairs [][2]uint64) {
	le := binary.LittleEndian
	le.PutUint16(buf[at:], 99)
	le.PutUint32(buf[at+4:], uint32(at+16))
	at += 16
	le.PutUint16(buf[at:], id)
	le.PutUint16(buf[at+2:], 1)
	le.PutUint32(buf[at+8:], uint32(len(pairs)))
	for i, p := range pairs {
		le.PutUint64(buf[at+16+16*i:], p[0])
		le.PutUint64(buf[at+24+16*i:], p[1])
	}
}

func (k *fake) iommuInfo(f *fakeFile, a *iommuInfo) error {
	if err := k.hit("IOMMU_GET_INFO"); err != nil {
		return err
	}
	if !f.set {
		return unix.EINVAL
	}
	a.IOVAPgsizes = 0x40201000
	if k.noCaps {
		return nil
	}
	a.Flags = 1 | iommuInfoCaps
	need := uint32(24 + 16 + 16 + 16*len(k.ranges))
	if a.Argsz < need {
		a.Argsz, a.CapOffset = need, 0
		return nil
	}
	var p [][2]uint64
	for _, r := range k.ranges {
		p = append(p, [2]uint64{uint64(r.Start), uint64(r.End)})
	}
	a.CapOffset = 24
	chain(unsafe.Slice((*byte)(unsafe.Pointer(a)), a.Argsz), 24, iommuInfoCapIOVARange, p)
	return nil
}

func (k *fake) regionInfo(c *card, a *regionInfo) error {
	if err := k.hit("GET_REGION_INFO"); err != nil {
		return err
	}
	switch {
	case a.Index == RegionBAR0:
		a.Size, a.Flags = uint64(len(c.bar)), regionFlagRead|regionFlagWrite|regionFlagMmap
		if c.sparse != nil {
			a.Flags |= regionFlagCaps
			need := uint32(32 + 16 + 16 + 16*len(c.sparse))
			if a.Argsz < need {
				a.Argsz, a.CapOffset = need, 0
				return nil
			}
			var p [][2]uint64
			for _, s := range c.sparse {
				p = append(p, [2]uint64{uint64(s.Offset), uint64(s.Size)})
			}
			a.CapOffset = 32
			chain(unsafe.Slice((*byte)(unsafe.Pointer(a)), a.Argsz), 32, regionCapSparseMmap, p)
		}
	case a.Index == RegionConfig:
		a.Size, a.Flags, a.Offset = 256, regionFlagRead|regionFlagWrite, RegionConfig<<40
	case a.Index > 8:
		return unix.EINVAL
	}
	return nil
}

func (k *fake) access(fd int, b []byte, off int64, write bool) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.fds[fd]
	if f == nil || f.card == nil {
		return -1, unix.EBADF
	}
	c, name, mem := f.card, "pread", f.card.bar[:]
	if write {
		name = "pwrite"
	}
	if err := k.hit(name); err != nil {
		return -1, err
	}
	if off>>40 == RegionConfig {
		mem, off = c.config[:], off&(1<<40-1)
	}
	switch {
	case write:
		return copy(mem[off:], b), nil
	case c.dead && off >= 4:
		for i := range b {
			b[i] = 0xff
		}
		return len(b), nil
	}
	return copy(b, mem[off:]), nil
}

func (k *fake) pread(fd int, b []byte, off int64) (int,
	error) {
	return k.access(fd, b, off, false)
}
func (k *fake) pwrite(fd int, b []byte, off int64) (int,
	error) {
	return k.access(fd, b, off, true)
}

func (k *fake) mmap(fd int, off, size int64, prot int) (unsafe.Pointer, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.hit("mmap"); err != nil {
		return nil, err
	}
	if f := k.fds[fd]; f == nil || f.card == nil || off+size > int64(len(f.card.bar)) ||
		prot != unix.PROT_READ|unix.PROT_WRITE {
		return nil, unix.EINVAL
	}
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(size), prot, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	k.mapped[p] = size
	return p, err
}

func (k *fake) munmap(p unsafe.Pointer, size int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mapped[p] != size {
		k.t.Errorf("munmap of %d bytes at %p", size, p)
	}
	delete(k.mapped, p)
	return unix.MunmapPtr(p, uintptr(size))
}

func (k *fake) memlock() (int64, int64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.used, k.limit, k.hit("memlock")
}

// signal is the kernel's message to a device's eventfd.
func (k *fake) signal(addr string, index uint32) {
	k.t.Helper()
	k.mu.Lock()
	fd, ok := k.cards[addr].irqs[index]
	k.mu.Unlock()
	if !ok {
		k.t.Fatalf("%s has no eventfd for message %d", addr, index)
	}
	if _, err := unix.Write(fd, binary.NativeEndian.AppendUint64(nil, 1)); err != nil {
		k.t.Fatal(err)
	}
}

// command is a card's command register.
func (k *fake) command(addr string) uint16 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return binary.LittleEndian.Uint16(k.cards[addr].config[pciCommand:])
}
