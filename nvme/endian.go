package nvme

import "unsafe"

// NVMe structures are little-endian (NVM Express Base Specification 2.0, section 1.4.1). They are
// used here as Go structs laid over the shared memory, without conversion, so the host
// must be little-endian too: endian_big.go refuses to compile elsewhere. TestOffsets holds each
// field's offset against the specification.

// Sizes: each difference is the constant 0 when the layout is as specified; one of each
// pair is negative, which no uintptr constant can be, when it is not.
const (
	_ = unsafe.Sizeof(Command{}) - CommandBytes
	_ = CommandBytes - unsafe.Sizeof(Command{})
	_ = unsafe.Sizeof(Completion{}) - CompletionBytes
	_ = CompletionBytes - unsafe.Sizeof(Completion{})
	_ = unsafe.Sizeof(IdentifyController{}) - IdentifyBytes
	_ = IdentifyBytes - unsafe.Sizeof(IdentifyController{})
	_ = unsafe.Sizeof(IdentifyNamespace{}) - IdentifyBytes
	_ = IdentifyBytes - unsafe.Sizeof(IdentifyNamespace{})
	_ = unsafe.Sizeof(PowerState{}) - 32
	_ = 32 - unsafe.Sizeof(PowerState{})
	_ = unsafe.Sizeof(LBAFormat{}) - 4
	_ = 4 - unsafe.Sizeof(LBAFormat{})
	_ = unsafe.Sizeof(SMARTLog{}) - SMARTLogBytes
	_ = SMARTLogBytes - unsafe.Sizeof(SMARTLog{})
	_ = unsafe.Sizeof(ErrorLogEntry{}) - ErrorLogEntryBytes
	_ = ErrorLogEntryBytes - unsafe.Sizeof(ErrorLogEntry{})
)
