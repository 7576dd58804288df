package columns

import (
	"bytes"
	"math"
	"slices"
	"sync/atomic"

	"helios/dataset/table"
	"helios/internal/errs"
	"helios/internal/work"
)

// mostOneHot bounds the categories that a column gets features for unasked.
const mostOneHot = 100

// Profile describes the cells of a column.
type Profile struct {
	Column  string
	Rows    int64
	Missing int64
	// FirstMissing names the first row without a value.
	FirstMissing string
	// Values are the texts that cells have, up to mostOneHot + 1 of them; nil: of lists.
	Values map[string]bool

	no    [3]bool // looks that a cell has ruled out
	time  bool
	lists bool
	size  int // of lists; -1: they differ
}

// Looks of texts.
const (
	lookNumber = iota
	lookBool
	lookDate
)

// Profiler looks at the columns of a table, and learns those that are numbers as a Fitter would.
type Profiler struct {
	Profiles []*Profile
	specs    []Spec
	many     []atomic.Bool // columns have more texts than are held
	fits     []*fitting
	no       []atomic.Bool // the column is not of numbers
	room     work.Spare[*Cells]
}

// NewProfiler returns a Profiler of columns; na are texts that stand for no value. Numbers are
// learned of all rows, or of those in use.
func NewProfiler(names, na []string, all bool) *Profiler {
	p := &Profiler{many: make([]atomic.Bool, len(names)), no: make([]atomic.Bool, len(names)),
		room: work.NewSpare[*Cells](spareCells)}
	for _, name := range names {
		p.Profiles = append(p.Profiles, &Profile{Column: name, Values: map[string]bool{}})
		s := Spec{Column: name, Transform: Standard, Missing: Zero, NA: na, All: all}
		p.specs, p.fits = append(p.specs, s), append(p.fits, &fitting{Learned: Learned{Spec: s}})
	}
	return p
}

// numbersOf returns what was learned of a column of numbers; nil: nothing, or it has others.
func (p *Profiler) numbersOf(column string) *fitting {
	if p == nil {
		return nil
	}
	i := slices.IndexFunc(p.specs, func(s Spec) bool { return s.Column == column })
	if i < 0 || p.no[i].Load() || p.fits[i].Stats == nil {
		return nil
	}
	return p.fits[i]
}

// Part is a batch as a Profiler has read it.
type Part struct {
	cells *Cells
	looks []*Profile
}

// Read looks at the rows of a batch, which has the columns in their order. Several goroutines may
// call it.
func (p *Profiler) Read(b *table.Batch) (*Part, error) {
	x := &Part{cells: newCells(b, len(b.Columns), p.room)}
	return x, first(b, len(b.Columns), func(i int) *Spec { return &p.specs[i] },
		func(i int) *fault {
			c := &b.Columns[i]
			look := &Profile{Column: c.Name}
			if x.looks = append(x.looks, look); !p.many[i].Load() {
				look.Values = map[string]bool{}
			}
			var cells []float64
			if !p.no[i].Load() {
				cells = x.cells.column(i)
			}
			numbers, f := look.add(&p.specs[i], b, c, cells)
			if !numbers {
				x.cells.of[i] = nil
			}
			return f
		})
}

// Add takes what Read has read, in the order of the rows. use names those in use; nil: all are.
func (p *Profiler) Add(x *Part, use []bool) {
	for i, look := range x.looks {
		all := p.Profiles[i]
		if all.Merge(look); len(all.Values) > mostOneHot {
			p.many[i].Store(true)
		}
		switch cells := x.cells.of[i]; {
		case p.no[i].Load():
		case cells == nil:
			p.no[i].Store(true)
		default:
			p.fits[i].learn(cells, use)
		}
	}
	p.room.Give(x.cells)
}

// Merge adds the profile of the column's next rows.
func (p *Profile) Merge(next *Profile) {
	p.Rows += next.Rows
	if p.Missing == 0 {
		p.FirstMissing = next.FirstMissing
	}
	p.Missing += next.Missing
	for i := range p.no {
		p.no[i] = p.no[i] || next.no[i]
	}
	p.time = p.time || next.time
	switch {
	case next.lists && !p.lists:
		p.size = next.size
	case next.lists && p.size != next.size:
		p.size = -1
	}
	if p.lists = p.lists || next.lists; p.lists {
		p.Values = nil
		return
	}
	for t := range next.Values {
		if len(p.Values) <= mostOneHot {
			p.Values[t] = true
		}
	}
}

