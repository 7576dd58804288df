package lint

import (
	"go/ast"
	"testing"
)

// creators make or replace files. What a verb leaves is made by internal/outfile, which refuses
// what is there.
var creators = map[string]bool{
	"os.Create": true, "os.CreateTemp": true, "os.WriteFile": true, "os.Rename": true,
	"os.OpenFile": true, "os.Link": true, "os.Truncate": true,
	"ioutil.WriteFile": true, "ioutil.TempFile": true, "unix.Open": true, "unix.Rename": true,
	"syscall.Open": true,
}

// elsewhere are functions of cmd that make a file which is no output, or open one that is there,
// and why.
var elsewhere = map[string]string{
	"cmd/heliosctl/doctor.go":  "a file in a temporary folder that goes with it",
	"cmd/heliosctl/machine.go": "device nodes, which are there",
	"cmd/heliosctl/bind.go":    "a block device, which is there, opened to see whether it is in use",
	"cmd/heliosctl/ranks.go":   "the file of the secret, which is there, perhaps a pipe",
}

// Verbs make their outputs with internal/outfile.
func TestVerbsMakeFilesByOneRule(t *testing.T) {
	var found []string
	used := map[string]bool{}
	for _, s := range sources(t) {
		if s.dir != "cmd/heliosctl" || s.test {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if e, ok := n.(*ast.SelectorExpr); ok && creators[selector(e)] {
				if used[s.path] = true; elsewhere[s.path] == "" {
					found = append(found, s.at(e.Pos())+": "+selector(e))
				}
			}
			return true
		})
	}
	report(t, found,
		"makes a file; use the env's outputs (internal/outfile), or say in internal/lint why not")
	for path := range elsewhere {
		if !used[path] {
			t.Errorf("%s makes no file any more; take it out of the list", path)
		}
	}
}
