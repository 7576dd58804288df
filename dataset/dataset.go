// Package dataset is the form in which Helios keeps a graph: a directory with the topology,
// labels and splits as .npy files, and features striped over SSDs behind a superblock.
// It generates, imports, loads, attaches and verifies datasets.
//
// A directory of format 1 holds (that of format 2 is described in schema.go)
//
//	dataset.yaml   what it is (Meta)
//	indptr.npy     int64 [nodes+1]: in-neighbours of v are indices[indptr[v]:indptr[v+1]] (CSC)
//	indices.npy    uint32 or int64 [edges], sorted within a node
//	features.npy   float32 or float16 [nodes, dim]: the source that load stripes over SSDs; missing where
//	               dataset.yaml names a feature function (featurefn.go), which makes the rows
//	labels.npy     int32 [nodes], -1 = unlabelled
//	train.npy, val.npy, test.npy   int64 node ids, ascending
//	names.txt      optional: one name per node, in order
//	names.parquet  optional: the same of tables, looked up both ways (package names)
//	ids.npy        optional, int64 [nodes]: the ids that the nodes had where they came from
//	columns.json   optional: how a table's columns became features (package columns)
//	dataset.seal   sizes and checksums of all of these (package seal); missing in a dataset of an older version
package dataset

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/google/uuid"
	"go.yaml.in/yaml/v3"

	"helios/dataset/names"
	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// MaxDescription bounds a foreign description that is read.
const MaxDescription = 1 << 20

// maxMeta bounds dataset.yaml: one of MaxRelations relations fits.
const maxMeta = 16 << 20

// PartialMark is in the name of every directory that is being written. Open refuses such names.
const PartialMark = ".partial-"

// FormatVersion is the version of a directory whose nodes and edges are of one type each, and whose
// nodes have classes. Others are of FormatTyped.
const FormatVersion = 1

// Names of the files in a dataset directory.
const (
	MetaName     = "dataset.yaml"
	IndptrName   = "indptr.npy"
	IndicesName  = "indices.npy"
	FeaturesName = "features.npy"
	LabelsName   = "labels.npy"
	NamesName    = "names.txt"
	NameMapName  = "names.parquet"
	IDsName      = "ids.npy"
	ColumnsName  = "columns.json"
)

// Splits are the names of the node sets.
var Splits = []string{"train", "val", "test"}

// Meta is dataset.yaml. In format 2 it has a Schema, whose sums the other fields hold (Sum).
type Meta struct {
	Schema `yaml:"-"`

	Format  int    `yaml:"format"`
	UUID    string `yaml:"uuid"` // of the content: equal arrays, equal UUID
	Name    string `yaml:"name"`
	Nodes   int64  `yaml:"nodes"`
	Edges   int64  `yaml:"edges"` // as stored, directed
	Dim     int    `yaml:"dim"`   // features per node
	Classes int    `yaml:"classes"`
	DType   string `yaml:"dtype"` // of the features: float32 or float16
	// makes the rows, as "hash:7"; there is no features.npy then
	FeatureFn  string   `yaml:"feature_fn,omitempty"`
	Train      int64    `yaml:"train"` // nodes per split
	Val        int64    `yaml:"val"`
	Test       int64    `yaml:"test"`
	Unlabelled int64    `yaml:"unlabelled,omitempty"`
	ClassNames []string `yaml:"class_names,omitempty"`
	LabelDims  int      `yaml:"label_dims,omitempty"` // as Task's
	Source     Source   `yaml:"source"`
	CreatedBy  string   `yaml:"created_by"`
	Sealed     bool     `yaml:"sealed,omitempty"` // there is a manifest beside this file
}

// Source describes how a dataset was made.
type Source struct {
	Kind    string            `yaml:"kind"` // "sbm", "rmat", "communities", "npy", "edges", "debian"
	From    []string          `yaml:"from,omitempty"`
	Options map[string]string `yaml:"options,omitempty"` // what to repeat to get the same
	Counts  map[string]int64  `yaml:"counts,omitempty"`  // what was found on the way
	// Appended are the imports that have added to the dataset, the last one at the end.
	Appended []Addition `yaml:"appended,omitempty"`
}

