package cache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/testing/difftest"
	"helios/internal/testing/wide"
)

// finder finds a line's slot, wherever the directory is.
func finder(t testing.TB, d *Dynamic, st cuda.Stream) func(line int64) int32 {
	t.Helper()
	if d.gpu == nil {
		return d.dir.Find
	}
	slots, p := map[int64]int32{}, d.gpu.params
	words := setWords(t, d, st)
	for set := range p.Sets {
		for way, tag := range words[set*int64(p.Stride)+16:][:policy.Ways] {
			if tag != 1<<32-1 {
				slots[int64(tag)] = int32(set*p.Slots/p.Sets) + int32(way)
			}
		}
	}
	return func(line int64) int32 {
		if slot, ok := slots[line]; ok {
			return slot
		}
		return -1
	}
}

// setWords is the state of the sets.
func setWords(t testing.TB, d *Dynamic, st cuda.Stream) []uint32 {
	t.Helper()
	if d.gpu != nil {
		ok(t, d.gpu.settle())
		return download[uint32](t, d.dev, st, d.gpu.words, d.gpu.words.Size()/4)
	}
	return private(d, "words")
}

// setUntil is the last announced batch of each way's line; nil before there is a window.
func setUntil(t testing.TB, d *Dynamic, st cuda.Stream) []uint32 {
	t.Helper()
	if d.gpu == nil {
		return private(d, "until")
	}
	if d.gpu.until == nil {
		return nil
	}
	return download[uint32](t, d.dev, st, d.gpu.until, d.gpu.until.Size()/4)
}

// private is a field of the directory on the CPU.
func private(d *Dynamic, field string) []uint32 {
	v := reflect.ValueOf(d.dir).Elem().FieldByName(field)
	return *(*[]uint32)(unsafe.Pointer(v.UnsafeAddr()))
}

// grained makes blocks of so many items, so that small parts have several.
type grained struct {
	cuda.Device
	items int64
}

func (g grained) Grain(int64) int64 { return g.items }

// setsBatches is the number of batches that checkGPUSets plays, over all its settings.
func setsBatches(t testing.TB) int {
	n := 120
	if wide.Lean() {
		n = 40
	}
	if s := os.Getenv("DIFF_BATCHES"); s != "" {
		v, err := strconv.Atoi(s)
		ok(t, err)
		n = v
	}
	return n
}

// checkGPUSets plays random batches on a directory in the device's memory and on policy.Sets, with
// windows, failures and passes that stop early, and compares each ticket, all counters and every
// word of every set.
func checkGPUSets(t *testing.T, open opener, batches int) {
	rng := seeded(t)
	dev, cpu := open(t, 3), device(t, 2)
	policies := policy.Online()
	each := max(min(batches/len(policies), 100), 4)
	for i := 0; i*each < batches; i++ {
		lines := Lines{SSDs: 1 + rng.Int64N(3), RowsPerLine: 1, LineBytes: 8, RowStride: 8}
		if rng.IntN(2) == 0 {
			lines.RowsPerLine = 1 + rng.Int64N(8)
			lines.LineBytes = 8 * lines.RowsPerLine
		}
		c := DynamicConfig{Rows: 1 + rng.Int64N(3000), RowBytes: 8, Lines: lines, NoData: true,
			Directory: policy.InSets, Policy: policies[i%len(policies)], Seed: rng.Uint64()}
		c.Slots = []int64{1 + rng.Int64N(32), 1 + rng.Int64N(200), 32 * (1 + rng.Int64N(9)),
			1 + rng.Int64N(20_000)}[rng.IntN(4)]
		if rng.IntN(25) == 0 {
			c.Slots = 0
		}
		if c.Slots > lines.Count(c.Rows) && rng.IntN(2) == 0 {
			c.Slots = lines.Count(c.Rows)/2 + 1
		}
		if rng.IntN(3) == 0 {
			c.CPU = randomPlacement(rng, c.Rows, 0, .2).CPU
		}
		t.Run(fmt.Sprintf("%s/%d of %d slots", c.Policy, i, c.Slots), func(t *testing.T) {
			playGPUSets(t, rng, grained{dev, 1 + rng.Int64N(200)}, cpu, c, each)
		})
	}
}

