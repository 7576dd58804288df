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
//
// On rung p2p destinations are device memory, which is mapped for the CPU first. One that cannot
// be, as when there is no room left behind the device's BAR, gets its rows by a copy, and so does
// one in CPU memory: its data would be on the other side of PCIe than the CQ.
type dmaCache struct {
	ssds []*SSD
	side *side
	m    map[cuda.Buffer]*dmaMapping
	tick uint64
	// Of device memory that could not be mapped: since when it has been so large, and why not, the
	// first time.
	refused map[cuda.Buffer]int64
	why     error
}

type dmaMapping struct {
	buf   cuda.Buffer
	base  cuda.DevicePtr
	size  int64
	iovas []nvme.IOVA // by SSD
	reach int64       // bytes from base that SSDs can reach, where mapping pins memory
	refs  int
	used  uint64
	peer  cuda.PeerMapping // of device memory
	grows cuda.PeerGrower  // the same, when more of it may become usable
}

// dmaCacheMax bounds the mappings of idle buffers.
const dmaCacheMax = 64

func (c *dmaCache) init(ssds []*SSD, s *side) {
	c.ssds, c.side = ssds, s
	c.m = map[cuda.Buffer]*dmaMapping{}
	c.refused = map[cuda.Buffer]int64{}
}

// acquire returns the mapping of a buffer with its first need bytes in reach of the SSDs, or nil
// when they cannot reach it. Buffers are sized for the worst case; what no set uses is not pinned.
func (c *dmaCache) acquire(b cuda.Buffer, need int64) (*dmaMapping, error) {
	if c.side.peer != nil {
		return c.acquirePeer(b, need)
	}
	m, err := c.find(b)
	if m == nil || err != nil {
		return nil, err
	}
	if need > m.reach {
		for s, iova := range m.iovas {
			if err := c.ssds[s].Ctrl.ExtendWindow(iova, need); err != nil {
				c.release(m)
				return nil, fmt.Errorf("nvme %s: map %s for DMA: %w", c.ssds[s].name(),
					b.Purpose(), err)
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
	for i, s := range c.ssds {
		if first := firstOf(c.ssds, i); first < i {
			m.iovas = append(m.iovas, m.iovas[first])
			continue
		}
		iova, err := s.Ctrl.MapWindow(mem)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("nvme %s: map %s for DMA: %w", s.name(), b.Purpose(),
				err), c.unmap(m))
		}
		m.iovas = append(m.iovas, iova)
	}
	c.m[b] = m
	return m, nil
}

// acquirePeer is acquire for destinations in device memory. Memory that cannot be mapped is
// refused: nil.
func (c *dmaCache) acquirePeer(b cuda.Buffer, need int64) (*dmaMapping, error) {
	c.tick++
	backed := backedBytes(b)
	m := c.m[b]
	if b.Kind() != cuda.MemDevice || uint64(b.Ptr())%4096 != 0 || need > backed ||
		(m == nil || need > m.reach) && c.refused[b] >= backed {
		return nil, nil
	}
	if m == nil {
		m = &dmaMapping{buf: b, base: b.Ptr(), size: b.Size(), used: c.tick}
		if err := c.evict(m); err != nil {
			return nil, err
		}
		if err := c.mapPeer(m, backed); err != nil {
			c.refuse(b, backed, err)
			return nil, c.unmap(m)
		}
		c.m[b] = m
	}
	if need > m.reach {
		if err := c.growPeer(m, backed); err != nil { // what was mapped stays so
			c.refuse(b, backed, err)
			return nil, nil
		}
	}
	m.refs++
	m.used = c.tick
	return m, nil
}

// refuse notes why a buffer of that much memory is not written in place.
func (c *dmaCache) refuse(b cuda.Buffer, backed int64, err error) {
	if len(c.refused) >= dmaCacheMax {
		clear(c.refused) // others are tried again
	}
	c.refused[b] = backed
	if c.why == nil {
		c.why = fmt.Errorf("%s of %d bytes: %w", b.Purpose(), backed, err)
	}
}

// backedBytes returns how much of a buffer is usable, from its beginning.
func backedBytes(b cuda.Buffer) int64 {
	if g, ok := b.(cuda.Growable); ok {
		return g.Backed()
	}
	return b.Size()
}

// mapPeer maps device memory for the CPU and for the SSDs. On an error, what has been mapped is
// m's.
func (c *dmaCache) mapPeer(m *dmaMapping, backed int64) error {
	var err error
	if m.peer, err = c.side.peer.MapPeer(m.buf, c.side.method); err != nil {
		return err
	}
	mem := m.peer.Bytes()
	if int64(len(mem)) < m.size {
		return errs.New(errs.Capability, "its mapping has %d of %d bytes", len(mem), m.size)
	}
	mem = mem[:m.size]
	if backed < m.size {
		// IOVAs of all of it, so that places follow from one address, and memory behind these as it
		// comes.
		var ok bool
		if m.grows, ok = m.peer.(cuda.PeerGrower); !ok {
			return errs.New(errs.Capability, "its mapping cannot grow")
		}
	}
	fd, off := m.peer.DMABuf()
	for i, s := range c.ssds {
		var iova nvme.IOVA
		if first := firstOf(c.ssds, i); first < i {
			m.iovas = append(m.iovas, m.iovas[first])
			continue
		}
		if m.grows != nil {
			iova, err = s.Ctrl.MapPeerWindow(mem)
		} else {
			iova, err = s.Ctrl.MapPeer(mem, fd, off)
		}
		if err != nil {
			return fmt.Errorf("nvme %s: map it for DMA: %w", s.name(), err)
		}
		m.iovas = append(m.iovas, iova)
	}
	if m.grows == nil {
		m.reach = m.size
	}
	return nil
}

// growPeer has the SSDs reach all that is usable now.
func (c *dmaCache) growPeer(m *dmaMapping, backed int64) error {
	if m.grows == nil {
		return errs.New(errs.Capability, "it grew after it was mapped")
	}
	if err := m.grows.Extend(); err != nil {
		return err
	}
	for s, iova := range m.iovas {
		if err := c.ssds[s].Ctrl.ExtendWindow(iova, backed); err != nil {
			return fmt.Errorf("nvme %s: map it for DMA: %w", c.ssds[s].name(), err)
		}
	}
	m.reach = backed
	return nil
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
		overlaps := m.base < fresh.base+cuda.DevicePtr(fresh.size) && fresh.base < m.base+
			cuda.DevicePtr(m.size)
		if overlaps || m.peer == nil && m.buf.Bytes() == nil {
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
		if firstOf(c.ssds, s) == s {
			err = errors.Join(err, c.ssds[s].Ctrl.UnmapDMA(iova, m.size))
		}
	}
	m.iovas = nil
	// else an SSD may still write there: its device keeps mapped memory
	if m.peer != nil && err == nil {
		err = m.peer.Close()
		m.peer, m.grows = nil, nil
	}
	return err
}

func (c *dmaCache) forget(b cuda.Buffer) error {
	delete(c.refused, b)
	m := c.m[b]
	if m == nil {
		return nil
	}
	if m.refs > 0 {
		return errs.New(errs.Failed,
			"gpuio: buffer %s is the destination of %d sets in flight; wait for them first",
			b.Purpose(), m.refs)
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
