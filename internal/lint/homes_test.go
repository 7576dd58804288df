package lint

import (
	"go/ast"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// declarations mark the files that declare a model, a sampler, an I/O stack, a policy or a
// pipeline: its home, which is called so. Nobody else names it, tests and tools aside, which are
// command lines written down: others use the constants, or ask the list of the kind for a trait.
var declarations = []string{"= &Method{", "Stack = &Stack{", "= &Policy{", "= &Pipeline{",
	") Forward(c *ModelConfig"}

// homesIn returns what is declared in files, by path.
func homesIn(all []*source) map[string]string {
	homes := map[string]string{}
	for _, s := range all {
		if s.test || !slices.ContainsFunc(declarations,
			func(d string) bool { return strings.Contains(string(s.text), d) }) {
			continue
		}
		homes[s.path] = strings.TrimPrefix(strings.TrimSuffix(filepath.Base(s.path), ".go"),
			"pipeline_")
	}
	return homes
}

// plain is a name as files are called.
func plain(name string) string { return strings.ReplaceAll(name, "-", "") }

// ambiguous are names that also mean something else (a mode, a tier, a clock): of these only
// comparisons with what is called a stack, a sampler, a policy or a pipeline break the rule.
var ambiguous = map[string]bool{"sync": true, "cpu": true, "mmap": true, "random": true,
	"clock": true, "none": true, "deep": true, "series": true, "prefetch": true}

// strayName tells whether a file may not hold a literal; compared: it is compared with something of
// this name.
func strayName(homes map[string]string, path, literal, compared string) bool {
	for home, name := range homes {
		if plain(literal) != name || path == home {
			continue
		}
		compared = strings.ToLower(compared)
		if !ambiguous[name] || strings.Contains(compared, "stack") ||
			strings.Contains(compared, "sampler") || strings.Contains(compared, "policy") ||
			strings.Contains(compared, "pipeline") {
			return true
		}
	}
	return false
}

// lastName is the last identifier of an expression: IOStack of c.IOStack.
func lastName(e ast.Expr) string {
	switch x := e.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		return x.Sel.Name
	}
	return ""
}

// comparisons calls fn for each literal that stands alone or is compared, with the name of what it
// is compared with.
func comparisons(f *ast.File, fn func(b *ast.BasicLit, with string)) {
	with := map[*ast.BasicLit]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.BinaryExpr:
			for _, p := range [][2]ast.Expr{{x.X, x.Y}, {x.Y, x.X}} {
				if b, ok := p[0].(*ast.BasicLit); ok {
					with[b] = lastName(p[1])
				}
			}
		case *ast.SwitchStmt:
			for _, s := range x.Body.List {
				for _, e := range s.(*ast.CaseClause).List {
					if b, ok := e.(*ast.BasicLit); ok {
						with[b] = lastName(x.Tag)
					}
				}
			}
		case *ast.BasicLit:
			if x.Kind == token.STRING {
				fn(x, with[x])
			}
		}
		return true
	})
}

func TestNamesHaveAHome(t *testing.T) {
	var found []string
	named := map[string]bool{}
	homes := homesIn(sources(t))
	for _, s := range sources(t) {
		top, _, _ := strings.Cut(s.path, "/")
		if s.test || top == "tools" {
			continue
		}
		comparisons(s.file, func(b *ast.BasicLit, with string) {
			v, err := strconv.Unquote(b.Value)
			require.NoError(t, err)
			if plain(v) == homes[s.path] {
				named[s.path] = true
			}
			if strayName(homes, s.path, v, with) {
				found = append(found, s.at(b.Pos())+": "+b.Value)
			}
		})
	}
	report(t, found,
		"a model, a sampler, an I/O stack, a policy and a pipeline are named in their own file only; use the constant, or ask the list for a trait")
	for path := range homes {
		if !named[path] {
			t.Errorf(
				"%s does not name what it is called after",
				path)
		}
	}
	for _, c := range []struct {
		path, literal, with string
		stray               bool
	}{
		{"sched/engine.go", "async", "", true}, {"sched/engine.go", "cpu", "", false},
		{"sched/engine.go", "cpu", "IOStack", true},
		{"gpuio/cpu.go", "cpu", "stack", false}, {"cmd/heliosctl/train.go", "ladies", "", true},
		{"sched/engine.go", "clock", "Policy", true},
		{"sched/engine.go", "clock", "mode", false},
		{"sched/engine.go", "deep", "Pipeline", true}, {"sched/engine.go", "none", "Norm", false},
		{"sched/engine.go", "run-ahead", "", true}, {"gnn/sage.go", "gcn", "", true},
	} {
		if strayName(homes, c.path, c.literal, c.with) != c.stray {
			t.Errorf("the rule on %+v is wrong", c)
		}
	}
}
