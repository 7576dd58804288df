package importer

import (
	"bytes"
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strconv"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/internal/errs"
)

var triplesFormat = newFormat(Format{Name: "triples",
	Usage:       "a knowledge graph of named triples, with the classes of some of its nodes",
	Description: triplesHelp}, Triples)

// TriplesOptions shape an import of triples.
type TriplesOptions struct {
	Labels    string `option:"labels" common:"yes" arg:"FILE" usage:"FILE of classes, where it is not labels.tsv beside the triples"`
	OneWay    bool   `option:"one-way" usage:"leave out the reverse of each relation"`
	FeatureFn string `option:"feature-fn" common:"yes" arg:"hash[:SEED]" usage:"rows computed from the nodes' numbers, none stored: hash[:SEED]; without it nodes have no rows"`
	Dim       int    `option:"dim" positive:"yes" shown:"64" usage:"features per node, where {feature-fn} makes them"`
	TypedOptions
}

const triplesHelp = "{in} is a file with a triple a line, subject, relation and object by tabs, or a folder with triples.tsv. All names are\n" +
	"nodes of one type; each relation is one of its own, with its reverse. {labels} has a line for each labelled node, its class\n" +
	"and, where that is known, its split (train, val or test). A heading is a first line of src, relation, dst and of node, label, split.\n" +
	"Names and triples are held in memory. {memory} bounds them."

// entity is the type of all nodes of triples.
const entity = "entity"

// Triples imports a knowledge graph (triplesHelp).
func Triples(ctx context.Context, o TriplesOptions) error {
	base := o.options()
	base.Labels, base.FeatureFn, base.Dim = o.Labels, o.FeatureFn, o.Dim
	if o.FeatureFn == "" && o.Dim != 0 {
		return errs.New(errs.Usage, "{dim} %d is for {feature-fn}; leave it out", o.Dim)
	}
	if err := base.fill(); err != nil {
		return err
	}
	file := o.In
	if !isFile(file) {
		file = filepath.Join(o.In, "triples.tsv")
		if !isFile(file) {
			return errs.New(errs.Usage, "%s has no triples.tsv; {in} must be a folder with that, or a file", o.In)
		}
	}
	if base.Labels == "" {
		base.Labels = filepath.Join(filepath.Dir(file), "labels.tsv")
	}
	if !isFile(base.Labels) {
		return errs.New(errs.Usage, "%s: there is no such file; name the classes of nodes with {labels}",
			base.Labels)
	}
	r := request{kind: "triples", options: &o, Options: base, inputs: []string{file}}
	return run(r, func(im *importer) error {
		im.m.Source.From = im.o.source("", file, base.Labels).From
		return (&triplesImport{typedImport: typedImport{importer: im}, opt: o,
			node: map[string]int64{}, relation: map[string]int{}}).run(ctx, file)
	})
}

// triplesImport is an import of triples.
type triplesImport struct {
	typedImport
	opt      TriplesOptions
	node     map[string]int64
	names    []string
	relation map[string]int
	triples  []relationEdges // by relation, in order of appearance
}

// relationEdges are the triples of one relation.
type relationEdges struct {
	name     string
	src, dst []int64
}

func (im *triplesImport) run(ctx context.Context, file string) error {
	if err := im.read(ctx, file); err != nil {
		return err
	}
	im.types = []typedNodes{{name: entity, nodes: int64(len(im.names)), names: im.names}}
	if im.o.FeatureFn != "" {
		fn, err := dataset.ParseFeatureFn(im.o.FeatureFn, im.o.Seed)
		if err != nil {
			return err
		}
		im.m.FeatureFn = fn
		im.types[0].dim = im.o.Dim
		im.m.Source.Options["feature-fn"], im.m.Source.Options["dim"] = fn, strconv.Itoa(im.o.Dim)
	}
	for i := range im.triples {
		t := &im.triples[i]
		r := typedEdges{src: entity, name: t.name, dst: entity,
			open: func(ends) ([]edges.Source, error) { return []edges.Source{t.source()}, nil }}
		if !im.opt.OneWay {
			r.reverse = "rev_" + t.name
			if _, there := im.relation[r.reverse]; there {
				return errs.New(errs.Usage,
					"%s: relation %q has the name that the reverse of %q would get; give {one-way}, which adds no reverses",
					file, brief(r.reverse), brief(t.name))
			}
		}
		im.rels = append(im.rels, r)
	}
	if err := im.taskOn("class", entity); err != nil {
		return err
	}
	if err := im.readLabels(ctx); err != nil {
		return err
	}
	return im.write(ctx)
}

// source are the edges of a relation.
func (t *relationEdges) source() edges.Source {
	return edges.Source{Name: t.name, Unit: "edges", Total: int64(len(t.src)), Parts: 1,
		Read: func(_ context.Context, _ int, emit func(src, dst []int64) error,
			done func(int64)) error {
			err := emit(t.src, t.dst)
			done(int64(len(t.src)))
			return err
		}}
}

