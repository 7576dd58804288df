package stripe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"helios/gpuio"
	"helios/internal/durable"
	"helios/internal/errs"
	"helios/nvme"
)

// Leases: an SSD that two machines reach, or one machine by two paths, has no lock that all see. So
// each user of a stripe notes that on the SSD itself, in a slot of its own among the zeros behind
// the first superblock, which no version of the format reads otherwise, and counts on there while
// it lives. A writer (load, pages) first puts its own record there, then looks at the others': one
// that counts on is alive, and the write is refused. A reader does the same, and minds writers
// only. As each puts its record before it looks, one of two that begin at once sees the other;
// where both have chosen one slot, the first finds that out a moment later, and takes another.
// Clocks need not agree: what counts is whether a counter moves while one looks. A record of this
// host, whose process is gone, is dead at once, and any other that does not move for leaseDead.
//
// A record is one LBA, which an SSD writes whole, and has a checksum. It goes when its owner ends.
// Readers also look whether the load that they read is still the one that is there: the LoadID is a
// stripe's generation.
const (
	leaseAt    = 768 << 10
	leaseSlot  = 4096
	leaseSlots = 32
	leaseMagic = "HeliosLs"
)

// Variables for tests.
var (
	leaseEvery = 5 * time.Second // between counts
	leaseDead  = 30 * time.Second
	leaseLook  = time.Second // between looks at others' counters
	// leaseSettle is more than passes between another's choice of a slot and its record there.
	leaseSettle = 100 * time.Millisecond
	// leaseFarewell bounds the last work on each SSD: one that has failed must not hold up the end
	// of its run. A record that stays there does not move, and so is dead.
	leaseFarewell = time.Second
)

// wireLease is a record on the SSD.
type wireLease struct {
	Magic   [8]byte
	Version uint32
	Writes  uint32 // 1: its owner writes the stripe
	Owner   [16]byte
	Count   uint64
	Seen    int64 // seconds since 1970, by its owner's clock: for people only
	process
	Dataset  [16]byte // that is read or written; zero: any of the SSD
	Reserved [308]byte
	CRC      uint32 // CRC32C of the 512 bytes with this field zero
}

// process identifies one process among those of one host.
type process struct {
	Boot    [16]byte // of the host
	Space   uint64   // of process numbers, within it
	PID     uint64
	Started uint64 // in ticks since the host's boot
	Host    [64]byte
	Command [32]byte
}

const (
	_             = uint(unsafe.Offsetof(wireLease{}.CRC) - crcOffset)
	_             = uint(crcOffset - unsafe.Offsetof(wireLease{}.CRC))
	leaseVersion  = 1
	leaseReadFail = "its leases cannot be read"
)

// thisProcess finds out what process it is; a variable for tests.
var thisProcess = sync.OnceValue(func() (p process) {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if id, err := uuid.ParseBytes(bytes.TrimSpace(boot)); err == nil {
		p.Boot = id
	}
	space, _ := os.Readlink("/proc/self/ns/pid")
	p.Space, _ = strconv.ParseUint(strings.Trim(space, "pid:[]"), 10, 64)
	p.PID = uint64(os.Getpid())
	if me, ok := durable.Look(os.Getpid()); ok {
		p.Started, _ = strconv.ParseUint(me.Start, 10, 64)
		copy(p.Command[:], me.Comm)
	}
	host, _ := os.Hostname()
	copy(p.Host[:], host)
	return p
})

// knows reports whether p sees the processes of q's host.
func (p *process) knows(q *process) bool {
	return p.Boot == q.Boot && p.Space == q.Space && p.Boot != [16]byte{} && p.Space != 0
}

// alive reports whether a process that this one knows is there.
func (p *process) alive() bool {
	now, there := durable.Look(int(p.PID))
	return there && now.Start == strconv.FormatUint(p.Started, 10)
}

func (w *wireLease) String() string {
	text := func(b []byte) string { return strings.TrimRight(string(b), "\x00") }
	doing := "reads"
	if w.Writes != 0 {
		doing = "writes"
	}
	return fmt.Sprintf("%q (process %d on %s, last seen %s by its clock) %s it", text(w.Command[:]),
		w.PID, text(w.Host[:]), time.Unix(w.Seen, 0).UTC().Format(time.RFC3339), doing)
}

