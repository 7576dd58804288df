package cache

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"helios/cache/policy"
	"helios/cuda"
	"helios/internal/hostmem"
	"helios/internal/testing/difftest"
)

// lineShapes are the ways that rows lie in lines: a row to a line with odd and even sizes, 4 KiB
// lines full of rows, and lines with gaps between rows and at the end.
var lineShapes = []struct {
	rowBytes int64
	lines    Lines
}{
	{40, Lines{SSDs: 3, RowsPerLine: 1, LineBytes: 40, RowStride: 40}},
	{512, Lines{SSDs: 2, RowsPerLine: 8, LineBytes: 4096, RowStride: 512}},
	{100, Lines{SSDs: 1, RowsPerLine: 5, LineBytes: 512, RowStride: 100}},
	{700, Lines{SSDs: 4, RowsPerLine: 4, LineBytes: 4096, RowStride: 1024}},
	{7, Lines{SSDs: 2, RowsPerLine: 73, LineBytes: 512, RowStride: 7}},
}

// lineContent is a line as the SSD has it.
func lineContent(c DynamicConfig, l int64, to []byte) {
	for i := range to {
		to[i] = 0xee
	}
	for k := range c.Lines.RowsPerLine {
		row := (l/c.Lines.SSDs*c.Lines.RowsPerLine+k)*c.Lines.SSDs + l%c.Lines.SSDs
		for i := range c.RowBytes {
			to[k*c.Lines.RowStride+i] = rowByte(row, i)
		}
	}
}

func TestLines(t *testing.T) {
	for _, s := range lineShapes {
		for rows := range int64(400) {
			seen := map[[2]int64]int64{}
			top := int64(-1)
			for r := range rows {
				l, k := s.lines.Of(r)
				if other, twice := seen[[2]int64{l, k}]; twice || l < 0 || k < 0 ||
					k >= s.lines.RowsPerLine || l%s.lines.SSDs != r%s.lines.SSDs {
					t.Fatalf("%+v: row %d is row %d of line %d (as is %d)", s.lines, r, k, l, other)
				}
				seen[[2]int64{l, k}] = r
				top = max(top, l)
			}
			if got := s.lines.Count(rows); got != top+1 {
				t.Fatalf("%+v: %d rows: %d lines, want %d", s.lines, rows, got, top+1)
			}
		}
	}
}

// dynamicRig plays the reader for a dynamic cache: batches of one or several parts, announced or
// not, read in groups.
type dynamicRig struct {
	dev  cuda.Device
	st   cuda.Stream
	d    *Dynamic
	c    DynamicConfig
	plan *ReadPlan
}

