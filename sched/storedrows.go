package sched

import (
	"context"
	"errors"
	"runtime"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/hostmem"
)

// storedRows reads a dataset's rows from the SSDs, in their order and as they are stored: the
// source of packed pages. The stack reads rows.
type storedRows struct {
	s             *store
	ids, pos, buf cuda.Buffer
}

// storedPiece is how many bytes of rows one set reads.
const storedPiece = 8 << 20

// ReadRows implements packed.Source.
func (r *storedRows) ReadRows(ctx context.Context, first, n int64, dst []byte) error {
	size := r.s.of.RowBytes
	most := max(storedPiece/size, 1)
	if r.buf == nil {
		for _, b := range []struct {
			to    *cuda.Buffer
			bytes int64
		}{{&r.ids, most * 8}, {&r.pos, most * 4}, {&r.buf, most * size}} {
			var err error
			if *b.to, err = r.s.of.Device.Alloc(cuda.MemPinned, b.bytes,
				"rows to be packed"); err != nil {
				return err
			}
		}
	}
	for n > 0 {
		part := min(n, most)
		if err := r.read(ctx, first, part); err != nil {
			return err
		}
		copy(dst, r.buf.Bytes()[:part*size])
		first, n, dst = first+part, n-part, dst[part*size:]
	}
	return nil
}

// read reads n rows into buf.
func (r *storedRows) read(ctx context.Context, first, n int64) error {
	ids, pos := hostmem.View[int64](r.ids.Bytes()), hostmem.View[uint32](r.pos.Bytes())
	ssds := int64(len(r.s.ssds))
	off := make([]int64, ssds+1)
	k := int64(0)
	for s := range ssds {
		at := (s - first%ssds + ssds) % ssds // the first row of the part that is on the SSD
		for ; at < n; at += ssds {
			ids[k], pos[k] = first+at, uint32(at)
			k++
		}
		off[s+1] = k
	}
	op, cancel := r.s.of.ReadContext(ctx)
	defer cancel()
	size := r.s.of.RowBytes
	p, err := r.s.reader.Submit(op, &gpuio.ReadSet{Rows: r.ids.Ptr(), Pos: r.pos.Ptr(),
		SSDOffset: off, Dst: r.buf, DstStride: size, DstBytes: n * size})
	if err == nil {
		_, err = p.Wait(op)
	}
	if err != nil {
		// The set's buffers may be freed only when nothing can read or write them.
		r.s.stopped = ctx.Err() != nil
		return errors.Join(readError(err), r.s.close())
	}
	return nil
}

func (r *storedRows) close() error {
	var all []error
	if r.buf != nil && r.s.reader != nil {
		all = append(all, gpuio.Forget(r.s.reader, r.buf))
	}
	for _, b := range []cuda.Buffer{r.ids, r.pos, r.buf} {
		if b != nil {
			all = append(all, b.Free())
		}
	}
	r.ids, r.pos, r.buf = nil, nil, nil
	return errors.Join(all...)
}

// packWorkers is how many goroutines write pages.
func (e *engine) packWorkers() int { return runtime.GOMAXPROCS(0) }
