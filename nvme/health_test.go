package nvme

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHealth(t *testing.T) {
	boom := errors.New("bus error")
	for _, s := range []struct {
		name  string
		spoil func(f *fakeBus)
		is    error
		want  string
	}{
		{"good", func(*fakeBus) {}, nil, ""},
		{"fatal status", func(f *fakeBus) { f.csts |= 2 }, ErrFatal,
			"controller fatal status (CSTS 00000003h); reset"},
		{"all ones", func(f *fakeBus) { f.gone = true }, ErrGone,
			"device is gone (CSTS FFFFFFFFh); check that"},
		{"registers fault", func(f *fakeBus) { f.readErr = boom }, ErrGone, "bus error"},
		{"reset by somebody", func(f *fakeBus) { f.cc, f.csts = 0, 0 }, ErrFatal,
			"left the ready state"},
		{"all zeros", func(f *fakeBus) { f.cc, f.csts, f.vs = 0, 0, 1<<32 }, ErrGone,
			"device is gone"},
	} {
		t.Run(s.name, func(t *testing.T) {
			f := newFake()
			c := open(t, f, quick)
			var was fakeRegisters
			f.with(func() { was = f.fakeRegisters; s.spoil(f) })
			err := c.Health()
			f.with(func() { f.fakeRegisters = was })
			if s.is == nil {
				require.NoError(t, err)
				return
			}
			var fatal *FatalError
			if !errors.Is(err, s.is) || !errors.As(err, &fatal) || !strings.Contains(err.Error(),
				s.want) {
				t.Errorf("error %v; want %q", err, s.want)
			}
		})
	}
}

// A controller that is given up is disabled: nothing of its queues is left, commands are refused,
// and a reset brings it back.
func TestDisable(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	qp, err := c.CreateQueuePair(t.Context(), 8)
	require.NoError(t, err)
	gen := c.Generation()
	require.NoError(t, c.Disable(t.Context()))
	if f.cc&1 != 0 || c.Generation() != gen+1 {
		t.Errorf("CC %#x, generation %d, was %d", f.cc, c.Generation(), gen)
	}
	if _, err := c.SMART(t.Context()); err == nil || !strings.Contains(err.Error(),
		"was disabled, since it was given up") {
		t.Errorf("command: %v", err)
	}
	if err := c.Health(); err != nil {
		t.Errorf("a controller that is disabled on purpose: %v", err)
	}
	if err := c.DeleteQueuePair(t.Context(), qp); err != nil {
		t.Error(err)
	}
	require.NoError(t, c.Reset(t.Context()))
	if _, err := c.SMART(t.Context()); err != nil {
		t.Error(err)
	}
	f.with(func() { f.neverIdle = true })
	if err := c.Disable(t.Context()); !errors.Is(err, ErrTimeout) {
		t.Errorf("RDY stays 1: %v", err)
	}
	f.with(func() { f.neverIdle = false })
	if err := c.Reset(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.Disable(t.Context()); err != nil {
		t.Error(err) // Close finds it so
	}
}

// After a reset an ID whose owner may not know that his queue is gone is not given to others.
func TestQueueIDsAfterReset(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	old, err := c.CreateQueuePair(t.Context(), 8)
	require.NoError(t, err)
	require.NoError(t, c.Reset(t.Context()))
	a, err := c.CreateQueuePair(t.Context(), 8)
	if err != nil || a.ID == old.ID {
		t.Fatalf("queue %v for another owner, %d is still rung: %v", a, old.ID, err)
	}
	require.NoError(t, c.DeleteQueuePair(t.Context(), old))
	b, err := c.CreateQueuePair(t.Context(), 8)
	if err != nil || b.ID != old.ID {
		t.Errorf("queue %v, want ID %d again: %v", b, old.ID, err)
	}
}

// A reset is bounded by what the controller claims for itself.
func TestResetTimeout(t *testing.T) {
	f := newFake()
	c := open(t, f, quick)
	if got, want := c.ResetTimeout(), 3*500*time.Millisecond+2*60*time.Millisecond; got != want {
		t.Errorf("%v, want %v", got, want)
	}
	f.with(func() { f.neverReady = true })
	began := time.Now()
	if err := c.Reset(context.Background()); !errors.Is(err, ErrTimeout) {
		t.Errorf("never ready: %v", err)
	}
	if d := time.Since(began); d > c.ResetTimeout() {
		t.Errorf("took %v", d)
	}
	f.with(func() { f.neverReady = false })
	if err := c.Reset(t.Context()); err != nil {
		t.Error(err)
	}
}