func newDynamicRig(t testing.TB, dev cuda.Device, c DynamicConfig) *dynamicRig {
	t.Helper()
	r := &dynamicRig{dev: dev, st: stream(t, dev), d: must(NewDynamic(dev, c))(t), c: c}
	r.plan = must(r.d.NewReadPlan())(t)
	t.Cleanup(func() {
		ok(t, r.plan.Close())
		if err := r.d.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	for k, row := range c.CPU {
		for i := range c.RowBytes {
			r.d.CPUBuffer().Bytes()[int64(k)*c.RowBytes+i] = rowByte(row, i)
		}
	}
	return r
}

// read makes staging of what the plan says.
func (r *dynamicRig) read(t testing.TB) cuda.Buffer {
	t.Helper()
	p, size := r.plan, r.c.Lines.LineBytes
	if p.Lines == 0 {
		return nil
	}
	ready(t, p)
	rows := must(difftest.Download[int64](limit(t), r.dev, r.st, p.Rows, p.Lines))(t)
	places := must(difftest.Download[uint32](limit(t), r.dev, r.st, p.Pos, p.Lines))(t)
	mem := make([]byte, p.Lines*size)
	seen := make([]bool, p.Lines)
	for s := range r.c.Lines.SSDs {
		for i := p.SSDOffset[s]; i < p.SSDOffset[s+1]; i++ {
			row, pos := rows[i], places[i]
			if row%r.c.Lines.SSDs != s || row < 0 || row >= r.c.Lines.Count(r.c.Rows) || seen[pos] {
				t.Fatalf("read %d: line %d at %d among those of SSD %d", i, row, pos, s)
			}
			seen[pos] = true
			lineContent(r.c, row, mem[int64(pos)*size:][:size])
		}
	}
	if p.SSDOffset[0] != 0 || p.SSDOffset[r.c.Lines.SSDs] != p.Lines {
		t.Fatalf("%d lines in buckets %v", p.Lines, p.SSDOffset)
	}
	b := must(r.dev.Alloc(cuda.MemDevice, int64(len(mem)), "staging"))(t)
	ok(t, difftest.Upload(limit(t), r.dev, r.st, b.Ptr(), mem))
	return b
}

// announce tells a cache of a coming batch.
func announce(t testing.TB, d *Dynamic, st cuda.Stream, rows []int64) {
	t.Helper()
	nodes := cuda.DevicePtr(0)
	if len(rows) > 0 {
		nodes = upload(t, d.dev, rows).Ptr()
	}
	ok(t, d.Announce(limit(t), st, nodes, int64(len(rows))))
}

// ready waits until a plan's lists are there.
func ready(t testing.TB, p *ReadPlan) {
	t.Helper()
	if p.Ready != nil {
		ok(t, p.Ready.Synchronize(limit(t)))
	}
}

// someRows are distinct rows, the lower ones more often.
func someRows(rng *rand.Rand, rows int64, n int) []int64 {
	seen := map[int64]bool{}
	var list []int64
	for len(list) < n {
		r := int64(rng.Float64() * rng.Float64() * float64(rows))
		if !seen[r] {
			seen[r] = true
			list = append(list, r)
		}
	}
	return list
}

func TestDynamic(t *testing.T) { checkDynamic(t, device, 40) }

// checkDynamic runs batches through a dynamic cache of every shape and policy, and compares what
// arrives with what the rows are, the counters with a directory of the test's own, and, at the end,
// the slots with the lines they stand for.
func checkDynamic(t *testing.T, open opener, batches int) {
	rng := seeded(t)
	for i, s := range lineShapes {
		for k, name := range policy.Online() {
			if k > 0 && (i+k)%3 != 0 { // each policy with some shapes
				continue
			}
			t.Run(fmt.Sprintf("%s/%d bytes by %d", name, s.rowBytes, s.lines.RowsPerLine),
				func(t *testing.T) {
					rows := 300 + rng.Int64N(2000)
					c := DynamicConfig{
						Rows: rows, RowBytes: s.rowBytes, Lines: s.lines,
						Slots: rng.Int64N(s.lines.Count(rows)), Policy: name, Seed: rng.Uint64(),
						Directory: policy.Kinds()[rng.IntN(2)],
					}
					if rng.IntN(3) > 0 {
						c.CPU = randomPlacement(rng, rows, 0, .1).CPU
					}
					playDynamic(t, rng, newDynamicRig(t, open(t, 1+rng.IntN(3)), c), batches)
				})
		}
	}
}

func playDynamic(t *testing.T, rng *rand.Rand, r *dynamicRig, batches int) {
	c := r.c
	cpu := map[int64]bool{}
	for _, row := range c.CPU {
		cpu[row] = true
	}
	linesOf := func(rows []int64) (lines []int64) { // each once, without those of the CPU tier
		for _, row := range rows {
			if l, _ := c.Lines.Of(row); !cpu[row] && !slices.Contains(lines, l) {
				lines = append(lines, l)
			}
		}
		return lines
	}
	model := must(policy.New(policy.Config{Policy: c.Policy, Kind: c.Directory,
		Slots: c.Slots, Seed: c.Seed}))(t)
	window := rng.IntN(4)
	stride := c.RowBytes + rng.Int64N(40)
	all := make([][]int64, batches)
	for i := range all {
		all[i] = someRows(rng, c.Rows, 1+rng.IntN(200))
		if rng.IntN(4) == 0 { // a seed that stands twice
			all[i] = slices.Insert(all[i], 1, all[i][0])
		}
	}
	announced := 0
	var tickets []*Ticket
	defer func() {
		for _, tk := range tickets {
			ok(t, tk.Close())
		}
	}()
	type part struct {
		tk          *Ticket
		rows        []int64
		first, n    int64
		nodes, x    cuda.Buffer
		ngpu, nmiss int64
	}
	for start := 0; start < batches; {
		var group []part
		for end := min(start+1+rng.IntN(4), batches); start < end; start++ {
			for ; window > 0 && announced < min(start+1+window, batches); announced++ {
				announce(t, r.d, r.st, all[announced])
				model.Announce(linesOf(all[announced]))
			}
			r.d.NextBatch()
			model.NextBatch()
			rows := all[start]
			nodes := upload(t, r.dev, rows)
			x := must(r.dev.Alloc(cuda.MemDevice, int64(len(rows))*stride, "features"))(t)
			ok(t, r.st.Fill(x.Ptr(), 0xaa, x.Size()))
			for first := int64(0); first < int64(len(rows)); {
				p := part{rows: rows, first: first, n: min(rng.Int64N(150), int64(len(rows))-first),
					nodes: nodes, x: x}
				if len(tickets) == 0 {
					tickets = append(tickets, must(r.d.NewTicket())(t))
				}
				p.tk, tickets = tickets[len(tickets)-1], tickets[:len(tickets)-1]
				ok(t, r.d.Admit(limit(t), r.st, nodes.Ptr(), p.first, p.n, p.tk))
				lines := linesOf(rows[p.first : p.first+p.n])
				want := make([]policy.Answer, len(lines))
				model.Access(lines, want)
				hit, nlines := map[int64]bool{}, int64(0)
				for i, l := range lines {
					if hit[l] = want[i].Hit; !want[i].Hit {
						nlines++
					}
				}
				ncpu := int64(0)
				for _, row := range rows[p.first : p.first+p.n] {
					l, _ := c.Lines.Of(row)
					switch {
					case cpu[row]:
						ncpu++
					case hit[l]:
						p.ngpu++
					default:
						p.nmiss++
					}
				}
				if got, want := [4]int64{p.tk.NGPU, p.tk.NCPU, p.tk.NMiss, p.tk.NLines},
					[4]int64{p.ngpu, ncpu, p.nmiss, nlines}; got != want {
					t.Fatalf("batch %d: GPU, CPU, missed rows and lines %v, want %v", start, got,
						want)
				}
				first += p.n
				group = append(group, p)
			}
		}
		plan := make([]*Ticket, len(group))
		for i, p := range group {
			plan[i] = p.tk
		}
		ok(t, r.d.Plan(r.plan, plan...))
		staging := r.read(t)
		if len(group) > 1 {
			if err := r.d.Finish(r.st, group[1].tk, staging, group[1].x.Ptr(),
				stride); err == nil || !strings.Contains(err.Error(), "finished before ticket") {
				t.Fatalf("out of order: %v", err)
			}
		}
		for _, p := range group {
			ok(t, r.d.Finish(r.st, p.tk, staging, p.x.Ptr(), stride))
		}
		ok(t, r.st.Synchronize(limit(t)))
		for i, p := range group {
			// the batch's last
			if p.first+p.n == int64(len(p.rows)) && (i+1 == len(group) || group[i+1].first == 0) {
				x := download[byte](t, r.dev, r.st, p.x, p.x.Size())
				for i, row := range p.rows {
					for b := range stride {
						want := byte(0xaa)
						if b < c.RowBytes {
							want = rowByte(row, b)
						}
						if got := x[int64(i)*stride+b]; got != want {
							t.Fatalf("row %d at position %d: byte %d is %#x, want %#x", row, i, b,
								got, want)
						}
					}
				}
			}
			ok(t, r.d.Release(p.tk))
			tickets = append(tickets, p.tk)
		}
		for _, p := range group {
			ok(t, p.x.Free())
		}
		if staging != nil {
			ok(t, staging.Free())
		}
	}
	if got, want := r.d.Stats(), model.Stats(); got != want {
		t.Fatalf("directory %+v, want %+v", got, want)
	}
	r.checkSlots(t)
}

// checkSlots compares every slot with the line that the directory has in it. Nothing may be out.
func (r *dynamicRig) checkSlots(t testing.TB) {
	t.Helper()
	size := r.c.Lines.LineBytes
	mem := download[byte](t, r.dev, r.st, r.d.slots, r.d.slots.Size())
	want := make([]byte, size)
	held, find := 0, finder(t, r.d, r.st)
	for l := range r.c.Lines.Count(r.c.Rows) {
		slot := find(l)
		if slot < 0 {
			continue
		}
		held++
		lineContent(r.c, l, want)
		if !bytes.Equal(mem[int64(slot)*size:][:size], want) {
			t.Fatalf("slot %d does not hold line %d", slot, l)
		}
	}
	if int64(held) > r.c.Slots || r.c.Slots > 0 && held == 0 {
		t.Fatalf("%d lines in %d slots", held, r.c.Slots)
	}
}

func TestDynamicErrors(t *testing.T) {
	dev := device(t, 1)
	rowLines := Lines{SSDs: 1, RowsPerLine: 1, LineBytes: 8, RowStride: 8}
	base := DynamicConfig{Rows: 100, RowBytes: 8, Lines: rowLines, Slots: 10, Policy: policy.LRU}
	for name, c := range map[string]func(*DynamicConfig){
		"lines over 0 SSDs":        func(c *DynamicConfig) { c.Lines.SSDs = 0 },
		"a row of 8 bytes every 7": func(c *DynamicConfig) { c.Lines.RowStride = 7 },
		"lines of 8 bytes with 2 rows": func(
			c *DynamicConfig) {
			c.Lines.RowsPerLine = 2
		},
		"-1 lines of 1 rows":   func(c *DynamicConfig) { c.Slots = -1 },
		"-1 rows of 8 bytes":   func(c *DynamicConfig) { c.Rows = -1 },
		"row 100 after row -1": func(c *DynamicConfig) { c.CPU = []int64{100} },
		"policy \"mru\"":       func(c *DynamicConfig) { c.Policy = "mru" },
	} {
		c2 := base
		c(&c2)
		if _, err := NewDynamic(dev, c2); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", name, err)
		}
	}
	d := must(NewDynamic(dev, base))(t)
	other := must(NewDynamic(dev, base))(t)
	st, st2 := stream(t, dev), stream(t, dev)
	ctx := limit(t)
	nodes := upload(t, dev, []int64{1, 2, 3, 100})
	x := must(dev.Alloc(cuda.MemDevice, 100, "features"))(t)
	a, b := must(d.NewTicket())(t), must(d.NewTicket())(t)
	p := must(d.NewReadPlan())(t)
	want := func(err error, text string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Fatalf("%v: want %q", err, text)
		}
	}
	want(d.Announce(ctx, st, nodes.Ptr(), 4),
		"announcement of 4 rows: row 100 at position 3: the dataset has rows 0 to 99")
	want(d.Admit(ctx, st, nodes.Ptr(), 0, 4, a),
		"row 100 at position 3: the dataset has rows 0 to 99")
	want(d.Admit(ctx, st, nodes.Ptr(), -1, 4, a), "positions and rows of lines below 2^32")
	want(other.Admit(ctx, st, nodes.Ptr(), 0, 3, a), "a ticket of another cache")
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	ok(t, st2.Synchronize(ctx))
	// the stream may have been idle
	if err := d.Admit(stopped, st2, nodes.Ptr(), 0, 3, a); err == nil {
		ok(t, d.Abandon(a))
	}
	d.NextBatch()
	ok(t, d.Admit(ctx, st, nodes.Ptr(), 0, 2, a))
	want(d.Admit(ctx, st, nodes.Ptr(), 0, 3, a), "want it free")
	ok(t, d.Admit(ctx, st, nodes.Ptr(), 2, 1, b))
	want(d.Finish(st, a, nil, x.Ptr(), 8), "before its reads were planned")
	want(other.Plan(p, a), "a read plan of another cache")
	ok(t, d.Plan(p, a, b))
	want(d.Finish(st, b, x, x.Ptr(), 8), "finished before ticket")
	want(d.Finish(st, a, nil, x.Ptr(), 8), "a staging buffer of 0 bytes: want 16")
	want(d.Finish(st, a, x, x.Ptr(), 7), "a stride of 7")
	want(d.Release(a), "want it finished")
	want(a.Close(), "want it free")
	ok(t, d.Finish(st, a, x, x.Ptr(), 8))
	want(d.Abandon(a), "want it admitted")
	want(d.Plan(p, a), "want it admitted")
	want(d.Finish(st2, b, x, x.Ptr(), 8), "another stream")
	ok(t, st.Synchronize(ctx))
	ok(t, d.Release(a))
	ok(t, d.Admit(ctx, st, nodes.Ptr(), 0, 1, a))
	ok(t, d.Finish(st2, b, x, x.Ptr(), 8)) // nothing is left to do on the other
	want(d.Finish(st, a, x, x.Ptr(), 8), "another stream")
	ok(t, d.Abandon(a))
	ok(t, st2.Synchronize(ctx))
	ok(t, d.Release(b))
	ok(t, d.Admit(ctx, st, nodes.Ptr(), 2, 1, b))
	want(d.Close(), "closed with 1 tickets out, the first of which is ticket")
	want(d.Admit(ctx, st, nodes.Ptr(), 0, 3, a), "closed cache")
	ok(t, d.Abandon(b))
	ok(t, d.Close())
	ok(t, other.Close())
	for _, c := range []interface{ Close() error }{a, b, p} {
		ok(t, c.Close())
	}
	ok(t, x.Free())

	small := must(cuda.NewHost(cuda.HostOptions{SMs: 1, MemLimit: 50}))(t)
	_, err := NewDynamic(small, base)
	want(err, "out of memory for gpu cache: 80 bytes")
	ok(t, small.Close())
}