// Addition is an import that has added to a dataset.
type Addition struct {
	UUID  string `yaml:"uuid"`  // of the dataset as it was: its rows are the first ones of each type
	Input string `yaml:"input"` // fingerprint of what was added
}

// WasOnce reports whether an import has added to the dataset with a UUID, whose nodes have kept
// numbers, rows and splits.
func (s *Source) WasOnce(uuid string) bool {
	return slices.ContainsFunc(s.Appended, func(a Addition) bool { return a.UUID == uuid })
}

// Dataset is an open dataset directory. It is safe for concurrent use.
type Dataset struct {
	Meta Meta

	folder
	noEdges bool

	mu       sync.Mutex
	topology map[int]*graph.Topology // by relation
	features map[int]rowFile         // by type of nodes
	closed   bool
	maps     []*mapping
	fnState
}

// Open opens the dataset in dir and checks that its parts are there, whole and agree with
// each other. Errors are of class usage and name the file.
func Open(dir string) (*Dataset, error) { return openDir(dir, false) }

func openDir(dir string, toSeal bool) (*Dataset, error) {
	st, err := os.Stat(dir)
	if err != nil {
		return nil, errs.New(errs.Usage,
			"dataset %s: %w; make one with \"heliosctl generate\" or \"heliosctl import\"",
			dir, err)
	}
	if !st.IsDir() {
		return nil, errs.New(errs.Usage,
			"dataset %s: not a directory; a dataset is a directory with %s", dir, MetaName)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if strings.Contains(filepath.Base(abs), PartialMark) {
		return nil, errs.New(errs.Usage,
			"dataset %s: unfinished output of a run that was interrupted; remove it and run that again",
			dir)
	}
	text, err := infile.Read(filepath.Join(dir, MetaName), maxMeta)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errs.New(errs.Usage,
			"%s: not a dataset directory: it has no %s; make one with \"heliosctl generate\" or \"heliosctl import\"",
			dir, MetaName)
	}
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	d := &Dataset{folder: folder{dir: dir, was: st}}
	d.meta = &d.Meta
	if err := d.openSeal(text); err != nil {
		return nil, err
	}
	if err := d.Meta.decode(text); err != nil {
		return nil, errs.New(errs.Usage, "%s: %w", filepath.Join(dir, MetaName), err)
	}
	d.id = uuid.MustParse(d.Meta.UUID) // decode has checked it
	if err := d.checkSeal(toSeal); err != nil {
		return nil, err
	}
	if err := d.check(); err != nil {
		return nil, err
	}
	return d, nil
}

func (m *Meta) decode(text []byte) error {
	var probe struct {
		Format *int `yaml:"format"`
	}
	if err := yaml.Unmarshal(text, &probe); err != nil {
		return fmt.Errorf("not readable: %w", err)
	}
	if probe.Format == nil {
		return errors.New("no format version; this is not a Helios dataset")
	}
	var err error
	switch *probe.Format {
	case FormatVersion:
		if err = yaml.Unmarshal(text, m); err != nil {
			err = fmt.Errorf("not readable: %w", err)
		}
	case FormatTyped:
		err = m.decodeTyped(text)
	default:
		err = fmt.Errorf(
			"format version %d is unknown, this heliosctl reads %d and %d; use the heliosctl that wrote it or import again",
			*probe.Format, FormatVersion, FormatTyped)
	}
	if err != nil {
		return err
	}
	if _, err := uuid.Parse(m.UUID); err != nil {
		return fmt.Errorf("uuid %q: %w", m.UUID, err)
	}
	if m.Typed() {
		return m.checkFeatureFn()
	}
	if m.LabelDims < 0 || m.LabelDims > 2 {
		return fmt.Errorf("label_dims %d is neither 1 nor 2", m.LabelDims)
	}
	if m.Nodes < 1 || m.Edges < 0 || m.Dim < 1 || m.Dim > MaxDim || m.Classes < 0 {
		return fmt.Errorf("impossible counts: nodes %d, edges %d, dim %d, classes %d", m.Nodes,
			m.Edges, m.Dim, m.Classes)
	}
	if err := m.checkDType(); err != nil {
		return err
	}
	return m.checkFeatureFn()
}

// MaxDim keeps a row below 1 MiB, so that it fits one checksum chunk.
const MaxDim = 1 << 18

