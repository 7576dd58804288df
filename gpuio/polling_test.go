package gpuio

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/nvme"
	"helios/nvme/proxy"
)

// leavingBus is a polled bus whose device the kernel may ask for.
type leavingBus struct {
	pollBus
	asked *atomic.Bool
}

func (b leavingBus) Leaving() error {
	if b.asked.Load() {
		return errs.New(errs.Device, "the kernel asks for it: %w", nvme.ErrGone)
	}
	return nil
}

// TestLeavingSSD: what is in flight is read, and nothing more is submitted.
func TestLeavingSSD(t *testing.T) {
	var asked atomic.Bool
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 64, ram: true,
		proxy: func(c *proxy.Config) { c.PollDoorbells = true },
		wrap:  func(b nvme.Bus) nvme.Bus { return leavingBus{pollBus{b}, &asked} }})
	ctx := testCtx(t)
	bulk, err := NewBulk(ctx, r.ssds[0].Ctrl, 4)
	require.NoError(t, err)
	for _, name := range []string{"async", "sync"} {
		asked.Store(false)
		var rd Reader
		var err error
		if name == "sync" {
			rd, err = NewSync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 8})
		} else {
			rd, err = NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 8})
		}
		require.NoError(t, err)
		s := r.newSet(rand.New(rand.NewPCG(6, 6)), 60, 512, 0)
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		asked.Store(true)
		_, err = p.Wait(ctx)
		require.NoError(t, err)
		s.check(nil)
		_, err = rd.Submit(ctx, s.rs)
		var given *GivenUpError
		require.ErrorAs(t, err, &given)
		require.ErrorIs(t, err, nvme.ErrGone)
		require.Equal(t, errs.Device, errs.ClassOf(err))
		require.ErrorContains(t, fmt.Errorf("%s", rd.Stats().PerSSD[0].GivenUp),
			"the kernel asks for it")
		s.free(rd)
		require.NoError(t, rd.Close(ctx))
	}
	buf := make([]byte, 512)
	require.ErrorIs(t, bulk.ReadAt(ctx, 0, buf), nvme.ErrGone)
	require.NoError(t, bulk.Close(ctx))
	asked.Store(false)
}

// TestNapper: looks come at once at first, later after a part of the time that has passed, and no
// pause is longer than asked for.
func TestNapper(t *testing.T) {
	var n napper
	looks := 0
	for began := time.Now(); time.Since(began) < 40*time.Millisecond; looks++ {
		n.pause(time.Second)
	}
	require.Greater(t, looks, 20)
	n = napper{began: nanotime() - int64(time.Hour)}
	began := time.Now()
	n.pause(time.Microsecond)
	n.pause(0)
	n.pause(-time.Second)
	require.Less(t, time.Since(began), time.Second)
}
