package gpuio

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
)

// The fault table: every entry of faultinject.Catalogue against every stack, on the wall's clock
// and on one that only passes while all goroutines wait (testing/synctest). Stack, engine, kernels,
// recovery and controllers are the real ones on both. Each must come out as its entry says, with
// the counters below; no byte that was delivered may be wrong, nothing may hang, and everything is
// given back.
//
// The stacks cpu and mmap read the file behind the SSD: no fault of a bus concerns their reads, and
// that is what is checked of them. Opening, loading and admin commands are the controller's with
// any stack.
//
// FAULT_WALL=1 adds the wall's clock, FAULT_SCRIPTS=n chooses the number of random scripts
// (faultscript_test.go), FAULT_SUMMARY names a file for the line that make test-faults ends with.

// faultWant holds what an entry shows besides its class.
type faultWant struct {
	// counts are the Stats that are not zero, as "errors=n retries=3n/4": n is how often the first
	// fault of the entry has hit, m the second; "timeouts>=n" is a bound.
	counts string
	// err holds what rows, or opening or loading, fail with.
	err error
	// stays: a row stays wrong at each try.
	stays bool
	// unsafe: nothing can end what the SSD may still write, so buffers stay taken until Close.
	unsafe bool
}

var (
	wantStatus   = &nvme.StatusError{}
	wantTimeout  = &TimeoutError{}
	wantChecksum = &ChecksumError{}
	wantAdmin    = &nvme.TimeoutError{}
	wantProtocol = &nvme.ProtocolError{}
)

var faultWants = map[string]faultWant{
	"generic error":                {counts: "errors=n retries=n"},
	"generic error, not retryable": {counts: "errors=n failed=n", err: wantStatus},
	"generic error that stays": {counts: "errors=n retries=3n/4 failed=n/4",
		err: wantStatus},
	"data transfer error":                   {counts: "errors=n retries=n"},
	"abort nobody asked for":                {counts: "errors=n retries=n"},
	"aborted by queue deletion":             {counts: "errors=n retries=n"},
	"namespace not ready":                   {counts: "errors=n retries=n"},
	"LBA out of range":                      {counts: "errors=n failed=n", err: wantStatus},
	"command specific error":                {counts: "errors=n retries=n"},
	"command specific error, not retryable": {counts: "errors=n failed=n", err: wantStatus},
	"media error":                           {counts: "errors=n retries=n"},
	"media error, not retryable":            {counts: "errors=n failed=n", err: wantStatus},
	"media error that stays": {counts: "errors=n retries=3n/4 failed=n/4",
		err: wantStatus},
	"guard check":                 {counts: "errors=n retries=n"},
	"path error":                  {counts: "errors=n retries=n"},
	"path error, not retryable":   {counts: "errors=n failed=n", err: wantStatus},
	"vendor error":                {counts: "errors=n retries=n"},
	"vendor error, not retryable": {counts: "errors=n failed=n", err: wantStatus},
	"status of a reserved type":   {counts: "errors=n retries=n"},

	"lost completion": {counts: "timeouts=n aborts=n errors=n retries=n"},
	"lost completions of a block": {counts: "timeouts=n aborts=n errors=n retries=3n/4 failed=n/4",
		err: wantTimeout},
	"dropped command":         {counts: "timeouts=n aborts=n errors=n retries=n"},
	"late within the timeout": {},
	"late beyond the timeout": {counts: "timeouts=n aborts=n errors=n retries=n"},
	"slow":                    {},
	"reorder":                 {},

	"duplicate completion":      {counts: "foreign=n recreated=n retries>=0"},
	"late duplicate completion": {counts: "foreign=n recreated=n retries>=n"},
	"foreign completion":        {counts: "foreign=n recreated=n retries>=0"},
	"wrong phase":               {counts: "timeouts>=n aborts>=n recreated=n retries>=n"},
	"wrong SQ head":             {},
	"wrong SQ ID":               {},

	"stuck submission queue": {counts: "timeouts>=n aborts>=n recreated=n retries>=n"},
	"torn doorbell":          {counts: "timeouts>=0 aborts>=0 errors>=0 recreated>=0 retries>=0"},
	"stuck completion queue": {counts: "timeouts>=n aborts>=n recreated=n retries>=n"},

	"flipped bit":      {counts: "mismatch=n retries=n"},
	"short transfer":   {counts: "mismatch=n retries=n"},
	"misdirected read": {counts: "mismatch=n retries=n"},
	"data that stays wrong": {counts: "mismatch=n retries=n/2 failed=n/2", err: wantChecksum,
		stays: true},
	"misdirected write":          {err: wantChecksum},
	"torn write":                 {err: wantChecksum},
	"write error":                {},
	"lost write":                 {},
	"lost flush":                 {},
	"full disk":                  {err: wantStatus},
	"write error, not retryable": {err: wantStatus},
	"flush error, not retryable": {err: wantStatus},

	"fatal status":                 {counts: "resets=n retries>=n"},
	"fatal status again and again": {counts: "resets=3 retries>=0 failed>=1", err: nvme.ErrFatal},
	"controller gone":              {counts: "failed>=1", err: nvme.ErrGone, unsafe: true},
	"not ready once after a reset": {counts: "resets=2 retries>=n"},
	"never ready after a reset":    {counts: "resets=3 failed>=1", err: wantAdmin},
	"stays ready once":             {counts: "resets=2 retries>=n"},
	"fatal status at once":         {err: nvme.ErrFatal},
	"controller gone at once":      {err: nvme.ErrGone},
	"never ready":                  {err: wantAdmin},

	"identify error":           {err: wantStatus},
	"identify lost":            {err: wantAdmin},
	"identify late":            {},
	"features refused":         {err: wantStatus},
	"queue creation refused":   {err: wantStatus},
	"queue creation lost":      {err: wantAdmin},
	"foreign admin completion": {err: wantProtocol},
	"abort refused":            {counts: "timeouts=n aborts=n recreated=n retries>=n"},
	"abort lost":               {counts: "timeouts=n aborts=n recreated=n retries>=n"},
	"queue deletion refused":   {counts: "timeouts>=n aborts>=n resets=n retries>=n"},
	"queue deletion lost":      {counts: "timeouts>=n aborts>=n resets=n retries>=n"},
	"log page error":           {err: wantStatus},
	"short backing file":       {},
}

