// Package nvme speaks the NVM Express protocol over a Bus: specification structures,
// controller bring-up, admin commands, queue pairs and PRP lists.
//
// Section and figure numbers are those of the NVM Express Base Specification 2.0 unless a
// comment names another document. The package never moves data itself: gpuio drives the
// queue pairs that a Controller creates. Nothing here knows which kind of Bus it talks to.
package nvme

import (
	"fmt"
	"math/big"
	"strings"
)

// IOVA is an address as the controller sees it: what goes into PRPs and queue base registers.
type IOVA uint64

// LBA is a logical block number within a namespace.
type LBA uint64

// Sizes of the structures of the specification, in bytes.
const (
	CommandBytes       = 64   // submission queue entry (section 3.3.3.1)
	CompletionBytes    = 16   // completion queue entry (section 3.3.3.2)
	IdentifyBytes      = 4096 // every Identify data structure (section 5.17)
	SMARTLogBytes      = 512  // section 5.16.1.3
	ErrorLogEntryBytes = 64   // section 5.16.1.2
)

// Controller register offsets (section 3.1.3).
const (
	RegCAP    = 0x00 // Controller Capabilities, 64 bits
	RegVS     = 0x08 // Version
	RegINTMS  = 0x0c // Interrupt Mask Set
	RegINTMC  = 0x10 // Interrupt Mask Clear
	RegCC     = 0x14 // Controller Configuration
	RegCSTS   = 0x1c // Controller Status
	RegAQA    = 0x24 // Admin Queue Attributes
	RegASQ    = 0x28 // Admin Submission Queue Base Address, 64 bits
	RegACQ    = 0x30 // Admin Completion Queue Base Address, 64 bits
	RegCMBLOC = 0x38 // Controller Memory Buffer Location
	RegCMBSZ  = 0x3c // Controller Memory Buffer Size
	RegCMBMSC = 0x50 // Controller Memory Buffer Memory Space Control, 64 bits
	RegCRTO   = 0x68 // Controller Ready Timeouts

	RegDoorbells = 0x1000 // SQ0 tail; doorbell i is at RegDoorbells + i*(4<<CAP.DSTRD)
)

// CAP is the Controller Capabilities register (figure 36).
type CAP uint64

// MQES is the largest I/O queue in entries (the register's field is 0's based).
func (c CAP) MQES() int { return int(c&0xffff) + 1 }

// CQR reports whether I/O queues must be physically contiguous.
func (c CAP) CQR() bool { return c>>16&1 != 0 }

// TO is the longest wait for CSTS.RDY to change, in units of 500 ms.
func (c CAP) TO() int { return int(c >> 24 & 0xff) }

// DSTRD gives the doorbell stride: 4<<DSTRD bytes.
func (c CAP) DSTRD() int { return int(c >> 32 & 0xf) }

// CSS is the set of command sets: bit 0 NVM, bit 6 I/O command sets by CNS, bit 7 admin only.
func (c CAP) CSS() uint8 { return uint8(c >> 37) }

// MPSMIN gives the smallest memory page: 4096<<MPSMIN bytes.
func (c CAP) MPSMIN() int { return int(c >> 48 & 0xf) }

// MPSMAX gives the largest memory page: 4096<<MPSMAX bytes.
func (c CAP) MPSMAX() int { return int(c >> 52 & 0xf) }

// CMBS reports that there may be a controller memory buffer, which CMBMSC switches on.
func (c CAP) CMBS() bool { return c>>57&1 != 0 }

// CRMS is the set of controller ready modes; when not 0 register CRTO is there.
func (c CAP) CRMS() uint8 { return uint8(c >> 59 & 3) }

// MakeCAP packs the fields a controller with the NVM command set declares. entries is the
// largest queue, timeout500ms is TO.
func MakeCAP(entries, timeout500ms, dstrd, mpsmin, mpsmax int) CAP {
	return CAP(uint64(entries-1)&0xffff | 1<<16 | uint64(timeout500ms&0xff)<<24 |
		uint64(dstrd&0xf)<<32 | 1<<37 | uint64(mpsmin&0xf)<<48 | uint64(mpsmax&0xf)<<52)
}

// CC is the Controller Configuration register (figure 46).
type CC uint32

// Bits and fields of CC.
const (
	CCEnable CC = 1 << 0

	CCSetIO        CC = 6 << 4 // all supported I/O command sets
	CCSetAdminOnly CC = 7 << 4

	CCShutdownNormal CC = 1 << 14
	CCShutdownAbrupt CC = 2 << 14
	CCShutdownMask   CC = 3 << 14
)

// MakeCC packs memory page shift (12 = 4 KiB), log2 of SQ and CQ entry sizes.
func MakeCC(pageShift, iosqes, iocqes int) CC {
	return CC(uint32(pageShift-12)&0xf<<7 | uint32(iosqes&0xf)<<16 | uint32(iocqes&0xf)<<20)
}

