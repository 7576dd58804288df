package lint

import (
	"go/ast"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// namedFlag is a flag of a command line in a text: --cache, but not the a--b of a name.
var namedFlag = regexp.MustCompile(`(^|[^-\w])--[a-z]`)

// flagsInLibraries are the folders outside cmd whose strings still name flags, and how many do.
// Callers of a library have no flags: its messages name options by errs.Key, and the command line
// turns those into flags. Most of those below are whole commands to run, or arguments for another
// program. Numbers here only fall.
var flagsInLibraries = map[string]int{
	"cache/policy":           1,
	"cuda/driver":            13,
	"cuda/fakecuda":          4,
	"dataset":                1,
	"dataset/seal":           1,
	"dataset/stripe":         6,
	"gnn":                    2,
	"gpuio":                  1,
	"internal/bench/compute": 3,
	"internal/cli":           1,
	"internal/faultinject":   6,
	"internal/openblas":      3,
	"internal/simd":          2,
	"internal/state":         9,
	"internal/vfio":          1,
	"nvme":                   4,
	"sched":                  31,
	"sched/checkpoint":       3,
	"sched/prepare":          3,
	"sched/virtual":          5,
}

// flagFree tells whether a file must not name flags: all of the program but its command line, and
// tools and examples, which are command lines themselves.
func flagFree(path string) bool {
	top, _, _ := strings.Cut(path, "/")
	return top != "cmd" && top != "tools" && top != "examples" &&
		!strings.HasSuffix(path, "_test.go")
}

// namesFlag tells whether a string names a flag.
func namesFlag(text string) bool { return namedFlag.MatchString(text) }

func TestLibrariesNameNoFlags(t *testing.T) {
	named := map[string][]string{}
	for _, s := range sources(t) {
		if !flagFree(s.path) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			b, ok := n.(*ast.BasicLit)
			if !ok || b.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(b.Value)
			if err != nil {
				t.Fatal(err)
			}
			if namesFlag(text) {
				named[s.dir] = append(named[s.dir], s.at(b.Pos())+": "+b.Value)
			}
			return true
		})
	}
	var found []string
	for dir, strings := range named {
		if len(strings) > flagsInLibraries[dir] {
			found = append(found, strings...)
		}
	}
	report(t, found, "a library names an option by errs.Key, not by its flag")
	for dir, most := range flagsInLibraries {
		if n := len(named[dir]); n < most {
			t.Errorf("%s names %d flags, flagsInLibraries says %d: lower the number there", dir, n,
				most)
		}
	}
	for text, want := range map[string]bool{"give --memory SIZE": true, "--out x": true,
		"(--dim)": true, "a--b": false, "---": false, "option memory": false, "--": false} {
		if namesFlag(text) != want {
			t.Errorf("the rule on %q is not %v", text, want)
		}
	}
	for path, want := range map[string]bool{"dataset/x.go": true, "internal/cli/x.go": true,
		"cmd/heliosctl/x.go": false, "tools/x/main.go": false, "sched/x_test.go": false} {
		if flagFree(path) != want {
			t.Errorf("the rule on %s is not %v", path, want)
		}
	}
}
