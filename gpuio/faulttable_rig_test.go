package gpuio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/faultinject"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// faultShape holds what SSDs with faults and the stack over them look like.
type faultShape struct {
	ssds, lba, rowBytes int
	rows                int64
	sms, mdts           int
	blank               bool          // the SSDs hold no rows yet
	ready               time.Duration // CAP.TO; 0: the proxy's
	ctrl                nvme.Options
	// inner makes the controller of SSD s with this content; nil: a proxy in RAM.
	inner func(t testing.TB, s int, image []byte) nvme.Bus
}

// faultRig is SSDs in RAM, each with a fault bus in front of it: the first one's has the faults,
// the others' have none. It works in a bubble of testing/synctest as well as outside. All that it
// gives out is given back in the end, and whatever cannot be is a failure.
type faultRig struct {
	*rig
	set *faultinject.Set
	// deadAdmin: an admin queue may have been left without answers, so that closing says so.
	deadAdmin bool
}

// closeError checks what a close returns. Whatever it says, memory that stays mapped or taken shows
// when the bus and the device are closed.
func (r *faultRig) closeError(err error, what string) {
	dead := errors.Is(err, nvme.ErrTimeout) || errors.Is(err, nvme.ErrProtocol) ||
		errors.Is(err, nvme.ErrFatal) || errors.Is(err, context.DeadlineExceeded)
	if nvmeGone(err) || r.deadAdmin && dead {
		if !strings.Contains(err.Error(), "never unmapped") {
			return
		}
	}
	r.leak(err, what)
}

// leak fails when something was not given back. After another failure that says nothing.
func (r *faultRig) leak(err error, what string) {
	if err != nil && !r.t.Failed() {
		faultSum.leaks.Add(1)
		assert.NoError(r.t, err, "%s: close", what)
	}
}

// faultSum counts for the last line of make test-faults.
var faultSum faultSummary

type faultSummary struct {
	kinds, stacks, clocks, good, not int
	scripts, badScripts              int64
	outcomes                         [scriptOutcomes]int64
	wrong, hangs, leaks              atomic.Int64
}

func (s *faultSummary) String() string {
	return fmt.Sprintf(
		"faults: %d kinds × %d stacks × %d clocks: %d as documented, %d not; %d scripts: %d healed, %d failed as they should, %d not hit, %d broke a rule; %d wrong bytes, %d hangs, %d leaks",
		s.kinds, s.stacks, s.clocks, s.good, s.not, s.scripts, s.outcomes[scriptHealed],
		s.outcomes[scriptFailed], s.outcomes[scriptUntouched], s.badScripts,
		s.wrong.Load(), s.hangs.Load(), s.leaks.Load())
}

// write leaves the line where make test-faults looks for it.
func (s *faultSummary) write(t *testing.T) {
	t.Log(s)
	if path := os.Getenv("FAULT_SUMMARY"); path != "" {
		assert.NoError(t, os.WriteFile(path, []byte(s.String()+"\n"), 0o600))
	}
}

// openFaultRig opens the device and the SSDs. Its error is that of the first SSD's controller.
func openFaultRig(t testing.TB, o faultShape, faults string) (*faultRig, error) {
	t.Helper()
	l, err := NewLayout(o.rows, o.rowBytes, o.ssds, o.lba)
	require.NoError(t, err)
	r := &faultRig{rig: &rig{t: t, layout: l}}
	r.set, err = faultinject.Parse(faults)
	require.NoError(t, err)
	r.faults = r.set
	dir := testrig.MemoryDir(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: o.sms})
	require.NoError(t, err)
	t.Cleanup(func() { r.leak(dev.Close(), "device") }) // names what is still open
	r.dev = dev
	for s := range o.ssds {
		path := filepath.Join(dir, fmt.Sprintf("ssd%d.img", s))
		var inner nvme.Bus
		if o.inner != nil {
			inner = o.inner(t, s, r.image(s, o.blank))
		} else {
			require.NoError(t, os.WriteFile(path, r.image(s, o.blank), 0o600))
			soft, err := proxy.Open(proxy.Config{Path: path, LBABytes: o.lba, RAM: true,
				MDTS: o.mdts})
			require.NoError(t, err)
			r.buses = append(r.buses, soft)
			inner = soft
		}
		var set *faultinject.Set
		if s == 0 {
			set = r.set
		}
		bus := testrig.WithReadyTimeout(faultbus.New(inner, set, faultbus.Options{}), o.ready)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		ctrl, err := nvme.Open(ctx, bus, o.ctrl)
		cancel()
		if err != nil {
			t.Cleanup(func() { r.leak(bus.Close(), "bus") })
			return r, err
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
			defer cancel()
			r.closeError(ctrl.Close(ctx), fmt.Sprintf("ssd%d", s))
		})
		r.ssds = append(r.ssds, &SSD{Ctrl: ctrl, Name: fmt.Sprintf("ssd%d", s), BackingPath: path,
			DataStart: rigDataStart})
	}
	return r, nil
}

