// Package lint holds the house rules that .golangci.yml cannot express, as tests.
package lint

import (
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
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// source is one Go file of the module.
type source struct {
	path string // from the module's root, with slashes
	dir  string
	test bool
	text []byte
	file *ast.File
	fset *token.FileSet
}

func (s *source) at(p token.Pos) string {
	return fmt.Sprintf("%s:%d", s.path, s.fset.Position(p).Line)
}

// sources returns every Go file of the module, whatever its build tags.
func sources(t *testing.T) []*source {
	t.Helper()
	out, err := parsed()
	require.NoError(t, err)
	if len(out) < 10 {
		t.Fatalf("found only %d Go files", len(out))
	}
	return out
}

// parsed parses them, once for all tests.
var parsed = sync.OnceValues(func() (out []*source, err error) {
	root := "../.."
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		return nil, fmt.Errorf("module root: %w", err)
	}
	fset := token.NewFileSet()
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if p != root && (strings.HasPrefix(name, ".") || name == "bin" || name == "demo-out" ||
				name == "results" || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(fset, p, text, parser.ParseComments)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		out = append(out, &source{rel, path.Dir(rel), strings.HasSuffix(name, "_test.go"), text,
			f, fset})
		return nil
	})
	return out, err
})

func report(t *testing.T, found []string, rule string) {
	t.Helper()
	slices.Sort(found)
	for _, f := range found {
		t.Errorf("%s: %s", f, rule)
	}
}

// library reports whether a file belongs to a package of the product that is no command.
func library(s *source) bool {
	top, _, _ := strings.Cut(s.dir, "/")
	return top != "cmd" && top != "tools" && top != "examples" && !s.test
}

func selector(e ast.Expr) string {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	x, ok := sel.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return x.Name + "." + sel.Sel.Name
}

// A panic is for a mistake in the program, with a text that says which. An error is returned.
func TestNoPanicsForErrors(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		if !library(s) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			c, ok := n.(*ast.CallExpr)
			if !ok || len(c.Args) != 1 {
				return true
			}
			if id, ok := c.Fun.(*ast.Ident); !ok || id.Name != "panic" {
				return true
			}
			bad := false
			switch a := c.Args[0].(type) {
			case *ast.Ident:
				bad = strings.HasPrefix(strings.ToLower(a.Name), "err")
			case *ast.CallExpr:
				name := selector(a.Fun)
				bad = name == "fmt.Errorf" || strings.HasPrefix(name, "errors.") ||
					strings.HasPrefix(name, "errs.") || strings.HasSuffix(name, ".Error")
			}
			if bad {
				found = append(found, s.at(c.Pos()))
			}
			return true
		})
	}
	report(t, found, "panic with an error; return it")
}

// texts returns the other files that people read and edit: C++, scripts, documents.
func texts(t *testing.T) map[string][]byte {
	t.Helper()
	root, out := "../..", map[string][]byte{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if name == ".git" || name == "bin" || name == "demo-out" || name == "results" ||
				name == "testdata" {
				return filepath.SkipDir
			}
			return nil
		}
		if !slices.Contains([]string{".sh", ".py", ".cu", ".h", ".cc", ".cpp", ".md", ".ptx", ".txt"},
			filepath.Ext(name)) && name != "Makefile" && name != "run" {
			return nil
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		out[filepath.ToSlash(rel)], err = os.ReadFile(p)
		return err
	})
	require.NoError(t, err)
	if len(out) < 10 {
		t.Fatalf("found only %d texts under %s", len(out), root)
	}
	return out
}

// A machine's own paths do not belong in the repository.
func TestNoMachinePaths(t *testing.T) {
	var found []string
	all := texts(t)
	for _, s := range sources(t) {
		all[s.path] = s.text
	}
	bad := []string{"/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/"}
	for path, text := range all {
		for i, line := range strings.Split(string(text), "\n") {
			for _, b := range bad {
				if strings.Contains(line, b) {
					found = append(found, fmt.Sprintf("%s:%d: %s", path, i+1, b))
				}
			}
		}
	}
	report(t, found, "path of somebody's machine")
}

// C++ files that lie in a folder of Go files stop every build with cgo off ("C++ source files not
// allowed"), and are compiled behind our back with cgo on.
func TestNoStrayC(t *testing.T) {
	var found []string
	packages := map[string]bool{}
	for _, s := range sources(t) {
		packages[s.dir] = true
	}
	for path := range texts(t) {
		if e := filepath.Ext(path); (e == ".cc" || e == ".cpp") &&
			packages[filepath.ToSlash(filepath.Dir(path))] {
			found = append(found, path)
		}
	}
	report(t, found, "C++ source in the folder of a Go package; use a folder of its own")
}