// A failed read's lines leave the directory with those of all later tickets; earlier tickets are
// not touched.
func TestDynamicAbandon(t *testing.T) {
	for _, kind := range policy.Kinds() {
		t.Run(kind, func(t *testing.T) { checkAbandon(t, device, kind, 200) })
	}
}

func checkAbandon(t *testing.T, open opener, kind string, rounds int) {
	rng := seeded(t)
	r := newDynamicRig(t, open(t, 2), DynamicConfig{
		Rows: 500, RowBytes: 24, Lines: Lines{SSDs: 2, RowsPerLine: 3, LineBytes: 80,
			RowStride: 24}, Slots: 20, Policy: policy.Random, Directory: kind, Seed: 4,
	})
	var free []*Ticket
	for range 5 {
		free = append(free, must(r.d.NewTicket())(t))
	}
	x := must(r.dev.Alloc(cuda.MemDevice, 50*24, "features"))(t)
	for range rounds {
		var rows [][]int64
		for _, tk := range free {
			r.d.NextBatch()
			rows = append(rows, someRows(rng, 500, 1+rng.IntN(50)))
			nodes := upload(t, r.dev, rows[len(rows)-1])
			ok(t, r.d.Admit(limit(t), r.st, nodes.Ptr(), 0, int64(len(rows[len(rows)-1])), tk))
		}
		good := rng.IntN(len(free) + 1)
		if good < len(free) {
			ok(t, r.d.Abandon(free[good]))
		}
		ok(t, r.d.Plan(r.plan, free[:good]...))
		staging := r.read(t)
		for i, tk := range free[:good] {
			ok(t, r.d.Finish(r.st, tk, staging, x.Ptr(), 24))
			got := download[byte](t, r.dev, r.st, x, int64(len(rows[i]))*24)
			for k, row := range rows[i] {
				for b := range int64(24) {
					if got[int64(k)*24+b] != rowByte(row, b) {
						t.Fatalf("ticket %d of %d: row %d is wrong", i, good, row)
					}
				}
			}
		}
		for _, tk := range free[:good] {
			ok(t, r.d.Release(tk))
		}
		if staging != nil {
			ok(t, staging.Free())
		}
		// The slots hold the lines of the directory.
		mem, want := download[byte](t, r.dev, r.st, r.d.slots, r.d.slots.Size()), make([]byte, 80)
		find := finder(t, r.d, r.st)
		for l := range r.c.Lines.Count(500) {
			if slot := find(l); slot >= 0 {
				lineContent(r.c, l, want)
				if !bytes.Equal(mem[int64(slot)*80:][:80], want) {
					t.Fatalf("slot %d does not hold line %d", slot, l)
				}
			}
		}
	}
	for _, tk := range free {
		ok(t, tk.Close())
	}
	ok(t, x.Free())
}

