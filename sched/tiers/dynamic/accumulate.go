package dynamic

import (
	"context"
	"errors"
	"fmt"
	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tuner"
	"math/rand/v2"
	"slices"
	"time"
)

// The accumulator of GIDS (Park et al., VLDB 2024, section 3.2): a launch whose reads wait for each
// other's end reaches the share a of the SSDs' rate only when N = n_ssd·a·IOPS·(T_i+T_t)/(1−a)
// reads overlap, T_i being what passes until they are on their way and T_t what passes after the
// last. Small batches have fewer misses than that, so the reads of coming batches, which sampling
// ahead tells, go out with theirs. Training's batches stay as they are. Accesses that a cache
// absorbs ("redirected") are no reads, and are not counted: a group grows until its misses come to
// N.

// Calibration reads two sets of lines, several times each.
const (
	calibrationTimes = 5
	// calibrationReads is the longer set, by SSD: long enough for a rate, short enough for a slow
	// disk.
	calibrationReads = 512
	// calibrationLimit ends it early on SSDs that are slower than that.
	calibrationLimit = 2 * time.Second
)

// calibrationTime has the times of a set: the call that submits it, and until it was read.
type calibrationTime struct{ submit, whole time.Duration }

// Shares implements tuner.Accumulator.
func (d *Tiers) Shares(all bool) []float64 {
	if !d.Engine.Plan.Group || d.acc.Target <= 0 || d.acc.IOPS <= 0 {
		return nil
	}
	return tuner.AccumulatorShares(all)
}

// Aim implements tuner.Accumulator.
func (d *Tiers) Aim(share float64) error {
	a := d.acc
	a.Share, d.Engine.Config.Accumulate = share, share
	a.Target, a.Capped = a.ReadsToOverlap(float64(len(d.Engine.Store.SSDs))), ""
	if a.Target > d.limit {
		a.Target, a.Capped = d.limit, "memory has no room for more"
	}
	d.acc = a
	return nil
}

// mostGrouped is the most lines that a group may aim at: the staging buffers take no more than an
// eighth of what memory there is.
func (d *Tiers) mostGrouped() (int64, error) {
	e := d.Engine
	room := e.Device.Info().MemTotal
	if !e.OnGPU() {
		avail, err := hostmem.AvailableBytes()
		if err != nil {
			return 0, err
		}
		room = avail
	}
	if !e.Plan.Serial { // one group is read while another trains
		room /= 2
	}
	return max(room/8/d.lines.LineBytes, 1), nil
}

// calibrate measures what the accumulator aims at, on the run's own SSDs and stack, once.
func (d *Tiers) calibrate(ctx context.Context) error {
	e := d.Engine
	if !e.Plan.Group || d.acc.MaxBatches > 0 {
		return nil
	}
	start := time.Now()
	few, many, times, err := d.calibrationTimes(ctx)
	if err != nil {
		return errs.Errorf("measuring the SSDs for {accumulate}: %w", err)
	}
	n := float64(len(e.Store.SSDs))
	a := report.AccumulatorInfo{Calibration: report.Calibrate(e.Config.Accumulate, float64(few),
		times[0].whole.Seconds(), float64(many), times[1].whole.Seconds(), n),
		MaxBatches: plan.MaxGroup}
	// The call that submits returns when the reads are on their way, or are about to be.
	a.InitiateSeconds = min(times[0].submit.Seconds(), a.OverheadSeconds)
	a.TerminateSeconds = a.OverheadSeconds - a.InitiateSeconds
	if a.Target == 0 {
		a.Capped = fmt.Sprintf(
			"%d reads took no longer than %d, so that there is no rate to aim at: each batch is read by itself",
			many, few)
	}
	if limit := d.limit; a.Target > limit {
		a.Capped = fmt.Sprintf("the formula says %d, and memory has room for %d lines of %s",
			a.Target, limit, units.FormatBytes(d.lines.LineBytes))
		a.Target = limit
	}
	d.acc = a
	e.Observer.TellNote("%v", a)
	e.Trace.Run("calibrate accumulator", start)
	return nil
}

