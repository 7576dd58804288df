package difftest

import (
	"errors"

	"helios/cuda"
)

// Memory that grows is compared as far as it is there. Its twin is all there from the beginning.

var (
	_ cuda.Reserver    = (*Device)(nil)
	_ cuda.MemoryMeter = (*Device)(nil)
	_ cuda.Growable    = (*growable)(nil)
)

// FreeMemory implements cuda.MemoryMeter: the driver's.
func (d *Device) FreeMemory() (free, total int64, err error) {
	if m, ok := d.gpu.(cuda.MemoryMeter); ok {
		return m.FreeMemory()
	}
	return 0, 0, errors.New("the device under test does not know its free memory")
}

type growable struct {
	*buffer
	g cuda.Growable
}

// live returns how much of a buffer there is to compare.
func (b *buffer) live() int64 {
	if g, ok := b.gpu.(cuda.Growable); ok {
		return g.Backed()
	}
	return b.size
}

// Reserve implements cuda.Reserver.
func (d *Device) Reserve(size int64, purpose string) (cuda.Growable, error) {
	g, err := cuda.Reserve(d.gpu, size, purpose)
	if err != nil {
		return nil, err
	}
	h, err := d.host.Alloc(cuda.MemDevice, size, purpose) // lazy: it costs what is touched
	if err != nil {
		return nil, errors.Join(err, g.Free())
	}
	return &growable{d.add(g, h, false), g}, nil
}

func (b *growable) Backed() int64 { return b.g.Backed() }

// Grow implements cuda.Growable. New memory is zero on both sides.
func (b *growable) Grow(bytes int64) error {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	had := b.g.Backed()
	if err := b.g.Grow(bytes); err != nil {
		return err
	}
	clear(b.host.Bytes()[had:b.g.Backed()])
	return nil
}
