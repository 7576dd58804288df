package gpuio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/nvme"
)

// Random fault scripts, in virtual time: one to five faults of any kind with random keys, in front
// of a stack of any shape. Whatever happens, it ends; rows reported as read are right, as long as
// no fault changes data or checks are on; what fails names its cause; nothing is left behind; and
// when the faults are over, SSDs that were not given up are read as always.
//
// Each script is its seed's. FAULT_SEED=n runs one alone, with its text in the log (-v);
// FAULT_WORKERS=1 runs one after the other, so that memory and descriptors that stay behind can be
// told to be one's.

// faultScript holds what a seed stands for.
type faultScript struct {
	seed     uint64
	shape    faultShape
	stack    string
	opt      AsyncOptions
	check    bool
	atOnce   bool     // all sets are submitted before the first is waited for
	faults   []string // of the first SSD
	sets     int
	rows     int // of a set
	pad      int64
	duration time.Duration // that one wait may take
}

func (s *faultScript) String() string {
	return fmt.Sprintf(
		"seed %d: %s, %d SSDs with LBAs of %d, %d rows of %d bytes, %d sets of %d (at once: %v), checks: %v, MDTS %d, SMs %d, %+v\nfaults: %s",
		s.seed, s.stack, s.shape.ssds, s.shape.lba, s.shape.rows, s.shape.rowBytes, s.sets, s.rows,
		s.atOnce, s.check, s.shape.mdts, s.shape.sms, s.opt,
		strings.Join(s.faults, ";"))
}

func pick[T any](rng *rand.Rand, of ...T) T { return of[rng.IntN(len(of))] }

// makeFaultScript draws a script.
func makeFaultScript(seed uint64) *faultScript {
	rng := rand.New(rand.NewPCG(seed, 42))
	s := &faultScript{seed: seed, duration: 24 * time.Hour}
	s.shape = faultShape{ssds: 1 + rng.IntN(4), lba: pick(rng, 512, 4096),
		rowBytes: pick(rng, 16, 100, 400, 512, 1204, 4096, 6000, 16384),
		sms:      1 + rng.IntN(4), mdts: 1 + rng.IntN(5)}
	s.shape.rows = int64(20 + rng.IntN(min(600, 1<<20/s.shape.rowBytes)))
	switch n := rng.IntN(20); {
	case n < 11:
		s.stack = "async"
	case n < 16:
		s.stack = "sync"
	case n < 18:
		s.stack = "bulk"
	case n < 19:
		s.stack = "cpu"
	default:
		s.stack = "mmap"
	}
	s.opt = AsyncOptions{QueuePairs: 1 + rng.IntN(4), Timeout: pick(rng, 20*time.Millisecond,
		100*time.Millisecond, time.Second, 10*time.Second),
		Retries: rng.IntN(6) - 1, Resets: rng.IntN(5) - 1, CoalesceBytes: pick(rng, -1, -1, 0,
			8192, 1<<17)}
	s.opt.Depth = s.opt.QueuePairs + rng.IntN(40)
	s.check = rng.IntN(2) == 0
	s.atOnce = rng.IntN(3) > 0
	s.sets, s.rows, s.pad = 1+rng.IntN(4), 1+rng.IntN(250), int64(rng.IntN(3)*4)
	if s.opt.Timeout >= time.Second { // each hour that passes has 36,000 looks at the queues
		s.sets, s.rows = min(s.sets, 2), 1+rng.IntN(60)
		s.opt.Depth = max(s.opt.Depth, 8)
	}
	if s.stack == "sync" {
		s.opt.Blocks, s.opt.Threads = 1+rng.IntN(12), 32<<rng.IntN(3)
	}
	stays := false
	var faults []faultinject.Fault
	for i := range 1 + rng.IntN(5) {
		f := randomFault(rng, s)
		if i == 0 { // or too many scripts hit nothing
			f.After %= 6
			f.AllLBAs, f.First, f.Last = true, 0, 0
			if f.Kind == faultinject.Gone || f.Kind == faultinject.CFS {
				f.After++ // at once there is nothing to see but open's error
			}
		}
		if s.stack == "bulk" && f.Op == faultinject.Read {
			o := f
			if o.Op = pick(rng, faultinject.Read, faultinject.Write, faultinject.Write,
				faultinject.Flush); o.Validate() == nil {
				f = o
			}
		}
		stays = stays || f.Kind == faultinject.StayReady
		faults = append(faults, f)
	}
	for _, f := range faults {
		// A controller that neither opens nor can be disabled keeps its memory for good: that is as
		// it should be, and would be taken for a leak here.
		if stays && (f.Op >= faultinject.Admin || f.Kind == faultinject.NotReady) {
			f.After += 30
		}
		s.faults = append(s.faults, f.String())
	}
	return s
}

