package gpuio

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// sums are the checksums of a rig's rows.
func (r *rig) sums() []uint32 {
	sums := make([]uint32, r.layout.Rows)
	b := make([]byte, r.layout.RowBytes+8)
	for i := range sums {
		fillRow(int64(i), b[:r.layout.RowBytes])
		sums[i] = crc32.Checksum(b[:r.layout.RowBytes], crc32.MakeTable(crc32.Castagnoli))
	}
	return sums
}

func (r *rig) checked(inner Reader, err error) Reader {
	r.t.Helper()
	require.NoError(r.t, err)
	return r.reader(NewChecked(r.dev, inner, r.ssds, r.layout, r.sums()))
}

// corrupt flips a bit of a row in the file behind its SSD.
func (r *rig) corrupt(row int64) {
	s, lba, _, off := r.layout.Locate(row)
	f, err := os.OpenFile(r.ssds[s].BackingPath, os.O_RDWR, 0)
	require.NoError(r.t, err)
	pos := (rigDataStart+int64(lba))*int64(r.layout.LBABytes) + int64(off) +
		int64(r.layout.RowBytes)/2
	b := make([]byte, 1)
	_, err = f.ReadAt(b, pos)
	require.NoError(r.t, err)
	b[0] ^= 8
	_, err = f.WriteAt(b, pos)
	require.NoError(r.t, err)
	require.NoError(r.t, f.Close())
}

// stacks are all that a checked Reader may read through.
var stacks = []struct {
	name string
	make func(r *rig) (Reader, error)
}{
	{"async",
		func(r *rig) (Reader,
			error) {
			return NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32})
		}},
	{"sync",
		func(r *rig) (Reader,
			error) {
			return NewSync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32})
		}},
	{"cpu",
		func(r *rig) (Reader,
			error) {
			return NewCPU(r.dev, r.ssds, r.layout, CPUOptions{Depth: 32})
		}},
	{"mmap", func(r *rig) (Reader, error) { return NewMmap(r.dev, r.ssds, r.layout) }},
}

// TestCheckedReads: over every stack and size of rows, good rows pass, and rows that have changed
// on the SSD are read twice and named, while all others of the set are in place.
func TestCheckedReads(t *testing.T) {
	for _, st := range stacks {
		for _, c := range []struct{ ssds, lba, row int }{{1, 512, 16}, {3, 4096, 400},
			{2, 512, 512}, {2, 4096, 5000}, {1, 512, 7}} {
			t.Run(fmt.Sprintf("%s/%d", st.name, c.row), func(t *testing.T) {
				r := newRig(t, rigOptions{ssds: c.ssds, lba: c.lba, rowBytes: c.row, rows: 700})
				rd := r.checked(st.make(r))
				require.Equal(t, st.name, rd.Name())
				rng := rand.New(rand.NewPCG(1, uint64(c.row)))
				var all []*testSet
				for range 3 {
					s := r.newSet(rng, 1+rng.IntN(500), int64(c.row+3), int64(rng.IntN(2)*9))
					s.read(rd)
					all = append(all, s)
				}
				st := rd.Stats()
				require.Zero(t, st.Mismatch+st.Failed)
				require.EqualValues(t, 3, st.Sets)

				s := all[0]
				lost := map[int64]bool{s.ids[0]: true}
				r.corrupt(s.ids[0])
				n := int64(0)
				for _, id := range s.ids { // rows may be in a set more than once
					if id == s.ids[0] {
						n++
					}
				}
				ctx := testCtx(t)
				p, err := rd.Submit(ctx, s.rs)
				require.NoError(t, err)
				rst, err := p.Wait(ctx)
				require.Error(t, err)
				require.EqualValues(t, int64(len(s.ids))-n, rst.Rows)
				require.Equal(t, errs.Device, errs.ClassOf(err))
				var set *SetError
				require.ErrorAs(t, err, &set)
				require.Equal(t, n, set.Failed)
				require.EqualValues(t, len(s.ids), set.Rows)
				var sum *ChecksumError
				require.ErrorAs(t, err, &sum)
				ssd, lba, blocks, _ := r.layout.Locate(s.ids[0])
				b := make([]byte, c.row+8)
				fillRow(s.ids[0], b[:c.row])
				want := crc32.Checksum(b[:c.row], castagnoli)
				b[c.row/2] ^= 8
				require.Equal(t, &ChecksumError{Row: s.ids[0], SSD: r.ssds[ssd].Name,
					LBA: rigDataStart + lba, Blocks: blocks,
					Want: want, Got: crc32.Checksum(b[:c.row], castagnoli)}, sum)
				require.ErrorContains(t, err,
					fmt.Sprintf("row %d: nvme ssd%d: LBA %d+%d: wrong data: CRC32C", s.ids[0], ssd,
						rigDataStart+lba, blocks))
				require.ErrorContains(t, err,
					fmt.Sprintf("run \"heliosctl verify --ssds ssd%d\"", ssd))
				s.check(lost)
				again, err2 := p.Wait(ctx)
				require.Equal(t, rst, again)
				require.Equal(t, err, err2)
				after := rd.Stats()
				require.Equal(t, 2*n, after.Mismatch, "both times")
				require.Equal(t, n, after.Failed)
				require.Equal(t, st.Rows+rst.Rows, after.Rows)
				require.EqualValues(t, 4, after.Sets)
				require.GreaterOrEqual(t, after.Retries, int64(1))
				freeSets(rd, all)
			})
		}
	}
}