// Without data nothing is allocated on the device, and the answers are those of a cache with data.
func TestDynamicNoData(t *testing.T) {
	dev := device(t, 1)
	c := DynamicConfig{
		Rows: 1000, RowBytes: 512, Lines: Lines{SSDs: 2, RowsPerLine: 8, LineBytes: 4096,
			RowStride: 512}, Slots: 30, Policy: policy.Sieve, CPU: []int64{3, 17, 400},
	}
	with := must(NewDynamic(dev, c))(t)
	c.NoData = true
	without := must(NewDynamic(dev, c))(t)
	if without.CPUBuffer() != nil || without.cpuIndex == nil {
		t.Fatal("no data: a CPU buffer, or no index")
	}
	st, rng := stream(t, dev), seeded(t)
	a, b := must(with.NewTicket())(t), must(without.NewTicket())(t)
	p, q := must(with.NewReadPlan())(t), must(without.NewReadPlan())(t)
	x := must(dev.Alloc(cuda.MemDevice, 1<<20, "features"))(t)
	for range 50 {
		nodes := upload(t, dev, someRows(rng, 1000, 60))
		with.NextBatch()
		without.NextBatch()
		ok(t, with.Admit(limit(t), st, nodes.Ptr(), 10, 50, a))
		ok(t, without.Admit(limit(t), st, nodes.Ptr(), 10, 50, b))
		if got, want := [4]int64{b.NGPU, b.NCPU, b.NMiss, b.NLines},
			[4]int64{a.NGPU, a.NCPU, a.NMiss, a.NLines}; got != want {
			t.Fatalf("%v, want %v", got, want)
		}
		ok(t, with.Plan(p, a))
		ok(t, without.Plan(q, b))
		if !slices.Equal(p.SSDOffset, q.SSDOffset) || p.Lines != q.Lines || q.Rows != 0 {
			t.Fatalf("%v, want %v", q.SSDOffset, p.SSDOffset)
		}
		ok(t, with.Finish(st, a, x, x.Ptr(), 512))
		ok(t, without.Finish(nil, b, nil, 0, 0))
		ok(t, st.Synchronize(limit(t)))
		ok(t, with.Release(a))
		ok(t, without.Release(b))
	}
	if with.Stats() != without.Stats() || with.MetadataBytes() != without.MetadataBytes() {
		t.Fatalf("%+v, want %+v", without.Stats(), with.Stats())
	}
	for _, c := range []interface{ Close() error }{a, b, p, q, with, without} {
		ok(t, c.Close())
	}
	ok(t, x.Free())
}

