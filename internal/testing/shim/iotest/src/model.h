// The device side of a proxy controller (nvme/proxy), in instrumented C++: one agent is one SSD.
// It behaves as the specification allows the worst SSD to behave, and checks what the host does.
#pragma once

#include "rig.h"

namespace iotest {

// Region is memory that an SSD may reach. live is cleared while nobody may: a transfer then is
// what an IOMMU would stop.
struct Region {
	const char *what;
	u64 iova;
	u8 *mem;
	u64 bytes;
	u32 live;
	// Where rows are: first + k × stride, k < slots; stride 0: not checked.
	u64 first, stride, slots;
};

// Pair is a queue pair from its creation to its deletion. Its memory stays until the run's end, so
// that stores to it after the deletion are seen.
struct Pair {
	u32 qid, entries, g;
	u8 *sq, *cq;
	u32 *sqdb, *cqdb;
	u32 head = 0, tail = 0; // of the SQ: fetched, and as the doorbell said
	u32 ctail = 0, chead = 0, phase = 1;
	u32 last_sqdb = 0, last_cqdb = 0; // when it was deleted
	bool dead = false;
	struct Entry {
		u32 cid, status;
		u64 use; // of the CID; 0: injected
	};
	std::deque<Entry> posted; // and not acknowledged
};

// The generation of an identifier, which each command under a CID must advance (gpuio/abi.go).
constexpr u32 generations = 63;
constexpr u32 generation(u32 wire) { return wire / cmdNextGen; }
constexpr u32 older(u32 wire, u32 by) { return (wire & cidMask) | (generation(wire) + generations - by) % generations * cmdNextGen; }

// Cid holds the controller's knowledge of one CID of a queue. It lives longer than the queue pair,
// since the host tries a command again under its CID.
struct Cid {
	enum State : u8 { idle, flight, posted, again } state = idle;
	u32 attempts = 0, status = 0;
	u64 use = 0; // rises with each command
	u32 wire = 0; // the identifier of the last one: the CID and its generation
	u64 lba = 0, prp1 = 0, prp2 = 0;
	u32 blocks = 0;
};

struct Injected { // an error status that was posted
	u32 qid, wire, status;
	u64 lba;
};

class Ssd {
public:
	Ssd(Run &, u32 index);
	void agent(); // until the run stops

	// Admin queue: the host's agent calls these and waits. The last three are no NVMe commands: the host
	// tells that it issues a command again in place of its last attempt, which was completed (orphan) or
	// was not and is gone (uncharge), or that the command has no attempt left (forget).
	enum Op : u32 { none, create, destroy, abort, reset, orphan, uncharge, forget };
	struct Answer {
		bool ok;
		u32 value; // abort: 1 when not aborted
	};
	bool admin(Op, u32 g, u32 cid, Answer *);

	u64 iova(const void *p) const { return (u64)(uintptr_t)p - bias; }
	Region &region(u32 i) { return *regions[i]; }
	void add_region(const char *what, u8 *mem, u64 bytes, bool live);
	u64 lbas() const { return medium.size() / run.cfg.lba; }

	Run &run;
	const u32 index;
	u64 bias, data_start;
	u32 nsid;
	std::vector<u8> medium; // the rows' extent
	struct Queue {
		std::vector<std::unique_ptr<Pair>> pairs; // the last one lives, unless dead
		std::vector<Cid> cids;
		u32 stage_bytes = 0, list_bytes = 0;
		u64 stage_iova = 0, list_iova = 0;
		u64 fetched = 0, blocks = 0, acked_ok = 0, acked_err = 0, terminal = 0, injected_foreign = 0, reused_early = 0;
		Pair *pair() { return pairs.empty() || pairs.back()->dead ? nullptr : pairs.back().get(); }
	};
	std::vector<Queue> queues;
	std::vector<Injected> injected;
	u64 faults_lost = 0, faults_late = 0, full_waits = 0, echoes_late = 0;

private:
	struct Seg {
		u8 *mem;
		u64 bytes;
	};
	// Fetched is a command that the SSD has.
	struct Fetched {
		u32 q, cid;
		u64 use;
		i64 due;
		u32 status = 0; // to post
		bool lost = false, dma = true, garbage = false, moved = false, duplicate = false, never = false;
	};
	// Echo is a completion that is to come a second time, when its CID is in use again or at a time.
	struct Echo {
		u32 q, wire, status;
		i64 due;
	};
	bool doorbells(u32 q);
	bool fetch(u32 q);
	void take(u32 q, bool execute);
	void check(u32 q, const u32 *sqe, u32 slot);
	void check_blocks(u32 q, u32 cid, u64 lba, u32 blocks);
	bool finish();
	bool echo();
	bool reused(const Echo &) const;
	void complete(size_t i);
	void transfer(const Fetched &, bool prefix_only);
	std::vector<Seg> translate(u32 q, const Cid &);
	Seg resolve(u32 q, u64 iova, u64 bytes, const char *what);
	bool room(u32 q);
	void post(u32 q, u32 wire, u32 status, u64 use);
	void answer();
	void drop(u32 q);
	bool fault(u32 permille);

	std::vector<std::unique_ptr<Region>> regions;
	std::vector<Fetched> flight;
	std::vector<Echo> echoes;
	Rng rng;
	u32 faults = 0;
	i64 stalled = 0;
	u32 next_qid = 1;
	// The admin mailbox: asked and answered are counted up by the two sides.
	u32 asked = 0, answered = 0;
	Op op = none;
	u32 op_g = 0, op_cid = 0;
	Answer result = {};
};

// Status field of a completion without its phase tag: SC 7:0, SCT 10:8, DNR 14.
constexpr u32 status_dnr = 1 << 14;
constexpr u32 status_aborted = 0x07;
constexpr u32 status_of(u32 sct, u32 sc) { return sct << 8 | sc; }

} // namespace iotest
