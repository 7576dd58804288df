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
//	ids.npy        optional, int64 [nodes]: the ids that the nodes had where they came from
//	dataset.seal   sizes and checksums of all of these (package seal); missing in a dataset of an older version
package dataset

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unsafe"

	"github.com/google/uuid"
	"go.yaml.in/yaml/v3"

	"helios/dataset/npy"
	"helios/dataset/seal"
	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/infile"
)

// MaxDescription bounds a description that is read: one of MaxRelations relations fits.
const MaxDescription = 16 << 20

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
	IDsName      = "ids.npy"
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
}

// Dataset is an open dataset directory. It is safe for concurrent use.
type Dataset struct {
	Meta Meta

	folder
	noEdges bool

	mu       sync.Mutex
	topology *graph.Topology
	features *seal.Reader
	dataOff  int64 // of the rows in features
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
	text, err := infile.Read(filepath.Join(dir, MetaName), MaxDescription)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errs.New(errs.Usage,
			"%s: not a dataset directory: it has no %s; make one with \"heliosctl generate\" or \"heliosctl import\"",
			dir, MetaName)
	}
	if err != nil {
		return nil, errs.With(errs.Usage, err)
	}
	d := &Dataset{folder: folder{dir: dir}}
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
	n := &Dataset{Meta: d.Meta, folder: folder{dir: d.dir, id: d.id, seal: d.seal}, noEdges: true}
	n.meta, n.Meta.Edges = &n.Meta, 0
	return n
}

// Topology reads the graph into memory off Go's heap, or maps it from its files where it is as
// large as 40 % of the memory that can be had, checks it, and keeps it until Close.
func (d *Dataset) Topology() (*graph.Topology, error) { return d.readTopology(true) }

// TopologyInMemory is Topology, always in memory of its own: what a GPU registers must be, since a
// driver refuses to pin read-only pages of a file. Both give the topology that the first of them
// has read.
func (d *Dataset) TopologyInMemory() (*graph.Topology, error) { return d.readTopology(false) }

func (d *Dataset) readTopology(mayMap bool) (*graph.Topology, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("dataset %s is closed", d.dir)
	}
	if d.topology != nil {
		return d.topology, nil
	}
	if d.noEdges {
		t, err := graph.Alloc(d.Meta.Nodes, 0, false) // fresh memory is zero: no neighbours
		if err != nil {
			return nil, err
		}
		d.topology = t
		return t, nil
	}
	a, err := npy.Open(d.Path(IndicesName))
	if err != nil {
		return nil, err
	}
	wide := a.Header.DType == npy.Int64
	if mayMap && hostmem.Scarce((d.Meta.Nodes+1)*8+a.Header.Bytes(), mapTopologyFrom) {
		d.topology, err = d.mapTopology(wide)
		return d.topology, err
	}
	t, err := graph.Alloc(d.Meta.Nodes, d.Meta.Edges, wide)
	if err != nil {
		return nil, fmt.Errorf("dataset %s: %w", d.dir, err)
	}
	if err := d.fillTopology(t); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	d.topology = t
	return t, nil
}

func (d *Dataset) fillTopology(t *graph.Topology) error {
	if err := d.readArray(IndptrName, rawBytes(t.Indptr), nil); err != nil {
		return err
	}
	if err := d.checkIndptr(t); err != nil {
		return err
	}
	ids := rawBytes(t.Indices32)
	if t.Wide() {
		ids = rawBytes(t.Indices64)
	}
	if err := d.readArray(IndicesName, ids, d.idsWithin(t)); err != nil {
		return err
	}
	return t.ValidateOffsets()
}

// idsWithin checks pieces of a topology's ids as they are read. Pieces end on multiples of an id's
// width.
func (d *Dataset) idsWithin(t *graph.Topology) func(offset int64, b []byte) error {
	return func(offset int64, b []byte) error {
		if t.Wide() {
			for i, v := range t.Indices64[offset/8 : (offset+int64(len(b)))/8] {
				if v < 0 || v >= t.NumNodes {
					return BadID(d.Path(IndicesName), offset/8+int64(i), v, t.NumNodes)
				}
			}
			return nil
		}
		for i, v := range t.Indices32[offset/4 : (offset+int64(len(b)))/4] {
			if int64(v) >= t.NumNodes {
				return BadID(d.Path(IndicesName), offset/4+int64(i), int64(v), t.NumNodes)
			}
		}
		return nil
	}
}

