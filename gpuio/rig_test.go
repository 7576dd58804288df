package gpuio

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/faultinject"
	"helios/internal/hostmem"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// rig is a set of software SSDs that hold a layout's rows, and a device. Row contents are a
// function of the row number; the files are written directly, not through anything under test.
type rig struct {
	t      testing.TB
	dev    cuda.Device
	ssds   []*SSD
	buses  []*proxy.Bus
	layout Layout
	faults *faultinject.Set
}

type rigOptions struct {
	ssds, lba, rowBytes int
	rows                int64
	ram                 bool
	together            bool // all stripes are on one SSD
	sms                 int
	faults              string // of the first SSD
	proxy               func(*proxy.Config)
	wrap                func(nvme.Bus) nvme.Bus
}

const rigDataStart = 5

// rigDevice makes the device of new rigs; nil: the host device.
var rigDevice func(testing.TB) cuda.Device

// rigMemory is the memory rung of the rigs' async readers; nil: what the options say.
var rigMemory *Memory

// fillRow writes row r's content.
func fillRow(r int64, b []byte) {
	x := uint64(r)*0x9E3779B97F4A7C15 + 1
	var w [8]byte
	for i := 0; i < len(b); i += 8 {
		x ^= x >> 12
		x ^= x << 25
		x ^= x >> 27
		binary.LittleEndian.PutUint64(w[:], x*0x2545F4914F6CDD1D)
		copy(b[i:], w[:])
	}
}

func testCtx(t testing.TB) context.Context {
	limit := 60 * time.Second
	// a hundred times slower than alone beside other tests of the kind
	if raceEnabled || rigDevice != nil {
		limit *= 4
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	testrig.CheckLeaks(t)
	ctx := testCtx(t)
	l, err := NewLayout(o.rows, o.rowBytes, o.ssds, o.lba)
	require.NoError(t, err)
	r := &rig{t: t, layout: l}
	dir := t.TempDir()
	if o.ram {
		dir = testrig.MemoryDir(t)
	}
	if rigDevice != nil {
		r.dev = rigDevice(t)
	} else {
		r.dev, err = cuda.NewHost(cuda.HostOptions{SMs: o.sms})
		require.NoError(t, err)
	}
	t.Cleanup(func() { require.NoError(t, r.dev.Close()) })
	stripes := o.ssds
	if o.together {
		o.ssds = 1
	}
	for s := range o.ssds {
		path := filepath.Join(dir, fmt.Sprintf("ssd%d.img", s))
		lbas := rigDataStart + l.LBAsOn(s)
		if o.together {
			lbas = rigDataStart + int64(stripes)*(l.LBAsOn(0)+1)
		}
		size := (lbas*int64(o.lba) + 4095) / 4096 * 4096
		img := make([]byte, max(size, 4096))
		for i := range img {
			img[i] = 0xA5 // padding must never show up in a row
		}
		for row := range o.rows {
			stripe, lba, _, off := l.Locate(row)
			if stripe == s || o.together {
				pos := (int64(dataStart(o, l, stripe))+int64(lba))*int64(o.lba) + int64(off)
				fillRow(row, img[pos:pos+int64(o.rowBytes)])
			}
		}
		require.NoError(t, os.WriteFile(path, img, 0o600))
		cfg := proxy.Config{Path: path, LBABytes: o.lba, RAM: o.ram,
			PollDoorbells: rigDevice != nil}
		if o.proxy != nil {
			o.proxy(&cfg)
		}
		bus, err := proxy.Open(cfg)
		require.NoError(t, err)
		var b nvme.Bus = bus
		if o.faults != "" {
			var set *faultinject.Set
			if s == 0 {
				set, err = faultinject.Parse(o.faults)
				require.NoError(t, err)
				r.faults = set
			}
			b = faultbus.New(b, set, faultbus.Options{PollDoorbells: cfg.PollDoorbells})
		}
		if o.wrap != nil {
			b = o.wrap(b)
		}
		ctrl, err := nvme.Open(ctx, b, nvme.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, ctrl.Close(context.Background())) })
		r.buses = append(r.buses, bus)
		for k := range stripes {
			if k == s || o.together {
				r.ssds = append(r.ssds, &SSD{Ctrl: ctrl, Name: fmt.Sprintf("ssd%d", s),
					BackingPath: path, DataStart: dataStart(o, l, k)})
			}
		}
	}
	return r
}