// EN is the enable bit.
func (c CC) EN() bool { return c&CCEnable != 0 }

// CSS is the selected command set (0 = NVM).
func (c CC) CSS() int { return int(c >> 4 & 7) }

// PageBytes is the memory page size that the host chose.
func (c CC) PageBytes() int { return 4096 << (c >> 7 & 0xf) }

// AMS is the arbitration mechanism (0 = round robin).
func (c CC) AMS() int { return int(c >> 11 & 7) }

// SHN is the shutdown notification: 0 none, 1 normal, 2 abrupt.
func (c CC) SHN() int { return int(c >> 14 & 3) }

// IOSQES and IOCQES are log2 of the I/O queue entry sizes.
func (c CC) IOSQES() int { return int(c >> 16 & 0xf) }

// IOCQES is log2 of the completion queue entry size.
func (c CC) IOCQES() int { return int(c >> 20 & 0xf) }

// CSTS is the Controller Status register (figure 47).
type CSTS uint32

// Bits and fields of CSTS.
const (
	CSTSReady             CSTS = 1 << 0
	CSTSFatal             CSTS = 1 << 1
	CSTSShutdownOccurring CSTS = 1 << 2
	CSTSShutdownComplete  CSTS = 2 << 2
	CSTSShutdownMask      CSTS = 3 << 2
)

// RDY is set while the controller processes commands.
func (c CSTS) RDY() bool { return c&CSTSReady != 0 }

// CFS tells of a fatal controller error that only a reset can clear.
func (c CSTS) CFS() bool { return c&CSTSFatal != 0 }

// SHST is the shutdown state: 0 normal operation, 1 occurring, 2 complete.
func (c CSTS) SHST() int { return int(c >> 2 & 3) }

// CMBLOC is the Controller Memory Buffer Location register (section 3.1.3.11).
type CMBLOC uint32

// BIR is the BAR that holds the buffer.
func (c CMBLOC) BIR() int { return int(c & 7) }

// OFST is the buffer's offset in the BAR, in units of CMBSZ.Unit.
func (c CMBLOC) OFST() int64 { return int64(c >> 12) }

// CMBSZ is the Controller Memory Buffer Size register (section 3.1.3.12). 0: there is none.
type CMBSZ uint32

// Unit is the unit of size and offset in bytes (SZU: 4 KiB times powers of 16), 0 for reserved
// ones.
func (c CMBSZ) Unit() int64 {
	if u := c >> 8 & 0xf; u <= 6 {
		return 4096 << (4 * u)
	}
	return 0
}

// Bytes is the size of the buffer.
func (c CMBSZ) Bytes() int64 { return int64(c>>12) * c.Unit() }

// MakeAQA packs the admin queue sizes, in entries (2 to 4096).
func MakeAQA(sqEntries, cqEntries int) uint32 {
	return uint32(cqEntries-1)&0xfff<<16 | uint32(sqEntries-1)&0xfff
}

// Version is the VS register and Identify Controller's VER.
type Version uint32

// String gives "1.4" or "2.0.1".
func (v Version) String() string {
	s := itoa(int(v>>16)) + "." + itoa(int(v>>8&0xff))
	if t := v & 0xff; t != 0 {
		s += "." + itoa(int(t))
	}
	return s
}

// Command is a submission queue entry.
type Command struct {
	Opcode uint8
	Flags  uint8 // bits 1:0 FUSE, bits 7:6 PSDT (0 = PRPs)
	CID    uint16
	NSID   uint32
	CDW2   uint32
	CDW3   uint32
	MPTR   uint64
	PRP1   uint64
	PRP2   uint64
	CDW10  uint32
	CDW11  uint32
	CDW12  uint32
	CDW13  uint32
	CDW14  uint32
	CDW15  uint32
}

// Completion is a completion queue entry. In shared memory it is read with LoadCompletion
// and written with StoreCompletion only, since the phase bit says when the rest is valid.
type Completion struct {
	DW0         uint32 // command specific result
	DW1         uint32
	SQHead      uint16 // the controller's head of queue SQID, for flow control
	SQID        uint16
	CID         uint16
	StatusPhase uint16 // bit 0 phase tag, bits 15:1 status field
}

// Status is the completion's status field without the phase tag.
func (c *Completion) Status() Status { return Status(c.StatusPhase >> 1) }

// Phase is the completion's phase tag.
func (c *Completion) Phase() bool { return c.StatusPhase&1 != 0 }

