// Package wide splits the cases of the costly tests: "make test" runs each check on a few cases,
// and "make test-wide" (with test-shim and test-faults, which have their own) on all of them. Only
// tests use it.
package wide

import (
	"os"
	"testing"
)

// Env asks for all cases where it is set to anything.
const Env = "HELIOS_WIDE"

// Lean reports whether a test keeps to a few cases: where HELIOS_WIDE is not set, and under -short
// even where it is (make race).
func Lean() bool { return testing.Short() || os.Getenv(Env) == "" }

// Only skips a test that keeps no case of its own in "make test". The race detector has it.
func Only(t testing.TB) {
	t.Helper()
	if os.Getenv(Env) == "" {
		t.Skip("part of make test-wide, which sets " + Env)
	}
}
