package main

import (
	"bytes"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "peer",
		Limit: 2 * time.Minute,
		Config: Config{Tests: []string{"./nvme/vfiobus", "./gpuio"}, Disks: []Disk{{MB: 16}},
			PeerMB: 32},
		Run: runPeer,
	})
}

var peerLine = regexp.MustCompile(`peer: .*`)

// runPeer is the kernel's part of rung p2p of the memory ladder: an SSD whose queues, PRP lists and
// data are in the memory of another PCI device, which type1 maps from that device's BAR. The device
// is an ivshmem whose memory is a file here, so that the host sees what the SSD wrote without
// asking the guest. That runs as the ordinary user, whose limit of locked memory is below the size
// of the BAR. gpuio's rung runs over it with Go kernels and that memory in place of a GPU's. Then a
// process is killed with reads in flight, after which nothing may change in the other device's
// memory.
func runPeer(t *T) {
	image := t.image(0, os.O_WRONLY)
	random := make([]byte, t.VM.cfg.Disks[0].MB<<20)
	src := rand.NewChaCha8([32]byte{7})
	if _, err := src.Read(random); err != nil {
		t.Fatalf("%v", err)
	}
	if _, err := image.WriteAt(random, 0); err != nil {
		t.Fatalf("%v", err)
	}
	if err := image.Close(); err != nil {
		t.Fatalf("%v", err)
	}
	addr := t.Addr(0)
	t.OK("root", toVFIO)
	dev := "/sys/bus/pci/devices/" + peerAddr
	t.OK("root", "echo 1 >"+dev+"/enable && chown 1000 "+dev+"/resource2_wc")
	if said := t.OK("user",
		"heliosctl doctor"); !regexp.MustCompile(`other devices' memory +there `).MatchString(
		said) {
		t.Errorf("doctor does not say that type1 maps other devices' memory:\n%s", said)
	}
	env := "HELIOS_VFIO_TEST=" + addr + " HELIOS_VFIO_PEER=" + dev + "/resource2_wc "
	whole := func(tell func(string, ...any)) {
		out := t.run("user", time.Minute, "ulimit -l 8192 && cd /tmp && "+env+
			testPath("./nvme/vfiobus")+" -test.v -test.run '^TestVFIOPeer$'")
		if !strings.Contains(out, "--- PASS: TestVFIOPeer") {
			t.Fatalf("%s", out)
		}
		for _, line := range peerLine.FindAllString(out, -1) {
			tell("%s", line)
		}
		// The bytes that the guest read into the BAR are in the device's memory, and in the SSD's
		// image.
		const n = 128 << 10
		disk, err := os.ReadFile(t.DiskPath(0))
		if err != nil {
			t.Fatalf("%v", err)
		}
		half := t.VM.cfg.PeerMB << 20 / 2
		if got := t.peerMemory()[half-n/2 : half+n/2]; !bytes.Equal(got, disk[:n]) ||
			bytes.Equal(got, random[:n]) {
			t.Errorf("the other device's memory does not have what the SSD's image has at LBA 0")
		}
	}
	whole(t.Notef)

	// The whole rung over it: proof, both stacks, recovery. As root, for its pinned memory is above
	// the limit.
	out := t.GoTest("./gpuio", "^TestVFIOPeer$", strings.Fields(env)...)
	for _, line := range peerLine.FindAllString(out, -1) {
		t.Notef("%s", line)
	}

	// Slow enough that reads are in flight at any time.
	t.throttle(2<<20, 0)
	p := t.Start(Cmd{
		Argv: []string{testPath("./nvme/vfiobus"), "-test.run", "^TestVFIOPeerForever$", "-test.v"},
		Dir:  "/tmp", User: "user",
		Env: append(strings.Fields(env), "HELIOS_VFIO_READY=/tmp/flying"),
	})
	t.OK("root", "for i in $(seq 200); do [ -e /tmp/flying ] && exit; sleep 0.05; done; exit 1")
	before := t.peerMemory()
	t.until("reads change the other device's memory", 10*time.Second,
		func() bool { return !bytes.Equal(before, t.peerMemory()) })
	t.stopped(p, syscall.SIGKILL)
	// The command register of the SSD: the kernel has taken bus mastering from it.
	if c := t.ReadFileAt("/sys/bus/pci/devices/"+addr+"/config", 4, 2); len(c) != 2 || c[0]&4 != 0 {
		t.Errorf("after a kill the SSD's command register is %x: it may still write", c)
	}
	after := t.peerMemory()
	t.throttle(0, 0)
	time.Sleep(300 * time.Millisecond)
	if !bytes.Equal(after, t.peerMemory()) {
		t.Errorf("the other device's memory changed after the process that owned the SSD was dead")
	}
	t.Notef(
		"killed with reads in flight: the SSD is no bus master, the other device's memory stays as it is")
	whole(t.Logf) // and the next process has both
}

// peerMemory returns what the device with memory behind its BAR has in it.
func (t *T) peerMemory() []byte {
	b, err := os.ReadFile(t.VM.at.peer())
	if err != nil {
		t.Fatalf("%v", err)
	}
	return b
}
