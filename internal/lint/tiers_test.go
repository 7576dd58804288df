package lint

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every tier is a target of the Makefile, and every target that tests is a tier or a step of
// .ci/run: else what it tests would run nowhere.
func TestTiersRun(t *testing.T) {
	text := func(name string) string {
		b, err := os.ReadFile("../../" + name)
		require.NoError(t, err)
		return string(b)
	}
	words := func(text, pattern string) (all []string) {
		for _, m := range regexp.MustCompile("(?m)"+pattern).FindAllStringSubmatch(text, -1) {
			all = append(all, m[1])
		}
		return all
	}
	makefile, ci := text("Makefile"), text(".ci/run")
	targets := words(makefile, `^([a-z][a-z-]*):`)
	tiers := words(text(".ci/nightly"), `^tier ([a-z-]+) `)
	if len(tiers) < 15 {
		t.Fatalf(".ci/nightly has the tiers %v", tiers)
	}
	for _, n := range tiers {
		if !slices.Contains(targets, n) {
			t.Errorf("the tier %s of .ci/nightly is no target of the Makefile", n)
		}
	}
	steps := words(ci, `\bmake ([a-z-]+)`)
	other := []string{"build", "install", "uninstall", "generate", "kernels", "kernels-check", "clean",
		"nightly", "bench-clocks", "hooks", "help", "doctor", "module", "release",
		"python-docs"}
	for _, n := range targets {
		if !slices.Contains(slices.Concat(tiers, steps, other), n) {
			t.Errorf("make %s is neither a tier of .ci/nightly nor a step of .ci/run", n)
		}
	}
	for _, n := range []string{"test-wide", "test-realdata", "race", "test-shim", "test-faults"} {
		rule := regexp.MustCompile(`(?m)^` + n + `:.*\n(?:.+\n)*`).FindString(makefile)
		if !strings.Contains(rule, "HELIOS_WIDE=1") {
			t.Errorf("make %s does not set HELIOS_WIDE", n)
		}
	}
}
