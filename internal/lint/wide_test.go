package lint

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A package with wide tests is one that make test-wide runs, and .ci/run calls it: else a case that
// "make test" leaves out would run nowhere.
func TestWideTestsRun(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?m)^WIDE(?:_IO|_SHIM)? :=(.*)$`).FindAllStringSubmatch(
		string(makefile), -1)
	if len(list) != 3 {
		t.Fatalf(
			"Makefile has %d lists of packages with wide tests, not WIDE, WIDE_IO and WIDE_SHIM",
			len(list))
	}
	var listed []string
	for _, l := range list {
		listed = append(listed, strings.Fields(l[1])...)
	}
	var users []string
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			if i.Path.Value == `"helios/internal/wide"` && !slices.Contains(users, "./"+s.dir) {
				users = append(users, "./"+s.dir)
			}
		}
	}
	for _, u := range users {
		if !slices.Contains(listed, u) {
			t.Errorf(
				"%s has wide tests and is in no list of packages with wide tests (WIDE, WIDE_IO, WIDE_SHIM) of the Makefile",
				u)
		}
	}
	for _, l := range listed {
		if !slices.Contains(users, l) {
			t.Errorf("%s is in the Makefile's list of packages with wide tests and has none", l)
		}
	}
	ci, err := os.ReadFile("../../.ci/run")
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"test-wide", "test-shim", "test-faults", "race"} {
		if !regexp.MustCompile(`(?m)^step .*make ` + target + `$`).Match(ci) {
			t.Errorf(".ci/run does not call make %s", target)
		}
		rule := regexp.MustCompile(`(?m)^` + target + `:.*\n(?:.+\n)*`).Find(makefile)
		if !strings.Contains(string(rule), "HELIOS_WIDE=1") {
			t.Errorf("make %s does not set HELIOS_WIDE", target)
		}
	}
}
