package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// badLBAs are blocks of disk 2 that blkdebug fails: reads of the first always, of the second once.
const badLBAs = "200,300"

const badDisk = `[inject-error]
event = "read_aio"
iotype = "read"
errno = "5"
sector = "200"
once = "off"

[inject-error]
event = "read_aio"
iotype = "read"
errno = "5"
sector = "300"
once = "on"
`

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "faults",
		Limit: 5 * time.Minute,
		Config: Config{
			Tests: []string{"./gpuio"},
			Disks: []Disk{{MB: 16}, {MB: 16}, {MB: 16, BlkDebug: badDisk}, {MB: 16, HotPlug: true}, {MB: 16, HotPlug: true}},
		},
		Run: runFaults,
	}, Scenario{
		Name:   "faulttable",
		Long:   true,
		Limit:  5 * time.Minute,
		Config: Config{Tests: []string{"./gpuio"}, Disks: []Disk{{MB: 16}, {MB: 16}}},
		Run: func(t *T) {
			a := takeDisks(t)
			t.OK("root", "mkdir -p /dev/shm")
			out := testWithHost(t, "./gpuio", "^TestVFIOFaultTable$", "HELIOS_VFIO_TEST="+strings.Join(a, ","))
			t.Notef("%d faults of the catalogue, injected between the stack and the controller, came out as documented", strings.Count(out, "    --- PASS: TestVFIOFaultTable/"))
			checkExtents(t, out, a)
		},
	})
}

// runFaults has the I/O stack read from SSDs that fail in all ways that QEMU's can be made to.
func runFaults(t *T) {
	a := takeDisks(t)
	t.OK("root", "mkdir -p /dev/shm")
	var said strings.Builder
	test := func(pattern string, ssds []string, env ...string) {
		began := time.Now()
		out := testWithHost(t, "./gpuio", "^("+pattern+")$", append(env, "HELIOS_VFIO_TEST="+strings.Join(ssds, ","))...)
		said.WriteString(out)
		t.Logf("%s", out)
		t.Notef("%s: %d passed, %.1f s", pattern, strings.Count(out, "--- PASS"), time.Since(began).Seconds())
		if strings.Contains(out, "--- SKIP") {
			t.Errorf("%s: a test was left out:\n%s", pattern, out)
		}
	}
	test("TestVFIOResets|TestVFIOFatalWords|TestVFIOPastTheEnd", a[:2])
	test("TestVFIOLostCompletions", a[:2])
	test("TestVFIOStuck", a[:2], "HELIOS_THROTTLE_ID=d0")
	test("TestVFIOMediaErrors", []string{a[2], a[1]}, "HELIOS_BAD_LBAS="+badLBAs)
	test("TestVFIOUnplug", []string{a[0], a[3]}, "HELIOS_HOTPLUG_ID=nvme3")
	port := strings.TrimSpace(t.OK("root", "basename $(dirname $(readlink -f /sys/bus/pci/devices/"+a[4]+"))"))
	test("TestVFIOSurpriseRemoval", []string{a[1], a[4]}, "HELIOS_HOTPLUG_ID=nvme4", "HELIOS_HOTPLUG_PORT="+port)

	checkExtents(t, said.String(), a)
}

// checkExtents compares the images: what is on each disk is what a line EXTENT said last, and there is
// nothing else.
func checkExtents(t *T, said string, addrs []string) {
	for i, addr := range addrs {
		var size int
		var sum string
		for _, m := range extent.FindAllStringSubmatch(said, -1) {
			if m[1] == addr {
				fmt.Sscan(m[2], &size)
				sum = m[3]
			}
		}
		if size == 0 {
			t.Errorf("nothing was written to disk %d (%s)", i, addr)
			continue
		}
		checkImage(t, i, size, sum)
	}
}

var extent = regexp.MustCompile(`EXTENT (\S+) (\d+) ([0-9a-f]{64})`)

// checkImage compares the first bytes of a disk that was all zeroes with a SHA-256, and the rest with
// zeroes.
func checkImage(t *T, i, size int, sum string) {
	b, err := os.ReadFile(t.DiskPath(i))
	if err != nil {
		t.Fatalf("%v", err)
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(b[:size])); got != sum {
		t.Errorf("disk %d: its first %d bytes are not what was written: sha256 %s, want %s", i, size, got, sum)
	}
	if n := bytes.Count(b[size:], []byte{0}); n != len(b)-size {
		t.Errorf("disk %d: %d bytes behind its extent of %d bytes changed", i, len(b)-size-n, size)
	}
}
