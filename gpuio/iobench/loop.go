package iobench

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"time"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/hostmem"
	"helios/internal/philox"
)

// bench is one measurement on the wall clock.
type bench struct {
	draw
	cfg     Config
	l       gpuio.Layout
	r       gpuio.Reader
	row     *Row
	sets    []*benchSet
	samples []sample
	sampled int64
	failed  error
	last    time.Time // when the latest set ended, for the timeline
	// Where the CPU cannot address the destination, sampled rows come here.
	copies cuda.Stream
	bounce cuda.Buffer
}

type benchSet struct {
	name           string
	rows, pos, dst cuda.Buffer
	rowIDs         []int64
	rs             gpuio.ReadSet
	pending        gpuio.Pending
	began          time.Time
	marks          []chosen
}

// sample is a row as it was read; without data, one that was not.
type sample struct {
	row  int64
	data []byte
}

// mark is the state of a run at one moment.
type mark struct {
	at   time.Time
	cpu  time.Duration
	stat gpuio.Stats
}

func (b *bench) mark(at time.Time) mark { return mark{at, cpuTime(), b.r.Stats()} }

// between enters what happened from one mark to another into the row, and returns the latencies.
func (b *bench) between(from, to mark) gpuio.Histogram {
	lat := to.stat.Latency.Since(&from.stat.Latency)
	reads := float64(lat.Count())
	if reads == 0 {
		return lat
	}
	b.row.Seconds = to.at.Sub(from.at).Seconds()
	b.row.IOPS = reads / b.row.Seconds
	b.row.CPUPerIO = (to.cpu - from.cpu).Seconds() * 1e6 / reads
	return lat
}

// keepInFlight keeps sets in flight. Unless the sets' size is given, each has several times the
// depth of rows for every SSD, so that every queue has rows in its pending list whenever a read
// completes: the depth is what is outstanding, all the time.
func (b *bench) keepInFlight(ctx context.Context) error {
	if err := b.makeSets(); err != nil {
		return err
	}
	for _, s := range b.sets {
		b.fill(s)
		if err := b.submit(ctx, s); err != nil {
			return err
		}
	}
	var from, to mark
	warm := time.Now().Add(b.cfg.WarmUp)
	for i := 0; b.failed == nil; i++ {
		s := b.sets[i%len(b.sets)]
		if err := b.wait(ctx, s); err != nil {
			return err
		}
		now := time.Now()
		if from.at.IsZero() && !now.Before(warm) {
			from = b.mark(now)
		} else if !from.at.IsZero() && now.Sub(from.at) >= b.cfg.Duration {
			// Sets that were done before the start can be all that was waited for so far.
			to = b.mark(now)
			if measured := to.stat.Latency.Since(&from.stat.Latency); measured.Count() > 0 {
				break
			}
		}
		if b.failed != nil {
			break
		}
		b.fill(s)
		if err := b.submit(ctx, s); err != nil {
			return err
		}
	}
	for _, s := range b.sets {
		if err := b.wait(ctx, s); err != nil {
			return err
		}
	}
	if !to.at.IsZero() {
		lat := b.between(from, to)
		b.row.latency(&lat)
	}
	return nil
}

func (b *bench) makeSets() error {
	for i := range setsInFlight {
		s, err := b.newSet()
		if err != nil {
			return err
		}
		s.name = fmt.Sprintf("set %d", i)
		b.sets = append(b.sets, s)
	}
	return nil
}