func BenchmarkAdmit(b *testing.B) {
	const rows, count = 100_000_000, 500_000
	dev := device(b, 2)
	st := stream(b, dev)
	rng := rand.New(rand.NewPCG(1, 1))
	for i, name := range slices.Concat(policy.Online(), policy.Online()) {
		kind := policy.Kinds()[i/len(policy.Online())]
		b.Run(kind+"/"+name, func(b *testing.B) {
			d := must(NewDynamic(dev, DynamicConfig{
				Rows: rows, RowBytes: 512, Lines: Lines{SSDs: 12, RowsPerLine: 1, LineBytes: 512,
					RowStride: 512}, Slots: rows / 10, Policy: name, Directory: kind, NoData: true,
			}))(b)
			t, p := must(d.NewTicket())(b), must(d.NewReadPlan())(b)
			nodes := must(dev.Alloc(cuda.MemDevice, count*8, "nodes"))(b)
			list := hostmem.View[int64](nodes.Bytes())
			turn := func() {
				d.NextBatch()
				ok(b, d.Admit(context.Background(), st, nodes.Ptr(), 0, count, t))
				ok(b, d.Plan(p, t))
				ok(b, d.Finish(nil, t, nil, 0, 0))
				ok(b, d.Release(t))
			}
			next := func() { // distinct: a stride through the rows from somewhere
				firstLine, by := rng.Int64N(rows), rows/7+2*rng.Int64N(rows/7)+1
				for i := range list {
					list[i] = firstLine
					firstLine = (firstLine + by) % rows
				}
			}
			for s := d.Stats(); s.Inserted-s.Evicted < rows/11; s = d.Stats() {
				next()
				turn()
			}
			for b.Loop() {
				b.StopTimer()
				next()
				b.StartTimer()
				turn()
			}
			b.ReportMetric(count*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mrows/s")
			for _, c := range []interface{ Close() error }{t, p, d} {
				ok(b, c.Close())
			}
			ok(b, nodes.Free())
		})
	}
}

// BenchmarkAnnounce measures the announcement of a batch to a directory, beside its lookup.
func BenchmarkAnnounce(b *testing.B) {
	const rows, count = 10_000_000, 200_000
	dev := device(b, 2)
	st := stream(b, dev)
	rng := rand.New(rand.NewPCG(1, 1))
	d := must(NewDynamic(dev, DynamicConfig{
		Rows: rows, RowBytes: 512, Lines: Lines{SSDs: 12, RowsPerLine: 8, LineBytes: 4096,
			RowStride: 512}, Slots: rows / 8 / 10, Policy: "random", NoData: true,
	}))(b)
	t := must(d.NewTicket())(b)
	nodes := must(dev.Alloc(cuda.MemDevice, count*8, "nodes"))(b)
	list := hostmem.View[int64](nodes.Bytes())
	for b.Loop() {
		b.StopTimer()
		firstLine, by := rng.Int64N(rows), int64(rows/7+2*rng.IntN(rows/7)+1)
		for i := range list {
			list[i] = firstLine
			firstLine = (firstLine + by) % rows
		}
		b.StartTimer()
		ok(b, d.Announce(limit(b), st, nodes.Ptr(), int64(len(list))))
		b.StopTimer()
		d.NextBatch()
		ok(b, d.Admit(context.Background(), st, nodes.Ptr(), 0, count, t))
		ok(b, d.Finish(nil, t, nil, 0, 0))
		ok(b, d.Release(t))
		b.StartTimer()
	}
	b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/count, "ns/row")
	ok(b, t.Close())
	ok(b, d.Close())
	ok(b, nodes.Free())
}