// spoiler spoils rows in place when its inner Reader says that they are there, as a DMA that went
// wrong does; it counts and can be told when.
type spoiler struct {
	Reader
	mu    sync.Mutex
	spoil map[int64]int // row: how many times; -1: always
	sets  atomic.Int64
	fail  func(set int64) error // by number of the set, in place of reading it
	wait  func(ctx context.Context, set int64) error
}

type spoilt struct {
	Pending
	s   *spoiler
	rs  *ReadSet
	set int64
}

func (s *spoiler) Submit(ctx context.Context, rs *ReadSet) (Pending, error) {
	n := s.sets.Add(1)
	if s.fail != nil {
		if err := s.fail(n); err != nil {
			return nil, err
		}
	}
	p, err := s.Reader.Submit(ctx, rs)
	if err != nil {
		return nil, err
	}
	return &spoilt{p, s, rs, n}, nil
}

func (s *spoiler) Forget(b cuda.Buffer) error { return Forget(s.Reader, b) }

func (p *spoilt) Wait(ctx context.Context) (ReadStats, error) {
	if p.s.wait != nil {
		if err := p.s.wait(ctx, p.set); err != nil {
			if ctx.Err() == nil { // the set has ended
				_, _ = p.Pending.Wait(ctx)
			}
			return ReadStats{}, err
		}
	}
	st, err := p.Pending.Wait(ctx)
	if err != nil {
		return st, err
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	lo, hi := p.rs.SSDOffset[0], p.rs.SSDOffset[len(p.rs.SSDOffset)-1]
	for i := lo; i < hi; i++ {
		row := *at[int64](p.rs.Rows, int(i))
		if n := p.s.spoil[row]; n != 0 {
			p.s.spoil[row] = n - 1
			p.rs.Dst.Bytes()[p.rs.DstOffset+
				int64(*at[uint32](p.rs.Pos, int(i)))*p.rs.DstStride] ^= 1
		}
	}
	return st, nil
}

func spoilRig(t *testing.T, rows int64) (*rig, *spoiler, Reader) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: rows, ram: true, sms: 1})
	inner, err := NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32, CoalesceBytes: -1})
	require.NoError(t, err)
	s := &spoiler{Reader: inner, spoil: map[int64]int{}}
	return r, s, r.checked(s, nil)
}

// wholeSet is a set of all rows of a rig, in order.
func (r *rig) wholeSet() *testSet {
	s := r.newSet(rand.New(rand.NewPCG(3, 4)), int(r.layout.Rows), int64(r.layout.RowBytes), 0)
	ids := s.ids[:0]
	n := int64(r.layout.SSDs)
	for b := range n {
		for row := b; row < r.layout.Rows; row += n {
			ids = append(ids, row)
		}
		s.rs.SSDOffset[b+1] = int64(len(ids))
	}
	copy(hostmem.View[int64](s.rowBuf.Bytes()), ids)
	return s
}

// TestSpoiltOnTheWay: what goes wrong once is mended by the second read, and counted.
func TestSpoiltOnTheWay(t *testing.T) {
	r, sp, rd := spoilRig(t, 600)
	s := r.wholeSet()
	for _, row := range []int64{0, 1, 300, 599} {
		sp.spoil[row] = 1
	}
	st := s.read(rd)
	require.EqualValues(t, 604, st.Commands)
	require.EqualValues(t, 604*512, st.Bytes)
	require.EqualValues(t, 4, st.Retries)
	all := rd.Stats()
	require.EqualValues(t, 4, all.Mismatch)
	require.EqualValues(t, 600, all.Rows)
	require.EqualValues(t, 1, all.Sets)
	require.Zero(t, all.Failed)
	require.EqualValues(t, 2, sp.sets.Load())

	// One of them again and again.
	sp.spoil[300], sp.spoil[7] = -1, 1
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	st, err = p.Wait(testCtx(t))
	var sum *ChecksumError
	require.ErrorAs(t, err, &sum)
	require.EqualValues(t, 300, sum.Row)
	require.EqualValues(t, 599, st.Rows)
	s.check(map[int64]bool{300: true})
	all = rd.Stats()
	require.EqualValues(t, 4+2+1, all.Mismatch)
	require.EqualValues(t, 1199, all.Rows)
	require.EqualValues(t, 1, all.Failed)
	s.free(rd)
}

