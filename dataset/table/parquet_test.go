package table

import (
	"bytes"
	"fmt"
	"testing"

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
