package gpuio

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/faultinject"
	"helios/internal/ssdmodel"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// pciBus is a controller in software that is taken for a PCI function.
type pciBus struct{ nvme.Bus }

func (pciBus) Prepare() error     { return nil }
func (b pciBus) Unwrap() nvme.Bus { return b.Bus }

// speedRig is an SSD of so many reads and bytes a second.
func speedRig(t *testing.T, iops, mbs float64, o rigOptions) *rig {
	const ops = "{latency: {quantiles: [{q: 1, us: 20}], source: given}, " +
		"iops: {caps: [{bytes: 512, iops: %g}], source: given}, " +
		"bandwidth: {mb_s: %g, source: given}}\n"
	one := fmt.Sprintf(ops, iops, mbs)
	m, err := ssdmodel.Parse([]byte("name: given\nread: " + one + "write: " + one + "flush: " + one))
	require.NoError(t, err)
	o.ssds, o.lba, o.rowBytes, o.rows, o.ram = 1, 512, 512, 20000, true
	o.proxy = func(c *proxy.Config) { c.Model, c.PollDoorbells = m, o.wrap != nil }
	return newRig(t, o)
}

// TestMeasureSpeed: an SSD whose bytes bind is told from one whose commands do.
func TestMeasureSpeed(t *testing.T) {
	for _, c := range []struct {
		iops, mbs   float64
		least, most int
	}{{8e3, 8, 512, 2048}, {8e3, 100, 4096, 4096}} {
		r := speedRig(t, c.iops, c.mbs, rigOptions{})
		s, err := asyncStack.SpeedBy(r.layout, Hardware, asyncStack.rates(testCtx(t), r.dev, r.ssds,
			StackOptions{}))
		require.NoError(t, err)
		require.InEpsilon(t, c.iops, s.Commands, 0.3)
		require.InEpsilon(t, c.mbs*1e6, s.Bytes, 0.3)
		u, err := chooseUnits(r.layout, 128<<10, true, 0, 256, s)
		require.NoError(t, err)
		require.GreaterOrEqual(t, int(u.reach)*512, c.least)
		require.LessOrEqual(t, int(u.reach)*512, c.most)
	}
	spare, err := faultinject.Parse("error(op=read,sct=2,sc=0x81,times=3)")
	require.NoError(t, err)
	asPCI := func(b nvme.Bus) nvme.Bus { return pciBus{b} }
	for name, c := range map[string]struct {
		rig      rigOptions
		coalesce int
		known    bool
	}{
		"faults before it": {rigOptions{wrap: func(b nvme.Bus) nvme.Bus {
			return faultbus.New(pciBus{b}, spare, faultbus.Options{PollDoorbells: true})
		}}, 0, false},
		"a PCI function":          {rigOptions{wrap: asPCI}, 0, true},
		"no row shares a command": {rigOptions{wrap: asPCI}, -1, false},
		"software":                {rigOptions{}, 0, false},
		"reads fail": {rigOptions{wrap: asPCI, faults: "error(op=read,sct=2,sc=0x81)"}, 0,
			false},
	} {
		r := speedRig(t, 40e3, 400, c.rig)
		s, err := asyncStack.MeasureSpeed(testCtx(t), r.dev, r.ssds, r.layout,
			StackOptions{AsyncOptions: AsyncOptions{CoalesceBytes: c.coalesce}})
		require.NoError(t, err, name)
		require.Equal(t, c.known, s != Speed{}, name)
	}
	for f, n := range spare.Counts() {
		require.Zero(t, n, f)
	}
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 40000})
	for _, stack := range allStacks {
		for d, shares := range map[int]bool{0: true, -1: false} {
			s, err := stack.MeasureSpeed(testCtx(t), r.dev, r.ssds, r.layout,
				StackOptions{AsyncOptions: AsyncOptions{CoalesceBytes: d}})
			require.NoError(t, err)
			require.Equal(t, shares && stack.Coalesces, s.OfFiles && s.Commands > 0 && s.Bytes > 0,
				"%s of files", stack.Name)
		}
	}
}

// TestMeasureSilentSSD: an SSD that answers no reads costs a bounded time, and no reset.
func TestMeasureSilentSSD(t *testing.T) {
	r := speedRig(t, 40e3, 400, rigOptions{faults: "lost(op=read)",
		wrap: func(b nvme.Bus) nvme.Bus { return pciBus{b} }})
	began := time.Now()
	s, err := asyncStack.MeasureSpeed(testCtx(t), r.dev, r.ssds, r.layout,
		StackOptions{AsyncOptions: AsyncOptions{Timeout: 100 * time.Millisecond}})
	require.NoError(t, err)
	require.Zero(t, s)
	require.Less(t, time.Since(began), 10*time.Second)
	require.NoError(t, r.ssds[0].Ctrl.Health())
}
