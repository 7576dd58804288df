package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/serve"
)

// gpuRings puts mini-batches into memory of the GPU that clients import. The daemon waits for its
// copies before it tells a client of the batch, so no event has to cross between processes: one
// that the daemon records anew for the slot's next batch would be what an earlier wait of the
// client's stands for (cuIpcOpenEventHandle), and the wait is of a daemon that is ahead anyway.
type gpuRings struct {
	dev    cuda.Device
	shares cuda.ProcessSharer
	stream cuda.Stream
}

// gpuPatience bounds the wait for copies into a ring.
const gpuPatience = time.Minute

// openGPURings finds out whether a device can give memory to clients.
func openGPURings(dev cuda.Device, stream cuda.Stream) (*gpuRings, error) {
	s, ok := dev.(cuda.ProcessSharer)
	if !ok {
		return nil, errs.New(errs.Capability,
			"device cuda: this loader runs on %s, whose memory is the CPU's; give device cpu, or {device} cuda",
			dev.Info().Name)
	}
	b, err := s.AllocShared(1, "trial of a ring")
	if err != nil {
		return nil, err
	}
	return &gpuRings{dev: dev, shares: s, stream: stream}, b.Free()
}

// DeviceName is the name by which a client finds the GPU.
func (l *servedLoader) DeviceName() string {
	if l.gpu == nil {
		return ""
	}
	return "cuda:" + l.gpu.shares.PCIBusID()
}

// DeviceMemory makes a ring on the GPU.
func (l *servedLoader) DeviceMemory(bytes int64) (serve.DeviceMemory, error) {
	b, err := l.gpu.shares.AllocShared(bytes, "ring of a client")
	if err != nil {
		return nil, err
	}
	return &gpuRing{SharedBuffer: b, of: l.gpu}, nil
}

// gpuRing is one client's ring.
type gpuRing struct {
	cuda.SharedBuffer
	of    *gpuRings
	stage cuda.Buffer // pinned: what the CPU makes of a batch
}

// Put implements serve.DeviceMemory.
func (r *gpuRing) Put(offset int64, tensors []serve.Tensor, offsets []int64) error {
	need := int64(0)
	for _, t := range tensors {
		if t.CopyTo == nil {
			need += t.Bytes
		}
	}
	if err := r.room(need); err != nil {
		return err
	}
	staged := int64(0)
	for i, t := range tensors {
		to := r.Ptr() + cuda.DevicePtr(offset+offsets[i])
		if t.Bytes == 0 {
			continue
		}
		if t.CopyTo != nil {
			if err := t.CopyTo(uint64(to)); err != nil {
				return err
			}
			continue
		}
		t.Put(r.stage.Bytes()[staged:][:t.Bytes])
		if err := r.of.stream.Copy(to, r.stage.Ptr()+cuda.DevicePtr(staged), t.Bytes); err != nil {
			return err
		}
		staged += t.Bytes
	}
	ctx, cancel := context.WithTimeout(context.Background(), gpuPatience)
	defer cancel()
	if err := r.of.stream.Synchronize(ctx); err != nil {
		return errs.With(errs.Device, fmt.Errorf("a batch on its way to a client: %w", err))
	}
	return nil
}

// room sees to it that so many bytes can be staged.
func (r *gpuRing) room(bytes int64) (err error) {
	if r.stage != nil && r.stage.Size() >= bytes {
		return nil
	}
	if r.stage != nil {
		err = r.stage.Free()
		r.stage = nil
	}
	if err == nil {
		r.stage, err = r.of.dev.Alloc(cuda.MemPinned, max(bytes+bytes/2, 1), "staging for clients")
	}
	return err
}

// Close implements serve.DeviceMemory.
func (r *gpuRing) Close() error {
	var err error
	if r.stage != nil {
		err = r.stage.Free()
		r.stage = nil
	}
	return errors.Join(err, r.Free())
}
