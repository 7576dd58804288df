package htmlreport

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Kinds of figures. The page's script has a function for each.
const (
	kindLines  = "lines"  // y over x, a line for each series
	kindStacks = "stacks" // a bar for each name, of parts behind each other
	kindMatrix = "matrix" // a row for each name, of parts that are cells of one sum
	kindSpans  = "spans"  // a bar for each name, with whiskers from the least to the most
)

// figure is one chart: what the script draws, and what its table of values says.
type figure struct {
	Kind   string   `json:"kind"`
	Title  string   `json:"title"`
	Note   string   `json:"note,omitempty"`
	X      axis     `json:"x"`
	Y      axis     `json:"y"`
	Series []series `json:"series,omitempty"`
	Bars   []bar    `json:"bars,omitempty"`
	// Hues are the parts' colours.
	Hues map[string]int `json:"hues,omitempty"`
}

// axis is a figure's: of bars only X, the values.
type axis struct {
	Label string `json:"label"` // with its unit
	Log   bool   `json:"log,omitempty"`
	Whole bool   `json:"whole,omitempty"` // only whole numbers are marked
	Share bool   `json:"share,omitempty"` // 0 to 1, told in percent
}

// series is a line of a figure. A limit is drawn as a bound, not as a result.
type series struct {
	Name   string  `json:"name"`
	Limit  bool    `json:"limit,omitempty"`
	Marks  bool    `json:"marks,omitempty"` // without a line
	Hue    int     `json:"hue"`             // its colour and symbol
	Dash   int     `json:"dash"`
	Points []point `json:"points"`
}

// point is a value with the least and the most of the runs that it stands for.
type point struct {
	X  float64 `json:"x"`
	Y  float64 `json:"y"`
	Lo float64 `json:"lo"`
	Hi float64 `json:"hi"`
}

func single(x, y float64) point { return point{x, y, y, y} }

// bar is one of a figure's, with its parts or its value and whiskers.
type bar struct {
	Name  string  `json:"name"`
	Parts []part  `json:"parts,omitempty"`
	Value float64 `json:"value,omitempty"`
	Lo    float64 `json:"lo,omitempty"`
	Hi    float64 `json:"hi,omitempty"`
	// Limit is the best that is possible; 0 where nobody knows.
	Limit float64 `json:"limit,omitempty"`
}

type part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// hues are the numbers of the colours of a figure's parts: a stage has one in all figures. Lines
// that have no colours and dashes get them.
func (f *figure) hues() map[string]int {
	if !slices.ContainsFunc(f.Series, func(s series) bool { return s.Hue+s.Dash > 0 }) {
		n := map[bool]int{}
		for i := range f.Series {
			s := &f.Series[i]
			k := n[s.Limit]
			s.Hue, s.Dash, n[s.Limit] = k, k+k/8, k+1
		}
	}
	hues, taken := map[string]int{}, map[int]bool{}
	each := func(of func(name string)) {
		for _, b := range f.Bars {
			for _, p := range b.Parts {
				of(p.Name)
			}
		}
	}
	each(func(name string) {
		if i := slices.Index(stageNames, name); i >= 0 {
			hues[name], taken[i] = i, true
		}
	})
	each(func(name string) {
		if _, has := hues[name]; has {
			return
		}
		i := 0
		for taken[i] {
			i++
		}
		hues[name], taken[i] = i, true
	})
	return hues
}

// scales are the units of axes, from small to large, in each of which a label may be given.
var scales = [][]part{
	{{"µs", 1}, {"ms", 1e3}, {"s", 1e6}},
	{{"ms", 1e-3}, {"seconds", 1}, {"hours", 3600}},
	{{"KiB", 1}, {"MiB", 1 << 10}, {"GiB", 1 << 20}, {"TiB", 1 << 30}},
	{{"reads/s", 1}, {"thousand reads/s", 1e3}, {"million reads/s", 1e6}},
	{{"KiB/s", 1}, {"MiB/s", 1 << 10}, {"GiB/s", 1 << 20}},
}

// rescale gives an axis the unit in which its largest value is a number that people read easily.
// It returns the factor of its values.
func (a *axis) rescale(largest float64) float64 {
	for _, units := range scales {
		for _, was := range units {
			before, ok := strings.CutSuffix(a.Label, was.Name)
			if !ok || before != "" && !strings.HasSuffix(before, ", ") || was.Name == "ms" {
				continue
			}
			to := units[0]
			for _, u := range units {
				if largest*was.Value >= u.Value {
					to = u
				}
			}
			a.Label = before + to.Name
			return was.Value / to.Value
		}
	}
	return 1
}

