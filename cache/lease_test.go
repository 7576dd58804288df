package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
)

// A kernel that takes a while, so that copies come long after the decisions that they follow from.
type dawdleParams struct{ Microseconds int64 }

func init() {
	cuda.RegisterHost("cache_test_dawdle", func(_ *cuda.Block, p *dawdleParams) error {
		time.Sleep(time.Duration(p.Microseconds) * time.Microsecond)
		return nil
	})
}

// leaseStress is a training's use of a dynamic cache with everything in flight at once: one
// goroutine announces and admits, readers fill staging buffers in their own time or fail half-way,
// one finishes in order, one waits for the stream, looks at every row and releases. A failure ends
// a pass: what was admitted is abandoned, and the next pass uses the same cache.
type leaseStress struct {
	t      *testing.T
	dev    cuda.Device
	d      *Dynamic
	c      DynamicConfig
	dawdle cuda.Kernel
	st     cuda.Stream // of the copies
	look   cuda.Stream
	nodes  cuda.Buffer // of what is looked up after a failure
	ahead  cuda.Buffer // of an announcement, which the CPU reads
	window int
	ops    atomic.Int64 // rows admitted
	faults int64
	passes int64

	groups  chan *leaseGroup // free ones
	batches chan *leaseBatch
	free    []*Ticket
	freeMu  sync.Mutex
}

// leaseGroup is batches that are read together.
type leaseGroup struct {
	plan    *ReadPlan
	staging cuda.Buffer
	batches []*leaseBatch
	read    chan error
}

type leaseBatch struct {
	rows    []int64
	nodes   cuda.Buffer
	x       cuda.Buffer
	tickets []*Ticket
	done    cuda.Event
	group   *leaseGroup // of the last batch of a group: given back with it
}

const (
	leaseRowBytes = 32
	leaseRows     = 120 // of a batch, at most
	leaseGroupMax = 3
)

func leaseWord(row int64, w int) uint64 { return uint64(row+1)*0x9e3779b97f4a7c15 ^ uint64(w)<<60 }

func newLeaseStress(t *testing.T, name string, rng *rand.Rand) *leaseStress {
	c := DynamicConfig{Rows: 600, RowBytes: leaseRowBytes, Lines: Lines{SSDs: 2, RowsPerLine: 1,
		LineBytes: leaseRowBytes, RowStride: leaseRowBytes}, Policy: name,
		Directory: policy.Kinds()[rng.IntN(2)], Seed: rng.Uint64()}
	if rng.IntN(2) == 0 {
		c.Lines.RowsPerLine, c.Lines.LineBytes, c.Lines.RowStride = 3, 128, 40
	}
	c.Slots = 20 + rng.Int64N(c.Lines.Count(c.Rows)/2)
	dev := must(cuda.NewHost(cuda.HostOptions{SMs: 3}))(t)
	s := &leaseStress{t: t, dev: dev, c: c, d: must(NewDynamic(dev, c))(t), window: rng.IntN(4)}
	s.dawdle = must(dev.Kernel("cache_test_dawdle"))(t)
	s.st, s.look = must(dev.NewStream(cuda.StreamOptions{Name: "copies"}))(t),
		must(dev.NewStream(cuda.StreamOptions{Name: "lookups"}))(t)
	s.nodes = must(dev.Alloc(cuda.MemDevice, leaseRows*8, "nodes"))(t)
	s.ahead = must(dev.Alloc(cuda.MemDevice, leaseRows*8, "announced nodes"))(t)
	const groups, batches = 3, 9
	s.groups, s.batches = make(chan *leaseGroup, groups), make(chan *leaseBatch, batches)
	for range groups {
		s.groups <- &leaseGroup{
			plan: must(s.d.NewReadPlan())(t), read: make(chan error, 1),
			staging: must(dev.Alloc(cuda.MemDevice, leaseGroupMax*leaseRows*c.Lines.LineBytes,
				"staging"))(t),
		}
	}
	for range batches {
		s.batches <- &leaseBatch{
			nodes: must(dev.Alloc(cuda.MemDevice, leaseRows*8, "nodes"))(t),
			x:     must(dev.Alloc(cuda.MemDevice, leaseRows*leaseRowBytes, "features"))(t),
			done:  must(dev.NewEvent())(t),
		}
	}
	return s
}

// close frees everything: the device reports leaks.
func (s *leaseStress) close() {
	var all []error
	for range cap(s.groups) {
		g := <-s.groups
		all = append(all, g.plan.Close(), g.staging.Free())
	}
	for range cap(s.batches) {
		b := <-s.batches
		all = append(all, b.nodes.Free(), b.x.Free(), b.done.Close())
	}
	for _, t := range s.free {
		all = append(all, t.Close())
	}
	all = append(all, s.nodes.Free(), s.ahead.Free(), s.d.Close(), s.st.Close(), s.look.Close(),
		s.dev.Close())
	ok(s.t, errors.Join(all...))
}