// faultStacks are the stacks of the table.
var faultStacks = []string{"async", "sync", "cpu", "mmap"}

// TestFaultTable: see above.
func TestFaultTable(t *testing.T) {
	entries := append(faultinject.Catalogue(), faultinject.Besides()...)
	require.Len(t, faultWants, len(entries), "each entry has its counters here")
	clocks := []string{"virtual"}
	if os.Getenv("FAULT_WALL") != "" {
		clocks = append(clocks, "wall")
	}
	sum := &faultSum
	sum.kinds, sum.stacks, sum.clocks = len(entries), len(faultStacks), len(clocks)
	t.Cleanup(func() { sum.write(t) })
	for _, clock := range clocks {
		for _, stack := range faultStacks {
			for _, e := range entries {
				want, ok := faultWants[e.Name]
				require.True(t, ok, "entry %q", e.Name)
				good := t.Run(clock+"/"+stack+"/"+e.Name, func(t *testing.T) {
					c := faultCase{e: e, want: want, stack: stack, clock: clock}
					onClock(t, clock, c.run)
				})
				if good {
					sum.good++
				} else {
					sum.not++
				}
			}
		}
	}
}

// onClock runs a test on the wall's clock or in a bubble of its own. A hang in a bubble, and a
// goroutine that stays behind, ends it with a panic.
func onClock(t *testing.T, clock string, test func(t *testing.T)) {
	if clock == "wall" {
		testrig.CheckLeaks(t)
		test(t)
		return
	}
	checkMemory(t)
	defer func() {
		if p := recover(); p != nil {
			faultSum.hangs.Add(1)
			buf := make([]byte, 1<<20)
			t.Errorf("hang or leak of goroutines: %v\n%s", p, buf[:runtime.Stack(buf, true)])
		}
	}()
	synctest.Test(t, test)
}

// faultCase is one row of the table.
type faultCase struct {
	e     faultinject.Entry
	want  faultWant
	stack string
	clock string
	inner func(t testing.TB, s int, image []byte) nvme.Bus // nil: proxies
}

// faultRow is the row at LBA 20 of the first of two SSDs: what faults of "lba=20" hit.
const faultRow = 2 * (20 - rigDataStart)

