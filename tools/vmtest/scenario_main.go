package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// main is the whole job on real controllers: four SSDs on the kernel's driver, set up and bound by
// root, loaded, trained from and verified by an ordinary user, given back. Losses and parameters
// must equal those of the same commands on proxied SSDs.
func init() {
	scenarios = append(scenarios, Scenario{
		Name:   "main",
		Limit:  4 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{{}, {CMBMB: 16}, {MDTS: 1}, {IOQPairs: 4}}},
		Run:    mainJob,
	})
}

// The job's commands, with the words that differ between guest and host put in front or behind.
const (
	jobGenerate = "generate --kind sbm --nodes 4000 --avg-degree 8 --classes 8 --dim 128 --seed 7 --out graph --quiet"
	jobLoad     = "load graph --quiet --json"
	jobTrain    = "train graph --kernels generic --model sage --fanout 5,5 --batch-size 128 --hidden 16 --epochs 2 --seed 3 --lr 0.003" +
		" --gpu-cache 3% --cpu-cache 5% --workers 2 --check-reads --quiet --json"
	jobVerify = "verify graph --quiet --json"
)

// trained holds what the scenario reads of "train --json".
type trained struct {
	Event  string  `json:"event"`
	Epoch  int     `json:"epoch"`
	Loss   float64 `json:"loss"`
	Epochs []struct {
		Loss    float64 `json:"loss"`
		ValAcc  float64 `json:"val_acc"`
		RowsSSD int64   `json:"rows_ssd"`
		Seconds float64 `json:"seconds"`
	} `json:"epochs"`
	TestAcc float64 `json:"test_acc"`
	SHA     string  `json:"params_sha256"`
}

// lastTrained is the result line of train's output.
func lastTrained(out string) (trained, error) {
	var r trained
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &r); err != nil {
		return r, fmt.Errorf("%w in %.200q", err, lines[len(lines)-1])
	}
	if len(r.Epochs) == 0 || r.SHA == "" {
		return r, fmt.Errorf("no result with epochs and params_sha256 in %.200q",
			lines[len(lines)-1])
	}
	return r, nil
}

// same tells in what two runs of the same training differ, or "".
func (r trained) same(o trained) string {
	if len(r.Epochs) != len(o.Epochs) {
		return fmt.Sprintf("%d epochs and %d", len(r.Epochs), len(o.Epochs))
	}
	for i := range r.Epochs {
		if a, b := r.Epochs[i], o.Epochs[i]; a.Loss != b.Loss || a.ValAcc != b.ValAcc ||
			a.RowsSSD != b.RowsSSD {
			return fmt.Sprintf("epoch %d: %+v and %+v", i+1, a, b)
		}
	}
	if r.SHA != o.SHA || r.TestAcc != o.TestAcc {
		return fmt.Sprintf("parameters %s (test accuracy %v) and %s (%v)", r.SHA, r.TestAcc, o.SHA,
			o.TestAcc)
	}
	return ""
}

// onHost runs heliosctl, the guest's binary, natively in dir with software controllers.
func (t *T) onHost(dir, line string) string {
	ctx, cancel := context.WithTimeout(t.Context, time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, t.HostBinary(), strings.Fields(line)...)
	c.Dir = dir
	c.Env = append(os.Environ(), "HELIOS_STATE="+filepath.Join(dir, "state"))
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		t.Fatalf("on the host: heliosctl %s: %v\n%s", line, err, errs.String())
	}
	return out.String()
}

func mainJob(t *T) {
	// The same job on proxied SSDs, natively.
	host := t.HostDir()
	t.onHost(host, jobGenerate)
	t.onHost(host, "bind-ssds --proxy a.img,b.img,c.img,d.img --size 64MiB --quiet")
	t.onHost(host, jobLoad)
	want, err := lastTrained(t.onHost(host, jobTrain))
	if err != nil {
		t.Fatalf("on the host: %v", err)
	}

	// As a machine comes: the kernel's driver has the disks.
	var addrs, devs []string
	for i := range 4 {
		addrs, devs = append(addrs, t.Addr(i)), append(devs, t.Dev(i))
	}
	drivers := func() string {
		return strings.TrimSpace(t.OK("root", "for a in "+strings.Join(addrs, " ")+
			"; do basename $(readlink /sys/bus/pci/devices/$a/driver); done | uniq -c"))
	}
	if d := drivers(); d != "4 nvme" {
		t.Fatalf("drivers at boot: %s", d)
	}

	// Root sets up and binds, with each kind of name.
	t.OK("root", "SUDO_USER=user vfio-setup.sh setup")
	t.OK("root", fmt.Sprintf("heliosctl bind-ssds --quiet %s HELIOS1 %s %s", addrs[0],
		strings.TrimSuffix(devs[2], "n1"), devs[3]))
	if d := drivers(); d != "4 vfio-pci" {
		t.Fatalf("drivers after bind-ssds: %s", d)
	}
	t.OK("root", "! ls /dev/nvme*")

	// An ordinary user does the rest.
	t.OK("user", "heliosctl "+jobGenerate)
	t.OK("user", "heliosctl "+jobLoad)
	began := time.Now()
	got, err := lastTrained(t.run("user", 2*time.Minute, "heliosctl "+jobTrain))
	if err != nil {
		t.Fatalf("train: %v", err)
	}
	took := time.Since(began)
	t.OK("user", "heliosctl "+jobVerify)
	if d := got.same(want); d != "" {
		t.Errorf("VFIO and proxied SSDs differ: %s", d)
	}
	if got.Epochs[0].RowsSSD == 0 || got.Epochs[0].Loss <= got.Epochs[1].Loss {
		t.Errorf("nothing read, or nothing learnt: %+v", got.Epochs)
	}
	t.Notef(
		"4 SSDs over VFIO: losses %.6f, %.6f, test accuracy %.4f, params_sha256 %.16s…, equal on proxied SSDs; %d and %d rows from the SSDs, each held against its checksum; train took %.1f s",
		got.Epochs[0].Loss, got.Epochs[1].Loss, got.TestAcc, got.SHA, got.Epochs[0].RowsSSD,
		got.Epochs[1].RowsSSD, took.Seconds())

	// Root gives the SSDs back: the kernel reads what our queues wrote.
	t.OK("root", "heliosctl unbind-ssds --quiet")
	if d := drivers(); d != "4 nvme" {
		t.Fatalf("drivers after unbind-ssds: %s", d)
	}
	for i := range 4 {
		image, err := os.Open(t.DiskPath(i))
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer image.Close()
		for what, off := range map[string]int64{"head": 0, "tail": 64<<20 - 4096} {
			b := make([]byte, 4096)
			if _, err := image.ReadAt(b, off); err != nil {
				t.Fatalf("%v", err)
			}
			if !bytes.Contains(b[:16], []byte("HeliosSB")) {
				t.Errorf("disk %d has no superblock at its %s: %q", i, what, b[:16])
			}
			seen := t.ReadFileAt(t.Dev(i), off, 4096)
			if !bytes.Equal(seen, b) {
				t.Errorf("disk %d: the kernel reads another superblock at its %s: %q", i, what,
					seen[:min(16, len(seen))])
			}
		}
	}
	t.OK("root", "vfio-setup.sh reset")
}
