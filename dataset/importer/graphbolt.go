package importer

import (
	"bytes"
	"cmp"
	"context"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/infile"
)

var graphboltFormat = newFormat(Format{Name: "graphbolt",
	Usage:       "an OnDiskDataset of DGL's GraphBolt",
	Description: graphboltHelp}, GraphBolt)

// GraphBoltOptions shape an import of an OnDiskDataset.
type GraphBoltOptions struct {
	AllowOutside bool   `option:"allow-outside" usage:"read files that metadata.yaml names outside its folder"`
	Task         string `option:"task" common:"yes" shown:"the only one" arg:"NAME" usage:"NAME of the task whose sets are taken"`
	Feature      string `option:"feature" common:"yes" shown:"feat, or the only one" arg:"NAME" usage:"NAME of the node feature_data to take"`
	FillOptions
	Options
}

const graphboltHelp = "{in} is the folder with metadata.yaml and the files that it names: edges as CSV or NumPy, features and the sets of\n" +
	"a task (seeds and labels) as NumPy; a preprocessed graph can be read by PyTorch only. A graph of several\n" +
	"types keeps them; {undirected} adds the reverse of each relation, or takes it both ways where it joins nodes of one type."

const graphboltFolder = "a GraphBolt OnDiskDataset: metadata.yaml and the files that it names"

// The parts of metadata.yaml that matter here. Fields of later versions are ignored.
type (
	graphboltMeta struct {
		Name     string           `yaml:"dataset_name"`
		Graph    *graphboltGraph  `yaml:"graph"`
		Topology *graphboltData   `yaml:"graph_topology"`
		Features []*graphboltData `yaml:"feature_data"`
		Tasks    []*graphboltTask `yaml:"tasks"`
	}
	graphboltGraph struct {
		Nodes []struct {
			Type string `yaml:"type"`
			Num  int64  `yaml:"num"`
		} `yaml:"nodes"`
		Edges    []*graphboltData `yaml:"edges"`
		Features []*graphboltData `yaml:"feature_data"` // weights of edges, for one
	}
	graphboltData struct {
		Domain string `yaml:"domain"`
		Type   string `yaml:"type"`
		Name   string `yaml:"name"`
		Format string `yaml:"format"`
		Path   string `yaml:"path"`
	}
	graphboltTask struct {
		Name    string         `yaml:"name"`
		Classes int64          `yaml:"num_classes"`
		Train   []graphboltSet `yaml:"train_set"`
		Val     []graphboltSet `yaml:"validation_set"`
		Test    []graphboltSet `yaml:"test_set"`
	}
	graphboltSet struct {
		Type string           `yaml:"type"`
		Data []*graphboltData `yaml:"data"`
	}
)

// GraphBolt imports an OnDiskDataset (graphboltHelp).
func GraphBolt(ctx context.Context, o GraphBoltOptions) error {
	if err := o.fillOwn(); err != nil {
		return err
	}
	if err := o.inFolder(graphboltFolder, metaYAML); err != nil {
		return err
	}
	path := filepath.Join(o.In, metaYAML)
	m, err := readGraphBolt(path)
	if err != nil {
		return err
	}
	if !o.AllowOutside {
		if err := m.inside(o.In, path); err != nil {
			return err
		}
	}
	fills, err := parseFills(o.Fill)
	if err != nil {
		return err
	}
	typed := len(m.Graph.Nodes) > 1 || len(m.Graph.Edges) > 1
	if !typed && (o.Fill != "" || o.Pad) {
		return errs.New(errs.Usage,
			"{fill} and {pad} are for graphs of several types, and %s has one; leave them out", path)
	}
	r := request{kind: "graphbolt", options: &o, Options: o.Options, inputs: m.files(o.In)}
	return runNamed(r, func(im *importer) error {
		x := &graphboltImport{im, o, map[*graphboltData]bool{}}
		if typed {
			return x.typed(ctx, path, m, fills)
		}
		return x.run(ctx, path, m)
	})
}

const metaYAML = "metadata.yaml"

func readGraphBolt(path string) (*graphboltMeta, error) {
	text, err := infile.Read(path, dataset.MaxDescription)
	if err != nil {
		return nil, err
	}
	return parseGraphBolt(path, text)
}

