package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

func init() {
	scenarios = append(scenarios, Scenario{
		Name:  "mixed-512",
		Limit: 4 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{
			{MB: 48}, {MB: 48, MDTS: 1}, {MB: 48, CMBMB: 16}, {MB: 48, IOQPairs: 1},
			{MB: 48, MDTS: 5, CMBMB: 16, LegacyCMB: true}, {MB: 48, MDTS: 1, IOQPairs: 2},
		}},
		Run: func(t *T) { mixed(t, 6) },
	}, Scenario{
		Name:  "mixed-4096",
		Limit: 3 * time.Minute,
		Config: Config{MemoryMB: 1024, Disks: []Disk{
			{MB: 48, LBA: 4096, MDTS: 5}, {MB: 48, LBA: 4096, MDTS: 1},
			{MB: 48, LBA: 4096, CMBMB: 16, IOQPairs: 2},
		}},
		Run: func(t *T) { mixed(t, 3) },
	})
}

// mixedShapes are rows that are packed, padded, whole blocks, and longer than MDTS 1 lets a command
// be.
var mixedShapes = []struct {
	name       string
	nodes, dim int
}{
	{"packed", 3000, 25}, {"padded", 2000, 130}, {"page", 1000, 1024}, {"long", 300, 5000},
}

// mixed loads rows of each shape over one to most controllers of different abilities, reads rows
// through both stacks, each against its checksum, and trains: whatever the hardware, the same
// losses.
func mixed(t *T, most int) {
	t.OK("root", "vfio-setup.sh setup && heliosctl bind-ssds --quiet --all-unused")
	for _, s := range mixedShapes {
		t.OK("root",
			fmt.Sprintf(
				"heliosctl generate --kind sbm --nodes %d --avg-degree 8 --classes 8 --dim %d --seed 7 --out %s --quiet",
				s.nodes, s.dim, s.name))
	}
	force := make([]string, most)
	for i := range force {
		force[i] = fmt.Sprintf("HELIOS%d", i)
	}
	var first trained
	rows := 0
	for n := 1; n <= most; n++ {
		if n == 3 && most > 3 || n == 5 {
			continue // one, two, four, all
		}
		names := make([]string, n)
		for i := range names {
			names[i] = fmt.Sprintf("vfio%d", i)
		}
		use := "--ssds " + strings.Join(names, ",")
		// Each count with one of the shapes, all of them with all controllers.
		shapes := mixedShapes
		if n < most {
			shapes = shapes[(n-1)%4:][:1]
		}
		for _, s := range shapes {
			t.OK("root", fmt.Sprintf("heliosctl load %s --quiet %s --force %s", s.name, use,
				strings.Join(force[:n], ",")))
			t.OK("root", fmt.Sprintf("heliosctl verify %s --quiet %s", s.name, use))
			out := t.OK("root",
				fmt.Sprintf(
					"heliosctl bench io %s --ssds %s --io-stack async,sync --depth 64 --io-blocks 4 --threads 32 --seconds 0.3 --check-reads --quiet --json",
					s.name, strings.Join(names, ",")))
			for line := range strings.Lines(out) {
				var r benchRow
				if json.Unmarshal([]byte(line), &r) != nil || r.Kind != "" || r.Depth == 0 {
					continue
				}
				rows++
				if !r.Audited || r.Errors > 0 || r.SSDs != n {
					t.Errorf("%s on %d SSDs, %s: audited %v, %d errors: %s", s.name, n, r.Stack,
						r.Audited, r.Errors, r.AuditError)
				}
			}
			if s.name != "packed" { // arithmetic is slow here, and bench has read these rows
				continue
			}
			// One epoch: every row that it gathers is held against its checksum.
			got, err := lastTrained(t.OK("root",
				fmt.Sprintf(
					"heliosctl train %s %s --kernels generic --model sage --fanout 5,5 --batch-size 128 --hidden 16 --epochs 1 --seed 3 --gpu-cache 0 --cpu-cache 0 --check-reads --quiet --json",
					s.name, use)))
			if err != nil {
				t.Fatalf("train: %v", err)
			}
			if got.Epochs[0].RowsSSD == 0 {
				t.Errorf("%s on %d SSDs: no row came from an SSD", s.name, n)
			}
			if first.SHA == "" {
				first = got
			} else if d := first.same(got); d != "" {
				t.Errorf("1 and %d SSDs: %s", n, d)
			}
		}
	}
	if rows == 0 || first.SHA == "" {
		t.Errorf("%d rows of bench io, params %q: nothing was compared", rows, first.SHA)
	}
	t.OK("root", "heliosctl unbind-ssds --quiet")
	t.Notef(
		"%d rows of bench io, 1 to %d controllers, every row checked; params_sha256 %.16s… on any number of them",
		rows, most, first.SHA)
}
