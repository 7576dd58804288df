package importer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"helios/dataset/build"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// labelColumn reads the labels of an import, of which each node has one.
type labelColumn struct{ *job }

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
func (im *labelColumn) labelArray(a *npy.Array) ([]int32, error) {
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
func (im *labelColumn) nodeLabels(a *npy.Array) ([]int32, error) {
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
func (im *labelColumn) textLabels(path string) ([]int32, error) {
	if isArray(path) {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.labelArray(a)
	}
	l, err := openLines(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var labels []int32
	const unset = math.MinInt32
	room := int64(0) // nodes that there is memory for
	columns := 0
	for {
		more, err := l.next()
		if err != nil {
			return nil, err
		}
		if !more {
			break
		}
		last := l.fields[len(l.fields)-1]
		x, err := strconv.ParseFloat(string(last), 64)
		if err != nil {
			if l.heading() {
				continue
			}
			return nil,
				l.bad(
					"label %q is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
					clip(last))
		}
		if columns == 0 {
			if columns = len(l.fields); columns > 2 {
				return nil,
					l.bad("%d columns; labels have one (the class) or two (node id and class)",
						columns)
			}
		}
		if len(l.fields) != columns {
			return nil, l.bad("%d columns, the lines before have %d", len(l.fields), columns)
		}
		node := int64(len(labels))
		if columns == 2 {
			var ok bool
			if node, ok = parseID(l.fields[0]); !ok || node >= maxTextNodes || im.m.Nodes > 0 &&
				node >= im.m.Nodes {
				return nil, l.bad("%q is not a node id in range", clip(l.fields[0]))
			}
		}
		c, ok := labelOf(x)
		if !ok {
			return nil,
				l.bad(
					"label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
					x, node)
		}
		if need := node + 1; need > room { // a stray number must not take all memory
			need = max(need, 2*room)
			if im.m.Nodes > 0 {
				need = im.m.Nodes
			}
			if err := im.needMemory(fmt.Sprintf("%s:%d: node id %d: a label for each node", l.path,
				l.n, node), need-room, 4); err != nil {
				return nil, err
			}
			room = need
			labels = slices.Grow(labels, int(room)-len(labels))
		}
		for int64(len(labels)) <= node {
			labels = append(labels, unset)
		}
		if labels[node] != unset {
			return nil, l.bad("node %d has a label already", node)
		}
		labels[node] = c
	}
	if columns == 2 && room < im.m.Nodes {
		if err := im.needMemory(path+": a label for each node", im.m.Nodes-room, 4); err != nil {
			return nil, err
		}
	}
	for columns == 2 && int64(len(labels)) < im.m.Nodes {
		labels = append(labels, unset)
	}
	for v := range labels {
		if labels[v] == unset { // nodes that a two-column file leaves out
			labels[v] = noLabel
		}
	}
	return labels, nil
}

// csvLabels reads the classes of the nodes.
func (im *labelColumn) csvLabels(ctx context.Context, path string) ([]int32, error) {
	if err := im.needMemory(path+": a label for each node", im.m.Nodes, 4); err != nil {
		return nil, err
	}
	labels := make([]int32, 0, im.m.Nodes)
	err := csvColumn(ctx, path, func(pos, line int64, x float64) error {
		l, ok := labelOf(x)
		switch {
		case !ok:
			return errs.New(errs.Usage,
				"%s:%d: label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
				path, line, x, pos)
		case pos >= im.m.Nodes:
			return errs.New(errs.Usage, "%s:%d: a label for node %d, there are only %d nodes", path,
				line, pos, im.m.Nodes)
		}
		labels = append(labels, l)
		return nil
	})
	if err == nil && int64(len(labels)) != im.m.Nodes {
		err = errs.New(errs.Usage, "%s ends after %d labels, there are %d nodes", path, len(labels),
			im.m.Nodes)
	}
	if err == nil {
		err = im.countClasses(labels, path)
	}
	return labels, err
}

// labelFile reads a label for each node from an array, or from lines.
func (im *labelColumn) labelFile(ctx context.Context, path string) ([]int32, error) {
	if isArray(path) {
		a, err := npy.Open(path)
		if err != nil {
			return nil, err
		}
		return im.nodeLabels(a)
	}
	return im.csvLabels(ctx, path)
}