// Path returns the path of a file of the dataset lies.
func (d *Dataset) Path(name string) string { return d.path(name) }

// Dir is the directory as given to Open.
func (d *Dataset) Dir() string { return d.dir }

// UUID identifies the content.
func (d *Dataset) UUID() uuid.UUID { return d.id }

// WithoutEdges opens the same dataset with an empty topology: the ablation that shows what
// the edges are worth. Nodes, features and the SSDs they are on stay the same. It is
// independent of d and closed by itself.
func (d *Dataset) WithoutEdges() *Dataset {
	n := &Dataset{Meta: d.Meta, noEdges: true,
		folder: folder{dir: d.dir, was: d.was, id: d.id, seal: d.seal}}
	n.meta, n.Meta.Edges = &n.Meta, 0
	n.Meta.Relations = slices.Clone(d.Meta.Relations)
	for i := range n.Meta.Relations {
		n.Meta.Relations[i].Edges = 0
	}
	return n
}

// Topology reads the graph into memory off Go's heap, or maps it from its files where it is as
// large as 40 % of the memory that can be had, checks it, and keeps it until Close. A graph of
// several types or relations is refused (class capability): who knows these reads each Relation.
func (d *Dataset) Topology() (*graph.Topology, error) {
	if err := d.oneRelation(); err != nil {
		return nil, err
	}
	return d.readTopology(0, true)
}

// TopologyInMemory is Topology, always in memory of its own: what a GPU registers must be, since a
// driver refuses to pin read-only pages of a file. Both give the topology that the first of them
// has read.
func (d *Dataset) TopologyInMemory() (*graph.Topology, error) {
	if err := d.oneRelation(); err != nil {
		return nil, err
	}
	return d.readTopology(0, false)
}

// Relation is Topology of one relation: its nodes are those of Dst, its ids are numbers within Src.
func (d *Dataset) Relation(i int) (*graph.Topology, error) { return d.readTopology(i, true) }

// RelationInMemory is TopologyInMemory of one relation.
func (d *Dataset) RelationInMemory(i int) (*graph.Topology, error) {
	return d.readTopology(i, false)
}

// oneRelation refuses a graph of several types or relations.
func (d *Dataset) oneRelation() error {
	if len(d.Meta.NodeTypes) <= 1 && len(d.Meta.Relations) <= 1 {
		return nil
	}
	return errs.New(errs.Capability,
		"dataset %s has %d types of nodes and %d relations, and what was asked for knows one of each; use a dataset of one type",
		d.dir, len(d.Meta.NodeTypes), len(d.Meta.Relations))
}

// lists are the files of a relation's in-neighbours.
type lists struct {
	dir         string
	dsts, srcs  int64 // nodes of both ends
	edges       int64
	file, inptr string // paths of both arrays, for messages
}

func (l *lists) indptr() string  { return path.Join(l.dir, IndptrName) }
func (l *lists) indices() string { return path.Join(l.dir, IndicesName) }

// listsOf returns the files of a relation.
func (d *Dataset) listsOf(relation int) *lists {
	g := d.Meta.Graph()
	r := &g.Relations[relation]
	l := &lists{dir: r.Dir, dsts: g.NodeTypes[g.TypeOf(r.Dst)].Nodes,
		srcs: g.NodeTypes[g.TypeOf(r.Src)].Nodes, edges: r.Edges}
	l.inptr, l.file = d.Path(l.indptr()), d.Path(l.indices())
	return l
}

func (d *Dataset) readTopology(relation int, mayMap bool) (*graph.Topology, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("dataset %s is closed", d.dir)
	}
	if t := d.topology[relation]; t != nil {
		return t, nil
	}
	t, err := d.openTopology(d.listsOf(relation), mayMap)
	if err != nil {
		return nil, err
	}
	if d.topology == nil {
		d.topology = map[int]*graph.Topology{}
	}
	d.topology[relation] = t
	return t, nil
}

