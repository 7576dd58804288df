package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "bench",
		Alone: true,
		Limit: 4 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{{MB: 64}, {MB: 64}, {MB: 64}, {MB: 64},
			{MB: 64}, {MB: 64}}},
		Run: bench,
	})
}

// benchRow holds what we ask of a row of "bench io --json".
type benchRow struct {
	Kind       string  `json:"kind"` // "" for a measurement
	SSDs       int     `json:"ssds"`
	RowBytes   int     `json:"row_bytes"`
	Stack      string  `json:"stack"`
	Depth      int     `json:"depth"`
	IOPS       float64 `json:"iops"`
	CPU        float64 `json:"cpu_us_per_io"`
	P50        float64 `json:"p50_us"`
	P99        float64 `json:"p99_us"`
	Audited    bool    `json:"audited"`
	AuditError string  `json:"audit_error"`
	Errors     int64   `json:"errors"`
}

// benchRows runs bench io in the guest; every row must pass its audit.
func (t *T) benchRows(args string) []benchRow {
	out := t.OK("root", "heliosctl bench io --quiet --json "+args)
	var rows []benchRow
	for line := range strings.Lines(out) {
		var r benchRow
		if json.Unmarshal([]byte(line), &r) == nil && r.Kind == "" && r.Depth > 0 {
			if !r.Audited || r.Errors > 0 || r.IOPS <= 0 {
				t.Errorf("bench io %s: %d SSDs, depth %d: audited %v, %d errors: %s", args, r.SSDs,
					r.Depth, r.Audited, r.Errors, r.AuditError)
			}
			rows = append(rows, r)
		}
	}
	if len(rows) == 0 {
		t.Fatalf("bench io %s printed no row:\n%s", args, out)
	}
	return rows
}

func spread(v []float64) string {
	s := slices.Sorted(slices.Values(v))
	return fmt.Sprintf("%.0f (%.0f-%.0f)", s[len(s)/2], s[0], s[len(s)-1])
}

// bench reads 4 KiB at random places at depth 64 through the guest kernel's driver (O_DIRECT,
// io_uring) and through our queues in turn, on the same disk, and then by the number of SSDs over
// VFIO.
func bench(t *T) {
	seed := rand.NewChaCha8([32]byte{5})
	for i := range t.VM.cfg.Disks {
		fill(t, t.DiskPath(i), seed)
	}
	t.OK("root", "vfio-setup.sh setup")
	addr := t.Addr(0)
	var kernel, ours, ratio, kernelCPU, oursCPU []float64
	for range 3 {
		dev := t.Dev(0)
		t.OK("root", "heliosctl bind-ssds --state /tmp/kernel --proxy "+dev)
		k := t.benchRows(
			"--state /tmp/kernel --io-stack cpu --row-bytes 4096 --depth 64 --seconds 2")[0]
		t.OK("root", "heliosctl unbind-ssds --state /tmp/kernel")
		t.OK("root", "heliosctl bind-ssds "+addr)
		o := t.benchRows("--io-stack async --row-bytes 4096 --depth 64 --io-blocks 1 --seconds 2")[0]
		t.OK("root", "heliosctl unbind-ssds "+addr)
		kernel, ours, ratio = append(kernel, k.IOPS), append(ours, o.IOPS),
			append(ratio, 100*o.IOPS/k.IOPS)
		kernelCPU, oursCPU = append(kernelCPU, k.CPU), append(oursCPU, o.CPU)
	}
	t.Notef(
		"4 KiB random reads/s, depth 64, one SSD, median (range) of 3 in turn: our cpu stack on the kernel's driver %s, VFIO %s, of that stack in %% %s (no ratio to the kernel: a bare io_uring loop reads more)",
		spread(kernel), spread(ours), spread(ratio))
	t.Notef("CPU us of the process per read: kernel's driver %s, VFIO %s", spread(kernelCPU),
		spread(oursCPU))

	t.OK("root", "heliosctl bind-ssds --all-unused")
	for _, r := range t.benchRows(
		"--ssd-count 1..6 --io-stack async --row-bytes 4096 --depth 64 --io-blocks 2 --seconds 1") {
		t.Notef(
			"VFIO, %d SSDs: %.0f reads/s of 4 KiB at depth %d each, median %.0f us, 99 %% within %.0f us, audited",
			r.SSDs, r.IOPS, r.Depth, r.P50, r.P99)
	}
	t.OK("root", "heliosctl unbind-ssds")
	for i := range t.VM.cfg.Disks {
		t.Dev(i) // the kernel has it back
	}
}

// fill writes random bytes over a disk's image.
func fill(t *T, path string, r *rand.ChaCha8) {
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatalf("%v", err)
	}
	b := make([]byte, fi.Size())
	_, _ = r.Read(b) // never fails
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = bytes.NewReader(b).WriteTo(f)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}
