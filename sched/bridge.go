package sched

import (
	"context"
	"errors"
	"fmt"

	"helios/cuda"
	"helios/graph"
	"helios/sched/prepare"
)

// bridgeChunk is how much of a copy between two GPUs is in pinned memory at a time, twice.
const bridgeChunk = 4 << 20

// bridge copies between the engine's device and a replica's. GPUs have no memory in common that
// every machine has a way between, so each piece goes through pinned memory, while the one before
// it leaves there. Host devices share the CPU's.
type bridge struct {
	near, far cuda.Stream // nil: both are host devices
	stage     cuda.Buffer // pinned, by the near device
	shared    cuda.Buffer // the same, for the far one
}

// newBridge is a way from the device near to the device far.
func newBridge(near, far cuda.Device) (b *bridge, err error) {
	b = &bridge{}
	if near.Info().Backend == "host" && far.Info().Backend == "host" {
		return b, nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.near, err = near.NewStream(cuda.StreamOptions{Name: "to replicas"}); err != nil {
		return b, err
	}
	if b.far, err = far.NewStream(cuda.StreamOptions{Name: "from the first"}); err != nil {
		return b, err
	}
	if b.stage, err = near.Alloc(cuda.MemPinned, 2*bridgeChunk, "copies to replicas"); err != nil {
		return b, err
	}
	b.shared, err = cuda.Share(far, b.stage)
	return b, err
}

// out copies from the engine's device to the replica's and waits; back the other way. All work on
// both ends has to have come to its end.
func (b *bridge) out(op context.Context, dst, src cuda.DevicePtr, n int64) error {
	if b.near == nil {
		copy(cuda.View[byte](dst, n), cuda.View[byte](src, n))
		return nil
	}
	return b.move(op, b.near, b.far, b.stage, b.shared, dst, src, n)
}

func (b *bridge) back(op context.Context, dst, src cuda.DevicePtr, n int64) error {
	if b.near == nil {
		copy(cuda.View[byte](dst, n), cuda.View[byte](src, n))
		return nil
	}
	return b.move(op, b.far, b.near, b.shared, b.stage, dst, src, n)
}

func (b *bridge) move(op context.Context, from, to cuda.Stream, in, out cuda.Buffer, dst,
	src cuda.DevicePtr, n int64) error {
	for at, half := int64(0), cuda.DevicePtr(0); at < n; at += bridgeChunk {
		size := min(bridgeChunk, n-at)
		if err := from.Copy(in.Ptr()+half, src+cuda.DevicePtr(at), size); err != nil {
			return err
		}
		if err := from.Synchronize(op); err != nil {
			return err
		}
		// The piece before this one has left the other half.
		if err := to.Synchronize(op); err != nil {
			return err
		}
		if err := to.Copy(dst+cuda.DevicePtr(at), out.Ptr()+half, size); err != nil {
			return err
		}
		half ^= bridgeChunk
	}
	return to.Synchronize(op)
}

func (b *bridge) close() error {
	var all []error
	for _, s := range []cuda.Stream{b.far, b.near} {
		if s != nil {
			all = append(all, s.Close())
		}
	}
	for _, m := range []cuda.Buffer{b.shared, b.stage} {
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
	labels  cuda.Buffer // pinned int32[batch]
}

func newMirror(dev cuda.Device, batch int) (m *mirror, err error) {
	m = &mirror{dev: dev, buffers: map[string]cuda.Buffer{}}
	m.labels, err = dev.Alloc(cuda.MemPinned, int64(batch)*4, "labels")
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
func (m *mirror) take(op context.Context, way *bridge, s *slot, rowBytes int64,
	of *prepare.Sampling) (mb *graph.MiniBatch, x cuda.Buffer, err error) {
	from := s.mb
	m.mb = graph.MiniBatch{Epoch: from.Epoch, Index: from.Index, NumSeeds: from.NumSeeds,
		HopEnd: from.HopEnd, Blocks: m.mb.Blocks[:0]}
	rows := from.HopEnd[len(from.HopEnd)-1]
	hold := func(name string, b cuda.Buffer, n int64) (to cuda.Buffer) {
		if b != nil && err == nil {
			to, err = m.hold(op, way, name, b.Ptr(), n)
		}
		return to
	}
	for h, b := range from.Blocks {
		b.Indptr = hold(fmt.Sprintf("ends %d", h), b.Indptr, (b.NumDst+1)*8)
		b.Src = hold(fmt.Sprintf("neighbours %d", h), b.Src, b.NumEdges*4)
		b.Weights = hold(fmt.Sprintf("weights %d", h), b.Weights, b.NumSrc*4)
		m.mb.Blocks = append(m.mb.Blocks, b)
	}
	m.mb.Degrees = hold("degrees", from.Degrees, rows*4)
	x = hold("features", s.x, rows*rowBytes)
	of.WriteLabels(s.seeds, m.labels)
	return &m.mb, x, err
}

func (m *mirror) close() error {
	all := []error{m.labels.Free()}
	for _, b := range m.buffers {
		all = append(all, b.Free())
	}
	return errors.Join(all...)
}