func (w *wireLease) encode(lbaBytes int) []byte {
	b := make([]byte, max(lbaBytes, wireBytes))
	w.CRC = 0
	_, _ = binary.Encode(b, binary.LittleEndian, w) // of fixed size, into room for it
	binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b[:wireBytes], castagnoli))
	return b
}

// decodeLease reads a slot; nil: it holds no record.
func decodeLease(b []byte) *wireLease {
	var w wireLease
	if string(b[:8]) != leaseMagic {
		return nil
	}
	b = bytes.Clone(b[:wireBytes])
	want := binary.LittleEndian.Uint32(b[crcOffset:])
	clear(b[crcOffset:])
	if _, err := binary.Decode(b, binary.LittleEndian, &w); err != nil ||
		crc32.Checksum(b, castagnoli) != want {
		return nil // torn, or another version's: its owner writes it anew
	}
	return &w
}

// slots holds the records of an SSD by slot.
type slots [leaseSlots]*wireLease

func (t *target) leases(ctx context.Context) (s slots, err error) {
	b := make([]byte, leaseSlots*leaseSlot)
	if err := t.dev.ReadAt(ctx, nvme.LBA(leaseAt/t.lbaBytes), b); err != nil {
		return s, fmt.Errorf("ssd %s: %s: %w", t.name, leaseReadFail, err)
	}
	for i := range s {
		s[i] = decodeLease(b[i*leaseSlot:])
	}
	return s, nil
}

// putLease writes a slot; nil empties it.
func (t *target) putLease(ctx context.Context, slot int, w *wireLease) error {
	b := make([]byte, t.lbaBytes)
	if w != nil {
		b = w.encode(t.lbaBytes)
	}
	return t.dev.WriteAt(ctx, nvme.LBA((leaseAt+slot*leaseSlot)/t.lbaBytes), b)
}

// Lease says on SSDs that this process uses them.
type Lease struct {
	ssds   []*leased
	note   func(string)
	cancel context.CancelFunc
	done   chan struct{}

	unguard []func() // has controllers no longer ask before a reset

	io     sync.Mutex // of work on the SSDs
	mu     sync.Mutex
	err    error
	lost   chan struct{} // closed with err
	blamed bool          // Blame has returned err
}

// leased is one SSD of a lease.
type leased struct {
	name  string
	ctrl  *nvme.Controller // whose resets ask the lease; nil: none do
	open  func(ctx context.Context) (*target, error)
	mine  wireLease
	slot  int       // -1: there is no record: the SSD can't be written, or has no free slot
	loads uuid.UUID // the generation that is read; zero where the owner writes
	place int       // slot of its superblock
}

// Hold says on the SSDs that they are read, until Close. Stripes that another process writes are
// refused. An SSD that can't be written, or has no slot free, is noted and read all the same. SSDs
// that compute their content need none. SSDs are opened for a moment each time: of some controllers
// others need all queue pairs.
func (a *Attached) Hold(ctx context.Context, note func(string)) (*Lease, error) {
	var out []*leased
	for _, s := range gpuio.Distinct(a.SSDs) { // a load writes all stripes of an SSD, or none
		i := slices.Index(a.SSDs, s)
		x := visited(s)
		x.loads, x.place, x.mine.Dataset = a.loads, a.slots[i], a.uuid
		out = append(out, x)
	}
	return hold(ctx, out, thisProcess(), false, note)
}

// Unused refuses SSDs that another process or machine uses.
func Unused(ctx context.Context, ssds []*gpuio.SSD, note func(string)) error {
	var out []*leased
	for _, s := range ssds {
		out = append(out, visited(s))
	}
	l, err := hold(ctx, out, thisProcess(), true, note)
	if err != nil {
		return err
	}
	return l.Close()
}

