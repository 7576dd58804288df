package main

import (
	"fmt"
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:   "setup",
		Limit:  3 * time.Minute,
		Config: Config{Disks: []Disk{{Serial: "SETUP0", MB: 64}, {Serial: "SETUP1", MB: 64}}},
		Run:    runSetup,
	})
}

// systemState prints what vfio-setup.sh may change: files, modes and contents of /etc, nodes of
// /dev, modules, huge pages, and who drives which SSD.
const systemState = `
find /etc /dev -xdev | sort | while read -r f; do stat -c '%n %A %u %g' "$f"; done
find /etc -type f | sort | xargs sha256sum
lsmod | sed '1d; s/ .*//' | sort
cat /proc/sys/vm/nr_hugepages
for d in /sys/bus/pci/devices/*; do echo "$d $(basename "$(readlink "$d/driver")") $(cat "$d/driver_override")"; done`

// runSetup: vfio-setup.sh from a bare machine to SSDs that an ordinary user opens, and back.
func runSetup(t *T) {
	const script = "/bin/vfio-setup.sh"
	before := t.OK("root", systemState)
	same := func(when string) {
		if now := t.OK("root", systemState); now != before {
			t.Fatalf("%s the machine is not as it was:\n%s", when, lineDiff(before, now))
		}
	}

	// Bare: each lack is named, for root and for the user, and nothing changes.
	lacks := []string{"on (Intel VT-d)", "vfio_pci and vfio_iommu_type1: not loaded",
		"there is no group helios", "there is no udev rule", "/dev/vfio/vfio is not there",
		t.Addr(0), "SETUP0", "next: sudo " + script + " setup"}
	t.Exit(3, append(lacks, "user may lock too little memory"), "user", script+" status")
	t.Exit(3, lacks, "root", script+" status")
	t.Exit(3, []string{"setup needs root"}, "user", script+" setup")
	t.Exit(3, []string{"reset needs root"}, "user", script+" reset")
	t.Exit(0, []string{"would run: modprobe vfio-pci",
		"would write /etc/udev/rules.d/72-heliosctl-vfio.rules",
		"echo 16 >/proc/sys/vm/nr_hugepages"}, "user",
		script+" --dry-run setup --user user --hugepages 32MiB")
	same("after dry runs")

	t.Exit(0, []string{"loaded module vfio-pci", "got all 16 (32 MiB)",
		"made group helios in /etc/group", "added user to group helios", "nothing lacks"}, "root",
		"SUDO_USER=user "+script+" setup --hugepages 32MiB --memlock 256MiB")
	t.Exit(0,
		[]string{"nothing lacks",
			"user: 256 MiB at login, from /etc/security/limits.d/80-heliosctl-memlock.conf; this session 256 MiB"}, "user",
		script+" status")
	if got := strings.TrimSpace(t.OK("user", "ulimit -l")); got != "262144" {
		t.Fatalf("memlock of the user is %s KiB, not 262144", got)
	}
	t.Exit(0, []string{"kept module vfio-pci", "kept 16 huge pages", "kept group helios",
		"kept user in group helios", "nothing lacks"}, "root", script+" setup --user user")

	// The container is open to the user, and so is the group of an SSD that is bound through the
	// script; another one, which somebody binds by hand, stays root's.
	t.OK("root", script+" bind "+t.Addr(0))
	group := func(i int) string {
		return strings.TrimSpace(t.OK("root", "basename $(readlink /sys/bus/pci/devices/"+t.Addr(i)+
			"/iommu_group)"))
	}
	open := func(
		node string) string {
		return fmt.Sprintf("exec 3<>/dev/vfio/%s && echo open", node)
	}
	t.Exit(0, []string{"open"}, "user", open("vfio"))
	t.Exit(0, []string{"open"}, "user", open(group(0)))
	t.Exit(0, []string{"nothing lacks", "driver vfio-pci"}, "user", script+" status")
	addr := t.Addr(1)
	t.OK("root",
		fmt.Sprintf(
			"cd /sys/bus/pci/devices/%s && echo vfio-pci >driver_override && echo %s >driver/unbind && echo %s >/sys/bus/pci/drivers_probe",
			addr, addr, addr))
	if r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", open(group(1))}, User: "user"}); r.Code == 0 {
		t.Fatalf("the user opens /dev/vfio/%s, which is root's", group(1))
	}
	t.Exit(0, []string{"bound by another program", "nothing lacks"}, "user", script+" status")
	t.OK("root", script+" setup")
	if r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", open(group(1))}, User: "user"}); r.Code == 0 {
		t.Fatalf("setup gives the user /dev/vfio/%s, which is another program's", group(1))
	}
	t.OK("root",
		fmt.Sprintf(
			"cd /sys/bus/pci/devices/%s && echo %s >driver/unbind && echo >driver_override && echo %s >/sys/bus/pci/drivers_probe",
			addr, addr, addr))

	// Somebody uses an SSD: reset does nothing at all. Then it takes back everything.
	holder := t.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec 3<>/dev/vfio/" + group(0) +
		"; sleep 100"}, User: "user", Timeout: 2 * time.Minute})
	waitOpen := fmt.Sprintf(
		"for i in $(seq 100); do ls -l /proc/%d/fd 2>/dev/null | grep -q /dev/vfio/ && exit; sleep 0.05; done; exit 1",
		holder.PID)
	t.OK("root", waitOpen)
	set := t.OK("root", "cat /etc/heliosctl/vfio-setup.record /etc/group")
	t.Exit(4, []string{"still bound, so nothing was reset"}, "root", script+" reset")
	if now := t.OK("root", "cat /etc/heliosctl/vfio-setup.record /etc/group"); now != set {
		t.Fatalf("reset while an SSD is in use changed:\n%s", lineDiff(set, now))
	}
	holder.Kill(9)
	holder.Wait()
	t.Exit(0, []string{"would run: /bin/heliosctl unbind-ssds vfio0",
		"would run: rm -f -- /etc/udev"}, "root", script+" reset --dry-run")
	t.Exit(0, []string{"unbound: vfio0", "removed group helios", "huge pages back to 0",
		"unloaded module vfio_pci"}, "root", script+" reset")
	same("after reset")
	t.Exit(0, []string{"nothing to reset"}, "root", script+" reset")
}

// lineDiff is the lines that only one of two texts has.
func lineDiff(a, b string) string {
	var out strings.Builder
	lines := func(s string) map[string]bool {
		m := map[string]bool{}
		for l := range strings.Lines(s) {
			m[l] = true
		}
		return m
	}
	la, lb := lines(a), lines(b)
	for l := range strings.Lines(a) {
		if !lb[l] {
			out.WriteString("- " + l)
		}
	}
	for l := range strings.Lines(b) {
		if !la[l] {
			out.WriteString("+ " + l)
		}
	}
	if out.Len() == 0 {
		return "(the same lines in another order)"
	}
	return out.String()
}
