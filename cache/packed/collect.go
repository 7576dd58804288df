package packed

import "context"

// A gap of so many bytes between two rows is read with them: one longer read is cheaper than two.
const (
	gapBytes     = 32 << 10
	collectBytes = 1 << 20
)

// collect reads rows, ascending, of a Source, and gives each to put. Those that lie near each other
// are read at one go, through buf, which has room for a row at least.
func collect(ctx context.Context, src Source, rows []int64, rowBytes int64, buf []byte,
	put func(i int, data []byte)) error {
	limit, gap := int64(len(buf))/rowBytes, gapBytes/rowBytes
	for i := 0; i < len(rows); {
		j := i + 1
		for j < len(rows) && rows[j]-rows[j-1] <= gap+1 && rows[j]-rows[i] < limit {
			j++
		}
		n := rows[j-1] - rows[i] + 1
		if err := src.ReadRows(ctx, rows[i], n, buf[:n*rowBytes]); err != nil {
			return err
		}
		for k := i; k < j; k++ {
			first := (rows[k] - rows[i]) * rowBytes
			put(k, buf[first:first+rowBytes])
		}
		i = j
	}
	return nil
}