// visited opens an SSD for a moment each time.
func visited(s *gpuio.SSD) *leased {
	return &leased{name: s.Name, ctrl: s.Ctrl, open: func(ctx context.Context) (*target, error) {
		ns := s.Ctrl.Namespace()
		// Cut off in the middle, the controller would keep a queue pair that nobody knows.
		b, err := gpuio.NewBulk(context.WithoutCancel(ctx), s.Ctrl, 1, gpuio.BulkRetries(0),
			gpuio.BulkResets(-1), gpuio.BulkTimeout(time.Second), gpuio.BulkVisit())
		if err != nil {
			return nil, err
		}
		return &target{dev: b, ssd: s, name: s.Name, serial: s.Ctrl.Serial(),
			lbaBytes: ns.LBABytes, lbas: ns.Blocks}, nil
	}}
}

// holdToWrite is Hold for who writes a dataset, or with uuid.Nil any, to open SSDs: what another
// process writes, or reads of it, is refused. Of targets on one SSD one counts.
func holdToWrite(ctx context.Context, ts []*target, dataset uuid.UUID, note func(string)) (*Lease,
	error) {
	ts = slices.CompactFunc(slices.SortedFunc(slices.Values(ts), func(a, b *target) int {
		return strings.Compare(a.name, b.name)
	}), func(a, b *target) bool { return a.name == b.name })
	return holdEach(ctx, ts, func(int) uuid.UUID { return dataset }, note)
}

// holdEach is holdToWrite with a dataset for each SSD.
func holdEach(ctx context.Context, ts []*target, dataset func(i int) uuid.UUID,
	note func(string)) (*Lease, error) {
	var out []*leased
	for i, t := range ts {
		x := &leased{name: t.name, open: func(context.Context) (*target, error) {
			open := *t
			open.dev = staysOpen{t.dev}
			return &open, nil
		}}
		x.mine.Dataset = dataset(i)
		if t.ssd != nil {
			x.ctrl = t.ssd.Ctrl
		}
		out = append(out, x)
	}
	return hold(ctx, out, thisProcess(), true, note)
}

// staysOpen is a blockDev that another closes.
type staysOpen struct{ blockDev }

func (staysOpen) Close(context.Context) error { return nil }