func parseGraphBolt(path string, text []byte) (*graphboltMeta, error) {
	var m graphboltMeta
	if err := yaml.NewDecoder(bytes.NewReader(text)).Decode(&m); err != nil {
		return nil, errs.New(errs.Usage, "%s: %.300s", path, strings.ReplaceAll(err.Error(),
			"\n", ";"))
	}
	g := m.Graph
	switch {
	case g == nil && m.Topology != nil:
		return nil, errs.New(errs.Usage,
			"%s describes a preprocessed graph (%s), which only PyTorch can read; give the folder above it, whose metadata.yaml has \"graph\"",
			path, brief(m.Topology.Path))
	case g == nil:
		return nil, errs.New(errs.Usage, "%s has no \"graph\"; it must list nodes and edges there",
			path)
	case len(g.Nodes) == 0 || len(g.Edges) == 0 || slices.Contains(g.Edges, nil):
		return nil, errs.New(errs.Usage, "%s: \"graph\" must list nodes and edges", path)
	}
	return &m, nil
}

// all lists the entries that name a file.
func (m *graphboltMeta) all() []*graphboltData {
	all := slices.Concat(m.Graph.Edges, m.Graph.Features, m.Features)
	for _, t := range m.Tasks {
		if t == nil {
			continue
		}
		for _, s := range slices.Concat(t.Train, t.Val, t.Test) {
			all = append(all, s.Data...)
		}
	}
	return slices.DeleteFunc(all, func(d *graphboltData) bool { return d == nil || d.Path == "" })
}

// inside refuses entries whose file is outside the folder.
func (m *graphboltMeta) inside(dir, meta string) error {
	for _, d := range m.all() {
		if _, err := inside(dir, d.Path, meta); err != nil {
			return err
		}
	}
	return nil
}

// files are those that the description names and that are there.
func (m *graphboltMeta) files(dir string) (names []string) {
	for _, d := range m.all() {
		if p := d.in(dir); isFile(p) {
			names = append(names, p)
		}
	}
	return names
}

// in returns the path of the entry's file.
func (d *graphboltData) in(dir string) string {
	if filepath.IsAbs(d.Path) {
		return d.Path
	}
	return filepath.Join(dir, d.Path)
}

// graphboltImport is an import of an OnDiskDataset.
type graphboltImport struct {
	*importer
	opt  GraphBoltOptions
	used map[*graphboltData]bool
}

func (im *graphboltImport) take(d *graphboltData) { im.used[d] = true }

// graphboltUnused names the entries and files that nobody took.
func (im *graphboltImport) graphboltUnused(m *graphboltMeta) (names []string) {
	files := []string{filepath.Join(im.o.In, metaYAML)}
	other := func(kind string, all []*graphboltData) {
		for _, d := range all {
			if d == nil {
				continue
			}
			files = append(files, filepath.Clean(d.in(im.o.In))) // named by its entry
			if !im.used[d] {
				names = append(names, strings.TrimSpace(d.Domain+" "+kind)+" "+cmp.Or(d.Name, d.Path))
			}
		}
	}
	other("graph feature", m.Graph.Features)
	other("feature", m.Features)
	other("edges", m.Graph.Edges)
	for _, t := range m.Tasks {
		if t == nil {
			continue
		}
		for _, s := range slices.Concat(t.Train, t.Val, t.Test) {
			other("task "+t.Name, s.Data)
		}
	}
	return append(names, unusedBelow(im.o.In, files)...)
}

func (im *graphboltImport) run(ctx context.Context, path string, m *graphboltMeta) error {
	o := &im.o
	if err := im.stateNodes(m.Graph.Nodes[0].Num, path+": num of graph.nodes"); err != nil {
		return err
	}
	var p parts
	if o.ownFeatures() { // else they are looked at later
		features, err := im.graphboltFeatures(path, m)
		if err != nil {
			return err
		}
		p.features = dataOf(features)
	}
	if err := im.graphboltSets(ctx, path, m, &p); err != nil {
		return err
	}
	if o.Labels == "" { // else they are counted
		if err := im.countClasses(p.labels, p.labelFile); err != nil {
			return err
		}
	}
	im.take(m.Graph.Edges[0])
	im.noteUnused(path, im.graphboltUnused(m))
	var err error
	if p.edges, err = im.graphboltEdges(ctx, path, m.Graph.Edges[0],
		ofOne(im.m.Nodes)); err != nil {
		return err
	}
	return im.write(ctx, p)
}

