package columns

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/dataset/table"
)

// texts makes a column of texts; "" has no value.
func texts(name string, cells ...string) table.Column {
	c := table.Column{Name: name, Offsets: []int{0}}
	for _, t := range cells {
		c.Data = append(c.Data, t...)
		c.Offsets = append(c.Offsets, len(c.Data))
	}
	return c
}

func batch(rows int, columns ...table.Column) *table.Batch {
	return &table.Batch{File: "t.csv", Line: 2, Rows: rows, Columns: columns}
}

// encode learns a column from the rows of one batch and encodes them.
func encode(t *testing.T, s Spec, b *table.Batch) ([]float32, *Encoder, error) {
	t.Helper()
	l, err := learn([]Spec{s}, nil, b)
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(l)
	require.NoError(t, err)
	var again []Learned
	require.NoError(t, json.Unmarshal(text, &again))
	require.Equal(t, l, again, "kept as JSON")
	require.NoError(t, CheckLearned(again))
	e, err := NewEncoder(again)
	if err != nil {
		return nil, nil, err
	}
	require.Len(t, e.Names(), e.Width())
	out := make([]float32, b.Rows*e.Width())
	return out, e, e.Encode(b, 0, b.Rows, out)
}

func learn(specs []Spec, use []bool, batches ...*table.Batch) ([]Learned, error) {
	f, err := NewFitter(specs, 1<<20)
	if err != nil {
		return nil, err
	}
	for _, b := range batches {
		u := use
		if use != nil {
			u = use[b.First:]
		}
		if err := f.Add(f.Read(b), u); err != nil {
			return nil, err
		}
	}
	return f.Learned()
}

func TestTransforms(t *testing.T) {
	list := table.Column{Name: "c", Kind: table.List, Offsets: []int{0, 2, 4},
		Values: &table.Column{Kind: table.Float, Floats: []float64{1, 2, 3, 2}}}
	tags := table.Column{Name: "c", Kind: table.List, Offsets: []int{0, 2, 3},
		Values: ptr(texts("", "b", "a", "b"))}
	when := table.Column{Name: "c", Kind: table.Time, Ints: []int64{0, 2 * 24 * 3600 * 1e6}}
	for _, c := range []struct {
		name string
		spec Spec
		col  table.Column
		want []float32
	}{
		{"number", Spec{Transform: None}, texts("c", "1", " -2.5e1 "), []float32{1, -25}},
		{"standard", Spec{Transform: Standard}, texts("c", "1", "3"), []float32{-1, 1}},
		{"constant", Spec{Transform: Standard}, texts("c", "7", "7"), []float32{0, 0}},
		{"minmax", Spec{Transform: MinMax}, texts("c", "10", "30"), []float32{0, 1}},
		{"log", Spec{Transform: Log}, texts("c", "0", "1"), []float32{0, float32(math.Log(2))}},
		{"boolean", Spec{Transform: Boolean}, texts("c", "yes", "False"), []float32{1, 0}},
		{"mean", Spec{Transform: None, Missing: Mean}, texts("c", "2", "", "6"), []float32{2, 4, 6}},
		{"mean scaled", Spec{Transform: Standard, Missing: Mean}, texts("c", "2", "", "6"),
			[]float32{-1, 0, 1}},
		{"zero", Spec{Transform: MinMax, Missing: Zero}, texts("c", "2", "", "6"), []float32{0, 0, 1}},
		{"value", Spec{Transform: MinMax, Missing: "6"}, texts("c", "2", "", "6"), []float32{0, 1, 1}},
		{"indicator", Spec{Transform: None, Missing: Indicator}, texts("c", "2", ""),
			[]float32{2, 0, 0, 1}},
		{"NA", Spec{Transform: None, Missing: Zero, NA: []string{"?"}}, texts("c", "2", "?"),
			[]float32{2, 0}},
		{"date", Spec{Transform: Date}, texts("c", "1970/01/01", "1970-01-03T00:00:00Z"),
			[]float32{-1, 1}},
		{"parts", Spec{Transform: Date, Parts: []string{"year", "weekday"}},
			texts("c", "2025-12-01", "2026-01-03 10:00:00"), []float32{-1, -1, 1, 1}},
		{"time", Spec{Transform: Date}, when, []float32{-1, 1}},
		{"one-hot", Spec{Transform: OneHot}, texts("c", "b", "a", "b"), []float32{0, 1, 1, 0, 0, 1}},
		{"numbers' order", Spec{Transform: Ordinal}, texts("c", "10", "9"), []float32{1, 0}},
		{"own order", Spec{Transform: Ordinal, Categories: []string{"low", "high"}},
			texts("c", "high", "low"), []float32{1, 0}},
		{"own category", Spec{Transform: OneHot, Missing: Category}, texts("c", "b", ""),
			[]float32{1, 0, 0, 1}},
		{"in place", Spec{Transform: OneHot, Missing: "b"}, texts("c", "b", ""), []float32{1, 1}},
		{"ordinal missing", Spec{Transform: Ordinal, Missing: Category}, texts("c", "b", ""),
			[]float32{0, 1}},
		{"vector", Spec{Transform: None}, list, []float32{1, 2, 3, 2}},
		{"vector scaled", Spec{Transform: Standard, Size: 2}, list, []float32{-1, 0, 1, 0}},
		{"vector of text", Spec{Transform: None, Size: 2}, texts("c", "[1, 2]", "3;4"),
			[]float32{1, 2, 3, 4}},
		{"tags", Spec{Transform: OneHot}, tags, []float32{1, 1, 0, 1}},
		{"int", Spec{Transform: OneHot}, table.Column{Name: "c", Kind: table.Int,
			Ints: []int64{10, 9}}, []float32{0, 1, 1, 0}},
		{"uint", Spec{Transform: None}, table.Column{Name: "c", Kind: table.Uint,
			Ints: []int64{-1}}, []float32{1 << 32 * 1 << 32}},
	} {
		c.col.Name, c.spec.Column = "c", "c"
		rows := max(len(c.col.Offsets)-1, len(c.col.Ints))
		got, _, err := encode(t, c.spec, batch(rows, c.col))
		if assert.NoError(t, err, c.name) {
			assert.Equal(t, c.want, got, c.name)
		}
	}
}