// randomFault draws a fault with random keys.
func randomFault(rng *rand.Rand, s *faultScript) faultinject.Fault {
	end := uint64(rigDataStart) + uint64(s.shape.rows)*uint64(max(s.shape.rowBytes/s.shape.lba,
		1))/uint64(s.shape.ssds) + 2
	for {
		f := faultinject.Fault{Kind: faultinject.Error +
			faultinject.Kind(rng.IntN(int(faultinject.StayReady))), Op: faultinject.Read,
			AllLBAs: true}
		switch rng.IntN(10) {
		case 0:
			f.Op = faultinject.Any
		case 1, 2:
			f.Op = faultinject.Admin +
				faultinject.Op(rng.IntN(int(faultinject.Log-faultinject.Admin)+1))
		}
		if f.Kind == faultinject.NotReady || f.Kind == faultinject.StayReady {
			f.Op = faultinject.Any
		}
		if rng.IntN(3) == 0 {
			f.AllLBAs = false
			f.First = rng.Uint64N(end)
			f.Last = f.First + rng.Uint64N(12)
		}
		f.After = pick(rng, 0, rng.Int64N(20), rng.Int64N(int64(s.sets*s.rows/s.shape.ssds+1)))
		f.Times = pick(rng, 1, 1+rng.Int64N(4), 1+rng.Int64N(40), 0)
		switch f.Kind {
		case faultinject.Error:
			f.SCT, f.SC, f.DNR = pick[uint8](rng, 0, 1, 2, 3, 7), uint8(1+rng.IntN(255)),
				pick[uint8](rng, 1, 0, 0, 0)
		case faultinject.Late:
			f.Delay = pick(rng, time.Duration(1+rng.IntN(30))*time.Millisecond,
				time.Duration(1+rng.IntN(30000))*time.Millisecond)
		case faultinject.Slow:
			f.Delay = pick(rng, time.Duration(1+rng.IntN(2000)),
				time.Duration(1+rng.IntN(200000))) * time.Microsecond
		case faultinject.Foreign:
			// Of no command. One that is right to the generation cannot be told from the real one.
			f.CID = uint16(pick(rng, 0xffff, 512+rng.IntN(512)|rng.IntN(64)<<10))
		case faultinject.Flip:
			f.Byte, f.Bit = rng.Uint32N(20000), uint8(rng.IntN(8))
		case faultinject.Short:
			f.Bytes = rng.Uint32N(6000)
		case faultinject.Misdirect:
			f.Shift = 1 + rng.Uint32N(16)
		case faultinject.Dup:
			f.N = pick(rng, 0, 1+rng.IntN(12), 1+rng.IntN(200))
		case faultinject.Reorder:
			f.N = 2 + rng.IntN(30)
		case faultinject.Gone, faultinject.CFS: // at once there is nothing to see but open's error
			f.After = max(f.After, 1)
		}
		if f.Validate() == nil {
			return f
		}
	}
}

// hits reports whether a fault of one of these kinds has hit.
func (s *faultScript) hits(fired []int64, kinds ...string) bool {
	for i, f := range s.faults {
		for _, kind := range kinds {
			if fired[i] > 0 && strings.HasPrefix(f, kind+"(") {
				return true
			}
		}
	}
	return false
}

// spoils reports whether a fault that has hit makes data wrong, which nothing but a checksum finds.
func (s *faultScript) spoils(fired []int64) bool {
	return s.hits(fired, "flip", "short", "misdirect", "torn")
}