// playGPUSets plays a trace of one setting.
func playGPUSets(t *testing.T, rng *rand.Rand, dev, cpu cuda.Device, c DynamicConfig,
	batches int) {
	st, other := stream(t, dev), stream(t, cpu)
	got, want := must(NewDynamic(dev, c))(t), must(NewDynamic(cpu, c))(t)
	defer func() { ok(t, errors.Join(got.Close(), want.Close())) }()
	if got.gpu == nil {
		t.Fatal("the directory is on the CPU")
	}
	window := rng.IntN(4)
	all := make([][]int64, batches)
	largest := 1 + rng.IntN(int(min(c.Rows, 700)))
	for i := range all {
		all[i] = someRows(rng, c.Rows, 1+rng.IntN(largest))
		if rng.IntN(4) == 0 {
			all[i] = append(all[i], all[i][0])
		}
	}
	var out [][2]*Ticket
	defer func() {
		for _, o := range out {
			ok(t, errors.Join(o[0].Close(), o[1].Close()))
		}
	}()
	tickets := func() [2]*Ticket {
		if n := len(out); n > 0 {
			o := out[n-1]
			out = out[:n-1]
			return o
		}
		return [2]*Ticket{must(got.NewTicket())(t), must(want.NewTicket())(t)}
	}
	if window > 0 { // nothing is announced, and that ends
		announce(t, got, st, nil)
		announce(t, want, other, nil)
		got.Forget()
		want.Forget()
	}
	announced := 0
	for index, rows := range all {
		for ; announced < min(index+1+window, batches) && window > 0; announced++ {
			announce(t, got, st, all[announced])
			announce(t, want, other, all[announced])
		}
		got.NextBatch()
		want.NextBatch()
		var in [][2]*Ticket
		nodes, twin := upload(t, dev, rows), upload(t, cpu, rows)
		for first := int64(0); first < int64(len(rows)); {
			n := min(1+rng.Int64N(500), int64(len(rows))-first)
			o := tickets()
			ok(t, got.Admit(limit(t), st, nodes.Ptr(), first, n, o[0]))
			ok(t, want.Admit(limit(t), other, twin.Ptr(), first, n, o[1]))
			sameTickets(t, dev, st, o[0], o[1])
			in, first = append(in, o), first+n
		}
		good := len(in)
		if rng.IntN(5) == 0 {
			good = rng.IntN(len(in))
			ok(t, errors.Join(got.Abandon(in[good][0]), want.Abandon(in[good][1])))
		}
		samePlans(t, rng, st, got, want, in[:good])
		for k, o := range in {
			if k < good {
				ok(t, errors.Join(got.Finish(st, o[0], nil, 0, 8),
					want.Finish(other, o[1], nil, 0, 8), got.Release(o[0]), want.Release(o[1])))
			}
			out = append(out, o)
		}
		if rng.IntN(20) == 0 {
			got.Forget()
			want.Forget()
			announced = index + 1
		}
		if a, b := got.Stats(), want.Stats(); a != b {
			t.Fatalf("batch %d: counters %+v on the GPU, %+v on the CPU", index, a, b)
		}
		sameSets(t, got, want, st)
	}
}

// samePlans compares what is read for tickets, one by one and some together.
func samePlans(t *testing.T, rng *rand.Rand, st cuda.Stream, got, want *Dynamic, in [][2]*Ticket) {
	t.Helper()
	got.c.NoData, want.c.NoData = false, false
	defer func() { got.c.NoData, want.c.NoData = true, true }()
	p, q := must(got.NewReadPlan())(t), must(want.NewReadPlan())(t)
	defer func() { ok(t, errors.Join(p.Close(), q.Close())) }()
	for len(in) > 0 {
		n := 1 + rng.IntN(len(in))
		var a, b []*Ticket
		for _, o := range in[:n] {
			a, b = append(a, o[0]), append(b, o[1])
		}
		in = in[n:]
		ok(t, errors.Join(got.Plan(p, a...), want.Plan(q, b...)))
		if p.Lines != q.Lines || !slices.Equal(p.SSDOffset, q.SSDOffset) {
			t.Fatalf("%d tickets: %d lines in %v on the GPU, %d in %v on the CPU", n, p.Lines,
				p.SSDOffset, q.Lines, q.SSDOffset)
		}
		if p.Lines == 0 {
			continue
		}
		ready(t, p)
		rows := must(difftest.Download[int64](limit(t), got.dev, st, p.Rows, p.Lines))(t)
		pos := must(difftest.Download[uint32](limit(t), got.dev, st, p.Pos, p.Lines))(t)
		if !slices.Equal(rows, q.rows[:q.Lines]) || !slices.Equal(pos, q.pos[:q.Lines]) {
			t.Fatalf("%d tickets: %v to %v on the GPU, %v to %v on the CPU", n, rows, pos,
				q.rows[:q.Lines], q.pos[:q.Lines])
		}
		for i := range a {
			if a[i].base != b[i].base || !a[i].planned {
				t.Fatalf("ticket %d begins at %d on the GPU, at %d on the CPU", i, a[i].base,
					b[i].base)
			}
		}
	}
}

func sameTickets(t *testing.T, dev cuda.Device, st cuda.Stream, got, want *Ticket) {
	t.Helper()
	if a, b := got.String(), want.String(); a[strings.Index(a, "("):] != b[strings.Index(b, "("):] ||
		got.fills != want.fills || got.dstRows != want.dstRows {
		t.Fatalf("%v, %d fills, on the GPU; %v, %d fills, on the CPU", a, got.fills, b, want.fills)
	}
	if got.NLines > 0 {
		if lines := download[int64](t, dev, st, got.read, got.NLines); !slices.Equal(lines,
			want.lines) {
			t.Fatalf("lines to be read: %v on the GPU, %v on the CPU", lines, want.lines)
		}
	}
	lists := download[uint32](t, dev, st, got.lists, got.capacity*ticketLists)
	for i, l := range []struct {
		want []uint32
		n    int64
	}{{want.gpuPos, want.NGPU}, {want.gpuRow, want.NGPU}, {want.cpuPos, want.NCPU},
		{want.cpuRow, want.NCPU}, {want.missPos, want.NMiss}, {want.missRow, want.NMiss},
		{want.fillLine, want.fills}, {want.fillSlot, want.fills}} {
		if a := lists[int64(i)*got.capacity:][:l.n]; !slices.Equal(a, l.want[:l.n]) {
			t.Fatalf("list %d: %v on the GPU, %v on the CPU", i, a, l.want[:l.n])
		}
	}
}