// bus reports whether the stack reads through the controller.
func (c *faultCase) bus() bool { return c.stack == "async" || c.stack == "sync" }

func (c *faultCase) run(t *testing.T) {
	shape := faultShape{ssds: 2, lba: 512, rowBytes: 512, rows: 400, sms: 2, mdts: 5}
	if c.clock == "wall" { // what is never ready, or lost, shall not take its default of seconds
		shape.ready = 500 * time.Millisecond
		shape.ctrl.Timeout = 300 * time.Millisecond
	}
	if c.inner != nil { // a virtual machine without KVM, on a machine that does other work
		shape.inner, shape.ready, shape.ctrl.Timeout = c.inner, 3*time.Second, 3*time.Second
	}
	if c.e.Fault == "" {
		c.runShort(t, shape)
		return
	}
	switch c.e.During {
	case faultinject.Opening:
		c.runOpen(t, shape)
	case faultinject.Reading:
		// one rig at a time: these SSDs are there once
		if c.inner != nil && c.e.Class == faultinject.CaughtByRead {
			t.Run("unchecked", func(t *testing.T) { c.runRead(t, shape, false) })
			t.Run("checked", func(t *testing.T) { c.runRead(t, shape, true) })
			return
		}
		c.runRead(t, shape, false)
		if c.e.Class == faultinject.CaughtByRead {
			c.runRead(t, shape, true)
		}
	case faultinject.Loading:
		c.runLoad(t, shape)
	case faultinject.Serving:
		c.runServe(t, shape)
	}
}

// timeout is that of reads: between the latenesses of the entries within and beyond it.
func (c *faultCase) timeout() time.Duration {
	if c.inner != nil {
		return time.Second
	}
	return 250 * time.Millisecond
}

// reader makes the case's stack.
func (c *faultCase) reader(r *faultRig) (Reader, error) {
	o := AsyncOptions{Depth: 16, QueuePairs: 2, Timeout: c.timeout(), CoalesceBytes: -1}
	switch c.stack {
	case "async":
		return NewAsync(r.dev, r.ssds, r.layout, o)
	case "sync":
		o.Blocks, o.Threads = 8, 64
		return NewSync(r.dev, r.ssds, r.layout, o)
	case "cpu":
		return NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 16, Threads: 2, CoalesceBytes: -1})
	}
	return NewMmap(r.dev, r.ssds, r.layout)
}

// mustReader makes the stack over SSDs that are well, with checks or without.
func (c *faultCase) mustReader(r *faultRig, check bool) Reader {
	rd, err := c.reader(r)
	require.NoError(r.t, err)
	if check {
		checked, err := NewChecked(r.dev, rd, r.ssds, r.layout, r.sums())
		require.NoError(r.t, err)
		rd = checked
	}
	r.t.Cleanup(func() { r.closeReader(rd) })
	return rd
}

// checkTarget checks an error's type, or its cause.
func checkTarget(t *testing.T, want, err error) {
	t.Helper()
	if !assert.Error(t, err) {
		return
	}
	assert.Equal(t, errs.Device, errs.ClassOf(err), "class of %v", err)
	ok := false
	switch want := want.(type) {
	case *nvme.StatusError:
		ok = errors.As(err, &want)
	case *nvme.TimeoutError:
		ok = errors.As(err, &want)
	case *nvme.ProtocolError:
		ok = errors.As(err, &want)
	case *TimeoutError:
		ok = errors.As(err, &want)
	case *ChecksumError:
		ok = errors.As(err, &want)
	default:
		ok = errors.Is(err, want)
	}
	assert.True(t, ok, "%v is no %T", err, want)
}

// runOpen opens the controller and the stack.
func (c *faultCase) runOpen(t *testing.T, shape faultShape) {
	began := time.Now()
	r, err := openFaultRig(t, shape, c.e.Fault)
	var rd Reader
	if err == nil {
		rd, err = c.reader(r)
		if err == nil {
			t.Cleanup(func() { r.closeReader(rd) })
		}
	}
	queues := strings.Contains(c.e.Fault, "createq")
	if c.e.Class == faultinject.OpenFails && (c.bus() || !queues) {
		checkTarget(t, c.want.err, err)
		require.Nil(t, rd)
		require.Positive(t, r.fired([]string{c.e.Fault})[0], "the fault was hit")
		return
	}
	require.NoError(t, err)
	if queues {
		require.Zero(t, r.fired([]string{c.e.Fault})[0], "no queue is made")
	} else {
		require.GreaterOrEqual(t, time.Since(began), 10*time.Millisecond)
	}
	s := r.newSet(rand.New(rand.NewPCG(1, 2)), 100, 512, 0)
	s.read(rd)
	s.drop(rd)
}