func (s *leaseStress) ticket() *Ticket {
	s.freeMu.Lock()
	defer s.freeMu.Unlock()
	if n := len(s.free); n > 0 {
		t := s.free[n-1]
		s.free = s.free[:n-1]
		return t
	}
	t, _ := s.d.NewTicket()
	return t
}

func (s *leaseStress) giveBack(tickets ...*Ticket) {
	s.freeMu.Lock()
	defer s.freeMu.Unlock()
	s.free = append(s.free, tickets...)
}

var errStressRead = errors.New("a read failed")

// read is the SSDs': it fills a group's staging buffer, or a part of it.
func (s *leaseStress) read(g *leaseGroup, rng *rand.Rand, fail bool) {
	l, mem := s.c.Lines, g.staging.Bytes()
	rows, pos := []int64(nil), []uint32(nil)
	if g.plan.Lines > 0 {
		rows, pos = cuda.View[int64](g.plan.Rows, g.plan.Lines),
			cuda.View[uint32](g.plan.Pos, g.plan.Lines)
	}
	for i := range g.plan.Lines {
		if rng.IntN(400) == 0 {
			time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
		}
		if fail && i == g.plan.Lines/2 {
			break
		}
		for k := range l.RowsPerLine {
			row := (rows[i]/l.SSDs*l.RowsPerLine+k)*l.SSDs + rows[i]%l.SSDs
			for w := range leaseRowBytes / 8 {
				binary.LittleEndian.PutUint64(mem[int64(pos[i])*l.LineBytes+k*l.RowStride+
					int64(w)*8:], leaseWord(row, w))
			}
		}
	}
	if fail {
		g.read <- errStressRead
	} else {
		g.read <- nil
	}
}

// lookup admits a batch in parts.
func (s *leaseStress) lookup(ctx context.Context, rng *rand.Rand, nodes cuda.Buffer, rows []int64,
	tickets []*Ticket) ([]*Ticket, error) {
	s.d.NextBatch()
	copy(hostmem.View[int64](nodes.Bytes()), rows)
	for first := 0; first < len(rows); {
		count := min(1+rng.IntN(leaseRows), len(rows)-first)
		t := s.ticket()
		if err := s.d.Admit(ctx, s.look, nodes.Ptr(), int64(first), int64(count), t); err != nil {
			return tickets, err
		}
		s.ops.Add(int64(count))
		tickets = append(tickets, t)
		first += count
	}
	return tickets, nil
}

// admit looks the batches up in groups and starts their reads. After a failure it still looks those
// up that it has announced, for the window to end as it should, or has that forgotten; their
// tickets are spare.
func (s *leaseStress) admit(ctx context.Context, rng *rand.Rand, all [][]int64, failAt int,
	seed uint64, stop chan struct{}, admitted chan *leaseGroup, readers *sync.WaitGroup,
	spare *[]*Ticket) (err error) {
	announced, index := 0, 0
	for index < len(all) {
		var g *leaseGroup
		select {
		case <-stop:
		case g = <-s.groups:
		}
		if g == nil {
			break
		}
		g.batches = g.batches[:0]
		var tickets []*Ticket
		fails := false
		for end := min(index+1+rng.IntN(leaseGroupMax), len(all)); index < end; index++ {
			var b *leaseBatch
			select {
			case <-stop:
			case b = <-s.batches:
			}
			if b == nil {
				break
			}
			for ; s.window > 0 && announced < min(index+1+s.window, len(all)); announced++ {
				rows := all[announced]
				copy(hostmem.View[int64](s.ahead.Bytes()), rows)
				if err := s.d.Announce(ctx, s.look, s.ahead.Ptr(), int64(len(rows))); err != nil {
					return err
				}
			}
			b.rows, b.group = all[index], nil
			if b.tickets, err = s.lookup(ctx, rng, b.nodes, b.rows, b.tickets[:0]); err != nil {
				return err
			}
			tickets = append(tickets, b.tickets...)
			g.batches = append(g.batches, b)
			fails = fails || index == failAt
		}
		if len(g.batches) == 0 {
			s.groups <- g
			break
		}
		g.batches[len(g.batches)-1].group = g
		if err := s.d.Plan(g.plan, tickets...); err != nil {
			return err
		}
		own := rand.New(rand.NewPCG(seed, uint64(index)))
		readers.Go(func() { s.read(g, own, fails) })
		admitted <- g
	}
	if index < announced && rng.IntN(2) == 0 {
		s.d.Forget()
		return nil
	}
	for ; index < announced; index++ {
		if *spare, err = s.lookup(ctx, rng, s.nodes, all[index], *spare); err != nil {
			return err
		}
	}
	return nil
}