func (b *bench) newSet() (*benchSet, error) {
	n := int64(b.cfg.setRows)
	s := &benchSet{}
	var err error
	if s.rows, err = b.cfg.Dev.Alloc(cuda.MemPinned, n*8, "bench rows"); err != nil {
		return s, err
	}
	if s.pos, err = b.cfg.Dev.Alloc(cuda.MemPinned, n*4, "bench positions"); err != nil {
		return s, errors.Join(err, s.rows.Free())
	}
	stride := int64(b.cfg.RowBytes+3) &^ 3
	if s.dst, err = b.cfg.Dev.Alloc(cuda.MemDevice, n*stride, "bench destination"); err != nil {
		return s,
			errors.Join(
				fmt.Errorf(
					"bench io keeps %d sets of %d rows; use fewer SSDs, less depth or smaller rows: %w",
					setsInFlight, n, err), s.rows.Free(), s.pos.Free())
	}
	for i, pos := 0, hostmem.View[uint32](s.pos.Bytes()); i < int(n); i++ {
		pos[i] = uint32(i)
	}
	s.rs = gpuio.ReadSet{Rows: s.rows.Ptr(), Pos: s.pos.Ptr(), Dst: s.dst, DstStride: stride,
		SSDOffset: make([]int64, len(b.cfg.SSDs)+1)}
	return s, nil
}

func (b *bench) free() error {
	var err error
	if b.copies != nil {
		err = b.copies.Close()
	}
	if b.bounce != nil {
		err = errors.Join(err, b.bounce.Free())
	}
	for _, s := range b.sets {
		err = errors.Join(err, gpuio.Forget(b.r, s.dst), s.rows.Free(), s.pos.Free(), s.dst.Free())
	}
	return err
}

// draw are the random numbers of a run.
type draw struct {
	key     [2]uint32
	ctr     uint64
	rnd     [4]uint32
	rndLeft int
}

// random is the next 32 random bits.
func (d *draw) random() uint32 {
	if d.rndLeft == 0 {
		d.rnd = philox.Block(d.key, [4]uint32{uint32(d.ctr), uint32(d.ctr >> 32)})
		d.ctr++
		d.rndLeft = 4
	}
	d.rndLeft--
	return d.rnd[d.rndLeft]
}

func (d *draw) below(n int64) int64 {
	if n <= 1<<24 {
		return int64(uint64(d.random()) * uint64(n) >> 32)
	}
	hi, _ := bits.Mul64(uint64(d.random())<<32|uint64(d.random()), uint64(n))
	return int64(hi)
}

// spread draws a closed loop's set: as many rows of each SSD, but for the remainder.
func (d *draw) spread(l *gpuio.Layout, rows []int64, offsets []int64) {
	n, k := int64(len(rows)), int64(l.SSDs)
	i := 0
	for ssd := range k {
		offsets[ssd] = int64(i)
		here := n / k
		if ssd < n%k {
			here++
		}
		slots := l.RowsOn(int(ssd))
		for range here {
			rows[i] = d.below(slots)*k + ssd
			i++
		}
	}
	offsets[k] = n
}

func (b *bench) fill(s *benchSet) {
	s.rowIDs = hostmem.View[int64](s.rows.Bytes())[:b.cfg.setRows]
	b.spread(&b.l, s.rowIDs, s.rs.SSDOffset)
}

// submit hands a set over. A launch that fails is no reason to stop the other rows of results.
func (b *bench) submit(ctx context.Context, s *benchSet) error {
	if err := b.choose(ctx, s); err != nil {
		return err
	}
	s.began = time.Now()
	p, err := b.r.Submit(ctx, &s.rs)
	if err != nil && ctx.Err() == nil {
		if b.failed == nil {
			b.failed = err
		}
		return nil
	}
	s.pending = p
	return err
}

// await waits for a set, for a bounded time.
func (s *benchSet) await(ctx context.Context, patience time.Duration) error {
	wctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := s.pending.Wait(wctx)
	if err != nil && wctx.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("a set of %d rows was not read within %v: %w", len(s.rowIDs),
			patience, err)
	}
	return err
}

// wait ends a set and keeps some of its rows for the audit.
func (b *bench) wait(ctx context.Context, s *benchSet) error {
	if s.pending == nil {
		return nil
	}
	return b.ended(ctx, s, s.await(ctx, b.cfg.patience), time.Now)
}

