package sched

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/nvme"
)

type softBus struct{ nvme.Bus }

func (softBus) Kick(uint16) {}

type frontBus struct{ nvme.Bus }

func (frontBus) Kick(uint16)        {}
func (f frontBus) Unwrap() nvme.Bus { return f.Bus }

// A bus in front of another one says nothing of what the controller is.
func TestMemoryRung(t *testing.T) {
	soft, real := softBus{}, struct{ nvme.Bus }{}
	for _, c := range []struct {
		want  string
		buses []nvme.Bus
	}{
		{rungProxy, nil},
		{rungProxy, []nvme.Bus{soft, frontBus{soft}}},
		{rungPinned, []nvme.Bus{real, frontBus{real}}},
		{rungMixed, []nvme.Bus{real, soft}},
	} {
		require.Equal(t, c.want, rungOf(c.buses))
	}
	require.Equal(t, rungProxy, memoryRung([]*gpuio.SSD{{}}), "read through the kernel")
}