func ptr[T any](x T) *T { return &x }

func TestRefusedCells(t *testing.T) {
	for _, c := range []struct {
		spec  Spec
		cells []string
		want  string
	}{
		{Spec{Transform: Standard}, []string{"1", "x"}, `t.csv:3, column c: x is no number`},
		{Spec{Transform: Standard}, []string{"1", ""}, `t.csv:3, column c: has no value`},
		{Spec{Transform: None}, []string{"0x10"}, "is no number"},
		{Spec{Transform: None}, []string{"inf"}, "is no number"},
		{Spec{Transform: None}, []string{"1e300"}, "float32"},
		{Spec{Transform: None}, []string{"1,5"}, "is no number"},
		{Spec{Transform: Log}, []string{"-1"}, "has no log"},
		{Spec{Transform: Boolean}, []string{"2"}, "none of true"},
		{Spec{Transform: Date}, []string{"31.01.2026"}, "is no date"},
		{Spec{Transform: Date}, []string{"2026-02-30"}, "is no date"},
		{Spec{Transform: None, Size: 2}, []string{"1 2", "1 2 3"}, "holds 3 numbers"},
		{Spec{Transform: OneHot}, []string{"a", "\xff"}, "is no UTF-8"},
		{Spec{Transform: OneHot, Categories: []string{"a"}}, []string{"a", "b"}, "none of the 1 categories"},
		{Spec{Transform: Standard, Missing: Zero}, []string{"", ""}, "no row that is learned from has a value"},
		{Spec{Transform: "sigmoid"}, nil, "none of none, standard"},
		{Spec{Transform: Hash}, nil, "needs a size"},
		{Spec{Transform: Hash, Size: -1}, nil, "outside 1.."},
		{Spec{Transform: Ordinal, Unknown: Zero}, nil, "0 is the first"},
		{Spec{Transform: OneHot, Missing: Mean}, nil, "a text has no mean"},
		{Spec{Transform: Standard, Missing: Category}, nil, "missing category is for"},
		{Spec{Transform: Standard, Missing: "n/a"}, nil, `missing n/a is none of`},
		{Spec{Transform: Standard, Unknown: Zero}, nil, "unknown is for"},
		{Spec{Transform: Date, Parts: []string{"era"}}, nil, `part era is none of`},
		{Spec{Transform: OneHot, Missing: "c", Categories: []string{"a"}}, []string{"a"}, "missing c is no category"},
	} {
		c.spec.Column = "c"
		_, _, err := encode(t, c.spec, batch(len(c.cells), texts("c", c.cells...)))
		if assert.Error(t, err, "%v", c) {
			assert.Contains(t, err.Error(), c.want)
		}
	}
	_, _, err := encode(t, Spec{Column: "d", Transform: None}, batch(1, texts("c", "1")))
	assert.ErrorContains(t, err, `t.csv has no column d`)
}