// sets makes the sets of a row: each holds the row that faults of "lba=20" hit.
func (c *faultCase) sets(r *faultRig) []*testSet {
	rng := rand.New(rand.NewPCG(7, 7))
	var sets []*testSet
	for range 3 {
		ids := []int64{faultRow}
		for len(ids) < 260 {
			ids = append(ids, rng.Int64N(r.layout.Rows))
		}
		sets = append(sets, r.setOf(rng, ids, 516, 4))
	}
	return sets
}

// runRead reads sets, all at once, through the fault.
func (c *faultCase) runRead(t *testing.T, shape faultShape, check bool) {
	parts := strings.Split(c.e.Fault, ";")
	r, err := openFaultRig(t, shape, c.e.Fault)
	require.NoError(t, err)
	rd := c.mustReader(r, check)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	sets := c.sets(r)
	var pend []Pending
	for _, s := range sets {
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		pend = append(pend, p)
	}
	failed := int64(0)
	wrong := 0
	for i, p := range pend {
		st, err := p.Wait(ctx)
		if ctx.Err() != nil {
			faultSum.hangs.Add(1)
		}
		require.NoError(t, ctx.Err(), "hang")
		bad := sets[i].wrong()
		n := int64(len(sets[i].ids)) - st.Rows
		failed += n
		wrong += len(bad)
		require.Equal(t, n != 0, err != nil, "%d rows failed: %v", n, err)
		c.checkSet(t, sets[i], bad, n, err, check)
	}
	fired := r.fired(parts)
	st := rd.Stats()
	if !c.bus() {
		for i := range fired {
			if strings.Contains(parts[i], "op=read") {
				require.Zero(t, fired[i], "%s: this stack does not read through the controller",
					parts[i])
			}
		}
		c.checkCounts(t, st, "", fired)
		require.Zero(t, wrong)
	} else {
		require.Positive(t, fired[0], "the fault was hit")
		counts := c.want.counts
		if c.e.Class == faultinject.CaughtByRead && !check {
			counts = ""
			require.EqualValues(t, fired[0], wrong, "rows that are wrong, and nothing says so")
		}
		c.checkCounts(t, st, counts, fired)
	}
	require.Equal(t, st.Failed, failed)
	// From here on all is well: what is not given up reads on.
	r.set.Disarm()
	for i, s := range sets {
		s.poison()
		p, err := rd.Submit(ctx, s.rs)
		if c.e.Class == faultinject.GivenUp && c.bus() {
			checkTarget(t, c.want.err, err)
			c.checkGivenUp(t, err)
			continue
		}
		require.NoError(t, err)
		_, err = p.Wait(ctx)
		require.NoError(t, err, "set %d, once more", i)
		require.Empty(t, s.wrong())
	}
	if c.e.Class == faultinject.GivenUp {
		s := r.setOf(rand.New(rand.NewPCG(1, 9)), []int64{1, 3, 5, 7, 9}, 512, 0)
		s.read(rd) // of the other SSD
		s.drop(rd)
	}
	if c.want.unsafe && c.bus() {
		r.closeReader(rd)
	}
	for _, s := range sets {
		s.drop(rd)
	}
}

func (c *faultCase) checkGivenUp(t *testing.T, err error) {
	t.Helper()
	var given *GivenUpError
	if assert.ErrorAs(t, err, &given) {
		assert.Equal(t, "ssd0", given.SSD)
		assert.Equal(t, c.want.unsafe, given.Unsafe)
	}
}