func (d *Dataset) openTopology(l *lists, mayMap bool) (*graph.Topology, error) {
	if d.noEdges {
		return graph.Alloc(l.dsts, 0, false) // fresh memory is zero: no neighbours
	}
	a, err := npy.Open(l.file)
	if err != nil {
		return nil, err
	}
	wide := a.Header.DType == npy.Int64
	if mayMap && hostmem.Scarce((l.dsts+1)*8+a.Header.Bytes(), mapTopologyFrom) {
		return d.mapTopology(l, wide)
	}
	t, err := graph.Alloc(l.dsts, l.edges, wide)
	if err != nil {
		return nil, fmt.Errorf("dataset %s: %w", d.dir, err)
	}
	if err := d.fillTopology(l, t); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (d *Dataset) fillTopology(l *lists, t *graph.Topology) error {
	if err := d.readArray(l.indptr(), rawBytes(t.Indptr), nil); err != nil {
		return err
	}
	if err := l.checkIndptr(t); err != nil {
		return err
	}
	ids := rawBytes(t.Indices32)
	if t.Wide() {
		ids = rawBytes(t.Indices64)
	}
	if err := d.readArray(l.indices(), ids, l.idsWithin(t)); err != nil {
		return err
	}
	return t.ValidateOffsets()
}

// idsWithin checks pieces of a topology's ids as they are read. Pieces end on multiples of an id's
// width.
func (l *lists) idsWithin(t *graph.Topology) func(offset int64, b []byte) error {
	return func(offset int64, b []byte) error {
		if t.Wide() {
			for i, v := range t.Indices64[offset/8 : (offset+int64(len(b)))/8] {
				if v < 0 || v >= l.srcs {
					return BadID(l.file, offset/8+int64(i), v, l.srcs)
				}
			}
			return nil
		}
		for i, v := range t.Indices32[offset/4 : (offset+int64(len(b)))/4] {
			if int64(v) >= l.srcs {
				return BadID(l.file, offset/4+int64(i), int64(v), l.srcs)
			}
		}
		return nil
	}
}

// rawBytes is the memory of a slice. The files hold little-endian numbers, as every machine
// that Helios runs on does.
func rawBytes[T int64 | int32 | uint32 | float32](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*int(unsafe.Sizeof(v[0])))
}

func (l *lists) checkIndptr(t *graph.Topology) error {
	p := t.Indptr
	if p[0] != 0 {
		return errs.New(errs.Usage, "%s: starts with %d, must start with 0", l.inptr, p[0])
	}
	for i := 1; i < len(p); i++ {
		if p[i] < p[i-1] {
			return errs.New(errs.Usage,
				"%s: falls from %d to %d at position %d; offsets must not fall", l.inptr, p[i-1],
				p[i], i)
		}
	}
	if last := p[len(p)-1]; last != l.edges {
		return errs.New(errs.Usage, "%s: ends with %d, but %s has %d entries", l.inptr, last,
			l.file, l.edges)
	}
	return nil
}

// BadID says that a file names a node that there is not.
func BadID(file string, pos, v, nodes int64) error {
	hint := ""
	if v == nodes {
		hint = "; ids count from 0: take 1 off where these count from 1"
	}
	return errs.New(errs.Usage, "%s: node id %d at position %d is outside 0..%d%s", file, v, pos,
		nodes-1, hint)
}

// Labels are the classes of all nodes, or of those of the first task's type; -1 means unlabelled.
// They are to be read only: those of a large graph are mapped from their file until Close.
func (d *Dataset) Labels() ([]int32, error) { return d.TaskLabels(0) }

// TaskLabels are the Labels of a task whose target is a class.
func (d *Dataset) TaskLabels(task int) ([]int32, error) {
	t, n, err := d.taskOf(task, TargetClass)
	if err != nil {
		return nil, err
	}
	file := path.Join(t.Dir, LabelsName)
	var v []int32
	if hostmem.Scarce(4*n, mapLabelsFrom) {
		v, err = d.mapLabels(file)
	} else {
		v = make([]int32, n)
		err = d.readArray(file, rawBytes(v), nil)
	}
	if err != nil {
		return nil, err
	}
	for i, x := range v {
		if x < -1 || int(x) >= t.Classes {
			return nil, errs.New(errs.Usage, "%s: label %d of node %d is outside -1..%d",
				d.Path(file), x, i, t.Classes-1)
		}
	}
	return v, nil
}

