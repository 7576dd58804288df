package nvme

import (
	"errors"
	"fmt"
	"sync"

	"helios/internal/errs"
)

// SQPlace tells where I/O submission queues are.
type SQPlace int

// Places of submission queues.
const (
	SQHost SQPlace = iota // in host memory
	SQCMB                 // in the controller's memory buffer, or creating them fails
	SQAuto                // there as long as it has room, else in host memory
)

var sqPlaces = [...]string{SQHost: "host", SQCMB: "cmb", SQAuto: "auto"}

// String gives "host", "cmb" or "auto".
func (p SQPlace) String() string {
	if p < 0 || int(p) >= len(sqPlaces) {
		return fmt.Sprintf("SQPlace(%d)", int(p))
	}
	return sqPlaces[p]
}

// ParseSQPlace is the inverse of String.
func ParseSQPlace(s string) (SQPlace, error) {
	for p, name := range sqPlaces {
		if s == name {
			return SQPlace(p), nil
		}
	}
	return 0, errs.New(errs.Usage, "submission queues in %q: choose host, cmb or auto", s)
}

// CMB is a controller memory buffer that holds submission queues (section 8.5).
type CMB struct {
	BAR    int
	Offset int64 // in the BAR
	Bytes  int64
	Addr   IOVA // where the controller finds it
}

// Contains reports whether n bytes at a are in the buffer.
func (b CMB) Contains(a IOVA, n int64) bool {
	return a >= b.Addr && n <= b.Bytes && a-b.Addr <= IOVA(b.Bytes-n)
}

// cmbMemory hands out pages of a controller memory buffer.
type cmbMemory struct {
	CMB
	mem []byte // I/O memory

	mu   sync.Mutex
	used []bool // by page
}

// cmbPages are pages of the buffer that a queue has; n = 0: none.
type cmbPages struct{ at, n int }

// alloc takes n pages in a row.
func (m *cmbMemory) alloc(n int) (cmbPages, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at, run := 0, 0; at < len(m.used); at++ {
		if run++; m.used[at] {
			run = 0
		}
		if run == n {
			p := cmbPages{at - n + 1, n}
			m.mark(p, true)
			return p, true
		}
	}
	return cmbPages{}, false
}

func (m *cmbMemory) free(p cmbPages) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mark(p, false)
}

func (m *cmbMemory) mark(p cmbPages, used bool) {
	for i := range p.n {
		m.used[p.at+i] = used
	}
}

// left returns how many bytes are free.
func (m *cmbMemory) left() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int64(0)
	for _, u := range m.used {
		if !u {
			n += m.Bytes / int64(len(m.used))
		}
	}
	return n
}

// CMB is the controller memory buffer that submission queues are put into; its Bytes are 0 when
// there is none, or Options.SQ does not ask for it.
func (c *Controller) CMB() CMB {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cmb == nil {
		return CMB{}
	}
	return c.cmb.CMB
}

