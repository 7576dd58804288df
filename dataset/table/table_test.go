package table

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func write(t *testing.T, name, content string) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

// show is a column's cells as text, "-" for a missing one.
func (c *Column) show(i int) string {
	if c.IsMissing(i) {
		return "-"
	}
	switch c.Kind {
	case Text:
		return string(c.Text(i))
	case Float:
		return fmt.Sprint(c.Floats[i])
	case Uint:
		return fmt.Sprint(uint64(c.Ints[i]))
	case List:
		var out []string
		for k := c.Offsets[i]; k < c.Offsets[i+1]; k++ {
			out = append(out, c.Values.show(k))
		}
		return "[" + strings.Join(out, " ") + "]"
	}
	return fmt.Sprint(c.Ints[i])
}

// rowsOf reads all rows as text.
func rowsOf(s *Source) (rows []string, err error) {
	err = Each(context.Background(), s, func(b *Batch) (out []string, err error) {
		for i := range b.Rows {
			var cells []string
			for k := range b.Columns {
				cells = append(cells, b.Columns[k].show(i))
			}
			out = append(out, strings.Join(cells, "|"))
		}
		return out, nil
	}, func(out []string) error {
		rows = append(rows, out...)
		return nil
	})
	return rows, err
}

func read(t *testing.T, o Options, path ...string) ([]string, error) {
	s, err := Open(path, o)
	if err != nil {
		return nil, err
	}
	return rowsOf(s)
}

func TestText(t *testing.T) {
	for name, c := range map[string]struct {
		text, header string
		columns      []string
		want         []string
		say          string
	}{
		"plain":     {text: "id,x\na,1\nb,2\n", want: []string{"a|1", "b|2"}},
		"no end":    {text: "id,x\na,1\nb,2", want: []string{"a|1", "b|2"}},
		"crlf":      {text: "id,x\r\na,1\r\nb,2\r\n\r\n", want: []string{"a|1", "b|2"}},
		"mark":      {text: "\xef\xbb\xbfid,x\na,1\n", want: []string{"a|1"}, columns: []string{"id", "x"}},
		"tabs":      {text: "id\tx\na b\t\n", want: []string{"a b|-"}},
		"semicolon": {text: "id;x\na;1,5\n", want: []string{"a|1,5"}},
		"blanks":    {text: "id   x\na \t 1 \n", want: []string{"a|1"}},
		"quotes":    {text: "\"i,d\",x\n\"a\"\"b\",\"1\n2\"\nc,\n", want: []string{"a\"b|1\n2", "c|-"}},
		"ldbc":      {text: "P.id|P.id|P.id.1|x\n1|2|3|a;b c\n", columns: []string{"P.id", "P.id.1", "P.id.1.1", "x"}, want: []string{"1|2|3|a;b c"}},
		"empties":   {text: "a,b,c\n,,\n,\"\",\n", want: []string{"-|-|-", "-|-|-"}},
		"chosen":    {text: "a,b,c\n1,2,3\n", columns: []string{"c", "a"}, want: []string{"3|1"}},
		"one":       {text: "a\nx\n\ny\n", want: []string{"x", "-", "y"}},
		"snap":      {text: "# Nodes: 3\n# From To\n1 2\n3 1\n", columns: []string{"To"}, want: []string{"2", "1"}},
		"no header": {text: "1,2\n3,4\n", header: "no", columns: []string{"2"}, want: []string{"2", "4"}},
		"numbers":   {text: "0,1\n3,4\n", header: "yes", columns: []string{"1"}, want: []string{"4"}},

		"numbers first": {text: "0,1\n3,4\n", say: ":1: the line should name the columns"},
		"ragged":        {text: "a,b\n1,2\n1\n", say: ":3: 1 cells, and 2 columns are named"},
		"other":         {text: "a\tb\n1,2\n", say: ":2: 1 cells, and 2 columns are named; by the first line, columns are separated by tabs"},
		"empty line":    {text: "a,b\n1,2\n\n3,4\n", say: ":3: the line is empty"},
		"bare quote":    {text: "a,b\n5\" tall,2\n", say: ":2: a quote within a cell"},
		"after quote":   {text: "a,b\n\"5\"x,2\n", say: ":2: text behind a quoted cell"},
		"open quote":    {text: "a,b\n1,2\n\"5,2\n3,4\n", say: ":3: a quoted cell does not end"},
		"no utf-8":      {text: "a,b\n1,\xff\xfe\n", say: `:2: column b: \xff\xfe is no UTF-8`},
		"no column":     {text: "a,b\n1,2\n", columns: []string{"c"}, say: `has no column "c"; it has a (text), b (text)`},
		"nothing":       {text: "", say: "is empty"},

		"json": {text: "{\"a\":1,\"b\":\"x\"}\n\n{\"b\":null,\"c\":[1,2.5]}\n",
			want: []string{"1|x|-", "-|-|[1 2.5]"}},
		"json strings": {text: "{\"a\":\"\\u00e9\\n\"}\n{\"a\":true}\n", want: []string{"é\n", "true"}},
		"json cut":     {text: "{\"a\":1}\n{\"a\":\n", say: ":2: "},
		"json nested":  {text: "{\"a\":{}}\n", say: ":1: member a: an object within an object"},
		"json mixed":   {text: "{\"a\":[1]}\n{\"a\":1}\n", say: ":2: member a: some lines have an array"},
		"json twice":   {text: "{\"a\":1,\"a\":2}\n", say: ":1: member a: stands twice"},
	} {
		got, err := read(t, Options{Header: c.header, Columns: c.columns}, write(t, "t.csv", c.text))
		if c.say != "" {
			require.ErrorContains(t, err, c.say, name)
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, c.want, got, name)
	}
}

