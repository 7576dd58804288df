package columns

import (
	"bytes"

	"helios/dataset/table"
	"helios/internal/errs"
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

// ProfileOf looks at the rows of a batch; na are texts that stand for no value.
func ProfileOf(b *table.Batch, na []string) ([]*Profile, error) {
	all := make([]*Profile, len(b.Columns))
	specs := make([]Spec, len(all))
	return all, first(b, len(all), func(i int) *Spec { return &specs[i] }, func(i int) *fault {
		c := &b.Columns[i]
		specs[i] = Spec{Column: c.Name, NA: na}
		all[i] = &Profile{Column: c.Name, Values: map[string]bool{}}
		return all[i].add(&specs[i], b, c)
	})
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

func (p *Profile) add(s *Spec, b *table.Batch, c *table.Column) *fault {
	var key []byte
	for i := range b.Rows {
		p.Rows++
		if s.missing(c, i) {
			if p.Missing++; p.Missing == 1 {
				p.FirstMissing = b.Where(i)
			}
			continue
		}
		if c.Kind == table.List {
			p.seeList(c, i)
			continue
		}
		if c.Kind == table.Float || c.Kind == table.Int || c.Kind == table.Uint {
			p.look(c.Kind, nil) // its texts matter to nobody
			continue
		}
		var err error
		if key, err = AppendText(key[:0], c, i); err != nil {
			return &fault{i, err}
		}
		if len(p.Values) <= mostOneHot && !p.Values[string(key)] {
			p.Values[string(key)] = true
		}
		p.look(c.Kind, key)
	}
	return nil
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
