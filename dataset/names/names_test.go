package names

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/table"
	"helios/internal/hostcpu"
)

func batch(names []string) *table.Batch {
	c := table.Column{Name: "id", Offsets: []int{0}}
	for _, n := range names {
		c.Data = append(c.Data, n...)
		c.Offsets = append(c.Offsets, len(c.Data))
	}
	return &table.Batch{File: "f", Rows: len(names), Columns: []table.Column{c}}
}

func join(t *testing.T, o Options, nodes []string, ends ...[]string) (*Join, error) {
	dir := t.TempDir()
	o.Create = func(name string) (*os.File, error) { return os.Create(filepath.Join(dir, name)) }
	o.Memory, o.Type, o.Table = max(o.Memory, 64<<20), "t", nodes != nil
	j, err := New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.Close()) })
	add := func(names []string) {
		b := batch(names)
		d, err := j.Deal(b, &b.Columns[0])
		require.NoError(t, err)
		require.NoError(t, j.Add(d))
	}
	if nodes != nil {
		add(nodes)
		j.EndTable()
	}
	for _, e := range ends {
		add(e)
	}
	return j, j.Number(context.Background())
}

func numbers(t *testing.T, j *Join) (all []uint64) {
	require.NoError(t, j.Numbers(context.Background(), func(n []uint64) error {
		all = append(all, n...)
		return nil
	}))
	return all
}

func file(t *testing.T, j *Join) (*File, []byte) {
	var b bytes.Buffer
	require.NoError(t, j.Write(context.Background(), &b))
	f, err := Open("names", bytes.NewReader(b.Bytes()), int64(b.Len()))
	require.NoError(t, err)
	return f, b.Bytes()
}

func TestJoinAgainstMap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	name := func(n int) string {
		x := r.IntN(n)
		return fmt.Sprintf("%.*s-%d", x%40, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", x)
	}
	var ends [][]string
	for range 20 {
		var e []string
		for range 10_000 {
			e = append(e, name(70_000))
		}
		ends = append(ends, e)
	}
	for _, o := range []Options{{}, {Table: true}, {Table: true, Open: true}} {
		number, nodes := map[string]uint64{}, []string(nil)
		if o.Table {
			for len(nodes) < 50_000 {
				n := name(70_000)
				if _, ok := number[n]; !ok {
					number[n] = uint64(len(nodes))
					nodes = append(nodes, n)
				}
			}
		}
		var want []uint64
		list := append([]string{}, nodes...)
		for _, e := range ends {
			for _, n := range e {
				v, ok := number[n]
				switch {
				case !ok && !o.open():
					v = None
				case !ok:
					v = uint64(len(number))
					number[n] = v
					list = append(list, n)
				}
				want = append(want, v)
			}
		}
		j, err := join(t, o, nodes, ends...)
		require.NoError(t, err)
		require.EqualValues(t, len(number), j.Nodes())
		require.Equal(t, want, numbers(t, j))
		f, bytes := file(t, j)
		require.EqualValues(t, len(list), f.Nodes())
		for i := 0; i < len(list); i += 997 {
			got, err := f.Name(int64(i))
			require.NoError(t, err)
			require.Equal(t, list[i], got)
			v, ok, err := f.Node(list[i])
			require.NoError(t, err)
			require.True(t, ok)
			require.EqualValues(t, i, v)
		}
		_, ok, err := f.Node("nobody")
		require.NoError(t, err)
		require.False(t, ok)
		// The same with 1024 parts.
		j, err = join(t, Options{Bytes: manyBytes + 1, Open: o.Open}, nodes, ends...)
		require.NoError(t, err)
		require.Equal(t, want, numbers(t, j))
		_, again := file(t, j)
		require.Equal(t, bytes, again)
	}
}

func TestTwice(t *testing.T) {
	_, err := join(t, Options{}, []string{"a", "b", "c", "b", "a"})
	require.Equal(t, &Twice{1, 3}, err)
	j, err := join(t, Options{}, []string{"a"}, []string{"a", "", "a"})
	require.NoError(t, err)
	require.Equal(t, []uint64{0, None, 0}, numbers(t, j))
}

// Whole numbers come back as they were written, and stand in the file as numbers.
func TestNumbersStayNumbers(t *testing.T) {
	for kind, list := range map[table.Kind][]string{
		table.Int:  {"7", "-9223372036854775808", "0"},
		table.Uint: {"18446744073709551615", "3"},
		table.Text: {"7", "007"},
	} {
		j, err := join(t, Options{}, list)
		require.NoError(t, err)
		f, _ := file(t, j)
		c, err := f.g.Read(0, "name")
		require.NoError(t, err)
		require.Equal(t, kind, c.Kind)
		var all []string
		require.NoError(t, f.Each(func(name []byte) error {
			all = append(all, string(name))
			return nil
		}))
		require.Equal(t, list, all)
		v, ok, err := f.Node(list[1])
		require.NoError(t, err)
		require.True(t, ok)
		require.EqualValues(t, 1, v)
	}
}

// TestBillion: the tables of a billion names fit into their parts of the memory, by arithmetic.
func TestBillion(t *testing.T) {
	const text, table = 13, 32 // bytes of a name of 12 letters, and of its place in a part's table
	require.LessOrEqual(t, manyParts, 1<<16, "a name's part has 2 bytes in the order")
	for names, memory := range map[int64]int64{90e6: 64 << 20, 1e9: 1 << 30, 4e9: 1 << 30} {
		j, err := New(Options{Memory: memory, Bytes: names * text,
			Create: func(string) (*os.File, error) { return os.CreateTemp(t.TempDir(), "") }})
		require.NoError(t, err)
		require.Equal(t, 1<<(64-j.shift), j.parts)
		two := j.room() * int64(hostcpu.Count()) / 2 // on two cores
		require.Less(t, names/int64(j.parts)*(text+table)*21/20, two, names)
		require.Less(t, 4*16*names*text/int64(j.texts.room), memory/4, "where four spools' blocks are")
		require.NoError(t, j.Close())
	}
	var parts [fewParts]int
	for i := range 1 << 20 {
		parts[hashOf(fmt.Append(nil, i))>>56]++
	}
	require.Greater(t, slices.Min(parts[:]), 4096*9/10, "ids that count up go to all parts alike")
	require.Less(t, slices.Max(parts[:]), 4096*11/10)
}