// rescale gives the axes the units that people read easily.
func (f *figure) rescale() {
	var x, y float64
	for _, s := range f.Series {
		for _, p := range s.Points {
			x, y = max(x, p.X), max(y, p.Hi)
		}
	}
	for _, b := range f.Bars {
		whole := max(b.Hi, b.Limit)
		for _, p := range b.Parts {
			whole += p.Value
		}
		x = max(x, whole)
	}
	x, y = f.X.rescale(x), f.Y.rescale(y)
	for _, s := range f.Series {
		for i, p := range s.Points {
			s.Points[i] = point{p.X * x, p.Y * y, p.Lo * y, p.Hi * y}
		}
	}
	for i := range f.Bars {
		b := &f.Bars[i]
		b.Value, b.Lo, b.Hi, b.Limit = b.Value*x, b.Lo*x, b.Hi*x, b.Limit*x
		for j := range b.Parts {
			b.Parts[j].Value *= x
		}
	}
}

// table is text in rows.
type table struct {
	Title string
	// Folded: shown only when it is asked for.
	Folded bool
	Head   []string
	Rows   [][]string
}

// empty tells that there is nothing to draw.
func (f *figure) empty() bool {
	return len(f.Series) == 0 && !slices.ContainsFunc(f.Bars, func(b bar) bool {
		return f.Kind == kindSpans || len(b.Parts) > 0
	})
}

// values is a figure's table: the same figures for people who do not see the drawing.
func (f *figure) values() table {
	switch f.Kind {
	case kindLines:
		return f.lineValues()
	case kindStacks, kindMatrix:
		return f.stackValues()
	}
	t := table{Head: []string{"", f.X.Label}}
	spans := slices.ContainsFunc(f.Bars, func(b bar) bool { return b.Lo != b.Hi })
	if spans {
		t.Head = append(t.Head, "least", "most")
	}
	limits := slices.ContainsFunc(f.Bars, func(b bar) bool { return b.Limit > 0 })
	if limits {
		t.Head = append(t.Head, "limit")
	}
	for _, b := range f.Bars {
		row := []string{b.Name, f.X.text(b.Value)}
		if spans {
			row = append(row, f.X.text(b.Lo), f.X.text(b.Hi))
		}
		switch {
		case b.Limit > 0:
			row = append(row, f.X.text(b.Limit))
		case limits:
			row = append(row, "–")
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// lineValues has a row for each x and a column for each series.
func (f *figure) lineValues() table {
	t := table{Head: []string{f.X.Label}}
	rowOf := map[float64]int{}
	for i, s := range f.Series {
		t.Head = append(t.Head, s.Name)
		for _, p := range s.Points {
			row, ok := rowOf[p.X]
			if !ok {
				row = len(t.Rows)
				rowOf[p.X] = row
				t.Rows = append(t.Rows, append([]string{f.X.text(p.X)},
					make([]string, len(f.Series))...))
			}
			text := f.Y.text(p.Y)
			if p.Lo != p.Hi {
				text += fmt.Sprintf(" (%s–%s)", f.Y.text(p.Lo), f.Y.text(p.Hi))
			}
			t.Rows[row][i+1] = text
		}
	}
	return t
}

func (f *figure) stackValues() table {
	t := table{Head: []string{""}}
	column := map[string]int{}
	for _, b := range f.Bars {
		for _, p := range b.Parts {
			if _, ok := column[p.Name]; !ok {
				column[p.Name] = len(t.Head)
				t.Head = append(t.Head, p.Name)
			}
		}
	}
	for _, b := range f.Bars {
		row := append([]string{b.Name}, make([]string, len(t.Head)-1)...)
		for _, p := range b.Parts {
			row[column[p.Name]] = f.X.text(p.Value)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// text is a value of an axis for people.
func (a axis) text(v float64) string {
	switch {
	case a.Share:
		return strconv.FormatFloat(100*v, 'f', 1, 64) + " %"
	case v == math.Trunc(v) && math.Abs(v) < 1e6:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return decimal(v)
}