// Admin command opcodes (figure 138).
const (
	AdminDeleteSQ    = 0x00
	AdminCreateSQ    = 0x01
	AdminGetLogPage  = 0x02
	AdminDeleteCQ    = 0x04
	AdminCreateCQ    = 0x05
	AdminIdentify    = 0x06
	AdminAbort       = 0x08
	AdminSetFeatures = 0x09
	AdminGetFeatures = 0x0a
)

// I/O command opcodes (NVM Command Set Specification 1.0, figure 17, and base figure 392).
const (
	OpFlush = 0x00
	OpWrite = 0x01
	OpRead  = 0x02
)

// CNS values of Identify (figure 273).
const (
	CNSNamespace       = 0x00
	CNSController      = 0x01
	CNSActiveNSList    = 0x02
	CNSNSDescriptors   = 0x03
	MaxActiveNSPerList = 1024
)

// CommandSet is a Command Set Identifier (NVMe base specification 2.0, figure 274).
type CommandSet uint8

// I/O command sets. This package speaks the first one only.
const (
	CommandSetNVM      CommandSet = 0
	CommandSetKeyValue CommandSet = 1
	CommandSetZoned    CommandSet = 2
)

func (s CommandSet) String() string {
	switch s {
	case CommandSetNVM:
		return "NVM"
	case CommandSetKeyValue:
		return "key value"
	case CommandSetZoned:
		return "zoned namespace"
	}
	return fmt.Sprintf("number %d", uint8(s))
}

// Types (NIDT) of namespace identification descriptors (figure 277).
const (
	DescriptorEUI64      = 1
	DescriptorNGUID      = 2
	DescriptorUUID       = 3
	DescriptorCommandSet = 4
)

// SharedNamespace are the bits of NMIC that say that several controllers may reach the namespace:
// of its subsystem (0), or of others, where it is dispersed (1).
const SharedNamespace = 1<<0 | 1<<1

// Log page identifiers (figure 195).
const (
	LogErrorInformation = 0x01
	LogSMART            = 0x02
	LogFirmwareSlot     = 0x03
)

// Feature identifiers (figure 317).
const (
	FeatureArbitration       = 0x01
	FeaturePowerManagement   = 0x02
	FeatureTemperature       = 0x04
	FeatureErrorRecovery     = 0x05
	FeatureVolatileCache     = 0x06
	FeatureNumberOfQueues    = 0x07
	FeatureInterruptCoalesce = 0x08
	FeatureInterruptVector   = 0x09
	FeatureWriteAtomicity    = 0x0a
)

// NSIDAll addresses all namespaces, or the controller, where a command allows it.
const NSIDAll = 0xffffffff

// Uint128 is a 16-byte little-endian counter.
type Uint128 struct{ Lo, Hi uint64 }

// Big converts to a big integer.
func (u Uint128) Big() *big.Int {
	b := new(big.Int).SetUint64(u.Hi)
	return b.Or(b.Lsh(b, 64), new(big.Int).SetUint64(u.Lo))
}

// String gives the decimal number.
func (u Uint128) String() string { return u.Big().String() }

// PowerState is a power state descriptor (figure 276).
type PowerState struct {
	MaxPower uint16
	_        [1]byte
	Flags    uint8
	_        [4]byte
	ExitLat  uint32 // µs
	_        [20]byte
}

// IdentifyController is the Identify Controller data structure (figure 275). Here and below only
// fields that somebody uses have names.
type IdentifyController struct {
	VID       uint16
	_         [2]byte
	SN        [20]byte
	MN        [40]byte
	FR        [8]byte
	_         [5]byte
	MDTS      uint8 // largest transfer = 2^MDTS smallest memory pages; 0 = no limit
	CNTLID    uint16
	VER       Version
	RTD3R     uint32 // µs
	RTD3E     uint32 // µs
	OAES      uint32 // optional asynchronous events
	_         [15]byte
	CNTRLTYPE uint8 // 1 = I/O controller
	_         [16]byte
	CRDT      [3]uint16 // command retry delays, 100 ms
	_         [124]byte
	ACL       uint8 // Abort commands in flight, 0's based
	AERL      uint8 // asynchronous event requests in flight, 0's based
	FRMW      uint8
	LPA       uint8
	ELPE      uint8 // error log entries, 0's based
	_         [3]byte
	WCTEMP    uint16 // K
	CCTEMP    uint16 // K
	_         [10]byte
	TNVMCAP   Uint128 // bytes
	_         [216]byte
	SQES      uint8 // bits 3:0 required, 7:4 maximum, log2 of SQ entry bytes
	CQES      uint8
	_         [2]byte
	NN        uint32
	ONCS      uint16
	FUSES     uint16
	_         [1]byte
	VWC       uint8 // bit 0: volatile write cache present
	_         [10]byte
	SGLS      uint32
	_         [228]byte
	SUBNQN    [256]byte
	_         [1024]byte
	PSD       [32]PowerState
	Vendor    [1024]byte
}

