package driver

import (
	"fmt"

	"helios/cuda"
)

var (
	_ cuda.MemoryMeter = (*Device)(nil)
	_ cuda.Reserver    = (*Device)(nil)
	_ cuda.Growable    = (*buffer)(nil)
)

// FreeMemory implements cuda.MemoryMeter: what the driver says, which knows all processes.
func (d *Device) FreeMemory() (free, total int64, err error) {
	if err := d.enter(); err != nil {
		return 0, 0, err
	}
	defer d.leave()
	free, total, r := d.api.MemGetInfo()
	if r != success {
		return 0, 0, fmt.Errorf("device %s: %w", d.info.Name, d.failed("cuMemGetInfo_v2", r))
	}
	return free, total, nil
}

// Reserve implements cuda.Reserver.
func (d *Device) Reserve(size int64, purpose string) (cuda.Growable, error) {
	b, err := d.Alloc(cuda.MemDevice, size, purpose)
	if err != nil {
		return nil, err
	}
	return b.(*buffer), nil
}

// Backed implements cuda.Growable.
func (b *buffer) Backed() int64 { return b.size }

// Grow implements cuda.Growable.
func (b *buffer) Grow(bytes int64) error {
	if bytes < 0 || bytes > b.size {
		return fmt.Errorf("device %s: grow %s to %d bytes: %d are reserved", b.d.info.Name, b.purpose, bytes, b.size)
	}
	return nil
}

// Shrink implements cuda.Growable.
func (b *buffer) Shrink(bytes int64) error {
	if bytes < 0 || bytes > b.size {
		return fmt.Errorf("device %s: shrink %s to %d bytes: %d are reserved", b.d.info.Name, b.purpose, bytes, b.size)
	}
	return nil
}