// startCMB switches the controller's memory buffer on, or sees to it that it takes no address of
// ours for its own. The controller is disabled.
func (c *Controller) startCMB() error {
	m, err := c.findCMB()
	if err != nil && c.opt.SQ != SQCMB && !errors.Is(err, ErrGone) && !errors.Is(err, errCMBClash) {
		m, err = nil, c.stopCMB() // host memory it is
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cmb = m
	return nil
}

// stopCMB switches off what an earlier driver may have switched on: CC.EN = 0 does not.
func (c *Controller) stopCMB() error {
	if !c.cap.CMBS() {
		return nil
	}
	return c.writeCMBMSC(0, 0)
}

// writeCMBMSC writes the high dword first: the low one takes effect.
func (c *Controller) writeCMBMSC(addr IOVA, bits uint32) error {
	err := c.bus.Write32(RegCMBMSC+4, uint32(addr>>32))
	if err == nil {
		err = c.bus.Write32(RegCMBMSC, uint32(addr)|bits)
	}
	if err != nil {
		return fmt.Errorf("nvme %s: write CMBMSC: %w", c.bus.Name(), deviceClass(err))
	}
	return nil
}

// errCMBClash: what the controller takes for its own memory is mapped for DMA.
var errCMBClash = errors.New("its addresses on the PCI bus are in use for DMA")

// findCMB is the buffer, switched on; nil: not wanted.
func (c *Controller) findCMB() (*cmbMemory, error) {
	lacks := func(why string, args ...any) error {
		return errs.New(errs.Capability,
			"nvme %s: no submission queues in controller memory: %w; use option sq host or auto",
			c.bus.Name(), fmt.Errorf(why, args...))
	}
	// A bus in front of another one has queues of its own behind the client's, so only the
	// outermost counts.
	bus, mapper := c.bus.(BARMapper)
	// Before NVMe 1.4 there is no CMBMSC: the buffer is on, at its address on the PCI bus.
	fixed := !c.cap.CMBS()
	if c.opt.SQ == SQHost && (!fixed || !mapper) {
		return nil, c.stopCMB()
	}
	if !mapper {
		if c.opt.SQ == SQHost {
			return nil, nil
		}
		return nil,
			lacks("its bus reaches none (a software controller, or one with faults in front of it)")
	}
	if fixed && c.version < 0x00010200 {
		if c.opt.SQ == SQHost {
			return nil, nil
		}
		return nil, lacks("NVMe %s has none", c.version)
	}
	size, loc, err := c.readCMB(fixed)
	if err != nil {
		return nil, err
	}
	off := loc.OFST() * size.Unit()
	if old := c.cmb; old != nil { // of an earlier bring-up
		if old.BAR != loc.BIR() || old.Offset != off {
			return nil, lacks("it moved in a reset")
		}
		if !fixed {
			if err := c.placeCMB(old.Addr); err != nil {
				return nil, err
			}
		}
		return old, nil
	}
	if size.Bytes() == 0 {
		if c.opt.SQ == SQHost {
			return nil, nil
		}
		return nil, lacks("the controller has none (CMBSZ %08Xh)", uint32(size))
	}
	m := &cmbMemory{CMB: CMB{BAR: loc.BIR(), Offset: off, Bytes: size.Bytes()}}
	if err := c.reserveCMB(m, bus, fixed); err != nil {
		if errors.Is(err, errCMBClash) {
			return nil, err
		}
		return nil, lacks("%w", err)
	}
	if c.opt.SQ == SQHost {
		return nil, nil
	}
	if !size.SQS() {
		return nil, lacks("its controller memory buffer takes none (CMBSZ %08Xh)", uint32(size))
	}
	if m.mem, err = bus.MapBAR(m.BAR, m.Offset, m.Bytes); err != nil {
		return nil, lacks("%w", err)
	}
	page := c.pageBytes
	m.mem = m.mem[:len(m.mem)/page*page]
	m.Bytes = int64(len(m.mem))
	m.used = make([]bool, len(m.mem)/page)
	if !fixed {
		if err := c.placeCMB(m.Addr); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// readCMB switches the buffer on, where that is asked for, and reads its size and location.
func (c *Controller) readCMB(fixed bool) (CMBSZ, CMBLOC, error) {
	if !fixed {
		if err := c.writeCMBMSC(0, CMBMSCEnable); err != nil {
			return 0, 0, err
		}
	}
	size, err := c.bus.Read32(RegCMBSZ)
	loc := uint32(0)
	if err == nil {
		loc, err = c.bus.Read32(RegCMBLOC)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("nvme %s: read CMBSZ and CMBLOC: %w", c.bus.Name(), deviceClass(err))
	}
	return CMBSZ(size), CMBLOC(loc), nil
}

// reserveCMB finds addresses for the buffer that no DMA uses.
func (c *Controller) reserveCMB(m *cmbMemory, bus BARMapper, fixed bool) (err error) {
	// Its address on the PCI bus serves where the host chooses, too: Linux's driver takes it, and
	// there are controllers that have CMBMSC and decode that address all the same (QEMU's
	// legacy-cmb).
	m.Addr, err = bus.ReserveBAR(m.BAR, m.Offset, m.Bytes)
	switch {
	case err != nil && fixed:
		return errs.New(errs.Capability,
			"nvme %s: controller memory buffer: %w: %w; give the SSD a process of its own",
			c.bus.Name(), errCMBClash, err)
	case err != nil:
		m.Addr, err = bus.ReserveIOVA(m.Bytes, int64(c.pageBytes))
	}
	return err
}

// placeCMB tells the controller where commands find its memory.
func (c *Controller) placeCMB(a IOVA) error {
	if err := c.writeCMBMSC(a, CMBMSCEnable|CMBMSCSpace); err != nil {
		return err
	}
	v, err := c.bus.Read32(RegCMBSTS)
	switch {
	case err != nil:
		return fmt.Errorf("nvme %s: read CMBSTS: %w", c.bus.Name(), deviceClass(err))
	case v&CMBSTSBadCBA != 0:
		return errs.New(errs.Capability,
			"nvme %s: the controller does not take %#x as address of its memory buffer; use option sq host",
			c.bus.Name(), uint64(a))
	}
	return nil
}

// placeSQ takes room for a submission queue in the controller's memory; nil: it goes to host
// memory.
func (c *Controller) placeSQ(entries int) (*cmbMemory, cmbPages, error) {
	c.mu.Lock()
	m := c.cmb
	c.mu.Unlock()
	if m == nil {
		return nil, cmbPages{}, nil
	}
	bytes := int64(entries) * CommandBytes
	n := (bytes + int64(c.pageBytes) - 1) / int64(c.pageBytes)
	p, ok := m.alloc(int(n))
	switch {
	case ok:
		return m, p, nil
	case c.opt.SQ == SQAuto:
		return nil, cmbPages{}, nil
	}
	return nil, cmbPages{}, errs.New(errs.Capability,
		"nvme %s: its controller memory buffer of %d bytes has %d left, a submission queue of %d entries takes %d; use fewer or shorter queues, or option sq auto",
		c.bus.Name(), m.Bytes, m.left(), entries, n*int64(c.pageBytes))
}
