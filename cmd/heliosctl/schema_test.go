package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
)

//go:generate env HELIOS_UPDATE=1 go test -count=1 -run DocsAreCurrent .

// schemaURL is a name that nothing can be loaded from.
const schemaURL = "https://heliosctl.invalid/results.schema.json"

const schemaFile = "docs/results.schema.json"

// fieldComments finds what the source says of the fields of structs.
type fieldComments struct {
	root string
	of   map[string]map[string]string // by package, "Type.Field"
}

func (c *fieldComments) describe(t reflect.Type, field string) string {
	path, in := strings.CutPrefix(t.PkgPath(), "helios/")
	if !in {
		return ""
	}
	if c.of[path] == nil {
		c.of[path] = c.read(filepath.Join(c.root, path))
	}
	return c.of[path][t.Name()+"."+field]
}

func (c *fieldComments) read(dir string) map[string]string {
	found := map[string]string{}
	files, _ := filepath.Glob(filepath.Join(dir, "*.go"))
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil,
			parser.ParseComments|parser.SkipObjectResolution)
		if err != nil || strings.HasSuffix(name, "_test.go") {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			spec, is := n.(*ast.TypeSpec)
			if !is {
				return true
			}
			s, is := spec.Type.(*ast.StructType)
			if !is {
				return false
			}
			for _, f := range s.Fields.List {
				text := strings.TrimSpace(f.Doc.Text() + " " + f.Comment.Text())
				for _, n := range f.Names {
					found[spec.Name.Name+"."+n.Name] = strings.Join(strings.Fields(text), " ")
				}
			}
			return false
		})
	}
	return found
}

// makeSchema writes the schema of all lines: each line is one of the definitions, whose names are
// verb and event.
func makeSchema(describe func(reflect.Type, string) string) map[string]any {
	s := &schemaMaker{defs: map[string]any{}, comment: describe}
	lines := map[string][]any{}
	var every []any
	for _, v := range verbEvents {
		name := strings.TrimPrefix(v.verb+" "+v.event, " ")
		lines[name] = append(lines[name], s.event(v.event, v.of))
	}
	for _, v := range verbEvents {
		name := strings.TrimPrefix(v.verb+" "+v.event, " ")
		ref := map[string]string{"$ref": "#/$defs/" + strings.ReplaceAll(name, " ", "%20")}
		if all := lines[name]; len(all) == 1 {
			s.defs[name] = all[0]
		} else {
			s.defs[name] = map[string][]any{"anyOf": all}
		}
		if len(every) == 0 || !reflect.DeepEqual(every[len(every)-1], any(ref)) {
			every = append(every, ref) // lines of one name stand together
		}
	}
	return map[string]any{
		"$schema": "https://json-schema.org/draft/2020-12/schema",
		"title":   fmt.Sprintf("Lines of heliosctl --json and --results, schema %d", resultsSchema),
		"description": "Each line is one of anyOf, the lines of verbs by their field event. Later versions of heliosctl " +
			"may add fields within a schema; readers ignore what they do not know. A number that is none (NaN, infinite) is null.",
		"anyOf": every, "$defs": s.defs,
	}
}

// update has tests write the documents that they hold against the code.
func update() bool { return os.Getenv("HELIOS_UPDATE") != "" }

// holdDocument compares a document with what the code says, or writes it.
func holdDocument(t *testing.T, file, text string) {
	t.Helper()
	path := filepath.Join("../..", file)
	if update() {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644)) //nolint:gosec // a document
		return
	}
	was, err := os.ReadFile(path)
	require.NoError(t, err)
	if string(was) != text {
		t.Fatalf("%s is not what the code says; run \"make generate\"", file)
	}
}

func TestSchemaDocsAreCurrent(t *testing.T) {
	comments := &fieldComments{"../..", map[string]map[string]string{}}
	text, err := json.MarshalIndent(makeSchema(comments.describe), "", " ")
	require.NoError(t, err)
	holdDocument(t, schemaFile, string(text)+"\n")
	require.Contains(t, string(text), "mean over the seeds that have a label", "fields have comments")
}

var compiled = sync.OnceValues(func() (*jsonschema.Compiler, error) {
	c := jsonschema.NewCompiler()
	b, err := json.Marshal(makeSchema(nil))
	if err != nil {
		return nil, err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	return c, c.AddResource(schemaURL, doc)
})

var (
	schemas  = map[string]*jsonschema.Schema{}
	seen     = map[string]bool{} // lines that some test met
	schemaMu sync.Mutex
)

// validLines wants each line that a verb wrote to be valid by its schema.
func validLines(t *testing.T, verb, text string) {
	t.Helper()
	c, err := compiled()
	require.NoError(t, err)
	schemaMu.Lock()
	defer schemaMu.Unlock()
	for l := range strings.Lines(text) {
		line, err := jsonschema.UnmarshalJSON(strings.NewReader(l))
		require.NoError(t, err, l)
		fields, is := line.(map[string]any)
		require.True(t, is, l)
		event, _ := fields["event"].(string)
		name := event
		for _, v := range verbEvents {
			if v.event == event && v.verb != "" && strings.HasPrefix(verb+" ", v.verb+" ") {
				name = v.verb + " " + event
			}
		}
		if schemas[name] == nil {
			schemas[name], err = c.Compile(schemaURL + "#/$defs/" +
				strings.ReplaceAll(name, " ", "%20"))
			require.NoError(t, err, "%s writes an event %q that verbEvents does not have", verb, event)
		}
		require.NoError(t, schemas[name].Validate(line), "%s: %s", verb, l)
		seen[name] = true
	}
}

// readApp returns the verbs and flags for tests that run none of them.
var readApp = sync.OnceValue(func() *cli.App { return newApp(io.Discard, io.Discard) })

// validOutput checks what a verb wrote with --json, and its file of --results.
func validOutput(t *testing.T, args []string, out string) {
	t.Helper()
	argv, verb, err := arrange(readApp(), args)
	if err != nil {
		return
	}
	for _, a := range argv {
		name, value, _ := strings.Cut(a, "=")
		switch {
		case a == "--":
			return
		case a == "--json=true":
			validLines(t, verb, out)
		case name == "--results" && verb != "rerun":
			if st, err := os.Stat(value); err != nil || !st.Mode().IsRegular() {
				continue // /dev/full has no end
			}
			text, err := os.ReadFile(value)
			require.NoError(t, err)
			if whole := bytes.HasPrefix(text, []byte(`{"event":"begin"`)); whole {
				validLines(t, verb, string(text))
			}
		}
	}
}
