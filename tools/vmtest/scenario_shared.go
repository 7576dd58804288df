package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"time"
)

// shared: one namespace behind two controllers of a subsystem. A namespace that the kernel has mounted
// through one of them is not bound through the other, nor loaded onto, whatever --force says; nor are both
// bound. sharedplain is the same without the kernel's multipath, which shows two disks.
func init() {
	for name, args := range map[string]string{"shared": "", "sharedplain": "nvme_core.multipath=N"} {
		scenarios = append(scenarios, Scenario{
			Name: name, Limit: 4 * time.Minute,
			Config: Config{SharedNamespace: true, KernelArgs: args, Disks: []Disk{
				{Serial: "SHARED", MB: 32}, {Serial: "SHARED", MB: 32}}},
			Run: runShared,
		})
	}
	scenarios = append(scenarios,
		Scenario{Name: "vfs", Config: Config{Disks: []Disk{{MB: 32, VFs: 1, HotPlug: true}}},
			Run: runVFs},
		Scenario{Name: "noremap", Config: Config{NoRemapping: true, Disks: []Disk{{MB: 16}}},
			Run: runNoRemapping},
		Scenario{Name: "middle", Config: Config{Disks: []Disk{{MB: 64}, {MB: 64}}}, Run: runMiddle})
}

// driverOf is the driver that has a device, "" for none.
func driverOf(t *T, addr string) string {
	return strings.TrimSpace(t.OK("root",
		fmt.Sprintf("basename \"$(readlink /sys/bus/pci/devices/%s/driver)\"", addr)))
}

