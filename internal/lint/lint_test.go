// Package lint holds the house rules that a compiler does not check, as tests: which package may
// import which, who may end the process or print, which modules we depend on, that the code is
// formatted and that every exported name says what it is.
package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
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
	if err != nil {
		t.Fatal(err)
	}
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

// layers says, for each top-level folder, which others its packages may import.
// A folder may always import itself and internal.
var layers = map[string][]string{
	"internal": {},
	"nvme":     {},
	"cuda":     {},
	"gpuio":    {"nvme", "cuda"},
	"graph":    {"cuda"},
	"gnn":      {"cuda", "graph"}, // the mini-batch type
	"cache":    {"cuda"},
	"dataset":  {"gpuio", "nvme", "cuda", "graph"}, // loads and verifies; the topology type
	"sched":    {"gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
	".":        {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"}, // the façade
	"cmd":      {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
	"tools":    {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
	"examples": {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
}

// testSupport are packages that only tests, tools and each other may import, and what of the layers
// they need themselves: a workload that compares two devices sits on top of what it runs.
var testSupport = map[string][]string{
	"cuda/difftest": {"cache", "graph", "gnn", "gpuio", "nvme", "dataset"},
	"cuda/fakecuda": {},
	// a dataset for the tests of the programs beside it
	"examples/internal/generated": {},
	// a machine of files for the tests of pci, diskuse and the verbs
	"internal/pci/fakesys": {},
	// what the tests of datasets share
	"dataset/datasettest": {},
	// published data sets, where a machine has them
	"internal/realdata": {},
	// leak checks, folders in memory and queue pairs driven by hand
	"internal/testrig": {"nvme"},
	// the split between make test and make test-wide
	"internal/wide": {},
}

// upper are packages below internal that sit on the layers: those that each may import. Only cmd,
// tools, tests and each other may import them.
var upper = map[string][]string{
	"internal/bound": {"dataset", "gpuio", "nvme"},
	"internal/bench": {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
	"internal/cli":   {"sched", "gnn", "cache", "graph", "dataset", "gpuio", "nvme", "cuda"},
}

// upperRoom is the entry of upper that a package belongs to, or "".
func upperRoom(dir string) string {
	for room := range upper {
		if dir == room || strings.HasPrefix(dir, room+"/") {
			return room
		}
	}
	return ""
}

// importBreach says why a package of folder from may not import path, or "".
func importBreach(from, imported string, test bool) string {
	rest, ok := strings.CutPrefix(imported, "helios/")
	if !ok {
		return ""
	}
	top, _, _ := strings.Cut(from, "/")
	to, _, _ := strings.Cut(rest, "/")
	allowed, ok := layers[top]
	room := upperRoom(from)
	if room != "" {
		allowed = upper[room]
	}
	if used := upperRoom(rest); used != "" && used != room && room == "" && top != "cmd" &&
		top != "tools" && top != "." && !test {
		return from + " may not import " + rest + ", which sits above it"
	}
	if !ok {
		return "folder " + top + " has no place in the import order; give it one in internal/lint"
	}
	if _, support := testSupport[rest]; support && !test && top != "tools" &&
		testSupport[from] == nil {
		return from + " is part of the program and may not import test support " + rest
	}
	if slices.Contains(testSupport[from], to) {
		return ""
	}
	if to == top || to == "internal" && top != "internal" || slices.Contains(allowed, to) {
		return ""
	}
	// A test may also build what its package gets from outside, as long as that lies below it:
	// a proxied SSD under cache's tests, for example. nvme and cuda stay strangers even there.
	if test && (top == "graph" || top == "gnn" || top == "cache") &&
		slices.Contains([]string{"nvme", "gpuio", "cuda"}, to) {
		return ""
	}
	return top + " may not import " + to + " (see the order in internal/lint)"
}

func TestImportDirection(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if why := importBreach(s.dir, p, s.test); why != "" {
				found = append(found, s.at(i.Pos())+": "+why)
			}
		}
	}
	report(t, found, "import direction")
}

func TestImportRuleItself(t *testing.T) {
	for _, c := range []struct {
		from, to string
		test, ok bool
	}{
		{"nvme/proxy", "helios/nvme", false, true}, {"nvme/proxy", "helios/internal/iouring",
			false, true},
		{"nvme", "helios/cuda", true, false}, {"cuda", "helios/nvme", true, false},
		{"gnn", "helios/graph", false, true}, {"cache", "helios/graph", false, false},
		{"cache", "helios/gpuio", false, false},
		{"cache", "helios/gpuio", true, true}, {"dataset", "helios/gpuio", false, true},
		{"graph", "helios/dataset", true, false},
		{"internal/ui", "helios/internal/units", false, true}, {"internal/ui", "helios/nvme",
			true, false},
		{"sched", "helios/cmd/heliosctl", true, false}, {"cmd/heliosctl", "helios/sched",
			false, true},
		{"cuda/driver", "helios/cuda/kernels", false, true}, {"cuda/driver", "helios/internal/errs",
			false, true},
		{"cuda/driver", "helios/gpuio", true, false}, {"cuda/driver", "helios/cuda/fakecuda",
			true, true},
		{"cuda/driver", "helios/cuda/fakecuda", false, false},
		{"cmd/heliosctl", "helios/cuda/difftest", false, false},
		{"cuda/difftest", "helios/graph", false, true}, {"cuda/difftest", "helios/cuda/fakecuda",
			false, true},
		{"cuda/fakecuda", "helios/graph", true, false}, {"gpuio", "helios/cuda/difftest",
			true, true},
		{"tools/gputier", "helios/cuda/fakecuda", false, true},
		{"internal/bench/compute", "helios/gnn", false, true},
		{"internal/cli", "helios/internal/bench", false, true},
		{"gnn", "helios/internal/bench", false, false}, {"internal/ui", "helios/internal/cli",
			false, false},
		{"cmd/heliosctl", "helios/internal/bench/cache", false, true},
		{"internal/bench", "helios/cmd/heliosctl", false, false},
		{"newroom", "helios/nvme", false, false}, {"nvme", "fmt", false, true},
	} {
		if got := importBreach(c.from, c.to, c.test) == ""; got != c.ok {
			t.Errorf("%s imports %s (test %v): allowed %v, want %v", c.from, c.to, c.test,
				got, c.ok)
		}
	}
}

// modules are the third-party modules that we chose; a new one is a decision, not an accident.
var modules = []string{
	"github.com/ebitengine/purego",
	"github.com/google/uuid",
	"github.com/klauspost/cpuid/v2",
	"github.com/mmcloughlin/avo", // generators of internal/simd only
	"github.com/pierrec/lz4/v4",
	"github.com/jedib0t/go-pretty/v6",
	"github.com/santhosh-tekuri/jsonschema/v6",
	"github.com/stretchr/testify",
	"github.com/therootcompany/xz", // reads; takes a limit for the dictionary
	"github.com/urfave/cli/v2",
	"go.yaml.in/yaml/v3",
	"golang.org/x/sync",
	"golang.org/x/sys",
	"gorgonia.org/cu", // behind the build tag gorgonia only
}

// cgoFiles use cgo, behind a build tag that the default build does not set.
var cgoFiles = []string{"cuda/driver/gorgonia.go"}

// What needs cgo or the CUDA headers stays behind its tag.
func TestCgoBehindTag(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			if i.Path.Value != `"C"` && !strings.HasPrefix(i.Path.Value, `"gorgonia.org/cu`) {
				continue
			}
			head, _, _ := bytes.Cut(s.text, []byte("\npackage "))
			if !bytes.HasPrefix(head, []byte("//go:build ")) ||
				!bytes.Contains(bytes.SplitN(head, []byte("\n"), 2)[0], []byte("gorgonia")) {
				found = append(found, s.at(i.Pos())+": "+i.Path.Value)
			}
		}
	}
	report(t, found, "needs the build tag gorgonia")
}

func TestThirdPartyModules(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			first, _, _ := strings.Cut(p, "/")
			if !strings.Contains(first, ".") { // the standard library, or ours
				if p == "C" && !slices.Contains(cgoFiles, s.path) {
					found = append(found, s.at(i.Pos())+": cgo; the build is CGO_ENABLED=0")
				}
				continue
			}
			if !slices.ContainsFunc(modules,
				func(m string) bool { return p == m || strings.HasPrefix(p, m+"/") }) {
				found = append(found, s.at(i.Pos())+": "+p)
			}
		}
	}
	report(t, found, "third-party package that nobody chose")
}

