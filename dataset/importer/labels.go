package importer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

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
	sh := a.Header.Shape
	if len(sh) == 0 || len(sh) > 2 || len(sh) == 2 && sh[1] != 1 {
		return nil, errs.New(errs.Usage, "%s: labels have shape %s, must be (nodes,) or (nodes, 1)",
			a.Name, a.Header.ShapeString())
	}
	if err := im.needMemory(a.Name+": a label for each node", sh[0], 4); err != nil {
		return nil, err
	}
	r, err := a.Reader(0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	labels := make([]int32, 0, sh[0])
	buf := make([]float64, 32<<10)
	for {
		n, err := r.Floats(buf)
		if errors.Is(err, io.EOF) {
			return labels, nil
		}
		if err != nil {
			return nil, err
		}
		for _, x := range buf[:n] {
			l, ok := labelOf(x)
			if !ok {
				return nil, badLabel(a.Name, int64(len(labels)), x)
			}
			labels = append(labels, l)
		}
	}
}

func badLabel(file string, node int64, x any) error {
	return errs.New(errs.Usage,
		"%s: label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
		file, x, node)
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

// nodeLabels reads an array of labels, one for each node.
func (im *importer) nodeLabels(a *npy.Array) ([]int32, error) {
	if err := im.oneRowEach(a, "labels"); err != nil {
		return nil, err
	}
	labels, err := im.labelArray(a)
	if err == nil {
		err = im.countClasses(labels, a.Name)
	}
	return labels, err
}

// textLabels reads labels, one a line in node order, or with the node id before each.
func (im *importer) textLabels(ctx context.Context, path string) ([]int32, error) {
	if isArray(path) {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.labelArray(a)
	}
	return im.labelRows(ctx, path, true)
}

// unset marks a node whose label was not read yet.
const unset = math.MinInt32

// labelTable is the labels of a text file that is being read.
type labelTable struct {
	*importer
	t      *table
	users  bool // the user named the file
	labels []int32
	room   int64 // nodes that there is memory for
}

// labelRows reads labels from a table.
func (im *importer) labelRows(ctx context.Context, path string, users bool) ([]int32, error) {
	t, err := im.tableOf(ctx, "labels", path, users)
	if err != nil {
		return nil, err
	}
	l := labelTable{importer: im, t: t, users: users}
	err = im.eachValue(ctx, t, func(id, line int64, x float64) error {
		if why, err := l.put(id, line, x); why != "" || err != nil {
			return cmp.Or(err, errs.New(errs.Usage, "%s:%d: %s", path, line, why))
		}
		return nil
	})
	if err == nil && t.id >= 0 {
		err = l.grow(im.m.Nodes, path)
	}
	if err != nil {
		return nil, err
	}
	for t.id >= 0 && int64(len(l.labels)) < im.m.Nodes {
		l.labels = append(l.labels, unset)
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

// put takes the label of a line; why is the line's fault.
func (l *labelTable) put(id, line int64, x float64) (why errs.Text, err error) {
	node, limit := id, l.m.Nodes
	if l.t.id >= 0 {
		var ok bool
		if limit == 0 {
			limit = maxTextNodes
		}
		if node, ok = l.nodeOf(id); !ok || node >= limit {
			return l.outside(id, limit), nil
		}
	} else if !l.users && node >= limit {
		return errs.Textf("a label for node %d, there are only %d nodes", node, limit), nil
	}
	c, ok := labelOf(x)
	if !ok {
		return errs.Textf(
			"label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
			x, id), nil
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
		l.labels = append(l.labels, unset)
	}
	if l.labels[node] != unset {
		return errs.Textf("node %d has a label already", id), nil
	}
	l.labels[node] = c
	return "", nil
}

// labelFile reads a label for each node from an array, or from lines.
func (im *importer) labelFile(ctx context.Context, path string) ([]int32, error) {
	if isArray(path) {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.nodeLabels(a)
	}
	labels, err := im.labelRows(ctx, path, path == im.o.Labels)
	if err == nil && int64(len(labels)) != im.m.Nodes {
		err = errs.New(errs.Usage, "%s ends after %d labels, there are %d nodes", path, len(labels),
			im.m.Nodes)
	}
	if err == nil {
		err = im.countClasses(labels, path)
	}
	return labels, err
}

// labelsOr reads the labels of the file that Labels names, or else those of own, which also returns
// where they are from.
func (im *importer) labelsOr(ctx context.Context, own func() ([]int32, string, error)) (
	labels []int32, file string, err error) {
	if im.o.Labels == "" {
		return own()
	}
	labels, err = im.labelFile(ctx, im.o.Labels)
	return labels, im.o.Labels, err
}
