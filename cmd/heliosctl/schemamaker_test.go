package main

import (
	"encoding"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"time"

	"helios/sched/report"
)

// shaped is a type that writes its JSON by itself: JSONShape returns a value of the type that it
// writes.
type shaped interface{ JSONShape() any }

// schemaMaker writes JSON Schemas (json-schema.org, draft 2020-12) of what ui.Event writes. Structs
// with a name stand under defs.
type schemaMaker struct {
	defs map[string]any
	// comment returns the comment of a field, or "".
	comment func(of reflect.Type, field string) string
}

// event returns the schema of a line: the fields of v and its name.
func (s *schemaMaker) event(name string, v any) map[string]any {
	t := reflect.TypeOf(v)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if x, is := reflect.Zero(t).Interface().(shaped); is {
		t = reflect.TypeOf(x.JSONShape())
	}
	out := map[string]any{"type": "object"}
	properties, required := map[string]any{}, map[string]bool{}
	if t.Kind() == reflect.Struct {
		s.fields(t, properties, required)
		out["additionalProperties"] = false
	} else {
		out["additionalProperties"] = s.of(t.Elem())
	}
	properties["event"] = map[string]any{"const": name}
	required["event"] = true
	out["properties"], out["required"] = properties, sorted(required)
	return out
}

func sorted(set map[string]bool) []string {
	names := []string{}
	for n, in := range set {
		if in {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names
}

var (
	marshaler     = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
	absent        = reflect.TypeFor[*report.Absent]()
	raw           = reflect.TypeFor[json.RawMessage]()
)

// of returns the schema of a type as finite and encoding/json write it.
func (s *schemaMaker) of(t reflect.Type) any {
	if x, is := reflect.Zero(t).Interface().(shaped); is && t.Kind() != reflect.Pointer {
		t = reflect.TypeOf(x.JSONShape())
	}
	switch {
	case t == raw || t.Kind() == reflect.Interface:
		return true
	case t == reflect.TypeFor[time.Time]():
		return map[string]any{"type": "string", "format": "date-time"}
	case t.Kind() != reflect.Pointer && !t.Implements(marshaler) && t.Kind() != reflect.Struct &&
		t.Kind() != reflect.Array && t.Implements(textMarshaler):
		return map[string]any{"type": "string"}
	}
	switch t.Kind() {
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Float32, reflect.Float64: // null: no number
		return map[string]any{"type": []string{"number", "null"}}
	case reflect.Pointer:
		return map[string]any{"anyOf": []any{s.of(t.Elem()), map[string]any{"type": "null"}}}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return map[string]any{"type": []string{"string", "null"}}
		}
		return map[string]any{"type": []string{"array", "null"}, "items": s.of(t.Elem())}
	case reflect.Array:
		return map[string]any{"type": "array", "items": s.of(t.Elem())}
	case reflect.Map:
		return map[string]any{"type": []string{"object", "null"}, "additionalProperties": s.of(t.Elem())}
	case reflect.Struct:
		return s.object(t)
	}
	return map[string]any{"type": "integer"}
}

// object returns the schema of a struct, or a reference to it.
func (s *schemaMaker) object(t reflect.Type) any {
	name := t.Name()
	if slash := strings.LastIndexByte(t.PkgPath(), '/'); slash >= 0 && name != "" {
		name = t.PkgPath()[slash+1:] + "." + name
	}
	ref := map[string]any{"$ref": "#/$defs/" + name}
	if _, has := s.defs[name]; has && name != "" {
		return ref
	}
	def := map[string]any{"type": "object", "additionalProperties": false}
	if name != "" {
		s.defs[name] = def // before its fields, which may hold it
	}
	properties, required := map[string]any{}, map[string]bool{}
	s.fields(t, properties, required)
	def["properties"], def["required"] = properties, sorted(required)
	if name == "" {
		return def
	}
	return ref
}

// fields adds a struct's fields; those of embedded structs come first, so that its own win.
func (s *schemaMaker) fields(t reflect.Type, properties map[string]any, required map[string]bool) {
	for _, embedded := range []bool{true, false} {
		for i := range t.NumField() {
			f := t.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			inner := f.Type
			optional := false
			if inner.Kind() == reflect.Pointer {
				inner, optional = inner.Elem(), true
			}
			in := f.Anonymous && name == "" && inner.Kind() == reflect.Struct
			if in != embedded || name == "-" || !in && !f.IsExported() {
				continue
			}
			if in {
				some := map[string]bool{}
				s.fields(inner, properties, some)
				for n, is := range some {
					required[n] = is && !optional
				}
				continue
			}
			if name == "" {
				name = f.Name
			}
			if f.Type == absent {
				delete(properties, name)
				required[name] = false
				continue
			}
			properties[name] = s.described(t, f)
			required[name] = !strings.Contains(options, "omitempty") &&
				!strings.Contains(options, "omitzero")
		}
	}
}

func (s *schemaMaker) described(t reflect.Type, f reflect.StructField) any {
	schema := s.of(f.Type)
	if s.comment == nil {
		return schema
	}
	text := s.comment(t, f.Name)
	if of, is := schema.(map[string]any); is && text != "" {
		of["description"] = text
		return of
	}
	return schema
}
