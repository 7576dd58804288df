package gpuio

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/testing/testrig"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/vfiobus"
)

// Faults of controllers that we did not write: QEMU's behind VFIO, in a guest of tools/vmtest
// (scenario faults). HELIOS_VFIO_TEST names PCI addresses that are bound to vfio-pci;
// HELIOS_HOST_DIR is where the tests ask the host, which has QEMU's monitor, for what no guest can
// do.
//
// Reads go on all the time. Each row that is delivered is compared with what it must be, each wait
// has a deadline, and the host compares the images in the end: lines "EXTENT" say what was written.

// vfioAddrs are the controllers to test, at least n.
func vfioAddrs(t *testing.T, n int) []string {
	t.Helper()
	list := os.Getenv("HELIOS_VFIO_TEST")
	if list == "" {
		t.Skip(
			"HELIOS_VFIO_TEST names no PCI addresses of NVMe controllers that are bound to vfio-pci")
	}
	addrs := strings.Split(list, ",")
	require.GreaterOrEqual(t, len(addrs), n, "controllers in HELIOS_VFIO_TEST")
	return addrs
}

// vfioDomain is the process's: devices come and go.
var vfioDomain = sync.OnceValues(func() (*vfio.Domain, error) { return vfio.New(vfio.Options{}) })

func attachVFIO(t testing.TB, addr string) (*vfio.Device, *vfiobus.Bus) {
	t.Helper()
	dom, err := vfioDomain()
	require.NoError(t, err)
	dev, err := dom.Attach(addr)
	require.NoError(t, err)
	bus, err := vfiobus.Open(dev, vfiobus.Options{})
	require.NoError(t, err)
	return dev, bus
}

// askHost has the host do something and returns its answer.
func askHost(t testing.TB, format string, args ...any) string {
	t.Helper()
	dir := os.Getenv("HELIOS_HOST_DIR")
	if dir == "" {
		t.Skip("HELIOS_HOST_DIR: there is no host to ask")
	}
	line := fmt.Sprintf(format, args...)
	tmp, answer := filepath.Join(dir, "tmp"), filepath.Join(dir, "answer")
	require.NoError(t, os.WriteFile(tmp, []byte(line), 0o600))
	require.NoError(t, os.Rename(tmp, filepath.Join(dir, "ask")))
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(
		5 * time.Millisecond) {
		if b, err := os.ReadFile(answer); err == nil {
			require.NoError(t, os.Remove(answer))
			t.Logf("host: %s: %s", line, strings.TrimSpace(string(b)))
			return string(b)
		}
	}
	require.FailNow(t, "the host does not answer", line)
	return ""
}

// written remembers what was last put on each SSD.
var written sync.Map // address → sha256

// imprint puts an image on an SSD, from LBA 0 on, unless it is there.
func imprint(t testing.TB, addr string, image []byte) {
	t.Helper()
	sum := sha256.Sum256(image)
	if old, ok := written.Load(addr); ok && old == sum {
		return
	}
	written.Delete(addr)
	_, bus := attachVFIO(t, addr)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	require.NoError(t, err)
	b, err := NewBulk(ctx, c, 8)
	require.NoError(t, err)
	require.NoError(t, b.WriteAt(ctx, 0, image))
	require.NoError(t, b.Flush(ctx))
	require.NoError(t, b.Close(ctx))
	require.NoError(t, c.Close(ctx))
	written.Store(addr, sum)
	t.Logf("EXTENT %s %d %x", addr, len(image), sum)
}

// vfioRig is SSDs behind VFIO with a layout's rows, and a device.
type vfioRig struct {
	*rig
	addrs []string
	devs  []*vfio.Device
	once  sync.Once // closes the reader
}

// vfioRows counts the rows on the SSDs of a vfioRig.
const vfioRows = 8000

func newVFIORig(t *testing.T, addrs []string, wrap func(s int, b nvme.Bus) nvme.Bus) *vfioRig {
	t.Helper()
	_, err := vfioDomain() // before leaks are looked for
	require.NoError(t, err)
	testrig.CheckLeaks(t)
	return openVFIORig(t, addrs, wrap)
}

