package importer

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/columns"
	tables "helios/dataset/table"
	"helios/internal/errs"
)

// taskTable reads labels and splits from a table of nodes. Row i of the table is node i.
type taskTable struct {
	*importer
	l       *LabelTable
	na      []string
	classes map[string]int32 // known names of classes, of {like}; nil: those of the table
	// read are the classes' names in the order of their first rows, in place of which labels are.
	read   map[string]int32
	labels []int32
	lists  [][]int32 // of labels that are lists of names
	y      []float64 // of labels that are numbers, by row and column
	split  []int8    // by SplitCol: -1 none
	times  []float64 // by SplitTime
	unseen string    // first row without a label
}

// taskRows are the rows of a batch.
type taskRows struct {
	names []string
	codes []int32   // of names, -1: none
	lists [][]int32 // of names
	y     []float64
	split []int8
	times []float64
	none  string // first row without a label
}

// numbers reports whether labels are numbers, or 0 and 1.
func (t *taskTable) numbers() bool { return t.l.TaskType != classification && !t.named() }

// named reports whether the labels of a node are a list of names.
func (t *taskTable) named() bool { return t.lists != nil }

// taskColumns are the columns that a task is read from.
func (l *LabelTable) taskColumns() []string {
	all := slices.Clone([]string(l.LabelCol))
	if l.SplitCol != "" {
		all = append(all, l.SplitCol)
	}
	if l.SplitTime != nil {
		all = append(all, l.SplitTime.Col)
	}
	return all
}

// readTask reads labels and splits, and hands them to labelsAndSplits' fields. It returns labels as
// these want them.
func (im *importer) readTask(ctx context.Context, n *NodeTable, src *tables.Source, rows int64,
	classes []string) ([]int32, error) {
	t := &taskTable{importer: im, l: &n.Labels[0], na: n.NA, read: map[string]int32{}}
	src, err := src.Select(t.l.taskColumns()...)
	if err != nil {
		return nil, t.l.bad("%w", err)
	}
	if f := src.Fields[src.Find(t.l.LabelCol[0])]; t.l.TaskType == multiLabel && f.List {
		if f.Kind == tables.Text {
			t.lists = [][]int32{}
		}
	}
	if classes != nil {
		t.classes = map[string]int32{}
		for i, name := range classes {
			t.classes[name] = int32(i)
		}
	}
	if err := tables.Each(ctx, src, t.parse, t.take); err != nil {
		return nil, err
	}
	if n := int64(len(t.labels)); n != rows {
		return nil, errs.New(errs.Usage, "%s: %d rows of labels, and there are %d nodes", src.Files[0], n,
			rows)
	}
	return t.finish(src.Files[0])
}

func (t *taskTable) parse(b *tables.Batch) (*taskRows, error) {
	r := &taskRows{codes: make([]int32, b.Rows)}
	if err := t.parseSplits(b, r); err != nil {
		return nil, err
	}
	place := map[string]int32{}
	var key []byte
	code := func(c *tables.Column, i int) (k int32, err error) {
		if key, err = columns.AppendText(key[:0], c, i); err != nil {
			return 0, b.Bad(i, c.Name, "%w", err)
		}
		k, ok := place[string(key)]
		if !ok {
			if len(key) > dataset.MaxNameBytes {
				return 0, b.Bad(i, c.Name, "%s: a label has at most %d bytes", tables.Brief(key),
					dataset.MaxNameBytes)
			}
			k = int32(len(r.names))
			r.names = append(r.names, string(key))
			place[r.names[k]] = k
		}
		return k, nil
	}
	labels := b.Columns[:len(t.l.LabelCol)]
	for i := range b.Rows {
		has := false
		for k := range labels {
			c := &labels[k]
			missing := t.missing(c, i)
			var err error
			switch {
			case t.numbers():
				has, err = r.number(t, b, c, i, missing, has)
			case missing:
				r.codes[i] = noLabel
				if t.named() {
					r.lists = append(r.lists, nil)
				}
			case t.named():
				has = true
				var list []int32
				if c.Kind != tables.List {
					return nil, b.Bad(i, c.Name, "is no list of names")
				}
				for j := c.Offsets[i]; j < c.Offsets[i+1] && err == nil; j++ {
					var one int32
					one, err = code(c.Values, j)
					list = append(list, one)
				}
				r.lists = append(r.lists, list)
			default:
				has = true
				r.codes[i], err = code(c, i)
			}
			if err != nil {
				return nil, err
			}
		}
		if !has {
			r.codes[i] = noLabel
			if r.none == "" && (r.split == nil || r.split[i] >= 0) {
				r.none = b.Where(i)
			}
		}
	}
	return r, nil
}

func (t *taskTable) missing(c *tables.Column, i int) bool {
	s := columns.Spec{NA: t.na}
	return s.IsMissing(c, i)
}

