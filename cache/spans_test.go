package cache

import (
	"bytes"
	"slices"
	"testing"

	"helios/cuda"
)

// Caches over one index find a row by its place alone, each in buffers of its own, and leave the
// buffers and the index to their owner.
func TestSpans(t *testing.T) {
	const rowBytes = 16
	for _, c := range []struct{ first, rows int64 }{{0, 5}, {3, 3}, {1, 500}, {300, 501}} {
		dev := device(t, 2)
		st := stream(t, dev)
		s := must(NewSpans(dev, c.first, c.rows))(t)
		first := must(dev.Alloc(cuda.MemDevice, max(c.first, 1)*rowBytes, "first rows"))(t)
		ok(t, st.Fill(first.Ptr(), 1, first.Size()))
		nodes := make([]int64, 0, c.rows)
		for r := range c.rows {
			nodes = append(nodes, r)
		}
		slices.Reverse(nodes)
		in := upload(t, dev, nodes)
		dst := must(dev.Alloc(cuda.MemDevice, c.rows*rowBytes, "gathered rows"))(t)
		var others []cuda.Buffer
		for mark := byte(2); mark < 4; mark++ { // two slabs, one behind the other
			o := must(dev.Alloc(cuda.MemPinned, max(c.rows-c.first, 1)*rowBytes, "other rows"))(t)
			others = append(others, o)
			for i := range o.Size() {
				o.Bytes()[i] = mark + byte(i/rowBytes)*4
			}
			h := must(s.Over(dev, rowBytes, 2, first, o))(t)
			b := must(h.NewBuckets())(t)
			ok(t, h.Lookup(limit(t), st, in.Ptr(), 0, c.rows, b))
			if b.NGPU != c.first || b.NCPU != c.rows-c.first || b.NMiss != 0 {
				t.Fatalf("%v: %d, %d and %d rows", c, b.NGPU, b.NCPU, b.NMiss)
			}
			ok(t, h.Gather(st, b, dst.Ptr(), rowBytes))
			ok(t, st.Synchronize(limit(t)))
			got := download[byte](t, dev, st, dst, c.rows*rowBytes)
			for i, row := range nodes {
				want := byte(1)
				if row >= c.first {
					want = mark + byte(row-c.first)*4
				}
				if !bytes.Equal(got[i*rowBytes:(i+1)*rowBytes],
					bytes.Repeat([]byte{want}, rowBytes)) {
					t.Fatalf("%v, slab %d: row %d is another", c, mark, row)
				}
			}
			ok(t, b.Close())
			ok(t, h.Close())
		}
		if tier, _ := s.index.Lookup(c.rows); tier != SSD {
			t.Fatalf("%v: a row behind the last is in a tier", c)
		}
		// Buffers that are too small are refused, and a span beyond the rows.
		if c.first > 1 {
			if _, err := s.Over(dev, first.Size(), 2, first, others[0]); err == nil {
				t.Fatalf("%v: rows that do not fit in their buffer", c)
			}
		}
		for _, bad := range []int64{-1, c.rows + 1} {
			if _, err := NewSpans(dev, bad, c.rows); err == nil {
				t.Fatalf("%d of %d rows in the first span", bad, c.rows)
			}
		}
		ok(t, s.Close())
		for _, b := range append(others, first, in, dst) {
			ok(t, b.Free())
		}
	}
}