// rawBytes is the memory of a slice. The files hold little-endian numbers, as every machine
// that Helios runs on does.
func rawBytes[T int64 | int32 | uint32](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*int(unsafe.Sizeof(v[0])))
}

func (d *Dataset) checkIndptr(t *graph.Topology) error {
	file, p := d.Path(IndptrName), t.Indptr
	if p[0] != 0 {
		return errs.New(errs.Usage, "%s: starts with %d, must start with 0", file, p[0])
	}
	for i := 1; i < len(p); i++ {
		if p[i] < p[i-1] {
			return errs.New(errs.Usage,
				"%s: falls from %d to %d at position %d; offsets must not fall", file, p[i-1],
				p[i], i)
		}
	}
	if last := p[len(p)-1]; last != t.NumEdges {
		return errs.New(errs.Usage, "%s: ends with %d, but %s has %d entries", file, last,
			d.Path(IndicesName), t.NumEdges)
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

// Labels are the classes of all nodes; -1 means unlabelled. They are to be read only: those of a
// large graph are mapped from their file until Close.
func (d *Dataset) Labels() ([]int32, error) {
	if hostmem.Scarce(4*d.Meta.Nodes, mapLabelsFrom) {
		return d.mapLabels()
	}
	v := make([]int32, d.Meta.Nodes)
	if err := d.readArray(LabelsName, rawBytes(v), nil); err != nil {
		return nil, err
	}
	for i, x := range v {
		if err := d.checkLabel(int64(x), int64(i)); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (d *Dataset) checkLabel(x, node int64) error {
	if x < -1 || x >= int64(d.Meta.Classes) {
		return errs.New(errs.Usage, "%s: label %d of node %d is outside -1..%d", d.Path(LabelsName),
			x, node, d.Meta.Classes-1)
	}
	return nil
}

// Split returns the node ids of "train", "val" or "test", ascending.
func (d *Dataset) Split(name string) ([]int64, error) {
	n, ok := map[string]int64{"train": d.Meta.Train, "val": d.Meta.Val, "test": d.Meta.Test}[name]
	if !ok {
		return nil, errs.New(errs.Usage, "unknown split %q; use train, val or test", name)
	}
	v := make([]int64, n)
	if err := d.readArray(name+".npy", rawBytes(v), nil); err != nil {
		return nil, err
	}
	for i, x := range v {
		if x < 0 || x >= d.Meta.Nodes {
			return nil, BadID(d.Path(name+".npy"), int64(i), x, d.Meta.Nodes)
		}
	}
	return v, nil
}

// Names are the nodes' names, or nil when the dataset has none.
func (d *Dataset) Names() ([]string, error) {
	if _, err := os.Lstat(d.Path(NamesName)); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	r, err := d.reader(NamesName)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }() // read only
	text := make([]byte, r.Size())
	if err := r.ReadAt(text, 0); err != nil {
		return nil, err
	}
	var names []string
	sc := bufio.NewScanner(bytes.NewReader(text))
	for sc.Scan() {
		names = append(names, sc.Text())
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path(NamesName), err)
	}
	if int64(len(names)) != d.Meta.Nodes {
		return nil, errs.New(errs.Usage, "%s has %d names, %s says %d nodes", d.Path(NamesName),
			len(names), d.Path(MetaName), d.Meta.Nodes)
	}
	return names, nil
}

// CheckRowsOnce has ReadRows hold each block of the rows against the seal when a part of it is read
// for the first time, and not again: for rows that are read here and there. Nobody may be reading.
func (d *Dataset) CheckRowsOnce() error {
	if d.FeatureFunc() != nil {
		return nil
	}
	f, _, err := d.featureFile()
	if err == nil {
		f.CheckOnce()
	}
	return err
}

func (d *Dataset) featureFile() (*seal.Reader, int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, 0, fmt.Errorf("dataset %s is closed", d.dir)
	}
	if d.features == nil {
		a, err := npy.Open(d.Path(FeaturesName))
		if err != nil {
			return nil, 0, err
		}
		if d.features, err = d.reader(FeaturesName); err != nil {
			return nil, 0, err
		}
		d.dataOff = a.DataOffset()
	}
	return d.features, d.dataOff, nil
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
	if d.topology != nil {
		err = d.topology.Close()
		d.topology = nil
	}
	err = errors.Join(err, d.unmap())
	if d.features != nil {
		err = errors.Join(err, d.features.Close())
	}
	return err
}