func (s *faultScript) reader(r *faultRig) (Reader, error) {
	var rd Reader
	var err error
	switch s.stack {
	case "async":
		rd, err = NewAsync(r.dev, r.ssds, r.layout, s.opt)
	case "sync":
		rd, err = NewSync(r.dev, r.ssds, r.layout, s.opt)
	case "cpu":
		rd, err = NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: s.opt.Depth,
			Threads: s.shape.sms, CoalesceBytes: s.opt.CoalesceBytes})
	default:
		rd, err = NewMmap(r.dev, r.ssds, r.layout)
	}
	if err != nil || !s.check {
		return rd, err
	}
	return NewChecked(r.dev, rd, r.ssds, r.layout, r.sums())
}

// Outcomes of a script.
const (
	scriptUntouched = iota // no fault hit anything
	scriptHealed           // everything was read
	scriptFailed           // something failed, as it should
	scriptOutcomes
)

// run runs the script.
func (s *faultScript) run(t *testing.T) (outcome int) {
	shape := s.shape
	shape.blank = s.stack == "bulk"
	r, err := openFaultRig(t, shape, strings.Join(s.faults, ";"))
	r.deadAdmin = true
	if nvmeGone(err) {
		faultAbandoned.Add(1)
	}
	if err == nil && s.stack == "bulk" {
		return s.runBulk(t, r)
	}
	var rd Reader
	if err == nil {
		rd, err = s.reader(r)
	}
	if err != nil {
		r.set.Disarm()
		require.Equal(t, errs.Device, errs.ClassOf(err), "open: %v", err)
		return scriptFailed
	}
	closed := false
	end := func() {
		if !closed {
			closed = true
			r.closeReader(rd)
		}
	}
	t.Cleanup(end)
	outcome = scriptHealed
	rng := rand.New(rand.NewPCG(s.seed, 43))
	var sets []*testSet
	var pend []Pending
	var rows, failed int64
	wait := func(i int) {
		if pend[i] == nil {
			outcome = scriptFailed
			return
		}
		n, f := s.wait(t, r, sets[i], pend[i])
		rows, failed = rows+n, failed+f
		if f > 0 {
			outcome = scriptFailed
		}
	}
	for i := range s.sets {
		set := r.newSet(rng, s.rows, int64(s.shape.rowBytes+3)&^3+s.pad, s.pad)
		p, err := rd.Submit(t.Context(), set.rs)
		if err != nil {
			r.checkRefusal(t, err)
		}
		sets, pend = append(sets, set), append(pend, p)
		if !s.atOnce {
			wait(i)
		}
	}
	for i := range sets {
		if s.atOnce {
			wait(i)
		}
	}
	st := rd.Stats()
	require.Equal(t, rows, st.Rows)
	require.Equal(t, failed, st.Failed)
	fired := r.fired(s.faults)
	hits := int64(0)
	for _, n := range fired {
		hits += n
	}
	if hits == 0 {
		require.Equal(t, scriptHealed, outcome, "no fault hit anything")
		require.Zero(t, st.Errors+st.Retries+st.Timeouts+st.Aborts+st.Recreated+st.Resets+
			st.Foreign+st.Mismatch, "%+v", st)
		outcome = scriptUntouched
	}
	s.checkStats(t, st, fired)
	r.set.Disarm()
	s.aftermath(t, r, rd, sets)
	end()
	for _, set := range sets {
		set.drop(rd)
	}
	return outcome
}