// dataStart is where a stripe begins.
func dataStart(o rigOptions, l Layout, stripe int) nvme.LBA {
	if !o.together {
		return rigDataStart
	}
	return rigDataStart + nvme.LBA(stripe)*nvme.LBA(l.LBAsOn(0)+1)
}

// pulled returns the engine once the host has the kernels' state.
func pulled(t testing.TB, rd Reader) *async {
	e := rd.(*async)
	require.NoError(t, e.move((*twin).pull))
	return e
}

// reader makes a stack and closes it before the SSDs.
func (r *rig) reader(rd Reader, err error) Reader {
	r.t.Helper()
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		require.NoError(r.t, rd.Close(ctx))
	})
	return rd
}

// async makes the async stack, with a command for each row unless o says otherwise.
func (r *rig) async(o AsyncOptions) Reader {
	if o.CoalesceBytes == 0 {
		o.CoalesceBytes = -1
	}
	if o.Memory == nil {
		o.Memory = rigMemory
	}
	return r.reader(NewAsync(r.dev, r.ssds, r.layout, o))
}

// testSet is a read set over random rows with its own buffers.
type testSet struct {
	r              *rig
	ids            []int64
	pos            []uint32
	rowBuf, posBuf cuda.Buffer
	rs             *ReadSet
	gap            byte
}

// newSet makes a set of n random rows (repeated ones included) at random places; every byte of
// the destination that no row covers must stay as it was.
func (r *rig) newSet(rng *rand.Rand, n int, stride, offset int64) *testSet {
	r.t.Helper()
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = rng.Int64N(r.layout.Rows)
	}
	return r.setOf(rng, ids, stride, offset)
}

// setOf makes a set of these rows, in their order within each SSD, at random places.
func (r *rig) setOf(rng *rand.Rand, ids []int64, stride, offset int64) *testSet {
	r.t.Helper()
	n := len(ids)
	s := &testSet{r: r, gap: byte(rng.Uint32())}
	per := make([][]int64, r.layout.SSDs)
	for _, row := range ids {
		per[row%int64(r.layout.SSDs)] = append(per[row%int64(r.layout.SSDs)], row)
	}
	offs := []int64{0}
	for _, p := range per {
		s.ids = append(s.ids, p...)
		offs = append(offs, int64(len(s.ids)))
	}
	for _, p := range rng.Perm(n + n/4) {
		if len(s.pos) < n {
			s.pos = append(s.pos, uint32(p))
		}
	}
	var err error
	s.rowBuf, err = r.dev.Alloc(cuda.MemPinned, int64(n*8+8), "test rows")
	require.NoError(r.t, err)
	s.posBuf, err = r.dev.Alloc(cuda.MemDevice, int64(n*4+4), "test pos")
	require.NoError(r.t, err)
	copy(hostmem.View[int64](s.rowBuf.Bytes()), s.ids)
	pos := make([]byte, s.posBuf.Size())
	for i, p := range s.pos {
		binary.LittleEndian.PutUint32(pos[4*i:], p)
	}
	r.move(s.posBuf, pos, true)
	kind := cuda.MemDevice
	if r.dev.Info().Backend != "host" && rng.IntN(2) == 0 {
		kind = cuda.MemPinned // which SSDs can write to
	}
	dst, err := r.dev.Alloc(kind, offset+int64(n+n/4+1)*stride, "test dst")
	require.NoError(r.t, err)
	s.rs = &ReadSet{Rows: s.rowBuf.Ptr(), Pos: s.posBuf.Ptr(), SSDOffset: offs, Dst: dst,
		DstOffset: offset, DstStride: stride}
	s.poison()
	return s
}