// number takes a label that is a number, or 0 or 1; has reports whether the row has a label so far.
func (r *taskRows) number(t *taskTable, b *tables.Batch, c *tables.Column, i int,
	missing, has bool) (bool, error) {
	if missing {
		r.y = append(r.y, math.NaN())
		return has, nil
	}
	several := t.l.TaskType == multiLabel
	x, err := columns.Number(c, i, several)
	switch {
	case err == nil && several && x != 0 && x != 1:
		err = fmt.Errorf("%v is neither 0 nor 1", x)
		fallthrough
	case err != nil && several:
		return false, b.Bad(i, c.Name, "%w; {na} names the cells whose label is unknown", err)
	case err != nil:
		return false, b.Bad(i, c.Name, "%w", err)
	}
	r.y = append(r.y, x)
	return true, nil
}

// splitNames are words for the splits.
var splitWordsOf = map[string]int8{"train": 0, "training": 0, "val": 1, "valid": 1,
	"validation": 1, "dev": 1, "test": 2, "testing": 2}

func (t *taskTable) parseSplits(b *tables.Batch, r *taskRows) error {
	c := &b.Columns[len(b.Columns)-1]
	switch {
	case t.l.SplitCol != "":
		var key []byte
		r.split = make([]int8, b.Rows)
		for i := range b.Rows {
			r.split[i] = -1
			if t.missing(c, i) {
				continue
			}
			var err error
			if key, err = columns.AppendText(key[:0], c, i); err != nil {
				return b.Bad(i, c.Name, "%w", err)
			}
			s, ok := splitWordsOf[string(bytes.ToLower(key))]
			if !ok {
				return b.Bad(i, c.Name, "split %s is none of train, val and test; an empty cell means none",
					tables.Brief(key))
			}
			r.split[i] = s
		}
	case t.l.SplitTime != nil:
		r.times = make([]float64, b.Rows)
		for i := range b.Rows {
			r.times[i] = math.NaN()
			if t.missing(c, i) {
				continue
			}
			x, err := columns.When(c, i)
			if err != nil {
				return b.Bad(i, c.Name, "%w", err)
			}
			r.times[i] = x
		}
	}
	return nil
}

// take takes the rows of a batch in their order.
func (t *taskTable) take(r *taskRows) error {
	each := int64(4 + 8*len(r.times)/max(len(r.codes), 1) + len(r.split)/max(len(r.codes), 1))
	each += 8 * int64(len(r.y)) / int64(max(len(r.codes), 1))
	if err := t.needMemory("the labels of the nodes", int64(len(r.codes)), each); err != nil {
		return err
	}
	into := make([]int32, len(r.names))
	for i, name := range r.names {
		code, ok := t.read[name]
		if !ok {
			if err := t.needMemory("the names of classes", 1, int64(nameBytes+len(name))); err != nil {
				return err
			}
			code = int32(len(t.read))
			t.read[name] = code
		}
		into[i] = code
	}
	if t.unseen == "" {
		t.unseen = r.none
	}
	for _, code := range r.codes {
		if code >= 0 && len(into) > 0 {
			code = into[code]
		}
		t.labels = append(t.labels, code)
	}
	for _, list := range r.lists {
		for k := range list {
			list[k] = into[list[k]]
		}
		if err := t.needMemory("the labels of the nodes", int64(len(list)+6), 4); err != nil {
			return err
		}
		t.lists = append(t.lists, list)
	}
	t.y = append(t.y, r.y...)
	t.split = append(t.split, r.split...)
	t.times = append(t.times, r.times...)
	return nil
}

// finish gives classes their numbers and nodes their splits.
func (t *taskTable) finish(file string) ([]int32, error) {
	file += ", column " + tables.Brief(strings.Join(t.l.LabelCol, ", "))
	var err error
	switch {
	case t.numbers():
		err = t.finishNumbers(file)
	case t.named():
		err = t.finishNames(file)
	default:
		err = t.finishClasses(file)
	}
	if err != nil {
		return nil, err
	}
	if t.unseen != "" && !t.o.UnlabelledOK {
		return nil, errs.New(errs.Usage,
			"%s, column %s: no label; {unlabelled-ok} leaves such nodes out of the splits", t.unseen,
			tables.Brief(strings.Join(t.l.LabelCol, ", ")))
	}
	t.o.UnlabelledOK = true // the rest has been checked
	if pct := t.l.SplitPct; pct != nil {
		t.o.TrainFraction, t.o.ValFraction = pct[0], pct[1]
	}
	if err := t.finishSplits(); err != nil {
		return nil, err
	}
	if int64(len(t.labels)) < t.m.Nodes {
		return t.labels, nil // those that are there already count, too
	}
	return t.labels, t.countClasses(t.labels, file)
}