// A lookup that several workers share has the lists of one.
func TestSharedLookups(t *testing.T) {
	const rows, count = 200_000, 3 * perEachChunk
	var want []*Ticket
	for _, workers := range []int{1, 3} {
		r := rand.New(rand.NewPCG(1, 2))
		dev := device(t, workers)
		d := must(NewDynamic(dev, DynamicConfig{Rows: rows, RowBytes: 8, NoData: true,
			Lines: Lines{SSDs: 3, RowsPerLine: 4, LineBytes: 32, RowStride: 8}, Slots: rows / 40,
			Policy: policy.S3FIFO, Directory: policy.InSets,
			CPU: randomPlacement(rand.New(rand.NewPCG(3, 4)), rows, 0, .1).CPU}))(t)
		st := stream(t, dev)
		var tickets []*Ticket
		t.Cleanup(func() {
			if len(tickets) > 0 {
				ok(t, d.Abandon(tickets[0]))
			}
			for _, tk := range tickets {
				ok(t, tk.Close())
			}
		})
		for turn := range 3 {
			list := make([]int64, count)
			for i := range list {
				list[i] = int64(r.Float64() * r.Float64() * rows)
			}
			tk := must(d.NewTicket())(t)
			d.NextBatch()
			ok(t, d.Admit(limit(t), st, upload(t, dev, list).Ptr(), 5, count-5, tk))
			tickets = append(tickets, tk)
			if workers == 1 {
				want = append(want, tk)
				continue
			}
			a, b := want[turn], tk
			if a.NGPU == 0 && turn > 0 || a.NCPU == 0 || a.fills == a.NLines {
				t.Fatalf("%v: nothing was tried", a)
			}
			for i, l := range [][2][]uint32{{a.gpuPos[:a.NGPU], b.gpuPos[:b.NGPU]},
				{a.gpuRow[:a.NGPU], b.gpuRow[:b.NGPU]}, {a.cpuPos[:a.NCPU], b.cpuPos[:b.NCPU]},
				{a.cpuRow[:a.NCPU], b.cpuRow[:b.NCPU]}, {a.missPos[:a.NMiss], b.missPos[:b.NMiss]},
				{a.missRow[:a.NMiss], b.missRow[:b.NMiss]},
				{a.fillLine[:a.fills], b.fillLine[:b.fills]},
				{a.fillSlot[:a.fills], b.fillSlot[:b.fills]}} {
				if !slices.Equal(l[0], l[1]) {
					t.Fatalf("turn %d: list %d differs", turn, i)
				}
			}
			if !slices.Equal(a.lines, b.lines) {
				t.Fatalf("turn %d: lines differ", turn)
			}
		}
	}
}