// calibrationTimes reads a short and a long set of lines in turns, and gives the median of each.
// Which lines they are depends on the seed alone.
func (d *Tiers) calibrationTimes(ctx context.Context) (few, many int64,
	median [2]calibrationTime, err error) {
	e := d.Engine
	ssds := int64(len(e.Store.SSDs))
	perSSD := int64(calibrationReads)
	for s := range e.Store.SSDs {
		perSSD = min(perSSD, d.of.RowsOn(s))
	}
	g := d.groups[0]
	perSSD = min(perSSD, g.staging.Size()/d.lines.LineBytes/ssds)
	if perSSD < 1 { // nothing to measure with
		return ssds, ssds, median, nil
	}
	few, many = ssds, ssds*perSSD
	if err := g.staging.Grow(many * d.lines.LineBytes); err != nil {
		return few, many, median, err
	}
	c := calibration{d: d, ssds: ssds, rng: rand.New(rand.NewPCG(e.Config.Seed, 0xacc))}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.open(many); err != nil {
		return few, many, median, err
	}
	var all [2][]calibrationTime
	begin := time.Now()
	for i := 0; i < calibrationTimes+1 && (i < 2 || time.Since(begin) < calibrationLimit); i++ {
		for k, per := range []int64{1, perSSD} {
			if err := prepare.Interrupted(ctx); err != nil {
				return few, many, median, err
			}
			t, err := c.read(ctx, per)
			if err != nil {
				return few, many, median, err
			}
			if i > 0 { // the first makes buffers
				all[k] = append(all[k], t)
			}
		}
	}
	for k := range all {
		slices.SortFunc(all[k], func(a, b calibrationTime) int { return int(a.whole - b.whole) })
		median[k] = all[k][len(all[k])/2]
	}
	return few, many, median, nil
}

// calibration reads sets of lines for their times.
type calibration struct {
	d        *Tiers
	ssds     int64
	rng      *rand.Rand
	ids, pos cuda.Buffer // nil: they are not there
}

// open makes room for the lists of so many lines.
func (c *calibration) open(lines int64) (err error) {
	dev := c.d.Engine.Device
	if c.ids, err = dev.Alloc(cuda.MemPinned, lines*8, "calibration lines"); err != nil {
		c.ids = nil
		return err
	}
	if c.pos, err = dev.Alloc(cuda.MemPinned, lines*4, "calibration lines"); err != nil {
		c.pos = nil
	}
	return err
}

// close frees the lists. No read is in flight.
func (c *calibration) close() (err error) {
	for _, b := range []*cuda.Buffer{&c.ids, &c.pos} {
		if *b != nil {
			err = errors.Join(err, (*b).Free())
			*b = nil
		}
	}
	return err
}

// read reads so many lines of each SSD.
func (c *calibration) read(ctx context.Context, per int64) (t calibrationTime, err error) {
	d, e := c.d, c.d.Engine
	ids, pos := hostmem.View[int64](c.ids.Bytes()), hostmem.View[uint32](c.pos.Bytes())
	off := make([]int64, c.ssds+1)
	for s := range c.ssds {
		off[s+1] = off[s] + per
		for i := range per {
			k := off[s] + i
			ids[k], pos[k] = c.rng.Int64N(d.of.RowsOn(int(s)))*c.ssds+s, uint32(k)
		}
	}
	rd, end := e.ReadContext(ctx)
	defer end()
	begin := time.Now()
	p, err := e.Store.Reader.Submit(rd, &gpuio.ReadSet{
		Rows: c.ids.Ptr(), Pos: c.pos.Ptr(), SSDOffset: off, Dst: d.groups[0].staging,
		DstStride: d.lines.LineBytes, DstBytes: per * c.ssds * d.lines.LineBytes,
	})
	if err != nil {
		return t, engine.ReadError(err)
	}
	t.submit = time.Since(begin)
	if _, err = p.Wait(rd); err != nil {
		if rd.Err() != nil { // still in flight: the reader ends before the lists are freed
			e.Store.Stopped = ctx.Err() != nil
			err = errors.Join(err, e.Store.Close(), c.close())
		}
		if stopped := prepare.Interrupted(ctx); stopped != nil {
			return t, errs.With(errs.Interrupted, errors.Join(stopped, err))
		}
		return t, engine.ReadError(err)
	}
	t.whole = time.Since(begin)
	return t, nil
}
