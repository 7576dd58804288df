package nvme

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// fakeBus is a controller of a few lines for the paths that a good controller does not
// take. It shares no code with nvme/proxy, and reads PRPs with its own walker.
type fakeBus struct {
	mu  sync.Mutex
	cap uint64
	fakeRegisters
	aqa      uint32
	asq, acq uint64
	crto     uint32
	db       [64]uint32
	maps     map[IOVA][]byte
	next     IOVA
	closed   bool

	sqHead, cqTail int
	phase          bool
	aers           []uint16 // CIDs waiting for an event
	log            []Command
	id             IdentifyController
	ns             IdentifyNamespace
	nsids          []uint32
	descriptors    []byte // namespace identification descriptors
	features       map[uint8]uint32
	smart          SMARTLog
	errlog         []ErrorLogEntry
	cqs, sqs       map[uint16]bool

	// Its failures.
	neverReady, neverIdle, noShutdown bool
	cfsOnEnable                       bool
	early                             bool // EN was cleared before RDY followed its being set
	readyAfter                        int  // reads of CSTS until RDY follows EN
	unmapErr                          error
	// handle may answer a command itself: done false goes on to the usual answer, and a nil
	// completion says nothing at all.
	handle func(c Command) (e *Completion, done bool)
}

// fakeRegisters are the controller's registers.
type fakeRegisters struct {
	cc, csts uint32
	vs       uint64 // 0: version 1.4
	gone     bool
	readErr  error // of every register
}

func newFake() *fakeBus {
	f := &fakeBus{cap: uint64(MakeCAP(1024, 0, 0, 0, 0)), maps: map[IOVA][]byte{},
		next:     0x7000_0000_0000,
		features: map[uint8]uint32{}, nsids: []uint32{1}, cqs: map[uint16]bool{},
		sqs: map[uint16]bool{}}
	f.id = IdentifyController{MDTS: 5, VER: 0x10400, CNTRLTYPE: 1, SQES: 0x66, CQES: 0x44, NN: 1,
		AERL: 3, ACL: 1, ELPE: 255, CRDT: [3]uint16{1, 2, 30}}
	SetASCII(f.id.SN[:], "FAKE0001")
	SetASCII(f.id.MN[:], "Fake model")
	SetASCII(f.id.FR[:], "1.0")
	f.ns = IdentifyNamespace{NSZE: 1 << 20, NCAP: 1 << 20}
	f.ns.LBAF[0].LBADS = 9
	return f
}

func (f *fakeBus) Name() string { return "fake:0" }

func (f *fakeBus) Read32(off uint32) (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readErr != nil {
		return 0, f.readErr
	}
	if f.gone {
		return 0xffffffff, nil
	}
	switch off {
	case RegCAP:
		return uint32(f.cap), nil
	case RegCAP + 4:
		return uint32(f.cap >> 32), nil
	case RegVS:
		if f.vs != 0 {
			return uint32(f.vs), nil
		}
		return 0x10400, nil
	case RegCC:
		return f.cc, nil
	case RegCSTS:
		f.settle()
		return f.csts, nil
	case RegCRTO:
		return f.crto, nil
	}
	return 0, fmt.Errorf("fake: read of register %#x", off)
}

// settle lets RDY follow EN.
func (f *fakeBus) settle() {
	en := f.cc&1 != 0
	if en == (f.csts&1 != 0) || f.csts&2 != 0 && en {
		return
	}
	if f.readyAfter > 0 {
		f.readyAfter--
		return
	}
	switch {
	case en && f.cfsOnEnable:
		f.csts |= 2
	case en && !f.neverReady:
		f.csts |= 1
	case !en && !f.neverIdle:
		f.csts = 0
	}
}

func (f *fakeBus) Write32(off, v uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch off {
	case RegCC:
		old := f.cc
		f.cc = v
		switch {
		case old&1 == 0 && v&1 != 0:
			f.csts &^= 0xc
			f.sqHead, f.cqTail, f.phase, f.aers = 0, 0, true, nil
			clear(f.cqs)
			clear(f.sqs)
			clear(f.db[:])
		case old&1 != 0 && v&1 == 0:
			f.early = f.early || f.csts&3 == 0
			if f.csts&2 != 0 {
				f.csts &^= 2 // a reset clears CFS
			}
			if f.csts&1 == 0 && !f.neverIdle {
				f.csts = 0
			}
		case v>>14&3 != 0 && !f.noShutdown:
			f.csts = f.csts&^0xc | 8
		}
	case RegAQA:
		f.aqa = v
	case RegASQ:
		f.asq = f.asq&^0xffffffff | uint64(v)
	case RegASQ + 4:
		f.asq = f.asq&0xffffffff | uint64(v)<<32
	case RegACQ:
		f.acq = f.acq&^0xffffffff | uint64(v)
	case RegACQ + 4:
		f.acq = f.acq&0xffffffff | uint64(v)<<32
	default:
		return fmt.Errorf("fake: write of register %#x", off)
	}
	return nil
}

