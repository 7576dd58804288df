package columns

import (
	"cmp"
	"maps"
	"math"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sync/errgroup"

	"helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/units"
	"helios/internal/work"
)

// A category that is held takes its bytes and so many more.
const categoryBytes = 64

// spareCells bounds the memory that waits to be used again.
const spareCells = 8

// Fitter learns columns from rows. Each column takes them in their order, so how they are cut into
// batches changes nothing.
type Fitter struct {
	cols   []*fitting
	memory int64 // for the categories of a column
	room   work.Spare[*Cells]
}

// fitting is a column that is being learned.
type fitting struct {
	Learned
	cell, m2   []float64 // m2: sums of squared deviations, as Welford has them
	categories map[string]struct{}
	bytes      int64 // of the categories
	list       bool
	known      bool // by Know
	key        []byte
}

// NewFitter returns a Fitter of columns; categories take no more than so many bytes.
func NewFitter(specs []Spec, memory int64) (*Fitter, error) {
	f := &Fitter{memory: memory / int64(max(len(specs), 1)),
		room: work.NewSpare[*Cells](spareCells)}
	for _, s := range specs {
		if err := s.Check(); err != nil {
			return nil, err
		}
		c := &fitting{Learned: Learned{Spec: s}}
		if s.categorical() && s.Categories == nil {
			c.categories = map[string]struct{}{}
		}
		f.cols = append(f.cols, c)
	}
	return f, nil
}

// Cells are the numbers of a batch, column by column: nil, of those that have none or several.
type Cells struct {
	b      *table.Batch
	of     [][]float64
	faults []*fault
	all    []float64
}

func newCells(b *table.Batch, columns int, room work.Spare[*Cells]) *Cells {
	x := room.Take()
	if x == nil {
		x = &Cells{}
	}
	x.b, x.faults = b, slices.Grow(x.faults[:0], columns)[:columns]
	x.of = slices.Grow(x.of[:0], columns)[:columns]
	clear(x.of)
	clear(x.faults)
	x.all = slices.Grow(x.all[:0], columns*b.Rows)
	return x
}

// column makes room for the numbers of a column.
func (x *Cells) column(i int) []float64 {
	x.of[i] = x.all[i*x.b.Rows : (i+1)*x.b.Rows]
	return x.of[i]
}

// Read reads the numbers of a batch, for Add. Several goroutines may call it.
func (f *Fitter) Read(b *table.Batch) *Cells {
	x := newCells(b, len(f.cols), f.room)
	for i, c := range f.cols {
		if col, err := columnOf(b, c.Column, i); err == nil && !c.known && c.oneNumber(col) {
			x.faults[i] = c.numbersOf(x.column(i), col, 0)
		}
	}
	return x
}

// Add learns from the rows of a batch that use names, nil: from all. Others are checked. A batch
// without a column teaches nothing of it, which is for Fixed ones.
func (f *Fitter) Add(x *Cells, use []bool) error {
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, c := range f.cols {
		switch {
		case x.faults[i] != nil || c.known:
		case x.of[i] != nil:
			c.learn(x.of[i], use)
		default:
			g.Go(func() error {
				x.faults[i] = c.add(x.b, use, f.memory, i)
				return nil
			})
		}
	}
	_ = g.Wait()
	err := first(x.b, len(f.cols), func(i int) *Spec { return &f.cols[i].Spec },
		func(i int) *fault { return x.faults[i] })
	f.room.Give(x)
	return err
}

func (c *fitting) add(b *table.Batch, use []bool, memory int64, likely int) *fault {
	col, err := columnOf(b, c.Column, likely)
	if err != nil && c.fixed() {
		return nil
	}
	if err != nil {
		return &fault{-1, err}
	}
	c.list = col.Kind == table.List
	for i := range b.Rows {
		used := use == nil || c.All || use[i]
		switch missing := c.missing(col, i); {
		case missing && c.Missing == "":
			return &fault{i, errNoValue}
		case missing:
			continue
		case !c.texts():
			err = c.addNumbers(col, i, used)
		case used && c.categories != nil:
			err = c.eachText(&c.key, col, i,
				func(t []byte) error { return c.addCategory(t, memory) })
		}
		if err != nil {
			return &fault{i, err}
		}
		if used {
			c.Rows++
		}
	}
	return nil
}

func (c *fitting) addNumbers(col *table.Column, i int, used bool) error {
	if c.Size == 0 && col.Kind == table.List { // the first row has the length of all vectors
		if c.Size = vectorSize(col, i); c.Size < 1 || c.Size > maxSize {
			return errs.Errorf("holds %d values; a vector has 1 to %d", c.Size, maxSize)
		}
	}
	c.begin()
	if err := c.Spec.cell(c.cell, col, i); err != nil || !used {
		return err
	}
	inverse := 1 / float64(c.Rows+1)
	for k, x := range c.cell {
		c.Stats[k].see(x, inverse, &c.m2[k])
	}
	return nil
}

