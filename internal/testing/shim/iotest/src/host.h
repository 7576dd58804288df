// The host's side of the kernels as gpuio has it for a driver device (async.go, units.go, recover.go, reset.go): sets
// are launched, queues that the kernels froze are recovered while no kernel runs, results are checked
// to the byte.
#pragma once

#include "model.h"

namespace iotest {

class Host {
public:
	explicit Host(Run &);
	~Host();
	void agent();    // drives all sets and stops the run
	void verdict();  // after all agents have ended: nothing leaked, all counters agree
	void dump(FILE *); // state, for a report
	bool done = false, closed = false;
	u64 rows_read = 0, rows_failed = 0, recovered = 0, recreated = 0, aborts = 0, limited = 0, orphans = 0, runs_read = 0, rows_shared = 0, parts_read = 0, healed = 0;

private:
	struct Buffer {
		u8 *base;       // with guards around
		u64 bytes;      // guards included
		u8 poison = 0;
		bool used = false;
		std::vector<u32> region; // by SSD
	};
	struct Set {
		u32 slot, n, buffer;
		std::vector<i64> rows;
		std::vector<u32> pos;
		std::vector<u8> bad; // 0, failRow or failPos
		std::vector<i64> offsets;
		std::vector<u32> idx[2], order, runs, marks; // what the kernels write: coalesce's indices, order and runs
		std::vector<i64> units;
		// The result that coalesce should find, and the begin of each row's run in it; of runs only.
		std::vector<u32> want_order, want_runs, run_of;
		std::vector<i64> want_units;
		bool runs_shared = false; // its units are runs
		u64 base, stride; // of the destination
		bool direct;
		Launch *last = nullptr;
		u32 nbad = 0;
		bool sick = false; // read_sync left rows of it that only recovery can bring to an end
	};
	QueueState &q(u32 g) { return queues[g]; }
	u32 nq() const { return (u32)queues.size(); }
	u32 *remaining(u32 slot) { return &rem[(size_t)slot * nq()]; }
	u32 *taken(u32 slot) { return &take[(size_t)slot * nq()]; }
	Ssd &ssd_of(u32 g) { return *run.ssds[g / run.cfg.queues]; }
	Launch *launch(Stream &, const char *kernel, u32 blocks, u32 warps, const void *params, size_t bytes, Launch *after);
	void create(u32 g);
	bool try_create(u32 g);
	void start_set();
	void cut(Set &);
	void check_runs(Set &);
	void launch_coalesce(Set &);
	void launch_complete(Set &);
	void launch_sync(Set &);
	bool calm();
	bool resume(Set &);
	void finish(size_t i);
	void check(Set &);
	void quiesce();
	void close();
	void recover(Set &);
	void recover_queue(u32 g);
	bool abort_late(u32 g);
	void recreate(u32 g, bool all);
	void reissue(u32 g, bool all);
	void read_again(u32 g);
	void again(u32 g, u32 cid, u32 state);
	u32 wire(u32 g, u32 cid);
	void heal(u32 s);
	void tell(u32 g, u32 cid, Ssd::Op);
	void fail_command(u32 g, u32 cid, u16 kind);
	void fail_queue(u32 g);
	void leftovers(Set &, u32 g);
	void record(SetState &, const FailRecord &);
	u32 fail_unit(u32 slot, i64 unit, FailRecord f);
	u64 lba_of(i64 row) const;
	template <typename F> void commands(u32 g, F fn);
	void share(i64 n, u32 g, u32 rotate, i64 *lo, i64 *hi);

	Run &run;
	Rng rng;
	Layout layout = {};
	u32 list_bytes = 0, stage_bytes = 0;
	std::vector<QueueState> queues;
	std::vector<SetState> states;
	std::vector<u32> rem, take;
	std::vector<i64> offsets;
	std::vector<u64> iovas;
	std::vector<u64> keys[2]; // of coalesce, one launch at a time
	std::vector<std::vector<Command>> cmds;
	std::vector<Histogram> hist;
	std::vector<u8 *> lists, stage; // by SSD
	std::vector<Buffer> buffers;
	std::vector<u8> dead; // by SSD
	std::vector<u32> resets;
	std::vector<std::unique_ptr<Set>> live;
	std::vector<std::unique_ptr<Launch>> launches;
	std::vector<u32> free_slots;
	std::vector<FailRecord> records;
	u64 started = 0, seen_fails = 0, bad_rows = 0, queue_fails = 0;
	u64 issued_sets = 0, retried_sets = 0, expected_issues = 0, blocks_sets = 0, expected_shared = 0;
	u64 failed_least = 0, failed_most = 0; // commands that failed for good, as the sets tell
	u8 next_poison = 0x11;
};

} // namespace iotest