func (f *fakeBus) Doorbell(i uint32) (*uint32, error) {
	if int(i) >= len(f.db) {
		return nil, fmt.Errorf("fake: no doorbell %d", i)
	}
	return &f.db[i], nil
}

func (f *fakeBus) MapDMA(mem []byte) (IOVA, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.next
	f.maps[a] = mem
	f.next += IOVA(len(mem)+4095)&^4095 + 4096 // a hole, so that overruns are seen
	return a, nil
}

func (f *fakeBus) UnmapDMA(iova IOVA, bytes int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unmapErr != nil {
		return f.unmapErr
	}
	if m, ok := f.maps[iova]; !ok || int64(len(m)) != bytes {
		return fmt.Errorf("fake: unmap %d at %#x, which was not mapped so", bytes, uint64(iova))
	}
	delete(f.maps, iova)
	return nil
}

func (f *fakeBus) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return errors.New("fake: closed twice")
	}
	f.closed = true
	return nil
}

// mem is n bytes at an IOVA; nil when any of it is not mapped.
func (f *fakeBus) mem(a uint64, n int) []byte {
	for base, m := range f.maps {
		if a >= uint64(base) && a+uint64(n) <= uint64(base)+uint64(len(m)) {
			return m[a-uint64(base):][:n]
		}
	}
	return nil
}

// Kick fetches and answers the new commands of the admin queue.
func (f *fakeBus) Kick(qid uint16) {
	if qid != 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.work()
}

func (f *fakeBus) work() {
	if f.csts&3 != 1 {
		return
	}
	n := int(f.aqa&0xfff) + 1
	for tail := int(atomic.LoadUint32(&f.db[0])); f.sqHead != tail; {
		var c Command
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&c)), 64), f.mem(f.asq+uint64(f.sqHead)*64, 64))
		f.sqHead = (f.sqHead + 1) % n
		f.log = append(f.log, c)
		if f.handle != nil {
			if e, done := f.handle(c); done {
				if e != nil {
					f.post(*e)
				}
				continue
			}
		}
		if e, ok := f.answer(c); ok {
			f.post(e)
		}
	}
}

func ok(c Command) Completion { return Completion{CID: c.CID} }

func failed(c Command, s Status) *Completion {
	return &Completion{CID: c.CID, StatusPhase: uint16(s) << 1}
}

// post writes a completion; SQHead is filled in unless the caller did.
func (f *fakeBus) post(e Completion) {
	if e.SQHead == 0 {
		e.SQHead = uint16(f.sqHead)
	}
	n := int(f.aqa>>16&0xfff) + 1
	e.StatusPhase &^= 1
	if f.phase {
		e.StatusPhase |= 1
	}
	StoreCompletion((*Completion)(unsafe.Pointer(&f.mem(f.acq+uint64(f.cqTail)*16, 16)[0])), e)
	f.cqTail++
	if f.cqTail == n {
		f.cqTail, f.phase = 0, !f.phase
	}
}

// data sends b to where the command's PRPs point.
func (f *fakeBus) data(c Command, b []byte) error {
	segs, err := walkPRP(c.PRP1, c.PRP2, len(b), 4096, func(a uint64) []byte { return f.mem(a, 8) })
	if err != nil {
		return err
	}
	for _, s := range segs {
		m := f.mem(s.addr, s.n)
		if m == nil {
			return fmt.Errorf("fake: DMA to %#x+%d", s.addr, s.n)
		}
		copy(m, b)
		b = b[s.n:]
	}
	return nil
}

