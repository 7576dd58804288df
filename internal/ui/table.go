package ui

import (
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/sys/unix"
)

// Column is a column of a table for people.
type Column struct {
	Name  string
	About string // for help: what its figures are
	Shown Shown
}

// Shown says when a column is shown.
type Shown int

// Unless all are asked for, some columns stay out, so that the others fit a terminal of 80 columns.
const (
	Always   Shown = iota
	IfVaries       // where its cells differ, as those of a sweep's parameter
	IfAny          // where one of its cells has something: not "", "-", "–" or "0"
	OnlyWide
)

// Explain describes columns for a verb's help, a line each; mark stands behind those that are only
// shown on demand.
func Explain(columns []Column, mark string) string {
	widest := 0
	for _, c := range columns {
		widest = max(widest, text.StringWidth(c.Name))
	}
	var b strings.Builder
	for _, c := range columns {
		b.WriteString("  " + text.Pad(c.Name, widest+2, ' ') + c.About)
		if c.Shown == OnlyWide {
			b.WriteString(" " + mark)
		}
		b.WriteString("\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

// HasWide reports whether a table has columns that --wide adds.
func HasWide(columns []Column) bool {
	return slices.ContainsFunc(columns, func(c Column) bool { return c.Shown != Always })
}

// Columns writes rows with a cell for each of columns, of which it shows those that are due. With
// JSON it writes nothing.
func (u *UI) Columns(columns []Column, rows [][]string) {
	var header []string
	shown := make([][]string, len(rows))
	for i, c := range columns {
		if !u.Wide && !c.due(i, rows) {
			continue
		}
		header = append(header, c.Name)
		for k, r := range rows {
			shown[k] = append(shown[k], r[i])
		}
	}
	u.Table(header, shown)
}

func (c Column) due(i int, rows [][]string) bool {
	switch c.Shown {
	case IfVaries:
		return slices.ContainsFunc(rows, func(r []string) bool { return r[i] != rows[0][i] })
	case IfAny:
		return slices.ContainsFunc(rows, func(r []string) bool {
			return !slices.Contains([]string{"", "-", "–", "0"}, r[i])
		})
	}
	return c.Shown == Always
}

// Table writes rows under a header, in columns; with JSON it writes nothing. On a terminal that is
// too narrow the widest cells take several lines.
func (u *UI) Table(header []string, rows [][]string) {
	if u.JSON || len(header) == 0 {
		return
	}
	u.write([]byte(layOut(header, rows, u.width)))
}

// Facts writes a name and what there is to say of it in each line.
func (u *UI) Facts(rows [][]string) {
	if u.JSON || len(rows) == 0 {
		return
	}
	u.write([]byte(layOut(nil, rows, u.width)))
}

// figure matches cells that are lined up on their right: a number, and what it counts.
var figure = regexp.MustCompile(`^[\d.]+( ?[\p{L}%][\p{L}%/]{0,7})?$`)

// layOut draws a table; a width of 0 has room for everything.
func layOut(header []string, rows [][]string, width int) string {
	t := table.NewWriter()
	style := table.StyleDefault
	style.Box = table.BoxStyle{PaddingRight: "  "}
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format = table.FormatOptions{}
	t.SetStyle(style)
	t.SuppressTrailingSpaces()
	cells := make([][]string, 0, len(rows)+1)
	if header != nil {
		cells = append(cells, header)
	}
	for _, r := range rows {
		clean := make([]string, len(r))
		for i, c := range r {
			clean[i] = bound(Text(c), maxCell)
		}
		cells = append(cells, clean)
	}
	widths := fit(cells, width)
	configs := make([]table.ColumnConfig, len(widths))
	for i, w := range widths {
		configs[i] = table.ColumnConfig{Number: i + 1, WidthMax: w,
			WidthMaxEnforcer: text.WrapSoft}
		if header != nil && i > 0 && figures(rows, i) {
			configs[i].Align, configs[i].AlignHeader = text.AlignRight, text.AlignRight
		}
	}
	t.SetColumnConfigs(configs)
	for i, r := range cells {
		row := make(table.Row, len(r))
		for k, c := range r {
			row[k] = c
		}
		if i == 0 && header != nil {
			t.AppendHeader(row)
		} else {
			t.AppendRow(row)
		}
	}
	lines := strings.Split(t.Render(), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n") + "\n"
}

// figures reports whether a column holds numbers, and nothing else but dashes.
func figures(rows [][]string, column int) bool {
	some := false
	for _, r := range rows {
		if column >= len(r) || slices.Contains([]string{"", "-", "–"}, r[column]) {
			continue
		}
		if !figure.MatchString(r[column]) {
			return false
		}
		some = true
	}
	return some
}

// gap is between columns, and narrowest the least that a column is narrowed to.
const gap, narrowest = 2, 12

// fit returns the widths of columns: what their cells take, and where that is more than a
// terminal's width the widest as much less as it needs.
func fit(cells [][]string, width int) []int {
	var widths []int
	for _, r := range cells {
		for i, c := range r {
			if i == len(widths) {
				widths = append(widths, 1)
			}
			widths[i] = max(widths[i], text.StringWidth(c))
		}
	}
	all := gap * (len(widths) - 1)
	for _, w := range widths {
		all += w
	}
	for width > 0 && all > width {
		widest := 0
		for i, w := range widths {
			if w > widths[widest] {
				widest = i
			}
		}
		if widths[widest] <= narrowest {
			break
		}
		widths[widest]--
		all--
	}
	return widths
}

// fold breaks a line between words where a terminal's edge would break it anywhere.
func fold(line string, width int) string {
	if width <= 0 || text.StringWidth(line) <= width {
		return line
	}
	lines := strings.Split(text.WrapSoft(line, width), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n")
}

// terminalWidth returns the columns of the terminal w; 0 where it is none, or does not tell.
func terminalWidth(w any) int {
	f, is := w.(*os.File)
	if !is {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