// openVFIORig is newVFIORig without a look for leaks: a device that left its bus is closed in the
// background, for more than a minute.
func openVFIORig(t *testing.T, addrs []string, wrap func(s int, b nvme.Bus) nvme.Bus) *vfioRig {
	t.Helper()
	l, err := NewLayout(vfioRows, 512, len(addrs), 512)
	require.NoError(t, err)
	r := &vfioRig{rig: &rig{t: t, layout: l}, addrs: addrs}
	images := &faultRig{rig: r.rig}
	r.dev, err = cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, r.dev.Close()) })
	for s, addr := range addrs {
		imprint(t, addr, images.image(s, false))
		dev, bus := attachVFIO(t, addr)
		var b nvme.Bus = bus
		if wrap != nil {
			b = wrap(s, b)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		ctrl, err := nvme.Open(ctx, b, nvme.Options{Timeout: 10 * time.Second})
		cancel()
		require.NoError(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := ctrl.Close(ctx); !nvmeGone(err) {
				assert.NoError(t, err, addr)
			}
		})
		r.devs = append(r.devs, dev)
		r.ssds = append(r.ssds, &SSD{Ctrl: ctrl, Name: fmt.Sprintf("ssd%d", s),
			DataStart: rigDataStart})
	}
	return r
}

// async makes the stack; its Close may say that an SSD is gone.
func (r *vfioRig) async(o AsyncOptions) Reader {
	r.t.Helper()
	o.CoalesceBytes = -1
	rd, err := NewAsync(r.dev, r.ssds, r.layout, o)
	require.NoError(r.t, err)
	r.t.Cleanup(func() { r.close(rd) })
	return rd
}

// close closes the reader, once. Destinations that an SSD may still write to are taken until then.
func (r *vfioRig) close(rd Reader) {
	r.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := rd.Close(ctx); !nvmeGone(err) {
			assert.NoError(r.t, err, "close the reader")
		}
	})
}

// traffic reads random sets, several at once, until it is ended.
type traffic struct {
	t    testing.TB
	stop atomic.Bool
	wg   sync.WaitGroup
	sets atomic.Int64 // read without an error

	mu   sync.Mutex
	errs []error
}

// load begins reads of random rows. lost names which rows may fail: then their sets' errors are
// kept, and the reads end. Every other row must be right.
func (r *vfioRig) load(rd Reader, lost func(row int64) bool) *traffic {
	tr := &traffic{t: r.t}
	var sets []*testSet
	for i := range 3 {
		rng := rand.New(rand.NewPCG(uint64(i), 11))
		sets = append(sets, r.newSet(rng, 500, 516, 4))
	}
	r.t.Cleanup(func() {
		tr.stop.Store(true)
		tr.wg.Wait()
		r.close(rd)
		for _, s := range sets {
			s.drop(rd)
		}
	})
	for _, s := range sets {
		tr.wg.Go(func() {
			for !tr.stop.Load() {
				s.poison()
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
				p, err := rd.Submit(ctx, s.rs)
				if err == nil {
					_, err = p.Wait(ctx)
					hung := ctx.Err() != nil
					bad := s.wrong()
					for _, i := range bad {
						if err == nil || lost == nil || !lost(s.ids[i]) {
							assert.Fail(r.t, "wrong bytes", "row %d, the set's error is %v",
								s.ids[i], err)
							tr.stop.Store(true)
						}
					}
					assert.False(r.t, hung, "a set hangs")
				}
				cancel()
				if err != nil {
					tr.mu.Lock()
					tr.errs = append(tr.errs, err)
					tr.mu.Unlock()
					return
				}
				tr.sets.Add(1)
			}
		})
	}
	return tr
}

// more waits until n more sets were read.
func (tr *traffic) more(n int64) {
	tr.t.Helper()
	n += tr.sets.Load()
	for end := time.Now().Add(90 * time.Second); tr.sets.Load() < n; time.Sleep(time.Millisecond) {
		tr.mu.Lock()
		failed := slices.Clone(tr.errs)
		tr.mu.Unlock()
		require.Empty(tr.t, failed)
		require.True(tr.t, time.Now().Before(end), "reads hang")
	}
}

// end stops the reads and returns their errors.
func (tr *traffic) end() []error {
	tr.stop.Store(true)
	tr.wg.Wait()
	return tr.errs
}

// failed waits until all readers ended with an error.
func (tr *traffic) failed() []error {
	tr.t.Helper()
	done := make(chan struct{})
	go func() { tr.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(90 * time.Second):
		require.FailNow(tr.t, "reads neither fail nor end")
	}
	return tr.errs
}

