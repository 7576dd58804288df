package gpuio

import (
	"sync/atomic"
	"unsafe"

	"helios/cuda"
)

// The state that the submit and complete kernels share, in device memory, and their parameter
// blocks. The CUDA kernels get the same bytes, so layouts are asserted below. Addresses are
// DevicePtr; a field's comment names which side may touch it (on a GPU the host changes its copy
// while no kernel runs, rungmem.go):
//
//	host      written by the host while no kernel uses the entry
//	owner     the holder of queueState.Own (submission side)
//	completer the warp that owns the queue in the complete kernel (one such kernel at a time)
//	shared    atomics only
const (
	maxSets     = 32 // read sets in flight
	maxCommands = 1024
	bitmapWords = maxCommands / 32 // one word per lane of a warp
	maxFails    = 16               // failed rows described per set; more are only counted
	warp        = 32
	// ringEvery is the k×32 entries after which a long refill rings the doorbell, so that the
	// SSD starts before the last entry is written.
	ringEvery = 4 * warp
	// maxSweeps bounds how often a warp of complete sweeps a queue before it looks at the next. A
	// queue that its SSD fills faster than a warp empties it would keep the warp, and with it the
	// kernel's end and all later sets, for as long as it has work.
	maxSweeps = 4
)

// Ownership of a queue's submission side. A kernel that finds it taken leaves ownDirty and goes
// on: the holder looks again before it lets go. So nobody ever waits for the flag.
const (
	ownFree  = 0
	ownHeld  = 1
	ownDirty = 2
)

// Why a queue is frozen: neither kernel touches it until the host has recovered it.
const (
	frozenNo      = 0
	frozenTimeout = 1 // a command is past its deadline
	frozenForeign = 2 // a completion named no command in flight
	// the queue could not be replaced; the SSD does not touch its commands any more
	frozenDead    = 3
	frozenClosing = 4 // the engine is being closed with sets in flight
	frozenUnsafe  = 5 // as frozenDead, but the SSD may still touch its commands: they stay taken
)

// States of a command, the low byte of command.State. Bit 8: Abort was sent. Bits 10 to 15:
// generation (cmdGen). Bits 16 up: attempts.
const (
	cmdFree     = 0
	cmdInFlight = 1
	cmdRetry    = 2 // waits in queueState.Retry
	// read_sync: completed, its status is in Deadline; its own warp has not seen it yet
	cmdDone    = 3
	cmdState   = 0xff
	cmdAborted = 1 << 8
	cmdAttempt = 1 << 16
)

// A command's identifier on the wire is its number in the queue, the CID, with a generation above
// it that each attempt advances. So a completion names its attempt: one that comes twice, the
// second time after the CID was used again, is foreign. It is taken for another's only after a
// multiple of generations attempts under its CID. FFFFh is no identifier (base specification 2.0,
// figure 86), so there is no generation of all ones.
const (
	cidMask     = maxCommands - 1
	cmdGen      = 0xffff &^ cidMask // of command.State as of the identifier
	cmdNextGen  = cidMask + 1
	generations = cmdGen / cmdNextGen
)

// issued is the state of a command that goes to the SSD, from the one that it has before.
func issued(state uint32) uint32 {
	gen := (state + cmdNextGen) & cmdGen
	if gen == cmdGen {
		gen = 0
	}
	return state&^0xffff + cmdAttempt | gen | cmdInFlight
}

// wireCID is the identifier of a command's last attempt.
func wireCID(cid, state uint32) uint16 { return uint16(cid | state&cmdGen) }

// answers reports whether a command in this state is what a completion is of, whose identifier has
// the command's number. last is the completion's last dword.
func answers(state, last uint32) bool {
	return state&(cmdState|cmdGen) == last&cmdGen|cmdInFlight
}

// segment is one set's units that wait at a queue (setState describes what a unit is).
type segment struct {
	Next, End int64 // owner, after the submit kernel pushed it
}

