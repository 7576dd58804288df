package importer

import (
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
func (im *labelColumn) textLabels(ctx context.Context, path string) ([]int32, error) {
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

// labelRows reads labels from a table.
func (im *labelColumn) labelRows(ctx context.Context, path string, users bool) ([]int32, error) {
	t, err := im.tableOf(ctx, "labels", path, users)
	if err != nil {
		return nil, err
	}
	var labels []int32
	room := int64(0) // nodes that there is memory for
	grow := func(need int64, what string) error {
		if need <= room {
			return nil
		}
		if err := im.needMemory(what+": a label for each node", need-room, 4); err != nil {
			return err
		}
		room = need
		labels = slices.Grow(labels, int(room)-len(labels))
		return nil
	}
	err = im.eachValue(ctx, t, func(id, line int64, x float64) error {
		bad := func(format string, a ...any) error {
			return errs.New(errs.Usage, "%s:%d: "+format, append([]any{path, line}, a...)...)
		}
		node, limit := id, im.m.Nodes
		if t.id >= 0 {
			var ok bool
			if limit == 0 {
				limit = maxTextNodes
			}
			if node, ok = im.nodeOf(id); !ok || node >= limit {
				return bad("%s", im.outside(id, limit))
			}
		} else if !users && node >= limit {
			return bad("a label for node %d, there are only %d nodes", node, limit)
		}
		c, ok := labelOf(x)
		if !ok {
			return bad(
				"label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled",
				x, id)
		}
		need := node + 1
		if need > room { // a stray number must not take all memory
			need = max(need, 2*room, im.m.Nodes)
		}
		if err := grow(need, fmt.Sprintf("%s:%d: node id %d", path, line, id)); err != nil {
			return err
		}
		for int64(len(labels)) <= node {
			labels = append(labels, unset)
		}
		if labels[node] != unset {
			return bad("node %d has a label already", id)
		}
		labels[node] = c
		return nil
	})
	if err == nil && t.id >= 0 {
		err = grow(im.m.Nodes, path)
	}
	if err != nil {
		return nil, err
	}
	for t.id >= 0 && int64(len(labels)) < im.m.Nodes {
		labels = append(labels, unset)
	}
	for v := range labels {
		if labels[v] == unset { // nodes that a file with ids leaves out
			labels[v] = noLabel
		}
	}
	return labels, nil
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
func (im *labelColumn) labelsOr(ctx context.Context, own func() ([]int32, string, error)) (
	labels []int32, file string, err error) {
	if im.o.Labels == "" {
		return own()
	}
	labels, err = im.labelFile(ctx, im.o.Labels)
	return labels, im.o.Labels, err
}
