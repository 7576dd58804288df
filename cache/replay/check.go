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
// stack that reads files, which files tells, reads what direct I/O allows, or pages.
func Check(ctx context.Context, r *trace.Reader, files bool, progress func(stage string, done,
	total int64)) ([]Checked, error) {
	h := r.Header()
	c := &checker{h: h, gpuLines: h.GPULines}
	dynamicTier := h.Policy != Static && h.Policy != Belady
	bytes := h.SlotBytes%max(h.LBABytes, 1) == 0 && !files
	if dynamicTier {
		l := linesOf(h, h.LineBytes)
		if h.RowsPerLine == 1 {
			l = linesOf(h, LineRow)
		}
		if l.RowsPerLine != max(h.RowsPerLine, 1) || l.LineBytes != h.LineBytes {
			return nil, errs.New(errs.Usage,
				"the trace %s tells of lines of %d bytes with %d rows, and its layout gives %d and %d; it was written by another version",
				r.Path(), h.LineBytes, h.RowsPerLine, l.LineBytes, l.RowsPerLine)
		}
		bytes = bytes || l.RowsPerLine > 1 && !files
		c.view = &view{lines: l, bytes: commandBytes(h, l), union: h.Window > 0}
		d, err := c.directory()
		if err != nil {
			return nil, err
		}
		c.dyn = &dynamic{d: d, v: c.view, window: int(h.Window), again: r.Totals().Resets > 0}
		c.sim = c.dyn
	} else if h.Policy == Belady {
		c.planned = &planned{ctx: ctx, bytes: commandBytes(h, cache.Lines{RowsPerLine: 1}),
			fill: h.SuperbatchFill}
		c.sim = c.planned
	} else {
		c.static = &static{bytes: commandBytes(h, cache.Lines{RowsPerLine: 1})}
		c.sim = c.static
	}
	hot, err := r.Hotness()
	if err != nil {
		return nil, err
	}
	c.hot = hot
	c.place()

	var out []Checked
	open, again := false, false
	kind, epoch := 0, 0
	ends := func(l *trace.Live) {
		x := Checked{Kind: trace.KindName(kind), Epoch: epoch, Compared: l != nil, Bytes: bytes}
		if open {
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
			if !bytes || l.BytesSSD == 0 { // 0: some reads were repeated
				got.BytesSSD = l.BytesSSD
			}
			x.Equal = got == x.Live && (!open || kind == l.Kind && epoch == l.Epoch)
		}
		open = false
		out = append(out, x)
	}
	done := int64(0)
	err = r.Play(trace.Visitor{
		Place: func(tier int, rows []int64) error {
			c.placed = true
			if tier == 0 {
				c.gpu = newBits(rows)
			} else {
				c.cpu = newBits(rows)
			}
			c.put()
			return nil
		},
		Reset: func(lines int64) error {
			c.gpuLines, again = lines, true
			if c.dyn != nil {
				d, err := c.directory()
				if err != nil {
					return err
				}
				c.dyn.reset(d)
			}
			if !c.placed {
				c.place()
			}
			return nil
		},
		Batch: func(b *trace.Batch) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			if open && (kind != b.Kind || epoch != b.Epoch) {
				ends(nil)
			}
			if !open {
				kind, epoch, open, again = b.Kind, b.Epoch, true, false
			}
			x := &batch{index: b.Index, again: again, parts: b.Parts, seen: make([]seen, 1)}
			again = false
			if c.view != nil {
				if err := c.view.see(b.Parts, &x.seen[0]); err != nil {
					return err
				}
			}
			c.sim.batch(x)
			if done++; progress != nil && done%16 == 0 {
				progress("check", done, r.Totals().Batches)
			}
			return nil
		},
		Live: func(l trace.Live) error { ends(&l); return nil },
		Superbatch: func(s trace.Superbatch) error {
			if open && (kind != s.Kind || epoch != s.Epoch) {
				ends(nil)
			}
			if c.planned != nil {
				c.planned.mark(s)
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	if open {
		ends(nil)
	}
	if c.planned != nil && c.planned.err != nil {
		return nil, c.planned.err
	}
	return out, nil
}

type checker struct {
	h        trace.Header
	hot      []uint32
	gpuLines int64
	gpu, cpu bitset
	placed   bool // by the trace's word
	view     *view
	sim      simulator
	// one of them
	dyn     *dynamic
	static  *static
	planned *planned
}

func (c *checker) directory() (policy.Directory, error) {
	d, err := policy.New(policy.Config{Policy: c.h.Policy, Kind: c.h.Directory,
		Slots: c.gpuLines, Lines: c.view.lines.Count(c.h.Rows), Seed: c.h.Seed})
	if err != nil {
		return nil, fmt.Errorf("the trace's own configuration: %w", err)
	}
	return d, nil
}

// place fills the tiers by hotness, until the trace has a placement.
func (c *checker) place() {
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
