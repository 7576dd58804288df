package lint

import (
	"path"
	"slices"
	"strings"
	"testing"
)

// below lists the rooms that a room imports, beside internal.
var below = map[string]string{
	"internal": "",
	"nvme":     "",
	"cuda":     "",
	"gpuio":    "nvme cuda",
	"graph":    "cuda",
	"cache":    "cuda",
	"gnn":      "cuda graph",
	"dataset":  "cuda graph nvme gpuio",
	"sched":    "cuda graph nvme gpuio cache gnn dataset",
}

const (
	above    = ". cmd tools examples"               // the rooms that import any other
	frames   = "internal/bound internal/cli"        // packages that stand above the rooms
	support  = "internal/testing examples/internal" // packages for tests only
	testSSDs = "nvme gpuio"                         // a room with a device tests it on software SSDs, too
)

// within reports whether a folder is one of a list, or below one.
func within(dir, list string) bool {
	return slices.ContainsFunc(strings.Fields(list), func(d string) bool {
		return dir == d || strings.HasPrefix(dir, d+"/")
	})
}

// mayImport reports whether a file of folder dir may import package p.
func mayImport(dir, p string, test bool) bool {
	top, _, _ := strings.Cut(dir, "/")
	down, known := below[top]
	switch {
	case !test && within(p, support):
		return within(dir, "tools "+support)
	case within(dir, above) || within(dir, frames+" "+support) || test && top == "internal":
		return true
	case !test && within(p, frames):
		return false
	case test && within("cuda", down):
		down += " " + testSSDs
	}
	return known && within(p, top+" internal "+down)
}

func TestImportsPointDown(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			p, ours := strings.CutPrefix(strings.Trim(i.Path.Value, `"`)+"/", "helios/")
			if p = path.Clean(p); ours && !mayImport(s.dir, p, s.test) {
				found = append(found, s.at(i.Pos())+": "+p)
			}
		}
	}
	report(t, found, "imports point down")
	for _, c := range []struct {
		dir, p     string
		test, want bool
	}{
		{"nvme", "cuda", false, false}, {"cuda/driver", "nvme", true, false},
		{"gnn", "gpuio", false, false}, {"gnn", "gpuio", true, true}, {"gnn", "cache", true, false},
		{"internal/errs", "nvme", false, false}, {"internal/bound", "gpuio", false, true},
		{"sched/walk", "internal/cli", false, false}, {"sched", ".", true, false},
		{"cmd/heliosctl", "internal/testing/wide", false, false}, {"newroom", "cuda", false, false},
	} {
		if mayImport(c.dir, c.p, c.test) != c.want {
			t.Errorf("the rule on %s, which imports %s, is not %v", c.dir, c.p, c.want)
		}
	}
}