func hold(ctx context.Context, ssds []*leased, who process, writes bool, note func(string)) (*Lease,
	error) {
	if note == nil {
		note = func(string) {}
	}
	l := &Lease{ssds: ssds, note: note, done: make(chan struct{}), lost: make(chan struct{})}
	var mu sync.Mutex // of note
	g, gctx := errgroup.WithContext(ctx)
	for _, x := range ssds {
		x.slot = -1
		x.mine = wireLease{Version: leaseVersion, Owner: uuid.New(), process: who,
			Dataset: x.mine.Dataset}
		copy(x.mine.Magic[:], leaseMagic)
		if writes {
			x.mine.Writes = 1
		}
		g.Go(func() error {
			return x.with(gctx, func(t *target) error {
				return x.take(gctx, t, func(s string) {
					mu.Lock()
					defer mu.Unlock()
					note(s)
				})
			})
		})
	}
	err := g.Wait()
	for _, x := range ssds { // whose commands are sent again after a reset
		if x.ctrl != nil {
			l.unguard = append(l.unguard, x.ctrl.GuardResets(l.Err))
		}
	}
	ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go l.keep(ctx)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// with opens the SSD for fn.
func (x *leased) with(ctx context.Context, fn func(t *target) error) error {
	t, err := x.open(ctx)
	if err != nil {
		return err
	}
	return errors.Join(fn(t), t.dev.Close(context.WithoutCancel(ctx)))
}

// take puts the record, and looks at the others.
func (x *leased) take(ctx context.Context, t *target, note func(string)) error {
	if int64(t.lbas)*int64(t.lbaBytes) < headBytes+tailBytes {
		return nil // it holds nothing, and nothing can be loaded onto it
	}
	if x.mine.Writes == 0 {
		c, err := t.inSlot(x.place).readCopies(ctx)
		if err != nil {
			return err
		}
		sb, _, err := c.best()
		switch {
		case err != nil:
			return errs.New(errs.Device, "ssd %s: %w; load the dataset onto it again", t.name, err)
		case sb.LoadID != x.loads:
			return errs.New(errs.Device,
				"ssd %s is being loaded by somebody else; wait for that, and run it again", t.name)
		case sb.computed():
			x.loads = uuid.UUID{}
			return nil
		}
	}
	if err := x.put(ctx, t); err != nil {
		if ctx.Err() != nil {
			return err
		}
		note(fmt.Sprintf("ssd %s: another machine does not see that it is in use: %v", t.name, err))
		return nil
	}
	return x.alone(ctx, t, note)
}

// put writes the record, to a slot that is free where its own is another's.
func (x *leased) put(ctx context.Context, t *target) error {
	all, err := t.leases(ctx)
	if err != nil {
		return err
	}
	if x.slot < 0 || all[x.slot] != nil && all[x.slot].Owner != x.mine.Owner {
		x.slot = -1
		for k, from := 0, rand.IntN(leaseSlots); k < leaseSlots && x.slot < 0; k++ {
			if i := (from + k) % leaseSlots; all[i] == nil ||
				x.mine.knows(&all[i].process) && !all[i].alive() {
				x.slot = i
			}
		}
		if x.slot < 0 {
			return fmt.Errorf("%d others use it, and there is no room for more", leaseSlots)
		}
	}
	x.mine.Count++
	x.mine.Seen = time.Now().Unix()
	return t.putLease(ctx, x.slot, &x.mine)
}

// alone refuses to go on where another process is alive that disturbs this one, or the other way
// round.
func (x *leased) alone(ctx context.Context, t *target, note func(string)) error {
	r := rivals{x: x, t: t, note: note, was: map[uuid.UUID]uint64{}}
	for first := true; ; first = false {
		if first && x.mine.Writes != 0 {
			if err := pause(ctx, leaseSettle); err != nil {
				return err
			}
		}
		all, err := t.leases(ctx)
		if err != nil {
			return errs.With(errs.Device, err)
		}
		if first { // however long it took to get here: nobody has been looked at yet
			r.began = time.Now()
		}
		if o := all[x.slot]; first && x.mine.Writes != 0 && o != nil && o.Owner != x.mine.Owner {
			return errors.Join(x.put(ctx, t), x.alone(ctx, t, note))
		}
		if waits, err := r.judgeAll(ctx, all[:], first); err != nil || !waits {
			return err
		}
		if err := pause(ctx, leaseLook); err != nil {
			return err
		}
		if err := x.put(ctx, t); err != nil { // that other may be looking, too
			return errs.With(errs.Device, err)
		}
	}
}

// rivals are the records of others that one looks at until each is known to be alive or dead.
type rivals struct {
	x     *leased
	t     *target
	note  func(string)
	began time.Time
	was   map[uuid.UUID]uint64 // counts at the last look, by owner
}

// judgeAll judges all records that disturb this one, and waits where any is not known yet.
func (r *rivals) judgeAll(ctx context.Context, all []*wireLease, first bool) (waits bool,
	err error) {
	for i, o := range all {
		if o == nil || o.process == r.x.mine.process || !r.x.mine.disturbs(o) {
			continue
		}
		wait, err := r.judge(ctx, i, o, first)
		if err != nil {
			return false, err
		}
		waits = waits || wait
	}
	return waits, nil
}

// disturbs reports whether two users must not be there at once: two who write, or one who writes
// what the other reads.
func (w *wireLease) disturbs(o *wireLease) bool {
	any := [16]byte{}
	return w.Writes+o.Writes == 2 || w.Writes+o.Writes == 1 &&
		(w.Dataset == o.Dataset || w.Dataset == any || o.Dataset == any)
}

// judge refuses where the owner of a record is alive, clears the record where its owner is dead,
// and waits where neither is known yet.
func (r *rivals) judge(ctx context.Context, slot int, o *wireLease, first bool) (wait bool,
	err error) {
	known := r.x.mine.knows(&o.process)
	count, seen := r.was[o.Owner]
	dead := time.Since(r.began) >= leaseDead
	switch {
	case known && o.alive(), seen && count != o.Count,
		!known && !seen && dead: // it came meanwhile
		return false, errs.New(errs.Refused,
			"ssd %s: %s; wait until that has ended, stop it, or choose other SSDs", r.t.name, o)
	case known, dead:
		return false, errs.With(errs.Device, r.t.putLease(ctx, slot, nil))
	}
	if first {
		r.note(fmt.Sprintf("ssd %s: %s; looking for up to %v whether it is alive", r.t.name, o,
			leaseDead))
	}
	r.was[o.Owner] = o.Count
	return true, nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// keep counts on until ctx ends, the first time as soon as another may have taken the same slot.
// A failure is tried again the next time.
func (l *Lease) keep(ctx context.Context) {
	defer close(l.done)
	for d := leaseSettle; pause(ctx, d) == nil; d = leaseEvery {
		l.renew(ctx)
	}
}

// renew counts on, and looks after the generation.
func (l *Lease) renew(ctx context.Context) {
	l.each(ctx, 2*leaseEvery, func(ctx context.Context, x *leased, t *target) {
		if l.look(ctx, x, t) == nil && x.slot >= 0 {
			_ = x.put(ctx, t)
		}
	})
}

// each does something with each SSD that can be opened now, on each for so long at most.
func (l *Lease) each(ctx context.Context, limit time.Duration, fn func(ctx context.Context,
	x *leased, t *target)) {
	l.io.Lock()
	defer l.io.Unlock()
	for _, x := range l.ssds {
		if x.slot < 0 && x.loads == (uuid.UUID{}) {
			continue
		}
		op, cancel := context.WithTimeout(ctx, limit)
		_ = x.with(op, func(t *target) error { fn(op, x, t); return nil })
		cancel()
	}
}

// look finds out whether the SSD still holds the load that is read. Its error says that the SSD
// cannot be read now.
func (l *Lease) look(ctx context.Context, x *leased, t *target) error {
	if x.loads == (uuid.UUID{}) {
		return nil
	}
	// A load of another dataset beside this one writes the superblock in slot 0, too.
	for again := 0; ; again++ {
		c, err := t.inSlot(x.place).readCopies(ctx)
		switch {
		case err != nil:
			return err
		case c.read[0] != nil && c.read[1] != nil:
			return c.read[1]
		case c.read[0] != nil || c.read[1] != nil:
			return nil // the run knows of it
		}
		sb, _, err := c.best()
		if err == nil && sb.LoadID == x.loads && sb.State == StateComplete {
			return nil
		}
		if again == 2 || err == nil && sb.LoadID != x.loads {
			break
		}
		if err := pause(ctx, leaseSettle); err != nil {
			return err
		}
	}
	by := "somebody who left no name"
	if all, err := t.leases(ctx); err == nil {
		for _, o := range all {
			if o != nil && o.Writes != 0 {
				by = o.String()
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = errs.New(errs.Device,
			"ssd %s was written anew while this run read it: it holds another load than the run began with (%s); what was read since is worth nothing",
			x.name, by)
		close(l.lost)
	}
	return nil
}

// Lost is closed when an SSD holds another load than before; Err says so.
func (l *Lease) Lost() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.lost
}

// Err is nil as long as all SSDs hold what they held.
func (l *Lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Blame looks now, and returns why an error may have come: Err, or else the error.
func (l *Lease) Blame(ctx context.Context, err error) error {
	if l == nil || err == nil || errs.ClassOf(err) == errs.Interrupted {
		return err
	}
	if errs.ClassOf(err) == errs.Device && !errors.As(err, new(*gpuio.ChecksumError)) {
		return err // the SSD has reported its fault
	}
	l.each(context.WithoutCancel(ctx), 2*leaseEvery, func(ctx context.Context, x *leased,
		t *target) {
		_ = l.look(ctx, x, t)
	})
	if lost := l.Err(); lost != nil {
		l.blamed = true
		return lost
	}
	return err
}

// Close ends the lease, after one more look. Its error is Err, where Blame has not returned that.
func (l *Lease) Close() error {
	if l == nil {
		return nil
	}
	l.cancel()
	<-l.done
	for _, remove := range l.unguard {
		remove()
	}
	l.each(context.Background(), leaseFarewell, func(ctx context.Context, x *leased,
		t *target) {
		unread := l.look(ctx, x, t)
		if x.slot < 0 || unread != nil {
			return
		}
		if all, err := t.leases(ctx); err == nil && all[x.slot] != nil &&
			all[x.slot].Owner == x.mine.Owner {
			_ = t.putLease(ctx, x.slot, nil)
		}
		x.slot = -1
	})
	if l.blamed {
		return nil
	}
	return l.Err()
}