// A plan that several workers make has the lines of its tickets by SSD, in their order.
func TestSharedPlans(t *testing.T) {
	const rows, count, ssds = 200_000, 3 * perPiece, 5
	dev := device(t, 3)
	d := must(NewDynamic(dev, DynamicConfig{Rows: rows, RowBytes: 8, Slots: 100,
		Lines:  Lines{SSDs: ssds, RowsPerLine: 1, LineBytes: 8, RowStride: 8},
		Policy: policy.Clock, Directory: policy.InSets}))(t)
	st, r := stream(t, dev), rand.New(rand.NewPCG(1, 2))
	plan := must(d.NewReadPlan())(t)
	for turn := range 2 {
		var tickets []*Ticket
		var wantRows [ssds][]int64
		var wantPos [ssds][]uint32
		place := uint32(0)
		for k := range 3 {
			list := make([]int64, count*(2-k%2)/2)
			for i := range list {
				list[i] = r.Int64N(rows)
			}
			tk := must(d.NewTicket())(t)
			d.NextBatch()
			ok(t, d.Admit(limit(t), st, upload(t, dev, list).Ptr(), 0, int64(len(list)), tk))
			tickets = append(tickets, tk)
			for _, l := range tk.lines {
				wantRows[l%ssds] = append(wantRows[l%ssds], l)
				wantPos[l%ssds] = append(wantPos[l%ssds], place)
				place++
			}
		}
		ok(t, d.Plan(plan, tickets...))
		if len(plan.pieces) < 4 || plan.Lines != int64(place) {
			t.Fatalf("turn %d: %d lines in %d pieces: want %d lines", turn, plan.Lines,
				len(plan.pieces), place)
		}
		for s := range ssds {
			lo, hi := plan.SSDOffset[s], plan.SSDOffset[s+1]
			if !slices.Equal(plan.rows[lo:hi], wantRows[s]) ||
				!slices.Equal(plan.pos[lo:hi], wantPos[s]) {
				t.Fatalf("turn %d: the reads of SSD %d differ", turn, s)
			}
		}
		ok(t, d.Abandon(tickets[0]))
		for _, tk := range tickets {
			ok(t, tk.Close())
		}
	}
	ok(t, plan.Close())
	ok(t, d.Close())
}

