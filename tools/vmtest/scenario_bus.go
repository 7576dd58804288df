package main

import (
	"regexp"
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "bus",
		Limit: 2 * time.Minute,
		Config: Config{
			Tests: []string{"./nvme/vfiobus"},
			Disks: []Disk{{MB: 16}, {MB: 16, LBA: 4096, MDTS: 5}, {MB: 16, CMBMB: 16, MDTS: 1},
				{MB: 16, IOQPairs: 2}, {MB: 16, CMBMB: 16, LegacyCMB: true}},
		},
		Run: runBus,
	}, Scenario{
		Name:  "stacks",
		Limit: 3 * time.Minute,
		Config: Config{
			MemoryMB: 1024,
			Tests:    []string{"./gpuio"},
			Disks: []Disk{{MB: 16}, {MB: 16, CMBMB: 16, MDTS: 1}, {MB: 16, IOQPairs: 2},
				{MB: 16, LBA: 4096, MDTS: 5}},
		},
		Run: runStacks,
	})
}

var controllerLine = regexp.MustCompile(`QEMU NVMe Ctrl.*`)

// runBus is nvme/vfiobus on real controllers: bring-up, all queues, resets, a controller that dies
// without bus mastering, function resets.
func runBus(t *T) {
	addrs := takeDisks(t)
	out := t.GoTest("./nvme/vfiobus", "^TestVFIO$", "HELIOS_VFIO_TEST="+strings.Join(addrs, ","))
	for _, line := range controllerLine.FindAllString(out, -1) {
		t.Notef("%s", line)
	}
	if n := strings.Count(out, "        --- PASS: TestVFIO/"); n != 7*len(addrs) {
		t.Errorf("%d of %d parts passed:\n%s", n, 7*len(addrs), out)
	}
	t.Logf("%s", out)
}

var rateLine = regexp.MustCompile(`0000:.*: depth .*|.* resets, .*`)

// runStacks is gpuio on real controllers: whole namespaces by Bulk, rows of all kinds by both
// stacks on mixed SSDs with every byte verified, and controllers that die while they are read.
func runStacks(t *T) {
	addrs := takeDisks(t)
	out := t.GoTest("./gpuio", "^TestVFIO$", "HELIOS_VFIO_TEST="+strings.Join(addrs, ","))
	for _, line := range rateLine.FindAllString(out, -1) {
		t.Notef("%s", strings.TrimSpace(line))
	}
	t.Logf("%s", out)
}
