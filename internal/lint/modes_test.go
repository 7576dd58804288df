package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A mode's system has a folder of sched/tiers, whose plan.go has a constant for the mode's name.
var modeFile = regexp.MustCompile(`^sched/tiers/[a-z0-9]+/plan\.go$`)

// sharedNames are modes' names that mean something else as well: the project, I/O stacks, a format.
// Of them only the constants and comparisons are held against the rule.
var sharedNames = map[string]bool{"helios": true, "cpu": true, "mmap": true,
	"ginex": true, "diskgnn": true}

// modeRoom reports whether a file may not name a mode: all but a system's own folder, the machine's
// choice among modes, tests, tools and examples.
func modeRoom(path string) bool {
	for _, free := range []string{"tools/", "examples/", "sched/choose.go"} {
		if strings.HasPrefix(path, free) {
			return false
		}
	}
	return !strings.HasPrefix(path, "sched/tiers/") && !strings.HasSuffix(path, "_test.go")
}

// strayMode returns the text that names a mode (a literal or a constant of modes) in a node of a
// file that may not; "": none does.
func strayMode(n ast.Node, modes map[string]bool) string {
	switch n := n.(type) {
	case *ast.Ident:
		if strings.HasPrefix(n.Name, "Mode") && modes[n.Name] {
			return n.Name
		}
	case *ast.BasicLit:
		if v, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil && modes[v] &&
			!sharedNames[v] {
			return n.Value
		}
	case *ast.BinaryExpr:
		if n.Op != token.EQL && n.Op != token.NEQ {
			return ""
		}
		for _, side := range [][2]ast.Expr{{n.X, n.Y}, {n.Y, n.X}} {
			sel, ok := side[0].(*ast.SelectorExpr)
			lit, is := side[1].(*ast.BasicLit)
			if ok && is && sel.Sel.Name == "Mode" && lit.Value != `""` {
				return "a comparison with .Mode"
			}
		}
	case *ast.SwitchStmt:
		if sel, ok := n.Tag.(*ast.SelectorExpr); ok && sel.Sel.Name == "Mode" &&
			len(n.Body.List) > 0 {
			if first, ok := n.Body.List[0].(*ast.CaseClause); ok && len(first.List) > 0 {
				if lit, ok := first.List[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					return "a switch over .Mode"
				}
			}
		}
	}
	return ""
}

// A mode is named in its system's folder only: what differs by mode asks the registry.
func TestModesHaveOneHome(t *testing.T) {
	modes := map[string]bool{}
	for _, s := range sources(t) {
		if !modeFile.MatchString(s.path) {
			continue
		}
		for _, o := range s.file.Scope.Objects {
			name, is := strings.CutPrefix(o.Name, "Mode")
			if o.Kind == ast.Con && is {
				modes[o.Name], modes[strings.ToLower(name)] = true, true
			}
		}
	}
	if len(modes) < 12 {
		t.Fatalf("only %d names and constants of modes", len(modes))
	}
	var found []string
	for _, s := range sources(t) {
		if !modeRoom(s.path) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if what := strayMode(n, modes); what != "" {
				found = append(found, s.at(n.Pos())+": "+what)
			}
			return true
		})
	}
	report(t, found,
		"a mode is named in its system's folder only; use tiers.Catalog or plan.DefaultMode")
	for code, want := range map[string]bool{
		`m == dynamic.ModeGIDS`: true, `c.Mode == "cpu"`: true, `x := "inmem"`: true,
		`switch c.Mode { case "mmap": }`: true, `c.Mode == ""`: false, `s == "cpu"`: false,
		`c.Mode == v.Mode`: false,
	} {
		got := false
		ast.Inspect(statement(t, code), func(n ast.Node) bool {
			got = got || strayMode(n, modes) != ""
			return true
		})
		if got != want {
			t.Errorf("%s: the rule says %v", code, got)
		}
	}
}

// statement parses code as the body of a function.
func statement(t *testing.T, code string) ast.Node {
	t.Helper()
	if strings.Contains(code, "==") && !strings.HasPrefix(code, "switch") {
		code = "_ = " + code
	}
	f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nfunc f() {\n"+code+"\n}", 0)
	require.NoError(t, err)
	return f
}
