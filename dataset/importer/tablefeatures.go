package importer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/columns"
	"helios/dataset/npy"
	tables "helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/work"
)

// ColumnOptions say how flags' table of nodes becomes features, labels and splits; a description
// says the same for each type.
type ColumnOptions struct {
	Label     string   `option:"label" common:"yes" arg:"COLUMN[,…]" usage:"COLUMN[,…] of classes, or of what {target} names"`
	Features  string   `option:"feature-columns" common:"yes" shown:"all others" arg:"COLUMN[,…]" usage:"COLUMN[,…] to take as features; none: nodes have no features"`
	Transform ByColumn `option:"transform" common:"yes" shown:"numbers are standardised, few different texts one-hot" arg:"COLUMN=HOW[,…]" usage:"COLUMN=HOW[,…]: how a column becomes features: none, standard, minmax, log, boolean, date, one-hot, ordinal, hash:SIZE or bag:SIZE"`
	Missing   ByColumn `option:"missing" common:"yes" shown:"they are refused" arg:"[COLUMN=]WHAT[,…]" usage:"[COLUMN=]WHAT[,…]: what cells without a value become: mean, zero, category (one of their own), indicator (zero, and a feature that is 1), or a value"`
	NA        string   `option:"na" arg:"TEXT[,…]" usage:"TEXT[,…] that stands for no value, beside an empty cell"`
	StatsOf   string   `option:"stats-of" oneof:"train,all" default:"train" usage:"nodes whose means, deviations and categories are taken"`
	Split     string   `option:"split-column" common:"yes" arg:"COLUMN" usage:"COLUMN of train, val and test; an empty cell: none"`
	SplitTime string   `option:"split-time" common:"yes" arg:"COLUMN[:VAL,TEST]" usage:"COLUMN[:VAL,TEST] of dates or numbers: earlier nodes are in train, those from VAL on in val, from TEST on in test; without these {train-fraction} and {val-fraction} cut"`
	Like      string   `option:"like" there:"dataset" common:"yes" arg:"DATASET" usage:"DATASET whose features' columns, statistics, categories and classes are taken, so that its models predict for these nodes"`
}

// ByColumn is a text for all columns, under "", or for some.
type ByColumn map[string]string

// UnmarshalText reads TEXT or COLUMN=TEXT[,…].
func (b *ByColumn) UnmarshalText(text []byte) error {
	*b = ByColumn{}
	for part := range strings.SplitSeq(string(text), ",") {
		column, what, some := strings.Cut(part, "=")
		if !some {
			column, what = "", part
		}
		if _, again := (*b)[column]; again || what == "" {
			return fmt.Errorf("%q is given twice, or empty", part)
		}
		(*b)[column] = what
	}
	return nil
}

// trainRows returns which nodes are in train, after labelsAndSplits; nil: none is.
func (im *importer) trainRows() ([]bool, error) {
	if im.m.Train == 0 {
		return nil, nil
	}
	if err := im.needMemory("the training split", im.m.Nodes, 1); err != nil {
		return nil, err
	}
	rows := make([]bool, im.m.Nodes)
	a, err := npy.Open(im.s.Path(im.tasksFile("train.npy")))
	if err != nil {
		return nil, err
	}
	return rows, eachInt(a, func(_, v int64) error {
		rows[v] = true
		return nil
	})
}

// learnColumns learns the columns of a table's features; train are the rows for that, nil: all.
// known, which may be nil, has seen them.
func (im *importer) learnColumns(ctx context.Context, t *NodeTable, src *tables.Source,
	train []bool, known *columns.Profiler) ([]columns.Learned, error) {
	var specs []columns.Spec
	for i := range t.Features {
		f := &t.Features[i]
		for _, s := range f.specs(t.NA) {
			if src.Find(s.Column) < 0 {
				_, err := src.Select(s.Column)
				return nil, f.bad("%w", err)
			}
			specs = append(specs, s)
		}
	}
	f, err := columns.NewFitter(specs, max(im.o.Memory, leastMemory)/4)
	if err != nil {
		return nil, err
	}
	names := f.Know(known, func(c string) bool { return src.Fields[src.Find(c)].List })
	if names == nil {
		return f.Learned()
	}
	if src, err = src.Select(names...); err != nil {
		return nil, err
	}
	if err := eachUse(ctx, src, train, noFault(f.Read), f.Add); err != nil {
		return nil, err
	}
	return f.Learned()
}