// TaskMultiLabels are the labels of a task with several: Columns for each node, each 0, 1, or 255
// for unknown.
func (d *Dataset) TaskMultiLabels(task int) ([]uint8, error) {
	t, n, err := d.taskOf(task, TargetMultiLabel)
	if err != nil {
		return nil, err
	}
	file := path.Join(t.Dir, LabelsName)
	v := make([]uint8, n*int64(t.Columns))
	if err := d.readArray(file, v, nil); err != nil {
		return nil, err
	}
	for i, x := range v {
		if x > 1 && x != 255 {
			return nil, errs.New(errs.Usage,
				"%s: label %d of node %d is %d, must be 0, 1, or 255 for unknown", d.Path(file),
				i%t.Columns, i/t.Columns, x)
		}
	}
	return v, nil
}

// TaskValues are the values that a task of regression learns: Columns for each node, NaN where they
// are not known.
func (d *Dataset) TaskValues(task int) ([]float32, error) {
	t, n, err := d.taskOf(task, TargetRegression)
	if err != nil {
		return nil, err
	}
	file := path.Join(t.Dir, LabelsName)
	v := make([]float32, n*int64(t.Columns))
	if err := d.readArray(file, rawBytes(v), nil); err != nil {
		return nil, err
	}
	for i, x := range v {
		if math.IsInf(float64(x), 0) {
			return nil, errs.New(errs.Usage, "%s: value %d of node %d is %v, must be a number, or NaN for unknown",
				d.Path(file), i%t.Columns, i/t.Columns, x)
		}
	}
	return v, nil
}

// taskOf returns a task whose target is as wanted, and the number of its type's nodes.
func (d *Dataset) taskOf(task int, target string) (t *Task, nodes int64, err error) {
	g := d.Meta.Graph()
	t = &g.Tasks[task]
	if t.Target != target {
		return nil, 0, errs.New(errs.Capability, "dataset %s: task %s is one of %s, not of %s", d.dir,
			t.Name, t.Target, target)
	}
	return t, g.NodeTypes[g.TypeOf(t.Type)].Nodes, nil
}

// Split returns the node ids of "train", "val" or "test", ascending: of the first task.
func (d *Dataset) Split(name string) ([]int64, error) { return d.TaskSplit(0, name) }

// TaskSplit is Split of a task: ids are numbers within its type.
func (d *Dataset) TaskSplit(task int, name string) ([]int64, error) {
	g := d.Meta.Graph()
	t := &g.Tasks[task]
	n, ok := t.Split(name)
	if !ok {
		return nil, errs.New(errs.Usage, "unknown split %q; use train, val or test", name)
	}
	file := path.Join(t.Dir, name+".npy")
	v := make([]int64, n)
	if err := d.readArray(file, rawBytes(v), nil); err != nil {
		return nil, err
	}
	nodes := g.NodeTypes[g.TypeOf(t.Type)].Nodes
	for i, x := range v {
		if x < 0 || x >= nodes {
			return nil, BadID(d.Path(file), int64(i), x, nodes)
		}
	}
	if x, twice := repeated(v); twice && !d.Meta.Homogeneous() {
		return nil, errs.New(errs.Usage,
			"%s has node %d twice, and learned tables take each node once; import the dataset anew, with each node once in a split",
			d.Path(file), x)
	}
	return v, nil
}

// repeated returns a number that is in v twice.
func repeated(v []int64) (x int64, twice bool) {
	if !slices.IsSorted(v) {
		v = slices.Sorted(slices.Values(v))
	}
	for i := 1; i < len(v); i++ {
		if v[i] == v[i-1] {
			return v[i], true
		}
	}
	return 0, false
}

// Names are the nodes' names, or nil when the dataset has none: those of the first task's type.
func (d *Dataset) Names() ([]string, error) {
	g := d.Meta.Graph()
	return d.NamesOf(g.TypeOf(g.Tasks[0].Type))
}

// NamesOf are the Names of a type of nodes.
func (d *Dataset) NamesOf(nodeType int) ([]string, error) {
	g := d.Meta.Graph()
	t := &g.NodeTypes[nodeType]
	if m, err := d.NameMap(nodeType); m != nil || err != nil {
		return readNames(m, err)
	}
	file := path.Join(t.Dir, NamesName)
	if _, err := os.Lstat(d.Path(file)); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	text, err := d.text(file)
	if err != nil {
		return nil, err
	}
	var names []string
	sc := bufio.NewScanner(bytes.NewReader(text))
	for sc.Scan() {
		names = append(names, sc.Text())
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path(file), err)
	}
	if int64(len(names)) != t.Nodes {
		return nil, errs.New(errs.Usage, "%s has %d names, %s says %d nodes", d.Path(file),
			len(names), d.Path(MetaName), t.Nodes)
	}
	return names, nil
}

