package importer

import (
	"errors"
	"math"
	"path"
	"slices"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// A dataset whose targets are no classes is of format 2, with one type of nodes and one relation:
// its files lie in folders. While it is imported, labels in the sense of splits.go are 0 for a node
// that has a target, and noLabel for one that has none.

// targets are several labels or numbers of each node.
type targets struct {
	columns int64
	labels  []uint8   // nodes × columns, 255: unknown
	numbers []float32 // the same, NaN: none
}

// plain reports whether the targets are classes, as in format 1.
func (im *importer) plain() bool {
	return im.o.Target == "" || im.o.Target == dataset.TargetClass
}

// inFolders reports whether the dataset is of format 2.
func (im *importer) inFolders() bool { return !im.plain() || im.noRows }

// nodesFile, edgesFile and tasksFile are names of files of the dataset that is made.
func (im *importer) nodesFile(name string) string { return im.partFile(dataset.NodesDir(0), name) }
func (im *importer) edgesFile(name string) string { return im.partFile(dataset.EdgesDir(0), name) }
func (im *importer) tasksFile(name string) string { return im.partFile(dataset.TasksDir(0), name) }

func (im *importer) partFile(folder, name string) string {
	switch {
	case im.folder != "":
		folder = im.folder
	case !im.inFolders():
		return name
	}
	return path.Join(folder, name)
}

func (im *importer) store() edges.Store {
	if !im.inFolders() {
		return im.s.Store()
	}
	return im.s.RelationStore(0)
}

// written returns the topology that an interrupted import has written.
func (im *importer) written() (edges.Counts, bool) {
	if !im.inFolders() {
		return im.s.Topology()
	}
	return im.s.RelationTopology(0)
}

// describe is the description of what was made.
func (im *importer) describe() dataset.Meta {
	m := im.m
	if !im.inFolders() || m.Typed() {
		return m
	}
	m.Schema = m.Graph()
	t := &m.Tasks[0]
	if im.noRows {
		m.NodeTypes[0].DType = ""
	}
	if im.plain() {
		t.Classes = max(t.Classes, 1)
		return m
	}
	t.Name, t.Target, t.Classes, t.Columns = "target", im.o.Target, 0, int(im.targets.columns)
	return m
}

// targetArray reads several labels or numbers: shape [nodes] or [nodes, columns]. It returns which
// nodes have one.
func (im *importer) targetArray(a *npy.Array) (has []int32, err error) {
	sh := a.Header.Shape
	if len(sh) < 1 || len(sh) > 2 || len(sh) == 2 && (sh[1] < 1 || sh[1] > mostClasses) {
		return nil, errs.New(errs.Usage,
			"%s: targets have shape %s, must be (nodes,) or (nodes, columns)", a.Name,
			a.Header.ShapeString())
	}
	if a, err = a.Matrix(); err != nil {
		return nil, err
	}
	columns := int64(1)
	if len(sh) == 2 {
		columns = sh[1]
	} else {
		im.m.LabelDims = 1
	}
	t := im.newTargets(columns)
	size := int64(4)
	if im.o.Target == dataset.TargetMultiLabel {
		size = 1
	}
	if err := im.needMemory(a.Name+": the targets", sh[0], columns*size+4); err != nil {
		return nil, err
	}
	err = npy.Each(a, 0, func(first int64, xs []float64) error {
		for i, x := range xs {
			if !t.put(x) {
				k := first + int64(i)
				return errs.New(errs.Usage, "%s: %s", a.Name, im.badTarget(k/columns, k%columns, x))
			}
		}
		return nil
	})
	return t.has(), err
}

func (im *importer) newTargets(columns int64) *targets {
	im.targets = &targets{columns: columns}
	if im.o.Target == dataset.TargetMultiLabel {
		im.targets.labels = []uint8{}
	}
	return im.targets
}

// put adds a target; ok is false where it is none.
func (t *targets) put(x float64) (ok bool) {
	if t.labels == nil {
		t.numbers = append(t.numbers, float32(x))
		return !(math.Abs(x) > math.MaxFloat32)
	}
	switch {
	case x == 0 || x == 1:
		t.labels = append(t.labels, uint8(x))
	case x == 255 || x == -1 || math.IsNaN(x):
		t.labels = append(t.labels, 255)
	default:
		return false
	}
	return true
}

func (im *importer) badTarget(node, column int64, x float64) errs.Text {
	if im.o.Target == dataset.TargetMultiLabel {
		return errs.Textf(
			"%v of node %d, column %d, is no label of several: these are 0 or 1, and 255, -1 or NaN where it is unknown; {target} class reads classes, {target} regression numbers",
			x, node, column)
	}
	return errs.Textf("%v of node %d, column %d, is no number that float32 holds; NaN means none", x,
		node, column)
}

// has returns 0 for each node that has a target, noLabel for the others.
func (t *targets) has() []int32 {
	n := int64(len(t.labels)+len(t.numbers)) / t.columns
	out := make([]int32, n)
	for v := range out {
		from, to := int64(v)*t.columns, int64(v+1)*t.columns
		none := t.labels != nil && !slices.ContainsFunc(t.labels[from:to],
			func(y uint8) bool { return y != 255 }) ||
			t.labels == nil && !slices.ContainsFunc(t.numbers[from:to],
				func(x float32) bool { return x == x })
		if none {
			out[v] = noLabel
		}
	}
	return out
}

// writeTargets writes labels.npy of a task that asks for no class.
func (im *importer) writeTargets() error {
	t := im.targets
	if t == nil {
		return errs.New(errs.Usage,
			"{target} %s: this input's labels are classes; give {labels} FILE, or leave {target} out",
			im.o.Target)
	}
	dt := npy.Float32
	if t.labels != nil {
		dt = npy.Uint8
	}
	out, err := im.s.Array(im.tasksFile("labels"), dt, t.columns)
	if err != nil {
		return err
	}
	if t.labels != nil {
		_, err = out.Write(t.labels)
	} else {
		err = out.Float32s(t.numbers)
	}
	if err != nil {
		return errors.Join(err, out.Discard())
	}
	return out.Close()
}
