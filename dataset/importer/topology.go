package importer

import (
	"context"
	"errors"
	"fmt"

	"helios/dataset/build"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/units"
)

func (im *importer) freeSorter() error {
	e := im.sorter
	im.sorter = nil
	if e == nil {
		return nil
	}
	return e.Close()
}

// room refuses more nodes than the disk can hold before the disk is full: an id, or a number in a
// heading, may be a stray one.
func (im *importer) room() error {
	from := errs.Textf("%s or {nodes}", im.o.In)
	if im.nodesOpen {
		from = "the largest id in the edges"
	}
	if err := im.checkNodes(from); err != nil {
		return err
	}
	if im.s.Merging() {
		return nil // an interrupted import that has had the room
	}
	row := 8 + 4.0 // offset and label
	if im.o.FeatureFn == RandomFeatures {
		row += float64(4 * im.o.Dim)
	}
	err := build.EnoughDisk(im.o.Out, row*float64(im.m.Nodes))
	bytes := row * float64(im.m.Nodes)
	_, _, taken := im.sorter.Seen()
	switch {
	case err == nil && im.nodesOpen && bytes > sparseBytes &&
		im.m.Nodes/perEnd > 2*taken:
		return errs.New(errs.Usage,
			"the largest id in the edges is %d, so %d edges would make %d nodes and a dataset of %s; give {renumber}, or {nodes} %d, if that is right",
			im.m.Nodes-1, taken, im.m.Nodes, units.FormatBytes(int64(bytes)),
			im.m.Nodes)
	case err == nil:
		return nil
	case im.nodesOpen:
		return errs.Errorf(
			"the largest id in the edges is %d, so there are %d nodes: %w; where ids have gaps, give {renumber}",
			im.m.Nodes-1, im.m.Nodes, err)
	}
	return errs.Errorf("there are %d nodes, as {nodes} or %s says: %w", im.m.Nodes, im.o.In, err)
}

// topology writes what edgesFrom took.
func (im *importer) topology(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, im.freeSorter()) }()
	var c edges.Counts
	if had, ok := im.written(); ok {
		c = had
	} else {
		if im.sorter == nil {
			if im.sorter, err = edges.New(im.store(), im.o.Memory, im.o.rules()); err != nil {
				return err
			}
		}
		if err = im.room(); err != nil {
			return err
		}
		if c, err = im.sorter.WriteCSC(ctx, im.m.Nodes, im.o.Progress); err != nil {
			return err
		}
	}
	im.m.Edges, im.m.Nodes = c.Stored, c.Nodes
	for name, n := range map[string]int64{"duplicate-edges": c.Duplicates, "self-loops": c.Kept,
		"duplicate-edges-kept": c.Repeated, "self-loops-dropped": c.Self,
		"self-loops-added": c.Added, "opposite-edges": c.Opposite} {
		if n > 0 {
			im.m.Source.Counts[name] += n
		}
	}
	// Each edge gives at most two nodes neighbours.
	ends := 2 * (c.Taken + 1)
	if im.countLonely {
		return im.noteLonely(c.Nodes)
	}
	if c.Nodes/perEnd > ends {
		im.o.note(
			"at most %d of %d nodes have an edge; if their ids have gaps, renumber them from 0, as the others cost memory and disk for nothing",
			ends, c.Nodes)
	}
	return nil
}

// Ids are sparse where there are more than perEnd nodes for each end of an edge. A dataset of more
// than sparseBytes is not made for such: the largest id may be a stray number.
const (
	perEnd      = 8
	sparseBytes = 1 << 30
)

// noteLonely counts the nodes without an edge.
func (im *importer) noteLonely(nodes int64) error {
	if err := im.needMemory("a bit for each node", nodes/8, 1); err != nil {
		return nil //nolint:nilerr // the count is not worth it
	}
	lonely := make([]uint64, nodes/64+1) // a bit for each node that no edge has yet
	n, last := int64(0), int64(-1)
	if err := im.blocksOf(im.edgesFile("indptr"), func(first int64, offsets []int64) {
		for i, offset := range offsets {
			if v := first + int64(i) - 1; v >= 0 && offset == last {
				lonely[v/64] |= 1 << (v % 64)
				n++
			}
			last = offset
		}
	}); err != nil || n == 0 {
		return err
	}
	if err := im.blocksOf(im.edgesFile("indices"), func(_ int64, sources []int64) {
		for _, v := range sources {
			if bit := uint64(1) << (v % 64); lonely[v/64]&bit != 0 {
				lonely[v/64] &^= bit
				n--
			}
		}
	}); err != nil || n == 0 {
		return err
	}
	im.o.note("%d of %d nodes have no edge; where ids are sparse, {renumber} leaves no gaps", n,
		nodes)
	return nil
}

// blocksOf calls fn with blocks of an array that was written.
func (im *importer) blocksOf(name string, fn func(first int64, x []int64)) error {
	a, err := npy.Open(im.s.Path(name + ".npy"))
	if err != nil {
		return err
	}
	return npy.Each(a, 0, func(first int64, x []int64) error { fn(first, x); return nil })
}

// edgesFrom takes all edges of a source, with what the options add. It may be called for several
// sources. Where the number of nodes is not known it is that of the largest id, plus 1.
func (im *importer) edgesFrom(ctx context.Context, s edges.Source) (err error) {
	if c, ok := im.written(); ok {
		im.m.Nodes = c.Nodes
		return nil
	}
	if im.sorter == nil {
		if im.sorter, err = edges.New(im.store(), im.o.Memory, im.o.rules()); err != nil {
			return err
		}
		im.nodesOpen = im.m.Nodes == 0
	}
	// A tensor that torch expanded states edges by the billion in a small file.
	if r := im.o.rules(); s.Unit == "edges" && !r.Dedup && !r.NoSelf && !r.AddSelf &&
		!im.s.Merging() {
		if err := build.EnoughDisk(im.o.Out, 4*float64(s.Total)); err != nil {
			return fmt.Errorf("%s: %d edges: %w", s.Name, s.Total, err)
		}
	}
	if err := im.sorter.Read(ctx, s, im.o.Progress); err != nil {
		return err
	}
	if im.nodesOpen {
		_, largest, _ := im.sorter.Seen()
		im.m.Nodes = largest + 1
	}
	return nil
}
