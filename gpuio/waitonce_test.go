package gpuio

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
)

type gateParams struct{ Word cuda.DevicePtr }

func init() {
	cuda.RegisterHost("gpuio_test_gate", func(_ *cuda.Block, p *gateParams) error {
		for atomic.LoadUint32(at[uint32](p.Word, 0)) == 0 {
			time.Sleep(50 * time.Microsecond)
		}
		return nil
	})
}

// refusing is a device whose checks do not end until a word changes, and of whose calls one fails
// after it has enqueued what it had to.
type refusing struct {
	cuda.Device
	t      testing.TB
	word   cuda.Buffer
	call   string       // launch or record
	before atomic.Int32 // calls of that kind that go well; then one fails
	stuck  bool         // checks did not end in time
}

func (d *refusing) NewStream(o cuda.StreamOptions) (cuda.Stream, error) {
	s, err := d.Device.NewStream(o)
	if err != nil || !strings.HasSuffix(o.Name, "check") {
		return s, err
	}
	return &refusingStream{s, d}, nil
}

func (d *refusing) refuse(call string, err error) error {
	if err == nil && call == d.call && d.before.Add(-1) == -1 {
		return errors.New("refused for the test")
	}
	return err
}

func (d *refusing) open() { atomic.StoreUint32(at[uint32](d.word.Ptr(), 0), 1) }

func (d *refusing) Close() error {
	require.NoError(d.t, d.word.Free())
	err := d.Device.Close()
	if d.stuck {
		require.ErrorContains(d.t, err, "gpuio checksums of a set")
		return nil
	}
	return err
}

type refusingStream struct {
	cuda.Stream
	d *refusing
}

func (s *refusingStream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	gate, err := s.d.Kernel("gpuio_test_gate")
	if err == nil {
		err = cuda.Launch(s.Stream, gate, cuda.LaunchConfig{Blocks: 1, Threads: 32},
			gateParams{s.d.word.Ptr()})
	}
	return s.d.refuse("launch", errors.Join(err, s.Stream.LaunchRaw(k, cfg, params, size)))
}

func (s *refusingStream) Record(e cuda.Event) error {
	if err := s.d.refuse("record", nil); err != nil {
		return err
	}
	return s.Stream.Record(e)
}

// refusingRig is a rig on such a device, whose streams wait for so long when they are closed. The
// checks of several sets may be one there, as on a GPU.
func refusingRig(t *testing.T, limit time.Duration, call string, before int32) (*rig, *refusing,
	*checked) {
	host, err := cuda.NewHost(cuda.HostOptions{SMs: 4, CloseTimeout: limit})
	require.NoError(t, err)
	d := &refusing{Device: host, t: t, call: call}
	d.before.Store(before)
	d.word, err = host.Alloc(cuda.MemPinned, 4, "gate")
	require.NoError(t, err)
	rigDevice = func(testing.TB) cuda.Device { return d }
	defer func() { rigDevice = nil }()
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 600, ram: true})
	inner, err := NewAsync(d, r.ssds, r.layout, AsyncOptions{Depth: 32, CoalesceBytes: -1})
	require.NoError(t, err)
	rd, err := NewChecked(d, inner, r.ssds, r.layout, r.sums())
	require.NoError(t, err)
	inner.(*async).host.sums = nil // rows are not checked as they land
	return r, d, rd.(*checked)
}

// TestRefusedChecks: where a check cannot be enqueued whole, nobody leaves it while a part of it
// runs.
func TestRefusedChecks(t *testing.T) {
	for name, v := range map[string]struct {
		joint  bool
		call   string
		before int32
	}{
		"one set":           {false, "launch", 0},
		"first of several":  {true, "launch", 0},
		"second of several": {true, "launch", 1},
		"event":             {true, "record", 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, d, rd := refusingRig(t, time.Minute, v.call, v.before)
			rd.chains = v.joint
			rng, ctx := rand.New(rand.NewPCG(1, 2)), testCtx(t)
			a, b := r.newSet(rng, 100, 512, 0), r.newSet(rng, 100, 512, 0)
			pa, err := rd.Submit(ctx, a.rs)
			require.NoError(t, err)
			pb, err := rd.Submit(ctx, b.rs)
			require.NoError(t, err)
			left := make(chan error, 1)
			go func() {
				once := WaitOnce(ctx, nil, []Pending{pa, pb})
				_, err := pa.Wait(ctx)
				if once {
					err = errors.Join(err, errors.New("the check was refused, and went well"))
				}
				left <- err
			}()
			select {
			case err := <-left:
				require.FailNow(t, "the set left a check that runs", "%v", err)
			case <-time.After(100 * time.Millisecond):
			}
			require.Error(t, rd.Forget(a.rs.Dst))
			d.open()
			if err := <-left; v.joint {
				require.NoError(t, err, "it is checked by itself")
			} else {
				require.ErrorContains(t, err, "100 rows were read and not checked: refused")
			}
			_, err = pb.Wait(ctx)
			require.NoError(t, err)
			a.check(nil)
			b.check(nil)
			a.read(rd)
			freeSets(rd, []*testSet{a, b})
			require.NoError(t, rd.Close(ctx))
		})
	}
}

// TestStuckCheck: a check that does not end keeps its memory, and destinations.
func TestStuckCheck(t *testing.T) {
	for name, joint := range map[string]bool{"one set": false, "several": true} {
		t.Run(name, func(t *testing.T) {
			r, d, rd := refusingRig(t, 20*time.Millisecond, "launch", 0)
			rd.chains, d.stuck = joint, true
			rng, ctx := rand.New(rand.NewPCG(1, 2)), testCtx(t)
			for range 2 {
				s := r.newSet(rng, 100, 512, 0)
				p, err := rd.Submit(ctx, s.rs)
				require.NoError(t, err)
				WaitOnce(ctx, nil, []Pending{p})
				_, err = p.Wait(ctx)
				require.ErrorIs(t, err, cuda.ErrStillRuns)
				require.Equal(t, errs.Device, errs.ClassOf(err))
				require.ErrorContains(t, rd.Forget(s.rs.Dst), "being checked")
				defer func() {
					require.NoError(t, errors.Join(s.rs.Dst.Free(), s.rowBuf.Free(),
						s.posBuf.Free()))
				}()
			}
			require.ErrorIs(t, rd.Close(ctx), cuda.ErrStillRuns)
			d.open()
			require.Eventually(t, func() bool {
				return !errors.Is(rd.stream.Close(), cuda.ErrStillRuns)
			}, time.Minute, time.Millisecond)
		})
	}
}

// TestStuckAtClose: a check of several sets that still runs when the reader is closed keeps its
// memory, and the destinations.
func TestStuckAtClose(t *testing.T) {
	r, d, rd := refusingRig(t, 20*time.Millisecond, "", 0)
	rd.chains, d.stuck = true, true
	s := r.newSet(rand.New(rand.NewPCG(1, 2)), 100, 512, 0)
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(testCtx(t), 200*time.Millisecond)
	defer cancel()
	require.False(t, WaitOnce(ctx, nil, []Pending{p}))
	require.ErrorIs(t, rd.Close(ctx), cuda.ErrStillRuns)
	require.NotNil(t, rd.tables)
	require.ErrorContains(t, rd.Forget(s.rs.Dst), "being checked")
	d.open()
	require.Eventually(t, func() bool {
		return !errors.Is(rd.stream.Close(), cuda.ErrStillRuns)
	}, time.Minute, time.Millisecond)
	require.NoError(t, errors.Join(s.rs.Dst.Free(), s.rowBuf.Free(), s.posBuf.Free()))
}