// TestUnknownCategories holds what is learned from the training rows alone against all rows.
func TestUnknownCategories(t *testing.T) {
	b := batch(3, texts("c", "a", "b", "c"))
	use := []bool{true, true, false}
	for unknown, want := range map[string][]float32{
		Zero: {1, 0, 0, 1, 0, 0}, Category: {1, 0, 0, 0, 1, 0, 0, 0, 1},
	} {
		l, err := learn([]Spec{{Column: "c", Transform: OneHot, Unknown: unknown}}, use, b)
		require.NoError(t, err)
		e, err := NewEncoder(l)
		require.NoError(t, err)
		out := make([]float32, 3*e.Width())
		require.NoError(t, e.Encode(b, 0, b.Rows, out))
		assert.Equal(t, want, out, unknown)
		assert.Equal(t, []Count{{"c", 0, 1}}, e.Counts())
	}
}

// TestLearnedByAnyBatches cuts a table into batches of every size.
func TestLearnedByAnyBatches(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const n = 60
	var x, y []string
	var use []bool
	for range n {
		x = append(x, fmt.Sprint(rng.NormFloat64()*1e3))
		y = append(y, fmt.Sprint(rng.IntN(9)))
		use = append(use, rng.IntN(2) == 0)
	}
	specs := []Spec{{Column: "x", Transform: Standard}, {Column: "y", Transform: OneHot, Unknown: Zero},
		{Column: "y", Transform: Bag, Size: 4}}
	var want []Learned
	for size := n; size > 0; size-- {
		var all []*table.Batch
		for from := 0; from < n; from += size {
			to := min(n, from+size)
			b := batch(to-from, texts("x", x[from:to]...), texts("y", y[from:to]...))
			b.First = int64(from)
			all = append(all, b)
		}
		got, err := learn(specs, use, all...)
		require.NoError(t, err)
		if want == nil {
			want = got
		}
		require.Equal(t, want, got)
	}
}

// TestProfilerLearnsAsFitter compares statistics that a Profiler has learned with a Fitter's.
func TestProfilerLearnsAsFitter(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	forms := []string{"%.3f", "%.17g", " %.2f", "%.0f", "%e", "NA", "", "x", "1e99"}
	known := 0
	for range 300 {
		names := []string{"a", "b", "c", "d"}
		kinds := make([][]string, len(names))
		for k := range kinds {
			kinds[k] = forms[:2+rng.IntN(len(forms)-1)]
		}
		var na []string
		if rng.IntN(2) == 0 {
			na = []string{"NA"}
		}
		all := rng.IntN(2) == 0
		var batches []*table.Batch
		var use []bool
		for range 1 + rng.IntN(4) {
			n := 1 + rng.IntN(150)
			b := batch(n)
			b.First = int64(len(use))
			for k, name := range names[:3] {
				var cells []string
				for range n {
					text := kinds[k][rng.IntN(len(kinds[k]))]
					if strings.Contains(text, "%") {
						text = fmt.Sprintf(text, rng.NormFloat64()*100)
					}
					cells = append(cells, text)
				}
				b.Columns = append(b.Columns, texts(name, cells...))
			}
			d := table.Column{Name: "d", Kind: table.Float, Missing: make([]bool, n)}
			for i := range n {
				d.Floats = append(d.Floats, rng.NormFloat64())
				d.Missing[i] = rng.IntN(5) == 0
				use = append(use, rng.IntN(2) == 0)
			}
			b.Columns = append(b.Columns, d)
			batches = append(batches, b)
		}
		p := NewProfiler(names, na, all)
		for _, b := range batches {
			x, err := p.Read(b)
			require.NoError(t, err)
			p.Add(x, use[b.First:])
		}
		for _, name := range names {
			spec := []Spec{{Column: name, Transform: MinMax, Missing: Zero, NA: na, All: all}}
			f, err := NewFitter(spec, 1<<20)
			require.NoError(t, err)
			needs := f.Know(p, func(string) bool { return false })
			want, wantErr := learn(spec, use, batches...)
			if needs != nil {
				require.Error(t, wantErr, name)
				continue
			}
			known++
			got, err := f.Learned()
			require.Equal(t, wantErr, err)
			require.Equal(t, want, got)
		}
	}
	require.Greater(t, known, 400)
}

