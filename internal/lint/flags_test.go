package lint

import (
	"go/ast"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// namedFlag is a flag of a command line in a text: --cache, but not the a--b of a name.
var namedFlag = regexp.MustCompile(`(^|[^-\w])--[a-z]`)

// aCommand is a whole command of heliosctl that a person copies: "heliosctl verify --ssds ssd0".
var aCommand = regexp.MustCompile(`\bheliosctl [a-z][^"]*`)

// flagsInLibraries are the files outside cmd whose strings may name flags, and why. Callers of a
// library have no flags: its messages name options by their keys (errs.Text), which the command
// line spells as flags.
var flagsInLibraries = map[string]string{
	"internal/testing/fakecuda/build.go": "arguments of a C++ compiler",
}

// flagFree reports whether a file must not name flags: all of the program but its command line, and
// tools and examples, which are command lines themselves.
func flagFree(path string) bool {
	top, _, _ := strings.Cut(path, "/")
	return top != "cmd" && top != "tools" && top != "examples" &&
		!strings.HasSuffix(path, "_test.go")
}

// namesFlag reports whether a string names a flag outside a whole command.
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
			require.NoError(t, err)
			if !namesFlag(text) {
				return true
			}
			if named[s.path] = true; flagsInLibraries[s.path] == "" {
				found = append(found, s.at(b.Pos())+": "+b.Value)
			}
			return true
		})
	}
	report(t, found, "a library names an option as {option} (errs.Text), not by its flag")
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

// declaredOptions returns the names of all options, from the tags of structs, with those that they
// had before.
func declaredOptions(t *testing.T) []string {
	var names []string
	for _, s := range sources(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			if f, is := n.(*ast.Field); is && f.Tag != nil && !s.test {
				tag := reflect.StructTag(strings.Trim(f.Tag.Value, "`"))
				names = append(names, tag.Get("option"))
				names = append(names, strings.Split(tag.Get("also"), ",")...)
			}
			return true
		})
	}
	return names
}

// spelledOption is an option that a text spells out.
var spelledOption = regexp.MustCompile(`\boption ([a-z][a-z0-9-]*)`)

// wrongOption returns a fault of a library's text: an option that is spelled out, a key that no
// option has, or a whole command with a verb or flag that does not exist.
func wrongOption(text string, options, verbs []string) string {
	for _, m := range spelledOption.FindAllStringSubmatch(text, -1) {
		if slices.Contains(options, m[1]) && m[1] != "in" && m[1] != "out" {
			return "write {" + m[1] + "} in a format of errs"
		}
	}
	fault := ""
	errs.Braces(text, func(name string) string {
		if !strings.HasPrefix(name, "@") &&
			!slices.Contains(options, strings.TrimPrefix(name, "no-")) {
			fault = "no option is called " + name
		}
		return ""
	})
	for _, command := range aCommand.FindAllString(text, -1) {
		verb := strings.Fields(command)[1]
		if verb == "vfio-setup" {
			continue // a script, with flags of its own
		}
		if strings.Contains(text, `"`+command) && !slices.Contains(verbs, verb) {
			fault = "there is no verb " + verb
		}
		for _, flag := range namedFlag.FindAllString(command, -1) {
			start := strings.Index(command, flag) + len(flag) - 1
			name := strings.FieldsFunc(command[start:], func(r rune) bool {
				return r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9')
			})[0]
			if !slices.Contains(options, name) {
				fault = "no option is called " + name
			}
		}
	}
	return fault
}

// Texts of libraries name options that exist, so that every front end can spell them.
func TestTextsNameOptions(t *testing.T) {
	options := declaredOptions(t)
	var verbs []string
	pages, err := os.ReadDir("../../docs/reference/verbs")
	require.NoError(t, err)
	for _, p := range pages {
		verbs = append(verbs, strings.TrimSuffix(p.Name(), ".md"))
	}
	var found []string
	for _, s := range sources(t) {
		if !flagFree(s.path) || s.dir == "internal/errs" {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if b, is := n.(*ast.BasicLit); is && b.Kind == token.STRING {
				text, _ := strconv.Unquote(b.Value)
				if fault := wrongOption(text, options, verbs); fault != "" {
					found = append(found, s.at(b.Pos())+": "+b.Value+": "+fault)
				}
			}
			return true
		})
	}
	report(t, found, "a text names an option as {its-name}")
	for text, want := range map[string]bool{"give {gpu-cache} 0": false, "give {gpu-cash} 0": true,
		"option gpu-cache 0": true, "a b {} {A} option x": false, "run \"heliosctl verify --ssds a\"": false,
		"heliosctl verify --ssds a": false, `run "heliosctl verity"`: true, "run \"heliosctl verify --sds a\"": true} {
		if got := wrongOption(text, options, verbs); (got != "") != want {
			t.Errorf("the rule on %q: %q", text, got)
		}
	}
}