func raw[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

func (f *fakeBus) answer(c Command) (Completion, bool) {
	e := ok(c)
	send := func(b []byte) {
		if err := f.data(c, b); err != nil {
			e = *failed(c, StatusDataTransferError)
		}
	}
	qid := uint16(c.CDW10)
	switch c.Opcode {
	case AdminIdentify:
		switch c.CDW10 & 0xff {
		case CNSController:
			send(raw(&f.id))
		case CNSNamespace:
			send(raw(&f.ns))
		case CNSActiveNSList:
			var list [1024]uint32
			n := 0
			for _, id := range f.nsids {
				if id > c.NSID && n < len(list) {
					list[n] = id
					n++
				}
			}
			send(raw(&list))
		case CNSNSDescriptors:
			send(append(f.descriptors, make([]byte, IdentifyBytes-len(f.descriptors))...))
		default:
			e = *failed(c, StatusInvalidField)
		}
	case AdminGetLogPage:
		n := int(c.LogPageBytes())
		switch c.CDW10 & 0xff {
		case LogSMART:
			send(raw(&f.smart)[:n])
		case LogErrorInformation:
			b := make([]byte, n)
			for i := range f.errlog[:min(len(f.errlog), n/64)] {
				copy(b[i*64:], raw(&f.errlog[i]))
			}
			send(b)
		default:
			e = *failed(c, StatusInvalidLogPage)
		}
	case AdminSetFeatures:
		v := c.CDW11
		if c.CDW10&0xff == FeatureNumberOfQueues {
			v = min(v&0xffff, 7) | min(v>>16, 5)<<16
		}
		f.features[uint8(c.CDW10)] = v
		e.DW0 = v
	case AdminGetFeatures:
		e.DW0 = f.features[uint8(c.CDW10)]
	case AdminCreateCQ:
		f.cqs[qid] = true
	case AdminCreateSQ:
		if !f.cqs[uint16(c.CDW11>>16)] {
			e = *failed(c, StatusInvalidCQ)
		}
		f.sqs[qid] = true
	case AdminDeleteSQ:
		if !f.sqs[qid] {
			e = *failed(c, StatusInvalidQueueID)
		}
		delete(f.sqs, qid)
	case AdminDeleteCQ:
		switch {
		case f.sqs[qid]:
			e = *failed(c, StatusInvalidQueueDelete)
		case !f.cqs[qid]:
			e = *failed(c, StatusInvalidQueueID)
		}
		delete(f.cqs, qid)
	case AdminAbort:
		e.DW0 = 1 // not aborted
	default:
		e = *failed(c, StatusInvalidOpcode.WithDNR())
	}
	return e, true
}

// with changes the fake under its lock.
func (f *fakeBus) with(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

// sent counts the commands of an opcode.
func (f *fakeBus) sent(op uint8) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.log {
		if c.Opcode == op {
			n++
		}
	}
	return n
}

// waitBus works like a software controller that has no thread: only the caller of WaitCQ
// makes it work.
type waitBus struct {
	*fakeBus
	waits atomic.Int64
}

func (w *waitBus) Kick(uint16) {}

func (w *waitBus) WaitCQ(qid uint16, d time.Duration) {
	w.waits.Add(1)
	w.fakeBus.Kick(qid)
}

// seg is a piece of memory that PRPs describe.
type seg struct {
	addr uint64
	n    int
}

// walkPRP reads PRPs as a controller does, straight from section 4.1.1, and returns the
// memory they describe in order. load gives the 8 bytes of a list entry.
func walkPRP(prp1, prp2 uint64, bytes, page int, load func(addr uint64) []byte) ([]seg, error) {
	mask := uint64(page - 1)
	if prp1&3 != 0 {
		return nil, fmt.Errorf("PRP1 %#x not on a dword", prp1)
	}
	first := min(page-int(prp1&mask), bytes)
	out := []seg{{prp1, first}}
	bytes -= first
	switch {
	case bytes == 0:
		if prp2 != 0 {
			return nil, fmt.Errorf("PRP2 %#x is not needed", prp2)
		}
		return out, nil
	case bytes <= page:
		if prp2&mask != 0 {
			return nil, fmt.Errorf("PRP2 %#x has an offset", prp2)
		}
		return append(out, seg{prp2, bytes}), nil
	}
	off := prp2
	if off&7 != 0 {
		return nil, fmt.Errorf("PRP list at %#x", off)
	}
	for steps := 0; bytes > 0; steps++ {
		if steps > 1<<20 {
			return nil, errors.New("PRP list without end")
		}
		b := load(off)
		if b == nil {
			return nil, fmt.Errorf("PRP list entry at %#x is not mapped", off)
		}
		v := *(*uint64)(unsafe.Pointer(&b[0]))
		lastOfPage := off&mask == mask-7
		left := (bytes + page - 1) / page
		if lastOfPage && left > 1 {
			if v&7 != 0 || v == 0 {
				return nil, fmt.Errorf("PRP list chained to %#x", v)
			}
			off = v
			continue
		}
		if v&mask != 0 {
			return nil, fmt.Errorf("PRP list entry %#x has an offset", v)
		}
		n := min(page, bytes)
		out = append(out, seg{v, n})
		bytes -= n
		off += 8
	}
	return out, nil
}

// checkLeaks fails the test when the fake still has mappings at its end.
func (f *fakeBus) checkLeaks(t *testing.T) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for a, m := range f.maps {
		t.Errorf("%d bytes still mapped at %#x", len(m), uint64(a))
	}
}
