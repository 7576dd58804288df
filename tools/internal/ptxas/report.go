// Package ptxas reads what NVIDIA's PTX compilers say of the kernels that they compile: ptxas -v,
// and the information log of the compiler in the driver.
package ptxas

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Usage holds the resources of one kernel on one architecture.
type Usage struct {
	Kernel, Arch                              string
	Registers, SpillStores, SpillLoads, Stack int
	Shared, Barriers                          int
}

var (
	compiling = regexp.MustCompile(`Compiling entry function '([^']+)' for '([^']+)'`)
	stackLine = regexp.MustCompile(
		`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers`)
	sharedUse = regexp.MustCompile(`(\d+) bytes smem`)
	barrier   = regexp.MustCompile(`used (\d+) barriers`)
)

// ParseReport reads a report. A warning in it is an error.
func ParseReport(text string) ([]Usage, error) {
	var out []Usage
	number := func(re *regexp.Regexp, line string, group int) int {
		m := re.FindStringSubmatch(line)
		if m == nil {
			return 0
		}
		n, _ := strconv.Atoi(m[group])
		return n
	}
	complete := true
	for line := range strings.SplitSeq(text, "\n") {
		if strings.Contains(strings.ToLower(line), "warning") {
			return nil, fmt.Errorf("%s", strings.TrimSpace(line))
		}
		if m := compiling.FindStringSubmatch(line); m != nil {
			if !complete {
				return nil, fmt.Errorf("no registers reported for %s", out[len(out)-1].Kernel)
			}
			out = append(out, Usage{Kernel: m[1], Arch: m[2]})
			complete = false
			continue
		}
		if len(out) == 0 || complete {
			continue
		}
		u := &out[len(out)-1]
		if stackLine.MatchString(line) {
			u.Stack, u.SpillStores, u.SpillLoads = number(stackLine, line, 1),
				number(stackLine, line, 2), number(stackLine, line, 3)
		}
		if usedLine.MatchString(line) {
			u.Registers, u.Shared, u.Barriers = number(usedLine, line, 1),
				number(sharedUse, line, 1), number(barrier, line, 1)
			complete = true
		}
	}
	if len(out) == 0 || !complete {
		return nil, fmt.Errorf("the report names no kernel, or none completely:\n%s", text)
	}
	return out, nil
}