// add looks at a column, and gives its numbers where it holds nothing else and cells is not nil.
func (p *Profile) add(s *Spec, b *table.Batch, c *table.Column, cells []float64) (numbers bool,
	f *fault) {
	numbers = cells != nil && s.oneNumber(c)
	if numbers && c.Kind != table.Text && c.Kind != table.Bool && s.numbersOf(cells, c, 0) == nil {
		p.addNumbers(b, c.Kind, cells)
		return true, nil
	}
	var key []byte
	quick := c.Kind == table.Text && len(s.NA) == 0 && p.Values == nil
	for i := range b.Rows {
		p.Rows++
		if quick && numbers {
			if x, ok := shortNumber(c.Text(i)); ok {
				cells[i], p.no[lookBool], p.no[lookDate] = x, true, true
				continue
			}
		}
		if s.missing(c, i) {
			if p.Missing++; p.Missing == 1 {
				p.FirstMissing = b.Where(i)
			}
			if numbers {
				cells[i] = math.NaN()
			}
			continue
		}
		if numbers {
			numbers = s.cell(cells[i:i+1], c, i) == nil
		}
		if c.Kind == table.List {
			p.seeList(c, i)
			continue
		}
		if c.Kind == table.Float || c.Kind == table.Int || c.Kind == table.Uint {
			p.look(c.Kind, nil)
			continue
		}
		var err error
		if key, err = AppendText(key[:0], c, i); err != nil {
			return false, &fault{i, err}
		}
		if p.Values != nil && len(p.Values) <= mostOneHot && !p.Values[string(key)] {
			p.Values[string(key)] = true
		}
		p.look(c.Kind, key)
	}
	return numbers, nil
}

// addNumbers is add of numbers, whose texts matter to nobody.
func (p *Profile) addNumbers(b *table.Batch, kind table.Kind, cells []float64) {
	p.Rows += int64(len(cells))
	for i, x := range cells {
		if x != x {
			if p.Missing++; p.Missing == 1 {
				p.FirstMissing = b.Where(i)
			}
		}
	}
	if p.Missing < p.Rows {
		p.look(kind, nil)
	}
}

func (p *Profile) seeList(c *table.Column, i int) {
	n := vectorSize(c, i)
	switch {
	case !p.lists:
		p.size = n
	case p.size != n:
		p.size = -1
	}
	p.lists, p.Values = true, nil
	if c.Values.Kind == table.Text || c.Values.Kind == table.Time || c.Values.Kind == table.List {
		p.no[lookNumber] = true
	}
}

// look rules out what a cell does not look like.
func (p *Profile) look(kind table.Kind, t []byte) {
	switch kind {
	case table.Time:
		p.time = true
		p.no[lookNumber], p.no[lookBool] = true, true
		return
	case table.Bool:
		p.no[lookNumber], p.no[lookDate] = true, true
		return
	case table.Text:
	default:
		p.no[lookBool], p.no[lookDate] = true, true
		return
	}
	if !p.no[lookNumber] {
		_, err := parseNumber(t)
		p.no[lookNumber] = err != nil
	}
	if !p.no[lookBool] {
		p.no[lookBool] = !bytes.EqualFold(t, []byte("true")) && !bytes.EqualFold(t, []byte("false"))
	}
	if !p.no[lookDate] {
		_, err := ParseTime(t)
		p.no[lookDate] = err != nil
	}
}

// Numbers reports whether all cells with a value are numbers.
func (p *Profile) Numbers() bool { return !p.lists && !p.no[lookNumber] && p.Rows > p.Missing }

// Words reports whether the cells are few different texts, each of two rows or more on average.
func (p *Profile) Words() bool {
	return p.Values != nil && len(p.Values) <= mostOneHot && len(p.Values) > 0 &&
		2*int64(len(p.Values)) <= p.Rows-p.Missing
}

// Suggest returns the usual transform of a column, or why there is none.
func (p *Profile) Suggest() (Spec, error) {
	s := Spec{Column: p.Column}
	switch {
	case p.Rows == p.Missing:
		return s, errs.Errorf("no row has a value")
	case p.lists && !p.no[lookNumber] && p.size > 0:
		s.Transform, s.Size = Standard, p.size
	case p.lists:
		return s, errs.Errorf("lists of texts or of different lengths")
	case !p.no[lookNumber]:
		s.Transform = Standard
	case !p.no[lookBool]:
		s.Transform = Boolean
	case p.time || !p.no[lookDate]:
		s.Transform = Date
	case p.Words():
		s.Transform, s.Unknown = OneHot, Zero
	default:
		return s, errs.Errorf("%s different texts", many(len(p.Values)))
	}
	return s, nil
}

func many(n int) string {
	if n > mostOneHot {
		return "over 100"
	}
	return errs.Textf("%d", n).String()
}