// runBulk writes the first SSD, flushes it and reads it, as load and verify do.
func (s *faultScript) runBulk(t *testing.T, r *faultRig) (outcome int) {
	ctrl := r.ssds[0].Ctrl
	want := r.image(0, false)[rigDataStart*s.shape.lba:]
	want = want[:int64(s.shape.lba)*r.layout.LBAsOn(0)]
	pass := func() (got []byte, err error) {
		ctx, cancel := context.WithTimeout(context.Background(), s.duration)
		defer cancel()
		defer func() {
			if ctx.Err() != nil {
				faultSum.hangs.Add(1)
				assert.NoError(t, ctx.Err(), "hang: %v", err)
			}
		}()
		b, err := NewBulk(ctx, ctrl, s.opt.Depth, BulkTimeout(s.opt.Timeout),
			BulkRetries(max(s.opt.Retries, 0)))
		if err != nil {
			return nil, err
		}
		defer func() {
			// Its queue pair may not be deleted, which is a matter of the controller's close then.
			if cerr := b.Close(ctx); cerr != nil {
				assert.Equal(t, errs.Device, errs.ClassOf(cerr), "bulk: close: %v", cerr)
			}
		}()
		got = make([]byte, len(want))
		if err = b.WriteAt(ctx, rigDataStart, want); err == nil {
			err = b.Flush(ctx)
		}
		if err == nil {
			err = b.ReadAt(ctx, rigDataStart, got)
		}
		return got, err
	}
	got, err := pass()
	fired := r.fired(s.faults)
	outcome = scriptHealed
	switch {
	case err != nil:
		require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		require.Contains(t, err.Error(), "ssd0")
		outcome = scriptFailed
	case !s.spoils(fired) && !bytes.Equal(want, got):
		faultSum.wrong.Add(1)
		require.FailNow(t, "wrong bytes", "bulk")
	}
	hit := false
	for _, n := range fired {
		hit = hit || n > 0
	}
	if !hit {
		require.NoError(t, err, "no fault hit anything")
		outcome = scriptUntouched
	}
	r.set.Disarm()
	if err := ctrl.Reset(t.Context()); nvmeGone(err) {
		return scriptFailed
	} else if err != nil {
		require.NoError(t, err, "all is over")
	}
	got, err = pass()
	require.NoError(t, err, "all is over")
	require.True(t, bytes.Equal(want, got), "all is over")
	return outcome
}

// checkStats checks the counters as far as they follow from the faults that have hit: what is not
// the first SSD's trouble shows nowhere else, and where one fault alone has hit, how often.
func (s *faultScript) checkStats(t *testing.T, st Stats, fired []int64) {
	t.Helper()
	opt := s.opt
	require.NoError(t, opt.fill())
	for i, per := range st.PerSSD {
		require.LessOrEqual(t, per.Resets, int64(opt.Resets), "SSD %d", i)
		if i > 0 {
			require.Zero(t, per.Errors+per.Timeouts+per.Aborts+per.Recreated+per.Resets+per.Foreign,
				"SSD %d, which has no faults: %+v", i, per)
			require.Empty(t, per.GivenUp, "SSD %d", i)
		}
	}
	only := -1
	for i, n := range fired {
		switch {
		case n == 0:
		case only >= 0:
			return
		default:
			only = i
		}
	}
	if only < 0 || !s.bus() {
		return
	}
	f, err := faultinject.ParseFault(s.faults[only])
	require.NoError(t, err)
	n := fired[only]
	late := f.Kind == faultinject.Late && f.Delay < s.opt.Timeout || f.Kind == faultinject.Slow &&
		f.Delay < s.opt.Timeout
	switch io := f.Op == faultinject.Read || f.Op == faultinject.Any; {
	case !io:
	case f.Kind == faultinject.Error:
		require.Equal(t, n, st.Errors)
		require.Zero(t, st.Timeouts+st.Aborts+st.Recreated+st.Resets+st.Foreign)
	case f.Kind == faultinject.Lost || f.Kind == faultinject.Drop:
		if st.Resets == 0 && st.PerSSD[0].GivenUp == "" {
			require.Equal(t, n, st.Timeouts)
			require.Equal(t, n, st.Aborts)
		} else { // nothing else came: what was out at a reset is not waited for
			require.LessOrEqual(t, st.Timeouts, n)
			require.Greater(t, st.Timeouts, int64(opt.Depth))
		}
		require.Zero(t, st.Recreated+st.Foreign)
	case f.Kind == faultinject.SQHead || f.Kind == faultinject.SQID || late:
		require.Zero(t, st.Errors+st.Retries+st.Timeouts+st.Aborts+st.Recreated+st.Resets+
			st.Foreign+st.Mismatch+st.Failed, "%+v", st)
	case f.Kind == faultinject.CFS:
		require.Positive(t, st.Resets+st.Failed)
		require.Zero(t, st.Foreign+st.Recreated)
	case f.Kind == faultinject.Gone:
		require.Zero(t, st.Foreign+st.Recreated+st.Resets)
		require.NotEmpty(t, st.PerSSD[0].GivenUp)
	case f.Kind == faultinject.Flip || f.Kind == faultinject.Short:
		require.Zero(t, st.Errors+st.Timeouts+st.Aborts+st.Recreated+st.Resets+st.Foreign)
		require.True(t, s.check || st.Mismatch == 0)
	}
}

