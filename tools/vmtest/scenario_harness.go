package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// harness checks the tier's own tools in a real guest: what the other scenarios build on, and that
// the checks on every scenario can fail.
func init() {
	scenarios = append(scenarios, Scenario{
		Name: "harness",
		Config: Config{
			SharedGroup: true,
			Disks: []Disk{{}, {}, {LBA: 4096, MDTS: 5, ThrottleIOPS: 5000},
				{CMBMB: 16, BlkDebug: "-", IOQPairs: 2}, {HotPlug: true},
				{HotPlug: true, Absent: true}},
			Tests: []string{"./tools/vmtest/agent"},
		},
		Run: harness,
	})
}

func harness(t *T) {
	// users, limits, terminals, outputs
	if out := t.OK("user", "id; echo $HOME; pwd; ulimit -l"); !strings.Contains(out,
		"uid=1000(user) gid=1000(user) groups=1000(user)\n/people/user\n/people/user\n") {
		t.Errorf("the ordinary user is %q", out)
	}
	t.OK("root",
		"echo helios:x:990:user >>/etc/group; mkdir -p /etc/security/limits.d; echo '@helios - memlock unlimited' >/etc/security/limits.d/helios.conf")
	if out := t.OK("user", "id -Gn; ulimit -l"); out != "user helios\nunlimited\n" {
		t.Errorf("after the group and its limit came: %q", out)
	}
	t.Exit(1, []string{"ermission denied"}, "user", "cat /etc/shadow")
	if r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", `[ -t 0 ] && read -r x && echo "got $x"`},
		Stdin: "serial\n", TTY: true}); r.Out != "got serial\n" {
		t.Errorf("a terminal gave %+v", r)
	}
	blob := bytes.Repeat([]byte("0123456789abcde\x00"), 512)
	began := time.Now()
	t.WriteFile("/tmp/blob", blob, 0o600)
	t.Logf("the channel took %d bytes in %v", len(blob), time.Since(began))
	began = time.Now()
	if !bytes.Equal(t.ReadFile("/tmp/blob"), blob) {
		t.Errorf("a file came back changed")
	}
	t.Logf("the channel gave %d bytes in %v", len(blob), time.Since(began))
	p := t.Start(Cmd{Argv: []string{"sleep", "60"}})
	p.Kill(syscall.SIGKILL)
	if r := p.Wait(); r.Code != 137 {
		t.Errorf("a killed command ended with %d", r.Code)
	}
	if out := t.GoTest("./tools/vmtest/agent", "^TestFiles$"); strings.Contains(out, "TestExec") {
		t.Errorf("another test ran: %s", out)
	}

	// disks: nothing is bound at boot, block sizes, queues, what the guest writes is in the image
	for i := range 5 {
		dev := t.Dev(i)
		name, lba := strings.TrimSuffix(dev[5:], "n1"), "512"
		if i == 2 {
			lba = "4096"
		}
		if out := t.OK("root", "cat /sys/class/nvme/"+name+"/serial /sys/block/"+name+
			"n1/queue/logical_block_size"); !slices.Equal(strings.Fields(out),
			[]string{fmt.Sprintf("HELIOS%d", i), lba}) {
			t.Errorf("disk %d: %q", i, out)
		}
	}
	if out := t.OK("root", "lsmod"); strings.Contains(out, "vfio") {
		t.Errorf("modules at boot: %s", out)
	}
	t.OK("root", "printf 'helios was here' | dd of="+t.Dev(3)+
		" bs=512 seek=8 conv=sync,fsync 2>/dev/null")
	if b, err := os.ReadFile(t.DiskPath(3)); err != nil ||
		!bytes.HasPrefix(b[8*512:], []byte("helios was here\x00")) {
		t.Errorf("the image lacks what the guest wrote: %v", err)
	}
	group := func(
		i int) string {
		return t.OK("root", "readlink /sys/bus/pci/devices/"+t.Addr(i)+"/iommu_group")
	}
	if a, b, c := group(0), group(1), group(2); a != b || b == c {
		t.Errorf("IOMMU groups of disks 0, 1, 2: %s %s %s; 0 and 1 alone should share one", a, b, c)
	}

	// a held request: blkdebug stops a read until it is resumed
	t.OK("root", "modprobe vfio-pci; lsmod | grep -q '^vfio_pci '")
	if out := t.HMP("qemu-io d3 \"break read_aio held\""); strings.Contains(out, "rror") ||
		strings.Contains(out, "not") {
		t.Errorf("break: %q", out)
	}
	p = t.Start(Cmd{Argv: []string{"/bin/sh", "-c", "exec dd if=" + t.Dev(3) +
		" of=/dev/null bs=4096 count=1 skip=100 iflag=direct 2>&1"}})
	if out := t.OK("root", "sleep 0.5; pidof dd >/dev/null && echo held"); out != "held\n" {
		t.Errorf("the read was not held: %q", out)
	}
	t.HMP("qemu-io d3 \"resume held\"")
	if r := p.Wait(); r.Code != 0 {
		t.Errorf("the resumed read: %+v", r)
	}

	// hot plug
	t.Unplug(4)
	t.Event("DEVICE_DELETED", 20*time.Second)
	t.Plug(5)
	t.OK("root",
		"for i in $(seq 100); do grep -q HELIOS5 /sys/class/nvme/*/serial && break; sleep 0.1; done; ! grep -l HELIOS4 /sys/class/nvme/*/serial")
	if out := t.OK("root", "cat /sys/bus/pci/devices/"+t.Addr(5)+
		"/nvme/*/serial"); strings.TrimSpace(out) != "HELIOS5" {
		t.Errorf("the plugged disk is %q", out)
	}

	// the log check sees what the kernel logs, also at a level that the console does not print
	if err := checkLog(t.KernelLog()); err != nil {
		t.Errorf("before anything was wrong: %v", err)
	}
	t.OK("root",
		"echo '<6>DMAR: [DMA Write NO_PASID] Request device [00:04.0] fault addr 0x1000' >/dev/kmsg")
	if err := checkLog(t.KernelLog()); err == nil {
		t.Errorf("a DMA fault in the log passes")
	}
	t.expectLog = true
}
