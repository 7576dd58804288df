// The explorer: runs the coalesce, submit, complete and read_sync kernels against model SSDs, one random
// configuration and schedule for each seed.
//
//	iotest [--threads] [--seeds A-B | --seed N] [--trace] [--set key=value,…] [--seconds N]
//
// Exit status 0: all seeds are right; 1: one is not, which is described; 2: wrong usage.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>

#include "host.h"

using namespace iotest;

static int usage(const char *what) {
	fprintf(stderr, "iotest: %s\nusage: iotest [--threads] [--seeds A-B | --seed N] [--trace] [--set key=value,...] [--seconds N]\n", what);
	return 2;
}

int main(int argc, char **argv) {
	bool threads = false;
	u64 from = 1, to = 10;
	long seconds = 0;
	std::vector<std::pair<std::string, u64>> sets;
	for (int i = 1; i < argc; i++) {
		std::string a = argv[i];
		if (a == "--threads") {
			threads = true;
			continue;
		}
		if (a == "--trace") {
			trace_on = true;
			continue;
		}
		if (i + 1 == argc) return usage(("what is " + a + "?").c_str());
		char *v = argv[++i];
		if (a == "--seed") {
			from = to = strtoull(v, nullptr, 10);
		} else if (a == "--seeds") {
			char *end;
			from = strtoull(v, &end, 10);
			if (*end != '-') return usage("--seeds takes A-B");
			to = strtoull(end + 1, nullptr, 10);
		} else if (a == "--seconds") {
			seconds = strtol(v, nullptr, 10);
		} else if (a == "--set") {
			for (char *p = strtok(v, ","); p != nullptr; p = strtok(nullptr, ",")) {
				char *eq = strchr(p, '=');
				if (eq == nullptr) return usage("--set takes key=value");
				*eq = 0;
				Config c;
				if (!set_field(c, p, 0)) return usage((std::string("there is no field ") + p).c_str());
				sets.push_back({p, strtoull(eq + 1, nullptr, 10)});
			}
		} else {
			return usage(("what is " + a + "?").c_str());
		}
	}
	time_t begin = time(nullptr);
	u64 runs = 0, rows = 0, failed = 0, commands = 0, recovered = 0, recreated = 0, aborts = 0, limited = 0, lost = 0, late = 0, full = 0, early = 0, foreign = 0, dead = 0, orphans = 0, shared = 0, runs_read = 0, parts = 0, healed = 0, echoes = 0, schedules = 0;
	for (u64 seed = from; seed <= to; seed++) {
		if (seconds != 0 && time(nullptr) - begin >= seconds) break;
		Config c = random_config(seed, threads);
		for (auto &s : sets) set_field(c, s.first, s.second);
		alarm(threads ? 300 : 120); // a wait that has no deadline after all ends here
		Run r(c);
		r.go();
		alarm(0);
		runs++;
		schedules += r.schedule;
		rows += r.host->rows_read;
		failed += r.host->rows_failed;
		recovered += r.host->recovered;
		recreated += r.host->recreated;
		aborts += r.host->aborts;
		limited += r.host->limited;
		orphans += r.host->orphans;
		shared += r.host->rows_shared;
		runs_read += r.host->runs_read;
		parts += r.host->parts_read;
		healed += r.host->healed;
		for (auto &s : r.ssds) {
			lost += s->faults_lost;
			late += s->faults_late;
			full += s->full_waits;
			echoes += s->echoes_late;
			for (auto &q : s->queues) {
				commands += q.fetched;
				early += q.reused_early;
				foreign += q.injected_foreign;
				dead += q.pair() == nullptr;
			}
		}
		if (from == to) printf("%s\n", describe(c).c_str());
	}
	printf("ok: %llu seeds, %llu rows read (%llu share commands, %llu runs, %llu parts of rows), %llu failed as injected, %llu commands, %llu lost, %llu late, %llu foreign (%llu of a CID in use again); %llu recoveries, %llu aborts, %llu queue pairs replaced, %llu controllers reset, %llu queues given up, %llu launches cut short, %llu waits for a full CQ, %llu early retries, %llu orphans; schedules %016llx\n", runs,
	       rows, shared, runs_read, parts, failed, commands, lost, late, foreign, echoes, recovered, aborts, recreated, healed, dead, limited, full, early, orphans, schedules);
	return 0;
}