// graphboltFeatures opens the features.
func (im *graphboltImport) graphboltFeatures(path string, m *graphboltMeta) (*npy.Array, error) {
	d, err := graphboltFeature(path, m, im.opt.Feature)
	if err != nil {
		return nil, err
	}
	im.take(d)
	a, err := im.graphboltArray(path, "feature_data "+brief(d.Name), d)
	if err != nil {
		return nil, err
	}
	if err := im.oneRowEach(a, "features"); err != nil {
		return nil, err
	}
	if sh := a.Header.Shape; len(sh) != 2 || sh[1] < 1 {
		return nil, errs.New(errs.Usage, "%s: features have shape %s, must be (nodes, dim)", a.Name,
			a.Header.ShapeString())
	}
	return a, nil
}

// graphboltArray opens the file of an entry, which must be a NumPy array.
func (im *graphboltImport) graphboltArray(meta, what string, d *graphboltData) (*npy.Array, error) {
	switch d.Format {
	case "numpy", "torch":
	default:
		return nil, errs.New(errs.Usage, "%s: %s is of format %.40q, numpy or torch is needed", meta, what,
			d.Format)
	}
	path, err := im.graphboltFile(meta, what, d)
	if err != nil {
		return nil, err
	}
	return openArray(path)
}

func (im *graphboltImport) graphboltFile(meta, what string, d *graphboltData) (string, error) {
	if d.Path == "" {
		return "", errs.New(errs.Usage, "%s: %s has no path", meta, what)
	}
	p := d.in(im.o.In)
	if !isFile(p) {
		return "", errs.New(errs.Usage, "%s: %s is in %s, which is not there or no file", meta,
			what, brief(d.Path))
	}
	return p, nil
}

func (im *graphboltImport) graphboltEdges(ctx context.Context, meta string, d *graphboltData,
	of ends) (s edges.Source, err error) {
	if d.Format == "csv" {
		path, err := im.graphboltFile(meta, "graph.edges", d)
		if err != nil {
			return s, err
		}
		s, err = csvEdges(ctx, path, max(of.src, of.dst), -1, false)
		return bounded(s, of), err
	}
	a, err := im.graphboltArray(meta, "graph.edges", d)
	if err != nil {
		return s, err
	}
	return indexEdges(a, of, twoRows)
}

// typed imports a graph of several types.
func (im *graphboltImport) typed(ctx context.Context, path string, m *graphboltMeta,
	fills []fillRule) error {
	o := &im.o
	if !o.ownFeatures() || o.SplitDir != "" {
		return errs.New(errs.Usage,
			"%s has several types, whose features and splits are those of the input; leave {features}, {feature-fn} and {splits} out",
			path)
	}
	if o.Labels != "" && filepath.Ext(o.Labels) != ".npy" {
		return errs.New(errs.Usage,
			"{labels} %s: %s has several types, whose labels are an .npy array with one for each node of the task's type",
			o.Labels, path)
	}
	t := &typedImport{importer: im.importer, pad: im.opt.Pad, fills: fills}
	if err := im.typedNodes(path, m, t); err != nil {
		return err
	}
	for _, e := range m.Graph.Edges {
		names := strings.Split(e.Type, ":")
		if len(names) != 3 {
			return errs.New(errs.Usage, "%s: the type of edges is %s, must be SRC:REL:DST", path,
				brief(e.Type))
		}
		im.take(e)
		r := typedEdges{src: names[0], name: names[1], dst: names[2],
			open: func(of ends) ([]edges.Source, error) {
				s, err := im.graphboltEdges(ctx, path, e, of)
				return []edges.Source{s}, err
			}}
		if o.Undirected {
			r.addReverse()
		}
		t.rels = append(t.rels, r)
	}
	tasks, err := im.graphboltTasks(path, m)
	if err != nil {
		return err
	}
	name, nodeType := "label", m.Graph.Nodes[0].Type
	for _, task := range tasks {
		name, nodeType = cmp.Or(task.Name, name), ""
		for _, s := range slices.Concat(task.Train, task.Val, task.Test) {
			if nodeType != "" && s.Type != nodeType {
				return errs.New(errs.Usage, "%s: the sets of task %s are of types %s and %s; one is needed",
					path, brief(task.Name), brief(nodeType), brief(s.Type))
			}
			nodeType = s.Type
		}
	}
	if err := t.taskOn(name, nodeType); err != nil {
		return err
	}
	var p parts
	if err := im.graphboltSets(ctx, path, m, &p); err != nil {
		return err
	}
	if err := im.countClasses(p.labels, p.labelFile); err != nil {
		return err
	}
	t.task.labels, t.task.labelFile, t.task.splits = p.labels, p.labelFile, p.splits
	im.noteUnused(path, im.graphboltUnused(m))
	return t.write(ctx)
}

