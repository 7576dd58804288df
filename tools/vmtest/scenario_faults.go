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
	plain, plug := Disk{MB: 16}, Disk{MB: 16, HotPlug: true}
	scenarios = append(scenarios,
		faultScenario("faults", []Disk{plain, plain, {MB: 16, BlkDebug: badDisk}},
			func(f *faultTests) {
				f.run(
					"TestVFIOResets|TestVFIOFatalWords|TestVFIOPastTheEnd|TestVFIOLostCompletions",
					f.addrs[:2])
				f.run("TestVFIOMediaErrors", []string{f.addrs[2], f.addrs[1]}, "HELIOS_BAD_LBAS="+
					badLBAs)
			}),
		faultScenario("stuck", []Disk{plain, plain}, func(f *faultTests) {
			f.run("TestVFIOStuck", f.addrs, "HELIOS_THROTTLE_ID=d0")
		}),
		faultScenario("unplug", []Disk{plain, plug}, func(f *faultTests) {
			f.run("TestVFIOUnplug", f.addrs, "HELIOS_HOTPLUG_ID=nvme1")
		}),
		faultScenario("faulttable", []Disk{plain, plain}, func(f *faultTests) {
			f.run("TestVFIOFaultTable", f.addrs)
			f.Notef(
				"%d faults of the catalogue, injected between the stack and the controllers, came out as documented",
				strings.Count(f.said.String(), "\n    --- PASS: TestVFIOFaultTable/"))
		}),
		// The kernel resets a device that is not there any more for 76 s before the process ends.
		faultScenario("removal", []Disk{plain, plug}, func(f *faultTests) {
			port := strings.TrimSpace(f.OK("root",
				"basename $(dirname $(readlink -f /sys/bus/pci/devices/"+f.addrs[1]+"))"))
			f.run("TestVFIOSurpriseRemoval", f.addrs, "HELIOS_HOTPLUG_ID=nvme1",
				"HELIOS_HOTPLUG_PORT="+port)
		}),
	)
	for i := range 2 {
		scenarios[len(scenarios)-1-i].Long = true
	}
}

// faultTests are tests of gpuio in a guest, and what they said.
type faultTests struct {
	*T
	addrs []string
	said  strings.Builder
}

// faultScenario runs tests of the I/O stack over SSDs that fail, and compares the images in the
// end.
func faultScenario(name string, disks []Disk, run func(f *faultTests)) Scenario {
	return Scenario{Name: name, Limit: 5 * time.Minute, Config: Config{Tests: []string{"./gpuio"},
		Disks: disks},
		Run: func(t *T) {
			f := &faultTests{T: t, addrs: takeDisks(t)}
			t.OK("root", "mkdir -p /dev/shm")
			run(f)
			checkExtents(t, f.said.String(), f.addrs)
		}}
}

// run runs tests on these controllers, of which none may be left out.
func (f *faultTests) run(pattern string, ssds []string, env ...string) {
	began := time.Now()
	out := testWithHost(f.T, "./gpuio", "^("+pattern+")$",
		append(env, "HELIOS_VFIO_TEST="+strings.Join(ssds, ","))...)
	f.said.WriteString(out)
	f.Logf("%s", out)
	f.Notef("%s: %d passed, %.1f s", pattern, strings.Count(out, "--- PASS"),
		time.Since(began).Seconds())
	if strings.Contains(out, "--- SKIP") {
		f.Errorf("%s: a test was left out:\n%s", pattern, out)
	}
}

// checkExtents compares the images: what is on each disk is what a line EXTENT said last, and there
// is nothing else.
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

// checkImage compares the first bytes of a disk that was all zeroes with a SHA-256, and the rest
// with zeroes.
func checkImage(t *T, i, size int, sum string) {
	b, err := os.ReadFile(t.DiskPath(i))
	if err != nil {
		t.Fatalf("%v", err)
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(b[:size])); got != sum {
		t.Errorf("disk %d: its first %d bytes are not what was written: sha256 %s, want %s", i,
			size, got, sum)
	}
	if n := bytes.Count(b[size:], []byte{0}); n != len(b)-size {
		t.Errorf("disk %d: %d bytes behind its extent of %d bytes changed", i, len(b)-size-n, size)
	}
}