// pass runs up to n batches, with a failure among them where faulty.
func (s *leaseStress) pass(rng *rand.Rand, n int, faulty bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	all := make([][]int64, n)
	for i := range all {
		all[i] = someRows(rng, s.c.Rows, 1+rng.IntN(leaseRows))
	}
	failAt := -1
	if faulty {
		failAt = rng.IntN(n)
	}
	admitted, finished := make(chan *leaseGroup, cap(s.groups)),
		make(chan *leaseBatch, cap(s.batches))
	stop := make(chan struct{}) // closed at the first failure
	failed := sync.OnceFunc(func() { close(stop) })
	var wg, readers sync.WaitGroup
	defer readers.Wait()
	seed := rng.Uint64()
	problems := make(chan error, 3)
	report := func(err error) {
		if err != nil {
			failed()
			select {
			case problems <- err:
			default:
			}
		}
	}
	var spare []*Ticket
	wg.Go(func() { // admits
		defer close(admitted)
		report(s.admit(ctx, rng, all, failAt, seed, stop, admitted, &readers, &spare))
	})
	var lost []*leaseGroup // of the failed one and all later
	wg.Go(func() {         // finishes
		defer close(finished)
		count := seed % 100
		for g := range admitted {
			if err := <-g.read; err != nil || len(lost) > 0 {
				failed()
				lost = append(lost, g)
				continue
			}
			report(func() error {
				for _, b := range g.batches {
					if count++; count%4 == 0 {
						if err := cuda.Launch(s.st, s.dawdle,
							cuda.LaunchConfig{Blocks: 1, Threads: 32},
							dawdleParams{int64(count * 37 % 200)}); err != nil {
							return err
						}
					}
					for _, t := range b.tickets {
						if err := s.d.Finish(s.st, t, g.staging, b.x.Ptr(),
							leaseRowBytes); err != nil {
							return err
						}
					}
					if err := s.st.Record(b.done); err != nil {
						return err
					}
					finished <- b
				}
				return nil
			}())
		}
	})
	wg.Go(func() { // looks and releases
		for b := range finished {
			report(func() error {
				if err := b.done.Synchronize(ctx); err != nil {
					return err
				}
				x := b.x.Bytes()
				for i, row := range b.rows {
					for w := range leaseRowBytes / 8 {
						if got := binary.LittleEndian.Uint64(x[i*leaseRowBytes+
							w*8:]); got != leaseWord(row, w) {
							return fmt.Errorf("torn: word %d of row %d at position %d is %#x", w,
								row, i, got)
						}
					}
				}
				clear(x)
				for _, t := range b.tickets {
					if err := s.d.Release(t); err != nil {
						return err
					}
				}
				s.giveBack(b.tickets...)
				if b.group != nil {
					s.groups <- b.group
				}
				s.batches <- b
				return nil
			}())
		}
	})
	wg.Wait()
	select {
	case err := <-problems:
		return err
	default:
	}
	if len(lost) > 0 {
		readers.Wait()
		s.faults++
		if err := s.d.Abandon(lost[0].batches[0].tickets[0]); err != nil {
			return err
		}
	}
	s.giveBack(spare...)
	for _, g := range lost {
		for _, b := range g.batches {
			s.giveBack(b.tickets...)
			s.batches <- b
		}
		s.groups <- g
	}
	if faulty != (len(lost) > 0) {
		return fmt.Errorf("a pass with a fault: %v, and %d groups failed", faulty, len(lost))
	}
	s.passes++
	return nil
}

// slots compares every slot with the line that the directory has in it.
func (s *leaseStress) slots() error {
	l, mem, find := s.c.Lines, s.d.slots.Bytes(), finder(s.t, s.d, nil)
	for n := range l.Count(s.c.Rows) {
		slot := find(n)
		if slot < 0 {
			continue
		}
		for k := range l.RowsPerLine {
			row := (n/l.SSDs*l.RowsPerLine+k)*l.SSDs + n%l.SSDs
			for w := range leaseRowBytes / 8 {
				if got := binary.LittleEndian.Uint64(mem[int64(slot)*l.LineBytes+k*l.RowStride+
					int64(w)*8:]); got != leaseWord(row, w) {
					return fmt.Errorf("slot %d: word %d of row %d of line %d is %#x", slot, w,
						row, n, got)
				}
			}
		}
	}
	return nil
}

// TestLeasesUnderStress: a million rows are leased, read, delivered and released while reads are
// late and fail. None is torn, every failure's lines are gone, and nothing is left at the end.
func TestLeasesUnderStress(t *testing.T) {
	total := int64(1_000_000)
	if wide.Lean() {
		total = 20_000
	}
	rng := seeded(t)
	var ops, faults, passes int64
	for _, name := range policy.Online() {
		s := newLeaseStress(t, name, rng)
		for s.ops.Load() < total/int64(len(policy.Online())) {
			ok(t, s.pass(rng, 1+rng.IntN(60), rng.IntN(3) == 0))
			ok(t, s.slots())
		}
		if st := s.d.Stats(); st.Hits == 0 || st.Evicted == 0 || s.faults == 0 && !wide.Lean() {
			t.Errorf("%s: %+v with %d faults: nothing was tried", name, st, s.faults)
		}
		s.close()
		ops, faults, passes = ops+s.ops.Load(), faults+s.faults, passes+s.passes
	}
	t.Logf("%d rows leased in %d passes, %d of which failed", ops, passes, faults)
	if !wide.Lean() && ops < total {
		t.Errorf("%d rows", ops)
	}
}