// eachUse reads a table as tables.Each does, and gives take which rows are in train; nil: all.
func eachUse[T any](ctx context.Context, src *tables.Source, train []bool,
	parse func(*tables.Batch) (T, error), take func(T, []bool) error) error {
	type part struct {
		v    T
		rows int
		file string
	}
	n := 0
	return tables.Each(ctx, src, func(b *tables.Batch) (part, error) {
		v, err := parse(b)
		return part{v, b.Rows, b.File}, err
	}, func(p part) error {
		use := train
		if train != nil {
			if n+p.rows > len(train) {
				return moreRows(p.file, len(train))
			}
			use = train[n : n+p.rows]
		}
		n += p.rows
		return take(p.v, use)
	})
}

// noFault gives a function an error, of which it has none.
func noFault[In, Out any](fn func(In) Out) func(In) (Out, error) {
	return func(x In) (Out, error) { return fn(x), nil }
}

func moreRows(file string, nodes int) error {
	return errs.New(errs.Usage, "%s: more rows than the %d nodes; the file changed while it was read",
		file, nodes)
}

// encodeBytes bounds a block of rows that is encoded.
const encodeBytes = 2 << 20

// writeColumns writes features.npy and columns.json of a table whose columns were learned. before
// writes the rows before those of the table; src nil: there are no others.
func (im *importer) writeColumns(ctx context.Context, src *tables.Source,
	learned []columns.Learned, before func(*featureWriter) error) error {
	from := "the dataset's own rows"
	if src != nil {
		from = src.Files[0]
	}
	e, err := columns.NewEncoder(learned)
	if err != nil {
		return err
	}
	if e.Width() > dataset.MaxDim {
		return errs.New(errs.Usage, "%s: %d features per node, at most %d; take transform hash for the column with the most categories",
			from, e.Width(), dataset.MaxDim)
	}
	if err := im.writeLearned(learned); err != nil {
		return err
	}
	im.m.Dim = e.Width()
	if im.s.HasArray(im.nodesFile("features"), im.m.Nodes, int64(im.m.Dim)) {
		return nil
	}
	var names []string
	for i := range learned {
		if !slices.Contains(names, learned[i].Column) {
			names = append(names, learned[i].Column)
		}
	}
	if src != nil {
		if src, err = src.Select(names...); err != nil {
			return err
		}
	}
	w, err := im.featureWriter(from, int64(e.Width()))
	if err != nil {
		return err
	}
	r := &rowEncoder{e: e, w: w, spare: work.NewSpare[[]float32](8)}
	if err = before(w); err == nil && src != nil {
		err = tables.Each(ctx, src, r.encode, func(x encoded) error {
			if w.n+int64(x.b.Rows)*w.dim > im.m.Nodes*w.dim {
				return moreRows(x.b.File, int(im.m.Nodes))
			}
			return r.put(x)
		})
	}
	if err == nil && w.n != im.m.Nodes*w.dim {
		err = errs.New(errs.Usage, "%s: %d rows, and there are %d nodes; the file changed while it was read",
			from, w.n/w.dim, im.m.Nodes)
	}
	if err != nil {
		return errors.Join(err, w.out.Discard())
	}
	im.noteCells(e)
	return w.out.Close()
}

// rowEncoder encodes batches; large ones in blocks.
type rowEncoder struct {
	e     *columns.Encoder
	w     *featureWriter
	spare work.Spare[[]float32]
}

// encoded is a batch and its features; nil: they are too many at once.
type encoded struct {
	b    *tables.Batch
	rows []float32
}

