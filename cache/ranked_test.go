package cache

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"helios/cache/packed"
	"helios/cuda"
)

// Rows of a mini-batch that was laid out come together from both tiers and from pages, wherever the
// pages are; what cannot be is refused.
func TestRanked(t *testing.T) {
	const rows, rowBytes = 400, 48
	dev := device(t, 2)
	st := stream(t, dev)
	rng := rand.New(rand.NewPCG(5, 6))
	row := func(r int64) []byte {
		b := make([]byte, rowBytes)
		for i := range b {
			b[i] = byte(r*7 + int64(i))
		}
		return b
	}
	shape := packed.Shape{RowBytes: rowBytes, PageBytes: 4096, RowsPerPage: 4096 / rowBytes}
	for _, gpu := range []int64{0, 13, 50} {
		hot := make([]int64, 50)
		for i, v := range rng.Perm(rows)[:50] {
			hot[i] = int64(v)
		}
		c := must(NewRanked(dev, rows, rowBytes, 2, hot, gpu))(t)
		for _, tier := range []Tier{GPU, CPU} {
			for i, r := range c.TierRows(tier) {
				copy(c.TierBuffer(tier).Bytes()[i*rowBytes:], row(r))
			}
		}
		rank := map[int64]uint32{}
		for i, r := range hot {
			rank[r] = uint32(i)
		}
		// Pages 3 to 5 and 9 are read: rows lie in them in any order.
		b := packed.Batch{Runs: []packed.Run{{Page: 3, Pages: 3}, {Page: 9, Pages: 1}},
			ReadPages: 4}
		staging := must(dev.Alloc(cuda.MemDevice, 4*shape.PageBytes, "test"))(t)
		slots := rng.Perm(int(4 * shape.RowsPerPage))
		var frontier []int64
		for i, v := range rng.Perm(rows)[:300] {
			r := int64(v)
			frontier = append(frontier, r)
			if k, ok := rank[r]; ok {
				b.HotPos, b.HotRank = append(b.HotPos, uint32(i)), append(b.HotRank, k)
				continue
			}
			slot := int64(slots[i])
			b.Pos, b.Slot = append(b.Pos, uint32(i)), append(b.Slot, uint32(slot))
			copy(staging.Bytes()[slot/shape.RowsPerPage*shape.PageBytes+
				slot%shape.RowsPerPage*rowBytes:], row(r))
		}
		a := &Assembly{}
		for _, ssds := range []int{1, 3} {
			ok(t, c.Assemble(a, &b, shape, ssds, int64(len(frontier))))
			if a.NGPU+a.NCPU != int64(len(b.HotPos)) || a.NPaged != int64(len(b.Pos)) ||
				a.Pages != 4 {
				t.Fatalf("%+v", a)
			}
			pages, places := cuda.View[int64](a.Page, 4), cuda.View[uint32](a.Place, 4)
			order := map[int64]uint32{3: 0, 4: 1, 5: 2, 9: 3}
			for s := range ssds {
				for k := a.SSDOffset[s]; k < a.SSDOffset[s+1]; k++ {
					if pages[k]%int64(ssds) != int64(s) || order[pages[k]] != places[k] {
						t.Fatalf("page %d at place %d on SSD %d", pages[k], places[k], s)
					}
				}
			}
			dst := must(dev.Alloc(cuda.MemDevice, int64(len(frontier))*rowBytes, "test"))(t)
			ok(t, c.GatherHot(st, a, dst.Ptr(), rowBytes))
			ok(t, c.GatherPages(st, a, staging.Ptr(), dst.Ptr(), rowBytes))
			ok(t, st.Synchronize(limit(t)))
			for i, r := range frontier {
				if !bytes.Equal(dst.Bytes()[i*rowBytes:][:rowBytes], row(r)) {
					t.Fatalf("row %d at position %d", r, i)
				}
			}
			ok(t, dst.Free())
		}
		bad := b
		bad.HotRank = append([]uint32{50}, b.HotRank[1:]...)
		if err := c.Assemble(a, &bad, shape, 1, int64(len(frontier))); err == nil {
			t.Fatal("a rank that nobody has")
		}
		bad = b
		bad.ReadPages = 5
		if err := c.Assemble(a, &bad, shape, 1, int64(len(frontier))); err == nil {
			t.Fatal("pages that no run has")
		}
		if err := c.Assemble(a, &b, shape, 1, 7); err == nil {
			t.Fatal("another number of rows")
		}
		ok(t, a.Close())
		ok(t, staging.Free())
		ok(t, c.Close())
	}
}
