package gpuio

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/testing/wide"
	"helios/nvme"
)

// The differential test drives coalesce, submit and complete as step functions: complete with
// LimitNS 0 looks at its queues once. Queues, sets and a scripted controller live in one slab of
// memory. Each step runs the Go kernel on the slab, keeps the result, puts the slab back, runs the
// other device's kernel on the same bytes and compares everything: SQEs, doorbells, commands,
// bitmaps, PRP lists, counters, fail records, rows, and what nobody should have touched. Only times
// differ: they are reduced to what they mean, before the comparison and for the next step.

const (
	diffFar  = int64(1) << 62 // a time that does not come
	diffPast = int64(1)
	diffSlab = 6 << 20
	diffIOVA = uint64(0x4000000000)
)

// stepper runs one grid to its end.
type stepper func(kernel string, blocks, threads int, params unsafe.Pointer, size uintptr) error

// stepOn makes a stepper of a device.
func stepOn(t testing.TB, dev cuda.Device) stepper {
	s, err := dev.NewStream(cuda.StreamOptions{Name: "differential"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	kernels := map[string]cuda.Kernel{}
	for _, name := range []string{"coalesce", "submit", "complete"} {
		kernels[name], err = dev.Kernel(name)
		require.NoError(t, err)
	}
	return func(kernel string, blocks, threads int, params unsafe.Pointer, size uintptr) error {
		if err := s.LaunchRaw(kernels[kernel], cuda.LaunchConfig{Blocks: blocks, Threads: threads},
			params, size); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return s.Synchronize(ctx)
	}
}

// diffWorld is one random configuration of queues with its controllers.
type diffWorld struct {
	t         testing.TB
	name      string
	rng       *rand.Rand
	ref, dut  stepper
	slab      []byte
	used      int
	areas     []diffArea
	pre, want []byte

	layout Layout
	ssds   int
	perSSD int
	read   int // bytes of a command at most
	page   int
	// Rows in parts: parts and partBlocks; rows that share commands: window.
	parts, partBlocks, window uint32

	direct  bool
	queues  cuda.DevicePtr
	sets    cuda.DevicePtr
	view    kernelView
	engine  uint64
	ctl     []diffQueue
	flying  []*diffSet
	stride  int64
	offset  int64
	dstRows int
	chaos   bool // errors, foreign and lost completions
	stats   *diffStats
}

type diffStats struct {
	batches, steps, commands, retries, failed, foreign, timeouts, refills int64
	// completions of an older attempt, and second ones
	stale, twice                                        int64
	wraps, deep, shallow, lists, packed, staged, direct int64
	// parts; rows that shared a command; commands for several rows in place; commands saved on
	// packed rows
	split, shared, scattered, packedRuns int64
}

type diffArea struct {
	name   string
	lo, hi int
}

// diffQueue is the controller's side of a queue.
type diffQueue struct {
	head, tail uint32 // SQ head, CQ tail
	phase      uint32
	out        []diffCommand
	last       map[uint16]uint16 // by CID: its last identifier
}

type diffCommand struct {
	sqe  nvme.Command
	lost bool
}

type diffSet struct {
	slot uint32
	ids  []int64
	pos  []uint32
	bad  map[int]uint16 // by index: kind
	dst  cuda.DevicePtr
	runs bool // its rows share commands
}

func (w *diffWorld) take(name string, n, align int) cuda.DevicePtr {
	lo := (w.used + align - 1) &^ (align - 1)
	w.used = lo + n
	if w.used > len(w.slab) {
		return 0
	}
	w.areas = append(w.areas, diffArea{name, lo, w.used})
	return addr(w.slab) + cuda.DevicePtr(lo)
}

func (w *diffWorld) q(g int) *queueState       { return at[queueState](w.queues, g) }
func (w *diffWorld) set(slot uint32) *setState { return at[setState](w.sets, int(slot)) }
func (w *diffWorld) iova(s uint32, p cuda.DevicePtr) uint64 {
	return diffIOVA*uint64(s+1) + uint64(p-addr(w.slab))
}
func (w *diffWorld) mem(s uint32, iova, n uint64) []byte {
	off := iova - diffIOVA*uint64(s+1)
	require.LessOrEqual(w.t, off+n, uint64(w.used), "%s: PRP outside all memory", w.name)
	return w.slab[off : off+n]
}

// newDiffWorld lays out a random configuration; false when it does not fit the slab.
func newDiffWorld(t testing.TB, seed uint64, round int, slab []byte, ref, dut stepper,
	stats *diffStats) (*diffWorld, bool) {
	rng := rand.New(rand.NewPCG(seed, uint64(round)))
	w := &diffWorld{t: t, rng: rng, slab: slab, ref: ref, dut: dut, stats: stats,
		chaos: rng.IntN(3) > 0, page: 4096}
	w.ssds, w.perSSD = 1+rng.IntN(3), 1+rng.IntN(3)
	lba := []int{512, 4096}[rng.IntN(2)]
	// Each depth and each size in turn, so that all are there.
	rowBytes := []int{16, 52, 128, 512, 512, 600, 1024, 4096, 4096, 8192, 12288, 20480, 24,
		7}[round%14]
	commands := []int{1, 1023, 2, 3, 7, 31, 32, 33, 64, 100, 257}[round%11]
	if commands > 200 {
		w.ssds, w.perSSD = 1, 1+rng.IntN(2)
		lba, rowBytes = 512, []int{16, 128, 512, 512, 7}[rng.IntN(5)]
	} else if rowBytes > 1024 {
		commands = min(commands, 64)
	}
	var err error
	w.layout, err = NewLayout(int64(w.ssds)*int64(20+rng.IntN(300)), rowBytes, w.ssds, lba)
	require.NoError(t, err)
	w.direct = w.layout.whole() && round%3 != 2
	per, blocks := w.layout.LBAsPerRow, uint32(w.layout.LBAsPerRow)
	w.parts = 1
	switch form := (round + round/14) % 4; { // each size in each form
	case form == 0 && per > 1:
		w.partBlocks = 1 + rng.Uint32N(uint32(per)-1)
		w.parts = (uint32(per) + w.partBlocks - 1) / w.partBlocks
		blocks = w.partBlocks
	case form <= 2:
		rows := max(32<<10/w.layout.ReadBytes(), 4)
		if commands > 200 { // staging must fit the slab
			rows = 2
		} else if commands > 32 {
			rows = max(rows/4, 4)
		}
		w.window = uint32(per) * (1 + rng.Uint32N(uint32(rows)))
		blocks = w.window
	}
	w.read = int(blocks) * lba
	pages := w.window != 0 && commands <= 200 && rng.IntN(3) > 0 // rows begin on pages
	w.stride = int64(rowBytes) + int64(rng.IntN(3)*rng.IntN(16)*4)
	if pages {
		w.stride = int64(rowBytes+4095)&^4095 + int64(rng.IntN(2)*4096)
	}
	if !w.direct && !pages {
		w.stride += int64(rng.IntN(2) * rng.IntN(7))
	}
	w.offset = int64(rng.IntN(2) * 4 * rng.IntN(1024))
	if pages {
		w.offset = int64(rng.IntN(2) * 4096)
	}
	w.dstRows = 8 + rng.IntN(min(3*commands+40, int(1<<20/w.stride)))
	w.name = fmt.Sprintf(
		"seed %d round %d: %d SSDs × %d queues of %d commands, LBAs of %d, rows of %d, direct %v, parts of %d, windows of %d",
		seed, round, w.ssds, w.perSSD, commands, lba, rowBytes, w.direct, w.partBlocks, w.window)
	clear(slab)
	nq := w.ssds * w.perSSD
	w.queues = w.take("queue state", nq*queueStateBytes, 64)
	w.sets = w.take("set state", maxSets*setStateBytes, 64)
	if w.sets == 0 {
		return nil, false
	}
	lb := listBytes(w.read, w.page)
	if w.window != 0 && lb > w.page {
		return nil, false
	}
	sb := stageBytes(w.read, w.page)
	for g := range nq {
		n := commands
		if commands > 1 && rng.IntN(3) == 0 {
			n--
		}
		s := uint32(g / w.perSSD)
		part := func(what string, n, align int) cuda.DevicePtr {
			return w.take(fmt.Sprintf("queue %d: %s", g, what), n, align)
		}
		sq, cq := part("SQ", (n+1)*64, 4096), part("CQ", (n+1)*16, 4096)
		bells, cmds := part("doorbells", 128, 64), part("commands", n*64, 64)
		lists, hist := part("PRP lists", n*lb, 4096),
			part("histogram", int(unsafe.Sizeof(Histogram{})), 64)
		stage := part("staging", n*sb, 4096)
		if stage == 0 {
			return nil, false
		}
		q := w.q(g)
		*q = queueState{SQ: sq, CQ: cq, SQDoorbell: bells, CQDoorbell: bells + 64, Commands: cmds,
			HostCommands: cmds, Lists: lists, ListsIOVA: w.iova(s, lists), Stage: stage,
			StageIOVA: w.iova(s, stage),
			Hist:      hist,
			TimeoutNS: int64(time.Hour), DataStart: uint64(rng.IntN(100)),
			QID: uint32(1 + g%w.perSSD), NSID: 1, SSD: s,
			Entries: uint32(n + 1), NumCommands: uint32(n), ListBytes: uint32(lb),
			StageBytes: uint32(sb), PageBytes: uint32(w.page),
			Retries: uint32(rng.IntN(4)), ReadBytes: uint32(w.read), Blocks: blocks, Phase: 1}
		for cid := range n {
			q.Free[cid/32] |= 1 << (cid & 31)
		}
		w.ctl = append(w.ctl, diffQueue{phase: 1, last: map[uint16]uint16{}})
	}
	h := &hostSide{kickers: make([]nvme.Kicker, w.ssds), parks: make([]blockPark, 1)}
	w.view = kernelView{h: h, sets: w.sets}
	w.engine = registerHostSide(h)
	t.Cleanup(func() { dropHostSide(w.engine) })
	w.take("keys A", w.dstRows*8, 64)
	w.take("keys B", w.dstRows*8, 64)
	w.take("indices", w.dstRows*4, 64)
	// Room for three sets in flight: arrays and destination.
	for i := range 3 {
		w.take(fmt.Sprintf("set arrays %d", i), shapeOf(w.ssds, nq).bytes, 64)
		w.take(fmt.Sprintf("order %d", i), w.dstRows*4, 64)
		w.take(fmt.Sprintf("runs %d", i), (w.dstRows+w.ssds)*4, 64)
		w.take(fmt.Sprintf("marks %d", i), w.dstRows*4, 64)
		w.take(fmt.Sprintf("rows %d", i), w.dstRows*8, 64)
		w.take(fmt.Sprintf("positions %d", i), w.dstRows*4, 64)
		dst := w.take(fmt.Sprintf("destination %d", i), int(w.offset)+w.dstRows*int(w.stride)+
			rowBytes, 4096)
		if dst == 0 {
			return nil, false
		}
	}
	w.used = min((w.used+4095)&^4095, len(slab))
	for n, is := range map[*int64]bool{&stats.deep: commands > 1000, &stats.shallow: commands == 1,
		&stats.lists:  w.read > 2*w.page,
		&stats.packed: w.layout.RowsPerLBA > 1, &stats.staged: !w.direct, &stats.direct: w.direct} {
		if is {
			*n++
		}
	}
	w.pre, w.want = make([]byte, w.used), make([]byte, w.used)
	return w, true
}

func (w *diffWorld) area(prefix string) cuda.DevicePtr {
	for _, a := range w.areas {
		if len(a.name) >= len(prefix) && a.name[:len(prefix)] == prefix {
			return addr(w.slab) + cuda.DevicePtr(a.lo)
		}
	}
	panic(prefix)
}

// submit makes a random set in a free place and launches submit for it.
func (w *diffWorld) submit() {
	rng := w.rng
	place := 0
	for slices.ContainsFunc(w.flying,
		func(s *diffSet) bool { return s.dst == w.area(fmt.Sprintf("destination %d", place)) }) {
		place++
	}
	d := &diffSet{dst: w.area(fmt.Sprintf("destination %d", place)), bad: map[int]uint16{}}
	for d.slot = uint32(rng.IntN(maxSets)); slices.ContainsFunc(w.flying,
		func(s *diffSet) bool { return s.slot == d.slot }); {
		d.slot = uint32(rng.IntN(maxSets))
	}
	n := 1 + rng.IntN(w.dstRows)
	perm := rng.Perm(w.dstRows)
	offs := []int64{0}
	if rng.IntN(4) == 0 {
		n = min(n, 3)
	}
	for s := range w.ssds {
		share := n / w.ssds
		if s < n%w.ssds {
			share++
		}
		for range share {
			i := len(d.ids)
			row := rng.Int64N(w.layout.RowsOn(s))*int64(w.ssds) + int64(s)
			p := uint32(perm[i])
			if w.chaos && rng.IntN(60) == 0 {
				d.bad[i] = failRow
				row = []int64{-1, -row - 1, w.layout.Rows, 1 << 60, row + 1}[rng.IntN(5)]
				if row >= 0 && row < w.layout.Rows && row%int64(w.ssds) == int64(s) {
					delete(d.bad, i)
				}
			} else if w.chaos && rng.IntN(60) == 0 {
				d.bad[i] = failPos
				p = uint32(w.dstRows+2) + rng.Uint32N(1<<31)
			}
			d.ids, d.pos = append(d.ids, row), append(d.pos, p)
		}
		offs = append(offs, int64(len(d.ids)))
	}
	arrays := w.area(fmt.Sprintf("set arrays %d", place))
	rows, pos := w.area(fmt.Sprintf("rows %d", place)), w.area(fmt.Sprintf("positions %d", place))
	copy(unsafe.Slice(at[int64](rows, 0), len(d.ids)), d.ids)
	copy(unsafe.Slice(at[uint32](pos, 0), len(d.pos)), d.pos)
	copy(unsafe.Slice(at[int64](arrays, 0), w.ssds+1), offs)
	nq := w.ssds * w.perSSD
	shape := shapeOf(w.ssds, nq)
	iovas, units, rem := arrays+cuda.DevicePtr(shape.iovas), arrays+cuda.DevicePtr(shape.units),
		arrays+cuda.DevicePtr(shape.remaining)
	rotate := rng.Uint32N(10)
	for s := range w.ssds {
		*at[uint64](iovas, s) = w.iova(uint32(s), d.dst) + uint64(w.offset)
	}
	set := w.set(d.slot)
	*set = setState{Rows: rows, Pos: pos, Offsets: arrays, Dst: d.dst + cuda.DevicePtr(w.offset),
		DstLimit: int64(w.dstRows)*w.stride + int64(w.layout.RowBytes), DstStride: w.stride,
		DstIOVA: iovas, Remaining: rem,
		Taken: arrays + cuda.DevicePtr(shape.taken), Layout: w.layout, Rotate: rotate, Units: units,
		Parts: w.parts, PartBlocks: w.partBlocks}
	if w.direct {
		set.Direct = 1
	}
	if w.partBlocks != 0 {
		set.Marks = w.area(fmt.Sprintf("marks %d", place))
		clear(view[uint32](set.Marks, 0, int64(w.dstRows)))
	}
	if w.window != 0 && rng.IntN(8) > 0 {
		w.coalesce(d, place, rotate)
	} else {
		for s := range w.ssds {
			*at[int64](units, 2*s), *at[int64](units, 2*s+1) = offs[s]*int64(w.parts),
				offs[s+1]*int64(w.parts)
		}
		for g := range nq {
			_, lo, hi := shareOf(set, uint32(g/w.perSSD), uint32(g%w.perSSD), uint32(w.perSSD))
			*at[uint32](rem, g) = uint32(hi - lo)
		}
	}
	w.flying = append(w.flying, d)
	p := submitParams{Queues: w.queues, Sets: w.sets, Engine: w.engine, NumQueues: uint32(nq),
		QueuesPerSSD: uint32(w.perSSD), Set: d.slot}
	w.step("submit", 1+rng.IntN(nq+2), warp, unsafe.Pointer(&p), unsafe.Sizeof(p))
	w.stats.batches++
}

// coalesce launches the kernel of that name for a set, as shapeSet and launchCoalesce.
func (w *diffWorld) coalesce(d *diffSet, place int, rotate uint32) {
	set := w.set(d.slot)
	set.Order, set.Runs = w.area(fmt.Sprintf("order %d", place)),
		w.area(fmt.Sprintf("runs %d", place))
	p := coalesceParams{Sets: w.sets, KeysA: w.area("keys A"), KeysB: w.area("keys B"),
		IdxA: w.area("indices"), IdxB: set.Order,
		Set: d.slot, QueuesPerSSD: uint32(w.perSSD), Window: w.window, Passes: w.layout.passes() +
			w.rng.Uint32N(3), Reach: uint32(w.layout.LBAsPerRow) * (1 + w.rng.Uint32N(9))}
	if w.rng.IntN(4) > 0 && p.Passes%2 == 0 { // else the order is copied there at the end
		p.IdxA, p.IdxB = p.IdxB, p.IdxA
	}
	w.step("coalesce", 1+w.rng.IntN(w.ssds+1), warp*(1+w.rng.IntN(8)), unsafe.Pointer(&p),
		unsafe.Sizeof(p))
	d.runs = set.Order != 0
}

func (w *diffWorld) complete() {
	nq := w.ssds * w.perSSD
	slot := uint32(w.rng.IntN(maxSets))
	if len(w.flying) > 0 {
		slot = w.flying[w.rng.IntN(len(w.flying))].slot
	} else if w.set(slot).Remaining == 0 {
		return
	}
	p := completeParams{Queues: w.queues, Sets: w.sets, Engine: w.engine, NumQueues: uint32(nq),
		Set: slot}
	// A block that is done may look for late commands or not, by what the others have done so far.
	// So where there may be any, one block looks at all queues.
	blocks := 1 + w.rng.IntN(nq+2)
	for g := range w.ctl {
		if w.q(g).ScanAt == diffPast {
			blocks = 1
		}
	}
	w.step("complete", blocks, warp, unsafe.Pointer(&p), unsafe.Sizeof(p))
}

// step runs both kernels on the same bytes and compares.
func (w *diffWorld) step(kernel string, blocks, threads int, params unsafe.Pointer, size uintptr) {
	w.t.Helper()
	w.stats.steps++
	mem := w.slab[:w.used]
	copy(w.pre, mem)
	require.NoError(w.t, w.ref(kernel, blocks, threads, params, size), w.name)
	w.reduce(blocks)
	copy(w.want, mem)
	copy(mem, w.pre)
	require.NoError(w.t, w.dut(kernel, blocks, threads, params, size), w.name)
	w.reduce(blocks)
	if !bytes.Equal(w.want, mem) {
		w.explain(kernel, blocks)
	}
}

// reduce replaces times by what they mean.
func (w *diffWorld) reduce(blocks int) {
	flat := func(p *int64) {
		if *p > diffPast {
			*p = diffFar
		}
	}
	for g := range w.ctl {
		q := w.q(g)
		if flat(&q.ScanAt); blocks > 1 && q.ScanAt == 0 {
			q.ScanAt = diffFar
		}
		for cid := range int(q.NumCommands) {
			c := at[command](q.Commands, cid)
			if flat(&c.Deadline); c.Start > 0 {
				c.Start = 1 // long ago for both clocks
			}
		}
		h := at[Histogram](q.Hist, 0)
		n := uint64(h.Count())
		*h = Histogram{}
		h.Counts[0] = n
	}
	for slot := range uint32(maxSets) {
		s := w.set(slot)
		for _, t := range []*int64{&s.StartNS, &s.SubmitNS, &s.DoneNS} {
			if *t != 0 {
				*t = 1
			}
		}
		// Blocks fail rows in any order, and which are described then depends on it.
		if blocks > 1 {
			if s.NumFails > maxFails {
				clear(s.Fails[:])
			}
			// The first part of a row that fails describes it, and its parts have several queues. A
			// row that no part can read fails in the same way from all of them.
			for i := range s.Fails {
				f := &s.Fails[i]
				switch {
				case s.PartBlocks == 0:
				case f.Kind == failRow || f.Kind == failPos:
					f.QID = 0
				case f.Kind != 0:
					*f = failRecord{Index: f.Index, Kind: failStatus, SSD: f.SSD, Row: f.Row}
				}
			}
			slices.SortFunc(s.Fails[:min(s.NumFails, maxFails)], func(a, b failRecord) int {
				return bytes.Compare(unsafe.Slice((*byte)(unsafe.Pointer(&a)), unsafe.Sizeof(a)),
					unsafe.Slice((*byte)(unsafe.Pointer(&b)), unsafe.Sizeof(b)))
			})
		}
	}
}

func (w *diffWorld) explain(kernel string, blocks int) {
	w.t.Helper()
	var out []string
	for _, a := range w.areas {
		n := 0
		for i := a.lo; i < a.hi; i++ {
			if w.want[i] != w.slab[i] {
				if n++; n == 1 {
					off := i &^ 7
					out = append(out, fmt.Sprintf("%s +%d (entry of 64: %d+%d): want %x, got %x",
						a.name, off-a.lo, (off-a.lo)/64, (off-a.lo)%64, w.want[off:off+8],
						w.slab[off:off+8]))
				}
			}
		}
		if n > 0 {
			out[len(out)-1] += fmt.Sprintf(" (%d bytes differ)", n)
		}
	}
	require.FailNow(w.t, "the kernels differ", "%s, batch %d: %s with %d blocks\n%s", w.name,
		w.stats.batches, kernel, blocks, joinLines(out))
}

func joinLines(s []string) string {
	var b bytes.Buffer
	for _, l := range s {
		b.WriteString(l)
		b.WriteByte('\n')
	}
	return b.String()
}

// content returns what an SSD holds at a byte offset.
func diffContent(ssd uint32, off uint64, b []byte) {
	for i := 0; i < len(b); {
		pos := off + uint64(i)
		x := (pos/8*0x9E3779B97F4A7C15 + uint64(ssd+1)*0xD1B54A32D192ED03) ^ pos>>7
		x ^= x >> 29
		var v [8]byte
		binary.LittleEndian.PutUint64(v[:], x*0xBF58476D1CE4E5B9)
		i += copy(b[i:], v[pos%8:])
	}
}

// fetch takes the SQEs that the doorbell announces.
func (w *diffWorld) fetch(g int) {
	q, c := w.q(g), &w.ctl[g]
	tail := *at[uint32](q.SQDoorbell, 0)
	for c.head != tail {
		sqe := *at[nvme.Command](q.SQ, int(c.head))
		require.EqualValues(w.t, nvme.OpRead, sqe.Opcode, w.name)
		w.checkBlocks(q, &sqe)
		cid := sqe.CID & cidMask
		if w.window != 0 && sqe.CDW12 >= uint32(w.layout.LBAsPerRow) &&
			at[command](q.Commands, int(cid)).Dst == 0 {
			w.stats.scattered++
		}
		require.Less(w.t, uint32(cid), q.NumCommands, w.name)
		if slices.ContainsFunc(c.out,
			func(o diffCommand) bool { return o.sqe.CID&cidMask == cid }) {
			require.FailNow(w.t, "CID in use twice", w.name)
		}
		if old, ok := c.last[cid]; ok {
			require.EqualValues(w.t, wireCID(uint32(cid), issued(uint32(old))), sqe.CID,
				"%s: the generation after %04Xh", w.name, old)
		}
		c.last[cid] = sqe.CID
		c.out = append(c.out, diffCommand{sqe: sqe, lost: w.chaos && w.rng.IntN(600) == 0})
		if c.head++; c.head == q.Entries {
			c.head = 0
			w.stats.wraps++
		}
		w.stats.commands++
	}
}

// checkBlocks reports whether a command reads what one may.
func (w *diffWorld) checkBlocks(q *queueState, sqe *nvme.Command) {
	lba, n, per := (uint64(sqe.CDW10)|uint64(sqe.CDW11)<<32)-q.DataStart, uint64(sqe.CDW12)+1,
		uint64(w.layout.LBAsPerRow)
	ok := n == per && lba%per == 0
	switch {
	case w.partBlocks != 0:
		in := lba % per
		ok = in%uint64(w.partBlocks) == 0 && n == min(uint64(w.partBlocks), per-in)
	case w.window != 0:
		ok = n%per == 0 && lba%per == 0 && lba/uint64(w.window) == (lba+n-1)/uint64(w.window)
	}
	require.True(w.t, ok, "%s: LBA %d+%d is no unit", w.name, lba, n)
}

// post writes a completion; false: the queue is full.
func (w *diffWorld) post(g int, cid uint32, status nvme.Status) bool {
	q, c := w.q(g), &w.ctl[g]
	next := (c.tail + 1) % q.Entries
	if next == *at[uint32](q.CQDoorbell, 0) {
		return false
	}
	cqe := at[[4]uint32](q.CQ, int(c.tail))
	cqe[0], cqe[1], cqe[2] = w.rng.Uint32(), w.rng.Uint32(), c.head|q.QID<<16
	atomic.StoreUint32(&cqe[3], cid|c.phase<<16|uint32(status)<<17)
	if c.tail = next; next == 0 {
		c.phase ^= 1
	}
	return true
}

// serve completes some of a queue's commands, in any order.
func (w *diffWorld) serve(g int) {
	q, c := w.q(g), &w.ctl[g]
	w.fetch(g)
	w.rng.Shuffle(len(c.out), func(i, j int) { c.out[i], c.out[j] = c.out[j], c.out[i] })
	n := len(c.out)
	if w.rng.IntN(3) == 0 {
		n = w.rng.IntN(n + 1)
	}
	var kept []diffCommand
	stray := -1
	if w.chaos && n > 0 && w.rng.IntN(40) == 0 {
		stray = w.rng.IntN(n)
	}
	for i, o := range c.out {
		if o.lost || i >= n {
			kept = append(kept, o)
			continue
		}
		if i == stray && w.rng.IntN(2) == 0 {
			cid := w.rng.Uint32N(1 << 16)
			switch w.rng.IntN(3) {
			case 0:
				cid = w.rng.Uint32N(q.NumCommands)
			case 1: // the attempt before under the CID of one in flight, which comes twice
				cid = uint32(o.sqe.CID-cmdNextGen) & 0xffff
				w.stats.stale++
			}
			// Of a command that waits for its retry, of an older attempt, or of none. (Whoever
			// completes a command in flight that it has not read cannot be found out.)
			if !slices.ContainsFunc(c.out,
				func(o diffCommand) bool { return uint32(o.sqe.CID) == cid }) {
				w.post(g, cid, 0)
			}
		}
		status := nvme.Status(0)
		if w.chaos {
			switch w.rng.IntN(100) {
			case 0:
				status = nvme.StatusInternalError
			case 1:
				status = nvme.StatusUnrecoveredRead.WithDNR()
			case 2:
				status = nvme.StatusNamespaceNotReady | 1<<13 // More
			case 3:
				status = nvme.Status(w.rng.Uint32N(1 << 15))
			}
		}
		if status.OK() {
			w.transfer(q, &o.sqe)
		}
		if !w.post(g, uint32(o.sqe.CID), status) {
			kept = append(kept, o)
			continue
		}
		if i == stray && w.post(g, uint32(o.sqe.CID), status) { // the same once more
			w.stats.twice++
		}
	}
	c.out = kept
}

// transfer is the SSD's DMA for a read.
func (w *diffWorld) transfer(q *queueState, sqe *nvme.Command) {
	data := make([]byte, (int(sqe.CDW12)+1)*int(w.layout.LBABytes))
	lba := uint64(sqe.CDW10) | uint64(sqe.CDW11)<<32
	diffContent(q.SSD, lba*uint64(w.layout.LBABytes), data)
	first := min(uint64(w.page)-sqe.PRP1%uint64(w.page), uint64(len(data)))
	copy(w.mem(q.SSD, sqe.PRP1, first), data)
	data = data[first:]
	switch {
	case len(data) == 0:
		require.Zero(w.t, sqe.PRP2, w.name)
	case len(data) <= w.page:
		require.Zero(w.t, sqe.PRP2%uint64(w.page), w.name)
		copy(w.mem(q.SSD, sqe.PRP2, uint64(len(data))), data)
	default:
		for i := uint64(0); len(data) > 0; i++ {
			p := binary.LittleEndian.Uint64(w.mem(q.SSD, sqe.PRP2+8*i, 8))
			require.Zero(w.t, p%uint64(w.page), w.name)
			n := min(len(data), w.page)
			copy(w.mem(q.SSD, p, uint64(n)), data)
			data = data[n:]
		}
	}
}

// late makes a queue's lost commands overdue.
func (w *diffWorld) late(g int) {
	q, c := w.q(g), &w.ctl[g]
	some := false
	for _, o := range c.out {
		if o.lost {
			at[command](q.Commands, int(o.sqe.CID&cidMask)).Deadline = diffPast
			some = true
		}
	}
	if some {
		q.ScanAt = diffPast
		w.stats.timeouts++
	}
}

// revive is the host's recovery of a frozen queue: the queue pair is created again.
func (w *diffWorld) revive(g int) {
	q := w.q(g)
	if q.Frozen == frozenForeign {
		w.stats.foreign++
	}
	w.ctl[g] = diffQueue{phase: 1, last: map[uint16]uint16{}}
	clear(w.slab[q.CQ-addr(w.slab):][:q.Entries*16])
	*at[uint32](q.SQDoorbell, 0), *at[uint32](q.CQDoorbell, 0) = 0, 0
	q.Tail, q.Head, q.Phase, q.ScanAt = 0, 0, 1, 0
	q.Dropped += q.inFlight()
	q.commands(func(cid uint32, cmd *command) {
		tries := cmd.State / cmdAttempt
		if tries > q.Retries {
			set := w.set(uint32(cmd.Set))
			set.failUnit(cmd.Index, failRecord{Kind: failTimeout, QID: uint16(q.QID),
				CID: wireCID(cid, cmd.State), Tries: tries, LBA: cmd.lba(), SSD: q.SSD,
				Blocks: uint32(cmd.NLB) + 1})
			cmd.State = cmd.State&cmdGen | cmdFree
			q.Retry[cid/32] &^= 1 << (cid & 31)
			q.Free[cid/32] |= 1 << (cid & 31)
			*at[uint32](set.Remaining, g)--
			return
		}
		cmd.State = cmd.State&^(cmdState|cmdAborted) | cmdRetry
		q.Retry[cid/32] |= 1 << (cid & 31)
	})
	q.Frozen = frozenNo
	w.stats.refills++ // the next complete issues them
}

// reap ends the sets whose rows are done.
func (w *diffWorld) reap() {
	w.flying = slices.DeleteFunc(w.flying, func(d *diffSet) bool {
		s := w.set(d.slot)
		for g := range w.ctl {
			if *at[uint32](s.Remaining, g) != 0 {
				return false
			}
		}
		w.finish(d, s)
		return true
	})
}

func (w *diffWorld) finish(d *diffSet, s *setState) {
	require.GreaterOrEqual(w.t, int(s.NumFails), len(d.bad), w.name)
	w.stats.failed += int64(s.NumFails)
	w.stats.retries += int64(s.Retries)
	units := int64(0)
	for i := range w.ssds {
		units += *at[int64](s.Units, 2*i+1) - *at[int64](s.Units, 2*i)
	}
	require.EqualValues(w.t, units-int64(len(d.bad))*int64(w.parts), s.Issued, w.name)
	switch {
	case w.partBlocks != 0:
		w.stats.split += int64(s.Issued)
	case d.runs && w.layout.RowsPerLBA > 1:
		w.stats.packedRuns += int64(len(d.ids)) - units
	}
	lost := map[int]bool{}
	for _, f := range s.Fails[:min(s.NumFails, maxFails)] {
		if f.Kind == 0 { // reduce has dropped them
			return
		}
		i := int(f.Index)
		require.False(w.t, lost[i], "%s: row %d failed twice", w.name, i)
		lost[i] = true
		require.Equal(w.t, d.ids[i], f.Row, w.name)
		kind, bad := d.bad[i]
		require.Equal(w.t, bad, f.Kind == failRow || f.Kind == failPos, w.name)
		if bad {
			require.Equal(w.t, kind, f.Kind, w.name)
		}
		if f.Kind == failPos {
			require.EqualValues(w.t, d.pos[i], f.LBA, w.name)
		}
	}
	if s.NumFails > maxFails {
		return
	}
	row := make([]byte, w.layout.RowBytes)
	for i, id := range d.ids {
		if lost[i] {
			continue
		}
		ssd, lba, _, off := w.layout.Locate(id)
		diffContent(uint32(ssd),
			(w.q(ssd*w.perSSD).DataStart+uint64(lba))*uint64(w.layout.LBABytes)+uint64(off), row)
		got := unsafe.Slice(at[byte](s.Dst+cuda.DevicePtr(int64(d.pos[i])*w.stride), 0), len(row))
		if !bytes.Equal(row, got) {
			require.FailNow(w.t, "wrong row", "%s: row %d at position %d", w.name, id, d.pos[i])
		}
	}
}

// run submits n batches and brings them to their ends.
func (w *diffWorld) run(n int) {
	// Queues of one SSD have one extent.
	for g := range w.ctl {
		w.q(g).DataStart = w.q(g / w.perSSD * w.perSSD).DataStart
	}
	idle := 0
	for tick := 0; n > 0 || len(w.flying) > 0; tick++ {
		if n > 0 && len(w.flying) < 3 && w.rng.IntN(2) == 0 {
			w.submit()
			n--
			w.reap()
			idle = 0
			continue
		}
		before := w.stats.commands
		closing := -1
		for g := range w.ctl {
			q := w.q(g)
			if q.Frozen != frozenNo {
				if w.rng.IntN(2) == 0 {
					w.revive(g)
				}
				continue
			}
			w.serve(g)
			if idle > 4 {
				w.late(g)
			}
			if w.rng.IntN(100) == 0 {
				closing = g
				q.Frozen = frozenClosing // the kernels must leave it alone
			}
		}
		w.complete()
		if closing >= 0 && w.q(closing).Frozen == frozenClosing {
			w.q(closing).Frozen = frozenNo
		}
		flying := len(w.flying)
		w.reap()
		if idle++; w.stats.commands != before || len(w.flying) != flying {
			idle = 0
		}
		require.Less(w.t, idle, 200, "%s: nothing moves", w.name)
	}
	// Nothing is left behind.
	for g := range w.ctl {
		if w.q(g).Frozen != frozenNo {
			w.revive(g)
		}
	}
	for g := range w.ctl {
		q := w.q(g)
		free := 0
		for _, f := range q.Free {
			free += bits.OnesCount32(f)
		}
		require.EqualValues(w.t, q.NumCommands, free, "%s: a CID leaked", w.name)
		require.Zero(w.t, q.Retry, w.name)
		require.Equal(w.t, q.Issued, q.Completed+q.Dropped, w.name)
		require.Equal(w.t, q.PendTail, q.PendHead, w.name)
		w.stats.shared += int64(q.Coalesced)
		require.Zero(w.t, q.Own, w.name)
	}
}

// envNumber is a number from the environment: DIFF_BATCHES and DIFF_SEED, which a failure names.
func envNumber(t testing.TB, name string, otherwise uint64) uint64 {
	v := os.Getenv(name)
	if v == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(v, 10, 64)
	require.NoError(t, err, name)
	return n
}

// runDiff runs batches through both devices' kernels.
func runDiff(t *testing.T, host, other cuda.Device, batches int) {
	seed := envNumber(t, "DIFF_SEED", uint64(time.Now().UnixNano()))
	slab, err := hostmem.Alloc(diffSlab, "differential test")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hostmem.Free(slab)) })
	for _, d := range []cuda.Device{host, other} {
		b, err := d.Register(slab, "differential test")
		require.NoError(t, err)
		require.Equal(t, addr(slab), b.Ptr())
		t.Cleanup(func() { require.NoError(t, b.Free()) })
	}
	ref, dut := stepOn(t, host), stepOn(t, other)
	var st diffStats
	begun := time.Now()
	for round := 0; st.batches < int64(batches); round++ {
		w, ok := newDiffWorld(t, seed, round, slab, ref, dut, &st)
		if ok {
			w.run(int(min(int64(10+w.rng.IntN(50)), int64(batches)-st.batches)))
		}
	}
	t.Logf("seed %d: %+v in %v", seed, st, time.Since(begun).Round(time.Millisecond))
	require.Positive(t, st.commands)
	if batches >= 500 {
		for _, n := range []int64{st.retries, st.failed, st.foreign, st.timeouts, st.refills,
			st.wraps, st.deep, st.shallow, st.lists, st.packed, st.staged, st.direct} {
			require.Positive(t, n, "%+v: the script is too tame", st)
		}
	}
	if batches >= 3000 {
		for _, n := range []int64{st.split, st.shared, st.scattered, st.packedRuns, st.stale,
			st.twice} {
			require.Positive(t, n, "%+v: the script is too tame", st)
		}
	}
}

