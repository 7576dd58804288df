package importer

import (
	"context"

	"helios/dataset/debian"
	"helios/dataset/edges"
)

// The types of a package index as a typed graph. A maintainer is a number: who it is does not come
// into the dataset. Sections are what is learned, so they are no nodes.
const (
	debianPackage    = "package"
	debianSource     = "source"
	debianMaintainer = "maintainer"
	debianTag        = "tag"
)

// debianTyped makes the relations of a package index as a typed graph.
type debianTyped struct {
	typedImport
	packages []debian.Package
	node     map[string]int64 // of packages
	rels     []*relationEdges
}

// debianFields are the relations between packages, and the fields that each comes from.
var debianFields = []struct {
	name string
	of   func(p *debian.Package) []string
}{
	{"depends", func(p *debian.Package) []string { return p.Relations[:2] }},
	{"recommends", func(p *debian.Package) []string { return p.Relations[2:3] }},
	{"suggests", func(p *debian.Package) []string { return p.Relations[3:4] }},
	{"enhances", func(p *debian.Package) []string { return p.Relations[4:5] }},
	{"conflicts", func(p *debian.Package) []string { return p.Conflicts[:] }},
}

// runTyped imports packages as a typed graph. Sources, maintainers and tags have the mean of the
// rows of their packages.
func (im *debianImport) runTyped(ctx context.Context, packages []debian.Package, labels []int32,
	r *DebianReport) error {
	t := &debianTyped{typedImport: typedImport{importer: im.importer}, packages: packages,
		node: make(map[string]int64, len(packages))}
	names := make([]string, len(packages))
	for i, p := range packages {
		t.node[p.Name], names[i] = int64(i), p.Name
	}
	t.types = []typedNodes{{name: debianPackage, nodes: int64(len(packages)), dim: im.opt.Dim,
		names: names, write: func(ctx context.Context) error {
			return im.wordFeatures(ctx, packages, r)
		}}}
	for _, f := range debianFields {
		if err := t.between(f.name, f.of); err != nil {
			return err
		}
	}
	r.Dependencies = t.edges()
	for _, g := range []struct {
		relation, nodeType string
		of                 func(p *debian.Package) []string
		named              bool
	}{
		{"built-from", debianSource, func(p *debian.Package) []string {
			return []string{p.SourceName()}
		}, true},
		{"maintained-by", debianMaintainer, func(p *debian.Package) []string {
			return []string{p.Maintainer}
		}, false},
		{"tagged", debianTag, func(p *debian.Package) []string { return p.Tags() }, true},
	} {
		if err := t.group(g.relation, g.nodeType, g.of, g.named); err != nil {
			return err
		}
	}
	im.m.Source.Options["typed"] = "yes"
	for _, e := range t.rels {
		x := typedEdges{src: debianPackage, name: e.name, dst: debianPackage,
			open: func(ends) ([]edges.Source, error) { return []edges.Source{e.source()}, nil }}
		for _, f := range t.fills {
			if f.relation == e.name {
				x.dst = f.nodeType
			}
		}
		if !im.opt.OneWay {
			x.reverse = "rev_" + e.name
		}
		t.typedImport.rels = append(t.typedImport.rels, x)
	}
	if err := t.taskOn("section", debianPackage); err != nil {
		return err
	}
	t.task.labels = labels
	if err := t.write(ctx); err != nil {
		return err
	}
	im.m.Sum()
	return nil
}

// between adds a relation between packages, where there is one: from a package to each that it
// names.
func (t *debianTyped) between(name string, of func(p *debian.Package) []string) error {
	e := &relationEdges{name: name}
	seen := map[int64]bool{}
	for i := range t.packages {
		clear(seen)
		for _, field := range of(&t.packages[i]) {
			for _, target := range debian.Targets(field) {
				v, ok := t.node[target]
				if ok && v != int64(i) && !seen[v] { // no virtual or foreign package, nor itself
					seen[v] = true
					e.src, e.dst = append(e.src, int64(i)), append(e.dst, v)
				}
			}
		}
	}
	return t.add(e)
}

// group adds a type of nodes that packages belong to, and the relation to it, where there are any.
// Nodes are numbered in the order in which packages name them.
func (t *debianTyped) group(name, nodeType string, of func(p *debian.Package) []string,
	named bool) error {
	e, node := &relationEdges{name: name}, map[string]int64{}
	var names []string
	for i := range t.packages {
		for _, n := range of(&t.packages[i]) {
			if n == "" {
				continue
			}
			v, ok := node[n]
			if !ok {
				v = int64(len(node))
				node[n] = v
				names = append(names, n)
				if err := t.needMemory(nodeType+"s", 1, int64(nameBytes+len(n))); err != nil {
					return err
				}
			}
			e.src, e.dst = append(e.src, int64(i)), append(e.dst, v)
		}
	}
	if len(node) == 0 {
		return nil
	}
	x := typedNodes{name: nodeType, nodes: int64(len(node))}
	if named {
		x.names = names
	}
	t.types = append(t.types, x)
	t.fills = append(t.fills, fillRule{nodeType, name})
	return t.add(e)
}

func (t *debianTyped) add(e *relationEdges) error {
	if len(e.src) == 0 {
		return nil
	}
	t.rels = append(t.rels, e)
	return t.needMemory("relation "+e.name, int64(len(e.src)), tripleBytes)
}

func (t *debianTyped) edges() (n int64) {
	for _, e := range t.rels {
		n += int64(len(e.src))
	}
	return n
}