// checkRefusal checks why a set was not taken.
func (r *faultRig) checkRefusal(t *testing.T, err error) {
	t.Helper()
	var given *GivenUpError
	require.ErrorAs(t, err, &given)
	require.Equal(t, errs.Device, errs.ClassOf(err))
}

// wait waits for a set and checks what came of it: rows read and failed.
func (s *faultScript) wait(t *testing.T, r *faultRig, set *testSet, p Pending) (rows,
	failed int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), s.duration)
	defer cancel()
	st, err := p.Wait(ctx)
	if ctx.Err() != nil {
		faultSum.hangs.Add(1)
		require.NoError(t, ctx.Err(), "hang: %v", err)
	}
	fired := r.fired(s.faults)
	spoiled := s.spoils(fired)
	bad := set.wrong()
	n := int64(len(set.ids))
	lost := map[int64]bool{}
	if err != nil {
		require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		var se *SetError
		require.ErrorAs(t, err, &se)
		require.Positive(t, se.Failed)
		if failed = n - st.Rows; s.check { // the error may be that of the rows that were read again
			require.LessOrEqual(t, se.Failed, failed)
		} else {
			require.Equal(t, failed, se.Failed)
		}
		require.Len(t, se.First, int(min(se.Failed, maxFails)))
		for _, f := range se.First {
			lost[f.Row] = true
			checkCause(t, f)
		}
		if failed > int64(len(se.First)) { // the others are not named
			lost = nil
		}
		if spoiled && s.bus() { // checks see rows only of sets that were read
			return st.Rows, failed
		}
		require.LessOrEqual(t, int64(len(bad)), failed)
	} else {
		require.Equal(t, n, st.Rows)
	}
	for _, i := range bad {
		if s.bus() && spoiled && !s.check || lost == nil || lost[set.ids[i]] {
			continue
		}
		faultSum.wrong.Add(1)
		require.FailNow(t, "wrong bytes", "row %d is reported as read; %v", set.ids[i], err)
	}
	return st.Rows, failed
}

func (s *faultScript) bus() bool { return s.stack == "async" || s.stack == "sync" }

// checkCause checks that a failed row's error is of a kind that programs can tell, and names its
// SSD.
func checkCause(t *testing.T, f *RowError) {
	t.Helper()
	var status *nvme.StatusError
	var late *TimeoutError
	var given *GivenUpError
	var sum *ChecksumError
	require.True(t, errors.As(f, &status) || errors.As(f, &late) || errors.As(f, &given) ||
		errors.As(f, &sum), "row %d: %v", f.Row, f.Err)
	require.Contains(t, f.Error(), "ssd")
}

// aftermath reads on when the faults are over, until the queues have dealt with what they left
// behind: a doorbell that is not seen shows only at the next timeout.
func (s *faultScript) aftermath(t *testing.T, r *faultRig, rd Reader, sets []*testSet) {
	const tries = 8
	rng := rand.New(rand.NewPCG(s.seed, 44))
	dead := func() map[int]bool {
		m := map[int]bool{}
		for i, per := range rd.Stats().PerSSD {
			m[i] = per.GivenUp != ""
		}
		return m
	}
	for try := 1; ; try++ {
		gone := dead()
		var ids []int64
		for row := range r.layout.Rows {
			if !gone[int(row%int64(r.layout.SSDs))] && len(ids) < 64 {
				ids = append(ids, row)
			}
		}
		if len(ids) == 0 {
			return
		}
		set := r.setOf(rng, ids, int64(s.shape.rowBytes+3)&^3, 0)
		ctx, cancel := context.WithTimeout(context.Background(), s.duration)
		p, err := rd.Submit(ctx, set.rs)
		if err == nil {
			_, err = p.Wait(ctx)
		}
		hang := ctx.Err()
		cancel()
		require.NoError(t, hang, "hang when all is over")
		var given *GivenUpError
		unsafe := errors.As(err, &given) && given.Unsafe
		bad := set.wrong()
		if unsafe {
			// runs before the device is closed, and after the reader
			t.Cleanup(func() { set.drop(rd) })
			continue
		}
		set.drop(rd)
		if err == nil {
			require.Empty(t, bad, "all is over")
			return
		}
		require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
		require.Less(t, try, tries, "all is over, and yet: %v", err)
	}
}

