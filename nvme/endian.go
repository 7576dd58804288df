package nvme

import "unsafe"

// NVMe structures are little-endian (NVM Express Base Specification 2.0, section 1.4.1). They are
// used here as Go structs laid over the shared memory, without conversion, so the host
// must be little-endian too: endian_big.go refuses to compile elsewhere.

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

// Offsets of the fields that code relies on, as array lengths in the same way.
type (
	_ [unsafe.Offsetof(Command{}.NSID) - 4]struct{}
	_ [4 - unsafe.Offsetof(Command{}.NSID)]struct{}
	_ [unsafe.Offsetof(Command{}.MPTR) - 16]struct{}
	_ [16 - unsafe.Offsetof(Command{}.MPTR)]struct{}
	_ [unsafe.Offsetof(Command{}.PRP1) - 24]struct{}
	_ [24 - unsafe.Offsetof(Command{}.PRP1)]struct{}
	_ [unsafe.Offsetof(Command{}.PRP2) - 32]struct{}
	_ [32 - unsafe.Offsetof(Command{}.PRP2)]struct{}
	_ [unsafe.Offsetof(Command{}.CDW10) - 40]struct{}
	_ [40 - unsafe.Offsetof(Command{}.CDW10)]struct{}
	_ [unsafe.Offsetof(Command{}.CDW15) - 60]struct{}
	_ [60 - unsafe.Offsetof(Command{}.CDW15)]struct{}

	_ [unsafe.Offsetof(Completion{}.SQHead) - 8]struct{}
	_ [8 - unsafe.Offsetof(Completion{}.SQHead)]struct{}
	_ [unsafe.Offsetof(Completion{}.SQID) - 10]struct{}
	_ [10 - unsafe.Offsetof(Completion{}.SQID)]struct{}
	_ [unsafe.Offsetof(Completion{}.CID) - 12]struct{}
	_ [12 - unsafe.Offsetof(Completion{}.CID)]struct{}
	_ [unsafe.Offsetof(Completion{}.StatusPhase) - 14]struct{}
	_ [14 - unsafe.Offsetof(Completion{}.StatusPhase)]struct{}

	_ [unsafe.Offsetof(IdentifyController{}.MDTS) - 77]struct{}
	_ [77 - unsafe.Offsetof(IdentifyController{}.MDTS)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.VER) - 80]struct{}
	_ [80 - unsafe.Offsetof(IdentifyController{}.VER)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.CNTRLTYPE) - 111]struct{}
	_ [111 - unsafe.Offsetof(IdentifyController{}.CNTRLTYPE)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.OACS) - 256]struct{}
	_ [256 - unsafe.Offsetof(IdentifyController{}.OACS)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.TNVMCAP) - 280]struct{}
	_ [280 - unsafe.Offsetof(IdentifyController{}.TNVMCAP)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.SANICAP) - 328]struct{}
	_ [328 - unsafe.Offsetof(IdentifyController{}.SANICAP)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.MEGCAP) - 368]struct{}
	_ [368 - unsafe.Offsetof(IdentifyController{}.MEGCAP)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.SQES) - 512]struct{}
	_ [512 - unsafe.Offsetof(IdentifyController{}.SQES)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.NN) - 516]struct{}
	_ [516 - unsafe.Offsetof(IdentifyController{}.NN)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.SGLS) - 536]struct{}
	_ [536 - unsafe.Offsetof(IdentifyController{}.SGLS)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.MAXCNA) - 560]struct{}
	_ [560 - unsafe.Offsetof(IdentifyController{}.MAXCNA)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.SUBNQN) - 768]struct{}
	_ [768 - unsafe.Offsetof(IdentifyController{}.SUBNQN)]struct{}
	_ [unsafe.Offsetof(IdentifyController{}.PSD) - 2048]struct{}
	_ [2048 - unsafe.Offsetof(IdentifyController{}.PSD)]struct{}

	_ [unsafe.Offsetof(IdentifyNamespace{}.NLBAF) - 25]struct{}
	_ [25 - unsafe.Offsetof(IdentifyNamespace{}.NLBAF)]struct{}
	_ [unsafe.Offsetof(IdentifyNamespace{}.NVMCAP) - 48]struct{}
	_ [48 - unsafe.Offsetof(IdentifyNamespace{}.NVMCAP)]struct{}
	_ [unsafe.Offsetof(IdentifyNamespace{}.MCL) - 76]struct{}
	_ [76 - unsafe.Offsetof(IdentifyNamespace{}.MCL)]struct{}
	_ [unsafe.Offsetof(IdentifyNamespace{}.NGUID) - 104]struct{}
	_ [104 - unsafe.Offsetof(IdentifyNamespace{}.NGUID)]struct{}
	_ [unsafe.Offsetof(IdentifyNamespace{}.LBAF) - 128]struct{}
	_ [128 - unsafe.Offsetof(IdentifyNamespace{}.LBAF)]struct{}

	_ [unsafe.Offsetof(SMARTLog{}.DataUnitsRead) - 32]struct{}
	_ [32 - unsafe.Offsetof(SMARTLog{}.DataUnitsRead)]struct{}
	_ [unsafe.Offsetof(SMARTLog{}.MediaErrors) - 160]struct{}
	_ [160 - unsafe.Offsetof(SMARTLog{}.MediaErrors)]struct{}
	_ [unsafe.Offsetof(SMARTLog{}.TemperatureSensors) - 200]struct{}
	_ [200 - unsafe.Offsetof(SMARTLog{}.TemperatureSensors)]struct{}

	_ [unsafe.Offsetof(ErrorLogEntry{}.LBA) - 16]struct{}
	_ [16 - unsafe.Offsetof(ErrorLogEntry{}.LBA)]struct{}
	_ [unsafe.Offsetof(ErrorLogEntry{}.CommandSpecific) - 32]struct{}
	_ [32 - unsafe.Offsetof(ErrorLogEntry{}.CommandSpecific)]struct{}
)