// finishClasses numbers the classes. Whole numbers from 0 without gaps are classes already. The
// user says that -1 is none: it is the name of a class as well.
func (t *taskTable) finishClasses(file string) error {
	names := columns.Sorted(t.read)
	if len(names) > 1 && names[0] == "-1" && names[1] == "0" {
		return errs.New(errs.Usage, "%s: -1 stands among classes from 0; {na} -1 says that such nodes have no label, else call the classes by words",
			file)
	}
	plain := true
	number := make([]int32, len(t.read))
	for i, name := range names {
		plain = plain && name == fmt.Sprint(i)
		number[t.read[name]] = int32(i)
	}
	if t.classes != nil {
		for _, name := range names {
			code, ok := t.classes[name]
			if !ok {
				return errs.New(errs.Usage, "%s: class %s is none of the %d that the dataset has", file,
					tables.Brief(name), len(t.classes))
			}
			number[t.read[name]] = code
		}
		t.o.NumClasses, t.classesFrom = int64(len(t.classes)), "{like}"
	} else if !plain {
		t.m.ClassNames = names
	}
	for v, code := range t.labels {
		if code >= 0 {
			t.labels[v] = number[code]
		}
	}
	return nil
}

func (t *taskTable) finishNumbers(string) error {
	y := t.newTargets(int64(len(t.l.LabelCol)))
	if t.l.TaskType == regression {
		y.numbers = []float32{}
	}
	for i, x := range t.y {
		if !y.put(x) {
			return errs.New(errs.Usage, "%s", t.badTarget(int64(i)/y.columns, int64(i)%y.columns, x))
		}
	}
	t.y = nil
	if len(t.l.LabelCol) > 1 {
		t.m.ClassNames = t.l.LabelCol
	}
	t.labels = y.has()
	return nil
}

func (t *taskTable) finishNames(file string) error {
	names := columns.Sorted(t.read)
	if len(names) == 0 {
		return errs.New(errs.Usage, "%s: no row has a label", file)
	}
	if err := t.needMemory("the labels of the nodes", int64(len(t.lists)), int64(len(names))); err != nil {
		return err
	}
	number := make([]int32, len(names))
	for i, name := range names {
		number[t.read[name]] = int32(i)
	}
	if t.classes != nil { // those of {like}, in its order
		for _, name := range names {
			code, ok := t.classes[name]
			if !ok {
				return errs.New(errs.Usage, "%s: label %s is none of the %d that the dataset has", file,
					tables.Brief(name), len(t.classes))
			}
			number[t.read[name]] = code
		}
		names = make([]string, len(t.classes))
		for name, code := range t.classes {
			names[code] = name
		}
	}
	y := t.newTargets(int64(len(names)))
	for v, list := range t.lists {
		row := make([]uint8, len(names))
		if t.labels[v] == noLabel {
			for k := range row {
				row[k] = 255
			}
		}
		for _, code := range list {
			row[number[code]] = 1
		}
		y.labels = append(y.labels, row...)
	}
	t.m.ClassNames = names
	t.labels = y.has()
	return nil
}

// finishSplits sets splitOf where the table says who is in which split.
func (t *taskTable) finishSplits() error {
	switch {
	case t.o.MakeSplits:
		return nil
	case t.l.SplitCol != "":
		t.splitOf = func(v int64) int { return int(t.split[v]) }
		t.m.Source.Options["split"] = "column " + t.l.SplitCol
		return nil
	case t.l.SplitTime == nil:
		return nil
	}
	s := t.l.SplitTime
	var known []float64
	for v, l := range t.labels {
		switch x := t.times[v]; {
		case l == noLabel:
		case x != x:
			return errs.New(errs.Usage, "row %d, column %s: no time, and the row has a label", v+1,
				tables.Brief(s.Col))
		default:
			known = append(known, x)
		}
	}
	val, test, err := s.cuts(known, t.o.TrainFraction, t.o.ValFraction)
	if err != nil {
		return err
	}
	t.splitOf = func(v int64) int {
		switch x := t.times[v]; {
		case x < val:
			return 0
		case x < test:
			return 1
		}
		return 2
	}
	t.m.Source.Options["split"] = "time " + s.Col
	return nil
}

// cuts returns the first times of val and test. Nodes of one time are in one split.
func (s *TimeSplit) cuts(known []float64, train, val float64) (first, second float64, err error) {
	if len(s.Cuts) == 2 {
		var cut [2]float64
		for i, text := range s.Cuts {
			if cut[i], err = columns.ParseWhen([]byte(text)); err != nil {
				return 0, 0, s.bad("cut %s %w", brief(text), err)
			}
		}
		if cut[0] > cut[1] {
			return 0, 0, s.bad("cuts: %s comes after %s", brief(s.Cuts[0]), brief(s.Cuts[1]))
		}
		return cut[0], cut[1], nil
	}
	if len(known) == 0 {
		return 0, 0, nil
	}
	slices.SortFunc(known, cmp.Compare[float64])
	place := func(share float64) float64 {
		i := int(float64(share*float64(len(known))) + 0.5)
		if i >= len(known) {
			return math.Inf(1)
		}
		return known[i]
	}
	return place(train), place(train + val), nil
}