// begin makes room for what is learned of numbers.
func (c *fitting) begin() {
	if c.cell != nil {
		return
	}
	n := c.numbers()
	c.cell, c.m2, c.Stats = make([]float64, n), make([]float64, n), make([]Stat, n)
	for k := range c.Stats {
		c.Stats[k].Min, c.Stats[k].Max = math.Inf(1), math.Inf(-1)
	}
}

// see takes a number; inverse is that of how many there are with it.
func (s *Stat) see(x, inverse float64, m2 *float64) {
	d := x - s.Mean
	s.Mean += float64(d * inverse)
	*m2 += float64(d * (x - s.Mean))
	s.Min, s.Max = min(s.Min, x), max(s.Max, x)
}

// learn takes numbers that Read has read.
func (c *fitting) learn(cells []float64, use []bool) {
	c.begin()
	if c.All {
		use = nil
	}
	s, m2, n := c.Stats[0], c.m2[0], c.Rows
	for i, x := range cells {
		if x == x && (use == nil || use[i]) {
			n++
			s.see(x, 1/float64(n), &m2)
		}
	}
	c.Stats[0], c.m2[0], c.Rows = s, m2, n
}

func (c *fitting) addCategory(t []byte, memory int64) error {
	if _, ok := c.categories[string(t)]; ok {
		return nil
	}
	c.categories[string(t)] = struct{}{}
	if c.bytes += int64(len(t)) + categoryBytes; c.bytes > memory {
		return errs.Errorf("its categories take more than %s of memory, after %d of them; take transform %s, or give more with {memory}",
			units.FormatBytes(memory), len(c.categories), Hash)
	}
	if c.Transform == OneHot && len(c.categories) > maxSize {
		return errs.Errorf("there are more than %d categories; take transform %s or %s", maxSize, Hash,
			Ordinal)
	}
	return nil
}

// eachText calls fn with a cell's text, or the texts of its list. key is room for one.
func (s *Spec) eachText(key *[]byte, c *table.Column, i int, fn func([]byte) error) (err error) {
	if c.Kind != table.List {
		if *key, err = AppendText((*key)[:0], c, i); err != nil {
			return err
		}
		return fn(*key)
	}
	if s.Transform == Ordinal {
		return errs.Errorf("is a list, and %s is of one category; take %s or %s", Ordinal, OneHot, Hash)
	}
	for k := c.Offsets[i]; k < c.Offsets[i+1]; k++ {
		if s.missing(c.Values, k) {
			return errs.Errorf("value %d of the list is missing", k-c.Offsets[i])
		}
		if *key, err = AppendText((*key)[:0], c.Values, k); err == nil {
			err = fn(*key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Know takes what a Profiler has learned of numbers, and returns the columns that rows are needed
// for. The Profiler saw the rows in use.
func (f *Fitter) Know(p *Profiler, list func(column string) bool) (names []string) {
	for _, c := range f.cols {
		if c.Fixed(list(c.Column)) {
			continue
		}
		if k := p.numbersOf(c.Column); k != nil && c.plain() && c.All == k.All &&
			slices.Equal(c.NA, k.NA) {
			c.Rows, c.Stats, c.m2, c.known = k.Rows, slices.Clone(k.Stats), k.m2, true
		} else if !slices.Contains(names, c.Column) { // a column may be taken twice
			names = append(names, c.Column)
		}
	}
	return names
}

// Learned returns the columns.
func (f *Fitter) Learned() ([]Learned, error) {
	var all []Learned
	for _, c := range f.cols {
		if c.Rows == 0 && !c.Fixed(c.list) && c.Categories == nil {
			return nil, errs.New(errs.Usage,
				"column %s: no row that is learned from has a value; leave the column out, or learn from all rows with {stats-of} all",
				table.Brief(c.Column))
		}
		if c.categories != nil {
			c.Categories = sorted(slices.Collect(maps.Keys(c.categories)))
		}
		for k := range c.Stats {
			c.Stats[k].Std = math.Sqrt(c.m2[k] / float64(c.Rows))
		}
		all = append(all, c.Learned)
	}
	return all, nil
}

// sorted sorts categories: as numbers, where all are whole ones.
func sorted(categories []string) []string {
	number := make(map[string]int64, len(categories))
	for _, c := range categories {
		n, err := strconv.ParseInt(c, 10, 64)
		if err != nil || strconv.FormatInt(n, 10) != c {
			slices.Sort(categories)
			return categories
		}
		number[c] = n
	}
	slices.SortFunc(categories, func(a, b string) int { return cmp.Compare(number[a], number[b]) })
	return categories
}

// Sorted returns distinct texts in the order in which they become categories or classes.
func Sorted(texts map[string]int32) []string { return sorted(slices.Collect(maps.Keys(texts))) }

var errNoValue = errs.Errorf("has no value; choose what stands in its place: give {missing} mean, zero, indicator, category or a value")
