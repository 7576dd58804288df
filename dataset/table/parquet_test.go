package table

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/parquet-go/parquet-go"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// wideParquet is a file of columns that have a page of so many bytes, and a dictionary of them
// where that is said.
func wideParquet(t *testing.T, columns, size int, dict bool) string {
	const rows = 1 << 10
	node, table := parquet.Group{}, make([]parquet.Row, rows)
	for i := range columns {
		leaf := parquet.Encoded(parquet.String(), &parquet.Plain)
		if dict {
			leaf = parquet.Encoded(parquet.String(), &parquet.RLEDictionary)
		}
		node[fmt.Sprintf("c%03d", i)] = leaf
		for k := range table {
			text := fmt.Appendf(nil, "%0*d", size/rows, k)
			table[k] = append(table[k], parquet.ByteArrayValue(text).Level(0, 0, i))
		}
	}
	var b bytes.Buffer
	w := parquet.NewWriter(&b, parquet.NewSchema("wide", node),
		parquet.Compression(&parquet.Snappy), parquet.PageBufferSize(4*size))
	_, err := w.WriteRows(table)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return write(t, "wide.parquet", b.String())
}

// The columns of a group hold bounded memory together, in pages and in dictionaries.
func TestParquetMemoryOfColumns(t *testing.T) {
	const columns, size = 16, 1 << 20
	for _, dict := range []bool{false, true} {
		s, err := Open([]string{wideParquet(t, columns, size, dict)}, Options{Memory: leastMemory})
		require.NoError(t, err)
		r, err := s.files[0].read(s.take)
		require.NoError(t, err)
		_, err = r.next()
		require.NoError(t, err)
		held := r.(*parquetReader).all.held.Load()
		require.Greater(t, held, int64(columns*size), "dictionaries: %t", dict)
		require.Less(t, held, int64(columns*size*5/4), "dictionaries: %t", dict)
		require.NoError(t, r.close())

		_, err = read(t, Options{Memory: leastMemory}, wideParquet(t, 2*columns, size, dict))
		require.ErrorContains(t, err, "wide.parquet: a page and a dictionary of each of 32 columns "+
			"take about")
		require.ErrorContains(t, err, "and 24 MiB are for them; option memory 128MiB gives enough")
		require.NotContains(t, err.Error(), "damaged")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
		_, err = read(t, Options{Memory: 128 << 20}, wideParquet(t, 2*columns, size, dict))
		require.NoError(t, err)
	}
}

// A page or a batch that the budget has no room for is refused as such, not as damage.
func TestPartsBeyondMemory(t *testing.T) {
	b := array.NewRecordBuilder(memory.DefaultAllocator,
		arrow.NewSchema([]arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String}}, nil))
	defer b.Release()
	for range 72 {
		b.Field(0).(*array.StringBuilder).Append(strings.Repeat("x", 1<<20))
	}
	batch := b.NewRecordBatch()
	defer batch.Release()
	var stream bytes.Buffer
	w := ipc.NewWriter(&stream, ipc.WithSchema(batch.Schema()))
	require.NoError(t, w.Write(batch))
	require.NoError(t, w.Close())
	var file bytes.Buffer // of a dictionary of one text
	p := parquet.NewWriter(&file, parquet.NewSchema("same", parquet.Group{
		"text": parquet.Encoded(parquet.String(), &parquet.RLEDictionary)}))
	row := parquet.Row{parquet.ByteArrayValue(make([]byte, 1<<20)).Level(0, 0, 0)}
	_, err := p.WriteRows(slices.Repeat([]parquet.Row{row}, 72))
	require.NoError(t, err)
	require.NoError(t, p.Close())
	for path, say := range map[string]string{
		wideParquet(t, 1, 72<<20, false):         "column c000, rows 1 to 1024: a page of ",
		write(t, "same.parquet", file.String()):  "column text, rows 1 to 72: texts of more than",
		write(t, "wide.arrows", stream.String()): "a batch of more than 67108864 bytes",
	} {
		_, err := read(t, Options{Memory: leastMemory}, path)
		require.ErrorContains(t, err, say)
		require.ErrorContains(t, err, "option memory gives too little for it; give more")
		require.NotContains(t, err.Error(), "damaged")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
}