// Whatever resets the controller under load, reads come back and keep their bytes.
func TestVFIOResets(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	for _, c := range []struct {
		name string
		hit  func(r *vfioRig) error
		// reset: the stack notices and resets the controller. Of a reset that went well it learns
		// by what does not complete.
		reset   bool
		timeout time.Duration
	}{
		{"controller reset", func(r *vfioRig) error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			return r.ssds[0].Ctrl.Reset(ctx)
		}, false, 500 * time.Millisecond},
		{"function level reset", func(r *vfioRig) error { return r.devs[0].Reset() }, true,
			5 * time.Second},
		{"bus master cleared", func(r *vfioRig) error { return r.devs[0].DisableDMA() }, true,
			5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newVFIORig(t, addrs, nil)
			rd := r.async(AsyncOptions{Timeout: c.timeout, Resets: 20})
			tr := r.load(rd, nil)
			for range 3 {
				tr.more(4)
				require.NoError(t, c.hit(r))
			}
			tr.more(6)
			require.Empty(t, tr.end())
			st := rd.Stats()
			if c.reset {
				require.GreaterOrEqual(t, st.Resets, int64(1))
			}
			require.Zero(t, st.Failed)
			require.Zero(t, st.PerSSD[1].Errors+st.PerSSD[1].Resets, "the other SSD: %+v",
				st.PerSSD[1])
			t.Logf("%d sets of 500 rows; %d resets, %d timeouts, %d retries of %d commands",
				tr.sets.Load(), st.Resets, st.Timeouts, st.Retries, st.Commands)
		})
	}
}

// A controller that is fatal (CSTS.CFS) says so, and the words are a person's.
func TestVFIOFatalWords(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	r := newVFIORig(t, addrs, nil)
	c := r.ssds[0].Ctrl
	require.NoError(t, r.devs[0].DisableDMA())
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := c.SMART(ctx)
	require.ErrorIs(t, err, nvme.ErrFatal)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	for _, w := range []string{addrs[0], "controller fatal status", "CSTS",
		"reset the controller"} {
		require.Contains(t, err.Error(), w)
	}
	require.ErrorIs(t, c.Health(), nvme.ErrFatal)
	require.NoError(t, c.Reset(ctx))
	_, err = c.SMART(ctx)
	require.NoError(t, err)
}

// badLBAs are blocks that blkdebug fails on the first SSD: reads of the first always, of the second
// once.
func badLBAs(t *testing.T) (always, once int64) {
	a, b, ok := strings.Cut(os.Getenv("HELIOS_BAD_LBAS"), ",")
	if !ok {
		t.Skip("HELIOS_BAD_LBAS names no blocks that are bad")
	}
	always, err := strconv.ParseInt(a, 10, 64)
	require.NoError(t, err)
	once, err = strconv.ParseInt(b, 10, 64)
	require.NoError(t, err)
	return always, once
}

// A medium that fails for good fails these rows, with the block in words, and no others; one that
// fails once is read again.
func TestVFIOMediaErrors(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	always, once := badLBAs(t)
	r := newVFIORig(t, addrs, nil)
	rd := r.async(AsyncOptions{Timeout: 20 * time.Second})
	row := func(lba int64) int64 { return (lba - rigDataStart) * 2 }
	rng := rand.New(rand.NewPCG(1, 1))
	healthy := func() []int64 {
		var ids []int64
		for len(ids) < 300 {
			if id := rng.Int64N(vfioRows); id != row(always) {
				ids = append(ids, id)
			}
		}
		return ids
	}
	s := r.setOf(rng, append(healthy(), row(once)), 512, 0)
	s.read(rd)
	s.drop(rd)
	st := rd.Stats()
	require.EqualValues(t, 1, st.Errors, "the block that fails once")
	require.EqualValues(t, 1, st.Retries)

	s = r.setOf(rng, append(healthy(), row(always)), 512, 0)
	ctx := testCtx(t)
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	got, err := p.Wait(ctx)
	require.EqualValues(t, 300, got.Rows)
	var se *nvme.StatusError
	require.ErrorAs(t, err, &se)
	require.True(t, se.Status.Is(nvme.StatusUnrecoveredRead))
	require.Equal(t, errs.Device, errs.ClassOf(err))
	for _, w := range []string{"1 of 301 rows", fmt.Sprintf("row %d:", row(always)),
		fmt.Sprintf("LBA %d+1", always), "unrecovered read error (SCT 2h, SC 81h)",
		"heliosctl verify"} {
		require.Contains(t, err.Error(), w)
	}
	for _, i := range s.wrong() {
		require.Equal(t, row(always), s.ids[i])
	}
	s.drop(rd)
	t.Logf("%v", err)
}

