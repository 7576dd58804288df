package prepare

import (
	"context"

	"helios/cuda"
)

// Stager copies device memory to where the CPU sees it.
type Stager struct{ buf cuda.Buffer }

// Close frees the copy.
func (g *Stager) Close() error {
	if g.buf == nil {
		return nil
	}
	b := g.buf
	g.buf = nil
	return b.Free()
}

// Ptr is the place of the last copy.
func (g *Stager) Ptr() cuda.DevicePtr { return g.buf.Ptr() }

// View is n bytes of b from offset on, after the work of st so far: in place where the CPU sees
// them, else a copy that lasts until the next view.
func (g *Stager) View(ctx context.Context, dev cuda.Device, st cuda.Stream, b cuda.Buffer, offset,
	n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if mem := b.Bytes(); mem != nil {
		return mem[offset : offset+n], st.Synchronize(ctx)
	}
	return g.copy(ctx, dev, st, b.Ptr()+cuda.DevicePtr(offset), n)
}

// copy is a copy of n bytes of device memory that lasts until the next one.
func (g *Stager) copy(ctx context.Context, dev cuda.Device, st cuda.Stream, from cuda.DevicePtr,
	n int64) ([]byte, error) {
	if g.buf == nil || g.buf.Size() < n {
		if err := g.Close(); err != nil {
			return nil, err
		}
		var err error
		if g.buf, err = dev.Alloc(cuda.MemPinned, n+n/8,
			"staging of what the CPU looks at"); err != nil {
			return nil, err
		}
	}
	if err := st.Copy(g.buf.Ptr(), from, n); err != nil {
		return nil, err
	}
	return g.buf.Bytes()[:n], st.Synchronize(ctx)
}
