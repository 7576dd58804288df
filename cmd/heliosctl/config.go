package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
	"go.yaml.in/yaml/v3"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/infile"
	"helios/internal/ui"
)

// addConfig adds the keys of a YAML file to the flags of verb c: keys are flag names, values
// scalars or lists of them. Flags of the command line win, and so does a dataset given as an
// argument. places gets the file and line of each key that counts.
func addConfig(c *cli.Command, verb, file string, flags flagValues, datasetGiven bool,
	places map[string]string) (flagValues, error) {
	f, err := openConfig(file)
	if err != nil {
		return nil, errs.New(errs.Usage, "--config: %w; name a readable YAML file", err)
	}
	defer f.Close() //nolint:errcheck // only read
	var doc yaml.Node
	dec := yaml.NewDecoder(io.LimitReader(f, 1<<20))
	err = dec.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 1 &&
		doc.Content[0].Tag == "!!null" {
		return flags, nil // empty, or comments only
	}
	bad := func(line int, format string, args ...any) error {
		args = append([]any{file, line}, args...)
		return errs.New(errs.Usage, "--config %s: line %d: "+format, args...)
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "--config %s: %s; write it as flag: value", file,
			ui.OneLine(err.Error()))
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return nil, bad(root.Line, "not a mapping; write it as flag: value")
	}
	seen := map[string]bool{}
	out := flags
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, val := root.Content[i], root.Content[i+1]
		name := key.Value
		fl := hcli.Lookup(c.Flags, name)
		if fl == nil || name == "config" || name == "help" {
			return nil, bad(key.Line, "unknown key %q; %s", name, meant(name, flagNames(c.Flags),
				"keys are the flags of \"heliosctl "+verb+" --help\""))
		}
		now := fl.Names()[0]
		if seen[now] {
			return nil, bad(key.Line, "key %q stands twice; keep one", name)
		}
		seen[now] = true
		value, ok := scalar(val)
		if !ok {
			return nil,
				bad(val.Line, "key %q has a value that is neither a scalar nor a list of scalars",
					name)
		}
		if value, err = plainValue(fl, name, value); err != nil {
			return nil, errs.New(errs.Usage, "--config %s: line %d: %w", file, val.Line, err)
		}
		if _, explicit := flags.get(now); explicit || now == "dataset" && datasetGiven {
			continue
		}
		places[now] = fmt.Sprintf("%s:%d", file, key.Line)
		out = append(out, flagValue{now, value})
	}
	if err := dec.Decode(&doc); !errors.Is(err, io.EOF) {
		return nil, errs.New(errs.Usage, "--config %s: more than one document; keep one", file)
	}
	return out, nil
}

// scalar is a YAML value as a flag's text; a list is joined by commas.
func scalar(n *yaml.Node) (string, bool) {
	switch n.Kind {
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "", true
		}
		return n.Value, true
	case yaml.SequenceNode:
		parts := make([]string, len(n.Content))
		for i, e := range n.Content {
			if e.Kind != yaml.ScalarNode {
				return "", false
			}
			parts[i] = e.Value
		}
		return strings.Join(parts, ","), true
	case yaml.AliasNode:
		return scalar(n.Alias)
	}
	return "", false
}

// openConfig opens a regular file, or the pipe that a shell makes of --config <(…): its writer is
// there.
func openConfig(file string) (*os.File, error) {
	if strings.HasPrefix(file, "/dev/fd/") || strings.HasPrefix(file, "/proc/self/fd/") ||
		file == "/dev/stdin" {
		if st, err := os.Stat(file); err == nil && st.Mode()&os.ModeNamedPipe != 0 {
			return os.Open(file)
		}
	}
	return infile.Open(file)
}