// Serial is SN without its padding.
func (c *IdentifyController) Serial() string { return asciiField(c.SN[:]) }

// Model is MN without its padding.
func (c *IdentifyController) Model() string { return asciiField(c.MN[:]) }

// Firmware is FR without its padding.
func (c *IdentifyController) Firmware() string { return asciiField(c.FR[:]) }

// LBAFormat is an LBA format data structure (NVM Command Set Specification 1.0, figure 98).
type LBAFormat struct {
	MetadataBytes uint16
	LBADS         uint8 // log2 of the data bytes of a block; 0 = format not available
	RP            uint8 // relative performance, 0 best to 3
}

// IdentifyNamespace is the Identify Namespace data structure of the NVM command set (NVM
// Command Set Specification 1.0, figure 97).
type IdentifyNamespace struct {
	NSZE     uint64 // blocks
	NCAP     uint64
	NUSE     uint64
	NSFEAT   uint8
	NLBAF    uint8 // number of formats, 0's based
	FLBAS    uint8
	_        [2]byte
	DPS      uint8 // bits 2:0: protection information type in use, 0 = none
	NMIC     uint8
	_        [17]byte
	NVMCAP   Uint128
	_        [12]byte
	MCL      uint32
	_        [12]byte
	ANAGRPID uint32
	_        [3]byte
	NSATTR   uint8
	_        [4]byte
	NGUID    [16]byte
	EUI64    [8]byte
	LBAF     [64]LBAFormat
	Vendor   [3712]byte
}

// FormatIndex is the number of the LBA format in use: FLBAS bits 3:0, and bits 6:5 above
// them when there are more than 16 formats.
func (n *IdentifyNamespace) FormatIndex() int {
	i := int(n.FLBAS & 0xf)
	if n.NLBAF >= 16 {
		i |= int(n.FLBAS>>5&3) << 4
	}
	return i
}

// Format is the LBA format in use.
func (n *IdentifyNamespace) Format() LBAFormat { return n.LBAF[n.FormatIndex()] }

// Critical warning bits of the SMART log.
const (
	WarnSpare       = 1 << 0
	WarnReliability = 1 << 2
	WarnReadOnly    = 1 << 3
)

// SMARTLog is the SMART / Health Information log page (figure 207).
type SMARTLog struct {
	CriticalWarning      uint8
	CompositeTemperature [2]byte // K; use Temperature
	AvailableSpare       uint8   // percent
	SpareThreshold       uint8   // percent
	PercentageUsed       uint8
	_                    [26]byte
	DataUnitsRead        Uint128 // units of 1000 × 512 bytes, rounded up
	DataUnitsWritten     Uint128
	HostReads            Uint128 // commands
	HostWrites           Uint128 // commands
	_                    [16]byte
	PowerCycles          Uint128
	PowerOnHours         Uint128
	UnsafeShutdowns      Uint128
	MediaErrors          Uint128
	ErrorLogEntries      Uint128
	_                    [36]byte
	TMT2Seconds          uint32
	_                    [280]byte
}

// Temperature is the composite temperature in kelvin.
func (l *SMARTLog) Temperature() int {
	return int(l.CompositeTemperature[0]) | int(l.CompositeTemperature[1])<<8
}

// SetTemperature stores the composite temperature in kelvin.
func (l *SMARTLog) SetTemperature(kelvin uint16) {
	l.CompositeTemperature = [2]byte{byte(kelvin), byte(kelvin >> 8)}
}

// ErrorLogEntry is an entry of the Error Information log page (figure 206), newest first.
type ErrorLogEntry struct {
	ErrorCount    uint64 // 0 = entry unused
	SQID          uint16
	CID           uint16
	StatusPhase   uint16 // as in Completion
	ParamLocation uint16 // bits 7:0 byte, bits 10:8 bit of the command in error; FFFFh none
	LBA           uint64
	NSID          uint32
	_             [36]byte
}

// Status is the entry's status field without the phase tag.
func (e *ErrorLogEntry) Status() Status { return Status(e.StatusPhase >> 1) }

// asciiField trims a space-padded ASCII field (section 1.4.2). A controller's text reaches
// terminals and file names, so bytes outside printable ASCII become '?'.
func asciiField(b []byte) string {
	out := make([]byte, 0, len(b))
	for _, c := range b {
		if c == 0 {
			break
		}
		if c < 0x20 || c > 0x7e {
			c = '?'
		}
		out = append(out, c)
	}
	return strings.Trim(string(out), " ")
}

// SetASCII fills a space-padded ASCII field of an Identify structure.
func SetASCII(dst []byte, s string) {
	for i := range dst {
		dst[i] = ' '
		if i < len(s) {
			dst[i] = s[i]
		}
	}
}
