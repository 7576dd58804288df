package gpuio

import (
	"errors"
	"fmt"

	"helios/cuda"
	"helios/internal/errs"
	"helios/nvme"
)

// dmaCache keeps destination buffers mapped for the SSDs, since mapping costs far more than a
// read. The engine's lock guards it. A mapping ends by Forget, when its buffer is found freed or
// its memory in another buffer, when it is the longest unused of too many, and at Close; never
// while a set that writes to it is in flight.
type dmaCache struct {
	ssds []*SSD
	m    map[cuda.Buffer]*dmaMapping
	tick uint64
}

type dmaMapping struct {
	buf   cuda.Buffer
	base  cuda.DevicePtr
	size  int64
	iovas []nvme.IOVA // by SSD
	reach int64       // bytes from base that SSDs can reach, where mapping pins memory
	refs  int
	used  uint64
}

// dmaCacheMax bounds the mappings of idle buffers.
const dmaCacheMax = 64

func (c *dmaCache) init(ssds []*SSD) {
	c.ssds = ssds
	c.m = map[cuda.Buffer]*dmaMapping{}
}

// acquire returns the mapping of a buffer with its first need bytes in reach of the SSDs, or nil when
// they cannot reach it. Buffers are sized for the worst case; what no set uses is not pinned.
func (c *dmaCache) acquire(b cuda.Buffer, need int64) (*dmaMapping, error) {
	m, err := c.find(b)
	if m == nil || err != nil {
		return nil, err
	}
	if need > m.reach {
		for s, iova := range m.iovas {
			if err := c.ssds[s].Ctrl.ExtendWindow(iova, need); err != nil {
				c.release(m)
				return nil, fmt.Errorf("nvme %s: map %s for DMA: %w", c.ssds[s].name(), b.Purpose(), err)
			}
		}
		m.reach = need
	}
	return m, nil
}

// find returns the mapping of a buffer, with one more reference.
func (c *dmaCache) find(b cuda.Buffer) (*dmaMapping, error) {
	c.tick++
	if m := c.m[b]; m != nil {
		if b.Bytes() == nil {
			return nil, errs.New(errs.Usage, "gpuio: destination %s was freed", b.Purpose())
		}
		m.refs++
		m.used = c.tick
		return m, nil
	}
	mem := b.Bytes()
	if len(mem) == 0 || uint64(b.Ptr())%4096 != 0 {
		return nil, nil
	}
	m := &dmaMapping{buf: b, base: b.Ptr(), size: int64(len(mem)), refs: 1, used: c.tick}
	if err := c.evict(m); err != nil {
		return nil, err
	}
	for _, s := range c.ssds {
		iova, err := s.Ctrl.MapWindow(mem)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("nvme %s: map %s for DMA: %w", s.name(), b.Purpose(), err), c.unmap(m))
		}
		m.iovas = append(m.iovas, iova)
	}
	c.m[b] = m
	return m, nil
}

func (c *dmaCache) release(m *dmaMapping) { m.refs-- }

// evict drops idle mappings that are stale or too many, before fresh joins.
func (c *dmaCache) evict(fresh *dmaMapping) error {
	var err error
	var oldest *dmaMapping
	for _, m := range c.m {
		if m.refs > 0 {
			continue
		}
		// Two owners of one range: the older buffer was freed. (Or one was registered over
		// the other; then dropping the idle one is harmless.)
		overlaps := m.base < fresh.base+cuda.DevicePtr(fresh.size) && fresh.base < m.base+cuda.DevicePtr(m.size)
		if overlaps || m.buf.Bytes() == nil {
			err = errors.Join(err, c.drop(m))
			continue
		}
		if oldest == nil || m.used < oldest.used {
			oldest = m
		}
	}
	if len(c.m) >= dmaCacheMax && oldest != nil {
		err = errors.Join(err, c.drop(oldest))
	}
	return err
}

func (c *dmaCache) drop(m *dmaMapping) error {
	delete(c.m, m.buf)
	return c.unmap(m)
}

func (c *dmaCache) unmap(m *dmaMapping) error {
	var err error
	for s, iova := range m.iovas {
		err = errors.Join(err, c.ssds[s].Ctrl.UnmapDMA(iova, m.size))
	}
	m.iovas = nil
	return err
}

func (c *dmaCache) forget(b cuda.Buffer) error {
	m := c.m[b]
	if m == nil {
		return nil
	}
	if m.refs > 0 {
		return errs.New(errs.Failed, "gpuio: buffer %s is the destination of %d sets in flight; wait for them first", b.Purpose(), m.refs)
	}
	return c.drop(m)
}

// close drops all mappings; no command is in flight.
func (c *dmaCache) close() error {
	var err error
	for _, m := range c.m {
		err = errors.Join(err, c.drop(m))
	}
	return err
}

// Forget ends the DMA mappings of a destination buffer.
func (e *async) Forget(b cuda.Buffer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dma.forget(b)
}
