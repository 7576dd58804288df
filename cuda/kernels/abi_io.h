// The memory that the I/O kernels and the host share: the structs of gpuio/abi.go, which has the
// owner of each field. Same names, same order, same bytes; the Go structs win, and
// abi_test.go compares them. Addresses are u64.
#pragma once

#include "types.h"

constexpr u32 maxSets = 32;
constexpr u32 maxCommands = 1024;
constexpr u32 bitmapWords = maxCommands / 32;
constexpr u32 maxFails = 16;
constexpr u32 ringEvery = 4 * 32;
constexpr u32 maxSweeps = 4;

constexpr u32 ownFree = 0, ownHeld = 1, ownDirty = 2;
constexpr u32 frozenNo = 0, frozenTimeout = 1, frozenForeign = 2, frozenDead = 3, frozenClosing = 4, frozenUnsafe = 5;
constexpr u32 cmdFree = 0, cmdInFlight = 1, cmdRetry = 2, cmdDone = 3;
constexpr u32 cmdState = 0xff, cmdAborted = 1 << 8, cmdAttempt = 1 << 16;
constexpr u32 placeBits = 48;
constexpr u32 cidMask = maxCommands - 1, cmdGen = 0xffff & ~cidMask, cmdNextGen = cidMask + 1;
constexpr u16 failStatus = 1, failTimeout = 2, failRow = 3, failPos = 4, failQueue = 5;
constexpr u32 histSubBits = 4, histMinBits = 8, histMaxBits = 36;
constexpr u32 histBuckets = (histMaxBits - histMinBits) << histSubBits;

// go: gpuio.Layout
struct Layout {
	i64 Rows;
	i32 RowBytes;
	i32 SSDs;
	i32 LBABytes;
	i32 RowsPerLBA;
	i32 LBAsPerRow;
	i32 _;
};
static_assert(sizeof(Layout) == 32, "gpuio.Layout");

// go: gpuio.segment
struct Segment {
	i64 Next, End;
};
static_assert(sizeof(Segment) == 16, "gpuio.segment");

// go: gpuio.queueState
struct QueueState {
	u64 SQ;
	u64 CQ;
	u64 SQDoorbell;
	u64 CQDoorbell;
	u64 Commands;
	u64 Lists;
	u64 ListsIOVA;
	u64 Stage;
	u64 StageIOVA;
	u64 Hist;
	i64 TimeoutNS;
	u64 DataStart;
	u32 QID;
	u32 NSID;
	u32 SSD;
	u32 Entries;
	u32 NumCommands;
	u32 ListBytes;
	u32 StageBytes;
	u32 PageBytes;
	u32 Retries;
	u32 ReadBytes;
	u32 Blocks;
	u32 _;

	u32 Own;
	u32 Tail;
	u32 PendHead;
	u32 PendTail;
	u32 Scan;
	u32 _2;
	u64 HostCommands;
	u32 PendRing[maxSets];
	Segment Pend[maxSets];

	u32 Free[bitmapWords];
	u32 Retry[bitmapWords];
	u32 Frozen;
	u32 Reap;

	u32 Head;
	u32 Phase;
	i64 ScanAt;

	u64 Issued;
	u64 Direct;
	u64 Staged;
	u64 Retried;
	u64 SQRings;
	u64 Pended;
	u64 BlocksRead;
	u64 Coalesced;
	u64 Completed;
	u64 Errors;
	u64 Foreign;
	u64 CQRings;
	u64 Dropped;
};
static_assert(sizeof(QueueState) == 1200, "gpuio.queueState");
static_assert(__builtin_offsetof(QueueState, Own) == 144, "gpuio.queueState.Own");
static_assert(__builtin_offsetof(QueueState, Frozen) == 1072, "gpuio.queueState.Frozen");
static_assert(__builtin_offsetof(QueueState, Issued) == 1096, "gpuio.queueState.Issued");

// go: gpuio.command
struct Command {
	u16 Set;
	u16 NLB;
	u32 Index;
	u64 Place;
	u64 PRP1, PRP2;
	u64 Dst;
	i64 Start;
	i64 Deadline;
	u32 _;
	u32 State;
};
static_assert(sizeof(Command) == 64 && __builtin_offsetof(Command, State) == 60, "gpuio.command");

// go: gpuio.failRecord
struct FailRecord {
	u32 Index;
	u16 Kind;
	u16 Status;
	u16 QID;
	u16 CID;
	u32 Tries;
	u64 LBA;
	u32 SSD;
	u32 Blocks;
	i64 Row;
};
static_assert(sizeof(FailRecord) == 40, "gpuio.failRecord");

// go: gpuio.setState
struct SetState {
	u64 Rows;
	u64 Pos;
	u64 Offsets;
	u64 Dst;
	i64 DstLimit;
	i64 DstStride;
	u64 DstIOVA;
	u64 Remaining;
	u64 Taken;
	::Layout Layout;
	u64 Units;
	u64 Order;
	u64 Runs;
	u64 Marks;
	u32 Parts;
	u32 PartBlocks;
	u32 Direct;
	u32 Rotate;
	u32 _[2];
	u32 NumFails;
	u32 Retries;
	u64 Issued;
	u64 Blocks;
	i64 StartNS;
	i64 SubmitNS;
	i64 DoneNS;
	FailRecord Fails[maxFails];
};
static_assert(sizeof(SetState) == 208 + maxFails * 40, "gpuio.setState");
static_assert(__builtin_offsetof(SetState, Layout) == 72, "gpuio.setState.Layout");
static_assert(__builtin_offsetof(SetState, Units) == 104, "gpuio.setState.Units");
static_assert(__builtin_offsetof(SetState, Blocks) == 176, "gpuio.setState.Blocks");

// go: gpuio.Histogram
struct Histogram {
	u64 Counts[histBuckets];
};
static_assert(sizeof(Histogram) == histBuckets * 8, "gpuio.Histogram");

// go: gpuio.submitParams
struct SubmitParams {
	u64 Queues;
	u64 Sets;
	u64 Engine;
	u32 NumQueues;
	u32 QueuesPerSSD;
	u32 Set;
	u32 _;
};
static_assert(sizeof(SubmitParams) == 40, "gpuio.submitParams");

// go: gpuio.completeParams
struct CompleteParams {
	u64 Queues;
	u64 Sets;
	u64 Engine;
	u32 NumQueues;
	u32 Set;
	i64 LimitNS;
};
static_assert(sizeof(CompleteParams) == 40, "gpuio.completeParams");

// go: gpuio.syncParams
struct SyncParams {
	u64 Queues;
	u64 Sets;
	u64 Engine;
	u32 NumQueues;
	u32 QueuesPerSSD;
	u32 Set;
	u32 _;
	i64 LimitNS;
};
static_assert(sizeof(SyncParams) == 48, "gpuio.syncParams");

// go: gpuio.coalesceParams
struct CoalesceParams {
	u64 Sets;
	u64 KeysA, KeysB;
	u64 IdxA, IdxB;
	u32 Set;
	u32 QueuesPerSSD;
	u32 Window;
	u32 Passes;
	u32 Reach;
	u32 _;
};
static_assert(sizeof(CoalesceParams) == 64, "gpuio.coalesceParams");

// NVMe base specification 2.0, figures 88 and 90; not shared with Go as structs, but the same bytes
// as nvme.Command and nvme.Completion. Words as the kernels store and load them.
constexpr u32 commandBytes = 64, completionBytes = 16;
// go: nvme.OpRead
constexpr u32 nvmeRead = 0x02;