// runCoalesceDiff runs kernel coalesce on both devices over random buckets of up to n rows, far
// larger than those of runDiff and with slots of any width, and compares all memory.
func runCoalesceDiff(t *testing.T, host, other cuda.Device, rounds, n int) {
	seed := envNumber(t, "DIFF_SEED", uint64(time.Now().UnixNano()))
	slab, err := hostmem.Alloc(int64(48*n+1<<16), "coalesce differential")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, hostmem.Free(slab)) })
	for _, d := range []cuda.Device{host, other} {
		b, err := d.Register(slab, "coalesce differential")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Free()) })
	}
	ref, dut := stepOn(t, host), stepOn(t, other)
	pre, want := make([]byte, len(slab)), make([]byte, len(slab))
	var rows, runs, invalid int64
	for round := range rounds {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		ssds, per := 1+rng.IntN(4), 1+rng.IntN(40)
		// slots take 1 to 8 passes
		all := []int64{3, 400, 70_000, 20_000_000, 1 << 34, 1 << 57}[round%6]
		l, err := NewLayout(1+rng.Int64N(all), []int{16, 100, 512, 1024, 4096, 4100,
			12288}[round%7], ssds, []int{512, 4096}[rng.IntN(2)])
		require.NoError(t, err)
		name := fmt.Sprintf("seed %d round %d: %+v", seed, round, l)
		w := diffWorld{t: t, name: name, slab: slab, stats: &diffStats{}}
		for i := range slab {
			slab[i] = 0xcd // what is not written stays
		}
		offs := []int64{rng.Int64N(3)}
		for range ssds {
			size := []int64{1, 40, 1500, int64(n)}[rng.IntN(4)] / int64(ssds)
			offs = append(offs, offs[len(offs)-1]+rng.Int64N(max(size, 1)))
		}
		m := int(offs[ssds])
		sets := w.take("set", setStateBytes, 64)
		set := at[setState](sets, 0)
		*set = setState{Rows: w.take("rows", m*8, 64), Pos: w.take("positions", m*4, 64),
			Offsets: w.take("offsets", (ssds+1)*8, 64), DstLimit: 1 << 40, DstStride: 1 << 20,
			Remaining: w.take("remaining", ssds*per*4, 64), Units: w.take("units", 2*ssds*8, 64),
			Runs: w.take("runs", (m+ssds)*4, 64), Layout: l, Rotate: rng.Uint32N(9)}
		copy(view[int64](set.Offsets, 0, int64(ssds+1)), offs)
		ids, pos := view[int64](set.Rows, 0, int64(m)), view[uint32](set.Pos, 0, int64(m))
		bad := rng.IntN(3) * rng.IntN(200)
		for s := range ssds {
			area := l.RowsOn(s)
			if rng.IntN(2) == 0 { // dense
				area = min(area, 2*(offs[s+1]-offs[s])+1)
			}
			first := rng.Int64N(max(l.RowsOn(s)-area, 0) + 1)
			for i := offs[s]; i < offs[s+1]; i++ {
				ids[i], pos[i] = (first+rng.Int64N(max(area, 1)))*int64(ssds)+int64(s),
					rng.Uint32N(1<<20-1)
				switch {
				case bad > 0 && rng.IntN(bad) == 0:
					ids[i] = []int64{-1, l.Rows, ids[i] - 1<<60, ids[i] + 1}[rng.IntN(4)]
					invalid++
				case bad > 0 && rng.IntN(bad) == 0:
					pos[i] = 1<<20 + rng.Uint32N(1<<31)
					invalid++
				}
			}
		}
		p := coalesceParams{Sets: sets, KeysA: w.take("keys A", m*8, 64),
			KeysB: w.take("keys B", m*8, 64), IdxA: w.take("indices A", m*4, 64),
			IdxB:         w.take("indices B", m*4, 64),
			QueuesPerSSD: uint32(per), Window: uint32((1 + rng.IntN(64)) * int(l.LBAsPerRow)),
			Passes: l.passes(), Reach: uint32((1 + rng.IntN(9)) * int(l.LBAsPerRow))}
		set.Order = []cuda.DevicePtr{p.IdxA, p.IdxB, w.take("order", m*4, 64)}[rng.IntN(3)]
		require.NotZero(t, set.Order)
		blocks, threads := 1+rng.IntN(ssds+1), warp*[]int{1, 2, 3, 7, 16, 32, 32}[rng.IntN(7)]
		copy(pre, slab)
		require.NoError(t, ref("coalesce", blocks, threads, unsafe.Pointer(&p), unsafe.Sizeof(p)),
			name)
		copy(want, slab)
		copy(slab, pre)
		require.NoError(t, dut("coalesce", blocks, threads, unsafe.Pointer(&p), unsafe.Sizeof(p)),
			name)
		if !bytes.Equal(want, slab) {
			w.want = want
			w.explain("coalesce", blocks)
		}
		rows += offs[ssds] - offs[0]
		for s := range ssds {
			runs += *at[int64](set.Units, 2*s+1) - *at[int64](set.Units, 2*s)
		}
	}
	t.Logf("seed %d: %d sets of %d rows, %d of them invalid, in %d runs", seed, rounds, rows,
		invalid, runs)
	require.Positive(t, runs)
	require.Less(t, runs, rows)
}

// TestDifferentialOnHost checks the test: the Go kernels against themselves.
func TestDifferentialOnHost(t *testing.T) {
	devs := make([]cuda.Device, 2)
	for i := range devs {
		d, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Close()) })
		devs[i] = d
	}
	n := 300
	if wide.Lean() {
		n = 60
	}
	runDiff(t, devs[0], devs[1], n)
	runCoalesceDiff(t, devs[0], devs[1], n/3, 3000)
}
