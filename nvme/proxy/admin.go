package proxy

import (
	"math/bits"
	"sync/atomic"
	"time"
	"unsafe"

	"helios/nvme"
)

// Limits that Identify Controller declares.
const (
	errorLogEntries = 64
	maxAborts       = 4
)

// adminState holds what the host sets up with admin commands. Bus.mu guards it.
type adminState struct {
	nsq, ncq int // I/O queues allowed; 0 = the maximum
	features map[uint8]uint32
}

// logError adds an entry to the error log.
func (b *Bus) logError(sqid uint16, cmd *nvme.Command, st nvme.Status) {
	e := nvme.ErrorLogEntry{SQID: sqid, CID: cmd.CID, StatusPhase: nvme.StatusPhase(st, false),
		ParamLocation: 0xffff, NSID: cmd.NSID}
	if sqid != 0 && cmd.Opcode != nvme.OpFlush {
		lba, _ := cmd.LBARange()
		e.LBA = uint64(lba)
	}
	b.logMu.Lock()
	b.errors++
	e.ErrorCount = b.errors
	b.errorLog[(b.errors-1)%errorLogEntries] = e
	b.logMu.Unlock()
}

// admin executes an admin command. The caller holds mu, which is the admin queue's lock.
func (b *Bus) admin(q *squeue, cmd nvme.Command) {
	c := q.cq
	if q.held(cmd.CID) {
		c.refuse(q, &cmd, nvme.StatusCommandIDConflict)
		return
	}
	if cmd.Flags&(flagFUSE|flagPSDT) != 0 {
		c.refuse(q, &cmd, nvme.StatusInvalidField)
		return
	}
	dw0, st := b.adminCommand(c, &cmd)
	if !st.OK() {
		c.refuse(q, &cmd, st)
		return
	}
	c.complete(q, cmd.CID, dw0, st)
}

func (b *Bus) adminCommand(c *cqueue, cmd *nvme.Command) (uint32, nvme.Status) {
	switch cmd.Opcode {
	case nvme.AdminIdentify:
		return 0, b.identify(c, cmd)
	case nvme.AdminCreateCQ:
		return 0, b.createCQ(c, cmd)
	case nvme.AdminCreateSQ:
		return 0, b.createSQ(c, cmd)
	case nvme.AdminDeleteCQ:
		return 0, b.deleteCQ(uint16(cmd.CDW10))
	case nvme.AdminDeleteSQ:
		return 0, b.deleteSQ(uint16(cmd.CDW10))
	case nvme.AdminSetFeatures:
		return b.setFeatures(cmd)
	case nvme.AdminGetFeatures:
		return b.getFeatures(cmd)
	case nvme.AdminGetLogPage:
		return 0, b.getLogPage(c, cmd)
	case nvme.AdminAbort:
		// I/O commands run to their end, as they mostly do in a real controller: bit 0, not
		// aborted.
		return 1, nvme.StatusSuccess
	}
	return 0, nvme.StatusInvalidOpcode
}

// toHost copies data to the command's buffer.
func (b *Bus) toHost(c *cqueue, cmd *nvme.Command, data []byte) nvme.Status {
	c.segs = c.segs[:0]
	if st := c.prps(cmd.PRP1, cmd.PRP2, int64(len(data))); !st.OK() {
		return st
	}
	scatter(c.segs, data)
	return nvme.StatusSuccess
}

