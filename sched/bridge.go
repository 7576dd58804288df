package sched

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"helios/cuda"
	"helios/graph"
	"helios/sched/engine"
	"helios/sched/prepare"
)

// bridgeChunk is the part of a copy between two GPUs that is in pinned memory at a time, twice.
const bridgeChunk = 4 << 20

// bridge copies between the engine's device and a replica's. GPUs have no memory in common that
// every machine has a way between, so each piece goes through pinned memory, while the one before
// it leaves there. Host devices share the CPU's. A replica takes its next mini-batch while the
// gradient of the one before goes back, so each direction has streams and pinned memory of its own.
type bridge struct {
	there, home *lane // nil: both are host devices
}

// lane is one direction of a bridge, with one copy at a time.
type lane struct {
	mu       sync.Mutex
	from, to cuda.Stream
	in       cuda.Buffer // pinned, by the device that copies come from
	out      cuda.Buffer // the same, for the other one
}

// newBridge is a way from the device near to the device far.
func newBridge(near, far cuda.Device) (b *bridge, err error) {
	b = &bridge{}
	if near.Info().Backend == "host" && far.Info().Backend == "host" {
		return b, nil
	}
	if b.there, err = newLane(near, far, "to replicas"); err != nil {
		return nil, err
	}
	if b.home, err = newLane(far, near, "from replicas"); err != nil {
		return nil, errors.Join(err, b.there.close())
	}
	return b, nil
}

func newLane(from, to cuda.Device, name string) (l *lane, err error) {
	l = &lane{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.from, err = from.NewStream(cuda.StreamOptions{Name: name + ": out"}); err != nil {
		return nil, err
	}
	if l.to, err = to.NewStream(cuda.StreamOptions{Name: name + ": in"}); err != nil {
		return nil, err
	}
	if l.in, err = from.Alloc(cuda.MemPinned, 2*bridgeChunk, "copies "+name); err != nil {
		return nil, err
	}
	l.out, err = cuda.Share(to, l.in)
	return l, err
}

// out copies from the engine's device to the replica's and waits; back the other way. The work
// that made the bytes at src must have ended, and that which used those at dst.
func (b *bridge) out(op context.Context, dst, src cuda.DevicePtr, n int64) error {
	return b.there.move(op, dst, src, n)
}

func (b *bridge) back(op context.Context, dst, src cuda.DevicePtr, n int64) error {
	return b.home.move(op, dst, src, n)
}

func (l *lane) move(op context.Context, dst, src cuda.DevicePtr, n int64) error {
	if l == nil {
		copy(cuda.View[byte](dst, n), cuda.View[byte](src, n))
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for offset, half := int64(0), cuda.DevicePtr(0); offset < n; offset += bridgeChunk {
		size := min(bridgeChunk, n-offset)
		if err := l.from.Copy(l.in.Ptr()+half, src+cuda.DevicePtr(offset), size); err != nil {
			return err
		}
		if err := l.from.Synchronize(op); err != nil {
			return err
		}
		// The piece before this one has left the other half.
		if err := l.to.Synchronize(op); err != nil {
			return err
		}
		if err := l.to.Copy(dst+cuda.DevicePtr(offset), l.out.Ptr()+half, size); err != nil {
			return err
		}
		half ^= bridgeChunk
	}
	return l.to.Synchronize(op)
}

func (b *bridge) close() error { return errors.Join(b.home.close(), b.there.close()) }

func (l *lane) close() error {
	if l == nil {
		return nil
	}
	var all []error
	for _, s := range []cuda.Stream{l.to, l.from} {
		if s != nil {
			all = append(all, s.Close())
		}
	}
	for _, m := range []cuda.Buffer{l.out, l.in} {
		if m != nil {
			all = append(all, m.Free())
		}
	}
	return errors.Join(all...)
}

// mirror is a mini-batch of the engine's device in a replica's memory.
type mirror struct {
	dev     cuda.Device
	mb      graph.MiniBatch
	buffers map[string]cuda.Buffer
	labels  cuda.Buffer // pinned, as of engine.Slot
}

func newMirror(dev cuda.Device, labels int64) (m *mirror, err error) {
	m = &mirror{dev: dev, buffers: map[string]cuda.Buffer{}}
	m.labels, err = dev.Alloc(cuda.MemPinned, labels, "labels")
	return m, err
}

// hold brings n bytes into the mirror's buffer of a name, which grows.
func (m *mirror) hold(op context.Context, way *bridge, name string, src cuda.DevicePtr,
	n int64) (cuda.Buffer, error) {
	b := m.buffers[name]
	if b == nil || b.Size() < n {
		size := max(n, 4096)
		if b != nil {
			size += size / 4
			delete(m.buffers, name)
			if err := b.Free(); err != nil {
				return nil, err
			}
		}
		var err error
		if b, err = m.dev.Alloc(cuda.MemDevice, (size+4095)&^4095, "mini-batch "+name); err != nil {
			return nil, err
		}
		m.buffers[name] = b
	}
	return b, way.out(op, b.Ptr(), src, n)
}

// take copies a slot's mini-batch with its rows, of rowBytes each.
func (m *mirror) take(op context.Context, way *bridge, s *engine.Slot, rowBytes int64,
	of *prepare.Sampling) (mb *graph.MiniBatch, x cuda.Buffer, err error) {
	from := s.Batch
	m.mb = graph.MiniBatch{Epoch: from.Epoch, Index: from.Index, NumSeeds: from.NumSeeds,
		HopEnd: from.HopEnd, TypeEnd: from.TypeEnd, Blocks: m.mb.Blocks[:0]}
	rows := from.HopEnd[len(from.HopEnd)-1]
	hold := func(name string, b cuda.Buffer, n int64) (to cuda.Buffer) {
		if b != nil && err == nil {
			to, err = m.hold(op, way, name, b.Ptr(), n)
		}
		return to
	}
	for h, b := range from.Blocks {
		b.Indptr = hold(fmt.Sprintf("ends %d", h), b.Indptr, (b.NumLists()+1)*8)
		b.Src = hold(fmt.Sprintf("neighbours %d", h), b.Src, b.NumEdges*4)
		b.Weights = hold(fmt.Sprintf("weights %d", h), b.Weights, b.NumSrc*4)
		m.mb.Blocks = append(m.mb.Blocks, b)
	}
	m.mb.Degrees = hold("degrees", from.Degrees, rows*4)
	last := len(from.Blocks)
	// Scales and tables are looked up by numbers.
	if of.RowType.Scaled() || from.RowCount(last) < rows {
		m.mb.Nodes = hold("nodes", from.Nodes, rows*8)
		m.mb.SetRows(from, hold("row numbers", from.RowNumbers(), from.RowCount(last)*8))
	}
	x = hold("features", s.Features, from.RowCount(last)*rowBytes)
	of.Targets.Write(s.Seeds, m.labels.Bytes())
	return &m.mb, x, err
}

func (m *mirror) close() error {
	all := []error{m.labels.Free()}
	for _, b := range m.buffers {
		all = append(all, b.Free())
	}
	return errors.Join(all...)
}