// sameSets compares all words of all sets and all pins.
func sameSets(t *testing.T, got, want *Dynamic, st cuda.Stream) {
	t.Helper()
	a, b := setWords(t, got, st), setWords(t, want, st)
	if !slices.Equal(a, b) {
		for i := range a {
			if a[i] != b[i] {
				t.Fatalf("word %d of set %d: %#x on the GPU, %#x on the CPU",
					i%int(got.gpu.params.Stride), i/int(got.gpu.params.Stride), a[i], b[i])
			}
		}
	}
	a, b = setUntil(t, got, st), setUntil(t, want, st)
	if len(a) != len(b) {
		t.Fatalf("%d pins on the GPU, %d on the CPU", len(a), len(b))
	}
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("way %d of set %d: pinned until batch %d on the GPU, %d on the CPU", i%32, i/32,
				a[i], b[i])
		}
	}
}

// waits is a device that counts how often the CPU waits for it. Streams and events are its own
// kind, so none is waited for behind its back.
type waits struct {
	cuda.Device
	n atomic.Int64
}

type waitStream struct {
	cuda.Stream
	d *waits
}

type waitEvent struct {
	cuda.Event
	d *waits
}

func (d *waits) NewStream(o cuda.StreamOptions) (cuda.Stream, error) {
	st, err := d.Device.NewStream(o)
	return waitStream{st, d}, err
}

func (d *waits) NewEvent() (cuda.Event, error) {
	e, err := d.Device.NewEvent()
	return waitEvent{e, d}, err
}

func (s waitStream) Synchronize(ctx context.Context) error {
	s.d.n.Add(1)
	return s.Stream.Synchronize(ctx)
}

func (s waitStream) Record(e cuda.Event) error { return s.Stream.Record(e.(waitEvent).Event) }

func (s waitStream) Wait(e cuda.Event) error { return s.Stream.Wait(e.(waitEvent).Event) }

func (e waitEvent) Synchronize(ctx context.Context) error {
	e.d.n.Add(1)
	return e.Event.Synchronize(ctx)
}

// checkHostWaits plays batches in groups under a window, as training does, with memory that has
// grown to what they need. From what announces a batch to the plan of its reads the CPU waits for
// the device once a lookup, for its counts; ending announcements takes no wait either.
func checkHostWaits(t *testing.T, open opener) {
	rng := seeded(t)
	const rows, window, group = 4000, 2, 3
	dev := &waits{Device: open(t, 3)}
	d := must(NewDynamic(dev, DynamicConfig{Rows: rows, RowBytes: 8, Lines: Lines{SSDs: 3,
		RowsPerLine: 1, LineBytes: 8, RowStride: 8}, Slots: 300, Policy: policy.S3FIFO,
		Directory: policy.InSets, NoData: true}))(t)
	st, p := must(dev.NewStream(cuda.StreamOptions{Name: "lookups"}))(t), must(d.NewReadPlan())(t)
	var nodes []cuda.Buffer // of the announced batches
	var tickets []*Ticket
	for range group {
		tickets = append(tickets, must(d.NewTicket())(t))
	}
	offset := 0
	for round := range 20 {
		before := dev.n.Load()
		for i, tk := range tickets {
			for len(nodes) <= offset+window {
				b := upload(t, dev, someRows(rng, rows, 300))
				nodes = append(nodes, b)
				ok(t, d.Announce(limit(t), st, b.Ptr(), 300))
			}
			d.NextBatch()
			ok(t, d.Admit(limit(t), st, nodes[offset].Ptr(), 0, 300, tk))
			if offset++; round%5 == 4 && i == 1 { // a pass that stops early
				d.Forget()
				nodes = nodes[:offset]
			}
		}
		d.c.NoData = false
		ok(t, d.Plan(p, tickets...))
		d.c.NoData = true
		if n := dev.n.Load() - before; round > 5 && n != group {
			t.Errorf("round %d: the CPU waits %d times for the GPU in %d lookups, want once in each",
				round, n, group)
		}
		if p.Ready == nil {
			t.Fatal("a plan of several tickets that no event tells to be there")
		}
		ready(t, p)
		for _, tk := range tickets {
			ok(t, errors.Join(d.Finish(st, tk, nil, 0, 8), d.Release(tk)))
		}
	}
	for _, tk := range tickets {
		ok(t, tk.Close())
	}
	ok(t, errors.Join(p.Close(), d.Close(), st.Close()))
}
