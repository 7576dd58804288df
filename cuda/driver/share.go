package driver

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
)

var _ cuda.ProcessSharer = (*Device)(nil)

// shared is the file of a buffer whose memory other processes may use: a single piece, made with a
// handle that can be exported. Its file is ours to close.
type shared struct{ fd int }

// PCIBusID implements cuda.ProcessSharer.
func (d *Device) PCIBusID() string { return d.pci }

// AllocShared implements cuda.ProcessSharer.
func (d *Device) AllocShared(size int64, purpose string) (_ cuda.SharedBuffer, err error) {
	if !d.caps.GrowingMemory || !d.caps.SharedMemory {
		return nil, errs.New(errs.Capability,
			"device %s: its driver gives no memory to other processes (cuMemExportToShareableHandle); it takes CUDA 10.2 or later",
			d.info.Name)
	}
	g, err := d.Reserve(size, purpose)
	if err != nil {
		return nil, err
	}
	b := g.(*buffer)
	b.grows.shared = &shared{fd: -1}
	if err := b.Grow(size); err != nil {
		return nil, errors.Join(err, b.Free())
	}
	return sharedBuffer{b}, nil
}

type sharedBuffer struct{ *buffer }

// File implements cuda.SharedBuffer.
func (b sharedBuffer) File() (fd int, bytes int64) {
	b.grows.mu.Lock()
	defer b.grows.mu.Unlock()
	return b.grows.shared.fd, b.grows.mapped.Load()
}

// export keeps the file of a piece that was just made. It runs within enter.
func (s *shared) export(d *Device, h memHandle) error {
	fd, r := d.api.MemExportToShareableHandle(h, handleFD)
	if r != success {
		return d.failed("cuMemExportToShareableHandle", r)
	}
	unix.CloseOnExec(int(fd))
	s.fd = int(fd)
	return nil
}

// close closes the file; the memory goes with the last process that has it mapped.
func (s *shared) close() error {
	if s == nil || s.fd < 0 {
		return nil
	}
	err := unix.Close(s.fd)
	s.fd = -1
	if err != nil {
		return fmt.Errorf("close the file of shared memory: %w", err)
	}
	return nil
}