// Rows go over the borders of blocks whole, with their lines.
func TestTextBlocks(t *testing.T) {
	var b strings.Builder
	b.WriteString("id,text\n")
	want := []string{}
	for i := range 120_000 {
		cell := fmt.Sprintf("%d-%s", i, strings.Repeat("x", i%37))
		if i%5 == 0 {
			fmt.Fprintf(&b, "%d,\"%s\n\"\"\"\n", i, cell)
			cell += "\n\""
		} else {
			fmt.Fprintf(&b, "%d,%s\n", i, cell)
		}
		want = append(want, fmt.Sprintf("%d|%s", i, cell))
	}
	got, err := read(t, Options{}, write(t, "t.csv", b.String()))
	require.NoError(t, err)
	require.Equal(t, want, got)
	b.WriteString("a,b,c\n")
	_, err = read(t, Options{}, write(t, "t.csv", b.String()))
	require.ErrorContains(t, err, fmt.Sprintf(":%d: 3 cells", 120_000+24_000+2))
}

func TestParts(t *testing.T) {
	dir := t.TempDir()
	for i, name := range []string{"part-2.csv", "part-10.csv", "part-1.csv", "_SUCCESS", ".x.crc"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, "id\n%d\n", i), 0o644))
	}
	want := []string{"2", "0", "1"}
	for _, p := range []string{dir, filepath.Join(dir, "part-*.csv"), filepath.Join(dir, "part-?*")} {
		got, err := read(t, Options{}, p)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "part-3.csv"), []byte("ID\n1\n"), 0o644))
	_, err := read(t, Options{}, dir)
	require.ErrorContains(t, err, "part-1.csv has the columns id (text), "+dir+"/part-3.csv has ID (text)")
	_, err = read(t, Options{}, filepath.Join(dir, "q*"))
	require.ErrorContains(t, err, "no file has such a name")
}