// checkSet checks one set's outcome: bad are its indices whose rows are not in place, n is how many
// failed.
func (c *faultCase) checkSet(t *testing.T, s *testSet, bad []int, n int64, err error, check bool) {
	t.Helper()
	class := c.e.Class
	if !c.bus() {
		class = faultinject.NoEffect
	}
	switch {
	case class == faultinject.FailedRow || class == faultinject.CaughtByRead && check &&
		c.want.stays:
		hit := int64(0)
		for _, id := range s.ids {
			if id == faultRow {
				hit++
			}
		}
		require.Equal(t, hit, n)
		checkTarget(t, c.want.err, err)
		require.Contains(t, err.Error(), "ssd0")
		require.Contains(t, err.Error(), "LBA 20+1")
		c.noneWrong(t, s, bad, func(row int64) bool { return row == faultRow })
	case class == faultinject.GivenUp:
		if err == nil { // done before it happened
			c.noneWrong(t, s, bad, nil)
			return
		}
		checkTarget(t, c.want.err, err)
		c.checkGivenUp(t, err)
		require.LessOrEqual(t, int64(len(bad)), n)
		c.noneWrong(t, s, bad, func(row int64) bool { return row%2 == 0 })
	case class == faultinject.CaughtByRead && !check: // the caller of this counts
		require.NoError(t, err)
	default:
		require.NoError(t, err)
		c.noneWrong(t, s, bad, nil)
	}
}

// noneWrong fails for rows that are not in place, but for those that may be lost.
func (c *faultCase) noneWrong(t *testing.T, s *testSet, bad []int, lost func(row int64) bool) {
	t.Helper()
	for _, i := range bad {
		if lost == nil || !lost(s.ids[i]) {
			faultSum.wrong.Add(1)
			require.FailNow(t, "wrong bytes", "row %d", s.ids[i])
		}
	}
}

// checkCounts compares the reader's counters with what the entry says: those it does not name are
// zero.
func (c *faultCase) checkCounts(t *testing.T, st Stats, text string, fired []int64) {
	t.Helper()
	got := map[string]int64{"errors": st.Errors, "retries": st.Retries, "timeouts": st.Timeouts,
		"aborts":    st.Aborts,
		"recreated": st.Recreated, "resets": st.Resets, "foreign": st.Foreign,
		"mismatch": st.Mismatch, "failed": st.Failed}
	value := func(v string) int64 {
		v, div, _ := strings.Cut(v, "/")
		x := int64(1)
		switch name := v[len(v)-1]; name {
		case 'n', 'm':
			x = fired[name-'n'+map[byte]byte{'n': 0, 'm': 2}[name]]
			v = v[:len(v)-1]
		}
		if v != "" {
			k, err := strconv.ParseInt(v, 10, 64)
			require.NoError(t, err)
			x *= k
		}
		if div != "" {
			k, err := strconv.ParseInt(div, 10, 64)
			require.NoError(t, err)
			require.Zero(t, x%k)
			x /= k
		}
		return x
	}
	for _, w := range strings.Fields(text) {
		name, v, bound := strings.Cut(w, ">=")
		if !bound {
			name, v, _ = strings.Cut(w, "=")
		}
		if bound {
			assert.GreaterOrEqual(t, got[name], value(v), "%s; %+v, hits %v", w, got, fired)
		} else {
			assert.Equal(t, value(v), got[name], "%s; %+v, hits %v", w, got, fired)
		}
		delete(got, name)
	}
	for name, v := range got {
		assert.Zero(t, v, "%s: %+v, hits %v", name, got, fired)
	}
	// The counts by SSD are the first one's.
	for s, per := range st.PerSSD {
		if s > 0 && c.bus() {
			assert.Zero(t, per.Errors+per.Timeouts+per.Aborts+per.Recreated+per.Resets+per.Foreign,
				"of SSD %d: %+v", s, per)
		}
		assert.Equal(t, s == 0 && c.bus() && c.e.Class == faultinject.GivenUp, per.GivenUp != "",
			per.GivenUp)
	}
}

