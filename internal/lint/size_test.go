package lint

import (
	"fmt"
	"go/ast"
	"strings"
	"testing"
)

// The most that a reader keeps in mind at once. A type that has more says why in its doc comment,
// in a line that begins with "Large:".
const (
	mostFields  = 30
	mostMethods = 40
)

// undivided are types that are larger and have no reason to be: how many methods they may have
// until someone divides them. Numbers here only fall.
var undivided = map[string]int{}

// TestTypesAreSmall holds structs to mostFields fields and types to mostMethods methods.
func TestTypesAreSmall(t *testing.T) {
	type key struct{ dir, name string }
	methods := map[key]int{}
	at := map[key]string{}
	reason := map[key]bool{}
	var found []string
	for _, s := range sources(t) {
		if s.test || strings.Contains(string(s.text[:min(len(s.text), 300)]), "DO NOT EDIT") {
			continue
		}
		for _, d := range s.file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv != nil && len(d.Recv.List) == 1 {
					methods[key{s.dir, receiverType(d.Recv.List[0].Type)}]++
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					ts, ok := spec.(*ast.TypeSpec)
					if !ok {
						continue
					}
					k := key{s.dir, ts.Name.Name}
					at[k] = s.at(ts.Pos())
					reason[k] = large(d.Doc) || large(ts.Doc)
					if st, ok := ts.Type.(*ast.StructType); ok && !reason[k] {
						if n := st.Fields.NumFields(); n > mostFields {
							found = append(found, fmt.Sprintf("%s: struct %s has %d fields", at[k],
								ts.Name.Name, n))
						}
					}
				}
			}
		}
	}
	for k, n := range methods {
		if most, ok := undivided[k.dir+"."+k.name]; ok {
			if n != most {
				found = append(found,
					fmt.Sprintf("%s: type %s has %d methods and %d in the table undivided", at[k],
						k.name, n, most))
			}
			continue
		}
		if n > mostMethods && !reason[k] {
			found = append(found, fmt.Sprintf("%s: type %s has %d methods", at[k], k.name, n))
		}
	}
	report(t, found,
		fmt.Sprintf(
			"more than %d fields or %d methods: divide it by concept, or give a reason in a \"Large:\" line of its comment",
			mostFields, mostMethods))
}

// receiverType returns the name of a method's type.
func receiverType(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiverType(e.X)
	case *ast.IndexExpr:
		return receiverType(e.X)
	case *ast.IndexListExpr:
		return receiverType(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// large reports whether a comment gives the reason of a large type.
func large(c *ast.CommentGroup) bool {
	if c == nil {
		return false
	}
	for line := range strings.Lines(c.Text()) {
		if len(strings.TrimPrefix(line, "Large: ")) < len(line) && len(line) > len("Large: ")+10 {
			return true
		}
	}
	return false
}
