package main

import "fmt"

// odd: SSDs that heliosctl does not drive, or does not take without a word: other command sets,
// large LBAs, content on a disk without a driver. Then a controller that had no driver, there and
// back.
func init() {
	scenarios = append(scenarios, Scenario{
		Name: "odd",
		Config: Config{Disks: []Disk{{MB: 16, Zoned: true}, {MB: 16, LBA: 8192}, {MB: 16},
			{MB: 16}}},
		Run: runOdd,
	})
}

func runOdd(t *T) {
	var addr [4]string
	for i := range addr {
		addr[i] = t.Addr(i)
	}
	driver := func(i int, want string) {
		if got := t.OK("root",
			fmt.Sprintf(
				"echo $(basename $(readlink /sys/bus/pci/devices/%s/driver)) $(cat /sys/bus/pci/devices/%s/driver_override)",
				addr[i], addr[i])); got != want+"\n" {
			t.Errorf("%s: driver and override are %q, not %q", addr[i], got, want)
		}
	}
	setup := "vfio-setup.sh setup --user user"
	t.OK("root", setup)
	t.Exit(3, []string{addr[0], "zone"}, "root", "heliosctl bind-ssds --quiet "+addr[0])
	t.Exit(3, []string{addr[1], "LBAs of 8192 bytes are not supported, only 512 and 4096"}, "root",
		"heliosctl bind-ssds --quiet "+addr[1])
	t.Exit(0, []string{"unusable", "8192"}, "root", "heliosctl ssds "+addr[1])
	driver(0, "nvme (null)")
	driver(1, "nvme (null)")

	// Taken from the kernel's driver before, the namespaces tell it themselves, and go back to no
	// driver.
	dev := t.Dev(2)
	t.OK("root", "mke2fs -q "+dev+" 2>&1 && sync")
	t.OK("root",
		fmt.Sprintf("for a in %s %s %s %s; do echo $a >/sys/bus/pci/drivers/nvme/unbind; done",
			addr[0], addr[1], addr[2], addr[3]))
	t.Exit(3, []string{addr[0], "the zoned namespace command set", "is back with no driver"},
		"root", "heliosctl bind-ssds --quiet "+addr[0])
	t.Exit(3, []string{addr[1], "LBAs of 8192 bytes are not supported", "is back with no driver"},
		"root", "heliosctl bind-ssds --quiet "+addr[1])
	t.Exit(4, []string{addr[2], "holds an ext2/3/4 file system", "--force HELIOS2",
		"is back with no driver"}, "root", "heliosctl bind-ssds --quiet "+addr[2])
	t.Exit(4, []string{addr[3], "no driver has it"}, "root",
		"heliosctl bind-ssds --all-unused --quiet")
	for i := range addr {
		driver(i, "(null)")
	}
	t.OK("root", "! ls /run/heliosctl/vfio*.json 2>/dev/null")
	for range 2 {
		t.Exit(0, []string{"unbound, with no driver"}, "root", "heliosctl bind-ssds "+addr[3]+
			" && heliosctl unbind-ssds vfio0")
		driver(3, "(null)")
	}
	t.OK("root", "heliosctl bind-ssds --force HELIOS2 "+addr[2]+" "+addr[3])
	t.Exit(0, []string{"no dataset, but an ext2/3/4 file system"}, "user", "heliosctl ssds")
	t.Exit(0, []string{"unbound: vfio0 vfio1"}, "root", "vfio-setup.sh reset")
	for i := range addr {
		driver(i, "(null)")
	}
}