// TestRowsAreSplit compares the rows of random texts with those of records that are cut one by one.
func TestRowsAreSplit(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pieces := []string{"a", "bc", ",", ",", ",", "\n", "\n", "\r\n", "\r", `"`, `""`, `"x"`, `,"",`, "é",
		`"a,b"`, "\"c\nd\"", `"e""f"`, "twelve bytes", "\xff"}
	errors := map[string]int{}
	for range 30_000 {
		f := &textFile{path: "x", sep: ','}
		for i := range 1 + rng.IntN(3) {
			f.names = append(f.names, Field{Name: strconv.Itoa(i)})
		}
		text := ""
		for range rng.IntN(14) {
			text += pieces[rng.IntN(len(pieces))]
		}
		take := rng.Perm(len(f.names))[:1+rng.IntN(len(f.names))]
		take = append(take, take[0])
		end := rng.IntN(2) == 0
		want, wantErr := splitRows(f, []byte(text), take, end)
		b := &Batch{Line: 1}
		err := f.parse(b, []byte(text), take, end, &textRoom{})
		if wantErr != nil {
			require.EqualError(t, err, wantErr.Error(), "%q", text)
			errors[err.Error()[4:12]]++
			continue
		}
		require.NoError(t, err, "%q", text)
		var got []string
		for i := range b.Rows {
			for k := range b.Columns {
				c := &b.Columns[k]
				require.Equal(t, len(c.Text(i)) == 0, c.IsMissing(i), "%q", text)
				got = append(got, string(c.Text(i)))
			}
			got = append(got, b.Where(i))
		}
		require.Equal(t, want, got, "%q", text)
	}
	require.Greater(t, len(errors), 5)
}

// splitRows returns the cells that are taken, and the place of each row.
func splitRows(f *textFile, text []byte, take []int, end bool) (all []string, err error) {
	b := &Batch{Line: 1}
	for line := int64(1); len(text) > 0; {
		n := endOfRecord(text)
		if n < 0 {
			n = len(text)
		}
		record, rest := bytes.Clone(text[:n]), text[min(n+1, len(text)):]
		lines := 1 + int64(bytes.Count(record, []byte{'\n'}))
		record = bytes.TrimSuffix(record, []byte{'\r'})
		if len(record) == 0 && len(f.names) > 1 {
			if !end || len(bytes.TrimSpace(rest)) > 0 {
				return nil, f.bad(line, "the line is empty")
			}
			break
		}
		cells, err := f.split(bytes.Clone(record), nil)
		if err != nil {
			return nil, f.bad(line, "%w", err)
		}
		if len(cells) != len(f.names) {
			return nil, f.bad(line, "%s", f.ragged(record, len(cells)))
		}
		for _, k := range take {
			all = append(all, string(cells[k].text))
			if !utf8.Valid(cells[k].text) {
				return nil, f.bad(line, "column %s: %s is no UTF-8; write the file again in UTF-8",
					f.names[k].Name, Brief(cells[k].text))
			}
		}
		b.Line = line
		all = append(all, b.Where(0))
		line, text = line+lines, rest
	}
	return all, nil
}

// TestRunsInPieces reads numbers of all widths piece by piece.
func TestRunsInPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for width := uint(0); width <= 32; width++ {
		var b []byte
		var want []uint32
		for range 20 {
			value := uint32(rng.Uint64() & (1<<width - 1))
			if rng.IntN(2) == 0 {
				n := 1 + rng.IntN(30)
				b = binary.AppendUvarint(b, uint64(n)<<1)
				b = append(b, binary.LittleEndian.AppendUint32(nil, value)[:(width+7)/8]...)
				want = append(want, slices.Repeat([]uint32{value}, n)...)
				continue
			}
			groups := 1 + rng.IntN(4)
			b = binary.AppendUvarint(b, uint64(groups)<<1|1)
			bits := make([]byte, groups*int(width))
			for i := range 8 * groups {
				v := uint32(rng.Uint64() & (1<<width - 1))
				want = append(want, v)
				for k := range int(width) {
					bits[(i*int(width)+k)/8] |= byte(v>>k&1) << ((i*int(width) + k) % 8)
				}
			}
			b = append(b, bits...)
		}
		r := &runs{b: b, width: width, left: len(want)}
		var got []uint32
		for r.left > 0 {
			var err error
			got, err = r.next(got, min(1+rng.IntN(20), r.left))
			require.NoError(t, err)
		}
		require.Equal(t, want, got, "width %d", width)
		_, err := r.next(nil, 1)
		require.ErrorIs(t, err, errShort)
		_, err = hybrid(nil, b[:len(b)-1], max(width, 1), len(want))
		require.Error(t, err)
	}
}
