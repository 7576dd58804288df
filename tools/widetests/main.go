// Command widetests prints the tests that have more cases under HELIOS_WIDE, as a pattern for
// go test -run: those of the given packages that use internal/wide, themselves or through what they
// call. The others do in "make test-wide" what they did in "make test", so it leaves them out.
//
//	go test -run "$(go run ./tools/widetests ./cache ./sched)" ./cache ./sched
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	pattern, err := pattern(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "widetests:", err)
		os.Exit(1)
	}
	fmt.Println(pattern)
}

// pattern matches the wide tests of the packages in the folders. A folder without any is an error:
// it is in a list that it does not belong into.
func pattern(dirs []string) (string, error) {
	var all []string
	for _, dir := range dirs {
		tests, err := wide(dir)
		if err != nil {
			return "", err
		}
		if len(tests) == 0 {
			return "", fmt.Errorf("no test of %s uses internal/wide", dir)
		}
		all = append(all, tests...)
	}
	slices.Sort(all)
	return "^(" + strings.Join(slices.Compact(all), "|") + ")$", nil
}

// wide finds the tests of a package that reach internal/wide. Functions, methods and variables of
// its test files are known by their names alone, so a test may be told too often, never too seldom.
func wide(dir string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	uses := map[string][]string{} // of a declared name: the names in its declaration
	reached := map[string]bool{}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		pkg := importName(f)
		note := func(declared string, n ast.Node) {
			ast.Inspect(n, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.SelectorExpr:
					if x, ok := n.X.(*ast.Ident); ok && pkg != "" && x.Name == pkg {
						reached[declared] = true
					}
				case *ast.Ident:
					uses[declared] = append(uses[declared], n.Name)
				}
				return true
			})
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				note(d.Name.Name, d)
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if v, ok := s.(*ast.ValueSpec); ok {
						for _, n := range v.Names {
							note(n.Name, v)
						}
					}
				}
			}
		}
	}
	for more := true; more; {
		more = false
		for name, used := range uses {
			if reached[name] {
				continue
			}
			if slices.ContainsFunc(used, func(u string) bool { return reached[u] }) {
				reached[name], more = true, true
			}
		}
	}
	var tests []string
	for name := range reached {
		if strings.HasPrefix(name, "Test") && name != "TestMain" {
			tests = append(tests, name)
		}
	}
	return tests, nil
}

// importName is the name that a file has internal/wide under, empty where it has not.
func importName(f *ast.File) string {
	for _, i := range f.Imports {
		if i.Path.Value == `"helios/internal/wide"` {
			if i.Name != nil {
				return i.Name.Name
			}
			return "wide"
		}
	}
	return ""
}