// TestSecondReadFails: the rows cannot be read again, or more are wrong than is tried.
func TestSecondReadFails(t *testing.T) {
	r, sp, rd := spoilRig(t, 2*checkAgain+10)
	s := r.wholeSet()
	ctx := testCtx(t)
	sp.spoil[12] = 1
	sp.fail = func(n int64) error {
		if n == 2 {
			return errs.New(errs.Device, "no queue is left")
		}
		return nil
	}
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	st, err := p.Wait(ctx)
	require.ErrorContains(t, err,
		"1 of 8202 rows not read; first: row 12: nvme ssd0: LBA 11+1: wrong data")
	require.ErrorContains(t, err, "they were not read again: no queue is left")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.EqualValues(t, r.layout.Rows-1, st.Rows)
	require.EqualValues(t, r.layout.Rows-1, rd.Stats().Rows)

	for row := range int64(checkAgain + 1) {
		sp.spoil[row] = 1
	}
	sets := sp.sets.Load()
	p, err = rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	_, err = p.Wait(ctx)
	var set *SetError
	require.ErrorAs(t, err, &set)
	require.EqualValues(t, checkAgain+1, set.Failed)
	require.Len(t, set.First, maxFails)
	require.ErrorContains(t, err, fmt.Sprintf("more than %d, which are not read again", checkAgain))
	require.Equal(t, sets+1, sp.sets.Load())

	// Just as many are.
	for row := range int64(checkAgain) {
		sp.spoil[row] = 1
	}
	s.read(rd)
	all := rd.Stats()
	require.EqualValues(t, 1+checkAgain+1+checkAgain, all.Mismatch)
	require.EqualValues(t, 1+checkAgain+1, all.Failed)
	require.EqualValues(t, 3*r.layout.Rows-all.Failed, all.Rows)

	// The second read fails in the middle.
	sp.spoil[12] = 1
	again := sp.sets.Load() + 2
	sp.wait = func(_ context.Context, n int64) error {
		if n == again {
			return errs.New(errs.Device, "the SSD is gone")
		}
		return nil
	}
	p, err = rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	_, err = p.Wait(ctx)
	require.ErrorContains(t, err, "gpuio async: 1 rows were wrong and read again: the SSD is gone")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	s.free(rd)
}

// TestCheckedInterrupted: a context that ends leaves the set where it is, in each stage, and the
// next Wait goes on; Forget refuses a destination that is being read again.
func TestCheckedInterrupted(t *testing.T) {
	r, sp, rd := spoilRig(t, 600)
	s := r.wholeSet()
	for _, stage := range []int64{1, 2} {
		sp.spoil[5] = 1
		first := sp.sets.Load()
		ctx, cancel := context.WithCancel(testCtx(t))
		sp.wait = func(ctx context.Context, n int64) error {
			if n == first+stage {
				cancel()
				require.Error(t, Forget(rd, s.rs.Dst))
				return fmt.Errorf("wait: %w", ctx.Err())
			}
			return nil
		}
		p, err := rd.Submit(ctx, s.rs)
		require.NoError(t, err)
		_, err = p.Wait(ctx)
		require.ErrorIs(t, err, context.Canceled)
		sp.wait = nil
		st, err := p.Wait(testCtx(t))
		require.NoError(t, err)
		require.EqualValues(t, 600, st.Rows)
		s.check(nil)
	}
	require.EqualValues(t, 2, rd.Stats().Mismatch)

	// Close ends what nobody waits for, wrong rows included.
	sp.spoil[5] = 1
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	require.NoError(t, rd.Close(testCtx(t)))
	s.check(nil)
	_, err = p.Wait(testCtx(t))
	require.NoError(t, err)
	require.EqualValues(t, 3, rd.Stats().Mismatch)
	_, err = rd.Submit(testCtx(t), s.rs)
	require.ErrorContains(t, err, "the reader is closed")
	require.NoError(t, s.rs.Dst.Free())
	require.NoError(t, s.rowBuf.Free())
	require.NoError(t, s.posBuf.Free())
}

// TestCheckedClosedEarly: Close with a context that has ended gives the rows up, and Wait says so.
func TestCheckedClosedEarly(t *testing.T) {
	r, sp, rd := spoilRig(t, 600)
	s := r.wholeSet()
	ctx, cancel := context.WithCancel(testCtx(t))
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(t, err)
	cancel()
	sp.wait = func(ctx context.Context, _ int64) error { return ctx.Err() }
	require.ErrorIs(t, rd.Close(ctx), context.Canceled)
	_, err = p.Wait(testCtx(t))
	require.Error(t, err)
	require.NoError(t, s.rs.Dst.Free())
	require.NoError(t, s.rowBuf.Free())
	require.NoError(t, s.posBuf.Free())
}

