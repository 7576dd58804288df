package replay

import (
	"context"
	"fmt"

	"helios/cache"
	"helios/cache/policy"
	"helios/cache/trace"
	"helios/internal/errs"
)

// Checked is a pass of a run held against its replay.
type Checked struct {
	Kind     string `json:"kind"`
	Epoch    int    `json:"epoch"`
	Live     Counts `json:"live"` // Rows, Accesses and Reads are not counted by runs
	Replayed Counts `json:"replayed"`
	Compared bool   `json:"compared"` // false: the pass did not come to its end
	Bytes    bool   `json:"bytes_compared"`
	Equal    bool   `json:"equal"`
}

// Check plays a run's own configuration and holds it against the counters that the run recorded,
// pass by pass. Every number has to be equal. Bytes are compared where a command for a line, merged
// with others or not, moves the same: rows that share an LBA may be read by one command, and a
// stack that reads files (files) reads units of direct I/O, or pages.
func Check(ctx context.Context, r *trace.Reader, files bool, progress func(stage string, done,
	total int64)) ([]Checked, error) {
	c, err := newChecker(ctx, r, files)
	if err != nil {
		return nil, err
	}
	if c.hot, err = r.Hotness(); err != nil {
		return nil, err
	}
	c.placeByHotness()
	done := int64(0)
	err = r.Play(trace.Visitor{
		Place: c.place,
		Reset: c.reset,
		Batch: func(b *trace.Batch) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			if done++; progress != nil && done%16 == 0 {
				progress("check", done, r.Totals().Batches)
			}
			return c.batch(b)
		},
		Live: func(l trace.Live) error { c.endPass(&l); return nil },
		Superbatch: func(s trace.Superbatch) error {
			c.endOtherPass(s.Kind, s.Epoch)
			if c.planned != nil {
				c.planned.mark(s)
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	if c.open {
		c.endPass(nil)
	}
	if c.planned != nil && c.planned.err != nil {
		return nil, c.planned.err
	}
	return c.out, nil
}

// checker plays a run's own configuration.
type checker struct {
	h        trace.Header
	bytes    bool // bytes are compared
	hot      []uint32
	gpuLines int64
	gpu, cpu bitset
	placed   bool // the trace has placements
	view     *view
	sim      simulator
	// one of them
	dyn     *dynamic
	static  *static
	planned *planned

	open, again bool // a pass has batches; the next one stands behind a Reset
	kind, epoch int  // of the open pass
	out         []Checked
}

func newChecker(ctx context.Context, r *trace.Reader, files bool) (*checker, error) {
	h := r.Header()
	c := &checker{h: h, gpuLines: h.GPULines,
		bytes: h.SlotBytes%max(h.LBABytes, 1) == 0 && !files}
	rowBytes := commandBytes(h, cache.Lines{RowsPerLine: 1})
	switch h.Policy {
	case Static:
		c.static = &static{bytes: rowBytes}
		c.sim = c.static
		return c, nil
	case Belady:
		c.planned = &planned{ctx: ctx, bytes: rowBytes, fill: h.SuperbatchFill}
		c.sim = c.planned
		return c, nil
	}
	l := linesOf(h, h.LineBytes)
	if h.RowsPerLine == 1 {
		l = linesOf(h, LineRow)
	}
	if l.RowsPerLine != max(h.RowsPerLine, 1) || l.LineBytes != h.LineBytes {
		return nil, errs.New(errs.Usage,
			"the trace %s tells of lines of %d bytes with %d rows, and its layout gives %d and %d; it was written by another version",
			r.Path(), h.LineBytes, h.RowsPerLine, l.LineBytes, l.RowsPerLine)
	}
	c.bytes = c.bytes || l.RowsPerLine > 1 && !files
	c.view = &view{lines: l, bytes: commandBytes(h, l), union: h.Window > 0}
	d, err := c.directory()
	if err != nil {
		return nil, err
	}
	c.dyn = &dynamic{d: d, v: c.view, window: int(h.Window), again: r.Totals().Resets > 0}
	c.sim = c.dyn
	return c, nil
}

func (c *checker) place(tier int, rows []int64) error {
	c.placed = true
	if tier == 0 {
		c.gpu = newBits(rows)
	} else {
		c.cpu = newBits(rows)
	}
	c.put()
	return nil
}

func (c *checker) reset(lines int64) error {
	c.gpuLines, c.again = lines, true
	if c.dyn != nil {
		d, err := c.directory()
		if err != nil {
			return err
		}
		c.dyn.reset(d)
	}
	if !c.placed {
		c.placeByHotness()
	}
	return nil
}

func (c *checker) batch(b *trace.Batch) error {
	c.endOtherPass(b.Kind, b.Epoch)
	if !c.open {
		c.kind, c.epoch, c.open, c.again = b.Kind, b.Epoch, true, false
	}
	x := &batch{index: b.Index, again: c.again, parts: b.Parts, seen: make([]seen, 1)}
	c.again = false
	if c.view != nil {
		if err := c.view.see(b.Parts, &x.seen[0]); err != nil {
			return err
		}
	}
	c.sim.batch(x)
	return nil
}

// endOtherPass ends the open pass where the next record is of another.
func (c *checker) endOtherPass(kind, epoch int) {
	if c.open && (c.kind != kind || c.epoch != epoch) {
		c.endPass(nil)
	}
}

// endPass compares a pass with the run's counters l; nil: it did not come to its end.
func (c *checker) endPass(l *trace.Live) {
	x := Checked{Kind: trace.KindName(c.kind), Epoch: c.epoch, Compared: l != nil, Bytes: c.bytes}
	if c.open {
		c.sim.passEnds()
		all := c.sim.passes()
		x.Replayed = all[len(all)-1]
	}
	if l != nil {
		x.Kind, x.Epoch = trace.KindName(l.Kind), l.Epoch
		x.Live = Counts{Batches: l.Batches, RowsGPU: l.RowsGPU, RowsCPU: l.RowsCPU,
			RowsSSD: l.RowsSSD, BytesSSD: l.BytesSSD,
			Inserted: l.Inserted, Evicted: l.Evicted, Bypassed: l.Bypassed}
		got := x.Replayed
		got.Rows, got.Accesses, got.Reads = 0, 0, 0
		if !c.bytes || l.BytesSSD == 0 { // 0: some reads were repeated
			got.BytesSSD = l.BytesSSD
		}
		x.Equal = got == x.Live && (!c.open || c.kind == l.Kind && c.epoch == l.Epoch)
	}
	c.open = false
	c.out = append(c.out, x)
}

func (c *checker) directory() (policy.Directory, error) {
	d, err := policy.New(policy.Config{Policy: c.h.Policy, Kind: c.h.Directory,
		Slots: c.gpuLines, Lines: c.view.lines.Count(c.h.Rows), Seed: c.h.Seed})
	if err != nil {
		return nil, fmt.Errorf("the trace's own configuration: %w", err)
	}
	return d, nil
}

// placeByHotness fills the tiers, until the trace has a placement.
func (c *checker) placeByHotness() {
	if c.hot == nil {
		return
	}
	gpu := c.gpuLines
	if c.dyn != nil {
		gpu = 0
	}
	p := cache.Place(c.hot, gpu, c.h.CPURows)
	c.gpu, c.cpu = newBits(p.GPU), newBits(p.CPU)
	c.put()
}

// put makes the tiers what lookups from here on meet.
func (c *checker) put() {
	switch {
	case c.view != nil:
		c.view.cpu = c.cpu
	case c.static != nil:
		c.static.gpu, c.static.cpu = c.gpu, c.cpu
	}
}