// ended deals with a set that ended, well or with err.
func (b *bench) ended(ctx context.Context, s *benchSet, err error, when func() time.Time) error {
	s.pending = nil
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if b.failed == nil {
			b.failed = err
		}
		return nil
	}
	if tl := b.cfg.Timeline; tl.On() {
		now := when()
		tl.Span(b.cfg.Track, s.name, tl.NS(s.began), now.Sub(s.began).Nanoseconds(),
			map[string]any{"rows": len(s.rowIDs)})
		if !b.last.IsZero() && now.After(b.last) {
			tl.Counter(b.cfg.Track+": rows/s", "rows/s", tl.NS(now),
				float64(len(s.rowIDs))/now.Sub(b.last).Seconds())
		}
		b.last = now
	}
	for _, m := range s.marks {
		data, err := b.look(ctx, s, m.index*s.rs.DstStride)
		if err != nil {
			return err
		}
		b.samples[m.sample] = sample{row: s.rowIDs[m.index],
			data: append(b.samples[m.sample].data[:0], data...)}
	}
	return nil
}

// chosen is a row of a set that is to be compared with the backing.
type chosen struct {
	sample int
	index  int64
}

// choose picks some rows of a set before it is read; when there are enough samples, new ones
// displace old ones. The places of these rows are filled with a byte that changes, so that a read
// which brings nothing is not mistaken for one that brings what is there already.
func (b *bench) choose(ctx context.Context, s *benchSet) error {
	s.marks = s.marks[:0]
	for range min(4, len(s.rowIDs)) {
		b.sampled++
		k := int64(len(b.samples))
		if k == int64(b.cfg.Samples) {
			if k = b.below(b.sampled); k >= int64(len(b.samples)) {
				continue
			}
		} else {
			b.samples = append(b.samples, sample{})
		}
		i := b.below(int64(len(s.rowIDs)))
		s.marks = append(s.marks, chosen{int(k), i})
		if err := b.spoil(ctx, s, i*s.rs.DstStride, byte(b.random())|1); err != nil {
			return err
		}
	}
	return nil
}

// spoil fills the place of a row.
func (b *bench) spoil(ctx context.Context, s *benchSet, at int64, v byte) error {
	if mem := s.dst.Bytes(); mem != nil {
		mem = mem[at:][:b.cfg.RowBytes]
		for i := range mem {
			mem[i] = v
		}
		return nil
	}
	if err := b.copyStream(); err != nil {
		return err
	}
	if err := b.copies.Fill(s.dst.Ptr()+cuda.DevicePtr(at), v, int64(b.cfg.RowBytes)); err != nil {
		return err
	}
	return b.copies.Synchronize(ctx)
}

// copyStream makes what sampling needs where the CPU cannot address the destination.
func (b *bench) copyStream() (err error) {
	if b.copies != nil {
		return nil
	}
	if b.bounce, err = b.cfg.Dev.Alloc(cuda.MemPinned, int64(b.cfg.RowBytes),
		"bench sample"); err != nil {
		return err
	}
	b.copies, err = b.cfg.Dev.NewStream(cuda.StreamOptions{Name: "bench sample"})
	return err
}

// look gives the CPU's view of a row of the destination, good until the next.
func (b *bench) look(ctx context.Context, s *benchSet, at int64) ([]byte, error) {
	n := int64(b.cfg.RowBytes)
	if mem := s.dst.Bytes(); mem != nil {
		return mem[at:][:n], nil
	}
	if err := b.copyStream(); err != nil {
		return nil, err
	}
	if err := b.copies.Copy(b.bounce.Ptr(), s.dst.Ptr()+cuda.DevicePtr(at), n); err != nil {
		return nil, err
	}
	if err := b.copies.Synchronize(ctx); err != nil {
		return nil, err
	}
	return b.bounce.Bytes(), nil
}

// cpuTime returns what the process has used so far, in user and kernel mode.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