// fields are the parts of a line.
type fields struct {
	line int64
	part []string
}

// eachLine calls fn with the parts of each line of a table by tabs, from least to most of them,
// without its heading and empty lines.
func (im *triplesImport) eachLine(ctx context.Context, file string, least int, heading []string,
	fn func(b lineBlock, f fields) error) error {
	return eachBlock(ctx, file, func(b lineBlock) (all []fields, err error) {
		line := b.line
		if line == 0 {
			if line, err = b.lineOf(0); err != nil {
				return nil, err
			}
			b.line = line
		}
		err = b.each(func(text []byte, line int64) error {
			if len(text) == 0 {
				return nil
			}
			f := fields{line: line}
			for _, p := range bytes.Split(text, []byte{'\t'}) {
				f.part = append(f.part, string(bytes.TrimSpace(p)))
			}
			if line == 1 && slices.Equal(f.part, heading[:min(len(f.part), len(heading))]) {
				return nil
			}
			if n := len(f.part); n < least || n > len(heading) || slices.Contains(f.part, "") {
				return b.bad(line, "%q: a line has %s by tabs", brief(string(text)), heading)
			}
			all = append(all, f)
			return nil
		})
		return all, err
	}, func(all []fields, b lineBlock) error {
		im.o.Progress.Report("read", b.read, b.size)
		for _, f := range all {
			if err := fn(b, f); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}

// Bytes that a name and a triple hold.
const (
	nameBytes   = 96
	tripleBytes = 32 // slices grow
)

// read reads the triples and numbers nodes and relations by their first appearance.
func (im *triplesImport) read(ctx context.Context, file string) error {
	id := func(name string) (int64, error) {
		v, ok := im.node[name]
		if !ok {
			if err := im.needMemory(file+": names of nodes", 1, int64(nameBytes+len(name))); err != nil {
				return 0, err
			}
			v = int64(len(im.names))
			im.node[name], im.names = v, append(im.names, name)
		}
		return v, nil
	}
	n := int64(0)
	err := im.eachLine(ctx, file, 3, []string{"src", "relation", "dst"},
		func(_ lineBlock, f fields) error {
			src, err := id(f.part[0])
			if err != nil {
				return err
			}
			dst, err := id(f.part[2])
			if err == nil {
				err = im.needMemory(file+": triples", 1, tripleBytes)
			}
			if err != nil {
				return err
			}
			i, ok := im.relation[f.part[1]]
			if !ok {
				i = len(im.triples)
				im.relation[f.part[1]] = i
				im.triples = append(im.triples, relationEdges{name: f.part[1]})
			}
			t := &im.triples[i]
			t.src, t.dst = append(t.src, src), append(t.dst, dst)
			n++
			return nil
		})
	if err == nil && n == 0 {
		err = errs.New(errs.Usage, "%s holds no triples", file)
	}
	return err
}

// readLabels reads classes and splits, and numbers the classes by their names.
func (im *triplesImport) readLabels(ctx context.Context) error {
	file := im.o.Labels
	labels := make([]int32, len(im.names))
	for i := range labels {
		labels[i] = noLabel
	}
	class := map[string]int32{}
	named := map[int64]string{}
	sets := []splitSet{{file: file + " (train)"}, {file: file + " (val)"}, {file: file + " (test)"}}
	dealt := 0
	err := im.eachLine(ctx, file, 2, []string{"node", "label", "split"},
		func(b lineBlock, f fields) error {
			v, ok := im.node[f.part[0]]
			if !ok {
				return b.bad(f.line, "node %s is in no triple", brief(f.part[0]))
			}
			if _, again := named[v]; again {
				return b.bad(f.line, "node %s has a label already", brief(f.part[0]))
			}
			named[v], class[f.part[1]] = f.part[1], 0
			if len(f.part) == 2 {
				return nil
			}
			i := slices.Index(dataset.Splits, f.part[2])
			if i < 0 {
				return b.bad(f.line, "split %s is none of train, val and test", brief(f.part[2]))
			}
			dealt++
			sets[i].ids = append(sets[i].ids, v)
			return nil
		})
	if err != nil {
		return err
	}
	if dealt > 0 && dealt < len(named) {
		return errs.New(errs.Usage, "%s: %d of %d nodes have a split; give all of them one, or none",
			file, dealt, len(named))
	}
	im.m.ClassNames = slices.Sorted(maps.Keys(class))
	for i, name := range im.m.ClassNames {
		class[name] = int32(i)
	}
	for v, name := range named {
		labels[v] = class[name]
	}
	im.o.NumClasses, im.classesFrom = int64(len(class)), file
	im.task.labels, im.task.labelFile = labels, file
	if dealt > 0 && !im.o.MakeSplits {
		im.task.splits = sets
	}
	im.o.UnlabelledOK = true // most nodes have no class
	if len(named) == 0 {
		return errs.New(errs.Usage, "%s holds no labels", file)
	}
	return im.countClasses(labels, file)
}