// NameMap is names.parquet of a type of nodes, or nil when there is none. Its caller closes it.
func (d *Dataset) NameMap(nodeType int) (*NameMap, error) {
	t := &d.Meta.Graph().NodeTypes[nodeType]
	file := path.Join(t.Dir, NameMapName)
	if _, err := os.Lstat(d.Path(file)); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	r, err := d.reader(file)
	if err != nil {
		return nil, err
	}
	f, err := names.Open(d.Path(file), readerAt{r}, r.Size())
	if err == nil && f.Nodes() != t.Nodes {
		err = errs.New(errs.Usage, "%s has %d names, %s says %d nodes", d.Path(file), f.Nodes(),
			d.Path(MetaName), t.Nodes)
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return &NameMap{f, r}, nil
}

// NameMap is a file of names that is looked up.
type NameMap struct {
	*names.File
	io.Closer
}

// readerAt is a sealed file as an io.ReaderAt.
type readerAt struct{ *seal.Reader }

// ReadAt reads and checks bytes.
func (r readerAt) ReadAt(b []byte, at int64) (int, error) {
	if left := r.Size() - at; int64(len(b)) > left {
		n := max(left, 0)
		if err := r.Reader.ReadAt(b[:n], at); err != nil {
			return 0, err
		}
		return int(n), io.EOF
	}
	return len(b), r.Reader.ReadAt(b, at)
}

// readNames reads all names.
func readNames(m *NameMap, err error) (all []string, _ error) {
	if err != nil {
		return nil, err
	}
	defer func() { _ = m.Close() }() // read only
	return all, m.Each(func(name []byte) error {
		all = append(all, string(name))
		return nil
	})
}

// ColumnsOf is columns.json of a type of nodes, or nil when there is none.
func (d *Dataset) ColumnsOf(nodeType int) ([]byte, error) {
	file := path.Join(d.Meta.Graph().NodeTypes[nodeType].Dir, ColumnsName)
	if _, err := os.Lstat(d.Path(file)); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return d.text(file)
}

// text reads a file whole.
func (d *Dataset) text(file string) ([]byte, error) {
	r, err := d.reader(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // read only
	text := make([]byte, r.Size())
	return text, r.ReadAt(text, 0)
}

// CheckRowsOnce has ReadRows hold each block of the rows against the seal when a part of it is read
// for the first time, and not again: for rows that are read here and there. Nobody may be reading.
func (d *Dataset) CheckRowsOnce() error {
	if d.FeatureFunc() != nil {
		return nil
	}
	for t, n := range d.Meta.Graph().NodeTypes {
		if n.Dim == 0 {
			continue
		}
		f, err := d.featureFile(t)
		if err != nil {
			return err
		}
		f.CheckOnce()
	}
	return nil
}

// rowFile is an open file of rows.
type rowFile struct {
	*seal.Reader
	first int64 // byte of the first row
}

// featureFile opens the rows of a type.
func (d *Dataset) featureFile(nodeType int) (rowFile, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return rowFile{}, fmt.Errorf("dataset %s is closed", d.dir)
	}
	if f, ok := d.features[nodeType]; ok {
		return f, nil
	}
	name := d.Meta.featuresOf(nodeType)
	a, err := npy.Open(d.Path(name))
	if err != nil {
		return rowFile{}, err
	}
	f := rowFile{first: a.DataOffset()}
	if f.Reader, err = d.reader(name); err != nil {
		return rowFile{}, err
	}
	if d.features == nil {
		d.features = map[int]rowFile{}
	}
	d.features[nodeType] = f
	return f, nil
}

// Close frees the topology, which must not be used any more, and closes files.
func (d *Dataset) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	var err error
	for _, t := range d.topology {
		err = errors.Join(err, t.Close())
	}
	d.topology = nil
	err = errors.Join(err, d.unmap())
	for _, f := range d.features {
		err = errors.Join(err, f.Close())
	}
	return err
}