func (s *testSet) poison() {
	s.r.move(s.rs.Dst, bytes.Repeat([]byte{s.gap}, int(s.rs.Dst.Size())), true)
}

// move copies all of a buffer, which the CPU may not reach, from or to p.
func (r *rig) move(b cuda.Buffer, p []byte, in bool) {
	r.t.Helper()
	via := b.Bytes()
	if via == nil {
		pinned, err := r.dev.Alloc(cuda.MemPinned, b.Size(), "test copy")
		require.NoError(r.t, err)
		s, err := r.dev.NewStream(cuda.StreamOptions{Name: "test copy"})
		require.NoError(r.t, err)
		defer func() {
			require.NoError(r.t, s.Close())
			require.NoError(r.t, pinned.Free())
		}()
		via = pinned.Bytes()
		if in {
			copy(via, p)
			require.NoError(r.t, s.Copy(b.Ptr(), pinned.Ptr(), b.Size()))
		} else {
			require.NoError(r.t, s.Copy(pinned.Ptr(), b.Ptr(), b.Size()))
		}
		require.NoError(r.t, s.Synchronize(testCtx(r.t)))
	}
	if in {
		copy(via, p)
	} else {
		copy(p, via)
	}
}

// check compares the whole destination with what it must hold; rows in lost may be anything.
func (s *testSet) check(lost map[int64]bool) {
	s.r.t.Helper()
	mem := s.rs.Dst.Bytes()
	if mem == nil {
		mem = make([]byte, s.rs.Dst.Size())
		s.r.move(s.rs.Dst, mem, false)
	}
	n := int64(s.r.layout.RowBytes)
	want := make([]byte, n)
	off := make(map[int64]int, len(s.pos))
	for i, p := range s.pos {
		off[int64(p)] = i
	}
	end := int64(0)
	gapOK := func(lo, hi int64) {
		if hi > lo && int64(bytes.Count(mem[lo:hi], []byte{s.gap})) != hi-lo {
			require.FailNow(s.r.t, "byte between rows overwritten", "in %d-%d", lo, hi)
		}
	}
	for p := int64(0); s.rs.DstOffset+p*s.rs.DstStride+n <= int64(len(mem)); p++ {
		i, ok := off[p]
		if !ok {
			continue
		}
		lo := s.rs.DstOffset + p*s.rs.DstStride
		gapOK(end, lo)
		end = lo + n
		if lost[s.ids[i]] {
			continue
		}
		fillRow(s.ids[i], want)
		if !bytes.Equal(want, mem[lo:end]) {
			require.FailNow(s.r.t, "wrong row", "row %d at position %d", s.ids[i], p)
		}
	}
	gapOK(end, int64(len(mem)))
}

func (s *testSet) free(rd Reader) {
	s.r.t.Helper()
	require.NoError(s.r.t, Forget(rd, s.rs.Dst))
	require.NoError(s.r.t, s.rs.Dst.Free())
	require.NoError(s.r.t, s.rowBuf.Free())
	require.NoError(s.r.t, s.posBuf.Free())
}

// read submits, waits and checks one set.
func (s *testSet) read(rd Reader) ReadStats {
	s.r.t.Helper()
	ctx := testCtx(s.r.t)
	p, err := rd.Submit(ctx, s.rs)
	require.NoError(s.r.t, err)
	st, err := p.Wait(ctx)
	require.NoError(s.r.t, err)
	require.EqualValues(s.r.t, len(s.ids), st.Rows)
	s.check(nil)
	return st
}

func smartReads(t testing.TB, s *SSD) int64 {
	log, err := s.Ctrl.SMART(testCtx(t))
	require.NoError(t, err)
	return int64(log.HostReads.Lo)
}