// queueState is one queue pair.
type queueState struct {
	// Host.
	SQ         cuda.DevicePtr // 64 bytes × Entries
	CQ         cuda.DevicePtr // 16 bytes × Entries
	SQDoorbell cuda.DevicePtr
	CQDoorbell cuda.DevicePtr
	Commands   cuda.DevicePtr // command[NumCommands], by CID
	Lists      cuda.DevicePtr // PRP lists, ListBytes for each CID
	ListsIOVA  uint64
	Stage      cuda.DevicePtr // staging slots, StageBytes for each CID; 0: none
	StageIOVA  uint64
	Hist       cuda.DevicePtr // Histogram of command latency
	TimeoutNS  int64
	DataStart  uint64 // LBA
	QID        uint32
	NSID       uint32
	SSD        uint32
	Entries    uint32
	// NumCommands is min(SQ, CQ entries) − 1: so many CIDs bound both rings.
	NumCommands uint32
	ListBytes   uint32
	StageBytes  uint32
	PageBytes   uint32
	Retries     uint32
	ReadBytes   uint32 // that one command moves at most; StageBytes and ListBytes are made for it
	Blocks      uint32 // the same in LBAs
	_           uint32

	// Submission side.
	Own      uint32 // shared
	Tail     uint32 // owner
	PendHead uint32 // owner
	PendTail uint32 // shared: advanced by the submit kernel, of which one runs at a time
	Scan     uint32 // owner: bitmap word to look at next
	_        uint32
	// host: Commands as the host reaches them
	HostCommands cuda.DevicePtr
	PendRing     [maxSets]uint32  // set slots, oldest first
	Pend         [maxSets]segment // of the set in the same place of PendRing

	// Between the sides.
	// shared: set bits are free CIDs; taken with acquire, given back with release
	Free   [bitmapWords]uint32
	Retry  [bitmapWords]uint32 // shared: CIDs to be issued again
	Frozen uint32              // shared
	Reap   uint32              // shared: 1 while a warp of read_sync reaps the completion queue

	// Completion side.
	Head  uint32 // completer
	Phase uint32 // completer
	// completer: when the commands' deadlines must be looked at; 0: not armed. frozenTimeout: when
	// one was past
	ScanAt int64

	// Counters. Each has one writer (owner or completer); the host reads them.
	Issued     uint64 // owner: commands, retries included
	Direct     uint64 // owner: commands without a copy, retries not included
	Staged     uint64 // owner: commands with one (Dst is not 0), retries not included
	Retried    uint64 // owner
	SQRings    uint64 // owner
	Pended     uint64 // owner
	BlocksRead uint64 // owner: LBAs of the commands, retries included
	Coalesced  uint64 // owner: rows of commands with more than one row, retries not included
	Completed  uint64 // completer
	Errors     uint64 // completer
	Foreign    uint64 // completer
	CQRings    uint64 // completer
	Dropped    uint64 // host: commands in flight when their queue pair was deleted
}

// command is one CID of a queue. A free one keeps its generation.
type command struct {
	Set        uint16
	NLB        uint16 // number of LBAs less one, as in CDW12
	Index      uint32 // the set's unit
	Place      uint64 // LBA, and above placeBits the byte of the (first) row in its LBAs
	PRP1, PRP2 uint64
	Dst        cuda.DevicePtr // where completion copies the (first) row to; 0: all is already there
	Start      int64          // ns, first attempt
	Deadline   int64          // ns, shared
	_          uint32
	State      uint32 // shared
}

// placeBits is the width of an LBA in command.Place; no SSD has as many (checkSSDs).
const placeBits = 48

func placed(lba uint64, offset uint32) uint64 { return lba | uint64(offset)<<placeBits }

func (c *command) lba() uint64 { return c.Place & (1<<placeBits - 1) }

// failRecord describes one failed row.
type failRecord struct {
	Index  uint32 // in the set's Rows
	Kind   uint16
	Status uint16
	QID    uint16
	CID    uint16 // as the SSD was told
	Tries  uint32
	LBA    uint64 // the command's; failPos: the position
	SSD    uint32
	Blocks uint32 // LBAs of the command; 0: there was none
	Row    int64  // since the host cannot read Rows on a GPU; rowUnknown: not known
}

// Kinds of failRecord.
const (
	failStatus  = 1 // the completion's Status
	failTimeout = 2
	failRow     = 3 // the row number is not on this SSD or not in the layout
	failPos     = 4 // the destination is outside the buffer
	failQueue   = 5 // the queue pair is lost
)

