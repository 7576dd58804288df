package nvme

import "fmt"

// Status is the 15-bit status field of a completion: bits 7:0 SC, 10:8 SCT, 12:11 CRD,
// 13 More, 14 DNR (section 3.3.3.2.1). 0 is success.
type Status uint16

// Status code types (figure 94).
const (
	SCTGeneric = 0
	SCTCommand = 1
	SCTMedia   = 2
	SCTPath    = 3
	SCTVendor  = 7
	statusDNR  = 1 << 14
	statusMore = 1 << 13
)

// NewStatus packs a status code type, a status code and Do Not Retry.
func NewStatus(sct, sc uint8, dnr bool) Status {
	s := Status(sct&7)<<8 | Status(sc)
	if dnr {
		s |= statusDNR
	}
	return s
}

// Statuses that code acts on or returns, without DNR.
const (
	StatusSuccess            Status = 0x000
	StatusInvalidOpcode      Status = 0x001
	StatusInvalidField       Status = 0x002
	StatusCommandIDConflict  Status = 0x003
	StatusDataTransferError  Status = 0x004
	StatusAbortedPowerLoss   Status = 0x005
	StatusInternalError      Status = 0x006
	StatusAbortRequested     Status = 0x007
	StatusAbortedSQDeletion  Status = 0x008
	StatusInvalidNamespace   Status = 0x00b
	StatusSequenceError      Status = 0x00c
	StatusInvalidPRPOffset   Status = 0x013
	StatusNamespaceReadOnly  Status = 0x020
	StatusCommandInterrupted Status = 0x021
	StatusLBAOutOfRange      Status = 0x080
	StatusCapacityExceeded   Status = 0x081
	StatusNamespaceNotReady  Status = 0x082
	StatusInvalidCQ          Status = 0x100
	StatusInvalidQueueID     Status = 0x101
	StatusInvalidQueueSize   Status = 0x102
	StatusInvalidVector      Status = 0x108
	StatusInvalidLogPage     Status = 0x109
	StatusInvalidQueueDelete Status = 0x10c
	StatusFeatureNotSaveable Status = 0x10d
	StatusReadOnlyRange      Status = 0x182
	StatusWriteFault         Status = 0x280
	StatusUnrecoveredRead    Status = 0x281
	StatusAccessDenied       Status = 0x286
)

// OK is success.
func (s Status) OK() bool { return s&0x7ff == 0 }

// SCT is the status code type.
func (s Status) SCT() uint8 { return uint8(s >> 8 & 7) }

// SC is the status code.
func (s Status) SC() uint8 { return uint8(s) }

// CRD selects the command retry delay: 0 none, else Identify Controller's CRDT[CRD-1].
func (s Status) CRD() int { return int(s >> 11 & 3) }

// More reports that the error log has more about this error.
func (s Status) More() bool { return s&statusMore != 0 }

// DNR is Do Not Retry: the same command will fail again.
func (s Status) DNR() bool { return s&statusDNR != 0 }

// Is compares type and code, not the flags.
func (s Status) Is(t Status) bool { return (s^t)&0x7ff == 0 }

// WithDNR is s with Do Not Retry set.
func (s Status) WithDNR() Status { return s | statusDNR }

// String gives the status in words with its numbers, as "unrecovered read error (SCT 2h, SC 81h)".
func (s Status) String() string {
	return fmt.Sprintf("%s (SCT %Xh, SC %02Xh)", s.Words(), s.SCT(), s.SC())
}

// Words gives the name of the status that the specification uses.
func (s Status) Words() string {
	sct, sc := s.SCT(), s.SC()
	if w, ok := statusWords[uint16(s&0x7ff)]; ok {
		return w
	}
	switch {
	case sct == SCTVendor || sc >= 0xc0:
		return "vendor specific status"
	case sct == SCTGeneric:
		return "unknown generic command status"
	case sct == SCTCommand && sc >= 0x70 && sc <= 0x7f:
		return "directive specific status"
	case sct == SCTCommand:
		return "unknown command specific status"
	case sct == SCTMedia:
		return "unknown media or data integrity error"
	case sct == SCTPath:
		return "unknown path related status"
	}
	return "status of a reserved type"
}

// statusWords has the codes of figures 95 to 98 of the base specification and of the NVM command
// set (1.0, figures 13 and 14), but for those of commands that nobody here sends: firmware,
// namespace management, key value, zones.
var statusWords = map[uint16]string{
	0x000: "successful completion",
	0x001: "invalid command opcode",
	0x002: "invalid field in command",
	0x003: "command ID conflict",
	0x004: "data transfer error",
	0x005: "command aborted due to power loss notification",
	0x006: "internal error",
	0x007: "command abort requested",
	0x008: "command aborted due to SQ deletion",
	0x009: "command aborted due to failed fused command",
	0x00a: "command aborted due to missing fused command",
	0x00b: "invalid namespace or format",
	0x00c: "command sequence error",
	0x00d: "invalid SGL segment descriptor",
	0x00e: "invalid number of SGL descriptors",
	0x00f: "data SGL length invalid",
	0x010: "metadata SGL length invalid",
	0x011: "SGL descriptor type invalid",
	0x012: "invalid use of controller memory buffer",
	0x013: "PRP offset invalid",
	0x014: "atomic write unit exceeded",
	0x015: "operation denied",
	0x016: "SGL offset invalid",
	0x018: "host identifier inconsistent format",
	0x019: "keep alive timer expired",
	0x01a: "keep alive timeout invalid",
	0x01b: "command aborted due to preempt and abort",
	0x01c: "sanitize failed",
	0x01d: "sanitize in progress",
	0x01e: "SGL data block granularity invalid",
	0x01f: "command not supported for queue in CMB",
	0x020: "namespace is write protected",
	0x021: "command interrupted",
	0x022: "transient transport error",
	0x023: "command prohibited by command and feature lockdown",
	0x024: "admin command media not ready",
	0x080: "LBA out of range",
	0x081: "capacity exceeded",
	0x082: "namespace not ready",
	0x083: "reservation conflict",
	0x084: "format in progress",
	0x088: "unrecovered error",

	0x100: "completion queue invalid",
	0x101: "invalid queue identifier",
	0x102: "invalid queue size",
	0x103: "abort command limit exceeded",
	0x105: "asynchronous event request limit exceeded",
	0x108: "invalid interrupt vector",
	0x109: "invalid log page",
	0x10c: "invalid queue deletion",
	0x10d: "feature identifier not saveable",
	0x10e: "feature not changeable",
	0x10f: "feature not namespace specific",
	0x114: "overlapping range",
	0x180: "conflicting attributes",
	0x181: "invalid protection information",
	0x182: "attempted write to read only range",
	0x183: "command size limit exceeded",

	0x280: "write fault",
	0x281: "unrecovered read error",
	0x282: "end-to-end guard check error",
	0x283: "end-to-end application tag check error",
	0x284: "end-to-end reference tag check error",
	0x285: "compare failure",
	0x286: "access denied",
	0x287: "deallocated or unwritten logical block",
	0x288: "end-to-end storage tag check error",

	0x300: "internal path error",
	0x301: "asymmetric access persistent loss",
	0x302: "asymmetric access inaccessible",
	0x303: "asymmetric access transition",
	0x360: "controller pathing error",
	0x370: "host pathing error",
	0x371: "command aborted by host",
}