// faultAbandoned counts controllers that vanished while they were opened: their admin queues'
// memory stays, for nobody can report whether they write to it.
var faultAbandoned atomic.Int64

// TestFaultScripts: see above.
func TestFaultScripts(t *testing.T) {
	count, base := 300, uint64(1)
	if wide.Lean() || raceEnabled {
		count = 40
	}
	env := func(name string, v *uint64) bool {
		text := os.Getenv(name)
		if text == "" {
			return false
		}
		n, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, name)
		*v = n
		return true
	}
	n := uint64(count)
	env("FAULT_SCRIPTS", &n)
	workers := uint64(runtime.GOMAXPROCS(0))
	env("FAULT_WORKERS", &workers)
	env("FAULT_BASE", &base)
	if env("FAULT_SEED", &base) {
		n, workers = 1, 1
		t.Log(makeFaultScript(base))
	}
	fds, usage := descriptors(t), hostmem.Usage()
	var outcomes [scriptOutcomes]atomic.Int64
	var next atomic.Uint64
	var bad atomic.Int64
	t.Run("all", func(t *testing.T) {
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for bad.Load() < 20 {
					i := next.Add(1) - 1
					if i >= n {
						return
					}
					s := makeFaultScript(base + i)
					if !t.Run(fmt.Sprintf("seed=%d", s.seed), func(t *testing.T) {
						if workers == 1 { // what stays behind can be told to be this script's
							checkMemory(t)
						}
						outcomes[s.runInBubble(t)].Add(1)
					}) {
						bad.Add(1)
					}
				}
			})
		}
		wg.Wait()
	})
	if !t.Failed() {
		now := hostmem.Usage()
		if faultAbandoned.Load() > 0 {
			delete(now, "nvme admin queue")
		}
		assert.Equal(t, usage, now, "memory outside the heap")
		assert.LessOrEqual(t, descriptors(t), fds, "descriptors")
	}
	if t.Failed() && bad.Load() == 0 {
		faultSum.leaks.Add(1)
	}
	for i := range outcomes {
		faultSum.outcomes[i] = outcomes[i].Load()
	}
	faultSum.scripts, faultSum.badScripts = int64(n), bad.Load()
	faultSum.write(t)
}

// runInBubble runs the script in virtual time.
func (s *faultScript) runInBubble(t *testing.T) (outcome int) {
	// A loop that spins in a bubble stops its clock: only the wall's notices.
	watchdog := time.AfterFunc(2*time.Minute, func() {
		buf := make([]byte, 4<<20)
		fmt.Fprintf(os.Stderr, "%v\ndoes not end; replay it with FAULT_SEED=%d\n%s\n", s, s.seed,
			buf[:runtime.Stack(buf, true)])
		os.Exit(2)
	})
	defer watchdog.Stop()
	defer func() {
		if p := recover(); p != nil {
			faultSum.hangs.Add(1)
			buf := make([]byte, 1<<20)
			t.Errorf("hang, or goroutines left behind: %v\n%s", p, buf[:runtime.Stack(buf, true)])
		}
		if t.Failed() {
			t.Logf("%v\nreplay it with FAULT_SEED=%d go test ./gpuio -run TestFaultScripts -v",
				s, s.seed)
		}
	}()
	synctest.Test(t, func(t *testing.T) { outcome = s.run(t) })
	return outcome
}

func descriptors(t testing.TB) int {
	e, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(e)
}