func TestCategoriesAreBounded(t *testing.T) {
	var cells []string
	for i := range 200 {
		cells = append(cells, strconv.Itoa(i)+strings.Repeat("x", 1000))
	}
	f, err := NewFitter([]Spec{{Column: "c", Transform: Ordinal}}, 100<<10)
	require.NoError(t, err)
	assert.ErrorContains(t, f.Add(f.Read(batch(200, texts("c", cells...))), nil), "take more than 100 KiB")
}

func TestProfile(t *testing.T) {
	many := make([]string, 8)
	for i := range many {
		many[i] = "text " + strconv.Itoa(i)
	}
	b := batch(8, texts("n", "1", "2", "NA", "4", "5", "6", "7", "8"),
		texts("s", "a", "b", "a", "b", "a", "b", "a", "b"),
		texts("b", "true", "false", "true", "", "true", "true", "true", "true"),
		texts("d", "2026-01-01", "2026-01-02", "2026-01-03", "2026-01-03", "2026-01-03",
			"2026-01-03", "2026-01-03", "2026-01-03"), texts("t", many...))
	p := NewProfiler([]string{"n", "s", "b", "d", "t"}, []string{"NA"}, false)
	x, err := p.Read(b)
	require.NoError(t, err)
	p.Add(x, nil)
	var got []string
	for _, c := range p.Profiles {
		s, err := c.Suggest()
		got = append(got, fmt.Sprint(s.Column, " ", s.Transform, " ", c.Missing, " ", c.FirstMissing, " ", err))
	}
	assert.Equal(t, []string{"n standard 1 t.csv:4 <nil>", "s one-hot 0  <nil>",
		"b boolean 1 t.csv:5 <nil>", "d date 0  <nil>", "t  0  8 different texts"}, got)
}

// TestMurmur holds hashes against those of sklearn.utils.murmurhash3_32 (scikit-learn 1.5).
func TestMurmur(t *testing.T) {
	for text, want := range map[string]int32{"": 0, "a": 1009084850, "ab": -1681926305, "foo": -156908512, "word": -968174432, "graph": 504851561, "straße": 2095602437, "neighbourhood": -779361294} {
		assert.Equal(t, want, int32(murmur3([]byte(text))), text)
	}
}

func TestShortNumber(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	taken := 0
	for range 200_000 {
		text := strconv.FormatFloat(r.NormFloat64()*math.Pow10(r.IntN(20)-10), 'f', r.IntN(16), 64)
		want, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err)
		if got, ok := shortNumber([]byte(text)); ok {
			taken++
			require.Equal(t, math.Float64bits(want), math.Float64bits(got), text)
		}
	}
	require.Greater(t, taken, 50_000)
	for _, text := range []string{"", "-", ".", "-.", "1.2.3", "1e3", "+1", "1 ", "0x1", "１"} {
		_, ok := shortNumber([]byte(text))
		require.False(t, ok, text)
	}
}
