package columns

import (
	"cmp"
	"errors"
	"maps"
	"math"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sync/errgroup"

	"helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/units"
)

// A category that is held takes its bytes and so many more.
const categoryBytes = 64

// Fitter learns columns from rows. Parse reads cells, on any goroutine; Add takes them in the order
// of the rows, one after the other, so batches and threads change nothing.
type Fitter struct {
	cols   []*fitting
	memory int64 // for the categories of a column
}

// fitting is a column that is being learned.
type fitting struct {
	Learned
	m2         []float64 // sums of squared deviations, as Welford has them
	categories map[string]struct{}
	bytes      int64 // of the categories
}

// Parsed are the cells of a batch.
type Parsed struct {
	batch *table.Batch
	cols  []parsed
}

// parsed are the cells of a column: numbers, or texts without repeats and their places by row.
type parsed struct {
	has     []bool // the row has a value
	size    int    // numbers of a cell
	numbers []float64
	texts   []string
	codes   []int32
	ends    []int32 // of each row's codes
}

// NewFitter returns a Fitter of columns; categories take no more than so many bytes.
func NewFitter(specs []Spec, memory int64) (*Fitter, error) {
	f := &Fitter{memory: memory / int64(max(len(specs), 1))}
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

// Parse reads the cells of a batch.
func (f *Fitter) Parse(b *table.Batch) (*Parsed, error) {
	p := &Parsed{&table.Batch{File: b.File}, make([]parsed, len(f.cols))}
	return p, first(b, len(f.cols), func(i int) *Spec { return &f.cols[i].Spec },
		func(i int) *fault { return p.cols[i].parse(f.cols[i].Spec, f.cols[i].categories != nil, b) })
}

func (p *parsed) parse(s Spec, learned bool, b *table.Batch) *fault {
	col, err := find(b, s.Column)
	if err != nil {
		return &fault{-1, err}
	}
	p.has = make([]bool, b.Rows)
	place := map[string]int32{}
	var key []byte
	for i := range b.Rows {
		if p.has[i] = !s.missing(col, i); !p.has[i] && s.Missing == "" {
			return &fault{i, errNoValue}
		}
		switch {
		case !p.has[i]:
		case !s.texts():
			err = p.parseNumbers(&s, col, i)
		case learned:
			err = s.eachText(&key, col, i, func(t []byte) error {
				code, ok := place[string(t)]
				if !ok {
					code = int32(len(p.texts))
					p.texts = append(p.texts, string(t))
					place[p.texts[code]] = code
				}
				p.codes = append(p.codes, code)
				return nil
			})
		}
		if err != nil {
			return &fault{i, err}
		}
		p.ends = append(p.ends, int32(len(p.codes)))
	}
	return nil
}

func (p *parsed) parseNumbers(s *Spec, col *table.Column, i int) error {
	if s.Size == 0 && col.Kind == table.List { // the first row has the length of all vectors
		if s.Size = vectorSize(col, i); s.Size < 1 || s.Size > maxSize {
			return errs.Errorf("holds %d values; a vector has 1 to %d", s.Size, maxSize)
		}
	}
	p.size = s.numbers()
	if need := (i + 1) * p.size; need > cap(p.numbers) {
		p.numbers = slices.Grow(p.numbers, max(need, cap(p.has)*p.size)-len(p.numbers))
	}
	p.numbers = p.numbers[:(i+1)*p.size] // rows without a value have zeros
	return s.cell(p.numbers[i*p.size:], col, i)
}

// Add learns from the rows of a batch that use names; nil: from all.
func (f *Fitter) Add(p *Parsed, use []bool) error {
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	faults := make([]error, len(f.cols))
	for i, c := range f.cols {
		g.Go(func() error {
			faults[i] = c.add(&p.cols[i], use, f.memory)
			return nil
		})
	}
	_ = g.Wait()
	for i, err := range faults {
		if err != nil {
			return errs.New(errs.Usage, "%s, column %s: %w", p.batch.File, table.Brief(f.cols[i].Column), err)
		}
	}
	return nil
}

func (c *fitting) add(p *parsed, use []bool, memory int64) error {
	code := int32(0)
	for i, has := range p.has {
		codes := p.codes[code:p.ends[i]]
		code = p.ends[i]
		if !has || use != nil && !use[i] {
			continue
		}
		c.Rows++
		if p.size > 0 {
			if err := c.addNumbers(p.numbers[i*p.size:][:p.size]); err != nil {
				return err
			}
		}
		for _, k := range codes {
			if err := c.addCategory(p.texts[k], memory); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *fitting) addNumbers(cell []float64) error {
	if c.Stats == nil {
		n := len(cell)
		c.m2, c.Stats = make([]float64, n), make([]Stat, n)
		for k := range c.Stats {
			c.Stats[k].Min, c.Stats[k].Max = math.Inf(1), math.Inf(-1)
		}
		if len(c.Parts) == 0 && n > 1 {
			c.Size = n
		}
	}
	if len(cell) != len(c.Stats) {
		return errs.Errorf("some rows have vectors of %d numbers, others of %d", len(c.Stats), len(cell))
	}
	inverse := 1 / float64(c.Rows)
	for k, x := range cell {
		s := &c.Stats[k]
		d := x - s.Mean
		s.Mean += float64(d * inverse)
		c.m2[k] += float64(d * (x - s.Mean))
		s.Min, s.Max = min(s.Min, x), max(s.Max, x)
	}
	return nil
}

func (c *fitting) addCategory(t string, memory int64) error {
	if _, ok := c.categories[t]; ok {
		return nil
	}
	c.categories[t] = struct{}{}
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

// Learned returns the columns.
func (f *Fitter) Learned() ([]Learned, error) {
	var all []Learned
	for _, c := range f.cols {
		if c.Rows == 0 && !c.is(Hash, Bag) && c.Categories == nil {
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

var errNoValue = errors.New("has no value; choose what stands in its place: give {missing} mean, zero, indicator, category or a value")