func structBytes[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

func (b *Bus) identify(c *cqueue, cmd *nvme.Command) nvme.Status {
	switch cmd.CDW10 & 0xff {
	case nvme.CNSController:
		id := b.identifyController()
		return b.toHost(c, cmd, structBytes(&id))
	case nvme.CNSNamespace:
		if cmd.NSID != 1 {
			return nvme.StatusInvalidNamespace
		}
		id := b.identifyNamespace()
		return b.toHost(c, cmd, structBytes(&id))
	case nvme.CNSActiveNSList:
		if cmd.NSID >= 0xfffffffe {
			return nvme.StatusInvalidNamespace
		}
		list := [nvme.MaxActiveNSPerList]uint32{}
		if cmd.NSID < 1 { // namespaces above this one
			list[0] = 1
		}
		return b.toHost(c, cmd, structBytes(&list))
	case nvme.CNSNSDescriptors:
		if cmd.NSID != 1 {
			return nvme.StatusInvalidNamespace
		}
		list := [nvme.IdentifyBytes]byte{0: nvme.DescriptorEUI64, 1: 8}
		id := b.identifyNamespace()
		copy(list[4:], id.EUI64[:])
		if b.cfg.CommandSet != nvme.CommandSetNVM {
			copy(list[12:], []byte{nvme.DescriptorCommandSet, 1, 0, 0, byte(b.cfg.CommandSet)})
		}
		return b.toHost(c, cmd, list[:])
	}
	return nvme.StatusInvalidField
}

func (b *Bus) identifyController() nvme.IdentifyController {
	id := nvme.IdentifyController{
		MDTS: uint8(b.cfg.MDTS), CNTLID: 1, VER: version, CNTRLTYPE: 1,
		RTD3R: 1e6, RTD3E: 10e6, // µs
		// one slot, read only
		ACL: maxAborts - 1, FRMW: 1<<1 | 1,
		LPA: 1 << 2, ELPE: errorLogEntries - 1, // log page offsets
		WCTEMP: 343, CCTEMP: 353,
		SQES: 6<<4 | 6, CQES: 4<<4 | 4, NN: 1,
		TNVMCAP: nvme.Uint128{Lo: uint64(b.back.bytes)},
	}
	nvme.SetASCII(id.SN[:], b.cfg.Serial)
	nvme.SetASCII(id.MN[:], "Helios proxy SSD ("+b.Engine()+")")
	nvme.SetASCII(id.FR[:], "1.0")
	copy(id.SUBNQN[:], "nqn.2014-08.org.nvmexpress:helios:proxy:"+b.cfg.Serial)
	if b.cacheable() {
		id.VWC = 1
	}
	id.PSD[0].MaxPower = 1000 // 10 W
	return id
}

// cacheable reports whether there is a volatile write cache between a write's completion and
// the medium: the page cache, or the drive's own.
func (b *Bus) cacheable() bool { return b.back.mem == nil && !b.cfg.ReadOnly }

func (b *Bus) identifyNamespace() nvme.IdentifyNamespace {
	id := nvme.IdentifyNamespace{NSZE: b.blocks, NCAP: b.blocks, NUSE: b.blocks,
		NVMCAP: nvme.Uint128{Lo: uint64(b.back.bytes)}}
	id.LBAF[0] = nvme.LBAFormat{LBADS: uint8(b.lbaShift)}
	if b.cfg.ReadOnly {
		id.NSATTR = 1
	}
	h := uint64(14695981039346656037) // FNV-1a of the serial number
	for _, ch := range []byte(b.cfg.Serial) {
		h = (h ^ uint64(ch)) * 1099511628211
	}
	for i := range id.EUI64 {
		id.EUI64[i] = byte(h >> (56 - 8*i))
	}
	id.EUI64[0] = id.EUI64[0]&^1 | 2 // locally administered
	return id
}

func (b *Bus) ioQueues() bool {
	for i := 1; i < len(b.sqs); i++ {
		if b.sqs[i].Load() != nil || b.cqs[i].Load() != nil {
			return true
		}
	}
	return false
}

// allowed returns how many queues of a kind the host may create.
func (b *Bus) allowed(n int) int {
	if n == 0 {
		return b.cfg.MaxQueuePairs
	}
	return n
}

// queueArgs checks what Create I/O SQ and CQ have in common.
func (b *Bus) queueArgs(c *cqueue, cmd *nvme.Command, limit int, exists bool,
	entryBytes uint64) (id uint16, entries uint32, base unsafe.Pointer, st nvme.Status) {
	id, entries = uint16(cmd.CDW10), cmd.CDW10>>16+1
	switch {
	case id == 0 || int(id) > limit || exists:
		return 0, 0, nil, nvme.StatusInvalidQueueID
	case entries < 2 || int(entries) > b.cap.MQES():
		return 0, 0, nil, nvme.StatusInvalidQueueSize
	case cmd.CDW11&1 == 0: // PC; CAP.CQR demands contiguous queues
		return 0, 0, nil, nvme.StatusInvalidField
	case cmd.PRP1&uint64(b.page-1) != 0:
		return 0, 0, nil, nvme.StatusInvalidPRPOffset
	}
	base, ok := c.tlb.translate(b, cmd.PRP1, uint64(entries)*entryBytes)
	if !ok {
		return 0, 0, nil, nvme.StatusDataTransferError
	}
	return id, entries, base, nvme.StatusSuccess
}

func (b *Bus) createCQ(c *cqueue, cmd *nvme.Command) nvme.Status {
	id := uint16(cmd.CDW10)
	exists := int(id) < len(b.cqs) && b.cqs[id].Load() != nil
	id, entries, base, st := b.queueArgs(c, cmd, b.allowed(b.adm.ncq), exists, nvme.CompletionBytes)
	switch {
	case !st.OK():
		return st
	case b.cc.IOCQES() != 4:
		return nvme.StatusInvalidQueueSize
	case cmd.CDW11&2 != 0 && cmd.CDW11>>16 != 0: // there is one vector, pin based
		return nvme.StatusInvalidVector
	}
	n := b.newCQ(id, base, entries)
	atomic.StoreUint32(n.headDB, 0)
	n.mu.Lock()
	b.react.join(n)
	n.mu.Unlock()
	b.cqs[id].Store(n)
	return nvme.StatusSuccess
}

func (b *Bus) createSQ(c *cqueue, cmd *nvme.Command) nvme.Status {
	id, cqid := uint16(cmd.CDW10), cmd.CDW11>>16
	exists := int(id) < len(b.sqs) && b.sqs[id].Load() != nil
	id, entries, base, st := b.queueArgs(c, cmd, b.allowed(b.adm.nsq), exists, nvme.CommandBytes)
	switch {
	case !st.OK():
		return st
	case b.cc.IOSQES() != 6:
		return nvme.StatusInvalidQueueSize
	case cqid == 0 || int(cqid) >= len(b.cqs) || b.cqs[cqid].Load() == nil:
		return nvme.StatusInvalidCQ
	}
	cq := b.cqs[cqid].Load()
	q := &squeue{id: id, cq: cq, base: base, entries: entries, tailDB: b.doorbell(2 * uint32(id))}
	atomic.StoreUint32(q.tailDB, 0)
	cq.mu.Lock()
	cq.sqs = append(cq.sqs, q)
	cq.mu.Unlock()
	b.sqs[id].Store(q)
	return nvme.StatusSuccess
}

// deleteSQ ends a submission queue: completions whose time has not come are dropped, what the
// kernel works on is waited for (section 5.6).
func (b *Bus) deleteSQ(id uint16) nvme.Status {
	if id == 0 || int(id) >= len(b.sqs) || b.sqs[id].Load() == nil {
		return nvme.StatusInvalidQueueID
	}
	q := b.sqs[id].Load()
	c := q.cq
	c.mu.Lock()
	c.dropAll(q)
	for i, s := range c.sqs { // from here on nothing is fetched from it
		if s == q {
			c.sqs = append(c.sqs[:i:i], c.sqs[i+1:]...)
			break
		}
	}
	c.unlock()
	if err := c.drain(time.Now().Add(drainTime),
		func(s *slot) bool { return s.sq == q }); err != nil {
		b.fatal()
		return nvme.StatusInternalError
	}
	b.sqs[id].Store(nil)
	return nvme.StatusSuccess
}

func (b *Bus) deleteCQ(id uint16) nvme.Status {
	if id == 0 || int(id) >= len(b.cqs) || b.cqs[id].Load() == nil {
		return nvme.StatusInvalidQueueID
	}
	c := b.cqs[id].Load()
	for i := range b.sqs {
		if q := b.sqs[i].Load(); q != nil && q.cq == c {
			return nvme.StatusInvalidQueueDelete
		}
	}
	if err := b.retire(c, time.Now().Add(drainTime)); err != nil {
		b.fatal()
		return nvme.StatusInternalError
	}
	return nvme.StatusSuccess
}

// changeable maps the features that can be set to the bits that they keep.
var changeable = map[uint8]uint32{
	nvme.FeatureArbitration:       0xffffff07,
	nvme.FeaturePowerManagement:   0,
	nvme.FeatureTemperature:       0x003fffff,
	nvme.FeatureErrorRecovery:     0x0000ffff,
	nvme.FeatureInterruptCoalesce: 0x0000ffff,
	nvme.FeatureInterruptVector:   0x0001ffff,
	nvme.FeatureWriteAtomicity:    1,
}

func (b *Bus) setFeatures(cmd *nvme.Command) (uint32, nvme.Status) {
	id, v := uint8(cmd.CDW10), cmd.CDW11
	if cmd.CDW10>>31 != 0 {
		return 0, nvme.StatusFeatureNotSaveable
	}
	if st := b.featureScope(id, cmd.NSID); !st.OK() {
		return 0, st
	}
	switch id {
	case nvme.FeatureNumberOfQueues:
		if b.ioQueues() {
			return 0, nvme.StatusSequenceError
		}
		nsq, ncq := v&0xffff, v>>16
		if nsq == 0xffff || ncq == 0xffff {
			return 0, nvme.StatusInvalidField
		}
		b.adm.nsq = min(int(nsq)+1, b.cfg.MaxQueuePairs)
		b.adm.ncq = min(int(ncq)+1, b.cfg.MaxQueuePairs)
		return b.queueCounts(), nvme.StatusSuccess
	case nvme.FeatureVolatileCache:
		if !b.cacheable() {
			return 0, nvme.StatusInvalidField
		}
		atomic.StoreUint32(&b.cacheOff, 1-v&1)
		return 0, nvme.StatusSuccess
	case nvme.FeaturePowerManagement:
		if v&0x1f != 0 { // there is one power state
			return 0, nvme.StatusInvalidField
		}
	}
	keep, ok := changeable[id]
	if !ok {
		return 0, nvme.StatusInvalidField
	}
	if b.adm.features == nil {
		b.adm.features = map[uint8]uint32{}
	}
	b.adm.features[id] = v & keep
	return 0, nvme.StatusSuccess
}

// featureScope checks the namespace that a feature is set for (section 5.27): all features here but
// one are the controller's.
func (b *Bus) featureScope(id uint8, nsid uint32) nvme.Status {
	_, known := changeable[id]
	switch {
	case nsid == 0, nsid == nvme.NSIDAll, !known && id != nvme.FeatureNumberOfQueues &&
		id != nvme.FeatureVolatileCache:
		return nvme.StatusSuccess
	case nsid != 1:
		return nvme.StatusInvalidNamespace
	case id == nvme.FeatureErrorRecovery:
		return nvme.StatusSuccess
	}
	return nvme.NewStatus(nvme.SCTCommand, 0x0f, false) // feature not namespace specific
}

func (b *Bus) queueCounts() uint32 {
	return uint32(b.allowed(b.adm.ncq)-1)<<16 | uint32(b.allowed(b.adm.nsq)-1)
}

func (b *Bus) getFeatures(cmd *nvme.Command) (uint32, nvme.Status) {
	id, sel := uint8(cmd.CDW10), cmd.CDW10>>8&7
	if sel > 3 {
		return 0, nvme.StatusInvalidField
	}
	_, known := changeable[id]
	switch {
	case id == nvme.FeatureVolatileCache && !b.cacheable():
		return 0, nvme.StatusInvalidField
	case !known && id != nvme.FeatureNumberOfQueues && id != nvme.FeatureVolatileCache:
		return 0, nvme.StatusInvalidField
	// capabilities: changeable, per namespace, not saveable
	case sel == 3 && id == nvme.FeatureErrorRecovery:
		return 1<<2 | 1<<1, nvme.StatusSuccess
	case sel == 3: // changeable, not saveable, not per namespace
		return 1 << 2, nvme.StatusSuccess
	}
	current := sel == 0
	switch id {
	case nvme.FeatureNumberOfQueues:
		if current {
			return b.queueCounts(), nvme.StatusSuccess
		}
		return uint32(b.cfg.MaxQueuePairs-1) * 0x10001, nvme.StatusSuccess
	case nvme.FeatureVolatileCache:
		if current {
			return 1 - atomic.LoadUint32(&b.cacheOff), nvme.StatusSuccess
		}
		return 1, nvme.StatusSuccess
	}
	if current {
		if v, ok := b.adm.features[id]; ok {
			return v, nvme.StatusSuccess
		}
	}
	if id == nvme.FeatureTemperature {
		return 343, nvme.StatusSuccess // over temperature threshold: WCTEMP
	}
	return 0, nvme.StatusSuccess
}

func (b *Bus) getLogPage(c *cqueue, cmd *nvme.Command) nvme.Status {
	n := cmd.LogPageBytes()
	off := uint64(cmd.CDW12) | uint64(cmd.CDW13)<<32
	if n > int64(b.maxTransfer) {
		return nvme.StatusInvalidField
	}
	var page []byte
	switch lid := cmd.CDW10 & 0xff; lid {
	case nvme.LogErrorInformation:
		log := b.errorPage()
		page = structBytes(&log)
	case nvme.LogSMART:
		if cmd.NSID != 0 && cmd.NSID != nvme.NSIDAll { // LPA bit 0: for the controller only
			return nvme.StatusInvalidField
		}
		log := b.smart()
		page = structBytes(&log)
	case nvme.LogFirmwareSlot:
		page = make([]byte, 512)
		page[0] = 1 // slot 1 is active
		nvme.SetASCII(page[8:16], "1.0")
	default:
		return nvme.StatusInvalidLogPage
	}
	if off%4 != 0 || off > uint64(len(page)) {
		return nvme.StatusInvalidField
	}
	out := make([]byte, n) // zeroes behind the page's end
	copy(out, page[off:])
	return b.toHost(c, cmd, out)
}

// errorPage is the error log, newest entry first.
func (b *Bus) errorPage() (log [errorLogEntries]nvme.ErrorLogEntry) {
	b.logMu.Lock()
	defer b.logMu.Unlock()
	for i := range min(b.errors, errorLogEntries) {
		log[i] = b.errorLog[(b.errors-1-i)%errorLogEntries]
	}
	return log
}

// smart adds up the SMART log. The caller holds mu.
func (b *Bus) smart() nvme.SMARTLog {
	t := b.retired
	for i := 1; i < len(b.cqs); i++ {
		if c := b.cqs[i].Load(); c != nil {
			c.mu.Lock()
			t.add(c.count)
			c.mu.Unlock()
		}
	}
	b.logMu.Lock()
	errors := b.errors
	b.logMu.Unlock()
	// Bytes in units of 1000 × 512, rounded up; 128 bits are not needed for what a file holds,
	// but the sum must not wrap on the way.
	units := func(bytes uint64) nvme.Uint128 {
		sum, carry := bits.Add64(bytes, 512000-1, 0)
		q, _ := bits.Div64(carry, sum, 512000)
		return nvme.Uint128{Lo: q}
	}
	l := nvme.SMARTLog{AvailableSpare: 100, SpareThreshold: 10,
		DataUnitsRead: units(t.bytesRead), DataUnitsWritten: units(t.bytesWrite),
		HostReads: nvme.Uint128{Lo: t.reads}, HostWrites: nvme.Uint128{Lo: t.writes},
		PowerCycles:  nvme.Uint128{Lo: 1},
		PowerOnHours: nvme.Uint128{Lo: uint64(time.Since(b.opened).Hours())},
		MediaErrors:  nvme.Uint128{Lo: t.mediaErrors}, ErrorLogEntries: nvme.Uint128{Lo: errors}}
	l.SetTemperature(313)
	if b.reliability.Load() {
		l.CriticalWarning |= nvme.WarnReliability
	}
	if b.cfg.ReadOnly {
		l.CriticalWarning |= nvme.WarnReadOnly
	}
	return l
}