// typedNodes reads the types, and opens their rows.
func (im *graphboltImport) typedNodes(path string, m *graphboltMeta, t *typedImport) error {
	for _, n := range m.Graph.Nodes {
		if n.Num < 1 || n.Num > maxTextNodes {
			return errs.New(errs.Usage, "%s: %d nodes of type %s; 1 to %d can be imported", path, n.Num,
				brief(n.Type), int64(maxTextNodes))
		}
		x := typedNodes{name: n.Type, nodes: n.Num}
		own := *m
		own.Features = slices.DeleteFunc(slices.Clone(m.Features), func(d *graphboltData) bool {
			return d == nil || d.Domain != "node" || d.Type != n.Type
		})
		if len(own.Features) > 0 {
			d, err := graphboltFeature(path, &own, im.opt.Feature)
			if err != nil {
				return err
			}
			im.take(d)
			a, err := im.graphboltArray(path, "feature_data "+brief(d.Name), d)
			if err == nil {
				err = t.rowsFrom(&x, a)
			}
			if err != nil {
				return err
			}
		}
		t.types = append(t.types, x)
	}
	return nil
}

// called returns the entries of a name, or all where it is "", and the names of all.
func called[T any](all []T, name string, nameOf func(T) string) (found []T, names []string) {
	for _, x := range all {
		n := nameOf(x)
		if names = append(names, n); name == "" || n == name {
			found = append(found, x)
		}
	}
	return found, names
}

// graphboltFeature chooses the node features: by name, or feat, or the only ones.
func graphboltFeature(path string, m *graphboltMeta, want string) (*graphboltData, error) {
	own := slices.DeleteFunc(slices.Clone(m.Features),
		func(d *graphboltData) bool { return d == nil || d.Domain != "node" })
	found, names := called(own, want, func(d *graphboltData) string { return d.Name })
	if feat, _ := called(own, "feat", func(d *graphboltData) string { return d.Name }); want == "" &&
		len(found) > 1 && len(feat) > 0 {
		return feat[0], nil
	}
	switch {
	case len(names) == 0:
		return nil, errs.New(errs.Usage,
			"%s has no feature_data of nodes; give features with {features} FILE", path)
	case len(found) == 0:
		return nil, errs.New(errs.Usage, "{feature} %s: %s has %s", want, path, briefNames(names))
	case len(found) > 1:
		return nil, errs.New(errs.Usage,
			"%s has several feature_data of nodes; choose one of %s with {feature}", path,
			briefNames(names))
	}
	return found[0], nil
}

// graphboltTasks returns the task that is asked for, or the only one, or none.
func (im *graphboltImport) graphboltTasks(path string, m *graphboltMeta) ([]*graphboltTask,
	error) {
	tasks, names := called(slices.DeleteFunc(slices.Clone(m.Tasks),
		func(t *graphboltTask) bool { return t == nil }), im.opt.Task,
		func(t *graphboltTask) string { return t.Name })
	switch {
	case len(tasks) == 1:
	case im.opt.Task != "":
		return nil, errs.New(errs.Usage, "{task} %s: %s has %s", im.opt.Task, path,
			briefNames(names))
	case len(tasks) > 1:
		return nil, errs.New(errs.Usage,
			"%s has several tasks; choose one of %s with {task}", path, briefNames(names))
	case !im.o.UnlabelledOK && im.o.Labels == "":
		return nil, errs.New(errs.Usage,
			"%s has no tasks, so no labels; {unlabelled-ok} imports it without", path)
	}
	return tasks, nil
}