// library says whether a file belongs to a package that must neither end the process nor print.
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

func TestLibrariesNeitherExitNorPrint(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		if !library(s) {
			continue
		}
		// A variable may be called log; the package counts where it is imported.
		logs := slices.ContainsFunc(s.file.Imports,
			func(
				i *ast.ImportSpec) bool {
				return i.Path.Value == `"log"` || i.Path.Value == `"log/slog"`
			})
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				switch name := selector(n); {
				case name == "os.Exit", name == "syscall.Exit", name == "unix.Exit",
					name == "runtime.Goexit",
					logs && (strings.HasPrefix(name, "log.") || strings.HasPrefix(name, "slog.")),
					name == "os.Stdout", name == "os.Stderr",
					name == "fmt.Print", name == "fmt.Printf", name == "fmt.Println":
					found = append(found, s.at(n.Pos())+": "+name)
				}
			case *ast.CallExpr:
				if id, ok := n.Fun.(*ast.Ident); ok &&
					(id.Name == "print" || id.Name == "println") && id.Obj == nil {
					found = append(found, s.at(n.Pos())+": "+id.Name)
				}
			}
			return true
		})
	}
	report(t, found, "only cmd, tools and examples end the process or print")
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

func TestGofmt(t *testing.T) {
	var found []string
	for _, s := range sources(t) {
		want, err := format.Source(s.text)
		if err != nil {
			t.Fatalf("%s: %v", s.path, err)
		}
		if !bytes.Equal(want, s.text) {
			found = append(found, s.path)
		}
	}
	report(t, found, "not formatted; run gofmt -w")
}