// setState is one read set in flight. Its queues count, share and wait for units, and a
// unit is what one command reads:
//
//	plain      unit u is the row at index u of Rows and Pos.
//	split      (PartBlocks is not 0) a row takes Parts commands: unit u is part u mod Parts of the
//	           row at index u div Parts. Part j begins j × PartBlocks LBAs into the row and has
//	           PartBlocks LBAs, the last one what is left.
//	coalesced  (Order is not 0) unit u is a run, the rows at the indices Order[Runs[u]] to
//	           Order[Runs[u+1]-1], whose LBAs are equal or close (kernel coalesce).
type setState struct {
	// Host.
	Rows      cuda.DevicePtr // int64[n]
	Pos       cuda.DevicePtr // uint32[n]
	Offsets   cuda.DevicePtr // int64[SSDs+1]
	Dst       cuda.DevicePtr // DstOffset is added
	DstLimit  int64          // bytes from Dst to the end of the buffer
	DstStride int64
	DstIOVA   cuda.DevicePtr // uint64[SSDs]: Dst as each SSD sees it; not used when Direct is 0
	Remaining cuda.DevicePtr // uint32[queues], shared: units not yet done
	// uint32[queues], shared: units of each queue's share that read_sync has begun
	Taken  cuda.DevicePtr
	Layout Layout
	// Units are the first unit of each SSD's bucket and the one after its last. Plain: Offsets[s],
	// Offsets[s+1]; split: both × Parts; coalesced: Offsets[s]+s and as many more as there are
	// runs.
	Units cuda.DevicePtr // int64[2×SSDs]
	// uint32[Offsets[SSDs]]: indices into Rows, each bucket in order of its slots; 0: not coalesced
	Order cuda.DevicePtr
	// uint32[Offsets[SSDs]+SSDs]: each run's first place in Order, and after a bucket's last run
	// Offsets[s+1]
	Runs cuda.DevicePtr
	// uint32[Offsets[SSDs]], shared: split: not 0 when the row has failed, so that it counts once;
	// else 0
	Marks cuda.DevicePtr
	Parts uint32 // commands of a row; 1 unless split
	// PartBlocks is 0 unless the set is split.
	PartBlocks uint32
	Direct     uint32
	Rotate     uint32    // queue that takes the first share: small sets use all queues in turn
	_          [2]uint32 // kernels load 16 bytes at a time
	// Results, shared.
	NumFails uint32 // rows
	Retries  uint32
	Issued   uint64 // commands, retries not included
	Blocks   uint64 // LBAs of the commands, retries included
	StartNS  int64  // begin of the submit kernel's first block
	SubmitNS int64  // end of its last
	DoneNS   int64  // end of the complete kernel's last block
	Fails    [maxFails]failRecord
}

// submitParams is the parameter block of kernel "submit".
type submitParams struct {
	Queues       cuda.DevicePtr // queueState[NumQueues], by SSD
	Sets         cuda.DevicePtr // setState[maxSets]
	Engine       uint64         // handle of the host side: doorbell kicks and waits
	NumQueues    uint32
	QueuesPerSSD uint32
	Set          uint32
	_            uint32
}

// completeParams is the parameter block of kernel "complete".
type completeParams struct {
	Queues    cuda.DevicePtr
	Sets      cuda.DevicePtr
	Engine    uint64
	NumQueues uint32
	Set       uint32 // return when this set's rows are done
	// LimitNS ends the launch after a whole pass over the queues that finds so much time gone, done
	// or not; the host then launches again. 0: one pass.
	LimitNS int64
}

// syncParams is the parameter block of kernel "read_sync".
type syncParams struct {
	Queues       cuda.DevicePtr
	Sets         cuda.DevicePtr
	Engine       uint64
	NumQueues    uint32
	QueuesPerSSD uint32
	Set          uint32
	_            uint32
	LimitNS      int64 // no row is begun after so long
}

// coalesceParams is the parameter block of kernel "coalesce". The keys and indices are scratch of
// Offsets[SSDs] entries; the set's Order is the index array that the last pass writes: IdxA when
// Passes is even, else IdxB.
type coalesceParams struct {
	Sets         cuda.DevicePtr
	KeysA, KeysB cuda.DevicePtr // uint64[Offsets[SSDs]]
	IdxA, IdxB   cuda.DevicePtr // uint32[Offsets[SSDs]]
	Set          uint32
	QueuesPerSSD uint32
	// LBAs: no command crosses a multiple of it, counted from DataStart; a multiple of LBAsPerRow
	Window uint32
	Passes uint32 // of 8 bits each, which hold every slot number of the layout; at least 1
	Reach  uint32 // LBAs from one row of a command to the next, at most
	_      uint32
}

