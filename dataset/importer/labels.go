package importer

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// noLabel marks an unlabelled node.
const noLabel = -1

// labelOf turns a label as it was read into a class, or noLabel.
func labelOf(x float64) (int32, bool) {
	switch {
	case math.IsNaN(x) || x == -1:
		return noLabel, true
	case x < 0 || x != math.Trunc(x) || x >= math.MaxInt32:
		return 0, false
	}
	return int32(x), true
}

// labelArray reads labels: shape [nodes] or [nodes, 1]. Labels fit in memory at 4 bytes a node
// beside the splits' bitmap; everything larger is streamed.
func (im *importer) labelArray(a *npy.Array) ([]int32, error) {
	if !im.plain() {
		return im.targetArray(a)
	}
	sh := a.Header.Shape
	if len(sh) == 0 || len(sh) > 2 || len(sh) == 2 && sh[1] != 1 {
		return nil, errs.New(errs.Usage,
			"%s: labels have shape %s, must be (nodes,) or (nodes, 1); {target} multi-label or regression takes several columns",
			a.Name, a.Header.ShapeString())
	}
	if len(sh) == 2 {
		im.m.LabelDims = 2
	}
	if err := im.needMemory(a.Name+": a label for each node", sh[0], 4); err != nil {
		return nil, err
	}
	labels := make([]int32, 0, sh[0])
	err := npy.Each(a, 0, func(_ int64, xs []float64) error {
		for _, x := range xs {
			l, ok := labelOf(x)
			if !ok {
				return errs.New(errs.Usage, "%s: %s", a.Name, badLabel(int64(len(labels)), x))
			}
			labels = append(labels, l)
		}
		return nil
	})
	return labels, err
}

func badLabel(node int64, x float64) errs.Text {
	return errs.Textf(
		"label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled; {target} regression takes numbers",
		x, node)
}

// unlabelled writes n nodes without a label, of which no array is made: without labels, the number
// of nodes has no bound.
func unlabelled(out *build.Array, n int64) error {
	part := make([]int32, min(n, 1<<14))
	for i := range part {
		part[i] = noLabel
	}
	for ; n > 0; n -= int64(len(part)) {
		part = part[:min(n, int64(len(part)))]
		if err := out.Int32s(part); err != nil {
			return err
		}
	}
	return nil
}

// labels reads labels: one for each node, or, where nodesFrom is given, as many as there are nodes
// by then (sameRows). It counts their classes.
func (im *importer) labels(ctx context.Context, d nodeFile, nodesFrom *errs.Text) (labels []int32,
	err error) {
	switch {
	case d.array == nil:
		labels, err = im.labelRows(ctx, d)
	case nodesFrom == nil:
		if err := im.oneRowEach(d.array, "labels"); err != nil {
			return nil, err
		}
		fallthrough
	default:
		labels, err = im.labelArray(d.array)
	}
	if n := int64(len(labels)); err == nil && nodesFrom != nil {
		err = im.sameRows(n, d.path, nodesFrom)
	} else if err == nil && n != im.m.Nodes {
		err = errs.New(errs.Usage, "%s ends after %d labels, there are %d nodes", d.path, n,
			im.m.Nodes)
	}
	if err == nil {
		err = im.countClasses(labels, d.path)
	}
	return labels, err
}

// unset marks a node whose label was not read yet.
const unset = math.MinInt32

// labelTable is the labels of a text file that is being read.
type labelTable struct {
	*importer
	t      *table
	users  bool // the user named the file
	labels []int32
	// numbers are the nodes' targets in place of labels, which then are 0; nil: labels are classes.
	numbers *targets
	room    int64 // nodes that there is memory for
}

// labelRows reads labels from a table.
func (im *importer) labelRows(ctx context.Context, d nodeFile) ([]int32, error) {
	t, err := im.tableOf(ctx, "labels", d.path, d.users)
	if err != nil {
		return nil, err
	}
	if im.o.Target == dataset.TargetMultiLabel {
		return nil, errs.New(errs.Usage,
			"{target} %s: %s is a text file, of one label a node; save the labels as .npy (nodes, labels)",
			im.o.Target, d.path)
	}
	l := labelTable{importer: im, t: t, users: d.users}
	if !im.plain() {
		l.numbers = im.newTargets(1)
	}
	err = im.eachValue(ctx, t, func(id, line int64, x float64) error {
		if why, err := l.put(id, line, x); why != "" || err != nil {
			return cmp.Or(err, errs.New(errs.Usage, "%s:%d: %s", d.path, line, why))
		}
		return nil
	})
	if err == nil && t.id >= 0 {
		err = l.grow(im.m.Nodes, d.path)
	}
	if err != nil {
		return nil, err
	}
	for t.id >= 0 && int64(len(l.labels)) < im.m.Nodes {
		l.extend()
	}
	if l.numbers != nil {
		return l.numbers.has(), nil
	}
	for v := range l.labels {
		if l.labels[v] == unset { // nodes that a file with ids leaves out
			l.labels[v] = noLabel
		}
	}
	return l.labels, nil
}

// grow makes room for so many nodes.
func (l *labelTable) grow(nodes int64, what string) error {
	if nodes <= l.room {
		return nil
	}
	if err := l.needMemory(what+": a label for each node", nodes-l.room, 4); err != nil {
		return err
	}
	l.room = nodes
	l.labels = slices.Grow(l.labels, int(nodes)-len(l.labels))
	return nil
}

// extend adds a node whose label was not read yet.
func (l *labelTable) extend() {
	l.labels = append(l.labels, unset)
	if l.numbers != nil {
		l.numbers.numbers = append(l.numbers.numbers, float32(math.NaN()))
	}
}

// put takes the label of a line; why is the line's fault.
func (l *labelTable) put(id, line int64, x float64) (why errs.Text, err error) {
	node, limit := id, l.m.Nodes
	if l.t.id >= 0 {
		var ok bool
		if limit == 0 {
			limit = maxTextNodes
		}
		if node, ok = l.ids.node(id); !ok || node >= limit {
			return l.outside(id, limit), nil
		}
	} else if !l.users && node >= limit {
		return errs.Textf("a label for node %d, there are only %d nodes", node, limit), nil
	}
	c, ok := labelOf(x)
	if l.numbers != nil {
		c, ok = 0, !(math.Abs(x) > math.MaxFloat32)
	}
	switch {
	case !ok && l.numbers != nil:
		return l.badTarget(id, 0, x), nil
	case !ok:
		return badLabel(id, x), nil
	}
	need := node + 1
	if need > l.room { // a stray number must not take all memory
		need = max(need, 2*l.room, l.m.Nodes)
	}
	if need > l.room {
		if err := l.grow(need, fmt.Sprintf("%s:%d: node id %d", l.t.path, line, id)); err != nil {
			return "", err
		}
	}
	for int64(len(l.labels)) <= node {
		l.extend()
	}
	if l.labels[node] != unset {
		return errs.Textf("node %d has a label already", id), nil
	}
	l.labels[node] = c
	if l.numbers != nil {
		l.numbers.numbers[node] = float32(x)
	}
	return "", nil
}

// labelFile reads a label for each node from a file, which the user named or is a format's own.
func (im *importer) labelFile(ctx context.Context, path string) ([]int32, error) {
	d, err := openData(path, path == im.o.Labels)
	if err != nil {
		return nil, err
	}
	return im.labels(ctx, d, nil)
}