// Reads past the end of an SSD: a dataset that this SSD is too short for.
func TestVFIOPastTheEnd(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	r := newVFIORig(t, addrs, nil)
	end := int64(r.ssds[0].Ctrl.Namespace().Blocks)
	r.ssds[0].DataStart = nvme.LBA(end - 100) // slots from 100 on are not there
	rd, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{CoalesceBytes: -1})
	if err != nil { // it is refused before the first read
		require.Contains(t, err.Error(), "ssd0")
		t.Logf("%v", err)
		return
	}
	defer func() { require.NoError(t, rd.Close(testCtx(t))) }()
	s := r.setOf(rand.New(rand.NewPCG(1, 1)), []int64{1, 3, 5, 300, 7}, 512, 0)
	ctx := testCtx(t)
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	got, err := p.Wait(ctx)
	require.EqualValues(t, 4, got.Rows)
	var se *nvme.StatusError
	require.ErrorAs(t, err, &se)
	require.True(t, se.Status.Is(nvme.StatusLBAOutOfRange))
	require.Contains(t, err.Error(),
		fmt.Sprintf("read LBA %d+1: LBA out of range (SCT 0h, SC 80h), not retryable", end+50))
	require.EqualValues(t, 1, rd.Stats().Errors, "it is not tried again")
	for _, i := range s.wrong() {
		require.EqualValues(t, 300, s.ids[i])
	}
	s.drop(rd)
	t.Logf("%v", err)
}

// Reads that the medium holds back for longer than the deadline: Abort, a new queue pair, and what
// was late meets no buffer of ours.
func TestVFIOStuck(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	r := newVFIORig(t, addrs, nil)
	rd := r.async(AsyncOptions{Timeout: 300 * time.Millisecond, Retries: 20, Resets: 20,
		QueuePairs: 2})
	tr := r.load(rd, nil)
	tr.more(3)
	throttle := func(iops int) {
		askHost(t,
			`qmp block_set_io_throttle {"device":"%s","bps":0,"bps_rd":0,"bps_wr":0,"iops":%d,"iops_rd":0,"iops_wr":0}`,
			os.Getenv("HELIOS_THROTTLE_ID"), iops)
	}
	throttle(150) // 256 reads take 1.7 s: more than the deadline and what an abort may take
	// By SSD it is counted as it happens, in the reader's totals as sets end.
	for end := time.Now().Add(60 * time.Second); rd.Stats().PerSSD[0].Recreated == 0; time.Sleep(
		5 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "no queue pair was given up: %+v",
			rd.Stats().PerSSD[0])
	}
	throttle(0)
	tr.more(6)
	require.Empty(t, tr.end())
	st := rd.Stats()
	require.Positive(t, st.Timeouts)
	require.Positive(t, st.Aborts)
	require.Positive(t, st.Recreated)
	require.Zero(t, st.Failed)
	t.Logf("%d sets; %d timeouts, %d aborts, %d new queue pairs, %d resets, %d retries",
		tr.sets.Load(), st.Timeouts, st.Aborts, st.Recreated, st.Resets, st.Retries)
}

// The catalogue of faults, injected in front of controllers that we did not write.
func TestVFIOFaultTable(t *testing.T) {
	addrs := vfioAddrs(t, 2)
	_, err := vfioDomain()
	require.NoError(t, err)
	inner := func(t testing.TB, s int, image []byte) nvme.Bus {
		imprint(t, addrs[s], image)
		_, bus := attachVFIO(t, addrs[s])
		return bus
	}
	only := os.Getenv("HELIOS_FAULTS") // a part of a name
	wants := maps.Clone(faultWants)
	// A reset through the bus (FLR) follows within the same reset of the driver, and helps.
	wants["not ready once after a reset"] = faultWant{counts: "resets=1 retries>=n"}
	wants["stays ready once"] = faultWant{counts: "resets=1 retries>=n"}
	n := 0
	for _, e := range faultinject.Catalogue() {
		if e.During != faultinject.Reading || !strings.Contains(e.Name, only) {
			continue
		}
		if strings.Contains(e.Fault, "late(") || strings.Contains(e.Fault, "slow(") {
			continue // times that an emulated machine does not keep
		}
		if strings.Contains(e.Fault, "error(op=read") && !strings.Contains(e.Name, "media error") {
			continue // statuses differ in numbers only; tools/nvmewalk has them all
		}
		n++
		t.Run(e.Name, func(t *testing.T) {
			began := time.Now()
			testrig.CheckLeaks(t)
			c := faultCase{e: e, want: wants[e.Name], stack: "async", clock: "wall", inner: inner}
			c.run(t)
			t.Logf("%.1f s", time.Since(began).Seconds())
		})
	}
	require.Positive(t, n)
}