// graphboltSets reads the node sets of a task and the labels in them. A node that is in no set has
// no label.
func (im *graphboltImport) graphboltSets(ctx context.Context, path string, m *graphboltMeta,
	p *parts) error {
	o := &im.o
	tasks, err := im.graphboltTasks(path, m)
	if err != nil {
		return err
	}
	if err := im.needMemory(path+": a label for each of the \"num\" nodes", im.m.Nodes,
		4); err != nil {
		return err
	}
	p.labels, p.labelFile = slices.Repeat([]int32{noLabel}, int(im.m.Nodes)), path
	labelled := false
	for _, t := range tasks {
		if p.splits, labelled, err = im.graphboltTask(path, t, p.labels); err != nil {
			return err
		}
	}
	if o.Labels != "" {
		p.labelFile = o.Labels
		if p.labels, err = im.labelFile(ctx, o.Labels); err != nil {
			return err
		}
	} else if !labelled && !o.UnlabelledOK {
		return errs.New(errs.Usage,
			"%s: the task's sets have no labels; give {labels} FILE, or {unlabelled-ok}", path)
	}
	if o.SplitDir != "" {
		p.splits, err = im.folderSplits(ctx, o.SplitDir)
	}
	return err
}

// graphboltTask reads the sets of a task and fills in their labels, where they have any.
func (im *graphboltImport) graphboltTask(path string, t *graphboltTask, labels []int32) (
	splits []splitSet, labelled bool, err error) {
	o := &im.o
	switch {
	case t.Classes == 0:
	case t.Classes < 0 || t.Classes >= math.MaxInt32:
		return nil, false, errs.New(errs.Usage, "%s: num_classes of task %s is %d", path,
			brief(t.Name), t.Classes)
	case o.NumClasses == 0:
		o.NumClasses, im.classesFrom = t.Classes, path+" (num_classes)"
	case o.NumClasses != t.Classes:
		o.note("{num-classes} %d is taken; %s says %d", o.NumClasses, path, t.Classes)
	}
	for _, s := range []struct {
		name string
		sets []graphboltSet
	}{{"train_set", t.Train}, {"validation_set", t.Val}, {"test_set", t.Test}} {
		if len(s.sets) > 1 {
			return nil, false, errs.New(errs.Usage,
				"%s: %s has %d types of nodes; one is needed", path, s.name, len(s.sets))
		}
		set := splitSet{file: path + " (" + s.name + ")"}
		if len(s.sets) == 1 {
			var has bool
			if set, has, err = im.graphboltSet(path, s.name, s.sets[0].Data, labels); err != nil {
				return nil, false, err
			}
			labelled = labelled || has
		}
		splits = append(splits, set)
	}
	return splits, labelled, nil
}

// seedsAndLabels finds the two arrays of a set by their names or places.
func seedsAndLabels(meta, name string, data []*graphboltData) (seeds, labels *graphboltData,
	err error) {
	for i, d := range data {
		if d == nil {
			return nil, nil, errs.New(errs.Usage, "%s: entry %d of %s is empty", meta, i, name)
		}
		switch {
		case d.Name == "seeds" || d.Name == "seed_nodes" || d.Name == "" && i == 0:
			seeds = d
		case d.Name == "labels" || d.Name == "" && i == 1:
			labels = d
		}
	}
	if seeds == nil {
		err = errs.New(errs.Usage,
			"%s: %s has no seeds; only node classification can be imported", meta, name)
	}
	return seeds, labels, err
}

// graphboltSet reads one set: its seeds, and, if it has any, their labels.
func (im *graphboltImport) graphboltSet(meta, name string, data []*graphboltData,
	labels []int32) (set splitSet, labelled bool, err error) {
	seeds, lab, err := seedsAndLabels(meta, name, data)
	if err != nil {
		return set, false, err
	}
	im.take(seeds)
	if lab != nil && im.o.Labels == "" {
		im.take(lab)
	}
	a, err := im.graphboltArray(meta, "the seeds of "+name, seeds)
	if err != nil {
		return set, false, err
	}
	set.file = a.Name
	if set.ids, err = im.splitIDs(a); err != nil || lab == nil {
		return set, false, err
	}
	b, err := im.graphboltArray(meta, "the labels of "+name, lab)
	if err != nil {
		return set, false, err
	}
	if n := b.Header.Elements(); n != int64(len(set.ids)) {
		return set, false, errs.New(errs.Usage,
			"%s has shape %s, %s has %d nodes; one label for each is needed", b.Name,
			b.Header.ShapeString(), a.Name, len(set.ids))
	}
	classes, err := im.labelArray(b)
	if err != nil {
		return set, false, err
	}
	for i, v := range set.ids {
		if old := labels[v]; old != noLabel && old != classes[i] {
			return set, false, errs.New(errs.Usage,
				"%s: label %d of node %d at position %d, another set has %d", b.Name, classes[i],
				v, i, old)
		}
		labels[v] = classes[i]
	}
	return set, true, nil
}
