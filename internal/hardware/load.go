package hardware

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"helios/internal/errs"
	"helios/internal/infile"
)

//go:embed profiles/*.yaml
var builtin embed.FS

// Names are the built-in profiles.
func Names() []string {
	files, err := builtin.ReadDir("profiles")
	if err != nil {
		panic("hardware: the embedded profiles are gone")
	}
	var out []string
	for _, f := range files {
		out = append(out, strings.TrimSuffix(f.Name(), ".yaml"))
	}
	slices.Sort(out)
	return out
}

// maxBases bounds a chain of bases, so that a circle is an error and not a hang.
const maxBases = 4

// Load reads a built-in profile, or a YAML file where nameOrPath has a dot or a slash. A file may
// name a built-in profile or another file as its base and give only what differs.
func Load(nameOrPath string) (*Profile, error) {
	p := &Profile{}
	if err := p.read(nameOrPath, "", 0); err != nil {
		return nil, err
	}
	p.Base = ""
	if err := p.check(); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *Profile) read(nameOrPath, dir string, depth int) error {
	if depth > maxBases {
		return errs.New(errs.Usage,
			"hardware profile %s: more than %d bases, one on the other; is there a circle?",
			nameOrPath, maxBases)
	}
	var text []byte
	if strings.ContainsAny(nameOrPath, "./") {
		path := nameOrPath
		if dir != "" && !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		var err error
		if text, err = infile.Read(path, 1<<20); err != nil {
			return errs.With(errs.Usage, fmt.Errorf("hardware profile: %w; built in are %s", err,
				strings.Join(Names(), ", ")))
		}
		dir = filepath.Dir(path)
	} else {
		var err error
		if text, err = builtin.ReadFile("profiles/" + nameOrPath + ".yaml"); err != nil {
			return errs.New(errs.Usage, "no hardware profile %q: choose %s, or give a YAML file",
				nameOrPath, strings.Join(Names(), ", "))
		}
	}
	// The base first, so that this file's figures replace it.
	var head struct {
		Base string         `yaml:"base"`
		Rest map[string]any `yaml:",inline"`
	}
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err == nil && len(root.Content) > 0 &&
		root.Content[0].Kind != yaml.MappingNode {
		return errs.New(errs.Usage, "hardware profile %s: line %d is not \"key: value\"",
			nameOrPath, root.Content[0].Line)
	}
	if err := yaml.Unmarshal(text, &head); err != nil {
		return errs.New(errs.Usage, "hardware profile %s: %w", nameOrPath, err)
	}
	if head.Base != "" {
		if err := p.read(head.Base, dir, depth+1); err != nil {
			return err
		}
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(p); err != nil {
		if errors.Is(err, io.EOF) {
			return errs.New(errs.Usage, "hardware profile %s is empty", nameOrPath)
		}
		return errs.New(errs.Usage, "hardware profile %s: %w", nameOrPath, err)
	}
	return nil
}

// UnmarshalYAML takes a figure as a whole: a value that a file changes needs its own source.
func (f *Figure) UnmarshalYAML(n *yaml.Node) error {
	type plain Figure
	var v plain
	if err := strictly(n, &v); err != nil {
		return err
	}
	*f = Figure(v)
	return nil
}

// UnmarshalYAML takes a cost as a whole, as for figures.
func (c *Cost) UnmarshalYAML(n *yaml.Node) error {
	type plain Cost
	var v plain
	if err := strictly(n, &v); err != nil {
		return err
	}
	*c = Cost(v)
	return nil
}

// strictly decodes a mapping and refuses keys that out does not have: a decoder's KnownFields does
// not reach through UnmarshalYAML.
func strictly(n *yaml.Node, out any) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: a figure is {value: …, source: …}", n.Line)
	}
	known := map[string]bool{}
	t := reflect.TypeOf(out).Elem()
	for i := range t.NumField() {
		known[t.Field(i).Tag.Get("yaml")] = true
	}
	for i := 0; i < len(n.Content); i += 2 {
		if k := n.Content[i]; !known[k.Value] {
			return fmt.Errorf("line %d: unknown key %q of a figure", k.Line, k.Value)
		}
	}
	return n.Decode(out)
}

// each visits every figure and cost with its path in the file.
func each(p *Profile, fn func(path string, f *Figure, c *Cost)) {
	var walk func(path string, v reflect.Value)
	walk = func(path string, v reflect.Value) {
		switch x := v.Addr().Interface().(type) {
		case *Figure:
			fn(path, x, nil)
		case *Cost:
			fn(path, nil, x)
		default:
			if v.Kind() != reflect.Struct {
				return
			}
			for i := range v.NumField() {
				name := v.Type().Field(i).Tag.Get("yaml")
				if path != "" {
					name = path + "." + name
				}
				walk(name, v.Field(i))
			}
		}
	}
	walk("", reflect.ValueOf(p).Elem())
}