// image is the content of SSD s.
func (r *faultRig) image(s int, blank bool) []byte {
	l := r.layout
	lba := int64(l.LBABytes)
	// padding must never show up in a row
	img := bytes.Repeat([]byte{0xA5}, int(max((rigDataStart+l.LBAsOn(s))*lba+4095, 4096)/4096*4096))
	if blank {
		return img
	}
	for row := int64(s); row < l.Rows; row += int64(l.SSDs) {
		_, pos, _, off := l.Locate(row)
		lo := (rigDataStart+int64(pos))*lba + int64(off)
		fillRow(row, img[lo:lo+int64(l.RowBytes)])
	}
	return img
}

// fired returns how often each fault of the script has hit, in its order.
func (r *faultRig) fired(parts []string) []int64 {
	counts := r.set.Counts()
	out := make([]int64, len(parts))
	for i, p := range parts {
		out[i] = counts[p]
	}
	return out
}

// closeReader closes a reader, having looked whether its queues are idle.
func (r *faultRig) closeReader(rd Reader) {
	inner := rd
	if c, ok := rd.(*checked); ok {
		inner = c.inner
	}
	if e, ok := inner.(*async); ok && e.queueBuf.host != nil && !r.t.Failed() {
		e.assertIdle(r.t)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	r.closeError(rd.Close(ctx), "the reader")
}

// assertIdle checks that no CID is taken and nobody is inside a queue; of an SSD that was given up,
// that no set waits for it.
func (e *async) assertIdle(t testing.TB) {
	t.Helper()
	pulled(t, e)
	for s := range e.ssds {
		for i := range e.perSSD {
			g := s*e.perSSD + i
			q := e.queue(g)
			if e.recoveryOf(s).unsafe.Load() {
				continue // in quarantine until Close
			}
			for slot := range uint32(maxSets) {
				assert.Zero(t, e.remaining(slot)[g], "queue %d: units of set %d that are not done",
					g, slot)
			}
			q.commands(func(cid uint32, _ *command) {
				faultSum.leaks.Add(1)
				assert.Fail(t, "leak", "queue %d: CID %d is still taken", g, cid)
			})
			assert.Equal(t, atomic.LoadUint64(&q.Issued), q.Completed+q.Dropped,
				"queue %d: commands issued, and completed or dropped", g)
			// It may be frozen for a completion that nobody waited for; the next set has it
			// recovered.
			assert.Zero(t, q.Own+q.Reap, "queue %d is held", g)
		}
	}
}

// wrong lists the set's indices whose rows are not in place. A byte between rows that was
// overwritten is a failure.
func (s *testSet) wrong() (bad []int) {
	mem := s.rs.Dst.Bytes()
	n := int64(s.r.layout.RowBytes)
	want := make([]byte, n+8)
	owner := make([]bool, len(mem))
	for i, p := range s.pos {
		lo := s.rs.DstOffset + int64(p)*s.rs.DstStride
		fillRow(s.ids[i], want[:n])
		if !bytes.Equal(want[:n], mem[lo:lo+n]) {
			bad = append(bad, i)
		}
		for j := lo; j < lo+n; j++ {
			owner[j] = true
		}
	}
	for j, b := range mem {
		if !owner[j] && b != s.gap {
			faultSum.wrong.Add(1)
			require.FailNow(s.r.t, "byte between rows overwritten", "at %d", j)
		}
	}
	return bad
}

// drop frees a set's buffers.
func (s *testSet) drop(rd Reader) {
	assert.NoError(s.r.t, Forget(rd, s.rs.Dst))
	for _, b := range []cuda.Buffer{s.rs.Dst, s.rowBuf, s.posBuf} {
		assert.NoError(s.r.t, b.Free())
	}
}

// nvmeGone reports whether an error says that a controller left its bus.
func nvmeGone(err error) bool { return errors.Is(err, nvme.ErrGone) }