// runLoad writes an SSD through the fault as load does, and reads it.
func (c *faultCase) runLoad(t *testing.T, shape faultShape) {
	shape.ssds, shape.blank, shape.ctrl.MaxTransferBytes = 1, true, 8192
	r, err := openFaultRig(t, shape, c.e.Fault)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	b, err := NewBulk(ctx, r.ssds[0].Ctrl, 4, BulkTimeout(c.timeout()))
	require.NoError(t, err)
	data := r.image(0, false)[rigDataStart*shape.lba:]
	err = b.WriteAt(ctx, rigDataStart, data)
	if err == nil {
		err = b.Flush(ctx)
	}
	require.NoError(t, b.Close(ctx))
	require.Positive(t, r.fired([]string{c.e.Fault})[0], "the fault was hit")
	if c.e.Class == faultinject.LoadFails {
		checkTarget(t, c.want.err, err)
		return
	}
	require.NoError(t, err)
	r.set.Disarm()
	for _, check := range []bool{false, true} {
		rd := c.mustReader(r, check)
		var ids []int64
		for i := range r.layout.Rows {
			ids = append(ids, i)
		}
		s := r.setOf(rand.New(rand.NewPCG(3, 3)), ids, 512, 0)
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		st, err := p.Wait(ctx)
		bad := s.wrong()
		switch {
		case c.e.Class != faultinject.CaughtBySums:
			require.NoError(t, err)
			require.Empty(t, bad)
		case !check:
			require.NoError(t, err)
			require.NotEmpty(t, bad, "wrong rows, and nothing says so")
		default:
			checkTarget(t, c.want.err, err)
			require.EqualValues(t, len(bad), r.layout.Rows-st.Rows)
		}
		s.drop(rd)
	}
}

// runShort reads SSDs of which the first one's file loses its end.
func (c *faultCase) runShort(t *testing.T, shape faultShape) {
	r, err := openFaultRig(t, shape, "")
	require.NoError(t, err)
	rd := c.mustReader(r, false)
	const left = 64 // slots; a page is 8
	require.NoError(t, os.Truncate(r.ssds[0].BackingPath, (rigDataStart+left)/8*8*512))
	last := int64((rigDataStart+left)/8*8-rigDataStart) * 2
	s := r.newSet(rand.New(rand.NewPCG(1, 2)), 300, 512, 0)
	want := int64(0)
	for _, id := range s.ids {
		if id%2 == 0 && id >= last {
			want++
		}
	}
	require.Positive(t, want)
	p, err := rd.Submit(context.Background(), s.rs)
	require.NoError(t, err)
	st, err := p.Wait(context.Background())
	require.Equal(t, want, int64(len(s.ids))-st.Rows, "%v", err)
	c.noneWrong(t, s, s.wrong(), func(row int64) bool { return row%2 == 0 && row >= last })
	if c.bus() {
		checkTarget(t, wantStatus, err)
		require.Contains(t, err.Error(), "unrecovered read error")
		require.Equal(t, 4*want, rd.Stats().Errors, "each attempt")
	} else {
		checkTarget(t, ErrShort, err)
		require.Contains(t, err.Error(), r.ssds[0].BackingPath)
	}
	require.Contains(t, err.Error(), "ssd0")
	require.Equal(t, want, rd.Stats().Failed)
	s.drop(rd)
}

// runServe has an admin command fail while rows are read.
func (c *faultCase) runServe(t *testing.T, shape faultShape) {
	r, err := openFaultRig(t, shape, c.e.Fault)
	require.NoError(t, err)
	rd := c.mustReader(r, false)
	s := r.newSet(rand.New(rand.NewPCG(1, 2)), 300, 512, 0)
	p, err := rd.Submit(context.Background(), s.rs)
	require.NoError(t, err)
	_, err = r.ssds[0].Ctrl.SMART(context.Background())
	checkTarget(t, c.want.err, err)
	require.Positive(t, r.fired([]string{c.e.Fault})[0])
	_, err = p.Wait(context.Background())
	require.NoError(t, err)
	require.Empty(t, s.wrong())
	c.checkCounts(t, rd.Stats(), "", []int64{0})
	s.drop(rd)
}

// checkMemory compares descriptors, mappings and memory outside the heap after the test with
// before. Goroutines are the bubble's to count.
func checkMemory(t *testing.T) {
	fds, usage := descriptors(t), hostmem.Usage()
	abandoned := faultAbandoned.Load()
	t.Cleanup(func() {
		now := hostmem.Usage()
		if faultAbandoned.Load() > abandoned {
			now["nvme admin queue"] = usage["nvme admin queue"]
		}
		if usage["nvme admin queue"] == 0 && now["nvme admin queue"] == 0 {
			delete(now, "nvme admin queue")
		}
		if !t.Failed() && (!assert.Equal(t, usage, now, "memory outside the heap") ||
			!assert.LessOrEqual(t, descriptors(t), fds, "descriptors")) {
			faultSum.leaks.Add(1)
		}
	})
}
