package main

import (
	"encoding/json"
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
			Tests: []string{"./tools/nvmewalk"},
			Disks: []Disk{
				// Block 1000 cannot be read, ever: blkdebug counts in 512 bytes.
				{MB: 16,
					BlkDebug: "[inject-error]\nevent = \"read_aio\"\nerrno = \"5\"\nsector = \"1000\"\nonce = \"off\"\n"},
				{MB: 16, LBA: 4096, MDTS: 5},
				{MB: 16, CMBMB: 16, MDTS: 1},
				{MB: 16, IOQPairs: 2},
			},
		},
		Run: func(t *T) {
			addrs := takeDisks(t)
			out := testWithHost(t, "./tools/nvmewalk", "^TestVFIO$", "HELIOS_VFIO_TEST="+
				strings.Join(addrs, ","), "HELIOS_WALK_BAD=1000")
			for _, line := range sums.FindAllString(out, -1) {
				t.Notef("%s", line)
			}
			if n := strings.Count(out, "    --- PASS: TestVFIO/"); n != len(addrs) {
				t.Errorf(
					"%d walks passed, want one of each of %d controllers:\n%s",
					n, len(addrs), out)
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

// testWithHost is T.GoTest for tests that ask for things that only QEMU can do: they leave a line
// in hostDir/ask and wait for hostDir/answer. Lines are "hmp LINE", "qmp COMMAND JSON" and "event
// NAME".
func testWithHost(t *T, pkg, run string, env ...string) string {
	const (
		hostDir = "/tmp/host"
		limit   = 4 * time.Minute
	)
	t.OK("root", "rm -rf "+hostDir+"; mkdir -p "+hostDir)
	p := t.Start(Cmd{Argv: []string{testPath(pkg), "-test.run", run, "-test.v", "-test.timeout",
		stretch(limit, t.slow).String()},
		Env: append(env, "HELIOS_HOST_DIR="+hostDir), Timeout: limit + 5*time.Second, Dir: "/tmp"})
	next := fmt.Sprintf(
		"while [ -d /proc/%d ] && ! grep -q '^State:.Z' /proc/%d/status && [ ! -f %s/ask ]; do sleep 0.02; done; cat %s/ask 2>/dev/null && rm %s/ask; true",
		p.PID, p.PID, hostDir, hostDir, hostDir)
	for {
		r := t.Run(Cmd{Argv: []string{"/bin/sh", "-c", next}, Timeout: limit})
		line := r.Out
		if line == "" {
			break
		}
		answer := t.answer(line)
		t.Logf("the guest asks %q: %q", line, answer)
		t.WriteFile(hostDir+"/answering", []byte(answer), 0o600)
		t.OK("root", "mv "+hostDir+"/answering "+hostDir+"/answer")
	}
	r := p.Wait()
	if r.Code != 0 {
		t.Fatalf("%s -run %s: exit code %d:\n%s%s", pkg, run, r.Code, r.Out, r.Err)
	}
	t.ran(pkg, run, r)
	return r.Out
}

// answer does what a test in the guest asks for.
func (t *T) answer(line string) string {
	verb, rest, _ := strings.Cut(line, " ")
	switch verb {
	case "hmp":
		return t.HMP(rest)
	case "event":
		return string(t.Event(rest, 20*time.Second))
	case "qmp":
		cmd, text, _ := strings.Cut(rest, " ")
		args := map[string]any{}
		if text != "" {
			if err := json.Unmarshal([]byte(text), &args); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
		}
		out, err := t.QMP(cmd, args)
		if err != nil {
			return "error: " + err.Error()
		}
		return string(out)
	}
	t.Fatalf("the guest asks %q", line)
	return ""
}