func (r *rowEncoder) encode(b *tables.Batch) (encoded, error) {
	n := b.Rows * r.e.Width()
	if n > encodeBytes/4 {
		return encoded{b: b}, nil
	}
	rows := slices.Grow(r.spare.Take(), n)[:n]
	return encoded{b, rows}, r.e.Encode(b, 0, b.Rows, rows)
}

func (r *rowEncoder) put(x encoded) error {
	if x.rows != nil {
		err := r.w.put(x.rows)
		r.spare.Give(x.rows[:0])
		return err
	}
	width := r.e.Width()
	per := max(1, encodeBytes/(4*width))
	rows := slices.Grow(r.spare.Take(), per*width)[:per*width]
	for from := 0; from < x.b.Rows; from += per {
		to := min(from+per, x.b.Rows)
		if err := r.e.Encode(x.b, from, to, rows); err != nil {
			return err
		}
		if err := r.w.put(rows[:(to-from)*width]); err != nil {
			return err
		}
	}
	r.spare.Give(rows[:0])
	return nil
}

// noteCells tells of cells that had no value or an unknown category.
func (im *importer) noteCells(e *columns.Encoder) {
	for _, c := range e.Counts() {
		if c.Missing > 0 {
			im.o.note("column %s: %d cells have no value", brief(c.Column), c.Missing)
		}
		if c.Unknown > 0 {
			im.o.note("column %s: %d cells have a category that no training row has", brief(c.Column),
				c.Unknown)
		}
	}
}

// columnsFile is columns.json.
type columnsFile struct {
	Format  int               `json:"format"` // 1
	Columns []columns.Learned `json:"columns"`
}

func (im *importer) writeLearned(learned []columns.Learned) error {
	text, err := json.MarshalIndent(columnsFile{1, learned}, "", " ")
	if err != nil {
		return err
	}
	f, err := im.s.Create(im.nodesFile(dataset.ColumnsName))
	if err != nil {
		return err
	}
	if _, err := f.Write(append(text, '\n')); err != nil {
		return errors.Join(err, f.Discard())
	}
	return f.Finish()
}

// likeColumns reads the columns of a type of nodes of a dataset, which messages call what; nil: it
// has no rows.
func likeColumns(d *dataset.Dataset, what, nodeType string) (learned []columns.Learned, err error) {
	g := d.Meta.Graph()
	i := 0
	if nodeType != "" && d.Meta.Typed() && !d.Meta.Homogeneous() {
		if i = g.TypeOf(nodeType); i < 0 {
			return nil, errs.New(errs.Usage, "%s has no nodes of type %s", what, brief(nodeType))
		}
	}
	if g.NodeTypes[i].Dim == 0 {
		return nil, nil
	}
	text, err := d.ColumnsOf(i)
	if err != nil {
		return nil, err
	}
	if text == nil {
		return nil, errs.New(errs.Usage,
			"%s has no %s: its features were not made of a table's columns", what,
			path.Join(g.NodeTypes[i].Dir, dataset.ColumnsName))
	}
	var f columnsFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, errs.New(errs.Usage, "%s: %s: %w", what, dataset.ColumnsName, err)
	}
	if f.Format != 1 {
		return nil, errs.New(errs.Usage, "%s: %s has format %d, this heliosctl reads 1", what,
			dataset.ColumnsName, f.Format)
	}
	if err := columns.CheckLearned(f.Columns); err != nil {
		return nil, errs.New(errs.Usage, "%s: %s: %w", what, dataset.ColumnsName, err)
	}
	return f.Columns, nil
}

// profile looks at some columns, and learns of all rows, or of those in train.
func profile(ctx context.Context, src *tables.Source, na, names []string, all bool,
	train []bool) (*columns.Profiler, error) {
	p := columns.NewProfiler(names, na, all)
	if len(names) == 0 {
		return p, nil
	}
	src, err := src.Select(names...)
	if err != nil {
		return nil, err
	}
	return p, eachUse(ctx, src, train, p.Read, func(x *columns.Part, use []bool) error {
		p.Add(x, use)
		return nil
	})
}

