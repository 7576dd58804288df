package main

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "walk",
		Limit: 3 * time.Minute,
		Config: Config{
			Tests: []string{"./nvme/walk"},
			Disks: []Disk{
				// Block 1000 cannot be read, ever: blkdebug counts in 512 bytes.
				{MB: 16, BlkDebug: "[inject-error]\nevent = \"read_aio\"\nerrno = \"5\"\nsector = \"1000\"\nonce = \"off\"\n"},
				{MB: 16, LBA: 4096, MDTS: 5},
				{MB: 16, CMBMB: 16, MDTS: 1},
				{MB: 16, IOQPairs: 2},
			},
		},
		Run: func(t *T) {
			addrs := takeDisks(t)
			out := t.GoTest("./nvme/walk", "^TestVFIO$", "HELIOS_VFIO_TEST="+strings.Join(addrs, ","), "HELIOS_WALK_BAD=1000")
			for _, line := range sums.FindAllString(out, -1) {
				t.Notef("%s", line)
			}
			if n := strings.Count(out, "    --- PASS: TestVFIO/"); n != 2*len(addrs) {
				t.Errorf("%d walks of %d passed:\n%s", n, 2*len(addrs), out)
			}
			t.Logf("%s", out)
		},
	})
}

var sums = regexp.MustCompile(`\d+ steps: .*`)

// takeDisks gives all disks to vfio-pci by hand, as the tests of packages want them: the verbs have
// scenarios of their own. It returns their PCI addresses in the order of the disks.
func takeDisks(t *T) []string {
	out := t.OK("root", `modprobe vfio_iommu_type1 && modprobe vfio-pci || exit 1
for c in /sys/class/nvme/nvme*; do
	a=$(basename $(readlink -f $c/device)); s=$(cat $c/serial)
	echo $s $a
	echo vfio-pci > /sys/bus/pci/devices/$a/driver_override
	echo $a > /sys/bus/pci/devices/$a/driver/unbind
	echo $a > /sys/bus/pci/drivers_probe
	[ "$(basename $(readlink -f /sys/bus/pci/devices/$a/driver))" = vfio-pci ] || { echo "$a stays with its driver" >&2; exit 1; }
done`)
	bySerial := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(out), "\n") {
		if f := strings.Fields(line); len(f) == 2 {
			bySerial[f[0]] = f[1]
		}
	}
	var addrs []string
	for i, d := range t.VM.cfg.Disks {
		serial := d.Serial
		if serial == "" {
			serial = fmt.Sprintf("HELIOS%d", i)
		}
		a, ok := bySerial[serial]
		if !ok && !d.Absent {
			t.Fatalf("no NVMe controller with serial %s in the guest:\n%s", serial, out)
		}
		addrs = append(addrs, a)
	}
	return addrs
}