// wellKnown are methods whose meaning their interface fixes.
var wellKnown = []string{"Error", "Unwrap", "Is", "As", "String", "MarshalJSON", "UnmarshalJSON",
	"MarshalText", "UnmarshalText", "MarshalYAML", "UnmarshalYAML", "Len", "Less", "Swap"}

func TestExportedNamesAreDocumented(t *testing.T) {
	var found []string
	packages := map[string]bool{} // folder → has a package comment
	for _, s := range sources(t) {
		if s.test {
			if s.file.Doc != nil && strings.HasSuffix(s.dir, "lint") {
				packages[s.dir] = true
			}
			continue
		}
		packages[s.dir] = packages[s.dir] || s.file.Doc != nil
		if s.file.Name.Name == "main" {
			continue
		}
		add := func(p token.Pos, name string) { found = append(found, s.at(p)+": "+name) }
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if !d.Name.IsExported() || d.Doc.Text() != "" {
					continue
				}
				if d.Recv != nil {
					if !ast.IsExported(receiver(d.Recv.List[0].Type)) ||
						slices.Contains(wellKnown, d.Name.Name) {
						continue
					}
				}
				add(d.Pos(), d.Name.Name)
			case *ast.GenDecl:
				if len(d.Specs) == 0 {
					continue
				}
				// An enumeration's members are explained by its type.
				enum := false
				if first, ok := d.Specs[0].(*ast.ValueSpec); ok && d.Tok == token.CONST {
					enum = first.Type != nil
				}
				for _, sp := range d.Specs {
					switch sp := sp.(type) {
					case *ast.TypeSpec:
						if sp.Name.IsExported() && d.Doc.Text() == "" && sp.Doc.Text() == "" &&
							sp.Comment.Text() == "" {
							add(sp.Pos(), sp.Name.Name)
						}
					case *ast.ValueSpec:
						// One comment may serve a whole group.
						if enum || d.Doc.Text() != "" || sp.Doc.Text() != "" ||
							sp.Comment.Text() != "" {
							continue
						}
						for _, n := range sp.Names {
							if n.IsExported() {
								add(n.Pos(), n.Name)
							}
						}
					}
				}
			}
		}
	}
	for dir, ok := range packages {
		if !ok {
			found = append(found, dir+": package comment")
		}
	}
	report(t, found, "exported name without a comment")
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
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
		if !slices.Contains([]string{".sh", ".cu", ".h", ".cc", ".cpp", ".md", ".ptx", ".txt"},
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
	if err != nil {
		t.Fatal(err)
	}
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
