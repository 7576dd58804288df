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

// aCommand is a whole command of heliosctl that a person copies: "heliosctl verify --ssds ssd0".
var aCommand = regexp.MustCompile(`\bheliosctl [a-z][^"]*`)

// flagsInLibraries are the files outside cmd whose strings may name flags, and why. Callers of a
// library have no flags: its messages name options by errs.Key, and the command line turns those
// into flags.
var flagsInLibraries = map[string]string{
	"internal/testing/fakecuda/build.go": "arguments of a C++ compiler",
	"internal/cli/completion.go":         "how shells ask urfave/cli for completions",
	"internal/faultinject/catalogue.go":  "the head of docs/reference/faults.md, a document for users",
}

// flagFree tells whether a file must not name flags: all of the program but its command line, and
// tools and examples, which are command lines themselves.
func flagFree(path string) bool {
	top, _, _ := strings.Cut(path, "/")
	return top != "cmd" && top != "tools" && top != "examples" &&
		!strings.HasSuffix(path, "_test.go")
}

// namesFlag tells whether a string names a flag outside a whole command.
func namesFlag(text string) bool {
	return namedFlag.MatchString(aCommand.ReplaceAllString(text, ""))
}

func TestLibrariesNameNoFlags(t *testing.T) {
	var found []string
	named := map[string]bool{}
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
			if !namesFlag(text) {
				return true
			}
			if named[s.path] = true; flagsInLibraries[s.path] == "" {
				found = append(found, s.at(b.Pos())+": "+b.Value)
			}
			return true
		})
	}
	report(t, found, "a library names an option by errs.Key, not by its flag")
	for path := range flagsInLibraries {
		if !named[path] {
			t.Errorf("%s names no flag any more: take it out of flagsInLibraries", path)
		}
	}
	for text, want := range map[string]bool{"give --memory SIZE": true, "--out x": true,
		"(--dim)": true, "a--b": false, "---": false, "option memory": false, "--": false,
		`run "heliosctl verify --ssds a"`: false, `"heliosctl load", then give --ssds`: true} {
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