func imageSum(t *T, i int) []byte {
	t.OK("root", "sync")
	b, err := os.ReadFile(t.DiskPath(i))
	if err != nil {
		t.Fatalf("%v", err)
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

func runShared(t *T) {
	one, two := t.Addr(0), t.Addr(1)
	unbind := func(addr string) {
		t.OK("root", fmt.Sprintf("echo %s >/sys/bus/pci/drivers/nvme/unbind", addr))
	}
	t.OK("root", "vfio-setup.sh setup --user user")
	for _, a := range []string{one, two, one + " " + two, "--force SHARED " + two} {
		t.Exit(4, []string{"the kernel reaches through", "as well", "nothing was changed"}, "root",
			"heliosctl bind-ssds "+a)
	}

	unbind(two)
	dev := strings.TrimSpace(t.OK("root", "ls -d /dev/nvme*n1"))
	t.OK("root", "mke2fs -q "+dev+" 2>&1 && mkdir /data && mount -t ext4 "+dev+
		" /data && echo precious >/data/file && sync && mount -o remount,ro /data")
	before := imageSum(t, 0)
	refused := func(words ...string) {
		for _, force := range []string{"", "--force SHARED "} {
			t.Exit(4, append(words, two, "no force overrides", "is back with no driver"), "root",
				"heliosctl bind-ssds --quiet "+force+two)
			if d := driverOf(t, two); d != "" {
				t.Errorf("%s is with driver %q", two, d)
			}
		}
	}
	refused("is the namespace that the kernel reaches through", dev)
	t.OK("root", "ls /run/heliosctl/vfio*.json 2>/dev/null && exit 1; umount /data")
	refused("is the namespace that the kernel reaches through", dev) // idle, but mounted at will
	unbind(one)
	if !bytes.Equal(imageSum(t, 0), before) {
		t.Errorf("the image has changed")
	}

	// Nobody has it: it is content, and free for one controller.
	t.Exit(4, []string{"ext2/3/4", "--force SHARED"}, "root", "heliosctl bind-ssds --quiet "+one)
	t.OK("root", "heliosctl bind-ssds --force SHARED "+one)
	refused("is the namespace that vfio0 (" + one + ") reaches, which is bound")

	t.OK("user", "cd /tmp && heliosctl generate --out g --nodes 500 --dim 32 --quiet")
	t.Exit(4, []string{"ext2/3/4", "--force SHARED"}, "user", "cd /tmp && heliosctl load g")
	t.OK("user", "cd /tmp && heliosctl load g --force SHARED && heliosctl verify g")
	t.OK("root", fmt.Sprintf("echo %s >/sys/bus/pci/drivers/nvme/bind", two))
	t.OK("root", "for i in $(seq 100); do ls /dev/nvme*n1 2>/dev/null && exit 0; sleep 0.1; done; exit 1")
	before = imageSum(t, 0)
	t.Exit(4, []string{"vfio0", "is the namespace that the kernel reaches through",
		"no force overrides"}, "user", "cd /tmp && heliosctl load g --force SHARED --restart")
	t.Exit(0, []string{"is the namespace that the kernel reaches through"}, "user", "heliosctl ssds")
	t.Exit(4, []string{"vfio0 (" + one + ") reaches"}, "root", "heliosctl bind-ssds "+two)
	if !bytes.Equal(imageSum(t, 0), before) {
		t.Errorf("the image has changed")
	}
	unbind(two)
	t.OK("user", "cd /tmp && heliosctl load g && heliosctl verify g")
	t.OK("root", "heliosctl unbind-ssds")
}

// vfs: a virtual function of a controller whose disk is mounted, and a controller with virtual
// functions.
func runVFs(t *T) {
	pf, dev := t.Addr(0), t.Dev(0)
	t.OK("root", "vfio-setup.sh setup --user user")
	t.OK("root", "mke2fs -q "+dev+" 2>&1 && mkdir /data && mount -t ext4 -o ro "+dev+" /data")
	dir := "/sys/bus/pci/devices/" + pf
	t.OK("root", "cd "+dir+" && echo 0 >sriov_drivers_autoprobe && echo 1 >sriov_numvfs")
	vf := strings.TrimSpace(t.OK("root", "basename \"$(readlink "+dir+"/virtfn0)\""))
	before := imageSum(t, 0)
	for _, force := range []string{"", "--force HELIOS0 "} {
		t.Exit(4, []string{vf + " is a virtual function of " + pf, dev + " is mounted at /data",
			"nothing was changed"}, "root", "heliosctl bind-ssds "+force+vf)
	}
	t.OK("root", "umount /data")
	for _, force := range []string{"", "--force HELIOS0 "} {
		t.Exit(4, []string{pf + " has 1 virtual functions", "sriov_numvfs", "nothing was changed"},
			"root", "heliosctl bind-ssds "+force+pf)
	}
	if d := driverOf(t, pf) + driverOf(t, vf); d != "nvme" {
		t.Errorf("the drivers are %q", d)
	}
	t.OK("root", "echo 0 >"+dir+"/sriov_numvfs")
	t.OK("root", "heliosctl bind-ssds --force HELIOS0 "+pf+" && heliosctl unbind-ssds")
	if !bytes.Equal(imageSum(t, 0), before) {
		t.Errorf("the image has changed")
	}
}

// noremap: without interrupt remapping the kernel gives no device to user space. Everybody says so,
// and nobody touches a driver.
func runNoRemapping(t *T) {
	words := []string{"no interrupt remapping", "intremap=on"}
	t.OK("root", "vfio-setup.sh setup --user user >/tmp/said; grep -q 'no interrupt remapping' /tmp/said")
	t.Exit(3, words, "user", "vfio-setup.sh status")
	t.Exit(0, []string{"interrupt remapping", "not there", "for SSDs by VFIO: turn on interrupt remapping"},
		"user", "heliosctl doctor")
	t.Exit(3, words, "root", "heliosctl bind-ssds "+t.Addr(0))
	t.Exit(0, words, "root", "heliosctl bind-ssds --dry-run "+t.Addr(0))
	if d := driverOf(t, t.Addr(0)); d != "nvme" {
		t.Errorf("the driver is %q", d)
	}
	// Where the kernel is told to do without, it works, and is said to.
	t.OK("root", "echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts")
	t.Exit(0, []string{"a device can raise any interrupt", "nothing lacks"}, "user",
		"vfio-setup.sh status")
	t.OK("root", "heliosctl bind-ssds "+t.Addr(0)+" && heliosctl unbind-ssds")
}

// middle: a file system whose two ends are gone is still somebody's.
func runMiddle(t *T) {
	t.OK("root", "vfio-setup.sh setup --user user")
	dev := t.Dev(0)
	t.OK("root", "mke2fs -q "+dev+" 2>&1 && mkdir /data && mount -t ext4 "+dev+
		" /data && dd if=/bin/heliosctl of=/data/file bs=1M count=8 2>/dev/null && umount /data")
	t.OK("root", "for at in 0 63; do dd if=/dev/zero of="+dev+
		" bs=1M count=1 seek=$at conv=notrunc,fsync 2>/dev/null; done")
	t.OK("root", "heliosctl bind-ssds "+t.Addr(0)+" "+t.Addr(1))
	t.OK("user", "cd /tmp && heliosctl generate --out g --nodes 500 --dim 32 --quiet")
	before := imageSum(t, 0)
	t.Exit(4, []string{"serial HELIOS0", "between two blank ends", "--force HELIOS0"}, "user",
		"cd /tmp && heliosctl load g")
	if !bytes.Equal(imageSum(t, 0), before) {
		t.Errorf("the image has changed")
	}
	t.OK("user", "cd /tmp && heliosctl load g --ssds HELIOS1 && heliosctl verify g --ssds HELIOS1")
	t.OK("user", "cd /tmp && heliosctl load g --force HELIOS0 && heliosctl verify g")
	t.OK("root", "heliosctl unbind-ssds")
}
