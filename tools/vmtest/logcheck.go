package main

import (
	"fmt"
	"regexp"
	"strings"
)

// badLog is found in no sound guest's kernel log. DMA faults matter most: QEMU's controllers
// complete a command whose DMA went to an unmapped address with success, and only the IOMMU's log
// tells.
var badLog = []struct {
	what string
	re   *regexp.Regexp
}{
	{"DMA fault", regexp.MustCompile(`DMAR: \[(DMA|INTR)`)},
	{"DMA fault", regexp.MustCompile(`(?i)DMAR:.*fault`)},
	{"DMA fault", regexp.MustCompile(`AMD-Vi: Event logged|IO_PAGE_FAULT`)},
	{"kernel bug", regexp.MustCompile(`\bBUG:|kernel BUG at`)},
	{"kernel oops", regexp.MustCompile(`\bOops\b`)},
	{"general protection fault", regexp.MustCompile(`general protection fault`)},
	{"kernel panic", regexp.MustCompile(`Kernel panic`)},
	{"hung task", regexp.MustCompile(`(?i)hung[_ ]task|blocked for more than \d+ seconds`)},
	{"log overrun", regexp.MustCompile(`vmtest: the kernel's log lost records`)},
}

// checkLog gives an error that quotes every line which must not be there.
func checkLog(log string) error {
	var bad []string
	for _, line := range strings.Split(log, "\n") {
		for _, b := range badLog {
			if b.re.MatchString(line) {
				bad = append(bad, b.what+": "+strings.TrimSpace(line))
				break
			}
		}
	}
	if len(bad) == 0 {
		return nil
	}
	if n := len(bad); n > 8 {
		bad = append(bad[:8], fmt.Sprintf("and %d more", n-8))
	}
	return fmt.Errorf("the guest's kernel log:\n  %s", strings.Join(bad, "\n  "))
}