// Layouts that the CUDA kernels share; each line is the constant 0 or does not compile.
const (
	queueStateBytes = 1200
	setStateBytes   = 208 + maxFails*40
	_               = -(unsafe.Sizeof(queueState{}) ^ queueStateBytes)
	_               = -(unsafe.Sizeof(setState{}) ^ setStateBytes)
	_               = -(unsafe.Sizeof(command{}) ^ 64)
	_               = -(unsafe.Sizeof(failRecord{}) ^ 40)
	_               = -(unsafe.Sizeof(submitParams{}) ^ 40)
	_               = -(unsafe.Sizeof(completeParams{}) ^ 40)
	_               = -(unsafe.Sizeof(syncParams{}) ^ 48)
	_               = -(unsafe.Sizeof(coalesceParams{}) ^ 64)
	_               = -(unsafe.Offsetof(queueState{}.Own) ^ 144)
	_               = -(unsafe.Offsetof(command{}.State) ^ 60)
	_               = -(unsafe.Offsetof(command{}.NLB) ^ 2)
	_               = -(unsafe.Offsetof(queueState{}.BlocksRead) ^ 1144)
	_               = -(unsafe.Offsetof(failRecord{}.Blocks) ^ 28)
	_               = -(unsafe.Offsetof(setState{}.Units) ^ 104)
	_               = -(unsafe.Offsetof(setState{}.Parts) ^ 136)
	_               = -(unsafe.Offsetof(setState{}.Blocks) ^ 176)
)

// at views device memory as a T. The host device's memory is not on Go's heap.
func at[T any](p cuda.DevicePtr, i int) *T {
	var z T
	return (*T)(unsafe.Add(pointer(p), uintptr(i)*unsafe.Sizeof(z)))
}

// pointer is the host's view of device memory outside Go's heap.
func pointer(p cuda.DevicePtr) unsafe.Pointer {
	return *(*unsafe.Pointer)(unsafe.Pointer(&p))
}

func addr(b []byte) cuda.DevicePtr {
	return cuda.DevicePtr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// take acquires the submission side. False: the holder will see the caller's work.
func (q *queueState) take() bool {
	for {
		switch atomic.LoadUint32(&q.Own) {
		case ownFree:
			if atomic.CompareAndSwapUint32(&q.Own, ownFree, ownHeld) {
				return true
			}
		case ownDirty:
			return false
		default:
			if atomic.CompareAndSwapUint32(&q.Own, ownHeld, ownDirty) {
				return false
			}
		}
	}
}

// release gives the submission side back. False: somebody left work meanwhile; look again.
func (q *queueState) release() bool {
	if atomic.CompareAndSwapUint32(&q.Own, ownHeld, ownFree) {
		return true
	}
	atomic.StoreUint32(&q.Own, ownHeld)
	return false
}

// inFlight is the number of commands that the SSD has and whose completion was not seen.
func (q *queueState) inFlight() uint64 {
	return atomic.LoadUint64(&q.Issued) - atomic.LoadUint64(&q.Completed) -
		atomic.LoadUint64(&q.Dropped)
}

// share is the part of a bucket of n units that queue q of perSSD takes. Parts are whole warps, so
// that small sets ring few doorbells; rotate spreads them over the queues from set to set.
func share(n int64, q, perSSD, rotate uint32) (lo, hi int64) {
	per := (n + int64(perSSD) - 1) / int64(perSSD)
	per = (per + warp - 1) / warp * warp
	j := int64((q + perSSD - rotate%perSSD) % perSSD)
	return min(j*per, n), min((j+1)*per, n)
}

// shareOf is the share of queue i of perSSD in an SSD's units: units from+lo to from+hi.
func shareOf(set *setState, ssd, i, perSSD uint32) (from, lo, hi int64) {
	from = *at[int64](set.Units, int(2*ssd))
	lo, hi = share(*at[int64](set.Units, int(2*ssd)+1)-from, i, perSSD, set.Rotate)
	return from, lo, hi
}

// count adds to a counter that has one writer, for readers on the host.
func count(c *uint64, n uint64) {
	if n != 0 {
		atomic.StoreUint64(c, *c+n)
	}
}