// BenchmarkSetsPath is a lookup with the plan of its reads, of a million of 100 million rows, each
// once, with a directory of 10 million lines, by two workers; in processor time of all threads.
func BenchmarkSetsPath(b *testing.B) {
	const rows, part = 100_000_000, 1_000_000
	for _, name := range policy.Online() {
		b.Run(name, func(b *testing.B) {
			dev := device(b, 2)
			d := must(NewDynamic(dev, DynamicConfig{Rows: rows, RowBytes: 8, NoData: true,
				Slots: rows / 10, Policy: name, Directory: policy.InSets,
				Lines: Lines{SSDs: 12, RowsPerLine: 1, LineBytes: 8, RowStride: 8}}))(b)
			st, nodes := stream(b, dev), upload(b, dev, make([]int64, part))
			plan, tk := must(d.NewReadPlan())(b), must(d.NewTicket())(b)
			x := int64(0)
			step := func() (took int64) {
				list := hostmem.View[int64](nodes.Bytes())
				for i := range list { // a permutation of all rows, in pieces
					x = (x + 38_196_601) % rows
					list[i] = x
				}
				d.NextBatch()
				before := processTime(b)
				ok(b, d.Admit(limit(b), st, nodes.Ptr(), 0, part, tk))
				ok(b, d.Plan(plan, tk))
				took = processTime(b) - before
				ok(b, d.Finish(st, tk, nil, 0, 0))
				ok(b, d.Release(tk))
				return took
			}
			for range 14 { // full
				step()
			}
			b.ResetTimer()
			took := int64(0)
			for range b.N {
				took += step()
			}
			b.ReportMetric(float64(took)/float64(b.N)/part, "ns-cpu/row")
			ok(b, plan.Close())
			ok(b, tk.Close())
			ok(b, d.Close())
		})
	}
}

// processTime is the processor time of the process in ns.
func processTime(b *testing.B) int64 {
	var u unix.Rusage
	ok(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return u.Utime.Nano() + u.Stime.Nano()
}
