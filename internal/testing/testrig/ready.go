package testrig

import (
	"time"

	"helios/nvme"
	"helios/nvme/faultbus"
)

// readyBus is a bus with faults whose controller says how long it takes to become ready.
type readyBus struct {
	*faultbus.Bus
	units uint32 // of 500 ms
}

// WithReadyTimeout is the bus with a CAP.TO of at most that time, rounded up to units of 500 ms: so
// long a client waits for a controller that does not become ready. 0 leaves it as it is.
func WithReadyTimeout(b *faultbus.Bus, timeout time.Duration) nvme.Bus {
	if timeout == 0 {
		return b
	}
	const unit = 500 * time.Millisecond
	return readyBus{b, uint32(min((timeout+unit-1)/unit, 255))}
}

// Unwrap implements nvme.Unwrapper.
func (b readyBus) Unwrap() nvme.Bus { return b.Bus }

// Read32 implements nvme.Bus. What is gone reads as all ones.
func (b readyBus) Read32(off uint32) (uint32, error) {
	v, err := b.Bus.Read32(off)
	if err != nil || v == 1<<32-1 {
		return v, err
	}
	switch off {
	case nvme.RegCAP:
		v = v&0x00ffffff | b.units<<24
	case nvme.RegCRTO:
		v = b.units | b.units<<16
	}
	return v, nil
}
