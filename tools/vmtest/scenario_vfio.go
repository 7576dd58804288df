package main

import (
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{Name: "vfio", Limit: 90 * time.Second, Config: Config{
		Disks: []Disk{{}, {LBA: 4096, MDTS: 5}, {CMBMB: 16}, {HotPlug: true}},
		Tests: []string{"./internal/vfio", "./internal/hostmem"},
	}, Run: runVFIO})
}

// toVFIO gives every NVMe controller of the guest to vfio-pci by hand, so that this scenario needs
// neither heliosctl nor the script, and its node to the ordinary user.
const toVFIO = `modprobe vfio_iommu_type1 && modprobe vfio-pci || exit 1
for c in /sys/class/nvme/*; do
	a=$(cat $c/address); d=/sys/bus/pci/devices/$a
	echo vfio-pci >$d/driver_override && echo $a >$d/driver/unbind && echo $a >/sys/bus/pci/drivers_probe || exit 1
	chown 1000 /dev/vfio/$(basename $(readlink $d/iommu_group)) || exit 1
done
chmod 666 /dev/vfio/vfio`

// runVFIO is internal/vfio on controllers that nobody here wrote: one domain for all, DMA by
// ordinary and by reserved huge pages, reset, attaching again; the limit of locked memory as an
// ordinary user meets it; and a controller that is unplugged while it is driven.
func runVFIO(t *T) {
	var addrs []string
	for i := range t.VM.cfg.Disks {
		addrs = append(addrs, t.Addr(i))
	}
	t.OK("root", toVFIO)
	const pkg = "./internal/vfio"
	all := "HELIOS_VFIO_TEST=" + strings.Join(addrs, ",")
	t.Logf("%s", t.GoTest(pkg, "^TestRealDevices$", all, "HELIOS_VFIO_HUGE=0"))

	t.OK("root", "echo 8 >/proc/sys/vm/nr_hugepages")
	t.GoTest(pkg, "^TestRealDevices$", all, "HELIOS_VFIO_HUGE=8388608")
	t.GoTest("./internal/hostmem", "Huge")
	t.OK("root", "echo 0 >/proc/sys/vm/nr_hugepages")

	t.OK("user", "ulimit -l 8192 && cd /tmp && HELIOS_VFIO_MEMLOCK="+addrs[0]+" "+testPath(pkg)+
		" -test.v -test.run '^TestRealMemlock$' | tee /tmp/memlock && grep -q -- '--- PASS: TestRealMemlock' /tmp/memlock")

	p := t.Start(Cmd{
		Argv: []string{testPath(pkg), "-test.run", "^TestRealUnplug$", "-test.v"}, Dir: "/tmp",
		Env: []string{"HELIOS_VFIO_UNPLUG=" + addrs[3], "HELIOS_VFIO_READY=/tmp/ready"},
	})
	t.OK("root", "for i in $(seq 200); do [ -e /tmp/ready ] && exit; sleep 0.1; done; exit 1")
	t.Unplug(3)
	if r := p.Wait(); r.Code != 0 {
		t.Fatalf("exit code %d while unplugged:\n%s%s", r.Code, r.Out, r.Err)
	}
	t.Event("DEVICE_DELETED", 20*time.Second)
	t.OK("root", "[ ! -e /sys/bus/pci/devices/"+addrs[3]+" ]")
}
