// The shim as a library in somebody else's process: a kernel that faults, and one that does not.
#include "params.h"
#include "shim.h"

extern "C" __attribute__((visibility("default"))) int selftest_fault(void) {
	u64 out[2] = {};
	TestParams p = {(u64)out, (u64)out, (u64)out, 0, 0};
	shim::Result bad = shim::run_grid(shim::find("e_null"), 1, 32, &p, hx_launch{0, 1}, {});
	shim::Result good = shim::run_grid(shim::find("t_nop"), 4, 64, &p, hx_launch{0, 2}, {});
	return !bad.ok && bad.error.find("memory fault at 0x10") != std::string::npos && good.ok;
}