// chooseFeatures fills in the features of a table that flags name: the columns that they name, or
// all but used ones, with the transforms that they name, or the usual ones. It returns what it has
// learned of the rows in train on the way.
func (im *importer) chooseFeatures(ctx context.Context, c *ColumnOptions, t *NodeTable,
	src *tables.Source, used []string, train []bool) (*columns.Profiler, error) {
	t.NA = list(c.NA)
	var names []string
	if names = list(c.Features); names == nil {
		names = im.otherColumns(src, used)
	}
	for _, by := range []ByColumn{c.Transform, c.Missing} {
		for name := range by {
			if name != "" && !slices.Contains(names, name) {
				return nil, errs.New(errs.Usage, "column %s is no feature; these are %s", brief(name),
					briefNames(names))
			}
		}
	}
	known, err := profile(ctx, src, t.NA, names, c.StatsOf == "all", train)
	if err != nil {
		return nil, err
	}
	looks := known.Profiles
	var left []string
	chosen := map[string][]string{}
	for i, name := range names {
		f := FeatureTable{FeatureCol: texts{name}, Missing: c.Missing[""], StatsOf: c.StatsOf}
		s, why := looks[i].Suggest()
		if how, ok := c.Transform[name]; ok {
			if err := f.setTransform(how); err != nil {
				return nil, err
			}
		} else if why != nil {
			if c.Features != "" {
				return nil, errs.New(errs.Usage, "column %s: %w; give {transform} %s=hash:64 or another one",
					brief(name), why, name)
			}
			left = append(left, fmt.Sprintf("%s (%v)", brief(name), why))
			continue
		} else {
			f.Transform, f.Unknown, f.Size = s.Transform, s.Unknown, s.Size
			chosen[s.Transform] = append(chosen[s.Transform], name)
		}
		if own, ok := c.Missing[name]; ok {
			f.Missing = own
		} else if f.specs(nil)[0].Check() != nil && looks[i].Missing == 0 {
			f.Missing = "" // it does not fit the column, and is not needed
		}
		if looks[i].Missing > 0 && f.Missing == "" {
			return nil, errs.New(errs.Usage,
				"%s, column %s: no value; choose what stands in its place: {missing} %s=mean, zero, indicator, category or a value (%d of %d rows have none)",
				looks[i].FirstMissing, brief(name), name, looks[i].Missing, looks[i].Rows)
		}
		t.Features = append(t.Features, f)
	}
	for _, how := range columns.Transforms {
		if names := chosen[how]; names != nil {
			im.o.note("features by transform %s: %s", how, briefNames(names))
		}
	}
	if len(left) > 0 {
		im.o.note("not used as features: %s; {transform} COLUMN=hash:64 takes one",
			strings.Join(left, ", "))
	}
	return known, t.check()
}

// otherColumns are those that are neither used nor an index, as pandas writes it.
func (im *importer) otherColumns(src *tables.Source, used []string) (names []string) {
	for _, f := range src.Fields {
		switch {
		case slices.Contains(used, f.Name):
		case isIndex(f.Name):
			im.o.note("not used as a feature: column %q, an index; give it a name to use it", f.Name)
		default:
			names = append(names, f.Name)
		}
	}
	return names
}

// isIndex reports whether a column's name is that of an index of pandas.
func isIndex(name string) bool { return name == "" || name == "__index_level_0__" }

// setTransform reads HOW or HOW:SIZE.
func (f *FeatureTable) setTransform(how string) error {
	how, size, sized := strings.Cut(how, ":")
	f.Transform = how
	if sized {
		if _, err := fmt.Sscanf(size+"\n", "%d\n", &f.Size); err != nil {
			return errs.New(errs.Usage, "{transform} %s: size %s is no whole number", how, brief(size))
		}
	}
	return nil
}

// list cuts a text at commas.
func list(text string) (all []string) {
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			all = append(all, part)
		}
	}
	return all
}
