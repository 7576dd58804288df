package dataset

import (
	"errors"
	"io"
	"math"

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
		return nil, errs.New(errs.Usage, "%s: labels have shape %s, must be (nodes,) or (nodes, 1)", a.Name, a.Header.ShapeString())
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
	return errs.New(errs.Usage, "%s: label %v of node %d is not a class; classes are whole numbers from 0, NaN or -1 means unlabelled", file, x, node)
}

// sameRows checks a row count against the nodes found so far and takes it as theirs.
func (im *importer) sameRows(n int64, file string, nodesFrom *string) error {
	if *nodesFrom != "" && n != im.m.Nodes {
		return errs.New(errs.Usage, "%s has %d rows, %s has %d; one row per node is needed in both", file, n, *nodesFrom, im.m.Nodes)
	}
	if *nodesFrom == "" {
		im.m.Nodes, *nodesFrom = n, file
	}
	return nil
}

// splitSet is a split as given: node ids and the file they are from.
type splitSet struct {
	file string
	ids  []int64
}

// labelsAndSplits writes labels and the three splits. given is empty, or has the three
// splits; labels is nil when there are none.
func (im *importer) labelsAndSplits(labels []int32, labelsFile string, given []splitSet) error {
	if im.o.MakeSplits {
		given, im.splitOf = nil, nil
	}
	if labels == nil {
		im.m.Unlabelled = im.m.Nodes
	} else if err := im.checkLabels(labels, labelsFile, given); err != nil {
		return err
	}
	for _, l := range labels {
		if l == noLabel {
			im.m.Unlabelled++
		}
		im.m.Classes = max(im.m.Classes, int(l)+1)
	}
	out, err := im.s.array("labels", npy.Int32, 0)
	if err != nil {
		return err
	}
	if err = out.int32s(labels); labels == nil {
		err = unlabelled(out, im.m.Nodes)
	}
	if err != nil {
		return errors.Join(err, out.discard())
	}
	if err := out.close(); err != nil {
		return err
	}
	sp, err := newSplitter(im.s, im.o.Seed, im.o.TrainFraction, im.o.ValFraction)
	if err != nil {
		return err
	}
	if err := im.deal(sp, labels, given); err != nil {
		return errors.Join(err, sp.discard())
	}
	if im.m.Train, im.m.Val, im.m.Test, err = sp.close(); err != nil {
		return err
	}
	if len(given) == 0 && labels != nil && im.splitOf == nil {
		why := "the input has no splits"
		if im.o.MakeSplits {
			why = "--make-splits"
		}
		im.m.Source.Options["split"] = "random"
		im.o.note("%s: %d nodes are dealt to train, %d to val and %d to test, at random by seed %d", why, im.m.Train, im.m.Val, im.m.Test, im.o.Seed)
	}
	return nil
}

// unlabelled writes n nodes without a label, of which no array is made: without labels, the number of nodes has no bound.
func unlabelled(out *arrayOut, n int64) error {
	part := make([]int32, min(n, 1<<14))
	for i := range part {
		part[i] = noLabel
	}
	for ; n > 0; n -= int64(len(part)) {
		part = part[:min(n, int64(len(part)))]
		if err := out.int32s(part); err != nil {
			return err
		}
	}
	return nil
}

// checkLabels finds nodes that need a label and have none.
func (im *importer) checkLabels(labels []int32, file string, given []splitSet) error {
	if im.o.UnlabelledOK {
		return nil
	}
	const fix = "--unlabelled-ok leaves such nodes out of the splits"
	if len(given) == 0 {
		for v, l := range labels {
			if l == noLabel && (im.splitOf == nil || im.splitOf(int64(v)) >= 0) {
				return errs.New(errs.Usage, "%s: node %d has no label (NaN or -1); %s", file, v, fix)
			}
		}
	}
	for _, g := range given {
		for pos, v := range g.ids {
			if labels[v] == noLabel {
				return errs.New(errs.Usage, "%s: node %d, position %d of %s, has no label (NaN or -1); %s", file, v, pos, g.file, fix)
			}
		}
	}
	return nil
}

func (im *importer) deal(sp *splitter, labels []int32, given []splitSet) error {
	if len(given) == 0 {
		for v, l := range labels {
			if l == noLabel {
				continue
			}
			if im.splitOf != nil {
				if i := im.splitOf(int64(v)); i >= 0 {
					if err := sp.place(i, int64(v)); err != nil {
						return err
					}
				}
				continue
			}
			k := uint64(v)
			if im.splitKey != nil {
				k = im.splitKey(int64(v))
			}
			if err := sp.put(int64(v), k); err != nil {
				return err
			}
		}
		return nil
	}
	if err := im.needMemory("the split of each node", im.m.Nodes, 1); err != nil {
		return err
	}
	owner := make([]byte, im.m.Nodes)
	for i, g := range given {
		for pos, v := range g.ids {
			if o := owner[v]; o != 0 {
				if int(o) == i+1 {
					return errs.New(errs.Usage, "%s: node %d appears twice, the second time at position %d", g.file, v, pos)
				}
				return errs.New(errs.Usage, "%s: node %d at position %d is also in %s; the splits must be apart", g.file, v, pos, given[o-1].file)
			}
			owner[v] = byte(i + 1)
		}
	}
	for v, o := range owner {
		if o != 0 && labels != nil && labels[v] != noLabel {
			if err := sp.place(int(o-1), int64(v)); err != nil {
				return err
			}
		}
	}
	return nil
}
