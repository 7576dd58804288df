package packed

import (
	"context"
	"sync"

	"helios/internal/hostmem"
)

// order brings the parts of the disk caches into their order, some between two marks. If the
// process died while it ordered a part, the part's order is unknown, so its rows are read from the
// Source again.
func (k *packer) order(ctx context.Context) error {
	var parts []int
	for i := range k.p.streams {
		if k.p.streams[i].Cache {
			parts = append(parts, i)
		}
	}
	if k.mark.begun > int64(len(parts)) {
		return k.p.damaged("%d parts of disk caches were begun, and there are %d", k.mark.begun,
			len(parts))
	}
	// Those that were begun and not finished are lost; lost is empty but for a resumed pack.
	lost := parts[k.mark.ordered:k.mark.begun]
	for _, i := range parts[:k.mark.ordered] {
		k.done.Add(2 * k.shape.PagesOf(k.p.streams[i].Rows) * k.shape.PageBytes)
	}
	k.sides = make([][]byte, 2*k.c.Workers)
	var source sync.Mutex // a Source is read by one goroutine
	if err := k.orderAll(ctx, lost, &source); err != nil {
		return err
	}
	for first := int(k.mark.begun); first < len(parts); {
		end := min(first+max(orderTogether, k.c.Workers), len(parts))
		k.mark.ordered, k.mark.begun = int64(first), int64(end)
		if err := k.settle(ctx); err != nil {
			return err
		}
		if err := k.orderAll(ctx, parts[first:end], nil); err != nil {
			return err
		}
		first = end
	}
	return nil
}

// orderAll brings parts into order; source: their rows are read again.
func (k *packer) orderAll(ctx context.Context, parts []int, source *sync.Mutex) error {
	var telling sync.Mutex
	return k.each(ctx, len(parts), func(w, i int) error {
		bytes, err := k.orderOne(ctx, parts[i], source, w)
		if err == nil {
			telling.Lock()
			defer telling.Unlock()
			k.stats.OrderedBytes += bytes
			k.tell(bytes)
		}
		return err
	})
}

// orderOne brings a part of a disk cache into order.
func (k *packer) orderOne(ctx context.Context, i int, source *sync.Mutex, w int) (int64, error) {
	h, of := k.shape, &k.p.streams[i]
	places, err := k.p.places(i, nil)
	if err != nil {
		return 0, err
	}
	bytes := h.PagesOf(of.Rows) * h.PageBytes
	to, err := k.side(2*w, bytes)
	if err != nil {
		return 0, err
	}
	clear(to)
	offset := func(row int64) int64 {
		return row/h.RowsPerPage*h.PageBytes + row%h.RowsPerPage*h.RowBytes
	}
	put := func(n int, data []byte) { copy(to[offset(int64(places[n])):], data[:h.RowBytes]) }
	if source != nil {
		rows, err := k.p.rows(i, &k.lists[w])
		if err != nil {
			return 0, err
		}
		source.Lock()
		defer source.Unlock()
		k.stats.Collected += int64(len(rows))
		if err := collect(ctx, k.src, rows, h.RowBytes, make([]byte, max(collectBytes, h.RowBytes)),
			put); err != nil {
			return 0, err
		}
	} else {
		from, err := k.side(2*w+1, bytes)
		if err != nil {
			return 0, err
		}
		if err := k.to.ReadAt(ctx, of.Page, from); err != nil {
			return 0, err
		}
		for n := range of.Rows {
			put(int(n), from[offset(n):])
		}
	}
	return bytes, k.write(ctx, of.Page, to)
}

// side returns one of the workers' larger buffers.
func (k *packer) side(i int, bytes int64) ([]byte, error) {
	if int64(len(k.sides[i])) < bytes {
		if b := k.sides[i]; b != nil {
			k.sides[i] = nil
			if err := hostmem.Free(b); err != nil {
				return nil, err
			}
		}
		b, err := hostmem.Alloc(bytes, "packing")
		if err != nil {
			return nil, err
		}
		k.sides[i] = b
	}
	return k.sides[i][:bytes], nil
}
