//go:build linux && (amd64 || arm64) && !nocuda

package sched

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/cuda/driver"
	"helios/internal/testing/difftest"
	"helios/sched/prepare"
	"helios/sched/report"
)

// tally is a device of the driver that counts launches by kernel, and waits of the CPU, records,
// copies and fills by stream.
type tally struct {
	*driver.Device
	mu sync.Mutex
	n  map[string]int
}

func (d *tally) add(format string, a ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.n[fmt.Sprintf(format, a...)]++
}

func (d *tally) counts() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.n)
}

func (d *tally) NewStream(opt cuda.StreamOptions) (cuda.Stream, error) {
	s, err := d.Device.NewStream(opt)
	if err != nil {
		return nil, err
	}
	return &tallyStream{s, d, opt.Name}, nil
}

func (d *tally) NewEvent() (cuda.Event, error) {
	e, err := d.Device.NewEvent()
	return &tallyEvent{e, d, ""}, err
}

func (d *tally) NewTimer() (cuda.Event, error) {
	d.add("timer")
	e, err := d.Device.NewTimer()
	return &tallyEvent{e, d, ""}, err
}

type tallyStream struct {
	cuda.Stream
	d    *tally
	name string
}

func (s *tallyStream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	s.d.add("%s: launch %s", s.name, k.Name())
	return s.Stream.LaunchRaw(k, cfg, params, size)
}

func (s *tallyStream) LaunchSteps(q *cuda.Steps) error {
	s.d.add("%s: launch steps", s.name)
	return cuda.LaunchSteps(s.Stream, q)
}

func (s *tallyStream) Copy(dst, src cuda.DevicePtr, bytes int64) error {
	s.d.add("%s: copy", s.name)
	return s.Stream.Copy(dst, src, bytes)
}

func (s *tallyStream) Fill(dst cuda.DevicePtr, value byte, bytes int64) error {
	s.d.add("%s: fill", s.name)
	return s.Stream.Fill(dst, value, bytes)
}

func (s *tallyStream) Record(e cuda.Event) error {
	s.d.add("%s: record", s.name)
	own := e.(*tallyEvent)
	own.of = s.name
	return s.Stream.Record(own.Event)
}

func (s *tallyStream) Wait(e cuda.Event) error { return s.Stream.Wait(e.(*tallyEvent).Event) }

func (s *tallyStream) Synchronize(ctx context.Context) error {
	s.d.add("%s: wait", s.name)
	return s.Stream.Synchronize(ctx)
}

type tallyEvent struct {
	cuda.Event
	d  *tally
	of string
}

func (e *tallyEvent) Synchronize(ctx context.Context) error {
	e.d.add("%s: wait", e.of)
	return e.Event.Synchronize(ctx)
}

// TestLaunchesOfABatch: what a mini-batch of helios costs on a GPU beside its kernels' own time. In
// each wait of the CPU its stage stands still for a round trip over the link, so one more has to be
// worth it. No event is timed but for a timeline.
func TestLaunchesOfABatch(t *testing.T) {
	if difftest.Library(t) == "" {
		t.Skip("counts calls, whatever the GPU")
	}
	d, _, s := fiberRig(t)
	for name, v := range map[string]struct {
		coalesce int
		parts    int // looked up and read in an epoch of 3 mini-batches
	}{
		"hop by hop": {-1, 9},
		"joined":     {0, 3 + 2}, // from the second mini-batch on
	} {
		t.Run(name, func(t *testing.T) {
			cfg := onFibers()
			cfg.GPUCache, cfg.CPUCache, cfg.NoEval = percent(10), percent(20), true
			cfg.CoalesceBytes = v.coalesce
			dev, _ := gpu(t, "")
			c := &tally{Device: dev.(*driver.Device), n: map[string]int{}}
			var before, after map[string]int
			res, err := Train(context.Background(), cfg, prepare.Inputs{Dev: c, Dataset: d,
				SSDs: s.ssds}, report.Observer{Epoch: func(report.EpochResult) {
				before, after = after, c.counts()
			}})
			require.NoError(t, err)
			require.NoError(t, dev.Close())
			require.Zero(t, after["timer"])
			n := res.Epochs[1].Batches
			require.Equal(t, 3, n)
			for k, v := range before {
				after[k] -= v
			}
			const drained = 1 // each stream at the end of an epoch
			// A complete kernel that meets its limit is launched, and waited for, again, and the
			// rows that it had to leave are checked again.
			again := after["complete: launch complete"] - v.parts
			require.Equal(t, again, after["complete: wait"])
			for stream, waits := range map[string]int{
				"sample": 2*n + drained,     // the size of each hop
				"lookup": v.parts + drained, // where the rows are
				"gather": drained,
			} {
				require.Equal(t, waits, after[stream+": wait"], stream)
			}
			if again == 0 { // reads, their checks, and gathers
				require.Equal(t, n, after["async check: wait"])
			}
			// The parameters of the best epoch take a copy and a wait each. Those of steps are for
			// marks, behind which the next step may be.
			require.Equal(t, n+drained, after["train: wait"]-after["train: copy"])
			require.Equal(t, n, after["train: record"])
			sum := func(what string) (total int) {
				for k, v := range after {
					if strings.Contains(k, what) {
						total += v
					}
				}
				return total
			}
			require.Equal(t, n*(1+2*5), sum("sample: launch"))
			require.Equal(t, n, sum("train: launch"))
			for _, k := range []string{"lookup: launch lookup", "submit: launch submit"} {
				require.Equal(t, v.parts, after[k], k)
			}
			require.LessOrEqual(t, v.parts, after["async check: launch check_rows"])
			require.LessOrEqual(t, after["gather: launch gather"], v.parts)
			// A set goes down before its kernel, and comes back behind complete.
			require.Equal(t, v.parts, after["submit: copy"])
			require.Equal(t, after["complete: launch complete"], after["complete: copy"])
			others := after["train: copy"] + after["submit: copy"] + after["complete: copy"] +
				after["gpuio state: copy"] // of statistics
			require.Equal(t, n, sum(": copy")-others, "of seeds")
			require.Zero(t, sum(": fill"))
		})
	}
}
