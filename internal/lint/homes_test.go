package lint

import (
	"go/ast"
	"go/token"
	"strconv"
	"strings"
	"testing"
)

// homes are the files that may name a sampler, an I/O stack, a policy or a pipeline, each its own.
// Tests and tools, which are command lines written down, may name all of them; everybody else uses
// the constants, or asks the registry for a trait.
var homes = map[string]string{
	"graph/neighbor.go": "neighbor", "graph/ladies.go": "ladies",
	"graph/labor.go": "labor",
	"gpuio/async.go": "async", "gpuio/sync.go": "sync", "gpuio/cpu.go": "cpu",
	"gpuio/mmap.go":          "mmap",
	"cache/policy/random.go": "random", "cache/policy/lru.go": "lru",
	"cache/policy/clock.go": "clock",
	"cache/policy/sieve.go": "sieve", "cache/policy/s3fifo.go": "s3fifo",
	"cache/policy/belady.go":          "belady",
	"sched/plan/pipeline_deep.go":     "deep",
	"sched/plan/pipeline_intra.go":    "intra",
	"sched/plan/pipeline_none.go":     "none",
	"sched/plan/pipeline_prefetch.go": "prefetch",
	"sched/plan/pipeline_series.go":   "series",
	"sched/plan/pipeline_runahead.go": "run-ahead",
}

// ambiguous are names that also mean something else (a mode, a tier, a clock): of these only
// comparisons with what is called a stack, a sampler, a policy or a pipeline break the rule.
var ambiguous = map[string]bool{"sync": true, "cpu": true, "mmap": true, "random": true,
	"clock": true, "none": true, "deep": true, "series": true, "prefetch": true}

// registrars are the functions by which a file becomes a home.
var registrars = []string{"registerStack(&Stack{", "register(&Method{", "register(&Policy{",
	"registerPipeline(Pipeline{"}

// strayName tells whether a file may not hold a literal; compared: it is compared with something of
// this name.
func strayName(path, literal, compared string) bool {
	for home, name := range homes {
		if literal != name || path == home {
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

func TestSamplersStacksPoliciesAndPipelinesHaveAHome(t *testing.T) {
	var found []string
	named := map[string]bool{}
	for _, s := range sources(t) {
		top, _, _ := strings.Cut(s.path, "/")
		if s.test || top == "tools" {
			continue
		}
		comparisons(s.file, func(b *ast.BasicLit, with string) {
			v, err := strconv.Unquote(b.Value)
			if err != nil {
				t.Fatal(err)
			}
			if v == homes[s.path] {
				named[s.path] = true
			}
			if strayName(s.path, v, with) {
				found = append(found, s.at(b.Pos())+": "+b.Value)
			}
		})
		for _, r := range registrars {
			if strings.Contains(string(s.text), r) && homes[s.path] == "" {
				found = append(found,
					s.path+": registers a sampler, stack, policy or pipeline; add it to homes")
			}
		}
	}
	report(t, found,
		"a sampler, an I/O stack, a policy and a pipeline are named in their own file only; use the constant, or ask the registry for a trait")
	for path := range homes {
		if !named[path] {
			t.Errorf(
				"%s does not name what it is the home of: homes in internal/lint is out of date",
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
		{"sched/engine.go", "run-ahead", "", true},
	} {
		if strayName(c.path, c.literal, c.with) != c.stray {
			t.Errorf("the rule on %+v is wrong", c)
		}
	}
}