// TestCheckedConcurrently: many sets at once, waited for in any order and by several.
func TestCheckedConcurrently(t *testing.T) {
	r, sp, rd := spoilRig(t, 2000)
	for row := range int64(200) {
		sp.spoil[row*10] = 1
	}
	var wg sync.WaitGroup
	sets := make([]*testSet, 12)
	errsOf := make([]error, len(sets))
	for i := range sets {
		sets[i] = r.newSet(rand.New(rand.NewPCG(9, uint64(i))), 400, 512, 0)
	}
	for i, s := range sets {
		wg.Go(func() {
			ctx := testCtx(t)
			p, err := rd.Submit(ctx, s.rs)
			if err != nil {
				errsOf[i] = err
				return
			}
			var both sync.WaitGroup
			var other error
			both.Go(func() { _, other = p.Wait(ctx) })
			_, err = p.Wait(ctx)
			both.Wait()
			errsOf[i] = errors.Join(err, other)
		})
	}
	wg.Wait()
	for i, s := range sets {
		require.NoError(t, errsOf[i])
		s.check(nil)
	}
	st := rd.Stats()
	require.Positive(t, st.Mismatch)
	require.Zero(t, st.Failed)
	require.EqualValues(t, len(sets)*400, st.Rows)
	require.EqualValues(t, len(sets), st.Sets)
	freeSets(rd, sets)
}

func TestCheckedRefuses(t *testing.T) {
	r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: 512, rows: 100, ram: true})
	inner := r.async(AsyncOptions{})
	_, err := NewChecked(r.dev, inner, r.ssds, r.layout, make([]uint32, 99))
	require.ErrorContains(t, err,
		"99 row checksums for 100 rows; load the dataset again with option row-checksums")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	_, err = NewChecked(r.dev, inner, r.ssds[:1], r.layout, make([]uint32, 100))
	require.ErrorContains(t, err, "bind all stripes")
	rd := r.reader(NewChecked(r.dev, inner, r.ssds, r.layout, r.sums()))
	s := r.newSet(rand.New(rand.NewPCG(1, 1)), 1, 512, 0)
	s.rs.SSDOffset = []int64{0, 0, 0} // no rows
	p, err := rd.Submit(testCtx(t), s.rs)
	require.NoError(t, err)
	st, err := p.Wait(testCtx(t))
	require.NoError(t, err)
	require.Zero(t, st.Rows)
	s.rs.SSDOffset = []int64{0, 1}
	_, err = rd.Submit(testCtx(t), s.rs)
	require.ErrorContains(t, err, "bucket bounds")
	s.free(rd)
}

// BenchmarkCheckRows is the kernel on the host device.
func BenchmarkCheckRows(b *testing.B) {
	for _, row := range []int{64, 256, 1024, 4096} {
		b.Run(fmt.Sprintf("%dB", row), func(b *testing.B) {
			n := int64(32 << 20 / row)
			l, err := NewLayout(n, row, 1, 512)
			require.NoError(b, err)
			dev, err := cuda.NewHost(cuda.HostOptions{})
			require.NoError(b, err)
			own, err := NewSums(dev, n, func([]uint32) error { return nil })
			require.NoError(b, err)
			c := &checked{dev: dev, inner: &spoiler{Reader: &hostReader{name: "cpu"}}, layout: l,
				sums: own, own: own, turn: make(chan struct{}, 1)}
			require.NoError(b, c.open())
			rows, err := dev.Alloc(cuda.MemPinned, n*8, "rows")
			require.NoError(b, err)
			pos, err := dev.Alloc(cuda.MemPinned, n*4, "pos")
			require.NoError(b, err)
			dst, err := dev.Alloc(cuda.MemDevice, n*int64(row), "dst")
			require.NoError(b, err)
			perm := rand.New(rand.NewPCG(1, 1)).Perm(int(n))
			sums := words(c.sums.Bytes())
			for i := range n {
				hostmem.View[int64](rows.Bytes())[i] = i
				words(pos.Bytes())[i] = uint32(perm[i])
				sums[i] = crc32.Checksum(make([]byte, row), castagnoli)
			}
			rs := &ReadSet{Rows: rows.Ptr(), Pos: pos.Ptr(), SSDOffset: []int64{0, n}, Dst: dst,
				DstStride: int64(row)}
			b.SetBytes(n * int64(row))
			for b.Loop() {
				if _, count, err := c.run(rs, n); err != nil || count != 0 {
					b.Fatal(count, err)
				}
			}
			for _, x := range []cuda.Buffer{rows, pos, dst} {
				require.NoError(b, x.Free())
			}
			require.NoError(b, c.free())
			require.NoError(b, dev.Close())
		})
	}
}
