package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"helios/dataset/importer"
)

// tablesSchemaFile describes the YAML of "import tables --in".
const tablesSchemaFile = "docs/tables.schema.json"

// tablesSchema makes the schema of a type of the description.
func tablesSchema(t reflect.Type, describe func(reflect.Type, string) string) map[string]any {
	text := map[string]any{"type": []string{"string", "number", "boolean"}}
	switch t.Kind() {
	case reflect.Pointer:
		return tablesSchema(t.Elem(), describe)
	case reflect.Slice:
		items := tablesSchema(t.Elem(), describe)
		list := map[string]any{"type": "array", "items": items}
		if t.Name() != "" { // texts: one, or a list
			return map[string]any{"anyOf": []any{items, list}}
		}
		return list
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.Int:
		return map[string]any{"type": "integer"}
	case reflect.Float64:
		return map[string]any{"type": "number"}
	case reflect.String:
		return text
	case reflect.Interface: // refused
		return map[string]any{"not": map[string]any{}}
	}
	keys, need := map[string]any{}, []string{}
	for i := 1; i < t.NumField(); i++ {
		f := t.Field(i)
		s := tablesSchema(f.Type, describe)
		if of := f.Tag.Get("oneof"); of != "" {
			s = map[string]any{"enum": strings.Split(of, ",")}
		}
		s["description"] = describe(t, f.Name)
		keys[f.Tag.Get("yaml")] = s
		if f.Tag.Get("need") != "" {
			need = append(need, f.Tag.Get("yaml"))
		}
	}
	s := map[string]any{"type": "object", "properties": keys, "additionalProperties": false}
	if len(need) > 0 {
		s["required"] = need
	}
	return s
}

func TestTablesSchemaDocsAreCurrent(t *testing.T) {
	comments := &fieldComments{"../..", map[string]map[string]string{}}
	s := tablesSchema(reflect.TypeFor[importer.TablesDescription](), comments.describe)
	s["$schema"] = "https://json-schema.org/draft/2020-12/schema"
	s["title"] = "Description of tables for heliosctl import tables --in"
	text, err := json.MarshalIndent(s, "", " ")
	require.NoError(t, err)
	holdDocument(t, tablesSchemaFile, string(text)+"\n")
	require.Contains(t, string(text), "way in which cells become numbers", "fields have comments")
}

// A drafted description is valid by the schema, and is imported as it stands.
func TestDescribeTables(t *testing.T) {
	root, err := filepath.Abs(repo)
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{
		"people.csv": "name,age,city,note: x\nann,30,Rome,a\nbob,40,,b\ncid,50,Rome,c\ndan,60,Oslo,d\neve,70,Oslo,e\n",
		"shops.csv":  "shop,size\ns 1,1.5\n\"s,2\",2.5\n",
		"buys.tsv":   "person\tshop\twhen\nann\ts 1\t2020-01-01\nbob\ts,2\t2020-01-02\n",
		"knows.csv":  "a,b\nann,bob\nbob,cid\n",
	} {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	out := ok(t, "import", "tables", "--describe", "people.csv,shops.csv,buys.tsv,knows.csv")
	require.NoError(t, os.WriteFile("d.yaml", []byte(out), 0o600))
	var v any
	require.NoError(t, yaml.Unmarshal([]byte(out), &v), out)
	schema, err := jsonschema.NewCompiler().Compile(filepath.Join(root, tablesSchemaFile))
	require.NoError(t, err)
	require.NoError(t, schema.Validate(v), out)
	for _, want := range []string{"relation: [people, buys, shops]", "relation: [people, knows, people]",
		"missing: category", "transform: standard"} {
		require.Contains(t, out, want)
	}
	got := ok(t, "import", "tables", "--in", "d.yaml", "--out", "g", "--pad")
	require.Contains(t, got, "g: 7 nodes, 4 edges")
}
