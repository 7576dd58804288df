// Command usersof prints arguments for go test that run the tests that use a package of internal,
// themselves or through what they call, and no others: a pattern of their names, and their folders.
// With internal/testing/wide these are the tests that have more cases under HELIOS_WIDE.
//
//	go test $(bin/lab/usersof [-not FOLDERS] testing/wide)
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	not := flag.String("not", "", "leave out the tests below `FOLDERS`, divided by commas")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: usersof [-not FOLDERS] PACKAGE")
		os.Exit(2)
	}
	args, err := arguments(".", "helios/internal/"+flag.Arg(0), *not)
	if err != nil {
		fmt.Fprintln(os.Stderr, "usersof:", err)
		os.Exit(1)
	}
	fmt.Println(strings.Join(args, " "))
}

// arguments returns "-run", a pattern of the tests of the module in root, and their folders.
func arguments(root, pkg, not string) ([]string, error) {
	var all, dirs []string
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		_, module := os.Stat(filepath.Join(name, "go.mod"))
		skip := slices.Contains(strings.Split(not, ","), rel)
		if skip || rel != "." && (strings.HasPrefix(rel, ".") || module == nil) {
			return filepath.SkipDir
		}
		tests, err := users(name, pkg)
		if len(tests) > 0 {
			all, dirs = append(all, tests...), append(dirs, "./"+filepath.ToSlash(rel))
		}
		return err
	})
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("no test uses %s", pkg)
	}
	slices.Sort(all)
	return append([]string{"-run", "^(" + strings.Join(slices.Compact(all), "|") + ")$"}, dirs...), err
}

// users finds the tests in a folder that reach a package. Functions, methods and variables of
// its test files are known by their names alone, so a test may be named in vain, never left out.
func users(dir, target string) ([]string, error) {
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
		pkg := importName(f, target)
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

// importName is the name that a file has a package under, empty where it has not.
func importName(f *ast.File, pkg string) string {
	for _, i := range f.Imports {
		if i.Path.Value == `"`+pkg+`"` {
			if i.Name != nil {
				return i.Name.Name
			}
			return path.Base(pkg)
		}
	}
	return ""
}
