package importer

import (
	"context"
	"errors"
	"io"
	"strconv"

	"helios/dataset"
	"helios/dataset/build"
	"helios/dataset/npy"
	"helios/internal/errs"
)

// idsPerNeed is the number of ids that are promised memory at a time.
const idsPerNeed = 1 << 16

// addID appends a node to a split. More ids than nodes means that some stand twice, which need not
// fill the memory first.
func (im *importer) addID(ids []int64, v int64, from string) ([]int64, error) {
	n := int64(len(ids))
	if n >= im.m.Nodes {
		return nil, errs.New(errs.Usage,
			"%s: more entries than the %d nodes, so nodes stand in it twice", from, im.m.Nodes)
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

// splitIDs reads a list of ids, or a mask: bool, or integers 0 and 1, with an element for each
// node. A mask of two dimensions holds several splits, in rows or in columns, and SplitIndex
// chooses one.
func (im *importer) splitIDs(a *npy.Array) ([]int64, error) {
	sh := a.Header.Shape
	dt := a.Header.DType
	if dt.Kind == 'f' {
		return nil, errs.New(errs.Usage,
			"%s: a split holds %s; save node ids or a mask, as integers or bool", a.Name, dt)
	}
	switch {
	case len(sh) == 2 && sh[1] == 1 && sh[0] != im.m.Nodes && dt.Kind != 'b': // a column of ids
	case len(sh) == 2:
		return im.maskOfSeveral(a)
	case len(sh) != 1:
		return nil, errs.New(errs.Usage,
			"%s: a split has shape %s; give a list of ids, a mask, or masks (splits, nodes)",
			a.Name, a.Header.ShapeString())
	case dt.Kind == 'b' && sh[0] != im.m.Nodes:
		return nil, errs.New(errs.Usage, "%s is a mask of %d nodes, there are %d", a.Name, sh[0],
			im.m.Nodes)
	}
	mask, err := im.isMask(a)
	if err != nil {
		return nil, err
	}
	var ids []int64
	err = eachInt(a, func(pos, x int64) (err error) {
		switch {
		case mask && x != 0:
			ids, err = im.addID(ids, pos, a.Name)
		case mask:
		case x < 0 || x >= im.m.Nodes:
			err = dataset.BadID(a.Name, pos, x, im.m.Nodes)
		default:
			ids, err = im.addID(ids, x, a.Name)
		}
		return err
	})
	return ids, err
}

// isMask reports whether an array of one dimension is a mask and no list of ids. As ids, many zeros
// and ones would stand twice.
func (im *importer) isMask(a *npy.Array) (bool, error) {
	if a.Header.DType.Kind == 'b' {
		return true, nil
	}
	n := a.Header.Shape[0]
	if n <= 2 {
		return false, nil
	}
	mask, err := zerosAndOnes(a, im.m.Nodes)
	if mask && n != im.m.Nodes {
		err = errs.New(errs.Usage, "%s is a mask of %d nodes, there are %d", a.Name, n, im.m.Nodes)
	}
	return mask, err
}

// zerosAndOnes reports whether an array holds nothing else, in its first elements where it has more
// than there are nodes: such an array is refused as ids too, and may be terabytes of a sparse file.
func zerosAndOnes(a *npy.Array, nodes int64) (bool, error) {
	only := true
	err := eachInt(a, func(pos, x int64) error {
		only = x == 0 || x == 1
		if !only || pos > nodes {
			return io.EOF // seen enough
		}
		return nil
	})
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return only && err == nil, err
}

// maskOfSeveral reads one of several masks: (splits, nodes), or (nodes, splits) as PyTorch
// Geometric has it.
func (im *importer) maskOfSeveral(a *npy.Array) ([]int64, error) {
	sh, n := a.Header.Shape, im.m.Nodes
	shape := a.Header.ShapeString()
	if (sh[0] == n) == (sh[1] == n) {
		return nil, errs.New(errs.Usage,
			"%s has shape %s; masks of several splits are (splits, nodes) or (nodes, splits), and there are %d nodes",
			a.Name, shape, n)
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
		return nil, errs.New(errs.Usage,
			"{split-index} %d: %s has shape %s, so %d splits; give 0 to %d", want, a.Name, shape,
			splits, splits-1)
	case splits > 1 && im.o.SplitIndex == "":
		return nil, errs.New(errs.Usage,
			"%s has shape %s, so %d splits; choose one with {split-index} 0 to %d", a.Name, shape,
			splits, splits-1)
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

// findSplits returns the files of train, val and test in a folder; "" for one that is not there.
func findSplits(dir string) (paths [3]string) {
	for i, names := range splitFiles {
		if paths[i] = findText(dir, names); paths[i] == "" {
			paths[i] = findText(dir, splitNames[i])
		}
	}
	return paths
}

// folderSplits reads train, valid (or val) and test of a folder, each a text or .npy file.
func (im *importer) folderSplits(ctx context.Context, dir string) ([]splitSet, error) {
	var sets []splitSet
	for i, path := range findSplits(dir) {
		if path == "" {
			return nil, errs.New(errs.Usage, "%s has no split %q; all three are needed", dir,
				splitFiles[i][0])
		}
		ids, err := im.splitFile(ctx, path, dir == im.o.SplitDir)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{path, ids})
	}
	return sets, nil
}

// splitsOr reads the splits of the folder that SplitDir names, or else those of own, unless new
// ones are made.
func (im *importer) splitsOr(ctx context.Context,
	own func(context.Context) ([]splitSet, error)) ([]splitSet, error) {
	switch {
	case im.o.SplitDir != "":
		return im.folderSplits(ctx, im.o.SplitDir)
	case im.o.MakeSplits:
		return nil, nil
	}
	return own(ctx)
}

func (im *importer) splitFile(ctx context.Context, path string, users bool) ([]int64, error) {
	if isArray(path) {
		a, err := openArray(path)
		if err != nil {
			return nil, err
		}
		return im.splitIDs(a)
	}
	t, err := im.tableOf(ctx, "splits", path, users)
	if err != nil || t.cols == 0 {
		return nil, err
	}
	var ids []int64
	t.id = t.take[0]
	err = im.eachValue(ctx, t, func(id, line int64, _ float64) error {
		node, ok := im.ids.node(id)
		if !ok || node >= im.m.Nodes {
			return errs.New(errs.Usage, "%s:%d: %s", path, line, im.outside(id, im.m.Nodes))
		}
		ids, err = im.addID(ids, node, path)
		return err
	})
	return ids, err
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
	}
	if im.used == nil {
		if err := im.countClasses(labels, labelsFile); err != nil {
			return err
		}
	}
	if err := im.writeLabels(labels); err != nil {
		return err
	}
	sp, err := build.NewSplitter(im.s, im.tasksFile(""), im.o.Seed, im.o.TrainFraction,
		im.o.ValFraction)
	if err != nil {
		return err
	}
	trained := newClassSet(int64(im.m.Classes))
	if err := im.place(sp, trained, labels, given); err != nil {
		return errors.Join(err, sp.Discard())
	}
	if im.m.Train, im.m.Val, im.m.Test, err = sp.Close(); err != nil {
		return err
	}
	if len(given) == 0 && labels != nil && im.splitOf == nil && im.earlier == nil {
		im.noteDealt()
	}
	if im.used != nil {
		im.noteUntrained(trained)
	}
	return nil
}

// writeLabels writes labels.npy.
func (im *importer) writeLabels(labels []int32) error {
	if !im.plain() {
		return im.writeTargets()
	}
	out, err := im.s.Array(im.tasksFile("labels"), npy.Int32, 0)
	if err != nil {
		return err
	}
	if err = out.Int32s(labels); labels == nil {
		err = unlabelled(out, im.m.Nodes)
	}
	if err != nil {
		return errors.Join(err, out.Discard())
	}
	return out.Close()
}

// place puts the nodes into splits, and the classes to train on into trained.
func (im *importer) place(sp *build.Splitter, trained classSet, labels []int32,
	given []splitSet) error {
	place := func(split int, v int64) error {
		if split == 0 {
			trained.add(labels[v])
		}
		return sp.Place(split, v)
	}
	switch {
	case len(given) > 0:
		return im.placeGiven(place, labels, given)
	case im.earlier != nil:
		return placeByRule(place, labels, func(v int64) int {
			switch {
			case v < int64(len(im.earlier)):
				return int(im.earlier[v])
			case im.splitOf != nil:
				return im.splitOf(v)
			}
			return sp.Of(uint64(v))
		})
	case im.splitKey != nil:
		return placeByRule(place, labels, func(v int64) int { return sp.Of(im.splitKey(v)) })
	case im.splitOf != nil:
		return placeByRule(place, labels, im.splitOf)
	}
	return im.deal(sp, place, labels)
}

// noteDealt names the splits that were made.
func (im *importer) noteDealt() {
	why, how := errs.Text("the input has no splits"), "in equal shares of each class and at random by seed"
	if im.o.MakeSplits {
		why = errs.Textf("{make-splits}")
	}
	if im.splitKey != nil || !im.plain() {
		how = "at random by seed"
	}
	im.m.Source.Options["split"] = "random"
	if shares := [2]float64{im.o.TrainFraction, im.o.ValFraction}; shares != usualShares {
		for i, key := range shareKeys {
			im.m.Source.Options[key] = strconv.FormatFloat(shares[i], 'g', -1, 64)
		}
	}
	im.o.note("%s: %d nodes are dealt to train, %d to val and %d to test, %s %d", why, im.m.Train,
		im.m.Val, im.m.Test, how, im.o.Seed)
}

// checkLabels finds nodes that need a label and have none.
func (im *importer) checkLabels(labels []int32, file string, given []splitSet) error {
	if im.o.UnlabelledOK {
		return nil
	}
	fix := errs.Textf("{unlabelled-ok} leaves such nodes out of the splits")
	if len(given) == 0 {
		for v, l := range labels {
			if l == noLabel && (im.splitOf == nil || im.splitOf(int64(v)) >= 0) {
				return errs.New(errs.Usage, "%s: node %d has no label (NaN or -1); %s",
					file, im.idOf(int64(v)), fix)
			}
		}
	}
	for _, g := range given {
		for pos, v := range g.ids {
			if labels[v] == noLabel {
				return errs.New(errs.Usage,
					"%s: node %d, position %d of %s, has no label (NaN or -1); %s", file,
					im.idOf(v), pos, g.file, fix)
			}
		}
	}
	return nil
}

// placeByRule puts the labelled nodes where the format says.
func placeByRule(place func(int, int64) error, labels []int32, of func(v int64) int) error {
	for v, l := range labels {
		if l == noLabel {
			continue
		}
		if i := of(int64(v)); i >= 0 {
			if err := place(i, int64(v)); err != nil {
				return err
			}
		}
	}
	return nil
}

// deal puts the labelled nodes into the splits by chance, so many of each class as quotas says. A
// node goes to a split with the probability that the split has among the places that are left.
func (im *importer) deal(sp *build.Splitter, place func(int, int64) error, labels []int32) error {
	if labels == nil {
		return nil
	}
	const each = 8 * (1 + 3) // a count and three quotas
	if err := im.needMemory("the splits of the classes", int64(im.m.Classes), each); err != nil {
		return err
	}
	counts := make([]int64, im.m.Classes)
	for _, l := range labels {
		if l != noLabel {
			counts[l]++
		}
	}
	train, val := im.o.TrainFraction, im.o.ValFraction
	left := quotas(counts, [3]float64{train, val, max(1-train-val, 0)})
	for v, l := range labels {
		if l == noLabel {
			continue
		}
		x := sp.Unit(uint64(v)) * float64(counts[l])
		to := len(dataset.Splits) - 1
		for s, n := range left[l] {
			if x -= float64(n); n > 0 && x < 0 {
				to = s
				break
			}
		}
		for left[l][to] == 0 { // x was rounded
			to--
		}
		left[l][to]--
		counts[l]--
		if err := place(to, int64(v)); err != nil {
			return err
		}
	}
	return nil
}

// placeGiven puts the nodes of the given splits where these say, and refuses splits that overlap.
func (im *importer) placeGiven(place func(int, int64) error, labels []int32,
	given []splitSet) error {
	if err := im.needMemory("the split of each node", im.m.Nodes, 1); err != nil {
		return err
	}
	owner := make([]byte, im.m.Nodes)
	for i, g := range given {
		for pos, v := range g.ids {
			if o := owner[v]; o != 0 {
				if int(o) == i+1 {
					return errs.New(errs.Usage,
						"%s: node %d appears twice, the second time at position %d", g.file,
						im.idOf(v), pos)
				}
				return errs.New(errs.Usage,
					"%s: node %d at position %d is also in %s; the splits must be apart", g.file,
					im.idOf(v), pos, given[o-1].file)
			}
			owner[v] = byte(i + 1)
		}
	}
	for v, o := range owner {
		if o != 0 && labels != nil && labels[v] != noLabel {
			if err := place(int(o-1), int64(v)); err != nil {
				return err
			}
		}
	}
	return nil
}
