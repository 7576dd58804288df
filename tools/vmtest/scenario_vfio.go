package main

import (
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{Name: "vfio", Limit: time.Minute, Config: Config{
		Disks: []Disk{{}, {LBA: 4096, MDTS: 5}, {CMBMB: 16}, {HotPlug: true}},
		Tests: []string{"./internal/vfio"},
	}, Run: runVFIO})
}

// toVFIO gives every NVMe controller of the guest to vfio-pci by hand, so that this scenario needs
// neither heliosctl nor the script, and returns their addresses.
const toVFIO = `modprobe vfio_iommu_type1; modprobe vfio-pci
for c in /sys/class/nvme/*; do
	a=$(cat $c/address); d=/sys/bus/pci/devices/$a
	echo vfio-pci >$d/driver_override; echo $a >$d/driver/unbind; echo $a >/sys/bus/pci/drivers_probe
	echo $a
done`

// runVFIO is internal/vfio on real controllers: one domain for all, DMA by huge and by ordinary
// pages, reset, attaching again; and a controller that is unplugged while it is driven.
func runVFIO(t *T) {
	addrs := strings.Fields(t.OK("root", toVFIO))
	if len(addrs) != 4 {
		t.Fatalf("bound %v, want 4 controllers", addrs)
	}
	env := "HELIOS_VFIO_TEST=" + strings.Join(addrs, ",")
	t.GoTest("./internal/vfio", "^TestRealDevices$", env)
	t.OK("root", "echo 8 >/proc/sys/vm/nr_hugepages")
	t.GoTest("./internal/vfio", "^TestRealDevices$", env, "HELIOS_VFIO_HUGE=8388608")
}
