package table

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/testing/wide"
)

// arrowBytes are a file and a stream of Arrow with columns of several types and two batches.
func arrowBytes(t testing.TB, options ...ipc.Option) (file, stream []byte) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "id", Type: arrow.BinaryTypes.String},
		{Name: "x", Type: arrow.PrimitiveTypes.Float64, Nullable: true}, {Name: "n", Type: arrow.PrimitiveTypes.Int32},
		{Name: "list", Type: arrow.ListOf(arrow.PrimitiveTypes.Int64), Nullable: true},
		{Name: "word", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}},
	}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	var f, s bytes.Buffer
	options = append(options, ipc.WithSchema(schema))
	fw, err := ipc.NewFileWriter(&f, options...)
	require.NoError(t, err)
	sw := ipc.NewWriter(&s, options...)
	for batch := range 2 {
		for i := range 5 {
			b.Field(0).(*array.StringBuilder).Append(string(rune('a' + 5*batch + i)))
			b.Field(2).(*array.Int32Builder).Append(int32(i))
			l := b.Field(3).(*array.ListBuilder)
			if x := b.Field(1).(*array.Float64Builder); i == 3 {
				x.AppendNull()
				l.AppendNull()
			} else {
				x.Append(float64(i) / 2)
				l.Append(true)
				l.ValueBuilder().(*array.Int64Builder).AppendValues([]int64{1, 2}, nil)
			}
			require.NoError(t, b.Field(4).(*array.BinaryDictionaryBuilder).AppendString([]string{"red", "blue"}[i%2]))
		}
		r := b.NewRecordBatch()
		require.NoError(t, fw.Write(r))
		require.NoError(t, sw.Write(r))
		r.Release()
	}
	require.NoError(t, fw.Close())
	require.NoError(t, sw.Close())
	return f.Bytes(), s.Bytes()
}

// TestArrow reads a file and a stream of Arrow, plain and packed.
func TestArrow(t *testing.T) {
	for _, o := range [][]ipc.Option{nil, {ipc.WithZstd()}, {ipc.WithLZ4()}} {
		file, stream := arrowBytes(t, o...)
		for _, content := range [][]byte{file, stream} {
			got, err := read(t, Options{}, write(t, "a", string(content)))
			require.NoError(t, err)
			require.Len(t, got, 10)
			require.Equal(t, []string{"a|0|0|[1 2]|red", "d|-|3|-|blue", "j|2|4|[1 2]|red"}, []string{got[0], got[3], got[9]})
		}
	}
}

// TestHostileArrow cuts files and streams of Arrow everywhere, and lets each of their numbers claim
// more than there is: they are refused or read as what they still are, in bounded memory.
func TestHostileArrow(t *testing.T) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	path := write(t, "a", "")
	try := func(content []byte) error {
		require.NoError(t, os.WriteFile(path, content, 0o644))
		rows, err := read(t, Options{Memory: 1}, path)
		require.LessOrEqual(t, len(rows), 1000)
		if err != nil {
			require.ErrorContains(t, err, path)
			require.Less(t, len(err.Error()), 1000)
			require.NotContains(t, err.Error(), "runtime error")
			require.NotEqual(t, errs.Failed, errs.ClassOf(err), err.Error())
		}
		return err
	}
	file, stream := arrowBytes(t)
	packed, _ := arrowBytes(t, ipc.WithZstd())
	step := 4
	if wide.Lean() {
		step = 28
	}
	for _, content := range [][]byte{file, stream, packed} {
		for n := 0; n+8 < len(content); n += step {
			if err := try(content[:n]); n > 8 && &content[0] != &stream[0] {
				require.Error(t, err, n)
			}
			for _, claim := range []uint64{math.MaxUint64, math.MaxInt64, 1 << 31, 1<<31 - 1,
				1 << 40} {
				bad := bytes.Clone(content)
				binary.LittleEndian.PutUint64(bad[n:], claim)
				_ = try(bad)
			}
		}
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.HeapSys-min(after.HeapSys, before.HeapSys), uint64(400<<20))
}

// FuzzTable: whatever a file holds, it is a table, or it is refused in a sentence with its name.
func FuzzTable(f *testing.F) {
	for _, o := range [][]ipc.Option{nil, {ipc.WithZstd()}, {ipc.WithLZ4()}} {
		file, stream := arrowBytes(f, o...)
		f.Add(file)
		f.Add(stream)
	}
	for _, text := range []string{"id,x\na,1\n\"b\n\",\"2\"\"\"\n", "a|b\n1|2\n", "# Nodes: 2\n1 2\n",
		"{\"a\":[1,null],\"b\":\"\\u0041\"}\n{\"a\":null}\n", "\xef\xbb\xbfx;y\r\n1;2\r\n"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		if len(content) > 1<<14 {
			return
		}
		path := filepath.Join(t.TempDir(), "t")
		require.NoError(t, os.WriteFile(path, content, 0o644))
		if _, err := read(t, Options{Memory: 1}, path); err != nil {
			require.Contains(t, err.Error(), path)
			require.Less(t, len(err.Error()), 1000)
			require.NotContains(t, err.Error(), "runtime error")
			require.NotEqual(t, errs.Failed, errs.ClassOf(err), err.Error())
		}
	})
}