// Completions that are lost between a controller and us, while all SSDs read.
func TestVFIOLostCompletions(t *testing.T) {
	addrs := vfioAddrs(t, 2)[:2]
	set, err := faultinject.Parse("lost(op=read,after=50,times=3);drop(op=read,after=400,times=2)")
	require.NoError(t, err)
	r := newVFIORig(t, addrs, func(s int, b nvme.Bus) nvme.Bus {
		if s == 0 {
			return faultbus.New(b, set, faultbus.Options{})
		}
		return faultbus.New(b, nil, faultbus.Options{})
	})
	rd := r.async(AsyncOptions{Timeout: time.Second})
	tr := r.load(rd, nil)
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		tr.more(1)
		c := set.Counts()
		done := true
		for _, n := range c {
			done = done && n >= 2
		}
		if done {
			break
		}
		require.True(t, time.Now().Before(end), "%v", c)
	}
	tr.more(4)
	require.Empty(t, tr.end())
	st := rd.Stats()
	require.GreaterOrEqual(t, st.Timeouts, int64(5))
	require.Zero(t, st.Failed)
}

// The device is asked back (hot unplug): reads end with words, the other SSD reads on, and the
// device leaves when it is closed.
func TestVFIOUnplug(t *testing.T) {
	vfioLeaves(t, func(id string) { askHost(t, `qmp device_del {"id":"%s"}`, id) },
		"the kernel asks for the device back")
	askHost(t, "event DEVICE_DELETED") // it left when we released it
}

// The device vanishes: no request, no answer.
func TestVFIOSurpriseRemoval(t *testing.T) {
	vfioLeaves(t, func(string) { switchSlotOff(t, os.Getenv("HELIOS_HOTPLUG_PORT")) })
}

// vfioLeaves has the last SSD of the list leave under load.
func vfioLeaves(t *testing.T, leave func(id string), words ...string) {
	addrs := vfioAddrs(t, 2)
	id := os.Getenv("HELIOS_HOTPLUG_ID")
	if id == "" {
		t.Skip("HELIOS_HOTPLUG_ID names no device that may leave")
	}
	addrs = []string{addrs[0], addrs[len(addrs)-1]}
	t.Run("under load", func(t *testing.T) {
		r := openVFIORig(t, addrs, nil)
		rd := r.async(AsyncOptions{Timeout: time.Second})
		tr := r.load(rd, func(row int64) bool { return row%2 == 1 })
		tr.more(3)
		began := time.Now()
		leave(id)
		all := tr.failed()
		t.Logf("reads ended %.1f s after the SSD left", time.Since(began).Seconds())
		require.Less(t, time.Since(began), 30*time.Second)
		for _, err := range all {
			require.ErrorIs(t, err, nvme.ErrGone)
			require.Equal(t, errs.Device, errs.ClassOf(err))
			var given *GivenUpError
			require.ErrorAs(t, err, &given)
			require.Equal(t, "ssd1", given.SSD)
			for _, w := range words {
				require.Contains(t, err.Error(), w)
			}
		}
		require.NotEmpty(t, all)
		require.NotEmpty(t, rd.Stats().PerSSD[1].GivenUp)
		require.Empty(t, rd.Stats().PerSSD[0].GivenUp)
		t.Logf("%v", all[0])
		// Rows of the SSD that is there are read on.
		var ids []int64
		for i := int64(0); i < 200; i++ {
			ids = append(ids, 2*i)
		}
		s := r.setOf(rand.New(rand.NewPCG(4, 4)), ids, 512, 0)
		s.read(rd)
		s.drop(rd)
	})
}

// switchSlotOff takes the power from a hot-plug slot in its port's Slot Control register (PCI
// Express base specification, section 7.5.3.10): the device is gone at once, as one that is pulled
// out.
func switchSlotOff(t *testing.T, port string) {
	t.Helper()
	f, err := os.OpenFile("/sys/bus/pci/devices/"+port+"/config", os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	var cfg [256]byte
	_, err = f.ReadAt(cfg[:], 0)
	require.NoError(t, err)
	off := int(cfg[0x34])
	for off != 0 && cfg[off] != 0x10 {
		off = int(cfg[off+1])
	}
	require.NotZero(t, off, "a PCI Express capability")
	const indicatorOff, controllerOff = 3 << 8, 1 << 10
	ctl := uint16(cfg[off+0x18]) | uint16(cfg[off+0x19])<<8
	ctl |= indicatorOff | controllerOff
	_, err = f.WriteAt([]byte{byte(ctl), byte(ctl >> 8)}, int64(off)+0x18)
	require.NoError(t, err)
}
