package dataset

import (
	"errors"
	"io"
	"strconv"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// idsPerNeed is how many ids are promised memory at a time.
const idsPerNeed = 1 << 16

// addID appends a node to a split. More ids than nodes means that some stand twice, which need not fill the memory first.
func (im *importer) addID(ids []int64, v int64, from string) ([]int64, error) {
	n := int64(len(ids))
	if n >= im.m.Nodes {
		return nil, errs.New(errs.Usage, "%s: more entries than the %d nodes, so nodes stand in it twice", from, im.m.Nodes)
	}
	if n == int64(cap(ids)) {
		more := max(n, idsPerNeed)
		if err := im.needMemory(from+": the ids of a split", more, 8); err != nil {
			return nil, err
		}
		grown := make([]int64, n, n+more)
		copy(grown, ids)
		ids = grown
	}
	return append(ids, v), nil
}

// splitIDs reads a list of ids, or a mask: bool, or integers 0 and 1, with an element for each node. A mask of two
// dimensions holds several splits, in rows or in columns, and SplitIndex chooses one.
func (im *importer) splitIDs(a *npy.Array) ([]int64, error) {
	sh := a.Header.Shape
	dt := a.Header.DType
	if dt.Kind == 'f' {
		return nil, errs.New(errs.Usage, "%s: a split holds %s; save node ids or a mask, as integers or bool", a.Name, dt)
	}
	switch {
	case len(sh) == 2:
		return im.maskOfSeveral(a)
	case len(sh) != 1:
		return nil, errs.New(errs.Usage, "%s: a split has shape %s; give a list of ids, a mask, or masks (splits, nodes)", a.Name, a.Header.ShapeString())
	case dt.Kind == 'b' && sh[0] != im.m.Nodes:
		return nil, errs.New(errs.Usage, "%s is a mask of %d nodes, there are %d", a.Name, sh[0], im.m.Nodes)
	}
	mask := dt.Kind == 'b'
	if !mask && sh[0] == im.m.Nodes && im.m.Nodes > 2 {
		// As ids, so many zeros and ones would stand twice.
		var err error
		if mask, err = zerosAndOnes(a); err != nil {
			return nil, err
		}
	}
	var ids []int64
	err := eachInt(a, func(pos, x int64) (err error) {
		switch {
		case mask && x != 0:
			ids, err = im.addID(ids, pos, a.Name)
		case mask:
		case x < 0 || x >= im.m.Nodes:
			err = badID(a.Name, pos, x, im.m.Nodes)
		default:
			ids, err = im.addID(ids, x, a.Name)
		}
		return err
	})
	return ids, err
}

// zerosAndOnes says whether an array holds nothing else.
func zerosAndOnes(a *npy.Array) (bool, error) {
	err := eachInt(a, func(_, x int64) error {
		if x != 0 && x != 1 {
			return io.EOF // seen enough
		}
		return nil
	})
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	return err == nil, err
}

// maskOfSeveral reads one of several masks: (splits, nodes), or (nodes, splits) as PyTorch Geometric has it.
func (im *importer) maskOfSeveral(a *npy.Array) ([]int64, error) {
	sh, n := a.Header.Shape, im.m.Nodes
	shape := a.Header.ShapeString()
	if (sh[0] == n) == (sh[1] == n) {
		return nil, errs.New(errs.Usage, "%s has shape %s; masks of several splits are (splits, nodes) or (nodes, splits), and there are %d nodes", a.Name, shape, n)
	}
	rows := sh[1] == n // a row for each split
	splits := sh[0]
	if !rows {
		splits = sh[1]
	}
	want := int64(0)
	if im.o.SplitIndex != "" {
		want, _ = strconv.ParseInt(im.o.SplitIndex, 10, 64) // fill has checked it
		im.indexed = true
	}
	switch {
	case splits < 1:
		return nil, errs.New(errs.Usage, "%s has shape %s: no split", a.Name, shape)
	case want >= splits:
		return nil, errs.New(errs.Usage, "--split-index %d: %s has shape %s, so %d splits; give 0 to %d", want, a.Name, shape, splits, splits-1)
	case splits > 1 && im.o.SplitIndex == "":
		return nil, errs.New(errs.Usage, "%s has shape %s, so %d splits; choose one with --split-index 0 to %d", a.Name, shape, splits, splits-1)
	}
	if a.Header.Fortran {
		rows = !rows // as it lies in the file
	}
	var ids []int64
	err := eachInt(a, func(pos, x int64) (err error) {
		split, node := pos/n, pos%n
		if !rows {
			split, node = pos%splits, pos/splits
		}
		switch {
		case split != want:
		case x == 1:
			ids, err = im.addID(ids, node, a.Name)
		case x != 0:
			err = errs.New(errs.Usage, "%s: element %d is %d; a mask holds 0 and 1", a.Name, pos, x)
		}
		return err
	})
	return ids, err
}
